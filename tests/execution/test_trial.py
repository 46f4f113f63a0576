"""A trial's id is the hash of what determines its numbers, and of nothing else; running one commits one result."""

import hashlib
import json
from typing import Any

import pytest
from support.experiments import SHAPE, shards
from support.workloads import fields_of

from ablate.execution.trial_runner import run
from ablate.experiment.trial_spec import TrialSpec
from ablate.numerics import spec as numerics
from ablate.recipes import PRESETS
from ablate.store.trial_store import Store
from ablate.training.workloads import WORKLOADS
from ablate.training.workloads.gpt import Gpt

TELEMETRY = {"every": 2, "log": 1}


def spec(folder, recipe=None, seed=0, engine="emulated", device="cpu", **shape) -> TrialSpec:
    config = Gpt.model_validate(SHAPE | {"data": shards(folder)} | shape)
    return TrialSpec(
        workload="gpt",
        config=config,
        recipe=recipe or PRESETS["nvfp4"](),
        seed=seed,
        engine=engine,
        device=device,
    )


def test_the_id_of_one_known_trial_is_what_it_was(tmp_path, monkeypatch):
    """Raise the numerics' or the workload's VERSION before changing this: finished trials are found by it."""
    monkeypatch.chdir(tmp_path)
    shards(tmp_path)
    config = Gpt.model_validate(SHAPE | {"data": {"train": "train.bin", "val": "val.bin", "vocab": 64}})
    known = TrialSpec(
        workload="gpt", config=config, recipe=PRESETS["nvfp4"](), seed=0, engine="emulated", device="cpu"
    )
    assert known.id == "d966818e2747808d"


def test_what_determines_the_numbers_is_in_the_id(tmp_path, monkeypatch):
    plain = spec(tmp_path)
    text = tmp_path / "train.bin"
    others = [
        spec(tmp_path, recipe=PRESETS["bf16"]()),
        spec(tmp_path, recipe=PRESETS["nvfp4_paper"]()),
        spec(tmp_path, seed=1),
        spec(tmp_path, device="cuda"),
        spec(tmp_path, engine="other"),
        spec(tmp_path, steps=5),
        spec(tmp_path, lr=0.004),
        spec(tmp_path, eval_every=4),
    ]
    ids = [plain.id, *(other.id for other in others)]
    content = bytearray(text.read_bytes())
    content[1000] ^= 1
    (tmp_path / "copy").mkdir()
    data = shards(tmp_path / "copy")
    (tmp_path / "copy" / "train.bin").write_bytes(content)
    assert Gpt.model_validate(SHAPE | {"data": data}).fingerprint() != plain.config.fingerprint()
    monkeypatch.setattr(numerics, "VERSION", numerics.VERSION + 1)
    ids.append(spec(tmp_path).id)
    monkeypatch.undo()

    class Later(Gpt):
        VERSION = Gpt.VERSION + 1

    ids.append(TrialSpec(**fields_of(plain) | {"config": Later(**fields_of(plain.config))}).id)
    assert len(set(ids)) == len(ids)


def without_later(content: Any) -> Any:
    """Leave out `own` and `error` of quantisers and `experts`, later fields, which have their defaults."""
    if not isinstance(content, dict):
        return content
    assert content.get("own") is None
    return {
        name: without_later(part) for name, part in content.items() if name not in ("own", "error", "experts")
    }


@pytest.mark.parametrize(("device", "left_out"), [("cpu", {"deterministic"}), ("cuda", set())])
def test_an_id_is_the_hash_of_its_domain_and_of_the_spec_as_it_is_stored(tmp_path, device, left_out):
    trial = spec(tmp_path, device=device)
    content = json.loads(trial.wire)
    known = content.pop("id")
    fields = content["workload"]["gpt"]
    for name in {"recompute", "token_budget", "experts"} | left_out:
        del fields[name]
    fields["data"] = {
        name: value for name, value in fields["data"].items() if name not in ("train", "val")
    }  # the fingerprint stands for their content
    content["recipe"] = without_later(content["recipe"])
    text = json.dumps(["ablate trial 1", content], sort_keys=True, separators=(",", ":"))
    assert known == hashlib.sha256(text.encode()).hexdigest()[:16]


