"""Arms and what they are to a sweep (baseline, listed, searched, refused, pruned, confirmed), from its file to its answer."""

import json
import time
from contextlib import closing

import pytest
from support.commands import here
from support.experiments import ledger, statuses, sweep, tiny, values, write
from support.studies import trials

from ablate.execution.tracking import runs
from ablate.experiment.load import load
from ablate.reports.answer import Answer
from ablate.reports.leaderboard import collect
from ablate.reports.run_tables import running
from ablate.results.contrasts import contrasts
from ablate.results.summary import summaries
from ablate.store.ledger import Ledger

IDLE = {"workload": {"idle": {"steps": 3}}, "ablate": None}


def answered(state, **keys) -> tuple[dict, list]:
    """Run a sweep of idle trials; its summaries by name, and its contrasts."""
    assert sweep(tiny(state, **(IDLE | keys)), state)[0].status == "done"
    book = ledger(state)
    arms = summaries(book)
    found = contrasts(arms, book.facts.metric)
    book.close()
    return {arm.name: arm for arm in arms}, found


# --- baselines ------------------------------------------------------------------------------------


def test_everything_that_compares_arms_does_it_with_the_baseline_that_the_file_names(tmp_path):
    """One arm against another of other workload values and another recipe: seed by seed, everywhere the same number."""
    arms, turned = answered(
        tmp_path,
        arms={"ref": {"recipe": "bf16", "workload.x": 0.1}, "far": {"workload.x": 0.9}},
        against="ref",
        seeds=3,
    )
    losses = values(tmp_path)
    gaps = {seed: losses["far", seed] - losses["ref", seed] for seed in range(3)}
    assert list(arms) == ["ref", "far"]
    assert (arms["ref"].baseline, arms["ref"].gap, arms["far"].baseline) == (None, None, "ref")
    assert (arms["far"].gap.pairs, arms["far"].gap.mean) == (3, pytest.approx(sum(gaps.values()) / 3))
    assert turned == []
    told = {trial.user_attrs["arm"]: trial.user_attrs.get("gap") for trial in trials(tmp_path)}
    assert told == {"ref": None, "far": pytest.approx(arms["far"].gap.mean)}
    (entry,) = collect([tmp_path / "sweeps" / "tiny"])[0]
    assert (entry.arm, entry.against, entry.gap) == ("far", "ref", arms["far"].gap.mean)
    book = ledger(tmp_path)
    in_mlflow = {
        compared.seed: metrics["val/loss_gap"]
        for member in book.members()
        if member.name == "far"
        for compared, *_, metrics in runs.gaps(book, member, "val/loss")
    }
    book.close()
    assert in_mlflow == pytest.approx(gaps)


# --- repeated points ------------------------------------------------------------------------------

SEVEN = {"ablate": {"workload.x": {"choice": [n / 10 for n in range(7)]}}, "seeds": 2}
THREE = {"ablate": {"workload.x": {"choice": [0.1, 0.5, 0.9]}}, "seeds": 2}


def searching(state, trials: int, seed: int = 0, **keys):
    """An experiment that draws points of idle trials at random."""
    search = {"trials": trials, "sampler": "random", "seed": seed} | keys.pop("search", {})
    return tiny(state, **(IDLE | {"search": search} | keys))


def rows(state) -> list[tuple]:
    """(number, x, role, number of the point that it repeats) of every point that the ledger has."""
    book = ledger(state)
    found = {point.arm: point for point in book.points()}
    book.close()
    numbers = {None: None} | {arm: point.optuna for arm, point in found.items()}
    return [
        (point.optuna, json.loads(point.knobs)["workload.x"], point.role, numbers[point.repeats])
        for point in found.values()
    ]


@pytest.mark.parametrize("seed", range(4))
def test_a_winner_runs_again_in_the_same_command_though_the_last_points_repeat_earlier_ones(seed, tmp_path):
    experiment = searching(tmp_path, 6, seed, search={"confirm": 2}, **THREE)
    outcome, _ = sweep(experiment, tmp_path)
    fresh = {key for key in statuses(tmp_path) if key[0].startswith("confirm: ")}
    assert (outcome.status, {seed for _, seed in fresh}) == ("done", {2, 3})
    before = statuses(tmp_path)
    again, said = sweep(experiment, tmp_path)
    assert (again.ran, statuses(tmp_path)) == (0, before)
    assert not any("edited" in line for line in said)


