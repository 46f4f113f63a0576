"""Write docs/reference/recipes.md from the presets and the short knobs. `make pages`; tests/recipes/test_recipes_page.py checks it."""

import inspect
from collections.abc import Iterator
from pathlib import Path

from ablate.numerics.spec import Quant
from ablate.recipes import KNOBS, PRESETS, Recipe
from ablate.recipes.recipe_text import EQUATIONS, block_scale, extras, outer_scale, outline, rest, rounding

PAGE = Path(__file__).parents[1] / "docs" / "reference" / "recipes.md"
INTRODUCTION = """# Recipes

This page is generated (`make pages`). A recipe says how each operand of the three products of a linear layer is quantised, in
which layers, and until when. `ablate recipe show NAME` prints one, `ablate recipe diff A B` compares two. [numerics.md](numerics.md)
defines what the words in the tables compute. `x` are activations, `w` weights and `g` output gradients.

Every preset treats [experts](experiment.md#experts) as Megatron-LM does, which builds them of Transformer Engine's GroupedLinear:
each has scales of its own, gate and up are one matrix, and zeros pad its tokens.
"""
HEADER = "| operand | element | block | block scale | outer scale | rounding | more |\n|---|---|---|---|---|---|---|"


def operand(slot: str, quant: Quant | None, dtype: str) -> str:
    """Return the row of one operand."""
    if quant is None:
        return f"| `{slot}` | {dtype} | | | | | |"
    cells = (quant.element, quant.block or "", block_scale(quant), outer_scale(quant), rounding(quant))
    return f"| `{slot}` | {' | '.join(cells)} | {', '.join(extras(quant))} |"


def preset(name: str, recipe: Recipe) -> Iterator[str]:
    """Yield the section of one preset: its docstring with the source, its products, and where and when it differs."""
    yield f"\n## {name}\n"
    yield inspect.getdoc(PRESETS[name])
    if not recipe.products.plain:
        yield "\n" + "\n".join(
            f"- `{equation}` ({product}): {outline(getattr(recipe, product))}"
            for product, equation in EQUATIONS.items()
        )
        yield "\n" + HEADER
        for product in EQUATIONS:
            for letter in getattr(recipe, product).operands:
                slot = f"{product}.{letter}"
                yield operand(slot, recipe.slot(slot), recipe.dtype)
    if lines := [f"- {line}" for line in rest(recipe)]:
        yield "\n" + "\n".join(lines)


def page() -> str:
    """Return the page: every preset, then every short knob with the paths that it sets in preset `nvfp4`."""
    lines = [
        INTRODUCTION
        + "\n"
        + " ·\n".join(f"[{name}](#{name})" for name in PRESETS)
        + " ·\n[short knobs](#short-knobs)"
    ]
    for name, build in PRESETS.items():
        lines += preset(name, build())
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
