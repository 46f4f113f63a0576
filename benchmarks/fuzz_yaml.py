"""Fuzz the reading of experiment files: mutate every shipped experiment, then load and plan each mutant.

An experiment file must either load and plan, or be refused with problems that name file, line and column. Any
other exception is a defect, as is a mutant that takes more than `--seconds` of processor time or raises the
peak memory by more than `--megabytes`. Mutant `n` depends on `n` alone, so one that fails is made again with
`--first n --count 1 --keep FOLDER`. Nothing is trained, and no hub is asked.

`python benchmarks/fuzz_yaml.py --count 20000` prints the defects, the slowest mutant and the peak memory; its
status is 1 if there are any defects. `--count 1000 --first 3000` is a part of the same run.

`--outcomes FILE` writes a line of JSON for each original and mutant: its problems, or the arms, the ids of
their trials and the plan. A change that keeps all refusals and identities leaves that file as it is.
"""

import argparse
import io
import json
import os
import random
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

REPOSITORY = Path(__file__).resolve().parent.parent
_MOST_IDS = 50
"""Largest number of arms whose trials' ids are among the outcomes."""

SEARCH = """\
schema: 1
question: Which rate?
workload: {gpt: {layers: 1, width: 16, heads: 1, context: 16, steps: 20, eval_every: 10, \
data: stdlib, guard: {policy: skip, loss: 3.0}}}
ablate:
  rht: [true, false]
  rht_size: {choice: [16, 32], when: {rht: true}}
  workload.lr: {uniform: [1.0e-4, 1.0e-2], log: true}
  workload.layers: {int: [1, 3]}
against: {recipe: bf16}
seeds: [0, 3]
metric: [{name: val/loss}, {name: grad/norm, min_effect: 1 %}]
published: [{arm: bf16, metric: val/loss, value: 3.2, tolerance: 0.1, source: a paper}]
search: {sampler: nsga2, trials: 4, seed: 1, confirm: 2, warm: [other]}
constraints: [{metric: nan/activation, at_most: 0}]
budget: {trials: 9, hours: 1.0, cost: 2.0}
resources: {gpus: 0.5}
telemetry: {every: 5, shadow: 10, log: 1, checkpoint: 3.0}
retry: 1
patience: 30.0
engine: auto
"""
SOURCES = """\
schema: 1
question: Do the sources of data and models matter?
workload: {gpt: {layers: 1, width: 16, heads: 1, context: 16, steps: 4, \
data: {text: words.txt, tokenizer: bytes, val_fraction: 0.1}}}
arms:
  plain: {}
  rotated: {rht: true, workload.batch: 2}
seeds: {start: 2, most: 8, by: sequence, step: 2}
"""
VALUES: tuple[Any, ...] = (
    *(
        None,
        True,
        False,
        0,
        1,
        -1,
        2,
        3,
        16,
        17,
        10**4,
        2**31,
        2**32,
        2**63 - 1,
        2**63,
        -(2**63),
        10**30,
        10**400,
    ),
    *(
        0.0,
        -0.0,
        0.5,
        1e-320,
        1e308,
        -1e308,
        "",
        " ",
        "true",
        "on",
        "-",
        "nan",
        "~",
        "bf16",
        "nvfp4",
        "rht",
        "stdlib",
        "prose",
        "..",
        "/",
    ),
    *(
        "~nobody/x",
        "a/b",
        "a" * 300,
        "x" * 5000,
        "\x00",
        "a\nb",
        "\x1b[31m",
        "[/]",
        "\ud800",
        "é\U0001f600",
        "*",
        "**",
        "[",
        "{x}",
        "%s",
    ),
    *(
        "bpe:99999999999",
        "bpe:300",
        "rms:1",
        "percentile:0",
        "static:1e999",
        "block:128",
        "class:Foo",
        "e2m1",
        "1%",
        "lower",
        "tokens.json",
    ),
    *(
        [],
        {},
        [[]],
        [{}],
        {"a": 1},
        {"a": {"b": {"c": [1, {"d": None}]}}},
        [1, 1],
        [True, 1],
        [1.0, 1],
        [None, None],
    ),
    *(
        {"uniform": [0, 1]},
        {"int": [0, 10**18]},
        {"choice": [1]},
        {"choice": []},
        {"uniform": [1, 0], "log": True},
    ),
    *(
        {"uniform": [-1e308, 1e308]},
        {"int": [1, 10**400]},
        {"choice": [1, 2], "when": {"rht": True}},
        list(range(400)),
    ),
    *(
        {"text": "words.txt"},
        {"train": "*.bin", "val": "*.bin", "vocab": 50},
        {"dataset": "a/b"},
        {"prepared": "."},
        {"cifar10": "."},
    ),
    *({"text": "words.txt", "tokenizer": "bpe:257"}, {"folder": ".", "size": 8}, {"dataset": "."}),
    *(
        {"model_type": "qwen3"},
        {"model_type": {"a": 1}},
        {"model_type": "gpt2", "n_layer": 2**31},
        {"model_type": "llama", "to_dict": 5},
    ),
    *(
        {"model_type": "qwen3", "num_hidden_layers": 2**31, "hidden_size": 64},
        {"model_type": "gpt2", "n_embd": 10**9, "n_layer": 1},
    ),
)
"""Values of every type, of which hardly any fits where it is put."""
SNIPPETS = (
    *(
        "!!set {a, b}",
        "!!bool x",
        "!!int x",
        "!!float x",
        "!!null x",
        "!!binary abc",
        "!!binary '=='",
        "!!timestamp 2020",
        "!!omap [a: 1]",
    ),
    *(
        "!!timestamp 2020-01-01",
        "!!pairs [a: 1, a: 2]",
        "!!str {a: 1}",
        "!!map [a]",
        "!!seq {a: 1}",
        "!!python/object/apply:os.system [ls]",
    ),
    *(
        "!!python/name:os.system",
        "!foo bar",
        "! x",
        "!<tag:yaml.org,2002:int> 5",
        "!!merge <<",
        "!!value =",
        "!!str 5",
        "!!int '5'",
        "=",
        "<<",
    ),
    *(
        "{<<: {a: 1}}",
        "{<<: [1]}",
        "{<<: 3}",
        "&a [1, 2]",
        "&a {b: *a}",
        "*a",
        "[*a, *a]",
        "{? {a: 1} : 2}",
        "{? [a, b] : c}",
        "{: 1}",
    ),
    *(
        "{null: 1}",
        "{1: 2, 1.0: 3}",
        "{true: 1}",
        "{a: 1, a: 2}",
        "? a",
        "- a",
        "|\n  text",
        ">-\n  text",
        "'it''s'",
        '"\\x00"',
        '"\\ud800"',
    ),
    *(
        '"\\e[31m"',
        '"\\U0010FFFF"',
        '"\\u2028"',
        "0x7fffffffffffffffff",
        "0o777",
        "0b11",
        "1_000",
        "12:30:45",
        "2020-01-01",
        ".inf",
        "-.inf",
    ),
    *(
        ".nan",
        "1e400",
        "-1e400",
        "9" * 5000,
        "[" * 70 + "]" * 70,
        "[" * 5000,
        "{a: " * 70,
        "%TAG ! x",
        "---",
        "...",
        "--- a",
        "# c",
        "\t",
    ),
    *(
        "@x",
        "`x`",
        "%x",
        "|",
        ">",
        '"',
        "'",
        "[",
        "]",
        "{",
        "}",
        ",",
        ":",
        "?",
        "\x00",
        "\x07",
        "\x85",
        "\u2029",
        "\ufeff",
        "\ufffe",
        "\x7f",
    ),
)
"""Pieces of YAML that are tags, aliases, odd scalars, or no YAML at all."""


