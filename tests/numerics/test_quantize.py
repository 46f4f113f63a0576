"""The promises of a quantised operand: exact values, symmetries, padding, two dimensions, and randomness by counter."""

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import grids
from support.cases import every

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.philox import Clock, random_bits
from ablate.numerics.quantize import pad, quantize
from ablate.numerics.rounding import ROUNDINGS, stochastic
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Range

BLOCKS = ("1x16", "16x16")
QUANTS = [Quant(block=block, rounding=rounding) for block, rounding in itertools.product(BLOCKS, ROUNDINGS)]
QUANTS += [
    Quant(range=Range(headroom=17 / 16)),
    Quant(outer=Outer(statistic="percentile:0.9")),
    Quant(outer=Outer(bound=256.0)),
    Quant(rounding="stochastic", bits=24),
]
EXAMPLES = settings(max_examples=25, deadline=None, derandomize=True)


@pytest.fixture(
    params=QUANTS,
    ids=lambda q: f"{q.block}-{q.rounding}{q.bits}-{q.range.headroom}-{q.outer.statistic}-{q.outer.bound}",
)
def quant(request) -> Quant:
    return request.param


def tensor(seed: int, rows: int = 32, columns: int = 64) -> torch.Tensor:
    """Gaussian, with rows at different scales."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=g) * 2.0 ** torch.randint(-6, 7, (rows, 1), generator=g)


def quantized(x, quant, **options):
    return quantize(x, quant, clock=Clock(1), where=3, **options)


def test_values_are_codes_times_block_scales_and_exact_in_bf16(quant):
    result = quantized(tensor(0), quant)
    rows, columns = quant.tile
    scale = result.block_scale[:, 0, :, 0].repeat_interleave(rows, 0).repeat_interleave(columns, 1).double()
    codes = torch.where(scale == 0, 0, result.values.double() / scale)
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6], dtype=torch.float64)
    assert result.values.dtype == torch.bfloat16
    assert torch.isin(codes.abs(), grid).all()


def test_a_value_has_at_most_six_significant_bits(quant):
    mantissa, _ = np.frexp(quantized(tensor(1), quant).values.double().numpy())
    np.testing.assert_array_equal(mantissa * 64, np.round(mantissa * 64))


def test_values_are_at_most_the_divisor_and_decode_to_about_the_input(quant):
    x = tensor(2)
    result = quantized(x, quant)
    assert result.divisor == 6 * quant.outer.bound
    if quant.outer.bound == 448:
        assert result.values.abs().max() <= result.divisor
    if quant.outer.statistic == "amax":  # a percentile clips the largest, which hold most of the power here
        assert (result.dequantize() - x).square().sum() < 0.05 * x.square().sum()


@every(block=BLOCKS, rounding=ROUNDINGS, seed__power=[(0, -60), (1, -7), (2, 1), (3, 60)])
def test_scaling_by_a_power_of_two_scales_the_amax_and_changes_no_value(block, rounding, seed, power):
    quant, x = Quant(block=block, rounding=rounding), tensor(seed)
    a, b = quantized(x, quant), quantized(x * 2.0**power, quant)
    assert torch.equal(a.values, b.values)
    assert torch.equal(a.amax * 2.0**power, b.amax)


def test_quantising_again_does_change_what_was_rounded_stochastically_or_to_a_subnormal_scale():
    # A largest code of 4 gives a smaller scale the second time: Q(Q(x)) = Q(x) is no promise of NVFP4.
    stochastic = quantized(tensor(0), Quant(rounding="stochastic"))
    subnormal = quantize(tensor(0) * torch.tensor([1.0] + 31 * [2.0**-10]).unsqueeze(1), Quant())
    for once in (stochastic, subnormal):
        assert not torch.equal(quantize(once.values, Quant()).values, once.values)


@given(rows=st.integers(1, 40), columns=st.integers(1, 70), seed=st.integers(0, 2**31))
@EXAMPLES
def test_any_shape_equals_the_zero_padded_one(rows, columns, seed):
    x = tensor(seed, rows, columns).bfloat16()
    for quant, rotation in (
        (Quant(), None),
        (Quant(block="16x16"), None),
        (Quant(), Hadamard()),
        (QUANTS[1], None),
    ):
        padded = pad(x, 16, 16)
        a, b = quantized(x, quant, rotation=rotation), quantized(padded, quant, rotation=rotation)
        assert a.values.shape == (rows, padded.shape[1])
        assert torch.equal(a.values, b.values[:rows])
        assert a.amax == b.amax
        assert torch.equal(a.dequantize(), b.dequantize()[:rows])
        assert b.values[rows:].eq(0).all()


def test_padding_adds_zeros_at_the_end_and_only_what_is_missing():
    x = torch.ones(3, 16)
    assert pad(x, 1, 16) is x
    assert pad(x, 4, 32).shape == (4, 32)
    assert pad(x, 4, 32).sum() == 48


@pytest.mark.parametrize(
    ("block", "width"), [("1x8", 32), ("1x16", 32), ("1x32", 32), ("1x64", 64), ("16x16", 32), (None, 32)]
)
def test_the_contraction_is_padded_to_whole_blocks_and_whole_groups_of_random_bits(block, width):
    quant = Quant(block=block) if block else Quant(block=None, scale=None, outer=Outer(bound=1.0))
    assert quantize(torch.ones(3, 20), quant).values.shape == (3, width)


def test_the_transposed_copy_of_a_2d_tensor_is_the_same_numbers():
    x = tensor(5, 48, 80)
    row, column = quantize(x, Quant(block="16x16")), quantize(x.t(), Quant(block="16x16"))
    assert torch.equal(row.values.t(), column.values)
    assert torch.equal(row.dequantize().t(), column.dequantize())


def test_the_transposed_copy_of_a_1d_tensor_is_not():
    g = torch.Generator().manual_seed(0)
    x = torch.randn(1024, 1024, generator=g)
    row, column = quantize(x, Quant()).dequantize(), quantize(x.t(), Quant()).dequantize().t()
    relative = ((row - column).square().sum() / x.square().sum()).item()
    assert relative == pytest.approx(
        17.0e-3, rel=0.02
    )  # docs/reference/numerics.md, section 13; rounded there to three digits


def test_stochastic_bits_depend_on_the_site_and_the_clock_alone():
    x, quant = tensor(6), Quant(rounding="stochastic")
    first = quantize(x, quant, clock=Clock(1, step=4), where=9)
    assert torch.equal(quantize(x, quant, clock=Clock(1, step=4), where=9).values, first.values)
    for clock, where in ((Clock(1, step=5), 9), (Clock(1, step=4), 10), (Clock(2, step=4), 9)):
        assert not torch.equal(quantize(x, quant, clock=clock, where=where).values, first.values)


def test_nearest_rounding_needs_no_clock_and_ignores_one():
    x = tensor(7)
    assert torch.equal(quantize(x, Quant()).values, quantized(x, Quant()).values)


def test_the_global_generator_is_neither_read_nor_advanced():
    before = torch.random.get_rng_state()
    quantized(tensor(8), Quant(rounding="stochastic"), rotation=Hadamard())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_the_input_is_not_changed(quant):
    for dtype in (torch.float32, torch.bfloat16):
        x = tensor(9).to(dtype)
        before = x.clone()
        quantized(x, quant)
        assert torch.equal(x, before)


def test_keeping_the_source_changes_no_bit(quant):
    x = tensor(10).bfloat16()
    a, b = quantized(x, quant), quantized(x, quant, keep=True)
    assert torch.equal(a.values, b.values)
    assert a.amax == b.amax
    assert a.source is None
    assert torch.equal(b.source, x.float())


@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.int32, torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn]
)
def test_another_dtype_is_refused_by_name(dtype):
    with pytest.raises(TypeError, match=str(dtype)):
        quantize(torch.zeros(2, 16).to(dtype), Quant())


@pytest.mark.parametrize("shape", [(), (16,), (2, 3, 16)])
def test_another_number_of_dimensions_is_refused(shape):
    with pytest.raises(ValueError, match="matrix"):
        quantize(torch.ones(shape), Quant())


def test_ms_eden_needs_a_rotation_of_whole_blocks():
    quant = Quant(rounding="ms_eden", outer=Outer(bound=256.0))
    for rotation in (None, Hadamard(size=8)):
        with pytest.raises(ValueError, match="rotation"):
            quantize(torch.ones(2, 16), quant, rotation=rotation, clock=Clock(0))


@pytest.mark.parametrize("bound", [256.0, 255.99])
def test_ms_eden_multiplies_the_scales_of_a_group_by_one_correction_and_rounds_them_to_a_neighbour(bound):
    quant, rotation = Quant(rounding="ms_eden", outer=Outer(bound=bound)), Hadamard(size=32, signs="per_call")
    x = tensor(12)
    result = quantized(x, quant, rotation=rotation, keep=True)
    plain = quantized(x, Quant(outer=Outer(bound=bound)), rotation=rotation, keep=True)
    assert torch.equal(result.codes, plain.codes)
    assert torch.equal(result.scaled, plain.scaled)
    y, q = (z.double().view(32, 2, 32) for z in (plain.scaled, plain.codes))
    correction = (y.square().sum(2) / (y * q).sum(2)).repeat_interleave(
        2, 1
    )  # Quartet II: <y, y> / <y, q> over a rotation
    wanted = plain.block_scale.view(32, 4).double() * correction
    mine = result.block_scale.view(32, 4).double()
    step = ELEMENTS["e4m3"].step(wanted.float()).double()
    assert ((mine - wanted).abs() < step * (1 + 1e-5)).all()
    assert torch.isin(mine, torch.from_numpy(grids.named("e4m3"))).all()
    draws = [
        quantize(x, quant, rotation=rotation, clock=Clock(1), where=n, product=0).block_scale
        for n in range(64)
    ]
    again = quantize(x, Quant(outer=Outer(bound=bound)), rotation=rotation, clock=Clock(1), keep=True)
    y, q = (z.double().view(32, 2, 32) for z in (again.scaled, again.codes))
    wanted = again.block_scale.view(32, 4).double() * (y.square().sum(2) / (y * q).sum(2)).repeat_interleave(
        2, 1
    )
    drift = (torch.stack(draws).view(64, 32, 4).double().mean(0) - wanted) / ELEMENTS["e4m3"].step(
        wanted.float()
    )
    assert drift.abs().max() < 5 * 0.5 / 8  # five standard errors of 64 draws between two codes
    assert drift.mean().abs() < 5 * 0.5 / 8 / 128**0.5


def test_elements_and_block_scales_take_their_own_bits_in_the_documented_layout():
    quant = Quant(rounding="stochastic", bits=24, scale=BlockScale(rounding="stochastic"), outer=None)
    x, clock = tensor(13, 6, 80).abs(), Clock(1, step=2)
    result = quantize(x, quant, clock=clock, where=9, keep=True)
    elements, scales = (
        random_bits(clock, 9, 6, columns, 24, x.device, purpose) for columns, purpose in ((80, 0), (16, 1))
    )
    largest = x.view(6, 5, 16).amax(2) * (1 / torch.tensor(6.0))
    block_scale = stochastic(largest, SCALES["e4m3"], scales[:, :5].contiguous(), 24)
    assert torch.equal(result.block_scale.view(6, 5), block_scale)
    assert torch.equal(result.codes, stochastic(result.scaled, ELEMENTS["e2m1"], elements, 24))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), float("-inf")])
@pytest.mark.parametrize("block", BLOCKS)
def test_a_non_finite_input_shows_in_the_amax(bad, block):
    x = tensor(11)
    x[3, 5] = bad
    assert not quantize(x, Quant(block=block)).amax.isfinite()


@pytest.mark.parametrize("shape", [(0, 16), (4, 0), (0, 0)])
@pytest.mark.parametrize("block", BLOCKS)
def test_an_empty_tensor_quantises_to_an_empty_one(shape, block):
    result = quantize(torch.empty(shape), Quant(block=block))
    assert result.values.numel() == 0
    assert result.amax == 0
