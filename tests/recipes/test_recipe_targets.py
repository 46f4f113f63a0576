"""Recipes written for training stacks, read back, and audited: over TE's own classes, torchao itself, and bash."""

import importlib
import inspect
import itertools
import json
import os
import random
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import make_dataclass
from fnmatch import fnmatch
from importlib.util import find_spec
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import get_args

import pytest
import torch
from support.cases import every
from support.commands import here
from torch import nn

from ablate.cli.recipe import export, resolve
from ablate.engines import transformer_engine as engine
from ablate.engines.hardware import installed
from ablate.errors import InputError
from ablate.numerics.hadamard import TE_SIGNS
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.recipes import PRESETS, Recipe
from ablate.recipes.layers import Layer
from ablate.recipes.recipe import Layers, Rule, Run
from ablate.recipes.targets import TARGETS, Lost, Model, fouroversix, megatron
from ablate.recipes.targets.experts import FUSED, SWITCHES, grouped_switches
from ablate.recipes.targets.jobs import Job
from ablate.recipes.targets.megatron import VARIABLES, from_environment, read, standing_in, without_effect
from ablate.recipes.targets.megatron_precision import modules
from ablate.recipes.targets.torchao import CLASSES, SIGNS, recipe_of_torchao
from ablate.recipes.te_import import recipe_of
from ablate.recipes.te_mapping import TENSORS, Custom, te_recipe
from ablate.verification.peers import shells

BLOCKS = 8
OWN = {"bf16", "fp8_current", "mxfp8", "nvfp4", "nvfp4_paper", "nvfp4_dequantised"}
OWN |= {"mxfp8_fwd_high_precision_bwd", "nvfp4_row_scaled_fwd_high_precision_bwd"}
ZOO = {
    "nvfp4_1d_weight",
    "mxfp8_fwd_nvfp4_bwd",
    "high_precision_fwd_mxfp8_bwd",
    "nvfp4_row_scaled_fwd_mxfp8_bwd",
}
HELD = {
    "te": OWN | ZOO | {"healing"},
    "megatron": OWN,
    "bridge": OWN,
    "torchao": {"bf16", "fp8_current", "mxfp8", "nvfp4", "nvfp4_paper"},
    "torchtitan": {"bf16", "nvfp4", "nvfp4_paper"},
    "fouroversix": {"nvfp4"},
}
"""Presets that each target holds; all others are refused with the fields that would be lost."""


def quantizer(kind: str):
    """A stand-in for a class of TE's native part: what it was made with."""
    return lambda *args, **options: (kind, args, tuple(sorted(options.items(), key=str)))


KINDS = (
    "NVFP4Quantizer",
    "MXFP8Quantizer",
    "Float8CurrentScalingQuantizer",
    "HybridQuantizer",
    "IdentityQuantizer",
)


@pytest.fixture
def te() -> Iterator[ModuleType]:
    """TE's own recipe classes, beside a stand-in for what needs its native part."""
    types = SimpleNamespace(kFloat4E2M1="e2m1", kFloat8E4M3="e4m3", kFloat8E5M2="e5m2")
    stub = ModuleType("transformer_engine.pytorch")
    for kind in KINDS:
        setattr(stub, kind, quantizer(kind))
    stub.DType, stub.autocast = types, lambda enabled, recipe: (enabled, recipe)
    with shells("transformer_engine", "common"):
        recipes = importlib.import_module("transformer_engine.common.recipe")
        sys.modules["transformer_engine.pytorch"] = stub
        sys.modules["transformer_engine"].pytorch = stub
        engine.library.cache_clear()
        yield recipes
        engine.library.cache_clear()


def run(text: str) -> dict[str, object]:
    """The names that a Python file defines."""
    names: dict[str, object] = {"__name__": "exported"}
    exec(compile(text, "exported.py", "exec"), names)
    return names


def test_the_command_offers_every_target_and_the_two_forms_of_a_recipe_file():
    annotated = inspect.signature(export).parameters["target"].annotation
    assert sorted(get_args(get_args(annotated)[0])) == sorted((*TARGETS, "json", "yaml"))
    assert HELD.keys() == TARGETS.keys()


@every(name=PRESETS, target=TARGETS)
def test_a_preset_is_written_or_every_field_that_would_be_lost_is_named(name, target):
    recipe, write = PRESETS[name](), TARGETS[target].write
    if name in HELD[target]:
        text = write(recipe, Model(name, BLOCKS))
        assert text.endswith("\n")
        assert max(map(len, text.splitlines())) < 300
        return
    with pytest.raises(Lost) as lost:
        write(recipe, Model(name, BLOCKS))
    fields = {"fprop", "dgrad", "wgrad", "weights", "layers", "schedule", "dtype"}
    assert {reason.split()[0].partition(".")[0].strip(",:") for reason in lost.value.reasons} <= fields
    assert len(set(lost.value.reasons)) == len(lost.value.reasons)


# Transformer Engine


def expected(recipe: Recipe, layer: Layer, step: int, run: Run, layers: tuple[Layer, ...]):
    """The products of a layer at a step; None if none is quantised."""
    now = recipe.at(step, run)
    products = now.decided(now.layers.deciders(layers)[layer.name])
    return None if products is None or products.plain else products


TE_RECIPES = {
    **{name: PRESETS[name]() for name in sorted(HELD["te"] - ZOO)},
    "two phases": resolve(
        "nvfp4",
        [
            'recipe.schedule=[{start: "step:5", slots: backward}, {start: "fraction:0.9"}]',
            "skip_first=1",
        ],
    ),
    "decay": resolve("nvfp4", ['recipe.schedule=[{start: decay, slots: forward}, {start: "tokens:120"}]']),
    "rules": resolve(
        "nvfp4",
        ['recipe.layers.rules=[{match: "*.down", use: null}, {match: {blocks: "first:1"}, use: null}]'],
    ),
}


@pytest.mark.parametrize("name", TE_RECIPES)
def test_every_layer_at_every_step_has_the_recipes_own_products(te, name):
    recipe = TE_RECIPES[name]
    layers = tuple(
        Layer(f"blocks.{block}.{part}", block, frozenset({"Linear"}))
        for block in range(7)
        for part in ("up", "down")
    )
    made = run(TARGETS["te"].write(recipe, Model(name, layers=layers)))
    facts, compared = Run(10, 20, 8), 0
    for layer, step in itertools.product(layers, range(10)):
        more = {"name": layer.name, "tokens_per_step": 20, "decay": 8}
        found = made["recipe"](layer.block, 7, step, 10, **more)
        wanted = expected(recipe, layer, step, facts, layers)
        assert made["autocast"](layer.block, 7, step, 10, **more) == (found is not None, found)
        if wanted is None or found is None:
            assert found is wanted is None
            continue
        assert recipe_of(found).products == wanted
        compared += 1
    assert compared or recipe.plain


RUN = {"step": 9, "steps": 10, "tokens_per_step": 20, "decay": 8}


