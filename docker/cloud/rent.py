"""Run experiments on a rented GPU, within a budget, and bring the results back: docs/run/cloud.md.

    python docker/cloud/rent.py doctor mine.yaml --on modal --gpu B200 --price 7.50 --budget 20
    python docker/cloud/rent.py mine.yaml --on sky --store s3://bucket --gpu B200 --price 6 --budget 20 --spot
    python docker/cloud/rent.py --on modal --gpu B200 --fetch

A task is an experiment's YAML file, `doctor` (the numerics, and an engine beside the emulator: Transformer
Engine, or that of --engine) or `gpu-day` (benchmarks/gpu_day.sh). Before anything starts, the price, the
estimate of `ablate plan`, the largest cost and the files that leave this machine are printed, and a question
is asked. The same command goes on where the last one ended.

This file holds no price and no credential: the price is yours to look up, and Modal and SkyPilot have logins
of their own. It runs in the environment that has this package; the provider's client may be in that one or on
the PATH.
"""

import argparse
import json
import math
import os
import re
import secrets
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import session
from session import HOME, RENTED, RESERVE, RUNS, WORK, Request, Step

ROOT = Path(__file__).resolve().parents[2]
APP, TASK = ROOT / "docker" / "cloud" / "modal_app.py", ROOT / "docker" / "cloud" / "sky.yaml"
LEAST_SECONDS = 1200.0
"""Shortest time that is worth a start: machines are set up for minutes before the first trial."""
MOST_SECONDS = {"modal": 86400.0, "sky": math.inf}
"""Longest time of one run: Modal ends a function after a day."""
MOST_BYTES = 2**30
"""Largest folder of experiments that is uploaded."""
NOT_UPLOADED = {".git", ".venv", "__pycache__", "runs", "mlruns", "node_modules"}
"""Names of folders that are no part of an experiment."""
SECRET = re.compile(
    r"\.env(\..*)?|.*\.pem|id_(rsa|ed25519|ecdsa)|\.netrc|.*credentials.*|ablate\.toml", re.IGNORECASE
)
"""Names of files that may hold credentials: they are never uploaded."""


@dataclass(frozen=True)
class Gpu:
    """Model of a GPU by the names of the providers."""

    capability: str
    """Compute capability."""
    modal: str | None
    """Modal's name; None if it cannot be asked for there. With `!` Modal gives no other model in its
    place."""
    sky: str | None
    """SkyPilot's name."""


GPUS = {
    "B200": Gpu("10.0", "B200", "B200"),
    "B300": Gpu("10.3", None, "B300"),
    "RTX-PRO-6000": Gpu("12.0", "RTX-PRO-6000", "RTXPRO6000"),
    "RTX-5090": Gpu("12.0", None, "RTX5090"),
    "H100": Gpu("9.0", "H100!", "H100"),
    "H200": Gpu("9.0", "H200", "H200"),
    "L40S": Gpu("8.9", "L40S", "L40S"),
}
PROVIDERS = {"modal": "Modal", "sky": "SkyPilot"}
ENGINES = {"transformer_engine": "parity", "scaled_mm": "parity-scaled_mm"}
"""Engines of the image that `doctor` can compare, and the name of each comparison's step and record."""


class Refusal(Exception):
    """A mistake in the command, as a sentence: nothing was started."""


# --- the money ------------------------------------------------------------------------------------


def positive(option: str, text: str | None) -> float:
    """Return the number of an option.

    Raises:
        Refusal: It is missing, or no positive number.
    """
    if text is None:
        raise Refusal(f"{option}: is missing; nothing is rented without a price and a budget")
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not (math.isfinite(value) and value > 0):
        raise Refusal(f"{option}: {text!r} is no positive number")
    return value


def named_gpu(name: str | None, provider: str) -> Gpu:
    """Return the GPU of this name.

    Raises:
        Refusal: There is none, or the provider does not have it.
    """
    offered = [one for one, gpu in GPUS.items() if getattr(gpu, provider)]
    if name not in offered:
        asked = "is missing" if name is None else f"{name!r} is not known on {PROVIDERS[provider]}"
        raise Refusal(f"--gpu: {asked}; there are {', '.join(offered)}")
    return GPUS[name]


