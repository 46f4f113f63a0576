"""Workload that is a user's own training function, in a file beside the experiment.

    workload: {python: {file: train.py, function: train, steps: 300, config: {width: 256, lr: 1.0e-3}}}
    workload: {python: {function: package.train:main, steps: 300}}    # of the folder, or installed

The function gets an `ablate.Trial` (training/own_code/trial.py). The file is read to plan a sweep and
imported only in the processes of trials. What a trial is depends on the content of the file and of the files
beside it that it imports, of the declared data, and on `config`; never on where they lie.
"""

from __future__ import annotations

import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib.metadata import entry_points
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any, ClassVar, cast

from pydantic import Field

from ablate import own_source
from ablate.engines.gpu_access import CPU_TRIAL, asks_for_gpu
from ablate.errors import InputError, first_line, nearest
from ablate.files import user_path
from ablate.own_source import Code, functions
from ablate.recipes.recipe import Run
from ablate.training.metric_names import ENDINGS, is_added
from ablate.training.workloads.own_code import OwnCode

if TYPE_CHECKING:
    from ablate.training.checkpoints import RunState
    from ablate.training.fork_design import Window
    from ablate.training.loop import Record
    from ablate.training.trial_run import TrialRun

GROUP = "ablate.workloads"
"""Group of entry points by which installed packages offer training functions."""
_LISTED = ", or list the file under sources"


class Python(OwnCode):
    """The user's function, its configuration, and the length of a run."""

    VERSION: ClassVar[int] = 1
    PATHS: ClassVar[tuple[str, ...]] = ("file", "start", "data", "sources")
    forks: ClassVar[bool] = True
    twins: ClassVar[bool] = True
    measures: ClassVar[bool] = True
    resumes: ClassVar[bool] = True
    steps_timed: ClassVar[bool] = True

    file: str = Field(".", min_length=1)
    """Python file with the function, relative to the experiment's file; or the folder of its module."""
    function: str = Field("train", min_length=1)
    """Function at the top level of the file; it takes the trial. Without a file: `module:function`, or the
    name of an entry point of the group `ablate.workloads`."""
    decay_start: int | None = Field(None, ge=0)
    """First step of the learning rate's decay, for schedules that begin there."""
    start: str | None = None
    """File or folder with weights from which every arm begins, `trial.start`."""
    sources: tuple[str, ...] = Field((), strict=False)
    """Globs of further code, beside what the file imports by name."""

    @property
    def imports(self) -> tuple[str, ...]:
        return ("ablate.training.own_code.trial",)

    @property
    def length(self) -> Run:
        return Run(self.steps, self.tokens_per_step, self.decay_start)

    @property
    def own_checkpoint(self) -> str | None:
        return self.start

    @property
    def _code(self) -> Code:
        return code_of(user_path(self.file), self.function)

    def problems(self) -> Iterator[tuple[str, str]]:
        code: Code | None = None
        try:
            code = self._code
        except ValueError as error:
            yield "function", str(error)
        else:
            if why := misfit(code):
                yield ("function" if "function" in why and code.path.is_file() else "file"), why
                code = None
        for name, values in (("start", (self.start,) if self.start else ()), ("data", self.data)):
            for value in values:
                if not user_path(value).exists():
                    yield name, f"{value}: no such file or folder"
        if code is not None:
            try:
                own_source.digest(code, self.sources)
            except SyntaxError as error:
                yield "file", f"{error.filename}:{error.lineno}: {error.msg}"
            else:
                hidden = own_source.hidden_files(code) if not self.sources else ()
                yield from (("file", f"{place}: list such files under sources") for place in hidden)
                if declares_config(code):
                    from ablate.training.config_schema import misfits

                    for place, why in misfits(code, self.config):
                        yield ".".join(("config", *place)), why

    def identity(self) -> dict[str, Any]:
        return self.canonical({"file", "start", "data", "sources"})

    def fingerprint(self) -> str:
        parts = [own_source.digest(self._code, self.sources)]
        parts += [own_source.content(user_path(name)) for name in self.data]
        if self.start:
            parts.append(f"start:{own_source.content(user_path(self.start))}")
        return "-".join(parts)

    def files(self) -> Iterator[Path]:
        yield from own_source.files_of(self._code, self.sources)
        yield from super().files()
        if self.start:
            yield from own_source.listed(user_path(self.start))

    def compute(self, run: TrialRun) -> Iterator[Record]:
        """Call the function, and yield a Record for each step of which it logged something. For a forked
        trial it is called once per window, from `start`. Its last metrics there are recorded under the
        window's name. A twin moves the weights of converted models by one ulp before the first step."""
        saved, forks = run.checkpoints.take() if run.checkpoints else None, run.forks
        if forks is None:
            yield from self._call(run, saved)
            return
        begun = saved["step"] if saved else 0
        for window in (window for window in forks.cells if window.last > begun):
            own, saved = (saved if saved and saved["step"] > window.begun else None), None
            for record in self._call(run, own, window):
                yield record._replace(metrics=in_window(record, window, window == forks.cells[-1]))
                if not ENDINGS.isdisjoint(record.metrics):
                    return

    def _call(self, run: TrialRun, saved: RunState | None, window: Window | None = None) -> Iterator[Record]:
        from ablate.training.own_code.trial import Trial, TrialState, emitted, seeded

        code = self._code
        own_source.drop_old_bytecode(own_source.files_of(code, self.sources))
        watch = own_source.Watch(self.files())
        function, declared = own_source.load(code), declares_config(code)
        watch.refuse(_LISTED)
        length = Run(window.steps, self.tokens_per_step) if window else self.length
        start = user_path(self.start) if self.start else None
        data = tuple(user_path(name) for name in self.data)
        state = cast("TrialState | None", saved)  # checkpoints hold what a workload gave

        def work(emit: Callable[[Record], None]) -> None:
            with seeded(run.seed), TemporaryDirectory() as scratch:
                folder = run.checkpoints.artifacts if run.checkpoints else Path(scratch)
                trial = Trial(run, self.config, length, emit, folder, data, start, state, window, self.watch)
                with _explained(run.device, code.path.parent):
                    if declared:
                        from ablate.training.config_schema import built

                        function(trial, built(function, self.config))
                    else:
                        function(trial)
                watch.refuse(_LISTED)
                trial.finish()

        for record in emitted(work):
            watch.refuse(_LISTED)
            yield record


