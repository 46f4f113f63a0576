"""The example of own code that trains a masked autoencoder: what its config refuses, what it records, its pictures."""

import math

import pytest
from PIL import Image
from pydantic import ValidationError
from support.commands import here
from support.mae_example import (
    FILE,
    blank_loss,
    open_images,
    problems,
    run,
    small,
    visible_of,
    workload,
)

from ablate.execution.trial_runner import run as run_trial
from ablate.experiment.load import load
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS
from ablate.store.trial_store import Store
from ablate.training.checkpoints import Checkpoints
from ablate.training.workloads import context_free
from ablate.verification.workload_checks import Runs, promises


def test_the_files_that_init_writes_are_the_shipped_experiment(tmp_path):
    done = here("init", "mine", "--images", "--folder", tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "mine_train.py").read_bytes() == FILE.read_bytes()
    mine, shipped = load(tmp_path / "mine.yaml", "cpu"), load(FILE.parent / "mae_masking.yaml", "cpu")
    assert [(arm.name, arm.config.identity()) for arm in mine.arms] == [
        (arm.name, arm.config.identity()) for arm in shipped.arms
    ]
    assert list(mine.base.config.problems()) == []


@pytest.mark.slow
def test_it_keeps_the_promises_of_own_code():
    """`ablate check`: it repeats to the bit, honours its seed, resumes bit for bit, passes the recipe on."""
    assert [promise.name for promise in promises(Runs(workload(steps=4))) if not promise.kept] == []


@pytest.mark.parametrize(
    ("patch", "ratio", "visible"),
    [(2, 0.75, 4), (2, 0.5, 8), (2, 0.9, 2), (1, 0.9, 6), (4, 0.5, 2), (1, 1 / 64, 63), (1, 63 / 64, 1)],
)
def test_as_many_patches_are_visible_as_the_ratio_leaves(patch, ratio, visible):
    assert visible_of(small(patch=patch, mask_ratio=ratio), open_images("digits")) == visible


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"patch": 3}, "patch: 3 does not divide the side of the images, 8"),
        ({"encoder": {"width": 32, "heads": 3}}, "encoder.heads: 3 does not divide width 32"),
        ({"encoder": {"width": 34, "heads": 2}}, "encoder.width: 34 is no multiple of 4"),
        ({"decoder": {"width": 30, "heads": 2}}, "decoder.width: 30 is no multiple of 4"),
        ({"decoder": {"width": 32, "heads": 5}}, "decoder.heads: 5 does not divide width 32"),
        (
            {"mask_ratio": 0.01},
            "mask_ratio: 0.01 masks none of 16 patches; at least one must be masked, and one visible",
        ),
        ({"mask_ratio": 0.99}, "mask_ratio: 0.99 masks all of 16 patches"),
        ({"patch": 8}, "mask_ratio: 0.75 masks all of 1 patches"),
        ({"patch": 1, "norm_pix": True}, "norm_pix: a patch of one number has no deviation"),
        ({"augment": {"saturation": 0.5}}, "augment.saturation: has no effect on images in grey"),
        ({"augment": {"crop_padding": 9}}, "augment.crop_padding: 9 is wider than the images, 8x8"),
        ({}, ""),
    ],
    ids=str,
)
def test_what_cannot_run_is_refused_with_its_reason(keys, said):
    """By the plan, for images whose size is known before they are read."""
    reasons = [f"{field}: {why}" for field, why in workload(**keys).problems()]
    assert [reason[: len(said) + 7] for reason in reasons] == [f"config.{said}"] * bool(said)
    if said:
        with pytest.raises(ValueError, match=said.partition(": ")[2][:12]):
            small(**keys)


def test_images_of_a_size_that_is_not_known_are_checked_once_they_are_read():
    config = small(images="folder", patch=3)
    assert [key for key, _ in problems(config, open_images("digits"))] == ["patch"]


def test_a_plan_names_file_line_and_field_of_a_size_that_does_not_fit(tmp_path):
    (tmp_path / "mae.py").write_bytes(FILE.read_bytes())
    text = (FILE.parent / "mae_masking.yaml").read_text()
    bad = tmp_path / "bad.yaml"
    bad.write_text(text.replace("{layers: 3, width: 64, heads: 2}", "{layers: 3, width: 64, heads: 5}"))
    done = here("plan", bad)
    line = 1 + next(number for number, each in enumerate(text.splitlines()) if "encoder:" in each)
    assert done.returncode == 2
    assert f"{bad}:{line}" in done.stderr
    assert "workload.python.config.encoder.heads: 5: 5 does not divide width 64" in done.stderr
    bad.write_text(text.replace("[0.5, 0.75]", "[0.5, 0.999]"))
    done = here("plan", bad)
    line = 1 + next(number for number, each in enumerate(text.splitlines()) if "mask_ratio: [" in each)
    assert (done.returncode, f"{bad}:{line}" in done.stderr) == (2, True)


