"""The training loop on a tiny gpt: paired across recipes, undisturbed by watching, and honest about divergence."""

import copy
import itertools
import math
from functools import cache

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from support.cases import dealt, every
from support.gpt_runs import NVFP4, UNMEASURED, column, converted, facts, gpt, losses, train
from torch.nn.modules.module import register_module_forward_pre_hook

from ablate.numerics.philox import Clock
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.cells import fp4_share
from ablate.recipes.recipe import OsciReset, Phase, QEma, QRamping, Run, Weights
from ablate.training.data import open_corpus
from ablate.training.data.batches import training_batch
from ablate.training.distributed import RankPart, world
from ablate.training.hyperparameters import Training
from ablate.training.loop import Meter, PreparedRun, Record, Telemetry, evaluate
from ablate.training.loop import train as loop
from ablate.training.models.transformer import Transformer
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.gpt import Gpt

OFTEN = Telemetry(every=2, shadow=2, log=1)
"""Measured steps with an unmeasured one after each, whose bits a measurement might change, too."""
MEASURED = ("quant/", "weights/", "grad/cosine", "grad/noise", "grad/variance")
"""Prefixes of what telemetry measures."""


def looped(
    workload: Gpt, recipe: Recipe, batch, clock: Clock | None = None, telemetry: Telemetry = UNMEASURED
) -> list[Record]:
    """The bare loop over batches of one's own; validation on one of them."""
    model, engine = converted(workload, recipe, clock or Clock(0))
    validation = [training_batch(open_corpus(workload.data), 1, 0, 0, 2, 16)]
    return list(loop(PreparedRun(model, engine, batch, validation), workload, telemetry))


def brief(shards) -> Gpt:
    """Return the gpt of four steps that all presets train: of those that are measured often, one is not."""
    return gpt(shards, steps=4, eval_every=1000)


@pytest.fixture(scope="module")
def trained(shards):
    """Records of the tiny gpt by preset, seed 0, unmeasured: several promises compare them with another run."""
    return cache(lambda preset: train(brief(shards), PRESETS[preset]()))


@every(preset=dealt(PRESETS, 0, 2))
def test_another_seed_gives_other_losses(preset, shards, trained):
    """By the second step: the first loss is log(vocab) under any seed."""
    records = brief(shards).records(TrialRun(PRESETS[preset](), 1, "emulated", "cpu", UNMEASURED))
    second = [next(records) for _ in range(2)][1]
    records.close()
    assert second.metrics["train/loss"] != losses(trained(preset))[2]


@every(preset=dealt(PRESETS, 1, 2))
def test_telemetry_changes_no_bit_of_the_training(preset, shards, trained):
    loud, silent = train(brief(shards), PRESETS[preset](), telemetry=OFTEN), trained(preset)
    for name in ("train/loss", "grad/norm", "val/loss", "val/loss_bf16", "nan/activation"):
        assert column(loud, name) == column(silent, name)


RULES = {
    "osci_reset": Weights(osci_reset=OsciReset(period=4, window=3, start=0.0, threshold=0.5)),
    "q_ema": Weights(q_ema=QEma(decay=0.9, start=1)),
    "q_ramping": Weights(q_ramping=QRamping(period=4, window=2, threshold=0.1)),
    "bf16": Weights(master="bf16"),
}


@pytest.mark.parametrize("rule", RULES)
def test_a_rule_for_weights_changes_the_training_and_telemetry_does_not(rule, shards):
    recipe = NVFP4.model_copy(update={"weights": RULES[rule]})
    loud, silent = (train(gpt(shards), recipe, telemetry=t) for t in (OFTEN, UNMEASURED))
    assert losses(loud) == losses(silent)
    assert losses(silent) != losses(train(gpt(shards)))


def test_intervals_of_zero_steps_measure_nothing_and_there_is_none_between_records(shards):
    assert not any(name.startswith(MEASURED) for record in train(gpt(shards)) for name in record.metrics)
    for name, none in {"every": -1, "shadow": -1, "log": 0}.items():
        with pytest.raises(ValidationError):
            Telemetry(**{name: none})


