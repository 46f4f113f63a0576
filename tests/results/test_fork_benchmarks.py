"""The scripts behind the figures of forks: their designs load, their line is that of an independent method."""

import re
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import numpy as np
import pytest
import torch
from scipy import optimize, stats
from support.experiments import sweep, tiny

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
import calibration_line
import demo_design
import equal_compute
import fork_designs
import fork_pool
import pool_truth
import sensitivity_proof as proof
import validity

import ablate
from ablate.errors import InputError
from ablate.experiment.load import load
from ablate.training.fork_design import Forks
from ablate.training.trial_run import TrialRun


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


# The pool whose truth is known


def made_up_pool(seeds: int = 120) -> list[dict]:
    """Normal values: `effect` is .5 deviations of a difference away from bf16, a twin nothing."""
    random, lines = np.random.default_rng(0), []
    for seed in range(seeds):
        shared = random.normal()
        for arm, effect in (("bf16", 0.0), ("mxfp4", 2.0), ("noise 1", 0.5), ("bf16 twin", 0.0)):
            value = 10 + shared + effect + random.normal() / np.sqrt(2)
            lines.append(
                {"design": "full", "arm": arm, "seed": seed, "seconds": 1.0, "values": {"val/loss": value}}
            )
    return lines


def test_tables_of_a_pool_of_normal_values_say_what_is_known_of_them(monkeypatch):
    monkeypatch.setattr(pool_truth, "EXPERIMENTS", 200)
    found = pool_truth.sides(made_up_pool())
    covered = [row.split(" | ") for row in pool_truth.coverage(found) if row.startswith("| full")]
    assert [float(row[2].removesuffix(" %")) for row in covered] == pytest.approx([95] * 3, abs=3)
    (alone,) = [row for row in pool_truth.twins(found) if row.startswith("| full | bf16 | 3 |")]
    assert " 40 | " in alone  # 120 seeds in disjoint threes
    for row in pool_truth.planted(found):
        cells = row.split(" | ")
        if cells[0] == "| full":
            assert abs(float(cells[-1].removesuffix(" |"))) < 10
    kept = [row for row in pool_truth.promised_seeds(found) if row.startswith("| full")]
    assert len(kept) == 6


@pytest.mark.parametrize(("effect", "size"), [(1.0, 3), (1.0, 8), (0.3, 5)])
def test_predicted_power_is_that_of_a_simulation(effect, size):
    random = np.random.default_rng(1)
    drawn = random.normal(effect, 1, (20_000, size))
    resolved = np.mean(stats.ttest_1samp(drawn, 0.0, axis=1).pvalue < 0.05)
    assert pool_truth.power(effect, 1.0, size) == pytest.approx(resolved, abs=0.012)


@pytest.mark.parametrize("kind", ["noise", "bias"])
def test_a_planted_disturbance_has_its_size_and_is_new_or_the_same_in_each_step(kind):
    model = torch.nn.Linear(8, 16)
    validity.disturb(model, validity.Planted(kind, 0.25), seed=3)
    inputs, added = torch.randn(4, 8, generator=torch.Generator().manual_seed(0)), []
    for _ in range(2):
        model.zero_grad()
        model(inputs).square().sum().backward()
        got, bias = model.weight.grad.clone(), model.bias.grad.clone()
        plain = torch.nn.Linear(8, 16)
        plain.load_state_dict(model.state_dict())
        plain(inputs).square().sum().backward()
        added.append(got - plain.weight.grad)
        assert torch.equal(bias, plain.bias.grad)
        assert float(added[-1].norm() / plain.weight.grad.norm()) == pytest.approx(0.25, rel=1e-5)
    assert torch.allclose(*added, rtol=1e-4, atol=1e-5) == (kind == "bias")


def in_threads(workers):
    return ThreadPoolExecutor(workers)


