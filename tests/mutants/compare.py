"""Compare the mutants of two commits: `python tests/mutants/compare.py BEFORE AFTER`, results of one seed.

Listed are those killed before that survive after, which the tests have stopped seeing, and those that no
longer exist, because their function went or changed. A function that moved is the same. Exit status 1 if
any survives that was killed.
"""

import json
import sys
from pathlib import Path
from typing import Any

Row = dict[str, Any]


def read(path: Path) -> dict[str, Row]:
    """Return the results of a file by the key of the mutant."""
    return {row["key"]: row for row in map(json.loads, path.read_text().splitlines())}


def lost(before: dict[str, Row], after: dict[str, Row]) -> list[Row]:
    """Return the mutants killed before that are not killed after."""
    return [
        after[key]
        for key, row in before.items()
        if row["outcome"] == "killed" and key in after and after[key]["outcome"] != "killed"
    ]


def gone(before: dict[str, Row], after: dict[str, Row]) -> list[Row]:
    """Return the mutants that were there before and are not after."""
    return [row for key, row in before.items() if key not in after]


def main(before: Path, after: Path) -> int:
    """Print what differs; return the exit status."""
    old, new = read(before), read(after)
    for title, rows in (("killed before, not after", lost(old, new)), ("gone", gone(old, new))):
        print(f"{title}: {len(rows)}")
        for row in rows:
            print(f"  ablate/{row['file']}:{row['line']} {row['function']}: {row['change']}")
    return int(bool(lost(old, new)))


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    sys.exit(main(Path(sys.argv[1]), Path(sys.argv[2])))
