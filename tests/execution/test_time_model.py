"""Estimates of time: learned from measured trials, the same wherever they are shown; and counts of trials that a run then runs."""

import json
import shutil
from contextlib import closing

import pytest
from support.commands import here
from support.experiments import sweep, tiny, write

from ablate.execution import sweep_control, sweep_status, time_model
from ablate.execution.controller import Controller
from ablate.execution.forecast import Forecast, forecast, time_needed
from ablate.execution.progress import RunOptions
from ablate.execution.time_model import (
    Countdown,
    Load,
    MachinePaces,
    Timed,
    TimeModel,
    Trials,
    time_left,
    unproposed,
)
from ablate.execution.workers import Inline
from ablate.experiment.schema import Resources
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store

IDLE = {"workload": {"idle": {"steps": 3}}, "seeds": 2}
RANGE = {"uniform": [0.0, 1.0]}
ON_OFF = {"choice": [True, False]}
SEARCHES = {
    "a range of a workload value": ({"workload.x": RANGE}, {}, 2 * 5 * 2),
    "choices of a workload value, and a range beside it": (
        {"workload.x": {"choice": [0.0, 1.0]}, "cooldown": RANGE},
        {},
        (5 + 2) * 2,
    ),
    "fewer points than proposals": ({"rht": ON_OFF}, {}, 2 * 2),
    "knobs that not every point has": (
        {"rht": ON_OFF, "rht_size": {"choice": [16, 32], "when": {"rht": True}}},
        {},
        3 * 2,
    ),
    "a workload value that not every point has": (
        {"rht": ON_OFF, "workload.x": {"choice": [0.0, 1.0], "when": {"rht": True}}},
        {},
        (3 + 3) * 2,
    ),
    "a winner that is confirmed": ({"cooldown": RANGE}, {"confirm": 3}, 5 * 2 + 2 * 3),
}


def searched(folder, knobs, more):
    return tiny(folder, ablate=knobs, search={"trials": 5, "sampler": "random"} | more, **IDLE)


@pytest.mark.parametrize("case", SEARCHES)
def test_what_a_search_may_still_bring_counts_baselines_and_confirmation(case, tmp_path):
    knobs, more, count = SEARCHES[case]
    found = unproposed(searched(tmp_path, knobs, more), "cpu", 5, True, 0)
    assert found.total() == count
    assert not unproposed(searched(tmp_path, knobs, {}), "cpu", 0, True, 0)


@pytest.mark.parametrize("case", SEARCHES)
def test_a_plan_counts_what_a_search_runs_and_after_it_nothing(case, tmp_path):
    """Before, in the middle, and after it; a limit where points may repeat, exact where every point is new."""
    knobs, more, count = SEARCHES[case]
    experiment = searched(tmp_path, knobs, more)
    planned = forecast(experiment, tmp_path, "cpu")
    base = len(experiment.arms) * 2
    assert (planned.trials, planned.later, planned.done) == (base, count, 0)
    ran = sweep(
        tiny(
            tmp_path,
            ablate=knobs,
            search={"trials": 5, "sampler": "random"} | more,
            **IDLE,
            budget={"trials": 7},
        ),
        tmp_path,
    )[0].ran
    half = forecast(experiment, tmp_path, "cpu")
    assert half.done == ran
    again, _ = sweep(experiment, tmp_path)
    assert half.trials <= again.ran <= half.trials + half.later
    total = len(list((tmp_path / "trials").iterdir()))
    assert total == ran + again.ran <= base + count
    if case == "a range of a workload value":
        assert total == base + count
    after = forecast(experiment, tmp_path, "cpu")
    assert (after.trials, after.later, after.done) == (0, 0, total)


def test_a_finished_search_says_so_and_an_edited_one_what_is_left(tmp_path):
    keys = IDLE | {"ablate": {"workload.x": RANGE}, "search": {"trials": 4, "sampler": "random"}}
    path = write(tmp_path, **keys)
    assert "At most 16 trials to run, 0 done." in here("plan", path, "--state", tmp_path).stdout
    sweep(tiny(tmp_path, **keys), tmp_path)
    assert "0 trials to run, 16 done. Nothing to run." in here("plan", path, "--state", tmp_path).stdout
    write(tmp_path, **keys | {"search": {"trials": 6, "sampler": "random"}})
    assert "At most 8 trials to run, 16 done." in here("plan", path, "--state", tmp_path).stdout
    write(tmp_path, **keys | {"workload": {"idle": {"steps": 4}}})  # what was proposed runs anew
    assert "\n16 trials to run, 0 done." in here("plan", path, "--state", tmp_path).stdout


