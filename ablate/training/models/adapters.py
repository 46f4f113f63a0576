"""Low-rank adapters (LoRA, arXiv 2106.09685) through peft, around a model whose linear layers a recipe already drives."""

import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from torch import nn

from ablate.training.models import drawn, quietly


@contextmanager
def _without_a_shell(package: str) -> Iterator[None]:
    """Hide a package that is there and cannot be imported: peft only asks whether it is there, and fails with it."""
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


with _without_a_shell("transformer_engine"), quietly():
    import peft


def adapt(
    model: nn.Module, names: Sequence[str], rank: int, alpha: float, dropout: float, seed: int
) -> nn.Module:
    """The model with adapters on the layers `names`, drawn from the seed alone; nothing else of it is trained any more.

    The layers themselves stay what they are, quantised by their recipe, under their own names; adapters are computed in the
    activations' own precision.
    """
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(names), task_type="CAUSAL_LM"
    )
    with drawn(seed), warnings.catch_warnings():
        warnings.simplefilter(
            "ignore", FutureWarning
        )  # peft asks transformers by a name that will go: nothing that a user could mend
        return peft.get_peft_model(model, config).train()


def merged(model: nn.Module) -> nn.Module:
    """The model with its adapters, if any, added to its weights: a copy is not made."""
    return model.merge_and_unload() if hasattr(model, "merge_and_unload") else model


def save(model: nn.Module, folder: Path) -> None:
    """Leave the model, its adapters merged, as `transformers` loads it."""
    merged(model).save_pretrained(folder)
