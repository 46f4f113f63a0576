"""The Python interface: recipes in a training loop of one's own, against the project's own loop."""

import copy
import pickle
import warnings
from contextlib import suppress

import pytest
import torch
from support.cases import every
from support.ddp_program import Block
from support.linears import ANYWHERE
from torch import nn

import ablate
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Weights
from ablate.training.alarms import Alarm, alerts
from ablate.training.conversion import Conversion
from ablate.training.loop import Telemetry, train
from ablate.training.workloads.gpt import Gpt

NEVER = Telemetry(every=10**9, shadow=10**9, log=1)
SMALL = {
    "layers": 2,
    "width": 64,
    "heads": 2,
    "context": 32,
    "batch": 2,
    "steps": 4,
    "eval_every": 4,
    "eval_tokens": 64,
}


class Net(nn.Module):
    """A model with names of its own."""

    def __init__(self, width: int = 32, stages: int = 3) -> None:
        super().__init__()
        self.stem = nn.Linear(8, width)
        self.trunk = nn.ModuleList(Block(width) for _ in range(stages))
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        x = self.stem(x)
        for block in self.trunk:
            x = block(x)
        return self.head(x)


def net(seed: int = 0, **sizes: int) -> Net:
    torch.manual_seed(seed)
    return Net(**sizes)


def batch(step: int) -> torch.Tensor:
    return torch.randn(32, 8, generator=torch.Generator().manual_seed(step))


def loss_of(model: nn.Module, step: int) -> torch.Tensor:
    return model(batch(step)).square().mean()


def trained(
    model: nn.Module,
    run: Conversion,
    first: int = 0,
    last: int = 4,
    optimizer: torch.optim.Optimizer | None = None,
) -> list[float]:
    optimizer = optimizer or torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses = []
    for step in range(first, last):
        with run.step():
            loss = loss_of(model, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses


# --- equal to the project's own loop ----------------------------------------------------------------


@pytest.mark.parametrize("preset", PRESETS)
def test_a_loop_of_ones_own_gives_the_numbers_of_the_built_in_workload(preset):
    recipe = PRESETS[preset]()
    if recipe.triggers:
        pytest.skip("its schedule waits for a measurement; another test has it")
    # Two steps show what the first one leaves, histories and moments; a schedule and rules for weights may need more.
    count = 4 if recipe.schedule or recipe.weights != Weights() else 2
    config = Gpt(**SMALL | {"steps": count, "eval_every": count}, accumulate=2)
    own = config.prepare(recipe, seed=3, device="cpu")
    expected = [r.metrics["train/loss"] for r in train(own, config, NEVER)]

    there = config.prepare(recipe, seed=3, device="cpu")
    model = plain(there.model)
    run = ablate.convert(
        model,
        recipe,
        seed=3,
        steps=count,
        tokens_per_step=config.tokens_per_step,
        decay_start=config.decay_start,
        measure_every=0,
    )
    from ablate.training.optimizers import optimizer

    steps, losses = optimizer(model, config), []
    for step in range(count):
        for group in steps.param_groups:
            group["lr"] = config.lr_at(step)
        total = 0.0
        with run.step():
            steps.zero_grad()
            for micro_batch in range(2):
                loss = model(*there.batch(step, micro_batch)) / 2
                loss.backward()
                total += loss.item()
            torch.nn.utils.clip_grad_norm_(model.parameters(), config.clip)
            steps.step()
        losses.append(total)
    assert losses == expected
    assert all(torch.equal(a, b) for a, b in zip(model.parameters(), own.model.parameters(), strict=True))


def plain(model: nn.Module) -> nn.Module:
    """The same model with plain layers."""
    from ablate.engines.emulated_layer import EmulatedLinear

    for name, module in list(model.named_modules()):
        if isinstance(module, EmulatedLinear):
            parent, _, child = name.rpartition(".")
            setattr(model.get_submodule(parent), child, module.plain())
    return model


# --- traps that are errors --------------------------------------------------------------------------


@pytest.mark.parametrize("preset", ["nvfp4", "bf16"])
def test_a_call_outside_of_a_step_is_an_error_that_says_how(preset):
    model = net()
    run = ablate.convert(model, preset)
    with pytest.raises(RuntimeError, match=r"trunk\.0\.up: no step .*`with run\.step\(\):`"):
        loss_of(model, 0)
    trained(model, run, last=1)
    with pytest.raises(RuntimeError, match="no step of the recipe is in force"):
        loss_of(model, 0)
    with run.evaluation():
        loss_of(model, 0)


def test_blocks_are_found_by_structure():
    model = net()
    run = ablate.convert(model, "nvfp4")
    assert {row.name for row in run.layers if row.converted} == {
        f"trunk.{n}.{name}" for n in range(3) for name in ("up", "down")
    }
    assert {row.name: row.reason for row in run.layers if not row.converted} == {
        "stem": "outside of the blocks",
        "head": "outside of the blocks",
    }
    skipped = ablate.convert(net(), "nvfp4", set={"skip_last": 1})
    assert [row.block for row in skipped.layers if row.converted][::2] == ["trunk.0", "trunk.1", "trunk.2"]
    with skipped.evaluation():
        plain_layers = {name for name, layer in skipped.engine.layers.items() if layer.products.plain}
    assert plain_layers == {"trunk.2.up", "trunk.2.down"}


def test_a_model_without_blocks_is_refused_and_one_that_is_mostly_left_out_is_named():
    with pytest.raises(
        ValueError, match=r"nothing of Sequential would be converted: it has no blocks.*blocks="
    ):
        ablate.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "nvfp4")
    run = ablate.convert(nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8)), "nvfp4", blocks="*")
    assert all(row.converted for row in run.layers)
    with pytest.warns(
        UserWarning,
        match=r"% of the weights .* largest left out: trunk\.0\.up \[64, 32\] and 3 more: left out by the filter",
    ):
        ablate.convert(net(), "nvfp4", filter=lambda name, linear: "up" not in name and "trunk.2" not in name)


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        ({"recipe": "nvfp5"}, "no such preset; nvfp4 is the nearest|'nvfp4' is the nearest|nvfp4"),
        ({"recipe": "nvfp4", "set": {"rth": True}}, "rth: no such knob"),
        ({"recipe": "nvfp4", "set": {"cooldown": 0.1}}, "give steps to convert"),
        ({"recipe": "nvfp4", "blocks": "trunc.*"}, "matches no module with a linear layer"),
        (
            {"recipe": {"from": "nvfp4", "wgrad": {"g": {"bitz": 4}}}},
            r"wgrad\.g\.bitz: no such key; 'bits'|bits",
        ),
        ({"steps": 0}, "steps is the number of optimizer steps of the run, from 1; here 0"),
    ],
)
def test_wrong_arguments_are_named(arguments, sentence):
    with pytest.raises(ValueError, match=sentence):
        ablate.convert(net(), **arguments)


