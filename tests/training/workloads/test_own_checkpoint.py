"""A user's own loop goes on from the user's own checkpoint in windows: rate, data, parts of the evaluation, refusals."""

import json
import math
import textwrap
from itertools import islice
from pathlib import Path

import pytest
import torch
from support.commands import here
from support.experiments import sweep
from torch import nn

from ablate.errors import InputError
from ablate.experiment.load import load
from ablate.recipes import PRESETS
from ablate.results.comparisons import Comparisons
from ablate.results.forked import readings_of
from ablate.results.sensitivity import sensitivity
from ablate.store.ledger import Ledger
from ablate.training.checkpoints import Checkpoints
from ablate.training.fork_design import Forks
from ablate.training.loop import Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.python import Python
from ablate.verification.workload_checks import Runs, promises

UNMEASURED = Telemetry(every=0, shadow=0, log=1)
CODE = """\
import torch
from torch import nn


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up = nn.Linear(32, 32)

    def forward(self, x):
        return x + torch.tanh(self.up(x))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(2)])

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return x


def data(seed, step):
    return torch.randn(16, 32, generator=torch.Generator().manual_seed(1000 * seed + step))


def losses(model):
    return [(model(data(999, part)) - 1).square().mean().item() for part in range(12)]


def train(trial):
    model = trial.convert(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = torch.load(trial.start, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    trial.checkpoint(model=model, optimizer=optimizer)
    for step, x in trial.steps(lambda step: data(trial.seed, step)):
        for group in optimizer.param_groups:
            group["lr"] = 0.1 * trial.lr_factor
        with trial.step():
            loss = (model(x) - 1).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        trial.log({"train/loss": loss.item()})
    with trial.evaluation(), torch.no_grad():
        trial.log_batches(losses(model))
"""


