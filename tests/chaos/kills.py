"""A small real sweep on Ray under every kind of fault of its processes and servers, at random moments.

The problem. A sweep guarantees that nothing is lost, done twice, or left behind, whichever process dies. Unit tests kill one process at
one chosen moment; real failures come at other moments, and several together.

The idea. The same command, `ablate sweep`, is started again after each fault that ends it, until the sweep is done. Faults and their
moments are drawn from a seed. Then the audit compares ledger, trial folders, MLflow and Optuna with an undisturbed run.

Files are corrupted too, several at a time, while the command is down or after the sweep has finished. Damage must be reported or
repaired, and no value may silently differ from the undisturbed run.

Not done: processes that were not started here are never touched. Those of a sweep carry a mark in their environment, and all of them end
with the run.
"""

import itertools
import os
import shutil
import subprocess
import tempfile
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from pathlib import Path
from random import Random
from signal import SIGINT, SIGKILL, SIGQUIT, SIGSEGV, SIGSTOP, Signals
from typing import Any

import psutil
from support.experiments import write
from support.services import (
    Server,
    SweepCommand,
    mlflow,
    mlflow_databases,
    postgres,
    postgres_programs,
    table_count,
    trials_in,
)

from ablate.store.databases import url
from chaos.audit import Finding, audit, repeats
from chaos.copies import COMMANDS
from chaos.corruptions import KINDS, LIVE, Corrupted
from chaos.report import Fault, Report

CHECKPOINT_SECONDS = 0.2
"""Seconds between checkpoints of the sweep's trials."""
PATIENCE_SECONDS = 5
"""Patience of the sweep: seconds without a message after which a trial may count as hung."""
GRID = {
    "question": "Is anything lost?",
    "ablate": {"cooldown": [0, 0.1, 0.25]},
    "retry": 100,
    "patience": PATIENCE_SECONDS,
    "telemetry": {"checkpoint": CHECKPOINT_SECONDS, "log": 5, "every": 50, "shadow": 100},
}
"""Keys of a cooldown grid with two seeds, whose trials share prefixes: ten seconds of one core, half of that for few faults."""
IDLE = {"workload": {"idle": {"steps": 3}}, "ablate": {"rht": [True]}, "seeds": 1}
_GAP = (4, 23)
"""Fewest and most records between one fault and the next."""
_POLL_SECONDS = 0.05
"""Pause between two looks, each of which reads the ledger and the environment of all processes."""
_LATEST_SECONDS = 30.0
"""Longest wait for a fault, even if the sweep writes no records."""
_PAUSE = (0.5, 4.0)
"""Shortest and longest time in seconds for which a server stays down."""
_MOST_STARTS = 8
"""Most starts of one sweep without a fault that explains them."""
_GONE_SECONDS = 120.0
"""Time limit for the processes of a sweep to end with its command."""
_READY_SECONDS = 600.0
"""Time limit for a server, or a small sweep, to be ready: a hang, not a busy machine, exceeds it."""
_DONE_SECONDS = 1200.0
"""Time limit for a sweep to end."""
_MOST_AT_ONCE = 3
"""Files that are corrupted before a killed command is started again."""
_MOST_AT_THE_END = 6
"""Files that are corrupted once the sweep is finished."""
_INTERRUPTED = 130


# Kinds of faults


@dataclass(frozen=True)
class Kill:
    """Signal to one process with a role. `then` changes the sweep's folder after all processes that it ended are gone."""

    role: str
    signal: Signals = SIGKILL
    ends: bool = False
    """True if the sweep's command ends by it."""
    then: Callable[[Path, Random], None] | None = None


def tear(folder: Path, draw: Random) -> None:
    """Truncate Optuna's journal inside its last line."""
    journal = folder / "optuna.log"
    if journal.exists():
        content = journal.read_bytes()
        last = len(content.rstrip(b"\n").rpartition(b"\n")[2])
        os.truncate(journal, len(content) - draw.randrange(1, max(2, last)))


def delete(folder: Path, draw: Random) -> None:
    """Delete Optuna's journal."""
    (folder / "optuna.log").unlink(missing_ok=True)


def lock(folder: Path, draw: Random) -> None:
    """Create the lock file of Optuna's journal, which a process leaves behind if it dies during a write."""
    with suppress(FileExistsError):
        (folder / "optuna.log.lock").symlink_to(folder / "optuna.log")


