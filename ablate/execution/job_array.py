"""Sweeps as job arrays of a batch system: written to a folder, run without a controller, then collected.

The problem. On many clusters nothing may run for days on a login node, and a batch system decides when a job
begins, ends it at a time limit and starts it again. A controller with workers on Ray does not fit there.

The idea. A grid's trials do not depend on each other, except that some start from states that others leave.
So the missing trials are written as stages: the trials of a stage may run at the same time, in any order,
and a stage starts once the one before it is over.

    FOLDER/jobs.json             the sweep, and the trials of each stage
    FOLDER/requests/ID.json      one TrialRequest a trial
    FOLDER/stage-1.sbatch ...    a job array a stage, one task a trial
    FOLDER/submit.sh             submits all stages
    FOLDER/state/                trial folders, as in any state folder

A task runs its trial under a supervisor, from the last checkpoint; told to end, it waits for the next one
first. `collect` copies finished trial folders into the sweep's state folder, where the sweep reuses them like
any other results.

Refused: searches, which choose trials by the results of earlier ones, and trials on several machines.
"""

import math
import re
import shlex
import shutil
import time
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

from pydantic import TypeAdapter, ValidationError

from ablate.errors import InputError, as_input_error
from ablate.execution.messages import MalformedMessage, Message, TrialRequest
from ablate.execution.supervisor import Supervisor
from ablate.experiment.schema import Resources
from ablate.files import Damaged, write
from ablate.results.number_text import counted
from ablate.store.trial_store import Store

MANIFEST, STATE = "jobs.json", "state"
REQUEUE = 75
"""Exit status of a task that was told to end before its trial was over: EX_TEMPFAIL of sysexits.h."""
NOTICE_SECONDS = 300
"""Seconds before the time limit at which SLURM sends SIGTERM."""
_LONGEST_WAIT = 240.0
"""Seconds after SIGTERM for which a task waits for the trial's next checkpoint."""
_OPTION = re.compile(r"--[a-z][a-z-]*(=\S.*)?")
_OWN = ("array", "chdir", "open-mode", "output", "requeue", "signal")
"""Options of sbatch that the scripts set themselves."""


_TRIAL = re.compile(r"[0-9a-f]{16}")
"""Id of a trial, which is a name of a folder."""


@dataclass(frozen=True)
class Jobs:
    """Manifest of an exported sweep."""

    name: str
    file: str
    """Experiment file, as an absolute path on the machine that wrote the folder."""
    seeds: int | None
    """Number of seeds if it was given beside the file."""
    device: str
    stages: tuple[tuple[str, ...], ...]
    """Trial ids of each stage, in the order of the array's tasks."""
    capability: str | None = None
    """Compute capability of the GPU that the engine was chosen for; None: it was this machine."""

    @classmethod
    def read(cls, folder: Path) -> "Jobs":
        """Return the manifest of a folder. InputError if there is none, or none that `export` wrote."""
        path = folder / MANIFEST
        try:
            jobs = TypeAdapter(cls).validate_json(path.read_bytes())
        except OSError as error:
            raise InputError(
                f"{path}: {error.strerror or error}; give the folder that `ablate sweep X.yaml"
                " --export-jobs FOLDER` wrote"
            ) from None
        except ValidationError as error:
            raise InputError(f"{path}: not a manifest of jobs: {error.errors()[0]['msg']}") from None
        if wrong := [trial for trial in jobs.trials if not _TRIAL.fullmatch(trial)]:
            raise InputError(f"{path}: not a manifest of jobs: {wrong[0]!r} is not the id of a trial")
        return jobs

    @property
    def trials(self) -> list[str]:
        """Ids of all trials."""
        return [trial for stage in self.stages for trial in stage]


@dataclass(frozen=True)
class Need:
    """Resources of one task."""

    cpus: int
    gpus: int

    @classmethod
    def of(cls, file: Path, resources: Resources, device: str) -> "Need":
        """Return what a trial needs. InputError, which names the experiment's file, if it needs a GPU that
        this machine does not have."""
        gpus = math.ceil(resources.gpus_of(device))
        if resources.gpus and not gpus:
            raise InputError(
                f"{file}: resources.gpus {resources.gpus:g}, and this machine has no GPU, so that the"
                " jobs would compute on CPUs; add --capability, such as 10.0 for a B200, or leave the"
                " GPUs out"
            )
        return cls(1 if gpus else resources.layout(device).ranks, gpus)

    def __str__(self) -> str:
        return f"{counted(self.cpus, 'CPU')}, {counted(self.gpus, 'GPU') if self.gpus else 'no GPU'}"


