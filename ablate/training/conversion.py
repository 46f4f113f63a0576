"""Recipes in a training loop of one's own: `Conversion`, the handle that `ablate.convert` returns.

The problem. Quantised training is more than a layer: a recipe changes over a run, random bits must differ
from step to step and be drawn again after a restart, casts of weights may be reused until the optimizer
moves them, and some recipes act around the optimizer's step. A loop that forgets one of these still runs,
and its loss looks right.

The idea. The handle owns that state, and the loop says one thing only, where a step begins and ends:

    run = ablate.convert(model, "nvfp4", seed=0, steps=1000)
    for batch in data:
        with run.step():
            loss(model(batch)).backward()
            optimizer.step()
            optimizer.zero_grad()
    with run.evaluation():
        validate(model)

Outside of `step()` and `evaluation()` a call of the model raises an error, so a forgotten one shows at once.
Micro-batches are counted by the calls of the layers: the second call of a layer within a step begins the
second micro-batch. Recomputation in the backward pass (activation checkpointing) does not count: it belongs
to the one call of the layer that waits for its backward pass.

With torch.distributed, each rank draws other bits: those that the micro-batches of one process would have.

Refused by name: recipes whose statistics would have to be shared among ranks (delayed and held scales), a
schedule by fractions without the number of steps, rules for weights that an optimizer cannot carry out, and
random bits for recomputed activations while several calls of a layer wait for their backward passes.
"""

import warnings
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, NoReturn, TypedDict

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from ablate.engines import emulated
from ablate.engines.autograd import in_backward
from ablate.engines.blocks import (
    LayerRow,
    block_finder,
    converted_share,
    find_blocks,
    layer_table,
    left,
    summary,
)
from ablate.engines.compiled import operator
from ablate.engines.emulated_layer import EmulatedLinear, kept
from ablate.engines.exempt import refuse_bypassed
from ablate.engines.expert_layers import EmulatedExpert
from ablate.engines.routing import recorded
from ablate.numerics.philox import Clock
from ablate.numerics.spec import statistic_of
from ablate.recipes.readings import reading
from ablate.recipes.recipe import Recipe, Run, Weights
from ablate.training.alarms import Alert, alerts
from ablate.training.calls import Calls
from ablate.training.conversion_options import ConversionOptions
from ablate.training.first_nonfinite import Finder, Origin, first_operand
from ablate.training.metrics import (
    Casts,
    Measurements,
    SlotErrors,
    gradient_noise,
    gradients,
    keep_casts,
    oscillation,
    routes,
)
from ablate.training.operand_metrics import ALARMS

if TYPE_CHECKING:
    from torch.optim import Optimizer


class ConversionState(TypedDict):
    """All that later steps depend on beside parameters and optimizer, as `torch.load(weights_only=True)`
    reads it."""

    steps_done: int
    seed: int
    recipe: str
    """As JSON."""
    engine: emulated.EngineState


_OUTSIDE = "call the model inside `with {0}.step():`, or inside `with {0}.evaluation():` to evaluate it"
_RESTORED = "the model was restored to plain layers"
_LEAST = 0.5
"""Share of a model's matrix weights below which `convert` warns."""


