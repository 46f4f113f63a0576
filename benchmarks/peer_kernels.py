"""Calls of each library that quantise one tensor to NVFP4 and dequantise it, on a CPU.

A builder imports its own library, and only that. It takes x, fp32 [rows, columns], and returns a call whose
result is the dequantised tensor, fp32 [rows, columns].
"""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from peer_entry import Entry
from torch import Tensor

from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Quant
from ablate.verification import peers

Call = Callable[[], Any]
NVFP4 = Quant()  # blocks of 1x16, E2M1, E4M3 scales, the tensor's amax, round to nearest
FAKE = "its fake quantiser needs CUDA"


def entries() -> list[Entry]:
    """Return ours first, then every library that is known to offer this, even if it cannot run here."""
    return [
        Entry(
            "ablate",
            "to the operand of a product: code x block scale, exact in bf16; its fp32 factor apart",
            "",
            ours,
        ),
        Entry(
            "ablate, dequantised",
            "the same, then dequantize() to fp32, which is plain torch",
            "",
            ours_dequantised,
        ),
        Entry(
            "Transformer Engine",
            "its Python reference, rows only; decoded to fp32",
            "transformer_engine",
            transformer_engine,
        ),
        Entry(
            "torchao", "NVFP4Tensor.to_nvfp4 with a per-tensor scale; dequantize to fp32", "torchao", torchao
        ),
        Entry(
            "torchao, compiled",
            "the same through torch.compile, as its documentation advises",
            "torchao",
            torchao_compiled,
        ),
        Entry(
            "compressed-tensors",
            "scheme NVFP4: dynamic scales, fake_quantize to fp32",
            "compressed-tensors",
            compressed,
        ),
        Entry(
            "fouroversix",
            "quantize_to_fp4 by static_6 (plain NVFP4), in PyTorch; dequantize to fp32",
            "fouroversix",
            fouroversix,
        ),
        Entry(
            "nvidia-modelopt",
            f"NVFP4QTensor: quantize, dequantize to fp32; {FAKE}",
            "nvidia-modelopt",
            modelopt,
        ),
        *absent(),
    ]


def absent() -> list[Entry]:
    """Return the public libraries that cannot be measured on such a machine, whatever is installed."""
    return [
        Entry(
            "microxcaling",
            "",
            "mx",
            why="not on PyPI; and its block scales are powers of two, so it computes MXFP4, not NVFP4",
        ),
        Entry("Quartet II", "", "quartet2", why="not on PyPI; and its kernels are CUDA for Blackwell"),
    ]


def exact(x: Tensor) -> Tensor:
    """Return our quantisation of x, dequantised, which the others are compared with."""
    return quantize(x, NVFP4).dequantize()


def ours(x: Tensor) -> Call:
    return partial(quantize, x, NVFP4)


def ours_dequantised(x: Tensor) -> Call:
    return partial(exact, x)


def transformer_engine(x: Tensor) -> Call:
    te = peers.te_reference()
    quantizer = te.nvfp4.NVFP4QuantizerRef(
        dtype=te.formats.E2M1, rowwise=True, columnwise=False, quant_tile_shape=(1, 16)
    )

    def call() -> Tensor:
        q = quantizer.quantize(x)
        return peers.te_values(q.data, q.scale) * (
            q.global_amax_row / 2688
        )  # it has no dequantize of its own

    return call


def torchao(x: Tensor) -> Call:
    from torchao.prototype.mx_formats.nvfp4_tensor import NVFP4Tensor, per_tensor_amax_to_scale

    def call() -> Tensor:
        return NVFP4Tensor.to_nvfp4(x, per_tensor_scale=per_tensor_amax_to_scale(x.abs().amax())).dequantize(
            torch.float32
        )

    return call


def torchao_compiled(x: Tensor) -> Call:
    return torch.compile(torchao(x))


def compressed(x: Tensor) -> Call:
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

    args = preset_name_to_scheme("NVFP4", ["Linear"]).input_activations

    def call() -> Tensor:
        outer = generate_gparam(*torch.aminmax(x))
        scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity(), global_scale=outer)
        return fake_quantize(x, scale, zero, args, global_scale=outer)

    return call


def fouroversix(x: Tensor) -> Call:
    import fouroversix as library

    config = library.QuantizationConfig(scale_rule="static_6")

    def call() -> Tensor:
        return library.dequantize(library.quantize_to_fp4(x, config), torch.float32)

    return call


def modelopt(x: Tensor) -> Call:
    from modelopt.torch.quantization.qtensor import NVFP4QTensor

    def call() -> Tensor:
        q, scale, outer = NVFP4QTensor.quantize(x, 16)
        return q.dequantize(torch.float32, scale=scale, double_scale=outer, block_sizes={-1: 16})

    return call
