"""MLflow's own database: a driver killed while it is made, databases that such kills left, and what is never put aside."""

import os
import signal
import sqlite3
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest
from support.commands import here
from support.experiments import environment, sweep, tiny, until
from support.mlflow_runs import histories, runs

from ablate.execution.projections import Mirror
from ablate.execution.tracking import database
from ablate.execution.tracking.mlflow_tracker import MlflowTracker
from ablate.store.databases import path_of, url
from ablate.store.ledger import Ledger

pytestmark = [
    pytest.mark.services,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]

MOUNTS = Path("/proc/self/mounts")
IDLE = {"workload": {"idle": {"steps": 4}}, "seeds": 1}
DRIVER = """
import sys; from pathlib import Path
from support.experiments import sweep, tiny
folder = Path(sys.argv[1])
sweep(tiny(folder, workload={"idle": {"steps": 4}}, seeds=1), folder, sys.argv[2])
"""


def tables(path: Path) -> set[str]:
    """The tables of a database; none while there is no database."""
    with suppress(sqlite3.Error), closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as db:
        return {name for (name,) in db.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
    return set()


def statuses(path: Path) -> list[str]:
    """The statuses of all runs in a database of MLflow's."""
    with closing(sqlite3.connect(path)) as db:
        return sorted(status for (status,) in db.execute("SELECT status FROM runs"))


def half(path: Path) -> Path:
    """The database that a kill within the first migration leaves: MLflow's first tables, without a row, and copies of them on their way."""
    from mlflow.store.tracking.dbmodels.initial_models import Base
    from sqlalchemy import create_engine

    engine = create_engine(url(path))
    Base.metadata.create_all(engine)
    engine.dispose()
    with closing(sqlite3.connect(path)) as db:
        for table in tables(path) | {"latest_metrics"}:
            db.execute(f"CREATE TABLE _alembic_tmp_{table} (x)")
        db.execute("CREATE TABLE alembic_version (version_num VARCHAR(32) NOT NULL)")
    return path


def copying(folder: Path) -> bool:
    """Return True while a migration copies a table of a database below the folder."""
    return any(
        table.startswith("_alembic_tmp_") for path in folder.rglob("mlflow.db") for table in tables(path)
    )


def test_a_driver_killed_while_mlflow_migrates_its_database_leaves_a_folder_that_works(tmp_path):
    store = tmp_path / "mlflow.db"
    paths = [*sys.path, str(Path(__file__).parents[1])]
    command = [sys.executable, "-c", DRIVER, str(tmp_path), url(store)]
    own = environment(PYTHONPATH=os.pathsep.join(paths), ABLATE_CACHE=str(tmp_path / "cache"))
    child = subprocess.Popen(command, env=own, start_new_session=True)
    try:
        while True:
            until(lambda: copying(tmp_path) or child.poll() is not None, 60, every=0.001)
            os.killpg(child.pid, signal.SIGSTOP)  # a copy takes a millisecond: look again while nothing moves
            if copying(tmp_path):
                break
            os.killpg(child.pid, signal.SIGCONT)
    finally:
        with suppress(ProcessLookupError):
            os.killpg(child.pid, signal.SIGKILL)
        assert child.wait(30) == -signal.SIGKILL
    assert subprocess.run(command, env=own, check=False).returncode == 0
    done = here(
        "rebuild", "--sync", "--state", tmp_path, "--mlflow", url(store)
    )  # a sweep waits 30 s for MLflow, which a busy machine exceeds
    assert done.returncode == 0, done.stdout + done.stderr
    assert statuses(store) == ["FINISHED"] * 4  # of 3 arms and the sweep
    assert not list(tmp_path.glob(".mlflow-*"))


def content(path: Path) -> list[list[str]]:
    """The tables, indices and rows of a database, without moments, whatever their order: that of a table's constraints varies."""
    with closing(sqlite3.connect(path)) as db:
        db.execute("UPDATE experiments SET creation_time = 0, last_update_time = 0")
        return sorted(sorted(line.strip("\t, ") for line in lines.splitlines()) for lines in db.iterdump())


def test_a_database_that_is_copied_holds_what_mlflow_makes_and_is_used_by_it(tmp_path, cache):
    database.migrate(tmp_path / "own.db", tmp_path / "artifacts")
    for name in ("first", "second"):
        database.prepare(url(tmp_path / name / "mlflow.db"), tmp_path / "artifacts")
    assert len(list((cache / "mlflow").glob("*/mlflow.db"))) == 1
    assert content(tmp_path / "second" / "mlflow.db") == content(tmp_path / "own.db")
    assert database.unusable(tmp_path / "first" / "mlflow.db") is None


def test_where_nothing_can_be_cached_and_where_the_copy_is_damaged_mlflow_makes_the_database(
    tmp_path, cache, monkeypatch
):
    database.prepare(url(tmp_path / "a" / "mlflow.db"), tmp_path)
    (empty,) = (cache / "mlflow").glob("*/mlflow.db")
    empty.write_bytes(b"SQLite format 3" + b"?" * 4000)
    database.prepare(url(tmp_path / "b" / "mlflow.db"), tmp_path)
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ABLATE_CACHE", str(tmp_path / "file" / "below"))
    database.prepare(url(tmp_path / "c" / "mlflow.db"), tmp_path)
    whole = content(tmp_path / "a" / "mlflow.db")
    assert content(tmp_path / "b" / "mlflow.db") == whole
    assert content(tmp_path / "c" / "mlflow.db") == whole


def test_a_half_made_database_that_an_earlier_version_left_is_put_aside_and_made_again(tmp_path):
    from sqlalchemy.exc import OperationalError

    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    store = half(tmp_path / "mlflow.db")
    with pytest.raises(OperationalError, match="_alembic_tmp_"):
        database.migrate(store, tmp_path)
    assert database.half_made(store)
    sweep(tiny(tmp_path, **IDLE), tmp_path)
    assert database.unusable(store) == "its first migration was interrupted"
    done = here("rebuild", "--sync", "--force", "--state", tmp_path)
    assert done.returncode == 0, done.stderr
    assert statuses(store) == ["FINISHED"] * 4
    (kept,) = tmp_path.glob("mlflow.db.damaged-*")
    assert "alembic_version" in tables(kept)
    assert not database.half_made(store)
    assert database.unusable(store) is None


def test_a_rebuild_puts_aside_a_database_that_mlflow_cannot_open_and_a_sync_does_not(tmp_path):
    store = tmp_path / "mlflow.db"
    sweep(tiny(tmp_path, **IDLE), tmp_path, url(store))
    with closing(sqlite3.connect(store)) as db:
        db.execute("UPDATE alembic_version SET version_num = 'of_a_later_version'")
        db.commit()
    assert not database.half_made(store)
    assert database.prepare(url(store), tmp_path) is None  # it holds runs
    assert not list(tmp_path.glob("mlflow.db.damaged-*"))
    done = here("rebuild", "--sync", "--force", "--state", tmp_path)
    assert done.returncode == 0, done.stderr
    assert len(list(tmp_path.glob("mlflow.db.damaged-*"))) == 1
    assert statuses(store) == ["FINISHED"] * 4


def test_a_database_that_is_replaced_while_a_sweep_is_drawn_gets_everything(tmp_path):
    from mlflow import MlflowClient

    store, spare = tmp_path / "shared.db", tmp_path / "spare.db"
    sweep(tiny(tmp_path, **IDLE), tmp_path)
    for path in (store, spare):
        database.prepare(url(path), tmp_path)
    with closing(sqlite3.connect(store)) as db:
        db.execute("PRAGMA journal_mode = WAL")  # in other modes SQLite itself refuses a file that was moved
    with closing(Ledger(tmp_path / "sweeps" / "tiny" / "ledger.db")) as book:
        trials = {member.name: member.trial for member in book.members()}
        book.settle(trials["bf16"], "pending")
        mirror = Mirror(url(store), book, tmp_path, tmp_path / "sweeps" / "tiny", "tiny", busy=True)
        mirror.tracker.retry = 0.1
        until(lambda: mirror.refresh() is not None and sum(m.closed for m in book.members()) == 2)
        for suffix in ("-wal", "-shm"):  # else SQLite applies the old file's log to the new one
            store.with_name(store.name + suffix).unlink(missing_ok=True)
        spare.replace(store)
        book.settle(trials["bf16"], "done")
        assert mirror.finish("FINISHED", "", 60) is None
        drawn = {member.mlflow for member in book.members()}
    assert statuses(store) == ["FINISHED"] * 4
    client = MlflowClient(url(store))
    assert {run.info.run_id for run in runs(client, "tiny")} == drawn


def test_a_run_that_is_deleted_in_its_pages_is_made_again_and_holds_up_no_other(tmp_path):
    from mlflow import MlflowClient

    store = tmp_path / "mlflow.db"
    sweep(tiny(tmp_path, **IDLE), tmp_path)
    with closing(Ledger(tmp_path / "sweeps" / "tiny" / "ledger.db")) as book:
        for member in book.members():
            book.settle(member.trial, "running")
        mirror = Mirror(url(store), book, tmp_path, tmp_path / "sweeps" / "tiny", "tiny", busy=True)
        mirror.tracker.retry = 0.1
        until(lambda: mirror.refresh() is not None and all(member.mlflow for member in book.members()))
        first, *_ = book.members()
        client = MlflowClient(url(store))
        client.delete_run(first.mlflow)
        for member in book.members():
            book.settle(member.trial, "done")
        assert mirror.finish("FINISHED", "", 60) is None
        drawn = {member.mlflow for member in book.members()}
        wanted = book.series(first.trial, "val/loss")
    shown = runs(client, "tiny")
    assert {run.info.run_id for run in shown} == drawn
    assert {run.info.status for run in shown} == {"FINISHED"}
    (again,) = [run for run in shown if run.data.tags["ablate.member"] == first.key]
    assert again.data.params["arm"] == first.name
    history = client.get_metric_history(again.info.run_id, "val/loss")
    assert {point.step: point.value for point in history} == wanted


PARENTS = {
    "the parent": lambda parent, children: [parent],
    "the parent and one child": lambda parent, children: [parent, children[0]],
    "everything": lambda parent, children: [parent, *children],
}
"""Runs that a user deletes in MLflow's pages, of a parent and its child runs."""


@pytest.mark.parametrize("last", ["done", "running"])
@pytest.mark.parametrize("deleted", PARENTS)
def test_child_runs_of_a_deleted_parent_belong_to_its_successor(deleted, last, tmp_path):
    """Delete runs while a sweep is drawn, twice, and close it as done or as interrupted."""
    from mlflow import MlflowClient

    store = tmp_path / "mlflow.db"
    sweep(tiny(tmp_path, **IDLE), tmp_path)
    gone = set()
    with closing(Ledger(tmp_path / "sweeps" / "tiny" / "ledger.db")) as book:
        for member in book.members():
            book.settle(member.trial, "running")
        for _ in range(2):
            mirror = Mirror(url(store), book, tmp_path, tmp_path / "sweeps" / "tiny", "tiny", busy=True)
            mirror.tracker.retry = 0.1
            until(
                lambda mirror=mirror: mirror.refresh() is not None and all(m.mlflow for m in book.members())
            )
            client = MlflowClient(url(store))
            (parent,) = runs(client, "tiny", "sweep")
            before = {run.info.run_id for run in runs(client, "tiny")}
            for run in PARENTS[deleted](parent.info.run_id, sorted(before)):
                client.delete_run(run)
                gone.add(run)
            first, *others = book.members()
            for member in others:
                book.settle(member.trial, "done")
            book.settle(first.trial, last)
            assert mirror.finish("KILLED" if last == "running" else "FINISHED", "note", 60) is None
            (successor,) = runs(client, "tiny", "sweep")
            children = runs(client, "tiny")
            assert {run.data.tags["mlflow.parentRunId"] for run in children} == {successor.info.run_id}
            assert {run.info.run_id for run in children} >= before - gone
            assert {run.info.run_id for run in children} == {member.mlflow for member in book.members()}
            assert book.facts.mlflow_parent == successor.info.run_id
            final = {run.data.tags["ablate.member"]: run.info.status for run in children}
            assert final.pop(first.key) == ("KILLED" if last == "running" else "FINISHED")
            assert set(final.values()) == {"FINISHED"}
            assert successor.data.tags["mlflow.note.content"] == "note"
            for run in children:
                assert set(histories(client, run).values()) == {1}
                history = client.get_metric_history(run.info.run_id, "val/loss")
                (member,) = [m for m in book.members() if m.key == run.data.tags["ablate.member"]]
                assert {point.step: point.value for point in history} == book.series(member.trial, "val/loss")
            for member in book.members():
                book.settle(member.trial, "running")


def test_a_database_that_moved_to_a_network_file_system_is_converted_before_mlflow_opens_it(
    tmp_path, monkeypatch
):
    store = tmp_path / "mlflow.db"
    sweep(tiny(tmp_path, **IDLE), tmp_path)
    database.prepare(url(store), tmp_path)
    with closing(sqlite3.connect(store)) as db:
        db.execute("PRAGMA journal_mode = WAL")
    read_text = Path.read_text
    monkeypatch.setattr(
        Path,
        "read_text",
        lambda path, **how: f"there {tmp_path} nfs4 rw 0 0\n" if path == MOUNTS else read_text(path, **how),
    )
    with closing(Ledger(tmp_path / "sweeps" / "tiny" / "ledger.db", readonly=True)) as book:
        MlflowTracker(url(store), tmp_path, "tiny", "id", threading.Event()).refresh(book)
    assert store.read_bytes()[18:20] == b"\x01\x01"  # the file's format: a rollback journal
    assert len(statuses(store)) == 4


def test_artifacts_follow_a_state_folder_that_was_moved(tmp_path):
    from mlflow import MlflowClient

    before, after = tmp_path / "before", tmp_path / "after"
    sweep(tiny(tmp_path, **IDLE), before, url(before / "mlflow.db"))
    ran = {run.data.tags["ablate.member"] for run in runs(MlflowClient(url(before / "mlflow.db")), "tiny")}
    before.rename(after)
    for _ in range(2):
        done = here("rebuild", "tiny", "--sync", "--state", after)
        assert done.returncode == 0, done.stdout + done.stderr
    client = MlflowClient(url(after / "mlflow.db"))
    drawn = runs(client, "tiny")
    assert {run.data.tags["ablate.member"] for run in drawn} == ran
    assert len(drawn) == len(ran)
    for run in (*drawn, *runs(client, "tiny", "sweep")):
        assert run.info.artifact_uri.startswith((after / "artifacts" / "tiny").as_uri())
        assert client.list_artifacts(run.info.run_id) != []
    assert len(client.search_experiments()) == 2  # MLflow's own first one, too
    assert not before.exists()


def test_a_database_of_something_else_is_never_put_aside(tmp_path):
    path = tmp_path / "other.db"
    with closing(sqlite3.connect(path)) as db:
        db.execute("CREATE TABLE customers (name)")
    assert not database.half_made(path)
    assert not database.half_made(tmp_path / "none.db")
    assert path_of(url(path)) == path
