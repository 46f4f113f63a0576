"""Keys of an experiment file: their types, defaults and ranges, and the JSON Schema for editors.

Only single values and contradictions within one mapping are checked here; `load` checks the rest."""

import math
import re
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    PlainValidator,
    TypeAdapter,
    WithJsonSchema,
    model_validator,
)

from ablate.engines import AUTO, ENGINES
from ablate.errors import nearest
from ablate.files import Json
from ablate.numerics.spec import Spec
from ablate.recipes import KNOBS, PRESETS, Recipe
from ablate.recipes.cells import What, Where
from ablate.training.rank_layout import Layout
from ablate.training.trial_run import Telemetry
from ablate.training.workloads import WORKLOADS
from ablate.training.workloads.base import Workload
from ablate.training.workloads.knobs import WORKLOAD_KNOBS

if TYPE_CHECKING:
    Plain = Json
else:  # pydantic checks none of it: values of knobs are checked as arms are built
    Plain = Any

MOST_ARMS, MOST_KNOBS, MOST_TRIALS, MOST_RANKS = 10_000, 200, 100_000, 1 << 16
"""Largest numbers of arms and knobs of an experiment, of its trials (arms times seeds), and of processes that
compute one trial."""


class Growth(Spec):
    """Seeds that are added to an arm while its comparison is undecided: 0, 1, 2, ..., in order; none is
    removed."""

    start: int = Field(ge=2)
    """Seeds that every arm gets."""
    most: int = Field(le=10_000)
    """Seeds after which an arm stays undecided."""
    by: Literal["split", "sequence"] = "split"
    """Method that keeps the intervals valid: the 5 % are split over the looks, or a confidence sequence holds
    at all."""
    step: int = Field(3, ge=1)
    """Seeds added at a look; few looks leave each a larger part of the 5 %."""

    @model_validator(mode="after")
    def _grows(self) -> "Growth":
        if self.most <= self.start:
            raise ValueError(
                f"most: {self.most} must be above start: {self.start}; "
                f"without growth write seeds: {self.start}"
            )
        return self

    @property
    def first(self) -> tuple[int, ...]:
        """Seeds that every arm gets."""
        return tuple(range(self.start))

    @property
    def interval(self) -> str:
        """Kind of interval that stays valid: `sequence`, or `split:n` for n looks."""
        looks = 1 + math.ceil((self.most - self.start) / self.step)
        return "sequence" if self.by == "sequence" else f"split:{looks}"

    def more(self, count: int) -> tuple[int, ...]:
        """Return the seeds to add to an arm that has the first `count`; none at the largest number."""
        return tuple(range(count, min(count + self.step, self.most)))


def _engine(name: str) -> str:
    if name not in (AUTO, *ENGINES):
        raise ValueError(f"no such engine; {nearest(name, [AUTO, *ENGINES])}")
    return name


def _recipe(value: object) -> object:
    """Refuse what is neither text nor a mapping in one sentence, instead of one for each of the two."""
    if not isinstance(value, str | dict):
        raise ValueError("a recipe is a preset's name, a recipe file (.yaml), or the fields of a recipe")
    return value


_MOST_SEEDS = 10_000


def _seeds(value: object) -> tuple[int, ...] | Growth:
    if isinstance(value, dict):
        return Growth.model_validate(value)
    if isinstance(value, int) and type(value) is int and 1 <= value <= _MOST_SEEDS:
        return tuple(range(value))
    if isinstance(value, list) and value and all(type(seed) is int and 0 <= seed < 2**32 for seed in value):
        if len(set(value)) == len(value):
            return tuple(value)
        raise ValueError("a seed is given twice")
    raise ValueError(
        f"must be a number of seeds (1 to {_MOST_SEEDS:,}), a list of different seeds, or"
        " {start: ..., most: ...}"
    )


_SEEDS_SCHEMA = {
    "anyOf": [
        {"type": "integer", "minimum": 1},
        {"type": "array", "items": {"type": "integer", "minimum": 0}},
        Growth.model_json_schema(),
    ]
}


class Metric(Spec):
    """Metric by which arms are compared: its value in the last record that has it.

    Metrics that telemetry changes are refused: instead of `train/loss`, built-in workloads have
    `train/recent_loss`, the mean of the last 10 steps.
    """

    name: str = "val/loss"
    direction: Literal["minimize", "maximize"] = "minimize"
    min_effect: (
        Annotated[float, Field(gt=0)] | Annotated[str, Field(pattern=r"^\d*\.?\d*[1-9]\d*\s?%$")] | None
    ) = None
    """Smallest difference that matters, in the metric's unit, or as a share of the baseline's mean:
    `0.1%`."""

    any_length: bool = False
    """True to compare runs of your own code that ended at unequal steps; false: such arms have no verdict."""

    def margin(self, level: float) -> float | None:
        """Return `min_effect` in the metric's unit for a baseline with mean `level`; None if it is not given,
        or there is no baseline."""
        if not isinstance(self.min_effect, str):
            return self.min_effect
        margin = abs(level) * float(self.min_effect.rstrip(" %")) / 100
        return margin if margin > 0 else None


