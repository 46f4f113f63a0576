"""Verdicts of a forked design: what the windows, the positions and the evaluation leave of them, on simulated readings."""

import json
import math
from contextlib import closing
from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from ablate.errors import InputError
from ablate.experiment.schema import Design
from ablate.reports.notebooks import run
from ablate.reports.report_files import analysis
from ablate.reports.table_notes import smallest_damage
from ablate.results.calibration import Candidate, best, from_full_runs
from ablate.results.comparisons import Comparisons
from ablate.results.forked import (
    Cell,
    Readings,
    Views,
    difference_word,
    qualified,
    shared_error,
    sharpened,
    views,
)
from ablate.results.headline import headline_of
from ablate.results.next_runs import seeds_to_settle, still_open, undecided
from ablate.results.paired_stats import (
    Difference,
    Needed,
    Verdict,
    equivalence,
    judge,
    p_value,
    paired_difference,
    seeds_needed,
)
from ablate.results.summary import Gaps, summaries
from ablate.store.ledger import Ledger

SEEDS = range(8)
WINDOWS, POSITIONS = (10, 20, 40), (100, 200, 300)


class Arm:
    """An arm with the readings that `damage(window, position)` gives, and independent noise."""

    def __init__(self, name: str, damage, noise: float = 1e-5, draw: int = 0, parts: int = 16) -> None:
        random = np.random.default_rng(draw)
        self.name = name
        cells = {
            Cell(position, window): {
                seed: 3 + damage(window, position) + noise * random.normal() for seed in SEEDS
            }
            for position in POSITIONS
            for window in WINDOWS
        }
        own = {number: dict.fromkeys(SEEDS, 3 + 1e-3 * random.normal()) for number in range(parts)}
        self.readings: Readings | None = Readings(cells, own)
        self.values = self.readings.at(WINDOWS[-1])

    def with_values(self, values):
        other = object.__new__(Arm)
        other.name, other.readings, other.values = self.name, self.readings, dict(values)
        return other


def compared(damage, noise: float = 1e-5) -> tuple[Difference, Views]:
    """The damage of one arm, and its views."""
    arms = [Arm("bf16", lambda window, position: 0.0, noise, 1), Arm("fp4", damage, noise, 2)]

    def gap(those):
        return [paired_difference(those[1].values, those[0].values)]

    (view,) = views(arms, gap, 1)
    return gap(arms)[0], view


def verdict(damage, sees: bool = True, margin: float | None = None, noise: float = 1e-5) -> Verdict:
    gap, view = compared(damage, noise)
    return qualified(judge([(gap, margin)], True)[0], view, sees)


def test_the_error_that_seeds_share_is_the_component_of_the_data_in_a_two_way_table():
    """By least squares on indicators of parts and seeds, whose rank gives the degrees of freedom."""
    draw = np.random.default_rng(3)
    table = 2 * draw.normal(size=(9, 1)) + draw.normal(size=(1, 4)) + draw.normal(size=(9, 4))
    parts, seeds = np.divmod(np.arange(36), 4)
    design = np.hstack([parts[:, None] == np.arange(9), seeds[:, None] == np.arange(4)]).astype(float)
    fit, _, rank, _ = np.linalg.lstsq(design, table.ravel())
    residual = np.sum((table.ravel() - design @ fit) ** 2) / (36 - rank)
    expected = math.sqrt((np.var(table.mean(axis=1), ddof=1) - residual / 4) / 9)
    assert shared_error(table.tolist()) == pytest.approx(expected, rel=1e-9)


def test_damage_in_proportion_to_the_window_keeps_its_verdict():
    assert verdict(lambda window, position: 1e-4 * window).kind == "worse"
    assert verdict(lambda window, position: -1e-4 * window).kind == "better"
    assert (
        verdict(lambda window, position: 1e-3 * math.sqrt(window)).kind == "worse"
    )  # noise at once, then less


