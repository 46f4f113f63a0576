"""Evaluations by other recipes: what they read, and that the training does not notice.

The oracle is a second model: the trained weights in a fresh copy, converted by the reading itself, with its
distributions compared in float64.
"""

import math
import sys

import pytest
import torch
from support.gpt_runs import UNMEASURED, column, facts, gpt, train
from torch.nn import functional as F

import ablate
from ablate.engines import transformer_engine as native
from ablate.engines.emulated import convert
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.selection import replaced
from ablate.errors import InputError
from ablate.experiment.load import load
from ablate.numerics.philox import Clock
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.readings import WEIGHTS_ONLY, reading
from ablate.recipes.recipe import QEma, Run, Weights
from ablate.training.evaluation import by_other_recipes
from ablate.training.metric_names import QUANTITIES


def readable(name: str) -> bool:
    """True if the name is that of a reading."""
    try:
        reading(name)
    except ValueError:
        return False
    return True


READINGS = tuple(filter(readable, sorted([*PRESETS, *(name + WEIGHTS_ONLY for name in PRESETS)])))
LENGTHY = ("fp8_delayed", "ue5m3", "tetrajet2", "quartet", "healing")
"""Presets with amax histories, weight rules, draws in each step, or a schedule."""


def read_afresh(model, name: str, batch, workload) -> torch.Tensor:
    """Log-probabilities of a fresh copy of the model that was converted by the reading, in float64."""
    run = workload.prepare(reading(name) if name != "bf16" else PRESETS["bf16"](), 0, "cpu")
    run.model.load_state_dict(model.state_dict())
    run.engine.at(0, Run(1))
    run.engine.clock.stream, run.engine.clock.step = "evaluation", 3
    with torch.no_grad():
        return run.logits(*batch).double().log_softmax(-1)


def test_an_evaluation_draws_from_a_stream_of_its_own(shards):
    workload = gpt(shards, steps=1, eval_every=1, eval_tokens=32, eval_batch=2)
    run, streams = workload.prepare(PRESETS["nvfp4"](), 0, "cpu"), []

    def loss(*batch: torch.Tensor) -> torch.Tensor:
        streams.append((run.model.training, run.engine.clock.stream))
        return run.model(*batch)

    list(workload.train(run._replace(loss=loss), UNMEASURED))
    assert {stream for training, stream in streams if not training} == {"evaluation"}
    assert "evaluation" not in {stream for training, stream in streams if training}


@pytest.mark.parametrize("name", READINGS)
def test_a_reading_is_that_of_a_fresh_model_with_the_same_weights(name, shards):
    workload = gpt(shards, steps=4, eval_every=4, eval_tokens=32, eval_batch=2, evaluate=[name], width=64)
    run = workload.prepare(PRESETS["nvfp4"](), 0, "cpu")
    metrics = list(workload.train(run, UNMEASURED))[-1].metrics
    (batch,) = run.validation
    targets = batch[1].flatten()
    p, q = (read_afresh(run.model, one, batch, workload) for one in ("bf16", name))
    assert metrics[f"val/loss@{name}"] == pytest.approx(F.nll_loss(q, targets).item(), rel=1e-6)  # fp32 sums
    divergence = F.kl_div(q, p, log_target=True, reduction="batchmean").item()
    assert metrics[f"val/kl@{name}"] == pytest.approx(divergence, rel=2e-4, abs=1e-9)  # differences of fp32
    assert divergence > 0
    ratio = (q - p).gather(1, targets[:, None]).exp()
    assert metrics[f"val/extreme@{name}"] == pytest.approx(
        ((ratio > 2) | (ratio < 0.5)).float().mean().item()
    )


TARGETED = PRESETS["nvfp4"]().model_copy(update={"weights": Weights(q_ema=QEma(start=1, decay=0.5))})
"""Rounds its own weights by an average over steps, which is no part of a reading."""


