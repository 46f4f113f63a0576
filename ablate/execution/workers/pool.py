"""Trials on Ray, on a local one or on a cluster that exists already.

The problem. A sweep has many more trials than slots, and nodes, workers and trials fail in different ways:
Ray reports an actor that died at once, a node that was lost only much later, and a process that hangs never.
Other sweeps may use the cluster; it may gain and lose nodes meanwhile, and may have nodes with other
versions of this package.

The idea. `slots` is the number of placements that this sweep may use now. A placement gives the ranks of one
trial by node, and `TrialActors` wait at each placement that is free, their processes warm. `submit` starts a
trial at one of them, as a `RunningTrial`. `wait` advances every running trial without blocking and returns
the messages that have arrived. When a trial ends, its actors wait for the next trial; if they are broken,
they are replaced.

    pool = Pool(address=None, workers=2, gpus=0)   # a local Ray with two CPUs
    pool.wanted = 5                                # trials to run in all, which bounds the number of actors
    while pool.slots > running:                    # 2
        pool.submit(request)
    for trial_id, message in pool.wait(1.0): ...   # ("4f1c", Events(...)), ("9a02", Ended("done", ...))

Refused (`ClusterError`): a trial that needs more than the cluster has, and a cluster with nodes of other
versions only. The loss of Ray's head is `ClusterLost`. The pool does not repeat a failed trial: the
controller decides that.
"""

import math
import sys
import time
import uuid
from collections import Counter
from collections.abc import Callable, Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING

from ablate.execution.messages import Ended, Message, Notice, TrialRequest
from ablate.execution.workers.cluster import (
    LOOK_SECONDS,
    PATIENCE_SECONDS,
    ClusterError,
    ClusterLost,
    Head,
    Node,
    connect,
    exposed,
    sigterm_kept,
)
from ablate.execution.workers.placement import Need, Place, placements
from ablate.execution.workers.ray_private import unused_units
from ablate.execution.workers.running_trial import RunningTrial, Unusable, Waits
from ablate.execution.workers.trial_actors import TrialActors

if TYPE_CHECKING:
    from ray import ObjectRef

Answer = tuple[str, Message]
"""Id of a trial and one of its messages; the id of a Notice is empty."""
_POLL_SECONDS = 0.05
_FILE_THREADS = 4
_LOST_NODE_SECONDS = 60.0
"""Time for which nothing is started on a node that did not answer: Ray lists it as alive for a while."""
_START_SECONDS = 60.0
"""Time that a trial's actors have to start before the trial moves to units that are free elsewhere; doubled
at each move, since on a slow file system they may need longer."""
_STALE_SECONDS = 30 * 86400.0
_REMOTE = "records are streamed, and checkpoints fetched through Ray"
_REFERENCE = (
    "have no compiled quantisers, and emulate slowly on their CPUs: install the package there instead of"
    " sending it along"
)


class Placements:
    """Placements of one sweep as last counted, without those on nodes that do not answer."""

    def __init__(self) -> None:
        self.places: list[Place] = []
        self.counted = -math.inf
        """Time of the last count. None is made before `Pool.slots` is first read: it starts an actor at each
        placement."""
        self._lost: dict[str, float] = {}
        """Time until which nothing is started on a node that does not answer, by node id."""

    def lost_nodes(self) -> set[str]:
        """Return the nodes on which nothing is started now."""
        self._lost = {node: until for node, until in self._lost.items() if time.monotonic() < until}
        return set(self._lost)

    def lose(self, nodes: Iterable[str]) -> None:
        """Forget the placements on nodes that do not answer, and count again soon. Ray lists such a node for
        a while, and the next trial would wait for it."""
        nodes = [*nodes]
        self._lost |= dict.fromkeys(nodes, time.monotonic() + _LOST_NODE_SECONDS)
        self.places = [place for place in self.places if not place.keys() & self._lost.keys()]
        self.counted = -math.inf if nodes else self.counted


