"""MLflow's database written directly: the same rows as MLflow's own client writes, which is the oracle."""

import math
import sqlite3
from contextlib import closing, nullcontext
from pathlib import Path

import pytest

from ablate.execution.tracking import database
from ablate.execution.tracking.local_database import REVISIONS, LocalDatabase
from ablate.execution.tracking.writer import ClientWriter, Entries, Point, Writer

pytestmark = [
    pytest.mark.services,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]
TABLES = (
    "experiments",
    "experiment_tags",
    "runs",
    "tags",
    "params",
    "metrics",
    "latest_metrics",
    "datasets",
    "inputs",
    "input_tags",
)
TIMES = {"creation_time", "last_update_time", "start_time", "end_time", "deleted_time"}
"""Columns with times of this machine's clock."""
DATA = {
    "name": "corpus",
    "digest": "abc",
    "source_type": "local",
    "source": '{"uri": "x"}',
    "schema": "{}",
    "profile": '{"tokens": 5}',
}


@pytest.fixture
def folders(tmp_path) -> tuple[Path, Path]:
    """Two folders with an empty database of the installed MLflow each."""
    for name in ("direct", "client"):
        database.prepare(uri(tmp_path / name), tmp_path / name / "artifacts")
    return tmp_path / "direct", tmp_path / "client"


def uri(folder: Path) -> str:
    return f"sqlite:///{folder / 'mlflow.db'}"


def direct(folder: Path) -> LocalDatabase:
    found = LocalDatabase.open(uri(folder), own=True)
    assert found is not None
    return found


def rows(folder: Path, ids: dict[str, str]) -> dict[str, list[tuple]]:
    """Return all rows of the tables, with ids replaced by names, and times left out.

    A time of the clock counts as None or not None; `ids` gives a name for each id, and for the folder.
    """
    found = {}
    with closing(sqlite3.connect(folder / "mlflow.db")) as db:
        for table in TABLES:
            cursor = db.execute(f"SELECT * FROM {table}")
            columns = [column for column, *_ in cursor.description]
            found[table] = sorted(
                (
                    tuple(
                        (column, value is None if column in TIMES else plain(value, ids))
                        for column, value in zip(columns, row, strict=True)
                    )
                    for row in cursor
                ),
                key=repr,
            )
    return found


def plain(value: object, ids: dict[str, str]) -> object:
    for known, name in ids.items():
        value = value.replace(known, name) if isinstance(value, str) else value
    return value


def ids_in(folder: Path) -> dict[str, str]:
    """Return names for the random ids in a database: runs by name, datasets and inputs by what they link."""
    with closing(sqlite3.connect(folder / "mlflow.db")) as db:
        names = dict(db.execute("SELECT run_uuid, 'run ' || name FROM runs"))
        names |= dict(db.execute("SELECT dataset_uuid, 'data ' || digest FROM datasets"))
        names |= dict(
            db.execute(
                "SELECT input_uuid, 'input ' || name FROM inputs JOIN runs ON run_uuid = destination_id"
            )
        )
    return names | {str(folder): "FOLDER"}


def write(tracker: Writer, folder: Path, together: bool) -> None:
    """Do every operation of the projection, with the values and repetitions that are easy to get wrong.

    Args:
        tracker: the way into MLflow.
        folder: folder of the artifacts.
        together: group the writes of a run in one batch.
    """
    number = tracker.experiment("sweep", (folder / "artifacts" / "sweep").as_uri(), {"kind": "a b"})
    assert tracker.experiment("sweep", None, {}) == number  # it is there: nothing is created
    parent = tracker.create(number, "sweep", {"ablate.sweep_id": "7", "mlflow.note.content": "Why? ünï"})
    tracker.experiment_tag(number, "view", "old")
    tracker.experiment_tag(number, "view", "new")
    tracker.text(parent.id, "tëxt", "sweep.json")
    tags = {"mlflow.parentRunId": parent.id, "ablate.member": "1/0", "ablate.trial": "t1", "long": "x" * 9000}
    with tracker.batch() if together else nullcontext():
        run = tracker.create(number, "rht=true seed=0", tags)
        tracker.dataset(run.id, DATA)
        params = [("ablate.rht", "true"), ("workload.lr", "0.1"), ("long", "y" * 7000), ("empty", "")]
        params += [(f"recipe.p{index}", str(index)) for index in range(130)]
        tracker.log(run.id, Entries([Point("val/loss", 3.5, 1000, 1)], params))
    points = [
        Point("val/loss", 3.25, 2000, 2),
        Point("val/loss", math.nan, 3000, 3),
        Point("up", math.inf, 3000, 3),
        Point("down", -math.inf, 3000, 3),
        Point("zero", -0.0, 3000, 3),
        Point("late", 1.0, 5000, 9),
        Point("late", 2.0, 4000, 8),  # an earlier step is not the latest value
        Point("twice", 1.0, 4000, 8),
        Point("twice", 2.0, 4000, 8),  # the larger value of one step and time is
        Point("twice", 1.5, 4000, 8),
    ]
    tracker.log(run.id, Entries(points, params[:90], {"ablate.status": "running", "cut": "z" * 9000}))
    tracker.log(run.id, Entries([*points, Point("val/loss", 3.125, 2500, 2)], tags={"ablate.status": "done"}))
    tracker.dataset(run.id, DATA)
    tracker.dataset(run.id, DATA | {"digest": "def"})
    other = tracker.create(number, "rht=false seed=0", tags | {"ablate.trial": "t2"})
    tracker.dataset(other.id, DATA)
    tracker.end(other.id, "KILLED")
    tracker.resume(other.id)
    tracker.end(run.id, "FINISHED", run.start_ms + 1234)
    tracker.files(run, [folder / "spec.json"])
    for _ in range(2):
        tracker.tree(run, folder / "report", "report")
    assert (tracker.note(parent.id), tracker.note(run.id)) == ("Why? ünï", "")
    gone = tracker.create(number, "gone", tags | {"ablate.trial": "t3"})
    tracker.discard(number, parent.id, "t3", "1/0", gone.start_ms + 1)
    assert [tracker.has(one) for one in (run.id, gone.id, "0" * 32)] == [True, False, False]
    assert tracker.tagged(number, "ablate.sweep_id", "7") == parent.id
    assert tracker.tagged(number, "ablate.sweep_id", "8") is None
    children = {
        child.run: (child.member, child.trial)
        for page in tracker.children(number, parent.id)
        for child in page
    }
    assert children == {run.id: ("1/0", "t1"), other.id: ("1/0", "t2")}
    assert tracker.run(run.id) == run
    for refused in ([("workload.lr", "0.2")], [("a//b", "")], [("k" * 251, "")], [("a,b", "")]):
        with pytest.raises(Exception, match=r"[Pp]aram|name"):
            tracker.log(run.id, Entries(params=refused))
    with pytest.raises(Exception, match=r"deleted|active"):
        tracker.log(gone.id, Entries([Point("val/loss", 1.0, 1, 1)]))
    tracker.end(parent.id, "FINISHED")


