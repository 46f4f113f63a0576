"""Name of the fault of a layer's or its experts' products: a known wrong computation, or what is measured."""

from collections.abc import Iterable, Mapping, Sequence

import torch
from torch import Tensor

from ablate.numerics.quantize import Operand
from ablate.recipes.recipe import Products
from ablate.verification.conformance.examination import Examination
from ablate.verification.conformance.product_faults import GROUPED_FAULTS, PAIRS, PRODUCT_FAULTS, SLOTS, Given
from ablate.verification.conformance.properties import grouped, product
from ablate.verification.conformance.reference_product import (
    Exact,
    Operands,
    exact_products,
    multiply,
    operands,
    plain_products,
)
from ablate.verification.conformance.stages.products import failing, wrong_operand, wrong_product, wrong_terms

ENOUGH = 8
"""Numbers that have to differ for a fault to be named."""


def product_fault(bench: Examination) -> str:
    """Return the fault whose computation gives the subject's y, dx and dw, or ''."""
    if "product_fault" not in bench.cache:
        bench.cache["product_fault"] = _product_fault(bench)
    return str(bench.cache["product_fault"])


def _product_fault(bench: Examination) -> str:
    given, products = product.layer(bench), product.products_of(bench)
    got = product.call(bench, given.x, given.w, given.dy)
    tensors: Given = (given.x.bfloat16(), given.w.bfloat16(), given.dy.bfloat16())
    right = exact_products(products, *tensors)
    far = {key: right[key].far(got[key]) for key in product.NAMES}
    wrong = [key for key in product.NAMES if far[key].any()]
    if sum(int(one.sum()) for one in far.values()) < ENOUGH:
        return ""
    scoped = ""
    for name, computation in PRODUCT_FAULTS.items():
        made = computation(products, tensors)
        unlike = [key for key in product.NAMES if made[key].far(got[key]).any()]
        if not unlike:
            return name
        if not scoped and not set(unlike) & set(wrong):
            scoped = _scoped(name, wrong)
    if scoped:
        return scoped
    return _measured(bench, products, tensors, got, wrong)


def _measured(
    bench: Examination, products: Products, tensors: Given, got: Mapping[str, Tensor], wrong: Sequence[str]
) -> str:
    """Return what is wrong in the products y, dx or dw of one layer, by measuring them."""
    cast, texts = operands(products, *tensors), dict[str, list[str]]()
    for key in wrong:
        left, other = PAIRS[key]
        words = SLOTS[left], SLOTS[other]
        text = wrong_product(getattr(cast, left), getattr(cast, other), got[key], words)
        texts.setdefault(text or _operand_fault(bench, products, key), []).append(key)
    return "; ".join(f"{' and '.join(keys)}: {text}" for text, keys in texts.items() if text)


def _operand_fault(bench: Examination, products: Products, key: str) -> str:
    """Return which operand of a product is not the recipe's, by a short contraction that shows it; or ''."""
    sizes = {"y": (240, 48, 144), "dx": (240, 144, 48), "dw": (48, 144, 240)}[key]
    given = product.layer(bench, sizes=sizes)
    got = product.call(bench, given.x, given.w, given.dy)[key]
    cast = operands(products, given.x.bfloat16(), given.w.bfloat16(), given.dy.bfloat16())
    left, other = PAIRS[key]
    made = getattr(cast, left), getattr(cast, other)
    return wrong_operand(*made, got, (SLOTS[left], SLOTS[other])) if multiply(*made).far(got).any() else ""


def long_sum_fault(bench: Examination, layers: Iterable[product.Summed]) -> str:
    """Return the fault of sums of other lengths, whose weights or roundings show it."""
    if fault := product_fault(bench):
        return fault
    texts: dict[str, None] = {}
    for key, given, got, exact in layers:
        if exact.far(got).any():
            tensors = given.x.bfloat16(), given.w.bfloat16(), given.dy.bfloat16()
            text = _measured(bench, product.products_of(bench), tensors, {key: got}, [key])
            texts[text.replace("of the contraction", f"of the contraction of {exact.terms}")] = None
    return next(iter(texts), "")


def random_fault(bench: Examination) -> str:
    """Return the fault if dx and dw of a random dy are those of the recipe with nearest rounding; else ''."""
    products, (x, w, dy) = product.products_of(bench), product.random_layer(bench)
    got = product.call(bench, x, w, dy)
    made = exact_products(product.rounded_to_nearest(products), x.bfloat16(), w.bfloat16(), dy.bfloat16())
    nearest = not any(bool(made[key].far(got[key]).any()) for key in ("dx", "dw"))
    return "dy rounded to nearest, not stochastically" if nearest else product_fault(bench)


