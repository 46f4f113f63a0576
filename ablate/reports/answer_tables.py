"""Tables of a report: arms, contrasts, main effects, components, power, other tests, published figures,
provenance."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from operator import itemgetter

import numpy as np

from ablate.errors import by_key
from ablate.experiment.schema import Metric
from ablate.reports.answer_measurements import Measurements
from ablate.reports.comparison_tables import arm_columns, foremost, judged, needed_cell, published_table
from ablate.reports.page import Part, Text, file_stem
from ablate.reports.table import Cell, Column, Source, Table, cell
from ablate.reports.table_notes import NO_MIN_EFFECT, emulated
from ablate.results.attribution import Effect, extra_tokens, front, main_effects, shares
from ablate.results.decomposition import correlation, damages, flipped, routed
from ablate.results.forked import difference_word
from ablate.results.next_runs import ranked
from ablate.results.number_text import around, counted, number, percents
from ablate.results.paired_stats import (
    FEWEST_RANKED,
    Verdict,
    common,
    deviation_range,
    holm,
    paired_difference,
    wilcoxon,
)
from ablate.results.published import replications
from ablate.results.search_effects import knob_effects
from ablate.results.summary import ArmSummary, summaries
from ablate.results.unpaired import pairing
from ablate.results.verdict_text import verdict_notes, verdict_text
from ablate.store.divergences import divergences
from ablate.store.judged import Judged
from ablate.store.ledger import Ledger
from ablate.store.records import frame
from ablate.store.registration import registered_text
from ablate.training.alarms import Alarm
from ablate.training.metric_names import DAMAGE, FLIPPED, TOKENS_FLIPPED, parse
from ablate.training.operand_metrics import ALARMS

_FEWEST_SHARED = 3
"""Fewest knobs for Shapley shares: of two, the contrasts say the same."""
_LOSSES = ("train/loss", "train/recent_loss", "val/loss", "val/loss_bf16")
"""Metrics whose curves fall with the tokens seen, so that a gap can be expressed in tokens."""
_MOST_LOST = 8
"""Diverged runs that are listed."""
_MOST_SOURCES = 40
"""Files of runs from elsewhere that are listed."""
_MOST_ALARMS = 12
"""Alarms that are listed, of one arm and operand each."""
_MOST_ON_FRONT = 12
"""Arms of a front that are listed."""


def arms_table(sweep: Measurements, metric: Metric | None = None) -> Table:
    """Return the table of arms by a metric (None: the main one): mean, gap in the metric's unit, in percent
    and in tokens, corrected p, speed. While the sweep runs, no line is coloured."""
    arms, ledger, total = sweep.shown, sweep.ledger, len(sweep.arms)
    if metric is not None:
        arms = foremost(summaries(ledger, metric), metric, sweep.most_arms)
    metric = metric or sweep.metric
    unit = sweep.unit_of(metric)
    values = {arm.name: arm.values for arm in arms}
    forked = difference_word(arms) == DAMAGE
    tokens = {} if forked else _extra_tokens(ledger, arms, metric)
    name, mean, seeds, gap, sqnr, speed, memory, _, verdict, needed = arm_columns(arms, metric)
    columns = [
        *(name, replace(mean, unit=unit), replace(gap, unit=unit), verdict, needed),
        Column("in percent", lambda arm: "" if forked else _percent(arm, values.get(arm.baseline or ""))),
        Column("tokens to match", lambda arm: tokens.get(arm.name)),
        Column("p (Holm)", lambda arm: "" if arm.role == "searched" else _p_cell(arm.verdict.p)),
        *(seeds, sqnr, speed, memory),
    ]
    more = f" {total - len(arms):,} more arms, none of them better." if len(arms) < total else ""
    kind = arms[0].interval if arms else "interval"
    meaning = (
        f"Damage is arm minus baseline at the end of the longest windows, paired by seed; ± is half a {kind}."
        if forked
        else f"Gaps are arm minus baseline, {pairing(arm.gap for arm in arms)}; ± is half a {kind}."
        " in percent: the gap as a share of the baseline's value at the same seed."
    )
    caption = f"{meaning}{more} {emulated(ledger)}".rstrip()
    title = file_stem("effects", metric.name)
    return judged(title, arms, columns, caption, [] if sweep.running else [arm.colour for arm in arms])


def _extra_tokens(ledger: Ledger, arms: Sequence[ArmSummary], metric: Metric) -> dict[str, tuple[str, float]]:
    """Return, by arm, the extra tokens that it needs to reach the loss at which its baseline ends. Empty
    unless the metric is a loss that falls over training."""
    if metric.direction != "minimize" or metric.name not in _LOSSES:
        return {}
    table = frame(ledger, metrics=(metric.name,))
    table = table[table["tokens"].notna() & (table["status"] == "done")] if len(table) else table
    curves = {
        key: dict(zip(part["tokens"], part["value"], strict=True))
        for key, part in table.groupby(["arm", "seed"], observed=True)
    }
    cells = {}
    for arm in (arm for arm in arms if arm.gap and not arm.gap.sides):
        both = {
            seed: [curves.get((name, seed), {}) for name in (arm.name, arm.baseline)] for seed in arm.values
        }
        by_seed = {seed: extra_tokens(*pair) for seed, pair in both.items() if min(map(len, pair)) > 2}
        mean = paired_difference(by_seed, dict.fromkeys(by_seed, 0.0), arm.interval)
        if 0 < mean.pairs == len(by_seed):  # a mean without the seeds that never get there is of the fastest
            cells[arm.name] = (percents(mean), mean.mean)
    return cells


def factors_table(sweep: Measurements) -> Table | None:
    """Return the table of a grid's main effects and interactions, None for fewer than two knobs. Main effects
    that the sweep does not judge are shown without a verdict."""
    grid = sweep.grid
    if grid is None or len(grid.levels) < 2:
        return None
    stated = {(effect.knobs, effect.change) for effect, _ in sweep.main_effects}
    others = [effect for effect in main_effects(grid) if (effect.knobs, effect.change) not in stated]
    unjudged = [(effect, None) for effect in others]
    lines: list[tuple[Effect, Verdict | None]] = [*sweep.main_effects, *unjudged, *sweep.interactions]
    columns: dict[str, Source] = {
        "": lambda line: "main effect" if len(line[0].knobs) == 1 else "interaction",
        "knob": lambda line: " x ".join(line[0].knobs),
        "turned to": lambda line: line[0].change,
        "effect": lambda line: line[0].effect,
        "verdict": lambda line: verdict_text(line[1], short=True) if line[1] else "",
        "seeds needed": lambda line: needed_cell(line[1]) if line[1] else "",
        "p (Holm)": lambda line: _p_cell(line[1].p if line[1] else None),
    }
    seeds = ", ".join(map(str, grid.left_out))
    without = f" Seeds {seeds} are left out, because not every arm finished them." if seeds else ""
    caption = (
        "Main effect: the value named first minus the other, on average over the other knobs. Interaction:"
        " how much the effect of one knob depends on the other. p is corrected over all main effects, and"
        f" separately over all interactions.{without}"
    )
    classes = [verdict.kind if verdict else "" for _, verdict in lines]
    notes = [verdict_notes(verdict) if verdict else [] for _, verdict in lines]
    return Table.by_columns("factors", lines, columns, caption, classes=classes, notes=notes)


def components_table(sweep: Measurements) -> Table | None:
    """Return the table of leave-one-out differences and Shapley shares, None if the arms are no such grid."""
    grid = sweep.grid
    if grid is None or len(grid.levels) < _FEWEST_SHARED:
        return None
    columns: dict[str, Source] = {
        "component": lambda share: f"{share.knob} = {share.on}",
        "whole recipe minus without it": "left_out",
        "Shapley share": "shapley",
    }
    caption = (
        "Shapley share: a component's mean contribution over every order in which the components could be"
        " added; the shares add up to the effect of the whole recipe. Intervals are not corrected."
    )
    return Table.by_columns("components", shares(grid), columns, caption)


def damage_table(sweep: Measurements) -> Table | None:
    """Return the table of what each gap is made of; None without a second reading in high precision."""
    forked, metric = difference_word(sweep.shown) == DAMAGE, sweep.metric.name
    parts = damages(sweep.ledger, sweep.shown, metric)
    columns = {"arm": "arm", "total" if forked else "gap": "gap"}
    columns |= {"direct damage": "direct", "learnt damage": "learnt"}
    caption = (
        f"Direct damage: {metric} minus {metric}_bf16 of the same weights, less the baseline's."
        f" Learnt damage: the difference in {metric}_bf16, both arms' weights read in high precision."
        " The two add up to the first column, which has the verdict; their intervals are not corrected"
        + (", and lack the error of the evaluation, which the first column's has." if forked else ".")
    )
    return Table.by_columns("damage", parts, columns, caption)


def routes_tables(sweep: Measurements) -> list[Part | None]:
    """Return the table of gaps by rounding and by flipped routes, None without an arm that replays routes;
    and that of what quantisation sends to other experts, None if no arm recorded it."""
    columns = {"arm": "arm", "difference": "gap"}
    columns |= {"rounding with routes held": "rounding", "flipped routes": "flips"}
    caption = (
        "Rounding with routes held: the arm whose tokens went, in training, to the experts that unquantised"
        " training chose, minus the baseline. Flipped routes: the arm minus that one. The two add up to the"
        " difference at every seed; intervals are not corrected, and have the spread over seeds alone."
    )
    routes = Table.by_columns("routes", routed(sweep.ledger, sweep.shown), columns, caption)

    def percent(metric: str) -> Callable[[tuple[str, Mapping[str, float], int]], Cell]:
        return lambda row: (f"{100 * row[1][metric]:.2f} %", row[1][metric])

    shares: dict[str, Source] = {
        "arm": itemgetter(0),
        "tokens flipped": percent(TOKENS_FLIPPED),
        "pairs flipped": percent(FLIPPED),
        "seeds": itemgetter(2),
    }
    caption = (
        "Flipped: tokens, and pairs of a token and an expert, that the arm's quantisation sends to other"
        " experts than unquantised products on the same weights. Means over the measured steps"
        f"{' of the windows' if difference_word(sweep.shown) == DAMAGE else ''} and over seeds."
    )
    return [routes, Table.by_columns("flipped", flipped(sweep.ledger, sweep.shown), shares, caption)]


def windows_table(sweep: Measurements) -> Table | None:
    """Return the table of every comparison at each horizon and each position; None for full runs."""
    rows: list[dict[str, Cell]] = []
    for arm in sweep.shown:
        if arm.view is None or arm.gap is None:
            continue
        share = arm.view.error**2 / arm.gap.error**2 if arm.gap.has_interval else math.nan
        positions = arm.view.positions
        rows.append(
            {
                "arm": arm.name,
                **{f"after {steps} steps": cell(one) for steps, one in arm.view.horizons.items()},
                **{f"from step {step}": cell(one) for step, one in positions.items() if len(positions) > 1},
                "share of evaluation": (f"{100 * share:.0f} %", share) if share == share else "",
            }
        )
    caption = (
        "Damage after windows of several lengths, as means over positions; and at the end of the longest,"
        " by the step of the trunk at which it begins. A window sees noise at once and bias late, so a"
        " short one favours rounding to nearest: resolved signs that differ, or damage that grows faster"
        " than the window, name no winner. Share of evaluation: the part of the interval's variance that"
        " comes from the validation data, which all seeds share. Intervals are not corrected."
    )
    return Table.of("windows", rows, caption) if rows else None


def pairing_table(sweep: Measurements) -> Table | None:
    """Return the table of what pairing by seed is worth: correlations, and the spread with and without it."""
    values = {arm.name: arm.values for arm in sweep.shown}
    rows: list[dict[str, Cell]] = []
    for arm in sweep.shown:
        if arm.gap is None or arm.gap.sides or not arm.gap.informative or arm.baseline not in values:
            continue
        found = correlation(arm.values, values[arm.baseline])
        bounds = "" if math.isnan(found.low) else f" ({found.low:+.2f} to {found.high:+.2f})"
        both = arm.values, values[arm.baseline]
        apart = math.hypot(*(float(np.std([side[seed] for seed in common(*both)], ddof=1)) for side in both))
        correlated = "-" if math.isnan(found.value) else f"{found.value:+.2f}{bounds}"
        row: dict[str, Cell] = {"arm": arm.name, "seeds": cell(found.pairs)}
        row |= {"correlation with baseline": (correlated, found.value)}
        row |= {"spread of the gap": cell(arm.gap.deviation, ".2g")}
        rows.append(row | {"spread without pairing": cell(apart, ".2g")})
    caption = (
        "Correlation of the arm's values with its baseline's over seeds; in brackets Fisher's 95 % interval,"
        " which holds for normal values: it is too narrow where single seeds lie far from the others."
        " Pairing sharpens a gap where it is positive, and blurs it where it is negative."
    )
    return Table.of("pairing", rows, caption) if rows else None


def power_table(sweep: Measurements) -> Table | None:
    """Return the table of the spread of paired gaps and of the seeds that undecided arms need."""
    columns: dict[str, Source] = {
        "arm": "name",
        "seeds": lambda arm: (arm.gap.runs, arm.gap.pairs),
        "spread of the gap": ("gap.deviation", ".2g"),
        "80 % range of the spread": lambda arm: "{:.2g} to {:.2g}".format(*deviation_range(arm.gap)),
        "seeds needed": lambda arm: needed_cell(arm.verdict),
    }
    arms = [arm for arm in sweep.shown if arm.gap is not None and arm.gap.informative]
    if any(needed_cell(arm.verdict) for arm in arms):
        caption = (
            "Spread: standard deviation over seeds. Seeds needed: the total number for an 80 % chance of a"
            " verdict; in brackets, that number if the spread is at either end of its range. The chance is a"
            " mean over all spreads that the seeds so far allow. If the true spread is several times"
            " min_effect, a number that is named all the same is too small (docs/reference/statistics.md)."
        )
    else:
        caption = "" if all(arm.margin for arm in sweep.shown if arm.gap) else NO_MIN_EFFECT
    return Table.by_columns("power", arms, columns, caption)


def checks_table(sweep: Measurements) -> Table | None:
    """Return the table of the same gaps by other tests: equivalence, and Wilcoxon's ranks if there are enough
    seeds, whose number was fixed before: the test has no correction for looks. Wilcoxon's p-values are
    corrected over all arms of the sweep, shown or not."""
    baselines = {arm.name: arm.values for arm in sweep.arms}
    compared = [arm for arm in sweep.shown if arm.gap and arm.gap.pairs > 1 and arm.baseline in baselines]
    family = {
        arm.name: (arm.values, baselines[arm.baseline])
        for arm in sweep.arms
        if arm.role != "searched" and arm.verdict.kind != "unjudged" and arm.interval.kind == "t"
        if arm.gap is not None and arm.gap.informative and not arm.gap.sides and arm.baseline is not None
    }

    def ranked(arm: Mapping[int, float], baseline: Mapping[int, float]) -> float:
        try:
            return wilcoxon(arm, baseline)
        except ValueError:  # too few pairs
            return math.nan

    by_name = dict(zip(family, holm([ranked(*pair) for pair in family.values()]), strict=True))
    columns: dict[str, Source] = {
        "arm": "name",
        "equivalence, p (Holm)": lambda arm: _p_cell(arm.verdict.p_equivalence),
        "Wilcoxon, p (Holm)": lambda arm: _p_cell(by_name.get(arm.name)),
    }
    caption = "Equivalence: p of the hypothesis that the gap is min_effect or more, in either direction."
    if any(arm.interval.kind != "t" for arm in compared):
        caption += " Wilcoxon's signed-rank test is left out: it is valid at one look, and seeds grow here."
    elif any(arm.gap and arm.gap.pairs < FEWEST_RANKED for arm in compared):
        caption += (
            f" Wilcoxon's signed-rank test needs {FEWEST_RANKED} pairs: with fewer, its two-sided p cannot"
            " fall below 5 %."
        )
    return Table.by_columns("checks", compared, columns, caption)


def knob_effects_table(sweep: Measurements) -> Table | None:
    """Return the table of what a search's knobs do, with its caution, and with the metric's unit in its head;
    None if the search cannot tell them apart."""
    effects = knob_effects(sweep.arms)
    columns: dict[str, Source] = {
        **{"knob": "knob", "change": "change"},
        f"effect, {sweep.unit}" if sweep.unit else "effect": lambda one: (
            around(one.mean, one.half),
            one.mean,
        ),
        "p": ("p", ".2g"),
    }
    caption = (
        "Main effects only: least squares over all arms that the search finished, all knobs at once; 95 % t"
        f" intervals and p of each by itself, of {counted(len(effects), 'effect')}. If knobs interact, the"
        " arms that a learning sampler chose show another effect than the mean over all settings: of 100"
        " simulated arms by tpe, 41 % of such intervals cover that mean, and 57 % of knobs without an effect"
        " have p < 0.05. A grid of the knobs that seem to matter is the comparison that holds."
    )
    return Table.by_columns("knob-effects", effects, columns, caption)


def front_parts(sweep: Measurements) -> list[Part]:
    """Return the arms that no other equals or beats in all objectives: a sentence and a table; nothing for a
    single objective."""
    if not (by_metric := sweep.objectives):
        return []
    metrics = list(by_metric)
    means = [{arm.name: arm.mean for arm in arms if arm.values} for arms in by_metric.values()]
    out = {arm.name for arm in sweep.arms if arm.role in ("null", "searched")}
    out -= {arm.name for arm in ranked(sweep.ledger, sweep.arms, metrics[0])}
    names = [name for name in means[0] if all(name in each for each in means) and name not in out]
    points = {name: [each[name] for each in means] for name in names}
    signs = [1 if metric.direction == "minimize" else -1 for metric in metrics]
    best = sorted(front(points, signs), key=lambda name: signs[0] * points[name][0])
    if not best:
        return []
    rows: list[dict[str, Cell]] = [
        {"arm": name}
        | {metric.name: (_value(value), value) for metric, value in zip(metrics, points[name], strict=True)}
        for name in best[:_MOST_ON_FRONT]
    ]
    more = f" The first {_MOST_ON_FRONT} are listed." if len(best) > _MOST_ON_FRONT else ""
    caption = f"Means over seeds, without intervals: which arms are here depends on noise, too.{more}"
    return [Text(_trade(best, points, metrics)), Table.of("front", rows, caption)]


def _value(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1000 else number(value)


def _trade(best: Sequence[str], points: Mapping[str, Sequence[float]], metrics: Sequence[Metric]) -> str:
    """Return the front in a sentence: what its first arm gives up, and for what, to become its last."""
    words = " and ".join(metric.name for metric in metrics)
    if len(best) == 1:
        return f"Of {counted(len(points), 'arm')} {best[0]} is best in {words} alike."
    first, last = points[best[0]], points[best[-1]]
    changes = [
        f"{metric.name} from {_value(a)} to {_value(b)}"
        for metric, a, b in zip(metrics, first, last, strict=True)
    ]
    return (
        f"{len(best)} of {counted(len(points), 'arm')} are beaten by no other in {words}. From {best[0]} to"
        f" {best[-1]} the front goes {', and '.join(changes)}."
    )


def values_table(sweep: Measurements) -> Table:
    """Return the table of every metric's mean on every arm that is shown, and its baseline."""
    names, rows = {arm.name for arm in sweep.shown}, list[dict[str, Cell]]()
    for arms in zip(*sweep.arms_by_metric, strict=True):
        if arms[0].name not in names:
            continue
        row: dict[str, Cell] = {"arm": arms[0].name}
        for metric, arm in zip(sweep.metrics, arms, strict=True):
            row[metric.name] = (number(arm.mean), arm.mean) if arm.values else "-"
        rows.append(row | {"baseline": arms[0].baseline or "", "seeds": cell(arms[0].seeds)})
    return Table.of("values", rows, "Means over seeds.")


