"""An experiment's answer in sentences and tables, as its report shows them: the verdict first, then what it rests on. Draws nothing."""

import json
import math
from collections import Counter
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ablate.experiment.schema import Metric
from ablate.results.attribution import Effect, Grid, extra_tokens, grid, interactions, main_effects, shares
from ablate.results.headline import headline, of_arms, of_best, of_knobs
from ablate.results.inference import FEWEST_RANKED, wilcoxon
from ablate.results.ledger import Ledger
from ablate.results.page import Code, Gallery, Part, Section, Table, Text, section
from ablate.results.paired_stats import (
    FEWEST_DISTINCT,
    MOST_SEEDS,
    Verdict,
    deviation_range,
    holm,
    paired_difference,
)
from ablate.results.published import agreement_notes, agreement_text, replications
from ablate.results.records import frame
from ablate.results.summary import (
    ArmSummary,
    Contrast,
    contrasts,
    counted,
    dropped,
    emulated,
    foremost,
    interval,
    judge_learned,
    metrics_of,
    nothing_learned,
    number,
    open_ledger,
    percents,
    published_of,
    reading,
    summaries,
)
from ablate.results.trial_store import Store
from ablate.results.unmet_phases import never_began
from ablate.results.verdict_text import needed_text, verdict_notes, verdict_text
from ablate.training.metric_names import parse
from ablate.training.workloads import unit

MOST_ARMS, MOST_CONTRASTS, MOST_PICTURES = 40, 60, 12
_AGREEMENTS = {"agrees": "better", "disagrees": "worse", "differs": "worse"}
"""Class of a row that has a verdict on a published figure, by its kind."""
_LOSSES = ("train/loss", "val/loss", "val/loss_bf16")


