"""Processes of trials on GPUs: fresh interpreters that compute one trial each, with the contract of the forks.

The trials here run on the CPU: what differs is the process that computes them.
"""

import subprocess
import sys
from dataclasses import replace

import psutil
import pytest
from support import imaginary_gpu
from support.experiments import environment, events_of, gone, shut, until
from support.trial_requests import SUPERVISE, request

from ablate.execution.messages import Events, Exited, Started, TrialRequest, parse_line
from ablate.execution.supervisor import COMMANDS, Supervisor, run_inline
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS
from ablate.training.workloads.command import Command
from ablate.training.workloads.python import Python

pytestmark = pytest.mark.slow
LONG = {"steps": 100_000, "eval_every": 100_000}


@pytest.fixture(scope="module")
def supervisor():
    found = Supervisor(COMMANDS["cuda"])
    found.warm("cpu")
    yield found
    shut(found)


def below(supervisor: Supervisor) -> list[psutil.Process]:
    """All processes below the supervisor's child: the trial's own, and the spare."""
    return psutil.Process(supervisor.child.pid).children(recursive=True)


def test_trials_have_the_events_of_forks_each_in_a_process_of_its_own(supervisor, tmp_path):
    pids = []
    for seed in range(2):
        here = run_inline(request(tmp_path, tmp_path / f"inline-{seed}", seed=seed))
        expected = [event["metrics"]["train/loss"] for event in events_of(list(here))]
        messages = []
        for message in supervisor.run(request(tmp_path, tmp_path / f"spare-{seed}", seed=seed)):
            pids += [supervisor.trial_process] if isinstance(message, Events) else []
            messages.append(message)
        assert [event["metrics"]["train/loss"] for event in events_of(messages)] == expected
        assert messages[-1].status == "done"
    assert len(set(pids)) == 2


def test_a_spare_is_ready_while_a_trial_runs_and_touches_no_gpu(supervisor, tmp_path):
    messages = supervisor.run(request(tmp_path, **LONG))
    until(lambda: supervisor.trial_process or next(messages) is None)
    (spare,) = until(lambda: [p for p in below(supervisor) if p.pid != supervisor.trial_process])
    supervisor.stop()
    assert list(messages)[-1].reason == "killed by signal 9 (SIGKILL)"
    assert spare.is_running()
    messages = supervisor.run(request(tmp_path, seed=1))
    until(lambda: isinstance(next(messages), Events))
    assert supervisor.trial_process == spare.pid  # it takes the next request
    assert list(messages)[-1].status == "done"


def test_a_killed_spare_is_replaced(supervisor, tmp_path):
    (spare,) = until(lambda: below(supervisor))
    spare.kill()
    until(lambda: gone([spare]))
    assert list(supervisor.run(request(tmp_path, seed=1)))[-1].status == "done"


def test_a_hanging_trial_is_ended_and_its_stack_is_in_its_log(supervisor, tmp_path):
    messages = supervisor.run(replace(request(tmp_path, **LONG), patience=1.0))
    until(lambda: isinstance(next(messages), Events))
    psutil.Process(supervisor.trial_process).suspend()
    assert "its stack is in its log" in list(messages)[-1].reason


CHILDREN = """
import subprocess, sys
def train(trial):
    code = "import subprocess, sys, time; subprocess.Popen(['sleep', '600']); time.sleep(600)"
    subprocess.Popen([sys.executable, "-c", code], start_new_session=True)
    for step in trial.steps():
        with trial.step():
            pass
        trial.log({"loss": 1.0})
    {end}
"""


def of_function(folder, code: str) -> TrialRequest:
    """A request for the function `train` of some code."""
    (folder / "train.py").write_text(code)
    config = Python(file=str(folder / "train.py"), steps=2)
    spec = TrialSpec(workload="python", config=config, recipe=PRESETS["bf16"](), seed=0, engine="emulated",
                     device="cpu")  # fmt: skip
    return TrialRequest(spec.id, spec.wire, str(folder), 1, {})


SLEEP, DIE = "import time; time.sleep(600)", "import os; os.kill(os.getpid(), 9)"


@pytest.fixture(scope="module")
def of_forks():
    """Supervisors of forks that tests of this file have done with, for the next one."""
    found: list[Supervisor] = []
    yield found
    for each in found:
        shut(each)


@pytest.mark.parametrize(("kind", "end"), [("cpu", "pass"), ("cpu", DIE), ("cpu", SLEEP), ("cuda", DIE)])
def test_processes_that_a_function_starts_end_with_its_trial(kind, end, tmp_path, of_forks):
    """After its end, after its kill, and after the end of its supervisor."""
    supervisor = of_forks.pop() if kind == "cpu" and of_forks else Supervisor(COMMANDS[kind])
    messages, sleepers = supervisor.run(of_function(tmp_path, CHILDREN.replace("{end}", end))), []

    def started() -> list[psutil.Process]:
        return [p for p in below(supervisor) if p.name() == "sleep"]

    if end == SLEEP:
        next(messages)
        sleepers = until(started)
        shut(supervisor)
    else:
        assert list(messages)[-1].status == ("done" if end == "pass" else "failed")
        until(lambda: not started())
        of_forks.append(supervisor) if kind == "cpu" else shut(supervisor)
    until(lambda: gone(sleepers))


