"""One operand against Transformer Engine's own Python reference: every code, block scale and amax, on awkward tensors.

NVFP4 1x16 and 16x16, rotated, row-scaled, Four Over Six with both criteria and both bounds, and MXFP4's power-of-two scales.
"""

import numpy as np
import pytest
import torch
from oracles import te
from support.cases import every
from support.operands import DTYPES, KINDS, ROTATED, draw
from torch import Tensor

from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Select
from ablate.verification import peers

SEEDS = range(9)


def assert_equal(ours: Operand, codes: Tensor, scales: Tensor, amax: Tensor) -> None:
    __tracebackhide__ = True
    tile_rows, _ = ours.quant.tile
    assert torch.equal(ours.block_scale[:, 0, :, 0].repeat_interleave(tile_rows, 0), scales.float())
    assert torch.equal(ours.values.float(), te.values(codes, scales))
    assert torch.equal(ours.amax.flatten(), amax.flatten())


def quantizer(tile: tuple[int, int] = (1, 16), **options):
    """TE's reference quantiser with options beyond rotation."""
    reference = te.reference()
    return reference.nvfp4.NVFP4QuantizerRef(dtype=reference.formats.E2M1, quant_tile_shape=tile, **options)


@every(seed=SEEDS, dtype=DTYPES, kind=KINDS)
def test_both_copies_of_a_tensor_equal_transformer_engines(kind, dtype, seed):
    x = draw(kind, dtype, seed)
    for block, tile in (("1x16", (1, 16)), ("16x16", (16, 16))):
        theirs, quant = te.quantizer(tile).quantize(x), Quant(block=block)
        assert_equal(quantize(x, quant), theirs.data, theirs.scale, theirs.global_amax_row)
        assert_equal(quantize(x.t(), quant), theirs.data_t, theirs.scale_t, theirs.global_amax_col)


@every(seed=SEEDS, kind=ROTATED)
def test_the_rotated_transposed_copy_equals_transformer_engines(kind, seed):
    x = draw(kind, "bf16", seed)  # TE rotates bf16 only
    theirs = te.quantizer((1, 16), rht=True).quantize(x)
    assert_equal(
        quantize(x.t(), Quant(), rotation=Hadamard()), theirs.data_t, theirs.scale_t, theirs.global_amax_col
    )
    assert_equal(quantize(x, Quant()), theirs.data, theirs.scale, theirs.global_amax_row)


@every(kind=[kind for kind in KINDS if kind != "tiny"], block=["1x16", "16x16"])
def test_decoding_multiplies_from_left_to_right_in_fp32(kind, block):
    x = draw(kind, "fp32", 1)
    theirs = te.quantizer(tuple(map(int, block.split("x")))).quantize(x)
    ones = torch.ones_like(theirs.scale, dtype=torch.float32)
    codes = te.values(theirs.data, ones).numpy()
    scales = theirs.scale.float().repeat_interleave(16, 1).numpy()
    expected = codes * ((scales * np.float32(theirs.global_amax_row)) * (np.float32(1) / np.float32(2688)))
    np.testing.assert_array_equal(quantize(x, Quant(block=block)).dequantize().numpy(), expected)


@every(seed=SEEDS, dtype=["bf16", "fp32"], kind=KINDS)
def test_both_copies_scaled_by_row_equal_transformer_engines(kind, dtype, seed):
    x = draw(kind, dtype, seed)
    theirs, quant = quantizer(row_scaled_nvfp4=True).quantize(x), Quant(outer=Outer(granularity="row"))
    assert_equal(quantize(x, quant), theirs.data, theirs.scale, theirs.global_amax_row)
    assert_equal(quantize(x.t(), quant), theirs.data_t, theirs.scale_t, theirs.global_amax_col)


@every(bound=[256, 448], criterion=["mae", "mse"], block=["1x16", "16x16"], kind=KINDS)
def test_four_over_six_equals_transformer_engines(kind, block, criterion, bound):
    tile = tuple(map(int, block.split("x")))
    options = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": bound, "nvfp4_4over6_err_mode": criterion.upper()}
    quant = Quant(
        block=block, select=Select(among="scales", criterion=criterion), outer=Outer(bound=float(bound))
    )
    for seed, dtype in ((0, "bf16"), (1, "fp32"), (2, "bf16")):
        x = draw(kind, dtype, seed)
        theirs = quantizer(tile, **options).quantize(x)
        assert_equal(quantize(x, quant), theirs.data, theirs.scale, theirs.global_amax_row)
        assert_equal(quantize(x.t(), quant), theirs.data_t, theirs.scale_t, theirs.global_amax_col)


@pytest.mark.parametrize("kind", KINDS)
def test_four_over_six_scaled_by_row_equals_transformer_engines(kind):
    quant = Quant(select=Select(among="scales", criterion="mae"), outer=Outer(granularity="row", bound=256.0))
    for seed, dtype in ((0, "bf16"), (1, "fp32")):
        x = draw(kind, dtype, seed)
        theirs = quantizer(row_scaled_nvfp4=True, nvfp4_use_4over6=True, nvfp4_e4m3_max=256).quantize(x)
        assert_equal(quantize(x, quant), theirs.data, theirs.scale, theirs.global_amax_row)


MXFP4 = Quant(block="1x32", scale=BlockScale(format="e8m0", rounding="ceil"), outer=None)


@every(seed=SEEDS, kind=KINDS)
def test_power_of_two_scales_rounded_up_equal_transformer_engines_mxfp4(kind, seed):
    # Its quantize() fails for 1x32 in 2.20 (no amax there), so the blockwise reference is called as quantize() would.
    x = draw(kind, "bf16", seed)
    x = x[:, : x.shape[1] // 32 * 32] if x.shape[1] >= 32 else x.repeat(1, 2)
    codes, scales = quantizer((1, 32))._quantize_blockwise_reference(
        x.contiguous(), x.abs().amax(), 32, 1, pow_2_scales=True, eps=0.0
    )
    ours = quantize(x, MXFP4, keep=True)
    assert torch.equal(ours.block_scale[:, 0, :, 0], scales)
    assert torch.equal(ours.codes, te.reference().nvfp4.cast_from_fp4x2(codes, torch.float32))


@pytest.mark.parametrize(("element", "dtype"), [("e4m3", torch.float8_e4m3fn), ("e5m2", torch.float8_e5m2)])
def test_fp8_codes_with_one_scale_a_tensor_equal_transformer_engines(element, dtype):
    """But for subnormal tensors: where S overflows, TE caps it by the input's dtype and not at FLT_MAX."""
    theirs = te.reference().current_scaling.CurrentScalingQuantizerRef(dtype)
    quant = Quant(element=element, block=None, scale=None, outer=Outer(bound=1.0))
    kinds = {name: x for name, x in peers.tensors().items() if name != "subnormal"}
    for name, x in kinds.items():
        assert torch.equal(quantize(x, quant).values.double(), theirs.quantize(x).data.double()), name
