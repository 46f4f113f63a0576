"""The packed tensor: Transformer Engine's bytes, what they decode to, and the scale layout of the tensor cores."""

import dataclasses
import itertools
import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from oracles import te
from support.cases import every
from support.operands import KINDS, ROTATED, STORABLE, draw, same, tensor
from torch import Tensor

from ablate.numerics.philox import Clock, random_bits
from ablate.numerics.product import product
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Select, Transform
from ablate.numerics.stored import Packed, pack, store_one, swizzle, unpack, unswizzle

BLOCKS = ("1x16", "16x16")
SHAPES = [(32, 64), (1, 16), (1, 1), (16, 17), (40, 70), (130, 9), (0, 16), (4, 0), (0, 0)]


class Both(NamedTuple):
    """A tensor quantised along its columns, and its transpose, each with scales of its own."""

    row: Packed
    column: Packed


def both(x: Tensor, quant: Quant, *, rotation=None, clock=Clock(1, step=5), where=(7, 8)) -> Both:  # noqa: B008
    return Both(
        store_one(x, quant, clock=clock, where=where[0]),
        store_one(x.t(), quant, rotation=rotation, clock=clock, where=where[1]),
    )


def by_rows(packed: Packed) -> Tensor:
    """Scales for every row [rows, column tiles], as GEMMs take them."""
    return packed.scales.view(torch.uint8).repeat_interleave(packed.quant.tile[0], 0)[: packed.rows]


def nibbles(packed: Tensor) -> Tensor:
    """One code a column, the low nibble first."""
    return torch.stack((packed % 16, packed // 16), dim=2).flatten(1)


def bits(x: Tensor) -> Tensor:
    """fp32 as integers, in which -0 is not 0 and a NaN equals itself."""
    return x.contiguous().view(torch.int32)


# --- codes ----------------------------------------------------------------------------------------


def test_known_values_pack_to_known_bytes_with_the_even_column_low():
    values = torch.tensor([[0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]])
    packed = pack(values)
    assert packed.dtype == torch.uint8
    assert packed.tolist() == [[0x10, 0x32, 0x54, 0x76, 0x98, 0xBA, 0xDC, 0xFE]]


def test_every_byte_survives_unpacking_and_packing_and_means_what_it_means_to_transformer_engine():
    every = torch.arange(256, dtype=torch.uint8).view(16, 16)
    assert torch.equal(pack(unpack(every)), every)
    assert torch.equal(bits(unpack(every)), bits(te.reference().nvfp4.cast_from_fp4x2(every, torch.float32)))


def test_an_odd_number_of_columns_is_refused():
    with pytest.raises(ValueError, match="3 is odd"):
        pack(torch.zeros(2, 3))


# --- against Transformer Engine -------------------------------------------------------------------


def assert_equals_te(
    ours: Packed, codes: Tensor, scales: Tensor, amax: Tensor, x: Tensor | None = None
) -> None:
    """Every code, but for the sign of zero: TE's reference calls -0 code 0. Where `x` is not zero there is no exception."""
    __tracebackhide__ = True
    mine, theirs = nibbles(ours.codes), nibbles(codes)
    assert torch.equal(mine % 8, theirs % 8)
    differs = mine != theirs
    assert mine[differs].eq(8).all()
    if x is not None:
        assert x[differs].eq(0).all()
    assert torch.equal(by_rows(ours), scales.view(torch.uint8))
    assert torch.equal(bits(ours.amax.view(1)), bits(amax.view(1)))


@every(seed=range(3), dtype=["bf16", "fp32"], block=BLOCKS, kind=KINDS)
def test_both_copies_equal_transformer_engines_in_every_code_scale_and_amax(kind, block, dtype, seed):
    x = draw(kind, dtype, seed)
    theirs = te.quantizer(tuple(map(int, block.split("x")))).quantize(x)
    ours = both(x, Quant(block=block))
    assert_equals_te(ours.row, theirs.data, theirs.scale, theirs.global_amax_row, x)
    assert_equals_te(ours.column, theirs.data_t, theirs.scale_t, theirs.global_amax_col, x.t())


@every(seed=range(3), kind=ROTATED)
def test_the_rotated_column_wise_copy_equals_transformer_engines(kind, seed):
    x = draw(kind, "bf16", seed)
    theirs = te.quantizer((1, 16), rht=True).quantize(x)
    ours = both(x, Quant(), rotation=Hadamard())
    assert_equals_te(ours.row, theirs.data, theirs.scale, theirs.global_amax_row)
    assert_equals_te(ours.column, theirs.data_t, theirs.scale_t, theirs.global_amax_col)


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "tiny"])
def test_decoding_transformer_engines_bytes_gives_what_numpy_computes_from_left_to_right(kind):
    x = draw(kind, "fp32", 1)
    theirs, ours = te.quantizer().quantize(x), store_one(x, Quant())
    codes = te.values(theirs.data, torch.ones_like(theirs.scale, dtype=torch.float32)).numpy()
    scales = theirs.scale.float().repeat_interleave(16, 1).numpy()
    expected = codes * ((scales * np.float32(theirs.global_amax_row)) * (np.float32(1) / np.float32(2688)))
    np.testing.assert_array_equal(ours.dequantize().numpy(), expected)


