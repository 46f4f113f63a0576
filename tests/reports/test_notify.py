"""Tests of hooks: their input, and that a broken one harms nothing. Real commands, a real HTTP server."""

import json
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from support.commands import INLINE, here
from support.experiments import IDLE, TOO_LARGE, end, start, statuses, until, write
from support.gates import Gate
from support.processes import ssh_server

from ablate.errors import InputError
from ablate.execution.notify import Hook
from ablate.reports.evidence import summary_markdown
from ablate.store.checked_ledger import open_ledger

KEEP = "import sys; open(sys.argv[1], 'a').write(sys.stdin.read() + chr(10))"


class Server(ThreadingHTTPServer):
    """Keeps what is posted to it; answers with `status`, once `gate` is open."""

    daemon_threads = True

    def __init__(self) -> None:
        self.bodies, self.status, self.gate = [], 200, threading.Event()
        self.gate.set()
        super().__init__(("127.0.0.1", 0), Handler)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server_port}/T1/secret-path"


class Handler(BaseHTTPRequestHandler):
    def do_POST(self) -> None:
        self.server.gate.wait(60)
        body = self.rfile.read(int(self.headers["Content-Length"]))
        self.server.bodies.append((self.path, self.headers["Content-Type"], json.loads(body)))
        self.send_response(self.server.status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *words) -> None:
        pass


@pytest.fixture
def server():
    with Server() as found:
        thread = threading.Thread(target=found.serve_forever)
        thread.start()
        yield found
        found.shutdown()
        thread.join()


def command(folder) -> str:
    (folder / "keep.py").write_text(KEEP)
    return f"{sys.executable} '{folder}/keep.py' '{folder}/told.jsonl'"


def told(folder) -> list[dict]:
    path = folder / "told.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def test_a_url_gets_json_by_post(server):
    hook = Hook(server.url)
    hook.tell({"sweep": "tiny", "n": 1})
    assert hook.close() == []
    assert server.bodies == [("/T1/secret-path", "application/json", {"sweep": "tiny", "n": 1})]


def test_a_command_gets_json_on_its_standard_input_and_no_shell_sees_it(tmp_path):
    hook = Hook(command(tmp_path))
    hook.tell({"table": "$(touch harm) `touch harm`; | é"})
    assert hook.close() == []
    assert told(tmp_path) == [{"table": "$(touch harm) `touch harm`; | é"}]


def test_telling_does_not_wait(server):
    server.gate.clear()
    hook = Hook(server.url)
    hook.tell({})
    assert server.bodies == []
    server.gate.set()
    assert hook.close() == []
    assert len(server.bodies) == 1


def test_a_server_that_refuses_is_one_line_without_the_key_in_its_path(server):
    server.status = 403
    hook = Hook(server.url)
    hook.tell({})
    assert hook.close() == ["notify: the server answered 403 Forbidden"]


def test_a_server_that_never_answers_is_given_up(server):
    server.gate.clear()
    hook = Hook(server.url, seconds=0.3)
    hook.tell({})
    (line,) = hook.close()
    server.gate.set()
    assert "timed out" in line
    assert "secret-path" not in line


def test_no_server_is_one_line():
    hook = Hook("http://127.0.0.1:9/secret-path")
    hook.tell({})
    (line,) = hook.close()
    assert line.startswith("notify: URLError: ")
    assert "secret-path" not in line


def test_a_command_that_fails_is_one_line_with_its_last(tmp_path):
    hook = Hook(f"{sys.executable} -c \"import sys; sys.exit('first\\nno such channel')\"")
    hook.tell({})
    assert hook.close() == [f"notify: {sys.executable} ended with status 1: no such channel"]


def test_a_command_that_hangs_is_ended():
    hook = Hook("sleep 60", seconds=0.3)
    hook.tell({})
    (line,) = hook.close()
    assert "timed out" in line


def test_a_command_that_reads_nothing_is_no_trouble():
    hook = Hook("true")
    hook.tell({"table": "x" * 1_000_000})
    assert hook.close() == []


