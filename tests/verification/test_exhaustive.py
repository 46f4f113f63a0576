"""The enumeration of the cast: small slices agree, a wrong kernel is found and its case named, and a killed run continues."""

import ctypes
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from ablate.errors import InputError
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.kernels import builds
from ablate.numerics.quantize import quantize
from ablate.numerics.rounding import ROUNDINGS
from ablate.numerics.spec import Quant

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import cast_oracle
import exhaustive_cast
from cast_oracle import LARGEST, SCALES
from exhaustive_cast import BLOCKS, NEAREST, STOCHASTIC, Form, Record, Tally, at_scale, layout, own_parts

SCALE_PAIRS, FP32, TO_NEAREST, *DRAWN, OTHERS, OTHERS_DRAWN = own_parts().values()
SLICES = {
    "block scales": (SCALE_PAIRS["0x4501"], 128 * (LARGEST + 1)),  # outer statistics from 2064
    "fp32, -0 and subnormals": (FP32["0x80000000"], 2**24),
    "nearest": (TO_NEAREST["1.0"], 127 * 2 * (LARGEST + 1)),
    "another form": (
        partial(at_scale, Form(2688.0, "away", "e3m2", "ue5m3", True), 2.0**-17),
        2 * (LARGEST + 1),
    ),
    "stochastic, another form": (OTHERS_DRAWN["int4, e8m0"], 256 * 2 * (LARGEST + 1)),
    "stochastic": (DRAWN[0]["1.0"], 256 * 2 * (LARGEST + 1)),
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


def test_the_parts_are_those_that_the_status_page_counts():
    names = [name.partition(",")[0] for name in own_parts()]
    assert names == [
        "block scales",
        "codes of E2M1",
        "to nearest",
        *["stochastic"] * len(STOCHASTIC),
        *["other forms"] * 2,
    ]
    assert len(OTHERS) == 2 * len(OTHERS_DRAWN) == 2 * len(cast_oracle.ELEMENTS) * len(SCALES)


def test_the_layout_has_every_pair_of_number_and_byte_beside_the_largest():
    placed = layout(LARGEST, True, BLOCKS)
    assert placed.cases == 256 * 2 * (LARGEST + 1)
    assert sum(z.size for z in placed.bits) < 1.1 * placed.cases
    assert {int(source.rows.view(-1, 16).abs().amax(1).min()) for source in placed.sources} == {
        int(np.uint32(LARGEST << 16).view(np.float32))
    }


@pytest.mark.parametrize("amax", sorted({*NEAREST[-7:], *STOCHASTIC}))
def test_every_outer_statistic_gives_a_block_every_scale(amax):
    for scale in SCALES["e4m3"]:
        largest, headroom = Form(amax).forced(scale)
        x = torch.full((1, 16), largest, dtype=torch.int16).view(torch.bfloat16)
        assert quantize(x, Form(amax).quant(headroom)).block_scale.item() == scale


@compiled
def test_a_wrong_result_of_a_kernel_is_found_and_its_case_named():
    place = 4444
    placed = layout(LARGEST, True, BLOCKS)
    bits, byte = int(placed.bits[0][place]), int(placed.bytes[0][place])
    with builds.using(Wrong("rows", flip(place))):  # type: ignore[arg-type]
        tally = DRAWN[0]["1.0"]()
    assert tally.differences == len(placed.sources)
    assert tally.first.startswith(f"rows, stochastic, outer 2688, block scale 1, bf16 {bits:#06x} ")
    assert f", byte {byte}: " in tally.first


@compiled
@pytest.mark.parametrize(
    ("part", "chunk", "kernel", "place", "words"),
    [
        (FP32, "0x3f000000", "rows", 16 + 4, "rows, fp32 0x3f000013 (0.500001132): "),
        (FP32, "0x3f000000", "columns", 3 * BLOCKS + 5, "columns, fp32 0x3f00004e "),
        (
            TO_NEAREST,
            "1.0",
            "tiles",
            16 + 6,
            "tiles, nearest, outer 1, block scale 0, bf16 0x0014 (1.83671e-39): ",
        ),
    ],
    ids=["rows", "columns", "tiles"],
)
def test_a_wrong_code_to_nearest_is_named(part, chunk, kernel, place, words):
    """Lane 12 is taken: lane 4 of block 1 has number 15 + 4, and lane 3 of block 5 number 5 * 15 + 3."""
    with builds.using(Wrong(kernel, flip(place))):  # type: ignore[arg-type]
        tally = part[chunk]()
    assert tally.differences > 0
    assert tally.first.startswith(words), tally.first


@compiled
def test_a_wrong_result_of_another_form_is_named():
    with builds.using(Wrong("quantize", flip(16 + 6))):  # type: ignore[arg-type]
        tally = at_scale(Form(2688.0, "nearest", "e3m2", "ue5m3", True), 2.0)
    assert tally.differences == 1
    assert tally.first.startswith(
        "general, e3m2 with ue5m3 scales, nearest, outer 2688, block scale 2, bf16 0x0014 ("
    )


@compiled
def test_a_wrong_block_scale_is_named():
    spoil = Wrong("columns", lambda values, scales: scales.__setitem__(40, 3.0))
    with builds.using(spoil):  # type: ignore[arg-type]
        tally = SCALE_PAIRS["0x4501"]()
    assert tally.differences == 128
    assert tally.first == "columns, tensor amax 2064, block amax 3.67342e-39: 3 instead of 0"


def test_integer_arithmetic_has_known_answers():
    assert SCALES["e4m3"][:3] == (0, 2**-9, 2**-8)
    assert SCALES["e4m3"][-1] == 448
    assert len(SCALES["e4m3"]) == 127
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

    scales = partial(exhaustive_cast.scales_of, quantiser)
    tallies = [exhaustive_cast.every_scale(scales, zero, 0x3FC0) for zero in (False, True)]
    assert tallies[0] + tallies[1] == Tally(0x3FC1)
    tally = exhaustive_cast.every_element(quantiser, 0x3FC0)
    assert tally.differences == 0
    assert tally.cases > 126 * 2 * 0x3000


def test_the_benchmark_names_the_first_tie_that_another_cast_rounds_away():
    away = partial(ROUNDINGS["away"], grid=ELEMENTS["e2m1"])
    tally = exhaustive_cast.every_code(lambda x: iter([("", away(x))]), False, 0x3E000000)
    assert tally.differences == 1
    assert tally.first == "fp32 0x3e800000 (0.25): 0.5 instead of 0"


# Records


def test_a_killed_run_repeats_only_the_chunk_that_it_had_begun(tmp_path):
    counted = []

    def count(name: str, end: bool) -> Tally:
        counted.append(name)
        if end:
            raise KeyboardInterrupt
        return Tally(10, name == "b", "case b" if name == "b" else "")

    def enumerate_all(end: bool):
        record = Record(tmp_path / "kept.json")
        return sum(
            (record.of("part", name, partial(count, name, end and name == "c")) for name in "abcd"), Tally(0)
        )

    with pytest.raises(KeyboardInterrupt):
        enumerate_all(end=True)
    tally = enumerate_all(end=False)
    assert counted == ["a", "b", "c", "c", "d"]
    assert (tally.cases, tally.differences, tally.first) == (40, 1, "case b")


@pytest.mark.parametrize("text", ['{"chunks": {}', "[]", "{}"])
def test_a_record_that_was_changed_is_refused(text, tmp_path):
    path = tmp_path / "kept.json"
    Record(path).of("part", "a", lambda: Tally(10, 3, "case"))
    edited = path.read_text().replace("3", "0")
    for content in (text, edited):
        path.write_text(content)
        with pytest.raises(InputError, match="delete it"):
            Record(path)


@pytest.mark.parametrize(("differences", "status"), [(0, 0), (1, 1)])
def test_the_program_prints_rows_and_fails_for_a_difference_of_ours(
    differences, status, tmp_path, monkeypatch, capsys
):
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path))
    part = {"chunk": lambda: Tally(1000, differences, "x 0x3f80" * differences)}
    monkeypatch.setattr(exhaustive_cast, "own_parts", lambda: {"part": part})
    monkeypatch.setattr(sys, "argv", ["exhaustive_cast.py", "ablate"])
    for _ in range(2):  # counted, then kept
        with pytest.raises(SystemExit) as end:
            exhaustive_cast.main()
        assert end.value.code == status
        row = capsys.readouterr().out.rstrip("\n").split("\t")
        assert row[2:5] == ["part", "1000", str(differences)]
        assert row[-1] == "x 0x3f80" * differences
        part["chunk"] = None
