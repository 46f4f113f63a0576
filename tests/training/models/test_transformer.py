"""The gpt workload's own model: blocks are composed of an attention and any MLP."""

import torch
from support.gpt_runs import NVFP4, gpt
from torch import Tensor, nn

from ablate.engines.emulated import convert
from ablate.numerics.philox import Clock
from ablate.recipes.recipe import Run
from ablate.training.models.transformer import (
    Attention,
    Block,
    SquaredReLU,
    Transformer,
    initialise,
)
from ablate.training.workloads.gpt import Gpt


class Experts(nn.Module):
    """An MLP of two experts; a router that is no subclass of an MLP weighs them."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.router = nn.Linear(width, 2, bias=False)
        self.experts = nn.ModuleList(SquaredReLU(width, hidden) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        weights = self.router(x.float()).softmax(-1).to(x.dtype)
        return sum(weights[..., i : i + 1] * expert(x) for i, expert in enumerate(self.experts))


def of_experts(shape: Gpt) -> Block:
    return Block(
        shape.width, Attention(shape.width, shape.heads, shape.heads, False), Experts(shape.width, 48)
    )


def test_a_block_takes_an_mlp_of_experts_and_a_recipe_quantises_them(shards):
    with torch.device("meta"):
        model = Transformer(gpt(shards), 64, torch.bfloat16, of_experts)
    initialise(model, 0, torch.device("cpu"))
    engine = convert(model, NVFP4, Clock(0))
    assert {
        f"blocks.{b}.mlp.experts.{e}.{name}" for b in (0, 1) for e in (0, 1) for name in ("up", "down")
    } < {*engine.layers}
    engine.at(0, Run(5))
    nn.init.normal_(
        model.head.weight, generator=torch.Generator().manual_seed(1)
    )  # zero stops every gradient
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(2))
    model(tokens, tokens).backward()
    gradients = [layer.weight.grad for layer in engine.layers.values()]
    assert all(grad is not None and grad.abs().sum() > 0 for grad in gradients)


def test_what_writes_to_the_residual_stream_is_drawn_smaller(shards):
    with torch.device("meta"):
        model = Transformer(gpt(shards, width=256, context=16), 64, torch.bfloat16, of_experts)
    initialise(model, 0, torch.device("cpu"))
    for name, weight in model.blocks[0].named_parameters():
        if weight.ndim == 2:
            smaller = name == "attention.out.weight" or name.endswith("down.weight")
            expected = 0.5 * weight.shape[1] ** -0.5 * (0.5 if smaller else 1.0)  # two layers: (2 * 2)^-1/2
            assert abs(weight.std().item() / expected - 1) < 0.1, name
