"""Metrics of operands, gradients and weights, against numpy in float64 and against cases whose answer is known."""

import itertools
import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from support.cases import every
from support.gpt_runs import converted, gpt
from support.live_memory import LiveMemory

from ablate.numerics.census import census
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Outer, Quant, Range
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Run
from ablate.training.alarms import alerts
from ablate.training.metric_names import parse
from ablate.training.metrics import (
    SlotErrors,
    gradient_noise,
    gradient_split,
    keep_casts,
    oscillation,
    quantisation,
)
from ablate.training.operand_metrics import ALARMS, OPERAND_METRICS

ROOM = Range(headroom=17 / 16)


def measured(x: torch.Tensor, quant: Quant | None = None) -> dict[str, float]:
    return quantisation(quantize(x, quant or Quant(), keep=True))


def test_errors_are_those_of_numpy_in_float64(generator):
    x = torch.randn(32, 64, generator=generator)
    q = quantize(x, Quant()).dequantize().double().numpy()
    mine, x = measured(x), x.double().numpy()
    assert mine["rel_mse"] == pytest.approx(((x - q) ** 2).sum() / (x**2).sum(), rel=1e-12)
    assert mine["sqnr_db"] == pytest.approx(-10 * math.log10(mine["rel_mse"]), rel=1e-12)
    assert mine["cosine"] == pytest.approx((x * q).sum() / np.linalg.norm(x) / np.linalg.norm(q), rel=1e-12)
    assert mine["magnitude"] == pytest.approx((x * q).sum() / (x**2).sum(), rel=1e-12)


def test_an_exact_operand_has_no_error():
    mine = measured(torch.tensor([[6.0, -4.0, 3.0, 2.0] * 4]) * 448)
    assert mine["rel_mse"] == 0
    assert mine["cosine"] == pytest.approx(1)
    assert mine["magnitude"] == 1


def test_a_zero_operand_has_undefined_relative_errors_and_no_census():
    mine = measured(torch.zeros(4, 32))
    assert all(math.isnan(mine[name]) for name in ("sqnr_db", "rel_mse", "cosine", "magnitude"))
    assert mine["zero_frac"] == mine["saturated_frac"] == mine["scale_saturated_frac"] == 0


def test_saturation_is_counted_in_elements_and_in_block_scales():
    x = torch.full((1, 64), 0.01)
    x[0, :16] = 1.0
    x[0, 0] = 8.0  # beyond the percentile: its block's scale is at its bound, and it saturates
    mine = measured(x, Quant(outer=Outer(statistic="percentile:0.5")))
    assert mine["scale_saturated_frac"] >= 1 / 4
    assert mine["saturated_frac"] >= 1 / 64


def test_an_element_too_small_for_its_block_is_counted_as_zero():
    x = torch.full((1, 16), 6.0)
    x[0, 3] = 0.1
    assert measured(x)["zero_frac"] == 1 / 16


def test_a_zero_scale_counts_only_in_a_block_that_is_not_zero():
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 16] = 1.0, 1e-9
    assert measured(x)["scale_zero_frac"] == 1 / 2


def test_slots_are_averaged_over_the_layers_where_a_metric_is_defined(generator):
    errors = SlotErrors()
    for name, x in (
        ("a", torch.randn(16, 16, generator=generator)),
        ("b", torch.zeros(16, 16)),
        ("c", torch.randn(16, 16, generator=generator)),
    ):
        errors.operand(name, "fprop.x", quantize(x, Quant(), keep=True))
    metrics = errors.metrics()
    layers = [metrics[f"quant/fprop.x/{name}/rel_mse"] for name in ("a", "c")]
    assert "quant/fprop.x/b/rel_mse" not in metrics
    assert metrics["quant/fprop.x/rel_mse"] == pytest.approx(sum(layers) / 2)


# --- the source's shape ---------------------------------------------------------------------------


def blocks_of(x: np.ndarray, rows: int, columns: int) -> list[np.ndarray]:
    return [
        x[r : r + rows, c : c + columns]
        for r in range(0, x.shape[0], rows)
        for c in range(0, x.shape[1], columns)
    ]


OUTER_ONLY = Quant(element="e4m3", block=None, scale=None, outer=Outer(bound=1.0))


