"""Published figures and orderings beside a sweep's measurements, each with a verdict on their agreement."""

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from ablate.experiment.schema import Metric, Published
from ablate.results.intervals import ALPHA
from ablate.results.number_text import interval, percents
from ablate.results.paired_stats import Difference, Reason, equivalence, holm, p_value, paired_difference
from ablate.results.summary import ArmSummary, interval_of, mean_of, nothing_learned, summaries
from ablate.results.verdict_text import KINDS, REASONS, footnotes, on_others, short_word, with_notes
from ablate.store.ledger import Ledger

_COLOURS = {"agrees": "better", "disagrees": "worse", "differs": "worse"}
Detail = Literal["negligible", "within", "smaller", "larger"]
"""Size of the measured difference: too small to matter, or relative to the published size."""


@dataclass(frozen=True)
class Agreement:
    """Verdict on the agreement of a published figure with the measured one, as data. `agreement_text` turns
    it into a sentence."""

    kind: Literal["agrees", "disagrees", "differs", "unresolved", "unjudged"]
    """For a figure of one arm "agrees" or "differs"; for one of two arms "agrees", "disagrees" or
    "unresolved"; "unjudged" for both."""
    reason: Reason | Literal["not_measured", "no_share"] | None = None
    """Reason why there is no verdict; set if and only if the kind is "unjudged"."""
    detail: Detail | None = None
    """Size of the measured difference, for a figure of two arms."""
    tolerance: float | None = None
    """Largest difference that counts as agreement, as a share of the published figure, if that is of one arm
    and not 0."""
    apart: float | None = None
    """Measured minus published figure as a share of the published one, if that is of one arm and not 0."""


@dataclass(frozen=True)
class Replication:
    """Published figure beside the measured one."""

    figure: Published
    measured: Difference
    """Mean over seeds with its interval: of the arm, of the arm minus the other, or of that difference as a
    share of the other's value."""
    verdict: Agreement
    margin: float | None = None
    """Smallest difference that matters, in the unit of `measured`."""
    diverged: tuple[int, ...] = ()
    """Seeds on which either arm diverged."""
    given: int = 0
    """Number of seeds that either arm was given."""
    learned: bool = True
    """False if the loss of each of its arms is no better than that of a model that ignores its input: nothing
    can be compared."""
    unshared: bool = False
    """True if a share was published, and the other arm's mean is 0, so there is no share of it."""

    @property
    def subject(self) -> str:
        """Name of the arm, or `arm minus other`."""
        return self.figure.arm + (f" minus {self.figure.against}" if self.figure.against is not None else "")

    @property
    def metric(self) -> str:
        """Name of the metric that is compared, with the step if one was published."""
        return self.figure.metric + ("" if self.figure.step is None else f" at {self.figure.step}")

    @property
    def colour(self) -> str:
        """CSS class of its line; empty if nothing is resolved."""
        return "diverged" if self.diverged else _COLOURS.get(self.verdict.kind, "")

    @property
    def published(self) -> str:
        """Published figure: a number with its unit, or an ordering."""
        amount = self.figure.amount
        if amount is None:
            return str(self.figure.value)
        if self.figure.against is None:
            return f"{amount:.4g}"
        return f"{100 * amount:+.3g} %" if self.figure.relative else f"{amount:+.4g}"

    @property
    def found(self) -> str:
        """Measured figure with its interval; `-` if nothing was measured."""
        if not self.measured.pairs:
            return "-"
        if self.figure.against is None:
            half = f" ±{self.measured.half:.2g}" if self.measured.has_interval else ""
            return f"{self.measured.mean:.4g}{half}"
        return percents(self.measured) if self.figure.relative else interval(self.measured)


def replications(ledger: Ledger, published: Iterable[Published]) -> list[Replication]:
    """Return every published figure beside the sweep's measurement, with a verdict on their agreement.
    Verdicts on differences of two arms are corrected by Holm over all of them."""
    metrics = {metric.name: metric for metric in ledger.facts.all_metrics}
    figures = list(published)
    metrics |= {
        figure.metric: Metric(name=figure.metric) for figure in figures if figure.metric not in metrics
    }
    arms = {
        name: {arm.name: arm for arm in summaries(ledger, metrics[name])}
        for name in {figure.metric for figure in figures}
    }
    lines = [_replication(ledger, figure, metrics[figure.metric], arms[figure.metric]) for figure in figures]
    nothing = paired_difference({}, {})  # its p-values are NaN, which are no comparisons
    compared = [
        line.measured if line.figure.against is not None and line.learned and not line.unshared else nothing
        for line in lines
    ]
    effects = holm([p_value(one) for one in compared])
    margins = [line.margin for line in lines]
    equivalences = holm([equivalence(*each) for each in zip(compared, margins, strict=True)])
    return [
        line if line.figure.against is None else replace(line, verdict=_same_way(line, p, same))
        for line, p, same in zip(lines, effects, equivalences, strict=True)
    ]


