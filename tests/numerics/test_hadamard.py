"""Rotations: orthogonal, along the contraction, rounded to bf16 before anything is measured, and cancelling in the product."""

from dataclasses import replace
from typing import get_args

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import te
from support.cases import every

from ablate.numerics import choices
from ablate.numerics.hadamard import SIGNS, TE_SIGNS, filled, rotate
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Hadamard, Quant

SIZES = get_args(Hadamard.model_fields["size"].annotation)
CPU = torch.device("cpu")
CLOCK, WHERE = Clock(3, step=5, micro_batch=1), 11


def signs_of(spec: Hadamard, clock: Clock = CLOCK, where: int = WHERE) -> torch.Tensor:
    return SIGNS[spec.signs](spec.size, clock, where)


def dense(spec: Hadamard) -> np.ndarray:
    """diag(signs) H / sqrt(size) by scipy, float64."""
    return np.diag(signs_of(spec).double().numpy()) @ scipy.linalg.hadamard(spec.size) / spec.size**0.5


CHANGES = {
    "seed": (replace(CLOCK, seed=4), WHERE),
    "product": (CLOCK, WHERE + 1),
    "step": (replace(CLOCK, step=6), WHERE),
    "micro-batch": (replace(CLOCK, micro_batch=2), WHERE),
    "stream": (replace(CLOCK, stream="evaluation"), WHERE),
}
FOLLOWS = {
    "none": set(),
    "fixed": set(),
    "per_layer": {"seed", "product"},
    "per_step": {"seed", "product", "step", "stream"},
    "per_call": {"seed", "product", "step", "stream", "micro-batch"},
}
"""Coordinates of a draw that each kind of signs changes with."""


class TestSigns:
    """Promises of every entry of SIGNS."""

    @every(signs=SIGNS, size=SIZES)
    def test_those_filled_on_a_device_are_the_same(self, signs, size):
        drawn = signs_of(Hadamard(size=size, signs=signs))
        assert torch.equal(filled(drawn, CPU), drawn)

    @every(signs=SIGNS, size=SIZES)
    def test_they_are_plus_or_minus_one_for_every_row_and_repeat(self, signs, size):
        drawn = signs_of(Hadamard(size=size, signs=signs))
        assert drawn.shape == (size,)
        assert drawn.dtype == torch.float32
        assert drawn.abs().eq(1).all()
        assert torch.equal(drawn, signs_of(Hadamard(size=size, signs=signs)))

    @every(changed=CHANGES, signs=SIGNS)
    def test_they_change_with_what_they_are_named_for_and_with_nothing_else(self, signs, changed):
        spec = Hadamard(size=128, signs=signs)  # 128 fair signs repeat by chance once in 3e38
        same = torch.equal(signs_of(spec), signs_of(spec, *CHANGES[changed]))
        assert same == (changed not in FOLLOWS[signs])

    @pytest.mark.parametrize("signs", [word for word, signs in choices.SIGNS.items() if signs.drawn])
    def test_drawn_signs_are_fair_and_independent(self, signs):
        drawn = torch.stack([signs_of(Hadamard(size=128, signs=signs), Clock(seed)) for seed in range(200)])
        assert abs(drawn.mean()) < 4 / 160  # four standard errors of 25,600 signs
        correlation = drawn.t() @ drawn / 200 - torch.eye(128)
        assert (
            correlation.abs().max() < 5.5 / 200**0.5
        )  # 8,128 pairs: the largest of as many normal ones is near 4


@every(signs=SIGNS, size=SIZES)
def test_the_rotation_is_signs_times_hadamard_and_orthogonal(size, signs):
    spec = Hadamard(size=size, signs=signs)
    r = rotate(torch.eye(size), spec, CLOCK, WHERE).double().numpy()
    np.testing.assert_allclose(r, dense(spec), rtol=1e-7)  # 1/sqrt(8) rounds to fp32
    np.testing.assert_allclose(r @ r.T, np.eye(size), atol=2e-7)


@pytest.mark.parametrize("size", SIZES)
def test_the_unsigned_rotation_is_its_own_inverse_exactly_where_the_size_is_a_square(size):
    h = rotate(torch.eye(size), Hadamard(size=size, signs="none")).double()
    assert torch.equal(h, h.t())
    gap = (h @ h - torch.eye(size, dtype=torch.float64)).abs().max()
    assert gap == 0 if size in (4, 16, 64) else 0 < gap < 2e-7  # 1/sqrt(8) rounds to fp32


@pytest.mark.parametrize("size", SIZES)
def test_sums_are_made_in_one_order_whatever_the_machine(size, generator):
    """numpy's fp32, in pairs at distances 1, 2, 4, ...: a matrix product may add otherwise, and so round otherwise."""
    z = torch.randn(8, size, generator=generator) * 2.0 ** torch.randint(
        -20, 20, (8, size), generator=generator
    )
    mine = rotate(z, Hadamard(size=size, signs="none"))
    y, distance = z.numpy().copy(), 1
    while distance < size:
        for first in (i for i in range(size) if not i & distance):
            a, b = y[:, first].copy(), y[:, first + distance].copy()
            y[:, first], y[:, first + distance] = a + b, a - b
        distance *= 2
    np.testing.assert_array_equal(mine.numpy(), y * np.float32(size**-0.5))


def test_drawn_signs_need_a_clock_and_the_others_none():
    x = torch.ones(2, 16)
    for signs in SIGNS:
        spec = Hadamard(signs=signs)
        if choices.SIGNS[signs].drawn:
            with pytest.raises(ValueError, match="clock"):
                quantize(x, Quant(), rotation=spec)
        else:
            assert torch.equal(
                quantize(x, Quant(), rotation=spec).values,
                quantize(x, Quant(), rotation=spec, clock=CLOCK).values,
            )


