"""Reading of runs that were not started here: one function for every kind of source.

    found = read(["runs/{arm}/seed{seed}.csv"], Columns(metrics={"val/loss": "eval_loss"}))
    found.runs    # one ForeignRun a run
    found.said    # "runs/bf16/seed0.csv: step: column 'iter'", to be printed

A place is a file, a folder, a pattern of a path, or the address of a server. Which source reads it follows
from what is there, except for logs, whose format the user names. Nothing is read in part: each place is read
whole, or refused in one sentence. Identical copies of a run count once; two runs of one arm and seed that
differ are refused.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ablate.errors import InputError, brief, by_key, redact, some_of
from ablate.execution.tracking import event_files
from ablate.judging import log_files, table_files, wandb_charts, wandb_folders
from ablate.judging.cells import same
from ablate.judging.columns import GUESS, Columns
from ablate.judging.named_runs import NamedRun, identified
from ablate.judging.names import places_of
from ablate.judging.points import Points
from ablate.judging.run import ForeignRun, Found
from ablate.judging.tables import Table, runs_of
from ablate.results.number_text import counted
from ablate.store.databases import url

Content = Table | list[NamedRun]
"""Content of one place: a table, whose columns say arm and seed, or runs, each with a name."""


@dataclass(frozen=True)
class Source:
    """One kind of source."""

    title: str
    """Name in sentences."""
    claims: Callable[[Path], bool]
    """True for a path that this source reads; sources are asked in their order."""
    read: Callable[[Path, list[str]], Content]
    """Content of a path; sentences are added to the list."""


def read(places: Sequence[str], columns: Columns = GUESS, *, logs: str | None = None) -> Found:
    """Return the runs of files, folders, patterns of paths (`logs/{arm}/seed{seed}.log`), and addresses.

    `logs` is the format of log files; None if the places are not logs. InputError, in one sentence, for the
    first thing that cannot be read without doubt.
    """
    sentences: list[tuple[str, str]] = []
    """Place, and what was said of it."""
    runs: list[ForeignRun] = []
    for place in places:
        remote = "://" in place or ("#" in place and not Path(place).exists())
        for path, fields in [(Path(), {})] if remote else places_of(place):
            said: list[str] = []
            named = replace(columns, of_path=fields)
            where = redact(place) if remote else str(path)
            content = _mlflow(place, said) if remote else _content(path, logs, said)
            if isinstance(content, Table) and (of_columns := wandb_charts.run_columns(content, columns)):
                said.append(f"{where}: one run a column, {len(of_columns)} in all; --metric says of what")
                content = of_columns
            if isinstance(content, Table):
                runs += runs_of(content, named, said)
            else:
                runs += identified(content, where, named, said)
            sentences += [(where, sentence.removeprefix(f"{where}: ")) for sentence in dict.fromkeys(said)]
    places_by = by_key((sentence, where) for where, sentence in sentences)
    said = [f"{some_of(those, 1)}: {sentence}" for sentence, those in places_by.items()]
    copies: list[str] = []
    kept = each_once(runs, copies)
    return Found(kept, [*said, *copies], places)


def _content(path: Path, logs: str | None, said: list[str]) -> Content:
    table_files.require_regular(path)
    if logs is not None and not (logs.startswith("hf") and path.suffix == ".json"):
        return [log_files.read_log(path, logs, said)]
    source = next((source for source in SOURCES.values() if source.claims(path)), None)
    if source is None:
        if remedy := _PACKED.get(path.suffix.lower()):
            raise InputError(f"{path}: {remedy}, and name that file")
        titles = ", ".join(source.title for source in SOURCES.values())
        advice = f"for a log, name its format, --logs {' or '.join(log_files.likely(path))}"
        if path.is_dir():
            kinds = sorted({file.suffix for file in path.iterdir() if file.suffix in _FILES})
            advice = f'for its files, write "{path}/*{kinds[0]}"' if kinds else advice
        raise InputError(f"{path}: not of a known kind ({titles}); {advice}")
    return source.read(path, said)


_FILES = (".csv", ".json", ".jsonl", ".parquet")
"""Endings of tables that are often a file a run."""
_UNPACK = {".gz": "gunzip -k", ".bz2": "bunzip2 -k", ".xz": "unxz -k", ".zst": "unzstd"}
_PACKED = {
    **{ending: f"is compressed; unpack it, {command} FILE" for ending, command in _UNPACK.items()},
    ".zip": "is an archive; unpack it, unzip FILE",
    **dict.fromkeys((".xlsx", ".xls"), "is a workbook; save its sheet as CSV"),
    ".pkl": "is a pickle, which may run code when it is loaded; write a CSV or Parquet table",
}
"""Files that others have in place of a table, with what to do."""


def each_once(runs: Sequence[ForeignRun], said: list[str]) -> list[ForeignRun]:
    """Return the runs without identical copies. InputError for two that differ in more than their name."""
    kept: list[ForeignRun] = []
    alike: dict[tuple[str, int | None], list[ForeignRun]] = {}
    finished = {(run.arm, run.seed) for run in runs if run.status == "done" and run.seed is not None}
    for run in runs:
        if run.status != "done" and (run.arm, run.seed) in finished:
            said.append(f"{run.name} is left out: {run.ended}, and another run of its seed is done")
            continue
        twins = alike.setdefault((run.arm, run.seed), [])
        telling = run.seed is not None or run.telling
        copy = next((other for other in twins if telling and _equal(run, other)), None)
        if copy is not None:
            said.append(f"{run.name} is a copy of {copy.name}; one of them counts")
        elif twins and run.seed is not None:
            both = f"{twins[0].name} and {run.name} are both seed {run.seed} of {run.arm}"
            raise InputError(f"{both}, with other values; leave one out")
        else:
            kept.append(run)
            twins.append(run)
    return kept


def _equal(run: ForeignRun, other: ForeignRun) -> bool:
    """Return True if two runs have the same values at the same steps."""
    return run.records.keys() == other.records.keys() and all(
        series.keys() == other.records[name].keys()
        and all(same(value, other.records[name][step]) for step, value in series.items())
        for name, series in run.records.items()
    )


def _csv(path: Path, said: list[str]) -> Content:
    table = table_files.read_csv(path)
    if not wandb_charts.is_chart([*table.columns]):
        return table
    said.append(f"{path}: an exported chart of W&B, one run a column")
    return wandb_charts.chart_runs(table)


def _json(path: Path, said: list[str]) -> Content:
    table = table_files.read_json(path)
    return [log_files.read_state(path)] if table is None else table


def _states(folder: Path, said: list[str]) -> Content:
    """Return the runs of a folder: of each run's checkpoints, the last has the whole history."""
    last: dict[Path, tuple[int, Path]] = {}
    for path in sorted(folder.rglob(_STATE)):
        _, checkpoint, number = path.parent.name.rpartition("checkpoint-")
        of_step = int(number) if checkpoint and number.isdecimal() else None
        of_run = path.parent if of_step is None else path.parent.parent
        steps = _AT_END if of_step is None else of_step
        last[of_run] = max(last.get(of_run, (-1, path)), (steps, path))
    whole = f"the last {_STATE} of each has its whole history"
    said.append(f"{folder}: {counted(len(last), 'run')} of Hugging Face's Trainer; {whole}")
    return [log_files.read_state(path) for _, path in last.values()]


