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
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from ablate.cache import kept, key_of
from ablate.engines.emulated_layer import Context, EmulatedLinear
from ablate.engines.experts import is_attached
from ablate.errors import InputError, one_line
from ablate.files import read_json
from ablate.recipes.layers import Layer, block_name, located
from ablate.recipes.presets import bf16
from ablate.training.operand_errors import Batch, Operands
from ablate.training.own_code.trial import Stopped
from ablate.training.own_code.user_errors import described
from ablate.training.trial_run import Telemetry, TrialRun
from ablate.training.workloads.finetune import Finetune
from ablate.training.workloads.gpt import Gpt

if TYPE_CHECKING:
    from ablate.training.loop import PreparedRun
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

    batches: list[Batch]
    layers: tuple[Layer, ...] = ()
    """The model's layers, by which layer rules select; none if their blocks are not known."""


@contextmanager
def captured(batches: list[Batch], most: int | None = None) -> Iterator[None]:
    """Append the operands of every step within this context, of all layers that an engine has converted.

    A layer that is called twice in a step has those of its last call. Packed experts that have no token in
    some step are left out. A training function that would take more than `most` steps is stopped: its own
    loop may be as long as a whole run.
    """
    steps: dict[int, dict[str, Operands]] = {}
    weights: dict[str, Tensor] = {}
    contexts: dict[str, Context] = {}
    """Contexts of packed experts, by name of the layer."""

    def weight(layer: EmulatedLinear) -> Tensor:
        found = layer.weight.detach().to(torch.bfloat16)
        if layer.name not in weights or not torch.equal(weights[layer.name], found):
            weights[layer.name] = found.clone()  # one copy for all steps that do not change it
        return weights[layer.name]

    def passed(layers: Sequence[EmulatedLinear], x: Tensor, counts: Sequence[int], y: Tensor) -> None:
        if not y.requires_grad:
            return
        step, size = layers[0].clock.step, list(counts)
        if step not in steps and len(steps) == most:
            raise Stopped
        rows = x.detach().to(torch.bfloat16).clone().flatten(0, -2).split(size)
        own = [weight(layer) for layer in layers]

        def backward(dy: Tensor) -> None:
            parts = dy.detach().to(torch.bfloat16).flatten(0, -2).split(size)
            for layer, *made in zip(layers, rows, own, parts, strict=True):
                if len(made[0]):
                    steps.setdefault(step, {})[layer.name] = Operands(layer.name, *made)

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
    everywhere = set.intersection(*map(set, steps.values())) if steps else set()
    for _, layers in sorted(steps.items()):
        kept = (own for name, own in layers.items() if name in everywhere or name not in contexts)
        batches.append([*kept])


def built_in(count: int, note: Callable[[str], None], seed: int = 0) -> Capture:
    """Return operands of the built-in model on the batches after its training.

    Args:
        count: number of batches.
        note: called with a line before a training, and with its progress.
        seed: seed of weights and data.
    """
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
    return _of_run(run, count, BUILT_IN.steps)


def of_model(source: str, count: int, seed: int = 0) -> Capture:
    """Return operands of a model of transformers, without training.

    Args:
        source: folder with config.json and weights; one without weights, or a config.json alone, whose
            weights are drawn from the seed; or a name on the hub.
        count: number of batches.
        seed: seed of the batches, and of weights that are drawn.
    """
    path = Path(source).expanduser()
    drawn = path.is_dir() and not any(path.glob("*.safetensors")) and not any(path.glob("*.bin"))
    workload: TextWorkload
    if path.is_file():
        try:
            workload = Gpt(model=read_json(path))
        except ValueError as error:
            raise InputError(
                f"--model {source}: no configuration of transformers: {one_line(str(error))}"
            ) from None
    else:
        workload = Gpt(model=source) if drawn else Finetune(model=source)
    if problems := [f"--model {source}: {field}: {why}" for field, why in workload.problems()]:
        raise InputError(*problems)
    try:
        run = workload.prepare(bf16(), seed, "cpu")
    except (OSError, ValueError) as error:
        raise InputError(f"--model {source}: {error}") from None
    return _of_run(run, count, 0)


def of_workload(workload: Workload, where: str, count: int, seed: int = 0) -> Capture:
    """Return operands of the models that a workload trains, say a training function, after its first step.

    In that step no gradient reaches the layers behind a head of zeros.

    Args:
        workload: one that is computed in this process.
        where: its name in errors.
        count: number of steps, in bf16.
        seed: seed of the trial.
    """
    workload = workload.model_copy(update={"steps": count + 1})
    if problems := [f"{where}: {why}" for _, why in workload.problems()]:
        raise InputError(*problems)
    batches: list[Batch] = []
    try:
        with captured(batches, count + 1):
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
    names = [operands.layer for operands in batches[0]]
    numbered = all(block_name(name) for name in names)
    return Capture(batches, located(dict.fromkeys(names, ("Linear",))) if numbered else ())


def _of_run(run: PreparedRun, count: int, first: int) -> Capture:
    """Return operands of a prepared run on the batches from step `first` on, all with the same weights."""
    batches: list[Batch] = []
    with captured(batches):
        for step in range(first, first + count):
            run.engine.clock.step = step
            (run.loss or run.model)(*run.batch(step, 0)).backward()
    experts = {layer.name for each in run.engine.experts.values() for layer in each.layers}
    needed = run.engine.layers.keys() - experts
    if not batches or any(needed - {operands.layer for operands in batch} for batch in batches):
        raise InputError("the model has layers that no gradient reaches, so their operands are not known")
    return Capture(batches, run.engine.placed)
