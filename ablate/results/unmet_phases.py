"""Phases of a schedule that start at a measured condition, in sweeps whose runs never met it."""

import math
from collections.abc import Iterator

from ablate.recipes.recipe import Phase
from ablate.store.ledger import Ledger


def never_began(ledger: Ledger) -> Iterator[str]:
    """Yield a sentence for each phase whose condition no finished run of an arm has met."""
    # Lowest finite value of the phase's metric in each run, by arm and start of the phase.
    lowest: dict[tuple[str, str], list[float]] = {}
    met = set()
    for member in ledger.members():
        spec = member.resolved
        for written in (spec.recipe or {}).get("schedule", ()) if member.status == "done" else ():
            phase = Phase(start=written["start"])
            if phase.trigger is None:
                continue
            series = ledger.series(member.trial, phase.trigger.metric).items()
            checked_steps = range(0, spec.config["steps"], phase.trigger.every)
            checked = [value for step, value in series if step in checked_steps]
            key = member.name, phase.start
            if any(value < phase.trigger.limit for value in checked):
                met.add(key)
            lowest.setdefault(key, []).append(min(filter(math.isfinite, checked), default=math.inf))
    for (arm, start), values in lowest.items():
        if (arm, start) not in met:
            reason = f"the lowest value measured in {len(values)} runs is {min(values):.4g}"
            if min(values) == math.inf:
                reason = f"no finite value was measured in {len(values)} runs"
            yield f"**A phase never began:** {arm}, {start}: {reason}."