@pytest.mark.parametrize("sign", [1, -1])
def test_damage_that_changes_its_sign_or_grows_faster_than_the_window_depends_on_the_horizon(sign):
    changing = verdict(lambda window, position: sign * 1e-3 * (window - 15))
    growing = verdict(lambda window, position: sign * 1e-5 * window**2)
    for one in (changing, growing):
        assert (one.kind, one.reason, one.needed) == ("unjudged", "horizon", None)


def test_damage_that_grows_from_one_shorter_window_alone_depends_on_the_horizon():
    rates = {10: 2e-4, 20: 1e-4, 40: 2e-4}
    assert verdict(lambda window, position: rates[window] * window).reason == "horizon"


@pytest.mark.parametrize(("p", "reason"), [(0.03, ""), (0.02, "horizon")])
def test_growth_is_resolved_at_5_percent_over_the_number_of_shorter_windows(p, reason):
    gap, view = compared(lambda window, position: 1e-3 * window)
    noise, nothing = np.random.default_rng(5).normal(size=8), dict.fromkeys(range(8), 0.0)
    mean = stats.t.isf(p / 2, 7) * stats.sem(noise)
    growing = paired_difference(dict(enumerate(noise - noise.mean() + mean)), nothing)
    assert p_value(growing) == pytest.approx(p, rel=1e-9)
    growth = {10: paired_difference(dict(enumerate(noise - noise.mean())), nothing), 20: growing}
    found = qualified(judge([(gap, None)], True)[0], replace(view, growth=growth), True)
    assert (found.kind, found.reason or "") == ("unjudged" if reason else "worse", reason)


def test_growth_has_the_direction_of_the_damage_at_the_longest_window():
    """At the shortest one the damage is as good as none, with the other sign."""
    _, noise = compared(lambda window, position: 0.0)
    none = noise.horizons[10].mean + 1e-8
    assert verdict(lambda window, position: 1e-3 * (window - 10) - none * (window == 10)).reason == "horizon"


def test_an_effect_stands_if_its_mean_does_over_positions_that_are_drawn():
    """By SciPy: variances between positions and between seeds, with Satterthwaite's degrees of freedom."""
    random, nothing, reasons = np.random.default_rng(4), dict.fromkeys(range(6), 0.0), []
    for count in [2, 3] * 50:
        noise = random.normal(size=(1, 6)) + 2 * random.normal(size=(count, 6))
        table = 3 + random.normal(size=(count, 1)) + noise
        each = [paired_difference(dict(enumerate(row)), nothing) for row in table]
        gap = paired_difference(dict(enumerate(table.mean(axis=0))), nothing)
        if p_value(gap) >= 0.05 or all(p_value(one) < 0.05 for one in each):
            continue
        plain = judge([(gap, None)], True)[0]
        found = qualified(plain, Views({40: gap}, dict(enumerate(each)), {}, 0.0), True)
        errors = {count: stats.sem(table.mean(axis=1)) ** 2, 6: stats.sem(table.mean(axis=0)) ** 2}
        total = sum(errors.values())
        free = total**2 / sum(error**2 / (number - 1) for number, error in errors.items())
        p = 2 * stats.t.sf(table.mean() / math.sqrt(total), free)
        assert found.reason == ("position" if p >= 0.05 else None)
        reasons.append((count, found.reason))
        # A single position, and positions of other seeds, say nothing about others.
        fewer = paired_difference(dict(enumerate(table[1][:5])), nothing)
        for positions in ({5: each[0]}, {5: each[0], 9: fewer}):
            assert qualified(plain, Views({40: gap}, positions, {}, 0.0), True) == plain
    assert len(set(reasons)) == 4


