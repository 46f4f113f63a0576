"""The mae workload as it is described: what it counts and names, what it refuses, and that describing it is instant."""

import importlib.util
import math
import subprocess
import sys

import pytest
import torch
from PIL import Image
from pydantic import ValidationError
from support.gpt_runs import UNMEASURED
from support.workloads import SMALL

from ablate.execution.trial_runner import run
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Recipe, Run
from ablate.store.trial_store import Store
from ablate.training.checkpoints import Checkpoints
from ablate.training.loop import Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.mae import Mae, Stack

BF16 = PRESETS["bf16"]()


def mae(**fields) -> Mae:
    return Mae.model_validate(SMALL["mae"](None).model_dump() | fields)


def wrong(**fields) -> dict[str, str]:
    return dict(mae(**fields).problems())


def test_the_layers_that_it_names_are_those_that_a_recipe_applies_to():
    workload = mae(layers=3, decoder=Stack(layers=2, width=16, heads=2))
    run = workload.prepare(BF16, 0, "cpu")
    assert list(run.engine.layers) == list(workload.linears)
    assert workload.blocks == 5
    assert workload.parameters() == sum(layer.weight.numel() for layer in run.engine.layers.values())


def test_the_last_block_that_a_policy_keeps_is_the_decoders():
    recipe = Recipe.model_validate(PRESETS["nvfp4"]().model_dump() | {"layers": {"skip_last": 1}})
    run = mae(layers=2).prepare(recipe, 0, "cpu")
    run.engine.at(0, Run(5))
    plain = {name for name, layer in run.engine.layers.items() if layer.products.plain}
    assert plain == {name for name in run.engine.layers if name.startswith("decoder.decoder_layers.0.")}


def test_a_step_has_all_patches_of_its_images():
    assert mae(data="digits", patch=2, batch=3, accumulate=2).tokens_per_step == 3 * 2 * 16
    assert mae(data="photos", patch=8, batch=3, accumulate=1).tokens_per_step == 3 * 16
    assert Mae(data="photos", patch=8, batch=3, token_budget=481).steps == 11


@pytest.mark.parametrize(
    ("patch", "ratio", "visible"),
    [(2, 0.75, 4), (2, 0.5, 8), (2, 0.9, 2), (1, 0.9, 6), (4, 0.5, 2), (1, 1 / 64, 63), (1, 63 / 64, 1)],
)
def test_as_many_patches_are_visible_as_the_ratio_leaves(patch, ratio, visible):
    assert mae(data="digits", patch=patch, mask_ratio=ratio).visible == visible


@pytest.mark.parametrize(
    ("fields", "field", "said"),
    [
        ({"patch": 3}, "patch", "3 does not divide the side of the images, 8"),
        ({"heads": 3}, "heads", "3 does not divide width 32"),
        ({"width": 34, "heads": 2}, "width", "34 is no multiple of 4"),
        ({"decoder": Stack(width=30, heads=4)}, "decoder.width", "30 is no multiple of 4"),
        ({"decoder": Stack(width=32, heads=5)}, "decoder.heads", "5 does not divide width 32"),
        (
            {"mask_ratio": 0.01},
            "mask_ratio",
            "0.01 masks none of 16 patches; at least one must be masked, and one visible",
        ),
        ({"mask_ratio": 0.99}, "mask_ratio", "0.99 masks all of 16 patches"),
        ({"patch": 8}, "mask_ratio", "masks all of 1 patches"),
        ({"patch": 1, "norm_pix": True}, "norm_pix", "no deviation"),
        ({"data": {"folder": "/nowhere", "size": 8}}, "data", "cannot be read: /nowhere: no such folder"),
        ({"augment": {"saturation": 0.5}}, "augment", "no effect on images in grey"),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_with_its_reason(fields, field, said):
    assert said in wrong(**fields)[field]


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.5, 2.0])
def test_a_ratio_lies_between_nothing_and_all(ratio):
    with pytest.raises(ValidationError, match="mask_ratio"):
        Mae(mask_ratio=ratio)


def test_images_that_cannot_be_read_are_no_traceback_where_steps_follow_from_tokens():
    with pytest.raises(ValidationError, match="/nowhere: no such folder"):
        mae(data={"folder": "/nowhere", "size": 8}, token_budget=1000)


def test_without_the_library_it_says_how_to_install_it(monkeypatch):
    real = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda name, *more: None if name == "transformers" else real(name, *more)
    )
    ((field, said),) = mae().problems()
    assert (field, said) == (
        "data",
        "the model is transformers', which is not installed: `pip install 'ablate-fp4[hf]'`",
    )