def divergences_table(ledger: Ledger) -> Table | None:
    """Return the table of runs that diverged: the first value that was not finite, what grew before it, and
    what became of the baseline."""
    lost = divergences(ledger)
    columns: dict[str, Source] = {"arm": "member.name", "seed": lambda one: str(one.member.seed)}
    columns |= {"its baseline": "of_baseline", "first value that was not finite": "reason"}
    more = f" {len(lost) - _MOST_LOST} more are in the table of runs." if lost[_MOST_LOST:] else ""
    return Table.by_columns("divergences", lost[:_MOST_LOST], columns, f"Runs that diverged.{more}")


def interventions_table(sweep: Measurements) -> Table | None:
    """Return the table of what guards did in each run: how often, from which step to which, and the first
    reason. A run that a guard only ended is among those that diverged."""
    lost = {(one.member.name, one.member.seed) for one in divergences(sweep.ledger)}
    runs = by_key(((event.arm, event.seed), event) for event in sweep.ledger.events())
    columns: dict[str, Source] = {
        "arm": lambda events: events[0].arm,
        "seed": lambda events: str(events[0].seed),
        "interventions": len,
        "first step": lambda events: events[0].step,
        "last step": lambda events: events[-1].step,
        "the first": lambda events: events[0].text,
    }
    shown = [events for run, events in runs.items() if len(events) > 1 or run not in lost]
    return Table.by_columns("interventions", shown, columns, "Interventions of guards, by run.")


