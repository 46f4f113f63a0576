"""First value of a step that was not finite: `Finder` names it by computing the step again, with hooks.

The problem. A run that diverges says "loss is NaN at step 812". The loss is where it ended: the first NaN or
infinity came from one tensor, in one layer, some steps or microseconds before. To check every tensor of every
step would show it, and cost more than the training.

The idea. Batches, random bits and weights of a step are known until its update is applied, and the guard
judges the loss and the gradient before that. So a step that is not finite is computed once more, bit for bit,
and every tensor is checked in the order in which it is made. A healthy run computes nothing for this.

    finder = Finder(model, engine)
    finder.state(step, optimizer)          # weights and moments that the last update left
    with finder:
        loss(batch).backward()             # the same step
    print(finder.origin(step))
    # input of blocks.1.mlp.up (operation div in blocks.1): value inf at [3, 17], 1 of 4,096 not finite

The order of the search is that of execution: parameters, moments and buffers as the last update left them;
the batch; inputs and outputs of modules, operands and products of quantised layers; the loss; the same in the
backward pass; gradients of parameters; and their norm. Between two modules, the operation of torch is named
whose inputs were finite and whose result was not. An infinity below zero does not count there, since masks of
attention have them.

What grew first. Quantisers record the largest magnitude of each operand. Of all operands that grew by a
factor of `GROWTH` within the last steps, those come first that grew first (`grown`).

Not covered: an operation that no module surrounds, with several ranks; tensors inside a compiled model, which
is run uncompiled here; and a step that is not finite by chance, since then the second computation is.
"""

import math
import sys
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeGuard

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from ablate.engines.emulated import Engine
from ablate.engines.products import Probe
from ablate.files import finite
from ablate.numerics.quantize import Operand
from ablate.training.metric_names import PRODUCTS, parse

GROWTH = 8.0
"""Factor by which the largest magnitude of an operand has grown if it counts as growing."""
_MOST_GROWN = 3
_FALL = 3.0
"""Decibels of SQNR that an operand has lost if it is named."""
_AROUND = 16
"""Elements along the last dimension that are shown: an aligned block of NVFP4."""
_NEAR = 2
"""Elements on either side that a sentence shows."""
_UNSET = ("empty", "new_empty", "resize")
"""Beginnings of the names of operations whose result is not written yet."""

Kind = Literal[
    "parameter", "moment", "buffer", "data", "operand", "product", "input", "output", "loss", "gradient",
    "norm", "unknown",
]  # fmt: skip


@dataclass(frozen=True)
class Growth:
    """Operand whose largest magnitude grew before a value was not finite."""

    name: str
    """Layer."""
    slot: str
    since: int
    """Step, counted from 1, from which on it was `GROWTH` times as large as ever before."""
    before: float
    """Largest magnitude before that step."""
    then: float
    """Magnitude at that step."""

    def __str__(self) -> str:
        return f"{self.slot} of {self.name} at step {self.since} ({self.before:.3g} to {self.then:.3g})"


