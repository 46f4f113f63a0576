"""Mutants of every shipped experiment file: each must load and plan, or be refused at a place.

An experiment file must either load and plan, or be refused with problems that name file, line and column. Any other exception is a
defect, as is a mutant that takes more than SECONDS of processor time or raises the peak memory of the process by more than MEGABYTES.
Mutant `n` depends on `n` alone. Nothing is trained, and no hub is asked.

The lines of JSON have the problems of each mutant, or its arms, the ids of their trials and the plan: a change that keeps all refusals
and identities leaves them as they are.
"""

import io
import json
import os
import re
import resource
import signal
import sys
import tempfile
import time
import traceback
from collections.abc import Iterator
from contextlib import chdir, contextmanager, redirect_stdout
from functools import cache
from pathlib import Path
from random import Random
from typing import Any
from unittest import mock

from support.experiments import EXPERIMENTS

from ablate.cli.plan import show
from ablate.cli.settings import find_settings
from ablate.errors import InputError, Problem
from ablate.experiment.load import load
from ablate.experiment.yaml_document import parse
from chaos.audit import Finding
from chaos.mutations import cut, encoding, flip, lines, misspelt, number
from chaos.report import Fault, Overrun, limit

FAMILY = "experiments"
SECONDS = 20.0
MEGABYTES = 200.0
_MOST_IDS = 50
"""Largest number of arms whose trials' ids are noted."""
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
    None, True, False, 0, 1, -1, 2, 3, 16, 17, 10**4, 2**31, 2**32, 2**63 - 1, 2**63, -(2**63), 10**30, 10**400,
    0.0, -0.0, 0.5, 1e-320, 1e308, -1e308, "", " ", "true", "on", "-", "nan", "~", "bf16", "nvfp4", "rht",
    "stdlib", "prose", "..", "/", "~nobody/x", "a/b", "a" * 300, "x" * 5000, "\x00", "a\nb", "\x1b[31m", "[/]",
    "\ud800", "é\U0001f600", "*", "**", "[", "{x}", "%s", "bpe:99999999999", "bpe:300", "rms:1",
    "percentile:0", "static:1e999", "block:128", "class:Foo", "e2m1", "1%", "lower", "tokens.json",
    [], {}, [[]], [{}], {"a": 1}, {"a": {"b": {"c": [1, {"d": None}]}}}, [1, 1], [True, 1], [1.0, 1], [None, None],
    {"uniform": [0, 1]}, {"int": [0, 10**18]}, {"choice": [1]}, {"choice": []}, {"uniform": [1, 0], "log": True},
    {"uniform": [-1e308, 1e308]}, {"int": [1, 10**400]}, {"choice": [1, 2], "when": {"rht": True}},
    list(range(400)), {"text": "words.txt"}, {"train": "*.bin", "val": "*.bin", "vocab": 50},
    {"dataset": "a/b"}, {"prepared": "."}, {"cifar10": "."}, {"text": "words.txt", "tokenizer": "bpe:257"},
    {"folder": ".", "size": 8}, {"dataset": "."}, {"model_type": "qwen3"}, {"model_type": {"a": 1}},
    {"model_type": "gpt2", "n_layer": 2**31}, {"model_type": "llama", "to_dict": 5},
    {"model_type": "qwen3", "num_hidden_layers": 2**31, "hidden_size": 64},
    {"model_type": "gpt2", "n_embd": 10**9, "n_layer": 1},
)  # fmt: skip
"""Values of every type, of which hardly any fits where it is put."""
SNIPPETS = (
    "!!set {a, b}", "!!bool x", "!!int x", "!!float x", "!!null x", "!!binary abc", "!!binary '=='",
    "!!timestamp 2020", "!!omap [a: 1]", "!!timestamp 2020-01-01", "!!pairs [a: 1, a: 2]", "!!str {a: 1}",
    "!!map [a]", "!!seq {a: 1}", "!!python/object/apply:os.system [ls]", "!!python/name:os.system", "!foo bar",
    "! x", "!<tag:yaml.org,2002:int> 5", "!!merge <<", "!!value =", "!!str 5", "!!int '5'", "=", "<<",
    "{<<: {a: 1}}", "{<<: [1]}", "{<<: 3}", "&a [1, 2]", "&a {b: *a}", "*a", "[*a, *a]", "{? {a: 1} : 2}",
    "{? [a, b] : c}", "{: 1}", "{null: 1}", "{1: 2, 1.0: 3}", "{true: 1}", "{a: 1, a: 2}", "? a", "- a",
    "|\n  text", ">-\n  text", "'it''s'", '"\\x00"', '"\\ud800"', '"\\e[31m"', '"\\U0010FFFF"', '"\\u2028"',
    "0x7fffffffffffffffff", "0o777", "0b11", "1_000", "12:30:45", "2020-01-01", ".inf", "-.inf", ".nan",
    "1e400", "-1e400", "9" * 5000, "[" * 70 + "]" * 70, "[" * 5000, "{a: " * 70, "%TAG ! x", "---", "...", "--- a",
    "# c", "\t", "@x", "`x`", "%x", "|", ">", '"', "'", "[", "]", "{", "}", ",", ":", "?", "\x00", "\x07", "\x85",
    "\u2029", "\ufeff", "\ufffe", "\x7f",
)  # fmt: skip
"""Pieces of YAML that are tags, aliases, odd scalars, or no YAML at all."""


