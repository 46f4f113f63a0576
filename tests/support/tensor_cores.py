"""Doubles of torch's `scaled_mm` and of FlashInfer's `mm_fp4`, which multiply FP4 and MX formats on GPUs alone.

They check what the real functions check (pytorch, aten/src/ATen/native/cuda/ScaledBlas.cpp; flashinfer 0.7.2,
gemm/gemm_base.py and csrc/fp4_gemm_cutlass.cu), read codes and scales byte by byte, by code that shares nothing
with the package's, and multiply in fp64.
"""

from dataclasses import dataclass, field

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.numerics.product import alpha
from ablate.numerics.quantize import Operand
from ablate.numerics.stored import unswizzle

KIND, SWIZZLE = F.ScalingType, F.SwizzleType
FP4 = torch.float4_e2m1fn_x2
FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass
class Call:
    """One product: the arguments, and what the double read of the operands."""

    a: Tensor
    """First operand, code times block scale, fp64 [M, K]."""
    b: Tensor
    """Second operand, fp64 [N, K]."""
    factor: Tensor
    """Factor of the result, fp32, a scalar or [M, N]."""
    out: torch.dtype
    arguments: tuple = ()
    options: dict = field(default_factory=dict)


class TensorCores:
    """A GPU that multiplies all formats. `calls` lists its products."""

    def __init__(self) -> None:
        self.calls: list[Call] = []

    def scaled_mm(
        self,
        mat_a,
        mat_b,
        scale_a,
        scale_recipe_a,
        scale_b,
        scale_recipe_b,
        swizzle_a=None,
        swizzle_b=None,
        bias=None,
        output_dtype=torch.bfloat16,
        contraction_dim=(),
        use_fast_accum=False,
    ) -> Tensor:
        """Return the product as torch 2.13 does on SM 10.0, or raise ValueError as it does."""
        lists = [
            value if isinstance(value, list) else [] if value is None else [value]
            for value in (scale_a, scale_recipe_a, swizzle_a, scale_b, scale_recipe_b, swizzle_b)
        ]
        scales_a, kinds_a, swizzles_a, scales_b, kinds_b, swizzles_b = lists
        right = mat_b.t()
        _need(bias is None and not use_fast_accum and not contraction_dim, "only what the engine uses")
        _need(mat_a.stride(0) > mat_a.stride(1) == 1, "the first operand must be stored by rows")
        _need(right.stride(0) > right.stride(1) == 1, "the second operand must be stored by columns")
        wide = 2 if mat_a.dtype == FP4 else 1
        rows, others, length = len(mat_a), len(right), mat_a.shape[1] * wide
        _need(mat_a.shape[1] == right.shape[1], "contractions differ")
        _need(length % (32 if wide == 2 else 16) == 0, "contraction: 16 bytes")
        _need(others % 16 == 0, "columns of the result: multiples of 16")
        _need({mat_a.dtype, right.dtype} != {torch.float8_e5m2}, "no e5m2 with e5m2")
        _need(kinds_a == kinds_b, "one scaling for both operands")
        options = {"swizzle_a": swizzle_a, "swizzle_b": swizzle_b, "output_dtype": output_dtype}
        arguments = (mat_a, mat_b, scale_a, scale_recipe_a, scale_b, scale_recipe_b)
        factor = torch.ones(())
        if kinds_a in ([KIND.TensorWise], [KIND.RowWise]):
            _need(mat_a.dtype in FP8 and right.dtype in FP8, "FP8 operands")
            (one,), (other,) = scales_a, scales_b
            _need(one.dtype == other.dtype == torch.float32, "fp32 scales")
            if kinds_a == [KIND.TensorWise]:
                _need(one.numel() == other.numel() == 1, "one scale each")
            else:
                _need(one.shape == (rows, 1) and other.shape == (1, others), "one scale a row")
                _need(other.stride(1) == 1, "scales of columns side by side")
                _need(right.dtype == torch.float8_e4m3fn, "CUTLASS takes e4m3 as second operand")
            left, right_values, factor = _eight(mat_a), _eight(right), one * other
        else:
            nvidia = kinds_a == [KIND.BlockWise1x16, KIND.TensorWise]
            _need(nvidia or kinds_a == [KIND.BlockWise1x32], "a scaling that torch has")
            block, kind = (16, torch.float8_e4m3fn) if nvidia else (32, torch.float8_e8m0fnu)
            wanted = [SWIZZLE.SWIZZLE_32_4_4, *([SWIZZLE.NO_SWIZZLE] if nvidia else [])]
            _need(swizzles_a == swizzles_b == wanted, f"swizzles {wanted}")
            _need(mat_a.dtype == right.dtype == FP4 or (not nvidia and mat_a.dtype in FP8), "elements")
            _need(wide == 1 or nvidia or output_dtype == torch.bfloat16, "MSLK's MXFP4 writes bf16")
            for scales, size in ((scales_a[0], rows), (scales_b[0], others)):
                _need(scales.dtype == kind and scales.is_contiguous(), f"contiguous {kind} scales")
                needed = (size + -size % 128) * ((length // block + 3) // 4 * 4)
                _need(scales.numel() == needed, f"{needed} scales, not {scales.numel()}")
            if nvidia:
                globals_ = (scales_a[1], scales_b[1])
                _need(all(g.numel() == 1 and g.dtype == torch.float32 for g in globals_), "fp32 globals")
                factor = globals_[0] * globals_[1]
            left = _blocks(mat_a, scales_a[0], block)
            right_values = _blocks(right, scales_b[0], block)
        call = Call(left, right_values, factor, output_dtype, arguments, options)
        self.calls.append(call)
        return _product(call)

    def mm_fp4(
        self,
        a,
        b,
        a_descale,
        b_descale,
        alpha=None,
        out_dtype=torch.bfloat16,
        out=None,
        block_size=16,
        use_8x4_sf_layout=False,
        backend="auto",
        use_nvfp4=True,
        enable_pdl=True,
    ) -> Tensor:
        """Return the product as FlashInfer's cudnn and cutlass do, or raise ValueError as they do."""
        right, tiled = b.t(), b_descale.t()
        _need(a.dtype == b.dtype == torch.uint8, "packed codes as uint8")
        _need(a_descale.dtype in (torch.uint8, torch.float8_e4m3fn), "scales as uint8 or e4m3")
        _need(backend in ("cudnn", "cutlass") and (use_nvfp4 or backend == "cudnn"), "MXFP4 by cudnn alone")
        _need(block_size == (16 if use_nvfp4 else 32) and not use_8x4_sf_layout, "block size")
        _need(out_dtype in (torch.bfloat16, torch.float16), "bf16 or fp16 output")
        _need(alpha.dtype == torch.float32 and alpha.numel() == 1, "one fp32 alpha")
        _need(a.is_contiguous() and right.is_contiguous(), "codes by rows, and by columns")
        length = 2 * a.shape[1]
        _need(length % 32 == 0 and len(right) % 32 == 0, "CUTLASS: n and k are multiples of 32")
        blocks = (length // block_size + 3) // 4 * 4
        for scales, size in ((a_descale, len(a)), (tiled, len(right))):
            _need(scales.shape == (size + -size % 128, blocks) and scales.is_contiguous(), "128x4 tiles")
        kind = torch.float8_e4m3fn if use_nvfp4 else torch.float8_e8m0fnu
        left, right_values = (
            _blocks(codes.view(FP4), scales.reshape(-1).view(kind), block_size)
            for codes, scales in ((a, a_descale), (right, tiled))
        )
        call = Call(left, right_values, alpha, out_dtype, (a, b, a_descale, b_descale), {"backend": backend})
        self.calls.append(call)
        return _product(call)


def exact_product(a: Operand, b: Operand, out: torch.dtype) -> Tensor:
    """An fp64 product of the emulator's operands, times the emulator's alpha in fp32, rounded once."""
    width = max(a.values.shape[1], b.values.shape[1])
    left, right = (F.pad(part.values.double(), (0, width - part.values.shape[1])) for part in (a, b))
    scale = alpha(a, b)
    whole = (left @ right.t()).float()
    return (whole if scale is None else whole * scale).to(out)


FAULTS = ("nibbles", "plain scales", "alpha twice", "no alpha", "upside down")
"""Defects that `Broken` can have."""


class Broken(TensorCores):
    """Tensor cores that get something else than the engine sent."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.fault = fault

    def scaled_mm(self, a, b, scale_a, kind_a, scale_b, kind_b, **options) -> Tensor:
        if self.fault == "nibbles" and a.dtype == torch.float4_e2m1fn_x2:
            codes = a.view(torch.uint8)
            a = (codes >> 4 | (codes & 15) << 4).view(a.dtype)
        if self.fault == "plain scales" and isinstance(scale_a, list) and len(scale_a) == 2:
            blocks = 2 * a.shape[1] // 16
            tall = len(a) + -len(a) % 128
            plain = unswizzle(scale_a[0], tall, blocks + -blocks % 4).reshape(-1)
            scale_a = [plain, scale_a[1]]
        if self.fault == "alpha twice" and isinstance(scale_a, list) and len(scale_a) == 2:
            scale_b = [scale_b[0], scale_a[1]]
        if self.fault == "no alpha" and isinstance(scale_a, list) and len(scale_a) == 2:
            scale_a = [scale_a[0], torch.ones(())]
        if self.fault == "upside down":
            a = a.view(torch.uint8).flip(0).view(a.dtype)
        return super().scaled_mm(a, b, scale_a, kind_a, scale_b, kind_b, **options)


def _need(true: bool, what: str) -> None:
    if not true:
        raise ValueError(f"tensor cores: {what}")


def _product(call: Call) -> Tensor:
    """Return the product with an fp32 sum, the factor in fp32 and one rounding."""
    return ((call.a @ call.b.t()).float() * call.factor).to(call.out)


def _eight(data: Tensor) -> Tensor:
    """Return the numbers of FP8 bytes by their bit fields, fp64."""
    bits = data.contiguous().view(torch.uint8).numpy().astype(np.int64)
    mantissa, bias = (3, 7) if data.dtype == torch.float8_e4m3fn else (2, 15)
    exponent, fraction = (bits & 127) >> mantissa, bits & (2**mantissa - 1)
    magnitude = np.where(
        exponent == 0,
        fraction * 2.0 ** (1 - bias - mantissa),
        (2**mantissa + fraction) * 2.0 ** (exponent - bias - mantissa),
    )
    lost = (bits & 127) == 127 if mantissa == 3 else (bits & 127) > 124
    magnitude = np.where(lost, np.nan, magnitude)
    if mantissa == 2:
        magnitude = np.where((bits & 127) == 124, np.inf, magnitude)
    return torch.from_numpy(np.where(bits & 128, -magnitude, magnitude))


def _four(data: Tensor) -> Tensor:
    """Return the numbers of FP4 bytes, the even column in the low nibble, fp64."""
    grid = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    bits = data.contiguous().view(torch.uint8).numpy()
    numbers = np.empty((bits.shape[0], 2 * bits.shape[1]))
    numbers[:, 0::2], numbers[:, 1::2] = grid[bits % 16], grid[bits // 16]
    return torch.from_numpy(numbers)


def _blocks(data: Tensor, scales: Tensor, block: int) -> Tensor:
    """Return code times scale, fp64: scale (r, c) lies at the place that cuBLAS's manual gives.

    "1D block scaling factors layout": tiles of 128x4 in row-major order; in a tile, (r % 32) * 16 +
    (r / 32) * 4 + c.
    """
    codes = _four(data) if data.dtype == FP4 else _eight(data)
    rows, columns = codes.shape
    r, c = np.meshgrid(np.arange(rows), np.arange(columns // block), indexing="ij")
    tiles = -(-(columns // block) // 4)
    place = (r // 128 * tiles + c // 4) * 512 + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4
    raw = scales.view(torch.uint8)[torch.from_numpy(place)]
    if scales.dtype == torch.float8_e4m3fn:
        factors = _eight(raw.view(torch.float8_e4m3fn))
    else:
        powers = 2.0 ** (raw.numpy().astype(np.float64) - 127)
        factors = torch.from_numpy(np.where(raw.numpy() == 255, np.nan, powers))
    return codes * factors.repeat_interleave(block, 1)
