"""Contents of MLflow runs, for members and sweeps: names, tags, params, colours, columns, gaps. Does not
import MLflow.

MLflow sorts metrics, params and columns by name only. A run's keys are therefore the main metric as the
ledger names it (`val/loss`), its gap to the baseline (`val/loss_gap`, and in percent), and all others below
`watch/`, which sorts after them, with folders for counts of NaN and errors of quantised operands. A knob is
named `ablate.<knob>`, which comes before `arm`, and before all that arms share. Errors of layers and products
stay in the ledger.
"""

import hashlib
import json
import math
import os
from collections.abc import Collection, Iterator, Sequence
from typing import TYPE_CHECKING

from ablate.errors import redact
from ablate.files import Json, flat
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import ArmRow, Member
from ablate.training.metric_names import DAMAGE, GUARD_STOPPED, is_added, parse, trackable

if TYPE_CHECKING:
    from ablate.training.data.corpus import DataFacts

NOTE = "mlflow.note.content"
"""Tag with the description of a run."""
PARENT = "mlflow.parentRunId"
"""Tag with the id of the run that a run is shown below."""
TURNED = "ablate."
WATCH = "watch"
"""Folder of all metrics but the main one and its gap."""
_WORKFLOW = "workflowType=machine_learning"
"""Opens MLflow 3.17 with the menu of runs in place of that of agents and traces, its default."""
VIEW = "arms"
"""Id of the saved view of a sweep's runs; `?viewStateShareKey=` opens it."""
PAGES = "ABLATE_MLFLOW_PAGES"
"""Environment variable with the server's address for browsers, if it differs from the sweep's, as it does
between containers."""
_COLOURS = ("#0173b2", "#de8f05", "#029e73", "#d55e00", "#cc78bc", "#ca9161", "#56b4e9", "#ece133", "#fbafe4")
"""Safe for colour-blind readers, as in this project's figures."""
_BASELINE_COLOUR = "#595959"
_SENT = frozenset({"flops/fp4_share", "grad/norm", "throughput/tokens_per_s", "tokens", GUARD_STOPPED})
"""Metrics that the platform adds and that every arm has, and those that end a run."""
_REPEATED = frozenset({"train/recent_loss", "val/bits_per_byte", "val/perplexity"})
"""Metrics that say again what another one says."""
_MOST_COLUMNS = 12
_WIDTHS = {"attributes.`Run Name`": 250, "runDateAndNestInfo": 100}
"""Widths of MLflow's own columns in pixels: room for an arm's name."""
_WIDE = 150
"""Width of the metric and of its gap, which are then beside them on a page of 1366 pixels."""
_MOST_OF_A_DIGEST = 36
_MOST_OF_A_NAME = 100
"""Maximum length of a dataset's name, which may be a long path."""
_MOST_CHARACTERS = 5000
"""Maximum length of an experiment's tag."""


def shown(name: str, metrics: Collection[str]) -> bool:
    """Return True for a metric that TensorBoard gets: those that compare arms, and those of every run. A name
    that MLflow refuses, such as `val/loss@nvfp4`, stays in the ledger."""
    return trackable(name) and (name in metrics or parse(name).for_tracker)


def key(name: str, metrics: Sequence[str]) -> str | None:
    """Return MLflow's key of a recorded metric; None for one that MLflow does not get.

    `metrics` are those of the experiment, the main one first. They are sent, as is what a user's own code
    records; from this package's metrics of a run, a few that all arms have, the counts of NaN, and the errors
    of quantised operands.
    """
    if name == metrics[0]:
        return _main_key(name)
    sent, parts = f"{WATCH}/{name}", parse(name)
    own = not (is_added(name) or parts.of_window or parts.slot or name in _REPEATED)
    error = parts.family == "quant" and parts.layer is None and parts.metric == "sqnr_db"
    wanted = name in metrics or name in _SENT or own or error or parts.family == "nan"
    return sent if trackable(sent) and wanted else None


def gap_key(metric: str) -> str:
    """Return MLflow's key of the gap to the baseline in the main metric, which it sorts right after."""
    return f"{_main_key(metric)}_gap"


def _main_key(metric: str) -> str:
    """Return MLflow's key of the main metric: its name without `@`, which MLflow refuses, and outside the
    folder of all others, which may have `x` beside a main metric `watch/x`."""
    plain = metric.replace("@", ".")
    return plain.replace("/", ".", 1) if plain.startswith(f"{WATCH}/") else plain


def page(server: str, experiment: str, run: str | None = None) -> str:
    """Return the address of a run's page, or of the saved view of an experiment's runs; as browsers need it,
    without password."""
    where = f"{redact(os.environ.get(PAGES) or server).rstrip('/')}/#/experiments/{experiment}/runs"
    return f"{where}/{run}?{_WORKFLOW}" if run else f"{where}?{_WORKFLOW}&viewStateShareKey={VIEW}"


# A member


def tags(member: Member, sweep: str, parent: str | None, against: str | None) -> dict[str, str]:
    """Return the tags by which a member's run is found and grouped. `against`: its baseline's name, None if
    it is a baseline."""
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
    for path, value in flat({"workload": dict(spec.config), "recipe": dict(spec.recipe or {})}, "."):
        yield path, _text(value)


