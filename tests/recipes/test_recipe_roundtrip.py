"""Tests of exported recipes: what is written for a training stack is read back, by the stacks' own parsers, and compared field by field."""

import importlib.metadata
import itertools
import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import typer
from support.cases import every
from support.changed_recipes import valid, with_unknown_fields
from support.commands import here
from torch import nn

from ablate.cli.options import Flags
from ablate.cli.recipe import JobOptions, audit, resolve
from ablate.errors import InputError
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Select
from ablate.recipes import PRESETS, SLOTS, Recipe
from ablate.recipes.layers import Layer
from ablate.recipes.recipe import Layers, Phase, Products, Rule
from ablate.recipes.targets import TARGETS, Lost, Model, fouroversix
from ablate.recipes.targets.megatron import embedded, read
from ablate.recipes.targets.megatron_precision import modules
from ablate.recipes.targets.torchao import recipe_of_torchao
from ablate.recipes.te_mapping import canonical

BLOCKS = 4
NAMED = tuple(
    Layer(f"model.layers.{block}.{part}", block, frozenset({"Linear"}))
    for block in range(BLOCKS)
    for part in ("up", "down")
)
MODELS = {
    name: Model("it", BLOCKS if name == "te" else None, modules(BLOCKS) if name == "megatron" else NAMED)
    for name in TARGETS
}
MXFP8 = json.loads(PRESETS["mxfp8"]().products.model_dump_json())
RULES = {
    "counts": ["skip_first=1", "recipe.layers.skip_last=1"],
    "fraction": ["recipe.layers.last_fraction=0.3"],
    "names": ['recipe.layers.rules=[{match: "*.down", use: null}, {match: "*.linear_fc2", use: null}]'],
    "blocks": ['recipe.layers.rules=[{match: {blocks: "first:2"}, use: null}]', "recipe.layers.skip_last=1"],
    "both": ['recipe.layers.rules=[{match: {blocks: "1-2", name: "*.*up"}, use: null}]'],
}


def missing(package: str, wanted: str) -> str:
    """Return the reason why a peer's test cannot run here; empty if it can."""
    try:
        version = importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return f"{package} {wanted} is not installed: pip install {package}=={wanted}"
    return "" if version == wanted else f"{package} is {version}, and its facts were read in {wanted}"


def own_parser(package: str, wanted: str):
    why = missing(package, wanted)
    return pytest.mark.skipif(bool(why), reason=why)


def written(target: str, recipe: Recipe, model: Model | None = None) -> str | None:
    try:
        return TARGETS[target].write(recipe, model or MODELS[target])
    except Lost as lost:
        return None if lost.reasons else ""


def assigned(recipe: Recipe, layers: tuple[Layer, ...]) -> dict[str, Products]:
    """Return the products of each layer, in one spelling."""
    placed = recipe.layers.deciders(layers)
    return {name: canonical(recipe.decided(decider) or Products()) for name, decider in placed.items()}


def read_back(target: str, text: str) -> Recipe:
    if target == "fouroversix":
        return fouroversix.read(text)
    script = re.search(r"PRECISION_ARGS=\((.*?)\)", text, re.DOTALL)
    assert script
    exports = dict(re.findall(r"^export (\S+?)=(\S*)$", text, re.MULTILINE))
    return read([script[1]], exports, lambda _: embedded(text) or "")


# Nothing is lost


STARTS = ("nvfp4", "mxfp8", "nvfp4_1d_weight")


@pytest.mark.slow
@pytest.mark.parametrize("name", STARTS)
def test_two_recipes_that_differ_in_one_field_are_never_written_alike(name):
    """A target that drops a field writes the same file for two values of it."""
    start, refused, told = PRESETS[name](), 0, 0
    texts = {target: written(target, start) for target in TARGETS}
    fields = set()
    for path, recipe in valid(start):
        fields.add(path)
        for target, text in texts.items():
            other = written(target, recipe)
            if other is None:
                refused += 1
                continue
            same = assigned(recipe, MODELS[target].layers) == assigned(start, MODELS[target].layers)
            others = {"layers", *("fprop", "dgrad", "wgrad")}
            same = same and recipe.model_dump(exclude=others) == start.model_dump(exclude=others)
            assert (other == text) <= same, (path, target)
            told += 1
    assert len(fields) > 25
    assert refused > 50
    assert told


