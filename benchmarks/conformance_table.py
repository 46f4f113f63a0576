"""Run the conformance kit on each public library that is installed here, and keep the findings in a file.

    python benchmarks/conformance_table.py [--again] [NAME ...]

Each library runs in a process of its own, since several change what others import. Findings go to
benchmarks/conformance.json, one entry a library, recipe and version; an entry of the installed version and of
these properties is kept, unless `--again`. Libraries need several environments: run it once in each.
`python docs/generate_conformance.py` writes docs/project/conformance.md from that file.
"""

import argparse
import hashlib
import json
import platform
import re
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from ablate import files
from ablate.verification import conformance
from ablate.verification.conformance.examination import Examination
from ablate.verification.conformance.libraries import SUBJECTS, claimed, library_subject
from ablate.verification.conformance.properties import PROPERTIES
from ablate.verification.conformance.result import Outcome, Row
from ablate.verification.conformance.run import examined

FILE = Path(__file__).with_suffix("").with_name("conformance.json")
LONGEST = 160
"""Characters of a block's computation that are kept."""
MARK = "@@findings "
"""Prefix of the line with the findings in the output of a library's process."""


def digest(name: str) -> str:
    """Return 12 hexadecimal digits that change with the kit's properties and the library's adaptor."""
    folder = Path(conformance.__file__).parent
    files = [path for path in sorted(folder.rglob("*.py")) if "libraries" not in path.parts]
    files += [folder / "libraries" / f"{name}.py"]
    return hashlib.sha256(b"".join(path.read_bytes() for path in files)).hexdigest()[:12]


def finding(row: Row) -> dict[str, Any]:
    """Return a row as it is kept: the first block that differs as text, without its numbers."""
    kept: dict[str, Any] = {"outcome": row.outcome.value}
    if row.outcome is Outcome.NOT_APPLICABLE:
        return kept
    kept |= {"cases": row.cases, "differing": row.differing}
    if row.detail:
        kept["detail"] = row.detail
    if row.block is not None and row.outcome is Outcome.FAIL:
        parts = (row.block.place, row.block.computed, row.block.computed_by_subject)
        kept["block"] = [part[:LONGEST] for part in parts]
    return kept


def laid_out(kept: dict[str, Any]) -> str:
    """Return the findings as JSON with a line for each property."""
    whole = json.dumps(dict(sorted(kept.items())), indent=1)
    return re.sub(r"{\n +\"outcome\"[^{}]*}", lambda row: json.dumps(json.loads(row[0])), whole) + "\n"


def examine(name: str) -> dict[str, Any]:
    """Return the findings on all recipes of a library: by recipe, then by property."""
    found = {}
    for recipe, change in SUBJECTS[name].recipes.items():
        bench = Examination(library_subject(name, recipe), claimed(name, recipe))
        rows = [examined(bench, one) for one in PROPERTIES.values()]
        found[recipe] = {"change": change, "rows": {row.property: finding(row) for row in rows}}
    return found


def main() -> None:
    """Examine the libraries that are named or installed, each in a process of its own."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="libraries; default: all that are installed")
    parser.add_argument("--again", action="store_true", help="examine again what is in the file")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.child:
        print(MARK + json.dumps(examine(args.names[0])))
        return
    kept = json.loads(FILE.read_text()) if FILE.exists() else {}
    for name in args.names or SUBJECTS:
        version, mark = SUBJECTS[name].version, digest(name)
        entry = kept.get(name, {})
        if version is None:
            print(f"{name}: not installed ({SUBJECTS[name].command})")
            continue
        if (entry.get("version"), entry.get("kit")) == (version, mark) and not args.again:
            print(f"{name} {version}: kept, of {entry['date']}")
            continue
        command = [sys.executable, "-W", "ignore", __file__, "--child", name]
        done = subprocess.run(command, capture_output=True, text=True, check=False)
        lines = [line for line in done.stdout.splitlines() if line.startswith(MARK)]
        if done.returncode or not lines:
            print(f"{name} {version}: failed\n{done.stderr[-2000:]}")
            continue
        kept[name] = {
            "version": version,
            "date": f"{datetime.now(UTC):%Y-%m-%d}",
            "python": platform.python_version(),
            "torch": torch.__version__.partition("+")[0],
            "kit": mark,
            "recipes": json.loads(lines[-1].removeprefix(MARK)),
        }
        files.write_text(FILE, laid_out(kept))
        print(f"{name} {version}: examined")


if __name__ == "__main__":
    main()
