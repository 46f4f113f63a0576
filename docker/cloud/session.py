"""Commands on a rented machine: within a budget, and with everything that they write kept elsewhere.

The problem. A rented machine costs money every minute, may be taken away at any moment, and forgets its disk.
The folders that providers offer to keep files (Modal's volumes, buckets of objects) are no file systems for
SQLite: they have no locks, and a copy that is made of them while a database is written is of no moment at
all.

The idea. Commands write to the machine's own disk, `home`. Every half minute what changed is copied to the
folder that is kept, `mirror`: databases by SQLite's own backup, everything else file by file. A machine that
takes over starts with a copy of the mirror. Trials go on from their last checkpoints, so that a lost machine
costs at most the time since the last copy.

    home/runs, home/cache      state folder and cache of the commands
    mirror/runs, mirror/cache  the same, half a minute old
    mirror/holder.json         the run that writes here, and when it last did
    runs/rented/spent.json     seconds and price of every run, and the steps that it has finished

The budget is time: `budget / price` hours of this machine, counted from `started`. They are counted over all
machines of one run, since a provider that takes a machine away may start another one by itself. Shortly
before the end the running command gets SIGTERM, and SIGKILL if it does not end.

This file needs Python 3.10 and its standard library alone: on some providers it runs outside the container.
"""

import argparse
import json
import math
import os
import shutil
import signal
import sqlite3
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing, suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

RUNS, CACHE, RENTED = "runs", "cache", "rented"
HOME = "/session"
"""Path of `home` in the container: always the same, so that no path in a record depends on the machine."""
WORK = "/work"
"""Folder of experiments in the container, with the data that they name."""
EVERY = 30.0
"""Seconds between two copies."""
RESERVE = 150.0
"""Seconds before the end of the budget at which the running command is ended: it may take a while, and what
it wrote is still to be copied."""
GRACE = 60.0
"""Seconds that a command has between SIGTERM and SIGKILL."""
DONE, FAILED, REFUSED, BUDGET, TERMINATED = 0, 1, 2, 3, 143
"""Exit statuses; BUDGET as in `ablate sweep`."""
_SQLITE = b"SQLite format 3\0"
_NOT_COPIED = ("-wal", "-shm", "-journal", ".copying")
"""Endings of files that belong to a database at one moment, and of unfinished copies."""


@dataclass(frozen=True)
class Step:
    """One command of a run; its words are those of the container."""

    name: str
    command: tuple[str, ...]


