"""Engines: the implementations that apply a recipe to a model's linear layers. Torch-free."""

ENGINES = {"emulated": "ablate.engines.emulated", "transformer_engine": "ablate.engines.transformer_engine"}
"""Engine names and their modules, each with `convert(model, recipe, clock) -> Engine`."""
AUTO = "auto"
"""Engine name of an experiment that leaves the choice to the machine."""
