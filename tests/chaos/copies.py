"""Corruptions of copies of small sweeps, one at a time: what every reader shows, and what the next sweep makes of it.

A few sweeps, the BASES, are run once with the real command. Each fault takes a copy of one of them, corrupts one file or folder, calls
every command that reads, then the sweep again (and `ablate rebuild` where the sweep asks for it), and compares all of it with an
untouched copy that was treated alike. Commands of users, and the command that judges runs from elsewhere, are killed here, too.

    silent   a reader shows something else with exit status 0 and without a word, but for an answer that is not shown until the next
             report; or a record differs at the end
    lost     a finished trial's result is gone, and was not run again; or the sweep cannot be ended
    twice    a trial, a member or a point of the search is counted twice
    wrong    a command ends with a traceback, or the audit found something else, such as an attempt that never ended

Everything else is `named` (a command says that something is damaged) or `no difference`.
"""

import itertools
import json
import os
import re
import shutil
import signal
import sqlite3
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from random import Random

from support.commands import here
from support.experiments import end, start, write

from ablate.cache import SETTLED_SECONDS
from ablate.reports import frames
from chaos.audit import Finding, audit, finished
from chaos.corruptions import KINDS, Corrupted, cell
from chaos.report import Fault, Overrun, Report, limit

SHAPE = {"steps": 40, "eval_every": 10}
TELEMETRY = {"log": 5, "checkpoint": 0.02}
GRID = {"cooldown": [0, 0.25], "rht": [True, False]}
SPACE = {"rht": [True, False], "workload.lr": {"uniform": [1e-4, 1e-2], "log": True}}
SEARCH = {"ablate": SPACE, "search": {"sampler": "tpe", "trials": 6}}
BASES = ("finished", "half", "search", "mlflow", "judged")
"""A grid that is over, the same grid killed half-way, a search killed half-way, a grid with MLflow's store, and a sweep of commands with
runs that `ablate judge --into` added."""
OF_BASE = {"judged": "judged", "MLflow": "mlflow", "artifact": "mlflow"}
"""Kinds of corruption of which one base alone has files."""
DEFECTS = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError)
DEFECTS += (TypeError, sqlite3.Error)
"""Errors of our own code when it reads what it should have refused."""
COMMAND = """
import json, os, sys, time
lr, seed, pause = map(float, sys.argv[1:])
path = os.path.join(os.environ["ABLATE_CHECKPOINT"], "step")
step = int(open(path).read()) if os.path.exists(path) else 0
while step < 40:
    step += 1
    print(json.dumps({"step": step, "train/loss": lr + seed / 100 + 1 / step}), flush=True)
    if step % 10 == 0:
        print(json.dumps({"step": step, "val/loss": lr + seed / 90 + 1 / step}), flush=True)
    with open(path + ".new", "w") as file:
        file.write(str(step))
    os.replace(path + ".new", path)
    time.sleep(pause)
"""
"""Command of base `judged`: it continues from a checkpoint of its own, which it writes after each step."""
PAUSE = 0.004
"""Seconds of a step of that command where it is killed: many steps pass between two looks of its reader."""
MOST_KILLS = 6
"""Largest number of kills of one command, which may end after that."""
COMMANDS = ("sweep of commands killed", "judge killed")
"""Kinds of kills of such sweeps."""
SECONDS = 600
"""Time limit of one fault, which takes ten seconds on an idle machine: only a command that waits without end exceeds it."""
WORDS = re.compile(
    r"damaged|torn|no ledger|cannot be (read|opened|written)|unverified(?!\")|not what was|"
    r"is a (folder|link)|runs? again|no such|kept as|the result of another|is gone|is not a|are not those|"
    r"not a database|does not match"
)
"""Words of a sentence that names damage."""
VOLATILE = re.compile(
    r'"(quiet_s|seconds_left|mlflow_behind)": \S+|last change .*? ago|about .*? left|in \d+ s\b|\(\d+ s\)|'
    r"\d\d:\d\d(:\d\d)?( UTC)?|\d+ (MB|GB)\b|tokens/s|[0-9.]+ s\b|spec\.json|log-\d+\.txt"
)
"""Parts of an output that differ between two calls."""


# Sweeps


