"""The facts of a report in index.json: its question, its answer, and the state that it shows."""

import hashlib
import json
from pathlib import Path
from typing import Any

from ablate.results.ledger import Ledger

ABOUT = "index.json"
"""File of a report with its question, its answer and the state that it shows."""


def stamp(ledger: Ledger) -> str:
    """Return a hash of the state of a sweep: its experiment file and the status of each run."""
    runs = [(member.name, member.seed, member.id, member.status) for member in ledger.members()]
    content = [ledger.fact("experiment.yaml"), runs]
    return hashlib.sha256(json.dumps(content).encode()).hexdigest()[:16]


def about(report: Path) -> dict[str, Any]:
    """Return what a report says about itself; {} without a report.

    Args:
        report: folder of the report.
    """
    file = report / ABOUT
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}


def current(report: Path, ledger: Ledger) -> dict[str, Any]:
    """Return what a report says about itself if it shows the present state of the sweep, else {}."""
    found = about(report)
    return found if found and found["stamp"] == stamp(ledger) else {}
