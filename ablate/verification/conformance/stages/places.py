"""Places and numbers in words: where wrong numbers lie, where right ones were put, their factors.

A rule is read from masks and matrices of several casts, and has to hold in all of them.
"""

from collections.abc import Callable, Iterator, Sequence
from functools import partial

import torch
from torch import Tensor

NEAR = 2.0**-20
"""Relative difference of two fp32 numbers that are the same but for their roundings."""
MOST = 0.98
"""Share of the numbers of a stage that one rule has to give to be its description."""
FEW = 4
"""Numbers that have to be wrong in a stage for it to be described."""
FACTORS = {2.0**n: f"2^{n}" for n in range(-9, 10) if n} | {
    value: word
    for top, name in (
        (6.0, "6"),
        (448.0, "448"),
        (2688.0, "2688"),
        (1.5, "3/2"),
        (1.75, "7/4"),
        (0.75, "3/4"),
    )
    for value, word in ((top, name), (1 / top, f"1/({name})" if "/" in name else f"1/{name}"))
}
"""Factors that a description writes as what they are."""
MODULI = (2, 4, 8, 16, 32, 64, 128)


def times(factor: float) -> str:
    """Return a factor as text, by its name in `FACTORS` if it has one."""
    for value, word in FACTORS.items():
        if abs(factor / value - 1) < 1e-5:
            return word
    return f"{factor:.5g}"


def word(value: Tensor | float) -> str:
    """Return a number as text with four digits."""
    return "NaN" if float(value) != float(value) else f"{float(value):.4g}"


def unequal(one: Tensor, other: Tensor) -> Tensor:
    """Return a mask of the numbers that differ; two NaNs do not."""
    return (one != other) & ~(one.isnan() & other.isnan())


def example(what: str, got: Tensor, right: Tensor, wrong: Tensor, where: str) -> str:
    """Return how many numbers are wrong, and one of them, for a stage whose rule was not found.

    Args:
        what: Name of one number.
        got: Numbers of the subject.
        right: Numbers of the recipe, of the same shape.
        wrong: Mask of the wrong ones, of the same shape, with one at least.
        where: Their places in words, or ''.
    """
    if text := nothing(what, got, wrong, where):
        return text
    share = float(wrong.double().mean())
    one, other = got[wrong][0], right[wrong][0]
    return f"{what}s wrong in {100 * share:.2g} % of all{where}, such as {word(one)}, not {word(other)}"


def nothing(what: str, got: Tensor, wrong: Tensor, where: str) -> str:
    """Return that all wrong numbers are zero or NaN, or ''; arguments as in `example`."""
    for word, hit in (("zero", got[wrong] == 0), ("NaN", got[wrong].isnan())):
        if bool(hit.all()):
            return f"{what}s are {word}{where}"
    return ""


def residues(values: set[int]) -> str:
    """Return residues as text: `1 to 3`, `0 and 4`."""
    listed = sorted(values)
    if len(listed) > 2 and listed == list(range(listed[0], listed[-1] + 1)):
        return f"{listed[0]} to {listed[-1]}"
    return " and ".join(map(str, listed[:4])) + " ..." * (len(listed) > 4)


def number_ranges(hit: Tensor, most: int = 4) -> str:
    """Return the places of a mask [n] as ranges: `0 to 15, 32`."""
    ranges: list[list[int]] = []
    for number in hit.nonzero()[:, 0].tolist():
        if ranges and ranges[-1][1] == number - 1:
            ranges[-1][1] = number
        else:
            ranges.append([number, number])
    words = [f"{a}" if a == b else f"{a} to {b}" for a, b in ranges[:most]]
    return ", ".join(words) + " ..." * (len(ranges) > most)