@dataclass(frozen=True)
class Estimate:
    """Expected duration of one task."""

    task: str
    seconds: float | None
    """None: nothing is known yet."""
    text: str
    """Sentence about it."""


def limit_seconds(price: float, budget: float, provider: str) -> float:
    """Return the seconds that a run may take.

    Raises:
        Refusal: They are too few to begin.
    """
    seconds = 3600 * budget / price
    if seconds < LEAST_SECONDS:
        raise Refusal(
            f"--budget: {budget:g} at {price:g} an hour is {seconds / 60:.0f} min; at least "
            f"{LEAST_SECONDS / 60:.0f} min are needed, since the machine is set up first"
        )
    return min(seconds, MOST_SECONDS[provider])


def cost_lines(
    request: Request, provider: str, limit: float, estimates: Sequence[Estimate], today: str
) -> Iterator[str]:
    """Yield the lines about the cost of a run.

    Args:
        request: the run.
        provider: key of PROVIDERS.
        limit: seconds that it may take.
        estimates: expected durations of its tasks.
        today: the date.
    """
    price, budget = request.price, request.budget
    yield f"Machine   {request.count} x {request.gpu} by {PROVIDERS[provider]}"
    yield f"Price     {price:.2f} an hour: your provider's price, as you gave it on {today}"
    for one in estimates:
        cost = (
            ""
            if one.seconds is None
            else f": about {one.seconds / 3600:.2f} h, {one.seconds / 3600 * price:.2f}"
        )
        yield f"Task      {one.task}{cost}; {one.text}"
    yield f"At most   {limit / 3600:.2f} h, {limit / 3600 * price:.2f} of a budget of {budget:.2f}"
    yield f"Ends      {RESERVE:.0f} s before that: the running command is stopped, and can go on another time"
    known = [one.seconds for one in estimates if one.seconds is not None]
    if sum(known) > limit - RESERVE:
        yield "Partial   the estimate is above the budget: the same command goes on, with another budget"


# --- the tasks ------------------------------------------------------------------------------------


def steps_of(task: str, engine: str = "transformer_engine") -> tuple[Step, ...]:
    """Return the commands of a task, as the container runs them.

    Args:
        task: the task.
        engine: key of ENGINES that `doctor` compares with the emulator.
    """
    if task == "doctor":
        record = f"{HOME}/{RUNS}/{RENTED}/{ENGINES[engine]}.json"
        comparison = ("ablate", "doctor", "--engine", engine, "--record", record)
        return (Step("doctor", ("ablate", "doctor")), Step(ENGINES[engine], comparison))
    if task == "gpu-day":
        out = f"{HOME}/{RUNS}/{RENTED}/gpu-day"
        return (Step("gpu-day", ("/opt/ablate/benchmarks/gpu_day.sh", "--resume", "--out", out)),)
    file = Path(task)
    sweep = ("ablate", "sweep", f"{WORK}/{file.name}", "--state", f"{HOME}/{RUNS}", "--device", "cuda")
    return (Step(file.stem, (*sweep, "--mlflow", "none", "--no-report")),)


