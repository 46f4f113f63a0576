"""Rotations: orthogonal, along the contraction, rounded to bf16 before anything is measured, and cancelling in the product."""

from typing import get_args

import numpy as np
import pytest
import scipy.linalg
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles import te

from ablate.numerics.hadamard import SIGNS, TE_SIGNS, matrix, rotate
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Hadamard, Quant

SIZES = get_args(Hadamard.model_fields["size"].annotation)
CPU = torch.device("cpu")


def dense(spec: Hadamard) -> np.ndarray:
    """diag(signs) H / sqrt(size) by scipy, float64."""
    return np.diag(SIGNS[spec.signs](spec.size).double().numpy()) @ scipy.linalg.hadamard(spec.size) / spec.size**0.5


@pytest.mark.parametrize("signs", SIGNS)
@pytest.mark.parametrize("size", SIZES)
def test_the_matrix_is_signs_times_hadamard_and_orthogonal(size, signs):
    spec = Hadamard(size=size, signs=signs)
    r = matrix(spec, torch.float32, CPU).double().numpy()
    np.testing.assert_allclose(r, dense(spec), rtol=1e-7)  # 1/sqrt(8) rounds to fp32
    np.testing.assert_allclose(r @ r.T, np.eye(size), atol=2e-7)


@pytest.mark.parametrize("size", SIZES)
def test_the_matrix_is_orthogonal_in_bf16_exactly_where_the_size_is_a_square(size):
    r = matrix(Hadamard(size=size), torch.bfloat16, CPU).double()
    gap = (r @ r.t() - torch.eye(size, dtype=torch.float64)).abs().max()
    assert gap == 0 if size in (4, 16, 64) else gap < 3e-4  # 1/sqrt(8) rounds to bf16: the product shrinks by 2.1e-4


def test_the_fixed_signs_are_transformer_engines():
    assert torch.equal(torch.tensor(TE_SIGNS, dtype=torch.float32), te.reference().nvfp4.get_wgrad_sign_vector())


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
    product = rotate(a, spec).double() @ rotate(b, spec).double().t()
    # fp32 rounding of the rotated values, and of 1/sqrt(size): some 1e-7 of |a| |b|.
    bound = 1e-6 * torch.outer(a.norm(dim=1), b.norm(dim=1)).double()
    assert ((product - a.double() @ b.double().t()).abs() <= bound).all()


@pytest.mark.parametrize("signs", SIGNS)
def test_rotated_bf16_values_are_rounded_once_to_bf16(signs, generator):
    x = torch.randn(32, 64, generator=generator).bfloat16()
    exact = (x.double().reshape(-1, 16) @ torch.from_numpy(dense(Hadamard(signs=signs)))).reshape(x.shape)
    rotated = rotate(x, Hadamard(signs=signs))
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
