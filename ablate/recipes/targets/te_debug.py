"""YAML for Transformer Engine's debug tools: what of a recipe they can switch, and the same as a recipe.

The tools (nvdlfw-inspect) change a job without touching its code. They cannot quantise anything that the job
does not: they turn off quantisation of whole layers or of single products, and log statistics. So a recipe is
a base that Transformer Engine's own class computes, minus what is turned off:

    base NVFP4BlockScaling(...)        what the job's autocast is given; the file's first lines name it
    DisableQuantizationLayer           layers in high precision
    DisableQuantizationGEMM [wgrad]    products in high precision
    LogNvfp4TensorStats, LogFp8TensorStats

Sections exclude each other, since the tools refuse a layer that two of them select. Layers are selected by
regular expressions on their names.

Refused on the way in: FakeQuant, which rounds what it dequantises to bf16 before the product, and
PerTensorScaling. The facts are those of nvdlfw-inspect 0.2.2 and Transformer Engine 2.20.2.
"""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from itertools import combinations

from ablate.recipes.layers import LISTS, Layer
from ablate.recipes.presets import fp8_current, mxfp8, nvfp4
from ablate.recipes.recipe import DIRECTIONS, Products, Recipe
from ablate.recipes.targets.experts import unreached
from ablate.recipes.targets.megatron import standing_in
from ablate.recipes.targets.model import Lost, Model, confirmed, placed, skipped, unheld
from ablate.recipes.targets.stack_yaml import load
from ablate.recipes.te_import import recipe_of
from ablate.recipes.te_mapping import Builtin, recipe_refusals, te_recipe, variants

_TARGET = "Transformer Engine's debug tools"
_SPACE = "transformer_engine"
_LAYER = ("DisableQuantizationLayer", "DisableFP8Layer")
_GEMM = ("DisableQuantizationGEMM", "DisableFP8GEMM")
_LOGS = ("LogNvfp4TensorStats", "LogFp8TensorStats", "LogTensorStats", "DumpTensors")
"""Features that read tensors and change none."""
_READ = (_LAYER[0], _GEMM[0], *_LOGS)
_ROWWISE = {"activation": "fprop.x", "weight": "fprop.w", "gradient": "dgrad.g"}
"""Operand that the statistics of a tensor are about."""
_BLOCKS = rf"(?:^|\.)(?:{'|'.join(LISTS)})\."
_EVERY = ".*"
_WRAPPED = "which the debug tools wrap; what they then compute was not checked"


def write(recipe: Recipe, model: Model) -> str:
    """Return the configuration file; Lost for what the tools cannot switch."""
    reasons = [
        *unheld(recipe, model, _TARGET, rules=True),
        *unreached(
            recipe,
            model.layers,
            _TARGET,
            "name layers that are modules, so they cannot hold layer rules of such a model; write []"
            if recipe.layers.rules
            else "name layers that are modules; leave --model out",
        ),
    ]
    if recipe.layers.rules and not model.layers:
        reasons.append("layers.rules: the layers that they select are not known; give --model")
    reasons += [reason for reason in recipe_refusals(recipe) if not reason.startswith("weights.")]
    if not reasons and recipe.plain:
        reasons.append("fprop, dgrad, wgrad: nothing is quantised, so there is nothing to switch")
    if reasons:
        raise Lost(list(dict.fromkeys(reasons)))
    layers = model.layers or _numbered(recipe, model)
    assigned = {
        name: recipe.decided(decider) or Products()
        for name, decider in recipe.layers.deciders(layers).items()
    } or {"": recipe.products}
    base, off = _base([recipe.products, *assigned.values()])
    groups: dict[frozenset[str], list[str]] = {}
    for name, products in assigned.items():
        groups.setdefault(off[products], []).append(name)
    sections = [
        (gemms, _EVERY if len(groups) == 1 else _pattern(names, model))
        for gemms, names in groups.items()
        if gemms or model.log_every
    ]
    if not sections:
        raise Lost(["fprop, dgrad, wgrad: TE's recipe alone computes this; give --log-every to log"])
    text = "\n".join(_lines(recipe, model, base, sections)) + "\n"
    made = read(text, Recipe.of(base), model)
    checked = recipe if model.layers or model.depth is None else placed(recipe, assigned, layers)
    confirmed(checked, made, Model(model.label, layers=layers), f"{_TARGET}'s file")
    return text


