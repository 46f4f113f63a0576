"""The class that a training function declares for its config; its schema, without importing the code here.

A function `train(trial, config: Config)` has its config checked, and built, by the class: a dataclass or a
pydantic model. To plan a sweep, the schema is asked of another process, since the file may import anything,
and is kept by the digest of the user's code.
"""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import get_type_hints

from pydantic import TypeAdapter

from ablate import own_source
from ablate.cache import kept, key_of
from ablate.own_source import Code

_SECONDS = 120
_VERSION = 1
"""Version of what is kept."""


def misfits(code: Code, config: Mapping[str, object]) -> Iterator[tuple[tuple[str, ...], str]]:
    """Yield (keys, reason) for each value of a config that the declared class does not accept."""
    from jsonschema import Draft202012Validator  # slow to import

    schema = json.loads(_schema(code, own_source.digest(code)))
    if "error" in schema:
        yield (), f"{code.path} cannot be imported: {schema['error']}"
        return
    for error in sorted(
        Draft202012Validator(schema).iter_errors(dict(config)), key=lambda error: str(error.path)
    ):
        yield tuple(map(str, error.path)), error.message


def built(function: Callable[..., object], config: Mapping[str, object]) -> object:
    declared = list(get_type_hints(function).items())
    second = [kind for name, kind in declared if name in function.__code__.co_varnames[1:2]]
    return TypeAdapter(second[0]).validate_python(dict(config))


@lru_cache
def _schema(code: Code, digest: str) -> str:
    def ask(folder: Path) -> None:
        module = "ablate.training.config_schema"
        facts = {name: str(value) for name, value in vars(code).items()}
        call = f"from {module} import print_schema; print_schema(**{facts!r})"
        done = subprocess.run(
            [sys.executable, "-c", call], capture_output=True, text=True, timeout=_SECONDS, check=False
        )
        lines = done.stderr.strip().splitlines() or ["it ended without a word"]
        last = (
            done.stdout.strip().splitlines()[-1] if done.returncode == 0 else json.dumps({"error": lines[-1]})
        )
        (folder / "schema.json").write_text(last)

    return (
        kept("config", key_of("config", _VERSION, digest, code.function), ask) / "schema.json"
    ).read_text()


def print_schema(path: str, function: str, root: str, module: str, package: str) -> None:
    """Print the JSON schema of a function's config, in one line; unknown keys are refused."""
    loaded = own_source.load(Code(Path(path), function, Path(root), module, package))
    second = loaded.__code__.co_varnames[1]
    schema = TypeAdapter(get_type_hints(loaded)[second]).json_schema()
    schema.setdefault("additionalProperties", False)
    print(json.dumps(schema))
