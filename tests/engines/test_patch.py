"""Hot-Channel Patch: the error of the channels of largest norm, added back to the product, against numpy on the decoded operands."""

import numpy as np
import pytest
import torch
from oracles.two_level import nvfp4
from support.cases import every
from torch import nn

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.numerics.philox import Clock
from ablate.numerics.spec import Hadamard, Quant, Transform
from ablate.recipes.recipe import Dgrad, Fprop, Products, Wgrad

FRACTION = 0.1
PATCHED = Quant(transform=Transform(patch=FRACTION))
CHANNELS = {"fprop.x": 1, "fprop.w": 1, "dgrad.g": 1, "dgrad.w": 1, "wgrad.g": 0, "wgrad.x": 0}
"""Dimension of the channels of each operand: the rows of wgrad's, whose columns are tokens."""


def tensor(rows: int, columns: int, seed: int) -> torch.Tensor:
    """Gaussian bf16 with four hot columns."""
    x = torch.randn(rows, columns, generator=torch.Generator().manual_seed(seed))
    x[:, seed % 7 :: 16][:, :4] *= 30
    return x.bfloat16()


def layer(products: Products, weight: torch.Tensor) -> EmulatedLinear:
    linear = nn.Linear(weight.shape[1], weight.shape[0], bias=False)
    linear.weight.data = weight.float()
    made = EmulatedLinear(linear, "blocks.0.linear", Clock(0), torch.bfloat16)
    made.products = products
    return made


def with_patch(x: torch.Tensor, channels: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the decoded operand, and the patch in bf16, as float64."""
    exact = x.float().numpy()
    decoded = nvfp4(exact).decoded
    norms = (exact.astype(np.float64) ** 2).sum(axis=1 - channels)
    hot = np.argsort(-norms, kind="stable")[: max(1, round(FRACTION * len(norms)))]
    kept = np.zeros(len(norms), bool)
    kept[hot] = True
    lost = np.where(kept[None, :] if channels else kept[:, None], exact - decoded, np.float32(0))
    return decoded.astype(np.float64), torch.from_numpy(lost).bfloat16().double().numpy()


@every(slot=CHANNELS)
def test_the_parts_are_the_quantised_operand_and_the_error_of_its_hot_channels(slot):
    x = tensor(48, 64, seed=1) if CHANNELS[slot] else tensor(64, 48, seed=1).t()
    parts = layer(Products(), tensor(32, 64, 2)).operand(x.contiguous(), slot, PATCHED, None)
    decoded, lost = with_patch(x.contiguous(), CHANNELS[slot])
    assert len(parts) == 2
    assert (parts[0].dequantize().double().numpy() != decoded).sum() == 0
    assert (parts[1].values.double().numpy() != lost).sum() == 0
    assert 0 < (lost != 0).mean() <= 0.13


def test_a_product_is_that_of_the_patched_operands():
    x, w = tensor(40, 64, seed=3), tensor(32, 64, seed=10)  # the same columns are hot
    y = layer(Products(fprop=Fprop(x=PATCHED, w=PATCHED, gemm="fp32_out")), w)(x.float())
    (a, pa), (b, pb) = with_patch(x, 1), with_patch(w, 1)
    expected, most = (a + pa) @ (b + pb).T, np.abs(a + pa) @ np.abs(b + pb).T
    assert (np.abs(y.detach().numpy() - expected) <= 2.0**-20 * most).all()
    exact = x.double().numpy() @ w.double().numpy().T
    assert ((expected - exact) ** 2).sum() < 0.5 * ((a @ b.T - exact) ** 2).sum()


@pytest.mark.parametrize("size", [16, 32])
def test_under_a_rotation_the_patched_channels_are_as_exact_as_without_one(size):
    rotation, x = Hadamard(size=size), tensor(64, 48, seed=5).t().contiguous()
    made = layer(Products(), tensor(32, 64, 2))
    parts = made.operand(x, "wgrad.x", PATCHED, rotation)
    back = sum(made.rotated(part.dequantize(), "wgrad.x", rotation, back=True) for part in parts).double()
    norms = x.double().square().sum(dim=1)
    hot = norms.topk(max(1, round(FRACTION * len(norms)))).indices
    error = (back - x.double()).square().sum(dim=1) / norms
    others = torch.ones(len(norms), dtype=torch.bool)
    others[hot] = False
    assert error[hot].max() < 1e-4 < error[others].min()


def test_the_gradients_are_products_of_patched_operands():
    x, w, dy = tensor(64, 64, seed=6), tensor(32, 64, seed=7), tensor(64, 32, seed=8)
    made, given = layer(Products(), w), x.float().requires_grad_()
    made.products = Products(
        fprop=Fprop(x=PATCHED, w=PATCHED),
        dgrad=Dgrad(g=PATCHED, w=PATCHED, gemm="fp32_out"),
        wgrad=Wgrad(g=PATCHED, x=PATCHED, dw="fp32"),
    )
    made(given).backward(dy.float())
    g, wt, gt, xt = (
        sum(with_patch(z.contiguous(), channels))
        for z, channels in ((dy, 1), (w.t(), 1), (dy.t(), 0), (x.t(), 0))
    )
    for found, (a, b) in ((given.grad, (g, wt)), (made.weight.grad, (gt, xt))):
        error = np.abs(found.double().numpy() - a @ b.T)
        assert (error <= 2.0**-18 * (np.abs(a) @ np.abs(b).T)).all()


def test_nothing_is_patched_by_default():
    assert Transform(mean=True).patch is None
