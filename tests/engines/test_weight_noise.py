"""Noise on norms that falls over a run (QeRL): its size, its distribution, and a run that is the same however it is cut."""

import copy
import math

import pytest
import torch
from pydantic import ValidationError
from scipy import stats
from support.gpt_runs import NVFP4, UNMEASURED, facts, gpt, losses, train
from torch import nn

import ablate
from ablate.engines.weight_noise import NormNoise, gaussian
from ablate.numerics.philox import Clock, random_bits, site
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.te_mapping import recipe_refusals
from ablate.recipes.weight_noise import Noise
from ablate.training.loop import Loop, Telemetry

NOISE = Noise(start=0.2, end=0.002, stages=3)
NORMS = {f"blocks.{block}.{norm}" for block in range(2) for norm in ("attention_norm", "mlp_norm")}


def noisy(recipe: Recipe = NVFP4, noise: Noise = NOISE) -> Recipe:
    return recipe.model_copy(update={"weights": recipe.weights.model_copy(update={"noise": noise})})


def loop(shards, recipe: Recipe, **fields) -> Loop:
    workload = gpt(shards, steps=8, **fields)
    return Loop(workload.prepare(recipe, 0, device="cpu"), workload, UNMEASURED)


def weights(one: Loop) -> dict[str, torch.Tensor]:
    return {name: value.clone() for name, value in one.run.model.state_dict().items()}


