"""Tests of a layer under the rarer fields of a recipe, against the same computation written out slowly in float64."""

import math

import numpy as np
import pytest
import torch
from support.cases import every
from support.linears import Watch, drawn, exact, layer, run
from torch import Tensor, nn

from ablate.engines.emulated import convert
from ablate.numerics.philox import Clock
from ablate.numerics.product import linear, multiplying
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import BlockScale, Dge, Hadamard, Outer, Quant, Range, Transform
from ablate.numerics.transform import CHANNEL_FORMATS
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.recipe import DIRECTIONS, Dgrad, Fprop, Run, Wgrad
from ablate.verification.machine import facts

TE_SIGNS = [1, 1, 1, -1, 1, -1, -1, -1, -1, -1, -1, 1, -1, 1, -1, -1]
E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6]


def array(x: Tensor) -> np.ndarray:
    return x.detach().double().numpy()


def quantised(x: np.ndarray, quant: Quant, **more) -> np.ndarray:
    """Return a matrix as the tested quantiser (tests/numerics) quantises it, without its padding."""
    return array(quantize(torch.from_numpy(np.ascontiguousarray(x)).float(), quant, **more).dequantize())[
        :, : x.shape[1]
    ]


def bf16(x: np.ndarray) -> np.ndarray:
    return array(torch.from_numpy(x).to(torch.bfloat16))


def hadamard(size: int, signs: list[int] | None = None) -> np.ndarray:
    """diag(signs) H / sqrt(size), element by element."""
    h = [[(-1) ** bin(r & c).count("1") for c in range(size)] for r in range(size)]
    return np.array(h) * np.array(signs or [1] * size)[:, None] / math.sqrt(size)


def turned(x: np.ndarray, rotation: np.ndarray) -> np.ndarray:
    """x, every group of columns times the rotation."""
    size = len(rotation)
    return np.hstack([x[:, i : i + size] @ rotation for i in range(0, x.shape[1], size)])


def close(mine: Tensor, expected: np.ndarray, magnitude: np.ndarray, terms: int) -> bool:
    """Within what the order of fp32 additions, and one rounding of each factor, can move: `terms` units of 2^-24 of the magnitudes."""
    return bool((np.abs(array(mine) - expected) <= (terms + 8) * 2.0**-23 * magnitude + 1e-30).all())


# --- operands in parts ----------------------------------------------------------------------------


def parts(x: np.ndarray, transform: Transform) -> tuple[np.ndarray, list[tuple[np.ndarray, Quant | None]]]:
    """x [tokens, channels]: what is left to quantise, and what was taken out, with its quantiser."""
    rest, taken = x.copy(), []
    if transform.mean:
        mean = bf16(np.tile(x.mean(axis=0), (len(x), 1)))
        rest = rest - mean
        taken.append((mean, None))
    if transform.channels:
        norms = np.linalg.norm(rest, axis=0)
        top = np.argsort(-norms)[: max(1, round(transform.channels * len(norms)))]
        kept = np.zeros_like(rest)
        kept[:, top] = rest[:, top]
        kept = bf16(kept)
        rest = rest - kept
        taken.append((kept, CHANNEL_FORMATS[transform.channels_in]))
    if transform.clamp:
        magnitudes = np.sort(np.abs(rest), axis=None)
        limit = magnitudes[math.ceil(round(transform.clamp * magnitudes.size, 9)) - 1]
        clamped = np.clip(rest, -limit, limit)
        if transform.residual:
            taken.append((bf16(rest - clamped), None))
        rest = clamped
    return rest, taken


TRANSFORMS = {
    "mean": Transform(mean=True),
    "channels in mxfp8": Transform(channels=0.1),
    "channels in bf16": Transform(channels=0.25, channels_in="bf16"),
    "clamp and residual": Transform(clamp=0.95),
    "clamp alone": Transform(clamp=0.95, residual=False),
    "all": Transform(mean=True, channels=0.1, clamp=0.99),
}
TOKENS, INPUTS, OUTPUTS = 48, 64, 80
SPLIT = ("fprop.x", "dgrad.g", "wgrad.g", "wgrad.x")


