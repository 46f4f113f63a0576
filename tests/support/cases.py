"""Many cases of one promise as a single test, which lists every case that fails."""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Sequence
from typing import Any, TypeVar

import pytest

T = TypeVar("T")
FAST_CASES = 2
"""Cases of a test that `--fast` keeps."""


class Tier:
    """The tier that runs: conftest sets `fast`."""

    fast = False


def spread(cases: Sequence[T], most: int = FAST_CASES) -> list[T]:
    """Return at most so many cases: the first, the last and those evenly between."""
    last, count = len(cases) - 1, min(most, len(cases))
    return [cases[round(last * n / max(1, count - 1))] for n in range(count)]


def every(**axes: Iterable[Any]) -> Callable[[Callable[..., None]], Callable[..., None]]:
    """Run a test with each combination of values, as one test.

    Args:
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
