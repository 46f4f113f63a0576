"""`ablate calibrate` measures designs on seeds of its own and writes the sharpest into the file, comments kept."""

import json
import math

import numpy as np
import pytest
from support.commands import here
from support.experiments import content, ledger, problems, sweep, tiny, write
from support.made_up import member

from ablate.experiment.load import load
from ablate.experiment.schema import Metric
from ablate.experiment.yaml_document import parse, with_values
from ablate.results.run_lengths import steps_to
from ablate.results.summary import summaries
from ablate.store.ledger import Ledger

OF_ARMS = {
    "ablate": None,
    "arms": {
        "a": {},
        "b": {"sr": False},
        "c": {"rht": False},
        "d": {"recipe": "mxfp8"},
        "e": {"recipe": "quartet"},
    },
    "answer": {"arm": "b"},
}
"""Keys of a file of whose arms a calibration runs three, without the one that its `answer` names."""
TEXT = """\
# Why this file exists.
schema: 1
question: Does it matter?   # really
workload: {gpt: GPT}
ablate:
  rht: [true, false]        # the knob
seeds: 2                    # few
metric: {name: val/loss, min_effect: 0.005}
"""


def test_values_are_written_into_a_file_whose_comments_and_order_stay():
    text = with_values(
        TEXT.replace("GPT", "{steps: 8}"), {"seeds": 5, "design": {"trunk": "bf16"}, "metric": None}
    )
    assert text.splitlines() == [
        "# Why this file exists.",
        "schema: 1",
        "question: Does it matter?   # really",
        "workload: {gpt: {steps: 8}}",
        "ablate:",
        "  rht: [true, false]        # the knob",
        "seeds: 5                    # few",
        "design: {trunk: bf16}",
    ]


@pytest.mark.parametrize("key", ["null", '"null"'])
def test_a_null_arm_that_a_file_has_already_stays_one_key(key):
    """A bare null is no text to YAML: a second key would be refused as given twice."""
    text = with_values(f"schema: 1\n{key}: true\nseeds: 2\n", {"null": True})
    assert text.count("null") == 1
    assert parse(text, "x.yaml").value["null"] is True


@pytest.mark.slow
def test_a_calibration_writes_a_design_that_runs_and_the_plan_says_how_wide(tmp_path, monkeypatch):
    (tmp_path / "ablate.toml").write_text('[profile.default]\nexecutor = "inline"\nmlflow = "none"\n')
    monkeypatch.chdir(tmp_path)  # where the sweeps that it starts find the profile
    shape = {"steps": 12, "eval_every": 12, "eval_tokens": 512, "eval_batch": 32, "lr": 3e-3}
    gpt = content(tmp_path, shape)["workload"]["gpt"]
    path = tmp_path / "tiny.yaml"
    path.write_text(TEXT.replace("GPT", json.dumps(gpt)))
    state = tmp_path / "runs"
    done = here("calibrate", path, "--state", state, "--seeds", 3, "--bad", "mxfp4")
    assert "known-bad arm" in done.stdout
    assert done.returncode in (0, 1), done.stderr
    both = {name: load(tmp_path / f"{name}.yaml") for name in ("tiny_calibration", "tiny_calibration_full")}
    for experiment in both.values():
        assert min(experiment.seeds) >= 900_000  # no seed of the experiment's own
        assert [arm.name for arm in experiment.arms if arm.twin] == ["null: bf16"]
    if done.returncode:  # so small a model may see nothing: then nothing is written, and that is said
        assert "Nothing is written" in done.stdout
        assert path.read_text() == TEXT.replace("GPT", json.dumps(gpt))
        return
    text = path.read_text()
    assert "# Why this file exists." in text
    assert "# the knob" in text
    plan = here("plan", path, "--state", state)
    assert "Expected half-width of a 95 % interval: " in plan.stdout
    again = here("calibrate", path, "--state", state, "--seeds", 3, "--dry-run")
    assert again.returncode == 0
    assert path.read_text() == text


def test_hours_that_no_calibration_fits_into_are_refused(tmp_path):
    path = write(tmp_path, shape={"steps": 100_000, "eval_every": 100_000})
    done = here("calibrate", path, "--state", tmp_path / "runs", "--hours", 0.001)
    assert done.returncode == 2
    assert "give more --hours" in done.stderr


@pytest.mark.parametrize("there", [(), ("tiny_calibration.yaml",)])
def test_a_dry_run_leaves_no_file_beside_the_experiment(there, tmp_path):
    path = write(tmp_path, shape={"steps": 100_000, "eval_every": 100_000})
    for name in there:
        path.with_name(name).write_text("of an earlier calibration")
    before = {file.name for file in path.parent.glob("*.yaml")}
    done = here("calibrate", path, "--state", tmp_path / "runs", "--hours", 0.001, "--dry-run")
    assert "give more --hours" in done.stderr
    assert {file.name for file in path.parent.glob("*.yaml")} == before