# Changes to the values of a file


class Raw(str):
    """A piece of YAML, written as it is."""


def _places(tree: Any) -> list[tuple[Any, Any]]:
    """Return every (container, key or index) of a tree."""
    places, waiting = [], [tree]
    while waiting:
        node = waiting.pop()
        keys = list(node) if isinstance(node, dict) else range(len(node)) if isinstance(node, list) else ()
        for key in keys:
            places.append((node, key))
            waiting.append(node[key])
    return places


def _copied(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _copied(part) for key, part in value.items()}
    return [_copied(part) for part in value] if isinstance(value, list) else value


def _value(draw: Random) -> Any:
    return Raw(draw.choice(SNIPPETS)) if draw.random() < 0.25 else _copied(draw.choice(VALUES))


@cache
def _names() -> list[str]:
    """Return every key that the schema of experiments names."""
    names: dict[str, None] = {}
    waiting: list[Any] = [json.loads((Path(__file__).parents[2] / "experiments" / "schema.json").read_text())]
    while waiting:
        node = waiting.pop()
        if isinstance(node, dict):
            names |= dict.fromkeys(node["properties"] if isinstance(node.get("properties"), dict) else ())
            waiting.extend(node.values())
        elif isinstance(node, list):
            waiting.extend(node)
    paths = "workload.steps workload.data recipe.wgrad.g.rounding recipe.layers.rules workload.model <<"
    return [*names, *paths.split()]


def _replace(node: Any, key: Any, tree: Any, draw: Random) -> None:
    node[key] = _value(draw)


def _delete(node: Any, key: Any, tree: Any, draw: Random) -> None:
    del node[key]


def _insert_key(node: Any, key: Any, tree: Any, draw: Random) -> None:
    """Add a key of the schema, or one that means nothing, to a mapping."""
    mappings = [tree, *(value for node, key in _places(tree) if isinstance(value := node[key], dict))]
    name = draw.choice(_names()) if draw.random() < 0.8 else str(draw.choice(VALUES))
    draw.choice(mappings)[name] = _value(draw)


def _rename(node: Any, key: Any, tree: Any, draw: Random) -> None:
    if isinstance(node, dict):
        node[misspelt(str(key), draw)] = node.pop(key)


def _duplicate(node: Any, key: Any, tree: Any, draw: Random) -> None:
    """Repeat an item, up to thousands of times, or a mapping's value under many other keys."""
    times = draw.choice((1, 1, 2, 30, 3000))
    if isinstance(node, list):
        node.extend(_copied(node[key]) for _ in range(times))
    else:
        node.update({f"{key}{n}": _copied(node[key]) for n in range(times)})


def _swap(node: Any, key: Any, tree: Any, draw: Random) -> None:
    """Put one value of the file where another stands."""
    other, name = draw.choice(_places(tree))
    node[key] = _copied(other[name])


TREE_CHANGES = (_replace, _replace, _insert_key, _delete, _duplicate, _rename, _swap)


def _written(value: Any, draw: Random, depth: int = 0) -> str:
    """Return a tree as YAML: blocks at the top, flow style below."""
    if isinstance(value, Raw):
        return str(value)
    if isinstance(value, dict):
        items = [
            f"{_written(str(key), draw, 9)}: {_written(item, draw, depth + 1)}" for key, item in value.items()
        ]
        return "{" + ", ".join(items) + "}" if depth else "".join(f"{item}\n" for item in items)
    if isinstance(value, list):
        return "[" + ", ".join(_written(item, draw, depth + 1) for item in value) + "]"
    plain = isinstance(value, str) and re.fullmatch(r"[A-Za-z][\w./]*", value)
    if plain and value not in ("true", "false", "null"):
        return value
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) > 10**300:
        return f"{'-' * (value < 0)}1{'0' * 400}"
    return json.dumps(value, ensure_ascii=draw.random() < 0.5 or not str(value).isprintable())


# Changes to the text of a file


def _snippet_as_value(content: bytes, draw: Random) -> bytes:
    """Write a snippet in the place of a value, or before it."""
    if not (ends := [match.end() for match in re.finditer(rb": |\[|, ", content)]):
        return content
    at = draw.choice(ends)
    rest = re.match(rb"[^,\]}\n]*", content[at:]).end() if draw.random() < 0.7 else 0
    return content[:at] + draw.choice(SNIPPETS).encode() + content[at + rest :]


def _snippet_anywhere(content: bytes, draw: Random) -> bytes:
    at = draw.randrange(len(content) + 1)
    return content[:at] + draw.choice(SNIPPETS).encode() + content[at:]


