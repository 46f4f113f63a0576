"""The contract of users' functions in quantisers, tried on one of them: `ablate check FILE:FUNCTION`.

A function that breaks its contract in a trial ends the trial (numerics/own_calls.py). These checks try it
beforehand, on scaled elements with exact ties, values beyond the grid, zeros of both signs, NaN and infinity,
and on empty tensors. What a contract leaves open, such as symmetry and bias, is reported and fails nothing.
"""

from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

import torch
from torch import Tensor

from ablate import own_source
from ablate.errors import InputError, OwnFunctionError
from ablate.numerics import own_calls
from ablate.numerics.formats import ELEMENTS, SCALES, Format, element_format
from ablate.numerics.own import ELEMENT, Own, resolved
from ablate.numerics.own import kind_of as kind_of_file
from ablate.numerics.rounding import nearest
from ablate.numerics.scaling import block_amax, round_scale
from ablate.numerics.spec import BlockScale
from ablate.verification.check_result import present
from ablate.verification.workload_checks import Promise

_GRIDS = {
    "rounding": ELEMENTS,
    "scale.rounding": {name: form for name, form in SCALES.items() if form.bits <= 8},
}
"""Formats with which a function is tried."""
_WIDTH = 8
"""Random bits of a draw; the bias is the mean over all their values."""
_REPEATS = "repeats to the bit"
_MEANT = "nothing, if this is meant"
_SHAPE = (8, 1, 4, 16)
"""Tiles: 8 rows of 4 blocks."""


def subject(source: str) -> tuple[str, Own]:
    """Return the field that a function `FILE.py:FUNCTION` or `module:FUNCTION` is for, and its word;
    InputError if there is no such function."""
    path, _, name = source.rpartition(":")
    try:
        file = Path(path) if path.endswith(".py") else own_source.find(Path.cwd(), source).path
        field = kind_of_file(file, name)
        word = resolved(field, source, (), None)
    except (ValueError, SyntaxError) as error:
        raise InputError(str(error)) from None
    except OSError as error:
        raise InputError(f"{path}: {(error.strerror or str(error)).lower()}") from None
    if word is None:
        raise InputError(f"{source}: write FILE.py:FUNCTION")
    return field, word


def require(file: Path, functions: Mapping[tuple[str, Own], Collection[str]], device: str) -> None:
    """Raise InputError if a function breaks its contract; each is tried for less than a second.

    `file`: the experiment's, for the sentence; `functions`: by field, with the formats that they round to;
    `device`: where trials call them; a GPU that is not here is not waited for.
    """
    if device != "cpu" and not torch.cuda.is_available():
        return
    broken = []
    for (field, word), names in functions.items():
        found = promises(field, word, True, device, names if field in _GRIDS else ())
        failed = next((promise for promise in found if not promise.kept), None)
        if failed:
            mend = f"; {failed.remedy}" if failed.remedy else ""
            told = failed.detail.removeprefix(f"{field} {word} ")
            broken.append(f"{file}: {field} {word} fails {failed.name!r} of `ablate check`: {told}{mend}")
    if broken:
        raise InputError(*broken)


def promises(
    field: str, word: Own, quick: bool = False, device: str = "cpu", formats: Collection[str] = ()
) -> Iterator[Promise]:
    """Yield the outcome of each check of a function for a field, as `subject` returns it; the first that
    fails for want of a result is the last.

    `quick`: leave out the mean over all draws, which takes most of the time and fails nothing; `formats`: the
    only ones with which it is tried; empty: all.
    """
    if field == ELEMENT:  # what it holds, and that rounding leaves its values alone
        own, values = element_format(word), torch.tensor(word.values)
        held = f"{len(values)} magnitudes from 0 to {own.max:g}: {own.bits} bits with the sign"
        yield Promise("is a grid", True, held)
        kept = torch.equal(nearest(values, own), values) and torch.equal(nearest(-values, own), -values)
        yield Promise("its values are rounded to themselves", kept, "to nearest, with both signs")
        return
    grids = _GRIDS.get(field, {"": None})
    if formats:
        grids = {name: grids.get(name) or element_format(name) for name in formats}
    for name, check in CHECKS.items():
        if quick and check is _unbiased:
            continue
        for grid_name, grid in grids.items():
            trial = _Trial(field, word, grid, device)
            try:
                found = check(trial)
            except InputError as error:
                moved = isinstance(error, OwnFunctionError) and error.unrepeatable
                detail = f"{error}{grid_name and f', with {grid_name}'}"
                found = Promise(_REPEATS if moved else "", False, detail)
            if found is not None and (not found.kept or found.remedy):
                break
        if found is not None:
            yield Promise(found.name or name, found.kept, found.detail, found.remedy)
            if not found.kept:
                return