def export(
    folder: Path, jobs: Jobs, requests: Sequence[Sequence[TrialRequest]], need: Need, options: Sequence[str]
) -> list[Path]:
    """Write the folder of a sweep's jobs, which is new or empty, and return the scripts. `requests` has those
    of each stage, as in `jobs.stages`; `need` is one task's; `options` are further ones of sbatch, such as
    `--partition=gpu`. InputError if the folder holds something, or an option is none or is set here."""
    if folder.exists() and any(folder.iterdir()):
        raise InputError(f"{folder}: the folder is not empty; name one that does not exist yet")
    for option in options:
        name = option.removeprefix("--").partition("=")[0]
        if not _OPTION.fullmatch(option) or "\n" in option:
            raise InputError(f"--sbatch {option!r}: no option of sbatch; write it as --partition=gpu")
        if name in _OWN:
            raise InputError(f"--sbatch {option}: the scripts set --{name} themselves")
    for part in ("requests", "logs", STATE):
        (folder / part).mkdir(parents=True, exist_ok=True)
    for stage in requests:
        for request in stage:
            (folder / "requests" / f"{request.id}.json").write_bytes(replace(request, root=STATE).line())
    scripts = []
    for number, stage in enumerate(requests, 1):
        path = folder / f"stage-{number}.sbatch"
        path.write_text(_script(jobs.name, number, len(stage), need, options), encoding="utf-8")
        scripts.append(path)
    submit = folder / "submit.sh"
    submit.write_text(_submit(len(scripts)))
    for path in (*scripts, submit):
        path.chmod(0o755)
    write(folder / MANIFEST, vars(jobs))
    return [*scripts, submit]


def request_of(folder: Path, stage: int, task: int) -> TrialRequest:
    """Return the request of a task, with the state folder as an absolute path and a new attempt's number.
    `stage` counts from 1, `task`, the index in the stage's array, from 0. InputError if there is no such
    task, or its request cannot be read."""
    stages = Jobs.read(folder).stages
    if not (1 <= stage <= len(stages) and 0 <= task < len(stages[stage - 1])):
        sizes = ", ".join(f"stage {number} has {len(each)}" for number, each in enumerate(stages, 1))
        raise InputError(f"{folder}: no task {task} of stage {stage}; {sizes} tasks")
    path = folder / "requests" / f"{stages[stage - 1][task]}.json"
    with as_input_error(OSError, MalformedMessage, before=f"{path}: "):
        request = TrialRequest.parse(path.read_bytes())
    root = (folder / STATE).resolve()
    return replace(request, root=str(root), attempt=Store(root).begin(request.id))


class Task:
    """One task of a job array: runs a trial until it is over, or until the task is told to end."""

    def __init__(self, request: TrialRequest, supervisor: Supervisor | None = None) -> None:
        """`request`: result of `request_of`."""
        self.request, self._supervisor = request, supervisor or Supervisor()
        self._told: float | None = None

    def end(self) -> None:
        """End the trial after its next checkpoint, or after four minutes. A signal handler may call this."""
        self._told = self._told or time.time()

    def run(self) -> Generator[Message, None, None]:
        """Run the trial and yield its messages, Ended last; it has no result if `end` cut the trial short."""
        try:
            for message in self._supervisor.run(self.request):
                if self._told is not None and self._may_end(self._told):
                    self._supervisor.stop()
                yield message
        finally:
            self._supervisor.close()

    @property
    def told(self) -> bool:
        """True if `end` was called."""
        return self._told is not None

    def _may_end(self, told: float) -> bool:
        checkpoint = Store(Path(self.request.root)).folder(self.request.id) / "checkpoint.pt"
        written = checkpoint.stat().st_mtime if checkpoint.exists() else 0.0
        return written > told or time.time() - told > _LONGEST_WAIT


