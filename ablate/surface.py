"""What an experiment file may say: its keys, their types and defaults, and the JSON Schema for editors. No meaning here."""

from typing import Annotated, Any, Literal

from pydantic import BeforeValidator, Field, WithJsonSchema

from ablate.numerics.spec import Spec
from ablate.recipes import KNOBS, PRESETS
from ablate.workloads import WORKLOADS


def _seeds(value: Any) -> tuple[int, ...]:
    if type(value) is int and 1 <= value <= 10_000:
        return tuple(range(value))
    if isinstance(value, list) and value and all(type(seed) is int and 0 <= seed < 2**32 for seed in value):
        if len(set(value)) == len(value):
            return tuple(value)
        raise ValueError("a seed stands twice")
    raise ValueError("must be how many seeds (1 or more), or a list of different seeds")


_SEEDS_SCHEMA = {"anyOf": [{"type": "integer", "minimum": 1}, {"type": "array", "items": {"type": "integer", "minimum": 0}}]}


class Metric(Spec):
    """What arms are compared by: the value of the last record that has it."""

    name: str = "val/loss"
    direction: Literal["minimize", "maximize"] = "minimize"
    min_effect: float | None = Field(None, gt=0)
    """The smallest difference that matters, in the metric's unit."""


class Published(Spec):
    """A figure from a paper, to stand beside the measured one."""

    arm: str
    """The arm that measures it, by name."""
    metric: str
    value: float
    tolerance: float = Field(0.02, gt=0, lt=1)
    """Relative: how far apart the two may be to be called the same."""
    step: int | None = Field(None, ge=1)
    """At which step; null: the last."""
    source: Annotated[str, Field(pattern=r"\S")]


class Search(Spec):
    """How points are proposed where `ablate` holds ranges."""

    sampler: Literal["tpe", "random", "gp", "cmaes"] = "tpe"
    trials: int = Field(ge=1)
    """Arms to propose; each runs all seeds."""
    seed: int = Field(0, ge=0)
    pruner: Any = None
    rungs: Any = None


class Budget(Spec):
    """Stop starting trials when this much was run; the sweep then ends with status 3."""

    trials: int | None = Field(None, ge=1)
    hours: float | None = Field(None, gt=0)
    cost: Any = None


class Resources(Spec):
    """What one trial needs."""

    gpus: int = Field(0, ge=0)


class TelemetryKeys(Spec):
    """How often what is recorded; not part of a trial's identity."""

    every: int = Field(50, ge=1)
    """Steps between measurements of quantisation error."""
    shadow: int = Field(100, ge=1)
    """Steps between comparisons of the gradient with the one of an unquantised step."""
    log: int = Field(10, ge=1)
    """Steps between records of the training loss."""
    checkpoint: float = Field(60.0, ge=0)
    """Seconds between checkpoints: the most that a killed trial does again."""


_ONE = Metric.model_json_schema()
_METRICS_SCHEMA = {"anyOf": [_ONE, {"type": "array", "items": _ONE, "minItems": 1}]}


class ExperimentFile(Spec):
    """An experiment: one question, the knobs it turns, the baseline, the seeds."""

    version: Literal[1] = Field(alias="schema")
    question: Annotated[str, Field(pattern=r"\S")]
    workload: dict[str, dict[str, Any] | None]
    recipe: str = "nvfp4"
    ablate: dict[str, Any] | None = None
    arms: dict[str, dict[str, Any]] | None = None
    against: Any = "bf16"
    seeds: Annotated[tuple[int, ...], BeforeValidator(_seeds), WithJsonSchema(_SEEDS_SCHEMA)] = (0, 1, 2)
    metric: Annotated[Any, WithJsonSchema(_METRICS_SCHEMA)] = Field(default_factory=dict)
    """One metric, or a list: arms are then compared by each."""
    published: Annotated[tuple[Published, ...], Field(strict=False)] = ()
    search: Search | None = None
    engine: str = "auto"
    retry: int = Field(2, ge=0, le=100)
    """How often a trial that died is started again."""
    budget: Budget = Budget()
    resources: Resources = Resources()
    telemetry: TelemetryKeys = TelemetryKeys()
    constraints: Any = None


NOT_YET = {
    ("search", "pruner"): "pruning is not yet available; leave it out",
    ("search", "rungs"): "pruning is not yet available; leave it out",
    ("budget", "cost"): "not yet available; use budget: {hours: ...} or {trials: ...}",
    ("constraints",): "constraints are not yet available; leave the key out",
}


def json_schema() -> dict[str, Any]:
    """The JSON Schema of an experiment file, for editors."""
    schema = ExperimentFile.model_json_schema(by_alias=True)
    values = {
        knob: {"description": f"{entry.help} Values: {entry.values}.", "anyOf": [{"type": "array"}, {"type": "object"}]}
        for knob, entry in KNOBS.items()
    }
    paths = {"^(recipe|workload)\\.": {"anyOf": [{"type": "array"}, {"type": "object"}]}}
    values["recipe"] = {"type": "array", "items": {"enum": list(PRESETS)}}
    schema["properties"]["ablate"] = {
        "type": "object",
        "properties": values,
        "patternProperties": paths,
        "additionalProperties": False,
    }
    schema["properties"]["recipe"] |= {"enum": list(PRESETS)}
    schema["properties"]["workload"] = {
        "type": "object",
        "properties": {name: {"$ref": f"#/$defs/{name}"} for name in WORKLOADS},
        "additionalProperties": False,
        "maxProperties": 1,
    }
    for name, workload in WORKLOADS.items():
        part = workload.model_json_schema(ref_template="#/$defs/{model}")
        schema["$defs"] |= part.pop("$defs", {}) | {name: part}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "ablate experiment", **schema}
