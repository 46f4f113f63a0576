"""A trial that goes on from a checkpoint is the trial that was never interrupted, bit for bit, whatever its recipe remembers."""

import json
import os
import signal
import threading
from pathlib import Path

import pytest
import torch
from experiments_for_tests import SHAPE, shards, tiny, until
from gates_for_tests import Gate

from ablate.arms import Base
from ablate.checkpoints import Checkpoints
from ablate.controller import Controller, Wishes
from ablate.forks import Family
from ablate.ledger import Ledger
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Phase
from ablate.store import Store
from ablate.supervisor import Supervisor
from ablate.trial import TrialSpec, run
from ablate.workers import Inline
from ablate.workloads.gpt import Gpt

STEPS = 8
OWN = ("throughput/", "memory/")
"""What differs between two runs of anything."""


def config(folder: Path, **changes) -> Gpt:
    return Gpt(**(SHAPE | {"data": shards(folder), "steps": STEPS, "eval_every": 4} | changes))


def test_a_checkpoint_is_whole_or_not_there(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path / "checkpoint.pt", "trial", 0)
    checkpoints.leave(3, {"step": 3}, (False, True))

    def torn(content, file):
        file.write(b"half")
        raise OSError("No space left on device")

    monkeypatch.setattr(torch, "save", torn)
    with pytest.raises(OSError, match="No space left"):
        checkpoints.leave(4, {"step": 4}, (False, True))
    monkeypatch.undo()
    assert Checkpoints(tmp_path / "checkpoint.pt", "trial", 0).take()["step"] == 3


@pytest.mark.parametrize("damage", ["torn", "another trial"])
def test_a_checkpoint_that_cannot_be_used_is_told_and_the_trial_goes_on_without_it(damage, tmp_path, capsys):
    path = tmp_path / "checkpoint.pt"
    Checkpoints(path, "other" if damage == "another trial" else "trial", 0).leave(3, {"step": 3}, (False, True))
    if damage == "torn":
        path.write_bytes(path.read_bytes()[:-20])
    assert Checkpoints(path, "trial", 60).take() is None
    assert "the trial goes on without it" in capsys.readouterr().out


def test_a_killed_worker_costs_the_steps_since_the_last_checkpoint_and_no_record(tmp_path, monkeypatch):
    """A real child process, killed in the middle of a trial; the next attempt goes on where the checkpoint stands."""
    workload, gate = config(tmp_path, steps=100, eval_every=100), Gate(tmp_path)
    gate.shut()
    monkeypatch.setenv("PYTHONPATH", gate.environment["PYTHONPATH"])
    spec = TrialSpec(workload="gpt", config=workload, recipe=PRESETS["nvfp4"](), seed=0, engine="emulated", device="cpu")
    request = {"id": spec.id, "spec": spec.wire, "root": str(tmp_path / "runs"), "telemetry": {"log": 1, "every": 100, "checkpoint": 0.05}}
    store, supervisor = Store(tmp_path / "runs"), Supervisor()
    checkpoint, told = (store.folder(spec.id) / name for name in ("checkpoint.pt", "events-1.jsonl"))
    killer = threading.Thread(target=kill_when, args=(lambda: checkpoint.exists() and told.stat().st_size, supervisor))
    killer.start()
    first = [event for message in supervisor.run(request | {"attempt": 1}) for event in message.get("events", ())]
    killer.join()
    assert store.result(spec.id) is None
    gate.open()
    messages = list(supervisor.run(request | {"attempt": 2}))
    supervisor.close()
    second = [event for message in messages for event in message.get("events", ())]
    assert messages[-1]["end"] == "done"
    (resumed,) = [event["resumed"] for event in second if "resumed" in event]
    assert 0 < resumed <= first[-1]["step"]
    assert [event["step"] for event in second] == list(range(1, 101))  # those before it are told again, from the first attempt's file
    assert next(event["step"] for event in second if "resumed" in event) == resumed + 1
    assert not checkpoint.exists()
    undisturbed = list(run(spec, Store(tmp_path / "undisturbed"), 1, request["telemetry"]))
    assert [own(event) for event in second] == [own(event) for event in undisturbed]


def own(event: dict) -> str:
    return json.dumps([event["step"], {name: value for name, value in event["metrics"].items() if not name.startswith(OWN)}])


def kill_when(ready, supervisor: Supervisor) -> None:
    """Kill the trial's process, not the warm one that it was forked from, once `ready`."""
    until(ready)
    warm = supervisor._child.pid
    (trial,) = map(int, Path(f"/proc/{warm}/task/{warm}/children").read_text().split())
    os.kill(trial, signal.SIGKILL)


# --- forks -----------------------------------------------------------------------------------------------------------------


