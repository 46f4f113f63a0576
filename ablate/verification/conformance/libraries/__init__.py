"""Public libraries as subjects of the conformance kit: one file a library.

Each file has one function, `subject(recipe)`, which imports its library when it is called, and calls the
function that the library itself quantises with. Adaptors correct nothing: a scale that a library expects from
its caller is computed by that library's own function, or as its own path computes it.
"""

import importlib
from dataclasses import dataclass, replace
from importlib import metadata

from ablate.errors import InputError, nearest
from ablate.numerics.spec import Quant, Range
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.recipe import Dgrad, Fprop, Products, Wgrad
from ablate.verification.conformance.subject import Subject
from ablate.verification.peer_comparison import mx


@dataclass(frozen=True)
class Library:
    """One public library, and the recipes that it implements."""

    package: str
    """Distribution on the Python package index."""
    recipes: dict[str, str]
    """Presets whose cast it has, each with the change that it makes by design: a key of CHANGES, or none."""
    install: str = ""
    """Arguments of pip, if not the package alone."""

    @property
    def command(self) -> str:
        """Command that installs it."""
        return f"pip install {self.install or self.package}"

    @property
    def version(self) -> str | None:
        """Installed version, or None; imports nothing."""
        try:
            return metadata.version(self.package)
        except metadata.PackageNotFoundError:
            return None


CHANGES = {
    "floor": "block scales are rounded down, as OCP's specification has it",
    "ceil": "block scales are rounded up",
    "even": "block scales are rounded up from a mantissa of 1.75 (E2M1) or 1.9375 (E4M3)",
    "even, E2M1's": "block scales are rounded up from a mantissa of 1.75, for E4M3 as well",
    "one level": "no tensor scale",
}
"""Legitimate differences of libraries from a preset, in words."""
MAPPED = {"even": {"e2m1": 3.5, "e4m3": 248.0}, "even, E2M1's": {"e2m1": 3.5, "e4m3": 224.0}}
"""Magnitudes from which on the rules "even" take the next power of two, for a block scale of 1."""
SUBJECTS = {
    "transformer_engine": Library(
        "transformer-engine",
        {"nvfp4": "", "four_over_six": "", "row_scaled": "", "mxfp4": "ceil"},
        "transformer-engine==2.20.2",
    ),
    "torchao": Library("torchao", {"nvfp4": "", "mxfp4": "", "mxfp8": ""}),
    "compressed_tensors": Library(
        "compressed-tensors", {"nvfp4": "", "mxfp4": "even", "mxfp8": "even, E2M1's"}
    ),
    "modelopt": Library("nvidia-modelopt", {"nvfp4": "", "mxfp4": "ceil", "mxfp8": ""}),
    "fouroversix": Library(
        "fouroversix",
        {"nvfp4": "", "four_over_six": "", "mxfp4": "ceil"},
        "--no-build-isolation --no-deps fouroversix",
    ),
    "mlx": Library("mlx", {"nvfp4": "", "mxfp4": "ceil", "mxfp8": ""}, "mlx[cpu]"),
    "auto_round": Library("auto-round", {"nvfp4": "", "mxfp4": "", "mxfp8": ""}),
    "comfy_kitchen": Library("comfy-kitchen", {"nvfp4": "", "mxfp8": ""}),
    "fireworks_prequant": Library("fireworks-prequant", {"nvfp4": ""}),
    "qwix": Library("qwix", {"nvfp4": "one level", "mxfp4": "ceil", "mxfp8": ""}),
    "qwantize": Library("qwantize", {"nvfp4": "one level", "mxfp4": ""}),
    "breccia": Library("breccia", {"nvfp4": "one level", "mxfp8": ""}),
    "quark": Library("amd-quark", {"mxfp4": "even", "mxfp8": "even"}),
    "brevitas": Library("brevitas", {"mxfp4": "", "mxfp8": "floor"}),
    "neural_compressor": Library("neural-compressor-pt", {"mxfp4": "", "mxfp8": "floor"}),
    "gfloat": Library("gfloat", {"mxfp4": "", "mxfp8": "floor"}),
    "pychop": Library("pychop", {"mxfp4": "", "mxfp8": "floor"}),
    "custom_float_quant": Library("custom-float-quant", {"mxfp4": "ceil", "mxfp8": ""}),
    "gguf": Library("gguf", {"mxfp4": ""}),
}
"""Libraries by the name of their file here, which is the name that they are imported by."""


def library_subject(name: str, recipe: str) -> Subject:
    """Return a library's functions for a recipe, with its installed version.

    Args:
        name: One of SUBJECTS.
        recipe: One of the library's recipes.

    Raises:
        InputError: there is no such library or recipe, or it is not installed.
    """
    if name not in SUBJECTS:
        raise InputError(f"{name}: no such library; {nearest(name, SUBJECTS)}")
    library = SUBJECTS[name]
    if recipe not in library.recipes:
        raise InputError(f"{name} has no cast of {recipe}; it has {', '.join(library.recipes)}")
    if library.version is None:
        raise InputError(f"{name} is not installed: {library.command}")
    module = importlib.import_module(f"{__name__}.{name}")
    return replace(module.subject(recipe), version=library.version)


def claimed(name: str, recipe: str) -> Recipe:
    """Return the recipe that a library implements: a preset, with the library's change by design."""
    change, whole = SUBJECTS[name].recipes[recipe], PRESETS[recipe]()
    quant = whole.fprop.x
    assert quant is not None
    if change in ("floor", "ceil"):
        return _alike(mx(quant.element, change))
    if change in MAPPED:
        target = Range(map_to=MAPPED[change][quant.element])
        return _alike(mx(quant.element, "floor").model_copy(update={"range": target}))
    return _alike(quant.model_copy(update={"outer": None})) if change == "one level" else whole


def _alike(quant: Quant) -> Recipe:
    fprop, dgrad, wgrad = Fprop(x=quant, w=quant), Dgrad(g=quant, w=quant), Wgrad(g=quant, x=quant)
    return Recipe.of(Products(fprop=fprop, dgrad=dgrad, wgrad=wgrad))
