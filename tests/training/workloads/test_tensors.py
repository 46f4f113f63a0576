"""The tensors workload: what it draws, what it measures of quantisers and products, and that its figures are the specification's."""

import math

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from ablate.numerics.spec import Quant
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.recipe import Fprop
from ablate.training.loop import Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads import WORKLOADS
from ablate.training.workloads.tensors import DISTRIBUTIONS, Tensors, draw, product_errors

SMALL = {"tokens": 64, "inputs": 48, "outputs": 80}
TINY_RUN = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 16,
    "batch": 2,
    "steps": 3,
    "eval_every": 3,
    "eval_tokens": 32,
    "eval_batch": 1,
}


def records(recipe: str = "nvfp4", seed: int = 0, **fields):
    return list(
        Tensors(**(SMALL | fields)).records(TrialRun(PRESETS[recipe](), seed, "emulated", "cpu", Telemetry()))
    )


def metrics(recipe: str = "nvfp4", seed: int = 0, **fields) -> dict[str, float]:
    return {
        name: value for record in records(recipe, seed, **fields) for name, value in record.metrics.items()
    }


@pytest.mark.parametrize("name", sorted(set(DISTRIBUTIONS) - {"captured"}))
def test_a_distribution_is_its_seeds_alone_and_finite(name):
    x, again, other = draw(name, (64, 48), 7), draw(name, (64, 48), 7), draw(name, (64, 48), 8)
    assert x.dtype == torch.bfloat16
    assert x.shape == (64, 48)
    assert x.isfinite().all()
    assert torch.equal(x, again)
    assert not torch.equal(x, other)


def kurtosis(x: torch.Tensor) -> float:
    x = x.double()
    return (x.numel() * x.pow(4).sum() / x.square().sum() ** 2).item()


@pytest.mark.parametrize(("name", "expected", "tolerance"), [("gaussian", 3.0, 0.1), ("laplace", 6.0, 0.5)])
def test_a_distribution_has_its_kurtosis(name, expected, tolerance):
    """The tolerance is three standard errors of the sample kurtosis at 2^20 elements, and bf16's rounding."""
    assert kurtosis(draw(name, (1024, 1024), 0)) == pytest.approx(expected, abs=tolerance)


def test_heavy_tails_are_heavier():
    assert kurtosis(draw("student:3", (512, 512), 0)) > 20
    assert kurtosis(draw("outliers:0.001:50", (512, 512), 0)) > 100


def test_hot_tokens_are_the_same_in_every_tensor_and_stray_ones_are_not():
    def hot(name: str, seed: int) -> set[int]:
        power = draw(f"{name}:0.0625:30", (64, 256), seed).float().square().sum(1)
        return set(power.topk(4).indices.tolist())

    assert hot("hot_tokens", 0) == hot("hot_tokens", 1) == {0, 16, 32, 48}
    assert hot("stray_tokens", 0) != hot("stray_tokens", 1)


def test_hot_channels_are_columns_and_a_mean_is_the_columns_own():
    x = draw("hot_channels:0.05:30", (256, 64), 0).float()
    assert (x.square().mean(0) > 100).sum() == 3
    assert draw("mean:4", (256, 64), 0).float().mean(0).abs().mean() == pytest.approx(
        4 * math.sqrt(2 / math.pi), rel=0.4
    )


@pytest.mark.parametrize("value", ["normal", "student:x", "gaussian:1", "hot_tokens:1:2:3", "student:-3", ""])
def test_an_impossible_distribution_is_refused_with_what_it_takes(value):
    with pytest.raises(ValidationError, match=r"must be one of|takes"):
        Tensors(x=value)


@pytest.mark.parametrize(
    "value",
    ["student:2.5", "student:0", "hot_channels:0:30", "stray_tokens:0", "hot_tokens:1.5", "outliers:5:50"],
)
def test_a_number_that_would_be_drawn_as_another_is_refused(value):
    """2.5 degrees of freedom would be 2, no hot channel would be one, and 5 % as 5 would be all elements."""
    with pytest.raises(ValidationError, match="takes"):
        Tensors(x=value)
    assert Tensors(x="outliers:0:50", w="hot_channels:1", g="student:1").w == "hot_channels:1"


@pytest.mark.parametrize("name", PRESETS)
def test_every_preset_gives_every_metric_that_it_can_be_compared_by(name):
    """A preset that quantises nothing forward has no inconsistency, and so on; but no metric is outside the published set."""
    found = metrics(name)
    assert set(found) <= Tensors.METRICS
    assert all(math.isfinite(value) for value in found.values())
    quantised = {slot for slot, _ in PRESETS[name]().quantised()}
    assert {key.split("/")[1] for key in found if key.startswith("quant/")} == quantised
    assert {f"gemm/{product}/rel_mse" for product in ("fprop", "dgrad", "wgrad")} <= set(found)


def test_a_product_that_overflows_has_an_infinite_error():
    x = w = torch.full((16, 16), 1e25, dtype=torch.bfloat16)
    found = product_errors({"fprop": torch.full((16, 16), math.inf)}, x, w, x)
    assert (found["gemm/fprop/rel_mse"], found["gemm/fprop/sqnr_db"]) == (math.inf, -math.inf)


