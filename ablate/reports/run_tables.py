"""Tables of a report on its runs: what the arms' recipes differ in, and every run with its files."""

import json
import math

from ablate.recipes.changes import differences
from ablate.recipes.recipe import Recipe
from ablate.reports.answer_measurements import Measurements
from ablate.reports.table import Cell, Table, link
from ablate.results.number_text import number
from ablate.store.judged import Judged
from ablate.store.trial_store import Store

_MOST_FIELDS, _LONGEST_VALUE = 12, 60
"""Largest number of fields of a recipe in a cell, and characters of a value."""


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
        both = (recipes[name].model_dump(mode="json") for name in (first, arm.name))
        found = differences(*both)
        by_weight = sorted(found.items(), key=lambda item: not item[0].startswith("layers."))  # never cut
        words = [f"`{path}` {_said(then)} → {_said(now)}" for path, (then, now) in by_weight]
        more = [f"and {len(words) - _MOST_FIELDS} more fields"] if len(words) > _MOST_FIELDS else []
        text = "; ".join(words[:_MOST_FIELDS] + more)
        rows.append({"arm": arm.name, f"differs from {first} in": text if words else "(the same recipe)"})
    return Table.of(
        "recipes", rows, "Fields of the recipe, first arm → this arm; `ablate recipe diff` shows all."
    )


def _said(value: object) -> str:
    text = json.dumps(value) if not isinstance(value, str) else value
    return text if len(text) <= _LONGEST_VALUE else f"{text[:_LONGEST_VALUE]}…"


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