@pytest.mark.parametrize(
    ("start", "needed"),
    [
        (None, set()),
        ("step:5", {"step"}),
        ("fraction:0.9", {"step", "steps"}),
        ("tokens:120", {"step", "tokens_per_step"}),
        ("decay", {"step", "decay"}),
    ],
)
def test_what_decides_when_a_phase_begins_has_no_default(te, start, needed):
    """A call without it would train every step by the recipe before the phase, and nobody would see it."""
    phases = "" if start is None else f'{{start: "{start}", slots: backward}}'
    recipe = resolve("nvfp4", [f"recipe.schedule=[{phases}]"])
    made = run(TARGETS["te"].write(recipe, Model("mine")))
    for function in (made["recipe"], made["autocast"]):
        for name in RUN:
            given = {other: value for other, value in RUN.items() if other != name}
            if name not in needed:
                function(0, 7, **given)
                continue
            with pytest.raises(TypeError, match=f"'{name}'"):
                function(0, 7, **given)
    usage = made["__doc__"]
    assert {name for name in ("tokens_per_step", "decay") if f"{name}={name}" in usage} == needed - {
        "step",
        "steps",
    }


def test_a_file_with_rules_gives_no_layer_a_recipe_without_its_name(te):
    """Attention in high precision: by the rule, not by who remembers an argument."""
    layers = tuple(
        Layer(f"layers.{block}.{part}", block, classes)
        for block in range(7)
        for part, classes in (
            ("attn.q", frozenset({"Linear", "Attention"})),
            ("mlp.up", frozenset({"Linear"})),
        )
    )
    recipe = PRESETS["nemotron3_super"]()
    text = TARGETS["te"].write(recipe, Model("nemotron3_super", layers=layers))
    made, deciders = run(text), recipe.layers.deciders(layers)
    for function in (made["recipe"], made["autocast"]):
        with pytest.raises(TypeError):
            function(0, 7, 0, 10)
        for unknown in ("", "module.layers.0.attn.q", "lm_head", None):
            with pytest.raises(ValueError, match="name"):
                function(0, 7, 0, 10, name=unknown)
    enabled = {layer.name: made["autocast"](layer.block, 7, 0, 10, name=layer.name)[0] for layer in layers}
    assert enabled == {name: decider == "own" for name, decider in deciders.items()}
    assert {name for name, on in enabled.items() if on} == {f"layers.{block}.mlp.up" for block in range(5)}
    assert 'name="layers.0.attn.q"' in made["__doc__"]
    plain = run(TARGETS["te"].write(PRESETS["nvfp4"](), Model("nvfp4", layers=layers)))
    assert plain["autocast"](0, 7)[0]


class TELinear(nn.Linear):
    """A stand-in for te.Linear, with its arguments."""

    def __init__(self, in_features: int, out_features: int, bias: bool, params_dtype, device) -> None:
        super().__init__(in_features, out_features, bias, device, params_dtype)


def test_the_file_for_te_makes_te_linear_of_the_layers_inside_of_blocks(te):
    """`te.autocast` changes nothing in an nn.Linear: without the swap a job trains in bf16, and nobody sees it."""
    sys.modules["transformer_engine.pytorch"].Linear = TELinear
    made, model = run(TARGETS["te"].write(PRESETS["nvfp4"](), Model("it", BLOCKS))), Tiny(2)
    model.layers[0].up = nn.Linear(128, 64, bias=False, dtype=torch.float32)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    made["swap"](model)
    kinds = {name: type(each) for name, each in model.named_modules() if isinstance(each, nn.Linear)}
    assert kinds.pop("head") is nn.Linear
    assert set(kinds.values()) == {TELinear}
    assert len(kinds) == 4
    after = model.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], value) for name, value in before.items())
    assert {name: value.dtype for name, value in after.items()} == {
        name: value.dtype for name, value in before.items()
    }
    with pytest.raises(ValueError, match="inside of numbered blocks"):
        made["swap"](model)
    tied = Tiny(1)
    tied.layers[0].up.weight = tied.head.weight
    with pytest.raises(ValueError, match=r"layers\.0\.up: its weight is shared"):
        made["swap"](tied)
    assert type(tied.layers[0].down) is nn.Linear


HOSTILE = {
    "NVTE_NVFP4_DISABLE_RHT": "1",
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": "1",
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": "1",
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": "1",
    "NVTE_NVFP4_4OVER6": "all",
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": "none",
    "NVTE_NVFP4_4OVER6_ERR_MODE": "MSE",
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": "1",
    "NVTE_BACKWARD_OVERRIDE": "dequantized",
}


@pytest.mark.parametrize("name", sorted(HELD["te"] - ZOO - {"bf16"}))
def test_what_is_written_for_te_holds_whatever_the_environment_says(name, monkeypatch):
    assert HOSTILE.keys() == VARIABLES.keys()
    for variable, value in HOSTILE.items():
        monkeypatch.setenv(variable, value)
    text = TARGETS["te"].write(PRESETS[name](), Model(name, BLOCKS))
    with shells("transformer_engine", "common"):
        recipes = importlib.import_module("transformer_engine.common.recipe")
        assert recipes.NVFP4BlockScaling().disable_rht
        stub = ModuleType("transformer_engine.pytorch")
        stub.autocast = lambda enabled, recipe: (enabled, recipe)
        sys.modules["transformer_engine.pytorch"] = stub
        sys.modules["transformer_engine"].pytorch = stub
        made = run(text)
        assert recipe_of(made["RECIPE"]).products == PRESETS[name]().products
        params = [
            getattr(made.get("RECIPE_2", made["RECIPE"]), f"fp8_quant_{part}", None)
            for part in ("fwd_inp", "bwd_grad")
        ]
        assert not any(each.power_2_scale for each in params if each)


CUSTOM = {
    "wgrad in bf16": ["recipe.wgrad=null"],
    "fp8 backward": ["recipe.dgrad.g.rounding=nearest"],
    "weights in rows forward": ["recipe.fprop.w.block=1x16"],
    "from the forward copy": ["recipe.dgrad.w.source=forward_bf16"],
    "signs none": ["recipe.wgrad.hadamard.signs=none"],
}


@pytest.mark.parametrize("name", CUSTOM)
def test_quantizers_of_a_custom_recipe_are_those_of_the_engine(te, name):
    if name == "wgrad in bf16":
        recipe = PRESETS["nvfp4"]().model_copy(update={"wgrad": PRESETS["bf16"]().wgrad})
    else:
        recipe = resolve("nvfp4", CUSTOM[name])
    description = te_recipe(recipe.products)
    assert isinstance(description, Custom)
    made = run(TARGETS["te"].write(recipe, Model(name)))
    theirs, ours = engine.factory(description), made["RECIPE"].qfactory
    for tensor in (*TENSORS, ""):
        role = SimpleNamespace(tensor_type=tensor)
        assert copies(ours(role)) == copies(theirs(role))
    assert ours(None) == theirs(None)


def copies(made: tuple) -> tuple:
    """Return the quantizers of both copies of a tensor; TE rotates the columnwise copy alone, so one quantizer may make both."""
    kind, _, options = made
    if kind == "HybridQuantizer":
        options = dict(options)
        if options["columnwise_source"] == "original":
            return without_rotation(options["rowwise_quantizer"]), options["columnwise_quantizer"]
        return made
    return without_rotation(made), made


def without_rotation(made: tuple) -> tuple:
    off = {"with_rht": False, "with_post_rht_amax": False, "with_random_sign_mask": True}
    kind, args, options = made
    return kind, args, tuple((key, off.get(key, value)) for key, value in options)