def test_where_its_images_lie_is_no_identity(tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        for number in range(10):
            Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(tmp_path / place / f"{number}.png")
    one, other = (mae(data={"folder": str(tmp_path / place), "size": 8}) for place in ("a", "b"))
    assert (one.identity(), one.fingerprint()) == (other.identity(), other.fingerprint())
    assert one != other


def test_it_costs_more_with_more_blocks_more_visible_patches_and_quantised():
    base = mae(steps=100).cost(True)
    assert base > mae(steps=100).cost(False)
    assert base < min(
        mae(steps=100, **more).cost(True)
        for more in ({"layers": 3}, {"mask_ratio": 0.25}, {"width": 64}, {"batch": 8})
    )


def test_what_it_explains_is_the_share_of_a_blank_guess_that_is_gone():
    workload = mae()
    blank = workload.summary()["data/blank_loss"]
    assert workload.derived({"val/loss": blank}) == {"val/explained": 0}
    assert workload.derived({"val/loss": blank / 4}) == {"val/explained": pytest.approx(0.75)}
    assert workload.derived({"train/loss": 1.0}) == {}


def test_training_explains_more_and_more():
    records = list(
        mae(steps=60, batch=8, lr=3e-3, eval_every=20).records(
            TrialRun(PRESETS["nvfp4"](), 0, "emulated", "cpu", UNMEASURED)
        )
    )
    explained = [record.metrics["val/explained"] for record in records if "val/explained" in record.metrics]
    assert explained == sorted(explained)
    assert explained[-1] > 0.25


@pytest.mark.parametrize(
    "fields", [{}, {"norm_pix": True}, {"data": "photos", "patch": 8}], ids=["grey", "normalised", "colour"]
)
def test_every_run_leaves_a_picture_and_the_same_one_twice(fields, tmp_path):
    trial = TrialSpec(
        workload="mae",
        config=mae(**fields),
        recipe=PRESETS["nvfp4"](),
        seed=0,
        engine="emulated",
        device="cpu",
    )
    pictures = []
    for place in ("a", "b"):
        store = Store(tmp_path / place)
        list(run(trial, store, 1, {}))
        images, path = store.artifacts(trial.id)
        assert (images.name, path.name) == ("reconstruction.npz", "reconstruction.png")
        pictures.append((path.read_bytes(), images.read_bytes()))
        with Image.open(path) as image:
            assert min(image.size) > 300
            assert len(image.getcolors(1 << 20)) > 20
    assert pictures[0] == pictures[1]


def test_a_run_that_diverged_leaves_none(tmp_path):
    diverging = mae(lr=1e38, warmup=0.0, clip=None)
    trial = TrialSpec(workload="mae", config=diverging, recipe=BF16, seed=0, engine="emulated", device="cpu")
    store = Store(tmp_path)
    list(run(trial, store, 1, {}))
    assert store.result(trial.id)["status"] == "diverged"
    assert store.artifacts(trial.id) == []


def test_the_picture_changes_no_record_and_no_weight(tmp_path):
    workload = mae()
    run = workload.prepare(BF16, 0, "cpu")
    list(workload.train(run, UNMEASURED))
    before = {name: value.clone() for name, value in run.model.state_dict().items()}
    workload.leave(run, tmp_path)
    assert all(torch.equal(before[name], value) for name, value in run.model.state_dict().items())
    assert run.model.training


def test_a_constant_image_has_a_finite_loss_where_pixels_are_normalised(tmp_path):
    for number in range(10):
        Image.new("L", (8, 8), 25 * number).save(tmp_path / f"{number}.png")
    flat = mae(data={"folder": str(tmp_path), "size": 8}, norm_pix=True, patch=4)
    records = list(
        flat.records(
            TrialRun(
                PRESETS["nvfp4"](),
                0,
                "emulated",
                "cpu",
                Telemetry(log=1),
                Checkpoints(tmp_path / "c.pt", "t", 60),
            )
        )
    )
    assert all(math.isfinite(record.metrics["train/loss"]) for record in records)
    assert "nan/first_step" not in records[-1].metrics


def test_describing_it_imports_neither_torch_nor_transformers():
    code = (
        "import sys; from ablate.training.workloads.mae import Mae; m = Mae();"
        " list(m.problems()), m.identity(), m.fingerprint(), m.cost(True), m.linears;"
        " print([name for name in ('torch', 'transformers') if name in sys.modules])"
    )
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "[]\n"
    )