@pytest.mark.parametrize(("p", "reason"), [(0.02, "position"), (0.03, None)])
def test_opposite_signs_are_resolved_at_5_percent_over_the_number_of_positions(p, reason):
    noise, nothing = np.random.default_rng(6).normal(size=8), dict.fromkeys(range(8), 0.0)
    noise -= noise.mean()
    mean = stats.t.isf(p / 2, 7) * stats.sem(noise)
    each = [paired_difference(dict(enumerate(sign * mean + noise)), nothing) for sign in (1, -1)]
    gap = paired_difference(dict(enumerate(noise)), nothing)
    plain = judge([(gap, None)], True)[0]
    assert qualified(plain, Views({40: gap}, dict(enumerate(each)), {}, 0.0), True).reason == reason


def test_damage_of_opposite_signs_at_two_positions_depends_on_the_position():
    assert verdict(lambda window, position: 1e-3 * (position - 150)).reason == "position"
    assert verdict(lambda window, position: 1e-3 * position).kind == "worse"


def test_nothing_is_equivalent_in_a_design_that_sees_nothing():
    nothing = lambda window, position: 0.0  # noqa: E731
    assert verdict(nothing, margin=1e-2).kind == "equivalent"
    assert verdict(nothing, sees=False, margin=1e-2).reason == "blind"
    assert verdict(lambda window, position: 1e-4 * window, sees=False).kind == "worse"


def test_an_arm_without_an_effect_is_left_without_a_winner_no_more_often_than_declared():
    """1,000 experiments on noise alone: "worse" or "better" in at most 5 %, and what depends on something in fewer."""
    random, kinds = np.random.default_rng(0), []
    for _ in range(1000):
        tables = [
            {Cell(p, w): dict(enumerate(random.normal(size=8))) for p in POSITIONS for w in WINDOWS}
            for _ in range(2)
        ]
        arms = [Arm("a", lambda window, position: 0.0), Arm("b", lambda window, position: 0.0)]
        for arm, cells in zip(arms, tables, strict=True):
            arm.readings = Readings(cells, {})
            arm.values = arm.readings.at(WINDOWS[-1])

        def gap(those):
            return [paired_difference(those[1].values, those[0].values)]

        (view,) = views(arms, gap, 1)
        found = qualified(judge([(gap(arms)[0], None)], True, plan=False)[0], view, True)
        kinds.append(found.reason or found.kind)
    assert sum(kind in ("better", "worse") for kind in kinds) / 1000 < 0.05 + 3 * math.sqrt(
        0.05 * 0.95 / 1000
    )
    assert sum(kind in ("horizon", "position") for kind in kinds) / 1000 < 0.05


def test_views_are_those_of_the_readings_by_hand():
    arms = [Arm("bf16", lambda w, p: 0.0, 1e-3, 1), Arm("fp4", lambda w, p: 1e-4 * w, 1e-3, 2)]
    one, other = (arm.readings for arm in arms)
    (view,) = views(arms, lambda those: [paired_difference(those[1].values, those[0].values)], 1)
    for window in WINDOWS:
        by_seed = [
            np.mean([other.cells[p, window][s] - one.cells[p, window][s] for p in POSITIONS]) for s in SEEDS
        ]
        assert view.horizons[window].mean == pytest.approx(np.mean(by_seed), rel=1e-12)
        assert view.horizons[window].deviation == pytest.approx(np.std(by_seed, ddof=1), rel=1e-9)
    for position in POSITIONS:
        by_seed = [other.cells[position, 40][seed] - one.cells[position, 40][seed] for seed in SEEDS]
        assert view.positions[position].mean == pytest.approx(np.mean(by_seed), rel=1e-12)
    rates = [(other.at(40)[s] - one.at(40)[s]) / 40 - (other.at(10)[s] - one.at(10)[s]) / 10 for s in SEEDS]
    assert view.growth[10].mean == pytest.approx(np.mean(rates), rel=1e-6)
    parts = [other.parts[number][0] - one.parts[number][0] for number in range(16)]
    assert view.error == pytest.approx(stats.sem(parts), rel=1e-9)


