"""Several ranks compute what one computes, but for the order of additions: whatever the recipe, however the work is shared out."""

import math
import statistics
import traceback
from functools import cache
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.distributed._functional_collectives as collectives
from support.cases import sampled
from support.gpt_runs import UNMEASURED
from support.ranks import in_ranks

from ablate.engines.ranks import packs, whole
from ablate.numerics.partition import Partition
from ablate.numerics.spec import Hadamard, Outer, Quant, Transform
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Fprop, OsciReset, Phase, Products, Recipe, Weights, Wgrad
from ablate.recipes.weight_noise import Noise
from ablate.training import distributed
from ablate.training.checkpoints import Checkpoints
from ablate.training.hyperparameters import Training
from ablate.training.loop import Loop, Telemetry
from ablate.training.metric_names import PRODUCTS, parse
from ablate.training.rank_layout import Layout
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.gpt import Gpt

SIZE = {
    "layers": 2,
    "width": 64,
    "heads": 2,
    "context": 32,
    "steps": 3,
    "eval_every": 3,
    "eval_tokens": 192,
    "eval_batch": 2,
    "lr": 1e-3,
}
SHARED = {"batch": 1, "accumulate": 4}
"""Each rank has micro-batches of its own."""
SPLIT = {"batch": 4, "accumulate": 1}
"""The ranks share the sequences of one, and its amaxes."""
CLOCKS = ("throughput/", "memory/", "comm/")


@cache
def variants() -> dict[str, Recipe]:
    """Every preset, and what none of them has."""
    nvfp4 = PRESETS["nvfp4"]()
    percentile = Quant(outer=Outer(statistic="percentile:0.999"))
    return {name: preset() for name, preset in PRESETS.items()} | {
        "percentile": Recipe(fprop=Fprop(x=percentile, w=percentile), wgrad=nvfp4.wgrad, dgrad=nvfp4.dgrad),
        "weights in rows": Recipe(fprop=Fprop(x=Quant(), w=Quant(outer=Outer(granularity="row")))),
        "turned per call": Recipe(fprop=Fprop(x=Quant(), w=Quant(), hadamard=Hadamard(signs="per_call"))),
        "stochastic weights": Recipe(fprop=Fprop(x=Quant(), w=Quant(rounding="stochastic"))),
        "late": nvfp4.model_copy(update={"schedule": (Phase(start="step:2", slots="forward"),)}),
    }


def be(sharded: bool) -> distributed.World:
    """Be a rank of the group that a test forked this process into, if it did."""
    ranks, rank = (dist.get_world_size(), dist.get_rank()) if dist.is_initialized() else (1, 0)
    world = distributed.become(distributed.World(Layout(ranks, sharded and ranks > 1), rank, "cpu"))
    world.begun = True
    return world


MEASURED = Telemetry(every=3, shadow=3, log=1)


def records(
    recipe: Recipe, sharded: bool = False, telemetry: Telemetry = MEASURED, **shape: Any
) -> list[tuple[int, dict]]:
    """Return the records of a small gpt, without those that clocks and allocators decide."""
    be(sharded)
    told = Gpt(**SIZE | shape).records(TrialRun(recipe, 0, "emulated", "cpu", telemetry))
    return [
        (step, {k: v for k, v in metrics.items() if not k.startswith(CLOCKS)}) for step, metrics, *_ in told
    ]


@cache
def alone(name: str, shared: bool) -> list[tuple[int, dict]]:
    return records(variants()[name], **(SHARED if shared else SPLIT))


