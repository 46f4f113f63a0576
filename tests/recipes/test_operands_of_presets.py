"""Presets of single papers: operands, number by number, against loops in numpy that follow the papers' rules."""

from random import Random

import numpy as np
import pytest
import torch
from oracles.two_level import adaptive_grids, logarithmic, nvfp4
from support.linears import drawn
from support.quantisers import contents
from torch import nn

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.numerics.philox import GROUP, Clock, random_bits
from ablate.numerics.quantize import quantize
from ablate.recipes import PRESETS


def matrices(rows: int = 32, columns: int = 64) -> list[torch.Tensor]:
    """One matrix of each of four kinds, bf16."""
    kinds = ("normal", "wide range", "few values", "zero blocks")
    return [contents(kind, rows, columns, Random(f"presets {kind}")).bfloat16() for kind in kinds]


def layer(preset: str, inputs: int = 64, outputs: int = 32) -> EmulatedLinear:
    linear = nn.Linear(inputs, outputs, bias=False)
    linear.weight.data = drawn(outputs, inputs, seed=2)
    made = EmulatedLinear(linear, "blocks.0.linear", Clock(0), torch.bfloat16)
    made.products = PRESETS[preset]().products
    return made


@pytest.mark.parametrize(("slot", "transposed"), [("fprop.x", False), ("wgrad.x", True)])
def test_averis_quantises_x_less_its_mean_over_tokens_and_multiplies_the_mean_in_bf16(slot, transposed):
    made, compared = layer("averis"), 0
    for number, x in enumerate(matrices()):
        x = (x.float() + 3 * drawn(1, 64, seed=number)).bfloat16()
        mean = x.float().mean(dim=0, keepdim=True).bfloat16().float().numpy()
        operand = (x.t() if transposed else x).contiguous()
        rest, average = x.float().numpy() - mean, np.broadcast_to(mean, x.shape)
        wanted = nvfp4(np.ascontiguousarray(rest.T if transposed else rest))
        parts = made.operand(operand, slot, made.products.slot(slot), None)
        found = parts[0].dequantize().numpy(), parts[1].values.float().numpy()
        expected = wanted.decoded, average.T if transposed else average
        assert sum(int((a != b).sum()) for a, b in zip(found, expected, strict=True)) == 0
        compared += sum(a.size for a in found)
    assert compared == 4 * 2 * 32 * 64


def test_if4_takes_the_grid_that_errs_less_in_each_block():
    quant, compared, even = PRESETS["if4"]().fprop.x, 0, 0
    for x in matrices():
        operand, expected = quantize(x, quant), adaptive_grids(x.float().numpy())
        assert (operand.values.double().numpy() != expected.astype(np.float64)).sum() == 0
        compared += expected.size
        plain = quantize(x, quant.model_copy(update={"select": None}))
        even += (operand.values != plain.values).sum().item()
    assert compared == 4 * 32 * 64
    assert even > compared / 20


def test_luq_draws_every_gradient_from_its_two_levels():
    quant, clock, compared = PRESETS["luq"]().dgrad.g, Clock(5, step=3), 0
    for x in matrices():
        for operand in (
            quantize(x, quant, clock=clock, where=9),
            quantize(x, quant, clock=clock, where=9, keep=True),
        ):
            bits = random_bits(clock, 9, len(x), x.shape[1] + -x.shape[1] % GROUP, 24, x.device).numpy()
            expected = logarithmic(x.float().numpy(), bits, 24)
            assert (operand.values.double().numpy() != expected).sum() == 0
            compared += expected.size
    assert compared == 4 * 2 * 32 * 64


def test_luq_is_unbiased_below_its_smallest_level_too():
    """The mean of N draws errs as 1 / N, also for magnitudes of which a cast to nearest would leave nothing."""
    x = torch.full((64, 64), 0.4 / 64)  # 0.4 of the smallest level
    x[0, 0] = 1.0
    quant = PRESETS["luq"]().wgrad.g
    draws = torch.stack(
        [quantize(x, quant, clock=Clock(1, step=step), where=4).dequantize() for step in range(16)]
    )
    mean = draws.double().mean().item() - 1 / x.numel()
    assert mean == pytest.approx(0.4 / 64, rel=0.02)
    assert set((draws[0].flatten()[1:] * 64).tolist()) == {0.0, 1.0}
    nearest = quantize(x, quant.model_copy(update={"rounding": "nearest", "bits": 8})).dequantize()
    assert nearest.flatten()[1:].abs().max() == 0


def test_metis_leaves_the_quantiser_what_eight_singular_components_do_not_hold():
    made = layer("metis")
    x = (drawn(48, 8, seed=11) @ drawn(8, 64, seed=12) + 0.01 * drawn(48, 64, seed=13)).bfloat16()
    main, taken = made.operand(x, "fprop.x", made.products.fprop.x, None)
    values = np.linalg.svd(x.double().numpy(), compute_uv=False)
    assert np.linalg.matrix_rank(taken.values.double().numpy(), tol=0.05 * values[0]) <= 8
    rest = (x.double() - taken.values.double()).square().sum().item()
    assert rest <= 1.5 * (values[8:] ** 2).sum() + 2.0**-16 * (values**2).sum()
    assert main.largest.item() < 0.05 * x.abs().max().item()


def test_nemotron3_super_leaves_attention_and_the_last_blocks_in_high_precision(shards):
    from support.experiments import SHAPE

    from ablate.training.workloads.gpt import Gpt

    config = Gpt.model_validate(SHAPE | {"data": shards, "layers": 7})
    recipe = PRESETS["nemotron3_super"]()
    deciders = recipe.layers.deciders(config.linear_layers)
    kept = {layer.name for layer in config.linear_layers if recipe.decided(deciders[layer.name]) is None}
    assert {name for name in kept if "attention" in name} == {
        layer.name for layer in config.linear_layers if "Attention" in layer.classes
    }
    assert {
        layer.block
        for layer in config.linear_layers
        if layer.name in kept and "Attention" not in layer.classes
    } == {5, 6}


def test_quartets_forward_scale_is_that_of_the_deviation_about_the_rotated_blocks_mean():
    """The authors' kernel, in float64: floor(log2) of 2.92247856 / 6 times sqrt(mean(y^2) - mean(y)^2), y the block times H / sqrt(32)."""
    x = torch.randn(64, 128, generator=torch.Generator().manual_seed(5))
    x[:8, 0] = 50.0
    x = x.to(torch.bfloat16)
    fprop = PRESETS["quartet"]().fprop
    made = quantize(x, fprop.x, rotation=fprop.hadamard, clock=Clock(0))
    signs = [[(-1.0) ** (r & c).bit_count() for c in range(32)] for r in range(32)]
    turned = x.double().view(64, 4, 32) @ torch.tensor(signs, dtype=torch.float64) / 32**0.5
    blocks = turned.to(torch.bfloat16).double()
    variance = blocks.square().mean(2) - blocks.mean(2).square()
    exponent = (2.92247856 / 6 * variance.sqrt()).log2()
    sure = (exponent - exponent.round()).abs() > 1e-3
    assert sure.float().mean() > 0.98
    assert torch.equal(made.block_scale.view(64, 4).double()[sure], exponent.floor().exp2()[sure])
    assert made.block_scale.view(64, 4)[:8, 0].max() <= 1
