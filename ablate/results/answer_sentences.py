"""Sentences of an answer, by the shape of its question.

    an effect    one knob with two values, or two arms: the change, its interval, and what that leaves open
    a family     arms, values of a knob, kinds of tensors: which are worse, better, equivalent or undecided
    a search     its winner on fresh seeds

A sentence has at most two numbers beside an interval, and no number of seeds: tables have the rest. An effect
on a metric without a `min_effect` has no threshold to name.
"""

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from ablate.experiment.schema import Metric
from ablate.files import Json
from ablate.results.attribution import Effect
from ablate.results.number_text import counted, minus, percent, signed
from ablate.results.paired_stats import FEWEST_DISTINCT, Difference, Verdict
from ablate.results.sensitivity import AGREEMENT, FEWEST_CELLS, FEWEST_SEEDS, Sensitivity
from ablate.results.summary import ArmSummary
from ablate.results.verdict_text import KINDS, NO_ANSWER, NOT_YET, REASONS

MOST_WORDS = 40
"""Largest number of words of an answer; names of a few arms may exceed it."""
_SWITCHES = {"rht": "rotation", "sr": "stochastic rounding", "weights_2d": "2D weight scaling"}
"""Names of knobs that are on or off, as a sentence has them."""
CLOSING = ("cooldown", "skip_first", "skip_last")
"""Knobs that give a part of the run or of the model back to high precision, to close a gap."""
_TOO_FEW = ("no_pair", "one_pair", "few_values", "equal_counts")
"""Reasons without a verdict that more seeds remove."""
_AVERAGED = "averaged over other knobs"
_MOST_NAMED = 2
"""Largest number of comparisons with one verdict that a sentence names, if there are more."""
_COUNTED, _WHOLE = -1, -2
"""In place of that number: none, not even the largest; and `all` of a family with one verdict."""


@dataclass(frozen=True)
class Setting:
    """Facts of a sweep that its sentences share."""

    metric: Metric
    unit: str
    """Unit of the metric; empty if it has none."""
    scope: str = ""
    """Stretch of training that the comparisons are about: `after 300 steps`; empty if they train nothing."""
    known_bad: str = ""
    """Recipe of a forked design's known-bad arm, a fifth of whose damage is the smallest effect that matters;
    empty if the file names that effect."""
    relative: bool = False
    """True if differences are shares of the baseline, stated in percent."""

    def threshold(self, margin: float) -> str:
        """Return the smallest effect that matters, and where it comes from."""
        origin = f"a fifth of {self.known_bad}'s damage" if self.known_bad else "the smallest that matters"
        return f"{self.size(margin)}, {origin},"

    def size(self, margin: float) -> str:
        """Return the smallest effect that matters as a number: in percent if differences are."""
        return f"{100 * margin:.2g} %" if self.relative else f"{margin:.2g}"

    def amount(self, value: float, difference: Difference, sign: bool, unit: bool) -> str:
        """Return a value as text, with its sign or the size alone, with as many digits as the interval of
        `difference` sets."""
        if self.relative:
            text, word = percent(value, difference), "%"
        else:
            text, word = minus(signed(value, difference)), self.unit
        return f"{text if sign else text[1:]}{f' {word}' if unit and word else ''}"


@dataclass(frozen=True)
class Compared:
    """One comparison of a family."""

    name: str
    difference: Difference
    verdict: Verdict
    margin: float | None = None
    baseline: str = ""
    """Name of what it is compared with, if a family has several."""


def lead_of(verdicts: Sequence[Verdict], setting: Setting) -> str:
    """Return the first words on some comparisons."""
    if len({(verdict.kind, verdict.reason) for verdict in verdicts}) == 1:
        (verdict, *_) = verdicts
        lead = (REASONS[verdict.reason].lead if verdict.reason else "") or KINDS[verdict.kind].lead
        return f"{lead}{f', {setting.scope}' if setting.scope else ''}." if verdict.decided else lead
    decided = sum(verdict.decided for verdict in verdicts)
    if decided == len(verdicts):
        return "Answered."
    return f"Answered in part, {decided} of {len(verdicts)}." if decided else NOT_YET


# A map