@pytest.mark.parametrize(
    ("address", "said"),
    [
        ("no-such-command-here --x", "--notify no-such-command-here: no such command"),
        ("", "--notify : no such command"),
        ("echo 'open", "--notify: not a command: No closing quotation"),
        ("https://", "--notify https://: no host"),
        ("https://user:s3cret@host/x", "--notify: a URL with user:password@ cannot be called"),
    ],
)
def test_a_hook_that_can_be_none_is_refused(address, said):
    with pytest.raises(InputError) as error:
        Hook(address)
    assert str(error.value).startswith(said)
    assert "s3cret" not in str(error.value)


# By a sweep


def test_a_bad_hook_ends_a_sweep_before_it_begins(tmp_path):
    done = here(
        "sweep", write(tmp_path), "--state", tmp_path / "state", *INLINE, "--notify", "nowhere-to-be-found"
    )
    assert (done.returncode, done.stderr.startswith("--notify nowhere-to-be-found: no such command")) == (
        2,
        True,
    )


def test_the_end_of_a_sweep_is_told_with_its_counts_and_its_table(tmp_path):
    state = tmp_path / "state"
    done = here(
        "sweep", write(tmp_path, seeds=1, **IDLE), "--state", state, *INLINE, ABLATE_NOTIFY=command(tmp_path)
    )
    assert done.returncode == 0, done.stderr
    (message,) = told(tmp_path)
    book = open_ledger(state, "tiny")
    assert message["table"] == summary_markdown(book)
    book.close()
    assert "| rht=true |" in message["table"]
    assert (message["event"], message["status"], message["counts"], message["failures"]) == (
        "ended",
        "done",
        {"done": 3},
        [],
    )
    assert (message["sweep"], message["question"]) == ("tiny", "Does it matter?")
    assert message["seconds"] > 0
    assert message["text"].startswith("tiny: done after ")


def test_a_hook_that_a_server_of_another_kind_answers_is_one_line():
    with ssh_server() as address:
        hook = Hook(address)
        hook.tell({"event": "ended"})
        assert hook.close() == ["notify: BadStatusLine: SSH-2.0-OpenSSH_9.6"]


def test_a_hook_that_fails_is_one_line_and_changes_nothing(tmp_path):
    done = here(
        "sweep", write(tmp_path, seeds=1, **IDLE), "--state", tmp_path / "state", *INLINE, "--notify", "false"
    )
    assert done.returncode == 0
    assert done.stdout.splitlines()[-1] == "notify: false ended with status 1"


def test_the_first_failure_of_a_trial_is_told_at_once_and_once(tmp_path, server):
    listed = {"broken": {"workload.hidden": TOO_LARGE}, "good": {"rht": True}}
    words = ("--state", tmp_path / "state", *INLINE, "--notify", server.url)
    done = here("sweep", write(tmp_path, ablate=None, arms=listed, retry=0, seeds=2), *words)
    assert done.returncode == 1
    first, last = (body for _, _, body in server.bodies)
    assert (first["event"], first["status"]) == ("trial failed", "running")
    assert sum(first["counts"].values()) == 8
    assert first["counts"]["oom"] < 4
    assert "you tried to allocate" in first["failures"][0]
    assert (last["event"], last["status"], last["counts"]) == ("ended", "failed", {"done": 4, "oom": 4})


def early_end(folder, status: str) -> None:
    (message,) = told(folder)
    assert message["status"] == status
    assert message["counts"]["pending"] + message["counts"]["done"] == 6


def test_an_end_by_the_budget_is_told_too(tmp_path):
    words = ("--state", tmp_path / "state", *INLINE, "--notify", command(tmp_path))
    assert here("sweep", write(tmp_path, budget={"trials": 1}, **IDLE), *words).returncode == 3
    early_end(tmp_path, "budget")


@pytest.mark.slow
def test_an_interruption_is_told_too(tmp_path):
    path, state, gate = write(tmp_path, workload={"idle": {"steps": 10}}), tmp_path / "state", Gate(tmp_path)
    gate.shut(1)
    driver = start(
        "sweep", path, "--state", state, *INLINE, "--notify", command(tmp_path), **gate.environment
    )
    until(lambda: (state / "sweeps/tiny/ledger.db").exists() and "done" in statuses_of(state))
    driver.send_signal(2)
    driver.communicate(timeout=300)
    end(driver)
    assert driver.returncode == 130
    early_end(tmp_path, "interrupted")


def statuses_of(state) -> list[str]:
    import sqlite3

    try:
        return list(statuses(state).values())
    except sqlite3.OperationalError:  # not yet filled
        return []
