"""Routes of tokens: flips are those counted by hand, none without quantisation, and none when they are replayed."""

import json

import pytest
import torch
from support.experiments import SHAPE, content, problems, shards
from support.gpt_runs import column, facts
from torch import Tensor, nn

import ablate
from ablate.engines.emulated import Engine, convert
from ablate.engines.routing import Routes
from ablate.numerics.philox import Clock
from ablate.numerics.spec import Outer, Quant
from ablate.recipes.experts import Experts
from ablate.recipes.presets import PRESETS
from ablate.recipes.recipe import Fprop, Recipe, Run
from ablate.training.checkpoints import Checkpoints
from ablate.training.fork_design import Forks
from ablate.training.loop import Record, Telemetry
from ablate.training.rank_layout import Layout
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.gpt import Gpt

WIDTH = 16
VALUES = torch.tensor([0.9, 1.05, 1.15, 1.2, 1.3, 1.9, 2.1, 2.3])
"""Second feature of each token, which FP4 rounds to 1, 1, 1, 1, 1.5, 2, 2, 2 at the scale 1."""
MOE = {
    "model_type": "qwen3_moe",
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "intermediate_size": 32,
    "moe_intermediate_size": 32,
    "num_experts": 4,
    "num_experts_per_tok": 2,
}


class Halves(nn.Module):
    """Two experts, in the layout of packed ones."""

    num_experts, has_gate, has_bias, is_transposed, is_concatenated = 2, False, False, False, True
    has_post_expert_norm, top_k = False, 1

    def __init__(self) -> None:
        super().__init__()
        self.up_proj = nn.Parameter(torch.eye(WIDTH).repeat(2, 1, 1))
        self.down_proj = nn.Parameter(torch.eye(WIDTH).repeat(2, 1, 1))

    def act_fn(self, y: Tensor) -> Tensor:
        return y

    def forward(self, x: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        return x * weights.sum(1, keepdim=True)


class Threshold(nn.Module):
    """Block that sends a token to expert 1 if its second feature, behind a linear layer, is above a limit."""

    def __init__(self, limit: float) -> None:
        super().__init__()
        self.linear, self.experts, self.limit = nn.Linear(WIDTH, WIDTH, bias=False), Halves(), limit
        nn.init.eye_(self.linear.weight)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        limits = torch.full_like(y[:, 1], self.limit)
        weights, index = torch.stack((limits, y[:, 1]), 1).topk(1)
        return self.experts(y, index, weights)


class Blocks(nn.Module):
    """Blocks side by side, which all get the same tokens."""

    def __init__(self, *limits: float) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(map(Threshold, limits))

    def forward(self, x: Tensor) -> Tensor:
        return torch.stack([block(x) for block in self.blocks]).sum()


def tokens() -> Tensor:
    """Return tokens whose largest feature, 6, makes FP4's scale 1."""
    x = torch.ones(len(VALUES), WIDTH)
    x[:, 0], x[:, 1] = 6, VALUES
    return x


def moe(folder, **fields) -> Gpt:
    """Return a gpt workload with a tiny mixture of experts of transformers."""
    shape = {key: SHAPE[key] for key in ("context", "batch", "eval_tokens")}
    changes = {"data": shards(folder), "model": MOE, "steps": 4, "eval_every": 4, "accumulate": 2, "lr": 3e-3}
    return Gpt(**(shape | changes | fields))


def records(workload: Gpt, recipe: Recipe, telemetry: Telemetry) -> list[Record]:
    return list(workload.records(TrialRun(recipe, 0, "emulated", "cpu", telemetry)))


def test_flips_and_loads_are_those_counted_by_hand():
    """By hand: above 1.1 are 1.15 and 1.2, but not as 1; above 2.2 is 2.3, but not as 2. Others agree."""
    rounded = Recipe(fprop=Fprop(x=Quant(outer=Outer(statistic="static:6"))))
    found = {}
    for limits in ((1.1,), (2.2,), (1.1, 2.2), (1.6,)):
        model = Blocks(*limits)
        run = ablate.convert(model, rounded, seed=0, steps=1)
        with run.step():
            run.compare_gradient(lambda model=model: model(tokens()).backward())
            model(tokens())
        found[limits] = {n.partition("/")[2]: v for n, v in run.metrics().items() if n.startswith("routing/")}
    flips = {limits: (each["flipped"], each["tokens_flipped"]) for limits, each in found.items()}
    assert flips == {
        (1.1,): (2 / 8, 2 / 8),
        (2.2,): (1 / 8, 1 / 8),
        (1.1, 2.2): (3 / 16, 3 / 8),
        (1.6,): (0, 0),
    }
    # As FP4 has them: 4 of 8 tokens are above 1.1, none is above 2.2, and 3 are above 1.6.
    loads = {limits: tuple(each.values())[2:] for limits, each in found.items()}
    assert loads == {(1.1,): (1, 4, 4), (2.2,): (2, 4, 0), (1.1, 2.2): (2, 4, 0), (1.6,): (5 / 4, 4, 3)}


@pytest.mark.parametrize("recompute", [False, True])
def test_trials_measure_their_routes_at_steps_of_telemetry_and_change_no_bit(recompute, tmp_path):
    often, seldom = Telemetry(every=2, shadow=100, log=1), Telemetry(every=100, shadow=100, log=1)
    workload = moe(tmp_path, recompute=recompute)
    flips = {}
    for preset in ("bf16", "nvfp4"):
        measured, plain = (records(workload, PRESETS[preset](), each) for each in (often, seldom))
        flips[preset] = column(measured, "routing/flipped")
        assert column(measured, "train/loss") == column(plain, "train/loss")
        assert measured[-1].metrics["val/loss"] == plain[-1].metrics["val/loss"]
        last = measured[-1].metrics
        assert 1 <= last["routing/load"] <= 2  # two of four experts
        assert 0 <= last["routing/tokens_min"] <= last["routing/tokens_median"] <= 2 * 16
    assert flips["bf16"] == {1: 0, 3: 0, 4: 0}
    assert flips["nvfp4"].keys() == {1, 3, 4}
    assert all(0 < share < 0.5 for share in flips["nvfp4"].values())


# Replay

FORKS = Forks(trunk=PRESETS["bf16"](), positions=(3, 4), windows=(2,))
ONE = FORKS.model_copy(update={"positions": (2,), "windows": (3,)})
SHARED = {
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
}
FAMILIES = {
    "qwen3_moe": MOE,
    "mixtral": SHARED | {"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2},
    "olmoe": SHARED | {"model_type": "olmoe", "num_experts": 4, "num_experts_per_tok": 2, "eos_token_id": 1},
    "gpt_oss": SHARED
    | {"model_type": "gpt_oss", "num_local_experts": 4, "num_experts_per_tok": 2, "head_dim": 16},
    "deepseek_v3": SHARED
    | {
        "model_type": "deepseek_v3",
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "first_k_dense_replace": 1,
        "num_hidden_layers": 3,
        "q_lora_rank": 16,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 16,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
    },
}


def routed(preset: str, routing: str, **fields) -> Recipe:
    return PRESETS[preset]().model_copy(update={"experts": Experts(routing=routing), **fields})


def forked(
    workload: Gpt, recipe: Recipe, checkpoints: Checkpoints | None = None, forks: Forks = FORKS
) -> list[Record]:
    """Return the records of trunk and windows."""
    each = Telemetry(every=2, shadow=100, log=1, checkpoint=0)
    run = TrialRun(recipe, 0, "emulated", "cpu", each, checkpoints, forks=forks)
    return workload.records(run)


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_every_family_replays_its_routes_and_without_quantisation_changes_no_bit(family, tmp_path):
    workload = moe(tmp_path, model=FAMILIES[family], steps=8, eval_every=8, accumulate=1)
    runs = {
        (preset, routing): list(forked(workload, routed(preset, routing), forks=ONE))
        for preset in ("bf16", "nvfp4")
        for routing in ("free", "replay")
    }
    assert facts(runs["bf16", "replay"]) == facts(runs["bf16", "free"])
    flips = {key: column(run, "routing/flipped") for key, run in runs.items()}
    windows = {
        key: sum(v for step, v in each.items() if step > ONE.trunk_steps) for key, each in flips.items()
    }
    assert windows["nvfp4", "free"] > 0
    assert windows["nvfp4", "replay"] == windows["bf16", "free"] == 0
    last = {key: run[-1].metrics["val/loss"] for key, run in runs.items()}
    assert len(set(last.values())) == 3


@pytest.mark.slow
@pytest.mark.parametrize(("stop", "recompute"), [(5, False), (6, True)])
def test_a_resumed_trial_records_its_routes_again_bit_for_bit(stop, recompute, tmp_path):
    workload = moe(tmp_path, steps=8, eval_every=8, recompute=recompute)
    recipe = routed("nvfp4", "replay")
    whole = list(forked(workload, recipe))
    first = forked(workload, recipe, Checkpoints(tmp_path / "c.pt", "trial", 0))
    taken = [next(first) for _ in range(stop)]
    first.close()
    again = Checkpoints(tmp_path / "c.pt", "trial", 0)
    rest = list(forked(workload, recipe, again))
    assert again.resumed == stop - 1 > FORKS.trunk_steps - 1
    assert facts([*taken[:-1], *rest]) == facts(whole)


def test_a_router_without_topk_and_one_that_changes_its_result_are_refused():
    """Blocks whose router sorts, and whose router swaps the experts, when they are asked to replay."""

    class Sorting(Threshold):
        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            index = (y[:, 1:2] > self.limit).long()
            return self.experts(y, index, torch.ones(len(x), 1))

    class Swapping(Threshold):
        swap = False

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            limits = torch.full_like(y[:, 1], self.limit)
            weights, index = torch.stack((limits, y[:, 1]), 1).topk(1)
            return self.experts(y, 1 - index if self.swap else index, weights)

    def ready(block: Threshold) -> tuple[nn.Module, Engine]:
        model = nn.Module()
        model.blocks = nn.ModuleList([block])
        engine = convert(model, Recipe(), Clock(seed=0))
        engine.at(0, Run(1))
        return model, engine

    model, engine = ready(Sorting(1.1))
    Routes().record(engine, model)
    with pytest.raises(
        ValueError, match=r"^blocks\.0\.experts: .* not the result of one call of torch\.topk"
    ):
        model.blocks[0](tokens())
    routes = Routes()
    model, engine = ready(Swapping(1.1))
    routes.record(engine, model)
    model.blocks[0](tokens())
    with pytest.raises(ValueError, match="called several times in a micro-batch"):
        model.blocks[0](tokens() + 1)
    model, engine = ready(Swapping(1.1))
    routes.replay(engine, model)
    x = tokens() - 1  # whose own router would send all but the last two to expert 0
    scores = torch.tensor([1.1] * 2 + [0.15, 0.2, 0.3, 0.9, 1.1, 1.3])
    torch.testing.assert_close(model.blocks[0](x), x * scores[:, None], rtol=0.02, atol=0.02)  # of bf16
    engine.clock.step = 1
    with pytest.raises(ValueError, match=r"^blocks\.0\.experts: .* no routes of step 1, micro-batch 0"):
        model.blocks[0](x)
    never, other = ready(Swapping(1.1))
    Routes().replay(other, never)
    with pytest.raises(ValueError, match="no routes of step 0, micro-batch 0"):
        never.blocks[0](x)
    engine.clock.step = 0
    model.blocks[0].swap = True
    with pytest.raises(ValueError, match=r"changes the result of torch\.topk"):
        model.blocks[0](tokens())


def test_replay_is_refused_outside_forks_on_several_ranks_compiled_and_in_own_loops(tmp_path):
    workload, recipe = moe(tmp_path), routed("nvfp4", "replay")
    with pytest.raises(ValueError, match="which only forks have"):
        workload.records(TrialRun(recipe, 0, "emulated", "cpu", Telemetry()))
    with pytest.raises(ValueError, match="has no unquantised training to follow"):
        ablate.convert(Blocks(1.1), recipe, seed=0, steps=1)
    assert "is for one rank" in next(Layout(ranks=2).misfits(workload, recipe, "emulated"))
    compiled = moe(tmp_path, compile=True)
    assert any("routing: replay" in why for name, why in compiled.contradictions(recipe) if name == "compile")
    keys = content(tmp_path, shape={"model": MOE}, recipe="nvfp4", ablate=None)
    for name in ("layers", "width", "heads"):
        del keys["workload"]["gpt"][name]
    keys["arms"] = {"held": {"recipe.experts.routing": "replay"}}
    whole, forks = tmp_path / "whole.yaml", tmp_path / "forks.yaml"
    whole.write_text(json.dumps(keys))
    forks.write_text(json.dumps(keys | {"design": {"positions": [0.5], "window": 0.25, "horizons": [1]}}))
    assert problems(forks) == []
    found = problems(whole)
    assert len(found) == 1
    assert "design: is missing: arm 'held'" in str(found[0])
