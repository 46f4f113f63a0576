"""Runs from elsewhere whose curves end at different steps: the step that is compared, and what is said."""

from itertools import product

import numpy as np
import pandas as pd
import pytest
from support.cases import every

import ablate
from ablate.errors import InputError
from ablate.judging.answer import Judgement

Lengths = dict[str, list[int]]
"""Last step of each run, by arm."""


def curve(arm: str, seed: int, step: int) -> float:
    """Return a loss that no other run and step has: arms cross, so each step has a difference of its own."""
    draw = np.random.default_rng([len(arm), sum(map(ord, arm)), seed, step])
    slope = {"bf16": 1.0, "nvfp4": 1.0005}.get(arm, 1.001)
    return round(3 - slope * step / 1000 + 0.002 * float(draw.normal()), 6)


def table(lengths: Lengths, every: int = 50, lost: dict[tuple[str, int], int] | None = None) -> pd.DataFrame:
    """Return rows of runs with a row each 50 steps; `lost`: step from which a run is infinite."""
    rows = [
        {
            "recipe": arm,
            "seed": seed,
            "step": step,
            "val_loss": float("inf")
            if step >= (lost or {}).get((arm, seed), 10**9)
            else curve(arm, seed, step),
        }
        for arm, ends in lengths.items()
        for seed, end in enumerate(ends)
        for step in range(every, end + 1, every)
    ]
    return pd.DataFrame(rows)


def differences(found: Judgement) -> dict[str, tuple[float, str | None]]:
    return {arm.arm: (arm.difference, arm.verdict["reason"]) for arm in found.arms}


CASES: dict[str, tuple[Lengths, int, set[str]]] = {
    "one of twelve with one more evaluation": (
        {"bf16": [500] * 4, "nvfp4": [500] * 4, "mxfp4": [500, 500, 500, 550]}, 500, set(),
    ),
    "the baseline's run with one more": ({"bf16": [500, 550, 500], "nvfp4": [500] * 3}, 500, set()),
    "half the runs of an arm continue": ({"bf16": [500] * 4, "nvfp4": [500, 500, 700, 700]}, 500, set()),
    "half the runs of both arms continue": ({"bf16": [500, 700] * 2, "nvfp4": [700, 500] * 2}, 500, set()),
    "one arm had twice the steps": ({"bf16": [500] * 3, "nvfp4": [1000] * 3}, 500, set()),
    "the baseline had twice the steps": ({"bf16": [1000] * 5, "nvfp4": [500] * 3}, 500, set()),
    "the baseline is the short arm of three": (
        {"bf16": [500] * 3, "nvfp4": [1000] * 3, "mxfp4": [1000] * 3}, 500, set(),
    ),
    "another arm is the short one of three": (
        {"bf16": [1000] * 3, "nvfp4": [1000] * 3, "mxfp4": [500] * 3}, 1000, {"mxfp4"},
    ),
    "one of twelve ended early": (
        {"bf16": [500] * 4, "nvfp4": [500] * 4, "mxfp4": [500, 500, 500, 100]}, 500, {"mxfp4"},
    ),
    "one ended early and another continued": (
        {"bf16": [500] * 4, "nvfp4": [500] * 3 + [600], "mxfp4": [500] * 3 + [50]}, 500, {"mxfp4"},
    ),
    "all as long": ({"bf16": [500] * 3, "nvfp4": [500] * 3}, 500, set()),
}  # fmt: skip
"""By case: lengths, the step that is compared, and the arms without a verdict."""


@every(case=CASES)
def test_runs_are_compared_at_the_step_that_most_of_them_share(case):
    lengths, step, without = CASES[case]
    found = ablate.judge(table(lengths), against="bf16")
    for arm, (difference, reason) in differences(found).items():
        if arm in without:
            assert reason == "length"
            continue
        seeds = range(min(len(lengths["bf16"]), len(lengths[arm])))
        expected = np.mean([curve(arm, seed, step) - curve("bf16", seed, step) for seed in seeds])
        assert difference == pytest.approx(expected, abs=1e-12)
        assert reason is None
    warned = [text for kind, text in found.checks if kind == "warning" and "compared at step" in text]
    longer = [(arm, seed) for arm, ends in lengths.items() for seed, end in enumerate(ends) if end > step]
    assert len(warned) == bool(longer)
    for text in warned:
        assert f"compared at step {step}," in text
        assert f"{len(longer)} of {sum(map(len, lengths.values()))} runs" in text
        assert f"to step {max(max(ends) for ends in lengths.values())}" in text
        whole = {arm for arm, ends in lengths.items() if min(ends) > step}
        assert ("different budgets" in text) == bool(whole)
    assert any(f"--at {min(min(ends) for ends in lengths.values())}" in text for text in found.said) == bool(
        without
    )
    early = sum(end < step for ends in lengths.values() for end in ends)
    total = sum(map(len, lengths.values()))
    assert any(f"{total - early} of {total} runs finished" in text for _, text in found.checks)
    assert any("ended early" in text for _, text in found.checks) == bool(early)


