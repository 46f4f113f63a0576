"""Adaptors of the public libraries that quantise to FP4 or MX formats: one set, for all benchmarks of them.

conformance.py examines their casts, exhaustive_cast.py enumerates them, and peers.py times them. Functions
import their library when they are called, and call what the library itself quantises with. Adaptors correct
nothing: a scale that a library expects from its caller is computed by that library's own function, or as its
own path computes it.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module, metadata
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ablate.errors import InputError, nearest
from ablate.numerics.spec import Quant, Range
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.recipe import Dgrad, Fprop, Products, Wgrad
from ablate.training.models import drawn
from ablate.verification import peers
from ablate.verification.conformance.subject import Quantised, Subject

Codes = Callable[[Tensor], Tensor]
"""Takes fp32 [n] and returns E2M1 values, of any float dtype."""
RoundTrip = Callable[[Tensor], Callable[[], Tensor]]
"""Takes fp32 [rows, columns] and returns a call that quantises it to NVFP4 and dequantises it to fp32."""


def _numpy(array: Any) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array))


# --- Transformer Engine: the Python reference of its kernels --------------------------------------


def transformer_engine(recipe: str) -> Subject:
    """Return the quantisers that TE makes for a recipe, with amax, codes and block scales.

    It is what NVIDIA's own kernel tests compare with. The reference rounds to nearest alone, also the
    gradient, which TE's kernels round stochastically; this is declared. Its MXFP4 rounds scales up.
    """
    name = "transformer_engine"
    if recipe == "mxfp4":
        return Subject(name, cast=lambda x: Quantised(None, *peers.te_mxfp4(x)), columns=32)
    bound = 6.0 * (256 if recipe == "four_over_six" else 448)  # the option nvfp4_e4m3_max
    options: dict[str, Any] = {"row_scaled_nvfp4": True} if recipe == "row_scaled" else {}
    if recipe == "four_over_six":
        options = {"nvfp4_use_4over6": True, "nvfp4_e4m3_max": 256, "nvfp4_4over6_err_mode": "mse"}

    def cast(x: Tensor, tile: tuple[int, int] = (1, 16)) -> Quantised:
        q = peers.te_quantizer(tile, **options).quantize(x)
        amax = q.global_amax_row.float()
        outer = amax / bound
        if amax.numel() > 1:
            return Quantised(None, q.data, q.scale, outer.reshape(-1, 1))
        return Quantised(None, q.data, q.scale, outer, amax)

    if recipe != "nvfp4":
        return Subject(name, cast=cast, rows=16)
    return Subject(
        name,
        cast=cast,
        cast_square=lambda x: cast(x, (16, 16)),
        rotate=lambda x: peers.te_quantizer(rht=True)._apply_rht(x),
        product=_te_product,
        rows=32,
        columns=32,
        variants={"random_gradients": "nearest"},
    )


def _te_product(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    gemm = partial(peers.te_reference().gemm.custom_gemm, out_dtype=torch.float32)
    qx, qdy = (peers.te_quantizer(rht=True).quantize(operand) for operand in (x, dy))
    qw = peers.te_quantizer((16, 16)).quantize(w)
    return (
        gemm(qw, qx, None, layout="TN", grad=False)[0],
        gemm(qw, qdy, None, layout="NN", grad=True)[0],
        gemm(qx, qdy, None, layout="NT", grad=True)[0],
    )


def te_codes() -> Codes:
    te = peers.te_reference().nvfp4
    return lambda x: te.cast_from_fp4x2(te.cast_to_fp4x2(x.view(1, -1)), torch.float32).view(-1)


def te_round_trip(x: Tensor) -> Callable[[], Tensor]:
    te = peers.te_reference()
    quantizer = te.nvfp4.NVFP4QuantizerRef(
        dtype=te.formats.E2M1, rowwise=True, columnwise=False, quant_tile_shape=(1, 16)
    )

    def call() -> Tensor:
        q = quantizer.quantize(x)
        return peers.te_values(q.data, q.scale) * (q.global_amax_row / 2688)  # it has no dequantize

    return call


class TeProducts(torch.autograd.Function):
    """fprop, dgrad and wgrad by TE's own dispatch. Each tensor is quantised once, in both directions."""

    @staticmethod
    def forward(ctx, x: Tensor, w: Tensor) -> Tensor:
        gemm = peers.te_reference().gemm.custom_gemm
        qx, qw = (
            peers.te_quantizer(rht=True).quantize(x),
            peers.te_quantizer((16, 16)).quantize(w.to(x.dtype)),
        )
        ctx.saved = qx, qw
        return gemm(qw, qx, None, out_dtype=x.dtype)[0]

    @staticmethod
    def backward(ctx, dy: Tensor) -> tuple[Tensor, Tensor]:
        gemm = peers.te_reference().gemm.custom_gemm
        (qx, qw), q = ctx.saved, peers.te_quantizer(rht=True).quantize(dy.contiguous())
        dx = gemm(qw, q, None, out_dtype=dy.dtype, layout="NN", grad=True)[0]
        return dx, gemm(qx, q, None, out_dtype=torch.float32, layout="NT", grad=True)[0]


