"""Megatron's precision of single layers: the YAML of `--te-precision-config-file`, both ways.

Megatron-LM counts blocks in bf16 at both ends. Layers in between have a file of their own: `configs` name
recipes of Transformer Engine, and `matchers` give modules a config by a glob on the whole module path, the
first that matches.

    configs:  {high: {transformer_engine_config_type: TEQuantizationParams, training_recipe: {...}}}
    matchers: {rule_0: {type: glob, pattern: "*layers.3.*", config: high, enabled: true}}

A matcher without `enabled: true` counts for nothing. A config changes a layer inside the counted blocks only
with `override_nonquantized_autocast`. The facts are those of megatron-core 0.16.1 to 0.19.1. Its module paths
number the blocks of one pipeline stage.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence

from ruamel.yaml import YAML
from ruamel.yaml.error import YAMLError

from ablate.recipes.layers import Layer, Match, select
from ablate.recipes.recipe import Products, Recipe, Rule
from ablate.recipes.targets.model import Lost

_TYPE = "transformer_engine_config_type"
_PARAMS = "TEQuantizationParams"
_EXPERTS = ("mlp.experts.linear_fc1", "mlp.experts.linear_fc2")
"""Modules of all experts of a block (`TEGroupedMLP`)."""
_MODULES = ("self_attention.linear_qkv", "self_attention.linear_proj", "mlp.linear_fc1", "mlp.linear_fc2")
_TRANSFORMERS = {
    "self_attention.linear_qkv": ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attention.linear_proj": ("self_attn.o_proj",),
    "mlp.linear_fc1": ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.linear_fc2": ("mlp.down_proj",),
}
"""Layers of a transformers block that each of Megatron's modules computes."""
_BLOCK_GLOB = re.compile(r"\*layers\.(\d+)\.\*")
_FIELDS: Mapping[str, object] = {
    "fp8_quantization_recipe": None,
    "fp4_quantization_recipe": None,
    "custom_recipe_factory": None,
    "fp8_format": "e4m3",
    "override_quantized_autocast": True,
    "override_nonquantized_autocast": False,
    "tp_only_amax_red": False,
    "fp8_param": False,
    "fp4_param": False,
}
"""Fields of a recipe in the file, with their defaults. The last two, new in 0.19, keep quantised weights
between steps, which changes no number.
"""

ToFields = Callable[[Products], dict[str, object]]
"""Returns the fields that name a recipe of Transformer Engine; raises Lost."""
FromFields = Callable[[Mapping[str, object]], Products]
"""The inverse; raises ValueError."""


def modules(blocks: int, experts: bool = False) -> tuple[Layer, ...]:
    """Return the linear layers of a Megatron model, some of whose blocks may have experts, by module path."""
    return tuple(
        Layer(f"decoder.layers.{block}.{name}", block, frozenset())
        for block in range(blocks)
        for name in (*_MODULES, *(_EXPERTS if experts else ()))
    )


def translated(recipe: Recipe, layers: Sequence[Layer]) -> Recipe:
    """Return the recipe with Megatron's names in the rules that leave layers in high precision.

    A rule stays as it is if it names blocks alone or selects none of the layers, and so do all rules of a
    model whose blocks have other parts than _TRANSFORMERS. A rule that quantises in another way stays too: a
    module's one scale is not those of its parts. `layers` is empty if they are not known. Lost if a rule
    selects some parts of a module and not others.
    """
    parts = {part: module for module, each in _TRANSFORMERS.items() for part in each}
    modules = {
        layer.name: module
        for layer in layers
        for part, module in parts.items()
        if layer.name.endswith(f".{part}")
    }
    blocks = {layer.block for layer in layers}
    if not layers or not len(modules) == len(layers) == len(parts) * len(blocks):
        return recipe
    rules: list[Rule] = []
    for number, rule in enumerate(recipe.layers.rules):
        chosen = select(rule.match, layers).layers
        quantised = rule.use is not None and not rule.use.plain  # `use: bf16` leaves in high precision, too
        if quantised or not chosen or {*rule.match.fields} == {"blocks"}:
            rules.append(rule)
            continue
        counts = Counter((modules[layer.name], layer.block) for layer in chosen)
        for module, own in _TRANSFORMERS.items():
            found = [block for block in sorted(blocks) if counts[module, block]]
            if any(counts[module, block] != len(own) for block in found):
                why = f"Megatron has one {module} for {', '.join(own)}; select all of them"
                raise Lost(f"layers.rules.{number} {rule.match}: {why}")
            every = len(found) == len(blocks)
            names = ["*"] if every else [f"decoder.layers.{block}" for block in found]
            rules += [Rule(match=Match(name=f"{name}.{module}"), use=None) for name in names]
    return recipe.changed({"layers.rules": tuple(rules)})


