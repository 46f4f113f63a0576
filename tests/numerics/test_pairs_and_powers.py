"""Candidates for any pair of values, and powers of two that are halved, against loops over blocks in numpy."""

import itertools
from random import Random

import numpy as np
import pytest
import torch
from oracles.two_level import powers_of_two, selected
from pydantic import ValidationError
from support.cases import every
from support.quantisers import contents

from ablate.numerics.choices import CRITERIA
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import BlockScale, Outer, Quant, Range, Select
from ablate.recipes import PRESETS

KINDS = ("normal", "wide range", "ties", "few values", "zero blocks", "one spike")
PAIRS = ((6.0, 4.0), (6.0, 12.0), (12.0, 6.0), (4.0, 6.0), (6.0, 5.0), (3.0, 24.0))


def matrices(rows: int, columns: int) -> list[torch.Tensor]:
    """One matrix of each kind, fp32 and bf16 in turn."""
    made = [contents(kind, rows, columns, Random(f"pairs {kind}")) for kind in KINDS]
    return [x.bfloat16() if number % 2 else x for number, x in enumerate(made)]


def both_ways(x: torch.Tensor, quant: Quant) -> list[Operand]:
    """Return the operand as training makes it (compiled), and as the reference does."""
    return [quantize(x, quant), quantize(x, quant, keep=True)]


def wrong(operand: Operand, values: np.ndarray, scales: np.ndarray) -> int:
    """Return how many values and scales differ."""
    ours = operand.values.double().numpy(), operand.block_scale[:, 0, :, 0].double().numpy()
    return sum(int((a != b).sum()) for a, b in zip(ours, (values, scales), strict=True))


# --- pairs ----------------------------------------------------------------------------------------


@every(pair=PAIRS, criterion=CRITERIA)
def test_each_block_has_the_candidate_that_a_loop_chooses(pair, criterion):
    compared = 0
    for x, bound in itertools.product(matrices(4, 48), (256.0, 448.0)):
        quant = Quant(
            select=Select(among="scales", criterion=criterion, map_to=pair), outer=Outer(bound=bound)
        )
        values, scales = selected(x.float().numpy(), pair, criterion, bound)
        for operand in both_ways(x, quant):
            assert wrong(operand, values, scales) == 0
            compared += values.size + scales.size
    print(f"{pair} {criterion}: {compared} numbers, none differs")


def test_the_loop_sees_another_pair():
    x = matrices(8, 64)[0]
    quant = Quant(select=Select(among="scales", map_to=(6.0, 12.0)), outer=Outer(bound=256.0))
    assert wrong(quantize(x, quant), *selected(x.numpy(), (6.0, 4.0), "mse", 256.0)) > 0


def test_mapping_to_12_saturates_the_largest_and_is_chosen_where_the_others_gain_more():
    """Check 1 beside fifteen 1/8, which 6 maps to 0.75, between two values; and 1 beside 1/6, which it maps to 1, where none gains."""
    x = torch.cat((torch.ones(2, 1), torch.tensor([[1 / 8], [1 / 6]]).expand(2, 15)), dim=1)
    quant = Quant(select=Select(among="scales", criterion="mae", map_to=(6.0, 12.0)), outer=None)
    chosen, plain = quantize(x, quant, keep=True), quantize(x, quant.model_copy(update={"select": None}))
    assert (chosen.block_scale < plain.block_scale).flatten().tolist() == [True, False]
    assert chosen.codes[0, 0] == chosen.codes[1, 0] == 6
    assert chosen.scaled[0, 0] > 11


@pytest.mark.parametrize("written", [[6, 12], [6.0, 12.0], (6, 12)])
def test_a_pair_may_be_written_as_a_list_of_whole_numbers(written):
    assert Select.model_validate({"among": "scales", "map_to": written}).map_to == (6.0, 12.0)


@pytest.mark.parametrize("pair", [(6.0,), (6.0, 4.0, 3.0), (0.0, 6.0), (6.0, 49.0), (6.0, "4"), 6.0])
def test_what_is_no_pair_of_values_is_refused(pair):
    with pytest.raises(ValidationError):
        Select.model_validate({"among": "scales", "map_to": pair})


# --- powers of two --------------------------------------------------------------------------------


@every(below=[None, 0.51, 0.87, 1.0], tile=["1x32", "32x32"], times=[6.0, 0.75])
def test_a_scale_is_the_power_of_two_above_the_amax_halved_below_a_limit(below, tile, times):
    compared, scale = 0, BlockScale(format="e8m0", rounding="ceil", halve_below=below)
    quant = Quant(block=tile, scale=scale, range=Range(map_to=1.0, prescale=times), outer=None)
    exact = torch.full((32, 32), 0.87)  # at the limit itself, and one ulp below it
    near = exact.where(torch.arange(32) > 0, torch.tensor(0.87).nextafter(torch.tensor(0.0)))
    powers = 2.0 ** torch.arange(-16, 16).repeat(32, 1).float()
    for x in (*matrices(64, 64), exact, near, powers, powers * 1e-30, torch.zeros(32, 32)):
        values, scales = powers_of_two(x.float().numpy(), quant.tile, below, times)
        for operand in both_ways(x, quant):
            assert wrong(operand, values, scales) == 0
            compared += values.size + scales.size
    print(f"{tile}, halved below {below}, times {times}: {compared} numbers, none differs")


@pytest.mark.parametrize("below", [0.5, 0.0, 1.01, -1.0])
def test_a_limit_without_effect_is_refused(below):
    with pytest.raises(ValidationError):
        BlockScale(format="e8m0", rounding="ceil", halve_below=below)


def test_mxfp4_v4_decodes_to_sixths_of_codes_times_scales():
    recipe = PRESETS["mxfp4_v4"]()
    assert recipe.fprop.w == recipe.dgrad.w
    for quant, below in ((recipe.fprop.x, None), (recipe.fprop.w, 0.87)):
        for x in matrices(64, 64):
            operand = quantize(x, quant)
            values, scales = powers_of_two(x.float().numpy(), quant.tile, below, 6.0)
            assert wrong(operand, values, scales) == 0
            assert operand.divisor == 6
            decoded = operand.dequantize().double().numpy()
            np.testing.assert_allclose(decoded, values / 6, rtol=2**-22)


def test_both_copies_of_a_weight_in_mxfp4_v4_are_the_same_numbers():
    quant, total = PRESETS["mxfp4_v4"]().fprop.w, 0
    for x in matrices(64, 96):
        forward, backward = quantize(x, quant), quantize(x.t(), quant)
        assert torch.equal(forward.values.t(), backward.values)
        total += x.numel()
    assert total == 6 * 64 * 96
