"""Modules that are linear layers: nn.Linear, transformers' Conv1D, and classes that a proof shows to be.

The problem. A recipe quantises the three products of y = x W^T + b. A subclass of nn.Linear with code of its
own may compute that, as a layer that casts its weight to the dtype of its input does, or something else, as a
router does. Its name does not say which.

The idea. An nn.Linear is taken, and so is a subclass that only adds how it is made. Any other class is taken
if it is one of `KNOWN`, or if the user names it or its layers, and only after `refuse_other` has compared it
with the function that would replace it, forward and backward:

    class CastLinear(nn.Linear):
        def forward(self, x):
            return F.linear(x, self.weight.to(x.dtype))

    quantisable(model, linears=[CastLinear])          # all layers of the class
    quantisable(model, linears=["blocks.0.*"])        # layers by name, even those that `exempt` names

transformers' Conv1D computes x W + b, with a weight [in, out]: a linear layer whose parameter is transposed.

Refused: a layer whose output or gradients differ, or that has parameters or buffers beside weight and bias.
Not seen: a layer that becomes another function later, by an attribute that changes in training.
"""

from collections.abc import Callable, Collection
from fnmatch import fnmatchcase

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablate.errors import nearest

Linears = Collection[type[nn.Module] | str]
"""Classes of linear layers, and globs on the names of single ones, to take beside those taken anyway."""
KNOWN = ("transformers.pytorch_utils.Conv1D", "transformers.models.falcon.modeling_falcon.FalconLinear")
"""Linear layers of transformers with a forward pass of their own."""
_MAKING = {"__init__", "reset_parameters", "extra_repr", *vars(type("", (), {})), "__annotations__"}
"""Attributes of a subclass that still computes what nn.Linear does."""
_RESULTS = ("output", "gradient of the input", "gradient of the weight", "gradient of the bias")


def is_transposed(module: nn.Module) -> bool:
    """Return True for transformers' Conv1D, whose weight is [in, out], parametrized or not."""
    return any(_path(kind) == KNOWN[0] for kind in type(module).__mro__)


def is_linear(module: nn.Module) -> bool:
    """Return True for an nn.Linear, any subclass of it, and Conv1D."""
    return isinstance(module, nn.Linear) or is_transposed(module)


def features(linear: nn.Module) -> tuple[int, int]:
    """Return the numbers of input and output features of a linear layer."""
    if isinstance(linear, nn.Linear):
        return linear.in_features, linear.out_features
    inputs, outputs = linear.weight.shape
    return inputs, outputs


def needs_proof(kind: type[nn.Module]) -> bool:
    """Return True for a class that adds more to nn.Linear than how it is made."""
    if nn.Linear not in kind.__mro__:
        return True
    own = kind.__mro__[: kind.__mro__.index(nn.Linear)]
    return any(vars(base).keys() - _MAKING for base in own)


def is_taken(module: nn.Module, name: str, linears: Linears = ()) -> bool:
    """Return True for a linear layer that a recipe may apply to, or that `linears` selects."""
    kind = type(module)
    return not needs_proof(kind) or _path(kind) in KNOWN or any(_fits(each, module, name) for each in linears)


def is_named(name: str, linears: Linears) -> bool:
    """Return True for a layer that a glob of `linears` selects by its name."""
    return any(isinstance(each, str) and fnmatchcase(name, each) for each in linears)


def refuse_idle(linears: Linears, layers: Collection[tuple[str, nn.Module]]) -> None:
    """Raise ValueError for a class or a glob that selects none of a model's layers, given by name."""
    for each in linears:
        if isinstance(each, str):
            valid = [name for name, _ in layers]
        elif isinstance(each, type) and issubclass(each, nn.Module):
            valid = [type(module).__name__ for _, module in layers]
        else:
            raise ValueError(f"linears: {each!r} is neither a class of layers nor a glob on their names")
        if not any(_fits(each, module, name) for name, module in layers):
            word = each if isinstance(each, str) else each.__name__
            if any(word == type(module).__name__ for _, module in layers):
                other = "another class than the layers' of that name; give type(layer)"
                glob = f"a glob on names of layers; for the class, give {word}"
                raise ValueError(f"linears: {word!r} is {glob if isinstance(each, str) else other}")
            raise ValueError(
                f"linears: {word} selects no linear layer inside the blocks;"
                f" {nearest(word, dict.fromkeys(valid))}"
            )


