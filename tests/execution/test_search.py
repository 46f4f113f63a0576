"""The study: one trial an arm, a journal that can be lost, torn or locked, samplers that learn, and pruners that give up what is bad."""

import itertools
import json
import math
import random
from dataclasses import replace
from pathlib import Path
from typing import get_args

import optuna
import pytest
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import TrialState
from support.experiments import Children, content, idle, ledger, sweep, tiny, write
from support.studies import outcomes, trials

from ablate.execution.projections import Projections
from ablate.execution.search.journal import points
from ablate.execution.search.study import ENDED, PRUNERS, SAMPLERS, Study
from ablate.execution.study_points import Point
from ablate.experiment.load import load
from ablate.experiment.schema import SEVERAL, Search

MIXED = {
    "workload.lr": {"uniform": [1e-4, 1e-1], "log": True},
    "cooldown": {"uniform": [0.0, 0.75]},
    "workload.batch": {"int": [1, 4]},
    "rht": [True, False],
    "recipe.wgrad.g": {"choice": [None, {"rounding": "stochastic"}, {"rounding": "nearest"}]},
}


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    """A grid of two arms and a baseline, run inline without MLflow; leave it as it is."""
    folder = tmp_path_factory.mktemp("grid")
    sweep(tiny(folder), folder)
    return folder


def test_the_study_has_one_trial_an_arm_with_the_mean_over_seeds(swept):
    book = ledger(swept)
    records = {
        (m.name, m.seed): {s: v for s, n, v, _ in book.records(m.trial) if n == "val/loss"}
        for m in book.members()
    }
    for number, (trial, arm) in enumerate(zip(trials(swept), ["rht=true", "rht=false"], strict=True)):
        mean = {step: (records[arm, 0][step] + records[arm, 1][step]) / 2 for step in (2, 4)}
        assert (trial.number, trial.state, trial.user_attrs["arm"]) == (number, TrialState.COMPLETE, arm)
        assert trial.params == {"rht": arm == "rht=true"}
        assert trial.value == pytest.approx(mean[4], rel=1e-12)
        assert trial.intermediate_values == pytest.approx(mean, rel=1e-12)
        assert trial.user_attrs["seeds"] == [0, 1]
        assert trial.user_attrs["trials"] == [m.id for m in book.members() if m.name == arm]
    assert {row.name: row.optuna for row in book.arms()} == {
        "bf16": None,
        "rht=true": 0,
        "rht=false": 1,
    }
    book.close()


def copy(swept, folder):
    """The sweep in a folder of its own, to be harmed."""
    import shutil

    shutil.copytree(swept / "sweeps", folder / "sweeps")
    shutil.copytree(swept / "trials", folder / "trials")
    return load(swept / "tiny.yaml")


def test_a_deleted_journal_is_drawn_again_as_it_was(swept, tmp_path):
    experiment = copy(swept, tmp_path)
    (tmp_path / "sweeps" / "tiny" / "optuna.log").unlink()
    outcome, _ = sweep(experiment, tmp_path)
    assert outcome.ran == 0
    assert outcomes(tmp_path) == outcomes(swept)


def test_a_torn_last_line_and_a_stale_lock_are_repaired(swept, tmp_path):
    experiment = copy(swept, tmp_path)
    journal = tmp_path / "sweeps" / "tiny" / "optuna.log"
    before = journal.read_bytes()
    journal.write_bytes(before + b'{"op_code": 4, "worker_')
    (journal.parent / "optuna.log.lock").symlink_to(journal)
    sweep(experiment, tmp_path)
    assert not list(journal.parent.glob("optuna.log.lock*"))
    assert all(json.loads(line) for line in journal.read_bytes().splitlines())
    assert journal.read_bytes().startswith(before)
    assert outcomes(tmp_path) == outcomes(swept)


def test_an_arm_that_was_never_told_is_told_by_the_next_run(swept, tmp_path):
    experiment = copy(swept, tmp_path)
    journal = tmp_path / "sweeps" / "tiny" / "optuna.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    journal.write_bytes(b"".join(lines[:-1]) + lines[-1][:20])  # the driver died while it told the last arm
    sweep(experiment, tmp_path)
    assert outcomes(tmp_path) == outcomes(swept)


@pytest.mark.parametrize("kept", [1, 4, 9, 15])
def test_a_line_that_the_power_took_and_what_came_after_it_are_drawn_again(kept, swept, tmp_path):
    experiment = copy(swept, tmp_path)
    journal = tmp_path / "sweeps" / "tiny" / "optuna.log"
    lines = journal.read_bytes().splitlines(keepends=True)
    assert len(lines) > kept + 1
    journal.write_bytes(b"".join([*lines[:kept], b"\0" * len(lines[kept]), *lines[kept + 1 :]]))
    sweep(experiment, tmp_path)
    assert journal.read_bytes().startswith(b"".join(lines[:kept]))
    assert outcomes(tmp_path) == outcomes(swept)