def test_a_model_with_a_converted_part_is_refused():
    """The part would draw by the clock of its first handle, which then stands still."""
    model = net()
    first = ablate.convert(model.trunk[0], "nvfp4", blocks="*")
    with pytest.raises(ValueError, match=r"trunk\.0\.up is converted already"):
        ablate.convert(model, "mxfp8")
    first.restore()
    trained(model, ablate.convert(model, "mxfp8"), last=1)


LEFT_OUT = {"from": "nvfp4", "layers": {"rules": [{"match": {"name": "*.1.down"}}]}}


def test_a_quantised_layer_whose_weight_its_module_multiplies_by_is_refused_before_the_first_update():
    """As transformers' Mamba does with `out_proj`, where a fused kernel exists."""

    def bypassing() -> Net:
        model = net()
        block = model.trunk[1]
        block.forward = lambda x: x + nn.functional.linear(block.up(x).relu(), block.down.weight)
        return model

    model = bypassing()
    before = [p.detach().clone() for p in model.parameters()]
    with pytest.raises(ValueError, match=r'^trunk\.1\.down: its module .* \{match: \{name: "\*\.down"\}\}'):
        trained(model, ablate.convert(model, "nvfp4"))
    assert all(torch.equal(a, b) for a, b in zip(before, model.parameters(), strict=True))
    for recipe in (LEFT_OUT, "bf16"):
        trained(model := bypassing(), ablate.convert(model, recipe))
    never_used = net()
    never_used.trunk[1].forward = lambda x: x
    trained(never_used, ablate.convert(never_used, "nvfp4"))


def test_a_trial_refuses_a_quantised_layer_whose_weight_its_module_multiplies_by():
    config = Gpt(**SMALL | {"steps": 2, "eval_every": 2})  # the gradient of the first step is zero
    run = config.prepare(PRESETS["nvfp4"](), seed=0, device="cpu")
    (block, *_) = run.model.blocks
    weight = block.mlp.down.weight
    block.mlp.forward = lambda x: (block.mlp.up(x).chunk(2, -1)[0] @ weight.t().to(x.dtype)).to(x.dtype)
    with pytest.raises(ValueError, match=r"^blocks\.0\.mlp\.down: its module"):
        list(train(run, config, NEVER))


def test_a_rule_that_begins_at_a_fraction_of_the_run_needs_its_length():
    recipe = {"from": "nvfp4", "weights": {"osci_reset": {"start": 0.25, "period": 4, "window": 3}}}
    with pytest.raises(ValueError, match=r"osci_reset starts after a fraction .* give steps"):
        ablate.convert(net(), recipe)
    ablate.convert(net(), recipe, steps=8)


def test_the_state_of_a_handle_is_not_read_or_loaded_inside_of_a_step():
    model = net()
    run = ablate.convert(model, "nvfp4")
    state = run.state_dict()
    for call in (run.state_dict, lambda: run.load_state_dict(state)):
        with run.step():
            loss_of(model, 0)
            with pytest.raises(RuntimeError, match="inside of step"):
                call()


# --- what people do with models ---------------------------------------------------------------------


