"""Two-level scaling: the order of its operations, its edges, its statistics and formats, against numpy's fp32 and a search."""

import itertools
import math
from decimal import Decimal

import numpy as np
import pytest
import torch
from oracles import grids
from pydantic import ValidationError
from support.cases import every

from ablate.numerics.formats import SCALES
from ablate.numerics.history import History
from ablate.numerics.kernels import builds
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import pad, quantize
from ablate.numerics.rounding import SCALE_ROUNDINGS
from ablate.numerics.scaling import (
    BLOCK_STATISTICS,
    STATISTICS,
    block_amax,
    block_scales,
    block_statistic,
    element_scales,
    encode_scale,
    histogram,
    order_statistic,
    outer_statistic,
    round_scale,
)
from ablate.numerics.spec import BlockScale, Outer, Quant, Range

FLT_MAX = float(np.finfo(np.float32).max)
E4M3 = grids.named("e4m3")
SPELLINGS = {
    "amax": "amax",
    "percentile": "percentile:0.9",
    "delayed": "delayed:4",
    "hold": "hold:4",
    "static": "static:2.5",
}
ENUMERATED = ("e4m3", "ue5m3", "e8m0", "e6m2")
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def allowed(format: str, rounding: str) -> bool:
    try:
        return bool(BlockScale(format=format, rounding=rounding))
    except ValidationError:
        return False


COMBINATIONS = [pair for pair in itertools.product(SCALES, SCALE_ROUNDINGS) if allowed(*pair)]


