"""Connection to a Ray cluster: connect or start one, watch its head, and explain its errors in one sentence
each.

Nothing here weakens Ray's token authentication.
"""

import ctypes
import ipaddress
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from types import ModuleType
from typing import Any, TypedDict

from ablate.execution.workers.ray_private import LOOPBACK_ARGUMENT, as_one_machine, temporary_folder_argument
from ablate.files import keep_file, temporary_of

LOOK_SECONDS = 2.0
PATIENCE_SECONDS = 15.0
"""Silence of a cluster's head after which it counts as lost: whoever operates it may restart it. A local head
is not restarted."""
CLIENT_TRIES = 5
"""Attempts to connect by Ray's client, whose server on the head now and then dies while it starts."""
START_TRIES = 2
"""Attempts to start a local Ray, which on a busy machine may take longer than it waits for its own parts."""
_OBJECT_STORE_BYTES = 128 << 20
"""Messages are small; Ray's default is 30 % of the memory."""

_TOKEN = (
    "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here as there (`ray get-auth-token` on the head prints it;"
    " the file ~/.ray/auth_token, or the one that RAY_AUTH_TOKEN_PATH names, may hold it instead)"
)
_CLIENT = (
    "ray:// needs Ray's client: pip install 'ray[client]'; on a machine of the cluster, host:port needs"
    " nothing"
)
_DIED = (
    "Starting Ray client server failed",
    "Server startup failed",
    "Proxy failed to Connect to backend",
    # Ray's proxy polls the process, then reads its command line by psutil: it may end in between.
    "psutil.ZombieProcess",
    "psutil.NoSuchProcess",
)
"""Parts of Ray's messages, from its proxier.py, if its server for this client died while it started."""
_SENTENCES = {
    **dict.fromkeys(
        _DIED,
        f"Ray's own server for this client died while it started, {CLIENT_TRIES} times in a row, as happens"
        " on a busy head: try again later, or read ray_client_server_*.err there",
    ),
    "Failed to connect": (
        "the server there refused the connection; with token authentication, which Ray's heads have by"
        f" default, {_TOKEN}"
    ),
    "no authentication token": f"token authentication is on, and there is no token here: {_TOKEN}",
    "authentication token": f"the token here is not the cluster's: {_TOKEN}",
    "nauthenticated": f"the token here is not the cluster's: {_TOKEN}",
    "Could not find any running Ray instance": (
        "no Ray runs on this machine: start one with `ray start --head`, or name its address"
    ),
    "No module named 'grpc'": _CLIENT,
    "Ray Client requires": _CLIENT,
    "ray[client]": _CLIENT,
}
"""Explanation by a part of Ray's error message."""


class Node(TypedDict):
    """Ray's description of a node: the part of it that this package reads."""

    NodeID: str
    Alive: bool
    NodeManagerAddress: str
    NodeManagerPort: int
    Resources: dict[str, float]


class ClusterError(Exception):
    """Ray cannot be started, reached or used; the text says why in one sentence."""


class ClusterLost(Exception):
    """Ray's head, or its process on this machine, is gone: no trial can be started. The text says which in
    one sentence."""


class Head:
    """Watch on Ray's head and on Ray's process on this machine, by connecting to their ports. Left alone, Ray
    ends this process a minute after it lost the head, and waits without an end for its process on this
    machine."""

    def __init__(self, ray: ModuleType, patience: float) -> None:
        """`patience`: seconds of silence after which `look` raises."""
        context, self._patience, self.lost = ray.get_runtime_context(), patience, False
        mine = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        raylet = f"{mine['NodeManagerAddress']}:{mine['NodeManagerPort']}"
        self.address = context.gcs_address
        self._parts = {"Ray's head": context.gcs_address, "Ray's process on this machine": raylet}
        self._last_answer = time.monotonic()

    def look(self) -> None:
        """Raise ClusterLost if one of them has been silent for too long. Call this before any call of Ray,
        which blocks without a head."""
        now = time.monotonic()
        gone = [
            f"{part} at {address} is gone ({why})"
            for part, address in self._parts.items()
            if (why := silence(address))
        ]
        if not gone:
            self._last_answer = now
        elif now - self._last_answer >= self._patience:
            self.lost = True
            raise ClusterLost(gone[0])


