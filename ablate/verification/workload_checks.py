"""The contract of workloads, run on a user's own training code: `ablate check`.

A sweep compares runs that differ in one thing, on equal seeds, and continues interrupted ones. That is right
only if the code keeps some promises, and code that breaks one still trains and still gives numbers. Each
check here runs the code for a few steps, breaks one promise on purpose if it can be broken, and compares
records exactly.

A check that fails says what to mend, and ends the checks: those after it would find what follows from it.
Speed and memory are never compared.
"""

import math
import shutil
import tempfile
import time
from collections.abc import Callable, Collection, Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ablate.engines.blocks import passed_over
from ablate.errors import nearest, some_of
from ablate.files import user_path
from ablate.recipes import PRESETS, Recipe
from ablate.results.number_text import counted
from ablate.training.checkpoints import Checkpoints
from ablate.training.fork_design import Forks
from ablate.training.loop import Record
from ablate.training.metric_names import is_added
from ablate.training.own_code.user_errors import described
from ablate.training.trial_run import Telemetry, TrialRun
from ablate.training.workloads.base import Workload
from ablate.verification.file_reads import opened, unseen

STEPS = 6
"""Optimizer steps of a check's runs."""
_LISTED = 10
"""Files that a note names."""
_UNMEASURED = Telemetry(every=0, shadow=0, log=1)
_OFTEN = Telemetry(every=1, shadow=2, log=1)


@dataclass(frozen=True)
class Promise:
    """Outcome of one check."""

    name: str
    kept: bool
    detail: str
    """The comparison, or the first difference."""
    remedy: str = ""
    """Way to mend it; of a kept promise, advice."""
    refused: bool = False
    """The file asks for what the code does not do, so that it is no input of a sweep."""


Curve = dict[tuple[int, str], float]
"""The user's metrics by step and name."""


class Runs:
    """Short runs of one workload, each made once."""

    def __init__(
        self,
        workload: Workload,
        device: str = "cpu",
        recipe: Recipe | None = None,
        metrics: Collection[str] = (),
        anneals: bool | None = None,
        show: Callable[[str], None] = lambda text: None,
    ) -> None:
        """Make no run yet.

        `workload`: the user's code, with the number of steps to run; `recipe`: None for nvfp4; `metrics`:
        names that the experiment compares arms by; `anneals`: the experiment forks the code's checkpoint, and
        the rate falls to zero or not; None: it trains whole runs; `show`: called with the progress of the
        present run, when it begins and after each record.
        """
        self.workload, self.device, self.metrics, self.anneals = workload, device, metrics, anneals
        self.recipe = recipe or PRESETS["nvfp4"]()
        self.show, self._begun, self._since = show, 0, time.time()
        self._opened: set[str] = set()
        self.passed_over: set[str] = set()
        """Subclasses of nn.Linear that the runs have called and no recipe applies to."""
        self._kept: dict[tuple[object, ...], list[Record]] = {}

    @property
    def unseen(self) -> list[Path]:
        """Files that the runs have read and whose content is not in a trial's identity."""
        if not self.workload.own_code:
            return []
        known = {path.resolve() for path in self.workload.files()}
        return unseen(self._opened, known, self._since)

    def records(
        self,
        *,
        recipe: Recipe | None = None,
        seed: int = 0,
        telemetry: Telemetry = _UNMEASURED,
        again: bool = False,
        anneal: bool | None = None,
    ) -> list[Record]:
        """Return the records of a run; `again` runs it once more. `anneal`: of one window from the code's own
        checkpoint instead, with a falling rate or not."""
        key = (recipe, seed, telemetry, again, anneal)
        if key not in self._kept:
            window = {"trunk": None, "positions": (0,), "windows": (self.workload.steps,), "anneal": anneal}
            forks = None if anneal is None else Forks.model_validate(window)
            self._kept[key] = list(self._run(recipe, seed, telemetry, forks=forks))
        return self._kept[key]

    def interrupted(self, at: int, folder: Path) -> tuple[list[Record], int | None]:
        """Return the records of a run that was stopped after `at` steps and continued, and where from."""
        path = folder / "checkpoint.pt"
        first = self._run(checkpoints=Checkpoints(path, "check", 0))
        taken = list(islice(first, at + 1))  # the checkpoint of `at` is written before the next record
        first.close()
        # Only what the second run prints is compared.
        shutil.rmtree(folder / "command" / "runs", ignore_errors=True)
        checkpoints = Checkpoints(path, "check", 0)
        later = list(self._run(checkpoints=checkpoints))
        resumed = checkpoints.resumed
        if not self.workload.resumes and later and later[0].step > self.records()[0].step:
            resumed = later[0].step - 1  # by a checkpoint of its own
        return [*taken[:at], *later], resumed

    def _run(
        self,
        recipe: Recipe | None = None,
        seed: int = 0,
        telemetry: Telemetry = _UNMEASURED,
        checkpoints: Checkpoints | None = None,
        forks: Forks | None = None,
    ) -> Generator[Record, None, None]:
        self._begun += 1
        self.show(f"run {self._begun} of about 8")
        run = TrialRun(recipe or self.recipe, seed, "emulated", self.device, telemetry, checkpoints, forks)
        source = self.workload.records(run)
        with opened() as paths, passed_over(self.passed_over):
            try:
                for record in source:
                    self.show(f"run {self._begun} of about 8: step {record.step} of {self.workload.steps}")
                    yield record
            finally:
                if isinstance(source, Generator):
                    source.close()
                self._opened |= paths


