"""Matrix product of two operands: exact values, fp32 sums, tensor scales after them, and one rounding."""

import os
import platform
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import wraps
from typing import ParamSpec, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.errors import InputError
from ablate.numerics.kernels import cuda
from ablate.numerics.quantize import Operand, pad

Arguments = ParamSpec("Arguments")
Gradients = TypeVar("Gradients")


def alpha(a: Operand, b: Operand) -> Tensor | None:
    """Return amax_a * amax_b / (divisor_a divisor_b), 36 bound_a bound_b for E2M1, the factor of the product:
    an fp32 scalar, or a tensor that broadcasts to [M, N] if rows have their own amax; None for 1."""
    divisor = a.divisor * b.divisor
    factors = [f for f in (a.amax, None if b.amax is None else b.amax.t()) if f is not None]
    if not factors:
        return (
            # Filled on the device: torch.tensor would copy it from the host.
            None if divisor == 1 else torch.full((), 1 / divisor, dtype=torch.float32, device=a.values.device)
        )
    numerator = factors[0] * factors[1] if len(factors) == 2 else factors[0]
    # The divisor is a tensor because a GPU may turn `/ number` into `* reciprocal`.
    return numerator / torch.full_like(numerator, divisor)


def product(
    a: Operand,
    b: Operand,
    out: torch.dtype,
    base: Tensor | cuda.Addend | None = None,
    finish: cuda.Finish = cuda.PLAIN,
) -> Tensor:
    """Return base + a b^T, [M, N] from [M, K] and [N, K], accumulated in fp32, rounded once to `out`, and
    finished. `base` is fp32 [M, N], or one that a GPU's kernel adds; None: zeros.

    If the two are padded to different lengths, the shorter is padded with zeros. `out` fp32 keeps the
    accumulator of a tensor core; on a CPU this takes fp32 operands, at about twice the cost, since torch has
    no bf16 product with fp32 output there.
    """
    left, right = _aligned(a, b)
    divisor = a.divisor * b.divisor
    # A product of bf16 rounds to bf16 itself, which reads and writes less than rounding it in fp32 memory.
    more = base is not None or (finish.wide and not left.dtype == right.dtype == out)
    if cuda.can_scale(left, a.amax, b.amax, divisor, out, more):
        return cuda.scaled(_fp32(left, right), a.amax, b.amax, divisor, out, base, finish)
    if finish.slope is not None:
        return finish.of(product(a, b, out, base))
    if base is not None:
        assert isinstance(base, Tensor)
        return (base + product(a, b, torch.float32)).to(out)
    scale = alpha(a, b)
    if out == torch.float32:
        return _scaled(_fp32(left, right), scale, out)
    if scale is None and left.dtype == right.dtype == out:
        return linear(left, right)
    other = scale is None or scale.numel() != 1 or left.dtype != out or right.dtype != out
    if scale is None or other or left.is_cuda or not multiplies_bf16():
        return _scaled(_fp32(left, right), scale, out)
    # torch.mm would round to bf16 before alpha (26 % of outputs off by one ulp); addmm applies alpha before
    # its one rounding.
    y, factor = left.new_empty(left.shape[0], right.shape[0]), scale.item()
    if factor == 0:  # an operand is zero, as is the first gradient behind a zero head: addmm takes 70 times
        return y.zero_()  # as long for it
    return torch.addmm(y, left, right.t(), beta=0, alpha=factor)


def split_product(
    a: Sequence[Operand],
    b: Sequence[Operand],
    out: torch.dtype,
    first: Tensor | None = None,
    finish: cuda.Finish = cuda.PLAIN,
) -> Tensor:
    """Return the product of two operands that are sums of parts (`transform.split`), rounded once to `out`,
    and finished.
    `first` is the product of the two first parts, in fp32 if there are more; None: it is computed here."""
    if len(a) == len(b) == 1:
        return product(a[0], b[0], out, finish=finish) if first is None else finish.of(first)
    pairs = [(left, right) for left in a for right in b]
    if first is None and len(pairs) == 2:
        pairs.reverse()  # a sum of two has one order, and the first parts' product adds in its own launch
        left, right = pairs[1]
        plain = all(each.equal is each.nonzero is None for each in (left, right))
        if plain and cuda.can_scale(left.values, left.amax, right.amax, 1.0, out, True):
            return product(left, right, out, _addend(*pairs[0]), finish)
    total = _of_parts(*pairs[0]) if first is None else first
    for left, right in pairs[1:-1]:
        total = _of_parts(left, right, total)
    return _of_parts(*pairs[-1], total, out, finish)


