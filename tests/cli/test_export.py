"""Results that leave: a block of evidence, tables for other programs, two arms side by side."""

import json
import re

import numpy as np
import pandas as pd
import pytest
from scipy import stats
from support.commands import here
from support.experiments import sweep, tiny

from ablate.reports import frames

KEYS = {"seeds": 3, "ablate": {"rht": [True], "sr": [True, False]}, "answer": {"knob": "sr"}}


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """Two sweeps: the second at another rate, with one arm of another name."""
    folder = tmp_path_factory.mktemp("export")
    sweep(tiny(folder, "one", **KEYS), folder / "runs")
    sweep(tiny(folder, "other", **KEYS, shape={"steps": 4, "eval_every": 2, "lr": 2e-3}), folder / "runs")
    return folder / "runs"


def values(state, name: str) -> dict[str, dict[int, float]]:
    with frames.open(name, state=state) as results:
        return {
            arm: dict(zip(part["seed"], part["value"], strict=True))
            for arm, part in results.trials.groupby("arm")
        }


def test_the_block_has_claim_design_interval_checks_command_and_commit(state):
    done = here("show", "one", "--state", state)
    known = values(state, "one")
    on, off = (np.array([known[f"rht=true sr={sr}"][seed] for seed in range(3)]) for sr in ("true", "false"))
    assert f"{np.mean(on - off):+.4f}"[:6] in done.stdout
    for word in (
        "Claim: ",
        "Design: gpt (",
        "Interval: 95 % t interval",
        "Checks: ",
        "Registered: ",
        "Command: `ablate sweep ",
        "commit ",
    ):
        assert word in done.stdout
    assert done.stdout.count("(the question)") == 1
    page = here("show", "one", "--to", "html", "--state", state).stdout
    assert page.startswith('<section class="ablate">')
    assert "<svg" in page
    assert not re.search(r"https?://(?!www\.w3\.org)|<script|<link", page)


@pytest.mark.parametrize("form", ["csv", "parquet"])
def test_tables_are_the_frames_that_python_gives(state, tmp_path, form):
    done = here("show", "one", "--to", form, "--out", tmp_path, "--state", state)
    assert done.returncode == 0, done.stderr
    read = pd.read_csv if form == "csv" else pd.read_parquet
    with frames.open("one", state=state) as results:
        for name, expected in (
            ("arms", results.arms),
            ("trials", results.trials),
            ("records", results.records()),
        ):
            found = read(tmp_path / f"{name}.{form}")
            assert list(found.columns) == list(expected.columns)
            assert len(found) == len(expected)
        assert np.allclose(read(tmp_path / f"arms.{form}")["mean"], results.arms["mean"])
    without = here("show", "one", "--to", "csv", "--no-records", "--out", tmp_path / "few", "--state", state)
    assert "records" not in without.stdout


def test_two_arms_are_paired_by_seed_and_what_differs_in_them_is_named(state):
    """The oracle is scipy's paired t."""
    done = here("show", "one:rht=true sr=true", "one:rht=true sr=false", "--json", "--state", state)
    (row,) = json.loads(done.stdout)
    assert row["differs"] == {
        f"recipe.{product}.g.rounding": ["stochastic", "nearest"] for product in ("dgrad", "wgrad")
    }
    known = values(state, "one")
    test = stats.ttest_rel(
        *([known[f"rht=true sr={sr}"][seed] for seed in range(3)] for sr in ("false", "true"))
    )
    low, high = test.confidence_interval()
    assert row["difference"]["pairs"] == 3
    assert (row["difference"]["low"], row["difference"]["high"]) == pytest.approx((low, high))


def test_two_sweeps_are_compared_arm_by_arm(state):
    text = here("show", "one", "other", "--state", state).stdout
    assert text.count("workload.gpt.lr") == 3
    assert "val/loss: " in text
    assert "the same trials at 3 seeds" in here("show", "one", "one", "--state", state).stdout


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("one", "onne"), "'one' is the nearest of one"),
        (("one:rht", "one"), "one has no such arm"),
        (("one:bf16", "other"), "name two sweeps, or two arms as SWEEP:ARM"),
        (("nothing",), "nothing: no such sweep in "),
        (("nothing", "--to", "csv"), "no such sweep"),
        (("one", "other", "one"), "show takes two sweeps or arms at most, and there are 3: one other one"),
        (("one", "other", "--to", "csv"), "--to csv: two sweeps or arms cannot be shown so"),
        (("--to", "html"), "--to html: all sweeps cannot be shown so; it takes md"),
        (("one", "--json"), "--json: of one sweep there are tables, `--to csv`, and"),
        (("one", "--out", "here"), "--out: files are written with `--to csv` or `--to parquet`"),
        (
            ("one", "--metric", "val/loss"),
            "--workload and --metric choose among all arms, not within one sweep",
        ),
    ],
)
def test_what_is_not_there_is_told(state, words, said):
    done = here("show", *words, "--state", state)
    assert done.returncode == 2
    assert said in done.stderr.replace("\n", " ")
    assert "Traceback" not in done.stderr
