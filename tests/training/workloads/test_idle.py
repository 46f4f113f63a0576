"""The idle workload: so many records, the same wherever and whenever they are made, paired by seed, and nothing else."""

import subprocess
import sys
import time

import pytest

from ablate.recipes import PRESETS
from ablate.training.loop import Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads import WORKLOADS
from ablate.training.workloads.idle import Idle


def losses(recipe: str = "nvfp4", seed: int = 0, **fields) -> list[float]:
    records = list(Idle(**fields).records(TrialRun(PRESETS[recipe](), seed, "emulated", "cpu", Telemetry())))
    assert [record.step for record in records] == list(range(1, len(records) + 1))
    assert all(set(record.metrics) <= Idle.METRICS for record in records)
    return [record.metrics["val/loss"] for record in records]


def test_it_yields_as_many_records_as_it_has_steps():
    assert len(losses()) == 20
    assert len(losses(steps=3)) == 3


def test_a_known_trial_has_the_losses_it_had():
    """Raise VERSION before changing this: finished trials are found by their ids."""
    assert losses(steps=2, x=1.0) == [1.5357340969099194, 1.0343224498555266]


def test_its_numbers_are_those_of_its_fields_recipe_and_seed_alone():
    plain = losses(steps=4)
    assert losses(steps=4) == plain
    assert losses(steps=4, seconds=0.001) == plain
    others = [losses("bf16", steps=4), losses(seed=1, steps=4), losses(steps=5)[:4], losses(steps=4, x=0.1)]
    assert all(ours != theirs for other in others for ours, theirs in zip(plain, other, strict=True))


def test_arms_are_paired_by_seed():
    """Between seeds the loss varies by up to 0.011; between arms of one seed by up to 0.001."""
    one, other = ([losses(recipe, seed)[-1] for seed in range(20)] for recipe in ("bf16", "nvfp4"))
    assert max(abs(a - b) for a, b in zip(one, other, strict=True)) < 0.001
    assert max(one) - min(one) > 0.005


def test_a_search_has_something_to_find():
    """The bowl's walls are higher than the noise, 0.011."""
    best = losses(x=0.3, y=-0.2)[-1]
    assert best < min(losses(x=0.6, y=-0.2)[-1], losses(x=0.3, y=0.1)[-1], losses(x=-0.3, y=-0.2)[-1])


def test_it_sleeps_as_long_as_it_says_and_says_what_it_costs():
    started = time.perf_counter()
    losses(steps=3, seconds=0.05)
    assert time.perf_counter() - started >= 0.15
    assert (
        Idle(steps=3, seconds=0.05).cost(True)
        == Idle(steps=3, seconds=0.05).cost(False)
        == pytest.approx(0.15, abs=0.05)
    )


def test_how_long_it_sleeps_is_not_identity():
    assert Idle(seconds=1.0).identity() == Idle().identity()
    assert Idle(x=1.0).identity() != Idle().identity()


def test_describing_it_imports_no_torch():
    code = "import sys; from ablate.training.workloads import WORKLOADS; WORKLOADS['idle']().identity(); print('torch' in sys.modules)"
    assert (
        subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
        == "False\n"
    )


def test_it_is_known_by_its_name():
    assert WORKLOADS["idle"] is Idle