def test_the_fixed_signs_are_transformer_engines():
    assert torch.equal(
        torch.tensor(TE_SIGNS, dtype=torch.float32), te.reference().nvfp4.get_wgrad_sign_vector()
    )


def test_the_signs_flip_the_inputs_not_the_outputs():
    rotated = rotate(torch.eye(16), Hadamard())  # row i: what unit input i becomes
    assert torch.equal(rotated.sign()[:, 0], torch.tensor(TE_SIGNS).float())


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("size", SIZES)
@given(seed=st.integers(0, 2**31))
@settings(max_examples=10, deadline=None, derandomize=True)
def test_a_rotation_cancels_in_the_product(size, signs, seed):
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(5, 2 * size, generator=g), torch.randn(3, 2 * size, generator=g)
    spec = Hadamard(size=size, signs=signs)
    product = rotate(a, spec, CLOCK, WHERE).double() @ rotate(b, spec, CLOCK, WHERE).double().t()
    # fp32 rounding of the rotated values, and of 1/sqrt(size): some 1e-7 of |a| |b|.
    bound = 1e-6 * torch.outer(a.norm(dim=1), b.norm(dim=1)).double()
    assert ((product - a.double() @ b.double().t()).abs() <= bound).all()


@pytest.mark.parametrize("signs", SIGNS)
def test_rotated_bf16_values_are_rounded_once_to_bf16(signs, generator):
    x = torch.randn(32, 64, generator=generator).bfloat16()
    exact = (x.double().reshape(-1, 16) @ torch.from_numpy(dense(Hadamard(signs=signs)))).reshape(x.shape)
    rotated = rotate(x, Hadamard(signs=signs), CLOCK, WHERE)
    assert rotated.dtype == torch.bfloat16
    # The 16 terms may be added in any order in fp32: at a tie of bf16 that may move a value by one ulp.
    assert (rotated != exact.bfloat16()).double().mean() < 0.002
    assert (rotated.double() - exact).abs().max() <= 2.0**-8 * exact.abs().max()


def test_the_amax_is_taken_after_the_rotation_and_after_rounding_to_bf16(generator):
    x = torch.randn(64, 32, generator=generator).bfloat16()
    x[3, 7] = 50.0  # spread over 16 elements by the rotation
    exact = x.double().reshape(-1, 16) @ torch.from_numpy(dense(Hadamard()))
    result = quantize(x, Quant(), rotation=Hadamard())
    assert result.amax == exact.bfloat16().abs().max().float()
    assert result.amax < 20
    assert result.amax.double() != exact.abs().max()


def test_only_elements_of_one_group_mix(generator):
    x = torch.randn(4, 64, generator=generator)
    changed = x.clone()
    changed[1, 20] += 1
    differs = rotate(x, Hadamard()) != rotate(changed, Hadamard())
    assert differs[1, 16:32].all()
    assert differs.sum() == 16


@every(signs=SIGNS, size=SIZES)
def test_rotating_back_restores_the_input(size, signs, generator):
    x = torch.randn(6, 2 * size, generator=generator)
    there = rotate(x, Hadamard(size=size, signs=signs), CLOCK, WHERE)
    back = rotate(there, Hadamard(size=size, signs=signs), CLOCK, WHERE, back=True)
    torch.testing.assert_close(back, x, rtol=0, atol=4e-6)  # two products of up to 128 terms in fp32
    assert not torch.allclose(there, x)


@every(signs=SIGNS)
def test_the_reference_rotates_back_as_well(signs, generator):
    """In fp16, for which there is no compiled rotation; two roundings of numbers up to 4 move them by 0.004."""
    x, rule = torch.randn(6, 64, generator=generator).half(), Hadamard(size=16, signs=signs)
    back = rotate(rotate(x, rule, CLOCK, WHERE), rule, CLOCK, WHERE, back=True)
    torch.testing.assert_close(back, x, rtol=0, atol=0.01)


@pytest.mark.parametrize("size", [8, 32, 128])
def test_a_bf16_rotation_by_a_size_that_is_no_square_does_not_shrink(size, generator):
    x = torch.randn(2**16 // size, size, generator=generator).bfloat16()
    rotated = rotate(x, Hadamard(size=size))
    assert rotated.dtype == torch.bfloat16
    ratio = (rotated.double().norm() / x.double().norm()).item()
    # Rounding 65,536 values to bf16 moves their norm by some 5e-6; 1/sqrt(size) in bf16 would shrink it by 1.07e-4.
    assert ratio == pytest.approx(1, abs=3e-5)


def test_the_signs_of_two_operands_of_a_product_agree_and_of_two_products_do_not(generator):
    x = torch.randn(4, 128, generator=generator)
    spec, draw = Hadamard(size=128, signs="per_call"), {"clock": CLOCK, "keep": True}
    first, second = (
        quantize(x, Quant(), rotation=spec, where=site, product=7, **draw).source for site in (1, 2)
    )
    other = quantize(x, Quant(), rotation=spec, where=1, product=8, **draw).source
    assert torch.equal(first, second)
    assert not torch.equal(first, other)


def test_an_empty_tensor_and_a_strided_one_rotate():
    assert rotate(torch.empty(0, 32), Hadamard()).shape == (0, 32)
    assert rotate(torch.empty(4, 0), Hadamard()).shape == (4, 0)
    x = torch.arange(64.0).view(16, 4).t()
    assert torch.equal(rotate(x, Hadamard()), rotate(x.contiguous(), Hadamard()))
