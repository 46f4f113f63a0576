"""The emulated linear layer: three products as Transformer Engine's reference computes them, and nn.Linear where nothing is quantised."""

import itertools
import math
import random
import subprocess
import sys
from copy import deepcopy

import pytest
import torch
from oracles import te
from support.cases import every
from support.experiments import environment
from support.linears import ANYWHERE, Each, Watch, drawn, exact, layer, run
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils._python_dispatch import TorchDispatchMode

from ablate.engines.blocks import block_finder, find_blocks, layer_table
from ablate.engines.emulated import convert
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.nonfinite import NonfiniteCount, total
from ablate.numerics.hadamard import rotate
from ablate.numerics.philox import Clock, site
from ablate.numerics.quantize import pad, quantize
from ablate.numerics.spec import Hadamard, Quant
from ablate.recipes import PRESETS, SLOTS, Recipe
from ablate.recipes.layers import block_of
from ablate.recipes.recipe import Layers, Phase, Rule, Run

SHAPES = [
    (32, 32, 32),
    (64, 96, 32),
    (32, 64, 160),
    (256, 128, 96),
]  # tokens, in, out: TE needs multiples of 32
NVFP4 = PRESETS["nvfp4"]()


def exact_outputs(recipe: Recipe) -> Recipe:
    """The same recipe with every product left in fp32, and gradients rounded to nearest."""
    recipe, nearest = exact(recipe), Quant()
    return recipe.model_copy(
        update={name: getattr(recipe, name).model_copy(update={"g": nearest}) for name in ("dgrad", "wgrad")}
    )


