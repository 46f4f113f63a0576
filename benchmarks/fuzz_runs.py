"""Fuzz the reading of runs that were not started here: change files of every source, and read each mutant.

A mutant must either be refused in one sentence, or be read rightly. Rightly means:

- a table has exactly the values that `csv` or `json` and ten lines of this file find in the mutant's text;
- a log has the values of each line that is unchanged, and no value but these and numbers of changed lines, at
  a step that such a line has; a value may be missing only if a sentence says that lines were left out;
- a file with checksums (event files, W&B's offline runs) has the original values, all but those behind a cut.

Any other exception is a defect. Mutant `n` depends on `n` alone: `--first n --count 1 --keep FOLDER` makes it
again. `python benchmarks/fuzz_runs.py --count 10000` prints outcomes by source and defects; its status is 1
if there are any.
"""

import argparse
import csv
import io
import json
import random
import re
import sys
import tempfile
import traceback
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field, replace
from math import isfinite
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests"))

from support import foreign_files  # noqa: E402
from support.foreign_files import SOURCES, Files, Key, equal, expected  # noqa: E402

CHECKED = ("TensorBoard", "W&B folders")
"""Sources whose files have checksums."""
COLUMNAR = (
    "csv, long",
    "csv, wide",
    "csv, a file a run",
    "W&B chart",
    "json lines",
    "parquet",
    "trainer_state.json",
    "Lightning's csv",
)
OURS = {
    "train/loss": "train/loss",
    "val/loss": "val/loss",
    "loss": "train/loss",
    "eval_loss": "val/loss",
    "train_loss": "train/loss",
    "val_loss": "val/loss",
}
VALUES = (
    "nan",
    "inf",
    "-inf",
    "abc",
    "1e999",
    "-1",
    "",
    "3,5",
    "1_0",
    "0x1",
    "7",
    "2.5",
    "1e-3",
    "null",
    '"x"',
)
_NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?|[-+]?nan|[-+]?inf", re.IGNORECASE)


@dataclass
class Tally:
    """Outcomes of mutants."""

    read: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    same: Counter[str] = field(default_factory=Counter)
    """Mutants that are read and have the values of the original."""
    defects: Counter[str] = field(default_factory=Counter)
    examples: dict[str, int] = field(default_factory=dict)

    def defect(self, what: str, number: int) -> None:
        """Count a defect; keep the first mutant that has it."""
        self.defects[what] += 1
        self.examples.setdefault(what, number)


# --- changes --------------------------------------------------------------------------------------


def _flip(content: bytes, draw: random.Random) -> bytes:
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 4))):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def _cut(content: bytes, draw: random.Random) -> bytes:
    return content[: draw.randrange(1, len(content))]


def _splice(content: bytes, draw: random.Random) -> bytes:
    """Remove a piece, or write it twice."""
    one, other = sorted(draw.randrange(len(content)) for _ in range(2))
    return content[:one] + content[other:] if draw.random() < 0.5 else content[:other] + content[one:]


def _lines(content: bytes, draw: random.Random) -> bytes:
    """Drop, repeat, swap or spoil a line."""
    lines = content.split(b"\n")
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    change = draw.randrange(5)
    if change == 0:
        del lines[one]
    elif change == 1:
        lines.insert(other, lines[one])
    elif change == 2:
        lines[one], lines[other] = lines[other], lines[one]
    elif change == 3:
        lines[one] = lines[one][: draw.randrange(len(lines[one]) + 1)]
    else:
        lines.insert(one, draw.choice((b"", b"oops", b"\xff\xfe", b"{}", b",,,", b"step: 5")))
    return b"\n".join(lines)


def _number(content: bytes, draw: random.Random) -> bytes:
    """Write another value in the place of a number."""
    spots = list(re.finditer(rb"(?<![\w.])-?\d+\.?\d*(?:e-?\d+)?(?![\w.])", content))
    if not spots:
        return content
    spot = draw.choice(spots)
    return content[: spot.start()] + draw.choice(VALUES).encode() + content[spot.end() :]


def _header(content: bytes, draw: random.Random) -> bytes:
    """Rename columns, or swap their names."""
    header, end, rest = content.partition(b"\n")
    names = header.split(b",")
    one, other = draw.randrange(len(names)), draw.randrange(len(names))
    if draw.random() < 0.5:
        names[one], names[other] = names[other], names[one]
    else:
        word = names[one].decode("latin-1")
        at = draw.randrange(len(word) + 1)
        names[one] = draw.choice(
            (word[:at] + word[at + 1 :], word[:at] + "x" + word[at:], word.upper(), "loss")
        ).encode()
    return b",".join(names) + end + rest


def _encoding(content: bytes, draw: random.Random) -> bytes:
    text = content.decode("latin-1")
    change = draw.choice(("utf-16", "utf-16-le", "utf-8-sig", "crlf", "cr"))
    if change in ("crlf", "cr"):
        return content.replace(b"\n", b"\r\n" if change == "crlf" else b"\r")
    return text.encode(change)


CHANGES = (_flip, _flip, _cut, _splice, _lines, _lines, _lines, _number, _number, _header, _encoding)