@contextmanager
def _explained(device: str, folder: Path) -> Iterator[None]:
    """Raise InputError, at the line in the folder of the user's code, for code that asks for a GPU in a trial
    on the CPU."""
    try:
        yield
    except (RuntimeError, AssertionError) as error:
        if device != "cpu" or not asks_for_gpu(error):
            raise
        frames = traceback.extract_tb(error.__traceback__)
        own = [frame for frame in frames if folder in Path(frame.filename).parents]
        at = f"{own[-1].filename}:{own[-1].lineno}: " if own else ""
        raise InputError(f"{at}{CPU_TRIAL} ({first_line(error)})") from error


def in_window(record: Record, window: Window, longest: bool) -> dict[str, float]:
    """Return the metrics of a record of own code in a window. The last record has what the code logged under
    the window's name. Only the `longest` window's records have it under its own: curves of several windows
    would jump from one to the next."""
    logged = {name for name in record.metrics if not is_added(name) and name not in ENDINGS}
    kept = {name: value for name, value in record.metrics.items() if longest or name not in logged}
    if record.step == window.last:
        kept |= {window.metric(name): record.metrics[name] for name in logged}
    return kept


def code_of(place: Path, function: str) -> Code:
    """Return the code that a workload's `file` and `function` name: `train` in the file `place`; or, if
    `place` is a folder, `package.module:train` or the name of an entry point. ValueError if there is no such
    module or entry point."""
    if not place.is_dir():
        return Code(place, function, place.parent)
    if ":" not in function:
        known = {entry.name: entry.value for entry in entry_points(group=GROUP)}
        if function not in known:
            offered = f"; installed packages offer {', '.join(sorted(known))}" if known else ""
            raise ValueError(
                f"{function!r} names no training function: give `file: train.py` with it,"
                f" `function: module:function`, or an entry point of the group {GROUP}{offered}"
            )
        function = known[function]
    return own_source.find(place, function)


def misfit(code: Code) -> str | None:
    """Return why a function cannot be a workload; None if it can."""
    path, function = code.path, code.function
    try:
        known = functions(path)
    except SyntaxError as error:
        return f"{path}:{error.lineno}: {error.msg}"
    except UnicodeDecodeError:
        return f"{path} is no Python file"
    except OSError as error:
        return f"{path}: {error.strerror}"
    if function not in known:
        return f"{path} has no function {function!r} at its top level; {nearest(function, known)}"
    taken = known[function].args
    parameters = [*taken.posonlyargs, *taken.args]
    required = len(parameters) - len(taken.defaults)
    if not parameters or required > 2:
        where = f"{path}:{known[function].lineno}"
        return f"{where}: {function} must take one argument, the trial, or two: trial and config"
    return None


def declares_config(code: Code) -> bool:
    """Return True if the function's second parameter is annotated, so that its class checks the config."""
    taken = functions(code.path)[code.function].args
    parameters = [*taken.posonlyargs, *taken.args]
    return len(parameters) > 1 and parameters[1].annotation is not None
