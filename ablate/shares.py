"""Who gets how many slots where several sweeps share a cluster. Ray itself neither reserves nor prioritises; no Ray here."""

from dataclasses import dataclass

_FORGET_SECONDS = 30.0
"""A sweep that has not asked for so long is over, or its controller is dead."""


@dataclass(frozen=True)
class _Claim:
    priority: int
    wants: int
    heard: float


class Shares:
    """The sweeps that asked lately, and what each may hold."""

    def __init__(self) -> None:
        self._claims: dict[str, _Claim] = {}

    def ask(self, sweep: str, priority: int, wants: int, slots: int, now: float) -> int:
        """How many of the cluster's `slots` this sweep may hold now, wanting so many.

        Each sweep keeps one, so that none starves. The rest goes to the highest priority first; sweeps of the same priority share evenly.
        """
        self._claims = {name: claim for name, claim in self._claims.items() if now - claim.heard < _FORGET_SECONDS}
        self._claims[sweep] = _Claim(priority, wants, now)
        held = dict.fromkeys(self._claims, 0)
        rounds = [list(self._claims)]  # one each, whoever it is
        for level in sorted({claim.priority for claim in self._claims.values()}, reverse=True):
            peers = [name for name, claim in self._claims.items() if claim.priority == level]
            rounds += [peers] * slots
        for names in rounds:
            for name in names:
                if sum(held.values()) < slots and held[name] < self._claims[name].wants:
                    held[name] += 1
        return max(1, held[sweep])

    def leave(self, sweep: str) -> None:
        """This sweep wants nothing any more."""
        self._claims.pop(sweep, None)
