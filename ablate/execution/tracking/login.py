"""Whether an MLflow server lets us in, asked before anything runs: a wrong password does not get right by waiting, as a dead server may
come back."""

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
    """InputError, in one sentence, where a server answers that we may not use it. One that does not answer is no concern of this."""
    if not uri or not uri.startswith(("http://", "https://")) or _answer(uri) not in _REFUSED:
        return
    from mlflow import (
        MlflowClient,
    )  # which takes seconds to import, and knows more ways to log in than those that were tried
    from mlflow.exceptions import MlflowException

    os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    try:
        MlflowClient(uri).search_experiments(max_results=1)
    except MlflowException as error:
        why = refusal(error)
        if why:
            raise InputError([f"{redact(uri)}: {why}. Nothing was done, and nothing is lost."]) from None


def refusal(error: Exception) -> str | None:
    """What an error of MLflow's says where its server does not let us in, and what would; None where it is about something else."""
    status = getattr(error, "get_http_status_code", lambda: 0)()
    if status not in _REFUSED:
        return None
    if status == 401 or "not authenticated" in str(error):
        user = os.environ.get(_USER)
        who = f"does not know user {user!r} with this password" if user else "wants to know who we are"
        return f"MLflow's server {who} (401); set {_USER} and {_PASSWORD} to a user of its own"
    said = str(error).partition("Response body: ")[2].strip(" '") or str(error).splitlines()[0]
    hint = (
        "; `mlflow server --allowed-hosts` names the hosts that it answers to"
        if "Invalid Host" in said
        else ""
    )
    return f"MLflow's server refuses us (403): {said}{hint}"


def plainly(error: Exception) -> str | None:
    """An error of MLflow's that says that its server refuses us or does not answer, in plain words; None where it is another."""
    unanswered = re.search(r"HTTPS?Connection.*\[Errno -?\d+\] ([^\"')]+)", str(error))
    return refusal(error) or (f"MLflow's server does not answer: {unanswered[1]}" if unanswered else None)


def _answer(uri: str) -> int | None:
    """The status of its answer to a call that needs no more than a log-in; None where nobody answers."""
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
