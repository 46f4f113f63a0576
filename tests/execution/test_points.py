"""Arms as points of a study: what the ledger says of them, against sums of one's own; and the arms of earlier sweeps."""

import json
import math
import shutil
from contextlib import closing

import pytest
from support.commands import here
from support.experiments import idle, ledger, sweep, tiny, write
from support.studies import trials

from ablate.errors import InputError
from ablate.execution.projections import Projections
from ablate.execution.study_points import GivenUp, outcome, over, reports, warm
from ablate.experiment.load import load
from ablate.experiment.schema import Constraint
from ablate.results.next_runs import violations
from ablate.store.ledger import Ledger

LIMITS = (Constraint(metric="a", at_most=2.0), Constraint(metric="b", at_least=1.0))


@pytest.mark.parametrize(
    ("finals", "expected"),
    [
        ({"a": 2.0, "b": 1.0}, [0.0, 0.0]),
        ({"a": 3.5, "b": 4.0}, [1.5, -3.0]),
        ({"a": -math.inf, "b": -math.inf}, [-math.inf, math.inf]),
        ({"a": math.nan, "b": 1.5}, [math.inf, -0.5]),
        ({"b": 0.0}, [math.inf, 1.0]),
    ],
)
def test_a_constraint_is_broken_by_what_is_too_much_or_not_there(finals, expected):
    assert violations(LIMITS, finals) == expected
    assert violations((), finals) == []


def member(
    book: Ledger,
    seed: int,
    status: str,
    reason: str | None = None,
    point: tuple = (0, {}),
    **records: dict[int, float],
) -> int:
    """A member of an arm, its trial in the ledger; returns the trial's number there."""
    number, knobs = point
    arm = book.add_arm(f"arm {number}", knobs, None, number)
    trial = book.add_member(arm, seed, f"{number:08x}{seed:08x}", "{}")
    events = [
        {"step": step, "time": 0.0, "metrics": {name.replace("_", "/"): value}}
        for name, by in records.items()
        for step, value in by.items()
    ]
    book.record(trial, events)
    book.settle(trial, status, reason)
    return trial


@pytest.fixture
def book(tmp_path):
    found = Ledger(tmp_path / "ledger.db")
    yield found
    found.close()


SEARCH = {"search": {"trials": 3, "sampler": "random"}, "ablate": {"cooldown": {"uniform": [0.0, 0.75]}}}


def test_an_arm_is_the_mean_over_its_seeds_and_keeps_to_what_the_worst_of_them_keeps_to(tmp_path, book):
    metrics = [{"name": "val/loss"}, {"name": "grad/norm", "direction": "maximize"}]
    experiment = tiny(
        tmp_path, metric=metrics, constraints=[{"metric": "nan/activation", "at_most": 1}], **SEARCH
    )
    member(book, 0, "done", val_loss={2: 5.0, 4: 3.0}, grad_norm={4: 1.0}, nan_activation={4: 0.0})
    member(book, 1, "done", val_loss={2: 4.0, 3: 9.0, 4: 2.0}, grad_norm={4: 4.0}, nan_activation={4: 3.0})
    its = outcome(book, book.members(), experiment)
    assert its.values == (2.5, 2.5)
    assert its.by_seed == ([3.0, 2.0], [1.0, 4.0])
    assert its.means == {2: 4.5, 4: 2.5}
    assert its.violations == (2.0, -1.0)


@pytest.mark.parametrize(
    ("status", "reason", "values", "broken"),
    [
        ("diverged", "non-finite loss or gradient at step 3", (math.inf, -math.inf), 1.0),
        ("oom", "out of memory after step 12, 71.0 GB in use", (math.inf, -math.inf), 1.0),
        ("failed", "FileNotFoundError: train.bin", (math.nan, math.nan), -1.0),
    ],
)
def test_what_the_recipe_itself_ended_breaks_a_constraint_and_what_a_machine_did_is_unknown(
    status, reason, values, broken, tmp_path, book
):
    metrics = [{"name": "val/loss"}, {"name": "grad/norm", "direction": "maximize"}]
    experiment = tiny(tmp_path, metric=metrics, **SEARCH)
    member(book, 0, "done", val_loss={4: 3.0}, grad_norm={4: 1.0})
    member(book, 1, status, reason, val_loss={2: 4.0}, grad_norm={2: 4.0})
    its = outcome(book, book.members(), experiment)
    assert its.values == pytest.approx(values, nan_ok=True)
    assert its.violations == (broken,)


