"""Check the metrics of an experiment: a trial's last value must be a result of the trial.

A trial is identified by its model, data, recipe and seed. Telemetry is no part of that, since it changes no
bit of the training. So a value that depends on when telemetry measured cannot be compared over trials: two of
them may have measured at different steps. Such metrics are records of a run, and refused here by name.
"""

from collections.abc import Iterator

from pydantic import ValidationError

from ablate.errors import Problem, Reading, nearest
from ablate.experiment.arms import StartingPoint, reason
from ablate.experiment.misplaced_keys import without_alternatives
from ablate.experiment.schema import ExperimentFile, Metric
from ablate.experiment.search_space import twins
from ablate.experiment.yaml_document import Document
from ablate.files import Json
from ablate.training.hyperparameters import OF_TELEMETRY
from ablate.training.metric_names import (
    NAMING,
    PRODUCTS,
    SQUARED_BIAS,
    VARIANCE,
    parse,
    recordable,
    target_of,
)

_MEASURED = frozenset({"quant", "weights", PRODUCTS})
"""Families that telemetry measures inside a few steps of a run."""
_OF_GRADIENT = frozenset({"grad/cosine_to_bf16", "grad/noise_ratio", VARIANCE, SQUARED_BIAS})


def metrics_in(
    file: ExperimentFile, base: StartingPoint | None, document: Document
) -> Reading[tuple[Metric, ...]]:
    """Return the file's metrics, one or a list. Those that the workload does not measure are problems. `base`
    None: workload and recipe could not be read."""
    if not isinstance(file.metric, list):
        return ((yield from _metric(file.metric, ("metric",), base, document)),)
    if not file.metric:
        yield document.problem(
            ("metric",), "is an empty list; name at least one metric, by which arms are compared", file.metric
        )
    metrics = []
    for index, value in enumerate(file.metric):
        metrics.append((yield from _metric(value, ("metric", index), base, document)))
    yield from twins(("metric",), [metric.name for metric in metrics], document)
    return tuple(metrics) or (Metric(),)


def _metric(
    value: Json, path: tuple[str | int, ...], base: StartingPoint | None, document: Document
) -> Reading[Metric]:
    try:
        metric = Metric.model_validate(value)
    except ValidationError as error:
        for problem in without_alternatives(error.errors(), value):
            yield document.problem((*path, *problem["loc"]), reason(problem, Metric), problem["input"])
        return Metric()
    yield from metric_problems(metric.name, (*path, "name"), base, document)
    return metric


def metric_problems(
    name: str, path: tuple[str | int, ...], base: StartingPoint | None, document: Document
) -> Iterator[Problem]:
    """Yield why a metric is no result of the workload's trials. `path`: its place in the document; `base`
    None: workload and recipe could not be read."""
    if target_of(name) is not None:
        if path == ("metric", "name") or path[:2] == ("metric", 0) or path[0] != "metric":
            yield document.problem(
                path, "is computed from the curve of val/loss: list it after a main metric", name
            )
        return
    if base is None:
        return
    metrics, readings = base.config.METRICS, base.config.of_readings
    if name in (metrics or frozenset()) | readings:
        return
    if why := _telemetry(name, base):
        yield document.problem(path, why, name)
    elif metrics is None and not recordable(name):
        yield document.problem(path, f"no trial records a metric of this name: {NAMING}", name)
    elif metrics is not None:
        yield document.problem(
            path, f"no such metric of {base.workload}; {nearest(name, sorted(metrics | readings))}", name
        )


def _telemetry(name: str, base: StartingPoint) -> str:
    if base.config.training and name in OF_TELEMETRY:
        return OF_TELEMETRY[name]
    if not base.config.measures:  # a command logs what it wants, when it wants
        return ""
    if parse(name).family in _MEASURED or name in _OF_GRADIENT:
        return "is measured at the steps that telemetry sets, so it is no result of a trial; reports draw it"
    return ""
