"""Compiled quantisers equal the reference bit for bit, in every build that this CPU runs, or say that they cannot."""

import itertools
import re
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from support.builds import Counting
from support.cases import every
from torch import Tensor

from ablate.numerics.census import census
from ablate.numerics.choices import IN_KERNELS
from ablate.numerics.hadamard import SIGNS, rotate
from ablate.numerics.kernels import builds, cpu, forms, general
from ablate.numerics.philox import Clock, random_bits
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Range, Select
from ablate.recipes.presets import PRESETS

BUILDS = sorted(builds.FOLDER.glob("nvfp4_*.so"))
FORMS = {
    "1x16 nearest": Quant(),
    "16x16 nearest": Quant(block="16x16"),
    "1x16 stochastic": Quant(rounding="stochastic"),
    "headroom": Quant(rounding="stochastic", range=Range(headroom=17 / 16)),
    "bound 256": Quant(outer=Outer(bound=256.0)),
    "percentile": Quant(outer=Outer(statistic="percentile:0.95")),
    "static": Quant(outer=Outer(statistic="static:0.5")),
    "delayed": Quant(rounding="stochastic", outer=Outer(statistic="delayed:4")),
}
SHAPES = [(1, 16), (16, 16), (33, 47), (7, 300), (64, 512), (272, 96), (40, 1070)]
REGIMES = {"ordinary": 1.0, "tiny": 1e-30, "huge": 1e30, "subnormal": 1e-40, "one ulp of bf16 apart": 0.0}

pytestmark = pytest.mark.skipif(not BUILDS, reason="the package was installed without compiled quantisers")


def lacking(path: Path) -> str | None:
    """Return the instructions of a build that this CPU does not have; None if it has them."""
    level = path.stem.removeprefix("nvfp4_")
    known = list(builds.LEVELS.values())
    mine = builds.LEVELS.get(torch.backends.cpu.get_cpu_capability(), "portable")
    missing = level in known and (mine == "portable" or known.index(level) < known.index(mine))
    return level if missing else None


@pytest.fixture(params=BUILDS, ids=lambda path: path.stem)
def build(request):
    """Every build in turn, where this CPU has its instructions."""
    if level := lacking(request.param):
        pytest.skip(f"this CPU has no {level}")
    with builds.using(builds.load(request.param)):
        yield


@cache
def runnable() -> dict[str, Any]:
    """Every build that this CPU runs, by name: all are compared with one reference, which takes longer than they do."""
    return {path.stem: builds.load(path) for path in BUILDS if not lacking(path)}


