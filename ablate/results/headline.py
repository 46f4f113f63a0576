"""The answer of a sweep, as terminal, status, report, index and notes state it: one `Headline` for all.

It is about the comparison that the file names (`answer`), else about one whole family: the main effects of
the knobs that are turned, or every arm against its baseline. Nothing is picked by its size. Above it stand
the checks of `gate`: if one of them fails there is no answer. Below it stands what to do next.
"""

import math
import shlex
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, replace

from ablate.experiment.roles import CONFIRM
from ablate.experiment.schema import START
from ablate.files import Json
from ablate.results import answer_sentences
from ablate.results.answer_sentences import NO_ANSWER, Compared, Setting
from ablate.results.attribution import Effect, shown_value
from ablate.results.blame import names_of, sentences
from ablate.results.comparisons import Comparisons
from ablate.results.decomposition import routed
from ablate.results.forked import difference_word
from ablate.results.gate import Check, checks
from ablate.results.log_ratios import ratio
from ablate.results.next_runs import Settling, ranked, seeds_to_settle
from ablate.results.number_text import counted, interval, minus, number, shortened
from ablate.results.paired_stats import FEWEST_DISTINCT, Verdict
from ablate.results.sensitivity import sensitivity
from ablate.results.summary import ArmSummary, nothing_learned
from ablate.store.checked_ledger import state_option
from ablate.store.judged import Judged
from ablate.store.ledger import Ledger

# The object


@dataclass(frozen=True)
class Headline:
    """Answer of a sweep: whether its numbers may be believed, the answer, and what to do next."""

    question: str
    lead: str
    """First words: `Better.`, `Not answered yet.`, `No answer:`."""
    text: str
    """The sentences that follow."""
    checks: tuple[Check, ...]
    verdicts: tuple[Verdict, ...] = ()
    """Verdicts of the comparisons that the answer is about."""
    settling: Settling | None = None
    """Seeds that would settle it."""
    command: str = ""
    """Command that adds these seeds; empty if there is none."""
    simplest: str = ""
    """Sentence on the recipe to take while nothing is resolved; empty otherwise."""

    @property
    def sentence(self) -> str:
        """Lead and text."""
        return f"{self.lead} {self.text}".strip()

    @property
    def valid(self) -> bool:
        """False if a check failed, so that no comparison may be coloured."""
        return not any(check.kind == "failed" for check in self.checks)

    @property
    def answered(self) -> bool:
        """True if every comparison that the question is about is decided."""
        return self.valid and bool(self.verdicts) and all(verdict.decided for verdict in self.verdicts)

    @property
    def even(self) -> bool:
        """True if every comparison of the question is decided, and nothing differs by as much as matters."""
        return self.answered and all(verdict.kind in ("equivalent", "same") for verdict in self.verdicts)

    @property
    def cost(self) -> str:
        """A comment behind the command: its chance of a verdict, its runs and its time."""
        if not self.command or not self.settling:
            return ""
        runs = counted(self.settling.runs, "run")
        return f"80 % chance of a verdict; +{runs}, about {self.settling.time} of one worker"


def headline_of(sweep: Comparisons) -> Headline:
    lead, text, verdicts = _answer(sweep)
    text += _by_routes(sweep) if verdicts else ""
    found = tuple(checks(sweep.ledger, sweep.arms))
    valid = not any(check.kind == "failed" for check in found)
    search = bool(sweep.ledger.facts.search)
    settling = seeds_to_settle(sweep.ledger, verdicts) if valid and not search else None
    open_ = valid and not search and not any(verdict.decided for verdict in verdicts)
    short = shortened([arm.name for arm in sweep.arms])
    return Headline(
        sweep.question,
        lead,
        short(text),
        tuple(replace(check, text=short(check.text)) for check in found),
        tuple(verdicts),
        settling,
        _command(sweep.ledger, settling),
        _simplest(sweep) if open_ and verdicts else "",
    )


def _by_routes(sweep: Comparisons) -> str:
    """Return a sentence on the parts of a gap with experts; empty if no arm replays routes."""
    for part in routed(sweep.ledger, sweep.arms):
        gap, rounding, flips = map(minus, map(interval, (part.gap, part.rounding, part.flips)))
        return (
            f" Of {part.arm}'s {difference_word(sweep.arms)}, {gap}, rounding with routes held makes"
            f" {rounding} and flipped routes {flips}."
        )
    return ""


