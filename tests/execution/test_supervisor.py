"""The supervisor and its real child: a trial's death is a message, and nobody outlives the one who started it."""

import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace

import psutil
import pytest
from support.experiments import TOO_LARGE, environment, events_of, gone, shut, until
from support.gates import customised
from support.trial_requests import SUPERVISE, request, steps

from ablate.execution.messages import Ended, Events, Exited, TrialRequest, parse_line
from ablate.execution.supervisor import Supervisor, run_inline
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS
from ablate.store.trial_store import Store
from ablate.training.workloads.idle import Idle

pytestmark = pytest.mark.slow
LONG = {"steps": 100_000, "eval_every": 100_000}


@pytest.fixture(scope="module")
def supervisor():
    """One supervisor for all tests of this file: what one does to its child must not harm the next."""
    found = Supervisor()
    yield found
    shut(found)


@pytest.fixture(scope="module")
def spare():
    """Supervisors in good order that tests of this file have done with, for tests that need one of their own."""
    found: list[Supervisor] = []
    yield found
    for each in found:
        shut(each)


def trial_process(supervisor: Supervisor) -> psutil.Process:
    """The forked process that computes the trial."""
    return until(lambda: next(iter(psutil.Process(supervisor.child.pid).children()), None))


def test_a_trial_tells_every_event_and_then_that_it_is_done(supervisor, tmp_path):
    messages = list(supervisor.run(request(tmp_path)))
    assert steps(messages) == [1, 2, 3, 4]
    assert not any(isinstance(message, Ended) for message in messages[:-1])
    assert messages[-1].status == "done"
    assert messages[-1].result == Store(tmp_path).result(messages[-1].result["id"])


def test_the_same_trial_inline_tells_the_same(supervisor, tmp_path):
    there = list(supervisor.run(request(tmp_path, tmp_path / "child")))
    here = list(run_inline(request(tmp_path, tmp_path / "inline")))
    loss = [[event["metrics"]["train/loss"] for event in events_of(messages)] for messages in (there, here)]
    assert loss[0] == loss[1]
    assert here[-1].status == there[-1].status == "done"


def test_a_child_killed_in_the_middle_of_a_trial_is_a_failure_with_the_signals_name(supervisor, tmp_path):
    messages = supervisor.run(request(tmp_path, **LONG))
    assert isinstance(next(messages), Events)
    trial_process(supervisor).kill()
    last = list(messages)[-1]
    assert (last.status, last.reason) == ("failed", "killed by signal 9 (SIGKILL)")
    assert list(supervisor.run(request(tmp_path, seed=1)))[-1].status == "done"


def test_a_trial_killed_in_the_middle_of_a_line_is_a_failure_like_any_other(supervisor, tmp_path):
    asked = replace(request(tmp_path, **LONG), telemetry={"every": 1, "log": 1})
    messages = supervisor.run(asked)
    next(messages)
    trial, told = trial_process(supervisor), Store(tmp_path).folder(asked.id) / "events-1.jsonl"
    sizes = [0, 1]
    while (
        sizes[-1] != sizes[-2]
    ):  # until nobody having listened for a second, the pipe is full, and half a line in it
        time.sleep(1)
        sizes.append(told.stat().st_size)
    trial.kill()
    assert list(messages)[-1].reason == "killed by signal 9 (SIGKILL)"
    assert list(supervisor.run(request(tmp_path, seed=1)))[-1].status == "done"


def test_a_warm_process_killed_in_the_middle_of_a_trial_is_a_failure_and_the_next_trial_runs(
    supervisor, tmp_path
):
    messages = supervisor.run(request(tmp_path, **LONG))
    next(messages)
    trial, child = trial_process(supervisor), supervisor.child
    child.kill()
    last = list(messages)[-1]
    assert (last.status, last.reason) == ("failed", "its process died")
    until(lambda: gone([trial]))
    assert list(supervisor.run(request(tmp_path, seed=1)))[-1].status == "done"
    assert supervisor.child.pid != child.pid
    child.stdin.close()
    child.stdout.close()


def test_a_trial_that_is_out_of_memory_says_how_much_it_used_and_when(supervisor, tmp_path):
    last = list(supervisor.run(request(tmp_path, hidden=TOO_LARGE)))[-1]
    assert last.status == "oom"
    assert re.fullmatch(
        r"out of memory after step 0, \d\.\d GB in use: .*you tried to allocate \d+ bytes.*", last.reason
    )


def test_a_trial_that_hangs_is_ended_and_its_stack_is_in_its_log(supervisor, tmp_path):
    messages = supervisor.run(replace(request(tmp_path, **LONG), patience=1.0))
    assert isinstance(next(messages), Events)
    trial_process(supervisor).suspend()
    last = list(messages)[-1]
    assert last.status == "failed"
    assert re.fullmatch(r"no step for \d+ s; its stack is in its log; ended", last.reason)
    assert list(supervisor.run(request(tmp_path, seed=1)))[-1].status == "done"