def test_an_arm_is_judged_at_its_rungs_by_its_first_seed_alone(tmp_path, book):
    keys = SEARCH | {"search": {"trials": 3, "pruner": "median", "rungs": [2, 4, 6]}}
    experiment = tiny(tmp_path, shape={"steps": 8}, seeds=[7, 3], **keys)
    member(book, 3, "running", val_loss={2: 1.0, 4: 1.0})
    assert reports(book, book.members(), experiment) == {}
    member(book, 7, "running", val_loss={1: 9.0, 2: 5.0, 4: math.nan})
    assert reports(book, book.members(), experiment) == {2: 5.0, 4: math.inf}
    assert reports(book, book.members(), tiny(tmp_path)) == {}


def test_wilcoxon_hears_of_each_seed_as_it_ends(tmp_path, book):
    experiment = tiny(
        tmp_path, seeds=[4, 3, 2, 1, 0], **SEARCH | {"search": {"trials": 3, "pruner": "wilcoxon"}}
    )
    member(book, 4, "done", val_loss={2: 9.0, 4: 5.0})
    member(book, 3, "running", val_loss={2: 9.0})
    member(book, 2, "diverged", val_loss={2: 9.0})
    member(book, 1, "failed", "FileNotFoundError", val_loss={2: 9.0})
    assert reports(book, book.members(), experiment) == {0: 5.0, 2: math.inf}
    assert not over(book.members())


def shown(projections: Projections) -> list[tuple]:
    return [
        (t.state.name, t.intermediate_values, t.values, t.user_attrs)
        for t in projections.study.study.get_trials()
    ]


@pytest.mark.parametrize(("pruner", "at"), [("asha", 2), ("wilcoxon", 3)])
def test_an_arm_that_is_given_up_is_so_in_the_ledger_in_the_study_and_in_a_study_drawn_again(
    pruner, at, tmp_path, book
):
    search = {"trials": 3, "sampler": "random", "pruner": pruner} | (
        {"rungs": [2, 4]} if pruner == "asha" else {}
    )
    experiment = tiny(tmp_path, shape={"steps": 8}, seeds=5, **SEARCH | {"search": search})
    projections = Projections(experiment, book, tmp_path, tmp_path, None, True)
    point = projections.study.ask()
    best = [
        member(book, seed, "done", point=point, val_loss={2: 1.0, 4: 1.0 + seed, 8: 1.0 + seed})
        for seed in range(5)
    ]
    assert projections.judge(best[0]) == {}
    projections.settled(best[0])
    projections.refresh()
    point = projections.study.ask()
    worse = [
        member(book, seed, "done", point=point, val_loss={2: 2.0, 4: 2.0 + seed, 8: 2.0 + seed})
        for seed in range(4)
    ]
    worse.append(member(book, 4, "pending", point=point))
    (arm,) = book.arms_of(worse[0])
    decision = GivenUp(pruner, at)
    assert projections.judge(worse[0]) == {arm: decision}
    assert projections.judge(worse[0]) == {arm: decision}
    for trial in worse if pruner == "asha" else worse[4:]:
        book.settle(trial, "pruned", decision.reason)
    projections.due(arm)
    projections.refresh()
    told = {2: 2.0} if pruner == "asha" else {0: 2.0, 1: 3.0, 2: 4.0, 3: 5.0}
    assert [row[:2] for row in shown(projections)] == [
        ("COMPLETE", shown(projections)[0][1]),
        ("PRUNED", told),
    ]
    (tmp_path / "optuna.log").unlink()
    again = Projections(experiment, book, tmp_path, tmp_path, None, True)
    again.refresh()
    assert shown(again) == shown(projections)
    assert again.judge(worse[0]) == {}


def test_a_pruners_decision_is_read_as_it_was_made():
    decision = GivenUp("asha", 12)
    assert GivenUp.parse(decision.reason) == decision
    assert str(decision) == "given up by asha at 12"


@pytest.mark.parametrize(
    "reason",
    [None, "", "stopped by hand", "given up by asha at 12", "[]", "{}", '{"pruner": "asha"}', "3"],
)
def test_another_reason_is_no_decision_of_a_pruner(reason):
    assert GivenUp.parse(reason) is None


# Earlier sweeps


@pytest.fixture(scope="module")
def first(tmp_path_factory):
    """A grid of four arms and a baseline, run; leave it as it is."""
    folder = tmp_path_factory.mktemp("first")
    sweep(idle(folder, name="first", seeds=1, ablate={"rht": [True, False], "cooldown": [0, 0.5]}), folder)
    return folder


def second(first, folder, sweeps=("first",), name: str = "second", **keys):
    """A search that starts from it, in a state folder of its own."""
    shutil.copytree(first, folder, dirs_exist_ok=True)
    search = {"trials": 2, "sampler": "random", "warm": list(sweeps)}
    return idle(
        folder,
        name=name,
        seeds=1,
        **{"ablate": {"rht": [True, False], "cooldown": {"uniform": [0.0, 0.75]}}, "search": search} | keys,
    )