def te_products(x: Tensor, w: Tensor, dy: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
    """TE's reference y, dx and dw in fp32, each beside its sum of magnitudes (what the order of additions can move)."""
    gemm = te.reference().gemm.custom_gemm
    qx, qdy = (te.quantizer((1, 16), rht=True).quantize(t.bfloat16()) for t in (x, dy))
    qw = te.quantizer((16, 16)).quantize(w.bfloat16())

    def magnitude(a, scale_a, b, scale_b, amaxes):
        return (
            te.values(a, scale_a).abs() @ te.values(b, scale_b).abs().t() * (amaxes[0] * amaxes[1] / 2688**2)
        )

    def call(a, b, layout, grad):
        return gemm(a, b, None, out_dtype=torch.float32, layout=layout, grad=grad)[0]

    row, column = (lambda q: q.global_amax_row), (lambda q: q.global_amax_col)
    return {
        "y": (call(qw, qx, "TN", False), magnitude(qx.data, qx.scale, qw.data, qw.scale, (row(qx), row(qw)))),
        "dx": (
            call(qw, qdy, "NN", True),
            magnitude(qdy.data, qdy.scale, qw.data_t, qw.scale_t, (row(qdy), column(qw))),
        ),
        "dw": (
            call(qx, qdy, "NT", True),
            magnitude(qdy.data_t, qdy.scale_t, qx.data_t, qx.scale_t, (column(qdy), column(qx))),
        ),
    }


@pytest.mark.parametrize("outliers", [False, True])
@pytest.mark.parametrize("shape", SHAPES)
def test_forward_and_backward_equal_transformer_engines_reference(shape, outliers):
    tokens, inputs, outputs = shape
    x, w, dy = (
        drawn(tokens, inputs, seed=1, outliers=outliers),
        drawn(outputs, inputs, seed=2),
        drawn(tokens, outputs, seed=3, outliers=outliers),
    )
    mine = dict(zip(("y", "dx", "dw"), run(layer(exact_outputs(NVFP4), w), x, dy), strict=True))
    contraction = {"y": inputs, "dx": outputs, "dw": tokens}
    for name, (theirs, magnitude) in te_products(x, w, dy).items():
        # Two orders of fp32 additions: each within K units of 2^-24 of the sum of magnitudes; alpha rounds once more.
        bound = 2 * (contraction[name] + 2) * 2.0**-24 * magnitude
        assert mine[name].dtype == torch.float32
        assert ((mine[name] - theirs).abs() <= bound).all(), name


def test_bf16_products_are_the_fp32_ones_rounded_once():
    # The order of additions moves a value across a rounding boundary: 7e-6 of the outputs measured, by one ulp; and sums
    # that nearly cancel by as much as their largest terms are rounded, one fp32 ulp of the largest output.
    x, w, dy = drawn(512, 512, seed=1), drawn(512, 512, seed=2), drawn(512, 512, seed=3)
    wide = exact_outputs(NVFP4)
    narrow = wide.model_copy(
        update={
            "fprop": wide.fprop.model_copy(update={"gemm": "bf16_out"}),
            "dgrad": wide.dgrad.model_copy(update={"gemm": "bf16_out"}),
            "wgrad": wide.wgrad.model_copy(update={"dw": "bf16"}),
        }
    )
    for whole, rounded in zip(run(layer(wide, w), x, dy), run(layer(narrow, w), x, dy), strict=True):
        expected, mine = whole.bfloat16(), rounded.bfloat16()
        assert torch.equal(mine.float(), rounded)
        differs = expected != mine
        assert differs.double().mean() <= 1e-4
        one_ulp = 2.0**-7 * torch.maximum(expected.abs(), mine.abs())[differs]
        assert ((expected - mine)[differs].abs() <= one_ulp + 2.0**-23 * expected.abs().max()).all()


# --- what is drawn, and for what ------------------------------------------------------------------


def watched(recipe: Recipe, clock: Clock | None = None, tokens=64, inputs=48, outputs=80) -> dict:
    module = layer(recipe, drawn(outputs, inputs, seed=2), clock=clock)
    module.context.probe = Watch()
    run(module, drawn(tokens, inputs, seed=1), drawn(tokens, outputs, seed=3))
    return module.context.probe.seen


def test_the_probe_sees_every_quantised_operand_as_it_was_quantised():
    seen = watched(NVFP4)
    x, w, dy = (
        drawn(64, 48, seed=1).bfloat16(),
        drawn(80, 48, seed=2).bfloat16(),
        drawn(64, 80, seed=3).bfloat16(),
    )
    originals = {
        "fprop.x": x,
        "fprop.w": w,
        "dgrad.g": dy,
        "dgrad.w": w.t(),
        "wgrad.g": dy.t(),
        "wgrad.x": x.t(),
    }
    assert set(seen) == set(SLOTS)
    for slot, tensor in originals.items():
        rotation = NVFP4.wgrad.hadamard if slot.startswith("wgrad") else None
        expected = quantize(
            tensor,
            NVFP4.slot(slot),
            rotation=rotation,
            clock=Clock(0),
            where=site("blocks.0.linear", slot),
            keep=True,
        )
        assert torch.equal(seen[slot].values, expected.values), slot
        assert torch.equal(seen[slot].source, expected.source), slot
        assert seen[slot].amax == expected.amax


def test_listening_changes_no_bit():
    x, w, dy = drawn(64, 48, seed=1), drawn(80, 48, seed=2), drawn(64, 80, seed=3)
    silent, loud = layer(NVFP4, w), layer(NVFP4, w)
    loud.context.probe = Watch()
    assert all(torch.equal(a, b) for a, b in zip(run(silent, x, dy), run(loud, x, dy), strict=True))


def test_the_probe_receives_the_three_products_before_the_bias():
    x, w, dy = drawn(64, 48, seed=1), drawn(80, 48, seed=2), drawn(64, 80, seed=3)
    module = layer(NVFP4, w, drawn(80, seed=4))
    module.context.probe = watch = Watch()
    y, dx, dw = run(module, x, dy)[:3]
    assert torch.equal((watch.results["fprop"] + module.bias).to(y.dtype), y)
    assert torch.equal(watch.results["dgrad"].to(dx.dtype), dx)
    assert torch.equal(watch.results["wgrad"].to(dw.dtype), dw)


def test_a_copy_of_a_layer_reports_to_no_probe():
    module = layer(NVFP4, drawn(80, 48, seed=2))
    module.context.probe = Watch()
    copied = deepcopy(module)
    copied(drawn(64, 48, seed=1))
    assert module.context.probe.seen == {}


def test_a_copy_of_a_copy_has_the_history_of_the_copy_not_of_the_training():
    module = layer(NVFP4, drawn(80, 48, seed=2))
    average = deepcopy(module)
    average.histories["fprop.x"].amax[1], module.histories["fprop.x"].amax[1] = 2.0, 8.0
    module.clock.stream = "evaluation"
    average.follow()
    assert average.histories is module.histories
    again = deepcopy(average)
    module.clock.stream = "training"
    again.follow()
    assert again.histories["fprop.x"].amax == {1: 2.0}


def test_in_nvfp4_the_rotation_runs_along_tokens_of_the_weight_gradient_alone():
    seen = watched(NVFP4)
    x, dy = drawn(64, 48, seed=1).bfloat16(), drawn(64, 80, seed=3).bfloat16()
    assert torch.equal(seen["wgrad.x"].source, rotate(x.t().contiguous(), Hadamard()).float())
    assert torch.equal(seen["wgrad.g"].source, rotate(dy.t().contiguous(), Hadamard()).float())
    assert torch.equal(seen["fprop.x"].source, x.float())
    assert torch.equal(seen["dgrad.g"].source, dy.float())


def test_x_and_dy_carry_two_amaxes_each():
    seen = watched(NVFP4)
    assert seen["fprop.x"].amax != seen["wgrad.x"].amax
    assert seen["dgrad.g"].amax != seen["wgrad.g"].amax
    assert seen["fprop.w"].amax == seen["dgrad.w"].amax


def test_in_nvfp4_a_new_seed_changes_the_copies_of_the_gradient_and_nothing_else():
    first, second = watched(NVFP4, Clock(1)), watched(NVFP4, Clock(2))
    changed = {slot for slot in SLOTS if not torch.equal(first[slot].values, second[slot].values)}
    assert changed == {"dgrad.g", "wgrad.g"}


def test_the_two_copies_of_the_gradient_draw_independent_bits():
    # A symmetric dy of 2.5, with a 6 in every block of 16 rows or columns: both copies round the same 2.5, halfway up.
    recipe = NVFP4.model_copy(update={"wgrad": NVFP4.wgrad.model_copy(update={"hadamard": None})})
    module = layer(recipe, torch.zeros(256, 32))
    module.context.probe = Watch()
    top = torch.eye(16).repeat(16, 16).bool()
    run(module, torch.zeros(256, 32), torch.where(top, 6.0, 2.5))
    row, column = (
        module.context.probe.seen["dgrad.g"].dequantize(),
        module.context.probe.seen["wgrad.g"].dequantize(),
    )
    for other in (column, column.t()):  # as each is laid out, and element for element
        up = torch.stack(((row[~top] > 2.5).double(), (other[~top] > 2.5).double()))
        assert (up.mean(1) - 0.5).abs().max() < 0.02
        assert (
            abs(torch.corrcoef(up)[0, 1]) < 0.02
        )  # 61,440 pairs: independent ones have standard deviation 0.004


def test_the_backward_pass_draws_by_the_clock_and_repeats_itself():
    x, w, dy = drawn(64, 48, seed=1), drawn(80, 48, seed=2), drawn(64, 80, seed=3)
    module = layer(NVFP4, w, clock=Clock(5))
    first, again = run(module, x, dy), run(module, x, dy)
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    module.clock.step = 1
    later = run(module, x, dy)
    assert torch.equal(first[0], later[0])
    assert not torch.equal(first[1], later[1])
    assert not torch.equal(first[2], later[2])


def test_a_non_finite_operand_is_counted():
    module = layer(NVFP4, drawn(32, 32, seed=2))
    assert int(module.nonfinite) == 0
    x = drawn(32, 32, seed=1)
    module(x)
    assert int(module.nonfinite) == 0
    x[3, 4] = float("inf")
    module(x)
    assert int(module.nonfinite) == 1


# --- shapes ---------------------------------------------------------------------------------------


@pytest.mark.parametrize(("tokens", "inputs", "outputs"), [(1, 1, 1), (5, 17, 33), (31, 48, 7), (33, 16, 50)])
def test_any_shape_equals_the_zero_padded_one(tokens, inputs, outputs):
    recipe = exact_outputs(NVFP4)
    x, w, dy = drawn(tokens, inputs, seed=1), drawn(outputs, inputs, seed=2), drawn(tokens, outputs, seed=3)
    small = run(layer(recipe, w), x, dy)
    large = run(layer(recipe, pad(w, 16, 16)), pad(x, 16, 16), pad(dy, 16, 16))
    for mine, padded, shape in zip(
        small, large, ((tokens, outputs), (tokens, inputs), (outputs, inputs)), strict=True
    ):
        assert mine.shape == shape
        # Equal operands (tested bit for bit in test_quantize), another order of at most 64 additions in fp32.
        torch.testing.assert_close(mine, padded[: shape[0], : shape[1]], rtol=1e-5, atol=1e-5)


def test_leading_dimensions_are_tokens():
    x, w, dy = drawn(6, 32, seed=1), drawn(48, 32, seed=2), drawn(6, 48, seed=3)
    flat = run(layer(NVFP4, w), x, dy)
    deep = run(layer(NVFP4, w), x.view(2, 3, 32), dy.view(2, 3, 48))
    assert deep[0].shape == (2, 3, 48)
    assert all(torch.equal(a.flatten(), b.flatten()) for a, b in zip(flat, deep, strict=True))


@pytest.mark.parametrize(
    ("preset", "dtype", "bias"),
    [
        ("bf16", torch.bfloat16, True),
        ("fp32", torch.float32, True),
        ("nvfp4", torch.bfloat16, False),
        ("nvfp4", torch.float32, True),
        ("nvfp4", torch.bfloat16, True),
        ("bf16", torch.float32, False),
        ("fp32", torch.bfloat16, False),
    ],
)
def test_the_output_is_in_the_inputs_dtype(preset, dtype, bias):
    module = layer(PRESETS[preset](), drawn(32, 32, seed=2), drawn(32, seed=4) if bias else None)
    assert module(drawn(16, 32, seed=1).to(dtype)).dtype == dtype


def test_the_bias_is_added_to_the_product_and_its_gradient_is_that_of_the_unquantised_output_gradient():
    x, w, b, dy = drawn(32, 32, seed=1), drawn(48, 32, seed=2), drawn(48, seed=4), drawn(32, 48, seed=3)
    without, with_bias = layer(exact_outputs(NVFP4), w), layer(exact_outputs(NVFP4), w, b)
    assert torch.equal(run(with_bias, x, dy)[0], run(without, x, dy)[0] + b)
    torch.testing.assert_close(with_bias.bias.grad, dy.sum(0), rtol=1e-6, atol=1e-5)  # fp32 sums of 32 terms


def test_a_frozen_input_or_weight_costs_no_product():
    module = layer(NVFP4, drawn(32, 32, seed=2))
    module.weight.requires_grad_(False)
    module.context.probe = Watch()
    x = drawn(32, 32, seed=1).requires_grad_()
    module(x).sum().backward()
    assert x.grad is not None
    assert not any(slot.startswith("wgrad") for slot in module.context.probe.seen)


@pytest.mark.parametrize("shape", [(48, 32), (40, 24)], ids=["whole blocks", "padded"])
def test_a_weight_that_stays_is_quantised_once_and_to_the_same_bits(shape):
    net = nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.Linear(shape[1], shape[0], bias=False))])})
    engine = convert(net, NVFP4, Clock(0))
    engine.at(0, Run(10, 1))
    (linear,) = engine.layers.values()
    made, operand = [], linear.operand
    linear.operand = lambda x, slot, *how: made.append(slot) or operand(x, slot, *how)

    def products() -> list[Tensor]:
        return [
            z
            for batch in range(3)
            for z in run(linear, drawn(32, shape[1], seed=batch), drawn(32, shape[0], seed=9))
        ]

    expected = products()
    assert (made.count("fprop.w"), made.count("dgrad.w")) == (3, 3)
    made.clear()
    with engine.still_weights():
        assert all(torch.equal(a, b) for a, b in zip(products(), expected, strict=True))
        assert (made.count("fprop.w"), made.count("dgrad.w")) == (1, 0 if shape == (48, 32) else 1)
    with torch.no_grad():
        linear.weight.mul_(3.0)
    with engine.still_weights():
        assert not torch.equal(products()[0], expected[0])