def estimate(task: str, gpu: Gpu, state: Path) -> Estimate:
    """Return the expected duration of a task; an experiment's is that of `ablate plan --json`.

    Raises:
        Refusal: The experiment cannot run on such a machine; with the plan's own words.
    """
    if task == "doctor":
        return Estimate(task, None, "minutes; with the comparison of an engine up to an hour")
    if task == "gpu-day":
        return Estimate(task, None, "up to half a day; `--only` of benchmarks/gpu_day.sh is not passed on")
    command = [sys.executable, "-m", "ablate", "plan", task, "--json", "--capability", gpu.capability]
    paths = [str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run(
        [*command, "--state", str(state)], capture_output=True, text=True, check=False, env=environment
    )
    if done.returncode:
        raise Refusal(done.stderr.strip() or f"{shlex.join(command)} ended with status {done.returncode}")
    return from_plan(task, json.loads(done.stdout))


def from_plan(task: str, plan: dict[str, Any]) -> Estimate:
    """Return the estimate of a plan, as `ablate plan --json` prints it.

    Raises:
        Refusal: the image has no library of the engine.
    """
    if plan["engine"] in ("scaled_mm:cudnn", "scaled_mm:cutlass"):
        raise Refusal(
            f"{task}: engine {plan['engine']}: the image of rented machines has no FlashInfer; use engine:"
            " scaled_mm"
        )
    more = plan["to_run_later_at_most"]
    counts = (
        f"{plan['to_run']} trials to run{f', at most {more} more later' if more else ''}, {plan['done']} done"
    )
    engine = f"engine {plan['engine']}"
    if plan["engine_why"]:
        engine += f" (auto), since {plan['engine_why']}"
    emulated = [
        arm["arm"]
        for arm in plan["products"]
        if any(product["runs"] == "emulated" for part in arm["parts"] for product in part.values())
    ]
    if emulated:
        arms = f"{len(emulated)} of {len(plan['products'])} arms"
        engine += f", which emulates products of {arms} (`ablate plan` names the fields in the way)"
    if not plan["measured_trials"] and plan["to_run"] + more:
        return Estimate(
            task,
            None,
            f"{counts}, {engine}; no estimate of the time, since no trial has run on such a GPU yet",
        )
    return Estimate(task, plan["seconds"], f"{counts}, {engine}; {plan['measured_trials']} were measured")


# --- the files ------------------------------------------------------------------------------------


def uploads(folder: Path) -> list[Path]:
    """Return the files of an experiment's folder that are uploaded, relative to it.

    Raises:
        Refusal: They are more than a rented machine should be sent.
    """
    found, size = [], 0
    for root, folders, names in os.walk(folder):
        folders[:] = sorted(
            name
            for name in folders
            if name not in NOT_UPLOADED and not re.fullmatch(r"runs-.*|\.venv.*", name)
        )
        for name in sorted(names):
            path = Path(root) / name
            if SECRET.fullmatch(name) or not path.is_file():
                continue
            found.append(path.relative_to(folder))
            size += path.stat().st_size
            if size > MOST_BYTES:
                raise Refusal(
                    f"{folder}: has more than {MOST_BYTES / 2**30:.0f} GiB of files; put the experiment and "
                    "its data into a folder of their own"
                )
    return found


def staged(given: Path, request: Request, folder: Path | None) -> list[Path]:
    """Write request.json and work/ into a folder, which is what the machine gets besides the checkout; return
    the files of work/.
    """
    (given / "work").mkdir(parents=True)
    (given / "request.json").write_text(request.wire())
    files = uploads(folder) if folder else []
    for path in files:
        (given / "work" / path).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(folder / path, given / "work" / path)
    return files


# --- the providers --------------------------------------------------------------------------------


def client(provider: str) -> list[str]:
    """Return the words that start the provider's client.

    Raises:
        Refusal: It is not installed.
    """
    beside = Path(sys.executable).parent / provider
    if provider == "modal" and find_spec("modal"):
        return [sys.executable, "-m", "modal"]
    if beside.exists():
        return [str(beside)]
    if on_path := shutil.which(provider):
        return [on_path]
    package = {"modal": "modal", "sky": "skypilot[aws]"}[provider]
    login = {"modal": "modal setup", "sky": "sky check"}[provider]
    raise Refusal(f"--on: {provider} is not installed; `pipx install '{package}'`, then `{login}`")


def modal_command(store: str, given: Path, limit: float) -> list[str]:
    """Return the words after `modal` that start a run."""
    options = ["--given", str(given), "--store", store, "--limit", str(math.ceil(limit))]
    return ["run", str(APP), *options]


def sky_task(price: float) -> str:
    """Return docker/cloud/sky.yaml with the price as SkyPilot's own limit, so that no dearer machine is
    started."""
    head = "resources:\n"
    text = TASK.read_text()
    if text.count(f"\n{head}") != 1:
        raise ValueError(f"{TASK} must have one line `resources:`")
    return text.replace(f"\n{head}", f"\n{head}  max_hourly_cost: {price}\n")


def sky_command(
    task: Path, store: str, given: Path, limit: float, gpu: str, infra: str | None, spot: bool
) -> list[str]:
    """Return the words after `sky` that start a run: on a machine of its own, or as a managed job that
    SkyPilot moves to another machine when a spot machine is taken away.
    """
    name = f"ablate-{gpu.lower().replace(':', '-')}"
    words = ["jobs", "launch", "--name", name, "--use-spot"] if spot else ["launch", "--cluster", name]
    words += ["--yes", "--gpus", gpu, "--workdir", str(ROOT)]
    words += ["--infra", infra] if infra else []
    for variable, value in (("STORE", store), ("GIVEN", given), ("LIMIT", math.ceil(limit))):
        words += ["--env", f"{variable}={value}"]
    return [*words, str(task)]


def fetch_command(provider: str, store: str, target: Path) -> list[str]:
    """Return the command that copies the state folder of a store to `target/runs`.

    Raises:
        Refusal: No program is known for this kind of bucket.
    """
    if provider == "modal":
        return [*client("modal"), "volume", "get", "--force", store, RUNS, str(target)]
    address, folder = f"{store.rstrip('/')}/{RUNS}", str(target / RUNS)
    if store.startswith("s3://"):
        return ["aws", "s3", "sync", "--only-show-errors", address, folder]
    if store.startswith("gs://"):
        return ["gcloud", "storage", "rsync", "--recursive", address, folder]
    raise Refusal(f"--fetch: no program is known that reads {store}; copy its folder `{RUNS}` yourself")


def bring_back(source: Path, state: Path) -> int:
    """Copy a fetched state folder over the one here; return the number of files.

    Files that are here alone stay. The log of a database that is replaced is removed: it belongs to the old
    one.
    """
    count = 0
    for root, _, names in os.walk(source):
        for name in names:
            path = Path(root) / name
            target = state / path.relative_to(source)
            target.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
            for ending in ("-wal", "-shm", "-journal"):
                target.with_name(target.name + ending).unlink(missing_ok=True)
            part = target.with_name(f"{name}.copying")
            shutil.copy2(path, part)
            part.replace(target)
            count += 1
    return count


def refuse_mixture(runs: Path, gpu: str, what: str) -> None:
    """Refuse a state folder that has results of another model of GPU.

    Args:
        runs: the folder.
        gpu: model of the GPU.
        what: option that names the folder or its source, for the message.

    Raises:
        Refusal: It has such results.
    """
    if others := session.other_gpus(session.read_spent(runs), gpu):
        raise Refusal(
            f"{what}: has results of {', '.join(others)}; those of {gpu} need a folder and store of their own"
        )


def fetch(provider: str, store: str, state: Path, gpu: str) -> None:
    """Bring the results of a store back into a state folder.

    Raises:
        Refusal: The program that copies is missing or failed.
    """
    with tempfile.TemporaryDirectory(prefix="ablate-fetch-") as folder:
        (Path(folder) / RUNS).mkdir()
        command = fetch_command(provider, store, Path(folder))
        try:
            status = subprocess.run(command, check=False).returncode
        except FileNotFoundError:
            raise Refusal(
                f"--fetch: {command[0]} is not installed; `{shlex.join(command)}` would be run"
            ) from None
        if status:
            raise Refusal(
                f"--fetch: `{shlex.join(command)}` ended with status {status}; nothing here was changed"
            )
        refuse_mixture(Path(folder) / RUNS, gpu, f"--store {store}")
        count = bring_back(Path(folder) / RUNS, state)
    print(f"{count} files brought back into {state}")
    sweeps = sorted(path.parent.name for path in state.glob("sweeps/*/ledger.db"))
    print(f"Look next:\n  ablate status --state {state}")
    for name in sweeps:
        print(f"  ablate report {name} --state {state}")


# --- the command ----------------------------------------------------------------------------------


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        prog="python docker/cloud/rent.py", description=__doc__.splitlines()[0], allow_abbrev=False
    )
    made.add_argument(
        "tasks", nargs="*", metavar="TASK", help="experiment file (YAML), `doctor` or `gpu-day`"
    )
    made.add_argument(
        "--on", required=True, choices=PROVIDERS, help="provider: Modal, or SkyPilot for any cloud"
    )
    made.add_argument("--gpu", type=str.upper, help=f"model of the GPU: {', '.join(GPUS)}")
    made.add_argument(
        "--engine",
        choices=ENGINES,
        help="engine that the task `doctor` compares with the emulator; default: transformer_engine",
    )
    made.add_argument("--count", type=int, default=1, help="number of GPUs of the machine; default: 1")
    made.add_argument(
        "--price", help="price of an hour of the machine, all of it: look it up at your provider"
    )
    made.add_argument("--budget", help="largest cost of this run, in the currency of the price")
    made.add_argument(
        "--store", help="Modal: name of the volume, default ablate-GPU; SkyPilot: s3:// or gs:// bucket"
    )
    made.add_argument(
        "--state", type=Path, help="folder that results are brought back into; default: runs-GPU"
    )
    made.add_argument(
        "--infra", help="SkyPilot: cloud, region and zone, such as aws/us-east-1; default: the cheapest"
    )
    made.add_argument("--spot", action="store_true", help="SkyPilot: spot machines; lost ones are replaced")
    made.add_argument("--fetch", action="store_true", help="start nothing: bring the results back")
    made.add_argument(
        "--dry-run", action="store_true", help="print the cost, the files and the command; start nothing"
    )
    made.add_argument("--yes", action="store_true", help="do not ask")
    return made


