"""Presets: the baselines, and one recipe for each paper.

The problem: comparing a knob with a published recipe needs exactly that recipe. The idea: each preset is a
short function that builds a frozen `Recipe` from the same parts as any other, so `nvfp4` is only 16x16
weights, stochastic output gradients and a rotated wgrad. For example, `recipe: nvfp4` in an experiment starts
from it, and `recipe: [bf16, nvfp4]` under `ablate` compares two presets.

The facts come from the papers, their public code, and Transformer Engine 2.20.2. Each docstring names its
source and, after "Not modelled", the details that the emulation leaves out. No preset models the order of
fp32 additions in a tensor core, or the way hardware draws random bits. docs/reference/recipes.md shows every
preset.
"""

from typing import Any

from ablate.numerics.spec import BlockScale, Dge, Hadamard, Outer, Quant, Range, Select, Transform
from ablate.recipes.layers import Match
from ablate.recipes.recipe import (
    Dgrad,
    Fprop,
    Layers,
    OsciReset,
    Phase,
    Recipe,
    Rule,
    Weights,
    Wgrad,
)

UNBIASED = 17 / 16
"""Headroom that leaves stochastic rounding room above the block's maximum (Quartet II, Four Over Six)."""
EDEN = UNBIASED * 0.93
"""Quartet II's factor of the backward pass: mostly clipping-free, with the smallest error."""


_Turns = tuple[Hadamard | None, Hadamard | None, Hadamard | None]
"""Rotations of fprop, dgrad and wgrad."""
_NONE: _Turns = (None, None, None)
_WGRAD: _Turns = (None, None, Hadamard())
_ROWS = Quant(outer=Outer(granularity="row"))


def _recipe(
    x: Quant,
    w: Quant | None = None,
    g: Quant | None = None,
    turns: _Turns = _NONE,
    w_again: Quant | None = None,
    x_again: Quant | None = None,
    **more: Any,
) -> Recipe:
    """Activations, weights and output gradients, which are as activations if left out; the backward pass has
    `w_again` and `x_again` if given."""
    w, g = w or x, g or x
    return Recipe(
        fprop=Fprop(x=x, w=w, hadamard=turns[0]),
        dgrad=Dgrad(g=g, w=w_again or w, hadamard=turns[1]),
        wgrad=Wgrad(g=g, x=x_again or x, hadamard=turns[2]),
        **more,
    )


def _fp8(element: str, statistic: str = "amax") -> Quant:
    return Quant(element=element, block=None, scale=None, outer=Outer(statistic=statistic, bound=1.0))


def _mx(element: str, scale_rounding: str, **more: Any) -> Quant:
    scale = BlockScale(format="e8m0", rounding=scale_rounding)
    return Quant(element=element, block="1x32", scale=scale, outer=None, **more)


def bf16() -> Recipe:
    """The baseline: every product in bf16 with fp32 accumulation."""
    return Recipe()


def fp32() -> Recipe:
    """Everything in fp32: what bf16 itself costs."""
    return Recipe(dtype="fp32", wgrad=Wgrad(dw="fp32"))


def fp8_current() -> Recipe:
    """FP8 with per-tensor current scaling: E4M3 for x and w, E5M2 for gradients.

    Source: Transformer Engine, Float8CurrentScaling, hybrid.

    Not modelled: TE's fp32 reciprocal of the scale: the product is multiplied by amax / maximum instead, an
    ulp apart.
    """
    return _recipe(_fp8("e4m3"), _fp8("e4m3"), _fp8("e5m2"))


def fp8_delayed() -> Recipe:
    """`fp8_current` with the largest amax of the last 1024 steps (Transformer Engine, DelayedScaling).

    Not modelled: TE's first scale of 1: the first step uses its own amax.
    """
    delayed = "delayed:1024"
    return _recipe(_fp8("e4m3", delayed), _fp8("e4m3", delayed), _fp8("e5m2", delayed))