def test_arms_of_other_windows_are_not_compared():
    """Their damage is of another length; half of the positions alike would compare the others with nothing."""
    one, other = (
        Arm(name, lambda window, position: 0.0, draw=draw) for draw, name in enumerate(("bf16", "fp4"))
    )
    assert other.readings
    longer = {Cell(cell.position, 2 * cell.window): values for cell, values in other.readings.cells.items()}
    other.readings = replace(other.readings, cells={**other.readings.cells, **longer})

    def gap(those):
        return [paired_difference(those[1].values, those[0].values)]

    (view,) = views([one, other], gap, 1)
    found = qualified(judge([(gap([one, other])[0], None)], True)[0], view, True)
    assert (found.kind, found.reason) == ("unjudged", "windows")

    def grid_of_them(those):  # as a grid without a common seed gives
        return [] if not all(arm.values for arm in those) else gap(those)

    assert (
        qualified(
            judge([(gap([one, other])[0], None)], True)[0], views([one, other], grid_of_them, 1)[0], True
        ).reason
        == "windows"
    )


@pytest.mark.parametrize(("of_data", "of_both"), [(0.0, 3.0), (1.0, 3.0), (2.0, 0.5)])
def test_the_error_of_the_evaluation_has_no_noise_of_seeds_in_it(of_data, of_both):
    """Two-way tables: its mean square is that of the data's share alone, which is truncated at 0 from below."""
    random, seeds, parts = np.random.default_rng(7), 8, 16
    squares = []
    for _ in range(2000):
        table = (
            random.normal(0, 5, (1, seeds))
            + random.normal(0, of_data, (parts, 1))
            + random.normal(0, of_both, (parts, seeds))
        )
        squares.append(shared_error(table.tolist()) ** 2)
    expected = of_data**2 / parts
    naive = (of_data**2 + of_both**2 / seeds) / parts
    assert np.mean(squares) == pytest.approx(expected, rel=0.06, abs=0.25 * naive)
    assert of_data or np.mean(squares) < 0.5 * naive
    assert math.isnan(shared_error([[1.0, 2.0]] * 7))
    assert math.isnan(shared_error([[1.0, 2.0]] * 8 + [[1.0]]))


@pytest.mark.parametrize("share", [0.0, 1.0, 2.0, 4.0])
def test_damage_in_proportion_is_called_growing_in_one_of_twenty_whatever_the_evaluation(share):
    """The error of the evaluation, drawn anew for each window, is `share` times that of the seeds."""
    random, flagged, rounds = np.random.default_rng(5), 0, 300
    noise = 1e-4

    def gap(those):
        return [paired_difference(those[1].values, those[0].values)]

    for _ in range(rounds):
        arms = [Arm("bf16", lambda window, position: 0.0), Arm("fp4", lambda window, position: 0.0)]
        common = noise * share / math.sqrt(len(SEEDS))
        shift = {window: common * random.normal() for window in WINDOWS[:-1]}
        by_part = common * math.sqrt(16) * random.normal(size=16)
        shift[WINDOWS[-1]] = float(np.mean(by_part))
        for arm, sign in zip(arms, (0, 1), strict=True):
            own = {seed: noise * random.normal() for seed in SEEDS}
            early = {window: {seed: noise * random.normal() for seed in SEEDS} for window in WINDOWS[:-1]}
            spread = {**early, WINDOWS[-1]: own}
            cells = {
                Cell(position, window): {
                    seed: 3
                    + sign * (1e-4 * window + shift[window] + spread[window][seed] * window / WINDOWS[-1])
                    for seed in SEEDS
                }
                for position in POSITIONS
                for window in WINDOWS
            }
            parts = {
                number: {seed: 3 + sign * (4e-3 + by_part[number] + own[seed]) for seed in SEEDS}
                for number in range(16)
            }
            arm.readings = Readings(cells, parts)
            arm.values = arm.readings.at(WINDOWS[-1])
        (view,) = views(arms, gap, 1)
        found = qualified(judge([(sharpened(gap(arms)[0], view), None)], True)[0], view, True)
        flagged += found.reason == "horizon"
    assert flagged <= 0.05 * rounds + 3 * math.sqrt(0.05 * 0.95 * rounds)