@dataclass(frozen=True)
class Place:
    """A folder with a state folder, a cache and the files of sweeps, of which the first is audited."""

    folder: Path
    base: str

    @property
    def names(self) -> list[str]:
        """Return the names of its sweeps."""
        return {"search": ["search"], "judged": ["grid"]}.get(self.base, ["grid", "other"])

    @property
    def state(self) -> Path:
        """Return its state folder."""
        return self.folder / "state"

    @property
    def sweep(self) -> Path:
        """Return the folder of the audited sweep."""
        return self.state / "sweeps" / self.names[0]

    def call(self, *words: object) -> tuple[int, str]:
        """Return exit status and output of `ablate ...` on this state folder; 99 for an exception."""
        kept = {"ABLATE_CACHE": str(self.folder / "cache"), "COLUMNS": "240"}
        try:
            done = here(*words, "--state", self.state, **kept)
        except Overrun:
            raise
        except BaseException:
            return 99, traceback.format_exc()
        return done.returncode, done.stdout + done.stderr

    def run(self, name: str) -> tuple[int, str]:
        """Run or continue a sweep."""
        mlflow = () if self.base == "mlflow" else ("--mlflow", "none")
        words = ("--executor", "inline", *mlflow, "--no-report")
        return self.call("sweep", self.folder / f"{name}.yaml", *words)

    def judge(self) -> tuple[int, str]:
        """Judge the runs from elsewhere into the sweep of commands."""
        words = ("--into", "grid", "--against", "config.lr=0.1", "--no-report")
        return self.call("judge", self.folder.parent / "theirs.csv", *words)


def make(folder: Path, base: str) -> Place:
    """Run the sweeps of a base with the real command."""
    place = Place(folder / base, base)
    if base == "judged":
        commands(place, 0.0)
        _succeed(place.run("grid"), place.judge())
        return place
    place.folder.mkdir(parents=True)
    for name in place.names:
        seeds = 2 if name == "grid" and base != "mlflow" else 1
        keys = {"ablate": GRID} | (SEARCH if name == "search" else {})
        write(place.folder, name, SHAPE, seeds=seeds, question=f"Q of {name}?", telemetry=TELEMETRY, **keys)
    if base in ("half", "search"):
        _kill_half_way(place, 4)
    else:
        _succeed(*(place.run(name) for name in place.names))
        place.call("report", *place.names, "--mlflow", "none", "--no-pdf", "--notebook", "ablation")
    return place


def _succeed(*ends: tuple[int, str]) -> None:
    for status, output in ends:
        assert status == 0, output


def commands(place: Place, pause: float) -> None:
    """Write the sweep of base `judged`, and the runs that are judged into it."""
    place.folder.mkdir(parents=True)
    (place.folder / "train.py").write_text(COMMAND)
    run = "python train.py {lr} {seed} {pause}"
    content = {
        "schema": 1, "question": "Q?", "seeds": 2, "recipe": "bf16", "against": {"workload.config.lr": 0.1},
        "workload": {"command": {"run": run, "steps": 40, "config": {"lr": 0.1, "pause": pause}}},
        "ablate": {"workload.config.lr": [0.1, 0.2]},
    }  # fmt: skip
    (place.folder / "grid.yaml").write_text(json.dumps(content))
    rows = [f"theirs,{seed},{step},{0.15 + seed / 50 + 1 / step}" for seed in range(4) for step in (20, 40)]
    (place.folder.parent / "theirs.csv").write_text("\n".join(["arm,seed,step,val/loss", *rows]))


def _kill_half_way(place: Place, results: int) -> None:
    """Run the sweep and kill it once trials are over and another one has a checkpoint."""
    file, kept = place.folder / f"{place.names[0]}.yaml", {"ABLATE_CACHE": str(place.folder / "cache")}
    words = ("--state", place.state, "--executor", "inline", "--mlflow", "none", "--no-report")
    process = start("sweep", file, *words, **kept)
    while process.poll() is None:
        over = len([*place.state.glob("trials/*/result.json")])
        if over >= results and any(place.state.glob("trials/*/checkpoint.pt")):
            break
        time.sleep(0.002)
    end(process)


@dataclass(frozen=True)
class Whole:
    """A base, and an untouched copy whose sweeps were continued to their end."""

    origin: Place
    place: Place
    outputs: dict[str, tuple[int, str]]
    """Output of every reader before that."""
    over: dict[tuple[str, int], float]
    """Last loss of the members that were finished before, by arm and seed."""

    @classmethod
    def of(cls, folder: Path, base: str) -> "Whole":
        """Run a base, copy it, and let the copy end."""
        origin = make(folder, base)
        place = _copied(origin, folder / f"whole-{base}")
        outputs = {name: (status, plain(output, place)) for name, status, output in readers(place)}
        assert not [status for status, _ in outputs.values() if status], place.folder
        over = finished(place.sweep)
        _succeed(*(place.run(name) for name in place.names))
        return cls(origin, place, outputs, over)


def _copied(place: Place, folder: Path) -> Place:
    shutil.rmtree(folder, ignore_errors=True)
    shutil.copytree(place.folder, folder, symlinks=True)
    return Place(folder, place.base)


# Judgement


