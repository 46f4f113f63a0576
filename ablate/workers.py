"""Where trials run: in this process, or on Ray. The only file that knows Ray.

A pool has `slots`, takes a request for a trial (`submit`), and gives back (trial id, message) pairs as they come (`wait`).
"""

import logging
import os
import sys
from collections.abc import Iterator
from typing import Any

from ablate.supervisor import Message, Supervisor, run_inline

Answer = tuple[str, Message]
_OBJECT_STORE_BYTES = 128 << 20
"""Messages are small; Ray would otherwise reserve 30 % of the memory."""


class Inline:
    """Trials one by one in this process, without Ray: `--executor inline`."""

    slots = 1

    def __init__(self) -> None:
        from ablate.child import tune_process

        tune_process()
        self._running: dict[str, Iterator[Message]] = {}

    def submit(self, request: dict[str, Any]) -> None:
        """Take a trial; it advances only in `wait`."""
        self._running[request["id"]] = run_inline(request)

    def wait(self, seconds: float) -> list[Answer]:
        """The next message of each trial taken."""
        answers = []
        for trial, messages in list(self._running.items()):
            message = next(messages)
            answers.append((trial, message))
            if "end" in message:
                del self._running[trial]
        return answers

    def close(self) -> None:
        """Leave what is running."""
        self._running.clear()


class ClusterError(Exception):
    """Ray cannot be started or reached; says why in one sentence."""


class Pool:
    """Trials on Ray: an actor a slot, each supervising one child process. Local Ray, or an existing cluster by address."""

    def __init__(self, address: str | None, workers: int | None, gpus_per_trial: int) -> None:
        ray = self._ray = _connect(address, workers)
        kind, need = ("GPU", gpus_per_trial) if gpus_per_trial else ("CPU", 1)
        self.slots = min(int(ray.cluster_resources().get(kind, 0) // need), workers or sys.maxsize)
        if self.slots < 1:
            ray.shutdown()
            raise ClusterError(f"a trial needs {need} {kind}, and the Ray cluster has {ray.cluster_resources().get(kind, 0):g}")
        self._actor = ray.remote(num_cpus=0 if gpus_per_trial else 1, num_gpus=gpus_per_trial, max_restarts=0)(_Actor)
        self._idle = [self._actor.remote() for _ in range(self.slots)]
        for actor in self._idle:
            actor.warm.remote()
        self._running: dict[Any, tuple[str, Any]] = {}

    def submit(self, request: dict[str, Any]) -> None:
        """Start a trial on an idle actor. Call only while fewer than `slots` run."""
        actor = self._idle.pop() if self._idle else self._actor.remote()
        stream = actor.run.options(num_returns="streaming").remote(request)
        self._running[stream] = (request["id"], actor)

    def wait(self, seconds: float) -> list[Answer]:
        """Messages that arrived, waiting at most this long for the first. A dead worker is a message too."""
        ray = self._ray
        ready, _ = ray.wait(list(self._running), num_returns=len(self._running), timeout=0)
        if not ready:
            ready, _ = ray.wait(list(self._running), timeout=seconds)
        return [answer for stream in ready for answer in self._next(stream)]

    def _next(self, stream: Any) -> list[Answer]:
        trial, actor = self._running[stream]
        try:
            message = self._ray.get(next(stream))
        except StopIteration:
            return []
        except self._ray.exceptions.RayError as error:
            message = {"end": "failed", "reason": f"its worker died ({type(error).__name__})"}
            actor = self._actor.remote()
        if "end" in message:
            del self._running[stream]
            self._idle.append(actor)
        return [(trial, message)]

    def close(self) -> None:
        """End the actors, and through their lifelines every trial; leave the cluster."""
        for actor in (*self._idle, *(actor for _, actor in self._running.values())):
            self._ray.kill(actor)
        self._ray.shutdown()


class _Actor:
    """What runs on a worker: a supervisor behind Ray's calls."""

    def __init__(self) -> None:
        self.supervisor = Supervisor()

    def warm(self) -> None:
        self.supervisor.warm()

    def run(self, request: dict[str, Any]) -> Iterator[Message]:
        yield from self.supervisor.run(request)


def _connect(address: str | None, workers: int | None) -> Any:
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    os.environ.setdefault("RAY_ACCEL_ENV_VAR_OVERRIDE_ON_ZERO", "0")
    import ray

    quiet = {"log_to_driver": False, "logging_level": logging.ERROR}
    try:
        if address:
            ray.init(address=address, **quiet)
        else:
            local = {"include_dashboard": False, "_node_ip_address": "127.0.0.1", "object_store_memory": _OBJECT_STORE_BYTES}
            ray.init(address="local", num_cpus=workers or os.cpu_count(), **local, **quiet)
    except (ConnectionError, RuntimeError, ValueError, ray.exceptions.RayError) as error:
        first = str(error).strip().splitlines()[0]
        hint = " (a cluster with token authentication needs RAY_AUTH_MODE=token and RAY_AUTH_TOKEN)" if address else ""
        raise ClusterError(f"Ray cannot be {'reached at ' + address if address else 'started here'}: {first}{hint}") from error
    return ray
