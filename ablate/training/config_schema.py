"""The class that a training function declares for its config: its schema and its validators, at plan time.

A function `train(trial, config: Config)` has its config checked, and built, by the class: a dataclass or a
pydantic model. To plan a sweep, another process is asked, since the file may import anything. It answers
with the schema, and what the schema allows is given to the class itself if that has validators. The schema
and accepted configs are remembered by the digest of the user's code; refusals are not, since what a validator
looks at outside of the code may be mended.
"""

import atexit
import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO, Any, get_type_hints

from pydantic import TypeAdapter, ValidationError

from ablate import own_source
from ablate.cache import key_of, note, noted
from ablate.own_source import Code

_SECONDS, _IDLE_SECONDS = 120, 20
"""Longest time for an answer, and until a process that is asked nothing more ends: it may hold a GPU's
library in memory."""
_VERSION = 2
"""Version of what is remembered."""
_VALIDATORS = ("'function-", "'post_init': ", "'custom_init': True")
"""Parts of a pydantic core schema with checks that its JSON schema may lack."""
_processes: dict[tuple[Code, str], tuple[subprocess.Popen[str], IO[str]]] = {}
"""Processes that have imported a code of some digest, and what they wrote to standard error."""


def misfits(code: Code, config: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (keys, reason) for each value of a config that the declared class does not accept."""
    from jsonschema import Draft202012Validator  # slow to import

    digest = own_source.digest(code)
    key = key_of("config", _VERSION, digest, code.function)
    text = noted(key)
    about = json.loads(text) if text else _asked(code, digest, None)
    if "error" in about:
        yield (), f"{code.path} cannot be imported: {about['error']}"
        return
    if text is None:
        note(key, json.dumps(about))
    found = [
        (tuple(map(str, error.path)), error.message)
        for error in sorted(
            Draft202012Validator(about["schema"]).iter_errors(dict(config)), key=lambda error: str(error.path)
        )
    ]
    accepted = key_of(key, config)
    if about["validates"] and not found and noted(accepted) is None:
        answer = _asked(code, digest, dict(config))
        found = [(tuple(keys), why) for keys, why in answer.get("wrong", [[[], answer.get("error")]])]
        if not found:
            note(accepted, "accepted")
    yield from found


def built(function: Callable[..., object], config: Mapping[str, object]) -> object:
    return _adapter(function).validate_python(dict(config))


def _adapter(function: Callable[..., object]) -> TypeAdapter[Any]:
    return TypeAdapter(get_type_hints(function)[function.__code__.co_varnames[1]])


def _asked(code: Code, digest: str, question: object) -> dict[str, Any]:
    """Return what a process that has imported the code answers (`answer`), or `error`, the reason if it does
    not."""
    before = _processes.get((code, digest))
    if before is None or before[0].poll() is not None:
        facts = {name: str(value) for name, value in vars(code).items()}
        call = f"from {answer.__module__} import answer; answer(**{facts!r})"
        errors: IO[str] = TemporaryFile("w+")  # noqa: SIM115 - open as long as the process
        process = subprocess.Popen(
            [sys.executable, "-c", call],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        _processes[code, digest] = process, errors
        atexit.register(_ended, process, errors)
    process, written = _processes[code, digest]
    assert process.stdin
    assert process.stdout
    with suppress(BrokenPipeError):  # it has ended already, and its last words say why
        process.stdin.write(json.dumps(question) + "\n")
        process.stdin.flush()
    in_time = select.select([process.stdout], [], [], _SECONDS)[0]
    if line := process.stdout.readline() if in_time else "":
        found: dict[str, Any] = json.loads(line)
        return found
    silent = "it ended without a word" if in_time else f"it took more than {_SECONDS} s"
    return {"error": (_ended(process, written).splitlines() or [silent])[-1]}


def _ended(process: subprocess.Popen[str], errors: IO[str]) -> str:
    if errors.closed:
        return ""
    with suppress(BrokenPipeError):
        if process.stdin:
            process.stdin.close()
    with process, errors:
        process.kill()
        errors.seek(0)
        return errors.read().strip()


def answer(path: str, function: str, root: str, module: str, package: str) -> None:
    """Answer each line of standard input, in one line: for null, the JSON schema of a function's config and
    True if the class checks more than that; for a config, keys and reason of each mistake."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # for what the user's file prints
    adapter = _adapter(own_source.load(Code(Path(path), function, Path(root), module, package)))
    for line in sys.stdin:
        signal.alarm(0)
        config = json.loads(line)
        if config is None:
            schema = {"additionalProperties": False} | adapter.json_schema()
            parts = str(adapter.core_schema)
            reply = {"schema": schema, "validates": any(part in parts for part in _VALIDATORS)}
        else:
            reply = {"wrong": list(_wrong(adapter, config))}
        print(json.dumps(reply), file=answers, flush=True)
        signal.alarm(_IDLE_SECONDS)


def _wrong(adapter: TypeAdapter[Any], config: object) -> Iterator[tuple[tuple[str, ...], str]]:
    try:
        adapter.validate_python(config)
    except ValidationError as error:
        for one in error.errors(include_url=False):
            why = one["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
            yield tuple(map(str, one["loc"])), why
    except Exception as error:  # a validator of the user's may raise any class
        yield (), f"{type(error).__name__}: {error}"
