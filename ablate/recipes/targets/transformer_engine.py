"""Python for Transformer Engine: recipe objects with every argument, and functions that choose among them.

TE's classes take defaults from environment variables when they are imported, and Float8CurrentScaling takes
its quantisers' parameters from them whatever its arguments say. So every argument is written, and those
parameters are set on the object.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import product

from ablate.numerics.spec import argument, tag
from ablate.recipes.recipe import Layers, Phase, Products, Recipe
from ablate.recipes.targets.experts import has_experts, quantised_expert
from ablate.recipes.targets.megatron import standing_in
from ablate.recipes.targets.model import Lost, Model, confirmed, unheld
from ablate.recipes.te_import import recipe_of
from ablate.recipes.te_mapping import (
    TE_ELEMENTS,
    TENSORS,
    Builtin,
    Copies,
    CopyFormat,
    Custom,
    canonical,
    recipe_refusals,
    te_recipe,
)

_MOST_PHASES = 3
_ATTENTION = ("fp8_dpa=False", "fp8_mha=False")
_USUAL = {
    "NVFP4BlockScaling": ("fp4_format=Format.E2M1", "fp8_format=Format.E4M3", *_ATTENTION),
    "MXFP8BlockScaling": ("margin=0", *_ATTENTION),
    "Float8CurrentScaling": (
        "fp8_gemm_fprop=MMParams(use_split_accumulator=False)",
        "fp8_gemm_dgrad=MMParams(use_split_accumulator=True)",
        "fp8_gemm_wgrad=MMParams(use_split_accumulator=True)",
        *_ATTENTION,
    ),
}
"""Arguments of TE's classes that no recipe changes."""
_SWAP = """

def swap(model):
    \"""Make a te.Linear with the same weights of each nn.Linear inside of numbered blocks, in place.

    Call it before the optimizer is made. ValueError if there is none, or if two layers share a weight.
    \"""
    within = re.compile(r"(?:^|\\.)(?:blocks|layers|layer|h)\\.\\d+\\.")
    linears = [(name, each) for name, each in model.named_modules() if type(each) is torch.nn.Linear]
    inside = [(name, each) for name, each in linears if within.search(name)]
    if not inside:
        raise ValueError("the model has no nn.Linear inside of numbered blocks, such as layers.0.up")
{experts}    for name, linear in inside:
        if sum(getattr(each, "weight", None) is linear.weight for each in model.modules()) > 1:
            raise ValueError(f"{name}: its weight is shared, and a copy would train on its own")
    for name, linear in inside:
        made = te.Linear(
            linear.in_features,
            linear.out_features,
            bias=linear.bias is not None,
            params_dtype=linear.weight.dtype,
            device=str(linear.weight.device),  # TE defers "meta", and compares it as text
        )
        with torch.no_grad():
            for part, values in linear.named_parameters():
                getattr(made, part).copy_(values)
        parent, _, child = name.rpartition(".")
        setattr(model.get_submodule(parent), child, made)
"""
"""Function of the file that makes te.Linear of nn.Linear."""
_REFUSED = """\
    for name, weight in model.named_parameters():
        if weight.ndim == 3 and ".experts." in name and within.search(name):
            raise ValueError(
                f"{name}: packed experts would stay in bf16; build the model with te.GroupedLinear in their"
                " place, and call it inside autocast(...)"
            )
"""
"""Its refusal of packed experts, unless the recipe leaves all of them in high precision."""
_QPARAMS = ("fp8_quant_fwd_inp", "fp8_quant_fwd_weight", "fp8_quant_bwd_grad")


