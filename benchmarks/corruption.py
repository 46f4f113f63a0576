"""Corrupt one thing in a state folder, many times, and check what every reader and the next sweep make of it.

    python benchmarks/corruption.py --faults 100 --seed 2612 --out /tmp/corruption

A few small sweeps are run once with the real command: a grid that is over, the same grid killed half-way, a
search killed half-way, and a grid with MLflow's store. Each fault takes a copy of one of them, corrupts one
file or folder as the seed says, calls every command that reads, then the sweep again (and `ablate rebuild`
where the sweep asks for it), and compares all of it with an untouched copy that was treated alike:

    SILENT     a reader shows something else with exit status 0 and without a word, but for an answer that is
               not shown until the next report; or a record differs at the end
    LOST       a finished trial's result is gone, and was not run again; or the sweep cannot be ended
    TWICE      a trial, a member or a point of the search is counted twice
    TRACEBACK  a command ends with one
    WRONG      the audit found something else, such as an attempt that never ended

Base `judged`, which `--bases judged` chooses, is a sweep of commands with runs that `ablate judge --into`
added. `--kills N` kills such sweeps, and the judge, N times by SIGKILL at moments of the seed. The same
command is given again until it ends, and each sweep is compared with one that was not killed.

Everything else is `named` (a command says that something is damaged) or `no difference`. A line of JSON for
each fault goes to OUT/seed-N.jsonl, and faults that are there are not run again. Not covered: faults of
processes (`ablate bench faults`), and files outside of the state folder and of the cache.
"""

import argparse
import itertools
import json
import os
import re
import shutil
import signal
import sqlite3
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "tests"))
from state_corruptions import JUDGED, KINDS, cell  # noqa: E402
from support.commands import here  # noqa: E402
from support.experiments import end, start, write  # noqa: E402

from ablate.cache import SETTLED_SECONDS  # noqa: E402
from ablate.reports import frames  # noqa: E402
from ablate.store.ledger import Ledger  # noqa: E402
from ablate.verification import audit  # noqa: E402

SHAPE = {"steps": 40, "eval_every": 10}
TELEMETRY = {"log": 5, "checkpoint": 0.02}
GRID = {"cooldown": [0, 0.25], "rht": [True, False]}
SPACE = {"rht": [True, False], "workload.lr": {"uniform": [1e-4, 1e-2], "log": True}}
SEARCH = {"ablate": SPACE, "search": {"sampler": "tpe", "trials": 6}}
DEFECTS = (ArithmeticError, AssertionError, AttributeError, LookupError, OSError, RuntimeError)
DEFECTS += (TypeError, sqlite3.Error)
"""Errors of our own code when it reads what it should have refused."""
DRAWN = ("no member", "a member", "no trial folder")
"""Beginnings of findings that follow from other points: a search that continues earlier draws others."""
BASES = ("finished", "half", "search", "mlflow")
"""Bases that are drawn from unless others are named; beside `judged`."""
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
SECONDS = 180
"""Time limit of one fault."""
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
        except TimeoutError:
            raise
        except BaseException:
            return 99, traceback.format_exc()
        return done.returncode, done.stdout + done.stderr

    def run(self, name: str) -> tuple[int, str]:
        """Run or continue a sweep."""
        mlflow = () if self.base == "mlflow" else ("--mlflow", "none")
        return self.call(
            "sweep", self.folder / f"{name}.yaml", "--executor", "inline", *mlflow, "--no-report"
        )


def make(folder: Path, base: str) -> Place:
    """Run the sweeps of a base with the real command, unless they are there."""
    place = Place(folder / base, base)
    if (place.folder / "made").exists():
        return place
    shutil.rmtree(place.folder, ignore_errors=True)
    place.folder.mkdir(parents=True)
    if base == "judged":
        _commands(place, 0.0)
        for status, output in (place.run("grid"), _judge(place)):
            assert status == 0, output
        (place.folder / "made").touch()
        return place
    for name in place.names:
        seeds = 2 if name == "grid" and base != "mlflow" else 1
        keys = {"ablate": GRID} | (SEARCH if name == "search" else {})
        write(place.folder, name, SHAPE, seeds=seeds, question=f"Q of {name}?", telemetry=TELEMETRY, **keys)
    if base in ("half", "search"):
        _killed(place, 4)
    else:
        for name in place.names:
            status, output = place.run(name)
            assert status == 0, output
        reports = ("--mlflow", "none", "--no-pdf", "--notebook", "ablation")
        place.call("report", *place.names, *reports)
    (place.folder / "made").touch()
    return place