@pytest.mark.slow
def test_what_is_written_computes_in_tes_own_layer_what_the_emulator_computes():
    """Over TE's reference quantizers, which the double of its native part calls: sums may run in another order."""
    if installed("transformer_engine") != "2.20.2":
        pytest.skip("the double stands in for the native part of Transformer Engine 2.20.2")
    program = Path(__file__).parents[1] / "engines" / "te_exported.py"
    paths = os.pathsep.join((str(program.parents[2]), str(program.parent)))
    more = {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(program), "6"],
        capture_output=True,
        text=True,
        env=os.environ | more,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 15
    for name, each in found.items():
        differing, elements = (sum(column) for column in zip(*each, strict=True))
        assert elements > 100_000
        assert differing < 1e-3 * elements, name


# Megatron


def sourced(script: Path) -> tuple[list[str], dict[str, str]]:
    """The arguments and TE's variables after a script, in a shell where all variables said something else."""
    command = (
        f'source {script}; for a in "${{PRECISION_ARGS[@]}}"; do echo "$a"; done; echo; env | grep ^NVTE_'
    )
    done = subprocess.run(
        ["bash", "-c", command],
        capture_output=True,
        text=True,
        env=HOSTILE | {"PATH": "/usr/bin:/bin"},
        check=True,
    )
    arguments, _, variables = done.stdout.partition("\n\n")
    return arguments.splitlines(), dict(line.split("=", 1) for line in variables.splitlines())


@pytest.mark.parametrize("name", sorted(HELD["megatron"]))
def test_megatrons_script_is_read_back_as_the_recipe_by_bash_and_by_us(name, tmp_path):
    recipe, script = PRESETS[name](), tmp_path / "precision.sh"
    script.write_text(TARGETS["megatron"].write(recipe, Model(name, BLOCKS)))
    arguments, variables = sourced(script)
    found = read(arguments, variables)
    assert found.products == recipe.products
    assert [found.layers.quantises(block, BLOCKS) for block in range(BLOCKS)] == [
        recipe.layers.quantises(block, BLOCKS) for block in range(BLOCKS)
    ]
    done = here("recipe", "audit", name, "--script", script, "--blocks", BLOCKS)
    assert (done.returncode, "The job trains by" in done.stdout) == (0, True), done.stdout + done.stderr


QWEN = tuple(
    Layer(f"model.layers.{block}.{part}", block, frozenset({"Linear", kind}))
    for block in range(BLOCKS)
    for part, kind in (
        *((f"self_attn.{name}_proj", "Qwen3Attention") for name in "qkvo"),
        *((f"mlp.{name}_proj", "Qwen3MLP") for name in ("gate", "up", "down")),
    )
)
FUSED_PARTS = {"linear_qkv": ("q_proj", "k_proj", "v_proj"), "linear_proj": ("o_proj",)}
FUSED_PARTS |= {"linear_fc1": ("gate_proj", "up_proj"), "linear_fc2": ("down_proj",)}
SKIPS = (
    ['{match: "*.down_proj", use: null}'],
    ['{match: "*.mlp.*", use: null}', '{match: {blocks: "last:2"}, use: null}'],
    ['{match: "class:Qwen3Attention", use: null}'],
    ['{match: {blocks: "2-3", name: "*.[qkv]_proj"}, use: null}'],
)


@every(skips=SKIPS)
def test_rules_that_skip_a_transformers_models_layers_are_written_by_megatrons_names(skips):
    recipe = resolve("nvfp4", [f"recipe.layers.rules=[{', '.join(skips)}]", "skip_first=1"])
    made = megatron.job(recipe, Model("it", layers=QWEN))
    words = [word for option in made.options.items() for word in option if word]
    found = read([*words, "--te-precision-config-file x"], {}, lambda _: made.layers)
    theirs = found.layers.deciders(modules(BLOCKS))
    ours = recipe.layers.deciders(QWEN)
    for module, decider in theirs.items():
        block, part = module.split(".")[2], module.rpartition(".")[2]
        parts = [name for name in ours if f".{block}." in name and name.endswith(FUSED_PARTS[part])]
        assert len(parts) == len(FUSED_PARTS[part])
        assert {found.decided(decider) is None} == {recipe.decided(ours[name]) is None for name in parts}


@every(case=[("*.q_proj", None, "linear_qkv"), ("*.down_proj", "mxfp8", "selects none")])
def test_rules_that_no_module_of_megatron_holds_alone_are_refused(case):
    name, preset, named = case
    use = preset and PRESETS[preset]().products
    layers = Layers(rules=(Rule(match={"name": name}, use=use),))
    recipe = PRESETS["nvfp4"]().model_copy(update={"layers": layers})
    with pytest.raises(Lost, match=named):
        TARGETS["megatron"].write(recipe, Model("it", layers=QWEN))


def test_a_rule_that_uses_bf16_is_written_as_one_that_skips():
    plain = PRESETS["bf16"]().products
    skips, uses = (
        PRESETS["nvfp4"]().model_copy(
            update={"layers": Layers(rules=(Rule(match={"name": "*.down_proj"}, use=use),))}
        )
        for use in (None, plain)
    )
    written = [TARGETS["megatron"].write(recipe, Model("it", layers=QWEN)) for recipe in (skips, uses)]
    assert written[0] == written[1]


@pytest.mark.parametrize("name", sorted(HELD["bridge"]))
def test_bridges_file_sets_the_variables_before_and_the_fields_of_its_config(name, monkeypatch):
    config = SimpleNamespace()
    stub = ModuleType("megatron.bridge.training.mixed_precision")
    stub.bf16_mixed = lambda: config
    for module in ("megatron", "megatron.bridge", "megatron.bridge.training"):
        monkeypatch.setitem(sys.modules, module, ModuleType(module))
    monkeypatch.setitem(sys.modules, stub.__name__, stub)
    for variable, value in HOSTILE.items():
        monkeypatch.setenv(variable, value)
    made = run(TARGETS["bridge"].write(PRESETS[name](), Model(name, BLOCKS)))
    assert made["precision"] is config
    words = (
        [f"--fp8-format {config.fp8}"] if config.fp8 else [f"--fp4-format {config.fp4}"] if config.fp4 else []
    )
    words += [f"--fp8-recipe {config.fp8_recipe}"] if config.fp8 else []
    if config.first_last_layers_bf16:
        words += ["--first-last-layers-bf16"]
        words += [f"--num-layers-at-start-in-bf16 {config.num_layers_at_start_in_bf16}"]
        words += [f"--num-layers-at-end-in-bf16 {config.num_layers_at_end_in_bf16}"]
    assert read(words, dict(os.environ)).products == PRESETS[name]().products
    last = PRESETS[name]().layers.last_fraction
    assert config.num_layers_at_end_in_bf16 == (2 if last else 0)  # ceil(.15 * 8)


NEEDING = {
    "fp4": {"--fp4-recipe nvfp4"},
    "fp8": {
        "--fp8-recipe mxfp8",
        "--fp8-margin 1",
        "--fp8-interval 2",
        "--fp8-amax-history-len 4",
        "--fp8-amax-compute-algo max",
    },
}
"""Options that Megatron ignores without a format of their own."""