@pytest.mark.parametrize(
    ("quant", "rows", "columns"),
    [(Quant(), 1, 16), (Quant(block="16x16"), 16, 16), (Quant(block="1x32"), 1, 32), (OUTER_ONLY, 1, 16)],
)
def test_crest_kurtosis_and_mean_share_are_those_of_numpy(generator, quant, rows, columns):
    x = torch.randn(32, 96, generator=generator) ** 3 + 0.5
    x[0] = 0
    mine, x = measured(x, quant), x.double().numpy()
    crests = [
        np.abs(block).max() / np.sqrt((block**2).mean())
        for block in blocks_of(x, rows, columns)
        if block.any()
    ]
    assert mine["crest"] == pytest.approx(sorted(crests)[(len(crests) - 1) // 2], rel=1e-12)
    assert mine["kurtosis"] == pytest.approx((x**4).mean() / (x**2).mean() ** 2, rel=1e-12)
    assert mine["mean_share"] == pytest.approx(np.sum(x.mean(axis=0) ** 2) * len(x) / np.sum(x**2), rel=1e-12)


def test_known_shapes_have_known_numbers(generator):
    gaussian = measured(torch.randn(512, 512, generator=generator))
    assert gaussian["kurtosis"] == pytest.approx(3, abs=0.03)  # standard deviation sqrt(24 / 262,144) = 0.01
    assert gaussian["mean_share"] == pytest.approx(1 / 512, rel=0.3)
    signs = measured(torch.randn(64, 64, generator=generator).sign())
    assert (signs["crest"], signs["kurtosis"]) == (1, 1)
    assert measured(torch.randn(1, 64, generator=generator).expand(64, 64))["mean_share"] == pytest.approx(1)
    spike = torch.zeros(16, 16)
    spike[:, 0] = 2.0
    assert measured(spike)["crest"] == 4


def test_a_zero_operand_has_no_shape():
    assert not {"crest", "kurtosis", "mean_share"} & {
        name for name, value in measured(torch.zeros(4, 32)).items() if value == value
    }


# --- censuses of scales ---------------------------------------------------------------------------


@pytest.mark.parametrize("bound", [448.0, 256.0])
def test_scales_at_their_bound_are_counted(generator, bound):
    x = torch.randn(16, 64, generator=generator)
    quant = Quant(outer=Outer(bound=bound, statistic="percentile:0.9"))
    scales = quantize(x, quant).block_scale.flatten().tolist()
    assert measured(x, quant)["scale_saturated_frac"] == sum(scale >= bound for scale in scales) / len(scales)
    assert 0.1 < measured(x, quant)["scale_saturated_frac"] < 1


def test_without_block_scales_none_is_zero_or_saturated(generator):
    mine = measured(torch.randn(16, 64, generator=generator), OUTER_ONLY)
    assert mine["scale_zero_frac"] == mine["scale_saturated_frac"] == 0


def test_a_block_with_one_saturated_element_is_a_saturated_block():
    x = torch.full((1, 64), 0.01)
    x[0, :16] = 1.0
    x[0, 0] = 8.0
    mine = measured(x, Quant(outer=Outer(statistic="percentile:0.5")))
    codes = quantize(x, Quant(outer=Outer(statistic="percentile:0.5")), keep=True).scaled
    expected = [bool((block > 6).any()) for block in blocks_of(codes.numpy(), 1, 16)]
    assert mine["blocks_saturated_frac"] == sum(expected) / 4 > 0


@pytest.mark.parametrize(
    ("quant", "saturates"),
    [(Quant(rounding="stochastic"), True), (Quant(rounding="stochastic", range=ROOM), False)],
)
def test_headroom_leaves_no_element_beyond_the_grid(generator, quant, saturates):
    x = torch.randn(64, 256, generator=generator)
    x[0, 0] = 100.0  # the largest block's scale is at its bound whatever the headroom: look at the others
    mine = quantisation(quantize(x, quant, clock=Clock(0), keep=True))
    assert (mine["blocks_saturated_frac"] > 2 / 1024) is saturates


# --- gradients ------------------------------------------------------------------------------------


PARTS = ("dead_share", "scale_share", "grid_share")


def test_parts_of_the_error_are_those_that_were_planted(generator):
    """The source is 1.25 q, plus noise orthogonal to q in its block, plus what became zero: energies 1 : 4 : 2."""
    made = quantize(torch.randn(8, 64, generator=generator), Quant(), keep=True)
    q = made.dequantize().double()
    q[:, ::16] = 0.0
    values = made.values.clone()
    values[:, ::16] = 0.0
    noise = torch.randn(q.shape, generator=generator, dtype=torch.float64) * (q != 0)
    noise, blocks = noise.view(-1, 16), q.view(-1, 16)
    noise -= (noise * blocks).sum(1, keepdim=True) / blocks.square().sum(1, keepdim=True) * blocks
    noise = noise.view(q.shape)
    dead = torch.randn(q.shape, generator=generator, dtype=torch.float64) * (q == 0)
    bias = 0.25 * q
    unit = bias.norm()
    source = q + bias + noise * (2 * unit / noise.norm()) + dead * (math.sqrt(2) * unit / dead.norm())
    mine = quantisation(replace(made, values=values, source=source.float(), scaled=None))
    assert [mine[part] for part in PARTS] == pytest.approx([2 / 7, 1 / 7, 4 / 7], rel=1e-5)  # fp32 sources


@every(preset=["nvfp4", "mxfp4", "mxfp8", "hif4", "fp8_current", "fp4_all_the_way"])
def test_parts_of_the_error_add_up_to_it_and_are_those_of_numpy(preset):
    quant = PRESETS[preset]().products.slot("wgrad.g")
    x = torch.randn(32, 128, generator=torch.Generator().manual_seed(5)).exp()
    made = quantize(x.to(torch.bfloat16), quant, keep=True, clock=Clock(3), where=1, product=1)
    source, q = made.source.double().numpy(), made.dequantize().double().numpy()
    rows, columns = quant.tile if made.block_scale is not None else source.shape
    energies = dict.fromkeys(PARTS, 0.0)
    for row, column in itertools.product(range(0, source.shape[0], rows), range(0, source.shape[1], columns)):
        own, its = (z[row : row + rows, column : column + columns] for z in (source, q))
        factor = (own * its).sum() / (its**2).sum() if its.any() else 1.0
        energies["dead_share"] += (own[its == 0] ** 2).sum()
        energies["scale_share"] += ((factor - 1) ** 2 * its**2).sum()
        energies["grid_share"] += ((own - factor * its)[its != 0] ** 2).sum()
    error = ((source - q) ** 2).sum()
    assert sum(energies.values()) == pytest.approx(error, rel=1e-9)
    mine = quantisation(made)
    assert [mine[part] for part in PARTS] == pytest.approx(
        [energies[part] / error for part in PARTS], rel=1e-3, abs=1e-5
    )  # fp32 differences of bf16 values


def test_variance_and_squared_bias_are_unbiased_over_all_pairs_of_draws():
    """Numbers that are rounded to 0 or 1: 0.3 at the odds of stochastic rounding, and 0.3 that becomes 1 half the time."""
    expected = {"grad/variance": 0.0, "grad/squared_bias": 0.0}
    for a, b, c, d in itertools.product((0.0, 1.0), repeat=4):
        odds = math.prod(0.3 if bit else 0.7 for bit in (a, c)) * 0.25
        found = gradient_split([[torch.tensor([a, b])], [torch.tensor([c, d])]], [torch.tensor([0.3, 0.3])])
        expected = {name: value + odds * found[name] for name, value in expected.items()}
    power = 2 * 0.3**2
    assert expected["grad/variance"] == pytest.approx((0.3 * 0.7 + 0.25) / power, rel=1e-6)
    assert expected["grad/squared_bias"] == pytest.approx(0.2**2 / power, rel=1e-5)


@every(draws=[2, 3, 7])
def test_variance_and_squared_bias_add_up_to_the_mean_squared_error(draws):
    generator = torch.Generator().manual_seed(draws)
    reference = [torch.randn(5, 3, generator=generator), torch.randn(7, generator=generator)]
    each = [[r + torch.randn(r.shape, generator=generator) + 0.5 for r in reference] for _ in range(draws)]
    flat = [np.concatenate([t.double().numpy().ravel() for t in own]) for own in (reference, *each)]
    errors = [own - flat[0] for own in flat[1:]]
    pairs = [a @ b for a, b in itertools.permutations(errors, 2)]
    power = flat[0] @ flat[0]
    mine = gradient_split(each, reference)
    assert mine["grad/squared_bias"] == pytest.approx(np.mean(pairs) / power, rel=1e-9)
    whole = np.mean([e @ e for e in errors]) / power
    assert mine["grad/variance"] + mine["grad/squared_bias"] == pytest.approx(whole, rel=1e-9)


def test_a_gradient_without_random_rounding_has_bias_alone():
    found = gradient_split([[torch.tensor([3.0, 5.0])]], [torch.tensor([3.0, 4.0])])
    assert found == {"grad/variance": 0.0, "grad/squared_bias": pytest.approx(1 / 25)}
    assert gradient_split([[torch.ones(2)]], [torch.zeros(2)]) == {}


def test_a_gradient_of_many_elements_is_split_in_parts_that_leave_none_out():
    reference = torch.ones(2**22 + 3)
    drawn = reference.clone()
    drawn[0] = drawn[-1] = 3.0
    found = gradient_split([[drawn]], [reference])
    assert found == {"grad/variance": 0.0, "grad/squared_bias": pytest.approx(8 / (2**22 + 3), rel=1e-12)}


def test_gradient_noise_is_that_of_numpy(generator):
    reference = [torch.randn(shape, generator=generator) for shape in ((8, 4), (5,), (2, 3, 4))]
    gradient = [r + 0.3 * torch.randn(r.shape, generator=generator) for r in reference]
    g, r = (
        np.concatenate([t.double().numpy().ravel() for t in tensors]) for tensors in (gradient, reference)
    )
    mine = gradient_noise(gradient, reference)
    assert mine["grad/cosine_to_bf16"] == pytest.approx(
        g @ r / np.linalg.norm(g) / np.linalg.norm(r), rel=1e-9
    )
    # the difference is taken in fp32
    assert mine["grad/noise_ratio"] == pytest.approx(np.linalg.norm(r) / np.linalg.norm(g - r), rel=1e-6)


def test_a_gradient_as_long_as_its_noise_has_ratio_one():
    reference, gradient = (
        [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])],
        [torch.tensor([3.0, 5.0]), torch.tensor([[4.0]])],
    )
    assert gradient_noise(gradient, reference)["grad/noise_ratio"] == 1
    assert gradient_noise(gradient, reference)["grad/cosine_to_bf16"] == pytest.approx(1 / math.sqrt(2))


