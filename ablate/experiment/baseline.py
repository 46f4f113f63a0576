"""Baseline of each arm: the preset, the knobs or the arm that a file names under `against`.

A preset or knobs are applied at each arm's own workload values: with `against: bf16`, the arm with `lr: 1e-3`
is compared with bf16 at `lr: 1e-3`. A file may therefore have several baselines. An arm that is named as the
baseline keeps its own values and is the baseline of all other arms.
"""

from dataclasses import dataclass, replace

from ablate.errors import Reading, nearest
from ablate.experiment.arms import Arm, KnobError, Knobs, StartingPoint
from ablate.experiment.expand import build_arm
from ablate.experiment.schema import ExperimentFile
from ablate.experiment.yaml_document import Document
from ablate.recipes import PRESETS


@dataclass(frozen=True)
class Against:
    """Baseline that a file names: knobs, applied at each arm's own workload values, or one arm, for all
    others."""

    knobs: Knobs
    arm: Arm | None = None
    """The arm that was named, which keeps its own workload values."""

    def pins(self, knob: str) -> bool:
        """Return True if the baseline itself sets this workload knob, a part of it, or a path that contains
        it."""
        return any(f"{knob}.".startswith(f"{own}.") or f"{own}.".startswith(f"{knob}.") for own in self.knobs)


def read_against(
    file: ExperimentFile, base: StartingPoint, arms: list[Arm], document: Document
) -> Reading[Against]:
    """Read the baseline: a preset, an arm by its name, or knobs. Exactly an arm's knobs name that arm.

    A preset's name under `against` means the preset. An arm of the same name must therefore have the preset's
    recipe.
    """
    value, arms_by_name = file.against, {arm.name: arm for arm in arms}
    if isinstance(value, dict):
        built = yield from build_arm(
            base, value, "against", {knob: ("against", knob) for knob in value}, document
        )
        same = (arm for arm in arms if built and arm.content == built.content)
        return Against(value, next((arm for arm in same if arm.knobs.keys() == value.keys()), None))
    if not isinstance(value, str):
        yield document.problem(
            ("against",), "must be a preset, an arm's name, or knobs as {knob: value}", value
        )
    elif value in PRESETS:
        if value in arms_by_name and arms_by_name[value].recipe != PRESETS[value]():
            why = (
                f"this arm is named after preset {value} but has another recipe, "
                f"so `against: {value}` is ambiguous"
            )
            right = (
                "rename the arm to something that is no preset's name; "
                "if it is the baseline, write the new name under against"
            )
            yield document.problem(("arms", value), f"{why}; {right}")
        return Against({"recipe": value})
    else:
        if value in arms_by_name:
            return Against(arms_by_name[value].knobs, arms_by_name[value])
        if value not in (file.arms or {}):  # otherwise the arm's own mistake was noted
            names = [*PRESETS, *arms_by_name]
            why = f"no such baseline: neither a preset nor an arm; {nearest(value, names)}"
            yield document.problem(("against",), why, value)
    return Against({})


def baseline_of(base: StartingPoint, against: Against, knobs: Knobs) -> Arm:
    """Return the baseline of an arm with these knobs. KnobError if it cannot be built.

    It is the arm that the file names, or the baseline's knobs at the arm's workload values, except for values
    that the baseline sets itself.
    """
    if against.arm is not None:
        return against.arm
    workload = {
        knob: value
        for knob, value in knobs.items()
        if knob.startswith("workload.") and not against.pins(knob)
    }
    return base.arm({**against.knobs, **workload})


def compared(arm: Arm, baseline: Arm) -> Arm:
    """Return the arm with the name of its baseline; without one if it is the baseline."""
    return replace(arm, baseline=None if arm.content == baseline.content else baseline.name)


def with_baselines(
    file: ExperimentFile, base: StartingPoint, arms: list[Arm], against: Against, document: Document
) -> Reading[tuple[list[Arm], list[Arm]]]:
    """Return the baselines that are not among the arms, and the arms, each with the name of its own
    baseline."""
    if file.search:
        varies = any(knob.startswith("workload.") and not against.pins(knob) for knob in file.ablate or ())
        baseline = None
        if not varies:
            baseline = yield from _buildable(base, against, {}, "the search", document)
        return ([baseline] if baseline else []), []
    added: dict[str, Arm] = {}
    with_names = []
    by_content = {arm.content: arm for arm in reversed(arms)}
    for arm in arms:
        baseline = yield from _buildable(base, against, arm.knobs, f"arm {arm.name!r}", document)
        if baseline is None:
            continue
        listed = by_content.get(baseline.content)
        if listed is None:
            added[baseline.name] = baseline
        with_names.append(compared(arm, listed or baseline))
    for name in {arm.name for arm in arms} & set(added):
        yield document.problem(
            ("arms", name), "has the name of the baseline, but other contents; choose another name"
        )
    return list(added.values()), with_names


def _buildable(
    base: StartingPoint, against: Against, knobs: Knobs, owner: str, document: Document
) -> Reading[Arm | None]:
    """Return `baseline_of`; None, with the problem yielded, if it cannot be built."""
    try:
        return baseline_of(base, against, knobs)
    except KnobError as error:
        yield document.problem(("against",), f"the baseline of {owner} cannot be run: {error}")
        return None
