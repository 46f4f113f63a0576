"""Trials on Ray: a crew of actors each, supervising one child process a node. A local Ray, or an existing cluster by address."""

import math
import sys
import time
import uuid
from collections import Counter
from collections.abc import Hashable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

from ablate.execution.cluster_shares import Claim, Place, Shares, fit
from ablate.execution.messages import Ended, Message, Notice, TrialRequest
from ablate.execution.workers.cluster import (
    LOOK_SECONDS,
    PATIENCE_SECONDS,
    ClusterError,
    ClusterLost,
    Head,
    connect,
    exposed,
    unusable,
)
from ablate.execution.workers.crew import Crew, Need
from ablate.execution.workers.flight import Flight, Unusable

Answer = tuple[str, Message]
"""A trial's id and a message of it; a Notice comes with an empty id."""
DEAF_SECONDS = 60.0
"""A worker that says nothing for so long, not even that it lives, is ended."""
_POLL_SECONDS = 0.05
_COURIERS = 4
_GONE_SECONDS = 60.0
_FIRST_ASK_SECONDS = 20.0
_STALE_SECONDS = 30 * 86400.0
_SHARES = "shares of places, 1"
"""The actor that counts for all sweeps of a cluster; another number where what it is asked changes."""
_APART = "records are streamed, and checkpoints fetched through Ray"
_REFERENCE = "have no compiled quantisers, and emulate slowly on their CPUs: install the package there instead of sending it along"