RECORDED = ["bf16", "nvfp4", "fp8_delayed", "percentile", "turned per call", "late"]
LAYOUTS = [("nvfp4", 2, sharded, shared) for sharded in (False, True) for shared in (False, True)]
LAYOUTS += [("nvfp4", 4, sharded, not sharded) for sharded in (False, True)]
LAYOUTS += [
    (name, 2, place % 2 == 0, place % 4 < 2) for place, name in enumerate(RECORDED) if name != "nvfp4"
]
"""Preset, ranks, whether weights are sharded, and whether the ranks have micro-batches of their own."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "ranks", "sharded", "shared"), sampled(LAYOUTS, 7, seed=0))
def test_ranks_record_what_one_records(name, ranks, sharded, shared):
    wanted = alone(name, shared)
    everybody = in_ranks(ranks, lambda: records(variants()[name], sharded, **(SHARED if shared else SPLIT)))
    found = everybody[0]
    whole_products = shared and not sharded  # those that ranks divide are not measured
    assert [(step, metrics.keys()) for step, metrics in found] == [
        (step, {name for name in metrics if whole_products or parse(name).family != PRODUCTS})
        for step, metrics in wanted
    ]
    for (_, mine), (_, its) in zip(found, wanted, strict=True):
        # Sums in another order, 2^-24 apart, decide roundings to bf16 and to codes: 2e-4 of a loss after three steps.
        assert mine["train/loss"] == pytest.approx(
            its["train/loss"], rel=1e-6 if mine is found[0][1] else 2e-4
        )
        assert mine["grad/norm"] == pytest.approx(its["grad/norm"], rel=1e-3 if mine is found[0][1] else 3e-2)
        assert all(mine[key] == 0 == its[key] for key in mine if key.startswith("nan/"))
    assert found[-1][1]["val/loss"] == pytest.approx(wanted[-1][1]["val/loss"], rel=2e-4)
    own = {"quant/", "gemm/", "osc"}  # measured on this rank's part alone
    for other in everybody[1:]:
        for (_, mine), (_, its) in zip(found, other, strict=True):
            assert all(mine[k] == its[k] or math.isnan(mine[k]) for k in mine if not k.startswith(tuple(own)))


@pytest.mark.slow
@pytest.mark.parametrize(("auxiliary", "shared"), [(0.01, True), (0.0, False)])
@pytest.mark.parametrize("name", ["bf16", "nvfp4"])
def test_ranks_train_experts_as_one_rank_does(name, auxiliary, shared):
    shape = (SHARED if shared else SPLIT) | {"experts": {"count": 4, "auxiliary": auxiliary}}
    telemetry = MEASURED if shared else UNMEASURED
    wanted = records(variants()[name], telemetry=telemetry, **shape)
    found, other = in_ranks(2, lambda: records(variants()[name], telemetry=telemetry, **shape))
    compared = {"train/loss", "val/loss"} | ({"train/imbalance"} if auxiliary else set())
    assert compared <= wanted[-1][1].keys()
    for (step, mine), (own_step, its) in zip(found, wanted, strict=True):
        assert step == own_step
        for metric in compared & its.keys():
            assert mine[metric] == pytest.approx(its[metric], rel=2e-4)
    assert found[-1][1]["val/loss"] == other[-1][1]["val/loss"]


def gradient(recipe: Recipe, sharded: bool, **shape: Any) -> dict[str, torch.Tensor]:
    """Every parameter's gradient in the second step; the first one's is zero behind a head that starts at zero."""
    be(sharded)
    config = Gpt(**SIZE | shape | {"steps": 4})
    loop = Loop(config.prepare(recipe, 0, "cpu"), config, Telemetry())
    engine, optimizer = loop.run.engine, loop.optimizer
    # By hand: `loop.step` would measure the operands of step 0, which takes as long as the step.
    engine.at(0, loop.plan)
    loop.gradient(0)
    distributed.clip(loop.parameters, loop.watch.clip)
    for group in optimizer.param_groups:
        group["lr"] = loop.rate(0)
    engine.weights.before(optimizer, 0, loop.plan)
    optimizer.step()
    engine.weights.after(optimizer, 0, loop.plan)
    engine.at(1, loop.plan)
    engine.clock.step = 1
    loop.gradient(1)
    return {name: whole(p.grad) for name, p in loop.run.model.named_parameters()}


def gradients_off(
    sharded: bool, shape: dict[str, Any], wanted: dict[str, dict[str, torch.Tensor]]
) -> dict[str, float]:
    """The recipes whose gradient of some parameter is not only by rounding another than one rank's, and how far, as a share of its norm."""
    found = {}
    for name, its in wanted.items():
        mine = gradient(variants()[name], sharded, **shape)
        off = max(float((mine[p] - its[p]).norm() / its[p].norm()) for p in its)
        if (
            off > 3e-2
        ):  # a last bit of an fp32 sum decides roundings to bf16 and to codes: one code is a sixth of a block's largest
            found[name] = off
    return found


SHAPES = {"micro-batches": SHARED | {"layers": 1}, "sequences": SPLIT | {"layers": 1, "context": 64}}
"""A half of the latter has the 128 tokens of the longest rotation."""


@cache
def gradient_alone(shape: str, name: str) -> dict[str, torch.Tensor]:
    return gradient(variants()[name], False, **SHAPES[shape])


