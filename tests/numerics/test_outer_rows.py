"""Outer scales of n consecutive rows: every element as a loop over tiles computes it, and outside the contraction of a product."""

from random import Random

import numpy as np
import pytest
import torch
from oracles.two_level import Quantised, nvfp4
from pydantic import ValidationError
from support.cases import every
from support.operands import tensor
from support.quantisers import contents, reference_only
from torch import nn

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.numerics.census import census
from ablate.numerics.partition import Partition
from ablate.numerics.philox import Clock
from ablate.numerics.product import alpha, product
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import Outer, Quant, Range, grain
from ablate.numerics.stored import store_one
from ablate.recipes.recipe import Dgrad, Fprop, Products

TILES = {"1x16": (1, 16), "1x32": (1, 32), "16x16": (16, 16), "32x32": (32, 32)}
CASES = [
    (block, rows)
    for block, (high, _) in TILES.items()
    for rows in ("row", 2, 3, 16, 48, 64, 1000, "tensor")
    if (rows == "tensor" or (rows != "row" or high == 1)) and (isinstance(rows, str) or rows % high == 0)
]
SHAPES = ((1, 16), (37, 48), (64, 40), (64, 64))


def quantiser(block: str, rows: int | str) -> Quant:
    granularity = rows if isinstance(rows, str) else f"rows:{rows}"
    return Quant(block=block, outer=Outer(granularity=granularity))


def matrices(seed: int) -> list[torch.Tensor]:
    """Rows whose magnitudes differ by powers of ten, ties, zero blocks, and magnitudes near the ends of fp32; bf16 and fp32."""
    kinds = ("wide range", "ties", "zero blocks", "few values", "normal")
    made = []
    for number, (rows, columns) in enumerate(SHAPES):
        random = Random(f"{seed} {number}")
        x = contents(kinds[number % len(kinds)], rows, columns, random)
        x = x * (10.0 ** torch.arange(rows).remainder(5)).unsqueeze(1)
        made += [x, (x * (1e-30 if number % 2 else 1)).bfloat16()]
    return made


def expected_of(x: torch.Tensor, block: str, rows: int | str) -> Quantised:
    """Return what the oracle makes of a matrix."""
    return nvfp4(x.float().numpy(), TILES[block], {"row": 1, "tensor": None}.get(rows, rows))


def mismatches(operand: Operand, expected: Quantised) -> tuple[int, int]:
    """Return the numbers that were compared and those that differ."""
    width = expected.values.shape[1]
    ours = {
        "values": operand.values.float().numpy()[:, :width],
        "amax": np.broadcast_to(operand.amax.numpy().reshape(-1), len(expected.amax)),
        "scales": operand.block_scale[:, 0, :, 0].numpy()[:, : expected.scales.shape[1]],
        "decoded": operand.dequantize().numpy()[:, :width],
    }
    compared = {name: (array, getattr(expected, name)) for name, array in ours.items()}
    return sum(a.size for a, _ in compared.values()), sum(int((a != b).sum()) for a, b in compared.values())


@every(block__rows=CASES)
def test_every_number_is_that_of_a_loop_over_tiles(block, rows):
    quant, total = quantiser(block, rows), 0
    for x in matrices(1):
        expected = expected_of(x, block, rows)
        for operand in (quantize(x, quant), quantize(x, quant, keep=True)):  # compiled, and the reference
            count, wrong = mismatches(operand, expected)
            total += count
            assert wrong == 0
    print(f"{block} {rows}: {total} numbers, none differs")
    assert total > 40_000


def test_the_oracle_sees_an_outer_scale_of_other_rows():
    x = matrices(1)[4]
    assert mismatches(quantize(x, quantiser("1x16", 3)), expected_of(x, "1x16", 2))[1] > 0


def test_more_rows_than_there_are_give_one_scale_for_the_tensor():
    for x in matrices(2):
        one, other = quantize(x, quantiser("1x16", 10_000)), quantize(x, Quant())
        assert torch.equal(one.values, other.values)
        assert torch.equal(one.amax, other.amax.expand(len(x), 1))


@pytest.mark.parametrize("block", ["1x16", "16x16"])
def test_the_factor_of_a_product_is_constant_along_the_contraction(block):
    x, w = (tensor(64, 64, seed=seed) for seed in (3, 4))
    a, b = quantize(x, quantiser("1x16", 16)), quantize(w, quantiser(block, 32))
    assert a.values.dtype == b.values.dtype == torch.bfloat16
    assert alpha(a, b).shape == (len(x), len(w))
    exact = a.dequantize().double() @ b.dequantize().double().t()
    bound = a.dequantize().double().abs() @ b.dequantize().double().abs().t()
    assert ((product(a, b, torch.float32).double() - exact).abs() <= 80 * 2.0**-24 * bound).all()


