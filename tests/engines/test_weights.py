"""Tests of rules for master weights, against the same written out element by element; a rule that is off changes nothing."""

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from oracles import grids
from support.linears import Watch, drawn, layer, run
from torch import Tensor, nn

from ablate.engines.emulated import convert
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.weights import WeightRules
from ablate.numerics.philox import Clock
from ablate.numerics.spec import Outer, Quant
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.recipe import (
    Dgrad,
    Fprop,
    Layers,
    OsciReset,
    Phase,
    Products,
    QEma,
    QRamping,
    Run,
    Weights,
)

E2M1 = grids.magnitudes(mantissa=1, emin=0, top=6.0)
PLAIN = Quant(outer=Outer(statistic="static:6"))
"""With a 6 in every block its scale is 448 / 448: codes are the weight rounded to E2M1, nothing else."""
START = torch.tensor([[6.0, 0.235, 1.0, -0.735, 2.35, 0.0, 3.0, 0.1] + [0.0] * 8])


def toy(quant: Quant = PLAIN, weights: Weights | None = None) -> tuple[EmulatedLinear, WeightRules]:
    module = layer(Recipe(fprop=Fprop(w=quant)), START)
    return module, WeightRules(weights or Weights(), module, {"toy": module})


def nearest(w: np.ndarray) -> np.ndarray:
    """The quantised weight: of its bf16 value, as fprop takes it."""
    return grids.nearest(torch.from_numpy(w.astype(np.float32)).bfloat16().double().numpy(), E2M1)


def swing(step: int) -> np.ndarray:
    """Updates that the optimizer adds: 1 and 3 cross a threshold at every step, 2 drifts, 4 crosses it once in two far steps, 7 swings
    within its cell."""
    to = 1 if step % 2 == 0 else -1
    delta = np.zeros(16, dtype=np.float32)
    delta[[1, 2, 3, 4, 7]] = [0.02 * to, 0.001, -0.02 * to, 0.2 * to, 0.02 * to]
    return delta


def walk(module: EmulatedLinear, rules: WeightRules, steps: int, delta=swing, run: Run | None = None):
    """Take `steps` optimizer steps that add delta(step); yields (step, weight after it, fp32 [16])."""
    optimizer = torch.optim.SGD([module.weight], lr=1.0)
    for step in range(steps):
        module.clock.step = step
        module.weight.grad = -torch.from_numpy(delta(step)).view(1, 16)
        rules.before(optimizer, step, run or Run(steps))
        optimizer.step()
        rules.after(optimizer, step, run or Run(steps))
        yield step, module.weight.detach().clone().numpy()[0]


# --- OsciReset ------------------------------------------------------------------------------------


def reset_by_hand(spec: OsciReset, steps: int, first: int) -> list[np.ndarray]:
    """The weight after each step, one element at a time."""
    w, path = START.numpy()[0].copy(), []
    measuring, way, quantised_way = False, None, None
    for step in range(steps):
        if step >= first and step % spec.period == 0:
            measuring, way, quantised_way = True, np.zeros(16), np.zeros(16)
        before, before_q = w.copy(), nearest(w)
        w = w + swing(step)
        if measuring:
            way += np.abs(w - before)
            quantised_way += np.abs(nearest(w) - before_q)
            if step % spec.period == spec.window - 1:
                q = nearest(w)
                for i in range(16):
                    if way[i] > 0 and quantised_way[i] / way[i] >= spec.threshold:
                        w[i] = q[i]
                measuring = False
        path.append(w.copy())
    return path


@pytest.mark.parametrize(
    ("period", "window", "start"), [(10, 4, 0.0), (10, 5, 0.5), (6, 3, 0.34), (12, 11, 0.2)]
)
def test_osci_reset_puts_oscillating_weights_on_their_quantised_value(period, window, start):
    spec, steps = OsciReset(period=period, window=window, start=start), 40
    module, rules = toy(weights=Weights(osci_reset=spec))
    expected = reset_by_hand(spec, steps, first=math.ceil(start * steps))
    for step, w in walk(module, rules, steps):
        np.testing.assert_array_equal(w, expected[step])
    untouched = [w for _, w in walk(*toy(), steps)][-1]
    assert {i for i in range(16) if w[i] != untouched[i]} == {
        1,
        3,
    }  # 25 times as far as the weight; 4 goes 5 times as far


