"""The guard: what counts as diverging, what becomes of such a step, and that a run goes on from it as it was told to."""

import itertools
import math

import pytest
import torch
from pydantic import ValidationError
from support.cases import every
from support.experiments import SHAPE, shards

from ablate.recipes import PRESETS
from ablate.recipes.recipe import SLOTS, QEma, Run, Weights
from ablate.training.checkpoints import Checkpoints
from ablate.training.guard import Cause, Change, GuardDecision, Watch
from ablate.training.hyperparameters import Fallback, Guard
from ablate.training.loop import PreparedRun, Telemetry, train
from ablate.training.metric_names import parse
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.gpt import Gpt

NVFP4 = PRESETS["nvfp4"]()
OFTEN = Telemetry(every=10**6, shadow=10**6, log=1, checkpoint=0)


def gpt(folder, guard: Guard, **fields) -> Gpt:
    return Gpt(**(SHAPE | {"data": shards(folder), "steps": 12, "eval_every": 4, "guard": guard} | fields))


def spoiled(workload: Gpt, bad: dict[int, float], checkpoints=None, recipe=NVFP4):
    """The run's records; in the steps of `bad` the loss is multiplied by its factor."""
    run = workload.prepare(recipe, 0, "cpu")

    def loss(*batch):
        found = run.model(*batch)
        training = run.engine.clock.stream == "training"
        return found * bad.get(run.engine.clock.step, 1.0) if training else found

    return run, train(
        PreparedRun(run.model, run.engine, run.batch, run.validation, loss), workload, OFTEN, checkpoints
    )


def judged(guard: Guard, series: list[tuple[float, float]], clip: float | None = 1.0) -> list[str]:
    class Engine:
        def fall_back(self, *what):
            pass

    watch = Watch(guard, clip, Engine())
    return [watch.judge(*pair).kind for pair in series]


def test_a_verdict_has_the_quantity_its_value_and_what_it_is_compared_with():
    class Engine:
        def fall_back(self, *what):
            pass

    fallback = Fallback(lr=0.5, clip=0.1, precision="bf16", slots=("wgrad.*",), layers=("blocks.0.*",))
    guard = Guard(policy="fallback", loss=1.5, norm=4.0, window=4, limit=2, fallback=fallback)
    watch = Watch(guard, 2.0, Engine())
    series = [*[(2.0, 1.0)] * 4, (2.0, 5.0), *[(2.0, 1.0)] * 4, (4.0, 1.0), (1.0, math.inf)]
    found = [verdict for pair in series if (verdict := watch.judge(*pair)).cause]
    first, second = (Change(0.5**n, 2.0 * 0.1**n, "bf16", ("wgrad.*",), ("blocks.0.*",)) for n in (1, 2))
    assert found == [
        GuardDecision("skip", Cause("gradient norm", 5.0, 1.0, 4), 1, first),
        GuardDecision("skip", Cause("loss", 4.0, 2.0, 4), 2, second),
        GuardDecision("stop", Cause("gradient norm", math.inf), 2),
    ]
    assert [verdict.cause.ratio for verdict in found] == [5.0, 2.0, None]


@pytest.mark.parametrize(
    ("verdict", "sentence"),
    [
        (GuardDecision("step"), ""),
        (GuardDecision("stop", Cause("loss", math.nan)), "the loss is not finite"),
        (
            GuardDecision("stop", Cause("gradient norm", math.inf), 20),
            "the gradient is not finite, after 20 interventions (guard.limit)",
        ),
        (
            GuardDecision("skip", Cause("loss", 4.0, 2.0, 32), 1, Change()),
            "loss 4 is 2 times the median of 32 steps; step skipped",
        ),
        (
            GuardDecision(
                "skip",
                Cause("loss", math.inf),
                2,
                Change(0.25, 0.02, "fp8", ("wgrad.*", "dgrad.g"), ("blocks.0.*",)),
            ),
            "the loss is not finite; step skipped; from here on learning rate times 0.25, clip 0.02, wgrad.*, dgrad.g of blocks.0.* in fp8",
        ),
    ],
)
def test_a_verdict_is_stored_as_the_sentence_that_earlier_versions_stored(verdict, sentence):
    assert str(verdict) == sentence


@pytest.mark.parametrize("bad", [(math.nan, 1.0), (1.0, math.inf)])
def test_what_is_not_finite_always_counts(bad):
    assert judged(Guard(), [(1.0, 1.0), bad]) == ["step", "stop"]
    assert judged(Guard(policy="skip"), [(1.0, 1.0), bad, (1.0, 1.0)]) == ["step", "skip", "step"]


def test_a_spike_is_told_from_the_running_median_once_there_is_one():
    guard = Guard(policy="skip", loss=1.5, norm=4.0, window=5)
    calm = [
        (1.0, 1.0),
        (9.0, 9.0),
        (1.0, 1.0),
        (1.0, 1.0),
        (1.0, 1.0),
    ]  # a spike in it moves a mean, and no median
    assert judged(guard, [*calm, (1.4, 3.9), (1.6, 1.0), (1.0, 4.1), (1.0, 1.0)]) == ["step"] * 6 + [
        "skip",
        "skip",
        "step",
    ]


