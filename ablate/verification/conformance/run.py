"""Run of the kit: all properties of a subject, and the findings."""

import csv
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from ablate.errors import InputError, nearest
from ablate.experiment.recipe_source import RecipeSource, load
from ablate.verification.conformance.declared import ALL, check, hint, suggestions, varied, words_of
from ablate.verification.conformance.examination import (
    Examination,
    NotApplicableError,
    Property,
    RefusedError,
    explains,
)
from ablate.verification.conformance.properties import PROMISES, PROPERTIES
from ablate.verification.conformance.result import Outcome, Row, Wrong, counts
from ablate.verification.conformance.source import as_subject
from ablate.verification.conformance.stages import first_wrong_stage
from ablate.verification.conformance.subject import Subject

TRIES = 2
"""Properties in which a function may fail before it is called no more, if it never returned a result. A cast
is handed bf16 by the first of them and fp32 by the second."""

_TRIED = 3
"""Properties that no declaration explains, after which only those that explained another one are tried."""


@dataclass(frozen=True)
class Findings:
    """Rows of one examination."""

    subject: str
    recipe: str
    rows: tuple[Row, ...]
    counted: str = "properties hold"
    """End of the sentence on what was examined."""

    @property
    def passed(self) -> bool:
        """True if no property fails, and at least one was examined."""
        judged = [row for row in self.rows if row.outcome != Outcome.NOT_APPLICABLE]
        return bool(judged) and all(row.outcome != Outcome.FAIL for row in judged)

    @property
    def table(self) -> str:
        """Rows that failed, a line each: property, differences, first wrong stage or detail."""
        lines = []
        for row in (row for row in self.rows if row.outcome == Outcome.FAIL):
            place = f"first at {row.block.place}" if row.block else ""
            parts = (f"FAIL {row.property}: {counts(row)}", row.stage or row.detail, place)
            lines.append("; ".join(filter(None, parts)))
        return "\n".join(lines)

    @property
    def text(self) -> str:
        """One plain sentence: how many properties hold, and the stages that are wrong in the others."""
        judged = [row for row in self.rows if row.outcome in (Outcome.PASS, Outcome.VARIANT, Outcome.FAIL)]
        failed = [row for row in judged if row.outcome == Outcome.FAIL]
        declared = sum(row.outcome == Outcome.VARIANT for row in judged)
        sentence = f"{len(judged) - len(failed)} of {len(judged)} {self.counted}"
        sentence += f", {declared} as declared" * bool(declared)
        if not judged:
            return "No property could be examined, each for its reason."
        if not failed:
            return f"{sentence}: what was examined of {self.subject} computes {self.recipe}."
        stages = Counter(row.stage.partition(":")[0] for row in failed if row.stage)
        listed = ", ".join(f"{stage} ({count})" for stage, count in stages.most_common())
        sentence += f"; the first of the others is {failed[0].property}"
        return f"{sentence}. First wrong stages: {listed}." if stages else f"{sentence}."

    def save(self, path: Path) -> int:
        """Write every wrong number of the first wrong stages as CSV; return how many there are."""
        with path.open("w", encoding="utf-8", newline="") as file:
            lines = csv.writer(file)
            lines.writerow(("property", "stage", *Wrong._fields))
            rows = [(row, number) for row in self.rows for number in row.wrong]
            lines.writerows((row.property, row.stage.partition(":")[0], *number) for row, number in rows)
        return len(rows)


def examined(bench: Examination, one: Property) -> Row:
    """Return the row of one property. A subject that raises fails, with its error."""
    bench.begin(one.name)
    if bench.refused.count(one.function) >= TRIES and one.function not in bench.answered:
        text = f"{one.function} failed at once in the first {TRIES} properties that call it"
        return Row(one.name, Outcome.NOT_APPLICABLE, detail=text)
    try:
        row = replace(one.compare(bench), property=one.name)
    except NotApplicableError as reason:
        return Row(one.name, Outcome.NOT_APPLICABLE, detail=str(reason))
    except RefusedError as error:
        bench.refused.append(one.function)
        return Row(one.name, Outcome.FAIL, detail=str(error))
    bench.answered.add(one.function)
    if row.outcome != Outcome.FAIL:
        return row
    if bench.failed:
        stage, wrong = first_wrong_stage(bench.failed)
        row = replace(row, stage=stage, wrong=wrong)
    declare = _declaration(bench)
    more = ". ".join(filter(None, (row.detail, declare)))
    return replace(row, detail=f"promised: {PROMISES[one.name]} {more}".strip(), declare=declare)


def _declaration(bench: Examination) -> str:
    """Return what to declare, if the property then holds; else ''."""
    if bench.form:
        return hint(bench.name, [bench.form])
    pairs = bench.declarable or [pair for pair in bench.failed if pair.difference.count]
    if not pairs:
        return ""
    pairs, explaining = sorted(pairs, key=lambda pair: pair.x.numel()), bench.explaining
    others = suggestions(words_of(bench.subject.variants)) if bench.undeclared < _TRIED else ()
    for words in (*explaining, *others):
        if explains(varied(words), pairs):
            if words not in explaining:
                explaining.append(words)
            return hint(ALL, words)
    bench.undeclared += 1
    return ""


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
        show: called with each row in turn.

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
    rows = []
    for known in PROPERTIES.values():
        if not wanted or known.name in wanted:
            rows.append(examined(bench, known))
            if show:
                show(rows[-1])
    return Findings(one.name, name, tuple(rows))