def forked_book(
    folder, bad: float, direction: str = "minimize", search: str = "", positions: tuple[int, ...] = (5,)
) -> Ledger:
    """A ledger of a forked design: an arm without an effect, and a known-bad one."""
    book = Ledger(folder / "sweeps" / "x" / "ledger.db")
    design = Design(trunk="bf16", positions=len(positions), window=0.5, horizons=(1, 2), bad="bad")
    book.describe(
        question="Q?",
        metric=f'{{"name": "val/loss", "direction": "{direction}"}}',
        search=search,
        design=design.model_dump_json(),
    )
    random = np.random.default_rng(0)
    for name, effect, baseline in (("bf16", 0.0, None), ("bad", bad, 1), ("alike", 0.0, 1)):
        optuna = 0 if search and name == "alike" else None
        role = "bad" if name == "bad" else "listed" if optuna is None else "searched"
        arm = book.add_arm(name, {name: True}, baseline, optuna, role)
        for seed in range(6):
            trial = book.add_member(arm, seed, f"{name}{seed}", '{"seed": 0, "workload": {"gpt": {}}}')
            value = 3 + effect + 1e-4 * random.normal()
            metrics = {"val/loss": value}
            for step in positions:
                metrics |= {f"fork/{step}/2/loss": 3 + effect / 2, f"fork/{step}/4/loss": value}
            book.record(trial, [{"step": 9, "time": 0.0, "metrics": metrics}])
            book.settle(trial, "done", seconds=1.0)
    return book


@pytest.mark.parametrize(
    ("bad", "direction", "kind"),
    [(0.01, "minimize", "equivalent"), (-0.01, "minimize", "undecided"), (-0.01, "maximize", "equivalent")],
)
def test_a_known_bad_arm_that_looks_better_shows_that_nothing_is_seen(bad, direction, kind, tmp_path):
    book = forked_book(tmp_path, bad, direction)
    assert {arm.name: arm.verdict.kind for arm in summaries(book)}["alike"] == kind
    book.close()


@pytest.mark.parametrize(
    ("positions", "bad", "said"),
    [
        ((5,), 0.01, "from the checkpoint of step 5 alone"),
        ((0,), 0.01, "from the checkpoint `start` alone"),
        ((5, 9), 0.01, "from the checkpoints of steps 5, 9 alone"),
        ((5,), -0.01, "from the checkpoint of step 5 alone"),  # nothing is decided
    ],
)
def test_an_answer_of_forks_names_its_positions(positions, bad, said, tmp_path):
    book = forked_book(tmp_path, bad, positions=positions)
    headline = headline_of(Comparisons(book))
    assert headline.answered == (bad > 0)
    assert ("note", said) in {(check.kind, check.text) for check in headline.checks}
    assert ("checkpoint" in headline.lead) == headline.answered
    book.close()


@pytest.mark.parametrize("forked", [True, False])
def test_training_health_draws_no_curve_over_the_windows_of_forks(forked, tmp_path):
    """In a trial's steps windows follow each other, after a trunk that is the same in every arm."""
    book = forked_book(tmp_path, 0.01)
    if not forked:
        book.describe(design="")
    for member in book.members():
        curve = [{"train/loss": 4.0 - step, "grad/norm": 1.0} for step in range(3)]
        book.record(
            member.trial, [{"step": n, "time": 0.0, "metrics": each} for n, each in enumerate(curve, 1)]
        )
    book.close()
    run(analysis() / "training_health.ipynb", {"state": tmp_path, "sweep": "x", "out": tmp_path / "out"})
    drawn = {path.stem for path in tmp_path.glob("out/**/*.svg")}
    assert drawn == (set() if forked else {"curves-train-loss", "curves-grad-norm"})


