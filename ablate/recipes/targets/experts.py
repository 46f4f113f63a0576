"""Fields of a recipe about mixtures of experts that a target cannot hold, and models whose experts it cannot
reach.

Transformer Engine's GroupedLinear, and Megatron-LM's experts that are made of it, quantise each expert's
tokens and weight by scales of their own, blocks and rotations inside of an expert, as the emulator does. A
target that replaces nn.Linear alone leaves packed experts in bf16.

| field            | Transformer Engine 2.20.2 | megatron-core 0.16.1 to 0.19.1                       |
|------------------|---------------------------|------------------------------------------------------|
| `padding`        | zeros                     | zeros, or `routed`: 128 (FP4), 32 (MXFP8), 16 (FP8)  |
| `gate_up`        | as the model is built     | fused (`linear_fc1`)                                 |
| `rounding_state` | the kernel's              | the kernel's                                         |

Read in Transformer Engine's `module/grouped_linear.py`, in Megatron's `moe_utils.pad_routing_map`,
`get_align_size_for_quantization` and `TEGroupedMLP`. torchtitan 0.3.0 converts linear layers alone to NVFP4;
its NVFP4GroupedExpertsConverter is a proposal (pytorch/torchtitan#4821).
"""

from collections.abc import Iterator, Mapping, Sequence

from ablate.recipes.experts import Experts
from ablate.recipes.layers import Layer, select
from ablate.recipes.recipe import Products, Recipe
from ablate.recipes.te_mapping import Builtin, families, refusals, te_recipe, variants


def has_experts(layers: Sequence[Layer]) -> bool:
    """Return True if some of a model's layers are matrices of experts that it packs into one tensor."""
    return any("Expert" in layer.classes for layer in layers)


def multiple(products: Products) -> int:
    """Return the number whose multiples training stacks pad an expert's tokens to:
    `get_align_size_for_quantization` of megatron-core 0.16.1 to 0.19.1, and of Transformer Engine 2.20.2 for
    its own recipes.
    """
    used = families([products])
    return 128 if "nvfp4" in used else 32 if "mxfp8" in used else 16


_UNHELD = {
    "padding": "{target} gets no such setting; write zeros",
    "gate_up": "in {target} the model decides it, and one matrix is usual; write fused",
    "rounding_state": "{target} leaves random words to its kernels; write own",
    "routing": "{target} does not replay a router's choices; write free",
}
"""Reasons why no target holds another value than the usual one, by field."""


def unheld_experts(recipe: Recipe, target: str, routed: bool) -> Iterator[str]:
    """Yield the fields of `experts` that a target cannot hold; `routed` if it pads by Megatron's multiple."""
    for name, why in _UNHELD.items():
        value = getattr(recipe.experts, name)
        if value != getattr(Experts(), name) and not (routed and name == "padding"):
            yield f"experts.{name} {value}: {why.format(target=target)}"


def rules_for_one(recipe: Recipe, layers: Sequence[Layer], target: str) -> Iterator[str]:
    """Yield a reason for each layer rule that selects some experts of a module and not others; if the layers
    are not known, the rule's glob decides.
    """
    for number, rule in enumerate(recipe.layers.rules):
        if layers:
            split = _divides(layers, {layer.name for layer in select(rule.match, layers).layers})
        else:
            after = (rule.match.name or "").partition("experts.")[2]
            split = after[:1].isdigit() or after[:1] == "["
        if split:
            why = f"{target} has one module for all experts of a block, and the rule selects some of them"
            yield f"layers.rules.{number} {rule.match}: {why}; select all, as by '*.experts.*'"


def _divides(layers: Sequence[Layer], selected: set[str]) -> bool:
    """Return True if the selected layers are some, but not all, experts of a module."""
    stacks: dict[tuple[str, str], list[bool]] = {}
    for layer in layers:
        if "Expert" in layer.classes:
            stack, _, part = layer.name.rsplit(".", 2)
            stacks.setdefault((stack, part), []).append(layer.name in selected)
    return any(any(chosen) and not all(chosen) for chosen in stacks.values())