def drawn(shape: tuple[int, int], regime: str, dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Zeros, whole zero blocks, ties and a wide range within one tensor."""
    g = torch.Generator().manual_seed(seed)
    if regime == "one ulp of bf16 apart":
        x = 1 + torch.randint(0, 128, shape, generator=g) / 128
    else:
        x = torch.randn(shape, generator=g) * REGIMES[regime]
    x[torch.rand(shape, generator=g) < 0.2] = 0.0
    x[::3] *= 1e-3
    x[-1] *= -1
    return x.to(dtype)


def reference(x: Tensor, quant: Quant, **how) -> Operand:
    with builds.using(None):
        return quantize(x, quant, **how)


def bits(x: Tensor) -> Tensor:
    x = x.contiguous()
    return x.view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


def decoded(theirs: Operand) -> Tensor:
    """Return what the reference decodes."""
    with builds.using(None):
        return theirs.dequantize()


def assert_equal(mine: Operand, theirs: Operand, whole: Tensor | None = None, build: str = "") -> None:
    """Compare two operands and what is decoded of them, which is `whole`, the sign of zero included."""
    for name in ("values", "block_scale", "amax", "largest"):
        a, b = getattr(mine, name), getattr(theirs, name)
        assert (a is None) == (b is None), (build, name)
        assert a is None or torch.equal(bits(a), bits(b)), (build, name)
    whole = decoded(theirs) if whole is None else whole
    assert torch.equal(bits(mine.dequantize()), bits(whole)), build


def assert_every_build_equals(x: Tensor, quant: Quant, how: dict[str, Any]) -> None:
    """Compare what the kernel of each build makes of x with the reference, which is computed once."""
    theirs = reference(x, quant, **how)
    whole = decoded(theirs)
    for build, library in runnable().items():
        counting = Counting(library)
        with builds.using(counting):
            assert_equal(quantize(x, quant, **how), theirs, whole, build)
        read = quant.outer.statistic != "amax" and any(
            size % 16 for size in x.shape
        )  # a padded x is not read
        assert len(counting.quantised) == 1 or (read and not counting.quantised)


@every(transposed=[False, True], dtype=[torch.bfloat16, torch.float32], form=FORMS)
def test_every_bit_is_the_references(form, dtype, transposed):
    clock = Clock(2**32 - 5, step=3, micro_batch=1)
    for shape, regime in itertools.product(SHAPES, REGIMES):
        x = drawn(shape, regime, dtype)
        x = x.t() if transposed else x
        how = {"clock": clock, "where": 0xDEADBEEF}
        assert_every_build_equals(x, FORMS[form], how)


@every(signs=SIGNS, form=["1x16 nearest", "1x16 stochastic", "bound 256"])
def test_a_rotated_transpose_is_the_references_too(form, signs):
    how = {"rotation": Hadamard(signs=signs), "clock": Clock(9, step=1), "where": 5, "product": 6}
    for shape, regime in itertools.product(SHAPES, REGIMES):
        x = drawn(shape, regime, torch.bfloat16).t()
        if x.is_contiguous():  # one row or column: both orders at once, the reference rotates it
            continue
        assert_every_build_equals(x, FORMS[form], how)


@every(
    quant=[
        *FORMS.values(),
        Quant(block="1x32", outer=None, scale=BlockScale(format="e8m0")),
        Quant(block="1x64"),
    ]
)
def test_what_is_decoded_is_what_the_reference_decodes(build, quant):
    for shape, regime in itertools.product(SHAPES, REGIMES):
        made = quantize(drawn(shape, regime, torch.float32), quant, clock=Clock(1))
        assert cpu.can_decode(made.values, made.block_scale, made.amax)
        mine = made.dequantize()
        with builds.using(None):
            assert torch.equal(bits(mine), bits(made.dequantize()))


def operands_of_presets() -> dict[str, tuple[Quant, Hadamard | None]]:
    """Every way in which a preset quantises an operand, once, without what happens outside the quantiser."""
    ways = {}
    for name, preset in PRESETS.items():
        for product in ("fprop", "dgrad", "wgrad"):
            made = getattr(preset(), product)
            for slot in sorted({"x", "w", "g"} & set(type(made).model_fields)):
                if quant := getattr(made, slot):
                    bare = {"source": "original", "transform": None, "estimator": None}
                    ways.setdefault(
                        (quant.model_copy(update=bare), made.hadamard), f"{name} {product}.{slot}"
                    )
    return {name: way for way, name in ways.items()}


@every(transposed=[False, True], dtype=[torch.bfloat16, torch.float32], way=operands_of_presets())
def test_every_operand_of_every_preset_has_a_kernel_that_equals_the_reference(way, dtype, transposed):
    """Each shape in each regime, in one dtype by rows and in the other by columns."""
    quant, rotation = operands_of_presets()[way]
    how = {"rotation": rotation, "clock": Clock(2**32 - 5, step=3, micro_batch=1), "where": 7, "product": 8}
    pairs = [*itertools.product(SHAPES[2:], REGIMES)]  # an odd number: neighbours in both lists alternate
    for shape, regime in pairs[(transposed + (dtype == torch.float32)) % 2 :: 2]:
        x = drawn(shape, regime, dtype)
        x = x.t() if transposed else x
        theirs = reference(x, quant, **how)
        whole = decoded(theirs)
        for build, library in runnable().items():
            counting = Counting(library)
            with builds.using(counting):
                assert_equal(quantize(x, quant, **how), theirs, whole, build)
            assert len(counting.quantised) == 1


@every(back=[False, True], size=[4, 8, 16, 32, 64, 128], dtype=[torch.bfloat16, torch.float32])
def test_a_rotation_of_any_size_is_the_references(dtype, size, back):
    for shape, regime in itertools.product(SHAPES, REGIMES):
        z = drawn((shape[0], shape[1] + -shape[1] % size), regime, dtype)
        for x in (z, z.t().contiguous().t(), z[:, :size]):
            with builds.using(None):
                theirs = bits(rotate(x, Hadamard(size=size), back=back))
            for build, library in runnable().items():
                with builds.using(library):
                    assert torch.equal(bits(rotate(x, Hadamard(size=size), back=back)), theirs), build


@every(shape=[(1, 1), (3, 5), (16, 32), (33, 65), (64, 47), (130, 96)], dtype=[torch.bfloat16, torch.float32])
def test_a_transposed_copy_holds_the_same_numbers(build, shape, dtype):
    x = drawn(shape, "ordinary", dtype)
    assert torch.equal(bits(general.by_rows(x.t())), bits(x.t().contiguous()))


@every(width=[8, 16, 24], purpose=[0, 1])
def test_compiled_random_bits_are_the_references(build, width, purpose):
    for rows, columns in ((1, 16), (3, 48), (7, 272), (64, 1024)):
        draw = partial(random_bits, Clock(2**35 + 3, "masking", 7, 2), 2**32 - 9, rows, columns, width)
        mine = draw(torch.device("cpu"), purpose)
        with builds.using(None):
            assert torch.equal(mine, draw(torch.device("cpu"), purpose))


@pytest.mark.slow
def test_ten_million_elements_differ_in_none(build):
    for seed, (form, regime) in enumerate(itertools.product(FORMS.values(), REGIMES)):
        x = drawn((512, 800), regime, torch.bfloat16, seed)
        assert_equal(
            quantize(x, form, clock=Clock(seed), where=seed),
            reference(x, form, clock=Clock(seed), where=seed),
        )


def test_telemetry_gets_the_same_operand_from_the_reference(build):
    x = drawn((64, 256), "ordinary", torch.bfloat16)
    mine, kept = quantize(x, Quant()), quantize(x, Quant(), keep=True)
    assert kept.codes is not None
    assert_equal(mine, kept)


@every(
    rotation=[None, Hadamard()], transposed=[False, True], dtype=[torch.bfloat16, torch.float32], form=FORMS
)
def test_what_telemetry_counts_is_what_the_reference_counts(build, form, dtype, transposed, rotation):
    quant = FORMS[form]
    for regime in ("ordinary", "tiny", "one ulp of bf16 apart"):
        x = drawn((64, 176), regime, dtype)
        x = x.t() if transposed else x
        how = {"clock": Clock(4), "where": 5, "rotation": rotation}
        mine, theirs = quantize(x, quant, keep="source", **how), quantize(x, quant, keep=True, **how)
        if cpu.can_quantize(x, quant, rotation):
            assert mine.scaled is None
        assert_equal(mine, theirs)
        assert torch.equal(mine.source.float(), theirs.source)
        for name, value in vars(census(theirs)).items():
            if isinstance(value, Tensor):
                torch.testing.assert_close(
                    getattr(census(mine), name).reshape(value.shape),
                    value,
                    rtol=1e-13,
                    atol=0,
                    check_dtype=False,
                )
            else:  # sums in double precision, in another order
                assert getattr(census(mine), name) == pytest.approx(value, rel=1e-12), name


def test_a_padded_operand_is_measured_by_the_reference(build):
    assert quantize(drawn((33, 47), "ordinary", torch.bfloat16), Quant(), keep="source").scaled is not None


@every(value=[float("nan"), float("inf"), -float("inf")], place=[(0, 0), (63, 255), (5, 250)])
def test_what_is_not_finite_is_left_to_the_reference_and_seen(build, value, place):
    x = drawn((64, 256), "ordinary", torch.bfloat16)
    x[place] = value
    assert cpu.quantize(x, Quant(), None, None, 0) is None
    assert not quantize(x, Quant()).largest.isfinite()
    assert not quantize(x.t(), Quant()).largest.isfinite()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_an_amax_sees_every_element(build, dtype):
    for length, block in itertools.product((1, 15, 16, 17, 48, 300), ("1x16", "16x16")):
        for at in range(length):
            x = torch.zeros(1, length, dtype=dtype)
            x[0, at] = -3.5
            assert cpu.quantize(x, Quant(block=block), None, None, 0)[1] == 3.5
            assert cpu.quantize(x.t().contiguous().t(), Quant(block=block), None, None, 0)[1] == 3.5


@pytest.mark.parametrize(
    "quant",
    [
        Quant(element="int4"),
        Quant(block="1x32"),
        Quant(scale=BlockScale(format="ue5m3")),
        Quant(scale=BlockScale(zero="one")),
        Quant(select=Select(among="scales")),
        Quant(outer=None),
        Quant(outer=Outer(granularity="row")),
        Quant(rounding="stochastic", bits=16),
        Quant(rounding="stochastic", block="16x16"),
        Quant(rounding="away"),
        Quant(range=Range(prescale=0.75)),
    ],
)
def test_a_form_that_is_not_nvidias_is_left_to_the_general_kernel(quant):
    assert not cpu.can_quantize(torch.ones(16, 32), quant, None)
    assert general.can_quantize(torch.ones(16, 32), quant)


@pytest.mark.parametrize(
    "quant",
    [
        Quant(element="e3m0"),
        Quant(block="1x8"),
        Quant(select=Select(among="search")),
        Quant(select=Select(among="scales"), block="16x16"),
        Quant(outer=Outer(granularity="row", statistic="percentile:0.9")),
        Quant(block="16x16", range=Range(statistic="rms:2")),
    ],
)
def test_a_form_without_a_kernel_is_the_references(quant):
    assert not general.can_quantize(torch.ones(16, 32), quant)


@pytest.mark.parametrize(
    "quant",
    [
        Quant().changed(rounding="new"),
        Quant().changed({"scale.rounding": "new"}),
        Quant().changed({"range.statistic": "new"}),
        Quant().changed({"outer.granularity": "new"}),
        Quant(select=Select(among="scales")).changed({"select.among": "new"}),
        Quant(select=Select(among="scales")).changed({"select.criterion": "new"}),
    ],
)
def test_a_word_that_no_kernel_knows_is_left_to_the_reference(quant):
    assert not forms.covers(quant)
    assert not forms.nvidia(quant)


def test_outer_scales_of_128_elements_without_blocks_are_left_to_the_reference():
    """The compiled kernel divided by the length of a block, 0, which ended the process."""
    outer = Outer(granularity="block:128", bound=1.0)
    assert not forms.covers(Quant(block=None, scale=None, outer=outer))
    assert forms.covers(Quant(block="1x16", outer=outer))


def test_the_words_of_the_kernels_are_those_that_general_c_numbers():
    text = (Path(builds.__file__).parent / "general.c").read_text()
    numbered = {
        what: names.lower().split(", ")
        for names, what in re.findall(r"enum { (.*?) };\s+/\* (.*?) \*/", text)
    }
    words = {name: [*words] for name, words in IN_KERNELS.items()}
    assert numbered["roundings"] == words["rounding"][:5]
    assert numbered["statistics of blocks"] == words["statistic"]
    assert numbered["Four Over Six's criteria"][1:] == words["criterion"]
    assert [name.partition("_")[0] for name in numbered["what shares an outer scale"]][1:] == words[
        "granularity"
    ]


def test_so_is_another_dtype_an_empty_matrix_and_memory_with_gaps():
    assert not cpu.can_quantize(torch.ones(16, 32, dtype=torch.float16), Quant(), None)
    assert not cpu.can_quantize(torch.ones(0, 32), Quant(), None)
    assert not cpu.can_quantize(torch.ones(32, 64)[:, ::2], Quant(), None)


def test_a_package_without_builds_says_so_in_one_line_and_uses_the_reference(capsys, tmp_path):
    x = drawn((16, 32), "ordinary", torch.float32)
    made = []
    for _ in range(2):
        with builds.using(builds.installed_build(tmp_path)):
            made.append(quantize(x, Quant()))
    assert_equal(made[0], reference(x, Quant()), None, "none")
    assert torch.equal(made[0].values, made[1].values)
    told = capsys.readouterr().err
    assert told.count("\n") == 1
    assert "slow reference" in told
