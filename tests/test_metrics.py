"""Metrics of one quantised operand, against numpy in float64 and against cases whose answer is known."""

import math

import numpy as np
import pytest
import torch

from ablate.metrics import SlotErrors, quantisation
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Outer, Quant


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
        errors(name, "fprop.x", quantize(x, Quant(), keep=True))
    metrics = errors.metrics()
    layers = [metrics[f"quant/fprop.x/{name}/rel_mse"] for name in ("a", "c")]
    assert "quant/fprop.x/b/rel_mse" not in metrics
    assert metrics["quant/fprop.x/rel_mse"] == pytest.approx(sum(layers) / 2)
