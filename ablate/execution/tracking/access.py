"""Access to MLflow: its client, a check before anything runs, its errors in one sentence, a report's files.

A wrong password is an error of the user's and ends the command. A server that does not answer may come back,
so the sweep runs and ships its records later.
"""

import base64
import os
import re
import sqlite3
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import closing, contextmanager
from http.client import HTTPException
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import unquote, urlsplit, urlunsplit

from ablate.errors import InputError, as_input_error, first_line, redact
from ablate.execution.tracking.runs import NOTE
from ablate.store.databases import open_readonly, path_of, tables
from ablate.store.ledger import Ledger

if TYPE_CHECKING:
    from mlflow import MlflowClient

_USER, _PASSWORD = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
_REFUSED = (401, 403)
_LOOK_SECONDS = 5.0
_FOLDER = "report"
_FIRST = "index.html"


def import_client() -> None:
    """Import MLflow's client, which takes seconds, with the settings that it reads from the environment."""
    os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
    # A retry would create a second run if the answer to the first call was lost.
    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
    # MLflow would print the address with its password.
    os.environ.setdefault("MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT", "true")
    import mlflow  # noqa: F401


def open_client(uri: str) -> "MlflowClient":
    """Return MLflow's client of a server or of a database."""
    import_client()
    from mlflow import MlflowClient

    return MlflowClient(uri)


def is_active(client: "MlflowClient", run: str) -> bool:
    """Return True if there is such a run, and it is not deleted."""
    from mlflow.exceptions import MlflowException

    try:
        return client.get_run(run).info.lifecycle_stage == "active"
    except MlflowException as error:
        if error.error_code != "RESOURCE_DOES_NOT_EXIST":
            raise
        return False


def check_login(uri: str | None) -> None:
    """Raise InputError, in one sentence, if a server refuses access. A server that does not answer is not an
    error here."""
    if not uri or not uri.startswith(("http://", "https://")) or _answer(uri) not in _REFUSED:
        return
    # Importing MLflow takes seconds; it has more ways to log in than `_answer` tries.
    client = open_client(uri)
    from mlflow.exceptions import MlflowException

    try:
        client.search_experiments(max_results=1)
    except MlflowException as error:
        if why := refusal(error):
            raise InputError(f"{redact(uri)}: {why}. Nothing was done, and nothing is lost.") from None


def refusal(error: Exception) -> str | None:
    """Return the reason and the remedy if MLflow's error means that its server refuses access; None for
    another error."""
    status = getattr(error, "get_http_status_code", lambda: 0)()
    if status not in _REFUSED:
        return None
    if status == 401 or "not authenticated" in str(error):
        user = os.environ.get(_USER)
        cause = f"user {user!r} or the password is wrong" if user else "no credentials were sent"
        return f"MLflow returned 401 Unauthorized: {cause}; set {_USER} and {_PASSWORD}"
    answer = str(error).partition("Response body: ")[2].strip(" '") or first_line(error)
    hint = "; `mlflow server --allowed-hosts` names the hosts that it answers to"
    return f"MLflow returned 403 Forbidden: {answer}{hint if 'Invalid Host' in answer else ''}"


def plainly(error: Exception) -> str | None:
    """Return a plain sentence if MLflow's error means that its server refuses access or does not answer; else
    None."""
    unanswered = re.search(r"HTTPS?Connection.*(?:\[Errno -?\d+\] (?P<cause>[^\"')]+)|timed out)", str(error))
    why = unanswered and (unanswered["cause"] or "timed out")
    return refusal(error) or (f"MLflow's server does not answer: {why}" if why else None)


def log_report(uri: str, ledger: Ledger, folder: Path) -> None:
    """Upload all files of a folder to the sweep's run, below `report/`, and link them in its description;
    replace older files. Do nothing if the sweep is not in MLflow. InputError, in one sentence, if MLflow
    cannot store the files."""
    run = ledger.facts.mlflow_parent
    if not run or not folder.is_dir():
        return
    with errors_explained(uri):
        look(uri)
        client = open_client(uri)
        if not is_active(client, run):
            raise InputError(f"{redact(uri)}: the sweep's run {run} was deleted in MLflow")
        client.log_artifacts(run, str(folder), _FOLDER)
        name = _FIRST if (folder / _FIRST).exists() else ""
        kept = client.get_run(run)
        place = f"#/experiments/{kept.info.experiment_id}/runs/{run}/artifacts/{_FOLDER}/{name}"
        note, line = kept.data.tags.get(NOTE, ""), f"[The report]({place})"
        if line not in note:
            client.set_tag(run, NOTE, f"{note}\n\n{line}")


def _answer(uri: str) -> int | None:
    """Return the HTTP status of a call that needs no more than a login; None if there is no answer."""
    try:
        parts = urlsplit(uri)
        address = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/")
        request = urllib.request.Request(f"{address}/api/2.0/mlflow/experiments/search?max_results=1")
        user, password = os.environ.get(_USER), os.environ.get(_PASSWORD)
        if not (user and password) and parts.password:
            user, password = unquote(parts.username or ""), unquote(parts.password)
        if user and password:
            token = base64.b64encode(f"{user}:{password}".encode()).decode()
            request.add_unredirected_header("Authorization", f"Basic {token}")
        with urllib.request.urlopen(request, timeout=_LOOK_SECONDS) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (OSError, ValueError, HTTPException):  # no server, no address, or another kind of server
        return None


@contextmanager
def errors_explained(uri: str) -> Iterator[None]:
    """Convert errors of MLflow within the block to InputError, in one sentence and without passwords."""
    try:
        yield
    except InputError:
        raise
    except Exception as error:
        from alembic.util.exc import CommandError
        from mlflow.exceptions import MlflowException
        from sqlalchemy.exc import SQLAlchemyError

        # requests' are OSErrors
        if not isinstance(error, OSError | sqlite3.Error | MlflowException | SQLAlchemyError | CommandError):
            raise
        first = plainly(error) or first_line(error)
        why = first.partition(" Take a backup")[0]
        if "out-of-date" in first:
            why += f"; `{Path(sys.executable).parent / 'mlflow'} db upgrade` brings it up to date"
        raise InputError(redact(f"{redact(uri)}: MLflow cannot be used there: {why}", uri)) from error


def look(uri: str, seconds: float = _LOOK_SECONDS) -> None:
    """Raise InputError if a SQLite store cannot be opened. MLflow would create a missing one, and retry a
    locked one for minutes; here it is waited for so many seconds."""
    path = path_of(uri)
    if path is None:
        return
    if not path.exists():
        raise InputError(f"{path}: no such file")
    unreadable = as_input_error(sqlite3.DatabaseError, before=f"{path}: cannot be read: ")
    with closing(open_readonly(path, seconds)) as db, unreadable:
        foreign = "alembic_version" not in tables(db)
    if foreign:
        raise InputError(f"{path}: is no database of MLflow's")