def mutant(number: int) -> tuple[str, Files, str]:
    """Return source, files and the name of the changed file of a mutant."""
    draw = random.Random(number)
    name = [*SOURCES][number % len(SOURCES)]
    files = SOURCES[name]()
    changed = draw.choice([*files.contents])
    content = files.contents[changed]
    for _ in range(draw.choice((1, 1, 1, 2))):
        content = draw.choice(CHANGES)(content, draw) or b"\n"
    return name, replace(files, contents=files.contents | {changed: content}), changed


# --- oracles --------------------------------------------------------------------------------------


def _float(cell: object) -> float | None:
    """Return the number of a cell, None for none."""
    with suppress(ValueError, TypeError, OverflowError):
        return None if isinstance(cell, bool) else float(cell)  # type: ignore[arg-type]
    return None


def _rows(name: str, file: str, content: bytes) -> list[dict[str, object]]:
    """Return the rows of a file of a table, with columns arm, seed and step."""
    if name == "parquet":
        import pyarrow.parquet

        return pyarrow.parquet.read_table(io.BytesIO(content)).to_pylist()
    mark = content[:2] in (b"\xff\xfe", b"\xfe\xff")
    text = content.decode("utf-16" if mark else "utf-8-sig")
    own = re.fullmatch(r"(\w+)-s(\d)\.\w+", file)
    given: dict[str, object] = {"arm": own[1], "seed": own[2]} if own else {}
    if name == "trainer_state.json":
        return [{**entry, **given} for entry in json.loads(text)["log_history"]]
    if name == "json lines":
        rows = []
        for line in text.split("\n"):
            with suppress(ValueError):
                row = json.loads(line)
                inner = {
                    f"{key}/{name}": row[key][name]
                    for key in row
                    if isinstance(row[key], dict)
                    for name in row[key]
                }
                rows.append(row | inner)
        return rows
    header, *lines = [row for row in csv.reader(io.StringIO(text, newline="")) if any(map(str.strip, row))]
    names = [{"_step": "step", "Step": "step"}.get(cell.strip(), cell.strip()) for cell in header]
    return [dict(zip(names, line, strict=True)) | given for line in lines if len(line) == len(names)]


def _plain(column: str) -> str:
    return column.strip().lower().lstrip("_")


def table_values(name: str, files: Files) -> dict[Key, list[float]]:
    """Return every value that the files of a table have, by its place; several if they contradict."""
    values: dict[Key, list[float]] = {}
    for file, content in files.contents.items():
        for row in _rows(name, file, content):
            roles = {
                _plain(column): cell
                for column, cell in row.items()
                if _plain(column) in ("arm", "seed", "step")
            }
            step = _float(roles.get("step", 0))
            step = step + 1 if step is not None and name == "Lightning's csv" else step
            for column, cell in row.items():
                value = _float(cell)
                if column in ("arm", "seed", "step") or value is None or step is None or not isfinite(step):
                    continue
                arm, seed, metric = (
                    str(roles.get("arm")).strip(),
                    _float(roles.get("seed", -1)),
                    column.strip(),
                )
                if name == "W&B chart":
                    run, _, metric = metric.rpartition(" - ")
                    arm, _, text = run.rpartition("-s")
                    seed = _float(text)
                if seed is not None and isfinite(seed):
                    other = (
                        metric.replace("eval_", "val/") if metric.startswith("eval_") else f"train/{metric}"
                    )
                    metric = OURS.get(metric.lower(), other if "state" in name else metric)
                    several = values.setdefault((arm, int(seed), metric, int(step)), [])
                    several += [] if any(equal(value, other) for other in several) else [value]
    return values


def _judge_table(name: str, files: Files, found: dict[Key, float], said: list[str]) -> str | None:
    """Return what is wrong with the values of a table; None if nothing is."""
    expects = table_values(name, files)
    for key, value in found.items():
        if not any(equal(value, other) for other in expects.get(key, ())):
            return f"{name}: a value that no row has"
    said_so = " ".join(said)
    for key in expects:
        metric = key[2]
        if key in found or metric.endswith(("__MIN", "__MAX")) or metric in foreign_files.NOT_COMPARED:
            continue
        if any(metric == other[2] for other in found) or metric in ("train/loss", "val/loss"):
            excused = any(word in said_so for word in ("last line", "goes back", "left out; line"))
            if not excused and repr(metric) not in said_so:
                return f"{name}: a value is missing"
    if (
        any(len(several) > 1 for key, several in expects.items() if key in found and key[1] >= 0)
        and "goes back" not in said_so
    ):
        return f"{name}: a contradiction is accepted"
    return None


