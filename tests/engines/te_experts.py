"""Contract of packed experts on the engine: Transformer Engine's own te.GroupedLinear over the double, beside the emulator. Prints JSON."""

import json
from functools import partial

import te_contract
import torch
from support.packed_experts import SIZES, Model, PackedExperts
from te_contract import B200, RECIPES, WHOLE, Passes, nvfp4, remembering
from torch import Tensor, nn

from ablate.engines import experts
from ablate.engines import transformer_engine as native
from ablate.engines.expert_layers import EmulatedExpert, Group
from ablate.experiment import engine_selection
from ablate.experiment.arms import Arm
from ablate.numerics.philox import Clock
from ablate.recipes import PRESETS
from ablate.recipes.experts import Experts
from ablate.recipes.layers import Match
from ablate.recipes.recipe import Layers, Phase, Products, Recipe, Rule, Run
from ablate.recipes.te_mapping import te_recipe
from ablate.training.loop import Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads import WORKLOADS

WIDTH, SHAPE = 64, {"width": 64, "hidden": 96}
GROUPED = RECIPES | {name: PRESETS[name]().products for name in ("mxfp8", "fp8_current", "nvfp4_dequantised")}
LAYOUTS = {
    "as they are": {},
    "transposed": {"transposed": True},
    "gate apart": {"gate_up": "split"},
    "gate apart, interleaved, transposed": {"gate_up": "split", "transposed": True, "interleaved": True},
}


def groups(
    products: Products, gate_up: str = "fused", **layout: bool
) -> tuple[list[tuple[nn.Module, Group]], ...]:
    """The emulator's products and the engine's, each with its module."""
    found = []
    for engine in ("emulated", "native"):
        clock, module = Clock(0), PackedExperts(**SHAPE, **layout)

        make = partial(EmulatedExpert, clock=clock, dtype=torch.bfloat16)
        if engine == "native":
            draws = native.Draws(clock)
            make = partial(native.NativeExpert, clock=clock, dtype=torch.bfloat16, draws=draws)
        experts.attach(module, "blocks.0.experts", make, Experts(gate_up=gate_up))
        for layer in module.forward.layers:
            layer.products = products
        found.append([(module, group) for group in (*module.forward.up, module.forward.down)])
    return tuple(found)


def computed(module: nn.Module, group: Group, sizes: tuple[int, ...] = SIZES, seed: int = 5) -> list[Tensor]:
    """y, dx and the packed parameter's gradient for Gaussian x and dy; experts differ in scale."""
    first, g = group.layers[0], torch.Generator().manual_seed(seed)
    scale = torch.tensor([4.0**number for number in range(len(sizes))]).repeat_interleave(torch.tensor(sizes))
    x = (scale[:, None] * torch.randn(sum(sizes), first.in_features, generator=g)).bfloat16().requires_grad_()
    dy = (torch.randn(sum(sizes), first.out_features, generator=g) / scale[:, None]).bfloat16()
    module.zero_grad()
    y = group(x, sizes)
    y.backward(dy)
    return [y.detach(), x.grad, first.owner.grad]


def differ(products: Products, **layout: bool | str) -> list[float]:
    """The share of elements that differ, and the largest difference over the expert's largest magnitude, over all that is computed."""
    shares, largest = [], []
    for ours, theirs in zip(*groups(products, **layout), strict=True):
        for number, pair in enumerate(zip(computed(*ours), computed(*theirs), strict=True)):
            split = [z.unbind() if number == 2 else z.split(list(SIZES)) for z in pair]
            for a, b in zip(*split, strict=True):
                if a.numel():
                    shares.append(float((a != b).double().mean()))
                    largest.append(float((a - b).abs().max() / a.abs().max().clamp(min=1e-30)))
    return [max(shares), max(largest)]


def padded() -> dict[str, list[list[int]]]:
    """The rows of each expert in the products that TE is given, by recipe."""
    import transformer_engine_torch as extension

    found: dict[str, list[list[int]]] = {}
    whole = extension.te_general_grouped_gemm
    for name in ("not rotated", "mxfp8", "fp8_current"):
        seen: list[list[int]] = found.setdefault(name, [])

        def noted(*arguments, seen=seen):
            seen.append(list(arguments[6]))
            return whole(*arguments)

        extension.te_general_grouped_gemm = noted
        computed(*groups(GROUPED[name])[1][0])
    extension.te_general_grouped_gemm = whole
    return found


def said_by(call, *arguments) -> str:
    """Return the message of the error that a call raises."""
    try:
        call(*arguments)
    except (ValueError, RuntimeError) as error:
        return str(error)
    return ""


def refused() -> dict[str, str]:
    """Return the messages by which the engine refuses what te.GroupedLinear does not compute."""
    one = Layers(rules=(Rule(match=Match(name="*.experts.1.*"), use=None),))
    shared = nvfp4().model_copy(update={"experts": Experts(rounding_state="shared")})
    recipes = {
        "one": nvfp4().model_copy(update={"layers": one}),
        "delayed": remembering(4),
        "shared": shared,
        "other": PRESETS["ufp4"](),
    }
    said = {
        name: said_by(native.convert, Model(**SHAPE), recipe, Clock(0)) for name, recipe in recipes.items()
    }
    said["features"] = said_by(native.convert, Model(width=40, hidden=96), nvfp4(), Clock(0))
    module, group = groups(WHOLE)[1][0]
    idle = native.convert(Model(**SHAPE), nvfp4(), Clock(0)).experts["blocks.0.experts"].up[0]
    said["none in force"] = said_by(idle, torch.zeros(sum(SIZES), WIDTH), SIZES)
    computed(module, group)
    ((used, _),) = group.built.values()
    for layer in group.layers:
        layer.products = RECIPES["not rotated"]
    description = te_recipe(group.layers[0].products)
    group.built[description] = used, native.build(description)
    said["recipe of another"] = said_by(computed, module, group)
    group.layers[3].products = WHOLE
    said["mixed"] = said_by(computed, module, group)
    return said


