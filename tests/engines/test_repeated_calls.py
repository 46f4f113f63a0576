"""Tests of layers that are called several times in one micro-batch: their random bits, and runs of models that share a block."""

import copy

import torch
import torch.distributed as dist
from support.gpt_runs import NVFP4, UNMEASURED, gpt
from support.ranks import in_ranks
from torch import nn

from ablate.engines.emulated import convert
from ablate.numerics.philox import Clock
from ablate.numerics.spec import Quant
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.recipe import Fprop, Run
from ablate.training import distributed
from ablate.training.evaluation import evaluate
from ablate.training.loop import Loop
from ablate.training.rank_layout import Layout

STEPS = 4


def shared(shards, **fields) -> Loop:
    """Return the loop of a gpt whose second block is its first one."""
    workload = gpt(shards, steps=STEPS, **fields)
    run = workload.prepare(NVFP4, 0, device="cpu")
    run.model.blocks = nn.ModuleList([run.model.blocks[0]] * 2)
    run.model.head.weight.data.normal_(std=0.1, generator=torch.Generator().manual_seed(1))
    return Loop(run, workload, UNMEASURED)


def weights(one: Loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in one.run.model.state_dict().items()}


def trained(one: Loop, first: int = 0, last: int = STEPS) -> tuple[list[object], dict[str, torch.Tensor]]:
    """Return the losses and the weights after the steps from `first` to `last`."""
    names = ("train/loss", "val/loss")
    found = [[one.step(step).metrics.get(name) for name in names] for step in range(first, last)]
    return found, weights(one)


def alike(a: tuple, b: tuple) -> bool:
    return a[0] == b[0] and all(torch.equal(a[1][name], b[1][name]) for name in a[1])


def test_the_errors_of_two_calls_are_independent():
    """The variance of the summed gradient is twice that of one call; with equal bits it would be four times."""
    torch.manual_seed(0)
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(64, 64, bias=False)})])})
    clock = Clock(0)
    engine = convert(model, PRESETS["nvfp4"](), clock)
    layer, x, dy = model["blocks"][0]["up"], torch.randn(32, 64), torch.randn(32, 64)
    single, summed = [], []
    for step in range(200):
        clock.step = step
        engine.at(step, Run(200))
        for calls, drawn in ((1, single), (2, summed)):
            clock.begin(0)
            layer.weight.grad = None
            for _ in range(calls):
                layer(x).backward(dy)
            drawn.append(layer.weight.grad.clone())
    variances = [torch.stack(drawn).var(dim=0).mean().item() for drawn in (single, summed)]
    assert 1.9 < variances[1] / variances[0] < 2.1


def test_the_first_call_draws_what_a_layer_that_is_called_once_draws():
    clock = Clock(0, micro_batch=7)
    assert [clock.called("a"), clock.called("a")] == [7, 7]
    clock.begin(7)
    assert [clock.called(name) for name in "aabaa"] == [7, 7 + 2**20, 7, 7 + 2 * 2**20, 7 + 3 * 2**20]
    clock.begin(8)
    assert clock.called("a") == 8


def test_recomputed_activations_draw_the_bits_of_their_own_call(shards):
    plain, recomputed = (trained(shared(shards, recompute=flag)) for flag in (False, True))
    assert alike(plain, recomputed)


def test_a_run_continues_from_a_checkpoint_with_the_same_bits(shards):
    whole = shared(shards)
    first = trained(whole, last=2)[0]
    state = copy.deepcopy(whole.state(2))
    rest = trained(whole, first=2)
    again = shared(shards)
    assert again.restore(state) == 2
    assert alike(rest, trained(again, first=2))
    assert alike((first + rest[0], rest[1]), trained(shared(shards)))


def test_a_repeated_step_draws_the_same_bits(shards):
    one = shared(shards)
    one.run.engine.at(0, one.plan)
    found = []
    for _ in range(2):
        one.gradient(0)
        found.append([parameter.grad.clone() for parameter in one.parameters if parameter.grad is not None])
    assert all(map(torch.equal, *found))


def test_an_evaluation_draws_the_same_bits_whenever_it_is_made(shards):
    """A gradient before it has counted calls, which an evaluation begins anew for each batch."""
    one = shared(shards)
    drawing = Recipe(fprop=Fprop(x=Quant(rounding="stochastic"), w=Quant()))
    run = one.run._replace(readings={"drawn": drawing, "again": drawing})
    run.engine.at(0, one.plan)
    one.gradient(0)
    first, second = (evaluate(run, NVFP4, one.part) for _ in range(2))
    assert first == second
    values = {name: [first[key] for key in first if name in key] for name in run.readings}
    assert values["drawn"] == values["again"] != []
    with run.engine.reading(drawing):
        losses = [evaluate(one.run, NVFP4, one.part)["loss"] for _ in range(2)]
    assert losses[0] == losses[1] != first["loss"]


def test_two_ranks_draw_the_bits_of_one(shards):
    def gradients() -> list:
        ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
        distributed.become(distributed.World(Layout(ranks, False), rank, "cpu")).begun = True
        one = shared(shards, accumulate=2)
        one.run.engine.at(0, one.plan)
        one.gradient(0)
        return [p.grad.tolist() for p in one.parameters if p.grad is not None]

    alone = gradients()
    for found in in_ranks(2, gradients):
        for one, other in zip(alone, found, strict=True):
            torch.testing.assert_close(torch.tensor(other), torch.tensor(one), rtol=1e-5, atol=1e-7)