@pytest.mark.parametrize(
    ("trained", "name"),
    [
        (PRESETS["fp8_delayed"](), "fp8_delayed"),
        (PRESETS["ue5m3"](), "fp8_delayed"),
        (PRESETS["fp8_delayed"](), "ue5m3"),
        (TARGETED, "nvfp4"),
    ],
    ids=["fp8_delayed-fp8_delayed", "ue5m3-fp8_delayed", "fp8_delayed-ue5m3", "q_ema-nvfp4"],
)
def test_a_reading_has_nothing_of_the_trainings_past(trained, name, shards):
    """Amaxes of earlier steps and the weights' targets; the oracle is a fresh model, which has none."""
    workload = gpt(shards, steps=6, eval_every=6, eval_tokens=32, eval_batch=2, evaluate=[name], lr=0.3)
    run = workload.prepare(trained, 0, "cpu")
    metrics = list(workload.train(run, UNMEASURED))[-1].metrics
    (batch,) = run.validation
    q = read_afresh(run.model, name, batch, workload)
    assert metrics[f"val/loss@{name}"] == pytest.approx(F.nll_loss(q, batch[1].flatten()).item(), rel=1e-6)
    if trained is TARGETED:
        assert metrics["val/loss"] != pytest.approx(metrics["val/loss@nvfp4"], rel=1e-6)


def test_extreme_tokens_are_counted(shards):
    """A head of large weights, so that quantisation turns probabilities over."""
    workload = gpt(shards, eval_tokens=32, eval_batch=2, evaluate=["nvfp4"])
    run = workload.prepare(PRESETS["bf16"](), 0, "cpu")
    torch.manual_seed(0)
    with torch.no_grad():
        run.model.head.weight.normal_(std=20)
    run.engine.at(0, Run(1))
    run.engine.clock.stream, run.engine.clock.step = "evaluation", 3

    class Alone:
        """All batches, in order."""

        shares = staticmethod(range)

        @staticmethod
        def in_order(values, count):
            """The values of one rank."""
            return values

    with torch.no_grad():
        found = by_other_recipes(run, Alone())
    (batch,) = run.validation
    p, q = (read_afresh(run.model, one, batch, workload) for one in ("bf16", "nvfp4"))
    away = (q - p).gather(1, batch[1].flatten()[:, None]).abs() > math.log(2)
    assert 0 < away.float().mean() < 1
    assert found["extreme@nvfp4"] == [pytest.approx(away.float().mean().item())]


@pytest.mark.parametrize("preset", LENGTHY)
def test_the_training_does_not_notice_that_others_read(preset, shards):
    """Every metric that both record, to the bit: losses, counts, histories' effects and the evaluation itself."""
    recipe = PRESETS[preset]()
    plain, read = (
        train(gpt(shards, steps=8, evaluate=names), recipe)
        for names in ([], ["nvfp4", "fp8_delayed", "mxfp4" + WEIGHTS_ONLY])
    )
    for record in read:
        extra = [name for name in record.metrics if "@" in name]
        assert len(extra) in (0, 3 * len(QUANTITIES))
        for name in extra:
            del record.metrics[name]
    assert facts(plain) == facts(read)


def test_the_recipe_in_force_reads_what_the_evaluation_does(shards):
    """nvfp4 rounds its forward pass to nearest, so that its own reading is the same number."""
    records = train(gpt(shards, evaluate=["nvfp4"]), PRESETS["nvfp4"]())
    own, other = column(records, "val/loss"), column(records, "val/loss@nvfp4")
    assert other
    assert own == pytest.approx(other, rel=1e-6)  # the mean over tokens by another function of torch