_SHARE = r"^[+-]?\d*\.?\d+\s?%$"
_ORDERINGS = {"lower": -1, "higher": 1, "no difference": 0}


def _claim(value: object) -> float | str:
    if isinstance(value, int | float) and type(value) is not bool and math.isfinite(value):
        return float(value)
    if isinstance(value, str) and (value in _ORDERINGS or re.match(_SHARE, value)):
        return value
    raise ValueError("must be a number, a share such as -1.0%, lower, higher or no difference")


_CLAIM_SCHEMA = {
    "anyOf": [{"type": "number"}, {"type": "string", "pattern": _SHARE}, {"enum": list(_ORDERINGS)}]
}


class Published(Spec):
    """Figure from a paper, shown beside the measured one: for one arm, or for the difference of two."""

    arm: str
    """Name of the arm that measures it."""
    against: str | None = None
    """Name of the arm that is subtracted, on the same seeds; null: the figure is for `arm` alone."""
    metric: str
    value: Annotated[float | str, PlainValidator(_claim), WithJsonSchema(_CLAIM_SCHEMA)]
    """Number in the metric's unit. For a difference also a share of the other arm's value, `-1.0%`, or the
    direction."""
    tolerance: float | None = Field(None, gt=0, lt=1)
    """Largest relative distance at which the two figures count as equal; null: .02. A difference is judged by
    its interval instead."""
    step: int | None = Field(None, ge=1)
    """Step of the figure; null: the last."""
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
        """Return True if `value` is a share of the other arm's value."""
        return isinstance(self.value, str) and self.value.endswith("%")

    @property
    def amount(self) -> float | None:
        """Published amount, a share as a fraction; None if only a direction was published."""
        if not isinstance(self.value, str):
            return self.value
        return float(self.value.rstrip(" %")) / 100 if self.relative else None

    @property
    def sign(self) -> int:
        """Sign of the published difference: 1, -1, or 0 for none."""
        return _ORDERINGS[str(self.value)] if self.amount is None else (self.amount > 0) - (self.amount < 0)


Multiple = Annotated[int, Field(ge=1, le=1000)]
Glob = Annotated[str, Field(min_length=1)]
START = "start"
"""Trunk of windows that begin from the weights that the workload itself starts from."""


class Design(Spec):
    """Forks of a trunk in place of full runs.

    What is compared is the damage that a recipe does given a past in high precision, not the gap of full runs
    (docs/reference/statistics.md).
    """

    trunk: str = "bf16"
    """Recipe of the trunk: a preset; or `start`: there is none, and windows begin from the weights that the
    workload starts from (`finetune`: those of its model)."""
    positions: Annotated[int, Field(ge=1, le=100)] | Annotated[tuple[float, ...], Field(strict=False)] = 3
    """Number of positions at which windows leave the trunk, evenly between .4 of the steps (or the end of the
    warm-up) and the start of the decay; or a list of shares of the steps."""
    window: float = Field(0.15, gt=0, le=4)
    """Steps of the shortest window, as a share of the workload's steps."""
    horizons: Annotated[tuple[Multiple, ...], Field(strict=False, min_length=1)] = (1, 2, 4)
    """Lengths of the windows, in multiples of the shortest. The longest is the one that verdicts are on."""
    bad: str | None = None
    """A known-bad arm: an arm of this file, or a preset. Only if it is resolved is an arm called equivalent;
    without `min_effect` a fifth of its damage is the smallest that matters."""
    anneal: bool = True
    """The learning rate falls linearly to zero within a window; false: it stays the trunk's own."""

    @property
    def shape(self) -> "Design":
        """The design without its known-bad arm, which changes no value of another."""
        return self.model_copy(update={"bad": None})

    @model_validator(mode="after")
    def _known(self) -> "Design":
        if self.trunk != START and self.trunk not in PRESETS:
            raise ValueError(
                f"trunk {self.trunk!r} is neither a preset nor {START}; to go on from a checkpoint of your"
                f" own, write trunk: {START}, and the file as workload.start"
            )
        if list(self.horizons) != sorted(set(self.horizons)):
            raise ValueError(f"horizons {list(self.horizons)} must be different numbers in ascending order")
        shares = (1,) if isinstance(self.positions, int) else self.positions
        if not shares or not all(0 < share <= 1 for share in shares) or list(shares) != sorted(shares):
            raise ValueError(
                f"positions {list(shares)} must be shares of the steps, from above 0 to 1, in ascending order"
            )
        return self


