"""A sweep read back from MLflow: the same arms, members and answer, or one sentence that says why not."""

import contextlib
import json
import re
import sqlite3

import pytest
from support.experiments import WILD, ledger, sweep, tiny

from ablate.errors import InputError
from ablate.execution.tracking import fetch, shown
from ablate.results.contrasts import contrasts
from ablate.results.summary import summaries
from ablate.store.ledger import Ledger

pytestmark = [
    pytest.mark.services,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

SEARCH = {
    "search": {"sampler": "random", "trials": 3},
    "ablate": {"cooldown": {"uniform": [0.25, 0.5]}, "rht": [True, False]},
}
SWEEPS = {"grid": {}, "search": SEARCH, "wild": {"ablate": None, "arms": WILD}}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A state folder with a sweep of each kind, drawn in the MLflow store in it; leave it as it is."""
    folder = tmp_path_factory.mktemp("fetched")
    for name, keys in SWEEPS.items():
        sweep(tiny(folder, name, **keys), folder, f"sqlite:///{folder / 'mlflow.db'}")
    return folder


@pytest.fixture(scope="module")
def store(folder) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


@pytest.mark.parametrize("name", SWEEPS)
def test_what_is_read_back_answers_as_the_ledger_does(name, folder, store, tmp_path):
    original, found = ledger(folder, name), fetch(store, name, tmp_path / name / "ledger.db")
    assert found.name == name
    assert found.facts.metric == original.facts.metric
    assert repr(summaries(found)) == repr(summaries(original))  # a NaN is like no other, but reads alike
    assert repr(contrasts(summaries(found), found.facts.metric)) == repr(
        contrasts(summaries(original), original.facts.metric)
    )
    assert [(a.name, json.loads(a.knobs), a.optuna) for a in found.arms()] == [
        (a.name, json.loads(a.knobs), a.optuna) for a in original.arms()
    ]
    for ours, theirs in zip(found.members(), original.members(), strict=True):
        assert (ours.id, ours.status, json.loads(ours.spec)) == (
            theirs.id,
            theirs.status,
            json.loads(theirs.spec),
        )
    original.close()
    found.close()


def test_every_record_that_mlflow_was_shown_comes_back(folder, store, tmp_path):
    original, found = ledger(folder, "grid"), fetch(store, "grid", tmp_path / "ledger.db")
    for ours, theirs in zip(found.members(), original.members(), strict=True):
        expected = {
            (step, name, value)
            for step, name, value, _ in original.records(theirs.trial)
            if shown(name, ["val/loss"])
        }
        assert {(step, name, value) for step, name, value, _ in found.records(ours.trial)} == expected
        assert len(expected) > 20
    original.close()
    found.close()


def test_a_sweep_that_is_under_way_has_what_was_wanted_since_it_began(store, tmp_path):
    from mlflow import MlflowClient

    client = MlflowClient(store)
    experiment = client.get_experiment_by_name("grid").experiment_id
    (parent,) = client.search_runs([experiment], "tags.`ablate.kind` = 'sweep'")
    described = client.download_artifacts(parent.info.run_id, "sweep.json", str(tmp_path))
    with open(described) as file:
        whole = file.read()
    try:
        client.log_text(
            parent.info.run_id,
            json.dumps(json.loads(whole) | {"arms": json.loads(whole)["arms"][:1]}),
            "sweep.json",
        )
        client.update_run(parent.info.run_id, status="RUNNING")
        found = fetch(store, "grid", tmp_path / "ledger.db")
        assert {arm.name: (arm.baseline, len(arm.values)) for arm in summaries(found)} == {
            "bf16": (None, 2),
            "rht=true": ("bf16", 2),
            "rht=false": ("bf16", 2),
        }
        found.close()
    finally:
        client.log_text(parent.info.run_id, whole, "sweep.json")
        client.update_run(parent.info.run_id, status="FINISHED")


def test_a_shared_trial_that_one_run_has_as_done_is_done_and_the_latest_run_of_a_member_counts(
    store, tmp_path
):
    """As after a controller that died between two sends, and after a file that was edited and edited back."""
    from mlflow import MlflowClient

    client = MlflowClient(uri := copy(store, tmp_path / "copy.db"))
    experiment = client.get_experiment_by_name("grid").experiment_id
    runs = {run.data.tags["ablate.kind"]: run for run in client.search_runs([experiment])}
    tags, parent = runs["trial"].data.tags, runs["sweep"].info.run_id
    client.update_run(parent, status="RUNNING")
    other = {"ablate.trial": "other", "ablate.status": "running"}
    for changed in ({"ablate.arm": "twin", "ablate.status": "running"}, other, {}):
        client.create_run(experiment, tags=tags | changed)
    found = fetch(uri, "grid", tmp_path / "ledger.db")
    members = {(m.name, m.seed): (m.id, m.status) for m in found.members()}
    expected = (tags["ablate.trial"], "done")
    assert [members[name, int(tags["ablate.seed"])] for name in (tags["ablate.arm"], "twin")] == [
        expected
    ] * 2
    found.close()


# What cannot be read


def refused(uri: str, name: str, path) -> str:
    with pytest.raises(InputError) as told:
        fetch(uri, name, path / "ledger.db")
    assert list(path.glob("ledger.db*")) == []
    (sentence,) = told.value.problems
    assert "\n" not in str(sentence)
    return str(sentence)


def test_an_unknown_experiment_is_told_with_the_nearest(store, tmp_path):
    assert re.search(r"no experiment 'grib'; 'grid' is the nearest", refused(store, "grib", tmp_path))


def test_an_experiment_that_is_no_sweep_is_told(store, tmp_path):
    assert "Default is no sweep" in refused(store, "Default", tmp_path)


def test_a_store_that_is_not_there_is_not_made(tmp_path):
    assert (
        refused(f"sqlite:///{tmp_path / 'none.db'}", "grid", tmp_path)
        == f"{tmp_path / 'none.db'}: no such file"
    )
    assert not (tmp_path / "none.db").exists()


def test_a_server_that_does_not_answer_is_told_without_its_password(tmp_path):
    told = refused("http://me:secret@127.0.0.1:9", "grid", tmp_path)
    assert "MLflow cannot be used there" in told
    assert "secret" not in told


def copy(store: str, path) -> str:
    with (
        contextlib.closing(sqlite3.connect(store.removeprefix("sqlite:///"))) as old,
        contextlib.closing(sqlite3.connect(path)) as new,
    ):
        old.backup(new)
    return f"sqlite:///{path}"


def test_a_store_of_an_older_mlflow_is_told_with_what_brings_it_up_to_date(store, tmp_path):
    old = copy(store, tmp_path / "old.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "old.db")) as db, db:
        db.execute("UPDATE alembic_version SET version_num = '1b5f0d9ad7c1'")
    told = refused(old, "grid", tmp_path)
    assert "out-of-date database schema" in told
    assert "db upgrade" in told


def test_a_locked_store_is_told(store, tmp_path, monkeypatch):
    monkeypatch.setattr("ablate.execution.tracking.reader.LOOK_SECONDS", 0.2)
    locked = copy(store, tmp_path / "locked.db")
    with contextlib.closing(sqlite3.connect(tmp_path / "locked.db", isolation_level=None)) as db:
        db.execute("PRAGMA journal_mode = DELETE")  # or readers would not wait for writers
        db.execute("BEGIN EXCLUSIVE")
        assert (
            refused(locked, "grid", tmp_path)
            == f"{tmp_path / 'locked.db'}: cannot be read: database is locked"
        )


@pytest.mark.parametrize("content", [b"not a database at all, and long enough to be sure of it" * 20, b""])
def test_a_file_that_is_no_store_is_told(content, tmp_path):
    (tmp_path / "strange.db").write_bytes(content)
    assert re.search(
        "cannot be read: file is not a database|is no database of MLflow's",
        refused(f"sqlite:///{tmp_path}/strange.db", "x", tmp_path),
    )


def test_a_ledger_that_is_there_is_not_touched(store, tmp_path):
    Ledger(tmp_path / "ledger.db").close()
    with pytest.raises(InputError, match="is there already"):
        fetch(store, "grid", tmp_path / "ledger.db")