@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
@pytest.mark.parametrize("side", ["gradient", "reference"])
def test_a_gradient_that_is_not_finite_is_not_compared(value, side):
    tensors = {
        "gradient": [torch.ones(2), -torch.ones(2)],
        "reference": [torch.full((2,), 2.0), torch.ones(2)],
    }
    tensors[side] = [torch.tensor([value, 1.0]), torch.tensor([-value, 1.0])]
    assert gradient_noise(**tensors) == {}


@pytest.mark.parametrize(("gradient", "reference"), [(1.0, 1.0), (0.0, 1.0), (1.0, 0.0), (0.0, 0.0)])
def test_without_noise_or_without_a_gradient_there_is_no_ratio(gradient, reference):
    assert gradient_noise([torch.full((3,), gradient)], [torch.full((3,), reference)]) == {}


# --- oscillation ----------------------------------------------------------------------------------


def cast(w: torch.Tensor, quant: Quant | None = None):
    return w, quantize(w, quant or Quant(), keep=True)


def test_oscillation_is_that_of_numpy(generator):
    before = {
        name: torch.randn(shape, generator=generator) for name, shape in (("a", (16, 32)), ("b", (8, 48)))
    }
    after = {name: w + 0.05 * torch.randn(w.shape, generator=generator) for name, w in before.items()}
    after["a"][0] = before["a"][0]
    mine = oscillation({n: cast(w) for n, w in before.items()}, [(n, cast(w)) for n, w in after.items()])
    old, new = (
        np.concatenate([w.double().numpy().ravel() for w in weights.values()]) for weights in (before, after)
    )
    old_q, new_q = (
        np.concatenate([cast(w)[1].dequantize().double().numpy().ravel() for w in ws.values()])
        for ws in (before, after)
    )
    old_codes, new_codes = (
        np.concatenate([cast(w)[1].codes.numpy().ravel() for w in weights.values()])
        for weights in (before, after)
    )
    assert mine["weights/flipped"] == (old_codes != new_codes).mean()
    assert 0 < mine["weights/flipped"] < 0.5
    assert mine["weights/oscillation"] == pytest.approx(
        np.abs(new_q - old_q).sum() / np.abs(new - old).sum(), rel=1e-6
    )  # fp32 differences


