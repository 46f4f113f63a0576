"""Contract of the engine's layers: they compute what Transformer Engine's own te.Linear does, beside the emulator. As a program it prints JSON."""

import json
import sys
import warnings
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import te_double
import torch
from torch import Tensor, nn

warnings.simplefilter("ignore")  # TE's, of a machine without its native part
TE = te_double.install()

from ablate.engines import transformer_engine as native  # noqa: E402
from ablate.engines.emulated_layer import EmulatedLinear  # noqa: E402
from ablate.engines.hardware import ASSUMED, Machine  # noqa: E402
from ablate.engines.product_errors import of_gradients, of_output  # noqa: E402
from ablate.engines.products import Probe  # noqa: E402
from ablate.experiment import engine_selection  # noqa: E402
from ablate.experiment.arms import Arm, StartingPoint  # noqa: E402
from ablate.numerics.philox import Clock  # noqa: E402
from ablate.numerics.quantize import Operand  # noqa: E402
from ablate.numerics.scaling import encode_scale  # noqa: E402
from ablate.numerics.spec import Hadamard, Outer, Quant, Select  # noqa: E402
from ablate.recipes import PRESETS  # noqa: E402
from ablate.recipes.recipe import Dgrad, Fprop, Layers, Phase, Products, Recipe, Wgrad  # noqa: E402
from ablate.recipes.te_mapping import Builtin, recipe_refusals, te_recipe  # noqa: E402
from ablate.training.checkpoints import Checkpoints  # noqa: E402
from ablate.training.loop import Telemetry  # noqa: E402
from ablate.training.trial_run import TrialRun  # noqa: E402
from ablate.training.workloads import WORKLOADS  # noqa: E402

B200 = Machine("2.20.2", native=True, capability=(10, 0))
ASSUMED.set(B200)


class Scales(Probe):
    """A probe that keeps the encode scale of every operand by slot."""

    def __init__(self) -> None:
        self.seen: dict[str, float] = {}

    def operand(self, layer: str, slot: str, operand: Operand) -> None:
        self.seen[slot] = encode_scale(operand.amax, operand.quant).item()


def nvfp4(**knobs) -> Recipe:
    """NVIDIA's recipe without stochastic rounding, which TE's reference has not."""
    return StartingPoint("gpt", {}, "nvfp4").arm({"sr": False, **knobs}).recipe


WHOLE = nvfp4().products
CHOSEN = Quant(select=Select(among="scales", criterion="mae"), outer=Outer(bound=256.0))
BETTER = Quant(select=Select(among="scales", criterion="mse"), outer=Outer(bound=256.0))
RECIPES = {
    "rotated, square weights": WHOLE,
    "not rotated": nvfp4(rht=False).products,
    "weights in rows of 16": nvfp4(weights_2d=False).products,
    "forward alone": WHOLE.high_precision("backward"),
    "backward alone": WHOLE.high_precision("forward"),
    "rotated without signs": WHOLE.model_copy(
        update={"wgrad": WHOLE.wgrad.model_copy(update={"hadamard": Hadamard(signs="none")})}
    ),
    "wgrad in bf16": WHOLE.model_copy(update={"wgrad": Wgrad()}),
    "dgrad in bf16": WHOLE.model_copy(update={"dgrad": Dgrad()}),
    "Four Over Six forward": Products(fprop=Fprop(x=CHOSEN, w=CHOSEN)),
    "Four Over Six forward, rotated backward": WHOLE.model_copy(update={"fprop": Fprop(x=BETTER, w=BETTER)}),
    "weights from their forward copy": WHOLE.model_copy(
        update={"dgrad": Dgrad(g=Quant(), w=Quant(block="16x16", source="forward_bf16"))}
    ),
    "weights in rows from their forward copy": WHOLE.model_copy(
        update={
            "fprop": Fprop(x=Quant(), w=Quant()),
            "dgrad": Dgrad(g=Quant(), w=Quant(source="forward_bf16")),
        }
    ),
    "dequantised backward": PRESETS["nvfp4_dequantised"]().products,
    "activations by rows, dequantised backward": (
        PRESETS["nvfp4_row_scaled_fwd_high_precision_bwd"]().products
    ),
    "activations by rows": Products(fprop=Fprop(x=Quant(outer=Outer(granularity="row")), w=Quant())),
}


