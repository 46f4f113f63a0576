"""Transformer Engine's own Python on a CPU: its native extension replaced by names, its native quantisers by its references'.

For a process of its own, since it changes torch. It proves what TE's modules do with a recipe, not what its kernels compute. Stochastic
rounding and MXFP8, which TE's reference has not, are written out here.
"""

import enum
import importlib.machinery
import os
import sys
from copy import copy
from functools import cache
from types import ModuleType, SimpleNamespace

import torch
import torch._dynamo  # before there are modules without a file, which it would look into


class _Names(type):
    """A class that has whatever attribute it is asked for: numbers, each another, so that none is taken for a mode or an index."""

    def __getattr__(cls, name: str) -> int:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(cls, name, -1000 - len(vars(cls)))
        return getattr(cls, name)


class _Extension(ModuleType):
    def __getattr__(self, name: str) -> type:
        if name.startswith("__"):
            raise AttributeError(name)
        setattr(self, name, _Names(name, (), {}))
        return getattr(self, name)


_FWD = [f"GEMM{n}_{tensor}" for n in (1, 2, 3) for tensor in ("INPUT", "WEIGHT", "OUTPUT")]
_BWD = [f"GRAD_{tensor}{n}" for n in (1, 2, 3) for tensor in ("OUTPUT", "INPUT")]
_TYPES = {
    "kByte": 0,
    "kInt32": 2,
    "kFloat32": 4,
    "kFloat16": 5,
    "kBFloat16": 6,
    "kFloat8E4M3": 7,
    "kFloat8E5M2": 8,
    "kFloat4E2M1": 10,
}
_ENUMS = {
    "DType": _TYPES,
    "FP8FwdTensors": {name: n for n, name in enumerate(_FWD)},
    "FP8BwdTensors": {name: n for n, name in enumerate(_BWD)},
    "NVTE_Fused_Attn_Backend": {"NVTE_No_Backend": 0, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
}
"""Those that TE checks, or indexes lists by."""


_ROWS_AND_COLUMNS = {
    "_rowwise_data": "data",
    "_rowwise_scale_inv": "scale",
    "_columnwise_data": "data_t",
    "_columnwise_scale_inv": "scale_t",
}
_NATIVE_NAMES = {
    "NVFP4TensorRef": _ROWS_AND_COLUMNS
    | {"_amax_rowwise": "global_amax_row", "_amax_columnwise": "global_amax_col"},
    "CurrentScalingTensorRef": {"_transpose": "data_t"},
}
"""Under which names a native tensor has what the reference's has."""
NATIVE: dict[str, type] = {}
"""TE's own quantisers, which know the shapes of their storage."""
DRAWN = torch.Generator()
"""In the place of the GPU's generator."""


def install() -> ModuleType:
    """Import `transformer_engine.pytorch` over the double, and return it."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    os.environ["NVTE_FRAMEWORK"] = "none"
    extension = _extension("transformer_engine_torch")
    for name, members in _ENUMS.items():
        setattr(extension, name, enum.IntEnum(name, members))
    extension.generic_gemm = _multiplied
    extension.te_general_grouped_gemm = _multiplied_in_groups
    extension.quantize = scaled
    extension.fused_amax_and_scale_update_after_reduction = _moved_on
    extension.get_cublasLt_version = lambda: 130200
    for name in ("einops", "transformer_engine.pytorch.onnx_extensions"):
        _extension(name)
    torch.cuda.is_available = lambda: True
    torch.cuda.current_device = lambda: 0
    torch.cuda.is_current_stream_capturing = lambda: False
    torch.cuda.get_device_capability = lambda *_: (10, 0)
    torch.cuda.get_device_properties = lambda *_: SimpleNamespace(major=10, minor=0, multi_processor_count=1)

    import transformer_engine.common

    transformer_engine.common.load_framework_extension = lambda _: None
    import transformer_engine.pytorch as te
    from transformer_engine.pytorch.cpp_extensions import gemm
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
        CurrentScalingQuantizerRef,
        CurrentScalingTensorRef,
    )
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef, NVFP4TensorRef
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.quantization import DelayedScalingRecipeState
    from transformer_engine.pytorch.tensor import float8_tensor, mxfp8_tensor, nvfp4_tensor

    NVFP4QuantizerRef.__call__ = CurrentScalingQuantizerRef.__call__ = _cast
    NATIVE.update(NVFP4=nvfp4_tensor.NVFP4Quantizer, MXFP8=mxfp8_tensor.MXFP8Quantizer)
    for kind in (NVFP4TensorRef, CurrentScalingTensorRef):
        kind.size = lambda made, *dimension: torch.empty(made.original_shape, device="meta").size(*dimension)
        for native, its in _NATIVE_NAMES[kind.__name__].items():
            setattr(kind, native, property(lambda made, its=its: getattr(made, its)))
    CurrentScalingTensorRef.get_data_tensors = lambda _: ()
    CurrentScalingTensorRef.clear = lambda _: None
    CurrentScalingTensorRef.dequantize = lambda made, *, dtype: made._quantizer.dequantize(
        made.data, made.scale, dtype
    )
    float8_tensor.Float8CurrentScalingQuantizer = te.Float8CurrentScalingQuantizer = current
    mxfp8_tensor.MXFP8Quantizer = te.MXFP8Quantizer = microscaled
    NVFP4TensorRef.get_data_tensors = lambda _: ()  # what a hybrid one asks for before it lets go of data
    NVFP4TensorRef.clear = lambda _: None
    NVFP4TensorRef.dequantize = _dequantized
    torch.cuda.is_available = lambda: False
    TransformerEngineBaseModule.__init__ = _with_a_gpu(TransformerEngineBaseModule.__init__)
    TransformerEngineBaseModule.prepare_forward = _on_a_gpu(TransformerEngineBaseModule.prepare_forward)
    DelayedScalingRecipeState.__init__ = _on_this(DelayedScalingRecipeState.__init__)
    torch.Tensor.cuda = lambda self, *_, **__: self
    gemm.get_cublas_workspace = lambda *_: torch.empty(1, 0)
    nvfp4_tensor.NVFP4Quantizer = te.NVFP4Quantizer = reference
    return te


def reference(
    *,
    fp4_dtype,
    with_2d_quantization=False,
    stochastic_rounding=False,
    with_post_rht_amax=False,
    with_rht=False,
    **options,
) -> object:
    """TE's reference quantiser, by the arguments of its native one."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    assert int(fp4_dtype) == _TYPES["kFloat4E2M1"]
    assert with_post_rht_amax == with_rht
    tile = (16, 16) if with_2d_quantization else (1, 16)
    made = NVFP4QuantizerRef(dtype=Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=with_rht, **options)
    if stochastic_rounding:
        made._quantize_blockwise_reference = drawn
    made.copy = lambda: copy(made)  # a hybrid one asks for it
    return made


def drawn(x, global_amax, tile_len_x, tile_len_y, **options):
    """The reference's scales, and codes that 8 random bits an element take up or down: P(up) is the position cut to 1/256."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef

    _, scales = NVFP4QuantizerRef._quantize_blockwise_reference(
        x, global_amax, tile_len_x, tile_len_y, **options
    )
    outer = torch.clamp(2688 / global_amax, max=torch.finfo(torch.float32).max)
    factor = (1 / (scales.float() * (1 / outer))).clamp(max=torch.finfo(torch.float32).max)
    y = (x.float() * factor.repeat_interleave(tile_len_x, dim=1)).clamp(-6, 6)
    grid = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
    low = (y.abs()[..., None] >= grid[:-1]).sum(-1) - 1
    position = (y.abs() - grid[low]) / (grid[low + 1] - grid[low])
    up = torch.randint(256, y.shape, generator=DRAWN) < torch.floor(256 * position)
    codes = (low + up + 8 * y.signbit()).to(torch.uint8)
    return codes[:, ::2] + codes[:, 1::2] * 16, scales


def current(fp8_dtype, device=None, *, force_pow_2_scales=False, amax_epsilon=0.0, **_) -> object:
    """TE's reference of FP8 with one scale a tensor, by the arguments of its native quantiser."""
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import CurrentScalingQuantizerRef

    made = _named("Float8CurrentScalingQuantizer", CurrentScalingQuantizerRef)(
        _fp8(fp8_dtype), pow_2_scales=force_pow_2_scales, eps=amax_epsilon
    )
    made.copy = lambda: copy(made)
    made.qgemm = lambda qx, qw, params, dtype, sx, sw, *_, **__: (qx.float() @ qw.float().t() * (sx * sw)).to(
        dtype
    )
    return made


@cache
def _named(name: str, parent: type) -> type:
    """A subclass with the native class's name: one, since a group's quantisers have to be of one."""
    return type(name, (parent,), {})


def _fp8(kind: int) -> torch.dtype:
    return {_TYPES["kFloat8E4M3"]: torch.float8_e4m3fn, _TYPES["kFloat8E5M2"]: torch.float8_e5m2}[int(kind)]


def microscaled(fp8_dtype, *, with_2d_quantization=False, **_) -> object:
    """MXFP8 by its definition: a block's scale is the least power of two that brings its amax to the element's maximum or below."""
    from transformer_engine.pytorch.custom_recipes.reference_current_scaling import (
        CurrentScalingQuantizerRef,
        CurrentScalingTensorRef,
    )

    def cast(x):
        """Codes [rows, columns], and biased exponents [rows, columns / 32]."""
        largest = x.float().abs().view(x.shape[0], -1, 32).amax(2).double()
        if with_2d_quantization:
            largest = largest.view(-1, 32, largest.shape[1]).amax(1).repeat_interleave(32, dim=0)
        exponent = torch.ceil(torch.log2(largest / torch.finfo(kind).max)).clamp(min=-127)
        factor = torch.exp2(-exponent).repeat_interleave(32, dim=1)
        return (x.double() * factor).float().to(kind), (exponent + 127).to(torch.uint8)

    def quantize(x, **_):
        (data, scale), (data_t, scale_t) = cast(x), cast(x.t().contiguous())
        kept = {"data": data, "scale": scale, "data_t": data_t, "scale_t": scale_t}
        found = Microscaled(
            **kept, dtype=x.dtype, device=x.device, quant_dtype=kind, _quantizer=made, original_shape=x.shape
        )
        found._rowwise_data, found._rowwise_scale_inv = data, scale
        found._columnwise_data, found._columnwise_scale_inv = (
            data_t.t(),
            scale_t.t(),
        )  # it lies as the tensor does
        return found

    def wide(data, scale):
        return data.float() * torch.exp2(scale.float() - 127).repeat_interleave(32, dim=1)

    class Microscaled(CurrentScalingTensorRef):
        def dequantize(self, *, dtype):
            return wide(self.data, self.scale).to(dtype)

    kind = _fp8(fp8_dtype)
    made = _named("MXFP8Quantizer", CurrentScalingQuantizerRef)(kind)
    made.quantize = quantize
    made.copy = lambda: copy(made)
    made.qgemm = lambda qx, qw, params, dtype, sx, sw, *_, **__: (wide(qx, sx) @ wide(qw, sw).t()).to(dtype)
    return made


def _dequantized(quantised, *, dtype):
    """The rowwise copy as code * ((block scale * amax) / 2688), which the reference leaves out."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import cast_from_fp4x2

    codes = cast_from_fp4x2(quantised.data, torch.float32)
    scales = quantised.scale.float().repeat_interleave(codes.shape[1] // quantised.scale.shape[1], dim=1)
    amax = quantised.global_amax_row.view(-1, 1)  # of the tensor, or of each row
    return (codes * (scales * amax * torch.tensor(1 / 2688))).to(dtype)


def _multiplied(a, a_turned, b, b_turned, *_, **__):
    """TE's product of two operands, unquantised or FP8: in columns, so b comes first; and the three outputs that are not asked for."""
    (b, b_scale), (a, a_scale) = _codes(b), _codes(a)
    product = (b.t() if b_turned else b) @ (a.t() if a_turned else a)
    return product if a_scale is None else (product * (b_scale * a_scale)).bfloat16(), None, None, None


def _cast(quantiser, x):
    """A cast; one of no rows, which the reference refuses, has no rows either."""
    if len(x):
        return quantiser.quantize(x)
    made = quantiser.quantize(x.new_zeros(128, x.shape[1]))
    made.original_shape, made.dequantize = x.shape, lambda *, dtype: x
    return made


def _multiplied_in_groups(a, a_turned, b, b_turned, out, kind, rows, bias, bias_kind, single, gelu, grad, *_):
    """TE's products of operands in pairs: written one below the other into the only output, or each into its own, zeros where one is empty."""
    from transformer_engine.pytorch.cpp_extensions import general_gemm

    layout = ("T" if a_turned else "N") + ("T" if b_turned else "N")
    for left, right, place in zip(a, b, out[0].split(rows) if single else out, strict=True):
        if 0 in (*left.size(), *right.size()):
            place.zero_()
        else:
            place.copy_(general_gemm(left, right, place.dtype, layout=layout, grad=grad)[0])
    return bias


def _codes(operand):
    """The values of an FP8 operand's codes and what they are multiplied by; another one as it is."""
    if not hasattr(operand, "_fp8_dtype"):
        return operand, None
    return operand._data.view(_fp8(operand._fp8_dtype)).float(), operand._scale_inv


def scaled(x, quantiser, *_):
    """TE's cast to FP8 by a given scale: to nearest, saturating. The quantiser's amax becomes that of x, where this is larger."""
    kind = _fp8(quantiser.dtype)
    top = torch.finfo(kind).max
    codes = (x.float() * quantiser.scale).clamp(-top, top).to(kind)
    quantiser.amax.copy_(torch.maximum(quantiser.amax, x.abs().amax().float()))
    return quantiser.create_tensor_from_data(
        codes.view(torch.uint8), fake_dtype=x.dtype, internal=quantiser.internal
    )


def _moved_on(reduced, histories, scales, algorithm, fp8_dtype, margin):
    """TE's update of all histories and scales: the amaxes of now are counted, the oldest go, and the largest that are left give the scale.

    An amax that is 0 or not finite leaves the scale as it was.
    """
    assert (algorithm, margin) == ("max", 0)
    top = torch.finfo(_fp8(fp8_dtype)).max
    for seen, history, scale in zip(
        reduced.split([len(scale) for scale in scales]), histories, scales, strict=True
    ):
        history[0] = seen
        largest = history.amax(0)
        history.copy_(history.roll(-1, 0))
        history[0] = 0
        known = (largest > 0) & largest.isfinite()
        scale.copy_(
            torch.where(known, (torch.tensor(top) / largest).clamp(max=torch.finfo(torch.float32).max), scale)
        )


def _extension(name: str) -> ModuleType:
    module = _Extension(name)
    module.__spec__ = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = module
    return module


def _with_a_gpu(method):
    def whole(*args, **kwargs):
        before, torch.cuda.is_available = torch.cuda.is_available, lambda: True
        try:
            return method(*args, **kwargs)
        finally:
            torch.cuda.is_available = before

    return whole


def _on_this(method):
    def whole(*args, device=None, **kwargs):
        return method(*args, device=device or torch.device("cpu"), **kwargs)

    return whole


def _on_a_gpu(method):
    def whole(*args, **kwargs):
        torch.Tensor.is_cuda = property(lambda _: True)
        try:
            return method(*args, **kwargs)
        finally:
            del torch.Tensor.is_cuda

    return whole
