"""Cells of a recipe: layers and operands that are quantised while all others stay in high precision.

The problem: a recipe's gap comes from somewhere, from a block, a kind of layer, a product, an operand. To
measure where, one part of the recipe has to act alone. The idea is that a cell is data, layers by name and
slots, and that a recipe in some cells alone is a recipe again, with a rule for each group of layers:

    grid(recipe, layers, "blocks", "products")     {"block 0 fprop": Cell(...), "block 0 dgrad": ...}
    within(recipe, layers, [cell])                 the recipe in that cell alone, bf16 elsewhere

So plans, trials, exports and reports take it as they take any recipe. Torch-free.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import product
from typing import Literal, NamedTuple

from ablate.numerics.spec import Error
from ablate.recipes.layers import Layer, Match, block_name, blocks_in, select
from ablate.recipes.recipe import DIRECTIONS, SLOTS, Layers, Products, Recipe, Rule

Where = Literal["model", "blocks", "kinds", "layers"]
"""Groups of layers: all; those of a block; those with one name within their blocks (`attn.qkv`); each."""
What = Literal["recipe", "products", "operands"]
"""Groups of operands: all six; the two of a product; each."""


class Cell(NamedTuple):
    """Part of a model and of a recipe."""

    layers: tuple[str, ...]
    """Names of layers, in the model's order."""
    slots: tuple[str, ...]
    """Operands, of SLOTS."""


def kind(layer: Layer) -> str:
    """Return a layer's name within its block: `mlp.down` for `blocks.3.mlp.down`; the whole name for a layer
    whose block has no number in its name."""
    block = block_name(layer.name)
    return layer.name.removeprefix(f"{block}.") if block else layer.name


def grid(recipe: Recipe, layers: Sequence[Layer], where: Where, what: What) -> dict[str, Cell]:
    """Return the cells of a recipe by name, its own rules and counts in force; without those in which it
    quantises nothing. ValueError if none is left."""
    quantised = _quantised(recipe, layers)
    groups: dict[str, list[str]] = {}
    for layer in layers:
        name = {"model": "", "blocks": f"block {layer.block}", "kinds": kind(layer), "layers": layer.name}
        groups.setdefault(name[where], []).append(layer.name)
    parts: dict[str, dict[str, tuple[str, ...]]] = {
        "recipe": {"": SLOTS},
        "products": {word: tuple(s for s in SLOTS if s.startswith(word)) for word in DIRECTIONS["all"]},
        "operands": {slot: (slot,) for slot in SLOTS},
    }
    cells = {
        f"{group} {part}".strip() or "all": Cell(tuple(names), slots)
        for (group, names), (part, slots) in product(groups.items(), parts[what].items())
        if any(slot in quantised[name] for name in names for slot in slots)
    }
    if not cells:
        raise ValueError("the recipe quantises no layer of this model, so there is no cell")
    return cells


def _quantised(recipe: Recipe, layers: Sequence[Layer]) -> dict[str, set[str]]:
    return {
        layer.name: {slot for slot, _ in placed.products.quantised()} if placed.products else set()
        for placed in recipe.placements(layers)
        for layer in placed.layers
    }


def named(recipe: Recipe, globs: Sequence[str], what: What) -> dict[str, Cell]:
    """Return the cells of layers that are known by globs on their names alone, as `grid` does."""
    return grid(recipe, [Layer(glob, 0, frozenset()) for glob in globs], "layers", what)


def amplified(recipe: Recipe, times: float) -> Recipe:
    """Return a recipe whose quantisation errors, those of its rules too, are `times` as large."""
    return recipe.mapped(partial(_amplified, times=times))


def _amplified(products: Products, times: float) -> Products:
    errors = {f"{slot}.error": Error(times=times) for slot, _ in products.quantised()}
    return products.changed(errors) if times != 1 else products