def _tensorboard(place: Path, said: list[str]) -> Content:
    runs = []
    for folder in event_files.folders_of(place):
        events, where = event_files.read_events(folder), str(folder)
        said += [f"{path}: the end of the file is cut; what is whole counts" for path in events.cut]
        if events.scalars:
            name = folder.name if folder == place else str(folder.relative_to(place))
            runs.append(NamedRun(where, name, Points.of(where, events.scalars), events.config))
        else:
            said.append(f"{where}: its event files have no scalars; left out")
    if not runs:
        raise InputError(f"{place}: no event file has scalars")
    return runs


def _mlflow(place: str, said: list[str]) -> Content:
    from ablate.execution.tracking.stored_runs import stored_runs

    shown, (address, _, experiment) = redact(place), place.partition("#")
    if "://" not in address and Path(address).suffix in _DATABASES:
        address = url(Path(address).resolve())
    title, stored = stored_runs(address, experiment or None)
    if empty := sum(not run.scalars for run in stored):
        said.append(f"{shown}: {empty} runs without metrics are left out")
    said.append(f"{shown}: experiment {brief(title)!r}")
    return [
        NamedRun(where, run.name, Points.of(where, run.scalars), run.config, run.status)
        for run in stored
        if run.scalars and (where := f"{shown}: {brief(run.name)}")
    ]


def _suffix(*endings: str) -> Callable[[Path], bool]:
    return lambda path: path.suffix.lower() in endings and path.is_file()


def _holds(*patterns: str) -> Callable[[Path], bool]:
    return lambda path: path.is_dir() and any(any(path.glob(pattern)) for pattern in patterns)


_STATE = "trainer_state.json"
_AT_END = 2**63
"""Place of a state that is not of a checkpoint, and that `Trainer.save_state` wrote, behind all that are."""
_DATABASES = (".db", ".sqlite", ".sqlite3")

SOURCES: dict[str, Source] = {
    "csv": Source("CSV table", _suffix(".csv", ".tsv"), _csv),
    "parquet": Source("Parquet table", _suffix(".parquet", ".pq"), table_files.read_parquet),
    "json lines": Source("JSON lines", _suffix(".jsonl", ".ndjson"), table_files.read_json_lines),
    "json": Source("JSON list or object, or trainer_state.json", _suffix(".json"), _json),
    "trainer states": Source("folder with trainer_state.json", _holds(f"**/{_STATE}"), _states),
    "wandb": Source(
        "offline runs of Weights & Biases",
        lambda path: path.suffix == ".wandb" or _holds("**/run-*.wandb")(path),
        lambda path, said: [wandb_folders.read_run(file, said) for file in wandb_folders.files_of(path)],
    ),
    "mlflow": Source(
        "MLflow database or folder",
        lambda path: _holds("*/meta.yaml", "*/*/meta.yaml")(path) or _suffix(*_DATABASES)(path),
        lambda path, said: _mlflow(str(path), said),
    ),
    "tensorboard": Source("TensorBoard event files", _holds(f"**/{event_files.PATTERN}"), _tensorboard),
}
"""Every kind of source, by its name, in the order in which they are asked."""
