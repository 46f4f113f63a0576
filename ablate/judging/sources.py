"""Reading of runs that were not started here: one function for every kind of source.

    found = read(["runs/{arm}/seed{seed}.csv"], Columns(metrics={"val/loss": "eval_loss"}))
    found.runs    # one ForeignRun a run
    found.said    # "runs/bf16/seed0.csv: step: column 'iter'", to be printed

A place is a file, a folder, a pattern of a path, or the address of a server. Which source reads it follows
from what is there, except for logs, whose format the user names. Nothing is read in part: each place is read
whole, or refused in one sentence. Identical copies of a run count once; two runs of one arm and seed that
differ are refused.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ablate.errors import InputError, brief, redact
from ablate.execution.tracking import event_files
from ablate.judging import (
    log_files,
    table_files,
    tables,
    wandb_charts,
    wandb_folders,
)
from ablate.judging.cells import same
from ablate.judging.columns import GUESS, Columns
from ablate.judging.named_runs import NamedRun, identified
from ablate.judging.names import places_of
from ablate.judging.points import Points
from ablate.judging.run import ForeignRun, Found
from ablate.results.number_text import counted
from ablate.store.databases import url


@dataclass(frozen=True)
class Place:
    """One file, folder or address to read."""

    address: str
    """Path or address, as a person finds it."""
    fields: Mapping[str, str]
    """Arm, seed and settings that a pattern of the path says."""
    columns: Columns
    """Columns that the user named."""

    @property
    def path(self) -> Path:
        """The address as a path."""
        return Path(self.address)


@dataclass(frozen=True)
class Source:
    """One kind of source."""

    title: str
    """Name in sentences."""
    claims: Callable[[Path], bool]
    """True for a path that this source reads; sources are asked in their order."""
    read: Callable[[Place, list[str]], list[ForeignRun]]
    """Runs of a place; sentences are added to the list."""


def read(places: Sequence[str], columns: Columns = GUESS, *, logs: str | None = None) -> Found:
    """Return the runs of all places.

    Args:
        places: files, folders, patterns of paths (`logs/{arm}/seed{seed}.log`), or addresses.
        columns: columns that the user named.
        logs: name of the format of log files; None if the places are not logs.

    Raises:
        InputError: in one sentence, for the first thing that cannot be read without doubt.
    """
    sentences: list[tuple[str, list[str]]] = []
    """Place, and what was said of it."""
    runs: list[ForeignRun] = []
    for place in places:
        if "://" in place or ("#" in place and not Path(place).exists()):
            sentences.append((redact(place), []))
            runs += _mlflow(Place(place, {}, columns), sentences[-1][1])
            continue
        for path, fields in places_of(place):
            sentences.append((str(path), []))
            runs += _read(Place(str(path), fields, columns), logs, sentences[-1][1])
    copies: list[str] = []
    return Found(each_once(runs, copies), [*_once(sentences), *copies], places)


def _once(sentences: Sequence[tuple[str, list[str]]]) -> list[str]:
    """Return what was said of all places; what is the same of several stands there once."""
    places: dict[str, list[str]] = {}
    for place, said in sentences:
        for sentence in dict.fromkeys(said):
            places.setdefault(sentence.removeprefix(f"{place}: "), []).append(place)
    return [
        f"{same[0]}{f' and {len(same) - 1} more' if len(same) > 1 else ''}: {sentence}"
        for sentence, same in places.items()
    ]


def _read(place: Place, logs: str | None, said: list[str]) -> list[ForeignRun]:
    """Return the runs of a file or folder."""
    table_files.require_regular(place.path)
    if logs is not None and not (logs.startswith("hf") and place.path.suffix == ".json"):
        return _one(log_files.read_log(place.path, place.fields, logs, said), place, said)
    source = next((source for source in SOURCES.values() if source.claims(place.path)), None)
    if source is None:
        titles = ", ".join(source.title for source in SOURCES.values())
        advice = "for a log, name its format: --logs"
        if place.path.is_dir():
            kinds = sorted({file.suffix for file in place.path.iterdir() if file.suffix in _FILES})
            advice = f'for its files, write "{place.address}/*{kinds[0]}"' if kinds else advice
        raise InputError(f"{place.address}: not of a known kind ({titles}); {advice}")
    return source.read(place, said)


_FILES = (".csv", ".json", ".jsonl", ".parquet")
"""Endings of tables that are often a file a run."""
_TELLING = 3
"""Number of values from which two runs without seeds are not equal by chance."""


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
        telling = run.seed is not None or sum(map(len, run.records.values())) >= _TELLING
        copy = next((other for other in twins if _equal(run, other)), None) if telling else None
        if copy is not None:
            said.append(f"{run.name} is a copy of {copy.name}; one of them counts")
        elif twins and run.seed is not None:
            raise InputError(
                f"{twins[0].name} and {run.name} are both seed {run.seed} of {run.arm}, with other"
                " values; leave one out"
            )
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


def _csv(place: Place, said: list[str]) -> list[ForeignRun]:
    table = table_files.read_csv(place.path, place.fields)
    if not wandb_charts.is_chart([*table.columns]):
        return tables.runs_of(table, place.columns, said)
    said.append(f"{place.address}: an exported chart of W&B, one run a column")
    return identified(wandb_charts.chart_runs(table), place.address, place.columns, said)


def _parquet(place: Place, said: list[str]) -> list[ForeignRun]:
    return tables.runs_of(table_files.read_parquet(place.path, place.fields), place.columns, said)


def _json_lines(place: Place, said: list[str]) -> list[ForeignRun]:
    return tables.runs_of(table_files.read_json_lines(place.path, place.fields, said), place.columns, said)


def _json(place: Place, said: list[str]) -> list[ForeignRun]:
    if table_files.is_state(place.path):
        return _one(log_files.read_state(place.path, place.fields), place, said)
    return tables.runs_of(table_files.read_json(place.path, place.fields), place.columns, said)


def _states(place: Place, said: list[str]) -> list[ForeignRun]:
    """Return the runs of a folder: of each run's checkpoints, the last has the whole history."""
    last: dict[Path, tuple[int, Path]] = {}
    for path in sorted(place.path.rglob(_STATE)):
        _, checkpoint, number = path.parent.name.rpartition("checkpoint-")
        of_step = int(number) if checkpoint and number.isdecimal() else None
        folder = path.parent if of_step is None else path.parent.parent
        steps = _AT_END if of_step is None else of_step
        last[folder] = max(last.get(folder, (-1, path)), (steps, path))
    runs = [log_files.read_state(path, place.fields) for _, path in last.values()]
    said.append(
        f"{place.address}: {counted(len(runs), 'run')} of Hugging Face's Trainer; the last {_STATE} of each"
        " has its whole history"
    )
    return identified(runs, place.address, place.columns, said)