def layers(
    products: Products, features: tuple[int, int], seed: int, bias: bool = False
) -> Iterator[nn.Module]:
    """The emulator's layer and the engine's, with the same weights."""
    for kind in (EmulatedLinear, native.NativeLinear):
        g, clock = torch.Generator().manual_seed(seed), Clock(0)
        linear = nn.Linear(*features, bias=bias)
        for parameter in linear.parameters():
            parameter.data = torch.randn(parameter.shape, generator=g)
        layer = kind(
            linear,
            "blocks.0.a",
            clock,
            torch.bfloat16,
            *([native.Draws(clock)] if kind is native.NativeLinear else []),
        )
        layer.products = products
        yield layer


def computed(layer: nn.Module, tokens: int, seed: int) -> list[Tensor]:
    """y, dx, dw (and db) for Gaussian x and dy."""
    g = torch.Generator().manual_seed(1000 + seed)
    x = torch.randn(tokens, layer.in_features, generator=g).bfloat16().requires_grad_()
    dy = torch.randn(tokens, layer.out_features, generator=g).bfloat16()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, *(parameter.grad for parameter in layer.parameters())]


def differ(products: Products, shape: tuple[int, int, int], seed: int, bias: bool = False) -> list[float]:
    """The share of elements that differ, and the largest difference over the largest magnitude, over all that is computed."""
    tokens, inputs, outputs = shape
    ours, theirs = (
        computed(layer, tokens, seed) for layer in layers(products, (inputs, outputs), seed, bias)
    )
    pairs = [(a.double(), b.double()) for a, b in zip(ours, theirs, strict=True)]
    return [
        max(float((a != b).double().mean()) for a, b in pairs),
        max(float((a - b).abs().max() / a.abs().max()) for a, b in pairs),
    ]


def shapes(count: int) -> list[tuple[int, int, int]]:
    """Tokens, in- and out-features: multiples of 32 up to 256."""
    g = torch.Generator().manual_seed(3)
    return [tuple(32 * int(n) for n in torch.randint(1, 9, (3,), generator=g)) for _ in range(count)]


def switched() -> dict[str, list[float]]:
    """One layer under recipes in turn, some of one class, some none: how far each step is from the emulator's."""
    sequence = [("rotated", WHOLE), ("not rotated", RECIPES["not rotated"]), ("bf16", Products())]
    sequence += [
        ("forward alone", RECIPES["forward alone"]),
        ("backward alone", RECIPES["backward alone"]),
        ("rotated again", WHOLE),
    ]
    ours, theirs = layers(WHOLE, (96, 64), 5)
    found = {}
    for name, products in sequence:
        ours.products = theirs.products = products
        pairs = list(zip(computed(ours, 64, 6), computed(theirs, 64, 6), strict=True))
        found[name] = [max(float((a != b).double().mean()) for a, b in pairs)]
    return found


def trap() -> dict[str, object]:
    """Return what one te.Linear computes under a second recipe of the same class, and the engine's refusal of a recipe that was used before."""
    _, layer = layers(WHOLE, (64, 64), 7)
    computed(layer, 64, 8)
    ((used, _),) = layer.built.values()
    layer.products = RECIPES["not rotated"]
    description = te_recipe(layer.products)
    layer.built[description] = used, native.build(description)
    said = ""
    try:
        computed(layer, 64, 8)
    except RuntimeError as error:
        said = str(error)
    with TE.autocast(enabled=True, recipe=native.build(description)):
        torch.func.functional_call(
            used, {"weight": layer.weight.detach().bfloat16()}, (torch.ones(64, 64).bfloat16(),)
        )
    return {"said": said, "rotates still": used.quantizers["scaling_fwd"][0].with_rht}


