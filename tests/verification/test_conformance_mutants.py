"""Subjects of benchmarks/conformance_mutants.py: faults that show on their data, and controls without any."""

import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from conformance_mutants import SETS, compared, deviations
from conformance_subjects import stepwise

from ablate.numerics.scaling import block_scales, round_scale
from ablate.verification.conformance.result import Outcome
from ablate.verification.conformance.run import conform
from ablate.verification.conformance.subject import Subject

MUTANTS = {name: one for mutants, _ in SETS.values() for name, one in mutants.items()}
CONTROLS = {name: one for _, controls in SETS.values() for name, one in controls.items()}


@pytest.mark.parametrize("name", MUTANTS)
def test_a_mutant_differs_from_the_reference_on_its_data_alone(name):
    shown, hidden = compared(MUTANTS[name])
    assert shown
    assert not hidden


@pytest.mark.parametrize("name", CONTROLS)
def test_a_control_equals_the_reference(name):
    deviating = deviations(CONTROLS[name])
    assert deviating
    assert not any(deviating.values()), deviating


@pytest.mark.parametrize(
    ("subject", "properties", "name"),
    [
        ("unpadded_stride", "scale_layout", "tile rows of swizzled scales written at a stride without"),
        ("nan_above_given_amax", "saturated_scales", "cast to E4M3 without clamp"),
        ("nan_for_128", "every_scale", "block scale 128 decoded as NaN"),
        ("no_subnormals", "small_tensor", "element code 0 decoded as 0.5, 0.5 decoded as 0.75"),
        ("half_subnormals", "element_ties", "scaled elements of magnitude 0.001953 to 0.01465 encoded 2^-1"),
        ("lost_carry", "adjacent_draws", "carry lost"),
        (
            "wrong_table",
            "orthogonal",
            "rotation not orthogonal: 16 entries have the wrong sign, from (12, 12)",
        ),
        (
            "overlapping_parts",
            "forward_product",
            "y: terms 16 to 159 of 160 of the contraction counted twice; ",
        ),
        ("unpadded_experts", "grouped_widths", "scales of w found at offsets without their padding"),
        ("scale_of_gate", "grouped_forward", "tensor scale of the first half of w's rows used for both"),
    ],
)
def test_a_family_of_faults_names_its_member(subject, properties, name):
    one = MUTANTS[subject]
    findings = conform(one.subject(), one.recipe, only=[properties])
    assert [row.outcome for row in findings.rows] == [Outcome.FAIL]
    assert findings.rows[0].fault.startswith(name)
    assert findings.text.endswith("; nothing else differs.")


def cut_scales(bits: int) -> Subject:
    """Cut the exact block scales to a number of mantissa bits before they are rounded to E4M3."""

    def blocks(largest, S, quant):
        exact = (largest * (S * torch.full_like(S, 1 / 6))).contiguous()
        cut = (exact.view(torch.int32) & -(1 << (23 - bits))).view(torch.float32)
        return torch.where(exact < 440, round_scale(cut, quant.scale), block_scales(largest, S, quant))

    return Subject("cut_scales", cast=lambda x: stepwise(x, blocks=blocks))


@pytest.mark.parametrize(
    ("bits", "name"),
    [
        (10, "block scale rounded twice, through fp16 toward zero"),
        (11, "block scales within 2^-8 of a step of a midpoint"),
    ],
)
def test_a_fault_is_not_named_by_a_computation_that_other_casts_refute(bits, name):
    """On the data of order_of_scale, both give what (a/6) S gives; on random data they do not."""
    only = ["random_fp32", "order_of_scale"]
    rows = conform(cut_scales(bits), only=only).rows
    assert [row.outcome for row in rows] == [Outcome.FAIL] * 2
    assert all(row.fault.startswith(name) for row in rows)
    assert not any("declare" in row.detail for row in rows)