class _Trial:
    """One function with one grid, and the inputs that it is tried on; `maps`: a result corresponds to an
    argument, as of a rounding or a quantiser, and not of a statistic."""

    def __init__(self, field: str, word: Own, grid: Format | None, device: str) -> None:
        self.field, self.word, self.grid, self.maps = field, word, grid, not field.endswith("statistic")
        top = grid.max if grid and field == "rounding" else 4.0
        tiles = torch.randn(_SHAPE, generator=torch.Generator().manual_seed(0)) * top / 2
        tiles[0, 0, 0] = torch.arange(16) * top / 16
        tiles[0, 0, 1] = 0
        tiles[0, 0, 2, 0] = -0.0
        self.tiles = tiles.to(device)

    @property
    def main(self) -> Tensor:
        if self.field == "scale.rounding":
            return self.tiles.abs().amax(dim=(1, 3), keepdim=True).clamp(min=2.0**-6) * 7
        return self.tiles if self.field in ("rounding", "range.statistic") else self.tiles.view(8, 64)

    def made(self, main: Tensor, draw: int | None = None) -> Tensor:
        """Return what the function makes of an argument, with all bits `draw`, or drawn; InputError."""
        generator = torch.Generator().manual_seed(1)
        width = 24 if self.field == "scale.rounding" else _WIDTH
        bits = torch.randint(2**width, main.shape, generator=generator).float().to(main.device)
        bits = bits if draw is None else torch.full_like(bits, draw * 2 ** (width - _WIDTH))
        if self.field == "rounding":
            return own_calls.rounded(self.word, main, present(self.grid), bits, width)
        if self.field == "scale.rounding":
            grid = present(self.grid)
            to = BlockScale(format=next(name for name, other in SCALES.items() if other == grid))
            tiles = main * self.tiles[: main.shape[0], :, : main.shape[2]] * 1.5
            return own_calls.scales(
                self.word, main, grid, bits, tiles, ELEMENTS["e2m1"], lambda scale: round_scale(scale, to)
            )
        if self.field == "own":
            return own_calls.quantised(self.word, main, bits, width)
        amaxes = block_amax(main.view(len(main), *_SHAPE[1:]))
        amaxes = amaxes if main.ndim == len(_SHAPE) else amaxes.flatten()
        return own_calls.statistic(self.field, self.word, main, amaxes)


def _runs(trial: _Trial) -> Promise:
    trial.made(trial.main)
    of = "scalar" if trial.field == "outer.statistic" else "fp32 of the right shape"
    return Promise("", True, f"{of}, no NaN" + (", on the grid" if trial.grid else ""))


def _leaves_alone(trial: _Trial) -> Promise:
    state = torch.get_rng_state()
    trial.made(trial.main)
    return Promise("", torch.equal(torch.get_rng_state(), state), "arguments and torch's generator as before")


def _repeats(trial: _Trial) -> Promise:
    same = torch.equal(trial.made(trial.main), trial.made(trial.main))
    return Promise("", same, "two calls with the same bits" + ("" if same else " gave different numbers"))


def _empty(trial: _Trial) -> Promise | None:
    if trial.field == "outer.statistic":  # never asked of an empty tensor
        return None
    made = trial.made(trial.main[:0])
    return Promise("", made.numel() == 0, "no rows in, no rows out")


def _not_finite(trial: _Trial) -> Promise:
    main = trial.main.clone()
    main.view(-1)[-1], main.view(-1)[-2] = torch.nan, torch.inf
    trial.made(main)
    return Promise("", True, "NaN and infinity raise nothing, and other numbers stay finite")


def _uses_bits(trial: _Trial) -> Promise | None:
    if not trial.word.draws:
        return None
    one, *others = (trial.made(trial.main, draw) for draw in (None, 0, 2 ** (_WIDTH - 1), 2**_WIDTH - 1))
    if not all(torch.equal(one, other) for other in others):
        return Promise("", True, "other bits give other results")
    why = f"bits are taken but never change a result, with bits of 0, {2 ** (_WIDTH - 1)} and {2**_WIDTH - 1}"
    mend = "leave out bits, or compare them with a fraction of the step, upper - lower, of 0 to 1"
    return Promise("", False, why, mend)


