"""Two-level scaling: an fp32 statistic of a tensor, row or group of 128, and a small scale for each block.

The problem: E2M1 spans only 0.5 to 6, and an E4M3 block scale only 2^-9 to 448, so a block scale alone cannot
reach the range of a gradient tensor. The idea: an outer factor S = 6 * 448 / amax maps the whole tensor onto
the range of (block scale * element). Each block of 16 then gets the E4M3 scale s that maps its own largest
magnitude to 6, and its elements are multiplied by 1 / (s / S).

Example: in a tensor with amax 2688, S is 1. A block whose largest magnitude is 3 gets s = 0.5 and its
elements are doubled, so 3 becomes 6; after rounding, value(code) * s * amax / 2688 is 3 again.

The order of operations is part of the specification (docs/reference/numerics.md, section 3), since another
order rounds differently at exact ties, which bf16 data hits. Torch's own conversions are not used for
one-byte scales: `.to(float8_e4m3fn)` does not saturate.

NaN and infinities are not refused. A non-finite statistic spreads to the operand, where telemetry counts it.
Contradictory settings are refused in spec.py, before anything is computed.

Layout: tiles are [row tiles, rows, column tiles, columns]. Statistics and scales broadcast against that.
"""

import math
from collections.abc import Callable
from fractions import Fraction

import torch
from torch import Tensor

from ablate.numerics import own_calls
from ablate.numerics.formats import SCALES, Format, element_format
from ablate.numerics.history import History
from ablate.numerics.kernels import cuda
from ablate.numerics.own import Own
from ablate.numerics.partition import Partition
from ablate.numerics.philox import Clock
from ablate.numerics.rounding import SCALE_ROUNDINGS
from ablate.numerics.spec import BlockScale, Outer, Quant, argument, tag

FLT_MAX = torch.finfo(torch.float32).max
_SMALL = 2.0**-50
"""Blocks whose amax is below this, or above its inverse, are multiplied by a power of two before they are
squared."""
_LIFT = 2.0**-96
"""Power of two for large blocks; its inverse is that for small ones."""
_SMALLEST = 2.0**-127
"""E8M0's code 0, a subnormal in fp32."""


# --- statistics -----------------------------------------------------------------------------------


def block_amax(tiles: Tensor) -> Tensor:
    """Return the largest magnitude of each block, fp32 [row tiles, 1, column tiles, 1]."""
    return tiles.abs().amax(dim=1, keepdim=True).amax(dim=3, keepdim=True)


def block_rms(tiles: Tensor) -> Tensor:
    """Return the root mean square of each block, fp32 [row tiles, 1, column tiles, 1]."""
    lift = _lift(tiles)
    return _root(_block_mean((tiles * lift).square())) / lift


def block_std(tiles: Tensor) -> Tensor:
    """Return the population standard deviation of each block, fp32 [row tiles, 1, column tiles, 1]."""
    lift = _lift(tiles)
    lifted = tiles * lift
    return _root(_block_mean((lifted - _block_mean(lifted)).square())) / lift


def _lift(tiles: Tensor) -> Tensor:
    """Return the power of two that keeps the squares of each block in fp32's range; 1 for ordinary blocks."""
    largest = block_amax(tiles)
    lift = torch.where(largest < _SMALL, 1 / _LIFT, 1.0)
    return torch.where(largest > 1 / _SMALL, _LIFT, lift)


def _root(x: Tensor) -> Tensor:
    """Return the square root, rounded correctly, which torch's in fp32 is not on a CPU with MKL."""
    return x.double().sqrt().to(torch.float32)


def _block_mean(tiles: Tensor) -> Tensor:
    """Return the mean of each block; of a square one, the same for the transposed matrix."""
    terms = tiles.permute(0, 2, 1, 3)
    number = terms.shape[2] * terms.shape[3]
    if terms.shape[2] == terms.shape[3]:
        terms, number = terms + terms.transpose(2, 3), 2 * number
    return (tree_sum(terms.flatten(2)) / number)[:, None, :, None]


def tree_sum(terms: Tensor) -> Tensor:
    """Add along the last dimension, fp32 [..., n] with n a power of two: the second half to the first, and so
    on, on every device alike. Torch's own order depends on the machine."""
    while terms.shape[-1] > 1:
        first, second = terms.chunk(2, dim=-1)
        terms = first + second
    return terms.squeeze(-1)


BLOCK_STATISTICS = {
    function.__name__.removeprefix("block_"): function for function in (block_amax, block_rms, block_std)
}


