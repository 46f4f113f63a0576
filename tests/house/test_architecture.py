"""The house: twelve packages in one direction, foreign libraries with one home, short files, instant planning, randomness as an argument.

Each promise is one test that lists every offender.
"""

import ast
import re
import subprocess
import sys
from collections import Counter
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from ablate.training.workloads import WORKLOADS

ROOT = Path(__file__).parents[2] / "ablate"
FILES = sorted(ROOT.rglob("*.py"))

PACKAGES = [
    "cli",
    "verification",
    "reports",
    "judging",
    "execution",
    "results",
    "store",
    "experiment",
    "training",
    "engines",
    "recipes",
    "numerics",
]
"""Top to bottom: a package imports from those below it, and from the leaves."""
BESIDE = {("reports", "execution"), ("reports", "judging")}
"""Pairs of which neither may import the other, though one stands above."""
MOST_FILES = 30
"""Most files of its own in a folder: one that grows beyond is two ideas."""
MOST_COMMAND_LINES = 60
"""Most lines of a function of `cli/`: options, printing and exit statuses; the work belongs to a package below."""
LEAVES = {"errors", "files", "cache", "provenance", "own_source", "source_imports", "version"}
"""Files at the root that every package may import; among themselves they form no circle."""
ENTRIES = {"__init__", "__main__", "sweep", "doctor", "bench"}
"""Files at the root that start a command, or are the package's interface: nothing imports them."""

HOMES = {
    "ray",
    "optuna",
    "optuna_dashboard",
    "mlflow",
    "tensorboard",
    "ruamel",
    "seaborn",
    "transformer_engine",
    "transformers",
    "accelerate",
    "lightning",
    "statsmodels",
    "jinja2",
    "markdown_it",
    "datasets",
    "huggingface_hub",
    "tokenizers",
    "PIL",
}
"""Foreign libraries that at most one file, or folder, imports, so that changing them touches one place."""
VISITS = {
    "cli.common": {"jinja2"},
    "experiment.integrations": {"transformers"},
    "recipes.targets": {"ruamel", "jinja2"},
}
"""Libraries that a folder other than their home imports: callbacks subclass those of the library's training loop,
configurations of training stacks are YAML, or Python from a template, and so are the files that `init` writes."""

SQL = {
    "store.ledger",
    "store.ledger_file",
    "store.ledger_records",
    "store.ledger_seals",
    "store.commit_count",
    "store.databases",  # any SQLite file: its pages, its tables, its journal
    "execution.tracking.database",  # MLflow's own
}
"""Files that may contain SQL: everybody else asks the ledger, and gets its rows."""
_STATEMENT = re.compile(
    r"\b(SELECT [^.]+|DELETE FROM \w+|INSERT (OR \w+ )?INTO \w+|UPDATE \w+ SET|PRAGMA \w+"
    r"|(CREATE|ALTER|DROP) (TEMP )?(TABLE|INDEX|TRIGGER))\b"
)

INSTANT = (
    "ablate.recipes",
    "ablate.training.workloads",
    "ablate.cli.plan",
    "ablate.experiment.load",
    "ablate.training.data",
    "ablate.engines",
)
HEAVY = ("torch", "ray", "mlflow", "optuna", "transformers", "datasets", "huggingface_hub", "sklearn")


def name_of(path: Path) -> str:
    """Return `numerics.spec`, or `numerics` for a folder's __init__."""
    parts = list(path.relative_to(ROOT).with_suffix("").parts)
    return ".".join(parts[:-1] if len(parts) > 1 and parts[-1] == "__init__" else parts)


MODULES = {name_of(path): path for path in FILES}


@cache
def tree(name: str) -> ast.Module:
    """Return the parsed file of a module."""
    return ast.parse(MODULES[name].read_text())


@cache
def imports(name: str) -> set[str]:
    """Return every module that a file names in an import, wherever it stands; `from a import b` gives a.b."""
    modules = set()
    for node in ast.walk(tree(name)):
        if isinstance(node, ast.Import):
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name}: write imports in full"
            modules |= {f"{node.module}.{alias.name}" for alias in node.names}
    return modules


