"""Results of a sweep as pandas frames, for notebooks and scripts of one's own: `ablate.reports.open`.

    results = ablate.reports.open("rht_sr")
    results.arms            # a row for each arm: mean, gap to its baseline, interval, verdict
    results.effects         # main effects and interactions of a complete grid
    results.damage          # what each gap is made of: the cast of the last weights, and the training
    results.trials          # a row for each run: arm, seed, status, value
    results.records("val/loss", "quant/*/sqnr_db")    # every recorded number

The numbers are those of the sweep's own tables and report. A ledger whose rows or records differ from what
the sweep wrote is refused, as it is there.
"""

import json
import math
import os
from collections.abc import Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import pandas as pd

from ablate.errors import InputError
from ablate.reports.plain_text import csv_cell
from ablate.results import attribution
from ablate.results.decomposition import damages
from ablate.results.summary import summaries
from ablate.store import records
from ablate.store.checked_ledger import folders, open_checked, unverified
from ablate.store.ledger import Ledger

if TYPE_CHECKING:
    from ablate.experiment.schema import Metric
    from ablate.results.paired_stats import Difference
    from ablate.results.summary import ArmSummary


class Results(AbstractContextManager["Results"]):
    """A sweep's results, read from its ledger; `open` makes it. A context manager, which closes the ledger.

    Attributes:
        metric: name of the metric that arms are compared by.
        unverified: sentence on the trials whose records have no seal to be compared with; empty if all have.
    """

    def __init__(self, ledger: Ledger, metric: "Metric") -> None:
        self._ledger, self._metric = ledger, metric
        self.metric, self.unverified = metric.name, unverified(ledger)

    def __exit__(self, *_: object) -> None:
        """Close the ledger."""
        self._ledger.close()

    def __repr__(self) -> str:
        """Return the sweep's name and its size, and what is unverified."""
        size = f"{self._ledger.name}: {len(self._ledger.arms())} arms, by {self.metric}"
        return f"<results of {', '.join(filter(None, [size, self.unverified]))}>"

    @property
    def arms(self) -> pd.DataFrame:
        """A row for each arm.

        Columns:
            arm, baseline: names; a baseline's own `baseline` is missing (None, NaN from pandas 3 on).
            seeds, finished: seeds that it was given, and those with a finite value of the metric.
            mean: mean of the metric over those.
            gap, low, high: mean of the differences to its baseline on the same seeds, and its 95 % interval.
            pairs: seeds that the two have in common.
            verdict, reason: better, worse, same, undecided or unjudged; and why it is no more than that.
            p, p_equivalence: of a difference, and of equivalence within `min_effect`; Holm-corrected.
            sqnr_db, tokens_per_s, memory, nans, diverged: as in the report's table; memory in bytes.
            One for each knob, `recipe.` and `workload.` paths in full.
        """
        return pd.DataFrame([_arm(arm) for arm in summaries(self._ledger, self._metric)])

    @property
    def effects(self) -> pd.DataFrame:
        """Main effects, and interactions of two knobs, of a complete grid; without rows for other designs.

        Columns:
            knobs, change: what is turned, and how.
            effect, low, high, pairs: mean over the other knobs on the same seeds, and its 95 % interval.
        """
        grid = attribution.grid(summaries(self._ledger, self._metric))
        found = [] if grid is None else [*attribution.main_effects(grid), *attribution.interactions(grid)]
        rows = [
            {"knobs": " x ".join(each.knobs), "change": each.change, **_interval(each.effect, "effect")}
            for each in found
        ]
        return pd.DataFrame(rows, columns=["knobs", "change", "effect", "low", "high", "pairs"])

    @property
    def damage(self) -> pd.DataFrame:
        """Parts of each gap; without rows for a metric that has no second reading in high precision.

        Columns:
            arm, gap: the gap to the baseline, over the seeds that have both readings.
            direct, direct_low, direct_high: damage of the cast of the last weights, and its 95 % interval.
            learnt, learnt_low, learnt_high: the gap with both arms' weights read in high precision.
            pairs: seeds.
        """
        found = damages(self._ledger, summaries(self._ledger, self._metric), self.metric)
        rows: list[dict[str, object]] = []
        for damage in found:
            row: dict[str, object] = {"arm": damage.arm, "gap": damage.gap.mean}
            for part, one in (("direct", damage.direct), ("learnt", damage.learnt)):
                row |= {part: one.mean, f"{part}_low": one.low, f"{part}_high": one.high}
            rows.append(row | {"pairs": damage.gap.pairs})
        parts = [f"{part}{end}" for part in ("direct", "learnt") for end in ("", "_low", "_high")]
        return pd.DataFrame(rows, columns=["arm", "gap", *parts, "pairs"])

    @property
    def windows(self) -> pd.DataFrame:
        """Damage at every horizon and position of a forked design; without rows for full runs.

        Columns:
            arm: its name.
            position, window: in steps; `position` is NaN for means over all positions.
            damage, low, high, pairs: arm minus baseline and its 95 % interval, not corrected.
        """
        rows = []
        for arm in summaries(self._ledger, self._metric):
            if arm.view is None:
                continue
            longest = max(arm.view.horizons)
            cells = [(math.nan, steps, one) for steps, one in arm.view.horizons.items()]
            cells += [(step, longest, one) for step, one in arm.view.positions.items()]
            rows += [
                {"arm": arm.name, "position": step, "window": steps, **_interval(one, "damage")}
                for step, steps, one in cells
            ]
        return pd.DataFrame(rows, columns=["arm", "position", "window", "damage", "low", "high", "pairs"])

    @property
    def trials(self) -> pd.DataFrame:
        """A row for each arm and seed.

        Columns:
            arm, seed, trial: the trial's id; arms with the same spec share one.
            status, reason: done, failed, diverged, pruned, ...; and why.
            value: last value of the metric, NaN if there is none.
            seconds: how long it ran. reused: True if an earlier sweep ran it.
        """
        lasts = self._ledger.finals(lambda name: str(name) == self.metric)
        rows = [
            {
                "arm": member.name,
                "seed": member.seed,
                "trial": member.id,
                "status": member.status,
                "reason": member.reason,
                "value": lasts.get(member.trial, {}).get(self.metric, math.nan),
                "seconds": member.seconds,
                "reused": member.reused,
            }
            for member in self._ledger.members()
        ]
        return pd.DataFrame(rows)

    def records(self, *metrics: str) -> pd.DataFrame:
        """Return every recorded number, a row for each.

        Args:
            metrics: names, or patterns such as `quant/*/sqnr_db`; without any, all.

        Returns:
            Columns arm, seed, trial, step, tokens, metric, value, and others; `ablate.store.records.frame`
            describes them.
        """
        return records.frame(self._ledger, metrics=metrics or None)

    def write(
        self, folder: Path, form: Literal["csv", "parquet"], records: bool = True
    ) -> Iterator[tuple[Path, int]]:
        """Write the tables that have rows, with `records` also every recorded number, as files of a folder,
        and yield the path and the rows of each."""
        tables = {name: getattr(self, name) for name in ("arms", "effects", "damage", "windows", "trials")}
        tables |= {"records": self.records()} if records else {}
        folder.mkdir(parents=True, exist_ok=True)
        for path, table in ((folder / f"{name}.{form}", each) for name, each in tables.items() if len(each)):
            if form == "parquet":
                mixed = [column for column in table if table[column].map(type).nunique() > 1]
                table.astype(dict.fromkeys(mixed, str)).to_parquet(path, index=False)
            else:
                table.rename(columns=csv_cell).map(csv_cell).to_csv(path, index=False, lineterminator="\n")
            yield path, len(table)