def read(text: str, job: Recipe, model: Model) -> Recipe:
    """Return the recipe of a job whose layers a configuration file switches.

    Args:
        text: the file.
        job: recipe of the job without it.
        model: facts of the model; its layers, unless all patterns select every layer or number blocks.

    Raises:
        ValueError: it is no such file, or does what is not emulated.
    """
    sections = [
        (name, _selector(name, section.get("layers")), _switched_off(name, section))
        for name, section in load(text, "--te-debug").items()
        if isinstance(section, dict) and section.get("enabled")
    ]
    if not any(gemms for *_, gemms in sections):
        return job
    if any(products.backward_needs for products in variants(job)):
        raise ValueError(f"--te-debug: the job's backward pass needs a copy of the forward pass, {_WRAPPED}")
    everything = all(pattern == _EVERY for _, pattern, _ in sections)
    layers = model.layers or _stand_ins(sections, everything, model)
    assigned: dict[str, Products | None] = {}
    for name, decider in job.layers.deciders(layers).items():
        matching = [(section, gemms) for section, pattern, gemms in sections if re.search(pattern, name)]
        if len(matching) > 1:
            raise ValueError(f"--te-debug: {matching[0][0]} and {matching[1][0]} both select {name}")
        products = job.decided(decider)
        assigned[name] = products and _without(products, matching[0][1] if matching else frozenset())
    if everything and not model.layers:
        own = _without(job.products, sections[0][2])
        return job.model_copy(update={name: getattr(own, name) for name in DIRECTIONS["all"]})
    return placed(job, assigned, layers)


# --- out ------------------------------------------------------------------------------------------


def _numbered(recipe: Recipe, model: Model) -> tuple[Layer, ...]:
    """Return one layer a block, if counts leave some of them in high precision; else none."""
    first, last = skipped(recipe, model, _TARGET)
    if not first and not last:
        return ()
    if model.depth is None:
        raise Lost(["layers: the number of blocks is not known; give --blocks N or --model"])
    return _of_blocks(model.depth)


def _of_blocks(blocks: int) -> tuple[Layer, ...]:
    return tuple(Layer(f"layers.{block}.linear", block, frozenset()) for block in range(blocks))


def _base(wanted: Sequence[Products]) -> tuple[Products, dict[Products, frozenset[str]]]:
    """Return products of one of TE's classes, and of each wanted products the ones that must be turned off.

    Raises:
        Lost: TE's classes have no such base.
    """
    for products in wanted:
        if products.backward_needs:
            raise Lost([f"dgrad, wgrad: the backward pass needs {products.backward_needs}, {_WRAPPED}"])
    descriptions = [te_recipe(products) for products in wanted]
    own = [
        recipe_of(standing_in(each.name, dict(each.options))).products  # what TE's class stands for, not ours
        for each in descriptions
        if isinstance(each, Builtin)
    ]
    for base in (*own, *(preset().products for preset in (nvfp4, mxfp8, fp8_current))):
        off = {products: _turned_off(base, products) for products in wanted}
        found = {products: gemms for products, gemms in off.items() if gemms is not None}
        if len(found) == len(off):
            return base, found
    raise Lost(
        [
            "fprop, dgrad, wgrad: no class of Transformer Engine's becomes these products by turning off"
            " layers or whole products; use --to te"
        ]
    )


def _turned_off(base: Products, products: Products) -> frozenset[str] | None:
    """Return the products that must be turned off in `base`; None if that does not make them."""
    names = DIRECTIONS["all"]
    if products.plain:
        return frozenset(names)
    subsets = (frozenset(chosen) for size in range(3) for chosen in combinations(names, size))
    return next((gemms for gemms in subsets if _without(base, gemms) == products), None)


def _without(products: Products, gemms: frozenset[str]) -> Products:
    """Return products some of which run in high precision, on the original operands."""
    return products.model_copy(update={name: getattr(products, name).high_precision() for name in gemms})


def _pattern(names: Sequence[str], model: Model) -> str:
    """Return a regular expression that selects these layers alone."""
    if model.layers:
        return rf"(?:^|\.)(?:{'|'.join(re.escape(name) for name in names)})$"
    return rf"{_BLOCKS}(?:{'|'.join(name.split('.')[1] for name in names)})\."


def _lines(
    recipe: Recipe, model: Model, base: Products, sections: Sequence[tuple[frozenset[str], str]]
) -> Iterator[str]:
    description = te_recipe(base)
    assert isinstance(description, Builtin)
    options = ", ".join(f"{name}={value!r}" for name, value in description.options)
    yield f"# {model.label} for Transformer Engine's debug tools (nvdlfw-inspect 0.2, TE 2.20.2)."
    yield "# The job's autocast around the blocks must be given this recipe; `ablate recipe export --to te`"
    yield f"# writes it: {description.name}({options})"
    for number, (gemms, pattern) in enumerate(sections):
        yield f"section_{number}:"
        yield "  enabled: true"
        yield "  layers:"
        yield f"    layer_name_regex_pattern: {json.dumps(pattern)}"
        yield f"  {_SPACE}:"
        if len(gemms) == len(DIRECTIONS["all"]):
            yield f"    {_LAYER[0]}:"
            yield "      enabled: true"
            continue
        if gemms:
            yield f"    {_GEMM[0]}:"
            yield "      enabled: true"
            yield f"      gemms: [{', '.join(name for name in DIRECTIONS['all'] if name in gemms)}]"
        if model.log_every:
            yield from _statistics(_without(base, gemms), model.log_every)


