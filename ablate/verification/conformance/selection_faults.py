"""Wrong choices between the two candidates of a block, as Four Over Six makes them."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.scaling import round_scale
from ablate.numerics.select import CRITERIA
from ablate.numerics.spec import Quant, Select
from ablate.verification.conformance.computation import RECIPE, Computation, NoComputationError


def _selecting(criterion: str, quant: Quant) -> Quant:
    if quant.select is None or quant.select.criterion == criterion:
        raise NoComputationError("no selection, or the same")
    return quant.model_copy(update={"select": quant.select.model_copy(update={"criterion": criterion})})


def _fixed(value: float, quant: Quant) -> Quant:
    if quant.select is None:
        raise NoComputationError("no selection")
    other = 4.0 if value != 4.0 else 6.0
    return quant.model_copy(update={"select": Select(among="scales", map_to=(value, other))})


def _never(one: Tensor, other: Tensor) -> Tensor:
    return torch.zeros_like(one, dtype=torch.bool)


def _scaled_error(
    codes: Tensor, s: Tensor, y: Tensor, tiles: Tensor, amax: Tensor | None, quant: Quant
) -> Tensor:
    difference = codes - y
    return _summed(difference, quant).double()


def _summed(difference: Tensor, quant: Quant) -> Tensor:
    kind = quant.select.criterion if quant.select else "mse"
    if kind == "absmax":
        return difference.abs().amax(dim=(1, 3), keepdim=True)
    return (difference.square() if kind == "mse" else difference.abs()).sum(dim=(1, 3), keepdim=True)


def _error_values(order: str, codes: Tensor, s: Tensor, amax: Tensor | None, quant: Quant) -> Tensor:
    """Return the values of a candidate, multiplied in another order than ((code s) A) / (6 bound)."""
    if amax is None or quant.outer is None:
        return codes * s
    divisor = torch.full_like(amax, ELEMENTS[quant.element].max * quant.outer.bound)
    return {
        "": codes * s * amax / divisor,
        "code (s A (1/D))": codes * (s * amax * (1 / divisor)),
        "code (s (A/D))": codes * (s * (amax / divisor)),
        "(code s) (A/D)": codes * s * (amax / divisor),
        "code (s / S)": codes * (s / (divisor / amax)),
        "bf16": (codes * s * amax / divisor).bfloat16().float(),
    }[order]


def _sequence(difference: Tensor, quant: Quant) -> Tensor:
    return CRITERIA[quant.select.criterion if quant.select else "mse"](difference)


def _tree(difference: Tensor, quant: Quant) -> Tensor:
    terms = difference.square() if quant.select and quant.select.criterion == "mse" else difference.abs()
    terms = terms.permute(0, 2, 1, 3).flatten(2)
    while terms.shape[-1] > 1:
        terms = terms[..., : terms.shape[-1] // 2] + terms[..., terms.shape[-1] // 2 :]
    return terms[:, None]


def _own_order(difference: Tensor, quant: Quant) -> Tensor:
    return _summed(difference.permute(0, 2, 1, 3).flatten(2)[:, None], quant)


def _in_double(difference: Tensor, quant: Quant) -> Tensor:
    return _summed(difference.double(), quant)


ERROR_ORDERS = ("", "code (s A (1/D))", "code (s (A/D))", "(code s) (A/D)", "code (s / S)", "bf16")
ERROR_SUMS = {
    "one by one": _sequence,
    "in torch's order": _own_order,
    "as a tree": _tree,
    "in double precision": _in_double,
}


def _other_error(
    order: str,
    total: Callable[[Tensor, Quant], Tensor],
    codes: Tensor,
    s: Tensor,
    y: Tensor,
    tiles: Tensor,
    amax: Tensor | None,
    quant: Quant,
) -> Tensor:
    error = total(_error_values(order, codes, s, amax, quant) - tiles, quant)
    return error.view(tiles.shape[0], 1, tiles.shape[2], 1)


def _from_rounded(base: Tensor, value: float, quant: Quant) -> Tensor:
    """Return the second candidate's scale from the first one's rounded scale, and not from amax / 4."""
    assert quant.scale is not None
    top = ELEMENTS[quant.element].max
    return round_scale(round_scale(base, quant.scale) * (top / value), quant.scale)


def selection_faults() -> Iterator[tuple[str, Computation]]:
    """Yield faults of the choice between candidates."""
    for criterion in ("mse", "mae", "absmax"):
        yield f"candidates chosen by {criterion}", replace(RECIPE, quant=partial(_selecting, criterion))
    yield "errors of scaled elements, not of values", replace(RECIPE, error=_scaled_error)
    for order in ERROR_ORDERS:
        for word, total in ERROR_SUMS.items():
            if order or total is not _sequence:
                values = f" of {order}" * bool(order)
                yield (
                    f"candidates' errors{values} added {word}",
                    replace(RECIPE, error=partial(_other_error, order, total)),
                )
    yield "equal errors take the second candidate", replace(RECIPE, prefers=torch.le)
    yield "second candidate's scale from the rounded first", replace(RECIPE, candidate=_from_rounded)
    for value in (6.0, 4.0):
        yield f"{value:g} is never left", replace(RECIPE, quant=partial(_fixed, value), prefers=_never)
