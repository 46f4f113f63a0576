"""Trials on Ray: workers that hang, are told to stop, or come while the sweep runs. Real Ray throughout."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager

import psutil
import pytest
from support.clusters import STARTS_RAY
from support.experiments import events_of, tiny, until, words_of
from support.trial_requests import request

from ablate.execution.controller import Controller
from ablate.execution.messages import Ended
from ablate.execution.progress import Progress
from ablate.execution.sweep_control import give
from ablate.execution.workers import Pool
from ablate.execution.workers.actor import Actor
from ablate.execution.workers.placement import Need, placements
from ablate.execution.workers.pool import by_use, unseated
from ablate.execution.workers.running_trial import missing_data
from ablate.store.trial_store import Store

pytestmark = STARTS_RAY
LONG = {"steps": 100_000, "eval_every": 100_000}


@pytest.fixture(scope="module")
def pool():
    """Two slots of a local Ray, for one trial at a time, for all tests of this file: what one does must not harm the next."""
    found = Pool(None, 2, 0)
    found.wanted = 1
    assert (found.slots, len(found.idle)) == (1, 1), (
        "a worker waits for each trial that there is, not for each that there is room for"
    )
    yield found
    found.close()


def events(pool: Pool, trial: str) -> int:
    return len(events_of(message for name, message in pool.wait(0.2) if name == trial))


def end(pool: Pool, trial: str, seconds: float = 60) -> Ended:
    return until(
        lambda: next((m for name, m in pool.wait(0.2) if name == trial and isinstance(m, Ended)), None),
        seconds,
    )


def family(process: psutil.Process) -> list[psutil.Process]:
    """Return the children of a process; none of one that is gone."""
    try:
        return process.children(recursive=True)
    except psutil.NoSuchProcess:
        return []


def actor(pool: Pool) -> psutil.Process:
    """The process of the worker that runs the trial: its warm child has a child. One that was ended may take a moment to be gone."""

    def alone() -> psutil.Process | None:
        workers = [
            process
            for process in psutil.Process().children(recursive=True)
            if "ray::" in " ".join(words_of(process))
        ]
        busy = [worker for worker in workers if family(worker)[1:]]
        return busy[0] if len(busy) == 1 else None

    return until(alone)


def test_a_worker_that_hangs_is_ended_and_the_next_trial_runs(pool, tmp_path):
    patience, pool.silence = pool.silence, 8.0
    asked = request(tmp_path, **LONG)
    pool.submit(asked)
    until(lambda: events(pool, asked.id), 60)
    os.kill(actor(pool).pid, signal.SIGSTOP)
    assert end(pool, asked.id).reason.startswith("its worker died")
    pool.silence = patience
    other = request(tmp_path, seed=1)
    pool.submit(other)
    assert end(pool, other.id).status == "done"


def test_a_trial_told_to_stop_ends_and_its_worker_goes_on(pool, tmp_path):
    asked = request(tmp_path, **LONG)
    pool.submit(asked)
    until(lambda: events(pool, asked.id), 60)
    before = actor(pool).pid
    pool.stop(asked.id)
    assert end(pool, asked.id).reason == "killed by signal 9 (SIGKILL)"
    assert Store(tmp_path).result(asked.id) is None
    other = request(tmp_path, seed=1)
    pool.submit(other)
    assert end(pool, other.id).status == "done"
    assert psutil.pid_exists(before)


def test_who_listens_before_the_trial_starts_hears_it_at_once(tmp_path):
    """Ray lets an actor's calls overtake each other."""
    actor, heard = Actor(), queue.SimpleQueue()
    listener = threading.Thread(target=lambda: heard.put(actor.messages()[0]))
    listener.start()
    actor.start(request(tmp_path), remote=False)
    listener.join()
    messages = heard.get()
    while not messages or not isinstance(messages[-1], Ended):
        assert messages, "a listener of before the start was forgotten"
        messages += actor.messages()[0]
    assert messages[-1].status == "done"


HOLD = """
import sys, time
import ray
from ablate.execution.workers import Pool
pool = Pool(sys.argv[1], int(sys.argv[2]), 0)
last = None
while True:
    if pool.slots != last:
        last = pool.slots
        ray.get([actor.describe.remote("", "") for each in pool.idle for actor in each.actors])
        print(last, flush=True)
    time.sleep(0.2)
"""


def reachable() -> dict[str, str]:
    """The address of a cluster's node, which is not on loopback as that of the local Ray of this process is."""
    from ray._private.services import node_ip_address_from_perspective

    return {"node_ip_address": node_ip_address_from_perspective()}


@pytest.fixture(scope="module")
def cluster():
    """A head with three logical CPUs; nodes that tests add stay."""
    from ray.cluster_utils import Cluster

    found = Cluster(
        initialize_head=True, head_node_args={"num_cpus": 3, "include_dashboard": False, **reachable()}
    )
    yield found
    found.shutdown()


def add_node(cluster) -> None:
    """Add a node of two logical CPUs and three logical GPUs."""
    cluster.add_node(num_cpus=2, num_gpus=3, **reachable())


