"""A training function of one's own as a workload: what it may do, what identifies it, what `ablate check` finds."""

import io
import math
import os
import re
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path

import psutil
import pytest
from rich.console import Console
from support.commands import here
from support.workloads import OWN_CODE

from ablate import own_source
from ablate.cli.check import ProgressLine
from ablate.cli.init import init
from ablate.errors import InputError
from ablate.execution.messages import TrialRequest
from ablate.execution.supervisor import Supervisor
from ablate.experiment.load import load
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS
from ablate.training.checkpoints import Checkpoints
from ablate.training.fork_design import Window
from ablate.training.loop import Record, Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.python import Python, code_of, in_window
from ablate.verification.workload_checks import Runs, promises

UNMEASURED = Telemetry(every=0, shadow=0, log=1)


@pytest.fixture
def code(tmp_path) -> Path:
    """A folder with a user's training file and model."""
    return Path(shutil.copytree(OWN_CODE, tmp_path / "code", ignore=shutil.ignore_patterns("__pycache__")))


def changed(code: Path, *edits: tuple[str, str], file: str = "train.py") -> Path:
    text = (code / file).read_text()
    for old, new in edits:
        assert old in text
        text = text.replace(old, new)
    (code / file).write_text(text)
    return code / file


def workload(code: Path, **fields) -> Python:
    return Python(
        **({"file": str(code / "train.py"), "steps": 4, "config": {"width": 32, "lr": 1e-2}} | fields)
    )


def records(config: Python, recipe: str = "nvfp4", seed: int = 0) -> list:
    return list(config.records(TrialRun(PRESETS[recipe](), seed, "emulated", "cpu", UNMEASURED)))


def spec_id(config: Python) -> str:
    return TrialSpec(
        workload="python", config=config, recipe=PRESETS["nvfp4"](), seed=0, engine="emulated", device="cpu"
    ).id


# --- the contract, and five mistakes ------------------------------------------------------------------

MISTAKES = {
    "it honours the seed": [("torch.manual_seed(trial.seed)", "torch.manual_seed(0)")],
    "it repeats": [
        ("import torch\n", "import numpy as np\nimport torch\n"),
        (
            "data = torch.randn(48, 16, 8)",
            "data = torch.from_numpy(np.random.default_rng().normal(size=(48, 16, 8))).float()",
        ),
    ],
    "it resumes": [("trial.checkpoint(model=model, optimizer=optimizer)", "trial.checkpoint(model=model)")],
    "no checkpoint was written": [("    trial.checkpoint(model=model, optimizer=optimizer)\n", "")],
    "none of the 4 converted layers was called": [
        ("import torch\n", "import copy\n\nimport torch\n"),
        (
            "model = trial.convert(Net(trial.config.width))",
            "model = Net(trial.config.width)\n    trial.convert(copy.deepcopy(model))",
        ),
    ],
}


@pytest.mark.slow
def test_a_right_function_keeps_all_promises(code):
    found = list(promises(Runs(workload(code, steps=6), recipe=PRESETS["mxfp8"]())))
    assert len(found) == 7
    assert [promise for promise in found if not promise.kept] == []
    assert "nvfp4" not in "".join(promise.detail for promise in found)


@pytest.mark.slow
@pytest.mark.parametrize("name", MISTAKES)
def test_a_planted_mistake_is_named_with_its_remedy(name, code):
    changed(code, *MISTAKES[name])
    broken = [promise for promise in promises(Runs(workload(code, steps=6))) if not promise.kept]
    assert name in f"{broken[0].name}: {broken[0].detail}"
    assert broken[0].remedy


def test_a_function_that_ends_before_its_last_step_is_named(code):
    logs = 'trial.log({"train/loss": loss.item()})'
    changed(code, (logs, f"{logs}\n        if _ == 2:\n            break"))
    broken = [promise for promise in promises(Runs(workload(code, steps=6))) if not promise.kept]
    assert "step 3 of 6" in broken[0].detail


