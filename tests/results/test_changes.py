"""Relative changes of sweeps without a model: statistics against scipy, and the page's cells against those."""

import json
import math
import re

import numpy as np
import pytest
from scipy import stats
from support.made_up import member

from ablate.experiment.schema import Asked
from ablate.reports.answer import Answer
from ablate.results.comparisons import Comparisons
from ablate.results.headline import headline_of
from ablate.results.paired_stats import holm
from ablate.store.ledger import Ledger

ERROR, ZEROS = "gemm/wgrad/rel_mse", "quant/wgrad.g/zero_frac"
SPEC = json.dumps({"workload": {"tensors": {}}})
FACTORS = {"halved": 0.5, "doubled": 2.0, "raised": 1.2, "noise": 1.0, "far": 40.0}


@pytest.fixture
def book(tmp_path):
    ledger = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    ledger.describe(
        question="Which?",
        metric=json.dumps({"name": ERROR}),
        compared=json.dumps([{"name": ERROR}, {"name": ZEROS}]),
        search="",
    )
    yield ledger
    ledger.close()


def filled(book, seeds: int = 4, zero: str = "", knobs=None) -> dict[str, np.ndarray]:
    """Arms whose error is a factor of the baseline's, and the log-ratios that were drawn."""
    draws, logs = np.random.default_rng(1), {}
    base = book.add_arm("base", {"recipe": "nvfp4"}, None, None)
    level = {seed: 0.01 * (1 + seed) for seed in range(seeds)}
    for seed, value in level.items():
        member(book, base, seed, [(1, {ERROR: value, ZEROS: 0.2})], spec=SPEC)
    for name, factor in FACTORS.items():
        arm = book.add_arm(name, {name: True} if knobs is None else knobs[name], base, None)
        logs[name] = math.log(factor) + 0.03 * draws.normal(size=seeds)
        for seed, value in level.items():
            zeros = 0.0 if name == zero and seed == 0 else 0.2 * (1 + 0.1 * seed)
            metrics = {ERROR: value * math.exp(logs[name][seed]), ZEROS: zeros}
            member(book, arm, seed, [(1, metrics)], spec=SPEC)
    return logs


def test_changes_are_one_sample_t_tests_of_log_ratios(book):
    logs = filled(book)
    by_arm = {change.arm: change for change in Answer(book).relative_changes[0]}
    tests = {name: stats.ttest_1samp(values, 0) for name, values in logs.items()}
    corrected = holm([test.pvalue for test in tests.values()])
    for (name, test), p in zip(tests.items(), corrected, strict=True):
        change, bounds = by_arm[name], test.confidence_interval(0.95)
        found = (change.log_ratio.mean, change.log_ratio.low, change.log_ratio.high)
        assert found == pytest.approx((logs[name].mean(), bounds.low, bounds.high))
        assert change.verdict.p == pytest.approx(p)
        kind = "undecided" if p >= 0.05 else "better" if logs[name].mean() < 0 else "worse"
        assert change.verdict.kind == kind
    assert {change.verdict.kind for change in by_arm.values()} == {"better", "worse", "undecided"}


def page_cells(html: str) -> dict[str, list[tuple[str, str, str]]]:
    """Class, number and bound of each cell of the page's table, by the label of its row."""
    cell = re.compile(r'class="change (\w+)">.*?<b>(.*?)</b><small>(.*?)</small>')
    rows = re.findall(r"<tr><td>(.*?)</td>(.*?)</tr>", html)
    return {label: cell.findall(inside) for label, inside in rows}


def test_cells_have_the_numbers_and_the_colours_of_the_verdicts_sorted_by_the_first_metric(book):
    logs = filled(book)
    answer = Answer(book)
    drawn = page_cells(answer.changes().html())
    means = {name: np.exp(values.mean()) - 1 for name, values in logs.items()}
    assert list(drawn) == sorted(means, key=means.get)
    for change in answer.relative_changes[0]:
        kind, number, bound = drawn[change.arm][0]
        half = stats.t.ppf(0.975, 3) * logs[change.arm].std(ddof=1) / 2
        wide = 50 * (1 + means[change.arm]) * (math.exp(half) - math.exp(-half))
        digits = len(number.rstrip(" %").partition(".")[2])
        assert float(number.rstrip(" %").replace("\u2212", "-")) == round(100 * means[change.arm], digits)
        assert float(bound.removeprefix("±")) == pytest.approx(wide, rel=0.05)
        assert kind == (change.verdict.kind if change.verdict.decided else "open")


def test_a_change_beyond_the_axis_is_an_arrow_and_no_mark(book):
    filled(book)
    cells = dict(re.findall(r"<tr><td>(.*?)</td><td.*?(<svg.*?)</td>", answer_html(book)))
    assert ('class="beyond"' in cells["far"], 'class="mean"' in cells["far"]) == (True, False)
    assert ('class="beyond"' in cells["halved"], 'class="mean"' in cells["halved"]) == (False, True)


def test_ticks_of_a_narrow_column_leave_room_for_their_numbers(book):
    filled(book)
    (head, *_) = re.findall(r'<div class="axis">(.*?)</div>', answer_html(book))
    ticks = re.findall(r'<text( class="close")? x="([\d.]+)%"[^>]*>(.*?)</text>', head)
    wide, narrow = (sorted(float(x) for close, x, _ in ticks if always or not close) for always in (1, 0))
    assert min(np.diff(wide)) >= 15
    assert min(np.diff(narrow)) >= 28
    assert "0" in [text for close, _, text in ticks if not close]


