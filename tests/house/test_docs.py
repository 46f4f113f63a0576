"""Tests of the documents: what they say is what the code does."""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from pkgutil import resolve_name
from runpy import run_path

import pytest
from lint_weight import GENERATED, GENERATED_END, words
from support.cases import every
from support.experiments import environment, problems

from ablate.cli.answer_view import MOST_LINES
from ablate.experiment.load import load
from ablate.experiment.schema import json_schema
from ablate.recipes.cells import fp4_share

ROOT = Path(__file__).parents[2]
HEADING = run_path(str(ROOT / "docs" / "generate_tensor_cores.py"))["HEADING"]
EXPERIMENTS = sorted((ROOT / "experiments").rglob("*.yaml"))
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").rglob("*.md"))]
UPSTREAM = ROOT / "docs" / "project" / "upstream.md"
"""Page for the authors of other libraries, most of which is commands."""


@pytest.mark.parametrize("script", ["docs/generate_reference.py", "benchmarks/conformance.py"])
def test_generated_pages_are_current(script):
    """The page of recipes has its own test."""
    done = subprocess.run([sys.executable, str(ROOT / script), "--check"], check=False)
    assert done.returncode == 0, "run `make pages`"


def test_every_fault_of_another_library_has_its_version_a_short_reproduction_and_a_citation():
    page, cited = UPSTREAM.read_text(), (ROOT / "benchmarks" / "conformance.py").read_text()
    rows = re.findall(
        r"^\| \[[\w -]+ \d+\.\d+[^\]]*\]\(#([\w-]+)\) \| .+ \| .+ \| .+ \|$", page, re.MULTILINE
    )
    found = re.findall(r'^## ([^\n]*)\n```sh\npython -c "\n(.*?)"\n```$', page, re.DOTALL | re.MULTILINE)
    assert len(rows) > 8
    assert rows == [heading.lower().replace(",", "").replace(" ", "-") for heading, _ in found]
    assert page.count("## ") == page.count("```") / 2 == page.count("\n| [") == len(rows)
    for fault, (_, command) in zip(rows, found, strict=True):
        assert len(command.splitlines()) <= 5, fault
        assert max(map(len, command.splitlines())) <= 110, fault
        assert "ablate" not in command, fault
        compile(command, fault, "exec")
        assert f"upstream.md#{fault})" in cited


@pytest.mark.parametrize(("page", "most"), [("README.md", 90), ("docs/project/architecture.md", 140)])
def test_a_page_is_short(page, most):
    assert len((ROOT / page).read_text().splitlines()) <= most


def test_the_pages_have_at_most_20_000_words_written_by_hand_and_15_000_generated():
    assert {HEADING} == {*GENERATED_END.values()}
    hand, generated = words(ROOT)
    assert 10_000 < hand <= 20_000
    assert 5_000 < generated <= 15_000
    assert len((ROOT / "experiments" / "LOG.md").read_text().split()) <= 6_000


def test_the_glossary_has_at_most_40_terms():
    page = (ROOT / "docs" / "reference" / "glossary.md").read_text()
    assert 20 < page.count("\n- **") <= 40


def test_prose_has_lines_of_at_most_110_columns():
    """Tables, code blocks, pictures and generated pages may be wider."""
    written = [page for page in PAGES if page.name not in GENERATED]
    assert [
        (page.name, line)
        for page in [*written, ROOT / "CHANGELOG.md", ROOT / "experiments" / "LOG.md"]
        for line in re.sub(
            r"^ *```.*?^ *```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE
        ).splitlines()
        if len(line) > 110 and not line.startswith(("|", "!["))
    ] == []


def test_every_relative_link_leads_somewhere():
    links = [
        (page.name, target)
        for page in PAGES
        for target in re.findall(r"\]\((?!https?:|#)([^)#\s]+)", page.read_text())
        if not (page.parent / target).exists()
    ]
    assert links == []


def anchors(page: Path) -> set[str]:
    """Return the anchors of a page's headings as GitHub makes them; AssertionError if two headings share one."""
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.DOTALL | re.MULTILINE)
    names = [
        re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-")
        for heading in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    ]
    assert len({*names}) == len(names), page
    return {*names}


