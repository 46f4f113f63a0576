"""Stage of a cast that is wrong, measured: each stage is judged given what the subject's stage before gave.

A cast is four functions in a row: amax of the tensor, block scales, codes, values. Compared with the recipe's
result, one wrong stage makes all later ones differ. So each is computed from the subject's own input to it:
the block scales from its own second level, the codes from its own scales, the values from its own codes. What
still differs is the fault of that stage alone, and faults of several stages are found one by one.

What the stage computes instead is read from its inputs and outputs: a constant factor, a range in which it is
wrong, another place, elements that an amax leaves out. No list of faults is needed:

    scaled elements of magnitude 256 to 448 become 448        # a table, or a wrong limit
    amax of the tensor leaves out elements from 8,192 on      # a reduction that stops early

The casts of a recipe with micro-exponents, or with a second level in groups, are not taken apart.
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.verification.conformance.examination import Pair
from ablate.verification.conformance.numbers import FP32_ROUNDINGS, TOLERANCES, far, over_elements
from ablate.verification.conformance.stages.codes import codes, of_scales
from ablate.verification.conformance.stages.parts import Parts, apart
from ablate.verification.conformance.stages.places import FEW, NEAR, left_out, times, wrong_places
from ablate.verification.conformance.stages.scales import choice, scales


def wrong_stages(pairs: Sequence[Pair]) -> str:
    """Return what is wrong in the stages of some casts of one quantiser, joined; '' if nothing was found.

    Args:
        pairs: Casts of one quantiser, at least one, that differ from the recipe, and perhaps others.
    """
    quant = pairs[0].quant
    if quant.scale is None or quant.scale.micro_exponents or quant.draws or quant.range.prescale != 1:
        return ""
    if quant.outer is not None and quant.outer.granularity not in ("tensor", "row"):
        return ""
    finite = [pair for pair in pairs if bool(pair.x.isfinite().all()) and pair.x.numel()]
    made = [taken for pair in finite if (taken := apart(pair)) is not None]
    if not made:
        return ""
    texts, total = list[str](), sum(pair.difference.count for pair in pairs)
    for stage in (_amax, choice, scales, codes, _values):
        # A second fault has to show in more than the roundings that the first one moved.
        least = int(max(FEW, 0.02 * total)) if any(texts) else FEW
        texts.append(stage(made, least))
    return "; ".join(dict.fromkeys(filter(None, texts)))


# --- the amax of the tensor -----


def _amax(made: Sequence[Parts], least: int) -> str:
    """Return what is wrong with the second level."""
    pairs = list[tuple[float, float, Parts]]()
    for one in made:
        used, wanted = one.amax, one.pair.expected.amax
        if used is None or wanted is None or used.ndim or wanted.ndim:
            continue
        if 0 < float(wanted) < float("inf"):
            pairs.append((float(used), float(wanted), one))
    wrong = [(own, right, one) for own, right, one in pairs if abs(own / right - 1) > NEAR]
    if not wrong:
        return ""
    text = _amax_rule(pairs, wrong)
    return f"{text} (returned; the block scales are made with the right one)" if wrong[0][2].other else text


def _amax_rule(
    pairs: Sequence[tuple[float, float, Parts]], wrong: Sequence[tuple[float, float, Parts]]
) -> str:
    """Return what the second level is instead, of (used amax, right amax, cast)."""
    ratios = [own / right for own, right, _ in wrong]
    product = [own * right / 2688.0**2 for own, right, _ in wrong]
    if all(abs(one - 1) < 1e-3 for one in product) and max(ratios) / min(ratios) > 1.01:
        return "second level inverted: 2688/amax in place of amax/2688"
    if len(wrong) == len(pairs) and len(wrong) > 1 and max(ratios) / min(ratios) - 1 < 1e-5:
        return f"second-level factor {times(ratios[0])} times what it should be, for every tensor"
    previous = [one.pair.previous for _, _, one in wrong]
    stale = sum(
        z is not None and z.numel() > 0 and abs(float(z.float().abs().max()) / own - 1) < 1e-5
        for (own, _, _), z in zip(wrong, previous, strict=True)
    )
    if stale > 0.7 * len(wrong):  # a property may have called the subject between two compared casts
        return "amax of the tensor is that of the call before"
    if text := _limits([(own, right) for own, right, _ in pairs]):
        return text
    if all(abs(one - 1) < 0.13 for one in ratios) and (text := _rounded_amax(wrong)):
        return text
    if text := left_out([(one.x, own) for own, _, one in wrong], "amax of the tensor"):
        return text
    own, right, _ = wrong[0]
    size = "smaller" if all(one < 1 for one in ratios) else "larger" if min(ratios) > 1 else "other"
    return f"second level of a {size} amax than the tensor's: {own:.6g}, where it is {right:.6g}"


def _limits(pairs: Sequence[tuple[float, float]]) -> str:
    """Return the limits that the amax is clamped to, of (used, right) pairs."""
    wrong = [(own, right) for own, right in pairs if abs(own / right - 1) > NEAR]
    if len(wrong) < 2:
        return ""
    owns = [own for own, _ in pairs]
    if len({right for _, right in wrong}) > 1 and max(owns) < min(owns) * (1 + 1e-5):
        return f"amax of the tensor is a constant, {wrong[0][0]:.6g} (factor {wrong[0][0] / 2688:.4g})"
    texts = []
    for word, sign in (("at least", 1), ("at most", -1)):
        side = [own for own, right in wrong if sign * (own - right) > 0]
        if not side:
            continue
        limit = side[0]
        if any(abs(own / limit - 1) > 1e-5 for own in side):
            return ""
        kept = [right for own, right in pairs if abs(own / right - 1) <= NEAR]
        if any(sign * (right - limit) < -1e-5 * limit for right in kept):
            return ""
        texts.append(f"{word} {limit:.6g} (factor {limit / 2688:.4g})")
    return f"amax of the tensor clamped to {' and '.join(texts)}"


def _rounded_amax(wrong: Sequence[tuple[float, float, Parts]]) -> str:
    """Return the dtype that the second level was rounded to, if amax, S or factor are numbers of it."""
    for what, change in (
        ("amax of the tensor", lambda own: own),
        ("second-level factor amax/2688", lambda own: own / 2688.0),
        ("S = 2688/amax", lambda own: 2688.0 / own),
    ):
        used, right = (torch.tensor([change(one[n]) for one in wrong], dtype=torch.float64) for n in (0, 1))
        for dtype in (
            *(torch.float8_e8m0fnu, torch.float8_e5m2, torch.float8_e4m3fn),
            *(torch.bfloat16, torch.float16),
        ):
            if bool(((used / right.float().to(dtype).double() - 1).abs() < 2.0**-21).all()):
                name = str(dtype).removeprefix("torch.").removeprefix("float8_")
                return f"{what} rounded to {'a power of two' if 'e8m0' in name else name}"
        if bool((torch.frexp(used)[0] == 0.5).all()):
            return f"{what} rounded to a power of two"
    return ""


# --- values -----

_LEVELS = {
    2: "the second level inverted",
    1: "the second level left out",
    -1: "the second level applied twice",
}
"""Faults of the values' second level, by the power of 2688/amax that they multiply the values by."""