def alarms_table(ledger: Ledger) -> Table | None:
    """Return the table of alarms, by arm and operand: the worst layer, how many there are, the first step and
    the seeds. The worst are first; None without any."""
    names = [(text, parse(text)) for text in ledger.names().values()]
    found: dict[tuple[Alarm, str, str | None], list[tuple[float, str, int, int]]] = {}
    for alarm in ALARMS:
        for text, name in names:
            if name.like([alarm.pattern]):
                for arm, seed, step, value in ledger.beyond(text, alarm.limit, alarm.side == "above"):
                    found.setdefault((alarm, arm, name.slot), []).append(
                        (value, name.layer or "", seed, step)
                    )
    rows: list[tuple[float, dict[str, Cell]]] = []
    for (alarm, arm, slot), each in found.items():
        value, layer, *_ = (max if alarm.side == "above" else min)(each)
        ends = (value, alarm.limit) if alarm.side == "above" else (alarm.limit, value)
        first = min(step for *_, step in each)
        row: dict[str, Cell] = {"arm": arm, "alarm": alarm.message.format(value), "operand": slot}
        row |= {"worst layer": layer, "layers": cell(len({name for _, name, *_ in each if name}) or None)}
        row |= {"first step": cell(first), "seeds": cell(len({seed for *_, seed, _ in each}))}
        rows.append((ends[0] / ends[1] if ends[1] > 0 else math.inf, row))
    rows.sort(key=lambda row: -row[0])
    more = len(rows) - _MOST_ALARMS
    few = f"; and {more} more" if more > 0 else ""
    caption = f"Alarms: values beyond their limits, at the worst layer, step and seed{few}."
    return Table.of("alarms", [row for _, row in rows[:_MOST_ALARMS]], caption) if rows else None