def tiles_of(x: torch.Tensor, rows: int = 1, columns: int = 16) -> torch.Tensor:
    padded = pad(x, rows, columns).float()
    return padded.view(padded.shape[0] // rows, rows, padded.shape[1] // columns, columns)


def statistic(x: torch.Tensor, columns: int = 16, history=None, clock=None, **outer) -> torch.Tensor:
    tiles = tiles_of(x, columns=columns)
    return outer_statistic(x, tiles, block_amax(tiles), Outer(**outer), history, clock)


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
    values = torch.cat(
        (torch.from_numpy(E4M3), torch.from_numpy(halfway), drawn, torch.tensor([449.0, 1e30, FLT_MAX]))
    ).float()
    np.testing.assert_array_equal(
        round_scale(values, BlockScale()).numpy(), grids.nearest(values.numpy(), E4M3)
    )


def scale_values(format: str, generator) -> torch.Tensor:
    """0, values over the whole range of the format, its grid points and halfway points, and what is beyond it; ascending."""
    exponents = torch.empty(2000).uniform_(-149, 128, generator=generator)
    near = torch.empty(2000).uniform_(-20, 20, generator=generator)
    values = torch.cat((torch.zeros(1), 2.0**exponents, 2.0**near, torch.tensor([FLT_MAX])))
    if format in ENUMERATED:
        points = grids.named(format)
        values = torch.cat(
            (values, torch.from_numpy(np.concatenate((points, (points[1:] + points[:-1]) / 2))).float())
        )
    return values[values.isfinite()].sort().values


@pytest.mark.parametrize(("format", "rounding"), COMBINATIONS)
class TestScaleFormats:
    """Promises of every scale format under every rounding that it may have."""

    def rounded(self, values, format, rounding, bits=0.0):
        return round_scale(
            values, BlockScale(format=format, rounding=rounding), torch.full_like(values, bits)
        )

    def test_a_scale_is_a_value_of_the_format(self, format, rounding, generator):
        mine = self.rounded(scale_values(format, generator), format, rounding, 2.0**23)
        if format in ENUMERATED:
            assert np.isin(mine.double().numpy(), grids.named(format)).all()
        else:
            assert torch.equal(mine.to(DTYPES[format]).float(), mine)
        assert (mine >= 0).all()
        assert mine.max() == SCALES[format].max

    def test_it_is_one_of_the_two_neighbours_on_the_right_side(self, format, rounding, generator):
        if format not in ENUMERATED:
            return  # torch's own cast, compared below
        values = scale_values(format, generator)
        expected = np.array(
            [grids.neighbours(value, grids.named(format)) for value in values.double().tolist()]
        )
        for bits in (0.0, 2.0**23, 2.0**24 - 1):
            mine = self.rounded(values, format, rounding, bits).double().numpy()
            assert ((mine == expected[:, 0]) | (mine == expected[:, 1])).all()
            if rounding in ("floor", "ceil"):
                np.testing.assert_array_equal(mine, expected[:, int(rounding == "ceil")])

    def test_it_is_monotone(self, format, rounding, generator):
        for bits in (0.0, 1e6, 2.0**24 - 1):
            assert (self.rounded(scale_values(format, generator), format, rounding, bits).diff() >= 0).all()

    def test_it_is_idempotent(self, format, rounding, generator):
        once = self.rounded(scale_values(format, generator), format, rounding)
        for bits in (0.0, 2.0**24 - 1):
            assert torch.equal(self.rounded(once, format, rounding, bits), once)

    def test_its_rule_for_zero_replaces_zeros_alone(self, format, rounding, generator):
        values, bits = scale_values(format, generator), torch.zeros(1)
        plain = self.rounded(values, format, rounding)
        if not SCALES[format].zero:
            assert plain[0] == grids.named(format)[0]
            return
        assert plain[0] == 0
        smallest = 2.0 ** SCALES[format].emin
        for zero, value in (("one", 1.0), ("min_normal", smallest)):
            mine = round_scale(
                values, BlockScale(format=format, rounding=rounding, zero=zero), bits.expand_as(values)
            )
            assert torch.equal(mine[plain > 0], plain[plain > 0])
            assert mine[plain == 0].eq(value).all()


@pytest.mark.parametrize("format", ENUMERATED)
def test_nearest_scales_are_nearest_with_ties_to_the_even_code(format, generator):
    values = scale_values(format, generator)
    expected = grids.nearest(values.numpy(), grids.named(format))
    np.testing.assert_array_equal(round_scale(values, BlockScale(format=format)).double().numpy(), expected)


@pytest.mark.parametrize(
    ("format", "dtype"), [("e4m3", torch.float8_e4m3fn), ("bf16", torch.bfloat16), ("fp32", torch.float32)]
)
def test_nearest_scales_are_torchs_own_cast_below_the_maximum(format, dtype, generator):
    values = scale_values(format, generator).clamp(max=SCALES[format].max)
    assert torch.equal(round_scale(values, BlockScale(format=format)), values.to(dtype).float())


def test_powers_of_two_round_to_torchs_own_codes_and_to_either_side(generator):
    values = scale_values("e8m0", generator).clamp(
        min=2.0**-126, max=2.0**127
    )  # torch rounds subnormals up, even near 2^-127
    tie = values.frexp().mantissa == 0.75  # torch takes every tie up, here the even code decides
    mine = round_scale(values, BlockScale(format="e8m0"))
    assert torch.equal(mine[~tie], values.to(torch.float8_e8m0fnu).float()[~tie])
    for code in (0, 1, 127, 254):
        y = torch.tensor([2.0 ** (code - 127)])
        for rounding in ("nearest", "floor", "ceil"):
            stored = round_scale(y, BlockScale(format="e8m0", rounding=rounding)).to(torch.float8_e8m0fnu)
            assert stored.view(torch.uint8).item() == code


def test_scales_outside_e8m0_become_its_smallest_and_its_largest():
    values = torch.tensor([0.0, 2.0**-149, 2.0**-128, 2.0**127 * 1.5, FLT_MAX])
    for rounding in ("nearest", "floor", "ceil"):
        mine = round_scale(values, BlockScale(format="e8m0", rounding=rounding)).tolist()
        assert mine == [2.0**-127, 2.0**-127, 2.0**-127, 2.0**127, 2.0**127]


@pytest.mark.parametrize("format", ENUMERATED)
def test_stochastic_scales_keep_their_value_on_average(format):
    points = grids.named(format)
    low, high = points[len(points) // 2], points[len(points) // 2 + 1]
    for fraction in (0.0, 0.25, 1 / 3, 0.9):
        y = np.float32(low + fraction * (high - low))
        bits = torch.arange(
            0, 2**24, 2**12
        ).float()  # every 4,096th of the draws: the mean is exact to 1 / 4,096 of a step
        rounded = round_scale(
            torch.full_like(bits, float(y)), BlockScale(format=format, rounding="stochastic"), bits
        )
        assert rounded.double().mean().item() == pytest.approx(float(y), abs=(high - low) / 4096)


def test_ocps_floor_rule_and_the_ceil_rule_are_powers_of_two_around_the_maximum(generator):
    largest = torch.cat(
        (
            torch.tensor([1.0, 3.0, 4.0, 6.0, 7.9, 8.0, 12.0]),
            2.0 ** torch.empty(500).uniform_(-90, 90, generator=generator),
        )
    )
    one = torch.ones(())
    floor = Quant(
        block="1x32", scale=BlockScale(format="e8m0", rounding="floor"), range=Range(map_to=4.0), outer=None
    )
    ceil = floor.model_copy(update={"scale": BlockScale(format="e8m0", rounding="ceil"), "range": Range()})
    # OCP MX 1.0, section 6.3: 2^(floor(log2 amax) - 2); the other 2^ceil(log2(amax / 6)), as Transformer Engine and TetraJet have it.
    exponents = np.floor(np.log2(largest.double().numpy())) - 2
    np.testing.assert_array_equal(block_scales(largest, one, floor).double().numpy(), 2.0**exponents)
    exponents = np.ceil(np.log2(largest.double().numpy() / 6))
    np.testing.assert_array_equal(block_scales(largest, one, ceil).double().numpy(), 2.0**exponents)


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


@pytest.mark.parametrize(
    ("amax", "scale"), [(0.0, 1.0), (math.inf, 1.0), (2688.0, 1.0), (1e-38, FLT_MAX), (3e38, 2688 / 3e38)]
)
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


@every(p=[0.001, 0.07, 0.25, 0.5, 0.9, 0.99, 0.999, 1.0], shape=[(16, 16), (10, 10), (7, 33), (1, 1)])
def test_a_percentile_is_the_order_statistic_ceil_p_n(p, shape, generator):
    x = torch.randn(shape, generator=generator)
    ordered = np.sort(np.abs(x.numpy()).ravel())
    mine = statistic(x, statistic=f"percentile:{p}")
    assert (
        mine.item() == ordered[math.ceil(Decimal(str(p)) * x.numel()) - 1]
    )  # as written: in binary 0.07 * 100 is above 7
    rows = statistic(x, statistic=f"percentile:{p}", granularity="row").flatten().numpy()
    ordered = np.sort(np.abs(x.numpy()), axis=1)
    np.testing.assert_array_equal(rows, ordered[:, math.ceil(Decimal(str(p)) * shape[1]) - 1])


def test_the_ranks_of_bf16_are_those_of_a_sort_with_nan_above_infinity(generator):
    x = torch.randn(8, 32, generator=generator).bfloat16()
    x[0, :5] = torch.tensor([math.nan, math.inf, -math.nan, -math.inf, -0.0])
    ordered = x.flatten().abs().float().sort().values  # NaN last
    for rank in (1, 2, 100, 252, 253, 254, 255, 256):
        assert torch.equal(order_statistic(x, rank).nan_to_num(-1), ordered[rank - 1].nan_to_num(-1)), rank


def test_a_histogram_without_a_wait_counts_as_bincount_does(generator):
    magnitudes = torch.randint(0, 2**15, (4096,), generator=generator, dtype=torch.int16)
    magnitudes[:1000], magnitudes[1000:1100] = 0, 2**15 - 1
    assert torch.equal(histogram(magnitudes, 2**15), torch.bincount(magnitudes, minlength=2**15))


def test_the_percentile_one_is_the_amax(generator):
    x = torch.randn(48, 64, generator=generator)
    for granularity in ("tensor", "row"):
        a, b = (
            quantize(x, Quant(outer=Outer(statistic=word, granularity=granularity)))
            for word in ("amax", "percentile:1.0")
        )
        assert torch.equal(a.values, b.values)
        assert torch.equal(a.amax, b.amax)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a_percentile_of_half_precision_is_that_of_the_same_numbers_in_fp32(dtype, generator):
    x = torch.randn(16, 64, generator=generator).to(dtype)
    assert statistic(x, statistic="percentile:0.7") == statistic(x.float(), statistic="percentile:0.7")


def test_a_percentile_ignores_the_zeros_of_padding():
    x = torch.arange(1.0, 18.0).reshape(1, 17)
    assert quantize(x, Quant(outer=Outer(statistic="percentile:0.01"))).amax == 1.0


@pytest.mark.parametrize("name", STATISTICS)
class TestStatistics:
    """Promises of every outer statistic; a new entry needs a spelling in SPELLINGS."""

    def test_it_is_an_fp32_scalar_of_the_tensor_or_given(self, name, generator):
        x = torch.randn(8, 16, generator=generator)
        mine = statistic(x, statistic=SPELLINGS[name], history=History(), clock=Clock(0))
        assert mine.ndim == 0
        assert mine.dtype == torch.float32
        assert mine in x.abs() or (name == "static" and mine == 2.5)

    def test_it_is_zero_for_an_empty_tensor_and_remembers_nothing_of_it(self, name):
        history = History()
        for shape in ((0, 16), (4, 0), (0, 0)):
            assert (
                statistic(torch.empty(shape), statistic=SPELLINGS[name], history=history, clock=Clock(0)) == 0
            )
        assert not history.amax

    def test_it_needs_no_history_for_a_first_look(self, name, generator):
        x = torch.randn(8, 16, generator=generator)
        first = statistic(x, statistic=SPELLINGS[name], history=History(), clock=Clock(0))
        assert torch.equal(statistic(x, statistic=SPELLINGS[name]), first)

    def test_scaling_the_input_by_a_power_of_two_scales_it_unless_it_is_given(self, name, generator):
        x = torch.randn(8, 16, generator=generator)
        one, four = (statistic(factor * x, statistic=SPELLINGS[name]) for factor in (1, 4))
        assert four == (one if name == "static" else 4 * one)

    def test_it_enters_encode_decode_and_alpha_alike(self, name, generator):
        x = torch.randn(8, 16, generator=generator)
        quant = Quant(outer=Outer(statistic=SPELLINGS[name]))
        result = quantize(x, quant, history=History(), clock=Clock(0), keep=True)
        scale = encode_scale(result.amax, quant)
        block = block_scales(block_amax(tiles_of(x)), scale, quant)
        assert torch.equal(result.amax, statistic(x, statistic=SPELLINGS[name]))
        assert torch.equal(result.block_scale, block)
        assert torch.equal(result.scaled, (tiles_of(x) * element_scales(block, scale)).view(8, 16))


@every(columns=[8, 16, 32, 64, 128], shape=[(3, 128), (4, 384), (2, 200), (5, 8), (1, 129)])
def test_an_outer_scale_per_128_is_the_amax_of_128_along_the_contraction(shape, columns, generator):
    x = torch.randn(shape, generator=generator)
    mine = statistic(x, columns, granularity="block:128")
    for row, block in itertools.product(range(shape[0]), range(-(-shape[1] // columns))):
        group = block * columns // 128
        assert mine[row, 0, block, 0] == x[row, 128 * group : 128 * (group + 1)].abs().max()


def test_an_outer_scale_per_row_is_the_amax_of_the_row(generator):
    x = torch.randn(6, 40, generator=generator)
    assert torch.equal(statistic(x, granularity="row"), x.abs().amax(1).view(6, 1, 1, 1))


EXPECTED = {
    "amax": lambda block: np.abs(block).max(),
    "rms": lambda block: np.sqrt((block**2).mean()),
    "std": lambda block: block.std(),
}
BLOCK_SPELLINGS = {"amax": ("amax", 1.0), "rms": ("rms:2.5", 2.5), "std": ("std:2.92247856", 2.92247856)}


@pytest.mark.parametrize("tile", [(1, 16), (1, 32), (16, 16)])
@pytest.mark.parametrize("name", BLOCK_STATISTICS)
class TestBlockStatistics:
    """Promises of every block statistic; a new entry needs a line in EXPECTED and BLOCK_SPELLINGS."""

    def test_it_is_what_numpy_says_times_its_factor(self, name, tile, generator):
        word, factor = BLOCK_SPELLINGS[name]
        x = torch.randn(32, 64, generator=generator) + 0.5
        tiles = tiles_of(x, *tile)
        mine = block_statistic(tiles, block_amax(tiles), word)
        rows, columns = tile
        for i, j in itertools.product(range(32 // rows), range(64 // columns)):
            block = x[i * rows : (i + 1) * rows, j * columns : (j + 1) * columns].double().numpy()
            # fp32 sums of up to 256 terms: some 1e-6.
            assert mine[i, 0, j, 0].item() == pytest.approx(factor * EXPECTED[name](block), rel=3e-6)

    def test_it_is_never_negative_and_zero_for_zeros(self, name, tile):
        tiles = tiles_of(torch.zeros(16, 32), *tile)
        assert block_statistic(tiles, block_amax(tiles), BLOCK_SPELLINGS[name][0]).eq(0).all()

    def test_elements_beyond_it_saturate_and_the_rest_does_not(self, name, tile, generator):
        x = torch.randn(32, 64, generator=generator)
        block = f"{tile[0]}x{tile[1]}"
        quant = Quant(
            block=block, range=Range(statistic=BLOCK_SPELLINGS[name][0]), scale=BlockScale(format="fp32")
        )
        result = quantize(x, quant, keep=True)
        limit = block_statistic(tiles_of(x, *tile), result.block_amax, quant.range.statistic)
        beyond = (tiles_of(x, *tile).abs() > limit * (1 + 1e-6)).view(32, 64)
        assert result.codes[beyond].abs().eq(6).all()
        assert result.scaled[~beyond].abs().max() <= 6 * (1 + 1e-6)


def test_a_smallest_normal_amax_and_one_below_it_decode_to_about_the_input():
    for power in (-126, -130, -140):
        x = torch.zeros(2, 32)
        x[0, 0], x[1, 20] = 2.0**power, -(2.0**power)
        result = quantize(x, Quant())
        assert result.amax == 2.0**power
        # S saturates at FLT_MAX, so that the block scale is below 448: a subnormal amax loses what its scale cannot say.
        assert result.dequantize().isfinite().all()
        assert result.dequantize()[x == 0].eq(0).all()
        assert result.dequantize()[0, 0] == pytest.approx(2.0**power, rel=0.07 if power > -140 else 1)
        powers = quantize(
            x, Quant(block="1x32", scale=BlockScale(format="e8m0", rounding="ceil"), outer=None)
        )
        assert powers.block_scale.min() == 2.0**-127
        assert powers.dequantize().isfinite().all()


@pytest.mark.parametrize("word", ["rms:2.5", "std:2.92"])
def test_a_statistic_scales_with_its_block_by_powers_of_two(word, generator):
    """Squares leave fp32's range below 2^-75 and above 2^64; the statistic does not."""
    x = torch.randn(32, 64, generator=generator) + 0.5
    for tile in ((1, 32), (16, 16)):
        tiles = tiles_of(x, *tile)
        plain = block_statistic(tiles, block_amax(tiles), word)
        for power in (-110, -80, -60, -49, 0, 49, 60, 80, 110):
            scaled = tiles * 2.0**power
            assert torch.equal(block_statistic(scaled, block_amax(scaled), word), plain * 2.0**power)


@pytest.mark.parametrize("word", ["rms:2.5", "std:2.92"])
@pytest.mark.parametrize("power", [-120, -100, -80, -40, 0, 40, 80, 100])
def test_compiled_statistics_are_the_references_at_any_magnitude(word, power, generator):
    if not builds.build():
        pytest.skip("there are no compiled quantisers")
    x = torch.randn(33, 96, generator=generator) * 2.0**power
    x[0, :32], x[1, 5] = 0, 2.0 ** (power + 20)
    quant = Quant(
        block="1x32",
        scale=BlockScale(format="e8m0", rounding="floor"),
        outer=None,
        range=Range(statistic=word),
    )
    names = [name for name in ("portable", "x86_64_v3", "x86_64_v4") if builds.path(name).exists()]
    ranks = ["portable", "x86_64_v3", "x86_64_v4"]
    with builds.using(None):
        wanted = quantize(x, quant)
    # The sum's power of two alone may leave the format: the values are those of the block without it.
    assert wanted.values[2:].count_nonzero() > 0.8 * wanted.values[2:].numel()
    for name in names:
        if ranks.index(name) <= ranks.index(builds.level()):
            with builds.using(builds.load(builds.path(name))):
                made = quantize(x, quant)
            assert torch.equal(made.values, wanted.values), name
            assert torch.equal(made.block_scale, wanted.block_scale), name


@pytest.mark.parametrize("name", ["block_rms", "block_std"])
@pytest.mark.parametrize("tile", [16, 32])
def test_a_square_tile_and_its_transpose_have_one_statistic(name, tile, generator):
    statistic = BLOCK_STATISTICS[name.removeprefix("block_")]
    x = torch.randn(128, 256, generator=generator)
    ours, its = statistic(tiles_of(x, tile, tile)), statistic(tiles_of(x.t().contiguous(), tile, tile))
    assert torch.equal(ours.squeeze(), its.squeeze().t())


@pytest.mark.parametrize("magnitude", [1e-35, 1e-37, 1e-40])
def test_headroom_makes_no_scale_of_tiny_blocks_infinite(magnitude):
    x = torch.zeros(2, 32)
    x[0, :16] = magnitude
    result = quantize(x, Quant(range=Range(map_to=1.0, headroom=1.0625)))
    assert result.block_scale.isfinite().all()
    assert result.dequantize().isfinite().all()
    assert result.dequantize()[0, :16].max() == pytest.approx(magnitude, rel=0.3 if magnitude > 1e-39 else 1)