def of_map(found: Sensitivity, setting: Setting) -> tuple[str, str]:
    """Return first words and sentence on a map of cells."""
    known = [each.agreement for each in found.rankings.values() if not math.isnan(each.agreement)]
    lead = f"Mapped{f', {setting.scope}' if setting.scope else ''}."
    resolved = sum(cell.resolved for cell in found.cells)
    told = f"{resolved} of {counted(len(found.cells), 'cell')} differ from zero."
    if found.first is None:
        why = f"A ranking needs at least {FEWEST_CELLS} cells of one product and {FEWEST_SEEDS} seeds."
        if known:
            most = minus(f"{max(known):.2f}")
            why = f"Ranks by two halves of the seeds correlate by {most} at most; {AGREEMENT} is needed."
        return "No ranking:", f"no cell stands out from all others. {why} {told}"
    first, times = found.first, f", with {found.times:g} times the error" if found.times > 1 else ""
    damage = setting.amount(first.total.mean, first.total, True, True)
    ends = (setting.amount(end, first.total, True, False) for end in (first.total.low, first.total.high))
    whole = setting.amount(found.everything.mean, found.everything, True, False) if found.everything else ""
    share = f" of {whole} for all cells" if whole else ""
    return lead, f"{first.name} costs most: {damage} (95 % CI {' to '.join(ends)}){share}{times}. {told}"


# One effect


def of_effect(
    compared: Effect,
    verdict: Verdict,
    setting: Setting,
    levels: Sequence[Json] = (),
    averaged: bool = False,
) -> tuple[str, str]:
    """Return first words and sentence on one comparison. `levels`: values of its knob, the reference first;
    `averaged`: other knobs were turned beside it, and not all of them are held."""
    held = " and ".join(_held(knob, value) for knob, value in compared.given.items())
    before = ", ".join(filter(None, (f"with {held}" if held else "", _AVERAGED if averaged else "")))
    turned, lead = turned_text(compared, levels), lead_of([verdict], setting)
    opening = f"{before}, {turned}" if before else turned
    if before or turned in _SWITCHES.values():  # names of knobs and arms stay as they are
        opening = opening[0].upper() + opening[1:]
    text = f"{opening} {_change(compared.effect, verdict, setting)}"
    for brief in (False, True):
        left = _left_open(compared.effect, verdict, compared.margin, setting, brief)
        if _length(f"{lead} {text}{left}") <= MOST_WORDS:
            break
    return lead, f"{text}{left}."


def _held(knob: str, value: Json) -> str:
    """Return a knob at a value: `rotation on`, `block "1x16"`."""
    if knob in _SWITCHES and isinstance(value, bool):
        return f"{_SWITCHES[knob]} {'on' if value else 'off'}"
    return f"{knob} {json.dumps(value)}"


def turned_text(compared: Effect, levels: Sequence[Json]) -> str:
    """Return what a comparison turns: `stochastic rounding`, `block "1x32" instead of "1x16"`. `levels`:
    values of its knob, the reference first."""
    (knob, *_) = compared.knobs or ("",)
    if knob in _SWITCHES and list(levels) == [False, True]:
        return _SWITCHES[knob]
    return f"{knob} {compared.change}".strip()


def _change(difference: Difference, verdict: Verdict, setting: Setting) -> str:
    """Return a change with its interval: `raises val/loss by 0.02 nats (95 % CI 0.01 to 0.03)`."""
    name = setting.metric.name
    if verdict.kind == "same":
        return f"gives the same {name} on every seed: it changed nothing"
    over = f" {setting.scope}" if setting.scope and not verdict.decided else ""
    low, high = difference.low, difference.high
    sure = difference.has_interval and (low > 0 or high < 0)
    verb, ends = ("lowers", (high, low)) if sure and high < 0 else ("raises", (low, high))
    mean = setting.amount(difference.mean, difference, not sure, True)
    change = f"{verb if sure else 'changes'} {name} by {mean}{over}"
    if not difference.has_interval:
        return change
    bounds = [setting.amount(end, difference, not sure, False) for end in ends]
    return f"{change} (95 % CI {bounds[0]} to {bounds[1]})"


