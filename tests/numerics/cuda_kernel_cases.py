"""Promises of the CUDA quantisers, run by test_cuda_kernels.py in a process of its own: in Triton's interpreter, or on a GPU.

Triton decides while it is imported whether it interprets, so this file cannot share a process with the other tests.
"""

import itertools
import math
from collections.abc import Iterable
from dataclasses import replace
from random import Random
from unittest import mock

import pytest
import torch
from support.cases import sampled
from support.quantisers import Coverage, case, difference, reference_only
from support.triton_cases import INTERPRETED, patch_language_once
from torch import Tensor, nn

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.numerics import census
from ablate.numerics.choices import STATISTICS
from ablate.numerics.encoded import packed_by_kernel
from ablate.numerics.hadamard import butterflies, rotate, signs
from ablate.numerics.history import History
from ablate.numerics.kernels import builds, cpu, cuda, general, general_cuda
from ablate.numerics.kernels.cuda import problem
from ablate.numerics.philox import Clock
from ablate.numerics.product import alpha, product
from ablate.numerics.quantize import Operand, quantize, quantize_both
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Range, tag
from ablate.recipes import PRESETS

CPU = torch.device("cpu")
DEVICE = CPU if INTERPRETED else torch.device("cuda")
patch_language_once()
CLOCK = Clock(2**32 - 5, step=3, micro_batch=1)
WHERE = 0xDEADBEEF

NEAREST, STOCHASTIC = Quant(), Quant(rounding="stochastic")
FORMS = {
    "1x16 nearest": NEAREST,
    "16x16 nearest": Quant(block="16x16"),
    "1x16 stochastic": STOCHASTIC,
    "headroom, bound 256": Quant(
        rounding="stochastic", range=Range(headroom=17 / 16), outer=Outer(bound=256.0)
    ),
}
REGIMES = {"ordinary": 1.0, "tiny": 1e-30, "huge": 1e30, "subnormal": 1e-40, "one ulp of bf16 apart": 0.0}
CASES = [((9, 21), regime) for regime in REGIMES] + [((18, 37), "ordinary"), ((5, 278), "ordinary")]
"""Ragged both ways; more than one slab of rows, more than one program along the columns. A GPU has time for more."""
if not INTERPRETED:
    CASES += [(shape, regime) for shape in ((4096, 1000), (333, 2048)) for regime in REGIMES]


def cases(form: str, other: bool) -> list[tuple[tuple[int, int], str]]:
    """Those of CASES for one form and one of two ways to look at it: the interpreter takes every second: each way has all."""
    return CASES[(list(FORMS).index(form) + other) % 2 :: 2] if INTERPRETED else CASES


def some(product: Iterable[tuple], size: int, seed: int) -> list[tuple]:
    """Return all of a product on a GPU, and a sample of it in the interpreter without `--all`."""
    return sampled(product, size, seed) if INTERPRETED else list(product)


# The interpreter is numpy, which warns of divisions by zero and of infinities; the kernels mean them.
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")


def drawn(shape: tuple[int, int], regime: str, dtype: torch.dtype = torch.bfloat16) -> Tensor:
    """Zeros, whole zero blocks, ties and a wide range within one tensor."""
    g = torch.Generator().manual_seed(0)
    if regime == "one ulp of bf16 apart":
        x = 1 + torch.randint(0, 128, shape, generator=g) / 128
    else:
        x = torch.randn(shape, generator=g) * REGIMES[regime]
    x[torch.rand(shape, generator=g) < 0.2] = 0.0
    x[::3] *= 1e-3
    x[-1] *= -1
    x[: min(4, len(x) - 1), :16] = 0.0
    return x.to(dtype)


def reference(x: Tensor, quant: Quant, **how) -> Operand:
    with mock.patch.object(cpu, "can_quantize", return_value=False):
        return quantize(x, quant, clock=CLOCK, **how)


