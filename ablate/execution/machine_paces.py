"""Pace of trials on this machine, kept in the cache from one state folder to the next.

The problem: a new state folder has no finished trial, and a workload's cost is that of an average processor
core, whatever the machine and its kernels. The first estimate could be wrong by a factor of five on a
machine that had run the same recipes an hour before.

The idea: at the end of a sweep, the trials that ran here leave seconds over cost, by load (workload, recipe,
size), in one small file for this processor, class of device and version of the package. `TimeModel.recall`
uses them where the state folder has nothing as near.

Not kept: trials of a user's own code, whose cost is a guess, and trials of a cluster, which ran elsewhere.
The file can be deleted at any time.
"""

import json
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import asdict

from ablate import __version__, cache, provenance
from ablate.execution.estimate import Load
from ablate.experiment.load import Experiment
from ablate.files import lock, write

_MOST_LOADS, _MOST_RATIOS = 300, 8


class MachinePaces:
    """Seconds over cost of trials that ran on this machine, by load."""

    def __init__(self, device: str) -> None:
        """`device`: class of device, `cpu` or `cuda`."""
        name = cache.key_of("paces", __version__, provenance.cpu_model(), device)
        self._path = cache.root() / "paces" / f"{name}.json"

    @classmethod
    def of(cls, experiment: Experiment, device: str, cluster: bool) -> "MachinePaces | None":
        """Return the paces that an experiment's trials can be compared with; None if there are none.

        Args:
            experiment: the experiment.
            device: class of device, `cpu` or `cuda`.
            cluster: True if the trials run on a cluster, whose machines may be others.
        """
        return None if cluster or experiment.base.config.own_code else cls(device)

    def read(self) -> list[tuple[Load, float]]:
        """Return load and seconds over cost of each remembered trial, oldest first; nothing from a damaged
        file.
        """
        found: list[tuple[Load, float]] = []
        for entry in self._entries():
            with suppress(KeyError, TypeError, ValueError):
                fields = entry["load"]
                load = Load(**{**fields, "kind": tuple(fields["kind"])})
                found += [(load, float(ratio)) for ratio in entry["ratios"]]
        return found

    def keep(self, learnt: Iterable[tuple[Load, float]]) -> None:
        """Add load and seconds over cost of trials that have run here. Does nothing if the cache cannot be
        written: an estimate is worth no error.
        """
        new: dict[Load, list[float]] = {}
        for load, ratio in learnt:
            new.setdefault(load, []).append(ratio)
        if not new:
            return
        with suppress(OSError), lock(self._path.with_suffix(".lock")):
            known: dict[Load, list[float]] = {}
            for load, ratio in self.read():
                known.setdefault(load, []).append(ratio)
            for load, ratios in new.items():  # those of now come last
                known[load] = [*known.pop(load, []), *ratios][-_MOST_RATIOS:]
            entries = [{"load": asdict(load), "ratios": ratios} for load, ratios in known.items()]
            write(self._path, {"time": time.time(), "paces": entries[-_MOST_LOADS:]})

    def _entries(self) -> list[dict]:
        with suppress(OSError, ValueError):
            content = json.loads(self._path.read_bytes())
            if isinstance(content, dict) and isinstance(content.get("paces"), list):
                return content["paces"]
        return []
