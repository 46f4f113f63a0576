"""Leaderboard: all arms of all sweeps of a state folder, by task and metric, the best gap first.

Gaps are ranked among each other only if they were measured against the same baseline: the same workload in
every field that changes a number, the same content of the data, the same recipe, engine and class of device.
Such a group is called a task.
"""

import hashlib
import json
import math
import sqlite3
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path

from ablate.errors import InputError, by_key
from ablate.experiment.recorded_spec import RecordedSpec
from ablate.experiment.yaml_document import display
from ablate.files import finite, flat
from ablate.recipes import PRESETS, Recipe
from ablate.reports.comparison_tables import NEEDED, WORD, judged
from ablate.reports.plain_text import duration, markdown_cell
from ablate.reports.table import Column, Table
from ablate.results.number_text import interval, number
from ablate.results.paired_stats import Verdict
from ablate.results.subject import source_name
from ablate.results.summary import summaries
from ablate.results.verdict_text import verdict_document
from ablate.store.checked_ledger import open_checked, refusal, unverified
from ablate.store.judged import FOREIGN
from ablate.store.ledger import Ledger
from ablate.training.workloads import WORKLOADS

_DIGITS = 8
_MOST_ALONE = 2
"""Maximum number of tables with a single arm for each sweep."""
_MOST_WORDS, _LONGEST_WORD = 6, 40
"""Maximum number and length of the fields that a title lists after name and size of a workload."""

Fields = dict[str, object]
"""Object of a trial spec, of a task or of a recipe."""


@dataclass(frozen=True)
class Entry:
    """An arm of a sweep, compared with its baseline."""

    workload: str
    """Name and size of the workload, and what distinguishes its task from others of that name and size."""
    task: str
    """Hash of everything that the baseline computes, except its seed."""
    metric: str
    minimize: bool
    arm: str
    against: str
    mean: float | None
    gap: float | None
    low: float | None
    high: float | None
    verdict: Verdict
    seeds: int
    seconds: float
    """Worker time of its trials in seconds, including trials that another sweep ran."""
    commit: str
    """Commit of the last run of the sweep, followed by `+` if there were uncommitted changes."""
    sweep: str
    shown: str
    """The gap with its interval, as text."""
    shares_trunk: bool
    """True if its trials leave a trunk that other arms leave, too. The arm that computed it has its time."""
    unverified: str
    """Sentence on the trials of its sweep whose records have no seal; empty if all have one."""

    @property
    def sort_key(self) -> tuple[str, str, str, bool, float, str, str]:
        """Sort key: workload, task, metric, then the gap, best first; entries without a gap come last."""
        gap = (self.gap or 0.0) * (1 if self.minimize else -1)
        return self.workload, self.task, self.metric, self.gap is None, gap, self.arm, self.sweep


def collect(sweeps: list[Path]) -> tuple[list[Entry], list[str]]:
    """Return all arms that have a baseline, sorted, and one line for each ledger that cannot be read."""
    entries: list[Entry] = []
    unreadable: list[str] = []
    tasks: dict[str, Fields] = {}
    for path in (folder / "ledger.db" for folder in sweeps):
        none = f"{path}: left out: no ledger of a sweep"
        try:
            with closing(open_checked(path)) as ledger:
                entries += _entries(ledger, tasks)
        except InputError as error:
            unreadable.append(f"left out: {error}")
        except sqlite3.OperationalError as error:
            unreadable.append(f"{none} ({error})")
        except sqlite3.DatabaseError as error:
            unreadable.append(f"left out: {refusal(path, str(error))}")
        except (KeyError, ValueError) as error:  # a database with tables of the same names, but other content
            why = (str(error).splitlines() or [""])[0]
            unreadable.append(f"{none} ({type(error).__name__}: {why})")
    titles = _titles({entry.task: (entry.workload, tasks[entry.task]) for entry in entries})
    entries = [replace(entry, workload=titles[entry.task]) for entry in entries]
    return sorted(entries, key=lambda entry: entry.sort_key), unreadable


def document(entry: Entry) -> dict[str, object]:
    """Return an entry as JSON has it."""
    fields = dict(vars(entry))
    return fields | {"verdict": verdict_document(fields.pop("verdict"))}


