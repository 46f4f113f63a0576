"""The transfer benchmark: every scheme is one of the published ones, and the figures are those of oracles."""

import sys
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import transfer
import transfer_table
from transfer_schemes import SCHEMES, STRATA, TABLE

NAMES = [*SCHEMES]
KEYS = ("arm", "times", "window", "seed", "position")


def invented(seed: int) -> np.ndarray:
    return np.random.default_rng(seed).normal(size=len(NAMES))


def test_schemes_are_selected_by_different_columns_and_quantise_what_their_group_says():
    columns = [tuple(sorted((TABLE | dict(scheme.published)).items())) for scheme in SCHEMES.values()]
    recipes = {scheme.recipe.model_dump_json() for scheme in SCHEMES.values()}
    assert len(set(columns)) == len(recipes) == len(SCHEMES)
    for scheme in SCHEMES.values():
        slots = {slot.partition(".")[0] for slot, _ in scheme.recipe.products.quantised()}
        passes = {"forward": {"fprop"}, "full": {"fprop", "dgrad", "wgrad"}}
        assert scheme.stratum in STRATA
        assert slots == passes.get(scheme.stratum, slots - {"fprop"})


def test_every_quantised_operand_is_amplified_and_nothing_else_changes():
    for scheme in SCHEMES.values():
        recipe = transfer.amplified(scheme.recipe, 3)
        assert {quant.error.times for _, quant in recipe.products.quantised()} == {3.0}
        text = recipe.model_dump_json().replace('"times":3.0', '"times":1.0')
        assert text == scheme.recipe.model_dump_json()


def test_any_beginning_of_the_forks_has_the_baseline_before_the_schemes_of_a_seed():
    jobs = [*transfer.jobs()]
    assert len(set(jobs)) == len(jobs)
    first = [job for job in jobs[: 25 * len(transfer.SEEDS)] if job.arm != transfer.BF16]
    assert {(job.times, job.window) for job in first} == {(3, transfer.WINDOW)}
    seen = set()
    for job in jobs:
        seen.add(job)
        assert job.window == 1 or transfer.Fork(transfer.BF16, 1, *job[2:]) in seen
    for seed in transfer.SEEDS:
        assert len(set(transfer.positions(seed))) == 3


def test_pairs_right_are_those_that_a_loop_counts():
    values, truth = np.round(invented(0), 1), np.round(invented(1), 1)
    weights, counted, total = np.abs(invented(2)), 0.0, 0.0
    for i, j in combinations(range(len(NAMES)), 2):
        if SCHEMES[NAMES[i]].stratum != SCHEMES[NAMES[j]].stratum:
            continue
        product = (values[i] - values[j]) * (truth[i] - truth[j])
        counted += weights[i] * weights[j] * (1.0 if product > 0 else 0.5 if product == 0 else 0.0)
        total += weights[i] * weights[j]
    got = transfer_table.right(transfer_table.differences(values), truth, weights)
    assert got == pytest.approx(counted / total)
    truth[3] = np.nan
    assert 0 < transfer_table.right(transfer_table.differences(values), truth) < 1


def test_the_rule_is_fitted_without_both_schemes_of_a_pair():
    truth = invented(3)
    columns = transfer_table.FACTS[:, :4]
    got = transfer_table.rule(truth, columns)
    design = np.column_stack([np.ones(len(truth)), columns])
    for number in (0, 40, 90):
        i, j = transfer_table.PAIRS[number]
        others = [k for k in range(len(truth)) if k not in (i, j)]
        fit = np.linalg.lstsq(design[others], truth[others], rcond=None)[0]
        assert got[number] == pytest.approx((design[i] - design[j]) @ fit, abs=1e-8)
        moved = truth.copy()
        moved[[i, j]] += 5.0
        assert transfer_table.rule(moved, columns)[number] == got[number]


