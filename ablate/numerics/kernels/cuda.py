"""Quantisers for CUDA tensors: launches of Triton kernels that never wait for the device.

The forms are those of `forms.nvidia`; general_cuda.py has the others. The outer statistic is a tensor on the
device: the largest magnitude or a percentile, which kernels take from the tensor, or what a function makes of
the largest magnitude. It is not read here.

What is not finite needs no second path: the kernels compute what the reference does, and the amax, which
stays on the device, shows it.

Launches have a fixed configuration. Triton's autotuning timed three for each kernel and width in each
process, 7 s a trial; by their machine code (`benchmarks/kernel_code.py`), COLUMNS = 256 with 4 warps executes
a fifth to two fifths fewer instructions per element than 128, as few as 512 with 8 warps, and spills nothing.
"""

import hashlib
import math
import sys
from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction
from functools import cache
from threading import Lock
from types import ModuleType

import torch
from torch import Tensor

from ablate.numerics.kernels import forms
from ablate.numerics.kernels.launch_errors import reason
from ablate.numerics.philox import Clock, philox_key
from ablate.numerics.spec import Hadamard, Outer, Quant, argument, tag

EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Options of every launch: no product and sum contracted to one instruction, which rounds once instead of
twice, and no subnormals flushed to zero, which would lose 1 / S of a tiny tensor."""
COLUMNS = 256
"""Width of a program's slab of sixteen rows."""

Statistic = Callable[[Tensor], Tensor]
"""Outer statistic, fp32 scalar on the device, as a function of the largest magnitude of what is quantised."""


@dataclass(frozen=True)
class Form:
    """Quantisation of one copy."""

    quant: Quant
    signs: int | None = None
    """Rotation: bit r is 1 if row r of sixteen is negated; None without one."""
    where: int = 0
    """Draw site."""
    statistic: Statistic | None = None
    """None: the statistic that the quantiser names, `amax` or `percentile`."""


@dataclass(frozen=True)
class Quantized:
    """A quantised copy, all on the device."""

    values: Tensor
    """bf16, or fp32 if `Quant.wide`, [rows, columns padded to whole blocks and to 16]."""
    amax: Tensor | None
    """Outer statistic, fp32 scalar, or [rows, 1]; None without one that is kept apart."""
    block_scale: Tensor | None
    """fp32 [row tiles, 1, column tiles, 1]; None without block scales."""
    largest: Tensor
    """Largest magnitude, or NaN, fp32 scalar."""


Cast = Callable[[Tensor, Form, Clock | None], Quantized]


@cache
def kernels() -> ModuleType | None:
    """Return nvfp4.py, or None without a Triton that can be exact. Torch's CUDA builds have one since 2.10,
    those for CPUs none. Before 3.6, Triton flushes subnormals in divisions, whatever the option says."""
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
    """Return True for a GPU on which the kernels run and equal the reference; else print why not, once."""
    if device.type != "cuda":
        return False
    why = unusable(device)
    if why:
        print(
            f"ablate: no compiled quantisers for {device}, so all runs on the slow reference: {why}",
            file=sys.stderr,
        )
    return not why


def unusable(device: torch.device) -> str:
    """Return why no kernel runs on a GPU, with the way out; empty if all do."""
    if not torch.version.cuda or torch.cuda.get_device_capability(device)[0] < 8:
        return "they need an NVIDIA GPU of compute capability 8.0 (Ampere) or higher"
    if kernels() is None:
        return "they need Triton from 3.6 on; pip install 'triton>=3.6'"
    return problem(device)


TRIAL = {
    "by_rows": "f9187bafb3ed3ec9",
    "by_columns": "ddefa9515d0f12ba",
    "by_tiles": "93e0b8bcfebee02d",
    "counted": "7dc7a8bdb1a4ee12",
    "by_both": "32561b2975bc58f5",
    "scaled": "b00c3fcc1497e55a",
}
"""Digests of the reference's results for `trial_matrix`, by kernel; a test computes them again."""
TRIAL_CLOCK, TRIAL_WHERE, TRIAL_SIGNS, TRIAL_DIVISOR = Clock(5, step=7), 3, 0b1101011111101000, 48.0
TRIAL_QUANTS = {
    "by_rows": Quant(rounding="stochastic"),
    "by_columns": Quant(rounding="stochastic"),
    "by_tiles": Quant(block="16x16"),
    "counted": Quant(outer=Outer(statistic="percentile:0.9")),
}


