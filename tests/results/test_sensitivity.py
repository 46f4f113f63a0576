"""A map finds the cells that damage comes from, and says so if its numbers are noise."""

import json

import numpy as np
import pandas as pd
import pytest
import statsmodels.api as sm
import statsmodels.formula.api as smf
from scipy import stats
from support.experiments import ledger, problems, sweep, tiny, write
from support.made_up import SPEC, member

from ablate.experiment.schema import Map
from ablate.recipes.recipe import SLOTS
from ablate.reports.answer import Answer
from ablate.reports.maps import map_parts
from ablate.results.comparisons import Comparisons
from ablate.results.sensitivity import ranking, sensitivity
from ablate.store.ledger import Ledger

PRODUCTS = ("fprop", "dgrad", "wgrad")
TRUTH = {(block, product): size * (3 - block) for block in range(3) for product, size in zip(
    PRODUCTS, (0.004, 0.001, 0.002), strict=True)}  # fmt: skip


def made_up(folder, truth=TRUTH, noise=0.0003, seeds=8, draw=0, excess=0.0, metric="val/loss", sign=1):
    """A map whose cells have a known damage, in a ledger; all cells at once cost their sum less `excess`."""
    book = Ledger(folder / "map" / "ledger.db")
    direction = "minimize" if sign > 0 else "maximize"
    named = json.dumps({"name": metric, "direction": direction})
    book.describe(metric=named, question="Where?", map=Map().model_dump_json())
    random = np.random.default_rng(draw)
    names = {f"block {block} {product}": size for (block, product), size in truth.items()}
    arms = {"bf16": 0.0, **names, "everything": sum(names.values()) - excess}
    base = None
    for number, (name, size) in enumerate(arms.items()):
        knobs = {"recipe.layers": {"rules": []}} if number else {"recipe": "bf16"}
        arm = book.add_arm(name, knobs, base, None, "listed" if number else "baseline")
        base = arm if base is None else base
        for seed in range(seeds):
            value = sign * (3 + 0.01 * seed + size + random.normal(0, noise / 2**0.5))
            member(book, arm, seed, [(10, {metric: value})], spec=SPEC)
    return Comparisons(book)


def test_a_map_of_a_known_damage_ranks_it(tmp_path):
    found = sensitivity(made_up(tmp_path))
    assert found.groups == ["block 0", "block 1", "block 2"]
    assert found.columns == [*PRODUCTS]
    assert found.first.name == "block 0 fprop"
    assert all(cell.ranked and cell.resolved for cell in found.cells)
    for cell in found.cells:
        # 4 standard errors of the noise that was drawn
        assert abs(cell.total.mean - TRUTH[int(cell.group[-1]), cell.part]) < 4 * 0.0003 / 8**0.5
    assert found.excess.low < 0 < found.excess.high


def test_what_does_not_add_up_shows(tmp_path):
    found = sensitivity(made_up(tmp_path, excess=0.01))
    assert found.excess.low > 0.008


def test_a_map_of_a_metric_of_which_more_is_better_is_its_mirror_image(tmp_path):
    loss, score = (
        made_up(tmp_path / metric, metric=f"val/{metric}", sign=sign)
        for metric, sign in (("loss", 1), ("score", -1))
    )
    found, mirrored = sensitivity(loss), sensitivity(score)
    assert mirrored.first.name == found.first.name
    assert mirrored.fresh == pytest.approx(-found.fresh)
    for one, other in zip(found.cells, mirrored.cells, strict=True):
        assert (other.total.mean, other.shrunk) == pytest.approx((-one.total.mean, -one.shrunk))
    tables = [map_parts(Answer(found_ledger(tmp_path / name)))[0].table for name in ("loss", "score")]
    first, second = ([row["cell"] for row in table.rows] for table in tables)
    assert first == second


@pytest.mark.parametrize(("seeds", "said"), [(2, "too few seeds say"), (8, ": within this, damage adds up")])
def test_damage_of_too_few_seeds_is_not_said_to_add_up_or_not(tmp_path, seeds, said):
    made_up(tmp_path, seeds=seeds)
    (line,) = (
        line
        for line in map_parts(Answer(found_ledger(tmp_path)))[1].markdown().splitlines()
        if "at once" in line
    )
    assert said in line
    assert "does not add up" not in line


@pytest.mark.parametrize(("cells", "seeds"), [(3, 4), (3, 8), (4, 8), (9, 16)])
def test_noise_is_not_ranked(cells, seeds):
    """At most 5 % of 150 tables without any damage are ranked."""
    draw = np.random.default_rng([cells, seeds])
    ranked = sum(ranking(draw.normal(size=(cells, seeds))).holds for _ in range(150))
    assert stats.binomtest(ranked, 150, 0.05, "greater").pvalue > 0.001


def test_the_agreement_is_the_median_rank_correlation_of_halves():
    """Four seeds have three pairs of halves; their median, by scipy's Spearman."""
    table = np.random.default_rng(5).normal(size=(6, 4)) + np.arange(6)[:, None]
    halves = ([0, 1], [2, 3]), ([0, 2], [1, 3]), ([0, 3], [1, 2])
    by_hand = [
        stats.spearmanr(table[:, one].mean(axis=1), table[:, two].mean(axis=1)).statistic
        for one, two in halves
    ]
    assert ranking(table).agreement == pytest.approx(np.median(by_hand))
    seeds = pd.DataFrame(
        [(cell, seed, table[cell, seed]) for cell in range(6) for seed in range(4)], columns=["c", "s", "v"]
    )
    anova = smf.ols("v ~ C(c) + C(s)", seeds).fit()
    assert ranking(table).p == pytest.approx(sm.stats.anova_lm(anova).loc["C(c)", "PR(>F)"])