def rows(damage: np.ndarray, seeds: int = 4) -> list[dict]:
    random, lines = np.random.default_rng(4), []
    for job in transfer.jobs([transfer.Round(3, transfer.WINDOW, number, seeds) for number in (0, 1)]):
        own = 0.0 if job.arm == transfer.BF16 else damage[NAMES.index(job.arm)]
        loss = 2 + job.position + own + 1e-6 * random.normal()
        lines.append(dict(zip(KEYS, job, strict=True)) | {"loss": loss, "loss_bf16": loss - 0.5 * own})
    return lines


def test_damage_is_a_mean_over_positions_and_a_seed_with_a_gap_does_not_count():
    damage = invented(5)
    lines = rows(damage)
    table = transfer_table.readings([lines], 3, transfer.WINDOW, "total")
    assert table == pytest.approx(np.tile(damage, (4, 1)), abs=1e-4)
    learnt = transfer_table.readings([lines], 3, transfer.WINDOW, "learnt")
    assert learnt == pytest.approx(np.tile(damage / 2, (4, 1)), abs=1e-4)
    cut = [line for line in lines if (line["seed"], line["arm"]) != (transfer.SEEDS[1], NAMES[7])]
    assert len(transfer_table.readings([cut], 3, transfer.WINDOW, "total")) == 3
    elsewhere = [line | {"loss": line["loss"] + 7} for line in lines if line["seed"] == transfer.SEEDS[0]]
    both = transfer_table.readings([cut, elsewhere], 3, transfer.WINDOW, "total")
    assert both[0] == pytest.approx(damage, abs=1e-4)  # each machine against its own baseline
    lines[-1] |= {"loss": None, "loss_bf16": None}
    stopped = transfer_table.readings([lines], 3, transfer.WINDOW, "total")
    assert stopped[-1].argmax() == len(NAMES) - 1


def test_a_permutation_p_is_uniform_without_an_effect_and_small_with_one(monkeypatch):
    monkeypatch.setattr(transfer_table, "PERMUTATIONS", 200)
    random, truth = np.random.default_rng(6), invented(7)
    order = transfer_table.differences
    values = [transfer_table.permutation_p(order(invented(100 + n)), truth, random) for n in range(40)]
    assert 0.3 < np.mean(values) < 0.7
    assert transfer_table.permutation_p(order(truth), truth, random) < 0.01


def test_the_reliability_of_pure_noise_is_none_and_that_of_a_sharp_reading_full():
    random, damage = np.random.default_rng(8), invented(9)
    noise = random.normal(size=(24, len(NAMES)))
    assert abs(transfer_table.reliability(noise, random)) < 0.6
    assert transfer_table.reliability(damage + 0.1 * noise, random) > 0.98


def test_published_losses_are_reduced_to_the_schemes(tmp_path):
    names = ["group", *TABLE, "N_millions", "N", "D", "final_loss"]
    wanted = {"baseline": {"group": "baseline"}} | {name: SCHEMES[name].published for name in NAMES}
    lines = ["# a comment", ",".join(names)]
    for number, columns in enumerate(wanted.values()):
        row = TABLE | dict(columns) | {"N_millions": "100", "N": "10", "D": "970", "final_loss": str(number)}
        lines.append(",".join(row[name] for name in names))
    source, reduced = tmp_path / "runs.csv", tmp_path / "published.csv"
    source.write_text("\n".join([*lines, lines[-1]]))
    reduced.write_text("\n".join(transfer_table.extract(source)))
    cell = transfer_table.published(reduced)["100", 97]
    assert transfer_table.truth_of(cell) == pytest.approx(np.arange(1, len(NAMES) + 1))
    assert transfer_table.repeat_deviation({(): cell}) == (0, 1)


def test_the_noise_of_published_losses_is_found_in_their_course_over_lengths():
    random, cells = np.random.default_rng(10), {}
    for size in ("30", "100"):
        for length in (25, 50, 100, 200, 400, 800):
            shared = random.normal()  # the baseline's own
            cell = {
                name: [random.normal(0.1 * n * np.log(length) ** 2 + shared, 0.01)]
                for n, name in enumerate(NAMES)
            }
            cells[size, length] = cell | {"baseline": [3.0]}
    assert transfer_table.length_deviation(cells) == pytest.approx(0.01, rel=0.15)