def test_a_trial_told_to_stop_ends_at_once(supervisor, tmp_path):
    messages = supervisor.run(request(tmp_path, **LONG))
    assert isinstance(next(messages), Events)
    supervisor.stop()
    assert list(messages)[-1].reason == "killed by signal 9 (SIGKILL)"


def test_a_child_that_is_dying_and_not_yet_dead_is_not_asked_again(tmp_path, spare):
    dying = [
        sys.executable,
        "-c",
        "import os, time; os.read(0, 1); os.close(1); time.sleep(60)",
    ]  # as the kernel does: pipes first
    supervisor = Supervisor(grace=0.2)  # the child does not end with its pipe
    supervisor.child = subprocess.Popen(dying, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    ends = [list(supervisor.run(request(tmp_path)))[-1] for _ in range(2)]
    spare.append(supervisor)
    assert [end.status for end in ends] == ["failed", "done"]


def test_a_child_that_died_since_it_was_last_heard_costs_no_attempt(tmp_path, spare):
    deaf = [sys.executable, "-c", "import os, time; os.close(0); print('ready', flush=True); time.sleep(60)"]
    supervisor = Supervisor(grace=0.2)  # the child does not end with its pipe
    supervisor.child = subprocess.Popen(deaf, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0)
    supervisor.child.stdout.readline()
    assert list(supervisor.run(request(tmp_path)))[-1].status == "done"
    spare.append(supervisor)


def test_a_trial_that_raises_tells_its_last_line_and_its_log(supervisor, tmp_path):
    broken = request(tmp_path)
    (tmp_path / "train.bin").unlink()
    last = list(supervisor.run(broken))[-1]
    assert last.status == "failed"
    assert "train.bin" in last.reason
    assert last.log.splitlines()[-1] == last.reason
    assert 'File "' in last.log
    assert Store(tmp_path).result(broken.id) is None


def test_a_trial_that_this_process_resolves_differently_says_so(supervisor, tmp_path):
    stale = request(tmp_path)
    other = json.dumps(json.loads(stale.spec) | {"seed": 1})
    assert "resolves the trial differently" in list(supervisor.run(replace(stale, spec=other)))[-1].reason


def test_a_finished_trial_is_replayed(supervisor, tmp_path):
    first = list(supervisor.run(request(tmp_path)))
    again = list(supervisor.run(request(tmp_path, attempt=2)))
    assert steps(again) == steps(first)
    assert again[-1] == first[-1]


def test_two_processes_asked_for_one_trial_run_it_once_and_both_hear_all_of_it(supervisor, tmp_path, spare):
    asked, heard = request(tmp_path, steps=60, eval_every=30), {}
    other = spare.pop() if spare else Supervisor()
    other.warm("cpu")

    def listen(name: str, who: Supervisor, attempt: int) -> None:
        heard[name] = list(who.run(replace(asked, attempt=attempt)))

    threads = [
        threading.Thread(target=listen, args=("a", supervisor, 1)),
        threading.Thread(target=listen, args=("b", other, 2)),
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    spare.append(other)
    assert steps(heard["a"]) == steps(heard["b"]) == list(range(1, 61))
    assert heard["a"][-1] == heard["b"][-1]
    assert len(list(Store(tmp_path).folder(asked.id).glob("events-*.jsonl"))) == 1


@pytest.mark.parametrize("idle", [True, False], ids=["idle", "in a trial"])
def test_when_the_supervisors_process_is_killed_its_children_end(idle, tmp_path):
    shape = {} if idle else LONG
    command = [sys.executable, "-c", SUPERVISE + "\ninput()", request(tmp_path, **shape).line()]
    holder = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
    wanted = b"Ended(" if idle else b"Events("
    assert any(wanted in line for line in holder.stdout)
    family = psutil.Process(holder.pid).children(recursive=True)
    assert len(family) == (1 if idle else 2)
    holder.send_signal(signal.SIGKILL)
    holder.wait()
    until(lambda: gone(family))
    holder.stdin.close()
    holder.stdout.close()


WARMS_UP = """
import sys, time
class Slow:
    def find_spec(self, name, *rest):
        if name == "torch":
            time.sleep(600)
sys.meta_path.insert(0, Slow())
"""


def test_a_child_that_still_warms_up_ends_with_its_supervisor_too(tmp_path):
    slow = environment(**customised(tmp_path / "slow", WARMS_UP))
    child = subprocess.Popen(
        [sys.executable, "-m", "ablate.execution.trial_process"], stdin=subprocess.PIPE, bufsize=0, env=slow
    )
    child.stdin.close()
    assert child.wait(60) == 1


def test_closing_ends_the_child_and_the_trial_in_it(tmp_path, spare):
    supervisor = spare.pop() if spare else Supervisor()
    messages = supervisor.run(request(tmp_path, **LONG))
    next(messages)
    child = supervisor.child
    family = [trial_process(supervisor), psutil.Process(child.pid)]
    supervisor.close()
    until(lambda: gone(family))
    assert child.stdin.closed
    assert child.stdout.closed


IMPORTING = """
import os, sys, threading
from ablate.execution import trial_process
from ablate.training.workloads.idle import Idle

records = Idle.records

def importing(self, *given):
    import slow_to_import
    yield from records(self, *given)

fork = os.fork

def counting():
    print(threading.active_count(), file=sys.stderr, flush=True)
    return fork()

os.fork = counting
Idle.records = importing
trial_process.main()
"""
"""A worker whose workload `idle` needs a module, and which says how many threads there are at each fork."""


def test_a_missing_module_is_told_by_the_trial_and_one_that_takes_long_is_imported_once_by_the_warm_process(
    tmp_path,
):
    supervisor = Supervisor()
    paths = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])}
    pipes = {
        "stdin": subprocess.PIPE,
        "stdout": subprocess.PIPE,
        "stderr": (tmp_path / "said").open("w"),
        "bufsize": 0,
    }
    with pipes["stderr"]:
        supervisor.child = subprocess.Popen(
            [sys.executable, "-c", IMPORTING], env=os.environ | paths, **pipes
        )
    child = supervisor.child
    spec = TrialSpec(
        workload="idle",
        config=Idle(steps=2),
        recipe=PRESETS["bf16"](),
        seed=0,
        engine="emulated",
        device="cpu",
    )
    asked = TrialRequest(spec.id, spec.wire, str(tmp_path), 1, {}, imports=("slow_to_import",))
    last = list(supervisor.run(asked))[-1]
    assert (last.status, last.reason) == ("failed", "ModuleNotFoundError: No module named 'slow_to_import'")
    assert list(supervisor.run(request(tmp_path)))[-1].status == "done"
    (tmp_path / "slow_to_import.py").write_text(
        "import os, pathlib\n"
        "with pathlib.Path(__file__).with_name('importers').open('a') as file: print(os.getpid(), file=file)\n"
        "print('what it prints is no event')\n"
    )
    for seed in range(3):
        wanted = spec.model_copy(update={"seed": seed})
        asked = TrialRequest(wanted.id, wanted.wire, str(tmp_path), 2, {}, imports=("slow_to_import",))
        messages = list(supervisor.run(asked))
        assert (messages[-1].status, steps(messages)) == ("done", [1, 2])
    assert supervisor.child is child
    assert (tmp_path / "importers").read_text().splitlines() == [str(child.pid)]
    told = ["1", "1", "what it prints is no event", "1", "1", "1"]
    assert (tmp_path / "said").read_text().splitlines() == told
    shut(supervisor)