def test_a_weight_whose_rounding_is_drawn_is_quantised_each_time():
    stochastic = NVFP4.model_copy(
        update={"fprop": NVFP4.fprop.model_copy(update={"w": Quant(rounding="stochastic")})}
    )
    net = nn.ModuleDict({"blocks": nn.ModuleList([nn.Sequential(nn.Linear(32, 48, bias=False))])})
    engine = convert(net, stochastic, Clock(0))
    engine.at(0, Run(10, 1))
    (linear,) = engine.layers.values()
    with engine.still_weights():
        linear.clock.micro_batch = 0
        first = linear(drawn(32, 32, seed=1))
        linear.clock.micro_batch = 1
        assert not torch.equal(linear(drawn(32, 32, seed=1)), first)


# --- convert --------------------------------------------------------------------------------------


def model(blocks: int = 1, bias: bool = False, seed: int = 0) -> nn.Module:
    """Two linears a block, an embedding-like linear before and a head behind them."""
    outside = {"stem": nn.Linear(32, 32, bias=bias), "head": nn.Linear(32, 16, bias=bias)}
    inner = [
        nn.Sequential(nn.Linear(32, 48, bias=bias), nn.GELU(), nn.Linear(48, 32, bias=bias))
        for _ in range(blocks)
    ]
    result = nn.ModuleDict({"blocks": nn.ModuleList(inner), **outside})
    g = torch.Generator().manual_seed(seed)
    for parameter in result.parameters():
        parameter.data.copy_(torch.randn(parameter.shape, generator=g) * 0.2)
    return result


