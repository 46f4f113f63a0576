"""Causal language models of `transformers`: described without weights, built from a seed, or read with the weights that they have.

Called with [batch, tokens] they give the mean cross-entropy in nats, through `loss`, so that their own modules and names stay.
"""

import inspect
import re
from collections.abc import Sequence
from difflib import get_close_matches
from textwrap import shorten
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablate.engines.emulated import described, quantisable
from ablate.numerics.philox import Clock
from ablate.training.data.hub import quiet
from ablate.training.models import drawn, quietly
from ablate.training.models.source import HINT, Outline, Source, place

with quietly():  # of other libraries that it would work with
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import PreTrainedModel
    from transformers.utils.logging import disable_progress_bar

disable_progress_bar()
quiet()


def outlined(source: Source, vocab: int | None) -> Outline:
    """The outline of a model, from one without weights. OSError or ValueError in one sentence where there is none."""
    found = configuration(source, vocab)
    if found.get_text_config() is not found:
        raise ValueError(
            f"{found.model_type} has parts that no text goes through; name the model of its text alone"
        )
    with torch.device("meta"):
        model = _from(found)
    names = quantisable(model)
    if not names:
        raise ValueError(
            f"{found.model_type} has no linear layer inside numbered blocks that a recipe could apply to"
        )
    size = sum(p.numel() for p in model.parameters())
    context = getattr(found, "max_position_embeddings", None)
    return Outline(
        described(model, names),
        size,
        found.vocab_size,
        context,
        *_coverage(model, names),
        _features(model, names),
    )


def _features(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Each number of features that the layers `names` take or give, by the first that does."""
    found: dict[int, str] = {}
    for name in names:
        layer = model.get_submodule(name)
        found.setdefault(layer.in_features, f"{name} in")
        found.setdefault(layer.out_features, f"{name} out")
    return {where: count for count, where in found.items()}


def _coverage(model: nn.Module, names: Sequence[str]) -> tuple[float, str | None]:
    """The share of the weights in matrices (of fused experts: stacks of them) that are in the layers `names`, and the largest one that is
    not. Embeddings are looked up, not multiplied; a head that shares its matrix with one is left out with it."""
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = {name: p.numel() for name, p in model.named_parameters() if p.ndim > 1 and id(p) not in tables}
    left = {
        name: count for name, count in matrices.items() if name not in {f"{layer}.weight" for layer in names}
    }
    return 1 - sum(left.values()) / sum(matrices.values()), max(left, key=left.get, default=None)


def _from(found: Any, **more: Any) -> PreTrainedModel:
    if type(found) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"transformers' {found.model_type} is no causal language model")
    try:
        return AutoModelForCausalLM.from_config(found, trust_remote_code=False, **more)
    except Exception as error:  # of whatever class the model's own code raises
        raise ValueError(f"transformers cannot build this {found.model_type}: {_words(error)}") from None


def configuration(source: Source, vocab: int | None = None) -> Any:
    """The `transformers` configuration that is meant. OSError or ValueError in one sentence where there is none."""
    if isinstance(source, str):
        return _named(source)
    kind = source.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        near = get_close_matches(str(kind), CONFIG_MAPPING, 3)
        raise ValueError(
            f"model_type {kind!r} is none that transformers knows; {'the nearest: ' + ', '.join(near) if near else HINT}"
        )
    fields = {name: value for name, value in source.items() if name != "model_type"}
    known = AutoConfig.for_model(kind)
    for name in fields:
        if not hasattr(known, name) and not _reads(type(known), name):
            near = get_close_matches(name, known.to_dict(), 3, 0.4)
            raise ValueError(f"transformers' {kind} has no field {name}; the nearest: {', '.join(near)}")
    sized = {"vocab_size": vocab} if vocab and "vocab_size" not in fields else {}
    try:
        return AutoConfig.for_model(kind, **sized, **fields)
    except Exception as error:  # of whatever class its own checks are
        raise ValueError(f"transformers refuses this {kind}: {_words(error)}") from None


def _reads(kind: type, name: str) -> bool:
    """Return True if the code of a configuration's causal model reads a field that the configuration class does not declare.

    Qwen3-MoE and OLMoE take `head_dim` by `getattr(config, "head_dim", default)`; published configurations set it.
    """
    if kind not in AutoModelForCausalLM._model_mapping:
        return False
    module = inspect.getmodule(AutoModelForCausalLM._model_mapping[kind])
    read = re.compile(
        rf"""config\.{re.escape(name)}\b|getattr\(\s*(?:\w+\.)?config,\s*["']{re.escape(name)}["']"""
    )
    return read.search(inspect.getsource(module)) is not None


def _named(source: str) -> Any:
    path, revision = place(source)
    more = {"revision": revision, "local_files_only": path is not None, "trust_remote_code": False}
    try:
        return AutoConfig.from_pretrained(path or source, **more)
    except Exception as error:  # of whatever class
        raise OSError(
            f"model {source}: no configuration that transformers can read: {_words(error)}"
        ) from None


def _words(error: Exception) -> str:
    """What a library says, in one line of bearable length."""
    return shorten(str(error).strip() or type(error).__name__, 300, placeholder=" ...").rstrip(".")


def build(source: Source, vocab: int, seed: int, device: torch.device, weights: bool = True) -> nn.Module:
    """The model in fp32, ready to train: with the weights of the folder or the name on the hub, where those are wanted; otherwise
    with weights drawn from the seed alone, on the CPU. OSError or ValueError in one sentence."""
    with drawn(seed):
        pretrained = weights and isinstance(source, str)
        model = (
            _pretrained(source) if pretrained else _from(configuration(source, vocab), dtype=torch.float32)
        )
    return model.to(device).train()


def _pretrained(source: str) -> nn.Module:
    path, revision = place(source)
    more = {
        "revision": revision,
        "local_files_only": path is not None,
        "trust_remote_code": False,
        "dtype": torch.float32,
    }
    try:
        model, told = AutoModelForCausalLM.from_pretrained(path or source, output_loading_info=True, **more)
    except Exception as error:  # of whatever class: torn files, none, of another format
        raise OSError(f"model {source}: its weights cannot be read: {_words(error)}") from None
    lacking = sorted(map(str, (*told["missing_keys"], *told.get("mismatched_keys", ()))))
    if lacking:  # they would be drawn anew, without a word
        raise ValueError(
            f"model {source}: its weights lack {lacking[0]} (and {len(lacking) - 1} more), or have it in another shape"
        )
    return model


def loss(clock: Clock, dtype: torch.dtype, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Mean cross-entropy in nats of `targets`, the tokens one later. `dtype` is that of activations: where it is bf16, what is not
    quantised runs under autocast on a GPU; on a CPU, whose kernels for it are slow, in fp32."""
    cuda = tokens.device if tokens.device.type == "cuda" else None
    autocast = torch.autocast(
        tokens.device.type, torch.bfloat16, enabled=cuda is not None and dtype == torch.bfloat16
    )
    with drawn(clock, cuda), autocast:
        logits = model(input_ids=tokens, use_cache=False).logits
    return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())
