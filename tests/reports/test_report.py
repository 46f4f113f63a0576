"""A report is one file that needs no network, the same twice, whole or not there; what cannot be reported is one sentence."""

import csv
import json
import os
import re
import shutil
import time
from contextlib import closing

import nbformat
import numpy as np
import pytest
from PIL import Image
from support.commands import here
from support.experiments import sweep, tiny, write

from ablate.cli.report import make
from ablate.errors import InputError
from ablate.files import Holder, lock
from ablate.reports.answer import Answer
from ablate.reports.notebooks import NotebookError
from ablate.reports.report_files import NOTEBOOKS, analysis, is_current
from ablate.store.checked_ledger import open_ledger
from ablate.store.ledger import Ledger
from ablate.store.trial_store import Store

pytestmark = pytest.mark.slow

SEARCH = {
    "ablate": {"workload.lr": {"uniform": [1e-4, 1e-2]}, "rht": [True, False]},
    "search": {"sampler": "random", "trials": 3},
}
TENSORS = {
    "workload": {"tensors": {"tokens": 32, "inputs": 32, "outputs": 32, "draws": 4}},
    "metric": [{"name": "gemm/wgrad/rel_mse"}, {"name": "quant/wgrad.g/zero_frac"}],
}


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    """A grid, a search, a sweep of tensors, and one with a single seed, all run."""
    folder = tmp_path_factory.mktemp("report")
    for name, keys in (
        ("grid", {"metric": {"min_effect": 0.01}, "shape": {"eval_every": 1}, "telemetry": {"every": 1}}),
        ("search", SEARCH),
        ("tensors", TENSORS),
        ("alone", {"seeds": 1}),
    ):
        sweep(tiny(folder, name, **keys), folder / "runs")
    picture = Image.fromarray(np.arange(48, dtype=np.uint8).reshape(4, 4, 3))
    for trial in (folder / "runs" / "trials").iterdir():  # as a workload that draws would have left it
        (trial / "artifacts").mkdir(exist_ok=True)
        picture.save(trial / "artifacts" / "drawn.png")
    return folder / "runs"


@pytest.fixture(scope="module")
def made(state):
    return make(state, "grid")


def text_of(path) -> str:
    return path.read_text(encoding="utf-8")


def test_a_page_names_no_address_outside(made):
    """Names of XML vocabularies are no links, and nothing loads them."""
    for page in made.pages:
        html = re.sub(r'xmlns(:\w+)?="http://www\.w3\.org/[^"]*"', "", text_of(page))
        assert not re.search(r"https?://|src=(?!\"data:)|@import|url\((?!#)", html)
        assert not re.search(r"<link|<iframe", html)


def test_the_first_thing_is_the_answer(made):
    html = text_of(made.index)
    places = [
        html.index(word)
        for word in (
            "<h1>Does it matter?</h1>",
            '<p class="verdict ',
            'class="chips"',
            'id="table-comparisons"',
            "<svg",
            'id="how-the-gap-developed"',
            'id="table-effects-val-loss"',
            'id="method"',
        )
    ]
    assert places == sorted(places)
    assert html.index('id="method"') < html.index('id="where-it-comes-from"')
    assert '<details class="code">' in html


def test_ids_are_unique_in_a_page(made):
    for page in made.pages:
        ids = re.findall(r'\bid="([^"]+)"', text_of(page))
        assert len(ids) == len(set(ids))


def test_it_is_the_same_twice_apart_from_its_date(state, made):
    def contents():
        dated = r"Report of \d{4}-\d\d-\d\d \d\d:\d\d"
        files = [path for path in made.folder.rglob("*") if path.suffix in (".html", ".md", ".svg", ".csv")]
        return {path.name: re.sub(dated, "", text_of(path)) for path in files}

    before = contents()
    make(state, "grid")
    assert contents() == before
    assert len(before) > 20
    assert is_current(state, "grid")
    about = json.loads(text_of(made.folder / "index.json"))
    assert about["question"] == "Does it matter?"
    with closing(open_ledger(state, "grid")) as book:
        assert about["answer"] == Answer(book).verdict()
    assert about["answer"] in text_of(made.folder / "index.md").replace("**", "")
    assert f"*{about['about']}*" in text_of(made.folder / "index.md")
    (made.folder / "index.json").rename(made.folder / "aside.json")
    assert not is_current(state, "grid")
    (made.folder / "aside.json").rename(made.folder / "index.json")


