"""Promises of the packing kernel, run by test_packing_kernel.py in a process of its own: in Triton's interpreter, or on a GPU."""

import pytest
import torch
from support.cases import every
from support.triton_cases import INTERPRETED, patch_language_once

from ablate.numerics.encoded import encode, packed_by_kernel
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import BlockScale, Outer, Quant

DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
patch_language_once()


def mx(block: str) -> Quant:
    return Quant(block=block, scale=BlockScale(format="e8m0", rounding="ceil"), outer=None)


QUANTS = {
    "nvfp4": ("nvfp4", Quant()),
    "nvfp4 square": ("nvfp4", Quant(block="16x16")),
    "nvfp4 long": ("nvfp4", Quant(block="1x64")),
    "nvfp4 rows, stochastic": ("nvfp4", Quant(rounding="stochastic", outer=Outer(granularity="row"))),
    "no block scale": ("nvfp4", Quant(block=None, scale=None, outer=Outer(bound=1.0))),
    "mxfp4": ("mxfp4", mx("1x32")),
    "mxfp4 square": ("mxfp4", mx("32x32")),
    "mxfp4, no block scale": ("mxfp4", Quant(block=None, scale=None, outer=Outer(bound=1.0))),
}
SHAPES = ((17, 48), (130, 144), (3, 20))

# The interpreter is numpy, which warns of divisions by zero and of infinities; the kernel means them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def drawn(shape: tuple[int, int], kind: str) -> torch.Tensor:
    """Values of many magnitudes, whole blocks of zeros, and a NaN or an infinity if asked for."""
    g = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=g) * torch.randn(shape, generator=g).mul(4).exp()
    x[:, :16] = 0
    x[1, 17] = {"nan": float("nan"), "infinite": float("inf")}.get(kind, -3.0)
    return x.bfloat16()


def alike(operand: Operand, family: str) -> None:
    rows, columns = operand.values.shape
    ours = packed_by_kernel(operand, family, (rows + -rows % 32, columns + -columns % 32))
    scales = None if operand.block_scale is None else operand.block_scale.cpu()
    theirs = encode(Operand(operand.values.cpu(), operand.quant, None, scales), family)
    assert ours.data.shape == theirs.data.shape
    assert torch.equal(ours.data.view(torch.uint8).cpu(), theirs.data.view(torch.uint8))
    assert torch.equal(ours.scales.view(torch.uint8).cpu(), theirs.scales.view(torch.uint8))


@every(name=QUANTS)
def test_the_kernels_bytes_are_the_references(name):
    family, quant = QUANTS[name]
    for shape, kind in ((SHAPES[0], "ordinary"), (SHAPES[2], "nan"), (SHAPES[2], "infinite")):
        alike(quantize(drawn(shape, kind).to(DEVICE), quant, clock=Clock(3)), family)


@every(name=("nvfp4", "mxfp4"))
def test_scales_of_more_than_one_tile_of_128_rows_lie_where_they_should(name):
    family, quant = QUANTS[name]
    alike(quantize(drawn(SHAPES[1], "ordinary").to(DEVICE), quant), family)


@every(name=("nvfp4 square", "mxfp4 square"))
def test_a_transposed_operand_is_packed_along_its_own_columns(name):
    family, quant = QUANTS[name]
    alike(quantize(drawn((64, 96), "ordinary").to(DEVICE), quant).transposed(), family)


def test_every_code_and_every_scale_has_its_byte():
    """All sixteen codes, under every finite scale of e4m3 and every power of two of e8m0."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    codes = torch.cat((grid, -grid)).repeat(2)
    e4m3 = torch.arange(127, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    e8m0 = torch.arange(3, 250, dtype=torch.uint8).view(torch.float8_e8m0fnu).float()
    for family, quant, scales, length in (("nvfp4", Quant(), e4m3, 16), ("mxfp4", mx("1x32"), e8m0, 32)):
        values = (codes[:length] * scales[:, None]).bfloat16()
        alike(Operand(values.to(DEVICE), quant, None, scales[:, None, None, None].to(DEVICE)), family)
