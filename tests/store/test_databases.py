"""Addresses of databases, and journal modes: paths with every character that an address treats as its own, made-up tables of mounts."""

import fcntl
import os
import signal
import sqlite3
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest
from support.experiments import ledger, problems, statuses, sweep, tiny, write

from ablate.cli.settings import find_settings
from ablate.errors import InputError
from ablate.execution.sweep_control import damage
from ablate.store import databases
from ablate.store.ledger import Ledger
from ablate.store.records import frame

AWKWARD = ("a?b", "a#b", "a%b", "a%20b", "a b&c=d;e", "ü?mode=memory#%3F")
LOCAL = "/dev/vda / ext4 rw 0 0\n"


@pytest.mark.parametrize("name", AWKWARD)
def test_an_address_of_a_database_leads_to_its_path(name, tmp_path):
    from sqlalchemy import create_engine, make_url, text

    path = tmp_path / name / "x.db"
    path.parent.mkdir()
    address = databases.url(path)
    assert databases.path_of(address) == path
    assert make_url(address).database == str(path)
    engine = create_engine(address)
    with engine.begin() as connection:
        connection.execute(text("CREATE TABLE t (a)"))
    engine.dispose()
    with closing(databases.open_readonly(path)) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("t",)]
    assert [found.relative_to(tmp_path) for found in tmp_path.rglob("*") if found.is_file()] == [
        Path(name) / "x.db"
    ]


def test_a_database_in_a_folder_whose_name_is_in_no_encoding_is_read(tmp_path):
    path = tmp_path / "a\udcff" / "x.db"
    path.parent.mkdir()
    sqlite3.connect(path).close()
    path.touch()
    with closing(databases.open_readonly(path)) as db:
        assert databases.tables(db) == set()


class Vanishing(type(Path())):
    """A journal that its writer removes between a look at it and the next."""

    def exists(self) -> bool:
        return True

    def stat(self, **keys):
        raise FileNotFoundError(self)


class BesideVanishing(type(Path())):
    """A database whose journal vanishes."""

    def with_name(self, name):
        return Vanishing(super().with_name(name))


def test_a_journal_that_vanishes_while_a_database_is_opened_is_no_error(tmp_path):
    with closing(sqlite3.connect(tmp_path / "x.db")) as db:
        db.execute("CREATE TABLE t (a)")
    with closing(databases.open_readonly(BesideVanishing(tmp_path / "x.db"))) as db:
        assert db.execute("SELECT name FROM sqlite_master").fetchall() == [("t",)]


def test_addresses_without_special_characters_are_written_as_they_are(tmp_path):
    assert databases.url(tmp_path / "mlflow.db") == f"sqlite:///{tmp_path / 'mlflow.db'}"
    assert databases.path_of("postgresql://me@db/mlflow") is databases.path_of(None) is None
    assert databases.path_of("sqlite:////x/y.db?timeout=3") == Path("/x/y.db")


@pytest.mark.parametrize("name", AWKWARD)
def test_a_ledger_in_an_awkward_folder_is_read_by_every_reader(name, tmp_path):
    state = tmp_path / name
    sweep(tiny(tmp_path, "a?b#c%d", workload={"idle": {"steps": 4}}, seeds=1), state)
    book = ledger(state, "a?b#c%d")
    assert len(frame(book)) == len(book.members()) * sum(1 for _ in book.records(book.members()[0].trial)) > 0
    book.close()
    assert damage(state / "sweeps" / "a?b#c%d" / "ledger.db") is None
    assert set(statuses(state, "a?b#c%d").values()) == {"done"}
    assert {path.name for path in tmp_path.iterdir()} == {name, "a?b#c%d.yaml", "train.bin", "val.bin"}


@pytest.mark.services
@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning")
def test_mlflows_database_and_artifacts_stay_in_an_awkward_state_folder(tmp_path):
    state = tmp_path / "a?b#c%20d"
    outcome, news = sweep(
        tiny(tmp_path, "e?f#g%h", workload={"idle": {"steps": 4}}, seeds=1),
        state,
        find_settings(state=state, device="cpu").mlflow,
    )
    assert (outcome.status, news) == ("done", [line for line in news if "MLflow" not in line])
    assert {path.name for path in tmp_path.iterdir()} == {state.name, "e?f#g%h.yaml", "train.bin", "val.bin"}
    assert (state / "mlflow.db").stat().st_size > 100_000
    assert {path.name for path in (state / "artifacts" / "e?f#g%h").rglob("*") if path.is_file()} >= {
        "spec.json",
        "result.json",
    }