def test_the_first_broken_promise_ends_the_checks(code):
    changed(code, ('trial.log({"train/loss": loss.item()})', "pass"), ("trial.log(", "print("))
    (only,) = promises(Runs(workload(code)))
    assert (only.kept, only.detail) == (False, "no metric was logged")


def test_a_forgotten_step_is_named_at_the_call_of_the_model(code):
    """The model's own `forward` is in another file, which has no mistake."""
    changed(
        code,
        ("trial.compare_gradient(lambda x=x: loss_of(model, x).backward())", "pass"),
        ("with trial.step():", "if True:"),
        ("loss = loss_of(model, x)", "loss = model(x).mean()"),
    )
    (only,) = promises(Runs(workload(code)))
    text = (code / "train.py").read_text().splitlines()
    line = next(number for number, words in enumerate(text, 1) if "loss = model(x)" in words)
    assert "call the model inside `with trial.step():`" in only.detail
    assert only.detail.endswith(f"train.py:{line})")


def test_files_that_the_code_reads_and_its_identity_does_not_have_are_named(code):
    names = {"top.json", "late.txt", "other.py", "listed.txt"}
    for name in names:
        (code / name).write_text("1")
    here_is = f"import pathlib\nHERE = pathlib.Path({str(code)!r})\n"
    changed(
        code,
        ("import torch\n", f"import torch\n{here_is}TOP = (HERE / 'top.json').read_text()\n"),
        (
            "    torch.manual_seed(trial.seed)\n",
            "    torch.manual_seed(trial.seed)\n    (HERE / 'other.py').read_text()\n"
            "    open(HERE / 'late.txt').close(), open(HERE / 'listed.txt').close()\n"
            "    (HERE / 'own.txt').write_text('1'), (HERE / 'own.txt').read_text()\n",
        ),
    )
    runs = Runs(workload(code, data=(str(code / "listed.txt"),)))
    runs.records()
    assert [path.name for path in runs.unseen] == ["late.txt", "other.py", "top.json"]


def test_progress_is_a_line_once_the_output_was_silent_for_a_while():
    screen, now = Console(file=io.StringIO(), width=80), [0.0]
    with screen.status("") as status:
        show = ProgressLine(screen, status, lambda: now[0])
        for now[0], text in ((1.0, "run 1"), (11.0, "run 2"), (12.0, "run 3"), (22.0, "run 4")):
            show(text)
    assert screen.file.getvalue().split() == ["...", "run", "2", "...", "run", "4"]


def test_an_error_is_reported_with_its_line(code):
    changed(code, ("loss.backward()\n            optimizer", "loss.backwart()\n            optimizer"))
    (only,) = promises(Runs(workload(code)))
    assert not only.kept
    assert "backwart" in only.detail
    line = next(
        n for n, text in enumerate((code / "train.py").read_text().splitlines(), 1) if "backwart" in text
    )
    assert f"train.py:{line}" in only.detail


# --- where the function is -----------------------------------------------------------------------------


def as_package(code: Path, folder: Path) -> Path:
    """The user's code as a package `mine`, which imports its model from itself."""
    package = folder / "mine"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text("")
    (package / "model.py").write_text((code / "model.py").read_text())
    (package / "loop.py").write_text((code / "train.py").read_text().replace("from model", "from .model"))
    return package


def losses(config: Python) -> list[float]:
    return [record.metrics.get("train/loss") for record in records(config)]


def test_a_function_may_be_given_by_its_module_in_the_experiments_folder(code):
    expected, package = losses(workload(code)), as_package(code, code / "below")
    given = workload(code, file=str(code / "below"), function="mine.loop:train")
    assert list(given.problems()) == []
    assert losses(given) == expected
    before = given.fingerprint()
    (package / "notes.py").write_text("unrelated = True\n")
    assert given.fingerprint() == before
    for edited in ("model.py", "__init__.py"):
        (package / edited).write_text((package / edited).read_text() + "# edited\n")
        assert given.fingerprint() != before
        before = given.fingerprint()


