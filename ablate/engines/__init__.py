"""Engines: the implementations that apply a recipe to a model's linear layers. Torch-free."""

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any, Literal

SCALED = "scaled_mm"
"""Name of the engine of torch's scaled products; a colon and another word name the library for FP4."""
ENGINES = {
    "emulated": "ablate.engines.emulated",
    "transformer_engine": "ablate.engines.transformer_engine",
    SCALED: "ablate.engines.scaled_mm",
    f"{SCALED}:cudnn": "ablate.engines.scaled_mm",
    f"{SCALED}:cutlass": "ablate.engines.scaled_mm",
}
"""Engine names and their modules, each with `convert(model, recipe, clock) -> Engine`."""
Backend = Literal["cublaslt", "cudnn", "cutlass"]
_BACKENDS: dict[str, Backend] = {"": "cublaslt", "cudnn": "cudnn", "cutlass": "cutlass"}
AUTO = "auto"
"""Engine name of an experiment that leaves the choice to the machine."""


def converter(engine: str) -> Callable[..., Any]:
    """Return `convert(model, recipe, clock)` of an engine."""
    convert = import_module(ENGINES[engine]).convert
    return partial(convert, backend=backend_of(engine)) if module_name(engine) == SCALED else convert


def module_name(engine: str) -> str:
    """Return an engine's name without its back end: `scaled_mm` of `scaled_mm:cudnn`."""
    return engine.partition(":")[0]


def backend_of(engine: str) -> Backend:
    """Return the library that multiplies FP4 for an engine `scaled_mm`."""
    return _BACKENDS[engine.partition(":")[2]]


def makes_operands(engine: str) -> bool:
    """Return True if an engine's operands are those of this package's quantisers, random bits included."""
    return engine != "transformer_engine"
