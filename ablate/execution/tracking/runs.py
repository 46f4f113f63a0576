"""Contents of MLflow runs, for members and sweeps: names, tags, params, colours, columns, gaps. Does not
import MLflow.

MLflow sorts params and columns by name only. A knob is therefore named `ablate.<knob>`, which comes before
`arm`, and before everything that all arms share.
"""

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterable, Iterator
from typing import TypedDict

from ablate.errors import redact
from ablate.files import Json
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member
from ablate.training.metric_names import DAMAGE, GAP, Name, parse, trackable
from ablate.training.workloads import unit

NOTE = "mlflow.note.content"
"""Tag with the description of a run."""
PARENT = "mlflow.parentRunId"
"""Tag with the id of the run that a run is shown below."""
TURNED = "ablate."
VIEW = "arms"
"""Id of the saved view of a sweep's runs; `?viewStateShareKey=` opens it."""
PAGES = "ABLATE_MLFLOW_PAGES"
"""Environment variable with the server's address for browsers, if it differs from the sweep's, as it does
between containers.
"""
_COLOURS = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#56b4e9", "#ece133", "#fbafe4")
"""Safe for colour-blind readers, as in this project's figures."""
_BASELINE_COLOUR = "#595959"
_MOST_COLUMNS = 12
_MOST_OF_A_DIGEST = 36
_MOST_OF_A_NAME = 100
"""Maximum length of a dataset's name, which may be a long path."""
_MOST_CHARACTERS = 5000
"""Maximum length of an experiment's tag."""


def shown(name: str, metrics: Collection[str]) -> bool:
    """Return True for a metric that goes to MLflow: those that compare arms, and those of every run.

    A name that MLflow refuses, such as `val/loss@nvfp4`, stays in the ledger.
    """
    return trackable(name) and (name in metrics or parse(name).for_tracker)


def page(server: str, experiment: str, run: str | None = None) -> str:
    """Return the address of a run's page, or of the saved view of an experiment's runs; as browsers need it,
    without password.
    """
    where = f"{redact(os.environ.get(PAGES) or server).rstrip('/')}/#/experiments/{experiment}"
    return (
        f"{where}/runs/{run}"
        if run
        else f"{where}/runs?workflowType=machine_learning&viewStateShareKey={VIEW}"
    )


# A member


def tags(member: Member, sweep: str, parent: str | None, against: str | None) -> dict[str, str]:
    """Return the tags by which a member's run is found and grouped. `against`: its baseline's name, None if
    it is a baseline.
    """
    spec = member.resolved
    found = {
        PARENT: parent,
        "mlflow.runColor": _BASELINE_COLOUR if against is None else _COLOURS[member.arm % len(_COLOURS)],
        "ablate.kind": "trial",
        "ablate.sweep": sweep,
        "ablate.arm": member.name,
        "ablate.seed": str(member.seed),
        "ablate.knobs": member.knobs,
        "ablate.member": member.key,
        "ablate.baseline": str(against is None).lower(),
        "ablate.against": against,
        "ablate.role": member.role,
        "ablate.trial": member.id,
        "ablate.engine": spec.engine,
        "ablate.device": spec.device,
        "ablate.reused": str(member.reused).lower(),
        "ablate.status": member.status,
        "ablate.optuna_trial": None if member.optuna is None else str(member.optuna),
    }
    return {key: value for key, value in found.items() if value is not None}


def params(member: Member) -> Iterator[tuple[str, str]]:
    """Yield the knobs, then every resolved value by its path."""
    spec = member.resolved
    for knob, value in json.loads(member.knobs).items():
        yield f"{TURNED}{knob}", _text(value)
    yield "arm", member.name
    yield "seed", str(member.seed)
    yield "workload", spec.workload
    yield "data", spec.data
    yield from _flat("workload", dict(spec.config))
    yield from _flat("recipe", dict(spec.recipe or {}))


class LoggedData(TypedDict):
    """Facts about a source of data, as the ledger stores them: the result of `training.data.facts.facts`."""

    name: str
    type: str
    """local, hugging_face or package."""
    source: dict[str, str]
    columns: dict[str, str]
    """Type by name of column."""
    counts: dict[str, int]