def silence(address: str) -> str | None:
    """Return why nothing listens at host:port, or None if something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


@contextmanager
def sigterm_kept() -> Iterator[None]:
    """Set the C handler of SIGTERM again after the block, in any thread; `signal.signal` needs the main one.
    `ray.init` sets a handler that prints a C++ stack and lets the process abort later; `ray.shutdown` sets
    the default, by which a second SIGTERM ends the process at once."""
    get_handler, set_handler = ctypes.pythonapi.PyOS_getsig, ctypes.pythonapi.PyOS_setsig
    get_handler.restype, set_handler.argtypes = ctypes.c_void_p, [ctypes.c_int, ctypes.c_void_p]
    handler = get_handler(signal.SIGTERM)
    try:
        yield
    finally:
        set_handler(signal.SIGTERM, handler)


def connect(
    address: str | None, workers: int | None, say: Callable[[str], object] = print, pause: float = 1.0
) -> ModuleType:
    """Return the `ray` module, connected to the cluster at an address (host:port, auto, or ray://host:port),
    or to a local Ray started here (None). ClusterError if Ray cannot be reached or started.

    `workers`: CPUs of a local Ray; None for all of this machine. `say` is called with one line before another
    attempt. `pause`: seconds before the second attempt by Ray's client; doubled before each further one.
    """
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    # Seconds for which Ray repeats its request to a head that refuses it.
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "6")
    if address and (why := _unreachable(address)):
        raise ClusterError(f"Ray cannot be reached at {address}: {why}")
    import ray

    handler = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, object] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            with sigterm_kept():
                _initialise(ray, {"address": address, **quiet}, False, say, pause)
        else:
            local = quiet | LOOPBACK_ARGUMENT | temporary_folder_argument()
            local |= {"include_dashboard": False, "object_store_memory": _OBJECT_STORE_BYTES}
            local |= {"address": "local", "num_cpus": workers or os.cpu_count()}
            _private_token()
            with as_one_machine(ray), sigterm_kept():
                _initialise(ray, local, True, say, 0.0)
    except Exception as error:  # Ray raises Exception itself where its processes do not answer in time
        action = f"reached at {address}" if address else "started here"
        raise ClusterError(
            f"Ray cannot be {action}: {_explained(' '.join(str(error).split()), address)}"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, handler)  # Ray sets one that ends this process at once
    return ray


def _initialise(
    ray: ModuleType, settings: dict[str, Any], starts: bool, say: Callable[[str], object], pause: float
) -> None:
    """Start a local Ray, once more if it does not answer in time, or (without `starts`) connect to a cluster,
    again if the head's server for Ray's client died while it started."""
    tries, attempt = (START_TRIES if starts else CLIENT_TRIES), 1
    while True:
        try:
            ray.init(**settings)
            return
        except Exception as error:
            if starts:
                again = not isinstance(error, ImportError | TypeError | ValueError)  # those would come again
                why = "Ray did not start here in time"
            else:
                again = isinstance(error, ConnectionError) and any(part in str(error) for part in _DIED)
                why = "Ray's own server for this client died while it started, as happens on a busy head"
            if starts and again:
                ray.shutdown()  # ends what the attempt started
            if not again or attempt == tries:
                raise
        attempt, wait = attempt + 1, pause * 2 ** (attempt - 1)
        say(f"{why}: attempt {attempt} of {tries}{f' in {wait:g} s' if wait else ''}")
        time.sleep(wait)


def _private_token() -> None:
    """Create Ray's token file if there is none, readable by its owner alone: Ray writes it with the rights
    that the umask leaves."""
    try:
        path = Path.home() / ".ray" / "auth_token"
        keep_file(path)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = temporary_of(path)
        with os.fdopen(os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # another process was faster
            path.hardlink_to(fresh)
        fresh.unlink()
    except (OSError, RuntimeError):  # no home folder, or a read-only one: Ray reports it if it needs a token
        return


def exposed(address: str) -> bool:
    """Return True if a server at host:port can be reached from other machines."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def _explained(message: str, address: str | None) -> str:
    if not address:  # the first sentence: tracebacks follow
        return f"{message.partition('. ')[0].rstrip('.')}; `--executor inline` runs the trials without Ray"
    sentence = next((sentence for part, sentence in _SENTENCES.items() if part in message), None)
    mode = os.environ.get("RAY_AUTH_MODE") or "not set"
    if sentence and _TOKEN in sentence and mode != "token":
        sentence += f"; here RAY_AUTH_MODE is {mode}"
    hint = "; install the cluster's version of Ray and of Python here"
    return sentence or message + (hint if "ersion mismatch" in message else "")


def _unreachable(address: str) -> str | None:
    """Return why no head can be at an address, or None. Ray itself checks `auto` and ray:// addresses."""
    if address == "auto" or "://" in address:
        return None
    if not address.rpartition(":")[2].isdecimal():
        return "that is no address; give host:port, auto, or ray://host:port"
    why = silence(address)
    return why and f"{why}; `ray start --head` prints the address of a head"


def skew(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """Return which versions differ between the two ends and what to do about it, or None if none do."""
    names = [name for name in ours if theirs.get(name) != ours[name]]
    differing = [f"{name} {theirs[name]} (here {ours[name]})" for name in names]
    if not differing:
        return None
    remedy = "install the same versions on every node, or run the sweep with the cluster's"
    return f"has {' and '.join(differing)}: {remedy}"


def unusable(error: Exception) -> str | None:
    """Return why a worker could not start this package's code, and what to do; None for any other error."""
    if "No module named 'ablate" in str(error):
        return (
            "has no package ablate, or another version of it: install the same version on every node"
            " (pip install ablate-fp4), or send it along with `ray job submit --working-dir .`"
        )
    return None
