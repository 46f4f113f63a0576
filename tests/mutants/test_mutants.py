"""The guard of large deletions sees a mistake that a test sees, draws the same mutants again, and stays up to date."""

import ast
import json
import subprocess
import sys
from pathlib import Path

import pytest
from support.cases import every

from mutants import compare
from mutants.by_hand import MUTANTS, Mistake
from mutants.changes import COMPARISONS, OPERATORS, Source, key_of, normalised, sites
from mutants.coverage_map import CoverageMap, paths_of_tests, run_again
from mutants.draw import PACKAGE, draw, mutants_of, rank

ROOT = Path(__file__).parents[2]
FUNCTION = '''
def chosen(values: list[int], most: int = 3) -> int:
    """Return 7 < 8, as a text has it."""
    total = 0
    for value in values:
        if value and not value % 2:
            total += value * 4
        elif any(value > 1 for value in values):
            log("1 < 2")
            values.append(-1)
        if value == 5.5:
            raise ValueError(f"{value + 1} is not {1 + 1}")
    return min(total, most) if True else total
'''
EXPECTED = [
    ("constant", "3", "4"),
    ("constant", "0", "1"),
    ("negated condition", "value and not value % 2", "(not (value and not value % 2))"),
    ("operator", "and", "or"),
    ("operator", "%", "*"),
    ("constant", "2", "3"),
    ("dropped statement", "total += value * 4", "pass"),
    ("operator", "*", "/"),
    ("constant", "4", "5"),
    ("negated condition", "any(value > 1 for value in values)", "(not (any(value > 1 for value in values)))"),
    ("operator", "any", "all"),
    ("comparison", ">", ">="),
    ("constant", "1", "2"),
    ("dropped statement", "values.append(-1)", "pass"),
    ("operator", "-", " "),
    ("constant", "1", "2"),
    ("comparison", "==", "!="),
    ("constant", "5.5", "11.0"),
    ("dropped statement", 'raise ValueError(f"{value + 1} is not {1 + 1}")', "pass"),
    ("negated condition", "True", "(not (True))"),
    ("boolean", "True", "False"),
    ("operator", "min", "max"),
]
"""Changes of FUNCTION. Its docstring, annotations, log and message have none."""


def changes_of(text: str) -> list[tuple[str, str, str]]:
    source = Source(text)
    return [
        (site.kind, site.before, site.after)
        for _, function in source.functions()
        for site in sites(source, function)
    ]


def test_a_function_has_these_changes_and_its_texts_have_none():
    assert sorted(changes_of(FUNCTION)) == sorted(EXPECTED)


@every(pair=[*COMPARISONS.values(), *OPERATORS.values()])
def test_every_comparison_and_operator_becomes_another(pair):
    before, after = pair[0].replace(r"\s+", " "), pair[1]
    found = changes_of(f"def f(a, b):\n    # a {before} b\n    return (a) {before} (b)\n")
    assert [(old.split(), new.split()) for _, old, new in found] == [(before.split(), after.split())]


def test_every_change_of_the_package_parses_and_is_another_program():
    kinds = set()
    for mutant in draw(7, mutants_of(PACKAGE, "store"), 200):
        text = (PACKAGE / mutant.file).read_text()
        assert ast.dump(ast.parse(mutant.text())) != ast.dump(ast.parse(text)), mutant
        kinds.add(mutant.site.kind)
    assert kinds == {kind for kind, _, _ in EXPECTED}


OTHER = "\n\ndef unrelated(a):\n    return a + 1 < 2 and a - 4 > 3\n"


