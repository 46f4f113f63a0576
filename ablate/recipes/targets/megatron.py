"""Environment and arguments for Megatron-LM, and Python for Megatron-Bridge; arguments as recipes.

Megatron makes Transformer Engine's recipe objects without most of their arguments, so TE's environment
variables decide about the rest. They are written too, each of them, and read as well.
"""

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from difflib import get_close_matches
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from ablate.errors import nearest
from ablate.recipes.experts import Experts
from ablate.recipes.recipe import Layers, Products, Recipe
from ablate.recipes.targets import megatron_precision
from ablate.recipes.targets.experts import has_experts, multiple
from ablate.recipes.targets.model import Lost, Model, confirmed, skipped, unheld
from ablate.recipes.te_import import TERecipe, recipe_of
from ablate.recipes.te_mapping import Builtin, canonical, families, recipe_refusals, te_recipe

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
_FP8 = {"e4m3": "E4M3", "hybrid": "HYBRID"}
"""TE's name of an FP8 format by Megatron's."""
FILE, FILE_NAME = "PRECISION_YAML", "precision.yaml"
"""Variable of the script that names the file on single layers, and that name without it."""
_LAYERS = "--te-precision-config-file"
_HEREDOC = f"""\
# Layers of their own. A module path numbers the blocks of one pipeline stage: use one stage.
{FILE}="${{{FILE}:-{FILE_NAME}}}"
cat > "${FILE}" <<'YAML'
"""
"""Beginning of the lines of a script that write that file."""
_STAGES, _DEPTH = "--pipeline-model-parallel-size", "--num-layers"
_FLAGS = {
    "--fp8-format": None,
    "--fp8-recipe": "delayed",
    "--fp8-amax-history-len": "1",
    "--fp8-amax-compute-algo": "most_recent",
    "--fp8-margin": "0",
    "--fp8-interval": "1",
    "--fp4-format": None,
    "--fp4-recipe": "nvfp4",
    "--num-layers-at-start-in-bf16": "1",
    "--num-layers-at-end-in-bf16": "1",
    _LAYERS: None,
    _STAGES: "1",
    _DEPTH: None,
}
"""Arguments with a value that decide about the recipe, and Megatron's defaults (megatron-core 0.16.1 to
0.19.1). The last two are not about precision.
"""
_IN_FILE = {
    "fp8_quantization_recipe": "--fp8-recipe",
    "fp4_quantization_recipe": "--fp4-recipe",
    "fp8_format": "--fp8-format",
}
"""Arguments that the file on single layers has as fields."""
_READ = {
    "--fp8-recipe": ("tensorwise", "delayed", "mxfp8"),
    "--fp4-recipe": ("nvfp4",),
    "fp8_quantization_recipe": ("tensorwise", "mxfp8"),
    "fp4_quantization_recipe": ("nvfp4",),
}
"""Recipes that are read, by the argument or the field that names them."""
_ROUTED = "--moe-router-padding-for-quantization"
"""Switch that fills each expert with tokens that the router sends elsewhere (`moe_utils.pad_routing_map`)."""
_NEEDS = {
    "--fp8-param-gather": ("--fp8-format",),
    "--fp4-param-gather": ("--fp4-format",),
    _ROUTED: ("--fp4-format", "--fp8-format"),
}
"""Switches without which Megatron does not start unless one of some options is given. The first two keep
quantised weights between steps. They change no number: TE casts the master weights to bf16 first, as without
them (Transformer Engine 2.20.2, `quantize_master_weights`).
"""
_GROUPED = "--moe-grouped-gemm"
"""Switch that multiplies all experts of a block at once. It changes no expert's scales, so it is written and
not read.
"""
_SWITCHES = ("--bf16", "--first-last-layers-bf16", "--no-fp8-wgrad", *_NEEDS)
_ALIASES = {"--disable-fp8-wgrad": "--no-fp8-wgrad", "--moe-router-padding-for-fp8": _ROUTED}
"""Other names of the same options."""
_REFUSED = [
    *("--fp16", "--kitchen-config-file", "--fp4-quantizer-factory", "--fp8-quantizer-factory"),
    *("--fp8-dot-product-attention", "--fp8-multi-head-attention", "--fp8-output-proj"),
]
"""Arguments that change what is computed in a way that is not read here."""
_FORMATS = ("--fp4", "--fp8")
"""First letters of options that belong to a format: each one is read, or refused."""
VALUED = _FLAGS.keys() - {_STAGES, _DEPTH}
"""Options about precision that have a value."""
_OPTIONS = [*(name for name in _FLAGS if name in VALUED), *_SWITCHES, *_REFUSED]
"""Options about precision."""
PRECISION = re.compile(
    r"NVTE_\w*|S(?:LURM|RUN)_EXPORT_ENV|--fp[48][\w-]*"
    rf"|(?:{'|'.join((*_OPTIONS, *_ALIASES))})(?![\w-])",
    re.IGNORECASE,
)
"""Variables and options about precision, in a text, and Slurm's about what a job gets."""
_MISTYPED = 0.85
"""Similarity (difflib) to an option about precision from which an option that is not read is refused."""


