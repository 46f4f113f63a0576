"""Low-rank adapters (LoRA, arXiv 2106.09685), by peft, for a model that an engine has converted already."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from ablate.training.models import drawn, quietly


@contextmanager
def _hidden_if_broken(package: str) -> Iterator[None]:
    """Inside this context, hide a package that is installed but cannot be imported.

    peft checks only that it is installed, and then fails to import it.
    """
    if package in sys.modules:
        yield
        return
    try:
        __import__(package)
    except (ImportError, RuntimeError, OSError):
        sys.modules[package] = None  # as if it were not installed
        yield
        sys.modules.pop(package, None)
    else:
        yield


with _hidden_if_broken("transformer_engine"), quietly():
    import peft


def adapt(
    model: nn.Module, names: Sequence[str], rank: int, alpha: float, dropout: float, seed: int
) -> nn.Module:
    """Return the model with adapters on some layers; all other parameters are frozen.

    The layers themselves stay quantised by their recipe. The adapters are computed in the precision of the
    activations.

    Args:
        model: the converted model, changed in place.
        names: qualified names of the layers.
        rank: rank of the adapters.
        alpha: scale of the adapters; the product of their matrices is multiplied by alpha / rank.
        dropout: probability of dropout before an adapter.
        seed: seed of the adapters' initial weights, which depend on nothing else.
    """
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(names), task_type="CAUSAL_LM"
    )
    with drawn(seed), warnings.catch_warnings():
        # peft imports a deprecated name of transformers, which users cannot change.
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(model, config).train()


def merged(model: nn.Module) -> nn.Module:
    """Return the model with its adapters, if any, added to its weights in place."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def save(model: nn.Module, folder: Path) -> None:
    """Write the model, its adapters merged in place, into a folder that `transformers` loads."""
    merged(model).save_pretrained(folder)
