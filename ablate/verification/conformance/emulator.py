"""This project's emulator as a subject: what training computes, by compiled kernels where they exist."""

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from ablate.numerics.hadamard import rotate
from ablate.numerics.philox import Clock
from ablate.numerics.product import product
from ablate.numerics.quantize import Operand, pad, quantize
from ablate.numerics.spec import Outer, Quant
from ablate.numerics.stored import pack
from ablate.recipes import Recipe
from ablate.recipes.recipe import Products
from ablate.verification.conformance.examination import Examination, NotApplicableError
from ablate.verification.conformance.numbers import of_operand, over_elements
from ablate.verification.conformance.reference_product import PAIRS, operands
from ablate.verification.conformance.subject import Quantised, Subject

_SEED = 17
"""Seed of the product's draws, which no property fixes."""


def emulator(recipe: Recipe) -> Subject:
    """Return the emulator of a recipe as a subject, with every function that the recipe has."""
    bench = Examination(Subject("ablate"), recipe)

    def own(name: str) -> Any:
        try:
            return getattr(bench, name)
        except NotApplicableError:
            return None

    nearest, square, stochastic, rotation = map(own, ("nearest", "square", "stochastic", "rotation"))
    given = nearest if nearest is not None and nearest.outer is not None else None
    one = partial(multiplied, recipe)
    return Subject(
        "ablate",
        cast=nearest and (lambda x: returned(quantize(x, nearest), x)),
        cast_given=given and (lambda x, amax: returned(quantize(x, static(given, amax)), x)),
        cast_stochastic=stochastic
        and (lambda x, seed: returned(quantize(x, stochastic, clock=Clock(seed)), x)),
        cast_square=square and (lambda x: returned(quantize(x, square), x)),
        rotate=rotation and (lambda x: rotate(x, rotation, Clock(0))),
        product=one,
        grouped=lambda x, w, dy, offsets: grouped(one, x, w, dy, offsets),
        columns=1,
    )


def static(quant: Quant, amax: Tensor) -> Quant:
    """Return a quantiser whose second level is that of a given magnitude."""
    assert quant.outer is not None
    outer = Outer(granularity="tensor", statistic=f"static:{float(amax)}", bound=quant.outer.bound)
    return quant.model_copy(update={"outer": outer})


def returned(operand: Operand, x: Tensor) -> Quantised:
    """Return an operand of x in the form of the kit: with bytes, if its elements are E2M1."""
    quant, columns = operand.quant, x.shape[1]
    assert quant is not None
    numbers = of_operand(operand, *x.shape)
    amax = None if numbers.amax is None or numbers.amax.ndim else numbers.amax
    if numbers.scales is None or quant.wide or quant.element != "e2m1":
        return Quantised(numbers.values, amax=amax)
    spread = over_elements(numbers.scales, quant.tile[1], columns)
    kept = operand.values[:, :columns].float()
    codes = torch.where(spread == 0, kept, kept / spread)
    outer = torch.ones(()) if numbers.outer is None else numbers.outer
    return Quantised(numbers.values, pack(pad(codes, 1, 2)), numbers.scales, outer, amax)


def multiplied(recipe: Products, x: Tensor, w: Tensor, dy: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, dx and dw of one layer, in bf16."""
    made = operands(recipe, x.bfloat16(), w.bfloat16(), dy.bfloat16(), _SEED)
    y, dx, dw = (product(made[a], made[b], torch.bfloat16) for a, b in PAIRS.values())
    return y, dx, dw


def grouped(
    one: Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]],
    x: Tensor,
    w: Tensor,
    dy: Tensor,
    offsets: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return y, dx and dw of a layer of experts, by a function of one of them."""
    y, dx, dw = x.new_zeros(len(x), w.shape[1]), torch.zeros_like(x), torch.zeros_like(w)
    start = 0
    for expert, stop in enumerate(offsets.tolist()):
        if stop > start:
            tokens = slice(start, stop)
            y[tokens], dx[tokens], dw[expert] = one(x[tokens], w[expert], dy[tokens])
        start = stop
    return y, dx, dw