def within(
    recipe: Recipe,
    layers: Sequence[Layer],
    cells: Iterable[Cell],
    times: float = 1.0,
    globs: bool = False,
) -> Recipe:
    """Return the recipe in these cells alone, which may overlap, with errors `times` as large; high precision
    elsewhere. With `globs`, the cells are those of `named`, and `layers` is empty.

    An operand whose forward copy lies in no cell is quantised from the original, and a product none of whose
    operands lies in a cell is not rotated.
    """
    cells = list(cells)
    if globs:
        names = dict.fromkeys(name for cell in cells for name in cell.layers)
        layers = [Layer(name, 0, frozenset()) for name in names]
    wanted: dict[str, set[str]] = {layer.name: set() for layer in layers}
    for cell in cells:
        for name in cell.layers:
            wanted[name] |= set(cell.slots)
    if not globs and all(slots <= wanted[name] for name, slots in _quantised(recipe, layers).items()):
        return amplified(recipe, times)
    groups: dict[Products | None, list[Layer]] = {}
    for placed in recipe.placements(layers):
        for layer in placed.layers:
            products = placed.products and placed.products.with_slots(
                [slot for slot in SLOTS if slot not in wanted[layer.name]], Products()
            )
            quantised = None if products is None or products.plain else _amplified(products, times)
            groups.setdefault(quantised, []).append(layer)
    if globs:
        rules = [
            Rule(match=Match(name=each.name), use=use) for use, own in groups.items() if use for each in own
        ]
        rules.append(Rule(match=Match(name="*"), use=None))
        return recipe.changed(layers=Layers(rules=tuple(rules)))
    return recipe.changed(layers=_shortest(groups, recipe.products, layers))


def _shortest(
    groups: Mapping[Products | None, Sequence[Layer]], own: Products, layers: Sequence[Layer]
) -> Layers:
    """Return the shortest choice of layers that gives each group its products (None: high precision): counts,
    if high precision is at the ends of a model alone, which more training stacks take; else rules. Layers
    that no rule selects have `own`."""
    plain, blocks = {layer.block for layer in groups.get(None, ())}, blocks_in(layers)
    first = next(block for block in range(blocks + 1) if block not in plain)
    last = next(block for block in range(blocks + 1) if blocks - 1 - block not in plain)
    counts = Layers(skip_first=first, skip_last=last) if first < blocks else Layers(skip_last=blocks)
    counted = {layer.name for layer in layers if not counts.quantises(layer.block, blocks)}
    if {*groups} <= {own, None} and counted == {layer.name for layer in groups.get(None, ())}:
        return counts
    found = []
    for rest in (None, own):
        selected = [
            Rule(match=match, use=products)
            for products, members in groups.items()
            if products != rest
            for match in _matches(members, layers)
        ]
        everything = [Rule(match=Match(name="*"), use=None)] if rest is None and None in groups else []
        found.append(Layers(rules=(*selected, *everything)))
    return min(found, key=lambda each: len(each.rules))


def _matches(members: Sequence[Layer], layers: Sequence[Layer]) -> list[Match]:
    """Return few selections that together select these layers alone: each time the one that selects most of
    the rest, among runs of blocks, kinds of layers, kinds in runs of blocks, and names."""
    names = {layer.name for layer in members}
    whole = {layer.block for layer in layers} - {layer.block for layer in layers if layer.name not in names}
    kinds: dict[str, set[int]] = {}
    for layer in members:
        kinds.setdefault(f"*.{kind(layer)}", set()).add(layer.block)
    candidates: list[Match] = [
        *(Match(blocks=span) for span in _spans(whole)),
        *(Match(name=glob) for glob in kinds),
        *(Match(blocks=span, name=glob) for glob, blocks in kinds.items() for span in _spans(blocks)),
        *(Match(name=layer.name) for layer in members),
    ]
    selecting = [(match, {layer.name for layer in select(match, layers).layers}) for match in candidates]
    selecting = [(match, selected) for match, selected in selecting if selected and selected <= names]
    chosen: list[Match] = []
    while names:
        match, selected = max(selecting, key=lambda each: len(each[1] & names))
        chosen.append(match)
        names = names - selected
    return chosen


def _spans(blocks: Collection[int]) -> list[str]:
    firsts = (block for block in sorted(blocks) if block - 1 not in blocks)
    lasts = (block for block in sorted(blocks) if block + 1 not in blocks)
    return [f"{first}-{last}" for first, last in zip(firsts, lasts, strict=True)]


def fp4_share(recipe: Recipe, layers: Sequence[Layer]) -> float:
    """Return the share of the layers' FLOPs in FP4, in [0, 1], in a step without phases: a product counts if
    both of its operands have four bits. FLOPs are proportional to the elements of the layer's weight
    (`Layer.weights`). All weights count as trained."""
    total = sum(layer.weights for layer in layers)
    fp4 = sum(
        sum(layer.weights for layer in placed.layers) * number / products
        for placed in recipe.placements(layers)
        for number, products in [(placed.products or Products()).fp4()]
    )
    return fp4 / total if total else 0.0
