"""The emulated engine: nn.Linear layers replaced in place by `EmulatedLinear`, and what drives them. Names and state dicts stay.

`convert` finds the layers of a model's transformer blocks and replaces them; the `Engine` it returns puts a recipe's step in
force in each, and collects what the quantisers saw. How one layer computes its products is emulated_layer.py.
"""

import warnings
from collections.abc import Callable, Iterable, Sequence
from contextlib import contextmanager, nullcontext
from difflib import get_close_matches
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.nn.utils.parametrize import is_parametrized
from torch.utils.checkpoint import checkpoint

from ablate.engines.emulated_layer import DTYPES, HIGH, UNSET, EmulatedLinear, Probe
from ablate.engines.ranks import Divided, Sharded
from ablate.engines.weights import WeightRules
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import Operand
from ablate.recipes.layers import LISTS, Layer, Match, block_name, block_of, located, select
from ablate.recipes.recipe import Products, Recipe, Run, Trigger

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class Engine:
    """A model's linear layers under one recipe: follows its schedule, and collects what the quantisers saw."""

    def __init__(self, model: nn.Module, recipe: Recipe, clock: Clock) -> None:
        self.recipe, self.clock = recipe, clock
        self.names = _names(model, EmulatedLinear)
        """The names of each layer by its first one: a layer that is registered twice has two."""
        self.layers = {name: model.get_submodule(name) for name in self.names}
        self.tripped: set[Trigger] = set()
        self._fp4 = self._work = 0
        self.weights = WeightRules(recipe.weights, model, self.layers)
        every = {name for names in self.names.values() for name in names}
        self.placed = described(
            model, (name for name, _ in model.named_modules(remove_duplicate=False) if name in every)
        )
        """Every name of every layer, in the model's order, with its block and the classes around it."""
        self._refuse_idle_rules()
        self._deciders = recipe.layers.deciders(self.placed)
        self._fallback: tuple[frozenset[str], Callable[[Products], Products]] | None = None
        for name, layer in self.layers.items():
            self._in_force(recipe, name)  # raises here what would be raised at the first step
            if not recipe.plain:
                layer.products = UNSET

    def _refuse_idle_rules(self) -> None:
        """Raise ValueError for a rule that selects no layer, which would be a recipe without that rule."""
        for number, rule in enumerate(self.recipe.layers.rules):
            if self.placed and (reason := select(rule.match, self.placed).reason):
                raise ValueError(f"layers.rules.{number}.match: {reason}")

    def at(self, step: int, run: Run) -> Recipe:
        """Put the recipe of step `step` (from 0) of `run` in force, and return it."""
        recipe = self.recipe.at(step, run, self.tripped)
        for name, layer in self.layers.items():
            layer.products = self._in_force(recipe, name)
        for name, layer in self.layers.items():
            fp4, products = layer.products.fp4(layer.weight.requires_grad)
            size = layer.weight.numel() * len(self.names[name])
            self._fp4 += fp4 * size
            self._work += products * size
        return recipe

    def fall_back(self, layers: Sequence[str], safer: Callable[[Products], Products]) -> None:
        """From the next step on, in some layers, named by globs, let `safer` change whatever the schedule has in force."""
        self._fallback = (
            frozenset(
                layer.name for name in layers for layer in select(Match(name=name), self.placed).layers
            ),
            safer,
        )

    def _in_force(self, recipe: Recipe, name: str) -> Products:
        products, *others = (recipe.decided(self._deciders[one]) or HIGH for one in self.names[name])
        if any(other != products for other in others):
            raise ValueError(
                f"{' and '.join(self.names[name])} are one layer, and the recipe quantises them differently;"
                " give each a layer of its own, or change the recipe's layers"
            )
        return self._fallback[1](products) if self._fallback and name in self._fallback[0] else products

    def fp4_share(self) -> float:
        """Of the FLOPs that training took so far in its linear layers (the blocks', not the head): the share in FP4."""
        return self._fp4 / self._work if self._work else 0.0

    def state(self) -> dict[str, Any]:
        """What the coming steps depend on beside the parameters and the optimizer: plain tensors, numbers and words."""
        layers = {
            name: {
                "nonfinite": int(layer.nonfinite),
                "histories": {slot: dict(h.amax) for slot, h in layer.histories.items()},
            }
            for name, layer in self.layers.items()
        }
        return {
            "layers": layers,
            "tripped": sorted(map(repr, self.tripped)),
            "fp4": (self._fp4, self._work),
            "weights": self.weights.state(),
        }

    def restore(self, state: dict[str, Any], step: int) -> None:
        """Go on after `step` steps from what `state` told."""
        for name, its in state["layers"].items():
            layer = self.layers[name]
            layer.nonfinite = its["nonfinite"]
            for slot, amaxes in its["histories"].items():
                layer.histories[slot].amax = {
                    when: _on(layer.weight.device, amax) for when, amax in amaxes.items()
                }
        self.tripped = {t for t in self.recipe.triggers if repr(t) in state["tripped"]}
        self._fp4, self._work = state["fp4"]
        self.weights.restore(state["weights"], step)

    def observe(self, metrics: dict[str, float], step: int) -> None:
        """Trip the triggers whose metric, measured in this step, is below its limit."""
        due = (t for t in self.recipe.triggers if step % t.every == 0)
        self.tripped |= {t for t in due if metrics.get(t.metric, t.limit) < t.limit}

    @contextmanager
    def still_weights(self):
        """Inside this context no parameter changes, so each weight is quantised once, however many micro-batches use it."""
        for layer in self.layers.values():
            layer.casts = {}
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.casts = None

    @contextmanager
    def high_precision(self):
        """All layers without quantisation, inside this context."""
        before = {name: layer.products for name, layer in self.layers.items()}
        for layer in self.layers.values():
            layer.products = HIGH
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                layer.products = before[name]

    def nonfinite(self) -> int:
        """Operands so far, over all layers, that held a NaN or an infinity."""
        return int(sum(layer.nonfinite for layer in self.layers.values()))

    def weight_casts(self) -> dict[str, tuple[Tensor, Operand]]:
        """Every weight that fprop quantises, and its cast as it would be now, by layer."""
        quantised = {name: layer for name, layer in self.layers.items() if layer.products.fprop.w}
        return {
            name: (layer.whole_weight().clone(), layer.weight_cast()) for name, layer in quantised.items()
        }

    @contextmanager
    def divided(self, divided: Divided | None):
        """Inside this context other ranks have the rest of every layer's tokens."""
        for layer in self.layers.values():
            layer.divided = divided
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.divided = None

    def shard(self, mesh: "DeviceMesh") -> set[nn.Parameter]:
        """Let every rank of `mesh` keep as many rows of each layer's weight, where they come out even; returns those weights."""
        even = [layer for layer in self.layers.values() if layer.out_features % mesh.size() == 0]
        for layer in even:
            layer.sharded = Sharded(layer, mesh)
        return {layer.weight for layer in even}

    def histories(self, step: int) -> list[dict[int, Tensor | float]]:
        """The amaxes by step of every operand that remembers one of this step, in the layers' order."""
        kept = (history.amax for layer in self.layers.values() for history in layer.histories.values())
        return [amaxes for amaxes in kept if step in amaxes]

    def traffic(self) -> tuple[int, int]:
        """Bytes of sharded weights that products have asked for so far, and what they would have been in bf16."""
        sharded = [layer.sharded for layer in self.layers.values() if layer.sharded]
        return sum(one.gathered for one in sharded), sum(one.in_bf16 for one in sharded)

    def listen(self, probe: Probe | None) -> None:
        """Call `probe` for every operand quantised from now on; None stops it."""
        for layer in self.layers.values():
            layer.probe = probe

    @contextmanager
    def again(self):
        """Inside this context what was computed already is computed again: nothing is counted or told."""
        before = {name: (layer.probe, layer.nonfinite) for name, layer in self.layers.items()}
        self.listen(None)
        try:
            yield
        finally:
            for name, layer in self.layers.items():
                layer.probe, layer.nonfinite = before[name]


