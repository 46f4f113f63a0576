"""The emulated engine: replace a model's nn.Linear layers by `EmulatedLinear`, and apply a recipe to them.

The problem. A recipe says more than a number format: which layers it applies to, how they differ, and when
in a run that changes. A model of somebody else's knows nothing of it, and its names, state dict, hooks and
optimizer must keep working.

The idea. `convert` replaces every nn.Linear inside the model's numbered blocks in place, by a layer that
shares its parameters. The `Engine` that it returns puts the recipe's products for a given step in force in
each layer, and collects what the quantisers measured. The model itself is called as before:

    clock = Clock(seed=0)
    engine = convert(model, PRESETS["nvfp4"](), clock)
    for step in range(steps):
        clock.step = step                        # random bits are a function of seed, step, layer and slot
        engine.at(step, Run(steps))              # schedule and layer rules
        model(batch).backward()
        engine.weights.before(optimizer, step, Run(steps))
        optimizer.step()
        engine.weights.after(optimizer, step, Run(steps))

Refused, with a ValueError: a model without numbered blocks, a layer whose weight is computed before each
call (weight_norm, parametrize, pruning), a layer used inside and outside the blocks, a layer with two names
that the recipe treats differently, and a rule that selects no layer. The output head, routers of experts and
adapters are left alone. emulated_layer.py computes the products of one layer; linears.py says which other
classes of layers are replaced too.
"""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, TypedDict

import torch
from torch import Tensor, nn

from ablate.engines import experts, experts_check
from ablate.engines.emulated_layer import HIGH, UNSET, Context, EmulatedLinear, NotInForce, kept, work_of
from ablate.engines.expert_layers import EmulatedExpert
from ablate.engines.linears import Linears
from ablate.engines.nonfinite import NonfiniteCount, total
from ablate.engines.products import DTYPES, Probe
from ablate.engines.ranks import Divided, Sharded
from ablate.engines.selection import all_names, quantisable, replaced
from ablate.engines.weights import RulesState, WeightRules
from ablate.numerics.history import History
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import Operand
from ablate.recipes.experts import Experts
from ablate.recipes.layers import BlockOf, Layer, Match, block_name, located, select
from ablate.recipes.recipe import SLOTS, Decider, Products, Recipe, Run, Trigger

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


class LayerState(TypedDict):
    """State of one layer: its count of non-finite operands, and its amax histories (step to amax) by slot."""

    nonfinite: int
    histories: dict[str, dict[int, Tensor | float]]


class EngineState(TypedDict):
    """State of an engine in a checkpoint."""

    layers: dict[str, LayerState]
    tripped: list[str]
    fp4: tuple[int, int]
    weights: RulesState | None


class Muted(Probe):
    """Probe that records nothing, in force while a block that a probe measured is recomputed: experts save
    other tensors with a probe than without, and a recomputed block must save the same ones."""


