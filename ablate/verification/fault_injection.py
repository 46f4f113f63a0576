"""Fault injection: a small real sweep under every fault that we know, at drawn moments.

The problem. A sweep promises that nothing is lost, done twice, or left behind, whatever dies. Unit tests kill
one process at a moment that somebody thought of; real failures come at other moments and together.

The idea. The same command, `ablate sweep`, is started again after each fault that ends it, until the sweep is
done. Faults and their moments come from a seed. Then `audit` compares ledger, trial folders, MLflow and
Optuna with a run that nothing disturbed:

    suite = Suite(folder, faults=20, seed=0, names=list(KINDS), tell=print)
    suite.run()
    #   3.1 s  round 0,  17 records  trial killed: "... retry 1 ..."; the next record 1.2 s later
    suite.findings   # [] if every promise was kept

Files are corrupted too, several at a time, while the command is down or after the sweep has finished. Damage
must be reported or repaired, and no value may silently differ from the undisturbed run.

Refused: processes that the suite did not start are never touched. Its own carry a mark in their environment,
and end here.
"""

import itertools
import json
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

from ablate.results.databases import url
from ablate.verification import audit
from ablate.verification.audit import Finding
from ablate.verification.fault_plan import CHECKPOINT_SECONDS, PATIENCE_SECONDS, deck, experiment
from ablate.verification.injections import CHECKPOINT, FAULTS, HARMS, MIGRATION, Fault
from ablate.verification.services import (
    Server,
    Sweep,
    mlflow,
    mlflow_databases,
    postgres,
    postgres_programs,
    table_count,
    trials_in,
)

_GAP = (4, 24)
"""Records between one fault and the next."""
_LATEST_SECONDS = 30.0
"""A fault comes by then, whether records did or not."""
_PAUSE = (0.5, 4.0)
"""Seconds for which a server stays dead."""
_MOST_STARTS = 8
"""Most starts of one sweep without a fault that explains them."""
_GONE_SECONDS = 40.0
_HARMS_AT_ONCE = 3
"""Files that are corrupted before a killed command is started again."""
_HARMS_AT_THE_END = 6
"""Files that are corrupted once the sweep is finished."""
_REBUILD = "`ablate rebuild "
_INTERRUPTED = 130


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
    outcome: str = "survived"

    def __str__(self) -> str:
        again = "" if self.until_next is None else f"the next record {self.until_next:.1f} s later"
        came = "; ".join([*self.came, *([again] if again else [])])
        return f"{self.moment:6.1f} s  round {self.round}, {self.records:3d} records  {self.kind}: {came}"


