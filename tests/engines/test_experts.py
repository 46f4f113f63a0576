"""Experts with packed weights compute what one converted linear layer per expert computes, bit for bit."""

from copy import deepcopy

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.packed_experts import HIDDEN, SIZES, WIDTH, Model, PackedExperts, results, routed
from support.ranks import in_ranks
from torch import Tensor, nn

import ablate
from ablate.engines import grouped
from ablate.engines.emulated import convert
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.expert_layers import EmulatedExpert
from ablate.engines.products import DTYPES
from ablate.engines.ranks import Divided
from ablate.numerics.philox import Clock
from ablate.numerics.product import MODE_VARIABLE
from ablate.numerics.quantize import quantize
from ablate.recipes.experts import Experts
from ablate.recipes.layers import Match
from ablate.recipes.presets import PRESETS
from ablate.recipes.recipe import Layers, Recipe, Rule, Run
from ablate.training.metrics import SlotErrors


def relative_error(layer: EmulatedLinear, rows: slice = slice(None)) -> float:
    """Return the relative L2 error of the rows of a layer's quantised weight."""
    weight = layer.weight.detach()[rows]
    return float((layer.quantised_weight()[rows] - weight).norm() / weight.norm())


def converted(model: Model, recipe: Recipe, seed: int = 11) -> Model:
    """Return the model, converted, at the first of ten steps."""
    convert(model, recipe, Clock(seed=seed)).at(0, Run(10))
    return model


