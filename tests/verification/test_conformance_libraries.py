"""Adaptors of public libraries: those that are installed return what their library computes, in the kit's form."""

import inspect
import sys
from pathlib import Path

import pytest
import torch
from torch import Tensor

from ablate.errors import InputError
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.quantize import quantize
from ablate.verification.conformance.examination import reference
from ablate.verification.conformance.numbers import differences, read
from ablate.verification.peers import tensors

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import conformance
import libraries
from libraries import CHANGES, LIBRARIES, claimed, library_subject

EXACT = {
    "transformer_engine": ("nvfp4", "four_over_six", "row_scaled", "mxfp4"),
    "torchao": ("mxfp4",),
    "gfloat": ("mxfp4", "mxfp8"),
}
"""Casts that equal the recipe on these tensors, which are no subnormal numbers."""


@pytest.mark.parametrize(
    ("name", "recipe"), [(name, recipe) for name, all in EXACT.items() for recipe in all]
)
def test_a_library_that_computes_the_recipe_equals_it(name, recipe):
    if LIBRARIES[name].version is None:
        pytest.skip(f"{name} is not installed")
    subject, quant = library_subject(name, recipe), claimed(name, recipe).fprop.x
    assert subject.version == LIBRARIES[name].version
    for kind in ("gaussian", "outliers", "ties", "zero_blocks"):
        x = tensors()[kind][:32, :128].contiguous()
        got = read(subject.cast(x), *x.shape, quant, subject.swizzled)
        assert got.values is not None or got.codes is not None
        assert differences(got, reference(x, quant), quant.tile[1]).count == 0, kind


def even(amax: Tensor, mantissa: int, emax: int) -> Tensor:
    """Return AMD's "even" scale: amax with half a unit of a short mantissa added to its bits, then cut off."""
    bits = (amax.view(torch.int32) + (1 << (23 - mantissa - 1))) & (0x1FF << 23)
    return bits.view(torch.float32) * 2.0**-emax


@pytest.mark.parametrize(
    ("name", "recipe", "mantissa"),
    [
        ("quark", "mxfp4", 1),
        ("quark", "mxfp8", 3),
        ("compressed_tensors", "mxfp4", 1),
        ("compressed_tensors", "mxfp8", 1),
    ],
)
def test_the_even_rule_takes_the_next_power_of_two_where_amd_does(name, recipe, mantissa):
    quant = claimed(name, recipe).fprop.x
    near = torch.tensor([1.0, 1.5, 1.75, 1.9375])
    amax = torch.cat([near * (1 + k * 2.0**-23) for k in (-1, 0, 1)] + [(128 + torch.arange(128.0)) / 128])
    x = torch.zeros(len(amax), 32)
    x[:, 0] = amax
    scales = quantize(x, quant).block_scale[:, 0, 0, 0]
    assert torch.equal(scales, even(amax, mantissa, {"e2m1": 2, "e4m3": 8}[quant.element]))
    assert ELEMENTS[quant.element].mantissa >= mantissa


def test_every_adaptor_is_a_library_and_every_change_is_in_words():
    made = {
        name for name, thing in vars(libraries).items() if inspect.isfunction(thing) and name in LIBRARIES
    }
    assert made == {name for name, library in LIBRARIES.items() if library.subject} == set(conformance.CODES)
    assert all(library.subject is getattr(libraries, name, None) for name, library in LIBRARIES.items())
    used = {change for library in LIBRARIES.values() for change in (library.recipes or {}).values()}
    assert used - {""} == set(CHANGES)


def test_one_sentence_says_what_is_missing():
    absent = next(name for name, library in LIBRARIES.items() if library.recipes and library.version is None)
    recipe = next(iter(LIBRARIES[absent].recipes))
    for name, asked, words in (
        ("torcha", "nvfp4", "'torchao' is the nearest"),
        ("gguf", "nvfp4", "gguf has no cast of nvfp4; it has mxfp4"),
        (absent, recipe, f"{absent} is not installed: pip install "),
    ):
        with pytest.raises(InputError) as error:
            library_subject(name, asked)
        assert words in str(error.value)
        assert len(error.value.problems) == 1