@cache
def divided() -> list[tuple[str, str, bool]]:
    """Every recipe with each way to divide the tokens, of a whole and of a sharded model, that it fits."""
    return [
        (name, named, sharded)
        for name, recipe in variants().items()
        for named, shape in SHAPES.items()
        for sharded in (False, True)
        if not [*Layout(2, sharded).misfits(Gpt(**SIZE | shape), recipe, "emulated")]
    ]


@pytest.mark.slow
@pytest.mark.parametrize("sharded", [False, True], ids=["whole", "sharded"])
@pytest.mark.parametrize("named", SHAPES)
def test_the_gradient_of_every_recipe_is_that_of_one_rank(named, sharded):
    fitting = {name for name, *how in divided() if how == [named, sharded]}
    assert {"nvfp4", "quartet2", "fp8_current", "mxfp4", "four_over_six"} <= fitting
    chosen = sampled(divided(), 0, seed=1)  # every recipe in one of the four
    assert {name for name, *_ in chosen} == {name for name, *_ in divided()}
    wanted = {name: gradient_alone(named, name) for name, *how in chosen if how == [named, sharded]}
    assert wanted
    assert in_ranks(2, lambda: gradients_off(sharded, SHAPES[named], wanted)) == [{}, {}]


@pytest.mark.slow
def test_amaxes_of_its_own_for_each_part_change_the_losses_and_not_their_mean():
    """Check that ranks without a reduction compute what one rank computes of smaller micro-batches: another sample of the rounding."""
    recipe = Recipe(fprop=Fprop(x=Quant(), w=Quant()))
    be(False)
    gaps = []
    for seed in range(6):
        config = {"layers": 1, "steps": 8, "eval_every": 8}
        last = [
            [*Gpt(**SIZE | config | shape).records(TrialRun(recipe, seed, "emulated", "cpu", UNMEASURED))][
                -1
            ].metrics["val/loss"]
            for shape in (SHARED, SPLIT)
        ]
        gaps.append(last[0] - last[1])
    assert all(gap != 0 for gap in gaps)
    assert (
        abs(statistics.mean(gaps)) < 3 * statistics.stdev(gaps) / math.sqrt(len(gaps)) + 1e-3
    )  # the batches differ, too


QWEN = {
    "model_type": "qwen3",
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}
EXPERTS = QWEN | {
    "model_type": "qwen3_moe", "head_dim": 32, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 48
}  # fmt: skip
FIELDS = {
    "recompute, sequences": ({**SPLIT, "recompute": True}, False),
    "recompute, sharded": ({**SHARED, "recompute": True}, True),
    "a model of transformers": ({**SHARED, "model": QWEN | {"intermediate_size": 64, "head_dim": 32}}, False),
    "the same, sharded": ({**SHARED, "model": QWEN | {"intermediate_size": 64, "head_dim": 32}}, True),
    "experts": ({**SHARED, "model": EXPERTS}, False),
    "muon": ({**SHARED, "optimizer": "muon"}, False),
    "moments in bf16, sharded": ({**SHARED, "optimizer_state": "bf16"}, True),
}


def losses(recipe: Recipe, sharded: bool, shape: dict[str, Any]) -> list[float]:
    be(sharded)
    own = {} if "model" not in shape else dict.fromkeys(("layers", "width", "heads"))
    size = SIZE | {"eval_tokens": 64} | shape  # two batches: what is asked is the training
    config = Gpt(**{name: value for name, value in size.items() if name not in own})
    return [
        metrics["train/loss"]
        for _, metrics, *_ in config.records(TrialRun(recipe, 0, "emulated", "cpu", UNMEASURED))
    ]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning")
@pytest.mark.parametrize("case", FIELDS)
def test_what_else_a_run_may_ask_for_works_on_ranks_too(case):
    shape, sharded = FIELDS[case]
    wanted = losses(PRESETS["nvfp4"](), False, shape)
    assert in_ranks(2, losses, PRESETS["nvfp4"](), sharded, shape)[0] == pytest.approx(
        wanted, rel=2e-4
    )  # as above


@pytest.mark.slow
def test_master_weights_in_bf16_may_be_sharded():
    recipe = PRESETS["nvfp4"]().model_copy(update={"weights": Weights(master="bf16")})
    wanted = losses(recipe, False, SHARED)
    assert in_ranks(2, losses, recipe, True, SHARED)[0] == pytest.approx(wanted, rel=2e-4)  # as above