def test_one_weight_that_crosses_a_threshold_is_one_flip():
    before = torch.tensor([[6.0] + [1.24] + [1.0] * 14])
    after = before.clone()
    after[0, 1] = 1.26
    quant = Quant(outer=Outer(statistic="static:6"))  # the scale is 1
    mine = oscillation({"a": cast(before, quant)}, [("a", cast(after, quant))])
    assert mine["weights/flipped"] == 1 / 16
    assert mine["weights/oscillation"] == pytest.approx(0.5 / 0.02, rel=1e-5)


def test_weights_that_did_not_move_have_no_oscillation(generator):
    same = {"a": cast(torch.randn(16, 32, generator=generator))}
    assert oscillation(same, same.items()) == {"weights/flipped": 0}


def test_clipped_is_what_lies_beyond_half_a_step_above_the_grid():
    """Check a block that QuEST's rule scales by its deviation: numpy counts |y| > 6 and |y| > 7."""
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(5)).bfloat16()
    quant = Quant(range=Range(statistic="std:1.5"))
    operand = quantize(x, quant, keep=True)
    y = np.abs(operand.scaled.numpy())
    found = quantisation(operand)
    assert found["saturated_frac"] == pytest.approx((y > 6).mean())
    assert found["clipped_frac"] == pytest.approx((y > 7).mean())
    assert 0 < found["clipped_frac"] < found["saturated_frac"]
    blocks = y.reshape(64, 16, 16).max(axis=2)
    assert found["blocks_saturated_frac"] == pytest.approx((blocks > 6).mean())


