"""An exception of a user's code: described by that code's lines alone, not run again once it repeats, and the last line printed."""

import json
import subprocess
import sys
import traceback
from collections import Counter
from pathlib import Path

import pytest
from support.experiments import Children, ablate, ledger, statuses, sweep, tiny, write

from ablate.errors import InputError
from ablate.execution.failures import Failures
from ablate.recipes import PRESETS
from ablate.training.loop import Telemetry
from ablate.training.own_code.user_errors import CommandError, UserError, described, printed
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.python import Python

TRAIN = """
import json

def helper(trial):
    {statement}

def train(trial):
    for _ in trial.steps():
        with trial.step():
            trial.log({{"val/loss": 1.0}})
            helper(trial)
"""
BUG = "return json.loads('no JSON')"
"""Raises in the standard library, below line 5 of the file."""
THREE = {
    "recipe": "bf16",
    "ablate": {"workload.config.a": [0, 1, 2]},
    "against": {"workload.config.a": 0},
    "seeds": 3,
}
"""Three arms on three seeds; the first is the baseline."""


def experiment(folder: Path, statement: str = BUG, **keys):
    (folder / "train.py").write_text(TRAIN.format(statement=statement))
    function = {"python": {"file": str(folder / "train.py"), "steps": 1, "config": {"a": 0}}}
    return tiny(folder, workload=function, metric={"name": "val/loss"}, **THREE | keys)


def attempts(state: Path) -> list[tuple[str, int]]:
    """(Arm, seed) of every attempt."""
    book = ledger(state)
    names = {member.trial: (member.name, member.seed) for member in book.members()}
    rows = [tuple(row) for row in book.db.execute("SELECT trial FROM attempts")]
    book.close()
    return [names[trial] for (trial,) in rows]


# The rule


def test_a_bug_ends_the_sweep_after_its_second_trial_and_its_line_is_the_cause(tmp_path):
    outcome, news = sweep(experiment(tmp_path), tmp_path, connect=Children)
    place = f"{tmp_path / 'train.py'}:5"
    assert outcome.status == "failed"
    assert (
        outcome.cause == f"json.decoder.JSONDecodeError: Expecting value: line 1 column 1 (char 0) ({place})"
    )
    assert len(attempts(tmp_path)) == 3
    assert sorted(statuses(tmp_path).values()) == ["failed"] * 2 + ["pending"] * 7
    shown = [line for text in news for line in text.splitlines()]
    files = [line.split('"')[1] for line in shown if line.strip().startswith('File "')]
    assert files == [str(tmp_path / "train.py")] * 2
    assert sum(outcome.cause in line for line in shown) == 3

    (tmp_path / "train.py").write_text(TRAIN.format(statement="pass"))
    outcome, _ = sweep(experiment(tmp_path, "pass"), tmp_path, connect=Children)
    assert (outcome.status, outcome.ran, outcome.cause) == ("done", 9, "")


def test_an_arm_that_alone_is_broken_is_not_retried_and_does_not_end_the_others(tmp_path):
    broken = experiment(tmp_path, "assert trial.config.a != 1, 'one'")
    outcome, _ = sweep(broken, tmp_path, connect=Children)
    assert (outcome.status, outcome.ran, outcome.failed) == ("failed", 6, 3)
    assert outcome.cause == f"AssertionError: one ({tmp_path / 'train.py'}:5)"
    assert len(attempts(tmp_path)) == 6 + 2 + 1 + 1


@pytest.mark.slow
def test_an_error_of_network_or_device_is_tried_again_as_often_as_the_file_says(tmp_path):
    errors = "ConnectionResetError('peer'), OSError(5, 'I/O'), RuntimeError('CUDA error: x')"
    flaky = experiment(tmp_path, f"raise ({errors})[trial.config.a]", seeds=2, retry=1)
    outcome, _ = sweep(flaky, tmp_path, connect=Children)
    assert (outcome.status, outcome.failed) == ("failed", 6)
    assert [*Counter(attempts(tmp_path)).values()] == [2] * 6