class Engine:
    """A model's quantised layers under one recipe: follows its schedule and collects measurements.

    Made by `convert`, for a model whose layers are `EmulatedLinear` already. The layers draw by the clock,
    which the training loop advances. ValueError if a rule selects no layer, or one layer's names are
    quantised differently.
    """

    def __init__(self, model: nn.Module, recipe: Recipe, clock: Clock, block: BlockOf = block_name) -> None:
        self.recipe, self.clock, self.context = recipe, clock, Context()
        self.names = all_names(model, lambda module: isinstance(module, EmulatedLinear))
        """All names of each layer, keyed by the first: a layer that is registered twice has two."""
        self.layers = {name: model.get_submodule(name) for name in self.names}
        self.tripped: set[Trigger] = set()
        self._fp4 = self._work = 0
        self.weights = WeightRules(recipe.weights, model, self.layers)
        self.experts = experts.attached(model)
        """Forward passes of the modules of experts, by name."""
        if recipe.experts != Experts() and not self.experts:
            raise ValueError("the recipe's field experts has no effect: the model has no experts to quantise")
        every = {name for names in self.names.values() for name in names}
        self.placed = described(
            model, (name for name, _ in model.named_modules(remove_duplicate=False) if name in every), block
        )
        """Every name of every layer, in the model's order, with its block and the classes that contain it."""
        for number, rule in enumerate(recipe.layers.rules):  # the recipe would silently run without it
            if self.placed and (reason := select(rule.match, self.placed).reason):
                raise ValueError(f"layers.rules.{number}.match: {reason}")
        self._deciders = recipe.layers.deciders(self.placed)
        self._fallback: tuple[frozenset[str], Callable[[Products], Products]] | None = None
        self._assigned(recipe, self._deciders)  # raises now, instead of at the first step
        for layer in self.layers.values():
            layer.context = self.context
            if not recipe.plain:
                layer.products = UNSET

    def at(self, step: int, run: Run, *, counted: bool = True) -> Recipe:
        """Put the recipe of an optimizer step, from 0, in force, and return it with its phases applied. The
        schedule's fractions refer to `run`; `counted`: add the step's products to `fp4_share`."""
        recipe = self.recipe.at(step, run, self.tripped)
        fallen, safer = self._fallback or ((), None)
        for name, given in self._assigned(recipe, self._deciders).items():
            self.layers[name].products = safer(given) if safer and name in fallen else given
        shares: dict[tuple[int, bool], tuple[int, int]] = {}  # many layers have the same products
        for name, layer in self.layers.items() if counted else ():
            key = id(layer.products), layer.owner.requires_grad
            fp4, products = shares[key] = shares.get(key) or layer.products.fp4(key[1])
            size = layer.work * len(self.names[name])
            self._fp4 += fp4 * size
            self._work += products * size
        return recipe

    def end(self, remedy: str) -> None:
        """Leave the step in force: until `at`, a call of a layer raises an error that ends in `remedy`."""
        for layer in self.layers.values():
            layer.products = NotInForce(remedy=remedy)

    def fall_back(self, layers: Sequence[str], safer: Callable[[Products], Products]) -> None:
        """Use safer products in some layers, by globs of their names, from the next step on. `safer` returns
        the products to use, given those that the schedule has in force."""
        self._fallback = (
            frozenset(
                layer.name for name in layers for layer in select(Match(name=name), self.placed).layers
            ),
            safer,
        )

    def _assigned(self, recipe: Recipe, deciders: Mapping[str, Decider]) -> dict[str, Products]:
        """Return the products of each layer, one object for all that share them; ValueError if a recipe gives
        others to another name of a layer."""
        made = {decider: recipe.decided(decider) or HIGH for decider in set(deciders.values())}
        assigned = {}
        for name, names in self.names.items():
            assigned[name], *others = (made[deciders[alias]] for alias in names)
            if any(other != assigned[name] for other in others):
                raise ValueError(
                    f"{' and '.join(names)} are one layer, and the recipe quantises them differently;"
                    " give each a layer of its own, or change the recipe's layers"
                )
        return assigned

    def fp4_share(self) -> float:
        """Return the fraction, in [0, 1], of the training FLOPs so far that were in FP4. Counts the linear
        layers of the blocks alone, not the output head or attention."""
        return self._fp4 / self._work if self._work else 0.0

    def state(self) -> EngineState:
        """Return the state that later steps depend on, apart from parameters and optimizer, for a checkpoint:
        amax histories, tripped triggers, counts and the weight rules' state, as plain data and tensors."""
        layers: dict[str, LayerState] = {
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

    def restore(self, state: EngineState, step: int) -> None:
        """Load a state that `state` returned after `step` steps."""
        for name, saved in state["layers"].items():
            layer = self.layers[name]
            layer.nonfinite = NonfiniteCount(saved["nonfinite"])
            for slot, amaxes in saved["histories"].items():
                layer.histories[slot].amax = {
                    moment: amax.to(layer.weight.device) if isinstance(amax, Tensor) else amax
                    for moment, amax in amaxes.items()
                }
        self.tripped = {t for t in self.recipe.triggers if repr(t) in state["tripped"]}
        self._fp4, self._work = state["fp4"]
        self.weights.restore(state["weights"], step)

    def due(self, step: int) -> set[Trigger]:
        """Return the triggers of the schedule that wait for a measurement in a step."""
        return {t for t in self.recipe.triggers - self.tripped if step % t.every == 0}

    def observe(self, metrics: dict[str, float], step: int) -> None:
        """Trip the triggers that are due at `step` and whose metric is below its limit."""
        self.tripped |= {t for t in self.due(step) if metrics.get(t.metric, t.limit) < t.limit}

    @contextmanager
    def still_weights(self) -> Iterator[None]:
        """Inside this context, quantise each weight once and reuse the cast; no parameter may change there.
        Casts that draw random bits or depend on a history are still made for every call."""
        for layer in self.layers.values():
            layer.casts.begin()
        try:
            yield
        finally:
            for layer in self.layers.values():
                layer.casts.end()

    @contextmanager
    def high_precision(self) -> Iterator[None]:
        """Inside this context, compute all layers without quantisation."""
        with kept(self.layers.values(), "products"):
            for layer in self.layers.values():
                layer.products = HIGH
            yield

    @contextmanager
    def reading(self, recipe: Recipe) -> Iterator[None]:
        """Inside this context, emulate the forward pass of another recipe over the same weights: tensor cores
        may lack it.

        Nothing of the training is used or changed: scales that depend on earlier steps are those of a first
        step, and a weight is rounded without regard to its target. The recipe's schedule and weight rules
        have no part. ValueError if a layer's names are quantised differently.
        """
        products = self._assigned(recipe, recipe.layers.deciders(self.placed))
        replaced = ("products", "histories", "target", "emulated")
        with kept(self.layers.values(), *replaced), self.unrecorded():
            for name, layer in self.layers.items():
                layer.products, layer.target, layer.emulated = products[name], None, True
                layer.histories = {slot: History() for slot in SLOTS}
            yield

    def nonfinite(self) -> int:
        """Return the number of operands so far, over all layers, that held a NaN or an infinity."""
        return total(layer.nonfinite for layer in self.layers.values())

    def first_nonfinite(self) -> tuple[int, str, str] | None:
        """Return step, slot and layer of the first operand so far that held a NaN or an infinity; None: none.
        In a step, forward operands come first, in the model's order, then backward ones in the reverse."""
        self.nonfinite()  # reads the counts of all layers at once
        seen = []
        for number, (name, layer) in enumerate(self.layers.items()):
            if first := layer.nonfinite.first:
                step, slot = first
                back = slot.startswith(("dgrad", "wgrad"))
                seen.append(((step, back, -number if back else number), (step, slot, name)))
        return min(seen)[1] if seen else None

    def magnitudes(self) -> dict[tuple[str, str], dict[int, float]]:
        """Return the largest magnitude of recent operands by layer and slot, by step. Waits for the GPU."""
        recent = [(name, each) for name, layer in self.layers.items() for each in layer.nonfinite.recent]
        values = torch.stack([each.largest for _, each in recent]).tolist() if recent else []
        result: dict[tuple[str, str], dict[int, float]] = {}
        for (name, each), value in zip(recent, values, strict=True):
            steps = result.setdefault((name, each.slot), {})
            value = value if value == value else math.inf
            steps[each.step] = max(value, steps.get(each.step, 0.0))
        return result

    def weight_casts(self) -> Iterator[tuple[str, tuple[Tensor, Operand]]]:
        """Yield every weight that fprop quantises, by layer name: itself [out, in], and its present cast. A
        cast with what it keeps takes several times the memory of its weight, so they are made one by one."""
        for name, layer in self.layers.items():
            if layer.products.fprop.w:
                yield name, (layer.whole_weight(), layer.weight_cast())

    @contextmanager
    def divided(self, divided: Divided | None) -> Iterator[None]:
        """Inside this context, divide every layer's tokens among ranks; None: this rank has all of them."""
        with kept([self.context], "divided"):
            self.context.divided = divided
            yield

    def shard(self, mesh: "DeviceMesh") -> set[nn.Parameter]:
        """Shard the rows of each layer's weight over the ranks of `mesh`, and return the sharded weights. A
        layer whose number of rows is not a multiple of the number of ranks keeps its whole weight, and so
        does one whose parameter is transposed. ValueError for a model with experts."""
        if self.experts:
            raise ValueError("a model with experts cannot be sharded over ranks; leave sharding out")
        even = [
            layer
            for layer in self.layers.values()
            if layer.out_features % mesh.size() == 0 and layer.weight is layer.owner
        ]
        for layer in even:
            layer.sharded = Sharded(layer, mesh)
        return {layer.weight for layer in even}

    def histories(self, step: int) -> list[dict[int, Tensor | float]]:
        """Return the amax histories (step to amax) that have an entry of this step, in the layers' order."""
        kept = (history.amax for layer in self.layers.values() for history in layer.histories.values())
        return [amaxes for amaxes in kept if step in amaxes]

    def traffic(self) -> tuple[int, int]:
        """Return the bytes of sharded weights gathered so far, and the bytes that bf16 would have taken."""
        sharded = [layer.sharded for layer in self.layers.values() if layer.sharded]
        return sum(weight.gathered for weight in sharded), sum(weight.in_bf16 for weight in sharded)

    def listen(self, probe: Probe | None) -> None:
        """Give `probe` every operand quantised, and every product, from now on; None stops it."""
        self.context.probe = probe

    @contextmanager
    def unrecorded(self, *, unless_completed: bool = False) -> Iterator[None]:
        """Restore amax histories and counts at the end; `unless_completed`: only after an exception."""
        counts = self._count_apart()
        work = self._fp4, self._work
        histories = [
            (history, dict(history.amax))
            for layer in self.layers.values()
            for history in layer.histories.values()
        ]
        completed = False
        try:
            yield
            completed = True
        finally:
            keeps = completed and unless_completed
            for name, layer in self.layers.items():
                if keeps:
                    counts[name].include(layer.nonfinite)
                layer.nonfinite = counts[name]
            if not keeps:
                self._fp4, self._work = work
                for history, amax in histories:
                    history.amax = amax

    def _count_apart(self) -> dict[str, NonfiniteCount]:
        """Begin new counts of operands that are not finite; return the present ones by layer."""
        before = {name: layer.nonfinite for name, layer in self.layers.items()}
        for layer in self.layers.values():
            layer.nonfinite = NonfiniteCount()
        return before

    @contextmanager
    def again(self, moment: Clock | None = None) -> Iterator[None]:
        """Inside this context, recompute activations: operands are neither counted nor given to the probe.
        `moment`: copy of the clock before the first computation, to draw the same bits; None: the clock is
        right."""
        layers, clock = kept(self.layers.values(), "nonfinite"), kept([self.clock], "micro_batch", "calls")
        with layers, clock, kept([self.context], "probe"):
            if (
                moment
            ):  # a layer's backward pass, which has a clock of its own call, may ask for an activation
                self.clock.micro_batch, self.clock.calls = moment.micro_batch, moment.calls
            self._count_apart()
            self.listen(self.context.probe and Muted())
            yield


def described(model: nn.Module, names: Iterable[str], block: BlockOf = block_name) -> tuple[Layer, ...]:
    """Return name, block, surrounding classes and size of the layers of these names, which layer rules match.
    ValueError for a layer that `block` finds in no block."""
    return located(
        {name: _classes(model, name) for name in names},
        block,
        lambda name: work_of(model.get_submodule(name)),
    )


def _classes(model: nn.Module, name: str) -> set[str]:
    """Return the class names of the modules that contain a layer, and `Linear`, its own class before."""
    parts = name.split(".")
    around = (model.get_submodule(".".join(parts[:depth])) for depth in range(len(parts)))
    return {type(module).__name__ for module in around} | {"Linear"}


def convert(
    model: nn.Module,
    recipe: Recipe,
    clock: Clock,
    block: BlockOf = block_name,
    wanted: Callable[[str, nn.Module], bool] = lambda name, linear: True,
    linears: Linears = (),
) -> Engine:
    """Replace every nn.Linear inside a transformer block, and the matrices of packed experts there, in place.

    Parameter names, values, state dicts and hooks stay as they are. Linears outside the blocks (the output
    head) are left alone. A layer that is registered under several names is replaced under all of them. Call
    `Engine.at` before each step: until it puts one in force, a call of a layer that the recipe may quantise
    raises RuntimeError.

    Products that the recipe does not quantise are in `recipe.dtype`. `clock` has seed, step and micro-batch
    of all random draws; advance it as training advances. `block` is by default the numbered one in a module's
    name (`blocks.0`, `model.layers.0`, ...). `wanted` returns False for a layer, or a module of experts,
    given its name and itself, that is to be left alone. `linears` are classes of layers, and globs on names,
    that are replaced too (linears.py). ValueError if a layer cannot be replaced (see `quantisable`), nothing
    would be replaced, or the recipe does not fit the model's layers.
    """
    replace_layers(model, recipe, clock, EmulatedLinear, EmulatedExpert, block, wanted, linears)
    return Engine(model, recipe, clock, block)


def replace_layers(
    model: nn.Module,
    recipe: Recipe,
    clock: Clock,
    linear: Callable[..., EmulatedLinear],
    expert: Callable[..., EmulatedExpert],
    block: BlockOf = block_name,
    wanted: Callable[[str, nn.Module], bool] = lambda name, linear: True,
    linears: Linears = (),
) -> None:
    """Replace what `convert` does, by `linear` and `expert`, which take the arguments of the classes that
    `convert` makes."""
    names, how = quantisable(model, block, linears), {"clock": clock, "dtype": DTYPES[recipe.dtype]}
    first = [name for name in names if wanted(name, model.get_submodule(name))]
    stacks = {n: module for n, module in experts.packed(model).items() if block(n) and wanted(n, module)}
    for name, module in stacks.items():
        experts.attach(module, name, partial(expert, **how), recipe.experts)
        experts_check.refuse_other(module, name)
    experts_check.refuse_parts(stacks, wanted)
    if first or not stacks:
        replaced(model, first, partial(linear, **how), block, {*names} - {*first})


def restore(model: nn.Module) -> None:
    """Undo `replace_layers`, also where it ended early: give each layer of a model its own class again, with
    the same parameters and hooks, and modules of experts their own forward passes."""
    for names in all_names(model, lambda module: isinstance(module, EmulatedLinear)).values():
        layer = model.get_submodule(names[0])
        if isinstance(layer, EmulatedExpert):
            continue
        plain = layer.plain()
        for alias in names:
            parent, _, child = alias.rpartition(".")
            setattr(model.get_submodule(parent), child, plain)
    for name in experts.attached(model):
        experts.detach(model.get_submodule(name))
