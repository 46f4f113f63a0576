"""Mixtures of experts of the gpt workload: against a loop over tokens in fp64, and as a part of the whole model."""

import math

import pytest
import torch
from support.cases import every
from support.gpt_runs import NVFP4, column, converted, gpt, train
from torch import Tensor
from torch.nn import functional as F

from ablate.numerics.philox import Clock
from ablate.recipes import PRESETS
from ablate.recipes.experts import Experts as Treatment
from ablate.training.models.mixture import Experts, Mixture, Router, imbalance
from ablate.training.models.transformer import MLPS, Transformer, initialise

EIGHT = {"count": 8}
FP32 = PRESETS["fp32"]()


def mixture(count: int, top_k: int, mlp: str, shared: int, seed: int = 0) -> Mixture:
    """Return a mixture of width 16 with experts of width 24, whose weights are normal numbers over 4."""
    model = Mixture(
        Router(16, count, top_k),
        Experts(16, 24, count, top_k, mlp == "swiglu"),
        MLPS[mlp](16, shared * 24) if shared else None,
    )
    draws = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.25, generator=draws)
    return model


def token_by_token(weights: dict[str, Tensor], x: Tensor, top_k: int, mlp: str) -> tuple[Tensor, Tensor]:
    """Return output and load-balancing loss of a mixture, in fp64, from its definition."""

    def expert(first: Tensor, down: Tensor, token: Tensor) -> Tensor:
        up = first @ token
        if mlp == "relu2":
            return down @ up.clamp(min=0) ** 2
        half = len(up) // 2
        return down @ (up[:half] * up[:half].sigmoid() * up[half:])

    first = weights["experts.gate_up_proj" if mlp == "swiglu" else "experts.up_proj"]
    count, outputs, loads, means = len(first), [], [0] * len(first), 0
    for token in x:
        exponentials = (weights["router.weight"] @ token).exp()
        p = exponentials / exponentials.sum()
        chosen = sorted(range(count), key=lambda e: -p[e].item())[:top_k]
        total = sum(p[e] for e in chosen) if top_k > 1 else 1
        y = sum(p[e] / total * expert(first[e], weights["experts.down_proj"][e], token) for e in chosen)
        if "shared.up.weight" in weights:
            y = y + expert(weights["shared.up.weight"], weights["shared.down.weight"], token)
        outputs.append(y)
        means = means + p / len(x)
        for e in chosen:
            loads[e] += 1
    return torch.stack(outputs), count * sum(
        load / (top_k * len(x)) * means[e] for e, load in enumerate(loads)
    )