def test_the_engine_of_transformer_engine_emulates_a_reading(monkeypatch):
    """Without its library: a reading by it would raise."""
    monkeypatch.setitem(sys.modules, "transformer_engine", None)

    def model():
        torch.manual_seed(0)
        block = torch.nn.ModuleDict({"up": torch.nn.Linear(64, 32)})
        return torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block])})

    x, clock = torch.randn(32, 64), Clock(0)
    theirs, ours = model(), model()
    replaced(
        theirs,
        ["blocks.0.up"],
        lambda linear, name: native.NativeLinear(linear, name, clock, torch.bfloat16, native.Draws(clock)),
    )
    engines = native.NativeEngine(theirs, PRESETS["nvfp4"](), clock), convert(ours, Recipe(), clock)
    found = []
    for engine, of in zip(engines, (theirs, ours), strict=True):
        engine.at(0, Run(1))
        with torch.no_grad(), engine.reading(reading("mxfp4_weights_only")):
            found.append(of["blocks"][0]["up"](x))
        assert engine.layers["blocks.0.up"].products == (
            PRESETS["nvfp4"]().products if not found[1:] else Recipe().products
        )
    assert torch.equal(*found)
    with torch.no_grad(), pytest.raises(ImportError, match="transformer_engine"):
        theirs["blocks"][0]["up"](x)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("nvpf4", "'nvpf4': neither a preset nor a preset with _weights_only; 'nvfp4' is the nearest"),
        ("high_precision_fwd_mxfp8_bwd", "its forward pass quantises nothing, as bf16 does; leave it out"),
        ("bf16_weights_only", "quantises nothing"),
        ("fp32", "quantises nothing"),
    ],
)
def test_what_is_no_reading_is_refused_where_it_stands(name, words, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        f"schema: 1\nquestion: Does it?\nworkload: {{gpt: {{evaluate: [bf16, {name}]}}}}\nrecipe: nvfp4\nagainst: bf16\narms: {{a: {{}}}}\n"
    )
    with pytest.raises(InputError) as error:
        load(path)
    assert words in str(error.value)
    assert "evaluate" in str(error.value)


@pytest.mark.parametrize(
    ("metric", "refused"),
    [("val/kl@nvfp4", False), ("val/loss@mxfp4", True), ("val/kl", True), ("val/extreme@nvfp4", False)],
)
def test_a_metric_of_a_reading_is_known_if_it_is_read(metric, refused, tmp_path):
    path = tmp_path / "x.yaml"
    path.write_text(
        "schema: 1\nquestion: Does it?\nworkload: {gpt: {evaluate: [nvfp4]}}\nrecipe: nvfp4\nagainst: bf16\n"
        f"arms: {{a: {{}}}}\nmetric: {{name: {metric}}}\n"
    )
    if refused:
        with pytest.raises(InputError, match="no such metric of gpt"):
            load(path)
    else:
        assert load(path).metrics[0].name == metric


def test_the_order_of_readings_and_bf16_change_no_identity(shards):
    one, other = (gpt(shards, evaluate=names) for names in (["nvfp4", "mxfp4"], ["bf16", "mxfp4", "nvfp4"]))
    assert one.identity() == other.identity() != gpt(shards).identity()


def test_a_loop_of_ones_own_reads_by_another_recipe(shards):
    """The oracle is the workload's own evaluation of the same weights; afterwards the recipe's own loss is what it was."""
    workload = gpt(shards, eval_tokens=32, eval_batch=2, steps=2, evaluate=["mxfp4"])
    run = workload.prepare(PRESETS["bf16"](), 0, "cpu")
    metrics = list(workload.train(run, UNMEASURED))[-1].metrics
    fresh = workload.prepare(PRESETS["bf16"](), 0, "cpu").model.to(torch.float32)
    for layer in [module for module in fresh.modules() if isinstance(module, EmulatedLinear)]:
        parent, _, child = layer.name.rpartition(".")
        setattr(fresh.get_submodule(parent), child, layer.plain())
    handle = ablate.convert(fresh, "nvfp4", seed=0)
    fresh.load_state_dict(run.model.state_dict())

    def read(**how) -> float:
        with handle.evaluation(**how), torch.no_grad():
            return fresh(*run.validation[0]).item()

    before = read()
    assert read(by="mxfp4") == pytest.approx(metrics["val/loss@mxfp4"], rel=1e-6)
    assert read(high_precision=True) == metrics["val/loss_bf16"]
    assert read() == before
    with pytest.raises(ValueError, match="leave one of the two out"):
        read(by="mxfp4", high_precision=True)
    with pytest.raises(ValueError, match="'nvfp4' is the nearest"):
        read(by="nvpf4")