def mxfp8() -> Recipe:
    """MXFP8: E4M3 in blocks of 32 with power-of-two scales, rounded up.

    Sources: OCP MX v1.0; Transformer Engine, MXFP8BlockScaling.
    """
    return _recipe(_mx("e4m3", "ceil"))


def _mxfp6(element: str, largest_power: float) -> Recipe:
    return _recipe(_mx(element, "floor", range=Range(map_to=largest_power)))


def mxfp6_e2m3() -> Recipe:
    """MXFP6: E2M3 in blocks of 32 with power-of-two scales (OCP MX v1.0, floor rule), all to nearest."""
    return _mxfp6("e2m3", 4.0)


def mxfp6_e3m2() -> Recipe:
    """MXFP6: E3M2 in blocks of 32 with power-of-two scales (OCP MX v1.0, floor rule), all to nearest."""
    return _mxfp6("e3m2", 16.0)


def mxfp4() -> Recipe:
    """MXFP4: E2M1 in blocks of 32 with power-of-two scales (OCP MX v1.0, floor rule), all to nearest."""
    return _recipe(_mx("e2m1", "floor", range=Range(map_to=4.0)))


def nvfp4() -> Recipe:
    """NVIDIA, "Pretraining Large Language Models with NVFP4" (arXiv 2509.25149).

    As in Transformer Engine, with all blocks quantised: 16x16 weight blocks, stochastic rounding of both
    copies of dy, a 16-point Hadamard rotation of wgrad with fixed signs.
    """
    stochastic = Quant(rounding="stochastic")
    return _recipe(Quant(), Quant(block="16x16"), stochastic, _WGRAD)


def nvfp4_paper() -> Recipe:
    """`nvfp4` with the last 15 % of the blocks in bf16, as the paper trains.

    Not modelled: its few other bf16 linears.
    """
    return nvfp4().changed(layers=Layers(last_fraction=0.15))


def fp4_all_the_way() -> Recipe:
    """The recipe of "FP4 All the Way" (arXiv 2505.19115).

    1x16 blocks; stochastic rounding of dy, and of the saved x in wgrad. The backward pass goes to bf16 once
    the gradient's norm is below sqrt(3) times its quantisation noise, looked at every 50 steps. Not modelled:
    the new warm-up of the learning rate there: a recipe never moves it.
    """
    stochastic = Quant(rounding="stochastic")
    phase = Phase(start="noise_ratio:1.7320508:50", slots="backward")
    return _recipe(Quant(), Quant(), stochastic, x_again=stochastic, schedule=(phase,))


def mxfp4_backward() -> Recipe:
    """Amazon, "Training LLMs with MXFP4" (arXiv 2502.20586): forward in bf16; the backward products in MXFP4.

    Operands times 3/4, so that the floor rule never saturates, all rounded stochastically, both products
    rotated by 64 with new signs each call; the products are multiplied by 16/9. Not modelled: its FP8 forward
    variant.
    """
    quant = _mx("e2m1", "floor", range=Range(map_to=4.0, prescale=0.75), rounding="stochastic", bits=24)
    rotation = Hadamard(size=64, signs="per_call")
    return Recipe(
        dgrad=Dgrad(g=quant, w=quant, hadamard=rotation), wgrad=Wgrad(g=quant, x=quant, hadamard=rotation)
    )


def quartet() -> Recipe:
    """Quartet (arXiv 2505.14669): MXFP4 everywhere, with a clipped forward (QuEST).

    Forward: clipped as is best for Gaussian data, rotated by 32, scale from 2.92 standard deviations,
    gradients stopped where it clipped. Backward: rotated with new signs, from the forward copies, stochastic
    with Amazon's 3/4. As in the authors' training code, the mean of each rotated block is no part of that
    deviation: an outlier in the first channel of 32, which the rotation spreads evenly, is clipped. Not
    modelled: its casts' ties (toward zero; here to even), and dgrad and wgrad sharing their signs.
    """
    forward = _mx("e2m1", "floor", range=Range(statistic="std:2.92247856"), estimator="clip_mask")
    gradient = _mx("e2m1", "floor", range=Range(map_to=4.0, prescale=0.75), rounding="stochastic", bits=24)
    again = gradient.changed(source="forward")
    signs = Hadamard(size=32, signs="per_call")
    turns = (Hadamard(size=32, signs="none"), signs, signs)
    return _recipe(forward, forward, gradient, turns, again, again)


