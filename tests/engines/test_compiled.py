"""torch.compile around the quantised products: one graph, the eager path's losses, and no compilation when the recipe changes."""

import shutil

import pytest
import torch

from ablate.engines import compiled
from ablate.experiment.arms import KnobError, StartingPoint
from ablate.recipes import PRESETS, Recipe
from ablate.training.loop import Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.gpt import Gpt

CONFIG = Gpt(
    layers=1,
    width=32,
    heads=2,
    context=32,
    batch=2,
    steps=6,
    warmup=0,
    eval_every=3,
    eval_tokens=64,
    eval_batch=2,
)
needs_compiler = pytest.mark.skipif(
    not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler here"
)


def records(recipe: Recipe, compile: bool) -> list[dict[str, float]]:
    config = CONFIG.model_copy(update={"compile": compile})
    return [
        record.metrics
        for record in config.records(
            TrialRun(recipe, 0, "emulated", "cpu", Telemetry(every=2, shadow=4, log=1))
        )
    ]


@needs_compiler
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, by inductor itself
@pytest.mark.usefixtures("inductor")
def test_a_compiled_trial_has_the_eager_losses_and_compiles_nothing_when_the_recipe_changes():
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    recipe = PRESETS["healing"]()  # NVFP4, finished in FP8; the shadow steps and the evaluation run in bf16
    mine, eager = records(recipe, compile=True), records(recipe, compile=False)
    assert [sorted(metrics) for metrics in mine] == [sorted(metrics) for metrics in eager]
    for a, b in zip(mine, eager, strict=True):
        # Fused norms round less often: bf16 activations differ by an ulp here and there, and a code of FP4 with them.
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=2e-3)
        assert a.get("val/loss", 0) == pytest.approx(b.get("val/loss", 0), rel=2e-3)
    counters = torch._dynamo.utils.counters
    assert not counters["graph_break"]
    assert counters["stats"]["unique_graphs"] == 2  # one to train, one to evaluate


def test_without_a_compiler_it_is_told(monkeypatch):
    monkeypatch.setattr(compiled.shutil, "which", lambda name: None)
    with pytest.raises(
        RuntimeError, match=r"compile: true needs a C\+\+ compiler on the worker: install g\+\+"
    ):
        records(PRESETS["nvfp4"](), compile=True)


@pytest.mark.parametrize(("name", "what"), [("quartet", "slope"), ("nvfp4", None), ("tetrajet2", "copy")])
def test_a_recipe_whose_backward_pass_needs_more_is_told(name, what):
    needed = PRESETS[name]().products.backward_needs
    assert (needed is None) == (what is None)
    assert what is None or what in needed
    base = StartingPoint("gpt", CONFIG.model_dump(mode="json"), name)
    if what is None:
        assert base.arm({"workload.compile": True}).config.compile
    else:
        with pytest.raises(KnobError, match=what):
            base.arm({"workload.compile": True})


def test_an_eager_trial_is_the_same_trial_as_before_there_was_a_choice():
    assert CONFIG.identity()["compile"] is False
    assert CONFIG.model_copy(update={"compile": True}).identity()["compile"] is True