class Overrun(BaseException):
    """A mutant took too long."""


@dataclass
class Tally:
    """Outcomes of a run."""

    loaded: int = 0
    refused: int = 0
    defects: Counter = field(default_factory=Counter)
    """Number of mutants by kind of defect: class, place and text of the exception."""
    examples: dict[str, int] = field(default_factory=dict)
    """The number of one mutant for each kind of defect."""
    slowest: tuple[float, int] = (0.0, -1)
    """Seconds of processor time and number of the mutant that took longest."""
    largest: tuple[float, int] = (0.0, -1)
    """Megabytes by which one mutant raised the peak memory of the process, and its number."""

    def defect(self, kind: str, number: int) -> None:
        """Count a defect."""
        self.defects[kind] += 1
        self.examples.setdefault(kind, number)


def originals() -> list[str]:
    """The texts that are mutated: all shipped experiments, and two that have every other key."""
    return [
        *(path.read_text(encoding="utf-8") for path in sorted((REPOSITORY / "experiments").rglob("*.yaml"))),
        SEARCH,
        SOURCES,
    ]


def mutant(number: int, texts: list[str]) -> bytes:
    """The bytes of mutant `number`: one to three changes to one of the texts."""
    draw = random.Random(number)
    text = draw.choice(texts)
    if draw.random() < 0.55:
        tree = _tree(text)
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            draw.choice((_replace, _replace, _insert_key, _delete, _duplicate, _rename, _swap))(tree, draw)
        text = _written(tree, draw)
    else:
        for _ in range(draw.choice((1, 1, 2, 3))):
            text = draw.choice((_snippet_as_value, _snippet_as_value, _snippet_anywhere, _lines, _number))(
                text, draw
            )
    content = text.encode("utf-8", "surrogatepass")
    return _bytes(content, draw) if draw.random() < 0.15 else content


