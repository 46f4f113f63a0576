"""Memory that a trial of this package's transformer needs, from the model's shape alone. Torch-free.

The problem. A trial that runs out of memory on a GPU does so after minutes of waiting for it.

The idea. Count what must be alive at once. Weights, their gradients and the optimizer's moments live through
every step. The activations that the backward pass reads are largest when it begins; a step that telemetry
measures holds the gradient without quantisation at that time, and after it, copies of the quantised weights.

The sum is an upper bound in one respect: gradients come as activations go. Not counted: the CUDA context,
cuBLAS' workspaces, what the allocator reserves and does not use, and the temporaries of one operation. On a
GPU nothing of it is measured.
"""

from typing import NamedTuple

from ablate.recipes.recipe import Recipe
from ablate.training.workloads.base import Workload
from ablate.training.workloads.gpt import Gpt

_FP32, _BF16 = 4, 2
_TELEMETRY = 8
"""Bytes of each quantised weight that a measured step keeps (`metrics.keep_casts`)."""


class MemoryEstimate(NamedTuple):
    """Bytes by what they hold."""

    weights: int
    gradients: int
    optimizer: int
    activations: int
    """Tensors kept for the backward pass, with the copies of weights that products read."""
    logits: int
    """Gradient of the logits, which is made when all activations are still kept."""
    telemetry: int
    """Addition of a measured step to the step's peak."""

    @property
    def total(self) -> int:
        return sum(self)


def estimate(config: Workload, recipe: Recipe, device: str) -> MemoryEstimate | None:
    """Return the memory of a trial on `cpu`, where attention is computed in fp32, or `cuda`; None if it is
    not known. It is known of this package's transformer without experts, not compiled, and without
    `recompute`. The recipe's schedule and layer rules are left out."""
    if not isinstance(config, Gpt) or config.model is not None or config.recompute or config.compile:
        return None
    if config.experts is not None:
        return None
    matrices, vocab = config.parameters(), config.corpus.vocab
    heads = config.width // config.heads
    norms = config.layers * 2 * (config.width + heads) + config.width
    around = 2 * vocab * config.width
    weights = matrices + around + norms
    in_muon = matrices if config.optimizer == "muon" else 0
    tokens, number = config.batch * config.context, _FP32 if recipe.dtype == "fp32" else _BF16
    norm = number + (2 if device == "cpu" else 1) * _FP32  # on a CPU also what it multiplies by its weight
    block = tokens * _block(config, number, _FP32 if device == "cpu" else number, norm)
    head = tokens * (config.width * norm + vocab * _FP32)
    head += 0 if number == _FP32 else vocab * config.width * number
    cast = 0 if number == _FP32 else _BF16
    quantised = _BF16 if recipe.products.fprop.w else 0  # dgrad's are made as activations are dropped
    copies = matrices * (cast if recipe.plain else quantised)
    shadow = 0 if recipe.plain else _FP32 * weights
    measured = 0 if recipe.plain else _TELEMETRY * matrices
    activations = config.layers * block + head + copies
    return MemoryEstimate(
        weights=_FP32 * weights,
        gradients=_FP32 * weights,
        optimizer=_FP32 * (2 * weights - in_muon),
        activations=activations,
        logits=tokens * vocab * (_FP32 + number),
        telemetry=max(shadow, measured - activations),
    )


def _block(config: Gpt, number: int, attention: int, norm: int) -> int:
    """Return the bytes that one block keeps of each token, given the bytes of an activation (`number`) and of
    a number in attention, and those that a norm keeps of each number, its result included."""
    width = config.width
    keys = (config.kv_heads or config.heads) * (width // config.heads)
    norms = 2 * width * norm + (width + keys) * _FP32
    qkv = (width + 2 * keys) * attention  # its values are read by attention, and keep the rest
    rotated, mixed = (width + keys) * attention, width * (attention + number) + _FP32 * config.heads
    mlp = (4 if config.mlp == "swiglu" else 2) * config.hidden_width * number
    return norms + qkv + rotated + mixed + mlp