def same(a: Tensor, b: Tensor) -> bool:
    """The sign of zero included; any NaN is as good as another."""
    if a.dtype != b.dtype or a.shape != b.shape or not torch.equal(a.isnan(), b.isnan()):
        return False
    whole = torch.int16 if a.dtype == torch.bfloat16 else torch.int32
    return torch.equal(
        *(z.nan_to_num(0.0, float("inf"), -float("inf")).contiguous().view(whole) for z in (a, b))
    )


def cast(
    x: Tensor, quant: Quant, flips: Tensor | None = None, clock: Clock | None = CLOCK, where: int = WHERE
) -> cuda.Quantized:
    return cuda.quantize(x, form(quant, flips, where), clock)


def form(quant: Quant, flips: Tensor | None = None, where: int = 0) -> cuda.Form:
    return cuda.Form(quant, None if flips is None else cuda.sign_word(flips), where)


def assert_equal(mine: cuda.Quantized, theirs: Operand) -> None:
    for name in ("values", "amax", "block_scale", "largest"):
        value = getattr(mine, name)
        assert value.device.type == DEVICE.type
        assert same(value.cpu(), getattr(theirs, name)), name


@pytest.mark.parametrize(
    ("name", "dtype", "transposed"),
    some(itertools.product(FORMS, [torch.bfloat16, torch.float32], [False, True]), 8, seed=0),
    ids=str,
)
def test_every_bit_is_the_references(name, dtype, transposed):
    for shape, regime in cases(name, transposed ^ (dtype == torch.float32)):
        x = drawn(shape, regime, dtype)
        x, given = (z.t() if transposed else z for z in (x, x.to(DEVICE)))
        assert_equal(cast(given, FORMS[name]), reference(x, FORMS[name], where=WHERE))


@pytest.mark.parametrize("rule", ["fixed", "per_call"])
@pytest.mark.parametrize("name", ["1x16 nearest", "headroom, bound 256"])
def test_a_rotated_transpose_is_the_references_too(name, rule):
    rotation = Hadamard(signs=rule)
    flips = signs(rotation, CPU, CLOCK, 6)
    for shape, regime in cases(name, rule == "fixed"):
        x = drawn(shape, regime)
        theirs = reference(x.t(), FORMS[name], rotation=rotation, where=5, product=6)
        assert_equal(cast(x.to(DEVICE).t(), FORMS[name], flips, where=5), theirs)


WANTED = {*STATISTICS} | {"part", "kept", "rotated before", "rotated inside", "16x16"}
"""Kinds of cases that the random ones must contain."""