def run(
    first: int,
    count: int,
    seconds: float | None = None,
    megabytes: float | None = None,
    keep: Path | None = None,
    outcomes: TextIO | None = None,
) -> Tally:
    """Load and plan mutants in an empty folder, and return the tally of their outcomes.

    Args:
        first: number of the first mutant.
        count: number of mutants.
        seconds: processor time above which a mutant is a defect; None: no limit.
        megabytes: rise of the peak memory above which a mutant is a defect; None: no limit.
        keep: folder in which the mutants' files are kept; None: they are deleted.
        outcomes: file for a line of JSON about each text, originals first with numbers below 0.
    """
    from ablate.errors import InputError, Problem

    texts, tally = originals(), Tally()
    with _folder() as folder:
        (folder / "words.txt").write_text("A few words, again and again.\n" * 400, encoding="utf-8")
        file = (keep or folder) / "mutant.yaml"
        for number, text in enumerate(texts, -len(texts)):  # imports and corpora are not the mutants'
            file.write_text(text, encoding="utf-8")
            _note(outcomes, folder, number, _planned(file, folder))
        file.unlink()
        for number in range(first, first + count):
            file = file.with_name(f"mutant-{number}.yaml") if keep else file
            file.write_bytes(mutant(number, texts))
            before, started = _peak(), time.process_time()
            try:
                with _limit(seconds):
                    loaded = _planned(file, folder)
                tally.loaded += 1
                _note(outcomes, folder, number, loaded)
            except InputError as error:
                tally.refused += 1
                _note(outcomes, folder, number, {"problems": [_placed(one) for one in error.problems]})
                for problem in error.problems:
                    if not isinstance(problem, Problem):
                        tally.defect(f"problem without a place: {problem[:200]}", number)
                    elif not str(problem).isprintable():
                        tally.defect(f"problem of more than one line: {str(problem)[:200]!r}", number)
            except KeyboardInterrupt:
                raise
            except BaseException as error:
                tally.defect(_described(error), number)
            took, grew = time.process_time() - started, _peak() - before
            tally.slowest, tally.largest = (
                max(tally.slowest, (took, number)),
                max(tally.largest, (grew, number)),
            )
            if megabytes is not None and grew > megabytes:
                tally.defect(f"memory: {grew:.0f} MB more", number)
    return tally