def test_pictures_tables_and_markdown_lie_beside(made):
    figures = {path.name for path in (made.folder / "figures").iterdir()}
    for stem in (
        "gap_curve-val-loss",
        "slot_errors",
    ):
        assert {f"{stem}.svg", f"{stem}.csv"} <= figures
    assert {"effects-val-loss.csv", "comparisons.csv", "runs.csv", "provenance.csv"} <= figures
    assert not {"power.csv", "checks.csv"} & figures  # two seeds: the tables would say nothing
    markdown = text_of(made.folder / "index.md")
    assert markdown.startswith("# Does it matter?")
    linked = re.findall(r"!\[[^\]]*\]\(([^)]+)\)", markdown)
    assert linked
    assert all((made.folder / path).exists() for path in linked)


def test_what_the_runs_left_is_in_the_page_arm_by_arm(made):
    html = text_of(made.index)
    assert html.index("How the gap developed</h2>") < html.index("Sample outputs</h2>")
    arms = re.findall(r'<figcaption>(.*?)</figcaption><img alt="\1" src="data:image/png;base64,', html)
    assert arms == ["bf16", "rht=true", "rht=false"]
    assert "\nBeside the published figures\n" not in text_of(
        made.folder / "index.md"
    )  # a section with nothing in it
    assert "## Sample outputs\n\n| bf16 | rht=true | rht=false |" in text_of(made.folder / "index.md")
    assert len(list((made.folder / "figures").glob("drawn-?-*.png"))) == 3


def test_what_a_library_warns_of_is_not_in_the_page_that_is_sent(state, tmp_path):
    """tqdm.auto, which Optuna imports, warns where ipywidgets are missing; a warning names a file of this machine."""
    code = "import sys, warnings\nimport tqdm.auto\nwarnings.warn('look here')\nprint('said')"
    noisy = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(code)])
    nbformat.write(noisy, tmp_path / "noisy.ipynb")
    made = make(state, "alone", [str(tmp_path / "noisy")], pdf=False)
    for text in (text_of(made.index), text_of(made.folder / "index.md")):
        assert "said" in text
        assert "look here</pre>" not in text
        assert "Warning: " not in text


def test_in_markdown_the_experiments_file_is_fenced(made):
    """A comment of the file is no heading."""
    inside = text_of(made.folder / "index.md").split("## The experiment's file")[1].strip().splitlines()
    assert (inside[0], inside[-1]) == ("```yaml", "```")


@pytest.mark.parametrize(
    ("name", "first", "shows"), [("search", "index", "history"), ("tensors", "index", "errors")]
)
def test_each_kind_of_question_has_its_notebook(state, name, first, shows):
    found = make(state, name)
    assert any(path.name.startswith(shows) for path in (found.folder / "figures").glob("*.svg"))
    assert (found.folder / f"{first}.html").exists()


def test_one_seed_claims_nothing(state):
    html = text_of(make(state, "alone", ["ablation"]).index)
    assert "One seed per arm:" in html
    assert "no difference has an interval" in html


def test_what_is_half_done_is_reported_and_marked(state, tmp_path):
    shutil.copytree(state / "sweeps" / "grid", tmp_path / "sweeps" / "grid")
    ledger = Ledger(tmp_path / "sweeps" / "grid" / "ledger.db")
    for trial, status in ((2, "pending"), (4, "diverged")):
        ledger.settle(trial, status)
    ledger.close()
    html = text_of(make(tmp_path, "grid", ["ablation"]).index)
    assert "<b>Incomplete:</b> 1 of 6 runs are missing (1 pending)" in html
    assert "1 of them not finished" in html
    assert "<b>Diverged:</b>" in html


@pytest.fixture
def copied(state, tmp_path):
    """The grid in a state folder of its own, with its ledger, which is open for changes."""
    shutil.copytree(state / "sweeps" / "grid", tmp_path / "sweeps" / "grid")
    shutil.copytree(state / "trials", tmp_path / "trials")
    with closing(Ledger(tmp_path / "sweeps" / "grid" / "ledger.db")) as ledger:
        yield tmp_path, ledger


def test_a_running_sweep_gives_counts_and_times_and_no_advice(copied):
    state, ledger = copied
    ledger.start_attempt(4, 2, time.time())
    ledger.settle(5, "pending")
    ledger.describe(left=json.dumps([time.time(), 86400.0]))
    path = state / "sweeps" / "grid" / "lock"
    with lock(path):
        html = text_of(make(state, "grid", ["ablation"]).index)  # as a sweep does at its end
        assert "<b>Incomplete:</b> 2 of 6 runs are missing" in html
        path.write_text(Holder(1, os.uname().nodename).content)
        html = text_of(make(state, "grid", ["ablation"]).index)
    tomorrow = time.strftime("%Y-%m-%d", time.localtime(time.time() + 86400))
    assert '<p class="verdict running"><b>Running.</b> 4 of 6 runs are over.' in html
    assert f"the last at about {tomorrow}" in html
    assert not any(word in html for word in ("--seeds", "Incomplete:", 'class="better"', 'class="worse"'))