def _neighbours(trial: _Trial) -> Promise | None:
    if trial.grid is None:
        return None
    main, made = trial.main, trial.made(trial.main)
    lower, upper = (neighbour.copysign(main) for neighbour in trial.grid.neighbours(main.abs()))
    far = (made != lower) & (made != upper)
    if not far.any():
        return Promise("", True, "each result is one of the two values around its argument")
    turned = made * main < 0
    if turned.any():
        found = f"{made[turned][0]:g} for {main[turned][0]:g}: the sign is another"
        return Promise("", False, found, "give the result the sign of its argument: .copysign(y)")
    low, high = sorted((lower[far][0].item(), upper[far][0].item()))
    return Promise("", True, f"{made[far][0]:g} for {main[far][0]:g}, between {low:g} and {high:g}", _MEANT)


def _not_nearest(trial: _Trial) -> Promise | None:
    if trial.field != "rounding":
        return None
    grid, main = present(trial.grid), trial.main
    lower, upper = grid.neighbours(main.abs())
    inner = (main.abs() <= grid.max) & (2 * main.abs() != lower + upper) & (lower != upper)
    equal = (trial.made(main) == nearest(main, grid))[inner]
    if not equal.all():
        far = 1 - equal.double().mean().item()
        return Promise("", True, f"{far:.0%} of {equal.numel()} values become another, ties aside")
    name = next((name for name, other in ELEMENTS.items() if other == grid), "own grid")
    return Promise("", True, f"equals nearest on all of {equal.numel()} values, ties aside ({name})", _MEANT)


def _idempotent(trial: _Trial) -> Promise | None:
    if not trial.maps:
        return None
    once = trial.made(trial.main)
    twice = trial.made(once)
    if torch.equal(once, twice):
        return Promise("", True, "results are left as they are")
    other = once != twice
    return Promise("", True, f"{once[other][0]:g} becomes {twice[other][0]:g}", _MEANT)


def _symmetric(trial: _Trial) -> Promise | None:
    if not trial.maps or trial.field == "scale.rounding":
        return None
    there, back = trial.made(trial.main), trial.made(-trial.main)
    if torch.equal(there, -back):
        return Promise("", True, "f(-x) = -f(x)")
    other = there != -back
    detail = f"{there[other][0]:g} and {back[other][0]:g} for {trial.main[other][0]:g} and its negative"
    return Promise("", True, detail, _MEANT)


def _unbiased(trial: _Trial) -> Promise | None:
    if not trial.word.draws:
        return None
    main = trial.main if trial.grid is None else trial.main.clamp(-trial.grid.max, trial.grid.max)
    mean = sum(trial.made(main, draw).double() for draw in range(2**_WIDTH)) / 2**_WIDTH
    error = (mean - main.double()).abs()
    if trial.grid is not None:
        lower, upper = trial.grid.neighbours(main.abs())
        error = (error / (upper - lower).double()).where(upper > lower, 0)
        unit = "of a step of the grid"
    else:
        far = (trial.made(main).double() - main.double()).abs().max()
        error, unit = error / far.clamp(min=1e-30), "of the largest error of one"
    worst = error.max().item()
    detail = f"largest |mean error| over all {2**_WIDTH} draws: {worst:.2g} {unit}"
    remedy = f"{_MEANT}; {_WIDTH} bits reach {2.0**-_WIDTH:.2g}" * (worst > 2.0**-_WIDTH)
    return Promise("", True, detail, remedy)


CHECKS: dict[str, Callable[[_Trial], Promise | None]] = {
    "returns what its field needs": _runs,
    "changes no argument and no global generator": _leaves_alone,
    _REPEATS: _repeats,
    "takes empty tensors": _empty,
    "takes numbers that are not finite": _not_finite,
    "uses the bits that it takes": _uses_bits,
    "rounds to a neighbour": _neighbours,
    "differs from rounding to nearest": _not_nearest,
    "leaves its own results alone": _idempotent,
    "is symmetric": _symmetric,
    "is unbiased": _unbiased,
}
"""Checks by what they try; None from a check that does not apply."""
