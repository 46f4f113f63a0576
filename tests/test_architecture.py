"""The house: imports point down, foreign libraries have one home, files stay short, planning is instant, randomness is an argument."""

import ast
import re
import subprocess
import sys
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent / "ablate"
FILES = sorted(ROOT.rglob("*.py"))

FLOORS = {
    10: ("__init__", "__main__"),
    9: (
        "sweep",
        "plan",
        "recipe",
        "data_command",
        "terminal",
        "report",
        "doctor",
        "bench",
        "ui",
        "status",
        "stop",
        "sync",
        "rebuild",
        "faults",
        "leaderboard",
    ),
    8: ("controller", "pictures", "cli", "place", "checks", "measure", "linears", "audit", "injections", "parity"),
    7: (
        "surface",
        "space",
        "forks",
        "estimate",
        "arms",
        "choice",
        "search_checks",
        "experiment",
        "points",
        "search",
        "supervisor",
        "child",
        "rank",
        "workers",
        "agenda",
        "edits",
        "control",
        "verify",
        "shares",
        "tracking",
        "records",
        "results",
        "verdict_text",
        "published",
        "headline",
        "markdown_summary",
        "stats",
        "inference",
        "attribution",
        "answer",
        "page",
        "walkthrough",
        "figures",
        "machine",
        "peaks",
        "rows",
        "processes",
        "lifeline",
        "notify",
    ),
    6: ("workloads", "trial", "phases"),
    5: ("messages", "hyperparameters", "layout", "parallel", "transformer", "train", "checkpoints", "optimizers", "stability", "models"),
    4: ("metrics",),
    3: ("engines", "operand_metrics"),
    2: ("recipes", "peers"),
    1: ("numerics", "alarms"),
    0: (
        "metric_names",
        "ledger",
        "ledger_schema",
        "ledger_rows",
        "ledger_seals",
        "ledger_progress",
        "ledger_arrow",
        "ledger_damage",
        "ledger_integrity",
        "roles",
        "errors",
        "files",
        "checkpoint_footer",
        "store",
        "data",
        "provenance",
        "yamlfile",
        "databases",
        "plain_text",
    ),
}
"""A file imports only from lower floors. A folder is one inhabitant, whose files may import each other."""

ALLOWED = {
    "ledger": {"databases", "ledger_rows", "ledger_schema", "ledger_seals", "metric_names", "roles"},
    "store": {"lock_holder"},
    "ledger_schema": {"ledger_seals"},
    "ledger_progress": {"ledger"},
    "ledger_arrow": {"databases"},
    "ledger_integrity": {"ledger", "ledger_schema", "ledger_seals", "store"},  # of the store, the digest of records, which both hold
    "data": {"numerics.spec", "numerics.philox", "store", "redact"},  # a frozen description's words, counter-based bits, locks
    "train": {"hyperparameters", "checkpoints", "optimizers", "stability", "parallel"},
    "layout": {"hyperparameters"},
    "parallel": {"hyperparameters", "layout"},
    "checkpoints": {"parallel"},
    "optimizers": {"hyperparameters"},
    "stability": {"hyperparameters"},
    "trial": {"workloads"},
    "space": {"surface"},
    "choice": {"arms"},
    "search_checks": {"surface", "space", "arms"},
    "experiment": {"surface", "space", "arms", "choice", "search_checks"},
    "controller": {"pictures"},
    "points": {"surface", "space", "experiment"},
    "search": {"space", "experiment", "points", "surface", "results", "verdict_text"},
    "agenda": {"experiment", "arms", "edits", "estimate", "forks", "points", "results", "verify"},
    "estimate": {"experiment", "arms", "space"},
    "forks": {"surface"},
    "workers": {"supervisor", "child", "shares"},
    "child": {"rank"},
    "results": {"surface", "stats", "arms"},  # the reading wing: an experiment back as one frame, numbers, pictures, words
    "inference": {"stats"},
    "verdict_text": {"stats"},
    "published": {"results", "stats", "surface", "verdict_text"},
    "headline": {"results", "stats", "attribution", "verdict_text"},
    "markdown_summary": {"results", "verdict_text"},
    "attribution": {"results", "stats"},
    "figures": {"surface", "results", "records", "stats", "attribution", "verdict_text"},
    "answer": {
        "surface",
        "results",
        "records",
        "stats",
        "inference",
        "attribution",
        "page",
        "search",
        "published",
        "headline",
        "verdict_text",
    },
    "walkthrough": {"figures", "page"},
    "bench": {"faults"},
    "sweep": {"plan", "terminal", "doctor", "report"},
    "plan": {"recipe"},  # the lines that `recipe show` prints of a layer policy
    "sync": {"status"},
    "tracking": {"surface", "control"},
}
"""Imports within a floor, or from the ground up, each for a reason."""