CLASSES = Recipe(
    **{name: getattr(PRESETS["nvfp4"](), name) for name in ("fprop", "dgrad", "wgrad")},
    layers=Layers(rules=(Rule(match={"blocks": "first:1"}, use=None),)),
    schedule=(Phase(start="step:5", slots="backward"),),
)


@every(target=TARGETS)
def test_a_field_that_was_added_later_is_refused_by_every_target(target):
    model, paths = MODELS[target], []
    for start in (
        CLASSES,
        CLASSES.model_copy(update={"schedule": ()}),
        PRESETS["nvfp4"](),
        PRESETS["mxfp8"](),
    ):
        for path, recipe in with_unknown_fields(start):
            paths.append(path)
            with pytest.raises(Lost):
                TARGETS[target].write(recipe, model)
    expected = {"novelty", "layers.novelty", "layers.rules.0.novelty", "layers.rules.0.match.novelty"}
    expected |= {"schedule.0.novelty", "weights.novelty", "wgrad.hadamard.novelty", "fprop.x.outer.novelty"}
    assert expected <= {*paths}


@every(target=("fouroversix", "megatron"), name=PRESETS, rules=RULES)
def test_what_is_read_back_is_the_recipe(target, name, rules):
    recipe, model = PRESETS[name](), MODELS[target]
    if recipe.plain:
        return
    recipe = resolve(name, RULES[rules])
    text = written(target, recipe, model)
    if text is None:
        return
    found = read_back(target, text)
    assert assigned(found, model.layers) == assigned(recipe, model.layers)
    assert found.model_dump(include={"weights", "schedule", "dtype"}) == recipe.model_dump(
        include={"weights", "schedule", "dtype"}
    )


def test_the_round_trips_are_not_all_refused():
    counts = {
        target: sum(
            written(target, resolve(name, RULES[rules]), MODELS[target]) is not None
            for name, rules in itertools.product(("nvfp4", "mxfp8", "nvfp4_paper"), RULES)
        )
        for target in ("fouroversix", "megatron")
    }
    assert counts == {"fouroversix": 10, "megatron": 9}


# fouroversix


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (nn.Linear(128, 128, dtype=torch.bfloat16) for _ in range(2))


