"""Tiny experiments for tests: a small synthetic corpus, a YAML of about 0.3 s a trial, and the command line as a subprocess."""

import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import psutil

from ablate.errors import InputError, Problem
from ablate.execution.controller import Controller
from ablate.execution.messages import Ended, Events, Message, TrialRequest
from ablate.execution.progress import Outcome, RunOptions
from ablate.execution.supervisor import Supervisor
from ablate.execution.workers import Inline
from ablate.experiment.load import Experiment, load
from ablate.reports.evidence import summary_markdown
from ablate.store.ledger import Ledger

VOCAB = 64
SHAPE = {
    "layers": 1,
    "width": 32,
    "heads": 2,
    "context": 16,
    "batch": 2,
    "steps": 4,
    "eval_every": 2,
    "eval_tokens": 64,
}
UNMEASURED = {"every": 0, "shadow": 0}
"""Telemetry without measurements, which take over half the time of a trial of four steps. What is recorded at every step stays."""
IDLE = {"workload": {"idle": {"steps": 4}}}
"""Workload of an experiment whose trials train nothing: a sweep of six takes 0.1 CPU-seconds, and one of gpt 0.9."""
TOO_LARGE = 1 << 44
"""A `hidden` that no machine can allocate: passes every check, and fails when the trial runs."""
WILD = {"good": {"rht": True}, "wild": {"workload.lr": 1e30, "workload.clip": None, "workload.warmup": 0.0}}
"""Arms of which the second diverges."""
EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").rglob("*.yaml"))
"""Experiments that this repository ships."""


