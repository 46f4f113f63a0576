"""Tests of a layer's memory: amaxes of earlier steps, recomputed activations, accumulated gradients, readings of its weight."""

import pytest
import torch
from support.cases import every
from support.linears import ANYWHERE, Watch, drawn, layer, run
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from ablate.engines.emulated import convert
from ablate.numerics.philox import Clock
from ablate.numerics.spec import Hadamard, Outer, Quant, Transform
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.recipe import Fprop, Run, Weights

AMAXES = [3.0, 1.0, 8.0, 2.0, 5.0, 0.5, 4.0, 6.0, 0.25, 7.0]
"""Amaxes of x in the ten micro-batches of five steps."""


def sized(amax: float) -> Tensor:
    return torch.full((4, 16), amax / 2).index_fill(1, torch.tensor([3]), amax)


class Tape:
    """A layer whose x has a statistic of other steps; notes the amax that every forward pass used."""

    def __init__(self, statistic: str) -> None:
        self.clock = Clock(0)
        self.module = layer(
            Recipe(fprop=Fprop(x=Quant(outer=Outer(statistic=statistic)))), torch.eye(16), clock=self.clock
        )
        self.module.context.probe = Watch()

    def at(self, step: int, micro_batch: int, amax: float, stream: str = "training") -> float:
        self.clock.stream, self.clock.step, self.clock.micro_batch = stream, step, micro_batch
        self.module(sized(amax))
        return self.module.context.probe.seen["fprop.x"].amax.item()


def delayed(step: int, micro_batch: int, steps: int) -> float:
    """By definition: the largest of the `steps` steps before; this call's where there is none."""
    past = AMAXES[2 * max(0, step - steps) : 2 * step]
    return max(past) if past else AMAXES[2 * step + micro_batch]


def held(step: int, micro_batch: int, steps: int) -> float:
    """By definition: the first of the period."""
    return AMAXES[2 * (step - step % steps)]


ORACLES = {"delayed": delayed, "hold": held}


@pytest.mark.parametrize("steps", [1, 2, 3, 50])
@pytest.mark.parametrize("statistic", ORACLES)
def test_a_statistic_of_other_steps_is_what_its_definition_says(statistic, steps):
    tape = Tape(f"{statistic}:{steps}")
    for step in range(5):
        for micro_batch in (0, 1):
            expected = ORACLES[statistic](step, micro_batch, steps)
            assert tape.at(step, micro_batch, AMAXES[2 * step + micro_batch]) == expected


@pytest.mark.parametrize("steps", [1, 2, 50])
@pytest.mark.parametrize("statistic", ORACLES)
def test_a_recomputed_forward_pass_repeats_its_statistic(statistic, steps):
    tape = Tape(f"{statistic}:{steps}")
    for step in range(5):
        for micro_batch in (0, 1):
            amax = AMAXES[2 * step + micro_batch]
            assert (
                tape.at(step, micro_batch, amax)
                == tape.at(step, micro_batch, amax)
                == ORACLES[statistic](step, micro_batch, steps)
            )


@pytest.mark.parametrize("statistic", ["delayed:2", "hold:2"])
def test_evaluation_and_looks_at_the_weight_advance_no_statistic(statistic):
    quiet, disturbed = Tape(statistic), Tape(statistic)
    for step in range(5):
        for micro_batch in (0, 1):
            disturbed.at(step, micro_batch, 1000.0, stream="evaluation")
            used = [tape.at(step, micro_batch, AMAXES[2 * step + micro_batch]) for tape in (quiet, disturbed)]
            assert used[0] == used[1]


@pytest.mark.parametrize("statistic", ["delayed:2", "hold:2"])
def test_evaluation_uses_the_statistic_of_training(statistic):
    tape = Tape(statistic)
    assert tape.at(0, 0, 9.0, stream="evaluation") == 9.0  # nothing known yet
    tape.at(0, 0, 3.0)
    tape.at(1, 0, 2.0)
    assert tape.at(1, 0, 1000.0, stream="evaluation") == 3.0