class Tiny(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.model = nn.Module()
        self.model.layers = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.lm_head = nn.Linear(128, 128, dtype=torch.bfloat16)


SIX = {
    "nvfp4": ("nvfp4", []),
    "nvfp4_paper": ("nvfp4_paper", []),
    "a rule": ("nvfp4", ['recipe.layers.rules=[{match: "*.down", use: null}]']),
    "mse": ("nvfp4", ["recipe.fprop.x.select={among: scales}", "recipe.fprop.x.outer.bound=256"]),
    "chosen": (
        "nvfp4",
        [
            f"recipe.{slot}.{change}"
            for slot in ("fprop.x", "fprop.w", "dgrad.w", "wgrad.x")
            for change in ("select={among: scales, criterion: mae}", "outer.bound=256")
        ],
    ),
    "mxfp4": (
        "mxfp4",
        [
            *(f"recipe.{slot}.scale.rounding=ceil" for slot in SLOTS),
            *(f"recipe.{slot}.range={{}}" for slot in SLOTS),
            "recipe.wgrad.hadamard={size: 16}",
        ],
    ),
    "int4": ("nvfp4", [f"recipe.{slot}.element=int4" for slot in SLOTS]),
    "nearest": ("nvfp4", [f"recipe.{slot}.rounding=nearest" for slot in ("dgrad.g", "wgrad.g")]),
}


@own_parser("fouroversix", "1.0.5")
@pytest.mark.parametrize("name", SIX)
def test_fouroversix_itself_reads_the_file_and_converts_the_layers(name):
    import fouroversix as library

    recipe = resolve(SIX[name][0], SIX[name][1])
    if name == "mse":
        with pytest.raises(Lost):  # wgrad's copy of x is quantised like fprop's there
            TARGETS["fouroversix"].write(recipe, MODELS["fouroversix"])
        return
    text = TARGETS["fouroversix"].write(recipe, MODELS["fouroversix"])
    model = Tiny()
    library.quantize_model(model, library.ModelQuantizationConfig(**json.loads(text)))
    wanted = assigned(recipe, NAMED)
    for layer, products in wanted.items():
        module = model.get_submodule(layer)
        assert isinstance(module, library.FourOverSixLinear) != products.plain
        if not products.plain:
            assert module.config.weight_scale_2d == (products.fprop.w.block == "16x16")
    assert type(model.lm_head) is nn.Linear


CASES = ("nvfp4", "chosen", "int4", "nearest", "mxfp4")


@own_parser("fouroversix", "1.0.5")
@pytest.mark.parametrize("name", CASES)
def test_fouroversixs_own_operands_are_the_emulators(name, monkeypatch):
    """All six, by the configuration that the layer asks itself for; stochastic rounding compares its scales alone."""
    import fouroversix as library
    from fouroversix.quantize import utils
    from fouroversix.quantize.pytorch import backend

    monkeypatch.setattr(backend, "get_rht_matrix", lambda: utils.get_rht_matrix(device="cpu"))
    recipe = resolve(*SIX[name])
    data = json.loads(TARGETS["fouroversix"].write(recipe, MODELS["fouroversix"]))
    config = library.ModelQuantizationConfig(**data | {"quantize_backend": "pytorch"})
    asked = {
        "fprop.x": config.get_activation_config(),
        "fprop.w": config.get_weight_config(),
        "dgrad.g": config.get_gradient_config(),
        "dgrad.w": config.get_weight_config(transpose=True),
        "wgrad.g": config.get_gradient_config(rht=True, transpose=True),
        "wgrad.x": config.get_activation_config(rht=True, transpose=True),
    }
    generator, differing, elements = torch.Generator().manual_seed(0), 0, 0
    for number, (slot, theirs) in itertools.product(range(4), asked.items()):
        x = torch.randn(128, 256, generator=generator) * torch.exp(
            2 * torch.randn(128, 1, generator=generator)
        )
        x = (x * 10.0 ** (number - 2)).bfloat16()
        quant = recipe.slot(slot)
        turned = x.T.contiguous() if theirs.transpose else x
        rotation = getattr(recipe, slot[:5]).hadamard
        ours = quantize(turned, quant, rotation=rotation, clock=Clock(0))
        made = library.quantize_to_fp4(x, theirs)
        assert ours.amax is None or float(made.amax) == float(ours.amax)
        if quant.draws:
            continue
        value = library.dequantize(made, torch.float32)
        differing += int(((value - ours.dequantize()).abs() > 1e-6 * value.abs()).sum())
        elements += value.numel()
    assert elements >= 4 * 4 * 128 * 256
    assert differing <= 1e-3 * elements  # ties of block scales, which it rounds in another order


def test_fouroversixs_other_forms_are_read(tmp_path):
    """As `quantization_config` of a model, and as a list by blocks."""
    data = json.loads(TARGETS["fouroversix"].write(PRESETS["nvfp4"](), Model("it")))
    inside = {"model_type": "llama", "quantization_config": {"quant_method": "fouroversix", **data}}
    assert fouroversix.read(json.dumps(inside)) == PRESETS["nvfp4"]()
    entry = {"repeats": 3, "dtype": "nvfp4", "scale_rule": "static_6", "weight_scale_2d": True}
    found = fouroversix.read(json.dumps({"layer_precision_configs": [entry, {"repeats": 1}]}))
    assert found == PRESETS["nvfp4"]().model_copy(update={"layers": Layers(skip_last=1)})
    mixed = [{"repeats": 1}, entry, {"repeats": 2}, {**entry, "repeats": 1}]
    found = fouroversix.read(json.dumps({"layer_precision_configs": mixed}))
    layers = tuple(Layer(f"layers.{block}.x", block, frozenset()) for block in range(7))
    quantised = [not products.plain for products in assigned(found, layers).values()]
    assert quantised == [False, True, True, True, False, False, True]
    file = tmp_path / "config.json"
    file.write_text(json.dumps(data))
    assert here("recipe", "audit", "nvfp4", "--fouroversix", file).returncode == 0


SIX_REFUSED = {
    "if4": ({"dtype": "if4"}, "activation_dtype if4"),
    "fp6": ({"dtype": "nvfp6_e2m3", "scale_rule": "static_6"}, "activation_dtype nvfp6_e2m3"),
    "static_4": ({"weight_scale_rule": "static_4"}, "weight_scale_rule static_4"),
    "a choice of gradients": ({"gradient_scale_rule": "mse"}, "gradient_scale_rule mse"),
    "inference": ({"keep_master_weights": False}, "keep_master_weights false"),
    "fp16": ({"output_dtype": "float16"}, "output_dtype float16"),
    "backend": ({"quantize_backend": "cuda"}, "quantize_backend cuda"),
    "newer": ({"quartet_ii_dtype": "nvfp4"}, "quartet_ii_dtype nvfp4"),
    "mixed": ({"weight_dtype": "mxfp4"}, "weight_dtype mxfp4"),
    "override": ({"module_config_overrides": {"a": {"dtype": "if4"}}}, "module_config_overrides.a."),
}


@pytest.mark.parametrize("text", ["", "[" * 100_000], ids=["empty", "deep"])
def test_a_text_that_is_no_json_is_no_file_of_fouroversix(text):
    with pytest.raises(ValueError, match="it is no JSON"):
        fouroversix.read(text)


@every(case=SIX_REFUSED)
def test_fields_of_fouroversix_without_a_counterpart_are_named(case):
    data = json.loads(TARGETS["fouroversix"].write(PRESETS["nvfp4"](), Model("it")))
    change, named = SIX_REFUSED[case]
    if "dtype" in change or "weight_dtype" in change:
        data |= dict.fromkeys(("activation_dtype", "weight_dtype", "gradient_dtype"))
    with pytest.raises(ValueError, match=re.escape(named)):
        fouroversix.read(json.dumps(data | change))


# Megatron's file on single layers


PROGRAM = """
import json, sys
sys.modules["transformer_engine"] = None
from megatron.core.extensions.transformer_engine import TEQuantizationParams
from megatron.core.quantization.quant_config import RecipeConfig
from megatron.core.quantization.utils import get_quant_config_or_none
found = {}
for file in sys.argv[2:]:
    recipe, here = RecipeConfig.from_yaml_file(file), {}
    for name in json.loads(sys.argv[1]):
        config = get_quant_config_or_none(name, recipe)
        params = None if config is None else TEQuantizationParams.parse_from_config(config).training_recipe
        here[name] = None if params is None else [
            params.fp8_quantization_recipe, params.fp4_quantization_recipe, params.fp8_format,
            params.override_quantized_autocast, params.override_nonquantized_autocast]
    found[file] = here
print(json.dumps(found))
"""
OTHER = f"recipe.layers.rules=[{{match: '*.linear_fc2', use: {json.dumps(MXFP8)}}}, {{match: {{blocks: '0-1', name: '*.linear_proj'}}, use: null}}]"


@own_parser("megatron-core", "0.16.1")
def test_megatrons_own_parser_gives_each_module_what_the_recipe_says(tmp_path):
    layers, recipes = modules(BLOCKS), {}
    for number, changes in enumerate(
        ([OTHER, "skip_first=1"], [OTHER, "recipe.layers.skip_last=2"], RULES["blocks"])
    ):
        recipe, file = resolve("nvfp4", changes), tmp_path / f"{number}.yaml"
        file.write_text(embedded(TARGETS["megatron"].write(recipe, MODELS["megatron"])) or "")
        recipes[str(file)] = recipe
    names = json.dumps([layer.name for layer in layers])
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, names, *recipes],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    found = json.loads(done.stdout.splitlines()[-1])
    kinds = set()
    for file, recipe in recipes.items():
        for layer, products in assigned(recipe, layers).items():
            block = next(each.block for each in layers if each.name == layer)
            in_force = "nvfp4" if recipe.layers.quantises(block, BLOCKS) else None
            if (params := found[file][layer]) is not None:
                fp8, fp4, form, quantised, plain = params
                in_force = (fp8 or fp4) if (quantised if in_force else plain) else in_force
                assert form == "e4m3"
            wanted = {True: None, False: "nvfp4"}[products.plain]
            wanted = "mxfp8" if products == PRESETS["mxfp8"]().products else wanted
            assert in_force == wanted
            kinds.add(wanted)
    assert kinds == {None, "nvfp4", "mxfp8"}