def _planned(file: Path, folder: Path) -> dict[str, Any]:
    """Load and plan a file; return what it stands for."""
    from ablate.cli.plan import show
    from ablate.cli.settings import find_settings
    from ablate.experiment.load import load

    with redirect_stdout(io.StringIO()) as plan:
        experiment = load(file, "cpu")
        show(experiment, find_settings(None, state=folder / "runs", device="cpu"))
    first = experiment.seeds[0]
    return {
        "keys": repr(experiment.keys),
        "arms": [
            [arm.name, arm.baseline, experiment.spec(arm, first, "cpu").id]
            for arm in experiment.arms[:_MOST_IDS]
        ],
        "engine": [experiment.engine, experiment.engine_why],
        "notes": experiment.notes,
        "plan": plan.getvalue(),
    }


def _placed(problem: Any) -> Any:
    return problem if isinstance(problem, str) else [problem.line, problem.column, problem.message]


def _note(outcomes: TextIO | None, folder: Path, number: int, content: dict[str, Any]) -> None:
    if outcomes:
        line = json.dumps({"mutant": number} | content, default=str)
        outcomes.write(line.replace(str(folder.parent), "") + "\n")


def _described(error: BaseException) -> str:
    ours = [
        frame for frame in traceback.extract_tb(error.__traceback__) if "ablate" in Path(frame.filename).parts
    ]
    where = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "?"
    return f"{type(error).__name__} in {where}: {str(error)[:120]!r}"


def _peak() -> float:
    """Megabytes of the largest resident set that this process has had."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / (
        1 << 20 if sys.platform == "darwin" else 1 << 10
    )


@contextmanager
def _folder() -> Iterator[Path]:
    """An empty working directory with a cache of its own; no hub is reached."""
    was = Path.cwd()
    with tempfile.TemporaryDirectory() as name:
        variables = {"HF_HUB_OFFLINE": "1", "ABLATE_CACHE": str(Path(name) / "cache")}
        saved = {key: os.environ.get(key) for key in variables}
        os.environ.update(variables)
        (work := Path(name) / "work").mkdir()
        os.chdir(work)
        try:
            yield work
        finally:
            os.chdir(was)
            for key, value in saved.items():
                os.environ.pop(key) if value is None else os.environ.__setitem__(key, value)


@contextmanager
def _limit(seconds: float | None) -> Iterator[None]:
    """Raise Overrun after so many seconds of processor time."""
    if seconds is None:
        yield
        return

    def end(*_: object) -> None:
        raise Overrun(f"more than {seconds:g} s")

    signal.signal(signal.SIGPROF, end)
    signal.setitimer(signal.ITIMER_PROF, seconds)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)


# --- changes to the values of a file --------------------------------------------------------------


def _tree(text: str) -> Any:
    from ablate.experiment.yaml_document import parse

    return parse(text, "original").value


def _spots(tree: Any) -> list[tuple[Any, Any]]:
    """Every (container, key or index) of a tree."""
    spots, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        items = (
            list(node.items())
            if isinstance(node, dict)
            else list(enumerate(node))
            if isinstance(node, list)
            else []
        )
        for key, value in items:
            spots.append((node, key))
            waiting.append(value)
    return spots


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value


class Raw(str):
    """A piece of YAML, written as it is."""


def _value(draw: random.Random) -> Any:
    return Raw(draw.choice(SNIPPETS)) if draw.random() < 0.25 else _copied(draw.choice(VALUES))


def _spot(tree: Any, draw: random.Random) -> tuple[Any, Any] | None:
    spots = _spots(tree)
    return draw.choice(spots) if spots else None


def _replace(tree: Any, draw: random.Random) -> None:
    if spot := _spot(tree, draw):
        spot[0][spot[1]] = _value(draw)


def _delete(tree: Any, draw: random.Random) -> None:
    if spot := _spot(tree, draw):
        del spot[0][spot[1]]


def _names() -> list[str]:
    """Every key that the schema of experiments names."""
    names: dict[str, None] = {}
    waiting: list[Any] = [json.loads((REPOSITORY / "experiments" / "schema.json").read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            if isinstance(node.get("properties"), dict):
                names |= dict.fromkeys(node["properties"])
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    return [
        *names,
        "workload.steps",
        "workload.data",
        "recipe.wgrad.g.rounding",
        "recipe.layers.rules",
        "workload.model",
        "<<",
    ]


_NAMES: list[str] = []


def _insert_key(tree: Any, draw: random.Random) -> None:
    """Add a key of the schema, or one that means nothing, to a mapping."""
    if not _NAMES:
        _NAMES.extend(_names())
    mappings = [tree, *(value for node, key in _spots(tree) if isinstance(value := node[key], dict))]
    name = draw.choice(_NAMES) if draw.random() < 0.8 else str(draw.choice(VALUES))
    draw.choice(mappings)[name] = _value(draw)


def _rename(tree: Any, draw: random.Random) -> None:
    spot = _spot(tree, draw)
    if spot and isinstance(spot[0], dict):
        word = str(spot[1])
        at = draw.randrange(len(word) + 1)
        other = draw.choice(
            (
                word[:at] + word[at + 1 :],
                word[:at] + "x" + word[at:],
                word.upper(),
                f"{word}.{word}",
                word.replace(".", ""),
            )
        )
        spot[0][other] = spot[0].pop(spot[1])


def _duplicate(tree: Any, draw: random.Random) -> None:
    """An item again, up to thousands of times, or a mapping's value under many other keys."""
    if not (spot := _spot(tree, draw)):
        return
    node, key = spot
    times = draw.choice((1, 1, 2, 30, 3000))
    if isinstance(node, list):
        node.extend(_copied(node[key]) for _ in range(times))
    else:
        node.update({f"{key}{n}": _copied(node[key]) for n in range(times)})


