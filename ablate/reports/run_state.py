"""State of a sweep's runs in its report: how far a running sweep is, and the reasons of runs that failed."""

import time
from pathlib import Path

from ablate.reports.page import Answered
from ablate.reports.table import Source, Table, link
from ablate.results.number_text import counted
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import Member
from ablate.store.trial_store import Store
from ablate.training.own_code.user_errors import printed
from ablate.training.workloads import recorded

_LOG_LINES = 200
_MOST_REASONS = 12


def running(ledger: Ledger) -> Answered:
    """Return how many runs of a running sweep are over, and when the next and the last result are
    expected."""
    members = ledger.members()
    over = sum(member.status not in ("pending", "running") for member in members)
    text = f"{over} of {counted(len(members), 'run')} are over."
    ends = _ends(ledger, members)
    at, seconds = ledger.facts.left
    news = [f"the next result at about {_clock(min(ends))}"] if ends else []
    if seconds is not None:
        news.append(f"the last at about {_clock(max(time.time(), at + seconds, *ends))}")
    text += f" Expected: {' and '.join(news)}." if news else ""
    return Answered("Running.", text, False, running=True)


def _ends(ledger: Ledger, members: list[Member]) -> list[float]:
    """Return the moments (seconds since 1970) at which the trials that run now end at their present pace."""
    by_trial, ends = {member.trial: member for member in members}, []
    for trial, attempt in ledger.running_attempts().items():
        speed = ledger.pace(trial, attempt.started)
        if trial in by_trial and speed.steps_per_s:
            spec = by_trial[trial].resolved
            steps = recorded(spec.workload, spec.config).steps
            ends.append(max(time.time(), speed.moment + (steps - speed.step) / speed.steps_per_s))
    return ends


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