@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize(("preset", "dtype"), [("bf16", torch.bfloat16), ("fp32", torch.float32)])
def test_a_baseline_preset_is_nn_linear_bit_for_bit(preset, dtype, bias):
    converted, reference = model(bias=bias), model(bias=bias).to(dtype)
    engine = convert(converted, PRESETS[preset](), Clock(0))
    engine.at(0, Run(1))
    x, dy = drawn(24, 32, seed=1).to(dtype), drawn(24, 48, seed=3).to(dtype)
    mine, theirs = converted["blocks"][0][0], reference["blocks"][0][0]
    assert isinstance(mine, EmulatedLinear)
    for a, b in zip(run(mine, x, dy), run(theirs, x, dy), strict=True):
        assert torch.equal(a, b.to(a.dtype))
    if bias:
        assert torch.equal(mine.bias.grad, theirs.bias.grad.to(mine.bias.grad.dtype))


@every(preset=ANYWHERE)
def test_convert_keeps_names_values_and_state_dicts(preset):
    converted, original = model(2, bias=True), model(2, bias=True)
    parameters = dict(converted.named_parameters())
    convert(converted, PRESETS[preset](), Clock(0))
    assert [*converted.state_dict()] == [*original.state_dict()]
    assert all(parameter is parameters[name] for name, parameter in converted.named_parameters())
    assert all(
        torch.equal(a, b)
        for a, b in zip(converted.state_dict().values(), original.state_dict().values(), strict=True)
    )
    assert not converted.load_state_dict(original.state_dict()).missing_keys