def trained() -> dict[str, object]:
    """A small transformer under both engines: a layer policy, a phase of another recipe of the same class, and one in bf16."""
    phases = (Phase(start="step:2", use=RECIPES["not rotated"]), Phase(start="step:4", use=None))
    recipe = nvfp4().model_copy(update={"layers": Layers(skip_last=1), "schedule": phases})
    config = WORKLOADS["gpt"](
        layers=2, width=32, heads=2, steps=6, batch=2, context=32, eval_tokens=128, eval_batch=2, accumulate=2
    )
    losses = {
        engine: [
            {
                key: value
                for key, value in record.metrics.items()
                if key in ("train/loss", "val/loss", "val/loss_bf16", "flops/fp4_share")
            }
            for record in config.records(
                TrialRun(recipe, 0, engine, "cpu", Telemetry(every=2, log=1, shadow=3))
            )
        ]
        for engine in ("emulated", "transformer_engine")
    }
    high = [
        record.metrics["train/loss"]
        for record in config.records(TrialRun(PRESETS["bf16"](), 0, "emulated", "cpu", Telemetry(log=1)))
    ]
    models = [config.prepare(recipe, 0, "cpu", engine) for engine in ("emulated", "transformer_engine")]
    before, after = (dict(run.model.state_dict().items()) for run in models)
    same = list(before) == list(after) and all(torch.equal(before[name], after[name]) for name in before)
    kinds = sorted({type(layer).__name__ for layer in models[1].engine.layers.values()})
    return {"losses": losses, "high": high, "states": same, "layers": kinds, "names": len(before)}