def block_statistic(tiles: Tensor, amaxes: Tensor, statistic: str) -> Tensor:
    """Return the number that the block scale maps to the top of the element grid, fp32 like `amaxes`, the
    largest magnitudes [row tiles, 1, column tiles, 1]: these, c times the root mean square (`rms:c`) or the
    standard deviation (`std:c`) of each block of the fp32 tiles, or what a function of the user's returns."""
    if isinstance(statistic, Own):
        return own_calls.statistic("range.statistic", statistic, tiles, amaxes)
    factor = argument(statistic)
    return amaxes if factor is None else BLOCK_STATISTICS[tag(statistic)](tiles) * float(factor)


def amax(
    x: Tensor, amaxes: Tensor, argument: Fraction | None, history: History | None, clock: Clock | None
) -> Tensor:
    """Return the largest magnitude of each group, fp32: a scalar, or [rows, 1, 1 or groups, 1]."""
    return amaxes.amax() if amaxes.ndim == 1 else amaxes


def percentile(
    x: Tensor, amaxes: Tensor, p: Fraction | None, history: History | None, clock: Clock | None
) -> Tensor:
    """Return the order statistic k = ceil(p n) of the n magnitudes, without interpolation, fp32. Blocks whose
    largest magnitude is above it get the largest block scale, and their elements saturate."""
    assert p is not None
    if amaxes.ndim < 2:
        return order_statistic(x, math.ceil(p * x.numel()))
    return x.abs().kthvalue(math.ceil(p * x.shape[1]), dim=1).values.to(torch.float32).view(-1, 1, 1, 1)


def order_statistic(x: Tensor, k: int) -> Tensor:
    """Return the k-th smallest magnitude of `x`, which is not empty, as an fp32 scalar.

    In bf16 there are only 32,768 magnitudes, ordered as their bits are; counting them on a CPU is eight times
    as fast as selecting. On a GPU, torch selects with one thread block, and `bincount` waits for the device:
    kernels count there, or an addition by index without them. A NaN counts as larger than infinity.
    """
    if cuda.can_order(x):
        return cuda.order_statistic(x if x.is_contiguous() else x.t().contiguous(), None, k)[0]
    if x.dtype != torch.bfloat16:
        return x.reshape(-1).abs().kthvalue(k).values.to(torch.float32)
    magnitudes = x.reshape(-1).view(torch.int16) & 0x7FFF
    counts = (
        torch.bincount(magnitudes, minlength=2**15)
        if x.device.type == "cpu"
        else histogram(magnitudes, 2**15)
    )
    smaller = (counts.cumsum(0) < k).sum()
    return smaller.to(torch.int16).view(torch.bfloat16).to(torch.float32)


def histogram(values: Tensor, size: int) -> Tensor:
    """Return the number of each integer from 0 to size - 1 in `values` [n], integers of any type in that
    range, as int64, without a wait for a GPU."""
    ones = torch.ones((), dtype=torch.int64, device=values.device).expand(values.shape)
    counts = torch.zeros(size, dtype=torch.int64, device=values.device)
    return counts.scatter_add_(0, values.to(torch.int64), ones)


def delayed(
    x: Tensor, amaxes: Tensor, steps: Fraction | None, history: History | None, clock: Clock | None
) -> Tensor:
    """Return the largest amax of the last `steps` steps; of this call if there is none. fp32 scalar."""
    return _remembered(History.delayed, amaxes, steps, history, clock)


def hold(
    x: Tensor, amaxes: Tensor, steps: Fraction | None, history: History | None, clock: Clock | None
) -> Tensor:
    """Return the first amax of the current period of `steps` steps. fp32 scalar."""
    return _remembered(History.held, amaxes, steps, history, clock)


def _remembered(
    rule: Callable[[History, Tensor, Clock, int], Tensor],
    amaxes: Tensor,
    steps: Fraction | None,
    history: History | None,
    clock: Clock | None,
) -> Tensor:
    """Return the amax that a rule of the history gives; the present one without a history."""
    current = amaxes.amax() if amaxes.ndim else amaxes
    if history is None:
        return current
    assert clock is not None
    assert steps is not None
    return rule(history, current, clock, int(steps))


def static(
    x: Tensor, amaxes: Tensor, value: Fraction | None, history: History | None, clock: Clock | None
) -> Tensor:
    """Return the given magnitude, fp32 scalar."""
    assert value is not None
    return torch.full((), float(value), dtype=torch.float32, device=x.device)  # no copy to a GPU


STATISTICS = {function.__name__: function for function in (amax, percentile, delayed, hold, static)}
"""Outer statistics, each a function of the tensor, the amaxes of its groups, the number behind the colon, the
history and the clock."""