def quartet2() -> Recipe:
    """Quartet II (arXiv 2601.22813): Four Over Six forward, MS-EDEN backward.

    1x16 weights, MS-EDEN on all four backward operands. Backward operands are requantised from the forward
    copies after a rotation by 128 with new signs each step. Not modelled: its putting the factor 17/16 * 0.93
    into the tensor scale: here it multiplies block scales; and dgrad and wgrad sharing their signs.
    """
    forward = Quant(select=Select(among="scales"), outer=Outer(bound=256.0))
    gradient = Quant(rounding="ms_eden", range=Range(headroom=EDEN), outer=Outer(bound=256.0))
    again = gradient.changed(source="forward")
    signs = Hadamard(size=128, signs="per_step")
    return _recipe(forward, forward, gradient, (None, signs, signs), again, again)


def tetrajet2() -> Recipe:
    """TetraJet-v2 (arXiv 2510.27527): 1x16 blocks, an fp32 scale per 128.

    Backward operands are rotated by 16 and rounded stochastically. Weights and activations are requantised
    from the forward copies; OutControl keeps the top tenth of x's channels in MXFP8; OsciReset. Not modelled:
    OutControl's fixed choice of channels (here: by norm, each call) and the weights' matching columns (here:
    FP4 like the others).
    """
    outer = Outer(granularity="block:128")
    activation = Quant(outer=outer, transform=Transform(channels=0.1))
    gradient = Quant(outer=outer, rounding="stochastic", bits=24)
    again = gradient.changed(source="forward")
    signs = Hadamard(signs="per_call")
    x_again, weights = again.changed(transform=activation.transform), Weights(osci_reset=OsciReset())
    return _recipe(
        activation, Quant(outer=outer), gradient, (None, signs, signs), again, x_again, weights=weights
    )


def four_over_six() -> Recipe:
    """Four Over Six (arXiv 2512.02010): each block's maximum at 6 or at 4.

    x and w take whichever errs less (MSE), wherever they are used. Unbiased stochastic rounding of gradients
    (headroom 17/16), wgrad rotated by 16, the last 4 of 24 blocks in bf16. Not modelled: selecting among
    stochastically rounded gradients, which is biased (Transformer Engine never does).
    """
    chosen = Quant(select=Select(among="scales"), outer=Outer(bound=256.0))
    gradient = Quant(rounding="stochastic", range=Range(headroom=UNBIASED), outer=Outer(bound=256.0))
    layers = Layers(last_fraction=1 / 6)
    return _recipe(chosen, chosen, gradient, _WGRAD, layers=layers)


def microsoft_fp4() -> Recipe:
    """Microsoft, "Optimizing Large Language Model Training Using FP4 Quantization" (arXiv 2501.17116).

    Forward E2M1 with one scale a token (x) and a channel (w), DGE with k = 5 for the weights, x clamped to
    its .99 quantile with the residual in bf16 (OCC); backward FP8. Not modelled: its FP8 gradient
    communication and optimizer state, its casts' ties (upward) and quantiles of each sign (here: of the
    magnitudes).
    """
    outer = Outer(granularity="row", bound=1.0)
    forward = Quant(block=None, scale=None, outer=outer)
    x = forward.changed(transform=Transform(clamp=0.99))
    w = forward.changed(estimator=Dge())
    return fp8_current().changed(fprop=Fprop(x=x, w=w))


def ufp4() -> Recipe:
    """UFP4 (arXiv 2606.20381, from secondary sources): a uniform 4-bit grid.

    1x16 blocks with unrounded fp32 scales, all three products rotated by 16, stochastic rounding of dy only,
    1D weights. Not modelled: its signs, which are not published (here: fixed).
    """
    quant = Quant(element="int4", scale=BlockScale(format="fp32"), outer=None)
    gradient = quant.changed(rounding="stochastic")
    rotation = Hadamard()
    return _recipe(quant, quant, gradient, (rotation, rotation, rotation))


