"""Tables and sentences of a report on its runs: how far a running sweep is, why runs failed, what the arms'
recipes differ in, and every run with its files."""

import math
import time
from pathlib import Path

from ablate.recipes.recipe import Recipe
from ablate.recipes.recipe_text import differences, used
from ablate.reports.answer_measurements import Measurements
from ablate.reports.page import Answered
from ablate.reports.table import Cell, Source, Table, link
from ablate.results.number_text import counted, number
from ablate.store.judged import Judged
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member
from ablate.store.trial_store import Store
from ablate.training.own_code.user_errors import printed

_LOG_LINES = 200
_MOST_REASONS = 12
_MOST_FIELDS = 12
"""Largest number of fields of a recipe in a cell."""


def running(ledger: Ledger) -> Answered:
    """Return how many runs of a running sweep are over, and when the next and the last result are
    expected."""
    members = ledger.members()
    over = sum(member.status not in ("pending", "running") for member in members)
    text = f"{over} of {counted(len(members), 'run')} are over."
    by_trial, now, ends = {member.trial: member for member in members}, time.time(), []
    for trial, attempt in ledger.running_attempts().items():
        speed = ledger.pace(trial, attempt.started)
        if trial in by_trial and speed.steps_per_s:
            left = speed.seconds_left(by_trial[trial].resolved.steps) or 0.0
            ends.append(max(now, speed.moment + left))
    at, seconds = ledger.facts.left
    news = [f"the next result at about {_clock(min(ends))}"] if ends else []
    if seconds is not None:
        news.append(f"the last at about {_clock(max(now, at + seconds, *ends))}")
    text += f" Expected: {' and '.join(news)}." if news else ""
    return Answered("Running.", text, "running")


def _clock(moment: float) -> str:
    """Return a moment as a time of this day, or with its date."""
    same = time.localtime(moment)[:3] == time.localtime()[:3]
    return time.strftime("%H:%M" if same else "%Y-%m-%d %H:%M", time.localtime(moment))


def failures_table(ledger: Ledger, report: Path | None) -> Table | None:
    """Return the table of distinct reasons for failed runs, each with the line of the user's code that raised
    the exception, or else the last line of the log; None if no run failed.

    `report`: folder of the report's figures, from which links lead to the state folder; None: no links.
    """
    store = Store(ledger.path.absolute().parents[2])
    reasons: dict[object, list[tuple[Member, str]]] = {}
    for member in ledger.members():
        if member.status in ("failed", "oom"):
            reason = member.reason or member.status
            log = store.log_tail(member.id, store.attempts(member.id), _LOG_LINES).splitlines()
            error = printed(log)
            if error:
                code = [line.strip() for line in error.frames if line.strip(" ^~")][-1]
                last = f"`{code}` ({Path(error.file).name}:{error.line})"
            else:
                last = next((line.strip() for line in reversed(log) if line.strip() not in ("", reason)), "")
            key = error.identity if error else reason
            reasons.setdefault(key, []).append((member, last))
    columns: dict[str, Source] = {
        "failed runs": len,
        "reason": lambda those: those[0][0].reason or those[0][0].status,
        "last line": lambda those: those[0][1],
        "log": lambda those: link(store.log(those[0][0].id, store.attempts(those[0][0].id)), report),
    }
    rows = sorted(reasons.values(), key=len, reverse=True)[:_MOST_REASONS]
    more = len(reasons) - len(rows)
    return Table.by_columns("failures", rows, columns, f"{counted(more, 'more reason')}." if more else "")


def recipes_table(sweep: Measurements) -> Table | None:
    """Return the table of what each arm's recipe has that the first one's has not; None for fewer than
    two."""
    recipes: dict[str, Recipe] = {}
    for member in sweep.ledger.members():
        content = member.resolved.recipe
        if content is not None and member.name not in recipes:
            recipes[member.name] = Recipe.model_validate(content, strict=False)
    named = [arm for arm in sweep.shown if arm.name in recipes and arm.gap is not None]
    quantised = [arm for arm in named if not recipes[arm.name].plain and arm.role == "listed"]
    if len(named) < 2 or not quantised:
        return None
    first = quantised[0].name
    rows: list[dict[str, Cell]] = []
    for arm in named:
        both = recipes[first], recipes[arm.name]
        found = differences(*(recipe.model_dump(mode="json") for recipe in both))
        by_weight = sorted(found, key=lambda one: not one[0].startswith("layers."))  # never cut
        words = []
        for path, *texts in by_weight:
            listed = [_listed(recipe, path) for recipe in both]
            then, now = texts if listed[0] == listed[1] else listed
            words.append(f"`{path}` {then} → {now}")
        more = [f"and {len(words) - _MOST_FIELDS} more fields"] if len(words) > _MOST_FIELDS else []
        text = "; ".join(words[:_MOST_FIELDS] + more)
        rows.append({"arm": arm.name, f"differs from {first} in": text if words else "(the same recipe)"})
    return Table.of(
        "recipes", rows, "Fields of the recipe, first arm → this arm; `ablate recipe diff` shows all."
    )


def _listed(recipe: Recipe, path: str) -> str:
    """Return rules for layers, or phases, in words; empty for another field."""
    if path == "layers.rules":
        return ", ".join(f"{rule.match}: {used(rule.use)}" for rule in recipe.layers.rules) or "none"
    if path == "schedule":
        return ", ".join(f"from {phase.start}: {used(phase.use)}" for phase in recipe.schedule) or "none"
    return ""


def runs_table(sweep: Measurements) -> Table:
    """Return the table of every run, with links from the report's folder to its specification and log."""
    ledger, metric, report = sweep.ledger, sweep.metric, sweep.out
    store = Store(ledger.path.absolute().parents[2])
    lasts = ledger.finals(lambda name: str(name) == metric.name)
    judged = Judged.of(ledger)
    seeded = judged is None or judged.seeded
    rows: list[dict[str, Cell]] = []
    for member in ledger.members():
        value = lasts.get(member.trial, {}).get(metric.name, math.nan)
        elsewhere = member.resolved.content.get("run")
        rows.append(
            {
                "arm": member.name,
                **({"run": str(elsewhere)} if elsewhere else {}),
                "seed": (str(member.seed), member.seed) if seeded or not elsewhere else "",
                "status": member.status,
                metric.name: "" if math.isnan(value) else (number(value), value),
                "seconds": (f"{member.seconds:.1f}", member.seconds) if member.seconds else "",
                "trial": member.id,
                "specification": link(store.folder(member.id) / "spec.json", report),
                "log": link(store.log(member.id, store.attempts(member.id)), report),
                "reason": member.reason or "",
            }
        )
    return Table.of("runs", rows)