def answer_html(book) -> str:
    return Answer(book).changes().html()


def test_a_zero_has_no_ratio_and_its_cell_says_so(book):
    filled(book, zero="raised")
    answer = Answer(book)
    (change,) = [change for change in answer.relative_changes[1] if change.arm == "raised"]
    assert (change.refused, change.log_ratio.pairs, change.verdict.kind) == (1, 0, "unjudged")
    kind, number, bound = page_cells(answer.changes().html())["raised"][1]
    assert (kind, bound) == ("open", "0 on 1 seed: no ratio")
    assert number == "0.2000 → 0.1800"


def test_one_seed_is_drawn_without_an_interval_or_a_verdict(book):
    logs = filled(book, seeds=1)
    html = answer_html(book)
    assert 'class="bar"' not in html
    kind, number, bound = page_cells(html)["raised"][0]
    assert (kind, number, bound) == ("open", f"{100 * (math.exp(logs['raised'][0]) - 1):+.2f} %", "")


def test_decibels_are_logarithms_already(book):
    book.describe(metric=json.dumps({"name": "quant/fprop.x/sqnr_db", "direction": "maximize"}), compared="")
    base = book.add_arm("base", {"recipe": "nvfp4"}, None, None)
    arm = book.add_arm("better", {"rht": True}, base, None)
    for seed, (one, other) in enumerate([(20.0, 23.01), (21.0, 24.02), (19.0, 22.0)]):
        for number, value in ((base, one), (arm, other)):
            member(book, number, seed, [(1, {"quant/fprop.x/sqnr_db": value})], spec=SPEC)
    ((change,),) = Answer(book).relative_changes
    assert math.exp(change.log_ratio.mean) == pytest.approx(2.0, rel=0.01)
    assert change.verdict.kind == "better"


def test_a_grid_over_tensors_and_a_knob_has_a_group_for_each_kind(book):
    kinds = ("gaussian", "laplace")
    knobs = [{"workload.x": kind, "block": block} for kind in kinds for block in ("1x8", "1x32")]
    base = book.add_arm("base", {"recipe": "nvfp4"}, None, None)
    for number, each in enumerate([{}, *knobs]):
        arm = book.add_arm(f"arm {number}", each, base, None) if number else base
        for seed in range(3):
            error = 0.01 * (1 + seed) * (6 - number) ** (1 + 0.1 * seed)
            member(book, arm, seed, [(1, {ERROR: error, ZEROS: 0.1})], spec=SPEC)
    heads = re.findall(r'scope="colgroup">(.*?) <span|<tr><td>(.*?)</td>', answer_html(book))
    groups = ["x: gaussian", "block 1x32", "block 1x8", "x: laplace", "block 1x32", "block 1x8"]
    assert [group or label for group, label in heads] == groups


@pytest.mark.parametrize(
    ("asked", "percent", "said"),
    [
        ({"arm": "halved"}, True, "halved instead of base lowers"),
        ({"arm": "halved", "against": "base"}, True, "halved instead of base lowers"),
        ({"arm": "halved", "against": "doubled"}, False, "halved instead of doubled lowers"),
        ({"family": "arms"}, True, "Against base, by gemm/wgrad/rel_mse: "),
        (None, True, "Against base, by gemm/wgrad/rel_mse: "),
    ],
)
def test_an_answer_is_in_percent_if_it_is_about_ratios_to_a_baseline(book, asked, percent, said):
    """Two arms without a common baseline are compared by their difference, which is no percentage."""
    logs = filled(book)
    if asked:
        book.describe(answer=Asked(**asked).model_dump_json())
    answer = headline_of(Comparisons(book))
    assert answer.text.startswith(said)
    assert (" %" in answer.text.replace("95 % CI", "")) == percent
    if asked and asked.get("arm") and percent:
        test = stats.ttest_1samp(logs["halved"], 0)
        low, high = (100 * abs(math.expm1(end)) for end in test.confidence_interval(0.95))
        change = 100 * abs(math.expm1(logs["halved"].mean()))
        assert f"by {change:.1f} % (95 % CI {high:.1f} to {low:.1f})" in answer.text
        assert answer.verdicts[0].p == pytest.approx(test.pvalue)


def test_an_answer_about_a_knob_of_tensors_is_a_difference(book):
    knobs = {name: {"block": number} for number, name in enumerate(FACTORS)}
    filled(book, knobs=knobs)
    book.describe(answer=Asked(knob="block").model_dump_json())
    text = headline_of(Comparisons(book)).text
    assert text.startswith("Against block 0, by gemm/wgrad/rel_mse: ")
    assert "%" not in text


def test_the_smallest_effect_that_matters_is_a_percentage_of_tensors(book):
    """It was "within 0": the margin of a ratio was not handed on."""
    book.describe(compared=json.dumps([{"name": ERROR, "min_effect": "30%"}, {"name": ZEROS}]))
    filled(book)
    verdicts = {change.arm: change.verdict.kind for change in Comparisons(book).relative_changes[0]}
    assert verdicts["noise"] == "equivalent"
    book.describe(answer=Asked(arm="noise").model_dump_json())
    text = headline_of(Comparisons(book)).text
    assert text.endswith("; an effect of 30 %, the smallest that matters, is ruled out.")
    book.describe(answer="")
    assert "equivalent" in headline_of(Comparisons(book)).text
    assert "within 0" not in headline_of(Comparisons(book)).text