@pytest.mark.parametrize("ratio", [0.0, 1.0, -0.5, 2.0])
def test_a_ratio_lies_between_nothing_and_all(ratio):
    with pytest.raises(ValidationError, match="mask_ratio"):
        small(mask_ratio=ratio)


def test_a_mistake_in_the_config_is_told_before_the_run():
    wrong = dict(workload(mask_ratio=2.0, decoder={"widht": 16}).problems())
    assert wrong.keys() == {"config.mask_ratio", "config.decoder"}
    assert list(workload().problems()) == []


def test_where_its_images_lie_is_no_identity(tmp_path):
    for place in ("a", "b"):
        (tmp_path / place).mkdir()
        for number in range(10):
            Image.new("RGB", (8, 8), (20 * number, 0, 0)).save(tmp_path / place / f"{number}.png")
    one, other = (workload(images="folder", data=(str(tmp_path / place),)) for place in ("a", "b"))
    assert (one.identity(), one.fingerprint()) == (other.identity(), other.fingerprint())
    assert one != other
    assert run(one)[-1].metrics["val/loss"] == run(other)[-1].metrics["val/loss"]


def test_what_it_explains_is_the_share_of_a_blank_guess_that_is_gone():
    config = small()
    last = run(workload())[-1].metrics
    assert last["data/context_free_loss"] == blank_loss(config, open_images("digits"))
    assert last["val/explained"] == pytest.approx(1 - last["val/loss"] / last["data/context_free_loss"])


def test_training_explains_more_and_more():
    records = run(workload(steps=60, batch=8, lr=3e-3, eval_every=20, eval_images=64, eval_batch=16))
    explained = [record.metrics["val/explained"] for record in records if "val/explained" in record.metrics]
    assert len(explained) == 3
    assert explained == sorted(explained)
    assert explained[-1] > 0.25


def trial_of(recipe: str = "nvfp4", **keys) -> TrialSpec:
    return TrialSpec(
        workload="python",
        config=workload(**keys),
        recipe=PRESETS[recipe](),
        seed=0,
        engine="emulated",
        device="cpu",
    )


@pytest.mark.parametrize(
    "keys", [{}, {"norm_pix": True}, {"images": "photos", "patch": 8}], ids=["grey", "normalised", "colour"]
)
def test_every_run_leaves_a_picture_and_the_same_one_twice(keys, tmp_path):
    trial, pictures = trial_of(**keys), []
    for place in ("a", "b"):
        store = Store(tmp_path / place)
        list(run_trial(trial, store, 1, {}))
        images, path = store.artifacts(trial.id)
        assert (images.name, path.name) == ("reconstruction.npz", "reconstruction.png")
        pictures.append((path.read_bytes(), images.read_bytes()))
        with Image.open(path) as image:
            assert min(image.size) > 300
            assert len(image.getcolors(1 << 20)) > 20
    assert pictures[0] == pictures[1]
    config = small(**keys)
    floor = context_free(store.result(trial.id))  # whether it learned is known to the report
    assert floor == blank_loss(config, open_images(config.images))


def test_a_run_that_diverged_leaves_none(tmp_path):
    trial, store = trial_of("bf16", lr=1e30, warmup=0.0, clip=None), Store(tmp_path)
    list(run_trial(trial, store, 1, {}))
    assert store.result(trial.id)["status"] == "diverged"
    assert store.artifacts(trial.id) == []


def test_a_constant_image_has_a_finite_loss_where_pixels_are_normalised(tmp_path):
    for number in range(10):
        Image.new("L", (8, 8), 25 * number).save(tmp_path / f"{number}.png")
    records = run(workload(images="folder", data=(str(tmp_path),), norm_pix=True, patch=4))
    assert all(math.isfinite(record.metrics["train/loss"]) for record in records)
    assert "nan/first_step" not in records[-1].metrics


def test_a_step_of_micro_batches_and_a_resumed_run_have_the_same_bits(tmp_path):
    config, path = (
        workload(steps=6, accumulate=2, augment={"flip": 0.5, "crop_padding": 1}),
        tmp_path / "c.pt",
    )
    whole = run(config, checkpoints=Checkpoints(path, "trial", 0))
    saved = Checkpoints(path, "trial", 0)  # of the last step before the end
    rest = run(config, checkpoints=saved)
    assert 0 < saved.resumed < 6
    assert [record.metrics["train/loss"] for record in rest] == [
        record.metrics["train/loss"] for record in whole[saved.resumed :]
    ]
    assert rest[-1].metrics["val/loss"] == whole[-1].metrics["val/loss"]
