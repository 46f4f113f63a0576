"""Workload that is any command: training code that must stay a process of its own.

    workload: {command: {run: "torchrun train.py --lr {lr} --seed {seed}", steps: 300, config: {lr: 1.0e-3}}}

The command gets the recipe as a JSON file and everything else as environment variables
(training/own_code/process_environment.py) and placeholders. It writes metrics as lines of JSON. No shell is
involved. `{export:te}` in `run` gives an unchanged command the recipe in the form of its own stack
(training/own_code/exports.py).
What a trial is depends on the command, on `config`, and on the content of the declared sources and data;
never on where they lie. That the same seed gives the same numbers is the command's own promise.

Refused: an unknown placeholder, a program that is not there, a command without sources, and, in a trial, a
quantised recipe that is neither exported nor confirmed by the command.
"""

from __future__ import annotations

import glob
import json
import re
import shlex
import shutil
import string
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field, model_validator

from ablate import own_source, provenance
from ablate.errors import nearest
from ablate.files import Json, user_path
from ablate.numerics.spec import Spec
from ablate.recipes.targets.commands import STACKS
from ablate.training.log_readers import LineReader, open_reader
from ablate.training.log_readers.lightning import PROGRESS_BAR
from ablate.training.own_code.command_process import earlier, held, search_path, started
from ablate.training.own_code.exports import (
    PLACEHOLDER,
    Exported,
    ExportOptions,
    NotExpressed,
    Paths,
    misfit,
    of_precision,
    stacks_in,
    with_exports,
    write,
)
from ablate.training.workloads.own_code import OwnCode

if TYPE_CHECKING:
    from ablate.recipes.layers import Layer
    from ablate.recipes.recipe import Recipe
    from ablate.training.loop import Record
    from ablate.training.trial_run import TrialRun

PLACEHOLDERS = ("seed", "steps", "device", "folder", "recipe", "config", "checkpoint")
"""Placeholders of every command, beside the keys of its config."""
_Words = Literal["stdout", "file", "torchtitan", "megatron", "modded-nanogpt", "hf", "lightning"]
_JSON_LINES = ("stdout", "file")
"""Words for metrics that are lines of JSON."""
_SHELL = (".sh", ".bash")
_FOLDERS = re.compile(r"(^|=)/\S*/")
"""Leading folders of an absolute path, alone or after `--option=`."""


class LogLines(Spec):
    """Lines of a log whose reader needs a value; one of the two."""

    hf: int | None = Field(None, ge=1)
    """`logging_steps` of Hugging Face's Trainer, whose lines have no step."""
    regex: str | None = None
    """Regular expression with a group `step` and groups named as metrics: `loss`, `val__loss`."""

    @model_validator(mode="after")
    def _one(self) -> LogLines:
        if (self.hf is None) == (self.regex is None):
            raise ValueError("give one of hf and regex")
        return self


