"""Promises of every workload. A new one joins by a small instance in support/workloads.py, and inherits all of it."""

import math
import random
import shutil
import subprocess
import sys
from fnmatch import fnmatchcase
from functools import cache

import numpy as np
import pytest
import torch
from support.cases import covering, sampled
from support.workloads import SMALL

from ablate.errors import InputError
from ablate.experiment.schema import Resources
from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS
from ablate.recipes.layers import select
from ablate.recipes.recipe import OsciReset, QEma, QRamping, Recipe, Weights
from ablate.training.checkpoints import Checkpoints
from ablate.training.fork_design import Forks
from ablate.training.hyperparameters import FINAL
from ablate.training.loop import Record, Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads import WORKLOADS, context_free, recorded

TRAINED = ["gpt", "finetune"]
FORKS = Forks(trunk=None, positions=(0,), windows=(2,), anneal=False)
OFTEN = Telemetry(every=3, shadow=4, log=1)
OWN = ("throughput/", "memory/")
"""Metrics in which any two runs differ."""
MORE = (
    "quant/*",
    "gemm/*",
    "weights/*",
    "grad/*",
    "guard/*",
    "memory/*",
    "throughput/product_bits",
    "train/loss",
    "nan/loss",
    "nan/grad",
    "throughput/arithmetic",
    "nan/first_step",
    "nan/steps_skipped",
    "tokens",
)
"""Families that a record may have beside METRICS."""
OSCILLATION = {
    "osci_reset": Weights(osci_reset=OsciReset(start=0.0, period=3, window=2, threshold=1.0)),
    "q_ema": Weights(q_ema=QEma(start=2)),
    "q_ramping": Weights(q_ramping=QRamping(period=4, window=3)),
}
"""Rules that remember something from step to step."""
REMEMBERING = (*OSCILLATION, "fp8_delayed")


def recipe_of(name: str) -> Recipe:
    return (
        PRESETS["nvfp4"]().model_copy(update={"weights": OSCILLATION[name]})
        if name in OSCILLATION
        else PRESETS[name]()
    )


def run(
    workload,
    recipe: Recipe,
    seed: int = 0,
    telemetry: Telemetry = OFTEN,
    checkpoints: Checkpoints | None = None,
):
    return workload.records(TrialRun(recipe, seed, "emulated", "cpu", telemetry, checkpoints))