@pytest.mark.parametrize(
    ("resources", "settings", "at_once"),
    [
        ({}, {}, 4),
        ({"gpus": 2}, {}, 2),
        ({"gpus": 3}, {}, 1),
        ({"gpus": 0.25}, {}, 8),
        ({"gpus": 4, "ranks": 1}, {}, 1),
        ({}, {"workers": 3}, 3),
        ({}, {"workers": 6}, 4),
        ({"gpus": 2}, {"workers": 3}, 2),
        ({}, {"executor": "inline"}, 1),
        ({}, {"cluster": True}, 1),
        ({}, {"cluster": True, "workers": 6}, 6),
        ({}, {"gpus": 0}, 1),
        ({}, {"gpus": 0, "workers": 6}, 6),
        ({"ranks": 2}, {"device": "cpu", "workers": 6}, 3),
        ({"ranks": 2}, {"device": "cpu", "workers": 6, "cluster": True}, 6),
    ],
)
def test_a_plan_counts_as_many_trials_at_once_as_the_pool_places(resources, settings, at_once):
    """On a machine of four GPUs, of whose trials one has run."""
    given = {"device": "cuda", "executor": "ray", "workers": None, "cluster": False, "gpus": 4} | settings
    planned = Forecast(trials=8, seconds=800.0, longest=100.0, measured=1)
    needed = time_needed(planned, resources=Resources(**resources), **given)
    assert needed is not None
    assert needed.at_once == at_once
    assert 800 / at_once <= needed.seconds <= 800 / at_once + 10


def test_seeds_that_grow_are_planned_at_most_and_none_after_the_end(tmp_path):
    keys = {"workload": {"idle": {"steps": 3}}, "seeds": {"start": 2, "most": 5, "step": 1}}
    experiment = tiny(tmp_path, **keys)
    before = forecast(experiment, tmp_path, "cpu")
    assert (before.trials, before.grown) == (3 * 2, 3 * 3)
    outcome, _ = sweep(experiment, tmp_path)
    assert before.trials <= outcome.ran <= before.trials + before.grown
    after = forecast(experiment, tmp_path, "cpu")
    assert (after.trials, after.grown, after.done) == (0, 0, outcome.ran)


def test_arms_with_more_seeds_than_an_edited_file_allows_take_none_from_the_others(tmp_path):
    keys = {"workload": {"idle": {"steps": 3}}, "ablate": {"rht": [True, False]}}
    sweep(tiny(tmp_path, seeds=5, **keys), tmp_path)
    arms = {"ablate": None, "arms": {"rht=true": {"rht": True}, "new": {"sr": False}}}
    edited = tiny(tmp_path, seeds={"start": 2, "most": 3}, **keys | arms)
    # The baseline and rht=true have 5 seeds each; only the new arm may grow, by one.
    assert forecast(edited, tmp_path, "cpu").grown == 1


def test_a_search_for_a_cause_has_as_many_runs_left_as_its_budget_allows(tmp_path):
    experiment = tiny(tmp_path, **BLAME)
    runs = [unproposed(experiment, "cpu", 0, False, groups).total() for groups in (0, 5, 99)]
    most = experiment.blamed[0].runs - 2 * 4
    assert runs == [most, most - 5, 0]
    assert forecast(experiment, tmp_path, "cpu").later == most > 0


# Seconds


@pytest.fixture(scope="module")
def swept(tmp_path_factory):
    folder = tmp_path_factory.mktemp("swept")
    sweep(tiny(folder, ablate={"recipe": ["nvfp4"]}, seeds=2), folder)
    return folder


def timed(state, seconds) -> None:
    """Say how long each finished trial took: `seconds` of whether it is quantised."""
    for path in (state / "trials").glob("*/result.json"):
        plain = json.loads((path.parent / "spec.json").read_text())["recipe"]["fprop"]["x"] is None
        path.write_text(json.dumps(json.loads(path.read_text()) | {"seconds": seconds(not plain)}))


