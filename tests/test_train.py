"""The training loop on a tiny gpt: reproducible, paired across recipes, undisturbed by watching, and honest about divergence."""

import math

import pytest
import torch
from torch.nn.modules.module import register_module_forward_pre_hook

from ablate.data import open_corpus
from ablate.data.batches import training_batch
from ablate.engines.emulated import DTYPES, convert
from ablate.hyperparameters import Training
from ablate.numerics.philox import Clock
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.recipe import Phase
from ablate.train import Record, Telemetry, evaluate
from ablate.train import train as loop
from ablate.transformer import Transformer, initialise
from ablate.workloads.gpt import Gpt

NVFP4 = PRESETS["nvfp4"]()
OFTEN = Telemetry(every=1, log=1)
SELDOM = Telemetry(every=1_000_000, log=1)
PLACES = ("throughput/", "memory/")


def gpt(shards, **fields) -> Gpt:
    tiny = {
        "layers": 2,
        "width": 32,
        "heads": 2,
        "context": 16,
        "batch": 2,
        "steps": 5,
        "eval_tokens": 64,
        "eval_every": 2,
        "lr": 1e-2,
    }
    return Gpt(data=shards, **(tiny | fields))


def train(workload: Gpt, recipe: Recipe = NVFP4, seed: int = 0, telemetry: Telemetry = SELDOM) -> list[Record]:
    return list(workload.records(recipe, seed, "emulated", "cpu", telemetry))


def converted(workload: Gpt, recipe: Recipe, clock: Clock):
    """A model as the workload builds it, and its engine."""
    with torch.device("meta"):
        model = Transformer(workload, 64, DTYPES[recipe.dtype])
    return model, convert(initialise(model, clock.seed, torch.device("cpu")), recipe, clock)


def looped(workload: Gpt, recipe: Recipe, batch, clock: Clock | None = None) -> list[Record]:
    """The bare loop over batches of one's own; validation on one of them."""
    model, engine = converted(workload, recipe, clock or Clock(0))
    validation = [training_batch(open_corpus(workload.data), 1, 0, 0, 2, 16)]
    return list(loop(model, engine, batch, validation, workload, workload.tokens_per_step, SELDOM))


def facts(records: list[Record]) -> str:
    """What the numbers say: everything but speed and memory, as text, so that nan equals nan."""
    return repr([(step, {k: v for k, v in sorted(m.items()) if not k.startswith(PLACES)}) for step, m in records])


def column(records: list[Record], name: str) -> dict[int, float]:
    return {step: metrics[name] for step, metrics in records if name in metrics}


def losses(records: list[Record]) -> dict[int, float]:
    return column(records, "train/loss")


@pytest.mark.parametrize("preset", PRESETS)
def test_the_same_spec_gives_the_same_records(preset, shards):
    workload = gpt(shards)
    first = train(workload, PRESETS[preset](), telemetry=OFTEN)
    assert facts(train(workload, PRESETS[preset](), telemetry=OFTEN)) == facts(first)
    assert [record.step for record in first] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("preset", PRESETS)
def test_another_seed_gives_other_losses(preset, shards):
    assert losses(train(gpt(shards), PRESETS[preset](), 1)) != losses(train(gpt(shards), PRESETS[preset](), 2))


def test_training_neither_reads_nor_advances_the_global_generator(shards):
    torch.random.default_generator.manual_seed(1)
    before = torch.random.get_rng_state()
    first = train(gpt(shards))
    assert torch.equal(torch.random.get_rng_state(), before)
    torch.random.default_generator.manual_seed(2)
    assert facts(train(gpt(shards))) == facts(first)


@pytest.mark.parametrize("preset", PRESETS)
def test_telemetry_changes_no_bit_of_the_training(preset, shards):
    loud, silent = (train(gpt(shards), PRESETS[preset](), telemetry=t) for t in (OFTEN, SELDOM))
    for name in ("train/loss", "grad/norm", "val/loss", "val/loss_bf16", "nan/activation"):
        assert column(loud, name) == column(silent, name)


