"""Tests of `ablate rebuild --sync`: what MLflow lacks is shipped, all of it and nothing twice, by real servers and databases: dead, late, deleted, damaged."""

import json
import os
import shutil
import threading
from collections import Counter
from contextlib import ExitStack, closing, contextmanager
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import ClassVar
from urllib.error import HTTPError
from urllib.request import Request, urlopen

import pytest
from chaos import audit
from support.commands import INLINE, here
from support.experiments import ablate, end, ledger, start, sweep, tiny, until, write
from support.gates import Gate
from support.mlflow_runs import histories, runs
from support.processes import HOLD_LOCK, ready_process
from support.services import free_port, mlflow

from ablate.execution.projections import Mirror
from ablate.execution.tracking import database
from ablate.execution.tracking.runs import key
from ablate.files import lock
from ablate.store.databases import url
from ablate.store.ledger import Ledger

pytestmark = [
    pytest.mark.services,
    pytest.mark.slow,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


IDLE = {"idle": {"steps": 8}}
"""Trials of one metric: what is asked is which runs are there, and MLflow takes longest over them."""


@contextmanager
def server(folder, port: int):
    """MLflow's own server on a SQLite database, until the block ends; gives a client of it."""
    from mlflow import MlflowClient

    log, store = folder / "server.txt", f"sqlite:///{folder / 'server.db'}"
    running, address = mlflow(store, folder / "artifacts", log, port)
    try:
        until(lambda: running.ready() or running.process.poll() is not None, 180, every=0.2)
        assert running.process.poll() is None, log.read_text()
        yield MlflowClient(address)
    finally:
        running.close()


@pytest.fixture(scope="module")
def late(tmp_path_factory, empty):
    """The address of a server that is not there yet, and the function that starts it, once, and returns a client of it."""
    folder, port = tmp_path_factory.mktemp("server"), free_port()
    shutil.copy(empty, folder / "server.db")
    with ExitStack() as stack:
        yield f"http://127.0.0.1:{port}", cache(lambda: stack.enter_context(server(folder, port)))


def recorded(state, name: str) -> dict[str, Counter]:
    """Return the values that the ledger has for MLflow, by run: every metric with its step, value and time."""
    book = ledger(state, name)
    found = {
        f"{m.name} seed={m.seed}": Counter(
            (sent, step, value, int(moment * 1000))
            for step, text, value, moment in book.records(m.trial)
            if (sent := key(text, [book.facts.metric.name]))
        )
        for m in book.members()
    }
    book.close()
    return {run: records for run, records in found.items() if records}


def drawn(client, name: str) -> dict[str, Counter]:
    """The same as MLflow has it, without the gaps, which are reckoned from it; each run is there once."""
    children = runs(client, name)
    assert len(children) == len({run.info.run_name for run in children})
    found = {run.info.run_name: histories(client, run) for run in children}
    return {
        run: Counter({entry: n for entry, n in told.items() if "_gap" not in entry[0]})
        for run, told in found.items()
    }


def parents(client, name: str) -> list[str]:
    return [run.info.status for run in runs(client, name, "sweep")]


@pytest.fixture(scope="module")
def empty(tmp_path_factory):
    """An MLflow database without anything in it, to be copied: a fresh one takes seconds to migrate."""
    path = tmp_path_factory.mktemp("mlflow") / "empty.db"
    database.prepare(url(path), path.parent)
    return path


@pytest.fixture(scope="module")
def store(empty) -> str:
    """One MLflow database for this file."""
    return f"sqlite:///{shutil.copy(empty, empty.with_name('mlflow.db'))}"


@pytest.fixture(scope="module")
def client(store):
    from mlflow import MlflowClient

    return MlflowClient(store)


def test_a_server_that_is_dead_for_the_whole_sweep_gets_every_record_later_and_none_twice(tmp_path, late):
    address, serve = late
    outcome, news = sweep(tiny(tmp_path, seeds=1), tmp_path, address, grace=1.0)
    assert (outcome.status, outcome.ran) == ("done", 3)
    assert "records behind (" in news[-1]
    expected = sum(sum(records.values()) for records in recorded(tmp_path, "tiny").values())
    assert expected > 30
    said = " ".join(here("status", "tiny", "--state", tmp_path).stdout.split())
    assert (
        f"MLflow {expected:,} records behind; `ablate rebuild tiny --sync --state {tmp_path}` sends" in said
    )

    dead = here("rebuild", "--sync", "--state", tmp_path, "--mlflow", address, "--timeout", 3)
    assert dead.returncode == 1
    assert dead.stdout.startswith(
        f"tiny: {expected:,} of {expected:,} records are missing in {address}: MLflow's server does not answer: Connection refused"
    )

    waiting = start(
        "rebuild", "--sync", "--state", tmp_path, "--mlflow", address
    )  # before the server is there
    try:
        client = serve()
        output, _ = waiting.communicate(timeout=180)
        assert (waiting.returncode, output) == (
            0,
            f"tiny: {expected:,} records sent, none is missing in {address}\n",
        )
        assert drawn(client, "tiny") == recorded(tmp_path, "tiny")
        assert parents(client, "tiny") == ["FINISHED"]
        named = address.replace(
            "://", "://ablate:hunter2@"
        )  # MLflow's client shows where each run is, unless it is told not to
        again = here("rebuild", "tiny", "--sync", "--force", "--state", tmp_path, "--mlflow", named)
        assert (again.returncode, again.stdout) == (0, output.replace("://", "://ablate:***@"))
        assert "hunter2" not in again.stderr
        assert drawn(client, "tiny") == recorded(tmp_path, "tiny")
        assert parents(client, "tiny") == ["FINISHED"]
    finally:
        end(waiting)
    assert "behind" not in here("status", "tiny", "--state", tmp_path).stdout


class Forgetful(BaseHTTPRequestHandler):
    """Passes requests on to MLflow, and breaks the connection instead of giving the answer to every first making of a run."""

    server_address_of_mlflow = ""
    made: ClassVar[set[str]] = set()

    def pass_on(self) -> None:
        body = self.rfile.read(int(self.headers.get("Content-Length", 0)))
        kinds = {key: value for key, value in self.headers.items() if key in ("Content-Type", "Accept")}
        asked = Request(self.server_address_of_mlflow + self.path, body or None, kinds, method=self.command)
        try:
            with urlopen(asked, timeout=300) as answer:
                status, kind, content = answer.status, answer.headers["Content-Type"], answer.read()
        except HTTPError as error:
            status, kind, content = error.code, error.headers["Content-Type"], error.read()
        if self.path.endswith("runs/create") and (name := json.loads(body)["run_name"]) not in self.made:
            self.made.add(name)
            self.close_connection = True
            return
        self.send_response(status)
        self.send_header("Content-Type", kind or "text/plain")
        self.send_header("Content-Length", str(len(content)))
        self.end_headers()
        self.wfile.write(content)

    do_GET = do_POST = do_PUT = do_PATCH = do_DELETE = pass_on

    def log_message(self, *words) -> None:
        pass


def test_a_run_whose_making_was_never_answered_is_not_made_twice(tmp_path, late, monkeypatch):
    address, serve = late
    serve()
    monkeypatch.setattr(Forgetful, "server_address_of_mlflow", address)
    proxy = ThreadingHTTPServer(("127.0.0.1", 0), Forgetful)
    thread = threading.Thread(target=proxy.serve_forever)
    thread.start()
    try:
        between = f"http://127.0.0.1:{proxy.server_port}"
        state, folder = tmp_path / "state", tmp_path / "state" / "sweeps" / "unanswered"
        assert sweep(tiny(tmp_path, "unanswered", seeds=1), state)[0].status == "done"
        with closing(Ledger(folder / "ledger.db")) as book:
            mirror = Mirror(between, book, state, folder, "unanswered", busy=True)
            mirror.tracker.retry = 0.5
            assert mirror.finish("FINISHED", "", 120) is None
        assert Forgetful.made == {"unanswered", "bf16 seed=0", "rht=true seed=0", "rht=false seed=0"}
        assert list(audit.mlflow(audit.Tracker(address), folder)) == []
    finally:
        proxy.shutdown()
        thread.join()
        proxy.server_close()


def test_a_deleted_database_is_made_again(tmp_path, empty):
    from mlflow import MlflowClient

    path = tmp_path / "mlflow.db"
    shutil.copy(empty, path)
    for name in ("one", "two"):
        sweep(tiny(tmp_path, name, workload=IDLE, seeds=1), tmp_path, f"sqlite:///{path}")
    for trial in (tmp_path / "trials").iterdir():
        (trial / "artifacts").mkdir(exist_ok=True)
        (trial / "artifacts" / "grid.png").touch()
    damaged = trial / "result.json"  # of one trial; what the ledger has of it is sent
    damaged.unlink()
    damaged.mkdir()
    path.unlink()
    done = ablate("rebuild", "--sync", "--force", "--state", tmp_path, timeout=180)
    assert done.returncode == 0, done.stdout + done.stderr
    client = MlflowClient(
        f"sqlite:///{tmp_path}/./mlflow.db"
    )  # under the name it had, this process still has the deleted file open
    for name in ("one", "two"):
        assert drawn(client, name) == recorded(tmp_path, name)
        assert parents(client, name) == ["FINISHED"]
        left = [[item.path for item in client.list_artifacts(run.info.run_id)] for run in runs(client, name)]
        whole = ["grid.png", "result.json", "spec.json"]
        assert sorted(left) == [whole, whole, ["grid.png", "spec.json"]]


def test_a_database_that_another_sweep_made_again_gets_this_ones_runs_too(tmp_path, empty):
    from mlflow import MlflowClient

    path = tmp_path / "mlflow.db"
    shutil.copy(empty, path)
    for name in ("one", "two"):
        sweep(tiny(tmp_path, name, workload=IDLE, seeds=1), tmp_path, f"sqlite:///{path}")
    for part in tmp_path.glob("mlflow.db*"):
        part.unlink()
    for name in ("two", "one"):
        assert ablate("rebuild", name, "--sync", "--state", tmp_path, timeout=180).returncode == 0
    client = MlflowClient(f"sqlite:///{path}")
    for name in ("one", "two"):
        assert drawn(client, name) == recorded(tmp_path, name)


def test_a_damaged_database_is_refused_and_put_aside_by_a_rebuild(tmp_path):
    from mlflow import MlflowClient

    sweep(tiny(tmp_path, workload=IDLE, seeds=1), tmp_path)
    path = tmp_path / "mlflow.db"
    path.write_bytes(b"no database at all" * 1000)
    for words in ((), ("tiny", "--force")):
        done = here("rebuild", *words, "--sync", "--state", tmp_path)
        assert done.returncode == 2
        assert done.stderr.startswith(
            f"{path}: damaged (file is not a database); `ablate rebuild --sync --force --state {tmp_path}`, without"
        )
    with lock(tmp_path / "sweeps" / "tiny" / "lock"):
        done = here("rebuild", "--sync", "--force", "--state", tmp_path)
    assert (done.returncode, "in use by tiny" in done.stderr) == (2, True)
    assert here("rebuild", "--sync", "--force", "--state", tmp_path).returncode == 0
    assert [kept.read_bytes()[:11] for kept in tmp_path.glob("mlflow.db.damaged-*")] == [b"no database"]
    assert drawn(MlflowClient(f"sqlite:///{path}"), "tiny") == recorded(tmp_path, "tiny")


def test_an_interrupted_sweep_is_shipped_as_far_as_it_came_and_says_that_it_was_ended(
    tmp_path, client, store
):
    state, path, gate = (
        tmp_path / "state",
        write(tmp_path, "cut", workload={"idle": {"steps": 40}}, seeds=1),
        Gate(tmp_path),
    )
    gate.shut(1)
    driver = start("sweep", path, "--state", state, *INLINE, **gate.environment)

    def halfway() -> bool:
        return (
            (state / "sweeps/cut/ledger.db").exists()
            and len(list(state.glob("trials/*/result.json"))) == 1
            and deep(state)
        )

    until(halfway, 120)
    driver.kill()
    end(driver)
    done = here("rebuild", "--sync", "--state", state, "--mlflow", store)
    assert done.returncode == 0, done.stdout + done.stderr
    assert drawn(client, "cut") == recorded(state, "cut")
    assert len(drawn(client, "cut")) == 2
    assert parents(client, "cut") == ["KILLED"]
    assert sorted(run.info.status for run in runs(client, "cut")) == ["FINISHED", "KILLED"]


def deep(state) -> bool:
    """Return True if a second trial has recorded something."""
    book = ledger(state, "cut")
    found = book.db.execute("SELECT count(DISTINCT trial) FROM records").fetchone()[0]
    book.close()
    return found == 2


def test_an_experiment_that_was_deleted_in_its_pages_is_restored(tmp_path, client, store):
    sweep(tiny(tmp_path, "gone", workload=IDLE, seeds=1), tmp_path, store)
    client.delete_experiment(client.get_experiment_by_name("gone").experiment_id)
    done = here(
        "rebuild", "gone", "--sync", "--force", "--state", tmp_path, "--mlflow", store, "--timeout", 60
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert drawn(client, "gone") == recorded(tmp_path, "gone")


def test_what_runs_ships_by_itself(tmp_path):
    sweep(tiny(tmp_path, workload=IDLE, seeds=1), tmp_path)
    holder = ready_process(HOLD_LOCK, tmp_path / "sweeps" / "tiny" / "lock")
    try:
        named, every = (here("rebuild", *words, "--sync", "--state", tmp_path) for words in (("tiny",), ()))
    finally:
        end(holder)
    assert (named.returncode, named.stderr) == (
        2,
        f"tiny: is running (pid {holder.pid} on {os.uname().nodename}), and sends its own records\n",
    )
    assert (every.returncode, every.stdout) == (0, named.stderr)


def test_without_mlflow_there_is_nothing_to_ship_to(tmp_path):
    sweep(tiny(tmp_path, workload=IDLE, seeds=1), tmp_path)
    done = here("rebuild", "--sync", "--state", tmp_path, ABLATE_MLFLOW="none")
    assert (done.returncode, done.stderr) == (
        2,
        "no MLflow to send to: ABLATE_MLFLOW says `none`; give an address with --mlflow\n",
    )


def test_a_sweep_whose_ledger_is_damaged_keeps_no_other_from_being_shipped(tmp_path, client, store):
    sweep(tiny(tmp_path, "sound", workload=IDLE, seeds=1), tmp_path)
    (tmp_path / "sweeps" / "broken").mkdir()
    (tmp_path / "sweeps" / "broken" / "ledger.db").write_bytes(b"nothing" * 2000)
    done = here("rebuild", "--sync", "--state", tmp_path, "--mlflow", store)
    assert done.returncode == 1
    assert f"`ablate rebuild broken.yaml --state {tmp_path}` makes it again" in done.stdout
    assert drawn(client, "sound") == recorded(tmp_path, "sound")