def _of_parts(
    a: Operand,
    b: Operand,
    base: Tensor | None = None,
    out: torch.dtype = torch.float32,
    finish: cuda.Finish = cuda.PLAIN,
) -> Tensor:
    """Return base + a b^T, rounded once to `out`, and finished."""
    if all(one.equal is None and one.nonzero is None for one in (a, b)):
        return product(a, b, out, base, finish)
    sums = _of_few(a, b)
    return finish.of((sums if base is None else base + sums).to(out))


def with_few(whole: Operand, part: Operand) -> Tensor:
    """Return the sum of two operands without scales, of which the second has `few` columns, in one launch."""
    few = cuda.Addend(part.values, spots=part.few and part.few[0])
    return cuda.scaled(whole.values, None, None, 1.0, torch.float32, few, apart=True)


def _addend(a: Operand, b: Operand) -> Tensor | cuda.Addend:
    """Return a b^T in fp32 as the kernel of another product adds it: not yet scaled, one row if all are
    equal, or a row or column of sums and the `side`, of which it is the product."""
    equal = [(a.equal, a.quant is None), (b.equal, b.quant is None)]
    if b.few and b.nonzero and b.nonzero[0] == 0 and a.equal is a.nonzero is None:
        sums = _fp32(*_aligned(a, b))
        return cuda.Addend(sums, a.amax, b.amax, a.divisor * b.divisor, spots=b.few[0])
    if a.nonzero or b.nonzero or not a.values.shape[1] or (a.equal is not None and b.equal is not None):
        return _of_few(a, b)
    if (1, True) in equal:
        few, whole = (a, b) if a.equal == 1 else (b, a)
        sums, side = _fp32(*_aligned(Operand(torch.ones_like(few.values[:1])), whole)), few.values[:, :1]
        if few is a:
            return cuda.Addend(sums, None, b.amax, b.divisor, side)
        return cuda.Addend(sums.t(), a.amax, None, a.divisor, side.t())
    a, b = (replace(one, values=one.values[:1]) if one.equal == 0 else one for one in (a, b))
    return cuda.Addend(_fp32(*_aligned(a, b)), a.amax, b.amax, a.divisor * b.divisor)


def _of_few(a: Operand, b: Operand) -> Tensor:
    """Return a b^T in fp32: of rows that are zero or equal, and of columns, one product at most."""
    if a.equal == 1 and a.quant is None:
        return _of_equal_columns(a, b)
    if b.equal == 1 and b.quant is None:
        return _of_equal_columns(b, a).t()
    if a.nonzero and b.nonzero:  # each is then asked for what the other has
        a, b = (replace(one, values=one.dense, few=None) for one in (a, b))
    shape = (a.shape[0], b.shape[0])
    a, b = (replace(one, values=one.values[:1]) if one.equal == 0 else one for one in (a, b))
    columns = next((one.nonzero[1] for one in (a, b) if one.nonzero and one.nonzero[0] == 1), None)
    if columns is not None:
        a, b = (
            one if one.few else replace(one, values=one.values.index_select(1, columns)) for one in (a, b)
        )
    y = product(_rows(a), _rows(b), torch.float32)
    for dimension, one in enumerate((a, b)):
        if one.nonzero and one.nonzero[0] == 0:
            whole = list(y.shape)
            whole[dimension] = shape[dimension]
            y = y.new_zeros(whole).index_copy_(dimension, one.nonzero[1], y)
    return y.expand(shape)


def _of_equal_columns(a: Operand, b: Operand) -> Tensor:
    """Return a b^T in fp32 of an unquantised `a` whose columns are equal: one of them times b's row sums."""
    if not a.values.shape[1]:
        return torch.zeros(a.values.shape[0], b.values.shape[0], device=a.values.device)
    one = Operand(torch.ones_like(a.values[:1]))
    return a.values[:, :1].to(torch.float32) * product(one, b, torch.float32)


def _rows(one: Operand) -> Operand:
    """Return the rows of an operand that are not zero."""
    if one.nonzero is None or one.nonzero[0] == 1 or one.few:
        return one
    rows = one.nonzero[1]
    amax = one.amax.index_select(0, rows) if one.amax is not None and one.amax.ndim else one.amax
    return replace(one, values=one.values.index_select(0, rows), amax=amax)