class TeLinear(nn.Module):
    """A linear without bias on TeProducts; it keeps the parameter of the one it replaces."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.weight = linear.weight

    def forward(self, x: Tensor) -> Tensor:
        return TeProducts.apply(x.reshape(-1, x.shape[-1]), self.weight).view(*x.shape[:-1], -1)


# --- torchao: prototype.mx_formats, what its inference and its MXFP8 training call ------------------


def _torchao(module: str) -> Any:
    for name in ("torchao", "torch.utils._pytree"):  # they log missing GPU libraries, and deprecations
        logging.getLogger(name).setLevel(logging.ERROR)
    return import_module(f"torchao.prototype.{module}")


def torchao(recipe: str) -> Subject:
    """Return `nvfp4_quantize` with the tensor's scale, `per_tensor_amax_to_scale`; or `to_mx`.

    NVFP4: `NVFP4DynamicActivationNVFP4WeightConfig` computes the tensor scale likewise from the amax of each
    call. MX: `MXTensor.to_mx` with the recipe's scale rule; `mxfp8` also has the product of
    `moe_training.mxfp8_linear`, emulated.
    """
    if recipe == "nvfp4":
        nvfp4 = _torchao("mx_formats.nvfp4_tensor")

        def given(x: Tensor, amax: Tensor) -> Quantised:
            outer = nvfp4.per_tensor_amax_to_scale(amax)
            scales, codes = nvfp4.nvfp4_quantize(x, 16, outer)
            return Quantised(None, codes, scales, outer, amax.float())

        return Subject("torchao", cast=lambda x: given(x, x.abs().amax()), cast_given=given)
    tensors = _torchao("mx_formats.mx_tensor")
    modes = _torchao("mx_formats.config").ScaleCalculationMode
    element = torch.float4_e2m1fn_x2 if recipe == "mxfp4" else torch.float8_e4m3fn
    mode = modes.FLOOR if recipe == "mxfp4" else modes.RCEIL

    def mx(x: Tensor) -> Quantised:
        scales, codes = tensors.to_mx(x, element, 32, mode)
        return Quantised(tensors.to_dtype(codes, scales, element, 32, torch.float32), codes, scales)

    def product(x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        linear = _torchao("moe_training.mxfp8_linear")
        x, w = x.detach().requires_grad_(), w.detach().requires_grad_()
        y = linear._to_mxfp8_then_scaled_mm(x, w, linear.KernelPreference.EMULATED, mode)
        y.backward(dy)
        return y.detach(), x.grad, w.grad

    return Subject("torchao", cast=mx, columns=32, product=product if recipe == "mxfp8" else None)


def torchao_codes() -> Codes:
    kernels = _torchao("mx_formats.kernels")
    return lambda x: kernels.f4_unpacked_to_f32(kernels.f32_to_f4_unpacked(x))


def torchao_round_trip(x: Tensor) -> Callable[[], Tensor]:
    nvfp4 = _torchao("mx_formats.nvfp4_tensor")

    def call() -> Tensor:
        outer = nvfp4.per_tensor_amax_to_scale(x.abs().amax())
        return nvfp4.NVFP4Tensor.to_nvfp4(x, per_tensor_scale=outer).dequantize(torch.float32)

    return call


def torchao_linear(linear: nn.Linear) -> nn.Module:
    training = _torchao("moe_training.nvfp4_training.nvfp4_training")
    return training.NVFP4Linear.from_linear(linear)


# --- compressed-tensors, the format of llm-compressor and vLLM ------------------------------------

COMPRESSED = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
}


def compressed_tensors(recipe: str) -> Subject:
    """Return scales by `compute_dynamic_scales_and_zp` and codes by the format's compressor.

    The tensor's scale is `generate_gparam` of its minimum and maximum, as llm-compressor's observers compute
    it. It multiplies block scales, so that `outer` is its reciprocal. MX scales are powers of two by the rule
    that AMD calls "even", up from a mantissa of 1.75, for E4M3 elements as well.
    """
    from compressed_tensors.compressors import BaseCompressor
    from compressed_tensors.quantization.quant_scheme import preset_name_to_scheme
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

    scheme = preset_name_to_scheme(recipe.upper(), ["Linear"])
    compressor = BaseCompressor.get_value_from_registry(COMPRESSED[recipe])

    def given(x: Tensor, amax: Tensor) -> Quantised:
        whole = generate_gparam(-amax, amax) if recipe == "nvfp4" else None
        scales, _ = compute_dynamic_scales_and_zp(x, scheme.weights, torch.nn.Module(), global_scale=whole)
        state = {"weight": x, "weight_scale": scales}
        if whole is not None:
            state["weight_global_scale"] = whole
        packed = compressor.compress(state, scheme)
        codes = packed["weight_packed"] if "weight_packed" in packed else packed["weight"]
        return Quantised(None, codes, packed["weight_scale"], None if whole is None else 1 / whole)

    def cast(x: Tensor) -> Quantised:
        return given(x, x.abs().amax())

    if recipe == "nvfp4":
        return Subject("compressed_tensors", cast=cast, cast_given=given)
    return Subject("compressed_tensors", cast=cast, columns=32)


def compressed_codes() -> Codes:
    return import_module("compressed_tensors.quantization.quant_args").FP4_E2M1_DATA.cast_to_fp4


def compressed_round_trip(x: Tensor) -> Callable[[], Tensor]:
    from compressed_tensors.quantization import preset_name_to_scheme
    from compressed_tensors.quantization.lifecycle.forward import fake_quantize
    from compressed_tensors.quantization.utils import compute_dynamic_scales_and_zp, generate_gparam

    args = preset_name_to_scheme("NVFP4", ["Linear"]).input_activations

    def call() -> Tensor:
        outer = generate_gparam(*torch.aminmax(x))
        scale, zero = compute_dynamic_scales_and_zp(x, args, torch.nn.Identity(), global_scale=outer)
        return fake_quantize(x, scale, zero, args, global_scale=outer)

    return call


# --- NVIDIA Model Optimizer: quantization.qtensor, the casts of its exported checkpoints -------------


def modelopt(recipe: str) -> Subject:
    """Return `NVFP4QTensor`, `MXFP4QTensor` or `MXFP8QTensor`, which compute their scales from the tensor.

    Its fake quantisers need CUDA, and are not examined. A block scale of zero is stored as 1; MXFP4 rounds
    scales up.
    """
    from modelopt.torch.quantization.qtensor import MXFP4QTensor, MXFP8QTensor, NVFP4QTensor

    def nvfp4(x: Tensor, outer: Tensor | None = None) -> Quantised:
        q, scales, outer = NVFP4QTensor.quantize(x, 16, weights_scaling_factor_2=outer)
        values = q.dequantize(torch.float32, scale=scales, double_scale=outer, block_sizes={-1: 16})
        return Quantised(values, q._quantized_data, scales, outer)

    def mxfp4(x: Tensor) -> Quantised:
        q, scales = MXFP4QTensor.quantize(x, 32)
        values = q.dequantize(torch.float32, scale=scales, block_sizes={-1: 32})
        return Quantised(values, q._quantized_data, scales.view(len(x), -1))

    def mxfp8(x: Tensor) -> Quantised:
        q, scales = MXFP8QTensor.quantize(x)
        return Quantised(q.dequantize(torch.float32, scale=scales), q._quantized_data, scales)

    if recipe == "nvfp4":
        return Subject("modelopt", cast=nvfp4, cast_given=lambda x, amax: nvfp4(x, amax.float() / 2688))
    return Subject("modelopt", cast=mxfp4 if recipe == "mxfp4" else mxfp8, columns=32)


def modelopt_codes() -> Codes:
    tensors = import_module("modelopt.torch.quantization.qtensor").NVFP4QTensor
    values = torch.tensor([*(v := [0, 0.5, 1, 1.5, 2, 3, 4, 6]), *(-z for z in v)])
    return lambda x: values[tensors._cast_fp4(x.clone()).int()]


def modelopt_round_trip(x: Tensor) -> Callable[[], Tensor]:
    cast = modelopt("nvfp4").cast
    return lambda: cast(x).values


# --- fouroversix: the PyTorch back end of its authors, which needs no GPU --------------------------


def fouroversix(recipe: str) -> Subject:
    """Return `quantize_to_fp4` of the reference, without padding and swizzle.

    The stochastic cast draws from torch's generator, which is seeded around it. MXFP4 rounds scales up.
    """
    from fouroversix.quantize.pytorch.reference import quantize_to_fp4
    from fouroversix.utils import DataType, RoundStyle, ScaleRule

    kind = DataType("mxfp4" if recipe == "mxfp4" else "nvfp4")
    own = "mse" if recipe == "four_over_six" else "static_6"
    bound = 6.0 * (256 if recipe == "four_over_six" else 448)

    def quantised(
        x: Tensor, amax: Tensor | None = None, square: bool = False, style: str = "nearest", rule: str = own
    ) -> Quantised:
        codes, scales, amax = quantize_to_fp4(
            x,
            amax,
            fp4_format=kind,
            scale_rule=ScaleRule(rule),
            round_style=RoundStyle(style),
            block_scale_2d=square,
            use_blackwell_scale_layout=False,
        )
        scales = scales.view(len(x), -1)
        if recipe == "mxfp4":
            return Quantised(None, codes, scales)
        return Quantised(None, codes, scales, amax / bound, amax)

    def stochastic(x: Tensor, seed: int) -> Quantised:
        with drawn(seed):
            return quantised(x, style="stochastic", rule="static_6")

    if recipe == "mxfp4":
        return Subject("fouroversix", cast=quantised, columns=32)
    if recipe == "four_over_six":
        return Subject("fouroversix", cast=quantised, cast_given=quantised)
    return Subject(
        "fouroversix",
        cast=quantised,
        cast_given=quantised,
        cast_square=lambda x: quantised(x, square=True),
        cast_stochastic=stochastic,
        rows=16,
    )


def fouroversix_codes() -> Codes:
    return import_module("fouroversix.quantize.pytorch.reference").fake_quantize_to_e2m1


def fouroversix_round_trip(x: Tensor) -> Callable[[], Tensor]:
    import fouroversix as library

    config = library.QuantizationConfig(scale_rule="static_6")
    return lambda: library.dequantize(library.quantize_to_fp4(x, config), torch.float32)


class OneSequence(nn.Module):
    """All tokens as one sequence: fouroversix's backward pass takes a batch of one."""

    def __init__(self, linear: nn.Module) -> None:
        super().__init__()
        self.linear = linear

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x.reshape(1, -1, x.shape[-1])).view(*x.shape[:-1], -1)