@dataclass(frozen=True)
class Origin:
    """First value of a run that was not finite."""

    step: int
    """Step, counted from 1 as in records."""
    kind: Kind
    name: str = ""
    """Parameter, module, or tensor of the batch."""
    part: str = ""
    """Slot of an operand, product, or name of a moment."""
    operation: str = ""
    """Operation of torch that made it, if known."""
    detail: str = ""
    vanished: str = ""
    """Operation whose result was not finite earlier in the step, without an effect on what followed it."""
    micro_batch: int = 0
    index: tuple[int, ...] = ()
    value: float = math.nan
    around: tuple[float, ...] = ()
    """Values of the block that contains it, before quantisation if that made it so."""
    count: int = 0
    """Elements of the tensor that are not finite."""
    elements: int = 0
    grew: tuple[Growth, ...] = ()
    """Operands that grew first, earliest first."""
    fell: str = ""
    """Quantisation error or product that the last measurement found worse than the one before it."""

    @property
    def place(self) -> str:
        """Place of the value, as a sentence without an end."""
        of = {
            "parameter": f"parameter {self.name}",
            "moment": f"{self.part} of the optimizer for {self.name}",
            "buffer": f"buffer {self.name}",
            "data": f"tensor {self.name} of the batch",
            "operand": f"operand {self.part} of {self.name}",
            "product": f"product {self.part} of {self.name}",
            "input": f"input of {self.name}",
            "output": f"output of {self.name}",
            "loss": "loss",
            "gradient": f"gradient of {self.name}",
            "norm": f"norm of the gradient, whose largest part is that of {self.name}",
            "unknown": "no place: all values were finite when the step was computed again",
        }[self.kind]
        notes = [f"operation {self.operation}"] if self.operation else []
        notes += [self.detail] if self.detail else []
        notes += [f"after operation {self.vanished}, whose infinity vanished"] if self.vanished else []
        text = of + (f" ({', '.join(notes)})" if notes else "")
        if not self.elements:
            return text
        text += f": value {self.value:.4g}" + (f" at {list(self.index)}" if self.index else "")
        if self.elements > 1:
            text += f", {self.count:,} of {self.elements:,} not finite"
        column = self.index[-1] % _AROUND if self.index else 0
        near = self.around[max(0, column - _NEAR) : column + _NEAR + 1]
        return text + (f"; around it {' '.join(f'{value:.3g}' for value in near)}" if near else "")

    def __str__(self) -> str:
        text = self.place
        if self.grew:
            text += f". First to grow: {'; '.join(map(str, self.grew))}"
        return text + (f". {self.fell}" if self.fell else "")

    def document(self) -> dict[str, Any]:
        """Return the fields, and the sentence as `text`, for JSON: numbers that are not finite are text."""
        document = vars(self) | {"grew": [vars(each) for each in self.grew], "text": str(self)}
        plain: dict[str, Any] = finite(document, repr)
        return plain


