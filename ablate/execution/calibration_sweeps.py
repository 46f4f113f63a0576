"""Sweeps of a calibration: their files, as many seeds as fit into a time, and what they propose."""

from pathlib import Path
from typing import TYPE_CHECKING

from ablate.errors import InputError
from ablate.execution.forecast import forecast
from ablate.experiment.forked_design import CALIBRATION, FEWEST_SEEDS, FULL_CALIBRATION
from ablate.experiment.load import Experiment, load
from ablate.experiment.roles import BAD
from ablate.experiment.schema import START
from ablate.experiment.yaml_document import with_values
from ablate.files import Json

if TYPE_CHECKING:
    from ablate.results.calibration import Candidate

_FIRST_SEED = 900_000
"""Calibrations have seeds of their own: a design is not chosen by the seeds that it is used on."""
_MOST_UNLIKE = 3
"""Number of the experiment's own arms that a calibration runs."""


class TooLong(Exception):
    """The shortest calibration takes longer than it may."""

    def __init__(self, seconds: float) -> None:
        super().__init__(seconds)
        self.seconds = seconds


def _sweeps(
    file: Path, experiment: Experiment, seeds: int, bad: str, full: bool
) -> dict[Path, dict[str, Json]]:
    own = [arm for arm in experiment.arms if not arm.outside and arm.name not in experiment.added]
    own = [arm for arm in own if arm.baseline is not None] or [experiment.base.arm({})]
    middle = sorted({0, len(own) // 2, len(own) - 1})
    chosen = [own[index] for index in middle][:_MOST_UNLIKE]
    named = [experiment.against.arm] if experiment.against.arm else []
    arms: dict[str, Json] = {arm.name: dict(arm.knobs) for arm in (*named, *chosen)}
    trunk = START if experiment.base.config.own_code else "bf16"
    design: dict[str, Json] = {"trunk": experiment.keys.design.trunk if experiment.keys.design else trunk}
    common: dict[str, Json] = {
        "question": f"Calibration of {experiment.name}: {experiment.keys.question}",
        "arms": arms,
        "seeds": list(range(_FIRST_SEED, _FIRST_SEED + seeds)),
        "null": True,
        "metric": {"name": experiment.metric.name, "direction": experiment.metric.direction},
        **dict.fromkeys(("ablate", "answer", "search", "published", "constraints", "budget", "design")),
    }
    sweeps = {beside(file, CALIBRATION): common | {"design": design | {"bad": bad}}}
    if full and not experiment.base.config.own_code:
        bad_arm: dict[str, Json] = {f"{BAD}{bad}": {"recipe": bad}}
        sweeps[beside(file, FULL_CALIBRATION)] = common | {"arms": arms | bad_arm}
    return sweeps


def beside(file: Path, suffix: str) -> Path:
    """Return the file of a calibration's sweep, beside that of its experiment."""
    return file.with_name(f"{file.stem}{suffix}.yaml")


def write_fitting(
    file: Path,
    experiment: Experiment,
    seeds: int,
    bad: str,
    full: bool,
    hours: float | None,
    state: Path,
    device: str,
    workers: int = 1,
) -> tuple[int, list[Path]]:
    """Write the sweeps' files with as many seeds as fit into the hours; return their number and the files.
    TooLong if not even three seeds of the forks fit.

    `file` is that of the experiment; `seeds` the number that is wanted; `bad` the preset of the known-bad
    arm; `full`: calibrate full runs, too; `hours` None: any. The forecast is based on the measurements in
    `state`. `workers`: trials at once.
    """
    for count, both in ((seeds, full), (FEWEST_SEEDS, full), (FEWEST_SEEDS, False)):
        files, total = _sweeps(file, experiment, count, bad, both), 0.0
        for path, values in files.items():
            path.write_text(with_values(experiment.text, values), encoding="utf-8")
            try:
                sweep = load(path, device)
            except InputError as error:
                if not path.stem.endswith(FULL_CALIBRATION):
                    raise
                instead = f"{path}: has the full runs of the calibration; --no-full calibrates forks alone"
                raise InputError(*error.problems, instead) from None
            total += forecast(sweep, state, device).seconds
        if hours is None or total / workers <= 3600 * hours:
            return count, list(files)
    raise TooLong(total / workers)


def proposal(experiment: Experiment, chosen: "Candidate", seeds: int, bad: str) -> dict[str, Json]:
    """Return the keys that the proposal changes in the experiment's file."""
    if chosen.design is None:
        return {"design": None, "seeds": seeds}
    design = chosen.design.model_dump(mode="json", exclude_defaults=True)
    design |= {"trunk": chosen.design.trunk, "bad": bad}
    metric: dict[str, Json] = {"name": experiment.metric.name}
    if experiment.metric.direction != "minimize":
        metric["direction"] = experiment.metric.direction
    return {"design": design, "seeds": seeds, "metric": metric}
