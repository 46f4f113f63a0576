"""Checks above every verdict: may the numbers of this sweep be believed at all?

A verdict on runs that diverged, or that learned nothing, is arithmetic on noise. So a report begins with
checks: are the runs finished, are they finite, did the model learn, how far do seeds lie apart, is a twin
told from its baseline. If one of them fails there is no answer, and no line is coloured.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median, stdev, variance
from typing import Any, Literal

from ablate.recipes.recipe import SLOTS
from ablate.results.contrasts import pairs_of
from ablate.results.number_text import counted, minus, signed
from ablate.results.paired_stats import common
from ablate.results.run_lengths import copies
from ablate.results.single_runs import curves
from ablate.results.summary import ArmSummary, nothing_learned
from ablate.store.judged import Judged
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import FINISHED
from ablate.store.registration import late_changes
from ablate.training.metric_names import ARITHMETIC, PRODUCT_BITS, parse
from ablate.training.workloads import abilities

_MOST_DIFFERING = 4
"""Largest number of arms, and of fields, that notes name."""
_NO_FLOOR = "not known if the model learned: log `data/context_free_loss`, of a model that ignores its input"
_LEAST_COVERED = 0.5
"""Share of a model's weights in layers that a recipe quantises, below which every answer says so."""


@dataclass(frozen=True)
class Check:
    """One check, in a few words."""

    kind: Literal["passed", "warning", "failed", "note"]
    text: str


def checks(ledger: Ledger, arms: Sequence[ArmSummary]) -> list[Check]:
    """Return the checks of a sweep, by its arms' summaries in the main metric."""
    return [check for each in _CHECKS for check in each(ledger, arms)]


