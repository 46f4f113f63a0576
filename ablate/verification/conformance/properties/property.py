"""One property: a promise, what a subject is handed, which of its functions, and the comparison."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ablate.verification.conformance.examination import Examination
from ablate.verification.conformance.properties.promises import PROMISES
from ablate.verification.conformance.result import Row


@dataclass(frozen=True)
class Property:
    """Promise of a recipe that can be examined from outside."""

    name: str
    inputs: Callable[[Examination], Any]
    """Makes what the function is handed. NotApplicableError: there is nothing to try."""
    function: str
    """Function of the subject that is called: a field of `Subject`."""
    compare: Callable[[Examination, "Property"], Row]
    """Calls the function with the inputs and compares; its docstring names the tolerance, with its cause."""

    @property
    def promise(self) -> str:
        """One sentence: what an implementation of the recipe does."""
        return PROMISES[self.name]