def test_convert_leaves_layers_outside_the_blocks_alone():
    converted = model(2)
    engine = convert(converted, NVFP4, Clock(0))
    assert type(converted["stem"]) is type(converted["head"]) is nn.Linear
    assert set(engine.layers) == {
        f"blocks.{block}.{part}" for block, part in itertools.product((0, 1), (0, 2))
    }


class MambaMixer(nn.Module):
    def __init__(self):
        super().__init__()
        self.in_proj, self.dt_proj = nn.Linear(32, 32), nn.Linear(32, 32)


def mixture(number: int, **modules: nn.Module) -> nn.Module:
    """A block with experts, a gate for each of `number` experts, and further modules."""
    block = nn.Module()
    for name, module in {
        "experts": nn.ModuleList([nn.Linear(32, 32) for _ in range(number)]),
        "gate": nn.Linear(32, 4),
        **modules,
    }.items():
        block.add_module(name, module)
    return block


EXEMPT = {
    "a gate beside experts": (mixture(4), {"gate"}),
    "a gate of another number of outputs": (mixture(3), set()),
    "a module of gates": (mixture(4, gate=nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 4))), {"gate.1"}),
    "routers": (
        mixture(3, router=nn.Sequential(nn.Linear(32, 32)), router_gate=nn.Linear(32, 8)),
        {"router.0", "router_gate"},
    ),
    "the scale of a shared expert": (mixture(3, shared_expert_gate=nn.Linear(32, 1)), {"shared_expert_gate"}),
    "a weight that its module uses": (mixture(3, mamba=MambaMixer()), {"mamba.dt_proj"}),
    "kept in fp32": (
        mixture(
            3,
            indexer=nn.ModuleDict({"fp32_proj": nn.Linear(32, 32), "fp32_proj_2": nn.Linear(32, 32)}),
            mlp=nn.ModuleDict({"up": nn.ModuleDict({"kept": nn.Linear(32, 32)}), "mine": nn.Linear(32, 32)}),
        ),
        {"indexer.fp32_proj", "mlp.up.kept"},
    ),
    "not of Mamba": (mixture(3, mlp=nn.ModuleDict({"dt_proj": nn.Linear(32, 32)})), set()),
}


@pytest.mark.parametrize("case", EXEMPT)
def test_routers_and_weights_that_a_module_multiplies_by_itself_stay_in_high_precision(case):
    """The name of the list of blocks says nothing about the layers in it."""
    block, expected = EXEMPT[case]
    model = nn.ModuleDict({"router": nn.ModuleDict({"layers": nn.ModuleList([block])})})
    model._keep_in_fp32_modules_strict = ["fp32_proj", "mlp.*kept", "_proj"]
    names = {name for name, module in block.named_modules() if type(module) is nn.Linear}
    table = {row.name: row for row in layer_table(model, block_finder(find_blocks(model)))}
    prefix = "router.layers.0."
    assert {name for name in names if table[prefix + name].reason != "not converted"} == expected
    converted = convert(deepcopy(model), NVFP4, Clock(0), block_finder(find_blocks(model))).layers
    assert {name.removeprefix(prefix) for name in converted} == names - expected


@pytest.mark.parametrize(
    "match",
    [
        {"within": "Foo"},
        {"name": "blocks.7.*"},
        {"blocks": "2-3"},
        {"name": "blocks.0.0", "blocks": "last:1"},
    ],
)
@pytest.mark.parametrize("number", [0, 1])
def test_a_rule_that_selects_no_layer_of_a_model_is_refused_when_that_is_converted(match, number):
    rules = [Rule(match="*.0"), Rule(match="*.2")]
    rules[number] = Rule(match=match)
    with pytest.raises(ValueError, match=rf"^layers\.rules\.{number}\.match: "):
        convert(model(2), NVFP4.model_copy(update={"layers": Layers(rules=tuple(rules))}), Clock(0))


def test_a_rule_decides_by_blocks_names_and_classes_together_in_a_built_model():
    rules = (Rule(match={"blocks": "last:1", "name": "*.2", "within": "Sequential"}),)
    engine = convert(model(3), NVFP4.model_copy(update={"layers": Layers(rules=rules)}), Clock(0))
    engine.at(0, Run(1))
    assert [name for name, linear in engine.layers.items() if linear.products.plain] == ["blocks.2.2"]