@pytest.mark.parametrize("together", [True, False])
def test_the_rows_are_those_of_mlflows_client(folders, together):
    found = []
    for folder, tracker in zip(folders, (direct(folders[0]), ClientWriter(uri(folders[1]))), strict=True):
        (folder / "spec.json").write_text('{"a": 1}')
        (folder / "report" / "figures").mkdir(parents=True)
        (folder / "report" / "figures" / "gap.svg").write_text("<svg/>")
        write(tracker, folder, together)
        ids = ids_in(folder)
        files = {
            plain(str(path), ids): path.read_bytes()
            for path in (folder / "artifacts").rglob("*")
            if path.is_file()
        }
        found.append((rows(folder, ids), files))
    for table in TABLES:
        assert found[0][0][table] == found[1][0][table], table
        assert found[0][0][table] != []
    assert found[0][1] == found[1][1]
    assert len(found[0][1]) == 3


def test_the_installed_mlflow_makes_tables_of_a_known_revision(folders):
    with closing(sqlite3.connect(folders[0] / "mlflow.db")) as db:
        assert database.revision(db) in REVISIONS


def write_half(tracker: LocalDatabase, number: str) -> None:
    with tracker.batch():
        run = tracker.create(number, "one", {})
        tracker.log(run.id, Entries([Point("val/loss", 1.0, 1, 1)]))
        tracker.end("0" * 32, "FINISHED")


def test_a_batch_that_fails_leaves_nothing(folders):
    tracker = direct(folders[0])
    number = tracker.experiment("sweep", (folders[0] / "artifacts").as_uri(), {})
    before = rows(folders[0], {})
    with pytest.raises(LookupError):
        write_half(tracker, number)
    assert rows(folders[0], {}) == before


def test_other_revisions_other_files_and_servers_are_left_to_mlflow(folders, tmp_path):
    with closing(sqlite3.connect(folders[0] / "mlflow.db")) as db, db:
        db.execute("UPDATE alembic_version SET version_num = 'another'")
    (tmp_path / "text.db").write_text("no database, but a long enough text to look like a page of one" * 20)
    (tmp_path / "empty.db").touch()
    addresses = [uri(folders[0]), "http://127.0.0.1:9", "postgresql://localhost/mlflow"]
    addresses += [f"sqlite:///{tmp_path / name}.db" for name in ("text", "empty", "missing")]
    assert [LocalDatabase.open(address, own=False) for address in addresses] == [None] * 6


def test_a_file_that_was_deleted_or_replaced_is_not_written(folders):
    tracker = direct(folders[0])
    (folders[1] / "mlflow.db").replace(folders[0] / "mlflow.db")
    with pytest.raises(FileNotFoundError), tracker.batch():
        pass
    (folders[0] / "mlflow.db").unlink()
    with pytest.raises(FileNotFoundError), tracker.batch():
        pass


def test_artifacts_follow_a_state_folder_that_was_moved(folders, tmp_path):
    before, after = folders[0], tmp_path / "moved"
    with closing(direct(before)) as db:
        runs = []
        for name in ("first", "second one"):
            experiment = db.experiment(name, (before / "artifacts" / name).as_uri(), {})
            runs.append(db.create(experiment, "run", {}))
    before.rename(after)
    with closing(direct(after)) as db:
        db.experiment("second one", (after / "artifacts" / "second one").as_uri(), {})
        for run in runs:
            assert db.run(run.id).artifacts == run.artifacts.replace("/direct/", "/moved/")
            db.text(run.id, "text", "note.txt")
    assert (len([*after.glob("artifacts/*/*/artifacts/note.txt")]), before.exists()) == (2, False)
