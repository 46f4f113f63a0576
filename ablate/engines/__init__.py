"""How a linear layer is computed. An engine is asked whether it can run a recipe; importing this costs no torch."""

ENGINES = {"emulated": "ablate.engines.emulated", "transformer_engine": "ablate.engines.transformer_engine"}
"""Engine names and their modules, each with `convert(model, recipe, clock) -> Engine`."""
AUTO = "auto"
"""What an experiment asks for where it leaves the choice to the machine."""