def fouroversix_linear(linear: nn.Linear) -> nn.Module:
    import fouroversix as library
    from fouroversix.quantize.pytorch import backend

    # As shipped, wgrad fails on a CPU: the back end builds its Hadamard matrix on "cuda" for any tensor.
    if not isinstance(backend.get_rht_matrix, partial):
        backend.get_rht_matrix = partial(backend.get_rht_matrix, device="cpu")
    how = library.ModuleQuantizationConfig(
        scale_rule="static_6", keep_master_weights=True, weight_scale_2d=True
    )
    return OneSequence(library.FourOverSixLinear(linear, how))


# --- libraries with casts alone -------------------------------------------------------------------


def mlx(recipe: str) -> Subject:
    """Return `quantize` and `dequantize` of Apple's MLX on its CPU back end; mode: the recipe's name.

    NVFP4 has its tensor scale only if the amax is given as `global_scale`, as `mlx.nn` does for activations;
    without it block scales are amax / 6. MX rounds scales up.
    """
    import mlx.core as mx

    length = 16 if recipe == "nvfp4" else 32

    def cast(x: Tensor) -> Quantised:
        return given(x, x.float().abs().max())

    def given(x: Tensor, largest: Tensor) -> Quantised:
        array = mx.array(x.float().numpy())
        if x.dtype == torch.bfloat16:
            array = array.astype(mx.bfloat16)
        amax = largest if recipe == "nvfp4" else None
        form = {
            "mode": recipe,
            "global_scale": None if amax is None else mx.array(amax.item()),
            "stream": mx.cpu,
        }
        codes, scales = mx.quantize(array, **form)
        return Quantised(
            _numpy(np.array(mx.dequantize(codes, scales, dtype=mx.float32, **form))),
            _numpy(np.array(codes).view(np.uint8).copy()).view(len(x), -1),
            _numpy(np.array(scales)).view(len(x), x.shape[1] // length),
            None if amax is None else amax / 2688,
            amax,
        )

    return Subject("mlx", cast=cast, cast_given=given if recipe == "nvfp4" else None, columns=length)


def auto_round(recipe: str) -> Subject:
    """Return `nv_fp4` of Intel's AutoRound, or `quant_mx` (floor) for MXFP4 and `quant_mx_rceil` for MXFP8.

    Each fakes quantisation: values in the dtype of x, and scales in fp32 (NVFP4) or as exponents (MX). The
    tensor scale of NVFP4 is `calculate_gparam`, 2688 / amax.
    """
    from auto_round.data_type import mxfp, nvfp

    def nvfp4(x: Tensor, amax: Tensor | None = None) -> Quantised:
        whole = nvfp.calculate_gparam(x if amax is None else amax)
        values, scales, _ = nvfp.nv_fp4(x, global_scale=whole)
        return Quantised(values, None, scales.view(len(x), -1), nvfp.get_reciprocal(whole))

    def mx(x: Tensor) -> Quantised:
        function = mxfp.quant_mx if recipe == "mxfp4" else mxfp.quant_mx_rceil
        values, exponents, _ = function(x, bits=4 if recipe == "mxfp4" else 8, group_size=32)
        return Quantised(values, None, torch.exp2(exponents.float()).view(len(x), -1))

    if recipe == "nvfp4":
        return Subject("auto_round", cast=nvfp4, cast_given=nvfp4)
    return Subject("auto_round", cast=mx, columns=32)


def comfy_kitchen(recipe: str) -> Subject:
    """Return `quantize_nvfp4` or `quantize_mxfp8` of ComfyUI's kernels, by the eager back end; scales are in
    the layout of tensor cores.

    The tensor scale of NVFP4 is amax / 2688 in the dtype of x, as `TensorCoreNVFP4Layout` computes it.
    `hi_first=False` asks for the even column in the low nibble; the library's own order is the opposite one.
    """
    import comfy_kitchen

    def given(x: Tensor, amax: Tensor) -> Quantised:
        outer = (amax / (448.0 * 6.0)).float()
        codes, scales = comfy_kitchen.quantize_nvfp4(x, outer, hi_first=False)
        values = comfy_kitchen.dequantize_nvfp4(codes, outer, scales, torch.float32, hi_first=False)
        return Quantised(values, codes, scales, outer)

    def mxfp8(x: Tensor) -> Quantised:
        codes, scales = comfy_kitchen.quantize_mxfp8(x)
        return Quantised(comfy_kitchen.dequantize_mxfp8(codes, scales, torch.float32), codes, scales)

    def nvfp4(x: Tensor) -> Quantised:
        return given(x, torch.amax(x.abs()))

    if recipe == "nvfp4":
        return Subject("comfy_kitchen", cast=nvfp4, cast_given=given, swizzled=True)
    return Subject("comfy_kitchen", cast=mxfp8, columns=32, swizzled=True)


def fireworks_prequant(recipe: str) -> Subject:
    """Return `quantize_weight` of Fireworks' checkpoints, which stores the reciprocal of the tensor scale."""
    from fireworks_prequant.quantize import quantize_weight

    def cast(x: Tensor) -> Quantised:
        q = quantize_weight("x.weight", x, device="cpu")
        codes = q["x.weight"].view(torch.uint8)
        return Quantised(None, codes, q["x.weight_scale_inv"], q["x.weight_scale_global"])

    return Subject("fireworks_prequant", cast=cast)


def qwix(recipe: str) -> Subject:
    """Return `quantize` of Google's Qwix for JAX, of blocks along the columns; type: the recipe's name.

    It has no tensor scale: NVFP4 here is E2M1 with E4M3 scales of amax / 6; MX rounds scales up. Scales are
    computed and returned in the dtype of x.
    """
    import jax.numpy as jnp
    import qwix

    length = 16 if recipe == "nvfp4" else 32

    def cast(x: Tensor) -> Quantised:
        array = jnp.asarray(
            x.float().numpy(), dtype=jnp.bfloat16 if x.dtype == torch.bfloat16 else jnp.float32
        )
        q = qwix.quantize(array, recipe, channelwise_axes=(0,), tiled_axes={1: length})
        values, codes, scales = (
            _numpy(np.asarray(part.astype(jnp.float32)).copy())
            for part in (qwix.dequantize(q), q.qvalue, q.scale)
        )
        return Quantised(values.to(x.dtype), codes, scales)

    return Subject("qwix", cast=cast, columns=length)


def qwantize(recipe: str) -> Subject:
    """Return `nvfp4_naive` or `mxfp4_naive` of the blocks of a matrix: its baselines without a search.

    It has no tensor scale: NVFP4 here is E2M1 with E4M3 scales of amax / 6.
    """
    import qwantize

    function = {"nvfp4": qwantize.nvfp4_naive, "mxfp4": qwantize.mxfp4_naive}[recipe]
    length = 16 if recipe == "nvfp4" else 32

    def cast(x: Tensor) -> Quantised:
        scales, codes, values = function(x.reshape(len(x), -1, length), return_dequant=True)
        return Quantised(values.reshape(x.shape), codes.reshape(x.shape), scales)

    return Subject("qwantize", cast=cast, columns=length)


def breccia(recipe: str) -> Subject:
    """Return `cast` and `dequantize` of its NumPy kernels with `NVFP4BlockScaling` or `MXFP8BlockScaling`.

    It has no tensor scale: NVFP4 here is E2M1 with E4M3 scales of amax / 6. MXFP8 rounds the logarithm of its
    scale to nearest.
    """
    import breccia

    scaling = breccia.NVFP4BlockScaling() if recipe == "nvfp4" else breccia.MXFP8BlockScaling()

    def cast(x: Tensor) -> Quantised:
        q = breccia.cast(x.float().numpy(), scaling)
        return Quantised(*map(torch.from_numpy, (breccia.dequantize(q), q.data, q.scale)))

    return Subject("breccia", cast=cast, columns=16 if recipe == "nvfp4" else 32)


def quark(recipe: str) -> Subject:
    """Return AMD Quark's `fake_quantize_mx` with its default scale_calculation_mode, "even".

    That rule rounds amax to the element's mantissa bits before it takes the power of two: up from a mantissa
    of 1.75 for E2M1, and of 1.9375 for E4M3. It emulates MX hardware, compiled at first use.
    """
    from quark.torch.kernel.hw_emulation.hw_emulation_interface import fake_quantize_mx

    element = {"mxfp4": "fp4", "mxfp8": "fp8_e4m3"}[recipe]
    return Subject("quark", cast=lambda x: fake_quantize_mx(x, -1, 32, mx_element_dtype=element), columns=32)


def brevitas(recipe: str) -> Subject:
    """Return AMD Brevitas' `QuantIdentity` with `MXFloat8e4m3Act`, or with a subclass of it for E2M1.

    Its examples make such subclasses. Scales follow OCP's floor rule.
    """
    import brevitas.nn
    from brevitas.quant.mx_quant_ocp import MXFloat8e4m3Act

    class MXFloat4e2m1Act(MXFloat8e4m3Act):
        bit_width = 4
        exponent_bit_width = 2
        mantissa_bit_width = 1

    quantiser = MXFloat8e4m3Act if recipe == "mxfp8" else MXFloat4e2m1Act
    module = brevitas.nn.QuantIdentity(quantiser, group_dim=-1, return_quant_tensor=True).eval()

    def cast(x: Tensor) -> Quantised:
        result = module(x)
        return Quantised(result.value.detach(), None, result.scale.detach()[:, ::32].float())

    return Subject("brevitas", cast=cast, columns=32)


def neural_compressor(recipe: str) -> Subject:
    """Return `quantize_mx_op` of Intel Neural Compressor with rounding "even"; scales by OCP's floor rule.

    It descends from Microsoft's microxcaling.
    """
    from neural_compressor.torch.algorithms.mx_quant.utils import quantize_mx_op

    element = {"mxfp4": "fp4", "mxfp8": "fp8_e4m3"}[recipe]

    def cast(x: Tensor) -> Tensor:
        return quantize_mx_op(x, element, round="even", block_size=32, axes=-1)

    return Subject("neural_compressor", cast=cast, columns=32)


def gfloat(recipe: str) -> Subject:
    """Return `quantize_block` of Graphcore's gfloat with OCP's rule, `compute_scale_amax` (floor)."""
    import gfloat
    from gfloat import formats

    form = {"mxfp4": formats.format_info_mxfp4_e2m1, "mxfp8": formats.format_info_mxfp8_e4m3}[recipe]

    def cast(x: Tensor) -> Quantised:
        blocks = x.double().reshape(-1, form.k).numpy()
        values = [gfloat.quantize_block(form, block, gfloat.compute_scale_amax) for block in blocks]
        scales = [gfloat.compute_scale_amax(form.etype.emax, block) for block in blocks]
        return Quantised(
            torch.from_numpy(np.stack(values)).view(x.shape).float(),
            None,
            torch.tensor(scales).view(len(x), -1).float(),
        )

    return Subject("gfloat", cast=cast, columns=32)


def gfloat_codes() -> Codes:
    gf, formats = import_module("gfloat"), import_module("gfloat.formats")
    cast = partial(gf.round_ndarray, formats.format_info_ocp_e2m1, rnd=gf.RoundMode.TiesToEven, sat=True)
    return lambda x: torch.from_numpy(cast(x.double().numpy()))


def pychop(recipe: str) -> Subject:
    """Return `mx_quantize` of the simulator Pychop, with the PyTorch back end; scales by OCP's floor rule."""
    import pychop

    form = {"mxfp4": "mxfp4_e2m1", "mxfp8": "mxfp8_e4m3"}[recipe]
    cast = partial(pychop.mx_quantize, format=form, backend="torch")
    return Subject("pychop", cast=cast, columns=32, dtypes=("float32",))


def custom_float_quant(recipe: str) -> Subject:
    """Return `quantize_array_block_scaled` of a NumPy simulator, blocks of 32 with power-of-two scales.

    Its parameter `margin`, 0.95 by default, is 1 here: amax / max is then rounded up to a power of two.
    """
    from custom_float_quant.core import CustomFloat

    form = CustomFloat.mxfp4_e2m1 if recipe == "mxfp4" else CustomFloat.mxfp8_e4m3

    def cast(x: Tensor) -> Quantised:
        values, scales = form().quantize_array_block_scaled(x.double().numpy(), block_size=32, margin=1.0)
        return Quantised(torch.from_numpy(values).float(), None, torch.from_numpy(1 / scales).float())

    return Subject("custom_float_quant", cast=cast, columns=32)


def gguf(recipe: str) -> Subject:
    """Return `quantize` and `dequantize` of llama.cpp's type MXFP4 in NumPy; scales by OCP's floor rule.

    A block is 17 bytes: the E8M0 byte, then the codes, whose order within a block is llama.cpp's own. Its
    NVFP4 reads only.
    """
    from gguf import GGMLQuantizationType, quants

    def cast(x: Tensor) -> Quantised:
        q = quants.quantize(x.float().numpy(), GGMLQuantizationType.MXFP4)
        values = torch.from_numpy(quants.dequantize(q, GGMLQuantizationType.MXFP4))
        return Quantised(values, None, _numpy(q.reshape(len(x), -1, 17)[:, :, 0]))

    return Subject("gguf", cast=cast, columns=32)


def ml_dtypes_codes() -> Codes:
    kind = import_module("ml_dtypes").float4_e2m1fn
    return lambda x: torch.from_numpy(x.numpy().astype(kind).astype(np.float32))


# --- the libraries --------------------------------------------------------------------------------


@dataclass(frozen=True)
class Library:
    """One public library, and what it offers."""

    package: str
    """Distribution on the Python package index."""
    subject: Callable[[str], Subject] | None = None
    """Its functions for a recipe, as the conformance kit calls them."""
    recipes: dict[str, str] | None = None
    """Presets whose cast it has, each with the change that it makes by design: a key of CHANGES, or none."""
    install: str = ""
    """Arguments of pip, if not the package alone."""
    codes: Callable[[], Codes] | None = None
    """Its own cast to E2M1."""
    round_trip: RoundTrip | None = None
    linear: Callable[[nn.Linear], nn.Module] | None = None
    """Replacement of a linear layer by its NVFP4 training."""

    @property
    def command(self) -> str:
        """Command that installs it."""
        return f"pip install {self.install or self.package}"

    @property
    def version(self) -> str | None:
        """Installed version, or None; imports nothing."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


CHANGES = {
    "floor": "block scales are rounded down, as OCP's specification has it",
    "ceil": "block scales are rounded up",
    "even": "block scales are rounded up from a mantissa of 1.75 (E2M1) or 1.9375 (E4M3)",
    "even, E2M1's": "block scales are rounded up from a mantissa of 1.75, for E4M3 as well",
    "one level": "no tensor scale",
}
"""Legitimate differences of libraries from a preset, in words."""
MAPPED = {"even": {"e2m1": 3.5, "e4m3": 248.0}, "even, E2M1's": {"e2m1": 3.5, "e4m3": 224.0}}
"""Magnitudes from which on the rules "even" take the next power of two, for a block scale of 1."""
LIBRARIES = {
    "transformer_engine": Library(
        "transformer-engine",
        transformer_engine,
        {"nvfp4": "", "four_over_six": "", "row_scaled": "", "mxfp4": "ceil"},
        "transformer-engine==2.20.2",
        te_codes,
        te_round_trip,
        TeLinear,
    ),
    "torchao": Library(
        "torchao",
        torchao,
        {"nvfp4": "", "mxfp4": "", "mxfp8": ""},
        codes=torchao_codes,
        round_trip=torchao_round_trip,
        linear=torchao_linear,
    ),
    "compressed_tensors": Library(
        "compressed-tensors",
        compressed_tensors,
        {"nvfp4": "", "mxfp4": "even", "mxfp8": "even, E2M1's"},
        codes=compressed_codes,
        round_trip=compressed_round_trip,
    ),
    "modelopt": Library(
        "nvidia-modelopt",
        modelopt,
        {"nvfp4": "", "mxfp4": "ceil", "mxfp8": ""},
        codes=modelopt_codes,
        round_trip=modelopt_round_trip,
    ),
    "fouroversix": Library(
        "fouroversix",
        fouroversix,
        {"nvfp4": "", "four_over_six": "", "mxfp4": "ceil"},
        "--no-build-isolation --no-deps fouroversix",
        fouroversix_codes,
        fouroversix_round_trip,
        fouroversix_linear,
    ),
    "mlx": Library("mlx", mlx, {"nvfp4": "", "mxfp4": "ceil", "mxfp8": ""}, "mlx[cpu]"),
    "auto_round": Library("auto-round", auto_round, {"nvfp4": "", "mxfp4": "", "mxfp8": ""}),
    "comfy_kitchen": Library("comfy-kitchen", comfy_kitchen, {"nvfp4": "", "mxfp8": ""}),
    "fireworks_prequant": Library("fireworks-prequant", fireworks_prequant, {"nvfp4": ""}),
    "qwix": Library("qwix", qwix, {"nvfp4": "one level", "mxfp4": "ceil", "mxfp8": ""}),
    "qwantize": Library("qwantize", qwantize, {"nvfp4": "one level", "mxfp4": ""}),
    "breccia": Library("breccia", breccia, {"nvfp4": "one level", "mxfp8": ""}),
    "quark": Library("amd-quark", quark, {"mxfp4": "even", "mxfp8": "even"}),
    "brevitas": Library("brevitas", brevitas, {"mxfp4": "", "mxfp8": "floor"}),
    "neural_compressor": Library("neural-compressor-pt", neural_compressor, {"mxfp4": "", "mxfp8": "floor"}),
    "gfloat": Library("gfloat", gfloat, {"mxfp4": "", "mxfp8": "floor"}, codes=gfloat_codes),
    "pychop": Library("pychop", pychop, {"mxfp4": "", "mxfp8": "floor"}),
    "custom_float_quant": Library("custom-float-quant", custom_float_quant, {"mxfp4": "ceil", "mxfp8": ""}),
    "gguf": Library("gguf", gguf, {"mxfp4": ""}),
    "ml_dtypes": Library("ml_dtypes", codes=ml_dtypes_codes),
}
"""Libraries by the name that they are imported by."""


def library_subject(name: str, recipe: str) -> Subject:
    """Return a library's functions for a recipe, with its installed version.

    Raises:
        InputError: there is no such library or recipe, or it is not installed.
    """
    if name not in LIBRARIES:
        raise InputError(f"{name}: no such library; {nearest(name, LIBRARIES)}")
    library = LIBRARIES[name]
    if library.subject is None or recipe not in (library.recipes or {}):
        raise InputError(f"{name} has no cast of {recipe}; it has {', '.join(library.recipes or ['none'])}")
    if library.version is None:
        raise InputError(f"{name} is not installed: {library.command}")
    return replace(library.subject(recipe), version=library.version)


def claimed(name: str, recipe: str) -> Recipe:
    """Return the recipe that a library implements: a preset, with the library's change by design."""
    change, whole = (LIBRARIES[name].recipes or {})[recipe], PRESETS[recipe]()
    quant = whole.fprop.x
    assert quant is not None
    if change in ("floor", "ceil"):
        return _alike(peers.mx(quant.element, change))
    if change in MAPPED:
        target = Range(map_to=MAPPED[change][quant.element])
        return _alike(peers.mx(quant.element, "floor").model_copy(update={"range": target}))
    return _alike(quant.model_copy(update={"outer": None})) if change == "one level" else whole


def _alike(quant: Quant) -> Recipe:
    fprop, dgrad, wgrad = Fprop(x=quant, w=quant), Dgrad(g=quant, w=quant), Wgrad(g=quant, x=quant)
    return Recipe.of(Products(fprop=fprop, dgrad=dgrad, wgrad=wgrad))