def ue5m3() -> Recipe:
    """UE5M3 block scales (arXiv 2609.02846): amax held for 50 steps, 16x16 weights.

    Scales have room to grow to 61440; no rotation; stochastic rounding of dy only, no layer in high
    precision. Not modelled: its wider target (2048) for dy in wgrad of the last four MLP outputs, and one
    held amax for both copies of dy.
    """
    scale, outer = BlockScale(format="ue5m3", zero="one"), Outer(statistic="hold:50")
    quant = Quant(scale=scale, outer=outer)
    gradient = quant.changed(rounding="stochastic")
    return _recipe(quant, quant.changed(block="16x16"), gradient)


def row_scaled() -> Recipe:
    """Row-scaled NVFP4 (Transformer Engine, row_scaled_activation): one fp32 amax a row.

    The backward pass is in bf16.

    Not modelled: its MXFP8 backward: set `recipe.dgrad` and `recipe.wgrad` for that.
    """
    return Recipe(fprop=Fprop(x=_ROWS, w=_ROWS))


def healing() -> Recipe:
    """`nvfp4`, then FP8 (current scaling), as MLPerf submissions finish.

    The switch after nine tenths of the run is a choice of this project.
    """
    return nvfp4().changed(schedule=(Phase(start="fraction:0.9", use=fp8_current().products),))


# --- Transformer Engine's mixed recipes (custom_recipes/quantizer_factory_zoo.py, 2.20.2) --------------


def _dequantised(fprop: Fprop) -> Recipe:
    return Recipe(fprop=fprop, dgrad=Dgrad(dequantised=True), wgrad=Wgrad(dequantised=True))


def nvfp4_dequantised() -> Recipe:
    """`nvfp4` forward; the backward products in bf16, on the forward pass's quantised x and w.

    Transformer Engine's `NVFP4BlockScaling(backward_override="dequantized")`, used in reinforcement learning.
    """
    return _dequantised(nvfp4().fprop)


def nvfp4_1d_weight() -> Recipe:
    """`nvfp4` with weights in blocks of 1x16; dgrad's weight is quantised from its forward copy (Transformer
    Engine's example).
    """
    return nvfp4().changed({"fprop.w": Quant(), "dgrad.w": Quant(source="forward_bf16")})


def mxfp8_fwd_nvfp4_bwd() -> Recipe:
    """MXFP8 forward, NVFP4 backward (Transformer Engine's example of a mixed recipe).

    Gradients are rounded stochastically, wgrad is rotated, and dgrad's weight is quantised in 1x16 blocks
    from its MXFP8 copy.
    """
    return nvfp4().changed({"dgrad.w": Quant(source="forward_bf16")}, fprop=mxfp8().fprop)


def mxfp8_fwd_high_precision_bwd() -> Recipe:
    """MXFP8 forward; the backward products in bf16, on the forward pass's quantised x and w (Transformer
    Engine's example, and its `backward_override="dequantized"`).
    """
    return _dequantised(mxfp8().fprop)


def high_precision_fwd_mxfp8_bwd() -> Recipe:
    """Forward in bf16; the backward products in MXFP8 (Transformer Engine's example)."""
    return mxfp8().changed(fprop=Fprop())


def nvfp4_row_scaled_fwd_mxfp8_bwd() -> Recipe:
    """Row-scaled NVFP4 forward, MXFP8 backward on the forward pass's quantised x and w.

    After the report on Composer 2 (arXiv 2603.24477), which trains experts that way. Not modelled: that its
    other linear layers use MXFP8 throughout; write that as a layer rule.
    """
    quant = mxfp8().dgrad.g
    assert quant is not None
    again = quant.changed(source="forward_bf16")
    return Recipe(fprop=_BY_ROWS, dgrad=Dgrad(g=quant, w=again), wgrad=Wgrad(g=quant, x=again))


