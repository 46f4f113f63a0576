"""Environment and arguments for Megatron-LM, and Python for Megatron-Bridge; arguments as recipes.

Megatron makes Transformer Engine's recipe objects without most of their arguments, so TE's environment
variables decide about the rest. They are written too, each of them, and read as well.
"""

import shlex
from collections.abc import Iterator, Mapping, Sequence

from ablate.recipes.recipe import Layers, Recipe
from ablate.recipes.targets.model import Lost, Model, skipped, unheld
from ablate.recipes.te_import import TERecipe, recipe_of
from ablate.recipes.te_mapping import Builtin, recipe_refusals, te_recipe

VARIABLES = {
    "NVTE_NVFP4_DISABLE_RHT": ("NVFP4BlockScaling", "disable_rht", "0"),
    "NVTE_NVFP4_DISABLE_STOCHASTIC_ROUNDING": ("NVFP4BlockScaling", "disable_stochastic_rounding", "0"),
    "NVTE_NVFP4_DISABLE_2D_QUANTIZATION": ("NVFP4BlockScaling", "disable_2d_quantization", "0"),
    "NVTE_NVFP4_ROW_SCALED_ACTIVATION": ("NVFP4BlockScaling", "row_scaled_activation", "0"),
    "NVTE_NVFP4_4OVER6": ("NVFP4BlockScaling", "nvfp4_4over6", "none"),
    "NVTE_NVFP4_4OVER6_E4M3_USE_256": ("NVFP4BlockScaling", "nvfp4_4over6_e4m3_use_256", "all"),
    "NVTE_NVFP4_4OVER6_ERR_MODE": ("NVFP4BlockScaling", "nvfp4_4over6_err_mode", "MAE"),
    "NVTE_FP8_CURRENT_SCALING_POWER_2_SCALES": ("Float8CurrentScaling", "use_power_2_scales", "0"),
    "NVTE_BACKWARD_OVERRIDE": ("", "backward_override", ""),
}
"""TE's variables: class (empty: all), option and default as text. Transformer Engine 2.20.2."""
_CLASSES = {
    "tensorwise": "Float8CurrentScaling",
    "delayed": "DelayedScaling",
    "mxfp8": "MXFP8BlockScaling",
    "nvfp4": "NVFP4BlockScaling",
}
"""TE's class by Megatron's name of the recipe."""
_FLAGS = {
    "--fp8-format": None,
    "--fp8-recipe": "delayed",
    "--fp8-amax-history-len": "1",
    "--fp8-amax-compute-algo": "most_recent",
    "--fp8-margin": "0",
    "--fp4-format": None,
    "--fp4-recipe": "nvfp4",
    "--num-layers-at-start-in-bf16": "1",
    "--num-layers-at-end-in-bf16": "1",
}
"""Arguments with a value that decide about the recipe, and Megatron's defaults (megatron-core 0.16.1)."""
_SWITCHES = ("--bf16", "--first-last-layers-bf16", "--no-fp8-wgrad")
_REFUSED = (
    "--fp16",
    "--fp4-quantizer-factory",
    "--fp8-quantizer-factory",
    "--te-precision-config-file",
    "--kitchen-config-file",
    "--fp8-dot-product-attention",
    "--fp8-multi-head-attention",
)
"""Arguments that change what is computed in a way that is not read here."""


def write(recipe: Recipe, model: Model) -> str:
    """Return a shell script with TE's variables and Megatron's arguments; Lost for what they cannot say."""
    options, flags = _configured(recipe, model, "Megatron-LM")
    lines = [
        f"# Precision of {model.label} for Megatron-LM: megatron-core 0.16, Transformer Engine 2.20.2.",
        '# Source it, then: torchrun ... pretrain_gpt.py "${PRECISION_ARGS[@]}" ...',
        "# Megatron gives TE's recipe few arguments: these variables are the others.",
        *_environment(options),
        "PRECISION_ARGS=(",
        *(f"    {flag}" for flag in flags),
        ")",
    ]
    return "\n".join(lines) + "\n"


