"""One property: what is promised, by which tolerance, and which faults of the field it detects."""

from collections.abc import Callable
from dataclasses import dataclass

from ablate.verification.conformance.examination import Examination
from ablate.verification.conformance.result import Row


@dataclass(frozen=True)
class Property:
    """Promise of a recipe that can be examined from outside."""

    name: str
    promise: str
    """One sentence: what an implementation of the recipe does."""
    tolerance: str
    """Allowed differences, with their cause."""
    needs: str
    """Function of the subject that is called: a field of `Subject`."""
    faults: tuple[int, ...]
    """Published faults that it detects, by the numbers of `faults.PUBLISHED`."""
    examine: Callable[[Examination], Row]