def with_slot(
    slot: str, quant: Quant, other: Quant | None = None, rotation: Hadamard | None = None
) -> Recipe:
    """A recipe that quantises one slot so, and the other operand of its product otherwise."""
    product, operand = slot.split(".")
    kind = {"fprop": Fprop, "dgrad": Dgrad, "wgrad": Wgrad}[product]
    names = [name for name in kind.model_fields if len(name) == 1]
    fields = {name: quant if name == operand else other for name in names}
    return exact(Recipe(**{product: kind(**fields, hadamard=rotation)}))


def products(recipe: Recipe, given: dict[str, Tensor], clock: Clock | None = None) -> dict[str, Tensor]:
    """The three products of a layer of weight w, by name."""
    return dict(
        zip(
            DIRECTIONS["all"],
            run(layer(recipe, given["w"], clock=clock), given["x"], given["g"]),
            strict=True,
        )
    )


def tensors() -> dict[str, Tensor]:
    """x with hot channels and a mean, w, and dy with hot tokens."""
    x = drawn(TOKENS, INPUTS, seed=1)
    x[:, ::9] *= 20
    x[:, 5] += 7
    return {
        "x": x.bfloat16().float(),
        "w": drawn(OUTPUTS, INPUTS, seed=2),
        "g": drawn(TOKENS, OUTPUTS, seed=3, outliers=True),
    }


@every(how=TRANSFORMS, slot=SPLIT)
def test_the_parts_of_an_operand_add_up_in_the_product(slot, how):
    given, quant = tensors(), Quant(transform=TRANSFORMS[how])
    results = products(with_slot(slot, quant, Quant()), given)
    product, operand = slot.split(".")
    rest, taken = parts(
        array(given[operand]), quant.transform
    )  # tokens by channels, whatever the product contracts
    turn = np.transpose if product == "wgrad" else np.asarray
    mine = quantised(turn(rest), Quant()) + sum(
        turn(part) if how is None else quantised(turn(part), how) for part, how in taken
    )
    left = {
        "fprop": given["w"],
        "dgrad": given["w"].t(),
        "wgrad": given["g"].t() if operand == "x" else given["x"].t(),
    }[product]
    other = quantised(array(left), Quant())
    a, b = (other, mine) if slot == "wgrad.x" else (mine, other)
    # 2^-7 of a few elements: a mean in fp32 may round to another bf16 than one in float64
    slack = 2.0**-7 * np.abs(a).mean() * np.abs(b).mean() if quant.transform.mean else 0
    assert (np.abs(array(results[product]) - a @ b.T) <= 1e-5 * (np.abs(a) @ np.abs(b).T) + 16 * slack).all()
    assert not torch.equal(results[product], products(with_slot(slot, Quant(), Quant()), given)[product])


@every(how=TRANSFORMS, slot=SPLIT, rotation=(None, Hadamard()))
def test_rows_and_columns_that_a_product_leaves_out_are_zero_or_equal(slot, how, rotation):
    """A rotation mixes the channels of fprop and dgrad, and the tokens of wgrad."""
    quant = Quant(transform=TRANSFORMS[how])
    mine = layer(with_slot(slot, quant, Quant(), rotation), tensors()["w"])
    x = tensors()[slot[-1]].bfloat16()
    named = 0
    for part in mine.operand(x.t() if slot.startswith("wgrad") else x, slot, quant, rotation):
        values = part.values
        if part.nonzero is not None:
            dimension, kept = part.nonzero
            others = [i for i in range(values.shape[dimension]) if i not in kept.tolist()]
            assert not values.index_select(dimension, torch.tensor(others)).any()
        if part.equal is not None:
            assert torch.equal(values, values.narrow(part.equal, 0, 1).expand_as(values))
        named += (part.nonzero is not None) + (part.equal is not None)
    along = rotation is not None
    transform, of_tokens = quant.transform, slot.startswith("wgrad")
    expected = bool(transform.mean) * (not (along and of_tokens))
    expected += bool(transform.channels) * (not along or of_tokens)
    assert named == expected