def _wandb(place: Place, said: list[str]) -> list[ForeignRun]:
    files = [place.path] if place.path.is_file() else wandb_folders.files_of(place.path)
    runs = [wandb_folders.read_run(path, place.fields, said) for path in files]
    return identified(runs, place.address, place.columns, said)


def _tensorboard(place: Place, said: list[str]) -> list[ForeignRun]:
    runs = []
    for folder in event_files.folders_of(place.path):
        events = event_files.read_events(folder)
        said += [f"{path}: the end of the file is cut; what is whole counts" for path in events.cut]
        points = Points(str(folder), in_time=True, one_axis=False)
        for number, (step, name, value) in enumerate(events.scalars, 1):
            points.add(number, step, name, value)
        name = folder.name if folder == place.path else str(folder.relative_to(place.path))
        if points.records():
            runs.append(NamedRun(str(folder), name, points, events.config, place.fields))
        else:
            said.append(f"{folder}: its event files have no scalars; left out")
    if not runs:
        raise InputError(f"{place.address}: no event file has scalars")
    return identified(runs, place.address, place.columns, said)


def _mlflow(place: Place, said: list[str]) -> list[ForeignRun]:
    from ablate.execution.tracking.stored_runs import stored_runs

    address, _, experiment = place.address.partition("#")
    if "://" not in address and Path(address).suffix in _DATABASES:
        address = url(Path(address).resolve())
    title, stored = stored_runs(address, experiment or None)
    runs = []
    if empty := sum(not run.scalars for run in stored):
        said.append(f"{redact(place.address)}: {empty} runs without metrics are left out")
    for run in (run for run in stored if run.scalars):
        where = f"{redact(place.address)}: {brief(run.name)}"
        points = Points(where, in_time=True, one_axis=False)
        for number, (step, name, value) in enumerate(run.scalars, 1):
            points.add(number, step, name, value)
        runs.append(NamedRun(where, run.name, points, run.config, place.fields, run.status))
    said.append(f"{redact(place.address)}: experiment {brief(title)!r}")
    return identified(runs, redact(place.address), place.columns, said)


def _one(run: NamedRun, place: Place, said: list[str]) -> list[ForeignRun]:
    return identified([run], place.address, place.columns, said)


def _suffix(*endings: str) -> Callable[[Path], bool]:
    return lambda path: path.suffix.lower() in endings and path.is_file()


def _is_mlflow(path: Path) -> bool:
    store = path.is_dir() and (any(path.glob("*/meta.yaml")) or any(path.glob("*/*/meta.yaml")))
    return store or _suffix(*_DATABASES)(path)


_STATE = "trainer_state.json"
_AT_END = 2**63
"""Place of a state that is not of a checkpoint, and that `Trainer.save_state` wrote, behind all that are."""
_DATABASES = (".db", ".sqlite", ".sqlite3")

SOURCES: dict[str, Source] = {
    "csv": Source("CSV table", _suffix(".csv", ".tsv"), _csv),
    "parquet": Source("Parquet table", _suffix(".parquet", ".pq"), _parquet),
    "json lines": Source("JSON lines", _suffix(".jsonl", ".ndjson"), _json_lines),
    "json": Source("JSON list or object, or trainer_state.json", _suffix(".json"), _json),
    "trainer states": Source(
        "folder with trainer_state.json",
        lambda path: path.is_dir() and any(path.rglob(_STATE)),
        _states,
    ),
    "wandb": Source(
        "offline runs of Weights & Biases",
        lambda path: path.suffix == ".wandb" or (path.is_dir() and any(path.rglob("run-*.wandb"))),
        _wandb,
    ),
    "mlflow": Source("MLflow database or folder", _is_mlflow, _mlflow),
    "tensorboard": Source(
        "TensorBoard event files",
        lambda path: path.is_dir() and any(path.rglob(event_files.PATTERN)),
        _tensorboard,
    ),
}
"""Every kind of source, by its name, in the order in which they are asked."""