@pytest.mark.slow
@pytest.mark.parametrize("shape", [SHARED, SPLIT], ids=["micro-batches", "sequences"])
def test_every_rank_adds_the_noise_of_the_whole_run_to_its_norms(shape):
    recipe = PRESETS["bf16"]()
    noisy = recipe.model_copy(update={"weights": Weights(noise=Noise(start=1.0, end=1.0, stages=3))})
    shape = shape | {"lr": 3e-3}
    wanted, without = losses(noisy, False, shape), losses(recipe, False, shape)
    assert in_ranks(2, losses, noisy, False, shape)[0] == pytest.approx(wanted, rel=2e-4)  # as above
    assert max(abs(a / b - 1) for a, b in zip(wanted, without, strict=True)) > 1e-3


def amaxes(shape: dict[str, Any]) -> list[float]:
    """Return the amaxes of the first step that every operand of a delayed recipe remembers."""
    be(False)
    config = Gpt(**SIZE | shape)
    loop = Loop(config.prepare(PRESETS["fp8_delayed"](), 0, "cpu"), config, UNMEASURED)
    loop.step(0)
    return [float(kept[0]) for kept in loop.run.engine.histories(0)]


@pytest.mark.parametrize("shape", [SHARED, SPLIT], ids=["micro-batches", "sequences"])
def test_every_rank_remembers_the_largest_amax_that_any_saw(shape):
    wanted = amaxes(shape)
    assert len(wanted) == 6 * 4 * SIZE["layers"]
    assert in_ranks(2, amaxes, shape) == [wanted, wanted]


# Checkpoints


def trained(
    path: Any, sharded: bool, until: int | None = None, telemetry: Telemetry = UNMEASURED
) -> list[tuple[int, dict]]:
    """The records of a run that goes on from the checkpoint there, if one is, and is ended after a step, if one is given."""
    rank = be(sharded).rank
    checkpoints = None if rank else Checkpoints(path, "trial", 0)
    found = []
    told = Gpt(**SIZE | SHARED).records(
        TrialRun(variants()["fp8_delayed"], 0, "emulated", "cpu", telemetry, checkpoints)
    )
    for step, metrics, *_ in told:
        found.append((step, {k: v for k, v in metrics.items() if not k.startswith(CLOCKS)}))
        if step == until:
            break
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "then"),
    [((1, False), (2, True)), ((4, True), (2, False))],
)
def test_any_number_of_ranks_goes_on_from_a_checkpoint(first, then, tmp_path):
    path = tmp_path / "checkpoint.pt"
    in_ranks(first[0], trained, path, first[1], 2)
    state = torch.load(path, weights_only=True)  # whole: no rank's part of anything
    assert all(
        tensor.shape == its.shape
        for tensor, its in zip(state["model"].values(), _fresh().values(), strict=True)
    )
    gone_on = in_ranks(then[0], trained, path, then[1], 3)[0]
    wanted = alone("fp8_delayed", True)
    left = torch.load(path, weights_only=True)["engine"]["layers"]
    for name, layer in state["engine"]["layers"].items():
        for slot, amaxes in layer["histories"].items():
            assert amaxes.items() < left[name]["histories"][slot].items(), (name, slot)
    assert [step for step, _ in gone_on] == [2, 3]
    for (_, mine), (_, its) in zip(gone_on, wanted[1:], strict=True):
        assert mine["train/loss"] == pytest.approx(its["train/loss"], rel=2e-4)  # as above


def functional(path: Any) -> list[str]:
    """From where a sharded run, which goes on from a checkpoint, calls torch's functional collectives."""
    calls = []

    def waits(tensor: torch.Tensor) -> torch.Tensor:
        calls.append("".join(traceback.format_stack(limit=12)))
        return wait(tensor)

    wait, collectives.wait_tensor = collectives.wait_tensor, waits
    trained(path, True, telemetry=MEASURED)
    return calls


@pytest.mark.slow
def test_a_sharded_run_keeps_away_from_functional_collectives(tmp_path):
    """They corrupt memory where they go through gloo, too rarely for a test to meet."""
    path = tmp_path / "checkpoint.pt"
    in_ranks(2, trained, path, True, 2)
    assert in_ranks(2, functional, path) == [[], []]


def _fresh() -> dict[str, torch.Tensor]:
    be(False)
    return Gpt(**SIZE | SHARED).prepare(PRESETS["bf16"](), 0, "cpu").model.state_dict()


# The gather of sharded weights