def test_a_repeated_point_is_told_to_the_study_with_the_value_of_the_arm_and_is_no_arm(tmp_path):
    experiment = searching(tmp_path, 10, **SEVEN)
    sweep(experiment, tmp_path)
    points = rows(tmp_path)
    repeats = {number: first for number, *_, first in points if first is not None}
    assert repeats
    study = trials(tmp_path)
    assert [trial.state.name for trial in study] == ["COMPLETE"] * 10
    for number, first in repeats.items():
        assert study[number].params == study[first].params
        assert study[number].value == study[first].value
        assert study[number].user_attrs["repeats"] == first
        assert study[number].user_attrs["trials"] == study[first].user_attrs["trials"]
    book = ledger(tmp_path)
    searched = [arm for arm in summaries(book) if arm.role == "searched"]
    book.close()
    assert len(searched) == 10 - len(repeats) == len({str(arm.knobs) for arm in searched})
    told = [(t.number, t.value, t.params) for t in study]
    (tmp_path / "sweeps" / "tiny" / "optuna.log").unlink()
    assert sweep(experiment, tmp_path)[0].ran == 0
    assert [(t.number, t.value, t.params) for t in trials(tmp_path)] == told
    assert rows(tmp_path) == points


def test_a_search_ends_once_it_has_proposed_every_point_of_its_space_which_the_plan_says(tmp_path):
    path = write(tmp_path, **IDLE | THREE, search={"trials": 60, "sampler": "random"})
    experiment = load(path)
    assert experiment.most_searched == 3
    (note,) = experiment.notes
    assert note.startswith(f"{path}:1:")
    assert "search.trials: 60" in note
    assert note in here("plan", path, "--state", tmp_path).stdout.replace("\n", " ")
    outcome, _ = sweep(experiment, tmp_path)
    points = rows(tmp_path)
    assert outcome.status == "done"
    assert {x for _, x, *_ in points} == {0.1, 0.5, 0.9}
    assert len(points) < 60
    assert points[-1][3] is None  # it is the last new point that ends it
    assert load(write(tmp_path, **IDLE | THREE, search={"trials": 3})).notes == ()


@pytest.mark.parametrize(
    ("knobs", "points"),
    [
        ({"rht": [True, False], "workload.x": {"int": [0, 4]}}, 10),
        ({"rht": [True, False], "rht_size": {"choice": [16, 32], "when": {"rht": True}}}, 3),
        ({"rht": [True, False], "workload.x": {"uniform": [0.0, 1.0]}}, 100),
        ({"workload.x": {"int": [0, 2**31]}}, 100),
    ],
)
def test_the_points_of_a_space_are_counted_up_to_the_trials(knobs, points, tmp_path):
    assert tiny(tmp_path, **IDLE | {"ablate": knobs, "search": {"trials": 100}}).most_searched == points


def test_points_of_an_earlier_range_do_not_end_a_search_of_todays(tmp_path):
    sweep(searching(tmp_path, 30, **THREE), tmp_path)
    other = {"ablate": {"workload.x": {"choice": [0.2, 0.4]}}, "seeds": 2}
    sweep(searching(tmp_path, 30, **other), tmp_path)
    assert {x for _, x, *_ in rows(tmp_path)} == {0.1, 0.2, 0.4, 0.5, 0.9}


# --- roles ----------------------------------------------------------------------------------------


def roles(book: Ledger) -> dict[str, str]:
    return {arm.name: arm.role for arm in summaries(book)}


