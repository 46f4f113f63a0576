"""Transformer Engine's pure-Python NVFP4 reference, on CPU tensors.

The wheel without extras has no native part and refuses a plain import, so the three modules that need none are loaded by
path, with empty shells for the packages around them and stubs for the two names they import from the native side.
"""

import importlib.util
import sys
from functools import cache
from importlib.metadata import distribution
from types import ModuleType, SimpleNamespace

import torch

PACKAGE = "transformer_engine.pytorch"


class _Quantizer:
    def __init__(self, *, rowwise: bool, columnwise: bool) -> None:
        self.rowwise_usage, self.columnwise_usage = rowwise, columnwise


class _Storage:
    pass


def _shell(name: str, **attributes: object) -> None:
    module = ModuleType(name)
    module.__path__ = []
    vars(module).update(attributes)
    sys.modules[name] = module


@cache
def reference() -> SimpleNamespace:
    """The modules `reference_nvfp4` and `gemm` of the installed Transformer Engine, and its Fp4Formats."""
    root = distribution("transformer-engine").locate_file("transformer_engine/pytorch/custom_recipes")
    for name in ("transformer_engine", PACKAGE, f"{PACKAGE}.custom_recipes", f"{PACKAGE}.tensor"):
        _shell(name)
    _shell(f"{PACKAGE}.quantized_tensor", Quantizer=_Quantizer, QuantizedTensorStorage=_Storage)
    _shell(f"{PACKAGE}.tensor.utils", is_custom=lambda _: True)
    modules = {}
    for name in ("gemm", "reference_utils", "reference_nvfp4"):
        qualified = f"{PACKAGE}.custom_recipes.{name}"
        spec = importlib.util.spec_from_file_location(qualified, root / f"{name}.py")
        modules[name] = sys.modules[qualified] = importlib.util.module_from_spec(spec)
        setattr(sys.modules[f"{PACKAGE}.custom_recipes"], name, modules[name])
        spec.loader.exec_module(modules[name])
    return SimpleNamespace(nvfp4=modules["reference_nvfp4"], gemm=modules["gemm"], formats=modules["reference_utils"].Fp4Formats)


def quantizer(tile: tuple[int, int] = (1, 16), rht: bool = False):
    """TE's reference quantiser for 1x16 or 16x16 tiles, with or without its column-wise random Hadamard transform."""
    te = reference()
    return te.nvfp4.NVFP4QuantizerRef(dtype=te.formats.E2M1, quant_tile_shape=tile, with_rht=rht)


def values(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """Packed codes and block scales as code times scale, fp32 [rows, columns]."""
    decoded = reference().nvfp4.cast_from_fp4x2(codes, torch.float32)
    return decoded * scales.to(torch.float32).repeat_interleave(16, dim=1)
