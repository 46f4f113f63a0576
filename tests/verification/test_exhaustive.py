"""The enumeration of the cast: small slices agree, a wrong kernel is found and its case named, and a killed run continues."""

import ctypes
import json
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch
from support.commands import here

from ablate.cache import key_of
from ablate.errors import InputError
from ablate.files import write
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.kernels import builds
from ablate.numerics.quantize import quantize
from ablate.numerics.rounding import ROUNDINGS
from ablate.numerics.spec import Quant
from ablate.verification import cast_oracle, exhaustive_forms
from ablate.verification.cast_oracle import LARGEST, SCALES
from ablate.verification.enumeration import Part, Record, Tally, rows_of
from ablate.verification.exhaustive import record
from ablate.verification.exhaustive_nvfp4 import BLOCKS, form, largest_of, layout, parts
from ablate.verification.exhaustive_nvfp4 import NEAREST as NEAREST_OUTERS
from ablate.verification.exhaustive_nvfp4 import STOCHASTIC as STOCHASTIC_OUTERS

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import exhaustive_cast

SCALE_PAIRS, FP32, NEAREST, STOCHASTIC = parts(stochastic=(2688.0,), nearest=(1.0,))
SLICES = {
    "block scales": (SCALE_PAIRS.chunks["0x4501"], 128 * (LARGEST + 1)),  # outer statistics from 2064
    "fp32, -0 and subnormals": (FP32.chunks["0x80000000"], 2**24),
    "nearest": (NEAREST.chunks["1.0"], 127 * 2 * (LARGEST + 1)),
    "another form": (
        partial(exhaustive_forms.at_scale, "e3m2", "ue5m3", "away", 2.0**-17),
        2 * (LARGEST + 1),
    ),
    "stochastic, another form": (
        partial(exhaustive_forms.at_scale, "int4", "e8m0", "stochastic", 1.0),
        256 * 2 * (LARGEST + 1),
    ),
    "stochastic": (STOCHASTIC.chunks["1.0"], 256 * 2 * (LARGEST + 1)),
}
compiled = pytest.mark.skipif(builds.build() is None, reason="installed without compiled quantisers")


class Wrong:
    """The compiled quantisers, with a function whose bf16 results (or fp32 scales) are spoiled."""

    def __init__(self, name: str, spoil: Callable[[ctypes.Array, ctypes.Array], object]) -> None:
        self._name, self._spoil = name, spoil

    def __getattr__(self, name: str) -> object:
        function = getattr(builds.installed_build(), name)
        return self._called if name == self._name else function

    def _called(self, memory, rows, columns, *arguments):
        done = getattr(builds.installed_build(), self._name)(memory, rows, columns, *arguments)
        values, scales = arguments[-3:-1] if self._name == "quantize" else arguments[-2:]
        self._spoil(
            (ctypes.c_uint16 * (rows * columns)).from_address(values),
            (ctypes.c_float * 64).from_address(scales),
        )
        return done


def flip(place: int) -> Callable[[ctypes.Array, ctypes.Array], object]:
    """Return a spoiler that replaces the result at a place by the next bf16 number."""
    return lambda values, scales: values.__setitem__(place, values[place] + 1)


@pytest.mark.parametrize("name", SLICES)
def test_a_slice_agrees(name):
    count, cases = SLICES[name]
    assert count() == Tally(cases)


def test_the_layout_has_every_pair_of_number_and_byte_beside_the_largest():
    placed = layout(LARGEST, True, BLOCKS)
    assert placed.cases == 256 * 2 * (LARGEST + 1)
    assert sum(z.size for z in placed.bits) < 1.1 * placed.cases
    assert {int(source.rows.view(-1, 16).abs().amax(1).min()) for source in placed.sources} == {
        int(np.uint32(LARGEST << 16).view(np.float32))
    }


@pytest.mark.parametrize("amax", sorted({*NEAREST_OUTERS[-7:], *STOCHASTIC_OUTERS}))
def test_every_outer_statistic_gives_a_block_every_scale(amax):
    for scale in SCALES:
        largest, headroom = largest_of(scale, amax)
        x = torch.full((1, 16), largest, dtype=torch.int16).view(torch.bfloat16)
        assert quantize(x, form(amax, headroom, False)).block_scale.item() == scale


@compiled
def test_a_wrong_result_of_a_kernel_is_found_and_its_case_named():
    place = 4444
    placed = layout(LARGEST, True, BLOCKS)
    bits, byte = int(placed.bits[0][place]), int(placed.bytes[0][place])
    with builds.using(Wrong("rows", flip(place))):  # type: ignore[arg-type]
        tally = STOCHASTIC.chunks["1.0"]()
    assert tally.differences == len(placed.sources)
    assert tally.first.startswith(f"rows, outer 2688, block scale 1, bf16 {bits:#06x} ")
    assert f", byte {byte}: " in tally.first


@compiled
@pytest.mark.parametrize(
    ("part", "chunk", "kernel", "place", "words"),
    [
        (FP32, "0x3f000000", "rows", 16 + 6, "rows, outer 2688, block scale 1, fp32 0x3f000014 (0.500001): "),
        (
            FP32,
            "0x3f000000",
            "columns",
            3 * BLOCKS + 5,
            "columns, outer 2688, block scale 1, fp32 0x3f00004d ",
        ),
        (NEAREST, "1.0", "tiles", 16 + 6, "tiles, outer 1, block scale 0, bf16 0x0014 (1.83671e-39): "),
    ],
    ids=["rows", "columns", "tiles"],
)
def test_a_wrong_code_to_nearest_is_named(part, chunk, kernel, place, words):
    """Lane 6 of block 1 has number 15 + 5, since a lane of each block is taken; lane 3 of block 5 number 5 * 15 + 2."""
    with builds.using(Wrong(kernel, flip(place))):  # type: ignore[arg-type]
        tally = part.chunks[chunk]()
    assert tally.differences > 0
    assert tally.first.startswith(words)


