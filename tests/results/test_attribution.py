"""Effects of a grid against least squares with seeds as blocks, shares that add up, tokens on curves of known shape, fronts by hand."""

import itertools
import math
import re

import numpy as np
import pytest
import statsmodels.formula.api as smf
from pandas import DataFrame
from support.books import add

from ablate.reports.answer import Answer
from ablate.reports.dose_parts import positions
from ablate.results.attribution import Grid, extra_tokens, front, grid, interactions, main_effects, shares
from ablate.results.doses import doses, sentence, share_closed
from ablate.results.intervals import SINGLE_LOOK, Interval
from ablate.results.number_text import bounds
from ablate.results.paired_stats import Verdict, paired_difference
from ablate.results.summary import ArmSummary
from ablate.store.ledger import Ledger

LEVELS = {"rht": [True, False], "sr": [True, False], "block": ["1x16", "1x32", "1x64"]}


def arm(
    name: str, knobs: dict, values: dict[int, float], baseline: str | None = "base", given: int | None = None
) -> ArmSummary:
    given = tuple(range(given or len(values)))
    missing = tuple(seed for seed in given if seed not in values)
    gap = paired_difference(values, dict.fromkeys(values, 0.0)) if baseline else None
    measured = {
        "sqnr_db": math.nan,
        "tokens_per_s": math.nan,
        "memory": math.nan,
        "nans": 0,
        "diverged": (),
        "missing": missing,
    }
    return ArmSummary(
        name,
        baseline,
        knobs,
        values,
        given,
        gap,
        None,
        Interval(),
        Verdict("unjudged", "baseline"),
        "listed",
        **measured,
    )


def whole(levels: dict, seeds: int, seed: int = 0) -> list[ArmSummary]:
    """A grid with known effects: rht .5, sr -.2 and .3 more together, and each seed a level of its own."""
    random = np.random.default_rng(seed)
    blocks = random.normal(0, 10, seeds)
    arms = [arm("base", {"recipe": "bf16"}, dict(enumerate(blocks.tolist())), None)]
    for values in itertools.product(*levels.values()):
        knobs = dict(zip(levels, values, strict=True))
        true = 0.5 * knobs["rht"] - 0.2 * knobs["sr"] + 0.3 * knobs["rht"] * knobs["sr"]
        noisy = blocks + true + random.normal(0, 0.1, seeds)
        arms.append(arm(str(knobs), knobs, dict(enumerate(noisy.tolist()))))
    return arms


def test_main_effects_and_interactions_are_those_of_least_squares_with_seeds_as_blocks():
    arms = whole(LEVELS, 4)
    found = grid(arms)
    rows = [{**a.knobs, "seed": s, "y": y} for a in arms[1:] for s, y in a.values.items()]
    model = smf.ols("y ~ C(rht, Sum) * C(sr, Sum) * C(block, Sum) + C(seed)", DataFrame(rows)).fit().params
    effects = {(e.knobs, e.change): e.effect for e in (*main_effects(found), *interactions(found))}
    assert effects[("rht",), "true instead of false"].mean == pytest.approx(
        -2 * model["C(rht, Sum)[S.False]"], rel=1e-9
    )
    assert effects[("rht", "sr"), "true instead of false; true instead of false"].mean == pytest.approx(
        4 * model["C(rht, Sum)[S.False]:C(sr, Sum)[S.False]"], rel=1e-9
    )
    assert effects[("block",), '"1x32" instead of "1x16"'].mean == pytest.approx(
        model["C(block, Sum)[S.1x32]"] - model["C(block, Sum)[S.1x16]"], rel=1e-9
    )
    assert len(effects) == 2 + 2 + 1 + 2 + 2


def test_known_effects_lie_within_their_intervals_and_seeds_levels_do_not_widen_them():
    """Count intervals of 40 grids with three effects each: 95 % are 114 of 120, and 105 is four standard errors below."""
    covered = 0
    for seed in range(40):
        found = grid(whole({k: LEVELS[k] for k in ("rht", "sr")}, 6, seed))
        effects = [*main_effects(found), *interactions(found)]
        covered += sum(
            e.effect.low < true < e.effect.high for e, true in zip(effects, (0.65, -0.05, 0.3), strict=True)
        )
        assert all(e.effect.high - e.effect.low < 1 for e in effects)  # seeds lie 10 apart
    assert covered >= 105


