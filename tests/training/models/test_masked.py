"""A masked autoencoder: exactly the masks that its counter says, a loss of the masked patches alone, and pixels put back as they were."""

import math

import numpy as np
import pytest
import torch
from PIL import Image
from support.mae_example import (
    Reconstruction,
    autoencoder,
    blank_loss,
    mask_order,
    masks,
    montage,
    open_images,
    patchify,
    positions,
    psnr,
    reconstruct,
    run,
    small,
    unpatchify,
    validation,
    visible_of,
    workload,
)
from transformers import ViTMAEForPreTraining

from ablate.training.checkpoints import Checkpoints


def opened(config, *data):
    return open_images(config.images, data)


def built(config, *data, seed: int = 0):
    return autoencoder(config, opened(config, *data), seed)


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
    config = small(patch=1, mask_ratio=ratio)
    order = mask_order(3, 5, 1, 7, 64)
    masked = masks(order, visible_of(config, opened(config)))
    assert masked.sum(1).tolist() == [round(64 * ratio)] * 7
    found = built(config)(pixel_values=torch.zeros(7, 1, 8, 8), noise=order)
    assert torch.equal(found.mask.bool(), masked)


def test_the_model_keeps_as_many_as_are_meant_where_floats_would_lose_one(tmp_path):
    """100 (1 - .9) is 9.999... in binary: one visible patch fewer, and masks that are not ours."""
    for number in range(10):
        Image.new("L", (10, 10), 25 * number).save(tmp_path / f"{number}.png")
    config = small(images="folder", patch=1, mask_ratio=0.9)
    order = mask_order(0, 0, 0, 2, 100)
    found = built(config, tmp_path)(pixel_values=torch.zeros(2, 3, 10, 10), noise=order)
    assert torch.equal(found.mask.bool(), masks(order, visible_of(config, opened(config, tmp_path))))
    assert found.mask.sum(1).tolist() == [90, 90]


def test_masks_are_their_seeds_steps_and_micro_batches_and_those_of_validation_apart():
    calls = [(0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1)]
    drawn = [mask_order(*call, 4, 16) for call in calls] + [mask_order(0, 0, 0, 4, 16, "validation")]
    assert len({tuple(order.flatten().tolist()) for order in drawn}) == 5
    assert torch.equal(drawn[0], mask_order(0, 0, 0, 4, 16))
    assert all(len(set(image)) == 16 for order in drawn for image in order.tolist())


def test_every_patch_is_masked_as_often_as_any_other():
    """4,000 images, 12 of 16 masked: 3,000 each, standard deviation 27; five of those."""
    counts = masks(mask_order(0, 0, 0, 4000, 16), 4).sum(0)
    assert (counts - 3000).abs().max() < 140


def test_every_arm_of_a_seed_sees_the_same_images_and_masks_and_validation_is_every_seeds(monkeypatch):
    """Images and masks that the model is called with."""
    calls: list[bytes] = []
    forward = ViTMAEForPreTraining.forward

    def noted(self, pixel_values, noise):
        calls.append(pixel_values.numpy().tobytes() + noise.numpy().tobytes())
        return forward(self, pixel_values=pixel_values, noise=noise)

    monkeypatch.setattr(ViTMAEForPreTraining, "forward", noted)
    seen = {}
    for recipe, seed in (("bf16", 4), ("quartet2", 4), ("bf16", 5)):
        calls.clear()
        run(workload(steps=1, accumulate=2), recipe, seed)
        seen[recipe, seed] = calls[:2], calls[2:]
    assert len({*seen["bf16", 4][0], *seen["bf16", 5][0]}) == 4
    assert seen["bf16", 4][0] == seen["quartet2", 4][0]
    assert len({tuple(sorted({*held})) for _, held in seen.values()}) == 1


# --- the model ------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "fields", [{}, {"norm_pix": True}, {"images": "photos", "patch": 8}], ids=["grey", "normalised", "colour"]
)
def test_the_loss_is_the_mean_squared_error_over_masked_patches_alone(fields):
    config = small(**fields)
    images, order = validation(config, opened(config))[0]
    found = built(config)(pixel_values=images, noise=order)
    logits = found.logits.detach().double().numpy()
    errors = []
    for image, keys, guess in zip(images.double().numpy(), order.numpy(), logits, strict=True):
        target = pieces(image, config.patch)
        if config.norm_pix:
            target = (target - target.mean(1, keepdims=True)) / np.sqrt(
                target.var(1, ddof=1, keepdims=True) + 1e-6
            )
        hidden = np.argsort(keys)[visible_of(config, opened(config)) :]
        errors += [((guess[patch] - target[patch]) ** 2).mean() for patch in hidden]
    assert found.loss.item() == pytest.approx(np.mean(errors), rel=1e-5)


def test_what_is_masked_is_not_seen():
    config = small()
    model, (images, order) = built(config), validation(config, opened(config))[0]
    masked = masks(order, visible_of(config, opened(config)))
    hidden = unpatchify(masked.unsqueeze(-1).expand(-1, -1, 4).float(), 2, 1)
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


