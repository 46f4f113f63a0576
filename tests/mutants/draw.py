"""The draw: which changes of which functions a seed means.

Changes are taken in the order of a hash of the seed and the change's key. The key has the function's name and
syntax, not its file: code that is deleted or moved elsewhere leaves the order of the rest as it is, so that one
seed draws the same mutants on the commit before and the commit after.
"""

import hashlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mutants.changes import Site, Source, key_of, normalised, sites

PACKAGE = Path(__file__).parents[2] / "ablate"
PACKAGES = ("numerics", "engines", "results", "store", "execution", "experiment")
DRAWN = 120


@dataclass(frozen=True)
class Mutant:
    """One change of one function in one file, whose path is relative to the package."""

    key: str
    file: str
    function: str
    site: Site

    def text(self, root: Path = PACKAGE) -> str:
        """Return the text of the file with the change."""
        return self.site.apply((root / self.file).read_text())


def mutants_of(root: Path, folder: str) -> Iterator[Mutant]:
    """Yield every change of every function below a folder."""
    for path in sorted((root / folder).rglob("*.py")):
        source = Source(path.read_text())
        for name, function in source.functions():
            shape = normalised(function)
            for number, site in enumerate(sites(source, function)):
                yield Mutant(key_of(name, shape, number, site), str(path.relative_to(root)), name, site)


def rank(seed: int, key: str) -> str:
    """Return the place of a change in a seed's order."""
    return hashlib.sha256(f"{seed} {key}".encode()).hexdigest()


def draw(seed: int, mutants: Iterable[Mutant], count: int) -> list[Mutant]:
    """Return the first `count` mutants in a seed's order; of equal functions, those of the first file."""
    first: dict[str, Mutant] = {}
    for mutant in mutants:
        first.setdefault(mutant.key, mutant)
    return [first[key] for key in sorted(first, key=lambda key: rank(seed, key))[:count]]
