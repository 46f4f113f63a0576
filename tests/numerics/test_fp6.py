"""Six-bit elements: MXFP6 against three public implementations, number by number."""

import itertools

import pytest
import torch
from oracles import grids

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import BlockScale, Quant
from ablate.recipes import PRESETS
from ablate.verification import peers

SIX_BITS = [name for name, element in ELEMENTS.items() if element.bits == 6]


@pytest.mark.parametrize("peer", ["torchao", "ml_dtypes"])
def test_no_number_differs_from_a_public_implementation(peer):
    """gfloat is compared in test_against_gfloat.py."""
    pytest.importorskip(peer)
    compared = [row for row in peers.PEERS[peer]() if any(name in row.what for name in SIX_BITS)]
    assert {name for name in SIX_BITS for row in compared if name in row.what} == set(SIX_BITS)
    assert [row for row in compared if not row.ok] == []


@pytest.mark.parametrize("name", SIX_BITS)
def test_a_preset_maps_a_blocks_power_of_two_to_the_largest_of_the_grid(name):
    quant = PRESETS[f"mxfp6_{name}"]().fprop.x
    assert quant.element == name
    for exponent, fraction in itertools.product((-20, 0, 13), (1.0, 1.5, 1.99)):
        x = torch.full((1, 32), fraction * 2.0**exponent)
        scale = quantize(x, quant).block_scale.item()
        assert scale == 2.0**exponent / max(p for p in 2.0 ** torch.arange(8) if p in grids.named(name))


def test_a_six_bit_code_times_an_e4m3_scale_is_exact_in_bf16():
    x = torch.randn(16, 64, generator=torch.Generator().manual_seed(6))
    for name in SIX_BITS:
        operand = quantize(x, Quant(element=name, scale=BlockScale(format="e4m3")), keep=True)
        exact = operand.codes.view(16, 4, 16).double() * operand.block_scale.view(16, 4, 1).double()
        assert operand.values.dtype == torch.bfloat16
        assert torch.equal(operand.values.double(), exact.view(16, 64))
