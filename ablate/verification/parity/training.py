"""A short training in both engines, and how far apart runs come that differ in nothing but the last bits of
their sums.

Two sound engines do not stay on one curve: a last bit that falls the other way moves a code, that moves
others, and within some twenty steps losses are as far apart as they ever come. So the yardstick is made of
twins: emulated runs of the same seed, recipe and data whose products, in every layer and all three, add the
same terms in another order and end a few steps of fp32 higher or lower. - Curves may be `SLACK` times as far
from the emulator's as the furthest twin's. This sees what is grossly wrong, and no more: a run in bf16, told
beside it, is hardly further away than a twin. - Gradients of one batch from one state of the emulated run, at
several steps, may be, on the mean over those, `SLACK` times as far from the emulator's as the furthest
twin's. Nothing has grown there, so that this sees ten times less. What is wrong by less is seen where casts
and layers are compared; this is to find what these do not meet.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import fmean
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.engines.emulated_layer import DTYPES, EmulatedLinear
from ablate.engines.te_mapping import Family
from ablate.numerics.product import split_product
from ablate.numerics.quantize import Operand
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Products, Recipe, Run
from ablate.training.hyperparameters import Training
from ablate.training.loop import Prepared, Record, Telemetry
from ablate.training.workloads import WORKLOADS
from ablate.verification.check_result import Check, Row
from ablate.verification.parity.bench import Bench, to_nearest

SLACK = 3.0
FIRST, CLOSE = 5, 1e-3
"""Steps in which losses must agree to three digits. The head begins at zero, so that the first loss is the
logarithm of the vocabulary."""
TRAINED: dict[Family, str] = {"nvfp4": "nvfp4", "mxfp8": "mxfp8", "fp8": "fp8_current"}
"""The preset that stands for a family."""
ENDS, FAST_ENDS = 2.0**-20, 2.0**-13
"""What a tensor core's sum of some hundred terms may lose: each addition 2^-23; in Hopper's fast mode for
FP8, 2^-13."""


class Twin(NamedTuple):
    """What such a run does otherwise."""

    order: Callable[[int], Tensor]
    """The places of so many products in the order in which they are added."""
    factor: float
    """What each sum is multiplied by before it is rounded."""


def twins(ends: float) -> dict[str, Twin]:
    """Three of them, whose sums end at most so far away, relatively."""
    return {
        "backwards": Twin(lambda n: torch.arange(n - 1, -1, -1), 1.0),
        "odd ones first, higher": Twin(
            lambda n: torch.cat((torch.arange(1, n, 2), torch.arange(0, n, 2))), 1 + ends
        ),
        "second half first, lower": Twin(lambda n: torch.arange(n).roll(n // 2), 1 - ends),
    }


TWINS = tuple(twins(ENDS))
"""Their names."""


@dataclass(frozen=True)
class Curves:
    """The training losses of one family, each step's: `te`, `emulated`, `bf16`, and an emulated one for each
    twin.
    """

    family: Family
    losses: dict[str, list[float]]
    gradients: dict[str, list[float]]
    """Of each run but `emulated`: at each step that is looked at, |gradient - the emulator's| over the
    emulator's norm, from one state."""

    def distance(self, name: str) -> float:
        """The mean over the steps of |loss - the emulator's|; infinite where a run ended early."""
        ours, theirs = self.losses["emulated"], self.losses[name]
        return (
            fmean(abs(a - b) for a, b in zip(ours, theirs, strict=True))
            if len(ours) == len(theirs)
            else torch.inf
        )

    @property
    def yardstick(self) -> float:
        """The furthest twin's distance; at least what fp32 resolves of a loss.

        Infinite where a twin ended early: nothing is known then.
        """
        return max(*(self.distance(name) for name in TWINS), 2.0**-22 * max(self.losses["emulated"]))

    def excess(self, name: str) -> float:
        """How many times as far as the furthest twin's a run's gradients are, on the mean over the steps
        looked at.
        """
        furthest = (
            max(*(self.gradients[twin][place] for twin in TWINS), 1e-6)
            for place in range(len(self.gradients[name]))
        )
        return fmean(far / limit for far, limit in zip(self.gradients[name], furthest, strict=True))


def short_training(bench: Bench, family: Family, curves: list[Curves]) -> Iterator[Check]:
    """The preset that stands for a family; its losses are left in `curves`."""
    yield Check(
        "A short training", partial(_compared, bench, family, curves), title=f"training, {TRAINED[family]}"
    )


def _compared(bench: Bench, family: Family, curves: list[Curves]) -> Iterator[Row]:
    """Three judged rows and what they are to be read beside."""
    found = trained(bench, family)
    curves.append(found)
    theirs, ours, name = found.losses["te"], found.losses["emulated"], TRAINED[family]
    early = max(abs(a - b) / abs(b) for a, b in zip(theirs[:FIRST], ours[:FIRST], strict=False))
    yield Row(
        f"{name}: losses of steps 1 to {FIRST}",
        f"{early:.2g} apart",
        f"at most {CLOSE:g} of the loss",
        early <= CLOSE,
    )
    excess, furthest = found.excess("te"), max(found.gradients["te"])
    said = f"{furthest:.2g} of its norm at most; {excess:.2g} x the furthest twin"
    yield Row(f"{name}: gradients from one state", said, f"on the mean at most {SLACK:g} x", excess <= SLACK)
    largest = max((abs(a - b) for a, b in zip(theirs, ours, strict=False)), default=torch.inf)
    drift, limit = found.distance("te"), SLACK * found.yardstick
    said = f"{drift:.2g} apart on the mean, {largest:.2g} at most"
    yield Row(
        f"{name}: losses of {len(ours)} steps",
        said,
        f"mean at most {limit:.2g}: {SLACK:g} x the furthest twin",
        drift <= limit < torch.inf,
    )
    for twin in TWINS:
        yield Row(
            f"{name}: twin, {twin}",
            f"losses {found.distance(twin):.2g}, gradients {max(found.gradients[twin]):.2g} apart",
        )
    far = (
        f"losses {found.distance('bf16'):.2g} apart, gradients {found.excess('bf16'):.2g} x the furthest twin"
    )
    yield Row(f"{name}: bf16, for comparison", far)