class Answer:
    """One experiment, read back. What it shows is saved in `out` where that is given: pictures as PNG and SVG, everything as CSV."""

    def __init__(self, ledger: Ledger, out: Path | None = None) -> None:
        self.ledger, self.out = ledger, out
        self.question = ledger.fact("question") or ledger.name
        self.metrics = metrics_of(ledger)
        self.metric = self.metrics[0]

    @classmethod
    def open(cls, state: str | Path, sweep: str, out: str | Path | None = None) -> "Answer":
        """The answer of a sweep in a state folder; FileNotFoundError where it was never run."""
        return cls(open_ledger(Path(state), sweep), Path(out) if out else None)

    @cached_property
    def arms(self) -> list[ArmSummary]:
        """Every arm by the main metric."""
        return summaries(self.ledger, self.metric)

    @cached_property
    def shown(self) -> list[ArmSummary]:
        """As many of them as a person reads, a search's from the best on."""
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
        """Every two arms that differ in one knob; none where there are too many to read."""
        return contrasts(self.arms, self.metric, MOST_CONTRASTS)

    @cached_property
    def grid(self) -> Grid | None:
        """The arms as a whole product of knobs, where they are one."""
        return grid(self.arms)

    def by(self, metric: Metric) -> list[ArmSummary]:
        """Every arm by another metric."""
        return summaries(self.ledger, metric)

    @cached_property
    def objectives(self) -> dict[Metric, list[ArmSummary]] | None:
        """The arms by each of several objectives; None where there is one."""
        return {metric: self.by(metric) for metric in self.metrics} if len(self.metrics) > 1 else None

    @cached_property
    def unit(self) -> str:
        """What the main metric is counted in; nothing where that has no name."""
        return next((unit(member["spec"], self.metric.name) for member in self.ledger.members()), "")

    @property
    def journal(self) -> Path:
        """The journal of the sweep's study."""
        return self.ledger.path.parent / "optuna.log"

    def records(self, *metrics: str) -> Any:
        """The tidy frame of these metrics, or patterns of them."""
        return frame(self.ledger, metrics=metrics)

    def show(self, title: str, *parts: Part | Sequence[Part] | None, folded: bool = False) -> Section:
        """A section of the report, or an empty one where no part is there."""
        found = section(title, *parts, folded=folded)
        if self.out:
            found.save(self.out)
        return found

    # The answer

    def headline(self) -> list[Part]:
        """The verdict in a sentence, and what keeps it from being the last word."""
        return [Text(self.verdict(), "verdict"), *self.losses(), Text(reading(self.arms))]

    @cached_property
    def turned_knobs(self) -> list[str]:
        """The knobs of the grid that the question is about: not presets, nor the workload's where a recipe's are turned."""
        names = list(self.grid.levels) if self.grid else []
        return [name for name in names if not name.startswith("workload.") and name != "recipe"]

    @cached_property
    def main_effects(self) -> list[tuple[Effect, Verdict]]:
        """What each of those knobs does on average over the others, judged together; of all knobs where there are none of those."""
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
        """The verdict in one or two sentences: on every knob's main effect where there is a grid, else on every arm.

        Nothing is picked: all comparisons of the one family are stated, or, where that are too many to read, those that are decided
        after the correction for all of them.
        """
        arms = self.grid.arms if self.turned_knobs else self.arms
        if nothing_learned(arms):
            best = min((arm for arm in arms if not math.isnan(arm.loss)), key=lambda arm: arm.loss)
            among = (
                "The lowest loss"
                if nothing_learned(self.arms)
                else "The lowest loss of the arms that turn these knobs"
            )
            return (
                f"No answer: nothing was learned. {among}, {number(best.loss)} of {best.name}, is no better than that of a model"
                f" that ignores its input, {number(best.context_free)}. Train longer, or with another learning rate."
            )
        said = of_knobs(self.main_effects, self.unit) if self.turned_knobs else of_arms(self.arms, self.unit)
        return headline(said) if said else self._nothing()

    def _nothing(self) -> str:
        searched = [arm for arm in self.shown if arm.role == "searched" and arm.values and not arm.pruned]
        if searched:
            again = next((arm for arm in self.arms if arm.role == "confirmed"), None)
            return of_best(searched, again, self.metric.name, self.unit)
        if any(arm.diverged for arm in self.arms) and not any(arm.values for arm in self.arms):
            return "Every run diverged: no arm has a finite value to compare."
        if self.one_seed:
            return "One seed an arm: there are differences, and no interval says how much of them is chance. Nothing is claimed."
        if len([arm for arm in self.arms if arm.values]) == 1:
            return "One arm alone has finished: there is nothing to compare it with."
        return "Nothing can be said yet: no arm has two finished seeds in common with its baseline."

    @property
    def one_seed(self) -> bool:
        """Whether no arm was given a second."""
        return bool(self.arms) and max(arm.seeds for arm in self.arms) == 1

    def losses(self) -> list[Part]:
        """What is missing and what diverged, arm by arm: nothing is left out without a word."""
        parts = []
        waiting = sum(len(arm.missing) for arm in self.arms)
        if waiting:
            total = sum(arm.seeds for arm in self.arms)
            what = f"{waiting} of {total} runs are missing ({self._why()})"
            parts.append(Text(f"**Half done:** {what}. The same command goes on with them.", "warning"))
        parts += map(Text, (*dropped(self.arms), *never_began(self.ledger)))
        lost = [
            f"{arm.name} on seed{'s' if len(arm.diverged) > 1 else ''} {', '.join(map(str, arm.diverged))}"
            for arm in self.arms
            if arm.diverged
        ]
        if lost:
            others = " and others" if len(lost) > 8 else ""
            parts.append(
                Text(f"**Diverged:** {'; '.join(lost[:8])}{others}. No gap counts those seeds.", "warning")
            )
        silent = [arm.name for arm in self.arms if arm.unmeasured]
        if silent:
            parts.append(
                Text(
                    f"**{self.metric.name} is missing** in finished runs of {', '.join(silent[:8])}.",
                    "warning",
                )
            )
        return parts

    def _why(self) -> str:
        counts = Counter(
            member["status"]
            for member in self.ledger.members()
            if member["status"] not in ("done", "diverged", "pruned")
        )
        return ", ".join(f"{count} {status}" for status, count in counts.items())

    # Its tables

    def effects(self, metric: Metric | None = None) -> Table:
        """Every arm: its mean, its gap in the metric's unit, in percent and in tokens, corrected p, what else was measured."""
        arms = self.shown if metric is None else foremost(summaries(self.ledger, metric), metric, MOST_ARMS)
        metric = metric or self.metric
        values = {arm.name: arm.values for arm in arms}
        tokens = self._extra_tokens(arms, metric)
        rows = [
            {
                "arm": arm.name,
                metric.name: (number(arm.mean), arm.mean) if arm.values else "-",
                "gap to baseline": "" if arm.gap is None else (interval(arm.gap), arm.gap.mean),
                **_verdict(arm.verdict),
                "in percent": _percent(arm, values.get(arm.baseline)),
                "tokens to match": tokens.get(arm.name, ""),
                "p (Holm)": "" if arm.role == "searched" else _p(arm.verdict.p),
                "seeds": (
                    f"{len(arm.values)}"
                    if len(arm.values) == arm.seeds
                    else f"{len(arm.values)} of {arm.seeds}",
                    len(arm.values),
                ),
                "SQNR dB": "" if math.isnan(arm.sqnr_db) else (f"{arm.sqnr_db:.1f}", arm.sqnr_db),
                "tokens/s": ""
                if math.isnan(arm.tokens_per_s)
                else (f"{arm.tokens_per_s:,.0f}", arm.tokens_per_s),
                "memory": "" if math.isnan(arm.memory) else (f"{arm.memory / 1e6:,.0f} MB", arm.memory),
            }
            for arm in arms
        ]
        left = (
            f" {len(self.arms) - len(arms):,} more arms, none of them better."
            if len(arms) < len(self.arms)
            else ""
        )
        how = arms[0].interval if arms else "interval"
        caption = f"Gaps are arm minus baseline; ± is a {how}, paired by seed.{left} {emulated(self.ledger)}"
        notes = [verdict_notes(arm.verdict) for arm in arms]
        return Table(
            f"effects-{metric.name.replace('/', '-')}",
            rows,
            caption.rstrip(),
            [arm.colour for arm in arms],
            notes,
        )

    def _extra_tokens(self, arms: Sequence[ArmSummary], metric: Metric) -> dict[str, tuple[str, float]]:
        """By arm, how many more tokens it needs to be where its baseline ends; none where the metric is no curve that falls."""
        if metric.direction != "minimize" or metric.name not in _LOSSES:
            return {}
        table = self.records(metric.name)
        table = table[table["tokens"].notna() & (table["status"] == "done")] if len(table) else table
        curves = {
            key: dict(zip(part["tokens"], part["value"], strict=True))
            for key, part in table.groupby(["arm", "seed"], observed=True)
        }
        found = {}
        for arm in (arm for arm in arms if arm.baseline is not None):
            pairs = {
                seed: (curves.get((arm.name, seed), {}), curves.get((arm.baseline, seed), {}))
                for seed in arm.values
            }
            by_seed = {seed: extra_tokens(*pair) for seed, pair in pairs.items() if min(map(len, pair)) > 2}
            mean = paired_difference(by_seed, dict.fromkeys(by_seed, 0.0), arm.interval)
            if mean.pairs:
                found[arm.name] = (percents(mean), mean.mean)
        return found

    def turned(self) -> Table | None:
        """Each two arms that differ in one knob."""
        if not self.contrasts:
            return None
        rows = [
            {
                "knob": contrast.knob,
                "turned to": contrast.change,
                "with": contrast.held,
                "effect": (interval(contrast.effect), contrast.effect.mean),
                **_verdict(contrast.verdict),
                "p (Holm)": _p(contrast.verdict.p),
            }
            for contrast in self.contrasts
        ]
        caption = "Two arms that differ in one knob, all else held; the value named first minus the other, paired by seed."
        verdicts = [contrast.verdict for contrast in self.contrasts]
        return Table(
            "contrasts",
            rows,
            caption,
            [verdict.kind for verdict in verdicts],
            [verdict_notes(verdict) for verdict in verdicts],
        )

    def averages(self) -> Table | None:
        """Main effects and interactions of a grid."""
        if self.grid is None or len(self.grid.levels) < 2:
            return None
        judged = {id(effect): verdict for effect, verdict in self.main_effects}
        depends = interactions(self.grid)
        judged |= {id(effect): verdict for effect, verdict in zip(depends, self._judge(depends), strict=True)}
        mains = [effect for effect, _ in self.main_effects]
        known = {(effect.knobs, effect.change) for effect in mains}
        mains += [effect for effect in main_effects(self.grid) if (effect.knobs, effect.change) not in known]
        verdicts = [judged.get(id(effect)) for effect in (*mains, *depends)]
        rows = [
            _average(effect, verdict) for effect, verdict in zip((*mains, *depends), verdicts, strict=True)
        ]
        classes = [verdict.kind if verdict else "" for verdict in verdicts]
        notes = [verdict_notes(verdict) if verdict else [] for verdict in verdicts]
        left = self.grid.left_out
        without = (
            f" Seeds {', '.join(map(str, left))} are left out: not every arm finished them." if left else ""
        )
        caption = "A knob's effect on average over the others, the value named first minus the other. p (Holm) holds for all main effects"
        return Table(
            "factors",
            rows,
            f"{caption} together, and for all interactions together.{without}",
            classes,
            notes,
        )

    def components(self) -> Table | None:
        """Leave-one-out and Shapley shares of a grid of components."""
        found = shares(self.grid) if self.grid else []
        rows = [
            {
                "component": f"{share.knob} = {share.on}",
                "whole recipe minus without it": (interval(share.left_out), share.left_out.mean),
                "Shapley share": (interval(share.shapley), share.shapley.mean),
            }
            for share in found
        ]
        return (
            Table("components", rows, "Shapley shares add up to what all components do together.")
            if rows
            else None
        )

    def power(self) -> Table | None:
        """How far the paired gaps spread, and how many seeds an arm that is undecided needs for a verdict."""
        rows = []
        for arm in self.shown:
            if arm.gap is None or not arm.gap.tells:
                continue
            low, high = deviation_range(arm.gap)
            rows.append(
                {
                    "arm": arm.name,
                    "seeds": (str(arm.gap.pairs), arm.gap.pairs),
                    "spread of the paired gap": (number(arm.gap.deviation), arm.gap.deviation),
                    "80 % range of the spread": f"{number(low)} to {number(high)}",
                    "seeds needed": _verdict(arm.verdict)["seeds needed"],
                }
            )
        named = any(row["seeds needed"] for row in rows)
        caption = "Seeds needed: in all, for an 80 % chance of a verdict, by the rule that verdicts follow; in brackets, if the spread is at"
        without = (
            "Without metric.min_effect no number of seeds is named: an effect may be as small as one likes."
        )
        without = "" if all(arm.margin for arm in self.shown if arm.gap) else without
        return (
            Table("power", rows, f"{caption} either end of its range." if named else without)
            if rows
            else None
        )

    def checks(self) -> Table | None:
        """The same gaps by other tests: equivalence, ranks. What cannot be said with so few seeds is not."""
        baselines = {arm.name: arm.values for arm in self.arms}
        compared = [
            arm
            for arm in self.shown
            if arm.gap is not None and arm.gap.pairs > 1 and arm.baseline in baselines
        ]
        family = [
            arm
            for arm in self.arms
            if arm.role != "searched" and arm.verdict.kind != "unjudged" and arm.gap.tells
        ]
        ranked = holm([_wilcoxon(arm.values, baselines[arm.baseline]) for arm in family])
        by_name = {arm.name: p for arm, p in zip(family, ranked, strict=True)}
        rows = [
            {
                "arm": arm.name,
                "equivalence, p (Holm)": _p(arm.verdict.p_equivalence),
                "Wilcoxon, p (Holm)": _p(by_name.get(arm.name)),
            }
            for arm in compared
        ]
        few = any(arm.gap.pairs < FEWEST_RANKED for arm in compared)
        caption = "Equivalence: p of a gap of min_effect or more."
        needs = (
            f" Wilcoxon's test needs {FEWEST_RANKED} pairs: with fewer its two-sided p cannot fall below 5 %."
        )
        return Table("checks", rows, caption + (needs if few else "")) if rows else None

    def importances(self, shares: Mapping[str, float]) -> Text | None:
        """Say what knobs' shares of the variance mean (fANOVA), and what they do not. None without shares."""
        if not shares:
            return None
        return Text(
            "Shares of the variance over the arms that were tried (fANOVA): where the sampler looked, not how large an effect is. A knob"
            " with a small share may matter; a gap with an interval says by how much."
        )

    def health(self, table: Any) -> list[Part]:
        """Whether training went well, in a sentence, then what did not."""
        statuses = Counter(member["status"] for member in self.ledger.members())
        counts = [text for text in set(table["metric"]) if parse(text).is_count] if len(table) else []
        bad = (
            sorted(set(table.loc[table["metric"].isin(counts) & (table["value"] > 0), "arm"]))
            if counts
            else []
        )
        counted = f"{statuses.total()} runs: {', '.join(f'{count} {status}' for status, count in statuses.items())}."
        found = (
            f" Values that are not finite were seen in {', '.join(bad[:8])}."
            if bad
            else " No value that is not finite was counted."
        )
        return [Text(counted + found, "verdict"), *self.losses(), *filter(None, [self.interventions()])]

    def interventions(self) -> Table | None:
        """What guards did: how often in each run, from when to when, and why first."""
        runs: dict[tuple[str, int], list[Any]] = {}
        for event in self.ledger.events():
            runs.setdefault((event["arm"], event["seed"]), []).append(event)
        rows = [
            {
                "arm": arm,
                "seed": str(seed),
                "interventions": (str(len(events)), len(events)),
                "first step": (str(events[0]["step"]), events[0]["step"]),
                "last step": (str(events[-1]["step"]), events[-1]["step"]),
                "the first": events[0]["text"],
            }
            for (arm, seed), events in runs.items()
        ]
        return Table("interventions", rows, "What guards did") if rows else None

    def published(self) -> Table | None:
        """Papers' figures and orderings beside the measured ones."""
        lines = replications(self.ledger, published_of(self.ledger))
        rows = [
            {
                "arm": line.subject,
                "metric": line.metric,
                "published": line.published
                if line.figure.amount is None
                else (line.published, line.figure.amount),
                "measured": (line.found, line.measured.mean) if line.measured.pairs else "",
                "verdict": agreement_text(line, short=True),
                "source": line.figure.source,
            }
            for line in lines
        ]
        caption = "Of two arms the direction is judged, by the interval; a model of another size need not show an effect of the same size."
        caption = caption if any(line.figure.against for line in lines) else ""
        classes = ["diverged" if line.diverged else _AGREEMENTS.get(line.verdict.kind, "") for line in lines]
        return (
            Table("published", rows, caption, classes, [agreement_notes(line) for line in lines])
            if rows
            else None
        )

    def emulation(self) -> Text | None:
        """What speed and memory are not, where formats were emulated."""
        said = emulated(self.ledger)
        return Text(said) if said else None

    def left(self) -> list[Gallery]:
        """The pictures that runs left, by file: one an arm, of its first seed that is done."""
        store, first = Store(self.ledger.path.parents[2]), {}
        for member in sorted(self.ledger.members(), key=lambda member: member["seed"]):
            if member["status"] == "done":
                first.setdefault(member["name"], member["id"])
        shown = [arm.name for arm in foremost(self.arms, self.metric, MOST_PICTURES) if arm.name in first]
        found: dict[str, list[tuple[str, Path]]] = {}
        for name in shown:
            for path in store.artifacts(first[name]):
                if path.suffix == ".png":
                    found.setdefault(path.stem, []).append((name, path))
        return [Gallery(stem, pictures) for stem, pictures in found.items()]

    # Where it comes from

    def method(self) -> Text:
        """How the numbers were made, for whoever wants to quote them."""
        specs = [json.loads(member["spec"]) for member in self.ledger.members()]
        ((workload, config),) = (
            specs[0]["workload"].items() if specs and specs[0].get("workload") else (("?", {}),)
        )
        seeds = sorted({arm.seeds for arm in self.arms if arm.role != "refused"})
        spread = (
            counted(seeds[0], "seed")
            if len(seeds) == 1
            else f"{seeds[0]} to {seeds[-1]} seeds"
            if seeds
            else "no seeds"
        )
        shape = ", ".join(
            f"{key} {config[key]}"
            for key in ("layers", "width", "context", "batch", "steps", "lr")
            if key in config
        )
        matters = (
            f" A gap within {self.metric.min_effect} is taken not to matter."
            if self.metric.min_effect
            else ""
        )
        how = self.arms[0].interval if self.arms else ""
        return Text(
            f"{counted(len(self.arms), 'arm')} of workload {workload} ({shape}), {spread} an arm; an arm and its baseline share initial"
            f" weights and data order, so gaps are taken seed by seed: their mean with a {how}. Verdicts are corrected by Holm over the"
            f" comparisons of their table: better or worse where no effect is excluded, wrong anywhere in a table with a probability of at"
            f" most 5 %; equivalent where an effect of min_effect or more is excluded, at most 2.5 %; undecided else. None from fewer than"
            f" {FEWEST_DISTINCT} distinct differences.{matters} A diverged seed is no value, and its arm says so.\n\n"
            "tokens to match: how many more tokens of this run's own curve the arm needs to stand where its baseline ends, an upper bound"
            " where the learning rate decays at the end."
        )

    def provenance(self) -> Table:
        """Commit, versions, hardware, data and cost."""
        facts = json.loads(self.ledger.fact("provenance.json") or "{}")
        trials = {member["id"]: member for member in self.ledger.members()}
        data = sorted({json.loads(member["spec"]).get("data", "") for member in trials.values()})
        changed = len((self.ledger.fact("uncommitted.diff") or "").splitlines())
        spent, reused = self.ledger.spent()
        rows = {
            "commit": f"{facts.pop('commit', None) or 'none'}{f', with {changed} uncommitted lines of diff' if changed else ''}",
            "hardware": ", ".join(
                facts.pop(key) for key in ("gpu", "cpu", "host", "platform") if facts.get(key)
            ),
            "versions": ", ".join(f"{name} {version}" for name, version in facts.items() if name != "cores"),
            "data": ", ".join(filter(None, data)),
            "trials": f"{len(trials)}, of which {reused} had been run by an earlier sweep",
            "cost": f"{spent / 3600:.2f} worker-hours",
        }
        return Table("provenance", [{"what": what, "which": which} for what, which in rows.items() if which])

    def file(self) -> Code | None:
        """The experiment's file as it was run."""
        text = self.ledger.fact("experiment.yaml")
        return Code(text, "yaml") if text else None