def told(records: list[Record]) -> str:
    """Return the numbers, but for speed and memory, as text, so that nan equals nan."""
    return repr(
        [
            (r.step, {key: value for key, value in sorted(r.metrics.items()) if not key.startswith(OWN)})
            for r in records
        ]
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("data")


def after(name: str) -> int:
    """Return the step after which a workload is interrupted."""
    return {"gpt": 4}.get(name, 2)


@pytest.fixture(scope="module")
def uninterrupted(folder):
    """Records of seed 0 of a workload under a recipe, by both names: several promises compare them with another run.

    One that can be resumed leaves its checkpoint of `after` steps in the folder, by both names.
    """

    @cache
    def records(name: str, recipe: str) -> list[Record]:
        path = folder / "running.pt"
        checkpoints = Checkpoints(path, "trial", 0) if WORKLOADS[name].resumes else None
        found = []
        for record in run(SMALL[name](folder), recipe_of(recipe), checkpoints=checkpoints):
            found.append(record)
            if checkpoints and len(found) == after(name) + 1:  # left before this step was taken
                shutil.copy(path, folder / f"{name} {recipe}.pt")
        path.unlink(missing_ok=True)
        return found

    return records


@pytest.fixture(scope="module")
def unmeasured(folder):
    """Records of seed 0 of a workload under NVFP4 without measurements, by its name."""
    silent = Telemetry(every=0, shadow=0, log=1)
    return cache(lambda name: list(run(SMALL[name](folder), PRESETS["nvfp4"](), telemetry=silent)))


@pytest.fixture(params=WORKLOADS)
def name(request) -> str:
    return request.param


@pytest.fixture
def workload(name, folder):
    return SMALL[name](folder)


def test_every_workload_is_here():
    assert set(SMALL) == set(WORKLOADS)


def test_a_recorded_workload_that_is_gone_is_told_in_one_sentence():
    """A state folder of an earlier version may have one."""
    for name, said in (("mae", "ablate init NAME --images"), ("other", "not a workload of this version")):
        with pytest.raises(InputError, match=said) as error:
            recorded(name, {})
        assert "\n" not in str(error.value)


# --- its description ------------------------------------------------------------------------------


def test_the_default_and_the_small_instance_have_no_problems(name, workload):
    assert list(workload.problems()) == []
    has_default = not any(field.is_required() for field in WORKLOADS[name].model_fields.values())
    if has_default and not WORKLOADS[name].own_code:  # nobody's code is the default
        assert list(WORKLOADS[name]().problems()) == []


def test_planning_any_loads_no_heavy_library(folder):
    """In one process for all: what one imports, it imports for all that come after it. A model of transformers is
    built once, by whoever asks first for its layers; from then on they are in the cache."""
    code = "import sys; from ablate.training.workloads import WORKLOADS, unit; from ablate.experiment.trial_spec import TrialSpec\n"
    code += "from ablate.recipes import PRESETS\n"
    for name, small in SMALL.items():
        assert small(folder).linear_layers is not None
        code += (
            f"config = WORKLOADS[{name!r}].model_validate_json({small(folder).model_dump_json()!r})\n"
            "list(config.problems()), config.cost(True), config.blocks, config.linear_layers, config.tokens_per_step\n"
            "config.recorded('val/loss')\n"
            f"spec = TrialSpec(workload={name!r}, config=config, recipe=PRESETS['nvfp4'](), seed=0, engine='emulated', device='cpu')\n"
            "spec.id, spec.wire, unit(spec.workload, 'val/loss')\n"
            f"print({name!r}, [name for name in ('torch', 'transformers', 'ray', 'mlflow', 'optuna') if name in sys.modules])\n"
        )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.splitlines() == [f"{name} []" for name in SMALL]


def test_it_survives_what_crosses_the_wire(name, workload):
    spec = TrialSpec(
        workload=name, config=workload, recipe=PRESETS["nvfp4"](), seed=3, engine="emulated", device="cpu"
    )
    back = TrialSpec.parse(spec.wire)
    assert (back, back.id, back.config) == (spec, spec.id, workload)


def test_its_identity_is_its_own_and_its_lengths(name, workload):
    assert SMALL[name]
    assert workload.identity() == workload.model_copy().identity()
    counted = "draws" if "draws" in type(workload).model_fields else "steps"
    assert workload.model_copy(update={counted: 7}).identity() != workload.identity()
    assert workload.fingerprint() == workload.model_copy().fingerprint()


def test_what_a_policy_counts_is_what_it_names(workload):
    assert (workload.blocks == 0) == (workload.linear_layers == ())
    assert len(set(workload.linears)) == len(workload.linears)
    assert workload.tokens_per_step >= 1


def test_its_layers_are_known_before_the_model_is_built(name, workload):
    """Names, order, blocks and classes: what planning selects from is what an engine finds."""
    if name not in TRAINED:
        assert workload.linear_layers == ()
    else:
        assert workload.prepare(PRESETS["nvfp4"](), 0, "cpu").engine.placed == workload.linear_layers


def test_quantised_it_costs_no_less(workload):
    assert 0 < workload.cost(False) <= workload.cost(True)


def test_its_facts_are_finite_numbers(workload):
    assert all(isinstance(value, float) and math.isfinite(value) for value in workload.summary().values())
    assert (context_free({"facts": workload.summary()}) is not None) == workload.context_free


# --- what it declares that it can do --------------------------------------------------------------


def test_only_of_own_code_are_files_and_metrics_unknown(workload):
    files = list(workload.files())
    assert bool(files) == workload.own_code == (workload.METRICS is None)
    assert all(path.is_file() for path in files)


def test_it_is_divided_among_ranks_if_it_has_settings_of_training(name, workload):
    settings = workload.training
    assert (settings is workload) == (name in TRAINED) == (settings is not None)
    divided = workload.model_copy(update={"accumulate": 2} if settings else {})
    why = Resources(ranks=2).misfit(divided, PRESETS["nvfp4"](), "emulated")
    assert (why is None) == (settings is not None)


def test_telemetry_sets_how_often_it_measures_operands_if_it_is_declared(
    name, workload, uninterrupted, unmeasured
):
    measured = [
        sum(any(metric.startswith("quant/") for metric in record.metrics) for record in records)
        for records in (uninterrupted(name, "nvfp4"), unmeasured(name))
    ]
    assert (measured[0] > measured[1]) == workload.measures


@pytest.mark.parametrize("varied", [{"forks": FORKS}, {"twin": True}], ids=["forks", "twins"])
def test_it_runs_what_it_declares_and_refuses_the_rest(varied, name, workload, uninterrupted):
    trial = TrialRun(PRESETS["nvfp4"](), 0, "emulated", "cpu", OFTEN, **varied)
    if not {"forks": workload.forks, "twin": workload.twins}[next(iter(varied))]:
        with pytest.raises(ValueError, match=f"workload {name} has no "):
            workload.records(trial)
        return
    records = list(workload.records(trial))
    last = records[-1]
    assert (
        (last.step == FORKS.steps)
        == ("forks" in varied)
        == any(metric.startswith("fork/") for metric in last.metrics)
    )
    losses = [[one.metrics.get("train/loss"), one.metrics.get("val/loss")] for one in records]
    plain = [
        [one.metrics.get("train/loss"), one.metrics.get("val/loss")] for one in uninterrupted(name, "nvfp4")
    ]
    assert losses != plain  # the last ones alone may be equal after a few steps


def test_a_model_is_prepared_by_what_has_settings_of_training(name, workload):
    if workload.training is None:
        with pytest.raises(ValueError, match=f"workload {name} trains no model of this package"):
            workload.prepare(PRESETS["bf16"](), 0, "cpu")


@pytest.mark.parametrize("name", [name for name, kind in WORKLOADS.items() if not kind.resumes])
def test_what_is_not_resumed_begins_anew_and_gives_the_same_records(name, folder, tmp_path, uninterrupted):
    first, again = (Checkpoints(tmp_path / "c.pt", "trial", 0) for _ in range(2))
    workload, recipe = SMALL[name](folder), PRESETS["nvfp4"]()
    begun = run(workload, recipe, checkpoints=first)
    next(begun)
    begun.close()
    assert told(list(run(workload, recipe, checkpoints=again))) == told(uninterrupted(name, "nvfp4"))
    assert again.resumed is None


# --- its records ----------------------------------------------------------------------------------


OTHERS = [
    (preset, workload)
    for first, workload in enumerate(WORKLOADS)
    for number, preset in enumerate(PRESETS)
    if workload != "gpt" and (number + first) % 3 == 0
]
"""Each preset in a third of the workloads other than gpt: what may fail is a preset's or a workload's."""
UNLIKE = covering({name: make() for name, make in PRESETS.items()})
"""Presets that differ most, which gpt trains and continues."""
IN_TURN = [*((preset, "gpt") for preset in UNLIKE), *sampled(OTHERS, 0, seed=0)]


@pytest.mark.parametrize(("preset", "name"), IN_TURN, indirect=["name"])
def test_every_preset_gives_finite_records_and_they_are_those_that_it_announces(
    preset, name, workload, uninterrupted
):
    recipe = PRESETS[preset]()
    if list(getattr(workload, "contradictions", lambda recipe: ())(recipe)):
        pytest.skip("refused")
    layers = getattr(workload, "linear_layers", ())
    if any(not select(rule.match, layers).layers for rule in recipe.layers.rules):
        pytest.skip("a rule of its selects no layer of this model, which is refused")
    first = uninterrupted(name, preset)
    steps = [record.step for record in first]
    assert steps == sorted(set(steps))
    assert all(math.isfinite(value) for record in first for value in record.metrics.values())
    recorded = {metric for record in first for metric in record.metrics}
    strays = {
        metric
        for metric in recorded - (workload.METRICS or recorded)
        if not any(fnmatchcase(metric, family) for family in MORE)
    }
    assert strays == set()
    last = set(first[-1].metrics)
    assert "val/loss" in last or name == "tensors"
    for metric in (workload.METRICS or {"train/loss"}) & recorded:
        promised = workload.recorded(metric)
        assert set(promised) <= {record.step for record in first if metric in record.metrics}
    if name != "command":  # which counts no FLOPs
        assert last >= FINAL & (workload.METRICS or {"flops/fp4_share"})


def test_the_same_spec_gives_the_same_records(name, workload, uninterrupted):
    """A recipe that draws; NVFP4 is run again below, whatever the state of global generators is."""
    assert told(list(run(workload, PRESETS["quartet2"]()))) == told(uninterrupted(name, "quartet2"))


@pytest.mark.parametrize("trained", TRAINED)
def test_what_trains_records_all_that_it_can_be_compared_by_in_its_last_record(
    trained, folder, uninterrupted
):
    workload = SMALL[trained](folder)
    last = uninterrupted(trained, "nvfp4")[-1].metrics
    assert workload.METRICS - {"val/bits_per_byte"} <= set(last)  # where the data say how long a token is


def test_it_stops_where_it_is_told_to_and_neither_reads_nor_advances_a_global_generator(
    name, workload, uninterrupted
):
    expected = uninterrupted(name, "nvfp4")
    torch.random.default_generator.manual_seed(1)
    np.random.seed(1)
    random.seed(1)
    before = torch.random.get_rng_state(), np.random.get_state()[1].tolist(), random.getstate()
    left = run(workload, PRESETS["nvfp4"]())
    first = next(left)
    left.close()
    assert next(left, None) is None
    assert told([first]) == told(expected[:1])
    assert told(list(run(workload, PRESETS["nvfp4"]()))) == told(expected)
    assert torch.equal(torch.random.get_rng_state(), before[0])
    assert (np.random.get_state()[1].tolist(), random.getstate()) == before[1:]


def test_another_seed_gives_other_numbers(name, workload, uninterrupted):
    assert told(list(run(workload, PRESETS["nvfp4"](), seed=1))) != told(uninterrupted(name, "nvfp4"))


def test_telemetry_changes_nothing_that_arms_are_compared_by(name, uninterrupted, unmeasured):
    loud, silent = uninterrupted(name, "nvfp4")[-1], unmeasured(name)[-1]
    for metric in ("val/loss", "train/recent_loss", "grad/norm", "gemm/wgrad/rel_mse"):
        assert loud.metrics.get(metric) == silent.metrics.get(metric)


# --- what trains goes on from where it was --------------------------------------------------------


RESUMED = [(name, recipe) for name, kind in WORKLOADS.items() if kind.resumes for recipe in REMEMBERING]
RESUMED += [("gpt", recipe) for recipe in UNLIKE if recipe not in REMEMBERING]
"""Pairs of workload and recipe that are resumed: what is remembered is a recipe's, so one workload goes through all recipes."""


@pytest.mark.parametrize(("trained", "recipe"), RESUMED)
def test_a_resumed_trial_is_the_uninterrupted_one_bit_for_bit(trained, recipe, folder, uninterrupted):
    whole, at = uninterrupted(trained, recipe), after(trained)
    again = Checkpoints(folder / f"{trained} {recipe}.pt", "trial", 0)
    rest = list(run(SMALL[trained](folder), recipe_of(recipe), checkpoints=again))
    assert again.resumed == at
    assert told(rest) == told(whole[at:])