def promises(runs: Runs) -> Iterator[Promise]:
    """Run the checks one after the other, until a promise is broken, and yield the outcome of each."""
    checks = [
        ("it runs and logs finite numbers", _finite),
        *([("it logs what arms are compared by", _compared)] if runs.metrics else []),
        ("it takes the steps that it is given", _takes_its_steps),
        ("it repeats: the same seed gives the same numbers", _repeats),
        *([("it begins from the experiment's start", _starts)] if runs.workload.own_checkpoint else []),
        ("it honours the seed: another seed gives other numbers", _seeds),
        *([] if runs.recipe.plain else [("the recipe reaches the layers", _recipe)]),
        *([("the learning rate falls in a window", _anneals)] if runs.anneals else []),
        ("measuring changes nothing", _telemetry),
        ("it resumes bit for bit", _resumes),
    ]
    for name, check in checks:
        try:
            detail, remedy = check(runs)
        except Exception as error:
            detail = str(described(error) or f"{type(error).__name__}: {error}")
            name, remedy = ("it runs" if check is _finite else name), "mend this error first"
        yield Promise(name, not remedy, detail, remedy, bool(remedy) and check is _starts)
        if remedy:
            break
    if files := runs.unseen:
        folder = Path.cwd()
        shown = [str(path.relative_to(folder) if path.is_relative_to(folder) else path) for path in files]
        yield Promise(
            f"it reads {counted(len(files), 'file')} that a trial's identity does not have",
            True,
            some_of(shown, _LISTED),
            "an edit of such a file does not run a finished trial again; list data under `data:` and code"
            " under `sources:` of the workload",
        )


Outcome = tuple[str, str]
"""Comparison, or the first difference; and the way to mend it, empty if the promise is kept."""


def _finite(runs: Runs) -> Outcome:
    curve = _curve(runs.records())
    if not curve:
        return "no metric was logged", 'call trial.log({"train/loss": ...}) after each step'
    for (step, name), value in curve.items():
        if not math.isfinite(value):
            return f"{name} is {value} at step {step}", "lower the learning rate"
    names, steps = {name for _, name in curve}, {record.step for record in runs.records()}
    return f"{counted(len(names), 'metric')} at {counted(len(steps), 'step')}", ""


def _compared(runs: Runs) -> Outcome:
    logged = sorted({name for record in runs.records() for name in record.metrics})
    own = [name for name in logged if not is_added(name)]
    missing = [name for name in runs.metrics if name not in logged]
    if not missing:
        return ", ".join(runs.metrics), ""
    return (
        f"it logs {', '.join(own)}; not {', '.join(missing)}",
        f"correct `metric:` in the experiment ({nearest(missing[0], own)}), or log it",
    )


def _takes_its_steps(runs: Runs) -> Outcome:
    last, steps = max(record.step for record in runs.records()), runs.workload.steps
    if last == steps:
        return f"{steps} steps", ""
    remedy = "runs of unequal length are not compared: train until the last step, and log it"
    return f"the last record is that of step {last} of {steps}", remedy


def _repeats(runs: Runs) -> Outcome:
    if not (difference := first_difference(runs.records(), runs.records(again=True))):
        return "two runs of seed 0 are equal to the bit", ""
    return (
        difference,
        "something draws random numbers that trial.seed does not determine: a numpy Generator or"
        " random.Random without a seed, os.urandom, the time, or the order of a set; seed each by trial.seed",
    )


