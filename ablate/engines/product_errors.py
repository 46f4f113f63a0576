"""Errors of a layer's measured products, and those that its recipe gives: `of_output` and `of_gradients`.

The emulator computes the same call again, from the same unquantised x, w and dy, with other random bits if it
rounds stochastically. Nothing of the engine that computed
the measured products is used, so a wrong layout, scale or rounding there shows as a value outside the
interval (numerics/product_error.py). Rotations are drawn by the layer's own clock, and are therefore the
same.

A layer that the emulator computes itself is right by construction. Its products that draw nothing, or whose
draws are those of a user's function, are not computed again: their expected values are the measured ones.
"""

from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from ablate.engines.products import Casting, Kept, Redrawing, backward, forward
from ablate.numerics.product import product
from ablate.numerics.product_error import ALPHA, SLACK, Expected, Sums, bounded, compare, spread
from ablate.numerics.quantize import Operand
from ablate.numerics.spec import Quant
from ablate.recipes.recipe import FORWARD_COPY, Products

_FAST = 2.0**-14
"""Relative loss of each of the additions, one in 32 elements, of a Hopper GPU's FP8 products."""


class ProductError(NamedTuple):
    """One product of one call: its sums, and those of the emulator's product of the same operands."""

    product: str
    measured: Sums
    drawn: Sums
    spread: float
    slack: float

    def expected(self, alpha: float = ALPHA) -> Expected:
        """Return the intervals that the recipe gives; a right gain is outside with `alpha` at most."""
        return Expected.of(self.drawn, self.spread, self.slack, alpha)


def of_output(layer: Casting, products: Products, x: Tensor, w: Tensor, y: Tensor) -> Iterator[ProductError]:
    """Yield the error of fprop, if an operand of it is quantised. The layer's clock is at the call; x
    [tokens, in] and w [out, in] are unquantised; y [tokens, out] is the measured output, without bias."""
    x, w = x.to(torch.bfloat16), w.detach().to(torch.bfloat16)
    if _quantised(products, "fprop"):

        def again() -> tuple[Redrawing, Tensor]:
            other = layer.redrawn()
            return other, forward(other, products, x, w)[0]

        yield _error(layer, products, "fprop", y, (x, w), again)


def of_gradients(
    layer: Casting,
    products: Products,
    x: Tensor,
    w: Tensor,
    kept: Kept | None,
    dy: Tensor,
    results: tuple[Tensor | None, Tensor | None],
) -> Iterator[ProductError]:
    """Yield the errors of dgrad and wgrad, of those that were needed and have a quantised operand.

    The layer's clock is at the call; the products are the forward pass's; x [tokens, in], w [out, in] and dy
    [tokens, out] are unquantised. `kept` is what the forward pass kept, if the backward pass starts from more
    than x and w; None: computed. `results` are the measured dx [tokens, in] and dw [out, in].
    """
    x, w, dy = (z.detach().to(torch.bfloat16) for z in (x, w, dy))
    sources = {"dgrad": (dy, w.t()), "wgrad": (dy.t(), x.t())}

    def again(which: int) -> tuple[Redrawing, Tensor]:
        other = layer.redrawn()
        start: Kept = (x, w, None, None)
        if products.backward_needs:
            start = forward(other, products, x, w)[1] if kept is None or draws(products, "fprop") else kept
        made = backward(other, products, start, dy, (which == 0, which == 1))[which]
        assert made is not None
        return other, made

    for which, (name, both) in enumerate(sources.items()):
        measured = results[which]
        if measured is not None and _quantised(products, name):
            yield _error(layer, products, name, measured, both, partial(again, which))


def _error(
    layer: Casting,
    products: Products,
    name: str,
    measured: Tensor,
    sources: tuple[Tensor, Tensor],
    again: Callable[[], tuple[Redrawing, Tensor]],
) -> ProductError:
    slack = slack_of(products, name, sources[0].shape[1])
    drawing = [quant for quant in _multiplied(products, name) if quant.draws]
    random = bool(drawing) and all(map(bounded, drawing))
    with torch.no_grad():
        exact = product(Operand(sources[0]), Operand(sources[1]), torch.float32)
        own = compare(measured, exact)
        if layer.emulates and not random:
            return ProductError(name, own, own, 0.0, slack)
        other, drawn = again()
        reach = spread(exact, *other.multiplied) if random else 0.0
        return ProductError(name, own, compare(drawn, exact), reach, slack)


def slack_of(products: Products, name: str, terms: int) -> float:
    """Return the half-width for the order of additions of a product (`fprop`, `dgrad` or `wgrad`) with a
    contraction of so many terms; FP8 on Hopper GPUs adds with fewer bits."""
    slots = [f"{name}.{operand}" for operand in getattr(products, name).operands]
    quants = [quant for slot in slots if (quant := products.slot(slot))]
    fast = any(quant.scale is None and not quant.four_bits for quant in quants)
    return SLACK + fast * _FAST * (terms // 32)


def _quantised(products: Products, name: str) -> bool:
    return any(slot.startswith(name) for slot, _ in products.quantised())


def draws(products: Products, name: str) -> bool:
    """Return True if an operand of `fprop`, `dgrad` or `wgrad`, or its forward copy, is rounded at random."""
    return any(quant.draws for quant in _multiplied(products, name))


def _multiplied(products: Products, name: str) -> list[Quant]:
    """Return the quantisers of a product's operands, and of the forward copies that they start from."""
    slots = {f"{name}.{operand}" for operand in getattr(products, name).operands}
    slots |= {FORWARD_COPY[slot] for slot in slots & FORWARD_COPY.keys() if products.backward_needs}
    return [quant for slot in sorted(slots) if (quant := products.slot(slot)) is not None]