@every(bits=NEEDING)
def test_an_option_that_megatron_ignores_for_want_of_a_format_is_no_recipe(bits):
    other = "--fp8-format hybrid --fp8-recipe mxfp8" if bits == "fp4" else "--fp4-format e2m1"
    for option, job in itertools.product(sorted(NEEDING[bits]), ("--bf16", other)):
        sentence = f"{option}: Megatron ignores it without --{bits}-format"
        words = f"{job} {option}"
        done = here("recipe", "import", "--megatron-args", words)
        assert (done.returncode, done.stdout, sentence in done.stderr) == (2, "", True), done.stderr
        done = here("recipe", "audit", "nvfp4_paper", "--blocks", BLOCKS, "--megatron-args", words)
        assert (done.returncode, sentence in done.stdout) == (1, True), done.stdout + done.stderr
        own = "--fp4-format e2m1" if bits == "fp4" else "--fp8-format hybrid"
        assert list(without_effect([f"{own} {option}"])) == []


def test_a_history_of_no_step_is_refused_in_one_line():
    words = "--fp8-format hybrid --fp8-recipe delayed --fp8-amax-compute-algo max --fp8-amax-history-len 0"
    done = here("recipe", "import", "--megatron-args", words)
    assert done.returncode == 2
    assert done.stderr == "DelayedScaling.amax_history_len 0: a number of 1 or more\n"


def test_a_share_of_the_blocks_is_counted_by_the_arguments_number_of_layers(tmp_path):
    for blocks in (8, 20):
        last = sum(not PRESETS["nvfp4_paper"]().layers.quantises(block, blocks) for block in range(blocks))
        job = "--fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-start-in-bf16 0"
        job += f" --num-layers-at-end-in-bf16 {last}"
        script = tmp_path / "job.sh"
        script.write_text(f"torchrun pretrain_gpt.py \\\n  --num-layers {blocks} \\\n  {job}\n")
        for words in (("--megatron-args", f"{job} --num-layers {blocks}"), ("--script", script)):
            done = here("recipe", "audit", "nvfp4_paper", *words)
            assert (done.returncode, done.stderr) == (0, ""), done.stdout + done.stderr
            done = here("recipe", "audit", "nvfp4_paper", *words, "--blocks", 3 * blocks)
            assert (done.returncode, "layers.skip_last" in done.stdout) == (1, True), done.stdout
    for more in ("", " --num-layers $LAYERS"):
        done = here("recipe", "audit", "nvfp4_paper", "--megatron-args", job + more)
        assert (done.returncode, "the intended recipe counts a share" in done.stderr) == (2, True), (
            done.stderr
        )


def test_wgrad_in_high_precision_is_read_where_megatron_hands_it_to_te():
    jobs = {"--fp8-format hybrid --fp8-recipe delayed": True, "--fp8-format hybrid": True}
    jobs |= {f"--fp8-format e4m3 --fp8-recipe {word}": False for word in ("mxfp8", "tensorwise")}
    jobs |= {"--fp4-format e2m1": False, "--bf16": False}
    for job, read_by_megatron in jobs.items():
        words, own = [job, "--no-fp8-wgrad"], read([job], {})
        assert (read(words, {}) == own) is not read_by_megatron
        assert (list(without_effect(words)) == []) is read_by_megatron
        assert read(words, {}).wgrad == (own.wgrad.high_precision() if read_by_megatron else own.wgrad)
        assert read([job, "--disable-fp8-wgrad"], {}) == read(words, {})


MISTYPED = {
    "--fp4-fromat e2m1": "--fp4-format",
    "--fp4_format e2m1": "--fp4-format",
    "-fp8-format hybrid": "--fp8-format",
    "--fp8-fromat=hybrid": "--fp8-format",
    "--fp8-form hybrid": "--fp8-format",
    "--FP8-recipe mxfp8": "--fp8-recipe",
    "\u2013fp4-format e2m1": "--fp4-format",
    "--fp4-parm-gather": "--fp4-param-gather",
    "--first-last-layer-bf16": "--first-last-layers-bf16",
    "--num-layers-at-end-bf16 4": "--num-layers-at-end-in-bf16",
    "--te-precision-config layers.yaml": "--te-precision-config-file",
    "--no-fp8-wgrads": "--no-fp8-wgrad",
}


@every(typed=MISTYPED)
def test_a_mistyped_option_about_precision_is_refused_with_the_nearest(typed):
    with pytest.raises(ValueError, match=f"'{MISTYPED[typed]}' is the nearest"):
        read(["--bf16", typed], {})


def test_options_about_other_things_stay_ignored_and_stored_weights_change_nothing():
    others = """--num-layers 32 --hidden-size 4096 --tensor-model-parallel-size 2 --context-parallel-size 2
        --expert-model-parallel-size 4 --num-layers-per-virtual-pipeline-stage 2 --fp16-lm-cross-entropy
        --fp32-residual-connection --lr 1e-4 --min-lr -1 --transformer-impl transformer_engine --seed 1
        --reuse-grad-buf-for-mxfp8-param-ag --keep-fp8-weight-transpose-cache --grad-reduce-in-bf16
        --accumulate-allreduce-grads-in-fp32 --yaml-cfg x --moe-router-dtype fp32 --inprocess-restart"""
    for own, gathered in (
        ("--fp4-format e2m1", "--fp4-param-gather"),
        ("--fp8-format hybrid", "--fp8-param-gather"),
    ):
        assert read([f"--bf16 {own} {gathered} {others}"], {}) == read([own], {})


MATTERS = {
    "NVTE_NVFP4_DISABLE_RHT": ["1"],
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": ["1"],
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": ["1"],
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": ["1"],
    "NVTE_NVFP4_4OVER6": ["all", "weights", "activations"],
    "NVTE_BACKWARD_OVERRIDE": ["high_precision", "dequantized"],
    "--fp4-format e2m1": [
        "",
        "--fp8-format hybrid --fp8-recipe mxfp8",
        "--fp8-format e4m3 --fp8-recipe tensorwise",
    ],
    "--num-layers-at-end-in-bf16 2": ["", "--num-layers-at-end-in-bf16 3", "--num-layers-at-end-in-bf16 0"],
    "--first-last-layers-bf16": [""],
    "--num-layers-at-start-in-bf16 0": ["", "--num-layers-at-start-in-bf16 2"],
}


def test_changed_jobs_are_all_found_by_the_audit(tmp_path):
    """Each change alone, and 20 pairs."""
    script, generator = tmp_path / "job.sh", random.Random(0)
    text = TARGETS["megatron"].write(PRESETS["nvfp4_paper"](), Model("it", BLOCKS))
    single = [(key, value) for key, values in MATTERS.items() for value in values]
    pairs = (generator.sample(single, 2) for _ in range(20))
    missed = []
    for chosen in [*([one] for one in single), *(pair for pair in pairs if pair[0][0] != pair[1][0])]:
        changed = text
        for key, value in chosen:
            if key.startswith("--"):
                changed = changed.replace(f"    {key}\n", f"    {value}\n")
            else:
                changed += f"export {key}={value}\n"
        script.write_text(changed)
        done = here("recipe", "audit", "nvfp4_paper", "--script", script, "--blocks", BLOCKS)
        if done.returncode == 0 or not done.stdout + done.stderr:
            missed.append((chosen, done.stdout))
        assert "Traceback" not in done.stderr
    assert missed == []


