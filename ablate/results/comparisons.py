"""Comparisons of one sweep: arms, contrasts, main effects and interactions, each judged once.

Terminal, status, notes and reports read them here. Nothing of it needs pandas.
"""

from collections.abc import Callable
from dataclasses import replace
from functools import cached_property
from typing import Any

from ablate.experiment.arms import label
from ablate.experiment.schema import Asked, Metric
from ablate.results.attribution import Effect, Grid, grid, held_effects, interactions, main_effects
from ablate.results.blame import Search, names_of, replayed
from ablate.results.contrasts import Contrast, contrasts
from ablate.results.forked import sharpened, views
from ablate.results.log_ratios import Change, changes
from ablate.results.paired_stats import Difference, Verdict, paired_difference
from ablate.results.summary import ArmSummary, judge_learned, summaries
from ablate.store.ledger import Ledger
from ablate.training.workloads import abilities, unit

_MOST_CONTRASTS = 60
"""Largest number of contrasts that a table shows."""
_OF_FAMILY = ("kind", "reason", "p", "p_equivalence", "alone", "count", "planned")
"""Fields of a verdict that depend on the comparisons that it is corrected for."""


class Comparisons:
    """The comparisons of a sweep, each computed once, from a ledger that is opened for reading."""

    def __init__(self, ledger: Ledger) -> None:
        self.ledger = ledger
        self.question = ledger.facts.question or ledger.name
        self.metrics = ledger.facts.all_metrics
        self.metric = self.metrics[0]

    @cached_property
    def arms(self) -> list[ArmSummary]:
        """Every arm, by the main metric. One that the file asks for has the verdict of its own family, as it
        has wherever it is stated; so has the culprit of a search for a cause, which proves it at an error
        rate of its own."""
        own: dict[str, Verdict] = {}
        if self.search:
            proved: dict[str, Any] = {"kind": "worse", "reason": None, "alone": None, "planned": None}
            own = {
                arm.name: replace(arm.verdict, **proved) for arm in self._arms if arm.name in self.culprits
            }
        elif self.relative:
            own = {change.arm: change.verdict for change in self.relative_changes[0]}
        elif (asked := self.asked) and asked.arm is not None and self.asked_effects:
            ((_, stated),) = self.asked_effects
            family = {name: getattr(stated, name) for name in _OF_FAMILY}
            arm = next(arm for arm in self._arms if arm.name == asked.arm)
            own = {arm.name: replace(arm.verdict, **family)} if asked.against in (None, arm.baseline) else {}
        return [replace(arm, verdict=own.get(arm.name, arm.verdict)) for arm in self._arms]

    @cached_property
    def search(self) -> Search | None:
        """State of the search for a cause; None for another experiment."""
        return replayed(self.ledger) if self.ledger.facts.blame else None

    @cached_property
    def culprits(self) -> set[str]:
        """Names of the arms of the units that a search for a cause has proved."""
        proved = self.search.culprits if self.search else ()
        return {names_of(self.ledger).arm("proof", frozenset([unit])) for unit in proved}

    @cached_property
    def _arms(self) -> list[ArmSummary]:
        return summaries(self.ledger, self.metric)

    @cached_property
    def arms_by_metric(self) -> list[list[ArmSummary]]:
        """Every arm, by each metric of the file."""
        return [self._arms, *(summaries(self.ledger, metric) for metric in self.metrics[1:])]

    @cached_property
    def relative_changes(self) -> list[list[Change]]:
        """Relative change of every arm that has a baseline, by each metric of the file, judged within it."""
        asked = self.asked.arm if self.asked and self.asks_for_a_gap else None
        return [
            changes(arms, metric, None if place else asked)
            for place, (arms, metric) in enumerate(zip(self.arms_by_metric, self.metrics, strict=True))
        ]

    @property
    def asks_for_a_gap(self) -> bool:
        """True unless the file asks for an arm against another than its baseline."""
        asked = self.asked
        if asked is None or asked.against is None:
            return True
        return any(arm.name == asked.arm and arm.baseline == asked.against for arm in self._arms)

    @cached_property
    def relative(self) -> bool:
        """True without a model, as for tensors, whose comparisons are judged as relative changes."""
        members = self.ledger.members()
        return bool(members) and not abilities(members[0].resolved.workload).trains

    @cached_property
    def contrasts(self) -> list[Contrast]:
        """Every two arms that differ in one knob; empty if there are too many to read. One that the file asks
        for has the verdict of its own family, as it has wherever it is stated."""
        own = {self.asked_contrast(effect): verdict for effect, verdict in self.asked_effects if effect.knobs}
        return [
            replace(one, verdict=own.get((one.knob, one.change, one.held), one.verdict))
            for one in contrasts(self.arms, self.metric, _MOST_CONTRASTS)
        ]

    def asked_contrast(self, effect: Effect) -> tuple[str, str, str]:
        """Return knob, change and held knobs of the contrast that an effect of a knob is, if there is one."""
        levels = self.grid.levels if self.grid else ()
        held = {knob: effect.given[knob] for knob in levels if knob in effect.given}
        return effect.knobs[0], effect.change, label(held)

    @cached_property
    def grid(self) -> Grid | None:
        """Arms as a complete product of knobs, None if they are not one."""
        return grid(self.arms)

    @cached_property
    def unit(self) -> str:
        """Unit of the main metric; empty if it has no name."""
        return self.unit_of(self.metric)

    def unit_of(self, metric: Metric) -> str:
        """Return the unit of a metric; empty if it has no name."""
        return next((unit(member.resolved.workload, metric.name) for member in self.ledger.members()), "")

    @cached_property
    def turned_knobs(self) -> list[str]:
        """Knobs of the grid that belong to a recipe: neither presets nor knobs of the workload."""
        names = list(self.grid.levels) if self.grid else []
        return [name for name in names if not name.startswith("workload.") and name != "recipe"]

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
        return self.ledger.facts.design is not None

    @property
    def one_seed(self) -> bool:
        """True if no arm was given more than one seed."""
        return bool(self.arms) and max(arm.seeds for arm in self.arms) == 1

    @cached_property
    def asked(self) -> Asked | None:
        """The comparison, or family, that the file says its question is about; None if it does not say."""
        return self.ledger.facts.answer

    @property
    def family(self) -> str:
        """Family of comparisons that answers; empty if the file names none."""
        return (self.asked.family if self.asked else None) or ""

    @cached_property
    def asked_effects(self) -> list[tuple[Effect, Verdict]]:
        """The comparisons that the file asks for, a family of their own; [] if it asks for none, or if an arm
        of them has no finished run."""
        asked = self.asked
        if asked is None or asked.family:
            return []
        if asked.arm is None:
            return self._judged(lambda grid: held_effects(grid, asked.knob or "", asked.given))
        by_name = {arm.name: arm for arm in self._arms}
        arm = by_name.get(asked.arm)
        other = by_name.get(asked.against or (arm.baseline if arm else None) or "")
        if arm is None or other is None:
            return []

        def compared(those: list[ArmSummary]) -> list[Difference]:
            values = {one.name: one.values for one in those}
            return [paired_difference(values[arm.name], values[other.name], arm.interval)]

        (difference,), (view,) = compared(self._arms), views(self._arms, compared, 1)
        effect = Effect((), f"{arm.name} instead of {other.name}", sharpened(difference, view), arm.margin)
        margin = arm.margin or other.margin
        verdicts = judge_learned([(effect.effect, margin, (arm, other))], self.metric, seen=[view])
        return [(replace(effect, margin=margin), verdicts[0])]
