"""Tests of a study's notes on its sweep's answer: gaps, notes, a figure, importances; and of the storage in which the dashboard finds all sweeps."""

import hashlib
import json
import math
import threading
from dataclasses import replace
from html import unescape

import optuna
import plotly.io
import pytest
from optuna.storages import JournalStorage
from support.experiments import ledger, sweep, tiny
from support.studies import trials

from ablate.execution.projections import Projections
from ablate.execution.search.annotations import decorate, importances
from ablate.execution.search.combined_storage import CombinedStorage, dashboard
from ablate.execution.search.study import Study
from ablate.execution.study_points import Point
from ablate.results.number_text import interval
from ablate.results.summary import summaries
from ablate.results.verdict_text import verdict_text
from ablate.store.checked_ledger import open_ledger
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store, Tally, line

KNOBS = {"cooldown": {"uniform": [0.0, 1.0]}, "workload.batch": {"int": [1, 9]}, "rht": [True, False]}


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """Two grids of two arms and a baseline each, run inline without MLflow; leave them as they are."""
    folder = tmp_path_factory.mktemp("dressed")
    sweep(tiny(folder, "first"), folder)
    sweep(tiny(folder, "second", ablate={"sr": [True, False]}), folder)
    return folder


@pytest.fixture
def copied(state, tmp_path):
    """A copy of theirs that may be written."""
    import shutil

    shutil.copytree(state, tmp_path / "state")
    return tmp_path / "state"


def dressed(state, name: str = "first", note: str = "the note") -> None:
    book = open_ledger(state, name)
    decorate(state / "sweeps" / name / "optuna.log", name, note, summaries(book), book.facts.metric)
    book.close()


# Facts of a point


def test_every_point_says_what_the_table_says_of_its_arm(state):
    book = ledger(state, "first")
    arms = {arm.name: arm for arm in summaries(book)}
    book.close()
    for trial in trials(state, "first"):
        facts, arm = trial.user_attrs, arms[trial.user_attrs["arm"]]
        assert (facts["gap"], facts["verdict"]) == (arm.gap.mean, verdict_text(arm.verdict))
        assert "interval" not in facts  # of two seeds


def test_a_grids_arm_waits_for_its_baseline_and_is_told_then(tmp_path):
    experiment = tiny(tmp_path, ablate={"rht": [True]}, seeds=1)
    folder = tmp_path / "sweeps" / "tiny"
    book = Ledger(folder / "ledger.db")
    book.describe(metric=experiment.metric.model_dump_json())
    numbers, of = {}, {}
    for arm in sorted(experiment.arms, key=lambda arm: arm.baseline is not None):
        spec = experiment.spec(arm, 0, "cpu")
        numbers[arm.name] = book.add_arm(
            arm.name, arm.knobs, numbers.get(arm.baseline), None if arm.baseline is None else 0
        )
        of[arm.name] = book.add_member(numbers[arm.name], 0, spec.id, spec.wire)
    projections = Projections(experiment, book, tmp_path, folder, None, busy=True)
    seen = []
    for name, loss in (("rht=true", 2.5), ("bf16", 2.0)):
        book.record(of[name], [{"step": 4, "time": 0.0, "metrics": {"val/loss": loss}}])
        book.settle(of[name], "done")
        projections.settled(of[name])
        projections.refresh()
        seen += [(trial.state.name, trial.user_attrs.get("gap")) for trial in trials(tmp_path)]
    book.close()
    assert seen == [("RUNNING", None), ("COMPLETE", 0.5)]


class CountingLedger(Ledger):
    """A ledger that counts how often the last values of all its trials are read."""

    reads = 0

    def finals(self, wanted):
        self.reads += 1
        return super().finals(wanted)


def finished(tmp_path, experiment) -> CountingLedger:
    """A ledger in which every arm of this experiment has its records."""
    folder = tmp_path / "sweeps" / "tiny"
    book, numbers = CountingLedger(folder / "ledger.db"), {}
    book.describe(metric=experiment.metric.model_dump_json())
    for place, arm in enumerate(sorted(experiment.arms, key=lambda arm: arm.baseline is not None)):
        spec = experiment.spec(arm, 0, "cpu")
        numbers[arm.name] = book.add_arm(
            arm.name, arm.knobs, numbers.get(arm.baseline), None if arm.baseline is None else place - 1
        )
        trial = book.add_member(numbers[arm.name], 0, spec.id, spec.wire)
        book.record(trial, [{"step": 4, "time": 0.0, "metrics": {"val/loss": 2.0 + place}}])
    return book


