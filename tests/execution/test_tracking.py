"""The ledger drawn in MLflow: one run a member, its records as they are, nothing twice, and nothing lost when the server is."""

import json
import re
import sqlite3
import threading
from collections import Counter

import pytest
from support.experiments import WILD, Children, idle, ledger, statuses, sweep, tiny, until
from support.mlflow_runs import histories, runs
from support.studies import outcomes, trials

from ablate.execution.controller import Controller
from ablate.execution.projections import Mirror
from ablate.execution.tracking.access import log_report
from ablate.execution.tracking.mlflow_tracker import MlflowTracker
from ablate.execution.tracking.runs import gap_key, key, page, view
from ablate.execution.workers import Inline
from ablate.recipes import SLOTS
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import ArmRow

pytestmark = [
    pytest.mark.services,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def store(tmp_path_factory) -> str:
    """One MLflow database for this file: a fresh one takes seconds to migrate."""
    return f"sqlite:///{tmp_path_factory.mktemp('mlflow') / 'mlflow.db'}"


@pytest.fixture(scope="module")
def client(store):
    from mlflow import MlflowClient

    return MlflowClient(store)


@pytest.fixture(scope="module")
def drawn(store, tmp_path_factory):
    """The state folder of a grid that was drawn, with errors of operands; leave it as it is."""
    folder = tmp_path_factory.mktemp("drawn")
    outcome, news = sweep(tiny(folder, "drawn", telemetry=None), folder, store)
    assert outcome.status == "done"
    assert not any("MLflow" in line for line in news)
    return folder


_WATCHED = (
    "flops/fp4_share",
    "grad/norm",
    "throughput/tokens_per_s",
    "tokens",
    "train/loss",
    "val/loss_bf16",
)
_COUNTS = ("nan/activation", "nan/grad", "nan/loss")
_ERRORS = tuple(f"quant/{slot}/sqnr_db" for slot in SLOTS)
SENT = {"val/loss": "val/loss"} | {name: f"watch/{name}" for name in (*_WATCHED, *_COUNTS, *_ERRORS)}
FEW = [*(SENT[name] for name in ("val/loss", *_WATCHED)), "val/loss_gap", "val/loss_gap_pct"]


def in_folders(run) -> list[str]:
    """The keys of a run in folders of their own: counts of NaN and, of a quantised arm, errors of operands."""
    arm = run.data.tags["ablate.arm"]
    return [SENT[name] for name in (*_COUNTS, *(_ERRORS if arm != "bf16" else ()))]


def flat(path: str, value) -> dict[str, str]:
    if isinstance(value, dict):
        return {
            key: text for name, inner in value.items() for key, text in flat(f"{path}.{name}", inner).items()
        }
    return {path: value if isinstance(value, str) else json.dumps(value)}


def test_a_sweep_is_one_experiment_with_one_parent_and_a_child_a_member(client, drawn):
    (parent,) = runs(client, "drawn", "sweep")
    children = runs(client, "drawn")
    assert {run.data.tags["mlflow.parentRunId"] for run in children} == {parent.info.run_id}
    names = [f"{arm} seed={seed}" for arm in ("bf16", "rht=true", "rht=false") for seed in (0, 1)]
    assert sorted(run.info.run_name for run in children) == sorted(names)
    assert {run.info.status for run in (parent, *children)} == {"FINISHED"}


def test_the_parent_holds_the_question_and_the_answer(client, drawn):
    (parent,) = runs(client, "drawn", "sweep")
    note = parent.data.tags["mlflow.note.content"]
    assert "**Does it matter?**" in note
    assert "| rht=true | 4." in note
    assert {item.path for item in client.list_artifacts(parent.info.run_id)} >= {
        "experiment.yaml",
        "provenance.json",
    }


def test_every_resolved_value_is_a_param_under_its_path(client, drawn):
    for run in runs(client, "drawn"):
        spec = json.loads((drawn / "trials" / run.data.tags["ablate.trial"] / "spec.json").read_text())
        expected = (
            flat("recipe", spec["recipe"])
            | flat("workload", spec["workload"]["gpt"])
            | {"data": spec["data"]}
        )
        assert expected.items() <= run.data.params.items()
        assert run.data.params["seed"] == run.data.tags["ablate.seed"]
    (run,) = [run for run in runs(client, "drawn") if run.info.run_name == "rht=true seed=0"]
    assert run.data.params["recipe.wgrad.hadamard.size"] == "16"
    assert (run.data.params["ablate.rht"], run.data.params["arm"], run.data.params["workload"]) == (
        "true",
        "rht=true",
        "gpt",
    )
    assert run.data.params["recipe.schedule"] == "[]"


def test_every_run_has_its_data_as_input_by_fingerprint_and_counts(client, drawn):
    corpus = drawn / "train.bin"
    for run in runs(client, "drawn"):
        (given,) = run.inputs.dataset_inputs
        told = given.dataset
        assert (told.name, told.digest) == (str(corpus), run.data.params["data"])
        assert (told.source_type, json.loads(told.source)) == ("local", {"uri": str(corpus)})
        assert json.loads(told.profile) == {
            "train tokens": 10_000,
            "validation tokens": 2_000,
            "vocabulary": 64,
        }
        assert json.loads(told.schema)["mlflow_colspec"] == [
            {"name": "token", "type": "integer from 0 to 63", "required": True}
        ]
        assert {tag.key: tag.value for tag in given.tags} == {"mlflow.data.context": "training"}


def test_a_run_says_its_data_in_one_call_and_once(client, store, tmp_path, monkeypatch):
    from mlflow import MlflowClient

    told, say = [], MlflowClient.log_inputs
    monkeypatch.setattr(
        MlflowClient, "log_inputs", lambda self, run, data: told.append(run) or say(self, run, data)
    )
    sweep(tiny(tmp_path, "given", seeds=1), tmp_path, store)
    forget(tmp_path, "given", LOST["the runs"])
    sweep(tiny(tmp_path, "given", seeds=1), tmp_path, store)
    assert len(told) == 6  # each run, and again for a controller that has lost them
    assert [len(run.inputs.dataset_inputs) for run in runs(client, "given")] == [1, 1, 1]


def test_what_has_no_data_has_no_input(client, store, tmp_path):
    sweep(idle(tmp_path, "idle", seeds=1), tmp_path, store)
    assert [run.inputs.dataset_inputs for run in runs(client, "idle")] == [[], [], []]


def test_the_metric_histories_are_the_ledgers_records(client, drawn):
    book, compared = ledger(drawn, "drawn"), 0
    for member in book.members():
        (run,) = [
            run
            for run in runs(client, "drawn")
            if run.data.tags["ablate.member"] == f"{member.arm}/{member.seed}"
        ]
        expected = Counter(
            (SENT[name], step, value, int(moment * 1000))
            for step, name, value, moment in book.records(member.trial)
            if name in SENT
        )
        sent = {point: n for point, n in histories(client, run).items() if "_gap" not in point[0]}
        assert Counter(sent) == expected
        compared += len(expected)
    book.close()
    assert compared > 6 * 9


def test_what_the_sweep_turns_sorts_before_all_else(client, drawn):
    for run in runs(client, "drawn"):
        turned = [key for key in run.data.params if key.startswith("ablate.")]
        assert turned == ["ablate.recipe" if run.data.tags["ablate.baseline"] == "true" else "ablate.rht"]
        assert sorted(run.data.params)[: len(turned) + 1] == [*turned, "arm"]


def test_every_run_says_what_it_is_compared_with_and_by_how_much_it_differs(client, drawn):
    found = {
        (run.data.tags["ablate.arm"], run.data.tags["ablate.seed"]): run.data for run in runs(client, "drawn")
    }
    for (arm, seed), data in found.items():
        assert json.loads(data.tags["ablate.knobs"]) == (
            {"recipe": "bf16"} if arm == "bf16" else {"rht": arm == "rht=true"}
        )
        assert data.tags.get("ablate.against") == (None if arm == "bf16" else "bf16")
        gaps = {key: value for key, value in data.metrics.items() if "_gap" in key}
        reference = found["bf16", seed].metrics["val/loss"]
        gap = data.metrics["val/loss"] - reference
        assert gaps == pytest.approx({"val/loss_gap": gap, "val/loss_gap_pct": 100 * gap / reference})
        assert arm != "bf16" or gap == 0


@pytest.mark.parametrize("late", ["bf16", "rht=true"])
def test_the_gap_is_said_by_whichever_of_the_two_is_drawn_last(late, client, store, tmp_path):
    name = f"late-{late.partition('=')[0]}"
    sweep(idle(tmp_path, name, seeds=1), tmp_path)
    book = Ledger(tmp_path / "sweeps" / name / "ledger.db")
    trials = {member.name: member.trial for member in book.members()}
    book.settle(trials[late], "pending")
    mirror = Mirror(store, book, tmp_path, tmp_path / "sweeps" / name, name, busy=True)
    until(lambda: mirror.refresh() is not None and sum(member.closed for member in book.members()) == 2)
    early = {run.data.tags["ablate.arm"] for run in runs(client, name) if "val/loss_gap" in run.data.metrics}
    assert early == (set() if late == "bf16" else {"bf16", "rht=false"})
    book.settle(trials[late], "done")
    assert mirror.finish("FINISHED", "", 60) is None
    book.close()
    compared = {run.data.tags["ablate.arm"]: histories(client, run) for run in runs(client, name)}
    points = {
        arm: [point for point in found if point[0] == "val/loss_gap"] for arm, found in compared.items()
    }
    assert {arm: len(found) for arm, found in points.items()} == {"bf16": 1, "rht=true": 1, "rht=false": 1}


def test_the_view_that_a_sweep_saves_names_columns_that_all_of_its_runs_have(client, drawn):
    experiment = client.get_experiment_by_name("drawn")
    saved = json.loads(experiment.tags["mlflow.sharedViewState.arms"])
    columns = json.loads(saved["state"])["selectedColumns"]
    assert columns == ["metrics.`val/loss`", "metrics.`val/loss_gap`"]
    for column in columns:
        kind, key = re.fullmatch(r"(\w+)\.`(.*)`", column).groups()
        assert all(key in getattr(run.data, kind) for run in runs(client, "drawn"))


@pytest.mark.parametrize("count", [20, 1000])
def test_a_sweep_of_any_number_of_arms_has_a_view_that_a_tag_can_hold(count):
    names = [f"recipe=nvfp4 rht=true lr=0.{number:04d}" for number in range(count)]
    arms = [ArmRow(number, name, "{}", None, None, 0, "arm", None, None) for number, name in enumerate(names)]
    saved = view(arms, ["val/loss"], True, 0)
    assert saved is not None
    assert len(saved) <= 5000
    groups = json.loads(json.loads(saved)["state"]).get("groupsExpanded")
    assert groups == ({f"param.arm.{name}": False for name in names} if count < 50 else None)


@pytest.mark.parametrize("main", ["watch/x", "watch/watch/x", "x", "val/loss@nvfp4"])
def test_no_two_metrics_have_one_key_in_mlflow(main):
    names = ("x", "watch/x", "watch/watch/x", "watch.x", "x_gap", "watch/x_gap", "val/loss.nvfp4")
    keys = [key(name, [main]) for name in dict.fromkeys([main, *names])]
    keys += [gap_key(main), f"{gap_key(main)}_pct"]
    assert None not in keys
    assert len({*keys}) == len(keys)


def test_a_report_is_attached_to_the_sweeps_run_and_named_once(client, drawn, store, tmp_path):
    (tmp_path / "figures").mkdir()
    (tmp_path / "index.html").write_text("<p>yes</p>")
    (tmp_path / "figures" / "gap.png").write_bytes(b"png")
    book = ledger(drawn, "drawn")
    for _ in range(2):
        log_report(store, book, tmp_path)
    book.close()
    (parent,) = runs(client, "drawn", "sweep")
    assert {item.path for item in client.list_artifacts(parent.info.run_id, "report")} == {
        "report/index.html",
        "report/figures",
    }
    note = parent.data.tags["mlflow.note.content"]
    assert note.count("/artifacts/report/index.html") == 1
    assert "**Does it matter?**" in note


def test_a_report_on_a_sweep_that_is_not_drawn_goes_nowhere(tmp_path):
    sweep(idle(tmp_path, seeds=1), tmp_path)
    book = ledger(tmp_path)
    log_report("http://127.0.0.1:9", book, tmp_path)
    book.close()


def test_every_run_has_the_same_few_metrics_with_the_main_one_and_its_gap_first(client, drawn):
    for run in runs(client, "drawn"):
        assert sorted(run.data.metrics) == sorted([*FEW, *in_folders(run)])
        assert next(iter(run.data.metrics)) == "val/loss"  # Compare's plot opens on the first that was sent


def test_values_of_a_new_run_wait_for_the_first_one_of_the_main_metric(client, store, tmp_path):
    sweep(tiny(tmp_path, "first-value", seeds=1), tmp_path)
    book = Ledger(tmp_path / "sweeps" / "first-value" / "ledger.db")
    (member,) = [member for member in book.members() if member.name == "bf16"]
    book.settle(member.trial, "running")
    of_metric = "trial = ? AND name = (SELECT name FROM names WHERE text = 'val/loss')"
    rows = book.db.execute(f"SELECT * FROM records WHERE {of_metric}", (member.trial,)).fetchall()
    book.db.execute(f"DELETE FROM records WHERE {of_metric}", (member.trial,))
    tracker = MlflowTracker(store, tmp_path, "first-value", "an id", threading.Event())

    def sent() -> list[str]:
        tracker.refresh(book)
        (run,) = [run for run in runs(client, "first-value") if run.data.tags["ablate.arm"] == "bf16"]
        return list(run.data.metrics)

    assert sent() == []
    book.db.executemany(f"INSERT INTO records VALUES ({', '.join('?' * len(rows[0]))})", map(tuple, rows))
    first, *others = sent()
    assert (first, "watch/train/loss" in others) == ("val/loss", True)
    book.close()


def test_pages_open_with_the_menu_of_runs():
    own = "workflowType=machine_learning"
    assert page("http://me:secret@host/", "7", "ab").endswith(f"host/#/experiments/7/runs/ab?{own}")
    assert page("http://host", "7").endswith(f"host/#/experiments/7/runs?{own}&viewStateShareKey=arms")


def test_a_forked_run_has_the_parts_of_its_damage_too(client, store, tmp_path):
    design = {"trunk": "bf16", "positions": [0.5], "window": 0.25}
    sweep(tiny(tmp_path, "forked", design=design, seeds=1), tmp_path, store)
    more = ["watch/damage/direct", "watch/damage/learnt"]
    for run in runs(client, "forked"):
        assert {*FEW, *more} <= {*run.data.metrics} <= {*FEW, *more, *in_folders(run)}
    assert len(FEW + more) <= 12
    for run in runs(client, "forked"):
        parts = [run.data.metrics[key] for key in more]
        assert sum(parts) == pytest.approx(run.data.metrics["val/loss_gap"], abs=1e-9)
    saved = json.loads(client.get_experiment_by_name("forked").tags["mlflow.sharedViewState.arms"])
    columns = json.loads(saved["state"])["selectedColumns"]
    assert columns[2:] == ["metrics.`watch/damage/learnt`", "metrics.`watch/damage/direct`"]


def test_tags_link_the_trial_and_the_point_in_the_study(client, drawn):
    book = ledger(drawn, "drawn")
    members = {f"{m.name} seed={m.seed}": m for m in book.members()}
    book.close()
    for run in runs(client, "drawn"):
        member, tags = members[run.info.run_name], run.data.tags
        assert member.mlflow == run.info.run_id
        assert (tags["ablate.trial"], tags["ablate.arm"], tags["ablate.status"]) == (
            member.id,
            member.name,
            "done",
        )
        assert tags.get("ablate.optuna_trial") == (None if member.optuna is None else str(member.optuna))
        assert tags["ablate.baseline"] == str(member.name == "bf16").lower()


def test_the_spec_and_the_result_are_artifacts(client, drawn, tmp_path):
    run = runs(client, "drawn")[0]
    for name in ("spec.json", "result.json"):
        path = client.download_artifacts(run.info.run_id, name, str(tmp_path))
        with open(path) as file:
            assert json.load(file) == json.loads(
                (drawn / "trials" / run.data.tags["ablate.trial"] / name).read_text()
            )


def test_what_a_trial_left_goes_with_every_run_of_it_and_with_no_other(client, store, tmp_path):
    """A sweep that was not drawn, its pictures, and a second one that adopts all its trials."""
    sweep(idle(tmp_path, "first", seeds=1), tmp_path)
    pictured = {path.name for path in (tmp_path / "trials").iterdir()} - {
        min(path.name for path in (tmp_path / "trials").iterdir())
    }
    for trial in pictured:
        (tmp_path / "trials" / trial / "artifacts").mkdir(exist_ok=True)
        (tmp_path / "trials" / trial / "artifacts" / "grid.png").write_text(trial)
        (tmp_path / "trials" / trial / "artifacts" / "link.txt").symlink_to("/etc/hostname")
    outcome, _ = sweep(idle(tmp_path, "adopting", seeds=1), tmp_path, store)
    assert outcome.ran == 0
    found = {}
    for run in runs(client, "adopting"):
        trial = run.data.tags["ablate.trial"]
        assert not [item.path for item in client.list_artifacts(run.info.run_id) if item.path == "link.txt"]
        if any(item.path == "grid.png" for item in client.list_artifacts(run.info.run_id)):
            with open(client.download_artifacts(run.info.run_id, "grid.png", str(tmp_path))) as file:
                found[trial] = file.read()
    assert found == {trial: trial for trial in pictured}


def test_the_study_links_the_runs(client, drawn):
    ids = {run.info.run_id: run for run in runs(client, "drawn")}
    for trial in trials(drawn, "drawn"):
        linked = [ids[run].info.run_name for run in trial.user_attrs["mlflow_runs"]]
        assert linked == [f"{trial.user_attrs['arm']} seed={seed}" for seed in (0, 1)]


def forget(folder, name: str, statement: str) -> None:
    with sqlite3.connect(folder / "sweeps" / name / "ledger.db") as db:
        db.execute(statement)
    db.close()


LOST = {
    "how far it was": "UPDATE members SET shipped = -1, closed = 0",
    "the runs": "UPDATE members SET shipped = -1, closed = 0, mlflow = NULL",
    "the parent": "DELETE FROM sweep WHERE key = 'mlflow_parent'",
}


@pytest.mark.parametrize("lost", LOST)
def test_what_a_dead_driver_could_not_note_is_not_drawn_twice(lost, client, store, tmp_path):
    name = f"twice-{len(lost)}"
    sweep(idle(tmp_path, name, seeds=1), tmp_path, store)
    before = {run.info.run_id: histories(client, run) for run in runs(client, name)}
    forget(tmp_path, name, LOST["the runs"])
    forget(tmp_path, name, LOST[lost])
    sweep(idle(tmp_path, name, seeds=1), tmp_path, store)
    assert {run.info.run_id: histories(client, run) for run in runs(client, name)} == before
    assert len(runs(client, name, "sweep")) == 1
    assert {run.info.status for kind in ("sweep", "trial") for run in runs(client, name, kind)} == {
        "FINISHED"
    }


def test_arms_that_wait_for_their_runs_cost_nothing_until_there_is_news_of_them(store, tmp_path):
    from ablate.execution.projections import Projections
    from ablate.execution.tracking.mlflow_tracker import Shipped

    arms = 30
    listed = {f"arm {n}": {"cooldown": n / 100} for n in range(arms)}
    experiment = tiny(tmp_path, "waiting", {"steps": 100}, ablate=None, arms=listed, seeds=1)
    folder = tmp_path / "sweeps" / "waiting"
    book = Ledger(folder / "ledger.db")
    specs = [
        (arm, experiment.spec(arm, 0, "cpu")) for arm in experiment.arms if arm.name not in experiment.added
    ]
    numbers = [book.add_arm(arm.name, arm.knobs, None, place) for place, (arm, _) in enumerate(specs)]
    trials = [
        book.add_member(number, 0, spec.id, spec.wire)
        for number, (_, spec) in zip(numbers, specs, strict=True)
    ]
    projections = Projections(
        experiment, book, tmp_path, folder, store, busy=True
    )  # its thread waits for a record, and draws nothing
    for trial in trials:
        book.settle(trial, "done")
        projections.settled(trial)
    projections.refresh()
    statements = []
    book.db.set_trace_callback(statements.append)
    projections.refresh()
    assert len(statements) < 5
    projections.mirror.tracker.news.put(Shipped(book.arm("arm 7"), 0, "a run", -1, False))
    projections.refresh()
    book.db.set_trace_callback(None)
    assert [number for number, state, *_ in outcomes(tmp_path, "waiting") if state != "RUNNING"] == [7]
    projections.finish("KILLED", 0.5)  # seconds for a thread that will not get done
    assert {state for _, state, *_ in outcomes(tmp_path, "waiting")} == {
        "FAIL"
    }  # nothing was recorded of them
    book.close()


def test_nothing_is_drawn_where_everything_is(client, drawn, store, monkeypatch):
    start, started = threading.Thread.start, []
    monkeypatch.setattr(
        threading.Thread, "start", lambda thread: started.append(thread.name) or start(thread)
    )
    outcome, _ = sweep(tiny(drawn, "drawn"), drawn, store)
    assert outcome.ran == 0
    assert "mlflow" not in started


def test_a_sweep_that_shares_trials_has_runs_of_its_own(client, drawn, store):
    sweep(tiny(drawn, "sharing", ablate={"rht": [True]}, seeds=1), drawn, store)
    shared = {run.data.tags["ablate.trial"]: run for run in runs(client, "sharing")}
    first = {run.data.tags["ablate.trial"]: run for run in runs(client, "drawn")}
    assert len(shared) == 2
    for trial, run in shared.items():
        assert histories(client, run) == histories(client, first[trial])
        assert run.data.tags["ablate.reused"] == "true"


def test_what_was_run_without_mlflow_is_drawn_later(client, store, tmp_path):
    sweep(idle(tmp_path, "later", seeds=1), tmp_path)
    outcome, _ = sweep(idle(tmp_path, "later", seeds=1), tmp_path, store)
    assert outcome.ran == 0
    assert len(runs(client, "later")) == 3
    assert all("val/loss" in run.data.metrics for run in runs(client, "later"))
    book = ledger(tmp_path, "later")
    took = {row["id"]: row["seconds"] for row in book.db.execute("SELECT id, seconds FROM trials")}
    book.close()
    lasted = {
        run.data.tags["ablate.trial"]: run.info.end_time - run.info.start_time
        for run in runs(client, "later")
    }
    assert lasted == {
        trial: int(1000 * seconds) for trial, seconds in took.items()
    }  # not what it took to draw them


def test_a_diverged_trial_is_finished_and_says_so(client, store, tmp_path):
    sweep(tiny(tmp_path, "wild", ablate=None, arms=WILD, seeds=1), tmp_path, store)
    (wild,) = [run for run in runs(client, "wild") if run.data.tags["ablate.arm"] == "wild"]
    assert (wild.info.status, wild.data.tags["ablate.status"]) == ("FINISHED", "diverged")
    assert wild.data.metrics["watch/nan/first_step"] >= 1


def test_an_interrupted_run_is_killed_and_then_goes_on(client, store, tmp_path):
    steps = Controller(
        tiny(tmp_path, "stopped", seeds=1, shape={"steps": 40}), tmp_path, "cpu", Inline, store
    ).run()
    for step in steps:
        if step.done == 1 and any(run.step > 4 for run in step.running):
            break
    steps.close()
    assert not [
        run
        for kind in ("sweep", "trial")
        for run in runs(client, "stopped", kind)
        if run.info.status == "RUNNING"
    ]
    assert [run.info.status for run in runs(client, "stopped", "sweep")] == ["KILLED"]
    sweep(tiny(tmp_path, "stopped", seeds=1, shape={"steps": 40}), tmp_path, store)
    assert [run.info.status for kind in ("sweep", "trial") for run in runs(client, "stopped", kind)] == [
        "FINISHED"
    ] * 4
    book = ledger(tmp_path, "stopped")
    losses = {
        m.name: {(s, v) for s, n, v, _ in book.records(m.trial) if n == "train/loss"} for m in book.members()
    }
    book.close()
    for run in runs(client, "stopped"):
        found = [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, "watch/train/loss")]
        assert len(found) == len(set(found))
        assert set(found) == losses[run.data.tags["ablate.arm"]]