@pytest.mark.parametrize(
    ("layers", "expected"),
    [
        (Layers(), {0, 1, 2, 3}),
        (Layers(skip_first=1), {1, 2, 3}),
        (Layers(skip_last=2), {0, 1}),
        (Layers(last_fraction=0.3), {0, 1}),
        (Layers(skip_first=1, skip_last=1), {1, 2}),
    ],
)
def test_a_layer_policy_decides_which_blocks_quantise(layers, expected):
    converted = model(4)
    engine = convert(converted, NVFP4.model_copy(update={"layers": layers}), Clock(0))
    engine.at(0, Run(1))
    seen = set()
    engine.listen(Each(lambda name, slot, operand: seen.add(block_of(name))))
    x = drawn(16, 32, seed=1).bfloat16()
    for block in converted["blocks"]:
        x = block(x)
    assert seen == expected
    assert {block_of(name) for name, linear in engine.layers.items() if not linear.products.plain} == expected


@every(
    start__first=[("step:2", 2), ("fraction:0.5", 3), ("step:0", 0), ("fraction:1", 6)],
    slots=["all", "forward", "backward"],
)
def test_a_phase_switches_its_products_at_its_step(slots, start, first):
    converted = model()
    engine = convert(
        converted, NVFP4.model_copy(update={"schedule": (Phase(start=start, slots=slots),)}), Clock(0)
    )
    x, dy, linear = drawn(16, 32, seed=1).bfloat16(), drawn(16, 48, seed=3), converted["blocks"][0][0]
    switched = {
        "all": set(SLOTS),
        "forward": {"fprop.x", "fprop.w"},
        "backward": set(SLOTS) - {"fprop.x", "fprop.w"},
    }[slots]
    for step in range(6):
        engine.at(step, Run(6))
        watch = Watch()
        engine.listen(watch)
        run(linear, x, dy)
        assert set(watch.seen) == set(SLOTS) - (switched if step >= first else set())


@pytest.mark.parametrize("slots", ["forward", "backward"])
def test_a_direction_in_high_precision_is_nn_linears(slots):
    recipe = NVFP4.model_copy(update={"schedule": (Phase(start="step:0", slots=slots),)}).at(0, Run(1))
    x, w, dy = drawn(32, 32, seed=1).bfloat16(), drawn(48, 32, seed=2), drawn(32, 48, seed=3).bfloat16()
    mine = run(layer(recipe, w), x, dy)
    reference = nn.Linear(32, 48, bias=False, dtype=torch.bfloat16)
    reference.weight.data.copy_(w)
    theirs = run(reference, x, dy)
    same = [torch.equal(a, b.to(a.dtype)) for a, b in zip(mine, theirs, strict=True)]
    assert same == ([True, False, False] if slots == "forward" else [False, True, True])


def test_high_precision_overrides_the_layer_policy_inside_its_context():
    converted = model(2)
    engine = convert(converted, NVFP4, Clock(0))
    engine.at(0, Run(2))
    with engine.high_precision():
        assert all(linear.products.plain for linear in engine.layers.values())
    assert not any(linear.products.plain for linear in engine.layers.values())


# --- what convert handles or refuses --------------------------------------------------------------


def listed(name: str, *blocks: nn.Module) -> nn.Module:
    """A model whose blocks are in a list of this name, with a head behind them."""
    return nn.ModuleDict({name: nn.ModuleList(blocks), "head": nn.Linear(32, 16)})


def block(width: int = 32) -> nn.Module:
    return nn.ModuleDict({"up": nn.Linear(32, width), "down": nn.Linear(width, 32)})


@pytest.mark.parametrize(
    ("plain", "words"),
    [
        (listed("trunk", block()), ["'trunk'", "blocks, layers"]),
        (listed("blokcs", block()), ["'blokcs'", "the nearest: blocks"]),
        (nn.ModuleDict({"body": listed("stages", block())}), ["'body.stages'"]),
        (nn.Sequential(nn.Linear(32, 32)), ["no nn.Linear in a list of numbered blocks"]),
    ],
    ids=["unknown", "misspelt", "nested", "no list"],
)
def test_a_model_of_which_nothing_would_be_quantised_is_refused_with_the_names_that_would_do(plain, words):
    with pytest.raises(ValueError, match="nothing of the model would be quantised") as refused:
        convert(plain, NVFP4, Clock(0))
    assert all(word in str(refused.value) for word in words)
    assert not any(isinstance(module, EmulatedLinear) for module in plain.modules())


