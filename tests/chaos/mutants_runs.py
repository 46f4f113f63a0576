"""Mutants of the files of runs that were not started here, of every source, and what is read of each.

A mutant must either be refused in one sentence, or be read rightly. Rightly means:

- a table has exactly the values that `csv` or `json` and ten lines of this file find in the mutant's text;
- a log has the values of each line that is unchanged, and no value but these and numbers of changed lines, at a step that such a line
  has; a value may be missing only if a sentence says that lines were left out;
- a file with checksums (event files, W&B's offline runs) has the original values, all but those behind a cut.

Any other exception is a defect. Mutant `n` depends on `n` alone.
"""

import csv
import io
import json
import re
import tempfile
import traceback
import warnings
from contextlib import suppress
from dataclasses import replace
from math import isfinite
from pathlib import Path
from random import Random

from support import foreign_files
from support.foreign_files import SOURCES, Files, Key, equal, expected

from ablate.errors import InputError
from chaos.audit import Finding
from chaos.mutations import cut, encoding, flip, header, lines, number, splice
from chaos.report import Fault

FAMILY = "foreign runs"
OURS = dict.fromkeys(("loss", "train_loss", "train/loss"), "train/loss")
OURS |= dict.fromkeys(("eval_loss", "val_loss", "val/loss"), "val/loss")
CHANGES = (flip, flip, cut, splice, lines, lines, lines, number, number, header, encoding)
_NUMBER = re.compile(r"[-+]?\d+\.?\d*(?:e[-+]?\d+)?|[-+]?nan|[-+]?inf", re.IGNORECASE)


def mutant(n: int) -> tuple[str, Files, str]:
    """Return source, files and the name of the changed file of a mutant."""
    draw = Random(n)
    name = [*SOURCES][n % len(SOURCES)]
    files = SOURCES[name]()
    changed = draw.choice([*files.contents])
    content = files.contents[changed]
    for _ in range(draw.choice((1, 1, 1, 2))):
        content = draw.choice(CHANGES)(content, draw) or b"\n"
    return name, replace(files, contents=files.contents | {changed: content}), changed


# Oracles


def _float(cell: object) -> float | None:
    """Return the number of a cell, None for none."""
    with suppress(ValueError, TypeError, OverflowError):
        return None if isinstance(cell, bool) else float(cell)
    return None


def _seed(cell: object) -> int | None:
    """Return the whole number of a cell, of any size; None for none."""
    with suppress(ValueError):
        return int(str(cell))
    number = _float(cell)
    return int(number) if number is not None and isfinite(number) else None


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
                groups = {key: value for key, value in row.items() if isinstance(value, dict)}
                inner = {f"{key}/{name}": group[name] for key, group in groups.items() for name in group}
                rows.append(row | inner)
        return rows
    first, *others = [row for row in csv.reader(io.StringIO(text, newline="")) if any(map(str.strip, row))]
    names = [{"_step": "step", "Step": "step"}.get(cell.strip(), cell.strip()) for cell in first]
    return [dict(zip(names, row, strict=True)) | given for row in others if len(row) == len(names)]


def _plain(column: str) -> str:
    return column.strip().lower().lstrip("_")


def table_values(name: str, files: Files) -> dict[Key, list[float]]:
    """Return every value that the files of a table have, by its place; several if they contradict."""
    values: dict[Key, list[float]] = {}
    for file, content in files.contents.items():
        for row in _rows(name, file, content):
            roles = {_plain(column): cell for column, cell in row.items()}
            step = _float(roles.get("step", 0))
            step = step + 1 if step is not None and name == "Lightning's csv" else step
            for column, cell in row.items():
                value = _float(cell)
                if column in ("arm", "seed", "step") or value is None or step is None or not isfinite(step):
                    continue
                arm, seed = str(roles.get("arm")).strip(), _seed(roles.get("seed", -1))
                metric = column.strip()
                if name == "W&B chart":
                    run, _, metric = metric.rpartition(" - ")
                    arm, _, text = run.rpartition("-s")
                    seed = _seed(text)
                if seed is not None:
                    other = (
                        metric.replace("eval_", "val/") if metric.startswith("eval_") else f"train/{metric}"
                    )
                    metric = OURS.get(metric.lower(), other if "state" in name else metric)
                    several = values.setdefault((arm, seed, metric, int(step)), [])
                    several += [] if any(equal(value, other) for other in several) else [value]
    return values