class Job(NamedTuple):
    """Configuration of a process that trains by a recipe."""

    variables: Mapping[str, str | None]
    """TE's variables; None for one that must not be set."""
    options: Mapping[str, str]
    """Arguments with their values, empty for a switch; without the file on single layers."""
    layers: str
    """Content of that file; empty if there are no rules."""


def write(recipe: Recipe, model: Model) -> str:
    """Return a shell script with TE's variables and Megatron's arguments; Lost for what they cannot say."""
    variables, options, layers = job(recipe, model)
    options = {**options, **({_LAYERS: f'"${FILE}"'} if layers else {})}
    lines = [
        f"# Precision of {model.label} for megatron-core 0.16 to 0.19, Transformer Engine 2.20.2.",
        '# Source it, then: torchrun ... pretrain_gpt.py "${PRECISION_ARGS[@]}" ...',
        "# Megatron gives TE's recipe few arguments: these variables are the others.",
        *(("# Routed padding: --moe-token-dispatcher-type alltoall or flex.",) if _ROUTED in options else ()),
        *(f"unset {name}" if text is None else f"export {name}={text}" for name, text in variables.items()),
        *((_HEREDOC + layers + "YAML",) if layers else ()),
        "PRECISION_ARGS=(",
        *(f"    {name} {value}".rstrip() for name, value in options.items()),
        ")",
    ]
    return "\n".join(lines) + "\n"


def write_bridge(recipe: Recipe, model: Model) -> str:
    """Return Python that makes Megatron-Bridge's precision config; Lost for what it cannot say."""
    variables, options, _ = job(recipe, model, "Megatron-Bridge", rules=False)
    fields: dict[str, object] = {
        "fp8": options.get("--fp8-format"),
        "fp4": options.get("--fp4-format"),
        "first_last_layers_bf16": "--first-last-layers-bf16" in options,
        "num_layers_at_start_in_bf16": int(options.get("--num-layers-at-start-in-bf16", 0)),
        "num_layers_at_end_in_bf16": int(options.get("--num-layers-at-end-in-bf16", 0)),
        "fp8_param_gather": False,
        "fp8_dot_product_attention": False,
        "fp8_multi_head_attention": False,
    }
    fields |= {f"{name[2:5]}_recipe": word for name, word in options.items() if name.endswith("-recipe")}
    lines = [
        f'"""Precision of {model.label} for Megatron-Bridge 0.3 to 0.6 and Transformer Engine 2.20.2.',
        "",
        "Import this file before Transformer Engine: its recipe classes read these variables when imported.",
        '"""',
        "",
        "import os",
        "",
        *(f'os.environ["{name}"] = "{text}"' for name, text in variables.items() if text is not None),
        *(f'os.environ.pop("{name}", None)' for name, text in variables.items() if text is None),
        "",
        "from megatron.bridge.training.mixed_precision import bf16_mixed  # noqa: E402",
        "",
        "precision = bf16_mixed()",
        *(f"precision.{name} = {value!r}" for name, value in fields.items()),
    ]
    return "\n".join(lines) + "\n"


