"""Promises of every quantised operand, one case for every entry of every registry: a new entry is tried without a change here."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import grids
from pydantic import ValidationError
from support.cases import every

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.history import History
from ablate.numerics.philox import STREAMS, Clock
from ablate.numerics.quantize import pad, quantize
from ablate.numerics.rounding import ROUNDINGS, SCALE_ROUNDINGS, nearest
from ablate.numerics.select import CANDIDATES, CRITERIA, INT_STEP
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Range, Select

EXAMPLES = settings(max_examples=8, deadline=None, derandomize=True)
SEEDS = st.integers(0, 2**31)
FEW = range(8)
"""Seeds of tensors for promises about any tensor of one shape."""
TURN = Hadamard(size=128, signs="per_call")
ROOM = Range(headroom=17 / 16)


def _cases() -> dict[str, Quant]:
    cases = {
        f"{element} {rounding}": Quant(element=element, rounding=rounding)
        for element in ELEMENTS
        for rounding in ROUNDINGS
    }
    for format, rounding in itertools.product(SCALES, SCALE_ROUNDINGS):
        try:
            scale = BlockScale(format=format, rounding=rounding)
        except ValidationError:
            continue
        outer = None if format in ("e8m0", "bf16", "fp32") else Outer()
        cases[f"scale {format} {rounding}"] = Quant(block="1x32", scale=scale, outer=outer)
    cases |= {f"scale {zero}": Quant(scale=BlockScale(zero=zero)) for zero in ("one", "min_normal")}
    cases |= {
        f"block {block}": Quant(block=block)
        for block in ("1x8", "1x16", "1x32", "1x64", "1x128", "16x16", "32x32")
    }
    for among, criterion in itertools.product(CANDIDATES, CRITERIA):
        cases[f"select {among} {criterion}"] = Quant(
            select=Select(among=among, criterion=criterion), outer=Outer(bound=256.0)
        )
    words = ("percentile:0.9", "delayed:4", "hold:4", "static:8")
    cases |= {word: Quant(outer=Outer(statistic=word)) for word in words}
    cases |= {word: Quant(range=Range(statistic=word)) for word in ("rms:2.5", "std:2.92")}
    cases |= {
        f"outer {granularity}": Quant(outer=Outer(granularity=granularity))
        for granularity in ("row", "rows:16", "block:128")
    }
    cases |= {f"{bits} bits": Quant(rounding="stochastic", bits=bits, range=ROOM) for bits in (8, 16, 24)}
    cases["16x16 stochastic"] = Quant(block="16x16", rounding="stochastic")
    cases["map to 4"] = Quant(range=Range(map_to=4.0))
    cases["mxfp4"] = Quant(
        block="1x32", scale=BlockScale(format="e8m0", rounding="floor"), range=Range(map_to=4.0), outer=None
    )
    cases["prescaled"] = cases["mxfp4"].model_copy(
        update={"range": Range(map_to=4.0, prescale=0.75), "rounding": "stochastic"}
    )
    cases["fp8 per tensor"] = Quant(element="e4m3", block=None, scale=None, outer=Outer(bound=1.0))
    cases["fp8 per row"] = Quant(
        element="e5m2", block=None, scale=None, outer=Outer(bound=1.0, granularity="row")
    )
    cases["fp8 per 128"] = Quant(
        element="e4m3", block=None, scale=None, outer=Outer(bound=1.0, granularity="block:128")
    )
    cases["ms_eden"] = Quant(
        rounding="ms_eden", outer=Outer(bound=256.0), range=Range(headroom=17 / 16 * 0.93)
    )
    return cases


CASES = _cases()
DRAWING = [name for name, quant in CASES.items() if quant.draws]
TWO_DIMENSIONAL = [
    *(Quant(element=element, block="16x16") for element in ELEMENTS),
    *(
        Quant(block="32x32", scale=BlockScale(format=format), outer=None if format == "e8m0" else Outer())
        for format in SCALES
    ),
    *(Quant(block="16x16", select=Select(among=among, criterion="absmax")) for among in CANDIDATES),
    Quant(block="16x16", range=Range(headroom=17 / 16), outer=Outer(statistic="percentile:0.9")),
]
every_case = every(name=CASES)
every_case_apart = pytest.mark.parametrize("name", CASES)
"""One id a case, which Hypothesis draws other examples for."""
every_drawing_case = every(name=DRAWING)


def tensor(seed: int, rows: int = 32, columns: int = 128) -> torch.Tensor:
    """Gaussian, with rows at different scales."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(rows, columns, generator=g) * 2.0 ** torch.randint(-3, 4, (rows, 1), generator=g)


