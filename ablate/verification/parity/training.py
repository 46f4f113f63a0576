"""Short training runs in both engines, compared with runs that differ only in the order of additions.

Two correct engines do not stay on one loss curve: a different last bit changes a code, which changes others,
and within some twenty steps the losses are as far apart as they ever get. The yardstick is therefore made of
twins: emulated runs with the same seed, recipe and data, whose products add the same terms in another order,
and end a few steps of fp32 higher or lower.

- Losses may be `SLACK` times as far from the emulator's as those of the furthest twin. This detects gross
  errors only: even a run in bf16, reported for comparison, is hardly further away than a twin.
- Gradients of one batch, from one state of the emulated run, may on average over several steps be `SLACK`
  times as far from the emulator's as those of the furthest twin. No error has accumulated there, so that this
  test is ten times as sensitive.

Smaller errors are detected by the comparisons of casts and layers. This test is for errors that those do not
cover.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.products import Call
from ablate.numerics.kernels.cuda import PLAIN, Finish
from ablate.numerics.product import split_product
from ablate.numerics.quantize import Operand
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Recipe
from ablate.training.loop import PreparedRun, Record
from ablate.training.trial_run import Telemetry
from ablate.training.workloads.gpt import Gpt
from ablate.training.workloads.text import TextWorkload
from ablate.verification.check_result import Check, Row
from ablate.verification.conformance.reference_product import rounded_to_nearest
from ablate.verification.parity.bench import Bench

SLACK = 3.0
FIRST, CLOSE = 5, 1e-3
"""Number of first steps in which losses must agree, and the relative tolerance. The output layer starts at
zero, so that the first loss is the logarithm of the vocabulary size."""
TRAINED = {"nvfp4": "nvfp4", "mxfp4": "mxfp4", "mxfp8": "mxfp8", "fp8": "fp8_current"}
"""Preset that represents a family."""
ENDS, FAST_ENDS = 2.0**-20, 2.0**-13
"""Largest relative error of a tensor core's sum of some hundred terms; the second one in Hopper's fast FP8
mode, which truncates at 2^-13 instead of 2^-23."""


class Twin(NamedTuple):
    """Difference of a twin from the emulator: order of additions, and a factor."""

    order: Callable[[int], Tensor]
    """Function from the number of terms to their order of addition, a permutation."""
    factor: float
    """Factor of each sum before it is rounded."""


def twins(ends: float) -> dict[str, Twin]:
    """Return three twins, whose sums differ by a relative error of at most `ends`."""

    def odd_first(n: int) -> Tensor:
        return torch.cat((torch.arange(1, n, 2), torch.arange(0, n, 2)))

    return {
        "backwards": Twin(lambda n: torch.arange(n - 1, -1, -1), 1.0),
        "odd ones first, higher": Twin(odd_first, 1 + ends),
        "second half first, lower": Twin(lambda n: torch.arange(n).roll(n // 2), 1 - ends),
    }


TWINS = tuple(twins(ENDS))
"""Names of the twins."""


@dataclass(frozen=True)
class Curves:
    """Losses and gradients of the runs of one family: `te` (the compared engine), `emulated`, `bf16`, and one
    for each twin."""

    family: str
    losses: dict[str, list[float]]
    """Training loss of each step, by run."""
    gradients: dict[str, list[float]]
    """Relative distance to the emulator's gradient from the same state, at some steps, by run."""

    def distance(self, name: str) -> float:
        """Return the mean of |loss - emulator's loss| over all steps; infinite if a run ended early."""
        ours, theirs = self.losses["emulated"], self.losses[name]
        if len(ours) != len(theirs):
            return torch.inf
        return fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True))

    @property
    def yardstick(self) -> float:
        """Distance of the furthest twin, at least the fp32 resolution of a loss; infinite if a twin ended
        early."""
        return max(*(self.distance(name) for name in TWINS), 2.0**-22 * max(self.losses["emulated"]))

    def excess(self, name: str) -> float:
        """Return the distance of a run's gradients over that of the furthest twin, averaged over steps."""
        furthest = (
            max(*(self.gradients[twin][index] for twin in TWINS), 1e-6)
            for index in range(len(self.gradients[name]))
        )
        return fmean(far / limit for far, limit in zip(self.gradients[name], furthest, strict=True))


def short_training(bench: Bench, family: str, curves: list[Curves]) -> Iterator[Check]:
    """Yield the check of a family's preset; its losses are appended to `curves`."""
    yield Check(
        "A short training", partial(_compared, bench, family, curves), title=f"training, {TRAINED[family]}"
    )