def nvfp4_row_scaled_fwd_high_precision_bwd() -> Recipe:
    """Row-scaled NVFP4 forward; the backward products in bf16, on the forward pass's quantised x and w
    (Transformer Engine's example).
    """
    return _dequantised(_BY_ROWS)


_BY_ROWS = Fprop(x=_ROWS, w=Quant())


def mxfp4_amd() -> Recipe:
    """AMD's MXFP4 (arXiv 2605.09825, from secondary sources): wgrad rotated by 32, everything to nearest.

    Not modelled: whatever else the paper does; the direction of the block scales, which is that of `mxfp4`
    here, was not checked against it.
    """
    return mxfp4().changed({"wgrad.hadamard": Hadamard(size=32)})


def nvfp4_per_token() -> Recipe:
    """Per-token NVFP4 (Transformer Engine, pull request 3045): an fp32 amax for each row of every operand.

    The transposed copies of wgrad have one for each channel, the weight one for each output (fprop) and input
    (dgrad) feature. All to nearest, in blocks of 1x16, without rotation: `sr` and `rht` turn on what is
    optional there. Not released: the casts are those of Transformer Engine 2.20.2's row-scaled reference, the
    recipe is compared with a reference of this project's own. Not modelled: the arithmetic of its kernels
    where it differs from that reference, and its refusal of rows that are no multiple of 128.
    """
    return _recipe(_ROWS)


def nvfp4_per_token_weight_2d() -> Recipe:
    """`nvfp4_per_token` with 2D weights (Transformer Engine, pull request 3045, `per_token_weight_2d`).

    16x16 weight blocks under one fp32 amax for the tensor, which stands in every row, so that both copies of
    the weight are the same numbers. Outer scales that differ between rows cannot give that
    (docs/reference/numerics.md, section 3). Not modelled: what `nvfp4_per_token` does not.
    """
    return _recipe(_ROWS, Quant(block="16x16"))


def averis() -> Recipe:
    """Averis (arXiv 2603.10444, from its abstract): `nvfp4` with the mean of x split off, not rotated.

    The mean over tokens of every channel of x is multiplied in bf16, in fprop and wgrad; what remains is
    quantised. Not modelled: whether the paper splits output gradients too (here: not), and which weight
    blocks and roundings it starts from (here: those of `nvfp4`).
    """
    x = Quant(transform=Transform(mean=True))
    return nvfp4().changed({"fprop.x": x, "wgrad.x": x, "wgrad.hadamard": None})


def metis() -> Recipe:
    """Metis (arXiv 2509.00404, from its abstract): leading singular components apart from what is quantised.

    1x16 NVFP4 to nearest of x, w and dy less their components of rank 8, which are multiplied in bf16. The
    rank is a choice of this project. Not modelled: quantised factors, its decomposition by random sampling
    (here: subspace iteration), its spectral learning rates and its regulariser.
    """
    return _recipe(Quant(transform=Transform(low_rank=8)))


def if4() -> Recipe:
    """IF4 (arXiv 2603.28765): each block of x and w on the E2M1 or the INT4 grid, whichever errs less (MSE).

    Both grids share an E4M3 scale in blocks of 1x16. Gradients as in `four_over_six`: E2M1, unbiased
    stochastic rounding, wgrad rotated by 16. Not modelled: its recipe of training beyond the format, which
    its abstract does not state, and gradients in IF4, since a choice by error biases stochastic rounding.
    """
    chosen = Quant(select=Select(among="grids"))
    gradient = Quant(rounding="stochastic", range=Range(headroom=UNBIASED))
    return _recipe(chosen, chosen, gradient, _WGRAD)


