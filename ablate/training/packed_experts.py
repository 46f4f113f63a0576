"""Packed weights of experts under the names that checkpoints of their model have: `expert_tensors`.

The problem. A model holds the matrices of all experts in one parameter [experts, out, in]. Checkpoints hold
one matrix an expert, with gate and up apart, and serving stacks look for packed weights under those names:

    model.layers.0.mlp.experts.gate_up_proj              in the model
    model.layers.0.mlp.experts.3.gate_proj.weight        in a checkpoint of Qwen3 MoE
    model.layers.0.block_sparse_moe.experts.3.w1.weight  in one of Mixtral

The idea. transformers splits and names the parameter when it saves a model. Codes, block scales and outer
scale have its shape but for the last dimension, so they are split and named as it is. Both halves of gate and
up keep the outer scale that they were quantised with. A model of no other library keeps the layers' names.

transformers' own loader of compressed-tensors leaves out `weight_global_scale` of experts
(huggingface/transformers#48371); vLLM reads it.

Refused: weights that are transposed or interleaved, such as gpt-oss's, some experts without the others, and
models whose checkpoints pack experts.
"""

from collections.abc import Callable, Iterator, Mapping

import torch
from torch import Tensor, nn

from ablate.engines.expert_layers import EmulatedExpert
from ablate.engines.experts import ExpertsForward

Named = Callable[[dict[str, Tensor]], dict[str, Tensor]]
"""Return tensors of a model's parameters, of any last dimension, as its checkpoints have them."""


def named(model: nn.Module) -> Named | None:
    """Return the function that names a model's tensors as its checkpoints do; None without transformers."""
    if not hasattr(model, "save_pretrained"):
        return None
    from ablate.training.models.causal import on_disk

    return lambda tensors: on_disk(model, tensors)


def require_whole(stacks: Mapping[str, ExpertsForward], packed: Mapping[str, object]) -> set[str]:
    """Return the names of the parameters of experts that are packed.

    Args:
        stacks: modules of experts, by name.
        packed: layers whose weights are packed, by name.

    Raises:
        ValueError: a module's layout is not one that checkpoints are split from, or some of its experts are
            packed and others are not.
    """
    parameters = set()
    for name, forward in stacks.items():
        for parameter, layers in _by_parameter(forward):
            chosen = [layer.name in packed for layer in layers]
            if not any(chosen):
                continue
            if forward.module.is_transposed or not forward.module.is_concatenated:
                raise ValueError(
                    f"{name}: its experts' weights are transposed or interleaved, and no format has names for"
                    " packed ones"
                )
            if not all(chosen):
                raise ValueError(
                    f"{layers[chosen.index(False)].name}: it stays in high precision and other experts are"
                    " packed, and serving stacks read all experts of a module in one format"
                )
            parameters.add(f"{name}.{parameter}")
    return parameters


def expert_tensors(
    stacks: Mapping[str, ExpertsForward], made: Mapping[str, Mapping[str, Tensor]], name_all: Named
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of all packed experts of a model of transformers, by their names in a checkpoint.

    Args:
        stacks: modules of experts, by name.
        made: tensors of each packed layer, from `packed_model.packed_tensors`.
        name_all: from `named`.

    Raises:
        ValueError: the model's checkpoints pack experts.
    """
    for name, forward in stacks.items():
        for parameter, layers in _by_parameter(forward):
            if layers[0].name not in made:
                continue
            for key in made[layers[0].name]:
                whole = torch.stack([_of_expert(each, made, key) for each in _experts(layers)])
                yield from _split(f"{name}.{parameter}", key, whole, made[layers[0].name][key], name_all)


def _split(
    parameter: str, key: str, whole: Tensor, like: Tensor, name_all: Named
) -> Iterator[tuple[str, Tensor]]:
    for name, part in name_all({parameter: whole}).items():
        if name == parameter or part.ndim != 2 or not name.endswith(".weight"):
            raise ValueError(
                f"{parameter}: checkpoints of this model pack experts, and formats have no names then"
            )
        value = part[0, 0].reshape(like.shape) if like.numel() == 1 else part.contiguous().view(like.dtype)
        yield f"{name.removesuffix('weight')}{key}", value.clone()


def _of_expert(parts: list[EmulatedExpert], made: Mapping[str, Mapping[str, Tensor]], key: str) -> Tensor:
    """Return a tensor of one expert [out, n] that can be split: its bytes, or a scale in each row."""
    rows = []
    for layer in parts:
        value = made[layer.name][key]
        one = value.numel() == 1
        rows.append(value.reshape(1, 1).expand(layer.out_features, 1) if one else value.view(torch.uint8))
    return torch.cat(rows)


def _by_parameter(forward: ExpertsForward) -> Iterator[tuple[str, list[EmulatedExpert]]]:
    for parameter in forward.parameters:
        yield parameter, [layer for layer in forward.layers if layer.parameter == parameter]


def _experts(layers: list[EmulatedExpert]) -> list[list[EmulatedExpert]]:
    """Return the layers of each expert: one, or gate and up."""
    numbers = sorted({layer.expert for layer in layers})
    return [[layer for layer in layers if layer.expert == number] for number in numbers]