@dataclass(frozen=True)
class Request:
    """Description of one run, from the machine of its owner to the rented one."""

    run: str
    """Name of the run. Machines that replace a lost one have the same."""
    gpu: str
    """Model of the GPU, as `rent.py` names it."""
    count: int
    """Number of GPUs."""
    price: float
    """Price of an hour of the machine."""
    budget: float
    """Largest cost of the run, in the same currency."""
    steps: tuple[Step, ...]

    @property
    def seconds(self) -> float:
        """Seconds that the budget pays."""
        return 3600 * self.budget / self.price

    def wire(self) -> str:
        """Return the request as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, wire: str) -> "Request":
        """Return the request of a text that `wire` made.

        Raises:
            ValueError: A field is missing, or price or budget is no positive number.
        """
        content: dict[str, Any] = json.loads(wire)
        try:
            steps = tuple(Step(one["name"], tuple(one["command"])) for one in content.pop("steps"))
            request = cls(**content, steps=steps)
        except (KeyError, TypeError) as error:
            raise ValueError(f"not a request of docker/cloud/rent.py: {error}") from None
        for name in ("price", "budget"):
            value = getattr(request, name)
            if not (isinstance(value, (int, float)) and math.isfinite(value) and value > 0):
                raise ValueError(f"{name} is {value!r}; a positive number is needed")
        return request


@dataclass
class Spent:
    """Time that a run has used on all of its machines."""

    gpu: str
    count: int
    price: float
    seconds: float = 0.0
    done: list[str] = field(default_factory=list)
    """Names of the steps that ended well."""

    @property
    def cost(self) -> float:
        """Cost of these seconds."""
        return self.seconds / 3600 * self.price


def read_spent(runs: Path) -> dict[str, Spent]:
    """Return what all runs of a state folder have used, by name of the run."""
    try:
        content = json.loads((runs / RENTED / "spent.json").read_text())
    except FileNotFoundError:
        return {}
    return {run: Spent(**one) for run, one in content.items()}


def other_gpus(spent: dict[str, Spent], gpu: str) -> list[str]:
    """Return the models of GPUs, other than this one, that runs of a state folder have used.

    A trial's identity has its class of device, not the model: a sweep on two of them would compare arms
    across them without a word.
    """
    return sorted({one.gpu for one in spent.values()} - {gpu})


def write_spent(runs: Path, spent: dict[str, Spent]) -> None:
    """Replace the record of what all runs have used."""
    path = runs / RENTED / "spent.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    _replace(path, json.dumps({run: asdict(one) for run, one in spent.items()}, indent=1) + "\n")


def _replace(path: Path, text: str) -> None:
    part = path.with_name(f"{path.name}.copying")
    part.write_text(text)
    part.replace(path)


# --- the mirror -----------------------------------------------------------------------------------


class Mirror:
    """Copy of a home folder in a folder that is kept.

    Args:
        home: folder on the machine's own disk; it must not hold results yet.
        kept: folder that outlives the machine.
    """

    def __init__(self, home: Path, kept: Path) -> None:
        self.home, self.kept = home, kept
        self._copied: dict[Path, tuple[float, ...]] = {}
        """Times and sizes of what was copied, by path relative to both folders."""

    def restore(self) -> int:
        """Copy what is kept into the empty home; return the number of files.

        Raises:
            FileExistsError: The home has results, which may be older or newer than what is kept.
        """
        count = 0
        for part in (RUNS, CACHE):
            if (self.home / part).exists():
                raise FileExistsError(
                    f"{self.home / part} is there already; a run starts in a folder of its own"
                )
            (self.home / part).mkdir(parents=True, mode=0o700)
            for path in _files(self.kept / part):
                target = self.home / path.relative_to(self.kept)
                target.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(path, target)
                count += 1
        self._copied = {path: _state(self.home / path) for path in self._listed()}
        return count

    def copy(self) -> int:
        """Copy what changed since the last call, remove what was removed since; return the number of files.

        The list is made before the first copy: a result that appears while records are copied waits for the
        next call, so that no kept result is newer than its records. Databases come first for the same reason:
        the ledger never says more than the trial store has.
        """
        listed = self._listed()
        changed = [path for path, state in listed.items() if self._copied.get(path) != state]
        changed.sort(key=lambda path: (not _is_database(self.home / path), path))
        for path in changed:
            with suppress(FileNotFoundError):  # removed since
                self.copy_one(path)
                self._copied[path] = listed[path]
        for path in self._copied.keys() - listed.keys():
            (self.kept / path).unlink(missing_ok=True)
            del self._copied[path]
        return len(changed)

    def copy_one(self, path: Path) -> None:
        source, target = self.home / path, self.kept / path
        target.parent.mkdir(parents=True, exist_ok=True)
        part = target.with_name(f"{target.name}.copying")
        if _is_database(source):
            # Written beside the source: the kept folder may lack the locks that SQLite needs.
            whole = source.with_name(f"{source.name}.copying")
            whole.unlink(missing_ok=True)
            with (
                closing(sqlite3.connect(source, timeout=30)) as live,
                closing(sqlite3.connect(whole)) as copy,
            ):
                live.backup(copy)
                copy.execute("PRAGMA journal_mode = DELETE")
            shutil.copyfile(whole, part)
            whole.unlink()
        else:
            shutil.copyfile(source, part)
        part.replace(target)

    def _listed(self) -> dict[Path, tuple[float, ...]]:
        """Return times and sizes of all files of the home, by relative path; a database's with those of its
        log."""
        listed = {}
        for part in (RUNS, CACHE):
            for path in _files(self.home / part):
                with suppress(FileNotFoundError):
                    listed[path.relative_to(self.home)] = _state(path)
        return listed


def _files(folder: Path) -> Iterator[Path]:
    """Yield the plain files below a folder that belong into a copy; none if there is no such folder."""
    for root, _, names in os.walk(folder):
        for name in sorted(names):
            path = Path(root) / name
            if not name.endswith(_NOT_COPIED) and path.is_file() and not path.is_symlink():
                yield path


def _state(path: Path) -> tuple[float, ...]:
    status, state = path.stat(), ()
    with suppress(FileNotFoundError):
        log = path.with_name(f"{path.name}-wal").stat()
        state = (log.st_mtime_ns, log.st_size)
    return (status.st_mtime_ns, status.st_size, *state)


def _is_database(path: Path) -> bool:
    with suppress(OSError), path.open("rb") as file:
        return file.read(len(_SQLITE)) == _SQLITE
    return False


def take_work(uploads: Path, run: str, work: Path) -> None:
    """Copy the experiments that were uploaded for a run to where its commands read them; remove those of
    other runs.

    Args:
        uploads: folder with one folder for each run.
        run: name of the run.
        work: folder in which the commands look.
    """
    shutil.copytree(uploads / run, work, dirs_exist_ok=True)
    for old in uploads.iterdir():
        if old.name != run:
            shutil.rmtree(old)


# --- one run --------------------------------------------------------------------------------------


class Terminated(KeyboardInterrupt):
    """SIGTERM: the provider takes the machine away."""


class Session:
    """One run on one machine.

    Args:
        request: description of the run.
        home: folder on the machine's own disk, without results.
        kept: folder that outlives the machine.
        words: function from a step's command to the words that are started here.
        started: time from which the machine is paid, in seconds since 1970; None: now.
        after: called after every copy, for a folder that keeps only what is committed.
        clean_up: called after a command was killed.
        every: seconds between two copies.
        reserve: seconds before the end of the budget at which the running command is ended.
        grace: seconds between SIGTERM and SIGKILL.
    """

    def __init__(
        self,
        request: Request,
        home: Path,
        kept: Path,
        *,
        words: Callable[[Sequence[str]], Sequence[str]] = tuple,
        started: float | None = None,
        after: Callable[[], object] = lambda: None,
        clean_up: Callable[[], object] = lambda: None,
        every: float = EVERY,
        reserve: float = RESERVE,
        grace: float = GRACE,
    ) -> None:
        self.request, self.home, self.kept, self.words = request, home, kept, words
        self.after, self.clean_up, self.every, self.reserve, self.grace = (
            after,
            clean_up,
            every,
            reserve,
            grace,
        )
        self.mirror = Mirror(home, kept)
        self.spent: dict[str, Spent] = {}
        self._counted = time.time() if started is None else started

    @property
    def own(self) -> Spent:
        """Time that this run has used."""
        return self.spent[self.request.run]

    def run(self) -> int:
        """Run the steps that are not done yet, within the budget; return the exit status.

        0: all steps ended well. 1: one did not; the others ran all the same. 2: another run writes into the
        same folder. 3: the budget is used up. 143: the machine is taken away. After 1, 3 and 143 the same
        command goes on.
        """
        if holder := self._other_holder():
            print(f"{self.kept}: run {holder} writes here; wait for it, or name another --store", flush=True)
            return REFUSED
        print(f"{self.mirror.restore()} files were kept from earlier runs", flush=True)
        request, runs = self.request, self.home / RUNS
        self.spent = read_spent(runs)
        if others := other_gpus(self.spent, request.gpu):
            print(f"{self.kept}: has results of {', '.join(others)}; name another --store", flush=True)
            return REFUSED
        self.spent.setdefault(request.run, Spent(request.gpu, request.count, request.price))
        status = DONE
        before = _raise_on_sigterm()
        try:
            self._keep()
            for step in request.steps:
                if step.name in self.own.done:
                    print(f"{step.name}: done already", flush=True)
                    continue
                if self._left() <= 0:
                    status = BUDGET
                    break
                code = self._one(step)
                if code is None:
                    status = BUDGET
                    break
                if code == 0:
                    self.own.done.append(step.name)
                status = status if code == 0 else FAILED
                self._keep()
        except KeyboardInterrupt:
            status = TERMINATED
        finally:
            kept = self._keep_at_last()
            if before is not None:
                signal.signal(signal.SIGTERM, before)
        print(self.account(status), flush=True)
        if not kept:
            print(f"THE LAST COPY FAILED. What is newer is in {self.home} on this machine alone.", flush=True)
        return status if kept else FAILED

    def account(self, status: int) -> str:
        """Return what was used, and why the run ended."""
        total = sum(one.cost for one in self.spent.values())
        why = {
            DONE: "All is done.",
            FAILED: "A step failed; see above.",
            BUDGET: "The budget is used up. The same command goes on, with a budget of its own.",
            TERMINATED: "The machine was taken away, or the run was stopped. The same command goes on.",
        }[status]
        return (
            f"{why} Used {self.own.seconds / 3600:.2f} h, {self.own.cost:.2f} of {self.request.budget:.2f}; "
            f"{total:.2f} by all runs that are kept here."
        )

    def _left(self) -> float:
        """Return the seconds until the running command is ended."""
        return self.request.seconds - self.reserve - self.own.seconds - (time.time() - self._counted)

    def _keep_at_last(self) -> bool:
        """Copy what changed before the machine is given back; return False if that failed three times."""
        for _ in range(3):
            if self._keep():
                (self.kept / "holder.json").unlink(missing_ok=True)
                self.after()
                return True
            time.sleep(min(5.0, self.every))
        return False

    def _keep(self) -> bool:
        """Count the time, and copy what changed; return False, and print the error, if the copy failed."""
        now = time.time()
        self.own.seconds += max(0.0, now - self._counted)
        self._counted = now
        write_spent(self.home / RUNS, self.spent)
        try:
            self.mirror.copy()
            self.kept.mkdir(parents=True, exist_ok=True)
            _replace(self.kept / "holder.json", json.dumps({"run": self.request.run, "at": now}))
            self.after()
        except (OSError, sqlite3.Error) as error:
            print(f"The copy to {self.kept} failed, and is tried again: {error}", file=sys.stderr, flush=True)
            return False
        return True

    def _other_holder(self) -> str | None:
        """Return the name of another run that wrote here a moment ago; None if there is none."""
        try:
            holder = json.loads((self.kept / "holder.json").read_text())
        except (FileNotFoundError, ValueError):
            return None
        recent = time.time() - holder["at"] < 4 * self.every
        return holder["run"] if recent and holder["run"] != self.request.run else None

    def _one(self, step: Step) -> int | None:
        """Run a step and return its exit status; None if the budget ended it."""
        print(f"{step.name}: {' '.join(step.command)}", flush=True)
        output = self.home / RUNS / RENTED / self.request.run / f"{step.name}.txt"
        output.parent.mkdir(parents=True, exist_ok=True)
        process = subprocess.Popen(
            self.words(step.command),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        printer = threading.Thread(target=_print_and_store, args=(process.stdout, output), daemon=True)
        printer.start()
        try:
            while True:
                try:
                    code = process.wait(max(0.0, min(self.every, self._left())))
                    print(f"{step.name}: exit status {code}", flush=True)
                    return code
                except subprocess.TimeoutExpired:
                    if self._left() <= 0:
                        print(f"{step.name}: ended, since the budget is nearly used up", flush=True)
                        return None
                self._keep()
        finally:
            self._end(process)
            printer.join(10)
            if process.stdout is not None and not printer.is_alive():
                process.stdout.close()

    def _end(self, process: subprocess.Popen) -> None:
        """End a command by SIGTERM, or by SIGKILL if it does not end, and what it started."""
        if process.poll() is None:
            process.terminate()
            try:
                process.wait(self.grace)
            except subprocess.TimeoutExpired:
                self.clean_up()
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()


def _print_and_store(pipe: Any, path: Path) -> None:
    """Print a command's output, and append it to a file."""
    with path.open("ab") as file:
        while chunk := pipe.read1(65536):
            sys.stdout.buffer.write(chunk)
            sys.stdout.flush()
            file.write(chunk)
            file.flush()