def read(
    arguments: Sequence[str],
    environment: Mapping[str, str],
    file: Callable[[str], str] = lambda path: Path(path).read_text(encoding="utf-8"),
) -> Recipe:
    """Return the recipe that Megatron-LM trains by.

    Words of its command line that are not about precision are skipped; of the environment the variables of
    Transformer Engine count. `file` returns the text of the file that `--te-precision-config-file` names.
    ValueError if they contradict each other, ask for something that is not emulated, or look like a mistyped
    option about precision.
    """
    said = _said(arguments)
    for name, forms in _NEEDS.items():
        if name in said and not said.keys() & {*forms}:
            why = f"Megatron does not start without {' or '.join(forms)}"
            raise ValueError(f"{name}: {why}; give it, or leave {name} out")
    for name in _REFUSED:
        if name in said:
            raise ValueError(f"{name}: a configuration of its own, which is not read here; leave it out")
    recipe = _counted(said, environment)
    if (path := said.get(_LAYERS)) is None:
        return recipe
    try:
        text = file(path)
    except (OSError, UnicodeDecodeError) as error:
        why = getattr(error, "strerror", None) or "it is no text"
        raise ValueError(f"{_LAYERS} {path}: {why}") from None

    def products(fields: Mapping[str, object]) -> Products:
        kind = "fp8" if fields["fp8_quantization_recipe"] else "fp4"
        named = f"{kind}_quantization_recipe"
        return _made(named, fields[named], fields["fp8_format"] if kind == "fp8" else None, environment)

    rules = megatron_precision.rules_of(text, recipe, products)
    stages = said.get(_STAGES) or "1"
    if stages != "1" and any(rule.match.blocks for rule in rules):
        why = f"each stage numbers its own blocks from 0, and {path} names blocks by number"
        raise ValueError(f"{_STAGES} {stages}: {why}")
    return recipe.changed({"layers.rules": rules})


def without_effect(arguments: Sequence[str]) -> Iterator[str]:
    """Yield a sentence for each option that Megatron accepts and ignores beside the others; arguments and
    ValueError as of `read`.

    megatron-core 0.16.1 to 0.19.1 looks at `fp4_recipe`, `fp8_recipe` and the like only if `fp4` or `fp8` is
    set, and hands `fp8_wgrad` to DelayedScaling alone (`get_fp8_recipe`).
    """
    said = _said(arguments)
    for name, value in said.items():
        if name[:5] in _FORMATS and (form := f"{name[:5]}-format") not in said:
            shown = name if value is None else f"{name} {value}"
            yield f"{shown}: Megatron ignores it without {form}; give {form}, or leave {name} out"
    delayed = "--fp8-format" in said and said.get("--fp8-recipe") in (None, "delayed")
    if "--no-fp8-wgrad" in said and not delayed:
        yield (
            "--no-fp8-wgrad: Megatron ignores it without --fp8-format and --fp8-recipe delayed, and wgrad is"
            " computed as the recipe says; leave it out"
        )


def blocks_of(arguments: Sequence[str]) -> int | None:
    """Return the number of blocks by `--num-layers`; None without it, or if a variable stands there."""
    text = _said(arguments).get(_DEPTH) or ""
    return int(text) if text.isdecimal() and int(text) else None


def _counted(said: Mapping[str, str | None], environment: Mapping[str, str]) -> Recipe:
    """Return the recipe of the arguments alone, without rules for single layers."""
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
    if fp4 and fp4 != "e2m1":
        raise ValueError(f"--fp4-format {fp4}: e2m1")
    named = "--fp4-recipe" if fp4 else "--fp8-recipe"
    delayed = values[named] == "delayed"
    more: dict[str, object] = {}
    if delayed:
        more = {
            "amax_history_len": _count(values, "--fp8-amax-history-len"),
            "amax_compute_algo": str(values["--fp8-amax-compute-algo"]),
            "margin": _count(values, "--fp8-margin"),
        }
    products = _made(named, values[named], fp8, environment, **more)
    if "--no-fp8-wgrad" in said and delayed:
        products = products.changed(wgrad=products.wgrad.high_precision())
    padding = f"routed:{multiple(products)}" if _ROUTED in said else "zeros"
    return Recipe.of(products, layers=layers, experts=Experts(padding=padding))


