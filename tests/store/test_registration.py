"""Pre-registration: which question and design were recorded before which results existed."""

from contextlib import closing

import pytest
from support.experiments import idle, ledger, sweep

from ablate.execution.controller import Controller
from ablate.execution.workers import Inline
from ablate.reports.answer import Answer
from ablate.store.registration import late_changes, registrations


def recorded(state, name: str = "tiny") -> list[tuple[int, int]]:
    """(trials, finished) of each registration."""
    with closing(ledger(state, name)) as book:
        return [(each.trials, each.finished) for each in registrations(book)]


def late(state, name: str = "tiny") -> list[str]:
    """Parts that were changed once there were results."""
    with closing(ledger(state, name)) as book:
        return [part for part, _ in late_changes(book)]


def provenance(state, name: str = "tiny") -> str:
    rows = {row["what"]: row["which"] for row in Answer.open(state, name).provenance().rows}
    return rows["registered"]


def test_a_design_is_registered_once_before_its_first_trial(tmp_path):
    for _ in range(2):
        sweep(idle(tmp_path), tmp_path)
    assert recorded(tmp_path) == [(6, 0)]
    assert provenance(tmp_path).endswith("before any of its 6 trials had finished")


@pytest.mark.parametrize(
    ("changed", "trials"),
    [
        ({"question": "Another question?"}, (6, 6)),
        ({"metric": {"name": "val/loss", "min_effect": 0.01}}, (6, 6)),
        ({"seeds": 3}, (9, 6)),
        ({"ablate": {"rht": [True]}}, (4, 4)),
        ({"arms": {"a": {"rht": True}, "b": {"rht": False}}, "ablate": None}, (6, 6)),
        ({"against": {"rht": False}, "ablate": {"rht": [True, False]}}, (4, 4)),
    ],
)
def test_a_change_after_results_is_recorded_with_how_many_there_were(changed, trials, tmp_path):
    sweep(idle(tmp_path), tmp_path)
    sweep(idle(tmp_path, **changed), tmp_path)
    assert recorded(tmp_path) == [(6, 0), trials]
    assert "; changed to " in provenance(tmp_path)
    assert f"after {trials[1]} of its {trials[0]} trials had finished" in provenance(tmp_path)


def test_what_changes_no_result_is_no_change(tmp_path):
    sweep(idle(tmp_path), tmp_path)
    sweep(idle(tmp_path, budget={"hours": 5}, telemetry={"log": 3}), tmp_path)
    assert len(recorded(tmp_path)) == 1


def test_results_of_an_earlier_sweep_were_known_before(tmp_path):
    sweep(idle(tmp_path, "first"), tmp_path)
    sweep(idle(tmp_path, "second", seeds=3), tmp_path)
    assert recorded(tmp_path, "second") == [(9, 6)]
    assert "after 6 of its 9 trials had finished" in provenance(tmp_path, "second")
    assert late(tmp_path, "second") == []  # three were not


def test_a_question_that_changes_before_there_is_a_result_is_not_late(tmp_path):
    for question in ("Does it matter?", "Does it pay?"):
        steps = Controller(idle(tmp_path, question=question), tmp_path, "cpu", Inline, None).run()
        while not (tmp_path / "sweeps" / "tiny" / "ledger.db").exists() or len(recorded(tmp_path)) < 1:
            next(steps)
        next(steps)
        steps.close()
    assert recorded(tmp_path) == [(6, 0), (6, 0)]
    assert late(tmp_path) == []


def test_a_search_registers_its_space(tmp_path):
    space = {"ablate": {"workload.x": {"uniform": [1e-4, 1e-2]}}, "seeds": 1}
    sweep(idle(tmp_path, search={"sampler": "random", "trials": 2}, **space), tmp_path)
    space["ablate"] = {"workload.x": {"uniform": [1e-4, 1e-3]}}
    sweep(idle(tmp_path, search={"sampler": "random", "trials": 2}, **space), tmp_path)
    assert len(recorded(tmp_path)) == 2
