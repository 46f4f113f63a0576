"""An experiment's answer, as its report shows it: the verdict first, then the tables and facts that it rests
on.

    answer = Answer.open("runs", "rht_sr")
    answer.verdict()      # "rht: true instead of false is undecided, +0.0063 ±0.0187 nats, on average ..."
    answer.effects()      # the table of arms

Sentences are made here, tables in answer_tables.py, figures in figures/. Nothing is drawn or computed a
second time: every number is one of `summary`, `contrasts` or `attribution`.
"""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ablate.experiment.schema import Metric
from ablate.results import answer_tables
from ablate.results.attribution import Effect, Grid, grid, main_effects
from ablate.results.contrasts import Contrast, contrasts
from ablate.results.headline import headline, of_arms, of_best, of_knobs
from ablate.results.ledger import Ledger
from ablate.results.number_text import counted, number
from ablate.results.page import Code, Gallery, Part, Section, Table, Text, section
from ablate.results.paired_stats import FEWEST_DISTINCT, Verdict
from ablate.results.records import frame
from ablate.results.summary import (
    ArmSummary,
    foremost,
    judge_learned,
    metrics_of,
    nothing_learned,
    open_ledger,
    summaries,
)
from ablate.results.table_notes import dropped, emulated, reading
from ablate.results.trial_store import Store
from ablate.results.unmet_phases import never_began
from ablate.training.metric_names import parse
from ablate.training.workloads import unit

MOST_ARMS, MOST_CONTRASTS, MOST_PICTURES = 40, 60, 12
_MOST_NAMED = 8
"""Largest number of arms that a sentence names."""