def test_osci_reset_looks_first_at_the_first_period_past_its_start():
    # In binary, 0.55 * 100 is above 55: the period that starts at step 55 must still count.
    spec = OsciReset(period=5, window=4, start=0.55)
    module, rules = toy(weights=Weights(osci_reset=spec))
    plain = dict(walk(*toy(), 100))
    moved = [step for step, w in walk(module, rules, 100) if (w != plain[step]).any()]
    assert moved[0] == 55 + 4 - 1


def test_osci_reset_leaves_the_optimizers_state_alone():
    states = []
    for weights in (Weights(), Weights(osci_reset=OsciReset(period=4, window=3, start=0.0))):
        module, rules = toy(weights=weights)
        optimizer = torch.optim.AdamW([module.weight], lr=0.02, betas=(0.0, 0.9), fused=True)
        for step in range(3):
            module.weight.grad = -torch.from_numpy(swing(step)).view(1, 16)
            rules.before(optimizer, step, Run(10))
            optimizer.step()
            rules.after(optimizer, step, Run(10))
        states.append((optimizer.state[module.weight], module.weight.detach()))
    assert all(torch.equal(states[0][0][key], states[1][0][key]) for key in ("exp_avg", "exp_avg_sq", "step"))
    assert not torch.equal(states[0][1], states[1][1])


# --- Q-EMA ----------------------------------------------------------------------------------------


def test_q_ema_rounds_to_the_neighbour_that_the_mean_is_nearer_to():
    decay, start = 0.8, 4
    module, rules = toy(weights=Weights(q_ema=QEma(decay=decay, start=start)))
    mean, differs = START.double().numpy()[0], 0
    for step, w in walk(module, rules, 40):
        mean = decay * mean + (1 - decay) * w
        rounded = torch.from_numpy(w).bfloat16().double().numpy()
        expected = nearest(w)
        for i in range(16):
            low, high = grids.neighbours(rounded[i], E2M1)
            sign = -1.0 if rounded[i] < 0 else 1.0
            if step + 1 >= start:
                expected[i] = sign * (high if sign * mean[i] >= (low + high) / 2 else low)
        np.testing.assert_array_equal(module.quantised_weight().numpy()[0], expected)
        differs += (expected != nearest(w)).sum()
    assert differs >= 20  # the two that oscillate stay where their mean is


def test_q_ema_stops_the_oscillation():
    flips = []
    for weights in (Weights(), Weights(q_ema=QEma(decay=0.9, start=2))):
        module, rules = toy(weights=weights)
        codes = [module.quantised_weight().numpy()[0] for _ in walk(module, rules, 30)]
        flips.append(sum((a != b).sum() for a, b in pairwise(codes[10:])))
    assert flips[0] == 3 * 19  # 1, 3 and 4, at every step
    assert flips[1] == 0


@pytest.mark.parametrize("seed", [0, 1])
def test_q_ema_chooses_between_the_two_neighbours_alone(seed):
    module, _ = toy(PLAIN)
    g = torch.Generator().manual_seed(seed)
    module.weight.data[0, 1:] = torch.empty(15).uniform_(-6, 6, generator=g)
    module.target = torch.empty(1, 16).uniform_(-60, 60, generator=g)  # far away
    for value, q in zip(
        module.weight.detach().bfloat16()[0].tolist(), module.quantised_weight()[0].tolist(), strict=True
    ):
        assert abs(q) in grids.neighbours(value, E2M1)
        assert q == 0 or (q > 0) == (value > 0)


def test_q_ema_decides_alike_in_both_copies_of_the_weight():
    module = layer(PRESETS["nvfp4"](), drawn(32, 48, seed=1))
    module.context.probe = Watch()
    run(module, drawn(16, 48, seed=2), drawn(16, 32, seed=3))
    nearest_copy = module.context.probe.seen["fprop.w"].dequantize()
    module.target = drawn(32, 48, seed=4)
    run(module, drawn(16, 48, seed=2), drawn(16, 32, seed=3))
    forward, backward = (module.context.probe.seen[slot].dequantize() for slot in ("fprop.w", "dgrad.w"))
    assert torch.equal(forward[:32, :48], backward[:48, :32].t())
    assert not torch.equal(forward, nearest_copy)
    assert torch.equal(forward[:32, :48], module.quantised_weight())