def test_restored_layers_are_plain_and_have_the_same_parameters_and_hooks():
    model, calls = net(), []
    before = dict(model.named_parameters())
    expected = loss_of(model, 9)
    handle = model.trunk[0].up.register_forward_hook(lambda *_: calls.append(1))
    model.trunk[1].down.own_attribute = "kept"
    run = ablate.convert(model, "nvfp4")
    run.restore()
    assert {type(m) for m in model.modules() if isinstance(m, nn.Linear)} == {nn.Linear}
    assert all(p is before[name] for name, p in model.named_parameters())
    assert torch.equal(loss_of(model, 9), expected)
    assert model.trunk[1].down.own_attribute == "kept"
    assert calls == [1]
    handle.remove()
    loss_of(model, 9)
    assert calls == [1]
    with pytest.raises(RuntimeError, match="restored to plain layers"), run.step():
        pass
    with pytest.raises(RuntimeError, match="restored to plain layers already"):
        run.restore()
    trained(model, ablate.convert(model, "nvfp4"))  # and it can be converted again


@pytest.mark.parametrize(
    ("knobs", "why"),
    [
        ({"recipe.layers.rules": [{"match": {"name": "zzz*"}}]}, "selects no layer"),
        ({"recipe.experts.gate_up": "split"}, "no experts to quantise"),
    ],
)
def test_a_refused_model_stays_as_it_was_and_can_be_converted(knobs, why):
    model = net()
    before, parameters = str(model), dict(model.named_parameters())
    with pytest.raises(ValueError, match=why):
        ablate.convert(model, "nvfp4", set=knobs)
    assert str(model) == before
    assert all(p is parameters[name] for name, p in model.named_parameters())
    trained(model, ablate.convert(model, "nvfp4"), last=1)


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
def test_state_saved_at_half_continues_bit_for_bit(recipe, tmp_path):
    whole = net()
    expected = trained(whole, ablate.convert(whole, recipe), last=6)
    half, run = net(), None
    run = ablate.convert(half, recipe)
    optimizer = torch.optim.AdamW(half.parameters(), lr=1e-2)
    losses = trained(half, run, last=3, optimizer=optimizer)
    torch.save(
        {"model": half.state_dict(), "optimizer": optimizer.state_dict(), "run": run.state_dict()},
        tmp_path / "x",
    )
    state = torch.load(tmp_path / "x", weights_only=True)
    fresh = net(seed=5)
    again = ablate.convert(fresh, recipe)
    optimizer = torch.optim.AdamW(fresh.parameters(), lr=1e-2)
    fresh.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    again.load_state_dict(state["run"])
    assert losses + trained(fresh, again, first=3, last=6, optimizer=optimizer) == expected
    with pytest.raises(ValueError, match="of another recipe"):
        ablate.convert(net(), "mxfp8").load_state_dict(state["run"])
    with pytest.raises(ValueError, match="of another seed"):
        ablate.convert(net(), recipe, seed=1).load_state_dict(state["run"])


def test_handles_that_loaded_one_state_do_not_share_it():
    recipe = {"from": "nvfp4", "weights": {"q_ema": {"start": 0, "decay": 0.5}}}
    first = net()
    run = ablate.convert(first, recipe)
    optimizer = torch.optim.SGD(first.parameters(), lr=0.1)
    trained(first, run, last=2, optimizer=optimizer)
    weights, state = copy.deepcopy(first.state_dict()), run.state_dict()
    handles = []
    for _ in range(2):
        model = net(seed=5)
        again = ablate.convert(model, recipe)
        model.load_state_dict(weights)
        again.load_state_dict(state)
        handles.append((model, again, torch.optim.SGD(model.parameters(), lr=0.1)))
    losses = [trained(m, r, first=2, last=5, optimizer=o) for m, r, o in handles]
    assert losses == [trained(first, run, first=2, last=5, optimizer=optimizer)] * 2


def test_micro_batches_draw_bits_of_their_own_whoever_calls_the_layers():
    """The same batch twice in a step: other bits, so another gradient; and the same in every repetition."""

    def gradients(calls: int) -> list[torch.Tensor]:
        model = net()
        run = ablate.convert(model, {"from": "nvfp4", "dgrad": {"g": {"rounding": "stochastic"}}})
        found = []
        with run.step():
            for _ in range(calls):
                model.zero_grad()
                loss_of(model, 0).backward()
                found.append(model.trunk[0].up.weight.grad.clone())
        return found

    first, second = gradients(2)
    assert not torch.equal(first, second)
    assert torch.equal(first, gradients(1)[0])
    assert all(torch.equal(a, b) for a, b in zip((first, second), gradients(2), strict=True))