@dataclass(frozen=True)
class Collected:
    """One trial of an exported sweep as `collect` found it."""

    trial: str
    status: Literal["copied", "there already", "not begun", "not finished", "damaged"]
    detail: str = ""
    """Last line of the latest attempt's log, or what is damaged."""


def collect(folder: Path, jobs: Jobs, store: Store) -> Iterator[Collected]:
    """Copy the finished trials of a folder into a state folder, and yield what was found of each trial. An
    unfinished folder of the same trial is moved to `retired/`. A damaged one is not copied, and neither is
    one with links: their targets, anywhere on this machine, would be copied and sent to MLflow."""
    source = Store(folder / STATE)
    for trial in jobs.trials:
        try:
            if store.finished(trial):
                yield Collected(trial, "there already")
                continue
            whole = (source.folder(trial), *source.folder(trial).rglob("*"))
            if link := next((path for path in whole if path.is_symlink()), None):
                raise Damaged(link, "a link, which no trial writes")
            result = source.result(trial)
            if result is not None:
                source.proven(trial, result)
        except Damaged as error:
            yield Collected(trial, "damaged", str(error))
            continue
        if result is not None:
            _copy(source.folder(trial), store, trial)
            yield Collected(trial, "copied")
        elif attempt := source.last_attempt(trial):
            yield Collected(trial, "not finished", source.log_tail(trial, attempt, 1))
        else:
            yield Collected(trial, "not begun")


def _copy(source: Path, store: Store, trial: str) -> None:
    """Copy a trial folder so that it exists completely or not at all."""
    target = store.folder(trial)
    target.parent.mkdir(parents=True, exist_ok=True)
    making = target.with_name(f".{trial}.collecting")
    shutil.rmtree(making, ignore_errors=True)
    shutil.copytree(source, making, ignore=shutil.ignore_patterns("lock", "checkpoint.pt*"))
    store.retire(trial)
    making.rename(target)


def _script(name: str, stage: int, tasks: int, need: Need, options: Sequence[str]) -> str:
    gpus = [f"--gpus-per-task={need.gpus}"] if need.gpus else []
    own = [
        f"--job-name=ablate-{re.sub(r'[^A-Za-z0-9_.-]', '-', name)}-{stage}",
        f"--array=0-{tasks - 1}",
        "--output=logs/%A_%a.txt",
        "--open-mode=append",
        "--requeue",
        f"--signal=B:TERM@{NOTICE_SECONDS}",
        "--nodes=1",
        "--ntasks=1",
        f"--cpus-per-task={need.cpus}",
        *gpus,
    ]
    lines = "\n".join(f"#SBATCH {option}" for option in (*own, *options))
    return f"""#!/bin/bash
{lines}
# Submitted by submit.sh in the folder of this file. PYTHON names the interpreter that has ablate, and
# APPTAINER_IMAGE an image to run it in.
task=("${{PYTHON:-python}}" -m ablate run-task . {stage} "$SLURM_ARRAY_TASK_ID")
if [ -n "$APPTAINER_IMAGE" ]; then task=(apptainer exec --nv "$APPTAINER_IMAGE" "${{task[@]}}"); fi
"${{task[@]}}" &
child=$!
trap 'kill -TERM "$child"' TERM
wait "$child"
status=$?
while kill -0 "$child" 2>/dev/null; do wait "$child"; status=$?; done  # a signal ends `wait` early
if [ "$status" = {REQUEUE} ]; then scontrol requeue "${{SLURM_ARRAY_JOB_ID}}_$SLURM_ARRAY_TASK_ID"; fi
exit "$status"
"""


def _submit(stages: int) -> str:
    lines = ["#!/bin/bash", "# Submits all stages; each waits until the one before it is over.", "set -e"]
    lines.append('cd "$(dirname "${BASH_SOURCE[0]}")"')
    for number in range(1, stages + 1):
        after = f' --dependency="afterany:$job{number - 1}"' if number > 1 else ""
        lines.append(f'job{number}=$(sbatch --parsable{after} "$@" {shlex.quote(f"stage-{number}.sbatch")})')
        lines.append(f'echo "stage {number}: job $job{number}"')
    return "\n".join(lines) + "\n"
