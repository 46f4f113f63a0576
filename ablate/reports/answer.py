"""An experiment's answer, as its report shows it: the verdict first, then the tables and facts that it rests
on.

    answer = Answer.open("runs", "rht_sr")
    answer.verdict()      # "rht: true instead of false is undecided, +0.0063 ±0.0187 nats, on average ..."
    answer.effects()      # the table of arms

The numbers are read in answer_measurements.py, tables made in answer_tables.py, figures in figures/. Nothing
is drawn or computed a second time: every number is one of `summary`, `contrasts` or `attribution`.
"""

import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Literal, Self

import pandas as pd

from ablate.experiment.schema import START
from ablate.recipes import Recipe
from ablate.reports import answer_tables, operand_health
from ablate.reports.answer_measurements import Measurements
from ablate.reports.change_table import change_table
from ablate.reports.comparison_tables import foremost
from ablate.reports.dose_parts import dose_parts
from ablate.reports.effect_table import Line, effect_table, lines
from ablate.reports.figures.effects import LAYERS_SQNR, operand_errors
from ablate.reports.figures.style import Picture
from ablate.reports.figures.tables import FEWEST_POINTS
from ablate.reports.image_rows import FILE, image_rows
from ablate.reports.knob_columns import by_knobs
from ablate.reports.maps import map_parts, search_parts
from ablate.reports.page import Answered, Chips, Code, Command, Gallery, Part, Section, Text, section
from ablate.reports.run_tables import failures_table, recipes_table, running, runs_table
from ablate.reports.table import Table
from ablate.reports.table_notes import dropped, emulated, null_warning, reading, smallest_damage
from ablate.results.forked import estimand
from ablate.results.number_text import counted
from ablate.results.paired_stats import FEWEST_DISTINCT
from ablate.results.subject import compared, described, seeds_text
from ablate.results.unmet_phases import never_began
from ablate.results.unpaired import pairing
from ablate.store.checked_ledger import open_ledger
from ablate.store.judged import Judged
from ablate.store.trial_store import Store
from ablate.training.metric_names import parse

_MOST_NAMED = 8
"""Largest number of arms that a sentence names."""
_MOST_GALLERIES = 12
"""Largest number of arms whose pictures are shown."""


