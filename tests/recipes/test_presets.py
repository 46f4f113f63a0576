"""Presets: each names its source, has one spelling, trains, and quantises what it says it quantises."""

import json
import math
from collections import defaultdict

import pytest
import torch
from support.cases import every
from support.experiments import SHAPE
from support.gpt_runs import UNMEASURED
from support.linears import Each

from ablate.engines.emulated import convert
from ablate.engines.products import DTYPES
from ablate.experiment.trial_spec import TrialSpec
from ablate.numerics.philox import Clock
from ablate.numerics.spec import Dge, Hadamard
from ablate.recipes import PRESETS, SLOTS, Recipe
from ablate.recipes.recipe import Layers, Run
from ablate.training.data import open_corpus
from ablate.training.data.batches import training_batch
from ablate.training.loop import PreparedRun, train
from ablate.training.models.transformer import Transformer, initialise
from ablate.training.workloads.gpt import Gpt

NVFP4 = PRESETS["nvfp4"]()
BASELINES = ("bf16", "fp32", "mxfp8", "mxfp6_e2m3", "mxfp6_e3m2", "mxfp4")
"""Formats rather than recipes: nothing of theirs is left out."""
ENGINES = (
    *("nvfp4", "nvfp4_dequantised", "nvfp4_1d_weight", "mxfp8_fwd_nvfp4_bwd"),
    *("mxfp8_fwd_high_precision_bwd", "high_precision_fwd_mxfp8_bwd"),
    "nvfp4_row_scaled_fwd_high_precision_bwd",
)
VARIANTS = {
    **dict.fromkeys(ENGINES, "left as Transformer Engine has it"),
    "healing": "`nvfp4` and `fp8_current`, which say it",
}
"""Presets that refuse nothing beyond what all refuse, and why."""
SOURCES = ("arXiv", "Transformer Engine", "OCP", "MLPerf", "`nvfp4`", "`fp8_current`", "baseline", "bf16")


@every(name=PRESETS)
def test_a_preset_names_its_source(name):
    assert any(source in PRESETS[name].__doc__ for source in SOURCES)


@every(name=[name for name in PRESETS if name not in (*BASELINES, *VARIANTS)])
def test_a_preset_says_what_it_refuses_to_model(name):
    assert "Not modelled:" in " ".join(PRESETS[name].__doc__.split())


@every(name=PRESETS)
def test_a_preset_survives_json_and_equals_itself(name):
    recipe = PRESETS[name]()
    assert Recipe.model_validate_json(recipe.model_dump_json()) == recipe
    assert Recipe.model_validate(recipe.model_dump()) == recipe
    assert hash(PRESETS[name]()) == hash(recipe)


def test_presets_differ():
    assert len({PRESETS[name]() for name in PRESETS}) == len(PRESETS)


# --- one recipe, one id ---------------------------------------------------------------------------


def trial(shards, recipe: Recipe) -> str:
    config = Gpt.model_validate(SHAPE | {"data": shards})
    return TrialSpec(workload="gpt", config=config, recipe=recipe, seed=0, engine="emulated", device="cpu").id


@every(name=PRESETS)
def test_what_was_left_out_and_what_was_written_out_are_one_trial(name, shards):
    recipe = PRESETS[name]()
    sparse = Recipe.model_validate_json(recipe.model_dump_json(exclude_defaults=True))
    shuffled = json.loads(recipe.model_dump_json(), object_pairs_hook=lambda pairs: dict(reversed(pairs)))
    for other in (sparse, Recipe.model_validate_json(json.dumps(shuffled))):
        assert other == recipe
        assert trial(shards, other) == trial(shards, recipe)


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (
            {"schedule": [{"start": "fraction:.5"}]},
            {"schedule": [{"start": "fraction:0.50", "slots": "all", "use": None}]},
        ),
        ({"schedule": [{"start": "fraction:1"}]}, {"schedule": [{"start": "fraction:1.00"}]}),
        ({"schedule": [{"start": "step:7"}]}, {"schedule": [{"start": "step:007"}]}),
        ({"schedule": [{"start": "tokens:70"}]}, {"schedule": [{"start": "tokens:070"}]}),
        ({"schedule": [{"start": "noise_ratio:1.5"}]}, {"schedule": [{"start": "noise_ratio:1.50:50"}]}),
        ({"fprop": {"x": {"range": {"headroom": 1}}}}, {"fprop": {"x": {}}}),
        (
            {"fprop": {"x": {"outer": {"statistic": "percentile:.5"}}}},
            {"fprop": {"x": {"outer": {"statistic": "percentile:0.50"}}}},
        ),
        (
            {"fprop": {"x": {"outer": {"statistic": "hold:050"}}}},
            {"fprop": {"x": {"outer": {"statistic": "hold:50"}}}},
        ),
    ],
)
def test_two_spellings_of_one_recipe_are_one_trial(one, other, shards):
    first, second = (Recipe.model_validate_json(json.dumps(written)) for written in (one, other))
    assert first == second
    assert trial(shards, first) == trial(shards, second)