def test_a_plan_learns_what_trials_of_each_precision_took(swept, tmp_path):
    shutil.copytree(swept, tmp_path / "state")
    timed(tmp_path / "state", lambda quantised: 70.0 if quantised else 10.0)
    other = tiny(tmp_path, "other", ablate={"recipe": ["nvfp4"]}, seeds=[5, 6, 7], shape={"lr": 1e-4})
    found = forecast(other, tmp_path / "state", "cpu")
    assert found.measured == 4
    assert found.seconds == pytest.approx(3 * 70 + 3 * 10)
    assert found.longest == pytest.approx(70)
    assert forecast(other, tmp_path / "nowhere", "cpu").measured == 0
    elsewhere = tiny(tmp_path, "elsewhere", workload={"idle": {"steps": 3}})
    assert forecast(elsewhere, tmp_path / "state", "cpu").measured == 0


def test_of_a_forked_trial_the_steps_that_it_computed_count(swept, tmp_path):
    shutil.copytree(swept, tmp_path / "state")
    timed(tmp_path / "state", lambda quantised: 10.0)
    for folder in (tmp_path / "state" / "trials").iterdir():
        (folder / "trunk-1.json").write_text(json.dumps({"trial": "x", "step": 3}))  # of 4
    other = tiny(tmp_path, "other", ablate={"recipe": ["nvfp4"]}, seeds=[5])
    assert forecast(other, tmp_path / "state", "cpu").seconds == pytest.approx(2 * 40)


@pytest.mark.parametrize("name", ["spec.json", "result.json"])
def test_a_trial_that_cannot_be_read_teaches_nothing(name, swept, tmp_path):
    shutil.copytree(swept, tmp_path / "state")
    experiment = tiny(tmp_path, "other", seeds=[5])
    first = next((tmp_path / "state" / "trials").iterdir())
    (first / name).write_text('{"half": ')
    assert TimeModel(experiment, Store(tmp_path / "state"), "cpu").measured == 3


def test_the_trials_most_like_one_decide_and_a_larger_count_is_no_limit(tmp_path):
    pace = TimeModel(tiny(tmp_path), Store(tmp_path), "cpu")
    kind = ("gpt", "emulated", "cpu")
    small, large = Load(kind, "a", False, 1.0, 10), Load(kind, "a", False, 1000.0, 10)
    plain, twin = Load(kind, "b", True, 1.0, 10), Load(kind, "c", False, 1.0, 10)
    assert pace.seconds(small) == 1.0
    for _ in range(20):
        pace.learn(small, 5.0)
        pace.learn(large, 2000.0)
        pace.learn(plain, 3.0)
    assert [pace.seconds(load) for load in (small, twin, plain, large)] == [5.0, 5.0, 3.0, 2000.0]


def test_trials_of_other_state_folders_count_only_where_they_are_nearer(tmp_path):
    pace = TimeModel(tiny(tmp_path), Store(tmp_path), "cpu")
    kind = ("gpt", "emulated", "cpu")
    asked, plain = Load(kind, "a", False, 1.0, 10), Load(kind, "b", True, 1.0, 10)
    pace.learn(plain, 3.0)  # not as near that nothing else is looked at
    pace.recall([(Load(kind, "b", True, 1000.0, 10), 7.0)])
    assert (pace.seconds(asked), pace.recalled) == (3.0, 0)
    pace.recall([(asked, 5.0)])
    assert (pace.seconds(asked), pace.recalled) == (5.0, 1)


def test_time_left_is_shared_out_and_never_less_than_the_longest_trial():
    assert time_left(100.0, 10.0, [(5.0, 0.0, 0.0), (17.0, 2.0, 0.0)], 4) == 30.0
    assert time_left(10.0, 10.0, [(5.0, 0.0, 0.0), (50.0, 0.0, 0.0)], 4) == 50.0
    assert time_left(12.0, 12.0, [], 8) == 12.0
    assert time_left(0.0, 0.0, [], 0) == 0.0


def test_a_trial_goes_by_its_estimate_until_its_own_speed_is_known():
    assert time_left(0.0, 0.0, [(100.0, 30.0, 0.0)], 1) == 70.0
    assert time_left(0.0, 0.0, [(100.0, 130.0, 0.0)], 1) == 0.0
    assert time_left(0.0, 0.0, [(100.0, 30.0, 0.25)], 1) == 90.0


