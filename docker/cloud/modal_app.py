"""Run an experiment, a benchmark or the checks of the numerics on a GPU of Modal: docs/run/cloud.md.

    MODAL_GPU=B200 modal run docker/cloud/modal_app.py --file experiments/rht_sr.yaml --hours 2
    modal run docker/cloud/modal_app.py --bench linear    # or --doctor; --fetch only downloads

The problem. A machine of Modal costs money by the second, may be taken away at any moment, and forgets its
disk. A Modal volume keeps files, but has no locks: a live SQLite file on it would be torn.

The idea. Commands write to the machine's own disk. At the end of each trial the state folder is copied to the
volume as one archive, databases by SQLite's own backup, so that no moment has half a copy. A machine that
takes over begins with that archive. `--hours` is the budget, counted from the first machine's start: then the
command is ended, and MARGIN later Modal's own time-out ends the machine. Each model of GPU has a volume and a
folder of its own, since the id of a trial has the class of its device alone.
"""

import io
import os
import re
import shlex
import signal
import sqlite3
import subprocess
import sys
import tarfile
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import NoReturn

import modal

ROOT = Path(__file__).resolve().parents[2] if modal.is_local() else Path("/opt/ablate")
STATE, KEPT, ARCHIVE, LOCK = "/session/runs", "/kept", "state.tar", "started"
CAPABILITY = {"B200": "10.0", "RTX-PRO-6000": "12.0", "H100": "9.0", "H200": "9.0", "L40S": "8.9"}
"""Compute capability by Modal's name of the GPU."""
BENCHES = {name: f"ablate bench {name}" for name in ("linear", "kernels", "step")}
BENCHES["gpu-day"] = f"/opt/ablate/benchmarks/gpu_day.sh --resume --out {STATE}/rented/gpu-day"
DOCTOR = f"""ablate doctor && for engine in transformer_engine scaled_mm; do
    ablate doctor --engine $engine --record {STATE}/rented/parity-$engine.json || exit; done"""
REFUSED, BUDGET = 2, 3
"""Exit statuses, as those of `ablate sweep`."""
MARGIN, GRACE, EVERY = 180, 20, 300
"""Seconds for the last copy, between SIGINT and SIGKILL, and between two copies during a trial."""
NOT_SENT = """.[!/]* __pycache__ runs runs-* reports mlruns node_modules
    *.pem *.key id_rsa id_ed25519 id_ecdsa *[Cc]redentials* ablate.toml"""
"""Names of files and folders that are no part of an experiment, or may hold credentials; patterns of tar. All
that are hidden are among them: a home folder has the tokens of Modal, GitHub, Hugging Face and others."""
ENV = {"ABLATE_STATE": STATE, "ABLATE_CACHE": f"{STATE}/rented/cache", "KEPT": KEPT, "VENV": "/opt/venv"}
"""Environment of the commands; benchmarks/gpu_day.sh reads VENV."""
DOCKERFILE = ROOT / "docker" / "blackwell.Dockerfile"

image = (
    modal.Image.from_dockerfile(DOCKERFILE, context_dir=ROOT, build_args={"TESTS": "yes"})
    .dockerfile_commands("USER root")  # volumes are root's
    .entrypoint([])  # Modal starts a program of its own
    .add_local_dir(ROOT / "tests", "/opt/ablate/tests", ignore=["**/__pycache__"])
    .add_local_dir(ROOT / "benchmarks", "/opt/ablate/benchmarks", ignore=["**/__pycache__"])
)
app = modal.App("ablate-rented")


def keep(state: Path, archive: Path, volume: modal.Volume) -> None:
    """Replace the archive on the volume by the present state folder.

    Databases are read before the files are listed, and no file that appears later is taken: the ledger in the
    archive never says more than the trial store, and no result is newer than its records.
    """
    for path in state.rglob("*.db"):
        whole = sqlite3.connect(f"{path}.copying")
        with closing(sqlite3.connect(path, timeout=30)) as live, closing(whole) as copy:
            live.backup(copy)
            copy.execute("PRAGMA journal_mode = DELETE")
    listed, part = [path for path in state.rglob("*") if path.is_file()], Path(f"{archive}.copying")
    with tarfile.open(part, "w", dereference=True) as tar:
        for path in listed:
            if not path.name.endswith(("-wal", "-shm", "-journal", ".copying")):
                with suppress(FileNotFoundError):  # removed since
                    tar.add(f"{path}.copying" if path.suffix == ".db" else path, path.relative_to(state))
    part.replace(archive)
    volume.commit()


def unpack(archive: bytes, folder: Path) -> None:
    """Write the files of an archive into a folder; files that are there alone stay."""
    with tarfile.open(fileobj=io.BytesIO(archive)) as tar:
        for name in tar.getnames():
            for ending in ("", "-wal", "-shm"):  # an old log would be applied to a new database
                (folder / f"{name}{ending}").unlink(missing_ok=True)
        tar.extractall(folder, filter="data")