def write(recipe: Recipe, model: Model) -> str:
    """Return Python code that makes the recipe of each layer and step; Lost for what TE does not compute."""
    reasons = [*unheld(recipe, model, "Transformer Engine", schedule=True, rules=True)]
    reasons += [
        reason
        for reason in recipe_refusals(recipe)
        if not reason.startswith("weights.")  # `unheld` has them
    ]
    reasons += _delayed(recipe)
    if recipe.layers.rules and not model.layers:
        reasons.append(f"layers.rules: the layers that they select are not known; give {model.by[1]}")
    if len(recipe.schedule) > _MOST_PHASES:
        reasons.append(f"schedule: {len(recipe.schedule)} phases; {_MOST_PHASES} at most are written out")
    if reasons:
        raise Lost(list(dict.fromkeys(reasons)))
    stay = has_experts(model.layers) and quantised_expert(recipe, model.layers) is None
    objects = _Objects()
    own = _by_phase(recipe.products, recipe.schedule, objects)
    rules = [
        None if rule.use is None else _by_phase(rule.use, recipe.schedule, objects)
        for rule in recipe.layers.rules
    ]
    return "\n".join(
        [
            f'"""Transformer Engine 2.20.2: recipe objects of {model.label}.',
            "",
            "Every argument is written: environment variables (NVTE_*) change TE's defaults.",
            "te.autocast changes nothing in an nn.Linear: swap(model) first makes them te.Linear.",
            "",
            *_usage(model if rules else Model(), _Needed.of(recipe.schedule)),
            '"""',
            "",
            *objects.text(),
            *_functions(recipe, model, own, rules),
            _SWAP.replace("{experts}", "" if stay else _REFUSED),
        ]
    )


@dataclass(frozen=True)
class _Needed:
    """Arguments about a run that decide when a recipe's phases begin: a caller must give them."""

    step: bool
    steps: bool
    tokens_per_step: bool
    decay: bool

    @classmethod
    def of(cls, schedule: Sequence[Phase]) -> "_Needed":
        """Return the arguments that the phases of a schedule read."""
        starts = {tag(phase.start) for phase in schedule}
        return cls(bool(starts), "fraction" in starts, "tokens" in starts, "decay" in starts)

    @property
    def positional(self) -> str:
        """Return the declaration of `step` and `steps`, with defaults for those that decide nothing."""
        return f"step{'' if self.step else '=0'}, steps{'' if self.steps else '=1'}"

    @property
    def keywords(self) -> str:
        """Return the declaration of the others, likewise."""
        tokens = "" if self.tokens_per_step else "=1"
        return f"tokens_per_step{tokens}, decay{'' if self.decay else '=None'}"

    @property
    def given(self) -> str:
        """Return the others that a call must give, as its last arguments."""
        names = [name for name in ("tokens_per_step", "decay") if getattr(self, name)]
        return "".join(f", {name}={name}" for name in names)


def _usage(model: Model, needed: _Needed) -> Iterator[str]:
    """Yield the lines that show how a loop uses the file; by name if the model's layers have rules."""
    if not model.layers:
        yield f"    with autocast(block, blocks, step, steps{needed.given}):"
        yield "        y = layer(x)"
        return
    yield "Rules select single layers, so each linear layer has a context of its own, with its name in"
    yield "named_modules() of the model. One context around a whole block cannot hold rules."
    yield ""
    for layer in [each for each in model.layers if each.block == model.layers[0].block][:2]:
        name = json.dumps(layer.name)
        yield f"    with autocast({layer.block}, blocks, step, steps, name={name}{needed.given}):"
        yield "        y = linear(x)"


class _Objects:
    """Recipe objects of a file, each made once."""

    def __init__(self) -> None:
        self._names: dict[Builtin | Custom, str] = {}

    def name(self, products: Products) -> str:
        """Return the name of the object that computes these products; `None` if nothing is quantised."""
        description = te_recipe(products)
        if description is None:
            return "None"
        if isinstance(description, Builtin):
            made = recipe_of(standing_in(description.name, dict(description.options)))
            confirmed(Recipe.of(canonical(products)), made, Model(), "Transformer Engine's file")
        if description not in self._names:
            self._names[description] = f"RECIPE_{len(self._names) + 1}" if self._names else "RECIPE"
        return self._names[description]

    def text(self) -> Iterator[str]:
        """Yield the lines that import TE and make the objects."""
        classes = {each.name if isinstance(each, Builtin) else "CustomRecipe" for each in self._names}
        names = sorted(classes | {"Format"})
        if "Float8CurrentScaling" in classes:
            names = sorted({*names, "MMParams", "QParams"})
        yield "import re"
        yield ""
        yield "import torch"
        yield "import transformer_engine.pytorch as te"
        yield f"from transformer_engine.common.recipe import {', '.join(names)}"
        yield ""
        for description, name in self._names.items():
            yield from (
                _made(description, name) if isinstance(description, Builtin) else _custom(description, name)
            )
            yield ""


