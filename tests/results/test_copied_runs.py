"""Runs with the same values: copies and seeds that did nothing count as one run."""

import json
import math

import numpy as np
import pandas as pd
import pytest
from support.cases import every
from support.made_up import member as finish

import ablate
from ablate.judging.answer import Judgement
from ablate.results.comparisons import Comparisons
from ablate.results.gate import checks
from ablate.results.headline import headline_of
from ablate.results.summary import Gaps, summaries
from ablate.store.ledger import Ledger

STEPS = (100, 200, 300, 400, 500)


def table(seeds: int = 5, steps: tuple[int, ...] = STEPS, digits: int = 6) -> pd.DataFrame:
    """Return runs of two arms, of which no two have a value in common."""
    draw = np.random.default_rng(29)
    rows = [
        {
            "recipe": arm,
            "seed": seed,
            "step": step,
            "val_loss": round(4 - step / 400 + effect + 0.01 * float(draw.normal()), digits),
            "tokens_per_s": 1000 + 50 * float(draw.normal()),
        }
        for arm, effect in (("bf16", 0.0), ("nvfp4", 0.05))
        for seed in range(seeds)
        for step in steps
    ]
    return pd.DataFrame(rows)


def planted(rows: pd.DataFrame, arm: str, copied: list[int], digits: int | None = None) -> pd.DataFrame:
    """Return the table with the first of these seeds' losses in the others' rows, rounded to some digits."""
    rows = rows.copy()
    first = rows[(rows.recipe == arm) & (rows.seed == copied[0])].val_loss.to_numpy()
    for seed in copied[1:]:
        values = first if digits is None else first.round(digits)
        rows.loc[(rows.recipe == arm) & (rows.seed == seed), "val_loss"] = values
    return rows


def last(rows: pd.DataFrame, arm: str) -> dict[int, float]:
    part = rows[(rows.recipe == arm) & (rows.step == rows.step.max())]
    return dict(zip(part.seed, part.val_loss, strict=True))


def warnings(found: Judgement) -> list[str]:
    return [text for kind, text in found.checks if kind == "warning" and "same values" in text]


@every(copied=[[0, 1], [0, 2, 4], [1, 2, 3], [0, 1, 2, 3, 4]], arm__digits=[("nvfp4", None), ("bf16", 4)])
def test_copies_in_an_arm_count_once(copied, arm, digits):
    """The oracle drops the planted rows: gap and interval are those of the seeds that are left."""
    rows = planted(table(), arm, copied, digits)
    found = ablate.judge(rows, against="bf16")
    kept = [seed for seed in range(5) if seed not in copied[1:]]
    gaps = np.array([last(rows, "nvfp4")[seed] - last(rows, "bf16")[seed] for seed in kept])
    (judged,) = found.arms
    assert judged.difference == pytest.approx(gaps.mean(), abs=1e-12)
    (text,) = warnings(found)
    assert f"of {arm} have the same values at all 5 steps" in text
    assert all(str(seed) in text.split(" of ")[0] for seed in (copied[0], copied[-1]))
    if len(kept) < 3:
        assert judged.verdict["reason"] == "copies"
        assert not found.answered
    else:
        assert judged.verdict["reason"] is None
        half = (judged.high - judged.low) / 2
        assert half == pytest.approx(
            {3: 4.302653, 4: 3.182446}[len(kept)] * gaps.std(ddof=1) / len(kept) ** 0.5, rel=1e-5
        )


def test_distinct_seeds_are_no_copies_though_one_value_or_the_last_is_equal():
    rows = table()
    for step in (100, 500):
        rows.loc[(rows.seed < 3) & (rows.step == step), "val_loss"] = 3.123456
    assert not warnings(ablate.judge(rows, against="bf16"))


def test_the_sentence_on_copies_says_which_and_why():
    found = ablate.judge(planted(table(), "nvfp4", [0, 1, 2, 3, 4]), against="bf16")
    said = "seeds 0 to 4 of nvfp4 have the same values at all 5 steps"
    assert warnings(found) == [f"{said}: the seed did nothing, or one run was copied; they count as one"]
    assert found.answer == f"No verdict: {said}; they count as one, which leaves too few."


def test_a_copy_that_was_resumed_has_more_rows_and_is_a_copy():
    rows = planted(table(), "nvfp4", [1, 2])
    again = rows[(rows.recipe == "nvfp4") & (rows.seed == 2) & (rows.step >= 200)]
    more = again.assign(step=again.step - 50, val_loss=again.val_loss + 0.05)
    assert len(warnings(ablate.judge(pd.concat([rows, more]), against="bf16"))) == 1


