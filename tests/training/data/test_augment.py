"""Image batches: the same for the same arguments whoever asks, and each change does what it says and no more."""

import numpy as np
import pytest
import torch
from support.mae_example import (
    OPERATIONS,
    Augment,
    ImageSet,
    RandAugment,
    drawn,
    example,
    image_batch,
    open_images,
    validation_images,
    validation_indices,
)

from ablate.training.data.batches import training_batch
from ablate.training.data.corpus import Corpus

PLAIN = Augment(flip=0, normalise=False)
ALL = Augment(
    crop_padding=4, flip=0.5, randaugment=RandAugment(), brightness=0.4, contrast=0.4, saturation=0.4
)


def coloured(count: int = 200, size: int = 12) -> ImageSet:
    """Random pixels; the first of an image is its number."""
    pixels = np.random.default_rng(0).integers(0, 256, (count, 3, size, size), dtype=np.uint8)
    pixels[:, 0, 0, 0] = np.arange(count)
    return ImageSet(pixels, pixels[::10])


def before(images: ImageSet, count: int = 64) -> torch.Tensor:
    return image_batch(images, 0, 0, 0, count, PLAIN)


# --- the order ------------------------------------------------------------------------------------


def test_a_batch_is_a_function_of_seed_step_and_micro_batch():
    images = coloured()
    first = image_batch(images, 1, 2, 3, 8, ALL)
    image_batch(images, 9, 9, 9, 8, ALL)
    assert torch.equal(image_batch(images, 1, 2, 3, 8, ALL), first)
    for other in ((0, 2, 3), (1, 3, 3), (1, 2, 4)):
        assert not torch.equal(drawn(images, *other, 8), drawn(images, 1, 2, 3, 8))
        assert not torch.equal(image_batch(images, *other, 8, ALL), first)


def test_the_changes_of_one_image_differ_by_seed_step_micro_batch_and_place_in_the_batch():
    one = ImageSet(coloured().train[:1], coloured().val)
    changed = [image_batch(one, *where, 2, ALL) for where in ((0, 0, 0), (1, 0, 0), (0, 1, 0), (0, 0, 1))]
    assert len({image.numpy().tobytes() for batch in changed for image in batch}) == 8


def test_no_bits_are_drawn_for_two_things(monkeypatch):
    asked, draw = [], example.draws
    monkeypatch.setattr(example, "draws", lambda *key: asked.append(key) or draw(*key))
    image_batch(coloured(), 0, 0, 0, 4, ALL)
    assert len(asked) == len(set(asked)) == 6  # which, crop, flip, two operations, colours


@pytest.mark.parametrize("workers", [1, 2, 3, 5])
def test_the_order_is_the_same_whatever_the_number_of_workers(workers):
    """A worker does every n-th step; together they see what one alone sees, images and text alike."""
    images, tokens = coloured(), np.arange(500, dtype=np.uint16)
    corpus = Corpus(tokens, tokens, 500, "0", None)

    def seen(step: int) -> tuple[torch.Tensor, ...]:
        return image_batch(images, 7, step, 0, 4, ALL), training_batch(corpus, 7, step, 0, 4, 8)[0]

    alone = [seen(step) for step in range(12)]
    shared = {step: seen(step) for worker in range(workers) for step in range(worker, 12, workers)}
    for step, (pictures, text) in enumerate(alone):
        assert torch.equal(shared[step][0], pictures)
        assert torch.equal(shared[step][1], text)


def test_no_global_generator_is_read_or_moved():
    torch.manual_seed(1)
    state, first = torch.random.get_rng_state(), image_batch(coloured(), 0, 0, 0, 8, ALL)
    assert torch.equal(torch.random.get_rng_state(), state)
    torch.manual_seed(2)
    assert torch.equal(image_batch(coloured(), 0, 0, 0, 8, ALL), first)


def test_which_images_are_drawn_does_not_depend_on_the_augmentation_and_reaches_all():
    images = coloured()
    batch = image_batch(images, 0, 0, 0, 64, PLAIN)
    assert torch.equal((batch[:, 0, 0, 0] * 255).round().long(), drawn(images, 0, 0, 0, 64))
    assert len({int(n) for step in range(40) for n in drawn(images, 0, step, 0, 64)}) == 200


def test_a_larger_batch_begins_with_the_smaller_one():
    assert torch.equal(
        image_batch(coloured(), 0, 0, 0, 4, ALL), image_batch(coloured(), 0, 0, 0, 16, ALL)[:4]
    )


# --- the changes ----------------------------------------------------------------------------------


def test_without_changes_a_batch_is_the_pixels():
    images = coloured()
    assert torch.equal(
        (before(images) * 255).round().byte(), torch.from_numpy(images.train)[drawn(images, 0, 0, 0, 64)]
    )


def test_normalised_images_have_mean_0_and_deviation_1():
    images = open_images("photos")
    batch = torch.cat([image_batch(images, 0, step, 0, 256, Augment(flip=0)) for step in range(20)])
    torch.testing.assert_close(
        batch.mean((0, 2, 3)), torch.zeros(3), atol=0.03, rtol=0
    )  # 5,120 correlated crops
    torch.testing.assert_close(batch.std((0, 2, 3)), torch.ones(3), atol=0.03, rtol=0)