# --- what papers say ------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["bf16", "fp32"])
def test_a_baseline_quantises_nothing(name):
    recipe = PRESETS[name]()
    assert recipe.plain
    assert recipe.dtype == name
    assert all(recipe.slot(slot) is None for slot in SLOTS)


FORWARD, BACKWARD, GRADIENTS = (
    {"fprop.x", "fprop.w"},
    {"dgrad.g", "dgrad.w", "wgrad.g", "wgrad.x"},
    {"dgrad.g", "wgrad.g"},
)
RANDOM = {
    "nvfp4": GRADIENTS,
    "nvfp4_paper": GRADIENTS,
    "fp4_all_the_way": GRADIENTS | {"wgrad.x"},
    "mxfp4_backward": BACKWARD,
    "quartet": BACKWARD,
    "quartet2": BACKWARD,
    "tetrajet2": BACKWARD,
    "four_over_six": GRADIENTS,
    "ufp4": GRADIENTS,
    "ue5m3": GRADIENTS,
    "healing": GRADIENTS,
    "nvfp4_1d_weight": GRADIENTS,
    "mxfp8_fwd_nvfp4_bwd": GRADIENTS,
    "mxfp4_v4": {"dgrad.g"},
    **dict.fromkeys(("averis", "if4", "luq", "nemotron3_super"), GRADIENTS),
}
"""The operands that are rounded at random (MS-EDEN: whose scales are)."""
ROTATED = {
    **{
        key: {"wgrad": (16, "fixed")}
        for key in ("nvfp4", "nvfp4_paper", "healing", "four_over_six", "if4", "nemotron3_super")
    },
    "mxfp4_backward": {"dgrad": (64, "per_call"), "wgrad": (64, "per_call")},
    "quartet": {"fprop": (32, "none"), "dgrad": (32, "per_call"), "wgrad": (32, "per_call")},
    "quartet2": {"dgrad": (128, "per_step"), "wgrad": (128, "per_step")},
    "tetrajet2": {"dgrad": (16, "per_call"), "wgrad": (16, "per_call")},
    "ufp4": {"fprop": (16, "fixed"), "dgrad": (16, "fixed"), "wgrad": (16, "fixed")},
    **{key: {"wgrad": (16, "fixed")} for key in ("nvfp4_1d_weight", "mxfp8_fwd_nvfp4_bwd")},
    **{key: {"wgrad": (32, "fixed")} for key in ("mxfp4_amd", "mxfp4_v4")},
}
AGAIN = {
    **{key: {"dgrad.w", "wgrad.x"} for key in ("quartet", "quartet2", "tetrajet2")},
    **{key: {"dgrad.w"} for key in ("nvfp4_1d_weight", "mxfp8_fwd_nvfp4_bwd")},
    "nvfp4_row_scaled_fwd_mxfp8_bwd": {"dgrad.w", "wgrad.x"},
}
DEQUANTISED = ("nvfp4_dequantised", "mxfp8_fwd_high_precision_bwd", "nvfp4_row_scaled_fwd_high_precision_bwd")
TILED = {
    **{
        key: {"fprop.w", "dgrad.w"}
        for key in (*("nvfp4", "nvfp4_paper", "healing", "ue5m3", "mxfp4_v4", "averis", "nemotron3_super"),)
    },
    "nvfp4_per_token_weight_2d": {"fprop.w", "dgrad.w"},
    "nvfp4_dequantised": {"fprop.w"},
}
QUANTISED = {
    **{"bf16": set(), "fp32": set(), "row_scaled": FORWARD, **dict.fromkeys(DEQUANTISED, FORWARD)},
    **dict.fromkeys(("mxfp4_backward", "high_precision_fwd_mxfp8_bwd"), BACKWARD),
}


@every(name=PRESETS)
def test_a_preset_rounds_rotates_and_requantises_what_its_paper_does(name):
    recipe = PRESETS[name]()
    quants = dict(recipe.quantised())
    assert set(quants) == QUANTISED.get(name, set(SLOTS))
    assert {slot for slot, quant in quants.items() if quant.draws} == RANDOM.get(name, set())
    assert {slot for slot, quant in quants.items() if quant.from_forward} == AGAIN.get(name, set())
    copies = {slot for slot in ("dgrad.w", "wgrad.x") if recipe.dequantised(slot)}
    assert copies == ({"dgrad.w", "wgrad.x"} if name in DEQUANTISED else set())
    assert {slot for slot, quant in quants.items() if quant.tile[0] > 1} == TILED.get(name, set())
    products = {product: getattr(recipe, product).hadamard for product in ("fprop", "dgrad", "wgrad")}
    assert {product: (h.size, h.signs) for product, h in products.items() if h} == ROTATED.get(name, {})


