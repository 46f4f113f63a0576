"""The first value of a run that was not finite: its place is named, in every part of a step where one can begin."""

import json
import math
from contextlib import nullcontext

import pytest
import torch
from support.cases import every
from support.gpt_runs import NVFP4, gpt, train
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

import ablate
from ablate.recipes import PRESETS
from ablate.training.first_nonfinite import Origin, fallen, grown
from ablate.training.hyperparameters import Guard
from ablate.training.loop import Telemetry
from ablate.training.loop import train as loop

UNMEASURED = Telemetry(every=0, shadow=0, log=1, checkpoint=0)
STEP = 3
"""Step, from 0, at which the faults below act."""


def diverged(shards, plant, recipe=NVFP4, **fields):
    """Train a model to which `plant` has done something; return its records."""
    workload = gpt(shards, **({"steps": 6, "eval_every": 100, "eval_tokens": 32} | fields))
    run = workload.prepare(recipe, 0, "cpu")
    with plant(run) or nullcontext():  # the handle of a hook that all optimizers have
        return list(loop(run, workload, UNMEASURED))


def at(run) -> bool:
    return run.engine.clock.step == STEP and run.engine.clock.stream == "training"


def spoiled(value: float, where: int = 5):
    def change(x):
        x = x.clone()
        x.view(-1)[where] = value
        return x

    return change


def before(name, change):
    """The input of a module is changed."""

    def plant(run):
        module = run.model.get_submodule(name)
        module.register_forward_pre_hook(lambda _, args: (change(args[0]), *args[1:]) if at(run) else None)

    return plant


def after(name, change):
    """The output of a module is changed."""

    def plant(run):
        module = run.model.get_submodule(name)
        module.register_forward_hook(lambda _, args, y: change(y) if at(run) else None)

    return plant


def backwards(name, change):
    """The gradient of the output of a module is changed."""

    def plant(run):
        def hook(_, args, y):
            if at(run) and y.requires_grad:
                y.register_hook(change)

        run.model.get_submodule(name).register_forward_hook(hook)

    return plant


def updated(name, value):
    """The update of the step before spoils a weight."""

    def plant(run):
        weight = run.model.get_parameter(name)

        def hook(*_):
            if run.engine.clock.step == STEP - 1:
                with torch.no_grad():
                    weight.view(-1)[40] = value

        return register_optimizer_step_post_hook(hook)

    return plant


def weighted(name, weight, x):
    """A layer gets a large weight by the update before, and a large input."""

    def plant(run):
        before(name, scaled(x))(run)
        return updated(f"{name}.weight", weight)(run)

    return plant


def scaled(factor):
    return lambda x: x * factor


CASES = {
    "input of a layer": (before("blocks.1.mlp.up", spoiled(math.nan)), "input", "blocks.1.mlp.up"),
    "output of a layer": (after("blocks.0.mlp.up", spoiled(math.inf)), "output", "blocks.0.mlp.up"),
    "between layers": (after("blocks.0.mlp.up", scaled(1e30)), "input", "blocks.0.mlp.down"),
    "product": (weighted("blocks.1.mlp.up", 3e38, 100), "product", "blocks.1.mlp.up"),
    "gradient": (
        backwards("blocks.0.mlp.up", spoiled(math.inf)),
        "gradient",
        "the output of blocks.0.mlp.up",
    ),
    "weight": (updated("blocks.1.mlp.up.weight", math.inf), "parameter", "blocks.1.mlp.up.weight"),
    "loss": (after("", scaled(math.inf)), "loss", ""),
    "norm": (backwards("blocks.1.mlp.up", scaled(1e30)), "norm", "blocks.1.mlp.up.weight"),
}


@every(case=CASES)
def test_the_first_place_is_named(case, shards):
    plant, kind, name = CASES[case]
    last = diverged(shards, plant, clip=None)[-1]
    origin = last.origin
    assert (origin.step, last.metrics["nan/first_step"]) == (STEP + 1, STEP + 1)
    assert (origin.kind, origin.name) == (kind, name)


def test_a_baseline_in_high_precision_has_its_place_named_too(shards):
    last = diverged(shards, before("blocks.1.mlp.down", spoiled(math.nan, 37)), PRESETS["bf16"]())[-1]
    assert (last.origin.kind, last.origin.name) == ("input", "blocks.1.mlp.down")
    assert (last.origin.index, last.origin.count, last.origin.elements) == ((0, 0, 37), 1, 2 * 16 * 96)
    finite = [value for value in last.origin.around if math.isfinite(value)]
    assert (len(last.origin.around), len(finite)) == (16, 15)


def test_computing_a_step_again_changes_no_bit_of_the_run_that_continues(shards):
    """The step is skipped in both runs; in the other its loss is large but finite, so nothing is searched."""
    guard = Guard(policy="skip", loss=1.5, window=4)
    runs = []
    for factor in (math.nan, 1e6):
        workload = gpt(shards, steps=8, guard=guard)
        run = workload.prepare(NVFP4, 0, "cpu")
        step = STEP + 2  # after the window

        def loss(*batch, run=run, factor=factor, step=step):
            return run.model(*batch) * (factor if run.engine.clock.step == step and run.model.training else 1)

        runs.append(list(loop(run._replace(loss=loss), workload, UNMEASURED)))
        assert [record.origin is not None for record in runs[-1]].count(True) == math.isnan(factor)
    searched, other = (
        {r.step: r.metrics["train/loss"] for r in records if r.step > STEP + 3} for records in runs
    )
    assert searched == other


