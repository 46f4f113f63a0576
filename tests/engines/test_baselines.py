"""The baselines beside NVFP4, as their presets train with them: each operand of a layer by its definition in other people's types.

The quantisers alone are compared with torchao, ml_dtypes and Transformer Engine in ablate/verification/peers.py. Here the presets are, in all six
slots of a layer, along the dimension that each product contracts, and the products that follow.
"""

import ml_dtypes
import numpy as np
import pytest
import torch
from support.linears import Watch, drawn, exact, layer, run

from ablate.recipes import PRESETS
from ablate.recipes.recipe import SLOTS

TYPES = {
    "e2m1": (ml_dtypes.float4_e2m1fn, 6.0, 2),
    "e4m3": (ml_dtypes.float8_e4m3fn, 448.0, 8),
    "e5m2": (ml_dtypes.float8_e5m2, 57344.0, 15),
}
"""Type, largest value, exponent of its largest power of two."""
TOKENS, INPUTS, OUTPUTS = 64, 96, 128
CONTRACTED = {
    "fprop.x": "x",
    "fprop.w": "w",
    "dgrad.g": "g",
    "dgrad.w": "w.T",
    "wgrad.g": "g.T",
    "wgrad.x": "x.T",
}


def cast(y: np.ndarray, element: str) -> np.ndarray:
    """To the type's nearest value, saturating; float64."""
    kind, top, _ = TYPES[element]
    return np.clip(y, -top, top).astype(np.float32).astype(kind).astype(np.float64)


def microscaled(x: np.ndarray, element: str, rule: str) -> tuple[np.ndarray, float]:
    """OCP MX 1.0: blocks of 32 along the last dimension share a power of two, of which 1 stands for a block of zeros."""
    _, top, exponent = TYPES[element]
    tiles = x.reshape(len(x), -1, 32)
    amax = np.abs(tiles).max(axis=2, keepdims=True)
    amax = np.where(amax == 0, 2.0**exponent, amax)
    fraction, power = np.frexp(
        amax if rule == "floor" else amax / top
    )  # value = fraction * 2^power, fraction in [.5, 1)
    scale = np.exp2(power - 1 - exponent) if rule == "floor" else np.exp2(power - (fraction == 0.5))
    return (cast(tiles / scale, element) * scale).reshape(x.shape), 1.0


def per_tensor(x: np.ndarray, element: str, amax: float) -> tuple[np.ndarray, float]:
    """The whole tensor by one fp32 scale, maximum / amax, and the factor that undoes it."""
    top = TYPES[element][1]
    return cast(
        (x.astype(np.float32) * (np.float32(top) / np.float32(amax))).astype(np.float64), element
    ), amax / top


def fp8(slot: str) -> str:
    """Five exponent bits for gradients, four for what the forward pass uses."""
    return "e5m2" if slot.endswith("g") else "e4m3"


BASELINES = {
    "mxfp4": lambda x, slot: microscaled(x, "e2m1", "floor"),
    "mxfp8": lambda x, slot: microscaled(x, "e4m3", "ceil"),
    "fp8_current": lambda x, slot: per_tensor(x, fp8(slot), float(np.abs(x).max())),
}


def given() -> dict[str, torch.Tensor]:
    """x, w and dy with tokens that are 30 times larger, a block of zeros, values that are subnormal in fp8, and exact ties."""
    x, w, g = (
        drawn(TOKENS, INPUTS, seed=1, outliers=True),
        drawn(OUTPUTS, INPUTS, seed=2),
        drawn(TOKENS, OUTPUTS, seed=3, outliers=True),
    )
    x[:32, :32] = 0
    g[3] *= 2.0**-14
    w[:, 32:64] = (w[:, 32:64] * 4).round() / 4
    return {"x": x.bfloat16().float(), "w": w.bfloat16().float(), "g": g.bfloat16().float()}


def oriented(tensors: dict[str, torch.Tensor], slot: str) -> np.ndarray:
    """The operand as its product takes it, what is contracted last; float64."""
    name, _, turned = CONTRACTED[slot].partition(".")
    x = tensors[name].double().numpy()
    return np.ascontiguousarray(x.T if turned else x)


@pytest.mark.parametrize("preset", BASELINES)
def test_every_operand_of_a_baseline_is_its_definition_to_the_bit(preset):
    tensors = given()
    module = layer(PRESETS[preset](), tensors["w"])
    module.context.probe = Watch()
    run(module, tensors["x"], tensors["g"])
    assert set(module.context.probe.seen) == set(SLOTS)
    for slot, operand in module.context.probe.seen.items():
        expected, _ = BASELINES[preset](oriented(tensors, slot), slot)
        assert np.array_equal(operand.values.double().numpy(), expected), slot


@pytest.mark.parametrize("preset", BASELINES)
def test_the_products_of_a_baseline_are_those_of_its_operands(preset):
    tensors = given()
    results = run(layer(exact(PRESETS[preset]()), tensors["w"]), tensors["x"], tensors["g"])
    operands = {slot: BASELINES[preset](oriented(tensors, slot), slot) for slot in SLOTS}
    for result, (left, right) in zip(
        results, (("fprop.x", "fprop.w"), ("dgrad.g", "dgrad.w"), ("wgrad.g", "wgrad.x")), strict=True
    ):
        (a, one), (b, other) = operands[left], operands[right]
        # fp32 additions in any order, and a rounding of each factor: 2^-23 of the sum of magnitudes for each term
        close = (
            np.abs(result.double().numpy() - a @ b.T * one * other)
            <= (a.shape[1] + 8) * 2.0**-23 * (np.abs(a) @ np.abs(b).T) * one * other
        )
        assert close.all(), left


def test_delayed_fp8_scales_by_the_largest_amax_of_the_steps_before():
    tensors, sizes = given(), (1.0, 4.0, 0.5, 2.0)
    module = layer(PRESETS["fp8_delayed"](), tensors["w"])
    module.context.probe = Watch()
    for step, size in enumerate(sizes):
        module.clock.step = step
        run(module, tensors["x"] * size, tensors["g"] * size)
        for slot, operand in module.context.probe.seen.items():
            x = oriented(tensors, slot)
            now, before = (1.0, 1.0) if slot.endswith("w") else (size, max(sizes[:step], default=size))
            expected, _ = per_tensor(x * now, fp8(slot), float(np.abs(x).max()) * before)
            assert np.array_equal(operand.values.double().numpy(), expected), (step, slot)
