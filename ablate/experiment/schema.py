"""What an experiment file may say: its keys, their types and defaults, and the JSON Schema for editors. No
meaning here."""

import math
import re
from typing import Annotated, Any, Literal

from pydantic import Field, PlainValidator, TypeAdapter, WithJsonSchema, model_validator

from ablate.engines import AUTO, ENGINES
from ablate.numerics.spec import Spec
from ablate.recipes import KNOBS, PRESETS, Recipe
from ablate.training.hyperparameters import Training
from ablate.training.rank_layout import Layout
from ablate.training.workloads import WORKLOADS
from ablate.training.workloads.knobs import WORKLOAD_KNOBS

MOST_ARMS, MOST_KNOBS, MOST_TRIALS, MOST_RANKS = 10_000, 200, 100_000, 1 << 16
"""Largest numbers of arms and knobs of an experiment, of its trials (arms times seeds), and of processes that
compute one trial."""


class Growth(Spec):
    """Seeds that are added to an arm while its comparison is undecided: 0, 1, 2, ..., never out of order,
    never fewer again."""

    start: int = Field(ge=2)
    """Seeds that every arm gets."""
    most: int = Field(le=10_000)
    """Seeds after which an arm stays undecided."""
    by: Literal["split", "sequence"] = "split"
    """What keeps the intervals valid: 5 % split over the looks from start to most, or a sequence that holds
    at every look for ever."""
    step: int = Field(3, ge=1)
    """Seeds added at a look; few looks leave each a larger part of the 5 %."""

    @model_validator(mode="after")
    def _grows(self) -> "Growth":
        if self.most <= self.start:
            raise ValueError(
                f"most: {self.most} must be above start: {self.start}; without growth write seeds: {self.start}"
            )
        return self

    @property
    def first(self) -> tuple[int, ...]:
        """The seeds that every arm gets."""
        return tuple(range(self.start))

    @property
    def interval(self) -> str:
        """The kind of interval that stays valid, as `stats.Interval` reads it."""
        looks = 1 + math.ceil((self.most - self.start) / self.step)
        return "sequence" if self.by == "sequence" else f"split:{looks}"

    def more(self, count: int) -> tuple[int, ...]:
        """The seeds to add to an arm that has the first `count`; none where that is the most."""
        return tuple(range(count, min(count + self.step, self.most)))


def _seeds(value: Any) -> tuple[int, ...] | Growth:
    if isinstance(value, dict):
        return Growth.model_validate(value)
    if type(value) is int and 1 <= value <= 10_000:
        return tuple(range(value))
    if isinstance(value, list) and value and all(type(seed) is int and 0 <= seed < 2**32 for seed in value):
        if len(set(value)) == len(value):
            return tuple(value)
        raise ValueError("a seed stands twice")
    raise ValueError(
        "must be how many seeds (1 or more), a list of different seeds, or {start: ..., most: ...}"
    )


_SEEDS_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        Growth.model_json_schema(),
    ]
}


class Metric(Spec):
    """What arms are compared by: the value of the last record that has it."""

    name: str = "val/loss"
    direction: Literal["minimize", "maximize"] = "minimize"
    min_effect: (
        Annotated[float, Field(gt=0)] | Annotated[str, Field(pattern=r"^\d*\.?\d*[1-9]\d*\s?%$")] | None
    ) = None
    """The smallest difference that matters, in the metric's unit, or as a share of the baseline's mean:
    `0.1%`."""

    def margin(self, level: float) -> float | None:
        """`min_effect` in the metric's unit, where the baseline's mean is `level`; None where none was given,
        or there is no baseline."""
        if not isinstance(self.min_effect, str):
            return self.min_effect
        margin = abs(level) * float(self.min_effect.rstrip(" %")) / 100
        return margin if margin > 0 else None


_SHARE = r"^[+-]?\d*\.?\d+\s?%$"
_ORDERINGS = {"lower": -1, "higher": 1, "no difference": 0}


def _claim(value: Any) -> float | str:
    if type(value) in (int, float) and math.isfinite(value):
        return float(value)
    if isinstance(value, str) and (value in _ORDERINGS or re.match(_SHARE, value)):
        return value
    raise ValueError("must be a number, a share such as -1.0%, lower, higher or no difference")


_CLAIM_SCHEMA = {
    "anyOf": [{"type": "number"}, {"type": "string", "pattern": _SHARE}, {"enum": list(_ORDERINGS)}]
}


