"""Tests of the parts that are taken out of an operand before it is quantised: they sum to it, and each is what its name says."""

import math
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
import torch

from ablate.numerics.product import product, split_product
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import Outer, Quant, Transform
from ablate.numerics.transform import (
    CHANNEL_FORMATS,
    largest_channels,
    low_rank,
    mean,
    only,
    quantile,
    split,
)

TRANSFORMS = {
    "mean": Transform(mean=True),
    "low_rank": Transform(low_rank=2),
    "channels": Transform(channels=0.1),
    "channels in bf16": Transform(channels=0.1, channels_in="bf16"),
    "clamp": Transform(clamp=0.95),
    "all": Transform(mean=True, low_rank=2, channels=0.1, clamp=0.95),
}
FIELDS = {"mean", "low_rank", "channels", "clamp"}
"""Parts that a transform can take out; a new field needs an entry in TRANSFORMS."""


def tensor(seed: int = 0, rows: int = 24, columns: int = 40) -> torch.Tensor:
    """Channels with means and a few large ones, as activations have them."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(rows, columns, generator=g) + torch.randn(columns, generator=g)
    x[:, [3, 17]] *= 30
    return x


def parts_of(x: torch.Tensor, transform: Transform, channels: int = 1) -> list:
    return split(x, Quant(transform=transform), channels)


def test_every_field_that_takes_something_out_is_tried_here():
    tried = {field for transform in TRANSFORMS.values() for field in FIELDS if getattr(transform, field)}
    assert tried == FIELDS


@pytest.mark.parametrize("channels", [0, 1])
@pytest.mark.parametrize("name", TRANSFORMS)
class TestTransforms:
    """Promises of every transform, whichever dimension holds the features."""

    def test_the_parts_sum_to_the_input(self, name, channels):
        for dtype, close in ((torch.float32, 2e-7), (torch.bfloat16, 2.0**-9)):
            x = tensor().to(dtype)
            parts = parts_of(x, TRANSFORMS[name], channels)
            total = sum(part.double() for part, *_ in parts)
            # Parts that are taken out are rounded to x's dtype and the rest is what then remains, exactly; only what clamping cut off
            # is rounded with nothing left to make up for it.
            assert ((total - x.double()).abs() <= close * x.double().abs().max()).all()
            if not TRANSFORMS[name].clamp:
                assert ((total - x.double()).abs() <= 2e-7 * x.double().abs().max()).all()

    def test_the_rest_comes_first_and_is_what_the_quantiser_gets(self, name, channels):
        quant = Quant(transform=TRANSFORMS[name])
        parts = split(tensor(), quant, channels)
        assert parts[0][1] is quant
        assert all(how in CHANNEL_FORMATS.values() for _, how, *_ in parts[1:])
        assert len(parts) == 1 + sum(bool(getattr(TRANSFORMS[name], field)) for field in FIELDS)
        assert all(part.shape == (24, 40) for part, *_ in parts)
        half = split(tensor().bfloat16(), quant, channels)
        assert all(
            part.dtype == torch.bfloat16 for part, *_ in half[1:]
        )  # the operand's own precision; the rest stays exact

    def test_it_lowers_the_error_on_a_tensor_with_what_it_takes_out(self, name, channels):
        x = tensor() if channels == 1 else tensor(rows=40, columns=24).t().contiguous()
        plain = (quantize(x, Quant()).dequantize()[:, : x.shape[1]] - x).square().sum()
        parts = parts_of(x, TRANSFORMS[name], channels)
        values = sum(
            (part if how is None else quantize(part, how).dequantize()[:, : x.shape[1]])
            for part, how, *_ in parts
        )
        assert (values - x).square().sum() < plain

    def test_it_leaves_its_input_alone_and_repeats(self, name, channels):
        x = tensor()
        before = x.clone()
        first, second = (parts_of(x, TRANSFORMS[name], channels) for _ in range(2))
        assert torch.equal(x, before)
        assert all(torch.equal(a, b) for (a, *_), (b, *_) in zip(first, second, strict=True))

    def test_it_reads_no_global_generator(self, name, channels):
        before = torch.random.get_rng_state()
        parts_of(tensor(), TRANSFORMS[name], channels)
        assert torch.equal(torch.random.get_rng_state(), before)

    def test_transposing_commutes_with_it(self, name, channels):
        for (part, *_), (turned, *_) in zip(
            parts_of(tensor(), TRANSFORMS[name], channels),
            parts_of(tensor().t(), TRANSFORMS[name], 1 - channels),
            strict=True,
        ):
            # The subspace iteration starts from another basis: it has converged to fp32 on two outlier channels.
            torch.testing.assert_close(
                part, turned.t(), rtol=0, atol=2e-3 if TRANSFORMS[name].low_rank else 1e-5
            )

    def test_empty_tensors_pass(self, name, channels):
        for shape in ((0, 16), (4, 0), (0, 0)):
            assert all(
                part.shape == shape for part, *_ in parts_of(torch.empty(shape), TRANSFORMS[name], channels)
            )

    def test_a_nan_or_an_infinity_stays_visible(self, name, channels):
        for bad in (math.nan, math.inf):
            x = tensor()
            x[2, 5] = bad
            assert not all(part.isfinite().all() for part, *_ in parts_of(x, TRANSFORMS[name], channels))

    def test_the_product_of_parts_is_the_product_of_their_sum(self, name, channels):
        x, w = tensor().bfloat16(), tensor(1, 8).bfloat16()
        parts = [Operand(part) for part, *_ in parts_of(x, TRANSFORMS[name], channels)]
        exact = x.double() @ w.double().t()
        mine = split_product(parts, [Operand(w)], torch.float32)
        assert (mine - exact).abs().max() <= 2.0**-9 * (x.double().abs() @ w.double().abs().t()).max()


def test_no_transform_is_one_part():
    x = tensor()
    assert [(part is x, how) for part, how, *_ in split(x, Quant(), 1)] == [(True, Quant())]


def test_the_mean_is_over_tokens_for_every_channel():
    x = tensor()
    np.testing.assert_allclose(
        mean(x, channels=1)[5].numpy(), x.double().mean(0).numpy(), rtol=1e-5, atol=1e-6
    )
    np.testing.assert_allclose(
        mean(x.t(), channels=0)[:, 5].numpy(), x.double().mean(0).numpy(), rtol=1e-5, atol=1e-6
    )
    assert parts_of(x + 100, TRANSFORMS["mean"])[0][0].mean(0).abs().max() < 1e-4


@pytest.mark.parametrize("rank", [1, 3, 24, 100])
def test_the_low_rank_part_is_the_best_of_its_rank(rank):
    u, s, v = np.linalg.svd(np.random.default_rng(0).standard_normal((24, 40)), full_matrices=False)
    x = torch.from_numpy(u * (s * 0.2 ** np.arange(24)) @ v).float()
    kept = low_rank(x, rank).double().numpy()
    best = np.linalg.norm((s * 0.2 ** np.arange(24))[rank:])
    assert np.linalg.matrix_rank(kept, tol=1e-5) <= min(rank, 24)
    assert np.linalg.norm(x.numpy() - kept) <= best * 1.001 + 1e-5  # a spectrum that falls by 5 has converged


def test_the_channels_taken_out_are_the_largest_by_norm_and_at_least_one():
    x = tensor()
    for fraction, count in ((0.05, 2), (0.1, 4), (0.001, 1), (0.5, 20)):
        indices = largest_channels(x, fraction, channels=1)
        taken = only(x, indices, channels=1)
        kept = taken.abs().sum(0) > 0
        assert kept.sum() == count
        assert torch.equal(kept.nonzero().flatten(), indices)  # ascending
        assert {3, 17} & set(kept.nonzero().flatten().tolist())
        assert torch.equal(taken[:, kept], x[:, kept])
        norms = x.norm(dim=0)
        assert norms[kept].min() >= norms[~kept].max()
        turned = x.t().contiguous()
        assert torch.equal(
            only(turned, largest_channels(turned, fraction, channels=0), channels=0), taken.t()
        )


def test_the_channels_are_quantised_to_mxfp8_or_left():
    _rest, taken = parts_of(tensor(), TRANSFORMS["channels"])
    assert taken.quant is CHANNEL_FORMATS["mxfp8"]
    assert parts_of(tensor(), TRANSFORMS["channels in bf16"])[1].quant is None
    result = quantize(taken.values, CHANNEL_FORMATS["mxfp8"])
    error = (result.dequantize()[:, :40] - taken.values).square().sum() / taken.values.square().sum()
    assert error < 1.5e-3  # E4M3 keeps four significant bits: 2^-5 / sqrt(3) at worst, squared
    assert torch.log2(result.block_scale).frac().eq(0).all()


def test_clamping_cuts_at_the_order_statistic_of_the_magnitudes():
    x = tensor()
    ordered = x.abs().flatten().sort().values
    for q in (0.5, 0.95, 0.99, 0.07):
        limit = ordered[math.ceil(Fraction(repr(q)) * x.numel()) - 1]
        assert quantile(x, q) == limit
        (rest, *_), (residual, how, *_) = parts_of(x, Transform(clamp=q))
        assert torch.equal(rest, x.clamp(-limit, limit))
        assert torch.equal(residual, x - rest)
        assert how is None
    lost = parts_of(x, Transform(clamp=0.95, residual=False))
    assert len(lost) == 1
    assert torch.equal(lost[0][0], parts_of(x, Transform(clamp=0.95))[0][0])


def test_two_single_parts_multiply_as_one_product():
    a, b = quantize(tensor().bfloat16(), Quant()), quantize(tensor(1).bfloat16(), Quant())
    for out in (torch.float32, torch.bfloat16):
        assert torch.equal(split_product([a], [b], out), product(a, b, out))


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("row_scales", [False, True])
def test_a_product_leaves_out_the_rows_and_columns_that_are_zero(dimension, row_scales):
    """The oracle multiplies the zeros too, in float64; what is left out may even be NaN in the other operand."""
    kept = torch.tensor([1, 4, 17])
    outer = Outer(granularity="row") if row_scales else Outer()
    x, w = tensor(), tensor(1, 8)
    rest = Operand(tensor(2).bfloat16())
    part = quantize(only(x, kept, dimension), Quant(outer=outer))
    other = Operand(w.bfloat16())
    expected = (rest.values.double() + part.dequantize()[:, :40].double()) @ other.values.double().t()
    sparse = replace(part, nonzero=(dimension, kept))
    for a, b, want in (([rest, sparse], [other], expected), ([other], [rest, sparse], expected.t())):
        found = split_product(a, b, torch.float32).double()
        assert (found - want).abs().max() <= 1e-6 * want.abs().max()
    if dimension:
        other.values[:, [0, 2]] = math.nan
        assert split_product([sparse, sparse], [other], torch.float32).isfinite().all()


@pytest.mark.parametrize("dimension", [0, 1])
@pytest.mark.parametrize("row_scales", [False, True])
def test_equal_rows_are_multiplied_once_and_equal_columns_by_the_sum_of_the_others(dimension, row_scales):
    """Compare with the whole product in float64, of each order of the operands; the other one has parts of its own."""
    x = mean(tensor(), 1 - dimension).bfloat16()
    assert torch.equal(x, x.select(dimension, 0).unsqueeze(dimension).expand_as(x))
    quant = Quant(outer=Outer(granularity="row") if row_scales else Outer(), rounding="nearest")
    other = [quantize(tensor(1, 8).bfloat16(), quant), Operand(tensor(2, 8).bfloat16())]
    whole = sum(one.dequantize()[:, :40].double() for one in other)
    rest, part = Operand(tensor(3).bfloat16()), Operand(x, equal=dimension)
    for mine in ([part], [rest, part]):
        want = sum(one.values.double() for one in mine) @ whole.t()
        for a, b, expected in ((mine, other, want), (other, mine, want.t())):
            found = split_product(a, b, torch.float32).double()
            assert found.shape == expected.shape
            assert (found - expected).abs().max() <= 1e-6 * expected.abs().max()


def test_a_mean_of_both_operands_is_a_product_of_one_row_and_one_column():
    for first, second in ((0, 0), (0, 1), (1, 0), (1, 1)):
        a = Operand(mean(tensor(), 1 - first).bfloat16(), equal=first)
        b = Operand(mean(tensor(1, 8), 1 - second).bfloat16(), equal=second)
        want = a.values.double() @ b.values.double().t()
        found = split_product([a], [b, b], torch.float32).double()
        assert (found - 2 * want).abs().max() <= 1e-6 * want.abs().max()
