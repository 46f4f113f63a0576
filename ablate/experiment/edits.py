"""Differences between a sweep's file when it last ran and now, in sentences for `plan` and `sweep`.

A ledger identifies an arm by its name. If two arms swap their contents, the names stay the same, although
each now stands for other trials. `redefined` therefore compares the trials themselves.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any, Protocol

from ablate.experiment.recorded_spec import RecordedSpec

_VERSIONS = {"numerics_version", "workload_version"}
_CONTENTS = ("workload", "data", "recipe")
"""Keys of a spec that depend on the file. The others change with the code and the machine."""
_MOST_NAMED = 8
"""Largest number of arms that a sentence names."""


class Identified(Protocol):
    """A trial with its id and its resolved spec: a row of a ledger, or a `PlannedTrial`."""

    @property
    def id(self) -> str: ...
    @property
    def spec(self) -> str: ...


@dataclass(frozen=True)
class PlannedTrial:
    """A trial that a file asks for: its id, and its resolved spec as JSON."""

    id: str
    spec: str


Members = Mapping[tuple[str, int], Identified]
"""Trials by arm's name and seed."""


def versions_alone(then: Mapping[str, Any], now: Mapping[str, Any]) -> set[str]:
    """Return the keys in which two specs differ if they are all versions of the code, else nothing."""
    differing = {key for key in then.keys() | now.keys() if then.get(key) != now.get(key)} - {"id"}
    return differing if differing <= _VERSIONS else set()


def redefined(before: Members, now: Members) -> list[str]:
    """Return the names of arms whose workload, recipe or data differ from before at any seed."""
    names: dict[str, None] = {}
    for (name, seed), member in now.items():
        if name not in names and (old := before.get((name, seed))) and old.id != member.id:
            then, later = (RecordedSpec.parse(one.spec).content for one in (old, member))
            if any(then.get(key) != later.get(key) for key in _CONTENTS):
                names[name] = None
    return list(names)


def redefinition(names: Collection[str]) -> str:
    """Return a sentence on arms whose contents changed since the sweep last ran."""
    listed = f"{', '.join(list(names)[:_MOST_NAMED])}{' and others' if len(names) > _MOST_NAMED else ''}"
    arms = f"{_counted(len(names), 'arm')} with the same name but other contents than before"
    kept = "earlier results are kept, but not shown under the name"
    return f"the file or its data changed: {arms}: {listed}; {kept}"


def edits(before: Members, now: Members, without: Collection[str] = (), seeds: bool = True) -> list[str]:
    """Return a sentence on added and removed arms and seeds, and one on redefined arms, each if there are
    any. `without`: names of earlier arms that are in no file, such as the rerun of a winner; `seeds`: the
    file alone decides the seeds, so that differences are edits."""
    if not before:
        return []
    earlier = {name for name, _ in before} - set(without)
    changes: dict[str, tuple[set[str] | set[int], set[str] | set[int]]]
    changes = {"arm": ({name for name, _ in now}, earlier)}
    if seeds:
        changes["seed"] = ({seed for _, seed in now}, {seed for _, seed in before})
    counts = []
    for what, (new, old) in changes.items():
        counts += [f"+{_counted(len(new - old), what)}"] if new - old else []
        counts += [f"{_counted(len(old - new), what)} no longer wanted (kept)"] if old - new else []
    names = redefined(before, now)
    return [f"changed since the last run: {', '.join(counts)}"] * bool(counts) + (
        [redefinition(names)] if names else []
    )


def _counted(count: int, what: str) -> str:
    return f"{count} {what}{'' if count == 1 else 's'}"