@pytest.fixture
def folder(tmp_path) -> Path:
    """A training file and a checkpoint that ten steps at the full rate have left."""
    (tmp_path / "train.py").write_text(CODE)
    torch.manual_seed(0)
    space: dict = {}
    exec(CODE, space)
    model = space["Net"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    for step in range(10):
        (model(space["data"](7, step)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, tmp_path / "step_10.pt")
    return tmp_path


def workload(folder: Path) -> Python:
    return Python(file=str(folder / "train.py"), start=str(folder / "step_10.pt"), steps=8)


def forked(folder: Path, anneal: bool = True, **keys) -> list:
    forks = Forks(trunk=None, positions=(0,), windows=(2, 4), anneal=anneal)
    recipe = PRESETS[keys.pop("recipe", "bf16")]()
    return list(
        workload(folder).records(TrialRun(recipe, 3, "emulated", "cpu", UNMEASURED, forks=forks, **keys))
    )


def by_hand(folder: Path, steps: int) -> float:
    """The window in plain torch, at rates .1, .1 (1 - 1/w), ..."""
    space: dict = {}
    exec(CODE, space)
    model: nn.Module = space["Net"]()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    saved = torch.load(folder / "step_10.pt", weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
    for step in range(steps):
        optimizer.param_groups[0]["lr"] = 0.1 * (1 - step / steps)
        (model(space["data"](3, step)) - 1).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    with torch.no_grad():
        losses = space["losses"](model)
    return math.fsum(losses) / len(losses)


def test_every_window_ends_where_plain_torch_ends_from_the_same_checkpoint(folder):
    values = {}
    for record in forked(folder, recipe="fp32"):
        values |= record.metrics
    for steps in (2, 4):
        assert values[f"fork/0/{steps}/loss"] == pytest.approx(by_hand(folder, steps), rel=1e-6)


def test_the_falling_rate_is_what_the_factor_makes_of_it(folder):
    falling, constant = (forked(folder, anneal)[-1].metrics["val/loss"] for anneal in (True, False))
    assert falling != constant


def test_losses_of_batches_give_parts_from_which_the_evaluations_error_follows(folder):
    values = {}
    for record in forked(folder):
        values |= record.metrics
    readings = readings_of([(3, values)], "loss")
    assert sorted(readings.parts) == list(range(12))
    mean = math.fsum(part[3] for part in readings.parts.values()) / 12
    assert values["val/loss"] == pytest.approx(mean)
    whole = list(workload(folder).records(TrialRun(PRESETS["bf16"](), 3, "emulated", "cpu", UNMEASURED)))[
        -1
    ].metrics
    assert not any(name.startswith("evaluated/") for name in whole)


def test_a_window_that_was_interrupted_goes_on_bit_for_bit(folder, tmp_path):
    path = tmp_path / "checkpoint.pt"
    forks = Forks(trunk=None, positions=(0,), windows=(2, 4))
    recipe = PRESETS["nvfp4"]()

    def records(checkpoints):
        return workload(folder).records(
            TrialRun(recipe, 3, "emulated", "cpu", UNMEASURED, checkpoints, forks)
        )

    whole = list(records(None))
    first = records(Checkpoints(path, "check", 0))
    taken = list(islice(first, 5))  # two steps of the first window, and into the second
    first.close()
    again = Checkpoints(path, "check", 0)
    rest = list(records(again))
    assert again.resumed is not None
    assert rest[-1].metrics["val/loss"] == whole[-1].metrics["val/loss"]
    assert taken[0].step < rest[0].step


@pytest.mark.slow
@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("0.1 * trial.lr_factor", "0.1", "read trial.lr_factor in 0 of"),
        ("0.1 * trial.lr_factor", "0.1 + 0 * trial.lr_factor", "and one without give the same numbers"),
    ],
    ids=["not read", "read without effect"],
)
def test_check_finds_a_rate_that_does_not_fall(folder, old, new, said):
    path = folder / "train.py"
    whole = promises(Runs(workload(folder), anneals=True))
    assert [(promise.name, promise.detail) for promise in whole if not promise.kept] == []
    path.write_text(CODE.replace(old, new))
    broken = [promise for promise in promises(Runs(workload(folder), anneals=True)) if not promise.kept]
    ((name, detail),) = [(promise.name, promise.detail) for promise in broken]
    assert (name, said in detail) == ("the learning rate falls in a window", True), detail
    assert "multiply the rate by trial.lr_factor" in broken[0].remedy


LOADED = """\
    saved = torch.load(trial.start, weights_only=True)
    model.load_state_dict(saved["model"])
    optimizer.load_state_dict(saved["optimizer"])
"""


@pytest.mark.parametrize(
    ("loads", "kept"),
    [
        (LOADED, True),
        (LOADED.replace("trial.start", "trial.start or 'other.pt'"), True),
        ("", False),
        ("    if not trial.forked:\n" + textwrap.indent(LOADED, "    "), False),
    ],
    ids=["loads", "has a default", "loads nothing", "loads in whole runs alone"],
)
def test_check_refuses_a_start_that_the_code_does_not_load(folder, loads, kept):
    (folder / "train.py").write_text(CODE.replace(LOADED, loads))
    made = promises(Runs(workload(folder), anneals=True))
    promise = next(each for each in made if "start" in each.name)
    assert (promise.kept, promise.refused) == (kept, not kept)


def test_a_refused_start_is_bad_input(folder):
    (folder / "train.py").write_text(CODE.replace(LOADED, ""))
    assert here("check", experiment(folder, "{trunk: start}")).returncode == 2


def experiment(folder: Path, design: str, start: str = "step_10.pt") -> Path:
    path = folder / "own.yaml"
    where = f", start: {start}" if start else ""
    path.write_text(
        "schema: 1\nquestion: Does it?\n"
        f"workload: {{python: {{file: train.py, steps: 8{where}}}}}\n"
        f"ablate: {{sr: [true, false]}}\nnull: true\ndesign: {design}\n"
    )
    return path


@pytest.mark.parametrize(
    ("design", "start", "said"),
    [
        ("{trunk: start}", "", "workload.start: is missing: trunk: start goes on from your checkpoint"),
        ("{trunk: step_10.pt}", "step_10.pt", "write trunk: start, and the file as workload.start"),
        ("{trunk: bf16}", "step_10.pt", "write trunk: start, and the checkpoint that it goes on from"),
    ],
)
def test_a_trunk_that_is_not_there_is_refused_with_what_to_write(folder, design, start, said):
    with pytest.raises(InputError, match=said):
        load(experiment(folder, design, start), device="cpu")


def test_the_plan_says_how_long_windows_are(folder):
    done = here("plan", experiment(folder, "{trunk: start, window: 0.25}"), "--state", folder / "runs")
    assert (
        "Forks: every arm trains windows of 2, 4 and 8 steps from the weights that the workload"
        in done.stdout
    )


@pytest.mark.slow
def test_a_map_by_globs_trains_each_group_of_the_checkpoints_layers_alone(folder):
    globs = ["blocks.0.*", "blocks.1.*"]
    path = folder / "map.yaml"
    path.write_text(
        "schema: 1\nquestion: Where?\nrecipe: nvfp4\nseeds: 2\n"
        "workload: {python: {file: train.py, steps: 8, start: step_10.pt}}\n"
        f"map: {{layers: {json.dumps(globs)}, operands: recipe, times: 16}}\n"
        "design: {trunk: start, window: 0.5, horizons: [1]}\n"
    )
    sweep(load(path, device="cpu"), folder / "runs")
    mapped = Comparisons(Ledger(folder / "runs" / "sweeps" / "map" / "ledger.db"))
    losses = {arm.name: {*arm.values.values()} for arm in mapped.arms}
    assert [*losses] == ["bf16", *globs, "everything", "nvfp4"]
    assert len(set.union(*losses.values())) == 2 * len(losses)  # none trains what another does
    assert [cell.name for cell in sensitivity(mapped).cells] == globs


def plain(folder: Path) -> list:
    return list(workload(folder).records(TrialRun(PRESETS["bf16"](), 3, "emulated", "cpu", UNMEASURED)))


@pytest.mark.parametrize("records", [forked, plain])
@pytest.mark.parametrize(
    ("losses", "said"),
    [
        ([], "val/loss has no losses"),
        (["x"], "could not convert"),
        ([1.0, None], "None, which is no number"),
        ([10**400], "too large"),
    ],
)
def test_losses_that_are_none_are_refused(folder, records, losses, said):
    path = folder / "train.py"
    path.write_text(CODE.replace("trial.log_batches(losses(model))", f"trial.log_batches({losses!r})"))
    with pytest.raises(ValueError, match=said):
        records(folder)