class Answer(Measurements):
    """One experiment, read back from its ledger, which is opened for reading. Every part of its report is a
    method; those that are only named here are described where their tables are made.

    `out`: folder for the report's files, figures as SVG and all numbers as CSV; None: nothing is saved.
    `most_arms`: largest number of arms that a table shows, without their baselines.
    """

    @classmethod
    def open(cls, state: str | Path, sweep: "str | Self", out: str | Path | None = None) -> Self:
        """Return the answer of a sweep in a state folder; FileNotFoundError if it has not been run. `sweep`:
        its name, or its answer, which the notebooks of a report share; `out`: folder for the report's files;
        None: nothing is saved."""
        answer = cls(open_ledger(Path(state), sweep)) if isinstance(sweep, str) else sweep
        answer.out = Path(out) if out else None
        return answer

    def show(self, title: str, *parts: Part | Sequence[Part | None] | None, folded: bool = False) -> Section:
        """Return a section of the report, and save its files in `out`.

        Its parts are texts, tables and pictures, or lists of them. None, and a table with no more than one
        column, is left out; a section without parts is empty. If it is `folded`, a reader opens it to see the
        parts.
        """
        shown = section(title, *parts, folded=folded)
        shown = replace(shown, parts=[by_knobs(part, self.arms) for part in shown.parts])
        if self.out:
            shown.save(self.out)
        return shown

    def headline(self) -> list[Part]:
        """Return what is compared, and the answer with its checks, what limits it, what to do next, and how
        to read the table."""
        about = Text(compared(self.ledger, self.arms), "compared")
        null, answer = null_warning(self.arms), self.answer
        chips = Chips([(check.kind, check.text) for check in answer.checks])
        if self.running:
            begun = any(arm.values or arm.diverged for arm in self.arms)
            return [about, running(self.ledger), *([chips] if begun else []), *self.losses()]
        design = self.ledger.facts.design
        settling = [Text(answer.settling.text)] if answer.settling else []
        settled: Literal["even", "answered"] = "even" if answer.even else "answered"
        unsettled: Literal["open", "none"] = "open" if answer.valid else "none"
        return [
            about,
            Answered(answer.lead, answer.text, settled if answer.answered else unsettled),
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
            over = ("done", "diverged", "pruned")
            counts = Counter(member.status for member in self.ledger.members() if member.status not in over)
            statuses = ", ".join(f"{count} {status}" for status, count in counts.items())
            text = f"{missing} of {total} runs are missing ({statuses})"
            remedy = "Once the cause is removed, the" if failures else "The"
            remedy += " same command continues them."
            own = any(arm.missing for arm in self.arms if arm.role != "foreign")
            remedy = remedy if own and not Judged.alone(self.ledger) else ""
            parts.append(Text(f"**Incomplete:** {text}. {remedy}".rstrip(), "warning"))
        parts += [failures] if failures else []
        parts += map(Text, (*dropped(self.arms), *never_began(self.ledger)))
        diverged = [
            f"{arm.name} on seed{'s' * (len(arm.diverged) > 1)} {', '.join(map(str, arm.diverged))}"
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

    def importances(self, shares: Mapping[str, float]) -> Text | None:
        """Return a caution on knobs' shares of the variance (fANOVA), from 0 to 1; None if there are no
        shares."""
        text = (
            "Shares of the variance over the arms that were tried (fANOVA). They depend on where the sampler"
            " looked and are no effect sizes: a knob with a small share may matter. A gap with its interval"
            " says by how much."
        )
        return Text(text) if shares else None

    def health(self, table: pd.DataFrame) -> list[Part]:
        """Return sentences on how training went, and the table of what guards did, by a frame as `records`
        returns it, which includes the metrics `nan/*`."""
        statuses = Counter(member.status for member in self.ledger.members())
        counts = [text for text in set(table["metric"]) if parse(text).is_count]
        affected = sorted(set(table.loc[table["metric"].isin(counts) & (table["value"] > 0), "arm"]))
        runs = ", ".join(f"{count} {status}" for status, count in statuses.items())
        finite = "No NaN or infinite value was recorded."
        if affected:
            finite = f"NaN or infinite values were recorded in {', '.join(affected[:_MOST_NAMED])}."
        interventions = answer_tables.interventions_table(self)
        odd = operand_health.exceptions(table)
        alarms = answer_tables.alarms_table(self.ledger)
        healthy = not (odd or alarms or affected or interventions) and {*statuses} <= {"done"}
        usual = ""
        if not operand_health.recorded(table) and self._quantised():
            usual = " No operand was measured."  # `telemetry: {every: 0}`
        elif operand_health.recorded(table) and not (odd or alarms):
            usual = f" No operand, layer or share stands out{operand_health.most_zero(table)}."
        text = f"{statuses.total()} runs: {runs}. {finite}{usual}"
        lead = "Healthy." if healthy else "To look at."
        verdict = Answered(lead, text, "answered" if healthy else "open")
        warnings = [Text(text, "warning") for text in odd]
        lost = answer_tables.divergences_table(self.ledger)
        return [verdict, *warnings, *self.losses(), *filter(None, [lost, alarms, interventions])]

    def _quantised(self) -> bool:
        """Return True if an arm that was computed here quantises an operand."""
        recipes = (member.resolved.recipe for member in self.ledger.members() if member.resolved.engine)
        return any(not Recipe.model_validate(each, strict=False).plain for each in recipes if each)

    def emulation(self) -> Text | None:
        """Return a caution on speed and memory if formats were emulated."""
        return Text(note) if (note := emulated(self.ledger)) else None

    def comparisons(self) -> Table[Line] | None:
        """Return the table of all comparisons, each with its interval drawn in its line; None while no arm
        shares a seed with its baseline. While the sweep runs, no line is coloured."""
        found = lines(self)
        if not any(line.difference.pairs for line in found):
            return None
        return effect_table("comparisons", found, self, self.answer.valid and not self.running)

    changes = change_table
    values = answer_tables.values_table
    effects = answer_tables.arms_table

    knob_effects = answer_tables.knob_effects_table
    front = answer_tables.front_parts
    layers = staticmethod(operand_health.layer_maps)
    split = staticmethod(operand_health.error_split)
    gradient_error = staticmethod(operand_health.gradient_error)
    shares = staticmethod(operand_health.shares_tables)
    averages = answer_tables.factors_table

    doses = dose_parts
    blame = search_parts

    map = map_parts
    components = answer_tables.components_table
    damage = answer_tables.damage_table
    routes = answer_tables.routes_tables
    windows = answer_tables.windows_table
    pairing = answer_tables.pairing_table
    power = answer_tables.power_table
    checks = answer_tables.checks_table
    recipes = recipes_table
    runs = runs_table

    def operand_errors(self) -> Picture | None:
        """Return the picture of gaps over the recorded errors of operands; None for fewer than three
        recipes, and for maps and searches for a cause, whose arms quantise unlike operands."""
        if self.ledger.facts.map is not None or self.ledger.facts.blame:
            return None
        baselines = {arm.name for arm in self.arms if arm.is_baseline}
        members = (member for member in self.ledger.members() if member.name not in baselines)
        if len({json.dumps(member.resolved.recipe) for member in members}) < FEWEST_POINTS:
            return None
        return operand_errors(self.records(*LAYERS_SQNR), self.arms, self.metric)

    def reading(self) -> Text:
        """Return sentences on how the table of arms is to be read."""
        return Text(reading(self.arms))

    interventions = answer_tables.interventions_table
    published = answer_tables.published_part
    provenance = answer_tables.provenance_table

    def galleries(self) -> list[Part]:
        """Return the pictures that trials saved, by file name: for each arm those of its first finished
        seed. Images of the same inputs stand in rows, arms side by side."""
        store, first = Store(self.ledger.path.parents[2]), dict[str, str]()
        for member in sorted(self.ledger.members(), key=lambda member: member.seed):
            if member.status == "done":
                first.setdefault(member.name, member.id)
        shown = [arm.name for arm in foremost(self.arms, self.metric, _MOST_GALLERIES) if arm.name in first]
        files: dict[str, dict[str, Path]] = {}
        for name in shown:
            for path in store.artifacts(first[name]):
                files.setdefault(path.name, {})[name] = path
        tables = image_rows(files.pop(FILE, {}))
        drawn = {(Path(FILE).stem, name) for table in tables for name in table.arms}
        galleries: list[Part] = [*tables]
        for file, paths in files.items():
            stem = Path(file).stem
            left = [(name, path) for name, path in paths.items() if (stem, name) not in drawn]
            if file.endswith(".png") and left:
                galleries.append(Gallery(stem, left))
        return galleries

    def method(self) -> Text:
        """Return paragraphs on how the numbers were made, for readers who want to quote them."""
        rules = (
            " Verdicts are corrected by Holm over the"
            " comparisons of their table. Better or worse: the hypothesis of no effect is rejected; the"
            " probability that any such verdict in a table is wrong is at most 5 %. Equivalent: an effect of"
            " min_effect or more is rejected; at most 2.5 %. Undecided: neither. Fewer than"
            f" {FEWEST_DISTINCT} distinct differences give no verdict."
        )
        if self.ledger.facts.blame:
            rules += (
                " A culprit's verdict is that of the search, whose own error rate covers all units: it is not"
                " corrected again."
            )
        specs = [member.resolved for member in self.ledger.members()]
        least = self.metric.min_effect
        matters = f" Effects smaller than {least} (min_effect) are taken not to matter." if least else ""
        interval = self.arms[0].interval if self.arms else ""
        if Judged.alone(self.ledger):
            count = f"{counted(len(self.arms), 'arm')} in {counted(len(specs), 'run')}"
            how = pairing(arm.gap for arm in self.arms)
            return Text(
                f"{count}, trained elsewhere: that runs of one seed share initial weights and data order is"
                " their owner's claim. A run counts by its last value. Gaps are arm minus baseline,"
                f" {how}, each with a {interval}; an unpaired one has each arm's own deviation"
                f" (docs/reference/statistics.md).{rules}{matters}"
            )
        shared = "initial weights and data order"
        if design := self.ledger.facts.design:
            if design.trunk == START:
                shared = "the data order (the weights that they start from are the same at every seed)"
            matters += f" {estimand(design, self.arms)}"
        return Text(
            f"{counted(len(self.arms), 'arm')} of workload {described(specs[0]) if specs else '?'},"
            f" {seeds_text(self.ledger, self.arms)}."
            f" An arm and its baseline share {shared} at each seed, so gaps are taken"
            f" seed by seed; a gap is their mean with a {interval}.{rules}{matters} A diverged seed counts"
            " as no value, and its arm's line says so.\n"
            "\n"
            "tokens to match: how many more tokens an arm needs, by its own curve, to reach the loss at"
            " which its baseline ends. It is an upper bound if the learning rate decays at the end."
        )

    def file(self) -> Code | None:
        """Return the experiment's file as it was run."""
        text = self.ledger.facts.text
        return Code(text, "yaml") if text else None
