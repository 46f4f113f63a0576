"""Mutants and controls of the conformance kit: faults that show on their data, controls without any, and what is seen."""

import pytest
from mutants.conformance.run import SETS, compared, deviations

from ablate.verification.conformance.result import Outcome
from ablate.verification.conformance.run import conform

MUTANTS = {name: one for made in SETS.values() for name, one in made.mutants.items()}
CONTROLS = {name: one for made in SETS.values() for name, one in made.controls.items()}


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


SEEN = {
    "unpadded_stride": ("scale_layout", "block scale: "),
    "nan_above_given_amax": ("saturated_scales", "block scale: "),
    "nan_for_128": ("every_scale", "value: 3.12 % of 8,192 wrong, all NaN"),
    "no_subnormals": ("small_tensor", "value: "),
    "half_subnormals": ("element_ties", "code: "),
    "lost_carry": ("adjacent_draws", ""),
    "wrong_table": ("orthogonal", ""),
    "overlapping_parts": ("forward_product", "product: y, "),
    "scale_of_gate": ("grouped_forward", "product: y, "),
    "dropped_nan": ("nan_visible", ""),
    "dropped_tail": ("contraction_sizes", "product: y, "),
    "inverted_outer": ("saturated_scales", "amax: "),
    "overwritten": ("mean_of_draws", ""),
    "repeated_bits": ("independent_draws", ""),
    "rounded_stages": ("rotation_values", ""),
    "past_the_group": ("grouped_unaligned", "product: dw, "),
    "squares_by_columns": (
        "square_blocks",
        "block scale: 64.8 % of 2,048 wrong, the right ones at other places",
    ),
}
"""One property that sees a mutant, and the begin of its first wrong stage; all of them are in `run.py`."""


@pytest.mark.parametrize("name", SEEN)
def test_a_mutant_is_seen_by_its_property(name):
    one, (wanted, stage) = MUTANTS[name], SEEN[name]
    [row] = conform(one.subject(), one.recipe, only=[wanted]).rows
    assert (row.outcome, row.stage.startswith(stage), bool(row.stage)) == (Outcome.FAIL, True, bool(stage)), (
        row
    )