def test_telemetry_measures_every_slot_of_every_layer(shards):
    metrics = train(gpt(shards, steps=1), telemetry=OFTEN)[0].metrics
    layers = [f"blocks.{block}.{part}" for block in (0, 1) for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")]
    for slot in ("fprop.x", "fprop.w"):
        assert all(0 < metrics[f"quant/{slot}/{layer}/rel_mse"] < 0.05 for layer in layers)
        assert metrics[f"quant/{slot}/rel_mse"] == pytest.approx(sum(metrics[f"quant/{slot}/{layer}/rel_mse"] for layer in layers) / 8)


def test_logging_seldom_averages_the_losses_in_between(shards):
    each, all_at_once = (losses(train(gpt(shards, eval_every=100), telemetry=Telemetry(every=10**6, log=n))) for n in (1, 100))
    assert set(all_at_once) == {1, 5}  # the first step is measured, and the last
    assert all_at_once[5] == pytest.approx(math.fsum(each[step] for step in (2, 3, 4, 5)) / 4, rel=1e-12)


def test_evaluation_changes_nothing(shards):
    often, seldom = (train(gpt(shards, eval_every=every)) for every in (1, 1000))
    assert losses(often) == losses(seldom)
    assert column(often, "grad/norm") == column(seldom, "grad/norm")
    assert column(often, "val/loss")[5] == column(seldom, "val/loss")[5]
    assert set(column(often, "val/loss")) == {1, 2, 3, 4, 5}
    assert set(column(seldom, "val/loss")) == {5}


def test_initial_weights_depend_on_the_seed_alone(shards):
    def weights(recipe, seed):
        return converted(gpt(shards), recipe, Clock(seed))[0].state_dict()

    first = weights(NVFP4, 3)
    for preset in PRESETS:
        other = weights(PRESETS[preset](), 3)
        assert [*other] == [*first]
        assert all(torch.equal(other[name], first[name]) for name in first)
    assert not torch.equal(weights(NVFP4, 4)["embedding.weight"], first["embedding.weight"])


@pytest.mark.parametrize("preset", PRESETS)
def test_every_recipe_sees_the_same_tokens_in_the_same_order(preset, shards):
    seen = []
    hook = register_module_forward_pre_hook(lambda module, args: seen.append(args[0]) if isinstance(module, Transformer) else None)
    with hook:
        train(gpt(shards, steps=3, accumulate=2, eval_every=1000), PRESETS[preset](), seed=6)
    corpus = open_corpus(shards)
    expected = [training_batch(corpus, 6, step, micro_batch, 2, 16)[0] for step in range(3) for micro_batch in range(2)]
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=False))
    assert len(seen) >= len(expected)  # and then the validation batches


@pytest.mark.parametrize("preset", PRESETS)
def test_the_first_loss_is_log_vocab_and_training_lowers_it(preset, shards):
    result = losses(train(gpt(shards, steps=6), PRESETS[preset]()))
    assert result[1] == pytest.approx(math.log(64), abs=1e-5)  # the head starts at zero; log-softmax in fp32
    assert result[6] < result[1] - 0.05


@pytest.mark.parametrize("preset", PRESETS)
def test_a_diverging_run_ends_with_the_step_where_it_did(preset, shards):
    records = train(gpt(shards, lr=1e38, warmup=0.0, clip=None), PRESETS[preset]())
    first = records[-1].metrics["nan/first_step"]
    assert first == records[-1].step < 5
    assert not any("nan/first_step" in record.metrics for record in records[:-1])
    assert records[-1].metrics["nan/loss"] + records[-1].metrics["nan/grad"] >= 1
    assert "val/loss" not in records[-1].metrics


def test_a_non_finite_operand_is_counted_in_the_record(shards):
    records = train(gpt(shards, lr=1e38, warmup=0.0, clip=None))
    assert records[0].metrics["nan/activation"] == 0
    assert records[-1].metrics["nan/activation"] > 0


