"""docs/project/extending.md: the tests that it names exist, and it names every file in which a sibling appears."""

import re
from functools import cache
from pathlib import Path

from support.cases import every

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "project" / "extending.md").read_text()
GENERATED = {
    "docs/reference/recipes.md",
    "docs/reference/experiment.md",
    "tests/golden_answers.py",
    "tests/golden/sweeps/exports.txt",
}
NAMED = set(re.findall(r"(?<![\w/.-])[\w./-]+\.(?:py|md|toml|txt)\b", PAGE))
"""Files that the page names, from the folder of their row or from the root."""
SIBLINGS = {
    "export target": (
        r"\bbridge\b",
        "ablate/recipes/targets/megatron.py",
    ),
    "preset": (r"\bmicrosoft_fp4\b", "tests/numerics/cuda_kernel_cases.py"),
    "workload": (
        # its class, and lists of workloads that train a model
        r"\bFinetune\b|\bgpt\b.*\bfinetune\b|\bfinetune\b.*\bgpt\b",
        "ablate/training/workloads/finetune.py ablate/training/operand_capture.py benchmarks/expert_families.py"
        " docs/reference/families.md tests/experiment/integrations/test_integrations.py"
        " tests/results/test_headline.py tests/training/test_operand_errors.py",
    ),
    "field of a workload": (
        r"\brope_theta\b",
        "ablate/training/models/shape.py ablate/training/workloads/gpt.py ablate/training/models/transformer.py"
        " benchmarks/expert_families.py",
    ),
    "widths of a model": (r"\bqwen3-14b\b", ""),
    "tracker": (
        r"\btensorboard\b",  # and the reader of others' event files
        "ablate/execution/tracking/tensorboard.py ablate/execution/tracking/event_files.py"
        " ablate/judging/sources.py tests/support/foreign_files.py",
    ),
    "source of runs from elsewhere": (r"\bwandb_folders\b", ""),
    "setting": (
        r"\bnotify\b",
        "ablate/execution/notify.py ablate/cli/sweep.py tests/reports/test_notify.py"
        " tests/judging/test_judged_files.py",
    ),
    "metric of an operand": (r"\bscale_saturated_frac\b", ""),
    "metric of a product": (r"gemm_metric\(name|\"sqnr_db\": \"SQNR", ""),
}
"""For each row a pattern that finds an existing sibling, and the files that are this sibling's own."""


@cache
def files() -> dict[str, str]:
    """Return the contents of the files in which siblings are looked for; generated pages have them without being edited."""
    folders = [
        path for name in ("ablate", "tests", "benchmarks", "docs") for path in (ROOT / name).rglob("*")
    ]
    found = [path for path in (*folders, *ROOT.iterdir()) if path.suffix in (".py", ".md", ".toml", ".txt")]
    texts = {str(path.relative_to(ROOT)): path for path in found if path != Path(__file__)}
    return {name: path.read_text() for name, path in texts.items() if name not in GENERATED}


def named(path: str) -> bool:
    """Return True if the page names a file by its path, or by its name and perhaps folders; of the many
    `__init__.py` with a folder."""
    return any(path == name or (path.endswith(f"/{name}") and (name != "__init__.py")) for name in NAMED)


def test_every_test_that_the_page_names_exists():
    tests = [name for name in NAMED if name.rpartition("/")[2].startswith("test_")]
    assert len(tests) > 30
    places = (ROOT, ROOT / "tests", ROOT / "tests" / "numerics")
    assert [name for name in sorted(tests) if not any((place / name).exists() for place in places)] == []


@every(row=SIBLINGS)
def test_every_file_in_which_a_sibling_appears_is_named(row):
    pattern, own = re.compile(SIBLINGS[row][0]), SIBLINGS[row][1].split()
    found = [name for name, text in files().items() if pattern.search(text)]
    assert found
    assert set(own) <= set(found)
    assert [path for path in found if path not in own and not named(path)] == []
