"""Errors and biases of a recipe's operands (training/operand_errors.py, operand_capture.py)."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles import two_level
from support.builds import Counting
from support.experiments import SHAPE
from support.packed_experts import SIZES, Model, results, routed

from ablate.engines.blocks import passed_over
from ablate.engines.emulated import convert
from ablate.errors import InputError
from ablate.numerics.kernels import builds
from ablate.numerics.philox import Clock
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant
from ablate.recipes import PRESETS
from ablate.recipes.layers import Layer, located
from ablate.recipes.recipe import SLOTS, Dgrad, Fprop, Layers, Recipe, Wgrad
from ablate.training.operand_capture import collected, of_model, of_workload
from ablate.training.operand_errors import Caster, Operands, casts, measure
from ablate.training.workloads.finetune import Finetune
from ablate.training.workloads.gpt import Gpt
from ablate.training.workloads.python import Python
from ablate.verification.workload_checks import Runs

TOKENS, INSIDE, OUT = 64, 128, 96
PLAIN, TILED = Quant(), Quant(block="16x16")


TRAINING = """
import torch

def train(trial):
    block = torch.nn.Sequential(torch.nn.Linear(32, 16))
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block])})
    trial.convert(model)
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    for _ in trial.steps():
        with trial.step():
            block(torch.randn(8, 32)).square().sum().backward()
            optimizer.step()
            optimizer.zero_grad()