def written(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def test_a_seed_draws_the_same_mutants_after_other_code_went_and_the_function_moved(tmp_path):
    before, after = tmp_path / "before", tmp_path / "after"
    written(before, "one/a.py", OTHER + FUNCTION)
    written(before, "one/b.py", OTHER.replace("unrelated", "again"))
    documented = FUNCTION.replace("Return 7 < 8, as a text has it.", "Return another text.")
    written(after, "one/deep/c.py", f"import os\n{documented.replace('list[int]', 'list')}")
    drawn = draw(3, mutants_of(before, "one"), 12)
    kept = [mutant.key for mutant in drawn if mutant.function == "chosen"]
    assert 0 < len(kept) < 12
    again = draw(3, mutants_of(after, "one"), 12)
    assert [mutant.key for mutant in again][: len(kept)] == kept
    assert {mutant.file for mutant in again} == {"one/deep/c.py"}
    assert [mutant.key for mutant in draw(4, mutants_of(before, "one"), 12)] != [one.key for one in drawn]


def test_a_function_that_changed_has_other_mutants(tmp_path):
    written(tmp_path, "before/a.py", FUNCTION)
    written(tmp_path, "after/a.py", FUNCTION.replace("total = 0", "total = 9"))
    keys = [{mutant.key for mutant in mutants_of(tmp_path, folder)} for folder in ("before", "after")]
    assert len(keys[0]) == len(keys[1]) == len(EXPECTED)
    assert not keys[0] & keys[1]


def test_keys_and_ranks_are_the_same_on_every_machine():
    source = Source("def f(a):\n    return a < 1\n")
    ((name, function),) = source.functions()
    first = key_of(name, normalised(function), 0, sites(source, function)[0])
    assert first == KEY
    assert rank(1, first) != rank(2, first)


KEY = "fa167bd6bad9ac8d"


def row(key: str, outcome: str) -> dict:
    return {"key": key, "outcome": outcome, "file": "a.py", "line": 1, "function": "f", "change": "<"}


def test_a_mutant_that_was_killed_and_survives_fails_the_comparison(tmp_path, capsys):
    files = []
    for name, outcomes in (
        ("before", ("killed", "killed", "killed", "survived")),
        ("after", ("killed", "survived")),
    ):
        files.append(tmp_path / name)
        rows = [row(str(number), outcome) for number, outcome in enumerate(outcomes)]
        files[-1].write_text("".join(json.dumps(one) + "\n" for one in rows))
    before, after = map(compare.read, files)
    assert [one["key"] for one in compare.lost(before, after)] == ["1"]
    assert [one["key"] for one in compare.gone(before, after)] == ["2", "3"]
    assert compare.main(*files) == 1
    assert compare.main(files[0], files[0]) == 0
    assert capsys.readouterr().out


def test_a_function_that_moved_is_found_in_the_map_with_its_own_tests_and_the_cheapest(tmp_path):
    covered = CoverageMap(
        {"test_a.py": 8.0, "test_b.py": 1.0, "test_c.py": 50.0, "test_d.py": 2.0, "test_e.py": 20.0},
        {"test_a.py": 10, "test_b.py": 900, "test_c.py": 1, "test_d.py": 800, "test_e.py": 9},
        {
            "old/a.py": {"Kept.ruling": [0, 1, 2, 3], "slow": [2], "dear": [2, 4]},
            "old/d.py": {"own": [0, 1, 3]},
        },
    )
    there = {name: tmp_path / name for name in covered.seconds}
    there["test_d.py"].write_text("assert ruling(1) == 2")
    for file, first in (("old/a.py", "adb"), ("new/b.py", "dba"), ("new/c.py", "dab")):
        assert covered.tests_of(file, "Kept.ruling") == ["test_b.py", "test_d.py", "test_a.py", "test_c.py"]
        assert covered.chosen(file, "Kept.ruling", there) == [f"test_{word}.py" for word in first]
        assert covered.chosen(file, "Kept.ruling", {"test_d.py": there["test_d.py"]}) == ["test_d.py"]
        assert covered.chosen(file, "dear", there) == ["test_e.py"]
        assert covered.chosen("old/d.py", "own", there) == ["test_d.py", "test_a.py", "test_b.py"]
        assert covered.chosen(file, "slow", there) == []
    assert covered.tests_of("new/b.py", "ruling") == []


def test_mutants_that_run_again_run_the_tests_that_they_ran_before_and_others_for_those_that_are_gone():
    there = dict.fromkeys(["test_a.py", "test_b.py", "test_c.py", "test_d.py"])
    before = ["test_d.py", "test_gone.py", "test_b.py"]
    assert run_again(before, ["test_a.py", "test_b.py", "test_c.py"], there) == [
        "test_d.py",
        "test_b.py",
        "test_a.py",
    ]
    assert run_again(before[:1], ["test_a.py", "test_b.py"], there) == ["test_d.py"]


def test_names_of_test_files_are_unique_so_that_one_that_moves_is_found():
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert len(names) == len({*names})


def test_every_mistake_by_hand_has_its_place_and_its_test_file():
    names, problems = paths_of_tests(), []
    for mistake in MUTANTS:
        try:
            assert mistake.text() != (PACKAGE / mistake.file).read_text()
        except (ValueError, SyntaxError) as error:
            problems.append(str(error))
        if mistake.test not in names:
            problems.append(
                f"{mistake.test} is gone: name the file that must see this now: {mistake.promise}"
            )
    assert problems == []


def test_a_mistake_without_a_place_says_what_to_do(tmp_path):
    wrong = {"twice.py": "def f(a):\n    return a + 1 + 1\n", "gone.py": "def g(a):\n    return a + 1\n"}
    for name, text in (wrong | {"there.py": "def f(a):\n    return a + 1\n"}).items():
        (tmp_path / name).write_text(text)
    mistakes = {
        name: Mistake(name, "f", "+ 1", "+ 2", "test_a.py", "") for name in (*wrong, "none.py", "there.py")
    }
    assert mistakes.pop("there.py").text(tmp_path) == "def f(a):\n    return a + 2\n"
    for mistake in mistakes.values():
        with pytest.raises(ValueError, match="write the mistake anew"):
            mistake.text(tmp_path)


def test_a_strong_test_kills_a_planted_mutant_a_weak_one_does_not_and_a_hang_is_ended(tmp_path):
    """In a process of its own, which has loaded nothing of the package."""
    source = (PACKAGE / "errors.py").read_text()
    (tmp_path / "conftest.py").write_text(
        "def pytest_addoption(parser):\n    parser.addoption('--fast', action='store_true')\n"
    )
    (tmp_path / "test_weak.py").write_text(
        "import ablate.errors\ndef test_weak():\n    ablate.errors.planted(1)\n"
    )
    (tmp_path / "test_strong.py").write_text(
        "import subprocess, sys, ablate.errors\n"
        "def test_strong():\n    assert ablate.errors.planted(1) == 2\n"
        "def test_of_a_command():\n"
        "    program = 'import ablate.errors as e; print(e.planted(1))'\n"
        "    assert subprocess.check_output([sys.executable, '-c', program]).strip() == b'2'\n"
    )
    right, wrong, hang = (
        source + f"\n\ndef planted(a):\n    {body}\n"
        for body in ("return a + 1", "return a - 1", "while a: pass")
    )
    program = f"""
import json, sys
sys.path.insert(0, {str(ROOT / "tests")!r})
from mutants import processes
processes.WARM = ("pytest",)
processes.CPU_SECONDS = 2
path = {str(PACKAGE / "errors.py")!r}
jobs = [
    processes.Job(({str(tmp_path)!r} + "/" + test,), 0.0, path, text, whole=True)
    for test, text in {[("test_weak.py", wrong), ("test_strong.py", right), ("test_strong.py", wrong), ("test_weak.py", hang)]!r}
]
processes.warm()
print(json.dumps({{number: [ran.ended, len(ran.failed)] for number, ran in processes.run_all(jobs, 2)}}))
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == {
        "0": ["passed", 0],
        "1": ["passed", 0],
        "2": ["failed", 2],
        "3": ["time-out", 0],
    }
    assert (PACKAGE / "errors.py").read_text() == source


@pytest.mark.parametrize("words", [("run.py", "--help"), ("compare.py",)])
def test_the_commands_start(words):
    command = [sys.executable, str(ROOT / "tests" / "mutants" / words[0]), *words[1:]]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert "BEFORE" in done.stdout + done.stderr or "--seed" in done.stdout
