"""Number formats, over the registries: every code, against tables written out, bit fields, and torch's own types."""

import math

import numpy as np
import pytest
import torch
from oracles import grids

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.spec import Quant
from ablate.recipes.recipe import Fprop


def codes_of(dtype: torch.dtype) -> np.ndarray:
    """Every finite non-negative value that one of torch's 8-bit types holds, ascending."""
    values = torch.arange(256, dtype=torch.uint8).view(dtype).to(torch.float32)
    values = values[values.isfinite() & (values >= 0)]
    return np.unique(values.double().numpy())


@pytest.mark.parametrize("name", ELEMENTS)
class TestElements:
    """Promises of every entry of ELEMENTS; its values stand in tests/oracles/grids.py."""

    def test_its_fields_enumerate_the_values_of_its_codes(self, name):
        element = ELEMENTS[name]
        np.testing.assert_array_equal(
            grids.magnitudes(element.mantissa, element.emin, element.max), grids.named(name)
        )

    def test_it_has_a_zero_and_its_largest_value_is_max(self, name):
        values = grids.named(name)
        assert values[0] == 0
        assert values[-1] == ELEMENTS[name].max

    def test_step_is_the_distance_to_the_next_code(self, name):
        values = grids.named(name)
        inside = (values[1:] + values[:-1]) / 2
        steps = np.diff(values)
        for y in (values[:-1], inside, np.nextafter(values[1:].astype(np.float32), np.float32(0))):
            for sign in (1, -1):
                np.testing.assert_array_equal(
                    ELEMENTS[name].step(torch.from_numpy(sign * y).float()).numpy(), steps
                )

    def test_its_bits_are_what_its_codes_and_a_sign_take(self, name):
        bits = 1 + math.ceil(math.log2(len(grids.named(name))))
        assert ELEMENTS[name].bits == bits
        assert Quant(element=name).four_bits == (bits == 4)
        assert Fprop(x=Quant(element=name), w=Quant()).fp4 == (bits == 4)

    def test_its_facts_are_those_of_its_values(self, name):
        values, element = grids.named(name), ELEMENTS[name]
        fractions = np.frexp(values[values > 0])[0]  # at most 8 bits: exact in fp64
        needed = next(bits for bits in range(1, 9) if (fractions * 2**bits % 1 == 0).all())
        assert element.significant == needed
        assert element.top_power == max(power for power in 2.0 ** np.arange(-20, 20) if power in values)
        if element.dtype and element.bits == 8:
            np.testing.assert_array_equal(values, codes_of(getattr(torch, element.dtype)))

    def test_step_changes_no_input(self, name):
        y = torch.linspace(-8, 8, 33)
        before = y.clone()
        ELEMENTS[name].step(y)
        assert torch.equal(y, before)


@pytest.mark.parametrize("name", SCALES)
def test_a_scale_formats_facts_are_those_of_its_values(name):
    scale = SCALES[name]
    if scale.bits >= 16:
        assert torch.finfo(getattr(torch, scale.dtype)).max == scale.max
        assert torch.finfo(getattr(torch, scale.dtype)).smallest_normal == 2.0**scale.emin
        assert torch.finfo(getattr(torch, scale.dtype)).bits == scale.bits
        return
    values = grids.named(name)
    assert values[-1] == scale.max
    assert (values[0] == 0) == scale.zero
    assert len(values) <= 2**scale.bits
    if scale.dtype:
        np.testing.assert_array_equal(values, codes_of(getattr(torch, scale.dtype)))


def test_ue5m3_reserves_its_top_exponent_as_its_paper_does():
    # arXiv 2609.02846, eq. 3: 1.875 * 2^15, not PTX's 1.75 * 2^16; smallest normal 2^-14, smallest subnormal 2^-17.
    values = grids.named("ue5m3")
    assert (values[-1], values[8], values[1]) == (61440, 2.0**-14, 2.0**-17)
    assert len(values) == 248