HOMES = {
    "ray",
    "optuna",
    "optuna_dashboard",
    "plotly",
    "mlflow",
    "ruamel",
    "seaborn",
    "transformer_engine",
    "transformers",
    "statsmodels",
    "adbc_driver_sqlite",
    "papermill",
    "nbconvert",
    "datasets",
    "huggingface_hub",
    "tokenizers",
    "PIL",
}
"""Foreign libraries that at most one file, or folder, imports, so that changing them touches one place."""

SQL = {
    "ledger",
    "ledger_arrow",
    "ledger_damage",
    "ledger_integrity",
    "ledger_progress",
    "ledger_schema",
    "ledger_seals",
    "databases",  # any SQLite file: its pages, its tables, its journal
    "tracking.database",  # MLflow's own
    "audit",  # compares what was written with queries of its own, independent of the code that wrote
}
"""Files that may contain SQL: everybody else asks the ledger, and gets its rows."""
_STATEMENT = re.compile(
    r"\b(SELECT [^.]+|DELETE FROM \w+|INSERT (OR \w+ )?INTO \w+|UPDATE \w+ SET|PRAGMA \w+"
    r"|(CREATE|ALTER|DROP) (TEMP )?(TABLE|INDEX|TRIGGER))\b"
)

INSTANT = ("ablate.recipes", "ablate.workloads", "ablate.plan", "ablate.experiment", "ablate.data", "ablate.engines")
HEAVY = ("torch", "ray", "mlflow", "optuna", "transformers", "datasets", "huggingface_hub", "sklearn")


def name_of(path: Path) -> str:
    """`numerics.spec`, or `numerics` for a folder's __init__."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


def imports(path: Path) -> set[str]:
    """Every module that a file names in an import, wherever it stands; `from a import b` gives a.b."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: write imports in full"
            found |= {f"{node.module}.{alias.name}" for alias in node.names}
    return found


def own_imports(path: Path) -> set[str]:
    """Names of the package's modules that a file imports, without the leading `ablate.`."""
    modules = {name_of(file) for file in FILES}
    found = {module.removeprefix("ablate.") for module in imports(path) if module.startswith("ablate.")}
    return {module if module in modules else module.rpartition(".")[0] or "__init__" for module in found}


def floor(module: str) -> int:
    top = module.partition(".")[0]
    floors = [number for number, inhabitants in FLOORS.items() if top in inhabitants]
    assert floors, f"{top} has no floor: give it one in FLOORS"
    return floors[0]


def may_import(source: str, target: str) -> bool:
    top, other = source.partition(".")[0], target.partition(".")[0]
    return top == other or target == "__init__" or floor(target) < floor(source) or bool({other, target} & ALLOWED.get(top, set()))


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_import_points_down(path):
    wrong = {module for module in own_imports(path) if not may_import(name_of(path), module)}
    assert not wrong, f"{name_of(path)} (floor {floor(name_of(path))}) imports {wrong}"


def test_the_allowed_exceptions_make_no_circle():
    for source, targets in ALLOWED.items():
        for target in targets:
            assert source not in ALLOWED.get(target, set())


def in_order(arrows: dict[str, set[str]]) -> list[str]:
    """Names in an order in which each comes after all that it imports; CycleError if there is none."""
    return [*TopologicalSorter(arrows).static_order()]