def trial_matrix() -> Tensor:
    """Return a bf16 matrix, ragged and more than one slab both ways, of many magnitudes. Nothing is drawn."""
    number = torch.arange(17 * 272)
    powers = torch.tensor([2.0**exponent for exponent in range(-9, 10)], dtype=torch.float32)
    x = (number * 7919 % 4093 - 2046).to(torch.float32) * powers[number * 31 % 19]
    return x.view(17, 272).to(torch.bfloat16)


def digest(*parts: Tensor) -> str:
    """Return a hash of the bits of some tensors, which are copied to the host."""
    text = hashlib.blake2b(digest_size=8)
    for part in parts:
        text.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return text.hexdigest()


def problem(
    device: torch.device, cast: Callable[[Tensor, Form, Clock | None], Quantized] | None = None
) -> str:
    """Launch each kernel once on a small matrix, and return why they cannot be used; empty if they can.

    Triton compiles on the user's machine, with a compiler, headers and a driver that this project does not
    choose. So nothing trusts a kernel before its bits were once those of the reference in this process. The
    device is a GPU, or a CPU in Triton's interpreter; `cast` is `quantize`, or another function to compare.
    """
    try:
        found = _trial(trial_matrix().to(device), cast or quantize)
    except Exception as error:  # whatever Triton, the compiler or the driver raises
        return reason(error)
    different = ", ".join(name for name, bits in found.items() if bits != TRIAL[name])
    if not different:
        return ""
    return (
        f"the results of {different} differ from the reference's; report this with `ablate doctor`'s output"
    )


def _trial(x: Tensor, cast: Cast) -> dict[str, str]:
    """Return the digests of each kernel's results."""

    def bits(one: Quantized) -> tuple[Tensor, ...]:
        assert one.amax is not None
        assert one.block_scale is not None
        return one.values, one.amax.view(1), one.block_scale, one.largest.view(1)

    made = {
        name: cast(
            x.t() if name == "by_columns" else x,
            Form(quant, TRIAL_SIGNS if name == "by_columns" else None, TRIAL_WHERE),
            TRIAL_CLOCK,
        )
        for name, quant in TRIAL_QUANTS.items()
    }
    first, second = (
        Form(TRIAL_QUANTS[name], signs, TRIAL_WHERE)
        for name, signs in (("by_rows", None), ("by_columns", TRIAL_SIGNS))
    )
    one, other = quantize_both(x, first, second, TRIAL_CLOCK)
    amaxes = made["by_rows"].amax, made["by_tiles"].amax
    product = scaled(x.to(torch.float32), *amaxes, TRIAL_DIVISOR, torch.bfloat16)
    return {name: digest(*bits(each)) for name, each in made.items()} | {
        "by_both": digest(*bits(one), *bits(other)),
        "scaled": digest(product),
    }


def can_quantize(x: Tensor, quant: Quant) -> bool:
    """Return True if `quantize` can compute this: NVIDIA's form, and x as kernels take it."""
    return forms.nvidia(quant) and can_take(x)


def can_take(x: Tensor) -> bool:
    """Return True if kernels take this matrix: bf16 or fp32, stored by rows or by columns."""
    return (
        x.dtype in (torch.bfloat16, torch.float32)
        and 0 < x.numel() < 2**31
        and (x.is_contiguous() or x.t().is_contiguous())
        and runs_on(x.device)
    )


def can_rotate(x: Tensor, quant: Quant, rotation: Hadamard) -> bool:
    """Return True if `quantize` rotates, too: groups of 16 of bf16, along the columns of memory."""
    return forms.fuses(quant, rotation) and x.dtype == torch.bfloat16 and not x.is_contiguous()


