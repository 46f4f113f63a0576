"""Quantisers for CPU tensors, compiled from nvfp4.c at installation: one thread, one pass after the amax.

They take NVIDIA's forms: E2M1 elements, E4M3 scales to nearest, one amax a tensor or what stands for it,
blocks of 16 or 16x16. All else is the reference's.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.numerics.kernels import builds, forms
from ablate.numerics.kernels.builds import COUNTS, SUMS, CastArguments, Sums
from ablate.numerics.philox import Clock, philox_key
from ablate.numerics.spec import Hadamard, Quant

TILES = {"rows": (1, 16), "columns": (16, 1), "tiles": (16, 16)}
"""Rows and columns of memory that share a block scale, by kernel."""


def can_quantize(x: Tensor, quant: Quant, rotation: Hadamard | None) -> bool:
    """Return True if `quantize` can compute this: a known form, x stored by rows or by columns. A rotated x
    must be bf16 and stored by columns."""
    return (
        forms.nvidia(quant)
        and (rotation is None or _rotates(x, quant, rotation))
        and x.device.type == "cpu"
        and x.dtype in (torch.bfloat16, torch.float32)
        and x.numel() > 0
        and (x.is_contiguous() or x.t().is_contiguous())
        and builds.build() is not None
    )


def _rotates(x: Tensor, quant: Quant, rotation: Hadamard) -> bool:
    return forms.fuses(quant, rotation) and x.dtype == torch.bfloat16 and not x.is_contiguous()


class Made(NamedTuple):
    """A quantised copy, on the device of x. Values are [rows, columns padded to blocks], bf16 or, of a wide
    form, fp32; block scales are fp32 [row tiles, 1, column tiles, 1]."""

    values: Tensor
    amax: Tensor | None
    """fp32: a scalar, or [rows, 1]; None without an outer scale, or with one for 128 elements."""
    block_scale: Tensor | None
    largest: Tensor
    """The largest magnitude; the same as `amax` unless a statistic took its place."""
    source: Tensor | None
    """The quantised tensor, if it was to be kept."""


def quantize(
    x: Tensor,
    quant: Quant,
    signs: Tensor | None,
    clock: Clock | None,
    where: int,
    keep: bool = False,
    statistic: float | Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Made | None:
    """Quantise x, [rows, columns] in bf16 or fp32, stored by rows or by columns, if `forms.nvidia` holds.

    x is first rotated along its columns if there are signs, fp32 [16]. Stochastic rounding needs the clock;
    `keep` keeps the quantised tensor in the result. `statistic` is the outer statistic, as a number, or as a
    function of the quantised tensor and its largest magnitude; None: the latter. None is returned if the
    reference must make the operand: x is not finite, or was padded and `keep` or a function as `statistic`
    needs it.
    """
    assert quant.outer is not None
    by_columns = not x.is_contiguous()
    kernel = "tiles" if quant.block == "16x16" else "columns" if by_columns else "rows"
    whole = x.t() if by_columns else x
    memory = _padded(whole, 1 if kernel == "rows" else 16)
    looked_at = keep or callable(statistic)
    if looked_at and memory is not whole:
        return None
    rows, columns = memory.shape
    spec = CastArguments(
        bound=quant.outer.bound, headroom=quant.range.headroom, amax=-1.0, bf16=x.dtype == torch.bfloat16
    )
    if signs is not None:
        spec.rotated, spec.signs = (
            True,
            sum(1 << number for number, sign in enumerate(signs.tolist()) if sign < 0),
        )
        if looked_at:
            memory, spec.rotated = _turned(memory, spec.signs), False
    source = memory.t() if by_columns else memory
    if callable(statistic):
        largest = torch.tensor(
            builds.built().amax(memory.data_ptr(), memory.numel(), spec.bf16), dtype=torch.float32
        )
        spec.amax = statistic(source, largest) if largest.isfinite() else largest
    elif statistic is not None:
        spec.amax = statistic
    if quant.rounding == "stochastic":
        assert clock is not None
        spec.stochastic, spec.key[:], spec.clock[:] = (
            True,
            philox_key(clock),
            (clock.step, clock.micro_batch, where),
        )
    tile_rows, tile_columns = TILES[kernel]
    values = torch.empty(rows, columns, dtype=torch.bfloat16)
    # The kernel writes fp32, whatever torch's default dtype is.
    scales = torch.empty(rows // tile_rows, columns // tile_columns, dtype=torch.float32)
    if not getattr(builds.built(), kernel)(
        memory.data_ptr(), rows, columns, spec, values.data_ptr(), scales.data_ptr()
    ):
        return None
    if by_columns:
        values, scales = values.t(), scales.t()
    scales, amax = (
        scales[: -(-x.shape[0] // quant.tile[0])].unsqueeze(1).unsqueeze(3),
        torch.tensor(spec.amax, dtype=torch.float32),
    )
    largest = amax if statistic is None else torch.tensor(spec.largest, dtype=torch.float32)
    return Made(values[: x.shape[0]], amax, scales, largest, source if keep else None)


class Part(NamedTuple):
    """Rows of a matrix that are quantised by themselves: the first, their number, and their draw site."""

    begin: int
    rows: int
    where: int


def quantize_parts(
    memory: Tensor, kernel: str, quant: Quant, parts: Sequence[Part], clock: Clock, signs: int | None = None
) -> tuple[Tensor, Tensor] | None:
    """Quantise parts of one matrix, each as `quantize` would, with statistic amax.

    `memory` is bf16 [rows, columns], contiguous, with a multiple of 16 columns. `kernel` is a key of TILES:
    `columns` quantises the transpose of each part. For `columns` and `tiles`, parts are multiples of 16 rows.
    One of 0 rows is left out. `signs` are those of a rotation down the columns, as `sign_word` has them.
    Return the values, bf16 like `memory` (undefined outside of the parts), and the largest magnitude of each
    part, fp32 [parts], 0 for one left out; None if one is not finite.
    """
    assert quant.outer is not None
    values = torch.empty_like(memory)
    rows, columns = TILES[kernel]
    most = max((part.rows for part in parts), default=0)
    scales = torch.empty(max(1, most // rows), memory.shape[1] // columns, dtype=torch.float32)
    spec = CastArguments(bound=quant.outer.bound, headroom=quant.range.headroom, bf16=True)
    if quant.rounding == "stochastic":
        spec.stochastic, spec.key[:] = True, philox_key(clock)
    if signs is not None:
        spec.rotated, spec.signs = True, signs
    run, source, target, width = getattr(builds.built(), kernel), memory.data_ptr(), values.data_ptr(), 2
    amaxes = [0.0] * len(parts)
    for number, (begin, count, where) in enumerate(parts):
        if count:
            spec.amax, spec.clock[:] = -1.0, (clock.step, clock.micro_batch, where)
            offset = begin * memory.shape[1] * width
            if not run(source + offset, count, memory.shape[1], spec, target + offset, scales.data_ptr()):
                return None
            amaxes[number] = spec.amax
    return values, torch.tensor(amaxes, dtype=torch.float32)


def _turned(memory: Tensor, signs: int) -> Tensor:
    """Return the columns rotated, in a tensor of its own: the quantiser keeps no rotated copy."""
    turned = torch.empty_like(memory)
    builds.built().turn(memory.data_ptr(), *memory.shape, signs, turned.data_ptr())
    return turned


def can_decode(values: Tensor, block_scale: Tensor, amax: Tensor | None) -> bool:
    """Return True for bf16 values stored by rows, blocks of whole sixteens, and at most one amax."""
    return (
        (values.device.type, values.dtype) == ("cpu", torch.bfloat16)
        and values.numel() > 0
        and values.is_contiguous()
        and values.shape[1] % (16 * block_scale.shape[2]) == 0
        and (amax is None or amax.ndim == 0)
        and builds.build() is not None
    )


def decode(
    values: Tensor, tile: tuple[int, int], block_scale: Tensor, amax: Tensor | None, factor: Tensor
) -> Tensor:
    """Return value(code) * ((s * amax) * factor), fp32 like `values`, which are code times block scale, bf16
    [rows, columns]. s is fp32 [row tiles, 1, column tiles, 1], one for a tile of `tile` rows and columns;
    amax (None: 1) and factor, 1 / divisor, are fp32 scalars."""
    out, scales = torch.empty(values.shape, dtype=torch.float32), block_scale.contiguous()
    whole = 1.0 if amax is None else amax.item()
    builds.built().decode(
        values.data_ptr(), *values.shape, scales.data_ptr(), *tile, whole, factor.item(), out.data_ptr()
    )
    return out


def census(
    source: Tensor, values: Tensor, scales: Tensor, amax: Tensor, inverse: Tensor, factor: Tensor
) -> tuple[dict[str, float], dict[str, int], Tensor, Tensor, Tensor]:
    """Return sums and counts over an operand that `quantize` kept: SUMS by name, COUNTS by name, the largest
    magnitude of each block (fp32), the power of each block (fp64), and the mean row (fp64 [columns]).

    `source` is the tensor that was quantised, bf16 or fp32 [rows, columns], and `values` code times block
    scale, bf16 like it; `scales` are fp32 [row tiles, 1, column tiles, 1]. `amax`, `inverse` (1 / S) and
    `factor` (1 / divisor) are fp32 scalars, as the reference computes them.
    """
    by_columns = not source.is_contiguous()
    memory, quantised, scales = (z.t() if by_columns else z for z in (source, values, scales.flatten(1, 3)))
    rows, columns = memory.shape
    scales = scales.contiguous()
    blocks = torch.zeros(scales.shape, dtype=torch.float32)
    block_power = torch.zeros(scales.shape, dtype=torch.float64)
    row_sums, column_sums = (torch.zeros(size, dtype=torch.float64) for size in (rows, columns))
    sums = Sums(amax=amax, inverse=inverse, factor=factor, bf16=source.dtype == torch.bfloat16)
    sums.tile_rows, sums.tile_columns = rows // scales.shape[0], columns // scales.shape[1]
    outputs = (z.data_ptr() for z in (blocks, block_power, row_sums, column_sums))
    inputs = memory.data_ptr(), quantised.data_ptr(), rows, columns, scales.data_ptr()
    builds.built().census(*inputs, sums, *outputs)
    if by_columns:
        blocks, block_power = blocks.t(), block_power.t()
    mean = row_sums / columns if by_columns else column_sums / rows
    powers, counts = ({name: getattr(sums, name) for name in names} for names in (SUMS, COUNTS))
    return powers, counts, blocks, block_power, mean


def _padded(memory: Tensor, rows: int) -> Tensor:
    extra_rows, extra_columns = -memory.shape[0] % rows, -memory.shape[1] % 16
    return F.pad(memory, (0, extra_columns, 0, extra_rows)) if extra_rows or extra_columns else memory