def test_a_changed_bit_or_no_file_at_all_is_drawn_again_and_said(swept, tmp_path):
    experiment = copy(swept, tmp_path)
    journal = tmp_path / "sweeps" / "tiny" / "optuna.log"
    before, draw, book, damaged = journal.read_bytes(), random.Random(0), ledger(tmp_path), 0
    for _ in range(120):
        content = bytearray(before)
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
        journal.write_bytes(content)
        points(journal, "tiny")
        drawn = Projections(experiment, book, tmp_path, journal.parent, None, busy=False)
        drawn.refresh(final=True)
        damaged += drawn.study.damaged is not None
        assert [point[:3] for point in outcomes(tmp_path)] == [point[:3] for point in outcomes(swept)]
    book.close()
    assert damaged > 10
    journal.unlink()
    journal.mkdir()
    assert points(journal, "tiny") == []
    outcome, news = sweep(experiment, tmp_path)
    assert (outcome.ran, outcomes(tmp_path)) == (0, outcomes(swept))
    assert sum("journal was damaged: it is kept as" in line for line in news) == 1


def test_what_a_dashboard_wrote_stays(swept, tmp_path):
    experiment = copy(swept, tmp_path)
    backend = JournalFileBackend(str(tmp_path / "sweeps" / "tiny" / "optuna.log"))
    optuna.load_study(study_name="tiny", storage=JournalStorage(backend)).set_user_attr("note", "a person's")
    sweep(experiment, tmp_path)
    assert (
        optuna.load_study(study_name="tiny", storage=JournalStorage(backend)).user_attrs["note"]
        == "a person's"
    )


def test_a_point_queued_by_a_driver_that_died_does_not_shift_the_others(tmp_path):
    experiment = idle(tmp_path)
    (tmp_path / "sweeps" / "tiny").mkdir(parents=True)
    study = Study(tmp_path / "sweeps" / "tiny" / "optuna.log", experiment, [])
    study.study.enqueue_trial({"rht": True}, user_attrs={"arm": "rht=true"})
    sweep(experiment, tmp_path)
    complete = [trial for trial in trials(tmp_path) if trial.state == TrialState.COMPLETE]
    assert [(t.user_attrs["arm"], t.params["rht"]) for t in complete] == [
        ("rht=true", True),
        ("rht=false", False),
    ]
    assert not any(trial.state in (TrialState.WAITING, TrialState.RUNNING) for trial in trials(tmp_path))


def test_a_point_that_the_ledger_does_not_know_is_not_left_running(tmp_path):
    search = idle(tmp_path, ablate={"cooldown": {"uniform": [0, 0.5]}}, search={"trials": 2}, seeds=1)
    (tmp_path / "sweeps" / "tiny").mkdir(parents=True)
    Study(tmp_path / "sweeps" / "tiny" / "optuna.log", search, []).ask()  # and then its driver died
    sweep(search, tmp_path)
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE", "COMPLETE"]


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_proposes_points_inside_a_mixed_space(sampler, tmp_path):
    experiment = tiny(tmp_path, ablate=MIXED, search={"trials": 40, "sampler": sampler, "seed": 3})
    study = Study(tmp_path / "optuna.log", experiment, [])
    points = []
    for n in range(14):
        number, knobs = study.ask()
        assert number == n
        assert list(knobs) == list(MIXED)
        assert 1e-4 <= knobs["workload.lr"] <= 1e-1
        assert 0 <= knobs["cooldown"] <= 0.75
        assert knobs["workload.batch"] in (1, 2, 3, 4)
        assert type(knobs["workload.batch"]) is int
        assert knobs["rht"] in (True, False)
        assert knobs["recipe.wgrad.g"] in MIXED["recipe.wgrad.g"]["choice"]
        value = (
            math.inf
            if n == 3
            else math.nan
            if n == 5
            else math.log10(knobs["workload.lr"]) ** 2 + knobs["cooldown"]
        )
        study.tell(number, (value,), {}, {})
        points.append(knobs)
    assert (
        len({json.dumps(point) for point in points}) >= 12
    )  # NSGA-II's children may be copies, which cost nothing: one trial


def test_a_study_opened_again_does_not_propose_the_same_points_again(tmp_path):
    experiment = tiny(tmp_path, ablate={"workload.lr": {"uniform": [0.001, 0.1]}}, search={"trials": 9})
    points: list[Point] = []
    for n in range(4):
        number, knobs = Study(tmp_path / "optuna.log", experiment, points).ask()
        assert number == n
        points.append(Point(f"{n}", knobs, None))
    assert len({point.knobs["workload.lr"] for point in points}) == 4