class Suite:
    """Sweeps under faults until so many were made; `blows`, `findings` and `repeats` say what happened.

    `tell` hears a line for each.
    """

    def __init__(
        self, folder: Path, faults: int, seed: int, names: list[str], tell: Callable[[str], None]
    ) -> None:
        self.folder, self.tell = folder, tell
        self.blows: list[Blow] = []
        self.findings: list[Finding] = []
        self.repeats: list[audit.Repeat] = []
        self.servers: dict[str, Server] = {}
        self._names, self._faults, self._seed = names, faults, seed
        self._harms: list[tuple[str, np.random.Generator]] = []
        self._silent: list[tuple[Blow, int]] = []
        """Corruptions of which it is not known yet what was said, and how long the command's output was
        before."""
        self._started = time.monotonic()
        self._stack = ExitStack()

    def run(self) -> None:
        """Everything, from the servers' start to their end."""
        with self._stack:
            scratch = Path(
                tempfile.mkdtemp(prefix="af")
            )  # short: Ray's sockets lie below, and a socket's path has 107 characters
            self._stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            scratch.chmod(0o755)
            content = experiment(self.folder)
            reference = self._begin(content, "undisturbed", "none", "inline")  # beside the first faults
            address = self._serve(scratch)
            cards = deck(self._names, np.random.default_rng(self._seed))
            plan = [
                (next(cards), np.random.default_rng([self._seed, number])) for number in range(self._faults)
            ]
            kills = deque(card for card in plan if card[0] in FAULTS)
            self._harms = [card for card in plan if card[0] in HARMS]
            for number, (_, rng) in enumerate(card for card in plan if card[0] == MIGRATION):
                self._migration(number, rng)
            for number in itertools.count():
                sweep = self._begin(content, f"round-{number}", address, "ray", RAY_TMPDIR=str(scratch))
                while kills and self._strike(number, sweep, *kills[0]):
                    kills.popleft()
                self._settle(number, sweep)
                while self._corrupt(number, sweep, _HARMS_AT_THE_END):
                    self._say_what_differs(number, sweep)
                    sweep.start()
                    self._settle(number, sweep)
                    if kills:
                        break
                self._audit(number, sweep, reference, address)
                if not kills and not self._harms:
                    return
                if not kills:  # checkpoints, of which a finished sweep has none
                    self._harms = [("bit flip in events", rng) for _, rng in self._harms]

    # Corruption

    def _corrupt(self, number: int, sweep: Sweep, most: int) -> int:
        """Corrupt so many files, while no command runs; returns how many.

        Checkpoints come first, which only unfinished trials have.
        """
        cards = sorted(self._harms, key=lambda card: card[0] != CHECKPOINT)
        made = 0
        for kind, rng in cards:
            done = HARMS[kind].do(sweep.state, sweep.folder, rng) if made < most else None
            if done is None:
                continue
            made += 1
            self._harms = [card for card in self._harms if card[1] is not rng]
            blow = Blow(kind, number, time.monotonic() - self._started, 0, [done])
            self.blows.append(blow)
            self._silent.append((blow, sweep.log.stat().st_size))
            self.tell(f"{len(self.blows):3d}/{self._faults}  {blow}")
        return made

    def _say_what_differs(self, number: int, sweep: Sweep) -> None:
        """`ablate status --verify` names what was corrupted in a finished sweep; what it passes over must
        differ in nothing.
        """
        status, said = sweep.command("status", sweep.folder.name, "--verify")
        if status not in (0, 1):
            self._broken(
                number, Finding("wrong", f"status --verify ended with {status}: {said[-1] if said else ''}")
            )
        for blow, _ in self._silent:
            if any(_subject(blow) in line for line in said):
                blow.came.append("named by status --verify")
                blow.outcome = "found"

    def _look_what_was_said(self, sweep: Sweep) -> None:
        """Set each corruption's outcome by the command's output and the trials' logs."""
        logs = "\n".join(path.read_text(errors="replace") for path in sweep.state.glob("*/*/log-*.txt"))
        for blow, since in self._silent:
            file = blow.came[0].partition(":")[0]
            if any(_subject(blow) in line for line in sweep.told(since)) or f"{file}: " in logs:
                blow.outcome = "found"
            elif blow.outcome != "found":
                blow.outcome = "no difference"
        self._silent = []

    def _migration(self, number: int, rng: np.random.Generator) -> None:
        """Kill the driver of a small sweep while MLflow makes its database; the same command, and `sync`,
        must get done then.
        """
        content = json.dumps(
            {
                "schema": 1,
                "question": "?",
                "workload": {"idle": {"steps": 3}},
                "ablate": {"rht": [True]},
                "seeds": 1,
            }
        )
        name = f"migration-{number}"
        sweep = self._begin(
            content, name, f"sqlite:///{(self.folder / name / 'mlflow.db').resolve()}", "inline"
        )
        self._wait(
            lambda: mlflow_databases(sweep.state) or sweep.process.poll() is not None,
            120,
            "MLflow makes no database",
        )
        time.sleep(rng.uniform(0, 1.5))
        blow = Blow(MIGRATION, -1, time.monotonic() - self._started, sweep.records())
        blow.came.append(
            f"{table_count(mlflow_databases(sweep.state))} tables by then"
            if sweep.process.poll() is None
            else "it was done before"
        )
        with suppress(ProcessLookupError):
            os.killpg(sweep.process.pid, signal.SIGKILL)
        sweep.process.wait()
        self.blows.append(blow)
        for _ in range(2):
            sweep.start()
            self._wait(lambda: sweep.process.poll() is not None, 120, f"{name} does not get done")
            if sweep.done and not sweep.unshipped():
                break
        status, said = sweep.command("sync", name, "--mlflow", sweep.mlflow, "--timeout", "60")
        if sweep.unshipped() or status:
            blow.outcome = "broken"
            why = said[-1] if said else sweep.last_line()
            self._broken(
                name,
                Finding(
                    "lost",
                    f"{blow.kind}: MLflow misses {sweep.unshipped()} members; sync ended with {status}:"
                    f" {why}",
                ),
            )
        self.tell(f"{len(self.blows):3d}/{self._faults}  {blow}")

    def _begin(self, content: str, name: str, mlflow: str, executor: str, **environment: str) -> Sweep:
        file = self.folder / f"{name}.yaml"  # a sweep's name is its file's, and no two in MLflow may be alike
        file.write_text(content)
        sweep = Sweep(file, self.folder / name, mlflow, executor, environment)
        self._stack.callback(sweep.close)
        sweep.start()
        return sweep

    def _serve(self, scratch: Path) -> str:
        """Start the servers; MLflow's address."""
        store = url(scratch / "mlflow.db")
        if programs := postgres_programs():
            server, store = postgres(programs, scratch / "postgres", self.folder / "postgres.log")
            self._keep("PostgreSQL", server)
        else:
            self._names = [
                name for name in self._names if name not in FAULTS or FAULTS[name].role != "PostgreSQL"
            ]
            self.tell(
                "no PostgreSQL here (its programs, and psycopg for Python): MLflow's store is SQLite, and is"
                " not killed"
            )
        server, address = mlflow(store, self.folder / "artifacts", self.folder / "mlflow.log")
        self._keep("MLflow", server)
        return address

    def _keep(self, name: str, server: Server) -> None:
        self.servers[name] = server
        self._stack.callback(server.close)
        self._wait(server.ready, 120, f"{name} does not answer")

    def _wait(self, condition: Callable[[], bool], seconds: float, otherwise: str) -> None:
        """Wait, tending the servers.

        TimeoutError, with the folder that has the logs, where the condition never holds.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            self._tend()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{otherwise} within {seconds:.0f} s; see the logs in {self.folder}")
            time.sleep(0.05)

    def _tend(self) -> None:
        for server in self.servers.values():
            server.tend()

    def _broken(self, number: int | str, found: Finding) -> None:
        folder = f"round-{number}" if isinstance(number, int) else number
        found = replace(found, what=f"{folder}: {found.what}")
        self.findings.append(found)
        self.tell(f"BROKEN {found.kind}: {found.what}")
        with (self.folder / folder / "findings.txt").open("a") as file:
            print(found.kind, found.count, found.what, file=file)

    # One fault

    def _strike(self, number: int, sweep: Sweep, kind: str, rng: np.random.Generator) -> bool:
        """Make one fault at its moment and wait for its effect; return False if the sweep was done before."""
        fault, goal, which, pause = (
            FAULTS[kind],
            sweep.records() + int(rng.integers(*_GAP)),
            rng.random(),
            rng.uniform(*_PAUSE),
        )
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
        """Those with a role, once the sweep has so many records, or the time has come; none where the sweep
        was done before.
        """
        latest = time.monotonic() + _LATEST_SECONDS
        while not self._over(number, sweep):
            self._tend()
            if (sweep.records() >= goal or time.monotonic() > latest) and (
                victims := self._victims(sweep, role)
            ):
                return victims
            time.sleep(0.02)
        return []

    def _victims(self, sweep: Sweep, role: str) -> list[Any]:
        if role in self.servers:
            server = self.servers[role]
            return [server] if server.process.poll() is None and server.ready() else []
        return sweep.victims(role)

    def _over(self, number: int, sweep: Sweep) -> bool:
        """Return True if the sweep reports that it is done.

        One that ended by itself otherwise is a broken promise, and started again.
        """
        status = sweep.process.poll()
        if status is None or sweep.done:
            return sweep.done
        if (
            status == 2
            and _REBUILD in sweep.last_line()
            and any("ledger" in blow.kind for blow, _ in self._silent)
        ):
            status, said = sweep.command("rebuild", str(sweep.file), "--device", "cpu")
            if status:
                self._broken(
                    number,
                    Finding("wrong", f"rebuild ended with status {status}: {said[-1] if said else ''}"),
                )
            sweep.start()
            return False
        self._broken(
            number, Finding("wrong", f"the command ended by itself with status {status}: {sweep.last_line()}")
        )
        if sweep.starts > _MOST_STARTS + len(self.blows):
            raise TimeoutError(f"the same command never gets done; see {sweep.log}")
        sweep.start()
        return False

    def _end(self, number: int, sweep: Sweep, fault: Fault, blow: Blow, rng: np.random.Generator) -> None:
        """The command ends by the fault, with the status that says so, and all its processes with it.

        It is started again.
        """
        began = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            sweep.process.wait(_GONE_SECONDS)
        status = sweep.process.poll()
        wanted = (
            -signal.SIGKILL if (fault.role, fault.signal) == ("controller", signal.SIGKILL) else _INTERRUPTED
        )
        if status not in (wanted, 0):  # 0: it was done at that moment
            self._broken(
                number, Finding("wrong", f"{blow.kind}: the command ended with status {status}, not {wanted}")
            )
        left = sweep.gone(_GONE_SECONDS)
        if left:
            self._broken(number, Finding("wrong", f"{blow.kind}: {', '.join(left)} outlived it", len(left)))
        blow.came.append(f"status {status}, all gone after {time.monotonic() - began:.1f} s")
        if fault.then:
            fault.then(sweep.folder, rng)
        self._corrupt(number, sweep, _HARMS_AT_ONCE)
        if not sweep.done:
            sweep.start()

    def _watch(self, sweep: Sweep, blow: Blow, told: int, retried: bool) -> None:
        """Wait for the next record, and after a hit on a trial for the line that reports its retry."""
        began, before, line = time.monotonic(), sweep.records(), None
        deadline = began + _LATEST_SECONDS
        while (
            time.monotonic() < deadline
            and not sweep.done
            and (blow.until_next is None or (retried and not line))
        ):
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
        self._look_what_was_said(sweep)
        self._wait(lambda: reference.done, 300, "the undisturbed run does not end")
        checks = [
            audit.sweep(sweep.state, sweep.folder, reference.folder),
            audit.study(sweep.folder),
            audit.mlflow(audit.Tracker(address), sweep.folder),
            self._attempts(number, sweep),
            self._again(number, sweep),
        ]
        for found in itertools.chain(*checks):
            self._broken(number, found)

    def _attempts(self, number: int, sweep: Sweep) -> Iterator[Finding]:
        """No more attempts than faults explain: one trial for each that was hit, two for each end of the
        command or of Ray.
        """
        mine = [FAULTS[blow.kind] for blow in self.blows if blow.round == number and blow.kind in FAULTS]
        harmed = sum(blow.round == number and blow.kind in HARMS for blow in self.blows)
        hit = harmed + sum(fault.role in ("worker", "child", "trial") for fault in mine)
        ended = sum(fault.ends for fault in mine)
        counts = sweep.outcomes()
        if counts.get("failed", 0) > hit + 4 * sum(fault.role in ("raylet", "gcs_server") for fault in mine):
            yield Finding("wrong", f"{counts['failed']} attempts failed by {hit} faults")
        if (left := counts.get("orphaned", 0) + counts.get("interrupted", 0)) > 2 * ended:
            yield Finding("wrong", f"{left} attempts were left by {ended} ends of the command")

    def _again(self, number: int, sweep: Sweep) -> Iterator[Finding]:
        """A trial that goes on does again at most what one interval between checkpoints had done, and what
        one record covers.
        """
        found = list(audit.repeats(sweep.state))
        self.repeats += found
        corrupted = any(blow.round == number and blow.kind in HARMS for blow in self.blows)
        for repeat in () if corrupted else found:  # what was corrupted is done again from an earlier state
            if repeat.seconds > CHECKPOINT_SECONDS + 3 * repeat.slack:
                yield Finding(
                    "wrong",
                    f"trial {repeat.trial} did {repeat.steps} steps again, {repeat.seconds:.2f} s of work",
                )


def _subject(blow: Blow) -> str:
    """The trial, or the ledger, that a corruption was of, as what is said names it."""
    return "ledger" if "ledger" in blow.kind else blow.came[0].partition("/")[0]
