"""Recipes as configurations of training stacks, and configurations as recipes.

The problem. Whoever has the answer to a question wants to type it into the stack that trains the large model.
Each stack has its own words, its own defaults, and defaults that environment variables change.

The idea. A target writes a recipe as a file of its stack, with every argument, so that nothing depends on
defaults. It writes only what the stack computes exactly; otherwise `Lost` lists every field that would be
lost. It never writes the nearest match.

    TARGETS["te"].write(PRESETS["nvfp4"](), Model())        Python code for Transformer Engine
    TARGETS["torchao"].write(PRESETS["mxfp4"](), Model())   Lost: fprop.x.block 1x32 ...

A target is a function in a file of this folder, a line in TARGETS and a word of `--to` in
cli/recipe.py; docs/project/extending.md has the pages and tests that list it. Nothing here imports
torch or a stack. Before it returns, a target compares the recipe that its output stands for with the one that
was to be written, so a field that was added to recipes later is refused, not dropped.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ablate.recipes.recipe import Recipe
from ablate.recipes.targets import fouroversix, megatron, torchao, transformer_engine
from ablate.recipes.targets.model import Lost, Model

__all__ = ["TARGETS", "Lost", "Model", "Target"]


@dataclass(frozen=True)
class Target:
    """A stack that recipes can be written for."""

    what: str
    """Description of the file, for messages."""
    suffix: str
    write: Callable[[Recipe, Model], str]
    """Return the file's text; raises Lost."""


TARGETS: Mapping[str, Target] = {
    "te": Target("Python for Transformer Engine 2.20", ".py", transformer_engine.write),
    "megatron": Target("environment and arguments for Megatron-LM 0.16 to 0.19", ".sh", megatron.write),
    "bridge": Target("Python for Megatron-Bridge 0.3 to 0.6", ".py", megatron.write_bridge),
    "torchao": Target("Python for torchao 0.18", ".py", torchao.write),
    "torchtitan": Target("Python for torchtitan 0.3", ".py", torchao.write_torchtitan),
    "fouroversix": Target("JSON for fouroversix 1.0", ".json", fouroversix.write),
}
