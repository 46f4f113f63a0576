"""`ablate.reports.open`: a sweep's results as frames, against pandas' and SciPy's own arithmetic on the recorded numbers."""

import math
import sqlite3

import numpy as np
import pandas as pd
import pytest
import scipy.stats
from support.experiments import sweep, tiny

import ablate


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("frames")
    sweep(tiny(folder, ablate={"rht": [True, False], "sr": [True, False]}, seeds=3), folder)
    return folder


def test_the_gap_of_an_arm_is_the_paired_t_interval_of_the_recorded_values(state):
    with ablate.reports.open("tiny", state=state) as results:
        recorded, arms = results.records("val/loss"), results.arms.set_index("arm")
    last = recorded.sort_values("step").groupby(["arm", "seed"], observed=True)["value"].last().unstack()
    assert list(arms.index) == ["bf16", *(name for name in arms.index if name != "bf16")]
    for name, arm in arms.drop("bf16").iterrows():
        gaps = (last.loc[name] - last.loc["bf16"]).to_numpy(float)
        expected = scipy.stats.t.interval(0.95, len(gaps) - 1, gaps.mean(), scipy.stats.sem(gaps))
        assert (arm["gap"], arm["low"], arm["high"]) == pytest.approx((gaps.mean(), *expected), rel=1e-9)
        assert arm["pairs"] == 3
        assert arm["mean"] == pytest.approx(last.loc[name].mean())
        assert arm["verdict"] in ("better", "worse", "same", "undecided", "unjudged")
    assert pd.isna(arms.loc["bf16", "baseline"])
    assert math.isnan(arms.loc["bf16", "gap"])


def test_main_effects_are_the_means_over_the_other_knobs(state):
    with ablate.reports.open(state / "tiny.yaml", state=state) as results:
        effects, trials, arms = results.effects, results.trials, results.arms
    by_arm = trials.groupby("arm")["value"].mean()
    knobs = arms.set_index("arm")[["rht", "sr"]].drop("bf16").astype(bool)
    for knob in ("rht", "sr"):
        on, off = (by_arm[knobs.index[knobs[knob] == value]].mean() for value in (True, False))
        (found,) = effects[effects["knobs"] == knob]["effect"]
        assert found == pytest.approx(on - off, abs=1e-12)
    assert "rht x sr" in set(effects["knobs"])


COLUMNS = {
    "damage": "arm gap direct direct_low direct_high learnt learnt_low learnt_high pairs",
    "windows": "arm position window damage low high pairs",
    "effects": "knobs change effect low high pairs",
}


def test_frames_have_their_columns_with_and_without_rows(state, tmp_path):
    with ablate.reports.open("tiny", state=state) as results:
        rows = {name: getattr(results, name) for name in COLUMNS}
    assert {name: len(frame) for name, frame in rows.items()} == {"damage": 4, "windows": 0, "effects": 3}
    only = {"recipe": "bf16", "ablate": {"workload.lr": [1e-3]}, "seeds": 1}
    sweep(tiny(tmp_path, metric={"name": "train/recent_loss"}, **only), tmp_path)
    with ablate.reports.open("tiny", state=tmp_path) as results:
        empty = {name: getattr(results, name) for name in COLUMNS}
    assert {len(frame) for frame in empty.values()} == {0}
    for name, columns in COLUMNS.items():
        assert list(rows[name].columns) == list(empty[name].columns) == columns.split(), name


def test_trials_have_a_row_for_each_arm_and_seed(state, monkeypatch):
    monkeypatch.setenv("ABLATE_STATE", str(state))
    with ablate.reports.open("tiny") as results:
        trials = results.trials
        assert repr(results) == "<results of tiny: 5 arms, by val/loss>"
    assert len(trials) == 15
    assert set(trials["status"]) == {"done"}
    assert np.isfinite(trials["value"]).all()


def test_a_wrong_name_or_metric_is_refused_with_the_nearest(state):
    with pytest.raises(FileNotFoundError, match=r"tinny: no such sweep in .*tiny"):
        ablate.reports.open("tinny", state=state)
    with pytest.raises(ValueError, match="tiny compares by val/loss"):
        ablate.reports.open("tiny", state=state, metric="train/loss")


def test_a_changed_ledger_is_refused(state, tmp_path):
    copied = tmp_path / "sweeps" / "tiny" / "ledger.db"
    copied.parent.mkdir(parents=True)
    with sqlite3.connect(state / "sweeps" / "tiny" / "ledger.db") as source, sqlite3.connect(copied) as copy:
        source.backup(copy)
    ablate.reports.open("tiny", state=tmp_path)
    with sqlite3.connect(copied) as db:
        db.execute("UPDATE trials SET status = 'failed' WHERE trial = 1")
    with pytest.raises(
        ValueError, match=r"damaged \(table trials, row 1.* `ablate rebuild tiny.yaml --state "
    ):
        ablate.reports.open("tiny", state=tmp_path)