@pytest.mark.parametrize("empty", [0.0, float("inf"), float("nan")])
def test_an_amax_that_says_nothing_is_not_remembered(empty):
    hold, delay = Tape("hold:4"), Tape("delayed:4")
    for tape in (hold, delay):
        tape.at(0, 0, empty)
    assert [hold.at(step, 0, amax) for step, amax in ((1, 3.0), (2, 8.0))] == [3.0, 3.0]
    assert [delay.at(step, 0, amax) for step, amax in ((1, 3.0), (2, 8.0), (3, 1.0))] == [3.0, 3.0, 8.0]


def test_a_shadow_step_in_high_precision_advances_no_statistic():
    converted = blocks()
    engine = convert(converted, PRESETS["ue5m3"](), Clock(0))
    engine.at(0, Run(4))
    with engine.high_precision():
        forward(converted, drawn(8, 32, seed=1) * 100).sum().backward()
    assert all(not history.amax for linear in engine.layers.values() for history in linear.histories.values())
    forward(converted, drawn(8, 32, seed=1).requires_grad_()).sum().backward()
    assert all(
        len(history.amax) == 1 for linear in engine.layers.values() for history in linear.histories.values()
    )


def test_each_operand_has_a_history_of_its_own():
    module = layer(PRESETS["fp8_delayed"](), drawn(32, 48, seed=2))
    module.context.probe = Watch()
    for step in range(2):
        module.clock.step = step
        run(module, drawn(16, 48, seed=1) * (step + 1), drawn(16, 32, seed=3) * 10)
    first = {
        "x": drawn(16, 48, seed=1),
        "w": drawn(32, 48, seed=2),
        "g": drawn(16, 32, seed=3).mul(10).bfloat16(),
    }
    for slot, operand in module.context.probe.seen.items():
        assert operand.amax == first[slot[-1]].abs().max()


# --- recomputed activations, accumulated gradients ------------------------------------------------


def blocks(seed: int = 0) -> nn.Module:
    """Two blocks of two linears."""
    inner = [nn.Sequential(nn.Linear(32, 48, bias=False), nn.GELU(), nn.Linear(48, 32)) for _ in range(2)]
    result = nn.ModuleDict({"blocks": nn.ModuleList(inner)})
    g = torch.Generator().manual_seed(seed)
    for parameter in result.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=g) * 0.2)
    return result


def forward(model: nn.Module, x: Tensor, recompute: bool = False) -> Tensor:
    x = x.bfloat16()
    for block in model["blocks"]:
        x = x + (checkpoint(block, x, use_reentrant=False) if recompute else block(x))
    return x.float()


def gradients(preset: str, recompute: bool) -> list[list[Tensor]]:
    """Return the gradients of three steps of two micro-batches, the weights moving in between."""
    model, clock, found = blocks(), Clock(7), []
    engine = convert(model, PRESETS[preset](), clock)
    for step in range(3):
        engine.at(step, Run(3))
        clock.step = step
        model.zero_grad()
        for micro_batch in (0, 1):
            clock.micro_batch = micro_batch
            forward(
                model, drawn(24, 32, seed=2 * step + micro_batch) * (step + 1), recompute
            ).square().mean().backward()
        found.append([parameter.grad.clone() for parameter in model.parameters()])
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= parameter.grad
    return found


@every(preset=ANYWHERE)
def test_recomputed_activations_give_the_same_gradients(preset):
    kept, recomputed = gradients(preset, False), gradients(preset, True)
    assert all(
        torch.equal(a, b)
        for one, other in zip(kept, recomputed, strict=True)
        for a, b in zip(one, other, strict=True)
    )


