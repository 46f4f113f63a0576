"""Recipes in the training loops of other libraries, as `ablate.integrations`.

`HFCallback` is for the Trainer of transformers, `LightningCallback` for that of Lightning, and `Accelerated`
for a loop with accelerate. Each file needs its own library, and is imported at the first use of its class.
All of them use the public interface alone (`ablate.convert` and the handle that it returns).
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ablate.experiment.integrations.accelerated import Accelerated
    from ablate.experiment.integrations.hf_trainer import HFCallback
    from ablate.experiment.integrations.lightning_callback import LightningCallback

__all__ = ["Accelerated", "HFCallback", "LightningCallback"]

_HOMES = {
    "Accelerated": ("accelerated", "accelerate", "hf"),
    "HFCallback": ("hf_trainer", "transformers", "hf"),
    "LightningCallback": ("lightning_callback", "lightning", "lightning"),
}
"""For each class its module, the library that it needs, and the extra that installs it."""


def __getattr__(name: str) -> object:
    """Import a class at its first use; ImportError with a command if its library is not installed."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    module, library, extra = _HOMES[name]
    try:
        return getattr(import_module(f"{__name__}.{module}"), name)
    except ModuleNotFoundError as error:
        if (error.name or "").partition(".")[0] != library:
            raise
        raise ImportError(
            f"{name} needs {library}, which is not installed: pip install 'ablate-fp4[{extra}]'"
        ) from None
