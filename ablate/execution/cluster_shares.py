"""Who gets which places where several sweeps share a cluster. Ray itself neither reserves nor prioritises, and starves gangs; no Ray here.

A trial takes one rank or several at once (a gang), each so many units of a node: CPUs or GPUs. Ray starts a gang once all it needs is
free at the same moment, which never comes while small trials follow each other. So every sweep asks here which places its trials may take,
and starts nothing anywhere else: what is given to a gang is left alone by the others, and comes free.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

FORGET_SECONDS = 30.0
"""A sweep that has not asked for so long is over, or its controller is dead."""
LESSER = 8.0
"""Where not all sweeps can run at once, one of lower priority gets a turn after so many times as much of the higher."""
_SLACK = 1e-6

Place = dict[str, int]
"""Where one trial may run: ranks by node."""
Room = dict[str, float]
"""Units by node."""


@dataclass(frozen=True)
class Claim:
    """What a sweep asks for: so many trials at once, each of `ranks` ranks of `units` units, on nodes with this room."""

    wants: int
    room: Mapping[str, float]
    ranks: int = 1
    units: float = 1.0
    priority: int = 0
    kind: str = "CPU"
    """Of the units. Only sweeps of the same kind are in each other's way."""
    holds: float = 0.0
    """Units that its trials are computing on now."""

    @property
    def size(self) -> float:
        """Units of one trial."""
        return self.ranks * self.units


@dataclass(frozen=True)
class _Standing:
    """A sweep that asked, when, and what it has had since sweeps began to take turns: unit-seconds, lesser priorities' times LESSER."""

    claim: Claim
    heard: float
    spent: float


class Shares:
    """The sweeps that asked lately, and the places that each may use."""

    def __init__(self) -> None:
        self._sweeps: dict[str, _Standing] = {}

    def ask(self, sweep: str, claim: Claim, now: float | None = None) -> list[Place]:
        """The places that this sweep's trials may take now, one for each trial; what runs elsewhere goes on to its end.

        Where all fit, each sweep keeps one trial, the rest goes to the highest priority first, and sweeps of the same priority share evenly
        by units. Where they do not, those that have had the least go first: sweeps take turns, and none starves. `now` in seconds; by
        default of the clock here, since those of the machines that ask may differ.
        """
        now = time.monotonic() if now is None else now
        self._sweeps = {
            name: known for name, known in self._sweeps.items() if now - known.heard < FORGET_SECONDS
        }
        self._count(sweep, claim, now)
        peers = {name: known.claim for name, known in self._sweeps.items() if known.claim.kind == claim.kind}
        found, turns = plan(peers, {name: self._sweeps[name].spent for name in peers})
        if not turns:
            self._sweeps |= {name: replace(self._sweeps[name], spent=0.0) for name in peers}
        return found[sweep]

    def leave(self, sweep: str) -> None:
        """This sweep wants nothing any more."""
        self._sweeps.pop(sweep, None)

    def _count(self, sweep: str, claim: Claim, now: float) -> None:
        """Note what a sweep asks for, and what it has had since it last asked. One that comes has had as much as who had the least."""
        peers = [
            known for name, known in self._sweeps.items() if known.claim.kind == claim.kind and name != sweep
        ]
        known = self._sweeps.get(sweep)
        if known is None:
            known = _Standing(claim, now, min((peer.spent for peer in peers), default=0.0))
        top = max([peer.claim.priority for peer in peers] + [claim.priority])
        dear = 1.0 if claim.priority == top else LESSER
        self._sweeps[sweep] = _Standing(claim, now, known.spent + claim.holds * (now - known.heard) * dear)


def plan(claims: Mapping[str, Claim], spent: Mapping[str, float]) -> tuple[dict[str, list[Place]], bool]:
    """Every sweep's places, and whether some sweep has to wait for its turn. The same claims make the same plan: nobody is moved about."""
    steady = sorted(
        (name for name in claims if claims[name].wants > 0), key=lambda name: -claims[name].size
    )  # gangs while there is room
    found = _seat(steady, claims)
    turns = len(found) < len(steady)
    if turns:
        seated = _seat(sorted(steady, key=lambda name: spent[name]), claims)
        found = _seat([name for name in steady if name in seated], claims)
        found = found if found.keys() == seated.keys() else seated
    places = {name: [found[name]] if name in found else [] for name in claims}
    _share_rest(places, claims)
    return places, turns


def _seat(names: Iterable[str], claims: Mapping[str, Claim]) -> dict[str, Place]:
    """One trial for each sweep in this order, for those that still fit."""
    found: dict[str, Place] = {}
    free = _free(claims)
    for name in names:
        if place := fit(claims[name], free):
            found[name] = place
            _take(place, claims[name], free)
    return found


def _share_rest(places: dict[str, list[Place]], claims: Mapping[str, Claim]) -> None:
    """Hand out what is left: the highest priority first, trial by trial to whoever has the fewest units."""
    free = _free(claims)
    for name, taken in places.items():
        for place in taken:
            _take(place, claims[name], free)
    for level in sorted({claim.priority for claim in claims.values()}, reverse=True):
        peers = [name for name in claims if claims[name].priority == level and places[name]]
        while peers:
            name = min(peers, key=lambda name: len(places[name]) * claims[name].size)
            another = fit(claims[name], free) if len(places[name]) < claims[name].wants else None
            if another:
                places[name].append(another)
                _take(another, claims[name], free)
            else:
                peers.remove(name)


def _free(claims: Mapping[str, Claim]) -> Room:
    """Every node that any of the sweeps can use, whole."""
    free: Room = {}
    for claim in claims.values():
        free |= claim.room
    return free


def _take(place: Place, claim: Claim, free: Room) -> None:
    for node, ranks in place.items():
        free[node] -= ranks * claim.units


def fit(claim: Claim, free: Mapping[str, float]) -> Place | None:
    """A place for one trial: on one node where one is large enough, else in equal parts on as few as possible, else on whole nodes."""
    fits = {node: math.floor(free.get(node, 0) / claim.units + _SLACK) for node in claim.room}
    for parts in range(1, claim.ranks + 1):
        each = claim.ranks // parts
        large = [node for node in fits if fits[node] >= each]
        if claim.ranks % parts == 0 and len(large) >= parts:
            return dict.fromkeys(
                sorted(large, key=lambda node: (fits[node], node))[:parts], each
            )  # the fullest: the others stay whole
    place: Place = {}
    for node in sorted(fits, key=lambda node: (-fits[node], node)):
        if fits[node] and sum(place.values()) < claim.ranks:
            place[node] = min(fits[node], claim.ranks - sum(place.values()))
    return place if sum(place.values()) == claim.ranks else None
