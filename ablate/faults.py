"""A small real sweep under every fault that we know how to make, at drawn moments: nothing may be lost, done twice, or left behind.

The same command is started again until it says that all is done; then `audit` compares what is there with a run that nothing disturbed.
Everything it starts carries a mark in its environment, is ended here, and nothing else is touched.
"""

import itertools
import json
import math
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import ExitStack, suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
from rich.console import Console
from rich.table import Table

from ablate import audit
from ablate.audit import Finding
from ablate.processes import Server, Sweep, mlflow, postgres, postgres_programs, trials_in
from ablate.yamlfile import InputError

CHECKPOINT_SECONDS = 0.2
PATIENCE_SECONDS = 5
_GAP = (4, 24)
"""Records between one fault and the next."""
_LATEST_SECONDS = 30.0
"""A fault comes by then, whether records did or not."""
_PAUSE = (0.5, 4.0)
"""Seconds for which a server stays dead."""
_MOST_STARTS = 8
"""Of one sweep without a fault between them that would explain it."""
_GONE_SECONDS = 40.0
_INTERRUPTED = 130


# The faults


@dataclass(frozen=True)
class Fault:
    """A signal to one process with a role, and what is done to the sweep's folder once everything that it ended is gone."""

    role: str
    signal: signal.Signals
    ends: bool = False
    """Whether the sweep's command ends by it."""
    then: Callable[[Path, np.random.Generator], None] | None = None


def tear(folder: Path, rng: np.random.Generator) -> None:
    """Cut the journal inside its last line."""
    journal = folder / "optuna.log"
    if journal.exists():
        content = journal.read_bytes()
        last = len(content.rstrip(b"\n").rpartition(b"\n")[2])
        with journal.open("r+b") as file:
            file.truncate(len(content) - int(rng.integers(1, max(2, last))))


def delete(folder: Path, rng: np.random.Generator) -> None:
    """Delete the journal."""
    (folder / "optuna.log").unlink(missing_ok=True)


def lock(folder: Path, rng: np.random.Generator) -> None:
    """Leave the lock that Optuna takes around each write, as a process does that dies in one."""
    with suppress(FileExistsError):
        (folder / "optuna.log.lock").symlink_to(folder / "optuna.log")


FAULTS = {
    "trial killed": Fault("trial", signal.SIGKILL),
    "controller killed": Fault("controller", signal.SIGKILL, ends=True),
    "MLflow server killed": Fault("MLflow", signal.SIGKILL),
    "worker killed": Fault("worker", signal.SIGKILL),
    "PostgreSQL killed": Fault("PostgreSQL", signal.SIGKILL),
    "trial segmentation fault": Fault("trial", signal.SIGSEGV),
    "Ray head killed": Fault("gcs_server", signal.SIGKILL, ends=True),
    "warm process killed": Fault("child", signal.SIGKILL),
    "journal torn": Fault("controller", signal.SIGKILL, ends=True, then=tear),
    "trial stopped": Fault("trial", signal.SIGSTOP),
    "PostgreSQL stopped at once": Fault("PostgreSQL", signal.SIGQUIT),
    "Ctrl-C": Fault("controller", signal.SIGINT, ends=True),
    "raylet killed": Fault("raylet", signal.SIGKILL, ends=True),
    "journal deleted": Fault("controller", signal.SIGKILL, ends=True, then=delete),
    "stale journal lock": Fault("controller", signal.SIGKILL, ends=True, then=lock),
}


def deck(names: list[str], rng: np.random.Generator) -> Iterator[str]:
    """Kinds for ever: those that leave the command running twice as often, since they cost seconds less; no kind is left out for long."""
    cards = [name for name in names for _ in range(1 if FAULTS[name].ends else 2)]
    while True:
        yield from (cards[i] for i in rng.permutation(len(cards)))


def experiment(folder: Path) -> str:
    """A cooldown grid of two seeds, whose trials share their trunks, on a synthetic corpus: about ten seconds of one core."""
    counter = np.arange(12_000, dtype=np.uint64)
    text = ((counter * 2654435761 % 2**32 >> 20) % 64).astype(np.uint16)
    for name, part in (("train", text[:10_000]), ("val", text[10_000:])):
        part.tofile(folder / f"{name}.bin")
    data = {"train": str(folder / "train.bin"), "val": str(folder / "val.bin"), "vocab": 64}
    shape = {"layers": 1, "width": 32, "heads": 2, "context": 16, "batch": 2, "steps": 200, "eval_every": 40, "eval_tokens": 64}
    content = {
        "schema": 1,
        "question": "Is anything lost?",
        "workload": {"gpt": shape | {"data": data}},
        "ablate": {"cooldown": [0, 0.1, 0.25]},
        "seeds": 2,
        "retry": 100,
        "patience": PATIENCE_SECONDS,
        "telemetry": {"checkpoint": CHECKPOINT_SECONDS, "log": 5},
    }
    return json.dumps(content, indent=1)


