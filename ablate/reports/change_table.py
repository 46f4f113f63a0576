"""Tensors on one screen: the relative change of every metric on every kind of tensor, as a table of drawings.

    kind                    error of the product           share rounded to zero
                            -60%  -20% 0 +30%  +100%       -60%  -20% 0 +30%  +100%
    hot tokens, the same          o  |            -26 %     o        |          -62 %
    heavy tails                      | <>         +13 %       o      |          -50 %

A row is an arm, in a grid over kinds of tensors and a knob a value of the knob below its kind; a column is a
metric of the file, with a log axis of its own. Colours and shapes are the verdicts, which are corrected by
Holm within a metric. The statistics are those of `results.log_ratios`.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from ablate.experiment.schema import Metric
from ablate.reports.answer_measurements import Measurements
from ablate.reports.drawn import Axis
from ablate.reports.effect_table import by_seed
from ablate.reports.plain_text import html_text, inline
from ablate.reports.table import Cell, Column, Html, Table, only
from ablate.results.attribution import shown_value
from ablate.results.comparisons import Comparisons
from ablate.results.log_ratios import Change, ratio
from ablate.results.number_text import counted, minus, number, percent_texts
from ablate.results.summary import ArmSummary
from ablate.results.verdict_text import verdict_text
from ablate.training.metric_names import parse

_OPERANDS = {"x": "activation", "w": "weight", "g": "gradient"}
_LARGEST = 2.0
"""Interval from the mean by this factor or more: its bounds are stated, since no single ± describes both."""


@dataclass(frozen=True)
class _Row:
    group: str
    label: str
    changes: Sequence[Change]
    """Change by each metric."""
    arm: ArmSummary
    asked: bool


def change_table(name: str, sweep: Comparisons, shown: Sequence[ArmSummary], coloured: bool) -> Table[_Row]:
    """Return the table of relative changes of the arms that are shown, sorted by the first metric within each
    group. `name`: stem of its CSV file's name; `coloured`: False if a check failed, so that no cell may be
    coloured."""
    rows = _rows(sweep, shown)
    axes = [Axis.of_ratios(row.changes[n].log_ratio for row in rows) for n in range(len(sweep.metrics))]
    columns = [
        *only("html", Column[_Row]("", lambda row: Html(inline(row.label) + _ASKED * row.asked))),
        Column[_Row]("arm", lambda row: row.arm.name, only=("markdown", "csv")),
    ]
    for n, (metric, axis) in enumerate(zip(sweep.metrics, axes, strict=True)):
        columns += _columns(n, metric, axis, coloured)
    groups = [_group(row.group) for row in rows]
    return Table(name, rows, columns, _caption(name, sweep), groups=groups, key=_key(sweep))


_ASKED = ' <span class="asked">the question</span>'


def _rows(sweep: Comparisons, shown: Sequence[ArmSummary]) -> list[_Row]:
    arms = {arm.name: arm for arm in shown}
    by_arm: dict[str, list[Change]] = {name: [] for name in arms}
    for change in (change for family in sweep.relative_changes for change in family):
        if change.arm in arms:
            by_arm[change.arm].append(change)
    levels = sweep.grid.levels if sweep.grid else {}
    kinds = [knob for knob in levels if knob.startswith("workload.")]
    kinds = kinds if len(kinds) < len(levels) else []
    asked = sweep.asked.arm if sweep.asked else None
    rows = []
    for name, found in by_arm.items():
        knobs = arms[name].knobs
        if not found:
            continue
        inside = {knob: knobs.get(knob) for knob in levels if knob not in kinds} if kinds else {}
        names = ((knob.removeprefix("workload."), shown_value(knobs.get(knob))) for knob in kinds)
        group = ", ".join(map(": ".join, names))
        group += f" against {arms[name].baseline}" if kinds else ""
        label = ", ".join(f"{knob} {shown_value(value)}" for knob, value in inside.items()) or name
        rows.append(_Row(group, label, found, arms[name], name == asked))
    order = {group: number for number, group in enumerate(dict.fromkeys(row.group for row in rows))}
    # NaN, a refused change, has no order: such rows stand last.
    return sorted(rows, key=lambda row: (order[row.group], *_last_without(row.changes[0].log_ratio.mean)))


def _group(group: str) -> Html:
    """Return the head of a group: the kind of tensors, and the baseline of its arms."""
    kind, _, baseline = group.partition(" against ")
    return Html(inline(kind) + f' <span class="means">against {inline(baseline)}</span>' * bool(baseline))


def _last_without(value: float) -> tuple[bool, float]:
    return math.isnan(value), 0.0 if math.isnan(value) else value


def _columns(n: int, metric: Metric, axis: Axis, coloured: bool) -> list[Column[_Row]]:
    """Return the columns of one metric: a drawing with its number on a page, numbers elsewhere."""
    title = _title(metric.name)
    path = f'<span class="means">{html_text(metric.name)}</span>' if title != metric.name else ""
    head = Html(f'{html_text(title)}{path}<div class="axis">{axis.head()}</div>')

    def drawn(row: _Row) -> Cell:
        return _cell(row.changes[n], row.label, title, axis, coloured)

    def bound(value: float) -> Cell:
        return f"{100 * ratio(value):.6g}" if math.isfinite(value) else ""

    return [
        *only("html", Column(head, drawn)),
        *only("markdown", Column(f"{metric.name}, change", lambda row: _text(row.changes[n]))),
        *only(
            "csv",
            Column(f"{metric.name}, change in %", lambda row: bound(row.changes[n].log_ratio.mean)),
            Column(f"{metric.name}, low", lambda row: bound(row.changes[n].log_ratio.low)),
            Column(f"{metric.name}, high", lambda row: bound(row.changes[n].log_ratio.high)),
            Column(f"{metric.name}, pairs", lambda row: str(row.changes[n].log_ratio.pairs)),
            Column(f"{metric.name}, verdict", lambda row: verdict_text(row.changes[n].verdict)),
            Column(f"{metric.name}, log-ratios by seed", lambda row: by_seed(row.changes[n].log_ratio)),
        ),
    ]


def _title(name: str) -> str:
    """Return the meaning of a metric of tensors in words; its name if it has none."""
    parts = parse(name)
    operand = _OPERANDS.get((parts.slot or "")[-1:], "operand")
    return {
        ("gemm", "rel_mse"): "error of the product",
        ("quant", "rel_mse"): f"error of the {operand} alone",
        ("quant", "zero_frac"): "share rounded to zero",
        ("mean", "rel_mse"): "error of the mean of draws",
    }.get((parts.family or "", parts.metric), name)


def _texts(change: Change) -> tuple[str, str]:
    """Return the change in percent, and half its interval or its bounds."""
    one = change.log_ratio
    if change.refused:
        return " → ".join(map(number, change.means)), f"0 on {counted(change.refused, 'seed')}: no ratio"
    if not one.pairs:
        return "-", ""
    mean, low, high = (ratio(value) for value in (one.mean, one.low, one.high))
    half = (high - low) / 2 if one.has_interval else math.nan
    text, bound = percent_texts(mean, half)
    if one.has_interval and one.high - one.mean > math.log(_LARGEST):
        bound = f"{percent_texts(low, half)[0]} to {percent_texts(high, half)[0]}"
    elif bound:
        bound = f"±{bound}"
    return f"{text} %", bound


def _text(change: Change) -> str:
    text, bound = _texts(change)
    return f"{f'{text} {bound}'.rstrip()} ({verdict_text(change.verdict, short=True)})"


def _cell(change: Change, label: str, title: str, axis: Axis, coloured: bool) -> Html:
    kind = change.verdict.shown if coloured else "open"
    text, bound = map(minus, _texts(change))
    verdict = verdict_text(change.verdict)
    drawing = axis.draw(change.log_ratio, f"{label}, {title}: {text} {bound}; {verdict}", kind, seeds=False)
    return Html(
        f'<div class="change {kind}"><span class="metric">{html_text(title)}</span>{drawing}'
        f"<span><b>{text}</b><small>{bound}</small></span></div>"
    )


def _key(sweep: Comparisons) -> Html:
    minimize = {metric.direction == "minimize" for metric in sweep.metrics}
    lower, higher = ("lower", "higher") if minimize == {True} else ("better", "worse")
    baselines = {arm.baseline for arm in sweep.arms if arm.baseline}
    against = baselines.pop() if len(baselines) == 1 else "its baseline on the same tensors"
    return Html(
        f"Change against {inline(against)}: mean of the ratios paired by seed, on a log axis, with its"
        f" {sweep.arms[0].interval}."
        f' <span class="better">● {lower}</span> <span class="worse">◆ {higher}</span>'
        " <span>○ undecided</span> (Holm)"
    )


def _caption(name: str, sweep: Comparisons) -> Html:
    wide = "Beside each number half its interval, or its bounds if they lie further away than a factor of 2."
    order = f"Sorted by {html_text(sweep.metrics[0].name)}."
    csv = f'All numbers: <a href="figures/{name}.csv">CSV</a>.'
    return Html(f"{wide} Verdicts are corrected by Holm within a column. {order} {csv}")


def values_table(sweep: Measurements) -> Table:
    """Return the table of every metric's mean on every arm that is shown, and its baseline."""
    names, rows = {arm.name for arm in sweep.shown}, list[dict[str, Cell]]()
    for arms in zip(*sweep.arms_by_metric, strict=True):
        if arms[0].name not in names:
            continue
        row: dict[str, Cell] = {"arm": arms[0].name}
        for metric, arm in zip(sweep.metrics, arms, strict=True):
            row[metric.name] = (number(arm.mean), arm.mean) if arm.values else "-"
        rows.append(row | {"baseline": arms[0].baseline or "", "seeds": (str(arms[0].seeds), arms[0].seeds)})
    return Table.of("values", rows, "Means over seeds.")