def test_the_longer_run_is_named_with_what_it_has_more():
    found = ablate.judge(table({"bf16": [500] * 4, "mxfp4": [500, 500, 500, 550]}), against="bf16")
    assert (
        "compared at step 500, the last that most runs have: 1 of 8 runs continued, by up to 50 steps to step"
        " 550: seed 3 of mxfp4"
    ) in found.said


@every(at=[50, 250, 500, 550])
def test_a_step_can_be_asked_for(at):
    lengths = {"bf16": [550] * 3, "nvfp4": [500, 550, 600]}
    found = ablate.judge(table(lengths), against="bf16", at=at)
    ((difference, reason),) = differences(found).values()
    if at == 550:
        assert reason == "length"
    else:
        expected = np.mean([curve("nvfp4", seed, at) - curve("bf16", seed, at) for seed in range(3)])
        assert difference == pytest.approx(expected, abs=1e-12)
        assert any(f"compared at step {at}, as asked" in text for text in found.said)


def test_a_diverged_run_neither_sets_the_step_nor_loses_its_divergence():
    lengths = {"bf16": [500] * 4, "nvfp4": [500] * 4}
    lost = {("nvfp4", seed): 150 for seed in range(3)}
    stopped = table(lengths, lost=lost)
    stopped = stopped[~((stopped.val_loss > 100) & (stopped.step > 150))]
    for rows in (table(lengths, lost=lost), stopped):
        (arm,) = ablate.judge(rows, against="bf16").arms
        assert (arm.runs, arm.verdict["diverged"]) == (1, 3)
        assert arm.difference == pytest.approx(curve("nvfp4", 3, 500) - curve("bf16", 3, 500))


def test_a_run_that_diverges_beyond_the_compared_step_counts_with_its_value_there_and_is_said():
    rows = table({"bf16": [500] * 3, "nvfp4": [500, 500, 800]}, lost={("nvfp4", 2): 600})
    found = ablate.judge(rows, against="bf16", at=500)
    assert found.arms[0].runs == 3
    assert ("warning", "non-finite values in 1 run") in found.checks


def test_runs_without_a_common_step_are_refused_with_the_steps_that_they_have():
    one, other = table({"bf16": [500] * 3}, every=100), table({"nvfp4": [450] * 3}, every=90)
    rows = pd.concat([one, other[other.step != 450]])
    with pytest.raises(InputError, match=r"bf16 at 300, 400, 500; nvfp4 at 180, 270, 360"):
        ablate.judge(rows, against="bf16")
    both = pd.concat([one, table({"nvfp4": [500] * 3}, every=40)])
    (arm,) = ablate.judge(both, against="bf16").arms
    expected = np.mean([curve("nvfp4", seed, 400) - curve("bf16", seed, 400) for seed in range(3)])
    assert arm.difference == pytest.approx(expected)


def test_an_arm_that_logs_at_other_steps_takes_no_verdict_from_the_others():
    rows = pd.concat(
        [table({"bf16": [500] * 3, "nvfp4": [500] * 3}, every=100), table({"mxfp4": [520] * 3}, every=40)]
    )
    found = ablate.judge(rows, against="bf16")
    assert {arm: reason for arm, (_, reason) in differences(found).items()} == {
        "nvfp4": None,
        "mxfp4": "length",
    }
    assert any("--at 400 compares" in text for text in found.said)
    assert [reason for _, reason in differences(ablate.judge(rows, against="bf16", at=400)).values()] == [
        None,
        None,
    ]


def test_a_step_that_no_run_has_is_refused_with_the_nearest():
    with pytest.raises(InputError, match="--at 510: no run has val/loss at this step; the nearest is 500"):
        ablate.judge(table({"bf16": [500] * 3, "nvfp4": [500] * 3}), against="bf16", at=510)


def test_the_order_of_runs_never_changes_the_compared_step():
    draw = np.random.default_rng(17)
    for counts in product((3, 4), (5,)):
        arms = ("bf16", "nvfp4")
        lengths = {
            arm: [int(end) for end in draw.choice([200, 300, 400], n)]
            for arm, n in zip(arms, counts, strict=True)
        }
        rows = table(lengths)
        step = max(
            step
            for step in (200, 300, 400)
            if all(2 * sum(end >= step for end in ends) > len(ends) for ends in lengths.values())
        )
        for each in (rows.sample(frac=1, random_state=3), rows[::-1]):
            found = ablate.judge(each, against="bf16")
            longer = any(end > step for ends in lengths.values() for end in ends)
            assert any(f"compared at step {step}," in text for text in found.said) == longer