@pytest.mark.parametrize(
    "name", [".", "..", "...", ".hidden", "back\\slash", "new\nline", "esc\x1b[31m", "x" * 201, "\udce9"]
)
def test_a_name_that_no_folder_should_have_is_refused(name, tmp_path):
    path = tmp_path / f"{name}.yaml"
    path.write_bytes(write(tmp_path).read_bytes())
    (problem,) = problems(path)
    assert "named after its file" in str(problem)
    assert str(problem).isprintable()


# Journal modes


@pytest.mark.parametrize(
    ("mounts", "path", "kind"),
    [
        (LOCAL, "/data/runs", None),
        ("", "/data/runs", None),
        ("server:/x / nfs4 rw 0 0\n", "/data/runs", "nfs4"),
        (LOCAL + "10.0.0.1@tcp:/scratch /data lustre rw,flock 0 0\n", "/data/runs", "lustre"),
        (LOCAL + "10.0.0.1@tcp:/scratch /data lustre rw,flock 0 0\n", "/database/runs", None),
        (LOCAL + "a /data nfs rw 0 0\n/dev/vdb /data/runs xfs rw 0 0\n", "/data/runs", None),
        (LOCAL + "/dev/vdb /data xfs rw 0 0\na /data nfs rw 0 0\n", "/data/runs", "nfs"),
        (LOCAL + "gpfs0 /data\\040sets/a\\134b gpfs rw 0 0\n", "/data sets/a\\b/runs", "gpfs"),
        (LOCAL + "me@host: /data fuse.sshfs rw 0 0\n", "/data/runs", "fuse.sshfs"),
        (LOCAL + "/dev/sdb1 /data fuseblk rw 0 0\n", "/data/runs", None),
        ("overlay / overlay rw 0 0\ntmpfs /dev/shm tmpfs rw 0 0\n", "/data", None),
    ],
)
def test_the_file_system_of_a_path_is_that_of_its_longest_mount(mounts, path, kind):
    assert databases.network_file_system(Path(path), mounts) == kind


def modes(path) -> tuple[str, set[str]]:
    with closing(sqlite3.connect(path)) as db:
        return db.execute("PRAGMA journal_mode").fetchone()[0], {file.name for file in path.parent.iterdir()}


def test_a_ledger_on_a_network_file_system_has_a_rollback_journal_and_works(tmp_path):
    path, remote = tmp_path / "ledger.db", "server:/x / nfs4 rw 0 0\n"
    Ledger(path, mounts=LOCAL).close()
    assert modes(path)[0] == "wal"
    for _ in range(2):  # converted, then opened as it is
        book, reader = Ledger(path, mounts=remote), Ledger(path, readonly=True)
        book.describe(question="why?")
        assert reader.fact("question") == "why?"
        with book.transaction():
            book.describe(question="who?")
            assert reader.fact("question") == "why?"
            names = {file.name for file in tmp_path.iterdir()}
            assert names == {"ledger.db", "ledger.db-commits", "ledger.db-journal"}
        assert reader.fact("question") == "who?"
        assert book.db.execute("PRAGMA synchronous").fetchone()[0] == 2
        book.describe(question="")
        book.close()
        reader.close()
        assert modes(path) == ("delete", {"ledger.db"})


def test_what_a_killed_writer_left_in_a_rollback_journal_is_undone_for_readers(tmp_path):
    path = tmp_path / "ledger.db"
    code = (
        "import os, sys; from pathlib import Path; from ablate.store.ledger import Ledger\n"
        "book = Ledger(Path(sys.argv[1]), mounts='server:/x / nfs4 rw 0 0')\n"
        "book.describe(question='before', filler='x' * 100_000)\n"
        "book.db.execute('PRAGMA cache_spill = 1'); book.db.execute('PRAGMA cache_size = 1')\n"
        "book.db.execute('BEGIN'); book.describe(question='torn', filler='y' * 100_000); book.describe(more='z' * 100_000)\n"
        "os.kill(os.getpid(), 9)"
    )
    done = subprocess.run([sys.executable, "-c", code, str(path)], check=False, env=os.environ)
    assert done.returncode == -signal.SIGKILL
    assert path.with_name("ledger.db-journal").stat().st_size > 0
    assert damage(path) is None
    book = Ledger(path, readonly=True)
    assert (book.fact("question"), book.fact("more")) == ("before", None)
    book.close()


def test_a_state_folder_whose_files_cannot_be_locked_is_refused(tmp_path, monkeypatch):
    from ablate.cli import settings

    settings.writable(tmp_path)
    assert not list(tmp_path.iterdir())

    def refuses(file, operation):
        raise OSError(38, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", refuses)  # as Lustre does where it is mounted without -o flock
    with pytest.raises(InputError, match="cannot be locked"):
        settings.writable(tmp_path)
    assert not list(tmp_path.iterdir())