KILLS = {
    "trial killed": Kill("trial"),
    "controller killed": Kill("controller", ends=True),
    "MLflow server killed": Kill("MLflow"),
    "worker killed": Kill("worker"),
    "PostgreSQL killed": Kill("PostgreSQL"),
    "trial segmentation fault": Kill("trial", SIGSEGV),
    "Ray head killed": Kill("gcs_server", ends=True),
    "warm process killed": Kill("child"),
    "journal torn": Kill("controller", ends=True, then=tear),
    "trial stopped": Kill("trial", SIGSTOP),
    "PostgreSQL stopped at once": Kill("PostgreSQL", SIGQUIT),
    "Ctrl-C": Kill("controller", SIGINT, ends=True),
    "raylet killed": Kill("raylet", ends=True),
    "journal deleted": Kill("controller", ends=True, then=delete),
    "stale journal lock": Kill("controller", ends=True, then=lock),
}
MIGRATION = "killed in MLflow's migration"
"""Controller of a separate sweep, killed while MLflow creates its database in the state folder."""


def deck(draw: Random) -> Iterator[str]:
    """Yield kinds of kills without end, in shuffled rounds that contain every kind.

    Kinds that leave the command running come more often, since they cost less time.
    """
    cards = [name for name, kill in KILLS.items() for _ in range(1 if kill.ends else 2)]
    while True:
        yield from draw.sample([*cards, MIGRATION, *COMMANDS], len(cards) + 1 + len(COMMANDS))


def has_postgres(kind: str) -> bool:
    """Return True for a kill of PostgreSQL."""
    return kind in KILLS and KILLS[kind].role == "PostgreSQL"


# The run


@dataclass(frozen=True)
class Live:
    """Fault of a running sweep, before its outcome is known."""

    fault: Fault
    round: int
    kill: Kill | None = None
    corrupted: Corrupted | None = None
    log_size: int = 0
    """Size of the command's output before a corruption."""

    @property
    def subject(self) -> str:
        """Return the name of the corrupted trial, or `ledger`, as output and logs spell it."""
        path = self.corrupted.path
        return "ledger" if path.name.startswith("ledger") else path.parent.name