@dataclass
class Finder(Probe):
    """Checker of the tensors of one step, in the order in which they are made; a context for that step, which
    is computed again: the model's modules have hooks in it, and this is the engine's probe. `operations`
    names operations of torch between modules."""

    model: nn.Module
    engine: Engine
    operations: bool = True
    found: Origin | None = None
    checks: int = 0
    """Tensors that were checked until then."""
    order: list[tuple[str, str]] = field(default_factory=list)
    """Layer and slot of the quantised operands, in the order of execution."""
    operation: str = ""
    """Operation that made a value not finite since the last tensor that was."""
    vanished: str = ""
    """The first such operation whose result left what came after it finite, and its module."""
    _path: list[str] = field(default_factory=list)

    def __enter__(self) -> "Finder":
        self._stack = ExitStack()
        self._stack.enter_context(self.engine.again())
        self.engine.listen(self)
        for name, module in self.model.named_modules():
            self._stack.callback(
                module.register_forward_pre_hook(partial(self._enter, name), with_kwargs=True).remove
            )
            self._stack.callback(module.register_forward_hook(partial(self._leave, name)).remove)
        for name, parameter in self.model.named_parameters():
            if parameter.requires_grad:
                hook = partial(self._accumulated, name)
                self._stack.callback(parameter.register_post_accumulate_grad_hook(hook).remove)
        if "torch._dynamo" in sys.modules:  # nothing is compiled without it, and its import takes seconds
            self._stack.enter_context(torch.compiler.set_stance("force_eager"))
        if self.operations:
            self._stack.enter_context(_Operations(self))
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.close()

    # --- what is checked ------------------------------------------------------------------------------

    def state(self, step: int, optimizer: torch.optim.Optimizer | None) -> None:
        """Check what the last update, after `step` steps, left: parameters, moments of the optimizer, if it
        is known, and buffers."""
        cause = f"by an update, of step {step} at the latest" if step else "before the first update"
        parameters = list(self.model.parameters())
        others = sum(not _finite(parameter) for parameter in parameters) - 1
        cause += f", and {others} of {len(parameters)} parameters more" if others > 0 else ""
        for name, parameter in self.model.named_parameters():
            moments = optimizer.state.get(parameter, {}) if optimizer else {}
            bad = [key for key, value in moments.items() if isinstance(value, Tensor) and not _finite(value)]
            detail = cause + (f", and {' and '.join(bad)} of the optimizer not finite" if bad else "")
            self.look("parameter", name, parameter, detail=detail)
            for key in bad:
                self.look("moment", name, moments[key], part=key, detail=cause)
        for name, buffer in self.model.named_buffers():
            self.look("buffer", name, buffer)

    def look(
        self,
        kind: Kind,
        name: str,
        tensor: object,
        part: str = "",
        detail: str = "",
        before: Tensor | None = None,
    ) -> None:
        """Check a tensor (anything else is ignored), unless a value that was not finite has been found
        already. `part` is a slot, product, or key; the values of `before`, of the same shape, are shown
        instead."""
        if self.found is not None or not _floating(tensor):
            return
        self.checks += 1
        if not _overflowed(tensor) if kind == "input" else _finite(tensor):  # an input may be a mask
            if self.operation and self._path and self._path[-1] not in self.engine.layers:
                self.vanished = self.vanished or f"{self.operation} in {self._path[-1] or 'the model'}"
            self.operation = ""
            return
        own = _local(tensor)
        flat = (~own.isfinite()).flatten()
        first = int(flat.nonzero()[0])
        index = tuple(int(each) for each in torch.unravel_index(torch.tensor(first), own.shape))
        shown = own if before is None else _local(before)
        column = index[-1] // _AROUND * _AROUND if index else 0
        around = shown[index[:-1]][column : column + _AROUND].float().tolist() if index else ()
        self.found = Origin(
            step=0,
            kind=kind,
            name=name,
            part=part,
            operation=self.operation if kind in ("input", "output", "gradient", "loss") else "",
            detail=detail,
            vanished=self.vanished,
            micro_batch=self.engine.clock.micro_batch,
            index=index,
            value=float(own[index]),
            around=tuple(around),
            count=int(flat.sum()),
            elements=own.numel(),
        )

    def checked(self, loss: Callable[..., Tensor]) -> Callable[..., Tensor]:
        def computed(*batch: Any) -> Tensor:
            for number, tensor in enumerate(batch):
                self.look("data", str(number), tensor)
            result = loss(*batch)
            self.look("loss", "", result)
            return result

        return computed

    def norm(self) -> None:
        """Name the largest gradient, for a norm that is not finite although all gradients are."""
        gradients = ((name, p.grad) for name, p in self.model.named_parameters())
        sizes = {n: float(_local(g).abs().max()) for n, g in gradients if g is not None and g.numel()}
        if self.found is None and sizes:
            name = max(sizes, key=lambda each: sizes[each])
            self.found = Origin(0, "norm", name, detail=f"{sizes[name]:.3g}")

    def operand(self, layer: str, slot: str, operand: Operand) -> None:
        self.order.append((layer, slot))
        assert operand.source is not None
        self.look("operand", layer, operand.source, slot, "before its quantisation: as bf16, or by rotation")
        # Not `dequantize()`: code times scale times amax overflows where the value itself does not.
        self.look("operand", layer, operand.values, slot, "by its quantisation", before=operand.source)
        self.look("operand", layer, operand.block_scale, slot, "its block scales")
        self.look("operand", layer, operand.amax, slot, "its outer scale")

    def product(self, layer: str, product: str, result: Tensor) -> None:
        self.look("product", layer, result, product, "its operands are finite")

    def _enter(self, name: str, module: nn.Module, args: object, kwargs: object) -> None:
        within = f"in {self._path[-1]}" if self._path and self._path[-1] else ""
        for number, tensor in enumerate(tree_leaves((args, kwargs))):
            self.look("input" if name else "data", name or str(number), tensor, detail=within)
        self._path.append(name)

    def _leave(self, name: str, module: nn.Module, args: object, output: object) -> None:
        self._path = self._path[: self._path.index(name)] if name in self._path else self._path
        for tensor in tree_leaves(output):
            self.look("output" if name else "loss", name, tensor)
            if name and _floating(tensor) and tensor.requires_grad:
                tensor.register_hook(partial(self.look, "gradient", f"the output of {name}"))

    def _accumulated(self, name: str, parameter: Tensor) -> None:
        self.look("gradient", name, parameter.grad)

    # --- what was found -------------------------------------------------------------------------------

    def origin(self, step: int, measured: Sequence[Mapping[str, float]] = ()) -> Origin:
        """Return the first value that was not finite in a step, counted from 1 as in records, with what grew
        before it. `measured`: metrics of the last two measured steps."""
        found = self.found or Origin(step, "unknown")
        magnitudes, order = self.engine.magnitudes(), {place: n for n, place in enumerate(self.order)}
        grew = grown(magnitudes, order, step - 1 - self.engine.clock.step)
        return replace(found, step=step, grew=grew, fell=fallen(*measured[-2:]) if len(measured) > 1 else "")


