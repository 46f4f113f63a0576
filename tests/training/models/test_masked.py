"""A masked autoencoder: exactly the masks that its counter says, a loss of the masked patches alone, and pixels put back as they were."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from support.gpt_runs import UNMEASURED
from support.workloads import SMALL

from ablate.numerics.philox import Clock
from ablate.recipes import PRESETS
from ablate.training.data import open_images
from ablate.training.data.montage import montage
from ablate.training.models.masked import (
    Reconstruction,
    autoencoder,
    batches,
    blank_loss,
    mask_order,
    masks,
    patchify,
    positions,
    psnr,
    reconstruct,
    unpatchify,
    validation,
)
from ablate.training.workloads.mae import Mae

CPU = torch.device("cpu")


def mae(**fields) -> Mae:
    return Mae.model_validate(SMALL["mae"](None).model_dump() | fields)


def built(workload: Mae, seed: int = 0):
    channels, side, _ = workload.opened.shape
    return autoencoder(workload, channels, side, seed, CPU)


def pieces(image: np.ndarray, patch: int) -> np.ndarray:
    """[patches, pixels] of one image [channels, side, side], by loops: row by row, a pixel's channels together."""
    grid = image.shape[1] // patch
    return np.stack(
        [
            image[:, row * patch : (row + 1) * patch, column * patch : (column + 1) * patch]
            .transpose(1, 2, 0)
            .ravel()
            for row in range(grid)
            for column in range(grid)
        ]
    )


# --- masks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("ratio", [0.5, 0.75, 0.9, 1 / 64, 0.33])
def test_exactly_so_many_patches_are_masked_as_the_ratio_says_by_us_and_by_the_model(ratio):
    workload = mae(patch=1, mask_ratio=ratio)
    order = mask_order(3, 5, 1, 7, 64)
    masked = masks(order, workload.visible)
    assert masked.sum(1).tolist() == [round(64 * ratio)] * 7
    found = built(workload)(pixel_values=torch.zeros(7, 1, 8, 8), noise=order)
    assert torch.equal(found.mask.bool(), masked)


def test_the_model_keeps_as_many_as_are_meant_where_floats_would_lose_one(tmp_path):
    """100 (1 - .9) is 9.999... in binary: one visible patch fewer, and masks that are not ours."""
    for number in range(10):
        Image.new("L", (10, 10), 25 * number).save(tmp_path / f"{number}.png")
    workload = mae(data={"folder": str(tmp_path), "size": 10}, patch=1, mask_ratio=0.9)
    order = mask_order(0, 0, 0, 2, 100)
    found = built(workload)(pixel_values=torch.zeros(2, 3, 10, 10), noise=order)
    assert torch.equal(found.mask.bool(), masks(order, workload.visible))
    assert found.mask.sum(1).tolist() == [90, 90]


def test_masks_are_their_seeds_steps_and_micro_batches_and_those_of_validation_apart():
    calls = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    drawn = [mask_order(*call, 4, 16) for call in calls] + [mask_order(0, 0, 0, 4, 16, 1)]
    assert len({tuple(order.flatten().tolist()) for order in drawn}) == 5
    assert torch.equal(drawn[0], mask_order(0, 0, 0, 4, 16))
    assert all(len(set(image)) == 16 for order in drawn for image in order.tolist())


def test_every_patch_is_masked_as_often_as_any_other():
    """4,000 images, 12 of 16 masked: 3,000 each, standard deviation 27; five of those."""
    counts = masks(mask_order(0, 0, 0, 4000, 16), 4).sum(0)
    assert (counts - 3000).abs().max() < 140