def _made(named: str, word: object, form: object, environment: Mapping[str, str], **more: object) -> Products:
    """Return the products of the class of TE that a key of _READ names. `form` is its FP8 format, None for
    FP4; `more` are other options of the class.
    """
    if word not in _READ[named]:
        known = ", ".join(_READ[named]).rsplit(", ", 1)
        raise ValueError(f"{named} {word}: read are {' or '.join(known)}")
    if form is not None and form not in _FP8:
        raise ValueError(f"--fp8-format {form}: e4m3 or hybrid")
    name = _CLASSES[str(word)]
    options = from_environment(name, environment) | more | ({"fp8_format": _FP8[str(form)]} if form else {})
    return recipe_of(standing_in(name, options)).products


def from_environment(name: str, environment: Mapping[str, str]) -> dict[str, object]:
    """Return the options that a class of TE takes from a job's environment, as TE reads them."""
    options: dict[str, object] = {}
    for variable, (owner, option, default) in VARIABLES.items():
        if owner in ("", name):
            text = environment.get(variable, default or None)
            options[option] = text == "1" if default in ("0", "1") else text
            if text and option.endswith("err_mode"):
                options[option] = text.upper()
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


def confirm(
    recipe: Recipe,
    model: Model,
    arguments: Sequence[str],
    environment: Mapping[str, str],
    file: Callable[[str], str],
    what: str,
) -> None:
    """Compare the intended recipe with the one that `read` returns for Megatron-LM; Lost for each field that
    differs, with `what` the arguments are of, and ValueError as of `read`.
    """
    made, recipe = read(arguments, environment, file), megatron_precision.translated(recipe, model.layers)
    if recipe.layers.rules and model.depth is not None:
        layers = megatron_precision.modules(model.depth, has_experts(model.layers))
        model = Model(model.label, model.depth, layers)
    confirmed(recipe.mapped(canonical), made, model, what)


def job(recipe: Recipe, model: Model, target: str = "Megatron-LM", rules: bool = True) -> Job:
    """Return what makes a process train by a recipe, with rules only if the target has a file on single
    layers; Lost with everything that it cannot say.
    """
    recipe = megatron_precision.translated(recipe, model.layers) if rules else recipe
    refused = [*recipe_refusals(recipe, weights=False)]
    reasons = [*unheld(recipe, model, target, rules=rules, routed=rules, counts=True), *refused]
    depth, every = model.depth, [recipe.products, *(rule.use for rule in recipe.layers.rules if rule.use)]
    if recipe.layers.rules and rules and depth is None:
        reasons.append(f"layers.rules: the number of blocks is not known; give {model.by[0]}")
    classes: list[Builtin | None] = []
    try:
        classes += [_builtin(products, target) for products in every if not refused]
    except Lost as lost:
        reasons += lost.reasons
    if reasons:
        raise Lost(*reasons)
    first, last = skipped(recipe, depth)
    variables = _variables([each for each in classes if each])
    options = {"--bf16": ""} | _named(classes[0])
    if first or last:
        ends = {f"--num-layers-at-{end}-in-bf16": str(n) for end, n in (("start", first), ("end", last))}
        options |= {"--first-last-layers-bf16": ""} | ends
    options |= dict.fromkeys(_of_experts(recipe, model), "")
    layers, file = "", {}
    if recipe.layers.rules:
        assert depth is not None

        def fields(products: Products) -> dict[str, object]:
            named = _named(_builtin(products, target))
            return {field: named[name] for field, name in _IN_FILE.items() if name in named}

        modules = megatron_precision.modules(depth, has_experts(model.layers))
        layers = megatron_precision.written(recipe, modules, fields)
        file = {_LAYERS: FILE}
    words = [" ".join(option) for option in (options | file).items()]
    confirm(recipe, model, words, variables, lambda _: layers, f"{target}'s file")
    return Job({name: variables.get(name) for name in VARIABLES}, options, layers)


