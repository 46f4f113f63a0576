"""Experts whose weights one tensor holds, as quantised layers: `attach` and `ExpertsForward`.

The problem. A mixture of experts sends each token to a few of many small MLPs. Models hold the matrices of
all experts of a layer in one parameter [experts, out, in], and multiply them in one grouped product, so there
is no nn.Linear that a recipe could replace. Yet each expert has scales, blocks and random bits of its own.

The idea. A module of experts says how its parameters are laid out (`is_packed`, the attributes that
transformers' `use_experts_implementation` sets). Each matrix of each expert gets an `EmulatedExpert`: a layer
without a parameter, whose weight is a view of the packed one. It is a child of the module, so it has a name
that rules, telemetry and state find, as `model.layers.0.mlp.experts.3.down`. The module's `forward` is
replaced by an `ExpertsForward`, which sorts tokens by expert and calls one autograd function for each grouped
product; that calls the same `forward` and `backward` of products.py for each expert as a layer would.

    for experts in packed(model):
        attach(experts, name, make, Experts())             # parameters and state dict stay as they are
    detach(experts)                                        # the module's own forward again

Without quantisation the result equals transformers' own, bit for bit, whether it adds up experts with one sum
(`grouped_mm`) or one after the other (`eager`).

Llama 4's experts, each of which receives all tokens, are known by their class. Refused: expert parallelism,
and a module whose forward was replaced already. An expert without tokens is not multiplied; its gradient is
zero. Ranks that divide the tokens of a quantised layer gather them first, and each computes all experts, so
that the scales are those of all tokens.
"""

from collections.abc import Callable, Sequence
from functools import partial
from typing import ClassVar, Protocol

import torch
from torch import Tensor, nn

from ablate.engines.expert_layers import DENSE, EmulatedExpert, Group, is_packed, loads, parameters_of
from ablate.engines.ranks import Divided
from ablate.numerics.philox import Clock
from ablate.recipes.experts import Experts
from ablate.recipes.layers import block_name

_WIDE_SUMS = ("Inkling2Experts", "NemotronHExperts")
"""Modules of transformers whose `eager` adds up experts in the dtype of the weighted tokens."""

MakeExpert = Callable[[nn.Module, str, int, str, str], EmulatedExpert]
"""Makes a layer of an expert, given the first five arguments of `EmulatedExpert`."""


class Routing(Protocol):
    """Receives, and may change, where tokens go."""

    def route(self, name: str, index: Tensor, weights: Tensor) -> tuple[Tensor, Tensor]:
        """Return index and weights to use in a module of experts, given by name, for its own: the expert of
        each token, int64 [tokens, k], and the weight of each, [tokens, k]."""
        ...


class Expert(nn.Module):
    """Container of the layers of one expert, without parameters."""