def test_failed_runs_are_listed_once_for_each_reason(copied):
    state, ledger = copied
    frame = '  File "/home/me/train.py", line {0}, in f\n    step({0})\n'
    log = f"Traceback (most recent call last):\n{frame}ValueError: of seed {{1}}\n"
    for member in ledger.members():
        line = 5 if member.name == "bf16" else 6
        ledger.settle(member.trial, "failed", f"ValueError: of seed {member.seed} (/home/me/train.py:{line})")
        Store(state).log(member.id, 1).write_text(log.format(line, member.seed))
    made = make(state, "grid", ["ablation"])
    html = text_of(made.index)
    assert '<p class="verdict none"><b>Failed:</b> all 6 runs failed.' in html
    assert "shares two finished seeds" not in html
    rows = list(csv.reader((made.folder / "figures" / "failures.csv").read_text().splitlines()))
    assert [(row[0], row[2]) for row in rows[1:]] == [
        ("4", "`step(6)` (train.py:6)"),
        ("2", "`step(5)` (train.py:5)"),
    ]
    links = re.findall(r'<a href="([^"]+)">log-1.txt</a>', html.partition("</table>")[0])
    assert len(links) == 2
    assert all((made.folder / link).exists() for link in links)


def test_a_notebook_that_stops_leaves_the_report_that_was_there_and_says_where(state, made, tmp_path):
    before = text_of(made.index)
    broken = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell("1 / 0")])
    nbformat.write(broken, tmp_path / "broken.ipynb")
    with pytest.raises(
        NotebookError, match="notebook broken stopped in cell 1: ZeroDivisionError: division by zero"
    ):
        make(state, "grid", [str(tmp_path / "broken")])
    assert text_of(made.index) == before
    assert not list(made.folder.parent.glob(".grid-*"))


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("gird",), "gird: no such sweep in "),
        (("experiments/gird.yaml",), "gird: no such sweep in "),
        ((), "no experiment given; name a YAML file or one of: alone, grid, search, tensors"),
        (
            ("grid", "--notebook", "ablatoin"),
            "--notebook ablatoin: no such notebook; 'ablation' is the nearest of ",
        ),
    ],
    ids=["name", "file", "nothing", "notebook"],
)
def test_a_wrong_name_is_told_with_the_nearest(state, words, said):
    done = here("report", *words, "--state", state)
    assert done.returncode == 2
    assert done.stderr.startswith(said)
    assert len(done.stderr.splitlines()) == 1


def test_a_damaged_ledger_is_refused(state, tmp_path):
    folder = tmp_path / "sweeps" / "grid"
    shutil.copytree(state / "sweeps" / "grid", folder)
    (folder / "ledger.db").write_bytes(b"no database at all" * 1000)
    with pytest.raises(InputError, match="damaged"):
        make(tmp_path, "grid")


@pytest.mark.slow
def test_a_sweep_ends_by_making_its_report(tmp_path):
    path = write(tmp_path, workload={"idle": {"steps": 4}}, seeds=1)
    words = ("sweep", path, "--state", tmp_path / "runs", "--executor", "inline", "--mlflow", "none")
    done = here(*words, ABLATE_REPORT="true")
    assert done.returncode == 0, done.stderr
    index = tmp_path / "runs" / "reports" / "tiny" / "index.html"
    assert f"Report: {index}\n" in done.stdout  # and no command for MLflow, to which nothing was sent
    assert index.exists()
    written = index.stat().st_mtime_ns
    again = here(*words, ABLATE_REPORT="true")
    assert str(index) in again.stdout
    assert index.stat().st_mtime_ns == written  # nothing was run: it shows all there is


@pytest.mark.parametrize("name", NOTEBOOKS)
def test_a_notebook_is_stored_without_outputs_and_says_what_it_takes(name):
    notebook = nbformat.read(analysis() / f"{name}.ipynb", as_version=4)
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert all(not cell.outputs and cell.execution_count is None for cell in cells)
    assert cells[0].metadata["tags"] == ["parameters"]


@pytest.mark.slow
def test_the_walkthrough_runs_without_any_sweep(tmp_path):
    found = make(tmp_path, "numerics_walkthrough", ["numerics_walkthrough"])
    html = text_of(found.index)
    assert "Stochastic rounding" in html
    rows = {
        line.split(",")[0]: line
        for line in (found.folder / "figures" / "products.csv").read_text().splitlines()
    }
    decibels = {name: float(rows[name].split(",")[1]) for name in ("nvfp4", "mxfp4", "fp8_current")}
    assert decibels["mxfp4"] < decibels["nvfp4"] < decibels["fp8_current"]


def test_every_notebook_is_listed():
    assert {path.stem for path in analysis().glob("*.ipynb")} == set(NOTEBOOKS)
    assert json.loads((analysis() / "ablation.ipynb").read_text())["nbformat"] == 4
