"""Sweeps as job arrays: exported, run as processes in place of a batch system's, killed, queued again, and collected."""

import json
import os
import re
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from support.commands import INLINE, here
from support.experiments import end, environment, ledger, statuses, until, values, write
from support.gates import Gate

from ablate.execution.job_array import REQUEUE, Jobs, Task
from ablate.execution.messages import Heartbeat, TrialRequest
from ablate.store.trial_store import Store

UNCHECKED = "import sys; from ablate.__main__ import main; sys.argv += ['--check-command', 'true']; main()"
SCONTROL = '#!/bin/bash\necho "$@" >> "$QUEUE"\n'
SBATCH = '#!/bin/bash\necho "$@" >> "$QUEUE"\necho 4711\n'


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


class Batch:
    """A batch system of processes: runs tasks of exported scripts, and keeps what is queued again."""

    def __init__(self, folder: Path, tmp_path: Path, **extra: str) -> None:
        self.folder, self.queue = folder, tmp_path / "queue"
        self.queue.touch()
        tools = tmp_path / "bin"
        script(tools / "scontrol", SCONTROL)
        script(tools / "sbatch", SBATCH)
        python = script(
            tmp_path / "bin" / "python",
            f'#!/bin/bash\nshift 2\nexec {sys.executable} -c "{UNCHECKED}" "$@"\n',
        )
        paths = os.pathsep.join([str(tools), os.environ["PATH"]])
        code = os.pathsep.join(filter(None, [extra.pop("PYTHONPATH", ""), *sys.path]))
        self.environment = environment(
            PATH=paths, PYTHON=str(python), QUEUE=str(self.queue), PYTHONPATH=code, **extra
        )

    def start(self, task: int, stage: int = 1) -> subprocess.Popen:
        """A task, left running."""
        return subprocess.Popen(
            ["bash", f"stage-{stage}.sbatch"],
            cwd=self.folder,
            env=self.environment | {"SLURM_ARRAY_TASK_ID": str(task), "SLURM_ARRAY_JOB_ID": "7"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, task: int, stage: int = 1) -> tuple[int, str]:
        """Its status and what it said."""
        process = self.start(task, stage)
        output, _ = process.communicate(timeout=120)
        return process.returncode, output

    def begun(self, task: int) -> Path:
        """The checkpoint of a task of the first stage, once it is there."""
        trial = Jobs.read(self.folder).stages[0][task]
        path = self.folder / "state" / "trials" / trial / "checkpoint.pt"
        until(path.exists)
        return path


def export(path: Path, folder: Path, state: Path, *words: object) -> subprocess.CompletedProcess:
    return here("sweep", path, "--export-jobs", folder, "--state", state, *words)


@pytest.mark.slow
def test_tasks_that_are_killed_and_queued_again_give_the_sweep_of_one_process(tmp_path):
    """A test in test_commands.py shows that workers on Ray compute the same."""
    path = write(tmp_path, ablate={"rht": [True]}, telemetry={"checkpoint": 0, "log": 1, "every": 2})
    gate = Gate(tmp_path)
    folder, state = tmp_path / "jobs", tmp_path / "state"
    done = export(path, folder, state)
    assert (done.returncode, "stage 1: 4 trials" in done.stdout) == (0, True)
    batch = Batch(folder, tmp_path, **gate.environment)
    gate.shut(1)
    assert batch.run(0)[0] == 0
    told, lost = batch.start(1), batch.start(2)
    checkpoint = batch.begun(1)
    told.send_signal(signal.SIGTERM)
    until(lambda: told.poll() is not None or os.utime(checkpoint), 60)  # the checkpoint that it waits for
    output, _ = told.communicate(timeout=60)
    assert told.returncode == REQUEUE, output
    assert batch.queue.read_text() == "requeue 7_1\n"
    batch.begun(2)
    os.killpg(lost.pid, signal.SIGKILL)
    end(lost)
    partly = here("collect", folder, "--state", state)
    assert (partly.returncode, partly.stdout.splitlines()[0]) == (1, "1 copied, 2 not finished, 1 not begun")
    gate.open()
    for task in range(1, 4):
        done = here("run-task", folder, 1, task)
        assert done.returncode == 0, done.stdout + done.stderr
        assert f"attempt {2 if task < 3 else 1}" in done.stdout
    whole = here("collect", folder, "--state", state)
    assert (whole.returncode, whole.stdout.splitlines()[0]) == (0, "1 there already, 3 copied")
    assert set(statuses(state).values()) == {"done"}
    there = tmp_path / "one process"
    ran = here("sweep", path, "--state", there, *INLINE)
    assert ran.returncode == 0, ran.stderr
    assert values(state) == values(there)
    both = [ledger(place) for place in (state, there)]
    for one, other in zip(*(sorted(book.members(), key=lambda m: m.id) for book in both), strict=True):
        facts = [
            {(step, name): value for step, name, value, _ in book.records(member.trial) if measured(name)}
            for book, member in zip(both, (one, other), strict=True)
        ]
        assert facts[0] == facts[1]
        assert len(facts[0]) > 10
    for book in both:
        book.close()
    shown = here("sweep", path, "--state", state, "--all", *INLINE).stdout
    assert answer(shown) == answer(ran.stdout)
    assert "0 trials run, 4 already done" in shown


def measured(name: str) -> bool:
    """Return True if a metric is computed, and is no time or memory."""
    return not name.startswith(("throughput/", "memory/"))


def answer(output: str) -> list[str]:
    """The table and the sentences after the line that counts trials, without paths, rates and memory."""
    lines = re.sub(r"[\d,]+ +[\d,]+ MB", "", re.split(r"\d+ trials run.*\n", output)[1]).splitlines()
    lines = [" ".join(line.split()) for line in lines]  # columns are as wide as rates and memory
    return [line for line in lines if "/" not in line and "ablate " not in line]


@pytest.mark.slow
def test_a_stage_starts_from_states_that_the_stage_before_it_leaves(tmp_path):
    path = write(tmp_path, shape={"steps": 8}, ablate={"cooldown": [0.25, 0.5, 0.75]}, seeds=1)
    folder, state = tmp_path / "jobs", tmp_path / "state"
    export(path, folder, state)
    batch, stages = Batch(folder, tmp_path), Jobs.read(folder).stages
    assert [len(stage) for stage in stages] == [2, 1, 1]  # the baseline and a trunk, then its forks
    for number, stage in enumerate(stages, 1):
        for task in range(len(stage)):
            if number < len(stages):
                done = here("run-task", folder, number, task)
                assert done.returncode == 0, done.stdout + done.stderr
            else:  # the last by its script
                assert batch.run(task, number)[0] == 0
    trunks = list((folder / "state" / "trials").glob("*/trunk-*.json"))
    assert len(trunks) == 2  # all of the later stages
    assert here("collect", folder, "--state", state).returncode == 0
    assert here("sweep", path, "--state", tmp_path / "plain", "--no-fork", *INLINE).returncode == 0
    assert values(state) == values(tmp_path / "plain")


def test_submit_makes_each_stage_wait_for_the_one_before(tmp_path):
    path = write(tmp_path, shape={"steps": 8}, ablate={"cooldown": [0.25, 0.5]}, seeds=1)
    folder = tmp_path / "jobs"
    export(path, folder, tmp_path / "state", "--sbatch", "--partition=gpu", "--sbatch", "--exclusive")
    batch = Batch(folder, tmp_path)
    subprocess.run([folder / "submit.sh", "--time=1:00:00"], env=batch.environment, check=True, cwd=tmp_path)
    assert batch.queue.read_text().splitlines() == [
        "--parsable --time=1:00:00 stage-1.sbatch",
        "--parsable --dependency=afterany:4711 --time=1:00:00 stage-2.sbatch",
    ]
    lines = (folder / "stage-1.sbatch").read_text().splitlines()
    assert {"#SBATCH --requeue", "#SBATCH --array=0-1", "#SBATCH --partition=gpu", "#SBATCH --exclusive"} <= {
        *lines
    }


def test_what_is_finished_is_not_exported_and_what_is_all_finished_is_refused(tmp_path):
    state = tmp_path / "state"
    path = write(tmp_path, workload={"idle": {"steps": 2}}, seeds=1)
    assert here("sweep", path, "--state", state, *INLINE).returncode == 0
    done = export(path, tmp_path / "none", state)
    assert (done.returncode, "all trials are finished" in done.stderr) == (2, True)
    assert not (tmp_path / "none").exists()
    more = export(path, tmp_path / "jobs", state, "--seeds", 2)
    assert "stage 1: 3 trials" in more.stdout
    assert here("collect", tmp_path / "jobs", "--state", state).stdout.startswith("3 not begun\n")


@pytest.mark.parametrize(
    ("keys", "words", "why"),
    [
        (
            {"ablate": {"workload.x": {"uniform": [0, 1]}}, "search": {"trials": 4}},
            (),
            "a search chooses trials by",
        ),
        ({}, ("--sbatch", "partition=gpu"), "no option of sbatch; write it as --partition=gpu"),
        ({}, ("--sbatch", "--x=1\n#SBATCH --y=2"), "no option of sbatch"),
        ({}, ("--sbatch", "--array=0-3"), "the scripts set --array themselves"),
    ],
)
def test_what_cannot_be_exported_is_refused_with_the_way_out(tmp_path, keys, words, why):
    path = write(tmp_path, workload={"idle": {"steps": 2}}, **keys)
    done = export(path, tmp_path / "jobs", tmp_path / "state", *words)
    assert (done.returncode, why in done.stderr) == (2, True), done.stderr


def test_a_folder_that_holds_something_is_left_alone(tmp_path):
    path = write(tmp_path, workload={"idle": {"steps": 2}})
    (tmp_path / "jobs").mkdir()
    (tmp_path / "jobs" / "mine").write_text("")
    done = export(path, tmp_path / "jobs", tmp_path / "state")
    assert (done.returncode, "the folder is not empty" in done.stderr) == (2, True)
    assert [path.name for path in (tmp_path / "jobs").iterdir()] == ["mine"]


def test_options_of_jobs_without_jobs_are_refused(tmp_path):
    done = here("sweep", write(tmp_path), "--sbatch", "--partition=gpu", "--state", tmp_path / "state")
    assert (done.returncode, "add --export-jobs FOLDER" in done.stderr) == (2, True)


def test_a_task_that_is_not_there_and_a_folder_that_is_none_are_told(tmp_path):
    path = write(tmp_path, workload={"idle": {"steps": 2}}, seeds=1)
    export(path, tmp_path / "jobs", tmp_path / "state")
    for stage, task in ((1, 3), (2, 0), (0, 0)):
        done = here("run-task", tmp_path / "jobs", stage, task)
        assert (done.returncode, "stage 1 has 3 tasks" in done.stderr) == (2, True)
    for verb in (("run-task", tmp_path / "no", 1, 0), ("collect", tmp_path / "no")):
        done = here(*verb)
        assert (done.returncode, "No such file" in done.stderr) == (2, True)
    (tmp_path / "jobs" / "jobs.json").write_text(json.dumps({"name": 1}))
    done = here("collect", tmp_path / "jobs")
    assert (done.returncode, "not a manifest of jobs" in done.stderr) == (2, True)


@pytest.mark.slow
def test_a_damaged_result_is_told_and_not_copied(tmp_path):
    path = write(tmp_path, workload={"idle": {"steps": 2}}, ablate={"rht": [True]}, seeds=1)
    folder, state = tmp_path / "jobs", tmp_path / "state"
    export(path, folder, state)
    (trial, *others) = Jobs.read(folder).trials
    for task in range(len(others) + 1):
        assert here("run-task", folder, 1, task).returncode == 0
    events = folder / "state" / "trials" / trial / "events-1.jsonl"
    events.write_bytes(events.read_bytes()[:-20])
    done = here("collect", folder, "--state", state)
    assert (done.returncode, "1 copied" in done.stdout, f"{trial} damaged" in done.stdout) == (1, True, True)
    assert not (state / "trials" / trial).exists()


@pytest.mark.slow
def test_a_folder_with_a_link_is_told_and_not_copied(tmp_path):
    path = write(tmp_path, workload={"idle": {"steps": 2}}, ablate={"rht": [True]}, seeds=1)
    folder, state, secret = tmp_path / "jobs", tmp_path / "state", tmp_path / "secret"
    export(path, folder, state)
    secret.write_text("a file outside")
    trial = Jobs.read(folder).trials[0]
    assert here("run-task", folder, 1, 0).returncode == 0
    for place in ("artifacts/secret", "log-9.txt"):
        link = folder / "state" / "trials" / trial / place
        link.parent.mkdir(exist_ok=True)
        link.symlink_to(secret)
        done = here("collect", folder, "--state", state)
        assert (done.returncode, f"{trial} damaged" in done.stdout) == (1, True), place
        assert not (state / "trials" / trial).exists()
        link.unlink()
    here("collect", folder, "--state", state)
    assert (state / "trials" / trial).exists()  # without the links it is copied


def test_a_manifest_with_a_trial_outside_of_its_folder_is_refused(tmp_path):
    path = write(tmp_path, workload={"idle": {"steps": 2}}, ablate={"rht": [True]}, seeds=1)
    export(path, tmp_path / "jobs", tmp_path / "state")
    manifest = tmp_path / "jobs" / "jobs.json"
    content = json.loads(manifest.read_text())
    content["stages"][0][0] = "../../elsewhere"
    manifest.write_text(json.dumps(content))
    done = here("collect", tmp_path / "jobs", "--state", tmp_path / "state")
    assert (done.returncode, "elsewhere" in done.stderr) == (2, True)


class Told:
    """A supervisor whose trial is told to end at its second message, and writes a checkpoint before its fourth."""

    def __init__(self, checkpoint: Path) -> None:
        self.checkpoint, self.task, self.stops, self.seen = checkpoint, None, 0, []

    def run(self, request: TrialRequest):
        for number in range(4):
            if number == 1:
                self.task.end()
            elif number == 3:
                os.utime(self.checkpoint, (2**32, 2**32))
            yield Heartbeat()
            self.seen.append(self.stops)

    def stop(self) -> None:
        self.stops += 1

    def close(self) -> None:
        self.seen.append("closed")


def test_a_task_that_is_told_to_end_stops_at_the_next_checkpoint_and_not_at_an_older_one(tmp_path):
    asked = TrialRequest("a" * 16, "{}", str(tmp_path), 1, {})
    checkpoint = Store(tmp_path).folder(asked.id) / "checkpoint.pt"
    checkpoint.parent.mkdir(parents=True)
    checkpoint.touch()
    os.utime(checkpoint, (1, 1))
    supervisor = Told(checkpoint)
    supervisor.task = Task(asked, supervisor)
    assert len(list(supervisor.task.run())) == 4
    assert (supervisor.seen, supervisor.task.told) == ([0, 0, 0, 1, "closed"], True)


@pytest.mark.slow
def test_what_is_missing_is_listed_with_the_command_that_queues_it(tmp_path):
    """A later stage after the earlier ones; tasks in the words of sbatch."""
    path = write(tmp_path, shape={"steps": 8}, ablate={"cooldown": [0.25, 0.5]}, seeds=3)
    folder, state = tmp_path / "jobs", tmp_path / "state"
    export(path, folder, state)
    first, second = Jobs.read(folder).stages
    begun = folder / "state" / "trials" / first[1]
    begun.mkdir(parents=True)
    (begun / "log-1.txt").touch()
    assert here("run-task", folder, 1, 3).returncode == 0
    lines = here("collect", folder, "--state", state).stdout.splitlines()
    assert lines[1] == f"  {first[1]} not finished, and its log is empty: it was killed, or runs"
    queued = [re.search(r"sbatch --array=(\S+) stage-(\d)", line) for line in lines]
    others = f"0-2,4-{len(first) - 1}"
    assert [match.groups() for match in queued if match] == [(others, "1"), (f"0-{len(second) - 1}", "2")]


def test_jobs_for_gpus_are_written_on_a_machine_that_has_none(tmp_path):
    """With the engine that such a GPU has; results are collected here, and reported without running anything."""
    folder, state = tmp_path / "jobs", tmp_path / "state"
    path = write(tmp_path, engine="scaled_mm", resources={"gpus": 1}, seeds=1)
    refused = export(path, folder, state)
    assert (refused.returncode, "torch multiplies NVFP4 on GPUs alone" in refused.stderr) == (2, True)
    done = export(path, folder, state, "--capability", "10.0")
    assert done.returncode == 0, done.stderr
    assert "Each task: 1 CPU, 1 GPU; device cuda, engine scaled_mm." in done.stdout
    jobs = Jobs.read(folder)
    assert (jobs.device, jobs.capability) == ("cuda", "10.0")
    for trial in jobs.trials:
        wire = json.loads((folder / "requests" / f"{trial}.json").read_text())
        assert '"engine":"scaled_mm"' in json.dumps(wire).replace(" ", "").replace("\\", "")
    assert "#SBATCH --gpus-per-task=1" in (folder / "stage-1.sbatch").read_text()
    found = here("collect", folder, "--state", state)
    assert (found.returncode, found.stdout.splitlines()[0]) == (1, "3 not begun")
    assert f"`ablate report tiny --state {state}` writes the answer" in found.stdout


def test_gpus_that_this_machine_lacks_are_not_left_out_in_silence(tmp_path):
    path = write(tmp_path, resources={"gpus": 1}, seeds=1)
    done = export(path, tmp_path / "jobs", tmp_path / "state")
    assert (done.returncode, "resources.gpus 1, and this machine has no GPU" in done.stderr) == (2, True)
    alone = here("sweep", path, "--state", tmp_path / "state", "--capability", "10.0")
    assert (alone.returncode, "--capability: describes another machine" in alone.stderr) == (2, True)