def can_quantize_both(x: Tensor, first: Quant, second: Quant, rotation: Hadamard | None) -> bool:
    """Return True if `quantize_both` can compute this: x stored by rows, 1x16 blocks in both copies."""
    return (
        x.is_contiguous()
        and (first.block, second.block) == ("1x16", "1x16")
        and (rotation is None or (forms.fuses(second, rotation) and x.dtype == torch.bfloat16))
        and can_quantize(x, first)
        and forms.nvidia(second)
    )


def quantize(x: Tensor, form: Form, clock: Clock | None) -> Quantized:
    """Quantise x [rows, columns] in blocks along its columns, rotated along them first if there are signs. A
    rotated x is stored by columns (`can_rotate`)."""
    down = not x.is_contiguous()
    memory = x.t() if down else x
    amax, largest = _statistic(memory, form, None)
    launch = _tiles if form.quant.block == "16x16" else _columns if down else _rows
    values, scales = launch(memory, amax, form, clock)
    if down:
        values, scales = values.t(), scales.t()
    return Quantized(values[: x.shape[0]], amax, scales.unsqueeze(1).unsqueeze(3), largest)


def quantize_both(x: Tensor, first: Form, second: Form, clock: Clock | None) -> tuple[Quantized, Quantized]:
    """Quantise x [rows, columns], and x.t() rotated by the signs of `second`, as `quantize` does. x is read
    twice, not four times, unless a statistic is a percentile; first for the amaxes of both."""
    rows, columns = x.shape
    largest = amax_both(x, second.signs)
    mine, mine_largest = _statistic(x, first, largest[0])
    theirs, theirs_largest = _statistic(x, second, largest[0 if second.signs is None else 1])
    outputs = (*_by_rows(x), *_by_columns(x))
    with torch.cuda.device_of(x):
        _compiled().by_both[_grid(x)](
            x, *outputs, mine, theirs, second.signs, rows, columns,
            *_range(first), *_range(second), *draws(clock),
            signed_word(first.where), signed_word(second.where),
            _stochastic(first), _stochastic(second), COLUMNS, **EXACT,
        )  # fmt: skip
    values, scales, turned, turned_scales = outputs
    return (
        Quantized(values, mine, scales[:, None, :, None], mine_largest),
        Quantized(turned.t(), theirs, turned_scales.t()[:, None, :, None], theirs_largest),
    )


# --- results of products --------------------------------------------------------------------------


def can_scale(
    x: Tensor, first: Tensor | None, second: Tensor | None, divisor: float, out: torch.dtype
) -> bool:
    """Return True if `scaled` can compute a product on x's device, by amaxes of tensors or rows."""
    return (
        not (first is second is None and divisor == 1)
        and out in (torch.bfloat16, torch.float32)
        and runs_on(x.device)
    )