TEXT_CHANGES = (_snippet_as_value, _snippet_as_value, _snippet_anywhere, lines, number)
BYTE_CHANGES = (flip, flip, cut, encoding, encoding)


def originals() -> list[str]:
    """Return the texts that are mutated: all shipped experiments, and two that have every other key."""
    return [*(path.read_text(encoding="utf-8") for path in EXPERIMENTS), SEARCH, SOURCES]


def mutant(n: int, texts: list[str]) -> bytes:
    """Return the bytes of a mutant: one to three changes to one of the texts."""
    draw = Random(n)
    text = draw.choice(texts)
    if draw.random() < 0.55:
        tree = parse(text, "original").value
        for _ in range(draw.choice((1, 1, 1, 2, 3))):
            if places := _places(tree):
                draw.choice(TREE_CHANGES)(*draw.choice(places), tree, draw)
        content = _written(tree, draw).encode("utf-8", "surrogatepass")
    else:
        content = text.encode()
        for _ in range(draw.choice((1, 1, 2, 3))):
            content = draw.choice(TEXT_CHANGES)(content, draw)
    return draw.choice(BYTE_CHANGES)(content, draw) if draw.random() < 0.15 else content


# Outcomes


def outcomes(first: int, count: int, evidence: Path) -> Iterator[Fault]:
    """Load and plan the originals of mutants, then the mutants, in an empty folder.

    The peak memory is the process's: call it before anything that needs more.

    Args:
        first: number of the first mutant.
        count: number of mutants.
        evidence: folder in which mutants with a finding are left.
    """
    texts = originals()
    with _folder() as folder:
        (folder / "words.txt").write_text("A few words, again and again.\n" * 400, encoding="utf-8")
        drawn = {Random(n).choice(texts) for n in range(first, first + count)}
        for text in sorted(drawn):  # imports and corpora are not the mutants'
            _planned(text.encode(), folder)
        for n in range(first, first + count):
            content = mutant(n, texts)
            fault = _outcome(content, folder)
            fault.what = f"mutant {n}"
            if fault.findings:
                (evidence / f"mutant-{n}.yaml").write_bytes(content)
            yield fault


def _outcome(content: bytes, folder: Path) -> Fault:
    fault = Fault(FAMILY, "mutants", outcome="refused")
    before, started = _peak(), time.process_time()
    try:
        with limit(SECONDS, signal.ITIMER_PROF):
            fault.detail = _planned(content, folder)
        fault.outcome = "read"
    except InputError as error:
        for problem in error.problems:
            if not isinstance(problem, Problem):
                fault.findings.append(Finding("wrong", f"problem without a place: {problem[:200]}"))
            elif not str(problem).isprintable():
                fault.findings.append(
                    Finding("wrong", f"problem of more than one line: {str(problem)[:200]!r}")
                )
        placed = [
            [one.line, one.column, one.message] if isinstance(one, Problem) else one for one in error.problems
        ]
        fault.detail = {"problems": placed}
    except KeyboardInterrupt:
        raise
    except (Exception, Overrun, SystemExit) as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [frame for frame in frames if "ablate" in Path(frame.filename).parts]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].name}" if ours else "?"
        fault.findings.append(Finding("wrong", f"{type(error).__name__} in {where}: {str(error)[:120]!r}"))
    fault.seconds = time.process_time() - started
    if (grew := _peak() - before) > MEGABYTES:
        fault.findings.append(Finding("wrong", f"{grew:.0f} MB more memory"))
    return fault


def _planned(content: bytes, folder: Path) -> dict[str, Any]:
    """Load and plan a file; return what it stands for."""
    file = folder / "mutant.yaml"
    file.write_bytes(content)
    with redirect_stdout(io.StringIO()) as plan:
        experiment = load(file, "cpu")
        show(experiment, find_settings(None, state=folder / "runs", device="cpu"))
    seed = experiment.seeds[0]
    arms = [
        [arm.name, arm.baseline, experiment.spec(arm, seed, "cpu").id] for arm in experiment.arms[:_MOST_IDS]
    ]
    facts = {
        "keys": repr(experiment.keys),
        "arms": arms,
        "engine": [experiment.engine, experiment.engine_why],
    }
    text = json.dumps(facts | {"notes": experiment.notes, "plan": plan.getvalue()}, default=str)
    return json.loads(text.replace(str(folder.parent), ""))


def _peak() -> float:
    """Return the megabytes of the largest resident set that this process has had."""
    unit = 1 << 20 if sys.platform == "darwin" else 1 << 10
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / unit


@contextmanager
def _folder() -> Iterator[Path]:
    """Enter an empty working directory with a cache of its own; no hub is reached."""
    with tempfile.TemporaryDirectory() as name:
        variables = {"HF_HUB_OFFLINE": "1", "ABLATE_CACHE": str(Path(name) / "cache")}
        (work := Path(name) / "work").mkdir()
        with mock.patch.dict(os.environ, variables), chdir(work):
            yield work