# --- the shadow gradient, the oscillation of weights ----------------------------------------------


def by_hand(workload: Gpt, recipe: Recipe, quantised: bool) -> np.ndarray:
    """The first step's gradient of all parameters, float64, straight from the model."""
    model, engine = converted(workload, recipe if quantised else PRESETS["bf16"](), Clock(0))
    engine.at(0, Run(workload.steps))
    model.zero_grad()
    for micro_batch in range(workload.accumulate):
        engine.clock.micro_batch = micro_batch
        batch = training_batch(
            open_corpus(workload.data), 0, 0, micro_batch, workload.batch, workload.context
        )
        (model(*batch) / workload.accumulate).backward()
    return torch.cat([p.grad.double().flatten() for p in model.parameters()]).numpy()


@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_gradient_is_compared_with_that_of_an_unquantised_step(accumulate, shards):
    workload = gpt(shards, accumulate=accumulate, steps=2)
    metrics = train(workload, telemetry=Telemetry(shadow=1, log=1))[
        1
    ].metrics  # at step 0 the head is 0, and blocks have no gradient
    assert 0.5 < metrics["grad/cosine_to_bf16"] < 1
    assert metrics["grad/noise_ratio"] > 1
    g, r = (by_hand(workload, NVFP4, quantised) for quantised in (True, False))
    first = train(workload, telemetry=Telemetry(shadow=1, log=1))[0].metrics
    if np.array_equal(g, r):
        assert "grad/noise_ratio" not in first
    else:
        assert first["grad/noise_ratio"] == pytest.approx(np.linalg.norm(r) / np.linalg.norm(g - r), rel=1e-5)
        assert first["grad/cosine_to_bf16"] == pytest.approx(
            g @ r / np.linalg.norm(g) / np.linalg.norm(r), rel=1e-9
        )


def test_measurements_are_in_the_records_of_the_steps_that_measure_them(shards):
    records = train(
        gpt(shards, steps=8, eval_every=100, final_lr=0.1), telemetry=Telemetry(every=3, shadow=4, log=1)
    )
    for name in ("weights/flipped", "weights/oscillation", "quant/fprop.x/rel_mse", "quant/wgrad.x/crest"):
        assert set(column(records, name)) == {1, 4, 7, 8}  # and the last step
    for name in ("grad/cosine_to_bf16", "grad/noise_ratio", "grad/variance", "grad/squared_bias"):
        assert set(column(records, name)) == {1, 5}
    assert column(records, "grad/variance")[5] > 0  # another draw
    assert all(0 < value < 1 for value in column(records, "weights/flipped").values())


@pytest.mark.parametrize("preset", ["bf16", "fp32"])
def test_a_baseline_measures_no_quantisation(preset, shards):
    names = {
        name for record in train(gpt(shards), PRESETS[preset](), telemetry=OFTEN) for name in record.metrics
    }
    assert not {
        name for name in names if name.startswith(("quant/", "weights/", "grad/cosine", "grad/noise"))
    }


def test_weights_that_are_not_quantised_do_not_flip(shards):
    recipe = PRESETS["mxfp4_backward"]()
    assert column(train(gpt(shards), recipe, telemetry=OFTEN), "weights/flipped") == {}


# --- triggers -------------------------------------------------------------------------------------