def _judge_log(name: str, files: Files, changed: str, found: dict[Key, float], said: list[str]) -> str | None:
    """Return what is wrong with the values of logs; None if nothing is."""
    original = SOURCES[name]().contents
    arm, seed = re.fullmatch(r"(\w+)-s(\d)\.\w+", changed).groups()  # type: ignore[union-attr]
    known = {line: place for place, line in enumerate(original[changed].split(b"\n"))}
    new = [line for line in files.contents[changed].split(b"\n") if line not in known]
    text = re.sub(r"\x1b\[[\d;]*m", "", b"\n".join(new).decode("utf-8", "replace"))
    numbers = [float(number) for number in _NUMBER.findall(text)]
    truth = expected(name)
    for key, value in found.items():
        if key in truth and equal(value, truth[key]):
            continue
        if key[:2] != (arm, int(seed)):
            return f"{name}: an unchanged file is read otherwise"
        whole_numbers = [str(int(number)) for number in numbers if abs(number) < 1e9]
        step_known = "hf:" in str(files.logs) or any(str(key[3]) in digits for digits in whole_numbers)
        if not any(equal(value, number) for number in numbers) or not step_known:
            return f"{name}: a value that no line has"
    lost = [key for key in truth if key not in found]
    words = ("left out", "goes back", "last line")
    if any(key[:2] != (arm, int(seed)) for key in lost):
        return f"{name}: a value of an unchanged file is missing"
    whole = {line for line in files.contents[changed].split(b"\n")[:-1] if line in known}
    if (
        all(line in whole for line in known if line.strip())
        and lost
        and not any(word in " ".join(said) for word in words)
    ):
        return f"{name}: a value of an unchanged line is missing"
    if len(lost) > _removed(original[changed], whole) and not any(word in " ".join(said) for word in words):
        return f"{name}: more values are missing than lines were changed"
    return None


def _removed(content: bytes, whole: set[bytes]) -> int:
    """Return how many values may be in the lines of a file that a mutant has no more."""
    return 2 * sum(line not in whole for line in content.split(b"\n") if line.strip())


def _judge_checked(name: str, found: dict[Key, float], said: list[str]) -> str | None:
    """Return what is wrong with the values of files with checksums; None if nothing is."""
    truth = expected(name)
    if any(key not in truth or not equal(value, truth[key]) for key, value in found.items()):
        return f"{name}: a value that the original does not have"
    lost = truth.keys() - found.keys()
    for key in lost:  # a cut between two records shows only in what comes behind it
        if any(other[:3] == key[:3] and other[3] > key[3] for other in found):
            return f"{name}: a value is missing before the end"
    return None


def judge(name: str, files: Files, changed: str, found: dict[Key, float], said: list[str]) -> str | None:
    """Return what is wrong with the values that were read of a mutant; None if nothing is.

    Args:
        name: its source.
        files: its files.
        changed: name of the changed file.
        found: values that were read.
        said: sentences on what was left out.
    """
    try:
        if name in CHECKED:
            return _judge_checked(name, found, said)
        if name in COLUMNAR:
            return _judge_table(name, files, found, said)
        return _judge_log(name, files, changed, found, said)
    except (ValueError, KeyError, OSError, csv.Error) as error:
        return f"{name}: read, and the oracle cannot: {type(error).__name__}"


def run(first: int, count: int, keep: Path | None) -> Tally:
    """Read mutants and judge what comes of them.

    Args:
        first: number of the first mutant.
        count: number of mutants.
        keep: folder in which their files are left; None: they are deleted.
    """
    from ablate.errors import InputError

    warnings.simplefilter("ignore")
    tally = Tally()
    for number in range(first, first + count):
        name, files, changed = mutant(number)
        with tempfile.TemporaryDirectory() as place:
            folder = keep / str(number) if keep else Path(place)
            foreign_files.write(files, folder)
            try:
                found, said = foreign_files.result(files, folder)
            except InputError as error:
                tally.refused[name] += 1
                if len(error.problems) != 1 or "\n" in str(error):
                    tally.defect(f"{name}: a refusal of several lines", number)
                continue
            except Exception as error:
                where = traceback.extract_tb(error.__traceback__)[-1]
                tally.defect(
                    f"{name}: {type(error).__name__} in {Path(where.filename).name}:{where.lineno}", number
                )
                continue
        tally.read[name] += 1
        truth = expected(name)
        if found.keys() == truth.keys() and all(equal(found[key], truth[key]) for key in truth):
            tally.same[name] += 1
        if wrong := judge(name, files, changed, found, said):
            tally.defect(wrong, number)
    return tally


def main() -> int:
    """Print the outcomes; 1 if there are defects."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--count", type=int, default=10_000, help="Mutants to try; default: 10000.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first mutant; default: 0.")
    parser.add_argument("--keep", type=Path, help="A folder in which the mutants are left.")
    asked = parser.parse_args()
    tally = run(asked.first, asked.count, asked.keep)
    for name in SOURCES:
        print(
            f"{name:22} {tally.refused[name]:5} refused, {tally.read[name]:5} read,"
            f" {tally.same[name]:5} of them as the original"
        )
    refused, read = sum(tally.refused.values()), sum(tally.read.values())
    print(f"{asked.count} mutants: {refused} refused, {read} read, {sum(tally.defects.values())} defects")
    for kind, count in tally.defects.most_common():
        print(f"{count:6} x {kind} (mutant {tally.examples[kind]})")
    return 1 if tally.defects else 0


if __name__ == "__main__":
    sys.exit(main())