@contextmanager
def held(cluster, most: int) -> Iterator[Callable[[int], None]]:
    """Another process's pool on the cluster; gives a function that waits until it has so many slots, and a worker at each."""
    command = [sys.executable, "-c", HOLD, cluster.address, str(most)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=lambda: [lines.put(line.strip()) for line in process.stdout])
    reader.start()

    def has(slots: int) -> None:
        while lines.get(timeout=300) != str(slots):
            pass

    try:
        yield has
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()


def test_a_sweep_on_a_cluster_takes_what_others_leave_and_nodes_that_join(cluster):
    with ExitStack() as first:
        first.enter_context(held(cluster, 2))(2)
        with held(cluster, 9) as has:
            has(1)
            add_node(cluster)
            has(3)
            first.close()
            has(5)


GPUS = """
import sys, time
from ablate.execution.workers import Pool
for ranks, slots in ((1, 2), (None, 3)):
    pool = Pool(sys.argv[1], sys.maxsize, 2.0, ranks)
    pool.wanted, deadline = sys.maxsize, time.monotonic() + 200
    while pool.slots != slots and time.monotonic() < deadline:  # the last pool's GPUs are free a moment later
        time.sleep(0.2)
    print(pool.slots)
    pool.close()
"""


def test_a_trial_of_one_rank_has_all_of_its_gpus_on_one_node_and_one_of_several_has_one_each(cluster):
    """Two GPUs a trial, on two nodes with three each. GPUs are what Ray counts: none is used here."""
    while len(cluster.worker_nodes) < 2:
        add_node(cluster)
    done = subprocess.run(
        [sys.executable, "-c", GPUS, cluster.address], capture_output=True, text=True, check=False
    )
    assert done.stdout.splitlines() == ["2", "3"], done.stderr


def test_workers_are_added_while_a_sweep_runs(pool, tmp_path, monkeypatch):
    """Orders arrive as `ablate stop` gives them."""
    monkeypatch.setattr(pool, "close", lambda: None)  # the pool is of this file, not of the sweep
    experiment = tiny(tmp_path, workload={"idle": {"steps": 5, "seconds": 0.2}}, seeds=12)
    folder, news = tmp_path / "state" / "sweeps" / "tiny", []
    pool.resize(2)
    with closing(Controller(experiment, tmp_path / "state", "cpu", lambda: pool, None).run()) as steps:

        def advance(ready: Callable[[Progress], bool]) -> Progress:
            for step in steps:
                news.extend(step.news)
                if ready(step):
                    return step
            raise AssertionError("the sweep has ended")

        def told(number: int) -> bool:
            return f"{number} trials at once from now on" in " ".join(news)

        advance(lambda step: len(step.running) == 2)
        give(folder, {"workers": 1})
        advance(lambda step: told(1))
        alone, at_once = advance(lambda step: len(step.running) == 1), []
        advance(lambda step: at_once.append(len(step.running)) or step.done >= alone.done + 2)
        assert max(at_once) == 1
        give(folder, {"workers": 2})
        advance(lambda step: len(step.running) == 2)
        assert told(2)
        give(folder, {"stop": "sweep"})
        *_, outcome = steps
    assert outcome.status == "stopped"


def test_slots_are_as_many_as_were_asked_for_and_the_cluster_has(pool):
    """Last of this file's pool: its new workers need not get ready."""
    pool.wanted = sys.maxsize
    pool.resize(2)
    assert pool.slots == 2
    pool.resize(1)
    assert pool.slots == 1
    pool.resize(64)
    assert pool.slots == 2


def test_a_trial_that_waits_gives_up_its_place_before_one_that_is_idle():
    """Others may have taken its units, and keep them to their end."""
    held = by_use([({"taken": 1}, False), ({"runs": 1}, True)], [{"idle": 1}])
    room = dict.fromkeys(("taken", "runs", "idle"), 1.0)
    unused = {"taken": 0.0, "runs": 0.0, "idle": 0.0}
    assert placements(Need(0, 1), 2, room, unused, held) == [{"runs": 1}, {"idle": 1}]


def test_who_waits_for_a_place_that_is_gone_waits_for_another():
    flights = [("runs", "a", True), ("waits", "b", False), ("waits too", "b", False), ("lost", "c", False)]
    assert unseated(["a", "b"], flights) == ["waits too", "lost"]
    assert unseated(["d"], flights) == ["waits", "waits too", "lost"]
    assert unseated(["a", "b", "b", "c"], flights) == []


def test_data_are_missing_on_a_node_only_if_the_error_names_them(tmp_path):
    data, code = str(tmp_path / "train.bin"), str(tmp_path / "train.py")
    config = {"python": {"file": code, "data": [data]}}
    for path in (data, code):
        (tmp_path / path).touch()
    traceback = f'File "{code}", line 3: FileNotFoundError: [Errno 2] No such file or directory: '
    assert missing_data(f"{traceback}'/x/y'", config) is None
    assert missing_data(f"{traceback}'{data}'", config) == data
    assert missing_data(f"OSError: no file matches '{data}'", config) == data
    assert missing_data(f"model {data}: no such folder or file", config) == data
    (tmp_path / data).unlink()
    assert missing_data(f"{traceback}'{data}'", config) is None