def readers(place: Place) -> Iterator[tuple[str, int, str]]:
    """Yield name, exit status and output of every reader; files that it writes belong to its output."""
    name, out = place.names[0], place.folder / "out"
    arms = (f"{name}:cooldown=0 rht=true", f"{name}:bf16")
    arms = {"search": ("search", "search"), "judged": ("grid:config.lr=0.2", "grid:elsewhere: theirs")}.get(
        place.base, arms
    )
    yield "status --json", *place.call("status", "--json")
    yield "status --verify", *place.call("status", "--verify")
    yield "show", *place.call("show", "--json")
    yield f"show {name}", *place.call("show", name)
    yield "show two", *place.call("show", *arms)
    report = ("report", name, "--out", out, "--no-pdf", "--notebook", "ablation", "--mlflow", "none")
    for words, suffix in ((("show", name, "--to", "csv", "--out", out), ".csv"), (report, ".md")):
        status, output = place.call(*words)
        written = [] if status else sorted(out.rglob(f"*{suffix}"))
        yield f"{words[0]}, {suffix}", status, output + "".join(path.read_text() for path in written)
    shutil.rmtree(out, ignore_errors=True)
    try:
        with frames.open(name, state=place.state) as results:
            yield "reports.open", 0, results.arms.to_csv() + results.trials.to_csv()
    except (ValueError, FileNotFoundError) as error:
        yield "reports.open", 2, str(error)
    except DEFECTS:
        yield "reports.open", 99, traceback.format_exc()


def plain(text: str, place: Place) -> str:
    """Return an output without what differs between two calls, or two copies."""
    lines = VOLATILE.sub("", text.replace(str(place.folder), "FOLDER")).replace(" ", "").splitlines()
    return "\n".join(line for line in lines if ",running," not in line)


def _traceback(name: str, status: int, output: str) -> Finding | None:
    at = output.find("Traceback (most recent")
    if status != 99 and at < 0:
        return None
    return Finding("wrong", f"{name}: {output[max(0, at) :][:300]} ... {output[-1200:]}")


def read(place: Place, whole: Whole, fault: Fault) -> None:
    """Compare what every reader shows of a corrupted copy with what it shows of the untouched one."""
    for name, status, output in readers(place):
        if wrong := _traceback(name, status, output):
            fault.findings.append(wrong)
            continue
        wanted_status, wanted = whole.outputs[name]
        before, now = Counter(wanted.splitlines()), Counter(plain(output, place).splitlines())
        more, less = now - before, before - now
        new = [line for line in output.splitlines() if plain(line, place) in more]
        answer = ('"answer":', '"lead":')  # and its first words
        differ = [line for line in (*more, *less) if not line.startswith(answer)]
        if status not in (0, wanted_status) or any(map(WORDS.search, new)):
            fault.effects.append(f"{name} ({status}): {' | '.join(new)[:600]}")
        elif differ:
            fault.findings.append(Finding("silent", f"{name} ({status}): {' | '.join(differ)[:600]}"))


def continue_sweeps(place: Place, fault: Fault) -> bool:
    """Run the sweeps again, as their sentences say, until they end; return False if they do not."""
    for _ in range(3):
        ends = [(name, *place.run(name)) for name in place.names]
        for name, status, output in ends:
            if wrong := _traceback(f"sweep {name}", status, output):
                fault.findings.append(wrong)
            elif line := next(filter(WORDS.search, output.splitlines()), output[-300:] if status else ""):
                fault.effects.append(f"sweep {name} ({status}): {line[:400]}")
            if status and (match := re.search(r"(/\S+): .*move away what is there", output)):
                with suppress(OSError):  # the other sweep's message named it too
                    os.rename(match[1], place.state / f"away-{time.monotonic_ns()}")
            if status and "ablate rebuild" in output:
                status, output = place.call("rebuild", place.folder / f"{name}.yaml")
                if wrong := _traceback(f"rebuild {name}", status, output):
                    fault.findings.append(wrong)
                fault.effects.append(f"rebuild {name} ({status}): {output[:300]}")
        if not any(status for _, status, _ in ends):
            return True
    last = [(name, status, output[-300:]) for name, status, output in ends]
    fault.findings.append(Finding("lost", f"the sweep cannot be ended: {last}"))
    return False


def audit_copy(place: Place, whole: Whole) -> Iterator[Finding]:
    """Audit a copy whose sweeps have ended, against the untouched one."""
    for finding in audit(place.state, place.sweep, whole.place.sweep):
        stray = finding.kind == "twice" and finding.about == "trial folder"  # which is nobody's trial
        added = finding.about == "checkpoint"
        # A search that continues earlier draws other points.
        drawn = place.base == "search" and finding.about in ("member", "trial folder")
        if not (stray or added or drawn):
            yield finding
    at_end = finished(place.sweep)
    if gone := [key for key, value in whole.over.items() if at_end.get(key) != value]:
        yield Finding("lost", f"finished before, and gone at the end: {gone}")
    if place.base == "search" and len(at_end) != len(finished(whole.place.sweep)):
        yield Finding("twice", f"{len(at_end)} trials at the end")