class Pool:
    """Trials on a Ray cluster that other sweeps may use too."""

    def __init__(
        self,
        address: str | None,
        workers: int | None,
        gpus: float,
        priority: int = 0,
        ranks: int | None = None,
    ) -> None:
        """`gpus`: of one trial; `ranks`: its processes where it has several, one a GPU, or one a CPU where it takes no GPU.

        `priority`: among the sweeps of a cluster; higher first, equals share. ClusterError where no trial could ever run.
        """
        ray = self._ray = connect(address, workers)
        self._address, self._need = address, Need.of(gpus, ranks)
        self._most, self.wanted = workers or sys.maxsize, sys.maxsize
        """Trials at once at most, and how many there are to run, as far as the controller knows."""
        self._priority, self._sweep, self._nonce = priority, uuid.uuid4().hex, ""
        self._idle: list[Crew] = []
        self._queue: list[TrialRequest] = []
        """Requests that wait for a place after all."""
        self._flights: dict[str, Flight] = {}
        self._answers: list[Answer] = []
        self._places: list[Place] = []
        self._counted = -math.inf
        """When they were counted; not before it is known how many trials there are: a worker is started for each place."""
        self._barred: dict[str, str] = {}
        """Nodes that cannot run this sweep's trials, and why."""
        self._gone: dict[str, float] = {}
        """Nodes that do not answer, and until when nothing is started there."""
        self._told: set[Any] = set()
        self._couriers = ThreadPoolExecutor(_COURIERS, thread_name_prefix="courier")
        self._shares: Any = Shares()
        self._head: Head | None = None
        if not (address or "").startswith("ray://"):  # a client hears of its proxy alone, which tells it
            self._head = Head(ray, PATIENCE_SECONDS if address else 0)
        try:
            self._refuse_impossible()
        except ClusterError:
            ray.shutdown()
            raise
        if self._head and not address and exposed(self._head.address):
            self._tell(
                "exposed",
                f"Ray listens on all network interfaces of this machine ({self._head.address}); its token protects it",
            )
        if address:
            known = {
                "name": _SHARES,
                "namespace": "ablate",
                "lifetime": "detached",
                "get_if_exists": True,
                "num_cpus": 0,
                "max_restarts": -1,
            }
            self._shares = ray.remote(Shares).options(**known).remote()

    # What there is room for

    @property
    def slots(self) -> int:
        """Trials at once: what the cluster has room for now, nodes that joined meanwhile included, or fewer where that was asked for.

        On a cluster that other sweeps use too, this one's share, which may be none until its turn comes. Counted anew every other second;
        ClusterLost without a head to ask.
        """
        now = time.monotonic()
        if now >= self._counted + LOOK_SECONDS:
            if self._head:
                self._head.look()
            self._counted, self._places = now, self._ask(LOOK_SECONDS if self._places else _FIRST_ASK_SECONDS)
            self._settle()
            if not self._places:
                self._refuse_barred()
                self._tell(
                    "waits",
                    "waits for its turn on the cluster"
                    if self._room()
                    else "waits for nodes: the cluster has lost all",
                )
        return len(self._places)

    def _nodes(self) -> list[dict[str, Any]]:
        """The nodes that live, as Ray describes them."""
        try:
            return [node for node in self._ray.nodes() if node["Alive"]]
        except ConnectionError as error:  # a client's
            raise self._lost(error) from None

    def _room(self) -> dict[str, float]:
        """Units by node, without nodes that do not answer or cannot run this sweep's trials."""
        self._gone = {node: until for node, until in self._gone.items() if time.monotonic() < until}
        found = {node["NodeID"]: node["Resources"].get(self._need.kind, 0.0) for node in self._nodes()}
        return {
            node: units
            for node, units in sorted(found.items())
            if units and node not in self._barred and node not in self._gone
        }

    def _claim(self) -> Claim:
        size = self._need.ranks * self._need.units
        holds = sum(flight.started for flight in self._flights.values()) * size
        wants = min(self._most, max(self.wanted, 1))
        return Claim(
            wants, self._room(), self._need.ranks, self._need.units, self._priority, self._need.kind, holds
        )

    def _refuse_impossible(self) -> None:
        """A trial that needs more than the cluster has would wait for ever."""
        claim = self._claim()
        if fit(claim, claim.room) is None:
            each = ", ".join(f"{units:g}" for units in claim.room.values())
            nodes = f" on {len(claim.room)} nodes ({each})" if len(claim.room) > 1 else ""
            raise ClusterError(
                f"a trial needs {self._need.words}, and the Ray cluster has {sum(claim.room.values()):g}{nodes}"
            )

    def _ask(self, seconds: float) -> list[Place]:
        """This sweep's places; those that it had while whoever counts is moved from a node that is lost."""
        claim = self._claim()
        if isinstance(self._shares, Shares):
            return self._shares.ask(self._sweep, claim)
        try:
            return self._ray.get(self._shares.ask.remote(self._sweep, claim), timeout=seconds)
        except self._ray.exceptions.RayError as error:
            if why := unusable(error):
                self._tell("shares", f"sweeps do not share this cluster: a node of it {why}")
            return self._places or Shares().ask(self._sweep, claim)
        except ConnectionError as error:
            raise self._lost(error) from None

    def _lost(self, error: Exception) -> ClusterLost:
        return ClusterLost(f"the connection to {self._address} is gone ({' '.join(str(error).split())})")

    def _open_places(self) -> list[Place]:
        """The places that no trial in flight takes."""
        taken = Counter(_key(flight.crew.place) for flight in self._flights.values())
        found = []
        for place in self._places:
            taken[_key(place)] -= 1
            if taken[_key(place)] < 0:
                found.append(place)
        return found

    def _settle(self) -> None:
        """Give back the places that this sweep may not use any more, and have a crew wait at each that is open."""
        flights = [
            (trial, _key(flight.crew.place), flight.started) for trial, flight in self._flights.items()
        ]
        for trial in unseated([_key(place) for place in self._places], flights):
            flight = self._flights.pop(trial)
            flight.leave()
            flight.crew.dismiss()
            self._queue.append(flight.request)
        waiting, kept = Counter(_key(place) for place in self._open_places()), []
        for crew in self._idle:
            waiting[_key(crew.place)] -= 1
            if waiting[_key(crew.place)] >= 0:
                kept.append(crew)
            else:
                crew.dismiss()
        self._idle = kept
        for key, count in waiting.items():
            self._idle += [self._hire(dict(key)) for _ in range(count)]

    def _hire(self, place: Place) -> Crew:
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in self._nodes()}
        return Crew(self._ray, self._need, place, {node: addresses.get(node, "") for node in place})

    def resize(self, slots: int) -> None:
        """Run so many trials at once from now on, or as many as the cluster has room for; those in flight go on to their end."""
        self._most, self._counted = slots, -math.inf

    # Trials

    def submit(self, request: TrialRequest) -> None:
        """Start a trial. Call only while fewer than `slots` run."""
        if not self._nonce:
            self._nonce = _leave_nonce(Path(request.root))
        self._queue.append(request)
        self._launch()

    def _launch(self) -> None:
        """Start what waits, where there is an open place."""
        while self._queue and (self._idle or self._open_places()):
            if not self._idle:
                self._settle()
            request, crew = self._queue.pop(0), self._idle.pop(0)
            self._flights[request.id] = Flight(
                self._ray, request, crew, self._nonce, self._couriers, self._node
            )

    def stop(self, trial: str) -> None:
        """End a trial in flight; `wait` tells its end."""
        if trial in self._flights:
            self._flights[trial].stop()
            return
        self._queue = [request for request in self._queue if request.id != trial]
        self._answers.append((trial, Ended("failed", "stopped")))

    def wait(self, seconds: float) -> list[Answer]:
        """Messages that arrived, waiting at most this long for the first. A dead worker is a message too."""
        deadline = time.monotonic() + seconds
        ready: set[Any] = set()
        try:
            while True:
                waits = self._pump(ready)
                left = deadline - time.monotonic()
                if self._answers or left <= 0:
                    answers, self._answers = self._answers, []
                    return answers
                ready = self._ready(waits, left)
                self._end_the_deaf(time.monotonic())
        except ConnectionError as error:  # a client's
            raise self._lost(error) from None

    def _ready(self, waits: list[list[Any]], seconds: float) -> set[Any]:
        """Which references are there, waiting for the first; not for long where a thread or a lock is waited for, too."""
        refs = [ref for group in waits for ref in group]
        pause = seconds if waits and all(waits) else min(seconds, _POLL_SECONDS)
        if not refs:
            time.sleep(pause)
            return set()
        if not self._ray.wait(refs, timeout=pause)[0]:
            return set()
        return set(self._ray.wait(refs, num_returns=len(refs), timeout=0)[0])

    def _pump(self, ready: set[Any]) -> list[list[Any]]:
        """Let every trial go on; what each waits for."""
        self._launch()
        waits = []
        for trial, flight in list(self._flights.items()):
            try:
                messages, refs = flight.pump(ready)
            except Unusable as error:
                self._bar(trial, error)
                continue
            self._tell_way(flight)
            self._answers += [(trial, message) for message in messages]
            if flight.over:
                self._land(trial)
            else:
                waits.append(refs)
        return waits

    def _land(self, trial: str) -> None:
        """Let a trial's crew wait for another one, or replace it."""
        flight = self._flights.pop(trial)
        if flight.broken:
            flight.crew.dismiss()
            for node in (
                flight.gone
            ):  # Ray learns of that much later, and would have the next trial wait for that node
                self._gone[node] = time.monotonic() + _GONE_SECONDS
            # Whoever counts places may have been there too, and answers only once Ray has moved it.
            self._places = [place for place in self._places if not place.keys() & self._gone.keys()]
            self._counted = -math.inf if flight.gone else self._counted
        else:
            self._idle.append(flight.crew)
        if self._counted > 0:
            self._settle()

    def _bar(self, trial: str, error: Unusable) -> None:
        """Run nothing on a node any more; the trial waits for another. ClusterError where there is no other."""
        flight = self._flights.pop(trial)
        flight.leave()
        flight.crew.dismiss()
        self._barred[error.node] = str(error)
        self._refuse_barred()
        self._tell(error.node, f"{error}; no trial runs there")
        self._queue.append(flight.request)
        self._counted = -math.inf

    def _refuse_barred(self) -> None:
        """Where nodes of other versions are all there is, waiting for others is no use."""
        alive = {node["NodeID"] for node in self._nodes()}
        why = next((why for node, why in self._barred.items() if node in alive), None)
        if why and fit(self._claim(), self._room()) is None:
            raise ClusterError(why)

    def _end_the_deaf(self, now: float) -> None:
        """Kill workers that hang: Ray reports one that died at once, one that hangs never."""
        for flight in self._flights.values():
            for number, heard in flight.heard.items():
                if now - heard > DEAF_SECONDS:
                    self._ray.kill(flight.crew.actors[number])

    def _node(self, node: str) -> dict[str, Any] | None:
        return next((found for found in self._ray.nodes() if found["NodeID"] == node), None)

    # What is told

    def _tell(self, what: Any, line: str) -> None:
        """Say it once."""
        if what not in self._told:
            self._told.add(what)
            self._answers.append(("", Notice(line)))

    def _tell_way(self, flight: Flight) -> None:
        """Say which way results come from a cluster, and where its workers are slow."""
        if self._address and flight.started:
            where = f"workers on {flight.address}"
            way = (
                "see the state folder, and write into it"
                if flight.sees
                else f"do not see {flight.request.root}: {_APART}"
            )
            self._tell(flight.sees, f"{where} {way}")
            if not flight.compiled and self._need.kind == "CPU":
                self._tell("compiled", f"{where} {_REFERENCE}")

    def close(self) -> None:
        """End the actors, and through their lifelines every trial; leave the cluster."""
        for flight in self._flights.values():
            flight.leave()
        if not (self._head and self._head.lost):  # which could not be told any more
            if self._address:
                with suppress(
                    self._ray.exceptions.RayError, ConnectionError
                ):  # on a lost node: it counts anew, by who asks
                    self._ray.get(self._shares.leave.remote(self._sweep), timeout=LOOK_SECONDS)
            with suppress(ConnectionError):
                for crew in (*self._idle, *(flight.crew for flight in self._flights.values())):
                    crew.dismiss()
        self._couriers.shutdown(wait=False, cancel_futures=True)
        self._ray.shutdown()
        if self._nonce:
            Path(self._nonce).unlink(missing_ok=True)


def _key(place: Place) -> tuple[tuple[str, int], ...]:
    return tuple(sorted(place.items()))


def unseated(places: Iterable[Hashable], flights: Iterable[tuple[str, Hashable, bool]]) -> list[str]:
    """The trials that wait for a place which is not, or not any more, among `places`: of (trial, place, whether it has it) each.

    Nodes come and go while a gang waits for its own; those that have theirs keep them to their end.
    """
    flights, free = list(flights), Counter(places)
    free.subtract(place for _, place, has in flights if has)
    found = []
    for trial, place, has in flights:
        if not has:
            free[place] -= 1
            found += [trial] if free[place] < 0 else []
    return found


def _leave_nonce(root: Path) -> str:
    """A new file in the state folder, by which a worker knows that folder: another machine's of the same name has none of that name."""
    folder = root / ".seen"
    folder.mkdir(exist_ok=True)
    for old in folder.iterdir():
        if time.time() - old.stat().st_mtime > _STALE_SECONDS:  # of a controller that was killed
            old.unlink(missing_ok=True)
    path = folder / uuid.uuid4().hex
    path.touch()
    return str(path)
