"""Choice of the kernel that quantises a CUDA tensor: NVIDIA's own form has one, and the others share one.

`quantize` and `quantize_both` return None for what no kernel makes, which torch's operations then do. A form
of the general kernel is compiled when it is first needed, and its bits are compared with the reference's
before they are used: on a small matrix, once in a process.
"""

import math
import sys
from collections.abc import Callable
from functools import cache
from typing import Any, Protocol

import torch
from torch import Tensor

from ablate.numerics.hadamard import rotate, signs
from ablate.numerics.history import History
from ablate.numerics.kernels import cuda, forms, general, general_cuda
from ablate.numerics.kernels.launch_errors import reason
from ablate.numerics.philox import GROUP, Clock
from ablate.numerics.scaling import outer_statistic
from ablate.numerics.spec import Hadamard, Outer, Quant, statistic_of

CPU = torch.device("cpu")


class Result(Protocol):
    """Parts of an operand that are compared."""

    @property
    def values(self) -> Tensor: ...

    @property
    def amax(self) -> Tensor | None: ...

    @property
    def block_scale(self) -> Tensor | None: ...

    @property
    def largest(self) -> Tensor | None: ...


Reference = Callable[..., Any]
"""`quantize.quantize`, by which a form of the general kernel is checked."""


def quantize(
    x: Tensor,
    quant: Quant,
    rotation: Hadamard | None,
    clock: Clock | None,
    where: int,
    product: int,
    history: History | None,
    keep: bool,
    reduced: Tensor | None,
    reference: Reference,
) -> tuple[cuda.Quantized, Tensor | None] | None:
    """Return a quantised copy and, with `keep`, the rotated tensor; None if no kernel makes it.

    A rotation that the kernels lack, or whose result is to be kept, is computed before them. A source that is
    to be kept is not padded. The other arguments are those of `quantize.quantize`; `reduced` is the amax of
    the whole matrix if `x` is a part of it.
    """
    rows, columns = quant.tile
    whole = math.lcm(columns, GROUP, rotation.size if rotation else 1)
    if keep and (not general.can_keep(quant) or x.shape[0] % rows or x.shape[1] % whole):
        return None
    turn = None if keep else rotation
    fused = turn is not None and forms.nvidia(quant) and cuda.can_rotate(x, quant, turn)
    size = 0
    if turn is not None and not fused and forms.general(quant) and turn.size in general_cuda.SIZES:
        size = turn.size
    elif not fused and rotation is not None:
        x = rotate(x, rotation, clock, product)
    by_nvidia = forms.nvidia(quant) and not size
    if not by_nvidia and not trusted(x, quant, size, reference):
        return None
    statistic = device_statistic(x, quant.outer, history, clock, reduced)
    flips = signs(rotation, CPU, clock, product) if rotation is not None and (fused or size) else None
    if by_nvidia:
        word = None if flips is None else cuda.sign_word(flips)
        made = cuda.quantize(x, cuda.Form(quant, word, where, statistic), clock)
    else:
        words = general_cuda.sign_words(flips)
        made = general_cuda.quantize(x, quant, size, words, clock, where, statistic)
    return made, x if keep else None


def quantize_both(
    x: Tensor,
    first: Quant,
    second: Quant,
    rotation: Hadamard | None,
    clock: Clock,
    where: tuple[int, int],
    product: int,
    histories: tuple[History | None, History | None],
) -> tuple[cuda.Quantized, cuda.Quantized] | None:
    """Return x quantised, and the rotated x.t(), in one read; None if no kernel makes both at once.

    The arguments are those of `quantize.quantize_both`.
    """
    if not cuda.can_quantize_both(x, first, second, rotation):
        return None
    word = None if rotation is None else cuda.sign_word(signs(rotation, CPU, clock, product))
    one, other = (
        cuda.Form(quant, flips, site, device_statistic(x, quant.outer, history, clock, None))
        for quant, flips, site, history in zip((first, second), (None, word), where, histories, strict=True)
    )
    return cuda.quantize_both(x, one, other, clock)


def device_statistic(
    x: Tensor, outer: Outer | None, history: History | None, clock: Clock | None, reduced: Tensor | None
) -> cuda.Statistic | None:
    """Return the outer statistic as a GPU's kernels take it; None for one that they compute."""
    if reduced is not None:
        return lambda largest: reduced
    # A statistic that only a whole tensor can have is a function of its largest magnitude.
    if outer is None or not statistic_of(outer.statistic).per_tensor:
        return None
    return lambda largest: outer_statistic(x, None, largest, outer, history, clock)


def trusted(x: Tensor, quant: Quant, size: int, reference: Reference) -> bool:
    """Return True if the general kernel's bits for a form were the reference's in this process.

    Args:
        x: what is to be quantised, for its device, dtype and layout.
        quant: its form.
        size: size of the rotation inside the kernel; 0: none.
        reference: `quantize.quantize`.
    """
    plain = quant.model_copy(update={"transform": None, "estimator": None, "source": "original"})
    if plain.outer is not None:
        outer = plain.outer.model_copy(update={"statistic": "amax"})
        plain = plain.model_copy(update={"outer": outer})
    return agrees(x.device, x.dtype, x.is_contiguous(), plain, size, reference)


@cache
def agrees(
    device: torch.device, dtype: torch.dtype, by_rows: bool, quant: Quant, size: int, reference: Reference
) -> bool:
    why = different(device, dtype, by_rows, quant, size, reference)
    if why:
        print(
            f"ablate: no compiled quantiser on {device} for {quant.model_dump(exclude_defaults=True)},"
            f" which runs on the slow reference: {why}",
            file=sys.stderr,
        )
    return not why


def different(
    device: torch.device, dtype: torch.dtype, by_rows: bool, quant: Quant, size: int, reference: Reference
) -> str:
    """Return why the general kernel cannot be used for a form; empty if its bits are the reference's."""
    x = cuda.trial_matrix().to(dtype)
    x = x if by_rows else x.t()
    clock, where = cuda.TRIAL_CLOCK, cuda.TRIAL_WHERE
    rotation = Hadamard(size=size, signs="per_call") if size else None  # type: ignore[arg-type]
    words = general_cuda.sign_words(signs(rotation, CPU, clock) if rotation else None)
    try:
        given = x.t().to(device).t() if x.t().is_contiguous() else x.to(device)
        mine = general_cuda.quantize(given, quant, size, words, clock, where, None)
        found = cuda.digest(*_parts(mine))
    except Exception as error:  # whatever Triton, the compiler or the driver raises
        return reason(error)
    theirs = reference(x, quant, rotation=rotation, clock=clock, where=where, keep=True)  # by no kernel
    return "" if found == cuda.digest(*_parts(theirs)) else "its bits differ from the reference's"


def _parts(made: Result) -> list[Tensor]:
    parts = made.values, made.amax, made.block_scale, made.largest
    return [part.reshape(-1) for part in parts if part is not None]