def _settled_cell(place: Place, draw: Random) -> Corrupted | None:
    """Change a cell after the readers noted that the ledger agrees with its seals, and restore its times."""
    time.sleep(SETTLED_SECONDS + 0.1)
    place.call("show")
    times = {path: path.stat() for path in place.sweep.glob("ledger.db*")}
    done = cell(place.state, place.sweep, draw)
    for path in place.sweep.glob("ledger.db*"):
        if about := times.get(path):
            os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    return done and done._replace(what=f"{done.what}, with its old times")


class Copies:
    """Bases, made when one is drawn, and the faults of their copies."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.folder, self.seed = folder, seed
        self._wholes: dict[str, Whole] = {}

    def corrupt(self, number: int) -> Fault:
        """Corrupt one copy, and return what happened. It depends on the seed and the number alone."""
        draw, began, done = Random(f"{self.seed} corruption {number}"), time.monotonic(), None
        while done is None:
            kind = draw.choice([*KINDS, "settled cell"])
            base = draw.choice(BASES)
            base = OF_BASE.get(kind, base)
            if base not in self._wholes:
                self._wholes[base] = Whole.of(self.folder, base)
            whole = self._wholes[base]
            place = _copied(whole.origin, self.folder / f"corruption-{number}")
            if kind == "settled cell":
                done = _settled_cell(place, draw)
            else:
                done = KINDS[kind](place.state, place.sweep, draw)
        fault = Fault("corruptions", kind, f"{number}, {base}, {done}")
        try:
            with limit(SECONDS):
                read(place, whole, fault)
                if continue_sweeps(place, fault):
                    fault.findings += audit_copy(place, whole)
        except Overrun as error:
            fault.findings.append(Finding("lost", str(error)))
        fault.outcome = "named" if fault.effects else "no difference"
        fault.seconds = time.monotonic() - began
        if not fault.findings:
            shutil.rmtree(place.folder)
        return fault


# Kills of commands


def kill_commands(folder: Path, seed: int, planned: Counter[str], report: Report) -> None:
    """Kill sweeps of commands, and the command that judges runs into them; give the same command again until it ends.

    Args:
        folder: New folder.
        seed: Random seed of the moments.
        planned: Number of kills of each kind of COMMANDS.
        report: Receives the faults and findings.
    """
    if not planned.total():
        return
    whole, left = Place(folder / "whole", "judged"), Counter(planned)
    commands(whole, PAUSE)
    moments = [time.monotonic()]
    for work in (partial(whole.run, "grid"), whole.judge):
        _succeed(work())
        moments.append(time.monotonic())
    for number in itertools.count():
        if not left.total():
            return
        draw, place = Random(f"{seed} commands {number}"), Place(folder / str(number), "judged")
        commands(place, PAUSE)
        works = (partial(place.run, "grid"), place.judge)
        for kind, work, begun, over in zip(COMMANDS, works, moments[:-1], moments[1:], strict=True):
            for kills in itertools.count():
                again = left[kind] and kills < MOST_KILLS
                moment = draw.uniform(0, over - begun)  # as long as the undisturbed command took
                if _killed_at(work, moment if again else None) != -signal.SIGKILL:
                    break
                left[kind] -= 1
                report.add(Fault("kills", kind, f"sweep {number}, after {moment:.2f} s"))
        ends = (place.run("grid"), place.call("status", "--verify", "grid"), place.call("show", "grid"))
        found = [
            Finding("lost", f"ended with {status}: {output[-500:]}") for status, output in ends if status
        ]
        found += audit(place.state, place.sweep, whole.sweep)
        for finding in found:
            report.broken(f"sweep of commands {number}", finding)
        if not found:
            shutil.rmtree(place.folder)


def _killed_at(work: Callable[[], tuple[int, str]], seconds: float | None) -> int:
    """Return the exit status of work in a process of its own; -9 if it was killed after so many seconds."""
    pid = os.fork()  # imports everything once: a start of Python would take longer than what is killed
    if pid == 0:
        try:
            os._exit(work()[0])
        finally:
            os._exit(98)
    until = None if seconds is None else time.monotonic() + seconds
    while not (ended := os.waitpid(pid, os.WNOHANG))[0]:
        if until is not None and time.monotonic() > until:
            os.kill(pid, signal.SIGKILL)
            until = None
        time.sleep(0.002)
    return os.waitstatus_to_exitcode(ended[1])