def scaled(
    y: Tensor, first: Tensor | None, second: Tensor | None, divisor: float, out: torch.dtype
) -> Tensor:
    """Return y * (first * second / divisor), rounded once to `out`, bf16 or fp32, in one launch. y is fp32
    [M, N], contiguous, and overwritten if `out` is fp32; `first` and `second` are the operands' amaxes, fp32
    on the device: a scalar, or [M, 1] and [N, 1]; None: 1. `divisor` is the product of their divisors."""
    from ablate.numerics.kernels import result as device_code

    target = y if out == torch.float32 else torch.empty(y.shape, dtype=out, device=y.device)
    if first is second is None:
        divisor = 1 / divisor  # in fp64, as in `product.alpha`
    per_row = [amax is not None and amax.ndim > 0 for amax in (first, second)]
    if y.numel():
        grid = (-(-y.numel() // device_code.SIZE),)
        with torch.cuda.device_of(y):
            device_code.scaled[grid](
                y, target, first, second, divisor, y.numel(), y.shape[-1], *per_row, device_code.SIZE, **EXACT
            )
    return target


def can_decode(values: Tensor, block_scale: Tensor | None, amax: Tensor | None) -> bool:
    """Return True if `decode` can compute this: block scales that are stored as the values are."""
    scales = None if block_scale is None else block_scale[:, 0, :, 0]
    alike = scales is None or (
        scales.is_contiguous() if values.is_contiguous() else scales.t().is_contiguous()
    )
    return alike and (amax is None or amax.ndim in (0, 2)) and can_take(values)


def decode(
    values: Tensor, tile: tuple[int, int], block_scale: Tensor | None, amax: Tensor | None, factor: float
) -> Tensor:
    """Return the numbers that an operand stands for, fp32 [rows, columns], in one launch.

    Args:
        values: code times block scale, bf16 or fp32 [rows, columns].
        tile: rows and columns of a block.
        block_scale: fp32 [row tiles, 1, column tiles, 1]; None: the values are not divided by it.
        amax: fp32, a scalar or [rows, 1]; None: 1.
        factor: 1 / the operand's divisor.
    """
    from ablate.numerics.kernels import result as device_code

    (rows, columns), down = values.shape, not values.is_contiguous()
    out = torch.empty_like(values, dtype=torch.float32)  # which lies as the values do
    across = 0 if block_scale is None else block_scale.shape[2]
    by_row = amax is not None and amax.ndim > 0
    with torch.cuda.device_of(values):
        device_code.decoded[(-(-values.numel() // device_code.SIZE),)](
            values, block_scale, amax, out, factor, rows, columns, across, *tile, by_row, down,
            device_code.SIZE, **EXACT,
        )  # fmt: skip
    return out


# --- outer statistics -----------------------------------------------------------------------------


_ZEROED = 1024
"""Words that are set to zero by one launch."""
_zeroed: dict[tuple[torch.device, int], list[Tensor]] = {}
"""Words that nothing has written, by device and stream."""
_taking = Lock()


def zeros(number: int, device: torch.device) -> Tensor:
    """Return one or two int32 zeros for the atomics of a kernel, without a launch for most calls.

    A launch costs a GPU as much for one word as for many, and each quantised operand needs a word or two. A
    graph that is being captured sets its own words to zero, since it is replayed.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(number, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    with _taking, torch.inference_mode(False):
        words = _zeroed.setdefault(key, [])
        if not words:
            words[:] = torch.zeros(_ZEROED, dtype=torch.int32, device=device).split(2)
        return words.pop()[:number]


def forget_zeros() -> None:
    """Forget the words that are left, which are those of a device that is no more."""
    _zeroed.clear()


def amax_both(x: Tensor, signs: int | None) -> Tensor:
    """Return the amax of x [rows, columns], and of x.t() rotated by `signs` (0 without): fp32 [2], or NaN."""
    bits = zeros(2, x.device)
    with torch.cuda.device_of(x):
        _compiled().amaxes[_grid(x)](x, signs, bits, *x.shape, COLUMNS, **EXACT)
    return bits.view(torch.float32)


def percentile(x: Tensor, signs: int | None, p: Fraction) -> tuple[Tensor, Tensor]:
    """Return the order statistic ceil(p n) of the magnitudes of x, as it lies in memory, and the largest one:
    fp32 scalars, NaN where the rank falls on one.

    x is bf16 or fp32 [rows, columns], contiguous, and bf16 if it is rotated. `signs` are those of a rotation
    of the columns, which is then padded to sixteen rows, all of which count. p is above 0, at most 1.
    """
    rows = x.shape[0] if signs is None else x.shape[0] + -x.shape[0] % 16
    return order_statistic(x, signs, math.ceil(p * (rows * x.shape[1])))


def can_order(x: Tensor) -> bool:
    """Return True if `order_statistic` can compute this: any layout, bf16 or fp32, on a GPU with kernels."""
    return x.dtype in (torch.bfloat16, torch.float32) and 0 < x.numel() < 2**31 and runs_on(x.device)


def order_statistic(x: Tensor, signs: int | None, rank: int) -> tuple[Tensor, Tensor]:
    """Return the magnitude of a rank, counted from 1, and the largest one, as `percentile` does."""
    from ablate.numerics.kernels import order_statistic as device_code

    digits = device_code.DIGITS[x.element_size()]
    memory = torch.zeros(sum(2**width for _, width in digits) + 4, dtype=torch.int32, device=x.device)
    *counts, found, largest = memory.split([*(2**width for _, width in digits), 3, 1])
    with torch.cuda.device_of(x):
        for count, digit in zip(counts, digits, strict=True):
            device_code.counted[_grid(x)](x, signs, count, found, largest, *x.shape, *digit, COLUMNS, **EXACT)
            device_code.selected[(1,)](count, found, rank, *digit, **EXACT)
    scalars = memory[-2:].view(torch.float32)
    return scalars[0], scalars[1]


def _statistic(memory: Tensor, form: Form, largest: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the outer statistic of a copy, and its largest magnitude, which may be given."""
    assert form.quant.outer is not None
    if form.statistic is None and tag(form.quant.outer.statistic) == "percentile":
        p = argument(form.quant.outer.statistic)
        assert p is not None
        return percentile(memory, form.signs, p)
    if largest is None:
        largest = amax_both(memory, form.signs)[0 if form.signs is None else 1]
    return largest if form.statistic is None else form.statistic(largest), largest


# --- launches, on x as it lies in memory: [rows, columns], contiguous -----------------------------


def _rows(x: Tensor, amax: Tensor, form: Form, clock: Clock | None) -> tuple[Tensor, Tensor]:
    values, scales = _by_rows(x)
    how = *_range(form), *draws(clock), signed_word(form.where), _stochastic(form)
    with torch.cuda.device_of(x):
        _compiled().by_rows[_grid(x)](x, values, scales, amax, *x.shape, *how, COLUMNS, **EXACT)
    return values, scales


def _columns(x: Tensor, amax: Tensor, form: Form, clock: Clock | None) -> tuple[Tensor, Tensor]:
    values, scales = _by_columns(x)
    how = *_range(form), *draws(clock), signed_word(form.where), _stochastic(form)
    with torch.cuda.device_of(x):
        _compiled().by_columns[_grid(x)](
            x, values, scales, amax, form.signs, *x.shape, *how, COLUMNS, **EXACT
        )
    return values, scales


def _tiles(x: Tensor, amax: Tensor, form: Form, clock: Clock | None) -> tuple[Tensor, Tensor]:
    rows, columns = (-(-size // 16) for size in x.shape)
    values, scales = _outputs(x, rows * 16, columns * 16, rows, columns)
    with torch.cuda.device_of(x):
        _compiled().by_tiles[_grid(x)](x, values, scales, amax, *x.shape, *_range(form), COLUMNS, **EXACT)
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


def _grid(x: Tensor) -> tuple[int]:
    """Return Triton's grid: one program for each slab of sixteen rows, COLUMNS wide."""
    rows, columns = x.shape
    return (-(-rows // 16) * -(-columns // COLUMNS),)


def _range(form: Form) -> tuple[float, float]:
    assert form.quant.outer is not None
    return 6.0 * form.quant.outer.bound, form.quant.range.headroom


def _stochastic(form: Form) -> bool:
    return form.quant.rounding == "stochastic"


def draws(clock: Clock | None) -> tuple[int, int, int, int]:
    """Return the key, the step and the micro-batch; zeros, which nothing reads, without a clock."""
    if clock is None:
        return 0, 0, 0, 0
    key = philox_key(clock)
    return signed_word(key[0]), signed_word(key[1]), signed_word(clock.step), signed_word(clock.micro_batch)


def signed_word(number: int) -> int:
    """Return the 32 bits as an int32. Triton would compile a kernel for each size of integer."""
    return (number + 2**31) % 2**32 - 2**31


def sign_word(signs: Tensor) -> int:
    """Return signs, 16 numbers on the CPU, as a word whose bit r is 1 if the sign of r is negative."""
    return sum(1 << number for number, sign in enumerate(signs.tolist()) if sign < 0)