@pytest.mark.parametrize("usual", [0.0, -0.0, -3.0])
def test_a_median_that_is_not_above_zero_limits_nothing(usual):
    guard = Guard(loss=2.0, norm=2.0, window=4)
    for series in ([(usual, 1.0)] * 5 + [(0.1, 1.0)], [(1.0, usual)] * 5 + [(1.0, 0.1)]):
        assert judged(guard, series) == ["step"] * 6


def test_after_a_fallback_a_run_is_measured_anew():
    guard = Guard(policy="fallback", norm=4.0, window=4)
    calm, high = [(1.0, 1.0)] * 4, [(1.0, 9.0)] * 5
    assert judged(guard, [*calm, *high, (1.0, 9.0), (1.0, 40.0)]) == ["step"] * 4 + ["skip"] + [
        "step"
    ] * 5 + ["skip"]


def test_a_skipped_step_is_no_part_of_the_median():
    guard = Guard(policy="skip", loss=1.5, window=4, limit=50)
    assert judged(guard, [(1.0, 1.0)] * 4 + [(2.0, 1.0)] * 20) == ["step"] * 4 + ["skip"] * 20


def test_after_the_limit_a_run_ends():
    assert judged(Guard(policy="skip", limit=2), [(math.nan, 1.0)] * 3) == ["skip", "skip", "stop"]


def test_a_skipped_step_leaves_weights_and_moments_as_they_were(tmp_path):
    run, records = spoiled(gpt(tmp_path, Guard(policy="skip"), decay="none"), {3: math.nan})
    seen = []
    for record in records:
        seen.append({name: value.clone() for name, value in run.model.state_dict().items()})
        if record.step == 4:
            assert (record.verdict.kind, record.verdict.cause.quantity, record.verdict.interventions) == (
                "skip",
                "loss",
                1,
            )
            assert math.isnan(record.verdict.cause.value)
            assert record.verdict.cause.ratio is record.verdict.change is None
            assert record.metrics["nan/steps_skipped"] == 1
            assert record.metrics["nan/loss"] == 1
    same = [all(torch.equal(a[name], b[name]) for name in a) for a, b in itertools.pairwise(seen)]
    assert [step for step, equal in enumerate(same, 1) if equal] == [3]  # from record 3 to record 4


def test_a_run_that_is_stopped_by_a_spike_says_so_and_ends(tmp_path):
    _, records = spoiled(gpt(tmp_path, Guard(loss=1.5, window=4)), {6: 3.0})
    last = list(records)[-1]
    assert (last.step, last.metrics["guard/stopped"]) == (7, 7)
    assert "nan/first_step" not in last.metrics
    assert "val/loss" not in last.metrics
    assert (last.verdict.kind, last.verdict.cause.quantity, last.verdict.cause.window) == ("stop", "loss", 4)
    assert last.verdict.cause.ratio == pytest.approx(3, rel=0.1)  # the loss falls little in six steps


def test_falling_back_changes_rate_clip_and_precision_and_goes_on(tmp_path):
    fallback = Fallback(
        lr=0.5, clip=0.1, precision="fp8", slots=("wgrad.*", "dgrad.g"), layers=("blocks.0.*",)
    )
    run, records = spoiled(
        gpt(tmp_path, Guard(policy="fallback", fallback=fallback), clip=2.0), {2: math.nan, 5: math.nan}
    )
    found = list(records)
    assert len(found) == 12
    assert [record.step for record in found if record.verdict] == [3, 6]
    changes = [found[index].verdict.change for index in (2, 5)]
    assert [change.lr for change in changes] == [0.5, 0.25]
    assert [change.clip for change in changes] == pytest.approx([0.2, 0.02])
    assert all((c.precision, c.slots, c.layers) == ("fp8", fallback.slots, fallback.layers) for c in changes)
    assert [record.metrics["guard/lr"] for record in found] == [1.0] * 2 + [0.5] * 3 + [0.25] * 7
    fp8 = PRESETS["fp8_current"]()
    for name, layer in run.engine.layers.items():
        changed = {slot for slot in SLOTS if layer.products.slot(slot) != NVFP4.slot(slot)}
        assert changed == ({"wgrad.g", "wgrad.x", "dgrad.g"} if name.startswith("blocks.0.") else set())
        assert all(layer.products.slot(slot) == fp8.slot(slot) for slot in changed)


def test_falling_back_to_bf16_everywhere_is_bf16(tmp_path):
    run, records = spoiled(
        gpt(tmp_path, Guard(policy="fallback", fallback=Fallback(precision="bf16"))), {0: math.nan}
    )
    list(records)
    assert all(layer.products.plain for layer in run.engine.layers.values())


