"""Stores of MLflow that cannot be read: each is one sentence that says why, without a password, and none is made or changed."""

import re
import socket
import sqlite3
from contextlib import closing

import pytest
from support.processes import ssh_server

from ablate.errors import InputError
from ablate.execution.tracking import access, database
from ablate.execution.tracking.stored_runs import stored_runs
from ablate.store.databases import url

pytestmark = [
    pytest.mark.services,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture
def path(tmp_path):
    """A database of the installed MLflow."""
    database.prepare(url(tmp_path / "mlflow.db"), tmp_path / "artifacts")
    return tmp_path / "mlflow.db"


def refused(uri: str) -> str:
    with pytest.raises(InputError) as told:
        stored_runs(uri, None)
    (sentence,) = told.value.problems
    assert "\n" not in str(sentence)
    return str(sentence)


def test_a_store_that_is_not_there_is_not_made(tmp_path):
    missing = tmp_path / "none.db"
    assert refused(url(missing)) == f"{missing}: no such file"
    assert not missing.exists()


def test_a_server_that_does_not_answer_is_told_without_its_password():
    told = refused("http://me:secret@127.0.0.1:9")
    assert "MLflow cannot be used there" in told
    assert "secret" not in told


def test_a_server_that_hangs_is_told_with_the_cause(monkeypatch):
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_TIMEOUT", "1")
    with socket.create_server(("127.0.0.1", 0)) as server:
        told = refused(f"http://me:secret@127.0.0.1:{server.getsockname()[1]}")
    assert told.endswith("MLflow's server does not answer: timed out")


def test_a_server_of_another_kind_does_not_refuse_a_login():
    with ssh_server() as address:
        access.check_login(address)


@pytest.mark.parametrize("address", ["http://localhost:port", "http://local host", "http://[::1"])
def test_an_address_of_no_server_does_not_refuse_a_login(address):
    access.check_login(address)


def test_a_store_of_an_older_mlflow_is_told_with_what_brings_it_up_to_date(path):
    with closing(sqlite3.connect(path)) as db, db:
        db.execute("UPDATE alembic_version SET version_num = '1b5f0d9ad7c1'")
    told = refused(url(path))
    assert "out-of-date database schema" in told
    assert "db upgrade" in told


def test_a_locked_store_is_told(path):
    with closing(sqlite3.connect(path, isolation_level=None)) as db:
        db.execute("BEGIN EXCLUSIVE")
        with pytest.raises(InputError, match=f"^{path}: cannot be read: database is locked$"):
            access.look(url(path), seconds=0.2)


@pytest.mark.parametrize("content", [b"not a database at all, and long enough to be sure of it" * 20, b""])
def test_a_file_that_is_no_store_is_told(content, tmp_path):
    path = tmp_path / "strange.db"
    path.write_bytes(content)
    assert re.search("cannot be read: file is not a database|is no database of MLflow's", refused(url(path)))
    assert path.read_bytes() == content