@every(routing=[(8, 1), (8, 2), (3, 3), (16, 4)], mlp=[*MLPS], shared=[0, 2])
def test_a_mixture_and_its_gradients_equal_a_loop_over_tokens(routing, mlp, shared):
    count, top_k = routing
    model = mixture(count, top_k, mlp, shared)
    draws = torch.Generator().manual_seed(1)
    x = torch.randn(2, 11, 16, generator=draws, requires_grad=True)
    dy = torch.randn(2, 11, 16, generator=draws)
    exact = {name: p.detach().double().requires_grad_() for name, p in model.named_parameters()}
    own_x = x.detach().double().requires_grad_()
    y, balance = model(x)
    expected, own_balance = token_by_token(exact, own_x.flatten(0, 1), top_k, mlp)
    torch.testing.assert_close(y.double().flatten(0, 1), expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(balance.double(), own_balance, rtol=1e-6, atol=0)
    ((y * dy).sum() + 3 * balance).backward()
    ((expected * dy.double().flatten(0, 1)).sum() + 3 * own_balance).backward()
    torch.testing.assert_close(x.grad.double(), own_x.grad, rtol=1e-4, atol=1e-5)
    for name, parameter in model.named_parameters():
        assert exact[name].grad.abs().max() > 0, name
        torch.testing.assert_close(parameter.grad.double(), exact[name].grad, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_experts_equal_one_grouped_product_bit_for_bit(dtype):
    model, draws = mixture(4, 2, "swiglu", 0), torch.Generator().manual_seed(2)
    x = torch.randn(37, 16, generator=draws).to(dtype)
    index, weights, _ = model.router(x)
    order = index.flatten().argsort(stable=True)
    ends = index.flatten().bincount(minlength=4).cumsum(0).to(torch.int32)
    packed = (model.experts.gate_up_proj, model.experts.down_proj)
    first, down = (parameter.to(dtype).transpose(1, 2) for parameter in packed)
    gate, up = F.grouped_mm(x[order // 2], first, offs=ends).chunk(2, dim=-1)
    y = F.grouped_mm(F.silu(gate) * up, down, offs=ends) * weights.flatten()[order, None]
    expected = y[order.argsort()].view(37, 2, 16).sum(1).to(dtype)
    assert model.experts(x, index, weights).equal(expected)


def test_the_router_computes_in_fp32_and_an_expert_without_tokens_has_a_zero_gradient():
    model = mixture(4, 1, "swiglu", 0)
    with torch.no_grad():
        model.router.weight[2] = 0
        model.router.weight[:, 0] = torch.tensor([1.0, 2.0, -50.0, 3.0])
    x = torch.randn(1, 9, 16, generator=torch.Generator().manual_seed(3)).to(torch.bfloat16)
    x[..., 0] = 1
    y, balance = model(x)
    assert (y.dtype, balance.dtype) == (torch.bfloat16, torch.float32)
    y.float().square().sum().backward()
    gradients = model.experts.down_proj.grad.abs().amax((1, 2))
    assert gradients[2] == 0
    assert gradients.max() > 0


def test_the_load_balancing_loss_has_its_closed_forms():
    index = torch.arange(8).repeat(5)[:, None]
    even = torch.full((40, 8), 1 / 8)
    assert imbalance(even, index) == 1
    one = torch.zeros(40, 8).index_fill_(1, torch.tensor(3), 1.0)
    assert imbalance(one, torch.full((40, 1), 3)) == 8
    pairs = torch.tensor([[0, 1], [0, 2]])
    probabilities = torch.tensor([[0.5, 0.3, 0.2], [0.6, 0.1, 0.3]], requires_grad=True)
    loss = imbalance(probabilities, pairs)
    loss.backward()
    assert loss.item() == pytest.approx(3 * (0.5 * 0.55 + 0.25 * 0.2 + 0.25 * 0.25))
    torch.testing.assert_close(probabilities.grad, 3 / 2 * torch.tensor([[0.5, 0.25, 0.25]] * 2))


# --- in the model ---------------------------------------------------------------------------------


def built(config, seed: int = 0, head: bool = False) -> Transformer:
    """Return the workload's model in fp32; with `head`, its head is not zero."""
    with torch.device("meta"):
        model = Transformer(config, 64, torch.float32)
    initialise(model, seed, torch.device("cpu"))
    if head:
        torch.nn.init.normal_(model.head.weight, std=0.1, generator=torch.Generator().manual_seed(1))
    return model


def test_initial_weights_depend_on_the_seed_alone_and_have_the_sizes_of_linears(shards):
    config = gpt(shards, width=256, experts=EIGHT | {"shared": 1})
    first, again, other = built(config), built(config), built(config, 1)
    for name, weight in first.blocks[0].named_parameters():
        assert weight.equal(again.blocks[0].get_parameter(name)), name
        if weight.ndim > 1:
            assert not weight.equal(other.blocks[0].get_parameter(name)), name
            smaller = name in ("attention.out.weight", "mlp.experts.down_proj", "mlp.shared.down.weight")
            expected = 0.5 * weight.shape[-1] ** -0.5 * (0.5 if smaller else 1.0)  # (2 * 2 blocks)^-1/2
            assert weight.std().item() == pytest.approx(expected, rel=0.1), name


def test_the_loss_is_the_cross_entropy_and_its_gradient_has_the_auxiliary_loss(shards):
    tokens = torch.randint(64, (2, 16), generator=torch.Generator().manual_seed(2))
    grads, losses = {}, {}
    for weight in (0.0, 0.5, 1.0):
        model = built(gpt(shards, experts=EIGHT | {"auxiliary": weight}), head=True)
        losses[weight] = model(tokens, tokens)
        losses[weight].backward()
        grads[weight] = model.blocks[0].mlp.router.weight.grad
        assert (model.imbalance is None) == (weight == 0)
        expected = F.cross_entropy(model(tokens), tokens.flatten())
        assert losses[weight].item() == expected.item() == model.eval()(tokens, tokens).item()
    change = grads[1.0] - grads[0.0]
    assert change.abs().max() > 1e-3
    torch.testing.assert_close(grads[0.5] - grads[0.0], change / 2, rtol=1e-3, atol=1e-7)


def test_a_run_records_the_imbalance_apart_as_the_mean_over_micro_batches(shards):
    config = gpt(shards, experts=EIGHT, accumulate=2, steps=3, eval_every=3)
    first = train(config, FP32)[0].metrics
    model, batch = built(config), config.windows(0, torch.device("cpu"))[0]
    seen = []
    for micro_batch in (0, 1):
        model(*batch(0, micro_batch))
        seen.append(model.imbalance.item())
    assert seen[0] != seen[1]
    assert first["train/imbalance"] == pytest.approx(sum(seen) / 2, rel=1e-6)
    assert first["train/loss"] == pytest.approx(math.log(64), rel=1e-6)  # a new head is zero
    without = train(
        config.model_copy(update={"experts": config.experts.model_copy(update={"auxiliary": 0.0})})
    )
    assert column(without, "train/imbalance") == {}


def test_a_load_balancing_loss_evens_out_the_loads(shards):
    def last(weight: float) -> float:
        config = gpt(shards, experts=EIGHT | {"auxiliary": weight}, batch=8, steps=40, eval_every=40)
        return train(config, FP32)[-1].metrics["train/imbalance"]

    assert last(0.3) < 1.1 < last(1e-6)


# --- as a recipe sees it --------------------------------------------------------------------------


@every(mlp=[*MLPS], shared=[0, 2])
def test_a_plan_lists_the_layers_that_a_recipe_is_applied_to(mlp, shared, shards):
    config = gpt(shards, mlp=mlp, experts={"count": 3, "shared": shared})
    split = NVFP4.model_copy(update={"experts": Treatment(gate_up="split")})
    _, engine = converted(config, split, Clock(0))
    planned = [
        (layer.name, layer.block, layer.classes) for layer in split.experts.matrices(config.linear_layers)
    ]
    assert planned == [(layer.name, layer.block, layer.classes) for layer in engine.placed]
    model, engine = converted(config, NVFP4, Clock(0))
    assert sorted(config.linear_layers) == sorted(engine.placed)
    first = "gate_up" if mlp == "swiglu" else "up"
    assert {f"blocks.1.mlp.experts.2.{first}", "blocks.1.mlp.experts.2.down"} < {*config.linears}
    assert ("blocks.0.mlp.shared.down" in config.linears) == (shared > 0)
    parameters = {name: p.numel() for name, p in model.named_parameters() if "blocks" in name and p.ndim > 1}
    assert config.parameters() == sum(parameters.values())
    routers = sum(n for name, n in parameters.items() if name.endswith("router.weight"))
    of_experts = sum(n for name, n in parameters.items() if ".experts." in name)
    multiplied = sum(parameters.values()) - routers - of_experts / 3  # two of three experts
    assert sum(layer.weights for layer in config.linear_layers) == pytest.approx(multiplied, rel=1e-3)
    assert config.expert_width == 32 * (1 if shared else 2)  # a third, or a quarter, of 96, rounded up