def test_the_same_seed_proposes_the_same_points_and_another_seed_others(tmp_path):
    def first(name: str, seed: int) -> list[dict]:
        experiment = tiny(
            tmp_path, ablate={"workload.lr": {"uniform": [0.001, 0.1]}}, search={"trials": 9, "seed": seed}
        )
        study = Study(tmp_path / name, experiment, [])
        return [study.ask()[1] for _ in range(3)]

    assert first("a", 1) == first("b", 1) != first("c", 2)


def test_a_search_goes_on_after_its_budget_and_asks_for_no_more_than_its_trials(tmp_path):
    keys = {
        "ablate": {"cooldown": {"uniform": [0.25, 0.75]}, "rht": [True, False]},
        "search": {"trials": 5, "sampler": "tpe"},
    }
    first, _ = sweep(idle(tmp_path, budget={"trials": 5}, **keys), tmp_path)
    assert (first.status, first.ran) == ("budget", 5)
    second, _ = sweep(idle(tmp_path, **keys), tmp_path)
    assert second.status == "done"
    found = trials(tmp_path)
    assert [(trial.number, trial.state) for trial in found] == [(n, TrialState.COMPLETE) for n in range(5)]
    assert len({trial.params["cooldown"] for trial in found}) == 5
    book = ledger(tmp_path)
    assert [row.optuna for row in book.arms()] == [None, 0, 1, 2, 3, 4]
    assert {m.status for m in book.members()} == {"done"}
    by_arm = {
        t.number: [book.last_values(m.trial)["val/loss"] for m in book.members() if m.optuna == t.number]
        for t in found
    }
    book.close()
    assert {t.number: t.value for t in found} == pytest.approx({n: sum(v) / 2 for n, v in by_arm.items()})
    third, _ = sweep(idle(tmp_path, **keys), tmp_path)
    assert (third.status, third.ran, len(trials(tmp_path))) == ("done", 0, 5)


def test_a_searched_arm_that_is_its_own_baseline_is_one_arm(tmp_path):
    keys = {
        "workload": {"idle": {"steps": 2}},
        "recipe": "bf16",
        "ablate": {"workload.x": {"uniform": [-1.0, 1.0]}},
        "seeds": 2,
    }
    outcome, _ = sweep(tiny(tmp_path, search={"trials": 3}, **keys), tmp_path)
    assert outcome.ran == 6
    book = ledger(tmp_path)
    assert [(row.optuna, row.baseline) for row in book.arms()] == [(0, None), (1, None), (2, None)]
    book.close()


def test_a_combination_that_cannot_be_run_does_not_end_a_search(tmp_path):
    keys = {
        "ablate": {"skip_first": {"int": [0, 2]}, "skip_last": {"int": [0, 2]}},
        "search": {"trials": 9, "sampler": "random"},
    }
    experiment = tiny(tmp_path, shape={"layers": 3}, seeds=1, **keys)
    outcome, news = sweep(experiment, tmp_path)
    assert outcome.status == "done"
    states = [trial.state.name for trial in trials(tmp_path)]
    assert set(states) == {"COMPLETE", "FAIL"}
    assert len(states) == 9
    assert sum(
        "cannot be run: skip_last: keeps all 12 layers in 3 blocks in high precision" in line for line in news
    ) == states.count("FAIL")
    again, _ = sweep(experiment, tmp_path)
    assert (again.status, again.ran, [trial.state.name for trial in trials(tmp_path)]) == ("done", 0, states)


LISTS = {
    "numbers": ([n / 500 for n in range(300)], optuna.distributions.FloatDistribution(0.0, 299 / 500)),
    "whole numbers": (list(range(1, 301)), optuna.distributions.IntDistribution(1, 300)),
    "few": ([0.25, 0.5], optuna.distributions.CategoricalDistribution([0.25, 0.5])),
}


@pytest.mark.parametrize("values", LISTS)
def test_a_journal_does_not_repeat_a_long_list_in_every_trial(values, tmp_path):
    values, expected = LISTS[values]
    knob = "workload.steps" if values[-1] > 1 else "cooldown"
    experiment = tiny(tmp_path, shape={"steps": 500}, ablate={knob: values}, against={"rht": False})
    points = [Point(f"{value}", {knob: value}, None) for value in values]
    study = Study(tmp_path / "optuna.log", experiment, points)
    assert study.distributions == {knob: expected}
    assert [trial.params[knob] for trial in study.study.get_trials()] == values
    assert (tmp_path / "optuna.log").stat().st_size < 1000 + 500 * len(values)
    assert Study(tmp_path / "optuna.log", experiment, points).running() == list(range(len(values)))


def test_a_long_list_of_named_arms_is_told_by_their_names_alone(tmp_path):
    listed = {f"arm {n}": {"cooldown": n / 500} for n in range(150)}
    points = [Point(name, knobs, None) for name, knobs in listed.items()]
    study = Study(
        tmp_path / "optuna.log", tiny(tmp_path, shape={"steps": 500}, ablate=None, arms=listed), points
    )
    assert [(trial.params, trial.user_attrs["arm"]) for trial in study.study.get_trials()] == [
        ({}, name) for name in listed
    ]