def test_fewer_values_are_a_remark_and_coarse_ones_none():
    for digits, kinds in ((6, {"note"}), (2, set())):
        rows = planted(table(steps=(500,), digits=digits).drop(columns="tokens_per_s"), "nvfp4", [0, 1])
        found = ablate.judge(rows, against="bf16")
        assert {
            kind for kind, text in found.checks if "same values" in text and "seeds 0 and 1 of nvfp4" in text
        } == kinds
        assert found.arms[0].runs == 5


def test_rows_of_runs_are_compared_by_all_their_losses_and_scores():
    rows = table(steps=(500,))
    for name in ("train_loss", "accuracy"):
        rows[name] = rows.val_loss * (1.1234567 if name == "accuracy" else 0.9765431) + 0.001 * rows.seed
    assert not warnings(ablate.judge(rows, against="bf16", metric="val_loss"))
    names = ["val_loss", "train_loss", "accuracy"]
    source = (rows.recipe == "nvfp4") & (rows.seed == 0)
    rows.loc[(rows.recipe == "nvfp4") & (rows.seed == 1), names] = rows.loc[source, names].to_numpy()
    (text,) = warnings(ablate.judge(rows, against="bf16", metric="val_loss"))
    assert "seeds 0 and 1 of nvfp4 have the same values of all 3 losses and scores" in text


def test_arms_that_are_equal_at_every_seed_have_the_exact_verdict():
    rows = table()
    for seed in range(5):
        own = rows[(rows.recipe == "bf16") & (rows.seed == seed)].val_loss.to_numpy()
        rows.loc[(rows.recipe == "nvfp4") & (rows.seed == seed), "val_loss"] = own
    found = ablate.judge(rows, against="bf16")
    assert found.arms[0].verdict["kind"] == "same"
    assert found.answer.startswith("No difference at all")
    assert "it changed nothing" in found.answer
    assert not warnings(found)


def test_a_run_under_another_arm_with_another_seed_is_named():
    rows = table()
    own = rows[(rows.recipe == "bf16") & (rows.seed == 0)].val_loss.to_numpy()
    rows.loc[(rows.recipe == "nvfp4") & (rows.seed == 3), "val_loss"] = own
    (text,) = warnings(ablate.judge(rows, against="bf16"))
    assert (
        text == "seed 0 of bf16 and seed 3 of nvfp4 have the same values at all 5 steps: one run was copied"
    )


@every(seeds=[[1], [0, 3], [0, 1, 2, 3]], source=["bf16", "nvfp4"])
def test_a_run_under_another_arm_with_the_same_seed_is_named_if_other_seeds_differ(seeds, source):
    rows = table()
    (other,) = {"bf16", "nvfp4"} - {source}
    for seed in seeds:
        own = rows[(rows.recipe == source) & (rows.seed == seed)].val_loss.to_numpy()
        rows.loc[(rows.recipe == other) & (rows.seed == seed), "val_loss"] = own
    texts = warnings(ablate.judge(rows, against="bf16"))
    named = [f"seed {seed} of bf16 and seed {seed} of nvfp4 have the same values" for seed in seeds]
    assert [text.partition(" at all")[0] for text in texts] == named
    assert all("one run was copied, or the arms do not differ" in text for text in texts)


@pytest.fixture
def book(tmp_path):
    ledger = Ledger(tmp_path / "sweeps" / "x" / "ledger.db")
    ledger.describe(question="Does it?", metric='{"name": "val/loss", "min_effect": 0.01}', search="")
    yield ledger
    ledger.close()


@pytest.mark.parametrize("workload", ["command", "python"])
@pytest.mark.parametrize("ignored", [("nvfp4",), ("bf16", "nvfp4")])
def test_a_sweep_says_of_a_command_that_it_ignores_the_seed(workload, ignored, book):
    spec = json.dumps({"workload": {workload: {"steps": 30}}})
    base = book.add_arm("bf16", {}, None, None)
    arm = book.add_arm("nvfp4", {}, base, None)
    for name, number in (("bf16", base), ("nvfp4", arm)):
        for seed in range(4):
            shift = math.sin(1 + number + 7 * (0 if name in ignored else seed)) / 10
            records = [
                (step, {"val/loss": 4 - step / 20 + shift, "throughput/x": 1.0 + seed})
                for step in (10, 20, 30)
            ]
            finish(book, number, seed, records, spec=spec)
    arms = summaries(book)
    assert (arms[1].verdict.kind, arms[1].verdict.reason, arms[1].gap.pairs) == ("unjudged", "copies", 1)
    assert arms[1].unmeasured == 0
    named = [check.text for check in checks(book, arms) if check.kind == "warning"]
    assert [
        f"seeds 0 to 3 of {name} have the same values at all 3 steps: the seed did nothing; they count as one"
        for name in ignored
    ] == named
    assert headline_of(Comparisons(book)).lead == "No verdict:"
    assert Gaps(book).of(arm)[1].reason == "copies"
