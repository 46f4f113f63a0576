"""Quantisers for CUDA tensors: launches of nvfp4.py's kernels that never wait for the device.

The forms are those of cpu.py.

What is not finite needs no second path: the kernels compute what the reference does, and the amax, which
stays on the device, shows it.
"""

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import ModuleType

import torch
from torch import Tensor

from ablate.numerics.kernels.cpu import covers
from ablate.numerics.philox import Clock, philox_key
from ablate.numerics.spec import Hadamard, Quant

EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Options of every launch: no product and sum contracted to one instruction, which rounds once instead of
twice, and no subnormals flushed to zero, which would lose 1 / S of a tiny tensor."""

Quantized = tuple[Tensor, Tensor, Tensor]
"""Values bf16 [rows, columns padded to 16], amax fp32 scalar, block scales fp32 [row tiles, 1, column tiles,
1], all on the device."""


@dataclass(frozen=True)
class Form:
    """Quantisation of one copy: format, signs of a rotation (fp32 [16] on the device, or None), draw site."""

    quant: Quant
    signs: Tensor | None = None
    where: int = 0


@cache
def kernels() -> ModuleType | None:
    """Return nvfp4.py, or None without a Triton that can be exact.

    Torch's CUDA builds have one since 2.10, those for CPUs have none.

    Before 3.6 Triton flushes subnormals in divisions, and ignores the option not to.
    """
    try:
        from triton.backends.nvidia.compiler import CUDAOptions

        from ablate.numerics.kernels import nvfp4
    except ImportError:
        return None
    return nvfp4 if all(hasattr(CUDAOptions, option) for option in EXACT) else None


def _compiled() -> ModuleType:
    """Return nvfp4.py, which the caller has checked to exist (`can_quantize`)."""
    module = kernels()
    assert module is not None
    return module


@cache
def runs_on(device: torch.device) -> bool:
    """Return True for an NVIDIA GPU of compute capability 8 (Ampere) or higher with a suitable Triton."""
    if device.type != "cuda":
        return False
    if torch.version.cuda and torch.cuda.get_device_capability(device)[0] >= 8 and kernels() is not None:
        return True
    needed = "they need an NVIDIA GPU from Ampere on, and Triton from 3.6 on"
    print(
        f"ablate: no compiled quantisers for {device}, so all runs on the slow reference; {needed}",
        file=sys.stderr,
    )
    return False


def can_quantize(x: Tensor, quant: Quant, rotation: Hadamard | None) -> bool:
    """Return True if `quantize` can compute this: a known form, x stored by rows or by columns.

    A rotated x must be bf16 and stored by columns.
    """
    return (
        covers(quant)
        and quant.outer is not None
        and quant.outer.statistic == "amax"
        and (rotation is None or (_rotates(x, quant, rotation) and not x.is_contiguous()))
        and x.dtype in (torch.bfloat16, torch.float32)
        and x.numel() > 0
        and (x.is_contiguous() or x.t().is_contiguous())
        and runs_on(x.device)
    )


def can_quantize_both(x: Tensor, first: Quant, second: Quant, rotation: Hadamard | None) -> bool:
    """Return True if `quantize_both` can compute this: x stored by rows, 1x16 blocks in both copies."""
    return (
        x.is_contiguous()
        and (first.block, second.block) == ("1x16", "1x16")
        and (rotation is None or _rotates(x, second, rotation))
        and can_quantize(x, first, None)
        and covers(second)
        and second.outer is not None
        and second.outer.statistic == "amax"
    )


def _rotates(x: Tensor, quant: Quant, rotation: Hadamard) -> bool:
    return rotation.size == 16 and quant.block == "1x16" and x.dtype == torch.bfloat16


def quantize(x: Tensor, quant: Quant, signs: Tensor | None, clock: Clock | None, where: int) -> Quantized:
    """Quantise x [rows, columns] in blocks along its columns, rotated along them first by `signs` [16]."""
    down = not x.is_contiguous()
    memory, form = x.t() if down else x, Form(quant, signs, where)
    amax = amax_both(memory, signs)[0 if signs is None else 1]
    launch = _tiles if quant.block == "16x16" else _columns if down else _rows
    values, scales = launch(memory, amax, form, clock)
    if down:
        values, scales = values.t(), scales.t()
    return values[: x.shape[0]], amax, scales.unsqueeze(1).unsqueeze(3)


def quantize_both(x: Tensor, first: Form, second: Form, clock: Clock | None) -> tuple[Quantized, Quantized]:
    """Quantise x [rows, columns], and x.t() rotated by the signs of `second`, as `quantize` does.

    x is read twice, not four times.

    The first read is for the two amaxes: that of a rotated copy is its own.
    """
    rows, columns = x.shape
    amax = amax_both(x, second.signs)
    mine, theirs = amax[0], amax[0 if second.signs is None else 1]
    outputs = (*_by_rows(x), *_by_columns(x))
    with torch.cuda.device_of(x):
        _compiled().by_both[_grid(x)](
            x, *outputs, mine, theirs, second.signs, rows, columns,
            *_range(first), *_range(second), *_draws(clock),
            signed_word(first.where), signed_word(second.where),
            _stochastic(first), _stochastic(second), **EXACT,
        )  # fmt: skip
    values, scales, turned, turned_scales = outputs
    return (values, mine, scales[:, None, :, None]), (turned.t(), theirs, turned_scales.t()[:, None, :, None])


def amax_both(x: Tensor, signs: Tensor | None) -> Tensor:
    """Return the amax of x [rows, columns], and of x.t() rotated by `signs` (0 without): fp32 [2], or NaN."""
    bits = torch.zeros(2, dtype=torch.int32, device=x.device)
    with torch.cuda.device_of(x):
        _compiled().amaxes[_grid(x)](x, signs, bits, *x.shape, **EXACT)
    return bits.view(torch.float32)


# --- launches, on x as it lies in memory: [rows, columns], contiguous -----------------------------


def _rows(x: Tensor, amax: Tensor, form: Form, clock: Clock | None) -> tuple[Tensor, Tensor]:
    values, scales = _by_rows(x)
    how = *_range(form), *_draws(clock), signed_word(form.where), _stochastic(form)
    with torch.cuda.device_of(x):
        _compiled().by_rows[_grid(x)](x, values, scales, amax, *x.shape, *how, **EXACT)
    return values, scales


def _columns(x: Tensor, amax: Tensor, form: Form, clock: Clock | None) -> tuple[Tensor, Tensor]:
    values, scales = _by_columns(x)
    how = *_range(form), *_draws(clock), signed_word(form.where), _stochastic(form)
    with torch.cuda.device_of(x):
        _compiled().by_columns[_grid(x)](x, values, scales, amax, form.signs, *x.shape, *how, **EXACT)
    return values, scales


def _tiles(x: Tensor, amax: Tensor, form: Form, clock: Clock | None) -> tuple[Tensor, Tensor]:
    rows, columns = (-(-size // 16) for size in x.shape)
    values, scales = _outputs(x, rows * 16, columns * 16, rows, columns)
    with torch.cuda.device_of(x):
        _compiled().by_tiles[_grid(x)](x, values, scales, amax, *x.shape, *_range(form), **EXACT)
    return values, scales


def _by_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    rows, blocks = x.shape[0], -(-x.shape[1] // 16)
    return _outputs(x, rows, blocks * 16, rows, blocks)


def _by_columns(x: Tensor) -> tuple[Tensor, Tensor]:
    blocks, columns = -(-x.shape[0] // 16), x.shape[1]
    return _outputs(x, blocks * 16, columns, blocks, columns)


def _outputs(
    x: Tensor, rows: int, columns: int, scale_rows: int, scale_columns: int
) -> tuple[Tensor, Tensor]:
    values = torch.empty(rows, columns, dtype=torch.bfloat16, device=x.device)
    return values, torch.empty(scale_rows, scale_columns, dtype=torch.float32, device=x.device)


def _grid(x: Tensor) -> Callable[[Mapping[str, int]], tuple[int]]:
    """Return Triton's grid: one program for each slab of sixteen rows, COLUMNS wide."""
    rows, columns = x.shape
    return lambda options: (-(-rows // 16) * -(-columns // options["COLUMNS"]),)


def _range(form: Form) -> tuple[float, float]:
    assert form.quant.outer is not None
    return 6.0 * form.quant.outer.bound, form.quant.range.headroom


def _stochastic(form: Form) -> bool:
    return form.quant.rounding == "stochastic"


def _draws(clock: Clock | None) -> tuple[int, int, int, int]:
    """Return the key, the step and the micro-batch; zeros, which nothing reads, without a clock."""
    if clock is None:
        return 0, 0, 0, 0
    key = philox_key(clock)
    return signed_word(key[0]), signed_word(key[1]), signed_word(clock.step), signed_word(clock.micro_batch)


def signed_word(number: int) -> int:
    """Return the 32 bits as an int32. Triton would compile a kernel for each size of integer."""
    return (number + 2**31) % 2**32 - 2**31