def by_linears(model: Model, recipe: Recipe, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """Return what `results` does, from one converted linear layer for each matrix of each expert."""
    source, clock = model.experts, Clock(seed=11)
    x, index, weights = batch
    x = x.clone().requires_grad_()
    total = torch.zeros_like(x)
    layers: dict[tuple[int, int], EmulatedLinear] = {}
    for number in range(source.num_experts):
        for place, (child, matrix) in enumerate(
            zip(("gate_up", "down"), source.matrices(number), strict=True)
        ):
            linear = nn.Linear(matrix.shape[1], matrix.shape[0], bias=False)
            linear.weight = nn.Parameter(matrix.detach().clone())
            name = f"blocks.0.experts.{number}.{child}"
            layers[number, place] = EmulatedLinear(linear, name, clock, DTYPES[recipe.dtype])
            layers[number, place].products = recipe.at(0, Run(10)).products
        token = (index[:, 0] == number).nonzero()[:, 0]
        if len(token):
            y = layers[number, 1](source._apply_gate(layers[number, 0](x[token])))
            total = total.index_add(0, token, y * weights[token])
    generator = torch.Generator().manual_seed(7)
    total.backward(torch.randn(total.shape, generator=generator))

    def stacked(place: int) -> Tensor:
        of_experts = (layers[number, place].weight for number in range(source.num_experts))
        return torch.stack([torch.zeros_like(w) if w.grad is None else w.grad for w in of_experts])

    names = ("blocks.0.experts.gate_up_proj", "blocks.0.experts.down_proj")
    return {"y": total.detach(), "dx": x.grad, **{n: stacked(place) for place, n in enumerate(names)}}


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("sizes", [SIZES, (0, 0, 89, 0, 0, 0)], ids=["mixed", "all_to_one"])
def test_a_grouped_product_is_a_loop_of_converted_linears(preset, sizes):
    recipe, batch = PRESETS[preset](), routed(sizes)
    recipe = recipe.model_copy(update={"layers": Recipe().layers})
    expected = by_linears(Model(), recipe, batch)
    seen = results(converted(Model(), recipe), batch)
    assert {name: torch.equal(value, expected[name]) for name, value in seen.items()} == dict.fromkeys(
        seen, True
    )


@pytest.mark.parametrize("gate_up", ["fused", "split"])
@pytest.mark.parametrize(
    "layout",
    [{}, {"gate": False}, {"transposed": True}, {"interleaved": True}, {"bias": True},
     {"transposed": True, "interleaved": True, "bias": True}],
    ids=lambda layout: "_".join(layout) or "plain",
)  # fmt: skip
def test_every_layout_computes_what_a_loop_over_experts_computes_in_fp64(layout, gate_up):
    batch = routed()
    exact = results(
        Model(**layout).double(), tuple(t.double() if t.is_floating_point() else t for t in batch)
    )
    recipe = Recipe(dtype="fp32", experts=Experts(gate_up=gate_up))
    seen = results(converted(Model(**layout), recipe), batch)
    for name, value in seen.items():
        # fp32 sums of at most 96 terms of size 1.
        torch.testing.assert_close(value.double(), exact[name], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("interleaved", [False, True])
def test_split_quantises_gate_and_up_by_scales_of_their_own(interleaved):
    model = Model(interleaved=interleaved)
    with torch.no_grad():  # the gate is 100 times as large as the up projection
        gate = model.experts.gate_up_proj
        (gate[:, 0::2] if interleaved else gate[:, :HIDDEN]).mul_(100)
    errors = {}
    for gate_up in ("fused", "split"):
        recipe = PRESETS["nvfp4"]().model_copy(update={"experts": Experts(gate_up=gate_up)})
        engine = convert(deepcopy(model), recipe, Clock(seed=0))
        engine.at(0, Run(10))
        errors[gate_up] = {name: relative_error(layer) for name, layer in engine.layers.items()}
    assert "blocks.0.experts.5.up" in errors["split"]
    assert "blocks.0.experts.5.gate_up" in errors["fused"]
    if interleaved:  # rows of both share 16x16 tiles: those of up are lost beside those of gate
        fused, split = errors["fused"]["blocks.0.experts.5.gate_up"], errors["split"]["blocks.0.experts.5.up"]
        assert split < 0.15
        recipe = PRESETS["nvfp4"]()
        engine = convert(deepcopy(model), recipe, Clock(seed=0))
        engine.at(0, Run(10))
        layer = engine.layers["blocks.0.experts.5.gate_up"]
        assert relative_error(layer, slice(1, None, 2)) > 0.5
        assert fused < 0.15


def test_padding_by_routed_tokens_uses_the_first_that_go_elsewhere():
    recipe = PRESETS["nvfp4"]()
    routed_recipe = recipe.model_copy(update={"experts": Experts(padding="routed:16")})
    batch = routed((0, 1, 15, 16, 17, 40))
    free = results(converted(Model(), recipe), batch)
    padded = results(converted(Model(), routed_recipe), batch)
    down = "blocks.0.experts.down_proj"
    same = [torch.equal(free[down][e], padded[down][e]) for e in range(6)]
    assert same[0]  # an empty expert stays empty
    assert same[3]  # a full one is not padded
    assert not any(same[e] for e in (1, 2, 4, 5))
    # By hand: expert 1 gets its one token and the first 15 others, whose gradient is zero.
    x, index, weights = batch
    first = torch.cat(((index[:, 0] == 1).nonzero()[:, 0], (index[:, 0] != 1).nonzero()[:15, 0]))
    by_hand = (x[first.sort().values], torch.ones(16, 1, dtype=torch.long), torch.zeros(16, 1))
    at = (first.sort().values == first[0]).nonzero()[0, 0]
    by_hand[2][at] = weights[first[0]]
    model = converted(Model(), recipe)
    rows = by_hand[0].clone().requires_grad_()
    generator = torch.Generator().manual_seed(7)
    dy = torch.randn(len(x), WIDTH, generator=generator)[first.sort().values]
    model(rows, *by_hand[1:]).backward(dy)
    assert torch.equal(model.experts.down_proj.grad[1], padded[down][1])


def test_padding_counts_a_token_that_chooses_an_expert_twice_as_two_rows():
    recipe = PRESETS["nvfp4"]()
    padded_recipe = recipe.model_copy(update={"experts": Experts(padding="routed:16")})
    x, weights = torch.randn(20, WIDTH, generator=torch.Generator().manual_seed(2)), torch.full((20, 2), 0.5)
    index = torch.tensor([[0, 0]] * 8 + [[1, 2]] * 12)  # 16 rows of expert 0: full
    free = results(converted(Model(experts=3), recipe), (x, index, weights))
    padded = results(converted(Model(experts=3), padded_recipe), (x, index, weights))
    down = "blocks.0.experts.down_proj"
    assert torch.equal(free[down][0], padded[down][0])
    assert not torch.equal(free[down][1], padded[down][1])


def test_gradients_of_biases_in_bf16_are_added_up_in_fp32():
    model = converted(Model(experts=2, bias=True).bfloat16(), PRESETS["nvfp4"]())
    generator = torch.Generator().manual_seed(2)
    x, index = torch.randn(2000, WIDTH, generator=generator).bfloat16(), torch.arange(2000)[:, None] % 2
    dy = (torch.rand(2000, WIDTH, generator=generator) + 0.5).bfloat16()
    model(x, index, torch.ones_like(x[:, :1])).backward(dy)
    exact = torch.stack([dy[index[:, 0] == number].double().sum(0) for number in range(2)])
    # A sum in bf16 stops growing at 256: 1000 gradients of about 1 would be far off.
    assert torch.equal(model.experts.down_proj_bias.grad, exact.float().bfloat16())


@pytest.mark.parametrize("recipe", ["nvfp4", "bf16"])
def test_a_batch_without_tokens_gives_no_outputs_and_zero_gradients(recipe):
    empty = torch.zeros(0, WIDTH), torch.zeros(0, 2, dtype=torch.long), torch.zeros(0, 2)
    got = results(converted(Model(bias=True), PRESETS[recipe]()), empty)
    assert got.pop("y").shape == got.pop("dx").shape == (0, WIDTH)
    assert not any(gradient.any() for gradient in got.values())


@pytest.mark.parametrize("expert", [-1, len(SIZES)])
def test_an_index_of_no_expert_is_refused(expert):
    x, index, weights = routed()
    index[3] = expert
    with pytest.raises(ValueError, match=r"blocks\.0\.experts: the router's indices must lie from 0 to 5"):
        converted(Model(), PRESETS["nvfp4"]())(x, index, weights)


@pytest.mark.parametrize("multiple", [32, 128])
def test_rows_of_zeros_behind_an_experts_tokens_change_nothing(multiple):
    nearest = PRESETS["nvfp4"]()
    quant = nearest.wgrad.x
    x = torch.randn(17, WIDTH, generator=torch.Generator().manual_seed(1)).bfloat16()
    rotation, clock = nearest.wgrad.hadamard, Clock(seed=0)
    few = quantize(F.pad(x, (0, 0, 0, 15)).t(), quant, rotation=rotation, clock=clock)
    many = quantize(F.pad(x, (0, 0, 0, multiple - 17)).t(), quant, rotation=rotation, clock=clock)
    assert torch.equal(few.values[:, :32], many.values[:, :32])
    assert not many.values[:, 32:].any()
    assert torch.equal(few.amax, many.amax)


def test_experts_that_share_a_rounding_state_draw_the_same_words():
    same = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(2))
    batch = (same.repeat(2, 1), torch.arange(2).repeat_interleave(16)[:, None], torch.ones(32, 1))
    gradients = {}
    for state in ("own", "shared"):
        model = Model(experts=2)
        with torch.no_grad():
            for weight in model.parameters():
                weight[1] = weight[0]
        recipe = PRESETS["nvfp4"]().model_copy(update={"experts": Experts(rounding_state=state)})
        converted(model, recipe)
        dy = torch.randn(16, WIDTH, generator=torch.Generator().manual_seed(4)).repeat(2, 1)
        model(*batch).backward(dy)
        gradients[state] = model.experts.down_proj.grad
    assert torch.equal(*gradients["shared"])
    assert not torch.equal(*gradients["own"])


def test_conversion_leaves_parameters_and_restores_the_modules_own_forward():
    model, batch = Model(bias=True), routed()
    keys, before = list(model.state_dict()), results(model, batch)
    parameters = [id(p) for p in model.parameters()]
    run = ablate.convert(model, "nvfp4", seed=0, steps=4)
    assert (list(model.state_dict()), [id(p) for p in model.parameters()]) == (keys, parameters)
    assert sum(isinstance(m, EmulatedExpert) for m in model.modules()) == 2 * len(SIZES)
    copied = deepcopy(model)
    with run.step(), torch.no_grad():
        assert torch.equal(copied(*batch), model(*batch))
        for weight in copied.parameters():
            weight.zero_()
        assert not copied(*batch).any()
        assert model(*batch).any()
    run.restore(copied)
    run.restore()
    after = results(model, batch)
    assert all(torch.equal(value, before[name]) for name, value in after.items())
    assert not any(isinstance(m, EmulatedLinear) for m in (*model.modules(), *copied.modules()))


def test_expert_parallelism_and_a_field_without_experts_are_refused():
    model = Model()
    model.experts._is_expert_parallel = True
    with pytest.raises(ValueError, match=r"blocks\.0\.experts: expert parallelism is not supported"):
        ablate.convert(model, "nvfp4", seed=0, steps=4)
    dense = nn.Module()
    dense.blocks = nn.ModuleList([nn.Linear(16, 16) for _ in range(2)])
    recipe = PRESETS["nvfp4"]().model_copy(update={"experts": Experts(gate_up="split")})
    with pytest.raises(ValueError, match="the model has no experts"):
        convert(dense, recipe, Clock(seed=0), block=lambda name: "blocks")


def test_a_rule_keeps_one_experts_matrix_in_high_precision():
    kept_rule = Layers(rules=(Rule(match=Match(name="*.experts.4.down")),))
    recipe = PRESETS["nvfp4"]().model_copy(update={"layers": kept_rule})
    batch = routed()
    model, plain, full = (converted(Model(), r) for r in (recipe, Recipe(), PRESETS["nvfp4"]()))
    kept, exact, quantised = (results(m, batch)["blocks.0.experts.down_proj"] for m in (model, plain, full))
    assert torch.equal(kept[3], quantised[3])
    assert not torch.equal(kept[4], quantised[4])
    assert kept[4].sub(exact[4]).norm() < quantised[4].sub(exact[4]).norm()


def test_the_grouped_path_covers_the_usual_recipe_and_the_loop_covers_what_is_observed(monkeypatch):
    monkeypatch.delenv(MODE_VARIABLE, raising=False)
    model, batch = converted(Model(), PRESETS["nvfp4"]()), routed()
    layers = model.experts.forward.up[0].layers
    assert grouped.covers(layers, batch[0])
    fast = results(model, batch)
    telemetry = SlotErrors()
    layers[0].context.probe = telemetry  # the loop gives each operand of each expert to the probe
    slow = results(model, batch)
    assert all(torch.equal(value, slow[name]) for name, value in fast.items())
    assert any("experts.5.gate_up" in name for name in telemetry.metrics())


def both_ways():
    """The model and its engine, on the grouped path and in the loop, which telemetry needs."""
    for how in ("grouped", "loop"):
        model = Model()
        engine = convert(model, PRESETS["nvfp4"](), Clock(seed=0))
        engine.at(0, Run(10))
        if how == "loop":
            engine.listen(SlotErrors())
        yield how, model, engine


def test_an_expert_whose_token_is_not_finite_is_counted_once_as_the_loop_counts_it():
    x, index, weights = routed()
    x[(index[:, 0] == 4).nonzero()[0, 0], 3] = float("nan")
    counts = {}
    for how, model, engine in both_ways():
        results(model, (x, index, weights))
        counts[how] = {name: int(layer.nonfinite) for name, layer in engine.layers.items()}
    assert counts["grouped"] == counts["loop"]
    assert {name for name, count in counts["loop"].items() if count} == {
        "blocks.0.experts.4.gate_up", "blocks.0.experts.4.down"
    }  # fmt: skip


def test_a_gradient_that_is_not_finite_passes_the_grouped_path_as_it_passes_the_loop():
    batch, seen = routed(), {}
    for how, model, engine in both_ways():
        y = model(*batch)
        y.backward(torch.full_like(y, torch.inf))
        gradients = [parameter.grad.nan_to_num(nan=7.0) for parameter in model.parameters()]
        seen[how] = engine.nonfinite(), engine.first_nonfinite(), gradients
    assert seen["grouped"][:2] == seen["loop"][:2]
    assert seen["loop"][0] > 0
    assert all(map(torch.equal, seen["grouped"][2], seen["loop"][2]))


def on_ranks(bias: bool) -> list[list[list[float]]]:
    """Return output and gradients of this rank's half of the tokens, gradients added over ranks."""
    x, index, weights = routed((0, 1, 15, 16, 17, 39))
    rank, model = dist.get_rank(), Model(bias=bias)
    engine = convert(model, PRESETS["nvfp4"](), Clock(seed=11))
    engine.at(0, Run(10))
    own = x.chunk(2)[rank].clone().requires_grad_()
    dy = torch.randn(x.shape, generator=torch.Generator().manual_seed(7))
    with engine.divided(Divided(rank, 2, dist.group.WORLD)):
        y = model(own, index.chunk(2)[rank], weights.chunk(2)[rank])
        y.backward(dy.chunk(2)[rank])
    for parameter in model.parameters():
        dist.all_reduce(parameter.grad)
    tensors = (y.detach(), own.grad, *(parameter.grad for parameter in model.parameters()))
    return [tensor.tolist() for tensor in tensors]


@pytest.mark.parametrize("bias", [False, True])
def test_two_ranks_compute_what_one_computes_bit_for_bit(bias):
    batch = routed((0, 1, 15, 16, 17, 39))
    seen = results(converted(Model(bias=bias), PRESETS["nvfp4"]()), batch)
    first, second = in_ranks(2, on_ranks, bias)
    for number, (name, value) in enumerate(seen.items()):
        joined = torch.tensor(first[number] + second[number] if number < 2 else first[number])
        if name.endswith("_bias"):  # each rank's rows are added in fp32
            torch.testing.assert_close(joined, value, rtol=1e-5, atol=1e-5)
        else:
            assert torch.equal(joined, value), name


class Doubled(PackedExperts):
    """Experts whose forward pass does more than its layout says."""

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        return 2 * super().forward(hidden_states, top_k_index, top_k_weights)


@pytest.mark.parametrize("wrong", ["is_transposed", "has_bias", "has_post_expert_norm", "doubled"])
def test_a_module_that_computes_something_else_than_its_layout_says_is_refused(wrong):
    model = Model()
    if wrong == "doubled":
        model.blocks[0].experts = Doubled()
    else:
        setattr(model.experts, wrong, True)
    with pytest.raises(ValueError, match=r"^blocks\.0\.experts: its .*docs/reference/families\.md"):
        ablate.convert(model, "nvfp4", seed=0, steps=4)


def of_two_blocks(**layout: bool | int) -> nn.ModuleDict:
    return nn.ModuleDict({"blocks": nn.ModuleList([Model(**layout).blocks[0] for _ in range(2)])})


@pytest.mark.parametrize(
    ("leaves_out", "listed"),
    [
        (lambda name: name == "blocks.1.experts.2.down", "2.down of"),
        (lambda name: name.startswith("blocks.1.experts."), "0.gate_up and 11 more of"),
    ],
)
def test_a_filter_that_leaves_out_layers_of_a_stack_is_refused_and_leaves_the_model_as_it_was(
    leaves_out, listed
):
    model = of_two_blocks()
    names = [name for name, _ in model.named_modules()]
    with pytest.raises(ValueError, match=rf"^the filter leaves out blocks\.1\.experts\.{listed} a stack"):
        ablate.convert(model, "nvfp4", filter=lambda name, layer: not leaves_out(name))
    assert [name for name, _ in model.named_modules()] == names
    taken = ablate.convert(model, "nvfp4", filter=lambda name, layer: name != "blocks.1.experts")
    assert {row.name for row in taken.layers if row.converted} == {
        "blocks.0.experts.gate_up_proj",
        "blocks.0.experts.down_proj",
    }


def test_a_stack_that_is_refused_leaves_the_others_as_they_were():
    model = of_two_blocks()
    before = str(model)
    model.blocks[1].experts.forward = None
    with pytest.raises(ValueError, match=r"^blocks\.1\.experts: its forward was replaced"):
        ablate.convert(model, "nvfp4")
    del model.blocks[1].experts.forward
    assert str(model) == before
    assert ablate.convert(model, "nvfp4").layers


def test_print_lists_the_layers_that_a_recipe_keeps_in_high_precision():
    rules = [{"match": {"name": "blocks.1.experts.2.down"}}, {"match": {"name": "blocks.0.*.down"}}]
    run = ablate.convert(of_two_blocks(), "nvfp4", set={"recipe.layers.rules": rules})
    several = ", ".join(f"blocks.0.experts.{number}.down" for number in range(5))
    assert str(run).splitlines()[1:] == [
        "in high precision:",
        "  1 layer by a rule: blocks.1.experts.2.down",
        f"  6 layers by a rule: {several} and 1 more",
    ]
    skipped = ablate.convert(of_two_blocks(), "nvfp4", set={"skip_last": 1})
    assert "\n  12 layers by counts of blocks: blocks.1.experts.0.gate_up, " in str(skipped)
    assert "in high precision" not in str(ablate.convert(of_two_blocks(), "nvfp4"))


def test_a_module_that_lacks_attributes_of_experts_names_them():
    model = of_two_blocks()
    model["blocks"].append(nn.ModuleDict({"up": nn.Linear(512, 512)}))
    del model["blocks"][1].experts.is_concatenated
    run = ablate.convert(model, "nvfp4")
    assert {row.name: row.reason for row in run.layers if not row.converted} == {
        f"blocks.1.experts.{parameter}": "declares 6 of 7 attributes of experts; is_concatenated is missing"
        " (docs/examples/own_experts.py)"
        for parameter in ("gate_up_proj", "down_proj")
    }
