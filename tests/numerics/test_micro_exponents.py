"""Micro-exponents: HiF4's units of 64 elements, number by number, against loops that follow its definition."""

from random import Random

import numpy as np
import pytest
import torch
from oracles import grids
from oracles.three_level import three_level
from pydantic import ValidationError
from support.cases import every
from support.quantisers import contents

from ablate.numerics.census import census
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import BlockScale, Outer, Quant, Range, Select
from ablate.recipes import PRESETS
from ablate.training.operand_metrics import scale_clipped_frac

HIF4 = PRESETS["hif4"]().fprop.x
KINDS = ("normal", "wide range", "ties", "few values", "one magnitude", "zeros", "zero blocks", "one spike")
FACTORS = (1.0, 2.0**-60, 1e-38, 2.0**16, 1e30)
"""Beyond both ends of E6M2: below 2^-48 scales stay at the smallest, above 49152 at the largest."""


def with_lengths(*lengths: int) -> Quant:
    return HIF4.model_copy(update={"scale": BlockScale(format="e6m2", micro_exponents=lengths)})


def matrices(rows: int, columns: int, dtype: torch.dtype) -> list[torch.Tensor]:
    drawn = [contents(kind, rows, columns, Random(f"micro {kind}")) for kind in KINDS]
    return [(x * factor).to(dtype) for x in drawn for factor in FACTORS]


def wrong(operand: Operand, x: torch.Tensor, lengths: tuple[int, ...]) -> int:
    """Count the numbers of values, scales and codes that are not the oracle's."""
    padded = torch.nn.functional.pad(x.float(), (0, -x.shape[1] % 64)).numpy()
    values, scales, _ = three_level(padded, lengths)
    differ = (operand.values.double().numpy() != values).sum()
    differ += (np.signbit(operand.values.double().numpy()) != np.signbit(values)).sum()
    differ += (operand.block_scale[:, 0, :, 0].double().numpy() != scales).sum()
    if operand.codes is not None:
        codes = operand.codes.double().numpy() * np.repeat(scales, 64, axis=1)
        differ += (codes != values).sum()
    return int(differ)


@every(
    dtype=[torch.bfloat16, torch.float32],
    lengths=[(8, 4), (8,), (4,), (32, 4, 2), (16, 8, 4, 1)],
    keep=[False, True],
)
def test_every_number_is_the_oracles(lengths, keep, dtype):
    quant, compared = with_lengths(*lengths), 0
    for x in matrices(3, 128, dtype):
        assert wrong(quantize(x, quant, keep=keep), x, lengths) == 0
        compared += x.numel()
    assert compared == len(KINDS) * len(FACTORS) * 3 * 128


@every(columns=[1, 47, 64, 80, 200])
def test_a_part_of_a_unit_is_padded_with_zeros_and_a_transpose_is_read_by_its_rows(columns):
    for x in matrices(5, columns, torch.bfloat16)[::3]:
        assert wrong(quantize(x, HIF4), x, (8, 4)) == 0
        assert wrong(quantize(x.t().contiguous().t(), HIF4), x, (8, 4)) == 0


def test_a_unit_worked_out_by_hand():
    """The largest of 64 is 7, so the scale is 1; sub-blocks of 8 and of 4 that stay below 4 and 2 keep finer steps."""
    x = torch.zeros(1, 64)
    x[0, 0:4] = torch.tensor([7.0, -3.1, 0.6, 0.4])  # both exponents 1: multiples of 1
    x[0, 4:8] = torch.tensor([3.9, 1.75, -1.2, 0.26])  # the first alone: 3.9 / 2 < 2, multiples of 0.5
    x[0, 8:12] = torch.tensor([2.0, -1.9, 0.7, 0.2])  # the second alone: multiples of 0.5
    x[0, 12:16] = torch.tensor([1.99, 0.625, -0.1, 0.125])  # none: multiples of 0.25, at most 1.75
    wanted = torch.zeros(1, 64)
    wanted[0, 0:4] = torch.tensor([7.0, -3.0, 1.0, 0.0])
    wanted[0, 4:8] = torch.tensor([3.5, 2.0, -1.0, 0.5])
    wanted[0, 8:12] = torch.tensor([2.0, -2.0, 0.5, 0.0])
    wanted[0, 12:16] = torch.tensor([1.75, 0.75, 0.0, 0.25])
    operand = quantize(x, HIF4)
    assert operand.block_scale.item() == 1.0
    assert torch.equal(operand.values.float(), wanted)
    assert torch.equal(operand.dequantize(), wanted)


def test_the_reciprocals_of_scales_are_those_of_the_hardware():
    """1/1.25, 1/1.5 and 1/1.75 in bf16 have the mantissas 77, 43 and 18 (the authors' public reference)."""
    for mantissa, expected in ((1.25, 1 + 77 / 128), (1.5, 1 + 43 / 128), (1.75, 1 + 18 / 128)):
        x = torch.zeros(1, 64)
        x[0, 0], x[0, 8] = 7 * mantissa, 2.0**-9
        operand = quantize(x, HIF4, keep=True)
        assert operand.block_scale.item() == mantissa
        assert operand.scaled[0, 8].item() == expected / 2 * 2.0**-9


def test_gaussian_error_is_a_quarter_below_nvfp4s():
    """The paper reports about 24 % less squared error than NVFP4 on Gaussian data (arXiv 2602.11287)."""
    x = torch.randn(512, 4096, generator=torch.Generator().manual_seed(4)).bfloat16()
    errors = [
        (quantize(x, quant).dequantize() - x.float()).square().mean().item() for quant in (HIF4, Quant())
    ]
    assert errors[0] / errors[1] == pytest.approx(1 - 0.24, abs=0.02)


