"""JSON of fouroversix's ModelQuantizationConfig, and that JSON as a recipe.

fouroversix (the package of the authors of Four Over Six) describes a layer by three tensors: activation,
weight and gradient, each with a data type, a rule for block scales and a rounding. Each tensor is quantised
in the same way wherever it is an operand, wgrad is always rotated by 16 with Transformer Engine's signs, and
no product of a converted layer can stay in high precision. Layers are chosen by their exact names.

    {"activation_scale_rule": "static_6", "weight_scale_2d": true, "gradient_round_style": "stochastic", ...}

A recipe is written by the nearest such configuration, which is then read back: every field that differs is a
reason to refuse. The facts are those of fouroversix 1.0.5.

Refused: IF4, whose INT4 codes fouroversix multiplies by 6/7 in fp16; NVFP6, which only its Triton kernels
have; `static_4` of NVFP4, whose outer scale is 4 * 448 over the amax; and a choice between 4 and 6 of
gradients that are rounded stochastically. fouroversix divides a block's amax by 6 before it multiplies by the
outer scale, the order of Transformer Engine up to 2.14: E4M3 rounds exact ties of block scales otherwise.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from functools import lru_cache
from itertools import groupby, product
from typing import NamedTuple

from ablate.files import Json
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Range, Select
from ablate.recipes.changes import as_data, as_word, changes
from ablate.recipes.layers import Match, block_name
from ablate.recipes.recipe import Dgrad, Fprop, Layers, Products, Recipe, Rule, Wgrad
from ablate.recipes.targets.experts import unreached
from ablate.recipes.targets.model import Lost, Model, confirmed, unheld

_MXFP4 = Quant(block="1x32", scale=BlockScale(format="e8m0", rounding="ceil"), outer=None)
_SQUARE = {"1x16": "16x16", "1x32": "32x32"}


def _chosen(criterion: str) -> Quant:
    return Quant(select=Select(among="scales", criterion=criterion), outer=Outer(bound=256.0))


OPERANDS: Mapping[str, Mapping[str, Quant]] = {
    "nvfp4": {
        "static_6": Quant(),
        "mse": _chosen("mse"),
        "mae": _chosen("mae"),
        "abs_max": _chosen("absmax"),
    },
    "mxfp4": {"static_6": _MXFP4, "static_4": _MXFP4.changed(range=Range(map_to=4.0))},
    "nvint4": {"static_6": Quant(element="int4")},
}
"""Quantiser of an operand by data type and scale rule, rounded to nearest in blocks of one row."""
_BITS: Mapping[Json, int] = {"pytorch": 24, "triton": 8, None: 8}
"""Random bits of stochastic rounding by quantisation backend: PyTorch draws a number of fp32, the kernel has
the GPU's instruction."""
_TENSORS = ("activation", "weight", "gradient")
_STYLES = ("nearest", "stochastic")


class Field(NamedTuple):
    """Field of ModuleQuantizationConfig."""

    default: Json
    values: tuple[Json, ...] = ()
    """Values that are read; empty if OPERANDS has them."""
    why: str = ""
    """Reason why no others are read."""


FIELDS: Mapping[str, Field] = {
    **{f"{tensor}_dtype": Field(None) for tensor in _TENSORS},
    **{f"{tensor}_scale_rule": Field(None) for tensor in _TENSORS},
    **{
        f"{tensor}_round_style": Field(style, _STYLES, "nearest or stochastic")
        for tensor, style in zip(_TENSORS, ("nearest", "nearest", "stochastic"), strict=True)
    },
    "dtype": Field("nvfp4"),
    "scale_rule": Field("mse"),
    "weight_scale_2d": Field(False, (False, True), "true or false"),
    "keep_master_weights": Field(
        False, (True,), "without master weights fouroversix has no backward pass; write true"
    ),
    "quantize_backend": Field(
        None, (*_BITS,), "null, triton or pytorch; the others have no stochastic rounding of their own"
    ),
    "matmul_backend": Field(None, (None, "pytorch", "triton", "cutlass"), "null, pytorch, triton or cutlass"),
    "output_dtype": Field("bfloat16", ("bfloat16",), "products in bfloat16 are emulated"),
}
_DEFAULTS: Mapping[str, Json] = {name: field.default for name, field in FIELDS.items()}
_data = lru_cache(maxsize=256)(as_data)
_OF_MODELS: Mapping[str, Json] = {"module_config_overrides": {}, "modules_to_not_convert": ["lm_head"]}
_WHY = "fouroversix's nearest configuration has"


