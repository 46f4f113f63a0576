"""Phases of a schedule that wait for a measured condition, in runs that never met it."""

import json
import math
from collections.abc import Iterator

from ablate.recipes.recipe import Phase
from ablate.results.ledger import Ledger


def never_began(ledger: Ledger) -> Iterator[str]:
    """Yield a sentence for each phase that waits for a condition which no finished run of an arm has met."""
    waited: dict[tuple[str, str], list[tuple[int, float]]] = {}
    met = set()
    for member in ledger.members():
        spec = json.loads(member["spec"])
        for written in (spec.get("recipe") or {}).get("schedule", ()) if member["status"] == "done" else ():
            phase = Phase(start=written["start"])
            if phase.trigger is None:
                continue
            ((_, config),) = spec["workload"].items()
            series = ledger.series(member["trial"], phase.trigger.metric).items()
            looks = range(0, config["steps"], phase.trigger.every)
            seen = [value for step, value in series if step in looks]
            key = member["name"], phase.start
            if any(value < phase.trigger.limit for value in seen):
                met.add(key)
            waited.setdefault(key, []).append((member["seed"], min(seen, default=math.nan)))
    for (arm, start), runs in waited.items():
        if (arm, start) not in met:
            lowest = min(value for _, value in runs)
            where = f"the lowest value measured in {len(runs)} runs is {lowest:.4g}"
            yield f"**A phase never began:** {arm}, {start}: {where}."