@pytest.mark.parametrize("part", range(1 if INTERPRETED else 13))
def test_random_cases_over_every_field_are_the_references_too(part, monkeypatch):
    """Whatever the kernels accept of the random cases that the CPU's kernels are tested on: every outer
    statistic, over several steps, of parts, with telemetry, and the histories that they leave."""
    monkeypatch.setattr(cpu, "can_quantize", lambda *_: False)
    monkeypatch.setattr(general, "can_quantize", lambda *_: False)
    if INTERPRETED:  # `reference_only` takes away the builds, and with them these kernels
        monkeypatch.setattr(cuda, "runs_on", lambda device: builds.build() is not None)
        monkeypatch.setattr(census, "compiled", census.reference)  # which takes CPU tensors
    count, number, seen = 10 if INTERPRETED else 154, part * 10**6, set()
    while count > 0 or not seen >= WANTED:
        number += 1
        one = case(23, number)
        one = replace(one, x=one.x.to(DEVICE))  # the kernels' device; on a CPU they cover nothing
        if one.x.numel() > (600 if INTERPRETED else 10**6) or not cuda.can_quantize(one.x, one.quant):
            continue
        if one.part and one.quant.draws:  # its bits are drawn for the whole, by the reference
            continue
        inside = one.rotation is not None and cuda.can_rotate(one.x, one.quant, one.rotation)
        has = {
            tag(one.quant.outer.statistic): True,
            "part": one.part is not None,
            "16x16": one.quant.block == "16x16",
            "kept": not any(size % 16 for size in one.x.shape),
            "rotated inside": inside,
            "rotated before": one.rotation is not None and not inside,
        }
        words = {word for word, there in has.items() if there}
        if count <= 0 and words <= seen:
            continue
        count -= 1
        with (
            mock.patch.object(cuda, "quantize", wraps=cuda.quantize) as own,
            mock.patch.object(general_cuda, "quantize", wraps=general_cuda.quantize) as others,
        ):
            assert difference(one, Coverage()) is None, one
        launched = (
            own.called or others.called
        )  # the general kernel rotates where NVIDIA's form is not rotated
        assert launched or one.part, one  # half of the columns lies in memory as no kernel takes it
        seen |= words if launched else set()


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
    for shape, regime in (*(few if INTERPRETED else CASES), ((18, 37), "not finite")):
        x = drawn(shape, "ordinary" if regime == "not finite" else regime, dtype)
        if regime == "not finite":
            x[2, 3], x[3, 4], x[4, 5] = float("nan"), float("-inf"), -float("nan")
        copy = rotate(x.t(), Hadamard()) if rotated else x
        magnitudes = copy.abs().float().flatten().sort().values  # sort: NaN last
        ranks = {1, len(magnitudes) // 2, len(magnitudes) - 2}
        for rank in ranks if regime == "not finite" or not INTERPRETED else {len(magnitudes) // 2}:
            value, largest = cuda.order_statistic(
                x.to(DEVICE), cuda.sign_word(flips) if rotated else None, rank
            )
            assert same(value.cpu(), magnitudes[rank - 1]), (shape, regime, rank)
            assert same(largest.cpu(), magnitudes[-1])


@pytest.mark.parametrize("statistic", ["percentile:0.9", "delayed:2", "static:0.5"])
def test_both_copies_take_their_own_statistic(statistic, monkeypatch):
    """Two steps: the second copy's history is its own, and the largest magnitude stays beside the statistic."""
    first, second = NEAREST, Quant(rounding="stochastic", outer=Outer(statistic=statistic))
    monkeypatch.setattr(cuda, "runs_on", lambda device: True)
    mine, theirs = History(), History()
    for step, factor in ((0, 1.0), (1, 8.0)):
        x, clock = drawn((18, 48), "ordinary") * factor, replace(CLOCK, step=step)
        both = quantize_both(
            x.to(DEVICE), first, second, rotation=Hadamard(), clock=clock, where=(7, WHERE), product=6,
            histories=(None, mine),
        )  # fmt: skip
        with reference_only(), mock.patch.object(cuda, "runs_on", return_value=False):
            expected = (
                quantize(x, first, clock=clock, where=7),
                quantize(
                    x.t(), second, rotation=Hadamard(), clock=clock, where=WHERE, product=6, history=theirs
                ),
            )
        for one, other in zip(both, expected, strict=True):
            assert_equal(one, other)
    assert {step: float(amax) for step, amax in mine.amax.items()} == theirs.amax
    assert bool(mine.amax) == statistic.startswith("delayed")
    assert both[1].amax != both[1].largest


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
        amax = cuda.amax_both(column[:, None].to(DEVICE), 0)
        assert amax[1].item() == butterflies(column[None].float()).bfloat16().abs().max()


@pytest.mark.parametrize(
    ("first", "second", "rotation"),
    [
        (NEAREST, NEAREST, Hadamard()),
        (STOCHASTIC, STOCHASTIC, Hadamard(signs="per_call")),
        (FORMS["headroom, bound 256"], NEAREST, None),
    ],
)
def test_both_copies_are_what_one_at_a_time_gives(first, second, rotation):
    flips = rotation and signs(rotation, CPU, CLOCK, 6)
    for shape, regime in CASES[::2]:
        x = drawn(shape, regime, torch.bfloat16 if rotation else torch.float32)
        rows, columns = cuda.quantize_both(
            x.to(DEVICE), form(first, None, 7), form(second, flips, WHERE), CLOCK
        )
        assert_equal(rows, reference(x, first, where=7))
        assert_equal(columns, reference(x.t(), second, rotation=rotation, where=WHERE, product=6))


UNUSUAL = [(float("nan"),), (float("inf"),), (-float("inf"), float("inf")), (3.0e38,) * 16]
UNUSUAL_FORMS = ["1x16 nearest", "1x16 stochastic", "16x16 nearest"]


@pytest.mark.parametrize(
    ("name", "values"),  # the interpreter takes two of the three forms for each
    some(
        [
            (name, values)
            for number, values in enumerate(UNUSUAL)
            for place, name in enumerate(UNUSUAL_FORMS)
            if not INTERPRETED or place != number % 3
        ],
        4,
        seed=0,
    ),
    ids=str,
)
def test_what_is_not_finite_is_the_references_too(name, values):
    """With 16 values near the largest, a rotation makes the infinity itself."""
    quant, rotation = FORMS[name], Hadamard()
    flips = signs(rotation, CPU)
    x = drawn((16, 21), "ordinary")
    x[: len(values), 3] = torch.tensor(values)
    for z, given in ((x, x.to(DEVICE)), (x.t(), x.to(DEVICE).t())):
        assert_equal(cast(given, quant), reference(z, quant, where=WHERE))
    if quant.block == "1x16":
        rows, columns = cuda.quantize_both(
            x.to(DEVICE), form(quant, None, 7), form(quant, flips, WHERE), CLOCK
        )
        theirs = reference(x.t(), quant, rotation=rotation, where=WHERE)
        assert_equal(rows, reference(x, quant, where=7))
        assert_equal(columns, theirs)
        assert_equal(cast(x.to(DEVICE).t(), quant, flips), theirs)
        assert not theirs.largest.isfinite()


def test_a_tensor_of_zeros_and_one_of_a_single_element():
    for x in (torch.zeros(17, 20), torch.zeros(1, 1), torch.full((1, 1), -2.5)):
        for quant in (NEAREST, FORMS["16x16 nearest"]):
            assert_equal(cast(x.to(DEVICE), quant, None, None, 0), reference(x, quant))


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
            assert cuda.amax_both(x, None).tolist() == [3.5, 0.0]


def test_a_form_that_is_not_theirs_is_refused(monkeypatch):
    monkeypatch.setattr(cuda, "runs_on", lambda device: True)
    x = torch.ones(16, 32, dtype=torch.bfloat16, device=DEVICE)
    assert cuda.can_quantize(x, NEAREST)
    assert cuda.can_quantize(x.t(), Quant(outer=Outer(statistic="hold:3")))
    assert cuda.can_rotate(x.t(), NEAREST, Hadamard())
    assert not cuda.can_rotate(x, NEAREST, Hadamard())
    assert not cuda.can_rotate(x.t(), NEAREST, Hadamard(size=32))
    assert not cuda.can_rotate(x.t(), FORMS["16x16 nearest"], Hadamard())
    assert not cuda.can_rotate(x.t().float(), NEAREST, Hadamard())
    assert not cuda.can_quantize(x.half(), NEAREST)
    assert not cuda.can_quantize(x[:0], NEAREST)
    assert not cuda.can_quantize(x[:, ::2], NEAREST)
    assert not cuda.can_quantize(x, Quant(scale=BlockScale(zero="one")))
    assert not cuda.can_quantize(x, Quant(outer=Outer(granularity="row")))
    assert cuda.can_quantize_both(x, STOCHASTIC, STOCHASTIC, Hadamard())
    assert not cuda.can_quantize_both(x.t(), STOCHASTIC, STOCHASTIC, None)
    assert not cuda.can_quantize_both(x.float(), STOCHASTIC, STOCHASTIC, Hadamard())
    assert not cuda.can_quantize_both(x, FORMS["16x16 nearest"], STOCHASTIC, None)
    assert not cuda.can_quantize_both(x, STOCHASTIC, Quant(rounding="stochastic", bits=16), None)


@pytest.mark.skipif(
    not INTERPRETED, reason="products on a GPU add in another order; its operands are tested above"
)
def test_a_layer_reads_its_gradient_once_and_changes_no_bit(monkeypatch):
    linear, clock = nn.Linear(32, 48, bias=False), Clock(3)
    x, dy = drawn((21, 32), "ordinary").float(), drawn((21, 48), "ordinary").float()

    def products() -> list[Tensor]:
        layer = EmulatedLinear(linear, "blocks.0.linear", clock, torch.bfloat16)
        layer.products = PRESETS["nvfp4"]().products
        given = x.clone().requires_grad_()
        linear.weight.grad = None
        y = layer(given)
        y.backward(dy)
        return [y.detach(), given.grad, linear.weight.grad]

    monkeypatch.setattr(cpu, "can_quantize", lambda *_: False)
    expected = products()
    monkeypatch.setattr(cuda, "runs_on", lambda device: True)
    with mock.patch.object(cuda, "quantize_both", wraps=cuda.quantize_both) as both:
        assert all(torch.equal(a, b) for a, b in zip(products(), expected, strict=True))
    assert both.call_count == 1


@pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype")
@pytest.mark.skipif(INTERPRETED, reason="there is a device to wait for on a GPU only")
def test_nothing_waits_for_the_device():
    x, flips = drawn((64, 256), "ordinary").to(DEVICE), signs(Hadamard(), CPU)
    low = Quant(outer=Outer(statistic="percentile:0.9"))
    for mode in ("default", "error"):  # the first call of a shape compiles, and times what it compiled
        torch.cuda.set_sync_debug_mode(mode)
        try:
            cast(x, STOCHASTIC)
            cast(x.t(), NEAREST, flips)
            cast(x, FORMS["16x16 nearest"])
            cast(x, low)
            cuda.quantize_both(x, form(STOCHASTIC), form(STOCHASTIC, flips), CLOCK)
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


def test_a_product_takes_the_scale_of_rows_and_of_one_operand(monkeypatch):
    """By the kernel, to the bits of three operations of torch; by two without an amax, where a divisor is left."""
    monkeypatch.setattr(cuda, "runs_on", lambda device: True)
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


def test_a_trial_launch_finds_every_kernel_equal_and_a_wrong_one():
    found = []

    def right(x: Tensor, form: cuda.Form, clock: Clock | None) -> cuda.Quantized:
        found.append(cuda.quantize(x, form, clock))
        return found[-1]

    assert problem(DEVICE, right) == ""

    def wrong(x: Tensor, form: cuda.Form, clock: Clock | None) -> cuda.Quantized:
        made = found.pop(0)
        if form.quant.block == "16x16":
            made.block_scale[-1] *= 2
        return made

    assert problem(DEVICE, wrong).startswith("the results of by_tiles differ")

    def broken(*_: object) -> cuda.Quantized:
        raise RuntimeError("Failed to find C compiler. Please specify")

    assert "install gcc" in problem(DEVICE, broken)


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

    word = cuda.sign_word(signs(Hadamard(), CPU))
    x = drawn((17, 256), "ordinary")
    low = Quant(outer=Outer(statistic="percentile:0.9"))

    def results() -> list[Tensor]:
        sums = x.float()
        made = [cast(x, STOCHASTIC), cast(x.t(), NEAREST), cast(x, FORMS["16x16 nearest"]), cast(x, low)]
        made += cuda.quantize_both(x, form(NEAREST), cuda.Form(STOCHASTIC, word), CLOCK)
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