def open(sweep: str | Path, *, state: str | Path | None = None, metric: str | None = None) -> Results:
    """Open the results of a sweep, also of one that is still running.

    Args:
        sweep: its name, or its YAML file.
        state: state folder; None: $ABLATE_STATE, or `runs`.
        metric: name of the metric to compare arms by, of those that the experiment has; None: its first.

    Raises:
        FileNotFoundError: there is no such sweep in the state folder.
        ValueError: the sweep does not compare by this metric, or its ledger is damaged.
    """
    (folder,) = folders(Path(state or os.environ.get("ABLATE_STATE") or "runs"), [str(sweep)])
    try:
        ledger = open_checked(folder / "ledger.db")
    except InputError as error:
        raise ValueError(str(error)) from None
    try:
        compared = {one.name: one for one in ledger.facts.all_metrics}
        if metric is not None and metric not in compared:
            raise ValueError(f"{metric}: {folder.name} compares by {', '.join(compared)}")
        return Results(ledger, compared[metric] if metric else next(iter(compared.values())))
    except BaseException:
        ledger.close()
        raise


def _arm(arm: "ArmSummary") -> dict[str, object]:
    return {
        "arm": arm.name,
        "baseline": arm.baseline,
        "seeds": arm.seeds,
        "finished": len(arm.values),
        "mean": arm.mean,
        **_interval(arm.gap, "gap"),
        "verdict": arm.verdict.kind if arm.gap else None,
        "reason": arm.verdict.reason,
        "p": arm.verdict.p,
        "p_equivalence": arm.verdict.p_equivalence,
        "sqnr_db": arm.sqnr_db,
        "tokens_per_s": arm.tokens_per_s,
        "memory": arm.memory,
        "nans": arm.nans,
        "diverged": len(arm.diverged),
    } | {
        knob: json.dumps(value) if isinstance(value, list | dict) else value
        for knob, value in arm.knobs.items()
    }


def _interval(difference: "Difference | None", name: str) -> dict[str, object]:
    """Return the columns of a difference; NaN without one."""
    if difference is None:
        return {name: math.nan, "low": math.nan, "high": math.nan, "pairs": 0}
    return {name: difference.mean, "low": difference.low, "high": difference.high, "pairs": difference.pairs}