def test_all_arms_of_a_grid_are_settled_from_one_reading_of_its_ledger(tmp_path):
    experiment = tiny(tmp_path, ablate={"rht": [True, False], "sr": [True, False]}, seeds=1)
    folder, book = tmp_path / "sweeps" / "tiny", finished(tmp_path, experiment)
    projections = Projections(experiment, book, tmp_path, folder, None, busy=True)
    for member in book.members():
        book.settle(member.trial, "done")
        projections.settled(member.trial)
    projections.refresh()
    assert book.reads == 1
    Projections(experiment, book, tmp_path, folder, None, busy=False)  # of a restart
    assert book.reads == 2
    book.close()
    gaps = {trial.user_attrs["arm"]: trial.user_attrs["gap"] for trial in trials(tmp_path)}
    assert sorted(gaps.values()) == [1.0, 2.0, 3.0, 4.0]


def test_a_running_grid_reads_its_ledger_in_a_share_of_the_time_that_its_trials_take(tmp_path):
    experiment = tiny(tmp_path, ablate={"amax_percentile": [0.9 + n / 1000 for n in range(60)]}, seeds=1)
    folder, book = tmp_path / "sweeps" / "tiny", finished(tmp_path, experiment)
    ended: list[int] = []

    def clock() -> float:  # a trial takes 1 s, a reading of all arms half of that
        return len(ended) + 0.5 * book.reads

    projections = Projections(experiment, book, tmp_path, folder, None, busy=True, clock=clock)
    for member in book.members():
        book.settle(member.trial, "done")
        ended.append(member.trial)
        projections.settled(member.trial)
        projections.refresh()
    projections.refresh(final=True)
    assert 2 < book.reads <= 2 + 0.1 * len(ended)
    book.close()
    shown = trials(tmp_path)
    assert len(shown) == 60
    assert all("gap" in trial.user_attrs for trial in shown)


def test_a_gap_that_is_not_true_any_more_is_drawn_again(copied):
    with_gap = {trial.user_attrs["arm"]: trial.user_attrs["gap"] for trial in trials(copied, "first")}
    book, store = Ledger(copied / "sweeps" / "first" / "ledger.db", readonly=True), Store(copied)
    (trial,) = [member.id for member in book.members() if (member.name, member.seed) == ("bf16", 0)]
    book.close()
    events = [
        event | {"metrics": {name: value + (name == "val/loss") for name, value in event["metrics"].items()}}
        for event in store.events(trial)
    ]
    (store.folder(trial) / "events-1.jsonl").write_bytes(b"".join(line(event, trial) for event in events))
    store.commit(trial, store.result(trial) | {"records": Tally(events).sealed()})
    sweep(tiny(copied, "first"), copied)
    moved = {trial.user_attrs["arm"]: trial.user_attrs["gap"] for trial in trials(copied, "first")}
    assert moved == pytest.approx({arm: gap - 0.5 for arm, gap in with_gap.items()})  # one seed of two


# Notes and the picture


def test_a_study_gets_a_note_each_arm_its_own_and_the_gaps_as_a_picture(copied):
    from optuna_dashboard._custom_plot_data import get_plotly_graph_objects
    from optuna_dashboard._note import get_note_from_system_attrs

    dressed(copied)
    study = optuna.load_study(study_name="first", storage=JournalStorage(CombinedStorage(copied)))
    attrs = study._storage.get_study_system_attrs(study._study_id)
    assert get_note_from_system_attrs(attrs, None)["body"] == "the note"
    book = open_ledger(copied, "first")
    arms = {arm.name: arm for arm in summaries(book)}
    book.close()
    for trial in study.trials:
        note = get_note_from_system_attrs(attrs, trial._trial_id)["body"]
        arm = arms[trial.user_attrs["arm"]]
        assert (
            note
            == f"**{arm.name}**: {interval(arm.gap)} against bf16 over 2 seeds: {verdict_text(arm.verdict)}"
        )
    (figure,) = get_plotly_graph_objects(attrs).values()
    (points,) = json.loads(figure)["data"]
    assert points["y"] == sorted(points["y"], key=lambda name: -arms[name].gap.mean)
    assert len(points["y"]) == 2
    drawn = plotly.io.from_json(figure)  # which refuses what plotly has not
    assert drawn.layout.title.text == "How far is each arm from its baseline?"
    assert [shape.x1 for shape in drawn.layout.shapes if shape.type == "rect"] == list(
        {arm.margin for arm in arms.values() if arm.margin}
    )


