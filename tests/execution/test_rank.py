"""A trial that torchrun computes in several processes: its death, and everybody's, is a message, and nobody is left behind."""

import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import psutil
import pytest
from safetensors.torch import load_file
from support.experiments import TOO_LARGE, events_of, gone, shards, shut, tiny, until
from support.gates import Gate
from support.services import free_port
from support.trial_requests import SUPERVISE, steps

from ablate.execution import rank_process
from ablate.execution.messages import GangPart, Message, TrialRequest
from ablate.execution.supervisor import COMMANDS, Supervisor
from ablate.execution.workers import running_trial
from ablate.store.trial_store import Store

pytestmark = pytest.mark.slow
LONG = {"steps": 100_000, "eval_every": 100_000}
SHAPE = {"accumulate": 2, "width": 64, "context": 32}


def request(folder: Path, attempt: int = 1, ranks: int = 2, **changes: Any) -> TrialRequest:
    """A request for a tiny trial of several ranks; `shape` changes its workload."""
    experiment = tiny(folder, shape=SHAPE | changes.pop("shape", {}))
    spec = experiment.spec(experiment.arms[1], 0, "cpu")
    asked = TrialRequest(
        spec.id, spec.wire, str(folder), attempt, {"every": 2, "log": 1, "checkpoint": 0}, ranks=ranks
    )
    return replace(asked, **changes)


@pytest.fixture(scope="module")
def gate(tmp_path_factory) -> Gate:
    """A gate for all trials of this file; it is open."""
    return Gate(tmp_path_factory.mktemp("gate"))


@pytest.fixture(scope="module")
def supervisor(gate) -> Iterator[Supervisor]:
    """One for all tests of this file, as in test_supervisor."""
    found = Supervisor()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PYTHONPATH", gate.environment["PYTHONPATH"])
        found.warm("cpu")
    yield found
    shut(found)


def ranks_of(supervisor: Supervisor) -> dict[int, psutil.Process]:
    """The processes of a trial's ranks."""
    return dict(
        enumerate(
            sorted(psutil.Process(supervisor.trial_process).children(), key=lambda process: process.pid)
        )
    )


def run(
    supervisor: Supervisor, request: TrialRequest, act: Callable[[], None] | None = None, after: int = 2
) -> list[Message]:
    """The messages of a trial; `act` is called once it has told of step `after`."""
    told = []
    for message in supervisor.run(request):
        told.append(message)
        if act and after in steps([message]):
            act()
    return told


def listening(supervisor: Supervisor) -> set[str]:
    """The addresses at which what computes a trial lets others in."""
    family = psutil.Process(supervisor.child.pid).children(recursive=True)
    return {
        found.laddr.ip
        for process in family
        for found in process.net_connections("inet")
        if found.status == psutil.CONN_LISTEN
    }


def test_two_ranks_compute_the_trial_and_say_so(supervisor, tmp_path):
    told = run(supervisor, request(tmp_path))
    assert steps(told) == [1, 2, 3, 4]
    assert told[-1].status == "done"
    assert told[-1].result["ranks"] == 2
    again = run(
        supervisor, request(tmp_path, attempt=2, sharded=True)
    )  # finished: replayed, and the other rank is let go
    assert steps(again) == [1, 2, 3, 4]
    alone = run(supervisor, request(tmp_path, ranks=1, root=str(tmp_path / "alone")))
    losses = [[event["metrics"]["train/loss"] for event in events_of(messages)] for messages in (told, alone)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-4)  # two micro-batches, added in another order


def test_ranks_in_fresh_interpreters_compute_the_same_and_end_with_the_trial(supervisor, tmp_path):
    """As on GPUs, where a fork could not use CUDA."""
    forked = run(supervisor, request(tmp_path, root=str(tmp_path / "forked")))
    fresh = Supervisor(COMMANDS["cuda"])
    told = run(fresh, request(tmp_path))
    losses = [
        [event["metrics"]["train/loss"] for event in events_of(messages)] for messages in (told, forked)
    ]
    assert losses[0] == losses[1]
    assert told[-1].status == "done"
    messages = fresh.run(request(tmp_path, root=str(tmp_path / "long"), shape=LONG))
    until(lambda: steps([next(messages)]))
    ranks = list(ranks_of(fresh).values())
    assert len(ranks) >= 2
    fresh.stop()
    list(messages)
    until(lambda: gone(ranks))
    shut(fresh)


def test_two_ranks_keep_the_weights_of_the_whole_model(supervisor, tmp_path):
    keep, found = {"every": 2, "log": 1, "checkpoint": 0, "keep_weights": True}, []
    for name, more in (("sharded", {"ranks": 2, "sharded": True}), ("alone", {"ranks": 1})):
        asked = request(tmp_path, root=str(tmp_path / name), telemetry=keep, **more)
        told = run(supervisor, asked)
        store = Store(tmp_path / name)
        assert told[-1].status == "done", told[-1]
        assert told[-1].result["weights"] == store.kept_weights(asked.id)
        found.append(load_file(store.weights(asked.id)))
    assert found[0].keys() == found[1].keys()
    for name, value in found[0].items():
        assert value.shape == found[1][name].shape
        assert (value - found[1][name]).abs().max() <= 1e-2  # added in another order


