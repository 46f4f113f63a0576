"""Contrasts: every two arms of a sweep that differ in exactly one knob, compared over their common seeds."""

import itertools
import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace

from ablate.experiment.arms import label
from ablate.experiment.schema import Metric
from ablate.results.forked import Views, sharpened, views
from ablate.results.paired_stats import Difference, Verdict, paired_difference
from ablate.results.summary import ArmSummary, judge_learned


@dataclass(frozen=True)
class Contrast:
    """Two arms that differ in one knob: the effect of that knob, with all others held."""

    knob: str
    change: str
    held: str
    effect: Difference
    margin: float | None
    """Smallest effect that matters, in the metric's unit."""
    verdict: Verdict
    """Verdict, corrected for all contrasts of the table."""
    view: Views | None = None
    """The effect, seen in other ways; None for full runs."""


def contrasts(arms: list[ArmSummary], metric: Metric, most: int | None = None) -> list[Contrast]:
    """Return the contrasts of every two arms that differ in exactly one knob.

    The value that the file lists first is the reference, which is subtracted; of true and false, false is.
    Verdicts are corrected by Holm over all contrasts.

    Left out are comparisons that an arm's gap to its baseline makes already, presets and knobs of the
    workload if knobs of the recipe vary, all arms of a search (they were chosen by these numbers), and
    baselines that were added. With more than `most` contrasts the list is empty.
    """
    arms = [arm for arm in arms if arm.role == "listed"]
    pairs = list(itertools.islice(pairs_of(arms), None if most is None else most + 1))
    if most is not None and len(pairs) > most:
        return []
    pairs.sort()
    switches = {knob for knob in {knob for knob, _, _ in pairs} if is_switch(arms, knob)}

    def made(those: list[ArmSummary]) -> list[Contrast]:
        return [_contrast(those[a], those[b], knob, knob in switches) for knob, a, b in pairs]

    seen = views(arms, lambda those: [one.effect for one in made(those)], len(pairs))
    unjudged = [
        replace(one, effect=sharpened(one.effect, view), view=view)
        for one, view in zip(made(arms), seen, strict=True)
    ]
    sides = [(arms[first], arms[second]) for _, first, second in pairs]
    compared = [(one.effect, one.margin, both) for one, both in zip(unjudged, sides, strict=True)]
    verdicts = judge_learned(compared, metric, seen=seen)
    return [replace(one, verdict=verdict) for one, verdict in zip(unjudged, verdicts, strict=True)]


def pairs_of(arms: list[ArmSummary], asked: str | None = None) -> Iterator[tuple[str, int, int]]:
    """Yield (knob, index of an arm, index of another) for all arms that agree in every other knob; with
    `asked`, they differ in this knob. Arms are grouped by their other knobs, so the work grows with the
    number of arms, not of pairs."""
    turned = {knob for arm in arms for knob in arm.knobs}
    about = {knob for knob in turned if not knob.startswith("workload.") and knob != "recipe"}
    for knob in [asked] if asked else sorted(about or turned):
        alike: dict[str, list[int]] = {}
        for index, arm in enumerate(arms):
            if knob in arm.knobs:
                alike.setdefault(json.dumps(arm.knobs | {knob: None}, sort_keys=True), []).append(index)
        for first, second in itertools.chain.from_iterable(
            itertools.combinations(indices, 2) for indices in alike.values()
        ):
            one, other = arms[first], arms[second]
            if (
                one.knobs[knob] != other.knobs[knob]
                and other.baseline != one.name != other.name != one.baseline
            ):
                yield knob, first, second


def is_switch(arms: Iterable[ArmSummary], knob: str) -> bool:
    """Return True if the listed arms give a knob true and false alone: false is the reference then."""
    return all(type(arm.knobs[knob]) is bool for arm in arms if arm.role == "listed" and knob in arm.knobs)


def _contrast(first: ArmSummary, second: ArmSummary, knob: str, switch: bool) -> Contrast:
    """Return the contrast of two arms in the ledger's order, without a verdict. `switch`: false is the
    reference, in whatever order the file lists the values."""
    arm, reference = (first, second) if switch and not second.knobs[knob] else (second, first)
    effect = paired_difference(arm.values, reference.values, arm.interval)
    held = label({k: v for k, v in arm.knobs.items() if k != knob})
    change = f"{json.dumps(arm.knobs[knob])} instead of {json.dumps(reference.knobs[knob])}"
    return Contrast(knob, change, held, effect, reference.margin, Verdict("unjudged"))