QWEN3 = {
    **{"model_type": "qwen3", "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1},
    **{"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16},
}
SHORT = {"steps": 3, "batch": 2, "context": 32, "eval_tokens": 64, "eval_batch": 2, "lr": 3e-3}
WATCHED = {
    "policy": "fallback",
    "loss": 1.0001,
    "window": 4,
    "fallback": {"precision": "bf16", "slots": ["fprop.*"]},
}
OTHERS = {
    "all weights": ("finetune", SHORT | {"model": QWEN3}),
    "adapters": ("finetune", SHORT | {"model": QWEN3, "lora": {"rank": 4}}),
    "a guard that falls back": (
        "gpt",
        SHORT | {"layers": 1, "width": 32, "heads": 2, "lr": 0.3, "steps": 7, "guard": WATCHED},
    ),
}


def others() -> dict[str, dict[str, list[dict[str, float]]]]:
    """Return the losses that the workloads beside ablate's own transformer record under each engine, and those in bf16."""
    found: dict[str, dict[str, list[dict[str, float]]]] = {}
    for name, (workload, fields) in OTHERS.items():
        config = WORKLOADS[workload].model_validate_json(json.dumps(fields))
        for engine, recipe in (
            ("emulated", nvfp4()),
            (engine_selection.NATIVE, nvfp4()),
            ("bf16", PRESETS["bf16"]()),
        ):
            arm = Arm(name, {}, config, recipe)
            if engine == engine_selection.NATIVE:
                engine_selection.choose(engine, [arm], "cuda", machine=B200)
            records = config.records(
                TrialRun(recipe, 0, "emulated" if engine == "bf16" else engine, "cpu", Telemetry(log=1))
            )
            kept = [
                {key: value for key, value in record.metrics.items() if "loss" in key or key == "guard/lr"}
                for record in records
            ]
            found.setdefault(name, {})[engine] = kept
    return found


def remembering(steps: int) -> Recipe:
    """FP8 by the largest amax of so many steps before."""
    return Recipe.model_validate_json(
        PRESETS["fp8_delayed"]().model_dump_json().replace("delayed:1024", f"delayed:{steps}")
    )


def growing(step: int, micro_batch: int) -> float:
    """Return the factor of a layer's inputs and gradients: amaxes that rise and fall, so that each moment has a scale of its own."""
    return (1.0, 6.0, 0.25, 2.0, 0.5, 3.0)[step] * (1 + micro_batch)


def at(layer: nn.Module, step: int, micro_batch: int, seed: int, factor: float) -> list[Tensor]:
    """y, dx, dw in one moment of training, for Gaussian x and dy times a factor."""
    layer.clock.step, layer.clock.micro_batch = step, micro_batch
    g = torch.Generator().manual_seed(seed)
    x = (factor * torch.randn(32, layer.in_features, generator=g)).bfloat16().requires_grad_()
    dy = (factor * torch.randn(32, layer.out_features, generator=g)).bfloat16()
    layer.zero_grad()
    y = layer(x)
    y.backward(dy)
    return [y.detach(), x.grad, layer.weight.grad]


def scales(layer: nn.Module) -> list[float]:
    """By which a te.Linear has multiplied x, w and dy last."""
    quantisers = layer.quantizers
    return [one.scale.item() for one in (*quantisers["scaling_fwd"][:2], quantisers["scaling_bwd"][0])]


def delayed() -> dict[str, object]:
    """A layer under delayed scaling, for six steps of two micro-batches, with an evaluation of huge inputs after each.

    What each engine has multiplied x, w and dy by, by moment; what it remembers at the end; what differs of y, dx and dw.
    """
    found = {"scales": [], "histories": [], "differ": []}
    ours, theirs = layers(remembering(2).products, (96, 64), 13)
    ours.context.probe = Scales()
    seen = ours.context.probe.seen
    for step in range(6):
        for micro_batch in range(2):
            results = [
                at(layer, step, micro_batch, 2 * step + micro_batch, growing(step, micro_batch))
                for layer in (ours, theirs)
            ]
            ((inner, _),) = theirs.built.values()
            assert (seen["fprop.x"], seen["fprop.w"], seen["dgrad.g"]) == (
                seen["wgrad.x"],
                seen["dgrad.w"],
                seen["wgrad.g"],
            )
            found["scales"].append(
                [[seen[slot] for slot in ("fprop.x", "fprop.w", "dgrad.g")], scales(inner)]
            )
            found["differ"].append(
                max(float((a != b).double().mean()) for a, b in zip(*results, strict=True))
            )
        for layer in (ours, theirs):
            layer.clock.stream = "evaluation"
            with torch.no_grad():
                layer(torch.full((32, 96), 1e6).bfloat16())
                layer.weight.mul_(1.5)
            layer.clock.stream = "training"
    histories = [
        {slot: sorted(history.amax.items()) for slot, history in layer.histories.items()}
        for layer in (ours, theirs)
    ]
    return found | {"histories": histories}


def trained_delayed() -> dict[str, object]:
    """A small transformer under delayed scaling with a layer in bf16, a phase in bf16 and another window after it: losses by engine."""
    phases = (Phase(start="step:3", use=None), Phase(start="step:4", use=remembering(3).products))
    recipe = remembering(2).model_copy(update={"layers": Layers(skip_last=1), "schedule": phases})
    config = WORKLOADS["gpt"](
        layers=2,
        width=32,
        heads=2,
        steps=6,
        batch=2,
        context=32,
        eval_tokens=128,
        eval_batch=2,
        eval_every=2,
        accumulate=2,
    )
    often = Telemetry(every=2, log=1, shadow=3, checkpoint=0)

    def losses(records) -> list[dict[str, float]]:
        return [{key: value for key, value in record.metrics.items() if "loss" in key} for record in records]

    def interrupted(steps: int) -> list[dict[str, float]]:
        with TemporaryDirectory() as folder:
            first = config.records(
                TrialRun(
                    recipe,
                    0,
                    "transformer_engine",
                    "cpu",
                    often,
                    Checkpoints(Path(folder, "state.pt"), "a", 0),
                )
            )
            begun = list(islice(first, steps + 1))[
                :steps
            ]  # the last step begins by leaving the state after those before it
            again = Checkpoints(Path(folder, "state.pt"), "a", 0)
            assert again.start == steps
            return losses(
                [*begun, *config.records(TrialRun(recipe, 0, "transformer_engine", "cpu", often, again))]
            )

    whole = {
        engine: losses(config.records(TrialRun(recipe, 0, engine, "cpu", often)))
        for engine in ("emulated", "transformer_engine")
    }
    return {"losses": whole, "resumed": {steps: interrupted(steps) for steps in (2, 4)}}


def regions() -> dict[str, object]:
    """Return the histories of TE's own DelayedScaling after three steps of two layers, by the place of its autocast regions, and its scales by step."""
    recipe = native.build(Builtin("DelayedScaling", (("amax_history_len", 8),)))

    def remembered(outer: bool, inner: bool) -> dict[str, bool]:
        """Return True if x's and dy's amaxes of the three steps are the last three of the first layer's histories."""
        both = [TE.Linear(32, 32, bias=False, params_dtype=torch.bfloat16, device="meta") for _ in range(2)]
        g = torch.Generator().manual_seed(1)
        weights = [torch.randn(32, 32, generator=g).bfloat16().requires_grad_() for _ in both]
        x = torch.randn(32, 32, generator=g).bfloat16().requires_grad_()
        for step in range(3):
            with TE.autocast(enabled=True, recipe=recipe) if outer else nullcontext():
                y = x * 2.0**step
                for layer, weight in zip(both, weights, strict=True):
                    with TE.autocast(enabled=True, recipe=recipe) if inner else nullcontext():
                        y = torch.func.functional_call(layer, {"weight": weight}, (y,))
            y.float().sum().backward()
        metas = {way: both[0].fp8_meta[f"scaling_{way}"].amax_history[-3:, 0] for way in ("fwd", "bwd")}
        return {way: bool((history > 0).all()) for way, history in metas.items()}

    said = {
        "one": remembered(True, False),
        "one a layer": remembered(False, True),
        "one a layer in one": remembered(True, True),
    }
    layer = TE.Linear(96, 64, bias=False, params_dtype=torch.bfloat16, device="meta")
    ours = next(layers(remembering(8).products, (96, 64), 13))
    ours.context.probe = Scales()
    seen = ours.context.probe.seen
    steps = []
    for step in range(4):
        y, dx, dw = at(ours, step, 0, step, growing(step, 0))
        g = torch.Generator().manual_seed(step)
        x = (growing(step, 0) * torch.randn(32, 96, generator=g)).bfloat16().requires_grad_()
        dy = (growing(step, 0) * torch.randn(32, 64, generator=g)).bfloat16()
        weight = ours.weight.detach().bfloat16().requires_grad_()
        forward = [*layer.quantizers["scaling_fwd"][:2], *layer.quantizers["scaling_bwd"][:1]]
        used = [one.scale.item() for one in forward] or [1.0] * 3
        with TE.autocast(enabled=True, recipe=recipe):
            own = torch.func.functional_call(layer, {"weight": weight}, (x,))
        own.backward(dy)
        differ = max(
            float((a != b).double().mean())
            for a, b in zip((y, dx, dw), (own, x.grad, weight.grad), strict=True)
        )
        steps.append([[seen[slot] for slot in ("fprop.x", "fprop.w", "dgrad.g")], used, differ])
    return {"moved on": said, "steps": steps}


def frozen() -> list[float]:
    """The share of elements of y and dx that differ where the weight is not trained (adapters)."""
    found = []
    for layer in layers(WHOLE, (64, 96), 11):
        layer.weight.requires_grad_(False)
        found.append(computed(layer, 32, 12)[:2])
    return [float((a != b).double().mean()) for a, b in zip(*found, strict=True)]


def built() -> dict[str, str]:
    """TE's own objects for the presets that it computes: the recipe as TE prints it."""
    presets = {name: make() for name, make in PRESETS.items() if not list(recipe_refusals(make()))}
    found = {
        name: te_recipe(recipe.products) for name, recipe in presets.items() if not recipe.products.plain
    }
    return {
        name: repr(native.build(description))
        for name, description in found.items()
        if isinstance(description, Builtin)
    }


def made() -> dict[str, dict[str, list[str]]]:
    """The quantisers that a custom recipe makes for each tensor: rowwise and columnwise, with what they were asked to be."""
    asked: dict[int, str] = {}
    alive = []  # so that no number is given twice

    def remembered(*, stochastic_rounding=False, **options):
        quantiser = te_double.reference(**options)
        words = {
            "stochastic": stochastic_rounding,
            "rotated": options["with_rht"],
            "square": options["with_2d_quantization"],
        }
        alive.append(quantiser)
        asked[id(quantiser)] = " ".join(["nvfp4", *(word for word, there in words.items() if there)])
        return quantiser

    def told(quantiser) -> list[str]:
        parts = [getattr(quantiser, f"{way}_quantizer", quantiser) for way in ("rowwise", "columnwise")]
        return [asked.get(id(part), type(part).__name__) for part in parts]

    customs = {
        "fp4_all_the_way": PRESETS["fp4_all_the_way"]().products,
        "backward in nvfp4": PRESETS["nvfp4"]().products.high_precision("forward"),
        "forward in mxfp8": PRESETS["nvfp4"]().products.replaced("forward", PRESETS["mxfp8"]().products),
        "backward in fp8": PRESETS["fp8_current"]().products.high_precision("forward"),
    }
    TE.NVFP4Quantizer, before = remembered, TE.NVFP4Quantizer
    found = {}
    for name, products in customs.items():
        make = native.build(te_recipe(products)).qfactory
        roles = [
            TE.QuantizerRole(module_type="linear", tensor_type=tensor)
            for tensor in ("input", "weight", "grad_output")
        ]
        kept = [make(role) for role in (*roles, None)]
        found[name] = {
            tensor: told(it)
            for tensor, it in zip(("input", "weight", "grad_output", "leaving"), kept, strict=True)
        }
    TE.NVFP4Quantizer = before
    return found


def refused() -> dict[str, str]:
    """Return the messages by which `convert` refuses what is impossible."""
    said = {}
    for name, recipe, features in (("recipe", PRESETS["ufp4"](), 32), ("features", nvfp4(), 40)):
        model = nn.Sequential()
        model.blocks = nn.ModuleList([nn.ModuleDict({"a": nn.Linear(features, 32)})])
        try:
            native.convert(model, recipe, Clock(0))
        except ValueError as error:
            said[name] = str(error)
    _, layer = layers(WHOLE, (64, 64), 1)
    try:
        layer(torch.zeros(40, 64).bfloat16())
    except ValueError as error:
        said["tokens"] = str(error)
    return said


def transposed() -> list[bool]:
    """Return for y, dx, dw and db of a transformers' Conv1D if they are those of the nn.Linear with its weight."""
    from transformers.pytorch_utils import Conv1D

    linear, turned, clock = nn.Linear(96, 128), Conv1D(128, 96), Clock(0)
    turned.weight.data.copy_(linear.weight.t())
    turned.bias.data.copy_(linear.bias)
    results = []
    for each in (linear, turned):
        layer = native.NativeLinear(each, "blocks.0.a", clock, torch.bfloat16, native.Draws(clock))
        layer.products = WHOLE
        y, dx, dw, db = computed(layer, 64, 8)
        results.append((y, dx, layer.part(dw), db))
    return [torch.equal(a, b) for a, b in zip(*results, strict=True)]


class Passes(Probe):
    """A probe that keeps whole passes, and what the recipe gives for their products."""

    def __init__(self) -> None:
        self.passes, self.errors = [], []

    def output(self, layer, products, x, w, y) -> None:
        self.passes += [x, w, y]
        self.errors += of_output(layer, products, x, w, y)

    def gradients(self, layer, products, kept, dy, results) -> None:
        self.passes += [*kept[:2], dy, *results]
        self.errors += of_gradients(layer, products, *kept[:2], kept, dy, results)


def observed() -> dict[str, object]:
    """Return what a probe of the engine receives of both passes, and the same passes without it."""
    _, layer = layers(WHOLE, (96, 128), 7)
    silent = computed(layer, 64, 7)
    layer.context.probe = probe = Passes()
    y, dx, dw = computed(layer, 64, 7)
    g = torch.Generator().manual_seed(1007)
    x, dy = (torch.randn(64, features, generator=g).bfloat16() for features in (96, 128))
    w = layer.weight.detach().bfloat16()
    wanted = [x, w, y, x, w, dy, dx.bfloat16(), dw.bfloat16()]
    return {
        "equal": [torch.equal(a, b) for a, b in zip(probe.passes, wanted, strict=True)],
        "same": [torch.equal(a, b) for a, b in zip(silent, (y, dx, dw), strict=True)],
        "covered": {error.product: error.expected().covers(error.measured) for error in probe.errors},
    }


if __name__ == "__main__":
    many = [differ(WHOLE, shape, seed) for seed, shape in enumerate(shapes(int(sys.argv[1])))]
    each = {name: differ(products, (64, 96, 128), 4, bias=True) for name, products in RECIPES.items()}
    told = {
        name: str(native.build(te_recipe(products))).partition(",")[0] for name, products in RECIPES.items()
    }
    whole = {
        "many": many,
        "each": each,
        "told": told,
        "frozen": frozen(),
        "built": built(),
        "made": made(),
        "switched": switched(),
    }
    remembered = {"delayed": delayed(), "trained_delayed": trained_delayed(), "regions": regions()}
    print(
        json.dumps(
            whole
            | remembered
            | {
                "observed": observed(),
                "trap": trap(),
                "trained": trained(),
                "others": others(),
                "refused": refused(),
                "transposed": transposed(),
            }
        )
    )