def _answer(sweep: Comparisons) -> tuple[str, str, list[Verdict]]:
    """Return lead, text and verdicts of the comparisons that the question is about."""
    if sweep.search:
        verdicts = [arm.verdict for arm in sweep.arms if arm.name in sweep.culprits]
        return *sentences(sweep.search, names_of(sweep.ledger), sweep.unit), verdicts
    arms = sweep.grid.arms if sweep.grid and sweep.turned_knobs else sweep.arms
    if nothing_learned(arms):
        everywhere = nothing_learned(sweep.arms)
        ended = (arm for arm in (sweep.arms if everywhere else arms) if not math.isnan(arm.loss))
        best = min(ended, key=lambda arm: arm.loss)
        subset = "" if everywhere else " of the arms that turn these knobs"
        reference = math.nan if best.context_free is None else best.context_free
        text = (
            f"nothing was learned. The lowest loss{subset} is {number(best.loss)} ({best.name}); a model that"
            f" ignores its input reaches {number(reference)}. Train for more steps, or change the learning"
            " rate."
        )
        return NO_ANSWER, text, []
    asked, setting = sweep.asked_effects, _setting(sweep)
    if sweep.one_seed and not all(arm.diverged for arm in sweep.arms):
        return *_no_comparison(sweep, setting), []
    if cells := sensitivity(sweep):
        return *answer_sentences.of_map(cells, setting), [cell.verdict for cell in cells.cells if cell.ranked]
    if sweep.relative and (found := _of_tensors(sweep, replace(setting, relative=True))):
        return found
    if sweep.asked and not sweep.family and not asked:
        return "No answer yet:", "the arms of the comparison that answers share no finished seed.", []
    if sweep.family in ("", "winner"):
        confirmed = next((arm for arm in sweep.arms if arm.role == "confirmed"), None)
        if confirmed and confirmed.gap and confirmed.gap.pairs > 1:
            shown = confirmed.name.removeprefix(CONFIRM)
            lead, text = answer_sentences.of_winner(confirmed, confirmed.gap, shown, setting)
            return lead, text, [confirmed.verdict]
    if asked or (sweep.family == "knobs" or (not sweep.family and sweep.turned_knobs)):
        return _of_effects(sweep, asked or sweep.main_effects, setting)
    return _of_arms(sweep, setting)


def _of_effects(
    sweep: Comparisons, effects: Sequence[tuple[Effect, Verdict]], setting: Setting
) -> tuple[str, str, list[Verdict]]:
    """Return lead, text and verdicts of values of knobs, or of two arms."""
    levels = sweep.grid.levels if sweep.grid else {}
    paired = [(effect, verdict) for effect, verdict in effects if effect.effect.pairs]
    if len(effects) == 1 and paired:
        ((effect, verdict),) = paired
        # A held knob of one value is no level of the grid: holding it leaves the others averaged.
        averaged = bool(effect.knobs) and bool(levels.keys() - effect.given.keys() - {*effect.knobs})
        own = levels.get(effect.knobs[0], ()) if effect.knobs else ()
        return *answer_sentences.of_effect(effect, verdict, setting, own, averaged), [verdict]
    paired = [(effect, verdict) for effect, verdict in paired if effect.effect.pairs > 1]
    if not paired:
        return *_no_comparison(sweep, setting), []
    one = {effect.knobs for effect, _ in paired}
    against = "Averaged over other knobs" if len(levels) > 1 else ""
    if len(one) == 1:
        (knob,) = paired[0][0].knobs
        first = shown_value(levels[knob][0])
        against = f"Against {knob} {first}{', averaged over other knobs' if against else ''}"

    def name(effect: Effect) -> str:
        turned = answer_sentences.turned_text(effect, levels.get(effect.knobs[0], ()))
        return effect.level if len(one) == 1 else turned

    family = [Compared(name(each), each.effect, verdict, each.margin) for each, verdict in paired]
    verdicts = [verdict for _, verdict in paired]
    lead, text = answer_sentences.of_family(family, setting, against or "Turned")
    if len(levels) == 1 and (unresolved := _unresolved(sweep, levels)):
        lead, text = answer_sentences.of_closing(unresolved, text, setting)
        verdicts.append(unresolved.verdict)
    return lead, text, verdicts


def _unresolved(sweep: Comparisons, levels: Mapping[str, Sequence[Json]]) -> ArmSummary | None:
    """Return the arm without a knob that gives a part of the run or of the model back to high precision, if
    its gap to the baseline is not resolved: there is nothing that the knob could close."""
    ((knob, (reference, *_)),) = levels.items()
    arms = [arm for arm in sweep.arms if arm.role == "listed" and arm.knobs.get(knob, ...) == reference]
    closing = knob in answer_sentences.CLOSING and reference == 0
    return next((arm for arm in arms if closing and arm.verdict.kind == "undecided"), None)