@pytest.mark.parametrize(("preset", "tolerance"), [("fp32", 1e-5), ("bf16", 5e-3)])
def test_two_micro_batches_of_one_are_about_one_batch_of_two(preset, tolerance, shards):
    # The same two windows a step either way. Only the order of additions differs: in fp32, or after rounding dw to bf16.
    corpus = open_corpus(shards)

    def whole(step, micro_batch):
        return training_batch(corpus, 0, step, 0, 2, 16)

    def half(step, micro_batch):
        return tuple(t[micro_batch : micro_batch + 1] for t in whole(step, 0))

    once = looped(gpt(shards, batch=2), PRESETS[preset](), whole)
    twice = looped(gpt(shards, batch=1, accumulate=2), PRESETS[preset](), half)
    assert losses(once) == pytest.approx(losses(twice), abs=tolerance)
    assert losses(once) != losses(twice)


def test_the_clock_of_a_training_draw_is_its_step_and_micro_batch(shards):
    corpus, clock, seen = open_corpus(shards), Clock(0), []

    def batch(step, micro_batch):
        seen.append((clock.stream, clock.step, clock.micro_batch))
        return training_batch(corpus, 0, step, micro_batch, 2, 16)

    looped(gpt(shards, steps=3, accumulate=2, eval_every=1), NVFP4, batch, clock)
    assert seen == [("training", step, micro_batch) for step in range(3) for micro_batch in range(2)]


def test_a_schedule_changes_the_losses_from_its_step_on_and_not_before(shards):
    switched = NVFP4.model_copy(update={"schedule": (Phase(start="step:3", slots="all"),)})
    plain, cooled = losses(train(gpt(shards))), losses(train(gpt(shards), switched))
    assert [plain[step] == cooled[step] for step in range(1, 6)] == [True, True, True, False, False]


def test_validation_reports_the_loss_in_force_and_the_loss_in_bf16(shards):
    nvfp4, bf16 = train(gpt(shards)), train(gpt(shards), PRESETS["bf16"]())
    assert column(bf16, "val/loss") == column(bf16, "val/loss_bf16")
    assert column(nvfp4, "val/loss") != column(nvfp4, "val/loss_bf16")
    gaps = [abs(column(nvfp4, "val/loss")[step] - column(nvfp4, "val/loss_bf16")[step]) for step in (2, 4, 5)]
    assert max(gaps) < 0.05


def test_evaluation_leaves_no_gradient_and_no_other_weights(shards):
    corpus, (model, engine) = open_corpus(shards), converted(gpt(shards), NVFP4, Clock(0))
    engine.at(0, 1)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    evaluate(model, engine, NVFP4, [training_batch(corpus, 0, 0, 0, 2, 16)])
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tokens_and_throughput_are_counted(shards):
    records = train(gpt(shards, accumulate=2))
    assert column(records, "tokens") == {step: 64.0 * step for step in range(1, 6)}
    assert all(value > 0 for name in ("throughput/step_ms", "throughput/tokens_per_s") for value in column(records, name).values())


# --- the learning rate -----------------------------------------------------------------------------------------------------


def test_wsd_rises_stays_and_falls():
    rates = [Training(steps=10, lr=1.0, warmup=0.2, decay_fraction=0.3).lr_at(step) for step in range(10)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0])


def test_cosine_is_half_way_down_in_the_middle_and_ends_at_its_final_rate():
    config = Training(steps=10, lr=2.0, warmup=0.0, decay="cosine", final_lr=0.1)
    assert config.lr_at(4) == pytest.approx(2 * 0.55)
    assert config.lr_at(9) == pytest.approx(0.2)


@pytest.mark.parametrize("decay", ["wsd", "cosine", "none"])
@pytest.mark.parametrize("steps", [1, 2, 7, 300])
@pytest.mark.parametrize("warmup", [0.0, 0.05, 1.0])
@pytest.mark.parametrize("fraction", [0.2, 1.0])
def test_the_rate_never_leaves_zero_to_its_peak(decay, steps, warmup, fraction):
    config = Training(steps=steps, lr=0.5, decay=decay, warmup=warmup, decay_fraction=fraction)
    assert all(0 <= config.lr_at(step) <= 0.5 * (1 + 1e-12) for step in range(steps))


def test_wsd_without_a_fall_stays_at_its_peak():
    config = Training(steps=4, lr=0.5, warmup=0.0, decay_fraction=0.0)
    assert [config.lr_at(step) for step in range(4)] == [0.5] * 4
