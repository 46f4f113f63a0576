"""Check of the access to an MLflow server before anything runs.

A wrong password is an error of the user's and ends the command. A server that does not answer may come back,
so the sweep runs and ships its records later.
"""

import base64
import os
import re
import urllib.error
import urllib.request
from urllib.parse import unquote, urlsplit, urlunsplit

from ablate.errors import InputError, redact

_USER, _PASSWORD = "MLFLOW_TRACKING_USERNAME", "MLFLOW_TRACKING_PASSWORD"
_REFUSED = (401, 403)
_LOOK_SECONDS = 5.0


def check_login(uri: str | None) -> None:
    """Raise InputError, in one sentence, if a server refuses access. A server that does not answer is not an
    error here.
    """
    if not uri or not uri.startswith(("http://", "https://")) or _answer(uri) not in _REFUSED:
        return
    # Importing MLflow takes seconds; it has more ways to log in than `_answer` tries.
    from mlflow import MlflowClient
    from mlflow.exceptions import MlflowException

    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    try:
        MlflowClient(uri).search_experiments(max_results=1)
    except MlflowException as error:
        why = refusal(error)
        if why:
            raise InputError(f"{redact(uri)}: {why}. Nothing was done, and nothing is lost.") from None


def refusal(error: Exception) -> str | None:
    """Return the reason and the remedy if MLflow's error means that its server refuses access; None for
    another error.
    """
    status = getattr(error, "get_http_status_code", lambda: 0)()
    if status not in _REFUSED:
        return None
    if status == 401 or "not authenticated" in str(error):
        user = os.environ.get(_USER)
        cause = f"user {user!r} or the password is wrong" if user else "no credentials were sent"
        return f"MLflow returned 401 Unauthorized: {cause}; set {_USER} and {_PASSWORD}"
    answer = str(error).partition("Response body: ")[2].strip(" '") or str(error).splitlines()[0]
    hint = (
        "; `mlflow server --allowed-hosts` names the hosts that it answers to"
        if "Invalid Host" in answer
        else ""
    )
    return f"MLflow returned 403 Forbidden: {answer}{hint}"


def plainly(error: Exception) -> str | None:
    """Return a plain sentence if MLflow's error means that its server refuses access or does not answer; else
    None.
    """
    unanswered = re.search(r"HTTPS?Connection.*\[Errno -?\d+\] ([^\"')]+)", str(error))
    return refusal(error) or (f"MLflow's server does not answer: {unanswered[1]}" if unanswered else None)


def _answer(uri: str) -> int | None:
    """Return the HTTP status of a call that needs no more than a login; None if there is no answer."""
    parts = urlsplit(uri)
    address = urlunsplit(parts._replace(netloc=parts.netloc.rpartition("@")[2])).rstrip("/")
    request = urllib.request.Request(f"{address}/api/2.0/mlflow/experiments/search?max_results=1")
    user, password = os.environ.get(_USER), os.environ.get(_PASSWORD)
    if not (user and password) and parts.password:
        user, password = unquote(parts.username or ""), unquote(parts.password)
    if user and password:
        request.add_unredirected_header(
            "Authorization", f"Basic {base64.b64encode(f'{user}:{password}'.encode()).decode()}"
        )
    try:
        with urllib.request.urlopen(request, timeout=_LOOK_SECONDS) as answer:
            return answer.status
    except urllib.error.HTTPError as error:
        with error:
            return error.code
    except (OSError, ValueError):
        return None