def test_recomputed_activations_are_not_another_micro_batch():
    from torch.utils.checkpoint import checkpoint

    def train_one(how) -> list[torch.Tensor]:
        model = net()
        run = ablate.convert(model, "nvfp4", set={"recipe.fprop.x.rounding": "stochastic"})
        with run.step():
            for number in range(2):
                x = model.stem(batch(number))
                for block in model.trunk:
                    x = how(block, x)
                model.head(x).square().mean().backward()
        return [p.grad for p in model.parameters()]

    expected = train_one(lambda block, x: block(x))
    for reentrant in (False, True):
        found = train_one(lambda block, x, r=reentrant: checkpoint(block, x, use_reentrant=r))
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), reentrant


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_recomputation_with_several_waiting_micro_batches_is_refused_where_it_draws(reentrant, order):
    from torch.utils.checkpoint import checkpoint

    def gradients(recipe: dict, how) -> list[torch.Tensor]:
        model = net()
        run = ablate.convert(model, recipe)
        with run.step():
            losses = []
            for number in range(2):
                x = model.stem(batch(number))
                for block in model.trunk:
                    x = how(block, x)
                losses.append(model.head(x).square().mean())
            for number in order:
                losses[number].backward()
        return [p.grad for p in model.parameters()]

    def again(block, x):
        return checkpoint(block, x, use_reentrant=reentrant)

    drawn = {"from": "nvfp4", "fprop": {"x": {"rounding": "stochastic"}}}
    with pytest.raises(RuntimeError, match=r"trunk\.2\.up: 2 forward passes .* backward after each"):
        gradients(drawn, again)
    nearest = {"g": {"rounding": "nearest"}}
    steady = {"from": "nvfp4", "dgrad": nearest, "wgrad": nearest}
    expected = gradients(steady, lambda block, x: block(x))
    assert all(map(torch.equal, gradients(steady, again), expected))


@pytest.mark.parametrize("reentrant", [False, True])
def test_recomputation_belongs_to_the_waiting_call_and_not_to_the_last_one(reentrant):
    """A pass without a graph comes between the forward and the backward pass of a micro-batch."""
    from torch.utils.checkpoint import checkpoint

    def gradients(how) -> list[torch.Tensor]:
        model = net()
        run = ablate.convert(model, "nvfp4", set={"recipe.fprop.x.rounding": "stochastic"})
        with run.step():
            for number in range(2):
                x = model.stem(batch(number))
                for block in model.trunk:
                    x = how(block, x)
                loss = model.head(x).square().mean()
                if not reentrant:
                    with torch.no_grad():
                        loss_of(model, 7)
                loss.backward(retain_graph=not reentrant)
                if not reentrant:
                    loss.backward()
        return [p.grad for p in model.parameters()]

    found = gradients(lambda block, x: checkpoint(block, x, use_reentrant=reentrant))
    assert all(map(torch.equal, found, gradients(lambda block, x: block(x))))


def test_a_copy_of_the_model_follows_the_steps_and_the_handle_is_not_copied():
    model = net()
    run = ablate.convert(model, "nvfp4")
    mean = copy.deepcopy(model)
    with pytest.raises(RuntimeError, match="no step"):
        loss_of(mean, 0)
    with run.evaluation():
        assert torch.equal(loss_of(mean, 0), loss_of(model, 0))
    trained(model, run, last=2)
    with run.evaluation():
        before = loss_of(mean, 0)
        assert not torch.equal(before, loss_of(model, 0))
        mean.load_state_dict(model.state_dict())
        run.metrics()
    with run.evaluation():
        assert torch.equal(loss_of(mean, 0), loss_of(model, 0))
    with pytest.raises(TypeError, match="cannot be copied"):
        copy.deepcopy(run)


def test_a_copy_is_restored_alone():
    model = net()
    run = ablate.convert(model, "nvfp4")
    mean = copy.deepcopy(model)
    assert run.restore(mean) is mean
    assert not torch.allclose(loss_of(mean, 0), torch.zeros(()))
    assert all(type(module) is nn.Linear for module in mean.modules() if isinstance(module, nn.Linear))
    trained(model, run, last=1)
    with pytest.raises(ValueError, match=r"trunk\.0\.up is a plain layer: this is no copy"):
        run.restore(net())
    with pytest.raises(ValueError, match=r"trunk\.0\.up is missing: this is no copy"):
        run.restore(model.trunk)


def test_a_pickled_model_or_handle_is_refused_with_the_way_out(tmp_path):
    model = net()
    run = ablate.convert(model, "nvfp4")
    with pytest.raises(
        TypeError, match=r"trunk\.0\.up is converted, .* state_dict\(\) instead, or call restore"
    ):
        torch.save(model, tmp_path / "model.pt")
    with pytest.raises(TypeError, match=r"save its state_dict\(\) instead"):
        pickle.dumps(run)
    torch.save(run.restore(), tmp_path / "model.pt")


@pytest.mark.parametrize("precision", ["bf16", "nvfp4"])
def test_compiled_layers_add_the_bias_as_eager_ones_do(precision):
    """The output and all gradients, to the bit: high-precision layers round the sum with the bias once."""

    def found(compiled: bool) -> list[torch.Tensor]:
        model = net()
        for p in model.parameters():
            if p.dim() == 1:
                nn.init.normal_(p)
        run = ablate.convert(model, precision)
        called = torch.compile(model, backend="aot_eager") if compiled else model
        with run.step():
            y = called(batch(0))
            y.square().mean().backward()
        return [y.detach(), *(p.grad for p in model.parameters())]

    assert all(map(torch.equal, found(True), found(False)))


