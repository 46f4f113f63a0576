"""Emulated layers as opaque operators for torch.compile.

torch.compile fuses the code around such an operator and does not trace into it. An operator reads recipe,
step and probe when it runs, so that a change of those triggers no recompilation.
"""

import shutil
from functools import partial
from itertools import count
from weakref import WeakValueDictionary

import torch
from torch import Tensor, library, nn

from ablate.engines.emulated import Engine
from ablate.engines.emulated_layer import EmulatedLinear, backward, forward
from ablate.numerics.product import linear

_LAYERS: WeakValueDictionary[int, EmulatedLinear] = WeakValueDictionary()


@library.custom_op("ablate::linear", mutates_args=())
def _linear(x: Tensor, w: Tensor, layer: int) -> Tensor:
    module = _LAYERS[layer]
    module.require_step()
    if needed := module.products.backward_needs:
        raise RuntimeError(
            f"compile: true keeps x and w alone for the backward pass, and this recipe needs {needed};"
            " leave it out"
        )
    if module.products.plain:
        return linear(x.to(module.dtype), w.to(module.dtype)).to(x.dtype)
    return forward(module, module.products, x, w)[0]


@_linear.register_fake
def _(x: Tensor, w: Tensor, layer: int) -> Tensor:
    return x.new_empty(x.shape[0], w.shape[0])


@library.custom_op("ablate::linear_backward", mutates_args=())
def _linear_backward(dy: Tensor, x: Tensor, w: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    module = _LAYERS[layer]
    if module.products.plain:
        high = dy.to(module.dtype)
        dx, dw = linear(high, w.to(module.dtype).t()), linear(high.t(), x.to(module.dtype).t())
    else:
        dx, dw = backward(module, module.products, (x.to(torch.bfloat16), w, None, None), dy, (True, True))
    return dx.to(x.dtype), dw.to(w.dtype)


@_linear_backward.register_fake
def _(dy: Tensor, x: Tensor, w: Tensor, layer: int) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x), torch.empty_like(w)


def _save(ctx, inputs: tuple[Tensor, Tensor, int], output: Tensor) -> None:
    x, w, ctx.layer = inputs
    ctx.save_for_backward(x, w)


def _differentiate(ctx, dy: Tensor) -> tuple[Tensor, Tensor, None]:
    return *_linear_backward(dy.contiguous(), *ctx.saved_tensors, ctx.layer), None


_linear.register_autograd(_differentiate, setup_context=_save)


def compile_model(model: nn.Module, engine: Engine) -> None:
    """Compile a model in place.

    torch caches compiled code in TORCHINDUCTOR_CACHE_DIR, and later trials of the same shapes reuse it.

    Args:
        model: the model to compile, with fixed shapes and without graph breaks.
        engine: the engine that drives its layers.

    Raises:
        RuntimeError: the model is on a CPU, and there is no C++ compiler.
    """
    if next(model.parameters()).device.type == "cpu" and not any(map(shutil.which, ("g++", "clang++"))):
        raise RuntimeError(
            "compile: true needs a C++ compiler on the worker: install g++ or clang++, or leave it out"
        )
    for layer in engine.layers.values():
        # The smallest free number, the same in every trial: it is part of the graph, by which torch caches.
        number = next(n for n in count() if n not in _LAYERS)
        _LAYERS[number] = layer
        layer.whole_graph = partial(torch.ops.ablate.linear, layer=number)
    model.compile(dynamic=False, fullgraph=True)
