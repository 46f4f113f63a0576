"""Every record of an experiment, or of several, as one tidy frame: fast for ten million rows, and remembered
beside the ledger.

What a finished trial recorded never changes, so it is kept as Parquet in `records/`, a file for those that
were new at a look; the ledger is asked for the rest alone. A file says which trial and which metric each of
its numbers stands for, since a ledger that is rebuilt numbers them anew.
"""

import hashlib
import json
import uuid
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pandas as pd
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from ablate.results.ledger import Ledger
from ablate.results.ledger_arrow import record_table
from ablate.results.ledger_rows import FINISHED
from ablate.training.metric_names import parse
from ablate.training.workloads import WORKLOADS

_WORTH_KEEPING = 1_000_000
"""Fewer rows than this are read from the ledger as fast as from a file."""
_FIRST = ("sweep", "arm", "baseline", "seed", "trial", "status", "step", "tokens", "metric", "value")


def frame(*ledgers: Ledger, metrics: Collection[str] | None = None) -> pd.DataFrame:
    """Every record as one row: sweep, arm, baseline, seed, trial, status, step, tokens, metric, value, and a
    column for each knob.

    `metrics` are those wanted, as patterns (`quant/*/sqnr_db`); None: all. What repeats is categorical: all
    but step, tokens, value. A shared trial has its rows once for each member that it is of. `tokens`, those
    trained on by then, is NaN where a workload has none; so is a knob that an arm does not turn, or turns to
    null.
    """
    frames = [_frame(ledger, metrics) for ledger in ledgers]
    return frames[0] if len(frames) == 1 else pd.concat(map(_plain, frames), ignore_index=True)


def _plain(part: pd.DataFrame) -> pd.DataFrame:
    """Without categories, which differ between sweeps."""
    return part.astype(dict.fromkeys(part.select_dtypes("category"), object))


def _frame(ledger: Ledger, metrics: Collection[str] | None) -> pd.DataFrame:
    members, names = ledger.members(), ledger.names()
    wanted = sorted(number for number, text in names.items() if metrics is None or parse(text).like(metrics))
    if not members or not wanted:
        return pd.DataFrame(columns=list(_FIRST))
    rows = _rows(ledger, metrics is None, wanted)
    trials = rows["trial"].to_numpy()
    starts, ends = (
        np.searchsorted(trials, [member["trial"] for member in members], side) for side in ("left", "right")
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
    """A member's fact for each of its rows. A list cannot be a category: it is its JSON."""
    plain = [json.dumps(value) if isinstance(value, list | dict) else value for value in fact]
    codes, categories = pd.factorize(pd.Series(plain, dtype=object))
    return pd.Categorical.from_codes(codes[member], categories)


def _facts(ledger: Ledger, members: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """What all records of a member share."""
    names = {arm["arm"]: arm["name"] for arm in ledger.arms()}
    sweep = ledger.name
    return [
        {
            "sweep": sweep,
            "arm": member["name"],
            "baseline": names.get(member["baseline"]),
            "seed": member["seed"],
            "trial": member["id"],
            "status": member["status"],
            "tokens_per_step": tokens_per_step(json.loads(member["spec"])),
        }
        | json.loads(member["knobs"])
        for member in members
    ]


def tokens_per_step(spec: Mapping[str, Any]) -> int | None:
    """Tokens that a step of a trial trains on, from its spec; None where its workload has none, or is none of
    today's."""
    ((workload, config),) = spec["workload"].items() if spec.get("workload") else (("", {}),)
    known = WORKLOADS.get(workload)
    try:
        return (known.model_validate_json(json.dumps(config)).tokens_per_step or None) if known else None
    except ValueError:  # pydantic's error is one: a spec of an older version
        return None


# From the ledger, or remembered


def _rows(ledger: Ledger, everything: bool, names: Sequence[int]) -> pa.Table:
    """(trial, name, step, value) by trial, in the ledger's numbers; of what is remembered only what is still
    true."""
    folder, edition = ledger.path.parent / "records", ledger.fact("edition")
    wanted = {member["trial"]: member for member in ledger.members()}
    texts, kept, known = ledger.names(), [], set()
    for part in sorted(folder.glob(f"{edition}-*.parquet")) if edition else ():
        if _digest(part) != part.stem.rpartition("-")[2]:
            with suppress(OSError):  # damaged: the ledger is read again
                part.unlink()
            continue
        there = pq.read_schema(part).metadata
        trials = _numbers(there[b"trials"], {wanted[trial]["id"]: trial for trial in wanted.keys() - known})
        metrics = _numbers(there[b"names"], {texts[number]: number for number in names})
        rows = pq.read_table(
            part, filters=pc.field("trial").isin(list(trials)) & pc.field("name").isin(list(metrics))
        )
        for place, (column, numbers) in enumerate((("trial", trials), ("name", metrics))):
            rows = rows.set_column(place, column, _renumbered(rows[column], numbers))
        kept.append(rows)
        known |= set(trials.values())
    new = record_table(ledger.path, sorted(wanted.keys() - known), names)
    if everything and edition and new.num_rows >= _WORTH_KEEPING:
        finished = {
            trial: row["id"]
            for trial, row in wanted.items()
            if row["status"] in FINISHED and trial not in known
        }
        with suppress(OSError):  # a state folder that cannot be written is read again the next time
            _keep(folder, edition, new, finished, texts)
    return pa.concat_tables([*kept, new]).sort_by(
        [("trial", "ascending"), ("step", "ascending"), ("name", "ascending")]
    )


def _numbers(written: bytes, now: Mapping[str, int]) -> dict[int, int]:
    """The ledger's present number for each number in a file, keyed by the file's; without those that are not
    wanted."""
    return {int(then): now[text] for then, text in json.loads(written).items() if text in now}


def _renumbered(column: pa.ChunkedArray, numbers: Mapping[int, int]) -> pa.ChunkedArray:
    places = pc.index_in(column, value_set=pa.array(list(numbers), pa.int64()))
    return pc.take(pa.array(list(numbers.values()), pa.int64()), places)


def _keep(
    folder: Path, edition: str, rows: pa.Table, trials: Mapping[int, str], names: Mapping[int, str]
) -> None:
    """Remember the rows of these trials (number -> id); what was remembered of another edition of the ledger
    goes."""
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
