"""`ablate ui`: three addresses that answer, an end that leaves nothing behind however it comes, and one sentence where there is nothing."""

import http.client
import itertools
import json
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from contextlib import ExitStack, closing
from functools import partial
from http.server import ThreadingHTTPServer

import psutil
import pytest
from support.commands import here
from support.experiments import end, gone, start, sweep, tiny, until, words_of
from support.processes import addresses

from ablate.cli.servers.mlflow import DEFAULT_PORTS, MlflowServer
from ablate.cli.servers.reports import ReportHandler, index
from ablate.cli.settings import find_settings
from ablate.execution.sweep_status import read as status
from ablate.files import lock
from ablate.reports.report_about import write_about
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store

pytestmark = [
    pytest.mark.services,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A state folder with two sweeps, drawn in MLflow; leave it as it is."""
    folder = tmp_path_factory.mktemp("ui")
    for name, question in (("first", "Does <it> matter?"), ("second", "And this?")):
        keys = {"workload": {"idle": {"steps": 4}}, "seeds": 1, "question": question}
        sweep(tiny(folder, name, **keys), folder, f"sqlite:///{folder / 'mlflow.db'}")
    (folder / "reports" / "first" / "figures").mkdir(parents=True)
    (folder / "reports" / "first" / "index.html").write_text("<p>the report</p>")
    about = {"answer": "a <b> is worse, +0.01", "about": "ablate, experiment first: 15 runs"}
    write_about(folder / "reports" / "first", about)
    (folder / "reports" / "first" / "figures" / "forest-loss.png").write_bytes(b"png")
    (folder / "reports" / "second").mkdir(parents=True)
    (folder / "reports" / "second" / "gap.png").write_bytes(b"png")
    return folder


def family(process: subprocess.Popen) -> list[psutil.Process]:
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=300) as answer:
        assert answer.status == 200
        return answer.read().decode()


def ends(process: subprocess.Popen, found: dict[str, str], how: signal.Signals) -> None:
    """All addresses answer, and nothing is left once it ended in this way."""
    assert set(found) == {"MLflow", "Optuna", "Reports"}
    found = {name: address for name, address in found.items() if address != "not running"}
    assert all(address.startswith("http://127.0.0.1:") for address in found.values())
    for address in found.values():
        read(address.partition("#")[0])
    processes = family(process)
    assert len(processes) >= 3 or "MLflow" not in found
    process.send_signal(how)
    until(lambda: gone(processes))
    assert process.wait(10) == (-9 if how == signal.SIGKILL else 0)
    for address in found.values():
        with socket.socket() as probe:
            assert (
                probe.connect_ex(("127.0.0.1", int(re.search(r":(\d+)", address.removeprefix("http:"))[1])))
                != 0
            )


def taken(port: int) -> socket.socket:
    """Listen on the first free port from this one on."""
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            port += 1


def mlflow_port(process: subprocess.Popen) -> int | None:
    """Return the port on which the command has started MLflow, which listens there seconds later."""
    for child in psutil.Process(process.pid).children():
        if found := re.search(r"mlflow server .*--port (\d+)", " ".join(words_of(child))):
            return int(found[1])
    return None


def test_addresses_name_the_sweep_run_last_taken_ports_are_passed_over_and_nothing_is_left_of_one_that_ends(
    state,
):
    """By Ctrl-C; SIGTERM and SIGKILL have their tests below."""
    with ExitStack() as others:
        ports = [others.enter_context(taken(port)) for port in (5000, 8080, 8000)]
        process = start("ui", "--state", state)
        others.callback(end, process)
        first = until(lambda: mlflow_port(process))
        ports.append(others.enter_context(socket.create_server(("127.0.0.1", first))))  # before MLflow does
        found = addresses(process)
        named = {int(re.search(r":(\d+)", address.removeprefix("http:"))[1]) for address in found.values()}
        assert len(named - {port.getsockname()[1] for port in ports}) == 3
        server = found["MLflow"].partition("/#")[0]
        experiment = re.search(r"/#/experiments/(\d+)/runs\?.*viewStateShareKey=arms$", found["MLflow"])[1]
        told = json.loads(read(f"{server}/api/2.0/mlflow/experiments/get?experiment_id={experiment}"))
        assert told["experiment"]["name"] == "second"
        assert studies(found) == ("second", ["first", "second"])
        assert "first" in read(found["Reports"])
        for address in found.values():  # a page of the internet whose name leads here
            assert refuses(address.partition("#")[0], "evil.example:80") == 403
        ends(process, found, signal.SIGINT)


def refuses(address: str, host: str) -> int:
    """The status of the answer to a request that names another server."""
    try:
        with urllib.request.urlopen(
            urllib.request.Request(address, headers={"Host": host}), timeout=20
        ) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code


def test_a_path_that_no_file_can_have_is_not_found(tmp_path):
    names = frozenset({"127.0.0.1"})
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(ReportHandler, tmp_path, names)) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            assert refuses(f"http://127.0.0.1:{server.server_port}/first/%00", "127.0.0.1") == 404
        finally:
            server.shutdown()


def answer_to(port: int, path: str, method: str) -> tuple[int, str | None, bytes]:
    """The status, target of a redirection and content of the answer to a request line as it stands."""
    with closing(http.client.HTTPConnection("127.0.0.1", port, timeout=20)) as connection:
        connection.putrequest(method, path)
        connection.endheaders()
        answer = connection.getresponse()
        return answer.status, answer.headers["Location"], answer.read()


def test_head_has_the_status_and_the_headers_of_get(tmp_path):
    names = frozenset({"127.0.0.1"})
    (tmp_path / "reports" / "one").mkdir(parents=True)
    (tmp_path / "reports" / "one" / "index.html").write_text("a report")
    with ThreadingHTTPServer(("127.0.0.1", 0), partial(ReportHandler, tmp_path, names)) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            for path, host in itertools.product(
                ("/", "/index.html?x", "/one/", "/one", "/none"), ("127.0.0.1", "foreign.example")
            ):
                answers = []
                for method in ("GET", "HEAD"):
                    connection = http.client.HTTPConnection("127.0.0.1", server.server_port, timeout=20)
                    with closing(connection):
                        connection.request(method, path, headers={"Host": host})
                        raw = connection.sock.makefile("rb").read()
                    head, _, body = raw.partition(b"\r\n\r\n")
                    lines = [line for line in head.split(b"\r\n") if not line.startswith(b"Date:")]
                    answers.append((lines, body))
                (get, content), (head, none) = answers
                assert (head, none) == (get, b""), (path, host)
                assert f"Content-Length: {len(content)}".encode() in get
        finally:
            server.shutdown()


LINKS = {
    "link.html": "secret",
    "linked": "outside",
    "page/index.html": "secret",
    "old/index.htm": "secret",
    "loop": "state/reports/loop",
}
"""Links in `reports/` with what they lead to, beside it."""
OUT = (
    *(
        "loop",
        "link.html",
        "link%2ehtml",
        "linked",
        "linked/",
        "linked/secret",
        "first/../linked/secret",
        "page/",
        "old/",
    ),
    *("../secret", "%2e%2e/secret", "..%2fsecret", "first/../../secret", "first/%2e%2e/%2e%2e/secret"),
    *(
        "\\host/..",
        "%5chost/..",
        "%5Chost/%2e%2e",
        "\\host",
        "first\\..",
        "first%5c..",
        "first/..",
        "first/%2E%2E",
    ),
    *(
        "%2f%2fhost/..",
        "/host/..",
        "/host/%2e%2e",
        "/first",
        "%2ffirst",
        "first//",
        "first/.",
        "./first",
        "%00",
    ),
)
"""Paths behind the first slash that lead out of `reports/`, or that a browser could take for another server's address."""


def test_no_path_and_no_link_leads_out_of_the_reports(tmp_path):
    reports = tmp_path / "state" / "reports"
    for folder in ("first", "page", "old"):
        (reports / folder).mkdir(parents=True)
    (reports / "first" / "index.html").write_text("the report")
    (reports / "first" / "same.html").symlink_to("index.html")
    (tmp_path / "outside").mkdir()
    for path in (tmp_path / "secret", tmp_path / "outside" / "secret", tmp_path / "state" / "secret"):
        path.write_text("secret")
    for link, target in LINKS.items():
        (reports / link).symlink_to(tmp_path / target)
    handler = partial(ReportHandler, tmp_path / "state", frozenset({"127.0.0.1"}))
    with ThreadingHTTPServer(("127.0.0.1", 0), handler) as server:
        threading.Thread(target=server.serve_forever).start()
        try:
            ask = partial(answer_to, server.server_port)
            for path in (
                "/first/",
                "/first/index.html",
                "/first/same.html",
                "/first/?a=/../b",
                "/%66irst/#//x/..",
            ):
                assert ask(path, "GET") == (200, None, b"the report"), path
            assert ask("/first", "GET")[:2] == (301, "/first/")
            for path in OUT:
                for method in ("GET", "HEAD"):
                    status, target, content = ask(f"/{path}", method)
                    # the server makes one slash of several at the beginning
                    plain = path.startswith("/first") and (status, target) == (301, "/first/")
                    assert plain or (status, target) == (404, None), (method, path, status, target)
                    assert b"secret" not in content, (method, path)
            assert ask("http://127.0.0.1/first/", "GET")[0] == 404
        finally:
            server.shutdown()


def studies(found: dict[str, str]) -> tuple[str, list[str]]:
    """The study that the address of Optuna's dashboard names, and all there are."""
    board, number = re.fullmatch(r"(http://[\d.:]+)/dashboard/studies/(\d+)/note", found["Optuna"]).groups()
    known = {
        study["study_id"]: study["study_name"]
        for study in json.loads(read(f"{board}/api/studies"))["study_summaries"]
    }
    return known[int(number)], sorted(known.values())


def test_the_addresses_name_the_sweep_that_is_asked_for_and_sigterm_ends_it(state):
    process = start("ui", "first", "--state", state, "--mlflow", "none")
    try:
        found = addresses(process)
        assert found["MLflow"] == "not running"
        assert studies(found) == ("first", ["first", "second"])
        ends(process, found, signal.SIGTERM)
    finally:
        end(process)


def test_a_server_that_is_named_is_not_started_but_told_without_its_password(state):
    process = start("ui", "--state", state, "--mlflow", "http://me:secret@127.0.0.1:9")
    try:
        found = addresses(process)
        assert found["MLflow"].startswith("http://me:***@127.0.0.1:9/#/experiments/")
        assert len(family(process)) == 1
    finally:
        end(process)


def test_a_service_listens_where_it_is_told_and_shows_sweeps_that_begin_after_it(state, tmp_path):
    process = start("ui", "--wait", "--host", "127.0.0.2", "--state", tmp_path, "--mlflow", "none")
    try:
        found = addresses(process)
        assert found["Optuna"].startswith("http://127.0.0.2:")
        assert "first" not in read(found["Reports"])
        shutil.copytree(state / "sweeps", tmp_path / "sweeps")
        assert "first" in read(found["Reports"])
        assert '"study_name": "first"' in read(f"{found['Optuna']}api/studies")
    finally:
        end(process)


def test_a_port_that_was_asked_for_and_is_taken_is_told(state):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = here("ui", "--state", state, "--reports-port", port)
        assert (done.returncode, done.stdout) == (2, "")
        assert (
            done.stderr
            == f"--reports-port {port}: another process listens on this port; name another port, or omit the option to take a free one\n"
        )


@pytest.mark.slow
def test_mlflow_takes_a_later_port_if_another_process_binds_its_first(state, monkeypatch):
    """The default port, taken at first, is free by then."""
    taken = socket.create_server(("127.0.0.1", 0))
    port = taken.getsockname()[1]
    monkeypatch.setitem(DEFAULT_PORTS, "mlflow", port)
    server = MlflowServer(find_settings(state=state), None)
    with closing(server), socket.create_server(("127.0.0.1", port + 1)):
        taken.close()
        assert server.served(None).address == f"http://127.0.0.1:{port + 2}"


@pytest.mark.parametrize("host", ["192.0.2.1", "no such host", "::1", "a" * 70])
def test_a_host_that_is_not_this_machine_is_told_and_not_called_taken(host, state):
    done = here("ui", "--state", state, "--host", host)
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("--optuna-port 8080: this machine cannot listen there (")


@pytest.mark.parametrize("made", [True, False])
def test_where_nothing_has_been_run_that_is_one_sentence(made, tmp_path):
    if made:
        (tmp_path / "runs" / "sweeps").mkdir(parents=True)
    done = here("ui", "--state", tmp_path / "runs")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{tmp_path / 'runs'}: no sweep has been run there yet")
    assert done.stderr.count("\n") == 1


def test_an_unknown_sweep_is_told_with_the_nearest(state):
    done = here("ui", "frist", "--state", state)
    assert done.returncode == 2
    assert re.search(r"no such sweep in .*; 'first' is the nearest", done.stderr)


def test_an_mlflow_that_does_not_start_is_told_and_the_others_are_there(state, tmp_path):
    (tmp_path / "broken.db").write_text("no database" * 100)
    process = start("ui", "--state", state, "--mlflow", f"sqlite:///{tmp_path / 'broken.db'}")
    try:
        found = addresses(process)
        assert found["MLflow"] == "not running"
        assert "first" in read(found["Reports"])
        ends(process, found, signal.SIGKILL)
    finally:
        end(process)


# The list of reports


def test_the_list_names_every_sweep_with_its_question_the_last_first(state):
    page = index(state)
    assert page.index("And this?") < page.index("Does &lt;it&gt; matter?")
    assert 'href="first/index.html"' in page


def test_the_list_says_each_reports_answer_and_whether_it_is_one(state):
    page = index(state)
    assert "<p>a &lt;b&gt; is worse, +0.01</p>" in page
    assert "<small>ablate, experiment first: 15 runs</small>" in page
    assert (
        page.count('class="chip unknown"') == 2
    )  # one report has no file of facts, the other's has no verdict
    for answered, valid, chip in ((True, True, "answered"), (False, True, "open"), (False, False, "none")):
        about = {"answer": "So.", "about": "", "answered": answered, "valid": valid}
        write_about(state / "reports" / "first", about)
        assert f'class="chip {chip}"' in index(state)


def test_a_report_without_its_file_of_facts_is_listed_without_its_answer(state, tmp_path):
    shutil.copytree(state, tmp_path / "copy")
    (tmp_path / "copy" / "reports" / "first" / "index.json").unlink()
    page = index(tmp_path / "copy")
    assert '<a href="first/index.html"><b>first</b></a></th><td>Does &lt;it&gt; matter?</td>' in page


def test_the_list_shows_how_far_a_sweep_is_and_that_one_failed(state, tmp_path):
    shutil.copytree(state / "sweeps", tmp_path / "sweeps")
    with closing(Ledger(tmp_path / "sweeps" / "first" / "ledger.db")) as ledger:
        ledger.settle(1, "pending")
        with lock(tmp_path / "sweeps" / "first" / "lock"):
            assert re.search(r'class="chip running">running, (\d) of (\d)<', index(tmp_path)).groups() == (
                "2",
                "3",
            )
        for trial in (1, 2, 3):
            ledger.settle(trial, "failed")
    assert 'class="chip failed">failed<' in index(tmp_path)


def test_a_ledger_that_cannot_be_read_is_listed_with_why(state, tmp_path):
    (tmp_path / "sweeps" / "bad").mkdir(parents=True)
    (tmp_path / "sweeps" / "bad" / "ledger.db").write_text("no database" * 100)
    assert "(its ledger cannot be read: file is not a database)" in index(tmp_path)


def test_a_question_that_is_no_text_any_more_leaves_the_list(state, tmp_path):
    """One bit of a cell says if it is a text or bytes."""
    shutil.copytree(state / "sweeps", tmp_path / "sweeps")
    for name, key in (("first", "question"), ("second", "name")):
        with closing(Ledger(tmp_path / "sweeps" / name / "ledger.db")) as ledger:
            ledger.db.execute("UPDATE sweep SET value = CAST(value AS BLOB) WHERE key = ?", (key,))
    assert "<b>first</b>" in index(tmp_path)
    assert status(tmp_path / "sweeps" / "second", Store(tmp_path)).trouble is not None


def test_the_last_sweep_may_be_of_another_version(state, tmp_path):
    shutil.copytree(state / "sweeps", tmp_path / "sweeps")
    with closing(Ledger(tmp_path / "sweeps" / "second" / "ledger.db")) as ledger:
        ledger.db.execute("PRAGMA user_version = 99")
    process = start("ui", "second", "--state", tmp_path, "--mlflow", "none")
    try:
        assert "a later version of ablate wrote" in read(addresses(process)["Reports"])
    finally:
        end(process)


# The lifeline

FAMILY = """
import subprocess, sys, time
subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
print("up", flush=True)
time.sleep(600)
"""


@pytest.mark.parametrize("how", ["closed", "killed", "terminated"])
def test_a_command_and_its_children_end_with_their_lifeline(how):
    holder = f"""
import subprocess, sys, time
line = subprocess.Popen([sys.executable, "-m", "ablate.execution.process_guard", sys.executable, "-c", {FAMILY!r}], stdin=subprocess.PIPE)
sys.stdin.readline()
line.stdin.close() if {how!r} == "closed" else line.terminate()
time.sleep(600)
"""
    process = subprocess.Popen(
        [sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    try:
        assert process.stdout.readline() == "up\n"
        rest = psutil.Process(process.pid).children(recursive=True)
        assert len(rest) == 3
        process.kill() if how == "killed" else print(file=process.stdin, flush=True)
        until(lambda: gone(rest))
    finally:
        end(process)


def test_a_command_that_ends_by_itself_ends_the_wait_with_its_status():
    command = [
        sys.executable,
        "-m",
        "ablate.execution.process_guard",
        sys.executable,
        "-c",
        "raise SystemExit(7)",
    ]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        assert process.wait(20) == 7
    finally:
        process.stdin.close()


def test_a_command_that_does_not_listen_is_killed():
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    command = [sys.executable, "-m", "ablate.execution.process_guard", sys.executable, "-c", stubborn]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    rest = family(process)
    process.stdin.close()
    until(lambda: gone(rest))
    process.stdout.close()
    process.wait()
