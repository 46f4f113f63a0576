"""Calls of users' functions in the reference quantiser, with the checks that keep their numbers right.

A function gets those of the following arguments that it names, and must return fp32 on the same device.
Tensors are fp32, contiguous and detached, so that NumPy and `view(-1)` take them. T stands for [row tiles,
rows, column tiles, columns], the elements of each block, and B for [row tiles, 1, column tiles, 1], a number
for each block.

| field | gets | returns |
|---|---|---|
| `rounding` | `y` T, scaled; `grid`, the element's `Format`; `bits` like y, integers below 2^`width` | T |
| `scale.rounding` | `scale` B, exact; `grid` of scales; `bits` B; `width`; `element`, its `Format`; | B |
| | `tiles` T, which divided by the scale are rounded to elements | |
| `range.statistic` | `tiles` T; `amaxes` B, the largest magnitudes | B |
| `outer.statistic` | `tensor` [rows, columns]; `amaxes` [blocks] | scalar |
| `own` | `x` [rows, columns], rotated; `bits` like x, integers below 2^`width` | like x |

`bits` are the counter-based bits that our own roundings would get, so a run is repeated and continued bit for
bit: they are fp32, as all arguments. A function that draws from a global generator, changes an argument,
returns another shape or type, a NaN of finite numbers, or a value that is not on the grid, is refused by an
`OwnFunctionError` of one sentence; one that raises is by an `InputError`. Its first call of a process is made
twice, and the 4th, 16th, 64th, ... also by a copy of the function that is imported anew: one that draws from
a generator of its own, or keeps a state, returns other numbers, and is refused. A value that is not finite in
the input may become anything.
"""

import inspect
import random
import traceback
import zlib
from collections import Counter
from collections.abc import Callable, Collection
from functools import cache
from typing import cast

import numpy as np
import torch
from torch import Tensor

from ablate import own_source
from ablate.errors import InputError, OwnFunctionError
from ablate.numerics.formats import Format
from ablate.numerics.own import KINDS, Own

_PASSED_ON = ("memory", "CUDA")
"""Parts of the messages of RuntimeErrors that are not the function's own: `within_memory` handles them."""


def rounded(word: Own, y: Tensor, grid: Format, bits: Tensor | None, width: int) -> Tensor:
    """Round scaled elements by the user's function; InputError if it raises or breaks its contract."""
    made = call("rounding", word, y, y.shape, grid=grid, bits=bits, width=width)
    _refuse_off_grid("rounding", word, y, made, grid.neighbours(made.abs())[0] != made.abs(), "grid")
    return made


def scales(
    word: Own,
    exact: Tensor,
    grid: Format,
    bits: Tensor | None,
    tiles: Tensor,
    element: Format,
    nearest: Callable[[Tensor], Tensor],
) -> Tensor:
    """Round block scales by the user's function; InputError if it raises or breaks its contract.

    `exact` are the scales that map each block's statistic to the top of the element grid; a scale of 1 would
    leave `tiles` as they are; `nearest` rounds to the scale format, whose values it leaves as they are.
    """
    more = {"grid": grid, "bits": bits, "width": 24, "tiles": tiles, "element": element}
    made = call("scale.rounding", word, exact, exact.shape, **more)
    _refuse_off_grid(
        "scale.rounding", word, exact, made, (nearest(made) != made) | (made < 0), "scale format"
    )
    return made


def statistic(field: str, word: Own, of: Tensor, amaxes: Tensor) -> Tensor:
    """Return the user's statistic of each block (`range.statistic`; `of`: tiles), fp32 like `amaxes`, or of a
    tensor (`outer.statistic`), a scalar; InputError if the function raises, or breaks its contract."""
    blocks = field == "range.statistic"
    made = call(field, word, of, amaxes.shape if blocks else torch.Size(), amaxes=amaxes)
    given = amaxes if blocks else amaxes.amax()
    _refuse_off_grid(field, word, given, made, ~made.isfinite() | (made < 0), "range of magnitudes")
    return made


def quantised(word: Own, x: Tensor, bits: Tensor | None, width: int) -> Tensor:
    """Return the user's quantiser's values of a matrix; InputError if it raises or breaks its contract."""
    made = call("own", word, x, x.shape, bits=bits, width=width)
    bad = ~made.isfinite() & x.isfinite().all()  # a block with an infinity may lose its other elements
    _refuse_off_grid("own", word, x, made, bad, "range of fp32")
    return made


