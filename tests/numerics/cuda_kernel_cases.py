"""Promises of the CUDA quantisers, run by test_cuda_kernels.py in a process of its own: in Triton's interpreter, or on a GPU.

Triton decides while it is imported whether it interprets, so this file cannot share a process with the other tests.
"""

import itertools
import math
from dataclasses import replace
from random import Random
from unittest import mock

import pytest
import torch
from support.cases import sampled
from support.packed_experts import Model, results, routed
from support.quantisers import Case, Coverage, case, difference
from support.triton_cases import INTERPRETED, patch_language_once
from torch import Tensor, nn

from ablate.engines import grouped
from ablate.engines.emulated import convert
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.numerics import gpu_sums, on_gpu, product_error
from ablate.numerics.census import census
from ablate.numerics.census import reference as census_by_torch
from ablate.numerics.choices import STATISTICS
from ablate.numerics.encoded import packed_by_kernel
from ablate.numerics.estimators import slope
from ablate.numerics.hadamard import butterflies, rotate, scale_rotated, signs
from ablate.numerics.history import History
from ablate.numerics.kernels import builds, cpu, cuda, forms, general, general_cuda
from ablate.numerics.philox import Clock
from ablate.numerics.product import alpha, product, split_product, with_few
from ablate.numerics.quantize import Operand, quantize, quantize_both, quantize_channels
from ablate.numerics.spec import BlockScale, Dge, Hadamard, Outer, Quant, Range, Transform, tag
from ablate.numerics.transform import CHANNEL_FORMATS, split
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Layers, Run
from ablate.recipes.te_mapping import variants

CPU = torch.device("cpu")
DEVICE = CPU if INTERPRETED else torch.device("cuda")
patch_language_once()
CLOCK = Clock(2**32 - 5, step=3, micro_batch=1)
WHERE, PRODUCT = 0xDEADBEEF, 6
DIFFERENT = on_gpu.different
# The interpreter is numpy, which warns of divisions by zero and of infinities; the kernels mean them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


@pytest.fixture(autouse=True)
def kernels_on_this_device(monkeypatch):
    """Let the kernels for GPUs make every tensor, also in the interpreter, but for the reference's."""
    monkeypatch.setattr(cpu, "can_quantize", lambda *_: False)
    monkeypatch.setattr(general, "can_quantize", lambda *_: False)
    if INTERPRETED:  # `reference_only` takes away the builds, and with them these kernels
        monkeypatch.setattr(cuda, "runs_on", lambda device: builds.build() is not None)
        monkeypatch.setattr(on_gpu, "different", lambda *copies: "")  # or each form would run twice


REGIMES = {
    "ordinary": 1.0,
    "tiny": 1e-30,
    "huge": 1e30,
    "subnormal": 1e-40,
    "one ulp of bf16 apart": 0.0,
    "mixed": 1.0,
}
SHAPES = ((9, 21), (18, 37), (5, 278)) if INTERPRETED else ((18, 37), (4096, 1000), (333, 2048))
"""Ragged both ways; more than one slab of rows, more than one program along the columns. A GPU has time for more."""