"""


def operands(seed=0, layer="blocks.0.up"):
    generator = torch.Generator().manual_seed(seed)
    shapes = (TOKENS, INSIDE), (OUT, INSIDE), (TOKENS, OUT)
    return Operands(layer, *(torch.randn(s, generator=generator).bfloat16() for s in shapes))


def relative(q, t):
    q, t = np.asarray(q, np.float64), np.asarray(t, np.float64)
    return float(((q - t) ** 2).sum() / (t**2).sum())


def matrix(given, slot):
    """The operand as numpy fp32, laid out from the definition of the three products."""
    x, w, dy = (t.float().numpy() for t in (given.x, given.w, given.dy))
    return dict(zip(SLOTS, (x, w, dy, w.T, dy.T, x.T), strict=True))[slot]


def one(recipe, given, batches=1):
    return measure([recipe], [[given]] * batches)[0]


@pytest.mark.parametrize("slot", SLOTS)
@pytest.mark.parametrize("quant", [PLAIN, TILED], ids=["1x16", "16x16"])
def test_the_error_is_that_of_a_cast_written_out_in_numpy(slot, quant):
    product, name = slot.split(".")
    recipe = Recipe(**{product: {"fprop": Fprop, "dgrad": Dgrad, "wgrad": Wgrad}[product](**{name: quant})})
    given = operands()
    true = matrix(given, slot)
    cast = two_level.nvfp4(np.ascontiguousarray(true), tile=(16, 16) if quant is TILED else (1, 16))
    found = one(recipe, given)
    expected = np.zeros(6)
    expected[SLOTS.index(slot)] = relative(cast.decoded, true)
    assert found.error[0, 0] == pytest.approx(expected, rel=1e-5)  # sums of fp32 squares
    assert found.bias[0, 0] == pytest.approx(expected, rel=1e-5)  # a cast without draws


def test_an_operand_made_of_the_forward_copy_keeps_that_copys_error():
    given = operands()
    true = matrix(given, "fprop.w")
    copy = two_level.nvfp4(true).decoded
    kept = one(Recipe(fprop=Fprop(x=PLAIN, w=PLAIN), dgrad=Dgrad(dequantised=True)), given)
    rounded = torch.from_numpy(copy.astype(np.float32)).bfloat16().float().numpy()
    assert kept.error[0, 0, 3] == pytest.approx(relative(rounded, true), rel=1e-5)
    again = Quant(source="forward")
    twice = one(Recipe(fprop=Fprop(x=PLAIN, w=PLAIN), dgrad=Dgrad(g=PLAIN, w=again)), given)
    second = two_level.nvfp4(np.ascontiguousarray(copy.T.astype(np.float32))).decoded
    assert twice.error[0, 0, 3] == pytest.approx(relative(second, true.T), rel=1e-4)
    assert kept.passes == (True, False)  # no backward operand is quantised anew


def test_the_bias_of_unbiased_rounding_covers_zero_and_that_of_nearest_is_its_error():
    unbiased = Quant(rounding="stochastic", bits=24, outer=Outer(bound=256.0))
    spread = [one(Recipe(wgrad=Wgrad(g=unbiased)), operands(seed)) for seed in range(12)]
    biases = np.array([each.bias.sum() for each in spread])
    half = 2.201 * biases.std(ddof=1) / 12**0.5  # Student's t, 11 degrees of freedom
    # Rounding a scale down clips a block's largest elements, a bias of less than a thousandth of the error.
    assert abs(biases.mean()) < half + 1e-3 * spread[0].error.sum()
    nearest = one(Recipe(wgrad=Wgrad(g=PLAIN)), operands())
    assert (nearest.bias == nearest.error).all()


def test_halves_of_draws_estimate_the_squared_mean_without_bias():
    """Simulated errors of known mean; plain |mean|^2 is too large by the variance over the draws."""
    random = np.random.default_rng(0)
    mean, deviation, draws = random.normal(0, 0.1, 500), 1.0, 4
    true, halves, plain = (mean**2).sum(), [], []
    for _ in range(2000):
        errors = mean + random.normal(0, deviation, (draws, 500))
        halves.append(errors[::2].mean(0) @ errors[1::2].mean(0))
        plain.append((errors.mean(0) ** 2).sum())
    assert np.mean(halves) == pytest.approx(true, abs=4 * np.std(halves) / 2000**0.5)
    assert np.mean(plain) == pytest.approx(true + 500 * deviation**2 / draws, rel=0.02)


def test_the_mean_of_many_draws_agrees_with_the_bias_of_four():
    given, rotation = operands(), Hadamard(size=16, signs="per_call")
    nearest = Quant(block="1x32", outer=None, scale=BlockScale(format="e8m0", rounding="floor"))
    (cast, _) = casts(Recipe(wgrad=Wgrad(g=nearest, x=nearest, hadamard=rotation)).products)
    few, many = (Caster(draws=draws).errors(0, given, [cast])[cast] for draws in (4, 256))
    assert few[0] == pytest.approx(many[0], rel=0.05)
    assert 0.05 * few[0] < few[1] < few[0]
    assert few[1] == pytest.approx(many[1], rel=0.05)


def test_signs_that_last_a_run_are_not_draws():
    rotation = {signs: Hadamard(size=16, signs=signs) for signs in ("fixed", "per_layer", "per_step")}
    found = {
        signs: one(Recipe(wgrad=Wgrad(g=PLAIN, x=PLAIN, hadamard=turn)), operands())
        for signs, turn in rotation.items()
    }
    for signs in ("fixed", "per_layer"):
        assert (found[signs].bias == found[signs].error).all()
    assert found["per_step"].bias.sum() < 0.9 * found["per_step"].error.sum()


def test_a_delayed_amax_is_that_of_the_batch_before():
    late = Quant(outer=Outer(statistic="delayed:1"))
    small, large = operands(), operands(1)
    large = Operands(large.layer, 64 * large.x, large.w, large.dy)
    (found,) = measure([Recipe(fprop=Fprop(x=late))], [[small], [large], [large]])
    first, saturated, after = found.error[0, :, 0]
    assert saturated > 10 * first
    assert after == pytest.approx(one(Recipe(fprop=Fprop(x=PLAIN)), large).error[0, 0, 0], rel=1e-6)


def test_layers_that_a_recipe_leaves_alone_count_as_zero_and_not_as_four_bits():
    names = [f"blocks.{number}.up" for number in range(4)]
    batch = [operands(number, name) for number, name in enumerate(names)]
    layers = located(dict.fromkeys(names, ("Linear",)))
    recipe = Recipe(fprop=Fprop(x=PLAIN, w=PLAIN), layers=Layers(skip_last=1))
    whole, part = measure([recipe.model_copy(update={"layers": Layers()}), recipe], [batch], layers)
    assert (part.error[:3] == whole.error[:3]).all()
    assert not part.error[3].any()
    assert (whole.four_bits, part.four_bits) == pytest.approx((1 / 3, 1 / 4))


def test_the_same_numbers_come_again_and_do_not_depend_on_the_other_recipes():
    recipes = [PRESETS[name]() for name in ("nvfp4", "quartet2", "tetrajet2")]
    together = measure(recipes, [[operands()]])
    for recipe, found in zip(recipes, together, strict=True):
        assert (one(recipe, operands()).error == found.error).all()
        assert (one(recipe, operands()).bias == found.bias).all()


@pytest.mark.skipif(builds.build() is None, reason="counts calls of the compiled quantisers")
def test_casts_of_weights_that_stay_are_made_once_and_have_the_errors_of_every_batch():
    """All presets, also those that draw, turn by signs, or remember amaxes."""
    first = operands(0)
    batches = [[replace(operands(seed), w=first.w)] for seed in range(2)]
    recipes = [make() for make in PRESETS.values()]
    weights, (apart, shared) = {(OUT, INSIDE), (INSIDE, OUT)}, (Counting(builds.built()) for _ in range(2))
    with builds.using(apart):
        each = measure(recipes, batches)
    with builds.using(shared):
        once = measure(recipes, batches, fixed=True)
    calls, fewer = (sum(shape in weights for shape in count.quantised) for count in (apart, shared))
    assert 0 < fewer < 0.8 * calls
    for one, two in zip(each, once, strict=True):
        assert np.array_equal(one.error, two.error)
        assert np.array_equal(one.bias, two.bias)


@pytest.mark.parametrize("exponent", [-88, 88])
def test_the_error_does_not_depend_on_the_scale_of_the_operand(exponent):
    """Squares of fp32 would be 0 or infinite; powers of two scale the operand and MXFP4 exactly."""
    given, recipe = operands(), PRESETS["mxfp4"]()
    scaled = Operands(given.layer, *(2.0**exponent * tensor for tensor in (given.x, given.w, given.dy)))
    assert one(recipe, scaled).error == pytest.approx(one(recipe, given).error, rel=1e-12)


def test_operands_that_are_not_finite_or_empty_are_refused():
    given = operands()
    for bad, why in ((given.x * float("nan"), "not finite"), (given.x[:0], "empty")):
        with pytest.raises(InputError, match=f"blocks.0.up: x is {why}"):
            Operands("blocks.0.up", bad, given.w, given.dy)


def test_hooks_capture_what_autograd_multiplies():
    torch.manual_seed(0)
    block = torch.nn.Sequential(torch.nn.Linear(32, 16, bias=False))
    model = torch.nn.ModuleDict({"blocks": torch.nn.ModuleList([block])})
    clock = Clock(0)
    convert(model, PRESETS["bf16"](), clock)
    layer, x, target = (
        model["blocks"][0][0],
        torch.randn(2, 5, 32).bfloat16(),
        torch.randn(2, 5, 16).bfloat16(),
    )
    batches: list = []
    with collected(batches):
        for clock.step in range(2):
            (layer(x) * target).float().sum().backward()
    layer(x).float().sum().backward()  # after the context
    assert [len(batch) for batch in batches] == [1, 1]
    (found,) = batches[0]
    assert torch.equal(found.x, x.flatten(0, 1))
    assert torch.equal(found.dy, target.flatten(0, 1))
    assert torch.equal(found.w, layer.weight.detach().bfloat16())


@pytest.mark.parametrize("layout", [{}, {"gate": False}, {"transposed": True}, {"interleaved": True}])
def test_hooks_capture_packed_experts_but_those_without_a_token(layout):
    """The product of what was captured is the gradient of each expert's own part of the packed weight."""
    model = Model(**layout)
    convert(model, PRESETS["bf16"](), Clock(0))
    batches, batch = [], routed()
    with collected(batches):
        found = results(model, batch)
    results(model, batch)  # after the context
    assert len(batches) == 1
    names = {f"blocks.0.experts.{number}" for number, size in enumerate(SIZES) if size}
    assert {each.layer.rpartition(".")[0] for each in batches[0]} == names
    first = "gate_up_proj" if layout.get("gate", True) else "up_proj"
    for each in batches[0]:
        number, part = each.layer.split(".")[-2:]
        packed = found[f"blocks.0.experts.{'down_proj' if part == 'down' else first}"][int(number)]
        expected = packed.t() if layout.get("transposed") else packed
        assert torch.equal(each.w, model.get_submodule(each.layer).weight.bfloat16())
        made = each.dy.float().t() @ each.x.float()
        assert torch.allclose(made, expected.float(), rtol=0.02, atol=0.02 * made.abs().max().item())


