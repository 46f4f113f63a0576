"""Sentences of a report: the verdict, what limits it, how training went, and cautions."""

from collections import Counter
from collections.abc import Mapping
from functools import cached_property

import pandas as pd

from ablate.recipes import Recipe
from ablate.reports import answer_tables, operand_health
from ablate.reports.answer_measurements import Measurements
from ablate.reports.page import Answered, Chips, Command, Part, Text
from ablate.reports.run_state import failures_table, running
from ablate.reports.table_notes import dropped, emulated, null_warning, smallest_damage
from ablate.results.forked import estimand
from ablate.results.headline import Headline, headline_of
from ablate.results.unmet_phases import never_began
from ablate.store.judged import Judged
from ablate.training.metric_names import parse

_MOST_NAMED = 8
"""Largest number of arms that a sentence names."""


class VerdictSentences(Measurements):
    """Part of `Answer` that states results in sentences."""

    @cached_property
    def answer(self) -> Headline:
        """The answer, as every surface states it."""
        return headline_of(self)

    def headline(self) -> list[Part]:
        """Return the answer with its checks, what limits it, what to do next, and how to read the table."""
        null, answer = null_warning(self.arms), self.answer
        chips = Chips([(check.kind, check.text) for check in answer.checks])
        if self.running:
            begun = any(arm.values or arm.diverged for arm in self.arms)
            return [running(self.ledger), *([chips] if begun else []), *self.losses()]
        design = self.ledger.facts.design
        settling = [Text(answer.settling.text)] if answer.settling else []
        return [
            Answered(answer.lead, answer.text, answer.answered, answer.valid, even=answer.even),
            chips,
            *([Command(answer.command, answer.cost)] if answer.command else settling),
            *([Text(answer.simplest)] if answer.simplest else []),
            *([Text(null, "warning")] if null else []),
            *([Text(f"{estimand(design, self.arms)} {smallest_damage(self.arms)}")] if design else []),
            *self.losses(),
        ]

    def verdict(self) -> str:
        """Return the answer in one or two sentences."""
        return self.answer.sentence

    def losses(self) -> list[Part]:
        """Return sentences on missing runs, pruned and refused arms, phases that never began, and divergence,
        and the table of the reasons of failed runs."""
        parts: list[Part] = []
        missing = sum(len(arm.missing) for arm in self.arms)
        failures = failures_table(self.ledger, self.out)
        if missing and not self.running and any(arm.values or arm.diverged for arm in self.arms):
            total = sum(arm.seeds for arm in self.arms)
            text = f"{missing} of {total} runs are missing ({self._open_statuses()})"
            remedy = "Once the cause is removed, the" if failures else "The"
            remedy += " same command continues them."
            own = any(arm.missing for arm in self.arms if arm.role != "foreign")
            remedy = remedy if own and not Judged.alone(self.ledger) else ""
            parts.append(Text(f"**Incomplete:** {text}. {remedy}".rstrip(), "warning"))
        parts += [failures] if failures else []
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
        """Return a caution on knobs' shares of the variance (fANOVA), from 0 to 1; None if there are no
        shares."""
        if not shares:
            return None
        return Text(
            "Shares of the variance over the arms that were tried (fANOVA). They depend on where the sampler"
            " looked and are no effect sizes: a knob with a small share may matter. A gap with its interval"
            " says by how much."
        )

    def health(self, table: pd.DataFrame) -> list[Part]:
        """Return sentences on how training went, and the table of what guards did, by a frame as `records`
        returns it, which includes the metrics `nan/*`."""
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
        interventions = answer_tables.interventions_table(self)
        odd = operand_health.exceptions(table)
        alarms = answer_tables.alarms_table(self.ledger)
        healthy = not (odd or alarms or affected or interventions) and {*statuses} <= {"done"}
        usual = ""
        if not operand_health.recorded(table) and self._quantised():
            usual = " No operand was measured."  # `telemetry: {every: 0}`
        elif operand_health.recorded(table) and not (odd or alarms):
            usual = f" No operand, layer or share stands out{operand_health.most_zero(table)}."
        verdict = Answered(
            "Healthy." if healthy else "To look at.",
            f"{statuses.total()} runs: {runs}. {finite}{usual}",
            healthy,
            True,
        )
        warnings = [Text(text, "warning") for text in odd]
        lost = answer_tables.divergences_table(self.ledger)
        return [verdict, *warnings, *self.losses(), *filter(None, [lost, alarms, interventions])]

    def _quantised(self) -> bool:
        """Return True if an arm that was computed here quantises an operand."""
        recipes = (member.resolved.recipe for member in self.ledger.members() if member.resolved.engine)
        return any(not Recipe.model_validate(each, strict=False).plain for each in recipes if each)

    def emulation(self) -> Text | None:
        """Return a caution on speed and memory if formats were emulated."""
        note = emulated(self.ledger)
        return Text(note) if note else None
