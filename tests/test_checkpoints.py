"""A trial that goes on from a checkpoint is the trial that was never interrupted, bit for bit, whatever its recipe remembers."""

import json
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from experiments_for_tests import SHAPE, shards

from ablate.checkpoints import Checkpoints
from ablate.recipes import PRESETS
from ablate.recipes.recipe import OsciReset, QEma, QRamping, Recipe, Weights
from ablate.store import Store
from ablate.supervisor import Supervisor
from ablate.train import Telemetry
from ablate.trial import TrialSpec, run
from ablate.workloads.gpt import Gpt

STEPS = 8
OWN = ("throughput/", "memory/")
"""What differs between two runs of anything."""
OSCILLATION = {
    "osci_reset": Weights(osci_reset=OsciReset(start=0.0, period=4, window=3, threshold=1.0)),
    "q_ema": Weights(q_ema=QEma(start=2)),
    "q_ramping": Weights(q_ramping=QRamping(period=4, window=3)),
}


def config(folder: Path, **changes) -> Gpt:
    return Gpt(**(SHAPE | {"data": shards(folder), "steps": STEPS, "eval_every": 4} | changes))


def metrics(records) -> list[tuple[int, dict[str, float]]]:
    return [(r.step, {name: value for name, value in r.metrics.items() if not name.startswith(OWN)}) for r in records]


def interrupted(workload: Gpt, recipe: Recipe, path: Path, at: int) -> list[tuple[int, dict[str, float]]]:
    """Records of a run that stops after `at` steps, and of one that finds its checkpoint."""
    how = Telemetry(every=3, shadow=4, log=1, checkpoint=0)
    first = workload.records(recipe, 0, "emulated", "cpu", how, Checkpoints(path, "trial", 0))
    taken = [next(first) for _ in range(at + 1)]  # the checkpoint of `at` steps is left before step at + 1 is taken
    first.close()
    again = Checkpoints(path, "trial", 0)
    rest = list(workload.records(recipe, 0, "emulated", "cpu", how, again))
    assert again.resumed == at
    return metrics(taken[:at]) + metrics(rest)


@pytest.mark.parametrize("name", [*PRESETS, *OSCILLATION])
def test_a_resumed_trial_is_the_uninterrupted_one_bit_for_bit(name, tmp_path):
    recipe = PRESETS["nvfp4"]().model_copy(update={"weights": OSCILLATION[name]}) if name in OSCILLATION else PRESETS[name]()
    workload = config(tmp_path, accumulate=2)
    whole = metrics(workload.records(recipe, 0, "emulated", "cpu", Telemetry(every=3, shadow=4, log=1)))
    for at in (2, 5):
        assert interrupted(workload, recipe, tmp_path / f"{at}.pt", at) == whole


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoint.pt", "trial", 60)
    checkpoints.save({"step": 3})

    def torn(content, file):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.save({"step": 4})
    assert Checkpoints(tmp_path / "checkpoint.pt", "trial", 60).load()["step"] == 3


@pytest.mark.parametrize("damage", ["torn", "another trial"])
def test_a_checkpoint_that_cannot_be_used_is_told_and_the_trial_starts_from_its_beginning(damage, tmp_path, capsys):
    path = tmp_path / "checkpoint.pt"
    Checkpoints(path, "other" if damage == "another trial" else "trial", 60).save({"step": 3})
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-20])
    assert Checkpoints(path, "trial", 60).load() is None
    assert "the trial starts from its beginning" in capsys.readouterr().out


def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint_and_no_record(tmp_path):
    """A real child process, killed in the middle of a trial; the next attempt goes on where the checkpoint stands."""
    workload = config(tmp_path, steps=400, eval_every=400)
    spec = TrialSpec(workload="gpt", config=workload, recipe=PRESETS["nvfp4"](), seed=0, engine="emulated", device="cpu")
    request = {"id": spec.id, "spec": spec.wire, "root": str(tmp_path / "runs"), "telemetry": {"log": 1, "every": 100, "checkpoint": 0.2}}
    store, supervisor = Store(tmp_path / "runs"), Supervisor()
    checkpoint = store.folder(spec.id) / "checkpoint.pt"
    killer = threading.Thread(target=kill_when, args=(lambda: checkpoint.exists(), supervisor))
    killer.start()
    first = [event for message in supervisor.run(request | {"attempt": 1}) for event in message.get("events", ())]
    killer.join()
    assert store.result(spec.id) is None
    messages = list(supervisor.run(request | {"attempt": 2}))
    supervisor.close()
    second = [event for message in messages for event in message.get("events", ())]
    assert messages[-1]["end"] == "done"
    resumed = second[0]["resumed"]
    assert 0 < resumed <= first[-1]["step"]
    assert [event["step"] for event in second] == list(range(resumed + 1, 401))
    assert not checkpoint.exists()
    undisturbed = list(run(spec, Store(tmp_path / "undisturbed"), 1, request["telemetry"]))
    assert [own(event) for event in (*first[:resumed], *second)] == [own(event) for event in undisturbed]


def own(event: dict) -> str:
    return json.dumps([event["step"], {name: value for name, value in event["metrics"].items() if not name.startswith(OWN)}])


def kill_when(ready, supervisor: Supervisor) -> None:
    """Kill the trial's process, not the warm one that it was forked from, a moment after `ready`."""
    deadline = time.monotonic() + 60
    while not ready() and time.monotonic() < deadline:
        time.sleep(0.01)
    time.sleep(0.1)
    warm = supervisor._child.pid
    (trial,) = map(int, Path(f"/proc/{warm}/task/{warm}/children").read_text().split())
    os.kill(trial, signal.SIGKILL)