def _of_tensors(sweep: Comparisons, setting: Setting) -> tuple[str, str, list[Verdict]] | None:
    """Return lead, text and verdicts of relative changes against each arm's baseline; None if the file asks
    for something else."""
    if sweep.asked and (sweep.asked.knob or sweep.family == "knobs" or not sweep.asks_for_a_gap):
        return None
    asked = sweep.asked.arm if sweep.asked else None
    family = [
        Compared(
            change.arm,
            change.relative,
            change.verdict,
            None if change.margin is None else ratio(change.margin),
            change.baseline,
        )
        for change in sweep.relative_changes[0]
        if asked in (None, change.arm) and change.log_ratio.pairs > 1
    ]
    tail = _by_another_metric(sweep) if len(family) > 1 else ""
    if not family:
        return None
    lead, text, verdicts = _of_family(sweep, family, setting, tail)
    return "It depends on the metric." if tail else lead, text, verdicts


def _of_family(
    sweep: Comparisons, family: Sequence[Compared], setting: Setting, tail: str = ""
) -> tuple[str, str, list[Verdict]]:
    """Return lead, text and verdicts of arms against their baselines."""
    verdicts = [each.verdict for each in family]
    if len(family) == 1:
        (one,) = family
        effect = Effect((), f"{one.name} instead of {one.baseline}", one.difference, one.margin)
        return *answer_sentences.of_effect(effect, one.verdict, setting), verdicts
    against = _baseline_text(sweep, {each.baseline for each in family}, setting)
    return *answer_sentences.of_family(family, setting, against, tail), verdicts


def _by_another_metric(sweep: Comparisons) -> str:
    """Return how many arms are worse and better by the first metric that contradicts the main one, by which
    an arm is worse that is better by the main one, or the reverse; empty if there is none."""
    main, *others = (
        {change.arm: change.verdict.kind for change in changes} for changes in sweep.relative_changes
    )
    for metric, kinds in zip(sweep.metrics[1:], others, strict=True):
        if any({kind, kinds.get(arm)} == {"better", "worse"} for arm, kind in main.items()):
            counts = {kind: [*kinds.values()].count(kind) for kind in ("worse", "better")}
            named = " and ".join(f"{count} {kind}" for kind, count in counts.items() if count)
            return f"; by {metric.name}, {named}"
    return ""


def _of_arms(sweep: Comparisons, setting: Setting) -> tuple[str, str, list[Verdict]]:
    """Return lead, text and verdicts of every arm with its baseline, except those that a design or a search
    adds."""
    family = [
        Compared(arm.name, arm.gap, arm.verdict, arm.margin, arm.baseline or "")
        for arm in sweep.arms
        if arm.gap is not None and arm.gap.pairs > 1 and arm.role not in ("searched", "null", "bad")
    ]
    return _of_family(sweep, family, setting) if family else (*_no_comparison(sweep, setting), [])


def _baseline_text(sweep: Comparisons, names: Set[str], setting: Setting) -> str:
    """Return what a family is compared with: `Against bf16`, `Against rht false`."""
    if len(names) == 1:
        return f"Against {min(names)}"
    knobs = [arm.knobs for arm in sweep.arms if arm.name in names]
    shared = [
        shown_value(value) if knob == "recipe" else f"{knob} {shown_value(value)}"
        for knob, value in knobs[0].items()
        if all(each.get(knob, ...) == value for each in knobs)
    ]
    first = {name.split()[0] for name in names}
    common = " and ".join(shared) or (min(first) if len(first) == 1 else "the baseline")
    return f"Against {common}" if setting.relative else f"Each against {common} on the same workload"


def _setting(sweep: Comparisons) -> Setting:
    specs = [member.resolved for member in sweep.ledger.members()]
    design = sweep.ledger.facts.design
    readings = next((arm.readings for arm in sweep.arms if arm.readings and arm.readings.cells), None)
    steps = {spec.config["steps"] for spec in specs if "steps" in spec.config}
    scope = f"after {counted(max(steps), 'step')}" if len(steps) == 1 and any(steps) else ""
    if readings and design:
        past = (
            f"{design.trunk} checkpoints" if len(readings.positions) > 1 else f"a {design.trunk} checkpoint"
        )
        past = "the starting weights" if design.trunk == START else past
        scope = f"over {counted(readings.windows[-1], 'step')} from {past}"
    bad = (design.bad or "").rpartition(": ")[2] if design and sweep.metric.min_effect is None else ""
    return Setting(sweep.metric, sweep.unit, scope, bad)