class Published(Spec):
    """A figure from a paper, to stand beside the measured one: of one arm, or of an arm minus another."""

    arm: str
    """The arm that measures it, by name."""
    against: str | None = None
    """The arm that is subtracted, on the same seeds; null: the figure is of `arm` alone."""
    metric: str
    value: Annotated[float | str, PlainValidator(_claim), WithJsonSchema(_CLAIM_SCHEMA)]
    """A number in the metric's unit. Of a difference also a share of the other arm's value, `-1.0%`, or the
    ordering alone."""
    tolerance: float | None = Field(None, gt=0, lt=1)
    """Relative: how far apart the two may be to be called the same, .02 where nothing is given. A difference
    has its interval instead."""
    step: int | None = Field(None, ge=1)
    """At which step; null: the last."""
    source: Annotated[str, Field(pattern=r"\S")]

    @model_validator(mode="after")
    def _of_one_or_of_two(self) -> "Published":
        if self.against is None and isinstance(self.value, str):
            raise ValueError(f"value {self.value} compares two arms: name the other one as `against`")
        if self.against is not None and self.tolerance is not None:
            raise ValueError(
                "tolerance is for a figure of one arm; a difference of two is judged by its interval"
            )
        if self.against == self.arm:
            raise ValueError(f"against {self.against} is the arm itself")
        return self

    @property
    def relative(self) -> bool:
        """Whether it is a share of the other arm's value."""
        return isinstance(self.value, str) and self.value.endswith("%")

    @property
    def amount(self) -> float | None:
        """How large it is, a share as a fraction; None where only an ordering was published."""
        if not isinstance(self.value, str):
            return self.value
        return float(self.value.rstrip(" %")) / 100 if self.relative else None

    @property
    def sign(self) -> int:
        """Which way the published difference goes: 1, -1, or 0 for none."""
        return _ORDERINGS[self.value] if self.amount is None else (self.amount > 0) - (self.amount < 0)


class Search(Spec):
    """How points are proposed where `ablate` holds ranges, and which arms are given up early."""

    sampler: Literal["tpe", "random", "gp", "cmaes", "nsga2"] = "tpe"
    """`nsga2` is made for several objectives, which all but cmaes take. Of knobs that have a condition only
    tpe learns; the others draw them at random, and cmaes those with choices too."""
    trials: int = Field(ge=1, le=MOST_TRIALS)
    """Arms to propose; each runs all seeds, unless it is pruned."""
    seed: int = Field(0, ge=0)
    pruner: Literal["median", "hyperband", "asha", "wilcoxon"] | None = None
    """Which arms to give up: `median` those worse than half of the finished ones, `asha` (successive halving)
    all but the best few at each rung, `hyperband` the same with several first rungs, `wilcoxon` those that
    lose to the best arm seed by seed."""
    rungs: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = ()
    """Training steps at which an arm is judged, by its first seed alone, which all arms share."""
    warm: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Earlier sweeps in the same state folder: their arms, where they have the same knobs, are known to the
    sampler from the start."""
    confirm: int | None = Field(None, ge=2, le=10_000)
    """How many fresh seeds the winner is run on again beside its baseline; null: its gap is called
    exploratory."""


SEVERAL = ("nsga2", "tpe", "gp", "random")
"""The samplers that take several objectives."""
FEWEST_SEEDS = 5
"""With fewer, Wilcoxon's test cannot spare a seed: one-sided, at .1, it needs 4 pairs."""


class Constraint(Spec):
    """What an arm must keep to in its last record, for every seed. That none diverges or runs out of memory
    need not be said."""

    metric: str
    at_most: float | None = None
    at_least: float | None = None

    @model_validator(mode="after")
    def _one_side(self) -> "Constraint":
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("give either at_most or at_least")
        return self

    @property
    def words(self) -> str:
        """`nan/loss at most 0`."""
        return (
            f"{self.metric} at most {self.at_most:g}"
            if self.at_least is None
            else f"{self.metric} at least {self.at_least:g}"
        )


class Budget(Spec):
    """Stop starting trials when this much was run; the sweep then ends with status 3."""

    trials: int | None = Field(None, ge=1)
    hours: float | None = Field(None, gt=0)
    cost: float | None = Field(None, gt=0)
    """In the unit of the price of a slot-hour, which a profile or `--price` gives."""