def _compared(bench: Bench, family: str, curves: list[Curves]) -> Iterator[Row]:
    """Train, and yield three rows with a verdict and the rows that they are to be compared with."""
    runs = trained(bench, family)
    curves.append(runs)
    theirs, ours, name = runs.losses["te"], runs.losses["emulated"], TRAINED[family]
    early = max(abs(a - b) / abs(b) for a, b in zip(theirs[:FIRST], ours[:FIRST], strict=False))
    limit = f"at most {CLOSE:g} of the loss"
    yield Row(f"{name}: losses of steps 1 to {FIRST}", f"{early:.2g} apart", limit, early <= CLOSE)
    excess, furthest = runs.excess("te"), max(runs.gradients["te"])
    summary = f"{furthest:.2g} of its norm at most; {excess:.2g} x the furthest twin"
    limit = f"on the mean at most {SLACK:g} x"
    yield Row(f"{name}: gradients from one state", summary, limit, excess <= SLACK)
    largest = max((abs(a - b) for a, b in zip(theirs, ours, strict=False)), default=torch.inf)
    drift, most = runs.distance("te"), SLACK * runs.yardstick
    summary = f"{drift:.2g} apart on the mean, {largest:.2g} at most"
    limit = f"mean at most {most:.2g}: {SLACK:g} x the furthest twin"
    yield Row(f"{name}: losses of {len(ours)} steps", summary, limit, drift <= most < torch.inf)
    for twin in TWINS:
        far = f"losses {runs.distance(twin):.2g}, gradients {max(runs.gradients[twin]):.2g} apart"
        yield Row(f"{name}: twin, {twin}", far)
    far = f"losses {runs.distance('bf16'):.2g} apart, gradients {runs.excess('bf16'):.2g} x the furthest twin"
    yield Row(f"{name}: bf16, for comparison", far)


def trained(bench: Bench, family: str) -> Curves:
    """Train all runs with one seed; return their losses, and gradients from the emulated run's states."""
    recipe = PRESETS[TRAINED[family]]()
    recipe = recipe.model_copy(update=dict(rounded_to_nearest(recipe.products)))
    ends = FAST_ENDS if bench.fast_sums and family == "fp8" else ENDS
    kinds: dict[str, tuple[Recipe, str, Twin | None]]
    kinds = {"te": (recipe, bench.engine, None), "bf16": (PRESETS["bf16"](), "emulated", None)}
    kinds |= {name: (recipe, "emulated", twin) for name, twin in twins(ends).items()}
    config = Gpt.model_validate(bench.model | {"steps": bench.steps, "eval_every": bench.steps})

    def prepared(recipe: Recipe, engine: str, twin: Twin | None) -> PreparedRun:
        run = config.prepare(recipe, 0, str(bench.device), engine)
        if twin:
            for layer in run.engine.layers.values():
                layer.whole_graph = TwinProducts(layer, twin)
        return run

    others, own = {name: prepared(*kind) for name, kind in kinds.items()}, prepared(recipe, "emulated", None)
    gradients: dict[str, list[float]] = {name: [] for name in kinds}
    main = prepared(recipe, "emulated", None)
    losses: dict[str, list[float]] = {"emulated": []}
    for record in _records(config, main):
        losses["emulated"].append(record.metrics["train/loss"])
        if record.step in {1, bench.steps // 20, bench.steps // 5, bench.steps // 2}:
            state = main.model.state_dict()
            ours = _gradient(own, config, state, record.step)
            for name, run in others.items():
                theirs = _gradient(run, config, state, record.step)
                gradients[name].append(float((theirs - ours).norm() / ours.norm()))
    for name, kind in kinds.items():
        losses[name] = [record.metrics["train/loss"] for record in _records(config, prepared(*kind))]
    return Curves(family, losses, gradients)


def _records(config: TextWorkload, run: PreparedRun) -> Iterator[Record]:
    return config.train(run, Telemetry(every=0, shadow=0, log=1))


def _gradient(run: PreparedRun, config: TextWorkload, state: dict[str, Tensor], step: int) -> Tensor:
    """Return the gradient of a step's first batch from a state, fp64, flattened."""
    run.model.load_state_dict(state)
    run.model.zero_grad()
    run.engine.at(step, config.length)
    run.engine.clock.stream, run.engine.clock.step = "training", step
    run.engine.clock.begin(0)
    with run.engine.still_weights():
        (run.loss or run.model)(*run.batch(step, 0)).backward()
    return torch.cat([parameter.grad.flatten().double() for parameter in run.model.parameters()])


class TwinProducts:
    """Products of an emulated layer with the order of additions of a twin."""

    def __init__(self, layer: EmulatedLinear, twin: Twin) -> None:
        self.layer, self.twin = layer, twin

    def __getattr__(self, name: str) -> Any:
        """Return the layer's own: all but the product of two operands."""
        return getattr(self.layer, name)

    def __call__(self, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
        """Return y [tokens, out] of x [tokens, in], w [out, in] and bias [out], differentiable in all."""
        y = Call.apply(x, w, self, self.layer.products, self.layer.begin_call())
        return y if bias is None else (y + bias).to(x.dtype)

    def multiply(
        self, a: list[Operand], b: list[Operand], out: torch.dtype, finish: Finish = PLAIN
    ) -> Tensor:
        def reordered(part: Operand) -> Operand:
            values = part.dense
            permutation = self.twin.order(values.shape[1]).to(values.device)
            return Operand(values[:, permutation], part.quant, part.amax)

        left, right = ([reordered(part) for part in parts] for parts in (a, b))
        return finish.of((split_product(left, right, torch.float32) * self.twin.factor).to(out))