def test_no_leader_is_named_of_two_that_are_equal():
    """At most 5 % of 150 tables name one."""
    draw = np.random.default_rng(3)
    means = np.array([3.0, 3.0, 0.0, 0.0])[:, None]
    named = sum(ranking(means + draw.normal(size=(4, 8))).has_leader for _ in range(150))
    assert stats.binomtest(named, 150, 0.05, "greater").pvalue > 0.001


def test_cells_of_noise_are_shrunk(tmp_path):
    found = sensitivity(made_up(tmp_path, dict.fromkeys(TRUTH, 0.0)))
    assert sum(cell.shrunk**2 for cell in found.cells) < sum(cell.total.mean**2 for cell in found.cells)


def test_without_noise_nothing_is_shrunk(tmp_path):
    for cell in sensitivity(made_up(tmp_path, noise=1e-7)).cells:
        assert cell.shrunk == pytest.approx(cell.total.mean, rel=1e-3)


def test_a_leader_is_named_where_the_others_are_not_ranked(tmp_path):
    sizes = {(block, "fprop"): size for block, size in enumerate((0.008, 0.002, 0.002, 0.002, 0.002))}
    found = sensitivity(made_up(tmp_path, sizes, 0.001, draw=1))
    assert not found.rankings["fprop"].holds
    assert [cell.name for cell in found.cells if cell.ranked] == ["block 0 fprop"] == [found.first.name]
    assert abs(found.fresh - 0.008) < 4 * 0.001 / 8**0.5


@pytest.mark.parametrize(("seeds", "cells"), [(3, 9), (8, 2)])
def test_too_few_cells_or_seeds_are_not_ranked(tmp_path, seeds, cells):
    few = dict(list(TRUTH.items())[:cells])
    found = sensitivity(made_up(tmp_path, few, seeds=seeds))
    assert found.first is None
    assert "Not ranked for want of" in map_parts(Answer(found_ledger(tmp_path)))[1].markdown()


def found_ledger(folder):
    return Ledger(folder / "map" / "ledger.db", readonly=True)


def test_the_arms_of_a_map_are_its_cells(tmp_path):
    experiment = tiny(
        tmp_path, shape={"layers": 2}, ablate=None, seeds=None, map={"operands": "operands", "times": 3.0}
    )
    arms = {arm.name: arm for arm in experiment.arms}
    assert [*arms] == [
        "bf16", *(f"block {block} {slot}" for block in range(2) for slot in SLOTS), "everything", "nvfp4",
    ]  # fmt: skip
    rule, rest = arms["block 1 dgrad.g"].recipe.layers.rules
    assert [(slot, quant.error.times) for slot, quant in rule.use.quantised()] == [("dgrad.g", 3.0)]
    assert (str(rule.match), rest.use) == ("blocks 1-1", None)
    assert {quant.error.times for _, quant in arms["everything"].recipe.quantised()} == {3.0}
    assert experiment.seeds == tuple(range(8))


@pytest.mark.parametrize(
    ("keys", "said"),
    [
        ({"map": {"layers": "rows"}}, "map.layers"),
        ({"map": {"layers": ["*", ""]}}, "map.layers"),
        ({"map": {"times": 0.5}}, "map.times"),
        ({"map": {}, "recipe": "bf16"}, "no layer"),
        ({"map": {}, "ablate": {"rht": [True, False]}}, "give one of"),
        (
            {"map": {"layers": ["*.mlp.*"]}, "recipe": {"from": "nvfp4", "layers": {"skip_last": 1}}},
            "map.layers",
        ),
    ],
)
def test_a_map_that_cannot_be_made_is_refused(tmp_path, keys, said):
    found = problems(write(tmp_path, shape={"layers": 2}, **({"ablate": None} | keys)))
    assert len(found) == 1
    assert said in found[0].message


@pytest.mark.slow
def test_a_map_is_run_and_drawn(tmp_path):
    """With globs, since those need no knowledge of the model's layers."""
    experiment = tiny(
        tmp_path, shape={"layers": 2, "steps": 10}, ablate=None, seeds=4,
        map={"layers": ["blocks.0.*", "blocks.1.*"], "operands": "products"},
    )  # fmt: skip
    sweep(experiment, tmp_path / "state")
    answer = Answer.open(tmp_path / "state", "tiny", tmp_path / "out")
    found = sensitivity(answer)
    assert found.groups == ["blocks.0.*", "blocks.1.*"]
    assert all(cell.parts for cell in found.cells)
    page = answer.show("", *answer.map()).html()
    assert page.count('<td class="number') == 6
    assert len((tmp_path / "out" / "map.csv").read_text().splitlines()) == 7
    assert all(cell.total.pairs == 4 for cell in found.cells)
    assert ledger(tmp_path / "state").facts.map == experiment.keys.map
    assert json.loads(answer.ledger.facts.map.model_dump_json())["times"] == 4