def test_half_of_the_images_are_flipped_and_a_flip_is_a_mirror():
    images = coloured()
    old, new = before(images, 512), image_batch(images, 0, 0, 0, 512, Augment(flip=0.5, normalise=False))
    flipped = (new != old).flatten(1).any(1)
    assert torch.equal(new[flipped], old[flipped].flip(-1))
    assert 200 < int(flipped.sum()) < 312  # 5 standard deviations around 256
    assert torch.equal(image_batch(images, 0, 0, 0, 512, Augment(flip=1.0, normalise=False)), old.flip(-1))


def test_a_crop_is_a_window_of_the_image_in_a_black_margin_and_reaches_every_place():
    images = coloured()
    old, new = (
        before(images, 512),
        image_batch(images, 0, 0, 0, 512, Augment(flip=0, crop_padding=2, normalise=False)),
    )
    wide = torch.nn.functional.pad(old, (2, 2, 2, 2))
    found = set()
    for image, padded in zip(new, wide, strict=True):
        windows = {
            (y, x)
            for y in range(5)
            for x in range(5)
            if torch.equal(padded[:, y : y + 12, x : x + 12], image)
        }
        assert len(windows) == 1
        found |= windows
    assert len(found) == 25


@pytest.mark.parametrize("name", ["brightness", "contrast", "saturation"])
def test_a_colour_change_keeps_what_it_is_not_about(name):
    """Pixels between 1/4 and 3/4, so that nothing is cut off; a factor in [.8, 1.2]."""
    images = coloured()
    images.train[:] = 64 + images.train // 2
    old, new = (
        before(images),
        image_batch(images, 0, 0, 0, 64, Augment(flip=0, normalise=False, **{name: 0.2})),
    )
    weights = torch.tensor([0.299, 0.587, 0.114]).view(1, 3, 1, 1)
    grey = (old * weights).sum(1, keepdim=True)
    centre = {"brightness": torch.zeros(1), "contrast": grey.mean((2, 3), keepdim=True), "saturation": grey}[
        name
    ]
    factors = ((new - centre) / (old - centre))[(old - centre).abs() > 0.05]
    assert 0.8 - 1e-3 <= factors.min() < 0.85
    assert 1.15 < factors.max() <= 1.2 + 1e-3
    one = ((new - centre) / (old - centre)).where((old - centre).abs() > 0.05, torch.nan)[0]
    assert one[~one.isnan()].std() < 1e-4  # one factor an image


@pytest.mark.parametrize("name", OPERATIONS)
def test_an_operation_keeps_the_shape_and_the_range_and_does_nothing_at_strength_0(name):
    old = before(coloured(), 8)
    for strength in (-1.0, 0.0, 0.5, 1.0):
        new = OPERATIONS[name](old, torch.full((8,), strength))
        assert new.shape == old.shape
        assert 0 <= new.min() <= new.max() <= 1 + 1e-6
        if strength == 0:
            torch.testing.assert_close(new, old, atol=1e-5, rtol=0)
        elif name != "identity":
            assert not torch.allclose(new, old, atol=1e-2)


def test_posterize_keeps_the_high_bits_and_solarize_inverts_what_is_bright():
    levels = torch.arange(256).float().view(1, 1, 16, 16) / 255
    kept = OPERATIONS["posterize"](levels, torch.ones(1)) * 255
    assert kept.round().int().flatten().tolist() == [level & 0xF0 for level in range(256)]
    turned = OPERATIONS["solarize"](levels, torch.full((1,), 0.5)) * 255
    assert turned.round().int().flatten().tolist() == [
        level if level < 128 else 255 - level for level in range(256)
    ]


def test_a_translation_of_half_moves_the_image_by_that_share():
    old = before(coloured(), 2)
    new = OPERATIONS["translate_x"](old, torch.full((2,), 1 / 0.9 / 12 * 2 * 3))  # three of twelve pixels
    torch.testing.assert_close(new[..., :9], old[..., 3:], atol=1e-5, rtol=0)
    torch.testing.assert_close(new[..., 9:], torch.zeros(2, 3, 12, 3), atol=1e-5, rtol=0)


def test_every_operation_is_drawn_and_one_an_image():
    images = coloured()
    old = before(images, 256)
    new = image_batch(
        images, 0, 0, 0, 256, Augment(flip=0, normalise=False, randaugment=RandAugment(ops=1, magnitude=10))
    )
    counts = dict.fromkeys(OPERATIONS, 0)
    for n in range(256):
        for name, operation in OPERATIONS.items():
            same = [
                torch.allclose(operation(old[n : n + 1], torch.full((1,), s)), new[n : n + 1], atol=1e-6)
                for s in (-1.0, 1.0)
            ]
            counts[name] += any(same)
    assert min(counts.values()) >= 8  # 23 expected of each
    assert sum(counts.values()) == 256


# --- validation -----------------------------------------------------------------------------------


def test_validation_images_are_evenly_spaced_and_never_changed():
    images = coloured()
    batches = validation_images(images, 10, 4, ALL)
    assert [len(batch) for batch in batches] == [4, 4, 2]
    assert validation_indices(images, 10).tolist() == list(range(0, 20, 2))
    plain = torch.cat(validation_images(images, 10, 4, PLAIN))
    assert torch.equal((plain * 255).round().byte(), torch.from_numpy(images.val[::2]))
    torch.testing.assert_close(torch.cat(batches), (plain - images.mean) / images.deviation)
    assert len(torch.cat(validation_images(images, 1000, 64, ALL))) == 20