def expert_refusals(recipe: Recipe, layers: Sequence[Layer]) -> Iterator[str]:
    """Yield every reason why the engine `transformer_engine` cannot compute a model's experts by a recipe
    that it can compute in other layers.
    """
    if recipe.experts.rounding_state != "own":
        yield (
            f"experts.rounding_state {recipe.experts.rounding_state}: Transformer Engine's kernels decide"
            " which experts share random words; write own"
        )
    if "fp8_delayed" in families(variants(recipe)):
        yield (
            "outer.statistic delayed: the engine keeps no amax histories for te.GroupedLinear, which"
            " multiplies experts; use amax"
        )
    yield from rules_for_one(recipe, layers, "Transformer Engine")


def unreached(recipe: Recipe, layers: Sequence[Layer], target: str, why: str) -> Iterator[str]:
    """Yield the reason why a target leaves a model's experts in high precision, if any are to be quantised;
    `why` says what it converts instead.
    """
    if first := quantised_expert(recipe, layers):
        yield f"layers {first}: the model packs its experts' weights into one tensor, and {target} {why}"


def quantised_expert(recipe: Recipe, layers: Sequence[Layer]) -> str | None:
    """Return the name of the first matrix of an expert that a recipe quantises; None if there is none."""
    experts = {layer.name for layer in layers if "Expert" in layer.classes}
    for name, decider in recipe.layers.deciders(layers).items() if experts else ():
        use = recipe.decided(decider)
        if name in experts and use is not None and not use.plain:
            return name
    return None


FUSED = "NVTE_GROUPED_LINEAR_USE_FUSED_GROUPED_GEMM"
SWITCHES = {
    "NVTE_GROUPED_LINEAR_SINGLE_PARAM": "lets te.GroupedLinear keep all experts' weights in one parameter",
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP": "lets te.ops fuse a grouped MLP's activation with its casts on SM 10.x",
    "NVTE_CUTEDSL_FUSED_GROUPED_MLP_FC1_GLU_RHT_AMAX_TMEM": "chooses where that MLP takes the rotated amax",
    "NVTE_DISABLE_CUTEDSL_WGRAD_FUSED_GROUPED_MLP": "takes wgrad out of that fusion",
}
"""Effects of Transformer Engine 2.20.2's other variables about grouped products."""


def grouped_switches(environment: Mapping[str, str], recipe: Recipe) -> Iterator[str]:
    """Yield a sentence for each of Transformer Engine's variables about grouped products that is set.

    The paths quantise each expert alone, so that scales are the same; random words differ. The conditions are
    those of `is_module_grouped_tensor_path_supported` and `GroupedLinear`, Transformer Engine 2.20.2.
    """
    if (value := environment.get(FUSED)) is not None:
        yield f"{FUSED}={value}: te.GroupedLinear {_path(value, recipe.products)}"
    for name, effect in SWITCHES.items():
        if environment.get(name, "0") != "0":
            yield f"{name}={environment[name]} {effect}"


def _path(value: str, products: Products) -> str:
    """Return which of GroupedLinear's paths a value of FUSED puts in force for a recipe."""
    loop = "quantises and multiplies expert by expert"
    if not value.strip().lstrip("-").isdecimal():
        return "does not start: the variable must be an integer"
    if not int(value):
        return loop
    if products.plain:
        return "multiplies all experts at once, in high precision, on SM 9.0 to 11.0 with cuBLASLt 13.3"
    description = None if next(refusals(products), None) else te_recipe(products)
    if not isinstance(description, Builtin):
        return f"{loop} all the same: the recipe is not one of Transformer Engine's classes"
    options = dict(description.options)
    reasons = {
        "backward_override": f"backward_override is {options['backward_override']}",
        "disable_rht": "NVFP4 needs its rotation for it",
        "row_scaled_activation": "it has no scales by rows",
    }
    for option, why in reasons.items():
        if options.get(option):
            return f"{loop} all the same: {why}"
    return "multiplies all experts at once on SM 10.0 to 11.0 with cuBLASLt 13.3, elsewhere expert by expert"