def written(recipe: Recipe, layers: tuple[Layer, ...], to_fields: ToFields) -> str:
    """Return the file for a recipe's rules of `modules`; Lost for each rule that it cannot say."""
    reasons: list[str] = []
    configs: dict[str, dict[str, object]] = {}
    matchers: list[tuple[str, str]] = []
    for number, rule in enumerate(recipe.layers.rules):
        where = f"layers.rules.{number}"
        try:
            patterns = [*_patterns(rule.match, layers)]
            fields = {} if rule.use is None or rule.use.plain else to_fields(rule.use)
        except Lost as lost:
            reasons += [f"{where}.{reason}" for reason in lost.reasons]
            continue
        name = next((key for key, value in configs.items() if value == fields), f"config_{len(configs)}")
        configs[name] = fields
        matchers += [(pattern, name) for pattern in patterns]
    if reasons:
        raise Lost(*reasons)
    text = "configs:\n"
    for name, fields in configs.items():
        inside = fields | {"override_quantized_autocast": "true"}
        inside |= {"override_nonquantized_autocast": "true" if fields else "false"}
        text += f"  {name}:\n    {_TYPE}: {_PARAMS}\n    training_recipe:\n"
        text += "".join(f"      {key}: {value}\n" for key, value in inside.items())
    text += "matchers:\n"
    for number, (pattern, name) in enumerate(matchers):
        text += f'  matcher_{number}:\n    type: glob\n    pattern: "{pattern}"\n'
        text += f"    config: {name}\n    enabled: true\n"
    return text


def _patterns(match: Match, layers: tuple[Layer, ...]) -> Iterator[str]:
    """Yield globs on module paths that select what a rule does; Lost if there are none."""
    if match.within is not None:
        raise Lost(
            f"match within {match.within}: Megatron matches names, not classes; write its names, such as"
            " --set 'recipe.layers.rules=[{match: {name: \"*.self_attention.*\"}}]' for attention, or"
            ' "*.experts.*" for experts'
        )
    if not (selected := select(match, layers).layers):
        example = layers[-1].name if layers else "decoder.layers.0.mlp.linear_fc1"
        raise Lost(
            f"match {match}: selects none of Megatron's layers, whose names are such as {example!r};"
            " for those of experts give --model"
        )
    if match.name is not None and any(character in match.name for character in "\"'\\\n"):
        raise Lost(f"match {match}: a quoting character in a name")
    if match.blocks is None:
        yield str(match.name)
        return
    for block in sorted({layer.block for layer in selected}):
        if match.name is None:
            yield f"*layers.{block}.*"
        else:  # both fields must hold, and a matcher has one glob: the paths that both select
            yield from (layer.name for layer in selected if layer.block == block)


def rules_of(text: str, recipe: Recipe, from_fields: FromFields) -> tuple[Rule, ...]:
    """Return the layer rules that a file stands for in a job of this recipe, with its counts of blocks;
    ValueError if it is no such file, or asks for something that is not emulated.
    """
    loader = YAML(typ="safe", pure=True)
    loader.version = (1, 1)  # as PyYAML reads: `on` and `yes` are true
    try:
        data = loader.load(text)
    except (YAMLError, ValueError, RecursionError) as error:  # its constructors of values raise ValueError
        raise ValueError(f"--te-precision-config-file: no YAML: {' '.join(str(error).split())}") from None
    if not isinstance(data, dict):
        raise ValueError("--te-precision-config-file: a mapping of sections is expected at its top")
    configs, matchers = data.get("configs") or {}, data.get("matchers") or {}
    if not isinstance(configs, Mapping) or not isinstance(matchers, Mapping):
        raise ValueError("--te-precision-config-file: `configs` and `matchers` are mappings")
    rules: list[Rule] = []
    for name, matcher in matchers.items():
        rules += _rules(f"matchers.{name}", matcher, configs, recipe, from_fields)
    return tuple(rules)


