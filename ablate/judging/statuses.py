"""Status of a run in the words of its source: only words that are known to mean done count as done.

    State       finished, COMPLETED, TrialState.COMPLETE    any other word: the run is not done
    exit_code   0, or SLURM's 0:0                           any other number
    finished    true, yes, 1                                false, no, 0; the reverse for `failed`

A number or a truth value in a column of words means nothing known, so the run is not done. TERMINATED is
done in tables of Ray Tune alone: elsewhere it is a machine that was taken away. An empty cell is done unless
the column says of another run that it is done: some tables note failures alone.
"""

import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from ablate.files import Json
from ablate.judging import cells
from ablate.judging.columns import plain
from ablate.judging.run import ForeignRun

_WORDS = re.compile(
    r"(run|job|trial|task|process|experiment|exp|train|training|final|end|completion|lifecycle|result|info"
    r"|attributes|slurm|wandb|mlflow|ray)?(state|status)"
)
_CODES = re.compile(r"(job)?(exitcode|exitstatus|returncode)")
_GOOD = re.compile(r"finished|completed?|done|success|succeeded")
_BAD = re.compile(r"failed|crashed|killed|preempted|aborted|cancell?ed")
"""Names of columns of truth values, by what true means."""
_TRUE, _FALSE = ("true", "yes", "1", "1.0"), ("false", "no", "0", "0.0")
_DONE = re.compile(r"(\w+\.)?(done|finish(ed)?|completed?|success(ful)?|succeeded|ok(ay)?|passed)")
"""Words that mean done, such as `TrialState.COMPLETE`."""
_RUNNING = re.compile(r"running|pending|queued|scheduled|start(ing|ed)|waiting|false|no|0|0\.0")
"""Words that a later row of the same run may replace by one that means done."""
_EMPTY = frozenset(["", "-", "nan", "none", "null", "n/a", "na"])
Cells = Mapping[str, Sequence[Json]]
"""Cells of each column."""


def known(name: str) -> str:
    """Return a column's name as lists of known names have it: `jobstate` for `Job state` and `job.State`."""
    return re.sub(r"[^a-z0-9]", "", plain(name))


def status_columns(names: Collection[str], columns: Cells) -> dict[str, dict[str, bool]]:
    """Return those of `names`, columns without another role, that say how runs ended.

    For each of a column's texts, True if it means done. A column of flags has truth values alone.
    """
    by_ray = any(known(name) == "trainingiteration" for name in columns)
    found = {}
    for name in names:
        if not any(form.fullmatch(known(name)) for form in (_WORDS, _CODES, _GOOD, _BAD)):
            continue
        texts = {_text(cell) for cell in columns[name]} - {""}
        done = {text: _means_done(known(name), text, by_ray) for text in texts}
        if done and None not in done.values():
            found[name] = {text: value is True for text, value in done.items()}
    return found


def with_status(run: ForeignRun, columns: Mapping[str, Mapping[str, bool]], own: Cells) -> ForeignRun:
    """Return a run with the status that its own cells say, and without these columns among its settings."""
    against = {} if run.status == "done" else {"State": run.status}
    for name, done in columns.items():
        texts = [text for cell in own[name] if (text := _text(cell))]
        failures = [text for text in texts if not (done[text] or _RUNNING.fullmatch(text.lower()))]
        said = any(done.values()) or bool(texts)
        if failures or said > any(done[text] for text in texts):
            against[name] = (failures or texts or [""])[-1]
    failed = not all(map(_RUNNING.fullmatch, map(str.lower, against.values())))
    config = {name: value for name, value in run.config.items() if name not in columns}
    status = "done" if not against else "failed" if failed else "running"
    return replace(run, config=config, status=status, states=against)


def _text(cell: Json) -> str:
    text = "" if cells.is_empty(cell) else str(cell).strip()
    return "" if text.lower() in _EMPTY else text


def _means_done(key: str, text: str, by_ray: bool) -> bool | None:
    """Return True for a text that means done in a column of this name; None if it is none of a status."""
    word = text.lower()
    if _WORDS.fullmatch(key) or _CODES.fullmatch(key):
        code = _CODES.fullmatch(key) and word in ("0", "0.0", "0:0")
        return bool(code or _DONE.fullmatch(word)) or (by_ray and text == "TERMINATED")
    good = bool(_GOOD.fullmatch(key))
    return (word in _TRUE) is good if (good or _BAD.fullmatch(key)) and word in _TRUE + _FALSE else None