MODES = {"bf16": 16, "fp32": 32}
"""Ways in which a CPU multiplies bf16 operands, with the bits of what it multiplies: by its bf16
instructions, or as fp32, in which the operands are as exact, with one rounding of the result. Sums add in
another order."""
MODE_VARIABLE = "ABLATE_PRODUCTS"
"""Environment variable that asks for one of them."""
_FORCED: list[str] = []
"""Modes of `multiplying`; the last one counts."""


def _native_mode() -> str:
    intel = platform.machine().lower() in ("x86_64", "amd64")
    own = not intel or torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    return "bf16" if own and torch.ops.mkldnn._is_mkldnn_bf16_supported() else "fp32"


NATIVE_MODE = _native_mode()
"""The faster exact way on this CPU, a function of its instructions and of oneDNN's limit on them.

Without bf16 instructions (AVX-512 BF16, AMX, Arm's) a bf16 product takes 2 to 300 times as long as one of the
same operands as fp32.
"""


def mode() -> str:
    """Return the mode in force: of `multiplying`, the environment (InputError if unknown), or this CPU's."""
    if _FORCED:
        return _FORCED[-1]
    asked = os.environ.get(MODE_VARIABLE)
    if asked is not None and asked not in MODES:
        raise InputError(f"{MODE_VARIABLE}={asked}: CPUs multiply in {' or '.join(MODES)}; leave it out")
    return asked or NATIVE_MODE


def multiplies_bf16() -> bool:
    """Return True if bf16 operands are multiplied by bf16 instructions."""
    return mode() == "bf16"


def why_not(recorded: str) -> str:
    """Return why a run that multiplied in another mode cannot go on in it here; empty if it can."""
    here = mode()
    if recorded == here:
        return ""
    if MODE_VARIABLE in os.environ:
        return f"{MODE_VARIABLE} asks for {here} here; set it to {recorded}, or leave it out"
    if recorded == "bf16":
        return (
            "this CPU has no bf16 instructions, and would be many times slower; go on on one that has, or"
            f" set {MODE_VARIABLE}=bf16"
        )
    return ""


@contextmanager
def multiplying(how: str) -> Iterator[None]:
    """Multiply in one mode inside this context."""
    _FORCED.append(how)
    try:
        yield
    finally:
        _FORCED.pop()


def linear(x: Tensor, w: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return x w^T + bias in the dtype of x, rounded once; on a CPU without bf16 instructions, bf16 operands
    are multiplied as fp32."""
    if x.dtype != torch.bfloat16 or x.is_cuda or multiplies_bf16():
        return F.linear(x, w, bias)
    return F.linear(x.float(), w.float(), None if bias is None else bias.float()).to(x.dtype)


def first_order(backward: Callable[Arguments, Gradients]) -> Callable[Arguments, Gradients]:
    """Make the backward pass of an autograd function raise RuntimeError under `create_graph=True`.

    Quantisation has no second derivative: autograd would return a gradient without a graph, or a wrong one.
    Torch's `once_differentiable` raises only if a second pass reaches it, and is silent with `allow_unused`.
    """

    @wraps(backward)
    def checked(*args: Arguments.args, **kwargs: Arguments.kwargs) -> Gradients:
        if torch.is_grad_enabled():
            raise RuntimeError(
                "create_graph=True asks for a second derivative, which a quantised product does not have;"
                " compute that term inside engine.high_precision()"
            )
        return backward(*args, **kwargs)

    return checked


def _aligned(a: Operand, b: Operand) -> tuple[Tensor, Tensor]:
    width = max(a.values.shape[1], b.values.shape[1])
    left, right = (pad(operand.values, 1, width) if width else operand.values for operand in (a, b))
    return left, right


def _scaled(y: Tensor, scale: Tensor | None, out: torch.dtype) -> Tensor:
    """Return y * scale, rounded once to `out`, in one pass over a tensor that this file made."""
    if scale is None:
        return y.to(out)
    return torch.mul(y, scale, out=y if out == y.dtype else y.new_empty(y.shape, dtype=out))


def _fp32(a: Tensor, b: Tensor) -> Tensor:
    if a.is_cuda and a.dtype == b.dtype == torch.bfloat16:
        return torch.mm(a, b.t(), out_dtype=torch.float32)
    return a.to(torch.float32) @ b.to(torch.float32).t()