def _no_comparison(sweep: Comparisons, setting: Setting) -> tuple[str, str]:
    """Return lead and text if no comparison has two pairs: the reason, or the best arm of a search so far."""
    if searched := ranked(sweep.ledger, sweep.arms, sweep.metric):
        again = next((arm for arm in sweep.arms if arm.role == "confirmed"), None)
        return "", answer_sentences.of_best(searched, again, setting)
    if any(arm.role == "searched" and arm.values and not arm.pruned for arm in sweep.arms):
        return "No answer yet:", "no arm of the search has all of its seeds and keeps the constraints."
    if any(arm.diverged for arm in sweep.arms) and not any(arm.values for arm in sweep.arms):
        return NO_ANSWER, "every run diverged, and no arm has a finite value to compare."
    if sweep.one_seed:
        text = "no difference has an interval, so none can be told from chance. Nothing is claimed."
        if Judged.alone(sweep.ledger):
            text = text.replace("Nothing is claimed", f"Run {FEWEST_DISTINCT} or more of each arm")
        return "One seed per arm:", text
    if uneven := [arm.name for arm in sweep.arms if arm.uneven]:
        named = ", ".join(uneven[:3]) + (f" and {len(uneven) - 3} more" if len(uneven) > 3 else "")
        judged = Judged.alone(sweep.ledger)
        how = "at a step that they share, by --at" if judged else "by any_length under metric"
        remedy = f"Give all runs the same length, or compare them all the same {how}."
        return NO_ANSWER, f"{named} ended at an earlier step than other runs. {remedy}"
    if copied := [each.text() for arm in sweep.arms for each in arm.copies if each.sure]:
        text = f"{'; '.join(copied[:2])}; they count as one, which leaves too few."
        return "No verdict:", text
    if len([arm for arm in sweep.arms if arm.values]) == 1:
        return NO_ANSWER, "only one arm has finished, so there is nothing to compare it with."
    if not any(arm.values for arm in sweep.arms):
        members = sweep.ledger.members()
        failed = sum(member.status in ("failed", "oom") for member in members)
        if not failed:
            return "No answer yet:", "no run has finished."
        if failed == len(members):
            return "Failed:", f"all {counted(failed, 'run')} failed."
        which = f"{failed} of {counted(len(members), 'run')} failed, and the others have not finished."
        return "Failed:", which
    if any(arm.gap is not None and arm.gap.sides for arm in sweep.arms):
        few = f"no arm has {FEWEST_DISTINCT} runs beside {FEWEST_DISTINCT} of its baseline"
        return "No verdict:", f"{few}, so no difference can be told from chance."
    if any(arm.gap is not None and arm.gap.pairs > 1 for arm in sweep.arms):
        return "No answer yet:", "the comparisons of the question share fewer than two finished seeds."
    return "No answer yet:", "no arm shares two finished seeds with its baseline."


def _command(ledger: Ledger, settling: Settling | None) -> str:
    """Return the command that adds the seeds, for a file with a number of seeds: they count from 0."""
    file, seeds = ledger.facts.file, {member.seed for member in ledger.members()}
    counts = seeds == {*range(len(seeds))} and ledger.facts.interval == "t"
    if not (counts and file and settling and settling.runs):
        return ""
    option = state_option(ledger.path.parent)
    return f"ablate sweep {shlex.quote(file)} --seeds {settling.seeds}{option}"


def _simplest(sweep: Comparisons) -> str:
    """Return a sentence on the arm to take while nothing is resolved: every other arm has its settings, too.
    Empty if there is no such arm: two formats are not simpler than each other."""
    specs = {member.name: member.resolved for member in sweep.ledger.members()}
    settings = {
        arm.name: frozenset(_settings(specs[arm.name].recipe))
        for arm in sweep.arms
        if arm.role == "listed" and arm.gap is not None and arm.name in specs
    }
    if len({*settings.values()}) < 2 or any(arm.verdict.decided for arm in sweep.arms):
        return ""
    shared = frozenset.intersection(*settings.values())
    least = next((name for name, own in settings.items() if own == shared), "")
    return f"Until then, nothing here justifies more than the simplest recipe, {least}." * bool(least)


def _settings(part: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Yield the path and the value of every setting that a recipe turns on."""
    if isinstance(part, dict | list):
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            yield from _settings(value, (*path, key))
    elif part not in (None, False, 0, "nearest"):
        yield *path, part
