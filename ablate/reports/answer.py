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

import pandas as pd

from ablate.experiment.schema import START, Metric
from ablate.reports import answer_tables, operand_health
from ablate.reports.answer_verdict import VerdictSentences
from ablate.reports.change_table import change_table, values_table
from ablate.reports.dose_parts import dose_parts
from ablate.reports.effect_table import Line, effect_table, lines
from ablate.reports.elsewhere import method_text
from ablate.reports.figures.blame_search import search_parts
from ablate.reports.figures.effects import operand_errors
from ablate.reports.figures.sensitivity_map import map_parts
from ablate.reports.figures.style import Picture
from ablate.reports.figures.tables import FEWEST_POINTS
from ablate.reports.foremost import foremost
from ablate.reports.image_rows import FILE, image_rows
from ablate.reports.knob_columns import by_knobs
from ablate.reports.page import Code, Gallery, Part, Section, Text, section
from ablate.reports.run_tables import recipes_table, runs_table
from ablate.reports.search_parts import effects_parts, front_parts
from ablate.reports.table import Table
from ablate.reports.table_notes import reading
from ablate.results.blame import names_of, replayed
from ablate.results.doses import doses
from ablate.results.forked import estimand
from ablate.results.number_text import counted
from ablate.results.paired_stats import FEWEST_DISTINCT
from ablate.results.sensitivity import sensitivity
from ablate.results.subject import described
from ablate.results.summary import summaries
from ablate.results.unpaired import pairing
from ablate.store.checked_ledger import open_ledger
from ablate.store.judged import Judged
from ablate.store.trial_store import Store

_MOST_GALLERIES = 12
"""Largest number of arms whose pictures are shown."""


