"""Trials on Ray: workers that hang, are told to stop, or come while the sweep runs. Real Ray throughout."""

import os
import queue
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import psutil
import pytest
from experiments_for_tests import until
from test_supervisor import request

from ablate import workers
from ablate.store import Store
from ablate.workers import Pool

pytestmark = [
    pytest.mark.slow,
    pytest.mark.services,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning", "ignore::ResourceWarning"),
]
LONG = {"steps": 100_000, "eval_every": 100_000}


@pytest.fixture(scope="module")
def pool():
    """Two slots of a local Ray, for all tests of this file: what one does must not harm the next."""
    found = Pool(None, 2, 0)
    yield found
    found.close()


def events(pool: Pool, trial: str) -> int:
    return sum(len(message.get("events", ())) for name, message in pool.wait(0.2) if name == trial)


def end(pool: Pool, trial: str, seconds: float = 60) -> dict:
    return until(lambda: next((m for name, m in pool.wait(0.2) if name == trial and "end" in m), None), seconds)


def actor(pool: Pool) -> psutil.Process:
    """The process of the worker that runs the trial: its warm child has a child."""
    found = [p for p in psutil.Process().children(recursive=True) if "ray::" in " ".join(p.cmdline()) and p.children(recursive=True)[1:]]
    (busy,) = found
    return busy


def test_a_worker_that_hangs_is_ended_and_the_next_trial_runs(pool, tmp_path, monkeypatch):
    monkeypatch.setattr(workers, "DEAF_SECONDS", 8.0)
    asked = request(tmp_path, **LONG)
    pool.submit(asked)
    until(lambda: events(pool, asked["id"]), 60)
    os.kill(actor(pool).pid, signal.SIGSTOP)
    assert end(pool, asked["id"])["reason"].startswith("its worker died")
    monkeypatch.undo()
    other = request(tmp_path, seed=1)
    pool.submit(other)
    assert end(pool, other["id"])["end"] == "done"


def test_a_trial_told_to_stop_ends_and_its_worker_goes_on(pool, tmp_path):
    asked = request(tmp_path, **LONG)
    pool.submit(asked)
    until(lambda: events(pool, asked["id"]), 60)
    before = actor(pool).pid
    pool.stop(asked["id"])
    assert end(pool, asked["id"])["reason"] == "killed by signal 9 (SIGKILL)"
    assert Store(tmp_path).result(asked["id"]) is None
    other = request(tmp_path, seed=1)
    pool.submit(other)
    assert end(pool, other["id"])["end"] == "done"
    assert psutil.pid_exists(before)


def test_slots_are_as_many_as_were_asked_for_and_the_cluster_has(pool):
    assert pool.slots == 2
    pool.resize(1)
    assert pool.slots == 1
    pool.resize(64)
    assert pool.slots == 2


HOLD = """
import sys, time
from ablate.workers import Pool
pool = Pool(sys.argv[1], None, 0, priority=int(sys.argv[2]))
print("slots", flush=True)
last = None
while True:
    if pool.slots != last:
        last = pool.slots
        print(last, flush=True)
    time.sleep(0.2)
"""


@pytest.fixture
def cluster():
    """A head with four logical CPUs."""
    from ray.cluster_utils import Cluster

    found = Cluster(initialize_head=True, head_node_args={"num_cpus": 4, "include_dashboard": False})
    yield found
    found.shutdown()


@contextmanager
def held(cluster, priority: int) -> Iterator[Callable[[], str]]:
    """Another process's pool on the cluster; gives a function that returns its next count of slots, once that changes."""
    command = [sys.executable, "-c", HOLD, cluster.address, str(priority)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    lines: queue.SimpleQueue[str] = queue.SimpleQueue()
    reader = threading.Thread(target=lambda: [lines.put(line.strip()) for line in process.stdout])
    reader.start()
    try:
        yield lambda: lines.get(timeout=60)
    finally:
        process.kill()
        process.wait()
        reader.join()
        process.stdout.close()


def test_sweeps_on_one_cluster_share_its_slots_by_priority_and_use_nodes_that_join(cluster):
    with held(cluster, 0) as low:
        assert [low(), low()] == ["slots", "4"]
        with held(cluster, 5) as high:
            assert [high(), high()] == ["slots", "3"]
            assert low() == "1"
            cluster.add_node(num_cpus=2)
            assert high() == "5"