def test_a_measured_step_without_tokens_measures_the_weights_alone():
    model = net()
    run = ablate.convert(model, "nvfp4", measure_every=1)
    with run.step():
        model(torch.zeros(0, 8)).sum().backward()
    measured = {name.split("/")[1] for name in run.metrics() if name.startswith("quant/")}
    assert measured == {"fprop.w", "dgrad.w"}


def test_evaluation_changes_no_bit_of_the_training():
    plainly, watched = net(), net()
    expected = trained(plainly, ablate.convert(plainly, "fp8_delayed"), last=5)
    run, losses = ablate.convert(watched, "fp8_delayed"), []
    optimizer = torch.optim.AdamW(watched.parameters(), lr=1e-2)
    for step in range(5):
        with run.evaluation(), torch.no_grad():
            loss_of(watched, 77)
        losses += trained(watched, run, first=step, last=step + 1, optimizer=optimizer)
        with run.evaluation(high_precision=True), torch.no_grad():
            loss_of(watched, 78)
    assert losses == expected


@pytest.mark.parametrize("recipe", ["nvfp4", "fp8_delayed"])
@pytest.mark.parametrize("event", ["exception", "comparison"])
def test_an_aborted_step_and_a_comparison_on_another_batch_leave_no_trace(recipe, event):
    def after(disturbed: bool) -> tuple[list[float], dict[str, float]]:
        model = net()
        run = ablate.convert(model, recipe, measure_every=0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        losses = trained(model, run, last=2, optimizer=optimizer)
        if disturbed and event == "exception":
            with suppress(KeyError), run.step():
                (100 * model(100 * batch(9))).sum().backward()
                raise KeyError
            optimizer.zero_grad()
        for step in range(2, 5):
            with run.step():
                if disturbed and event == "comparison":
                    run.compare_gradient(lambda: (100 * model(100 * batch(9))).sum().backward())
                loss = loss_of(model, step)
                loss.backward()
                optimizer.step()
                optimizer.zero_grad()
            losses.append(loss.item())
        return losses, {name: value for name, value in run.metrics().items() if "grad/" not in name}

    assert after(True) == after(False)


def test_telemetry_changes_no_bit_and_measures():
    never, often = net(), net()
    silent, run = (
        ablate.convert(never, "nvfp4", measure_every=0),
        ablate.convert(often, "nvfp4", measure_every=1),
    )
    assert trained(never, silent) == trained(often, run)
    metrics = run.metrics()
    assert metrics["quant/fprop.x/sqnr_db"] > 10
    assert metrics["quant/fprop.w/trunk.0.up/sqnr_db"] > 10
    assert 0 < metrics["weights/flipped"] < 1
    assert metrics["flops/fp4_share"] == 1.0
    assert not {name for name in silent.metrics() if name.startswith("quant/")}


def test_printed_measurements_and_alarms_are_short_and_complete_sentences():
    model = net()
    run = ablate.convert(model, "nvfp4", measure_every=1)
    trained(model, run)
    text = str(run.metrics())
    assert len(text) < 1500 < len(str(dict(run.metrics())))
    assert f"flops/fp4_share: {run.metrics()['flops/fp4_share']:.4g}" in text.splitlines()
    assert f"and {len(run.metrics()) - text.count(chr(10)):,} more" in text
    alarm = Alarm("a", "above", 0.5, "{:.1%} is too much")
    assert str(alerts({"a": 0.625}, [alarm])) == "[62.5% is too much]"


def test_operands_that_are_not_finite_raise_an_alarm_in_a_loop_of_ones_own():
    model = net()
    run = ablate.convert(model, "nvfp4", measure_every=0)
    trained(model, run, last=1)
    assert run.alarms() == []
    with torch.no_grad():
        model.stem.bias.fill_(torch.inf)
    trained(model, run, last=1)
    count = run.metrics()["nan/activation"]
    assert count > 0
    alarm, origin = run.alarms()
    assert str(alarm) == f"operands with a NaN or an infinity so far: {count:.0f}"
    assert (origin.step, origin.part, origin.name) == (2, "fprop.x", "trunk.0.up")


def test_the_gradient_is_compared_and_everything_else_stays():
    plainly, compared = net(), net()
    expected = trained(plainly, ablate.convert(plainly, "nvfp4"))
    run, losses = ablate.convert(compared, "nvfp4"), []
    optimizer = torch.optim.AdamW(compared.parameters(), lr=1e-2)
    for step in range(4):
        with run.step():
            found = run.compare_gradient(lambda s=step: loss_of(compared, s).backward())
            loss = loss_of(compared, step)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    assert losses == expected
    assert 0.5 < found["grad/cosine_to_bf16"] < 1
    assert run.metrics()["grad/noise_ratio"] == found["grad/noise_ratio"]


def test_a_schedule_that_waits_for_a_measurement_asks_for_it():
    model = net()
    run = ablate.convert(model, "nvfp4", set={"recipe.schedule": [{"start": "noise_ratio:1000:2"}]})
    with pytest.raises(RuntimeError, match=r"call run\.compare_gradient"):
        trained(model, run, last=1)
    with run.step():
        run.compare_gradient(lambda: loss_of(model, 0).backward())
    with run.step():
        pass
    assert all(layer.products.remedy for layer in run.engine.layers.values())
    assert run.engine.tripped


@pytest.mark.parametrize("rule", ["osci_reset", "q_ema", "q_ramping"])
def test_rules_for_weights_act_around_the_optimizer(rule):
    specs = {
        "osci_reset": {"start": 0.0, "period": 4, "window": 3, "threshold": 1.0},
        "q_ema": {"start": 1},
        "q_ramping": {"period": 4, "window": 3},
    }
    with_rule, without = net(), net()
    run = ablate.convert(with_rule, {"from": "nvfp4", "weights": {rule: specs[rule]}}, steps=8)
    other = ablate.convert(without, "nvfp4", steps=8)
    trained(with_rule, run, last=8)
    trained(without, other, last=8)
    assert not all(
        torch.equal(a, b) for a, b in zip(with_rule.parameters(), without.parameters(), strict=True)
    )
    if rule == "q_ramping":
        with pytest.raises(RuntimeError, match="SGD has none"):
            trained(with_rule, run, optimizer=torch.optim.SGD(with_rule.parameters(), lr=0.1))


@pytest.mark.parametrize("rule", ["osci_reset", "q_ema", "q_ramping"])
@pytest.mark.parametrize("named", [False, True])
def test_a_rule_that_changes_gradients_refuses_a_closure_that_computes_them(rule, named):
    def after(closure: bool) -> list[torch.Tensor]:
        model = net()
        run = ablate.convert(model, {"from": "nvfp4", "weights": {rule: RULES[rule]}}, steps=6)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        for step in range(6):

            def computed(step: int = step) -> torch.Tensor:
                optimizer.zero_grad()
                loss = loss_of(model, step)
                loss.backward()
                return loss

            with run.step():
                if not closure:
                    computed()
                given = computed if closure else None
                optimizer.step(closure=given) if named else optimizer.step(given)
        return [parameter.detach() for parameter in model.parameters()]

    expected = after(False)
    if rule == "q_ramping":
        with pytest.raises(RuntimeError, match="give it no closure"):
            after(True)
    else:
        assert all(torch.equal(a, b) for a, b in zip(after(True), expected, strict=True))


RULES = {
    "osci_reset": {"start": 0.0, "period": 4, "window": 3, "threshold": 1.0},
    "q_ema": {"start": 1, "decay": 0.5},
    "q_ramping": {"period": 4, "window": 3, "threshold": 1.0},
    "master": "bf16",
}


@pytest.mark.parametrize("rule", RULES)
def test_several_optimizers_change_no_bit_of_one_and_rules_act_once_a_step(rule):
    def after(groups: int) -> tuple[list[torch.Tensor], float]:
        model = net()
        recipe = {"from": "nvfp4", "weights": {rule: RULES[rule]}}
        run = ablate.convert(model, recipe, steps=8, measure_every=1)
        parameters = list(model.parameters())[::-1]
        parts = [parameters[n::groups] for n in range(groups)]
        optimizers = [torch.optim.AdamW(part, lr=1e-2) for part in parts]
        for step in range(8):
            with run.step():
                loss_of(model, step).backward()
                for optimizer in optimizers:
                    optimizer.step()
                model.zero_grad()
        return [p.detach() for p in model.parameters()], run.metrics()["weights/flipped"]

    (expected, flips), (found, others) = after(1), after(3)
    assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True))
    assert others == flips