def waiting(
    shards, monkeypatch, ratios: list[float], every: int, telemetry: Telemetry = UNMEASURED
) -> tuple[list[int], list[int]]:
    """Steps with a high-precision backward pass, and steps that were measured, where step n measures ratio n below or above 2."""
    recipe = NVFP4.model_copy(update={"schedule": (Phase(start=f"noise_ratio:2:{every}", slots="backward"),)})
    clock, high, measured = Clock(0), [], []
    model, engine = converted(gpt(shards), recipe, clock)

    def noise(gradient, reference):
        measured.append(clock.step)
        return {"grad/noise_ratio": ratios[clock.step]}

    monkeypatch.setattr("ablate.training.loop.gradient_noise", noise)
    before = engine.at

    def at(step, run):
        now = before(step, run)
        assert not now.fprop.plain
        if now.wgrad.plain:
            high.append(step)
        return now

    engine.at = at
    workload, corpus = gpt(shards, steps=len(ratios)), open_corpus(shards)

    def batch(step, micro_batch):
        return training_batch(corpus, 0, step, micro_batch, 2, 16)

    list(loop(PreparedRun(model, engine, batch, [batch(0, 0)]), workload, telemetry))
    return high, measured


@pytest.mark.parametrize("telemetry", [OFTEN, UNMEASURED])
def test_a_trigger_trips_after_the_step_that_measured_it_and_stays(telemetry, shards, monkeypatch):
    # Step 1 is below the limit and not looked at; step 4 is looked at and below; later ones are above again.
    high, _ = waiting(shards, monkeypatch, [3.0, 1.0, 3.0, 3.0, 1.9, 9.0, 9.0, 9.0], 2, telemetry)
    assert high == [5, 6, 7]


def test_at_the_limit_a_trigger_does_not_trip(shards, monkeypatch):
    assert waiting(shards, monkeypatch, [2.0, 2.0, 2.0], 1) == ([], [0, 1, 2])


def test_a_trigger_is_measured_at_its_own_steps_until_it_trips(shards, monkeypatch):
    assert waiting(shards, monkeypatch, [3.0, 3.0, 3.0, 1.0, 3.0, 3.0, 3.0], 3) == ([4, 5, 6], [0, 3])


def test_a_recipe_that_waits_trains_alike_however_often_it_is_watched(shards):
    recipe = NVFP4.model_copy(update={"schedule": (Phase(start="noise_ratio:1000000:2", slots="all"),)})
    results = [
        losses(train(gpt(shards, steps=6), recipe, telemetry=t))
        for t in (OFTEN, UNMEASURED, Telemetry(shadow=3, log=1))
    ]
    assert results[0] == results[1] == results[2]
    plain = losses(train(gpt(shards, steps=6)))
    assert results[0] != plain
    assert [results[0][step] == plain[step] for step in (1, 2)] == [True, False]


def test_telemetry_measures_every_slot_of_every_layer(shards):
    metrics = train(gpt(shards, steps=1), telemetry=OFTEN)[0].metrics
    layers = [
        f"blocks.{block}.{part}"
        for block in (0, 1)
        for part in ("attention.qkv", "attention.out", "mlp.up", "mlp.down")
    ]
    for slot in ("fprop.x", "fprop.w"):
        assert all(0 < metrics[f"quant/{slot}/{layer}/rel_mse"] < 0.05 for layer in layers)
        assert metrics[f"quant/{slot}/rel_mse"] == pytest.approx(
            sum(metrics[f"quant/{slot}/{layer}/rel_mse"] for layer in layers) / 8
        )


def test_logging_seldom_averages_the_losses_in_between(shards):
    each, all_at_once = (
        losses(train(gpt(shards, eval_every=100), telemetry=Telemetry(every=10**6, log=n))) for n in (1, 100)
    )
    assert set(all_at_once) == {5}  # the first step is measured too, and is no interval of its own
    assert all_at_once[5] == pytest.approx(math.fsum(each.values()) / 5, rel=1e-12)


@pytest.mark.parametrize("every", [1, 3, 50])
def test_the_result_of_training_is_the_mean_of_a_fixed_number_of_steps(every, shards):
    workload = gpt(shards, steps=13, eval_every=6)
    each = losses(train(workload, telemetry=UNMEASURED))
    records = train(workload, telemetry=Telemetry(every=every, shadow=every, log=2 * every))
    assert column(records, "train/recent_loss") == {
        end: pytest.approx(math.fsum(each[step] for step in range(first, end + 1)) / (end + 1 - first))
        for first, end in ((1, 6), (3, 12), (4, 13))
    }