@pytest.mark.parametrize("slot", ["fprop.x", "wgrad.g"])
def test_a_low_rank_part_is_multiplied_beside_the_rest(slot):
    given = tensors()
    big = "x" if slot == "fprop.x" else "g"
    rows, columns = given[big].shape
    low = drawn(rows, 2, seed=4) @ drawn(2, columns, seed=5) * 50
    given[big] = (low + given[big].clamp(-3, 3)).bfloat16().float()
    results = {}
    for name, quant in {
        "split": Quant(transform=Transform(low_rank=2)),
        "whole": Quant(),
        "none": None,
    }.items():
        y, _, dw = run(layer(with_slot(slot, quant), given["w"]), given["x"], given["g"])
        results[name] = y if slot == "fprop.x" else dw
    error = {name: (results[name] - results["none"]).norm() for name in ("split", "whole")}
    # Left are noise of deviation 1 and the low rank's own rounding to bf16, instead of a tensor of deviation 70: about 20 times less.
    assert error["split"] < error["whole"] / 8


def test_splitting_is_of_the_operand_named_alone():
    given = tensors()
    recipe = with_slot("fprop.x", Quant(transform=Transform(mean=True)), Quant())
    module = layer(recipe, given["w"])
    x, w = (given[name].bfloat16() for name in "xw")
    assert len(module.operand(x, "fprop.x", recipe.fprop.x, None)) == 2
    assert len(module.operand(w, "fprop.w", recipe.fprop.w, None)) == 1


# --- from the forward copy ------------------------------------------------------------------------


@pytest.mark.parametrize("signs", [None, "none", "fixed"])
@pytest.mark.parametrize("inputs", [64, 40])
def test_a_backward_operand_from_the_forward_copy_is_that_copy_rotated_back(signs, inputs):
    rotation = signs and Hadamard(size=16, signs=signs)
    again = Quant(source="forward")
    recipe = Recipe(
        fprop=Fprop(x=Quant(), w=Quant(block="1x32"), hadamard=rotation),
        dgrad=Dgrad(w=again),
        wgrad=Wgrad(g=Quant(), x=again),
    )
    x, w, dy = drawn(48, inputs, seed=1), drawn(80, inputs, seed=2), drawn(48, 80, seed=3)
    module = layer(recipe, w)
    module.context.probe = Watch()
    run(module, x, dy)
    for forward, backward, tensor in (("fprop.x", "wgrad.x", x), ("fprop.w", "dgrad.w", w)):
        quant = recipe.slot(forward)
        if rotation:
            r = hadamard(16, TE_SIGNS if signs == "fixed" else None)
            padded = np.pad(array(tensor), ((0, 0), (0, -inputs % 16)))
            h = bf16(turned(padded, r))
            copy = turned(quantised(h, quant), r.T)[:, :inputs]
        else:
            copy = quantised(array(tensor), quant)
        source = array(module.context.probe.seen[backward].source)[:inputs, : copy.shape[0]]
        assert np.abs(source - copy.T).max() <= 1e-6 * np.abs(copy).max()  # fp32 in the layer, float64 here
        assert np.abs(source - array(tensor).T).max() > 1e-3


@pytest.mark.parametrize("signs", [None, "none", "fixed"])
def test_a_dequantised_backward_multiplies_the_forward_copies_rounded_to_bf16(signs):
    """The oracle quantises, rotates and multiplies by itself, in float64."""
    rotation = signs and Hadamard(size=16, signs=signs)
    recipe = Recipe(
        fprop=Fprop(x=Quant(), w=Quant(block="16x16"), hadamard=rotation),
        dgrad=Dgrad(dequantised=True),
        wgrad=Wgrad(dequantised=True),
    )
    x, w, dy = drawn(48, 64, seed=1), drawn(80, 64, seed=2), drawn(48, 80, seed=3)
    _, dx, dw = run(layer(recipe, w), x, dy)
    copies = {}
    for slot, tensor in (("fprop.x", x), ("fprop.w", w)):
        if rotation:
            r = hadamard(16, TE_SIGNS if signs == "fixed" else None)
            copy = turned(quantised(bf16(turned(array(tensor), r)), recipe.slot(slot)), r.T)
        else:
            copy = quantised(array(tensor), recipe.slot(slot))
        copies[slot] = bf16(copy)
    for ours, theirs in ((dx, array(dy) @ copies["fprop.w"]), (dw, array(dy).T @ copies["fprop.x"])):
        assert np.abs(array(ours) - theirs).max() <= 2**-8 * np.abs(theirs).max()  # one rounding to bf16
    exact, originals = array(dy) @ copies["fprop.w"], array(dy) @ array(w)
    assert np.abs(array(dx) - exact).mean() < 0.1 * np.abs(array(dx) - originals).mean()


