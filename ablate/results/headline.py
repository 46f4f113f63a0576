"""The answer of a sweep, as terminal, status, report, index and notes state it: one `Headline` for all.

It is about the comparison that the file names (`answer`), else about one whole family: the main effects of
the knobs that are turned, or every arm against its baseline. Nothing is picked by its size. Above it stand
the checks of `gate`: if one of them fails there is no answer. Below it stands what to do next.
"""

import json
import math
import shlex
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ablate.experiment.roles import CONFIRM
from ablate.experiment.schema import Metric
from ablate.results.attribution import Effect
from ablate.results.comparisons import Comparisons
from ablate.results.gate import Check, checks
from ablate.results.next_runs import Settling, seeds_to_settle
from ablate.results.number_text import counted, interval, number, signed
from ablate.results.paired_stats import FEWEST_DISTINCT, Difference, Verdict
from ablate.results.summary import ArmSummary, nothing_learned
from ablate.results.verdict_text import REASONS, diverged_text, needed_text
from ablate.store.ledger import Ledger

MOST_STATED = 6
"""Largest number of comparisons that are stated one by one."""
_RELATIONS = {
    "better": "is better than",
    "worse": "is worse than",
    "equivalent": "is equivalent to",
    "same": "gives the same numbers as",
    "undecided": "is undecided against",
    "unjudged": "is not judged against",
}
"""Words between an arm and its baseline, by the kind of the verdict."""
_UNJUDGED = {
    "horizon": "is not ranked (that depends on the horizon) against",
    "position": "is not ranked (that depends on the position) against",
    "blind": "cannot be told from (no known-bad arm is resolved)",
    "windows": "is not compared (the windows are others) with",
}
"""The same, by the reason why a forked design names no winner."""

NO_ANSWER = "No answer:"
_LEADS = {
    "better": "Better.",
    "worse": "Worse.",
    "equivalent": "No difference that matters.",
    "same": "No difference at all.",
    "undecided": "Not answered yet.",
    "unjudged": "No verdict.",
    "horizon": "It depends on the horizon.",
    "position": "It depends on the position.",
    "blind": "This design cannot tell.",
    "windows": "No verdict.",
    "nothing_learned": NO_ANSWER,
}
"""First words of an answer by the kind of its verdict, or the reason why there is none."""

Statements = list[tuple[str, Verdict]]
"""Sentences about comparisons, with their verdicts."""


def of_knobs(effects: Sequence[tuple[Effect, Verdict]], unit: str, averaged: bool) -> Statements:
    """Return a sentence on every knob's main effect; `averaged`: other knobs were turned beside it."""
    mean = ", on average over the other knobs" if averaged else ""
    return [
        (
            f"{effect.knobs[0]}: {effect.change} {_relation(verdict)},"
            f" {amount(effect.effect, unit)}{mean}{_seeds(verdict)}",
            verdict,
        )
        for effect, verdict in effects
        if effect.effect.pairs > 1
    ]


def _relation(verdict: Verdict) -> str:
    """Return the words between an effect and its amount."""
    if verdict.reason in _UNJUDGED:
        return REASONS[verdict.reason]
    kinds = {"same": "the same, number by number", "unjudged": "not judged"}
    return f"is {kinds.get(verdict.kind, verdict.kind)}"


def of_arms(arms: Sequence[ArmSummary], unit: str) -> Statements:
    """Return a sentence on every arm against its baseline, except those that a search proposed."""
    statements = []
    for arm in arms:
        if arm.gap is not None and arm.gap.pairs > 1 and arm.role not in ("searched", "null", "bad"):
            sentence = (_of_winner if arm.role == "confirmed" else _of_arm)(arm, arm.gap, unit)
            statements.append((f"{sentence}{_seeds(arm.verdict)}", arm.verdict))
    return statements


def _of_arm(arm: ArmSummary, gap: Difference, unit: str) -> str:
    """Return a sentence on an arm and its baseline."""
    relation = _UNJUDGED.get(arm.verdict.reason or "", _RELATIONS[arm.verdict.kind])
    return f"{arm.name} {relation} {arm.baseline}, {amount(gap, unit)}{_remarks(arm)}"