class Answer:
    """One experiment, read back from its ledger. Every part of its report is a method.

    Args:
        ledger: Ledger of the sweep, opened for reading.
        out: Folder for the report's files: figures as PNG and SVG, all numbers as CSV. None: nothing is saved.
    """

    def __init__(self, ledger: Ledger, out: Path | None = None) -> None:
        self.ledger, self.out = ledger, out
        self.question = ledger.fact("question") or ledger.name
        self.metrics = metrics_of(ledger)
        self.metric = self.metrics[0]

    @classmethod
    def open(cls, state: str | Path, sweep: str, out: str | Path | None = None) -> "Answer":
        """Return the answer of a sweep in a state folder. FileNotFoundError if the sweep was never run."""
        return cls(open_ledger(Path(state), sweep), Path(out) if out else None)

    @cached_property
    def arms(self) -> list[ArmSummary]:
        """Every arm, by the main metric."""
        return summaries(self.ledger, self.metric)

    @cached_property
    def shown(self) -> list[ArmSummary]:
        """The arms that tables show: at most about 40. The arms of a search are sorted, the best first."""
        arms = foremost(self.arms, self.metric, MOST_ARMS)
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
        return contrasts(self.arms, self.metric, MOST_CONTRASTS)

    @cached_property
    def grid(self) -> Grid | None:
        """The arms as a complete product of knobs, None if they are not one."""
        return grid(self.arms)

    def by(self, metric: Metric) -> list[ArmSummary]:
        """Return every arm, by another metric."""
        return summaries(self.ledger, metric)

    @cached_property
    def objectives(self) -> dict[Metric, list[ArmSummary]] | None:
        """The arms by each of several objectives; None if there is only one."""
        return {metric: self.by(metric) for metric in self.metrics} if len(self.metrics) > 1 else None

    @cached_property
    def unit(self) -> str:
        """Unit of the main metric; empty if it has no name."""
        return next((unit(member["spec"], self.metric.name) for member in self.ledger.members()), "")

    @property
    def journal(self) -> Path:
        """Path of the journal of the sweep's Optuna study."""
        return self.ledger.path.parent / "optuna.log"

    def records(self, *metrics: str) -> Any:
        """Return the tidy frame of these metrics. Patterns such as `quant/*` are allowed."""
        return frame(self.ledger, metrics=metrics)

    def show(self, title: str, *parts: Part | Sequence[Part] | None, folded: bool = False) -> Section:
        """Return a section of the report and save its files. It is empty if there are no parts."""
        result = section(title, *parts, folded=folded)
        if self.out:
            result.save(self.out)
        return result

    # The verdict

    def headline(self) -> list[Part]:
        """Return the verdict, what limits it (missing runs, divergence), and how to read the table below."""
        return [Text(self.verdict(), "verdict"), *self.losses(), Text(reading(self.arms))]

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
        effects = [effect for effect in main_effects(self.grid) if effect.knobs[0] in chosen]
        return list(zip(effects, self._judge(effects), strict=True))

    def _judge(self, effects: Sequence[Effect]) -> list[Verdict]:
        return judge_learned(
            [(effect.effect, effect.margin, self.grid.arms) for effect in effects], self.metric
        )

    def verdict(self) -> str:
        """Return the verdict in one or two sentences: on every knob's main effect for a grid, else on every
        arm.

        All comparisons of the family are stated. If they are too many to read, those are that are decided
        after the correction for all, so nothing is picked by its size.
        """
        arms = self.grid.arms if self.turned_knobs else self.arms
        if nothing_learned(arms):
            best = min((arm for arm in arms if not math.isnan(arm.loss)), key=lambda arm: arm.loss)
            subset = "" if nothing_learned(self.arms) else " of the arms that turn these knobs"
            return (
                f"No answer: nothing was learned. The lowest loss{subset} is {number(best.loss)}"
                f" ({best.name}); a model"
                f" that ignores its input reaches {number(best.context_free)}. Train for more steps, or"
                " change the"
                " learning rate."
            )
        statements = (
            of_knobs(self.main_effects, self.unit) if self.turned_knobs else of_arms(self.arms, self.unit)
        )
        return headline(statements) if statements else self._no_comparison()

    def _no_comparison(self) -> str:
        """Return the reason why no comparison has two pairs, or what a search has found so far."""
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

    @property
    def one_seed(self) -> bool:
        """True if no arm was given more than one seed."""
        return bool(self.arms) and max(arm.seeds for arm in self.arms) == 1

    def losses(self) -> list[Part]:
        """Return sentences on missing runs, pruned and refused arms, phases that never began, and
        divergence."""
        parts = []
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
            member["status"]
            for member in self.ledger.members()
            if member["status"] not in ("done", "diverged", "pruned")
        )
        return ", ".join(f"{count} {status}" for status, count in counts.items())

    # Tables

    def effects(self, metric: Metric | None = None) -> Table:
        """Return the table of arms, by the main metric or another one."""
        if metric is None:
            return answer_tables.arms_table(self.ledger, self.shown, len(self.arms), self.metric)
        arms = foremost(summaries(self.ledger, metric), metric, MOST_ARMS)
        return answer_tables.arms_table(self.ledger, arms, len(self.arms), metric)

    def turned(self) -> Table | None:
        """Return the table of every two arms that differ in one knob."""
        return answer_tables.contrasts_table(self.contrasts)

    def averages(self) -> Table | None:
        """Return the table of main effects and interactions of a grid."""
        return answer_tables.factors_table(self.grid, self.main_effects, self._judge)

    def components(self) -> Table | None:
        """Return the table of leave-one-out differences and Shapley shares of a grid of components."""
        return answer_tables.components_table(self.grid)

    def power(self) -> Table | None:
        """Return the table of the spread of paired gaps and of the seeds that undecided arms need."""
        return answer_tables.power_table(self.shown)

    def checks(self) -> Table | None:
        """Return the table of the same gaps by other tests."""
        return answer_tables.checks_table(self.arms, self.shown)

    def interventions(self) -> Table | None:
        """Return the table of what guards did, by run."""
        return answer_tables.interventions_table(self.ledger)

    def published(self) -> Table | None:
        """Return the table of published figures and orderings beside the measured ones."""
        return answer_tables.published_table(self.ledger)

    # Other parts

    def importances(self, shares: Mapping[str, float]) -> Text | None:
        """Return a caution on knobs' shares of the variance (fANOVA), None if there are no shares."""
        if not shares:
            return None
        return Text(
            "Shares of the variance over the arms that were tried (fANOVA). They depend on where the sampler"
            " looked and"
            " are no effect sizes: a knob with a small share may matter. A gap with its interval says by how"
            " much."
        )

    def health(self, table: Any) -> list[Part]:
        """Return sentences and a table on how training went. `table`: records that include `nan/*`."""
        statuses = Counter(member["status"] for member in self.ledger.members())
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
        verdict = Text(f"{statuses.total()} runs: {runs}. {finite}", "verdict")
        return [verdict, *self.losses(), *filter(None, [self.interventions()])]

    def emulation(self) -> Text | None:
        """Return a caution on speed and memory if formats were emulated."""
        note = emulated(self.ledger)
        return Text(note) if note else None

    def left(self) -> list[Gallery]:
        """Return the pictures that trials saved, by file name: for each arm those of its first finished
        seed."""
        store, first = Store(self.ledger.path.parents[2]), {}
        for member in sorted(self.ledger.members(), key=lambda member: member["seed"]):
            if member["status"] == "done":
                first.setdefault(member["name"], member["id"])
        shown = [arm.name for arm in foremost(self.arms, self.metric, MOST_PICTURES) if arm.name in first]
        galleries: dict[str, list[tuple[str, Path]]] = {}
        for name in shown:
            for path in store.artifacts(first[name]):
                if path.suffix == ".png":
                    galleries.setdefault(path.stem, []).append((name, path))
        return [Gallery(stem, pictures) for stem, pictures in galleries.items()]

    def method(self) -> Text:
        """Return paragraphs on how the numbers were made, for readers who want to quote them."""
        specs = [json.loads(member["spec"]) for member in self.ledger.members()]
        ((workload, config),) = (
            specs[0]["workload"].items() if specs and specs[0].get("workload") else (("?", {}),)
        )
        seeds = sorted({arm.seeds for arm in self.arms if arm.role != "refused"})
        number_of_seeds = (
            counted(seeds[0], "seed")
            if len(seeds) == 1
            else f"{seeds[0]} to {seeds[-1]} seeds"
            if seeds
            else "no seeds"
        )
        keys = ("layers", "width", "context", "batch", "steps", "lr")
        shape = ", ".join(f"{key} {config[key]}" for key in keys if key in config)
        matters = (
            f" Effects smaller than {self.metric.min_effect} (min_effect) are taken not to matter."
            if self.metric.min_effect
            else ""
        )
        interval = self.arms[0].interval if self.arms else ""
        return Text(
            f"{counted(len(self.arms), 'arm')} of workload {workload} ({shape}), {number_of_seeds} per arm."
            " An arm and"
            " its baseline share initial weights and data order at each seed, so gaps are taken seed by"
            " seed; a gap is"
            f" their mean with a {interval}. Verdicts are corrected by Holm over the comparisons of their"
            " table."
            " Better or worse: the hypothesis of no effect is rejected; the probability that any such"
            " verdict in a"
            " table is wrong is at most 5 %. Equivalent: an effect of min_effect or more is rejected; at"
            " most 2.5 %."
            " Undecided: neither. Fewer than"
            f" {FEWEST_DISTINCT} distinct differences give no verdict.{matters} A diverged seed counts as no"
            " value, and"
            " its arm's line says so.\n\n"
            "tokens to match: how many more tokens an arm needs, by its own curve, to reach the loss at"
            " which its"
            " baseline ends. It is an upper bound if the learning rate decays at the end."
        )

    def provenance(self) -> Table:
        """Return the table of commit, versions, hardware, data and cost."""
        return answer_tables.provenance_table(self.ledger)

    def file(self) -> Code | None:
        """Return the experiment's file as it was run."""
        text = self.ledger.fact("experiment.yaml")
        return Code(text, "yaml") if text else None
