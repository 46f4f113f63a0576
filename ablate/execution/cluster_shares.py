"""Assignment of nodes to the trials of several sweeps that share a cluster. Pure arithmetic: this file does
not use Ray.

A trial needs one rank, or several at once (a gang), and each rank needs some units of a node: CPUs, or GPUs.
Ray starts a gang as soon as everything it needs is free at the same moment. That moment never comes while
small trials follow each other, since Ray neither reserves resources nor knows priorities. Therefore every
sweep asks here which placements its trials may use, and starts nothing elsewhere. Nodes assigned to a gang
are not assigned to others, and become free.

Example: two nodes of 4 GPUs, a sweep of gangs of 4 ranks and a sweep of single-GPU trials. The gang gets one
node; the other node runs up to four small trials. If a second gang sweep arrives and not all sweeps can run
at once, the sweeps that have used the fewest unit-seconds go first, so that each gets a turn.

A running trial is never moved or stopped: a new plan only decides where the next trials start. The plan
refuses nothing; a sweep that fits nowhere gets an empty list.
"""

import math
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

FORGET_SECONDS = 30.0
"""Seconds after which a sweep that has not asked again is removed: it is over, or its controller is dead."""
LESSER = 8.0
"""Weight of the unit-seconds used by sweeps of lower priority, while sweeps take turns: they get 1/8 of the
time.
"""
_SLACK = 1e-6  # fractions of a GPU do not add up exactly

Place = dict[str, int]
"""Placement of one trial: number of ranks, by node."""
Room = dict[str, float]
"""Free units, by node."""


@dataclass(frozen=True)
class Claim:
    """Request of one sweep: `wants` trials at once, each of `ranks` ranks of `units` units, on the nodes of
    `room`.
    """

    wants: int
    room: Mapping[str, float]
    ranks: int = 1
    units: float = 1.0
    priority: int = 0
    kind: str = "CPU"
    """Kind of the units. Only sweeps of the same kind compete."""
    holds: float = 0.0
    """Units that its running trials use now."""

    @property
    def size(self) -> float:
        """Units that one trial needs."""
        return self.ranks * self.units


@dataclass(frozen=True)
class _Standing:
    """Last request of a sweep, its time in seconds, and the weighted unit-seconds used since sweeps began to
    take turns.
    """

    claim: Claim
    asked: float
    spent: float


class Shares:
    """Sweeps that asked recently, and the placements that each may use."""

    def __init__(self) -> None:
        self._sweeps: dict[str, _Standing] = {}

    def ask(self, sweep: str, claim: Claim, now: float | None = None) -> list[Place]:
        """Return the placements that this sweep's trials may use now, one for each trial.

        If all sweeps fit, each keeps one trial. The rest goes to the highest priority first, and sweeps of
        the same priority share it evenly by units. If not all fit, those that have used the least go first:
        sweeps take turns, and none starves. Trials that run elsewhere continue to their end.

        Args:
            sweep: name of the sweep.
            claim: what it requests.
            now: time in seconds; by default this process's monotonic clock, since the clocks of the asking
                machines differ.

        Returns:
            Placements, at most `claim.wants`; empty if the sweep has to wait.
        """
        now = time.monotonic() if now is None else now
        self._sweeps = {
            name: standing for name, standing in self._sweeps.items() if now - standing.asked < FORGET_SECONDS
        }
        self._count(sweep, claim, now)
        peers = {
            name: standing.claim
            for name, standing in self._sweeps.items()
            if standing.claim.kind == claim.kind
        }
        placements, turns = plan(peers, {name: self._sweeps[name].spent for name in peers})
        if not turns:
            self._sweeps |= {name: replace(self._sweeps[name], spent=0.0) for name in peers}
        return placements[sweep]

    def leave(self, sweep: str) -> None:
        """Remove a sweep that needs no more placements."""
        self._sweeps.pop(sweep, None)

    def _count(self, sweep: str, claim: Claim, now: float) -> None:
        """Store a sweep's request and add its use since the last one. A new sweep starts at the lowest use of
        its peers.
        """
        peers = [
            standing
            for name, standing in self._sweeps.items()
            if standing.claim.kind == claim.kind and name != sweep
        ]
        standing = self._sweeps.get(sweep)
        if standing is None:
            standing = _Standing(claim, now, min((peer.spent for peer in peers), default=0.0))
        top = max([peer.claim.priority for peer in peers] + [claim.priority])
        weight = 1.0 if claim.priority == top else LESSER
        self._sweeps[sweep] = _Standing(
            claim, now, standing.spent + claim.holds * (now - standing.asked) * weight
        )


def plan(claims: Mapping[str, Claim], spent: Mapping[str, float]) -> tuple[dict[str, list[Place]], bool]:
    """Compute the placements of all sweeps. Equal claims give equal plans, so nothing moves without a reason.

    Args:
        claims: requests of all sweeps of one kind, by name.
        spent: unit-seconds that each sweep has used, by name; smaller goes first if not all fit.

    Returns:
        Placements by sweep, and True if some sweep has to wait for its turn.
    """
    steady = sorted(
        (name for name in claims if claims[name].wants > 0), key=lambda name: -claims[name].size
    )  # large trials first, while nodes are whole
    first = _seat(steady, claims)
    turns = len(first) < len(steady)
    if turns:
        seated = _seat(sorted(steady, key=lambda name: spent[name]), claims)
        first = _seat([name for name in steady if name in seated], claims)
        first = first if first.keys() == seated.keys() else seated
    places = {name: [first[name]] if name in first else [] for name in claims}
    _share_rest(places, claims)
    return places, turns


def _seat(names: Iterable[str], claims: Mapping[str, Claim]) -> dict[str, Place]:
    """Place one trial of each sweep, in this order; sweeps that do not fit any more are left out."""
    placed: dict[str, Place] = {}
    free = _free(claims)
    for name in names:
        if place := fit(claims[name], free):
            placed[name] = place
            _take(place, claims[name], free)
    return placed


def _share_rest(places: dict[str, list[Place]], claims: Mapping[str, Claim]) -> None:
    """Distribute the free units: highest priority first, one trial at a time to the sweep with the fewest
    units.
    """
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
    """Return the full size of every node that any of the sweeps can use."""
    free: Room = {}
    for claim in claims.values():
        free |= claim.room
    return free


def _take(place: Place, claim: Claim, free: Room) -> None:
    for node, ranks in place.items():
        free[node] -= ranks * claim.units


def fit(claim: Claim, free: Mapping[str, float]) -> Place | None:
    """Find a placement for one trial.

    It takes one node if one is large enough, else equal parts on as few nodes as possible, else the largest
    nodes. Among nodes that are large enough it takes the fullest, so that the others stay free for gangs.

    Args:
        claim: what a trial needs, and the nodes that it may use.
        free: free units, by node.

    Returns:
        Ranks by node, or None if the trial does not fit.
    """
    fits = {node: math.floor(free.get(node, 0) / claim.units + _SLACK) for node in claim.room}
    for parts in range(1, claim.ranks + 1):
        each = claim.ranks // parts
        large = [node for node in fits if fits[node] >= each]
        if claim.ranks % parts == 0 and len(large) >= parts:
            return dict.fromkeys(sorted(large, key=lambda node: (fits[node], node))[:parts], each)
    place: Place = {}
    for node in sorted(fits, key=lambda node: (-fits[node], node)):
        if fits[node] and sum(place.values()) < claim.ranks:
            place[node] = min(fits[node], claim.ranks - sum(place.values()))
    return place if sum(place.values()) == claim.ranks else None