def _of_winner(arm: ArmSummary, gap: Difference, unit: str) -> str:
    """Return a sentence on a search's winner that was rerun on fresh seeds. It begins with the search's
    success or failure."""
    kind, name = arm.verdict.kind, arm.name.removeprefix(CONFIRM)
    outcomes = {"better": "The search found an improvement", "worse": "The search found no improvement"}
    outcome = outcomes.get(kind, "The search's winner is not confirmed")
    relation = f"{_RELATIONS[kind]} {arm.baseline} on {counted(gap.pairs, 'fresh seed')}"
    return f"{outcome}: its best arm, {name}, {relation}, {amount(gap, unit)}{_remarks(arm)}"


def _remarks(arm: ArmSummary) -> str:
    """Return remarks in parentheses on an arm that diverged on some seeds, or learned nothing."""
    diverged = f" (it {diverged_text(len(arm.diverged), arm.seeds)})" if arm.diverged else ""
    idle = "" if arm.learned else " (it learned nothing)"
    return diverged + (" (nothing was learned)" if arm.verdict.reason == "nothing_learned" else idle)


def of_best(searched: Sequence[ArmSummary], again: ArmSummary | None, metric: str, unit: str) -> str:
    """Return a sentence on a search whose winner has fewer than two pairs on fresh seeds.

    `searched`: its arms, the best first. `again`: the winner's rerun on fresh seeds, if there is one.
    """
    best = searched[0]
    gap = "" if best.gap is None or not best.gap.pairs else f", {amount(best.gap, unit)} from {best.baseline}"
    status = "exploratory until the arm is rerun on fresh seeds (search: {confirm: 5})"
    if again:
        pairs = counted(again.gap.pairs if again.gap else 0, "pair")
        status = (
            f"not confirmed, because its rerun on {counted(again.seeds, 'fresh seed')} has only {pairs} with"
            " its baseline"
        )
    arms = counted(len(searched), "arm")
    return (
        f"The best of {arms} is {best.name}, {metric} {number(best.mean)}{gap}. The search chose it by this"
        f" number, so the result is {status}."
    )


def _of_family(statements: Statements) -> tuple[str, str]:
    """Return lead and sentences on a family of comparisons.

    Of many, those are stated that are decided after the correction for all; the others are counted. A
    comparison without a verdict is not called undecided: no number of seeds is promised for it.
    """
    verdicts = [verdict for _, verdict in statements]
    if all(verdict.reason == "nothing_learned" for verdict in verdicts):
        return (
            NO_ANSWER,
            "in each comparison, neither arm has a lower loss than a model that ignores its input.",
        )
    if all(verdict.kind == "unjudged" and verdict.reason not in _UNJUDGED for verdict in verdicts):
        return (
            "No verdict:",
            f"a comparison needs {FEWEST_DISTINCT} or more seeds whose differences have at least"
            f" {FEWEST_DISTINCT} distinct values.",
        )
    lead = _lead(verdicts)
    if len(statements) <= MOST_STATED:
        return lead, f"{'; '.join(text for text, _ in statements)}."
    decided = [text for text, verdict in statements if verdict.decided]
    more = len(decided) - MOST_STATED
    decided = decided[:MOST_STATED] + ([f"{counted(more, 'more comparison')} decided"] if more > 0 else [])
    sentences = [f"{'; '.join(decided)}."] if decided else []
    total = f"of {len(statements)} comparisons"
    counts = Counter(verdict.kind for verdict in verdicts)
    if undecided := counts["undecided"]:
        sentences.append(f"{undecided} {total} {'is' if undecided == 1 else 'are'} undecided.")
    if unjudged := counts["unjudged"]:
        sentences.append(f"{unjudged} {total} {'is' if unjudged == 1 else 'are'} not judged.")
    return lead, " ".join(sentences)


def _lead(verdicts: Sequence[Verdict]) -> str:
    """Return the first words on a family of comparisons."""
    if len(verdicts) == 1:
        return _LEADS.get(verdicts[0].reason or "") or _LEADS[verdicts[0].kind]
    decided = sum(verdict.decided for verdict in verdicts)
    if decided == len(verdicts):
        return "Answered."
    return f"Answered in part, {decided} of {len(verdicts)}." if decided else _LEADS["undecided"]