def test_the_figure_has_the_whole_name_of_every_arm(copied):
    from optuna_dashboard._custom_plot_data import get_plotly_graph_objects

    book = open_ledger(copied, "first")
    long = "the last two blocks and the head kept in bf16, weights < 16 re-quantised"
    arms = [replace(arm, name=f"{arm.name} {long}") for arm in summaries(book)]
    decorate(copied / "sweeps" / "first" / "optuna.log", "first", "", arms, book.facts.metric)
    book.close()
    study = optuna.load_study(study_name="first", storage=JournalStorage(CombinedStorage(copied)))
    attrs = study._storage.get_study_system_attrs(study._study_id)
    (figure,) = get_plotly_graph_objects(attrs).values()
    labels = json.loads(figure)["data"][0]["y"]
    assert {unescape(label.replace("<br>", " ")) for label in labels} == {arm.name for arm in arms if arm.gap}
    assert (
        max(len(line) for label in labels for line in unescape(label.replace("<br>", "\n")).split("\n")) <= 36
    )


def test_the_same_answer_again_adds_no_more_than_its_picture_and_another_is_the_one_that_stays(copied):
    from optuna_dashboard import get_note

    journal = copied / "sweeps" / "first" / "optuna.log"
    dressed(copied)
    size = journal.stat().st_size
    picture = max(len(line) for line in journal.read_text().splitlines())
    dressed(copied)
    assert journal.stat().st_size - size < 10 * picture
    assert "dashboard:note" not in journal.read_text()[size:]
    dressed(copied, note="another")
    study = optuna.load_study(study_name="first", storage=JournalStorage(CombinedStorage(copied)))
    assert get_note(study) == "another"


def test_what_somebody_wrote_in_the_dashboard_stays(copied):
    from optuna_dashboard import get_note, save_note

    dressed(copied)
    save_note(
        optuna.load_study(study_name="first", storage=JournalStorage(CombinedStorage(copied))), "my own words"
    )
    dressed(copied, note="another")
    assert (
        get_note(optuna.load_study(study_name="first", storage=JournalStorage(CombinedStorage(copied))))
        == "my own words"
    )


def test_a_dressed_study_is_the_same_sweeps_and_stays_dressed(copied):
    from optuna_dashboard import get_note

    dressed(copied)
    before = (copied / "sweeps" / "first" / "optuna.log").read_bytes()
    sweep(tiny(copied, "first"), copied)
    assert (copied / "sweeps" / "first" / "optuna.log").read_bytes().startswith(before)
    assert (
        get_note(optuna.load_study(study_name="first", storage=JournalStorage(CombinedStorage(copied))))
        == "the note"
    )


@pytest.mark.parametrize("content", [None, "", "no journal\n"])
def test_where_there_is_no_study_nothing_is_made(content, tmp_path):
    journal = tmp_path / "optuna.log"
    if content is not None:
        journal.write_text(content)
    decorate(journal, "none", "note", [], metric_of_nothing())
    assert importances(journal, "none") == {}
    assert (journal.read_text() if journal.exists() else None) == content


def metric_of_nothing():
    from ablate.experiment.schema import Metric

    return Metric()


# Importances


def told(folder, value, number: int = 12, **keys):
    """A study of hashed points with the values that a function of their knobs gives, or several."""
    experiment = tiny(folder, ablate=KNOBS, search={"sampler": "random", "trials": number}, **keys)
    points = []
    for place in range(number):
        draw = hashlib.sha256(f"point {place}".encode()).digest()
        knobs = {"cooldown": draw[0] / 255, "workload.batch": 1 + draw[1] % 9, "rht": draw[2] % 2 == 0}
        points.append(Point(f"{place}", knobs, None))
    journal = folder / "optuna.log"
    study = Study(journal, experiment, points)
    for place, point in enumerate(points):
        found = value(point.knobs)
        study.tell(place, found if isinstance(found, tuple) else (found,), {}, {"arm": point.name}, (-1.0,))
    return journal