def equal(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


# --- sigma ----------------------------------------------------------------------------------------


def test_sigma_is_the_papers_after_a_part_without_noise():
    """K = 3 in 8 steps: parts of 2 steps, sigma_k = start (end / start)^((k - 1) / (K - 1))."""
    found = [NOISE.sigma(step, 8) for step in range(8)]
    assert found == pytest.approx([0, 0, 0.2, 0.2, 0.02, 0.02, 0.002, 0.002], rel=1e-12)


@pytest.mark.parametrize("steps", [1, 3, 11, 600, 601])
def test_stages_are_as_long_as_each_other_to_a_step(steps):
    noise = Noise()
    found = [noise.sigma(step, steps) for step in range(steps)]
    assert found[0] == 0
    drawn = [sigma for sigma in found if sigma]
    assert drawn == sorted(drawn, reverse=True)
    if steps >= 11:
        assert (drawn[0], drawn[-1]) == pytest.approx((1e-2, 1e-4))
        lengths = [found.count(sigma) for sigma in set(found)]
        assert len(lengths) == 11
        assert max(lengths) - min(lengths) <= 1


@pytest.mark.parametrize(
    "fields", [{"start": 0.0}, {"end": 0.0}, {"start": 0.01, "end": 0.02}, {"stages": 1}]
)
def test_noise_that_does_not_fall_is_refused(fields):
    with pytest.raises(ValidationError):
        Noise(**fields)


# --- draws ----------------------------------------------------------------------------------------


def test_draws_are_standard_normal_and_independent():
    clock = Clock(11, step=4)
    draws = gaussian(clock, 7, 200_000).double().numpy()
    assert stats.kstest(draws, "norm").pvalue > 0.01
    assert abs(stats.pearsonr(draws[1:], draws[:-1]).statistic) < 4 / len(draws) ** 0.5
    assert stats.kurtosis(draws) == pytest.approx(0, abs=4 * (24 / len(draws)) ** 0.5)


@pytest.mark.parametrize("count", [1, 16, 33])
def test_a_draw_is_box_and_mullers_of_its_two_integers(count):
    clock, columns = Clock(3, step=9, micro_batch=2), count + -count % 16
    bits = random_bits(clock, 5, 2, columns, 24, torch.device("cpu"), purpose=2).tolist()
    wanted = [
        math.sqrt(-2 * math.log((bits[0][i] + 0.5) / 2**24)) * math.cos(2 * math.pi * bits[1][i] / 2**24)
        for i in range(count)
    ]
    assert gaussian(clock, 5, count).tolist() == pytest.approx(wanted, rel=1e-6, abs=1e-7)


def test_seed_step_micro_batch_stream_and_site_each_draw_anew():
    first = gaussian(Clock(1, step=5, micro_batch=1), 3, 64)
    others = [(2, "training", 5, 1, 3), (1, "twin", 5, 1, 3), (1, "training", 6, 1, 3)]
    others += [(1, "training", 5, 2, 3), (1, "training", 5, 1, 4)]
    for seed, stream, step, micro_batch, where in others:
        assert not torch.equal(gaussian(Clock(seed, stream, step, micro_batch), where, 64), first)


# --- a run ----------------------------------------------------------------------------------------


def test_a_gradient_is_that_of_norms_with_the_noise_added_by_hand(shards):
    ours, plain = loop(shards, noisy(), accumulate=2), loop(shards, NVFP4, accumulate=2)
    for one in (ours, plain):
        one.run.engine.clock.step = 5
        one.run.engine.at(5, one.plan)
        head = one.run.model.head.weight  # zero at first, which would leave the blocks without a gradient
        head.data.normal_(generator=torch.Generator().manual_seed(1))
    assert set(ours.noise.weights) == NORMS
    before = weights(ours)
    loss = ours.gradient(5)
    assert equal(weights(ours), before)
    total = 0.0
    for micro_batch in range(2):
        clock = Clock(0, step=5, micro_batch=micro_batch)
        plain.run.model.load_state_dict(before)
        for name in NORMS:
            weight = plain.run.model.get_submodule(name).weight
            weight.data += 0.02 * gaussian(clock, site(name, "noise"), 32)
        plain.run.engine.clock.micro_batch = micro_batch
        part = plain.loss(*plain.part.of(plain.run.batch(5, micro_batch))) / 2
        part.backward()
        total += part.item()
    assert loss == total
    for own, other in zip(ours.parameters, plain.parameters, strict=True):
        assert own.grad.abs().max() > 0
        assert torch.equal(own.grad, other.grad)


def test_noise_changes_a_run_from_its_first_stage_on_and_not_before(shards):
    with_noise, without = (losses(train(gpt(shards, steps=8), recipe)) for recipe in (noisy(), NVFP4))
    assert [with_noise[step] == without[step] for step in range(1, 9)] == [True, True, *[False] * 6]


def test_a_run_repeats_itself_and_goes_on_from_a_checkpoint_with_the_same_bits(shards):
    whole = loop(shards, noisy())
    for step in range(8):
        whole.step(step)
        if step == 3:
            state = copy.deepcopy(whole.state(4))
    again = loop(shards, noisy())
    assert again.restore(state) == 4
    for step in range(4, 8):
        again.step(step)
    assert equal(weights(whole), weights(again))
    assert facts(train(gpt(shards, steps=8), noisy())) == facts(train(gpt(shards, steps=8), noisy()))


def test_recomputed_activations_see_the_noise_of_their_forward_pass(shards):
    plain, recomputed = (loop(shards, noisy(), recompute=flag) for flag in (False, True))
    for one in (plain, recomputed):
        for step in range(4):
            one.step(step)
    assert equal(weights(plain), weights(recomputed))


def test_a_second_draw_of_a_gradient_has_the_noise_of_the_first(shards):
    """Nothing else of this recipe is drawn, so both gradients are equal."""
    plain = noisy(PRESETS["mxfp4"]())
    assert not plain.products.draws
    records = train(gpt(shards, steps=8), plain, telemetry=Telemetry(every=0, shadow=1, log=1))
    split = [(record.metrics["grad/variance"], record.metrics["grad/squared_bias"]) for record in records]
    assert len(split) == 8
    assert all(variance == 0 and bias > 0 for variance, bias in split[1:])


def test_a_failed_step_leaves_the_norms_as_they_were(shards):
    one = loop(shards, noisy())
    one.run.engine.clock.step = 5
    before = weights(one)

    def fail() -> None:
        with one.noise.added(8):
            assert not equal(weights(one), before)
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError, match="out of luck"):
        fail()
    assert equal(weights(one), before)


# --- what it is part of ---------------------------------------------------------------------------


def test_drawn_noise_counts_as_drawn():
    assert (noisy(PRESETS["bf16"]()).draws, PRESETS["bf16"]().draws) == (True, False)


def test_norms_outside_of_blocks_and_of_other_lengths_have_none(shards):
    """Norms of queries and keys are as long as a head, and the last norm lies in no block."""
    one = loop(shards, noisy())
    norms = {name for name, module in one.run.model.named_modules() if type(module).__name__ == "Norm"}
    assert norms > NORMS
    assert set(one.noise.weights) == NORMS


def test_a_model_without_such_a_norm_is_refused():
    model = nn.Sequential(nn.ModuleList([nn.Linear(8, 8)]))
    with pytest.raises(ValueError, match="no block of Sequential"):
        NormNoise(NOISE, model, {"0.0": model[0][0]}, Clock(0))


def test_what_does_not_apply_it_refuses_it():
    assert [reason for reason in recipe_refusals(noisy()) if reason.startswith("weights.noise")]
    model = nn.Sequential(nn.ModuleList([nn.Linear(32, 32)]))
    with pytest.raises(ValueError, match=r"weights\.noise"):
        ablate.convert(model, noisy(), seed=0, steps=4)