YAMLS = {
    "a matcher that is not enabled": ({"enabled": None}, []),
    "one that is": ({}, ["layers.1"]),
    "another block": ({"pattern": '"*layers.3.*"'}, ["layers.3"]),
    "weights that stay quantised": ({"fields": "{fp8_param: true, fp4_param: true}"}, ["layers.1"]),
    "a name": ({"pattern": '"*.linear_fc2"'}, [f"layers.{block}.mlp.linear_fc2" for block in (1, 2, 3)]),
}


@every(case=YAMLS)
def test_a_file_on_single_layers_is_imported(case, tmp_path):
    change, off = YAMLS[case]
    matcher = {"type": "glob", "pattern": '"*layers.1.*"', "config": "high", "enabled": "true", **change}
    fields = matcher.pop("fields", "{}")
    lines = [f"    {key}: {value}" for key, value in matcher.items() if value is not None]
    file = tmp_path / "layers.yaml"
    file.write_text(
        "configs:\n  high:\n    transformer_engine_config_type: TEQuantizationParams\n"
        f"    training_recipe: {fields}\nmatchers:\n  first:\n" + "\n".join(lines) + "\n"
    )
    words = f"--fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-end-in-bf16 0 --te-precision-config-file {file}"
    recipe = read([words], {})
    for layer, products in assigned(recipe, modules(BLOCKS)).items():
        assert products.plain == (".0." in layer or any(part in layer for part in off)), layer
    done = here("recipe", "import", "--megatron-args", words, "-o", tmp_path / "mine.yaml")
    assert done.returncode == 0, done.stderr
    assert resolve(str(tmp_path / "mine.yaml"), []) == recipe


