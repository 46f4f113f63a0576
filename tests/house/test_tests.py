"""Rules for the tests themselves: what they share stands in tests/support, and they use public names only.

Each rule is one test that lists every offender, and one that shows an offender being found.
"""

import ast
import itertools
import json
import re
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest
from support import cases, cpu_report
from support.cases import Sample, Tier, covering, dealt, every, sampled
from support.experiments import environment

from ablate.own_source import Code, load
from ablate.recipes import PRESETS

ROOT = Path(__file__).parents[1]


@cache
def files() -> dict[str, ast.Module]:
    """Return every Python file of the tests, parsed."""
    return {str(path.relative_to(ROOT)): ast.parse(path.read_text()) for path in sorted(ROOT.rglob("*.py"))}


def imports_of_tests(parsed: ast.Module) -> list[int]:
    """Return the lines that import a test module, or pytest's conftest."""
    lines = []
    for node in ast.walk(parsed):
        modules = []
        if isinstance(node, ast.Import):
            modules = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            modules = [node.module or "", *(alias.name for alias in node.names)]
        if any(
            part == "conftest" or part.startswith("test_") for name in modules for part in name.split(".")
        ):
            lines.append(node.lineno)
    return lines


def test_no_module_imports_a_test_module():
    assert {file: lines for file, parsed in files().items() if (lines := imports_of_tests(parsed))} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import test_store",
        "from test_store import HOLD",
        "from tests import test_store",
        "from tests.numerics.test_stored import same",
        "from conftest import shards",
        "def later():\n    from test_search import trials",
    ],
)
def test_an_import_of_a_test_module_would_be_seen(source):
    assert imports_of_tests(ast.parse(source)) == [len(source.splitlines())]


FOREIGN = {
    "_apply_gate": "transformers' modules of experts",
    "_is_expert_parallel": "transformers' modules of experts",
    "_keep_in_fp32_modules_strict": "transformers' models",
    "_apply_rht": "Transformer Engine's reference",
    "_columnwise_data": "Transformer Engine's tensors",
    "_columnwise_scale_inv": "Transformer Engine's tensors",
    "_data": "Transformer Engine's tensors",
    "_C": "torch",
    "_buffers": "torch",
    "_nn": "torch",
    "_parameters": "torch",
    "_parse_to": "torch",
    "_patch_lang": "Triton's interpreter",
    "_dynamo": "torch",
    "_get_np_dtype": "Triton's interpreter",
    "_getframe": "sys",
    "_only_lift_cpu_tensors": "torch",
    "_pytree": "torch",
    "_set_only_lift_cpu_tensors": "torch",
    "_engine_map": "MLflow's store",
    "_exit": "os",
    "_fp8_dtype": "Transformer Engine's tensors",
    "_private": "Ray",
    "_opener": "urllib.request",
    "_schema": "torch",
    "_quantize_blockwise_reference": "Transformer Engine's reference",
    "_quantizer": "Transformer Engine's tensors",
    "_recover_swizzled_scales": "Transformer Engine's reference",
    "_replace": "named tuples",
    "_repr_mimebundle_": "Jupyter's protocol",
    "_rowwise_data": "Transformer Engine's tensors",
    "_rowwise_scale_inv": "Transformer Engine's tensors",
    "_scale_inv": "Transformer Engine's tensors",
    "_storage": "Optuna's studies",
    "_study_id": "Optuna's studies",
    "_trial_id": "Optuna's trials",
}
"""Private names of other libraries that tests use, and whose they are."""
BY_NAME = {"setattr", "getattr", "delattr", "object", "patch", "multiple"}
"""Functions that take the name of an attribute as text."""


def is_private(name: str) -> bool:
    """Return True for a name with one leading underscore."""
    return name.startswith("_") and not name.startswith("__") and name != "_"


def private_names(parsed: ast.Module) -> list[tuple[int, str]]:
    """Return (line, name) of each private name of another file that is imported, used or patched."""
    uses = []
    for node in ast.walk(parsed):
        if isinstance(node, ast.Attribute):
            names = (
                [] if isinstance(node.value, ast.Name) and node.value.id in ("self", "cls") else [node.attr]
            )
        elif isinstance(node, ast.ImportFrom):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.Call):
            function = (
                node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")
            )
            texts = [a.value for a in node.args if isinstance(a, ast.Constant) and isinstance(a.value, str)]
            names = [part for text in texts for part in text.split(".")] if function in BY_NAME else []
            names += [keyword.arg or "" for keyword in node.keywords if function == "multiple"]
        else:
            continue
        uses += [(node.lineno, name) for name in names if is_private(name)]
    return uses


def test_tests_use_public_names_only():
    uses = {file: private_names(parsed) for file, parsed in files().items()}
    assert [(file, *use) for file, found in uses.items() for use in found if use[1] not in FOREIGN] == []
    assert {name for found in uses.values() for _, name in found} == {*FOREIGN}, "no longer used"


@pytest.mark.parametrize(
    "source",
    [
        "supervisor._name",
        "projections.mirror._name.news",
        "from ablate.cli.sweep import _name",
        "monkeypatch.setattr(hub, '_name', None)",
        "monkeypatch.setattr('ablate.cache._name', 0.02)",
        "mock.patch.object(cuda, '_name')",
        "mock.patch('ablate.cache._name')",
        "mock.patch.multiple(cuda, _name=None)",
        "getattr(pool, '_name')",
    ],
)
def test_a_private_name_would_be_seen(source):
    assert private_names(ast.parse(source)) == [(1, "_name")]