def test_shapley_shares_add_up_to_what_all_components_do_together_and_leave_one_out_is_a_difference():
    arms = whole({k: LEVELS[k] for k in ("rht", "sr")}, 5)
    found = {share.knob: share for share in shares(grid(arms))}
    by_knobs = {tuple(a.knobs.values()): a.values for a in arms[1:]}
    together = paired_difference(by_knobs[True, True], by_knobs[False, False]).mean
    assert sum(share.shapley.mean for share in found.values()) == pytest.approx(together, rel=1e-9)
    assert found["rht"].left_out == paired_difference(by_knobs[True, True], by_knobs[False, True])
    by_hand = [
        (
            by_knobs[True, False][s]
            - by_knobs[False, False][s]
            + by_knobs[True, True][s]
            - by_knobs[False, True][s]
        )
        / 2
        for s in range(5)
    ]
    assert found["rht"].shapley.mean == pytest.approx(np.mean(by_hand), rel=1e-9)


def test_what_is_no_whole_grid_is_none():
    arms = whole({k: LEVELS[k] for k in ("rht", "sr")}, 3)
    assert grid(arms[:-1]) is None
    assert grid(arms[:1]) is None
    assert grid([]) is None
    assert grid([arms[0], arm("a", {"rht": True}, {0: 1.0}), arm("b", {"sr": True}, {0: 1.0})]) is None


def test_the_rounding_of_sums_is_no_interaction():
    """Two knobs whose effects add up to the last decimal; sums of losses that three decimals write differ by 1e-16."""
    draw = np.random.default_rng(2)
    sizes = draw.integers(50, 500, (4, 6)) / 1000
    arms = [arm("base", {"recipe": "bf16"}, dict(enumerate(sizes[3] + 3)), None)]
    for rht, sr, block in itertools.product([False, True], [False, True], LEVELS["block"]):
        values = 3 + sizes[3] + rht * sizes[0] + sr * sizes[1] + LEVELS["block"].index(block) * sizes[2]
        knobs = {"rht": rht, "sr": sr, "block": block}
        arms.append(arm(str(knobs), knobs, dict(enumerate(np.round(values, 3).tolist()))))
    for effect in interactions(grid(arms)):
        assert abs(effect.effect.mean) < 1e-12
        assert effect.effect.distinct == 1
        assert not effect.effect.has_interval


def test_a_seed_that_one_arm_lacks_is_left_out_and_said():
    arms = whole({k: LEVELS[k] for k in ("rht", "sr")}, 4)
    arms[1] = arm(
        arms[1].name, dict(arms[1].knobs), {s: v for s, v in arms[1].values.items() if s != 2}, given=4
    )
    found = grid(arms)
    assert found.left_out == (2,)
    assert all(set(values) == {0, 1, 3} for values in found.values.values())


def test_tokens_to_match_on_curves_that_fall_with_the_logarithm():
    """Loss a - ln(tokens): .1 nats behind is a factor e^.1 of tokens."""
    steps = [100 * 2**n for n in range(8)]
    base = {t: 9 - math.log(t) for t in steps}
    behind, ahead = ({t: y + d for t, y in base.items()} for d in (0.1, -0.1))
    assert extra_tokens(behind, base) == pytest.approx(math.exp(0.1) - 1)
    assert extra_tokens(ahead, base) == pytest.approx(math.exp(-0.1) - 1)
    assert extra_tokens(base, base) == pytest.approx(0)
    assert math.isnan(extra_tokens(dict.fromkeys(steps, 99.0), base))
    assert math.isnan(extra_tokens({}, base))
    start = {0: 9.0}
    for one, other in ((behind, base), (ahead, base), (dict.fromkeys(steps, 8.0), base)):
        expected = pytest.approx(extra_tokens(one, other), nan_ok=True)
        assert extra_tokens(start | one, start | other) == expected
        assert extra_tokens(start | one, other) == expected
        assert extra_tokens(one, start | other) == expected
    assert math.isnan(extra_tokens({0: 1.0}, start | base))


def test_nearly_equal_curves_need_nearly_equal_tokens_where_both_rise_at_the_end():
    base = {10: 4.0, 20: 3.0, 40: 3.1}
    assert extra_tokens(base, base) == 0
    for shift in (1e-4, -1e-4):  # where it last falls, the loss falls by one nat while the tokens double
        moved = {tokens: loss + shift for tokens, loss in base.items()}
        assert extra_tokens(moved, base) == pytest.approx(2**shift - 1)
    for one, other in ((base, base | {40: math.nan}), (base | {40: math.nan}, base)):
        assert math.isnan(extra_tokens(one, other))


