"""Per-token NVFP4: every operand of the three products against loops over rows and tiles, transposed copies included.

No released implementation of the recipe exists to compare with: tests/oracles/two_level.py is this project's own, written from
the description of Transformer Engine's pull request 3045. Its single casts are compared with Transformer Engine's reference too.
"""

import numpy as np
import pytest
import torch
from oracles import te
from oracles.two_level import nvfp4
from support.cases import every
from torch import nn

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Outer, Quant
from ablate.recipes import PRESETS, SLOTS

TOKENS, INPUTS, OUTPUTS = 48, 64, 32
OPERANDS = {
    "fprop.x": ("x", False),
    "fprop.w": ("w", False),
    "dgrad.g": ("g", False),
    "dgrad.w": ("w", True),
    "wgrad.g": ("g", True),
    "wgrad.x": ("x", True),
}
"""Tensor of each operand, and whether it is transposed, so that its columns are the contraction."""


def tensors() -> dict[str, torch.Tensor]:
    """x [tokens, in], w [out, in] and dy [tokens, out] in bf16, rows and columns of magnitudes from 1e-3 to 1e3."""
    g = torch.Generator().manual_seed(45)
    shapes = {"x": (TOKENS, INPUTS), "w": (OUTPUTS, INPUTS), "g": (TOKENS, OUTPUTS)}

    def drawn(rows: int, columns: int) -> torch.Tensor:
        scales = [10.0 ** torch.randint(-3, 4, shape, generator=g) for shape in ((rows, 1), (1, columns))]
        return (torch.randn(rows, columns, generator=g) * scales[0] * scales[1]).bfloat16()

    return {name: drawn(*shape) for name, shape in shapes.items()}


def expected(slot: str, weights_2d: bool):
    """Return what the oracle makes of an operand: one outer scale a row, but one for a weight in tiles."""
    name, transposed = OPERANDS[slot]
    x = tensors()[name].float()
    x = (x.t() if transposed else x).contiguous().numpy()
    return nvfp4(x, (16, 16), None) if name == "w" and weights_2d else nvfp4(x, (1, 16), 1)


@every(preset=["nvfp4_per_token", "nvfp4_per_token_weight_2d"])
def test_every_operand_of_the_three_products_is_that_of_a_loop_over_rows(preset):
    recipe, given, compared = PRESETS[preset](), tensors(), 0
    for slot in SLOTS:
        name, transposed = OPERANDS[slot]
        x = given[name].t() if transposed else given[name]
        wanted = expected(slot, preset.endswith("2d"))
        for operand in (quantize(x, recipe.slot(slot)), quantize(x, recipe.slot(slot), keep=True)):
            pairs = (
                (operand.values.float().numpy(), wanted.values),
                (np.broadcast_to(operand.amax.numpy().reshape(-1), len(wanted.amax)), wanted.amax),
                (operand.block_scale[:, 0, :, 0].numpy(), wanted.scales),
                (operand.dequantize().numpy(), wanted.decoded),
            )
            assert sum(int((ours != theirs).sum()) for ours, theirs in pairs) == 0
            compared += sum(ours.size for ours, _ in pairs)
    print(f"{preset}: {compared} numbers, none differs from the loops'")
    assert compared > 40_000


@every(preset=["nvfp4_per_token", "nvfp4_per_token_weight_2d"])
def test_the_layer_multiplies_these_operands(preset):
    """y, dx and dw are the products of what the loops decode to, rounded to bf16."""
    recipe, given = PRESETS[preset](), tensors()
    linear = nn.Linear(INPUTS, OUTPUTS, bias=False)
    linear.weight.data = given["w"].float()
    layer = EmulatedLinear(linear, "blocks.0.linear", Clock(0), torch.bfloat16)
    layer.products = recipe.products
    x = given["x"].clone().requires_grad_()
    y = layer(x)
    y.backward(given["g"])
    decoded = {slot: expected(slot, preset.endswith("2d")).decoded.astype(np.float64) for slot in SLOTS}
    results = {"fprop": (y, "x", "w"), "dgrad": (x.grad, "g", "w"), "wgrad": (linear.weight.grad, "g", "x")}
    for product, (found, first, second) in results.items():
        a, b = decoded[f"{product}.{first}"], decoded[f"{product}.{second}"]
        error = np.abs(found.detach().double().numpy() - a @ b.T)
        assert (error <= 2.0**-8 * np.abs(a @ b.T) + 2.0**-16 * (np.abs(a) @ np.abs(b).T)).all()


def test_both_copies_of_a_2d_weight_are_the_same_numbers():
    quant, w = PRESETS["nvfp4_per_token_weight_2d"]().fprop.w, tensors()["w"]
    forward, backward = quantize(w, quant), quantize(w.t(), quant)
    assert torch.equal(forward.dequantize().t(), backward.dequantize())


@pytest.mark.parametrize("rows", ["rows:16", "rows:32"])
def test_outer_scales_of_row_tiles_do_not_give_that(rows):
    quant = Quant(block="16x16", outer=Outer(granularity=rows))
    w = torch.randn(64, 64, generator=torch.Generator().manual_seed(46))
    w[32:] *= 1.7
    forward, backward = quantize(w, quant).dequantize(), quantize(w.t(), quant).dequantize()
    assert (forward.t() != backward).sum() > w.numel() / 2


@every(preset=["nvfp4_per_token", "nvfp4_per_token_weight_2d"])
def test_every_operand_is_a_copy_that_transformer_engines_row_scaled_reference_makes(preset):
    """Released is the row-scaled cast of both copies of a tensor, not the recipe that uses it in all three products."""
    reference, given, compared = te.reference(), tensors(), 0
    for slot, quant in PRESETS[preset]().quantised():
        name, transposed = OPERANDS[slot]
        by_rows = {"row_scaled_nvfp4": True} if quant.outer.granularity == "row" else {}
        maker = reference.nvfp4.NVFP4QuantizerRef(
            dtype=reference.formats.E2M1, quant_tile_shape=quant.tile, **by_rows
        )
        theirs = maker.quantize(given[name])
        ours = quantize(given[name].t() if transposed else given[name], quant)
        codes, scales, amax = (
            (theirs.data_t, theirs.scale_t, theirs.global_amax_col)
            if transposed
            else (theirs.data, theirs.scale, theirs.global_amax_row)
        )
        ours_scales = ours.block_scale[:, 0, :, 0].repeat_interleave(quant.tile[0], 0)
        pairs = (
            (ours.values.float(), te.values(codes, scales)),
            (ours_scales, scales.float()),
            (ours.amax.flatten(), amax.flatten()),
        )
        assert sum(int((a != b).sum()) for a, b in pairs) == 0
        compared += sum(a.numel() for a, _ in pairs)
    print(f"{preset}: {compared} numbers, none differs from Transformer Engine's")
    assert compared > 13_000