def test_the_knob_that_alone_decides_has_all_the_importance(tmp_path):
    journal = told(tmp_path, lambda knobs: 3 * knobs["cooldown"], number=40)
    found = importances(journal, "tiny")
    assert next(iter(found)) == "cooldown"
    assert found["cooldown"] > 0.9
    assert sum(found.values()) == pytest.approx(1)
    assert set(found) == set(KNOBS)
    assert importances(journal, "tiny") == found


def test_of_several_objectives_each_has_importances_of_its_own(tmp_path):
    metrics = [{"name": "val/loss"}, {"name": "flops/fp4_share", "direction": "maximize"}]
    journal = told(
        tmp_path, lambda knobs: (knobs["cooldown"], float(knobs["workload.batch"])), number=40, metric=metrics
    )
    assert [next(iter(importances(journal, "tiny", objective))) for objective in (0, 1)] == [
        "cooldown",
        "workload.batch",
    ]
    assert importances(journal, "tiny", 2) == {}


@pytest.mark.parametrize(
    ("number", "value"),
    [
        (7, lambda knobs: knobs["cooldown"]),
        (12, lambda knobs: 1.0),
        (12, lambda knobs: knobs["cooldown"] if knobs["cooldown"] < 0.3 else math.inf),
        (12, lambda knobs: math.nan),
    ],
    ids=["few", "constant", "diverged", "failed"],
)
def test_where_there_is_too_little_to_tell_there_are_no_importances(number, value, tmp_path):
    assert importances(told(tmp_path, value, number), "tiny") == {}


def test_infinite_values_are_left_out(tmp_path):
    journal = told(
        tmp_path, lambda knobs: knobs["cooldown"] if knobs["cooldown"] < 0.8 else math.inf, number=40
    )
    assert next(iter(importances(journal, "tiny"))) == "cooldown"


# The shelf


def seen(storage, name: str) -> list[tuple]:
    study = optuna.load_study(study_name=name, storage=storage)
    return [
        (t.number, t.state, t.values, t.params, t.user_attrs, t.intermediate_values) for t in study.trials
    ]


def alone(state, name: str) -> list[tuple]:
    return [
        (t.number, t.state, t.values, t.params, t.user_attrs, t.intermediate_values)
        for t in trials(state, name)
    ]


def test_the_shelf_shows_every_study_as_its_own_journal_does(state):
    storage = JournalStorage(CombinedStorage(state))
    assert [study.study_name for study in storage.get_all_studies()] == ["first", "second"]
    for name in ("first", "second"):
        assert seen(storage, name) == alone(state, name)


def test_the_shelf_follows_sweeps_that_begin_and_are_drawn_again(copied):
    storage = JournalStorage(CombinedStorage(copied))
    sweep(tiny(copied, "third", ablate={"rht": [True]}, seeds=1), copied)
    assert seen(storage, "third") == alone(copied, "third")
    (copied / "sweeps" / "first" / "optuna.log").unlink()
    sweep(tiny(copied, "first"), copied)
    assert seen(storage, "first") == alone(copied, "first")
    assert sorted(study.study_name for study in storage.get_all_studies()) == ["first", "second", "third"]


def test_half_a_line_waits_for_its_other_half(copied):
    journal = copied / "sweeps" / "first" / "optuna.log"
    whole = journal.read_bytes()
    journal.write_bytes(whole[:-20])
    storage = JournalStorage(CombinedStorage(copied))
    assert [trial[1].name for trial in seen(storage, "first")].count("COMPLETE") < 2
    with journal.open("ab") as file:
        file.write(whole[-20:])
    assert seen(storage, "first") == alone(copied, "first")