def write_bridge(recipe: Recipe, model: Model) -> str:
    """Return Python that makes Megatron-Bridge's precision config; Lost for what it cannot say."""
    options, flags = _configured(recipe, model, "Megatron-Bridge")
    said = _said(flags)
    fields: dict[str, object] = {
        "fp8": said.get("--fp8-format"),
        "fp4": said.get("--fp4-format"),
        "first_last_layers_bf16": "--first-last-layers-bf16" in said,
        "num_layers_at_start_in_bf16": int(said.get("--num-layers-at-start-in-bf16") or 0),
        "num_layers_at_end_in_bf16": int(said.get("--num-layers-at-end-in-bf16") or 0),
        "fp8_param_gather": False,
        "fp8_dot_product_attention": False,
        "fp8_multi_head_attention": False,
    }
    fields |= {"fp8_recipe": said["--fp8-recipe"]} if "--fp8-recipe" in said else {}
    fields |= {"fp4_recipe": said["--fp4-recipe"]} if "--fp4-recipe" in said else {}
    variables = [line.removeprefix("export ") for line in _environment(options) if line.startswith("export ")]
    unset = [line.removeprefix("unset ") for line in _environment(options) if line.startswith("unset ")]
    lines = [
        f'"""Precision of {model.label} for Megatron-Bridge 0.3 and Transformer Engine 2.20.2.',
        "",
        "Import this file before Transformer Engine: its recipe classes read these variables when imported.",
        '"""',
        "",
        "import os",
        "",
        *(f'os.environ["{text.partition("=")[0]}"] = "{text.partition("=")[2]}"' for text in variables),
        *(f'os.environ.pop("{name}", None)' for name in unset),
        "",
        "from megatron.bridge.training.mixed_precision import bf16_mixed  # noqa: E402",
        "",
        "precision = bf16_mixed()",
        *(f"precision.{name} = {value!r}" for name, value in fields.items()),
    ]
    return "\n".join(lines) + "\n"


def read(arguments: Sequence[str], environment: Mapping[str, str]) -> Recipe:
    """Return the recipe that Megatron-LM trains by.

    Args:
        arguments: words of its command line; those that are not about precision are skipped.
        environment: variables of the job; those of Transformer Engine count.

    Raises:
        ValueError: they contradict each other, or ask for something that is not emulated.
    """
    said = _said(arguments)
    for name in _REFUSED:
        if name in said:
            raise ValueError(f"{name}: a configuration of its own, which is not read here; leave it out")
    values = {name: said.get(name) or default for name, default in _FLAGS.items()}
    fp8, fp4 = values["--fp8-format"], values["--fp4-format"]
    if fp8 and fp4:
        raise ValueError("--fp8-format and --fp4-format: Megatron takes one of them")
    first = last = 0
    if "--first-last-layers-bf16" in said:
        first, last = (_count(values, f"--num-layers-at-{end}-in-bf16") for end in ("start", "end"))
    layers = Layers(skip_first=first, skip_last=last)
    if not fp8 and not fp4:
        return Recipe(layers=layers)
    name = str(values["--fp4-recipe"] if fp4 else values["--fp8-recipe"])
    if name not in _CLASSES or (name == "nvfp4") != bool(fp4):
        known = "nvfp4" if fp4 else "tensorwise, delayed or mxfp8"
        raise ValueError(f"--{'fp4' if fp4 else 'fp8'}-recipe {name}: read are {known}")
    options = from_environment(_CLASSES[name], environment)
    if fp8:
        if fp8 not in ("e4m3", "hybrid"):
            raise ValueError(f"--fp8-format {fp8}: e4m3 or hybrid")
        options["fp8_format"] = {"e4m3": "E4M3", "hybrid": "HYBRID"}[fp8]
    elif fp4 != "e2m1":
        raise ValueError(f"--fp4-format {fp4}: e2m1")
    if name == "delayed":
        options |= {
            "amax_history_len": _count(values, "--fp8-amax-history-len"),
            "amax_compute_algo": str(values["--fp8-amax-compute-algo"]),
            "margin": _count(values, "--fp8-margin"),
        }
    recipe = recipe_of(standing_in(_CLASSES[name], options))
    if "--no-fp8-wgrad" in said:
        recipe = recipe.model_copy(update={"wgrad": recipe.wgrad.high_precision()})
    return recipe.model_copy(update={"layers": layers})