def test_every_link_to_a_heading_leads_to_one():
    links = [
        (page, (page.parent / target).resolve() if target else page, anchor)
        for page in PAGES
        for target, anchor in re.findall(r"\]\((?!https?:)([^)#\s]*)#([^)\s]+)\)", page.read_text())
    ]
    assert [
        (page.name, target.name, anchor) for page, target, anchor in links if anchor not in anchors(target)
    ] == []


PATH = r"(?<![\w/.-])(?:(?:ablate|tests|docs|benchmarks|analysis|experiments|docker)/)[\w./-]*\w"


def test_every_path_in_a_page_exists():
    """A file of Python may be named without its folder; then one of that name exists."""
    made = {"docker/.env", "experiments/NAME.yaml", "ablate/recipe"}  # the last is a key of JSON
    others = {
        "reference_nvfp4.py",
        "precision.py",
        "mine_rounding.py",
        "mine_train.py",
    }  # Transformer Engine's; readers' own
    names = others | {
        path.name
        for folder in ("ablate", "tests", "benchmarks", "docker", "docs")
        for path in (ROOT / folder).rglob("*.py")
    }
    missing = [
        (page.name, path)
        for page in PAGES
        for path in sorted({*re.findall(PATH, page.read_text())} - made)
        if not (ROOT / path).exists()
    ]
    missing += [
        (page.name, name)
        for page in PAGES
        for name in re.findall(r"(?<![\w/.<>*-])\w+\.py\b", page.read_text())
        if name not in names
    ]
    assert missing == []


def test_every_dotted_name_of_the_package_in_a_page_can_be_imported():
    """`ablate.bench`, and `ablate.store.records.frame`, are names; `ablate.toml` is a file."""
    names = {
        name
        for page in PAGES
        for name in re.findall(r"\bablate(?:\.[a-z_]+)+\b", page.read_text())
        if name not in ("ablate.toml", "ablate.sbatch", "ablate.workloads", "ablate.conformance")  # groups
        and not re.match("ablate.recipe.layers", name)  # a key of an experiment, in an error's text
    }
    wrong = []
    for name in sorted(names):
        try:
            resolve_name(name)
        except (ImportError, AttributeError) as error:
            wrong.append((name, str(error)))
    assert wrong == []


