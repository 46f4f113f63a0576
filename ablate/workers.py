"""Where trials run: in this process, or on Ray. The only file that knows Ray.

A pool has `slots`, takes a request for a trial (`submit`), and gives back (trial id, message) pairs as they come (`wait`).
"""

import logging
import math
import os
import socket
import sys
import threading
import time
import uuid
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

from ablate.shares import Shares
from ablate.supervisor import Message, Supervisor, run_inline

Answer = tuple[str, Message]
DEAF_SECONDS = 60.0
"""A worker that says nothing for so long, not even that it lives, is ended."""
_LOOK_SECONDS = 2.0
_PATIENCE_SECONDS = 15.0
"""A head that others watch over is started again within seconds; a local one never is."""
_OBJECT_STORE_BYTES = 128 << 20
"""Messages are small; Ray would otherwise reserve 30 % of the memory."""


class Inline:
    """Trials one by one in this process, without Ray: `--executor inline`."""

    slots = 1

    def __init__(self) -> None:
        from ablate.child import tune_process

        tune_process()
        self._running: dict[str, Iterator[Message]] = {}
        self._stopped: list[str] = []

    def submit(self, request: dict[str, Any]) -> None:
        """Take a trial; it advances only in `wait`."""
        self._running[request["id"]] = run_inline(request)

    def wait(self, seconds: float) -> list[Answer]:
        """The next message of each trial taken."""
        answers = [(trial, {"end": "failed", "reason": "stopped"}) for trial in self._stopped]
        self._stopped = []
        for trial, messages in list(self._running.items()):
            message = next(messages)
            answers.append((trial, message))
            if "end" in message:
                del self._running[trial]
        return answers

    def stop(self, trial: str) -> None:
        """End a trial in flight; `wait` tells its end."""
        self._running.pop(trial).close()
        self._stopped.append(trial)

    def resize(self, slots: int) -> None:
        """One by one it stays."""

    def close(self) -> None:
        """Leave what is running."""
        self._running.clear()


class ClusterError(Exception):
    """Ray cannot be started or reached; says why in one sentence."""


class ClusterLost(Exception):
    """Ray's head, or its process on this machine, is gone: nothing can be started any more. Says which in one sentence."""