def outer_statistic(
    x: Tensor,
    tiles: Tensor | None,
    amaxes: Tensor,
    outer: Outer,
    history: History | None,
    clock: Clock | None,
    partition: Partition | None = None,
) -> Tensor:
    """Return the outer statistic of the copy `x` that is quantised (after rotation and padding).

    fp32: a scalar (`tensor`), [row tiles, 1, 1, 1] (`row`, `rows:n`) or [rows, 1, column tiles, 1]
    (`block:128`); 0 for an empty tensor. `x` is [rows, columns], bf16, fp16 or fp32, `tiles` the same in
    fp32, `amaxes` the largest magnitude of each block; for granularity `tensor`, None and the largest of all
    are enough. `delayed` and `hold` read earlier amaxes from `history`, which needs a clock; None: the
    current one is used. `partition` is given if `x` is one part of a matrix: the statistic is then the whole
    matrix's (collective).
    """
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    grouped = amaxes.flatten() if amaxes.ndim else amaxes
    if isinstance(outer.statistic, Own):
        return own_calls.statistic("outer.statistic", outer.statistic, x, grouped)
    if outer.granularity == "row":
        grouped = amaxes.amax(dim=2, keepdim=True)
    elif tag(outer.granularity) == "rows":
        assert tiles is not None
        assert outer.rows is not None
        grouped = _of_rows(amaxes.amax(dim=2).flatten(), outer.rows // tiles.shape[1]).view(-1, 1, 1, 1)
    elif outer.granularity == "block:128":
        assert tiles is not None
        blocks = 128 // tiles.shape[3]
        rows, _, columns, _ = amaxes.shape
        whole = torch.nn.functional.pad(amaxes.view(rows, columns), (0, -columns % blocks)).view(
            rows, -1, blocks
        )
        grouped = whole.amax(dim=2).repeat_interleave(blocks, dim=1)[:, :columns].view(rows, 1, columns, 1)
    divided = partition is not None and (partition.axis == 1 or outer.granularity == "tensor")
    if partition is not None and divided and outer.granularity != "block:128":
        if tag(outer.statistic) == "percentile":
            x = partition.gathered(x)
        else:
            grouped = partition.largest(grouped.amax(dim=0, keepdim=True) if grouped.ndim == 1 else grouped)
    return STATISTICS[tag(outer.statistic)](x, grouped, argument(outer.statistic), history, clock)


def _of_rows(amaxes: Tensor, each: int) -> Tensor:
    """Return the largest of every `each` consecutive amaxes, at each of their places; fp32 [row tiles]."""
    groups = torch.nn.functional.pad(amaxes, (0, -len(amaxes) % each)).view(-1, each)
    return groups.amax(dim=1).repeat_interleave(each)[: len(amaxes)]


# --- scales ---------------------------------------------------------------------------------------


def encode_scale(amax: Tensor, quant: Quant) -> Tensor:
    """Return S = 6 * bound / amax, fp32 like `amax`, at most FLT_MAX; 1 if amax is 0 or infinite (Transformer
    Engine 2.20). 6 stands for the element's maximum."""
    assert quant.outer is not None
    # A tensor, not a Python number: torch computes `number / tensor` as number * reciprocal, which rounds
    # twice.
    top = torch.full_like(amax, element_format(quant.element).max * quant.outer.bound)
    scale = (top / amax).clamp(max=FLT_MAX)
    return scale.masked_fill_((amax == 0) | (scale == 0), 1.0)


def block_scales(
    largest: Tensor, scale: Tensor, quant: Quant, bits: Tensor | None = None, tiles: Tensor | None = None
) -> Tensor:
    """Return each block's scale: largest * (S * fp32(1/6) * headroom), rounded once to the scale format.

    Transformer Engine up to 2.14, and the equation of arXiv 2509.25149, compute `largest / 6 * S` instead.
    That differs in about 0.1 % of cases, at exact ties, which bf16 data hits. `largest`, the block statistic,
    is fp32 [row tiles, 1, column tiles, 1], like the result; S broadcasts to it. `bits` are 24 random bits
    for each block, as fp32 like `largest`, if scales are rounded stochastically; a rounding of the user's
    needs the fp32 `tiles`.
    """
    assert quant.scale is not None
    top = quant.range.map_to or element_format(quant.element).max
    multiplier = scale * torch.full_like(scale, 1 / top)
    if quant.range.headroom != 1:
        multiplier = multiplier * quant.range.headroom
    # At most FLT_MAX, or a block of zeros would be multiplied by infinity.
    exact = (largest * multiplier.clamp(max=FLT_MAX)).clamp(max=FLT_MAX)
    if isinstance(quant.scale.rounding, Own):
        assert tiles is not None
        return _by_users_rule(exact, quant, bits, tiles * scale * quant.range.prescale)
    rounded = round_scale(exact, quant.scale, bits)
    if quant.scale.halve_below is None:
        return rounded
    below = exact / rounded < torch.full_like(exact, quant.scale.halve_below)
    return torch.where(below, (rounded / 2).clamp(min=_SMALLEST), rounded)


def round_scale(scale: Tensor, to: BlockScale, bits: Tensor | None = None) -> Tensor:
    """Round scales, non-negative fp32 of any shape, to their format, saturating, and apply its rule for zero.
    `bits` are 24 random bits for each scale, as fp32 like `scale`, if rounding is stochastic."""
    grid = SCALES[to.format]
    if not grid.zero and not grid.mantissa:
        return _power_of_two(scale, to, grid, bits)
    if not grid.zero:
        return SCALE_ROUNDINGS[to.rounding](scale.clamp(min=2.0**grid.emin), grid, bits, 24)
    if grid.dtype is not None and grid.bits >= 16:
        rounded = scale.clamp(max=grid.max).to(getattr(torch, grid.dtype)).to(torch.float32)
    else:
        rounded = SCALE_ROUNDINGS[to.rounding](scale, grid, bits, 24)
    return _without_zero(rounded, to)


def _without_zero(rounded: Tensor, to: BlockScale) -> Tensor:
    """Apply the format's rule for a scale that was rounded to zero."""
    if to.zero == "zero":
        return rounded
    return torch.where(rounded == 0, 1.0 if to.zero == "one" else 2.0 ** SCALES[to.format].emin, rounded)


def _by_users_rule(exact: Tensor, quant: Quant, bits: Tensor | None, tiles: Tensor) -> Tensor:
    """Round scales by the user's function; in a format without zero, 0 stands for its smallest value."""
    to = quant.scale
    assert to is not None
    assert isinstance(to.rounding, Own)
    plain = BlockScale(format=to.format)
    grid, element = SCALES[to.format], element_format(quant.element)
    smallest = 0.0 if grid.zero else round_scale(exact.new_zeros(()), plain)

    def nearest(scale: Tensor) -> Tensor:
        """Round to the format, in which 0 stays."""
        return torch.where(scale == 0, scale, round_scale(scale, plain))

    made = own_calls.scales(to.rounding, exact, grid, bits, tiles, element, nearest)
    return _without_zero(made.clamp(min=smallest), to)


def _power_of_two(scale: Tensor, to: BlockScale, grid: Format, bits: Tensor | None) -> Tensor:
    """Round to E8M0, from 2^-127 to 2^127. Small scales are multiplied by 2^40 first, since the smallest E8M0
    values are subnormal in fp32."""
    lift = torch.where(scale < 2.0**-60, scale.new_full((), 2.0**40), 1.0)
    rounded = SCALE_ROUNDINGS[to.rounding](scale.clamp(min=_SMALLEST) * lift, grid, bits, 24)
    return (rounded / lift).clamp(_SMALLEST, grid.max)


def micro_scales(
    tiles: Tensor, amaxes: Tensor, quant: Quant, bits: Tensor | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the scales of a block with micro-exponents, in HiF4's order of operations (arXiv 2602.11287).

    Elements that reach 1.75 reach 7 with two levels of one-bit exponents. So the scale s is bf16(a *
    bf16(1/7)), rounded to the scale format, and r = bf16(1/s). The first exponent is 1 in a sub-block whose
    largest magnitude times r is 4 or more, the second where what then remains is 2 or more.

    `tiles` are fp32 [row tiles, 1, column tiles, columns], `amaxes` (a), the block scales and the 24 random
    `bits` of a stochastic rounding fp32 [row tiles, 1, column tiles, 1]. The other two results are fp32 like
    `tiles`: the factor of every element before rounding, and the power of two by which its code is multiplied
    after it.
    """
    assert quant.scale is not None
    assert quant.scale.micro_exponents is not None
    per_unit = _bf16(torch.full_like(amaxes, 1 / quant.top))
    block_scale = round_scale(_bf16(amaxes * per_unit), quant.scale, bits)
    reciprocal = _bf16(1.0 / block_scale)
    power = torch.ones_like(tiles)
    for level, length in enumerate(quant.scale.micro_exponents):
        limit = 2.0 ** (quant.scale.levels - level)
        sub_blocks = (tiles.abs() * reciprocal / power).unflatten(3, (-1, length)).amax(dim=4)
        reached = (sub_blocks >= limit).repeat_interleave(length, dim=3)
        power = torch.where(reached, power * 2, power)
    return block_scale, reciprocal / power, power


def _bf16(x: Tensor) -> Tensor:
    """Return fp32 values rounded to the nearest of bf16."""
    return x.to(torch.bfloat16).to(torch.float32)


def element_scales(block_scale: Tensor, scale: Tensor) -> Tensor:
    """Return the factor of every element before rounding: 1 / (s * (1/S)), at most FLT_MAX, which an s of
    zero gives. s and the result are fp32 [row tiles, 1, column tiles, 1]; S, fp32, broadcasts to them."""
    return (1.0 / (block_scale * (1.0 / scale))).clamp(max=FLT_MAX)