@every(
    case=[
        ("training_recipe: {fp8_quantization_recipe: blockwise}", "blockwise"),
        ("training_recipe: {fp8_quantization_recipe: mxfp8, fp4_quantization_recipe: nvfp4}", "exclude"),
        ("training_recipe: {custom_recipe_factory: a.b}", "custom_recipe_factory"),
        ("training_recipe: {tp_only_amax_red: true}", "tp_only_amax_red"),
        ("training_recipe: {unheard_of: 1}", "unheard_of"),
        ("training_recipe: {}\n    evaluation_recipe: {fp4_quantization_recipe: nvfp4}", "evaluation_recipe"),
        ("evaluation_recipe: {}", "training_recipe"),
    ]
)
def test_fields_of_megatrons_file_without_a_counterpart_are_named(case, tmp_path):
    config, named = case
    text = (
        "configs:\n  it:\n    transformer_engine_config_type: TEQuantizationParams\n    " + config + "\n"
        "matchers:\n  all: {type: glob, pattern: '*', config: it, enabled: true}\n"
    )
    with pytest.raises(ValueError, match=named):
        read(["--fp4-format e2m1 --te-precision-config-file x"], {}, lambda _: text)


@pytest.mark.parametrize("text", ["[", "a: 2001-99-99", "!!int it", "[" * 5000], ids=lambda text: text[:20])
def test_a_file_of_megatron_that_is_no_yaml_is_named(text):
    with pytest.raises(ValueError, match=r"^--te-precision-config-file: no YAML: "):
        read(["--fp4-format e2m1 --te-precision-config-file x"], {}, lambda _: text)