@pytest.mark.parametrize(("statistic", "expected"), [("amax", 0.0), ("percentile:0.9", 0.5)])
def test_a_scale_is_clipped_where_its_block_needs_more_than_the_format_has(statistic, expected):
    x = torch.randn(64, 256, generator=torch.Generator().manual_seed(6)).bfloat16()
    operand = quantize(x, Quant(outer=Outer(statistic=statistic)), keep=True)
    found = quantisation(operand)["scale_clipped_frac"]
    largest = np.abs(x.float().numpy()).reshape(64, 16, 16).max(axis=2)
    assert found == pytest.approx((largest > operand.amax.item() * (1 + 2**-4)).mean())
    assert (found > expected) == bool(expected)


def layered(
    name: str, value: float, layer: str = "blocks.3.mlp.up", slot: str = "wgrad.g"
) -> dict[str, float]:
    return {f"quant/{slot}/{layer}/{name}": value}


def raised(metrics: dict[str, float]) -> list[tuple[str, str | None, str | None, float]]:
    """The metric, slot, layer and value of each alert of a record."""
    return [
        (alert.name.metric, alert.name.slot, alert.name.layer, alert.value)
        for alert in alerts(metrics, ALARMS)
    ]


@pytest.mark.parametrize(
    ("metrics", "expected"),
    [
        (layered("scale_clipped_frac", 0.18), [("scale_clipped_frac", "wgrad.g", "blocks.3.mlp.up", 0.18)]),
        (layered("scale_clipped_frac", 0.04), []),
        (layered("scale_saturated_frac", 1.0), []),
        (layered("zero_frac", 0.6), [("zero_frac", "wgrad.g", "blocks.3.mlp.up", 0.6)]),
        (layered("scale_zero_frac", 0.2), [("scale_zero_frac", "wgrad.g", "blocks.3.mlp.up", 0.2)]),
        (
            layered("clipped_frac", 0.2)
            | layered("clipped_frac", 0.3, "blocks.1.mlp.up")
            | layered("clipped_frac", 0.2, "z"),
            [("clipped_frac", "wgrad.g", "blocks.1.mlp.up", 0.3)],
        ),
        (
            layered("clipped_frac", 0.2) | layered("clipped_frac", 0.4, slot="fprop.x"),
            [
                ("clipped_frac", "wgrad.g", "blocks.3.mlp.up", 0.2),
                ("clipped_frac", "fprop.x", "blocks.3.mlp.up", 0.4),
            ],
        ),
        (
            layered("zero_frac", 0.6) | layered("scale_zero_frac", 0.2, "blocks.1.mlp.up"),
            [
                ("scale_zero_frac", "wgrad.g", "blocks.1.mlp.up", 0.2),
                ("zero_frac", "wgrad.g", "blocks.3.mlp.up", 0.6),
            ],
        ),
        ({"quant/wgrad.g/zero_frac": 0.9, "grad/noise_ratio": 1.8, "zero_frac": 1.0}, []),
        ({"grad/noise_ratio": 1.5}, [("noise_ratio", None, None, 1.5)]),
        ({"grad/noise_ratio": math.nan} | layered("zero_frac", math.nan), []),
    ],
)
def test_the_worst_layer_of_each_slot_raises_an_alarm_causes_first(metrics, expected):
    assert raised(metrics) == expected