def test_a_ramped_weight_waits_with_its_coupled_decay_and_one_without_a_gradient_is_left_alone():
    """Between its updates a slowed weight stays as it is under Adam, whose decay is in the gradient."""
    model = net()
    run = ablate.convert(model, {"from": "nvfp4", "weights": {"q_ramping": RULES["q_ramping"]}})
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2, weight_decay=0.1)
    trained(model, run, last=3, optimizer=optimizer)
    (rule,) = run.engine.weights.rules
    slowed = rule.waits["trunk.0.up"] > 1
    assert slowed.any()
    before = model.trunk[0].up.weight.detach().clone()
    trained(model, run, first=3, last=4, optimizer=optimizer)
    still = slowed & (4 % rule.waits["trunk.0.up"] != 0)
    assert still.any()
    assert torch.equal(model.trunk[0].up.weight[still], before[still])
    before = model.trunk[1].up.weight.detach().clone()
    with run.step():
        model.head(model.trunk[0](model.stem(batch(0)))).square().mean().backward()
        optimizer.step()
    assert torch.equal(model.trunk[1].up.weight, before)


def test_it_works_under_autocast_and_with_bf16_parameters():
    for dtype, cast in ((torch.float32, True), (torch.bfloat16, False)):
        model = net().to(dtype)
        run = ablate.convert(model, "nvfp4")
        with run.step(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=cast):
            loss = model(batch(0).to(dtype)).square().mean()
            loss.backward()
        assert all(
            p.grad is not None and p.grad.dtype == dtype and p.grad.isfinite().all()
            for p in model.parameters()
        )


