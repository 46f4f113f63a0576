"""Promises of the CUDA quantisers, run by test_cuda_kernels.py in a process of its own: in Triton's interpreter, or on a GPU.

Triton decides while it is imported whether it interprets, so this file cannot share a process with the other tests.
"""

import itertools
import os
from dataclasses import replace
from unittest import mock

import pytest
import torch
from support.quantisers import case, reference_only
from torch import Tensor, nn

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.numerics.hadamard import butterflies, signs
from ablate.numerics.kernels import cpu, cuda
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Range
from ablate.recipes import PRESETS

INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"
DEVICE = torch.device("cpu" if INTERPRETED else "cuda")
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
CASES = [((9, 21), regime) for regime in REGIMES] + [((18, 37), "ordinary"), ((5, 150), "ordinary")]
"""Ragged both ways; more than one slab of rows, more than one program along the columns. A GPU has time for more."""
if not INTERPRETED:
    CASES += [(shape, regime) for shape in ((4096, 1000), (333, 2048)) for regime in REGIMES]


def cases(form: str, other: bool) -> list[tuple[tuple[int, int], str]]:
    """Those of CASES for one form and one of two ways to look at it: the interpreter takes every second: each way has all."""
    return CASES[(list(FORMS).index(form) + other) % 2 :: 2] if INTERPRETED else CASES


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


def assert_equal(mine: cuda.Quantized, theirs: Operand) -> None:
    expected = (theirs.values, theirs.amax, theirs.block_scale)
    for name, a, b in zip(("values", "amax", "block scales"), mine, expected, strict=True):
        assert a.device.type == DEVICE.type
        assert same(a.cpu(), b), name
    assert same(mine[1].cpu(), theirs.largest) or theirs.largest.isnan()