def _values(made: Sequence[Parts], least: int) -> str:
    """Return what is wrong with the values, given the subject's codes, scales and second level."""
    amaxes: list[Tensor | None] = []
    gots, rights, keys, masks = (list[Tensor]() for _ in range(4))
    for one in made:
        got, quant = one.pair.got, one.pair.quant
        if got.values is None or got.codes is None or got.scales is None:
            continue
        spread = over_elements(got.scales, quant.tile[1], one.x.shape[1])
        if one.amax is None or quant.outer is None:
            unit = got.codes * spread
        else:
            divisor = torch.tensor(ELEMENTS[quant.element].max * quant.outer.bound)
            unit = got.codes * (spread * one.amax * (1 / divisor))
        tolerance = TOLERANCES.get(got.dtype, FP32_ROUNDINGS)
        mask = ~((got.values - unit).abs() <= 2 * tolerance * unit.abs() + 2.0**-126)
        mask &= ~(got.values.isnan() & unit.isnan())
        assert one.pair.expected.values is not None
        mask &= far(got.values, one.pair.expected.values, got.dtype)  # right ones, of codes stored wrongly
        amaxes.append(one.amax)
        for values, z in ((gots, got.values), (rights, unit), (keys, spread), (masks, mask)):
            values.append(z)
    wrong = torch.cat([mask.flatten() for mask in masks]) if masks else torch.zeros(0)
    if int(wrong.sum()) < least:
        return ""
    what = "values are not code x scale x outer of what is stored"
    if text := _value_level(amaxes, gots, rights, masks):
        return f"values are code x scale with {text}" if text in _LEVELS.values() else f"{what}: {text}"
    where = wrong_places([mask for mask in masks if mask.any()], "values")
    got, right, s = (torch.cat([z.flatten() for z in zs]) for zs in (gots, rights, keys))
    ratio = (got / right)[wrong & (right != 0)]
    if _constant(ratio):
        return f"{what}, but {times(float(ratio.median()))} times that{of_scales(s, wrong)}{where}"
    if bool((got[wrong] == 0).all()):
        return f"{what}, but zero{of_scales(s, wrong)}{where}"
    off = float((ratio - 1).abs().median()) if len(ratio) else float("inf")
    if off < 2.0**-6:
        return f"{what}, but rounded: typically off by {off:.2g} of each{of_scales(s, wrong)}{where}"
    return f"{what}{of_scales(s, wrong)}{where}"


def _value_level(
    amaxes: Sequence[Tensor | None],
    gots: Sequence[Tensor],
    rights: Sequence[Tensor],
    masks: Sequence[Tensor],
) -> str:
    """Return the fault of `_LEVELS` that the values have, or that each tensor has another factor, or ''."""
    factors: list[tuple[float, float]] = []
    for amax, got, right, mask in zip(amaxes, gots, rights, masks, strict=True):
        if mask.any() and amax is not None and not amax.ndim:
            ratio = (got / right)[mask & (right != 0)]
            if not _constant(ratio):
                return ""
            factors.append((float(ratio.median()), 2688.0 / float(amax)))
    if len(factors) < 2 or max(f for f, _ in factors) <= 1.01 * min(f for f, _ in factors):
        return ""
    for power, words in _LEVELS.items():
        if all(abs(factor / level**power - 1) < 0.01 for factor, level in factors):
            return words
    return "another factor for each tensor"


def _constant(ratio: Tensor) -> bool:
    """Return True if there are ratios, and all are the same but for roundings to bf16."""
    return len(ratio) > 0 and bool(((ratio / ratio.median() - 1).abs() < 2.0**-7).all())
