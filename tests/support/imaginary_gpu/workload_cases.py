"""Errors and strays of whole runs on the imaginary GPU, as JSON: each workload, and what a run can do."""

import contextlib
import json
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import ablate
from ablate.engines.hardware import ASSUMED, Machine
from ablate.engines.nonfinite import NonfiniteCount
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.cells import grid, within
from ablate.recipes.recipe import SLOTS
from ablate.training.fork_design import Forks
from ablate.training.forked_training import train_forks
from ablate.training.loop import Loop, Telemetry
from ablate.training.metrics import gradient_split
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.python import Python
from support.corpus import write_shards
from support.gpt_runs import gpt
from support.imaginary_gpu.counting import Counts
from support.workloads import SMALL

NVFP4 = PRESETS["nvfp4"]()
OFTEN = Telemetry(every=2, shadow=2, log=1, checkpoint=0)
SELDOM = Telemetry(every=1000, shadow=1000, log=1, checkpoint=0)
TRAINED = [name for name in SMALL if name not in ("idle", "python", "command")]
SHORTER = {
    "gpt": {"steps": 2, "eval_every": 2, "accumulate": 1, "layers": 1},
    "finetune": {"steps": 2, "accumulate": 1},
    "tensors": {"draws": 2},
}
COUNTS = Counts()


def moved(module: nn.Module, *args: object, **kwargs: object) -> nn.Module:
    """Move a module as `nn.Module.to` does, which cannot exchange a fake parameter for itself."""
    device, dtype, *_ = torch._C._nn._parse_to(*args, **kwargs)
    if dtype is not None:
        return TO(module, *args, **kwargs)
    for part in module.modules():
        for name, own in part._parameters.items():
            if own is not None and own.device != device:
                part._parameters[name] = nn.Parameter(own.data.to(device), own.requires_grad)
        for name, own in part._buffers.items():
            part._buffers[name] = own if own is None else own.to(device)
    return module


TO, nn.Module.to = nn.Module.to, moved
ASSUMED.set(Machine(capability=(10, 0), torch=torch.__version__))


def on_the_device(case: Callable[[Path], None]) -> Callable[[Path], None]:
    """Count inside a case."""

    def counted(folder: Path) -> None:
        with COUNTS:
            case(folder)

    return counted


def workload(name: str, folder: Path) -> None:
    """Run a small instance from beginning to end; every second step is measured."""
    own = SMALL[name](folder)
    with COUNTS:
        list(
            own.model_copy(update=SHORTER.get(name, {})).records(
                TrialRun(NVFP4, 0, "emulated", "cuda", OFTEN)
            )
        )


FUNCTION = """
import torch, __main__
def train(trial):
    __main__.COUNTS.__enter__()  # in the thread of the function, which ends after what follows the function
    model = trial.convert(torch.nn.Sequential(torch.nn.Linear(32, 32)), blocks="*").to(trial.device)
    optimizer = torch.optim.AdamW(model.parameters())
    trial.checkpoint(model=model, optimizer=optimizer)
    for _ in trial.steps():
        with trial.step():
            x = torch.ones(4, 32, device=trial.device)
            trial.compare_gradient(lambda: model(x).square().mean().backward())
            loss = model(x).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trial.log({"train/loss": loss.item()})
    with trial.evaluation(), torch.no_grad():
        trial.log({"val/loss": model(torch.ones(4, 32, device=trial.device)).mean().item()})
"""


def function(folder: Path) -> None:
    """Run a function of the user's own."""
    (folder / "train.py").write_text(FUNCTION)
    list(
        Python(file=str(folder / "train.py"), steps=3).records(TrialRun(NVFP4, 0, "emulated", "cuda", OFTEN))
    )


@on_the_device
def convert(folder: Path) -> None:
    """Train and evaluate a converted model of the user's own, and search its step.

    Raises:
        AssertionError: the last step, of which nothing is measured, waits for the device.
    """
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32)])}).to("cuda")
    engine = ablate.convert(model, "nvfp4", steps=3, blocks="*")
    optimizer = torch.optim.AdamW(model.parameters())

    def backward() -> None:
        y = torch.ones(4, 32, device="cuda")
        for layer in model["blocks"]:
            y = layer(y)
        y.square().mean().backward()

    for _ in range(3):
        COUNTS.reset()
        with engine.step():
            backward()
            optimizer.step()
            optimizer.zero_grad()
            if engine.steps_done == 0:
                engine.first_nonfinite(backward)
    assert not COUNTS.waits, COUNTS.waits
    assert not COUNTS.copies, COUNTS.copies
    engine.alarms()


@on_the_device
def operands(folder: Path) -> None:
    """Count operands of many steps; AssertionError if that waits for the device once slots repeat."""
    count, largest = NonfiniteCount(), torch.ones((), device="cuda")
    for step in range(64):
        if step == 32:
            COUNTS.reset()
        for slot in SLOTS:
            count.add(largest, step, slot)
    assert COUNTS.kernels, "nothing was looked at"
    assert not COUNTS.waits, COUNTS.waits
    assert not COUNTS.copies, COUNTS.copies