def _starts(runs: Runs) -> Outcome:
    """An empty file or folder in the place of `start` gives an error or other numbers. Not seen: weights that
    are read and fit no layer, as by `load_state_dict(..., strict=False)`.
    """
    start = user_path(str(runs.workload.own_checkpoint))
    anneal = None if runs.anneals is None else False  # of a window, in which the rate is another promise
    begun = runs.records(anneal=anneal)
    with tempfile.TemporaryDirectory() as folder:
        empty = Path(folder) / start.name
        empty.mkdir() if start.is_dir() else empty.touch()
        config = runs.workload.model_copy(update={"start": str(empty)})
        try:
            other = Runs(config, runs.device, runs.recipe, show=runs.show).records(anneal=anneal)
        except Exception:  # the user's code may raise any class
            return f"an empty {start.name} ends it", ""
    if first_difference(begun, other):
        return f"an empty {start.name} gives other numbers", ""
    return (
        f"an empty {start.name} gives the same numbers: every arm would train from weights of the code's own",
        "load the weights, and the optimizer's state if there is any, from trial.start, before"
        " trial.checkpoint(...)",
    )


def _seeds(runs: Runs) -> Outcome:
    plain = PRESETS["bf16"]()  # quantisers draw by the seed too
    if first_difference(runs.records(recipe=plain), runs.records(recipe=plain, seed=1)):
        return "seeds 0 and 1 differ", ""
    return (
        "seeds 0 and 1 give the same numbers",
        "weights and data do not depend on trial.seed: look for torch.manual_seed(...) or another seed with a"
        " fixed number, and give it trial.seed",
    )


def _recipe(runs: Runs) -> Outcome:
    if first_difference(runs.records(), runs.records(recipe=PRESETS["bf16"]())):
        share = max((record.metrics.get("flops/fp4_share", 0.0) for record in runs.records()), default=0.0)
        more = f"; {share:.0%} of the layers' FLOPs in FP4" if share else ""
        if runs.passed_over:
            names = ", ".join(sorted(runs.passed_over))
            more += f"; not converted: {names} (linears=[...] takes a subclass that computes x W^T + b)"
        return f"the recipe and bf16 differ{more}", ""
    return (
        "the recipe and bf16 give the same numbers",
        "the model that is trained is not the one that trial.convert changed: convert it before the first"
        " step, and call its layers (not their weights)",
    )


def _anneals(runs: Runs) -> Outcome:
    """The rate is multiplied by the factor: a window in which it falls gives other numbers."""
    try:
        if first_difference(runs.records(anneal=True), runs.records(anneal=False)):
            return "a window with a falling rate and one without differ", ""
        detail = "a window with a falling rate and one without give the same numbers"
    except RuntimeError as error:
        detail = str(error)
    return (
        detail,
        "multiply the rate by trial.lr_factor in every step, before the optimizer's; leave out a warm-up and"
        " a decay of your own where trial.forked is true",
    )


def _telemetry(runs: Runs) -> Outcome:
    if not (difference := first_difference(runs.records(), runs.records(telemetry=_OFTEN))):
        return "measured in every step and in none: equal to the bit", ""
    remedy = "a measurement of operands changed the training; a hook or a metric of your own may draw random"
    return difference, f"{remedy} numbers"


def _resumes(runs: Runs) -> Outcome:
    half = max(1, runs.workload.steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        records, resumed = runs.interrupted(half, Path(folder))
    if resumed is None and not runs.workload.resumes:
        return "it continues from no checkpoint in ABLATE_CHECKPOINT: a killed trial begins anew", ""
    if resumed is None:
        return (
            "no checkpoint was written",
            "call trial.checkpoint(model=model, optimizer=optimizer) before the steps; without it a killed"
            " trial begins anew",
        )
    seen = {record.step for record in records}  # a command may be ahead of what was read when it is stopped
    whole = [record for record in runs.records() if runs.workload.resumes or record.step in seen]
    if not (difference := first_difference(whole, records)):
        return f"stopped after step {half} and continued: equal to the bit", ""
    if not runs.workload.resumes:
        return difference, "something that later steps depend on is not in the checkpoint of the command"
    return (
        difference,
        "something that later steps depend on is not in trial.checkpoint(...): the optimizer, a scheduler, a"
        " moving average, a scaler, or the loader's place; take batches from trial.steps(loader)",
    )


def _curve(records: list[Record]) -> Curve:
    return {
        (record.step, name): value
        for record in records
        for name, value in record.metrics.items()
        if not is_added(name)
    }


def first_difference(one: list[Record], other: list[Record]) -> str:
    """Return where the user's metrics of two runs first differ; "" if they are equal."""
    first, second = _curve(one), _curve(other)
    for key in sorted(first.keys() | second.keys()):
        a, b = first.get(key), second.get(key)
        if a != b and not (a is not None and b is not None and math.isnan(a) and math.isnan(b)):
            return f"{key[1]} at step {key[0]}: {a!r} and {b!r}"
    return ""
