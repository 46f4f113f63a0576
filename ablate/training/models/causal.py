"""Causal language models of `transformers`: describe them without weights, build them, load their weights.

`loss` computes the mean cross-entropy of a model from outside it, so that its own modules and names stay.
"""

import inspect
import re
from collections.abc import Callable, Sequence
from difflib import get_close_matches
from textwrap import shorten
from typing import TYPE_CHECKING, Literal, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablate.engines import experts
from ablate.engines.blocks import why_left
from ablate.engines.emulated import described
from ablate.engines.expert_layers import is_packed, parameters_of
from ablate.engines.gpu_access import without_gpus
from ablate.engines.linears import features
from ablate.engines.selection import quantisable
from ablate.numerics.philox import Clock
from ablate.recipes.layers import block_name
from ablate.training.data.hub import quiet
from ablate.training.models import drawn, quietly
from ablate.training.models.source import HINT, ModelSource, Outline, resolve

with quietly(), without_gpus():
    from transformers import CONFIG_MAPPING, AutoConfig, AutoModelForCausalLM
    from transformers.modeling_utils import PreTrainedModel
    from transformers.utils.logging import disable_progress_bar

if TYPE_CHECKING:
    from transformers.configuration_utils import PreTrainedConfig

T = TypeVar("T")

disable_progress_bar()
quiet()


def outlined(source: ModelSource, vocab: int | None) -> Outline:
    """Return the outline of a model, which is built on the meta device, without weights. `vocab` is the size
    of the vocabulary for a configuration that gives none. OSError if the model cannot be found or read;
    ValueError if it is no causal language model of text, or has no layer that a recipe could apply to."""
    config = configuration(source, vocab)
    if config.get_text_config() is not config:
        raise ValueError(
            f"{config.model_type} has parts that no text goes through; name the model of its text alone"
        )
    with torch.device("meta"):
        model = _from_config(config)
    linears = quantisable(model)
    every = {*linears, *experts.outlined(model)}
    names = [name for name, _ in model.named_modules() if name in every]
    if not names:
        _, left = _coverage(model, names)
        raise ValueError(
            f"{config.model_type} has no linear layer inside numbered blocks that a recipe could apply to;"
            f" its largest matrix, {left}"
        )
    size = sum(p.numel() for p in model.parameters())
    context = getattr(config, "max_position_embeddings", None)
    return Outline(
        described(model, names),
        size,
        config.vocab_size,
        context,
        *_coverage(model, names),
        _features(model, names),
    )


def _features(model: nn.Module, names: Sequence[str]) -> dict[str, int]:
    """Return each distinct number of input or output features of some layers, keyed by its first layer."""
    owners: dict[int, str] = {}
    for name in names:
        layer = model.get_submodule(name)
        inputs, outputs = features(layer)
        owners.setdefault(inputs, f"{name} in")
        owners.setdefault(outputs, f"{name} out")
    return {owner: count for count, owner in owners.items()}


def _coverage(model: nn.Module, names: Sequence[str]) -> tuple[float, str | None]:
    """Return the share of the weights in matrices that are in some layers, and the largest other matrix with
    the reason why it is left.

    Stacks of matrices (fused experts) count. Embeddings do not, since they are looked up and not multiplied,
    nor does a head that shares its matrix with one.
    """
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    matrices = {
        f"{name}.{own}": parameter.numel()
        for name, module in model.named_modules()
        for own, parameter in module.named_parameters(recurse=False)
        if parameter.ndim > 1
        and id(parameter) not in tables
        and not (own.endswith("_bias") and is_packed(module))
    }
    covered = {f"{layer}.weight" for layer in names}
    covered |= {f"{name}.{own}" for name, call in experts.attached(model).items() for own in call.parameters}
    others = {name: count for name, count in matrices.items() if name not in covered}
    share = 1 - sum(others.values()) / sum(matrices.values())
    if not others:
        return share, None
    largest = max(others, key=lambda name: others[name])
    owner = largest.rpartition(".")[0]
    return share, f"{largest}: {why_left(model, owner, block_name(owner))}"


def _from_config(config: "PreTrainedConfig", **options: object) -> PreTrainedModel:
    if type(config) not in AutoModelForCausalLM._model_mapping:
        raise ValueError(f"transformers' {config.model_type} is no causal language model")
    try:
        return AutoModelForCausalLM.from_config(config, trust_remote_code=False, **options)
    except Exception as error:  # the model's own code may raise any class
        raise ValueError(f"transformers cannot build this {config.model_type}: {_message(error)}") from None


def configuration(source: ModelSource, vocab: int | None = None) -> "PreTrainedConfig":
    """Return the `transformers` configuration of a model; `vocab` as for `outlined`. OSError if the model
    cannot be found or read; ValueError if the fields are no configuration that `transformers` accepts."""
    if isinstance(source, str):
        return _saved(source, AutoConfig.from_pretrained, "no configuration that transformers can read")
    kind = source.get("model_type")
    if not isinstance(kind, str) or kind not in CONFIG_MAPPING:
        near = get_close_matches(str(kind), CONFIG_MAPPING, 3)
        remedy = f"the nearest: {', '.join(near)}" if near else HINT
        raise ValueError(f"model_type {kind!r} is no model type of transformers; {remedy}")
    fields = {name: value for name, value in source.items() if name != "model_type"}
    default = AutoConfig.for_model(kind)
    for name in fields:
        if not hasattr(default, name) and not _reads(type(default), name):
            near = get_close_matches(name, default.to_dict(), 3, 0.4)
            raise ValueError(f"transformers' {kind} has no field {name}; the nearest: {', '.join(near)}")
    sized = {"vocab_size": vocab} if vocab and "vocab_size" not in fields else {}
    try:
        return AutoConfig.for_model(kind, **sized, **fields)
    except Exception as error:  # its own checks may raise any class
        raise ValueError(f"transformers refuses this {kind}: {_message(error)}") from None


