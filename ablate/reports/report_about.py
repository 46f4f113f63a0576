"""The facts of a report in index.json: its question, its answer, and the state that it shows."""

import hashlib
import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from ablate.cache import key_of
from ablate.files import Json, read_json, write
from ablate.store.ledger import Ledger

ABOUT = "index.json"
"""File of a report with its question, its answer and the state that it shows."""


def stamp(ledger: Ledger) -> str:
    """Return a hash of the state of a sweep: its experiment file and the status of each run."""
    runs = [(member.name, member.seed, member.id, member.status) for member in ledger.members()]
    content = [ledger.facts.text, runs]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def about(report: Path) -> dict[str, Any]:
    """Return what a report says about itself; {} without a report, or if the file is not what was written."""
    with suppress(OSError, ValueError):  # no file, or not one
        found = read_json(report / ABOUT)
        if found.pop("seal", None) == key_of(found):
            return found
    return {}


def write_about(report: Path, content: Mapping[str, Json]) -> None:
    """Write what a report says about itself, question, answer and the state that it shows, with a hash of
    it."""
    write(report / ABOUT, {**content, "seal": key_of(content)})


def current(report: Path, ledger: Ledger) -> dict[str, Any]:
    """Return what a report says about itself if it shows the present state of the sweep, else {}."""
    found = about(report)
    return found if found.get("stamp") == stamp(ledger) else {}
