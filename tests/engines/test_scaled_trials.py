"""Trials by the engine `scaled_mm`: in FP8, which torch multiplies on a CPU, they run here as on a GPU."""

import itertools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from support.cases import every, sampled
from support.commands import here
from support.experiments import shards, write
from support.ranks import in_ranks

from ablate.engines.scaled_mm import ScaledExpert, ScaledLinear
from ablate.execution.trial_runner import run
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS, Recipe
from ablate.reports.tensor_cores import OF_EXPERTS
from ablate.store.trial_store import Store
from ablate.training import distributed
from ablate.training.fork_design import Forks
from ablate.training.loop import Telemetry, Twin
from ablate.training.rank_layout import Layout
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.gpt import Gpt

SIZE = {
    "layers": 2,
    "width": 32,
    "heads": 2,
    "context": 16,
    "batch": 2,
    "steps": 8,
    "eval_tokens": 64,
    "eval_every": 4,
    "eval_batch": 2,
    "lr": 3e-3,
}
EXPERTS = {"experts": {"count": 4}}
FORKS = Forks(trunk=PRESETS["bf16"](), positions=(3, 5), windows=(2,))
OFTEN = {"log": 1, "every": 100, "shadow": 100, "checkpoint": 0}
CLOCKS = ("throughput/", "memory/", "comm/")


def config(folder: Path, **fields: Any) -> Gpt:
    return Gpt(**({"data": shards(folder)} | SIZE | fields))


def records(
    gpt: Gpt, engine: str = "scaled_mm", recipe: Recipe | None = None, **telemetry: int
) -> list[dict]:
    """Metrics of each record, without those of clocks and allocators."""
    often = Telemetry(**({"every": 4, "shadow": 4, "log": 1} | telemetry))
    told = gpt.records(TrialRun(recipe or PRESETS["fp8_current"](), 0, engine, "cpu", often))
    return [{k: v for k, v in one.metrics.items() if not k.startswith(CLOCKS)} for one in told]


@pytest.mark.slow
@every(fields=({}, EXPERTS))
def test_a_trial_has_the_emulators_metrics_and_losses(fields, tmp_path):
    """Telemetry of operands included: they are the same, as long as the weights are."""
    gpt = config(tmp_path, evaluate=["nvfp4"], **fields)
    mine, its = records(gpt), records(gpt, "emulated")
    assert [sorted(one) for one in mine] == [sorted(one) for one in its]
    for a, b in zip(mine, its, strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=2e-3)
    measured = next(one for one in mine if any(name.startswith("quant/") for name in one))
    assert len([name for name in measured if name.startswith("quant/")]) > 50
    assert mine[-1]["val/loss@nvfp4"] == pytest.approx(its[-1]["val/loss@nvfp4"], rel=2e-3)


def test_the_layers_of_a_trial_are_the_engines(tmp_path):
    for fields, kinds in (({}, {ScaledLinear}), (EXPERTS, {ScaledLinear, ScaledExpert})):
        prepared = config(tmp_path, **fields).prepare(PRESETS["fp8_current"](), 0, "cpu", "scaled_mm")
        assert {type(layer) for layer in prepared.engine.layers.values()} == kinds


def test_a_cpu_refuses_a_trial_in_fp4(tmp_path):
    with pytest.raises(ValueError, match="engine scaled_mm: torch multiplies NVFP4 on GPUs alone"):
        config(tmp_path).prepare(PRESETS["nvfp4"](), 0, "cpu", "scaled_mm")


def test_activations_that_are_recomputed_give_the_same_losses(tmp_path):
    assert records(config(tmp_path, recompute=True)) == records(config(tmp_path))


def spec(folder: Path, **fields: Any) -> TrialSpec:
    fields = {"config": config(folder), "engine": "scaled_mm"} | fields
    return TrialSpec(workload="gpt", recipe=PRESETS["fp8_delayed"](), seed=0, device="cpu", **fields)


def own(events: Any) -> list[str]:
    """Return the contents of events without the fields in which any two runs differ."""
    return [
        json.dumps([event["step"], {k: v for k, v in event["metrics"].items() if not k.startswith(CLOCKS)}])
        for event in events
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fields", "forks"), sampled(itertools.product([{}, EXPERTS], [None, FORKS]), 2, seed=0)
)
def test_a_trial_that_is_ended_half_way_goes_on_as_if_undisturbed(fields, forks, tmp_path):
    """Amax histories and the states of a trunk included."""
    trial = spec(tmp_path, forks=forks, config=config(tmp_path, **fields))
    alone = own(run(trial, Store(tmp_path / "alone"), 1, OFTEN))
    store = Store(tmp_path / "runs")
    for _ in range(trial.steps + 1):
        events = run(trial, store, store.begin(trial.id), OFTEN, [])
        fresh = (event for event in events if "again" not in event)
        if next(fresh, None) is None:
            break
        next(fresh, None)
        events.close()
    assert own(run(trial, store, store.begin(trial.id), OFTEN, [])) == alone


