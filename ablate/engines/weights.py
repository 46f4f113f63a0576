"""Rules for master weights around an optimizer step: keep them in bf16, and damp their oscillation.

Near the end of a run many weights lie at a rounding threshold and flip between two codes at each step
(TetraJet, arXiv 2502.20853).
"""

from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Generic, TypedDict, TypeVar

import torch
from torch import Tensor, nn

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.recipes.recipe import OsciReset, QEma, QRamping, Run, Weights


class RuleState(TypedDict, total=False):
    """State of one rule: fp32 tensors by layer. Each rule has some of the fields."""

    travels: dict[str, dict[str, Tensor | str]]
    means: dict[str, Tensor]
    waits: dict[str, Tensor]
    sums: dict[str, Tensor]
    counts: dict[str, Tensor]


class RulesState(TypedDict):
    """State of all rules: the layers that they act on, and the state of each rule."""

    names: list[str]
    rules: list[RuleState]


class Travel:
    """Distances that each weight and its quantised value have moved: sums of |dw| and |dQ(w)| over steps."""

    cast = ""
    """Fprop, as JSON, that made `q`; empty in the state of an earlier version."""

    def __init__(self, layer: EmulatedLinear) -> None:
        self.w = layer.weight.detach().clone()
        self.follow(layer)
        self.w_way, self.q_way = torch.zeros_like(self.w), torch.zeros_like(self.q)

    def follow(self, layer: EmulatedLinear) -> None:
        """Quantise the weight anew if a phase has changed its cast: no weight has moved by that."""
        if (cast := layer.products.fprop.model_dump_json()) != self.cast:
            self.cast, self.q = cast, layer.quantised_weight()

    def add(self, layer: EmulatedLinear) -> None:
        """Add the step that the layer's weight has just made."""
        w, q = layer.weight.detach().clone(), layer.quantised_weight()
        self.w_way += (w - self.w).abs()
        self.q_way += (q - self.q).abs()
        self.w, self.q = w, q

    def ratio(self) -> Tensor:
        """Return |dQ(w)| / |dw| of each weight, fp32 [out, in]; 0 for a weight that did not move."""
        return torch.where(self.w_way == 0, 0.0, self.q_way / self.w_way)


S = TypeVar("S", OsciReset, QRamping)


class Measuring(Generic[S]):
    """Rule that measures the distances of weights over the first `window` steps of each period."""

    def __init__(self, spec: S, layers: Mapping[str, EmulatedLinear]) -> None:
        self.spec: S = spec
        self.layers = layers
        self.travels: dict[str, Travel] = {}

    def begin(self, optimizer: torch.optim.Optimizer, step: int) -> None:
        """Begin with the layers that the optimizer updates, before the first step of a period."""
        updated = _updated(optimizer, self.layers)
        if step % self.spec.period == 0:
            self.travels |= {name: Travel(layer) for name, layer in updated.items()}
        for name in updated.keys() & self.travels.keys():
            self.travels[name].follow(self.layers[name])

    def ended(self, optimizer: torch.optim.Optimizer, step: int) -> Iterator[tuple[str, Travel]]:
        """Add the optimizer's step to what is measured, and yield what a window ends with, by layer."""
        for name in [name for name in _updated(optimizer, self.layers) if name in self.travels]:
            self.travels[name].add(self.layers[name])
            if step % self.spec.period == self.spec.window - 1:
                yield name, self.travels.pop(name)

    def state(self) -> RuleState:
        return {"travels": {name: dict(vars(travel)) for name, travel in self.travels.items()}}

    def restore(self, state: RuleState, step: int) -> None:
        self.travels = {name: Travel.__new__(Travel) for name in state["travels"]}
        for name, travel in self.travels.items():
            vars(travel).update(state["travels"][name])


