"""MLflow's SQLite database on this machine, written directly: one transaction a run instead of a dozen.

The problem: MLflow's client writes one run in about twelve transactions, each with several queries built by
an object mapper: 40 ms of processor time a run of 20 values, in the process that also starts the next
trials, and seconds to import it. A local sweep of small trials spent most of its time there.

The idea: the rows of a run are few and simple. For a database in a revision whose tables are known
(`REVISIONS`), this file writes the same rows as MLflow's client does, about twenty times as fast. MLflow's
own code is the oracle: tests/execution/test_local_database.py does the same operations with both and compares
all rows.

    writer = LocalDatabase.open("sqlite:////runs/mlflow.db", own=True)    # None if it is not of these
    with writer.batch():
        run = writer.create(experiment, "rht=true seed=0", tags)
        writer.log(run.id, Entries(points, params))
        writer.end(run.id, "FINISHED")

Refused, with None from `open`: another revision, which belongs to another version of MLflow. The projection
then uses MLflow's client. Operations with effects on other tables (restoring an experiment, deleting a run)
are left to that client.
"""

import math
import shutil
import sqlite3
import sys
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from pathlib import Path
from urllib.parse import unquote, urlsplit

from ablate.execution.tracking.writer import NOTE, Child, ClientWriter, Entries, Point, Run
from ablate.store.databases import path_of, set_journal
from ablate.training.metric_names import trackable

REVISIONS = frozenset({"dc11669786a5"})
"""Revisions of MLflow's tables whose rows this file writes: that of MLflow 3.17."""
_BUSY_SECONDS = 60.0
_LONGEST_PARAM, _LONGEST_TAG = 6000, 8000
"""Lengths to which MLflow cuts params and tags."""
_FILE = "file://"
_LATEST = (
    "INSERT INTO latest_metrics (key, value, timestamp, step, is_nan, run_uuid) VALUES (?, ?, ?, ?, ?, ?)"
    " ON CONFLICT (key, run_uuid) DO UPDATE SET value = excluded.value, timestamp = excluded.timestamp,"
    " step = excluded.step, is_nan = excluded.is_nan"
    " WHERE (excluded.step, excluded.timestamp, excluded.value) > (step, timestamp, value)"
)