def test_an_arm_that_rises_alone_pays_for_all_tokens_since_its_baseline_had_that_loss():
    base = {10: 4.0, 20: 3.0, 40: 2.9}
    assert extra_tokens(base | {40: 3.5}, base) == pytest.approx(40 / (10 * 2**0.5) - 1)
    assert extra_tokens(base, base | {40: 3.5}) == pytest.approx(10 * 2**0.5 / 40 - 1)


def test_the_front_is_what_nothing_beats():
    points = {"a": (1.0, 5.0), "b": (2.0, 9.0), "c": (2.0, 4.0), "d": (0.5, math.nan), "e": (1.0, 5.0)}
    assert front(points, (1, -1)) == ["a", "b", "e"]
    assert front(points, (1, 1)) == ["a", "c", "e"]
    assert front({}, (1, 1)) == []


# Dose-response


def cooled(book, gaps: dict[float, float], noise: float = 0.001) -> None:
    """Arms of one ordered knob with these mean gaps to the baseline."""
    random = np.random.default_rng(0)
    base = {seed: 3.0 + 0.05 * seed for seed in range(6)}
    add(book, "bf16", base, None, knobs={"recipe": "bf16"})
    for value, gap in gaps.items():
        losses = {seed: loss + gap + noise * random.normal() for seed, loss in base.items()}
        add(book, f"cooldown={value}", losses, knobs={"cooldown": value})


def found_doses(book):
    return next((one for one in doses(Answer(book)) if one.knob == "cooldown"), None)


def test_doses_are_in_order_with_the_share_of_the_gap_that_each_closes(tmp_path):
    book = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    book.describe(question="Q?", metric='{"name": "val/loss"}', search="")
    cooled(book, {0.1: 0.1, 0.3: 0.02, 0: 0.06})
    found = found_doses(book)
    assert [dose.value for dose in found.values] == [0, 0.1, 0.3]
    assert found.reference.value == 0.1
    assert [dose.closed and dose.closed.value for dose in found.values] == [
        pytest.approx(0.4, abs=0.03),
        None,
        pytest.approx(0.8, abs=0.03),
    ]
    assert sentence(found).startswith("cooldown 0.3 closes 80 % (95 % interval 79 to 81 %) of")
    book.close()


@pytest.mark.parametrize(
    ("gaps", "said"),
    [
        ({0: 0.0, 0.1: 0.05, 0.2: 0.1}, "is not resolved, so no share"),
        ({0: 0.1, 0.1: 0.2, 0.2: 0.15}, " %) of the gap at cooldown 0, not steadily"),
        ({0: 0.1, 0.1: 0.1, 0.2: 0.1}, ", perhaps none of it."),
    ],
)
def test_a_dose_says_what_it_cannot(gaps, said, tmp_path):
    book = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    book.describe(question="Q?", metric='{"name": "val/loss"}', search="")
    cooled(book, gaps, noise=1e-4)
    assert said in sentence(found_doses(book))
    book.close()


def test_the_picture_of_doses_has_the_verdicts_and_numbers_of_the_table_of_comparisons(tmp_path):
    book = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    book.describe(question="Q?", metric='{"name": "val/loss", "min_effect": 0.01}', search="")
    cooled(book, {0: 0.1, 0.1: 0.099, 0.2: 0.02, 0.3: 0.2}, noise=0.002)
    answer = Answer(book)
    picture, _ = answer.doses()
    html = picture.html()
    lines = {line.label.split()[0]: line for line in answer.comparisons().rows if line.group == "cooldown"}
    drawn = re.findall(r'<g class="(\w+)"><title>(\S+): (.*?), (\w+)</title>', html)
    assert {kind for kind, *_ in drawn} == {"equivalent", "better", "worse"}
    for kind, dose, numbers, verdict in drawn:
        assert kind == verdict == lines[dose].verdict.kind
        assert numbers == bounds(lines[dose].difference).replace("-", "\u2212")
    assert all(text in html for text in ("worse than cooldown 0 ↑", "better than cooldown 0 ↓", "too small"))
    heights = [float(y) for y in re.findall(r'<svg x="[\d.]+%" y="([\d.]+)"[^>]*><path class="mean"', html)]
    assert heights.index(max(heights)) == 2  # the lowest loss is the lowest mark
    assert heights.index(min(heights)) == 3
    book.close()