def cooldowns(folder: Path, *fractions: float) -> list[TrialSpec]:
    base = Base("gpt", config(folder, steps=20, eval_every=5).model_dump(mode="json"), "nvfp4")
    arms = [base.arm({"cooldown": fraction}) for fraction in fractions]
    return [TrialSpec(workload="gpt", config=a.config, recipe=a.recipe, seed=0, engine="emulated", device="cpu") for a in arms]


def test_what_a_sweep_over_cooldown_shares_is_counted(tmp_path):
    family = Family(cooldowns(tmp_path, 0, 0.05, 0.1, 0.15, 0.2, 0.25))
    assert family.steps() == (120, 20 + 1 + 2 + 3 + 4 + 5)  # 3.4 times fewer


def test_trials_part_where_their_recipes_do(tmp_path):
    none, tenth, half = cooldowns(tmp_path, 0, 0.1, 0.5)
    assert (none.alike(tenth), none.alike(half), tenth.alike(half)) == (18, 10, 10)
    family = Family([none, tenth, half])
    assert [step for step, _ in family.points(none)] == [18, 10]
    assert [step for step, _ in family.points(half)] == [10]
    assert dict(family.points(none))[10] == dict(family.points(half))[10] == none.history(10)
    assert none.history(18) != half.history(18)


def test_another_seed_another_model_and_another_recipe_share_nothing(tmp_path):
    (spec,) = cooldowns(tmp_path, 0.1)
    others = [
        spec.model_copy(update={"seed": 1}),
        spec.model_copy(update={"config": spec.config.model_copy(update={"lr": 1e-4})}),
        spec.model_copy(update={"recipe": PRESETS["mxfp4"]()}),
    ]
    assert not Family([spec, *others]).points(spec)


def test_a_schedule_that_waits_for_a_measurement_is_shared_only_whole(tmp_path):
    (spec,) = cooldowns(tmp_path, 0)
    waits = spec.model_copy(update={"recipe": PRESETS["fp4_all_the_way"]()})
    later = waits.recipe.model_copy(update={"schedule": (Phase(start="step:10"), *waits.recipe.schedule)})
    assert not Family([waits, waits.model_copy(update={"recipe": later})]).points(waits)


def test_a_forked_trial_is_the_trial_from_scratch_bit_for_bit_and_replays_whole(tmp_path):
    specs, store = cooldowns(tmp_path, 0, 0.1, 0.5), Store(tmp_path / "forked")
    family, how = Family(specs), {"log": 1, "every": 3, "shadow": 4, "checkpoint": 60}
    ran = 0
    for spec in specs:
        forked = list(run(spec, store, 1, how, family.points(spec)))
        scratch = list(run(spec, Store(tmp_path / "scratch"), 1, how))
        assert [own(event) for event in forked] == [own(event) for event in scratch]
        assert [own(event) for event in store.events(spec.id)] == [own(event) for event in scratch]
        ran += sum(1 for line in (store.folder(spec.id) / "events-1.jsonl").read_text().splitlines())
    assert ran == 20 + 2 + 10
    trunk = json.loads((store.folder(specs[2].id) / "trunk-1.json").read_text())
    assert trunk == {"trial": specs[0].id, "step": 10}


def test_a_sweep_runs_what_its_trials_share_once_and_leaves_no_shared_checkpoint(tmp_path):
    experiment = tiny(tmp_path, shape={"steps": 20, "eval_every": 5}, ablate={"cooldown": [0.25, 0.1, 0]}, telemetry={"log": 1})
    forked, scratch = finish(experiment, tmp_path / "a"), finish(experiment, tmp_path / "b", fork=False)
    assert forked == scratch
    own_steps = {
        root: sum(len(path.read_text().splitlines()) for path in (tmp_path / root / "trials").glob("*/events-*.jsonl")) for root in "ab"
    }
    assert own_steps == {"a": 2 * (20 + 20 + 2 + 5), "b": 2 * 4 * 20}  # bf16 and three arms, two seeds
    assert not list((tmp_path / "a" / "checkpoints").iterdir())


def finish(experiment, state: Path, fork: bool = True) -> dict:
    """Every member's records, but for what differs between any two runs."""
    controller = Controller(experiment, state, "cpu", Inline, None, Wishes(fork=fork))
    *_, outcome = controller.run()
    assert (outcome.status, outcome.failed) == ("done", 0)
    ledger = Ledger(controller.folder / "ledger.db")
    found = {
        (m["name"], m["seed"]): [(step, name, value) for step, name, value, _ in ledger.records(m["trial"]) if not name.startswith(OWN)]
        for m in ledger.members()
    }
    ledger.close()
    return {key: sorted(records) for key, records in found.items()}