def gathered_operands() -> list[str]:
    """Layers and slots whose gathered operand is not the one that the whole weight gives, over all recipes."""
    off, config = [], Gpt(**SIZE | SHARED | {"layers": 1})
    for name, recipe in variants().items():
        if [*Layout(2, True).misfits(config, recipe, "emulated")]:
            continue
        be(False)
        whole = config.prepare(recipe, 0, "cpu").engine
        be(True)
        parts = config.prepare(recipe, 0, "cpu").engine
        for (layer, ours), theirs in zip(parts.layers.items(), whole.layers.values(), strict=True):
            for slot, product in (("fprop.w", recipe.fprop), ("dgrad.w", recipe.dgrad)):
                pair = []
                for one, weight in (
                    (ours, ours.weight.to_local().detach()),
                    (theirs, theirs.weight.detach()),
                ):
                    pair.append(one.weight_operand(slot, product.w, product.hadamard, weight))
                for mine, its in zip(*pair, strict=True):
                    if not torch.equal(mine.dequantize(), its.dequantize()) or not torch.equal(
                        mine.values, its.values
                    ):
                        off.append(f"{name} {layer} {slot}")
    return off


@pytest.mark.slow
def test_a_gathered_weight_is_the_operand_that_the_whole_weight_gives():
    assert in_ranks(2, gathered_operands) == [[], []]


def bytes_of_one_step(name: str) -> tuple[int, int]:
    """Bytes that a step's products asked for, and those that they would have asked for in bf16."""
    be(True)
    config = Gpt(**SIZE | SHARED)
    loop = Loop(config.prepare(variants()[name], 0, "cpu"), config, Telemetry())
    with loop.run.engine.high_precision():  # all in bf16
        loop.gradient(0)
    loop.run.engine.at(0, loop.plan)
    before = loop.run.engine.traffic()
    loop.gradient(0)
    return tuple(now - then for now, then in zip(loop.run.engine.traffic(), before, strict=True))


@pytest.mark.slow
def test_gathering_codes_and_scales_moves_fewer_bytes_and_says_how_many():
    shapes = [(192, 64), (64, 64), (2 * 192, 64), (64, 192)] * SIZE["layers"]
    weights, micro_batches = sum(rows * columns for rows, columns in shapes), 2
    products = {
        "bf16": 1,
        "nvfp4": 2,
    }  # a plain layer keeps what fprop took; of NVFP4, dgrad takes a copy of its own
    for name, copies in products.items():
        gathered, in_bf16 = in_ranks(2, bytes_of_one_step, name)[0]
        print(
            f"\n{name}: {gathered:,} bytes gathered for a step's products, {in_bf16:,} in bf16, {1 - gathered / in_bf16:.1%} saved"
        )
        assert in_bf16 == 2 * weights * copies * micro_batches
        amaxes = 4 * len(shapes) * copies * micro_batches
        codes_and_scales = (
            weights * copies * micro_batches * (1 / 2 + 1 / 256)
        )  # 4 bits an element, a byte for 16x16 of them
        assert gathered == (in_bf16 if name == "bf16" else codes_and_scales + amaxes)


@pytest.mark.parametrize(
    ("quant", "rotation", "shape", "fits"),
    [
        (Quant(), None, (16, 64), True),
        (Quant(block="16x16"), None, (16, 64), True),
        (Quant(block="16x16"), None, (8, 64), False),
        (Quant(outer=Outer(statistic="delayed:4")), None, (16, 64), False),
        (Quant(outer=Outer(statistic="static:1.0")), None, (16, 64), False),  # which would hide a NaN
        (Quant(outer=Outer(granularity="row")), None, (16, 64), False),
        (Quant(), Hadamard(signs="per_step"), (16, 64), True),
        (Quant(), Hadamard(signs="per_call"), (16, 64), False),  # each rank is in another micro-batch
        (Quant(rounding="stochastic"), None, (16, 64), False),
        (Quant(element="e4m3", block=None, scale=None, outer=Outer(bound=1.0)), None, (16, 64), False),
        (None, None, (16, 64), False),
    ],
)
def test_what_cannot_be_packed_in_parts_is_gathered_in_bf16(quant, rotation, shape, fits):
    assert packs(quant, rotation, torch.ones(shape), Partition(0, 0, 2)) is fits