def test_a_line_that_is_no_request_is_refused_and_the_next_is_served(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen(COMMANDS["cuda"], **pipes) as child:
        child.stdin.write(b'{"spec": 3}\n' + request(tmp_path).line())
        received = map(parse_line, filter(None, map(bytes.strip, child.stdout)))
        refused = next(received)
        assert isinstance(refused, Exited)
        assert refused.status == 1
        assert isinstance(next(received), Started)
        assert list(iter(received.__next__, Exited(0)))
        child.stdin.close()


def test_nothing_is_left_of_a_killed_parent(supervisor, tmp_path):
    messages = supervisor.run(request(tmp_path, **LONG))
    until(lambda: isinstance(next(messages), Events))
    processes, child = below(supervisor), supervisor.child
    assert len(processes) == 2  # the trial's and the spare
    child.kill()
    assert list(messages)[-1].reason == "its process died"
    until(lambda: gone(processes))


IMPORTS = """
import sys, torch
def refused(*args, **kwargs):
    raise AssertionError("CUDA was asked for")
torch.cuda._lazy_init = torch.cuda.is_available = torch.cuda.device_count = refused
torch.accelerator.current_accelerator = refused
from ablate.execution import gpu_trial_process
from ablate.execution.trial_process import tune_process
gpu_trial_process.import_all()
tune_process()
print(*sorted(name for name in sys.modules if name.startswith(("transformers", "torchao", "transformer_engine"))))
"""


CONTEXT = """
import sys, torch
import ablate.training.models.causal, ablate.training.models.adapters
from ablate.training.models import library
library("transformers.models.vit_mae.modeling_vit_mae")
assert "torchao" in sys.modules and torch.cuda.is_available() and not torch.cuda.is_initialized()
"""


@pytest.mark.skipif(bool(imaginary_gpu.why_not()), reason=imaginary_gpu.why_not() or "-")
def test_imports_of_transformers_and_torchao_start_no_cuda():
    """In a command, which would hold memory of the GPU as long as its sweep runs."""
    command = [sys.executable, "-W", "ignore", "-c", CONTEXT]
    done = subprocess.run(command, capture_output=True, text=True, env=imaginary_gpu.environment())
    assert done.returncode == 0, done.stderr


def test_a_spares_imports_ask_for_no_gpu():
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", IMPORTS], capture_output=True, text=True, env=environment()
    )
    assert (done.returncode, done.stdout.strip()) == (0, ""), done.stderr


def seen_with_a_gpu(*asked: TrialRequest) -> list[list[str]]:
    """The messages of a supervisor, as text by request, on a machine where torch sees a GPU (an imaginary one)."""
    command = [sys.executable, "-c", SUPERVISE, *(each.line().decode() for each in asked)]
    visible = imaginary_gpu.environment() | {"CUDA_VISIBLE_DEVICES": "0"}
    said = subprocess.run(command, capture_output=True, text=True, env=visible).stdout
    return [part.splitlines() for part in said.strip().split("\n\n")]


USES_CUDA = """
import torch
def train(trial):
    weight = torch.ones(1, device="cuda")
"""


SHOWS = """
import json, os, pathlib
pathlib.Path("seen").write_text(os.environ["CUDA_VISIBLE_DEVICES"])
print(json.dumps({"step": 2, "loss": 1.0}))
"""


@pytest.mark.skipif(bool(imaginary_gpu.why_not()), reason=imaginary_gpu.why_not() or "-")
def test_where_torch_sees_a_gpu_it_is_a_commands_alone(tmp_path):
    """A trial on the CPU trains, a function that uses CUDA there gets a sentence, a command sees the GPU."""
    (tmp_path / "run.py").write_text(SHOWS)
    config = Command(run=f"{sys.executable} run.py", folder=str(tmp_path), steps=2)
    spec = TrialSpec(workload="command", config=config, recipe=PRESETS["bf16"](), seed=0, engine="emulated",
                     device="cpu")  # fmt: skip
    command = TrialRequest(spec.id, spec.wire, str(tmp_path), 1, {})
    trial, function, _ = seen_with_a_gpu(request(tmp_path), of_function(tmp_path, USES_CUDA), command)
    assert "status='done'" in trial[-1]
    assert f"{tmp_path}/train.py:4: this trial runs on the CPU, where no GPU is visible" in function[-1]
    assert (tmp_path / "seen").read_text() == "0"