def test_no_files_import_each_other_in_a_circle():
    assert {*in_order({name_of(path): own_imports(path) for path in FILES})} == {*map(name_of, FILES)}


def test_an_import_circle_would_be_seen():
    with pytest.raises(CycleError):
        in_order({"engines.ranks": {"engines.layer"}, "engines.layer": {"engines.ranks"}})


def test_an_import_that_points_up_would_be_seen():
    assert not may_import("numerics.spec", "recipes.recipe")
    assert not may_import("metrics", "train")
    assert not may_import("hyperparameters", "train")
    assert not may_import("data.corpus", "numerics.quantize")
    assert may_import("train", "hyperparameters")
    assert may_import("workloads.gpt", "train")


@pytest.mark.parametrize("library", sorted(HOMES))
def test_a_foreign_library_has_one_home(library):
    homes = {name_of(path).partition(".")[0] for path in FILES if any(module.partition(".")[0] == library for module in imports(path))}
    assert len(homes) <= 1, f"{library} is imported by {homes}"


def sql(source: str) -> set[int]:
    """Lines of a file that hold an SQL statement, or hand one to a database."""
    lines = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _STATEMENT.search(node.value):
            lines.add(node.lineno)
        call = node.func if isinstance(node, ast.Call) else None
        if isinstance(call, ast.Attribute) and call.attr in ("execute", "executemany", "executescript"):
            asks_figure = [ast.unparse(argument) for argument in node.args] == ["figure"]  # matplotlib's layout engines
            lines |= set() if asks_figure else {node.lineno}
    return lines


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_sql_stands_in_the_ledgers_files(path):
    lines = sql(path.read_text())
    assert bool(lines) == (name_of(path) in SQL), sorted(lines)


@pytest.mark.parametrize(
    "source", ["db.execute(query)", "query = 'SELECT a FROM b'", "ledger.db.executemany(f'UPDATE {table} SET a = ?', rows)"]
)
def test_sql_would_be_seen(source):
    assert sql(source) == {1}


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_a_file_is_at_most_500_lines_long_and_says_what_it_is(path):
    assert len(path.read_text().splitlines()) <= 500
    assert ast.get_docstring(ast.parse(path.read_text()))


@pytest.mark.parametrize("module", INSTANT)
def test_what_planning_needs_imports_in_an_instant(module):
    relative = ROOT.parent / module.replace(".", "/")
    if not relative.with_suffix(".py").exists() and not relative.is_dir():
        pytest.skip(f"{module} does not exist yet")
    code = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=False)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


# --- randomness is an argument ---------------------------------------------------------------------------------------------

DRAWS = {
    "rand",
    "randn",
    "randint",
    "randperm",
    "normal",
    "bernoulli",
    "multinomial",
    "poisson",
    "rand_like",
    "randn_like",
    "randint_like",
}
IN_PLACE = {"uniform_", "normal_", "random_", "bernoulli_", "exponential_", "cauchy_", "log_normal_", "geometric_"}
SEEDED = {"default_rng", "Generator", "SeedSequence", "Philox", "PCG64", "RandomState"}


def dotted(node: ast.expr) -> str:
    """`torch.random.fork_rng` of an attribute chain; what is not a name reads as `?`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def global_draws(source: str) -> list[str]:
    """Calls that read, advance or seed a global generator."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            found += [name for name in names if name in ("random", "numpy.random")]
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        root, last = name.partition(".")[0], name.rpartition(".")[2]
        given = any(keyword.arg == "generator" for keyword in node.keywords)
        numpy = ".".join(name.split(".")[:2]) in ("np.random", "numpy.random") and not (last in SEEDED and (node.args or node.keywords))
        seeding = root == "torch" and last in ("manual_seed", "manual_seed_all", "seed", "seed_all", "set_rng_state", "fork_rng")
        drawing = (root == "torch" and last in DRAWS) or last in IN_PLACE
        if numpy or seeding or (drawing and not given) or last in ("Dropout", "dropout") or ".init." in name:
            found.append(name)
    return found


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_no_file_touches_a_global_generator(path):
    """But for one: what other libraries' models draw there is drawn inside a fork, seeded, which `models.drawn` puts back."""
    forks = ["torch.random.fork_rng", "torch.manual_seed"] if name_of(path) == "models" else []
    assert global_draws(path.read_text()) == forks