def _entries(ledger: Ledger, tasks: dict[str, Fields]) -> Iterator[Entry]:
    """Yield the compared arms of a sweep; add the fields of their tasks to `tasks`."""
    metric, name, unsealed = ledger.facts.metric, ledger.name, unverified(ledger)
    commit = ledger.facts.provenance.get("commit") or ""
    commit = commit[:_DIGITS] + ("+" if commit and ledger.facts.diff else "")
    members = by_key((member.name, member) for member in ledger.members())
    seconds = {trial.trial: trial.seconds or 0.0 for trial in ledger.wanted_trials()}
    for arm in summaries(ledger):
        if arm.gap is None or arm.baseline is None or arm.role in ("null", "bad"):
            continue
        if not members.get(arm.name) or not members.get(arm.baseline):
            continue
        spec = members[arm.baseline][0].resolved
        foreign = spec.workload == FOREIGN  # comparable within one judgement alone
        facts: Fields = (
            {"judged as": name, "against": arm.baseline} if foreign else _facts(spec, arm.baseline)
        )
        content = {key: value for key, value in facts.items() if key != "data"}  # wherever the data lie
        content["against"] = {"arm": arm.baseline} if foreign else _recipe(json.dumps(spec.recipe))
        task = hashlib.sha256(json.dumps(content, sort_keys=True).encode()).hexdigest()[:_DIGITS]
        tasks[task] = facts
        yield Entry(
            workload="runs from elsewhere" if foreign else _workload(spec),
            task=task,
            metric=metric.name,
            minimize=metric.direction == "minimize",
            arm=arm.name,
            against=arm.baseline,
            mean=finite(arm.mean),
            gap=finite(arm.gap.mean),
            low=finite(arm.gap.low),
            high=finite(arm.gap.high),
            verdict=arm.verdict,
            seeds=arm.gap.pairs,
            seconds=math.fsum(seconds[member.trial] for member in members[arm.name]),
            commit=commit,
            sweep=name,
            shown=interval(arm.gap),
            shares_trunk=bool((spec.forks or {}).get("trunk")),
            unverified=unsealed,
        )


def _workload(spec: RecordedSpec) -> str:
    """Return name and, if it has one, size of a workload: `gpt 4x128, 300 steps`."""
    name, config = spec.workload, spec.config
    if (model := config.get("model")) and "steps" in config:
        model = model.get("model_type", "model") if isinstance(model, dict) else model
        return f"{name} {model}, {config['steps']} steps"
    if not {"layers", "width", "steps"} <= config.keys():
        return name
    return f"{name} {config['layers']}x{config['width']}, {config['steps']} steps"


def _facts(spec: RecordedSpec, against: str) -> Fields:
    """Return the fields that determine a baseline, except its seed, by path; recipes by name of preset, or of
    the arm."""
    workload = _identity(spec.workload, json.dumps(spec.config))
    facts: Fields = dict(flat({key: value for key, value in workload.items() if key != "data"}, "."))
    facts |= {"data": source_name(spec.config.get("data")), "data content": spec.data}
    facts |= {"against": _preset(spec.recipe) or against, "engine": spec.engine, "device": spec.device}
    facts |= {f"{kind} version": spec.content.get(f"{kind}_version") for kind in ("workload", "numerics")}
    if forks := spec.forks:  # damage in these windows is no gap, and no damage in others
        about = {key: json.dumps(forks[key]) for key in ("positions", "windows", "anneal") if key in forks}
        trunk = forks.get("trunk") and (_preset(forks["trunk"]) or _recipe(json.dumps(forks["trunk"])))
        facts |= {f"forks.{key}": value for key, value in (about | {"trunk": trunk}).items()}
    return facts


def _preset(recipe: object) -> str | None:
    """Return the name of the preset that a recorded recipe is; None for another, and for none."""
    content = None if recipe is None else _recipe(json.dumps(recipe))
    return next((name for name, preset in _presets().items() if content == preset), None)


@cache
def _identity(workload: str, config: str) -> Fields:
    """Return the fields of a workload that change a number; all fields if this version cannot parse it."""
    try:
        return dict(WORKLOADS[workload].model_validate_json(config).identity())
    except (KeyError, ValueError):
        return json.loads(config)


@cache
def _recipe(content: str) -> Fields:
    """Return a recipe with all fields of this version; unchanged if this version cannot parse it."""
    try:
        return Recipe.model_validate_json(content).model_dump(mode="json")
    except ValueError:
        return json.loads(content)


@cache
def _presets() -> dict[str, Fields]:
    return {name: make().model_dump(mode="json") for name, make in PRESETS.items()}