def _hit(victim: Server | psutil.Process, fault: Fault, pause: float) -> None:
    if isinstance(victim, Server):
        victim.kill(fault.signal, pause)
    elif fault.signal == signal.SIGINT:  # as a terminal does: to all in its group
        os.killpg(victim.pid, fault.signal)
    else:
        victim.send_signal(fault.signal)


# The suite


@dataclass
class Blow:
    """A fault that was made: when, at how many records, and what came of it."""

    kind: str
    round: int
    moment: float
    records: int
    came: list[str] = field(default_factory=list)
    until_next: float | None = None
    """Seconds to the next record."""

    def __str__(self) -> str:
        again = "" if self.until_next is None else f"the next record {self.until_next:.1f} s later"
        came = "; ".join([*self.came, *([again] if again else [])])
        return f"{self.moment:6.1f} s  round {self.round}, {self.records:3d} records  {self.kind}: {came}"


class Suite:
    """Sweeps under faults until so many were made; `blows`, `findings` and `repeats` say what happened. `tell` hears a line for each."""

    def __init__(self, folder: Path, faults: int, seed: int, names: list[str], tell: Callable[[str], None]) -> None:
        self.folder, self.tell = folder, tell
        self.blows: list[Blow] = []
        self.findings: list[Finding] = []
        self.repeats: list[audit.Repeat] = []
        self.servers: dict[str, Server] = {}
        self._names, self._faults, self._seed = names, faults, seed
        self._started = time.monotonic()
        self._stack = ExitStack()

    def run(self) -> None:
        """Everything, from the servers' start to their end."""
        with self._stack:
            scratch = Path(tempfile.mkdtemp(prefix="af"))  # short: Ray's sockets lie below, and a socket's path has 107 characters
            self._stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            scratch.chmod(0o755)
            content = experiment(self.folder)
            reference = self._begin(content, "undisturbed", "none", "inline")  # beside the first faults
            address = self._serve(scratch)
            cards = deck(self._names, np.random.default_rng(self._seed))
            plan = deque((next(cards), np.random.default_rng([self._seed, number])) for number in range(self._faults))
            for number in itertools.count():
                sweep = self._begin(content, f"round-{number}", address, "ray", RAY_TMPDIR=str(scratch))
                while plan and self._strike(number, sweep, *plan[0]):
                    plan.popleft()
                self._settle(number, sweep)
                self._audit(number, sweep, reference, address)
                if not plan:
                    return

    def _begin(self, content: str, name: str, mlflow: str, executor: str, **environment: str) -> Sweep:
        file = self.folder / f"{name}.yaml"  # a sweep's name is its file's, and no two in MLflow may be alike
        file.write_text(content)
        sweep = Sweep(file, self.folder / name, mlflow, executor, environment)
        self._stack.callback(sweep.close)
        sweep.start()
        return sweep

    def _serve(self, scratch: Path) -> str:
        """Start the servers; MLflow's address."""
        store = f"sqlite:///{scratch / 'mlflow.db'}"
        if programs := postgres_programs():
            server, store = postgres(programs, scratch / "postgres", self.folder / "postgres.log")
            self._keep("PostgreSQL", server)
        else:
            self._names = [name for name in self._names if FAULTS[name].role != "PostgreSQL"]
            self.tell("no PostgreSQL here (its programs, and psycopg for Python): MLflow's store is SQLite, and is not killed")
        server, address = mlflow(store, self.folder / "artifacts", self.folder / "mlflow.log")
        self._keep("MLflow", server)
        return address

    def _keep(self, name: str, server: Server) -> None:
        self.servers[name] = server
        self._stack.callback(server.close)
        self._wait(server.ready, 120, f"{name} does not answer")

    def _wait(self, condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
        """Wait, tending the servers. TimeoutError, with the folder that has the logs, where the condition never holds."""
        deadline = time.monotonic() + seconds
        while not condition():
            self._tend()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{otherwise} within {seconds:.0f} s; see the logs in {self.folder}")
            time.sleep(0.05)

    def _tend(self) -> None:
        for server in self.servers.values():
            server.tend()

    def _broken(self, number: int, found: Finding) -> None:
        found = replace(found, what=f"round {number}: {found.what}")
        self.findings.append(found)
        self.tell(f"BROKEN {found.kind}: {found.what}")
        with (self.folder / f"round-{number}" / "findings.txt").open("a") as file:
            print(found.kind, found.count, found.what, file=file)

    # One fault

    def _strike(self, number: int, sweep: Sweep, kind: str, rng: np.random.Generator) -> bool:
        """Make one fault at its moment, and wait for what comes of it; False where the sweep was done before."""
        fault, goal, which, pause = FAULTS[kind], sweep.records() + int(rng.integers(*_GAP)), rng.random(), rng.uniform(*_PAUSE)
        victims = self._await(number, sweep, fault.role, goal)
        if not victims:
            return False
        victim, told = victims[int(which * len(victims))], sweep.log.stat().st_size
        blow = Blow(kind, number, time.monotonic() - self._started, sweep.records())
        hears = not fault.ends and (fault.role == "trial" or bool(trials_in(victim)))
        try:
            _hit(victim, fault, pause)
        except (psutil.NoSuchProcess, ProcessLookupError):  # it ended at that very moment
            return self._strike(number, sweep, kind, rng)
        self.blows.append(blow)
        if fault.ends:
            self._end(number, sweep, fault, blow, rng)
        self._watch(sweep, blow, told, hears)
        self.tell(f"{len(self.blows):3d}/{self._faults}  {blow}")
        return True

    def _await(self, number: int, sweep: Sweep, role: str, goal: int) -> list[Any]:
        """Those with a role, once the sweep has so many records, or the time has come; none where the sweep was done before."""
        latest = time.monotonic() + _LATEST_SECONDS
        while not self._over(number, sweep):
            self._tend()
            if (sweep.records() >= goal or time.monotonic() > latest) and (victims := self._victims(sweep, role)):
                return victims
            time.sleep(0.02)
        return []

    def _victims(self, sweep: Sweep, role: str) -> list[Any]:
        if role in self.servers:
            server = self.servers[role]
            return [server] if server.process.poll() is None and server.ready() else []
        return sweep.victims(role)

    def _over(self, number: int, sweep: Sweep) -> bool:
        """Whether the sweep says that it is done. One that ended by itself otherwise is a broken promise, and started again."""
        status = sweep.process.poll()
        if status is None or sweep.done:
            return sweep.done
        self._broken(number, Finding("wrong", f"the command ended by itself with status {status}: {sweep.last_line()}"))
        if sweep.starts > _MOST_STARTS + len(self.blows):
            raise TimeoutError(f"the same command never gets done; see {sweep.log}")
        sweep.start()
        return False

    def _end(self, number: int, sweep: Sweep, fault: Fault, blow: Blow, rng: np.random.Generator) -> None:
        """The command ends by the fault, with the status that says so, and all its processes with it. It is started again."""
        began = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            sweep.process.wait(_GONE_SECONDS)
        status = sweep.process.poll()
        wanted = -signal.SIGKILL if (fault.role, fault.signal) == ("controller", signal.SIGKILL) else _INTERRUPTED
        if status not in (wanted, 0):  # 0: it was done at that moment
            self._broken(number, Finding("wrong", f"{blow.kind}: the command ended with status {status}, not {wanted}"))
        left = sweep.gone(_GONE_SECONDS)
        if left:
            self._broken(number, Finding("wrong", f"{blow.kind}: {', '.join(left)} outlived it", len(left)))
        blow.came.append(f"status {status}, all gone after {time.monotonic() - began:.1f} s")
        if fault.then:
            fault.then(sweep.folder, rng)
        if not sweep.done:
            sweep.start()

    def _watch(self, sweep: Sweep, blow: Blow, told: int, retried: bool) -> None:
        """Wait for the next record, and for the line that says what happened to the trial, where one was hit."""
        began, before, line = time.monotonic(), sweep.records(), None
        deadline = began + _LATEST_SECONDS
        while time.monotonic() < deadline and not sweep.done and (blow.until_next is None or (retried and not line)):
            self._tend()
            if blow.until_next is None and sweep.records() > before:
                blow.until_next = time.monotonic() - began
                deadline = time.monotonic() + 2 * PATIENCE_SECONDS
            line = next((text for text in sweep.told(told) if "; retry " in text), None)
            time.sleep(0.02)
        if line:
            blow.came.append(f'"{line}"')

    # The end of a round

    def _settle(self, number: int, sweep: Sweep) -> None:
        """Let the sweep get done, and MLflow with it: the same command, as often as it takes."""
        self._wait(lambda: self._over(number, sweep), 300, "the sweep does not get done")
        for server in self.servers.values():
            self._wait(server.ready, 120, "a server does not answer")
        for _ in range(_MOST_STARTS):
            if not sweep.unshipped():
                return
            sweep.start()
            self._wait(lambda: self._over(number, sweep), 300, "the sweep does not get done")
        self._broken(number, Finding("lost", f"MLflow still misses {sweep.unshipped()} members"))

    def _audit(self, number: int, sweep: Sweep, reference: Sweep, address: str) -> None:
        if left := sweep.gone(_GONE_SECONDS):
            self._broken(number, Finding("wrong", f"{', '.join(left)} outlived the sweep", len(left)))
        self._wait(lambda: reference.done, 300, "the undisturbed run does not end")
        checks = [
            audit.sweep(sweep.state, sweep.folder, reference.folder),
            audit.study(sweep.folder),
            audit.mlflow(audit.Tracker(address), sweep.folder),
            self._attempts(number, sweep),
            self._again(sweep),
        ]
        for found in itertools.chain(*checks):
            self._broken(number, found)

    def _attempts(self, number: int, sweep: Sweep) -> Iterator[Finding]:
        """No more attempts than faults explain: one trial for each that was hit, two for each end of the command or of Ray."""
        mine = [FAULTS[blow.kind] for blow in self.blows if blow.round == number]
        hit = sum(fault.role in ("worker", "child", "trial") for fault in mine)
        ended = sum(fault.ends for fault in mine)
        counts = sweep.outcomes()
        if counts.get("failed", 0) > hit + 4 * sum(fault.role in ("raylet", "gcs_server") for fault in mine):
            yield Finding("wrong", f"{counts['failed']} attempts failed by {hit} faults")
        if (left := counts.get("orphaned", 0) + counts.get("interrupted", 0)) > 2 * ended:
            yield Finding("wrong", f"{left} attempts were left by {ended} ends of the command")

    def _again(self, sweep: Sweep) -> Iterator[Finding]:
        """A trial that goes on does again at most what one interval between checkpoints had done, and what one record covers."""
        found = list(audit.repeats(sweep.state))
        self.repeats += found
        for repeat in found:
            if repeat.seconds > CHECKPOINT_SECONDS + 3 * repeat.slack:
                yield Finding("wrong", f"trial {repeat.trial} did {repeat.steps} steps again, {repeat.seconds:.2f} s of work")


# Told


def told(state: Path | None, count: int, seed: int, names: list[str], screen: Console) -> bool:
    """Run the suite and print what happened; whether every promise was kept. InputError where the folder is not new."""
    if state and state.exists() and any(state.iterdir()):
        raise InputError([f"--state {state}: there is something in it; name a new folder"])
    folder = state or Path(tempfile.mkdtemp(prefix="ablate-faults-"))
    folder.mkdir(parents=True, exist_ok=True)
    suite = Suite(folder.resolve(), count, seed, names, lambda line: screen.print(line, markup=False, soft_wrap=True))
    try:
        suite.run()
    except TimeoutError as error:
        suite.findings.append(Finding("wrong", str(error)))
        screen.print(f"BROKEN wrong: {error}", markup=False, soft_wrap=True)
    screen.print("", _table(suite), "")
    totals = {kind: sum(found.count for found in suite.findings if found.kind == kind) for kind in ("lost", "twice", "wrong")}
    wrong = f", other promises broken {totals['wrong']}" if totals["wrong"] else ""
    screen.print(f"faults {len(suite.blows)}, losses {totals['lost']}, duplicates {totals['twice']}{wrong}")
    if suite.findings:
        screen.print(f"The evidence is in {folder}.", soft_wrap=True)
    elif state is None:
        shutil.rmtree(folder)
    return not suite.findings


def _table(suite: Suite) -> Table:
    """How often each kind came, and how long it was until the next record."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("fault")
    for name in ("times", "median s to the next record", "longest"):
        table.add_column(name, justify="right")
    for kind in sorted({blow.kind for blow in suite.blows}, key=list(FAULTS).index):
        mine = [blow for blow in suite.blows if blow.kind == kind]
        waits = sorted(blow.until_next for blow in mine if blow.until_next is not None) or [math.nan]
        table.add_row(kind, str(len(mine)), f"{waits[len(waits) // 2]:.1f}", f"{waits[-1]:.1f}")
    steps = [repeat.steps for repeat in suite.repeats] or [0]
    table.add_row("steps done again", str(len(suite.repeats)), f"{sorted(steps)[len(steps) // 2]} steps", f"{max(steps)} steps")
    return table