def test_a_file_with_an_answer_is_calibrated(tmp_path):
    """The calibration's arms are not the file's, so its `answer` is left out of it: only the hours are refused."""
    long = {"steps": 100_000, "eval_every": 100_000}
    for keys in ({"ablate": {"sr": [True, False]}, "answer": {"knob": "sr"}}, OF_ARMS):
        path = write(tmp_path, shape=long, **keys)
        done = here("calibrate", path, "--state", tmp_path / "runs", "--hours", 0.001)
        assert done.returncode == 2
        assert "give more --hours" in done.stderr


def test_a_refusal_of_full_runs_names_the_option_that_leaves_them_out(tmp_path):
    """The known-bad arm is an arm of the file: forks use that one, full runs would have it twice."""
    arms = {"fine": {}, "coarse": {"recipe": "mxfp4"}}
    path = write(tmp_path, shape={"steps": 100_000, "eval_every": 100_000}, ablate=None, arms=arms)
    refused = here("calibrate", path, "--state", tmp_path / "runs", "--hours", 0.001)
    assert refused.returncode == 2
    assert refused.stderr.count("--no-full") == 1
    alone = here("calibrate", path, "--state", tmp_path / "runs", "--hours", 0.001, "--no-full")
    assert "give more --hours" in alone.stderr


# Steps to a loss


def test_steps_to_a_loss_are_interpolated_in_the_logarithm_of_the_steps():
    """The oracle is numpy's interpolation of the curve, turned round."""
    random = np.random.default_rng(0)
    for _ in range(200):
        steps = np.sort(random.choice(np.arange(1, 500), 8, replace=False))
        losses = np.sort(random.uniform(1, 4, 8))[::-1]
        target = random.uniform(losses[-1], losses[0])
        expected = math.exp(np.interp(-target, -losses, np.log(steps)))
        assert steps_to(dict(zip(steps.tolist(), losses.tolist(), strict=True)), target) == pytest.approx(
            expected
        )
    assert math.isnan(steps_to({10: 3.0, 20: 2.0}, 1.5))
    assert steps_to({10: 3.0, 20: 2.0}, 3.5) == 10
    assert steps_to({10: math.nan, 20: 2.0}, 2.5) == 20


@pytest.mark.parametrize("target", [3.5, 3.0, 2.5, 1.5])
def test_an_evaluation_before_the_first_step_changes_no_steps_to_a_loss(target):
    curve = {10: 3.0, 20: 2.0}
    assert steps_to({0: 4.0} | curve, target) == pytest.approx(steps_to(curve, target), nan_ok=True)
    assert steps_to({0: target} | curve, target) == 0


def test_arms_are_compared_by_the_steps_that_they_need(tmp_path):
    metric = [{"name": "val/loss"}, {"name": "steps_to/3.9"}]
    experiment = tiny(tmp_path, shape={"steps": 12, "eval_every": 2, "lr": 1e-2}, metric=metric)
    sweep(experiment, tmp_path / "runs")
    book = ledger(tmp_path / "runs")
    second = book.facts.all_metrics[1]
    for arm in summaries(book, second):
        trials = {member.seed: member.trial for member in book.members() if member.name == arm.name}
        for seed, value in arm.values.items():
            assert value == steps_to(book.series(trials[seed], "val/loss"), 3.9)
    book.close()


@pytest.mark.parametrize("slow", ["arm", "baseline"])
def test_arms_with_seeds_that_never_reach_the_target_have_no_gap(slow, tmp_path):
    """The slow arm truly takes 40 steps more; its seeds that reach the target within the run say about 20."""
    draws = np.random.default_rng(1)
    book = Ledger(tmp_path / "book" / "ledger.db")
    book.describe(metric='{"name": "val/loss"}')
    base = book.add_arm("bf16", {}, None, None)
    arms = {"baseline": base, "arm": book.add_arm("nvfp4", {}, base, None)}
    for role, arm in arms.items():
        for seed in range(9):
            reached = draws.uniform(40, 90) + 40 * (role == slow)
            curve = [(step, {"val/loss": 3.0 - (step >= reached)}) for step in range(10, 101, 10)]
            member(book, arm, seed, curve)
    metric = Metric(name="steps_to/2.0")
    by_role = dict(zip(arms, summaries(book, metric), strict=True))
    assert {role: bool(one.values) for role, one in by_role.items()} == {role: role != slow for role in arms}
    lost, arm = len(by_role[slow].censored), by_role["arm"]
    assert 0 < lost < 9
    assert (arm.gap.pairs, arm.verdict.kind, arm.verdict.reason) == (0, "unjudged", "censored")
    assert arm.verdict.count == lost
    assert not arm.unmeasured
    book.close()


@pytest.mark.parametrize(
    "metric",
    ["steps_to/3.9", [{"name": "steps_to/3.9"}], [{"name": "val/loss"}, {"name": "steps_to/low"}]],
)
def test_a_target_that_is_none_or_stands_first_is_refused(metric, tmp_path):
    found = problems(write(tmp_path, metric={"name": metric} if isinstance(metric, str) else metric))
    assert any("steps_to" in str(problem) for problem in found)
