"""Errors of measured products against those that the recipe gives: other engines' layers, right and broken."""

import math
from functools import partial

import pytest
import torch
from support.cases import every
from support.gpt_runs import gpt
from support.linears import drawn, run
from support.misread_scales import Misreading
from support.tensor_cores import FAULTS, Broken, TensorCores
from torch import nn

from ablate.engines.emulated import Engine
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.product_errors import of_gradients, of_output
from ablate.engines.scaled_mm import Native, ScaledLinear
from ablate.engines.selection import quantisable, replaced
from ablate.numerics.philox import Clock
from ablate.recipes import PRESETS
from ablate.training.alarms import alerts
from ablate.training.evaluation import PreparedRun
from ablate.training.loop import Telemetry
from ablate.training.loop import train as loop
from ablate.training.metrics import SlotErrors
from ablate.training.models.transformer import Transformer, initialise
from ablate.training.operand_metrics import ALARMS

NAME = "blocks.0.linear"
VALUES = {
    f"{value}{suffix}" for value in ("gain", "rel_l2") for suffix in ("", "_expected", "_margin", "_beyond")
}


class Foreign(EmulatedLinear):
    """A layer whose products are compared even if they draw nothing."""

    emulates = False


def measured(kind, preset: str, micro_batch: int = 0) -> dict[str, float]:
    """Metrics of one pass of a layer, x with outliers."""
    linear = nn.Linear(128, 96, bias=True)
    linear.weight.data = drawn(96, 128, seed=0) * 0.1
    layer = kind(linear, NAME, Clock(5, step=3, micro_batch=micro_batch), torch.bfloat16)
    layer.products, layer.context.probe = PRESETS[preset]().products, SlotErrors()
    run(layer, drawn(256, 128, seed=1, outliers=True), drawn(256, 96, seed=2))
    return layer.context.probe.metrics()


@pytest.mark.parametrize(("preset", "equal"), [("nvfp4", {"fprop.x"}), ("bf16", {"fprop.x", "dgrad.g"})])
def test_a_redrawn_layer_rounds_by_other_bits_what_the_recipe_draws_and_nothing_else(preset, equal):
    layer = EmulatedLinear(nn.Linear(128, 96, bias=False), NAME, Clock(5), torch.bfloat16)
    layer.products = PRESETS[preset]().products
    other, found = layer.redrawn(), set()
    for slot, columns in (("fprop.x", 128), ("dgrad.g", 96)):
        x, product = drawn(32, columns, seed=3).bfloat16(), getattr(layer.products, slot.partition(".")[0])
        quant = layer.products.slot(slot)
        one, two = (each.operand(x, slot, quant, product.hadamard)[0].values for each in (layer, other))
        found |= {slot} if torch.equal(one, two) else set()
    assert found == equal


def of_products(metrics: dict[str, float]) -> dict[str, dict[str, float]]:
    """Values of the layer's products."""
    found: dict[str, dict[str, float]] = {}
    for text, value in metrics.items():
        match text.split("/"):
            case ["gemm", product, layer, name]:
                assert layer == NAME
                found.setdefault(product, {})[name] = value
    return found


@every(preset=PRESETS)
def test_the_emulators_own_products_are_what_their_recipe_gives(preset):
    metrics = measured(EmulatedLinear, preset)
    products = PRESETS[preset]().products
    quantised = {slot.partition(".")[0] for slot, _ in products.quantised()}
    found = of_products(metrics)
    assert set(found) == quantised
    for name, values in found.items():
        assert set(values) == VALUES
        drawn_here = any(quant.draws for slot, quant in products.quantised() if slot.startswith(name))
        assert drawn_here or products.backward_needs or values["gain"] == values["gain_expected"]
        assert metrics[f"gemm/{name}/gain"] == values["gain"]
    assert not [alert for alert in alerts(metrics, ALARMS) if alert.name.family == "gemm"]


def test_a_draw_that_rounds_to_zero_is_in_the_interval_of_the_others_and_they_in_its():
    """dx is 0.05: an element that is 0 in nine draws of ten, and else 0.5, beside one of 6 that meets zeros."""
    linear, dy = nn.Linear(16, 16, bias=False), torch.zeros(1, 16)
    linear.weight.data = torch.eye(16)[1] * torch.ones(16, 1)
    linear.weight.data[0], dy[0, :2] = 0.0, torch.tensor([6.0, 0.05])
    gains = set()
    for step in range(60):
        layer = Foreign(linear, NAME, Clock(5, step=step), torch.bfloat16)
        layer.products, layer.context.probe = PRESETS["nvfp4"]().products, SlotErrors()
        run(layer, torch.ones(1, 16), dy)
        found = of_products(layer.context.probe.metrics())["dgrad"]
        assert found["gain_beyond"] <= 1
        gains |= {found["gain"] > 0, found["gain_expected"] > 0}
    assert gains == {True, False}


def test_the_width_is_that_of_all_parts_of_an_operand():
    """A transform takes the mean of tokens out of x: all of the gain's draws are then multiplied by that part."""
    linear = nn.Linear(64, 48, bias=False)
    for step in range(12):
        layer = Foreign(linear, NAME, Clock(5, step=step), torch.bfloat16)
        layer.products, layer.context.probe = PRESETS["averis"]().products, SlotErrors()
        run(layer, drawn(128, 64, seed=1) + 3 * drawn(1, 64, seed=7), drawn(128, 48, seed=2))
        assert of_products(layer.context.probe.metrics())["wgrad"]["gain_beyond"] < 0.7