@pytest.mark.slow
def test_an_arm_that_failed_and_then_succeeded_is_complete(tmp_path):
    experiment = tiny(tmp_path, seeds=1, retry=0)
    train = tmp_path / "train.bin"
    train.rename(tmp_path / "away")
    assert sweep(experiment, tmp_path, connect=Children)[0].status == "failed"
    (tmp_path / "away").rename(train)
    assert sweep(experiment, tmp_path, connect=Children)[0].status == "done"
    assert [trial.state for trial in trials(tmp_path) if trial.user_attrs.get("arm") == "rht=true"][
        -1
    ] == TrialState.COMPLETE


def test_what_is_told_is_what_the_file_says_is_better(tmp_path):
    path = write(tmp_path, metric={"name": "val/loss", "direction": "maximize"})
    points = [Point("rht=true", {"rht": True}, None), Point("rht=false", {"rht": False}, None)]
    study = Study(tmp_path / "optuna.log", load(path), points)
    for number, value in enumerate((1.0, 2.0)):
        study.tell(number, (value,), {}, {})
    assert study.study.best_trial.number == 1
    assert content(tmp_path)["seeds"] == 2


# What samplers learn

PLANE = {"workload.lr": {"uniform": [1e-4, 1e-1], "log": True}, "cooldown": {"uniform": [0.0, 0.75]}}
PLANE |= {"workload.weight_decay": {"uniform": [0.0, 1.0]}}
LEARNS = {"tpe": 60, "cmaes": 60, "gp": 18}
"""Arms after which a sampler is to be well ahead of chance; NSGA-II, made for several objectives, has its own test below."""


def distance(knobs: dict) -> float:
    """From the planted optimum, squared."""
    lr = (math.log10(knobs["workload.lr"]) + 2.3) / 3
    return lr**2 + (knobs["cooldown"] - 0.3) ** 2 + (knobs["workload.weight_decay"] - 0.7) ** 2


def best(folder: Path, sampler: str, seed: int, trials: int) -> float:
    experiment = tiny(folder, ablate=PLANE, search={"trials": trials, "sampler": sampler, "seed": seed})
    study = Study(folder / f"{sampler}-{seed}.log", experiment, [])
    found = []
    for _ in range(trials):
        number, knobs = study.ask()
        found.append(distance(knobs))
        study.tell(number, found[-1:], {}, {}, (-1.0,))
    return min(found)


@pytest.mark.slow
@pytest.mark.parametrize("sampler", LEARNS)
def test_a_sampler_comes_closer_to_a_planted_optimum_than_chance(sampler, tmp_path):
    for seed in (0,) if sampler == "gp" else (0, 1):  # its fits take most of the time of this file
        chance = best(tmp_path, "random", seed, LEARNS[sampler])
        assert best(tmp_path, sampler, seed, LEARNS[sampler]) < chance / 1.4


def test_every_sampler_and_pruner_that_can_be_written_is_there():
    assert set(get_args(Search.model_fields["sampler"].annotation)) == set(SAMPLERS)
    assert set(get_args(get_args(Search.model_fields["pruner"].annotation)[0])) == set(PRUNERS)


def dominated(value: tuple, others: list[tuple]) -> bool:
    return any(all(o <= v for o, v in zip(other, value, strict=True)) and other != value for other in others)


SQUARES = {knob: list(range(1, 9)) for knob in ("workload.batch", "workload.steps", "workload.accumulate")}


def costs(knobs: dict) -> tuple[float, float]:
    """Two aims that pull the batch apart, and agree on the rest."""
    batch, steps, accumulate = knobs.values()
    return float((batch - 1) ** 2 + steps + accumulate), float((batch - 8) ** 2 + steps + accumulate)


def found_front(folder: Path, sampler: str) -> set[tuple]:
    metrics = [{"name": "val/loss"}, {"name": "throughput/step_ms"}]
    experiment = tiny(
        folder, ablate=SQUARES, metric=metrics, search={"trials": 150, "sampler": sampler, "seed": 1}
    )
    study = Study(folder / f"{sampler}.log", experiment, [])
    for _ in range(150):
        number, knobs = study.ask()
        study.tell(number, costs(knobs), {2: 1.0}, {}, (-1.0,))
    return {tuple(trial.values) for trial in study.study.best_trials}


def test_nsga2_finds_the_front_that_brute_force_finds(tmp_path):
    everything = [
        costs(dict(zip(SQUARES, point, strict=True))) for point in itertools.product(*SQUARES.values())
    ]
    front = {value for value in everything if not dominated(value, everything)}
    assert len(front) == 8
    assert len(found_front(tmp_path, "nsga2") & front) >= 6
    assert len(found_front(tmp_path, "random") & front) <= 3