def test_what_counts_as_none_and_why_is_said(tmp_path):
    book = forked_book(tmp_path, 0.01)
    arms = {arm.name: arm for arm in summaries(book)}
    fifth = arms["bad"].gap.mean / 5
    derived = f"Damage below {fifth:.3g} counts as none: a fifth of what bad does, which is known to be bad."
    assert smallest_damage(list(arms.values())) == derived
    book.describe(metric='{"name": "val/loss", "min_effect": 0.003}')
    assert smallest_damage(summaries(book)) == "Damage below 0.003 counts as none: min_effect."
    book.close()


def test_a_searchs_proposal_is_judged_with_the_known_bad_arm_as_the_whole_table_is(tmp_path):
    book = forked_book(tmp_path, 0.01, search="tpe")
    whole = {arm.name: arm for arm in summaries(book)}["alike"]
    difference, verdict = Gaps(book).of(3)
    assert (difference, verdict.kind) == (whole.gap, whole.verdict.kind)
    book.close()


def test_more_seeds_are_not_asked_for_where_they_decide_nothing(tmp_path):
    book = forked_book(tmp_path, 0.01)
    assert undecided(book) == still_open(summaries(book))
    for reason in ("horizon", "position", "windows"):
        arms = [
            replace(arm, verdict=Verdict("unjudged", reason)) if arm.name == "alike" else arm
            for arm in summaries(book)
        ]
        assert ("alike", "bf16") not in still_open(arms)
    book.close()


def test_an_arm_without_a_finished_trial_has_no_number_at_any_horizon():
    arms = [Arm("bf16", lambda w, p: 0.0), Arm("fp4", lambda w, p: 0.0)]
    arms[1].readings, arms[1].values = Readings({}, {}), {}
    (view,) = views(arms, lambda those: [paired_difference(those[1].values, those[0].values)], 1)
    assert all(
        one.pairs == 0 for part in (view.horizons, view.positions, view.growth) for one in part.values()
    )
    assert qualified(Verdict("unjudged", "no_pair"), view, True).reason == "no_pair"


def test_full_runs_have_no_views_and_a_gap():
    arm = Arm("a", lambda window, position: 0.0)
    assert difference_word([arm]) == "damage"
    arm.readings = None
    assert views([arm], lambda those: [], 2) == [None, None]
    assert difference_word([arm]) == "gap"


# The error of the evaluation


def test_an_error_that_all_seeds_share_widens_the_interval_and_is_in_every_p_value():
    values = {seed: 0.001 * math.sin(seed) + 0.01 for seed in range(6)}
    alone = paired_difference(values, dict.fromkeys(values, 0.0))
    shared = alone.with_shared_error(0.002)
    spread = math.hypot(alone.deviation / math.sqrt(6), 0.002)
    assert shared.high - shared.mean == pytest.approx(stats.t.ppf(0.975, 5) * spread, rel=1e-9)
    assert p_value(shared) == pytest.approx(2 * stats.t.sf(shared.mean / spread, 5), rel=1e-9)
    assert (p_value(shared) < 0.05) == (shared.low > 0)
    assert equivalence(shared, 0.05) > equivalence(alone, 0.05)
    assert alone.with_shared_error(0.0).high == pytest.approx(alone.high, rel=1e-12)


def test_no_number_of_seeds_decides_below_the_error_of_the_evaluation():
    values = {seed: 1e-3 * math.sin(7 * seed) for seed in range(5)}
    alone = paired_difference(values, dict.fromkeys(values, 0.0))
    shared = replace(alone, shared_error=1e-3)
    few, many = seeds_needed(alone, 1e-3), seeds_needed(shared, 1e-3)
    assert few.count is not None
    assert few.count < 30
    assert many.count is None or many.count > few.count