def store_of(asked: argparse.Namespace) -> str:
    """Return the name of the volume or the address of the bucket.

    Raises:
        Refusal: SkyPilot needs a bucket, and none is named.
    """
    if asked.on == "modal":
        store = asked.store or f"ablate-{asked.gpu.lower()}"
        if not re.fullmatch(r"[\w.-]{1,60}", store):
            raise Refusal(
                f"--store: {store!r} is no name of a Modal volume: letters, digits, `-`, `_` and `.`"
            )
        return store
    if not re.match(r"(s3|gs)://[\w.-]+", asked.store or ""):
        raise Refusal(
            "--store: SkyPilot needs a bucket of yours that keeps the results: s3://NAME or gs://NAME"
        )
    return asked.store


def folder_of(tasks: Sequence[str]) -> Path | None:
    """Return the folder of the experiments among the tasks; None if there is none.

    Raises:
        Refusal: A file is missing, or they are in different folders.
    """
    files = [Path(task) for task in tasks if task not in ("doctor", "gpu-day")]
    for file in files:
        if not (file.suffix in (".yaml", ".yml") and file.is_file()):
            raise Refusal(f"{file}: neither an experiment's YAML file nor `doctor` nor `gpu-day`")
    folders = {file.resolve().parent for file in files}
    if len(folders) > 1:
        raise Refusal(f"{', '.join(map(str, files))}: are in different folders; the machine gets one of them")
    return folders.pop() if folders else None