def test_deterministic_algorithms_are_part_of_an_id_on_gpus_alone(tmp_path):
    for device, same in (("cpu", True), ("cuda", False)):
        ids = {spec(tmp_path, device=device, deterministic=value).id for value in (True, False)}
        assert (len(ids) == 1) is same


def test_the_same_trial_has_the_same_id(tmp_path):
    assert spec(tmp_path).id == spec(tmp_path).id == spec(tmp_path, lr=3e-3, beta2=0.95).id


def test_data_that_was_moved_is_the_same_data(tmp_path):
    assert spec(tmp_path / "a").id == spec(tmp_path / "b").id


def test_a_spec_survives_what_crosses_the_wire(tmp_path):
    for recipe in PRESETS.values():
        there = spec(tmp_path, recipe=recipe(), seed=2**32 - 1)
        back = TrialSpec.parse(there.wire)
        assert (back, back.id) == (there, there.id)


def test_a_spec_of_other_code_or_other_data_is_refused(tmp_path, monkeypatch):
    there = spec(tmp_path)
    wire = there.wire
    with pytest.raises(ValueError, match="resolves the trial differently"):
        TrialSpec.parse(json.dumps(json.loads(wire) | {"id": "0" * 16}))
    for owner in (numerics, Gpt):
        with monkeypatch.context() as newer:
            newer.setattr(owner, "VERSION", owner.VERSION + 1)
            with pytest.raises(ValueError, match="resolves the trial differently"):
                TrialSpec.parse(wire)
    assert TrialSpec.parse(wire) == there


def test_a_trial_runs_once_and_is_replayed_after_that(tmp_path):
    store, trial = Store(tmp_path), spec(tmp_path)
    events = list(run(trial, store, 1, TELEMETRY))
    assert [event["step"] for event in events] == [1, 2, 3, 4]
    assert "val/loss" in events[-1]["metrics"]
    result = store.result(trial.id)
    assert (result["id"], result["status"], result["attempt"], result["steps"]) == (trial.id, "done", 1, 4)
    assert json.loads((store.folder(trial.id) / "spec.json").read_text()) == json.loads(trial.wire)
    assert list(run(trial, store, 2, TELEMETRY)) == events  # with the times of the first run
    assert store.result(trial.id) == result
    assert not (store.folder(trial.id) / "events-2.jsonl").exists()


def test_a_trial_that_is_left_early_has_no_result(tmp_path):
    store, trial = Store(tmp_path), spec(tmp_path)
    events = run(trial, store, 1, TELEMETRY)
    next(events)
    events.close()
    assert store.result(trial.id) is None
    assert len(list(store.events(trial.id))) == 1


def test_a_diverging_trial_has_a_result_that_says_where(tmp_path):
    store, trial = Store(tmp_path), spec(tmp_path, lr=1e30, clip=None, steps=6, warmup=0.0)
    last = list(run(trial, store, 1, TELEMETRY))[-1]
    result = store.result(trial.id)
    assert result["status"] == "diverged"
    assert result["origin"] == last["origin"]
    assert (result["origin"]["step"], result["origin"]["kind"]) == (last["step"], "gradient")
    assert result["reason"] == f"non-finite loss or gradient at step {last['step']}: {last['origin']['text']}"
    assert last["step"] == result["steps"] < 6


def test_telemetry_changes_what_is_measured_and_not_what_is_computed(tmp_path):
    trial = spec(tmp_path)
    often = list(run(trial, Store(tmp_path / "often"), 1, {"every": 1, "log": 1}))
    seldom = list(run(trial, Store(tmp_path / "seldom"), 1, {"every": 1000, "log": 1000}))
    assert len(often) > len(seldom)
    assert often[-1]["metrics"]["val/loss"] == seldom[-1]["metrics"]["val/loss"]


def test_the_result_says_where_it_was_computed(tmp_path):
    store, trial = Store(tmp_path), spec(tmp_path)
    list(run(trial, store, 1, TELEMETRY))
    environment = store.result(trial.id)["environment"]
    assert {"python", "torch", "cpu", "host", "ablate-fp4"} <= environment.keys()


def test_every_workload_is_known_by_its_name():
    assert WORKLOADS["gpt"] is Gpt