def test_a_pool_that_was_cut_off_in_a_line_goes_on(tmp_path, monkeypatch):
    monkeypatch.setattr(validity, "SEEDS", {"full": {"bf16": 2}})
    monkeypatch.setattr(validity, "MODEL", validity.MODEL | {"steps": 2})
    path = tmp_path / "pool.jsonl"
    path.write_text('{"design": "full", "arm": "bf16", "se')
    assert fork_pool.run(path, validity.wanted(1.0), validity.trial, 1, pool=in_threads) == 0
    assert [line["seed"] for line in fork_pool.rows(path)] == [0, 1]
    before = path.read_text()
    assert fork_pool.run(path, validity.wanted(1.0), validity.trial, 1, pool=in_threads) == 0
    assert path.read_text() == before


class Squared(NamedTuple):
    number: int


def squared(job):
    return {"square": job.number**2}


def test_jobs_begin_in_order_on_forked_processes_until_the_time_is_over(tmp_path):
    path, jobs = tmp_path / "pool.jsonl", [Squared(number) for number in range(6)]
    assert fork_pool.run(path, jobs[:4], squared, 2) == 0
    assert path.read_text().count("\n") == 4
    assert sorted((row["number"], row["square"]) for row in fork_pool.rows(path)) == [
        (0, 0), (1, 1), (2, 4), (3, 9)
    ]  # fmt: skip
    assert fork_pool.run(path, jobs, squared, 2, minutes=0) == 2


def test_a_fork_from_a_kept_trunk_is_the_librarys_own(tmp_path):
    workload = validity.Gpt(**validity.MODEL | {"steps": 10}, eval_tokens=1024)
    recipe = ablate.recipe("nvfp4")
    forked = [fork_pool.fork(workload, recipe, 3, position, 2, tmp_path) for position in (4, 6, 4)]
    forks = Forks(trunk=ablate.recipe("bf16"), positions=(4, 6), windows=(2,))
    records = workload.records(TrialRun(recipe, 3, "emulated", "cpu", fork_pool.SILENT, forks=forks))
    own = {name: value for record in records for name, value in record.metrics.items()}
    for values, position in zip(forked, (4, 6, 4), strict=True):
        for name in ("loss", "loss_bf16"):
            assert values[name] == own[f"fork/{position}/2/{name}"]


def test_the_demonstration_has_a_model_and_a_design_that_were_tried_on_other_seeds(tmp_path):
    shipped = load(demo_design.SHIPPED)
    tried = [load(demo_design.sweep(model, tmp_path)) for model in demo_design.MODELS]
    assert not set(shipped.seeds) & {seed for experiment in tried for seed in experiment.seeds}
    (same,) = [one for one in tried if one.base.config == shipped.base.config]
    assert len(shipped.arms) == demo_design.ARMS
    ours, theirs = (one.forks(one.arms[0]) for one in (shipped, same))
    assert set(ours.positions) <= set(theirs.positions)
    assert set(ours.windows) <= set(theirs.windows)


def test_every_shipped_experiment_that_can_be_forked_is_of_equal_computation(tmp_path):
    refused = []
    for name in equal_compute.FILES:
        path = equal_compute.forked(equal_compute.SHIPPED / f"{name}.yaml", tmp_path)
        try:
            experiment = load(path)
        except InputError as error:
            refused.append((name, "phases" in str(error)))
            continue
        forks = experiment.forks(experiment.arms[0])
        assert sum(forks.windows) * len(forks.positions) / experiment.base.config.steps == pytest.approx(1.05)
    assert refused == [("reproductions/late_switch", True)]


# --- the proof of maps ----------------------------------------------------------------------------


def test_the_proof_begins_with_its_baselines_and_has_every_half_with_its_complement():
    jobs = proof.design()
    assert len(set(jobs)) == len(jobs)
    first = [job for job in jobs[:40] if job.group == "bf16"]
    assert len(first) == 2 * len(proof.SEEDS) + len(proof.SEEDS) // 2
    needed = {(job.model, job.seed, job.window) for job in jobs}
    assert needed == {(job.model, job.seed, job.window) for job in jobs if job.group == "bf16"}
    every = set(proof.units("gpt"))
    halves = [set(proof.members("gpt", f"half {number}")) for number in range(proof.HALVES)]
    rests = [set(proof.members("gpt", f"half {number} rest")) for number in range(proof.HALVES)]
    assert all(half | rest == every and not half & rest for half, rest in zip(halves, rests, strict=True))
    assert len({frozenset(half) for half in halves}) == proof.HALVES
    for groups in proof.PARTITIONS.values():
        parts = [unit for group in groups for unit in proof.members("gpt", group)]
        assert sorted(parts) == sorted(every)