def _commands(place: Place, pause: float) -> None:
    """Write the sweep of base `judged`, and the runs that are judged into it."""
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


def _judge(place: Place) -> tuple[int, str]:
    words = ("--into", "grid", "--against", "config.lr=0.1", "--no-report")
    return place.call("judge", place.folder.parent / "theirs.csv", *words)


def _killed(place: Place, results: int) -> None:
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


def copy(place: Place, folder: Path) -> Place:
    """Return a copy of a base, as it is after a look at it."""
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
    status, output = place.call("show", name, "--to", "csv", "--out", out)
    yield "show --to csv", status, output + (_content(out, ".csv") if not status else "")
    words = ("--out", out, "--no-pdf", "--notebook", "ablation", "--mlflow", "none")
    status, output = place.call("report", name, *words)
    yield "report", status, output + (_content(out, ".md") if not status else "")
    shutil.rmtree(out, ignore_errors=True)
    try:
        with frames.open(name, state=place.state) as results:
            yield "reports.open", 0, results.arms.to_csv() + results.trials.to_csv()
    except (ValueError, FileNotFoundError) as error:
        yield "reports.open", 2, str(error)
    except TimeoutError:
        raise
    except DEFECTS:
        yield "reports.open", 99, traceback.format_exc()


def _content(folder: Path, suffix: str) -> str:
    return "".join(path.read_text() for path in sorted(folder.rglob(f"*{suffix}")))


def plain(text: str, place: Place) -> str:
    """Return an output without what differs between two calls, or two copies."""
    lines = VOLATILE.sub("", text.replace(str(place.folder), "FOLDER")).replace(" ", "").splitlines()
    return "\n".join(line for line in lines if ",running," not in line)


def judge(place: Place, whole: "Whole") -> tuple[set[str], list[str]]:
    """Return the outcomes of a corrupted copy, and a sentence for each."""
    outcomes: set[str] = set()
    notes: list[str] = []

    def note(outcome: str, text: str) -> None:
        outcomes.add(outcome)
        notes.append(f"{outcome}: {text}")

    for name, status, output in readers(place):
        if status == 99 or "Traceback (most recent" in output:
            at = max(0, output.find("Traceback (most recent"))
            note("TRACEBACK", f"{name}: {output[at : at + 300]} ... {output[at:][-1200:]}")
        elif (wanted := whole.outputs[name]) != (status, plain(output, place)):
            lines = output.splitlines()
            before, now = Counter(wanted[1].splitlines()), Counter(plain(output, place).splitlines())
            new = [line for line in lines if plain(line, place) in now - before]
            if status not in (0, wanted[0]) or any(WORDS.search(line) for line in new):
                note("named", f"{name} ({status}): {' | '.join(new)[:600]}")
            elif gone := [
                line for line in (*(now - before), *(before - now)) if not line.startswith('"answer":')
            ]:
                note("SILENT", f"{name} ({status}): {' | '.join(gone)[:600]}")
    for _ in range(3):
        ends = [(name, *place.run(name)) for name in place.names]
        for name, status, output in ends:
            if status == 99 or "Traceback (most recent" in output:
                at = max(0, output.find("Traceback (most recent"))
                note("TRACEBACK", f"sweep {name}: {output[at:][-1500:]}")
            elif line := next(filter(WORDS.search, output.splitlines()), output[-300:] if status else ""):
                note("named", f"sweep {name} ({status}): {line[:400]}")
            if status and (match := re.search(r"(/\S+): .*move away what is there", output)):
                with suppress(OSError):  # the other sweep's message named it too
                    os.rename(match[1], place.state / f"away-{time.monotonic_ns()}")
            if status and "ablate rebuild" in output:
                status, output = place.call("rebuild", place.folder / f"{name}.yaml")
                kind = "TRACEBACK" if status == 99 else "named"
                note(kind, f"rebuild {name} ({status}): {output[-1500:] if status == 99 else output[:300]}")
        if not any(status for _, status, _ in ends):
            break
    else:
        note(
            "LOST", f"the sweep cannot be ended: {[(name, status, out[-300:]) for name, status, out in ends]}"
        )
        return outcomes, notes
    for found in (*audit.sweep(place.state, place.sweep, whole.place.sweep), *audit.study(place.sweep)):
        if found.what.startswith("a trial folder that nobody wanted"):
            continue  # a stray folder is nobody's trial
        if "a checkpoint is left" in found.what:
            continue  # where one was added
        if place.base == "search" and found.what.startswith(DRAWN):
            continue
        note("SILENT" if found.silent else found.kind.upper(), f"at the end: {found.what}")
    at_end = over(place.sweep)
    if gone := [key for key, value in whole.over.items() if at_end.get(key) != value]:
        note("LOST", f"finished before, and gone at the end: {gone}")
    if place.base == "search" and len(at_end) != len(over(whole.place.sweep)):
        note("TWICE", f"{len(at_end)} trials at the end")
    return outcomes, notes