class Command(OwnCode):
    """A command line, what it reads, and the length of a run."""

    VERSION: ClassVar[int] = 1
    in_process: ClassVar[bool] = False
    PATHS: ClassVar[tuple[str, ...]] = ("folder", "sources", "data")
    LATER: ClassVar[frozenset[str]] = OwnCode.LATER | {"export"}

    run: str = Field(min_length=1)
    """Program and arguments, split as a shell does, with placeholders (docs/use/command_workload.md)."""
    export: ExportOptions = ExportOptions()
    """Facts of the model that exports need."""
    folder: str = "."
    """Working directory of the command, relative to the experiment's file."""
    sources: tuple[str, ...] = Field((), strict=False)
    """Globs of the command's code; Python files stand for what they import beside them, too.

    Without any, the files that `run` names.
    """
    metrics: _Words | LogLines = "stdout"
    """Lines of standard output that are metrics, beside those in ABLATE_METRICS: JSON (`stdout`), none
    (`file`), or those of a training stack (docs/use/command_workload.md)."""

    @property
    def _folder(self) -> Path:
        return user_path(self.folder).resolve()

    def problems(self) -> Iterator[tuple[str, str]]:
        for key in self.config:
            if key in (*PLACEHOLDERS, PLACEHOLDER):
                yield f"config.{key}", f"{{{key}}} is a placeholder of every command; choose another name"
        if not self._folder.is_dir():
            yield "folder", f"{self.folder}: no such folder"
        why = self._misfit()
        if why:
            yield "run", why
        yield from self._export_problems(why)
        try:
            self._reader()
        except ValueError as error:
            yield "metrics", str(error)
        for pattern in self.sources:
            if not _files(pattern):
                yield "sources", f"{pattern}: no such file"
        words = [] if why else [word for word in shlex.split(self.run)[1:] if not {"{", "="} & {*word}]
        script = next((word for word in words if word.endswith((".py", *_SHELL))), "")
        if script and not self.sources and not (self._folder / script).is_file():
            missing = f"{script}: no such file in {self._folder}"
            yield "run", f"{missing}; list code that is elsewhere under sources"
        elif not why and not self._sources():
            unnamed = "is empty, and run names no file"
            yield "sources", f"{unnamed}; list the command's code, so that an edit runs it anew"
        for value in self.data:
            if not user_path(value).exists():
                yield "data", f"{value}: no such file or folder"
        try:
            own_source.digest_of(self._sources() if not why else (), self._folder)
        except SyntaxError as error:
            yield "sources", f"{error.filename}:{error.lineno}: {error.msg}"

    def _export_problems(self, unfit: str | None) -> Iterator[tuple[str, str]]:
        """Yield why the options of exports cannot be used. `unfit`: why `run` cannot be run, if it cannot."""
        if not unfit and not self.stacks and self.export != ExportOptions():
            yield "export", "has no effect, since run has no {export:NAME} with the name of a training stack"
        if not unfit and self.stacks:
            yield from self._unlike_an_export()
        try:
            _ = self.linear_layers
        except (OSError, ValueError) as error:
            yield "export.model", f"{self.export.model}: {error}"

    def _unlike_an_export(self) -> Iterator[tuple[str, str]]:
        """Yield what would make arms or seeds of a command with exports train alike, or by another recipe."""
        texts = {"run": self.run}
        texts |= {
            path.name: path.read_text(errors="replace") for path in self._sources() if path.suffix in _SHELL
        }
        named = f"{{{PLACEHOLDER}:{self.stacks[0]}}}"
        for place, text in texts.items():
            if word := of_precision(text):
                yield "run", f"{place} has {word}: remove it, since {named} writes each arm's precision"
        seeded = any(
            word in text for text in texts.values() for word in ("{seed}", "{config}", "ABLATE_SEED")
        )
        if not seeded:
            why = "has no {seed}, so that all seeds would be one run"
            yield "run", f"{why}; add the job's option, such as --seed {{seed}}"

    def remarks(self) -> Iterator[str]:
        """Yield that the metrics of a stack would not be read."""
        for stack in ("torchtitan", "megatron"):
            if stack in self.stacks and self.metrics != stack:
                read = self.metrics if isinstance(self.metrics, str) else "lines of your own"
                yield f"Metrics are read from {read}; what {stack} prints is read with `metrics: {stack}`."

    def _reader(self) -> LineReader | None:
        """Return the reader of the command's log; None if its metrics are lines of JSON. ValueError if there
        is none that could read what the stack prints.
        """
        if self.metrics == "lightning":
            raise ValueError(PROGRESS_BAR)
        if isinstance(self.metrics, LogLines):
            return open_reader(self.metrics.model_dump(exclude_none=True))
        return None if self.metrics in _JSON_LINES else open_reader(self.metrics)

    def _misfit(self) -> str | None:
        valid = (*PLACEHOLDERS, PLACEHOLDER, *self.config)
        try:
            tokens = shlex.split(self.run)
            for token in tokens:
                for _, name, form, conversion in string.Formatter().parse(token):
                    if name is None:
                        continue
                    if name == PLACEHOLDER and not conversion:
                        if why := misfit(form or ""):
                            return why
                        continue
                    if name not in valid:
                        return f"no such placeholder: {{{name}}}; {nearest(name, valid)}; {{{{ is a brace"
                    if form or conversion:
                        return f"{{{name}}} takes no format; write the value in config as it shall appear"
        except ValueError as error:
            return f"cannot be split: {error}; write {{{{ and }}}} for braces"
        if not tokens:
            return "is empty; give a program and its arguments"
        program = tokens[0]
        there = (
            (self._folder / program).is_file()
            if "/" in program
            else shutil.which(program, path=search_path())
        )
        return None if "{" in program or there else f"no such program: {program}"

    def _sources(self) -> list[Path]:
        """Return the files of the command's code: those of `sources`, else those that `run` names."""
        if self.sources:
            return sorted({file for pattern in self.sources for file in _files(pattern)})
        first, *others = shlex.split(self.run)
        program = [first] if "/" in first and not first.startswith("/") else []
        paths = (self._folder / token.rpartition("=")[2] for token in (*program, *others) if token)
        return sorted({path for path in paths if path.is_file()})

    def identity(self) -> dict[str, Json]:
        run = shlex.join(_FOLDERS.sub(r"\1", token) for token in shlex.split(self.run))
        left_out = {"folder", "sources", "data", "metrics", "log_every", "export"}
        read = {} if self.metrics in _JSON_LINES else {"metrics": self.canonical()["metrics"]}
        fields = self.canonical(left_out) | {"run": run} | read
        if not self.stacks:
            return fields
        layers: list[Json] = [f"{layer.block} {layer.name}" for layer in self.linear_layers]
        exports: dict[str, Json] = {stack: STACKS[stack].version for stack in self.stacks}
        return fields | {"export": {"blocks": self.export.blocks, "layers": layers, "versions": exports}}

    def fingerprint(self) -> str:
        parts = [own_source.digest_of(self._sources(), self._folder)]
        return "-".join(parts + [own_source.content(user_path(name)) for name in self.data])

    def files(self) -> Iterator[Path]:
        yield from own_source.closures(self._sources())
        yield from super().files()

    @property
    def linear_layers(self) -> tuple[Layer, ...]:
        from ablate.training.models.described import outline

        return () if self.export.model is None else outline(self.export.model).layers

    def contradictions(self, recipe: Recipe) -> Iterator[tuple[str, str]]:
        try:
            self.exported(recipe, dict.fromkeys(PLACEHOLDERS, "0"), Path("export"))
        except NotExpressed as lost:
            yield from lost.reasons

    @property
    def stacks(self) -> tuple[str, ...]:
        named = (stack for token in shlex.split(self.run) for stack in stacks_in(token)[0])
        return tuple(dict.fromkeys(named))

    def exported(self, recipe: Recipe, values: Mapping[str, str], folder: Path) -> Exported:
        """Return program and arguments with all placeholders filled in, those of PLACEHOLDERS by `values`,
        and what exports to the folder need beside them. NotExpressed if a stack cannot express the recipe."""
        texts: dict[str, object] = {
            key: value if isinstance(value, str) else json.dumps(value) for key, value in self.config.items()
        }
        texts |= {**values, PLACEHOLDER: Paths(folder)}

        def fill(options: Mapping[str, Sequence[str]]) -> list[str]:
            words: list[str] = []
            for token in shlex.split(self.run):
                stacks, alone = stacks_in(token)
                words += options.get(stacks[0], ()) if alone else [token.format_map(texts)]
            return words

        return with_exports(self.stacks, recipe, self.export, self.linear_layers, folder, fill)

    def command(self, recipe: Recipe, seed: int, device: str) -> Exported:
        values = {name: f"TRIAL/{name}" for name in PLACEHOLDERS}
        values |= {"seed": str(seed), "steps": str(self.steps), "device": device}
        return self.exported(recipe, values, Path("TRIAL", PLACEHOLDER))

    def compute(self, run: TrialRun) -> Iterator[Record]:
        from ablate.training.own_code.command_records import CommandRecords
        from ablate.training.own_code.process_environment import recipe_hash

        own_source.drop_old_bytecode(own_source.closures(self._sources()))
        with ExitStack() as stack:
            if run.checkpoints:
                own, artifacts = run.checkpoints.path.parent / "command", run.checkpoints.artifacts
            else:
                own = Path(stack.enter_context(TemporaryDirectory()))
                artifacts = own / "artifacts"
            own, artifacts = own.resolve(), artifacts.resolve()
            shutil.rmtree(own / "checkpoint.over", ignore_errors=True)
            recipe, config, checkpoint = own / "recipe.json", own / "config.json", own / "checkpoint"
            for folder in (checkpoint, artifacts):
                folder.mkdir(parents=True, exist_ok=True)
            content = run.recipe.model_dump_json().encode()
            recipe.write_bytes(content)
            config.write_text(json.dumps(self.config))
            given = (run.seed, self.steps, run.device, artifacts, recipe, config, checkpoint)
            values = dict(zip(PLACEHOLDERS, map(str, given), strict=True))
            exports = self.exported(run.recipe, values, artifacts / PLACEHOLDER)
            write(exports, self.stacks)
            given_to_all = {f"ABLATE_{name.upper()}": value for name, value in values.items()}
            variables = {**given_to_all, **exports.variables}
            lock = stack.enter_context(held(own))
            parsed = CommandRecords(
                None if run.recipe.plain else recipe_hash(content),
                bool(self.stacks),
                self.metrics == "stdout",
                self.steps,
                self.tokens_per_step,
                provenance.processor(run.device),
                self.watch,
            )
            for batches in earlier(own):
                yield from parsed.again(batches, self._reader())
            if not parsed.diverged:
                parsed.begin(self._reader())
                process = stack.enter_context(started(exports.words, self._folder, variables, own, lock))
                for batch in process.batches():
                    yield from parsed.add(batch)
                    if parsed.diverged:
                        break
            yield from parsed.finish()
            # Renamed first: a kill would leave part of a checkpoint, from which no command continues.
            shutil.rmtree(checkpoint.rename(own / "checkpoint.over"))
            shutil.rmtree(own / "runs")


def _files(pattern: str) -> list[Path]:
    names = glob.glob(str(user_path(pattern)), recursive=True)
    return [Path(name) for name in names if Path(name).is_file()]
