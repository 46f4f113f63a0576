"""Kernels for CUDA tensors: whether they run here, scaling of products, order statistics.

general_cuda.py has the quantisers. Nothing here waits for the device.

What is not finite needs no second path: the kernels compute what the reference does, and the amax, which
stays on the device, shows it.

Launches have a fixed configuration. Triton's autotuning timed three for each kernel and width in each
process, 7 s a trial; by their machine code (`benchmarks/kernel_code.py`), slabs of 256 columns with 4 warps
execute a fifth to two fifths fewer instructions per element than 128, as few as 512 with 8 warps, and spill
nothing.
"""

import hashlib
import math
import sys
from collections.abc import Callable
from functools import cache
from threading import Lock
from types import ModuleType
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.numerics.kernels.launch_errors import reason
from ablate.numerics.philox import Clock, philox_key

EXACT = {"enable_fp_fusion": False, "enable_reflect_ftz": False}
"""Options of every launch: no product and sum contracted to one instruction, which rounds once instead of
twice, and no subnormals flushed to zero, which would lose 1 / S of a tiny tensor."""
Statistic = Callable[[Tensor], Tensor]
"""Outer statistic, fp32 scalar on the device, as a function of the largest magnitude of what is quantised."""


@cache
def kernels() -> ModuleType | None:
    """Return general_triton.py, or None without a Triton that can be exact. Torch's CUDA builds have one
    since 2.10, those for CPUs none. Before 3.6, Triton flushes subnormals in divisions, whatever the option
    says."""
    try:
        from triton.backends.nvidia.compiler import CUDAOptions

        from ablate.numerics.kernels import general_triton
    except ImportError:
        return None
    return general_triton if all(hasattr(CUDAOptions, option) for option in EXACT) else None


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
    "counted": "9f183705ea88ee52",
    "remembered": "295747eb62673cf7",
    "scaled": "39f4e2e3da42ba35",
    "parted": "cc6b9f97c20d8e4d",
    "squared": "bf1833992699d544",
    "turned": "06a8e00345f4f0b8",
    "rescaled": "06bed2027bbbcc35",
    "summed": "2e018d727115218e",
}
"""Digests of the reference's results for `trial_matrix`, by kernel; a test computes them again."""
TRIAL_CLOCK, TRIAL_WHERE, TRIAL_RANK, TRIAL_DIVISOR = Clock(5, step=7), 3, 4000, 48.0
TRIAL_SIGNS = 32 * [1] + 32 * [-1]
OTHER_TRIALS: dict[str, Callable[[Tensor], Tensor]] = {}
"""Launches on `trial_matrix` of kernels that files above this one have."""


def trial_matrix() -> Tensor:
    """Return a bf16 matrix, ragged and more than one slab both ways, of many magnitudes. Nothing is drawn."""
    number = torch.arange(17 * 272)
    powers = torch.tensor([2.0**exponent for exponent in range(-9, 10)], dtype=torch.float32)
    x = (number * 7919 % 4093 - 2046).to(torch.float32) * powers[number * 31 % 19]
    return x.view(17, 272).to(torch.bfloat16)


