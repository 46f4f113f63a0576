"""A product of two operands: exact values in, tensor scales outside in fp32, one rounding at the end."""

from collections.abc import Iterator

import numpy as np
import pytest
import torch
from support.cases import every

from ablate.numerics import product as products
from ablate.numerics.philox import Clock
from ablate.numerics.product import alpha, linear, product
from ablate.numerics.quantize import Operand, pad, quantize
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Range, Select


def operands(seed: int, m: int = 48, n: int = 32, k: int = 96, **outer) -> tuple[Operand, Operand]:
    g = torch.Generator().manual_seed(seed)
    quant = Quant(outer=Outer(**outer))
    a, b = torch.randn(m, k, generator=g).bfloat16(), torch.randn(n, k, generator=g).bfloat16()
    return quantize(a * 7, quant), quantize(b * 0.01, quant)


def exact(a: Operand, b: Operand) -> torch.Tensor:
    return a.values.double() @ b.values.double().t()


def order_bound(a: Operand, b: Operand) -> torch.Tensor:
    """The most that the order of fp32 additions can change: K units of 2^-24 of the sum of magnitudes (Higham, section 3.1)."""
    return a.values.shape[1] * 2.0**-24 * (a.values.double().abs() @ b.values.double().abs().t())


@pytest.mark.parametrize("bound", [448.0, 256.0])
def test_alpha_is_the_product_of_the_amaxes_over_36_bound_squared_in_fp32(bound):
    a, b = operands(0, bound=bound)
    expected = np.float32(a.amax) * np.float32(b.amax) / np.float32(36 * bound**2)
    assert alpha(a, b).item() == expected


def test_alpha_of_one_quantised_operand_is_its_amax_over_its_divisor():
    a, b = operands(1)
    plain = Operand(b.values)
    assert alpha(a, plain).item() == np.float32(a.amax) / np.float32(2688)
    assert alpha(plain, plain) is None


def test_the_fp32_product_is_exact_up_to_the_order_of_additions():
    a, b = operands(2)
    scale = alpha(a, b).double()
    y = product(a, b, torch.float32)
    bound = order_bound(a, b) * scale + 2.0**-24 * y.double().abs()  # and one rounding by alpha
    assert y.dtype == torch.float32
    assert ((y.double() - exact(a, b) * scale).abs() <= bound).all()


def test_alpha_is_applied_after_the_accumulation():
    # Values are integers here, so that the accumulation is exact, and alpha is its only rounding.
    a, b = operands(3, k=16)
    values = [(o.values.double() * 2).round().bfloat16() for o in (a, b)]
    a, b = (
        Operand(v, Quant(), amax)
        for v, amax in zip(values, (torch.tensor(1.1), torch.tensor(0.7)), strict=True)
    )
    expected = exact(a, b).numpy().astype(np.float32) * (
        np.float32(1.1) * np.float32(0.7) / np.float32(2688.0**2)
    )
    np.testing.assert_array_equal(product(a, b, torch.float32).numpy(), expected)


def test_a_product_of_dequantised_operands_is_the_same_number():
    a, b = operands(4)
    expected = a.dequantize().double() @ b.dequantize().double().t()
    # Each dequantised element was rounded three times: 3 * 2^-24 an operand, beside the order of additions.
    bound = (order_bound(a, b) * alpha(a, b).double()) * (1 + 8 / a.values.shape[1])
    assert ((product(a, b, torch.float32).double() - expected).abs() <= bound).all()


def test_the_bf16_product_is_the_fp32_one_rounded_once():
    a, b = operands(5, m=512, n=512, k=512)
    expected, mine = product(a, b, torch.float32).bfloat16(), product(a, b, torch.bfloat16)
    differs = expected != mine
    assert mine.dtype == torch.bfloat16
    assert (
        differs.double().mean() <= 1e-4
    )  # the order of additions moves a value across a rounding boundary: 7e-6 measured
    ulp = (expected.view(torch.int16) - mine.view(torch.int16)).abs()
    near_zero = torch.maximum(expected.abs(), mine.abs()).double() < (
        order_bound(a, b) * alpha(a, b).double()
    )
    assert ((ulp <= 1) | near_zero).all()