def test_measured_steps_are_records_of_their_own_and_cut_no_interval_of_the_losses(shards):
    workload = gpt(shards, steps=12, eval_every=6)
    each = losses(train(workload, telemetry=UNMEASURED))
    records = train(workload, telemetry=Telemetry(every=2, shadow=10**6, log=4))
    found, measured = losses(records), column(records, "quant/fprop.x/sqnr_db")
    assert set(measured) == {1, 3, 5, 7, 9, 11, 12}
    intervals = {4: (1, 2, 3, 4), 6: (5, 6), 8: (7, 8), 12: (9, 10, 11, 12)}
    assert found == {
        end: pytest.approx(math.fsum(each[step] for step in steps) / len(steps))
        for end, steps in intervals.items()
    }
    assert set(column(records, "throughput/tokens_per_s")) == set(column(records, "nan/loss")) == set(found)
    assert set(column(records, "grad/norm")) == set(column(records, "tokens")) == set(found) | set(measured)


def test_the_time_of_a_measured_step_is_in_no_rate_but_where_all_steps_are_measured():
    meter = Meter(tokens_per_step=8)
    for number in range(10):
        meter.add(1.0, 1.0, 5.0 if number == 3 else 0.5, measured=number == 3)
    found = meter.metrics(10)
    assert (found["throughput/step_ms"], found["throughput/tokens_per_s"]) == (500.0, 16.0)
    meter.reset()
    meter.add(1.0, 1.0, 5.0, measured=True)
    assert meter.metrics(11)["throughput/tokens_per_s"] == 8 / 5


def test_an_interval_goes_on_from_a_checkpoint_within_it():
    meter, resumed = (Meter(tokens_per_step=8) for _ in range(2))
    meter.add(1.0, 1.0, 0.5)
    meter.reset()
    meter.add(2.0, 1.0, 0.5, measured=True)
    resumed.restore(copy.deepcopy(meter.state()))
    for one in (meter, resumed):
        one.add(6.0, 1.0, 0.25)
    assert resumed.metrics(3) == meter.metrics(3)
    assert (resumed.metrics(3)["train/loss"], resumed.result()["train/recent_loss"]) == (4.0, 3.0)


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


@every(preset=dealt(PRESETS, 0, 2))
def test_every_recipe_sees_the_same_tokens_in_the_same_order(preset, shards):
    """A step that compares its gradient asks for its own micro-batches again, and for no others."""
    seen, recipe = [], PRESETS[preset]()
    hook = register_module_forward_pre_hook(
        lambda module, args: seen.append(args[0]) if isinstance(module, Transformer) else None
    )
    workload = gpt(shards, layers=1, steps=2, accumulate=2, eval_every=1000)
    with hook:
        train(workload, recipe, seed=6, telemetry=Telemetry(every=1_000_000, shadow=2, log=1))
    corpus = open_corpus(shards)
    more = 0 if recipe.plain else 1 + recipe.draws  # without quantisation; and by another draw
    steps = [step for step in range(2) for _ in range(1 + more * (step == 0))]
    expected = [
        training_batch(corpus, 6, step, micro_batch, 2, 16)[0] for step in steps for micro_batch in range(2)
    ]
    evaluations = 1 if recipe.plain else 2  # of one batch, at the end, in both precisions
    assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=False))
    assert len(seen) == len(expected) + evaluations


@every(preset=PRESETS)
def test_the_first_loss_is_log_vocab_and_training_lowers_it(preset, trained):
    result = losses(trained(preset))
    assert result[1] == pytest.approx(math.log(64), abs=1e-5)  # the head starts at zero; log-softmax in fp32
    assert result[4] < result[1] - 0.05