def quantized(x: torch.Tensor, name: str, clock: Clock | None = None, where: int = 3, **options):
    rotation = TURN if CASES[name].rounding == "ms_eden" else None
    return quantize(
        x, CASES[name], rotation=rotation, clock=clock or Clock(1), where=where, product=4, **options
    )


def same(a, b) -> bool:
    amaxes = a.amax is b.amax is None or torch.equal(a.amax, b.amax)
    return amaxes and torch.equal(a.values, b.values) and torch.equal(a.dequantize(), b.dequantize())


def per_element(block_scale: torch.Tensor, quant: Quant) -> torch.Tensor:
    rows, columns = quant.tile
    return block_scale[:, 0, :, 0].repeat_interleave(rows, 0).repeat_interleave(columns, 1)


@every(name=CASES, seed=FEW)
def test_a_code_is_one_of_the_two_neighbours_of_the_scaled_element(name, seed):
    result, quant = quantized(tensor(seed), name, keep=True), CASES[name]
    grid = grids.named(quant.element)
    codes, scaled = result.codes.double().numpy(), result.scaled.double().numpy()
    low, high = grids.neighbours(scaled, grid)
    on_grid = (np.abs(codes) == low) | (np.abs(codes) == high)
    if quant.rounding != "stochastic":
        on_grid = codes == grids.nearest(scaled, grid)
    if quant.select and quant.select.among == "grids":
        integers = nearest(result.scaled / torch.tensor(INT_STEP), ELEMENTS["int4"]) * INT_STEP
        on_grid |= codes == integers.double().numpy()
    assert on_grid.all()
    assert ((codes == 0) | (np.sign(codes) == np.sign(scaled))).all()


@every(name=CASES, seed=FEW)
def test_values_are_codes_times_scales_exactly_in_their_dtype_and_decode_from_left_to_right(name, seed):
    result, quant = quantized(tensor(seed), name, keep=True), CASES[name]
    assert result.values.dtype == (torch.float32 if quant.wide else torch.bfloat16)
    if quant.outer and quant.outer.granularity == "block:128":
        return  # the outer scale is folded in: fp32, compared by figures
    scale = 1.0 if result.block_scale is None else per_element(result.block_scale, quant)
    assert torch.equal(result.values.float(), result.codes * scale)
    if not quant.wide:
        assert torch.equal(
            result.values.double(),
            result.codes.double() * (1.0 if result.block_scale is None else scale.double()),
        )
        amax = torch.ones(1) if result.amax is None else result.amax
        expected = result.codes * (scale * amax * (1 / torch.tensor(result.divisor)))
        assert torch.equal(result.dequantize(), expected)


SCALES_WITH_ITS_INPUT = [name for name in CASES if name != "static:8"]
"""A given statistic does not move with the tensor; every other case does, by powers of two."""


@every(name=SCALES_WITH_ITS_INPUT, seed__power=zip(FEW, (-60, -31, -8, -1, 1, 5, 28, 60), strict=True))
def test_scaling_by_a_power_of_two_commutes(name, seed, power):
    a, b = quantized(tensor(seed), name), quantized(tensor(seed) * 2.0**power, name)
    assert torch.equal(a.dequantize() * 2.0**power, b.dequantize())
    if CASES[name].outer and CASES[name].outer.granularity != "block:128":
        assert torch.equal(a.values, b.values)


@every(name=CASES, seed=FEW)
def test_negating_the_input_negates_the_values(name, seed):
    a, b = quantized(tensor(seed), name), quantized(-tensor(seed), name)
    assert torch.equal(-a.values, b.values)


@every_case_apart
@EXAMPLES
@given(rows=st.integers(1, 40), columns=st.integers(1, 140), seed=SEEDS)
def test_any_shape_equals_the_zero_padded_one(name, rows, columns, seed):
    if name == "percentile:0.9":
        return  # of n elements, and padding by hand makes n larger: the tensor's own padding is not counted (test_scaling)
    x = tensor(seed, rows, columns).bfloat16()
    small = quantized(x, name)
    width = small.values.shape[1]
    large = quantized(pad(pad(x, 32, 1), 1, width), name)
    assert width - columns < 128
    assert torch.equal(small.values, large.values[:rows])
    assert torch.equal(small.dequantize(), large.dequantize()[:rows])
    assert large.values[rows:].eq(0).all()