def _made(description: Builtin, name: str) -> Iterator[str]:
    options = {
        key: f"Format.{value}" if key == "fp8_format" else repr(value) for key, value in description.options
    }
    yield f"{name} = {description.name}("
    for option in (*(f"{key}={value}" for key, value in options.items()), *_USUAL[description.name]):
        yield f"    {option},"
    yield ")"
    if description.name == "Float8CurrentScaling":
        for params in _QPARAMS:
            yield f"{name}.{params} = QParams(power_2_scale=False, amax_epsilon=0.0)"


def _custom(description: Custom, name: str) -> Iterator[str]:
    function = f"quantizer_of_{name.lower()}"
    yield f"def {function}(role):"
    yield '    """Return the quantizer of one tensor of a linear layer."""'
    yield '    tensor = role.tensor_type if role is not None else ""'
    for tensor in TENSORS:
        yield f'    if tensor == "{tensor}":'
        yield from _pair(getattr(description, tensor))
    yield "    return te.IdentityQuantizer()"
    yield ""
    yield ""
    yield f"{name} = CustomRecipe("
    yield f"    qfactory={function},"
    yield "    fp8_format=Format.HYBRID,"
    yield "    fp8_dpa=False,"
    yield "    fp8_mha=False,"
    yield "    backward_override=None,"
    yield "    quantization_alignment=128,"
    yield ")"


def _pair(copies: Copies) -> Iterator[str]:
    """Yield the lines of the quantizer of a tensor's two copies."""
    yield "        return te.HybridQuantizer("
    for name, copy in (("rowwise", copies.row), ("columnwise", copies.column)):
        kind, options = _quantizer(copy)
        if options:
            yield f"            {name}_quantizer=te.{kind}("
            yield from (f"                {option}," for option in options)
            yield "            ),"
        else:
            yield f"            {name}_quantizer=te.{kind}(),"
    yield f'            columnwise_source="{"rowwise_dequantized" if copies.requantised else "original"}",'
    yield "        )"


def _quantizer(copy: CopyFormat) -> tuple[str, list[str]]:
    """Return TE's quantizer of one format, and its arguments."""
    match copy.family:
        case "nvfp4":
            options = {
                "fp4_dtype": "te.DType.kFloat4E2M1",
                "with_rht": copy.rotated,
                "with_post_rht_amax": copy.rotated,
                "with_2d_quantization": copy.square,
                "stochastic_rounding": copy.stochastic,
                "row_scaled_nvfp4": copy.rows,
                "nvfp4_use_4over6": bool(copy.chosen),
                "nvfp4_e4m3_max": copy.bound,
                "nvfp4_4over6_err_mode": repr(copy.chosen or "MAE"),
                "with_random_sign_mask": copy.signs,
            }
            return "NVFP4Quantizer", [f"{key}={value}" for key, value in options.items()]
        case "mxfp8":
            return "MXFP8Quantizer", [_dtype(copy), f"with_2d_quantization={copy.square}"]
        case "fp8":
            fixed = ['device="cuda"', "force_pow_2_scales=False"]
            return "Float8CurrentScalingQuantizer", [_dtype(copy), *fixed]
    return "IdentityQuantizer", []


def _dtype(copy: CopyFormat) -> str:
    return f"te.DType.{TE_ELEMENTS[copy.element]}"


def _delayed(recipe: Recipe) -> Iterator[str]:
    for slot, quant in recipe.quantised():
        if quant.outer and tag(quant.outer.statistic) == "delayed":
            yield (
                f"{slot}.outer.statistic {quant.outer.statistic}: TE's DelayedScaling advances its histories"
                " at each autocast region, not once a step, and begins at 1; use amax"
            )
            return


# --- which recipe, where and when -----------------------------------------------------------------


def _by_phase(
    products: Products, schedule: Sequence[Phase], objects: _Objects
) -> dict[tuple[bool, ...], str]:
    """Return the object's name for every combination of active phases; later ones override earlier ones."""
    names = {}
    for active in product((False, True), repeat=len(schedule)):
        current = products
        for phase, on in zip(schedule, active, strict=True):
            if on:
                current = current.replaced(phase.slots, phase.use or Products())
        names[active] = objects.name(current)
    return names


def _condition(phase: Phase) -> str:
    number = Fraction(argument(phase.start) or 0)
    match tag(phase.start):
        case "step":
            return f"step >= {int(number)}"
        case "tokens":
            return f"step * tokens_per_step >= {int(number)}"
        case "fraction":
            return f"step * {number.denominator} >= {number.numerator} * steps"
    return "decay is not None and step >= decay"