class Pool:
    """Executor of trials on a Ray cluster, which other programs may use too."""

    def __init__(
        self,
        address: str | None,
        workers: int | None,
        gpus: float,
        ranks: int | None = None,
        say: Callable[[str], object] = print,
    ) -> None:
        """Connect to a cluster at an address (host:port, auto, or ray://host:port), or start a local Ray
        (None). ClusterError if the cluster cannot be used, or a trial needs more than it has.

        `workers`: most trials at once; None for as many as there is room for. `gpus` and `ranks` of one trial
        as for `Need.of`. `say` is called with one line before another attempt to connect.
        """
        self.silence = 60.0
        """Seconds after which an actor without any message, not even a heartbeat, is killed."""
        ray = self._ray = connect(address, workers, say)
        self._address, self._need = address, Need.of(gpus, ranks)
        self._most, self.wanted = workers or sys.maxsize, sys.maxsize
        """Most trials at once; and number of trials to run in all, as far as the controller knows."""
        self._nonce = ""
        self.idle: list[TrialActors] = []
        self._queue: list[TrialRequest] = []
        """Requests that wait for a placement, since theirs was lost."""
        self._running: dict[str, RunningTrial] = {}
        self._moves: Counter[str] = Counter()
        """Number of placements that each trial has lost before it started."""
        self._answers: list[Answer] = []
        self._placements = Placements()
        self._barred: dict[str, str] = {}
        """Reason by id of each node that cannot run this sweep's trials."""
        self._reported: set[Hashable] = set()
        self._threads = ThreadPoolExecutor(_FILE_THREADS, thread_name_prefix="files")
        self._salt = uuid.uuid4().hex
        """Makes each sweep prefer other nodes: two that start at once see the same unused units."""
        self._client = (address or "").startswith("ray://")
        self._head: Head | None = None
        if not self._client:  # a client sees its proxy alone, whose loss raises
            self._head = Head(ray, PATIENCE_SECONDS if address else 0)
        try:
            room = self._room()
            if self._need.fit(room) is None:  # Ray would let such a trial wait without an end
                each = ", ".join(f"{units:g}" for units in room.values())
                nodes = f" on {len(room)} nodes ({each})" if len(room) > 1 else ""
                has = f"the Ray cluster has {sum(room.values()):g}{nodes}"
                raise ClusterError(f"a trial needs {self._need.text}, and {has}")
        except ClusterError:
            ray.shutdown()
            raise
        if self._head and not address and exposed(self._head.address):
            on = f"all network interfaces of this machine ({self._head.address})"
            self._notify("exposed", f"Ray listens on {on}; its token protects it")

    # Placements

    @property
    def slots(self) -> int:
        """Number of trials that may run at once now, at most `workers`. ClusterLost if Ray's head is gone. It
        includes nodes that joined meanwhile. On a cluster that other programs use it may be 0 until units are
        free. Counted again after two seconds at the earliest."""
        now = time.monotonic()
        if now >= self._placements.counted + LOOK_SECONDS:
            if self._head:
                self._head.look()
            self._placements.places = self._count_places()
            self._placements.counted = now
            self._settle()
            if not self._placements.places:
                self._refuse_barred()
                waits = "free nodes: others use them" if self._room() else "nodes: the cluster has lost all"
                self._notify("waits", f"waits for {waits}")
        return len(self._placements.places)

    def _nodes(self) -> list[Node]:
        try:
            return [node for node in self._ray.nodes() if node["Alive"]]
        except ConnectionError as error:  # of a Ray client
            raise self._connection_lost(error) from None

    def _room(self) -> dict[str, float]:
        """Return units of CPU or GPU by node id, without nodes that do not answer or cannot run this sweep's
        trials."""
        lost = self._placements.lost_nodes()
        units_of = {node["NodeID"]: node["Resources"].get(self._need.kind, 0.0) for node in self._nodes()}
        return {
            node: units_of[node]
            for node in sorted(units_of, key=lambda node: hash((self._salt, node)))
            if units_of[node] and node not in self._barred and node not in lost
        }

    def _count_places(self) -> list[Place]:
        """Return the placements that this sweep may use: those that it has, and new ones in unused units."""
        room = self._room()
        # Ray's client cannot read it: there, trials wait in Ray's own queue for units that others use.
        unused = unused_units(self._need.kind) if self._address and not self._client else room
        trials = [(trial.actors.place, trial.started) for trial in self._running.values()]
        held = by_use(trials, [actors.place for actors in self.idle])
        late = [
            trial.actors.place
            for trial_id, trial in self._running.items()
            if not trial.started
            and time.monotonic() - trial.began > _START_SECONDS * 2 ** self._moves[trial_id]
        ]
        return placements(self._need, min(self._most, max(self.wanted, 1)), room, unused, held, late)

    def _connection_lost(self, error: Exception) -> ClusterLost:
        return ClusterLost(f"the connection to {self._address} is gone ({' '.join(str(error).split())})")

    def _open_places(self) -> list[Place]:
        taken = Counter(_key(trial.actors.place) for trial in self._running.values())
        places = []
        for place in self._placements.places:
            taken[_key(place)] -= 1
            if taken[_key(place)] < 0:
                places.append(place)
        return places

    def _settle(self) -> None:
        """Dismiss actors at placements that this sweep may not use any more; start actors at each that is
        free."""
        running = self._running.items()
        placed = [(trial_id, _key(trial.actors.place), trial.started) for trial_id, trial in running]
        for trial_id in unseated([_key(place) for place in self._placements.places], placed):
            trial = self._running.pop(trial_id)
            trial.abandon()
            trial.actors.dismiss()
            self._queue.append(trial.request)
            self._moves[trial_id] += 1
        needed, kept = Counter(_key(place) for place in self._open_places()), []
        for actors in self.idle:
            needed[_key(actors.place)] -= 1
            if needed[_key(actors.place)] >= 0:
                kept.append(actors)
            else:
                actors.dismiss()
        self.idle = kept
        for key in needed.elements():
            all_addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._nodes()}
            addresses = {node: all_addresses.get(node, "") for node, _ in key}
            self.idle.append(TrialActors(self._ray, self._need, dict(key), addresses))

    def resize(self, slots: int) -> None:
        """Run at most `slots` trials at once from now on. Running trials go on to their end."""
        self._most, self._placements.counted = slots, -math.inf

    # Trials

    def submit(self, request: TrialRequest) -> None:
        """Start a trial. Call only while fewer than `slots` run."""
        if not self._nonce:
            self._nonce = _leave_nonce(Path(request.root))
        self._queue.append(request)
        self._launch()

    def _launch(self) -> None:
        while self._queue and (self.idle or self._open_places()):
            if not self.idle:
                self._settle()
            request, actors = self._queue.pop(0), self.idle.pop(0)
            place = self._nonce, self._threads, self._node
            self._running[request.id] = RunningTrial(self._ray, request, actors, *place)

    def stop(self, trial: str) -> None:
        """End a trial by its id; `wait` returns its Ended."""
        if trial in self._running:
            self._running[trial].stop()
            return
        self._queue = [request for request in self._queue if request.id != trial]
        self._answers.append((trial, Ended("failed", "stopped")))

    def wait(self, seconds: float) -> list[Answer]:
        """Return the (trial id, message) pairs that have arrived, after at most `seconds` none; the death of
        a worker is a message too. ClusterLost if the connection of a Ray client is gone; ClusterError if no
        node is left that can run this sweep's trials."""
        deadline = time.monotonic() + seconds
        ready: set[ObjectRef] = set()
        try:
            while True:
                waits = self._pump(ready)
                remaining = deadline - time.monotonic()
                if self._answers or remaining <= 0:
                    answers, self._answers = self._answers, []
                    return answers
                ready = self._ready(waits, remaining)
                now = time.monotonic()
                for trial in self._running.values():
                    for number, last in trial.last_message.items():
                        if now - last > self.silence:  # Ray does not report an actor that hangs
                            self._ray.kill(trial.actors.actors[number])
        except ConnectionError as error:  # of a Ray client
            raise self._connection_lost(error) from None

    def _ready(self, waits: list[Waits], seconds: float) -> "set[ObjectRef]":
        """Return the references that have arrived, after the first of them; soon, if a trial waits for a
        thread or a lock."""
        refs = [ref for group in waits for ref in group]
        pause = seconds if waits and all(waits) else min(seconds, _POLL_SECONDS)
        if not refs:
            time.sleep(pause)
            return set()
        if not self._ray.wait(refs, timeout=pause)[0]:
            return set()
        return set(self._ray.wait(refs, num_returns=len(refs), timeout=0)[0])

    def _pump(self, ready: "set[ObjectRef]") -> list[Waits]:
        """Advance every trial; return the references that each waits for."""
        self._launch()
        waits = []
        for trial_id, trial in list(self._running.items()):
            try:
                messages, refs = trial.pump(ready)
            except Unusable as error:
                self._bar(trial_id, error)
                continue
            self._notify_remote(trial)
            self._answers += [(trial_id, message) for message in messages]
            if trial.over:
                self._finish(trial_id)
            else:
                waits.append(refs)
        return waits

    def _finish(self, trial_id: str) -> None:
        """Keep an ended trial's actors for the next trial; replace them if they are broken."""
        trial = self._running.pop(trial_id)
        if trial.broken:
            trial.actors.dismiss()
            self._placements.lose(trial.lost_nodes)
        else:
            self.idle.append(trial.actors)
        if self._placements.counted > 0:
            self._settle()

    def _bar(self, trial_id: str, error: Unusable) -> None:
        """Exclude a node and queue the trial again; raise ClusterError if no other node can run it."""
        trial = self._running.pop(trial_id)
        trial.abandon()
        trial.actors.dismiss()
        self._barred[error.node] = str(error)
        self._refuse_barred()
        self._notify(error.node, f"{error}; no trial runs there")
        self._queue.append(trial.request)
        self._placements.counted = -math.inf

    def _refuse_barred(self) -> None:
        """Raise ClusterError if only excluded nodes have room for a trial: waiting would not help."""
        alive = {node["NodeID"] for node in self._nodes()}
        why = next((why for node, why in self._barred.items() if node in alive), None)
        if why and self._need.fit(self._room()) is None:
            raise ClusterError(why)

    def _node(self, node_id: str) -> Node | None:
        return next((node for node in self._ray.nodes() if node["NodeID"] == node_id), None)

    # Notices

    def _notify(self, key: Hashable, line: str) -> None:
        """Return a line from the next `wait`, once for each key."""
        if key not in self._reported:
            self._reported.add(key)
            self._answers.append(("", Notice(line)))

    def _notify_remote(self, trial: RunningTrial) -> None:
        """Report once if workers see the state folder, and if they emulate slowly."""
        if self._address and trial.started:
            workers = f"workers on {trial.address(0)}"
            apart = f"do not see {trial.request.root}: {_REMOTE}"
            access = "see the state folder, and write into it" if trial.sees else apart
            self._notify(trial.sees, f"{workers} {access}")
            if not trial.compiled and self._need.kind == "CPU":
                self._notify("compiled", f"{workers} {_REFERENCE}")

    def close(self) -> None:
        """End the actors and with them every trial; disconnect from the cluster."""
        for trial in self._running.values():
            trial.abandon()
        if not (self._head and self._head.lost):  # calls to a cluster without a head block
            with suppress(ConnectionError):
                for actors in (*self.idle, *(trial.actors for trial in self._running.values())):
                    actors.dismiss()
        self._threads.shutdown(wait=False, cancel_futures=True)
        with sigterm_kept():
            self._ray.shutdown()
        if self._nonce:
            Path(self._nonce).unlink(missing_ok=True)