@pytest.mark.parametrize(
    ("values", "even"),
    [
        ([0, 0.1, 0.2, 0.3], True),
        ([8, 16, 32, 64], True),
        ([0, 1, 1000, 1001], True),
        ([1, 2, 4.5], False),
        ([0.99, 0.999, 0.9999], True),
    ],
)
def test_doses_stand_on_the_scale_that_separates_them(values, even):
    steps = np.diff(positions(values))
    assert (steps > 0).all()
    assert (np.ptp(steps) < 1e-9) == even


def test_no_share_is_stated_of_a_gap_that_does_not_stand_after_holm(tmp_path):
    book = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    book.describe(question="Q?", metric='{"name": "val/loss"}', search="")
    cooled(book, {0: 0.0009, 0.1: 0.0, 0.2: 0.0, 0.3: 0.0, 0.4: 0.0}, noise=0.002)
    (first,) = [arm for arm in Answer(book).arms if arm.name == "cooldown=0"]
    assert (first.verdict.kind, first.verdict.alone, first.gap.low > 0) == ("undecided", "worse", True)
    assert "is not resolved" in sentence(found_doses(book))
    book.close()


def test_a_knob_that_is_off_stands_left_of_its_numbers_and_is_the_reference(tmp_path):
    book = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    book.describe(question="Q?", metric='{"name": "val/loss"}', search="")
    cooled(book, {None: 0.1, 0.3: 0.2, 0.1: 0.15, 0.2: 0.17})
    found = found_doses(book)
    assert [str(dose) for dose in found.values] == ["null", "0.1", "0.2", "0.3"]
    assert found.reference.value is None
    (picture,) = Answer(book).doses()
    assert "worse than cooldown null ↑" in picture.html()
    places = positions([dose.value for dose in found.values])
    assert places == sorted(places)
    assert places[2] - places[1] == pytest.approx(places[3] - places[2])
    book.close()


def test_one_seed_of_doses_is_drawn_without_intervals(tmp_path):
    book = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    book.describe(question="Q?", metric='{"name": "val/loss"}', search="")
    add(book, "bf16", {0: 3.0}, None, knobs={"recipe": "bf16"})
    for value in (0, 0.1, 0.2):
        add(book, f"cooldown={value}", {0: 3.1 - value}, knobs={"cooldown": value})
    html = "".join(part.html() for part in Answer(book).doses())
    assert ('class="bar"' in html, html.count('class="mean"')) == (False, 3)
    book.close()


@pytest.mark.parametrize(("gap", "pairs"), [(2.0, 5), (4.0, 5), (2.0, 8)])
def test_the_interval_of_a_share_covers_the_true_share(gap, pairs):
    """Gaps of 2 and 4 deviations, of which 48 % are truly closed, with errors that correlate by .5.

    Given only where the first gap is told from zero, so a little below 95 %.
    """
    draws = np.random.default_rng(pairs)
    shared, first, dose = draws.normal(size=(3, 4000, pairs)) * math.sqrt(0.5)
    a, b = gap + first + shared, 0.52 * gap + dose + shared
    shares = [
        share_closed(*(dict(enumerate(row)) for row in rows), SINGLE_LOOK) for rows in zip(a, b, strict=True)
    ]
    given = [share for share in shares if share]
    assert len(given) > 0.9 * len(shares)
    assert np.mean([share.low <= 0.48 <= share.high for share in given]) == pytest.approx(0.95, abs=0.015)
    assert all(share.low <= share.value <= share.high for share in given)


def test_two_values_or_names_are_no_doses(tmp_path):
    book = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    book.describe(question="Q?", metric='{"name": "val/loss"}', search="")
    cooled(book, {0: 0.1, 0.1: 0.2})
    assert found_doses(book) is None
    book.close()


class CountedValues(dict):
    """Values of a grid that count how often all of them are read."""

    reads = 0

    def __iter__(self):
        self.reads += 1
        return super().__iter__()

    def values(self):
        self.reads += 1
        return super().values()


def test_effects_of_many_levels_read_the_grid_a_fixed_number_of_times():
    reads = []
    for levels in (5, 50):
        values = CountedValues({(n,): {0: n / 7, 1: n / 3} for n in range(levels)})
        line = Grid({"lr": tuple(range(levels))}, values, SINGLE_LOOK, ())
        effects = main_effects(line)
        reads.append(values.reads - len(effects) * 2)  # `mean` reads the first point's seeds
        assert [effect.effect.mean for effect in effects] == pytest.approx(
            [n * 5 / 21 for n in range(1, levels)]
        )
    assert reads[0] == reads[1]
