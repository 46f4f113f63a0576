"""All records of one or several experiments as one tidy frame, with a cache beside the ledger.

The records of a finished trial never change, so they are cached as Parquet in `records/`, one file for all
trials that were new at a call, and only the rest is read from the ledger: ten million rows take seconds. A
file names the trials and metrics that its numbers stand for, since a ledger that is rebuilt numbers them
anew.
"""

import hashlib
import json
import sys
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ablate.experiment.recorded_spec import RecordedSpec
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import FINISHED, Member
from ablate.training.metric_names import parse
from ablate.training.workloads import WORKLOADS

_WORTH_KEEPING = 1_000_000
"""Smallest number of rows that is cached. Fewer are read from the ledger as fast as from a file."""
_NULL = -sys.float_info.max
"""Number in place of NULL until the rows are an array, which has no None."""
_FIRST = ("sweep", "arm", "baseline", "seed", "trial", "status", "step", "tokens", "metric", "value")


def frame(
    *ledgers: Ledger, metrics: Collection[str] | None = None, worth_keeping: int = _WORTH_KEEPING
) -> pd.DataFrame:
    """Return every record of the ledgers of one or several sweeps as one row. A trial that several members
    share has its rows once for each of them. `metrics`: names, or patterns such as `quant/*/sqnr_db`; None
    for all. `worth_keeping`: smallest number of new rows that is cached.

    Columns: sweep, arm, baseline, seed, trial (its id), status, step, tokens (trained on so far; NaN if the
    workload counts none), metric, value, and one for each knob (NaN if an arm does not set it, or sets it to
    null). All but step, tokens and value are categorical in the frame of one ledger.
    """
    frames = [_frame(ledger, metrics, worth_keeping) for ledger in ledgers]
    # without categories, which differ between sweeps
    plain = (each.astype(dict.fromkeys(each.select_dtypes("category"), object)) for each in frames)
    return frames[0] if len(frames) == 1 else pd.concat(plain, ignore_index=True)


def _frame(ledger: Ledger, metrics: Collection[str] | None, worth_keeping: int) -> pd.DataFrame:
    members, names = ledger.members(), ledger.names()
    wanted = sorted(number for number, text in names.items() if metrics is None or parse(text).like(metrics))
    if not members or not wanted:
        return pd.DataFrame(columns=list(_FIRST))
    rows = _rows(ledger, wanted, worth_keeping if metrics is None else None)
    trials = rows["trial"].to_numpy()
    starts, ends = (
        np.searchsorted(trials, [member.trial for member in members], side) for side in ("left", "right")
    )
    member = np.repeat(np.arange(len(members)), ends - starts)
    order = np.concatenate([np.arange(start, end) for start, end in zip(starts, ends, strict=True)])
    facts = pd.DataFrame(_facts(ledger, members))
    columns = {name: _repeated(facts[name], member) for name in facts if name != "tokens_per_step"}
    columns["step"] = rows["step"].to_numpy()[order]
    columns["tokens"] = columns["step"] * facts["tokens_per_step"].to_numpy(float)[member]
    codes = np.searchsorted(wanted, rows["name"].to_numpy())[order]
    columns["metric"] = pd.Categorical.from_codes(codes, [names[number] for number in wanted])
    columns["value"] = rows["value"].to_numpy()[order]
    return pd.DataFrame(
        {name: columns[name] for name in (*_FIRST, *(name for name in columns if name not in _FIRST))}
    )


def _repeated(fact: pd.Series, member: np.ndarray) -> pd.Categorical:
    """Return a member's fact for each of its rows. A list cannot be a category, so it becomes JSON."""
    plain = [json.dumps(value) if isinstance(value, list | dict) else value for value in fact]
    codes, categories = pd.factorize(pd.Series(plain, dtype=object))
    return pd.Categorical.from_codes(codes[member], categories)


def _facts(ledger: Ledger, members: Sequence[Member]) -> list[dict[str, object]]:
    """Return the columns that all records of a member share, for each member."""
    names = {arm.arm: arm.name for arm in ledger.arms()}
    return [
        {
            "sweep": ledger.name,
            "arm": member.name,
            "baseline": None if member.baseline is None else names.get(member.baseline),
            "seed": member.seed,
            "trial": member.id,
            "status": member.status,
            "tokens_per_step": tokens_per_step(member.resolved),
            **json.loads(member.knobs),
        }
        for member in members
    ]


def tokens_per_step(spec: RecordedSpec) -> int | None:
    """Return the number of tokens that a step of a trial trains on; None if its workload counts no tokens, or
    is not one of this version."""
    workload = WORKLOADS.get(spec.workload)
    try:
        config = workload.model_validate_json(json.dumps(spec.config)) if workload else None
        return config.tokens_per_step or None if config else None
    except ValueError:  # pydantic's error is one: a spec of another release
        return None


