"""Subjects of benchmarks/conformance_mutants.py: faults that show on their data, and controls without any."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "benchmarks"))
from conformance_mutants import SETS, compared, deviations

MUTANTS = SETS["first"][0] | SETS["second"][0]
CONTROLS = SETS["first"][1] | SETS["second"][1]


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
