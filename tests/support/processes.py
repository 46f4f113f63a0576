"""Python code and commands that tests run in processes of their own."""

import re
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from support.experiments import environment

HOLD_LOCK = """
import sys, time; from pathlib import Path; from ablate.files import lock
with lock(Path(sys.argv[1])):
    print(1, flush=True)
    time.sleep(60)
"""
"""Code that holds the lock file of its first argument for a minute."""


def ready_process(code: str, *words) -> subprocess.Popen:
    """Start Python code in a process of its own, and wait for its first line."""
    started = subprocess.Popen(
        [sys.executable, "-c", code, *map(str, words)], stdout=subprocess.PIPE, text=True, env=environment()
    )
    assert started.stdout.readline()
    return started


@contextmanager
def ssh_server() -> Iterator[str]:
    """Give an address as of a web server, at which one caller is greeted as by an SSH server."""

    def greet(server: socket.socket) -> None:
        with server.accept()[0] as caller:
            caller.recv(1 << 16)
            caller.sendall(b"SSH-2.0-OpenSSH_9.6\r\n")

    with socket.create_server(("127.0.0.1", 0)) as server:
        thread = threading.Thread(target=greet, args=(server,))
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"
        thread.join()


RUN = """
import sys
from ablate.__main__ import main
try:
    main()
finally:
    print(*sorted({name.partition('.')[0] for name in sys.modules}), file=sys.stderr)
"""


def modules(*words, **extra: str) -> tuple[subprocess.CompletedProcess, set[str]]:
    """Run `ablate ...`; return the ended command, and the top-level modules that it imported."""
    command = [sys.executable, "-c", RUN, *map(str, words)]
    done = subprocess.run(
        command, capture_output=True, text=True, timeout=600, env=environment(**extra), check=False
    )
    return done, set(done.stderr.splitlines()[-1].split())


def addresses(process: subprocess.Popen) -> dict[str, str]:
    """Return the address of each server that `ablate ui` prints; read until all three are there."""
    printed: dict[str, str] = {}
    for line in process.stdout:
        row = re.match(r"(MLflow|Optuna|Reports)\s+(http\S+|not running)\s+(.*)", line)
        printed |= {row[1]: row[2]} if row else {}
        if "Ctrl-C ends all three" in line:
            return printed
    raise AssertionError("ablate ui ended before it had printed all addresses")