@on_the_device
def split(folder: Path) -> None:
    """Split the error of a gradient of several parameters; AssertionError unless it waits once."""
    gradients = [torch.ones(8, 4, device="cuda"), torch.ones(3, device="cuda")]
    COUNTS.reset()
    gradient_split([gradients, gradients], gradients)
    assert COUNTS.waits.total() == 1, COUNTS.waits


@on_the_device
def diverged(folder: Path) -> None:
    """Search the first value that is not finite: a search that finds none, and one that finds it at once."""
    config, loop = gpt(write_shards(folder), layers=1, steps=1), "training/loop.py"
    for kind, files in {"unknown": (loop,), "parameter": (loop, "training/first_nonfinite.py")}.items():
        COUNTS.not_finite = files
        *_, last = config.records(TrialRun(NVFP4, 0, "emulated", "cuda", SELDOM))
        assert last.origin is not None, last
        assert last.origin.kind == kind, last.origin


def _windows(recipe: Recipe, shards: str) -> None:
    """Train a trunk of bf16 and a window of the recipe from it."""
    config = gpt(shards, layers=1)
    forks = Forks(trunk=PRESETS["bf16"](), positions=(1,), windows=(1,))
    list(
        train_forks(
            lambda each: config.prepare(each, 0, "cuda"),
            config,
            TrialRun(recipe, 0, "emulated", "cuda", OFTEN, forks=forks),
        )
    )


@on_the_device
def forked(folder: Path) -> None:
    """Train a trunk and a window from it."""
    _windows(NVFP4, write_shards(folder))


@on_the_device
def mapped(folder: Path) -> None:
    """Fork an arm of a map: one product in one kind of layer, whose errors are four times as large."""
    shards = write_shards(folder)
    layers = gpt(shards, layers=1).linear_layers
    cell = grid(NVFP4, layers, "kinds", "products")["mlp.up wgrad"]
    _windows(within(NVFP4, layers, [cell], times=4.0), shards)


@on_the_device
def resumed(folder: Path) -> None:
    """Continue from the state of another run, whose tensors a checkpoint's file gives on the CPU."""
    config = gpt(write_shards(folder), layers=1)
    first = Loop(config.prepare(NVFP4, 0, "cuda"), config, OFTEN)
    first.step(0)
    state = pytree.tree_map_only(Tensor, lambda x: torch.ones(x.shape, dtype=x.dtype), first.state(1))
    second = Loop(config.prepare(NVFP4, 0, "cuda"), config, OFTEN)
    second.step(second.restore(state))


@on_the_device
def experts(folder: Path) -> None:
    """Train a gpt with experts, and measure a step; on tensor cores, by the shape functions of torch's products.

    Numbers that are read from the device are 1, so each of the 2 tokens has an expert of its own.
    """
    size = {"layers": 1, "steps": 2, "batch": 1, "context": 2, "eval_batch": 1, "eval_tokens": 2}
    config = gpt(write_shards(folder), **size, experts={"count": 2, "top_k": 1})
    for engine in ("emulated", "scaled_mm"):
        list(config.records(TrialRun(NVFP4, 0, engine, "cuda", OFTEN)))
        native = [place for place in COUNTS.by_place()["kernels"] if "engines/scaled_mm.py" in place]
        assert bool(native) == (engine == "scaled_mm"), native


@on_the_device
def experts_together(folder: Path) -> None:
    """Quantise the operands of eight experts by as many launches as those of two: each has one token."""
    launches = []
    for count in (2, 8):
        size = {"layers": 1, "steps": 2, "batch": 1, "context": count, "eval_batch": 1, "eval_tokens": count}
        config = gpt(write_shards(folder), **size, experts={"count": count, "top_k": 1})
        loop = Loop(config.prepare(NVFP4, 0, "cuda"), config, Telemetry(every=0, shadow=0, log=1000))
        loop.step(0)
        COUNTS.reset()
        loop.step(1)
        places = COUNTS.by_place()["kernels"].items()
        launches.append(sum(number for place, number in places if "kernels/general_cuda.py" in place))
    assert 0 < launches[0] == launches[1], launches


CASES: dict[str, Callable[[Path], None]] = {
    **{name: lambda folder, name=name: workload(name, folder) for name in TRAINED},
    "convert": convert,
    "operands": operands,
    "split": split,
    "diverged": diverged,
    "experts": experts,
    "experts together": experts_together,
    "forked": forked,
    "mapped": mapped,
    "resumed": resumed,
    "python": function,  # the last, since its counting does not end
}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.get_autocast_gpu_dtype = lambda: torch.bfloat16
    torch.version.cuda = "13.0"  # a build for CUDA, as the choice of kernels asks
    results = {}
    for name in sys.argv[1:] or CASES:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(sys.stderr):
            COUNTS.reset()
            COUNTS.not_finite = ()
            try:
                CASES[name](Path(folder))
                error = ""
            except Exception as raised:  # of whatever class: the test says which case fails
                error = f"{type(raised).__name__}: {raised}"[:400]
        places = COUNTS.by_place()
        results[name] = {
            "error": error,
            "kernels": places["kernels"].total(),
            "strays": dict(places["strays"]),
        }
    print(json.dumps(results))