@pytest.mark.parametrize(
    "quant",
    [Quant(rounding="stochastic"), Quant(source="forward"), Quant(rounding="stochastic", source="forward")],
)
def test_q_ema_leaves_a_backward_copy_that_is_rounded_otherwise(quant):
    recipe = Recipe(fprop=Fprop(w=Quant()), dgrad=Dgrad(g=Quant(), w=quant))
    seen = []
    for target in (None, drawn(32, 48, seed=4)):
        module = layer(recipe, drawn(32, 48, seed=1))
        if (
            quant.source == "forward" and target is not None
        ):  # the copy itself is decided by the mean: start from the same one
            module.weight.data.copy_(module.quantised_weight())
        module.context.probe, module.target = Watch(), target
        run(module, drawn(16, 48, seed=2), drawn(16, 32, seed=3))
        seen.append(module.context.probe.seen)
    if quant.source == "original":
        assert torch.equal(seen[0]["dgrad.w"].values, seen[1]["dgrad.w"].values)
        assert not torch.equal(seen[0]["fprop.w"].values, seen[1]["fprop.w"].values)
    else:
        copy = seen[1]["fprop.w"].dequantize()[:32, :48].t()
        assert torch.equal(seen[1]["dgrad.w"].source[:48, :32], copy)


# --- Q-Ramping ------------------------------------------------------------------------------------

LR, DECAY, BETA1, BETA2, EPS = 0.02, 0.01, 0.2, 0.9, 1e-8


def adamw(module: EmulatedLinear) -> torch.optim.Optimizer:
    return torch.optim.AdamW(
        [module.weight], lr=LR, betas=(BETA1, BETA2), eps=EPS, weight_decay=DECAY, fused=True
    )


def gradient(step: int) -> np.ndarray:
    """0 and 8 on rest, 1 and 3 swing, the others drift or swing less evenly."""
    g = np.zeros(16, dtype=np.float32)
    to = 1 if step % 2 else -1
    g[[1, 2, 3, 4, 7]] = [0.5 * to, -0.01, -0.4 * to, 0.3 + 0.2 * to, 0.1 * to * (1 + step % 3)]
    return g


def ramped(weights: Weights, steps: int):
    """AdamW by the rules; yields (step, weight, first moment, second moment)."""
    module, rules = toy(weights=weights)
    optimizer = adamw(module)
    for step in range(steps):
        module.weight.grad = torch.from_numpy(gradient(step)).view(1, 16)
        rules.before(optimizer, step, Run(steps))
        optimizer.step()
        rules.after(optimizer, step, Run(steps))
        state = optimizer.state[module.weight]
        yield (
            step,
            *(
                t.detach().double().numpy()[0].copy()
                for t in (module.weight, state["exp_avg"], state["exp_avg_sq"])
            ),
        )


def ramp_by_hand(spec: QRamping, steps: int):
    """The same, one element at a time in float64; yields (step, w, m, v, wait)."""
    w, m, v = START.double().numpy()[0].copy(), np.zeros(16), np.zeros(16)
    total, count, wait = np.zeros(16), np.zeros(16), np.ones(16)
    way, quantised_way, measuring = np.zeros(16), np.zeros(16), False
    for step in range(steps):
        if step % spec.period == 0:
            way, quantised_way, measuring = np.zeros(16), np.zeros(16), True
        before, before_q, g = w.copy(), nearest(w), gradient(step)
        for i in range(16):
            total[i] += g[i]
            count[i] += 1
            w[i] *= 1 - LR * DECAY
            if (step + 1) % wait[i] == 0:
                mean = total[i] / count[i]
                m[i] = BETA1 * m[i] + (1 - BETA1) * mean
                v[i] = BETA2 * v[i] + (1 - BETA2) * mean**2
                corrected = m[i] / (1 - BETA1 ** (step + 1)), v[i] / (1 - BETA2 ** (step + 1))
                w[i] -= LR * count[i] * corrected[0] / (math.sqrt(corrected[1]) + EPS)
                total[i] = count[i] = 0
        if measuring:
            way += np.abs(w - before)
            quantised_way += np.abs(nearest(w) - before_q)
            if step % spec.period == spec.window - 1:
                for i in range(16):
                    ratio = quantised_way[i] / way[i] if way[i] else 0
                    wait[i] = min(math.floor(ratio / spec.threshold) * spec.slowdown + 1, spec.slowest)
                measuring = False
        yield step, w.copy(), m.copy(), v.copy(), wait.copy()