def grouped_fault(bench: Examination, wanted: tuple[int, ...], width: int = grouped.OUT) -> str:
    """Return the fault whose computation gives every expert's y, dx and dw, or ''."""
    products = product.products_of(bench)
    sizes = [bench.rows(size) if size else 0 for size in wanted]
    x, w, dy, offsets = grouped.given_experts(bench, sizes, width=width)
    got = product.call(bench, x, w, dy, "grouped", offsets)
    experts = grouped.experts_of(x, w, dy, sizes)
    parts = {"y": got["y"].split(sizes), "dx": got["dx"].split(sizes), "dw": tuple(got["dw"])}
    right = [exact_products(products, *one) if len(one[0]) else plain_products(*one) for one in experts]
    wrong = [
        key
        for key in product.NAMES
        if any(one[key].far(z).any() for one, z in zip(right, parts[key], strict=True))
    ]
    failed = {
        (key, expert)
        for key in wrong
        for expert, (one, z) in enumerate(zip(right, parts[key], strict=True))
        if one[key].far(z).any()
    }
    if failed and all(key == "dw" and not sizes[expert] for key, expert in failed):
        return "dw of an expert without tokens not written"
    count = sum(int(right[expert][key].far(parts[key][expert]).sum()) for key, expert in failed)
    if count < ENOUGH:
        return ""
    scoped = ""
    for name, computation in GROUPED_FAULTS.items():
        made = computation(products, experts)
        unlike = [
            key
            for key in product.NAMES
            if any(one[key].far(z).any() for one, z in zip(made, parts[key], strict=True))
        ]
        if not unlike:
            return name
        if not scoped and not set(unlike) & set(wrong):
            scoped = _scoped(name, wrong)
    return scoped or _measured_experts(bench, products, experts, parts, right, wrong)


def _measured_experts(
    bench: Examination,
    products: Products,
    experts: list[Given],
    parts: Mapping[str, Sequence[Tensor]],
    right: Sequence[Mapping[str, Exact]],
    wrong: Sequence[str],
) -> str:
    """Return what is wrong in the products of experts, by measuring those of the first that fails."""
    made = [operands(products, *one) if len(one[0]) else None for one in experts]
    texts: dict[str, list[str]] = {}
    for key in wrong:
        failed = [bool(exact[key].far(z).any()) for exact, z in zip(right, parts[key], strict=True)]
        left, other = PAIRS[key]
        words = SLOTS[left], SLOTS[other]
        text = ""
        for number in sorted(range(len(experts)), key=lambda one: -len(experts[one][0])):
            own = made[number]
            if not failed[number] or own is None:
                continue
            got, a, b = parts[key][number], getattr(own, left), getattr(own, other)
            text = wrong_product(a, b, got, words)
            if not text or "included" in text or text.startswith("wrong"):
                text = _of_others(key, made, number, got) or text
            if text:
                break
        text = text or _expert_operand_fault(bench, products, key)
        place = failing([(len(one[0]), bad) for one, bad in zip(experts, failed, strict=True)])
        texts.setdefault(f"{text}, {place}" if text else f"wrong {place}", []).append(key)
    return "; ".join(f"{' and '.join(keys)}: {text}" for text, keys in texts.items())


def _expert_operand_fault(bench: Examination, products: Products, key: str) -> str:
    """Return which operand of an expert's product is not the recipe's; or ''."""
    tokens, inner, width = {"y": (240, 48, 144), "dx": (240, 144, 48), "dw": (48, 144, 240)}[key]
    sizes = [bench.rows(tokens)] * 3
    x, w, dy, offsets = grouped.given_experts(bench, sizes, width=width, inner=inner)
    got = product.call(bench, x, w, dy, "grouped", offsets)
    left, other = PAIRS[key]
    for number, one in enumerate(grouped.experts_of(x, w, dy, sizes)):
        cast = operands(products, *one)
        made = getattr(cast, left), getattr(cast, other)
        result = got["dw"][number] if key == "dw" else got[key].split(sizes)[number]
        if multiply(*made).far(result).any():
            every = [operands(products, *each) for each in grouped.experts_of(x, w, dy, sizes)]
            if others := _of_others(key, every, number, result):
                return others
            return wrong_operand(*made, result, (SLOTS[left], SLOTS[other]))
    return ""


def _of_others(key: str, made: Sequence[Operands | None], number: int, got: Tensor) -> str:
    """Return what an expert's result has of the operands of other experts, or ''."""
    left, other = PAIRS[key]
    own = made[number]
    assert own is not None
    for index, one in enumerate(made):
        if one is None or index == number:
            continue
        for mine, word, pair in (
            (getattr(own, left), SLOTS[other], (left, other)),
            (getattr(own, other), SLOTS[left], (other, left)),
        ):
            theirs = getattr(one, pair[1])
            shown = (mine, theirs) if pair[0] == left else (theirs, mine)
            alike = theirs.values.shape == getattr(own, pair[1]).values.shape
            if alike and not multiply(*shown).far(got).any():
                return f"{word} of expert {index} used for expert {number}"
    if key != "dw":
        return ""
    sizes = [0 if one is None else getattr(one, left).values.shape[1] for one in made]
    start = sum(sizes[:number])
    a, b = (
        Operand(torch.cat([getattr(one, slot).dequantize() for one in made if one is not None], 1))
        for slot in (left, other)
    )
    return wrong_terms(a, b, got, slice(start, start + sizes[number]), "other experts")


def _scoped(name: str, keys: Sequence[str]) -> str:
    """Return the name of a fault that only some of the products have."""
    return f"{name} in {' and '.join(keys)}"