def test_a_second_list_of_blocks_with_an_unknown_name_is_told():
    with pytest.warns(UserWarning, match=r"not quantised: the blocks in 'trunk'"):
        engine = convert(
            nn.ModuleDict({"blocks": nn.ModuleList([block()]), "trunk": nn.ModuleList([block()])}),
            NVFP4,
            Clock(0),
        )
    assert set(engine.layers) == {"blocks.0.up", "blocks.0.down"}


def test_a_model_is_converted_once():
    converted = model(1)
    convert(converted, NVFP4, Clock(0))
    with pytest.raises(ValueError, match="converted already"):
        convert(converted, NVFP4, Clock(0))


def test_a_call_before_the_first_step_is_refused_where_something_would_be_quantised():
    converted = model(1)
    engine = convert(converted, NVFP4, Clock(0))
    x = drawn(32, 32, seed=1)
    with pytest.raises(RuntimeError, match=r"blocks\.0\.0: no step .* engine\.at"):
        converted["blocks"][0](x)
    with engine.high_precision():
        high = converted["blocks"][0](x)
    engine.at(0, Run(1))
    assert not torch.equal(converted["blocks"][0](x), high)
    baseline = model(1)
    convert(baseline, PRESETS["bf16"](), Clock(0))
    assert torch.equal(baseline["blocks"][0](x), high)


def test_a_layer_under_two_names_is_replaced_under_both():
    shared = nn.Linear(32, 32)
    converted = listed("blocks", nn.ModuleDict({"a": shared, "b": shared, "c": nn.Linear(32, 32)}))
    keys, parameters = [*converted.state_dict()], [name for name, _ in converted.named_parameters()]
    engine = convert(converted, NVFP4, Clock(0))
    first = converted["blocks"][0]
    assert isinstance(first["a"], EmulatedLinear)
    assert first["a"] is first["b"]
    assert set(engine.layers) == {"blocks.0.a", "blocks.0.c"}
    assert [*converted.state_dict()] == keys
    assert [name for name, _ in converted.named_parameters()] == parameters


def test_a_block_under_two_names_counts_as_two_and_is_refused_where_the_recipe_tells_them_apart():
    shared = block()
    engine = convert(listed("blocks", shared, shared), NVFP4, Clock(0))
    engine.at(0, Run(1))
    assert engine.names == {
        f"blocks.0.{part}": [f"blocks.0.{part}", f"blocks.1.{part}"] for part in ("up", "down")
    }
    assert engine.fp4_share() == 1.0
    apart = NVFP4.model_copy(update={"layers": Layers(skip_first=1)})
    with pytest.raises(ValueError, match=r"blocks\.0\.up and blocks\.1\.up are one layer"):
        convert(listed("blocks", shared := block(), shared), apart, Clock(0))


def test_a_layer_that_is_also_used_outside_the_blocks_is_refused():
    whole = listed("blocks", block(16))
    whole["head"] = whole["blocks"][0]["up"]
    with pytest.raises(ValueError, match=r"blocks\.0\.up and head are one nn\.Linear"):
        convert(whole, NVFP4, Clock(0))


def test_hooks_handles_mode_and_attributes_of_a_replaced_layer_stay():
    converted, called = model(1), []
    linear = converted["blocks"][0][0].eval()
    linear.note = "kept"
    handles = {
        "pre": linear.register_forward_pre_hook(lambda *_: called.append("pre")),
        "pre with kwargs": linear.register_forward_pre_hook(
            lambda *_: called.append("pre with kwargs"), with_kwargs=True
        ),
        "forward": linear.register_forward_hook(lambda *_: called.append("forward")),
        "always": linear.register_forward_hook(lambda *_: called.append("always"), always_call=True),
        "backward pre": linear.register_full_backward_pre_hook(lambda *_: called.append("backward pre")),
        "backward": linear.register_full_backward_hook(lambda *_: called.append("backward")),
        "state dict pre": linear.register_state_dict_pre_hook(lambda *_: called.append("state dict pre")),
        "state dict": linear.register_state_dict_post_hook(lambda *_: called.append("state dict")),
        "load pre": linear.register_load_state_dict_pre_hook(
            lambda module, *_: called.append(("load pre", module))
        ),
        "load": linear.register_load_state_dict_post_hook(lambda module, _: called.append(("load", module))),
    }
    linear.weight.register_hook(lambda _: called.append("parameter"))
    del linear
    convert(converted, NVFP4, Clock(0)).at(0, Run(1))
    mine = converted["blocks"][0][0]

    def moments() -> list:
        called.clear()
        run(mine, drawn(32, 32, seed=1), drawn(32, 48, seed=2))
        mine.load_state_dict(mine.state_dict())
        return called

    assert not mine.training
    assert mine.note == "kept"
    told = [*handles][:-2]
    assert sorted(map(str, moments())) == sorted(
        map(str, [*told, "parameter", ("load pre", mine), ("load", mine)])
    )
    for handle in handles.values():
        handle.remove()
    assert moments() == ["parameter"]