@pytest.mark.parametrize("traced", [False, True])
@pytest.mark.parametrize("preset", ["nvfp4", "fp8_delayed"])
def test_a_backward_pass_inside_of_autocast_computes_the_same(preset, traced):
    def gradients(inside: bool) -> list[torch.Tensor]:
        model = net()
        run = ablate.convert(model, preset, measure_every=0)
        called = torch.compile(model, backend="aot_eager") if traced else model
        with run.step():
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = called(batch(0)).square().mean()
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=inside):
                loss.backward()
        return [p.grad for p in model.trunk[2].parameters()]  # the head's input gradient is rounded anyway

    assert all(torch.equal(a, b) for a, b in zip(gradients(False), gradients(True), strict=True))


def test_tied_layers_are_one_layer():
    model = net()
    model.trunk[2].up = model.trunk[0].up
    run = ablate.convert(model, "nvfp4")
    assert model.trunk[2].up is model.trunk[0].up
    trained(model, run)
    run.restore()
    assert type(model.trunk[2].up) is nn.Linear
    assert model.trunk[2].up is model.trunk[0].up


def test_a_block_that_is_called_several_times_is_found_under_all_its_names():
    model = net()
    model.trunk[2] = model.trunk[0]
    run = ablate.convert(model, "nvfp4")
    assert model.trunk[2].up is model.trunk[0].up
    assert {row.name: row.converted for row in run.layers}["trunk.0.up"]
    trained(model, run)


def test_a_layer_without_a_shape_is_refused_by_name():
    model = net()
    model.trunk[0].extra = nn.LazyLinear(8)
    with pytest.raises(ValueError, match=r"trunk\.0\.extra: its weight has no shape"):
        ablate.convert(model, "nvfp4")


@pytest.mark.parametrize(
    "recipe", ["fp8_delayed", {"from": "nvfp4", "weights": {"q_ema": {"start": 1, "decay": 0.5}}}]
)
def test_a_copy_evaluates_by_the_histories_and_averages_of_the_original(recipe):
    model = net()
    run = ablate.convert(model, recipe)
    mean = copy.deepcopy(copy.deepcopy(model))
    trained(model, run)
    mean.load_state_dict(model.state_dict())
    with run.evaluation(), torch.no_grad():
        assert torch.equal(loss_of(mean, 0), loss_of(model, 0))


def test_torch_compile_gives_the_same_training(tmp_path, monkeypatch):
    import shutil

    if not (shutil.which("g++") or shutil.which("clang++")):
        pytest.skip("torch.compile on a CPU needs a C++ compiler")
    eager, traced = net(), net()
    expected = trained(eager, ablate.convert(eager, "nvfp4"))
    run = ablate.convert(traced, "nvfp4")
    found = trained(torch.compile(traced, backend="aot_eager", fullgraph=True), run)
    assert found == expected


def test_compiled_micro_batches_draw_their_own_bits_in_later_backward_passes():
    def gradients(traced: bool) -> list[torch.Tensor]:
        model = net()
        run = ablate.convert(model, "nvfp4", measure_every=0)
        called = torch.compile(model, backend="aot_eager") if traced else model
        with run.step():
            losses = [called(batch(n)).square().mean() for n in range(2)]
            for loss in losses:
                loss.backward()
        return [p.grad for p in model.parameters()]

    assert all(torch.equal(a, b) for a, b in zip(gradients(True), gradients(False), strict=True))


def test_the_compiled_backward_operator_returns_the_strides_that_it_announces():
    """Inductor relies on them; the gradient of a transposed input is contiguous nevertheless."""
    from ablate.engines.compiled import operator

    model = net()
    run = ablate.convert(model, "nvfp4", measure_every=0)
    layer = model.trunk[0].up
    number = operator(layer).args[0]
    dy, x = torch.randn(16, 64), torch.randn(32, 16).t()
    with run.step():
        model(batch(0))
        torch.library.opcheck(
            torch.ops.ablate.linear_backward.default,
            (dy, x, layer.weight.detach(), layer.bias.detach(), torch.tensor(0), number),
            test_utils="test_faketensor",
        )


def test_torchs_own_encoder_layers_are_quantised_in_evaluation_too():
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(32, 2, 64, dropout=0.0, batch_first=True)
    model = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run = ablate.convert(model, "nvfp4")
    x = torch.randn(2, 8, 32)
    model.eval()
    with run.evaluation(), torch.no_grad():
        low = model(x)
    with run.evaluation(high_precision=True), torch.no_grad():
        high = model(x)
    assert not torch.equal(low, high)
    reasons = {row.name: row.reason for row in run.layers if not row.converted}
    assert "nn.MultiheadAttention" in reasons["layers.0.self_attn.in_proj_weight"]