def test_a_search_starts_from_the_arms_of_an_earlier_sweep(first, tmp_path):
    experiment = second(first, tmp_path)
    outcome, _ = sweep(experiment, tmp_path)
    assert (outcome.status, outcome.ran) == ("done", 2)  # the baseline is the earlier one's
    book = ledger(tmp_path, "first")
    known = [
        (f"first/{m.name}", json.loads(m.knobs), [book.last_values(m.trial)["val/loss"]])
        for m in book.members()
        if m.name != "bf16"
    ]
    book.close()
    found = trials(tmp_path, "second")
    assert [(t.user_attrs["warm"], t.params, t.values) for t in found[:4]] == known
    assert [("warm" in t.user_attrs, t.state.name) for t in found[4:]] == [(False, "COMPLETE")] * 2
    book = ledger(tmp_path, "second")
    assert [arm.optuna for arm in book.arms()] == [None, 0, 1]
    book.close()


def test_the_study_is_drawn_again_when_the_earlier_sweep_is_gone(first, tmp_path):
    experiment = second(first, tmp_path)
    sweep(experiment, tmp_path)
    before = [(t.number, t.state, t.values, t.params, t.user_attrs) for t in trials(tmp_path, "second")]
    shutil.rmtree(tmp_path / "sweeps" / "first")
    (tmp_path / "sweeps" / "second" / "optuna.log").unlink()
    outcome, _ = sweep(experiment, tmp_path)
    assert outcome.ran == 0
    assert [
        (t.number, t.state, t.values, t.params, t.user_attrs) for t in trials(tmp_path, "second")
    ] == before


@pytest.mark.parametrize(
    ("knobs", "count"),
    [
        ({"rht": [True, False], "cooldown": {"uniform": [0.25, 0.75]}}, 2),
        ({"rht": {"choice": [True]}, "cooldown": [0, 0.5]}, 2),
        ({"rht": [True, False], "cooldown": {"choice": [0, 0.5], "when": {"rht": True}}}, 2),
        ({"rht": [True, False]}, 0),
        ({"rht": [True, False], "cooldown": [0, 0.5], "skip_first": [0, 1]}, 0),
        ({"rht": [True, False], "cooldown": [0.0, 0.5]}, 2),
    ],
    ids=str,
)
def test_only_arms_within_the_space_are_taken_and_the_others_counted(knobs, count, first, tmp_path):
    experiment = second(first, tmp_path, shape={"layers": 2}, ablate=knobs)
    folder = tmp_path / "sweeps" / "second"
    book = Ledger(folder / "ledger.db")
    projections = Projections(experiment, book, tmp_path, folder, None, True)
    assert len(projections.study.study.trials) == count
    assert (
        projections.warmed
        == f"the sampler knows {count} arms of earlier sweeps; {5 - count} others lie outside of this space"
    )
    book.close()


def test_earlier_arms_are_taken_once_and_again_when_other_sweeps_are_named(first, tmp_path):
    experiment = second(first, tmp_path)
    book = Ledger(tmp_path / "sweeps" / "second" / "ledger.db")
    once, _ = warm(book, tmp_path, experiment)
    shutil.move(tmp_path / "sweeps" / "first", tmp_path / "sweeps" / "third")
    with closing(Ledger(tmp_path / "sweeps" / "third" / "ledger.db")) as moved:
        moved.describe(name="third")  # as if that sweep had run
    assert warm(book, tmp_path, experiment)[0] == once
    renamed, _ = warm(book, tmp_path, second(first, tmp_path, sweeps=["third"]))
    book.close()
    assert [(p.name, p.knobs, p.values) for p in renamed] == [
        (p.name.replace("first", "third"), p.knobs, p.values) for p in once
    ]


def test_an_unknown_earlier_sweep_is_refused_before_anything_runs(first, tmp_path):
    experiment = second(first, tmp_path, sweeps=["frist"])
    with pytest.raises(
        InputError,
        match=r"second\.yaml: search\.warm: 'frist': no such sweep in .*; 'first' is the nearest of first$",
    ):
        sweep(experiment, tmp_path)
    assert not list((tmp_path / "sweeps" / "second").glob("optuna.log"))


def test_an_unknown_earlier_sweep_ends_the_command_with_one_sentence(tmp_path):
    path = write(tmp_path, **SEARCH | {"search": {"trials": 2, "warm": ["gone"]}})
    done = here(
        "sweep",
        path,
        "--state",
        tmp_path / "state",
        "--executor",
        "inline",
        "--mlflow",
        "none",
        "--device",
        "cpu",
    )
    assert done.returncode == 2
    assert "Traceback" not in done.stderr
    assert "search.warm: 'gone': no such sweep in" in done.stderr
    assert not (tmp_path / "state" / "trials").exists()
    assert load(path).keys.search.warm == ("gone",)