def refuse_other(linear: nn.Module, name: str) -> None:
    """Raise ValueError unless a layer computes x W^T + b, with the gradients of that.

    A copy of the layer without its hooks is called on random input with random weights, in its own dtype, in
    training and in evaluation. The weights are random since a weight of zeros, as many projections begin
    with, hides what a layer does. The layer and the state of torch's generators stay as they are.
    """
    kind = type(linear).__name__
    every = {each for each, _ in (*linear.named_parameters(), *linear.named_buffers())}
    if others := sorted(every - {"weight", "bias"}):
        raise ValueError(
            f"{name}: {kind} has {others[0]} beside weight and bias, which a quantised layer would not use;"
            " leave it out of linears, or by filter"
        )
    weight = linear.weight
    if weight.is_meta:
        raise ValueError(
            f"{name}: {kind} must be shown to be a linear layer, and its weight has no values on the meta"
            " device; give the model its weights first"
        )
    inputs, outputs = features(linear)
    generator, tokens = torch.Generator().manual_seed(0), (2, 3)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(weight.device, weight.dtype)

    leaves = [drawn(*tokens, inputs), drawn(outputs, inputs) / inputs**0.5]
    leaves += [] if linear.bias is None else [drawn(outputs)]
    dy, transposed = drawn(*tokens, outputs), is_transposed(linear)
    bare = object.__new__(type(linear))  # all attributes but hooks, parameters and buffers
    nn.Module.__init__(bare)
    bare.__dict__.update({key: value for key, value in vars(linear).items() if key not in vars(bare)})

    def own(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
        bare._parameters = {"weight": w.t() if transposed else w, "bias": b}
        return bare(x)

    for bare.training in (True, False):
        try:
            found = _results(own, leaves, dy)
        except Exception as error:  # the layer's own code may raise any class
            raise ValueError(
                f"{name}: {kind} is not called as a linear layer is, with x [..., {inputs}] in"
                f" {weight.dtype}: {type(error).__name__}: {error}; leave it out of linears, or by filter"
            ) from None
        for result, mine, right in zip(_RESULTS, found, _results(F.linear, leaves, dy), strict=False):
            if reason := _difference(mine, right):
                raise ValueError(
                    f"{name}: {kind} does not compute x W^T + b: on random input"
                    f"{'' if bare.training else ' in evaluation'}, its {result} {reason};"
                    " leave it out of linears, or by filter"
                )


def _results(function: Callable[..., Tensor], leaves: list[Tensor], dy: Tensor) -> list[Tensor | None]:
    leaves = [leaf.clone().requires_grad_() for leaf in leaves]
    gpus = [dy.device] if dy.is_cuda else []
    with (
        torch.random.fork_rng(devices=gpus),
        torch.enable_grad(),
        torch.autocast(dy.device.type, enabled=False),
    ):
        y = function(*leaves)
        if y.shape != dy.shape or y.dtype != dy.dtype or not y.requires_grad:
            return [y, *(None for _ in leaves)]
        return [y, *torch.autograd.grad(y, leaves, dy, allow_unused=True)]


def _difference(mine: Tensor | None, right: Tensor | None) -> str:
    """Return how a result differs from the right one; "" if only by rounding. A result in low precision is
    rounded twice where the bias is added apart. In fp32 and above, the order of additions differs."""
    assert right is not None
    if mine is None or (mine.shape, mine.dtype) != (right.shape, right.dtype):
        other = "missing" if mine is None else f"{list(mine.shape)} in {mine.dtype}"
        return f"is {other}, not {list(right.shape)} in {right.dtype}"
    epsilon = torch.finfo(right.dtype).eps
    wide = right.double()
    error = ((mine.double() - wide).norm() / wide.norm()).item()
    return "" if error <= epsilon * (1 if epsilon > 1e-4 else 64) else f"differs by {error:.2g} of its norm"


def _fits(each: type[nn.Module] | str, module: nn.Module, name: str) -> bool:
    if isinstance(each, str):
        return fnmatchcase(name, each)
    return isinstance(each, type) and isinstance(module, each)


def _path(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"