@every(preset=dealt(PRESETS, 1, 2))
def test_a_diverging_run_ends_with_the_step_where_it_did(preset, shards):
    records = train(gpt(shards, layers=1, lr=1e38, warmup=0.0, clip=None), PRESETS[preset]())
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
        seen.append((clock.stream, clock.redraw, clock.step, clock.micro_batch))
        return training_batch(corpus, 0, step, micro_batch, 2, 16)

    looped(gpt(shards, steps=3, accumulate=2, eval_every=1), NVFP4, batch, clock, Telemetry(shadow=3))
    # Step 0 compares the gradient, with the same batches, and draws it a second time.
    steps = [(False, 0), (True, 0), (False, 0), (False, 1), (False, 2)]
    assert seen == [("training", *step, micro_batch) for step in steps for micro_batch in range(2)]


def test_a_schedule_changes_the_losses_from_its_step_on_and_not_before(shards):
    switched = NVFP4.model_copy(update={"schedule": (Phase(start="step:3", slots="all"),)})
    plain, cooled = losses(train(gpt(shards))), losses(train(gpt(shards), switched))
    assert [plain[step] == cooled[step] for step in range(1, 6)] == [True, True, True, False, False]


@pytest.mark.parametrize(
    ("start", "first"),
    [
        ("tokens:128", 2),
        ("tokens:129", 3),
        ("decay", 4),
        ("fraction:0.6", 3),
        ("step:1", 1),
        ("tokens:999", None),
    ],
)
def test_the_loop_tells_a_schedule_its_tokens_and_where_the_rate_falls(start, first, shards):
    workload = gpt(shards, accumulate=2)  # 5 steps of 64 tokens; wsd falls in the last fifth
    switched = NVFP4.model_copy(update={"schedule": (Phase(start=start),)})
    plain, cooled = losses(train(workload)), losses(train(workload, switched))
    differ = [step - 1 for step in plain if plain[step] != cooled[step]]
    assert next(iter(differ), None) == first


def test_validation_reports_the_loss_in_force_and_the_loss_in_bf16(shards):
    nvfp4, bf16 = train(gpt(shards)), train(gpt(shards), PRESETS["bf16"]())
    assert column(bf16, "val/loss") == column(bf16, "val/loss_bf16")
    assert column(nvfp4, "val/loss") != column(nvfp4, "val/loss_bf16")
    gaps = [abs(column(nvfp4, "val/loss")[step] - column(nvfp4, "val/loss_bf16")[step]) for step in (2, 4, 5)]
    assert max(gaps) < 0.05


def test_evaluation_leaves_no_gradient_and_no_other_weights(shards):
    corpus, (model, engine) = open_corpus(shards), converted(gpt(shards), NVFP4, Clock(0))
    engine.at(0, Run(1))
    before = {name: value.clone() for name, value in model.state_dict().items()}
    batch = training_batch(corpus, 0, 0, 0, 2, 16)
    part = RankPart(world(), gpt(shards), engine, list(model.parameters()))
    evaluate(PreparedRun(model, engine, lambda step, micro_batch: batch, [batch]), NVFP4, part)
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    assert all(parameter.grad is None for parameter in model.parameters())


def test_tokens_and_throughput_are_counted(shards):
    records = train(gpt(shards, accumulate=2))
    assert column(records, "tokens") == {step: 64.0 * step for step in range(1, 6)}
    assert all(
        value > 0
        for name in ("throughput/step_ms", "throughput/tokens_per_s")
        for value in column(records, name).values()
    )


# --- the learning rate ----------------------------------------------------------------------------


def test_wsd_rises_stays_and_falls():
    rates = [Training(steps=10, lr=1.0, warmup=0.2, decay_fraction=0.3).lr_at(step) for step in range(10)]
    assert rates == pytest.approx([1 / 3, 2 / 3, 1, 1, 1, 1, 1, 2 / 3, 1 / 3, 0])


def test_cosine_is_half_way_down_in_the_middle_and_ends_at_its_final_rate():
    config = Training(steps=10, lr=2.0, warmup=0.0, decay="cosine", final_lr=0.1)
    assert config.lr_at(4) == pytest.approx(2 * 0.55)
    assert config.lr_at(9) == pytest.approx(0.2)


