"""Trials of a gpt with experts keep the promises of every trial: resumed, forked, twinned, in a sweep."""

import json
from contextlib import closing

import pytest
from support.commands import here
from support.experiments import SHAPE, ledger, shards, statuses, values, write
from support.gpt_runs import UNMEASURED, facts

from ablate.recipes import PRESETS, Recipe
from ablate.recipes.recipe import OsciReset, QEma, QRamping, Weights
from ablate.training.checkpoints import Checkpoints
from ablate.training.fork_design import Forks
from ablate.training.loop import Record, Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.gpt import Gpt

NVFP4 = PRESETS["nvfp4"]()
OFTEN = Telemetry(every=3, shadow=4, log=1)
EXPERTS = {"count": 4, "shared": 1}
RULES = {
    "osci_reset": OsciReset(start=0.0, period=3, window=2, threshold=1.0),
    "q_ema": QEma(start=2),
    "q_ramping": QRamping(period=4, window=3),
}
RECIPES = {name: PRESETS[name]() for name in ("bf16", "nvfp4", "fp8_delayed")} | {
    name: NVFP4.model_copy(update={"weights": Weights(**{name: rule})}) for name, rule in RULES.items()
}


def gpt(folder, **fields) -> Gpt:
    changes = {"data": shards(folder), "steps": 6, "eval_every": 3, "accumulate": 2, "experts": EXPERTS}
    return Gpt(**(SHAPE | changes | fields))


def records(workload: Gpt, recipe: Recipe, checkpoints=None, telemetry=OFTEN, **fields) -> list[Record]:
    return workload.records(TrialRun(recipe, 0, "emulated", "cpu", telemetry, checkpoints, **fields))


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_resumed_trial_is_the_uninterrupted_one_bit_for_bit(recipe, tmp_path):
    workload, recipe = gpt(tmp_path), RECIPES[recipe]
    whole = list(records(workload, recipe))
    first = records(workload, recipe, Checkpoints(tmp_path / "c.pt", "trial", 0))
    taken = [next(first) for _ in range(5)][:4]
    first.close()
    again = Checkpoints(tmp_path / "c.pt", "trial", 0)
    rest = list(records(workload, recipe, again))
    assert again.resumed == 4
    assert facts(taken + rest) == facts(whole)


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["bf16", "nvfp4"])
def test_a_window_at_the_trunks_own_rate_is_the_rest_of_the_plain_run(recipe, tmp_path):
    workload, recipe = gpt(tmp_path), RECIPES[recipe]
    plain = list(records(workload, recipe))[-1].metrics
    forks = Forks(trunk=recipe, positions=(2, 4), windows=(2, 4), anneal=False)
    every = {n: v for record in records(workload, recipe, forks=forks) for n, v in record.metrics.items()}
    assert every["fork/2/4/loss"] == every["fork/4/2/loss"] == plain["val/loss"]


def test_neither_recomputation_nor_telemetry_changes_a_bit_and_a_twin_does(tmp_path):
    workload = gpt(tmp_path)
    quiet = list(records(workload, NVFP4, telemetry=UNMEASURED))
    assert facts(list(records(gpt(tmp_path, recompute=True), NVFP4, telemetry=UNMEASURED))) == facts(quiet)
    loud, twin = list(records(workload, NVFP4)), list(records(workload, NVFP4, twin=True))
    for name in ("val/loss", "train/recent_loss", "train/imbalance", "grad/norm"):
        assert loud[-1].metrics[name] == quiet[-1].metrics[name]
        assert loud[-1].metrics[name] != twin[-1].metrics[name]


def test_the_share_of_fp4_counts_an_expert_by_the_tokens_that_it_gets(tmp_path):
    """Attention has 4 width^2 weights, and a token is multiplied by two of four experts and the shared one."""
    rules = [{"match": "class:Experts"}]
    recipe = Recipe.model_validate(NVFP4.model_dump() | {"layers": {"rules": rules}})
    layers = gpt(tmp_path).linear_layers
    weights = sum(layer.weights for layer in layers)
    of_experts = sum(layer.weights for layer in layers if "Experts" in layer.classes)
    assert of_experts == 2 * 32 * 3 * 32
    assert weights == of_experts + 32 * 3 * 32 + 4 * 32 * 32
    share = list(records(gpt(tmp_path), recipe))[-1].metrics["flops/fp4_share"]
    assert share == pytest.approx(1 - of_experts / weights)


def test_a_sweep_over_experts_runs_in_forks_and_a_recipe_may_leave_them_in_bf16(tmp_path):
    arms = {name: {"recipe.layers.rules": [{"match": name}]} for name in ("*.experts.*", "class:Attention")}
    path = write(
        tmp_path,
        shape={"experts": {"count": 4}, "steps": 8, "eval_every": 8},
        ablate=None,
        recipe="nvfp4",
        arms=arms,
        design={"positions": [0.5], "window": 0.25, "horizons": [1]},
    )
    state = tmp_path / "runs"
    done = here("sweep", path, "--executor", "inline", "--state", state)
    assert done.returncode == 0, done.stdout + done.stderr
    assert set(statuses(state).values()) == {"done"}
    losses = values(state)
    assert len(losses) == len({*losses.values()}) == 6  # two arms and bf16, two seeds
    with closing(ledger(state)) as book:
        configs = [json.loads(member.spec)["workload"]["gpt"]["experts"] for member in book.members()]
    assert configs == [{"count": 4, "top_k": 2, "hidden": None, "shared": 0, "auxiliary": 0.01}] * 6


@pytest.mark.parametrize(("gate_up", "status"), [("split", 0), ("fused", 2)])
def test_a_rule_names_gate_and_up_as_the_recipe_has_them(gate_up, status, tmp_path):
    arms = {
        "kept": {"recipe.experts.gate_up": gate_up, "recipe.layers.rules": [{"match": "*.experts.*.gate"}]}
    }
    path = write(tmp_path, shape={"experts": {"count": 4}}, ablate=None, recipe="nvfp4", arms=arms)
    done = here("plan", path)
    assert done.returncode == status, done.stdout + done.stderr
    assert ("selects no layer" in done.stderr) == (status == 2)