def _key(place: Place) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(place.items()))


def by_use(trials: Iterable[tuple[Place, bool]], idle: Iterable[Place]) -> list[Place]:
    """Return a sweep's placements, those that it can use at once first: of the ones beyond what it wants, the
    last go. `trials`: (placement, True if it has started) of each running trial; `idle`: placements of actors
    without a trial.

    A trial that waits may do so to the end of another sweep, which took its units at the same moment. So an
    idle placement stays rather than the waiting trial's, and the trial moves there.
    """
    trials = list(trials)
    return [
        *(place for place, started in trials if started),
        *idle,
        *(place for place, started in trials if not started),
    ]


def unseated(places: Iterable[Hashable], trials: Iterable[tuple[str, Hashable, bool]]) -> list[str]:
    """Return the trials that wait for a placement which this sweep does not have any more.

    Nodes come and go while a gang waits for its resources; a trial that has started keeps its placement to
    its end. `places`: those that this sweep may use, each as often as trials may run there; `trials`: (trial
    id, its placement, True if it has started) of each running trial.
    """
    trials, free = list(trials), Counter(places)
    free.subtract(place for _, place, started in trials if started)
    lost = []
    for trial_id, place, started in trials:
        if not started:
            free[place] -= 1
            lost += [trial_id] if free[place] < 0 else []
    return lost


def _leave_nonce(root: Path) -> str:
    """Create a file with a random name in the state folder and return its path. A worker that finds it shares
    the folder: another machine's folder of the same path has no file of that name."""
    folder = root / ".seen"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if time.time() - old.stat().st_mtime > _STALE_SECONDS:  # left by a controller that was killed
            old.unlink(missing_ok=True)
    path = folder / uuid.uuid4().hex
    path.touch()
    return str(path)
