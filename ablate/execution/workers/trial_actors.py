"""Ray actors that run one trial: a single actor, or for a gang one on each of its nodes."""

from dataclasses import replace
from types import ModuleType
from typing import TYPE_CHECKING

from ablate.execution.messages import GangPart, TrialRequest
from ablate.execution.workers.actor import Actor, WorkerFacts
from ablate.execution.workers.placement import Need, Place

if TYPE_CHECKING:
    from ray.actor import ActorHandle
    from ray.util.placement_group import PlacementGroup

_CALLS = 4
"""Concurrent calls in one actor: a call that waits for messages, one that stops the trial, and those that
move files."""


class TrialActors:
    """Actors that wait for a trial, or run one."""

    def __init__(self, ray: ModuleType, need: Need, place: Place, addresses: dict[str, str]) -> None:
        """Start the actors. `place`: number of ranks on each node, by Ray's node id; `addresses`: IP address
        of each of those nodes, by the same id."""
        self._ray, self.need, self.place = ray, need, place
        self.nodes = list(place)
        """Node id of each actor: as planned, then as the actor reports it. The first actor reports the
        trial's events."""
        self._group = self._placement_group(addresses) if need.ranks > 1 else None
        self.actors = [self._start_actor(number, node) for number, node in enumerate(self.nodes)]
        self.facts: list[WorkerFacts] | None = None
        """Answers of the actors' `describe`; None before the first one, and after a trial without a
        result."""
        for actor in self.actors:
            actor.warm.remote("cuda" if need.gpus else "cpu")

    def _placement_group(self, addresses: dict[str, str]) -> "PlacementGroup":
        """Reserve room for all ranks at once; Ray grants it when the nodes have that much free."""
        from ray.util.placement_group import placement_group

        bundles = [
            {self.need.kind: ranks * self.need.units, f"node:{addresses[node]}": 0.001}
            for node, ranks in self.place.items()
        ]
        return placement_group(bundles, strategy="STRICT_SPREAD" if bundles[1:] else "STRICT_PACK")

    def _start_actor(self, number: int, node: str) -> "ActorHandle":
        from ray.util.scheduling_strategies import (
            NodeAffinitySchedulingStrategy,
            PlacementGroupSchedulingStrategy,
        )

        if self._group:
            strategy = PlacementGroupSchedulingStrategy(self._group, placement_group_bundle_index=number)
        else:
            strategy = NodeAffinitySchedulingStrategy(node, soft=False)
        ranks = self.place[node]
        gpus = self.need.gpus
        resources = {"num_cpus": 0, "num_gpus": ranks * gpus} if gpus else {"num_cpus": ranks}
        options = {"max_restarts": 0, "max_concurrency": _CALLS, "scheduling_strategy": strategy}
        return self._ray.remote(Actor).options(**resources, **options).remote()

    def requests(self, request: TrialRequest, facts: list[WorkerFacts]) -> list[TrialRequest]:
        """Return the request for each actor: the whole trial, or the node's part of a gang. `facts`: result
        of `Actor.describe` of each actor, in the order of `actors`."""
        request = replace(request, ranks=self.need.ranks)
        if len(self.nodes) == 1:
            return [request]
        address, port = facts[0]["address"], facts[0]["port"]
        numbered = enumerate(self.place.values())
        parts = [GangPart(len(self.nodes), node, address, port, ranks) for node, ranks in numbered]
        return [replace(request, gang=part) for part in parts]

    def dismiss(self) -> None:
        """End the actors, and with them the trial's processes; release the resources."""
        for actor in self.actors:
            self._ray.kill(actor)
        if self._group:
            from ray.util.placement_group import remove_placement_group

            remove_placement_group(self._group)