def _replication(
    ledger: Ledger, figure: Published, metric: Metric, arms: Mapping[str, ArmSummary]
) -> Replication:
    """Return a figure beside its measurement. That of two arms has no verdict yet."""
    values, kind = _measured(ledger, figure, arms.get(figure.arm)), interval_of(ledger)
    learned = not nothing_learned([arm for name, arm in arms.items() if name in (figure.arm, figure.against)])
    if figure.against is None:
        measured = paired_difference(values, dict.fromkeys(values, 0.0), kind)
        verdict = _alike(figure, measured) if learned else Agreement("unjudged", "nothing_learned")
        return Replication(figure, measured, verdict, learned=learned)
    other = _measured(ledger, figure, arms.get(figure.against))
    level = mean_of(list(other.values()))
    margin = metric.margin(level)
    whole = paired_difference(values, other).whole  # of the values, not of their shares
    unshared = figure.relative and level == 0
    if figure.relative:
        values = {
            seed: (value - other[seed]) / abs(other[seed])
            for seed, value in values.items()
            if other.get(seed)
        }
        other, margin = dict.fromkeys(values, 0.0), margin and margin / abs(level) if level else None
    measured = replace(paired_difference(values, other, kind), whole=whole)
    members = [member for member in ledger.members() if member.name in (figure.arm, figure.against)]
    diverged = tuple(sorted({member.seed for member in members if member.status == "diverged"}))
    given = len({member.seed for member in members})
    return Replication(
        figure, measured, Agreement("unjudged", "not_measured"), margin, diverged, given, learned, unshared
    )


def _measured(ledger: Ledger, figure: Published, arm: ArmSummary | None) -> dict[int, float]:
    """Return the figure's metric by seed for one arm, at the figure's step. At the last step these are the
    arm's values, of which it has none if its runs are not comparable."""
    if arm is None or figure.step is None:
        return arm.values if arm else {}
    series = {
        member.seed: ledger.series(member.trial, figure.metric)
        for member in ledger.members()
        if member.name == arm.name and member.status == "done"
    }
    values = {seed: each.get(figure.step, math.nan) for seed, each in series.items()}
    return {seed: value for seed, value in values.items() if math.isfinite(value)}


def _alike(figure: Published, measured: Difference) -> Agreement:
    """Compare a figure of one arm with the measured value, within the figure's tolerance."""
    if not measured.pairs or figure.amount is None:
        return Agreement("unjudged", "not_measured")
    tolerance = 0.02 if figure.tolerance is None else figure.tolerance
    apart = measured.mean - figure.amount
    if abs(apart) <= tolerance * abs(figure.amount):
        return Agreement("agrees", tolerance=tolerance if figure.amount else None)
    return Agreement("differs", apart=apart / abs(figure.amount) if figure.amount else None)


def _same_way(line: Replication, p: float, same: float) -> Agreement:
    """Compare a published difference with the measured one, by corrected p-values of "no effect" and of "an
    effect that matters": the direction decides; the size is a detail.

    A published difference is contradicted by a measured one with the other sign, and by one too small to
    matter; a published equality only by a difference that is resolved. Models of other sizes may have effects
    of another size, so a different size alone is no disagreement. There is no verdict on equal counts, or if
    no arm learned.
    """
    figure, measured = line.figure, line.measured
    if not line.learned:
        return Agreement("unjudged", "nothing_learned")
    if line.unshared:
        return Agreement("unjudged", "no_share")
    if measured.pairs < 2:
        return Agreement("unjudged", "one_pair" if measured.pairs else "not_measured")
    if measured.same and measured.whole:
        return Agreement("unjudged", "equal_counts")
    if not measured.informative and not measured.same:
        return Agreement("unjudged", "few_values")
    sign = int(math.copysign(1, measured.mean)) if p < ALPHA else 0
    none = measured.same or same < ALPHA
    if figure.sign == 0:
        return Agreement("agrees" if none else "disagrees" if sign else "unresolved")
    if sign == figure.sign:
        return Agreement("agrees", detail="negligible" if none else _size(figure, measured))
    if sign:
        return Agreement("disagrees")
    if none:
        return Agreement("disagrees", detail="negligible")
    return Agreement("unresolved", detail=_size(figure, measured))


def _size(figure: Published, measured: Difference) -> Detail | None:
    """Compare the published size with the interval; None if an ordering was published."""
    if figure.amount is None:
        return None
    if measured.low <= figure.amount <= measured.high:
        return "within"
    return "smaller" if abs(measured.mean) < abs(figure.amount) else "larger"


# Text

_KINDS = {"unresolved": "not resolved", "unjudged": KINDS["unjudged"].text}
_DETAILS = {
    "negligible": "too small to matter here",
    "within": "the published size lies within the interval",
    "smaller": "smaller here than published",
    "larger": "larger here than published",
}


def agreement_text(line: Replication, short: bool = False) -> str:
    """Return the verdict on a published figure as text: a whole line, or, if `short`, the word of a
    column."""
    verdict = line.verdict
    word = "not measured" if verdict.reason == "not_measured" else _KINDS.get(verdict.kind, verdict.kind)
    lost = len(line.diverged), line.given
    return short_word(word, *lost) if short else on_others(with_notes(word, _details(line)), *lost)


def agreement_notes(line: Replication) -> list[str]:
    """Return footnotes of a table: all that the short form leaves out."""
    return footnotes(_details(line), len(line.diverged), line.given)


def _details(line: Replication) -> list[str]:
    verdict, figure = line.verdict, line.figure
    details = []
    if verdict.reason == "no_share":
        details.append(f"{figure.metric} of {figure.against} is 0, so the difference is no share of it")
    elif verdict.reason and verdict.reason != "not_measured":
        count = line.measured.distinct if verdict.reason == "few_values" else line.measured.pairs
        details.append(REASONS[verdict.reason].with_count(count or line.measured.pairs))
    if verdict.detail:
        details.append(_DETAILS[verdict.detail])
    if verdict.tolerance is not None:
        details.append(f"within {verdict.tolerance:.0%}")
    if verdict.apart is not None:
        details.append(f"by {verdict.apart:+.1%}")
    return details
