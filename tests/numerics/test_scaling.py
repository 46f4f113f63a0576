"""Two-level scaling: the order of its operations, its edges, and its statistics, against numpy's fp32 and a search."""

import math
from decimal import Decimal

import numpy as np
import pytest
import torch
from oracles import grids

from ablate.numerics.formats import SCALES, e4m3
from ablate.numerics.quantize import quantize
from ablate.numerics.scaling import STATISTICS, block_scales, element_scales, encode_scale, tensor_statistic
from ablate.numerics.spec import Outer, Quant, Range

FLT_MAX = float(np.finfo(np.float32).max)
E4M3 = grids.magnitudes(mantissa=3, emin=-6, top=448.0)
SPELLINGS = {"amax": "amax", "percentile": "percentile:0.9"}


def scales_of(amax: np.ndarray, block_amax: np.ndarray) -> np.ndarray:
    scale = encode_scale(torch.from_numpy(amax), Quant())
    return block_scales(torch.from_numpy(block_amax), scale, Quant()).numpy()


def bf16_pairs(count: int, generator) -> tuple[np.ndarray, np.ndarray]:
    """(amax, block amax <= amax), both exact in bf16."""
    amax = torch.rand(count, generator=generator) + 1
    block = (amax * torch.rand(count, generator=generator)).bfloat16().float()
    return amax.bfloat16().float().numpy(), block.numpy()


def test_e4m3_keeps_subnormals_rounds_ties_to_even_and_saturates(generator):
    halfway = (E4M3[1:] + E4M3[:-1]) / 2
    drawn = 2.0 ** torch.empty(4096).uniform_(-12, 12, generator=generator)
    values = torch.cat((torch.from_numpy(E4M3), torch.from_numpy(halfway), drawn, torch.tensor([449.0, 1e30, FLT_MAX]))).float()
    np.testing.assert_array_equal(e4m3(values).numpy(), grids.nearest(values.numpy(), E4M3))


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_format_is_idempotent_and_never_negative(name):
    once = SCALES[name](torch.logspace(-12, 6, 1000, base=2))
    assert (once >= 0).all()
    assert torch.equal(SCALES[name](once), once)


def test_the_block_maximum_is_multiplied_by_one_rounded_product():
    amax, block, sixth = np.float32(1.015625), np.float32(0.76171875), np.float32(1) / np.float32(6)
    scale = np.float32(2688) / amax
    assert grids.nearest(block * (scale * sixth), E4M3) == 352
    assert grids.nearest(block / np.float32(6) * scale, E4M3) == 320  # the paper's order, an exact tie
    x = torch.zeros(1, 32, dtype=torch.bfloat16)
    x[0, 0], x[0, 16] = float(amax), float(block)
    assert quantize(x, Quant()).block_scale.flatten().tolist() == [448, 352]


def test_the_papers_order_of_multiplication_would_change_about_one_scale_in_a_thousand(generator):
    amax, block = bf16_pairs(200_000, generator)
    scale = np.float32(2688) / amax
    ours = grids.nearest(block * (scale * (np.float32(1) / np.float32(6))), E4M3)
    paper = grids.nearest(block / np.float32(6) * scale, E4M3)
    np.testing.assert_array_equal(scales_of(amax, block), ours)
    assert 0.0003 < (ours != paper).mean() < 0.003  # "about 0.1 %": depends on the distribution of the pairs


def test_headroom_multiplies_the_multiplier_once(generator):
    amax, block = bf16_pairs(20_000, generator)
    quant = Quant(range=Range(headroom=17 / 16))
    multiplier = np.float32(2688) / amax * (np.float32(1) / np.float32(6)) * np.float32(17 / 16)
    mine = block_scales(torch.from_numpy(block), encode_scale(torch.from_numpy(amax), quant), quant).numpy()
    np.testing.assert_array_equal(mine, grids.nearest(block * multiplier, E4M3))


