"""Wrong element codes, given the block scales that the subject returned: the rule by which they are made."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ablate.numerics.formats import ELEMENTS
from ablate.numerics.spec import Quant
from ablate.numerics.stored import pack
from ablate.verification.conformance.computation import RECIPE
from ablate.verification.conformance.inputs import grid
from ablate.verification.conformance.stages.parts import Parts
from ablate.verification.conformance.stages.places import (
    FACTORS,
    FEW,
    MOST,
    example,
    moved,
    unequal,
    wrong_places,
)


def codes(made: Sequence[Parts], least: int) -> str:
    """Return what is wrong with the codes, given the subject's second level and block scales.

    Args:
        made: Casts of one quantiser.
        least: Smallest number of wrong codes for which anything is returned.

    Returns:
        The rule in words, or ''.
    """
    ys, gots, rights, steps, masks = (list[Tensor]() for _ in range(5))
    parts = [one for one in made if one.codes is not None and one.scales is not None]
    if not parts:
        return ""
    quant = parts[0].pair.quant
    for one in parts:
        assert one.scales is not None
        assert one.codes is not None
        spread, y, right = one.elements(one.scales)
        live = (spread != 0) & spread.isfinite()
        wrong = unequal(one.codes, right) & live
        if (one.scales != one.wanted).any():  # codes of the right scales, which are stored wrongly
            wrong &= unequal(one.codes, one.elements(one.wanted)[2])
        masks.append(wrong)
        for values, z in ((ys, y), (gots, one.codes), (rights, right)):
            values.append(z)
        steps.append(live)
    count = sum(int(mask.sum()) for mask in masks)
    if count < least:
        return ""
    shown = [n for n, mask in enumerate(masks) if mask.any()]
    if text := moved([(gots[n], rights[n]) for n in shown], "element code"):
        return text
    if text := _bytes_mixed([(gots[n], rights[n]) for n in shown], quant):
        return text
    live = torch.cat([z.flatten() for z in steps])
    y, got, right = (torch.cat([z.flatten() for z in zs])[live] for zs in (ys, gots, rights))
    wrong = torch.cat([mask.flatten() for mask in masks])[live]
    where = wrong_places([masks[n] for n in shown], "elements")
    return (
        _signs(y, got, right, wrong, where)
        or _table(y, got, right, wrong, quant, where)
        or _other_factor(parts, ys, masks, quant, where)
        or _element_rounding(y, got, wrong, quant, where)
        or example("element code", got, right, wrong, where)
    )


def _signs(y: Tensor, got: Tensor, right: Tensor, wrong: Tensor, where: str) -> str:
    if bool((got.abs() == right.abs())[wrong].all()):
        if bool((got[wrong] > 0).all()):
            return f"sign of elements lost{where}"
        return f"sign of elements reversed{where}"
    for word, sign in (("negative", -1), ("positive", 1)):
        if bool((y[wrong] * sign > 0).all()) and int(wrong.sum()) > 8 * FEW:
            if bool((got[wrong] == 0).all()):
                return f"{word} elements become zero{where}"
            toward = bool((got[wrong].abs() < right[wrong].abs()).all())
            return f"only {word} elements are wrong, {'too small' if toward else 'other'}{where}"
    return ""


def _table(y: Tensor, got: Tensor, right: Tensor, wrong: Tensor, quant: Quant, where: str) -> str:
    """Return the intervals of scaled magnitudes whose code is wrong, if the code is a function of them."""
    size = y.abs()
    order = size.argsort()
    size, code, expected, bad = size[order], got.abs()[order], right.abs()[order], wrong[order]
    step = ELEMENTS[quant.element].step(size.clamp(max=ELEMENTS[quant.element].max))
    units = size / step
    tie = (units - units.floor() - 0.5).abs() < 1e-6
    if bool(tie[bad].all()):
        rules = {"toward zero": code < expected, "away from zero": code > expected}
        rule = next((words for words, hit in rules.items() if bool(hit[bad].all())), "not to even")
        return f"ties of elements go {rule}{where}"
    whole: list[tuple[float, float, float, float]] = []
    for point in expected.unique().tolist():
        own = expected == point
        mine = own & bad
        if not mine.any():
            continue
        low, high = float(size[mine].min()), float(size[mine].max())
        inside = own & (size >= low) & (size <= high) & ~tie
        if float(bad[inside].double().mean() if inside.any() else 1.0) < MOST:
            return ""
        values = code[mine].unique()
        if len(values) > 2:
            return ""
        whole.append((low, high, point, float(values[0])))
    if not whole:
        return ""
    values = {value for *_, value in whole}
    low, high = min(one[0] for one in whole), max(one[1] for one in whole)
    if len(whole) > 1 and len(values) == 1:
        return f"scaled elements of magnitude {low:.4g} to {high:.4g} become {values.pop():g}{where}"
    ratios = {round(value / point, 6) for *_, point, value in whole if point}
    if len(whole) > 2 and len(ratios) == 1:
        span = f"scaled elements of magnitude {low:.4g} to {high:.4g}"
        return f"{span} come out {ratios.pop():g} times as large{where}"
    inside = (y.abs() >= low) & (y.abs() <= high)
    for factor, word in FACTORS.items() if len(whole) > 2 else ():
        if float((RECIPE.element(y[inside] * factor, quant) == got[inside]).double().mean()) > MOST:
            return (
                f"scaled elements of magnitude {low:.4g} to {high:.4g} encoded {word} times as large{where}"
            )
    down = all(value < point for *_, point, value in whole)
    up = all(value > point for *_, point, value in whole)
    if len(whole) > 3 and (down or up):
        word = "rounded down (truncated)" if down else "rounded up"
        if low > float(size.max()) / 4 or high < float(size.max()) / 4:
            word += f" if their magnitude is {low:.4g} to {high:.4g}"
        return f"elements {word}{where}"
    listed = ", ".join(
        f"{a:.4g} to {b:.4g} become {value:g}, not {point:g}" for a, b, point, value in whole[:3]
    )
    return f"scaled elements of magnitude {listed}{where}"


def _other_factor(
    parts: Sequence[Parts], ys: Sequence[Tensor], masks: Sequence[Tensor], quant: Quant, where: str
) -> str:
    """Return how the factor of the elements differs from the stored scale's, by the codes it can give."""
    points = grid(quant.element)
    middles = torch.cat((torch.zeros(1), (points[1:] + points[:-1]) / 2, torch.full((1,), float("inf"))))
    lows, highs, stored, exact, bad = [], [], [], [], []
    for one, y, mask in zip(parts, ys, masks, strict=True):
        assert one.codes is not None
        assert one.scales is not None
        number = torch.bucketize(one.codes.abs(), points - points[1] / 4, right=True) - 1
        number = number.clamp(0, len(points) - 1)
        size = y.abs()
        low, high = middles[number] / size, middles[number + 1] / size
        low, high = torch.where(size > 0, low, 0.0), torch.where(size > 0, high, float("inf"))
        low, high = low.nan_to_num(0.0), high.nan_to_num(float("inf"))
        wide, columns = quant.tile[1], y.shape[1]
        edge, blocks = (0, -columns % wide), (len(y), -1, wide)
        lows.append(torch.nn.functional.pad(low, edge).view(blocks).amax(2).flatten())
        highs.append(torch.nn.functional.pad(high, edge, value=float("inf")).view(blocks).amin(2).flatten())
        stored.append(one.scales.flatten())
        exact.append(one.exact.flatten())
        bad.append(torch.nn.functional.pad(mask, edge).view(blocks).any(2).flatten())
    low, high, s, t, wrong = (torch.cat(z) for z in (lows, highs, stored, exact, bad))
    possible = low <= high * (1 + 1e-6)
    if float(possible[wrong].double().mean()) < MOST:
        return ""
    middle = (low * high.clamp(max=1e30)).sqrt()
    tight = wrong & possible & (low > 0) & (high < 1e30)
    if not tight.any():
        return ""
    unrounded = s / t
    fits = (low <= unrounded * (1 + 1e-5)) & (high >= unrounded * (1 - 1e-5))
    if float(fits[wrong].double().mean()) > MOST:
        return f"elements divided by the block scale before it is rounded{where}"
    common_low, common_high = float(low[tight].quantile(0.99)), float(high[tight].quantile(0.01))
    factor = float(middle[tight].median())
    if common_low <= common_high * (1 + 1e-6):
        named = next(
            (word for value, word in FACTORS.items() if common_low <= value <= common_high), f"{factor:.4g}"
        )
        return (
            f"elements multiplied by {named} times the factor of the stored scale{of_scales(s, wrong)}{where}"
        )
    return (
        f"elements not divided by the stored block scale, but by another{of_scales(s, wrong)}: a scale of"
        f" {float(s[tight][0]):.4g} acts as {float(s[tight][0] / middle[tight][0]):.4g}{where}"
    )