@pytest.mark.slow
def test_a_failed_trial_is_failed_and_finished_once_it_succeeds(client, store, tmp_path):
    experiment = tiny(tmp_path, "failing", seeds=1, retry=0)
    (tmp_path / "train.bin").rename(tmp_path / "away")
    assert sweep(experiment, tmp_path, store, Children)[0].status == "failed"
    assert {run.info.status for run in runs(client, "failing")} == {"FAILED"}
    (tmp_path / "away").rename(tmp_path / "train.bin")
    assert sweep(experiment, tmp_path, store)[0].status == "done"
    assert {run.info.status for run in runs(client, "failing")} == {"FINISHED"}


@pytest.mark.slow
def test_a_dead_server_fails_nothing_and_the_right_one_gets_everything_later(client, store, tmp_path):
    outcome, news = sweep(idle(tmp_path, "dead", seeds=1), tmp_path, "http://127.0.0.1:9", grace=2.0)
    assert (outcome.status, outcome.ran) == ("done", 3)
    assert set(statuses(tmp_path, "dead").values()) == {"done"}
    assert re.match(r"MLflow \d+ records behind \(", news[-1])
    command = f"`ablate rebuild --sync --state {tmp_path}`"
    assert news[-1].endswith(f"): {command}, or the next run of this sweep, ships the rest")
    outcome, news = sweep(idle(tmp_path, "dead", seeds=1), tmp_path, store)
    assert (outcome.ran, news) == (0, [])
    assert [run.info.status for kind in ("sweep", "trial") for run in runs(client, "dead", kind)] == [
        "FINISHED"
    ] * 4
    assert all("val/loss" in run.data.metrics for run in runs(client, "dead"))


@pytest.mark.slow
def test_another_server_is_drawn_from_the_start(client, drawn, store, tmp_path):
    from mlflow import MlflowClient

    sweep(idle(tmp_path, "moved", seeds=1), tmp_path, store)
    other = f"sqlite:///{tmp_path / 'other.db'}"
    sweep(idle(tmp_path, "moved", seeds=1), tmp_path, other)
    there = {
        run.info.run_name: histories(MlflowClient(other), run) for run in runs(MlflowClient(other), "moved")
    }
    assert there == {run.info.run_name: histories(client, run) for run in runs(client, "moved")}