class Conversion:
    """A model whose linear layers compute by a recipe, in a training loop of one's own; made by `convert`. It
    holds everything that later steps depend on beside parameters and optimizer."""

    def __init__(
        self,
        model: nn.Module,
        engine: emulated.Engine,
        run: Run | None,
        measure_every: int,
        layers: Sequence[LayerRow],
        handle: str = "run",
    ) -> None:
        self.model, self.layers = model, list(layers)
        """The layers: a row for each matrix of the model, with the reason if it is not converted."""
        self.measure_every = measure_every
        self.steps_done = 0
        self.engine, self._run, self._handle = engine, run or Run(2**31), handle
        self._within: str | None = None
        """Context that is open: `step` or `evaluation`."""
        self._calls = Calls()
        self._used = False
        """True once a layer has been called: a model that is never called is not the one that is trained."""
        self._metrics: dict[str, float] = {}
        self._measuring = False
        self._casts: Casts = {}
        self._origin: Origin | None = None
        self._hooks = self._optimizer_hooks()
        engine.context.called = self._begin_call
        engine.context.returned = lambda layer, micro_batch: self._calls.end(layer, micro_batch)
        for layer in engine.layers.values():
            layer.compiled = None if isinstance(layer, EmulatedExpert) else operator(layer)
        engine.end(_OUTSIDE.format(self._handle))

    def __repr__(self) -> str:
        """Return the number of converted layers, their share, and those in high precision or left out."""
        return summary(self.layers, self.recipe.placements(self.engine.placed))

    def __deepcopy__(self, memo: object) -> NoReturn:
        """Raise TypeError: a copy of the model follows this handle; a second handle would contradict it."""
        raise TypeError(
            "a Conversion cannot be copied. A copy of the model alone follows the steps of this one;"
            " to train it apart, copy the model before its conversion and convert both"
        )

    def __reduce_ex__(self, protocol: object) -> NoReturn:
        """Raise TypeError: `state_dict()` is what a checkpoint holds."""
        raise TypeError("a Conversion cannot be pickled; save its state_dict() instead")

    @property
    def recipe(self) -> Recipe:
        """The recipe, with its schedule."""
        return self.engine.recipe

    # --- a step -------------------------------------------------------------------------------------

    @contextmanager
    def step(self, *, measure: bool | None = None) -> Iterator["Conversion"]:
        """Inside this context, the model computes one optimizer step by the recipe.

        Forward and backward passes of all its micro-batches and the optimizer's step belong inside. A step
        that ends in an exception does not count.

        Args:
            measure: measure the errors of all operands in this step; None: in every `measure_every`-th.

        Raises:
            RuntimeError: a step is in progress, the model was restored, no converted layer was called, the
                recipe needs a measurement (`compare_gradient`) that was not made in this step, or it has a
                statistic of earlier steps that several ranks would have to share.
        """
        self._refuse_nesting("step")
        step, engine = self.steps_done, self.engine
        self._refuse_ranks()
        due = self.wants_gradient
        if measure is None:
            measure = self.measure_every > 0 and step % self.measure_every == 0
        errors = SlotErrors() if measure else None
        self._measuring, self._casts = bool(measure), {}
        seen: dict[str, float] = {}
        self._metrics_of_step = seen
        with engine.unrecorded(unless_completed=True):
            self._begin("step", "training", step)
            engine.listen(errors)
            try:
                with engine.still_weights():
                    yield self
            finally:
                engine.listen(None)
                self._within, self._casts = None, {}
                engine.end(_OUTSIDE.format(self._handle))
        if not self._used:
            raise RuntimeError(
                f"step {step}: none of the {len(engine.layers)} converted layers was called; the model that"
                " is trained must be the one that was converted, not a copy made before"
            )
        if due and "grad/noise_ratio" not in seen:
            raise RuntimeError(
                f"step {step}: the recipe's schedule waits for grad/noise_ratio, measured in this step;"
                " call run.compare_gradient(closure) inside it"
            )
        engine.observe(seen, step)
        if errors:
            self._metrics = {**errors.metrics(), **seen}
        else:
            self._metrics |= seen
        self.steps_done += 1

    @contextmanager
    def evaluation(self, *, high_precision: bool = False, by: str | None = None) -> Iterator["Conversion"]:
        """Inside this context, the model is evaluated in the precision of the last step.

        Random bits come from a stream of their own, the same in every evaluation after the same step; no
        count, history or measurement of the training changes. It may stand inside `step()`.

        Args:
            high_precision: compute without quantisation instead.
            by: compute by the forward pass of another recipe instead: a preset, such as `nvfp4`, or one with
                the ending `_weights_only`.

        Raises:
            ValueError: `by` is no such name, or is given beside `high_precision`.
            RuntimeError: called inside of `evaluation()`, or the model was restored.
        """
        if by is not None and high_precision:
            raise ValueError(f"evaluation(by={by!r}) is not in high precision; leave one of the two out")
        other = None if by is None else reading(by)
        self._refuse_nesting("evaluation")
        engine, step = self.engine, self._present
        with (
            kept([self], "_within", "_calls"),
            kept([engine.clock], "stream", "step", "micro_batch"),
            kept(engine.layers.values(), "products"),
            ExitStack() as stack,
        ):
            if not self._within:  # a step has its own casts already
                stack.enter_context(engine.still_weights())
            self._begin("evaluation", "evaluation", step)
            stack.enter_context(engine.again())
            stack.enter_context(_no_fast_path(self.model))
            if high_precision:
                stack.enter_context(engine.high_precision())
            if other:
                stack.enter_context(engine.reading(other))
            yield self

    def compare_gradient(self, closure: Callable[[], object]) -> dict[str, float]:
        """Measure how far quantisation turns the gradient: compute it twice, without and with the recipe.

        Args:
            closure: computes the loss of a batch and calls `backward` on it, and nothing else. It is called
                twice with the same state of torch's random generators; gradients that exist are kept.

        Returns:
            `grad/cosine_to_bf16`, and `grad/noise_ratio`, the norm of the gradient over that of the
            difference; {} if a norm is 0 or not finite. `metrics()` has them too, and `routing/...`.

        Raises:
            RuntimeError: called outside of `step()`.
        """
        with self._replayed("compare_gradient", closure) as gradient, self.engine.unrecorded():
            with self.engine.high_precision(), recorded(self.engine) as exact:
                reference = gradient()
            with recorded(self.engine) as own:
                found = gradient_noise(gradient(), reference)
        self._metrics_of_step |= found | routes(own, exact)
        return found

    def first_nonfinite(self, closure: Callable[[], object]) -> Origin:
        """Name the first value that is not finite, by computing a batch again with every tensor checked.

        Call it if a loss or a gradient norm is not finite, before the optimizer's step. `alarms()` then has
        its result in place of what the operands' magnitudes tell without it.

        Args:
            closure: as that of `compare_gradient`.

        Raises:
            RuntimeError: called outside of `step()`.
        """
        finder = Finder(self.model, self.engine, operations=_ranks() == 1)
        with self._replayed("first_nonfinite", closure) as gradient:
            finder.state(self.steps_done, None)
            with finder:
                gradient()
        self._origin = finder.origin(self.steps_done + 1)
        return self._origin

    @contextmanager
    def _replayed(self, method: str, closure: Callable[[], object]) -> Iterator[Callable[[], list[Tensor]]]:
        """Inside this context, compute a batch's gradient by the function returned; it leaves no trace."""
        if self._within != "step":
            raise RuntimeError(f"{method}: call it inside `with {self._handle}.step():`")
        parameters = [p for p in self.model.parameters() if p.requires_grad]
        clock, calls = self.engine.clock, self._calls
        moment = clock.micro_batch

        def gradient() -> list[Tensor]:
            self._calls, clock.micro_batch = calls.copy(), moment
            for p in parameters:
                p.grad = None
            with torch.random.fork_rng():
                closure()
            return gradients(parameters)

        with self.engine.again(), kept([self], "_calls"), kept(parameters, "grad"):
            yield gradient

    @property
    def wants_gradient(self) -> bool:
        """True if the recipe's schedule waits for a measurement of `compare_gradient` in this step."""
        return bool(self.engine.due(self.steps_done))

    def metrics(self) -> Measurements:
        """Return the latest measurements by name, and the counts so far. `print` shows the most important.

        `quant/<slot>/<metric>` and `quant/<slot>/<layer>/<metric>` of the last measured step, `grad/...` of
        the last `compare_gradient`, `weights/...` of the last measured step whose optimizer stepped inside,
        `nan/activation`: operands so far with a NaN or an infinity, and `flops/fp4_share`: fraction of the
        converted layers' FLOPs so far that were in FP4; the rest of the model is not counted.
        """
        counts = {
            "nan/activation": float(self.engine.nonfinite()),
            "flops/fp4_share": self.engine.fp4_share(),
        }
        return Measurements(self._metrics | counts)

    def alarms(self) -> list[Alert | Origin]:
        """Return the alarms of `metrics()`: values beyond which something is wrong. `str` is the sentence.
        The last is what `origin` returns, if anything."""
        origin = self.origin()
        return [*alerts(self.metrics(), ALARMS), *([origin] if origin else [])]

    def origin(self) -> Origin | None:
        """Return what `first_nonfinite` found, else the first operand with a NaN or an infinity, if any."""
        return self._origin or first_operand(self.engine)

    # --- state --------------------------------------------------------------------------------------

    def state_dict(self) -> ConversionState:
        """Return what later steps depend on beside parameters and optimizer, for a checkpoint.

        Returns:
            Numbers, strings and tensors, which `torch.load(weights_only=True)` reads. As those of a model's
            state dict, the tensors are the run's own: save or copy them before the next step.

        Raises:
            RuntimeError: called inside of `step()`, which is not counted yet.
        """
        self._refuse_within_step("state_dict")
        return {
            "steps_done": self.steps_done,
            "seed": self.engine.clock.seed,
            "recipe": self.recipe.model_dump_json(),
            "engine": self.engine.state(),
        }

    def load_state_dict(self, state: ConversionState) -> None:
        """Continue from a state that `state_dict` returned.

        Raises:
            ValueError: the state is of another recipe or seed. To begin from somebody's weights under a new
                recipe, load those of model and optimizer alone.
            RuntimeError: called inside of `step()`.
        """
        self._refuse_within_step("load_state_dict")
        mine = self.state_dict()
        for what, same in (
            ("seed", state["seed"] == mine["seed"]),
            ("recipe", state["recipe"] == mine["recipe"]),
        ):
            if not same:
                raise ValueError(
                    f"this state is of another {what} than the model was converted with; convert it with the"
                    f" same {what}, or load the states of model and optimizer alone to begin anew from them"
                )
        self.steps_done = state["steps_done"]
        self.engine.restore(state["engine"], self.steps_done)

    def restore(self, copied: nn.Module | None = None) -> nn.Module:
        """Give the layers their own class again, with the same parameters and hooks; return the model.

        Args:
            copied: restore this copy of the model, such as a moving average of its weights, instead. The
                model itself stays converted.

        Raises:
            RuntimeError: called inside of `step()` or `evaluation()`, or a second time.
            ValueError: `copied` is no copy of the converted model.
        """
        if self._within == "restored":
            raise RuntimeError(f"restore(): {_RESTORED} already")
        if self._within:
            raise RuntimeError(f"restore() inside of {self._within}(); leave it first")
        model = self.model if copied is None else copied
        layers = dict(model.named_modules(remove_duplicate=False))
        for name in self.engine.names:
            if not isinstance(layers.get(name), EmulatedLinear):
                there = "a plain layer" if name in layers else "missing"
                raise ValueError(f"{name} is {there}: this is no copy of the converted model")
        emulated.restore(model)
        if copied is not None:
            return copied
        for hook in self._hooks:
            hook.remove()
        self.engine.end(_RESTORED)
        self._within = "restored"
        return self.model

    # --- within a step ------------------------------------------------------------------------------

    def _begin(self, context: str, stream: str, step: int) -> None:
        engine = self.engine
        self._within, self._calls = context, Calls()
        engine.clock.stream, engine.clock.step = stream, step
        engine.clock.micro_batch = dist.get_rank() if _ranks() > 1 else 0
        engine.at(step, self._run, counted=context == "step")

    def _begin_call(self, layer: EmulatedLinear) -> int:
        """Return the micro-batch of a forward pass; the second call of a layer begins the next one."""
        if in_backward():
            return self._calls.recomputed(layer, self.engine.clock.micro_batch)
        if id(layer) in self._calls.present:
            self._calls.present.clear()
            self.engine.clock.micro_batch += _ranks()
        self._calls.begin(layer, self.engine.clock.micro_batch)
        self._used = True
        return self.engine.clock.micro_batch

    def _refuse_nesting(self, context: str) -> None:
        if self._within == "restored":
            raise RuntimeError(f"{context}(): {_RESTORED}; convert it again")
        if self._within == "evaluation" or self._within == context:
            raise RuntimeError(f"{context}() inside of {self._within}(); leave that first")

    def _refuse_within_step(self, call: str) -> None:
        if self._within == "step":
            raise RuntimeError(
                f"{call}() inside of step(): the step is not counted before its end; leave it first"
            )

    def _refuse_ranks(self) -> None:
        if _ranks() == 1:
            return
        for slot, quant in self.recipe.quantised():
            if quant.outer and statistic_of(quant.outer.statistic).earlier:
                raise RuntimeError(
                    f"{slot}: outer.statistic {quant.outer.statistic} depends on earlier steps of all ranks,"
                    f" which are not shared among {_ranks()} ranks here; use one rank, or a sweep"
                )

    def _optimizer_hooks(self) -> list[torch.utils.hooks.RemovableHandle]:
        """Follow every optimizer of the model's parameters: rules for weights act around its step."""
        me = weakref.ref(self)

        def before(optimizer: "Optimizer", args: tuple[object, ...], kwargs: Mapping[str, object]) -> None:
            if (self := me()) and self._concerns(optimizer):
                self._before_update(optimizer, any(map(callable, (*args[1:], *kwargs.values()))))

        def after(optimizer: "Optimizer", args: object, kwargs: object) -> None:
            if (self := me()) and self._concerns(optimizer):
                self._after_update(optimizer)

        return [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]

    def _concerns(self, optimizer: "Optimizer") -> bool:
        """Return True if an optimizer updates the model; `weights.master` rounds all its parameters."""
        return self._within != "restored" and _updates(optimizer, self.model.parameters())

    @property
    def _present(self) -> int:
        """Number of the step in progress, or of the last one."""
        return self.steps_done if self._within else max(0, self.steps_done - 1)

    def _before_update(self, optimizer: "Optimizer", closure: bool) -> None:
        if self._within == "step":
            refuse_bypassed(self.engine.layers.values())
        if self._measuring and self._within == "step":
            # One of several optimizers: what all of them flip is counted from the first one's step on.
            self._casts = self._casts or keep_casts(self.engine.weight_casts())
        weights = self.recipe.weights
        if weights == Weights():
            return
        if self._within != "step":
            raise RuntimeError(
                f"a recipe with rules for weights needs optimizer.step() inside `with {self._handle}.step():`"
            )
        quantised = (layer.owner for layer in self.engine.layers.values())
        adam = isinstance(optimizer, torch.optim.Adam | torch.optim.AdamW)
        if weights.q_ramping and not adam and _updates(optimizer, quantised):
            raise RuntimeError(
                f"weights.q_ramping changes Adam's moments, and {type(optimizer).__name__} has none;"
                " use Adam or AdamW"
            )
        if weights.q_ramping and closure:
            raise RuntimeError(
                "weights.q_ramping changes gradients before optimizer.step(), and its closure computes them"
                " anew; call backward before optimizer.step(), and give it no closure"
            )
        self.engine.weights.before(optimizer, self._present, self._run)

    def _after_update(self, optimizer: "Optimizer") -> None:
        if self.recipe.weights != Weights():
            self.engine.weights.after(optimizer, self._present, self._run)
        for layer in self.engine.layers.values():
            layer.casts.forget()
        if self._casts:
            self._metrics_of_step |= oscillation(self._casts, self.engine.weight_casts())