@pytest.mark.parametrize(
    ("metrics", "sentence"),
    [
        (
            layered("scale_clipped_frac", 0.18),
            "the outer scale saturated 18% of the blocks in blocks.3.mlp.up wgrad.g",
        ),
        (
            {"grad/noise_ratio": 1.5},
            "the gradient's norm is 1.50 times its quantisation noise, below sqrt(3): FP4 may no longer help it",
        ),
    ],
)
def test_an_alert_is_a_sentence_with_its_place(metrics, sentence):
    assert [str(alert) for alert in alerts(metrics, ALARMS)] == [sentence]


# --- the registry: what a new metric must keep ----------------------------------------------------

OPERANDS = {
    "gaussian": torch.randn(32, 64, generator=torch.Generator().manual_seed(7)),
    "zero": torch.zeros(4, 32),
    "exact": torch.tensor([[6.0, -4.0, 3.0, 2.0] * 4]) * 448,
    "one value": torch.full((3, 7), 0.1),
}


@every(quant=[Quant(), OUTER_ONLY], x=OPERANDS.values(), name=OPERAND_METRICS)
def test_every_operand_metric_is_a_finite_number_or_undefined(name, x, quant):
    operand = quantize(x, quant, keep=True)
    value = OPERAND_METRICS[name].measure(operand, census(operand))
    assert type(value) is float
    assert not math.isinf(value)
    assert math.isfinite(value) or not x.any() or name in ("sqnr_db", *PARTS), (
        "undefined for an ordinary operand"
    )


@every(name=OPERAND_METRICS)
def test_every_operand_metric_explains_itself(name):
    measure = OPERAND_METRICS[name].measure
    assert measure.__name__ == name
    assert measure.__doc__.startswith("Return ")


@pytest.mark.parametrize("name", [name for name, metric in OPERAND_METRICS.items() if metric.alarm])
def test_an_operand_alarm_is_of_single_layers_of_its_metric(name):
    alarm = OPERAND_METRICS[name].alarm
    assert alarm in ALARMS
    assert parse(next(iter(layered(name, 0.0)))).like([alarm.pattern])
    others = [key for other in set(OPERAND_METRICS) - {name} for key in layered(other, 0)]
    others += [f"quant/fprop.x/{name}", f"mean/fprop.x/{name}"]
    assert not [key for key in others if parse(key).like([alarm.pattern])]


@pytest.mark.parametrize("alarm", ALARMS, ids=lambda alarm: alarm.pattern)
def test_every_alarm_trips_beyond_its_limit_alone_and_names_the_value(alarm):
    beyond = alarm.limit * (1.5 if alarm.side == "above" else 0.5) or 1.0
    assert [alarm.trips(value) for value in (beyond, alarm.limit, math.nan)] == [True, False, False]
    assert alarm.message.format(beyond) != alarm.message.format(beyond * 1.5)


def test_ordinary_nvfp4_operands_raise_no_alarm(generator):
    errors = SlotErrors()
    errors.operand(
        "blocks.0", "fprop.x", quantize(torch.randn(64, 256, generator=generator), Quant(), keep=True)
    )
    assert raised(errors.metrics()) == []


# --- memory of a measured step --------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["nvfp4", "mxfp4", "hif4"])
def test_measuring_weights_keeps_eight_bytes_of_each_and_the_casts_of_one_layer(preset, shards):
    """One cast with what it keeps takes 18 bytes a weight: those of all layers, before and after, took 37."""
    workload = gpt(shards, layers=8, width=64)
    _, engine = converted(workload, PRESETS[preset](), Clock(0))
    engine.at(0, Run(workload.steps))
    weights = [layer.weight for layer in engine.layers.values()]
    elements = sum(weight.numel() for weight in weights)
    whole = {name: (weight.clone(), cast) for name, (weight, cast) in engine.weight_casts()}
    with LiveMemory() as live, torch.no_grad():
        casts = keep_casts(engine.weight_casts())
        kept = live.bytes
        for weight in weights:
            weight.mul_(1.01)
        measured = oscillation(casts, engine.weight_casts())
    assert kept < 8.2 * elements
    assert live.peak < 11 * elements
    assert 0 < measured["weights/flipped"] < 1
    assert measured == oscillation(whole, engine.weight_casts())


def test_the_noise_of_a_gradient_takes_the_memory_of_one_tensor(generator):
    gradient, reference = ([torch.randn(64, 64, generator=generator) for _ in range(16)] for _ in range(2))
    with LiveMemory() as live:
        gradient_noise(gradient, reference)
    assert live.peak < 64 * 64 * 21  # a difference, and two copies in fp64; the other 15 beside them before