def own_imports(name: str) -> set[str]:
    """Return names of the package's modules that a file imports, without the leading `ablate.`."""
    modules = {module.removeprefix("ablate.") for module in imports(name) if module.startswith("ablate.")}
    return {module if module in MODULES else module.rpartition(".")[0] or "__init__" for module in modules}


def may_import(source: str, target: str) -> bool:
    """Return True if the floors allow this import."""
    top, other = source.partition(".")[0], target.partition(".")[0]
    if top in ENTRIES:
        return True
    if other in LEAVES:
        return True
    if top in LEAVES or other not in PACKAGES or (top, other) in BESIDE:
        return False
    return PACKAGES.index(other) >= PACKAGES.index(top)


def test_the_packages_are_those_that_are_there():
    folders = {path.name for path in ROOT.iterdir() if path.is_dir() and path.name != "__pycache__"}
    assert folders == {*PACKAGES}
    assert {path.stem for path in ROOT.glob("*.py")} == LEAVES | ENTRIES


def test_no_folder_has_more_files_than_one_idea_needs():
    count = Counter(path.parent.relative_to(ROOT).as_posix() for path in FILES if path.stem != "__init__")
    assert {folder: files for folder, files in count.items() if files > MOST_FILES} == {}


def long_functions(parsed: ast.Module) -> dict[str, int]:
    """Return the lines of each function that has more than a command may have, docstring included."""
    return {
        node.name: lines
        for node in ast.walk(parsed)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)
        and (lines := (node.end_lineno or 0) - node.lineno + 1) > MOST_COMMAND_LINES
    }


def test_commands_are_thin():
    commands = [name for name in MODULES if name.partition(".")[0] == "cli"]
    assert {name: found for name in commands if (found := long_functions(tree(name)))} == {}


def test_a_long_function_would_be_seen():
    body = "    pass\n" * MOST_COMMAND_LINES
    assert long_functions(ast.parse(f"class Command:\n  def run():\n{body}")) == {
        "run": MOST_COMMAND_LINES + 1
    }
    assert long_functions(ast.parse(f"def run():\n{body[9:]}")) == {}


def test_every_import_points_down():
    assert [
        (name, target)
        for name in MODULES
        for target in sorted(own_imports(name))
        if not may_import(name, target)
    ] == []


def in_order(arrows: dict[str, set[str]]) -> list[str]:
    """Return names in an order in which each comes after all that it imports. CycleError if there is none."""
    return [*TopologicalSorter(arrows).static_order()]


def test_no_files_import_each_other_in_a_circle():
    assert {*in_order({name: own_imports(name) for name in MODULES})} == {*MODULES}


def test_an_import_circle_would_be_seen():
    with pytest.raises(CycleError):
        in_order({"engines.ranks": {"engines.layer"}, "engines.layer": {"engines.ranks"}})


def test_an_import_that_points_up_would_be_seen():
    assert not may_import("numerics.spec", "recipes.recipe")
    assert not may_import("training.metrics", "store.ledger")
    assert not may_import("files", "training.loop")
    assert not may_import("reports.answer", "execution.search")
    assert not may_import("numerics.spec", "sweep")
    assert may_import("training.loop", "training.hyperparameters")
    assert may_import("training.loop", "files")
    assert may_import("cli.sweep", "numerics.spec")


def test_a_foreign_library_has_one_home():
    homes: dict[str, set[str]] = {}
    for name in MODULES:
        home = ".".join(name.split(".")[:2])
        for library in (HOMES & {module.partition(".")[0] for module in imports(name)}) - VISITS.get(
            home, set()
        ):
            homes.setdefault(library, set()).add(home)
    assert {library: names for library, names in homes.items() if len(names) > 1} == {}


def sql(parsed: ast.Module) -> set[int]:
    """Return the lines of a file that hold an SQL statement, or hand one to a database."""
    lines = set()
    for node in ast.walk(parsed):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and _STATEMENT.search(node.value):
            lines.add(node.lineno)
        call = node.func if isinstance(node, ast.Call) else None
        if isinstance(call, ast.Attribute) and call.attr in ("execute", "executemany", "executescript"):
            asks_figure = [ast.unparse(argument) for argument in node.args] == [
                "figure"
            ]  # matplotlib's layout engines
            lines |= set() if asks_figure else {node.lineno}
    return lines