def _swap(tree: Any, draw: random.Random) -> None:
    """Put one value of the file where another stands."""
    one, other = _spot(tree, draw), _spot(tree, draw)
    if one and other:
        one[0][one[1]] = _copied(other[0][other[1]])


def _written(value: Any, draw: random.Random, depth: int = 0) -> str:
    """A tree as YAML: blocks at the top, flow style below."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        items = [
            (_written(str(key), draw, 9), _written(item, draw, depth + 1)) for key, item in value.items()
        ]
        return (
            "".join(f"{k}: {v}\n" for k, v in items)
            if depth == 0
            else "{" + ", ".join(f"{k}: {v}" for k, v in items) + "}"
        )
    if isinstance(value, list):
        return "[" + ", ".join(_written(item, draw, depth + 1) for item in value) + "]"
    if (
        isinstance(value, str)
        and re.fullmatch(r"[A-Za-z][\w./]*", value)
        and value not in ("true", "false", "null")
    ):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**300:
        return f"{'-' * (value < 0)}1{'0' * 400}"
    return json.dumps(value, ensure_ascii=draw.random() < 0.5 or not str(value).isprintable())


# --- changes to the text of a file ----------------------------------------------------------------


def _snippet_as_value(text: str, draw: random.Random) -> str:
    ends = [match.end() for match in re.finditer(r": |\[|, ", text)]
    if not ends:
        return text
    at = draw.choice(ends)
    rest = re.match(r"[^,\]}\n]*", text[at:]).end() if draw.random() < 0.7 else 0
    return text[:at] + draw.choice(SNIPPETS) + text[at + rest :]


def _snippet_anywhere(text: str, draw: random.Random) -> str:
    at = draw.randrange(len(text) + 1)
    return text[:at] + draw.choice(SNIPPETS) + text[at:]


def _lines(text: str, draw: random.Random) -> str:
    lines = text.splitlines(keepends=True) or [""]
    one, other = draw.randrange(len(lines)), draw.randrange(len(lines))
    change = draw.randrange(6)
    if change == 0:
        del lines[one]
    elif change == 1:
        lines.insert(other, lines[one])
    elif change == 2:
        lines[one], lines[other] = lines[other], lines[one]
    elif change == 3:
        lines[one] = " " * draw.choice((1, 2, 3)) + lines[one]
    elif change == 4:
        lines[one] = (
            draw.choice(
                ("\ufeff", "\t", "---\n", "...\n", "%YAML 1.1\n---\n", "%YAML 9.9\n---\n", "? ", "- ")
            )
            + lines[one]
        )
    else:
        lines[one] = lines[one].rstrip("\n").lstrip(" ")
    return "".join(lines)


def _number(text: str, draw: random.Random) -> str:
    """Another number in the place of one."""
    spots = list(re.finditer(r"(?<![\w.])\d+(\.\d+)?(e-?\d+)?", text))
    if not spots:
        return text
    spot = draw.choice(spots)
    other = draw.choice(
        (
            "0",
            "-1",
            "1",
            "3",
            "1.5",
            "2147483648",
            "9223372036854775807",
            "1" + "0" * 30,
            "1e308",
            "1e-320",
            ".5",
            "0x10",
        )
    )
    return text[: spot.start()] + other + text[spot.end() :]


def _bytes(content: bytes, draw: random.Random) -> bytes:
    """Flip bits, cut, or put other encodings in the place."""
    change = draw.randrange(5)
    if change == 0:
        return content[: draw.randrange(len(content) + 1)]
    if change == 1:
        return content.decode("utf-8", "replace").encode(
            draw.choice(("utf-16", "utf-16-le", "utf-32", "utf-8-sig"))
        )
    if change == 2:
        return content.replace(b"\n", draw.choice((b"\r", b"\r\n", b"\n\n", b"\x85", b"\xe2\x80\xa8")))
    changed = bytearray(content)
    for _ in range(draw.choice((1, 1, 2, 8)) if changed else 0):
        changed[draw.randrange(len(changed))] ^= 1 << draw.randrange(8)
    return bytes(changed)


def main() -> int:
    """Print the outcomes; 1 if there are defects."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0], allow_abbrev=False)
    parser.add_argument("--count", type=int, default=20_000, help="Mutants to try; default: 20000.")
    parser.add_argument("--first", type=int, default=0, help="Number of the first mutant; default: 0.")
    parser.add_argument(
        "--seconds",
        type=float,
        default=20.0,
        help="A mutant that takes more processor time is a defect; default: 20.",
    )
    parser.add_argument(
        "--megabytes",
        type=float,
        default=200.0,
        help="A mutant that raises the peak memory more is one; default: 200.",
    )
    parser.add_argument("--keep", type=Path, help="A folder in which the mutants are left.")
    parser.add_argument(
        "--outcomes", type=Path, help="A file for the outcome of each text, as lines of JSON."
    )
    asked = parser.parse_args()
    keep = asked.keep and asked.keep.resolve()
    if keep:
        keep.mkdir(parents=True, exist_ok=True)
    with asked.outcomes.open("w") if asked.outcomes else nullcontext() as outcomes:
        tally = run(asked.first, asked.count, asked.seconds, asked.megabytes, keep, outcomes)
    print(
        f"{asked.count} mutants from {asked.first}: {tally.loaded} loaded and planned, "
        f"{tally.refused} refused with a place,"
    )
    print(f"{sum(tally.defects.values())} defects; peak memory {_peak():.0f} MB")
    print(f"slowest: mutant {tally.slowest[1]}, {tally.slowest[0]:.2f} s of processor time")
    print(f"most memory: mutant {tally.largest[1]}, {tally.largest[0]:.0f} MB more")
    for kind, count in tally.defects.most_common():
        print(f"{count:6} x {kind} (mutant {tally.examples[kind]})")
    return 1 if tally.defects else 0


if __name__ == "__main__":
    sys.exit(main())
