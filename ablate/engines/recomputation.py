"""Recomputation of activations in the backward pass: less memory for more time, and the same bits."""

from collections.abc import Callable
from contextlib import nullcontext
from copy import copy
from dataclasses import replace
from functools import partial
from typing import TypeVar

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

from ablate.engines.emulated import Engine
from ablate.recipes.layers import block_name

Output = TypeVar("Output")


def recompute(model: nn.Module, engine: Engine) -> None:
    """Checkpoint the activations of every block: keep its input alone and recompute it in the backward pass.
    The same bits, for less memory and more time."""
    for name in {block_name(name) for name in engine.layers}:
        block = model.get_submodule(name)
        block.forward = partial(_recomputed, block.forward, engine)


def _recomputed(forward: Callable[..., Output], engine: Engine, *args: object, **kwargs: object) -> Output:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    moment = replace(engine.clock, calls=copy(engine.clock.calls))
    return checkpoint(
        forward,
        *args,
        use_reentrant=False,
        context_fn=lambda: (nullcontext(), engine.again(moment)),
        **kwargs,
    )