def call(field: str, word: Own, main: Tensor, shape: torch.Size, **more: object) -> Tensor:
    """Call a user's function with those of its arguments that it names; InputError if it breaks its contract.
    `main` is its first argument (`Kind.key`), and the result must have `shape`."""
    function, names = _loaded(word)
    offered = {KINDS[field].key: main, **more}
    given = {
        name: value.detach().float().contiguous() if isinstance(value, Tensor) else value
        for name, value in offered.items()
        if name in names
    }
    made = _once(field, word, function, given, main.device)
    for what, value, right in (
        ("dtype", made.dtype, torch.float32),
        ("shape", list(made.shape), list(shape)),
        ("device", made.device, main.device),
    ):
        if value != right:
            raise _broken(field, word, f"returned {what} {value}; it must return {right}")
    _CALLS[word] += 1
    due = _DUE.get(word, 1)
    if _CALLS[word] >= due and main.count_nonzero():
        anew = due > 1 and word.unchanged  # a continued run has the state of a module that was just imported
        other = own_source.load_apart(word.code) if anew else function
        with own_source.alone({}):
            watch = own_source.Watch(word.files())
            again = _once(field, word, other, given, main.device)
            watch.refuse()
        if again.shape != made.shape or not torch.equal(made.nan_to_num(), again.nan_to_num()):
            why = "returned other numbers for the same arguments, so no run could be repeated"
            raise _broken(field, word, f"{why}: draw from the argument bits, and keep no state", True)
        _DUE[word] = due * 4
    return made


def _once(
    field: str,
    word: Own,
    function: Callable[..., object],
    given: dict[str, object],
    device: torch.device,
) -> Tensor:
    """Call a function and return its tensor; InputError if it raises, OwnFunctionError for its contract."""
    tensors = {name: value for name, value in given.items() if isinstance(value, Tensor)}
    before = {name: _content(tensor) for name, tensor in tensors.items()}
    state = _generators(device)
    try:
        with torch.no_grad():
            made = function(**given)
    except (InputError, MemoryError):
        raise
    except Exception as error:
        if isinstance(error, RuntimeError) and any(part in str(error) for part in _PASSED_ON):
            raise
        raise InputError(f"{field} {word} raised {_described(error, word)}") from error
    for library, own in _generators(device).items():
        if own != state[library]:
            why = f"draws from {library}'s global generator, so no run could be repeated"
            raise _broken(field, word, f"{why}: take the argument bits")
    for name, tensor in tensors.items():
        if _content(tensor) != before[name]:
            raise _broken(field, word, f"changes its argument {name} in place: work on a copy")
    if not isinstance(made, Tensor):
        raise _broken(field, word, f"returned {type(made).__name__}, not a tensor")
    return made


def _broken(field: str, word: Own, why: str, unrepeatable: bool = False) -> OwnFunctionError:
    """Return the error of a function that breaks its contract, at its line."""
    code = word.code
    try:
        line = own_source.functions(code.path)[code.function].lineno
    except (OSError, SyntaxError, KeyError):
        line = 0
    return OwnFunctionError(f"{field} {word} {why}", str(code.path), line, unrepeatable)


_CALLS: Counter[Own] = Counter()
_DUE: dict[Own, int] = {}
"""Number of a function's calls in this process, and that of the next call which is compared with another."""


@cache
def _loaded(word: Own) -> tuple[Callable[..., object], Collection[str]]:
    """Import a function, once for each content of its source; return it with the names of its arguments."""
    if not word.unchanged:
        raise InputError(f"{word} was edited, or is gone, since this run was planned: plan it again")
    try:
        function = own_source.load_apart(word.code)
    except Exception as error:
        raise InputError(f"{word} cannot be imported: {_described(error, word)}") from error
    if not word.unchanged:
        raise InputError(f"{word} was edited while it was imported: plan it again")
    return function, inspect.signature(function).parameters.keys()


def _described(error: Exception, word: Own) -> str:
    """Return an exception as a phrase, with the last line of the user's source on its way."""
    own = {str(path) for path in word.files()}
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename in own]
    at = f" ({frames[-1].filename}:{frames[-1].lineno})" if frames else ""
    first = next(iter(str(error).strip().splitlines()), "")
    return f"{type(error).__name__}{f': {first}' if first else ''}{at}"


def _refuse_off_grid(field: str, word: Own, given: Tensor, made: Tensor, bad: Tensor, where: str) -> None:
    """Raise OwnFunctionError if a number made of a finite one is bad."""
    wrong = (bad | made.isnan()) & given.isfinite()
    if wrong.any():
        value, source = made[wrong][0].item(), given.expand_as(made)[wrong][0].item()
        raise _broken(field, word, f"returned {value:.9g} for {source:.9g}, which is outside the {where}")


def _content(tensor: Tensor) -> tuple[int, int]:
    """Return the number of a tensor's changes by torch, and a checksum where NumPy can change it."""
    changes = 0 if tensor.is_inference() else cast("int", tensor._version)
    return changes, zlib.crc32(tensor.detach().contiguous().numpy()) if tensor.is_cpu else 0


def _generators(device: torch.device) -> dict[str, object]:
    """Return the states of the global generators that a function on this device may draw from, by library."""
    drawn = [torch.get_rng_state()]
    drawn += [torch.cuda.get_rng_state(device)] if device.type == "cuda" else []
    states: dict[str, object] = {"torch": [state.numpy().tobytes() for state in drawn]}
    numpy = np.random.get_state(legacy=False)
    return states | {"Python": random.getstate(), "NumPy": (numpy["state"]["pos"], numpy["state"]["key"][0])}