def _titles(tasks: Mapping[str, tuple[str, Fields]]) -> dict[str, str]:
    """Return a unique title for each task: name and size, then the fields that distinguish it from tasks of
    the same size."""
    titles = {}
    for size, group in by_key((size, task) for task, (size, _) in tasks.items()).items():
        for task, fields in zip(group, _differences([tasks[task][1] for task in group]), strict=True):
            more = [f"and {len(fields) - _MOST_WORDS} more fields"] if fields[_MOST_WORDS:] else []
            titles[task] = ", ".join((size, *fields[:_MOST_WORDS], *more))
    counts = Counter(titles.values())
    return {task: f"{text} ({task})" if counts[text] > 1 else text for task, text in titles.items()}


def _differences(group: list[Fields]) -> Iterator[list[str]]:
    """Yield, for each task of a group, the fields in which tasks of the group differ."""
    values = {key: {_word(facts.get(key)) for facts in group} for facts in group for key in facts}
    keys = [key for key, texts in values.items() if len(texts) > 1]
    if "data" in keys and len(values["data"]) == len(values["data content"]):
        keys.remove("data content")  # the names already distinguish them
    for facts in group:
        yield [f"{key} {_word(facts[key])}" if key in facts else f"{key} default" for key in keys]


def _word(value: object) -> str:
    text = value if isinstance(value, str) else display(value)
    return text if len(text) <= _LONGEST_WORD else f"{text[:_LONGEST_WORD]}..."


def nothing(entries: list[Entry], workload: str | None, metric: str | None) -> str:
    if not entries:
        return "no arm has been compared with a baseline yet"
    wanted = {"workload": workload, "metric": metric}
    filters = " and ".join(f"{key} {value!r}" for key, value in wanted.items() if value)
    available = sorted({f"{entry.workload} by {entry.metric}" for entry in entries})
    return f"no arm was compared for {filters}; there are {'; '.join(available)}"


def tables(entries: list[Entry]) -> dict[str, Table[Entry]]:
    """Return the tables of the entries, by title."""
    return {heading: _table(group) for heading, group in groups(entries).items()}


def _table(group: list[Entry]) -> Table[Entry]:
    halves = [entry.high - entry.gap for entry in group if entry.high is not None and entry.gap is not None]
    finest = min(filter(None, halves), default=math.nan)  # half of the narrowest interval: means resolve it
    columns: list[Column[Entry]] = [
        Column("arm", lambda entry: entry.arm),
        Column("against", lambda entry: entry.against),
        Column("mean", lambda entry: "-" if entry.mean is None else (number(entry.mean, finest), entry.mean)),
        Column("gap", lambda entry: entry.shown if entry.gap is None else (entry.shown, entry.gap)),
        Column("seeds", lambda entry: entry.seeds),
        WORD,
        NEEDED,
        Column("cost", lambda entry: (duration(entry.seconds), entry.seconds)),
        Column("commit", lambda entry: entry.commit or "-"),
        Column("sweep", lambda entry: entry.sweep),
    ]
    shared = "cost: the time of a trunk that arms share is in that of the arm whose trials computed it."
    return judged("leaderboard", group, columns, shared * any(entry.shares_trunk for entry in group))


def groups(entries: list[Entry]) -> dict[str, list[Entry]]:
    """Group entries by the title of their table: a task and a metric. A search over workload knobs has one
    task for each point. Its arms that are alone in their task are listed in one table, by name, under a title
    that says that they are not ranked."""
    found = by_key((f"{entry.workload}: {_better(entry)}", entry) for entry in entries)
    alone: dict[str, list[str]] = {}
    for heading, (entry, *others) in found.items():
        if not others:
            apart = f"{entry.sweep}: {_better(entry)}, each arm on a workload of its own: not ranked"
            alone.setdefault(apart, []).append(heading)
    for apart, headings in alone.items():
        if len(headings) > _MOST_ALONE:
            found[apart] = sorted((found.pop(each)[0] for each in headings), key=lambda entry: entry.arm)
    return found


def _better(entry: Entry) -> str:
    return f"{entry.metric} ({'lower' if entry.minimize else 'higher'} is better)"


def unsealed(entries: list[Entry]) -> list[str]:
    """Return a line for each sweep with trials whose records have no seal."""
    return [*dict.fromkeys(f"{entry.sweep}: {entry.unverified}" for entry in entries if entry.unverified)]


def markdown(entries: list[Entry]) -> Iterator[str]:
    for heading, table in tables(entries).items():
        yield from (f"### {markdown_cell(heading)}", "", table.markdown(), "")
    yield from (f"{markdown_cell(line)}  " for line in unsealed(entries))