@pytest.mark.parametrize(
    ("spent", "step", "low", "high"),
    [
        (0.5, 0, 8.5, 8.5),  # as estimated: a second each
        (60.0, 0, 0.0, 0.0),  # overrun, and nothing to measure by
        (60.0, 1, 4000.0, 32400.0),
        (60.0, 30, 840.0, 1020.0),  # 120 s each
        (119.0, 59, 870.0, 970.0),
        (0.25, 30, 4.25, 5.7),  # half as long as estimated, but for at least a second
        (60.0, 60, 400.0, 481.0),  # the last step is done, and the trial has not ended
    ],
)
def test_an_overrun_estimate_is_made_anew_from_what_runs(spent, step, low, high, tmp_path, monkeypatch):
    """One of nine trials runs, of 60 steps."""
    experiment, now = tiny(tmp_path, **IDLE), 1e9
    monkeypatch.setattr(time_model.time, "time", lambda: now)
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        countdown = Countdown(experiment, ledger, Store(tmp_path), "cpu")
        load = Load.of(experiment.arms[0], experiment, "cpu")
        countdown.pace.learn(load, 1.0)
        countdown.waiting[load, 1.0] = 8
        runs = Timed(load, 1.0, now - spent, step / 60)
        assert low <= countdown.left([runs], 1, 0, True) <= high


def test_trials_that_ended_are_not_counted_as_slow_again(tmp_path, monkeypatch):
    """A trial that began under the first, wrong estimate is compared with what the others took."""
    experiment, now = tiny(tmp_path, **IDLE), 1e9
    monkeypatch.setattr(time_model.time, "time", lambda: now)
    with closing(Ledger(tmp_path / "ledger.db")) as ledger:
        countdown = Countdown(experiment, ledger, Store(tmp_path), "cpu")
        load = Load.of(experiment.arms[0], experiment, "cpu")
        runs = Timed(load, 1.0, now - 60.0, 0.5)
        countdown.pace.learn(load, 120.0)
        countdown.waiting[load, 1.0] = 8
        assert countdown.left([runs], 1, 0, True) == pytest.approx(8 * 120 + 60)


def test_the_longest_of_trials_that_share_a_prefix_is_the_longest_rest(tmp_path):
    pace = TimeModel(tiny(tmp_path), Store(tmp_path), "cpu")
    load = Load(("gpt", "emulated", "cpu"), "a", False, 10.0, 10)
    assert pace.sum_and_longest(Trials({(load, 0.25): 3, (load, 0.5): 1})) == (12.5, 5.0)


def test_a_clock_that_is_set_back_leaves_the_time_left_as_it_is(tmp_path, monkeypatch):
    experiment = tiny(tmp_path, **IDLE)
    steps = Controller(experiment, tmp_path, "cpu", Inline, None)
    now = 1e9
    monkeypatch.setattr(time_model.time, "time", lambda: now)
    countdown = steps.scheduler.queue.countdown
    countdown.waiting[Load.of(experiment.arms[0], experiment, "cpu"), 1.0] = 1
    before = countdown.left([], 1, 0, True)
    now -= 3600.0
    assert countdown.left([], 1, 0, True) == before > 0
    steps.ledger.close()


def test_status_and_the_live_view_show_one_time(tmp_path, monkeypatch):
    monkeypatch.setattr(sweep_status.time, "time", lambda: 1e9)  # the controller's clock, too
    experiment, folder = (
        tiny(tmp_path, workload={"idle": {"steps": 50, "seconds": 1e-3}}),
        tmp_path / "sweeps" / "tiny",
    )
    seen = []
    with sweep_control.exclusive(folder, "tiny"):
        for step in Controller(experiment, tmp_path, "cpu", Inline, None).run():
            if getattr(step, "running", ()):
                seen.append((sweep_status.read(folder, Store(tmp_path)).seconds_left, step.seconds_left))
    assert seen
    assert all(shown == own for shown, own in seen)
    assert seen[0][0] > 0


BLAME = {"ablate": None, "recipe": "nvfp4", "seeds": 4, "blame": {"where": "kinds", "budget": 30, "most": 1}}
PLANNED = {
    "arms that share a prefix": {
        "ablate": {"cooldown": [0.25, 0.5, 0.75]},
        "shape": {"steps": 8, "eval_every": 4},
    },
    "a search for a cause, which requests most of its runs later": BLAME,
}