def _average(effect: Effect, verdict: Verdict | None) -> dict[str, Any]:
    """A line of the table of main effects and interactions."""
    return {
        "": "main effect" if len(effect.knobs) == 1 else "interaction",
        "knob": " x ".join(effect.knobs),
        "turned to": effect.change,
        "effect": (interval(effect.effect), effect.effect.mean),
        **(_verdict(verdict) if verdict else {}),
        "p (Holm)": _p(verdict and verdict.p),
    }


def _verdict(verdict: Verdict) -> dict[str, Any]:
    """Cells of a verdict."""
    needed = verdict.needed
    seeds = needed and (needed_text(needed), needed.count or MOST_SEEDS + 1)
    return {"verdict": verdict_text(verdict, short=True), "seeds needed": seeds}


def _wilcoxon(arm: dict[int, float], baseline: dict[int, float]) -> float:
    """p of Wilcoxon's test, NaN where there are too few pairs."""
    try:
        return wilcoxon(arm, baseline)
    except ValueError:
        return math.nan


def _percent(arm: ArmSummary, baseline: dict[int, float] | None) -> Any:
    """The gap over the baseline, seed by seed."""
    if arm.gap is None or not baseline or any(value == 0 for value in baseline.values()):
        return ""
    relative = {
        seed: (value - baseline[seed]) / abs(baseline[seed])
        for seed, value in arm.values.items()
        if seed in baseline
    }
    found = paired_difference(relative, dict.fromkeys(relative, 0.0), arm.interval)
    return (percents(found), found.mean) if found.pairs else ""


def _p(value: float | None) -> Any:
    if value is None or math.isnan(value):
        return ""
    return ("<0.001" if value < 0.001 else f"{value:.3f}", value)