def test_sql_stands_in_the_ledgers_files():
    assert {name for name in MODULES if sql(tree(name))} == SQL


@pytest.mark.parametrize(
    "source",
    [
        "db.execute(query)",
        "query = 'SELECT a FROM b'",
        "ledger.db.executemany(f'UPDATE {table} SET a = ?', rows)",
    ],
)
def test_sql_would_be_seen(source):
    assert sql(ast.parse(source)) == {1}


def test_a_file_is_at_most_600_lines_long_and_says_what_it_is():
    assert {
        name: lines for name, path in MODULES.items() if (lines := len(path.read_text().splitlines())) > 600
    } == {}
    assert [name for name in MODULES if not ast.get_docstring(tree(name))] == []


@pytest.mark.parametrize("module", INSTANT)
def test_what_planning_needs_imports_in_an_instant(module):
    code = f"import sys, {module}; print(*[name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT.parent, check=False
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


# --- abilities, not classes -----------------------------------------------------------------------


def asked_classes(parsed: ast.Module) -> set[str]:
    """Return the classes of workloads that a file compares an object with."""
    classes = {kind.__name__ for workload in WORKLOADS.values() for kind in workload.__mro__}
    return {
        name.id
        for node in ast.walk(parsed)
        if isinstance(node, ast.Call) and dotted(node.func) in ("isinstance", "issubclass")
        for name in ast.walk(node.args[1])
        if isinstance(name, ast.Name) and name.id in classes - {"Spec", "BaseModel", "object"}
    }


def asked_names(parsed: ast.Module) -> set[str]:
    """Return the names of workloads that a file compares with the one of a trial."""
    return {
        text.value
        for node in ast.walk(parsed)
        if isinstance(node, ast.Compare)
        and any(dotted(side).rpartition(".")[2] == "workload" for side in (node.left, *node.comparators))
        for side in (node.left, *node.comparators)
        for text in ast.walk(side)
        if isinstance(text, ast.Constant) and text.value in WORKLOADS
    }


def test_no_other_file_asks_for_the_class_or_the_name_of_a_workload():
    """Callers ask for an ability (`workloads/base.py`), so that a workload that has it needs no other class."""
    asked = {
        name: found for name in MODULES if (found := asked_classes(tree(name)) | asked_names(tree(name)))
    }
    assert {name for name in asked if not name.startswith("training.workloads")} == set()


def test_a_question_for_the_class_or_the_name_of_a_workload_would_be_seen():
    assert asked_names(ast.parse("if spec.workload in ('gpt', 'tensors') or 'idle' == workload: pass")) == {
        "gpt",
        "tensors",
        "idle",
    }
    assert asked_names(ast.parse("if spec.engine == 'gpt' or spec.workload == other: pass")) == set()
    assert asked_classes(ast.parse("if isinstance(arm.config, Gpt | Training): pass")) == {"Gpt", "Training"}
    assert asked_classes(ast.parse("isinstance(quant, Spec)")) == set()


# --- randomness is an argument --------------------------------------------------------------------

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
IN_PLACE = {
    "uniform_",
    "normal_",
    "random_",
    "bernoulli_",
    "exponential_",
    "cauchy_",
    "log_normal_",
    "geometric_",
}
SEEDED = {"default_rng", "Generator", "SeedSequence", "Philox", "PCG64", "RandomState"}


def dotted(node: ast.expr) -> str:
    """`torch.random.fork_rng` of an attribute chain; what is not a name reads as `?`."""
    if isinstance(node, ast.Attribute):
        return f"{dotted(node.value)}.{node.attr}"
    return node.id if isinstance(node, ast.Name) else "?"