class Map(Spec):
    """Parts of the recipe that are trained alone, each an arm: where in the model its damage comes from.

    A cell is a group of layers and a group of operands; everything else stays in high precision. Its error is
    amplified, since the recipe's own is too small to be seen in one cell.
    """

    layers: Where | Annotated[tuple[Glob, ...], Field(strict=False, min_length=1)] = "blocks"
    """Groups of layers: model, blocks, kinds (the same layer of all blocks), layers; or globs on names, each
    a group, for code of your own."""
    operands: What = "products"
    """Groups of operands: recipe (all six), products, operands."""
    times: float = Field(4.0, ge=1, le=16)
    """Factor of the error; 1: the recipe's own."""


class Asked(Spec):
    """The comparison that the question is about: a knob's values, on average over the other knobs but those
    that are held; an arm and another; or a whole family."""

    knob: str | None = None
    """Knob of `ablate`: each of its values is compared with the reference (false, or the first value)."""
    given: dict[str, Plain] = Field(default_factory=dict)
    """Values at which other knobs are held; the effect is the mean over those that are not named."""
    arm: str | None = None
    """Name of an arm."""
    against: str | None = None
    """Name of the arm that it is compared with; default: its baseline."""
    family: Literal["arms", "knobs", "winner"] | None = None
    """`arms`: every arm with its baseline. `knobs`: the main effects of knobs. `winner`: a search's winner on
    fresh seeds."""

    @model_validator(mode="after")
    def _one_kind(self) -> "Asked":
        if [self.knob, self.arm, self.family].count(None) != 2:
            raise ValueError("name either a knob, with the values of others as given, or an arm, or a family")
        if self.given and self.knob is None:
            raise ValueError("given holds knobs beside a knob; an arm has its own values")
        if self.against is not None and self.arm is None:
            raise ValueError("against is the arm that an arm is compared with; name the arm")
        return self