def run(asked: argparse.Namespace) -> int:
    """Run the command and return its exit status.

    Raises:
        Refusal: The command is wrong; nothing was started.
    """
    gpu = named_gpu(asked.gpu, asked.on)
    store = store_of(asked)
    state = asked.state or Path(f"runs-{asked.gpu.lower()}")
    refuse_mixture(state, asked.gpu, f"--state {state}")
    if asked.fetch:
        fetch(asked.on, store, state, asked.gpu)
        return 0
    price, budget = positive("--price", asked.price), positive("--budget", asked.budget)
    if not 1 <= asked.count <= 8:
        raise Refusal(f"--count: {asked.count} GPUs; one machine has 1 to 8")
    if not asked.tasks:
        raise Refusal("no task: name an experiment's YAML file, `doctor` or `gpu-day`")
    if asked.on == "modal" and (asked.spot or asked.infra):
        raise Refusal(
            "--spot, --infra: are SkyPilot's; Modal restarts a machine that it takes away by itself"
        )
    limit = limit_seconds(price, budget, asked.on)
    folder = folder_of(asked.tasks)
    if asked.engine and "doctor" not in asked.tasks:
        raise Refusal("--engine: is for the task `doctor`; an experiment's file names its engine itself")
    steps = tuple(
        step for task in asked.tasks for step in steps_of(task, asked.engine or "transformer_engine")
    )
    if len({step.name for step in steps}) < len(steps):
        raise Refusal("a task is named twice")
    estimates = [estimate(task, gpu, state) for task in asked.tasks]
    run_name = f"{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(2)}"
    paid = budget if limit == 3600 * budget / price else limit / 3600 * price
    request = Request(run_name, asked.gpu, asked.count, price, paid, steps)
    with tempfile.TemporaryDirectory(prefix="ablate-rent-") as temporary:
        given = Path(temporary) / "given"
        files = staged(given, request, folder)
        size = sum((given / "work" / path).stat().st_size for path in files) / 2**20
        for line in cost_lines(request, asked.on, limit, estimates, time.strftime("%Y-%m-%d")):
            print(line)
        where = f" and {len(files)} files ({size:.1f} MiB) of {folder}" if folder else ""
        print(f"Uploads   this checkout (without what .dockerignore or .gitignore names){where}")
        print(f"Keeps     results in {store}, brought back into {state}")
        name = (
            f"{gpu.modal if asked.on == 'modal' else gpu.sky}{f':{asked.count}' if asked.count > 1 else ''}"
        )
        if asked.on == "modal":
            words = [*modal_command(store, given, limit), "--gpu", name]
        else:
            task = Path(temporary) / "task.yaml"
            task.write_text(sky_task(price))
            words = sky_command(task, store, given, limit, name, asked.infra, asked.spot)
        if asked.dry_run:
            print(f"Command   {shlex.join([asked.on, *words])}")
            return 0
        command = [*client(asked.on), *words]
        if not asked.yes and not agreed():
            print("Nothing was started.")
            return session.REFUSED
        try:
            status = subprocess.run(command, cwd=ROOT, check=False).returncode
        except KeyboardInterrupt:
            print(stop_hint(asked.on, words))
            return 130
    print(f"The provider's command ended with status {status}")
    with suppress(KeyboardInterrupt):
        fetch(asked.on, store, state, asked.gpu)
    return status


def stop_hint(provider: str, words: Sequence[str]) -> str:
    """Return what to do after Ctrl-C, which ends a run on Modal, and only the display of one on SkyPilot.

    Args:
        provider: key of PROVIDERS.
        words: words after the provider's client that started the run.
    """
    if provider == "modal":
        return (
            "Stopped. `modal app list` shows whether anything still runs; --fetch brings back what was kept."
        )
    stop = "sky jobs queue` and `sky jobs cancel ID" if words[0] == "jobs" else f"sky down {words[2]}"
    return f"The machine goes on and costs money until its work or its budget ends. To stop it: `{stop}`."


def agreed() -> bool:
    """Ask before anything is started; return False without a terminal."""
    if not sys.stdin.isatty():
        print("Start? No terminal to ask; add --yes")
        return False
    return input("Start? [y/N] ").strip().lower() in ("y", "yes")


def main(words: Sequence[str]) -> int:
    """Run the command line and return its exit status: that of the run, or 2 with the reason if it is
    refused."""
    try:
        return run(parser().parse_args(words))
    except Refusal as error:
        print(error, file=sys.stderr)
        return session.REFUSED


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