@every(preset=PRESETS)
def test_accumulated_gradients_are_the_sum_of_each_micro_batchs(preset):
    recipe, w = PRESETS[preset](), drawn(80, 48, seed=2)
    given = [(drawn(64, 48, seed=10 + n), drawn(64, 80, seed=20 + n)) for n in (0, 1)]
    each, module = [], layer(recipe, w)
    for micro_batch, (x, dy) in enumerate(given):
        alone = layer(recipe, w, clock=Clock(0, micro_batch=micro_batch))
        alone.histories = module.histories  # a held statistic is the first micro-batch's
        each.append(run(alone, x, dy)[2].clone())
    for micro_batch, (x, dy) in enumerate(given):
        module.clock.micro_batch = micro_batch
        y = module(x)
        y.backward(dy.to(y.dtype))
    assert torch.equal(module.weight.grad, each[0] + each[1])


def test_micro_batches_draw_their_own_bits():
    w, x, dy = drawn(80, 48, seed=2), drawn(64, 48, seed=1), drawn(64, 80, seed=3)
    first, second = (run(layer(PRESETS["nvfp4"](), w, clock=Clock(0, micro_batch=n)), x, dy) for n in (0, 1))
    assert [torch.equal(a, b) for a, b in zip(first, second, strict=True)] == [True, False, False]


# --- looking at the weight ------------------------------------------------------------------------

DETERMINISTIC = [name for name in PRESETS if PRESETS[name]().fprop.w]
SPLIT_WEIGHTS = {
    "mean": Recipe(fprop=Fprop(w=Quant(transform=Transform(mean=True)))),
    "channels": Recipe(fprop=Fprop(w=Quant(transform=Transform(channels=0.1)))),
    "rotated channels": Recipe(
        fprop=Fprop(w=Quant(transform=Transform(channels=0.1)), hadamard=Hadamard(size=32))
    ),
    "rotated for each layer": Recipe(fprop=Fprop(w=Quant(), hadamard=Hadamard(size=32, signs="per_layer"))),
}


@every(inputs=[48, 37], name=[*DETERMINISTIC, *SPLIT_WEIGHTS])
def test_the_quantised_weight_is_the_one_that_the_forward_pass_uses(name, inputs):
    recipe = SPLIT_WEIGHTS.get(name) or PRESETS[name]()
    recipe = Recipe(fprop=recipe.fprop.model_copy(update={"x": None, "gemm": "fp32_out"}))
    w = drawn(40, inputs, seed=2)
    w[:, 3] += 4
    module = layer(recipe, w.bfloat16().float())
    # The identity as x shows the weight; where it is rotated, what is seen was rounded to bf16 on the way.
    seen = module(torch.eye(inputs)).t()
    tolerance = 2.0**-6 if recipe.fprop.hadamard else 2.0**-20
    assert (seen - module.quantised_weight()).abs().max() <= tolerance * w.abs().max()
    assert not torch.equal(module.quantised_weight(), module.weight.detach())


@every(name=[*DETERMINISTIC, *SPLIT_WEIGHTS])
def test_looking_at_the_weight_leaves_no_trace(name):
    recipe = SPLIT_WEIGHTS.get(name) or PRESETS[name]()
    plain, looked = (layer(recipe, drawn(40, 48, seed=2)) for _ in range(2))
    looked.context.probe = Watch()
    for step in range(2):
        for module in (plain, looked):
            module.clock.step = step
        with torch.no_grad():
            looked.weight *= 16  # exact: what is looked at now is another weight than what is trained
            looked.quantised_weight()
            looked.weight_cast()
            looked.weight /= 16
        assert looked.clock.stream == "training"
        if not step:
            assert looked.context.probe.seen == {}
            assert int(looked.nonfinite) == 0
        x, dy = drawn(16, 48, seed=step), drawn(16, 40, seed=3)
        assert all(torch.equal(a, b) for a, b in zip(run(plain, x, dy), run(looked, x, dy), strict=True))
    for slot in plain.histories:
        assert plain.histories[slot].amax == looked.histories[slot].amax


def test_a_weight_that_is_not_quantised_is_its_bf16_value():
    w = torch.randn(8, 16, generator=torch.Generator().manual_seed(0))
    assert torch.equal(layer(Recipe(weights=Weights()), w).quantised_weight(), w.bfloat16().float())