def test_a_zero_block_scale_keeps_its_codes_and_decodes_to_zero_with_their_signs():
    x = torch.zeros(1, 32)
    x[0, 0], x[0, 16:21] = 1.0, torch.tensor([1e-9, -1e-9, 2.0**-130, -(2.0**-149), -0.0])
    row = store_one(x, Quant())
    assert row.scales.float().tolist() == [[448, 0]]
    # FLT_MAX times 2^-130 is just below 1/4 and rounds to 0; a negative zero, made or given, is code 8.
    assert nibbles(row.codes)[0, 16:21].tolist() == [7, 15, 0, 8, 8]
    assert bits(row.dequantize())[0, 16:21].tolist() == bits(torch.tensor([0, -0.0, 0, -0.0, -0.0])).tolist()


# --- both copies ----------------------------------------------------------------------------------


@every(rotation=[None, Hadamard(), Hadamard(size=64)], shape=SHAPES, quant=STORABLE.values())
def test_each_copy_holds_the_operand_that_quantize_returns_bit_for_bit(quant, shape, rotation):
    x = tensor(*shape)
    stored, clock = both(x, quant, rotation=rotation), Clock(1, step=5)
    expected = (
        quantize(x, quant, clock=clock, where=7),
        quantize(x.t(), quant, rotation=rotation, clock=clock, where=8),
    )
    for packed, operand in zip((stored.row, stored.column), expected, strict=True):
        assert packed.dequantize().shape == operand.values.shape
        ours = packed.operand()
        assert torch.equal(ours.values.view(torch.int16), operand.values.view(torch.int16))
        assert torch.equal(ours.block_scale, operand.block_scale)
        assert ours.amax == operand.amax
        if operand.values.numel():
            assert torch.equal(
                packed.dequantize(), operand.dequantize()
            )  # but for the sign of zero where the block scale is zero
            kept = (
                (operand.block_scale != 0)
                .expand(-1, quant.tile[0], -1, quant.tile[1])
                .flatten(2)
                .flatten(0, 1)[: packed.rows]
            )
            assert torch.equal(bits(packed.dequantize())[kept], bits(operand.dequantize())[kept])
    assert (stored.row.rows, stored.row.columns) == shape


@pytest.mark.parametrize("shape", [(32, 64), (1, 1), (40, 70), (17, 16)], ids=str)
def test_with_16x16_blocks_both_copies_share_their_tiles(shape):
    rows, columns = shape
    stored = both(tensor(rows, columns), Quant(block="16x16"))
    assert torch.equal(stored.row.scales.float(), stored.column.scales.float().t())
    assert torch.equal(nibbles(stored.row.codes)[:, :columns], nibbles(stored.column.codes)[:, :rows].t())


