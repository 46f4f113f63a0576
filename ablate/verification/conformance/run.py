"""Run of the kit: all properties of a subject, and the findings."""

from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace

from ablate.errors import InputError, nearest
from ablate.experiment.recipe_source import RecipeSource, load
from ablate.verification.conformance.declared import check
from ablate.verification.conformance.diagnosis import (
    commonest_fault,
    diagnosed,
    hinted,
    measured,
    relabelled,
    supported,
)
from ablate.verification.conformance.examination import (
    Examination,
    NotApplicableError,
    RefusedError,
)
from ablate.verification.conformance.properties import PROPERTIES
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.result import Outcome, Row, counts
from ablate.verification.conformance.source import as_subject
from ablate.verification.conformance.subject import Subject

TRIES = 2
"""Properties in which a function may fail before it is called no more, if it never returned a result. A cast
is handed bf16 by the first of them and fp32 by the second."""


@dataclass(frozen=True)
class Findings:
    """Rows of one examination."""

    subject: str
    recipe: str
    rows: tuple[Row, ...]
    counted: str = "properties hold"
    """End of the sentence on what was examined."""
    likely: str = ""
    """Fault that explains most of the rows that failed, if one is known."""

    @property
    def passed(self) -> bool:
        """True if no property fails, and at least one was examined."""
        judged = [row for row in self.rows if row.outcome != Outcome.NOT_APPLICABLE]
        return bool(judged) and all(row.outcome != Outcome.FAIL for row in judged)

    @property
    def faults(self) -> list[str]:
        """Likely faults by name: the one that explains most first, then the most frequent."""
        counts = Counter(row.fault for row in self.rows if row.outcome == Outcome.FAIL and row.fault)
        names = [fault for fault, _ in counts.most_common()]
        return [self.likely, *(name for name in names if name != self.likely)] if self.likely else names

    @property
    def table(self) -> str:
        """Rows that failed, a line each: property, differences, likely fault or detail."""
        lines = []
        for row in self.rows:
            if row.outcome == Outcome.FAIL:
                place = f"first at {row.block.place}" if row.block else ""
                parts = (f"FAIL {row.property}: {counts(row)}", row.fault or row.detail, place)
                lines.append("; ".join(filter(None, parts)))
        return "\n".join(lines)

    @property
    def text(self) -> str:
        """One plain sentence: how many properties hold, and the likely fault."""
        judged = [row for row in self.rows if row.outcome in (Outcome.PASS, Outcome.VARIANT, Outcome.FAIL)]
        held = sum(row.outcome != Outcome.FAIL for row in judged)
        declared = sum(row.outcome == Outcome.VARIANT for row in judged)
        sentence = f"{held} of {len(judged)} {self.counted}" + f", {declared} as declared" * bool(declared)
        failed = Counter(row.fault for row in judged if row.outcome == Outcome.FAIL)
        if not judged:
            return "No property could be examined, each for its reason."
        if held == len(judged):
            return f"{sentence}: what was examined of {self.subject} computes {self.recipe}."
        if not self.faults:
            return f"{sentence}; no known fault explains the others."
        first, number = self.faults[0], len(judged) - held
        if failed[first] == number:
            return f"{sentence}, {number} {_differ(number)} by one fault: {first}; nothing else differs."
        others = [f"{failed[name]} by another: {name}" for name in self.faults[1:]]
        unknown = [f"{failed['']} by no known fault"] if failed[""] else []
        text = "; ".join(
            [f"{failed[first]} {_differ(failed[first])} by one fault: {first}", *others, *unknown]
        )
        return f"{sentence}, {text}."


def _differ(number: int) -> str:
    return "differs" if number == 1 else "differ"


def examined(bench: Examination, one: Property) -> Row:
    """Return the row of one property, without its fault. A subject that raises fails, with its error."""
    if bench.refused.count(one.needs) >= TRIES and one.needs not in bench.answered:
        text = f"{one.needs} failed at once in the first {TRIES} properties that call it"
        return Row(one.name, Outcome.NOT_APPLICABLE, detail=text)
    try:
        row = one.examine(bench)
    except NotApplicableError as reason:
        return Row(one.name, Outcome.NOT_APPLICABLE, detail=str(reason))
    except RefusedError as error:
        bench.refused.append(one.needs)
        return Row(one.name, Outcome.FAIL, detail=str(error))
    bench.answered.add(one.needs)
    if row.outcome == Outcome.FAIL and row.block is None and not row.detail:
        return replace(row, detail=f"this does not hold: {one.promise}")
    return row


def conform(
    subject: Subject | Callable[..., object],
    recipe: RecipeSource = "nvfp4",
    *,
    only: Iterable[str] = (),
    seed: int = 0,
    show: Callable[[Row], None] | None = None,
) -> Findings:
    """Find out whether a quantiser or product computes a recipe.

    Args:
        subject: a `Subject`, or one function, which the names of its parameters explain: (x) casts to
            nearest, (w) in square blocks, (x, amax) with a given amax, (x, seed) stochastically; (x, w, dy)
            is a layer, (x, w, dy, offsets) the same for experts.
        recipe: a preset's name, a recipe file, its content, or a `Recipe`.
        only: names of the properties to examine; none: all.
        seed: seed of all data.
        show: called with each row in turn; from the first that fails on, when all are known.

    Returns:
        Rows of all properties, `passed`, and `text`, one sentence.

    Raises:
        ValueError: there is no such recipe.
        InputError: there is no such property, the subject is no function of these, or it declares what is
            no variant.
    """
    made = load(recipe)
    name = recipe if isinstance(recipe, str) else "the recipe"
    wanted = [only] if isinstance(only, str) else list(only)
    if unknown := [one for one in wanted if one not in PROPERTIES]:
        raise InputError(*[f"{one}: no such property; {nearest(one, PROPERTIES)}" for one in unknown])
    one = as_subject(subject, getattr(subject, "__name__", "subject"))
    check(one.variants, PROPERTIES)
    bench = Examination(one, made, seed)
    rows, shown = [], 0
    for known in PROPERTIES.values():
        if not wanted or known.name in wanted:
            rows.append(examined(bench, known))
            if show is not None and all(row.outcome != Outcome.FAIL for row in rows):
                show(rows[-1])
                shown += 1
    named = [diagnosed(bench, PROPERTIES[row.property], row) for row in rows]  # by all casts at once
    likely = commonest_fault(bench, named)
    named = measured(bench, supported(bench, relabelled(bench, named, likely)))
    named = [hinted(bench, row) for row in named]
    likely = likely if any(row.fault == likely for row in named) else ""
    if show is not None:
        for row in named[shown:]:
            show(row)
    return Findings(one.name, name, tuple(named), likely=likely)