def trained(bench: Bench, family: Family) -> Curves:
    """Every run's losses, step by step, of one seed; and the gradients from some of the emulated run's
    states.
    """
    recipe = PRESETS[TRAINED[family]]()
    recipe = recipe.model_copy(update=dict(to_nearest(recipe.products)))
    ends = FAST_ENDS if bench.fast_sums and family == "fp8" else ENDS
    kinds = {"te": (recipe, "transformer_engine", None), "bf16": (PRESETS["bf16"](), "emulated", None)}
    kinds |= {name: (recipe, "emulated", twin) for name, twin in twins(ends).items()}
    config = WORKLOADS["gpt"](**bench.model, steps=bench.steps, eval_every=bench.steps)

    def prepared(recipe: Recipe, engine: str, twin: Twin | None) -> Prepared:
        run = config.prepare(recipe, 0, str(bench.device), engine)
        for layer in run.engine.layers.values() if twin else ():
            layer.whole_graph = Otherwise(layer, twin)
        return run

    beside, own = {name: prepared(*kind) for name, kind in kinds.items()}, prepared(recipe, "emulated", None)
    gradients: dict[str, list[float]] = {name: [] for name in kinds}
    main, losses = prepared(recipe, "emulated", None), {"emulated": []}
    for record in _records(config, main):
        losses["emulated"].append(record.metrics["train/loss"])
        if record.step in {1, bench.steps // 20, bench.steps // 5, bench.steps // 2}:
            state = main.model.state_dict()
            ours = _gradient(own, config, state, record.step)
            for name, run in beside.items():
                gradients[name].append(
                    float((_gradient(run, config, state, record.step) - ours).norm() / ours.norm())
                )
    for name, kind in kinds.items():
        losses[name] = [record.metrics["train/loss"] for record in _records(config, prepared(*kind))]
    return Curves(family, losses, gradients)


def _records(config: Training, run: Prepared) -> Iterator[Record]:
    never = config.steps + 1
    return config.train(run, Telemetry(every=never, shadow=never, log=1))


def _gradient(run: Prepared, config: Training, state: dict[str, Tensor], step: int) -> Tensor:
    """The gradient of a step's first batch from a state, fp64, flat."""
    run.model.load_state_dict(state)
    run.model.zero_grad()
    run.engine.at(step, Run(config.steps, config.tokens_per_step, config.decay_start))
    run.engine.clock.stream, run.engine.clock.step, run.engine.clock.micro_batch = "training", step, 0
    with run.engine.still_weights():
        (run.loss or run.model)(*run.batch(step, 0)).backward()
    return torch.cat([parameter.grad.flatten().double() for parameter in run.model.parameters()])


class Otherwise:
    """An emulated layer's products as its own, but for the last bits of each element's sum."""

    def __init__(self, layer: EmulatedLinear, twin: Twin) -> None:
        self.layer, self.twin = layer, twin

    def __call__(self, x: Tensor, w: Tensor) -> Tensor:
        """y [tokens, out] of x [tokens, in] and w [out, in], differentiable in both."""
        return _Products.apply(x, w, self, self.layer.products)

    def multiply(self, a: list[Operand], b: list[Operand], out: torch.dtype) -> Tensor:
        """The product of two operands, of the same terms."""
        whole = split_product(*([self._turned(part) for part in parts] for parts in (a, b)), torch.float32)
        return (whole * self.twin.factor).to(out)

    def _turned(self, part: Operand) -> Operand:
        places = self.twin.order(part.values.shape[1]).to(part.values.device)
        return Operand(part.values[:, places], part.quant, part.amax)


class _Products(torch.autograd.Function):
    """As the emulator's, for recipes whose backward operands start from the originals and whose estimators
    pass gradients on.
    """

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor, products_of: Otherwise, products: Products) -> Tensor:
        layer, spec, wb = products_of.layer, products.fprop, w.to(torch.bfloat16)
        a = layer.operand(x.to(torch.bfloat16), "fprop.x", spec.x, spec.hadamard)
        b = layer.operand(wb, "fprop.w", spec.w, spec.hadamard)
        ctx.save_for_backward(x, w)
        ctx.otherwise, ctx.products = products_of, products
        return products_of.multiply(a, b, DTYPES[spec.gemm]).to(x.dtype)

    @staticmethod
    def backward(ctx, dy: Tensor):
        (x, w), products, layer = ctx.saved_tensors, ctx.products, ctx.otherwise.layer
        dy, rows, columns = dy.to(torch.bfloat16), products.dgrad, products.wgrad
        g, gt = layer.gradients(dy, products, True, True)
        wt = layer.operand(w.to(torch.bfloat16).t(), "dgrad.w", rows.w, rows.hadamard)
        xt = layer.operand(x.to(torch.bfloat16).t(), "wgrad.x", columns.x, columns.hadamard)
        dx = ctx.otherwise.multiply(g, wt, DTYPES[rows.gemm])
        return dx.to(x.dtype), ctx.otherwise.multiply(gt, xt, DTYPES[columns.dw]).to(w.dtype), None, None