def test_stochastic_copies_repeat_with_the_clock_and_draw_independently():
    x, quant = tensor(64, 64), Quant(rounding="stochastic")
    first = both(x, quant)
    assert all(map(same, first, both(x, quant)))
    for other in ({"clock": Clock(1, step=6)}, {"clock": Clock(2, step=5)}, {"where": (9, 10)}):
        assert not same(first.row, both(x, quant, **other).row)
        assert not same(first.column, both(x, quant, **other).column)
    symmetric = torch.eye(64) + 0.3  # both copies see the same numbers, so that only the bits differ
    assert not torch.equal(both(symmetric, quant).row.codes, both(symmetric, quant).column.codes)


@pytest.mark.parametrize("width", [8, 16, 24])
def test_stochastic_codes_under_a_zero_scale_use_the_same_bits_as_every_other(width):
    x = torch.full((1, 48), 2.0**-130)  # times FLT_MAX, halfway between 0 and 1/2, less a little
    x[0, 0] = 1.0
    codes = nibbles(store_one(x, Quant(rounding="stochastic", bits=width), clock=Clock(3), where=4).codes)[
        0, 16:
    ]
    drawn = random_bits(Clock(3), 4, 1, 48, width, x.device)[0, 16:]
    position = 2.0**-130 * torch.finfo(torch.float32).max / 0.5
    assert codes.tolist() == (math.floor(position * 2**width) > drawn).int().tolist()
    assert set(codes.tolist()) == {0, 1}


def test_the_copies_multiply_as_their_operands_do():
    a, b, clock = tensor(40, 70), tensor(24, 70, seed=1), Clock(1)
    stored = store_one(a, Quant()).operand(), store_one(b, Quant(block="16x16")).operand()
    direct = quantize(a, Quant(), clock=clock), quantize(b, Quant(block="16x16"))
    assert torch.equal(product(*stored, torch.float32), product(*direct, torch.float32))


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_a_non_finite_input_shows_in_the_amax_and_in_what_is_decoded(bad):
    x = tensor()
    x[3, 5] = bad
    for packed in (both(x, Quant()).row, both(x, Quant()).column):
        assert not packed.amax.isfinite()
        assert not packed.dequantize().isfinite().any()


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
@pytest.mark.parametrize("statistic", ["percentile:0.5", "static:3.0"])
def test_a_non_finite_input_that_the_statistic_does_not_show_is_refused(bad, statistic):
    x, quant = tensor(), Quant(outer=Outer(statistic=statistic))
    assert store_one(x, quant)
    x[3, 5] = bad
    with pytest.raises(ValueError, match=f"x holds a NaN or an infinity, but {statistic} is finite"):
        store_one(x, quant)


def test_the_input_is_not_changed():
    x = tensor()
    before = x.clone()
    both(x, Quant(rounding="stochastic"), rotation=Hadamard())
    assert torch.equal(x, before)


# --- what is refused ------------------------------------------------------------------------------

FOREIGN = {
    "element int4": Quant(element="int4"),
    "scale e8m0": Quant(block="1x32", scale=BlockScale(format="e8m0"), outer=None),
    "scale ue5m3": Quant(scale=BlockScale(format="ue5m3")),
    "scale None": Quant(block=None, scale=None, outer=Outer(bound=1.0)),
    "outer None": Quant(outer=None),
    "outer row": Quant(outer=Outer(granularity="row")),
    "outer rows:16": Quant(outer=Outer(granularity="rows:16")),
    "outer block:128": Quant(outer=Outer(granularity="block:128")),
    "select among grids": Quant(select=Select(among="grids")),
    "transform mean": Quant(transform=Transform(mean=True)),
}


@pytest.mark.parametrize("what", FOREIGN)
def test_what_the_format_cannot_say_is_refused_in_one_sentence_that_names_it(what):
    with pytest.raises(ValueError, match=r"only NVFP4 can be stored: .* not ") as refusal:
        store_one(tensor(), FOREIGN[what])
    assert what in str(refusal.value)


def test_a_call_that_contradicts_itself_is_refused():
    with pytest.raises(ValueError, match="clock"):
        store_one(tensor(), Quant(rounding="stochastic"))
    with pytest.raises(ValueError, match="3 dimensions"):
        store_one(torch.zeros(2, 16, 16), Quant())
    with pytest.raises(TypeError, match="float64"):
        store_one(tensor().double(), Quant())