def test_the_interval_covers_a_mean_over_seeds_and_data():
    """2,000 experiments with noise of seeds and of the data: the t of seeds alone covers far fewer than 95 %."""
    random, covered, alone_covered = np.random.default_rng(1), 0, 0
    for _ in range(2000):
        parts = random.normal(size=16) * 4  # of the data, common to all seeds
        by_seed = random.normal(size=6) + parts.mean()
        gap = paired_difference(dict(enumerate(by_seed)), dict.fromkeys(range(6), 0.0))
        view = Views({}, {}, {}, float(stats.sem(parts)))
        whole = sharpened(gap, view)
        covered += whole.low <= 0 <= whole.high
        alone_covered += gap.low <= 0 <= gap.high
    assert covered / 2000 > 0.95 - 3 * math.sqrt(0.05 * 0.95 / 2000)
    assert alone_covered / 2000 < 0.85


# Calibration


def candidate(**fields) -> Candidate:
    base = {
        "name": "a",
        "design": Design(),
        "effect": 0.01,
        "effect_error": 0.001,
        "deviation": 0.002,
        "largest": 0.0,
        "seeds": 4,
        "error": 0.0,
        "steps": 100,
        "trunk": 200,
        "step_seconds": 0.1,
        "trunk_step_seconds": 0.05,
    }
    return Candidate(**(base | fields))


def test_the_sharpest_design_has_the_largest_t_after_an_hour():
    plain = candidate()
    hours = (3 * 100 * 0.1 + 200 * 0.05) / 3600
    lower = 0.01 - stats.t.ppf(0.9, 3) * 0.001
    assert plain.sharpness(3) == pytest.approx(lower / 0.002 / math.sqrt(hours), rel=1e-9)
    for worse in ({"deviation": 0.004}, {"steps": 400}, {"effect": 0.005}, {"effect_error": 0.003}):
        assert best([candidate(name="b", **worse), plain], 3) is plain
    assert candidate(effect=-0.01).sharpness(3) == 0  # a known-bad arm that looks better is not seen
    exact = {"deviation": 0.0, "effect_error": 0.0, "error": 0.0}  # seeds that change nothing
    assert [candidate(**exact, effect=effect).sharpness(3) for effect in (0.0, 0.01)] == [0, math.inf]


@pytest.mark.parametrize(("direction", "sign"), [("minimize", 1), ("maximize", -1)])
def test_a_calibration_takes_the_time_of_a_step_from_unlike_arms(direction, sign, tmp_path):
    """Their twin costs what the baseline costs, which would make a search for quantised arms look cheap."""
    with closing(Ledger(tmp_path / "ledger.db")) as book:
        book.describe(metric=json.dumps({"name": "val/loss", "direction": direction}))
        arms = {"bf16": ("baseline", 100.0), "mxfp4": ("bad", 25.0), "null: bf16": ("null", 1000.0)}
        for number, (name, (role, speed)) in enumerate(arms.items()):
            arm = book.add_arm(name, {"recipe": name}, 1 if number else None, None, role)
            for seed, loss in enumerate((3.0, 3.1, 3.3)):
                trial = book.add_member(arm, seed, f"{name}/{seed}", "{}")
                metrics = {"val/loss": loss + 0.1 * number * (seed + 1), "throughput/tokens_per_s": speed}
                book.record(trial, [{"step": 1, "time": 0.0, "metrics": metrics}])
                book.settle(trial, "done")
        full = from_full_runs(book, steps=100, tokens_per_step=50, bad="mxfp4")
        with pytest.raises(InputError, match="no arm fp5"):
            from_full_runs(book, steps=100, tokens_per_step=50, bad="fp5")
        diverged = book.add_arm("wild", {"recipe": "wild"}, 1, None, "bad")
        for seed in range(3):
            book.settle(book.add_member(diverged, seed, f"wild/{seed}", "{}"), "diverged")
        with pytest.raises(InputError, match="wild and bf16 have finished on 0 common seeds"):
            from_full_runs(book, steps=100, tokens_per_step=50, bad="wild")
    assert (full.step_seconds, full.trunk_step_seconds) == pytest.approx(((50 / 100 + 50 / 25) / 2, 50 / 100))
    assert (full.seeds, full.effect) == (3, pytest.approx(0.2 * sign))