def published_part(sweep: Measurements) -> Table | None:
    """Return the table of published figures and orderings beside the measured ones, None if none are
    quoted."""
    table = published_table(replications(sweep.ledger, sweep.ledger.facts.published))
    caption = (
        "A difference of two arms agrees if it has the published direction, judged by its interval. A model"
        " of another size need not show an effect of the same size."
    )
    shared = any(line.figure.against for line in table.rows)
    return replace(table, caption=caption if shared else "") if table.rows else None


def provenance_table(sweep: Measurements) -> Table:
    """Return the table of commit, versions, hardware, data and cost; of runs from elsewhere that of the files
    that were read, with their digests, and of what was decided."""
    ledger = sweep.ledger
    if elsewhere := Judged.alone(ledger):
        sources = [*elsewhere.sources.items()][:_MOST_SOURCES]
        read = [(place, f", sha256 {digest[:16]}" if digest else "") for place, digest in sources]
        said = [("read from", "".join(text)) for text in read]
        said += [("reading", text) for text in dict.fromkeys(elsewhere.said)]
        said += [("judged", occasion.text) for occasion in elsewhere.times]
        return Table.of("provenance", [{"what": what, "which": which} for what, which in said])
    facts = ledger.facts.provenance
    trials = {member.id: member for member in ledger.members()}
    data = sorted({member.resolved.data for member in trials.values()})
    changed = ledger.facts.uncommitted
    commit = facts.pop("commit", None) or "none"
    spent, reused = ledger.spent()
    rows = {
        "commit": f"{commit}, with {changed} uncommitted lines of diff" if changed else commit,
        "hardware": ", ".join(facts.pop(key) for key in ("gpu", "cpu", "host", "platform") if facts.get(key)),
        "quantisers": facts.pop("quantisers", ""),
        "versions": ", ".join(f"{name} {version}" for name, version in facts.items() if name != "cores"),
        "data": ", ".join(filter(None, data)),
        "registered": registered_text(ledger),
        "trials": f"{len(trials)}, of which {reused} had been run by an earlier sweep",
        "cost": f"{spent / 3600:.2f} worker-hours",
    }
    return Table.of("provenance", [{"what": what, "which": value} for what, value in rows.items() if value])


def _percent(arm: ArmSummary, baseline: Mapping[int, float] | None) -> Cell:
    """Return the cell of the gap as a share of the baseline, seed by seed."""
    if arm.gap is None or arm.gap.sides or not baseline or 0 in baseline.values():
        return ""
    shared = {seed: value for seed, value in arm.values.items() if seed in baseline}
    relative = {seed: (value - baseline[seed]) / abs(baseline[seed]) for seed, value in shared.items()}
    share = paired_difference(relative, dict.fromkeys(relative, 0.0), arm.interval)
    return (percents(share), share.mean) if share.pairs else ""


def _p_cell(value: float | None) -> Cell:
    if value is None or math.isnan(value):
        return ""
    return "<0.001" if value < 0.001 else f"{value:.3f}", value