def _statistics(products: Products, every: int) -> Iterator[str]:
    """Yield the features that log the quantisation error of the tensors that are quantised by rows."""
    for feature, four_bits in (("LogNvfp4TensorStats", True), ("LogFp8TensorStats", False)):
        tensors = [
            tensor
            for tensor, slot in _ROWWISE.items()
            if (quant := products.slot(slot)) and quant.four_bits == four_bits
        ]
        if tensors:
            yield f"    {feature}:"
            yield "      enabled: true"
            yield f"      tensors: [{', '.join(tensors)}]"
            yield '      stats: ["underflows%", mse]'
            yield f"      freq: {every}"


# --- in -------------------------------------------------------------------------------------------


def _selector(name: str, layers: object) -> str:
    """Return the regular expression by which a section selects layers."""
    if not isinstance(layers, Mapping):
        raise ValueError(f"--te-debug: {name}.layers is missing")
    numbers, types = layers.get("layer_numbers"), layers.get("layer_types")
    if "exact_layer_names" in layers:
        raise ValueError(
            f"--te-debug: {name}.layers.exact_layer_names: nvdlfw-inspect 0.2 fails for every layer that it"
            " does not name; use layer_name_regex_pattern"
        )
    if (pattern := layers.get("layer_name_regex_pattern")) is not None:
        try:
            re.compile(pattern)
        except (re.error, TypeError) as error:
            raise ValueError(f"--te-debug: {name}.layers.layer_name_regex_pattern: {error}") from None
        return str(pattern)
    if numbers is None and types is None:
        raise ValueError(f"--te-debug: {name}.layers: nothing selects a layer")
    of_types = "" if types is None or "all" in types else f"(?=.*(?:{'|'.join(map(re.escape, types))}))"
    of_numbers = "" if numbers is None or numbers == "all" else _number_pattern(name, numbers)
    return f"^{of_types}{of_numbers}" if of_types or of_numbers else _EVERY


def _number_pattern(name: str, numbers: object) -> str:
    """Return a regular expression for layers whose name has one of some numbers, and no other number."""
    if not isinstance(numbers, list):
        raise ValueError(f"--te-debug: {name}.layers.layer_numbers: a list of numbers and ranges 'n-m'")
    found: list[int] = []
    for entry in numbers:
        if entry == "all":
            return ""
        ends = [int(part) for part in str(entry).split("-") if part.isdecimal()]
        if not 1 <= len(ends) <= 2:
            raise ValueError(f"--te-debug: {name}.layers.layer_numbers {entry}: n or 'n-m'")
        found += range(ends[0], ends[-1] + 1)
    return rf"(?:[^\d]|fc\d)*(?<!\d)(?:{'|'.join(map(str, found))})(?:\D|(?<=fc)\d)*$"


def _switched_off(name: str, section: Mapping[str, object]) -> frozenset[str]:
    """Return the products that a section turns off; ValueError for features that are not emulated."""
    gemms: set[str] = set()
    for space, features in section.items():
        if space in ("enabled", "layers") or space in _LOGS:
            continue
        if space != _SPACE or not isinstance(features, Mapping):
            raise ValueError(f"--te-debug: {name}.{space}: no feature that is read here")
        for feature, options in features.items():
            where = f"{name}.{_SPACE}.{feature}"
            if not isinstance(options, Mapping):
                raise ValueError(f"--te-debug: {where}: an object with `enabled`")
            if not options.get("enabled") or feature in _LOGS:
                continue
            if feature in _LAYER:
                gemms |= {*DIRECTIONS["all"]}
            elif feature in _GEMM:
                listed = options.get("gemms") or [
                    each.get("gemm")
                    for each in options.get("gemms_struct") or ()
                    if isinstance(each, Mapping)
                ]
                if not listed or {*listed} - {*DIRECTIONS["all"]}:
                    raise ValueError(f"--te-debug: {where}.gemms {listed}: fprop, dgrad, wgrad")
                gemms |= {*listed}
            else:
                raise ValueError(f"--te-debug: {where}: not emulated; read are {', '.join(_READ)}")
    return frozenset(gemms)


def _stand_ins(
    sections: Sequence[tuple[str, str, frozenset[str]]], everything: bool, model: Model
) -> tuple[Layer, ...]:
    """Return one layer a block if the patterns look at nothing else; ValueError if names are needed."""
    if everything:
        return ()
    if model.depth is None or not all(
        pattern == _EVERY or pattern.startswith(_BLOCKS) for _, pattern, _ in sections
    ):
        raise ValueError(
            "--te-debug: it selects layers by name; give --model, or --blocks if it numbers them"
        )
    return _of_blocks(model.depth)
