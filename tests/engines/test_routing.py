"""Routes of tokens: flips are those counted by hand, none without quantisation, and none when they are replayed."""

import pytest
import torch
from support.experiments import SHAPE, shards
from support.gpt_runs import column
from torch import Tensor, nn

import ablate
from ablate.numerics.spec import Outer, Quant
from ablate.recipes.presets import PRESETS
from ablate.recipes.recipe import Fprop, Recipe
from ablate.training.loop import Record, Telemetry
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
