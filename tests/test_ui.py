"""`ablate ui`: three addresses that answer, an end that leaves nothing behind however it comes, and one sentence where there is nothing."""

import re
import signal
import socket
import subprocess
import sys
import time
import urllib.request

import psutil
import pytest
from experiments_for_tests import ablate, end, start, sweep, tiny, until

from ablate.ui import index

pytestmark = [
    pytest.mark.services,
    pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore::FutureWarning", "ignore::UserWarning"),
]


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A state folder with two sweeps, drawn in MLflow; leave it as it is."""
    folder = tmp_path_factory.mktemp("ui")
    for name, question in (("first", "Does <it> matter?"), ("second", "And this?")):
        sweep(tiny(folder, name, seeds=1, question=question), folder, f"sqlite:///{folder / 'mlflow.db'}")
    (folder / "reports" / "first").mkdir(parents=True)
    (folder / "reports" / "first" / "index.html").write_text("<p>the report</p>")
    (folder / "reports" / "second").mkdir(parents=True)
    (folder / "reports" / "second" / "gap.png").write_bytes(b"png")
    return folder


def addresses(process: subprocess.Popen) -> dict[str, str]:
    """What it prints until the three are there."""
    found: dict[str, str] = {}
    for line in process.stdout:
        row = re.match(r"(MLflow|Optuna|Reports)\s+(http\S+|not running)\s+(.*)", line)
        found |= {row[1]: row[2]} if row else {}
        if "Ctrl-C ends all three" in line:
            return found
    raise AssertionError("it ended")


def family(process: subprocess.Popen) -> list[psutil.Process]:
    return [psutil.Process(process.pid), *psutil.Process(process.pid).children(recursive=True)]


def gone(processes: list[psutil.Process]) -> bool:
    return not any(one.is_running() and one.status() != psutil.STATUS_ZOMBIE for one in processes)


def read(address: str) -> str:
    with urllib.request.urlopen(address, timeout=20) as answer:
        assert answer.status == 200
        return answer.read().decode()


@pytest.fixture
def shown(state):
    process = start("ui", "--state", state)
    yield process
    end(process)


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGKILL])
def test_three_addresses_answer_and_nothing_is_left_when_it_ends(how, shown):
    found = addresses(shown)
    assert set(found) == {"MLflow", "Optuna", "Reports"}
    assert all(address.startswith("http://127.0.0.1:") for address in found.values())
    for address in found.values():
        read(address.partition("#")[0])
    processes = family(shown)
    assert len(processes) >= 3
    shown.send_signal(how)
    until(lambda: gone(processes), 30)
    assert shown.wait(10) == (-9 if how == signal.SIGKILL else 0)
    for address in found.values():
        with socket.socket() as probe:
            assert probe.connect_ex(("127.0.0.1", int(re.search(r":(\d+)", address.removeprefix("http:"))[1]))) != 0


def test_the_addresses_name_the_sweep_that_was_run_last_or_the_one_that_is_asked_for(state, shown):
    import json

    found = addresses(shown)
    server = found["MLflow"].partition("/#")[0]
    experiment = re.search(r"/#/experiments/(\d+)/runs\?.*viewStateShareKey=arms$", found["MLflow"])[1]
    told = json.loads(read(f"{server}/api/2.0/mlflow/experiments/get?experiment_id={experiment}"))
    assert told["experiment"]["name"] == "second"
    board, number = re.fullmatch(r"(http://[\d.:]+)/dashboard/studies/(\d+)", found["Optuna"]).groups()
    studies = {study["study_id"]: study["study_name"] for study in json.loads(read(f"{board}/api/studies"))["study_summaries"]}
    assert studies[int(number)] == "second"
    assert sorted(studies.values()) == ["first", "second"]
    shown.send_signal(signal.SIGINT)
    shown.wait(30)
    other = start("ui", "first", "--state", state, "--mlflow", "none")
    try:
        found = addresses(other)
        assert found["MLflow"] == "not running"
        number = int(found["Optuna"].rpartition("/")[2])
        assert {study: name for study, name in studies.items() if study == number} == {number: "first"}
    finally:
        end(other)


def test_a_server_that_is_named_is_not_started_but_told_without_its_password(state):
    process = start("ui", "--state", state, "--mlflow", "http://me:secret@127.0.0.1:9")
    try:
        found = addresses(process)
        assert found["MLflow"].startswith("http://me:***@127.0.0.1:9/#/experiments/")
        assert len(family(process)) == 1
    finally:
        end(process)


def test_ports_that_are_taken_are_passed_over_and_one_that_was_asked_for_is_told(state):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        done = ablate("ui", "--state", state, "--reports-port", port)
        assert (done.returncode, done.stdout) == (2, "")
        assert done.stderr == f"--reports-port {port}: somebody listens there already; name another, or none, and a free one is taken\n"
    both = [start("ui", "--state", state) for _ in range(2)]  # at once: each sees the other's ports free
    try:
        found = [addresses(process) for process in both]
        assert len({address for one in found for address in one.values()}) == 6
        assert all("first" in read(one["Reports"]) for one in found)
        for one in found:
            read(one["MLflow"].partition("#")[0])
    finally:
        for process in both:
            end(process)


@pytest.mark.parametrize("made", [True, False])
def test_where_nothing_has_been_run_that_is_one_sentence(made, tmp_path):
    if made:
        (tmp_path / "runs" / "sweeps").mkdir(parents=True)
    done = ablate("ui", "--state", tmp_path / "runs")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith(f"{tmp_path / 'runs'}: nothing has been run there yet")
    assert done.stderr.count("\n") == 1


def test_an_unknown_sweep_is_told_with_the_nearest(state):
    done = ablate("ui", "frist", "--state", state)
    assert done.returncode == 2
    assert re.search(r"no such sweep in .*; 'first' is the nearest", done.stderr)


def test_an_mlflow_that_does_not_start_is_told_and_the_others_are_there(state, tmp_path):
    (tmp_path / "broken.db").write_text("no database" * 100)
    process = start("ui", "--state", state, "--mlflow", f"sqlite:///{tmp_path / 'broken.db'}")
    try:
        found = addresses(process)
        assert found["MLflow"] == "not running"
        assert "first" in read(found["Reports"])
    finally:
        end(process)


# The list of reports


def test_the_list_names_every_sweep_with_its_question_the_last_first(state):
    page = index(state)
    assert page.index("And this?") < page.index("Does &lt;it&gt; matter?")
    assert 'href="first/index.html"' in page
    assert 'src="second/gap.png"' in page


def test_a_ledger_that_cannot_be_read_is_listed_with_why(state, tmp_path):
    (tmp_path / "sweeps" / "bad").mkdir(parents=True)
    (tmp_path / "sweeps" / "bad" / "ledger.db").write_text("no database" * 100)
    assert "(its ledger cannot be read: file is not a database)" in index(tmp_path)


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
line = subprocess.Popen([sys.executable, "-m", "ablate.lifeline", sys.executable, "-c", {FAMILY!r}], stdin=subprocess.PIPE)
sys.stdin.readline()
line.stdin.close() if {how!r} == "closed" else line.terminate()
time.sleep(600)
"""
    process = subprocess.Popen([sys.executable, "-c", holder], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout.readline() == "up\n"
        rest = psutil.Process(process.pid).children(recursive=True)
        assert len(rest) == 3
        process.kill() if how == "killed" else print(file=process.stdin, flush=True)
        until(lambda: gone(rest), 20)
    finally:
        end(process)


def test_a_command_that_ends_by_itself_ends_the_wait_with_its_status():
    command = [sys.executable, "-m", "ablate.lifeline", sys.executable, "-c", "raise SystemExit(7)"]
    process = subprocess.Popen(command, stdin=subprocess.PIPE)
    try:
        assert process.wait(20) == 7
    finally:
        process.stdin.close()


def test_a_command_that_does_not_listen_is_killed():
    stubborn = "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('up', flush=True); time.sleep(600)"
    command = [sys.executable, "-m", "ablate.lifeline", sys.executable, "-c", stubborn]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    assert process.stdout.readline() == "up\n"
    rest = family(process)
    began = time.monotonic()
    process.stdin.close()
    until(lambda: gone(rest), 20)
    assert time.monotonic() - began < 15
    process.stdout.close()
    process.wait()
