"""Who runs a trial: one actor, or for a gang one on each of its nodes, and the places that they hold."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from ablate.execution.cluster_shares import Place
from ablate.execution.messages import GangPart, TrialRequest
from ablate.execution.workers.actor import Actor
from ablate.execution.workers.cluster import silence

_CALLS = 4
"""At once in an actor: it is heard, told to stop, and read from."""


NODE_GONE = "its node is gone"


@dataclass(frozen=True)
class Need:
    """What one trial takes: `ranks` ranks, each of so many GPUs (0: one CPU instead)."""

    gpus: float
    ranks: int

    @classmethod
    def of(cls, gpus: float, ranks: int | None) -> "Need":
        """Of a trial on so many GPUs: one a rank, a part of one, or none, with so many ranks on CPUs."""
        if gpus > 1:
            return cls(1.0, round(gpus))
        return cls(float(gpus), ranks or 1)

    @property
    def kind(self) -> str:
        """What Ray calls it."""
        return "GPU" if self.gpus else "CPU"

    @property
    def units(self) -> float:
        """Of that, a rank."""
        return self.gpus or 1.0

    @property
    def words(self) -> str:
        """As it is told."""
        return f"{self.ranks * self.units:g} {self.kind}{'s' if self.ranks * self.units > 1 else ''}"


class Crew:
    """Actors that wait for a trial, or run one."""

    def __init__(self, ray: Any, need: Need, place: Place, addresses: dict[str, str]) -> None:
        """`place`: the ranks of each node; `addresses`: of those nodes."""
        self._ray, self.need, self.place = ray, need, place
        self.nodes = list(place)
        """Where each actor is, the first of which speaks for all; as planned, until it has said so itself."""
        self._group = self._hold(addresses) if need.ranks > 1 else None
        self.actors = [self._hire(number, node) for number, node in enumerate(self.nodes)]
        for actor in self.actors:
            actor.warm.remote()

    def _hold(self, addresses: dict[str, str]) -> Any:
        """Room for all ranks at once or for none. It is there once nothing else of the cluster runs in it."""
        from ray.util.placement_group import placement_group

        bundles = [
            {self.need.kind: ranks * self.need.units, f"node:{addresses[node]}": 0.001}
            for node, ranks in self.place.items()
        ]
        return placement_group(bundles, strategy="STRICT_SPREAD" if bundles[1:] else "STRICT_PACK")

    def _hire(self, number: int, node: str) -> Any:
        from ray.util.scheduling_strategies import (
            NodeAffinitySchedulingStrategy,
            PlacementGroupSchedulingStrategy,
        )

        where: Any
        if self._group:
            where = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        else:
            where = NodeAffinitySchedulingStrategy(node, soft=False)
        ranks = self.place[node]
        own = {"num_cpus": 0, "num_gpus": ranks * self.need.gpus} if self.need.gpus else {"num_cpus": ranks}
        return (
            self._ray.remote(Actor)
            .options(**own, max_restarts=0, max_concurrency=_CALLS, scheduling_strategy=where)
            .remote()
        )

    def requests(self, request: TrialRequest, facts: list[dict[str, Any]]) -> list[TrialRequest]:
        """Return the request for each actor: the trial, and of a gang its part in it. `facts`: what each actor returned from `look`."""
        request = replace(request, ranks=self.need.ranks)
        if len(self.nodes) == 1:
            return [request]
        address, port = facts[0]["address"], facts[0]["port"]
        parts = (
            GangPart(len(self.nodes), node, address, port, ranks)
            for node, ranks in enumerate(self.place.values())
        )
        return [replace(request, gang=part) for part in parts]

    def dismiss(self) -> None:
        """End the actors, and through their lifelines what they run; give their places back."""
        for actor in self.actors:
            self._ray.kill(actor)
        if self._group:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)

    def why_gone(self, number: int, error: Exception, node_of: Callable[[str], dict[str, Any] | None]) -> str:
        """Why an actor does not answer, as far as one can know: its node is asked, since Ray learns of that much later."""
        node = node_of(self.nodes[number])
        if (
            node is None
            or not node["Alive"]
            or silence(f"{node['NodeManagerAddress']}:{node['NodeManagerPort']}")
        ):
            return NODE_GONE
        return f"its worker died ({type(error).__name__})"