@every(decay=["wsd", "cosine", "none"], steps=[1, 2, 7, 300], warmup=[0.0, 0.05, 1.0], fraction=[0.2, 1.0])
def test_the_rate_never_leaves_zero_to_its_peak(decay, steps, warmup, fraction):
    config = Training(steps=steps, lr=0.5, decay=decay, warmup=warmup, decay_fraction=fraction)
    assert all(0 <= config.lr_at(step) <= 0.5 * (1 + 1e-12) for step in range(steps))


@every(decay=["wsd", "cosine", "none"], fraction=[0.0, 0.2, 0.35, 0.7, 1.0])
def test_decay_starts_at_the_first_step_that_is_slower_than_the_one_before(decay, fraction):
    for steps, warmup in itertools.product((1, 2, 7, 10, 30, 300), (0.0, 0.05, 0.33, 1.0)):
        config = Training(steps=steps, lr=0.5, decay=decay, warmup=warmup, decay_fraction=fraction)
        rates = [config.lr_at(step) for step in range(steps)]
        falls = [step for step in range(1, steps) if rates[step] < rates[step - 1]]
        assert config.decay_start == (falls[0] if falls else None), config
        assert falls == list(range(falls[0], steps)) if falls else True  # and never rises again


def test_a_rate_that_ends_at_its_peak_never_falls():
    assert Training(steps=50, final_lr=1.0).decay_start is None


def test_the_start_of_the_decay_is_found_in_few_looks_however_long_the_run():
    looks = []

    class Watched(Training):
        def lr_at(self, step):
            looks.append(step)
            return super().lr_at(step)

    assert Watched(steps=10**9, final_lr=1.0).decay_start is None
    flat = Watched(
        steps=10**9, decay="cosine", warmup=0.0, final_lr=1 - 1e-12
    )  # equal to the peak for thousands of steps
    start = flat.decay_start
    assert 0 < len(looks) < 10_000
    assert flat.lr_at(start) < flat.lr_at(start - 1) == flat.lr_at(0)


def test_wsd_without_a_fall_stays_at_its_peak():
    config = Training(steps=4, lr=0.5, warmup=0.0, decay_fraction=0.0)
    assert [config.lr_at(step) for step in range(4)] == [0.5] * 4


SHARES = {
    "nothing": ("bf16", {}, 0.0),
    "all but the layers of attention": ("nvfp4", {"layers": {"rules": [{"match": "*.attention.*"}]}}, 9 / 13),
    "everything": ("nvfp4", {}, 1.0),
    "two of four blocks": ("nvfp4", {"layers": {"skip_first": 1, "skip_last": 1}}, 1 / 2),
    "six of ten steps": ("nvfp4", {"schedule": [{"start": "fraction:0.6"}]}, 6 / 10),
    "the forward product alone for four of ten steps": (
        "nvfp4",
        {"schedule": [{"start": "step:6", "slots": "backward"}]},
        6 / 10 + 4 / 10 / 3,
    ),
    "a product with one operand in eight bits": (
        "nvfp4",
        {"wgrad": {"x": {"element": "e4m3"}, "g": {}}},
        2 / 3,
    ),
    "eight bits": ("mxfp8", {}, 0.0),
}


@pytest.mark.parametrize("case", SHARES)
def test_the_last_record_has_the_share_of_the_linear_layers_flops_that_were_fp4(case, shards):
    preset, changes, share = SHARES[case]
    recipe = Recipe.model_validate(PRESETS[preset]().model_dump() | changes)
    records = train(gpt(shards, layers=4, steps=10), recipe)
    assert column(records, "flops/fp4_share") == {10: pytest.approx(share, rel=1e-12)}
    if not recipe.schedule:
        assert fp4_share(recipe, gpt(shards, layers=4).linear_layers) == pytest.approx(share, rel=1e-12)


