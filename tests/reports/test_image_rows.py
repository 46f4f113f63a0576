"""Tables of images that arms made of the same inputs."""

import base64
import io
import re
import zipfile

import numpy as np
import pytest
from PIL import Image

from ablate.reports.image_rows import ImageRows, image_rows

DRAWS = np.random.default_rng(0)
ORIGINAL = DRAWS.integers(60, 190, (3, 1, 8, 8), dtype=np.uint8)
VISIBLE = np.where(DRAWS.random((3, 1, 8, 8)) < 0.5, 128, ORIGINAL).astype(np.uint8)


def left(folder, name: str, error: int, visible=VISIBLE):
    """The file of an arm whose every pixel is off by `error`."""
    path = folder / f"{name}.npz"
    decibels = np.full(3, 20 * np.log10(255 / error))
    np.savez(path, original=ORIGINAL, visible=visible, reconstruction=ORIGINAL + error, decibels=decibels)
    return path


def decoded(html: str) -> dict[str, np.ndarray]:
    """Images of a page by their text alternative, [height, width, 3]."""
    found = re.findall(r'<img alt="([^"]*)" src="data:image/png;base64,([^"]+)">', html)
    return {alt: np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))) for alt, data in found}


def test_rows_are_images_and_errors_are_magnified_by_the_factor_that_is_stated(tmp_path):
    (table,) = image_rows({"bf16": left(tmp_path, "a", 3), "nvfp4": left(tmp_path, "b", 10)})
    html, images = table.html(), decoded(table.html())
    assert html.count("<tr>") == 1 + 3
    for name, error in (("bf16", 3), ("nvfp4", 10)):
        assert (images[f"image 2 by {name}"] == ORIGINAL[1, 0][..., None] + error).all()
        assert (images[f"error of image 2 by {name}"] == 255 - table.factor * error).all()
        assert f"{20 * np.log10(255 / error):.1f} dB</td>" in html
    assert f"magnified {table.factor} times" in html
    assert table.factor == 16  # the largest of the factors that keep 10 below 256


def test_arms_with_other_masks_have_a_table_of_their_own(tmp_path):
    files = {
        "a": left(tmp_path, "a", 3),
        "b": left(tmp_path, "b", 3, VISIBLE[::-1]),
        "c": left(tmp_path, "c", 4),
    }
    assert [list(table.arms) for table in image_rows(files)] == [["a", "c"], ["b"]]


@pytest.mark.parametrize("content", [b"", b"no archive", b"PK\x03\x04 torn"])
def test_a_file_of_other_content_is_left_out(tmp_path, content):
    (tmp_path / "x.npz").write_bytes(content)
    assert image_rows({"a": tmp_path / "x.npz"}) == []


def test_a_damaged_file_or_one_of_a_single_array_is_left_out(tmp_path):
    path = tmp_path / "x.npz"
    images = dict.fromkeys(("original", "visible", "reconstruction"), ORIGINAL)
    np.savez_compressed(path, **images, decibels=np.zeros(3))
    whole = path.read_bytes()
    for place in range(0, len(whole), 3):  # in deflated data, in headers, in the archive's directory
        path.write_bytes(whole[:place] + bytes([whole[place] ^ 0xFF]) + whole[place + 1 :])
        image_rows({"a": path})
    with path.open("wb") as file:
        np.save(file, ORIGINAL)
    assert image_rows({"a": path}) == []
    with zipfile.ZipFile(path, "w") as archive:
        for name in (*images, "decibels"):
            archive.writestr(name, b"no array")
    assert image_rows({"a": path}) == []


@pytest.mark.parametrize(
    "change",
    [
        {"reconstruction": ORIGINAL / 255},
        {"original": ORIGINAL[0], "visible": VISIBLE[0], "reconstruction": ORIGINAL[0]},
        {"reconstruction": ORIGINAL[:, :, :4]},
        {"decibels": np.zeros(2)},
        {"decibels": np.array(3.0)},
        {"decibels": np.array(["a", "b", "c"])},
        {name: np.zeros((3, 4, 8, 8), np.uint8) for name in ("original", "visible", "reconstruction")},
        dict.fromkeys(("original", "visible", "reconstruction"), ORIGINAL[:0]) | {"decibels": np.zeros(0)},
    ],
)
def test_arrays_of_another_form_are_left_out(change, tmp_path):
    arrays = {"original": ORIGINAL, "visible": VISIBLE, "reconstruction": ORIGINAL, "decibels": np.zeros(3)}
    np.savez(tmp_path / "x.npz", **arrays | change)
    assert image_rows({"a": tmp_path / "x.npz"}) == []


def test_a_note_has_the_ratios(tmp_path):
    (table,) = image_rows({"bf16": left(tmp_path, "a", 3)})
    assert isinstance(table, ImageRows)
    assert table.markdown().splitlines()[2] == "| 1 | 38.6 dB |"