def observed() -> dict[str, object]:
    """Return what a probe receives of both passes, and the same passes without it."""
    module, group = groups(WHOLE)[1][0]
    silent = computed(module, group)
    probe = Passes()
    for layer in group.layers:
        layer.context.probe = probe
    y, dx, dw = computed(module, group)
    chosen = [number for number, size in enumerate(SIZES) if size]
    of_y, of_dx = y.split(list(SIZES)), dx.split(list(SIZES))
    outputs = [probe.passes[3 * number + 2] for number in range(len(chosen))]
    backward = [probe.passes[3 * len(chosen) :][5 * number : 5 * number + 5] for number in range(len(chosen))]
    order = {tuple(each[1].flatten()[:4].tolist()): each for each in backward}  # by weight: autograd's order
    gradients = [
        order[tuple(group.layers[number].weight.detach().bfloat16().flatten()[:4].tolist())]
        for number in chosen
    ]
    ((used, _),) = group.built.values()
    return {
        "fused": used.use_grouped_tensor,
        "same": [torch.equal(a, b) for a, b in zip(silent, (y, dx, dw), strict=True)],
        "outputs": [torch.equal(of_y[n], each) for n, each in zip(chosen, outputs, strict=True)],
        "dx": [torch.equal(of_dx[n], each[3]) for n, each in zip(chosen, gradients, strict=True)],
        "dw": [torch.equal(dw[n].bfloat16(), each[4]) for n, each in zip(chosen, gradients, strict=True)],
        "covered": [error.expected().covers(error.measured) for error in probe.errors],
    }


def counted() -> list[int]:
    """Return each expert's number of outputs with an infinity, after a token of the last has one."""
    _, group = groups(WHOLE)[1][0]
    x = torch.ones(sum(SIZES), WIDTH)
    x[-1, 0] = torch.inf
    with torch.no_grad():
        group(x, SIZES)
    return [int(layer.nonfinite) for layer in group.layers]


def trained() -> dict[str, object]:
    """A small mixture of experts under both engines: a block in bf16, a phase of another recipe, one in bf16, and another recipe's reading."""
    phases = (Phase(start="step:2", use=RECIPES["not rotated"]), Phase(start="step:4", use=None))
    recipe = nvfp4().model_copy(update={"layers": Layers(skip_last=1), "schedule": phases})
    config = WORKLOADS["gpt"](
        **{"layers": 2, "width": 32, "heads": 2, "experts": {"count": 4, "shared": 1}, "hidden": 96},
        **{"steps": 6, "batch": 2, "context": 32, "eval_tokens": 128, "eval_batch": 2, "accumulate": 2},
    )
    arm = Arm("nvfp4", {}, config, recipe)
    engine_selection.choose(engine_selection.NATIVE, [arm], "cuda", machine=B200)

    def losses(recipe: Recipe, engine: str) -> list[dict[str, float]]:
        run = TrialRun(recipe, 0, engine, "cpu", Telemetry(every=2, log=1, shadow=3))
        names = ("train/loss", "val/loss", "val/loss_bf16", "flops/fp4_share")
        return [{n: v for n, v in record.metrics.items() if n in names} for record in config.records(run)]

    models = [config.prepare(recipe, 0, "cpu", engine) for engine in ("emulated", "transformer_engine")]
    before, after = (run.model.state_dict() for run in models)
    same = list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
    return {
        "losses": {engine: losses(recipe, engine) for engine in ("emulated", "transformer_engine")},
        "high": losses(PRESETS["bf16"](), "emulated"),
        "states": same,
        "layers": sorted({type(layer).__name__ for layer in models[1].engine.layers.values()}),
    }


def read() -> list[bool]:
    """Return whether a reading of another recipe is the emulator's, and the engine's own product follows it."""
    model = Model(**SHAPE)
    engine = native.convert(model, nvfp4(), Clock(0))
    engine.at(0, Run(10))
    module, group = model.experts, model.experts.forward.up[0]
    with engine.reading(PRESETS["mxfp4"]()), torch.no_grad():
        other = group(torch.ones(sum(SIZES), WIDTH).bfloat16(), SIZES)
        built = len(group.built)
    ours, _ = groups(PRESETS["mxfp4"]().products)
    with torch.no_grad():
        wanted = ours[0][1](torch.ones(sum(SIZES), WIDTH).bfloat16(), SIZES)
    computed(module, group)
    return [torch.equal(other, wanted), built == 0, len(group.built) == 1]


if __name__ == "__main__":
    print(
        json.dumps(
            {
                "each": {name: differ(products) for name, products in GROUPED.items()},
                "layouts": {name: differ(WHOLE, **layout) for name, layout in LAYOUTS.items()},
                "padded": padded(),
                "refused": refused(),
                "observed": observed(),
                "counted": counted(),
                "trained": trained(),
                "read": read(),
            }
        )
    )
    assert te_contract.TE