def global_draws(parsed: ast.Module) -> list[str]:
    """Return the calls that read, advance or seed a global generator."""
    found = []
    for node in ast.walk(parsed):
        if isinstance(node, ast.Import | ast.ImportFrom):
            names = (
                [alias.name for alias in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            )
            found += [name for name in names if name in ("random", "numpy.random")]
        if not isinstance(node, ast.Call):
            continue
        name = dotted(node.func)
        root, last = name.partition(".")[0], name.rpartition(".")[2]
        given = any(keyword.arg == "generator" for keyword in node.keywords)
        numpy = ".".join(name.split(".")[:2]) in ("np.random", "numpy.random") and not (
            last in SEEDED and (node.args or node.keywords)
        )
        seeding = root == "torch" and last in (
            "manual_seed",
            "manual_seed_all",
            "seed",
            "seed_all",
            "set_rng_state",
            "fork_rng",
        )
        drawing = (root == "torch" and last in DRAWS) or last in IN_PLACE
        if numpy or seeding or (drawing and not given) or last in ("Dropout", "dropout") or ".init." in name:
            found.append(name)
    return found


def test_no_file_touches_a_global_generator():
    """But for four, which put back what they find, and one that reads states.

    Models of other libraries draw their weights there (`models.drawn`), and a user's own code draws what it
    likes: from the trial's seed (`trial.seeded`), and twice alike where a gradient is compared. A user's
    rounding that draws is refused (`own_calls`). A user's layer may draw while it is compared with nn.Linear
    (`linears.refuse_other`).
    """
    draws = {name for name in MODULES if global_draws(tree(name))}
    assert draws == {
        "training.models",
        "training.own_code.trial",
        "training.conversion",
        "numerics.own_calls",
        "engines.linears",
    }


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
    assert global_draws(ast.parse(line))


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
    assert global_draws(ast.parse(line)) == []


# --- regular expressions --------------------------------------------------------------------------

PATTERNS = {
    "numerics.own": ["a word of a recipe that names a function"],
    "results.number_text": ["a number with a fraction in an arm's name"],
    "experiment.arms": ["a value that YAML writes without quotes", "the words that pydantic would accept"],
    "training.data.documents": ["where documents of foreign files may be cut: lines", "... words"],
    "training.own_code.exports": ["options and variables of a user's command that set a precision"],
    "training.data.tokenisers": ["the hub's rule for a name"],
    "store.databases": ["types of network file systems", "octal escapes of the kernel's mounts table"],
    "cli.judge": ["words in braces of a path", "characters that a name in the state folder does not keep"],
    "reports.notebooks": ["headings of the HTML that Markdown becomes", "headings of a page"],
    "recipes.layers": [
        "blocks in the module names of other libraries' models",
        "a range of blocks, as a user writes it",
    ],
    "engines.gpu_access": ["the CUDA version in torch's version.py"],
    "provenance": ["the driver's version in /proc"],
    "engines.hardware": [
        "a library's version: its leading numbers",
        "a compute capability, as a user writes it",
    ],
    "reports.figures.style": [
        "SVG's metadata, which holds a date",
        "ids within an SVG",
        "where a long name may be broken",
    ],
    "training.models.causal": [
        "reads of a config in other libraries' code",
        "... the field's name, escaped",
        "... and again",
    ],
    "reports.page": [
        "characters that an anchor does not keep",
        "the longest fence in a quoted file",
        "characters that a file name does not keep",
    ],
    "verification.parity": ["characters that a file name does not keep"],
    "verification.gpu_peaks": ["GPU names, as the driver spells them"],
    "cli.settings": ["$NAME in a user's profile"],
    "recipes.targets.megatron": [
        "variables and options about precision, in other people's scripts",
        "the file on single layers in a script of our own",
    ],
    "recipes.targets.shell": [
        "words and operators of bash, in a script",
        "parts of a word by their quotes",
        "expansions inside double quotes",
        "names, items and defaults of a parameter",
        "here-documents",
        "names and values of assignments",
        "names that other commands may give a value to",
        "commands without effect on a job",
        "programs that launch a job",
        "programs that hand on arguments",
        "programs that do not",
        "programs that run a job elsewhere",
        "words that were not understood, as a place of environment variables",
        "programs that start a job",
        "files that activate an environment",
        "commands that start another script",
        "programs that print what activates an environment",
        "expansions that have the script's own folder",
        "characters of this reader for values that are not known",
        "assignments before a command",
        "operators of a shell of its own",
        "options with values that are not known",
        "options of set that export all",
        "commands whose output becomes a value",
        "names that an expansion makes",
        "quotes inside an expansion",
        "blanks that separate words",
        "names inside an expansion",
        "expansions that print",
    ],
    "recipes.targets.megatron_precision": ["globs on the number of a block"],
    "recipes.targets.jobs": ["`export NAME=value` in a user's file of variables"],
    "reports.plain_text": [
        "spreadsheet formulas in a user's text",
        "numbers in a text, for their minus signs",
        "Markdown's bold",
        "Markdown's code",
        "tags in a user's text",
    ],
    "cli.rebuild": ["identities in the bytes of a damaged database"],
    "recipes.recipe": ["a phase's start, as a user writes it"],
    "errors": ["passwords in an address", "... in its query"],
    "execution.search.combined_storage": [
        "attributes that Optuna's dashboard names by trial",
        "paths of that dashboard's requests",
    ],
    "experiment.schema": ["a share or a number, as a user writes it"],
    "execution.job_array": [
        "the form of a trial's id",
        "options of sbatch, as a user writes them",
        "characters that the name of a job does not keep",
    ],
    "training.metric_names": [
        "names that MLflow allows",
        "a window's readings",
        "those of a part of the data",
    ],
    "verification.conformance.dumps": [
        "a file's name, of DumpTensors",
        "the rank, of a folder",
        "the step, of a folder",
        "the numbers in a layer's name",
    ],
    "training.log_readers.lines": ["a terminal's colours", "torchrun's prefix of a rank's lines", "a number"],
    "training.log_readers.torchtitan": ["the begin of torchtitan's lines", "their fields"],
    "training.log_readers.megatron": ["Megatron's lines of training", "of evaluation"],
    "training.log_readers.hf": ["dicts that transformers' Trainer prints", "their items"],
    "training.log_readers.pattern": [
        "lines of a log, as a user or a table of stacks has it",
        "lines that are damaged unless they match",
    ],
    "training.own_code.user_errors": [
        "torch's prefix of a rank's lines",
        "a frame of a traceback that Python printed",
        "its last line",
    ],
    "judging.columns": [
        "words above a column's name, in sources of other people",
        "words of metrics of which more is better",
        "... of which less is",
        "names of learning rates",
        "characters between the words of a metric's name",
    ],
    "judging.own_fields": [
        "fields of other people that name a run",
        "... that say where it ran",
        "... that it measured",
        "further seeds",
        "options of a command line that name a run",
        "words above such a field",
        "words of hyperparameters, in a field",
        "... between which other characters stand",
    ],
    "judging.statuses": [
        "columns of other people with words of a status",
        "... with exit codes",
        "... that are true of a run that is done",
        "... that are true of one that is not",
        "words that mean done",
        "words that mean not yet done",
        "characters of a column's name that are no letters",
    ],
    "judging.names": [
        "a name that ends in a number",
        "a user's pattern of a name, escaped",
        "... as the name is matched",
    ],
    "execution.tracking.access": ["why a connection failed, in urllib3's message"],
    "cli.servers.reports": ["the Host header of a request"],
    "training.workloads.command": ["absolute paths in a command line, as a user writes it"],
    "training.workloads.tensors": ["a distribution's parameters, as a user writes them"],
}
"""Every use of `re`, by file: what it reads. No sentence of this package is among them: what one file says to another is data."""


def patterns(parsed: ast.Module) -> int:
    """Return how often a file calls a function of `re`."""
    calls = [node.func for node in ast.walk(parsed) if isinstance(node, ast.Call)]
    return sum(
        isinstance(call, ast.Attribute) and isinstance(call.value, ast.Name) and call.value.id == "re"
        for call in calls
    )


def test_every_regular_expression_is_listed_with_what_it_reads():
    counts = {name: count for name in MODULES if (count := patterns(tree(name)))}
    assert counts == {name: len(purposes) for name, purposes in PATTERNS.items()}
    hidden = [name for name in MODULES if any(module.startswith("re.") for module in imports(name))]
    assert hidden == [], "call functions of `re` by its name, to be counted"


def test_a_regular_expression_would_be_counted():
    assert patterns(ast.parse("import re\nre.compile('a').match(re.escape('b'))")) == 2