def test_the_expected_width_is_that_of_the_interval_and_kept_as_often_as_said():
    """Deviations of 4 seeds are drawn, and widths at 8 seeds: within the careful width in 80 % up to chance."""
    random, kept = np.random.default_rng(2), 0
    for _ in range(4000):
        four, eight = random.normal(size=4), random.normal(size=8)
        one = candidate(deviation=float(np.std(four, ddof=1)), seeds=4)
        came = paired_difference(dict(enumerate(eight)), dict.fromkeys(range(8), 0.0))
        true_width = stats.t.ppf(0.975, 7) / math.sqrt(8)
        assert came.high - came.mean == pytest.approx(stats.t.ppf(0.975, 7) * came.deviation / math.sqrt(8))
        kept += true_width <= one.half_width(8, careful=True)
    assert kept / 4000 == pytest.approx(0.8, abs=3 * math.sqrt(0.8 * 0.2 / 4000))


def test_seeds_are_proposed_until_the_width_is_a_fifth_of_the_damage():
    one = candidate(effect=0.02)
    count = one.proposed_seeds()
    assert one.half_width(count, True) <= 0.004 < one.half_width(count - 1, True)
    assert candidate(effect=1e-6).proposed_seeds() == 32


# Seeds for all comparisons, and their hours


@pytest.mark.parametrize(("error", "asks"), [(0.01, "more validation data"), (0.0005, "seeds")])
def test_where_the_evaluation_is_the_floor_more_data_is_asked_for_and_no_seeds(error, asks, tmp_path):
    values = dict(enumerate(-0.004 + 0.01 * np.random.default_rng(0).normal(size=8)))
    gap_of = paired_difference(values, dict.fromkeys(values, 0.0)).with_shared_error(error)
    (verdict,) = judge([(gap_of, 0.005)], True)
    book = Ledger(tmp_path / "ledger.db")
    assert verdict.kind == "undecided"
    assert asks in seeds_to_settle(book, [verdict]).text
    book.close()


@pytest.mark.parametrize(
    ("counts", "expected"),
    [
        (
            (8, 20),
            "With 20 seeds in all, each undecided comparison has an 80 % chance of a verdict, and the cheapest one has it"
            " with 8: about 3 min more",
        ),
        ((8, None), "With 8 seeds in all, 1 of 2 undecided ones have an 80 % chance of a verdict"),
        ((None, None), "Each of the 2 undecided comparisons needs over 200 seeds."),
        ((), ""),
    ],
)
def test_one_number_of_seeds_settles_a_table_with_its_hours(counts, expected, tmp_path, monkeypatch):
    """Three finished seeds of two arms, 5 and 4 seconds a run: a seed of the sweep is 9 seconds."""
    book = Ledger(tmp_path / "ledger.db")
    for name, seconds in (("bf16", 5.0), ("fp4", 4.0)):
        arm = book.add_arm(name, {}, None, None)
        for seed in range(3):
            trial = book.add_member(arm, seed, f"{name}{seed}", '{"seed": 0}')
            book.settle(trial, "done", None, seconds, False)
    verdicts = [Verdict("worse")]
    for count in counts:
        verdict = Verdict("undecided")
        object.__setattr__(verdict, "needed", Needed(count, count, count))
        verdicts.append(verdict)
    settling = seeds_to_settle(book, verdicts)
    text = settling.text if settling else ""
    assert text.startswith(expected)
    assert bool(text) == bool(expected)
    if counts == (8, 20):
        assert f"{17 * 9 / 60:.0f} min more" in text
    book.close()