def _left_open(
    difference: Difference, verdict: Verdict, margin: float | None, setting: Setting, brief: bool = False
) -> str:
    """Return a clause on what the interval leaves possible; `brief`: without where the margin comes from."""
    if verdict.kind == "same":
        return ""
    if verdict.reason:
        return f": {REASONS[verdict.reason].with_count(verdict.count)}"
    if margin is None:
        return "; its sign is still open" if verdict.kind == "undecided" else ""
    threshold = setting.size(margin) if brief else setting.threshold(margin)
    if verdict.kind == "equivalent":
        return f"; an effect of {threshold} is ruled out"
    if verdict.resolved:
        if not difference.has_interval:
            return ""
        if min(abs(difference.low), abs(difference.high)) >= margin:
            return f", more than {threshold.removesuffix(',')}"
        return f"; whether it exceeds {threshold} is open"
    if not difference.has_interval:
        return "; its sign is still open"
    gain, loss = difference.low < -margin, difference.high > margin
    if setting.metric.direction == "maximize":
        gain, loss = loss, gain
    if gain and loss:
        return f"; it may help or hurt by more than {setting.size(margin)}"
    if gain or loss:
        open_, closed = ("help", "hurt") if gain else ("hurt", "help")
        more = "" if brief else f", but does not {closed} by that much"
        return f"; it may {open_} by more than {setting.size(margin)}{more}"
    return "; undecided after the correction for all comparisons"


# A family


def of_family(family: Sequence[Compared], setting: Setting, against: str, tail: str = "") -> tuple[str, str]:
    """Return first words and sentence on a family of comparisons: those with one verdict together. The
    sentence begins with `against`, such as `Against bf16`, and ends with `tail`."""
    verdicts = [each.verdict for each in family]
    if all(verdict.reason == "nothing_learned" for verdict in verdicts):
        return NO_ANSWER, "no arm has a lower loss than a model that ignores its input."
    if all(verdict.kind == "unjudged" and verdict.reason in _TOO_FEW for verdict in verdicts):
        needed = f"{FEWEST_DISTINCT} or more"
        return "No verdict:", f"a comparison needs {needed} seeds with differences that are not all equal."
    lead = lead_of(verdicts, setting)
    over = f", {setting.scope}" if setting.scope and setting.scope not in lead else ""
    text = ""
    for named, where in ((_MOST_NAMED, over), (1, over), (0, over), (_COUNTED, over), (_COUNTED, "")):
        clauses = "; ".join(_groups(family, setting, named))
        text = f"{against}{where}, by {setting.metric.name}: {clauses}{tail}."
        if _length(f"{lead} {text}") <= MOST_WORDS:
            break
    return lead, text


def _length(text: str) -> int:
    """Return the number of words of a text; a percent sign is none."""
    return len(text.replace(" %", "%").split())


def of_closing(first: ArmSummary, text: str, setting: Setting) -> tuple[str, str]:
    """Return first words and sentence on a knob that should close a gap which is not resolved. `first`: the
    arm without the knob; `text`: the sentence on the knob's values."""
    gap = first.gap
    amount = "" if gap is None else f" by {setting.amount(gap.mean, gap, True, True)}, undecided"
    opening = f"Without it, {setting.metric.name} differs from {first.baseline}{amount}"
    return "No gap to close is visible here.", f"{opening}. {text}"


def _groups(family: Sequence[Compared], setting: Setting, named: int) -> Iterator[str]:
    """Yield a clause for each verdict of a family, those that are decided first. `named`: largest number of
    comparisons that a clause names, if it has more; `_COUNTED`: not even the largest of them."""
    by_kind: dict[str, list[Compared]] = {}
    for each in sorted(family, key=lambda each: -abs(each.difference.mean)):
        by_kind.setdefault(each.verdict.kind, []).append(each)
    for kind in ("worse", "better"):
        if group := by_kind.get(kind, []):
            whole = len(group) == len(family) > _MOST_NAMED
            names = _named(group, _WHOLE if whole else named, "is")
            sizes = [setting.amount(each.difference.mean, each.difference, True, True) for each in group]
            if whole and named != _COUNTED:
                ends = f"{sizes[-1]} ({quoted(group[-1].name)}) to {sizes[0]} ({quoted(group[0].name)})"
                yield f"{names} {kind}, from {ends}"
                continue
            worst = "" if group[0].name in names or named == _COUNTED else f" ({quoted(group[0].name)})"
            yield f"{names} {kind}, {'' if len(group) == 1 else 'up to '}{sizes[0]}{worst}"
    if group := by_kind.get("equivalent", []):
        within = f" within {setting.size(max(each.margin or 0.0 for each in group))}"
        names = _named(group, named if len(group) < len(family) else _WHOLE, "is")
        within = "" if {"worse", "better"} <= {*by_kind} else within
        yield f"{names} {'each ' * (len(group) > 1)}equivalent{within}"
    if group := by_kind.get("same", []):
        yield f"{_named(group, named, 'is')} the same"
    if group := by_kind.get("undecided", []):
        bounded = [each for each in group if each.difference.has_interval]
        if len(group) == len(family) and bounded:
            least = min((each.difference for each in bounded), key=lambda one: one.low)
            most = max((each.difference for each in bounded), key=lambda one: one.high)
            span = setting.amount(least.low, least, True, False), setting.amount(most.high, most, True, True)
            yield f"nothing is decided; changes from {' to '.join(span)} are possible"
        else:
            yield f"{_named(group, named if len(group) == 1 else 0, 'is')} undecided"
    reasons: dict[str, list[Compared]] = {}
    for each in by_kind.get("unjudged", []):
        reasons.setdefault(_why(each.verdict) if named > 0 else "no verdict", []).append(each)
    for why, group in reasons.items():
        yield f"{_named(group, named, '' if why.startswith('diverged') else 'has')} {why}"


