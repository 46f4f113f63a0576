"""Many cases of one promise as a single test, which lists every case that fails."""

import functools
import inspect
import itertools
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from random import Random
from typing import Any, NamedTuple, TypeVar

import pytest

T = TypeVar("T")
FAST_CASES = 2
"""Cases of a test that `--fast` keeps."""


class Tier:
    """The tier that runs, which conftest sets before it imports the tests."""

    fast = False
    whole = False


class Sample(NamedTuple):
    """Least number of cases of a wide product that `make test` runs, and the seed that draws them."""

    size: int
    seed: int


def spread(cases: Sequence[T], most: int = FAST_CASES) -> list[T]:
    """Return at most so many cases: the first, the last and those evenly between."""
    last, count = len(cases) - 1, min(most, len(cases))
    return [cases[round(last * n / max(1, count - 1))] for n in range(count)]


def sampled(cases: Iterable[T], size: int, seed: int) -> list[T]:
    """Return all cases with `--all`, and a sample of them without, in their order.

    Args:
        cases: values, or tuples of values.
        size: cases in the sample. It has more where these do not suffice for each value of each place of the
            tuples to be in one of them.
        seed: decides which.
    """
    listed = list(cases)
    if Tier.whole:
        return listed
    parts = [{*enumerate(map(repr, case if isinstance(case, tuple) else (case,)))} for case in listed]
    left, unseen, chosen = Random(seed).sample(range(len(listed)), len(listed)), set().union(*parts), []
    while left and (unseen or len(chosen) < size):
        best = max(left, key=lambda number: len(parts[number] & unseen))  # of equals the first, as drawn
        left.remove(best)
        chosen.append(best)
        unseen -= parts[best]
    return [listed[number] for number in sorted(chosen)]


def dealt(values: Iterable[T], part: int, parts: int, seed: int = 0) -> list[T]:
    """Return all values with `--all`, and without the part that falls to one of several promises, in their order.

    For promises about all of one registry that take seconds each: together they have every value.

    Args:
        values: those of the registry.
        part: number of the promise, from 0.
        parts: number of promises.
        seed: decides which value falls to which.
    """
    listed = list(values)
    order = Random(seed).sample(range(len(listed)), len(listed))
    return listed if Tier.whole else [listed[number] for number in sorted(order[part::parts])]


def covering(cases: Mapping[T, Any]) -> list[T]:
    """Return all cases with `--all`, and without those that differ most, in their order.

    For promises about all presets whose faults are each one of a field's value, and not of a combination: every
    value that a field has in one of 38 presets is in one of 23.

    Args:
        cases: model that each case runs, by its name; each of its fields with its value counts.
    """
    if Tier.whole:
        return [*cases]
    values = {name: {*re.findall(r"\w+=[^=(,)]+", repr(case))} for name, case in cases.items()}
    seen: set[str] = set()
    chosen: list[T] = []
    while unseen := set().union(*values.values()) - seen:
        chosen.append(max(values, key=lambda name: len(values[name] & unseen)))
        seen |= values[chosen[-1]]
    return [name for name in cases if name in chosen]


def every(
    sample: Sample | None = None, /, **axes: Iterable[Any]
) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with each combination of values, as one test.

    Args:
        sample: without `--all` a sample of the combinations, each value at least once; None for all of them.
        axes: values by the name of the test's argument; of a mapping, its keys. An argument `a__b` stands for
            the two arguments a and b, and its values are pairs.

    Returns:
        A decorator. Use it in place of `pytest.mark.parametrize` where there are many quick cases: they cost
        no set-up each, and a failure lists the combinations that fail. Each has a `tmp_path` of its own; other
        fixtures are shared, so the test must not change them. Keep `parametrize` for tests of Hypothesis: it
        draws the same examples for all cases of one id.

    Raises:
        AssertionError: from the test, with each combination that failed and its error.
    """
    listed = {name: list(values) for name, values in axes.items()}
    names = [part for name in listed for part in name.split("__")]

    def decorate(test: Callable[..., None]) -> Callable[..., None]:
        signature = inspect.signature(test)
        assert {*names} <= {*signature.parameters}, f"{test.__name__} has no argument for one of {names}"

        @functools.wraps(test)
        def run_all(*arguments: Any, **fixtures: Any) -> None:
            combinations = [*itertools.product(*listed.values())]
            combinations = sampled(combinations, *sample) if sample else combinations
            failures = []
            chosen = spread(combinations) if Tier.fast else combinations
            for number, combination in enumerate(chosen):
                parts = zip(listed, combination, strict=True)
                values = [part for name, value in parts for part in (value if "__" in name else [value])]
                case = dict(zip(names, values, strict=True))
                own = {}
                if "tmp_path" in fixtures:
                    own["tmp_path"] = fixtures["tmp_path"] / str(number)
                    own["tmp_path"].mkdir()
                try:
                    test(*arguments, **fixtures | own | case)
                except (Exception, pytest.fail.Exception) as error:
                    failures.append((case, error))
            if failures:
                lines = [f"{case}: {type(error).__name__}: {error}" for case, error in failures]
                count = f"{len(failures)} of {len(chosen)} cases fail"
                raise AssertionError("\n".join([count, *lines])) from failures[0][1]

        kept = [one for name, one in signature.parameters.items() if name not in names]
        run_all.__signature__ = signature.replace(parameters=kept)
        return run_all

    return decorate