@every_case
def test_whatever_the_strides_and_the_dtype_the_same_numbers_give_the_same_bits(name):
    x = tensor(3).bfloat16().float()
    assert same(quantized(x, name), quantized(x.t().contiguous().t(), name))
    assert same(quantized(x, name), quantized(torch.stack((x, -x), 2)[:, :, 0], name))
    assert same(quantized(x, name), quantized(x[:, :64].repeat(1, 2).copy_(x), name))
    if name == "ms_eden":
        return  # the rotation is rounded to the input's dtype
    assert same(quantized(x, name), quantized(x.bfloat16(), name))
    half = tensor(3).half()
    assert same(quantized(half, name), quantized(half.float(), name))


@every_case
def test_the_input_stays_and_keeping_what_was_rounded_changes_no_bit(name):
    x = tensor(4)
    before = x.clone()
    plain, kept = quantized(x, name), quantized(x, name, keep=True)
    assert torch.equal(x, before)
    assert same(plain, kept)
    assert plain.source is plain.scaled is plain.codes is plain.block_amax is None
    if name != "ms_eden":
        assert torch.equal(kept.source, x)
    assert kept.largest == kept.source.abs().max()


@every_case
def test_zeros_stay_zeros_and_an_empty_tensor_stays_empty(name):
    zeros = quantized(torch.zeros(5, 40), name)
    assert zeros.values.eq(0).all()
    assert zeros.dequantize().eq(0).all()
    assert zeros.largest == 0
    for shape in ((0, 40), (5, 0), (0, 0)):
        empty = quantized(torch.empty(shape), name, history=History())
        assert empty.values.numel() == 0
        assert empty.dequantize().shape == empty.values.shape
        assert empty.largest == 0


@every(name=CASES, bad=[math.nan, math.inf, -math.inf])
def test_a_nan_or_an_infinity_shows_in_the_largest_magnitude(name, bad):
    x = tensor(5)
    x[3, 70] = bad
    assert not quantized(x, name).largest.isfinite()
    assert not quantized(x.bfloat16(), name, keep=True).largest.isfinite()


@every(name=CASES, power=[-149, -140, -127, -126, -100, 0, 100])
def test_tiny_and_huge_tensors_give_finite_values_about_as_large_as_their_input(name, power):
    x = (tensor(6) / 64).clamp(-1, 1) * 2.0**power
    result = quantized(x, name)
    assert result.values.isfinite().all()
    # Upward at most by half a step of E3M0, the coarsest grid, times a scale rounded up; E8M0's smallest scale is 2^-127.
    assert (result.dequantize().abs() <= 2 * result.largest + 16 * 2.0**-127).all()
    if power == 100 and name != "static:8":
        assert result.dequantize().abs().max() >= result.largest / 4


def test_beyond_the_largest_fp32_over_448_decoding_overflows_to_infinity_as_transformer_engines_does():
    # (s * amax) comes first, left to right (docs/reference/numerics.md, section 3): an infinity, not a wrong number. The values stay finite.
    x = torch.full((1, 16), 1e36)
    result = quantize(x, Quant())
    assert result.values.eq(6 * 448).all()
    assert result.dequantize().isinf().all()
    assert quantize(x / 2, Quant()).dequantize().isfinite().all()


# --- quantising again -----------------------------------------------------------------------------

NOT_AGAIN = {
    **dict.fromkeys(("rms:2.5", "std:2.92"), "what was clipped lowers the statistic"),
    **dict.fromkeys(
        ("e4m3 nearest", "e4m3 away"),
        "a block's largest code may be 416, and its scale is rounded to another the next time",
    ),
    **dict.fromkeys(
        ("e2m3 nearest", "e2m3 away"),
        "a block's largest code may be 7, and its scale is rounded to another the next time",
    ),
    **dict.fromkeys(
        ("scale e8m0 nearest", "scale e8m0 away"),
        "a power of two rounded down clips the block, whose maximum then asks for a smaller one",
    ),
    "scale ue5m3 ceil": "6 / amax in fp32 may lift the top block above the bound, to 480, and the outer scale with it",
    **dict.fromkeys(
        ("scale e4m3 floor", "scale ue5m3 floor"),
        "6 / amax in fp32 may lower the top block's scale by a step, rarely: with seed 100000, for example",
    ),
    **dict.fromkeys(
        ("scale e6m2 floor", "scale e6m2 ceil"),
        "6 / amax in fp32 may move a scale beside its grid point, and the next one is up to a quarter away",
    ),
    **{
        f"select search {criterion}": "the best scale of the top block moves the amax, and all other scales with it"
        for criterion in CRITERIA
    },
}
"""Cases that promise no Q(Q(x)) = Q(x), and why. What is drawn promises none either: a block's largest code may come down."""


