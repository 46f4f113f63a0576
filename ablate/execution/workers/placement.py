"""Placement of one sweep's trials on the nodes of a cluster. Pure arithmetic: this file does not use Ray.

A trial needs one rank, or several at once (a gang), and each rank needs some units of a node: CPUs, or GPUs.
Ray starts a gang as soon as everything it needs is free at the same moment, and reserves nothing until then.
Therefore the sweep reserves: its placements are disjoint, and one that is held stays until its trial ends,
so that no other trial of the sweep starts on the nodes of a gang that waits.

Example: two nodes of 4 GPUs, and gangs of 8 ranks. The first gang gets both nodes. If a third and a fourth
node join, the second gang gets those, whichever gang has started by then.

Other sweeps and programs are not planned for: new placements go only where units are free, and if several
programs want the same units, Ray decides. The loser's trial goes elsewhere after a while, if units are free
there. A trial that fits nowhere gets no placement.
"""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

_SLACK = 1e-6  # fractions of a GPU do not add up exactly

Place = dict[str, int]
"""Placement of one trial: number of ranks, by node."""
Room = Mapping[str, float]
"""Units by node, the preferred node first."""


@dataclass(frozen=True)
class Need:
    """Resources of one trial: `ranks` processes with `gpus` GPUs each. With `gpus` 0 each takes one CPU."""

    gpus: float
    ranks: int

    @classmethod
    def of(cls, gpus: float, ranks: int | None) -> "Need":
        """Return the need of a trial on `gpus` GPUs: one rank a GPU, part of one GPU, all for one rank if
        `ranks` is 1, or `ranks` ranks on CPUs."""
        if gpus > 1 and ranks != 1:
            return cls(1.0, round(gpus))
        return cls(float(gpus), ranks or 1)

    @property
    def kind(self) -> str:
        """Ray's name of the resource: GPU or CPU."""
        return "GPU" if self.gpus else "CPU"

    @property
    def units(self) -> float:
        """Units of `kind` that one rank needs: 1 CPU, or GPUs, which may be a fraction of one."""
        return self.gpus or 1.0

    @property
    def text(self) -> str:
        """The need for error messages, as in `2 GPUs`."""
        return f"{self.ranks * self.units:g} {self.kind}{'s' if self.ranks * self.units > 1 else ''}"

    def fit(self, free: Room) -> Place | None:
        """Return a placement for one trial in free units; None if the trial does not fit. It takes one node
        if one is large enough, else equal parts on as few nodes as possible, else the largest nodes. Among
        nodes that are large enough it takes the fullest, so that the others stay free for gangs."""
        fits = {node: math.floor(units / self.units + _SLACK) for node, units in free.items()}
        for parts in range(1, self.ranks + 1):
            each = self.ranks // parts
            large = [node for node in fits if fits[node] >= each]
            if self.ranks % parts == 0 and len(large) >= parts:
                return dict.fromkeys(sorted(large, key=lambda node: fits[node])[:parts], each)
        place: Place = {}
        for node in sorted(fits, key=lambda node: -fits[node]):
            if fits[node] > 0 and sum(place.values()) < self.ranks:
                place[node] = min(fits[node], self.ranks - sum(place.values()))
        return place if sum(place.values()) == self.ranks else None


def placements(
    need: Need, wants: int, room: Room, unused: Room, held: Iterable[Place], late: Iterable[Place] = ()
) -> list[Place]:
    """Return the placements that a sweep's trials may use now, one for each trial, at most `wants`: those
    held whose nodes are all in `room`, then new ones in units that are unused. Each one in `late` is replaced
    if there are such units.

    `room`: all units of each node that the sweep may use. `unused`: units of each node that no program uses
    now. `held`: placements of the sweep's trials and waiting actors; if there are too many, the first stay.
    `late`: those of them whose trials have waited for long: others took their units at the same moment, and
    may keep them to their end.
    """
    places = [place for place in held if place.keys() <= room.keys()][:wants]
    free = dict(room)
    for place in places:
        _take(place, need, free)
    # Actors that have just been started may not be counted as use yet.
    free = {node: min(units, unused.get(node, 0.0)) for node, units in free.items()}
    for place in late:
        if place in places and (another := need.fit(free)):
            places[places.index(place)] = another
            _take(another, need, free)
    while len(places) < wants and (another := need.fit(free)):
        places.append(another)
        _take(another, need, free)
    return places


def _take(place: Place, need: Need, free: dict[str, float]) -> None:
    for node, ranks in place.items():
        free[node] -= ranks * need.units
