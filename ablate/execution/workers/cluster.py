"""The way to a Ray cluster: reached or started here, watched, and what is wrong with it in a sentence. Nothing here weakens its tokens."""

import ipaddress
import logging
import os
import secrets
import signal
import socket
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from ablate.files import keep_file, short_for_sockets

LOOK_SECONDS = 2.0
_LOOPBACK = "127.0.0.1"
PATIENCE_SECONDS = 15.0
"""A head that others watch over is started again within seconds; a local one never is."""
_OBJECT_STORE_BYTES = 128 << 20
"""Messages are small; Ray would otherwise reserve 30 % of the memory."""

_TOKEN = (
    "set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here as there (`ray get-auth-token` on the head prints it; ~/.ray/auth_token, or the file"
    " that RAY_AUTH_TOKEN_PATH names, does in its stead)"
)
_CLIENT = "ray:// needs Ray's client: pip install 'ray[client]'; on a machine of the cluster, host:port needs nothing"
_SENTENCES = {
    "Starting Ray client server failed": "Ray's own server for this client died as it started, as on a busy head it may; try again",
    "Failed to connect": f"what listens there does not let us in; with token authentication, which Ray's heads have by default, {_TOKEN}",
    "no authentication token": f"token authentication is on, and there is no token here: {_TOKEN}",
    "authentication token": f"the token here is not the cluster's: {_TOKEN}",
    "nauthenticated": f"the token here is not the cluster's: {_TOKEN}",
    "Could not find any running Ray instance": "no Ray runs on this machine: start one with `ray start --head`, or name its address",
    "No module named 'grpc'": _CLIENT,
    "Ray Client requires": _CLIENT,
    "ray[client]": _CLIENT,
}
"""What Ray's own words mean, by some of them."""
_HINTS = {"ersion mismatch": "install the cluster's version of Ray and of Python here"}
"""What helps, said behind Ray's own words."""


class ClusterError(Exception):
    """Ray cannot be started, reached or used; says why in one sentence."""


class ClusterLost(Exception):
    """Ray's head, or its process on this machine, is gone: nothing can be started any more. Says which in one sentence."""


class Head:
    """Whether Ray's head, and its process on this machine, live. Ray ends this process a minute after the one, and waits for the other."""

    def __init__(self, ray: Any, patience: float) -> None:
        context, self._patience, self.lost = ray.get_runtime_context(), patience, False
        mine = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        raylet = f"{mine['NodeManagerAddress']}:{mine['NodeManagerPort']}"
        self.address = context.gcs_address
        self._parts = {"Ray's head": context.gcs_address, "Ray's process on this machine": raylet}
        self._heard = time.monotonic()

    def look(self) -> None:
        """Raise ClusterLost where one of them has been silent for too long. To be asked before Ray is, which waits for a dead head."""
        now = time.monotonic()
        gone = [
            f"{part} at {address} is gone ({why})"
            for part, address in self._parts.items()
            if (why := silence(address))
        ]
        if not gone:
            self._heard = now
        elif now - self._heard >= self._patience:
            self.lost = True
            raise ClusterLost(gone[0])


def silence(address: str) -> str | None:
    """Why nothing listens at host:port, None where something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=LOOK_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def connect(address: str | None, workers: int | None) -> Any:
    """Ray, connected to the cluster at an address, or started here; ClusterError where that fails."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault(
        "RAY_NUM_REDIS_GET_RETRIES", "6"
    )  # seconds for which Ray asks a head that does not let it in
    if address and (why := _unreachable(address)):
        raise ClusterError(f"Ray cannot be reached at {address}: {why}")
    import ray

    at_end = signal.getsignal(signal.SIGTERM)
    quiet: dict[str, Any] = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            local: dict[str, Any] = {
                "include_dashboard": False,
                "_node_ip_address": _LOOPBACK,
                "object_store_memory": _OBJECT_STORE_BYTES,
            }
            _private_token()
            with _loopback(ray):
                ray.init(
                    address="local", num_cpus=workers or os.cpu_count(), **_temporary(), **local, **quiet
                )
    except (ConnectionError, ImportError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        what = f"reached at {address}" if address else "started here"
        raise ClusterError(
            f"Ray cannot be {what}: {_explained(' '.join(str(error).split()), address)}"
        ) from error
    finally:
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGTERM, at_end)  # Ray sets one that ends this process at once
    return ray


@contextmanager
def _loopback(ray: Any) -> Iterator[None]:
    """Have Ray take 127.0.0.1 at its word while it starts here.

    On Linux it replaces a loopback address by that of a network interface, and all its servers listen on all interfaces then. It does not
    where it expects no cluster, which is how it starts on macOS. What is connected to by address must not be touched by that.
    """
    constants, kept = ray._private.ray_constants, ray._private.ray_constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = kept


def _private_token() -> None:
    """Keep others from reading Ray's token. Ray writes it with the rights that the umask leaves, so it is made here where there is none."""
    try:
        path = Path.home() / ".ray" / "auth_token"
        keep_file(path)
        if path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        fresh = path.with_name(f".auth_token-{os.getpid()}")
        with os.fdopen(os.open(fresh, os.O_CREAT | os.O_TRUNC | os.O_WRONLY, 0o600), "w") as file:
            file.write(secrets.token_hex(32))
        with suppress(FileExistsError):  # another process was faster
            path.hardlink_to(fresh)
        fresh.unlink()
    except (OSError, RuntimeError):  # no home, or none to write to: Ray says so, if it needs a token
        return


def _temporary() -> dict[str, Any]:
    """Ray's temporary folder, where its sockets lie; nothing if its own choice is short enough."""
    short = short_for_sockets(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "")
    return {"_temp_dir": str(short / "ray")} if short else {}


def exposed(address: str) -> bool:
    """Return True if a server at host:port can be reached from other machines."""
    host = address.rpartition(":")[0].strip("[]")
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host != "localhost"


def _explained(said: str, address: str | None) -> str:
    """Ray's words as a sentence that says what to do."""
    if not address:
        return said
    sentence = next((sentence for words, sentence in _SENTENCES.items() if words in said), None)
    mode = os.environ.get("RAY_AUTH_MODE") or "not set"
    if sentence and _TOKEN in sentence and mode != "token":
        sentence += f"; here RAY_AUTH_MODE is {mode}"
    return sentence or said + "".join(f"; {hint}" for words, hint in _HINTS.items() if words in said)


def _unreachable(address: str) -> str | None:
    """Why no head can be at an address; None for those that Ray itself finds: auto, ray://..."""
    if address == "auto" or "://" in address:
        return None
    if not address.rpartition(":")[2].isdecimal():
        return "that is no address; it takes host:port, auto, or ray://host:port"
    why = silence(address)
    return why and f"{why}; `ray start --head` prints the address of a head"


def skew(ours: Mapping[str, str], theirs: Mapping[str, str]) -> str | None:
    """What differs between the two ends and what to do about it, None where nothing does."""
    differing = [
        f"{what} {theirs[what]} (here {ours[what]})" for what in ours if theirs.get(what) != ours[what]
    ]
    if not differing:
        return None
    return f"has {' and '.join(differing)}: install the same versions on every node, or run the sweep with the cluster's"


def unusable(error: Exception) -> str | None:
    """What is wrong with a worker that could not even start this package's code, and what to do; None where that is not what happened."""
    said = str(error)
    if "No module named 'ablate" in said:
        return (
            "has no package ablate, or another version of it: install the same version on every node (pip install ablate-fp4), or send it"
            " along with `ray job submit --working-dir .`"
        )
    return None
