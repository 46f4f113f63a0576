"""The way between a sweep and a command that it runs: environment variables, files, and lines of JSON.

The workload `command` sets the variables; a script that the command runs reads them, directly or by
`ablate.recipe()`, `ablate.convert(...)` and `ablate.log(...)`. Imports no torch.

    ABLATE_RECIPE       JSON file with the recipe
    ABLATE_CONFIG       JSON file with the workload's `config`
    ABLATE_SEED, ABLATE_STEPS, ABLATE_DEVICE
    ABLATE_FOLDER       folder for files of the trial
    ABLATE_CHECKPOINT   folder that survives an interruption of the trial
    ABLATE_METRICS      file to which lines of JSON are appended
"""

import hashlib
import json
import os
import sys
from collections.abc import Mapping
from operator import index
from pathlib import Path

from ablate.files import Json
from ablate.recipes.recipe import Recipe

RECIPE, METRICS = "ABLATE_RECIPE", "ABLATE_METRICS"
ACKNOWLEDGEMENT = "ablate/recipe"
"""Key of the line by which a command confirms that it computes by the recipe."""

_printed: set[str] = set()
"""Notes that this process has printed."""


def recipe_hash(content: bytes) -> str:
    """Return 16 hex digits of the SHA-256 of a recipe file: `sha256sum "$ABLATE_RECIPE" | head -c 16`."""
    return hashlib.sha256(content).hexdigest()[:16]


def recipe() -> Recipe:
    """Return the recipe of the environment; ValueError if there is none."""
    content = _recipe_file()
    if content is None:
        raise ValueError(
            f"{RECIPE} is not set, so this process has no recipe of its own: it is set in the commands that"
            " a sweep runs. Give a preset's name, a file or a Recipe"
        )
    return Recipe.model_validate_json(content)


def acknowledge(applied: Recipe) -> None:
    """Confirm that this process computes by a recipe, if it is that of the environment; else print a note."""
    content = _recipe_file()
    if content is None:
        return
    if Recipe.model_validate_json(content) == applied:
        _append({ACKNOWLEDGEMENT: recipe_hash(content)})
    else:
        _note(f"ablate.convert got another recipe than that of {RECIPE}; give it ablate.recipe()")


def number(value: object, title: str) -> float:
    """Return a value that a user's code logs, as a float. ValueError if it is no number."""
    try:
        return float(value)  # type: ignore[arg-type]  # a tensor or anything that has __float__
    except (TypeError, ValueError, OverflowError) as error:
        raise ValueError(f"{title} is {value!r}, which is no number: {error}") from None


def log(metrics: Mapping[str, object], step: int) -> None:
    """Append metrics to the file of the environment; of several ranks, rank 0 alone does. ValueError if a
    value is no number, a name is empty, or `step` is no integer from 1."""
    if isinstance(step, bool) or not hasattr(step, "__index__") or index(step) < 1:
        raise ValueError(f"ablate.log: step is {step!r}; give the number of optimizer steps done, from 1")
    values: dict[str, Json] = {}
    for name, value in metrics.items():
        if not isinstance(name, str) or not name.strip() or name == "step":
            raise ValueError(f"ablate.log: {name!r} is no name of a metric")
        values[name] = number(value, f"ablate.log: {name}")
    if os.environ.get("RANK", "0") == "0":
        _append({"step": index(step)} | values)


def in_force(environment: Mapping[str, str], changes: Mapping[str, str | None]) -> dict[str, str]:
    """Return environment variables after changes, of which None removes a variable."""
    changed = {**environment, **changes}
    return {name: value for name, value in changed.items() if value is not None}


def _recipe_file() -> bytes | None:
    path = os.environ.get(RECIPE)
    return Path(path).read_bytes() if path else None


def _append(line: Mapping[str, Json]) -> None:
    """Append a line to the file of metrics in one write, so that lines of several processes stay whole."""
    path = os.environ.get(METRICS)
    if not path:
        _note(f"ablate.log: {METRICS} is not set, so metrics go nowhere; a sweep sets it for its commands")
        return
    file = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o644)
    try:
        os.write(file, json.dumps(line).encode() + b"\n")
    finally:
        os.close(file)


def _note(text: str) -> None:
    if text not in _printed:
        _printed.add(text)
        print(text, file=sys.stderr, flush=True)
