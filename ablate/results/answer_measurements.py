"""Numbers that the parts of a report share: arms, contrasts, main effects, records. Each is computed once."""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import pandas as pd

from ablate.experiment.schema import Metric
from ablate.results.attribution import Effect, Grid, grid, interactions, main_effects
from ablate.results.contrasts import Contrast, contrasts
from ablate.results.forked import design_of, sharpened, views
from ablate.results.ledger import Ledger
from ablate.results.paired_stats import Difference, Verdict
from ablate.results.records import frame
from ablate.results.summary import ArmSummary, foremost, judge_learned, metrics_of, summaries
from ablate.training.workloads import unit

MOST_ARMS = 40
"""Largest number of arms that a table shows, unless another is given."""
_MOST_CONTRASTS = 60
"""Largest number of contrasts that a table shows."""


class Measurements:
    """One experiment, read back from its ledger.

    Args:
        ledger: Ledger of the sweep, opened for reading.
        out: Folder for the report's files: figures as PNG and SVG, all numbers as CSV. None: nothing is
            saved.
        most_arms: Largest number of arms that a table shows, without the baselines of these.
    """

    def __init__(self, ledger: Ledger, out: Path | None = None, most_arms: int = MOST_ARMS) -> None:
        self.ledger, self.out, self.most_arms = ledger, out, most_arms
        self.question = ledger.fact("question") or ledger.name
        self.metrics = metrics_of(ledger)
        self.metric = self.metrics[0]

    @cached_property
    def arms(self) -> list[ArmSummary]:
        """Every arm, by the main metric."""
        return summaries(self.ledger, self.metric)

    @cached_property
    def shown(self) -> list[ArmSummary]:
        """Arms that tables show: at most about `most_arms`. The arms of a search are sorted, the best
        first."""
        arms = foremost(self.arms, self.metric, self.most_arms)
        if not self.ledger.fact("search"):
            return arms
        sign = 1 if self.metric.direction == "minimize" else -1
        return sorted(
            arms,
            key=lambda arm: (not arm.is_baseline, arm.role != "confirmed", not arm.values, sign * arm.mean),
        )

    @cached_property
    def contrasts(self) -> list[Contrast]:
        """Every two arms that differ in one knob; empty if there are too many to read."""
        return contrasts(self.arms, self.metric, _MOST_CONTRASTS)

    @cached_property
    def grid(self) -> Grid | None:
        """Arms as a complete product of knobs, None if they are not one."""
        return grid(self.arms)

    def by(self, metric: Metric) -> list[ArmSummary]:
        """Return the summaries of all arms by another metric.

        Args:
            metric: Metric that is compared.
        """
        return summaries(self.ledger, metric)

    @cached_property
    def objectives(self) -> dict[Metric, list[ArmSummary]] | None:
        """Arms by each of several objectives; None if there is only one."""
        return {metric: self.by(metric) for metric in self.metrics} if len(self.metrics) > 1 else None

    @cached_property
    def unit(self) -> str:
        """Unit of the main metric; empty if it has no name."""
        return next((unit(member.spec, self.metric.name) for member in self.ledger.members()), "")

    @property
    def journal(self) -> Path:
        """Path of the journal of the sweep's Optuna study."""
        return self.ledger.path.parent / "optuna.log"

    def records(self, *metrics: str) -> pd.DataFrame:
        """Return the records of these metrics as one tidy frame, one record a row (see `records.frame`).

        Args:
            metrics: Names of metrics, or patterns such as `quant/*`.

        Returns:
            Columns sweep, arm, baseline, seed, trial, status, step, tokens, metric and value, and one for
            each
                knob; no rows if nothing was recorded.
        """
        return frame(self.ledger, metrics=metrics)

    @cached_property
    def turned_knobs(self) -> list[str]:
        """Knobs of the grid that belong to a recipe: neither presets nor knobs of the workload."""
        names = list(self.grid.levels) if self.grid else []
        return [name for name in names if not name.startswith("workload.") and name != "recipe"]

    @property
    def averaged(self) -> bool:
        """True if a main effect is a mean over other knobs, of the recipe or of the workload."""
        return self.grid is not None and len(self.grid.levels) > 1

    @cached_property
    def main_effects(self) -> list[tuple[Effect, Verdict]]:
        """Main effects of `turned_knobs`, or of all knobs if there are none of these, judged together."""
        if self.grid is None:
            return []
        chosen = self.turned_knobs or list(self.grid.levels)
        return self._judged(
            lambda grid: [effect for effect in main_effects(grid) if effect.knobs[0] in chosen]
        )

    @cached_property
    def interactions(self) -> list[tuple[Effect, Verdict]]:
        """Interactions of every two knobs, judged together."""
        return self._judged(interactions)

    def _judged(self, compute: Callable[[Grid], list[Effect]]) -> list[tuple[Effect, Verdict]]:
        """Return effects of the grid with their verdicts, corrected over all of them."""
        if self.grid is None:
            return []
        effects = compute(self.grid)

        def again(arms: list[ArmSummary]) -> list[Difference]:
            other = grid(arms)
            return [effect.effect for effect in compute(other)] if other else []

        seen = views(self.arms, again, len(effects))
        effects = [
            replace(effect, effect=sharpened(effect.effect, view))
            for effect, view in zip(effects, seen, strict=True)
        ]
        compared = [(effect.effect, effect.margin, self.grid.arms) for effect in effects]
        return list(zip(effects, judge_learned(compared, self.metric, seen=seen), strict=True))

    @property
    def forked(self) -> bool:
        """True for a forked design: its arms share a trunk, and have values at the end of windows alone."""
        return design_of(self.ledger) is not None

    @property
    def one_seed(self) -> bool:
        """True if no arm was given more than one seed."""
        return bool(self.arms) and max(arm.seeds for arm in self.arms) == 1