@pytest.mark.parametrize("out", [torch.float32, torch.bfloat16])
def test_operands_padded_to_different_lengths_fit(out):
    g = torch.Generator().manual_seed(6)
    x, w = torch.randn(8, 20, generator=g).bfloat16(), torch.randn(8, 20, generator=g).bfloat16()
    short, long = quantize(x, Quant()), Operand(pad(w, 1, 64))
    assert torch.equal(product(short, long, out), product(short, Operand(w), out))
    assert torch.equal(product(long, short, out), product(Operand(w), short, out))


def test_a_plain_product_is_torchs():
    g = torch.Generator().manual_seed(7)
    x, w = torch.randn(8, 32, generator=g).bfloat16(), torch.randn(24, 32, generator=g).bfloat16()
    assert torch.equal(product(Operand(x), Operand(w), torch.bfloat16), x @ w.t())
    assert torch.equal(product(Operand(x), Operand(w), torch.float32), x.float() @ w.float().t())


def test_rotating_both_operands_cancels_before_quantisation():
    g = torch.Generator().manual_seed(8)
    x, w = torch.randn(64, 64, generator=g).bfloat16(), torch.randn(64, 64, generator=g).bfloat16()
    quant, rotation = Quant(), Hadamard()
    plain = product(quantize(x, quant), quantize(w, quant), torch.float32)
    rotated = product(
        quantize(x, quant, rotation=rotation), quantize(w, quant, rotation=rotation), torch.float32
    )
    exact = x.double() @ w.double().t()
    errors = [((y - exact).square().sum() / exact.square().sum()).item() for y in (plain, rotated)]
    assert errors[1] == pytest.approx(
        errors[0], rel=0.15
    )  # two quantisations of Gaussian data, 9e-3 each; 4,096 samples
    assert errors[1] < 0.025


def test_large_and_small_amaxes_do_not_overflow_inside_the_product():
    g = torch.Generator().manual_seed(9)
    x = torch.randn(16, 32, generator=g)
    a, b = quantize(x * 1e30, Quant()), quantize(x * 1e-30, Quant())
    expected = product(quantize(x, Quant()), quantize(x, Quant()), torch.float32)
    torch.testing.assert_close(product(a, b, torch.float32), expected, rtol=0, atol=0.1)
    assert product(a, b, torch.float32).isfinite().all()


def test_operands_scaled_by_row_give_every_output_its_own_alpha():
    a, b = operands(10, granularity="row")
    assert alpha(a, b).shape == (48, 32)
    expected = np.outer(a.amax.numpy(), b.amax.numpy()) / np.float32(2688.0**2)
    np.testing.assert_array_equal(alpha(a, b).numpy(), expected)
    one, _ = operands(10)
    np.testing.assert_array_equal(alpha(a, one).numpy(), (a.amax * one.amax).numpy() / np.float32(2688.0**2))
    np.testing.assert_array_equal(
        alpha(one, b).numpy(), (one.amax * b.amax.t()).numpy() / np.float32(2688.0**2)
    )


def test_a_prescale_of_three_quarters_is_undone_outside_the_product():
    scale = BlockScale(format="e8m0", rounding="floor")
    quant = Quant(
        block="1x32", scale=scale, outer=None, range=Range(map_to=4.0, prescale=0.75), rounding="stochastic"
    )
    x = torch.randn(8, 64, generator=torch.Generator().manual_seed(11))
    a = quantize(x, quant, clock=Clock(0), keep=True)
    assert a.scaled.abs().max() < 6  # OCP's floor rule puts the maximum in [4, 8), and 3/4 of it below 6
    assert alpha(a, a).item() == np.float32(16 / 9)
    assert alpha(a, Operand(x)).item() == np.float32(4 / 3)


