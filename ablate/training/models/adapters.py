"""Low-rank adapters (LoRA, arXiv 2106.09685), by peft, for a model that an engine has converted already."""

import warnings
from collections.abc import Sequence
from pathlib import Path

from torch import nn

from ablate.engines.gpu_access import without_gpus
from ablate.training.models import drawn, hidden_if_broken, quietly

with hidden_if_broken("transformer_engine"), quietly(), without_gpus():
    import peft


def adapt(
    model: nn.Module, names: Sequence[str], rank: int, alpha: float, dropout: float, seed: int
) -> nn.Module:
    """Return the converted model, changed in place, with adapters on the layers of these names, in the
    precision of the activations. The layers stay quantised by their recipe; all parameters but the adapters'
    are frozen. The product of an adapter's matrices is multiplied by alpha / rank; `dropout` is the
    probability before it. Initial weights depend on the seed alone."""
    config = peft.LoraConfig(
        r=rank, lora_alpha=alpha, lora_dropout=dropout, target_modules=list(names), task_type="CAUSAL_LM"
    )
    with drawn(seed), warnings.catch_warnings():
        # peft imports a deprecated name of transformers, which users cannot change.
        warnings.simplefilter("ignore", FutureWarning)
        return peft.get_peft_model(model, config).train()


def save(model: nn.Module, folder: Path) -> None:
    """Write a model of `transformers`, or one from `adapt`, its adapters merged in place, into a folder that
    `transformers` loads and that is made if it does not exist. OSError if a file cannot be written."""
    plain = model.merge_and_unload() if hasattr(model, "merge_and_unload") else model
    plain.save_pretrained(folder)