def test_requantising_the_copy_in_bf16_rounds_it_first():
    x, w, dy = drawn(48, 64, seed=1), drawn(80, 64, seed=2), drawn(48, 80, seed=3)
    sources = {}
    for source in ("forward", "forward_bf16"):
        again = Quant(source=source)
        recipe = Recipe(
            fprop=Fprop(x=Quant(), w=Quant()), dgrad=Dgrad(w=again), wgrad=Wgrad(g=Quant(), x=again)
        )
        module = layer(recipe, w)
        module.context.probe = Watch()
        run(module, x, dy)
        sources[source] = {
            slot: module.context.probe.seen[slot].source.float() for slot in ("dgrad.w", "wgrad.x")
        }
    for slot in ("dgrad.w", "wgrad.x"):
        exact, rounded = (sources[source][slot] for source in ("forward", "forward_bf16"))
        assert torch.equal(exact.bfloat16().float(), rounded)
        assert not torch.equal(exact, rounded)


@pytest.mark.parametrize(
    ("fields", "why"),
    [
        ({"dgrad": {"dequantised": True}}, "fprop.w is not quantised"),
        ({"fprop": {"x": {}, "w": {}}, "dgrad": {"dequantised": True, "g": {}}}, "must be null"),
        (
            {"fprop": {"x": {}, "w": {}}, "wgrad": {"dequantised": True, "hadamard": {"size": 16}}},
            "must be null",
        ),
        ({"fprop": {"x": {}, "w": {}, "dequantised": True}}, "dequantised"),
    ],
)
def test_a_dequantised_copy_needs_a_forward_copy_and_a_product_in_bf16(fields, why):
    with pytest.raises(ValueError, match=why):
        Recipe.model_validate(fields, strict=False)


def test_a_phase_that_takes_the_forward_copy_away_leaves_the_originals():
    recipe = Recipe(
        fprop=Fprop(x=Quant(), w=Quant()), dgrad=Dgrad(dequantised=True), wgrad=Wgrad(dequantised=True)
    )
    assert recipe.products.high_precision("forward").plain
    assert recipe.products.high_precision("backward") == Recipe(fprop=recipe.fprop).products
    assert not recipe.dgrad.plain
    assert recipe.products.backward_needs == "a quantised copy (dequantised)"


def test_without_source_forward_the_original_is_quantised():
    recipe = Recipe(fprop=Fprop(x=Quant(), w=Quant()), wgrad=Wgrad(x=Quant()))
    x = drawn(48, 64, seed=1)
    module = layer(recipe, drawn(80, 64, seed=2))
    module.context.probe = Watch()
    run(module, x, drawn(48, 80, seed=3))
    assert torch.equal(module.context.probe.seen["wgrad.x"].source, x.t())


@every(preset=PRESETS, tokens__inputs__outputs=[(17, 48, 33), (1, 1, 1), (5, 80, 16)])
def test_every_preset_takes_any_shape(preset, tokens, inputs, outputs):
    w = drawn(outputs, inputs, seed=2)
    module = layer(PRESETS[preset](), w)
    y, dx, dw = run(module, drawn(tokens, inputs, seed=1), drawn(tokens, outputs, seed=3))
    assert (y.shape, dx.shape, dw.shape) == ((tokens, outputs), (tokens, inputs), (outputs, inputs))
    assert all(result.isfinite().all() for result in (y, dx, dw))
    assert module.quantised_weight().shape == w.shape


# --- the gradient of the cast ---------------------------------------------------------------------


def quest_mask(h: np.ndarray) -> np.ndarray:
    """QuEST's: whether a value lies within 6 after division by 2^floor(log2(2.92247856 std / 6)) of its 32."""
    mask = np.zeros_like(h)
    for row in range(h.shape[0]):
        for start in range(0, h.shape[1], 32):
            block = h[row, start : start + 32]
            scale = 2.0 ** math.floor(math.log2(2.92247856 / 6 * block.std()))
            mask[row, start : start + 32] = np.abs(block / scale) < 6
    return mask


QUEST = PRESETS["quartet"]().fprop.x