@pytest.mark.parametrize(
    "spec",
    [
        QRamping(period=20, window=8),
        QRamping(period=10, window=9, threshold=8.0, slowdown=2),
        QRamping(period=20, window=6, slowest=3),
    ],
)
def test_q_ramping_updates_oscillating_weights_less_often_and_further(spec):
    waited = set()
    for (step, *mine), (_, *theirs, wait) in zip(
        ramped(Weights(q_ramping=spec), 70), ramp_by_hand(spec, 70), strict=True
    ):
        for what, a, b in zip(("weight", "first moment", "second moment"), mine, theirs, strict=True):
            np.testing.assert_allclose(
                a, b, rtol=2e-4, atol=2e-6, err_msg=f"{what} after step {step}"
            )  # fp32 against float64
        waited |= {(i, int(wait[i])) for i in range(16)}
    assert {i for i, wait in waited if wait > 1} >= {1}
    assert {i for i, wait in waited if wait > 1}.isdisjoint({0, 2, 5})
    assert max(wait for _, wait in waited) <= spec.slowest


def test_the_moments_of_a_waiting_weight_are_kept():
    spec, kept = QRamping(period=20, window=8), 0
    before = None
    for (_, w, m, v), (_, _, _, _, wait) in zip(
        ramped(Weights(q_ramping=spec), 18), ramp_by_hand(spec, 18), strict=True
    ):
        if before is not None and wait[1] > 1 and (m[1], v[1]) == before[1:]:
            assert w[1] == pytest.approx(before[0] * (1 - LR * DECAY), rel=1e-6)
            kept += 1
        before = (w[1], m[1], v[1])
    assert kept >= 5


def test_q_ramping_of_weights_that_do_not_oscillate_is_adamw_bit_for_bit():
    results = []
    for weights in (Weights(), Weights(q_ramping=QRamping(period=4, window=2, threshold=1e9))):
        module = layer(
            PRESETS["nvfp4"](), drawn(64, 48, seed=1) * 1e-2
        )  # steps of 2e-2: many weights change their sign
        rules, optimizer = WeightRules(weights, module, {"toy": module}), adamw(module)
        for step in range(10):
            module.weight.grad = torch.randn(64, 48, generator=torch.Generator().manual_seed(step))
            rules.before(optimizer, step, Run(10))
            optimizer.step()
            rules.after(optimizer, step, Run(10))
        results.append((module.weight.detach(), *optimizer.state[module.weight].values()))
    assert all(torch.equal(a, b) for a, b in zip(*results, strict=True))


@pytest.mark.parametrize("resumed", [False, True])
@pytest.mark.parametrize("rule", [OsciReset, QRamping])
def test_a_phase_that_changes_the_cast_of_a_weight_moves_no_weight(rule, resumed):
    weights = {
        OsciReset: Weights(osci_reset=OsciReset(period=9, window=6, start=0.0)),
        QRamping: Weights(q_ramping=QRamping(period=9, window=6)),
    }[rule]
    module, rules = toy(weights=weights)
    coarse, optimizer = Fprop(w=Quant(outer=Outer(statistic="static:60"))), torch.optim.Adam([module.weight])
    for step in range(6):
        if step == 3:
            before = module.quantised_weight()
            module.products = Products(fprop=coarse)  # 0.235 is cast to 0, as all below 2.5
            assert not torch.equal(module.quantised_weight(), before)
            if resumed:
                state = rules.state()
                rules = WeightRules(weights, module, {"toy": module})
                rules.restore(state, step)
        module.weight.grad = torch.full_like(module.weight, 1e-6)
        for group in optimizer.param_groups:
            group["lr"] = 1e-4
        rules.before(optimizer, step, Run(9))
        optimizer.step()
        rules.after(optimizer, step, Run(9))
    torch.testing.assert_close(module.weight.detach(), START - 6e-4, rtol=1e-3, atol=1e-5)
    if rule is QRamping:
        assert rules.state()["rules"][0]["waits"]["toy"].max() == 1