def test_every_arm_of_a_seed_sees_the_same_images_and_masks_and_validation_is_every_seeds():
    workload = mae()
    one, other, seed = (
        workload.subject(PRESETS[name](), Clock(seed), CPU)
        for name, seed in (("bf16", 4), ("quartet2", 4), ("bf16", 5))
    )
    assert all(torch.equal(a, b) for a, b in zip(one.batch(3, 1), other.batch(3, 1), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(one.batch(3, 1), seed.batch(3, 1), strict=True))
    for there in (other, seed):
        assert all(
            torch.equal(a, b)
            for mine, its in zip(one.validation, there.validation, strict=True)
            for a, b in zip(mine, its, strict=True)
        )


# --- the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"norm_pix": True}, {"data": "photos", "patch": 8}], ids=["grey", "normalised", "colour"]
)
def test_the_loss_is_the_mean_squared_error_over_masked_patches_alone(fields):
    workload = mae(**fields)
    subject = workload.subject(PRESETS["bf16"](), Clock(0), CPU)
    images, order = subject.batch(0, 0)
    logits = subject.model(pixel_values=images, noise=order).logits.detach().double().numpy()
    errors = []
    for image, keys, guess in zip(images.double().numpy(), order.numpy(), logits, strict=True):
        target = pieces(image, workload.patch)
        if workload.norm_pix:
            target = (target - target.mean(1, keepdims=True)) / np.sqrt(
                target.var(1, ddof=1, keepdims=True) + 1e-6
            )
        hidden = np.argsort(keys)[workload.visible :]
        errors += [((guess[patch] - target[patch]) ** 2).mean() for patch in hidden]
    assert subject.loss(subject.model, images, order).item() == pytest.approx(np.mean(errors), rel=1e-5)


def test_what_is_masked_is_not_seen():
    workload = mae()
    model, (images, order) = built(workload), next(validation(mae(), open_images("digits")))
    hidden = unpatchify(masks(order, workload.visible).unsqueeze(-1).expand(-1, -1, 4).float(), 2, 1)
    changed = torch.where(hidden > 0, torch.tensor(9.0), images)
    assert not torch.equal(changed, images)
    assert torch.equal(
        model(pixel_values=changed, noise=order).logits, model(pixel_values=images, noise=order).logits
    )


def test_positions_are_sines_and_cosines_of_column_and_row():
    table = positions(3, 8)[0].double().numpy()
    assert table.shape == (10, 8)
    assert not table[0].any()
    for row in range(3):
        for column in range(3):
            angles = [[place * 10000 ** (-i / 2) for i in range(2)] for place in (column, row)]
            expected = [f(angle) for line in angles for f in (math.sin, math.cos) for angle in line]
            assert table[1 + 3 * row + column] == pytest.approx(expected, abs=1e-6)


def test_masked_patches_are_told_apart_and_training_moves_no_position():
    """The library's own initialisation leaves both position embeddings at 0: then all masked patches would get one prediction."""
    workload = mae(steps=3)
    run = workload.prepare(PRESETS["nvfp4"](), 0, "cpu")
    names = ("vit.embeddings.position_embeddings", "decoder.decoder_pos_embed")
    before = {name: run.model.get_parameter(name).clone() for name in names}
    assert all(torch.equal(before[name], positions(4, before[name].shape[-1])) for name in names)
    images, order = run.validation[0]
    with run.engine.high_precision():
        guess = run.model(pixel_values=images, noise=order).logits[0, masks(order, workload.visible)[0]]
    assert len(torch.unique(guess, dim=0)) == len(guess) == 12
    list(workload.train(run, UNMEASURED))
    assert all(torch.equal(before[name], run.model.get_parameter(name)) for name in names)


def test_initial_weights_are_the_seeds_alone_and_leave_the_global_generator():
    torch.random.default_generator.manual_seed(1)
    before = torch.random.get_rng_state()
    first, other = built(mae(), 3).state_dict(), built(mae(), 4).state_dict()
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.random.default_generator.manual_seed(2)
    again = built(mae(), 3).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if first[name].std() > 0 and "pos" not in name]
    assert len(drawn) == 6 * 2 + 5  # each block's matrices, patches, decoder in and out, two tokens
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    weight = first["vit.layers.0.mlp.fc1.weight"]
    assert weight.abs().max() <= math.sqrt(6 / sum(weight.shape))
    assert weight.std() == pytest.approx(math.sqrt(2 / sum(weight.shape)), rel=0.05)


# --- pixels ---------------------------------------------------------------------------------------


def test_patches_are_those_of_the_loops_and_of_the_model_and_go_back():
    workload = mae(data="photos", patch=8)
    images, _ = next(validation(workload, workload.opened))
    found = patchify(images, 8)
    assert torch.equal(found[1], torch.from_numpy(pieces(images[1].numpy(), 8)))
    assert torch.equal(found, built(workload).patchify(images))
    assert torch.equal(unpatchify(found, 8, 3), images)


class Oracle(torch.nn.Module):
    """A model that knows the answer, but for an error in all predicted values."""

    def __init__(self, workload: Mae, error: float) -> None:
        super().__init__()
        self.workload, self.error = workload, error

    def forward(self, pixel_values, noise):
        target = torch.stack(
            [torch.from_numpy(pieces(image.numpy(), self.workload.patch)) for image in pixel_values]
        )
        if self.workload.norm_pix:
            target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
        return type("Output", (), {"logits": target + self.error})