@pytest.mark.parametrize(
    "line",
    [
        "torch.manual_seed(0)",
        "torch.cuda.manual_seed_all(0)",
        "torch.randn(3)",
        "torch.rand_like(x)",
        "x.normal_()",
        "w.data.uniform_(-1, 1)",
        "np.random.rand(3)",
        "numpy.random.seed(0)",
        "np.random.default_rng()",
        "import random",
        "from random import shuffle",
        "F.dropout(x, 0.1)",
        "nn.init.normal_(w, generator=g)",
    ],
)
def test_a_global_draw_would_be_seen(line):
    assert global_draws(line)


@pytest.mark.parametrize(
    "line",
    [
        "torch.randn(3, generator=g)",
        "torch.Generator().manual_seed(0)",
        "np.random.default_rng(7)",
        "x.normal_(generator=g)",
        "random_bits(clock)",
    ],
)
def test_an_explicit_draw_is_none(line):
    assert global_draws(line) == []


# --- regular expressions ---------------------------------------------------------------------------------------------------

PATTERNS = {
    "arms": ["a value that YAML writes without quotes"],
    "data.documents": ["where documents of foreign files may be cut: lines", "... words"],
    "data.tokenisers": ["the hub's rule for a name"],
    "databases": ["octal escapes of the kernel's mounts table"],
    "doctor": ["characters that a file name does not keep"],
    "engines.emulated": ["blocks in the module names of other libraries' models"],
    "engines.hardware": ["the driver's version in /proc", "a library's version: has it a number?", "... its leading numbers"],
    "figures.style": [
        "SVG's metadata, which holds a date",
        "ids within an SVG",
        "characters that an id does not keep",
        "where a long name may be broken",
    ],
    "figures.tables": ["metrics by a figure's pattern", "the names of that pattern's groups", "a metric's name, escaped, as a pattern"],
    "models.causal": ["reads of a config in other libraries' code", "... the field's name, escaped", "... and again"],
    "page": [
        "the longest fence in a quoted file",
        "characters that a file name does not keep",
        "Markdown's bold",
        "Markdown's code",
    ],
    "peaks": ["GPU names, as the driver spells them"],
    "place": ["$NAME in a user's profile"],
    "plain_text": ["spreadsheet formulas in a user's text", "tags in a user's text"],
    "rebuild": ["identities in the bytes of a damaged database"],
    "recipes.recipe": ["a phase's start, as a user writes it"],
    "redact": ["passwords in an address", "... in its query"],
    "search.shelf": ["attributes that Optuna's dashboard names by trial", "paths of that dashboard's requests"],
    "surface": ["a share or a number, as a user writes it"],
    "tracking.door": ["why a connection failed, in urllib3's message"],
    "ui": ["the Host header of a request"],
    "workloads.tensors": ["a distribution's parameters, as a user writes them"],
}
"""Every use of `re`, by file: what it reads. No sentence of this package is among them: what one file says to another is data."""


def patterns(text: str) -> int:
    """How often a file's text calls a function of `re`."""
    calls = [node.func for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call)]
    return sum(isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id == "re" for call in calls)


@pytest.mark.parametrize("path", FILES, ids=name_of)
def test_every_regular_expression_is_listed_with_what_it_reads(path):
    assert patterns(path.read_text()) == len(PATTERNS.get(name_of(path), ()))
    assert not {module for module in imports(path) if module.startswith("re.")}, "call functions of `re` by its name, to be counted"


def test_the_list_of_regular_expressions_has_no_file_that_is_gone():
    assert PATTERNS.keys() <= {name_of(path) for path in FILES}
    assert patterns("import re\nre.compile('a').match(re.escape('b'))") == 2