@app.function(image=image, startup_timeout=1800, cpu=8.0, memory=65536, env=ENV, single_use_containers=True)
def rented(store: str, work: bytes, line: str, seconds: float) -> int:
    """Run a shell command on this machine and return its exit status; BUDGET if the time was over.

    Modal may take the machine away. It then interrupts this function, and starts it again with the same
    arguments: the time counts from the first start.

    Args:
        store: name of the volume that is mounted at KEPT.
        work: archive of the experiment's folder.
        line: the command. Its output is kept, too.
        seconds: time for it.
    """
    state, kept = Path(os.environ["ABLATE_STATE"]), Path(os.environ["KEPT"])
    folder = state.parent / "work"  # the same on each machine: paths are part of records
    os.umask(0o077)
    (state / "rented").mkdir(parents=True)  # a machine with results ends here
    with suppress(FileNotFoundError):
        unpack((kept / ARCHIVE).read_bytes(), state)
    unpack(work, folder)
    started = float((kept / LOCK).read_text()) or time.time()
    (kept / LOCK).write_text(str(started))
    volume, ended, at = modal.Volume.from_name(store), -1, 0.0
    script = f"set -o pipefail; ({line}) </dev/null 2>&1 | tee -ai {state}/rented/output.txt"
    process = subprocess.Popen(["bash", "-c", script], cwd=folder, start_new_session=True)
    try:
        while (status := process.poll()) is None and time.time() < started + seconds:
            now = len(list(state.glob("trials/*/result.json")))
            if now != ended or time.monotonic() > at + EVERY:
                keep(state, kept / ARCHIVE, volume)
                ended, at = now, time.monotonic()
            time.sleep(0.5)
    finally:
        for number in (signal.SIGINT, signal.SIGKILL):
            with suppress(ProcessLookupError, subprocess.TimeoutExpired):
                os.killpg(process.pid, number)
                process.wait(GRACE)
        keep(state, kept / ARCHIVE, volume)
    return BUDGET if status is None else status


def packed(folder: Path, most: int = 2**30) -> bytes:
    """Return an archive of an experiment's folder, of less than `most` bytes."""
    words = ["tar", "-ch", *(f"--exclude={name}" for name in NOT_SENT.split()), "-C", folder, "."]
    with subprocess.Popen(words, stdout=subprocess.PIPE) as tar:
        work = tar.stdout.read(most)
        tar.kill()
    if len(work) == most:
        refuse(f"{folder} has {most / 2**30:g} GiB or more: move the experiment and its data elsewhere.")
    return work


def download(volume: modal.Volume, state: Path) -> None:
    """Bring the state folder of a volume to this machine; nothing if the volume has none yet."""
    state.mkdir(parents=True, exist_ok=True, mode=0o700)
    with suppress(FileNotFoundError):
        unpack(b"".join(volume.read_file(ARCHIVE)), state)
    print(f"Results are in {state}, reports in {state}/reports. Look next: ablate status --state {state}")


def refuse(why: str) -> NoReturn:
    """End with a sentence and without a machine."""
    print(why, file=sys.stderr)
    sys.exit(REFUSED)


@app.local_entrypoint()
def main(
    file: str = "", bench: str = "", doctor: bool = False, fetch: bool = False, hours: float = 1.0
) -> None:
    """Run one task on a machine with the GPU of MODAL_GPU, and download its results into reports/GPU.

    Args:
        file: experiment (YAML), which is sent with its folder.
        bench: key of BENCHES.
        doctor: check the numerics, and the kernels of the engines.
        fetch: only download.
        hours: budget, as time of the machine.
    """
    gpu = os.environ.get("MODAL_GPU", "B200").upper()
    model = gpu.partition(":")[0]
    if not re.fullmatch(f"({'|'.join(CAPABILITY)})(:[1-8])?", gpu):
        refuse(f"MODAL_GPU: {gpu} is not one of {', '.join(CAPABILITY)}, with :2 to :8 for several.")
    if sum((bool(file), bench in BENCHES, doctor, fetch)) != 1 or bench not in ("", *BENCHES):
        refuse(f"Name one task: --file X.yaml, --doctor, --fetch, or --bench with {', '.join(BENCHES)}.")
    if not 0 < hours <= 23:
        refuse(f"--hours: {hours:g} is not more than 0 and at most 23; Modal ends a machine after a day.")
    store, state = f"ablate-{model.lower()}", Path("reports") / model.lower()
    volume = modal.Volume.from_name(store, create_if_missing=True)
    if fetch:
        return download(volume, state)
    plan = f"ablate plan {shlex.quote(file)} --state {state} --capability {CAPABILITY[model]}"
    if file and subprocess.run(plan, shell=True, check=False).returncode:
        sys.exit(REFUSED)
    # The folder of a link, not of its target, which may have another name there.
    work = packed(Path(file or __file__).absolute().parent)
    sweep = f"ablate sweep {shlex.quote(Path(file).name)} --device cuda --mlflow none"
    try:
        with volume.batch_upload() as batch:
            batch.put_file(io.BytesIO(b"0"), f"/{LOCK}")
    except FileExistsError:
        refuse(f"Another run writes to the volume {store}; if it is dead, `modal volume rm {store} {LOCK}`.")
    line, seconds = DOCTOR if doctor else BENCHES.get(bench, sweep), int(3600 * hours)
    gpu = gpu.replace("H100", "H100!")  # Modal may give an H200 for an H100 without it
    machine = rented.with_options(gpu=gpu, timeout=seconds + MARGIN, volumes={KEPT: volume})
    try:
        status = machine.remote(store, work, line, seconds)
    finally:
        volume.remove_file(LOCK)
        download(volume, state)
    sys.exit(status)
