"""Promises of the general quantiser for GPUs, run by test_cuda_kernels.py in a process of its own, as cuda_kernel_cases.py is."""

import itertools
from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.cases import sampled
from support.quantisers import Coverage, case, difference
from support.triton_cases import INTERPRETED, patch_language_once
from torch import Tensor

from ablate.numerics import census, on_gpu
from ablate.numerics.hadamard import signs
from ablate.numerics.kernels import builds, cpu, cuda, forms, general, general_cuda
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import Hadamard, Quant, Transform, tag
from ablate.recipes import PRESETS
from ablate.recipes.te_mapping import variants

CPU = torch.device("cpu")
DEVICE = CPU if INTERPRETED else torch.device("cuda")
patch_language_once()
CLOCK = Clock(2**32 - 5, step=3, micro_batch=1)
WHERE, PRODUCT = 0xDEADBEEF, 6
# The interpreter is numpy, which warns of divisions by zero and of infinities; the kernels mean them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def kernels_on_this_device(monkeypatch):
    """Let the kernels for GPUs make every tensor, also in the interpreter, but for the reference's."""
    monkeypatch.setattr(cpu, "can_quantize", lambda *_: False)
    monkeypatch.setattr(general, "can_quantize", lambda *_: False)
    if INTERPRETED:  # `reference_only` takes away the builds, and with them these kernels
        monkeypatch.setattr(cuda, "runs_on", lambda device: builds.build() is not None)
        monkeypatch.setattr(census, "compiled", census.reference)  # which takes CPU tensors