class Pool:
    """Trials on Ray: an actor a slot, each supervising one child process. Local Ray, or an existing cluster by address."""

    def __init__(self, address: str | None, workers: int | None, gpus_per_trial: int, priority: int = 0) -> None:
        """`priority`: among the sweeps of a cluster; higher first, equals share."""
        ray = self._ray = _connect(address, workers)
        self._kind, self._need = ("GPU", gpus_per_trial) if gpus_per_trial else ("CPU", 1)
        self._most = workers or sys.maxsize
        self._priority, self._sweep = priority, uuid.uuid4().hex
        self._shares: Any = None
        self._counted, self._slots = -math.inf, 0
        self._head: _Head | None = None
        if self.slots < 1:
            has = ray.cluster_resources().get(self._kind, 0)
            ray.shutdown()
            raise ClusterError(f"a trial needs {self._need} {self._kind}, and the Ray cluster has {has:g}")
        own = {"num_cpus": 0 if gpus_per_trial else 1, "num_gpus": gpus_per_trial}
        if address:
            known = {
                "name": "shares",
                "namespace": "ablate",
                "lifetime": "detached",
                "get_if_exists": True,
                "num_cpus": 0,
                "max_restarts": -1,
            }
            self._shares = ray.remote(Shares).options(**known).remote()
            self._counted = -math.inf
        self._actor = ray.remote(**own, max_restarts=0, max_concurrency=2)(_Actor)  # `stop` comes beside `run`
        self._idle: list[Any] = []
        self._running: dict[Any, tuple[str, Any]] = {}
        self._homes: dict[Any, Any] = {}
        """The node that each worker says it is on, as a promise."""
        self._idle = [self._hire() for _ in range(self.slots)]
        self._heard: dict[Any, float] = {}
        """When each running trial's supervisor last said something, from its first word on: it says that it lives, in silence too."""
        if not (address or "").startswith("ray://"):  # a client hears of its proxy alone, which tells it
            self._head = _Head(ray, _PATIENCE_SECONDS if address else 0)

    @property
    def slots(self) -> int:
        """Trials at once: what the cluster has room for now, nodes that joined meanwhile included, or fewer where that was asked for.

        On a cluster that other sweeps use too, this one's share. Counted anew every other second; ClusterLost without a head to ask.
        """
        now = time.monotonic()
        if now >= self._counted + _LOOK_SECONDS:
            if self._head:
                self._head.look()
            room = int(self._ray.cluster_resources().get(self._kind, 0) // self._need)
            self._counted, self._slots = now, min(room, self._most)
            if self._shares:
                self._slots = min(self._slots, self._share(room))
                self._release()
        return self._slots

    def _share(self, room: int) -> int:
        """This sweep's share of a cluster; all that it could use while whoever counts is moved from a node that is lost."""
        try:
            asked = self._shares.ask.remote(self._sweep, self._priority, self._slots, room, time.time())
            return self._ray.get(asked, timeout=_LOOK_SECONDS)
        except self._ray.exceptions.RayError:
            return self._slots

    def _release(self) -> None:
        """Give idle workers back that are more than this sweep may hold."""
        while self._idle and len(self._idle) + len(self._running) > self._slots:
            self._ray.kill(self._idle.pop())

    def submit(self, request: dict[str, Any]) -> None:
        """Start a trial on an idle actor. Call only while fewer than `slots` run."""
        actor = self._idle.pop() if self._idle else self._hire()
        stream = actor.run.options(num_returns="streaming").remote(request)
        self._running[stream] = (request["id"], actor)

    def stop(self, trial: str) -> None:
        """End a trial in flight; `wait` tells its end."""
        for running, actor in self._running.values():
            if running == trial:
                actor.stop.remote()

    def resize(self, slots: int) -> None:
        """Run so many trials at once from now on, or as many as the cluster has room for; those in flight go on to their end."""
        self._most, self._counted = slots, -math.inf
        self._slots = self.slots
        self._release()

    def wait(self, seconds: float) -> list[Answer]:
        """Messages that arrived, waiting at most this long for the first. A dead worker is a message too."""
        ray = self._ray
        ready, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        if not ready:
            ready, _ = ray.wait(list(self._running), timeout=seconds)
        self._end_the_deaf(time.monotonic())
        return [answer for stream in ready for answer in self._next(stream)]

    def _end_the_deaf(self, now: float) -> None:
        """Kill workers that hang: Ray reports one that died at once, one that hangs never."""
        for stream, heard in self._heard.items():
            if now - heard > DEAF_SECONDS:
                self._ray.kill(self._running[stream][1])

    def _next(self, stream: Any) -> list[Answer]:
        trial, actor = self._running[stream]
        self._heard[stream] = time.monotonic()
        try:
            message = self._ray.get(next(stream))
        except StopIteration:
            return []
        except self._ray.exceptions.RayError as error:
            message = {"end": "failed", "reason": self._bury(actor, error)}
            actor = self._hire()
        if "end" in message:
            del self._running[stream], self._heard[stream]
            self._idle.append(actor)
        return [(trial, message)]

    def _hire(self) -> Any:
        actor = self._actor.remote()
        self._homes[actor] = actor.warm.remote()
        return actor

    def _bury(self, actor: Any, error: Exception) -> str:
        """Let go of a worker that does not answer; why, as far as one can know: its node is asked, since Ray learns of that much later."""
        self._ray.kill(actor)
        try:
            home = self._ray.get(self._homes.pop(actor), timeout=0)
        except self._ray.exceptions.RayError:
            home = None
        node = next((node for node in self._ray.nodes() if node["NodeID"] == home), None)
        if node and (not node["Alive"] or _silence(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")):
            return "its node is gone"
        return f"its worker died ({type(error).__name__})"

    def close(self) -> None:
        """End the actors, and through their lifelines every trial; leave the cluster."""
        if not (self._head and self._head.lost):  # which could not be told any more
            if self._shares:
                with suppress(self._ray.exceptions.RayError):  # on a lost node: it counts anew, by who asks
                    self._ray.get(self._shares.leave.remote(self._sweep), timeout=_LOOK_SECONDS)
            for actor in (*self._idle, *(actor for _, actor in self._running.values())):
                self._ray.kill(actor)
        self._ray.shutdown()


class _Head:
    """Whether Ray's head, and its process on this machine, live. Ray ends this process a minute after the one, and waits for the other."""

    def __init__(self, ray: Any, patience: float) -> None:
        context, self._patience, self.lost = ray.get_runtime_context(), patience, False
        mine = next(node for node in ray.nodes() if node["NodeID"] == context.get_node_id())
        raylet = f"{mine['NodeManagerAddress']}:{mine['NodeManagerPort']}"
        self._parts = {"Ray's head": context.gcs_address, "Ray's process on this machine": raylet}
        self._heard = time.monotonic()

    def look(self) -> None:
        """Raise ClusterLost where one of them has been silent for too long. To be asked before Ray is, which waits for a dead head."""
        now = time.monotonic()
        gone = [f"{part} at {address} is gone ({why})" for part, address in self._parts.items() if (why := _silence(address))]
        if not gone:
            self._heard = now
        elif now - self._heard >= self._patience:
            self.lost = True
            raise ClusterLost(gone[0])


class _Actor:
    """What runs on a worker: a supervisor behind Ray's calls."""

    def __init__(self) -> None:
        threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
        self.supervisor = Supervisor()

    def warm(self) -> str:
        """Be ready for a trial; returns the node it is on."""
        import ray

        self.supervisor.warm()
        return ray.get_runtime_context().get_node_id()

    def run(self, request: dict[str, Any]) -> Iterator[Message]:
        yield from self.supervisor.run(request)

    def stop(self) -> None:
        self.supervisor.stop()


def _end_with(parent: int) -> None:
    """End this worker, and through its lifeline the trial, with Ray's process on this node: Ray leaves a busy worker behind."""
    while os.getppid() == parent:
        time.sleep(_LOOK_SECONDS / 4)
    os._exit(1)


def _silence(address: str) -> str | None:
    """Why nothing listens at host:port, None where something does."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=_LOOK_SECONDS).close()
    except OSError as error:
        return error.strerror or str(error)
    return None


def _connect(address: str | None, workers: int | None) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    os.environ.setdefault("RAY_NUM_REDIS_GET_RETRIES", "6")  # seconds for which Ray asks a head that does not let it in
    if address and (why := _unreachable(address)):
        raise ClusterError(f"Ray cannot be reached at {address}: {why}")
    import ray

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            local = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "object_store_memory": _OBJECT_STORE_BYTES}
            ray.init(address="local", num_cpus=workers or os.cpu_count(), **local, **quiet)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        said = " ".join(str(error).split())
        hint = next((f"; {hint}" for words, hint in _HINTS.items() if address and words in said), "")
        raise ClusterError(f"Ray cannot be {'reached at ' + address if address else 'started here'}: {said}{hint}") from error
    return ray


_HINTS = {
    "Failed to connect": "what listens there does not let us in: with token authentication, which Ray's heads have by default, set"
    " RAY_AUTH_MODE=token and RAY_AUTH_TOKEN here as there",
    "Version mismatch": "install the cluster's version of Ray and of Python here",
    "Could not find any running Ray instance": "start one with `ray start --head`, or name its address",
}


def _unreachable(address: str) -> str | None:
    """Why no head can be at an address; None for those that Ray itself finds: auto, ray://..."""
    if address == "auto" or "://" in address:
        return None
    if not address.rpartition(":")[2].isdecimal():
        return "that is no address; it takes host:port, auto, or ray://host:port"
    why = _silence(address)
    return why and f"{why}; `ray start --head` prints the address of a head"