@pytest.mark.parametrize("transposed", [False, True], ids=["rows", "columns"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("form", FORMS)
def test_every_bit_is_the_references(form, dtype, transposed):
    for shape, regime in cases(form, transposed ^ (dtype == torch.float32)):
        x = drawn(shape, regime, dtype)
        x, given = (z.t() if transposed else z for z in (x, x.to(DEVICE)))
        assert_equal(
            cuda.quantize(given, FORMS[form], None, CLOCK, WHERE), reference(x, FORMS[form], where=WHERE)
        )


@pytest.mark.parametrize("name", ["fixed", "per_call"])
@pytest.mark.parametrize("form", ["1x16 nearest", "headroom, bound 256"])
def test_a_rotated_transpose_is_the_references_too(form, name):
    rotation = Hadamard(signs=name)
    flips = signs(rotation, DEVICE, CLOCK, 6)
    for shape, regime in cases(form, name == "fixed"):
        x = drawn(shape, regime)
        theirs = reference(x.t(), FORMS[form], rotation=rotation, where=5, product=6)
        assert_equal(cuda.quantize(x.to(DEVICE).t(), FORMS[form], flips, CLOCK, 5), theirs)


def test_random_cases_over_every_field_are_the_references_too(monkeypatch):
    """Whatever the kernels accept of the random cases that the CPU's kernels are tested on."""
    wanted, number, statistics = 12 if INTERPRETED else 1000, 0, set()
    monkeypatch.setattr(cpu, "can_quantize", lambda *_: False)
    if INTERPRETED:
        monkeypatch.setattr(cuda, "runs_on", lambda device: True)
    while wanted:
        number += 1
        one = case(23, number)
        x = one.x.to(DEVICE)
        if (
            one.part
            or x.numel() > (1024 if INTERPRETED else 10**6)
            or not cuda.can_quantize(x, one.quant, one.rotation)
        ):
            continue
        wanted -= 1
        statistics.add(one.quant.outer.statistic)
        options = {
            "rotation": one.rotation,
            "clock": one.clocks[0],
            "where": one.where,
            "product": one.product,
        }
        mine = quantize(x, one.quant, **options)
        with reference_only(), mock.patch.object(cuda, "can_quantize", return_value=False):
            theirs = quantize(one.x, one.quant, **options)
        for name in ("values", "amax", "block_scale"):
            assert same(getattr(mine, name).cpu(), getattr(theirs, name)), f"{name}: {one}"
    assert statistics == {"amax"}


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
        amax = cuda.amax_both(column[:, None].to(DEVICE), signs(Hadamard(signs="none"), DEVICE))
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
    flips = rotation and signs(rotation, DEVICE, CLOCK, 6)
    for shape, regime in CASES[::2]:
        x = drawn(shape, regime, torch.bfloat16 if rotation else torch.float32)
        rows, columns = cuda.quantize_both(
            x.to(DEVICE), cuda.Form(first, None, 7), cuda.Form(second, flips, WHERE), CLOCK
        )
        assert_equal(rows, reference(x, first, where=7))
        assert_equal(columns, reference(x.t(), second, rotation=rotation, where=WHERE, product=6))


UNUSUAL = [(float("nan"),), (float("inf"),), (-float("inf"), float("inf")), (3.0e38,) * 16]
UNUSUAL_FORMS = ["1x16 nearest", "1x16 stochastic", "16x16 nearest"]


@pytest.mark.parametrize(
    ("form", "values"),  # the interpreter takes two of the three forms for each
    [
        (form, values)
        for number, values in enumerate(UNUSUAL)
        for place, form in enumerate(UNUSUAL_FORMS)
        if not INTERPRETED or place != number % 3
    ],
    ids=str,
)
def test_what_is_not_finite_is_the_references_too(form, values):
    """With 16 values near the largest, a rotation makes the infinity itself."""
    quant, rotation = FORMS[form], Hadamard()
    flips = signs(rotation, DEVICE)
    x = drawn((16, 21), "ordinary")
    x[: len(values), 3] = torch.tensor(values)
    for z, given in ((x, x.to(DEVICE)), (x.t(), x.to(DEVICE).t())):
        assert_equal(cuda.quantize(given, quant, None, CLOCK, WHERE), reference(z, quant, where=WHERE))
    if quant.block == "1x16":
        rows, columns = cuda.quantize_both(
            x.to(DEVICE), cuda.Form(quant, None, 7), cuda.Form(quant, flips, WHERE), CLOCK
        )
        theirs = reference(x.t(), quant, rotation=rotation, where=WHERE)
        assert_equal(rows, reference(x, quant, where=7))
        assert_equal(columns, theirs)
        assert_equal(cuda.quantize(x.to(DEVICE).t(), quant, flips, CLOCK, WHERE), theirs)
        assert not theirs.largest.isfinite()


def test_a_tensor_of_zeros_and_one_of_a_single_element():
    for x in (torch.zeros(17, 20), torch.zeros(1, 1), torch.full((1, 1), -2.5)):
        for quant in (NEAREST, FORMS["16x16 nearest"]):
            assert_equal(cuda.quantize(x.to(DEVICE), quant, None, None, 0), reference(x, quant))


def test_every_word_of_the_clock_counts():
    x = drawn((3, 32), "ordinary").to(DEVICE)
    clocks = [CLOCK] + [
        replace(CLOCK, **change)
        for change in ({"seed": 4}, {"step": 4}, {"micro_batch": 4}, {"stream": "evaluation"})
    ]
    draws = [cuda.quantize(x, STOCHASTIC, None, clock, WHERE)[0] for clock in clocks]
    draws.append(cuda.quantize(x, STOCHASTIC, None, CLOCK, WHERE - 1)[0])
    assert not any(torch.equal(a, b) for a, b in itertools.combinations(draws, 2))


def test_an_amax_sees_every_element():
    for shape, places in (
        ((17, 1), [(row, 0) for row in range(17)]),
        ((2, 130), [(1, 127), (1, 128), (0, 129)]),
    ):
        for place in places:
            x = torch.zeros(shape, device=DEVICE)
            x[place] = -3.5
            assert cuda.amax_both(x, None).tolist() == [3.5, 0.0]


def test_a_form_that_is_not_theirs_is_refused(monkeypatch):
    monkeypatch.setattr(cuda, "runs_on", lambda device: True)
    x = torch.ones(16, 32, dtype=torch.bfloat16, device=DEVICE)
    assert cuda.can_quantize(x, NEAREST, None)
    assert cuda.can_quantize(x.t(), NEAREST, Hadamard())
    assert not cuda.can_quantize(x, NEAREST, Hadamard())
    assert not cuda.can_quantize(x.t(), NEAREST, Hadamard(size=32))
    assert not cuda.can_quantize(x.t(), FORMS["16x16 nearest"], Hadamard())
    assert not cuda.can_quantize(x.t().float(), NEAREST, Hadamard())
    assert not cuda.can_quantize(x.half(), NEAREST, None)
    assert not cuda.can_quantize(x[:0], NEAREST, None)
    assert not cuda.can_quantize(x[:, ::2], NEAREST, None)
    assert not cuda.can_quantize(x, Quant(scale=BlockScale(zero="one")), None)
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


@pytest.mark.skipif(INTERPRETED, reason="there is a device to wait for on a GPU only")
def test_nothing_waits_for_the_device():
    x, flips = drawn((64, 256), "ordinary").to(DEVICE), signs(Hadamard(), DEVICE)
    for mode in ("default", "error"):  # the first call of a shape compiles, and times what it compiled
        torch.cuda.set_sync_debug_mode(mode)
        try:
            cuda.quantize(x, STOCHASTIC, None, CLOCK, WHERE)
            cuda.quantize(x.t(), NEAREST, flips, CLOCK, WHERE)
            cuda.quantize(x, FORMS["16x16 nearest"], None, CLOCK, WHERE)
            cuda.quantize_both(x, cuda.Form(STOCHASTIC), cuda.Form(STOCHASTIC, flips), CLOCK)
        finally:
            torch.cuda.set_sync_debug_mode("default")