# Objects, and files that are not text


def test_torchaos_configurations_are_imported_and_their_other_fields_named(tmp_path, monkeypatch):
    from torchao.float8 import Float8LinearConfig
    from torchao.prototype.moe_training.config import MXFP8TrainingOpConfig
    from torchao.prototype.moe_training.nvfp4_training.nvfp4_training import NVFP4TrainingConfig

    from ablate.recipes.targets.torchao import SIGNS

    for config, name in (
        (Float8LinearConfig.from_recipe_name("tensorwise"), "fp8_current"),
        (MXFP8TrainingOpConfig(), "mxfp8"),
        (NVFP4TrainingConfig(rht_sign_vector=torch.tensor(SIGNS)), "nvfp4"),
    ):
        assert recipe_of_torchao(config) == PRESETS[name]()
    assert recipe_of_torchao(NVFP4TrainingConfig()).wgrad.hadamard.signs == "per_layer"
    assert recipe_of_torchao(MXFP8TrainingOpConfig(wgrad_with_hp=True)).wgrad.plain
    for config, named in (
        (Float8LinearConfig.from_recipe_name("rowwise"), "cast_config_input"),
        (Float8LinearConfig(round_scales_to_power_of_2=True), "round_scales_to_power_of_2"),
        (MXFP8TrainingOpConfig(out_dtype=torch.float32), "out_dtype"),
        (NVFP4TrainingConfig(rht_sign_vector=(1,) * 16), "rht_sign_vector"),
    ):
        with pytest.raises(ValueError, match=named):
            recipe_of_torchao(config)
    (tmp_path / "my_torchao_config.py").write_text(
        "from torchao.float8 import Float8LinearConfig\nCONFIG = Float8LinearConfig.from_recipe_name('tensorwise')\n"
    )
    monkeypatch.chdir(tmp_path)
    done = here("recipe", "audit", "fp8_current", "--object", "my_torchao_config:CONFIG")
    assert done.returncode == 0, done.stderr
    sys.modules.pop("my_torchao_config")


def test_pickles_are_refused_by_what_they_hold_whatever_they_are_called(tmp_path):
    import pickle

    saved, zipped = tmp_path / "recipe.json", tmp_path / "recipe.yaml"
    saved.write_bytes(pickle.dumps({"a": 1}))
    torch.save({"a": 1}, zipped)
    named = tmp_path / "recipe.pt"
    named.write_text("{}")
    for file in (saved, zipped, named):
        for words in (
            ("--fouroversix", file),
            ("--script", file),
            ("--te", "NVFP4BlockScaling", "--env", file),
        ):
            done = here("recipe", "import", *words)
            assert (done.returncode, "not unpickled" in done.stderr) == (2, True), done.stderr
        done = here("recipe", "import", "--object", f"{file}:RECIPE")
        assert (done.returncode, "not unpickled" in done.stderr) == (2, True), file


def test_configurations_may_come_from_pipes(tmp_path):
    """As bash has it in `--env <(env)`: a pipe gives its bytes to one reader."""
    texts = {
        "--script": "torchrun pretrain_gpt.py --num-layers 4 --bf16 --fp4-format e2m1 --fp4-recipe nvfp4\n",
        "--env": "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING=1\n",
    }
    files = {option: tmp_path / option.strip("-") for option in texts}
    for option, path in files.items():
        path.write_text(texts[option])
    pipes = {option: os.pipe() for option in texts}
    for option, (_, end) in pipes.items():
        os.write(end, texts[option].encode())
        os.close(end)
    places = {option: f"/dev/fd/{pipe[0]}" for option, pipe in pipes.items()}
    piped, plain = (
        here("recipe", "import", *(word for pair in each.items() for word in pair))
        for each in (places, files)
    )
    for begin, _ in pipes.values():
        os.close(begin)
    assert piped.returncode == 0, piped.stderr
    assert "stochastic" not in piped.stdout == plain.stdout