def test_a_function_may_be_an_entry_point_of_an_installed_package(code, tmp_path, monkeypatch):
    expected, site = losses(workload(code)), tmp_path / "site-packages"
    package = as_package(code, site)
    (site / "torch_unrelated.py").write_text("")
    (package / "loop.py").write_text("import torch_unrelated\n" + (package / "loop.py").read_text())
    information = site / "mine-1.0.dist-info"
    information.mkdir()
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: mine\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text("[ablate.workloads]\nmy_loop = mine.loop:train\n")
    monkeypatch.syspath_prepend(site)
    for function in ("my_loop", "mine.loop:train"):
        given = workload(code, file=str(code), function=function)
        assert list(given.problems()) == []
        assert losses(given) == expected
    own = {path.name for path in own_source.closure(code_of(code, "my_loop"))}
    assert own == {"__init__.py", "loop.py", "model.py"}  # no other installed module
    before = given.fingerprint()
    (package / "model.py").write_text((package / "model.py").read_text() + "# edited\n")
    assert given.fingerprint() != before


@pytest.mark.parametrize(
    ("function", "sentence"),
    [
        ("train", r"'train' names no training function: give `file: train\.py`"),
        ("nowhere.loop:train", r"there is no module nowhere\.loop, beside the experiment or installed"),
        ("json.nowhere:train", r"there is no module json\.nowhere in .*json"),
        ("train:tarin", r"train\.py has no function 'tarin' at its top level; .*train"),
        ("train.py:train", r"there is no module train\.py"),
        ("../train:train", r"is not of the form module:function"),
    ],
)
def test_a_function_that_is_nowhere_is_refused_with_what_would_be_right(code, function, sentence):
    ((field, why),) = workload(code, file=str(code), function=function).problems()
    assert field == "function"
    assert re.search(sentence, why)


# --- what identifies a trial --------------------------------------------------------------------------


@pytest.mark.parametrize("beside", [True, False], ids=["beside other files", "alone"])
def test_files_in_a_linked_folder_of_the_data_identify_the_trial(code, tmp_path, beside):
    outside, data = tmp_path / "outside", tmp_path / "data"
    outside.mkdir()
    data.mkdir()
    (outside / "bias.txt").write_text("1.0")
    if beside:
        (data / "plain.txt").write_text("plain")
    (data / "linked").symlink_to(outside)
    (data / "nowhere").symlink_to(tmp_path / "missing")
    (outside / "up").symlink_to(data)  # a circle
    given = workload(code, data=(str(data),))
    assert not list(given.problems())
    before = spec_id(given)
    (outside / "bias.txt").write_text("9.0")
    assert spec_id(workload(code, data=(str(data),))) != before


def test_an_edit_of_the_code_is_another_trial_and_an_unrelated_file_is_not(code):
    (code / "package").mkdir()
    (code / "package" / "__init__.py").write_text("")
    (code / "package" / "part.py").write_text("VALUE = 1\n")
    changed(code, ("import torch\nfrom model", "import torch\nfrom package import part\nfrom model"))
    before = spec_id(workload(code))
    assert {path.name for path in own_source.closure(code_of(code / "train.py", "train"))} == {
        "train.py",
        "model.py",
        "__init__.py",
        "part.py",
    }
    (code / "notes.py").write_text("unrelated = True\n")
    assert spec_id(workload(code)) == before
    moved = Path(shutil.copytree(code, code.parent / "elsewhere"))
    assert spec_id(workload(moved)) == before
    ids = {before}
    for file in ("train.py", "model.py", "package/part.py"):
        (code / file).write_text((code / file).read_text() + "# edited\n")
        ids.add(spec_id(workload(code)))
    (code / "data.bin").write_bytes(b"1")
    ids.add(spec_id(workload(code, data=(str(code / "data.bin"),))))
    (code / "data.bin").write_bytes(b"2")
    ids.add(spec_id(workload(code, data=(str(code / "data.bin"),))))
    ids.add(spec_id(workload(code, start=str(code / "data.bin"))))
    ids.add(spec_id(workload(code, config={"width": 64, "lr": 1e-2})))
    ids.add(spec_id(workload(code, sources=(str(code / "notes.py"),))))
    assert len(ids) == 9