@dataclass(frozen=True)
class Whole:
    """An untouched copy whose sweeps were continued to their end, and what every reader showed before."""

    place: Place
    outputs: dict[str, tuple[int, str]]
    over: dict[tuple[str, int], float]
    """Last loss of the members that were finished before, by arm and seed."""


def over(sweep: Path) -> dict[tuple[str, int], float]:
    """Return the last loss of each finished member of a sweep, by arm and seed."""
    with closing(Ledger(sweep / "ledger.db", readonly=True)) as ledger:
        rows = [row for row in ledger.members() if row.status == "done"]
        return {(row.name, row.seed): ledger.last_values(row.trial)["val/loss"] for row in rows}


def wholes(folder: Path, bases: Sequence[str]) -> dict[str, Whole]:
    """Return an untouched copy of every base."""
    found: dict[str, Whole] = {}
    for base in bases:
        shutil.rmtree(folder / f"whole-{base}", ignore_errors=True)
        place = copy(make(folder, base), folder / f"whole-{base}")
        outputs = {name: (status, plain(output, place)) for name, status, output in readers(place)}
        before = over(place.sweep)
        for name in place.names:
            status, output = place.run(name)
            assert status == 0, output
        found[base] = Whole(place, outputs, before)
        assert not [status for status, _ in outputs.values() if status], place.folder
    return found


def _late(*_: object) -> None:
    raise TimeoutError(f"not over after {SECONDS} s")


def _settled_cell(place: Place, rng: np.random.Generator) -> str | None:
    """Change a cell after the readers noted that the ledger agrees with its seals, and restore its times."""
    time.sleep(SETTLED_SECONDS + 0.1)
    place.call("show")
    times = {path: path.stat() for path in place.sweep.glob("ledger.db*")}
    what = cell(place.state, place.sweep, rng)
    for path in place.sweep.glob("ledger.db*"):
        if about := times.get(path):
            os.utime(path, ns=(about.st_atime_ns, about.st_mtime_ns))
    return what and f"{what}, with its old times"


def fault(folder: Path, seed: int, number: int, whole: dict[str, Whole]) -> dict[str, object]:
    """Corrupt one copy, judge it, and return what happened."""
    rng, began = np.random.default_rng([seed, number]), time.monotonic()
    where = folder / f"fault-{seed}-{number}"
    shutil.rmtree(where, ignore_errors=True)
    what = None
    while what is None:
        own = JUDGED if "judged" in whole else {}
        kind, base = str(rng.choice([*KINDS, "settled cell", *own])), str(rng.choice(list(whole)))
        base = "judged" if kind in own else base
        base = "mlflow" if kind in ("MLflow", "artifact") and "mlflow" in whole else base
        if where.exists():
            shutil.rmtree(where)
        place = copy(Place(folder / base, base), where)
        if kind == "settled cell":
            what = _settled_cell(place, rng)
        else:
            what = (KINDS | own)[kind](place.state, place.sweep, rng)
    signal.alarm(SECONDS)
    try:
        outcomes, notes = judge(place, whole[base])
    except TimeoutError as error:
        outcomes, notes = {"LOST"}, [str(error)]
    finally:
        signal.alarm(0)
    shutil.rmtree(where)
    seconds = round(time.monotonic() - began, 1)
    outcome = sorted(outcomes - {"named"}) or (["named"] if outcomes else ["no difference"])
    return {"fault": number, "kind": kind, "base": base, "what": what, "outcome": outcome,
            "seconds": seconds, "notes": notes}  # fmt: skip


