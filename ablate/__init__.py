"""ablate: does this part of my low-precision recipe matter, for my model, and by how much?

The Python interface. In a training loop of one's own:

    import ablate

    run = ablate.convert(model, "nvfp4", set={"sr": False}, seed=0, steps=1000)
    for batch in data:
        with run.step():
            loss(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()

Importing this package imports no torch; the functions do when they are called. docs/use/api.md has examples.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from ablate.version import __version__ as __version__

if TYPE_CHECKING:
    from ablate.experiment import integrations
    from ablate.experiment.python_api import convert, diff, log, presets, quantize, recipe
    from ablate.judging.answer import judge
    from ablate.recipes.recipe import Recipe
    from ablate.results.proposal_gate import gate
    from ablate.verification.conformance.run import conform

__all__ = [
    "Recipe",
    "conform",
    "convert",
    "diff",
    "gate",
    "integrations",
    "judge",
    "log",
    "presets",
    "quantize",
    "recipe",
    "reports",
]

_INTERFACE = "ablate.experiment.python_api"
_HOMES = dict.fromkeys(__all__, _INTERFACE) | {
    "Recipe": "ablate.recipes.recipe",
    "conform": "ablate.verification.conformance.run",
    "gate": "ablate.results.proposal_gate",
    "judge": "ablate.judging.answer",
}
"""Module of each public name, imported at its first use."""
_MODULES = {"integrations": "ablate.experiment.integrations", "reports": "ablate.reports"}
"""Public names that are modules."""


def __getattr__(name: str) -> object:
    """Import a public name at its first use."""
    if name in _MODULES:
        return import_module(_MODULES[name])
    if name not in _HOMES:
        raise AttributeError(f"module 'ablate' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)