@compiled
def test_a_wrong_result_of_another_form_is_named():
    with builds.using(Wrong("quantize", flip(16 + 6))):  # type: ignore[arg-type]
        tally = exhaustive_forms.at_scale("e3m2", "ue5m3", "nearest", 2.0)
    assert tally.differences == 1
    assert tally.first.startswith("general, e3m2 with ue5m3 scales, nearest, block scale 2, bf16 0x0014 (")


@compiled
def test_a_wrong_block_scale_is_named():
    spoil = Wrong("columns", lambda values, scales: scales.__setitem__(40, 3.0))
    with builds.using(spoil):  # type: ignore[arg-type]
        tally = SCALE_PAIRS.chunks["0x4501"]()
    assert tally.differences == 128
    assert tally.first == "columns, outer 2064, block amax 3.67342e-39 (0x0028): 3 instead of 0"


def test_integer_arithmetic_has_known_answers():
    assert SCALES[:3] == (0, 2**-9, 2**-8)
    assert SCALES[-1] == 448
    assert len(SCALES) == 127
    cast = cast_oracle.Cast.of(1.0, 2688.0)
    tie, above, negative = 0x4020, 0x4026, 0xC026  # 2.5, 2.59375, -2.59375
    named = {0: "zero", 0x4000: "2", 0x4040: "3", 0xC040: "-3"}
    assert named[int(np.uint16(cast.near[tie]))] == "2"
    assert named[int(np.uint16(cast.near[above]))] == "3"
    assert named[int(np.uint16(cast.near[negative]))] == "-3"
    assert [int(cast.position[bits]) for bits in (tie, above, negative)] == [128, 152, 152]
    assert cast_oracle.multiplier(2688.0) * 6 > 1  # fp32(1/6) is above 1/6


# The libraries


def test_the_benchmark_finds_no_difference_in_our_own_quantiser():
    def quantiser(x):
        operand = quantize(x, Quant())
        return operand.values, operand.block_scale.view(-1)

    scales = [exhaustive_cast.every_scale(quantiser, zero, 0x3FC0) for zero in (False, True)]
    assert scales[0] + scales[1] == Tally(0x3FC1)
    tally = exhaustive_cast.every_element(quantiser, 0x3FC0)
    assert tally.differences == 0
    assert tally.cases > 126 * 2 * 0x3000


def test_the_benchmark_names_the_first_tie_that_another_cast_rounds_away():
    away = partial(ROUNDINGS["away"], grid=ELEMENTS["e2m1"])
    tally = exhaustive_cast.every_code(away, 0x3E000000)
    assert tally.differences == 1
    assert tally.first == "fp32 0x3e800000 (0.25): 0.5 instead of 0"


# Records


def test_a_killed_run_repeats_only_the_chunk_that_it_had_begun(tmp_path):
    counted = []

    def count(name: str, end: bool = False) -> Tally:
        counted.append(name)
        if end:
            raise KeyboardInterrupt
        return Tally(10, name == "b", "case b" if name == "b" else "")

    def enumerate_all(end: bool):
        chunks = {name: lambda name=name: count(name, end and name == "c") for name in "abcd"}
        return list(rows_of([Part("group", "part", chunks)], Record(tmp_path / "kept.json")))

    with pytest.raises(KeyboardInterrupt):
        enumerate_all(end=True)
    [(group, [row])] = enumerate_all(end=False)
    assert counted == ["a", "b", "c", "c", "d"]
    assert (group, row.what, row.ok) == ("group", "part", False)
    assert row.measured.startswith("1 of 40 differ")
    assert row.measured.endswith("the first: case b")


def test_an_exception_fails_the_row_and_is_not_kept(tmp_path):
    def count():
        raise ValueError("why")

    path = tmp_path / "kept.json"
    [(_, [row])] = rows_of([Part("group", "part", {"a": count})], Record(path))
    assert (row.ok, row.measured) == (False, "chunk a: ValueError: why")
    assert not path.exists()


@pytest.mark.parametrize("text", ['{"chunks": {}', "[]", "{}"])
def test_a_record_that_was_changed_is_refused(text, tmp_path):
    path = tmp_path / "kept.json"
    Record(path).of("part", "a", lambda: Tally(10, 3, "case"))
    edited = path.read_text().replace("3", "0")
    for content in (text, edited):
        path.write_text(content)
        with pytest.raises(InputError, match="delete it"):
            Record(path)


def test_the_command_prints_kept_results_and_fails_for_a_difference(tmp_path, monkeypatch):
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path))
    assert here("doctor", "--exhaustive", "--fast").returncode == 2
    chunks = {
        f"{part.what}: {name}": [1000, wrong := part.what.endswith("1") and name == "2.0", "x 0x3f80" * wrong]
        for part in (*parts(), *exhaustive_forms.parts())
        for name in part.chunks
    }
    path = record().path
    path.parent.mkdir()
    write(path, {"chunks": chunks, "seal": key_of(chunks)})
    done = here("doctor", "--exhaustive", "--json", ABLATE_CACHE=str(tmp_path))
    assert done.returncode == 1, done.stdout + done.stderr
    rows = json.loads(done.stdout)["rows"]
    assert [row["ok"] for row in rows] == [None, None, True, True, True, True, False, True, True, True]
    assert "0x3f80" in rows[6]["measured"]
