"""The contract of workloads, run on a user's own training code: `ablate check`.

A sweep compares runs that differ in one thing, on equal seeds, and continues interrupted ones. That is right
only if the code keeps some promises, and code that breaks one still trains and still gives numbers. Each
check here runs the code for a few steps, breaks one promise on purpose if it can be broken, and compares
records exactly.

A check that fails says what to mend. Speed and memory are never compared.
"""

import math
import tempfile
from collections.abc import Collection, Generator, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from ablate.errors import nearest
from ablate.recipes import PRESETS, Recipe
from ablate.training.checkpoints import Checkpoints
from ablate.training.fork_design import Forks
from ablate.training.loop import Record, Telemetry
from ablate.training.metric_names import is_added
from ablate.training.workloads import Workload
from ablate.training.workloads.command import Command
from ablate.training.workloads.python import Python

STEPS = 6
"""Optimizer steps of a check's runs."""
_SELDOM = Telemetry(every=10**6, shadow=10**6, log=1)
_OFTEN = Telemetry(every=1, shadow=2, log=1)


@dataclass(frozen=True)
class Promise:
    """Outcome of one check."""

    name: str
    kept: bool
    detail: str
    """The comparison, or the first difference."""
    remedy: str = ""
    """Way to mend it; empty if the promise is kept."""


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
        anneals: bool = False,
    ) -> None:
        """Make no run yet.

        Args:
            workload: the user's code, with the number of steps to run.
            device: device to compute on.
            recipe: the recipe of the runs; None: nvfp4.
            metrics: names that the experiment compares arms by.
            anneals: the experiment forks the code's checkpoint at a rate that falls to zero.
        """
        self.workload, self.device, self.metrics, self.anneals = workload, device, metrics, anneals
        self.recipe = recipe or PRESETS["nvfp4"]()
        self._kept: dict[tuple[object, ...], list[Record]] = {}

    def records(
        self,
        *,
        recipe: Recipe | None = None,
        seed: int = 0,
        telemetry: Telemetry = _SELDOM,
        again: bool = False,
    ) -> list[Record]:
        """Return the records of a run; `again` runs it once more."""
        key = (recipe, seed, telemetry, again)
        if key not in self._kept:
            self._kept[key] = list(
                self.workload.records(recipe or self.recipe, seed, "emulated", self.device, telemetry)
            )
        return self._kept[key]

    def forked(self, anneal: bool) -> list[Record]:
        """Return the records of one window from the code's own checkpoint, with a falling rate or not."""
        assert isinstance(self.workload, Python), "only such code forks its own checkpoint"
        forks = Forks(trunk=None, positions=(0,), windows=(self.workload.steps,), anneal=anneal)
        return list(self.workload.records(self.recipe, 0, "emulated", self.device, _SELDOM, forks=forks))

    def interrupted(self, at: int, folder: Path) -> tuple[list[Record], int | None]:
        """Return the records of a run that was stopped after `at` steps and continued, and where from."""
        path = folder / "checkpoint.pt"
        first = self.workload.records(
            self.recipe, 0, "emulated", self.device, _SELDOM, Checkpoints(path, "check", 0)
        )
        taken = []
        for record in islice(first, at + 1):  # the checkpoint of `at` is written before the next record
            taken.append(record)
        if isinstance(first, Generator):
            first.close()
        checkpoints = Checkpoints(path, "check", 0)
        rest = list(self.workload.records(self.recipe, 0, "emulated", self.device, _SELDOM, checkpoints))
        return [*taken[:at], *rest], checkpoints.resumed


def promises(runs: Runs) -> Iterator[Promise]:
    """Run every check, one after the other; the first failure to run ends them."""
    try:
        first = runs.records()
    except Exception as error:
        where = _place(error)
        yield Promise("it runs", False, f"{type(error).__name__}: {error}{where}", "mend this error first")
        return
    yield _finite(first)
    if runs.metrics:
        yield _compared(first, runs.metrics)
    reaches = () if runs.recipe.plain else (_recipe,)
    forks = (_anneals,) if runs.anneals else ()
    yield _takes_its_steps(first, runs.workload.steps)
    for check in (_repeats, _seeds, *reaches, *forks, _telemetry, _resumes):
        try:
            yield check(runs)
        except Exception as error:
            name = check.__name__.strip("_")
            yield Promise(name, False, f"{type(error).__name__}: {error}{_place(error)}", "mend this error")


def _finite(records: list[Record]) -> Promise:
    curve = _curve(records)
    wrong = next(
        (
            f"{name} is {value} at step {step}"
            for (step, name), value in curve.items()
            if not math.isfinite(value)
        ),
        "",
    )
    steps = {record.step for record in records}
    if not curve:
        return Promise(
            "it logs", False, "no metric was logged", 'call trial.log({"train/loss": ...}) after each step'
        )
    return Promise(
        "it runs and logs finite numbers",
        not wrong,
        wrong or f"{len({name for _, name in curve})} metrics at {len(steps)} steps",
        "lower the learning rate" if wrong else "",
    )