@pytest.mark.parametrize("size", [None, 32])
def test_clip_mask_stops_gradients_where_the_cast_clipped_in_the_rotated_domain(size):
    rotation = size and Hadamard(size=size, signs="none")
    recipe = exact(Recipe(fprop=Fprop(x=QUEST, w=QUEST, hadamard=rotation)))
    x, w, dy = drawn(48, 64, seed=1, outliers=True), drawn(80, 64, seed=2) ** 3, drawn(48, 80, seed=3)
    w = w.bfloat16().float()
    module = layer(recipe, w)
    module.context.probe = Watch()
    _, dx, dw = run(module, x, dy)
    r = hadamard(32) if size else np.eye(32)
    plain = {"x": array(dy) @ array(w), "w": array(dy).T @ array(x)}
    for name, gradient, tensor in (("x", dx, x), ("w", dw, w)):
        h = array(module.context.probe.seen[f"fprop.{name}"].source)
        assert np.abs(h - turned(array(tensor), r)).max() <= 2.0**-8 * np.abs(h).max()  # rounded to bf16
        mask = quest_mask(h)
        assert 0.005 < 1 - mask.mean() < 0.2
        expected = turned(turned(plain[name], r) * mask, r.T)
        assert (
            np.abs(array(gradient) - expected).max() <= 1e-5 * np.abs(plain[name]).max()
        )  # sums and rotations in fp32
        assert np.abs(expected - plain[name] * mask).max() > 1e-2 or not size


def test_a_value_mapped_to_six_exactly_is_stopped():
    recipe = exact(
        Recipe(
            fprop=Fprop(
                x=Quant(estimator="clip_mask", scale=BlockScale(format="e8m0", rounding="floor"), outer=None)
            )
        )
    )
    x = torch.full((1, 16), 1.0)
    x[0, 3], x[0, 4] = 6.0, 5.75
    _, dx, _ = run(layer(recipe, torch.eye(16)), x, torch.ones(1, 16))
    assert dx[0].tolist() == [1.0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1]


def dge_slope(y: float, k: float, clip: float) -> float:
    """By definition: on the interval of the grid that holds |y|, min(|2t/delta - 1|^(1/k - 1) / k, clip); 0 beyond 6."""
    y = abs(y)
    if y > 6:
        return 0.0
    below = max(g for g in E2M1 if g <= y)
    above = min((g for g in E2M1 if g > y), default=8)
    middle = abs(2 * (y - below) / (above - below) - 1)
    return clip if middle == 0 and k > 1 else min(middle ** (1 / k - 1) / k, clip)


@pytest.mark.parametrize(("k", "clip"), [(5.0, 3.0), (3.0, 1.5), (1.0, 3.0)])
def test_the_slope_of_the_differentiable_estimator_multiplies_dw(k, clip):
    quant = Quant(
        block=None, scale=None, outer=Outer(granularity="row", bound=1.0), estimator=Dge(k=k, clip=clip)
    )
    recipe = exact(Recipe(fprop=Fprop(w=quant)))
    x, w, dy = drawn(48, 64, seed=1), drawn(80, 64, seed=2), drawn(48, 80, seed=3)
    _, dx, dw = run(layer(recipe, w), x, dy)
    scaled = array(w) * 6 / np.abs(array(w)).max(axis=1, keepdims=True)
    slopes = np.vectorize(lambda y: dge_slope(y, k, clip))(scaled)
    plain = array(dy).T @ array(x)
    inside = (
        np.abs(scaled) < 6 - 1e-5
    )  # the row's largest may be 6, or an ulp beyond it, where the slope is 0
    # the slope is steep at the middle of an interval, where fp32 and float64 may see it 1e-4 apart
    assert np.quantile((np.abs(array(dw) - plain * slopes) / (np.abs(plain) + 1e-3))[inside], 0.999) < 1e-4
    assert np.abs(array(dx) - array(dy) @ array(w)).max() < 1e-4
    if k == 1:
        assert np.abs(array(dw) - plain)[inside].max() < 1e-4  # the straight-through estimator


# --- scales outside the product -------------------------------------------------------------------