@every(preset=PRESETS)
def test_a_measured_call_without_tokens_has_no_values(preset):
    """As of an expert to which no token goes."""
    layer = EmulatedLinear(nn.Linear(32, 16), NAME, Clock(5), torch.bfloat16)
    layer.products, layer.context.probe = PRESETS[preset]().products, SlotErrors()
    run(layer, torch.zeros(0, 32), torch.zeros(0, 16))
    found = of_products(layer.context.probe.metrics())
    assert not [values for values in found.values() if "gain" in values or "gain_beyond" in values]


@pytest.mark.parametrize("size", [1e-24, 1e24])
def test_the_size_of_a_gradient_changes_neither_gain_nor_width(size):
    """By a power of two; in fp32 the squares of its products would be 0, or infinite."""
    found = []
    for factor in (1.0, 2.0 ** round(math.log2(size))):
        layer = Foreign(nn.Linear(32, 16, bias=False), NAME, Clock(5), torch.bfloat16)
        layer.weight.data = drawn(16, 32, seed=0)
        layer.products, layer.context.probe = PRESETS["nvfp4"]().products, SlotErrors()
        run(layer, drawn(64, 32, seed=1), drawn(64, 16, seed=2) * factor)
        found.append(of_products(layer.context.probe.metrics()))
    for name in ("dgrad", "wgrad"):
        assert found[1][name] == pytest.approx(found[0][name], rel=0.01, abs=1e-3)


def test_gain_and_error_are_measured_against_the_unquantised_product():
    values = of_products(measured(EmulatedLinear, "nvfp4"))
    w, x, dy = drawn(96, 128, seed=0) * 0.1, drawn(256, 128, seed=1, outliers=True), drawn(256, 96, seed=2)
    w = w.bfloat16().float()
    layer = EmulatedLinear(nn.Linear(128, 96, bias=False), NAME, Clock(5, step=3), torch.bfloat16)
    layer.weight.data, layer.products = w, PRESETS["nvfp4"]().products
    exact = {"fprop": x @ w.t(), "dgrad": dy @ w, "wgrad": dy.t() @ x}
    for (name, true), own in zip(exact.items(), run(layer, x, dy), strict=True):
        true, own = true.double(), own.double()
        assert values[name]["gain"] == pytest.approx(
            ((own * true).sum() / true.square().sum()).item(), abs=1e-5
        )
        assert values[name]["rel_l2"] == pytest.approx(((own - true).norm() / true.norm()).item(), abs=1e-5)


def test_only_the_first_micro_batch_is_measured():
    assert of_products(measured(EmulatedLinear, "nvfp4", micro_batch=1)) == {}


def test_expected_products_leave_the_layer_as_it_is():
    """Amax histories, counts and the layer's own draws stay."""
    recipe = PRESETS["fp8_delayed"]()
    layer = Foreign(nn.Linear(64, 32, bias=False), NAME, Clock(5), torch.bfloat16)
    layer.products = recipe.products
    x, dy = drawn(64, 64, seed=1), drawn(64, 32, seed=2)
    results = run(layer, x, dy)
    before = {slot: dict(history.amax) for slot, history in layer.histories.items()}, int(layer.nonfinite)
    layer.clock.step = 1  # a history would note it
    errors = [*of_output(layer, layer.products, x, layer.weight, results[0])]
    errors += of_gradients(layer, layer.products, x, layer.weight, None, dy, results[1:])
    assert len(errors) == 3
    assert ({slot: dict(h.amax) for slot, h in layer.histories.items()}, int(layer.nonfinite)) == before


@pytest.mark.parametrize("preset", ["nvfp4", "mxfp4"])
def test_right_tensor_cores_raise_no_alarm(preset):
    metrics = measured(partial(ScaledLinear, native=Native("cublaslt", TensorCores().scaled_mm)), preset)
    assert len(of_products(metrics)) == 3
    assert not [alert for alert in alerts(metrics, ALARMS) if alert.name.family == "gemm"]


@pytest.mark.parametrize("fault", FAULTS)
def test_an_alarm_names_layer_and_product_of_broken_tensor_cores(fault):
    metrics = measured(partial(ScaledLinear, native=Native("cublaslt", Broken(fault).scaled_mm)), "nvfp4")
    named = {
        (alert.name.layer, alert.name.slot)
        for alert in alerts(metrics, ALARMS)
        if alert.name.family == "gemm"
    }
    assert named == {(NAME, "fprop"), (NAME, "dgrad"), (NAME, "wgrad")}


def test_scales_in_the_wrong_layout_raise_an_alarm_in_training_that_names_layer_and_product(shards):
    """One layer of a model reads wgrad's scales as of four groups of tokens; the others are the emulator's."""
    wrong = "blocks.1.attention.qkv"
    workload = gpt(shards, width=128, context=64, batch=4, steps=4, eval_every=100)
    prepared = workload.prepare(PRESETS["nvfp4"](), 0, "cpu")
    clock = Clock(0)
    with torch.device("meta"):
        model = Transformer(workload, 64, torch.bfloat16)
    model = initialise(model, 0, torch.device("cpu"))
    replaced(
        model,
        quantisable(model),
        lambda linear, name: (Misreading if name == wrong else EmulatedLinear)(
            linear, name, clock, torch.bfloat16
        ),
    )
    engine = Engine(model, PRESETS["nvfp4"](), clock)
    own = PreparedRun(model, engine, prepared.batch, prepared.validation)
    records = list(loop(own, workload, Telemetry(every=1, shadow=10**6, log=1)))
    named = {
        (alert.name.layer, alert.name.slot)
        for record in records
        for alert in alerts(record.metrics, ALARMS)
        if alert.name.family == "gemm"
    }
    assert named == {(wrong, "wgrad")}
    last = records[-1].metrics
    key = f"gemm/wgrad/{wrong}/"
    assert last[key + "rel_l2"] > 2 * last[key + "rel_l2_expected"]
    assert not any(math.isnan(value) for name, value in last.items() if name.startswith("gemm/"))