def test_growth_is_that_of_what_grew_first_and_stayed():
    steps = range(20, 30)
    flat = dict.fromkeys(steps, 2.0)
    late, early = flat | {28: 20.0, 29: 90.0}, flat | {27: 17.0, 28: 40.0, 29: math.inf}
    begun = flat | {20: 0.01, 21: 0.1}
    spike = flat | {25: 99.0}
    magnitudes = {
        ("b", "fprop.x"): late,
        ("a", "dgrad.g"): early,
        ("c", "fprop.x"): begun,
        ("d", "fprop.w"): spike,
    }
    found = grown(magnitudes, {}, offset=100)
    assert [(each.name, each.slot, each.since, each.before, each.then) for each in found] == [
        ("a", "dgrad.g", 128, 2.0, 17.0),
        ("b", "fprop.x", 129, 2.0, 20.0),
    ]


def test_operands_of_one_step_are_in_the_order_of_execution():
    magnitudes = {(name, "dgrad.g"): {7: 1.0, 8: 1.0, 9: 50.0} for name in "ab"}
    assert [each.name for each in grown(magnitudes, {("b", "dgrad.g"): 0, ("a", "dgrad.g"): 1})] == ["b", "a"]


def test_a_large_learning_rate_shows_in_weights_that_grew_before_the_loss(shards):
    origin = train(gpt(shards, lr=3e8, warmup=0.0, clip=None, steps=8))[-1].origin
    assert (origin.grew[0].name, origin.grew[0].slot) == ("blocks.0.attention.qkv", "fprop.w")
    assert all(each.then > 1e4 * each.before for each in origin.grew)


def test_what_the_last_measured_step_found_worse_is_named():
    earlier = {
        "quant/fprop.x/a/sqnr_db": 19.0,
        "quant/fprop.x/b/sqnr_db": 20.0,
        "quant/fprop.x/sqnr_db": 30.0,
    }
    later = {"quant/fprop.x/a/sqnr_db": 14.0, "quant/fprop.x/b/sqnr_db": 18.0, "quant/fprop.x/sqnr_db": 2.0}
    gain = {"gemm/wgrad/b/gain": 0.5, "gemm/wgrad/b/gain_beyond": 3.0}
    assert fallen(earlier, later | gain) == (
        "SQNR of fprop.x of a fell from 19.0 to 14.0 dB; gain of wgrad of b was 0.5, outside its interval"
    )
    assert fallen(earlier, earlier) == ""


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.trunk = nn.ModuleList(nn.ModuleDict({"up": nn.Linear(32, 32)}) for _ in range(3))

    def forward(self, x):
        for block in self.trunk:
            x = x + block["up"](x).relu()
        return x


def stepped(run, model, optimizer, x, search=False):
    with run.step():
        loss = model(x).square().mean()
        loss.backward()
        if search and not loss.isfinite():
            run.first_nonfinite(lambda: model(x).square().mean().backward())
            optimizer.zero_grad()
        optimizer.step()
        optimizer.zero_grad()


def own_loop(measure_every=0):
    torch.manual_seed(0)
    model = Net()
    run = ablate.convert(model, "nvfp4", measure_every=measure_every)
    return model, run, torch.optim.SGD(model.parameters(), lr=1e-3), torch.randn(16, 32)


def test_a_loop_of_ones_own_has_the_first_operand_among_its_alarms_at_no_cost():
    model, run, optimizer, x = own_loop()
    for _ in range(40):
        stepped(run, model, optimizer, x)
    assert run.alarms() == []
    with torch.no_grad():
        model.trunk[1]["up"].weight[3, 4] = math.inf
    for _ in range(20):  # more operands than are kept
        stepped(run, model, optimizer, x)
    origin = run.alarms()[-1]
    assert (origin.step, origin.kind, origin.name, origin.part) == (41, "operand", "trunk.1.up", "fprop.w")
    assert "fprop.w of trunk.1.up (step 41)" in str(origin)


def test_a_loop_of_ones_own_can_compute_the_step_again_for_the_place():
    model, run, optimizer, x = own_loop()
    stepped(run, model, optimizer, x)
    bad = x.clone()
    bad[2, 3] = math.nan
    weights = [p.clone() for p in model.parameters()]
    stepped(run, model, optimizer, bad, search=True)
    origin = run.alarms()[-1]
    assert (origin.step, origin.kind, origin.index, origin.count) == (2, "data", (2, 3), 1)
    assert all(torch.equal(a, b) for a, b in zip(weights, model.parameters(), strict=True))
    with pytest.raises(RuntimeError, match=r"first_nonfinite: call it inside `with run\.step\(\):`"):
        run.first_nonfinite(lambda: None)


def test_the_document_of_a_place_is_json():
    origin = Origin(
        3,
        "operand",
        "a",
        "fprop.x",
        value=math.inf,
        index=(1, 2),
        around=(1.0, math.nan),
        elements=8,
        count=1,
    )
    document = json.loads(json.dumps(origin.document(), allow_nan=False))
    assert (document["value"], document["around"], document["text"]) == ("inf", [1.0, "nan"], str(origin))