def _why(verdict: Verdict) -> str:
    """Return that a comparison has no verdict, with the reason if more seeds do not remove it."""
    if verdict.diverged and verdict.diverged == verdict.seeds:
        return "diverged on every seed"
    why = REASONS[verdict.reason or "no_pair"].with_count(verdict.count)
    return "no verdict" if verdict.reason in _TOO_FEW else f"no verdict ({why})"


def _named(group: Sequence[Compared], most: int, verb: str) -> str:
    """Return the names of a group with the verb: `a and b are`, `a, b and 3 more are`; `5 are` for no names,
    and for the whole family `all 5 are`."""
    plural = {"is": "are", "has": "have"}
    names = [quoted(each.name) for each in group]
    if most == _WHOLE and len(names) > _MOST_NAMED:
        names = [f"all {len(names)}"]
    elif most != _WHOLE and len(names) > max(most, 0) + (most > 0):
        names[max(most, 0) :] = [f"{len(names) - max(most, 0)}{' more' if most > 0 else ''}"]
    listed = " and ".join(filter(None, (", ".join(names[:-1]), names[-1])))
    return f"{listed} {verb if len(group) == 1 else plural.get(verb, verb)}".strip()


def quoted(name: str) -> str:
    """Return an arm's name, in quotation marks if it has a comma."""
    return f'"{name}"' if "," in name else name


# A search


def of_winner(arm: ArmSummary, difference: Difference, shown: str, setting: Setting) -> tuple[str, str]:
    """Return first words and sentence on a search's winner that was run again on fresh seeds. `shown`: the
    winner's name."""
    verdict = arm.verdict
    leads = {"better": "The search found an improvement", "worse": "The search found no improvement"}
    over = f", {setting.scope}" if setting.scope and verdict.decided else ""
    lead = f"{leads.get(verdict.kind, 'The winner of the search is not confirmed')}{over}."
    change = _change(difference, verdict, setting) + _left_open(difference, verdict, arm.margin, setting)
    named, unnamed = (
        f"On fresh seeds, its best arm{name} instead of {arm.baseline} {change}."
        for name in (f" ({shown})", "")
    )
    return lead, named if _length(f"{lead} {named}") <= MOST_WORDS else unnamed


def of_best(searched: Sequence[ArmSummary], again: ArmSummary | None, setting: Setting) -> str:
    """Return a sentence on a search, its arms sorted from the best, whose winner has fewer than two pairs on
    fresh seeds. `again`: the winner's rerun on fresh seeds, if there is one."""
    best = searched[0]
    gap = ""
    if best.gap is not None and best.gap.pairs:
        gap = f", {setting.amount(best.gap.mean, best.gap, True, True)} from {best.baseline}"
    status = "exploratory until the arm runs again on fresh seeds (with search.confirm, such as 5)"
    if again:
        pairs = counted(again.gap.pairs if again.gap else 0, "pair")
        status = f"not confirmed: on fresh seeds it has only {pairs} with its baseline"
    return (
        f"The best of {counted(len(searched), 'arm')} is {best.name}{gap}. The search chose it by this"
        f" number, so it is {status}."
    )