class Resources(Spec):
    """What one trial needs. No part of what it is: its numbers are the same on any number of ranks, but for
    the order of additions."""

    gpus: float = Field(0.0, ge=0, le=MOST_RANKS)
    """A part of one for trials that share a GPU, or as many whole ones as compute a trial together; 0: one,
    where trials run on GPUs. On CPUs it means nothing."""
    ranks: int | None = Field(None, ge=1, le=MOST_RANKS)
    """Processes that compute a trial together; null: one for each of its GPUs, and one on CPUs."""
    sharded: bool = False
    """Each rank keeps a part of the parameters, gradients and moments (FSDP), and gathers a quantised weight
    as codes and scales."""

    @model_validator(mode="after")
    def _ranks_have_gpus(self) -> "Resources":
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"gpus {self.gpus:g} is neither a part of one GPU nor a number of whole ones")
        if self.ranks and self.gpus >= 1 and self.ranks != self.gpus:
            raise ValueError(
                f"ranks {self.ranks} differ from gpus {self.gpus:g}: each rank has a GPU of its own; leave one of them out"
            )
        if self.ranks and self.ranks > 1 and 0 < self.gpus < 1:
            raise ValueError(
                f"ranks {self.ranks} of a trial with {self.gpus:g} of a GPU: each rank has a GPU of its own"
            )
        if self.sharded and self.most.ranks == 1:
            raise ValueError("sharded has no effect on one rank; give gpus or ranks")
        return self

    @property
    def most(self) -> Layout:
        """The layout with as many ranks as there may be."""
        return Layout(self.ranks or max(1, int(self.gpus)), self.sharded)

    def misfit(self, config: Any, recipe: Recipe, engine: str) -> str | None:
        """Why a trial cannot be computed by so many ranks; None where it can, and by one always."""
        if self.most.ranks == 1:
            return None
        if not isinstance(config, Training):
            return f"workload {type(config).__name__.lower()} is computed by one rank; leave out ranks, and gpus above 1"
        return next(self.most.misfits(config, recipe, engine), None)

    def layout(self, device: str) -> Layout:
        """How a trial is laid out on a class of device."""
        return self.most if device == "cuda" or self.ranks else Layout()

    def gpus_of(self, device: str) -> float:
        """GPUs that a trial takes on a class of device."""
        return (self.gpus or float(self.most.ranks)) if device == "cuda" else 0.0


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
    ablate: dict[str, Any] | None = Field(None, max_length=MOST_KNOBS)
    arms: dict[str, dict[str, Any]] | None = Field(None, max_length=MOST_ARMS)
    against: Any = "bf16"
    """The baseline. A preset, or knobs: applied at each arm's own workload values, except those that the
    knobs set. The name of an arm, or exactly its knobs: that arm, for all others."""
    seeds: Annotated[tuple[int, ...] | Growth, PlainValidator(_seeds), WithJsonSchema(_SEEDS_SCHEMA)] = (
        0,
        1,
        2,
    )
    metric: Annotated[Any, WithJsonSchema(_METRICS_SCHEMA)] = Field(default_factory=dict)
    """One metric, or a list: arms are then compared by each, and a search has several objectives."""
    published: Annotated[tuple[Published, ...], Field(strict=False)] = ()
    search: Search | None = None
    engine: str = AUTO
    """What computes the linear layers: emulated (any device), transformer_engine (its kernels), or auto: the
    emulator, and why."""
    retry: int = Field(2, ge=0, le=100)
    """How often a trial that died is started again."""
    patience: float = Field(60.0, gt=0)
    """Seconds without a record after which a trial is taken to hang and ended; 20 of its median steps, where
    that is longer."""
    budget: Budget = Budget()
    resources: Resources = Resources()
    telemetry: TelemetryKeys = TelemetryKeys()
    constraints: Annotated[tuple[Constraint, ...], Field(strict=False)] = ()
    """What a searched arm must keep to; the sampler learns where that is."""


def json_schema() -> dict[str, Any]:
    """The JSON Schema of an experiment file, for editors."""
    schema = ExperimentFile.model_json_schema(by_alias=True)
    values = {
        knob: {
            "description": f"{entry.help} Values: {entry.values}.",
            "anyOf": [{"type": "array", "items": TypeAdapter(entry.type).json_schema()}, {"type": "object"}],
        }
        for knob, entry in KNOBS.items()
    }
    for knob, text in WORKLOAD_KNOBS.items():
        description = f"{text} Short for workload.{knob}, in workloads that have it."
        values[knob] = {"description": description, "anyOf": [{"type": "array"}, {"type": "object"}]}
    paths = {"^(recipe|workload)\\.": {"anyOf": [{"type": "array"}, {"type": "object"}]}}
    values["recipe"] = {"type": "array", "items": {"enum": list(PRESETS)}}
    schema["properties"]["ablate"] = {
        "type": "object",
        "maxProperties": MOST_KNOBS,
        "properties": values,
        "patternProperties": paths,
        "additionalProperties": False,
    }
    schema["properties"]["recipe"] |= {"enum": list(PRESETS)}
    schema["properties"]["engine"] |= {"enum": [AUTO, *ENGINES]}
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