def write(recipe: Recipe, model: Model) -> str:
    """Return JSON that `ModelQuantizationConfig(**json.load(file))` takes; Lost for what it cannot say."""
    counts = recipe.layers.model_dump(exclude={"rules"}, exclude_defaults=True)
    reasons = [
        *unheld(recipe, model, "fouroversix", rules=True),
        *unreached(recipe, model.layers, "fouroversix", "replaces nn.Linear alone"),
    ]
    if recipe.layers.rules and not model.layers:
        reasons.append("layers.rules: the layers that they select are not known; give --model")
    if counts and not model.layers:
        reasons += [
            f"layers.{name} {value:g}: fouroversix names the layers that it leaves; give --model"
            for name, value in counts.items()
        ]
    options, differences = _nearest(recipe.products)
    if reasons:
        raise Lost(*reasons, *differences)
    deciders = recipe.layers.deciders(model.layers) or {"": "own"}
    overrides: dict[str, Json] = {}
    kept: list[Json] = ["lm_head"]
    for name, decider in deciders.items():
        products = recipe.decided(decider) or Products()
        if products == recipe.products:
            reasons = [*differences, *reasons]
        elif products.plain:
            kept.append(name)
        else:
            override, more = _nearest(products)
            overrides[name] = override
            reasons += [f"layers.rules.{decider}.use.{reason}" for reason in more]
    if reasons:
        raise Lost(*reasons)
    of_model = {"module_config_overrides": overrides, "modules_to_not_convert": kept}
    text = json.dumps(options | of_model, indent=2) + "\n"
    confirmed(recipe, read(text), model, "fouroversix's file")
    return text


def read(text: str) -> Recipe:
    """Return the recipe that a ModelQuantizationConfig stands for, alone or as `quantization_config` of a
    model's config.json, or a config.json with the `layer_precision_configs` of the authors' training scripts;
    ValueError if it is no such JSON, or asks for something that is not emulated.
    """
    try:
        data = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"it is no JSON: {error}") from None
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    if "layer_precision_configs" in data:
        return _by_block(data["layer_precision_configs"])
    if "quantization_config" in data:
        data = data["quantization_config"]
        if not isinstance(data, dict) or data.get("quant_method", "fouroversix") != "fouroversix":
            raise ValueError("quantization_config: its quant_method is not fouroversix")
    data = {key: value for key, value in data.items() if key != "quant_method"}
    models = {key: data.pop(key, usual) for key, usual in _OF_MODELS.items()}
    products = _products(data, "")
    kept, overrides = models["modules_to_not_convert"] or [], models["module_config_overrides"] or {}
    if not isinstance(kept, list) or not isinstance(overrides, dict):
        raise ValueError("modules_to_not_convert is a list, module_config_overrides an object")
    rules = [Rule(match=_exactly(name), use=None) for name in map(str, kept) if block_name(f"{name}.")]
    for name, override in overrides.items():
        if not isinstance(override, dict):
            raise ValueError(f"module_config_overrides.{name}: an object with the fields of a module")
        rules.append(Rule(match=_exactly(name), use=_products(override, f"module_config_overrides.{name}.")))
    return Recipe.of(products, layers=Layers(rules=tuple(rules)))


def _exactly(name: str) -> Match:
    if set(name) & set("*?["):
        raise ValueError(f"{name}: fouroversix takes names literally, and *, ? and [ are wildcards here")
    return Match(name=name)


# --- one configuration ----------------------------------------------------------------------------


def _nearest(products: Products) -> tuple[dict[str, Json], list[str]]:
    """Return the configuration with the fewest fields that differ from these products, and those fields."""
    ours, found = as_data(products), []
    quants = (products.fprop.x, products.fprop.w, products.dgrad.g)
    for dtype, backend in product(OPERANDS, _BITS):
        options = {**_DEFAULTS, "dtype": dtype, "quantize_backend": backend, "keep_master_weights": True}
        for tensor, quant in zip(_TENSORS, quants, strict=True):
            options |= _nearest_operand(tensor, quant, options)
        options["scale_rule"] = options["activation_scale_rule"]
        reasons = [
            f"{path} {as_word(value)}: {_WHY} {as_word(other)}"
            for path, value, other in changes(ours, as_data(_products(options, "")))
        ]
        idle = backend is not None and "stochastic" not in options.values()
        found.append((len(reasons), idle, options, reasons))
    *_, options, reasons = min(found, key=lambda each: each[:2])
    return options, reasons