@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_rank_ends_the_attempt_and_the_next_goes_on_from_its_checkpoint(
    victim, supervisor, gate, tmp_path
):
    shape = {"steps": 12, "eval_every": 12}
    gate.shut()
    told = run(supervisor, request(tmp_path, shape=shape), lambda: ranks_of(supervisor)[victim].kill())
    gate.open()
    assert told[-1].status == "failed"
    assert told[-1].reason == f"rank {victim} was killed by signal 9 (SIGKILL)"
    again = run(
        supervisor,
        request(tmp_path, attempt=2, sharded=True, shape=shape, telemetry={"log": 1, "checkpoint": 60.0}),
    )
    assert again[-1].status == "done"
    (resumed,) = (event["resumed"] for event in events_of(again) if "resumed" in event)
    assert resumed >= 1
    assert steps(again) == list(range(1, 13))
    assert not Store(tmp_path).folder(request(tmp_path, shape=shape).id).joinpath("checkpoint.pt").exists()


def test_a_rank_that_hangs_ends_the_attempt_with_everybodys_stack_in_the_log(supervisor, tmp_path):
    asked = request(
        tmp_path,
        shape={"steps": 100_000, "eval_every": 100_000},
        patience=2.0,
        telemetry={"log": 1, "checkpoint": 60.0},
    )
    doors = set()

    def act() -> None:
        doors.update(listening(supervisor))
        ranks_of(supervisor)[1].send_signal(signal.SIGSTOP)

    told = run(supervisor, asked, act, after=5)
    assert doors == {"127.0.0.1"}  # nobody from outside is let in
    assert told[-1].reason.startswith("no step for")
    assert (
        "ablate/training/distributed.py" in Store(tmp_path).log(asked.id, 1).read_text()
    )  # where rank 0 waited for the other


def test_supervisors_on_two_nodes_compute_one_trial_and_either_ends_it(supervisor, tmp_path):
    """Two launchers, as on two nodes: rank 0 tells the events, and a stop of the other node's supervisor ends both."""
    both, told = (supervisor, Supervisor()), ([], [])
    asked = request(tmp_path, shape={"steps": 100_000, "eval_every": 100_000})
    port = free_port()
    threads = []
    for node, one in enumerate(both):
        part, root = (
            GangPart(2, node, "127.0.0.1", port, 1),
            tmp_path if node == 0 else tmp_path / "other",
        )  # they share no folder
        patience = (
            60.0 if node == 0 else 0.1
        )  # the second node hears nothing, and must not take that for a trial that hangs
        own = replace(asked, gang=part, root=str(root), patience=patience)
        work = lambda s=one, a=own, t=told[node]: t.extend(s.run(a))  # noqa: E731
        threads.append(threading.Thread(target=work))
        threads[-1].start()
    events = Store(tmp_path).folder(asked.id) / "events-1.jsonl"
    until(lambda: events.exists() and len(events.read_text().splitlines()) > 3)
    both[1].stop()
    for thread in threads:
        thread.join(60)
    shut(both[1])
    assert steps(told[0])[:3] == [1, 2, 3]
    assert not steps(told[1])
    assert [messages[-1].status for messages in told] == ["failed", "failed"]
    assert told[1][-1].reason == "rank 1 was killed by signal 9 (SIGKILL)"


def test_a_rank_whose_peer_on_another_node_is_gone_ends_while_the_pool_still_waits_for_it():
    """Or its actor would be ended instead, and the gang's next attempt would find no warm process."""
    assert 2 * rank_process.PEER_SECONDS < running_trial.GANG_END_SECONDS


def test_the_base_of_a_fine_tuning_is_trained_by_one_rank(supervisor, tmp_path, cache):
    """Before the others begin."""
    model = {
        "model_type": "qwen3",
        "hidden_size": 32,
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
    }
    values = {
        "data": shards(tmp_path),
        "model": model | {"intermediate_size": 32, "head_dim": 16},
        "base": {"steps": 2, "data": shards(tmp_path)},
    }
    values |= {
        "context": 16,
        "batch": 1,
        "accumulate": 2,
        "steps": 2,
        "eval_every": 2,
        "eval_tokens": 64,
        "eval_batch": 2,
    }
    experiment = tiny(tmp_path, workload={"finetune": values}, resources={"ranks": 2})
    spec = experiment.spec(experiment.arms[1], 0, "cpu")
    asked = TrialRequest(spec.id, spec.wire, str(tmp_path), 1, {"log": 1}, ranks=2)
    told = run(supervisor, asked)
    assert told[-1].status == "done", told[-1]
    assert steps(told)[-2:] == [1, 2]


def test_what_ranks_cannot_share_ends_in_words(supervisor, tmp_path):
    told = run(supervisor, request(tmp_path, shape={"accumulate": 1, "batch": 3}))
    assert told[-1].status == "failed"
    assert (
        "2 ranks share the 1 micro-batch of a step, 2 one each, and 2 does not divide workload.batch 3"
        in told[-1].reason
    )


def test_a_rank_without_memory_is_told_as_that(supervisor, tmp_path):
    told = run(supervisor, request(tmp_path, shape={"hidden": TOO_LARGE}))
    assert told[-1].status == "oom"
    assert "out of memory" in told[-1].reason


def test_no_rank_outlives_its_supervisor(tmp_path):
    asked = request(tmp_path, shape={"steps": 100_000, "eval_every": 100_000})
    holder = subprocess.Popen(
        [sys.executable, "-c", SUPERVISE, asked.line()], stdout=subprocess.PIPE, text=True
    )
    while "'step': 3" not in holder.stdout.readline():
        pass
    family = psutil.Process(holder.pid).children(recursive=True)
    assert len(family) == 4  # the warm process, the trial's, its two ranks
    holder.kill()
    holder.wait()
    holder.stdout.close()
    until(lambda: gone(family))