class Resetting(Measuring[OsciReset]):
    """OsciReset: set weights whose quantised value moved much farther than they did to that value."""

    def before(self, optimizer: torch.optim.Optimizer, step: int, run: Run) -> None:
        if step >= Fraction(repr(self.spec.start)) * run.steps:
            self.begin(optimizer, step)

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, step: int, run: Run) -> None:
        for name, travel in self.ended(optimizer, step):
            weight = self.layers[name].weight
            weight.copy_(torch.where(travel.ratio() >= self.spec.threshold, travel.q, weight))


def _updated(
    optimizer: torch.optim.Optimizer, layers: Mapping[str, EmulatedLinear]
) -> dict[str, EmulatedLinear]:
    """Return the layers whose weights this optimizer updates: a model may have several optimizers."""
    mine = {id(p) for group in optimizer.param_groups for p in group["params"]}
    return {name: layer for name, layer in layers.items() if id(layer.owner) in mine}


class Averaging:
    """Q-EMA: round a weight to the neighbour that its moving average is closer to."""

    def __init__(self, spec: QEma, layers: Mapping[str, EmulatedLinear]) -> None:
        self.spec, self.layers = spec, layers
        self.means = {name: layer.weight.detach().clone() for name, layer in layers.items()}

    def before(self, optimizer: torch.optim.Optimizer, step: int, run: Run) -> None:
        pass

    def after(self, optimizer: torch.optim.Optimizer, step: int, run: Run) -> None:
        for name, layer in _updated(optimizer, self.layers).items():
            self.means[name].lerp_(layer.weight.detach(), 1 - self.spec.decay)
            if step + 1 >= self.spec.start:
                layer.target = self.means[name]

    def state(self) -> RuleState:
        return {"means": self.means}

    def restore(self, state: RuleState, step: int) -> None:
        self.means = state["means"]
        for name, layer in self.layers.items():
            layer.target = self.means[name] if step >= self.spec.start else None


class Ramping(Measuring[QRamping]):
    """Q-Ramping: update an oscillating weight every n steps only, n times as far, by its mean gradient.

    n grows with the weight's oscillation ratio. The paper measures that on extra steps, which it then undoes;
    here the run's own steps are measured.
    """

    def __init__(self, spec: QRamping, layers: Mapping[str, EmulatedLinear]) -> None:
        super().__init__(spec, layers)
        self.waits = {
            name: torch.ones_like(layer.weight, requires_grad=False) for name, layer in layers.items()
        }
        self.sums = {name: torch.zeros_like(wait) for name, wait in self.waits.items()}
        self.counts = {name: torch.zeros_like(wait) for name, wait in self.waits.items()}
        self.kept: dict[str, list[Tensor]] = {}

    @torch.no_grad()
    def before(self, optimizer: torch.optim.Optimizer, step: int, run: Run) -> None:
        self.begin(optimizer, step)
        self.kept = {}
        for name, layer in _updated(optimizer, self.layers).items():
            if layer.owner.grad is None:  # the optimizer leaves such a weight as it is
                continue
            gradient = layer.part(layer.owner.grad)
            self.sums[name] += gradient
            self.counts[name] += 1  # not the wait, which `after` may have changed since the last update
            gradient.copy_(self.sums[name] / self.counts[name])
            state = optimizer.state.get(layer.owner, {})
            moments = [
                layer.part(state[key]).clone() if state else torch.zeros_like(self.sums[name])
                for key in ("exp_avg", "exp_avg_sq")
            ]
            self.kept[name] = [layer.weight.detach().clone(), *moments]

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, step: int, run: Run) -> None:
        adamw = isinstance(optimizer, torch.optim.AdamW)
        decays = {
            # AdamW subtracts its decay from the weights; Adam's is a part of the gradient, which waits.
            id(p): 1 - group["lr"] * group["weight_decay"]
            for group in optimizer.param_groups
            if group.get("decoupled_weight_decay", adamw)
            for p in group["params"]
        }
        for name, (w, *moments) in self.kept.items():
            layer, count = self.layers[name], self.counts[name]
            due = (step + 1) % self.waits[name] == 0
            decayed = w * decays.get(id(layer.owner), 1.0)
            layer.weight.copy_(torch.where(due, decayed + count * (layer.weight - decayed), decayed))
            state = optimizer.state[layer.owner]
            for key, old in zip(("exp_avg", "exp_avg_sq"), moments, strict=True):
                moment = layer.part(state[key])
                moment.copy_(torch.where(due, moment, old))
            for collected in (self.sums[name], count):
                collected.masked_fill_(due, 0)
        for name, travel in self.ended(optimizer, step):
            slower = torch.floor(travel.ratio() / self.spec.threshold) * self.spec.slowdown + 1
            self.waits[name] = slower.clamp(max=self.spec.slowest)

    def state(self) -> RuleState:
        return {**super().state(), "waits": self.waits, "sums": self.sums, "counts": self.counts}

    def restore(self, state: RuleState, step: int) -> None:
        super().restore(state, step)
        self.waits, self.sums, self.counts = state["waits"], state["sums"], state["counts"]


