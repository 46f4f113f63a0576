"""The notebooks run, and hold no outputs."""

from pathlib import Path

import matplotlib
import nbformat
import pytest

from ablate.controller import Controller
from ablate.experiment import load
from ablate.workers import Inline

NOTEBOOKS = sorted((Path(__file__).parents[1] / "analysis").glob("*.ipynb"))
EXPERIMENT = """
schema: 1
question: Does the notebook run?
workload: {gpt: {layers: 1, width: 32, heads: 2, context: 16, batch: 2, steps: 4, eval_every: 2, eval_tokens: 64}}
ablate: {sr: [true, false]}
seeds: 2
metric: {min_effect: 0.01}
"""


@pytest.fixture(scope="module")
def state(tmp_path_factory):
    folder = tmp_path_factory.mktemp("analysis")
    file = folder / "small.yaml"
    file.write_text(EXPERIMENT)
    for _ in Controller(load(file), folder / "runs", "cpu", Inline, mlflow=None).run():
        pass
    return folder / "runs"


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_runs_from_top_to_bottom(path, state):
    matplotlib.use("agg")
    notebook = nbformat.read(path, as_version=4)
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    space = {}
    for source in code:
        exec(source, space)
        if "state" in space:
            space |= {"state": state, "sweep": "small"}
    assert matplotlib.pyplot.get_fignums(), "a report without a picture"
    matplotlib.pyplot.close("all")


@pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)
def test_a_notebook_is_stored_without_outputs(path):
    notebook = nbformat.read(path, as_version=4)
    assert all(not cell.outputs and cell.execution_count is None for cell in notebook.cells if cell.cell_type == "code")