def test_engines_and_back_ends_have_ids_of_their_own(tmp_path):
    names = ("emulated", "transformer_engine", "scaled_mm", "scaled_mm:cudnn", "scaled_mm:cutlass")
    trials = [spec(tmp_path, engine=name) for name in names]
    assert len({trial.id for trial in trials}) == len({trial.history(3) for trial in trials}) == len(names)
    assert TrialSpec.parse(trials[-1].wire) == trials[-1]


def test_a_twin_draws_other_bits_as_the_emulators_does():
    for engine in ("emulated", "scaled_mm", "scaled_mm:cudnn"):
        assert Twin.of(PRESETS["nvfp4"](), engine).stream
    assert not Twin.of(PRESETS["nvfp4"](), "transformer_engine").stream


def on_ranks(gpt: Gpt, sharded: bool) -> list[float]:
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    world = distributed.become(distributed.World(Layout(ranks, sharded and ranks > 1), rank, "cpu"))
    world.begun = True
    return [one["train/loss"] for one in records(gpt)]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("shape", "sharded"),
    sampled(
        itertools.product([{"batch": 1, "accumulate": 4}, {"batch": 4, "accumulate": 1}], [False, True]),
        2,
        seed=0,
    ),
)
def test_two_ranks_train_as_one(shape, sharded, tmp_path):
    """With micro-batches of their own, and with the sequences of one, whose amaxes they share."""
    gpt = config(tmp_path, **shape)
    wanted = on_ranks(gpt, False)
    everybody = in_ranks(2, lambda: on_ranks(gpt, sharded))
    assert everybody[0] == pytest.approx(wanted, rel=2e-4)


@pytest.mark.skipif(not any(map(shutil.which, ("g++", "clang++"))), reason="there is no C++ compiler here")
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch.jit, by the backend itself
def test_a_compiled_trial_has_the_eager_losses(tmp_path):
    """By inductor's front end, which compares each operator's result with the announced shape and strides.

    test_compiled.py compiles C++.
    """
    torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    eager = records(config(tmp_path, layers=1, steps=4))
    with torch.compiler.set_stance("default", force_backend="aot_eager_decomp_partition_crossref"):
        mine = records(config(tmp_path, layers=1, steps=4, compile=True))
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2  # one to train, one to evaluate
    for a, b in zip(mine, eager, strict=True):
        assert a["train/loss"] == pytest.approx(b["train/loss"], rel=1e-6)


def test_the_plan_names_products_on_tensor_cores_and_why_others_are_not(tmp_path):
    """In words and as data, for arms that differ in it; an arm in bf16 has nothing to say."""
    ablate = {"recipe": ["bf16", "fp8_current", "ue5m3"]}
    file = write(tmp_path, recipe="fp8_current", ablate=ablate, against="bf16", engine="scaled_mm")
    plain, data = here("plan", file, "--device", "cpu"), here("plan", file, "--device", "cpu", "--json")
    assert plain.returncode == data.returncode == 0, plain.stderr + data.stderr
    assert "fprop FP8, dgrad FP8, wgrad FP8" in plain.stdout
    assert (
        "emulated: fprop.x, fprop.w, dgrad.g, dgrad.w, wgrad.g, wgrad.x: scale.format ue5m3" in plain.stdout
    )
    products = {one["arm"]: one["parts"] for one in json.loads(data.stdout)["products"]}
    runs = {
        arm: [{name: one["runs"] for name, one in part.items()} for part in parts]
        for arm, parts in products.items()
    }
    assert sorted(str(one) for one in runs.values()) == sorted(
        str([dict.fromkeys(("fprop", "dgrad", "wgrad"), word)]) for word in ("bf16", "native", "emulated")
    )
    assert OF_EXPERTS not in plain.stdout
    mixed = write(tmp_path, "mixed", EXPERTS, recipe="fp8_current", engine="scaled_mm")
    assert here("plan", mixed, "--device", "cpu").stdout.count(OF_EXPERTS) == 1
    emulated = write(
        tmp_path, "other", recipe="fp8_current", ablate=ablate, against="bf16", engine="emulated"
    )
    assert json.loads(here("plan", emulated, "--json").stdout)["products"] == []