class _Operations(TorchDispatchMode):
    """Names the first operation of torch whose inputs are finite and whose result is not."""

    def __init__(self, finder: Finder) -> None:
        super().__init__()
        self._finder = finder

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Return False: torch would import its compiler for a method that nothing compiles."""
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        finder, name = self._finder, func._schema.name.partition("::")[2]
        asked = finder.found is None and not finder.operation and not name.startswith(_UNSET)
        clean = asked and not any(map(_overflowed, tree_leaves((args, kwargs))))
        result = func(*args, **(kwargs or {}))
        if clean and any(map(_overflowed, tree_leaves(result))):
            finder.operation = name
        return result


def _overflowed(value: object) -> bool:
    """Return True for a tensor with a NaN or an infinity above zero."""
    return _floating(value) and value.numel() > 0 and not bool((value < math.inf).all())


def _floating(value: object) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.is_floating_point() and value.device.type != "meta"


def _local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a sharded tensor; any other tensor as it is, without its graph."""
    own = tensor.detach()
    return own.to_local() if hasattr(own, "to_local") else own


def _finite(tensor: Tensor) -> bool:
    return bool(_local(tensor).isfinite().all())


def first_operand(engine: Engine) -> Origin | None:
    """Return the first operand so far with a NaN or an infinity, from magnitudes alone; None: there is none.
    Nothing is computed again, so neither the element is known nor what made it so between two layers."""
    if (first := engine.first_nonfinite()) is None:
        return None
    step, slot, name = first
    return Origin(
        step + 1, "operand", name, slot, detail=f"step {step + 1}", grew=grown(engine.magnitudes(), {})
    )


def grown(
    magnitudes: Mapping[tuple[str, str], Mapping[int, float]],
    order: Mapping[tuple[str, str], int],
    offset: int = 0,
) -> tuple[Growth, ...]:
    """Return the operands whose largest magnitude grew by `GROWTH` first, the earliest first.

    An operand has grown from the first step on from which all its magnitudes are that many times the largest
    before, if the last is also that many times the median over the steps. So gradients that are small in the
    first steps of a run, and then stay as they are, do not count.

    `magnitudes` are those of `Engine.magnitudes`: by layer and slot, by step. `order`, the operands' places
    in the order of execution, decides between those of one step. `offset` is added to a step of the engine,
    from 0, to have it from 0 in the run.
    """
    found = []
    for (name, slot), steps in magnitudes.items():
        values = [*steps.items()]
        usual = sorted(steps.values())[(len(values) - 1) // 2]
        for number in range(1, len(values)):
            before = max(value for _, value in values[:number])
            since, then = values[number]
            least = min(value for _, value in values[number:])
            if 0 < GROWTH * before <= least and GROWTH * usual <= values[-1][1] and then < math.inf:
                growth = Growth(name, slot, since + 1 + offset, before, then)
                found.append(((since, order.get((name, slot), len(order))), growth))
                break
    return tuple(growth for _, growth in sorted(found, key=lambda each: each[0])[:_MOST_GROWN])


def fallen(earlier: Mapping[str, float], later: Mapping[str, float]) -> str:
    """Return a sentence on the metrics that the later of two measured steps found worse; nothing if they are
    as before."""
    falls = {}
    for text, value in later.items():
        name = parse(text)
        if name.layer and name.metric == "sqnr_db" and text in earlier:
            falls[text] = earlier[text] - value
    sentences = []
    worst = max(falls, key=lambda each: falls[each], default="")
    if worst and falls[worst] >= _FALL:
        name = parse(worst)
        sentences.append(
            f"SQNR of {name.slot} of {name.layer} fell from {earlier[worst]:.1f} to {later[worst]:.1f} dB"
        )
    for text, value in later.items():
        name = parse(text)
        if name.family == PRODUCTS and name.metric == "gain_beyond" and value > 1:
            gain = later.get(text.removesuffix("_beyond"), math.nan)
            sentences.append(f"gain of {name.slot} of {name.layer} was {gain:.3g}, outside its interval")
            break
    return "; ".join(sentences)