def _functions(
    recipe: Recipe,
    model: Model,
    own: dict[tuple[bool, ...], str],
    rules: Sequence[dict[tuple[bool, ...], str] | None],
) -> Iterator[str]:
    counts = recipe.layers
    yield ""
    yield "def quantised(block, blocks):"
    yield '    """Return True if a block is quantised; it is counted from 0."""'
    yield from _counted(recipe.layers)
    yield ""
    yield ""
    if rules:
        deciders = counts.deciders(model.layers)
        named = ((layer.name, deciders[layer.name]) for layer in model.layers)
        yield "RULES = {  # number of the rule that decides, by layer; None: the counts decide"
        yield from (f"    {name!r}: {rule if isinstance(rule, int) else None}," for name, rule in named)
        yield "}"
        yield "BY_RULE = ["
        yield from (f"    {'None' if each is None else _mapping(each)}," for each in rules)
        yield "]"
    if recipe.schedule:
        yield f"OWN = {_mapping(own)}"
        yield '"""Recipe by the phases that are active."""'
    if rules or recipe.schedule:
        yield ""
        yield ""
    name = "name" if rules else 'name=""'
    needed = _Needed.of(recipe.schedule)
    yield f"def recipe(block, blocks, {needed.positional}, *, {name}, {needed.keywords}):"
    yield '    """Return the recipe of a layer at a step, both counted from 0; None: high precision.'
    yield ""
    yield "    Args:"
    yield "        block, blocks: number of the layer's block, and of all blocks."
    yield "        step, steps: optimizer step, and length of the run."
    whose = "as in RULES; ValueError for any other" if rules else "which decides nothing here"
    yield f"        name: qualified name of the layer, {whose}."
    yield "        tokens_per_step: tokens of an optimizer step."
    yield "        decay: step at which the learning rate begins to fall; None: it never falls."
    if recipe.schedule:
        yield "    Those that decide when a phase begins have no default."
    yield '    """'
    active = "[active]" if recipe.schedule else ""
    if recipe.schedule:
        yield f"    active = ({', '.join(map(_condition, recipe.schedule))},)"
    if rules:
        yield "    if name not in RULES:"
        yield "        raise ValueError("
        yield '            f"name {name!r}: rules select layers by name, and the model that this file was"'
        yield '            f" written for has no linear layer of that name; one is {next(iter(RULES))!r}"'
        yield "        )"
        yield "    if RULES[name] is not None:"
        yield "        chosen = BY_RULE[RULES[name]]"
        yield f"        return {'None if chosen is None else chosen[active]' if active else 'chosen'}"
    whole = "OWN[active]" if active else own[()]
    yield (
        f"    return {whole} if quantised(block, blocks) else None" if whole != "None" else "    return None"
    )
    yield ""
    yield ""
    named_only, given = ("*, name, ", "name=name, ") if rules else ("", "")
    yield f"def autocast(block, blocks, {needed.positional}, {named_only}**more):"
    yield '    """Return TE\'s context for a layer at a step; the arguments are those of `recipe`."""'
    yield f"    chosen = recipe(block, blocks, step, steps, {given}**more)"
    yield "    return te.autocast(enabled=chosen is not None, recipe=chosen)"


def _counted(counts: Layers) -> Iterator[str]:
    """Yield the lines that count the blocks at both ends which stay in high precision."""
    share = Fraction(repr(counts.last_fraction))
    last = str(counts.skip_last or "")
    if share:
        rounded_up = f"-(-{share.numerator} * blocks // {share.denominator})"
        rounded_up = f"max({last}, {rounded_up})" if last else rounded_up
        yield f"    last = {rounded_up}  # {share} of the blocks, rounded up"
        last = "last"
    first = f"{counts.skip_first} <= block" if counts.skip_first else "block" if last else "True"
    yield f"    return {first} < blocks - {last}" if last else f"    return {first}"


def _mapping(names: dict[tuple[bool, ...], str]) -> str:
    """Return the objects by active phases; the object itself of a recipe without phases."""
    if () in names:
        return names[()]
    return "{" + ", ".join(f"{active!r}: {name}" for active, name in names.items()) + "}"