def test_a_recipe_of_the_proof_alters_the_errors_of_its_units_alone():
    job = proof.condition("blocks.1.mlp.up fprop", 2.8, permuted=True)
    recipe = proof.recipe_of(job)
    placed = {
        layer.name: part
        for part in recipe.placements(proof.MODELS["gpt"].linear_layers)
        for layer in part.layers
    }
    quantised = {name: dict(part.products.quantised()) for name, part in placed.items() if part.products}
    assert {name for name, quants in quantised.items() if quants} == {"blocks.1.mlp.up"}
    errors = {slot: quant.error for slot, quant in quantised["blocks.1.mlp.up"].items()}
    assert errors.keys() == {"fprop.x", "fprop.w"}
    assert all((error.times, error.permuted) == (2.8, True) for error in errors.values())


def test_the_analysis_finds_planted_exponents_shares_and_interactions(capsys):
    """Damage is 0.001 a^2 a share of units, half of it direct; dgrad grows by a; two blocks interact."""
    random, lines = np.random.default_rng(0), []
    for job in proof.design():
        names = [] if job.group == "bf16" else proof.members(job.model, job.group)
        power = 1 if job.group == "dgrad" else 2
        total = 0.001 * job.times**power * len(names) / 36 * (0.5 if job.permuted else 1)
        total += 0.004 if job.group in ("block 0", "block 1") else 0.0
        own = 2.0 + 0.01 * job.seed + total + 1e-6 * random.normal() * bool(names)
        losses = {"loss": own, "loss_bf16": own - total / 2}
        lines.append({**dict(zip(type(job).__annotations__, job, strict=True)), **losses, "seconds": 1.0})
    damages = proof.Damages(lines)
    fprop = damages.of("total", *(proof.condition("fprop", a) for a in (2.0, 2.8, 4.0)))
    dgrad = damages.of("learnt", *(proof.condition("dgrad", a) for a in (2.0, 2.8, 4.0)))
    assert proof.exponent((2.0, 2.8, 4.0))(fprop) == pytest.approx(2, abs=0.01)
    assert proof.exponent((2.0, 2.8, 4.0))(dgrad) == pytest.approx(1, abs=0.01)
    times = (1.0, 2.0, 2.8, 4.0)
    shares = [
        proof.linear_share(times)(damages.of("total", *(proof.condition(group, a) for a in times)))
        for group in ("fprop", "dgrad")
    ]
    assert shares == pytest.approx([0, 1], abs=0.02)
    proof.additivity_tables(damages)
    printed = capsys.readouterr().out
    assert "| total | blocks | +0.00800" in printed
    assert "| total | kinds | +0.0000" in printed
    proof.later_table(damages)
    printed = capsys.readouterr().out
    ratios = dict(re.findall(r"^\| (\w+)[ :].* \| ([\d.]+) \([\d. to]+\) \|$", printed, re.MULTILINE))
    assert {name: float(value) for name, value in ratios.items()} == pytest.approx(
        dict.fromkeys((*proof.LARGE, "sum"), 1.0) | {"dgrad": 0.25}, abs=0.011
    )  # printed with two digits


def test_a_fork_of_the_proof_is_worse_if_errors_are_amplified(tmp_path, monkeypatch):
    small = proof.Gpt(layers=1, width=32, heads=2, context=32, batch=4, steps=12, eval_tokens=256)
    monkeypatch.setitem(proof.MODELS, "small", small)
    monkeypatch.setattr(proof, "POSITION", 6)
    group = "blocks.0.attention.qkv fprop"
    jobs = [
        proof.Job("small", 1, name, a, False, 2) for name, a in (("bf16", 1.0), (group, 1.0), (group, 16.0))
    ]
    plain, one, sixteen = (proof.work(tmp_path, job) for job in jobs)
    assert plain["loss"] == plain["loss_bf16"]
    assert abs(one["loss"] - one["loss_bf16"]) < abs(sixteen["loss"] - sixteen["loss_bf16"])