# Audit


FIELDS = (
    ("activation_scale_rule", "mse"),
    ("weight_scale_rule", "mae"),
    ("weight_scale_2d", False),
    ("gradient_round_style", "nearest"),
    ("weight_round_style", "stochastic"),
    ("quantize_backend", "pytorch"),
    ("modules_to_not_convert", ["model.layers.1.up"]),
    ("module_config_overrides", {"model.layers.2.up": {"dtype": "nvfp4"}}),
    ("output_dtype", "float32"),
    ("activation_dtype", "mxfp4"),
    ("unheard_of", 1),
)
"""Changes of fouroversix's file."""
EDITS = (
    ("*layers.1.*", "*layers.2.*"),
    ("    enabled: true", "    enabled: false"),
    ("override_quantized_autocast: true", "override_quantized_autocast: false"),
    ("--te-precision-config-file", "--unrelated-file"),
    ("    config: config_0\n    enabled", "    config: nothing\n    enabled"),
    ("type: glob", "type: regex"),
    ("training_recipe:\n", "training_recipe:\n      fp8_quantization_recipe: mxfp8\n"),
    ("--num-layers-at-end-in-bf16 1", "--num-layers-at-end-in-bf16 2"),
)
"""Changes of Megatron-LM's script: what is replaced by what."""


def changed_jobs(folder: Path) -> Iterator[tuple[tuple, dict]]:
    """Every change of a job of the new formats, in a file: (format, change), arguments of `audit`."""
    file, intended = folder / "job", folder / "intended.yaml"
    data = json.loads(TARGETS["fouroversix"].write(PRESETS["nvfp4"](), Model("it")))
    for key, value in FIELDS:
        file.write_text(json.dumps(data | {key: value}))
        yield ("fouroversix", key), {"recipe": "nvfp4", "fouroversix": file}
    recipe = resolve("nvfp4", RULES["blocks"])
    text = TARGETS["megatron"].write(recipe, Model("it", BLOCKS))
    intended.write_text(json.dumps(recipe.model_dump(mode="json")))
    for before, after in EDITS:
        assert before in text, before
        file.write_text(text.replace(before, after))
        yield ("megatron", before, after), {"recipe": str(intended), "blocks": BLOCKS, "script": file}


@pytest.mark.slow
def test_every_changed_job_of_the_other_formats_is_found_by_the_audit(tmp_path, capsys):
    missed = []
    for change, options in changed_jobs(tmp_path):
        found = ""
        try:
            audit(options.pop("recipe"), Flags(), options=JobOptions(**options))
        except typer.Exit as end:
            found = end.exit_code == 1 and capsys.readouterr().out
        except InputError as error:
            found = str(error)
        if not found:
            missed.append(change)
    assert missed == []


@every(kind=("fouroversix", "megatron"))
def test_jobs_that_were_not_changed_pass_the_audit(kind, tmp_path):
    intended, file = tmp_path / "intended.yaml", tmp_path / "job"
    recipe = PRESETS["nvfp4"]() if kind == "fouroversix" else resolve("nvfp4", RULES["blocks"])
    intended.write_text(json.dumps(recipe.model_dump(mode="json")))
    file.write_text(TARGETS[kind].write(recipe, Model("it", BLOCKS)))
    start = {"fouroversix": "--fouroversix", "megatron": "--script"}[kind]
    done = here("recipe", "audit", intended, start, file, "--blocks", BLOCKS)
    assert done.returncode == 0, done.stdout + done.stderr


def test_select_is_spelled_as_the_emulator_spells_it():
    """The oracle of the absolute maximum: fouroversix says abs_max."""
    quant = fouroversix.OPERANDS["nvfp4"]["abs_max"]
    assert quant.select == Select(among="scales", criterion="absmax")