def convert(model: nn.Module, options: ConversionOptions, handle: str = "run") -> Conversion:
    """Convert a model in place and return its handle, `handle` in messages. ValueError if no layer would be
    converted, the recipe does not fit the model, or its schedule needs facts of the run that are not given. A
    model that is refused stays as it was.
    """
    options.refuse_unknown_length()
    _refuse_converted(model)
    found = find_blocks(model, options.blocks)
    if not found:
        raise ValueError(
            f"nothing of {type(model).__name__} would be converted: it has no blocks, which are members of"
            " a module list or siblings of one class that hold linear layers. Name them by a glob, such as"
            ' blocks="encoder.*"; blocks="*" takes every nn.Linear'
        )
    left_out: list[str] = []

    def chosen(name: str, linear: nn.Module) -> bool:
        if options.filter is None or options.filter(name, linear):
            return True
        left_out.append(name)
        return False

    block = block_finder(found)
    try:
        engine = emulated.convert(model, options.recipe, Clock(options.seed), block, chosen, options.linears)
        layers = layer_table(model, block, left_out)
        if (share := converted_share(layers)) < _LEAST:
            warnings.warn(
                f"{share:.1%} of the weights of the model's linear layers are converted."
                f" The largest left out: {left(layers)}",
                stacklevel=3,
            )
        return Conversion(model, engine, options.run, options.measure_every, layers, handle)
    except BaseException:  # the next call would find a model that is converted, and nobody with its handle
        emulated.restore(model)
        raise


def _refuse_converted(model: nn.Module) -> None:
    """Raise ValueError if a part of the model follows another handle, whose clock its draws would keep."""
    for name, module in model.named_modules():
        if isinstance(module, EmulatedLinear):
            raise ValueError(
                f"{name} is converted already; convert the model once,"
                " or call restore() of the handle that converted it first"
            )


def _updates(optimizer: "Optimizer", parameters: Iterable[nn.Parameter]) -> bool:
    mine = {id(p) for p in parameters}
    return any(id(p) in mine for group in optimizer.param_groups for p in group["params"])


def _ranks() -> int:
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


@contextmanager
def _no_fast_path(model: nn.Module) -> Iterator[None]:
    """Inside this context, torch's own encoder layers call their linear layers in evaluation too."""
    if not any(isinstance(module, nn.TransformerEncoderLayer) for module in model.modules()):
        yield
        return
    before = torch.backends.mha.get_fastpath_enabled()
    torch.backends.mha.set_fastpath_enabled(False)
    try:
        yield
    finally:
        torch.backends.mha.set_fastpath_enabled(before)