COUNTING = """
import functools, json, os, pathlib, sys
from ablate.execution import trial_process
from ablate.experiment.trial_spec import TrialSpec

def loads(text):
    with pathlib.Path(sys.argv[1]).open("a") as file: print(os.getpid(), len(text), file=file)
    return json.loads(text)

trial_process.main(functools.partial(TrialSpec.parse, loads=loads))
"""
"""A warm process that notes which process reads JSON of a spec, and how much."""


def test_the_spec_is_parsed_once_in_the_process_that_computes_the_trial(tmp_path):
    supervisor = Supervisor((sys.executable, "-c", COUNTING, str(tmp_path / "parsed")))
    asked = [request(tmp_path, seed=seed) for seed in range(2)]
    assert [list(supervisor.run(one))[-1].status for one in asked] == ["done", "done"]
    parsed = [line.split() for line in (tmp_path / "parsed").read_text().splitlines()]
    assert [int(size) for _, size in parsed] == [len(one.spec) for one in asked]
    assert len({process for process, _ in parsed} | {str(supervisor.child.pid)}) == 3
    shut(supervisor)


def test_a_line_that_is_no_request_is_refused_and_the_next_is_served(tmp_path):
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE, "bufsize": 0}
    with subprocess.Popen([sys.executable, "-m", "ablate.execution.trial_process"], **pipes) as child:
        child.stdin.write(b'{"spec": 3}\n' + request(tmp_path).line())
        received = map(parse_line, filter(None, map(bytes.strip, child.stdout)))
        ends = [next(message for message in received if isinstance(message, Exited)) for _ in range(2)]
        child.stdin.close()
    assert [end.status for end in ends] == [1, 0]
    assert "malformed request for a trial" in ends[0].reason


UNREHEARSED = """
from ablate.execution import trial_process
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS

PRESETS.pop("nvfp4")  # a KeyError in the rehearsal
trial_process.main(TrialSpec.parse)
"""


def test_a_rehearsal_that_fails_leaves_the_fault_to_the_trials_that_have_it(tmp_path):
    supervisor = Supervisor((sys.executable, "-c", UNREHEARSED))
    assert list(supervisor.run(request(tmp_path)))[-1].status == "done"
    shut(supervisor)