def _nearest_operand(tensor: str, quant: Quant | None, options: Mapping[str, Json]) -> dict[str, Json]:
    """Return the fields of one tensor that differ least from a quantiser."""
    dtype = str(options["dtype"])
    ours: Mapping[str, Json] = {} if quant is None else _data(quant)
    fields: dict[str, Sequence[Json]] = {
        f"{tensor}_dtype": [dtype],
        f"{tensor}_scale_rule": [*OPERANDS[dtype]],
        f"{tensor}_round_style": _STYLES,
    }
    fields |= {"weight_scale_2d": (False, True)} if tensor == "weight" else {}
    found = []
    for values in product(*fields.values()):
        chosen = dict(zip(fields, values, strict=True))
        with suppress(ValueError):  # not emulated
            made = _operand(tensor, {**options, **chosen}, "")
            found.append((len([*changes(ours, _data(made))]), chosen))
    return min(found, key=lambda each: each[0])[1]


def _products(data: Mapping[str, Json], where: str) -> Products:
    """Return the products that a module's configuration stands for; ValueError if they are not emulated."""
    unknown = [f"{where}{key} {data[key]}" for key in data if key not in _DEFAULTS]
    if unknown:
        raise ValueError(f"{', '.join(unknown)}: no field of fouroversix 1.0.5 that has a counterpart here")
    options = {**_DEFAULTS, **data}
    for name, field in FIELDS.items():
        if field.values and options[name] not in field.values:
            raise ValueError(f"{where}{name} {as_word(options[name])}: {field.why}")
    x, w, g = (_operand(tensor, options, where) for tensor in _TENSORS)
    return Products(fprop=Fprop(x=x, w=w), dgrad=Dgrad(g=g, w=w), wgrad=Wgrad(g=g, x=x, hadamard=Hadamard()))


def _operand(tensor: str, options: Mapping[str, Json], where: str) -> Quant:
    dtype = str(options[f"{tensor}_dtype"] or options["dtype"])
    rule = str(options[f"{tensor}_scale_rule"] or options["scale_rule"])
    if dtype not in OPERANDS:
        raise ValueError(f"{where}{tensor}_dtype {dtype}: emulated are {', '.join(OPERANDS)}")
    if dtype != (options["activation_dtype"] or options["dtype"]):
        raise ValueError(f"{where}{tensor}_dtype {dtype}: fouroversix multiplies two operands of one type")
    if rule not in OPERANDS[dtype]:
        rules = ", ".join(OPERANDS[dtype])
        raise ValueError(f"{where}{tensor}_scale_rule {rule} of {dtype}: emulated are {rules}")
    quant = OPERANDS[dtype][rule]
    update: dict[str, object] = {}
    if options[f"{tensor}_round_style"] == "stochastic":
        if quant.select:
            raise ValueError(
                f"{where}{tensor}_scale_rule {rule} with {tensor}_round_style stochastic: a choice by error"
                f" would bias the rounding, and is not emulated; write {tensor}_scale_rule static_6"
            )
        update = {"rounding": "stochastic", "bits": _BITS[options["quantize_backend"]]}
    if tensor == "weight" and options["weight_scale_2d"]:
        update["block"] = _SQUARE[str(quant.block)]
    return quant.changed(**update)


# --- the authors' training scripts ----------------------------------------------------------------


def _by_block(entries: Json) -> Recipe:
    """Return the recipe of `layer_precision_configs`: one entry for the next `repeats` blocks each."""
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise ValueError("layer_precision_configs is a list of objects")
    blocks = [*_blocks(entries)]
    distinct = list(dict.fromkeys(products for products in blocks if products is not None))
    if not distinct:
        return Recipe()
    own = max(distinct, key=blocks.count)
    first = next(number for number, products in enumerate(blocks) if products is not None)
    last = next(number for number, products in enumerate(reversed(blocks)) if products is not None)
    rules, start = [], 0
    for products, same in groupby(blocks):
        end = start + len([*same])
        if products != own and (products is not None or (start > 0 and end < len(blocks))):
            rules.append(Rule(match=Match(blocks=f"{start}-{end - 1}"), use=products))
        start = end
    return Recipe.of(own, layers=Layers(skip_first=first, skip_last=last, rules=tuple(rules)))


def _blocks(entries: Sequence[Json]) -> Iterator[Products | None]:
    for number, entry in enumerate(entries):
        assert isinstance(entry, dict)
        where = f"layer_precision_configs.{number}."
        options = {key: value for key, value in entry.items() if key != "repeats"}
        repeats = entry.get("repeats", 1)
        if not isinstance(repeats, int) or repeats < 0:
            raise ValueError(f"{where}repeats {repeats}: a number of blocks")
        products = None
        if options:
            if "dtype" not in options or "weight_scale_2d" not in options:
                raise ValueError(
                    f"{where}dtype and weight_scale_2d: the training script has defaults of its own, which"
                    " are not in the package; write both"
                )
            products = _products({**options, "keep_master_weights": True}, where)
        yield from [products] * repeats