def _rules(
    where: str,
    matcher: Mapping[str, object],
    configs: Mapping[str, Mapping[str, object]],
    recipe: Recipe,
    from_fields: FromFields,
) -> Iterator[Rule]:
    """Yield the rules of one matcher: of the blocks that counts leave in bf16, then of all others."""
    if not isinstance(matcher, Mapping) or not matcher.get("enabled", False):
        return
    if matcher.get("type") != "glob":
        raise ValueError(f"{where}.type {matcher.get('type')}: Megatron matches by glob alone")
    config = configs.get(str(matcher.get("config")))
    if config is None or matcher.get("pattern") is None:
        raise ValueError(f"{where}: its pattern or its config {matcher.get('config')} is missing")
    fields = _fields(f"configs.{matcher['config']}", config)
    quantised = fields["fp8_quantization_recipe"] or fields["fp4_quantization_recipe"]
    use = from_fields(fields) if quantised else None
    pattern = str(matcher["pattern"])
    block = _BLOCK_GLOB.fullmatch(pattern)
    match = Match(blocks=f"{block[1]}-{block[1]}") if block else Match(name=pattern)
    counted = use if fields["override_nonquantized_autocast"] else None
    if recipe.products.plain:  # the job's own context is bf16 everywhere
        yield Rule(match=match, use=counted)
        return
    between = use if fields["override_quantized_autocast"] else recipe.products
    if counted != between:
        yield from _at_the_ends(match, counted, recipe)
    yield Rule(match=match, use=between)


def _at_the_ends(match: Match, use: Products | None, recipe: Recipe) -> Iterator[Rule]:
    """Yield rules for the counted blocks that a matcher's modules lie in."""
    for end, count in (("first", recipe.layers.skip_first), ("last", recipe.layers.skip_last)):
        if not count:
            continue
        if match.blocks is not None and end == "last":
            raise ValueError(
                f"matchers: blocks {match.blocks} may be one of the last {count} in bf16;"
                " write override_nonquantized_autocast: true, or leave out one of them"
            )
        if match.blocks is not None:
            number = int(match.blocks.partition("-")[0])
            if number < count:
                yield Rule(match=match, use=use)
            continue
        yield Rule(match=Match(blocks=f"{end}:{count}", name=match.name), use=use)


def _fields(where: str, config: Mapping[str, object]) -> dict[str, object]:
    """Return all fields of a config's training recipe; ValueError for what is not emulated."""
    if not isinstance(config, Mapping) or config.get(_TYPE) != _PARAMS:
        raise ValueError(f"{where}: {_TYPE} {_PARAMS} is missing")
    training, evaluation = config.get("training_recipe"), config.get("evaluation_recipe")
    if not isinstance(training, Mapping):
        raise ValueError(f"{where}: training_recipe is missing")
    if unknown := [key for key in config if key not in (_TYPE, "training_recipe", "evaluation_recipe")]:
        raise ValueError(f"{where}.{unknown[0]}: no field that Megatron reads")
    if evaluation is not None and (
        not isinstance(evaluation, Mapping) or {**_FIELDS, **evaluation} != {**_FIELDS, **training}
    ):
        raise ValueError(
            f"{where}.evaluation_recipe: it evaluates by another recipe than it trains by; `evaluate` of a"
            " workload does that, a recipe does not"
        )
    for key, value in training.items():
        if key not in _FIELDS:
            raise ValueError(f"{where}.training_recipe.{key}: no field that Megatron reads")
        if key in ("custom_recipe_factory", "tp_only_amax_red") and value:
            raise ValueError(f"{where}.training_recipe.{key} {value}: not emulated; leave it out")
    fields = {**_FIELDS, **dict(training)}
    if fields["fp8_quantization_recipe"] and fields["fp4_quantization_recipe"]:
        raise ValueError(f"{where}.training_recipe: fp8 and fp4 exclude each other")
    return fields
