"""Workload that is any command: training code that must stay a process of its own.

    workload: {command: {run: "torchrun train.py --lr {lr} --seed {seed}", steps: 300, config: {lr: 1.0e-3}}}

The command gets the recipe as a JSON file and everything else as environment variables
(training/own_code/process_environment.py) and placeholders. It writes metrics as lines of JSON. No shell is
involved.
What a trial is depends on the command, on `config`, and on the content of the declared sources and data;
never on where they lie. That the same seed gives the same numbers is the command's own promise.

Refused: an unknown placeholder, a program that is not there, a command without sources, and, in a trial, a
quantised recipe that the command does not confirm.
"""

from __future__ import annotations

import glob
import json
import re
import shlex
import shutil
import string
from collections.abc import Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from ablate import provenance
from ablate.errors import nearest
from ablate.files import Json
from ablate.training.own_code import user_code
from ablate.training.own_code.command_process import search_path, started
from ablate.training.workloads.own_code import OwnCode

if TYPE_CHECKING:
    from ablate.training.loop import Record
    from ablate.training.trial_run import TrialRun

PLACEHOLDERS = ("seed", "steps", "device", "folder", "recipe", "config", "checkpoint")
"""Placeholders of every command, beside the keys of its config."""
_FOLDERS = re.compile(r"(^|=)/\S*/")
"""Leading folders of an absolute path, alone or after `--option=`."""