# Kills


def kills(folder: Path, seed: int, count: int) -> list[dict[str, object]]:
    """Kill sweeps of commands, and the command that judges runs into them, and return a line for each sweep.

    Args:
        folder: New folder.
        seed: Random seed of the moments.
        count: Number of kills.
    """
    lines: list[dict[str, object]] = []
    whole = _prepared(folder / "whole")
    for status, output in (whole.run("grid"), _judge(whole)):
        assert status == 0, output
    at_end, done = over(whole.sweep), 0
    while done < count:
        rng, place, moments = (
            np.random.default_rng([seed, len(lines)]),
            _prepared(folder / f"{len(lines)}"),
            [],
        )
        for work, longest in ((partial(place.run, "grid"), 1.5), (partial(_judge, place), 0.6)):
            for number in itertools.count():
                again = done < count and number < MOST_KILLS
                if _killed_at(work, float(rng.uniform(0, longest)) if again else None) != -signal.SIGKILL:
                    break
                done += 1
                moments.append(work.func.__name__)
        ends = [place.run("grid"), place.call("status", "--verify", "grid"), place.call("show", "grid")]
        notes = [f"LOST: ended with {status}: {output[-500:]}" for status, output in ends if status]
        found = [*audit.sweep(place.state, place.sweep, whole.sweep), *audit.study(place.sweep)]
        notes += [f"{'SILENT' if each.silent else each.kind.upper()}: {each.what}" for each in found]
        notes += [f"LOST: {key}" for key, value in at_end.items() if over(place.sweep).get(key) != value]
        lines.append({"sweep": len(lines), "kills": dict(Counter(moments)), "notes": notes})
        shutil.rmtree(place.folder)
    return lines


def _prepared(folder: Path) -> Place:
    place = Place(folder, "judged")
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    _commands(place, PAUSE)
    return place


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


def main() -> None:
    """Run the faults that have no line yet, and print all outcomes; exit status 1 if any is a defect."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--faults", type=int, default=100, help="number of faults")
    parser.add_argument("--seed", type=int, default=2612, help="random seed of the faults")
    parser.add_argument("--out", type=Path, required=True, help="folder of the sweeps and of the outcomes")
    parser.add_argument("--only", type=int, nargs="*", help="numbers of faults to run again, and only those")
    parser.add_argument("--bases", nargs="*", default=BASES, help="bases to draw from, such as judged")
    parser.add_argument("--kills", type=int, help="number of kills, instead of faults")
    asked = parser.parse_args()
    signal.signal(signal.SIGALRM, _late)
    sys.stdout.reconfigure(errors="backslashreplace", line_buffering=True)
    folder = asked.out.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    if asked.kills is not None:
        lines = kills(folder / "kills", asked.seed, asked.kills)
        for line in lines:
            print(json.dumps(line))
        counts = Counter(note.partition(":")[0] for line in lines for note in line["notes"])
        number = sum(sum(line["kills"].values()) for line in lines)
        print(f"seed {asked.seed}, {number} kills of {len(lines)} sweeps: {dict(counts)}")
        sys.exit(bool(counts))
    log = folder / f"seed-{asked.seed}.jsonl"
    lines = map(json.loads, log.read_text().splitlines()) if log.exists() else ()
    done = {line["fault"]: line for line in lines}
    numbers = asked.only or [number for number in range(asked.faults) if number not in done]
    whole = wholes(folder, asked.bases) if numbers else {}
    for number in numbers:
        done[number] = line = fault(folder, asked.seed, number, whole)
        with log.open("a") as file:
            file.write(json.dumps(line) + "\n")
        print(
            f"{number:3d} {line['seconds']:5} s  {line['base']}, {line['what']}: {', '.join(line['outcome'])}"
        )
        for text in (
            line["notes"] if set(line["outcome"]) & {"SILENT", "LOST", "TWICE", "TRACEBACK", "WRONG"} else ()
        ):
            print(f"      {text}")
    counts = Counter(outcome for line in done.values() for outcome in line["outcome"])
    print(f"seed {asked.seed}, {len(done)} faults: {dict(counts)}")
    sys.exit(any(outcome.isupper() for outcome in counts))


if __name__ == "__main__":
    main()