def test_a_training_function_gives_the_operands_of_its_steps(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(TRAINING)
    found = of_workload(Python(file=str(file)), "--python mine.py", 2)
    assert [[each.layer for each in batch] for batch in found.batches] == [["blocks.0.0"]] * 2
    assert [layer.block for layer in found.layers] == [0]
    first, second = (batch[0] for batch in found.batches)
    assert not torch.equal(first.w, second.w)  # it trains


def test_layers_of_a_training_function_are_in_the_models_order(tmp_path):
    """The backward pass, which gives the operands, begins with the last block."""
    file = tmp_path / "mine.py"
    two = TRAINING.replace(
        "ModuleList([block])", "ModuleList([block, torch.nn.Sequential(torch.nn.Linear(16, 16))])"
    )
    file.write_text(two.replace("block(torch.randn(8, 32))", 'model["blocks"][1](block(torch.randn(8, 32)))'))
    found = of_workload(Python(file=str(file)), "--python mine.py", 1)
    assert [(layer.name, layer.block) for layer in found.layers] == [("blocks.0.0", 0), ("blocks.1.0", 1)]


def test_a_function_with_a_long_loop_of_its_own_is_stopped_behind_its_steps(tmp_path):
    """It gives the same operands as one that takes its steps from the trial."""
    file, taken, loop = tmp_path / "mine.py", tmp_path / "taken", "for _ in trial.steps():"
    counted = (
        f"for step in range(1000):\n        __import__('pathlib').Path({str(taken)!r}).write_text(str(step))"
    )
    assert loop in TRAINING
    batches = []
    for code in (TRAINING, TRAINING.replace(loop, counted)):
        file.write_text(code)
        batches.append(of_workload(Python(file=str(file)), "--python mine.py", 2).batches)
    assert taken.read_text() == "3"  # the first step, which is dropped, two more, and the start of the next
    for batch, other in zip(*batches, strict=True):
        assert [torch.equal(one.dy, two.dy) for one, two in zip(batch, other, strict=True)] == [True]


def test_a_function_that_converts_nothing_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text(
        "def train(trial):\n    for _ in trial.steps():\n        with trial.step():\n            pass\n"
    )
    with pytest.raises(InputError, match="no converted layer was trained"):
        of_workload(Python(file=str(file)), "--python mine.py", 1)


def test_a_function_that_takes_no_step_is_refused(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def train(trial):\n    pass\n")
    with pytest.raises(InputError, match="took no step"):
        of_workload(Python(file=str(file)), "--python mine.py", 1)


def test_an_error_of_the_function_is_told_with_its_line(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def train(trial):\n    return {}['missing']\n")
    with pytest.raises(InputError, match=r"KeyError: 'missing' \(.*mine\.py:2\)$"):
        of_workload(Python(file=str(file)), "--python mine.py", 1)


def test_a_function_of_other_arguments_is_told_that_it_is_called_with_the_trial(tmp_path):
    file = tmp_path / "mine.py"
    file.write_text("def train(steps):\n    return [*range(steps)]\n")
    with pytest.raises(
        InputError, match=r"TypeError: .*mine\.py:2\); a training function is called with the"
    ):
        of_workload(Python(file=str(file)), "--python mine.py", 1)


FAMILIES = {
    "qwen3": {"intermediate_size": 64, "num_key_value_heads": 1, "tie_word_embeddings": True},
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 64,
        "num_key_value_heads": 1,
    },
    "gpt2": {"n_positions": 128},
}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_stream_of_a_saved_model_has_the_operands_of_a_backward_pass_that_keeps_all(
    tmp_path, family, dtype
):
    """Those of the same weights in fp32 with gradients, without recomputation."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300}
    causal = pytest.importorskip("ablate.training.models.causal")
    model = causal.build({"model_type": family, **sizes, **FAMILIES[family]}, 300, 1, torch.device("cpu"))
    model.to(dtype).save_pretrained(tmp_path)
    run, kept = Finetune(model=str(tmp_path)).prepare(PRESETS["bf16"](), 0, "cpu"), []
    with collected(kept):
        for run.engine.clock.step in range(2):
            run.loss(*run.batch(run.engine.clock.step, 0)).backward()
    given = {}
    of_model(str(tmp_path), 2).batches(lambda batch, own: given.update({(batch, own.layer): own}))
    every = {(number, own.layer): own for number, batch in enumerate(kept) for own in batch}
    assert given.keys() == every.keys()
    for place, own in every.items():
        assert all(torch.equal(getattr(own, name), getattr(given[place], name)) for name in ("x", "w", "dy"))


def test_weights_of_blocks_are_mapped_and_none_has_a_gradient(tmp_path):
    causal = pytest.importorskip("ablate.training.models.causal")
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 300}
    model = causal.build({"model_type": "qwen3", **sizes}, 300, 1, torch.device("cpu"))
    model.to(torch.bfloat16).save_pretrained(tmp_path)
    frozen = causal.frozen(str(tmp_path), 300, 0, weights=True)
    maps = [
        line.split()[0] for line in Path("/proc/self/maps").read_text().splitlines() if str(tmp_path) in line
    ]
    spans = [tuple(int(end, 16) for end in span.split("-")) for span in maps]
    for name, weight in frozen.named_parameters():
        mapped = any(low <= weight.data_ptr() < high for low, high in spans)
        assert mapped == (weight.dtype == torch.bfloat16) == ("_proj." in name), name
        assert not weight.requires_grad


def test_a_model_whose_head_starts_at_zero_has_operands_after_its_first_step(shards):
    workload = Gpt.model_validate(SHAPE | {"data": shards})
    found = of_workload(workload, "--python mine.yaml", 1)
    assert [bool(each.dy.any()) for batch in found.batches for each in batch] == [True] * 4


@pytest.mark.parametrize("name", ["x", "w", "dy"])
def test_an_operand_of_zeros_has_no_error(name):
    tensors = {each: torch.ones(16, 16, dtype=torch.bfloat16) for each in ("x", "w", "dy")}
    tensors[name].zero_()
    with pytest.raises(InputError, match=f"blocks.0.up: {name} is zero everywhere"):
        measure([PRESETS["nvfp4"]()], [[Operands("blocks.0.up", **tensors)]])


def test_a_cast_that_is_not_finite_names_its_recipe_slot_and_layer():
    given = operands()
    given.x.fill_(3e38)  # fp32 ends at 3.4e38
    named = {name: PRESETS[name]() for name in ("mxfp4", "nvfp4")}
    with pytest.raises(InputError, match=r"^nvfp4: fprop\.x of blocks\.0\.up .* 3e\+38$"):
        measure([*named.values()], [[given]], titles=[*named])


def test_a_rule_that_selects_no_layer_names_its_recipe():
    rules = ({"match": {"name": "*.up"}}, {"match": {"name": "*.down"}})
    recipe = Recipe.model_validate({"layers": {"rules": rules}}, strict=False)
    layer = Layer("blocks.0.up", 0, frozenset())
    for titles, title in (((), "recipe 2"), (("a", "b.yaml"), "b.yaml")):
        with pytest.raises(InputError, match=rf"^{title}: layers\.rules\.1\.match: .* selects no layer"):
            measure([PRESETS["nvfp4"](), recipe], [[operands()]], [layer], titles=titles)


@pytest.mark.parametrize("kind", ["torch.nn.Linear", "Cast", "Made"])
def test_a_subclass_that_no_recipe_applies_to_is_named(tmp_path, kind):
    classes = (
        "class Cast(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x)\n\n\n"
        "class Made(torch.nn.Linear):\n    def __init__(self, *sizes):\n        super().__init__(*sizes)\n\n\n"
    )
    code = TRAINING.replace("def train", f"{classes}def train")
    code = code.replace("torch.nn.Linear(32, 16))", f"torch.nn.Linear(32, 32), {kind}(32, 16))")
    (tmp_path / "train.py").write_text(code)
    workload = Python(file=str(tmp_path / "train.py"))
    with passed_over(set()) as names:
        of_workload(workload, "--python train.py", 1)
    assert names == {"Cast"} & {kind}
    runs = Runs(workload.model_copy(update={"steps": 2}))
    runs.records()
    assert runs.passed_over == names