@every(variable=VARIABLES)
def test_a_variable_means_here_what_it_means_to_tes_classes(variable, monkeypatch):
    owner, option, default = VARIABLES[variable]
    values = {"0": ("0", "1", "true"), "none": ("weights", "all"), "all": ("none",), "MAE": ("mse",)}
    for value in values.get(default, ("high_precision",)):
        for other in VARIABLES:
            monkeypatch.delenv(other, raising=False)
        monkeypatch.setenv(variable, value)
        with shells("transformer_engine", "common"):
            recipes = importlib.import_module("transformer_engine.common.recipe")
            for name in [owner] if owner else ["NVFP4BlockScaling", "MXFP8BlockScaling"]:
                theirs = getattr(getattr(recipes, name)(), option)
                ours = from_environment(name, {variable: value})[option]
                assert ours == theirs
                assert getattr(standing_in(name, {option: ours}), option) == theirs


def test_another_file_on_single_layers_than_the_script_makes_is_read(tmp_path, monkeypatch):
    recipe = resolve("nvfp4", ['recipe.layers.rules=[{match: {blocks: "first:2"}, use: null}]'])
    text = TARGETS["megatron"].write(recipe, Model("it", BLOCKS))
    script, other = tmp_path / "job.sh", tmp_path / "other.yaml"
    other.write_text(megatron.embedded(text).replace("*layers.1.*", "*layers.3.*"))
    for named, given, block in ((None, '"$PRECISION_YAML"', 1), (None, other, 3), ("x.yaml", "x.yaml", 1)):
        if named:
            monkeypatch.setenv("PRECISION_YAML", named)
        script.write_text(text.replace('file "$PRECISION_YAML"', f"file {given}"))
        rules = Job(script=script).in_force()[0].layers.rules
        assert [rule.match.blocks for rule in rules] == ["0-0", f"{block}-{block}"]
    script.write_text(text.replace('file "$PRECISION_YAML"', "file missing.yaml"))
    with pytest.raises(InputError, match=r"missing\.yaml: No such file"):
        Job(script=script).in_force()


# torchao, torchtitan


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = (
            nn.Linear(128, 128, dtype=torch.bfloat16),
            nn.Linear(128, 128, dtype=torch.bfloat16),
        )


