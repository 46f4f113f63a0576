"""`ablate init`: write an experiment, and on request a training file, to start from."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from ablate.cli.common import console
from ablate.cli.init_stacks import STACKS
from ablate.errors import InputError
from ablate.files import no_folder_name

_EXPERIMENT = """\
schema: 1
question: Does stochastic rounding of the gradients matter for my model?
{workload}
recipe: nvfp4                  # a preset (docs/reference/recipes.md), or a file: my_recipe.yaml
ablate:                        # the knobs to turn, and their values; every combination is an arm
  sr: [true, false]            #   stochastic rounding of the gradients
  # rht: [true, false]         #   random Hadamard transform
  # {knob}
answer: {{knob: sr}}             # the comparison that answers; named before the first run
against: bf16                  # the baseline, at the same seeds and the same values of the workload
seeds: {seeds}                       # runs of each arm; a verdict needs 3, small effects need more
{design}metric: {{name: val/loss, direction: minimize{effect}

# ablate plan {name}.yaml        arms, trials and time, in a second; runs nothing
# ablate sweep {name}.yaml       runs it, or continues it; at the end it names the report
"""
_COMPARISON = """\
schema: 1
question: Does my rounding of the gradient serve as well as rounding to nearest?
{workload}
recipe: nvfp4                  # a preset (docs/reference/recipes.md), or a file: my_recipe.yaml
arms:                          # both copies of the output gradient, dgrad's and wgrad's, are rounded alike
  nearest: {{recipe.dgrad.g.rounding: nearest, recipe.wgrad.g.rounding: nearest}}
  mine:
    recipe.dgrad.g.rounding: "{name}_rounding.py:mine"
    recipe.wgrad.g.rounding: "{name}_rounding.py:mine"
answer: {{arm: mine, against: nearest}}  # the comparison that answers; named before the first run
against: bf16                  # the baseline, at the same seeds
seeds: {seeds}                       # runs of each arm; a verdict needs 3, small effects need more
{design}metric: {{name: val/loss, direction: minimize{effect}

# ablate check {name}_rounding.py:mine   its contract: one line for each property
# ablate sweep {name}.yaml               runs the comparison, or continues it
# So few steps show noise at once and bias late, which favours nearest. To confirm the answer by full runs,
# copy this file to {name}_full.yaml, without `design` and with more steps: ablate sweep {name}_full.yaml
"""
_MAP = """\
schema: 1
question: Which layers does the damage of nvfp4 come from, and which should stay in bf16?
workload:                      # gpt, mae or finetune; for python list globs on names as `layers` of the map
  gpt: {{layers: 4, width: 64, heads: 2, batch: 2, steps: 300, lr: 1.0e-3}}
recipe: nvfp4                  # a preset (docs/reference/recipes.md), or a file: my_recipe.yaml
map:                           # each part alone in the recipe, everything else in bf16
  layers: blocks               #   or kinds (the same layer of all blocks), layers, model
  operands: products           #   or recipe (whole layers), operands
  times: 4                     #   its error is amplified, or one part could not be seen
against: bf16                  # the baseline, at the same seeds
seeds: 8                       # at least 4; parts with small damage need more
metric: {{name: val/loss, direction: minimize}}

# ablate sweep {name}.yaml       runs it, or continues it
# Then compare arms with skip_first and skip_last on fresh seeds: docs/use/export.md
"""
_ROUNDING = '''\
"""A rounding of my own, for `rounding` of a recipe's operand (docs/use/own_numerics.md)."""

import torch


def mine(y, grid, bits, width):
    """Round the scaled elements y [row tiles, rows, column tiles, columns]; a tile shares a block scale.

    grid.neighbours(|y|) are the values at or below and at or above each magnitude: on the grid both are the
    magnitude itself, and beyond it both are grid.max. grid.step(|y|) is the distance to the next value, also
    on the grid. bits are random integers below 2 ** width in fp32, one for each element (bits.long() for bit
    operations): leave out both if nothing is drawn. Return values of the grid; never draw from a generator.

    This one draws only where an element is near the middle of two values, and rounds to nearest elsewhere.
    """
    lower, upper = grid.neighbours(y.abs())
    part = ((y.abs().clamp(max=grid.max) - lower) / (upper - lower)).nan_to_num(0.0)  # 0 / 0 on the grid
    drawn = (part * 2**width).floor() > bits
    up = torch.where((part - 0.5).abs() < 0.25, drawn, part > 0.5)
    return torch.where(up, upper, lower).copysign(y)
'''
_BUILT_IN = """\
workload:                      # gpt, mae, finetune (docs/learn/experiments.md); python: your own
  gpt: {{layers: 2, width: 64, heads: 2, batch: 2, steps: 300, lr: 5.0e-4}}"""
_FORKS = """\
design:                        # every arm continues the same bf16 run, for 15 and 30 steps from step 210;
  {trunk: bf16, positions: [0.7], window: 0.05, horizons: [1, 2], bad: mxfp4}   # leave it out for full runs
"""
_FORKS_OF_OWN = """\
design:                        # every arm continues from `start`, for 15 and 30 steps
  {trunk: start, window: 0.075, horizons: [1, 2], bad: mxfp4}
"""
_START = """
    start: {name}_start.pt     # the checkpoint that they continue; save yours from your bf16 run"""
_OWN = """\
workload:
  python:                      # your own training function; check it first: ablate check {name}.yaml
    file: {name}_train.py{start}
    steps: 200
    tokens_per_step: 64        # tokens or samples of a step, for tokens/s
    config: {{width: 64, lr: 3.0e-3}}     # read as trial.config.width"""
_TRAINING = '''\
"""A training function for a sweep. Replace model, data and loss by your own; lines with `trial` stay."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.stem, self.head = nn.Linear(16, width), nn.Linear(width, 16)
        self.blocks = nn.ModuleList(Block(width) for _ in range(4))

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def task():
    """Return training and validation data, the same for every seed."""
    generator = torch.Generator().manual_seed(0)
    inputs, turn = torch.randn(2048, 16, generator=generator), torch.randn(16, 16, generator=generator) / 4
    data = torch.utils.data.TensorDataset(inputs, torch.tanh(inputs @ turn))
    return torch.utils.data.TensorDataset(*data[:1792]), data[1792:]


def train(trial):
    torch.manual_seed(trial.seed)                       # of the weights and of the order of the data
    training, validation = task()
    model = trial.convert(Net(trial.config.width)).to(trial.device)
    optimizer = torch.optim.AdamW(model.parameters(), lr=trial.config.lr)
    trial.checkpoint(model=model, optimizer=optimizer)  # what a killed run continues from
    loader = torch.utils.data.DataLoader(training, 64, shuffle=True)
    for _, (x, y) in trial.steps(loader):
        with trial.step():                              # forward, backward and optimizer by the recipe
            loss = (model(x.to(trial.device)) - y.to(trial.device)).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trial.log({"train/loss": loss.item()})
    with trial.evaluation(), torch.no_grad():
        x, y = validation
        trial.log({"val/loss": (model(x.to(trial.device)) - y.to(trial.device)).square().mean().item()})
'''
_OF_FORKS = {
    "lr=trial.config.lr)\n": """\
    saved = torch.load(trial.start, weights_only=True)  # each window continues the checkpoint
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
""",
    "in trial.steps(loader):\n": """\
        for group in optimizer.param_groups:
            group["lr"] = trial.config.lr * trial.lr_factor  # falls to 0 in a window
""",
}
"""Lines of a training function behind others, if its windows continue a checkpoint."""
_SAVING = """

if __name__ == "__main__":                              # stands for your bf16 run, and saves its checkpoint
    torch.manual_seed(0)
    model = Net(64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    for _ in range(10):
        for x, y in torch.utils.data.DataLoader(task()[0], 64, shuffle=True):
            (model(x) - y).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
    states = {"model": model.state_dict(), "optimizer": optimizer.state_dict()}
    torch.save(states, __file__.replace("_train.py", "_start.pt"))
"""


def init(
    name: Annotated[str, typer.Argument()] = "experiment",
    training: bool = False,
    torchtitan: bool = False,
    megatron: bool = False,
    hf: bool = False,
    rounding: bool = False,
    forks: bool = False,
    by_map: Annotated[bool, typer.Option("--map")] = False,
    schema: bool = False,
    folder: Path = Path(),
) -> None:
    """Write NAME.yaml, a commented experiment to start from. Existing files are never overwritten.

    Args:
        name: Name of the experiment.
        training: Also write a training file of your own, NAME_train.py.
        torchtitan: Sweep a job of torchtitan, which NAME_job.sh starts.
        megatron: Sweep a job of Megatron-LM, which NAME_job.sh starts.
        hf: Sweep a script with transformers' Trainer, NAME_train.py.
        rounding: Compare a rounding of your own, NAME_rounding.py, with nearest.
        forks: Compare short windows from a bf16 run, with less noise.
        by_map: Map which layers a recipe's damage comes from.
        schema: Print the JSON Schema of an experiment, for editors; write nothing.
        folder: Folder to write to.
    """
    if schema:
        from ablate.experiment.schema import json_schema

        print(json.dumps(json_schema(), indent=2))
        return
    if why := no_folder_name(name):
        raise InputError(f"{why}; give a name such as rht_sr, and the folder with --folder")
    chosen = [stack for stack, on in (("torchtitan", torchtitan), ("megatron", megatron), ("hf", hf)) if on]
    kinds = {"training": training, "rounding": rounding, "forks": forks, "map": by_map}
    named = [*chosen, *(word for word, on in kinds.items() if on)]
    if len(named) > 1 and named != ["training", "forks"]:
        raise InputError(f"--{' and --'.join(named)} write different files; give one of them")
    text = _MAP.format(name=name) if by_map else experiment_text(name, training, rounding, forks)
    files = {f"{name}.yaml": text}
    files |= {f"{name}_train.py": _training_text(forks)} if training else {}
    files |= {f"{name}_rounding.py": _ROUNDING} if rounding else {}
    if chosen:
        if not name.translate(str.maketrans("-_.", "aaa")).isalnum() or not name.isascii():
            why = "is part of the job's command; use letters, digits, '-', '_' and '.'"
            raise InputError(f"{name!r}: the name {why}")
        files = STACKS[chosen[0]].files(name)
    _write(folder, files)
    screen = console()
    screen.print(*(f"wrote {folder / file}" for file in files), sep="\n")
    subject = f"{name}_rounding.py:mine" if rounding else f"{name}.yaml"
    if training and forks:
        start = f"{folder / name}_start.pt, the bf16 checkpoint that every arm continues"
        screen.print(f"Next: python {folder / name}_train.py writes {start}; or save yours there")
    screen.print(f"Next: ablate {'check' if training or rounding else 'plan'} {folder / subject}")


def _write(folder: Path, files: Mapping[str, str]) -> None:
    """Write files by name; InputError if one exists already, or cannot be written."""
    there = [folder / file for file in files if (folder / file).exists()]
    if there:
        raise InputError(*[f"{file}: exists already; give another name" for file in there])
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for file, text in files.items():
            (folder / file).write_text(text)
    except OSError as error:
        raise InputError(f"{error.filename}: {error.strerror}") from None


def _training_text(forks: bool) -> str:
    """Return the content of a training file, with what windows from a checkpoint need on request."""
    text = _TRAINING + _SAVING * forks
    for line, more in _OF_FORKS.items() if forks else ():
        text = text.replace(line, line + more)
    return text


def experiment_text(name: str, training: bool = False, rounding: bool = False, forks: bool = False) -> str:
    """Return the content of a commented experiment: whole runs, but for a rounding, and on request, forks."""
    own, forked = training and forks, forks or rounding
    start = _START.format(name=name) if own else ""
    workload = (_OWN if training else _BUILT_IN).format(name=name, start=start)
    knob = "lr: [1.0e-3, 2.0e-3]"
    if training:
        knob = "workload.config.lr: [1.0e-3, 3.0e-3]" if own else "workload.config.width: [64, 128]"
    least = f", min_effect: {0.001 if forked else '10%' if training else 0.005}}}  # smaller do not matter"
    parts = {
        "workload": workload,
        "knob": knob,
        "seeds": 8 if forked else 5,
        "design": (_FORKS_OF_OWN if own else _FORKS) if forked else "",
        "effect": "}  # what matters: a fifth of mxfp4's damage" if own else least,
    }
    return (_COMPARISON if rounding else _EXPERIMENT).format(name=name, **parts)
