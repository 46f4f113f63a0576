"""Write docs/reference/recipes.md from the presets and the short knobs. `make pages`; tests/recipes/test_recipes_page.py checks it."""

import inspect
from collections.abc import Iterator, Mapping
from pathlib import Path

from ablate.numerics.spec import Quant
from ablate.recipes import KNOBS, PRESETS, Recipe
from ablate.recipes.recipe_text import EQUATIONS, block_scale, extras, outer_scale, outline, rest, rounding

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "recipes.md"
INTRODUCTION = """# Recipes

See what a preset sets (by `make pages`). `ablate recipe show NAME` prints a recipe, `ablate recipe diff A B` compares
two. `x` are activations, `w` weights and `g` output gradients. A line has operands (or *all*), then element, block and block scale,
outer scale, rounding, and what else is done to them ([numerics](numerics.md)). Products without a line are not rotated, and rounded
once to bf16, dw too. [Experts](experiment.md#experts) are treated as by Megatron-LM: each has scales of its own, gate and up are
one matrix, and zeros pad its tokens.
"""


def cast(quant: Quant | None, dtype: str) -> str:
    """Return what is done to one operand."""
    if quant is None:
        return dtype
    blocks = f"{quant.block} {block_scale(quant)}" if quant.block else ""
    outer = outer_scale(quant)
    parts = (quant.element, blocks, "" if outer == "none" else outer, rounding(quant), *extras(quant))
    return ", ".join(part for part in parts if part)


def products(recipe: Recipe, earlier: Mapping[str, Recipe]) -> Iterator[str]:
    """Yield lines of the products that are special, and of operands by their cast; or the preset with the same ones."""
    same = next((name for name, other in earlier.items() if other.products == recipe.products), None)
    if same is not None:
        yield f"- products: those of [{same}](#{same})"
        return
    special: dict[str, list[str]] = {}
    for product in EQUATIONS:
        one = getattr(recipe, product)
        changed = set(outline(one).split("; ")) - set(outline(type(one)()).split("; "))
        if changed:
            special.setdefault("; ".join(sorted(changed)), []).append(product)
    yield from (f"- {', '.join(names)}: {text}" for text, names in special.items())
    groups: dict[str, list[str]] = {}
    for product in EQUATIONS:
        for letter in getattr(recipe, product).operands:
            slot = f"{product}.{letter}"
            groups.setdefault(cast(recipe.slot(slot), recipe.dtype), []).append(slot)
    for text, slots in groups.items():
        yield f"- {'all' if len(groups) == 1 else ', '.join(f'`{slot}`' for slot in slots)}: {text}"


def preset(name: str, recipe: Recipe, earlier: Mapping[str, Recipe]) -> Iterator[str]:
    """Yield the section of one preset: its docstring with the source, its products, and where and when it differs."""
    yield f"\n## {name}\n"
    yield inspect.getdoc(PRESETS[name])
    lines = [] if recipe.products.plain else [*products(recipe, earlier)]
    if lines := [*lines, *(f"- {line}" for line in rest(recipe))]:
        yield "\n" + "\n".join(lines)


def page() -> str:
    """Return the page: every preset, then every short knob with the paths that it sets in preset `nvfp4`."""
    lines = [INTRODUCTION.rstrip()]
    earlier: dict[str, Recipe] = {}
    for name, build in PRESETS.items():
        recipe = build()
        lines += preset(name, recipe, earlier)
        if not recipe.products.plain:
            earlier[name] = recipe
    lines += [
        "\n## Short knobs\n",
        "A short knob sets full paths below `recipe.`; the paths shown are those in preset `nvfp4`.",
    ]
    lines += ["\n| knob | values | effect | paths |", "|---|---|---|---|"]
    for name, knob in KNOBS.items():
        paths = "<br>".join(f"`{path}`" for path in knob.shown())
        lines.append(f"| `{name}` | {knob.values} | {knob.help} | {paths} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(page())
