"""Operands of a model in bf16 on some batches, for operand_errors.py: the built-in model's, and a user's.

The built-in model is small enough to be trained in less than a minute at its first use, and is kept in the
cache. A model of transformers is loaded, or its weights are drawn from the seed if there are none. A training
function of the user's (`workload: {python: ...}`) is called as a trial in bf16 of as many steps as batches,
and stopped behind them if its own loop is longer.

Every layer that an engine has converted is captured, through hooks of torch on all modules, so that nothing
in the user's code has to know of it. Packed experts, which are no modules that are called, pass theirs on.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ablate.cache import kept, key_of
from ablate.engines.emulated import convert
from ablate.engines.emulated_layer import Context, EmulatedLinear
from ablate.engines.experts import is_attached
from ablate.engines.recomputation import recompute
from ablate.errors import InputError, as_input_error, one_line
from ablate.files import read_json, user_path
from ablate.numerics.philox import Clock
from ablate.recipes.layers import Layer, block_name, located
from ablate.recipes.presets import bf16
from ablate.training.data.corpus import scikit_datasets
from ablate.training.data.sources import TextFiles, TextSource
from ablate.training.data.tokenisers import FILE as TOKENISER
from ablate.training.operand_errors import Batch, Operands, Stream
from ablate.training.own_code.trial import Stopped
from ablate.training.own_code.user_errors import described
from ablate.training.trial_run import Telemetry, TrialRun
from ablate.training.workloads.finetune import Finetune
from ablate.training.workloads.gpt import Gpt

if TYPE_CHECKING:
    from ablate.training.workloads.base import Workload
    from ablate.training.workloads.text import TextWorkload

BUILT_IN = Gpt(
    layers=6,
    width=128,
    hidden=384,
    heads=4,
    context=128,
    batch=4,
    steps=240,
    lr=1e-3,
    decay_fraction=0.0,
    eval_every=240,
    eval_tokens=4096,
)
"""Model whose operands are captured by default: all sizes are multiples of 128, the largest rotation."""
_VERSION = 1
"""Version of the built-in model's weights. Raise it by hand if the same workload would give other ones."""
_SILENT = Telemetry(every=0, shadow=0, log=40)


class Capture(NamedTuple):
    """Operands of a model on some batches."""

    batches: list[Batch] | Stream
    layers: tuple[Layer, ...] = ()
    """The model's layers, by which layer rules select; none if their blocks are not known."""
    fixed: bool = False
    """True if weights are the same in all batches."""
    text: str = ""
    """Text of the batches, if they could be of others."""
    streamed: int = 0
    """Number of operands in a stream, those of experts without tokens among them."""

    @property
    def total(self) -> int:
        return self.streamed if callable(self.batches) else sum(map(len, self.batches))