@every(lengths=[(8, 4), (8,), (32, 4, 2)])
def test_values_are_exact_in_bf16_and_products_take_bf16_operands(lengths):
    quant = with_lengths(*lengths)
    assert not quant.wide
    assert quant.top == 1.75 * 2 ** len(lengths)
    for x in matrices(2, 64, torch.float32):
        operand = quantize(x, quant)
        assert operand.values.dtype == torch.bfloat16
        assert torch.equal(operand.values.float(), operand.dequantize())


def test_rounding_to_a_target_that_is_the_tensor_itself_is_to_nearest():
    x = matrices(4, 128, torch.bfloat16)[0]
    assert torch.equal(quantize(x, HIF4, target=x).values, quantize(x, HIF4).values)
    assert not torch.equal(quantize(x, HIF4, target=2 * x).values, quantize(x, HIF4).values)


def test_stochastic_rounding_is_right_on_average_below_the_top():
    quant = HIF4.model_copy(update={"rounding": "stochastic", "bits": 24})
    x = torch.full((64, 64), 0.3)
    x[:, 0] = 7.0
    draws = [quantize(x, quant, clock=Clock(3, step=step), where=1).values.double() for step in range(16)]
    rest = torch.stack(draws)[:, :, 8:]  # sub-blocks without the 7: 0.25 or 0.5
    assert set(rest.unique().tolist()) == {0.25, 0.5}
    assert rest.mean().item() == pytest.approx(0.3, abs=4 * 0.25 * 0.4 / rest.numel() ** 0.5)


def test_telemetry_counts_what_saturates_on_the_elements_own_grid():
    x = torch.zeros(1, 64)
    x[0, 0], x[0, 1], x[0, 8] = 7.0, 0.4, 1.99
    seen = census(quantize(x, HIF4, keep="source"))
    assert (seen.saturated, seen.clipped, seen.zeros) == (1, 1, 1)
    assert seen.error == pytest.approx(0.4**2 + 0.24**2)


def test_a_scale_is_clipped_beyond_seven_times_the_largest():
    for largest, expected in ((3.4e5, 0.0), (1e6, 1.0)):
        operand = quantize(torch.full((1, 64), largest), HIF4, keep="source")
        assert scale_clipped_frac(operand, census(operand)) == expected


def test_a_scale_has_a_code_of_e6m2():
    scales = np.concatenate(
        [quantize(x, HIF4).block_scale.double().numpy().ravel() for x in matrices(4, 128, torch.bfloat16)]
    )
    assert np.isin(scales, grids.named("e6m2")).all()
    assert (scales.min(), scales.max()) == (2.0**-48, 49152.0)


MICRO = BlockScale(format="e6m2", micro_exponents=(8, 4))


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        ({"element": "e2m1"}, "element e1m2"),
        ({"block": "16x16"}, "blocks of one row"),
        ({"block": "1x8"}, "no sub-blocks of 8"),
        ({"outer": Outer(bound=1.0)}, "outer null"),
        ({"range": Range(headroom=1.5)}, "leave range out"),
        ({"element": "e2m1", "select": Select(among="scales"), "rounding": "nearest"}, "select"),
        ({"rounding": "ms_eden"}, "ms_eden"),
    ],
)
def test_what_has_no_micro_exponents_is_refused(fields, said):
    with pytest.raises(ValidationError, match=said):
        Quant(
            **{"element": "e1m2", "block": "1x64", "scale": MICRO, "outer": None, "rounding": "away"} | fields
        )


@pytest.mark.parametrize("lengths", [(), (4, 8), (8, 8), (8, 3), (0,), (8, -4), 8, (8.0,)])
def test_lengths_that_do_not_fall_by_whole_parts_are_refused(lengths):
    with pytest.raises(ValidationError):
        BlockScale(format="e6m2", micro_exponents=lengths)


def test_other_scale_formats_have_no_micro_exponents():
    with pytest.raises(ValidationError, match=r"scale\.format e6m2, not e4m3"):
        BlockScale(micro_exponents=(8, 4))


def test_lengths_are_written_as_a_list():
    assert BlockScale.model_validate({"format": "e6m2", "micro_exponents": [8, 4]}) == MICRO
    assert MICRO.canonical()["micro_exponents"] == [8, 4]


@every(element=["e1m2", "e2m1", "e4m3"], rounding=["nearest", "floor", "ceil"])
def test_e6m2_without_micro_exponents_is_a_block_scale_like_others(element, rounding):
    """The general order of operations, with the scale on E6M2's grid."""
    quant = Quant(
        element=element, block="1x32", scale=BlockScale(format="e6m2", rounding=rounding), outer=None
    )
    x = matrices(4, 64, torch.float32)[0]
    top = np.float32(1 / grids.named(element)[-1])
    largest = np.abs(x.numpy().reshape(4, 2, 32)).max(axis=2)
    exact = (largest * top).astype(np.float64)
    if rounding == "nearest":
        wanted = grids.nearest(exact, grids.named("e6m2"))
    else:
        sides = [grids.neighbours(value, grids.named("e6m2")) for value in exact.ravel()]
        wanted = np.array(sides)[:, int(rounding == "ceil")].reshape(exact.shape)
    np.testing.assert_array_equal(quantize(x, quant).block_scale[:, 0, :, 0].double().numpy(), wanted)