class Answer(VerdictSentences):
    """One experiment, read back from its ledger. Every part of its report is a method.

    Args:
        ledger: Ledger of the sweep, opened for reading.
        out: Folder for the report's files: figures as SVG, all numbers as CSV. None: nothing is
            saved.
        most_arms: Largest number of arms that a table shows, without the baselines of these.
    """

    @classmethod
    def open(cls, state: str | Path, sweep: str, out: str | Path | None = None) -> Self:
        """Return the answer of a sweep in a state folder.

        Args:
            state: State folder.
            sweep: Name of the sweep.
            out: Folder for the report's files; None: nothing is saved.

        Raises:
            FileNotFoundError: The sweep has not been run.
        """
        return cls(open_ledger(Path(state), sweep), Path(out) if out else None)

    def show(self, title: str, *parts: Part | Sequence[Part | None] | None, folded: bool = False) -> Section:
        """Return a section of the report, and save its files in `out`.

        Args:
            title: Heading of the section.
            parts: Texts, tables and pictures, or lists of them. None, and a table with no more than one
                column, is left out; a section without parts is empty.
            folded: True to hide the parts until a reader opens the section.
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
        """Return the table of relative changes: arms by metrics, each cell a drawn interval; None without a
        comparison."""
        if not self.relative_changes[0]:
            return None
        return change_table("changes", self, self.shown, self.answer.valid)

    def values(self) -> Table:
        """Return the table of every arm's mean by every metric of the file."""
        names = {arm.name for arm in self.shown}
        return values_table(
            self, [[arm for arm in arms if arm.name in names] for arms in self.arms_by_metric]
        )

    def effects(self, metric: Metric | None = None) -> Table:
        """Return the table of arms: means, gaps to the baseline, verdicts, speed.

        Args:
            metric: Metric that is compared; default: the main one.
        """
        if metric is None:
            arms, metric = self.shown, self.metric
        else:
            arms = foremost(summaries(self.ledger, metric), metric, self.most_arms)
        table = answer_tables.arms_table(self.ledger, arms, len(self.arms), metric, self.unit_of(metric))
        return replace(table, classes=()) if self.running else table

    def knob_effects(self) -> list[Part]:
        """Return the table of what a search's knobs do, with intervals; empty where it cannot tell them
        apart."""
        return effects_parts(self.arms, self.unit)

    def front(self) -> list[Part]:
        """Return the arms that no other equals or beats in all objectives, in a sentence and a table."""
        return front_parts(self.objectives)

    def layers(self, table: pd.DataFrame) -> operand_health.LayerMaps | None:
        """Return the maps of layers by operand, an arm at a time; None if no layer was recorded.

        Args:
            table: Records as `records` returns them, which include `quant/*/sqnr_db`.
        """
        return operand_health.layer_maps(table)

    def split(self, table: pd.DataFrame) -> operand_health.ErrorSplit | None:
        """Return the parts of every operand's error, beside the gain of its product; None if not recorded.

        Args:
            table: Records as `records` returns them, which include `quant/*/dead_share` and its siblings.
        """
        return operand_health.error_split(table)

    def gradient_error(self, table: pd.DataFrame) -> Table | None:
        """Return the table of the gradient's variance and squared bias; None if not recorded.

        Args:
            table: Records as `records` returns them, which include `grad/*`.
        """
        return operand_health.gradient_error(table)

    def shares(self, table: pd.DataFrame) -> list[Table]:
        """Return the tables of what became zero and of what lay beyond the grid.

        Args:
            table: Records as `records` returns them, which include `quant/*/zero_frac`.
        """
        return operand_health.shares_tables(table)

    def averages(self) -> Table | None:
        """Return the table of main effects and interactions of a grid."""
        return answer_tables.factors_table(self.grid, self.main_effects, self.interactions)

    def doses(self) -> list[Part]:
        """Return what each value of an ordered knob does: a picture and a sentence for each knob."""
        return dose_parts(doses(self), self.metric, self.unit, self.answer.valid)

    def blame(self) -> list[Part]:
        """Return the picture of a search for the units that cause a gap; empty for another experiment."""
        if not self.ledger.facts.blame:
            return []
        return search_parts(replayed(self.ledger), names_of(self.ledger), self.unit)

    def map(self) -> list[Part]:
        """Return the map of the recipe's cells: a picture, and what it does and does not show."""
        return map_parts(sensitivity(self), self.metric, self.unit, self.answer.valid and not self.running)

    def components(self) -> Table | None:
        """Return the table of leave-one-out differences and Shapley shares of a grid of components."""
        return answer_tables.components_table(self.grid)

    def damage(self) -> Table | None:
        """Return the table of what each gap is made of: the cast of the last weights, and the training."""
        return answer_tables.damage_table(self.ledger, self.shown, self.metric)

    def routes(self) -> list[Part | None]:
        """Return the tables of gaps with experts, by rounding and by flipped routes, and of what flipped."""
        arguments = self.ledger, self.shown
        return [answer_tables.routes_table(*arguments), answer_tables.flipped_table(*arguments)]

    def windows(self) -> Table | None:
        """Return the table of damage at every horizon and position of a forked design."""
        return answer_tables.windows_table(self.shown)

    def pairing(self) -> Table | None:
        """Return the table of correlations with baselines, and of the spread with and without pairing."""
        return answer_tables.pairing_table(self.shown)

    def power(self) -> Table | None:
        """Return the table of the spread of paired gaps and of the seeds that undecided arms need."""
        return answer_tables.power_table(self.shown)

    def checks(self) -> Table | None:
        """Return the table of the same gaps by other tests."""
        return answer_tables.checks_table(self.arms, self.shown)

    def recipes(self) -> Table | None:
        """Return the table of what the arms' recipes differ in."""
        return recipes_table(self.ledger, self.shown)

    def operand_errors(self) -> Picture | None:
        """Return the picture of gaps over the recorded errors of operands; None for fewer than three
        recipes."""
        recipes = {member.name: json.dumps(member.resolved.recipe) for member in self.ledger.members()}
        listed = [arm for arm in self.arms if arm.role == "listed" and arm.gap]
        if len({recipes[arm.name] for arm in listed}) < FEWEST_POINTS:
            return None
        return operand_errors(self.records("quant/*/*/sqnr_db"), listed, self.metric)

    def runs(self) -> Table:
        """Return the table of every run, with links to its specification and log."""
        return runs_table(self.ledger, self.metric, self.out)

    def reading(self) -> Text:
        """Return sentences on how the table of arms is to be read."""
        return Text(reading(self.arms))

    def interventions(self) -> Table | None:
        """Return the table of what guards did, by run."""
        return answer_tables.interventions_table(self.ledger)

    def published(self) -> Table | None:
        """Return the table of published figures and orderings beside the measured ones."""
        return answer_tables.published_part(self.ledger)

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
            return Text(method_text(how, count, str(interval)) + rules + matters)
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

    def provenance(self) -> Table:
        """Return the table of commit, versions, hardware, data and cost."""
        return answer_tables.provenance_table(self.ledger)

    def file(self) -> Code | None:
        """Return the experiment's file as it was run."""
        text = self.ledger.facts.text
        return Code(text, "yaml") if text else None
