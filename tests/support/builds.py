"""A build of the compiled quantisers that notes its calls."""

from typing import Any

from ablate.numerics.kernels import cpu


class Counting:
    """A build, for `builds.using`, with the numbers of rows and columns of every operand that it quantised."""

    def __init__(self, library: Any) -> None:
        self._library = library
        self.quantised: list[tuple[int, int]] = []

    def __getattr__(self, name: str) -> Any:
        function = getattr(self._library, name)
        if name not in (*cpu.TILES, "quantize"):
            return function

        def noted(source: int, rows: int, columns: int, *others: Any) -> Any:
            self.quantised.append((rows, columns))
            return function(source, rows, columns, *others)

        return noted