def test_bytecode_from_before_an_edit_is_not_run(tmp_path, monkeypatch):
    """Python takes bytecode for current if size and time of modification of its source are the same."""
    monkeypatch.setattr("sys.dont_write_bytecode", False)
    for name, module in (("far", "1.0"), ("near", "1.0")):
        (tmp_path / f"{name}.py").write_text(f"VALUE = {module}\n")
    (tmp_path / "train.py").write_text(
        "import importlib\nfrom near import VALUE\n\n\ndef train(trial):\n"
        "    far = importlib.import_module('f' + 'ar').VALUE\n"
        "    with trial.step():\n        trial.log({'val/loss': VALUE + 10 * far})\n"
    )
    given = {"steps": 1, "config": {}, "sources": (str(tmp_path / "far.py"),)}
    losses = []
    for near, far in (("1.0", "1.0"), ("2.0", "1.0"), ("2.0", "3.0")):
        for name, value in (("near", near), ("far", far)):
            path = tmp_path / f"{name}.py"
            facts = path.stat()
            path.write_text(f"VALUE = {value}\n")
            os.utime(path, ns=(facts.st_atime_ns, facts.st_mtime_ns))
        losses.append(records(workload(tmp_path, **given), "bf16")[-1].metrics["val/loss"])
    assert [*(tmp_path / "__pycache__").glob("near.*.pyc")]  # Python did write bytecode
    assert losses == [11.0, 12.0, 32.0]


# --- mistakes in the experiment -----------------------------------------------------------------------


def experiment(code: Path, **lines: str) -> Path:
    parts = {
        "workload": "{python: {file: train.py, steps: 4, config: {width: 32, lr: 1.0e-2}}}",
        "ablate": "{sr: [true, false]}",
    } | lines
    path = code / "own.yaml"
    path.write_text(
        "schema: 1\nquestion: Does it?\n" + "".join(f"{key}: {value}\n" for key, value in parts.items())
    )
    return path


def test_an_experiment_names_the_file_beside_it_and_turns_its_config(code, monkeypatch):
    monkeypatch.chdir("/")
    found = load(
        experiment(code, ablate="{sr: [true, false], workload.config.width: [32, 64]}"), device="cpu"
    )
    assert {arm.config.config["width"] for arm in found.arms} == {32, 64}
    assert len(found.arms) == 6
    assert all(arm.config.file == str(code / "train.py") for arm in found.arms)


@pytest.mark.parametrize(
    ("lines", "sentence"),
    [
        ({"workload": "{python: {file: trian.py}}"}, "3:21: workload.python.file: .*trian.py: No such file"),
        (
            {"workload": "{python: {file: train.py, function: trian}}"},
            "3:37: workload.python.function: .*no function 'trian' at its top level; 'train' is the nearest",
        ),
        (
            {"ablate": "{workload.config.widht: [1, 2]}"},
            "config has no widht, so it cannot be turned; 'width' is the nearest",
        ),
        (
            {"metric": "{name: val:los|s}"},
            r"metric\.name: 'val:los\|s': no trial records a metric of this name: names have letters",
        ),
        ({"workload": "{python: {file: train.py, start: nothing.pt}}"}, "nothing.pt: no such file or folder"),
        ({"workload": "{python: {steps: 3}}"}, "names no training function: give `file: train.py`"),
    ],
)
def test_mistakes_are_named_at_their_place_and_once(lines, sentence, code):
    with pytest.raises(InputError, match=sentence) as refused:
        load(experiment(code, **lines), device="cpu")
    assert len(refused.value.problems) == 1


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("def train(trial:\n", r"train\.py:1: '\(' was never closed"),
        ("def train():\n    pass\n", "must take one argument, the trial"),
        ("def train(trial, config, more):\n    pass\n", "must take one argument, the trial"),
    ],
)
def test_a_file_that_cannot_be_a_workload_is_refused_before_it_runs(text, sentence, code):
    (code / "train.py").write_text(text)
    with pytest.raises(InputError, match=sentence):
        load(experiment(code), device="cpu")


