"""Parts of a report on a search: its knobs' effects with their caution, and the arms of the front."""

from collections.abc import Mapping, Sequence

from ablate.experiment.schema import Metric
from ablate.reports.page import Part, Text
from ablate.reports.table import Cell, Source, Table
from ablate.results.attribution import front
from ablate.results.number_text import around, counted, number
from ablate.results.search_effects import knob_effects
from ablate.results.summary import ArmSummary

_MOST_ON_FRONT = 12


def effects_parts(arms: Sequence[ArmSummary], unit: str) -> list[Part]:
    """Return the effects as a table with its caution, and with the metric's unit in its head; nothing without
    effects."""
    effects = knob_effects(arms)
    columns: dict[str, Source] = {
        **{"knob": "knob", "change": "change"},
        f"effect, {unit}" if unit else "effect": lambda one: (around(one.mean, one.half), one.mean),
        "p": ("p", ".2g"),
    }
    caption = (
        "Main effects only: least squares over all arms that the search finished, all knobs at once; 95 % t"
        f" intervals and p of each by itself, of {counted(len(effects), 'effect')}. If knobs interact, the"
        " arms that a learning sampler chose show another effect than the mean over all settings: of 100"
        " simulated arms by tpe, 41 % of such intervals cover that mean, and 57 % of knobs without an effect"
        " have p < 0.05. A grid of the knobs that seem to matter is the comparison that holds."
    )
    table = Table.by_columns("knob-effects", effects, columns, caption)
    return [table] if table else []


def front_parts(by_metric: Mapping[Metric, Sequence[ArmSummary]] | None) -> list[Part]:
    """Return the arms that no other equals or beats in all objectives: a sentence and a table; nothing for a
    single objective (None)."""
    if not by_metric:
        return []
    metrics = list(by_metric)
    means = [{arm.name: arm.mean for arm in arms if arm.values} for arms in by_metric.values()]
    roles = {arm.name: arm.role for arm in by_metric[metrics[0]]}
    names = [name for name in means[0] if all(name in each for each in means) and roles[name] != "null"]
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