@pytest.mark.parametrize("sampler", SEVERAL)
def test_a_sampler_takes_several_objectives_and_is_drawn_again(sampler, tmp_path):
    metrics = [{"name": "val/loss"}, {"name": "throughput/tokens_per_s", "direction": "maximize"}]
    experiment = tiny(tmp_path, ablate=MIXED, metric=metrics, search={"trials": 12, "sampler": sampler})
    journal, points = tmp_path / "optuna.log", []
    study = Study(journal, experiment, [])
    for n in range(12):
        number, knobs = study.ask()
        values = (
            (math.inf, -math.inf)
            if n == 3
            else (math.nan, 1.0)
            if n == 5
            else (knobs["cooldown"], knobs["workload.lr"])
        )
        broken = (1.0,) if n == 3 else (-1.0,)
        study.tell(number, values, {2: 1.0}, {"arm": f"{n}"}, broken)
        points.append(Point(f"{n}", knobs, values, violations=broken))
    assert [d.name for d in study.study.directions] == ["MINIMIZE", "MAXIMIZE"]
    assert study.study.metric_names == ["val/loss", "throughput/tokens_per_s"]
    assert {trial.state.name for trial in study.study.trials} == {"COMPLETE", "FAIL"}
    assert_redrawn(experiment, journal, points)


# A knob that exists only beside others