def test_every_lists_each_case_that_fails(monkeypatch):
    monkeypatch.setattr(Tier, "fast", False)

    @every(a=range(3), b__c=[(1, 2), (3, 4)])
    def sums(a: int, b: int, c: int) -> None:
        assert a + b + c < 8

    with pytest.raises(AssertionError, match="2 of 6 cases fail") as failed:
        sums()
    assert [
        ast.literal_eval(line.partition(": AssertionError")[0])
        for line in str(failed.value).splitlines()
        if line.startswith("{")
    ] == [{"a": 1, "b": 3, "c": 4}, {"a": 2, "b": 3, "c": 4}]


PRODUCT = [(a, b) for a in range(9) for b in "xyz"]


def test_a_sample_has_every_value_of_every_place_and_is_drawn_by_its_seed(monkeypatch):
    monkeypatch.setattr(Tier, "whole", False)
    for size, seed in itertools.product((0, 5, 9, 15, 27, 99), range(3)):
        found = sampled(PRODUCT, size, seed)
        assert [{*place} for place in zip(*found, strict=True)] == [{*range(9)}, {*"xyz"}]
        assert found == sorted(found) == sampled(PRODUCT, size, seed)
        assert len(found) == min(27, max(9, size))
    assert sampled(PRODUCT, 0, 0) != sampled(PRODUCT, 0, 1)
    assert sampled("abc", 1, 0) == ["a", "b", "c"]
    monkeypatch.setattr(Tier, "whole", True)
    assert sampled(PRODUCT, 0, 0) == PRODUCT


def test_promises_have_all_values_among_them_or_each(monkeypatch):
    monkeypatch.setattr(Tier, "whole", False)
    parts = [dealt(range(10), part, 3) for part in range(3)]
    assert sorted(itertools.chain(*parts)) == [*range(10)]
    assert {len(part) for part in parts} == {3, 4}
    assert parts != [dealt(range(10), part, 3, seed=1) for part in range(3)]
    monkeypatch.setattr(Tier, "whole", True)
    assert dealt(range(10), 1, 3) == [*range(10)]


def test_a_covering_sample_has_every_value_of_every_field(monkeypatch):
    monkeypatch.setattr(Tier, "whole", False)
    cases = {name: make().fprop for name, make in PRESETS.items()}
    values = {name: {*re.findall(r"\w+=[^=(,)]+", repr(case))} for name, case in cases.items()}
    found = covering(cases)
    assert set().union(*(values[name] for name in found)) == set().union(*values.values())
    assert found == [name for name in cases if name in found]
    assert len(found) < len(cases)
    monkeypatch.setattr(Tier, "whole", True)
    assert covering(cases) == [*cases]


@pytest.mark.parametrize(("whole", "count"), [(False, 9), (True, 27)])
def test_every_runs_a_sample_or_all(whole, count, monkeypatch):
    monkeypatch.setattr(Tier, "fast", False)
    monkeypatch.setattr(Tier, "whole", whole)
    ran = set()

    @every(Sample(5, seed=0), a=range(9), b="xyz")
    def noted(a: int, b: str) -> None:
        ran.add((a, b))

    noted()
    assert len(ran) == count
    assert {a for a, _ in ran} == {*range(9)}


def test_every_keeps_few_cases_in_the_fast_tier_and_gives_each_its_folder(monkeypatch, tmp_path):
    monkeypatch.setattr(Tier, "fast", True)
    cases = []

    @every(number=range(100))
    def noted(tmp_path: Path, number: int) -> None:
        cases.append((number, tmp_path.is_dir(), tmp_path))

    noted(tmp_path=tmp_path)
    assert [(number, there) for number, there, _ in cases] == [(0, True), (99, True)]
    assert len({folder for *_, folder in cases}) == 2


# The report of CPU-seconds

CONFTEST = """
from support import cpu_report

def pytest_addoption(parser):
    cpu_report.add_option(parser)

def pytest_configure(config):
    cpu_report.install(config)
"""
BUSY = """
import subprocess, sys

BUSY = "import time\\nwhile time.process_time() < 0.3: pass"

def test_a_process_that_is_waited_for():
    subprocess.run([sys.executable, "-c", BUSY], check=True)
"""


@pytest.mark.slow
@pytest.mark.parametrize("workers", [0, 1])
def test_the_cpu_report_has_every_file_with_its_processes_and_the_total(workers, tmp_path):
    for name, text in {
        "conftest": CONFTEST,
        "test_busy": BUSY,
        "test_idle": "def test_nothing(): pass",
    }.items():
        (tmp_path / f"{name}.py").write_text(text)
    command = [sys.executable, "-m", "pytest", "-q", "-n", str(workers), "--cpu-report", "cpu.json"]
    done = subprocess.run(
        command,
        cwd=tmp_path,
        env=environment(PYTHONPATH=str(ROOT)),
        capture_output=True,
        text=True,
        check=True,
    )
    seconds = json.loads((tmp_path / "cpu.json").read_text())
    assert {*seconds} == {"test_busy.py", "test_idle.py", cpu_report.IMPORTS}
    assert seconds["test_busy.py"] >= 0.3 > seconds["test_idle.py"]
    (total,) = re.findall(
        r"^CPU (\d+) s .*, wall \d+ s, load average [\d., ]+ s for [\d,]+ turns of a loop$",
        done.stdout,
        re.MULTILINE,
    )
    assert int(total) == pytest.approx(sum(seconds.values()), abs=0.6)  # both are rounded


def test_code_of_ones_own_that_imports_a_support_module_gets_another(tmp_path):
    (tmp_path / "mine.py").write_text("from support import cases\ndef train(trial):\n    return cases\n")
    assert load(Code(tmp_path / "mine.py", "train", tmp_path))(None) is not cases


def test_after_it_tests_have_theirs_again():
    assert sys.modules["support.cases"] is cases