def wrong_places(masks: Sequence[Tensor], what: str) -> str:
    """Return the rows or columns in which all wrong numbers lie, as ', in ... only'; '' if in all.

    Args:
        masks: Mask of the wrong numbers of each matrix, [rows, columns], each with one at least.
        what: Name of the numbers; `blocks` are counted along the row.
    """
    for axis, word in enumerate(("rows", "columns")):
        hits = [mask.any(1 - axis) for mask in masks]
        places = [(hit.nonzero()[:, 0], len(hit)) for hit in hits if hit.any()]
        unit = f"blocks of the {'column' if axis else 'row'}s" if what == "blocks" and axis else word
        for modulus in reversed(MODULI):
            if all(
                size > modulus and size % modulus and int(at[0]) >= size // modulus * modulus
                for at, size in places
            ):
                return f", in {unit} beyond a multiple of {modulus} only"
        for modulus in MODULI[:6]:
            large = [(at, size) for at, size in places if size >= 2 * modulus]
            gone = {value for at, _ in places for value in (at % modulus).tolist()}
            if len(gone) <= modulus // 2 and sum(len(at) for at, _ in large) >= max(4, 2 * len(gone)):
                return f", in {unit} with index {residues(gone)} modulo {modulus} only"
        first = min(int(at[0]) for at, _ in places)
        tails = [hit[first:] for hit in hits if len(hit) > first]
        if first >= 4 and sum(int(z.sum()) for z in tails) > 0.5 * sum(len(z) for z in tails):
            return f", in {unit} from {first} on only"
        last = max(int(at[-1]) for at, _ in places)
        if (last + 1) % 8 == 0 and all(size > last + 4 for _, size in places):
            return f", in the first {last + 1} {unit} only"
    return ""


def moved(seen: Sequence[tuple[Tensor, Tensor]], what: str) -> str:
    """Return the places of numbers, if they are right ones in other places, or ''.

    Args:
        seen: Matrices of the subject and of the recipe, [rows, columns] each, that differ.
        what: Name of one number.
    """
    got, right = seen[-1] if seen[-1][0].shape[0] > 1 else seen[0]
    distinct = [pair for pair in seen if len(pair[1].unique()) > 2 and pair[1].shape[0] > 1]
    if not distinct:
        return ""
    for word, place in _orders():
        if all(_same(got, right, place(right)) for got, right in distinct):
            return f"each {what} stored at another place: {word}"
    got, right = max(distinct, key=lambda pair: len(pair[1].unique()))
    alike = torch.equal(got.flatten().sort().values, right.flatten().sort().values)
    rows = torch.equal(got.sort(1).values, right.sort(1).values)
    columns = torch.equal(got.sort(0).values, right.sort(0).values)
    if not alike or len(right.unique()) < 4:
        return ""
    values, counts = right.unique(return_counts=True)
    rare = values[counts == 1]
    example = ""
    for value in rare.tolist():
        here, there = ((z == value).nonzero()[0].tolist() for z in (got, right))
        if here != there:
            example = f"; that of ({there[0]}, {there[1]}) is at ({here[0]}, {here[1]})"
            break
    within = " within their rows" if rows else " within their columns" if columns else ""
    return f"{what}s are the right ones in another order{within}{example}"


def _same(got: Tensor, right: Tensor, moved: Tensor | None) -> bool:
    if moved is None or moved.shape != got.shape:
        return False
    inside = ~moved.isnan()
    wrong = inside & (got != right)
    if not wrong.any() or float(inside.double().mean()) < 0.5:
        return False
    return (
        float((got == moved)[wrong].double().mean()) > MOST
        and float((got == moved)[inside].double().mean()) > MOST
    )


def _orders() -> Iterator[tuple[str, Callable[[Tensor], Tensor | None]]]:
    """Yield permutations of a matrix with their words: NaN where a place is undefined, None for a matrix of
    another size."""
    nan = float("nan")

    def columns(size: int, change: Callable[[Tensor], Tensor], z: Tensor) -> Tensor | None:
        return None if z.shape[1] % size else change(z.reshape(len(z), -1, size)).reshape(z.shape)

    def rows(size: int, change: Callable[[Tensor], Tensor], z: Tensor) -> Tensor:
        whole = len(z) // size * size
        made = torch.full_like(z, nan)
        made[:whole] = change(z[:whole].reshape(-1, size, z.shape[1])).reshape(whole, z.shape[1])
        return made

    def shifted(by: int, axis: int, z: Tensor) -> Tensor:
        moved = z.roll(by, axis)
        moved.transpose(0, axis)[slice(by) if by > 0 else slice(by, None)] = nan
        return moved

    for size in (2, 4, 8, 16, 32):
        for word, change in (
            ("the order of every {} columns is reversed", lambda z: z.flip(2)),
            ("the halves of every {} columns are swapped", lambda z: z.unflatten(2, (2, -1)).flip(2)),
            ("the halves of every {} columns are interleaved", lambda z: z.unflatten(2, (2, -1)).mT),
            ("even and odd columns of every {} are apart", lambda z: z.unflatten(2, (-1, 2)).mT),
        ):
            yield word.format(size), partial(columns, size, change)
    for by in (1, -1, 2, -2, 4, -4, 8, -8, 16, -16):
        word = "before" if by > 0 else "after"
        yield f"it is that of {abs(by)} columns {word}", partial(shifted, by, 1)
        yield f"it is that of {abs(by)} rows {word}", partial(shifted, by, 0)
    for size in (2, 4, 8, 16, 32, 128):
        turned, backwards = (lambda z: z.transpose(1, 2)), (lambda z: z.flip(1))
        yield f"every {size} rows are stored transposed (column by column)", partial(rows, size, turned)
        yield f"the order of every {size} rows is reversed", partial(rows, size, backwards)
    yield "the matrix is stored transposed", lambda z: z.t().reshape(z.shape)
    yield "it is that of the first row", lambda z: z[:1].expand_as(z)
    yield "it is that of the first column", lambda z: z[:, :1].expand_as(z)