def of_scales(s: Tensor, wrong: Tensor) -> str:
    """Return the range of block scales in which all numbers are wrong, as ' where ...'; '' if in all.

    Args:
        s: Block scales, in any shape.
        wrong: Mask of the same shape.
    """
    low, high = float(s[wrong].min()), float(s[wrong].max())
    right = s[~wrong]
    if not ((right >= low) & (right <= high)).any() and len(right):
        return f" where the block scale is {low:.4g}" + f" to {high:.4g}" * (low < high)
    if 2.0**-9 <= low <= high < 2.0**-6 and bool((right > high).any()):
        return " where the block scale is subnormal"
    return ""


def _element_rounding(y: Tensor, got: Tensor, wrong: Tensor, quant: Quant, where: str) -> str:
    """Return how scaled elements are rounded if each becomes one of its two neighbours."""
    grid = ELEMENTS[quant.element]
    size = y.abs().clamp(max=grid.max)
    step = grid.step(size)
    below = (size / step).floor() * step
    share = ((size - below) / step)[wrong]
    code = got.abs()[wrong]
    adjacent = (code == below[wrong]) | (code == (below + step)[wrong])
    if float(adjacent.double().mean()) < MOST:
        return ""
    off = float((share - 0.5).abs().max())
    if off < 0.07:
        return (
            f"scaled elements within {off:.2g} of a step of a midpoint rounded the other way: an extra"
            f" rounding before, or another order of operations{where}"
        )
    return f"elements rounded to one of the two neighbours, but not the nearest{where}"


def _bytes_mixed(seen: Sequence[tuple[Tensor, Tensor]], quant: Quant) -> str:
    """Return how bytes of two codes mix, if a byte is a bitwise function of it and one before."""
    if quant.element != "e2m1" or any(right.shape[1] % 2 for _, right in seen):
        return ""
    raw = [(pack(got.nan_to_num(0.0)), pack(right.nan_to_num(0.0))) for got, right in seen]
    for by in (1, 2, 4, 8):
        for word, made in (("or-ed with", torch.bitwise_or), ("xor-ed with", torch.bitwise_xor)):
            alike = wrong = cases = 0
            for got, right in raw:
                other = made(right, torch.nn.functional.pad(right, (by, 0))[:, : right.shape[1]])
                differ = got != right
                alike += int((got == other)[differ].sum())
                wrong, cases = wrong + int(differ.sum()), cases + got.numel()
            if wrong and alike > MOST * wrong:
                where = wrong_places([got != right for got, right in raw], "bytes")
                return f"bytes of codes {word} the byte {by} before: its bits are not cleared{where}"
    return ""