# --- off, elsewhere, and bf16 ---------------------------------------------------------------------

CALM = [
    Weights(osci_reset=OsciReset(period=4, window=3, start=0.0, threshold=1e9)),
    Weights(osci_reset=OsciReset(period=4, window=3, start=1.0)),
    Weights(q_ema=QEma(start=41)),
]


@pytest.mark.parametrize("weights", CALM, ids=["no weight oscillates", "after the run", "not yet"])
def test_a_rule_without_an_occasion_changes_nothing(weights):
    module, rules = toy(weights=weights)
    plain, none = toy()
    for (_, mine), (_, theirs) in zip(walk(module, rules, 40), walk(plain, none, 40), strict=True):
        assert np.array_equal(mine, theirs)
    assert torch.equal(module.quantised_weight(), plain.quantised_weight())
    assert none.rules == []


def test_rules_are_for_layers_whose_forward_weight_is_quantised():
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(16, 1, bias=False) for _ in range(2)])})
    model["blocks"] = nn.ModuleList(nn.Sequential(linear) for linear in model["blocks"])
    weights = Weights(q_ema=QEma(start=1, decay=0.5))
    recipe = Recipe(fprop=Fprop(w=PLAIN), layers=Layers(skip_last=1), weights=weights)
    engine = convert(model, recipe, Clock(0))
    engine.at(0, Run(1))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    engine.weights.before(optimizer, 0, Run(1))
    optimizer.step()
    engine.weights.after(optimizer, 0, Run(1))
    assert [linear.target is not None for linear in engine.layers.values()] == [True, False]


def test_rules_begin_with_the_first_quantised_step_of_a_schedule():
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.Linear(16, 1, bias=False))])})
    own = Fprop(w=PLAIN)
    later = (Phase(start="step:0", use=None), Phase(start="step:2", use=Products(fprop=own)))
    recipe = Recipe(fprop=own, weights=Weights(q_ema=QEma(start=1, decay=0.5)), schedule=later)
    engine = convert(model, recipe, Clock(0))
    (linear,) = engine.layers.values()
    optimizer, path = torch.optim.SGD(model.parameters(), lr=0.25), []
    for step in range(3):
        path.append(linear.weight.detach().clone())
        engine.at(step, Run(3))
        linear.weight.grad = torch.ones_like(linear.weight)
        assert (engine.state()["weights"], linear.target) == (None, None)
        engine.weights.before(optimizer, step, Run(3))
        optimizer.step()
        engine.weights.after(optimizer, step, Run(3))
    torch.testing.assert_close(linear.target, path[2] - 0.25 / 2)  # the mean of before and after step 2


def test_bf16_master_weights_are_rounded_after_every_step():
    module, _ = toy()
    norm, frozen = (
        nn.Parameter(torch.full((4,), 0.3)),
        nn.Parameter(torch.full((4,), 0.3), requires_grad=False),
    )
    rules = WeightRules(
        Weights(master="bf16"), nn.ParameterList([module.weight, norm, frozen]), {"toy": module}
    )
    optimizer = torch.optim.SGD([module.weight, norm], lr=1.0)
    expected: Tensor = START.clone()
    for step in range(6):
        delta = torch.from_numpy(swing(step)).view(1, 16)
        module.weight.grad, norm.grad = -delta, torch.full((4,), 1e-5)
        rules.before(optimizer, step, Run(6))
        optimizer.step()
        rules.after(optimizer, step, Run(6))
        expected = (expected + delta).bfloat16().float()
        assert torch.equal(module.weight.detach(), expected)
        assert torch.equal(norm.detach(), torch.full((4,), 0.3).bfloat16().float())  # 1e-5 is lost at 0.3
        assert torch.equal(frozen, torch.full((4,), 0.3))
