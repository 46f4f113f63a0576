"""Transformer Engine's own Python on a CPU: its native extension replaced by names, its native NVFP4 quantiser by its reference's.

For a process of its own, since it changes torch. It proves what TE's modules do with a recipe, not what its kernels compute; no
stochastic rounding, which the reference has not.
"""

import enum
import importlib.machinery
import os
import sys
from copy import copy
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
_TYPES = {"kByte": 0, "kInt32": 2, "kFloat32": 4, "kFloat16": 5, "kBFloat16": 6, "kFloat8E4M3": 7, "kFloat8E5M2": 8, "kFloat4E2M1": 10}
_ENUMS = {
    "DType": _TYPES,
    "FP8FwdTensors": {name: n for n, name in enumerate(_FWD)},
    "FP8BwdTensors": {name: n for n, name in enumerate(_BWD)},
    "NVTE_Fused_Attn_Backend": {"NVTE_No_Backend": 0, "NVTE_F16_arbitrary_seqlen": 1, "NVTE_FP8": 2},
}
"""Those that TE checks, or indexes lists by."""


def install() -> ModuleType:
    """Import `transformer_engine.pytorch` over the double, and return it."""
    os.environ["NVTE_PROJECT_BUILDING"] = "1"
    os.environ["NVTE_FRAMEWORK"] = "none"
    extension = _extension("transformer_engine_torch")
    for name, members in _ENUMS.items():
        setattr(extension, name, enum.IntEnum(name, members))
    extension.generic_gemm = _multiplied
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
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4TensorRef
    from transformer_engine.pytorch.module.base import TransformerEngineBaseModule
    from transformer_engine.pytorch.tensor import nvfp4_tensor

    NVFP4TensorRef.get_data_tensors = lambda _: ()  # what a hybrid one asks for before it lets go of data
    NVFP4TensorRef.clear = lambda _: None
    NVFP4TensorRef.dequantize = _dequantized
    torch.cuda.is_available = lambda: False
    TransformerEngineBaseModule.__init__ = _with_a_gpu(TransformerEngineBaseModule.__init__)
    TransformerEngineBaseModule.prepare_forward = _on_a_gpu(TransformerEngineBaseModule.prepare_forward)
    torch.Tensor.cuda = lambda self, *_, **__: self
    gemm.get_cublas_workspace = lambda *_: torch.empty(0)
    nvfp4_tensor.NVFP4Quantizer = te.NVFP4Quantizer = reference
    return te


def reference(
    *, fp4_dtype, with_2d_quantization=False, stochastic_rounding=False, with_post_rht_amax=False, with_rht=False, **options
) -> object:
    """TE's reference quantiser, by the arguments of its native one."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import NVFP4QuantizerRef
    from transformer_engine.pytorch.custom_recipes.reference_utils import Fp4Formats

    assert int(fp4_dtype) == _TYPES["kFloat4E2M1"]
    assert not stochastic_rounding, "the reference rounds to nearest"
    assert with_post_rht_amax == with_rht
    tile = (16, 16) if with_2d_quantization else (1, 16)
    made = NVFP4QuantizerRef(dtype=Fp4Formats.E2M1, quant_tile_shape=tile, with_rht=with_rht, **options)
    made.copy = lambda: copy(made)  # a hybrid one asks for it
    return made


def _dequantized(quantised, *, dtype):
    """The rowwise copy as code * ((block scale * amax) / 2688), which the reference leaves out."""
    from transformer_engine.pytorch.custom_recipes.reference_nvfp4 import cast_from_fp4x2

    codes = cast_from_fp4x2(quantised.data, torch.float32)
    scales = quantised.scale.float().repeat_interleave(codes.shape[1] // quantised.scale.shape[1], dim=1)
    return (codes * (scales * quantised.global_amax_row * torch.tensor(1 / 2688))).to(dtype)


def _multiplied(a, a_turned, b, b_turned, *_, **__):
    """TE's product of two unquantised operands: in columns, so b comes first; and the three outputs that are not asked for."""
    return (b.t() if b_turned else b) @ (a.t() if a_turned else a), None, None, None


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


def _on_a_gpu(method):
    def whole(*args, **kwargs):
        torch.Tensor.is_cuda = property(lambda _: True)
        try:
            return method(*args, **kwargs)
        finally:
            del torch.Tensor.is_cuda

    return whole