@pytest.mark.parametrize("norm_pix", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("images", ["digits", "photos"])
def test_a_perfect_prediction_is_the_original_and_visible_patches_are_never_predicted(
    images, normalise, norm_pix
):
    workload = mae(data=images, patch=4, augment={"normalise": normalise}, norm_pix=norm_pix)
    batch = next(validation(workload, workload.opened))
    perfect = reconstruct(Oracle(workload, 0.0), workload, workload.opened, batch)
    raw = torch.from_numpy(workload.opened.val[:1]).float() / 255
    assert perfect.original[:1].numpy() == pytest.approx(raw.numpy(), abs=1e-6)
    assert perfect.reconstruction.numpy() == pytest.approx(perfect.original.numpy(), abs=1e-5)
    off = reconstruct(Oracle(workload, 5.0), workload, workload.opened, batch)
    hidden = (
        unpatchify(off.masked.unsqueeze(-1).expand(-1, -1, 16 * raw.shape[1]).float(), 4, raw.shape[1]) > 0
    )
    assert torch.equal(off.reconstruction[~hidden], off.original[~hidden])
    assert (off.reconstruction[hidden] >= off.original[hidden]).all()
    assert off.reconstruction[hidden].mean() > 1.2 * off.original[hidden].mean()
    assert (off.visible[hidden] == 0.5).all()
    assert torch.equal(off.visible[~hidden], off.original[~hidden])


def test_decibels_are_of_masked_pixels_alone():
    original = torch.zeros(1, 1, 4, 4)
    guess = torch.zeros(1, 1, 4, 4)
    guess[0, 0, :2, :2] = 0.1
    guess[0, 0, 2:, 2:] = 9.0  # a visible patch
    masked = torch.tensor([[True, True, False, False]])
    assert psnr([Reconstruction(original, original, guess, masked)], 2) == pytest.approx(
        -10 * math.log10(0.01 / 2)
    )
    assert psnr([Reconstruction(original, original, original, masked)], 2) == math.inf


@pytest.mark.parametrize("images", ["digits", "photos"])
def test_the_blank_guess_is_the_mean_of_what_is_visible_channel_by_channel(images):
    workload = mae(data=images, patch=4)
    errors = []
    for pixels, order in validation(workload, workload.opened):
        for image, keys in zip(pixels.double().numpy(), order.numpy(), strict=True):
            parts = pieces(image, 4).reshape(len(keys), 16, -1)
            place = np.argsort(keys)
            mean = parts[place[: workload.visible]].mean((0, 1))
            errors += [((parts[patch] - mean) ** 2).mean() for patch in place[workload.visible :]]
    assert blank_loss(workload, workload.opened) == pytest.approx(np.mean(errors), rel=1e-5)


def test_under_normalised_pixels_the_blank_guess_is_each_patchs_own_mean():
    """Its loss is the variance that is left of a normalised patch, 15/16 of 16 pixels, where none is flat."""
    workload = mae(data="photos", patch=4, norm_pix=True)
    assert 0.93 < blank_loss(workload, workload.opened) <= 47 / 48


def test_batches_lie_on_their_device_in_the_shapes_that_they_should():
    workload = mae(batch=3)
    batch, held = batches(workload, workload.opened, 0, CPU)
    images, order = batch(0, 0)
    assert (images.shape, images.dtype, order.shape) == ((3, 1, 8, 8), torch.float32, (3, 16))
    assert sum(len(images) for images, _ in held) == workload.eval_tokens // 16


def test_a_montage_has_every_image_at_its_place_in_whole_squares(tmp_path):
    red, grey = np.zeros((3, 2, 2), np.float32), np.full((1, 2, 2), 0.5, np.float32)
    red[0] = 1.0
    montage(tmp_path / "a.png", ("one", "two"), [[red, grey], [grey, red]], "below")
    with Image.open(tmp_path / "a.png") as image:
        found = np.asarray(image)
    top, tile, gap = 26, 128, 6
    for row in range(2):
        for column in range(2):
            at = found[
                top + row * (tile + gap) : top + row * (tile + gap) + tile,
                gap + column * (tile + gap) : gap + column * (tile + gap) + tile,
            ]
            assert (at == ([255, 0, 0] if row == column else [128, 128, 128])).all()
    assert (found[:top] < 128).any()  # letters
    assert (found[-top:] < 128).any()