def dataset(member: Member, facts: "DataFacts") -> dict[str, str]:
    """Return the fields of MLflow's Dataset for a member's data. `facts`: facts about them in the ledger."""
    name = facts["name"]
    if len(name) > _MOST_OF_A_NAME:
        name = f"{name[:_MOST_OF_A_NAME]}..."
    columns = [{"name": column, "type": kind, "required": True} for column, kind in facts["columns"].items()]
    digest = member.resolved.data
    if len(digest) > _MOST_OF_A_DIGEST:
        digest = hashlib.sha256(digest.encode()).hexdigest()[:_MOST_OF_A_DIGEST]
    return {
        "name": name,
        "digest": digest,
        "source_type": facts["type"],
        "source": json.dumps(facts["source"]),
        "schema": json.dumps({"mlflow_colspec": columns}),
        "profile": json.dumps(facts["counts"]),
    }


def _text(value: Json) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def gaps(
    ledger: Ledger, member: Member, metric: str
) -> Iterator[tuple[Member, int, float, dict[str, float]]]:
    """Yield the gaps that can be computed once this member is done: its own, or, if it is a baseline, those
    of members it serves, and its gap to itself, 0, so that no run of the sweep lacks the key. Each is
    (member, step, time, metrics), with step and time of the member's last value."""
    itself = [member] if member.against is None and member.role != "foreign" else []
    for other in [*itself, *ledger.counterparts(member.arm, member.seed)]:
        compared, baseline = (member, other) if member.baseline == other.arm else (other, member)
        last, reference = (ledger.last_record(one.trial, metric) for one in (compared, baseline))
        if last and reference and member.status == other.status == "done":
            found = _gap(gap_key(metric), last[1], reference[1])
            if ledger.facts.design:
                found |= _damage(ledger, compared, baseline)
            if found:
                yield compared, last[0], last[2], found


def _gap(key: str, value: float, baseline: float) -> dict[str, float]:
    """Return the gap in the metric's unit and in percent, which MLflow's Compare rounds less."""
    gap = value - baseline
    if not math.isfinite(gap):
        return {}
    return {key: gap} | ({f"{key}_pct": 100 * gap / abs(baseline)} if baseline else {})


def _damage(ledger: Ledger, member: Member, baseline: Member) -> dict[str, float]:
    """Return the two parts of a forked member's damage: the training's (learnt), and the cast's (direct)."""
    own, other = (
        [ledger.last_value(one.trial, name) for name in ("val/loss", "val/loss_bf16")]
        for one in (member, baseline)
    )
    if not all(map(math.isfinite, (*own, *other))):
        return {}
    learnt, total = own[1] - other[1], own[0] - other[0]
    return {f"{WATCH}/{DAMAGE}/learnt": learnt, f"{WATCH}/{DAMAGE}/direct": total - learnt}


# A sweep


def view(
    arms: Sequence[ArmRow], metrics: Sequence[str], minimize: bool, now_ms: int, forked: bool = False
) -> str | None:
    """Return the saved view of a sweep's runs in the format of MLflow's pages; None if it is too long for a
    tag.

    It lists members only, by arm with means over their seeds, in groups that are closed if there is room.
    Columns are the results, and the knobs that every arm has: none is empty. `metrics`: those of the
    experiment, the main one first; `minimize`: less of it is better; `now_ms`: time of the view, in
    milliseconds since 1970; `forked`: runs have the parts of their damage.
    """
    first, *others = filter(None, (key(name, metrics) for name in metrics))
    results = [f"metrics.`{name}`" for name in (first, gap_key(metrics[0]), *others)]
    results += [f"metrics.`{WATCH}/{DAMAGE}/{part}`" for part in ("learnt", "direct") if forked]
    knobs = [json.loads(arm.knobs) for arm in arms]
    common = [knob for knob in (knobs or [{}])[0] if all(knob in other for other in knobs)]
    state = {
        "searchFilter": "tags.`ablate.kind` = 'trial'",
        "orderByKey": results[0],
        "orderByAsc": minimize,
        "selectedColumns": [*results, *(f"params.`{TURNED}{knob}`" for knob in common[:_MOST_COLUMNS])],
        "columnOrder": [*_WIDTHS, *results],
        "columnWidths": _WIDTHS | dict.fromkeys(results[:2], _WIDE),
        "groupBy": {"aggregateFunction": "average", "groupByKeys": [{"mode": "param", "groupByData": "arm"}]},
        "runsHiddenMode": "SHOW_ALL",
        "chartsSearchFilter": f"^({'|'.join(dict.fromkeys((first, *others, f'{WATCH}/train/loss')))})$",
    }
    closed = {"groupsExpanded": {f"param.arm.{arm.name}": False for arm in arms}}
    for content in (state | closed, state):  # the names of many arms are too long: their groups are open
        text = json.dumps(content)
        found = json.dumps({"name": "Arms", "createdAt": now_ms, "updatedAt": now_ms, "state": text})
        if len(found) <= _MOST_CHARACTERS:
            return found
    return None