def from_environment(name: str, environment: Mapping[str, str]) -> dict[str, object]:
    """Return the options that TE's class takes from the environment, as TE reads them.

    Args:
        name: name of a class in `transformer_engine.common.recipe`.
        environment: variables of the job.
    """
    options: dict[str, object] = {}
    for variable, (owner, option, default) in VARIABLES.items():
        if owner not in ("", name):
            continue
        text = environment.get(variable, default)
        if default in ("0", "1"):
            options[option] = text == "1"
        elif option == "backward_override":
            options[option] = text if variable in environment else None
        else:
            options[option] = text.upper() if option.endswith("err_mode") else text
    return options


def standing_in(name: str, options: Mapping[str, object]) -> TERecipe:
    """Return an object with the name of a TE class and some of its options, for `recipe_of`."""
    usual = {
        "fp8_dpa": False,
        "fp8_mha": False,
        "fp8_format": "E4M3" if name == "MXFP8BlockScaling" else "HYBRID",
    }
    made: TERecipe = type(name, (), usual | dict(options))()
    return made


def _configured(recipe: Recipe, model: Model, target: str) -> tuple[Builtin | None, list[str]]:
    """Return TE's class with its options and Megatron's arguments; Lost with every reason."""
    reasons = [*unheld(recipe, target), *(r for r in recipe_refusals(recipe) if not r.startswith("weights."))]
    description = None if reasons else te_recipe(recipe.products)
    if description is not None and not isinstance(description, Builtin):
        delayed = all(
            quant.outer and str(quant.outer.statistic).startswith("delayed")
            for _, quant in recipe.quantised()
        )
        why = (
            "a history of amaxes that TE advances by autocast region" if delayed else "quantizers of its own"
        )
        reasons.append(f"fprop, dgrad, wgrad: the recipe needs {why}, and {target} names TE's own classes")
    if isinstance(description, Builtin) and dict(description.options).get("enable_2d_quantization"):
        reasons.append(f"fprop.w.block 32x32: {target} makes MXFP8BlockScaling without it; use 1x32")
    try:
        first, last = skipped(recipe, model, target)
    except Lost as lost:
        reasons += lost.reasons
    if reasons:
        raise Lost(list(dict.fromkeys(reasons)))
    assert description is None or isinstance(description, Builtin)
    return description, ["--bf16", *_flags(description), *_bf16_layers(first, last)]


def _flags(description: Builtin | None) -> Iterator[str]:
    if description is None:
        return
    names = {name: word for word, name in _CLASSES.items()}
    word = names[description.name]
    if word == "nvfp4":
        yield from ("--fp4-format e2m1", "--fp4-recipe nvfp4")
        return
    yield f"--fp8-format {str(dict(description.options)['fp8_format']).lower()}"
    yield f"--fp8-recipe {word}"


def _bf16_layers(first: int, last: int) -> Iterator[str]:
    if first or last:
        yield "--first-last-layers-bf16"
        yield f"--num-layers-at-start-in-bf16 {first}"
        yield f"--num-layers-at-end-in-bf16 {last}"


def _environment(description: Builtin | None) -> Iterator[str]:
    """Yield the lines that set or unset every variable."""
    options = dict(description.options) if description else {}
    for variable, (owner, option, default) in VARIABLES.items():
        mine = description is not None and owner in ("", description.name)
        value = options.get(option) if mine and option in options else None
        if option == "backward_override":
            yield f"export {variable}={value}" if value else f"unset {variable}"
        elif isinstance(value, bool):
            yield f"export {variable}={int(value)}"
        else:
            yield f"export {variable}={default if value is None else value}"


def _said(arguments: Sequence[str]) -> dict[str, str | None]:
    """Return the arguments about precision: None for one without a value."""
    words = [word for text in arguments for word in shlex.split(text)]
    said: dict[str, str | None] = {}
    known = (*_FLAGS, *_SWITCHES, *_REFUSED)
    for number, word in enumerate(words):
        name, equals, value = word.partition("=")
        if name not in known:
            continue
        if name in _FLAGS and not equals:
            following = words[number + 1] if number + 1 < len(words) else ""
            if not following or following.startswith("--"):
                raise ValueError(f"{name}: its value is missing")
            value = following
        said[name] = value if name in _FLAGS else None
    return said


def _count(values: Mapping[str, str | None], name: str) -> int:
    text = str(values[name])
    if not text.isdecimal():
        raise ValueError(f"{name} {text}: a number of 0 or more")
    return int(text)