# Records from the ledger, or from the cache


def _rows(ledger: Ledger, names: Sequence[int], worth_keeping: int | None) -> pa.Table:
    """Return (trial, name, step, value) by trial and step, in the ledger's numbers, from the cache as far as
    it is valid. `worth_keeping`: smallest number of new rows that is cached; None if `names` are not all
    metrics, so that no rows can be cached."""
    folder, edition = ledger.path.parent / "records", ledger.facts.edition
    wanted = {member.trial: member for member in ledger.members()}
    texts, cached = ledger.names(), list[pa.Table]()
    cached_trials: set[int] = set()  # trials whose rows are cached
    for part in sorted(folder.glob(f"{edition}-*.parquet")) if edition else ():
        if _digest(part) != part.stem.rpartition("-")[2]:
            with suppress(OSError):  # damaged: the ledger is read again
                part.unlink()
            continue
        written = pq.read_schema(part).metadata
        trials = _numbers(
            written[b"trials"], {wanted[trial].id: trial for trial in wanted.keys() - cached_trials}
        )
        metrics = _numbers(written[b"names"], {texts[number]: number for number in names})
        rows = pq.read_table(
            part, filters=pc.field("trial").isin(list(trials)) & pc.field("name").isin(list(metrics))
        )
        for position, (column, numbers) in enumerate((("trial", trials), ("name", metrics))):
            rows = rows.set_column(position, column, _renumbered(rows[column], numbers))
        cached.append(rows)
        cached_trials |= set(trials.values())
    new = record_table(ledger, sorted(wanted.keys() - cached_trials), names)
    if edition and worth_keeping is not None and new.num_rows >= worth_keeping:
        finished = {
            trial: row.id
            for trial, row in wanted.items()
            if row.status in FINISHED and trial not in cached_trials
        }
        with suppress(OSError):  # a state folder that cannot be written is read again the next time
            _keep(folder, edition, new, finished, texts)
    return pa.concat_tables([*cached, new]).sort_by(
        [("trial", "ascending"), ("step", "ascending"), ("name", "ascending")]
    )


def record_table(ledger: Ledger, trials: Sequence[int], names: Sequence[int]) -> pa.Table:
    """Return the records of these trials and metrics: columns trial, name, step (integers) and value (double,
    NaN for NULL).

    They are read by the connection that the ledger has. A second SQLite library in the process, such as that
    of an Arrow driver, is not used: the locks of a file belong to the process, so closing it there releases
    those of `sqlite3`, the log's index is cut short under its mapping, and the process dies of SIGBUS.
    """
    columns = [("trial", np.int64), ("name", np.int64), ("step", np.int64), ("value", np.float64)]
    rows = np.fromiter(ledger.raw_records(trials, names, _NULL), np.dtype(columns))
    rows["value"][rows["value"] == _NULL] = np.nan
    return pa.table({name: rows[name] for name, _ in columns})


def _numbers(written: bytes, now: Mapping[str, int]) -> dict[int, int]:
    """Return the ledger's present number for each number in a file. `written` is the file's JSON object of
    texts by number, `now` the present number by text; other texts are left out."""
    return {int(then): now[text] for then, text in json.loads(written).items() if text in now}


def _renumbered(column: pa.ChunkedArray, numbers: Mapping[int, int]) -> pa.ChunkedArray:
    positions = pc.index_in(column, value_set=pa.array(list(numbers), pa.int64()))
    return pc.take(pa.array(list(numbers.values()), pa.int64()), positions)


def _keep(
    folder: Path, edition: str, rows: pa.Table, trials: Mapping[int, str], names: Mapping[int, str]
) -> None:
    """Cache the rows of these trials (id by number), and delete the files of other editions of the ledger."""
    folder.mkdir(exist_ok=True)
    for old in folder.glob("*.parquet"):
        if not old.name.startswith(f"{edition}-"):
            old.unlink()
    done = rows.filter(pc.field("trial").isin(list(trials)))
    done = done.replace_schema_metadata({"trials": json.dumps(trials), "names": json.dumps(names)})
    writing = folder / f"{uuid.uuid4().hex}.tmp"
    pq.write_table(done, writing, compression="zstd")
    writing.rename(folder / f"{edition}-{uuid.uuid4().hex[:8]}-{_digest(writing)}.parquet")


def _digest(path: Path) -> str:
    """Return 16 hex digits of the SHA-256 of a file, which its name ends with."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()[:16]