def drawn(shape: tuple[int, int], regime: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Zeros of both signs, whole zero blocks, ties, and rows of different sizes; of very different ones if mixed."""
    g = torch.Generator().manual_seed(0)
    if regime == "one ulp of bf16 apart":
        x = 1 + torch.randint(0, 128, shape, generator=g) / 128
    else:
        x = torch.randn(shape, generator=g) * REGIMES[regime]
    x[torch.rand(shape, generator=g) < 0.2] = 0.0
    x[1::3] = (x[1::3] * 4).round() / 4
    x[::5] *= 1e-3
    x[-1] *= -1
    if regime == "mixed":
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
NEAREST, STOCHASTIC = Quant(), Quant(rounding="stochastic")
SLABS = {
    "1x16 nearest": (NEAREST, None),
    "16x16 nearest": (Quant(block="16x16"), None),
    "1x16 stochastic": (STOCHASTIC, None),
    "headroom, bound 256": (
        Quant(rounding="stochastic", range=Range(headroom=17 / 16), outer=Outer(bound=256.0)), None
    ),
    "rotated": (STOCHASTIC, Hadamard(signs="per_call")),
    "rotated, fixed signs": (NEAREST, Hadamard()),
}  # fmt: skip
"""Forms of NVIDIA's recipe, most of which programs take by slabs."""


def some(product, size: int, seed: int) -> list[tuple]:
    """Return all of a product on a GPU, and a sample of it in the interpreter without `--all`."""
    return sampled(product, size, seed) if INTERPRETED else list(product)


def same(a: Tensor, b: Tensor) -> bool:
    """The sign of zero included; any NaN is as good as another."""
    if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    whole = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(
        *(z.nan_to_num(0.0, float("inf"), -float("inf")).contiguous().view(whole) for z in (a, b))
    )


def cast(
    x: Tensor,
    quant: Quant,
    rotation: Hadamard | None = None,
    clock: Clock = CLOCK,
    where: int = WHERE,
    product: int = PRODUCT,
) -> Operand:
    """The kernels' operand: nothing else may have made it."""
    with mock.patch.object(general_cuda, "quantize", wraps=general_cuda.quantize) as launched:
        made = quantize(x, quant, rotation=rotation, clock=clock, where=where, product=product)
    assert launched.called
    return made


def both(
    x: Tensor, quants: tuple, rotations: tuple = (None, None), histories: tuple = (None, None), clock=CLOCK
):
    return quantize_both(
        x, quants, rotations=rotations, clock=clock, where=(7, WHERE), products=(5, PRODUCT), histories=histories
    )  # fmt: skip


def reference(x: Tensor, quant: Quant, rotation: Hadamard | None = None, **how) -> Operand:
    how = {"clock": CLOCK, "where": WHERE, "product": PRODUCT} | how
    return quantize(x, quant, rotation=rotation, keep=True, **how)


def assert_equal(mine: Operand, theirs: Operand) -> None:
    for name in ("values", "amax", "block_scale", "largest"):
        one, other = getattr(mine, name), getattr(theirs, name)
        assert (one is None) == (other is None), name
        if one is not None:
            assert one.device.type == DEVICE.type
            assert same(one.cpu(), other.cpu()), name


def assert_references(x: Tensor, quant: Quant, rotation: Hadamard | None, down: bool) -> None:
    given = x.to(DEVICE)
    x, given = (x.t(), given.t()) if down else (x, given)
    assert_equal(cast(given, quant, rotation), reference(x, quant, rotation))


def test_the_kernels_make_every_form_of_every_preset():
    """So no preset's operand is quantised by torch's operations: the list of those that are is empty."""
    assert [name for name, (quant, _, _) in FORMS.items() if not forms.on_gpu(quant)] == []


@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_a_preset_has_the_references_bits(name):
    """In the layout and with the rotation of the preset; ragged, and more than one program both ways.

    The interpreter takes as long for a program as for a full one, so its forms have more than one by turns.
    """
    shape = ((37, 21), (9, 150), (37, 150))[[*FORMS].index(name) % 3] if INTERPRETED else (4099, 2000)
    scale = FORMS[name][0].scale
    powers = scale is not None and scale.format == "e8m0"  # times a code, they can be below what bf16 has
    for dtype in (torch.bfloat16, torch.float32) if powers or not INTERPRETED else (torch.bfloat16,):
        assert_references(drawn(shape, "mixed", dtype), *FORMS[name])


@pytest.mark.parametrize(
    ("name", "shape", "regime", "dtype", "down"),
    some(
        itertools.product(SLABS, SHAPES, REGIMES, (torch.bfloat16, torch.float32), (False, True)), 16, seed=0
    ),
    ids=str,
)
def test_every_bit_is_the_references_at_every_magnitude(name, shape, regime, dtype, down):
    assert_references(drawn(shape, regime, dtype), *SLABS[name], down)


@pytest.mark.parametrize(
    ("name", "value"),
    some(itertools.product(FORMS, [float("nan"), -float("inf"), 3.3e38]), 12, seed=3),
)
def test_what_is_not_finite_is_the_references_too(name, value):
    x = drawn((9, 40), "mixed")
    x[4, 20:22] = value
    assert_references(x, *FORMS[name])


UNUSUAL = [(float("nan"),), (float("inf"),), (-float("inf"), float("inf")), (3.0e38,) * 16]


@pytest.mark.parametrize("values", UNUSUAL, ids=str)
def test_a_slab_that_is_not_finite_is_the_references_too(values):
    """With 16 values near the largest, a rotation makes the infinity itself."""
    x = drawn((16, 21), "ordinary")
    x[: len(values), 3] = torch.tensor(values)
    assert_references(x, *SLABS["16x16 nearest"], down=False)
    rows, columns = both(x.to(DEVICE), (STOCHASTIC, NEAREST), (None, Hadamard()))
    theirs = reference(x.t(), NEAREST, Hadamard())
    assert_equal(rows, reference(x, STOCHASTIC, where=7))
    assert_equal(columns, theirs)
    assert not theirs.largest.isfinite()


def words_of(one: Case) -> set[str]:
    """The features of a case that the random ones must contain."""
    quant, rotation = one.quant, one.rotation
    outer, scale, block = quant.outer, quant.scale, quant.range
    has = {
        "part": one.part is not None,
        f"tensor's {outer and outer.granularity == 'tensor' and tag(outer.statistic)}": True,
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
    *("part", *(f"tensor's {statistic}" for statistic in STATISTICS)),
    *("outer None", "outer tensor", "outer row", "outer block"),
    *(f"bits {bits}" for bits in (8, 16, 24)),
    *(f"block {block}" for block in (None, "1x16", "1x32", "1x64", "1x128", "16x16", "32x32")),
    *(f"scale {name}" for name in ("e4m3", "ue5m3", "e8m0", "e6m2", "bf16", "fp32")),
    *(f"scale rounding {name}" for name in ("nearest", "away", "floor", "ceil")),
    *(f"element {name} stochastic" for name in ("e2m1", "e1m2", "int4", "e3m0", "e4m3", "e5m2")),
}


@pytest.mark.parametrize("part", range(1 if INTERPRETED else 13))
def test_random_cases_over_every_field_are_the_references_too(part):
    """Whatever the kernels accept of the random cases that the CPU's kernels are tested on: every outer
    statistic, over several steps, of parts, with telemetry, and the histories that they leave."""
    count, number, seen = 12 if INTERPRETED else 154, part * 10**6, set()
    while count > 0 or not seen >= WANTED:
        number += 1
        one = case(29, number)
        if one.x.numel() > (1500 if INTERPRETED else 10**6) or not forms.on_gpu(one.quant):
            continue
        words = words_of(one)
        if (count <= 0 and not (words & WANTED) - seen) or (one.part and one.quant.draws):
            continue
        one = replace(one, x=one.x.to(DEVICE))
        if not cuda.can_take(one.x):
            continue
        with mock.patch.object(general_cuda, "quantize", wraps=general_cuda.quantize) as launched:
            assert difference(one, Coverage()) is None, one
        count -= 1
        seen |= words if launched.called else set()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("rotated", [False, True], ids=["as it is", "rotated"])
def test_an_order_statistic_is_that_of_sorted_magnitudes(rotated, dtype):
    """NaN above infinity; ranks at both ends, among zeros, and among equal magnitudes.

    The interpreter takes both ends of one shape.
    """
    if rotated and dtype == torch.float32:
        return
    flips = signs(Hadamard(), CPU)
    few = [((9, 21), "subnormal"), ((5, 278), "ordinary")]
    for shape, regime in (
        *(few if INTERPRETED else itertools.product(SHAPES, REGIMES)),
        ((18, 37), "not finite"),
    ):
        x = drawn(shape, "ordinary" if regime == "not finite" else regime, dtype)
        if regime == "not finite":
            x[2, 3], x[3, 4], x[4, 5] = float("nan"), float("-inf"), -float("nan")
        copy = rotate(x.t(), Hadamard()) if rotated else x
        magnitudes = copy.abs().float().flatten().sort().values  # sort: NaN last
        ranks = {1, len(magnitudes) // 2, len(magnitudes) - 2}
        for rank in ranks if regime == "not finite" or not INTERPRETED else {len(magnitudes) // 2}:
            value, largest = cuda.order_statistic(
                x.to(DEVICE), general_cuda.sign_words(flips)[0] if rotated else None, rank
            )
            assert same(value.cpu(), magnitudes[rank - 1]), (shape, regime, rank)
            assert same(largest.cpu(), magnitudes[-1])


@pytest.mark.parametrize("statistic", ["percentile:0.9", "delayed:2", "static:0.5"])
def test_both_copies_take_their_own_statistic(statistic):
    """Two steps: the second copy's history is its own, and the largest magnitude stays beside the statistic."""
    quants, rotations = (
        (NEAREST, Quant(rounding="stochastic", outer=Outer(statistic=statistic))),
        (None, Hadamard()),
    )
    mine, theirs = History(), History()
    for step, factor in ((0, 1.0), (1, 8.0)):
        x, clock = drawn((18, 48), "ordinary") * factor, replace(CLOCK, step=step)
        made = both(x.to(DEVICE), quants, rotations, (None, mine), clock)
        expected = (
            reference(x, NEAREST, clock=clock, where=7),
            reference(x.t(), quants[1], Hadamard(), clock=clock, history=theirs),
        )
        for one, other in zip(made, expected, strict=True):
            assert_equal(one, other)
    assert {step: float(amax) for step, amax in mine.amax.items()} == theirs.amax
    assert bool(mine.amax) == statistic.startswith("delayed")
    assert made[1].amax != made[1].largest


@pytest.mark.parametrize("statistic", ["delayed", "held"])
def test_a_history_takes_one_launch_and_has_the_references_amaxes(statistic):
    """Repeated, skipped and evaluated steps, zeros, what is not finite, and a window that changes."""
    random, values = Random(1), [0.0, 1.0, 3e38, float("nan"), float("inf"), 1e-40]
    for steps in (1, 3):
        mine, theirs, step = History(), History(), 0
        for number in range(30):
            step += random.choice([0, 1, 1, 1, 5])
            steps += number == 15
            clock = Clock(0, random.choice(["training"] * 4 + ["evaluation"]), step)
            amax = torch.tensor(random.choice([*values, random.random()]))
            if random.random() < 0.1:  # as by a checkpoint
                mine.amax, theirs.amax = dict(mine.amax), dict(theirs.amax)
            with mock.patch.object(cuda, "remembered", wraps=cuda.remembered) as launched:
                one = getattr(mine, statistic)(amax.to(DEVICE), clock, steps)
            assert launched.call_count == 1
            with mock.patch.object(cuda, "runs_on", return_value=False):
                assert same(one.cpu(), getattr(theirs, statistic)(amax, clock, steps))
            kept = {moment: float(entry) for moment, entry in mine.amax.items()}
            assert kept == {moment: float(entry) for moment, entry in theirs.amax.items()}


def test_a_rotation_adds_in_the_references_order():
    """Check the order of additions by the largest magnitude: in a sum that is a tie of bf16 but for what an earlier addition may have lost."""
    g = torch.Generator().manual_seed(0)
    exponents = torch.tensor([0, -8, -9, -25, -26])[torch.randint(0, 5, (100_000, 16), generator=g)]
    x = torch.randn(exponents.shape, generator=g).sign() * 2.0**exponents
    mirror = [
        int(f"{r:04b}"[::-1], 2) for r in range(16)
    ]  # butterflies of a mirrored vector are those in the opposite order
    largest, opposite = (butterflies(z).bfloat16().abs().amax(dim=1) for z in (x, x[:, mirror]))
    told = x[largest != opposite].bfloat16()
    assert len(told) > 10
    for column in told[:10]:
        amaxes = general_cuda.amaxes(column[:, None].to(DEVICE), None, general_cuda.Form(NEAREST, 16))
        assert amaxes[2].item() == butterflies(column[None].float()).bfloat16().abs().max()


PAIRS = {
    "NVFP4": (STOCHASTIC, STOCHASTIC, None, Hadamard(signs="per_call")),
    "not rotated": (SLABS["headroom, bound 256"][0], NEAREST, None, None),
    **{
        name: (products.dgrad.g, products.wgrad.g, products.dgrad.hadamard, products.wgrad.hadamard)
        for name in ("quartet2", "mxfp4_backward", "tetrajet2", "fp8_current", "nvfp4_per_token", "ufp4")
        for products in [PRESETS[name]().products]
    },
}
"""Forms of both copies of a tensor, and their rotations."""


@pytest.mark.parametrize("name", PAIRS)
def test_both_copies_are_what_one_at_a_time_gives(name):
    first, second, *rotations = PAIRS[name]
    x = drawn((18, 130), "mixed", torch.float32 if name == "not rotated" else torch.bfloat16)
    with mock.patch.object(general_cuda, "quantize", wraps=general_cuda.quantize) as launched:
        rows, columns = both(x.to(DEVICE), (first, second), tuple(rotations))
    assert launched.called
    assert_equal(rows, reference(x, first, rotations[0], where=7, product=5))
    assert_equal(columns, reference(x.t(), second, rotations[1]))


PARTS = (3, 0, 1, 16, 0, 35)
"""Rows of parts: none, one, one block, and more than one program of tiles."""


def of_parts(width: int, generator: torch.Generator, dtype: torch.dtype) -> Tensor:
    """One part is large, one of zeros but for a NaN, and one subnormal."""
    x = torch.randn(sum(PARTS), width, generator=generator)
    x[torch.rand(x.shape, generator=generator) < 0.2] = 0.0
    x[:3] *= 1e25
    x[3:4] = 0.0
    x[3, width // 2] = float(Random(width).choice(["nan", "inf", "0"]))
    x[4:20] *= 1e-39
    x[30:50, :20] = 0.0
    return x.to(dtype)


def random_copy(random: Random) -> on_gpu.Copies:
    """A form of a random case or of a preset that is quantised in parts, and other draws for each part."""
    while True:
        one = case(31, random.randrange(10**6))
        quant, rotation = one.quant, one.rotation
        if random.random() < 0.4:
            quant, rotation, _ = FORMS[random.choice([*FORMS])]
        if on_gpu.in_parts(quant, rotation):
            return quant, rotation, [(random.randrange(2**32), random.randrange(2**32)) for _ in PARTS]


@pytest.mark.parametrize("seed", (0, 1, 2, 5, 33, 47, 86) if INTERPRETED else range(200))
def test_one_launch_quantises_each_part_as_by_itself(seed):
    """Random forms along the rows, down the columns, or both; the bits of every part are the reference's.

    The interpreter's seeds have outer scales of parts, of rows and none, and rotations longer than a block.
    Number 86 has codes times scales that bf16 lacks.
    """
    random = Random(seed)
    g, width = torch.Generator().manual_seed(seed), random.choice([21, 40, 130])
    x = of_parts(width, g, random.choice([torch.bfloat16, torch.float32]))
    copies = [random_copy(random), random_copy(random)]
    if seed % 3:
        copies[seed % 3 - 1] = None
    spans = [(end - rows, rows) for end, rows in zip(itertools.accumulate(PARTS), PARTS, strict=True)]
    made = on_gpu.quantize_parts(x.to(DEVICE), spans, tuple(copies), CLOCK, quantize)
    assert [bool(parts) for parts in made] == [copy is not None for copy in copies]
    for copy, parts, down in zip(copies, made, (False, True), strict=True):
        for one, (begin, rows), (where, turn) in zip(
            parts, spans if copy else (), copy[2] if copy else (), strict=True
        ):
            if rows:
                z = x[begin : begin + rows]
                theirs = reference(z.t() if down else z, *copy[:2], where=where, product=turn)
                assert_equal(Operand(one.values, copy[0], *one[1:]), theirs)


@pytest.mark.skipif(not INTERPRETED, reason="products on a GPU add in another order")
@pytest.mark.parametrize(
    ("preset", "transposed", "launches"), [("nvfp4", True, 14), ("nvfp4_per_token", False, 16)]
)
def test_experts_in_one_launch_change_no_bit(preset, transposed, launches, monkeypatch):
    """Empty and one-row experts. Two micro-batches of two products: the second finds the casts of the weights, and
    that of squares is transposed in the first."""
    monkeypatch.setattr(grouped, "covers", lambda *_: False)
    sizes = (0, 1, 5)

    def passes() -> list[dict[str, Tensor]]:
        model = Model(experts=len(sizes), transposed=transposed, width=16, hidden=16)
        engine = convert(model, PRESETS[preset]().model_copy(update={"layers": Layers()}), Clock(seed=11))
        engine.at(0, Run(10))
        with engine.still_weights():
            x, *routes = routed(sizes)
            return [results(model, (x[:, :16], *routes)) for _ in range(2)]

    monkeypatch.setattr(cuda, "runs_on", lambda device: False)
    expected = passes()
    monkeypatch.setattr(cuda, "runs_on", lambda device: True)
    with (
        mock.patch.object(general_cuda, "quantize_parts", wraps=general_cuda.quantize_parts) as together,
        mock.patch.object(general_cuda, "quantize", wraps=general_cuda.quantize) as apart,
    ):
        for mine, theirs in zip(passes(), expected, strict=True):
            assert all(same(one, theirs[name]) for name, one in mine.items())
    assert not apart.called
    assert together.call_count == launches


def test_parts_whose_bits_differ_are_found():
    copies = (NEAREST, 0), (STOCHASTIC, 16)
    assert DIFFERENT(DEVICE, torch.bfloat16, copies, quantize, *on_gpu.TRIAL_PARTS) == ""
    right = general_cuda.quantize_parts

    def wrong(*arguments):
        made = right(*arguments)
        made[1][2].block_scale[-1] *= 2
        return made

    with mock.patch.object(general_cuda, "quantize_parts", wrong):
        assert "differ" in DIFFERENT(DEVICE, torch.bfloat16, copies, quantize, *on_gpu.TRIAL_PARTS)


def test_a_tensor_of_zeros_and_one_of_a_single_element():
    for x in (torch.zeros(17, 20), torch.zeros(1, 1), torch.full((1, 1), -2.5)):
        for name in ("1x16 nearest", "16x16 nearest"):
            assert_references(x, *SLABS[name], down=False)


def test_every_word_of_the_clock_counts():
    x = drawn((3, 32), "ordinary").to(DEVICE)
    clocks = [CLOCK] + [
        replace(CLOCK, **change)
        for change in ({"seed": 4}, {"step": 4}, {"micro_batch": 4}, {"stream": "evaluation"})
    ]
    draws = [cast(x, STOCHASTIC, clock=clock).values for clock in clocks]
    draws.append(cast(x, STOCHASTIC, where=WHERE - 1).values)
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(draws, 2))


def test_an_amax_sees_every_element():
    for shape, places in (
        ((17, 1), [(row, 0) for row in range(17)]),
        ((2, 260), [(1, 255), (1, 256), (0, 259)]),
    ):
        for place in places:
            x = torch.zeros(shape, device=DEVICE)
            x[place] = -3.5
            assert general_cuda.amaxes(x, None, None)[0] == 3.5


def test_a_form_that_is_not_theirs_is_refused():
    x = torch.ones(16, 32, dtype=torch.bfloat16, device=DEVICE)
    assert forms.on_gpu(Quant(outer=Outer(statistic="hold:3")))
    assert not forms.on_gpu(Quant(outer=Outer(granularity="rows:16"), block="16x16"))
    assert cuda.can_take(x.t())
    assert not cuda.can_take(x.half())
    assert not cuda.can_take(x[:0])
    assert not cuda.can_take(x[:, ::2])
    low = Quant(outer=Outer(statistic="percentile:0.9"))
    assert on_gpu.rotates(x, low, Hadamard(), True)
    assert on_gpu.rotates(x, NEAREST, Hadamard(size=128), False)
    for given, rotation, down in (
        (x, Hadamard(), False),
        (x, Hadamard(size=32), True),
        (x.float(), Hadamard(), True),
    ):
        assert not on_gpu.rotates(given, low, rotation, down)
    assert not on_gpu.rotates(x, NEAREST, Hadamard(size=8), True)
    assert both(x, (STOCHASTIC, STOCHASTIC), (None, Hadamard()))
    assert both(x.t(), (STOCHASTIC, STOCHASTIC)) is None
    assert both(x, (STOCHASTIC, low), (Hadamard(), Hadamard(size=8))) is None
    assert both(x, (STOCHASTIC, Quant(outer=Outer(granularity="rows:16"), block="16x16"))) is None


@pytest.mark.skipif(
    not INTERPRETED, reason="products on a GPU add in another order; its operands are tested above"
)
@pytest.mark.parametrize(
    ("preset", "estimator", "both", "apart"),
    [
        ("nvfp4", None, 1, 0),
        ("nvfp4", "clip_mask", 1, 0),
        ("nvfp4", Dge(), 1, 0),
        ("tetrajet2", None, 1, 2),
        ("both tetrajet2", None, 0, 4),
    ],
)
def test_a_layer_reads_its_gradient_once_and_changes_no_bit(preset, estimator, both, apart, monkeypatch):
    """And where channels are taken apart, x once for each of its operands; also w and the gradient."""
    linear, clock = nn.Linear(32, 40, bias=False), Clock(3)
    x, dy = drawn((21, 32), "ordinary").float(), drawn((21, 40), "ordinary").float()
    asked = PRESETS[preset.split()[-1]]().products
    if estimator is not None:
        asked = asked.changed(fprop=asked.fprop.changed(w=asked.fprop.w.changed(estimator=estimator)))
    if not both:
        transform = asked.fprop.x.transform
        fprop = asked.fprop.changed(w=asked.fprop.x)
        wgrad = asked.wgrad.changed(g=asked.wgrad.g.changed(transform=transform))
        asked = asked.changed(fprop=fprop, wgrad=wgrad)

    def products() -> list[Tensor]:
        layer = EmulatedLinear(linear, "blocks.0.linear", clock, torch.bfloat16)
        layer.products = asked
        given = x.clone().requires_grad_()
        linear.weight.grad = None
        y = layer(given)
        y.backward(dy)
        return [y.detach(), given.grad, linear.weight.grad]

    monkeypatch.setattr(cuda, "runs_on", lambda device: False)
    expected = products()
    monkeypatch.setattr(cuda, "runs_on", lambda device: True)
    with (
        mock.patch.object(on_gpu, "quantize_both", wraps=on_gpu.quantize_both) as launched,
        mock.patch.object(on_gpu, "quantize_channels", wraps=on_gpu.quantize_channels) as split_by,
    ):
        assert all(torch.equal(a, b) for a, b in zip(products(), expected, strict=True))
    assert (launched.call_count, split_by.call_count) == (both, apart)


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(INTERPRETED, reason="there is a device to wait for on a GPU only")
def test_nothing_waits_for_the_device():
    x, low = drawn((64, 256), "ordinary").to(DEVICE), Quant(outer=Outer(statistic="percentile:0.9"))
    for mode in ("default", "error"):  # the first call of a shape compiles, and compares the form's bits
        torch.cuda.set_sync_debug_mode(mode)
        try:
            for quant, rotation in SLABS.values():
                cast(x, quant, rotation)
                cast(x.t(), quant, rotation)
            cast(x, low)
            both(x, (STOCHASTIC, STOCHASTIC), (None, Hadamard()))
        finally:
            torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_is_scaled_and_rounded_as_by_torch(out):
    """Sums of every exponent, ties of bf16, zeros of both signs, NaN and infinities; one amax or two."""
    g = torch.Generator().manual_seed(2)
    y = torch.randint(-(2**31), 2**31, (7, 401), generator=g).to(torch.int32).view(torch.float32)
    y[0, :300] = 1 + torch.arange(300) / 256  # every second one a tie of bf16
    y[1, :6] = torch.tensor([0.0, -0.0, float("inf"), -float("inf"), float("nan"), 3e38])
    factors = ((2.0, 0.5, 1.0), (2.7e-3, 31.4, 2688.0**2), (1e-40, None, 6.0), (None, 3e38, 0.1))
    for first, second, divisor in factors:
        amaxes = [None if amax is None else torch.tensor(amax) for amax in (first, second)]
        numerator = math.prod(amax for amax in amaxes if amax is not None)
        expected = (y * (numerator / torch.tensor(divisor))).to(out)
        given = [None if amax is None else amax.to(DEVICE) for amax in amaxes]
        assert same(cuda.scaled(y.to(DEVICE, copy=True), *given, divisor, out).cpu(), expected)
        slope = y.roll(3, 1).abs()
        sloped = (expected.float() * (slope / torch.tensor(5.0)).clamp(max=3.0)).to(out)
        for wide, (steep, result) in itertools.product(
            (False, True), [(None, expected), (slope.to(DEVICE), sloped)]
        ):
            finish = cuda.Finish(wide, steep, 5.0, 3.0)
            made = cuda.scaled(y.to(DEVICE, copy=True), *given, divisor, out, finish=finish)
            assert same(made.cpu(), result.float() if wide else result)
            assert same(finish.of(expected.to(DEVICE)).cpu(), result)
        base = y.roll(1, 0)
        expected = (base + y * (numerator / torch.tensor(divisor))).to(out)
        added = cuda.scaled(y.to(DEVICE, copy=True), *given, divisor, out, base.to(DEVICE))
        assert same(added.cpu(), expected)


def test_a_product_takes_the_scale_of_rows_and_of_one_operand():
    """By the kernel, to the bits of three operations of torch; by two without an amax, where a divisor is left."""
    x, w = drawn((9, 32), "ordinary"), drawn((21, 32), "ordinary")
    by_row = Quant(outer=Outer(granularity="row"))
    divided = Quant(element="int4", scale=BlockScale(format="e8m0"), outer=None, range=Range(prescale=0.7))
    pairs = ((NEAREST, NEAREST), (NEAREST, None), (by_row, NEAREST), (NEAREST, by_row), (by_row, by_row))
    for first, second in (*pairs, (divided, divided), (None, by_row)):
        a, b = (
            quantize(z.to(DEVICE), quant, keep=True) if quant else Operand(z.to(DEVICE))
            for z, quant in ((x, first), (w, second))
        )
        for out in (torch.bfloat16, torch.float32):
            with mock.patch.object(cuda, "scaled", wraps=cuda.scaled) as scaled:
                y = product(a, b, out)
            assert scaled.call_count == 1
            if INTERPRETED:
                sums = a.values.float() @ b.values.float().t()
                assert same(y, (sums * alpha(a, b)).to(out))


ROUNDED = {
    "tiles": SLABS["16x16 nearest"],
    "rows, drawn": (STOCHASTIC, None),
    "rotated": (NEAREST, Hadamard(signs="per_call")),
    "rotated by 64": (NEAREST, Hadamard(size=64)),
    "rotated by 8, which no kernel does": (NEAREST, Hadamard(size=8)),
    "row scales": (Quant(outer=Outer(granularity="row")), None),
    "no outer scale": (
        Quant(element="e4m3", block="1x32", scale=BlockScale(format="e8m0"), outer=None),
        None,
    ),
    "percentile": (Quant(outer=Outer(statistic="percentile:0.9")), None),
}


@pytest.mark.parametrize("name", ROUNDED)
def test_an_fp32_weight_is_rounded_to_bf16_as_it_is_quantised(name):
    """In the launches that a bf16 one takes: ties of bf16, subnormals, along rows and columns of memory."""
    quant, rotation = ROUNDED[name]
    w = drawn((18, 37), "ordinary", torch.float32)
    w[0] = 1 + torch.arange(37) / 256  # every second one a tie
    w[1, :4] = torch.tensor([1e-40, -1e-39, 3.4e38, 0.0])
    assert not torch.equal(w, w.bfloat16().float())
    options = {"rotation": rotation, "clock": CLOCK, "where": WHERE, "product": PRODUCT}
    by_torch = name in ("percentile", "rotated by 8, which no kernel does")
    for z in (w, w.t()):
        expected = reference(z.bfloat16(), quant, **options)
        with mock.patch.object(general_cuda, "quantize", wraps=general_cuda.quantize) as launched:
            made = quantize(z.to(DEVICE), quant, rounded=True, **options)
        assert launched.call_args.args[0].dtype == (torch.bfloat16 if by_torch else torch.int32)
        assert_equal(made, expected)
    kept, expected = (
        quantize(z.to(DEVICE), quant, keep="source", rounded=True, **options) for z in (w, w.bfloat16())
    )
    assert same(kept.source, expected.source)
    if not by_torch:
        copy = quant, rotation.size if rotation else 0
        assert DIFFERENT(DEVICE, torch.int32, (copy, copy), quantize) == ""


@pytest.mark.parametrize("out", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_of_two_parts_is_one_launch_and_the_bits_of_two(out):
    """The second part has equal rows or columns, or is a residual; scales of tensors and of rows, on either side,
    or none that is left for the product."""
    if not INTERPRETED:
        pytest.skip("the oracle multiplies on the CPU")
    x, w = drawn((9, 32), "ordinary"), drawn((21, 32), "ordinary")
    row, column = (
        drawn((5, 32), "ordinary")[:1].expand(9, 32),
        drawn((9, 21), "ordinary")[:, :1].expand(9, 32),
    )
    others = [Operand(x.roll(1, 0)), Operand(row, equal=0), Operand(column, equal=1)]
    none = (Quant(outer=Outer(granularity="block:128")), PRESETS["mxfp8"]().fprop.w)
    for quants in (*itertools.product((NEAREST, Quant(outer=Outer(granularity="row"))), repeat=2), none):
        first, second = (quantize(z, quant, keep=True) for z, quant in zip((x, w), quants, strict=True))
        for other, wide in itertools.product(others, (False, True)):
            for a, b in (([first, other], [second]), ([second], [first, other])):
                with mock.patch.object(cuda, "runs_on", return_value=False):
                    expected = split_product(a, b, out)
                with mock.patch.object(cuda, "scaled", wraps=cuda.scaled) as scaled:
                    made = split_product(a, b, out, finish=cuda.Finish(wide))
                assert scaled.call_count == 1
                assert same(made, expected.float() if wide else expected)


@pytest.mark.parametrize(
    ("transform", "dtype"),
    [
        (Transform(mean=True), torch.bfloat16),
        (Transform(mean=True), torch.float32),
        (Transform(clamp=0.9), torch.bfloat16),
        (Transform(clamp=0.9, residual=False), torch.float32),
        (Transform(mean=True, channels=0.1, clamp=0.9), torch.bfloat16),
    ],
    ids=["mean", "mean, fp32", "clamp", "clamp, fp32", "all"],
)
def test_parts_are_taken_out_of_an_operand_as_by_torch(transform, dtype):
    """In one launch each, by rows and by columns of memory; of what is not finite too."""
    whole = drawn(SHAPES[-1], "ordinary", dtype)
    spoiled = [drawn(SHAPES[1], "ordinary", dtype) for _ in range(2)]
    for x, bad in zip(spoiled, (math.inf, math.nan), strict=True):
        x[3, 5], x[4, 5:7] = bad, -bad
    for x in (whole, *spoiled, whole[:1].contiguous(), whole[:, :1].contiguous()):
        for z, channels in ((x, 1), (x.t(), 0), (x.t(), 1)):
            with mock.patch.object(cuda, "runs_on", return_value=False):
                expected = split(z, Quant(transform=transform), channels)
            with mock.patch.object(cuda, "parted", wraps=cuda.parted) as parted:
                made = split(z.to(DEVICE), Quant(transform=transform), channels)
            assert parted.call_count == bool(transform.mean) + bool(transform.clamp)
            for mine, theirs in zip(made, expected, strict=True):
                assert same(mine.values.cpu(), theirs.values)
                assert (mine.quant, mine.equal) == (theirs.quant, theirs.equal)
            assert made[0].values.is_contiguous() == z.is_contiguous()  # it lies as z does


def channels_apart(x: Tensor, quant: Quant, rotation: Hadamard | None, channels: int) -> None:
    """Both operands of a split are those of torch's split, quantised by the reference."""
    options = {"rotation": rotation, "clock": CLOCK, "where": WHERE, "product": PRODUCT}
    with mock.patch.object(cuda, "runs_on", return_value=False):
        rest, part = split(x, quant, channels)
    given = x.t().to(DEVICE).t() if channels == 0 else x.to(DEVICE)
    mine, few = quantize_channels(given, quant, channels, **options)
    assert_equal(mine, reference(rest.values, quant, rotation))
    theirs = reference(part.values, part.quant, rotation)
    assert torch.equal(few.nonzero[1].cpu(), part.kept)
    assert same(few.values.cpu(), theirs.values.index_select(channels, part.kept).float())
    assert same(few.largest.cpu(), theirs.largest)
    if few.largest.isfinite():
        assert torch.equal(few.dequantize().cpu()[:, : x.shape[1]], theirs.dequantize()[:, : x.shape[1]])
    if channels:
        expected = reference(rest.values, quant, rotation).dequantize()[:, : x.shape[1]]
        assert same(
            with_few(mine, few).cpu()[:, : x.shape[1]], expected + theirs.dequantize()[:, : x.shape[1]]
        )


@pytest.mark.parametrize("slot", ["fprop.x", "wgrad.x"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_channels_taken_apart_are_those_of_a_split(slot, dtype):
    """Along the rows of memory and down its columns, of what is not finite and of fp32 subnormals too."""
    products = PRESETS["tetrajet2"]().products
    quant, rotation = products.slot(slot), getattr(products, slot.partition(".")[0]).hadamard
    channels = int(slot == "fprop.x")
    x = drawn((37, 90), "mixed", dtype)
    x[:, ::7] *= 8
    bad = x.clone()
    bad[3, 7], bad[20, 84], bad[30, 9] = math.inf, math.nan, -math.inf
    for z in (x, bad, drawn((5, 21), "subnormal", dtype), x[:1]):
        channels_apart(z if channels else z.t(), quant, rotation, channels)
    sizes = 0 if rotation is None else rotation.size
    mxfp8 = CHANNEL_FORMATS["mxfp8"]
    plain = quant.changed(transform=None, source="original")
    pair = tuple((each, sizes, channels == 0) for each in (plain, mxfp8))
    assert DIFFERENT(DEVICE, dtype, pair, quantize) == ""


def test_other_splits_are_left_to_the_reference():
    """Rotated channels, an outer scale of the tensor, another transform, and a part that is not quantised."""
    x = drawn((37, 150), "ordinary").to(DEVICE)
    quant = PRESETS["tetrajet2"]().fprop.x
    options = {"clock": CLOCK, "where": WHERE, "product": PRODUCT}
    for other, rotation, channels in (
        (quant, Hadamard(), 1),
        (quant.changed(outer=Outer()), None, 1),
        (quant.changed(transform=Transform(channels=0.1, mean=True)), None, 1),
        (quant.changed(transform=Transform(channels=0.1, channels_in="bf16")), None, 1),
        (quant.changed(transform=Transform(mean=True)), None, 1),
        (quant, None, 0),
    ):
        assert quantize_channels(x, other, channels, rotation=rotation, **options) is None


def test_a_trial_launch_finds_every_kernel_equal_and_a_wrong_one(monkeypatch):
    assert cuda.problem(DEVICE) == ""
    right = cuda.scaled
    monkeypatch.setattr(cuda, "scaled", lambda *given: right(*given) * 2)
    assert cuda.problem(DEVICE).startswith("the results of scaled differ")

    def broken(*_: object) -> Tensor:
        raise RuntimeError("Failed to find C compiler. Please specify")

    monkeypatch.setattr(cuda, "scaled", broken)
    assert "install gcc" in cuda.problem(DEVICE)


def test_a_form_whose_bits_differ_is_left_to_the_reference(capsys, monkeypatch):
    """And one whose launch fails: both are said once."""
    monkeypatch.setattr(on_gpu, "different", DIFFERENT)
    quant, x = Quant(element="int4"), drawn((9, 40), "mixed").to(DEVICE)

    def wrong(*arguments, **options):
        made = launch(*arguments, **options)
        made[0].block_scale[-1] *= 2
        return made

    def broken(*arguments, **options):
        raise RuntimeError("Failed to find C compiler. Please specify")

    launch = general_cuda.quantize
    for fault, told in ((wrong, "differ"), (broken, "install gcc")):
        on_gpu.agrees.cache_clear()
        with mock.patch.object(general_cuda, "quantize", fault):
            for _ in range(2):
                assert_equal(quantize(x, quant), reference(x.cpu(), quant, clock=None, where=0, product=0))
        assert capsys.readouterr().err.count(told) == 1
    on_gpu.agrees.cache_clear()
    with mock.patch.object(general_cuda, "quantize", wraps=launch) as launched:
        assert_equal(
            quantize(x, quant.model_copy(update={"transform": Transform(mean=True)})), quantize(x, quant)
        )
    assert launched.call_count == 3  # a check, and two that use it


@pytest.mark.parametrize(
    ("size", "dtype", "down", "back"),
    some(
        itertools.product(general_cuda.SIZES, (torch.bfloat16, torch.float32), (False, True), (False, True)),
        5,
        seed=1,
    ),
)
def test_a_rotation_alone_is_the_references(size, dtype, down, back):
    """There and back, by rows and by columns of memory, ragged."""
    spec, x = Hadamard(size=size, signs="per_call"), drawn((37, 150), "mixed", dtype)
    x, given = (x.t(), x.to(DEVICE).t()) if down else (x, x.to(DEVICE))
    factor = drawn((x.shape[1] + -x.shape[1] % size, x.shape[0]), "ordinary").float()
    factor = factor.t() if down else factor.t().contiguous()
    with mock.patch.object(cuda, "runs_on", return_value=False), builds.using(None):
        expected = rotate(x, spec, CLOCK, PRODUCT, back=back)
        scaled = scale_rotated(x, factor, spec, CLOCK, PRODUCT)
    with mock.patch.object(general_cuda, "rotate", wraps=general_cuda.rotate) as launched:
        assert same(rotate(given, spec, CLOCK, PRODUCT, back=back).cpu(), expected)
        if back:
            there = factor.to(DEVICE)
            assert same(scale_rotated(given, there, spec, CLOCK, PRODUCT).cpu(), scaled)
    assert launched.call_count == 1 + back


ESTIMATED = {
    "quartet": (PRESETS["quartet"]().fprop.w, Hadamard(size=32, signs="none")),
    "microsoft_fp4": (PRESETS["microsoft_fp4"]().fprop.w, None),
    "squares": (Quant(block="16x16", estimator=Dge(k=2), range=Range(prescale=0.75)), None),
    "straight": (Quant(estimator=Dge(k=1)), None),
}
"""Forms with an estimator of the gradient, and their rotations."""


@pytest.mark.parametrize("name", ESTIMATED)
def test_a_slope_and_what_was_rounded_are_the_references(name):
    """Stored by rows and by columns; some elements are beyond the grid, and one block is not finite."""
    quant, rotation = ESTIMATED[name]
    x = drawn((32, 160), "mixed")
    x[5, 3:6] = torch.tensor([float("nan"), -float("inf"), 3e38])
    for given, down in ((x, False), (x, True)):
        given = given.t() if down else given
        theirs = quantize(given.float(), quant, rotation=rotation, clock=CLOCK, keep=True)
        mine = quantize(given.float().to(DEVICE), quant, rotation=rotation, clock=CLOCK, keep="source")
        assert mine.scaled is None
        assert same(mine.rescaled().cpu(), theirs.scaled)
        with mock.patch.object(general_cuda, "rescaled", wraps=general_cuda.rescaled) as launched:
            assert same(slope(mine).cpu(), slope(theirs))
        assert launched.call_count == 1


@pytest.mark.parametrize("name", some([(name,) for name in FORMS], 12, seed=5))
def test_the_sums_of_an_operand_and_of_its_moves_are_the_references(name):
    """Counts and blocks exactly, sums of fp64 but for their order; parts of the error, whose terms the reference
    rounds to fp32, to a millionth of it."""
    quant, rotation, down = FORMS[name[0]]
    several = not INTERPRETED or [*FORMS].index(name[0]) % 4 == 0
    x = drawn((64, 256) if several else (128, 128) if down else (32, 128), "ordinary").to(DEVICE)
    x = x.t() if down else x
    made = quantize(x, quant, rotation=rotation, clock=CLOCK, where=WHERE, product=PRODUCT, keep="source")
    with mock.patch.object(gpu_sums, "launched", wraps=gpu_sums.launched) as launched:
        mine, theirs = census(made), census_by_torch(made)
        scale = quant.scale
        weights = torch.randn(made.values.shape, generator=torch.Generator().manual_seed(1)).to(DEVICE)
        draws = gpu_sums.can_sum(made) and quant.rounding == "stochastic"
        moves = product_error.moved_by(made, weights) if draws else 0.0
    assert launched.call_count == (made.scaled is None) + (
        draws and not (scale and scale.rounding == "stochastic")
    )
    for field, value in vars(theirs).items():
        own = getattr(mine, field)
        if isinstance(value, Tensor):
            assert torch.equal(own.double(), value.double()), field
        elif isinstance(value, int):
            assert own == value, field
        else:
            slack = 1e-6 * theirs.error if field in ("dead", "scale_bias") else 0.0
            assert own == pytest.approx(value, rel=1e-12, abs=slack), field
    with mock.patch.object(gpu_sums, "can_sum", return_value=False):
        assert not draws or moves == pytest.approx(product_error.moved_by(made, weights), rel=1e-12)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_a_product_is_compared_as_by_torch(dtype):
    y, exact = drawn((37, 150), "ordinary", dtype), drawn((37, 150), "ordinary", torch.float32) * 1.01
    sums = product_error.compare(y.to(DEVICE), exact.to(DEVICE))
    with mock.patch.object(gpu_sums, "of_product", return_value=None):
        expected = product_error.compare(y, exact)
    assert vars(sums) == pytest.approx(vars(expected), rel=1e-12)


def test_signs_become_words():
    for size in general_cuda.SIZES:
        flips = signs(Hadamard(size=size, signs="per_call"), CPU, CLOCK, PRODUCT)
        words = general_cuda.sign_words(flips)
        bits = [words[place // 32] >> place % 32 & 1 for place in range(size)]
        assert [1 - 2 * bit for bit in bits] == flips.tolist()


@pytest.mark.skipif(not INTERPRETED, reason="a GPU chooses the order of programs itself")
def test_no_bit_depends_on_the_order_of_programs_or_on_what_memory_held(monkeypatch):
    """Programs run in a drawn order, and every allocated output holds NaN or the largest integer at first."""
    from triton.runtime.interpreter import interpreter_builder

    place, random, ran = interpreter_builder.set_grid_idx, Random(8), []

    def shuffled(x: int, y: int, z: int) -> None:
        count = interpreter_builder.grid_dim[0]
        if x == y == z == 0:
            ran[:] = random.sample(range(count), count)
        place(ran[x], y, z)

    x = drawn((17, 256), "ordinary")
    low = Quant(outer=Outer(statistic="percentile:0.9"))

    def results() -> list[Tensor]:
        sums = x.float()
        made = [cast(x, STOCHASTIC), cast(x.t(), NEAREST), cast(x, SLABS["16x16 nearest"][0]), cast(x, low)]
        made += both(x, (NEAREST, STOCHASTIC), (None, Hadamard()))
        packed = packed_by_kernel(
            Operand(made[0].values, STOCHASTIC, None, made[0].block_scale), "nvfp4", (32, 256)
        )
        amax = made[0].amax
        parts = [part for one in made for part in (one.values, one.amax, one.block_scale, one.largest)]
        scaled = cuda.scaled(sums, amax, amax, 3.0, torch.bfloat16)
        return [*parts, scaled, packed.data.view(torch.uint8), packed.scales.view(torch.uint8)]

    expected = results()
    monkeypatch.setattr(interpreter_builder, "set_grid_idx", shuffled)
    torch.use_deterministic_algorithms(True)  # fills what `empty` returns
    try:
        assert torch.empty(1).isnan()
        found = results()
    finally:
        torch.use_deterministic_algorithms(False)
    assert len(ran) > 1
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