def test_casts_are_reused_for_the_same_weights_only():
    """Ways to put other weights in the place of a layer's, after its casts were made in the same context."""
    from torch.func import functional_call

    def assign(model: nn.Module, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        model.load_state_dict(weights, assign=True)
        return loss_of(model, 0)

    def data(model: nn.Module, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        for name, parameter in model.named_parameters():
            parameter.data = weights[name]
        return loss_of(model, 0)

    def functional(model: nn.Module, weights: dict[str, torch.Tensor]) -> torch.Tensor:
        return functional_call(model, weights, batch(0)).square().mean()

    def gradients(way, *, before: bool) -> list[torch.Tensor]:
        model, weights = net(), {name: w.clone() for name, w in net(seed=3).state_dict().items()}
        run = ablate.convert(model, "nvfp4", set={"sr": False}, measure_every=0)
        with run.step():
            if before:
                loss_of(model, 1).backward()
            model.zero_grad()
            if way is functional:
                weights = {name: w.requires_grad_() for name, w in weights.items()}
            way(model, weights).backward()
        return [p.grad for p in (weights if way is functional else dict(model.named_parameters())).values()]

    for way in (assign, data, functional):
        expected, found = gradients(way, before=False), gradients(way, before=True)
        assert all(torch.equal(a, b) for a, b in zip(found, expected, strict=True)), way


# --- single operands and recipes --------------------------------------------------------------------


def test_quantize_is_what_a_layer_multiplies():
    from ablate.numerics.quantize import quantize as reference
    from ablate.numerics.spec import Quant

    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).bfloat16()
    found = ablate.quantize(x, Quant())
    expected = reference(x, Quant(), keep=True)
    assert torch.equal(found.values, expected.dequantize())
    assert found.scales.shape == (32, 4)
    assert torch.equal(found.codes.float() * 2 % 1, torch.zeros_like(found.codes.float()))
    assert found.errors["sqnr_db"] == pytest.approx(
        10
        * torch.log10(x.double().square().sum() / (x.double() - found.values.double()).square().sum()).item(),
        abs=1e-3,
    )
    assert not torch.equal(
        ablate.quantize(x, slot="wgrad.g", step=1).codes, ablate.quantize(x, slot="wgrad.g", step=2).codes
    )
    with pytest.raises(ValueError, match="no such operand"):
        ablate.quantize(x, slot="wgrad.y")
    with pytest.raises(ValueError, match="leaves it in high precision"):
        ablate.quantize(x, "bf16")


@every(dtype=(torch.bfloat16, torch.float16, torch.float32), view=("whole", "transposed", "strided", "3-d"))
def test_quantize_casts_the_numbers_that_it_is_handed(dtype, view):
    from ablate.numerics.quantize import quantize as reference
    from ablate.numerics.spec import Quant

    x = torch.randn(32, 64, generator=torch.Generator().manual_seed(0)).to(dtype)
    handed = {"whole": x, "transposed": x.t().contiguous().t(), "3-d": x.view(4, 8, 64)}
    handed["strided"] = torch.stack((x, -x), dim=2)[:, :, 0]
    found, expected = ablate.quantize(handed[view], Quant()), reference(x, Quant(), keep=True)
    assert torch.equal(found.values, expected.dequantize())
    assert torch.equal(found.codes, expected.codes)
    assert found.amax == x.abs().max()
    assert ablate.conform(lambda x: ablate.quantize(x).values, "nvfp4", only=["random_fp32"]).passed


@every(x=(torch.ones(2, 16).double(), torch.ones(2, 16, dtype=torch.int32), torch.ones(2, 16, dtype=bool)))
def test_quantize_refuses_what_it_would_have_to_round_first(x):
    with pytest.raises(TypeError, match="bf16, fp16 or fp32"):
        ablate.quantize(x)


@every(shape=((), (0, 16), (3, 0)))
def test_quantize_refuses_what_has_no_block(shape):
    with pytest.raises(ValueError, match="not a matrix"):
        ablate.quantize(torch.ones(shape))


def test_recipes_are_listed_compared_and_read_from_files(tmp_path):
    assert set(ablate.presets()) == set(PRESETS)
    assert ablate.diff("nvfp4", "nvfp4") == {}
    assert ablate.diff("nvfp4", {"from": "nvfp4", "wgrad": {"hadamard": None}}).keys() == {"wgrad.hadamard"}
    path = tmp_path / "mine.yaml"
    path.write_text("from: nvfp4\nwgrad: {g: {bits: 24}}\n")
    assert ablate.recipe(path).wgrad.g.bits == 24
    for name, make in PRESETS.items():
        whole = tmp_path / f"{name}.json"
        whole.write_text(make().model_dump_json())
        assert ablate.recipe(whole) == make(), name
    assert ablate.recipe("nvfp4", {"sr": False}).wgrad.g.rounding == "nearest"


@pytest.mark.parametrize("preset", ANYWHERE)
def test_torchs_default_dtype_changes_no_bit(preset):
    def gradients(default: torch.dtype) -> list[torch.Tensor]:
        model, x = net(), batch(0)
        run = ablate.convert(model, preset, steps=4, measure_every=1)
        torch.set_default_dtype(default)
        try:
            with run.step():
                if run.wants_gradient:
                    run.compare_gradient(lambda: model(x).square().mean().backward())
                model(x).square().mean().backward()
        finally:
            torch.set_default_dtype(torch.float32)
        return [p.grad for p in model.parameters()]

    expected = gradients(torch.float32)
    for dtype in (torch.float64, torch.bfloat16, torch.float16):
        assert all(torch.equal(a, b) for a, b in zip(gradients(dtype), expected, strict=True)), dtype