WIDE = {
    "block:128": Quant(outer=Outer(granularity="block:128")),
    "fp32 scales": Quant(scale=BlockScale(format="fp32"), outer=None),
    "bf16 scales": Quant(scale=BlockScale(format="bf16"), outer=None),
    "two grids": Quant(select=Select(among="grids")),
    "rows": Quant(outer=Outer(granularity="row")),
    "16 rows": Quant(block="16x16", outer=Outer(granularity="rows:16")),
    "fp8 per tensor": Quant(element="e4m3", block=None, scale=None, outer=Outer(bound=1.0)),
    "mxfp4": Quant(block="1x32", scale=BlockScale(format="e8m0", rounding="ceil"), outer=None),
    "16x16": Quant(block="16x16"),
}


@every(right=WIDE, left=WIDE)
def test_operands_of_any_two_quantisers_multiply_to_what_they_decode_to(left, right):
    g = torch.Generator().manual_seed(12)
    x, w = torch.randn(24, 200, generator=g).bfloat16(), torch.randn(40, 200, generator=g).bfloat16()
    a, b = quantize(x, WIDE[left]), quantize(w, WIDE[right])
    width = max(a.values.shape[1], b.values.shape[1])
    exact = [pad(o.dequantize(), 1, width).double() for o in (a, b)]
    expected, most = exact[0] @ exact[1].t(), exact[0].abs() @ exact[1].abs().t()
    mine = product(a, b, torch.float32)
    # The order of K fp32 additions, and some eight roundings of factors.
    assert ((mine.double() - expected).abs() <= (width + 8) * 2.0**-24 * most).all()
    rounded = product(a, b, torch.bfloat16)
    assert (
        (rounded.double() - expected).abs() <= 2.0**-8 * expected.abs() + (width + 8) * 2.0**-24 * most
    ).all()


def test_empty_operands_multiply_to_zeros_of_the_right_shape():
    for rows, columns in ((0, 32), (4, 0)):
        a, b = quantize(torch.empty(rows, columns), Quant()), quantize(torch.ones(8, columns), Quant())
        for out in (torch.float32, torch.bfloat16):
            assert torch.equal(product(a, b, out), torch.zeros(rows, 8, dtype=out))


def test_a_non_finite_operand_is_not_hidden_by_the_product():
    for bad in (float("nan"), float("inf")):
        x = torch.ones(4, 32)
        x[1, 3] = bad
        y = product(quantize(x, Quant()), quantize(torch.ones(8, 32), Quant()), torch.float32)
        assert not y.isfinite().all()


# --- CPUs without bf16 instructions ---------------------------------------------------------------


@pytest.fixture
def in_fp32() -> Iterator[None]:
    with products.multiplying("fp32"):
        yield


@pytest.mark.usefixtures("in_fp32")
def test_a_cpu_without_bf16_instructions_multiplies_in_fp32_and_rounds_once():
    g = torch.Generator().manual_seed(1)
    x, w = torch.randn(48, 64, generator=g).bfloat16(), torch.randn(32, 64, generator=g).bfloat16()
    a, b = quantize(x, Quant()), quantize(w, Quant(block="16x16"))
    scaled = a.values.float() @ b.values.float().t() * alpha(a, b)
    assert torch.equal(product(a, b, torch.bfloat16), scaled.bfloat16())
    assert torch.equal(
        product(Operand(x), Operand(w), torch.bfloat16), (x.float() @ w.float().t()).bfloat16()
    )
    given = x.clone().requires_grad_()
    linear(given, w).sum().backward()
    assert given.grad.dtype == torch.bfloat16
    assert torch.equal(given.grad, (torch.ones(48, 32) @ w.float()).bfloat16())


def test_a_product_with_an_operand_of_zeros_costs_no_product(monkeypatch):
    """torch leaves oneDNN where alpha is 0, for a loop that is 70 times slower. CPUs multiply by addmm in bf16."""
    a, b = operands(0)
    zero = quantize(torch.zeros(48, 96, dtype=torch.bfloat16), Quant())
    assert alpha(zero, b) == 0
    expected = product(zero, b, torch.float32)
    monkeypatch.setattr(torch, "addmm", lambda *_, **__: pytest.fail("a product of zeros"))
    with products.multiplying("bf16"):
        assert torch.equal(product(zero, b, torch.bfloat16).float(), expected)
        with pytest.raises(pytest.fail.Exception):
            product(a, b, torch.bfloat16)
