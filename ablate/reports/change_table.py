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
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ablate.experiment.schema import Metric
from ablate.reports.answer_measurements import Measurements
from ablate.reports.drawn import Axis
from ablate.reports.effect_table import by_seed, headed, labelled
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
    kind: str
    """Kind of tensors; empty if there is one."""
    baseline: str
    label: str
    changes: Sequence[Change]
    """Change by each metric."""
    arm: ArmSummary
    asked: bool


def change_table(sweep: Measurements) -> Table[_Row] | None:
    """Return the table of relative changes of the arms that are shown, sorted by the first metric within each
    group, each cell a drawn interval; None without any. No cell is coloured if a check failed."""
    if not sweep.relative_changes[0]:
        return None
    rows, name = _rows(sweep, sweep.shown), "changes"
    columns = [
        *only("html", Column[_Row]("", lambda row: labelled(row.label, row.asked))),
        Column[_Row]("arm", lambda row: row.arm.name, only=("markdown", "csv")),
    ]
    for n, metric in enumerate(sweep.metrics):
        axis = Axis.of_ratios(row.changes[n].log_ratio for row in rows)
        columns += _columns(n, metric, axis, sweep.answer.valid)
    groups = [headed(row.kind, f"against {row.baseline}" if row.baseline else "") for row in rows]
    caption = (
        "Beside each number half its interval, or its bounds if they lie further away than a factor of 2."
        f" Verdicts are corrected by Holm within a column. Sorted by {html_text(sweep.metrics[0].name)}."
        f' All numbers: <a href="figures/{name}.csv">CSV</a>.'
    )
    return Table(name, rows, columns, Html(caption), groups=groups, key=_key(sweep))


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
        arm, within = arms[name], [knob for knob in levels if kinds and knob not in kinds]
        kind = ", ".join(f"{k.removeprefix('workload.')}: {shown_value(arm.knobs.get(k))}" for k in kinds)
        label = ", ".join(f"{knob} {shown_value(arm.knobs.get(knob))}" for knob in within) or name
        if found:
            rows.append(_Row(kind, str(arm.baseline) if kinds else "", label, found, arm, name == asked))
    order = list(dict.fromkeys((row.kind, row.baseline) for row in rows))

    def key(row: _Row) -> tuple[int, bool, float]:
        mean = row.changes[0].log_ratio.mean  # NaN, a refused change, has no order: such rows stand last
        return order.index((row.kind, row.baseline)), math.isnan(mean), mean

    return sorted(rows, key=key)


def _columns(n: int, metric: Metric, axis: Axis, coloured: bool) -> list[Column[_Row]]:
    """Return the columns of one metric: a drawing with its number on a page, numbers elsewhere."""
    title = _title(metric.name)
    path = f'<span class="means">{html_text(metric.name)}</span>' if title != metric.name else ""
    head = Html(f'{html_text(title)}{path}<div class="axis">{axis.head()}</div>')

    def drawn(row: _Row) -> Html:
        change = row.changes[n]
        kind = change.verdict.shown if coloured else "open"
        text, bound = map(minus, _texts(change))
        label = f"{row.label}, {title}: {text} {bound}; {verdict_text(change.verdict)}"
        return Html(
            f'<div class="change {kind}"><span class="metric">{html_text(title)}</span>'
            f"{axis.draw(change.log_ratio, label, kind, seeds=False)}"
            f"<span><b>{text}</b><small>{bound}</small></span></div>"
        )

    def text(row: _Row) -> Cell:
        change, bound = _texts(row.changes[n])
        return f"{f'{change} {bound}'.rstrip()} ({verdict_text(row.changes[n].verdict, short=True)})"

    def percent(field: str) -> Callable[[_Row], Cell]:
        def cell(row: _Row) -> Cell:
            value = getattr(row.changes[n].log_ratio, field)
            return f"{100 * ratio(value):.6g}" if math.isfinite(value) else ""

        return cell

    return [
        *only("html", Column(head, drawn)),
        *only("markdown", Column(f"{metric.name}, change", text)),
        *only(
            "csv",
            Column(f"{metric.name}, change in %", percent("mean")),
            Column(f"{metric.name}, low", percent("low")),
            Column(f"{metric.name}, high", percent("high")),
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