class Tiny(nn.Module):
    def __init__(self, blocks: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.head = nn.Linear(128, 128, dtype=torch.bfloat16)


def converted(layer: nn.Module) -> bool:
    return type(layer) is not nn.Linear or type(layer.weight.data) is not torch.Tensor


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", sorted(HELD["torchao"]))
@pytest.mark.parametrize("known", [True, False])
def test_torchao_itself_converts_the_layers_that_the_recipe_quantises(name, known):
    recipe = PRESETS[name]()
    if not known and recipe.layers.last_fraction:
        with pytest.raises(Lost, match="--blocks"):
            TARGETS["torchao"].write(recipe, Model(name))
        return
    made = run(TARGETS["torchao"].write(recipe, Model(name, BLOCKS if known else None)))
    model = Tiny(BLOCKS)
    made["convert"](model, *([] if known else [BLOCKS]))
    assert [converted(block.down) and converted(block.up) for block in model.layers] == [
        not recipe.plain and recipe.layers.quantises(block, BLOCKS) for block in range(BLOCKS)
    ]
    assert not converted(model.head)


STATES = [(name, state) for name, config in CLASSES.items() for state in config.states()]


@every(case=STATES)
def test_torchaos_own_object_of_what_is_written_is_read_as_the_recipe(case):
    name, state = case
    recipe = CLASSES[name].recipe(state)
    made = run(TARGETS["torchao"].write(recipe, Model("it", BLOCKS)))
    assert type(made["CONFIG"]).__name__ == name
    assert recipe_of_torchao(made["CONFIG"]) == recipe


@every(case=[("NVFP4TrainingConfig", "rht_sign_vector"), ("MXFP8TrainingOpConfig", "wgrad_with_hp")])
def test_a_torchao_object_without_a_field_that_decides_is_refused(case):
    """Another release may choose otherwise: torchao 0.18 draws signs unless it is given them."""
    name, lacking = case
    read = CLASSES[name].read
    for fields in ([*read], [field for field in read if field != lacking]):
        made = make_dataclass(name, [(field, str, read[field][0]) for field in fields])()
        if lacking in fields:
            assert recipe_of_torchao(made) == CLASSES[name].preset()
            continue
        with pytest.raises(ValueError, match=rf"{name}\.{lacking} missing: read is "):
            recipe_of_torchao(made)


def test_each_state_of_torchaos_classes_is_another_recipe():
    assert len({CLASSES[name].recipe(state) for name, state in STATES}) == len(STATES) == 5


def test_the_signs_that_torchao_is_given_are_transformer_engines():
    assert SIGNS == TE_SIGNS


@pytest.mark.filterwarnings("ignore")
def test_torchaos_fp8_and_mxfp8_casts_are_ours_bit_for_bit():
    from torchao.float8.float8_scaling_utils import hp_tensor_to_float8_dynamic
    from torchao.float8.float8_training_tensor import GemmInputRole, LinearMMConfig, ScaledMMConfig
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    generator = torch.Generator().manual_seed(0)
    one = ScaledMMConfig(True, False, False, False)
    config, compared = LinearMMConfig(one, one, one), 0
    for number in range(60):
        spread = torch.exp(4 * torch.randn(64, 1, generator=generator)) * 10.0 ** (number % 11 - 6)
        x = (torch.randn(64, 128, generator=generator) * spread).bfloat16()
        for slot, dtype in (("fprop.x", torch.float8_e4m3fn), ("dgrad.g", torch.float8_e5m2)):
            ours = quantize(x, PRESETS["fp8_current"]().slot(slot), clock=Clock(0)).values
            theirs = hp_tensor_to_float8_dynamic(x, dtype, config, gemm_input_role=GemmInputRole.INPUT)
            assert torch.equal(ours.float(), theirs._data.float())
            compared += x.numel()
        ours = quantize(x, PRESETS["mxfp8"]().slot("fprop.x"), clock=Clock(0)).values
        scales, codes = to_mx(x, torch.float8_e4m3fn, 32, ScaleCalculationMode.RCEIL)
        theirs = (codes.float().view(64, 4, 32) * scales.float().view(64, 4, 1)).view(64, 128)
        assert torch.equal(ours.float(), theirs)
        compared += x.numel()
    assert compared == 60 * 3 * 64 * 128


TITAN = {
    "components.quantization.nvfp4": {
        "NVFP4LinearConverter": SimpleNamespace(Config=lambda fqns: fqns),
        "NVFP4Linear": SimpleNamespace(Config="NVFP4Linear"),
    },
    "config.override": {
        "derive": lambda source, kind: (source, kind),
        "override": lambda **claim: lambda factory: (claim, factory),
    },
    "models.common.linear": {"Linear": SimpleNamespace(Config="Linear")},
}
"""Names that the file of torchtitan imports, by module."""


def test_torchtitan_gets_the_blocks_that_are_quantised(monkeypatch):
    """As converters of a configuration, and as an override of a command line with the same layers."""
    monkeypatch.setitem(sys.modules, "torchtitan", ModuleType("torchtitan"))
    for path, names in TITAN.items():
        parts = path.split(".")
        for depth in range(1, len(parts) + 1):
            name = ".".join(("torchtitan", *parts[:depth]))
            monkeypatch.setitem(sys.modules, name, ModuleType(name))
        vars(sys.modules[f"torchtitan.{path}"]).update(names)
    made = run(TARGETS["torchtitan"].write(PRESETS["nvfp4_paper"](), Model("it", 20)))
    assert made["CONVERTERS"] == [[f"layers.{block}." for block in range(17)]]
    claim, factory = made["quantised"]
    assert claim["target"] == "Linear"
    assert factory("a layer") == ("a layer", "NVFP4Linear")
    for block, name in itertools.product(range(20), ("attention.wo", "feed_forward.w1")):
        whole = f"model_spec.model.layers.{block}.{name}"
        assert any(fnmatch(whole, glob) for glob in claim["fqns"]) is (block < 17)
    assert run(TARGETS["torchtitan"].write(PRESETS["bf16"](), Model("it", 20)))["CONVERTERS"] == []
    with pytest.raises(Lost, match="would then convert every layer"):
        TARGETS["torchtitan"].write(resolve("nvfp4", ["skip_last=20"]), Model("it", 20))


# fouroversix


MISTAKEN = {
    "weight_scale_2d": "yes",
    "keep_master_weights": [True],
    "quantize_backend": {"triton": True},
    "matmul_backend": ["cutlass"],
    "gradient_round_style": None,
}


@every(field=MISTAKEN)
def test_a_value_of_another_type_is_refused_by_the_field_of_fouroversix(field):
    data = json.loads(TARGETS["fouroversix"].write(PRESETS["nvfp4"](), Model("it")))
    with pytest.raises(ValueError, match=rf"^{field} .*: "):
        fouroversix.read(json.dumps(data | {field: MISTAKEN[field]}))


# Experts


MIXED = tuple(
    Layer(f"layers.{block}.{part}", block, frozenset({"Linear", *kinds}))
    for block in range(BLOCKS)
    for part, kinds in (
        ("attn.q", ()),
        *(
            (f"mlp.experts.{number}.{name}", ("Experts", "Expert"))
            for number in (0, 1)
            for name in ("up", "down")
        ),
    )
)
"""Layers of a model with two experts a block."""
ALIGNED = {"nvfp4": 128, "mxfp8": 32, "fp8_current": 16}
"""Multiples of `get_align_size_for_quantization`, megatron-core 0.16.1 to 0.19.1."""


@every(name=ALIGNED)
def test_routed_padding_is_megatrons_if_the_multiple_is(name):
    recipe = resolve(name, [f"recipe.experts.padding=routed:{ALIGNED[name]}"])
    text = TARGETS["megatron"].write(recipe, Model(name, BLOCKS))
    assert "    --moe-router-padding-for-quantization\n    --moe-grouped-gemm\n" in text
    script = re.search(r"PRECISION_ARGS=\((.*?)\)", text, re.DOTALL)
    assert read([script[1]], {}).experts == recipe.experts
    old = script[1].replace("-for-quantization", "-for-fp8")  # the option's name of before
    assert read([old], {}).experts == recipe.experts
    for turned in (f"routed:{2 * ALIGNED[name]}", "routed:8"):
        with pytest.raises(Lost, match=f"experts.padding {turned}: Megatron-LM has routed:{ALIGNED[name]}"):
            TARGETS["megatron"].write(
                resolve(name, [f"recipe.experts.padding={turned}"]), Model(name, BLOCKS)
            )
    with pytest.raises(ValueError, match="does not start without --fp4-format"):
        read(["--bf16 --moe-router-padding-for-quantization"], {})


@every(
    target=TARGETS, field=("padding=routed:128", "gate_up=split", "rounding_state=shared", "routing=replay")
)
def test_every_other_field_of_experts_is_refused(target, field):
    if (target, field) == ("megatron", "padding=routed:128"):
        return
    with pytest.raises(Lost) as lost:
        TARGETS[target].write(resolve("nvfp4", [f"recipe.experts.{field}"]), Model("it", BLOCKS))
    name = field.partition("=")[0]
    assert any(reason.startswith(f"experts.{name} ") for reason in lost.value.reasons)


@every(target=TARGETS)
def test_a_model_with_experts_is_written_by_stacks_that_quantise_them_alone(target):
    model = Model("it", layers=MIXED)
    if target in ("megatron", "bridge", "te"):
        text = TARGETS[target].write(PRESETS["nvfp4"](), model)
        assert ("--moe-grouped-gemm" in text) is (target == "megatron")
        assert ("packed experts would stay in bf16" in text) is (target == "te")
        return
    with pytest.raises(Lost) as lost:
        TARGETS[target].write(PRESETS["nvfp4"](), model)
    assert any("layers.0.mlp.experts.0.up: the model packs" in reason for reason in lost.value.reasons)


def test_a_model_whose_experts_all_stay_in_bf16_is_written():
    rules = '[{match: {name: "*.experts.*"}, use: null}]'
    recipe = resolve("nvfp4", [f"recipe.layers.rules={rules}"])
    text = TARGETS["te"].write(recipe, Model("it", layers=MIXED))
    assert "packed experts" not in text
    for name in ("*.experts.*.up", "*.attn.*"):
        others = resolve("nvfp4", [f'recipe.layers.rules=[{{match: {{name: "{name}"}}, use: null}}]'])
        assert "packed experts would stay" in TARGETS["te"].write(others, Model("it", layers=MIXED))


@every(target=("te", "megatron", "fouroversix"), known=(False, True))
def test_a_rule_for_one_expert_is_refused_by_its_number(target, known):
    model = Model("it", layers=MIXED) if known else Model("it", BLOCKS)
    for name, refused in (("*.experts.1.*", True), ("*.experts.*", False)):
        rules = [{"match": {"blocks": "0-1"}, "use": None}, {"match": {"name": name}, "use": None}]
        recipe = resolve("nvfp4", [f"recipe.layers.rules={json.dumps(rules)}"])
        try:
            TARGETS[target].write(recipe, model)
            reasons = []
        except Lost as lost:
            reasons = lost.reasons
        assert any("layers.rules.1 " in why and "one module for all" in why for why in reasons) is refused


def test_megatrons_file_on_single_layers_names_the_modules_of_all_experts():
    rule = '[{match: {name: "*.experts.*"}, use: null}]'
    recipe = resolve("nvfp4", [f"recipe.layers.rules={rule}"])
    text = TARGETS["megatron"].write(recipe, Model("it", layers=MIXED))
    assert '    pattern: "*.experts.*"' in text
    with pytest.raises(Lost, match="selects none of Megatron's layers"):
        TARGETS["megatron"].write(recipe, Model("it", BLOCKS))


GROUPED = [
    ("nvfp4", {}, "1", "at once on SM 10.0 to 11.0"),
    ("mxfp8", {}, "1", "at once on SM 10.0 to 11.0"),
    ("bf16", {}, "1", "at once, in high precision"),
    ("nvfp4", {}, "0", "quantises and multiplies expert by expert"),
    ("nvfp4_dequantised", {}, "1", "all the same: backward_override is dequantized"),
    ("nvfp4", {"rht": False}, "1", "all the same: NVFP4 needs its rotation"),
    ("nvfp4_1d_weight", {}, "1", "all the same: the recipe is not one of Transformer Engine's classes"),
    ("ue5m3", {}, "1", "all the same: the recipe is not one of Transformer Engine's classes"),
    ("nvfp4", {}, "yes", "does not start"),
]


@every(case=GROUPED)
def test_the_path_of_grouped_products_is_that_of_transformer_engine(case):
    name, turned, value, said = case
    recipe = resolve(name, [f"{key}={json.dumps(change)}" for key, change in turned.items()])
    (sentence,) = grouped_switches({FUSED: value}, recipe)
    assert said in sentence


def test_the_audit_names_variables_about_grouped_products_and_counts_none_as_a_difference():
    done = here(
        *("recipe", "audit", "nvfp4", "--te", "NVFP4BlockScaling"),
        **{FUSED: "1", "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "1", "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "0"},
    )
    assert done.returncode == 0, done.stderr
    assert f"{FUSED}=1: te.GroupedLinear multiplies all experts at once" in done.stdout
    assert "NVTE_CUTEDSL_FUSED_GROUPED_MLP=1 lets te.ops" in done.stdout
    assert "SINGLE_PARAM" not in done.stdout


@pytest.mark.skipif(find_spec("transformer_engine") is None, reason="Transformer Engine is not installed")
def test_the_variables_are_all_that_the_installed_transformer_engine_reads():
    folder = Path(find_spec("transformer_engine").submodule_search_locations[0]) / "pytorch"
    text = "".join(path.read_text() for path in folder.rglob("*.py"))
    assert {*re.findall(r"\bNVTE_\w*GROUPED\w*", text)} == {FUSED, *SWITCHES}


# What is lost


LACKED = [
    ("fprop.x.block=1x32", "fprop.x.block"),
    ("fprop.w.block=1x32", "fprop.w.block"),
    ("dgrad.g.bits=16", "dgrad.g.bits"),
    ("wgrad.g.bits=24", "wgrad.g.bits"),
    ("fprop.x.scale.format=ue5m3", "fprop.x.scale"),
    ("fprop.x.scale.rounding=ceil", "fprop.x.scale"),
    ("fprop.w.scale.zero=one", "fprop.w.scale"),
    ("fprop.x.outer.statistic=percentile:0.999", "fprop.x.outer.statistic"),
    ("fprop.x.outer.statistic=hold:50", "fprop.x.outer.statistic"),
    ("fprop.w.outer.statistic=static:3", "fprop.w.outer.statistic"),
    ("wgrad.x.outer.granularity=row", "wgrad.x.outer.granularity"),
    ("fprop.x.outer.granularity=block:128", "fprop.x.outer.granularity"),
    ("fprop.x.outer.granularity=rows:16", "fprop.x.outer.granularity"),
    ("dgrad.w.outer.granularity=rows:16", "dgrad.w.outer.granularity"),
    ("fprop.x.outer.bound=256", "fprop.x.outer.bound"),
    ("fprop.x.range.headroom=1.0625", "fprop.x.range.headroom"),
    ("fprop.x.range.prescale=0.5", "fprop.x.range.prescale"),
    ("fprop.x.range.map_to=4", "fprop.x.range"),
    ("fprop.x.range.statistic=rms:3", "fprop.x.range"),
    ("fprop.w.rounding=stochastic", "fprop.w.rounding"),
    ("fprop.x.rounding=away", "fprop.x.rounding"),
    ("fprop.x.element=int4", "fprop.x.element"),
    ("fprop.x.estimator=clip_mask", "fprop.x.estimator"),
    ("fprop.x.transform={mean: true}", "fprop.x.transform"),
    ("fprop.gemm=fp32_out", "fprop.gemm"),
    ("wgrad.dw=fp32", "wgrad.dw"),
    ("wgrad.hadamard.size=32", "wgrad.hadamard"),
    ("wgrad.hadamard.signs=per_step", "wgrad.hadamard"),
    ("fprop.hadamard={size: 16}", "fprop.hadamard"),
    ("weights.master=bf16", "weights.master"),
    ("weights.q_ema={}", "weights.q_ema"),
    ("weights.osci_reset={}", "weights.osci_reset"),
    ("weights.noise={}", "weights.noise"),
    ('schedule=[{start: "noise_ratio:1"}]', "schedule.0.start"),
    ("wgrad.x.select={among: scales}", "wgrad.x.select"),
    ("fprop.x.select={among: scales, map_to: [6, 12]}", "fprop.x.select.map_to"),
]


@every(change=LACKED)
def test_a_recipe_with_one_field_that_the_target_lacks_is_refused_by_that_field(change):
    recipe, field = resolve("nvfp4", [f"recipe.{change[0]}"]), change[1]
    for target in ("te", "megatron", "bridge"):
        with pytest.raises(Lost) as lost:
            TARGETS[target].write(recipe, Model("it", BLOCKS))
        assert any(reason.startswith(field) for reason in lost.value.reasons), (
            target,
            field,
            lost.value.reasons,
        )
    for target in ("torchao", "torchtitan", "fouroversix"):
        with pytest.raises(Lost) as lost:
            TARGETS[target].write(recipe, Model("it", BLOCKS))
        parts = {
            field.split(".")[0],
            field.split(".")[-1],
        }  # fouroversix has one quantiser for both of w's copies
        assert any(part in reason for part in parts for reason in lost.value.reasons), (target, field)


@every(target=("megatron", "bridge"))
def test_a_schedule_hides_no_other_reason(target):
    recipe = resolve(
        "nvfp4_1d_weight", ['recipe.schedule=[{start: "step:5"}]', "recipe.layers.last_fraction=0.2"]
    )
    with pytest.raises(Lost) as lost:
        TARGETS[target].write(recipe, Model("it"))
    paths = [reason.partition(" ")[0] for reason in lost.value.reasons]
    assert paths == ["schedule.0.start", "layers.last_fraction", "fprop,"]


RULED = ("te", "fouroversix")


@pytest.mark.parametrize("target", RULED)
def test_rules_that_the_model_resolves_are_asked_for_the_model_alone(target):
    recipe = resolve("nvfp4", ['recipe.layers.rules=[{match: {within: "*Attention*"}, use: null}]'])
    with pytest.raises(Lost) as lost:
        TARGETS[target].write(recipe, Model("it", BLOCKS))
    (reason,) = [each for each in lost.value.reasons if each.startswith("layers.rules")]
    assert "--model" in reason
    layers = (Layer("layers.0.attn.q", 0, frozenset({"Attention"})), Layer("layers.0.up", 0, frozenset()))
    assert TARGETS[target].write(recipe, Model("it", layers=layers))


def test_the_setting_that_megatrons_refusal_names_is_one_that_it_takes():
    with pytest.raises(Lost) as lost:
        TARGETS["megatron"].write(PRESETS["nemotron3_super"](), Model("it", BLOCKS))
    (reason,) = lost.value.reasons
    setting = reason.partition("--set '")[2].partition("'")[0]
    text = TARGETS["megatron"].write(resolve("nemotron3_super", [setting]), Model("it", BLOCKS))
    assert 'pattern: "*.self_attention.*"' in text


# The command


def test_what_is_written_as_a_recipe_file_is_the_recipe(tmp_path):
    for suffix in ("yaml", "json"):
        file = tmp_path / f"mine.{suffix}"
        assert here("recipe", "export", "quartet2", "--to", suffix, "-o", file).returncode == 0
        assert resolve(str(file), []) == PRESETS["quartet2"]()


TITLED = ("te", "megatron", "bridge", "torchao")


@pytest.mark.parametrize("target", TITLED)
def test_a_title_names_the_settings_and_stays_one_comment(target, tmp_path):
    file, plain = tmp_path / "precision", tmp_path / "plain"
    odd = ("recipe.schedule=[\n]", 'recipe.dtype="\\x62f16"')
    for path, settings in ((file, ("skip_last=1", *odd)), (plain, ("skip_last=1", "skip_first=0"))):
        words = [word for setting in settings for word in ("--set", setting)]
        done = here("recipe", "export", "nvfp4", "--to", target, "--blocks", BLOCKS, "-o", path, *words)
        assert done.returncode == 0, done.stderr
    assert "nvfp4 with skip_last=1, skip_first=0" in plain.read_text().splitlines()[0]
    title, *rest = file.read_text().splitlines()
    assert (rest, title) == (plain.read_text().splitlines()[1:], title.strip())
    if target in ("te", "bridge", "torchao"):
        compile(file.read_text(), "exported.py", "exec")


@pytest.mark.parametrize("recipe", ["nvfp4", {"from": "nvfp4"}])
def test_an_experiment_in_place_of_a_recipe_is_named_as_one(recipe, tmp_path):
    for keys in ({"schema": 1}, {"workload": {"idle": {"steps": 4}}}):
        (tmp_path / "mine.yaml").write_text(json.dumps(keys | {"recipe": recipe, "seeds": 3}))
        done = here("recipe", "export", tmp_path / "mine.yaml", "--to", "te")
        assert (done.returncode, done.stdout) == (2, "")
        (line,) = done.stderr.splitlines()
        assert ("experiment" in line, "no such key" in line) == (True, False)


def test_arguments_are_imported_as_a_recipe_file(tmp_path):
    file = tmp_path / "mine.yaml"
    words = (
        "--bf16 --fp4-format e2m1 --fp4-recipe nvfp4 --first-last-layers-bf16 --num-layers-at-end-in-bf16 4"
    )
    done = here("recipe", "import", "--megatron-args", f"--lr 1e-3 {words} --micro-batch-size 2", "-o", file)
    assert done.returncode == 0, done.stderr
    found = resolve(str(file), [])
    assert found.products == PRESETS["nvfp4"]().products
    assert (found.layers.skip_first, found.layers.skip_last) == (
        1,
        4,
    )  # Megatron's default keeps one at the start


def test_a_file_with_other_content_is_not_replaced_without_a_word(tmp_path):
    file = tmp_path / "mine.yaml"
    exports = (("export", "nvfp4", "--to", "yaml"), ("export", "nvfp4", "--to", "megatron"))
    for words in (*exports, ("import", "--te", "NVFP4BlockScaling")):
        outputs = []
        for content in (None, "notes: mine", here("recipe", *words).stdout):
            file.unlink(missing_ok=True)
            if content is not None:
                file.write_text(content)
            done = here("recipe", *words, "-o", file)
            assert (done.returncode, file.read_text()) == (0, here("recipe", *words).stdout), done.stderr
            outputs.append("replaced" in done.stdout)
        assert outputs == [False, True, False]


def test_the_environment_decides_what_a_class_without_arguments_is(tmp_path):
    for value, status in (("1", 1), ("0", 0)):
        done = here("recipe", "audit", "nvfp4", "--te", "NVFP4BlockScaling", NVTE_NVFP4_DISABLE_RHT=value)
        assert done.returncode == status
        assert ("NVTE_NVFP4_DISABLE_RHT=1 sets disable_rht" in done.stdout) == (value == "1")
        assert ("wgrad.hadamard" in done.stdout) == (value == "1")
    stray = here("recipe", "audit", "nvfp4", "--te", "NVFP4BlockScaling", NVTE_USE_FAST_MATH="1")
    assert (stray.returncode, "NVTE_USE_FAST_MATH is set" in stray.stdout) == (1, True)


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (("export", "nvfp4_paper", "--to", "megatron"), "give --blocks N or --model"),
        (("export", "mxfp4", "--to", "te"), "fprop.x.block 1x32"),
        (("export", "nvfp5", "--to", "te"), "nvfp4"),
        (("import",), "give one of"),
        (("import", "--te", "NVFP4BlockScaling", "--megatron-args", "--bf16"), "give one of"),
        (("import", "--te", "Float8BlockScaling"), "one of NVFP4BlockScaling"),
        (("import", "--object", "recipe.pkl"), "not unpickled"),
        (("import", "--object", "no_such_module:RECIPE"), "no_such_module"),
        (("import", "--object", "json:dumps"), "no recipe object"),
        (("import", "--object", "json"), "write module:name"),
        (("import", "--script", "state.pt"), "No such file"),
        (("import", "--script", "nowhere.sh"), "No such file"),
        (("import", "--megatron-args", "--fp4-format"), "its value is missing"),
        (("import", "--megatron-args", "--fp8-format= --bf16"), "--fp8-format: its value is missing"),
        (("import", "--megatron-args", "--fp8-format hybrid --fp8-recipe="), "--fp8-recipe: its value is missing"),
        (("import", "--megatron-args", "--fp8-format hybrid --no-fp8-wgrad=False"), "takes no value"),
        (("import", "--megatron-args", "--fp4-format e2m1 --fp8-format hybrid"), "takes one of them"),
        (("import", "--megatron-args", "--fp8-format hybrid --fp8-recipe blockwise"), "tensorwise, delayed or mxfp8"),
        (("import", "--megatron-args", "--fp8-format e5m2 --fp8-recipe mxfp8"), "e4m3 or hybrid"),
        (("import", "--megatron-args", "--fp4-format e2m1 --te-precision-config-file x.yaml"), "No such file"),
        (("import", "--megatron-args", "--fp4-format e2m1 --kitchen-config-file x.yaml"), "not read here"),
        (("import", "--megatron-args", "--fp8-format e4m3 --fp8-output-proj"), "not read here"),
        (("import", "--megatron-args", "--fp4-fromat e2m1 --fp4-recipe nvfp4"), "--fp4-format"),
        (("audit", "nvfp4", "--megatron-args", "--fp4-fromat e2m1 --fp4-recipe nvfp4"), "--fp4-format"),
        (("import", "--megatron-args", "--bf16 --fp4-param-gather"), "without --fp4-format"),
        (("import", "--fouroversix", "nowhere.json"), "No such file"),
        (("import", "--megatron-args", "--fp4-format e2m1 --first-last-layers-bf16 --num-layers-at-end-in-bf16 x"), "a number"),
    ],
)  # fmt: skip
def test_what_cannot_be_written_or_read_is_said_in_a_sentence(words, why):
    done = here("recipe", *words)
    assert (done.returncode, why in done.stderr, "Traceback" in done.stderr) == (2, True, False), done.stderr
