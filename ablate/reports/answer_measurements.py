"""Numbers that the parts of a report share, beside its comparisons: arms that are shown, and records."""

from functools import cached_property
from pathlib import Path

import pandas as pd

from ablate.experiment.schema import Metric
from ablate.files import Holder, holder_of
from ablate.reports.comparison_tables import foremost
from ablate.results.attribution import Grid, interactions, main_effects
from ablate.results.comparisons import Comparisons
from ablate.results.headline import Headline, headline_of
from ablate.results.intervals import ALPHA
from ablate.results.paired_stats import holm, p_value
from ablate.results.summary import ArmSummary
from ablate.store.ledger import Ledger
from ablate.store.records import frame

MOST_ARMS = 40
"""Largest number of arms that a table shows, unless another is given."""


class Measurements(Comparisons):
    """One experiment, read back from its ledger, which is opened for reading.

    `out`: folder for the report's files, figures as SVG and all numbers as CSV; None: nothing is saved.
    `most_arms`: largest number of arms that a table shows, without their baselines.
    """

    def __init__(self, ledger: Ledger, out: Path | None = None, most_arms: int = MOST_ARMS) -> None:
        super().__init__(ledger)
        self.out, self.most_arms = out, most_arms

    @cached_property
    def answer(self) -> Headline:
        """The answer, as every surface states it."""
        return headline_of(self)

    @cached_property
    def running(self) -> bool:
        """True while another process runs the sweep: one that writes the report at its end does not."""
        if holder_of(self.ledger.path.with_name("lock")) in (None, Holder.this_process()):
            return False
        return any(member.status in ("pending", "running") for member in self.ledger.members())

    @cached_property
    def shown(self) -> list[ArmSummary]:
        """Arms that tables show: at most about `most_arms`. Those of a search are sorted, the best first."""
        arms = foremost(self.arms, self.metric, self.most_arms)
        if not self.ledger.facts.search:
            return arms
        sign = 1 if self.metric.direction == "minimize" else -1
        return sorted(
            arms,
            key=lambda arm: (not arm.is_baseline, arm.role != "confirmed", not arm.values, sign * arm.mean),
        )

    @property
    def mapped_grid(self) -> Grid | None:
        """The grid if a heat map of it shows more than noise: a knob has three levels or more, and an effect
        of a knob, or of two together, differs from zero after Holm's correction."""
        if self.grid is None or max(map(len, self.grid.levels.values())) < 3:
            return None
        effects = [*main_effects(self.grid), *interactions(self.grid)]
        corrected = holm([p_value(effect.effect) for effect in effects])
        return self.grid if any(p < ALPHA for p in corrected) else None

    @cached_property
    def objectives(self) -> dict[Metric, list[ArmSummary]] | None:
        """Arms by each of several objectives; None if there is only one."""
        return dict(zip(self.metrics, self.arms_by_metric, strict=True)) if len(self.metrics) > 1 else None

    @property
    def journal(self) -> Path:
        """Path of the journal of the sweep's Optuna study."""
        return self.ledger.path.parent / "optuna.log"

    def records(self, *metrics: str) -> pd.DataFrame:
        """Return the records of metrics, names or patterns such as `quant/*`, as one tidy frame, one record a
        row (see `records.frame`): columns sweep, arm, baseline, seed, trial, status, step, tokens, metric and
        value, and one for each knob; no rows if nothing was recorded. Copies of a run, which count as one in
        comparisons, are left out."""
        again = {
            member.id for arm in self.arms for each in arm.copies if each.sure for member in each.members[1:]
        }
        table = frame(self.ledger, metrics=metrics)
        return table[~table["trial"].isin(again)] if again else table