class ExpertsForward:
    """The forward pass of a module of experts, by a recipe: `forward` of the instance. `groups` are the
    grouped products before the activation, and the one behind it."""

    _untraced: ClassVar[Callable[..., Tensor]]

    def __init__(
        self, module: nn.Module, name: str, groups: tuple[Sequence[Group], Group], experts: Experts
    ) -> None:
        self.module, self.name, self.experts = module, name, experts
        self.up, self.down = groups
        self.implementation: str | None = getattr(
            getattr(module, "config", None), "_experts_implementation", None
        )
        """Implementation that transformers would use; None: the module is not one of its own."""
        self.routing: Routing | None = None
        # One graph break instead of many, since the numbers of tokens are data. It is set here because a
        # decorator imports the compiler with this module, and on the class because a copy of an instance
        # would keep a function bound to the original.
        ExpertsForward._untraced = staticmethod(torch.compiler.disable(ExpertsForward._computed))

    @property
    def layers(self) -> list[EmulatedExpert]:
        """All layers of all experts."""
        return [layer for group in (*self.up, self.down) for layer in group.layers]

    @property
    def parameters(self) -> tuple[str, str]:
        """Names of the module's parameters that hold the layers' weights."""
        return parameters_of(self.module)

    @property
    def quantised(self) -> bool:
        """True if a product in force is quantised."""
        in_force = {id(layer.products): layer.products for layer in self.layers}  # few, of many layers
        return not all(products.plain for products in in_force.values())

    def __call__(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sum of each token's experts, like `hidden_states` [tokens, width].

        `top_k_index` has the experts of each token, int64 [tokens, k], and `top_k_weights` their weights.
        ValueError if the experts are divided among ranks, or the router names one that does not exist.
        """
        return self._untraced(self, hidden_states, top_k_index, top_k_weights)

    def _computed(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        module = self.module
        if getattr(module, "_is_expert_parallel", False):
            raise ValueError(f"{self.name}: expert parallelism is not supported; use data parallelism")
        if self.routing is not None:
            top_k_index, top_k_weights = self.routing.route(self.name, top_k_index, top_k_weights)
        with torch.autocast(hidden_states.device.type, enabled=False):
            divided = self._divided()
            if divided is None:
                return self._mixed(hidden_states, top_k_index, top_k_weights)
            tensors = (hidden_states, top_k_index, top_k_weights)
            if module.has_post_expert_norm:
                raise ValueError(f"{self.name}: a norm behind each expert is not supported on several ranks")
            return divided.own(self._mixed(*map(divided.gathered, tensors)))

    def _divided(self) -> Divided | None:
        """Return the division of the tokens among ranks if a quantised product needs all of them."""
        return self.layers[0].context.divided if self.quantised else None

    def _mixed(self, hidden_states: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        module, (tokens, k) = self.module, index.shape
        pairs = torch.arange(tokens * k, device=index.device)
        sources, targets, factors = pairs // k, index.reshape(-1), weights.reshape(-1)
        counts = self._counts(targets)
        if self.quantised and self.experts.padding != "zeros":
            sources, targets, factors = self._padded(index, sources, factors, counts)
            counts = self._counts(targets)
        targets, order = self._sorted(sources, targets, k)
        rows = sources[order]
        x = self._by_expert(hidden_states.__getitem__, rows, counts)
        y = self._biased([group(x, counts) for group in self.up], self.parameters[0], targets, counts)
        y = module._apply_gate(y) if module.has_gate else module.act_fn(y)
        y = self._biased([self.down(y, counts)], "down_proj", targets, counts)
        if module.has_post_expert_norm:
            y = self._by_expert(module.post_expert_norm, y, counts)
        y = y * factors[order].unsqueeze(-1)
        if self.implementation == "eager":
            wide = type(module).__name__ in _WIDE_SUMS
            total = torch.zeros_like(hidden_states, dtype=y.dtype if wide else None)
            return total.index_add_(0, rows, y.to(total.dtype)).to(hidden_states.dtype)
        places = torch.empty_like(order)
        places[order] = torch.arange(len(order), device=order.device)
        return y[places[: tokens * k]].view(tokens, k, y.shape[-1]).sum(1).to(hidden_states.dtype)

    def _counts(self, targets: Tensor) -> list[int]:
        """Return the number of rows of each expert; waits for a GPU, once. ValueError if the router names an
        expert that does not exist."""
        counts: list[int] = loads(targets, self.module.num_experts).tolist()
        if sum(counts) != len(targets):
            most = self.module.num_experts - 1
            raise ValueError(f"{self.name}: the router's indices must lie from 0 to {most}")
        return counts

    def _sorted(self, sources: Tensor, targets: Tensor, k: int) -> tuple[Tensor, Tensor]:
        """Return the experts of all pairs in ascending order, and the pairs in that order. Quantised tokens
        of an expert keep their order, which decides what shares a block. Unquantised ones are added up in the
        order that transformers adds them in."""
        if self.quantised or self.implementation is None:
            order = torch.argsort(targets * len(sources) + sources, stable=True)
            return targets[order], order
        if self.implementation != "eager":
            return torch.sort(targets)
        by_choice = torch.arange(len(targets), device=targets.device).view(-1, k).t().reshape(-1)
        targets, order = torch.sort(targets[by_choice], stable=True)
        return targets, by_choice[order]

    def _by_expert(self, function: Callable[[Tensor], Tensor], x: Tensor, counts: Sequence[int]) -> Tensor:
        """Return `function` of rows sorted by expert; as `eager` calls it, for one expert after the other:
        the order decides how gradients are added up in bf16."""
        if self.implementation != "eager" or not len(x):
            return function(x)
        return torch.cat([function(part) for part in x.split(list(counts)) if len(part)])

    def _biased(
        self, parts: Sequence[Tensor], parameter: str, experts: Tensor, counts: Sequence[int]
    ) -> Tensor:
        """Return gate and up as one matrix, as the module has them, with the bias of each row's expert."""
        module = self.module
        if len(parts) == 1:
            y = parts[0]
        elif module.is_concatenated:
            y = torch.cat(list(parts), -1)
        else:
            places = torch.arange(2 * parts[0].shape[-1], device=experts.device)
            y = torch.cat(list(parts), -1).index_select(-1, places.view(2, -1).t().reshape(-1))
        if not module.has_bias:
            return y
        bias, divided = getattr(module, f"{parameter}_bias"), self._divided()
        bias = bias if divided is None else divided.first(bias)
        if self.implementation not in ("eager", None):  # in bf16 on a CPU, its gradient is added up in bf16
            return (y + bias[experts]).to(y.dtype)
        each = [row.expand(count, -1) for row, count in zip(bias, counts, strict=True)]
        return (y + torch.cat(each)).to(y.dtype)

    def _padded(
        self, index: Tensor, sources: Tensor, weights: Tensor, counts: Sequence[int]
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return token, expert and weight of all pairs, those that fill experts with weight 0 at the end."""
        multiple, count = int(self.experts.padding.partition(":")[2]), self.module.num_experts
        routed = torch.zeros(len(index), count, dtype=torch.bool, device=index.device)
        routed.scatter_(1, index, True)
        lacking = torch.tensor([-rows % multiple for rows in counts], device=index.device)
        free = ~routed
        token, expert = (free & (free.cumsum(0) <= lacking)).nonzero(as_tuple=True)
        weights = torch.cat((weights, weights.new_zeros(len(expert))))
        return torch.cat((sources, token)), torch.cat((index.reshape(-1), expert)), weights


class DenseForward(ExpertsForward):
    """The forward pass of Llama 4's experts: each receives all tokens, those of other experts as zeros. A
    block along tokens is of all of them, zeros included, as the module multiplies them."""

    def __call__(self, hidden_states: Tensor) -> Tensor:  # type: ignore[override]
        """Return the outputs of all experts for tokens sorted by expert, [experts * tokens, width];
        ValueError if a quantised product needs the tokens of other ranks."""
        if self._divided() is not None:
            raise ValueError(f"{self.name}: experts that each receive all tokens need to be on one rank")
        module, experts = self.module, self.module.num_experts
        counts = experts * [len(hidden_states) // experts]
        with torch.autocast(hidden_states.device.type, enabled=False):
            gate, up = torch.cat([group(hidden_states, counts) for group in self.up], -1).chunk(2, -1)
            return self.down(up * module.act_fn(gate), counts)


def packed(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules of experts with packed weights, by name."""
    return {name: module for name, module in model.named_modules() if is_packed(module)}


def outlined(model: nn.Module) -> list[str]:
    """Give packed experts in numbered blocks their layers, to describe the model; return their names."""
    make = partial(EmulatedExpert, clock=Clock(seed=0), dtype=torch.float32)
    for name, module in packed(model).items():
        if block_name(name):
            attach(module, name, make, Experts())
    return [name for name, module in model.named_modules() if isinstance(module, EmulatedExpert)]


def is_attached(module: nn.Module) -> bool:
    """Return True for a module of experts that `attach` has changed."""
    return isinstance(vars(module).get("forward"), ExpertsForward)


def attached(model: nn.Module) -> dict[str, ExpertsForward]:
    """Return the forward passes that `attach` has given to modules of a model, by name."""
    return {name: module.forward for name, module in model.named_modules() if is_attached(module)}


def attach(module: nn.Module, name: str, make: MakeExpert, experts: Experts) -> None:
    """Give a module of experts (`is_packed`) a layer for each expert's matrices, and a forward to call them.

    Its parameters, and the state dict, stay as they are. ValueError if its forward was replaced, its experts
    are divided among ranks, or each of them receives all tokens and `experts` has padding or routing.
    """
    if "forward" in vars(module):
        raise ValueError(
            f"{name}: its forward was replaced, which a quantised layer would bypass; convert first"
        )
    if getattr(module, "_is_expert_parallel", False):
        raise ValueError(f"{name}: expert parallelism is not supported; use data parallelism")
    flags = DENSE.get(type(module).__name__, {})
    if flags and (experts.padding, experts.routing) != ("zeros", "free"):
        raise ValueError(f"{name}: each of its experts receives all tokens; leave padding and routing out")
    for flag, value in flags.items():
        setattr(module, flag, value)
    up, down = parameters_of(module)
    halves = ("gate", "up") if module.has_gate and experts.gate_up == "split" else ("all",)
    children = [Expert() for _ in range(module.num_experts)]

    def group(parameter: str, part: str) -> Group:
        child = part if part != "all" else parameter.removesuffix("_proj")
        layers = []
        for number, holder in enumerate(children):
            path = f"{name}.{number}.{child}"
            layer = make(module, parameter, number, part, path)
            if experts.rounding_state == "shared":
                layer.share_state(f"{name}.{child}")
            holder.add_module(child, layer)
            layers.append(layer)
        return layers[0].group(layers)

    groups = tuple(group(up, part) for part in halves), group(down, "all")
    for number, holder in enumerate(children):
        module.add_module(str(number), holder)
    module.forward = (DenseForward if flags else ExpertsForward)(module, name, groups, experts)


def detach(module: nn.Module) -> None:
    """Undo `attach`: remove the layers, and give the module its own forward pass again."""
    del module.forward
    for number in range(module.num_experts):
        delattr(module, str(number))
    for flag in DENSE.get(type(module).__name__, {}):
        delattr(module, flag)
