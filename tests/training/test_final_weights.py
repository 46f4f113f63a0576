"""Weights that a finished trial kept: those after its last step, at no other cost."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file
from support.commands import INLINE, here
from support.experiments import problems, write

from ablate.experiment.load import load
from ablate.experiment.trial_spec import TrialSpec
from ablate.store.trial_store import Store

KEEP = {"telemetry": {"keep_weights": True, "log": 1}}


def swept(folder: Path, name: str, **keys) -> Path:
    """A finished sweep of one arm in NVFP4 and one in bf16; returns the state folder."""
    path = write(
        folder, name, {"layers": 2}, arms={"fp4": {"skip_last": 1}}, ablate=None, **{"seeds": 1} | keys
    )
    done = here("sweep", path, "--state", folder / "state", *INLINE)
    assert done.returncode == 0, done.stderr
    return folder / "state"


@pytest.fixture(scope="module")
def kept(tmp_path_factory) -> Path:
    return swept(tmp_path_factory.mktemp("kept"), "tiny", **KEEP, seeds=2)


@pytest.fixture(scope="module")
def unkept(tmp_path_factory) -> Path:
    return swept(tmp_path_factory.mktemp("unkept"), "tiny")


def trials(state: Path, arm: str) -> dict[int, str]:
    """Ids of an arm's trials by seed."""
    query = "SELECT seed, id FROM members JOIN arms USING (arm) JOIN trials USING (trial) WHERE name = ?"
    with closing(sqlite3.connect(state / "sweeps" / "tiny" / "ledger.db")) as database:
        return dict(database.execute(query, (arm,)))


def test_kept_weights_are_those_after_the_last_step_and_sealed_in_the_result(kept):
    store = Store(kept)
    for trial in trials(kept, "fp4").values():
        path = store.weights(trial)
        assert store.result(trial)["weights"] == store.kept_weights(trial)
        assert path.stat().st_mode & 0o777 == store.folder(trial).stat().st_mode & 0o666
        with safe_open(path, "pt") as file:
            assert json.loads(file.metadata()["ablate"]) == {"trial": trial, "step": 4}
        found = load_file(path)
        spec = TrialSpec.parse((store.folder(trial) / "spec.json").read_text())
        *_, last = (event["metrics"] for event in store.events(trial))
        run = spec.config.prepare(spec.recipe, spec.seed, "cpu")
        start = {name: value.clone() for name, value in run.model.state_dict().items()}
        run.model.load_state_dict(found)
        assert any(not torch.equal(start[name], value) for name, value in found.items())
        with torch.no_grad(), run.engine.high_precision():
            run.model.eval()
            losses = [float((run.loss or run.model)(*batch)) for batch in run.validation]
        assert sum(losses) / len(losses) == pytest.approx(last["val/loss_bf16"], abs=1e-6)


def test_keeping_weights_changes_no_id_and_no_number(kept, unkept):
    (seed, trial), *_ = trials(unkept, "fp4").items()
    assert trials(kept, "fp4")[seed] == trial
    events = [[*Store(state).events(trial)] for state in (kept, unkept)]
    own = [
        {name: value for name, value in last["metrics"].items() if name.startswith("val/")}
        for *_, last in events
    ]
    assert own[0] == own[1]
    assert own[0]
    assert Store(unkept).kept_weights(trial) is None
    assert "weights" not in Store(unkept).result(trial)


def test_an_experiment_may_ask_for_weights(tmp_path):
    path = write(tmp_path, "asks", **KEEP)
    assert load(path).keys.telemetry.keep_weights
    plain = json.loads(path.read_text()) | {"telemetry": {}}
    (tmp_path / "plain.yaml").write_text(json.dumps(plain))
    assert not load(tmp_path / "plain.yaml").keys.telemetry.keep_weights


def test_weights_that_nobody_would_write_are_refused_where_they_are_asked_for(tmp_path):
    design = {"trunk": "bf16", "positions": [0.5], "window": 0.25, "horizons": [1]}
    for keys in ({"design": design}, {"workload": {"idle": {"steps": 4}}}):
        found = problems(write(tmp_path, "asks", **KEEP | keys))
        assert any("telemetry.keep_weights" in str(problem) for problem in found), found