def test_prescaled_operands_multiply_by_sixteen_ninths():
    quant = PRESETS["mxfp4_backward"]().dgrad.g.model_copy(update={"rounding": "nearest", "bits": 8})
    recipe = Recipe(dgrad=Dgrad(g=quant, w=quant), wgrad=Wgrad(g=quant, x=quant))
    # Blocks of 4: scale 1, 4 * 3/4 = 3 is on the grid. Without 16/9 the product would be 9 a term instead of 16.
    _, dx, dw = run(
        layer(recipe, torch.full((64, 32), 4.0)), torch.full((96, 32), 4.0), torch.full((96, 64), 4.0)
    )
    assert dx.unique().tolist() == [64 * 16]
    assert dw.unique().tolist() == [96 * 16]


def test_the_floor_rule_saturates_without_prescale_and_not_with_it():
    plain = PRESETS["mxfp4"]().fprop.x
    x = drawn(64, 256, seed=1)
    saturated = {}
    for name, quant in {
        "plain": plain,
        "prescaled": plain.model_copy(update={"range": Range(map_to=4.0, prescale=0.75)}),
    }.items():
        saturated[name] = (quantize(x, quant, keep=True).scaled.abs() > 6).any().item()
    assert saturated == {"plain": True, "prescaled": False}


@pytest.mark.parametrize("product", DIRECTIONS["all"])
def test_a_scale_for_each_row_is_that_of_the_row_alone(product):
    quant = Quant(outer=Outer(granularity="row"))
    slot = {"fprop": "fprop.x", "dgrad": "dgrad.g", "wgrad": "wgrad.g"}[product]
    given = tensors()
    result = products(with_slot(slot, quant, quant), given)[product]
    pairs = {"fprop": ("x", "w"), "dgrad": ("g", "w.t"), "wgrad": ("g.t", "x.t")}[product]
    a, b = (array(given[name[0]].t() if name.endswith(".t") else given[name]) for name in pairs)
    rows = [[quantised(row[None], Quant())[0] for row in operand] for operand in (a, b)]
    expected = np.array([[np.dot(left, right) for right in rows[1]] for left in rows[0]])
    assert close(result, expected, np.abs(rows[0]) @ np.abs(rows[1]).T, a.shape[1])


@pytest.mark.parametrize("inputs", [256, 200])
def test_a_scale_for_each_128_is_that_of_the_128_alone(inputs):
    quant = Quant(outer=Outer(granularity="block:128"))
    x, w = drawn(24, inputs, seed=1), drawn(40, inputs, seed=2)
    x[:, 128:] *= 256
    y, _, _ = run(layer(exact(Recipe(fprop=Fprop(x=quant, w=quant))), w), x, drawn(24, 40, seed=3))
    rows = []
    for operand in (array(x), array(w)):
        pieces = [[quantised(row[None, i : i + 128], Quant())[0] for i in (0, 128)] for row in operand]
        rows.append(np.array([np.concatenate(piece) for piece in pieces]))
    assert close(y, rows[0] @ rows[1].T, np.abs(rows[0]) @ np.abs(rows[1]).T, inputs)


# --- rotations ------------------------------------------------------------------------------------


@every(
    signs=["none", "fixed", "per_layer", "per_step", "per_call"], size=[4, 32, 128], product=DIRECTIONS["all"]
)
def test_a_rotation_cancels_in_the_product(product, size, signs):
    given, spec = tensors(), Hadamard(size=size, signs=signs)
    alone = exact(
        Recipe(**{product: {"fprop": Fprop, "dgrad": Dgrad, "wgrad": Wgrad}[product](hadamard=spec)})
    )
    beside = with_slot(
        {"fprop": "fprop.w", "dgrad": "dgrad.g", "wgrad": "wgrad.x"}[product],
        Quant(element="e4m3"),
        None,
        spec,
    )
    plain = {
        "fprop": given["x"] @ given["w"].t(),
        "dgrad": given["g"] @ given["w"],
        "wgrad": given["g"].t() @ given["x"],
    }[product]
    for recipe, tolerance in ((alone, 0.01), (beside, 0.05)):
        rotated = products(recipe, given, Clock(3, step=5, micro_batch=2))[product]
        # rotated values are rounded to bf16 (2^-9 on average), or one operand to E4M3 (2^-5);
        # had the operands turned apart, the error would be as large as the product itself
        assert (rotated - plain).norm() <= tolerance * plain.norm()