def _compared(records: list[Record], metrics: Collection[str]) -> Promise:
    logged = sorted({name for record in records for name in record.metrics})
    own = [name for name in logged if not is_added(name)]
    missing = [name for name in metrics if name not in logged]
    return Promise(
        "it logs what arms are compared by",
        not missing,
        f"it logs {', '.join(own)}; not {', '.join(missing)}" if missing else ", ".join(metrics),
        f"correct `metric:` in the experiment ({nearest(missing[0], own)}), or log it" if missing else "",
    )


def _takes_its_steps(records: list[Record], steps: int) -> Promise:
    last = max(record.step for record in records)
    return Promise(
        "it takes the steps that it is given",
        last == steps,
        f"the last record is that of step {last} of {steps}" if last < steps else f"{steps} steps",
        "runs of unequal length are not compared: train until the last step, and log it",
    )


def _repeats(runs: Runs) -> Promise:
    difference = first_difference(runs.records(), runs.records(again=True))
    return Promise(
        "it repeats: the same seed gives the same numbers",
        not difference,
        difference or "two runs of seed 0 are equal to the bit",
        "something draws random numbers that trial.seed does not determine: a numpy Generator or"
        " random.Random without a seed, os.urandom, the time, or the order of a set; seed each by trial.seed"
        if difference
        else "",
    )


def _seeds(runs: Runs) -> Promise:
    plain = PRESETS["bf16"]()  # quantisers draw by the seed too
    same = not first_difference(runs.records(recipe=plain), runs.records(recipe=plain, seed=1))
    return Promise(
        "it honours the seed: another seed gives other numbers",
        not same,
        "seeds 0 and 1 give the same numbers" if same else "seeds 0 and 1 differ",
        "weights and data do not depend on trial.seed: look for torch.manual_seed(...) or another seed with a"
        " fixed number, and give it trial.seed"
        if same
        else "",
    )


def _telemetry(runs: Runs) -> Promise:
    difference = first_difference(runs.records(), runs.records(telemetry=_OFTEN))
    return Promise(
        "measuring changes nothing",
        not difference,
        difference or "measured in every step and in none: equal to the bit",
        "a measurement of operands changed the training; a hook or a metric of your own may draw random"
        " numbers"
        if difference
        else "",
    )


def _recipe(runs: Runs) -> Promise:
    same = not first_difference(runs.records(), runs.records(recipe=PRESETS["bf16"]()))
    share = max((record.metrics.get("flops/fp4_share", 0.0) for record in runs.records()), default=0.0)
    return Promise(
        "the recipe reaches the layers",
        not same,
        "nvfp4 and bf16 give the same numbers"
        if same
        else "nvfp4 and bf16 differ" + (f"; {share:.0%} of the layers' FLOPs in FP4" if share else ""),
        "the model that is trained is not the one that trial.convert changed: convert it before the first"
        " step, and call its layers (not their weights)"
        if same
        else "",
    )


def _anneals(runs: Runs) -> Promise:
    """The rate is multiplied by the factor: a window in which it falls gives other numbers."""
    try:
        same = not first_difference(runs.forked(True), runs.forked(False))
        detail = "a window with a falling rate and one without give the same numbers" if same else ""
    except RuntimeError as error:
        same, detail = True, str(error)
    return Promise(
        "the learning rate falls in a window",
        not same,
        detail or "a window with a falling rate and one without differ",
        "multiply the rate by trial.lr_factor in every step, before the optimizer's; leave out a warm-up and"
        " a decay of your own where trial.forked is true"
        if same
        else "",
    )


def _resumes(runs: Runs) -> Promise:
    name = "it resumes bit for bit"
    half = max(1, runs.workload.steps // 2)
    with tempfile.TemporaryDirectory() as folder:
        records, resumed = runs.interrupted(half, Path(folder))
    if resumed is None and isinstance(runs.workload, Command):
        return Promise(
            name, True, "it writes no checkpoint into ABLATE_CHECKPOINT: a killed trial begins anew"
        )
    if resumed is None:
        return Promise(
            name,
            False,
            "no checkpoint was written",
            "call trial.checkpoint(model=model, optimizer=optimizer) before the steps; without it a killed"
            " trial begins anew",
        )
    difference = first_difference(runs.records(), records)
    return Promise(
        name,
        not difference,
        difference or f"stopped after step {half} and continued: equal to the bit",
        "something that later steps depend on is not in trial.checkpoint(...): the optimizer, a scheduler, a"
        " moving average, a scaler, or the loader's place; take batches from trial.steps(loader)"
        if difference
        else "",
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
            step, name = key
            return f"{name} at step {step}: {a!r} and {b!r}"
    return ""


def _place(error: BaseException) -> str:
    """Return file and line of the user's code that raised an error."""
    import traceback

    frames = [
        f for f in traceback.extract_tb(error.__traceback__) if "ablate" not in Path(f.filename).parts[:-1]
    ]
    own = [f for f in frames if "site-packages" not in f.filename and "lib/python" not in f.filename]
    return f" ({own[-1].filename}:{own[-1].lineno})" if own else ""