def trial_scales(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return block scales and an amax for `trial_matrix`."""
    scales = x[:, ::16].abs().to(torch.float32)
    return scales[:, None, :, None], x.new_full((), TRIAL_DIVISOR, dtype=torch.float32)


def digest(*parts: Tensor) -> str:
    """Return a hash of the bits of some tensors, which are copied to the host."""
    text = hashlib.blake2b(digest_size=8)
    for part in parts:
        text.update(part.cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return text.hexdigest()


def problem(device: torch.device) -> str:
    """Launch each kernel but the quantisers' on a small matrix, and return why they cannot be used; empty if
    they can.

    Triton compiles on the user's machine, with a compiler, headers and a driver that this project does not
    choose. So nothing trusts a kernel before its bits were once those of the reference in this process;
    `on_gpu.agrees` looks at each form of the quantisers. The device is a GPU, or a CPU in Triton's
    interpreter.
    """
    try:
        x = trial_matrix().to(device)
        ordered = order_statistic(x, None, TRIAL_RANK)
        steep = Finish(slope=x.abs().to(torch.float32), divisor=5.0, limit=3.0)
        products = [
            scaled(x.to(torch.float32), *ordered, TRIAL_DIVISOR, torch.bfloat16, None, finish)
            for finish in (PLAIN, steep)
        ]
        past = ordered[0].expand(3).contiguous()
        means = x[:1].to(torch.float32)
        found = {
            "counted": digest(*(each.view(1) for each in ordered)),
            "remembered": digest(*(each.view(-1) for each in remembered(ordered[1], past, ordered[0], 1, 3))),
            "scaled": digest(*products),
            "parted": digest(*parted(x, x.dtype, ordered[0]), *parted(x, x.dtype, means=means)),
            "squared": digest(squared(x)),
        } | {name: digest(launch(x)) for name, launch in OTHER_TRIALS.items()}
    except Exception as error:  # whatever Triton, the compiler or the driver raises
        return reason(error)
    different = ", ".join(name for name, bits in found.items() if bits != TRIAL[name])
    if not different:
        return ""
    return (
        f"the results of {different} differ from the reference's; report this with `ablate doctor`'s output"
    )


def can_take(x: Tensor) -> bool:
    """Return True if kernels take this matrix: bf16 or fp32, stored by rows or by columns."""
    return (
        x.dtype in (torch.bfloat16, torch.float32)
        and 0 < x.numel() < 2**31
        and (x.is_contiguous() or x.t().is_contiguous())
        and runs_on(x.device)
    )


# --- results of products --------------------------------------------------------------------------


def can_scale(
    x: Tensor, first: Tensor | None, second: Tensor | None, divisor: float, out: torch.dtype, more: bool
) -> bool:
    """Return True if `scaled` can compute a product on x's device, by amaxes of tensors or rows. `more`: it
    also adds something, or rounds in place, and has work if the factor is 1."""
    return (
        (more or not (first is second is None and divisor == 1))
        and out in (torch.bfloat16, torch.float32)
        and runs_on(x.device)
    )


class Addend(NamedTuple):
    """Product that another one is added to: sums * (first * second / divisor), and times the side."""

    sums: Tensor | None
    """fp32 [M, N], [M, 1] or [1, N]; None: zeros."""
    first: Tensor | None = None
    second: Tensor | None = None
    divisor: float = 1.0
    side: Tensor | None = None
    """bf16 or fp32 [1, N] of sums [M, 1], or [M, 1] of sums [1, N]; None: 1."""
    spots: Tensor | None = None
    """int32 [N]: columns of the sums, then [M, few], or -1 for zeros; None: those of the result."""


class Finish(NamedTuple):
    """Last steps of a product, which has been rounded to the type of its result."""

    wide: bool = False
    """A GPU's kernel may return the rounded result in fp32."""
    slope: Tensor | None = None
    """fp32, with the rows of the result and at least its columns: the result is multiplied by
    slope / divisor, at most `limit`, and rounded again."""
    divisor: float = 1.0
    limit: float = math.inf

    @property
    def factor(self) -> Tensor | None:
        """The slope after its division and limit."""
        if self.slope is None or (self.divisor, self.limit) == (1.0, math.inf):
            return self.slope
        # By a tensor, because a GPU may turn `/ number` into `* reciprocal`.
        return (self.slope / self.slope.new_full((), self.divisor)).clamp(max=self.limit)

    def of(self, y: Tensor) -> Tensor:
        """Return the result of a product y, by torch's operations."""
        factor = self.factor
        # Computed in fp32, and rounded once.
        return y if factor is None else torch.mul(y, factor[:, : y.shape[1]], out=torch.empty_like(y))


PLAIN = Finish()


def scaled(
    y: Tensor,
    first: Tensor | None,
    second: Tensor | None,
    divisor: float,
    out: torch.dtype,
    base: Tensor | Addend | None = None,
    finish: Finish = PLAIN,
    apart: bool = False,
) -> Tensor:
    """Return base + y * (first * second / divisor), rounded once to `out`, bf16 or fp32, and finished, in one
    launch.

    y is fp32 [M, N], contiguous, and overwritten by an fp32 result unless it is kept `apart`; `base`, fp32
    like y, None for zeros.
    `first` and `second` are the operands' amaxes, fp32 on the device: a scalar, or [M, 1] and [N, 1]; None:
    1. `divisor` is the product of their divisors.
    """
    from ablate.numerics.kernels import result as device_code

    within = (finish.wide or out == torch.float32) and not apart
    target = y if within else torch.empty(y.shape, dtype=out, device=y.device)
    base = base if isinstance(base, Addend) else Addend(base)
    given = base.sums, base.side, None if finish.slope is None else finish.slope[:, : y.shape[1]]
    sums, side, slope = (None if each is None else each.contiguous() for each in given)
    along = None
    if sums is not None and base.spots is None and sums.shape != y.shape:
        along = "row" if sums.shape[0] == 1 else "column"
    amaxes = (first, second, divisor), base[1:4]
    factors = [(a, b, 1 / of if a is b is None else of) for a, b, of in amaxes]  # in fp64, as in `alpha`
    per_row = [[amax is not None and amax.ndim > 0 for amax in each[:2]] for each in amaxes]
    if y.numel():
        grid = (-(-y.numel() // device_code.SIZE),)
        with torch.cuda.device_of(y):
            device_code.scaled[grid](
                y, target, *factors[0], sums, *factors[1], side, slope, *finish[2:],
                y.numel(), y.shape[-1],
                out == torch.bfloat16, *per_row[0], along, *per_row[1], device_code.SIZE, base.spots,
                sums.shape[1] if sums is not None and base.spots is not None else 0, **EXACT,
            )  # fmt: skip
    return target


def squared(x: Tensor) -> Tensor:
    """Return the squares of x, fp32 and stored as x is, in one launch. `can_take` accepts x."""
    from ablate.numerics.kernels import result as device_code

    out = torch.empty_like(x, dtype=torch.float32)
    with torch.cuda.device_of(x):
        device_code.squared[(-(-x.numel() // device_code.SIZE),)](
            x, out, x.numel(), device_code.SIZE, **EXACT
        )
    return out


def placed(chosen: Tensor, channels: int) -> tuple[Tensor, Tensor]:
    """Return the place of each channel among the chosen ones, ascending, int32, -1 of others and of what pads
    them to a multiple of 128; and the chosen ones in this order. `chosen` is int64 [number], in any order, on
    a GPU with kernels."""
    from ablate.numerics.kernels import result as device_code

    programs, kept = -(-channels // 128), torch.empty_like(chosen)
    place = torch.empty(programs * 128, dtype=torch.int32, device=chosen.device)
    with torch.cuda.device_of(chosen):
        device_code.placed[(programs,)](chosen, place, kept, len(chosen), 128, **EXACT)
    return place, kept


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


def parted(
    x: Tensor, dtype: torch.dtype, limit: Tensor | None = None, means: Tensor | None = None, keep: bool = True
) -> list[Tensor]:
    """Return x less a part, fp32 and stored as x is, and the part in `dtype`, bf16 or fp32, in one launch.

    The part is `means`, fp32 [rows, 1] or [1, columns], or what lies beyond +-limit, an fp32 scalar on the
    device, and is not returned unless `keep`. `can_take` accepts x.
    """
    from ablate.numerics.kernels import result as device_code

    rest = torch.empty_like(x, dtype=torch.float32)
    like = x if means is None else means
    part = torch.empty_like(like, dtype=dtype) if keep else None
    by_row = means is not None and (means.shape == (x.shape[0], 1)) == x.is_contiguous()
    with torch.cuda.device_of(x):
        device_code.parted[(-(-x.numel() // device_code.SIZE),)](
            x, rest, part, limit, means, x.numel(), x.shape[x.is_contiguous()], by_row, device_code.SIZE,
            **EXACT,
        )  # fmt: skip
    return [rest] if part is None else [rest, part]


# --- outer statistics -----------------------------------------------------------------------------


_ZEROED = 1 << 16
"""Words that are set to zero by one launch."""
_zeroed: dict[tuple[torch.device, int], Tensor] = {}
"""Words that nothing has written, by device and stream."""
_taking = Lock()


def zeros(number: int, device: torch.device) -> Tensor:
    """Return int32 zeros for the atomics of a kernel, without a launch for most calls.

    A launch costs a GPU as much for one word as for many, and each quantised operand needs a word or two, or
    the bins of a histogram. A graph that is being captured sets its own words to zero, since it is replayed.
    """
    if device.type != "cuda" or torch.cuda.is_current_stream_capturing():
        return torch.zeros(number, dtype=torch.int32, device=device)
    key = device, torch.cuda.current_stream(device).cuda_stream
    with _taking, torch.inference_mode(False):
        words = _zeroed.get(key)
        if words is None or len(words) < number:
            words = torch.zeros(_ZEROED, dtype=torch.int32, device=device)
        _zeroed[key] = words[number + -number % 4 :]  # aligned, or each alignment would be compiled anew
        return words[:number]


def forget_zeros() -> None:
    """Forget the words that are left, which are those of a device that is no more."""
    _zeroed.clear()


def remembered(
    current: Tensor, past: Tensor | None, entry: Tensor | None, shift: int, steps: int
) -> list[Tensor]:
    """Return what `result.remembered` writes of fp32 scalars and `past` [n]: the statistic of a step, its
    entry, and those of the steps before it [steps].

    The first two have memory of their own: an entry is kept for many steps."""
    from ablate.numerics.kernels import result as device_code

    out, before = (torch.empty(size, dtype=torch.float32, device=current.device) for size in (2, steps))
    with torch.cuda.device_of(current):
        device_code.remembered[(1,)](
            current, past, entry, out, before, shift, 0 if past is None else len(past), steps,
            1 << max(0, steps - 1).bit_length(), **EXACT,
        )  # fmt: skip
    return [*out, before]


def can_order(x: Tensor) -> bool:
    """Return True if `order_statistic` can compute this: any layout, bf16 or fp32, on a GPU with kernels."""
    return x.dtype in (torch.bfloat16, torch.float32) and 0 < x.numel() < 2**31 and runs_on(x.device)


def order_statistic(x: Tensor, signs: int | None, rank: int) -> tuple[Tensor, Tensor]:
    """Return the magnitude of a rank, counted from 1, and the largest one: fp32 scalars, NaN where the rank
    falls on one. x is bf16 or fp32 [rows, columns], contiguous, and bf16 if it is rotated: `signs` are those
    of a rotation of the columns, which is then padded to sixteen rows, all of which count."""
    from ablate.numerics.kernels import order_statistic as device_code

    digits = device_code.DIGITS[x.element_size()]
    sizes = [*(2**width for _, width in digits), *(1 for _ in digits), 3, 1]
    memory = zeros(sum(sizes), x.device)
    programs = (-(-x.shape[0] // 16) * -(-x.shape[1] // device_code.COLUMNS.value),)
    *words, found, largest = memory.split(sizes)
    with torch.cuda.device_of(x):
        for number, digit in enumerate(digits):
            counts, ended = words[number :: len(digits)]
            device_code.counted[programs](
                x, signs, counts, ended, found, largest, rank, *x.shape, *digit, **EXACT
            )
    scalars = memory[-2:].view(torch.float32)
    return scalars[0], scalars[1]


# --- arguments of launches ------------------------------------------------------------------------


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