def sources(signs: str, slot: str = "wgrad.x", **when) -> Tensor:
    """The rotated operand of a slot, at a time."""
    where = when.pop("name", "blocks.0.linear")
    rotation = Hadamard(size=16, signs=signs)
    recipe = Recipe(
        dgrad=Dgrad(g=Quant(), w=Quant(), hadamard=rotation),
        wgrad=Wgrad(g=Quant(), x=Quant(), hadamard=rotation),
    )
    # one token in 16 is not zero: its row of the rotation is what is seen
    x = torch.zeros(256, 16)
    x[torch.arange(16) * 17] = torch.eye(16)
    module = layer(recipe, torch.ones(16, 16), clock=Clock(**({"seed": 0} | when)))
    if where != module.name:
        module = type(module)(module, where, module.clock, torch.bfloat16)
        module.products = recipe.products
    module.context.probe = Watch()
    run(module, x, x)
    return module.context.probe.seen[slot].source


CHANGES = {
    "none": set(),
    "fixed": set(),
    "per_layer": {"seed", "name"},
    "per_step": {"seed", "name", "step"},
    "per_call": {"seed", "name", "step", "micro_batch"},
}


@pytest.mark.parametrize("signs", CHANGES)
def test_signs_are_drawn_anew_as_often_as_their_name_says(signs):
    first = sources(signs)
    others = {
        "seed": {"seed": 1},
        "name": {"name": "blocks.1.linear"},
        "step": {"step": 1},
        "micro_batch": {"micro_batch": 1},
    }
    changed = {what for what, when in others.items() if not torch.equal(sources(signs, **when), first)}
    assert changed == CHANGES[signs]
    assert torch.equal(sources(signs), first)


@pytest.mark.parametrize("signs", ["per_layer", "per_step", "per_call"])
def test_the_two_backward_products_of_a_layer_draw_their_own_signs(signs):
    wgrad, dgrad = sources(signs, "wgrad.g"), sources(signs, "dgrad.g")
    # Row c of the rotation is sign c times row c of H, which starts with 1.
    of_wgrad = torch.stack([wgrad[c, 16 * c] for c in range(16)]).sign()
    of_dgrad = torch.stack([dgrad[17 * c, 0] for c in range(16)]).sign()
    assert of_wgrad.abs().sum() == of_dgrad.abs().sum() == 16
    assert not torch.equal(of_wgrad, of_dgrad)


@pytest.mark.parametrize("name", [*PRESETS])
def test_an_empty_batch_has_gradients_of_zero(name):
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"up": nn.Linear(128, 256)})])})
    preset = PRESETS[name]()
    recipe = Recipe(fprop=preset.fprop, dgrad=preset.dgrad, wgrad=preset.wgrad)
    convert(model, recipe, Clock(0)).at(0, Run(2))
    x = torch.zeros(0, 128, requires_grad=True)
    model["blocks"][0]["up"](x).sum().backward()
    assert x.grad.shape == (0, 128)
    assert model["blocks"][0]["up"].weight.grad.eq(0).all()


def test_products_in_bf16_and_as_fp32_are_not_the_same_numbers():
    """As `ablate doctor` says of the two; the difference is that of the order of additions."""
    a, b = drawn(64, 2048, seed=1).to(torch.bfloat16), drawn(64, 2048, seed=2).to(torch.bfloat16)
    with multiplying("bf16"):
        first = linear(a, b)
    with multiplying("fp32"):
        second = linear(a, b)
    torch.testing.assert_close(first, second, rtol=2**-7, atol=1e-2)
    (claim,) = (wanted for name, _, wanted in facts() if name == "bf16 on the processor")
    assert torch.equal(first, second) or "differ" in claim


def test_values_in_bf16_are_exact_down_to_its_smallest_number_alone():
    quant = Quant(element="e4m3", block="1x32", scale=BlockScale(format="e8m0", rounding="floor"), outer=None)
    exact_, rounded = (
        quantize(drawn(8, 32, seed=3) * 2.0**power, quant, keep=True) for power in (-110, -130)
    )
    for made, same in ((exact_, True), (rounded, False)):
        assert made.block_scale is not None
        values = made.codes * made.block_scale.view(8, 1)
        assert torch.equal(made.values.float(), values) is same