def luq() -> Recipe:
    """LUQ (arXiv 2112.10769, from secondary sources): gradients at random on a logarithmic grid.

    Output gradients on 0 and seven powers of two below the tensor's amax, rounded stochastically: unbiased
    between two powers, and below the smallest (stochastic underflow). x and w are INT4 to nearest, with one
    scale a tensor. Not modelled: scales of x and w from statistics (SAWB; here: the amax), several samples of
    dy for wgrad, the amax of earlier steps in place of the current one, and its fine-tuning in fp32.
    """
    outer = Outer(bound=1.0)
    int4 = Quant(element="int4", block=None, scale=None, outer=outer)
    gradient = Quant(element="e3m0", block=None, scale=None, outer=outer, rounding="stochastic", bits=24)
    return _recipe(int4, int4, gradient)


def hif4() -> Recipe:
    """HiF4 (HiFloat4, arXiv 2602.11287; trained with in arXiv 2604.08826), in all six operands.

    Units of 64 elements S1P2 (e1m2) with an E6M2 scale, a one-bit exponent for every 8 elements and another
    for every 4: 4.5 bits an element. Scales to nearest, elements to nearest with ties away from zero, as the
    authors' public reference converts. Not modelled: what 2604.08826 adds to the format in its training
    (rotations, stochastic rounding), which is known here from summaries alone: `rht` and `sr` turn them on;
    its conversion of NaN and infinities one by one (here: a NaN spreads to its unit).
    """
    scale = BlockScale(format="e6m2", micro_exponents=(8, 4))
    return _recipe(Quant(element="e1m2", block="1x64", scale=scale, outer=None, rounding="away"))


def nemotron3_super() -> Recipe:
    """Nemotron 3 Super (arXiv 2604.12374): the part of its recipe that applies to a dense transformer.

    `nvfp4` with the last 15 % of the blocks and all linear layers of attention in bf16. Not modelled: what a
    dense transformer lacks: its latent projections in bf16 and its Mamba out-projections in MXFP8.
    """
    attention = Rule(match=Match(within="*Attention*"))
    return nvfp4().changed(layers=Layers(last_fraction=0.15, rules=(attention,)))


def mxfp4_v4() -> Recipe:
    """MXFP4-v4 with Hadamard 32 (public code of MrHuff/mfu-fp4-training, its benchmark mxfp4_h32).

    A block's scale is the power of two at or above its largest magnitude, which maps to 6; products are
    divided by 36. Weights share a scale in tiles of 32x32, halved where the magnitude is below 0.87 of it.
    dgrad's dy is rounded stochastically, wgrad's to nearest after a rotation by 32 with Transformer Engine's
    signs. Not modelled: its amax of rotated values before they are rounded to bf16; the direction in which it
    rounds the scales of x and dy, which its configuration leaves open (here: up, like the weights').
    """
    scale, power = BlockScale(format="e8m0", rounding="ceil"), Range(map_to=1.0, prescale=6.0)
    quant = Quant(block="1x32", scale=scale, range=power, outer=None)
    weight = quant.changed({"scale.halve_below": 0.87}, block="32x32")
    return Recipe(
        fprop=Fprop(x=quant, w=weight),
        dgrad=Dgrad(g=quant.changed(rounding="stochastic"), w=weight),
        wgrad=Wgrad(g=quant, x=quant, hadamard=Hadamard(size=32)),
    )


PRESETS = {
    preset.__name__: preset
    for preset in (
        *(bf16, fp32, fp8_current, fp8_delayed, mxfp8, mxfp6_e2m3, mxfp6_e3m2, mxfp4),
        *(nvfp4, nvfp4_paper, fp4_all_the_way, mxfp4_backward, quartet, quartet2, tetrajet2),
        *(four_over_six, microsoft_fp4, ufp4, ue5m3, row_scaled, healing),
        *(nvfp4_dequantised, nvfp4_1d_weight, mxfp8_fwd_nvfp4_bwd, mxfp8_fwd_high_precision_bwd),
        *(high_precision_fwd_mxfp8_bwd, nvfp4_row_scaled_fwd_mxfp8_bwd),
        *(nvfp4_row_scaled_fwd_high_precision_bwd, mxfp4_amd, mxfp4_v4),
        *(nvfp4_per_token, nvfp4_per_token_weight_2d, averis, metis, if4, luq, hif4, nemotron3_super),
    )
}