# --- options of real runs -------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["bf16", "nvfp4", "fp8_delayed", "ue5m3", "quartet2", "tetrajet2"])
def test_recomputed_activations_change_no_bit_and_nothing_that_is_counted(preset, shards):
    """With histories, signs that are drawn, copies that are requantised."""
    workloads = (gpt(shards, recompute=value, layers=1, accumulate=2, steps=2) for value in (False, True))
    plain, again = (train(workload, PRESETS[preset](), telemetry=OFTEN) for workload in workloads)
    assert facts(again) == facts(plain)


def test_recomputation_keeps_fewer_activations(shards):
    """Counted as bytes that autograd saves for one step; a block's input is all that stays of it."""

    def kept(recompute: bool) -> int:
        run = gpt(shards, layers=6, recompute=recompute).prepare(NVFP4, 0, "cpu")
        run.engine.at(0, Run(1))
        total = 0

        def count(tensor):
            nonlocal total
            total += tensor.nbytes
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(count, lambda tensor: tensor):
            run.model(*run.batch(0, 0)).backward()
        return total

    assert kept(True) < kept(False) / 3


def test_a_token_budget_is_as_many_steps_as_cover_it(shards):
    assert gpt(shards, batch=2, context=16).model_copy().steps == 5
    fields = {"layers": 1, "width": 32, "heads": 1, "context": 16, "batch": 2, "accumulate": 2}
    assert Gpt(data=shards, token_budget=640, **fields).steps == 10
    assert Gpt(data=shards, token_budget=641, **fields).steps == 11
    with pytest.raises(
        ValidationError, match=r"steps 5 and token_budget 641 \(which is 11 steps\) differ; leave one out"
    ):
        Gpt(data=shards, token_budget=641, steps=5, **fields)


def test_a_time_budget_ends_a_run_with_a_complete_last_record(shards):
    records = train(gpt(shards, steps=10_000, time_budget=0.2, eval_every=10_000))
    last = records[-1]
    assert last.step < 10_000
    assert {"val/loss", "flops/fp4_share"} <= set(last.metrics)
    spent = sum(record.metrics["throughput/step_ms"] for record in records) / 1000
    assert spent >= 0.2
    assert spent - records[-1].metrics["throughput/step_ms"] / 1000 < 0.2


def test_the_learning_rate_falls_linearly_from_the_end_of_the_warm_up():
    config = Training(steps=10, lr=1.0, warmup=0.2, decay="linear", final_lr=0.2)
    rates = [config.lr_at(step) for step in range(10)]
    assert rates[:2] == pytest.approx([1 / 3, 2 / 3])
    assert np.diff(rates[2:]) == pytest.approx([-0.1] * 7)
    assert rates[-1] == pytest.approx(0.2)
    assert config.decay_start == 3


@pytest.mark.parametrize(
    ("fields", "weights", "field", "why"),
    [
        ({"optimizer": "muon"}, RULES["q_ramping"], "optimizer", "q_ramping"),
        ({"compile": True, "recompute": True}, Weights(), "recompute", "compile"),
    ],
)
def test_what_cannot_run_together_is_refused(fields, weights, field, why, shards):
    found = dict(gpt(shards, **fields).contradictions(NVFP4.model_copy(update={"weights": weights})))
    assert why in found[field]


def test_a_field_that_changes_no_bit_is_no_part_of_the_identity(shards):
    plain = gpt(shards)
    assert not set(plain.identity()) & plain.SAME_BITS
    assert gpt(shards, recompute=True).identity() == plain.identity()
    for name, value in {
        "optimizer": "muon",
        "guard": {"policy": "skip"},
        "time_budget": 1.0,
        "deterministic": False,
    }.items():
        assert gpt(shards, **{name: value}).identity() != plain.identity()


def test_a_decay_too_short_for_a_step_leaves_the_rate_as_it_is():
    config = Training(steps=4, lr=0.5, warmup=0.0, decay_fraction=1e-320)
    assert [config.lr_at(step) for step in range(4)] == [0.5] * 4