@pytest.mark.parametrize("keep", [True, "source"])
def test_a_kept_operand_knows_the_input_of_its_rounding(keep):
    x = matrices(4)[6]
    for block, rows in (("1x16", 3), ("16x16", 16), ("16x16", 48)):
        operand = quantize(x, quantiser(block, rows), keep=keep)
        with reference_only():
            expected = quantize(x, quantiser(block, rows), keep=True).scaled
        assert torch.equal(operand.rescaled(), expected)


@pytest.mark.parametrize("prescale", [1.0, 0.75])
def test_outer_scales_of_128_elements_are_multiplied_in_the_order_of_the_specification(prescale):
    """An operand in fp32 holds code * s * (A * fp32(1 / (M * bound))): docs/reference/numerics.md, section 4."""
    x = tensor(4, 256, seed=0).bfloat16()
    quant = Quant(outer=Outer(granularity="block:128"), range=Range(map_to=4.0, prescale=prescale))
    made = quantize(x, quant, keep=True)
    scale = made.block_scale.view(4, 16).repeat_interleave(16, 1)
    amax = x.float().abs().view(4, 2, 128).amax(2).repeat_interleave(128, 1)
    assert torch.equal(made.values, (made.codes * scale) * (amax * torch.tensor(1 / (6 * 448.0))))
    assert torch.equal(made.dequantize(), made.values * torch.tensor(1 / prescale))
    from_left_to_right = made.codes * ((scale * amax) * torch.tensor(1 / (6 * 448.0 * prescale)))
    assert not torch.equal(made.dequantize(), from_left_to_right)


def test_a_weight_with_outer_scales_of_rows_is_not_transposed_from_the_cache():
    """The transpose has other rows: 16x16 blocks alone do not make the two copies of a weight equal."""
    linear = nn.Linear(32, 48, bias=False)
    linear.weight.data = tensor(48, 32, seed=5)
    layer = EmulatedLinear(linear, "blocks.0.linear", Clock(0), torch.bfloat16)
    quant = quantiser("16x16", 16)
    layer.products = Products(fprop=Fprop(x=Quant(), w=quant), dgrad=Dgrad(g=Quant(), w=quant))
    layer.casts.begin()
    forward, backward = (
        layer.weight_operand(slot, quant, None, linear.weight)[0] for slot in ("fprop.w", "dgrad.w")
    )
    expected = quantize(linear.weight.detach().bfloat16().t(), quant)
    assert torch.equal(backward.values, expected.values)
    assert torch.equal(backward.dequantize(), expected.dequantize())
    assert not torch.equal(forward.dequantize().t(), backward.dequantize())


# --- refused --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "word",
    ["rows:1", "rows:0", "rows:-2", "rows:1.5", "rows", "rows:", "row:2", "block:64", "block", "tensor:2"],
)
def test_a_granularity_without_meaning_or_with_another_spelling_is_refused(word):
    with pytest.raises(ValidationError):
        Outer(granularity=word)


def test_one_granularity_has_one_spelling():
    assert Outer(granularity="rows:016").granularity == "rows:16"
    assert Outer(granularity="block:0128") == Outer(granularity="block:128")


@pytest.mark.parametrize("statistic", ["percentile:0.9", "hold:4", "delayed:4", "static:1.0"])
def test_a_statistic_of_the_whole_tensor_is_refused_for_some_rows(statistic):
    with pytest.raises(ValidationError):
        Outer(granularity="rows:16", statistic=statistic)


@pytest.mark.parametrize(("block", "rows"), [("16x16", 8), ("16x16", 24), ("32x32", 16)])
def test_rows_that_cut_a_block_are_refused(block, rows):
    with pytest.raises(ValidationError):
        quantiser(block, rows)


def test_parts_of_a_matrix_hold_whole_groups_of_rows():
    quant = quantiser("16x16", 48)
    assert grain(quant, None, 0) == 48
    assert grain(quant, None, 1) == 16
    with pytest.raises(ValueError, match="no multiple of 48"):
        quantize(torch.ones(32, 32), quant, partition=Partition(0, 0, 2))


def test_a_packed_tensor_has_one_outer_scale():
    with pytest.raises(ValueError, match="one outer scale a tensor"):
        store_one(torch.ones(32, 32), quantiser("16x16", 16))


@every(block=["1x16", "16x16", "1x32", "32x32"], rows=[32, 64])
def test_a_census_of_groups_of_rows_is_that_of_each_group_alone(block, rows):
    x = torch.randn(128, 64, generator=torch.Generator().manual_seed(5)) * torch.logspace(-3, 3, 128)[:, None]
    whole = Quant(block=block, outer=Outer(granularity=f"rows:{rows}", bound=8.0), range=Range(headroom=1.5))
    alone = whole.model_copy(update={"outer": Outer(bound=8.0)})
    counts = ("scales_zero", "scales_saturated", "scales_clipped", "zeros", "saturated", "blocks_saturated")
    groups = [census(quantize(each.contiguous(), alone, keep="source")) for each in x.split(rows)]
    found = census(quantize(x, whole, keep="source"))
    assert {name: getattr(found, name) for name in counts} == {
        name: sum(getattr(group, name) for group in groups) for name in counts
    }
    assert found.scales_saturated > 0