@pytest.mark.slow
def test_a_command_that_raises_at_one_line_is_treated_alike(tmp_path):
    (tmp_path / "train.py").write_text("import json\n\njson.loads('no JSON')\n")
    program = {
        "run": f"{sys.executable} train.py {{a}}",
        "folder": str(tmp_path),
        "steps": 1,
        "config": {"a": 0},
    }
    keys = {"workload": {"command": program}, "metric": {"name": "val/loss"}}
    outcome, news = sweep(tiny(tmp_path, **THREE | keys), tmp_path, connect=Children)
    assert outcome.cause.endswith(f"(char 0) ({tmp_path / 'train.py'}:3)")
    assert len(attempts(tmp_path)) == 3
    assert not any("process_guard" in line or "/json/" in line for line in news)


class Member:
    """A member of a sweep, as far as failures look at it."""

    def __init__(self, trial: int, arm: int, baseline: int | None, status: str, role: str = "listed") -> None:
        self.trial, self.arm, self.baseline, self.status, self.role = trial, arm, baseline, status, role


class Book:
    """A ledger with these members."""

    def __init__(self, *members: Member) -> None:
        self.rows = members

    def members(self) -> tuple[Member, ...]:
        return self.rows


@pytest.mark.parametrize(
    ("others", "proposals", "ends"),
    [
        ([Member(3, 3, 1, "running")], 0, False),  # another arm may yet succeed
        ([Member(3, 3, 1, "failed")], 0, False),  # by something else
        ([Member(3, 3, 1, "running", "null")], 0, True),  # the baseline's twin compares nothing
        ([], 0, True),
        ([], 30, False),  # a search has other points
        ([Member(4, 2, 1, "done")], 0, False),  # the arm succeeds on another seed
    ],
)
def test_a_sweep_ends_only_if_nothing_compared_can_succeed(others, proposals, ends):
    error, failures = UserError("ValueError", "", "/t.py", 3), Failures()
    book = Book(Member(0, 1, None, "running"), Member(1, 2, 1, "failed"), Member(2, 2, 1, "failed"), *others)
    assert [failures.repeats(error) for _ in range(2)] == [False, True]
    failures.settled(1, error)
    assert not failures.hopeless(book, proposals)
    failures.settled(2, error)
    assert failures.hopeless(book, proposals) is ends


# The description


def raised(folder: Path, text: str) -> BaseException:
    """The exception of a training function of this text."""
    (folder / "own.py").write_text(text)
    config = Python(file=str(folder / "own.py"), steps=1)
    try:
        list(config.records(TrialRun(PRESETS["bf16"](), 0, "emulated", "cpu", Telemetry())))
    except Exception as error:
        return error
    raise AssertionError("it raised nothing")


SOURCES = {
    "the standard library": (
        "import json\ndef train(trial):\n    json.loads('x')\n",
        3,
        "json.decoder.JSONDecodeError",
    ),
    "torch": (
        "import torch\ndef train(trial):\n    torch.nn.Linear(2, 2)(torch.ones(3))\n",
        3,
        "RuntimeError",
    ),
    "an import": ("import json\nimport surely_missing\ndef train(trial): ...\n", 2, "ModuleNotFoundError"),
    "this package": ("def train(trial):\n    trial.log(3)\n", 2, "AttributeError"),
    "a re-raised error": (
        "def train(trial):\n    try:\n        1 / 0\n    except ZeroDivisionError as e:\n        raise KeyError('k') from e\n",
        5,
        "KeyError",
    ),
}


@pytest.mark.parametrize("name", SOURCES)
def test_the_innermost_line_of_the_users_file_is_found(name, tmp_path):
    text, line, kind = SOURCES[name]
    error = raised(tmp_path, text)
    found = described(error)
    assert (found.type, found.file, found.line) == (kind, str(tmp_path / "own.py"), line)
    assert found.message == str(error).splitlines()[0]
    full = "".join(traceback.format_exception(error)).splitlines()
    assert set(found.frames) <= set(full)
    assert len(full) > len(found.frames)
    assert not found.transient


