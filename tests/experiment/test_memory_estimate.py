"""The memory that a plan announces, against what a run on this CPU keeps and holds."""

import pytest
import torch
from support.experiments import write
from support.gpt_runs import gpt
from support.live_memory import LiveMemory

from ablate.engines.hardware import rented_machine
from ablate.experiment.load import load
from ablate.experiment.plan_notes import memory
from ablate.numerics.product import mode
from ablate.recipes import PRESETS
from ablate.training.loop import Loop, Telemetry
from ablate.training.workloads.memory_estimate import estimate

LARGE = {"layers": 3, "width": 128, "heads": 4, "context": 128, "batch": 4}
SELDOM = Telemetry(every=10**6, shadow=10**6, log=1)


def kept(loop: Loop, config) -> int:
    """Return the bytes that a forward pass keeps for the backward pass, and those of cached casts of weights."""
    run, seen = loop.run, {}
    own = {p.untyped_storage().data_ptr() for p in run.model.parameters()}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in own:
            seen[storage.data_ptr()] = storage  # kept alive, so that no other takes its place
        return tensor

    run.engine.at(2, loop.plan)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), run.engine.still_weights():
        loss = run.model(*run.batch(2, 0))
        casts = [
            part.values.untyped_storage()
            for layer in run.engine.layers.values()
            for part in layer.casts.parts()
        ]
        seen |= {storage.data_ptr(): storage for storage in casts}
        loss.backward()
    return sum(storage.nbytes() for storage in seen.values())


@pytest.mark.parametrize("preset", ["bf16", "fp32", "nvfp4", "mxfp4"])
@pytest.mark.parametrize("shape", [{}, {"mlp": "relu2", "kv_heads": 2, "optimizer": "muon"}])
def test_an_estimate_is_what_a_run_holds(preset, shape, shards):
    config, recipe = gpt(shards, **(LARGE | shape)), PRESETS[preset]()
    loop = Loop(config.prepare(recipe, 0, "cpu"), config, SELDOM)
    loop.step(1)
    planned = estimate(config, recipe, "cpu")
    parameters = [p for p in loop.run.model.parameters() if p.requires_grad]
    moments = [m for its in loop.optimizer.state.values() for m in its.values() if m.numel() > 1]
    assert planned.weights == sum(p.numel() * p.element_size() for p in parameters)
    assert planned.gradients == sum(p.grad.numel() * p.grad.element_size() for p in parameters)
    assert planned.optimizer == sum(m.numel() * m.element_size() for m in moments)
    if preset != "fp32" and mode() == "fp32":
        pytest.skip("this CPU multiplies bf16 as fp32: it keeps copies that no GPU keeps")
    assert planned.activations == pytest.approx(kept(loop, config), rel=0.02)
    loop.optimizer.zero_grad()
    with LiveMemory() as live:
        loop.step(3)
    step = planned.activations + planned.gradients + planned.logits
    assert 0.75 * step < live.peak < 1.02 * step


def test_what_is_not_known_is_not_estimated(shards):
    assert estimate(gpt(shards, recompute=True), PRESETS["nvfp4"](), "cuda") is None


def test_attention_of_a_gpu_keeps_half_the_bytes(shards):
    config, recipe = gpt(shards, **LARGE), PRESETS["nvfp4"]()
    assert estimate(config, recipe, "cuda").activations < estimate(config, recipe, "cpu").activations


def test_a_plan_for_a_gpu_announces_the_arm_that_needs_most_memory(tmp_path):
    experiment = load(write(tmp_path, engine="emulated"), "cuda", None, rented_machine("10.0"))
    arm, needed = memory(experiment, "cuda")
    sizes = {one.name: estimate(one.config, one.recipe, "cuda").total for one in experiment.arms}
    assert len(set(sizes.values())) > 1
    assert sizes[arm] == max(sizes.values()) == needed.total
    assert memory(load(tmp_path / "tiny.yaml", "cpu", None, None), "cpu") is None