@pytest.mark.parametrize("case", PLANNED)
def test_the_clock_of_a_run_agrees_with_the_plan(case, tmp_path):
    experiment = tiny(tmp_path, **PLANNED[case])
    planned = forecast(experiment, tmp_path, "cpu")
    steps = Controller(experiment, tmp_path, "cpu", Inline, None).run()
    with closing(steps):
        assert next(steps).seconds_left == pytest.approx(time_left(planned.seconds, planned.longest, [], 1))
        assert next(step for step in steps if step.running).total == planned.trials


# What this machine has measured


def shaped(folder, name, **shape):
    return tiny(folder, name, ablate={"recipe": ["nvfp4"]}, seeds=[5], shape=shape)


def seconds_of(state) -> list[float]:
    return [json.loads(path.read_text())["seconds"] for path in (state / "trials").glob("*/result.json")]


def test_a_new_state_folder_is_planned_by_what_the_machine_ran_for_another(tmp_path, cache):
    paces = MachinePaces("cpu")
    options = RunOptions(paces=paces)
    list(Controller(shaped(tmp_path, "first"), tmp_path / "first", "cpu", Inline, None, options).run())
    longer = shaped(tmp_path, "longer", steps=40)  # ten times the steps
    blind = forecast(longer, tmp_path / "new", "cpu")
    taught = forecast(longer, tmp_path / "new", "cpu", paces)
    assert (blind.measured, blind.recalled, taught.measured, taught.recalled) == (0, 0, 0, 2)
    assert taught.seconds == pytest.approx(10 * sum(seconds_of(tmp_path / "first")), rel=0.2)
    # A state folder's own trials count where they are as near.
    timed(tmp_path / "first", lambda quantised: 70.0)
    own = forecast(longer, tmp_path / "first", "cpu", paces)
    assert (own.measured, own.recalled) == (2, 0)
    assert own.seconds == pytest.approx(2 * 700, rel=0.2)


def test_paces_are_kept_apart_by_kind_device_and_load_and_bounded(cache):
    kind = ("gpt", "emulated", "cpu")
    small, large = Load(kind, "a", False, 1.0, 10), Load(kind, "b", True, 50.0, 10)
    MachinePaces("cpu").keep([(small, float(number)) for number in range(20)])
    MachinePaces("cpu").keep([(large, 0.5), (small, 99.0)])
    MachinePaces("cuda").keep([(Load(("gpt", "emulated", "cuda"), "a", False, 1.0, 10), 7.0)])
    found = MachinePaces("cpu").read()
    assert [ratio for load, ratio in found if load == small] == [*map(float, range(13, 20)), 99.0]
    assert [ratio for load, ratio in found if load == large] == [0.5]
    assert [ratio for _, ratio in MachinePaces("cuda").read()] == [7.0]
    MachinePaces("cpu").keep([(Load(kind, str(number), False, 1.0, 10), 1.0) for number in range(400)])
    kept = {load.recipe for load, _ in MachinePaces("cpu").read()}
    assert kept == {str(number) for number in range(100, 400)}


@pytest.mark.parametrize("content", ['{"half": ', "[1]", '{"paces": [{"load": 1}, {}]}'])
def test_damaged_paces_and_a_cache_that_cannot_be_written_change_nothing(
    content, tmp_path, cache, monkeypatch
):
    pairs = [(Load(("gpt", "emulated", "cpu"), "a", False, 1.0, 10), 2.0)]
    MachinePaces("cpu").keep(pairs)
    (file,) = (cache / "paces").glob("*.json")
    file.write_text(content)
    assert MachinePaces("cpu").read() == []
    MachinePaces("cpu").keep(pairs)
    assert MachinePaces("cpu").read() == pairs
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "file" / "below"))
    (tmp_path / "file").touch()
    MachinePaces("cpu").keep(pairs)
    assert MachinePaces("cpu").read() == []


def test_paces_of_a_cluster_and_of_own_code_are_not_compared(tmp_path, cache):
    experiment = tiny(tmp_path)
    assert MachinePaces.of(experiment, "cpu", cluster=False) is not None
    assert MachinePaces.of(experiment, "cpu", cluster=True) is None