def test_code_of_an_installed_package_is_the_users_if_its_function_is(tmp_path):
    own, other = (tmp_path / "site-packages" / name for name in ("own", "other"))
    for folder in (own, other):
        folder.mkdir(parents=True)
    (own / "__init__.py").touch()
    (other / "lib.py").write_text("def fail():\n    1 / 0\n")
    text = f"import sys\nsys.path.append({str(other)!r})\ndef train(trial):\n    import lib\n    lib.fail()\n"
    found = described(raised(own, text))
    assert (found.type, found.file, found.line) == ("ZeroDivisionError", str(own / "own.py"), 5)


def test_a_mistake_of_syntax_is_at_its_own_line(tmp_path):
    """A file that planning does not find: others are parsed before a trial runs."""
    (tmp_path / "late.py").write_text("x = 1\ny = = 2\n")
    text = "import importlib\ndef train(trial):\n    importlib.import_module('etal'[::-1])\n"
    found = described(raised(tmp_path, text))
    assert (found.type, found.file, found.line) == ("SyntaxError", str(tmp_path / "late.py"), 2)


def test_an_exception_of_a_dataloaders_worker_is_at_the_line_of_the_data_set(tmp_path):
    text = """
from torch.utils.data import DataLoader

class Data:
    def __len__(self):
        return 4
    def __getitem__(self, i):
        return {}[i]

def train(trial):
    list(DataLoader(Data(), num_workers=1))
"""
    found = described(raised(tmp_path, text))
    assert (found.type, found.message, found.line) == ("KeyError", "0", 8)


def test_a_request_for_a_gpu_is_a_sentence_with_the_line(tmp_path):
    error = raised(tmp_path, "import torch\ndef train(trial):\n    torch.ones(1).cuda()\n")
    assert isinstance(error, InputError)
    found = described(error)
    assert (found.type, found.line) == ("", 3)


def test_an_error_without_a_line_of_the_user_has_no_description():
    with pytest.raises(ValueError, match="Expecting value") as caught:
        json.loads("x")
    assert described(caught.value) is None
    assert described(CommandError("killed")) is None


@pytest.mark.parametrize("prefix", ["", "[rank1]: "])
def test_a_printed_traceback_says_the_same_as_the_exception(prefix, tmp_path):
    text = "import json\ndef train(trial):\n    json.loads('x')\n"
    found = described(raised(tmp_path, text))
    call = tmp_path / "call.py"
    call.write_text("import own\nown.train(None)\n")
    done = subprocess.run([sys.executable, call], capture_output=True, text=True, check=False)
    output = [f"{prefix}{line}" for line in done.stderr.splitlines()]
    launcher = 'Traceback (most recent call last):\n  File "/x/bin/torchrun", line 8, in <module>\nChildFailedError: x'
    again = printed(["some output", *output, "", *launcher.splitlines()])
    assert (again.type, again.message, again.file, again.line) == (
        found.type,
        found.message,
        found.file,
        found.line,
    )
    assert printed(launcher.splitlines()) is None


@pytest.mark.services
@pytest.mark.slow
def test_the_last_line_of_a_sweep_is_the_cause_and_its_exit_status_1(tmp_path):
    experiment(tmp_path)
    function = {"python": {"file": "train.py", "steps": 1, "config": {"a": 0}}}
    path = write(tmp_path, workload=function, metric={"name": "val/loss"}, **THREE)
    done = ablate("sweep", path, "--state", tmp_path / "state", "--mlflow", "none", "--workers", 2)
    assert done.returncode == 1, done.stdout + done.stderr
    assert done.stdout.splitlines()[-1].endswith(f"(char 0) ({tmp_path / 'train.py'}:5)")
    assert "trial_runner.py" not in done.stdout