def dataset(member: Member, facts: LoggedData) -> dict[str, str]:
    """Return the fields of MLflow's Dataset for a member's data. `facts`: facts about them in the ledger."""
    name = facts["name"]
    if len(name) > _MOST_OF_A_NAME:
        name = f"{name[:_MOST_OF_A_NAME]}..."
    columns = [{"name": column, "type": kind, "required": True} for column, kind in facts["columns"].items()]
    data = member.resolved.data
    return {
        "name": name,
        "digest": data
        if len(data) <= _MOST_OF_A_DIGEST
        else hashlib.sha256(data.encode()).hexdigest()[:_MOST_OF_A_DIGEST],
        "source_type": facts["type"],
        "source": json.dumps(facts["source"]),
        "schema": json.dumps({"mlflow_colspec": columns}),
        "profile": json.dumps(facts["counts"]),
    }


def _flat(path: str, value: Json) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}", inner)
    else:
        yield path, _text(value)


def _text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def gaps(
    ledger: Ledger, member: Member, metric: str
) -> Iterator[tuple[Member, int, float, dict[str, float]]]:
    """Yield the gaps that can be computed once this member is done: its own, or, if it is a baseline, those
    of members it serves.

    Each is (member, step, time, metrics), with step and time of the member's last value.
    """
    forked = bool(ledger.facts.design)
    for other in ledger.counterparts(member.arm, member.seed):
        compared, baseline = (member, other) if member.baseline == other.arm else (other, member)
        last, reference = (ledger.last_record(one.trial, metric) for one in (compared, baseline))
        if last and reference and member.status == other.status == "done":
            found = (
                _damage(ledger, compared, baseline)
                if forked
                else _gap(unit(member.resolved.workload, metric), last[1], reference[1])
            )
            if found:
                yield compared, last[0], last[2], found


def _gap(counted: str, value: float, baseline: float) -> dict[str, float]:
    """Return the gap in the metric's unit, or as `absolute` if that has no name, and in percent."""
    gap = value - baseline
    if not math.isfinite(gap):
        return {}
    return {gap_in(counted): gap} | ({gap_in("pct"): 100 * gap / abs(baseline)} if baseline else {})


def gap_names(ledger: Ledger, unit: str) -> tuple[str, ...]:
    """Return the names of the metrics that compare a sweep's members with their baselines."""
    if ledger.facts.design:
        return tuple(str(Name(DAMAGE, None, None, name)) for name in ("total", "learnt", "direct"))
    return gap_in(unit), gap_in("pct")


def _damage(ledger: Ledger, member: Member, baseline: Member) -> dict[str, float]:
    """Return the damage of a forked member: its total, the training's (learnt), and the cast's (direct)."""
    own, other = (
        [ledger.last_value(one.trial, name) for name in ("val/loss", "val/loss_bf16")]
        for one in (member, baseline)
    )
    if not all(map(math.isfinite, (*own, *other))):
        return {}
    learnt, total = own[1] - other[1], own[0] - other[0]
    return dict(zip(gap_names(ledger, ""), (total, learnt, total - learnt), strict=True))


def gap_in(unit: str) -> str:
    """Return the name of a member's gap to its baseline in a unit; `absolute` for a metric whose unit has no
    name.
    """
    return str(Name(GAP, None, None, unit or "absolute"))


# A sweep


def view(
    knobs: Iterable[str],
    metric: str,
    metrics: Iterable[str],
    gaps: Iterable[str],
    minimize: bool,
    now_ms: int,
) -> str | None:
    """Return the saved view of a sweep's runs in the format of MLflow's pages; None if it is too long for a
    tag.

    It lists members only, grouped by arm with means over their seeds; columns are knobs and results.
    """
    metrics = list(metrics)
    columns = [f"params.`{TURNED}{knob}`" for knob in knobs][:_MOST_COLUMNS]
    columns += [
        "tags.`ablate.status`",
        *(f"metrics.`{key}`" for key in (*metrics, *gaps)),
    ]
    state = {
        "searchFilter": "tags.`ablate.kind` = 'trial'",
        "orderByKey": f"metrics.`{metric}`",
        "orderByAsc": minimize,
        "selectedColumns": columns,
        "groupBy": {
            "aggregateFunction": "average",
            "groupByKeys": [{"mode": "param", "groupByData": "arm"}],
        },
        "runsHiddenMode": "SHOW_ALL",
        "chartsSearchFilter": f"^({'|'.join(dict.fromkeys((*metrics, 'train/loss')))})$",
    }
    found = json.dumps({"name": "Arms", "createdAt": now_ms, "updatedAt": now_ms, "state": json.dumps(state)})
    return found if len(found) <= _MOST_CHARACTERS else None
