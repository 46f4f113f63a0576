"""Sentences of a report: the verdict, what limits it, how training went, and cautions."""

import math
from collections import Counter
from collections.abc import Mapping

import pandas as pd

from ablate.results import answer_tables
from ablate.results.answer_measurements import Measurements
from ablate.results.forked import design_of, estimand
from ablate.results.headline import headline, of_arms, of_best, of_knobs
from ablate.results.next_runs import seeds_to_settle
from ablate.results.number_text import number
from ablate.results.page import Part, Text
from ablate.results.summary import nothing_learned
from ablate.results.table_notes import dropped, emulated, null_warning, reading
from ablate.results.unmet_phases import never_began
from ablate.training.metric_names import parse

_MOST_NAMED = 8
"""Largest number of arms that a sentence names."""


class VerdictSentences(Measurements):
    """Part of `Answer` that states results in sentences."""

    def headline(self) -> list[Part]:
        """Return the verdict, what limits it (missing runs, divergence), and how to read the table below."""
        null = null_warning(self.arms)
        design = design_of(self.ledger)
        return [
            *([Text(null, "warning")] if null else []),
            Text(self.verdict(), "verdict"),
            *([Text(estimand(design, self.arms))] if design else []),
            *self.losses(),
            *([Text(seeds)] if (seeds := self.seeds_to_settle()) else []),
            Text(reading(self.arms)),
        ]

    def seeds_to_settle(self) -> str:
        """Return a sentence on the seeds and hours that would settle the comparisons of the verdict.

        It is empty for a search, and if nothing is undecided.
        """
        if self.ledger.fact("search"):
            return ""
        main = [verdict for _, verdict in self.main_effects] if self.turned_knobs else []
        return seeds_to_settle(
            self.ledger, main or [arm.verdict for arm in self.arms if arm.role == "listed"]
        )

    def verdict(self) -> str:
        """Return the verdict in one or two sentences: on every knob's main effect for a grid, else on every
        arm.

        All comparisons of the family are stated. If they are too many to read, those are that are decided
        after the correction for all, so nothing is picked by its size.
        """
        arms = self.grid.arms if self.grid and self.turned_knobs else self.arms
        if nothing_learned(arms):
            best = min((arm for arm in arms if not math.isnan(arm.loss)), key=lambda arm: arm.loss)
            subset = "" if nothing_learned(self.arms) else " of the arms that turn these knobs"
            reference = math.nan if best.context_free is None else best.context_free
            return (
                f"No answer: nothing was learned. The lowest loss{subset} is {number(best.loss)}"
                f" ({best.name}); a model that ignores its input reaches {number(reference)}. Train for more"
                " steps, or change the learning rate."
            )
        statements = (
            of_knobs(self.main_effects, self.unit, self.averaged)
            if self.turned_knobs
            else of_arms(self.arms, self.unit)
        )
        return headline(statements) if statements else self._no_comparison()

    def _no_comparison(self) -> str:
        """Return the reason why no comparison has two pairs, or the best arm of a search so far."""
        searched = [arm for arm in self.shown if arm.role == "searched" and arm.values and not arm.pruned]
        if searched:
            again = next((arm for arm in self.arms if arm.role == "confirmed"), None)
            return of_best(searched, again, self.metric.name, self.unit)
        if any(arm.diverged for arm in self.arms) and not any(arm.values for arm in self.arms):
            return "Every run diverged: no arm has a finite value to compare."
        if self.one_seed:
            return (
                "One seed per arm: no difference has an interval, so none can be told from chance. Nothing"
                " is claimed."
            )
        if len([arm for arm in self.arms if arm.values]) == 1:
            return "Only one arm has finished, so there is nothing to compare it with."
        return "No answer yet: no arm shares two finished seeds with its baseline."

    def losses(self) -> list[Part]:
        """Return sentences on missing runs, pruned and refused arms, phases that never began, and
        divergence."""
        parts: list[Part] = []
        missing = sum(len(arm.missing) for arm in self.arms)
        if missing:
            total = sum(arm.seeds for arm in self.arms)
            text = f"{missing} of {total} runs are missing ({self._open_statuses()})"
            parts.append(
                Text(f"**Incomplete:** {text}. Run the same command again to continue them.", "warning")
            )
        parts += map(Text, (*dropped(self.arms), *never_began(self.ledger)))
        diverged = [
            f"{arm.name} on seed{'s' if len(arm.diverged) > 1 else ''} {', '.join(map(str, arm.diverged))}"
            for arm in self.arms
            if arm.diverged
        ]
        if diverged:
            others = " and others" if len(diverged) > _MOST_NAMED else ""
            names = f"{'; '.join(diverged[:_MOST_NAMED])}{others}"
            parts.append(Text(f"**Diverged:** {names}. Gaps leave these seeds out.", "warning"))
        unmeasured = [arm.name for arm in self.arms if arm.unmeasured]
        if unmeasured:
            names = ", ".join(unmeasured[:_MOST_NAMED])
            parts.append(Text(f"**{self.metric.name} is missing** in finished runs of {names}.", "warning"))
        return parts

    def _open_statuses(self) -> str:
        """Return the number of runs by status, of those that are not over: `1 failed, 2 pending`."""
        counts = Counter(
            member.status
            for member in self.ledger.members()
            if member.status not in ("done", "diverged", "pruned")
        )
        return ", ".join(f"{count} {status}" for status, count in counts.items())

    def importances(self, shares: Mapping[str, float]) -> Text | None:
        """Return a caution on knobs' shares of the variance (fANOVA), None if there are no shares.

        Args:
            shares: Share of the objective's variance by knob, from 0 to 1.
        """
        if not shares:
            return None
        return Text(
            "Shares of the variance over the arms that were tried (fANOVA). They depend on where the sampler"
            " looked and are no effect sizes: a knob with a small share may matter. A gap with its interval"
            " says by how much."
        )

    def health(self, table: pd.DataFrame) -> list[Part]:
        """Return sentences on how training went, and the table of what guards did.

        Args:
            table: Records as `records` returns them, which include the metrics `nan/*`.
        """
        statuses = Counter(member.status for member in self.ledger.members())
        counts = [text for text in set(table["metric"]) if parse(text).is_count] if len(table) else []
        affected = (
            sorted(set(table.loc[table["metric"].isin(counts) & (table["value"] > 0), "arm"]))
            if counts
            else []
        )
        runs = ", ".join(f"{count} {status}" for status, count in statuses.items())
        finite = (
            f"NaN or infinite values were recorded in {', '.join(affected[:_MOST_NAMED])}."
            if affected
            else "No NaN or infinite value was recorded."
        )
        interventions = answer_tables.interventions_table(self.ledger)
        verdict = Text(f"{statuses.total()} runs: {runs}. {finite}", "verdict")
        return [verdict, *self.losses(), *([interventions] if interventions else [])]

    def emulation(self) -> Text | None:
        """Return a caution on speed and memory if formats were emulated."""
        note = emulated(self.ledger)
        return Text(note) if note else None
