"""The model of a finished trial, packed: from weights that it kept, or trained again; all else is refused."""

import json
import sqlite3
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.commands import INLINE, here
from support.experiments import problems, write

from ablate.experiment.load import load
from ablate.experiment.trial_spec import TrialSpec
from ablate.numerics.formats import ELEMENTS
from ablate.store.trial_store import Store
from ablate.training import final_weights

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


def unpacked(tensors: dict[str, torch.Tensor], name: str) -> torch.Tensor:
    """Values of a packed weight: one nibble after another, by E2M1's own table."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, ELEMENTS["e2m1"].max])
    codes = tensors[f"{name}.weight_packed"]
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    values = grid[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)
    scales = tensors[f"{name}.weight_scale"].float().repeat_interleave(16, 1)
    return values * scales / tensors[f"{name}.weight_global_scale"]


def test_kept_weights_are_those_after_the_last_step_and_sealed_in_the_result(kept):
    store = Store(kept)
    for trial in trials(kept, "fp4").values():
        path = store.weights(trial)
        assert store.result(trial)["weights"] == store.kept_weights(trial)
        assert path.stat().st_mode & 0o777 == store.folder(trial).stat().st_mode & 0o666
        found = final_weights.read(path)
        assert (found.trial, found.step, found.fallbacks, found.tripped) == (trial, 4, 0, ())
        spec = TrialSpec.parse((store.folder(trial) / "spec.json").read_text())
        *_, last = (event["metrics"] for event in store.events(trial))
        run = spec.config.prepare(spec.recipe, spec.seed, "cpu")
        start = {name: value.clone() for name, value in run.model.state_dict().items()}
        run.model.load_state_dict(found.model)
        assert any(not torch.equal(start[name], value) for name, value in found.model.items())
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


@pytest.mark.parametrize("form", ["compressed-tensors", "modelopt"])
def test_a_trial_is_packed_as_its_forward_pass_quantises(kept, form, tmp_path):
    done = here("export-model", "tiny:fp4", "--seed", 1, "--format", form, "-o", tmp_path, "--state", kept)
    assert done.returncode == 0, done.stderr
    trial = trials(kept, "fp4")[1]
    spec = TrialSpec.parse((Store(kept).folder(trial) / "spec.json").read_text())
    run = spec.config.prepare(spec.recipe, spec.seed, "cpu")
    run.model.load_state_dict(final_weights.read(Store(kept).weights(trial)).model)
    run.engine.clock.stream, run.engine.clock.step = "evaluation", 3
    tensors, packed = load_file(tmp_path / "model.safetensors"), 0
    for name, layer in run.engine.layers.items():
        layer.products = (
            spec.recipe.decided(spec.recipe.layers.deciders(run.engine.placed)[name]) or layer.products
        )
        if ".0." in f".{name}":
            packed += 1
            if form == "compressed-tensors":
                found, weight = unpacked(tensors, name), layer.quantised_weight()
                assert (found - weight).abs().max() <= 2**-22 * weight.abs().max()
        else:
            assert torch.equal(tensors[f"{name}.weight"], layer.weight.bfloat16())
    assert packed
    assert f"{packed} layers packed" in done.stdout
    other = {"modelopt": "compressed-tensors", "compressed-tensors": "modelopt"}[form]
    done = here("export-model", "tiny:fp4", "--seed", 0, "--format", other, "-o", tmp_path, "--state", kept)
    assert (done.returncode, str(tmp_path) in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    assert load_file(tmp_path / "model.safetensors").keys() == tensors.keys()


def test_a_trial_by_its_id_with_scales_of_activations(kept, tmp_path):
    trial = trials(kept, "fp4")[0]
    done = here("export-model", trial, "--calibrate", 2, "-o", tmp_path, "--state", kept)
    assert done.returncode == 0, done.stderr
    tensors = load_file(tmp_path / "model.safetensors")
    assert any(name.endswith("input_global_scale") for name in tensors)


def test_a_trial_without_weights_says_how_to_get_them_and_can_be_trained_again(unkept, kept, tmp_path):
    done = here("export-model", "tiny:fp4", "-o", tmp_path, "--state", unkept)
    assert (done.returncode, "keep_weights" in done.stderr, "--train" in done.stderr) == (2, True, True)
    done = here("export-model", "tiny:fp4", "-o", tmp_path / "again", "--state", unkept, "--train")
    assert done.returncode == 0, done.stderr
    done = here("export-model", "tiny:fp4", "--seed", 0, "-o", tmp_path / "kept", "--state", kept)
    assert done.returncode == 0, done.stderr
    again, first = (load_file(tmp_path / name / "model.safetensors") for name in ("again", "kept"))
    assert again.keys() == first.keys()
    for name, value in first.items():
        assert torch.equal(again[name].view(torch.uint8), value.view(torch.uint8)), name


def test_weights_of_another_file_are_refused(kept, tmp_path):
    store, trial = Store(kept), trials(kept, "fp4")[0]
    path = store.weights(trial)
    before = path.read_bytes()
    try:
        tensors = load_file(path)
        save_file({name: value + 1 for name, value in tensors.items()}, path)
        done = here("export-model", trial, "-o", tmp_path, "--state", kept)
        assert (done.returncode, "checksum" in done.stderr) == (2, True)
        path.unlink()
        done = here("export-model", trial, "-o", tmp_path, "--state", kept)
        assert (done.returncode, "deleted" in done.stderr, "--train" in done.stderr) == (2, True, True)
    finally:
        path.write_bytes(before)


def test_what_cannot_be_packed_is_said_in_a_sentence(kept, tmp_path):
    (bf16,) = {name for name in ("bf16", "baseline") if trials(kept, name)}
    for words, why in (
        (("nowhere:fp4",), "no such sweep"),
        (("tiny:fp5", "--seed", 0), "fp4"),
        (("tiny:fp4",), "--seed"),
        (("tiny:fp4", "--seed", 7), "--seed 7"),
        (("0" * 16,), "there is no trial"),
        ((f"tiny:{bf16}", "--seed", 0), "nothing to pack"),
        (("tiny",), "name an arm"),
    ):
        done = here("export-model", *words, "-o", tmp_path, "--state", kept)
        assert (done.returncode, why in done.stderr, "Traceback" in done.stderr) == (2, True, False), (
            done.stderr
        )


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