def _reads(kind: type, name: str) -> bool:
    """Return True if the code of a configuration's causal model reads a field that it does not declare.

    Qwen3-MoE and OLMoE read `head_dim` by `getattr(config, "head_dim", default)`, and published
    configurations set it.
    """
    if kind not in AutoModelForCausalLM._model_mapping:
        return False
    module = inspect.getmodule(AutoModelForCausalLM._model_mapping[kind])
    if module is None:
        return False
    read = re.compile(
        rf"""config\.{re.escape(name)}\b|getattr\(\s*(?:\w+\.)?config,\s*["']{re.escape(name)}["']"""
    )
    return read.search(inspect.getsource(module)) is not None


def _saved(source: str, load: Callable[..., T], why: str, **options: object) -> T:
    """Return what a function of `transformers` loads of a model; OSError if it cannot."""
    path, revision = resolve(source)
    options |= {"revision": revision, "local_files_only": path is not None, "trust_remote_code": False}
    try:
        return load(path or source, **options)
    except Exception as error:  # any class: files may be damaged, missing or of another format
        raise OSError(f"model {source}: {why}: {_message(error)}") from None


def _message(error: Exception) -> str:
    return shorten(str(error).strip() or type(error).__name__, 300, placeholder=" ...").rstrip(".")


def build(
    source: ModelSource, vocab: int, seed: int, device: torch.device, weights: bool = True
) -> nn.Module:
    """Return a model in fp32, in training mode, on a device; `vocab` as for `outlined`. Weights are drawn on
    the CPU and depend on the seed alone, unless `weights` is True and the model is a folder or a name on the
    hub. OSError if the model or its weights cannot be read; ValueError if transformers refuses the
    configuration, or the weights do not match it."""
    with drawn(seed):
        if weights and isinstance(source, str):
            model = _pretrained(source)
        else:
            model = _from_config(configuration(source, vocab), dtype=torch.float32)
    return model.to(device).train()


def frozen(source: ModelSource, vocab: int, seed: int, weights: bool) -> nn.Module:
    """Return a model whose weights need no gradient, but whose activations have one.

    Matrices of converted layers keep the type of their file, from which they are mapped: the machine reads a
    block when it is computed, and may forget it. Everything else is fp32. Arguments and errors are those of
    `build`.
    """
    if not (weights and isinstance(source, str)):
        model = build(source, vocab, seed, torch.device("cpu"), weights)
    else:
        model = _pretrained(source, "auto").train()
        mapped = {id(model.get_submodule(name).weight) for name in quantisable(model)}
        for module in experts.packed(model).values():
            mapped |= {id(getattr(module, name)) for name in parameters_of(module)}
        for tensor in (*model.parameters(), *model.buffers()):
            if tensor.is_floating_point() and id(tensor) not in mapped:
                tensor.data = tensor.data.float()
    model.requires_grad_(False)
    model.get_input_embeddings().register_forward_hook(lambda module, inputs, output: output.requires_grad_())
    return model


def _pretrained(source: str, dtype: torch.dtype | Literal["auto"] = torch.float32) -> nn.Module:
    load, why = AutoModelForCausalLM.from_pretrained, "its weights cannot be read"
    model, report = _saved(source, load, why, output_loading_info=True, dtype=dtype)
    lacking = sorted(map(str, (*report["missing_keys"], *report.get("mismatched_keys", ()))))
    if lacking:  # transformers draws these at random and only logs it
        raise ValueError(
            f"model {source}: its weights lack {lacking[0]} (and {len(lacking) - 1} more),"
            " or have it in another shape"
        )
    return model


def loss(clock: Clock, dtype: torch.dtype, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross-entropy of a batch in nats, fp32, of arguments as `logits` has them."""
    return F.cross_entropy(logits(clock, dtype, model, tokens, targets).float(), targets.flatten())


def logits(clock: Clock, dtype: torch.dtype, model: nn.Module, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the logits of all tokens, int64 [batch, tokens], as [batch * tokens, vocabulary].

    The clock determines the draws of dropout. With a `dtype` of bf16, unquantised operations run under
    autocast on a GPU, but in fp32 on a CPU, whose bf16 kernels are slow. `targets` are not read.
    """
    cuda = tokens.device if tokens.device.type == "cuda" else None
    autocast = torch.autocast(
        tokens.device.type, torch.bfloat16, enabled=cuda is not None and dtype == torch.bfloat16
    )
    with drawn(clock, cuda), autocast:
        return model(input_ids=tokens, use_cache=False).logits.flatten(0, 1)