CONDITIONAL = {
    "rht_size": {"choice": [16, 32, 64], "when": {"rht": True}},
    "rht": [True, False],
    "rht_signs": {"choice": ["fixed", "per_step"], "when": {"rht_size": 32}},
    "cooldown": {"uniform": [0.25, 0.75]},
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_sampler_proposes_a_knob_only_where_it_exists(sampler, tmp_path):
    experiment = tiny(tmp_path, ablate=CONDITIONAL, search={"trials": 30, "sampler": sampler, "seed": 2})
    journal, points = tmp_path / "optuna.log", []
    study = Study(journal, experiment, [])
    for n in range(20):
        number, knobs = study.ask()
        assert ("rht_size" in knobs) == knobs["rht"]
        assert ("rht_signs" in knobs) == (knobs.get("rht_size") == 32)
        value = knobs["cooldown"] + 3 * knobs["rht"] - (knobs.get("rht_size") == 64)
        study.tell(number, (value,), {}, {"arm": f"{n}"}, (-1.0,))
        points.append(Point(f"{n}", knobs, (value,), violations=(-1.0,)))
        experiment.propose(knobs)
    assert len({tuple(point.knobs) for point in points}) >= 2
    assert_redrawn(experiment, journal, points)


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_a_search_is_the_same_again_from_its_seed(sampler, tmp_path):
    def proposed(name: str, seed: int) -> list[dict]:
        experiment = tiny(
            tmp_path, ablate=CONDITIONAL, search={"trials": 30, "sampler": sampler, "seed": seed}
        )
        study, found = Study(tmp_path / name, experiment, []), []
        for _ in range(12):
            number, knobs = study.ask()
            study.tell(number, (knobs["cooldown"],), {}, {}, (-1.0,))
            found.append(knobs)
        return found

    assert proposed("a", 1) == proposed("b", 1) != proposed("c", 2)


# Constraints


def feasible(folder: Path, sampler: str, told: bool) -> int:
    """Return how many of the last 10 arms keep to a constraint beyond which the values are far better."""
    keys = {
        "constraints": [{"metric": "grad/norm", "at_most": 0.5}],
        "ablate": PLANE | {"cooldown": {"uniform": [0.0, 1.0]}},
    }
    experiment = tiny(folder, search={"trials": 40, "sampler": sampler, "seed": 4}, **keys)
    study, kept = Study(folder / f"{sampler}-{told}.log", experiment, []), []
    for _ in range({"gp": 20, "tpe": 40, "nsga2": 60}[sampler]):
        number, knobs = study.ask()
        x = knobs["cooldown"]
        kept.append(x <= 0.5)
        study.tell(number, ((x - 0.25) ** 2 if kept[-1] else -5.0,), {}, {}, (x - 0.5, -1.0) if told else ())
    if told:
        best = study.study.best_trial
        assert best.constraints == {"grad/norm at most 0.5": best.params["cooldown"] - 0.5, ENDED: -1.0}
        assert best.params["cooldown"] <= 0.5
    return sum(kept[-10:])


@pytest.mark.slow
@pytest.mark.parametrize("sampler", ["tpe", "gp", "nsga2"])
def test_a_sampler_keeps_to_where_the_constraints_hold(sampler, tmp_path):
    assert feasible(tmp_path, sampler, told=True) >= 7
    assert feasible(tmp_path, sampler, told=False) <= 3


def test_an_arm_that_broke_off_is_not_the_best(tmp_path):
    experiment = tiny(tmp_path, metric={"name": "val/loss", "direction": "maximize"}, search={"trials": 2})
    study = Study(tmp_path / "optuna.log", experiment, [])
    for value, broken in ((math.inf, 1.0), (0.5, -1.0)):
        number, _ = study.ask()
        study.tell(number, (value,), {}, {}, (broken,))
    assert study.study.best_trial.number == 1


def test_a_study_whose_constraints_changed_is_drawn_again(tmp_path):
    first = tiny(tmp_path, search={"trials": 2})
    study = Study(tmp_path / "optuna.log", first, [])
    number, knobs = study.ask()
    study.tell(number, (1.0,), {}, {"arm": "0"}, (-1.0,))
    second = tiny(tmp_path, search={"trials": 2}, constraints=[{"metric": "nan/activation", "at_most": 0}])
    again = Study(tmp_path / "optuna.log", second, [Point("0", knobs, (1.0,), violations=(0.0, -1.0))])
    assert again.running() == [0]


# Giving up

RUNGS = (2, 4, 8)


def pruning(folder: Path, pruner: str, name: str = "tiny", **keys):
    """An experiment whose arms are given up by this pruner."""
    rungs = {} if pruner == "wilcoxon" else {"rungs": list(RUNGS)}
    search = {"trials": 40, "sampler": "random", "seed": 1, "pruner": pruner, **rungs}
    knobs = {"cooldown": {"uniform": [0.0, 0.75]}}
    return tiny(
        folder, name, shape={"steps": 16, "eval_every": 2}, seeds=6, ablate=knobs, search=search, **keys
    )


def steps_of(experiment) -> tuple[int, ...]:
    return experiment.keys.search.rungs or tuple(range(len(experiment.seeds)))


def judged(study: Study, experiment, number: int, value: float) -> dict[int, float]:
    """Report an arm of this value until it is given up or over; returns what was reported."""
    reported = {}
    for step in steps_of(experiment):
        reported[step] = value + step / 100
        study.report(number, step, reported[step])
        if study.prunes(number):
            break
    return reported


def searched(study: Study, experiment, values: list[float]) -> list[Point]:
    """Ask for an arm of each value, judge it and settle it."""
    points = []
    for value in values:
        number, knobs = study.ask()
        reported = judged(study, experiment, number, value)
        point = Point(f"{number}", knobs, (value,), pruned=study.prunes(number), reports=reported)
        point = replace(point, values=None) if point.pruned else replace(point, violations=(-1.0,))
        study.tell(number, (value,), {2: 99.0, 3: 98.0}, {"arm": point.name}, point.violations, point.pruned)
        points.append(point)
    return points


def drawn(study: Study) -> list[tuple]:
    """Everything in the journal but times and the sampler's own notes."""
    return [
        (
            t.number,
            t.state,
            t.values,
            t.params,
            t.distributions,
            t.intermediate_values,
            t.user_attrs,
            t.constraints,
            rungs(t),
        )
        for t in study.study.get_trials()
    ]


def rungs(trial) -> dict:
    return {key: value for key, value in trial.system_attrs.items() if key.startswith("completed_rung")}


def settle(study: Study, points: list[Point]) -> None:
    """Tell what is over, as the controller does after the journal was lost."""
    for number in study.running():
        point = points[number]
        if point.values is not None or point.pruned:
            study.tell(number, point.values or (), {}, {"arm": point.name}, point.violations, point.pruned)


def assert_redrawn(experiment, journal: Path, points: list[Point], warm: list[Point] = ()) -> None:
    """The journal, opened again, is left as it is; deleted, it is drawn again as it was."""
    before = drawn(Study(journal, experiment, points, warm))
    content = journal.read_bytes()
    Study(journal, experiment, points, warm)
    assert journal.read_bytes().startswith(content)
    journal.unlink()
    study = Study(journal, experiment, points, warm)
    settle(study, points)
    assert [row[:7] for row in drawn(study)] == [row[:7] for row in before]
    assert drawn(study) == before


MANY = [5.0, 4.0, 6.0, 3.0, 7.0, 2.0, 8.0, 1.0, 9.0, 10.0, 11.0, 0.5, 12.0, 13.0]


@pytest.mark.parametrize("pruner", PRUNERS)
def test_a_pruner_gives_up_the_bad_arms_and_never_the_best_so_far(pruner, tmp_path):
    experiment = pruning(tmp_path, pruner)
    study = Study(tmp_path / "optuna.log", experiment, [])
    points = searched(study, experiment, MANY)
    records = {value for n, value in enumerate(MANY) if value == min(MANY[: n + 1])}
    assert not any(point.pruned for point, value in zip(points, MANY, strict=True) if value in records)
    assert points[-1].pruned or points[-2].pruned
    assert sum(point.pruned for point in points) >= 3
    for point, trial in zip(points, study.study.trials, strict=True):
        assert trial.state == (TrialState.PRUNED if point.pruned else TrialState.COMPLETE)
        assert trial.intermediate_values == point.reports
        assert not point.pruned or len(point.reports) < len(steps_of(experiment)) or point.reports[8]


@pytest.mark.parametrize("pruner", PRUNERS)
def test_what_was_given_up_survives_a_deleted_journal_and_so_does_what_is_given_up_next(pruner, tmp_path):
    experiment = pruning(tmp_path, pruner)
    journal = tmp_path / "optuna.log"
    study = Study(journal, experiment, [])
    points = searched(study, experiment, MANY)
    number, knobs = study.ask()
    first = steps_of(experiment)[0]
    study.report(number, first, 3.5)
    points.append(Point("running", knobs, None, reports={first: 3.5}))
    optuna_study = study.study
    (asked,) = [trial for trial in optuna_study.get_trials(deepcopy=False) if trial.number == number]
    optuna_study._storage.set_trial_user_attr(asked._trial_id, "arm", "running")
    copy = tmp_path / "copy.log"
    copy.write_bytes(journal.read_bytes())
    assert_redrawn(experiment, journal, points)
    undisturbed, again = Study(copy, experiment, points), Study(journal, experiment, points)
    expected = judged(undisturbed, experiment, undisturbed.ask()[0], 20.0)
    number = again.ask()[0]
    assert number == len(points)
    assert judged(again, experiment, number, 20.0).keys() == expected.keys()


def test_wilcoxon_spares_the_seeds_of_an_arm_that_loses_to_the_best_on_every_one(tmp_path):
    experiment = pruning(tmp_path, "wilcoxon")
    study = Study(tmp_path / "optuna.log", experiment, [])
    points = searched(study, experiment, [1.0, 2.0, 0.9])
    assert [point.pruned for point in points] == [False, True, False]
    assert sorted(points[1].reports) == [
        0,
        1,
        2,
        3,
    ]  # one-sided, of n losses in n: p = 2^-n, below .1 from 4 on


def test_wilcoxon_does_not_stumble_over_a_seed_that_diverged(tmp_path):
    experiment = pruning(tmp_path, "wilcoxon")
    study = Study(tmp_path / "optuna.log", experiment, [])
    searched(study, experiment, [1.0])
    number, _ = study.ask()
    for place, value in enumerate((2.0, math.inf, 2.0, 2.0, 2.0)):
        study.report(number, place, value)
    assert not study.prunes(number)


def test_asha_keeps_one_arm_in_so_many_at_each_rung(tmp_path):
    """By its definition: an arm goes on where it is among the best len // factor of those that came to this rung, or the best alone."""
    experiment = pruning(tmp_path, "asha")
    study = Study(tmp_path / "optuna.log", experiment, [])
    points = searched(study, experiment, MANY)
    seen: dict[int, list[float]] = {rung: [] for rung in RUNGS}
    for point in points:
        for rung, value in point.reports.items():
            seen[rung].append(value)
            goes_on = value in sorted(seen[rung])[: max(1, len(seen[rung]) // 2)]
            assert goes_on == (rung != max(point.reports) or not point.pruned)


def test_hyperband_has_a_bracket_that_starts_at_each_rung(tmp_path):
    experiment = pruning(tmp_path, "hyperband")
    study = Study(tmp_path / "optuna.log", experiment, [])
    searched(study, experiment, [float(n) for n in range(40)])
    given_up = {
        max(trial.intermediate_values) for trial in study.study.trials if trial.state == TrialState.PRUNED
    }
    assert given_up == set(RUNGS)


def test_the_median_judges_nobody_before_five_arms_are_over(tmp_path):
    experiment = pruning(tmp_path, "median")
    study = Study(tmp_path / "optuna.log", experiment, [])
    points = searched(study, experiment, [1.0, 9.0, 9.0, 9.0, 9.0, 10.0, 0.9])
    assert [point.pruned for point in points] == [False] * 5 + [True, False]


def test_a_report_counts_once_and_a_settled_point_hears_no_more(tmp_path):
    experiment = pruning(tmp_path, "asha")
    study = Study(tmp_path / "optuna.log", experiment, [])
    points = searched(study, experiment, [1.0])
    number, _ = study.ask()
    study.report(number, 2, 5.0)
    assert study.prunes(number)
    study.report(number, 2, 0.1)  # another attempt of the trial records the step again
    assert study.prunes(number)
    assert study.study.trials[number].intermediate_values == {2: 5.0}
    study.tell(number, (), {}, {}, pruned=True)
    study.report(number, 4, 0.1)
    assert study.study.trials[number].intermediate_values == {2: 5.0}
    assert study.study.trials[number].state == TrialState.PRUNED
    assert not points[0].pruned


def test_an_arm_is_judged_by_what_was_known_when_it_came_to_the_rung(tmp_path):
    experiment = pruning(tmp_path, "median")
    study = Study(tmp_path / "optuna.log", experiment, [])
    searched(study, experiment, [1.0, 2.0, 3.0, 4.0])
    early, _ = study.ask()
    study.report(early, 2, 9.0)
    assert not study.prunes(early)  # four arms are no median
    searched(study, experiment, [2.5])
    study.report(early, 2, 9.0)  # once more, of another attempt
    assert not study.prunes(early)
    study.report(early, 4, 9.0)
    assert study.prunes(early)


def test_a_report_that_a_driver_did_not_live_to_make_is_judged_by_the_next_one(tmp_path):
    experiment = pruning(tmp_path, "asha")
    study = Study(tmp_path / "optuna.log", experiment, [])
    points = searched(study, experiment, [1.0])
    number, knobs = study.ask()  # the ledger has its record at the rung, the journal has not
    again = Study(tmp_path / "optuna.log", experiment, [*points, Point("1", knobs, None, reports={2: 5.0})])
    assert again.prunes(number)
    assert not again.prunes(0)


# Arms of earlier sweeps


def earlier(count: int, value) -> list[Point]:
    knobs = [{"cooldown": 0.75 * (n + 0.5) / count, "rht": n % 2 == 0} for n in range(count)]
    return [Point(f"old/{n}", its, (value(its),), violations=(-1.0,)) for n, its in enumerate(knobs)]


HALF = {"cooldown": {"uniform": [0.0, 0.75]}, "rht": [True, False]}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_earlier_arms_come_before_the_first_and_are_no_arms_of_this_sweep(sampler, tmp_path):
    experiment = tiny(tmp_path, ablate=HALF, search={"trials": 9, "sampler": sampler, "warm": ["old"]})
    warm, journal, points = earlier(10, lambda knobs: knobs["cooldown"]), tmp_path / "optuna.log", []
    study = Study(journal, experiment, [], warm)
    assert study.running() == []
    for n in range(4):
        number, knobs = study.ask()
        assert number == n
        assert study.running() == [n]
        study.tell(number, (knobs["cooldown"],), {4: 1.0}, {"arm": f"{n}"}, (-1.0,))
        points.append(Point(f"{n}", knobs, (knobs["cooldown"],), violations=(-1.0,)))
    found = study.study.trials
    assert [trial.user_attrs.get("warm") for trial in found] == [f"old/{n}" for n in range(10)] + [None] * 4
    assert all(trial.state == TrialState.COMPLETE for trial in found)
    again = Study(journal, experiment, points, warm)
    assert drawn(again) == drawn(study)
    journal.unlink()
    again = Study(journal, experiment, points, warm)
    for number in again.running():
        again.tell(number, points[number].values, {4: 1.0}, {"arm": points[number].name}, (-1.0,))
    assert drawn(again) == drawn(study)


@pytest.mark.parametrize(("sampler", "seeds", "most"), [("tpe", 10, 2), ("gp", 10, 2), ("nsga2", 30, 11)])
def test_a_sampler_starts_from_what_earlier_arms_showed(sampler, seeds, most, tmp_path):
    """With rht true every earlier arm was bad. By chance half of the first proposals have it; a quarter after NSGA-II's mutation."""
    warm, proposed = earlier(20, lambda knobs: knobs["cooldown"] + 10 * knobs["rht"]), []
    for seed in range(seeds):
        experiment = tiny(
            tmp_path, ablate=HALF, search={"trials": 9, "sampler": sampler, "seed": seed, "warm": ["old"]}
        )
        proposed.append(Study(tmp_path / f"{seed}.log", experiment, [], warm).ask()[1]["rht"])
    assert sum(proposed) <= most


@pytest.mark.parametrize("count", [3, 5])
def test_other_earlier_arms_make_another_study(count, tmp_path):
    experiment = tiny(tmp_path, ablate=HALF, search={"trials": 9, "warm": ["old"]})
    warm = earlier(4, lambda knobs: knobs["cooldown"])
    number, knobs = Study(tmp_path / "optuna.log", experiment, [], warm).ask()
    point = Point("0", knobs, None)
    study = Study(tmp_path / "optuna.log", experiment, [point], earlier(count, lambda knobs: 1.0))
    assert len(study.study.trials) == count + 1
    assert (study.running(), number) == ([0], 0)
    assert study.study.trials[-1].params == knobs


def test_earlier_arms_prune_nothing(tmp_path):
    experiment = pruning(tmp_path, "median")
    warm = [Point(f"old/{n}", {"cooldown": 0.1}, (0.0,), violations=(-1.0,)) for n in range(10)]
    study = Study(tmp_path / "optuna.log", experiment, [], warm)
    points = searched(study, experiment, [5.0, 4.0, 6.0, 3.0, 7.0])
    assert not any(point.pruned for point in points)
