"""An effect is a knob's value minus the one that the file lists first, in every table, sentence and picture that shows it."""

import itertools
import json
import re

import pytest

from ablate.reports.answer import Answer
from ablate.reports.comparison_tables import contrasts_table
from ablate.results.answer_sentences import Setting, of_effect
from ablate.results.attribution import grid, main_effects
from ablate.results.contrasts import contrasts
from ablate.results.summary import summaries
from ablate.store.ledger import Ledger

LISTS = {
    "false first": [False, True],
    "true first": [True, False],
    "words": ["b", "a", "c"],
    "numbers that fall": [3, 1, 2],
    "true, false and a word": [True, False, "x"],
    "a word before true and false": ["x", True, False],
    "null and false": [None, False],
    "false and null": [False, None],
    "true, null and false": [True, None, False],
}
NO_ARM = object()
"""The baseline is none of the grid's arms."""
SEEDS = (0, 1, 2)


@pytest.fixture
def book(tmp_path, request):
    """The ledger of a grid of a list of values and of one more knob; each value is worth a tenth more than the one listed before it."""
    values, baseline = request.param
    ledger = Ledger(tmp_path / "sweeps" / "signs" / "ledger.db")
    base = member(ledger, "base", {"recipe": "bf16"}, None, 0.0, role="baseline")
    points = list(itertools.product(enumerate(values), (10, 20)))
    points.sort(
        key=lambda point: point[0][1] is not baseline
    )  # the ledger has an arm that is the baseline first
    for (place, value), other in points:
        own = None if value is baseline else base
        member(ledger, f"{value} {other}", {"k": value, "other": other}, own, place / 10 + other)
    ledger.describe(metric='{"name": "val/x"}')
    yield ledger
    ledger.close()


def member(
    ledger: Ledger, name: str, knobs: dict, baseline: int | None, value: float, role: str = "listed"
) -> int:
    arm = ledger.add_arm(name, knobs, baseline, None, role)
    for seed in SEEDS:
        trial = ledger.add_member(arm, seed, f"{name}/{seed}", '{"workload": {"idle": {}}}')
        ledger.record(trial, [{"step": 1, "time": 0.0, "metrics": {"val/x": 1 + value + seed}}])
        ledger.settle(trial, "done")
    return arm


def shown(value) -> str:
    return json.dumps(value)


def worth(values: list) -> dict[str, int]:
    return {shown(value): place for place, value in enumerate(values)}


def reference(values: list):
    """By the rule as the documents state it."""
    return False if len(values) == 2 and all(isinstance(value, bool) for value in values) else values[0]


def agree(change: str, mean: float, values: list) -> None:
    """The effect is the worth of the value that is named first minus that of the other; the reference is never named first."""
    first, second = re.fullmatch(r"(.*) instead of (.*)", change).groups()
    known = worth(values)
    assert mean == pytest.approx((known[first] - known[second]) / 10)
    order = [
        shown(reference(values)),
        *(shown(value) for value in values if shown(value) != shown(reference(values))),
    ]
    assert order.index(first) > order.index(second)


@pytest.mark.parametrize("book", [(values, NO_ARM) for values in LISTS.values()], ids=LISTS, indirect=True)
def test_tables_sentences_and_pictures_subtract_the_value_that_is_listed_first(book, request):
    values, _ = request.node.callspec.params["book"]
    arms, metric, answer = summaries(book), book.facts.metric, Answer(book)
    effects = [effect for effect in main_effects(grid(arms)) if effect.knobs == ("k",)]
    pairs = [contrast for contrast in contrasts(arms, metric) if contrast.knob == "k"]
    assert len(effects) == len(values) - 1
    assert len(pairs) == 2 * len(values) * (len(values) - 1) // 2
    for one in (*effects, *pairs):
        agree(one.change, one.effect.mean, values)
    assert {effect.change.rpartition(" of ")[2] for effect in effects} == {shown(reference(values))}
    by_change = {contrast.change: contrast.effect.mean for contrast in pairs}
    assert all(by_change[effect.change] == pytest.approx(effect.effect.mean) for effect in effects)
    lines = [line for line in answer.comparisons().rows if line.group.startswith("k: ")]
    assert len(lines) == len(pairs) + len(effects)
    for line in lines:
        agree(line.group.removeprefix("k: "), line.difference.mean, values)
    table = contrasts_table(pairs).terminal()
    for change, text in zip(table.columns[1].cells, table.columns[3].cells, strict=True):
        agree(str(change), float(str(text).split()[0]), values)
    setting = Setting(metric, "")
    sentences = [
        match
        for effect, verdict in answer.main_effects
        if (
            match := re.search(
                r"k (.*?) (raises|lowers|changes|gives).*?(?: by ([+\N{MINUS SIGN}]?[\d.]+)|$)",
                of_effect(effect, verdict, setting)[1],
            )
        )
    ]
    assert len(sentences) == len(effects)
    for _, verb, size in (sentence.groups() for sentence in sentences if sentence[3]):
        assert size[0] in "+\N{MINUS SIGN}" if verb == "changes" else size[0].isdigit()
    for sentence in sentences:
        size = float((sentence[3] or "0").replace("\N{MINUS SIGN}", "-"))
        agree(sentence[1], -size if sentence[2] == "lowers" else size, values)


@pytest.mark.parametrize(
    "book", [([True, False, "x"], "x"), (["x", True, False], "x"), ([True, False, None], None)], indirect=True
)
def test_a_value_that_only_baselines_have_counts_as_listed(book):
    """Contrasts see the baselines and main effects do not: both must have one reference."""
    arms = summaries(book)
    (effect,) = [effect for effect in main_effects(grid(arms)) if effect.knobs == ("k",)]
    changes = {
        contrast.change
        for contrast in contrasts(arms, book.facts.metric)
        if contrast.knob == "k" and "x" not in contrast.change
    }
    assert effect.change == "false instead of true"
    assert effect.change in changes
    assert "true instead of false" not in changes