TYPED = """
from dataclasses import dataclass

@dataclass
class Config:
    width: int = 32
    lr: float = 1e-2

def train(trial, config: Config):
    assert isinstance(config, Config)
    for step in trial.steps():
        with trial.step():
            pass
        trial.log({"train/loss": config.width})
"""


def test_a_declared_class_checks_the_config_and_builds_it(code):
    (code / "train.py").write_text(TYPED)
    load(experiment(code), device="cpu")
    for wrong, sentence in (
        ("{width: wide}", "config.width: 'wide': 'wide' is not of type 'integer'"),
        ("{widht: 3}", "'widht' was unexpected"),
    ):
        with pytest.raises(InputError, match=sentence):
            load(experiment(code, workload=f"{{python: {{file: train.py, config: {wrong}}}}}"), device="cpu")
    assert [r.metrics["train/loss"] for r in records(workload(code, config={"width": 7}), "bf16")] == [
        7.0
    ] * 4


CHECKED = TYPED.replace(
    "\ndef train",
    """
    def __post_init__(self):
        print(self.width, file=open(__file__ + ".asked", "a"))
        if self.width % 2:
            raise ValueError(f"width {self.width} is odd")

def train""",
)


def test_validators_of_a_declared_class_are_asked_by_the_plan_once_a_config(code, monkeypatch):
    monkeypatch.setenv("ABLATE_CACHE", str(code / "cache"))
    (code / "train.py").write_text(CHECKED)
    one = "{python: {file: train.py, config: {width: 7}}}"
    with pytest.raises(InputError, match=r"own.yaml:3:.*config: .*width 7 is odd"):
        load(experiment(code, workload=one), device="cpu")
    wide = experiment(code, ablate="{workload.config.width: [32, 33]}")
    with pytest.raises(InputError, match="width 33 is odd"):
        load(wide, device="cpu")
    asked = (code / "train.py.asked").read_text()
    assert {*asked.split()} == {"7", "32", "33"}
    load(experiment(code), device="cpu")  # what was accepted is not asked again
    assert (code / "train.py.asked").read_text() == asked


def test_an_import_that_failed_is_tried_again(code):
    (code / "train.py").write_text(f"import os\nassert os.path.exists({str(code / 'there')!r})\n{TYPED}")
    with pytest.raises(InputError, match="cannot be imported: AssertionError"):
        load(experiment(code), device="cpu")
    (code / "there").touch()
    load(experiment(code), device="cpu")


# --- what the function may do -------------------------------------------------------------------------

BODY = """
import torch
from model import Net

def train(trial):
    torch.manual_seed(trial.seed)
    model = {model}
    {before}
    for step in trial.steps():
        with trial.step():
            model(torch.randn(4, 8)).square().mean().backward()
        {after}
"""


def body(
    code: Path, model="trial.convert(Net(16))", before="pass", after='trial.log({"train/loss": 1.0})'
) -> Python:
    (code / "train.py").write_text(BODY.format(model=model, before=before, after=after))
    return workload(code)


@pytest.mark.parametrize(
    ("parts", "sentence"),
    [
        ({"model": "Net(16)"}, "never called trial.convert"),
        ({"after": 'trial.log({"train/loss": "low"})'}, "train/loss is 'low', which is no number"),
        ({"after": 'trial.log({"large": 10**400})'}, "large is 10+, which is no number"),
        ({"after": 'trial.log({"": 1.0})'}, "is no name of a metric"),
        ({"before": "return"}, "took no step"),
        ({"before": "trial.checkpoint(model=3)"}, "model has no state_dict"),
        ({"before": "trial.config.widht"}, "config has no 'widht'; its keys are width, lr"),
        ({"before": "list(trial.steps([]))"}, "the loader has no batches"),
        (
            {"before": "next(trial.steps()); next(trial.steps())", "after": "model(torch.randn(4, 8))"},
            "no step of the recipe is in force",
        ),
    ],
)
def test_mistakes_of_the_function_are_named(parts, sentence, code):
    with pytest.raises((RuntimeError, ValueError, TypeError, AttributeError), match=sentence):
        records(body(code, **parts))


