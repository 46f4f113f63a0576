"""Casts against gfloat, Graphcore's definitions of number formats in double precision: elements, draws, block scales.

Its MX blocks are compared in verification/test_conformance_libraries.py.
"""

from functools import partial

import gfloat
import pytest
import torch
from gfloat import RoundMode, formats

from ablate.numerics.formats import ELEMENTS, SCALES
from ablate.numerics.rounding import ROUNDINGS, SCALE_ROUNDINGS
from ablate.verification import peers


def info(k: int, precision: int, bias: int, **rules) -> gfloat.FormatInfo:
    rules = {
        "is_signed": True,
        "has_nz": True,
        "num_high_nans": 0,
        "has_subnormals": True,
        "is_twos_complement": False,
    } | rules
    domain = gfloat.Domain.Finite
    return gfloat.FormatInfo(f"k{k}p{precision}", k, precision, bias=bias, domain=domain, **rules)


def theirs(form: gfloat.FormatInfo, y: torch.Tensor, mode: RoundMode = RoundMode.TiesToEven, **bits):
    return torch.from_numpy(gfloat.round_ndarray(form, y.double().numpy(), mode, sat=True, **bits))


OCP = {name: getattr(formats, f"format_info_ocp_{name}") for name in ("e2m1", "e2m3", "e3m2", "e4m3", "e5m2")}
OWN = {"e1m2": info(4, 3, bias=1), "e3m0": info(4, 1, bias=3)}
UE5M3 = info(8, 4, bias=15, is_signed=False, has_nz=False, num_high_nans=8)  # up to 61440


@pytest.mark.parametrize("name", [*OCP, *OWN])
def test_a_cast_to_nearest_equals_gfloats(name):
    row = peers.cast(name, partial(theirs, (OCP | OWN)[name]))
    assert row.ok, row


def test_int4_is_a_fraction_with_two_bits():
    row = peers.cast("int4", lambda y: theirs(OWN["e1m2"], y.double() / 4) * 4)
    assert row.ok, row


@pytest.mark.parametrize("width", [8, 16, 24])
@pytest.mark.parametrize("name", OCP)
def test_a_stochastic_cast_equals_gfloats(name, width):
    """Rounding up if 2^width f >= bits + 1 is gfloat's mode with ~bits."""
    y = torch.randn(20_000, generator=torch.Generator().manual_seed(width)) * ELEMENTS[name].max / 2
    y = torch.cat((y, y * 2.0 ** (ELEMENTS[name].emin - 8)))
    bits = torch.randint(0, 1 << width, y.shape, generator=torch.Generator().manual_seed(width + 1))
    ours = ROUNDINGS["stochastic"](y, grid=ELEMENTS[name], bits=bits.float(), width=width)
    given = {"srbits": (1 << width) - 1 - bits.numpy(), "srnumbits": width}
    assert torch.equal(ours.double(), theirs(OCP[name], y, RoundMode.StochasticFastest, **given))


@pytest.mark.parametrize(
    ("rule", "mode"),
    [
        ("nearest", RoundMode.TiesToEven),
        ("floor", RoundMode.TowardZero),
        ("ceil", RoundMode.TowardPositive),
    ],
)
@pytest.mark.parametrize(("name", "form"), [("e4m3", OCP["e4m3"]), ("ue5m3", UE5M3)])
def test_a_block_scale_equals_gfloats(name, form, rule, mode):
    y = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    y = torch.cat((y, torch.nextafter(y, torch.tensor(0.0)), torch.nextafter(y, torch.tensor(float("inf")))))
    assert torch.equal(SCALE_ROUNDINGS[rule](y, grid=SCALES[name]).double(), theirs(form, y, mode))


def test_a_comparison_finds_the_one_number_that_differs():
    nearest = partial(ROUNDINGS["nearest"], grid=ELEMENTS["e2m1"])
    row = peers.cast("e2m1", lambda y: torch.where(y == 6, 4.0, nearest(y)))
    assert not row.ok
    assert row.measured.startswith("1 of ")