def shards(folder: Path, tokens: int = 12_000) -> dict[str, Any]:
    """Two raw uint16 shards of hashed counters, the same on every machine; returns the `data` that names them."""
    folder.mkdir(parents=True, exist_ok=True)
    counter = np.arange(tokens, dtype=np.uint64)
    text = ((counter * 2654435761 % 2**32 >> 20) % VOCAB).astype(np.uint16)
    text[: tokens * 5 // 6].tofile(folder / "train.bin")
    text[tokens * 5 // 6 :].tofile(folder / "val.bin")
    return {"train": str(folder / "train.bin"), "val": str(folder / "val.bin"), "vocab": VOCAB}


def content(folder: Path, shape: dict[str, Any] | None = None, **keys: Any) -> dict[str, Any]:
    """A whole experiment as a mapping; `shape` changes the workload, a key of None leaves it out.

    Operands and gradients are measured only if `telemetry` says how often, or is None: then at the package's own intervals.
    """
    gpt = SHAPE | {"data": shards(folder)} | (shape or {})
    base = {
        "schema": 1,
        "question": "Does it matter?",
        "workload": {"gpt": gpt},
        "ablate": {"rht": [True, False]},
        "seeds": 2,
        "telemetry": UNMEASURED,
    }
    if keys.get("telemetry"):
        keys["telemetry"] = UNMEASURED | keys["telemetry"]
    return {key: value for key, value in (base | keys).items() if value is not None}


def write(folder: Path, name: str = "tiny", shape: dict[str, Any] | None = None, **keys: Any) -> Path:
    """The experiment as a file. JSON is YAML 1.2."""
    path = folder / f"{name}.yaml"
    path.write_text(json.dumps(content(folder, shape, **keys)))
    return path


def tiny(folder: Path, name: str = "tiny", shape: dict[str, Any] | None = None, **keys: Any) -> Experiment:
    """The experiment, written and loaded."""
    return load(write(folder, name, shape, **keys))


def idle(folder: Path, name: str = "tiny", **keys: Any) -> Experiment:
    """The experiment without training, for promises about what is run, and not about what a trial computes."""
    return tiny(folder, name, **IDLE | keys)


def problems(path: Path) -> list[Problem | str]:
    """Everything that loading the file complains about."""
    try:
        load(path)
    except InputError as error:
        return error.problems
    return []


# In this process


def events_of(messages: Iterable[Message]) -> list[dict[str, Any]]:
    """All events of a trial's messages."""
    return [event for message in messages if isinstance(message, Events) for event in message.events]


def shut(supervisor: Supervisor) -> None:
    """Close the supervisor."""
    supervisor.close()


class Children:
    """An executor of one slot without Ray: the real supervisor with its real child process.

    The child imports torch, for two seconds, and forks each trial: it stays for the next executor of the same
    environment and working directory, unless a trial still runs in it.
    """

    slots = 1
    kept: ClassVar[dict[Any, Supervisor]] = {}
    """The supervisor of the last executor, by environment and working directory."""

    def __init__(self) -> None:
        inherited = {name: value for name, value in os.environ.items() if name != "PYTEST_CURRENT_TEST"}
        self._key = (frozenset(inherited.items()), os.getcwd())
        self.supervisor, self.messages, self.trial = self.kept.pop(self._key, None) or Supervisor(), None, ""
        self._running = False
        self.end_kept()

    @classmethod
    def end_kept(cls) -> None:
        """End the child that was kept."""
        while cls.kept:
            shut(cls.kept.popitem()[1])

    def submit(self, request: TrialRequest) -> None:
        self.trial, self.messages, self._running = request.id, self.supervisor.run(request), True

    def wait(self, seconds: float) -> list[tuple[str, Message]]:
        message = next(self.messages)
        self._running = not isinstance(message, Ended)
        return [(self.trial, message)]

    def stop(self, trial: str) -> None:
        self.supervisor.stop()

    def resize(self, slots: int) -> None:
        pass

    def close(self) -> None:
        if self._running:
            shut(self.supervisor)
        else:
            self.kept[self._key] = self.supervisor


def sweep(
    experiment: Experiment, state: Path, mlflow: str | None = None, connect: Callable = Inline, **options: Any
) -> tuple[Outcome, list[str]]:
    """Run the sweep in this process; returns its outcome and what it said. `options` are fields of RunOptions."""
    controller, news = (
        Controller(
            experiment, state, "cpu", connect, mlflow, RunOptions(describe=summary_markdown, **options)
        ),
        [],
    )
    for step in controller.run():
        if isinstance(step, Outcome):
            outcome = step
        else:
            news += step.news
    news += controller.news
    controller.ledger.close()
    return outcome, news


def ledger(state: Path, name: str = "tiny") -> Ledger:
    """The sweep's ledger, for reading."""
    return Ledger(state / "sweeps" / name / "ledger.db", readonly=True)


def values(state: Path, name: str = "tiny", metric: str = "val/loss") -> dict[tuple[str, int], float]:
    """The last value of a metric by (arm, seed)."""
    book = ledger(state, name)
    found = {(m.name, m.seed): book.last_values(m.trial).get(metric) for m in book.members()}
    book.close()
    return found


def statuses(state: Path, name: str = "tiny") -> dict[tuple[str, int], str]:
    """Status by (arm, seed)."""
    book = ledger(state, name)
    found = {(m.name, m.seed): m.status for m in book.members()}
    book.close()
    return found


# As a command


def environment(**extra: str) -> dict[str, str]:
    """The process's environment without what would tell ablate where things are, but for the tests' own cache. Reports take
    seconds: only who asks gets one."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if key == "ABLATE_CACHE" or not key.startswith("ABLATE_")
    }
    return kept | {"COLUMNS": "200", "ABLATE_REPORT": "false"} | extra


def program(*words: Any) -> list[str]:
    """Command line of `ablate ...`. The check of the numerics before a sweep takes seconds: its own tests run it."""
    unchecked = ["--check-command", "true"] if words[:1] == ("sweep",) else []
    return [sys.executable, "-m", "ablate", *map(str, words[:1]), *unchecked, *map(str, words[1:])]


def ablate(*words: Any, timeout: float = 600, **extra: str) -> subprocess.CompletedProcess:
    """`ablate ...`, to its end."""
    command = program(*words)
    return subprocess.run(
        command, capture_output=True, text=True, timeout=timeout, env=environment(**extra), check=False
    )


def start(*words: Any, **extra: str) -> subprocess.Popen:
    """`ablate ...`, left running in a session of its own; end it with `end`."""
    command = program(*words)
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT}
    return subprocess.Popen(command, text=True, env=environment(**extra), start_new_session=True, **pipes)


def end(process: subprocess.Popen) -> None:
    """Kill the process where it still runs, and close its pipe."""
    if process.poll() is None:
        process.kill()
    process.communicate(timeout=300)


def words_of(process: psutil.Process) -> list[str]:
    """Its command line; of one that is gone by now, or a zombie, nothing."""
    try:
        return process.cmdline()
    except (psutil.NoSuchProcess, psutil.ZombieProcess):
        return []


def gone(processes: Iterable[psutil.Process]) -> bool:
    """Return True if all of them have ended; a zombie has."""
    for process in processes:
        with suppress(psutil.NoSuchProcess):
            if process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
                return False
    return True


def until(condition: Callable[[], Any], seconds: float = 300, every: float = 0.02) -> Any:
    """Wait until the condition holds and return its value; AssertionError when it never does."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        found = condition()
        if found:
            return found
        time.sleep(every)
    raise AssertionError(f"did not happen within {seconds} s")