def test_a_proposed_arm_that_cannot_be_run_is_refused_with_its_reason_and_is_no_baseline(tmp_path):
    keys = {"ablate": {"skip_first": {"int": [0, 1]}, "skip_last": {"int": [0, 1]}}, "seeds": 1}
    experiment = tiny(tmp_path, shape={"layers": 2}, search={"trials": 30, "sampler": "random"}, **keys)
    sweep(experiment, tmp_path)
    with closing(ledger(tmp_path)) as book:
        arms = summaries(book)
        (refused,) = [arm for arm in arms if arm.role == "refused"]
        assert refused.knobs == {"skip_first": 1, "skip_last": 1}
        assert (refused.verdict.reason, refused.seeds, refused.missing) == ("refused", 0, ())
        assert "keeps all 8 layers in 2 blocks" in refused.reason
        assert [arm.name for arm in arms if arm.verdict.reason == "baseline"] == ["bf16"]
        assert [arm.name for arm in arms if arm.role == "baseline"] == ["bf16"]
        answer = Answer(book)
        assert answer.shown[0].role == "baseline"
        assert answer.shown[-1].role == "refused"
        assert refused.reason in " ".join(part.text for part in answer.losses())


def test_pruned_arms_are_said_to_be_pruned_and_nothing_of_them_is_missing(tmp_path):
    search = {"trials": 12, "pruner": "median", "rungs": [3]}
    experiment = searching(
        tmp_path,
        12,
        1,
        search=search,
        workload={"idle": {"steps": 12}},
        ablate={"workload.x": {"uniform": [0.3, 9.0]}},
        seeds=2,
    )
    sweep(experiment, tmp_path)
    with closing(ledger(tmp_path)) as book:
        pruned = {member.name for member in book.members() if member.status == "pruned"}
        assert pruned
        arms = {arm.name: arm for arm in summaries(book)}
        assert {name for name, arm in arms.items() if arm.pruned} == pruned
        for name in pruned:
            assert (arms[name].verdict.reason, arms[name].missing) == ("pruned", ())
        assert not any(arm.missing for arm in arms.values())
        texts = [part.text for part in Answer(book).losses()]
        assert not any("Incomplete" in text or "is missing" in text for text in texts)
        assert [all(name in text for name in list(pruned)[:8]) for text in texts] == [True]


def test_baselines_that_a_sampler_brought_are_in_no_comparison_of_their_own(tmp_path):
    """Two seeds of arms at two rates: their two baselines differ in one knob, which is nobody's question."""
    experiment = searching(tmp_path, 9, **THREE)
    sweep(experiment, tmp_path)
    with closing(ledger(tmp_path)) as book:
        arms = summaries(book)
        assert [arm.role for arm in arms if arm.baseline is None] == ["baseline"] * 3
        assert contrasts(arms, book.facts.metric) == []
        best = min((arm for arm in arms if arm.role == "searched"), key=lambda arm: arm.mean)
        assert best.name in Answer(book).verdict()


def test_a_running_fork_ends_with_its_last_window(tmp_path):
    """Its windows are 2 of 24 steps, a step in ten minutes: the whole run's steps would end hours later."""
    design = {"trunk": "start", "positions": [0.5], "window": 2 / 24, "horizons": [1]}
    experiment = tiny(tmp_path, shape={"steps": 24, "eval_every": 24}, design=design, seeds=2)
    arm = next(arm for arm in experiment.arms if experiment.spec(arm, 0, "cpu").steps < 24)
    spec, began = experiment.spec(arm, 0, "cpu"), time.time()
    with closing(Ledger(tmp_path / "sweeps" / "tiny" / "ledger.db")) as book:
        trial = book.add_member(book.add_arm(arm.name, {}, None, None), 0, spec.id, spec.wire)
        book.start_attempt(trial, 1, began)
        events = [(step, began + 600.0 * step) for step in (0, 1)]
        book.record(trial, [{"step": s, "time": t, "metrics": {"train/loss": 3.0}} for s, t in events])
        (member,) = book.members()
        assert member.resolved.steps == spec.steps
        ends = time.localtime(began + 600.0 * spec.steps)
        assert f"the next result at about {time.strftime('%H:%M', ends)}" in running(book).text.replace(
            time.strftime("%Y-%m-%d ", ends), ""
        )
