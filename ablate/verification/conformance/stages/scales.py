"""Wrong block scales, given the second level that the subject used: the rule by which they are made."""

from collections.abc import Sequence

import torch
from torch import Tensor

from ablate.numerics.formats import SCALES
from ablate.numerics.spec import Quant
from ablate.verification.conformance.computation import RECIPE
from ablate.verification.conformance.numbers import over_elements
from ablate.verification.conformance.stages.parts import Parts
from ablate.verification.conformance.stages.places import (
    FACTORS,
    FEW,
    MOST,
    example,
    left_out,
    moved,
    nothing,
    times,
    unequal,
    word,
    wrong_places,
)


def scales(made: Sequence[Parts], least: int) -> str:
    """Return what is wrong with the block scales, given the subject's second level.

    Args:
        made: Casts of one quantiser.
        least: Smallest number of wrong scales for which anything is returned.

    Returns:
        The rule in words, or ''.
    """
    parts = [one for one in made if one.scales is not None]
    if not parts:
        return ""
    masks = [unequal(one.scales, one.wanted) for one in parts]  # type: ignore[arg-type]
    wrong = torch.cat([mask.flatten() for mask in masks])
    if int(wrong.sum()) < least:
        return ""
    shown = [(one, mask) for one, mask in zip(parts, masks, strict=True) if mask.any()]
    if text := moved([(one.scales, one.wanted) for one, _ in shown], "block scale"):  # type: ignore[misc]
        return text
    s, t, a, e = (
        torch.cat([getattr(one, name).flatten() for one in parts])
        for name in ("scales", "exact", "block", "wanted")
    )
    where = wrong_places([mask for _, mask in shown], "blocks")
    quant = parts[0].pair.quant
    return (
        _scale_of_zero(s, a, wrong)
        or nothing("block scale", s, wrong, where)
        or _scale_factor(s, t, quant)
        or _scale_limits(s, e)
        or _stored_elsewhere(parts, masks, where)
        or _scale_range(s, t, e, a, wrong)
        or _scale_rounding(s, t, e, wrong, quant)
        or _scale_elements([one for one, _ in shown], [mask for _, mask in shown], where)
        or example("block scale", s, e, wrong, where)
    )


def _scale_of_zero(s: Tensor, a: Tensor, wrong: Tensor) -> str:
    if bool((a[wrong] == 0).all()):
        values = s[wrong]
        same = bool((values == values[0]).all()) or bool(values.isnan().all())
        return (
            f"scale of a block of zeros is {word(values[0])}" if same else "scale of a block of zeros varies"
        )
    return ""


def _scale_factor(s: Tensor, t: Tensor, quant: Quant) -> str:
    live = (t > 0) & s.isfinite() & (s > 0)
    if not live.any():
        return ""
    ratio = (s[live].double() / t[live].double()).median()
    near = sorted(FACTORS, key=lambda value: abs(torch.tensor(value).log2() - ratio.log2()))[:5]
    for factor in near:
        made = RECIPE.scale(t[live] * factor, torch.ones(()), torch.ones(()), _plain(quant))
        if float((made == s[live]).double().mean()) > MOST:
            return f"block scale {FACTORS[factor]} times what it should be"
    return ""


def _scale_limits(s: Tensor, e: Tensor) -> str:
    """Return the limits that block scales are clamped to."""
    texts = []
    wrong = unequal(s, e) & e.isfinite()
    for limited, sign in (("at least", 1), ("at most", -1)):
        side = wrong & (sign * (s - e) > 0)
        if not side.any():
            continue
        limit = s[side][0]
        if not bool((s[side] == limit).all()) or bool(
            (sign * (e - limit) < 0)[~wrong & e.isfinite() & (e > 0)].any()
        ):
            return ""
        if len(e[side].unique()) > 1:
            texts.append(f"{limited} {float(limit):.4g}")
    return f"block scales clamped to {' and '.join(texts)}" if texts and not s[wrong].isnan().any() else ""


def _stored_elsewhere(parts: Sequence[Parts], masks: Sequence[Tensor], where: str) -> str:
    """Return that the stored scales are at fault, if the codes are those of the right ones."""
    alike = cases = known = stored = 0
    for one, mask in zip(parts, masks, strict=True):
        if one.codes is None:
            return ""
        if not mask.any():
            continue
        assert one.scales is not None
        spread, _, right = one.elements(one.wanted)
        unlike = unequal(one.codes, right) & (spread != 0)
        bad = over_elements(mask, one.pair.quant.tile[1], one.x.shape[1])
        alike, cases = alike + int((bad & ~unlike).sum()), cases + int(bad.sum())
        wanted, values = {*one.wanted.unique().tolist(), 0.0}, one.scales[mask].tolist()
        known, stored = known + sum(value in wanted for value in values), stored + len(values)
    if not cases or alike < MOST * cases or known < 0.9 * stored:
        return ""
    return f"codes are made with the right block scales, which are stored at or read from other places{where}"


def _plain(quant: Quant) -> Quant:
    """Return a quantiser whose block scale is its argument, rounded."""
    return quant.model_copy(
        update={"range": quant.range.model_copy(update={"map_to": 1.0, "headroom": 1.0}), "select": None}
    )