class LiveSweeps:
    """Sweeps under faults, round after round, until all faults are injected.

    Args:
        folder: New folder for state folders, logs and servers.
        kills: Kinds of kills, in order.
        corruptions: Number of files to corrupt, by LIVE.
        seed: Seed of the moments, the victims and the corruptions.
        report: Receives faults and findings.
    """

    def __init__(self, folder: Path, kills: list[str], corruptions: int, seed: int, report: Report) -> None:
        self.folder, self.report = folder, report
        self.again: list[int] = []
        """Steps that were done again, by resumed trial."""
        self._servers: dict[str, Server] = {}
        draws = [Random(f"{seed} live {number}") for number in range(len(kills) + corruptions)]
        self._migrations = [draw for kind, draw in zip(kills, draws, strict=False) if kind == MIGRATION]
        self._kills = deque(pair for pair in zip(kills, draws, strict=False) if pair[0] in KILLS)
        cards = [LIVE[number % len(LIVE)] for number in range(corruptions)]
        Random(seed).shuffle(cards)
        self._corruptions = list(zip(cards, draws[len(kills) :], strict=True))
        self._steps = 200 if len(kills) + corruptions > 5 else 100
        self._all: list[Live] = []
        self._undecided: list[Live] = []
        self._stack = ExitStack()

    def run(self) -> None:
        """Start the servers, inject all faults, audit every round, and stop the servers."""
        if not (self._migrations or self._kills or self._corruptions):
            return
        with self._stack:
            # Short, since Ray creates sockets in it, and a socket's path has at most 107 characters.
            scratch = Path(tempfile.mkdtemp(prefix="af"))
            self._stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            scratch.chmod(0o755)
            # The reference runs in parallel with the first faults.
            reference = self._begin("undisturbed", "none", "inline")
            address = self._serve(scratch)
            for number, draw in enumerate(self._migrations):
                self._migrate(f"migration-{number}", draw)
            for number in itertools.count():
                sweep = self._begin(f"round-{number}", address, "ray", RAY_TMPDIR=str(scratch))
                while self._kills and self._strike(number, sweep, *self._kills[0]):
                    self._kills.popleft()
                self._settle(number, sweep)
                while self._corrupt(number, sweep, _MOST_AT_THE_END):
                    self._verify(number, sweep)
                    sweep.start()
                    self._settle(number, sweep)
                    if self._kills:
                        break
                self._audit(number, sweep, reference, address)
                if not self._kills and not self._corruptions:
                    return
                if not self._kills:  # a finished sweep has no checkpoints to corrupt
                    self._corruptions = [(("events", "bit"), draw) for _, draw in self._corruptions]

    def _begin(
        self, name: str, mlflow: str, executor: str, keys: dict[str, Any] = GRID, **environment: str
    ) -> SweepCommand:
        """Start a sweep; by default the grid, whose name must be unique in MLflow."""
        shape = {"steps": self._steps, "eval_every": self._steps // 5}
        file = write(self.folder, name, shape, **keys)
        sweep = SweepCommand(file, self.folder / name, mlflow, executor, environment)
        self._stack.callback(sweep.close)
        sweep.start()
        return sweep

    def _serve(self, scratch: Path) -> str:
        """Start the servers; return MLflow's address."""
        store = url(scratch / "mlflow.db")
        if programs := postgres_programs():
            server, store = postgres(programs, scratch / "postgres", self.folder / "postgres.log")
            self._keep("PostgreSQL", server)
        else:
            self._kills = deque(pair for pair in self._kills if not has_postgres(pair[0]))
            self.report.show("no PostgreSQL here: MLflow's store is SQLite, and is not killed")
        server, address = mlflow(store, self.folder / "artifacts", self.folder / "mlflow.log")
        self._keep("MLflow", server)
        return address

    def _keep(self, name: str, server: Server) -> None:
        self._servers[name] = server
        self._stack.callback(server.close)
        self._wait(server.ready, _READY_SECONDS, f"{name} does not answer")

    def _wait(self, condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
        """Wait for a condition, and restart servers that are down.

        Raises:
            TimeoutError: The condition did not hold in time. The message is `otherwise` and the folder of logs.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            self._pause()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{otherwise} within {seconds:.0f} s; see the logs in {self.folder}")

    def _pause(self) -> None:
        for server in self._servers.values():
            server.restart_if_due()
        time.sleep(_POLL_SECONDS)

    def _broken(self, number: int, kind: str, what: str, count: int = 1) -> None:
        self.report.broken(f"round-{number}", Finding(kind, what, count))

    def _injected(self, live: Live) -> None:
        self._all.append(live)
        if live.corrupted:
            self._undecided.append(live)  # until its outcome is known
        else:
            self.report.add(live.fault)

    # One kill

    def _strike(self, number: int, sweep: SweepCommand, kind: str, draw: Random) -> bool:
        """Inject one kill and wait for its effect; return False if the sweep was done before."""
        kill, goal, choice = KILLS[kind], sweep.records() + draw.randint(*_GAP), draw.random()
        victims = self._await(number, sweep, kill.role, goal)
        if not victims:
            return False
        victim, log_size = victims[int(choice * len(victims))], sweep.log.stat().st_size
        retried = not kill.ends and (kill.role == "trial" or bool(trials_in(victim)))
        fault = Fault("kills", kind, f"round {number}, {sweep.records()} records")
        try:
            if isinstance(victim, Server):
                victim.kill(kill.signal, draw.uniform(*_PAUSE))
            elif kill.signal == SIGINT:  # a terminal sends it to the whole process group
                os.killpg(victim.pid, kill.signal)
            else:
                victim.send_signal(kill.signal)
        except (psutil.NoSuchProcess, ProcessLookupError):  # the process ended at that moment
            return self._strike(number, sweep, kind, draw)
        if kill.ends:
            self._end(number, sweep, kill, fault, draw)
        self._watch(sweep, fault, log_size, retried)
        self._injected(Live(fault, number, kill))
        return True

    def _await(
        self, number: int, sweep: SweepCommand, role: str, goal: int
    ) -> list[Server] | list[psutil.Process]:
        """Return the processes with a role, once the sweep has `goal` records or _LATEST_SECONDS have passed.

        The list is empty if the sweep is done before that.
        """
        latest, server = time.monotonic() + _LATEST_SECONDS, self._servers.get(role)
        while not self._over(number, sweep):
            self._pause()
            if sweep.records() >= goal or time.monotonic() > latest:
                if server is None and (victims := sweep.victims(role)):
                    return victims
                if server and server.process.poll() is None and server.ready():
                    return [server]
        return []

    def _over(self, number: int, sweep: SweepCommand) -> bool:
        """Return True if the sweep reports that it is done.

        A command that ended otherwise, without a fault, is a finding, and is started again.
        """
        status = sweep.process.poll()
        if status is None or sweep.done:
            return sweep.done
        damaged = any(live.subject == "ledger" for live in self._undecided)
        if status == 2 and damaged and "`ablate rebuild " in sweep.last_line():
            status, output = sweep.command("rebuild", str(sweep.file), "--device", "cpu")
            if status:
                self._broken(number, "wrong", f"rebuild ended with status {status}: {output[-1:]}")
        else:
            last = sweep.last_line()
            self._broken(number, "wrong", f"the command ended by itself with status {status}: {last}")
            if sweep.starts > _MOST_STARTS + len(self._all):
                raise TimeoutError(f"the same command never gets done; see {sweep.log}")
        sweep.start()
        return False

    def _end(self, number: int, sweep: SweepCommand, kill: Kill, fault: Fault, draw: Random) -> None:
        """Wait for the command to end by a kill, check its exit status and that all its processes ended.

        Corrupt some files while it is down, then start it again.
        """
        began = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            sweep.process.wait(_GONE_SECONDS)
        status = sweep.process.poll()
        killed = kill.role == "controller" and kill.signal == SIGKILL
        wanted = -SIGKILL if killed else _INTERRUPTED
        if status not in (wanted, 0):  # 0: the sweep was done at that moment
            self._broken(
                number, "wrong", f"{fault.kind}: the command ended with status {status}, not {wanted}"
            )
        if survivors := sweep.await_end(_GONE_SECONDS):
            self._broken(number, "wrong", f"{fault.kind}: {', '.join(survivors)} outlived it", len(survivors))
        fault.effects.append(f"status {status}, all gone after {time.monotonic() - began:.1f} s")
        if kill.then:
            kill.then(sweep.folder, draw)
        self._corrupt(number, sweep, _MOST_AT_ONCE)
        if not sweep.done:
            sweep.start()

    def _watch(self, sweep: SweepCommand, fault: Fault, log_size: int, retried: bool) -> None:
        """Wait for the next record and, if a trial was hit, for the line that reports its retry."""
        began, before, line = time.monotonic(), sweep.records(), None
        deadline = began + _LATEST_SECONDS
        while (
            time.monotonic() < deadline
            and not sweep.done
            and (fault.seconds is None or (retried and not line))
        ):
            if fault.seconds is None and sweep.records() > before:
                fault.seconds = time.monotonic() - began
                deadline = time.monotonic() + 2 * PATIENCE_SECONDS
            line = next((text for text in sweep.output_since(log_size) if "; retry " in text), None)
            self._pause()
        fault.effects += [f'"{line}"'] if line else []

    def _migrate(self, name: str, draw: Random) -> None:
        """Kill the controller of a small sweep while MLflow creates its database.

        The same command, then `ablate rebuild --sync`, must finish afterwards.
        """
        database = url((self.folder / name / "mlflow.db").resolve())
        sweep = self._begin(name, database, "inline", IDLE)
        state, fault = sweep.state, Fault("kills", MIGRATION, name)

        def ended() -> bool:
            return sweep.process.poll() is not None

        self._wait(
            lambda: bool(mlflow_databases(state)) or ended(), _READY_SECONDS, "MLflow makes no database"
        )
        time.sleep(draw.uniform(0, 1.5))
        count = table_count(mlflow_databases(state))
        fault.effects.append("it was done before" if ended() else f"{count} tables by then")
        with suppress(ProcessLookupError):
            os.killpg(sweep.process.pid, SIGKILL)
        sweep.process.wait()
        for _ in range(2):
            sweep.start()
            self._wait(ended, _READY_SECONDS, f"{name} does not get done")
            if sweep.done and not sweep.unshipped():
                break
        status, output = sweep.command(
            "rebuild", name, "--sync", "--mlflow", sweep.mlflow, "--timeout", f"{_READY_SECONDS:.0f}"
        )
        if sweep.unshipped() or status:
            why = output[-1] if output else sweep.last_line()
            what = f"MLflow misses {sweep.unshipped()} members; sync ended with {status}: {why}"
            fault.findings.append(Finding("lost", what))
        self.report.add(fault)

    # Corruption

    def _corrupt(self, number: int, sweep: SweepCommand, most: int) -> int:
        """Corrupt at most `most` files while no command runs; return their number.

        Checkpoints come first, since only unfinished trials have one.
        """
        count, left = 0, []
        for (kind, way), draw in sorted(self._corruptions, key=lambda card: "checkpoint" not in card[0][0]):
            done = KINDS[kind](sweep.state, sweep.folder, draw, way) if count < most else None
            if done is None:
                left.append(((kind, way), draw))
                continue
            count += 1
            fault = Fault("corruptions", f"{kind}, live", f"round {number}, {done}")
            self._injected(Live(fault, number, corrupted=done, log_size=sweep.log.stat().st_size))
        self._corruptions = left
        return count

    def _verify(self, number: int, sweep: SweepCommand) -> None:
        """Mark the corruptions of a finished sweep that `ablate status --verify` names."""
        status, output = sweep.command("status", sweep.folder.name, "--verify")
        if status not in (0, 1):
            self._broken(number, "wrong", f"status --verify ended with {status}: {output[-1:]}")
        for live in self._undecided:
            if any(live.subject in line for line in output):
                live.fault.effects.append("named by status --verify")

    def _decide_outcomes(self, sweep: SweepCommand) -> None:
        """Set the outcome of each corruption from the command's output and the trials' logs."""
        logs = "\n".join(path.read_text(errors="replace") for path in sweep.state.glob("*/*/log-*.txt"))
        for live in self._undecided:
            path = live.corrupted.path
            named = any(live.subject in line for line in sweep.output_since(live.log_size))
            named = named or f"{path.parent.name}/{path.name}: " in logs or bool(live.fault.effects)
            live.fault.outcome = "named" if named else "no difference"
            self.report.add(live.fault)
        self._undecided = []

    # The end of a round

    def _settle(self, number: int, sweep: SweepCommand) -> None:
        """Run the same command until the sweep is done and MLflow has all of its members."""
        for _ in range(_MOST_STARTS):
            self._wait(lambda: self._over(number, sweep), _DONE_SECONDS, "the sweep does not get done")
            for server in self._servers.values():
                self._wait(server.ready, _READY_SECONDS, "a server does not answer")
            if not sweep.unshipped():
                return
            sweep.start()
        self._broken(number, "lost", f"MLflow still misses {sweep.unshipped()} members")

    def _audit(self, number: int, sweep: SweepCommand, reference: SweepCommand, address: str) -> None:
        if survivors := sweep.await_end(_GONE_SECONDS):
            self._broken(number, "wrong", f"{', '.join(survivors)} outlived the sweep", len(survivors))
        self._decide_outcomes(sweep)
        self._wait(lambda: reference.done, _DONE_SECONDS, "the undisturbed run does not end")
        mine = [live for live in self._all if live.round == number]
        found = itertools.chain(
            audit(sweep.state, sweep.folder, reference.folder, address),
            excess_attempts(mine, sweep.outcomes()),
            self._excess_repeats(mine, sweep.state),
        )
        for finding in found:
            self.report.broken(f"round-{number}", finding)

    def _excess_repeats(self, mine: list[Live], state: Path) -> Iterator[Finding]:
        """Check that a resumed trial repeats at most one checkpoint interval and the work between records."""
        found = list(repeats(state))
        self.again += [repeat.steps for repeat in found]
        if any(live.corrupted for live in mine):  # corrupted trials go back further
            return
        for repeat in found:
            if repeat.seconds > CHECKPOINT_SECONDS + 3 * repeat.slack:
                what = f"trial {repeat.trial} did {repeat.steps} steps again, {repeat.seconds:.2f} s of work"
                yield Finding("wrong", what)


def excess_attempts(faults: list[Live], counts: Mapping[str, int]) -> Iterator[Finding]:
    """Check that faults explain all failed attempts: one per trial hit, two per end of the command."""
    kills = [live.kill for live in faults if live.kill]
    hit = len(faults) - len(kills) + sum(kill.role in ("worker", "child", "trial") for kill in kills)
    ended = sum(kill.ends for kill in kills)
    if counts.get("failed", 0) > hit + 4 * sum(kill.role in ("raylet", "gcs_server") for kill in kills):
        yield Finding("wrong", f"{counts['failed']} attempts failed by {hit} faults")
    if (abandoned := counts.get("orphaned", 0) + counts.get("interrupted", 0)) > 2 * ended:
        yield Finding("wrong", f"{abandoned} attempts were abandoned by {ended} ends of the command")
