"""Runs of sources that have one run in one place: a log, an event folder, a run of a tracker.

Each has a name, points and perhaps a configuration. Arm and seed come from the pattern of its path, from the
pattern of its name, or from fields of its configuration, in this order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ablate.errors import InputError, brief, nearest
from ablate.files import Json
from ablate.judging import cells
from ablate.judging.columns import Columns, is_rate, metric_columns, pick
from ablate.judging.names import fields_of, is_misfit, read_name, seed_of
from ablate.judging.points import Points
from ablate.judging.run import ForeignRun
from ablate.judging.statuses import status_columns, with_status

_IDENTITY = ("arm", "seed")


@dataclass(frozen=True)
class NamedRun:
    """One run as its source has it."""

    where: str
    """Source and name, for sentences."""
    name: str
    """Name of the run in the source."""
    points: Points
    """Its values."""
    config: Mapping[str, Json] = field(default_factory=dict)
    """Its configuration, flat."""
    status: str = "done"
    """As in `ForeignRun`."""


def identified(runs: Sequence[NamedRun], where: str, columns: Columns, said: list[str]) -> list[ForeignRun]:
    """Return the runs of one place with arm and seed; sentences on what was guessed are added to `said`.

    InputError if an arm or a metric cannot be told without doubt.
    """
    misfits = [ForeignRun.misfit(run.where) for run in runs if is_misfit(columns, run.name)]
    runs = [run for run in runs if not is_misfit(columns, run.name)]
    if not runs:
        return misfits
    names = [*dict.fromkeys(name for run in runs for name in run.config)]
    cells_of = {name: [run.config.get(name) for run in runs] for name in names}
    states = status_columns([name for name in names if name not in (columns.arm, columns.seed)], cells_of)
    roles: dict[str, str] = {}
    for role in _IDENTITY:
        given = getattr(columns, role)
        if given is None and role in {*fields_of(columns.name), *columns.of_path}:
            continue
        column = pick(role, given, names, where, said)
        if column is not None:
            roles[role] = column
        elif role == "arm":
            raise InputError(
                f"{where}: nothing says the arm of {runs[0].name!r}: give a pattern of the path, such as"
                ' logs/{arm}/seed{seed}.log, or of the name, such as --name "{arm}-s{seed}"'
                + (f", or a field of the configuration; {nearest('arm', names)}" if names else "")
            )
        else:
            said.append(f"{where}: seed: nothing says it; runs have no seed")
    renamed: dict[str, str] = {}
    for ours, theirs in (columns.metrics or {}).items():
        seen = sorted({name for run in runs for name in run.points.records()})
        if theirs not in seen:
            raise InputError(f"{where}: no metric {brief(theirs)!r} for {ours}; {nearest(theirs, seen)}")
    identified_runs = []
    for run in runs:
        fields = dict(columns.of_path)
        if columns.name:
            fields |= read_name(columns.name, run.name, run.where)
        for role, column in roles.items():
            value = run.config.get(column)
            if cells.is_empty(value):
                raise InputError(f"{run.where}: the {role} ({brief(column)}) is not in its configuration")
            fields[role] = str(value).strip()
        records = run.points.records()
        if columns.metrics is not None:
            named = {name: name for name in records if is_rate(name)} | dict(columns.metrics)
        else:
            named = metric_columns(columns, [*records], run.where, [])
            renamed |= {theirs: ours for ours, theirs in named.items() if ours != theirs}
        records = {ours: records[theirs] for ours, theirs in named.items() if theirs in records}
        config = {**run.config, **{key: value for key, value in fields.items() if key not in _IDENTITY}}
        config = {key: value for key, value in config.items() if key not in roles.values()}
        seed = seed_of(fields.get("seed"), run.where)
        foreign = ForeignRun(run.where, fields["arm"], seed, records, config, run.status)
        own = {name: [run.config.get(name)] for name in states}
        identified_runs.append(with_status(foreign, states, own))
    said += [f"{where}: metric {ours}: {brief(theirs)!r}" for theirs, ours in renamed.items()]
    said += [sentence for run in runs for sentence in run.points.sentences()]
    return identified_runs + misfits