def left_out(seen: Sequence[tuple[Tensor, float]], what: str) -> str:
    """Return which elements a maximum leaves out, of (elements, used maximum) pairs.

    An element above the used maximum was left out; those that are equal to it were not. A rule has to hold
    for all tensors.

    Args:
        seen: Elements, [rows, columns], and the largest magnitude that the subject used for them.
        what: Name of the maximum.
    """
    out, kept = [], []
    for x, own in seen:
        magnitude = x.abs()
        above, equal = magnitude > own * (1 + 1e-6), (magnitude / own - 1).abs() <= 1e-6
        if not above.any() or not equal.any():
            return ""
        out.append(above)
        kept.append(equal)
    signs = [x[mask] for (x, _), mask in zip(seen, out, strict=True)]
    for word, sign in (("negative", -1), ("positive", 1)):
        used = all(bool((x[mask] * -sign > 0).any()) for (x, _), mask in zip(seen, kept, strict=True))
        if used and all(bool((part * sign > 0).all()) for part in signs):
            return f"{what} without magnitudes: {word} elements are left out"
    if text := _bounded(out, kept, what, powers=True):
        return text
    for axis, word in enumerate(("rows", "columns")):
        if any(mask.shape[axis] < 2 for mask in out):
            continue  # blocks have one row
        for number, part in enumerate(("first", "last")):
            above, equal = ([mask.chunk(2, axis)[number].any() for mask in masks] for masks in (out, kept))
            if all(equal) and not any(above):
                return f"{what} is that of the {part} half of the {word}"
    for word, place in _places():
        for modulus in MODULI:
            gone = {v for mask in out for v in (place(mask) % modulus).tolist()}
            held = [{*(place(mask) % modulus).tolist()} for mask in kept]
            if (
                len(gone) < modulus
                and all(one - gone for one in held)
                and sum(int(m.sum()) for m in out) >= 2 * modulus
            ):
                return f"{what} leaves out {word} with index {residues(gone)} modulo {modulus}"
    return _bounded(out, kept, what, powers=False)


def _bounded(out: Sequence[Tensor], kept: Sequence[Tensor], what: str, powers: bool) -> str:
    """Return the first or last rows, columns or elements that a maximum leaves out, or ''.

    `powers` admits only bounds that are powers of two.
    """
    for word, place in _places():
        outside, inside = ([place(mask) for mask in masks] for masks in (out, kept))
        for first, last, tail in (
            (min(int(z.min()) for z in outside), max(int(z.min()) for z in inside), True),
            (min(int(z.max()) for z in inside), max(int(z.max()) for z in outside), False),
        ):
            if last >= first:
                continue
            limit = next((2**k for k in range(30, -1, -1) if last < 2**k <= first), 0)
            if limit or not powers:
                number = f"{limit or first:,}"
                return f"{what} leaves out " + (
                    f"{word} from {number} on" if tail else f"the first {number} {word}"
                )
    return ""


def _places() -> Iterator[tuple[str, Callable[[Tensor], Tensor]]]:
    yield "rows", lambda mask: mask.nonzero()[:, 0]
    yield "columns", lambda mask: mask.nonzero()[:, 1]
    yield "elements", lambda mask: mask.flatten().nonzero()[:, 0]