def _finished(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield the number of finished runs, those of a search for a cause included, and the arms that have none,
    by the reason of their first failed run."""
    halves = [member.status in FINISHED for member in ledger.members() if member.role == "half"]
    total = sum(arm.seeds for arm in arms if arm.role != "refused") + len(halves)
    missing = sum(len(arm.missing) for arm in arms) + halves.count(False)
    early = sum(len(arm.early) for arm in arms)
    if not early and not any(arm.values or arm.diverged for arm in arms):
        yield Check("failed", f"none of {counted(total, 'run')} has finished")
        return
    text = f"{total - missing - early} of {counted(total, 'run')} finished"
    reasons = {member.name: member.reason for member in reversed(ledger.members()) if member.reason}
    failed: dict[str, list[str]] = {}
    for arm in arms:
        if arm.role != "refused" and arm.missing and len(arm.missing) == arm.seeds and arm.name in reasons:
            failed.setdefault(" ".join(reasons[arm.name].split()), []).append(arm.name)
    text += "".join(f"; none of {', '.join(names)} did: {reason}" for reason, names in failed.items())
    yield Check("warning" if missing or early else "passed", text)


def _covered(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield the warning that a recipe quantises less than half of the model's weights."""
    share = ledger.facts.covered
    if share is not None and share < _LEAST_COVERED:
        text = f"a recipe quantises {share:.0%} of the model's matrix weights, embeddings not counted"
        yield Check("warning", text)


def _in_bf16(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield the warning that arms which are compared differ in their casts, and in `layers` too."""
    members = {member.name: member for member in ledger.members()}
    recipes = {name: member.resolved.recipe or {} for name, member in members.items()}
    layers = {name: recipe.get("layers") or {} for name, recipe in recipes.items()}
    asked, listed = ledger.facts.answer, [arm for arm in arms if arm.role == "listed"]
    if ledger.facts.map or ledger.facts.blame or len({*map(str, layers.values())}) < 2:
        return  # a map, and a search for a cause, turn the layers themselves
    gaps = [arm for arm in listed if not (asked and asked.arm) or arm.name == asked.arm]
    pairs = [(arm.name, (asked.against if asked else None) or arm.baseline or "") for arm in gaps]
    if not (asked and asked.arm):
        knob = (asked and asked.knob) or "recipe"  # others turn casts or layers, not both
        pairs += [(listed[one].name, listed[two].name) for _, one, two in pairs_of(listed, knob)]
    differing: dict[str, str] = {}
    for pair in pairs:
        casts = [{**recipes.get(name, {}), "layers": None} for name in pair]
        if casts[0] != casts[1] and all(map(_quantises, casts)) and layers[pair[0]] != layers[pair[1]]:
            differing |= {name: _kept(layers[name]) for name in pair}
    if differing:
        named = "; ".join(f"{name}: {kept}" for name, kept in [*differing.items()][:_MOST_DIFFERING])
        text = f"arms differ in casts and in layers left in bf16 ({named}): either may make the difference"
        yield Check("warning", text)


def _quantises(recipe: Mapping[str, Any]) -> bool:
    """Return True if a recorded recipe's own products, apart from its rules, have a quantised operand."""
    slots = (slot.split(".") for slot in SLOTS)
    return any((recipe.get(product) or {}).get(operand) for product, operand in slots)


def _kept(layers: Mapping[str, Any]) -> str:
    """Return the fields by which a recipe leaves layers in bf16: `last_fraction 0.167`, `skip_first 1`."""
    fields = ((key, value) for key, value in layers.items() if value)
    return ", ".join(key if key == "rules" else f"{key} {value:.3g}" for key, value in fields) or "none"


def _late(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield warnings that the question, or a metric with its `min_effect`, was fixed after results."""
    named = {"question": "the question was named", "metrics": "the metric or its min_effect was set"}
    for part, entry in late_changes(ledger):
        yield Check("warning", f"{named[part]} after {entry.finished} of {counted(entry.trials, 'result')}")


def _positions(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield the positions of a forked design, which no number of seeds changes; 0 is a user's checkpoint."""
    cells = (arm.readings for arm in arms if arm.readings and arm.readings.cells)
    if steps := next((readings.positions for readings in cells), []):
        plural = "" if len(steps) == 1 else "s"
        of = f"of step{plural} {', '.join(map(str, steps))}" if any(steps) else "`start`"
        yield Check("note", f"from the checkpoint{plural} {of} alone")


def _same_code(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield that trials of earlier code count, since their owner declared an edit to change no number."""
    if taken := sum(count for _, count in ledger.facts.same_code):
        yield Check(
            "warning", f"{counted(taken, 'trial')} ran before an edit that was declared to change nothing"
        )


def _elsewhere(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield where runs that were not started here are from, and what that leaves open."""
    judged = Judged.of(ledger)
    if judged is None:
        return
    if judged.left_out:
        more = f" and {len(judged.left_out) - 1} more" if len(judged.left_out) > 1 else ""
        yield Check("warning", f"{judged.left_out[0]}{more}")
    yield from (Check("warning", text) for each in judged.readings for text in each.warnings)
    if not Judged.alone(ledger):
        names = ", ".join(arm.name for arm in arms if arm.role == "foreign")
        yield Check("note", f"{names}: {judged.text}; unpaired, since they share no start with these runs")
        return
    effect = judged.times[-1].min_effect if judged.times else ""
    named = f"question and min_effect ({effect or 'none'}) were named when the results existed"
    yield Check("note", f"{judged.text}; {named}")
    if len(judged.times) > 1:
        first, last = judged.times[0], judged.times[-1]
        yield Check("warning", f"judged {len(judged.times)} times; first by {first.text}, now by {last.text}")
    if any(arm.gap and arm.gap.sides and arm.gap.pairs > 1 for arm in arms):
        why = "arms lack seeds of the baseline" if judged.seeded else "the source names no seeds"
        gain = "with common seeds, what the runs share would cancel, and fewer would do"
        yield Check("note", f"unpaired, since {why}: {gain}")
    yield from _reruns(judged.reruns, arms)
    for arm, fields in [*judged.differing.items()][:_MOST_DIFFERING]:
        named = ", ".join(f"{name} {was} → {now}" for name, (was, now) in [*fields.items()][:_MOST_DIFFERING])
        if named:
            yield Check("note", f"{arm} also differs from its baseline in {named}")


def _reruns(values: Sequence[float], arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield the spread of reruns of one configuration, and differences of single runs as multiples of it."""
    finite = [value for value in values if math.isfinite(value)]
    if len(finite) < 2:
        return
    spread = stdev(finite)
    text = f"{counted(len(finite), 'rerun')} of one configuration vary by {spread:.2g} (standard deviation)"
    single = [arm for arm in arms if arm.gap is not None and arm.gap.pairs == 1]
    for arm in (single if spread else [])[:_MOST_DIFFERING]:
        assert arm.gap is not None
        error = spread * math.sqrt(sum(1 / runs for runs in arm.gap.sides or (1, 1)))
        text += f"; {arm.name}'s difference is {abs(arm.gap.mean) / error:.1f} standard errors of such runs"
    yield Check("note", text)


def _single(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield what the curve of a single run says beside that of its baseline."""
    name, compared = ledger.facts.metric.name, [arm for arm in arms if arm.gap and arm.gap.pairs == 1]
    if not compared or any(arm.seeds > 1 for arm in arms):
        return
    trials = {member.name: member.trial for member in ledger.members()}
    for arm in compared[:_MOST_DIFFERING]:
        found = curves(ledger.series(trials[arm.name], name), ledger.series(trials[str(arm.baseline)], name))
        if found:
            yield Check("note", f"{arm.name} beside {arm.baseline}: {found.text}")


def _ended_early(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield the warning that runs of the user's own code ended before the steps that the file names."""
    ends = [(last, steps, arm.name) for arm in arms for last, steps in arm.early.values()]
    if not ends:
        return
    last, steps, name = min(ends)
    total = sum(arm.seeds - len(arm.missing) - len(arm.diverged) for arm in arms)
    uneven = [arm.name for arm in arms if arm.uneven]
    words = f"{len(ends)} of {counted(total, 'run')} ended early, {name} at step {last} of {steps}"
    yield Check("warning", words + (f"; no verdict on {', '.join(uneven[:3])}" if uneven else ""))


def _copied(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield runs of an arm that have the same values, and those from elsewhere that another arm has, too.
    Arms that are equal at every common seed are not among them: their option changed nothing."""
    judged, name = Judged.of(ledger), ledger.facts.metric.name
    noun = "seed" if judged is None or judged.seeded else "run"
    why = "the seed did nothing" + (", or one run was copied" if judged else "")
    for each in (each for arm in arms for each in arm.copies):
        end = f"{why}; they count as one" if each.sure else "check that the seed has an effect"
        yield Check("warning" if each.sure else "note", f"{each.text(noun)}: {end}")
    if Judged.alone(ledger):
        lasts = ledger.finals(lambda metric: str(metric) == name)
        groups = [each for each in copies(ledger, ledger.members(), lasts, name) if each.sure]
        done = {(member.name, member.seed) for member in ledger.members() if member.status == "done"}
        for each in (each for each in groups if len(each.seeds) > 1):
            equal = {one.seed for other in groups if {*each.seeds} <= {*other.seeds} for one in other.members}
            crossed = len({*map(tuple, each.seeds.values())}) > 1
            others = {seed for _, seed in done if all((arm, seed) in done for arm in each.seeds)} - equal
            if crossed or others:
                why = "one run was copied" + ", or the arms do not differ at this seed" * (not crossed)
                yield Check("warning", f"{each.text(noun)}: {why}")


def _finite(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield the check for NaN, divergence and interventions of guards."""
    runs = sum(len(arm.diverged) for arm in arms)
    over = runs + sum(len(arm.values) for arm in arms)
    if runs:
        lost = [arm.name for arm in arms if arm.diverged and arm.is_baseline]
        too = f", also of the baseline {', '.join(lost)}" if lost else ""
        yield Check(
            "failed" if runs == over else "warning", f"{runs} of {counted(over, 'run')} diverged{too}"
        )
    if runs or not over:
        return
    counts = [text for text in ledger.names().values() if parse(text).is_count]
    nans = {trial for text in counts for trial, value in ledger.largest(text).items() if value > 0}
    judged = Judged.of(ledger)
    foreign = {member.trial for member in ledger.members() if member.role == "foreign"}
    own = 0 if Judged.alone(ledger) else len(nans - foreign)
    affected = own + (judged.nonfinite if judged else 0)
    acted = len({(event.arm, event.seed) for event in ledger.events()})
    if affected or acted:
        words = [f"non-finite values in {counted(affected, 'run')}"] if affected else []
        words += [f"a guard acted in {counted(acted, 'run')}"] if acted else []
        yield Check("warning", "; ".join(words))
    else:
        yield Check("passed", "no NaN, no divergence")


def _one_machine(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield warnings that runs of one seed multiplied in different ways, or were computed by other processors
    or versions of torch, and so compare those too."""
    bits, kinds = ledger.largest(PRODUCT_BITS), ledger.largest(ARITHMETIC)
    in_fp32 = sum(value == 32 for value in bits.values())
    how = f"{in_fp32} of {counted(len(bits), 'run')} multiplied in fp32, the others by bf16 instructions"
    where = f"runs on {len({*kinds.values()})} kinds of processors or versions of torch"
    for fact, text, too in ((bits, how, "the CPUs"), (kinds, where, "those")):
        by_seed: dict[int, set[float]] = {}
        for member in ledger.members():
            if member.trial in fact:
                by_seed.setdefault(member.seed, set()).add(fact[member.trial])
        if mixed := sorted(seed for seed, seen in by_seed.items() if len(seen) > 1):
            seeds = f"seed{'s' * (len(mixed) > 1)} {', '.join(map(str, mixed))}"
            yield Check("warning", f"{text}: pairs of {seeds} compare {too} too")


def _learned(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    measured = [arm for arm in arms if arm.context_free is not None and not math.isnan(arm.loss)]
    unknown = sum(arm.floor_unknown for arm in arms)
    if unknown:
        what = "the loss of a model that ignores its input is in neither the ledger nor a result.json"
        yield Check("warning", f"unknown whether {counted(unknown, 'arm')} learned anything: {what}")
        return
    first = next((member.resolved for member in ledger.members()), None)
    if not measured:
        if first and abilities(first.workload).own_code and Judged.of(ledger) is None:
            yield Check("note", _NO_FLOOR)
        return
    best = min(measured, key=lambda arm: arm.loss)
    floor = best.context_free or math.nan
    words = f"loss {best.loss:.3g} ({floor:.3g} for a model that ignores its input)"
    idle = [arm.name for arm in measured if not arm.learned]
    if nothing_learned(arms):
        yield Check("failed", f"nothing was learned: {words}")
    elif idle:
        yield Check("warning", f"{', '.join(idle[:3])} learned nothing; the best arm has {words}")
    elif first and (abilities(first.workload).pretrained or first.config.get("start")):
        yield Check("note", f"{words}; it began from trained weights, so this shows no learning")
    else:
        yield Check("passed", f"learned: {words}")


def _margin(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield warnings that the smallest effect that matters is larger than what training gained, or than what
    the recipes do to the loss."""
    margins = [arm.margin for arm in arms if arm.margin is not None and arm.role == "listed"]
    if not margins:
        return
    margin = min(margins)
    gains = [arm.context_free - arm.loss for arm in arms if arm.context_free is not None and arm.learned]
    if gains and margin >= max(gains):
        yield Check("warning", f"min_effect {margin:.2g} exceeds what training gained, {max(gains):.2g}")
    gaps = [arm.gap for arm in arms if arm.role == "listed" and arm.gap is not None and arm.gap.has_interval]
    most = max((max(abs(gap.low), abs(gap.high)) for gap in gaps), default=math.inf)
    if len(gaps) > 1 and most < margin:
        yield Check("warning", f"min_effect {margin:.2g} is loose: with {most:.2g} every arm would pass, too")


def _twin(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    twin = next((arm for arm in arms if arm.role == "null" and arm.gap is not None), None)
    if twin is None or twin.verdict.kind == "unjudged":
        return
    if twin.verdict.resolved:
        text = f"{twin.baseline} against itself is {twin.verdict.kind}: a false alarm, 1 in 20 expected"
        yield Check("warning", text)
    else:
        yield Check("passed", f"{twin.baseline} against itself: no difference")


def _bad(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield the check that a design sees what it should see: an arm that it adds, or one of the file."""
    design = ledger.facts.design
    named = design.bad if design else None
    bad = next((arm for arm in arms if arm.role == "bad" or (named is not None and arm.name == named)), None)
    if bad is None or bad.gap is None or bad.gap.pairs < 2:
        return
    known = f"{bad.name.rpartition(': ')[2]}, known to be worse"
    if bad.sees:
        yield Check("passed", f"detects {known}: {minus(signed(bad.gap.mean, bad.gap))}")
    else:
        yield Check("warning", f"does not detect {known}: this design cannot tell")


def _spread(ledger: Ledger, arms: Sequence[ArmSummary]) -> Iterator[Check]:
    """Yield notes on the baseline's spread over seeds, and on what pairing by seed is worth."""
    by_name = {arm.name: arm for arm in arms}
    baselines = [arm for arm in arms if arm.is_baseline and len(arm.values) > 2]
    if not baselines:
        return
    first = max(baselines, key=lambda arm: len(arm.values))
    spread = stdev(first.values.values())
    cancelled = ", which pairing cancels" if first.readings and first.readings.cells else ""
    yield Check("note", f"{first.name} varies by {spread:.2g} (standard deviation) between seeds{cancelled}")
    worth = []
    for arm in arms:
        if arm.gap is None or arm.gap.sides or not arm.gap.informative or arm.role == "null":
            continue
        if arm.view or arm.baseline not in by_name:  # forks share their trunk: unpaired they would be none
            continue
        base = by_name[arm.baseline].values
        seeds = common(arm.values, base)
        sides = ([side[seed] / arm.gap.deviation for seed in seeds] for side in (arm.values, base))
        worth.append(sum(variance(side) for side in sides))
    if worth:
        times = median(worth)
        several = f" (median of {len(worth)} arms)" if len(worth) > 1 else ""
        factor = f"{times:,.{1 if times < 10 else 0}f}×"
        gain = f"without pairing by seed it would take {factor} the seeds{several}"
        yield Check("note", gain if times >= 1.1 else "pairing by seed gains nothing here")


_CHECKS = (
    *(_finished, _finite, _learned, _twin, _bad, _in_bf16, _ended_early, _covered, _one_machine, _copied),
    *(_spread, _late, _margin, _positions, _same_code, _elsewhere, _single),
)
"""Checks in the order in which an answer states them."""