def _scale_range(s: Tensor, t: Tensor, e: Tensor, a: Tensor, wrong: Tensor) -> str:
    """Return the range of scales, or of block amaxes, in which all are wrong and outside of which none is."""
    for what, key in (("block scales", e), ("unrounded block scales", t), ("block amaxes", a)):
        low, high = float(key[wrong].min()), float(key[wrong].max())
        right = key[~wrong]
        inside = (right >= low) & (right <= high) & (right != 0)
        # Fewer right ones than 1 in 50 in the range, and enough of them outside.
        if int(inside.sum()) > (1 - MOST) * int(wrong.sum()) or int((~inside).sum()) < FEW:
            continue
        if bool((right < low).any()) and bool((right > high).any()) and low < high and what != "block scales":
            continue
        span = f"{what} of {low:.4g}" if low == high else f"{what} of {low:.4g} to {high:.4g}"
        if bool(s[wrong].isnan().all()):
            return f"{span} become NaN"
        ratio = (s[wrong] / e[wrong])[e[wrong] > 0]
        if len(ratio) and bool((ratio == ratio[0]).all()) and low < high:
            return f"{span} become {times(float(ratio[0]))} times as large"
        values = s[wrong].unique()
        if len(values) <= 3:
            return f"{span} become {' or '.join(word(v) for v in values)}"
        return f"{span} become others, {float(e[wrong][0]):.4g} becomes {float(s[wrong][0]):.4g}"
    return ""


def _scale_rounding(s: Tensor, t: Tensor, e: Tensor, wrong: Tensor, quant: Quant) -> str:
    """Return the rule by which scales are rounded, if all are one of the two neighbours."""
    assert quant.scale is not None
    grid = SCALES[quant.scale.format]
    if grid.bits > 8:
        return ""
    step = grid.step(t) if grid.mantissa else 2.0 ** torch.frexp(t)[1].float().sub(1)
    below = (t / step).floor() * step
    share = (t - below) / step
    up, down = s == below + step, s == below
    inside = (t > 0) & (below + step <= grid.max) & (share > 0)
    if float((up | down)[inside & wrong].double().mean()) < 0.9 or not (inside & wrong).any():
        return ""
    lowest_up = share[inside & up].min() if (inside & up).any() else torch.tensor(1.0)
    highest_down = share[inside & down].max() if (inside & down).any() else torch.tensor(0.0)
    if float(highest_down) <= float(lowest_up) + 1e-6:
        if not (inside & up).any():
            return "block scales rounded down"
        if not (inside & down).any():
            return "block scales rounded up"
        limit = float(lowest_up + highest_down) / 2
        if abs(limit - 0.5) > 2.0**-12:
            return f"block scales rounded up from {limit:.3f} of the step between two scales on"
        return "block scales halfway between two rounded the other way"
    off = (share[inside & wrong] - 0.5).abs().max()
    if float(off) < 0.13:
        bits = int(-off.log2())
        return (
            f"block scales within 2^-{bits} of a step of a midpoint rounded the other way: an extra"
            " rounding before, or another order of operations"
        )
    return "block scales are one of the two neighbours, but not the nearest"


def _scale_elements(parts: Sequence[Parts], masks: Sequence[Tensor], where: str) -> str:
    """Return which elements of a block its amax leaves out, or that it has those of others."""
    quant = parts[0].pair.quant
    high, wide = quant.tile
    rows: list[tuple[Tensor, float]] = []
    larger = total = 0
    for one, mask in zip(parts, masks, strict=True):
        assert one.scales is not None
        ratio = (one.scales / one.wanted)[mask]
        larger, total = larger + int((ratio > 1).sum()), total + int(mask.sum())
        if high == 1:
            padded = torch.nn.functional.pad(one.x, (0, -one.x.shape[1] % wide)).view(len(one.x), -1, wide)
            used = one.block * one.scales / one.exact
            for row, block in mask.nonzero()[:64].tolist():
                # The largest element whose scale is the used one.
                elements, size = padded[row, block], float(used[row, block])
                near = (elements.abs() / size - 1).abs()
                if 0 < size < float("inf") and float(near.min()) < 0.07:
                    rows.append((elements[None], float(elements[near.argmin()].abs())))
    if larger > MOST * total:
        return "block scales of a larger amax than the block's: elements of other blocks are counted" + where
    if larger < (1 - MOST) * total:
        if len(rows) >= FEW and (text := left_out(rows, "amax of a block")):
            return text
        return "block scales of a smaller amax than the block's: elements are left out" + where
    return ""


def choice(made: Sequence[Parts], least: int) -> str:
    """Return how two candidates of a block are chosen if not by the recipe; arguments as in `scales`."""
    first = made[0].pair.quant.select
    if first is None:
        return ""
    wrong = cases = fours = 0
    for one in made:
        if one.scales is None or one.pair.expected.scales is None:
            continue
        other = (one.scales == one.wanted) & (one.scales != one.pair.expected.scales)
        wrong, cases = wrong + int(other.sum()), cases + other.numel()
        fours += int((one.scales > one.pair.expected.scales)[other].sum())
    if wrong < least:
        return ""
    share = (
        f"{100 * wrong / cases:.2g} % of blocks" if wrong > 0.001 * cases else f"{wrong} of {cases:,} blocks"
    )
    if wrong < 0.02 * cases:
        return (
            f"the other candidate chosen in {share}: nearly equal errors, added in another order or precision"
        )
    if 0.02 * wrong <= fours <= MOST * wrong:
        return f"the other candidate chosen in {share}"
    six, four = first.map_to
    return f"the other candidate chosen in {share}, always {four if fours > MOST * wrong else six:g}"