@every(name=[name for name in CASES if name not in DRAWING and name not in NOT_AGAIN], seed=FEW)
def test_quantising_again_changes_nothing_beyond_fp32_rounding(name, seed):
    once = quantized(tensor(seed), name)
    assert (
        once.block_scale is None or once.block_scale.min() >= 2.0**-6
    )  # a subnormal scale says too little to come back
    x = once.dequantize() if name == "static:8" else once.values.float()
    twice = quantized(x, name)
    torch.testing.assert_close(twice.dequantize(), x, rtol=1e-6, atol=0)
    if (
        once.block_scale is not None
        and CASES[name].scale.format != "fp32"
        and (CASES[name].outer or Outer()).granularity != "block:128"
    ):
        assert torch.equal(twice.values, once.values)


@every(name=[*NOT_AGAIN, *DRAWING])
def test_where_quantising_again_may_change_values_it_does(name):
    if (name.startswith("scale") and name in DRAWING) or name == "ms_eden":
        return  # drawn scales may happen to come back; a rotated tensor is not what would be rotated again
    once = [quantized(tensor(seed), name).values.float() for seed in (*range(20), 91, 100_000)]
    assert any(not torch.allclose(quantized(x, name).dequantize(), x, rtol=1e-3, atol=0) for x in once)


# --- what is drawn --------------------------------------------------------------------------------

ELSEWHERE = {
    "seed": (Clock(2, step=5, micro_batch=1), 3),
    "step": (Clock(1, step=6, micro_batch=1), 3),
    "micro-batch": (Clock(1, step=5, micro_batch=2), 3),
    "stream": (Clock(1, "evaluation", 5, 1), 3),
    "site": (Clock(1, step=5, micro_batch=1), 4),
}


@every(name=DRAWING, changed=ELSEWHERE)
def test_seed_step_micro_batch_stream_and_site_each_change_what_is_drawn(name, changed):
    x = tensor(7)
    first = quantized(x, name, Clock(1, step=5, micro_batch=1))
    assert same(first, quantized(x, name, Clock(1, step=5, micro_batch=1)))
    assert not torch.equal(first.values, quantized(x, name, *ELSEWHERE[changed]).values)


@every(name=[name for name in CASES if name not in DRAWING])
def test_what_draws_nothing_needs_no_clock_and_ignores_one(name):
    x = tensor(8)
    assert same(quantize(x, CASES[name]), quantized(x, name, Clock(9, step=4), where=8))


@every_drawing_case
def test_what_draws_refuses_to_do_without_a_clock(name):
    with pytest.raises(ValueError, match="clock"):
        quantize(tensor(8), CASES[name], rotation=Hadamard(size=128))


@every_drawing_case
def test_recomputing_repeats_the_draw_whatever_happened_between(name):
    x, clock = tensor(9), Clock(1, step=5)
    first = quantized(x, name, clock)
    for stream in STREAMS:
        quantized(x, name, Clock(1, stream, step=5))
    torch.rand(7, generator=torch.Generator().manual_seed(0))
    assert clock == Clock(1, step=5)  # a draw moves nothing
    assert same(quantized(x, name, clock), first)


@every_case
def test_the_global_generator_is_neither_read_nor_advanced(name):
    before = torch.random.get_rng_state()
    quantized(tensor(8), name)
    assert torch.equal(torch.random.get_rng_state(), before)


@every(name=[*DRAWING, "e2m1 nearest", "select scales mse", "block 16x16", "percentile:0.9", "rms:2.5"])
def test_the_number_of_threads_changes_no_bit(name):
    x, before = tensor(10, 256, 512), torch.get_num_threads()
    try:
        results = []
        for threads in (1, 2, 5):
            torch.set_num_threads(threads)
            results.append(quantized(x, name))
    finally:
        torch.set_num_threads(before)
    assert same(results[0], results[1])
    assert same(results[0], results[2])