def test_a_loss_beyond_its_guard_ends_the_trial_as_diverged(code):
    config = body(code, after='trial.log({"train/loss": 3.0 if step == 39 else 1.0})')
    last = records(config.model_copy(update={"steps": 60, "guard_loss": 2.0}))[-1]
    assert (last.step, last.metrics["guard/stopped"], last.verdict.cause.ratio) == (40, 40, 3)
    assert records(config.model_copy(update={"steps": 60, "guard_loss": 3.0}))[-1].step == 60
    assert "guard_loss" not in config.identity()


def test_a_resumed_trial_has_the_losses_that_its_guard_compares_with(code):
    config = body(
        code,
        before="trial.checkpoint(model=model)",
        after='trial.log({"train/loss": 3.0 if step == 39 else 1.0})',
    ).model_copy(update={"steps": 60, "guard_loss": 2.0})

    def run() -> Iterator[Record]:
        checkpoints = Checkpoints(code / "checkpoint.pt", "trial", 0)
        return config.records(TrialRun(PRESETS["bf16"](), 0, "emulated", "cpu", UNMEASURED, checkpoints))

    assert next(record.step for record in run() if record.step == 20) == 20
    resumed = list(run())
    assert (resumed[0].step > 15, resumed[-1].step) == (True, 40)
    assert resumed[-1].metrics["guard/stopped"] == 40


def test_a_window_that_its_guard_ends_is_recorded_as_ended():
    ended = Record(3, {"train/loss": 9.0, "guard/stopped": 3.0})
    assert in_window(ended, Window(0, 4, 0), longest=False) == {"guard/stopped": 3.0}


