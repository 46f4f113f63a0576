"""Arithmetic of a process that trains on CUDA: what it may round, and what it repeats bit for bit.

The problem. By default cuBLAS may add the parts of a bf16 product in bf16, cuDNN rounds fp32 convolutions to
TF32, and the backward pass of attention adds in whatever order its thread blocks end. The first two would be
differences between arms that no recipe asked for; the third makes a resumed trial another trial.

The idea. `configure` switches the roundings off, for every arm alike. Attention alone is made deterministic:
torch has one switch for the whole process, and `attention` holds it while the attention call and its backward
pass run. With the switch on, torch 2.13 never selects cuDNN's attention, whose backward pass is not
deterministic; flash attention sums the gradient of the queries in a fixed order, and memory-efficient
attention does not split the keys (sdp_utils.cpp and attention_backward.cu in ATen). Its math fallback is
products and a softmax. A product is deterministic if CUBLAS_WORKSPACE_CONFIG is one of `WORKSPACES`.

Where the attention call is not ours (a model of transformers) or is compiled, the switch stays on for all
operations (`follow`). The cost of either is not measured.
"""

import os
from collections.abc import MutableMapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ablate.errors import InputError

WORKSPACES = (":4096:8", ":16:8")
"""Values of CUBLAS_WORKSPACE_CONFIG with which cuBLAS repeats its bits (its documentation, "Results
reproducibility")."""
_VARIABLE = "CUBLAS_WORKSPACE_CONFIG"
_ON = 2
"""Debug mode in which torch uses deterministic algorithms, and raises for operations without one."""


def configure(environment: MutableMapping[str, str] = os.environ) -> None:
    """Set the arithmetic of every arm on CUDA, before the process's first product. A variable that is already
    set stays.

    cuBLAS reads its variable when its first handle is made, so a trial's process calls this before CUDA
    starts. It starts no CUDA itself, and may be called again.
    """
    environment.setdefault(_VARIABLE, WORKSPACES[0])
    products = torch.backends.cuda.matmul
    products.allow_bf16_reduced_precision_reduction = False
    products.allow_fp16_reduced_precision_reduction = False
    products.allow_fp16_accumulation = False
    products.allow_tf32 = False
    torch.backends.cudnn.allow_tf32 = False
    # With the switch on, torch would fill every empty tensor, a launch each, though it is written to anyway.
    torch.utils.deterministic.fill_uninitialized_memory = False


def follow(deterministic: bool, everywhere: bool, environment: MutableMapping[str, str] = os.environ) -> None:
    """Set torch's switch for a run, after `configure`; for all operations if `everywhere`, since `attention`
    cannot hold it for this model. InputError if cuBLAS is set to a workspace with which it does not repeat
    its bits."""
    if deterministic and (present := environment.get(_VARIABLE)) not in WORKSPACES:
        remedy = f"set it to {' or '.join(WORKSPACES)}, or the workload's deterministic to false"
        raise InputError(f"{_VARIABLE}={present}: cuBLAS does not repeat its bits with it; {remedy}")
    torch.backends.cudnn.deterministic = deterministic
    torch.use_deterministic_algorithms(deterministic and everywhere)


def attention(q: Tensor, k: Tensor, v: Tensor, *, causal: bool, grouped: bool) -> Tensor:
    """Return scaled dot-product attention with deterministic algorithms, in its backward pass too. `q` is
    [batch, heads, tokens, head]; `k` and `v` have as many heads or, if `grouped`, a divisor of them. With
    `causal`, a token attends to itself and the tokens before it alone."""
    before = torch.get_deterministic_debug_mode()
    q, k, v = _LastInBackward.apply(before, q, k, v)
    torch.set_deterministic_debug_mode(_ON)
    try:
        y = F.scaled_dot_product_attention(q, k, v, is_causal=causal, enable_gqa=grouped)
    finally:
        torch.set_deterministic_debug_mode(before)
    return _FirstInBackward.apply(y)


class _FirstInBackward(torch.autograd.Function):
    """The identity on attention's result: its backward pass turns the switch on. A wrapper around the whole
    call would keep q, k and v when blocks are computed again (`recompute`)."""

    @staticmethod
    def forward(ctx: Any, y: Tensor) -> Tensor:
        return y.view_as(y)

    @staticmethod
    def backward(ctx: Any, dy: Tensor) -> Tensor:
        torch.set_deterministic_debug_mode(_ON)
        return dy


class _LastInBackward(torch.autograd.Function):
    """The identity on queries, keys and values: its backward pass turns the switch back."""

    @staticmethod
    def forward(ctx: Any, before: int, *parts: Tensor) -> tuple[Tensor, ...]:
        ctx.before = before
        return tuple(part.view_as(part) for part in parts)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        torch.set_deterministic_debug_mode(ctx.before)
        return None, *gradients
