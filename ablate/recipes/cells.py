"""Cells of a recipe: layers and operands that are quantised while all others stay in high precision.

The problem: a recipe's gap comes from somewhere, from a block, a kind of layer, a product, an operand. To
measure where, one part of the recipe has to act alone. The idea is that a cell is data, layers by name and
slots, and that a recipe in some cells alone is a recipe again, with a rule for each group of layers:

    grid(recipe, layers, "blocks", "products")     {"block 0 fprop": Cell(...), "block 0 dgrad": ...}
    within(recipe, layers, [cell])                 the recipe in that cell alone, bf16 elsewhere

So plans, trials, exports and reports take it as they take any recipe. Torch-free.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import product
from typing import Literal, NamedTuple, get_args

from ablate.recipes.layers import Layer, Match, block_name
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
    """Return the cells of a recipe by name; without those in which it quantises nothing.

    Args:
        recipe: The recipe, whose own rules and counts stay in force.
        layers: All layers of the model.
        where: Groups of layers.
        what: Groups of operands.

    Raises:
        ValueError: There is none: the recipe quantises no layer of this model.
    """
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
    """Return the operands that the recipe quantises in each layer."""
    return {
        layer.name: {slot for slot, _ in placed.products.quantised()} if placed.products else set()
        for placed in recipe.placements(layers)
        for layer in placed.layers
    }


def within(recipe: Recipe, layers: Sequence[Layer], cells: Iterable[Cell]) -> Recipe:
    """Return the recipe in these cells alone; high precision elsewhere.

    An operand whose forward copy lies in no cell is quantised from the original, and a product none of whose
    operands lies in a cell is not rotated.

    Args:
        recipe: The whole recipe.
        layers: All layers of the model.
        cells: The cells; those that overlap are joined.
    """
    wanted: dict[str, set[str]] = {layer.name: set() for layer in layers}
    for cell in cells:
        for name in cell.layers:
            wanted[name] |= set(cell.slots)
    groups: dict[Products | None, list[Layer]] = {}
    for placed in recipe.placements(layers):
        for layer in placed.layers:
            products = placed.products and placed.products.with_slots(
                [slot for slot in SLOTS if slot not in wanted[layer.name]], Products()
            )
            groups.setdefault(None if products is None or products.plain else products, []).append(layer)
    if _whole(recipe, layers, wanted):
        return recipe
    rest = groups.pop(None, None)
    rules = [
        Rule(match=match, use=products)
        for products, members in groups.items()
        for match in _matches(members, layers)
    ]
    if rest:
        rules.append(Rule(match=Match(name="*"), use=None))
    return recipe.model_copy(update={"layers": Layers(rules=tuple(rules))})


def _whole(recipe: Recipe, layers: Sequence[Layer], wanted: Mapping[str, Collection[str]]) -> bool:
    return all(slots <= set(wanted[name]) for name, slots in _quantised(recipe, layers).items())


def _matches(members: Sequence[Layer], layers: Sequence[Layer]) -> list[Match]:
    """Return the shortest of three spellings that select these layers alone: blocks, kinds, names."""
    names = {layer.name for layer in members}
    blocks = sorted({layer.block for layer in members})
    if names == {layer.name for layer in layers if layer.block in blocks}:
        firsts = [block for block in blocks if block - 1 not in blocks]
        lasts = [block for block in blocks if block + 1 not in blocks]
        return [Match(blocks=f"{first}-{last}") for first, last in zip(firsts, lasts, strict=True)]
    kinds = dict.fromkeys(map(kind, members))
    globs = [f"*.{each}" for each in kinds]
    if (
        names == {layer.name for layer in layers if kind(layer) in kinds}
        and _selected(globs, layers) == names
    ):
        return [Match(name=glob) for glob in globs]
    return [Match(name=layer.name) for layer in members]


def _selected(globs: Collection[str], layers: Sequence[Layer]) -> set[str]:
    return {layer.name for layer in layers if any(layer.name.endswith(glob[1:]) for glob in globs)}


WHERE: tuple[str, ...] = get_args(Where)
WHAT: tuple[str, ...] = get_args(What)