UNBIASED = {
    **{
        f"{element}, fp32 scales": Quant(
            element=element, rounding="stochastic", scale=BlockScale(format="fp32")
        )
        for element in ELEMENTS
    },
    "e2m1, headroom": Quant(rounding="stochastic", range=ROOM, outer=Outer(bound=400.0)),
    "e2m1, 24 bits": Quant(rounding="stochastic", range=ROOM, outer=Outer(bound=400.0), bits=24),
    "16x16 tiles": Quant(rounding="stochastic", block="16x16", range=ROOM, outer=Outer(bound=400.0)),
    "powers of two, up": Quant(
        rounding="stochastic", block="1x32", scale=BlockScale(format="e8m0", rounding="ceil"), outer=None
    ),
    "powers of two, down, three quarters": CASES["prescaled"],
    "stochastic scales": Quant(
        rounding="stochastic", scale=BlockScale(rounding="ceil"), outer=Outer(bound=256.0)
    ),
}
"""Stochastic rounding that nothing saturates: scales that are not rounded down, or have room."""


@every(name=UNBIASED)
def test_stochastic_rounding_is_unbiased_where_nothing_saturates(name):
    quant, x, draws_ = UNBIASED[name], tensor(11, 32, 64), 400
    kept = quantize(x, quant, clock=Clock(0), keep=True)
    assert (kept.scaled.abs() <= ELEMENTS[quant.element].max * (1 + 1e-6)).all()
    total = torch.zeros(x.shape, dtype=torch.float64)
    for step in range(draws_):
        total += quantize(x, quant, clock=Clock(0, step=step)).dequantize().double()
    unit = (
        per_element(kept.block_scale, quant).double()
        * (1.0 if kept.amax is None else kept.amax)
        / kept.divisor
    )  # a code of 1
    step = ELEMENTS[quant.element].step(kept.scaled.abs()).double()
    gap = (total / draws_ - x.double()).abs() / (unit * step)
    # A draw's standard deviation is at most half a step; 8 bits cut off at most 1/256 of one. 5 standard errors: once in 2e6.
    assert gap.max() <= 5 * 0.5 / draws_**0.5 + 1 / 256
    shrink = ((total / draws_ * x.sign()).sum() - x.double().abs().sum()) / (unit * step).sum()
    assert -1 / 256 - 1e-3 < shrink < 1e-3  # all elements together: only the truncation is left


# --- two dimensions -------------------------------------------------------------------------------


@pytest.mark.parametrize("quant", TWO_DIMENSIONAL, ids=range(len(TWO_DIMENSIONAL)))
@EXAMPLES
@given(rows=st.integers(1, 3), columns=st.integers(1, 3), seed=SEEDS)
def test_the_transposed_copy_of_a_2d_tensor_is_the_same_numbers(quant, rows, columns, seed):
    x = tensor(seed, 32 * rows, 32 * columns).bfloat16()
    row, column = quantize(x, quant), quantize(x.t(), quant)
    if quant.select is None:
        assert torch.equal(row.values.t(), column.values)
        assert torch.equal(row.dequantize().t(), column.dequantize())
        return
    # Four Over Six adds its errors along rows first, so that a tie to the last bit may be decided another way.
    assert (row.values.t() != column.values).double().mean() <= 1 / (4 * rows * columns)


# --- a target for the rounding --------------------------------------------------------------------


@pytest.mark.parametrize("prescale", [1.0, 0.75])
@pytest.mark.parametrize("block", ["1x16", "16x16", "1x32"])
def test_a_target_chooses_between_the_values_own_neighbours(block, prescale):
    x, quant = tensor(12), Quant(block=block, range=Range(prescale=prescale))
    moved = x + 0.3 * tensor(13)
    plain, same_, other = (quantize(x, quant, target=target, keep=True) for target in (None, x, moved))
    assert (plain.codes != same_.codes).double().mean() < 1e-3  # exact ties alone, which go up here
    assert torch.equal(plain.block_scale, other.block_scale)
    assert torch.equal(plain.amax, other.amax)
    assert (plain.codes != other.codes).double().mean() > 0.05
    step = ELEMENTS["e2m1"].step(other.scaled.abs())
    assert ((other.codes - other.scaled.clamp(-6, 6)).abs() <= step).all()


def test_a_target_is_rotated_with_its_operand():
    x, quant = tensor(14), Quant()
    turned = quantize(x, quant, rotation=Hadamard(size=16), target=x, keep=True)
    plain = quantize(x, quant, rotation=Hadamard(size=16), keep=True)
    assert (turned.codes != plain.codes).double().mean() < 1e-3