def test_weights_that_something_computes_and_replaced_forwards_are_refused_by_name():
    def parametrized(linear: nn.Linear) -> None:
        nn.utils.parametrizations.weight_norm(linear)

    def computed(linear: nn.Linear) -> None:
        prune.identity(linear, "weight")

    def replaced(linear: nn.Linear) -> None:
        linear.forward = lambda x: x

    for change, why in (
        (parametrized, "WeightNorm"),
        (computed, "a hook"),
        (replaced, "forward was replaced"),
    ):
        plain = model(2)
        change(plain["blocks"][1][2])
        with pytest.raises(ValueError, match=rf"^blocks\.1\.2: .*{why}"):
            convert(plain, NVFP4, Clock(0))
    outside = model(1)
    parametrized(outside["head"])
    assert len(convert(outside, NVFP4, Clock(0)).layers) == 2


def test_a_second_derivative_is_refused_and_exists_in_high_precision():
    converted = model(1)
    engine = convert(converted, NVFP4, Clock(0))
    engine.at(0, Run(1))

    def penalty() -> Tensor:
        x = drawn(32, 32, seed=1).requires_grad_()
        (gradient,) = torch.autograd.grad(converted["blocks"][0](x).sum(), x, create_graph=True)
        gradient.square().sum().backward()
        return x.grad

    with pytest.raises(RuntimeError, match="create_graph=True"):
        penalty()
    with engine.high_precision():
        assert penalty().abs().max() > 0


def test_autocast_around_a_model_does_not_reach_into_its_quantised_products():
    """Operands that must be fp32 (an outer scale a row) would lose bits in it."""
    converted = model(1)
    engine = convert(converted, PRESETS["row_scaled"](), Clock(0))
    engine.at(0, Run(1))
    (layer, *_) = engine.layers.values()
    x = torch.randn(8, layer.in_features, generator=torch.Generator().manual_seed(0))
    plain = layer(x)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(layer(x), plain)


@pytest.mark.parametrize("operands", [0, 1, 63, 64, 65, 200])
def test_operands_that_are_not_finite_are_counted_however_many_there_are(operands):
    draws = random.Random(operands)
    values = [draws.choice([1.0, 0.0, math.inf, math.nan]) for _ in range(operands)]
    count, other = NonfiniteCount(3), NonfiniteCount()
    moments = list(itertools.product(range(50), SLOTS))  # in the order of a step
    for number, (value, moment) in enumerate(zip(values, moments, strict=False)):
        (count if number % 3 else other).add(torch.tensor(value), *moment)
    bad = [moment for value, moment in zip(values, moments, strict=False) if not math.isfinite(value)]
    count.include(other)
    assert (int(count), count.first) == (3 + len(bad), next(iter(bad), None))


@pytest.mark.parametrize("operands", [0, 5, 70])
def test_counts_of_all_layers_are_read_by_as_many_operations_as_one(operands):
    """Each layer's own would start kernels by the layer on a GPU, at every step that is recorded."""

    class Operations(TorchDispatchMode):
        done = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            self.done += 1
            return func(*args, **(kwargs or {}))

    operations = []
    for layers in (1, 9):
        counts = [NonfiniteCount(number) for number in range(layers)]
        for number, count in enumerate(counts):
            for operand in range(operands):
                count.add(torch.tensor(math.nan if operand < number else 1.0), operand, "fprop.x")
        with Operations() as here:
            assert total(counts) == sum(number + min(number, operands) for number in range(layers))
            assert [bool(count.first) for count in counts] == [min(n, operands) > 0 for n in range(layers)]
        operations.append(here.done)
        assert [int(count) for count in counts] == [
            number + min(number, operands) for number in range(layers)
        ]
    assert operations[0] == operations[1]


WITHOUT_TRITON = """
import sys
sys.modules["triton"] = None
import torch
import ablate

for name in ablate.presets():
    if name in ("fp4_all_the_way", "nemotron3_super"):  # one waits for a gradient, one names attention
        continue
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(torch.nn.Sequential(torch.nn.Linear(64, 64)) for _ in range(3)))
    run = ablate.convert(model, name, seed=0, steps=2, measure_every=1)
    with run.step():
        model(torch.randn(32, 64)).square().mean().backward()
    assert run.metrics(), name
    print(name)
"""


def test_every_preset_is_measured_on_a_cpu_without_triton():
    """As in the environment of a demo: Triton comes with torch's builds for GPUs, and with the tests."""
    command = [sys.executable, "-c", WITHOUT_TRITON]
    done = subprocess.run(command, capture_output=True, text=True, env=environment(), check=False)
    assert done.returncode == 0, done.stderr
    assert len(done.stdout.split()) == len(PRESETS) - 2