def _judge_table(name: str, files: Files, found: dict[Key, float], said: str) -> str | None:
    """Return what is wrong with the values of a table; None if nothing is."""
    expects = table_values(name, files)
    for key, value in found.items():
        if not any(equal(value, other) for other in expects.get(key, ())):
            return "a value that no row has"
    for key in expects:
        metric = key[2]
        if key in found or metric.endswith(("__MIN", "__MAX")) or metric in foreign_files.NOT_COMPARED:
            continue
        if any(metric == other[2] for other in found) or metric in ("train/loss", "val/loss"):
            excused = any(word in said for word in ("last line", "goes back", "left out; line"))
            if not excused and repr(metric) not in said:
                return "a value is missing"
    contradicting = any(len(several) > 1 and key in found and key[1] >= 0 for key, several in expects.items())
    return "a contradiction is accepted" if contradicting and "goes back" not in said else None


def _judge_log(name: str, files: Files, changed: str, found: dict[Key, float], said: str) -> str | None:
    """Return what is wrong with the values of logs; None if nothing is."""
    original = SOURCES[name]().contents[changed].split(b"\n")
    arm, seed = re.fullmatch(r"(\w+)-s(\d)\.\w+", changed).groups()
    new = [line for line in files.contents[changed].split(b"\n") if line not in original]
    text = re.sub(r"\x1b\[[\d;]*m", "", b"\n".join(new).decode("utf-8", "replace"))
    numbers = [float(text) for text in _NUMBER.findall(text)]
    truth = expected(name)
    for key, value in found.items():
        if key in truth and equal(value, truth[key]):
            continue
        if key[:2] != (arm, int(seed)):
            return "an unchanged file is read otherwise"
        whole_numbers = [str(int(number)) for number in numbers if abs(number) <= 2**53]
        step_known = "hf:" in str(files.logs) or any(str(key[3]) in digits for digits in whole_numbers)
        if not any(equal(value, number) for number in numbers) or not step_known:
            return "a value that no line has"
    lost = [key for key in truth if key not in found]
    if any(key[:2] != (arm, int(seed)) for key in lost):
        return "a value of an unchanged file is missing"
    whole = {line for line in files.contents[changed].split(b"\n")[:-1] if line in original}
    gone = [line for line in original if line.strip() and line not in whole]
    if not any(word in said for word in ("left out", "goes back", "last line")):
        if lost and not gone:
            return "a value of an unchanged line is missing"
        if len(lost) > 2 * len(gone):  # a line has two values at most
            return "more values are missing than lines were changed"
    return None


def _judge_checked(name: str, found: dict[Key, float]) -> str | None:
    """Return what is wrong with the values of files with checksums; None if nothing is."""
    truth = expected(name)
    if any(key not in truth or not equal(value, truth[key]) for key, value in found.items()):
        return "a value that the original does not have"
    for key in truth.keys() - found.keys():  # a cut between two records shows only in what comes behind it
        if any(other[:3] == key[:3] and other[3] > key[3] for other in found):
            return "a value is missing before the end"
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
        if files.checked:
            return _judge_checked(name, found)
        if files.of_rows:
            return _judge_table(name, files, found, " ".join(said))
        return _judge_log(name, files, changed, found, " ".join(said))
    except (ValueError, KeyError, OSError, csv.Error) as error:
        return f"read, and the oracle cannot: {type(error).__name__}"


def outcome(n: int, evidence: Path) -> Fault:
    """Read a mutant, and judge what comes of it; leave the files of one with a finding in a folder."""
    name, files, changed = mutant(n)
    fault = Fault(FAMILY, name, f"mutant {n}", outcome="read")
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        foreign_files.write(files, Path(folder))
        try:
            found, said = foreign_files.result(files, Path(folder))
            if wrong := judge(name, files, changed, found, said):
                fault.findings.append(Finding("silent", f"{name}: {wrong}"))
        except InputError as error:
            fault.outcome = "refused"
            if len(error.problems) != 1 or "\n" in str(error):
                fault.findings.append(Finding("wrong", f"{name}: a refusal of several lines"))
        except Exception as error:
            where = traceback.extract_tb(error.__traceback__)[-1]
            what = f"{name}: {type(error).__name__} in {Path(where.filename).name}:{where.lineno}"
            fault.findings.append(Finding("wrong", what))
    if fault.findings:
        foreign_files.write(files, evidence / f"runs-{n}")
    return fault
