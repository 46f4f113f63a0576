"""An experiment's answer, as its report shows it: the verdict first, then the tables and facts that it rests
on.

    answer = Answer.open("runs", "rht_sr")
    answer.verdict()      # "rht: true instead of false is undecided, +0.0063 ±0.0187 nats, on average ..."
    answer.effects()      # the table of arms

The numbers are read in answer_measurements.py, sentences made in answer_verdict.py, tables in
answer_tables.py, figures in figures/. Nothing is drawn or computed a second time: every number is one of
`summary`, `contrasts` or `attribution`.
"""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Self

from ablate.experiment.schema import START
from ablate.reports import answer_tables, operand_health
from ablate.reports.answer_verdict import VerdictSentences
from ablate.reports.change_table import change_table, values_table
from ablate.reports.dose_parts import dose_parts
from ablate.reports.effect_table import Line, effect_table, lines
from ablate.reports.figures.effects import LAYERS_SQNR, operand_errors
from ablate.reports.figures.style import Picture
from ablate.reports.figures.tables import FEWEST_POINTS
from ablate.reports.foremost import foremost
from ablate.reports.image_rows import FILE, image_rows
from ablate.reports.knob_columns import by_knobs
from ablate.reports.maps import map_parts, search_parts
from ablate.reports.page import Code, Gallery, Part, Section, Text, section
from ablate.reports.run_tables import recipes_table, runs_table
from ablate.reports.search_parts import effects_parts, front_parts
from ablate.reports.table import Table
from ablate.reports.table_notes import reading
from ablate.results.doses import doses
from ablate.results.forked import estimand
from ablate.results.number_text import counted
from ablate.results.paired_stats import FEWEST_DISTINCT
from ablate.results.sensitivity import sensitivity
from ablate.results.subject import described
from ablate.results.unpaired import pairing
from ablate.store.checked_ledger import open_ledger
from ablate.store.judged import Judged
from ablate.store.trial_store import Store

_MOST_GALLERIES = 12
"""Largest number of arms whose pictures are shown."""


class Answer(VerdictSentences):
    """One experiment, read back from its ledger, which is opened for reading. Every part of its report is a
    method; those that are only named here are described where their tables are made.

    `out`: folder for the report's files, figures as SVG and all numbers as CSV; None: nothing is saved.
    `most_arms`: largest number of arms that a table shows, without their baselines.
    """

    @classmethod
    def open(cls, state: str | Path, sweep: str, out: str | Path | None = None) -> Self:
        """Return the answer of a sweep in a state folder; FileNotFoundError if it has not been run. `out`:
        folder for the report's files; None: nothing is saved."""
        return cls(open_ledger(Path(state), sweep), Path(out) if out else None)

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

    def comparisons(self) -> Table[Line] | None:
        """Return the table of all comparisons, each with its interval drawn in its line; None while no arm
        shares a seed with its baseline. While the sweep runs, no line is coloured."""
        found = lines(self)
        if not any(line.difference.pairs for line in found):
            return None
        return effect_table("comparisons", found, self, self.answer.valid and not self.running)

    def changes(self) -> Table | None:
        """Return the table of relative changes: arms by metrics, each cell a drawn interval; None without
        any."""
        if not self.relative_changes[0]:
            return None
        return change_table("changes", self, self.shown, self.answer.valid)

    values = values_table
    effects = answer_tables.arms_table

    def knob_effects(self) -> list[Part]:
        """Return the table of what a search's knobs do, with intervals; empty if it cannot tell them
        apart."""
        return effects_parts(self.arms, self.unit)

    def front(self) -> list[Part]:
        """Return the arms that no other equals or beats in all objectives, in a sentence and a table."""
        return front_parts(self.objectives)

    layers = staticmethod(operand_health.layer_maps)
    split = staticmethod(operand_health.error_split)
    gradient_error = staticmethod(operand_health.gradient_error)
    shares = staticmethod(operand_health.shares_tables)
    averages = answer_tables.factors_table

    def doses(self) -> list[Part]:
        """Return what each value of an ordered knob does: a picture and a sentence for each knob."""
        return dose_parts(doses(self), self.metric, self.unit, self.answer.valid)

    blame = search_parts

    def map(self) -> list[Part]:
        """Return the map of the recipe's cells: a picture, and what it does and does not show."""
        return map_parts(sensitivity(self), self.metric, self.unit, self.answer.valid and not self.running)

    components = answer_tables.components_table
    damage = answer_tables.damage_table

    def routes(self) -> list[Part | None]:
        """Return the tables of gaps with experts, by rounding and by flipped routes, and of what flipped."""
        arguments = self.ledger, self.shown
        return [answer_tables.routes_table(*arguments), answer_tables.flipped_table(*arguments)]

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
        seeds = sorted({arm.seeds for arm in self.arms if arm.role != "refused"})
        number_of_seeds = (
            counted(seeds[0], "seed")
            if len(seeds) == 1
            else f"{seeds[0]} to {seeds[-1]} seeds"
            if seeds
            else "no seeds"
        )
        matters = (
            f" Effects smaller than {self.metric.min_effect} (min_effect) are taken not to matter."
            if self.metric.min_effect
            else ""
        )
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
            f" {number_of_seeds} per arm."
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
