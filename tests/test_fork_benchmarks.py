"""The scripts behind the figures of forks: their designs load, their line is that of an independent method."""

import sys
from pathlib import Path

import numpy as np
import pytest
from scipy import optimize
from support.experiments import sweep, tiny

sys.path.insert(0, str(Path(__file__).parent.parent / "benchmarks"))
import calibration_line
import fork_designs

from ablate.experiment.load import load


def test_every_design_of_the_benchmark_loads_with_the_same_model_and_baseline(tmp_path):
    experiments = [load(one.write(tmp_path)) for one in fork_designs.SWEEPS]
    assert len({experiment.name for experiment in experiments}) == len(fork_designs.SWEEPS)
    for experiment in experiments:
        assert [arm.name for arm in experiment.arms if arm.twin] == ["null: bf16"]
        assert experiment.base.config.steps == fork_designs.MODEL["steps"]


def test_a_row_of_the_table_is_the_arms_damage(tmp_path, monkeypatch):
    arms = {"worse": {"recipe": "mxfp4"}}
    keys = {"shape": {"steps": 8, "eval_every": 8}, "ablate": None, "arms": arms, "seeds": 3, "null": True}
    design = {"positions": 2, "window": 0.25, "horizons": [1, 2]}
    sweep(tiny(tmp_path, "annealed", **keys, design=design), tmp_path)
    one = fork_designs.Sweep("annealed", ("worse",), 1e-3, design, 3)
    found = {(row[1], row[2]): row for row in fork_designs.rows(one, tmp_path)}
    assert found.keys() == {(steps, arm) for steps in ("2", "4") for arm in ("worse", "null: bf16")}
    for row in found.values():
        total, learnt, direct = map(float, row[4:7])
        assert total == pytest.approx(learnt + direct, abs=2e-5)


def test_the_line_with_errors_in_both_variables_is_the_one_nearest_to_all_points():
    """The oracle moves every point onto the line, each coordinate at the price of its own error."""
    random = np.random.default_rng(0)
    for _ in range(20):
        x, sx, sy = random.normal(size=12), random.uniform(0.05, 0.2, 12), random.uniform(0.1, 0.5, 12)
        y = 2 * x + 1 + sy * random.normal(size=12)
        noisy = x + sx * random.normal(size=12)
        slope, intercept = calibration_line.fit(noisy, sx, y, sy)

        def distances(unknown, noisy=noisy, sx=sx, y=y, sy=sy):
            moved = unknown[2:]
            return np.concatenate([(noisy - moved) / sx, (y - unknown[0] * moved - unknown[1]) / sy])

        found = optimize.least_squares(distances, np.concatenate([[1.0, 0.0], noisy])).x[:2]
        assert [slope, intercept] == pytest.approx(list(found), rel=1e-3, abs=1e-3)