def _of_one(effect: Effect, verdict: Verdict, metric: Metric, unit: str, averaged: bool) -> tuple[str, str]:
    """Return lead and sentence on the one comparison that was asked for."""
    held = " and ".join(f"{knob} {json.dumps(value)}" for knob, value in effect.given.items())
    given = f"With {held}, " if held else ""
    mean = ", on average over the other knobs," if averaged else ""
    knob = f"{effect.knobs[0]} " if effect.knobs else ""
    difference = effect.effect
    if verdict.kind == "same":
        return _LEADS["same"], f"{given}{knob}{effect.change}{mean} gives the same numbers on every seed."
    if not difference.pairs:
        return "No answer yet:", "the arms of this comparison share no finished seed."
    unit = f" {unit}" if unit else ""
    bounds = (
        f", 95 % interval {signed(difference.low, difference)} to {signed(difference.high, difference)}"
        if difference.has_interval
        else f" on {counted(difference.pairs, 'seed')}"
    )
    tail = _possible(difference, verdict, effect.margin, metric.direction == "minimize")
    text = (
        f"{given}{knob}{effect.change}{mean} changes {metric.name} by"
        f" {signed(difference.mean, difference)}{unit}{bounds}{tail}."
    )
    return _lead([verdict]), text


def _possible(difference: Difference, verdict: Verdict, margin: float | None, minimize: bool) -> str:
    """Return a clause on what the interval leaves possible."""
    if verdict.reason:
        return f": {REASONS[verdict.reason].format(count=verdict.count)}"
    if verdict.kind == "equivalent":
        return f": an effect of {margin:.3g} or more, which would matter, is excluded"
    if verdict.kind in ("better", "worse"):
        if margin is None or not difference.has_interval:
            return ""
        sure = min(abs(difference.low), abs(difference.high)) >= margin
        return (
            f": more than {margin:.3g}, the smallest effect that matters"
            if sure
            else f"; whether it exceeds {margin:.3g}, the smallest effect that matters, is open"
        )
    if not difference.has_interval or margin is None:
        return ": its sign is still open"
    low, high = difference.low < -margin, difference.high > margin
    gain, loss = (low, high) if minimize else (high, low)
    if gain and loss:
        return (
            f": both a gain and a loss of more than {margin:.3g}, the smallest effect that matters, are still"
            " possible"
        )
    if gain or loss:
        possible, excluded = ("gain", "loss") if gain else ("loss", "gain")
        return (
            f": a {possible} of more than {margin:.3g}, the smallest effect that matters, is still possible,"
            f" a {excluded} that large is not"
        )
    return ": alone it would be decided, not after the correction for all comparisons"


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
    def cost(self) -> str:
        """A comment behind the command: its chance of a verdict, its runs and its time."""
        if not self.command or not self.settling:
            return ""
        return f"80 % chance of a verdict; +{counted(self.settling.runs, 'run')}, about {self.settling.time}"


def headline_of(sweep: Comparisons) -> Headline:
    """Return the answer of a sweep.

    Args:
        sweep: its comparisons.
    """
    lead, text, verdicts = _answer(sweep)
    if sweep.forked and any(verdict.decided for verdict in verdicts):
        text += f" {_at_positions(sweep.arms)}"
    found = tuple(checks(sweep.ledger, sweep.arms))
    valid = not any(check.kind == "failed" for check in found)
    search = bool(sweep.ledger.fact("search"))
    settling = seeds_to_settle(sweep.ledger, verdicts) if valid and not search else None
    open_ = valid and not search and not any(verdict.decided for verdict in verdicts)
    return Headline(
        sweep.question,
        lead,
        text,
        found,
        tuple(verdicts),
        settling,
        _command(sweep.ledger, settling),
        _simplest(sweep) if open_ and verdicts else "",
    )


def _answer(sweep: Comparisons) -> tuple[str, str, list[Verdict]]:
    """Return lead, text and verdicts of the comparisons that the question is about."""
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
    asked = sweep.asked_effects
    if len(asked) == 1:
        ((effect, verdict),) = asked
        averaged = bool(effect.knobs) and len(effect.given) + 1 < len(sweep.grid.levels if sweep.grid else ())
        lead, text = _of_one(effect, verdict, sweep.metric, sweep.unit, averaged)
        return _in_windows(lead, verdict) if sweep.forked else lead, text, [verdict]
    statements = (
        of_knobs(asked, sweep.unit, sweep.averaged)
        if asked
        else of_knobs(sweep.main_effects, sweep.unit, sweep.averaged)
        if sweep.turned_knobs
        else of_arms(sweep.arms, sweep.unit)
    )
    if not statements:
        return _no_comparison(sweep)
    lead, text = _of_family(statements)
    if any(arm.role == "confirmed" for arm in sweep.arms):  # whose sentence begins with its own lead
        lead, _, text = text.partition(": ")
        lead += ":"
    return lead, text, [verdict for _, verdict in statements]