def test_nvfp4_paper_keeps_the_last_15_percent_of_blocks_rounded_up():
    paper = PRESETS["nvfp4_paper"]()
    assert [block for block in range(20) if not paper.layers.quantises(block, 20)] == [17, 18, 19]
    assert paper.model_copy(update={"layers": Layers()}) == NVFP4


def test_nvfp4_rotates_by_transformer_engines_vector():
    assert NVFP4.wgrad.hadamard == Hadamard(size=16, signs="fixed")


def test_four_over_six_keeps_the_last_4_of_24_blocks():
    layers = PRESETS["four_over_six"]().layers
    assert [block for block in range(24) if not layers.quantises(block, 24)] == [20, 21, 22, 23]


def test_fp8_takes_five_exponent_bits_for_gradients_alone():
    for name in ("fp8_current", "fp8_delayed"):
        assert {slot for slot, quant in PRESETS[name]().quantised() if quant.element == "e5m2"} == GRADIENTS


def test_microsofts_slope_is_for_the_weight_alone_and_its_residual_for_x():
    recipe = PRESETS["microsoft_fp4"]()
    assert (recipe.fprop.w.estimator, recipe.fprop.x.estimator) == (Dge(k=5.0, clip=3.0), None)
    assert (recipe.fprop.x.transform.clamp, recipe.fprop.x.transform.residual) == (0.99, True)
    assert recipe.fprop.w.transform is None


def test_healing_ends_in_fp8():
    recipe = PRESETS["healing"]()
    assert [recipe.at(step, Run(20)).products == NVFP4.products for step in (0, 17, 18, 19)] == [
        True,
        True,
        False,
        False,
    ]
    assert recipe.at(18, Run(20)).products == PRESETS["fp8_current"]().products


def test_fp4_all_the_way_waits_for_the_square_root_of_three():
    (trigger,) = PRESETS["fp4_all_the_way"]().triggers
    assert trigger.limit == pytest.approx(math.sqrt(3), abs=1e-7)
    late = PRESETS["fp4_all_the_way"]().at(0, Run(10), {trigger})
    assert {slot for slot, _ in late.quantised()} == FORWARD


# --- training -------------------------------------------------------------------------------------


@every(name=PRESETS)
def test_a_preset_trains_and_its_probe_sees_every_operand_with_its_quantiser(name, shards):
    recipe, seen = PRESETS[name](), defaultdict(set)
    workload = Gpt.model_validate(SHAPE | {"data": shards, "steps": 20, "eval_every": 100, "lr": 1e-2})
    if recipe.layers.last_fraction:
        workload = workload.model_copy(update={"layers": 2})  # of one block none would be left
    with torch.device("meta"):
        model = Transformer(workload, 64, DTYPES[recipe.dtype])
    engine = convert(initialise(model, 0, torch.device("cpu")), recipe, Clock(0))
    corpus = open_corpus(workload.data)
    steps = defaultdict(set)

    class Listening(type(engine)):
        """An engine that always listens as well."""

        def listen(self, probe):
            def both(layer, slot, operand):
                seen[slot].add(operand.quant)
                steps[self.clock.step].add(slot)
                if probe:
                    probe.operand(layer, slot, operand)

            super().listen(Each(both))

    engine.__class__ = Listening

    def batch(step, micro_batch):
        return training_batch(corpus, 0, step, micro_batch, 2, 16)

    records = list(train(PreparedRun(model, engine, batch, [batch(99, 0)]), workload, UNMEASURED))
    losses = [record.metrics["train/loss"] for record in records]
    assert [record.step for record in records] == list(range(1, 21))
    assert all(map(math.isfinite, losses))
    assert sum(losses[-5:]) / 5 < losses[0] - 0.3  # log 64 = 4.16 at first; half of the text is predictable
    assert all(record.metrics["nan/activation"] == 0 for record in records)
    phases = [recipe, *(phase.use for phase in recipe.schedule if phase.use and phase.trigger is None)]
    wanted = {slot: {part.slot(slot) for part in phases} - {None} for slot in SLOTS}
    assert dict(seen) == {slot: quants for slot, quants in wanted.items() if quants}
    assert all(
        steps[step] == {slot for slot, _ in recipe.quantised()} for step in range(18) if not recipe.triggers
    )