def test_parts_that_do_not_fit_each_other_are_refused():
    stored = both(tensor(), Quant())
    row = stored.row
    for wrong in (
        {"scales": row.scales[:, :1]},
        {"codes": row.codes[1:]},
        {"columns": 65},
        {"amax": row.amax.view(1)},
    ):
        with pytest.raises(ValueError, match="do not fit 1x16 tiles"):
            dataclasses.replace(row, **wrong)
    for wrong in ({"scales": row.scales.float()}, {"codes": row.codes.int()}, {"amax": row.amax.double()}):
        with pytest.raises(ValueError, match="must be uint8, float8_e4m3fn and float32"):
            dataclasses.replace(row, **wrong)


# --- bytes ----------------------------------------------------------------------------------------


def test_the_bytes_are_counted_by_hand():
    assert store_one(tensor(32, 64), Quant()).nbytes == 32 * 64 // 2 + 32 * 64 // 16 + 4
    assert store_one(tensor(32, 64), Quant(block="16x16")).nbytes == 1024 + 2 * 4 + 4
    assert store_one(tensor(3, 5), Quant()).nbytes == 3 * 8 + 3 + 4  # with padding


# --- the scale layout of the tensor cores ---------------------------------------------------------


def slow_swizzle(scales: np.ndarray) -> np.ndarray:
    """One scale at a time, by the formula of cuBLAS's documentation."""
    rows, columns = scales.shape
    tiles_across = -(-columns // 4)
    out = np.zeros(-(-rows // 128) * tiles_across * 512, dtype=np.uint8)
    for r, c in itertools.product(range(rows), range(columns)):
        tile = (r // 128) * tiles_across + c // 4
        out[tile * 512 + (r % 128 % 32) * 16 + (r % 128 // 32) * 4 + c % 4] = scales[r, c]
    return out


LAYOUTS = [(128, 4), (1, 1), (256, 8), (130, 9), (33, 5), (127, 4), (0, 4), (4, 0)]


@every(shape=LAYOUTS, dtype=[torch.uint8, torch.float8_e4m3fn])
def test_swizzling_equals_the_formula_applied_to_one_scale_at_a_time(shape, dtype):
    scales = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    flat = swizzle(scales.view(dtype))
    assert flat.dtype == dtype
    np.testing.assert_array_equal(flat.view(torch.uint8).numpy(), slow_swizzle(scales.numpy()))
    back = unswizzle(flat, *shape)
    assert back.dtype == dtype
    assert torch.equal(back.view(torch.uint8), scales)


@pytest.mark.parametrize("shape", [(128, 4), (256, 8), (130, 9), (33, 5)], ids=str)
def test_transformer_engine_reads_swizzled_scales_back(shape):
    rows, columns = shape
    scales = torch.randint(0, 256, shape, generator=torch.Generator().manual_seed(0), dtype=torch.uint8)
    recover = te.reference().nvfp4.NVFP4QuantizerRef._recover_swizzled_scales
    assert torch.equal(recover(True, swizzle(scales), rows, 16 * columns, 16), scales)


def test_known_scales_lie_at_known_places():
    scales = torch.arange(128).view(128, 1).expand(-1, 4).to(torch.uint8)
    flat = swizzle(scales)
    assert flat[:16].tolist() == [0] * 4 + [32] * 4 + [64] * 4 + [96] * 4
    assert flat[16:20].tolist() == [1] * 4


def test_wrong_scales_are_refused():
    with pytest.raises(TypeError, match="float32"):
        swizzle(torch.ones(128, 4))
    with pytest.raises(ValueError, match="130x9 scales take 3072 swizzled bytes"):
        unswizzle(torch.zeros(512, dtype=torch.uint8), 130, 9)


def test_one_copy_takes_what_quantize_takes():
    x, quant, rotation = tensor(), Quant(rounding="stochastic"), Hadamard(signs="per_step")
    clock = Clock(1, step=5)
    packed = store_one(x, quant, rotation=rotation, clock=clock, where=3, product=4)
    operand = quantize(x, quant, rotation=rotation, clock=clock, where=3, product=4)
    assert torch.equal(packed.operand().values, operand.values)