@contextmanager
def captured(
    take: Callable[[int, Operands], None], begun: Callable[[int], None] = lambda step: None
) -> Iterator[None]:
    """Give the operands of every step within this context, of all layers that an engine has converted.

    `take` is called in the backward pass with the step and the operands of a layer, or of an expert that has
    tokens. The weight may be the layer's own, which changes later. `begun` is called with the step before the
    first product of each.
    """
    contexts: dict[str, Context] = {}
    """Contexts of packed experts, by name of the layer."""

    def passed(layers: Sequence[EmulatedLinear], x: Tensor, counts: Sequence[int], y: Tensor) -> None:
        if not y.requires_grad:
            return
        step, size = layers[0].clock.step, list(counts)
        begun(step)
        rows = x.detach().to(torch.bfloat16, copy=True).flatten(0, -2).split(size)

        def backward(dy: Tensor) -> None:
            parts = dy.detach().to(torch.bfloat16, copy=True).flatten(0, -2).split(size)
            for layer, own, gradient in zip(layers, rows, parts, strict=True):
                if len(own):
                    weight = layer.weight.detach().to(torch.bfloat16)
                    take(step, Operands(layer.name, own, weight, gradient, layer.name in contexts))

        y.register_hook(backward)

    def before(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if is_attached(module):
            contexts.update((layer.name, layer.context) for layer in module.forward.layers)
            module.forward.layers[0].context.grouped = passed

    def after(module: nn.Module, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        if isinstance(module, EmulatedLinear):
            passed([module], inputs[0], [inputs[0].numel() // module.in_features], output)

    handles = (
        nn.modules.module.register_module_forward_pre_hook(before),
        nn.modules.module.register_module_forward_hook(after),
    )
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
        for context in contexts.values():
            context.grouped = None


@contextmanager
def collected(batches: list[Batch], most: int | None = None) -> Iterator[None]:
    """Append the operands of every step within this context.

    A layer that is called twice in a step has those of its last call. A training function that would take
    more than `most` steps is stopped: its own loop may be as long as a whole run.
    """
    steps: dict[int, dict[str, Operands]] = {}
    weights: dict[str, Tensor] = {}

    def begun(step: int) -> None:
        if step not in steps and len(steps) == most:
            raise Stopped

    def take(step: int, operands: Operands) -> None:
        name, weight = operands.layer, operands.w
        if name not in weights or not torch.equal(weights[name], weight):
            weights[name] = weight.clone()  # one copy for all steps that do not change it
        steps.setdefault(step, {})[name] = replace(operands, w=weights[name])

    with captured(take, begun):
        yield
    batches += [[*layers.values()] for _, layers in sorted(steps.items())]


def built_in(count: int, note: Callable[[str], None], seed: int = 0) -> Capture:
    """Return operands of the built-in model on `count` batches after its training. `note` is called with a
    line before a training, and with its progress; `seed` is that of weights and data."""
    run = BUILT_IN.prepare(bf16(), seed, "cpu")
    key = key_of("ranked", _VERSION, BUILT_IN.identity(), BUILT_IN.fingerprint(), seed, torch.__version__)

    def train(folder: Path) -> None:
        note(f"training the built-in model, {BUILT_IN.steps} steps in bf16, once ...")
        threads = torch.get_num_threads()
        torch.set_num_threads(1)  # another number would add in another order and give other weights
        try:
            for record in BUILT_IN.train(run, _SILENT):
                note(f"step {record.step} of {BUILT_IN.steps}, loss {record.metrics['train/loss']:.2f}")
        finally:
            torch.set_num_threads(threads)
        torch.save(run.model.state_dict(), folder / "weights.pt")

    folder = kept("models", key, train)
    run.model.load_state_dict(torch.load(folder / "weights.pt", weights_only=True))
    batches: list[Batch] = []
    with collected(batches):
        for step in range(BUILT_IN.steps, BUILT_IN.steps + count):
            run.engine.clock.step = step
            run.model(*run.batch(step, 0)).backward()
    return Capture(batches, run.engine.placed, fixed=True)


def of_model(source: str, count: int, seed: int = 0) -> Capture:
    """Return a stream of operands of a model of transformers, without training.

    Its saved weights are mapped from their files, activations are recomputed block by block, and operands are
    given as the backward pass makes them: of what grows with the model, little is kept in memory. `source` is
    a folder with config.json, weights and perhaps tokenizer.json; one without weights, or a config.json
    alone, whose weights are drawn from the seed; or a name on the hub. `seed` is that of the `count` batches,
    too.
    """
    from ablate.training.models.causal import frozen, loss

    path = user_path(source)
    drawn = path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("*.bin"))
    workload: TextWorkload
    try:
        given = read_json(path) if path.is_file() else source
        bare, text = drawn or path.is_file(), _text(path)
        workload = Gpt(model=given) if bare else Finetune(model=given, data=text)
    except ValueError as error:
        raise InputError(
            f"--model {source}: no configuration of transformers: {one_line(str(error))}"
        ) from None
    if problems := [f"--model {source}: {field}: {why}" for field, why in workload.problems()]:
        raise InputError(*problems)
    clock = Clock(seed)
    with as_input_error(OSError, ValueError, before=f"--model {source}: "):
        model = frozen(given, workload.corpus.vocab, seed, weights=not drawn)
        engine = convert(model, bf16(), clock)
    recompute(model, engine)
    batch, _ = workload.windows(seed, torch.device("cpu"))

    def stream(take: Callable[[int, Operands], None]) -> None:
        for number in range(count):
            clock.step = number
            with captured(take):
                loss(clock, torch.bfloat16, model, *batch(number, 0)).backward()

    words = "bytes as tokens" if bare or isinstance(text, str) else "English in its own tokens"
    return Capture(stream, engine.placed, True, words, count * len(engine.layers))


def _text(folder: Path) -> TextSource:
    """Return English in tokens of the model's own, or bytes if the folder has no tokeniser."""
    if not (folder / TOKENISER).is_file():
        return "stdlib"
    return TextFiles(text=str(scikit_datasets() / "descr" / "*.rst"), tokenizer=str(folder), val_fraction=0.1)


def of_workload(workload: Workload, where: str, count: int, seed: int = 0) -> Capture:
    """Return operands of the models that a workload, computed in this process, trains in `count` steps in
    bf16 after its first. In that one no gradient reaches the layers behind a head of zeros. `where` is its
    name in errors."""
    workload = workload.model_copy(update={"steps": count + 1})
    if problems := [f"{where}: {why}" for _, why in workload.problems()]:
        raise InputError(*problems)
    batches: list[Batch] = []
    try:
        with collected(batches, count + 1):
            for _ in workload.records(TrialRun(bf16(), seed, "emulated", "cpu", _SILENT)):
                pass
    except Exception as error:  # the user's code may raise any class
        raised = described(error) or (error if isinstance(error, RuntimeError) else None)
        if raised is None:  # a RuntimeError outside the user's code is the trial's, such as no step taken
            raise
        called = isinstance(error, TypeError) or isinstance(error.__cause__, TypeError)
        hint = "; a training function is called with the trial alone (docs/use/api.md)" * called
        raise InputError(f"{where}: {raised}{hint}") from error
    if len(batches) < 2:
        raise InputError(
            f"{where}: no converted layer was trained in {count + 1} steps; call trial.convert(model), and"
            " the model and backward() within trial.step()"
        )
    del batches[0]
    names = [operands.layer for operands in reversed(batches[0])]  # the backward pass begins at the end
    numbered = all(block_name(name) for name in names)
    return Capture(batches, located(dict.fromkeys(names, ("Linear",))) if numbered else ())