def asked(application, method: str, path: str, body: dict | None = None) -> tuple[str, dict]:
    from io import BytesIO

    data, said = json.dumps(body or {}).encode(), []
    environ = {
        "REQUEST_METHOD": method,
        "PATH_INFO": path,
        "CONTENT_TYPE": "application/json",
        "CONTENT_LENGTH": str(len(data)),
    }
    environ |= {
        "wsgi.input": BytesIO(data),
        "wsgi.errors": None,
        "SERVER_NAME": "x",
        "SERVER_PORT": "1",
        "wsgi.url_scheme": "http",
    }
    answer = b"".join(application(environ, lambda status, headers, *rest: said.append(status)))
    return said[0], json.loads(answer or b"{}")


def test_a_note_taken_in_the_dashboard_lands_in_the_journal_that_it_is_about(copied):
    application, number = dashboard(copied)
    before = {name: (copied / "sweeps" / name / "optuna.log").read_bytes() for name in ("first", "second")}
    second = number("second")
    trial = JournalStorage(CombinedStorage(copied)).get_all_trials(second)[1]._trial_id
    assert asked(application, "PUT", f"/api/studies/{second}/note", {"body": "of the study", "version": 1})[
        0
    ].startswith("204")
    assert asked(
        application, "PUT", f"/api/studies/{second}/{trial}/note", {"body": "of an arm", "version": 1}
    )[0].startswith("204")
    assert (copied / "sweeps" / "first" / "optuna.log").read_bytes() == before["first"]
    from optuna.storages.journal import JournalFileBackend
    from optuna_dashboard._note import get_note_from_system_attrs

    plain = optuna.load_study(
        study_name="second",
        storage=JournalStorage(JournalFileBackend(str(copied / "sweeps" / "second" / "optuna.log"))),
    )
    attrs = plain._storage.get_study_system_attrs(plain._study_id)
    assert get_note_from_system_attrs(attrs, None)["body"] == "of the study"
    assert get_note_from_system_attrs(attrs, plain.trials[1]._trial_id)["body"] == "of an arm"
    sweep(tiny(copied, "second", ablate={"sr": [True, False]}), copied)
    assert b"of an arm" in (copied / "sweeps" / "second" / "optuna.log").read_bytes()


@pytest.mark.parametrize(
    ("method", "path"),
    [
        ("POST", "/api/studies"),
        ("DELETE", "/api/studies/0"),
        ("POST", "/api/studies/0/rename"),
        ("POST", "/api/trials/0/tell"),
        ("POST", "/api/trials/0/user-attrs"),
        ("PUT", "/api/studies/0/preference_feedback_component"),
    ],
)
def test_the_dashboard_changes_no_study(method, path, copied):
    application, _ = dashboard(copied)
    before = {path: path.read_bytes() for path in copied.glob("sweeps/*/optuna.log")}
    status, said = asked(application, method, path, {"state": "Fail", "study_name": "x"})
    assert status.startswith("403")
    assert "written by its sweep alone" in said["reason"]
    assert {path: path.read_bytes() for path in copied.glob("sweeps/*/optuna.log")} == before


def test_a_sweep_that_is_looked_at_while_it_runs_is_not_disturbed(tmp_path):
    listed = {f"arm {n}": {"cooldown": n / 10} for n in range(6)}
    experiment = tiny(tmp_path, shape={"steps": 40}, ablate=None, arms=listed, seeds=1)
    ready, over, taken = threading.Event(), threading.Event(), []

    def look() -> None:
        application, number = dashboard(tmp_path)
        ready.set()
        while not over.is_set():
            asked(application, "GET", "/api/studies")
            study = number("tiny")
            if study is not None:
                asked(application, "GET", f"/api/studies/{study}")
                taken.append(
                    asked(
                        application,
                        "PUT",
                        f"/api/studies/{study}/note",
                        {"body": f"{len(taken)}", "version": len(taken) + 1},
                    )[0]
                )
            over.wait(0.01)

    watcher = threading.Thread(target=look)
    watcher.start()
    assert ready.wait(60)
    try:
        outcome, _ = sweep(experiment, tmp_path)
    finally:
        over.set()
        watcher.join()
    assert outcome.status == "done"
    assert any(status.startswith("204") for status in taken)
    assert [trial.state.name for trial in trials(tmp_path)] == ["COMPLETE"] * 6
    lines = (tmp_path / "sweeps" / "tiny" / "optuna.log").read_text().splitlines()
    assert all(json.loads(line) for line in lines)