def python_blocks() -> list[tuple[str, str]]:
    """Return the Python blocks of each page, joined: a later one may use an earlier one's names."""
    blocks = {
        page.name: "\n".join(re.findall(r"^```python\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE))
        for page in PAGES
    }
    return [(name, block) for name, block in blocks.items() if block]


RUN = """
import json, os, sys
for page, block in json.load(sys.stdin):
    os.makedirs(page)
    os.chdir(page)
    exec(compile(block, page, "exec"), {"__name__": "__main__"})
    os.chdir("..")
    print(page)
"""


@pytest.mark.slow
def test_the_python_of_every_page_runs(tmp_path):
    """In one process for all, whose imports take longer than they: with names and a folder of its own for each page."""
    pages = python_blocks()
    assert len(pages) >= 3
    done = subprocess.run(
        [sys.executable, "-c", RUN],
        input=json.dumps(pages),
        cwd=tmp_path,
        env=environment() | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert {page for page, _ in pages} <= {*done.stdout.splitlines()}


def test_the_reference_explains_every_key():
    page = (ROOT / "docs" / "reference" / "experiment.md").read_text()
    assert re.findall(r"^\| (`\w+`).*\|  \|$", page, re.MULTILINE) == []


@every(page=PAGES)
def test_every_whole_experiment_in_a_page_loads(page, tmp_path):
    for example in (ROOT / "docs" / "examples").glob("*.py"):  # which experiments name
        shutil.copy(example, tmp_path)
    blocks = re.findall(r"^```yaml\n(.*?)^```", page.read_text(), re.DOTALL | re.MULTILINE)
    for number, block in enumerate(
        block for block in blocks if re.search("^schema: 1$", block, re.MULTILINE)
    ):
        path = tmp_path / f"x{number}.yaml"
        path.write_text(block)
        assert (
            problems(path) == [] or page.name == "layers.md"
        )  # which has a wrong one on purpose, tested below


def test_the_readmes_answer_is_of_the_shipped_experiment_and_as_wide_as_a_terminal():
    """A number in the text that the answer above it does not have would be of another run."""
    readme = (ROOT / "README.md").read_text()
    block, text = re.search(r"Then:\n\n```\n(.*?)```\n\n(What it means: .*?)\n\n", readme, re.DOTALL).groups()
    lines = block.splitlines()
    assert len(lines) <= MOST_LINES
    assert max(map(len, lines)) <= 80
    file = ROOT / "experiments" / "rht_sr.yaml"
    experiment = load(file)
    runs = len(experiment.arms) * len(experiment.seeds)
    assert [f"{runs} of {runs} runs finished" in block, f"\n{runs} trials run in " in block] == [True, True]
    asked = experiment.keys.answer
    assert f"\n{asked.knob}: true instead of false, with rht {json.dumps(asked.given['rht'])} " in block
    assert " ".join(experiment.keys.question.split())[6:] in " ".join(readme.split())
    assert re.findall(r"\d*\.\d{3,}", text) == []
    full = ROOT / "experiments" / "rht_sr_full.yaml"
    assert f"ablate sweep {full.relative_to(ROOT)} --seeds" in readme


def test_the_published_schema_is_todays():
    published = json.loads((ROOT / "experiments" / "schema.json").read_text())
    assert published == json.loads(json.dumps(json_schema())), "run `make schema`"


@every(path=EXPERIMENTS)
def test_an_experiment_says_what_it_costs_and_a_page_and_the_log_list_it(path):
    assert any("minutes on 2 CPU cores" in line for line in path.read_text().splitlines()[:3])
    assert f"`{path.stem}`" in (ROOT / "docs" / "learn" / "experiments.md").read_text()
    assert f"`{path.stem}`" in (ROOT / "experiments" / "LOG.md").read_text()


@pytest.mark.parametrize(("name", "count", "kept"), [("keep_in_bf16", 7, True), ("experts_only", 4, False)])
def test_arms_are_named_by_the_share_of_the_flops_in_bf16_or_in_fp4(name, count, kept):
    experiment = load(ROOT / "experiments" / f"{name}.yaml")
    shares = {
        arm.name: abs(kept - fp4_share(arm.recipe, arm.config.linear_layers))
        for arm in experiment.arms
        if not arm.outside
    }
    assert len(shares) == count
    assert [
        name for name, share in shares.items() if not name.endswith(f" ({share:.0%})".replace("%", " %"))
    ] == []


def test_every_package_and_leaf_stands_in_the_picture_of_the_architecture():
    picture = (ROOT / "docs" / "project" / "architecture.md").read_text()
    names = [path.name for path in (ROOT / "ablate").iterdir() if not path.name.startswith("__")]
    assert [name for name in names if name not in picture] == []


def test_the_page_on_layer_rules_says_what_loading_its_experiments_does(tmp_path):
    page = (ROOT / "docs" / "reference" / "layers.md").read_text()
    right, wrong = re.findall(r"^```yaml\n(.*?)^```", page, re.DOTALL | re.MULTILINE)
    path = tmp_path / "x.yaml"
    path.write_text(right)
    arms = {arm.name: arm for arm in load(path).arms}
    kept = {
        name: sum(
            p.products is None for p in arm.recipe.placements(arm.config.linear_layers) for _ in p.layers
        )
        for name, arm in arms.items()
    }
    kept.pop("bf16", None)
    assert kept == {
        "all quantised": 0,
        "last two blocks": 8,
        "attention of the last two blocks": 4,
        "every mlp output": 4,
    }
    path.write_text(wrong)
    (problem,) = problems(path)
    assert str(problem).removeprefix(f"{path}:").startswith("7:7: ablate.recipe.layers.rules.1: ")