def test_a_product_whose_operand_is_cast_to_zeros_has_no_cosine():
    """1e-7 over 6 is below the least block scale of E4M3, and no outer scale lifts it."""
    recipe = Recipe(fprop=Fprop(x=Quant(outer=None)))
    config = Tensors(tokens=16, inputs=32, outputs=16, x="outliers:1:0.0000001")
    (record,) = config.records(TrialRun(recipe, 0, "emulated", "cpu", Telemetry()))
    found = {name: value for name, value in record.metrics.items() if name.startswith("gemm/fprop")}
    assert found == {"gemm/fprop/rel_mse": 1, "gemm/fprop/sqnr_db": 0, "gemm/fprop/gain": 0}


def test_bf16_products_err_by_bf16s_rounding_alone():
    """One rounding of the output: at most 2^-9 relative each, so below 2^-18 mean squared."""
    for product in ("fprop", "dgrad", "wgrad"):
        assert metrics("bf16")[f"gemm/{product}/rel_mse"] < 2.0**-18


def test_product_errors_are_numpys():
    config = Tensors(**SMALL)
    x, w, _ = (t.double().numpy() for t in config.tensors(3, torch.device("cpu")))
    found = metrics("nvfp4", seed=3)
    recipe = PRESETS["nvfp4"]()
    from ablate.numerics.quantize import quantize

    a = quantize(torch.tensor(x).bfloat16(), recipe.fprop.x).dequantize().double().numpy()
    b = quantize(torch.tensor(w).bfloat16(), recipe.fprop.w).dequantize().double().numpy()[: w.shape[0]]
    exact, mine = x @ w.T, a @ b.T
    expected = ((exact - mine) ** 2).sum() / (exact**2).sum()
    assert found["gemm/fprop/rel_mse"] == pytest.approx(
        expected, rel=2e-3
    )  # the product itself is rounded to bf16


def test_2d_weights_are_consistent_and_1d_weights_are_not():
    """17.0e-3 on Gaussian data: docs/reference/numerics.md, section 13; 4 % for 64k elements."""
    assert metrics("nvfp4", outputs=256, inputs=256)["weights/inconsistency"] == 0
    assert metrics("fp4_all_the_way", outputs=256, inputs=256)["weights/inconsistency"] == pytest.approx(
        17.0e-3, rel=0.04
    )


def test_records_come_after_powers_of_four_draws_and_the_last():
    assert [record.step for record in records(draws=20)] == [1, 4, 16, 20]
    assert [record.step for record in records(draws=1)] == [1]


def test_an_unbiased_rounding_errs_as_one_over_draws():
    found = Tensors(**SMALL, draws=64)
    recipe = PRESETS["four_over_six"]()  # headroom 17/16
    last = list(found.records(TrialRun(recipe, 0, "emulated", "cpu", Telemetry())))[-1].metrics
    assert last["mean/dgrad.g/slope"] == pytest.approx(-1, abs=0.03)
    biased = metrics("nvfp4", draws=64)
    assert biased["mean/dgrad.g/slope"] > last["mean/dgrad.g/slope"] + 0.02


def test_a_mean_over_draws_is_numpys_mean():
    config = Tensors(**SMALL, draws=4)
    recipe = PRESETS["nvfp4"]()
    from ablate.numerics.philox import Clock, site
    from ablate.numerics.quantize import quantize

    g = config.tensors(1, torch.device("cpu"))[2]
    where = site("tensors", "dgrad.g")
    drawn = [
        quantize(g, recipe.dgrad.g, clock=Clock(1, step=step), where=where).dequantize().double().numpy()
        for step in range(4)
    ]
    x = g.double().numpy()
    expected = ((np.mean(drawn, 0)[:, : x.shape[1]] - x) ** 2).sum() / (x**2).sum()
    assert metrics("nvfp4", seed=1, draws=4)["mean/dgrad.g/rel_mse"] == pytest.approx(expected, rel=1e-6)


def test_captured_tensors_are_those_of_the_run_and_set_the_shapes():
    config = Tensors(x="captured", w="captured", g="captured", capture=TINY_RUN, layer="blocks.0.mlp.down")
    x, w, g = config.tensors(0, torch.device("cpu"))
    again = config.tensors(0, torch.device("cpu"))
    tokens, hidden, width = 2 * 16, config.capture.hidden_width, 32
    assert (x.shape, w.shape, g.shape) == ((tokens, hidden), (width, hidden), (tokens, width))
    assert all(torch.equal(a, b) for a, b in zip((x, w, g), again, strict=True))
    assert g.abs().sum() > 0
    assert not torch.equal(config.tensors(1, torch.device("cpu"))[0], x)


def test_a_layer_that_the_captured_run_lacks_is_a_problem():
    config = Tensors(x="captured", capture=TINY_RUN, layer="blocks.1.mlp.down")
    ((field, why),) = config.problems()
    assert field == "layer"
    assert "blocks.0.mlp.down" in why
    assert list(Tensors(layer="nonsense").problems()) == []  # nothing is captured


def test_what_is_captured_is_identity_only_where_it_is_used():
    assert Tensors().identity() == Tensors(capture=TINY_RUN).identity()
    assert Tensors(x="captured").identity() != Tensors(x="captured", capture=TINY_RUN).identity()


def test_it_is_known_by_its_name():
    assert WORKLOADS["tensors"] is Tensors