Nested = TypeVar("Nested")


def _moved(state: Nested, device: torch.device) -> Nested:
    """Return nested dictionaries with copies of their tensors on a device; rules change theirs in place."""
    if isinstance(state, Tensor):
        return state.to(device, copy=True)
    if not isinstance(state, dict):
        return state
    return type(state)((key, _moved(value, device)) for key, value in state.items())


class WeightRules:
    """All weight rules of a recipe; call `before` and `after` around every optimizer step. `master: bf16`
    rounds all trainable parameters of the model after it; `layers` are the quantised ones by name."""

    def __init__(self, spec: Weights, model: nn.Module, layers: Mapping[str, EmulatedLinear]) -> None:
        self.spec, self.model, self.layers = spec, model, layers
        self.rules: list[Resetting | Averaging | Ramping] | None = None
        self.names: list[str] = []

    def before(self, optimizer: torch.optim.Optimizer, step: int, run: Run) -> None:
        """Apply the rules that precede an optimizer step; the gradients must be complete."""
        if self.rules is None:  # begin with the first step that quantises: phases in bf16 may precede it
            quantised = (name for name, layer in self.layers.items() if layer.products.fprop.w is not None)
            if names := [name for name in quantised if self.layers[name].owner.requires_grad]:
                self._begin(names)
        for rule in self.rules or ():
            rule.before(optimizer, step, run)

    def _begin(self, quantised: list[str]) -> None:
        layers = {name: self.layers[name] for name in quantised}
        self.names, self.rules = quantised, []
        if self.spec.osci_reset:
            self.rules.append(Resetting(self.spec.osci_reset, layers))
        if self.spec.q_ema:
            self.rules.append(Averaging(self.spec.q_ema, layers))
        if self.spec.q_ramping:
            self.rules.append(Ramping(self.spec.q_ramping, layers))

    def state(self) -> RulesState | None:
        """Return the layers that rules act on and the state of each rule; None before they begin."""
        return (
            None
            if self.rules is None
            else {"names": self.names, "rules": [rule.state() for rule in self.rules]}
        )

    def restore(self, state: RulesState | None, step: int) -> None:
        """Load a state that `state` returned after `step` steps."""
        if state is None:
            self.rules = None
            for layer in self.layers.values():
                layer.target = None
            return
        self._begin(state["names"])
        device = next(self.model.parameters()).device
        for rule, saved in zip(self.rules or (), state["rules"], strict=True):
            rule.restore(_moved(saved, device), step)

    @torch.no_grad()
    def after(self, optimizer: torch.optim.Optimizer, step: int, run: Run) -> None:
        """Apply the rules that follow an optimizer step."""
        for rule in self.rules or ():
            rule.after(optimizer, step, run)
        if self.spec.master == "bf16":
            updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
            for parameter in self.model.parameters():  # listed now: adapters are added after the conversion
                if parameter.requires_grad and id(parameter) in updated:
                    parameter.copy_(parameter.to(torch.bfloat16))
