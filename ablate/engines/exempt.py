"""Linear layers inside blocks that stay in high precision (`exempt`) or cannot be replaced (`altered`).

Two kinds of nn.Linear are not what a recipe means by a layer of a block. A router sends tokens to experts,
and the rounding of its few outputs would send them elsewhere; every training stack keeps it in high
precision. Some modules multiply by the weight of a layer themselves and never call it, so a layer in its
place would quantise nothing:

    blocks.0.mlp.router.classifier      any layer of a module whose name says router
    blocks.0.mlp.gate                   beside experts, with one output for each of them
    blocks.0.mlp.shared_expert_gate     the scale of a shared expert, with one output
    blocks.0.mamba.dt_proj              of transformers' mixers of Mamba's first version
    blocks.0.attn.weights_proj          what a model of transformers keeps in fp32, whatever its dtype is
    blocks.0.attn.out_proj              of nn.MultiheadAttention

An adapter of LoRA (`blocks.0.attn.q_proj.lora_A`) is small, and stays in high precision as in QLoRA.
"""

from collections.abc import Collection
from fnmatch import fnmatchcase

import torch.distributed as dist
from torch import nn
from torch.nn.utils.parametrize import is_parametrized

from ablate.engines.emulated_layer import EmulatedLinear


def exempt(model: nn.Module, name: str, block: str) -> str:
    """Return why a linear layer inside a block stays in high precision; "" if a recipe applies to it."""
    path = name.split(".")
    parts = path[block.count(".") + 1 :] or path[-1:]  # without the names of the lists of blocks
    owner = model.get_submodule(".".join(path[:-1]))
    parent = type(owner).__name__
    if (parts[-1] == "dt_proj" and "Mamba" in parent) or isinstance(owner, nn.MultiheadAttention):
        return f"{parent} multiplies by its weight itself"
    if any(part.lower().startswith("lora_") for part in parts):
        return 'an adapter of LoRA, which stays in high precision (linears=["*.lora_*"] takes it)'
    if any("router" in part for part in parts) or ("gate" in parts and _chooses(model, path)):
        return "a router of experts, which stays in high precision"
    if kept_in_fp32(model, name):
        return "transformers keeps it in fp32"
    if parts[-1] == "shared_expert_gate":
        return "the scale of a shared expert, which stays in high precision"
    return ""


def kept_in_fp32(model: nn.Module, name: str) -> bool:
    """Return True for a module or parameter that a model of transformers has in fp32, loaded as bf16 too."""
    patterns = getattr(model, "_keep_in_fp32_modules_strict", None) or ()
    return any(fnmatchcase(f".{name}.", f"*.{pattern}.*") for pattern in patterns)


def _chooses(model: nn.Module, path: list[str]) -> bool:
    """Return True for a layer of a module `gate` beside `experts`, of which it has an output for each."""
    beside = model.get_submodule(".".join(path[: path.index("gate")]))
    experts = getattr(beside, "experts", None)
    count = len(experts) if isinstance(experts, nn.ModuleList) else getattr(experts, "num_experts", None)
    return getattr(model.get_submodule(".".join(path)), "out_features", 0) == count


def altered(linear: nn.Module, taken: bool = True) -> str | None:
    """Return the reason why a layer cannot be replaced by one that has its parameters; None if it can.
    `taken` is False for a class that is not to be replaced, of which only a parametrization is reported: that
    of a layer gives it a class of its own."""
    if is_parametrized(linear):
        chains = linear.parametrizations.values()
        kinds = sorted({type(step).__name__.lstrip("_") for chain in chains for step in chain})
        return (
            f"its parameters are parametrized ({', '.join(kinds)}), which a quantised layer would bypass;"
            " call torch.nn.utils.parametrize.remove_parametrizations first"
        )
    if taken and "weight" not in linear._parameters:
        return (
            "a hook (weight_norm, spectral_norm or pruning) computes its weight,"
            " which a quantised layer would bypass; remove it first"
        )
    if taken and "forward" in vars(linear):
        return "its forward was replaced, which a quantised layer would bypass; convert the model first"
    return None


def refuse_bypassed(layers: Collection[EmulatedLinear]) -> None:
    """Raise ValueError if a quantised layer's weight has a gradient, and no forward pass of it ever began.

    Its module multiplies by the weight itself, so nothing of it is quantised. Call it after a backward pass,
    with all layers of a model and the products of the step in force. Several ranks are not checked, since
    another rank may have called the layer, nor are layers of tensor cores, which do not report their calls.
    """
    divided = dist.is_initialized() and dist.get_world_size() > 1
    if divided or all(layer.begun or not layer.emulates for layer in layers):
        return
    begun = {id(layer.owner) for layer in layers if layer.begun}
    if not begun:  # a whole graph of torch.compile, or an engine whose layers do not report
        return
    for layer in layers:
        gradient = layer.owner.grad
        called = id(layer.owner) in begun or not layer.emulates
        if called or layer.products.plain or gradient is None or not gradient.any():
            continue
        last = layer.name.rpartition(".")[2]
        raise ValueError(
            f"{layer.name}: its module multiplies by its weight without calling the layer, so nothing of it"
            f' would be quantised; leave it out by a rule, {{match: {{name: "*.{last}"}}}} in layers.rules'
        )
