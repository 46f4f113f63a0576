"""How a linear layer is computed. An engine is asked whether it can run a recipe; importing this costs no torch."""

ENGINES = {"emulated": "ablate.engines.emulated"}
"""Engine names and their modules, each with `convert(model, recipe, clock) -> Engine`."""


def resolve(name: str) -> str:
    """The engine that `name` (or `auto`) means on this machine; ValueError with the reason where it cannot run."""
    if name == "auto":
        return "emulated"
    if name not in ENGINES:
        raise ValueError(f"engine {name!r} is not yet available; 'emulated' (or 'auto') computes the same numbers on any device")
    return name