def _on(device: torch.device, amax: Tensor | float) -> Tensor | float:
    return amax.to(device) if isinstance(amax, Tensor) else amax


def described(model: nn.Module, names: Iterable[str]) -> tuple[Layer, ...]:
    """Return the layers of these names, in the model's order, as rules look at them. ValueError for one in no numbered block."""
    return located({name: _classes(model, name) for name in names})


def _classes(model: nn.Module, name: str) -> set[str]:
    """The class names of a layer's surrounding modules, and nn.Linear's, which it was."""
    parts = name.split(".")
    around = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)))
    return {type(module).__name__ for module in around} | {"Linear"}


def convert(model: nn.Module, recipe: Recipe, clock: Clock) -> Engine:
    """Replace every nn.Linear inside a transformer block, in place, and return the engine that drives them.

    Parameter names, values, state dicts and hooks stay as they are; linears outside the blocks (the output head) are left
    alone. A layer that is registered under several names is replaced under all of them. Until `Engine.at` puts a step in
    force, a call of a layer that the recipe may quantise raises RuntimeError. Raises ValueError as `quantisable` does, and
    for a model of which nothing would be replaced.
    """
    replaced(model, lambda linear, name: EmulatedLinear(linear, name, clock, DTYPES[recipe.dtype]))
    return Engine(model, recipe, clock)