@every(preset=PRESETS)
def test_every_recipe_can_fall_back_in_its_forward_slots(preset, tmp_path):
    """Check that a backward operand whose forward copy is gone starts from the original."""
    guard = Guard(policy="fallback", fallback=Fallback(precision="bf16", slots=("fprop.*",)))
    run, records = spoiled(gpt(tmp_path, guard, steps=3), {0: math.nan}, recipe=PRESETS[preset]())
    assert math.isfinite(list(records)[-1].metrics["val/loss"])
    assert all(layer.products.fprop.plain for layer in run.engine.layers.values())


def test_an_interrupted_run_goes_on_with_what_its_guard_remembers(tmp_path):
    guard = Guard(policy="fallback", loss=1.5, window=4, fallback=Fallback(precision="fp8"))
    bad = {2: math.nan, 7: 3.0}

    def told(records):
        own = [
            {name: repr(value) for name, value in r.metrics.items() if not parse(name).of_machine}
            for r in records
        ]
        return [(r.step, repr(r.verdict), metrics) for r, metrics in zip(records, own, strict=True)]

    whole = told(list(spoiled(gpt(tmp_path, guard), bad)[1]))
    assert [step for step, verdict, _ in whole if verdict != "None"] == [3, 8]
    for at in (4, 8):
        first = spoiled(gpt(tmp_path, guard), bad, Checkpoints(tmp_path / f"{at}.pt", "trial", 0))[1]
        taken = [next(first) for _ in range(at + 1)]
        first.close()
        again = Checkpoints(tmp_path / f"{at}.pt", "trial", 0)
        assert told(taken[:at]) + told(list(spoiled(gpt(tmp_path, guard), bad, again)[1])) == whole
        assert again.resumed == at


def test_a_fallback_names_slots_and_layers_that_there_are(tmp_path):
    with pytest.raises(ValidationError, match=r"'fprob\.\*' matches none of the slots fprop\.x"):
        Fallback(slots=("fprob.*",))
    problems = dict(
        gpt(
            tmp_path, Guard(policy="fallback", fallback=Fallback(precision="fp8", layers=("blocks.7.*",)))
        ).problems()
    )
    assert problems["guard.fallback.layers"].startswith("name 'blocks.7.*' selects no layer")


def test_a_recipe_with_slots_of_another_keeps_the_rest():
    fp8 = PRESETS["fp8_current"]()
    changed = NVFP4.products.with_slots(("dgrad.g", "dgrad.w"), fp8)
    assert (changed.fprop, changed.wgrad) == (NVFP4.fprop, NVFP4.wgrad)
    assert (changed.dgrad.g, changed.dgrad.w) == (fp8.dgrad.g, fp8.dgrad.w)
    assert NVFP4.products.with_slots(("wgrad.g", "wgrad.x"), PRESETS["bf16"]()).wgrad.plain


def test_a_guard_that_never_acts_changes_no_bit(tmp_path):
    def values(guard):
        return [
            (r.step, r.metrics["train/loss"])
            for r in gpt(tmp_path, guard).records(TrialRun(NVFP4, 0, "emulated", "cpu", OFTEN))
        ]

    assert values(Guard(policy="fallback", loss=50.0, norm=500.0)) == values(Guard())


def test_the_engine_follows_a_schedule_after_falling_back(tmp_path):
    """A cooldown to bf16 stays bf16, though FP8 was fallen back to before."""
    run = gpt(tmp_path, Guard()).prepare(NVFP4, 0, "cpu")
    run.engine.fall_back(("*",), Fallback(precision="fp8").safer)
    run.engine.recipe = PRESETS["bf16"]()
    run.engine.at(0, Run(1))
    assert all(layer.products.plain for layer in run.engine.layers.values())


def test_what_would_never_have_an_effect_is_refused(tmp_path):
    with pytest.raises(ValidationError, match=r"no effect without guard\.fallback\.precision"):
        Fallback(slots=("fprop.x",))
    said = dict(gpt(tmp_path, Guard(fallback=Fallback(precision="fp8"))).contradictions(NVFP4))
    assert (
        said["guard.policy"]
        == "stop never falls back, so fallback.precision has no effect; use policy: fallback"
    )


def test_a_run_whose_first_step_was_skipped_can_be_gone_on_with(tmp_path):
    """Before its first update no rule for weights has begun."""
    recipe = NVFP4.model_copy(update={"weights": Weights(q_ema=QEma(start=1))})
    path, workload = tmp_path / "c.pt", gpt(tmp_path, Guard(policy="skip"))
    first = spoiled(workload, {0: math.nan}, Checkpoints(path, "trial", 0), recipe)[1]
    taken = [next(first) for _ in range(2)]
    first.close()
    again = Checkpoints(path, "trial", 0)
    rest = list(spoiled(workload, {0: math.nan}, again, recipe)[1])
    assert again.resumed == 1
    whole = list(spoiled(workload, {0: math.nan}, None, recipe)[1])
    losses = [repr(record.metrics["train/loss"]) for record in whole]
    assert [repr(record.metrics["train/loss"]) for record in (taken[0], *rest)] == losses