def test_masked_patches_are_told_apart_and_training_moves_no_position(tmp_path):
    """The library's own initialisation leaves both position embeddings at 0: then all masked patches would get one prediction."""
    config = small()
    model = built(config)
    names = ("vit.embeddings.position_embeddings", "decoder.decoder_pos_embed")
    before = {name: model.get_parameter(name).clone() for name in names}
    assert all(torch.equal(before[name], positions(4, before[name].shape[-1])) for name in names)
    images, order = validation(config, opened(config))[0]
    masked = masks(order, visible_of(config, opened(config)))[0]
    guess = model(pixel_values=images, noise=order).logits[0, masked]
    assert len(torch.unique(guess, dim=0)) == len(guess) == 12
    run(workload(steps=3), checkpoints=Checkpoints(tmp_path / "c.pt", "trial", 0))
    trained = Checkpoints(tmp_path / "c.pt", "trial", 0).take()["objects"]["model"]
    assert all(torch.equal(before[name], trained[name]) for name in names)
    assert not torch.equal(trained["vit.layers.0.mlp.fc1.weight"], model.vit.layers[0].mlp.fc1.weight)


def test_initial_weights_are_the_seeds_alone_and_leave_the_global_generator():
    torch.random.default_generator.manual_seed(1)
    before = torch.random.get_rng_state()
    first, other = (built(small(), seed=seed).state_dict() for seed in (3, 4))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.random.default_generator.manual_seed(2)
    again = built(small(), seed=3).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    drawn = [name for name in first if first[name].std() > 0 and "pos" not in name]
    assert len(drawn) == 6 * 2 + 5  # each block's matrices, patches, decoder in and out, two tokens
    assert not any(torch.equal(first[name], other[name]) for name in drawn)
    weight = first["vit.layers.0.mlp.fc1.weight"]
    assert weight.abs().max() <= math.sqrt(6 / sum(weight.shape))
    assert weight.std() == pytest.approx(math.sqrt(2 / sum(weight.shape)), rel=0.05)


# --- pixels ---------------------------------------------------------------------------------------


def test_patches_are_those_of_the_loops_and_of_the_model_and_go_back():
    config = small(images="photos", patch=8)
    images, _ = validation(config, opened(config))[0]
    found = patchify(images, 8)
    assert torch.equal(found[1], torch.from_numpy(pieces(images[1].numpy(), 8)))
    assert torch.equal(found, built(config).patchify(images))
    assert torch.equal(unpatchify(found, 8, 3), images)


class Oracle(torch.nn.Module):
    """A model that knows the answer, but for an error in all predicted values."""

    def __init__(self, config, error: float) -> None:
        super().__init__()
        self.config, self.error = config, error

    def forward(self, pixel_values, noise):
        target = torch.stack(
            [torch.from_numpy(pieces(image.numpy(), self.config.patch)) for image in pixel_values]
        )
        if self.config.norm_pix:
            target = (target - target.mean(-1, keepdim=True)) / (target.var(-1, keepdim=True) + 1e-6).sqrt()
        return type("Output", (), {"logits": target + self.error})


@pytest.mark.parametrize("norm_pix", [False, True])
@pytest.mark.parametrize("normalise", [False, True])
@pytest.mark.parametrize("images", ["digits", "photos"])
def test_a_perfect_prediction_is_the_original_and_visible_patches_are_never_predicted(
    images, normalise, norm_pix
):
    config = small(images=images, patch=4, augment={"normalise": normalise}, norm_pix=norm_pix)
    batch = validation(config, opened(config))[0]
    perfect = reconstruct(Oracle(config, 0.0), config, opened(config), *batch)
    raw = torch.from_numpy(opened(config).val[:1]).float() / 255
    assert perfect.original[:1].numpy() == pytest.approx(raw.numpy(), abs=1e-6)
    assert perfect.reconstruction.numpy() == pytest.approx(perfect.original.numpy(), abs=1e-5)
    off = reconstruct(Oracle(config, 5.0), config, opened(config), *batch)
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
    config = small(images=images, patch=4)
    errors = []
    visible = visible_of(config, opened(config))
    for pixels, order in validation(config, opened(config)):
        for image, keys in zip(pixels.double().numpy(), order.numpy(), strict=True):
            parts = pieces(image, 4).reshape(len(keys), 16, -1)
            place = np.argsort(keys)
            mean = parts[place[:visible]].mean((0, 1))
            errors += [((parts[patch] - mean) ** 2).mean() for patch in place[visible:]]
    assert blank_loss(config, opened(config)) == pytest.approx(np.mean(errors), rel=1e-5)


def test_under_normalised_pixels_the_blank_guess_is_each_patchs_own_mean():
    """Its loss is the variance that is left of a normalised patch, 15/16 of 16 pixels, where none is flat."""
    config = small(images="photos", patch=4, norm_pix=True)
    assert 0.93 < blank_loss(config, opened(config)) <= 47 / 48


def test_validation_batches_have_the_shapes_that_they_should():
    config = small(eval_images=5)
    held = validation(config, opened(config))
    assert [tuple(images.shape) for images, _ in held] == [(2, 1, 8, 8), (2, 1, 8, 8), (1, 1, 8, 8)]
    assert [tuple(order.shape) for _, order in held] == [(2, 16), (2, 16), (1, 16)]
    assert held[0][0].dtype == torch.float32


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