def uneven(shape: dict[str, Any]) -> list[float]:
    """A run of three ranks, among whom the rows of some weights do not come out even."""
    found = losses(PRESETS["nvfp4"](), True, shape)
    be(True)
    layers = Gpt(**SIZE | shape).prepare(PRESETS["nvfp4"](), 0, "cpu").engine.layers.values()
    assert {layer.sharded is None for layer in layers} == {True, False}
    return found


@pytest.mark.slow
def test_layers_whose_rows_do_not_come_out_even_are_sharded_as_everything_else():
    shape = {"batch": 1, "accumulate": 3}
    assert in_ranks(3, uneven, shape)[0] == pytest.approx(
        losses(PRESETS["nvfp4"](), False, shape), rel=2e-4
    )  # as above


# What cannot be laid out


def laid_out(recipe: Recipe, layout: Layout, engine: str = "emulated", **changes: Any) -> str:
    return "; ".join(layout.misfits(Gpt(**SIZE | changes), recipe, engine))


@pytest.mark.parametrize(
    ("layout", "recipe", "changes", "said"),
    [
        (
            Layout(3),
            Recipe(),
            SPLIT,
            "3 ranks share the 1 micro-batch of a step, 3 one each, and 3 does not divide workload.batch 4",
        ),
        (
            Layout(4),
            Recipe(),
            {"batch": 1, "accumulate": 2},
            "4 ranks share the 2 micro-batches of a step, 2 one each, and 2 does not",
        ),
        (
            Layout(2),
            Recipe(),
            SHARED | {"compile": True},
            "workload.compile compiles for one rank; leave it out, or use 1 instead of 2",
        ),
        (
            Layout(2),
            Recipe(fprop=Fprop(x=Quant(outer=Outer(statistic="hold:4")))),
            SHARED,
            "recipe.fprop.x.outer.statistic hold takes the amax of the step's first micro-batch, which one rank sees; use accumulate 1",
        ),
        (
            Layout(2),
            Recipe(fprop=Fprop(x=Quant(transform=Transform(mean=True)))),
            SPLIT,
            "recipe.fprop.x.transform looks at the whole",
        ),
        (
            Layout(2),
            Recipe(wgrad=Wgrad(x=Quant(), g=Quant(), hadamard=Hadamard(size=64))),
            {"batch": 2, "context": 32},
            "32 tokens, which cuts a block of recipe.wgrad.hadamard; a workload.accumulate that is a multiple of 2 gives each rank",
        ),
        (
            Layout(2),
            Recipe(wgrad=Wgrad(x=Quant())),
            {"batch": 2, "context": 24},
            "24 tokens, which cuts a block of recipe.wgrad.x",
        ),
        (
            Layout(2),
            Recipe(),
            SPLIT | {"experts": {"count": 4}},
            "the loss of this workload is of whole batches",
        ),
        (Layout(2, True), Recipe(), SHARED | {"experts": {"count": 4}}, "its experts' weights are packed;"),
        (
            Layout(2, True),
            Recipe(),
            SHARED | {"optimizer": "muon"},
            "sharded: optimizer muon orthogonalises whole matrices; use adamw",
        ),
        (
            Layout(2, True),
            Recipe(fprop=Fprop(w=Quant()), weights=Weights(osci_reset=OsciReset())),
            SHARED,
            "sharded: recipe.weights.osci_reset looks at whole weights; leave sharded out",
        ),
        (
            Layout(2, True),
            Recipe(weights=Weights(noise=Noise())),
            SHARED,
            "sharded: recipe.weights.noise changes whole norms; leave sharded out",
        ),
        (
            Layout(2),
            Recipe(
                schedule=(
                    Phase(start="step:2", use=Products(fprop=Fprop(x=Quant(transform=Transform(mean=True))))),
                )
            ),
            SPLIT,
            "recipe.fprop.x.transform looks at the whole of one",
        ),
    ],
)
def test_what_ranks_cannot_share_is_refused_with_the_way_out(layout, recipe, changes, said):
    assert said in laid_out(recipe, layout, **changes)


def test_what_they_can_is_not():
    assert (
        laid_out(PRESETS["nvfp4"](), Layout(2), **SHARED)
        == laid_out(PRESETS["nvfp4"](), Layout(4, True), **SPLIT)
        == ""
    )
    assert "engine transformer_engine does not do" in laid_out(
        PRESETS["nvfp4"](), Layout(2), "transformer_engine", **SPLIT
    )
    assert laid_out(PRESETS["nvfp4"](), Layout(2), "transformer_engine", **SHARED) == ""
    assert Training().divisible is Training().shardable is False
