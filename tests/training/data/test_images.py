"""Image sets: what is read is what was published, nothing in a file is run, splits are disjoint, and bad files are named."""

import os
import pickle

import numpy as np
import pytest
from PIL import Image
from pydantic import ValidationError
from support.mae_example import Config, open_images, unpickle


def pixels(count: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


# --- of scikit-learn ------------------------------------------------------------------------------


def test_the_digits_are_scikit_learns_with_black_0_and_white_255():
    from sklearn.datasets import load_digits

    digits, published = open_images("digits"), load_digits()
    images = np.concatenate([digits.train, digits.val])
    np.testing.assert_array_equal(np.rint(images[:, 0] / 255 * 16), published.images)
    assert (images.min(), images.max(), digits.train.shape) == (0, 255, (1500, 1, 8, 8))


def test_the_photos_are_crops_of_scikit_learns_and_no_training_pixel_is_in_a_validation_crop():
    from sklearn.datasets import load_sample_images

    photos, (china, flower) = open_images("photos"), load_sample_images().images
    windows = [
        np.lib.stride_tricks.sliding_window_view(photo, (32, 32), axis=(0, 1))[::8, ::8]
        for photo in (china, flower)
    ]
    places = [
        {window.tobytes(): (y, x) for y, row in enumerate(view) for x, window in enumerate(row)}
        for view in windows
    ]
    covered = {}
    for part in ("train", "val"):
        covered[part] = np.zeros((2, *china.shape[:2]), dtype=bool)
        for image in getattr(photos, part):
            (label,) = (label for label in (0, 1) if image.tobytes() in places[label])
            y, x = places[label][image.tobytes()]
            covered[part][label, 8 * y : 8 * y + 32, 8 * x : 8 * x + 32] = True
    assert not (covered["train"] & covered["val"]).any()
    assert 2000 < len(photos.train) < 5000
    assert 200 < len(photos.val) < 600
    assert min(image.mean(0).std() for image in photos.train) >= 8


@pytest.mark.parametrize("name", ["digits", "photos"])
def test_the_moments_are_those_of_the_training_images(name):
    images = open_images(name)
    np.testing.assert_allclose(images.mean.flatten(), (images.train / 255.0).mean((0, 2, 3)), rtol=1e-6)
    np.testing.assert_allclose(images.deviation.flatten(), (images.train / 255.0).std((0, 2, 3)), rtol=1e-6)


# --- CIFAR as published ---------------------------------------------------------------------------

NAMES = {
    10: ([f"data_batch_{n}" for n in range(1, 6)], ["test_batch"]),
    100: (["train"], ["test"]),
}


def published(folder, classes: int, form: str, protocol: int = 2) -> dict[str, np.ndarray]:
    """Tiny files in the published layout; returns what they hold."""
    folder.mkdir(parents=True, exist_ok=True)
    held = {}
    for part, names in zip(("train", "test"), NAMES[classes], strict=True):
        contents = []
        for number, name in enumerate(names):
            data, fine, coarse = pixels(3, number), np.array([number, 9, 1]), np.array([number, 2, 19])
            if form == "binary":
                labels = [fine] if classes == 10 else [coarse, fine]
                rows = np.concatenate([np.stack(labels, 1).astype(np.uint8), data], 1)
                (folder / f"{name}.bin").write_bytes(rows.tobytes())
            else:
                table = {b"data": data, b"filenames": [b"a.png"] * 3}
                table |= (
                    {b"labels": fine.tolist()}
                    if classes == 10
                    else {b"fine_labels": fine.tolist(), b"coarse_labels": coarse.tolist()}
                )
                (folder / name).write_bytes(pickle.dumps(table, protocol=protocol))
            contents.append(data.reshape(-1, 3, 32, 32))
        held[part] = np.concatenate(contents)
    return held


@pytest.mark.parametrize("form", ["binary", "pickle"])
@pytest.mark.parametrize("inner", ["", "published"])
def test_cifar10_is_read_as_published(tmp_path, form, inner):
    inner = inner and {"binary": "cifar-10-batches-bin", "pickle": "cifar-10-batches-py"}[form]
    held = published(tmp_path / inner, 10, form)
    images = open_images("cifar10", (tmp_path,))
    np.testing.assert_array_equal(images.train, held["train"])
    np.testing.assert_array_equal(images.val, held["test"])


@pytest.mark.parametrize("form", ["binary", "pickle"])
def test_cifar100_is_read_as_published(tmp_path, form):
    held = published(tmp_path, 100, form)
    images = open_images("cifar100", (tmp_path,))
    np.testing.assert_array_equal(images.train, held["train"])
    np.testing.assert_array_equal(images.val, held["test"])


class Attack:
    def __reduce__(self):
        return os.mkdir, ("struck",)


def test_a_pickle_that_would_run_something_is_refused_and_does_not_run_it(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    published(tmp_path, 100, "pickle")
    (tmp_path / "train").write_bytes(pickle.dumps({b"data": Attack()}, protocol=2))
    with pytest.raises(
        ValueError, match=r"train: refused: this pickle would call posix\.mkdir; only numpy arrays"
    ):
        open_images("cifar100", (tmp_path,))
    assert not (tmp_path / "struck").exists()


@pytest.mark.parametrize(
    "name", ["builtins eval", "builtins getattr", "os system", "numpy load", "numpy.core.multiarray fromfile"]
)
def test_nothing_but_the_makers_of_arrays_can_be_named(name):
    with pytest.raises(ValueError, match="refused"):
        unpickle(f"c{name.replace(' ', chr(10))}\n(tR.".encode(), "x")


@pytest.mark.parametrize(
    "content", [b"", b"\x80", b"no pickle", pickle.dumps({b"data": pixels(3)}, protocol=2)[:200]]
)
def test_a_torn_pickle_is_told_in_a_sentence(content):
    with pytest.raises(ValueError, match=r"^x: not a whole pickle"):
        unpickle(content, "x")


@pytest.mark.parametrize(
    "content",
    [
        {},
        [],
        {b"data": 1, b"labels": [1]},
        {b"data": pixels(3), b"labels": [1]},
        {b"data": pixels(1).astype(float), b"labels": [1]},
    ],
)
def test_a_pickle_of_something_else_is_told_in_a_sentence(tmp_path, content):
    published(tmp_path, 10, "pickle")
    (tmp_path / "data_batch_3").write_bytes(pickle.dumps(content, protocol=2))
    with pytest.raises(ValueError, match=r"data_batch_3: not a batch of CIFAR"):
        open_images("cifar10", (tmp_path,))


def test_a_truncated_binary_file_is_named(tmp_path):
    published(tmp_path, 10, "binary")
    with (tmp_path / "data_batch_2.bin").open("r+b") as file:
        file.truncate(3073 + 5)
    with pytest.raises(
        ValueError, match=r"data_batch_2\.bin: 3078 bytes are not a whole number of images of 3073"
    ):
        open_images("cifar10", (tmp_path,))


def test_a_missing_part_and_a_folder_without_any_are_told(tmp_path):
    published(tmp_path, 10, "binary")
    (tmp_path / "test_batch.bin").unlink()
    with pytest.raises(OSError, match=r"test_batch\.bin is missing beside data_batch_1\.bin"):
        open_images("cifar10", (tmp_path,))
    with pytest.raises(OSError, match=r"no data_batch_1\.bin or data_batch_1 of cifar10 there"):
        open_images("cifar10", (tmp_path / "none",))


def test_a_class_beyond_the_last_is_told(tmp_path):
    published(tmp_path, 10, "binary")
    (tmp_path / "test_batch.bin").write_bytes(bytes([200]) + pixels(1).tobytes())
    with pytest.raises(ValueError, match="has a class 200; there are 10"):
        open_images("cifar10", (tmp_path,))


# --- folders --------------------------------------------------------------------------------------


def pictures(folder, count: int, size: int = 8, seed: int = 0, suffix: str = "png") -> list[np.ndarray]:
    folder.mkdir(parents=True, exist_ok=True)
    made = [
        np.random.default_rng(seed + n).integers(0, 256, (size, size, 3), dtype=np.uint8)
        for n in range(count)
    ]
    for number, picture in enumerate(made):
        Image.fromarray(picture).save(folder / f"{number:02}.{suffix}")
    return made


def test_every_tenth_file_of_a_folder_validates(tmp_path):
    cats, dogs = pictures(tmp_path / "cat", 10), pictures(tmp_path / "dog", 10, seed=50)
    images = open_images("folder", (tmp_path,))
    assert [len(images.train), len(images.val)] == [18, 2]
    np.testing.assert_array_equal(images.train[0], cats[0].transpose(2, 0, 1))
    np.testing.assert_array_equal(images.val, np.stack([cats[9], dogs[9]]).transpose(0, 3, 1, 2))


def test_folders_train_and_val_are_the_split(tmp_path):
    train, val = pictures(tmp_path / "train" / "a", 2), pictures(tmp_path / "val", 1, seed=9)
    images = open_images("folder", (tmp_path,))
    np.testing.assert_array_equal(images.train, np.stack(train).transpose(0, 3, 1, 2))
    np.testing.assert_array_equal(images.val, np.stack(val).transpose(0, 3, 1, 2))


def test_a_file_of_another_size_and_a_corrupt_one_are_named(tmp_path):
    pictures(tmp_path, 12)
    pictures(tmp_path / "more", 1, size=9)
    with pytest.raises(ValueError, match=r"more/00\.png: is 9x9 pixels, not 8x8"):
        open_images("folder", (tmp_path,))
    (tmp_path / "more" / "00.png").write_bytes((tmp_path / "01.png").read_bytes()[:60])
    with pytest.raises(ValueError, match=r"more/00\.png: not an image that can be read"):
        open_images("folder", (tmp_path,))
    (tmp_path / "more" / "00.png").write_text("GIF89a")
    with pytest.raises(ValueError, match=r"more/00\.png: not an image that can be read"):
        open_images("folder", (tmp_path,))


def test_a_folder_that_is_not_there_or_holds_too_little_is_told(tmp_path):
    with pytest.raises(OSError, match="nowhere: no such folder"):
        open_images("folder", (tmp_path / "nowhere",))
    pictures(tmp_path, 3)
    with pytest.raises(ValueError, match=r"3 images .*; it takes 10"):
        open_images("folder", (tmp_path,))
    with pytest.raises(ValueError, match=r"are read from one folder; give it under `data:`"):
        open_images("folder")


# --- datasets -------------------------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore")
def test_a_dataset_in_a_local_folder_is_read_by_the_library(tmp_path):
    pytest.importorskip("datasets")
    cats = pictures(tmp_path / "cat", 10)
    pictures(tmp_path / "dog", 10, seed=50)
    images = open_images("dataset", (tmp_path,))
    assert [len(images.train), len(images.val)] == [18, 2]
    np.testing.assert_array_equal(images.train[0], cats[0].transpose(2, 0, 1))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(
    ("column", "val_split", "said"),
    [
        ("img", None, r"split train, row 0: no image in column 'img'; there are image, label$"),
        ("image", "nope", r"nope"),
        ("image", None, r"3 images to train on and 0 to validate on; it takes 10, or a part of its own"),
    ],
)
def test_a_dataset_of_too_few_images_or_other_columns_is_told_in_one_sentence(
    tmp_path, column, val_split, said
):
    pytest.importorskip("datasets")
    pictures(tmp_path / "cat", 2)
    pictures(tmp_path / "dog", 1, seed=50)
    with pytest.raises((OSError, ValueError), match=said) as error:
        open_images("dataset", (tmp_path,), column, val_split)
    assert "\n" not in str(error.value)


@pytest.mark.filterwarnings("ignore")
def test_a_cell_without_an_image_is_named(tmp_path):
    datasets = pytest.importorskip("datasets")
    kinds = datasets.Features({"image": datasets.Image(), "label": datasets.Value("int64")})
    datasets.Dataset.from_dict({"image": [None] * 12, "label": [0] * 12}, features=kinds).to_parquet(
        tmp_path / "train.parquet"
    )
    with pytest.raises(ValueError, match=r"split train, row 0: no image in column 'image'"):
        open_images("dataset", (tmp_path,))


# --- the words ------------------------------------------------------------------------------------


@pytest.mark.parametrize("keys", [{"images": "digit"}, {"images": {"folder": "x"}}, {"folder": "x"}])
def test_a_source_that_is_none_is_refused_once_with_what_there_is(keys):
    with pytest.raises(ValidationError) as error:
        Config.model_validate(keys)
    assert error.value.error_count() == 1
