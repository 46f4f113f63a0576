"""Tests of the reach of other users and other machines: rights of folders and tokens, Ray's sockets, names that servers answer to."""

import os
import stat
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from support.cases import every
from support.commands import INLINE, here
from support.experiments import environment, idle

from ablate.cli.servers.reports import calls_us, own_names
from ablate.cli.settings import find_settings, writable
from ablate.errors import InputError
from ablate.files import keep_file, make_folder, short_for_sockets, temporary_folder

LISTENING = """
import signal, psutil, ray
from ablate.execution.workers import Pool
pool = Pool(None, 1, 0)
pool.wanted = 1
assert pool.slots == 1
ray.get([actor.describe.remote("/nowhere", "nonce") for actor in pool.idle[0].actors])
me = psutil.Process()
family = [me, *me.children(recursive=True)]
ends = [end.laddr.ip for one in family for end in one.net_connections("inet") if end.status == psutil.CONN_LISTEN]
assert signal.getsignal(signal.SIGTERM) == signal.SIG_DFL, "Ray's handler would end a sweep at once"
parts = {word.rpartition("/")[2] for one in family for word in one.cmdline()[:3]}
assert not parts & {"dashboard.py", "monitor.py", "log_monitor.py"}, "a sweep needs none of them"
print(len(family), pool.wait(0), *sorted(set(ends)))
pool.close()
"""


ENDED = """
import os, signal
from concurrent.futures import ThreadPoolExecutor
from ablate.execution.workers import Pool
received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
thread = ThreadPoolExecutor(1)
pool = thread.submit(Pool, None, 1, 0).result()
os.kill(os.getpid(), signal.SIGTERM)
pool.close()
os.kill(os.getpid(), signal.SIGTERM)
print(len(received))
"""


@pytest.mark.slow
@pytest.mark.services
def test_sigterm_is_handled_beside_ray_and_after_it():
    done = subprocess.run([sys.executable, "-c", ENDED], capture_output=True, text=True, check=False)
    result = done.returncode, done.stdout, "SIGTERM received" in done.stderr
    assert result == (0, "2\n", False), done.stderr


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


@pytest.mark.slow
@pytest.mark.services
def test_ray_started_here_listens_on_loopback_alone_with_a_token_of_ones_own(tmp_path):
    """In a home of its own, and with a temporary folder as long as those of batch systems."""
    home, long = tmp_path / "home", tmp_path / ("x" * 90)
    for folder in (home, long):
        folder.mkdir()
    extra = {"HOME": str(home), "TMPDIR": str(long), "PYTHONPATH": os.pathsep.join(sys.path)}
    kept = {key: value for key, value in environment(**extra).items() if not key.startswith("RAY_")}
    done = subprocess.run(
        [sys.executable, "-c", LISTENING], capture_output=True, text=True, env=kept, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    processes, said, *ends = done.stdout.split()
    assert (int(processes) >= 4, said, set(ends) - {"127.0.0.1", "::ffff:127.0.0.1", "::1"}) == (
        True,
        "[]",
        set(),
    )
    assert mode(home / ".ray" / "auth_token") == 0o600


def test_a_token_that_others_can_read_is_taken_back(tmp_path):
    token = tmp_path / "auth_token"
    token.write_text("secret")
    token.chmod(0o644)
    keep_file(token)
    keep_file(tmp_path / "none")
    assert (mode(token), token.read_text()) == (0o600, "secret")


def test_a_state_folder_is_this_users_alone_unless_it_is_shared_or_was_there(tmp_path):
    for name, shared, expected in (("own", False, 0o700), ("shared", True, 0o755)):
        before = os.umask(0o022)
        try:
            assert writable(tmp_path / "deep" / name, shared) is None
        finally:
            os.umask(before)
        assert mode(tmp_path / "deep" / name) == expected
    there = tmp_path / "deep" / "shared"
    assert "--shared-state" in writable(there)
    assert writable(there, shared=True) is None
    assert mode(there) == 0o755
    assert writable(tmp_path / "deep" / "own") is None
    assert make_folder(there, shared=False) == "drwxr-xr-x"


def test_processes_of_one_number_find_a_folder_writable_at_once(tmp_path):
    """Containers that start together share a folder, and often the number of their process, as threads do."""
    with ThreadPoolExecutor(8) as threads:
        assert not any(threads.map(writable, [tmp_path / "runs"] * 400))
    assert not [*(tmp_path / "runs").iterdir()]


def test_printed_commands_quote_names_and_folders_with_spaces(tmp_path):
    path, state = idle(tmp_path, "my sweep", seeds=1).file, tmp_path / "my runs"
    state.mkdir(mode=0o755)
    assert f"`chmod 700 '{state}'`" in writable(state)
    done = here("sweep", path, "--state", state, *INLINE, "--no-report")
    assert f" ui 'my sweep' --state '{state}'\n" in done.stdout
    (state / "sweeps" / "my sweep" / "ledger.db").unlink()
    refused = here("report", "my sweep", "--state", state).stderr
    assert f"`ablate rebuild 'my sweep.yaml' --state '{state}'`" in refused
    assert f"`ablate sweep '{path}' --state '{state}'`" in here("rebuild", path, "--state", state).stdout


def test_sharing_is_a_flag_a_variable_or_a_line_of_a_profile(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert find_settings(device="cpu").shared_state is False
    (tmp_path / "ablate.toml").write_text("[profile.default]\nshared_state = true\n")
    assert find_settings(device="cpu").shared_state is True
    assert find_settings(device="cpu").environment()["ABLATE_SHARED_STATE"] == "true"
    monkeypatch.setenv("ABLATE_SHARED_STATE", "0")
    assert find_settings(device="cpu").shared_state is False
    assert find_settings(device="cpu", shared_state=True).shared_state is True
    monkeypatch.setenv("ABLATE_SHARED_STATE", "perhaps")
    with pytest.raises(InputError):
        find_settings(device="cpu")


def test_a_temporary_folder_of_somebody_else_is_not_used(tmp_path):
    first = temporary_folder(tmp_path)
    assert (first, mode(first)) == (tmp_path / f"ablate-{os.getuid()}", 0o700)
    assert temporary_folder(tmp_path) == first
    first.chmod(0o777)
    other = temporary_folder(tmp_path)
    assert (other != first, mode(other)) == (True, 0o700)
    first.rmdir()
    first.symlink_to(other)
    assert temporary_folder(tmp_path) not in (first, other)


@pytest.mark.parametrize("length", [4, 36, 37, 90])
def test_rays_sockets_fit_below_any_temporary_folder(length):
    given = "/" + "t" * (length - 1)
    folder = short_for_sockets(given) or Path(given)
    socket = folder / "ray" / "session_2026-11-22_15-29-33_123456_4194304" / "sockets" / "plasma_store"
    assert len(os.fsencode(socket)) <= 107
    assert (folder == Path(given)) == (length <= 36)


@every(
    header__ours=[
        ("localhost:8000", True),
        ("LOCALHOST.", True),
        ("127.0.0.1:8000", True),
        ("[::1]:8000", True),
        ("192.0.2.7:8000", True),
        ("lab.example:8000", True),
        ("proxy.example", True),
        ("dotted.example", True),
        ("dotted.example.", True),
        ("evil.example:8000", False),
        ("localhost.evil.example", False),
        ("127.0.0.1.evil.example", False),
        ("evil.example@localhost", False),
        ("[::1].evil.example", False),
        ("", False),
        (None, False),
    ]
)
def test_a_server_answers_to_its_own_names_alone(header, ours):
    assert calls_us(header, own_names("lab.example", "proxy.example, dotted.example.")) is ours
