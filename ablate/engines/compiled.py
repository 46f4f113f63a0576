"""Emulated layers as opaque operators for torch.compile.

torch.compile fuses the code around such an operator and does not trace into it. An operator reads recipe,
step and probe when it runs, so that a change of those triggers no recompilation.
"""

import shutil
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, library, nn

from ablate.engines.emulated import Engine
from ablate.engines.emulated_layer import EmulatedLinear, NotInForce
from ablate.engines.products import backward, forward
from ablate.numerics.product import linear

_LAYERS: WeakValueDictionary[int, EmulatedLinear] = WeakValueDictionary()


@library.custom_op("ablate::linear", mutates_args=())
def _linear(x: Tensor, w: Tensor, bias: Tensor | None, layer: int) -> tuple[Tensor, Tensor]:
    """Return y and the micro-batch of the call, int64 on the CPU, which the backward pass draws by."""
    module = _LAYERS[layer]
    number = module.begin_call()
    micro_batch = torch.tensor(number, device="cpu")
    if needed := module.products.backward_needs:
        raise RuntimeError(
            "torch.compile keeps x and w alone for the backward pass, and this recipe needs"
            f" {needed}; do not compile the model (in an experiment: leave out compile: true)"
        )
    if module.products.plain:
        high = None if bias is None else bias.to(module.dtype)
        return linear(x.to(module.dtype), w.to(module.dtype), high).to(x.dtype), micro_batch
    with module.clock.within(number):
        y = forward(module, module.products, x, w)[0]
    return y if bias is None else (y + bias).to(x.dtype), micro_batch


@_linear.register_fake
def _(x: Tensor, w: Tensor, bias: Tensor | None, layer: int) -> tuple[Tensor, Tensor]:
    return x.new_empty(x.shape[0], w.shape[0]), torch.empty((), dtype=torch.int64, device="cpu")


@library.custom_op("ablate::linear_backward", mutates_args=())
def _linear_backward(
    dy: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, micro_batch: Tensor, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Return dx, dw and the gradient of the bias; the last is empty without a bias."""
    module = _LAYERS[layer]
    if isinstance(module.products, NotInForce):
        raise RuntimeError(
            f"{module.name}: the step whose forward pass this is has ended;"
            " call backward inside it too, since compiled layers read the recipe when they run"
        )
    plain = module.products.plain
    with module.clock.within(int(micro_batch)):  # a later forward pass may have begun another one
        kept = (x if plain else x.to(torch.bfloat16), w, None, None)
        dx, dw = backward(module, module.products, kept, dy, (True, True))
    assert dx is not None
    assert dw is not None
    wide = module.dtype if plain or bias is None else torch.promote_types(dy.dtype, bias.dtype)
    module.end_call(int(micro_batch))
    db = dy.new_empty(0) if bias is None else dy.to(wide).sum(0).to(bias.dtype)
    # Contiguous as announced below, even if x and w are not: inductor's code relies on the strides.
    return dx.to(x.dtype).contiguous(), dw.to(w.dtype).contiguous(), db


@_linear_backward.register_fake
def _(
    dy: Tensor, x: Tensor, w: Tensor, bias: Tensor | None, micro_batch: Tensor, layer: int
) -> tuple[Tensor, Tensor, Tensor]:
    db = dy.new_empty(0) if bias is None else bias.new_empty(bias.shape)
    return x.new_empty(x.shape), w.new_empty(w.shape), db


def _save(ctx: Any, inputs: tuple[Tensor, Tensor, Tensor | None, int], output: tuple[Tensor, Tensor]) -> None:
    x, w, bias, ctx.layer = inputs
    ctx.save_for_backward(x, w, bias, output[1])


def _differentiate(ctx: Any, dy: Tensor, _: None) -> tuple[Tensor, Tensor, Tensor | None, None]:
    dx, dw, db = _linear_backward(dy.contiguous(), *ctx.saved_tensors, ctx.layer)
    return dx, dw, None if ctx.saved_tensors[2] is None else db, None


_linear.register_autograd(_differentiate, setup_context=_save)


def operator(layer: EmulatedLinear) -> Callable[[Tensor, Tensor, Tensor | None], Tensor]:
    """Return the operator of one layer: y [tokens, out] from x [tokens, in], w [out, in] and bias [out]."""
    # The smallest free number, the same in every trial: it is part of the graph, by which torch caches.
    number = next(n for n in count() if n not in _LAYERS)
    _LAYERS[number] = layer
    return partial(_output, number)


def _output(number: int, x: Tensor, w: Tensor, bias: Tensor | None) -> Tensor:
    return torch.ops.ablate.linear(x, w, bias, number)[0]


def compile_model(model: nn.Module, engine: Engine) -> None:
    """Compile a model of fixed shapes without graph breaks; RuntimeError on a CPU without a C++ compiler.
    torch caches the code in TORCHINDUCTOR_CACHE_DIR, and later trials of the same shapes reuse it."""
    if next(model.parameters()).device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        raise RuntimeError(
            "compile: true needs a C++ compiler on the worker: install g++ or clang++, or leave it out"
        )
    for layer in engine.layers.values():
        layer.whole_graph = operator(layer)
    model.compile(dynamic=False, fullgraph=True)