class Search(Spec):
    """Search over the ranges under `ablate`: its sampler, and the pruner that stops arms early."""

    sampler: Literal["tpe", "random", "gp", "cmaes", "nsga2"] = "tpe"
    """Optuna's sampler. All but cmaes take several objectives, for which `nsga2` is made. Only tpe learns
    from knobs with a condition."""
    trials: int = Field(ge=1, le=MOST_TRIALS)
    """Arms to propose; each runs all seeds, unless it is pruned."""
    seed: int = Field(0, ge=0)
    pruner: Literal["median", "hyperband", "asha", "wilcoxon"] | None = None
    """Rule by which arms are stopped: `median`: worse than half of the finished ones; `asha`: all but the
    best few at each rung; `hyperband`: the same with several first rungs; `wilcoxon`: worse than the best arm
    seed by seed."""
    rungs: Annotated[tuple[Annotated[int, Field(ge=1)], ...], Field(strict=False)] = ()
    """Training steps at which an arm is judged, by its first seed alone, which is the same for all arms."""
    warm: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Earlier sweeps in the same state folder: the sampler starts with their arms, if these have the same
    knobs. Their values are taken as they are: name sweeps of the same workload, steps and base recipe."""
    confirm: int | None = Field(None, ge=2, le=10_000)
    """Number of fresh seeds on which the winner and its baseline are run again; null: none, and the
    difference is called exploratory."""


class Blame(Spec):
    """Search for the parts of a recipe that cause its gap to the baseline, or its divergence.

    Random halves of the units run in pairs, on seeds of their own; candidates are proved on `seeds`.
    """

    where: Literal["model", "blocks", "kinds", "layers"] = "blocks"
    """Layers of a unit: all; those of a block; those with one name within their blocks; one."""
    what: Literal["recipe", "products", "operands", "parts"] = "recipe"
    """Operands of a unit: all six, those of a product, or one. `parts`: fields of the recipe in which it
    differs from a quantised baseline."""
    budget: int = Field(60, ge=1, le=MOST_TRIALS)
    """Largest number of runs, those of the recipe and of its baseline included."""
    alpha: float = Field(0.05, gt=0, lt=0.5)
    """Chance that any unit is named that does no damage beyond `metric.min_effect` (0 without it)."""
    most: int = Field(2, ge=1, le=20)
    """Largest number of candidates that are proved, each alone. With so few units there is no search."""

    @model_validator(mode="after")
    def _one_kind(self) -> "Blame":
        if self.what == "parts" and "where" in self.model_fields_set:
            raise ValueError("what: parts has fields of a recipe as units, in all layers; leave out where")
        if self.where == "model" and self.what == "recipe":
            raise ValueError("where: model, what: recipe is one unit, which carries all of the gap")
        return self


SEVERAL = ("nsga2", "tpe", "gp", "random")
"""Samplers that take several objectives."""
FEWEST_SEEDS = 5
"""Smallest number of seeds for pruner wilcoxon: its one-sided test at .1 needs 4 pairs, so that with fewer
seeds no arm could be stopped before its last."""


class Constraint(Spec):
    """Limit of a metric in an arm's last record, for every seed. A trial that diverges or runs out of memory
    violates it."""

    metric: str
    at_most: float | None = None
    at_least: float | None = None

    @model_validator(mode="after")
    def _one_side(self) -> "Constraint":
        if (self.at_most is None) == (self.at_least is None):
            raise ValueError("give either at_most or at_least")
        return self

    @property
    def description(self) -> str:
        """Constraint in one line: `nan/activation at most 0`."""
        if self.at_least is not None:
            return f"{self.metric} at least {self.at_least:g}"
        return f"{self.metric} at most {self.at_most:g}"


class Budget(Spec):
    """Limits after which no more trials are started; the sweep then ends with exit status 3."""

    trials: int | None = Field(None, ge=1)
    hours: float | None = Field(None, gt=0)
    cost: float | None = Field(None, gt=0)
    """Cost, in the unit of the price of a slot-hour, which a profile or `--price` gives."""


class Resources(Spec):
    """Resources of one trial. They are not part of its identity: its numbers are the same on any number of
    ranks, except for the order of additions."""

    gpus: float = Field(0.0, ge=0, le=MOST_RANKS)
    """GPUs of a trial: a whole number, or a fraction if trials share a GPU; 0: one, if trials run on GPUs. No
    effect on CPUs."""
    ranks: int | None = Field(None, ge=1, le=MOST_RANKS)
    """Processes that compute a trial together; null: one for each of its GPUs. `ranks: 1`: one process of
    your own code gets all GPUs."""
    sharded: bool = False
    """Shard parameters, gradients and moments over the ranks (FSDP); a quantised weight is gathered as codes
    and scales."""

    @model_validator(mode="after")
    def _ranks_have_gpus(self) -> "Resources":
        if self.gpus > 1 and self.gpus != int(self.gpus):
            raise ValueError(f"gpus {self.gpus} is neither a fraction of one GPU nor a whole number")
        if self.ranks and self.ranks > 1 and self.gpus >= 1 and self.ranks != self.gpus:
            raise ValueError(
                f"ranks {self.ranks} differ from gpus {self.gpus:g}: each rank has a GPU of its own; "
                "leave one of them out"
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
        """Layout with the largest number of ranks."""
        return Layout(self.ranks or max(1, int(self.gpus)), self.sharded)

    def misfit(self, config: Workload, recipe: Recipe, engine: str) -> str | None:
        """Return the reason why a trial cannot be computed by so many ranks; None if it can. One rank always
        can."""
        name = type(config).__name__.lower()
        if self.most.ranks == 1:
            if self.gpus > 1 and not config.own_code:
                return f"workload {name} uses one GPU a rank, of {self.gpus:g}; leave out ranks: 1"
            return None
        if config.own_code and not self.ranks:
            return (
                f"workload {name} is one process: write ranks: 1 beside gpus: {self.gpus:g}, and it gets all"
            )
        if config.training is None:
            return f"workload {name} is computed by one rank; leave out ranks, and gpus above 1"
        return next(self.most.misfits(config.training, recipe, engine), None)

    def layout(self, device: str) -> Layout:
        """Return the layout of a trial on a class of device (`cpu` or `cuda`)."""
        return self.most if device == "cuda" or self.ranks else Layout()

    def gpus_of(self, device: str) -> float:
        """Return the number of GPUs that a trial takes on a class of device."""
        return (self.gpus or float(self.most.ranks)) if device == "cuda" else 0.0


_ONE = Metric.model_json_schema()
_METRICS_SCHEMA = {"anyOf": [_ONE, {"type": "array", "items": _ONE, "minItems": 1}]}


class ExperimentFile(Spec):
    """Experiment: one question, the knobs that vary, the baseline, the seeds."""

    version: Literal[1] = Field(alias="schema")
    question: Annotated[str, Field(pattern=r"\S"), AfterValidator(str.strip)]
    workload: dict[str, dict[str, Plain] | None]
    recipe: Annotated[str | dict[str, Plain], BeforeValidator(_recipe)] = "nvfp4"
    """A preset; a recipe file (YAML), relative to this file; or the recipe's fields, with `from: <preset>`
    only those that differ from it."""
    ablate: dict[str, Plain] | None = Field(None, max_length=MOST_KNOBS)
    arms: dict[str, dict[str, Plain]] | None = Field(None, max_length=MOST_ARMS)
    map: Map | None = None
    """Cells of the recipe in place of `ablate` and `arms`. Without `design` they are windows of a fifth of
    the steps, and without `seeds` 8 of each."""
    against: Plain = "bf16"
    """Baseline: a preset or knobs, at each arm's own workload values; or the name of an arm, for all others.
    """
    seeds: Annotated[tuple[int, ...] | Growth, PlainValidator(_seeds), WithJsonSchema(_SEEDS_SCHEMA)] = (
        0,
        1,
        2,
    )
    answer: Asked | None = None
    """The comparison that answers the question, or a family of them; default: the recipe's knobs that are
    turned, else every arm against its baseline."""
    metric: Annotated[Plain, WithJsonSchema(_METRICS_SCHEMA)] = Field(default_factory=dict)
    """One metric, or a list: arms are then compared by each, and a search has several objectives."""
    published: Annotated[tuple[Published, ...], Field(strict=False)] = ()
    search: Search | None = None
    design: Design | None = None
    """Forks of a trunk in place of full runs."""
    blame: Blame | None = None
    """Search for what causes the gap of `recipe` to the baseline, in place of `ablate` and `arms`."""
    null: bool = False
    """Add an arm that is the baseline again, by other random draws or one ulp of the starting weights apart.
    """
    engine: Annotated[str, AfterValidator(_engine)] = AUTO
    """Engine that computes the linear layers (docs/run/tensor_cores.md); `auto`: the first that was found to
    agree with the emulator here, else the emulator."""
    retry: int = Field(2, ge=0, le=100)
    """Largest number of restarts of a trial that died."""
    patience: float = Field(60.0, gt=0)
    """Seconds without a record after which a trial counts as hung and is ended; at least 20 of its median
    steps."""
    budget: Budget = Budget()
    resources: Resources = Resources()
    telemetry: Telemetry = Telemetry()
    constraints: Annotated[tuple[Constraint, ...], Field(strict=False)] = ()
    """Limits for the arms of a search; the sampler learns where they hold."""

    @model_validator(mode="before")
    @classmethod
    def _of_a_map(cls, data: Any) -> Any:
        if isinstance(data, dict) and data.get("map") is not None:
            return {"design": {"positions": 1, "window": 0.2, "horizons": [1]}, "seeds": 8} | data
        return data

    @property
    def first_seeds(self) -> tuple[int, ...]:
        """Seeds that every arm gets."""
        return self.seeds.first if isinstance(self.seeds, Growth) else self.seeds

    @property
    def growth(self) -> Growth | None:
        """Rule that adds seeds to an undecided arm; None: no seeds are added."""
        return self.seeds if isinstance(self.seeds, Growth) else None


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema of an experiment file, for editors."""
    schema = ExperimentFile.model_json_schema(by_alias=True)
    values: dict[str, object] = {
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
    file = {"type": "string", "pattern": r"\.(ya?ml|json)$"}
    listed = {"type": "array", "items": {"anyOf": [{"enum": list(PRESETS)}, file]}}
    values["recipe"] = {"anyOf": [listed, {"type": "object"}]}
    schema["properties"]["ablate"] = {
        "type": "object",
        "maxProperties": MOST_KNOBS,
        "properties": values,
        "patternProperties": paths,
        "additionalProperties": False,
    }
    schema["properties"]["recipe"]["anyOf"] = [{"enum": list(PRESETS)}, file, {"type": "object"}]
    schema["properties"]["engine"] |= {"enum": [AUTO, *ENGINES]}
    workloads: dict[str, object] = {}
    schema["properties"]["workload"] = {
        "type": "object",
        "properties": workloads,
        "additionalProperties": False,
        "maxProperties": 1,
    }
    for name, workload in WORKLOADS.items():
        part = workload.model_json_schema(ref_template="#/$defs/{model}")
        schema["$defs"] |= part.pop("$defs", {}) | {name: part}
        given = {"$ref": f"#/$defs/{name}"}
        # `gpt:` alone has all defaults.
        workloads[name] = given if "required" in part else {"anyOf": [given, {"type": "null"}]}
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", "title": "ablate experiment", **schema}
