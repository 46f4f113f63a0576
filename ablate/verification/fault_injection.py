"""Fault injection: a small real sweep under every kind of fault, at random moments.

The problem. A sweep guarantees that nothing is lost, done twice, or left behind, whichever process dies. Unit
tests kill one process at one chosen moment; real failures come at other moments, and several together.

The idea. The same command, `ablate sweep`, is started again after each fault that ends it, until the sweep is
done. Faults and their moments are drawn from a seed. Then `audit` compares ledger, trial folders, MLflow and
Optuna with an undisturbed run:

    suite = Suite(folder, faults=20, seed=0, names=list(KINDS), report=print)
    suite.run()
    #   3.1 s  round 0,  17 records  trial killed: "... retry 1 ..."; the next record 1.2 s later
    suite.findings   # [] if every guarantee held

Files are corrupted too, several at a time, while the command is down or after the sweep has finished. Damage
must be reported or repaired, and no value may silently differ from the undisturbed run.

Not done: processes that the suite did not start are never touched. Its own carry a mark in their environment,
and all of them end with the suite.
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
from typing import Literal

import numpy as np
import psutil

from ablate.store.databases import url
from ablate.verification import audit
from ablate.verification.audit import Finding
from ablate.verification.fault_plan import CHECKPOINT_SECONDS, PATIENCE_SECONDS, deck, experiment
from ablate.verification.injections import CHECKPOINT, FAULTS, HARMS, MIGRATION, Fault
from ablate.verification.services import (
    Server,
    SweepCommand,
    mlflow,
    mlflow_databases,
    postgres,
    postgres_programs,
    table_count,
    trials_in,
)

_GAP = (4, 24)
"""Records between one fault and the next."""
_POLL_SECONDS = 0.05
"""Pause between two looks, each of which reads the ledger and the environment of all processes."""
_LATEST_SECONDS = 30.0
"""Longest wait for a fault, even if the sweep writes no records."""
_PAUSE = (0.5, 4.0)
"""Shortest and longest time in seconds for which a server stays down."""
_MOST_STARTS = 8
"""Most starts of one sweep without a fault that explains them."""
_GONE_SECONDS = 40.0
"""Time limit for the processes of a sweep to end with its command."""
_HARMS_AT_ONCE = 3
"""Files that are corrupted before a killed command is started again."""
_HARMS_AT_THE_END = 6
"""Files that are corrupted once the sweep is finished."""
_REBUILD = "`ablate rebuild "
_INTERRUPTED = 130

Victims = list[Server] | list[psutil.Process]


def _hit(victim: Server | psutil.Process, fault: Fault, pause: float) -> None:
    if isinstance(victim, Server):
        victim.kill(fault.signal, pause)
    elif fault.signal == signal.SIGINT:  # a terminal sends it to the whole process group
        os.killpg(victim.pid, fault.signal)
    else:
        victim.send_signal(fault.signal)


# The suite


FaultOutcome = Literal["survived", "found", "no difference", "broken"]
"""Outcome of a fault. `found`: a corruption that a command or a log names; `no difference`: one that none
names, and that changed no value."""


@dataclass
class InjectedFault:
    """Fault that was injected: its time, the number of records then, and its effects."""

    kind: str
    round: int
    moment: float
    """Seconds since the suite began."""
    records: int
    effects: list[str] = field(default_factory=list)
    """Observed effects. For a corruption the first one names the file: `folder/file: description`."""
    until_next: float | None = None
    """Seconds to the next record."""
    outcome: FaultOutcome = "survived"

    def __str__(self) -> str:
        again = "" if self.until_next is None else f"the next record {self.until_next:.1f} s later"
        effects = "; ".join([*self.effects, *([again] if again else [])])
        return f"{self.moment:6.1f} s  round {self.round}, {self.records:3d} records  {self.kind}: {effects}"


class Suite:
    """Run of sweeps under faults. Results: `injected`, `findings` and `repeats`.

    Args:
        folder: New folder for state folders, logs and servers.
        faults: Number of faults to inject.
        seed: Seed of the faults, their moments and their victims.
        names: Kinds of faults, of KINDS.
        report: Called with a line of text for each fault and each finding.
    """

    def __init__(
        self, folder: Path, faults: int, seed: int, names: list[str], report: Callable[[str], None]
    ) -> None:
        self.folder, self.report = folder, report
        self.injected: list[InjectedFault] = []
        self.findings: list[Finding] = []
        self.repeats: list[audit.Repeat] = []
        self.servers: dict[str, Server] = {}
        self._names, self._faults, self._seed = names, faults, seed
        self._harms: list[tuple[str, np.random.Generator]] = []
        self._undecided: list[tuple[InjectedFault, int]] = []
        """Corruptions whose outcome is not known yet, with the size of the command's output before them."""
        self._started = time.monotonic()
        self._stack = ExitStack()

    def run(self) -> None:
        """Start the servers, inject all faults, audit every round, and stop the servers."""
        with self._stack:
            # Short, since Ray creates sockets in it, and a socket's path has at most 107 characters.
            scratch = Path(tempfile.mkdtemp(prefix="af"))
            self._stack.callback(shutil.rmtree, scratch, ignore_errors=True)
            scratch.chmod(0o755)
            content = experiment(self.folder, self._faults)
            # The reference runs in parallel with the first faults.
            reference = self._begin(content, "undisturbed", "none", "inline")
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
                    self._verify(number, sweep)
                    sweep.start()
                    self._settle(number, sweep)
                    if kills:
                        break
                self._audit(number, sweep, reference, address)
                if not kills and not self._harms:
                    return
                if not kills:  # a finished sweep has no checkpoints to corrupt
                    self._harms = [("bit flip in events", rng) for _, rng in self._harms]

    # Corruption

    def _corrupt(self, number: int, sweep: SweepCommand, most: int) -> int:
        """Corrupt at most `most` files while no command runs; return their number.

        Checkpoints come first, since only unfinished trials have one.
        """
        cards = sorted(self._harms, key=lambda card: card[0] != CHECKPOINT)
        count = 0
        for kind, rng in cards:
            description = HARMS[kind].do(sweep.state, sweep.folder, rng) if count < most else None
            if description is None:
                continue
            count += 1
            self._harms = [card for card in self._harms if card[1] is not rng]
            injection = InjectedFault(kind, number, time.monotonic() - self._started, 0, [description])
            self.injected.append(injection)
            self._undecided.append((injection, sweep.log.stat().st_size))
            self.report(f"{len(self.injected):3d}/{self._faults}  {injection}")
        return count

    def _verify(self, number: int, sweep: SweepCommand) -> None:
        """Mark the corruptions of a finished sweep that `ablate status --verify` names."""
        status, output = sweep.command("status", sweep.folder.name, "--verify")
        if status not in (0, 1):
            self._broken(
                number,
                Finding("wrong", f"status --verify ended with {status}: {output[-1] if output else ''}"),
            )
        for injection, _ in self._undecided:
            if any(_subject(injection) in line for line in output):
                injection.effects.append("named by status --verify")
                injection.outcome = "found"

    def _decide_outcomes(self, sweep: SweepCommand) -> None:
        """Set the outcome of each corruption from the command's output and the trials' logs."""
        logs = "\n".join(path.read_text(errors="replace") for path in sweep.state.glob("*/*/log-*.txt"))
        for injection, since in self._undecided:
            file = injection.effects[0].partition(":")[0]
            if any(_subject(injection) in line for line in sweep.output_since(since)) or f"{file}: " in logs:
                injection.outcome = "found"
            elif injection.outcome != "found":
                injection.outcome = "no difference"
        self._undecided = []

    def _migration(self, number: int, rng: np.random.Generator) -> None:
        """Kill the controller of a small sweep while MLflow creates its database.

        The same command, then `ablate sync`, must finish afterwards.
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
            lambda: bool(mlflow_databases(sweep.state)) or sweep.process.poll() is not None,
            120,
            "MLflow makes no database",
        )
        time.sleep(rng.uniform(0, 1.5))
        injection = InjectedFault(MIGRATION, -1, time.monotonic() - self._started, sweep.records())
        injection.effects.append(
            f"{table_count(mlflow_databases(sweep.state))} tables by then"
            if sweep.process.poll() is None
            else "it was done before"
        )
        with suppress(ProcessLookupError):
            os.killpg(sweep.process.pid, signal.SIGKILL)
        sweep.process.wait()
        self.injected.append(injection)
        for _ in range(2):
            sweep.start()
            self._wait(lambda: sweep.process.poll() is not None, 120, f"{name} does not get done")
            if sweep.done and not sweep.unshipped():
                break
        status, output = sweep.command("sync", name, "--mlflow", sweep.mlflow, "--timeout", "60")
        if sweep.unshipped() or status:
            injection.outcome = "broken"
            why = output[-1] if output else sweep.last_line()
            self._broken(
                name,
                Finding(
                    "lost",
                    f"{injection.kind}: MLflow misses {sweep.unshipped()} members; sync ended with {status}:"
                    f" {why}",
                ),
            )
        self.report(f"{len(self.injected):3d}/{self._faults}  {injection}")

    def _begin(self, content: str, name: str, mlflow: str, executor: str, **environment: str) -> SweepCommand:
        file = self.folder / f"{name}.yaml"  # its stem names the sweep, which must be unique in MLflow
        file.write_text(content)
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
            self._names = [
                name for name in self._names if name not in FAULTS or FAULTS[name].role != "PostgreSQL"
            ]
            self.report(
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
        """Wait for a condition, and restart servers that are down.

        Raises:
            TimeoutError: The condition did not hold in time. The message is `otherwise` and the folder of
                logs.
        """
        deadline = time.monotonic() + seconds
        while not condition():
            self._restart_servers()
            if time.monotonic() > deadline:
                raise TimeoutError(f"{otherwise} within {seconds:.0f} s; see the logs in {self.folder}")
            time.sleep(_POLL_SECONDS)

    def _restart_servers(self) -> None:
        for server in self.servers.values():
            server.restart_if_due()

    def _broken(self, number: int | str, finding: Finding) -> None:
        folder = f"round-{number}" if isinstance(number, int) else number
        finding = replace(finding, what=f"{folder}: {finding.what}")
        self.findings.append(finding)
        self.report(f"BROKEN {finding.kind}: {finding.what}")
        with (self.folder / folder / "findings.txt").open("a") as file:
            print(finding.kind, finding.count, finding.what, file=file)

    # One fault

    def _strike(self, number: int, sweep: SweepCommand, kind: str, rng: np.random.Generator) -> bool:
        """Inject one fault and wait for its effect; return False if the sweep was done before."""
        fault, goal, choice, pause = (
            FAULTS[kind],
            sweep.records() + int(rng.integers(*_GAP)),
            rng.random(),
            rng.uniform(*_PAUSE),
        )
        victims = self._await(number, sweep, fault.role, goal)
        if not victims:
            return False
        victim, log_size = victims[int(choice * len(victims))], sweep.log.stat().st_size
        injection = InjectedFault(kind, number, time.monotonic() - self._started, sweep.records())
        retried = not fault.ends and (fault.role == "trial" or bool(trials_in(victim)))
        try:
            _hit(victim, fault, pause)
        except (psutil.NoSuchProcess, ProcessLookupError):  # the process ended at that moment
            return self._strike(number, sweep, kind, rng)
        self.injected.append(injection)
        if fault.ends:
            self._end(number, sweep, fault, injection, rng)
        self._watch(sweep, injection, log_size, retried)
        self.report(f"{len(self.injected):3d}/{self._faults}  {injection}")
        return True

    def _await(self, number: int, sweep: SweepCommand, role: str, goal: int) -> Victims:
        """Return the processes with a role, once the sweep has `goal` records or _LATEST_SECONDS have passed.

        The list is empty if the sweep is done before that.
        """
        latest = time.monotonic() + _LATEST_SECONDS
        while not self._over(number, sweep):
            self._restart_servers()
            if (sweep.records() >= goal or time.monotonic() > latest) and (
                victims := self._victims(sweep, role)
            ):
                return victims
            time.sleep(_POLL_SECONDS)
        return []

    def _victims(self, sweep: SweepCommand, role: str) -> Victims:
        if role in self.servers:
            server = self.servers[role]
            return [server] if server.process.poll() is None and server.ready() else []
        return sweep.victims(role)

    def _over(self, number: int, sweep: SweepCommand) -> bool:
        """Return True if the sweep reports that it is done.

        A command that ended otherwise, without a fault, is a finding, and is started again.
        """
        status = sweep.process.poll()
        if status is None or sweep.done:
            return sweep.done
        if (
            status == 2
            and _REBUILD in sweep.last_line()
            and any("ledger" in injection.kind for injection, _ in self._undecided)
        ):
            status, output = sweep.command("rebuild", str(sweep.file), "--device", "cpu")
            if status:
                self._broken(
                    number,
                    Finding("wrong", f"rebuild ended with status {status}: {output[-1] if output else ''}"),
                )
            sweep.start()
            return False
        self._broken(
            number, Finding("wrong", f"the command ended by itself with status {status}: {sweep.last_line()}")
        )
        if sweep.starts > _MOST_STARTS + len(self.injected):
            raise TimeoutError(f"the same command never gets done; see {sweep.log}")
        sweep.start()
        return False

    def _end(
        self,
        number: int,
        sweep: SweepCommand,
        fault: Fault,
        injection: InjectedFault,
        rng: np.random.Generator,
    ) -> None:
        """Wait for the command to end by the fault, check its exit status and that all its processes ended.

        Corrupt some files while it is down, then start it again.
        """
        began = time.monotonic()
        with suppress(subprocess.TimeoutExpired):
            sweep.process.wait(_GONE_SECONDS)
        status = sweep.process.poll()
        wanted = (
            -signal.SIGKILL if (fault.role, fault.signal) == ("controller", signal.SIGKILL) else _INTERRUPTED
        )
        if status not in (wanted, 0):  # 0: the sweep was done at that moment
            self._broken(
                number,
                Finding("wrong", f"{injection.kind}: the command ended with status {status}, not {wanted}"),
            )
        survivors = sweep.await_end(_GONE_SECONDS)
        if survivors:
            self._broken(
                number,
                Finding("wrong", f"{injection.kind}: {', '.join(survivors)} outlived it", len(survivors)),
            )
        injection.effects.append(f"status {status}, all gone after {time.monotonic() - began:.1f} s")
        if fault.then:
            fault.then(sweep.folder, rng)
        self._corrupt(number, sweep, _HARMS_AT_ONCE)
        if not sweep.done:
            sweep.start()

    def _watch(self, sweep: SweepCommand, injection: InjectedFault, log_size: int, retried: bool) -> None:
        """Wait for the next record and, if a trial was hit, for the line that reports its retry."""
        began, before, line = time.monotonic(), sweep.records(), None
        deadline = began + _LATEST_SECONDS
        while (
            time.monotonic() < deadline
            and not sweep.done
            and (injection.until_next is None or (retried and not line))
        ):
            self._restart_servers()
            if injection.until_next is None and sweep.records() > before:
                injection.until_next = time.monotonic() - began
                deadline = time.monotonic() + 2 * PATIENCE_SECONDS
            line = next((text for text in sweep.output_since(log_size) if "; retry " in text), None)
            time.sleep(_POLL_SECONDS)
        if line:
            injection.effects.append(f'"{line}"')

    # The end of a round

    def _settle(self, number: int, sweep: SweepCommand) -> None:
        """Run the same command until the sweep is done and MLflow has all of its members."""
        self._wait(lambda: self._over(number, sweep), 300, "the sweep does not get done")
        for server in self.servers.values():
            self._wait(server.ready, 120, "a server does not answer")
        for _ in range(_MOST_STARTS):
            if not sweep.unshipped():
                return
            sweep.start()
            self._wait(lambda: self._over(number, sweep), 300, "the sweep does not get done")
        self._broken(number, Finding("lost", f"MLflow still misses {sweep.unshipped()} members"))

    def _audit(self, number: int, sweep: SweepCommand, reference: SweepCommand, address: str) -> None:
        if survivors := sweep.await_end(_GONE_SECONDS):
            self._broken(
                number, Finding("wrong", f"{', '.join(survivors)} outlived the sweep", len(survivors))
            )
        self._decide_outcomes(sweep)
        self._wait(lambda: reference.done, 300, "the undisturbed run does not end")
        checks = [
            audit.sweep(sweep.state, sweep.folder, reference.folder),
            audit.study(sweep.folder),
            audit.mlflow(audit.Tracker(address), sweep.folder),
            self._attempts(number, sweep),
            self._again(number, sweep),
        ]
        for finding in itertools.chain(*checks):
            self._broken(number, finding)

    def _attempts(self, number: int, sweep: SweepCommand) -> Iterator[Finding]:
        """Check that faults explain all failed attempts: one per trial hit, two per end of the command."""
        kinds = [injection.kind for injection in self.injected if injection.round == number]
        mine = [FAULTS[kind] for kind in kinds if kind in FAULTS]
        hit = sum(kind in HARMS for kind in kinds) + sum(
            fault.role in ("worker", "child", "trial") for fault in mine
        )
        ended = sum(fault.ends for fault in mine)
        counts = sweep.outcomes()
        if counts.get("failed", 0) > hit + 4 * sum(fault.role in ("raylet", "gcs_server") for fault in mine):
            yield Finding("wrong", f"{counts['failed']} attempts failed by {hit} faults")
        if (abandoned := counts.get("orphaned", 0) + counts.get("interrupted", 0)) > 2 * ended:
            yield Finding("wrong", f"{abandoned} attempts were abandoned by {ended} ends of the command")

    def _again(self, number: int, sweep: SweepCommand) -> Iterator[Finding]:
        """Check that a resumed trial repeats at most one checkpoint interval and the work between records."""
        repeats = list(audit.repeats(sweep.state))
        self.repeats += repeats
        corrupted = any(injection.round == number and injection.kind in HARMS for injection in self.injected)
        for repeat in () if corrupted else repeats:  # corrupted trials go back further
            if repeat.seconds > CHECKPOINT_SECONDS + 3 * repeat.slack:
                yield Finding(
                    "wrong",
                    f"trial {repeat.trial} did {repeat.steps} steps again, {repeat.seconds:.2f} s of work",
                )


def _subject(injection: InjectedFault) -> str:
    """Return the name of the corrupted trial, or `ledger`, as output and logs spell it."""
    return "ledger" if "ledger" in injection.kind else injection.effects[0].partition("/")[0]