def _builtin(products: Products, target: str) -> Builtin | None:
    """Return TE's class for some products, None if none is quantised; Lost if Megatron cannot name it."""
    description = te_recipe(products)
    if description is None:
        return None
    if not isinstance(description, Builtin):
        delayed = families([products]) == {"fp8_delayed"}
        why = (
            "a history of amaxes that TE advances by autocast region" if delayed else "quantizers of its own"
        )
        raise Lost(f"fprop, dgrad, wgrad: the recipe needs {why}, and {target} names TE's own classes")
    if dict(description.options).get("enable_2d_quantization"):
        raise Lost(f"fprop.w.block 32x32: {target} makes MXFP8BlockScaling without it; use 1x32")
    return description


def _named(description: Builtin | None) -> dict[str, str]:
    if description is None:
        return {}
    word = next(word for word, name in _CLASSES.items() if name == description.name)
    if word == "nvfp4":
        return {"--fp4-format": "e2m1", "--fp4-recipe": word}
    form = dict(description.options)["fp8_format"]
    return {"--fp8-format": next(key for key, name in _FP8.items() if name == form), "--fp8-recipe": word}


def _of_experts(recipe: Recipe, model: Model) -> Iterator[str]:
    """Yield the switches about experts, if the recipe or the model has any; Lost for another multiple."""
    padding = recipe.experts.padding
    if padding != "zeros":
        takes = f"routed:{multiple(recipe.products)}"
        if recipe.products.plain or padding != takes:
            here = "does not pad experts in bf16; write zeros" if recipe.products.plain else f"has {takes}"
            raise Lost(f"experts.padding {padding}: Megatron-LM {here}")
        yield _ROUTED
    if padding != "zeros" or has_experts(model.layers):
        yield _GROUPED


def _variables(builtins: Sequence[Builtin]) -> dict[str, str]:
    """Return the value of each of TE's variables that is set; Lost if two classes need different ones."""
    variables: dict[str, str] = {}
    for variable, (owner, option, default) in VARIABLES.items():
        given = [dict(each.options).get(option, default) for each in builtins if owner in ("", each.name)]
        values = {str(int(value) if isinstance(value, bool) else value or "") for value in given}
        if len(values) > 1:
            why = f"is one for the whole job, and its layers need {sorted(values)}"
            raise Lost(f"layers.rules: {variable} {why}")
        if text := next(iter(values), default):
            variables[variable] = text
    return variables


def embedded(script: str) -> str | None:
    """Return the file on single layers that a script of `write` makes; None if it makes none."""
    match = re.search(r"<<'YAML'\n(.*?\n)YAML$", script, re.DOTALL | re.MULTILINE)
    return match[1] if match else None


def _said(arguments: Sequence[str]) -> dict[str, str | None]:
    """Return the arguments about precision: None for one without a value; ValueError for a mistyped one."""
    words = [word for text in arguments for word in shlex.split(text)]
    said: dict[str, str | None] = {}
    for word, following in zip_longest(words, words[1:], fillvalue=""):
        name, equals, value = word.partition("=")
        name = _ALIASES.get(name, name)
        if name not in (*_FLAGS, *_OPTIONS):
            _refuse_mistyped(name)
            continue
        value = value if equals else following
        if name in _FLAGS and (not value or (not equals and value.startswith("--"))):
            raise ValueError(f"{name}: its value is missing")
        if name in _SWITCHES and equals:
            raise ValueError(f"{word}: {name} is a switch and takes no value; leave ={value} out")
        said[name] = value if name in _FLAGS else None
    return said


def _refuse_mistyped(name: str) -> None:
    """Raise ValueError if a word that is not read is, or looks like, an option about precision."""
    if name[:1] not in ("-", "\u2013", "\u2014"):  # an editor makes dashes of hyphens
        return
    word = "--" + name.lstrip("-\u2013\u2014").lower().replace("_", "-")
    of_format = [each for each in _OPTIONS if word[:5] in _FORMATS and each.startswith(word[:5])]
    if of_format or get_close_matches(word, _OPTIONS, n=1, cutoff=_MISTYPED):
        hint = nearest(word, of_format or _OPTIONS, 3)
        raise ValueError(f"{name}: no option about precision that is read here; {hint}")


def _count(values: Mapping[str, str | None], name: str) -> int:
    text = str(values[name])
    if not text.isdecimal():
        raise ValueError(f"{name} {text}: a number of 0 or more")
    return int(text)