@pytest.mark.parametrize(("amax", "scale"), [(0.0, 1.0), (math.inf, 1.0), (2688.0, 1.0), (1e-38, FLT_MAX), (3e38, 2688 / 3e38)])
def test_the_encode_scale_is_finite_and_positive_whatever_the_amax(amax, scale):
    assert encode_scale(torch.tensor(amax), Quant()).item() == np.float32(np.float32(scale))


def test_a_smaller_bound_replaces_448_in_the_encode_scale():
    assert encode_scale(torch.tensor(2.0), Quant(outer=Outer(bound=256.0))).item() == 768.0


def test_element_scales_are_two_exact_reciprocals(generator):
    s = torch.from_numpy(E4M3[1:]).float()
    scale = torch.rand(1, generator=generator) * 1000
    expected = np.float32(1) / (s.numpy() * (np.float32(1) / scale.numpy()))
    np.testing.assert_array_equal(element_scales(s, scale).numpy(), expected)


def test_a_zero_block_scale_gives_the_largest_element_scale_and_decodes_to_zero():
    x = torch.zeros(2, 32)
    x[0, 0], x[1, 16] = 1.0, 1e-7  # the second block's scale is below half of the smallest subnormal
    result = quantize(x, Quant(), keep=True)
    assert result.block_scale[1, 0, 1, 0] == 0
    assert element_scales(torch.zeros(1), torch.ones(1)).item() == FLT_MAX
    assert result.scaled[1, 16] > 6  # code 6, whose value times scale is 0
    assert result.dequantize()[1].abs().max() == 0
    assert result.dequantize().isfinite().all()


def test_a_block_scale_may_be_subnormal():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16] = 448.0 * 6, 6 * 3 * 2.0**-9
    result = quantize(x, Quant())
    assert result.block_scale.flatten().tolist() == [448.0, 3 * 2.0**-9]
    assert result.values[0, 16] == 6 * 3 * 2.0**-9


def test_blocks_above_a_percentile_saturate_at_448(generator):
    x = torch.randn(64, 64, generator=generator)
    x[0, 0] = 1000.0
    result = quantize(x, Quant(outer=Outer(statistic="percentile:0.9")))
    assert result.block_scale.max() == 448
    assert result.values.abs().max() == 6 * 448
    assert result.values[0, 0] == 6 * 448
    # Saturated: what 1000 decodes to is the statistic itself, up to the rounding of fp32(1/2688).
    assert result.dequantize()[0, 0].item() == pytest.approx(result.amax.item(), rel=1e-6)


@pytest.mark.parametrize("p", [0.001, 0.07, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0])
@pytest.mark.parametrize("shape", [(16, 16), (10, 10), (7, 33), (1, 1)])
def test_a_percentile_is_the_order_statistic_ceil_p_n(p, shape, generator):
    x = torch.randn(shape, generator=generator)
    ordered = np.sort(np.abs(x.numpy()).ravel())
    mine = tensor_statistic(x, x.abs().amax(), Quant(outer=Outer(statistic=f"percentile:{p}")))
    assert mine.item() == ordered[math.ceil(Decimal(str(p)) * x.numel()) - 1]  # as written: in binary 0.07 * 100 is above 7


def test_the_percentile_one_is_the_amax(generator):
    x = torch.randn(48, 64, generator=generator)
    a, b = quantize(x, Quant()), quantize(x, Quant(outer=Outer(statistic="percentile:1.0")))
    assert torch.equal(a.values, b.values)
    assert a.amax == b.amax


def test_a_percentile_ignores_the_zeros_of_padding():
    x = torch.arange(1.0, 18.0).reshape(1, 17)
    assert quantize(x, Quant(outer=Outer(statistic="percentile:0.01"))).amax == 1.0


@pytest.mark.parametrize("name", STATISTICS)
def test_a_statistic_is_a_magnitude_of_the_tensor_and_zero_for_an_empty_one(name, generator):
    quant = Quant(outer=Outer(statistic=SPELLINGS[name]))
    x = torch.randn(8, 16, generator=generator)
    assert tensor_statistic(x, x.abs().amax(1), quant) in x.abs()
    assert tensor_statistic(torch.empty(0, 16), torch.empty(0), quant) == 0