def _raise_on_sigterm() -> Any:
    """Let the first SIGTERM raise Terminated; return the former handler, or None outside the main thread."""
    if threading.current_thread() is not threading.main_thread():
        return None

    def end(number: int, frame: object) -> None:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)  # a second one would interrupt the last copy
        raise Terminated

    return signal.signal(signal.SIGTERM, end)


# --- outside the container ------------------------------------------------------------------------

CONTAINER = "ablate-rented"
ENVIRONMENT = {"ABLATE_STATE": f"{HOME}/{RUNS}", "ABLATE_CACHE": f"{HOME}/{CACHE}", "VENV": "/opt/venv"}
"""Environment of all commands. VENV is the one that benchmarks/gpu_day.sh takes."""


def in_docker(command: Sequence[str], image: str, home: Path, work: Path, checkout: Path) -> list[str]:
    """Return the words that run a command in a container, as the user of this process.

    Args:
        command: words in the container.
        image: its image.
        home: folder that is HOME in the container.
        work: folder that is WORK in the container, read-only.
        checkout: checkout of this project, of which the container sees tests and benchmarks.
    """
    words = ["docker", "run", "--rm", "--init", "--name", CONTAINER, "--gpus", "all", "--shm-size", "8g"]
    words += ["--user", f"{os.getuid()}:{os.getgid()}"]
    for name, value in (ENVIRONMENT | {"HOME": HOME, "USER": "ablate"}).items():
        words += ["--env", f"{name}={value}"]
    words += ["--volume", f"{home}:{HOME}", "--volume", f"{work}:{WORK}:ro"]
    for folder in ("tests", "benchmarks"):  # which .dockerignore keeps from the image
        words += ["--volume", f"{checkout / folder}:/opt/ablate/{folder}:ro"]
    return [*words, "--workdir", WORK, "--entrypoint", command[0], image, *command[1:]]


def main(words: Sequence[str]) -> int:
    """Run a request on this machine, each command in a container, and return the exit status of the run."""
    parser = argparse.ArgumentParser(prog="session.py", description=__doc__.splitlines()[0])
    parser.add_argument("--request", type=Path, required=True, help="file that docker/cloud/rent.py wrote")
    parser.add_argument("--work", type=Path, required=True, help="folder of the experiments")
    parser.add_argument("--kept", type=Path, required=True, help="folder that outlives this machine")
    parser.add_argument("--image", required=True, help="image of the container")
    parser.add_argument("--started", type=float, default=None, help="time from which the machine is paid")
    asked = parser.parse_args(words)
    request = Request.parse(asked.request.read_text())
    home = Path.home() / ".ablate-rented" / f"{request.run}-{int(time.time())}"
    home.mkdir(parents=True, mode=0o700)
    checkout = Path(__file__).resolve().parents[2]
    return Session(
        request,
        home,
        asked.kept,
        words=lambda command: in_docker(command, asked.image, home, asked.work.resolve(), checkout),
        started=asked.started,
        clean_up=lambda: subprocess.run(["docker", "rm", "--force", CONTAINER], check=False),
    ).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