def _at_positions(arms: Sequence[ArmSummary]) -> str:
    """Return the sentence that limits an answer to the positions of the windows, which no seed changes."""
    cells = (arm.readings for arm in arms if arm.readings and arm.readings.cells)
    steps = next((readings.positions for readings in cells), [0])
    where, plural = ("this position", "") if len(steps) < 2 else ("these positions", "s")
    listed = ", ".join(map(str, steps))
    return f"This holds at {where} (windows from step{plural} {listed}); other positions may differ."


def _in_windows(lead: str, verdict: Verdict) -> str:
    """Return the first words for a forked design, whose answer holds for its windows alone."""
    decided = verdict.kind in ("better", "worse", "equivalent", "same")
    return f"{lead.removesuffix('.')} in these windows." if decided else lead


def _no_comparison(sweep: Comparisons) -> tuple[str, str, list[Verdict]]:
    """Return lead and text where no comparison has two pairs: the reason, or the best arm of a search so
    far."""
    searched = [arm for arm in sweep.arms if arm.role == "searched" and arm.values and not arm.pruned]
    if searched:
        sign = 1 if sweep.metric.direction == "minimize" else -1
        again = next((arm for arm in sweep.arms if arm.role == "confirmed"), None)
        searched.sort(key=lambda arm: sign * arm.mean)
        return "", of_best(searched, again, sweep.metric.name, sweep.unit), []
    if any(arm.diverged for arm in sweep.arms) and not any(arm.values for arm in sweep.arms):
        return NO_ANSWER, "every run diverged, and no arm has a finite value to compare.", []
    if sweep.one_seed:
        text = "no difference has an interval, so none can be told from chance. Nothing is claimed."
        return "One seed per arm:", text, []
    if uneven := [arm.name for arm in sweep.arms if arm.uneven]:
        named = ", ".join(uneven[:3]) + (f" and {len(uneven) - 3} more" if len(uneven) > 3 else "")
        text = f"{named} ended at an earlier step than other runs of the same seed."
        remedy = "Give all runs the same length, or compare them all the same by any_length under metric."
        return NO_ANSWER, f"{text} {remedy}", []
    if len([arm for arm in sweep.arms if arm.values]) == 1:
        return NO_ANSWER, "only one arm has finished, so there is nothing to compare it with.", []
    if not any(arm.values for arm in sweep.arms):
        members = sweep.ledger.members()
        failed = sum(member.status in ("failed", "oom") for member in members)
        if not failed:
            return "No answer yet:", "no run has finished.", []
        which = f"{failed} of {counted(len(members), 'run')} failed, and none has finished"
        return (
            "Failed:",
            f"all {counted(failed, 'run')} failed." if failed == len(members) else f"{which}.",
            [],
        )
    if any(arm.gap is not None and arm.gap.pairs > 1 for arm in sweep.arms):
        return "No answer yet:", "the comparisons of the question share fewer than two finished seeds.", []
    return "No answer yet:", "no arm shares two finished seeds with its baseline.", []


def _command(ledger: Ledger, settling: Settling | None) -> str:
    """Return the command that adds the seeds, for a file with a number of seeds: they count from 0."""
    file, seeds = ledger.fact("file"), {member.seed for member in ledger.members()}
    if (
        seeds != set(range(len(seeds)))
        or not file
        or settling is None
        or not settling.runs
        or ledger.fact("interval") not in (None, "t")
    ):
        return ""
    return f"ablate sweep {shlex.quote(file)} --seeds {settling.seeds}"


def _simplest(sweep: Comparisons) -> str:
    """Return a sentence on the arm to take while nothing is resolved: every other arm has its settings, too.

    Empty if there is no such arm: two formats are not simpler than each other.
    """
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
    return f"Until then nothing here is evidence against the simplest recipe of these: {least}." * bool(least)


def _settings(part: object, path: tuple[object, ...] = ()) -> Iterator[tuple[object, ...]]:
    """Yield the path and the value of every setting that a recipe turns on."""
    if isinstance(part, dict | list):
        for key, value in part.items() if isinstance(part, dict) else enumerate(part):
            yield from _settings(value, (*path, key))
    elif part not in (None, False, 0, "nearest"):
        yield *path, part


def amount(difference: Difference, unit: str) -> str:
    """Return a difference with its interval and its unit."""
    return f"{interval(difference)}{f' {unit}' if unit else ''}"


def _seeds(verdict: Verdict) -> str:
    """Return the seeds that an undecided comparison needs, as a clause."""
    return f", and needs {needed_text(verdict.needed)} seeds in all for a verdict" if verdict.needed else ""