def drawn(shape: tuple[int, int], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Zeros of both signs, whole zero blocks, ties, subnormals, and rows of very different sizes."""
    g = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=g)
    x[torch.rand(shape, generator=g) < 0.2] = -0.0
    x[1::3] = (x[1::3] * 4).round() / 4
    x[::5] *= 1e-3
    x[2] *= 1e-39
    x[3] *= 1e25
    x[: min(4, len(x) - 1), :16] = 0.0
    return x.to(dtype)


def preset_forms() -> dict[str, tuple[Quant, Hadamard | None, bool]]:
    """Each form that a preset has in a slot, with its rotation; True if its blocks run down the memory of x."""
    found: dict[tuple, str] = {}
    for name, make in PRESETS.items():
        for products in variants(make()):
            for slot, quant in products.quantised():
                rotation = getattr(products, slot.partition(".")[0]).hadamard
                plain = quant.cast.model_copy(
                    update={"transform": None, "estimator": None, "source": "original"}
                )
                down = slot in ("wgrad.g", "wgrad.x", "dgrad.w")
                key = plain, rotation and rotation.model_copy(update={"signs": "per_call"}), down
                found.setdefault(key, f"{name} {slot}")
    return {name: key for key, name in found.items()}


FORMS = preset_forms()


def reference(x: Tensor, quant: Quant, rotation: Hadamard | None) -> Operand:
    return quantize(x, quant, rotation=rotation, clock=CLOCK, where=WHERE, product=PRODUCT, keep=True)


def assert_equal(mine: Operand, theirs: Operand) -> None:
    for name in ("values", "amax", "block_scale", "largest"):
        one, other = getattr(mine, name), getattr(theirs, name)
        assert (one is None) == (other is None), name
        if one is None:
            continue
        one, other = one.cpu(), other.cpu()
        assert (one.shape, one.dtype) == (other.shape, other.dtype), name
        assert torch.equal(one.isnan(), other.isnan()), name
        whole = torch.int16 if one.element_size() == 2 else torch.int32
        bits = [z.nan_to_num(0.0, float("inf"), -float("inf")).contiguous().view(whole) for z in (one, other)]
        assert torch.equal(*bits), name


def test_the_kernels_make_every_form_of_every_preset():
    """So no preset's operand is quantised by torch's operations: the list of those that are is empty."""
    assert [name for name, (quant, _, _) in FORMS.items() if not forms.on_gpu(quant)] == []


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_preset_has_the_references_bits(name):
    """In the layout and with the rotation of the preset; ragged, and more than one program both ways."""
    quant, rotation, down = FORMS[name]
    shape = (37, 150) if INTERPRETED else (4099, 2000)
    for dtype in (torch.bfloat16,) if INTERPRETED else (torch.bfloat16, torch.float32):
        x = drawn(shape, dtype)
        given = x.to(DEVICE)
        x, given = (x.t(), given.t()) if down else (x, given)
        with mock.patch.object(general_cuda, "quantize", wraps=general_cuda.quantize) as launched:
            mine = quantize(given, quant, rotation=rotation, clock=CLOCK, where=WHERE, product=PRODUCT)
        assert launched.called or forms.nvidia(quant)
        assert_equal(mine, reference(x, quant, rotation))


@pytest.mark.parametrize(
    ("name", "value"),
    sampled(itertools.product(FORMS, [float("nan"), -float("inf"), 3.3e38]), 12, seed=3)
    if INTERPRETED
    else [*itertools.product(FORMS, [float("nan"), -float("inf"), 3.3e38])],
)
def test_what_is_not_finite_is_the_references_too(name, value):
    quant, rotation, down = FORMS[name]
    x = drawn((9, 40), torch.bfloat16)
    x[4, 20:22] = value
    given = x.to(DEVICE)
    x, given = (x.t(), given.t()) if down else (x, given)
    mine = quantize(given, quant, rotation=rotation, clock=CLOCK, where=WHERE, product=PRODUCT)
    assert_equal(mine, reference(x, quant, rotation))


def words_of(quant: Quant, rotation: Hadamard | None) -> set[str]:
    """The features of a case that the random ones must contain."""
    outer, scale, block = quant.outer, quant.scale, quant.range
    has = {
        "selection": quant.select is not None,
        "grids": quant.select is not None and quant.select.among == "grids",
        "absmax": quant.select is not None and quant.select.criterion == "absmax",
        "ms_eden": quant.rounding == "ms_eden",
        "micro-exponents": scale is not None and scale.micro_exponents is not None,
        "halved": scale is not None and scale.halve_below is not None,
        "scale to zero": scale is not None and scale.zero != "zero",
        "rotated inside": rotation is not None and rotation.size in general_cuda.SIZES,
        "rotated before": rotation is not None and rotation.size not in general_cuda.SIZES,
        "headroom": block.headroom != 1,
        "prescale": block.prescale != 1,
        "no scales": scale is None,
        "stochastic scales": scale is not None and scale.rounding == "stochastic",
        f"statistic {tag(block.statistic)}": True,
        f"outer {outer and tag(outer.granularity)}": True,
        f"element {quant.element} {quant.rounding}": True,
        f"bits {quant.bits}": quant.rounding == "stochastic",
        f"block {quant.block}": True,
        f"scale {scale and scale.format}": True,
        f"scale rounding {scale and scale.rounding}": True,
    }
    return {word for word, there in has.items() if there}


WANTED = {
    "selection",
    "grids",
    "absmax",
    "ms_eden",
    "micro-exponents",
    "halved",
    "scale to zero",
    "headroom",
} | {
    *("rotated inside", "rotated before", "prescale", "no scales", "stochastic scales"),
    *("statistic amax", "statistic rms", "statistic std"),
    *("outer None", "outer tensor", "outer row", "outer block"),
    *(f"bits {bits}" for bits in (8, 16, 24)),
    *(f"block {block}" for block in (None, "1x16", "1x32", "1x64", "1x128", "16x16", "32x32")),
    *(f"scale {name}" for name in ("e4m3", "ue5m3", "e8m0", "e6m2", "bf16", "fp32")),
    *(f"scale rounding {name}" for name in ("nearest", "away", "floor", "ceil")),
    *(f"element {name} stochastic" for name in ("e2m1", "e1m2", "int4", "e3m0", "e4m3", "e5m2")),
}


@pytest.mark.parametrize("part", range(1 if INTERPRETED else 13))
def test_random_cases_over_every_field_are_the_references_too(part):
    """Whatever the kernel accepts of the random cases that the CPU's kernels are tested on."""
    count, number, seen = 12 if INTERPRETED else 154, part * 10**6, set()
    while count > 0 or not seen >= WANTED:
        number += 1
        one = case(29, number)
        if one.x.numel() > (1500 if INTERPRETED else 10**6) or not forms.general(one.quant):
            continue
        words = words_of(one.quant, one.rotation)
        if (count <= 0 and not (words & WANTED) - seen) or (one.part and one.quant.draws):
            continue
        one = replace(one, x=one.x.to(DEVICE))
        if not cuda.can_take(one.x):
            continue
        with mock.patch.object(general_cuda, "quantize", wraps=general_cuda.quantize) as launched:
            assert difference(one, Coverage()) is None, one
        count -= 1
        seen |= words if launched.called else set()


def test_a_form_whose_bits_differ_is_left_to_the_reference(capsys):
    """And one whose launch fails: both are said once."""
    quant, x = Quant(element="int4"), drawn((9, 40), torch.bfloat16).to(DEVICE)

    def wrong(*arguments, **options):
        made = launch(*arguments, **options)
        made.block_scale[-1] *= 2
        return made

    def broken(*arguments, **options):
        raise RuntimeError("Failed to find C compiler. Please specify")

    launch = general_cuda.quantize
    for fault, told in ((wrong, "differ"), (broken, "install gcc")):
        on_gpu.agrees.cache_clear()
        with mock.patch.object(general_cuda, "quantize", fault):
            for _ in range(2):
                assert_equal(quantize(x, quant), reference(x.cpu(), quant, None))
        assert capsys.readouterr().err.count(told) == 1
    on_gpu.agrees.cache_clear()
    with mock.patch.object(general_cuda, "quantize", wraps=launch) as launched:
        assert_equal(
            quantize(x, quant.model_copy(update={"transform": Transform(mean=True)})), quantize(x, quant)
        )
    assert launched.call_count == 3  # a check, and two that use it


def test_signs_become_words():
    for size in general_cuda.SIZES:
        flips = signs(Hadamard(size=size, signs="per_call"), CPU, CLOCK, PRODUCT)
        words = general_cuda.sign_words(flips)
        bits = [words[place // 32] >> place % 32 & 1 for place in range(size)]
        assert [1 - 2 * bit for bit in bits] == flips.tolist()