def replaced(model: nn.Module, make: Callable[[nn.Linear, str], EmulatedLinear]) -> None:
    """Put what `make` returns for each quantisable layer and its first name in the layer's place, under all its names."""
    first = quantisable(model)
    if not first:
        raise ValueError(_why_nothing(model))
    if unknown := _unknown_lists(model):
        warnings.warn(f"not quantised: {_nearest(unknown)}", stacklevel=3)
    names = _names(model, nn.Linear)
    for name in first:
        layer = make(model.get_submodule(name), name)
        for one in names[name]:
            parent, _, child = one.rpartition(".")
            setattr(model.get_submodule(parent), child, layer)


def _names(model: nn.Module, kind: type[nn.Module]) -> dict[str, list[str]]:
    """All names of each module of a class, by the first one."""
    found: dict[nn.Module, list[str]] = {}
    for name, module in model.named_modules(remove_duplicate=False):
        if isinstance(module, kind):
            found.setdefault(module, []).append(name)
    return {names[0]: names for names in found.values()}


def quantisable(model: nn.Module) -> list[str]:
    """Return the layers that `convert` replaces: every nn.Linear in a numbered block, but for routers and other subclasses.

    A layer that has several names is listed by its first. Raises ValueError for a layer whose weight is computed before each
    call or whose `forward` was replaced, which conversion would bypass, and for one that is also used outside the blocks.
    """
    result = []
    for name, names in _names(model, nn.Linear).items():
        inside = [one for one in names if block_of(one) >= 0]
        module = model.get_submodule(name)
        if not inside or isinstance(module, EmulatedLinear):
            continue
        if why := _altered(module):
            raise ValueError(f"{inside[0]}: {why}")
        if type(module) is nn.Linear:
            if outside := sorted(set(names) - set(inside)):
                raise ValueError(
                    f"{inside[0]} and {outside[0]} are one nn.Linear, inside a block and outside; give each a layer of its own"
                )
            result.append(name)
    return result


def _altered(linear: nn.Linear) -> str | None:
    """Reason why a layer cannot be replaced by one that has its parameters; None if it can."""
    if is_parametrized(linear):
        kinds = ", ".join(
            sorted(
                {type(one).__name__.lstrip("_") for its in linear.parametrizations.values() for one in its}
            )
        )
        out = "torch.nn.utils.parametrize.remove_parametrizations"
        return f"its parameters are parametrized ({kinds}), which a quantised layer would bypass; call {out} first"
    if type(linear) is nn.Linear and "weight" not in linear._parameters:
        return "a hook (weight_norm, spectral_norm or pruning) computes its weight, which a quantised layer would bypass; remove it first"
    if type(linear) is nn.Linear and "forward" in vars(linear):
        return "its forward was replaced, which a quantised layer would bypass; convert the model first"
    return None


def _unknown_lists(model: nn.Module) -> list[str]:
    """The module lists of blocks that have linear layers, and names by which `block_of` does not find them."""
    return [
        name
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList)
        and block_of(f"{name}.0.") < 0
        and any(type(part) is nn.Linear for block in module for part in block.modules() if part is not block)
    ]


def _why_nothing(model: nn.Module) -> str:
    if any(isinstance(module, EmulatedLinear) for module in model.modules()):
        return "the model is converted already; convert it once"
    if unknown := _unknown_lists(model):
        return f"nothing of the model would be quantised: {_nearest(unknown)}"
    return (
        "nothing of the model would be quantised: it has no nn.Linear in a list of numbered blocks;"
        f" put its blocks in an nn.ModuleList that is named {', '.join(LISTS[:-1])} or {LISTS[-1]}"
    )


def _nearest(lists: Sequence[str]) -> str:
    word = lists[0].rpartition(".")[2]
    near = get_close_matches(word, LISTS, 3, 0.3) or LISTS
    return f"the blocks in {lists[0]!r}, since no such name is known for a list of blocks; rename it, the nearest: {', '.join(near)}"


def recompute(model: nn.Module, engine: Engine) -> None:
    """Let every block of `model` keep its input alone and compute itself again in the backward pass: the same bits, less memory."""
    for name in {block_name(name) for name in engine.layers}:
        block = model.get_submodule(name)
        block.forward = partial(_recomputed, block.forward, engine)


def _recomputed(forward: Callable[..., Any], engine: Engine, *args: Any, **kwargs: Any) -> Any:
    if not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    return checkpoint(
        forward, *args, use_reentrant=False, context_fn=lambda: (nullcontext(), engine.again()), **kwargs
    )