def test_a_function_reads_the_experiments_data_and_a_run_without_a_trial_leaves_no_files(
    code, tmp_path, monkeypatch
):
    """`ablate check` keeps no trial: what its runs save is gone with them."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "four.txt").write_text("4")
    before = "trial.folder.mkdir(exist_ok=True); (trial.folder / 'left.txt').write_text('')"
    config = body(code, before=before, after='trial.log({"read": int(trial.data[0].read_text())})')
    known = {*tmp_path.iterdir()}
    found = records(config.model_copy(update={"data": (str(tmp_path / "four.txt"),)}))
    assert found[-1].metrics["read"] == 4
    assert {*tmp_path.iterdir()} == known


def test_a_loss_that_is_not_finite_ends_the_trial_as_diverged(code):
    config = body(code, after='trial.log({"train/loss": float("nan") if step == 2 else 1.0})')
    found = records(config)
    assert [record.step for record in found] == [1, 2, 3]
    assert found[-1].metrics["nan/first_step"] == 3
    assert math.isnan(found[-1].metrics["train/loss"])


SWALLOWED = """try:
            trial.log({"train/loss": float("nan") if step == 2 else 1.0})
        except:
            pass"""


def test_a_function_that_catches_everything_still_ends_as_diverged(code):
    assert [record.step for record in records(body(code, after=SWALLOWED))] == [1, 2, 3]


def test_a_function_that_catches_everything_ends_with_a_trial_that_is_closed(code):
    config = body(code, after=SWALLOWED)
    running = config.records(TrialRun(PRESETS["nvfp4"](), 0, "emulated", "cpu", UNMEASURED))
    assert [next(running).step for _ in range(3)] == [1, 2, 3]
    closing = threading.Thread(target=running.close, daemon=True)
    closing.start()
    closing.join(20)
    assert not closing.is_alive()


def test_what_is_logged_after_a_step_belongs_to_it_and_every_record_says_how_fast(code):
    config = body(code, after='trial.log({"a": step}); trial.log({"b": 2 * step})')
    found = records(config.model_copy(update={"tokens_per_step": 32}))
    assert [(r.step, r.metrics["a"], r.metrics["b"], r.metrics["tokens"]) for r in found] == [
        (n + 1, n, 2 * n, 32 * (n + 1)) for n in range(4)
    ]
    assert all(r.metrics["throughput/tokens_per_s"] > 0 and r.metrics["memory/rss"] > 0 for r in found[1:])
    assert found[-1].metrics["flops/fp4_share"] == 1.0
    unstated = records(config)[-1].metrics
    assert ("throughput/tokens_per_s" in unstated, unstated["throughput/step_ms"] > 0) == (False, True)


@pytest.mark.slow
def test_a_file_that_changed_is_imported_anew_and_another_folder_has_its_own_modules(code):
    first = records(workload(code), "bf16")
    changed(code, ("nn.Linear(8, width)", "nn.Linear(8, width, bias=False)"), file="model.py")
    os.utime(code / "model.py")
    second = records(workload(code), "bf16")
    assert [r.metrics["train/loss"] for r in first] != [r.metrics["train/loss"] for r in second]
    assert [r.metrics["train/loss"] for r in records(workload(OWN_CODE), "bf16")] == [
        r.metrics["train/loss"] for r in first
    ]


@pytest.mark.slow
def test_the_files_that_init_writes_keep_all_promises_and_are_never_overwritten(tmp_path):
    init("mine", training=True, folder=tmp_path)
    found = load(tmp_path / "mine.yaml", device="cpu")
    kept = list(promises(Runs(found.base.config.model_copy(update={"steps": 4}))))
    assert [promise for promise in kept if not promise.kept] == []
    with pytest.raises(InputError, match=r"mine\.yaml: exists already"):
        init("mine", folder=tmp_path)


@pytest.mark.slow
def test_the_forks_of_own_code_that_init_writes_continue_their_checkpoint(tmp_path, capsys):
    init("mine", training=True, forks=True, folder=tmp_path)
    script, start = tmp_path / "mine_train.py", tmp_path / "mine_start.pt"
    printed = "".join(capsys.readouterr().out.split("\n"))
    assert f"python {script} writes {start}" in printed
    with pytest.raises(InputError, match=r"mine_start\.pt: no such file"):
        load(tmp_path / "mine.yaml", device="cpu")
    subprocess.run([sys.executable, script], check=True)
    found = load(tmp_path / "mine.yaml", device="cpu")
    assert found.forks(found.arms[0]).windows == (15, 30)
    kept = list(promises(Runs(found.base.config.model_copy(update={"steps": 4}), anneals=True)))
    assert [promise for promise in kept if not promise.kept] == []
    assert {promise.name for promise in kept} >= {"the learning rate falls in a window"}


def test_init_refuses_two_kinds_of_experiments(tmp_path):
    with pytest.raises(InputError, match="--rounding and --forks write different files"):
        init("both", rounding=True, forks=True, folder=tmp_path)


@pytest.mark.slow
def test_check_says_what_is_broken_and_its_status_says_whether(code):
    right = here("check", code / "train.py", "--config", "width=32", "--config", "lr=0.01", "--steps", "4")
    assert (right.returncode, right.stdout.count("PASS"), right.stdout.count("FAIL")) == (0, 7, 0)
    changed(code, *MISTAKES["it resumes"])
    wrong = here("check", experiment(code), "--steps", "4")
    assert (wrong.returncode, wrong.stdout.count("FAIL")) == (1, 1)
    assert "To mend: something that later steps depend on is not in trial.checkpoint" in wrong.stdout
    for words, sentence in (
        (("check", code / "trian.py"), "no such file"),
        (("check", code / "train.py", "--config", "width"), "write key=value"),
        (("check", code / "train.py", "--function", "trian"), "has no function 'trian'"),
    ):
        done = here(*words)
        assert done.returncode == 2
        assert sentence in done.stderr


# --- the metric that is compared ----------------------------------------------------------------------


@pytest.mark.slow
def test_a_metric_that_the_code_does_not_log_is_refused_with_those_that_it_does(code, tmp_path):
    """By `check` before a sweep; by the sweep after its first trial, whose results are kept for the right name."""
    text = (
        "schema: 1\nquestion: Q?\nrecipe: nvfp4\nablate: {rht: [true]}\nseeds: 1\n"
        "workload: {python: {file: train.py, steps: 2, config: {width: 32, lr: 1.0e-2}}}\n"
    )
    file = code / "own.yaml"
    file.write_text(text + "metric: {name: val/los}\n")
    done = here("check", file, "--steps", "2")
    assert done.returncode == 1
    assert "it logs train/loss, val/loss; not val/los" in done.stdout
    words = ("sweep", file, "--state", tmp_path / "s", "--executor", "inline", "--mlflow", "none", "-q")
    for _ in range(2):
        done = here(*words)
        assert done.returncode == 2
        assert re.search(
            r"'val/los': bf16 seed=0 is done and logged train/loss, val/loss; 'val/loss'", done.stderr
        )
    file.write_text(text)
    done = here(*words, "--no-report")
    assert done.returncode == 0, done.stderr
    assert "1 trials run, 1 already done" in done.stdout


@pytest.mark.slow
def test_a_generator_is_part_of_a_checkpoint_and_what_has_no_state_is_named(code):
    changed(
        code,
        ("    trial.checkpoint(model=model, optimizer=optimizer)\n",
         "    draws = torch.Generator().manual_seed(trial.seed)\n"
         "    trial.checkpoint(model=model, optimizer=optimizer, draws=draws)\n"),
        ("for _, x in trial.steps(loader):",
         "for _ in trial.steps():\n        x = data[torch.randint(len(data), (4,), generator=draws)]"),
    )  # fmt: skip
    assert [promise for promise in promises(Runs(workload(code))) if not promise.kept] == []
    changed(code, ("draws=draws", "draws=trial.seed"))
    with pytest.raises(
        TypeError, match=r"draws has no state_dict and load_state_dict, and is no torch\.Generator"
    ):
        records(workload(code))


def test_a_knob_of_the_config_without_its_path_is_told_with_it(code):
    file = code / "own.yaml"
    file.write_text(
        "schema: 1\nquestion: Q?\nrecipe: nvfp4\nablate: {lr: [1.0e-3]}\nseeds: 1\n"
        "workload: {python: {file: train.py, steps: 2, config: {width: 32, lr: 1.0e-2}}}\n"
    )
    with pytest.raises(InputError, match=r"lr is a key of config: write workload\.config\.lr"):
        load(file)


# --- it ends, with all of its children ----------------------------------------------------------------

PARENT = """
import pathlib, subprocess, sys

def train(trial):
    child = subprocess.Popen([sys.executable, "-c", "import os, time; os.setsid(); time.sleep(60)"])
    pathlib.Path(__file__).with_name("pid").write_text(str(child.pid))
    for _ in trial.steps():
        with trial.step():
            trial.log({"val/loss": 1.0})
"""


def test_processes_that_a_function_starts_end_with_its_trial(tmp_path):
    (tmp_path / "train.py").write_text(PARENT)
    config = Python(file=str(tmp_path / "train.py"), steps=1)
    one = TrialSpec(
        workload="python", config=config, recipe=PRESETS["bf16"](), seed=0, engine="emulated", device="cpu"
    )
    supervisor = Supervisor()
    try:
        *_, last = supervisor.run(
            TrialRequest(one.id, one.wire, str(tmp_path / "state"), 0, {}, patience=60.0)
        )
        child = int((tmp_path / "pid").read_text())
        assert (last.status, psutil.pid_exists(child)) == ("done", False)
    finally:
        supervisor.close()