class LocalDatabase:
    """Operations on MLflow's database in a file. One thread uses it, the one that opened it."""

    @classmethod
    def open(cls, uri: str, own: bool) -> "LocalDatabase | None":
        """Return the database, or None if the address is not a file whose tables are known.

        Args:
            uri: address of MLflow.
            own: True for the database of a state folder, which this package makes and whose journal mode it
                sets.
        """
        path = path_of(uri)
        if path is None or not path.exists():
            return None
        db = sqlite3.connect(path, isolation_level=None, timeout=_BUSY_SECONDS)
        try:
            if own:
                set_journal(db, path)
            db.execute("PRAGMA foreign_keys = ON")
            (revision,) = db.execute("SELECT version_num FROM alembic_version").fetchone() or ("",)
        except sqlite3.DatabaseError:  # not MLflow's, or damaged: its own client says which
            revision = ""
        if revision in REVISIONS:
            return cls(uri, path, db, own)
        db.close()
        return None

    def __init__(self, uri: str, path: Path, db: sqlite3.Connection, own: bool) -> None:
        """Use `open`, which makes sure that the tables are known."""
        self._uri, self._path, self._db, self._own = uri, path, db, own
        self._file = self._identity()
        self._active: str | None = None
        """Run that was active earlier in this transaction."""

    def close(self) -> None:
        """Close the file."""
        self._db.close()

    def _identity(self) -> tuple[int, int] | None:
        with suppress(FileNotFoundError):
            status = self._path.stat()
            return status.st_dev, status.st_ino
        return None

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Store all writes within the block in one transaction, or none of them.

        Raises:
            FileNotFoundError: the file was deleted or replaced since it was opened.
        """
        if self._identity() != self._file:
            raise FileNotFoundError(f"{self._path} was deleted or replaced")
        self._active = None
        self._db.execute("BEGIN IMMEDIATE")
        try:
            yield
        except BaseException:
            self._db.execute("ROLLBACK")
            raise
        finally:
            self._active = None
        self._db.execute("COMMIT")

    def _writing(self) -> AbstractContextManager[None]:
        return nullcontext() if self._db.in_transaction else self.batch()

    # Experiments

    def experiment(self, name: str, location: str | None, tags: Mapping[str, str]) -> str:
        """Return the id of an experiment by its name; create or restore it if needed.

        Artifacts of a state folder that was moved have their new place from then on.
        """
        query = "SELECT experiment_id, lifecycle_stage, artifact_location FROM experiments WHERE name = ?"
        found = self._db.execute(f"{query} AND workspace = 'default'", (name,)).fetchone()
        creates = found is None and (location or "").startswith(_FILE)
        if not creates and (found is None or found[1] != "active"):
            return ClientWriter(self._uri).experiment(name, location, tags)
        if found:
            if self._own and location and found[2] != location:
                self._move(found[2], location)
            return str(found[0])
        now = _now()
        with self._writing():
            number = self._db.execute(
                "INSERT INTO experiments (name, artifact_location, lifecycle_stage, creation_time,"
                " last_update_time, workspace) VALUES (?, ?, 'active', ?, ?, 'default')",
                (name, location, now, now),
            ).lastrowid
            for key, value in tags.items():
                self.experiment_tag(str(number), key, value)
        return str(number)

    def _move(self, old: str, new: str) -> None:
        """Replace the folder above an experiment's artifacts in the places of all experiments and runs."""
        name = new.rpartition("/")[2]
        before, after = old.removesuffix(name), new.removesuffix(name)
        if not before.startswith(_FILE) or not before.endswith("/"):
            return
        with self._writing():
            for table, column in (("experiments", "artifact_location"), ("runs", "artifact_uri")):
                moved = f"{column} = ? || substr({column}, ?) WHERE substr({column}, 1, ?) = ?"
                self._db.execute(f"UPDATE {table} SET {moved}", (after, len(before) + 1, len(before), before))

    def experiment_tag(self, experiment: str, key: str, value: str) -> None:
        """Set a tag of an experiment."""
        with self._writing():
            self._db.execute(
                "INSERT INTO experiment_tags (key, value, experiment_id) VALUES (?, ?, ?)"
                " ON CONFLICT (key, experiment_id) DO UPDATE SET value = excluded.value",
                (key, value, int(experiment)),
            )

    # Runs

    def tagged(self, experiment: str, key: str, value: str) -> str | None:
        """Return a run of an experiment that has this tag, None if there is none."""
        found = self._db.execute(
            "SELECT run_uuid FROM runs JOIN tags USING (run_uuid) WHERE experiment_id = ? AND"
            " lifecycle_stage = 'active' AND key = ? AND value = ? ORDER BY start_time DESC LIMIT 1",
            (int(experiment), key, value),
        ).fetchone()
        return found and found[0]

    def children(self, experiment: str, parent: str) -> Iterator[list[Child]]:
        """Yield the runs below a parent run, in one page, those that started last first."""
        tag = "(SELECT value FROM tags WHERE tags.run_uuid = runs.run_uuid AND key = ?)"
        rows = self._db.execute(
            f"SELECT run_uuid, {tag}, {tag} FROM runs JOIN tags AS parents USING (run_uuid)"
            " WHERE experiment_id = ? AND lifecycle_stage = 'active' AND parents.key = ?"
            " AND parents.value = ? ORDER BY start_time DESC",
            ("ablate.member", "ablate.trial", int(experiment), "mlflow.parentRunId", parent),
        )
        yield [Child(*row) for row in rows]

    def has(self, run: str) -> bool:
        """Return True if there is such a run, and it is not deleted."""
        query = "SELECT 1 FROM runs WHERE run_uuid = ? AND lifecycle_stage = 'active'"
        return self._db.execute(query, (run,)).fetchone() is not None

    def discard(self, experiment: str, parent: str, trial: str, member: str, before_ms: int) -> None:
        """Delete the runs of a trial below a parent run that started before a moment."""
        ClientWriter(self._uri).discard(experiment, parent, trial, member, before_ms)

    def create(self, experiment: str, name: str, tags: Mapping[str, str]) -> Run:
        """Create a run that is running from now on."""
        query = "SELECT artifact_location FROM experiments WHERE experiment_id = ?"
        (location,) = self._db.execute(query, (int(experiment),)).fetchone()
        place, mark, options = location.partition("?")
        number, now = uuid.uuid4().hex, _now()
        run = Run(number, now, f"{place.rstrip('/')}/{number}/artifacts{mark}{options}", experiment)
        with self._writing():
            self._db.execute(
                "INSERT INTO runs (run_uuid, name, source_type, source_name, entry_point_name, user_id,"
                " status, start_time, source_version, lifecycle_stage, artifact_uri, experiment_id)"
                " VALUES (?, ?, 'UNKNOWN', '', '', 'unknown', 'RUNNING', ?, '', 'active', ?, ?)",
                (number, name, now, run.artifacts, int(experiment)),
            )
            self._active = number
            self._tag(number, {**tags, "mlflow.runName": name})
        return run

    def run(self, run: str) -> Run:
        """Return a run by its id."""
        query = (
            "SELECT run_uuid, start_time, artifact_uri, CAST(experiment_id AS TEXT) FROM runs"
            " WHERE run_uuid = ?"
        )
        found = self._db.execute(query, (run,)).fetchone()
        if found is None:
            raise LookupError(f"MLflow has no run {run}")
        return Run(*found)

    def log(self, run: str, entries: Entries) -> None:
        """Add entries to a run."""
        names = (point.name for point in entries.points)
        for name in (*names, *(key for key, _ in entries.params), *entries.tags):
            if not trackable(name):
                raise ValueError(f"MLflow allows no metric, param or tag of the name {name[:250]!r}")
        with self._writing():
            self._require_active(run)
            if entries.params:
                self._add_params(run, entries.params)
            if entries.points:
                self._add_points(run, entries.points)
            self._tag(run, {key: value[:_LONGEST_TAG] for key, value in entries.tags.items()})

    def _require_active(self, run: str) -> None:
        """Raise LookupError for a run that a user has deleted, as MLflow's client does."""
        if run != self._active:
            if not self.has(run):
                raise LookupError(f"run {run} was deleted in MLflow")
            self._active = run

    def _add_params(self, run: str, params: Sequence[tuple[str, str]]) -> None:
        stored = {key: value[:_LONGEST_PARAM] for key, value in params}
        known = dict(self._db.execute("SELECT key, value FROM params WHERE run_uuid = ?", (run,)))
        for key in stored.keys() & known.keys():
            if stored[key] != known[key]:
                raise ValueError(
                    f"param {key} of run {run} is {known[key]!r} and cannot become {stored[key]!r}"
                )
        self._db.executemany(
            "INSERT INTO params (key, value, run_uuid) VALUES (?, ?, ?)",
            [(key, value, run) for key, value in stored.items() if key not in known],
        )

    def _add_points(self, run: str, points: Sequence[Point]) -> None:
        rows = []
        latest: dict[str, tuple[tuple[int, int, float], bool]] = {}
        for name, value, time_ms, step in points:
            is_nan = math.isnan(value)
            # SQL has no infinity: MLflow stores the largest number instead, and 0 for a NaN.
            kept = 0.0 if is_nan else max(-sys.float_info.max, min(value, sys.float_info.max))
            rows.append((name, kept, time_ms, run, step, is_nan))
            order = (step, time_ms, kept)
            if name not in latest or order > latest[name][0]:
                latest[name] = order, is_nan
        self._db.executemany(
            "INSERT OR IGNORE INTO metrics (key, value, timestamp, run_uuid, step, is_nan)"
            " VALUES (?, ?, ?, ?, ?, ?)",
            rows,
        )
        self._db.executemany(
            _LATEST,
            [
                (name, value, time_ms, step, is_nan, run)
                for name, ((step, time_ms, value), is_nan) in latest.items()
            ],
        )

    def _tag(self, run: str, tags: Mapping[str, str]) -> None:
        self._db.executemany(
            "INSERT INTO tags (key, value, run_uuid) VALUES (?, ?, ?)"
            " ON CONFLICT (key, run_uuid) DO UPDATE SET value = excluded.value",
            [(key, value, run) for key, value in tags.items()],
        )

    def dataset(self, run: str, dataset: Mapping[str, str]) -> None:
        """Add training data as an input of a run, once."""
        with self._writing():
            self._require_active(run)
            query = "SELECT experiment_id FROM runs WHERE run_uuid = ?"
            (experiment,) = self._db.execute(query, (run,)).fetchone()
            key = (experiment, dataset["name"], dataset["digest"])
            self._db.execute(
                "INSERT OR IGNORE INTO datasets (dataset_uuid, experiment_id, name, digest,"
                " dataset_source_type, dataset_source, dataset_schema, dataset_profile)"
                " VALUES (?, ?, ?, ?, ?, ?, ?, ?)",
                (
                    uuid.uuid4().hex,
                    *key,
                    *(dataset[field] for field in ("source_type", "source", "schema", "profile")),
                ),
            )
            query = "SELECT dataset_uuid FROM datasets WHERE experiment_id = ? AND name = ? AND digest = ?"
            (number,) = self._db.execute(query, key).fetchone()
            link = uuid.uuid4().hex
            added = self._db.execute(
                "INSERT OR IGNORE INTO inputs (input_uuid, source_type, source_id, destination_type,"
                " destination_id) VALUES (?, 'DATASET', ?, 'RUN', ?)",
                (link, number, run),
            ).rowcount
            if added:
                self._db.execute(
                    "INSERT INTO input_tags (input_uuid, name, value) VALUES (?, ?, ?)",
                    (link, "mlflow.data.context", "training"),
                )

    def resume(self, run: str) -> None:
        """Set a run's status to RUNNING."""
        with self._writing():
            self._require_active(run)
            self._db.execute("UPDATE runs SET status = 'RUNNING' WHERE run_uuid = ?", (run,))

    def end(self, run: str, status: str, end_ms: int | None = None) -> None:
        """Set a run's final status and the time of its end, which is now by default."""
        with self._writing():
            self._require_active(run)
            query = "UPDATE runs SET status = ?, end_time = ? WHERE run_uuid = ?"
            self._db.execute(query, (status, end_ms or _now(), run))

    # Artifacts

    def text(self, run: str, text: str, name: str) -> None:
        """Store a text as an artifact of a run."""
        folder = self._folder(self.run(run))
        if folder is None:
            ClientWriter(self._uri).text(run, text, name)
            return
        folder.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")

    def files(self, run: Run, paths: Sequence[Path]) -> None:
        """Store files as artifacts of a run."""
        folder = self._folder(run)
        if folder is None:
            ClientWriter(self._uri).files(run, paths)
            return
        folder.mkdir(parents=True, exist_ok=True)
        for path in paths:
            shutil.copy2(path, folder / path.name)

    def tree(self, run: Run, folder: Path, name: str) -> None:
        """Store all files of a folder as artifacts of a run below `name`."""
        place = self._folder(run)
        if place is None:
            ClientWriter(self._uri).tree(run, folder, name)
            return
        shutil.copytree(folder, place / name, dirs_exist_ok=True)

    def note(self, run: str) -> str:
        """Return the description of a run, empty if it has none."""
        query = "SELECT value FROM tags WHERE run_uuid = ? AND key = ?"
        (text,) = self._db.execute(query, (run, NOTE)).fetchone() or ("",)
        return text

    @staticmethod
    def _folder(run: Run) -> Path | None:
        """Return the folder of a run's artifacts, None if they are not files of this machine."""
        if not run.artifacts.startswith(f"{_FILE}/"):
            return None
        return Path(unquote(urlsplit(run.artifacts).path))


def _now() -> int:
    return int(time.time() * 1000)