class Command(OwnCode):
    """A command line, what it reads, and the length of a run."""

    VERSION: ClassVar[int] = 1
    PATHS: ClassVar[tuple[str, ...]] = ("folder", "sources", "data")

    run: str = Field(min_length=1)
    """Program and arguments, split as a shell does, with placeholders such as `{seed}` and `{lr}`.

    Placeholders are `seed`, `steps`, `device`, `folder`, `recipe`, `config`, `checkpoint` and the keys of
    `config`; `{{` is a brace.
    """
    folder: str = "."
    """Working directory of the command, relative to the experiment's file."""
    sources: tuple[str, ...] = Field((), strict=False)
    """Globs of the command's code; Python files stand for what they import beside them, too.

    Without any, the files that `run` names.
    """
    metrics: Literal["stdout", "file"] = "stdout"
    """`stdout`: lines of JSON on standard output are metrics too; `file`: only those in ABLATE_METRICS."""

    @property
    def _folder(self) -> Path:
        return Path(self.folder).expanduser().resolve()

    def problems(self) -> Iterator[tuple[str, str]]:
        """Yield (field, reason) for each field that cannot run."""
        for key in self.config:
            if key in PLACEHOLDERS:
                yield f"config.{key}", f"{{{key}}} is a placeholder of every command; choose another name"
        if not self._folder.is_dir():
            yield "folder", f"{self.folder}: no such folder"
        why = self._misfit()
        if why:
            yield "run", why
        for pattern in self.sources:
            if not _files(pattern):
                yield "sources", f"{pattern}: no such file"
        if not why and not self._sources():
            yield (
                "sources",
                "is empty, and run names no file; list the command's code, so that an edit runs it anew",
            )
        for value in self.data:
            if not Path(value).expanduser().exists():
                yield "data", f"{value}: no such file or folder"
        try:
            user_code.digest_of(self._sources() if not why else (), self._folder)
        except SyntaxError as error:
            yield "sources", f"{error.filename}:{error.lineno}: {error.msg}"

    def _misfit(self) -> str | None:
        """Return why `run` cannot be run; None if it can."""
        valid = (*PLACEHOLDERS, *self.config)
        try:
            tokens = shlex.split(self.run)
            for token in tokens:
                for _, name, form, conversion in string.Formatter().parse(token):
                    if name is None:
                        continue
                    if name not in valid:
                        return f"no such placeholder: {{{name}}}; {nearest(name, valid)}; {{{{ is a brace"
                    if form or conversion:
                        return f"{{{name}}} takes no format; write the value in config as it shall appear"
        except ValueError as error:
            return f"cannot be split: {error}; write {{{{ and }}}} for braces"
        if not tokens:
            return "is empty; give a program and its arguments"
        if "{" not in tokens[0] and not self._program(tokens[0]):
            return f"no such program: {tokens[0]}"
        return None

    def _program(self, name: str) -> bool:
        if "/" in name:
            return (self._folder / name).is_file()
        return shutil.which(name, path=search_path()) is not None

    def _sources(self) -> list[Path]:
        """Return the files of the command's code: those of `sources`, else those that `run` names."""
        if self.sources:
            return sorted({file for pattern in self.sources for file in _files(pattern)})
        first, *others = shlex.split(self.run)
        program = [first] if "/" in first and not first.startswith("/") else []
        paths = (self._folder / token.rpartition("=")[2] for token in (*program, *others) if token)
        return sorted({path for path in paths if path.is_file()})

    def identity(self) -> dict[str, Json]:
        """Return the fields that determine the numbers, without paths: `fingerprint` has their content."""
        run = shlex.join(_FOLDERS.sub(r"\1", token) for token in shlex.split(self.run))
        return self.canonical({"folder", "sources", "data", "metrics", "log_every"}) | {"run": run}

    def fingerprint(self) -> str:
        """Return a digest of the command's code and of its data."""
        parts = [user_code.digest_of(self._sources(), self._folder)]
        return "-".join(parts + [user_code.content(Path(name).expanduser()) for name in self.data])

    def files(self) -> Iterator[Path]:
        """Yield the files of the command's code and of its data."""
        yield from user_code.closures(self._sources())
        yield from super().files()

    def arguments(self, values: Mapping[str, str]) -> list[str]:
        """Return program and arguments, with all placeholders filled in."""
        texts = {
            key: value if isinstance(value, str) else json.dumps(value) for key, value in self.config.items()
        }
        return [token.format_map(texts | dict(values)) for token in shlex.split(self.run)]

    def compute(self, run: TrialRun) -> Iterator[Record]:
        """Run the command, and yield a Record for each step of which it logged something."""
        from ablate.training.own_code.command_records import CommandRecords
        from ablate.training.own_code.process_environment import METRICS, recipe_hash

        user_code.drop_old_bytecode(user_code.closures(self._sources()))
        with ExitStack() as stack:
            if run.checkpoints:
                own, artifacts = run.checkpoints.path.parent / "command", run.checkpoints.artifacts
            else:
                own = Path(stack.enter_context(TemporaryDirectory()))
                artifacts = own / "artifacts"
            own, artifacts = own.resolve(), artifacts.resolve()
            places = {name: own / name for name in ("recipe.json", "config.json", "checkpoint")}
            for folder in (places["checkpoint"], artifacts):
                folder.mkdir(parents=True, exist_ok=True)
            content = run.recipe.model_dump_json().encode()
            places["recipe.json"].write_bytes(content)
            places["config.json"].write_text(json.dumps(self.config))
            values = {
                "seed": str(run.seed),
                "steps": str(self.steps),
                "device": run.device,
                "folder": str(artifacts),
                "recipe": str(places["recipe.json"]),
                "config": str(places["config.json"]),
                "checkpoint": str(places["checkpoint"]),
            }
            variables = {f"ABLATE_{name.upper()}": value for name, value in values.items()}
            metrics = own / "metrics.jsonl"
            process = stack.enter_context(
                started(
                    self.arguments(values),
                    self._folder,
                    variables | {METRICS: str(metrics)},
                    metrics,
                    own / "lock",
                )
            )
            parsed = CommandRecords(
                None if run.recipe.plain else recipe_hash(content),
                self.metrics == "stdout",
                self.steps,
                self.tokens_per_step,
                provenance.processor(run.device),
            )
            for batch in process.batches():
                yield from parsed.add(batch)
                if parsed.diverged:
                    break
            yield from parsed.finish()
            shutil.rmtree(places["checkpoint"])


def _files(pattern: str) -> list[Path]:
    names = glob.glob(str(Path(pattern).expanduser()), recursive=True)
    return [Path(name) for name in names if Path(name).is_file()]
