"""Convert a small model of every family of `transformers` that has experts, and write what is reached.

    python benchmarks/expert_families.py [--again] [FAMILY ...]     # 10 minutes for all; rows are kept

Families are those whose modeling file uses `use_experts_implementation`, which describes the layout of packed
experts, and those of OUTSIDE, whose experts have another form. For each:

- its text model of four layers, width 64 and four experts runs forward and backward in bf16, unconverted and
  converted with the recipe `bf16`: loss and every gradient must have equal bits, with the default
  implementation of its experts and with `eager`;
- converted with `nvfp4`, it runs a step whose loss and gradients must be finite. Every converted layer that
  has a gradient must have been called: a model may multiply by a layer's weight itself;
- the same model as large as its configuration class has it, on the meta device without weights, is divided
  into the weights of nn.Linear that are converted, those of experts, and what is left, with the reason.

expert_families.json has a row a family; docs/reference/families.md is made from it.
"""

import argparse
import importlib
import inspect
import json
import re
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ablate
from ablate.engines import experts
from ablate.engines.blocks import block_finder, find_blocks, layer_table
from ablate.engines.exempt import kept_in_fp32
from ablate.engines.selection import quantisable
from ablate.files import write
from ablate.numerics.product import multiplying
from ablate.training.conversion import Conversion
from ablate.training.models import quietly

with quietly():
    from transformers import AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

ROWS = Path(__file__).with_suffix(".json")
PAGE = Path(__file__).parents[1] / "docs" / "reference" / "families.md"
OUTSIDE = {
    "dbrx": "stacks of `DbrxExpertGLU`, of two dimensions",
    "doge": "rows of embeddings, looked up for each token",
    "jetmoe": "`JetMoeParallelExperts`, a stack for each product",
    "llama4": "`Llama4TextExperts`, each of which receives all tokens",
    "longcat_flash": "`LongcatFlashExperts`, some of which compute nothing",
    "nllb_moe": "a dictionary of modules of nn.Linear",
    "step3p7": "`Step3p7Experts`, packed without a description of its layout",
    "switch_transformers": "a dictionary of modules of nn.Linear",
}
"""Families with experts of another form, by what they are."""
FP32 = {
    "openai_privacy_filter": "computes its experts in fp32",
    "inkling2_loop": "adds its experts' outputs in fp32",
}
"""Families whose `eager` differs, and why."""
TOKENS, VOCAB = 64, 128
EQUAL = "equal"

SIZES = {
    VOCAB: "vocab_size vocab_size_per_layer_input",
    96: "intermediate_size dense_intermediate_size intermediate_size_mlp ffn_hidden_size",
    64: "hidden_size d_model max_position_embeddings max_seq_len",
    32: "moe_intermediate_size shared_expert_intermediate_size shared_intermediate_size moe_hidden_size"
    " moe_shared_expert_intermediate_size expert_ffn_hidden_size share_expert_dim router_hidden_size"
    " kv_lora_rank q_lora_rank",
    16: "head_dim swa_head_dim index_head_dim linear_head_dim linear_key_head_dim linear_value_head_dim"
    " mamba_head_dim mamba_d_head qk_rope_head_dim qk_nope_head_dim v_head_dim kv_channels rel_extent"
    " block_size chunk_size mamba_chunk_size mamba_d_state ssm_state_size o_lora_rank gated_norm_rank"
    " hc_lowrank hidden_size_per_layer_input",
    8: "mamba_n_heads mamba_num_heads mamba_dt_rank d_rel rotary_dim sliding_window sliding_window_size"
    " attention_chunk_size index_topk index_block_size",
    4: "num_hidden_layers num_attention_heads swa_num_attention_heads linear_num_heads linear_num_value_heads"
    " num_experts num_local_experts n_routed_experts moe_num_experts attn_layer_period index_kpool",
    2: "num_experts_per_tok num_experts_per_token moe_topk moe_k top_k_experts num_key_value_heads"
    " swa_num_key_value_heads linear_num_key_heads n_groups index_n_heads index_topk_blocks o_groups"
    " eos_token_id",
    1: "n_shared_experts num_shared_experts moe_num_shared_experts n_group num_expert_group topk_group"
    " bos_token_id first_k_dense_replace num_dense_layers attn_layer_offset",
    0: "pad_token_id",
}
SMALL: dict[str, float] = {name: size for size, names in SIZES.items() for name in names.split()}
SMALL |= dict.fromkeys(("attention_dropout", "router_jitter_noise", "input_jitter_noise"), 0.0)
"""Fields of small configurations, where a class has them."""
_ROPE = {"rope_type": "default", "rope_theta": 1e4}
_YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 8.0, "original_max_position_embeddings": 16}
_INDEXER = {"indexer_n_heads": 2, "indexer_kv_heads": 1, "indexer_head_dim": 16}
_SEQUENCES = {"encoder_layers": 2, "decoder_layers": 2, "num_layers": 2, "num_decoder_layers": 2}
_SEQUENCES |= {"encoder_ffn_dim": 96, "decoder_ffn_dim": 96, "d_ff": 96, "d_kv": 16, "num_heads": 4}
_SEQUENCES |= {"encoder_attention_heads": 4, "decoder_attention_heads": 4, "encoder_sparse_step": 2}
_SEQUENCES |= {"num_sparse_encoder_layers": 1, "num_sparse_decoder_layers": 1, "decoder_sparse_step": 2}
_SEQUENCES |= dict.fromkeys(
    ("dropout", "dropout_rate", "moe_token_dropout", "encoder_layerdrop", "decoder_layerdrop"), 0.0
)
OWN: dict[str, dict[str, Any]] = {
    "dbrx": {
        "n_heads": 4,
        "n_layers": 3,
        "attn_config": {"kv_n_heads": 2, "clip_qkv": 8.0, "rope_theta": 1e4},
        "ffn_config": {"hidden_size": 64, "ffn_hidden_size": 32, "moe_num_experts": 4, "moe_top_k": 2},
    },
    "deepseek_ocr2": {"mlp_layer_types": ["dense", "sparse", "sparse", "sparse"]},
    "diffusion_gemma": {"per_layer_config": {}},
    "doge": {"is_moe": True, "num_experts": 16},
    "dots3_note": {
        "shared_experts_intermediate_size": 32,
        **dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 4),
        **dict.fromkeys(("swa_q_lora_rank", "swa_kv_lora_rank", "swa_head_dim"), 32),
        **dict.fromkeys(("swa_qk_nope_head_dim", "swa_qk_rope_head_dim", "swa_v_head_dim"), 16),
    },
    "ernie4_5_vl_moe": {
        "moe_intermediate_size": [32, 16],
        "rope_parameters": _ROPE | {"mrope_section": [2, 2, 4]},
    },
    "gemma4": {"enable_moe_block": True, "per_layer_config": {}},
    "glm4v_moe": {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3], "partial_rotary_factor": 1.0}},
    "glm5_next": {"qk_rope_head_dim": 0},
    "hy_v4_vl": {"rope_parameters": _ROPE | {"mrope_section": [2, 3, 3]}},
    "jetmoe": {"intermediate_size": 32},
    "lfm2_moe": {"layer_types": ["conv", "conv", "full_attention", "full_attention"]},
    "llama4": {"intermediate_size": 32},
    "longcat_flash": {"num_layers": 2, "zero_expert_num": 2},
    "mistral4": {
        "head_dim": 32,
        "rope_parameters": _YARN
        | {"mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1, "partial_rotary_factor": 0.5},
    },
    "nllb_moe": _SEQUENCES,
    "qwen4_exp": _INDEXER | {"indexer_budget": 8, "indexer_compress_ratio": 4},
    "step3p7": {"num_sliding_attention_heads": 4},
    "switch_transformers": _SEQUENCES,
    "zaya": {"num_experts_per_tok": 1},
}
"""Further fields of a family's small configuration."""
_EXPERTS_128 = {"num_experts": 128, "top_k_experts": 8, "moe_intermediate_size": 704}
LARGE: dict[str, dict[str, Any]] = {
    "dbrx": {"attn_config": {"rope_theta": 5e5}},
    "deepseek_ocr2": {"mlp_layer_types": ["dense"] + 31 * ["sparse"]},
    "diffusion_gemma": _EXPERTS_128,
    "doge": {"is_moe": True},
    "dots1": {"n_routed_experts": 128, "num_experts_per_tok": 6, "n_shared_experts": 2},
    "gemma4": _EXPERTS_128 | {"enable_moe_block": True},
    "hunyuan_v1_moe": {"num_experts": 64, "moe_topk": 8, "head_dim": 128},
    "lfm2_moe": {"layer_types": 8 * ["conv", "conv", "conv", "full_attention"]},
    "nemotron_h": {"layers_block_type": 13 * ["linear_attention", "moe", "full_attention", "mlp"]},
    "qwen4_exp": _INDEXER
    | {"indexer_n_heads": 16, "indexer_head_dim": 256, "indexer_budget": 2048}
    | {"indexer_compress_ratio": 16},
}
"""Fields that a family's configuration class leaves out, or that its default has without experts."""


@dataclass(frozen=True)
class Row:
    """Result of one family."""

    family: str
    version: str
    """Version of transformers."""
    model: str = ""
    layout: list[str] = field(default_factory=list)
    """Classes of its packed experts, and what differs from [experts, out, in] with a gate."""
    bits: dict[str, str] = field(default_factory=dict)
    """By implementation of the experts: `equal`, or the first difference from the unconverted model."""
    nvfp4: str = ""
    """`finite`, or the fault."""
    billions: float = 0.0
    """Parameters of the large model."""
    linears: float = 0.0
    """Share of its matrices' weights that are in nn.Linear and converted."""
    experts: float = 0.0
    """The same in packed experts."""
    left: dict[str, tuple[float, str]] = field(default_factory=dict)
    """Share of other matrices and reason, by what they are."""


# --- models -----------------------------------------------------------------------------------------


def _folder() -> Path:
    spec = find_spec("transformers")
    assert spec
    assert spec.submodule_search_locations
    return Path(spec.submodule_search_locations[0]) / "models"


def decorated() -> list[str]:
    """Return the families whose modeling file uses `use_experts_implementation`."""
    files = _folder().glob("*/modeling_*.py")
    return sorted({f.parent.name for f in files if "@use_experts_implementation" in f.read_text()})


def _configuration(family: str) -> type[PretrainedConfig]:
    """Return the class of the configuration of a family's text model."""
    path = next((_folder() / family).glob("configuration_*.py"))
    module = importlib.import_module(f"transformers.models.{family}.{path.stem}")
    names = re.findall(r"^class (\w+)\(\w+\)", path.read_text(), re.MULTILINE)
    text = [name for name in names if name.endswith("TextConfig") and "Talker" not in name]
    own = [name for name in names if name.lower() == f"{family.replace('_', '')}config"]
    return getattr(module, (text or own or names)[0])


def _model(family: str, config: PretrainedConfig) -> type[PreTrainedModel]:
    """Return the class of a family's text model: a causal one if there is one."""
    if type(config) in AutoModelForCausalLM._model_mapping:
        return AutoModelForCausalLM._model_mapping[type(config)]
    module = importlib.import_module(f"transformers.models.{family}.modeling_{family}")
    classes = [
        each
        for _, each in inspect.getmembers(module, inspect.isclass)
        if issubclass(each, PreTrainedModel) and each.config_class is type(config)
    ]
    for ending in ("ForCausalLM", "ForConditionalGeneration", "TextModel", "ForTokenClassification", "Model"):
        for each in classes:
            if each.__name__.endswith(ending) and "PreTrained" not in each.__name__:
                return each
    raise LookupError(f"{family} has no model with the configuration {type(config).__name__}")


def small(family: str, layers: int = 4) -> PreTrainedModel:
    """Return a small model in bf16, in training mode, with weights and biases that are not zero."""
    kind = _configuration(family)
    default = kind()
    given = default.to_dict()
    fields = {name: value for name, value in SMALL.items() if name in given or hasattr(default, name)}
    if "num_hidden_layers" in fields:
        fields["num_hidden_layers"] = layers
    for name in ("layer_types", "mlp_layer_types"):  # each kind of layer once
        if isinstance(given.get(name), list):
            kinds = list(dict.fromkeys(given[name]))
            fields[name] = (kinds + layers * kinds[-1:])[:layers]
    if "kv_lora_rank" in given:
        fields["num_key_value_heads"] = fields["num_attention_heads"]
    config = kind(**(fields | OWN.get(family, {})))
    torch.manual_seed(0)
    model = _model(family, config)._from_config(config, dtype=torch.bfloat16)
    for name, tensor in (*model.named_parameters(), *model.named_buffers()):
        if kept_in_fp32(model, name):  # as from_pretrained has them
            tensor.data = tensor.data.float()
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            drawn = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(0.08 * drawn if parameter.ndim > 1 else parameter + 0.05 * drawn)
    return model.train()


def large(family: str) -> PreTrainedModel:
    """Return the model that a family's configuration class describes, on the meta device."""
    config = _configuration(family)(**LARGE.get(family, {}))
    with torch.device("meta"):
        return _model(family, config)._from_config(config, dtype=torch.bfloat16)


def loss(model: PreTrainedModel) -> Tensor:
    """Return a loss of random tokens, whatever the model returns."""
    tokens = torch.randint(3, VOCAB, (2, TOKENS // 2), generator=torch.Generator().manual_seed(2))
    target = {"decoder_input_ids": tokens} if model.config.is_encoder_decoder else {}
    torch.manual_seed(3)
    output = model(input_ids=tokens, use_cache=False, **target)
    y = getattr(output, "logits", None)
    if y is None or y.shape[-1] != VOCAB:
        return (output.last_hidden_state if y is None else y).float().square().mean()
    return F.cross_entropy(y.float().flatten(0, 1), tokens.roll(-1, 1).flatten())


# --- measurements -----------------------------------------------------------------------------------


def step(model: PreTrainedModel, run: Conversion | None = None) -> dict[str, Tensor | None]:
    """Return loss and gradients of one forward and backward pass, by name."""
    if run is None:
        value = loss(model)
        value.backward()
    else:
        with run.step():
            value = loss(model)
            value.backward()
    return {"the loss": value.detach()} | {name: p.grad for name, p in model.named_parameters()}


def difference(plain: dict[str, Tensor | None], converted: dict[str, Tensor | None]) -> str:
    """Return `equal`, or the number of tensors with other bits, and the first of them."""
    if list(plain) != list(converted):
        return "the parameters have other names"
    other = []
    for name, x in plain.items():
        y = converted[name]
        if x is None or y is None:
            other += [name] if x is not y else []
        elif not torch.equal(x, y):
            other.append(f"{name} by {((x - y).float().norm() / x.float().norm()).item():.0e}")
    return f"{len(other)} of {len(plain)} differ: {other[0]}" if other else EQUAL


def bits(family: str) -> dict[str, str]:
    """Return `difference` of a converted model, by implementation of its experts: the default, and eager."""
    result = {}
    for name in ("", "eager"):
        pair = small(family), small(family)
        if name and pair[0]._can_set_experts_implementation():
            for model in pair:
                model.set_experts_implementation(name)
        name = pair[0].config._experts_implementation
        if name not in result:
            with multiplying("bf16"):  # as plain layers do, also where the engine would take fp32 for speed
                converted = step(pair[1], ablate.convert(pair[1], "bf16"))
            result[name] = difference(step(pair[0]), converted)
    return result


def quantised(family: str) -> str:
    """Return `finite` if a step by nvfp4 is, and calls every converted layer whose weight has a gradient."""
    model = small(family)
    run = ablate.convert(model, "nvfp4")
    called, begin = set(), run.engine.context.called
    run.engine.context.called = lambda layer: (called.add(layer.name), begin(layer))[1]
    values = step(model, run)
    bypassed = [
        name
        for name, layer in run.engine.layers.items()
        if layer.name not in called and layer.owner.grad is not None and layer.owner.grad.any()
    ]
    infinite = [name for name, value in values.items() if value is not None and not value.isfinite().all()]
    if infinite:
        return f"not finite: {infinite[0]}"
    return f"never called, but with a gradient: {', '.join(bypassed)}" if bypassed else "finite"


def _kind(model: nn.Module, path: str, reason: str) -> str:
    """Return what a matrix is: the name of a linear layer, or a class without the name of its family."""
    module = model.get_submodule(path.rpartition(".")[0])
    name = type(module).__name__
    if "a router" in reason or re.search(r"Router|Gating", name):
        return "router"
    if reason == "outside of the blocks":
        return "head"
    if isinstance(module, nn.Linear):
        return path.split(".")[-2]
    stem = re.sub(r"(Text|Encoder)*(For[A-Z]\w+|Model)$", "", type(model).__name__)
    return name.removeprefix(stem).removeprefix("Text")


def reached(model: PreTrainedModel) -> dict[str, Any]:
    """Return fields of a row: shares of the weights of matrices, without embeddings and convolutions."""
    blocks = find_blocks(model)
    block = block_finder(blocks)
    tables = {id(module.weight) for module in model.modules() if isinstance(module, nn.Embedding)}
    parameters = dict(model.named_parameters(remove_duplicate=False))
    linears = set(quantisable(model, block))
    stacks = {name for name in experts.packed(model) if block(name)}
    sums, left, reasons = Counter(), Counter(), {}
    for row in layer_table(model, block):
        path = row.name if row.name in parameters else f"{row.name}.weight"
        owner = path.rpartition(".")[0]
        if id(parameters[path]) in tables:  # a head that shares its matrix with an embedding
            continue
        sums["all"] += row.weights
        if row.name in linears or owner in stacks:
            sums["linears" if row.name in linears else "experts"] += row.weights
            continue
        kind = _kind(model, path, row.reason)
        left[kind] += row.weights
        reasons[kind] = row.reason
    return {
        "billions": round(sum(p.numel() for p in model.parameters()) / 1e9, 1),
        **{name: round(sums[name] / sums["all"], 4) for name in ("linears", "experts")},
        "left": {kind: (round(n / sums["all"], 5), reasons[kind]) for kind, n in left.most_common()},
    }


def layout(model: nn.Module) -> list[str]:
    """Return the classes of a model's packed experts, and what is special about their layout."""
    modules = list(experts.packed(model).values())
    names = sorted({type(module).__name__ for module in modules})
    flags = {
        "transposed": any(getattr(m, "is_transposed", False) for m in modules),
        "interleaved": any(not getattr(m, "is_concatenated", True) for m in modules),
        "biased": any(getattr(m, "has_bias", False) for m in modules),
        "without gate": any(not getattr(m, "has_gate", True) for m in modules),
        "post norm": any(getattr(m, "has_post_expert_norm", False) for m in modules),
    }
    return names + [name for name, holds in flags.items() if holds]


def measured(family: str) -> Row:
    """Return the row of a family."""
    model = small(family)
    return Row(
        family,
        version("transformers"),
        type(model).__name__,
        layout(model),
        bits(family),
        quantised(family),
        **reached(large(family)),
    )


# --- the page ---------------------------------------------------------------------------------------

_HEAD = """# Mixtures of experts

Experts whose weights one tensor holds are layers like others, `model.layers.0.mlp.experts.3.gate_up` and
`.down`, for layer rules, telemetry, alarms and maps. An expert has scales of its own, and blocks and
rotations do not cross its tokens; one without tokens is not multiplied. Routers stay in high precision.

- The package's transformer has them by `gpt: {{experts: {{count: 8, top_k: 2}}}}`; a model of transformers
  by `gpt: {{model: {{model_type: qwen3_moe, ...}}}}`, `finetune` or, in your own loop, `ablate.convert`.
- A module of your own has `forward(tokens [n, width], index [n, k], weights [n, k])`, `num_experts`, one of
  `gate_up_proj` and `up_proj`, and `down_proj`, each [experts, out, in] (transposed: [experts, in, out]). The
  router stays outside. Attributes say how the parameters are laid out:
  [docs/examples/own_experts.py](../examples/own_experts.py). Its forward pass is replaced; one that does more
  than add up its experts is refused.
- [`recipe.experts`](experiment.md) has what training stacks do differently: `padding`, `gate_up`,
  `rounding_state`, and `routing: replay`, which sends tokens where unquantised training sends them.
- Refused: expert parallelism and sharded weights. `torch.compile` leaves experts out of its graphs.

## Families

How much of a model of `transformers` {version} a recipe reaches (`python benchmarks/expert_families.py`).

Shares are of the weights of all matrices, without embeddings and convolutions, of the model that a family's
configuration class describes: in nn.Linear, and with packed experts. In brackets is a special layout; the
router of each family is left in high precision, too. Small models converted with the recipe `bf16` have the
bits of plain ones, with `grouped_mm`, the default, and with `eager`.{exceptions}

| family | 10^9 parameters | nn.Linear, and experts | left in high precision |
|---|---|---|---|
"""
_WHY = """
## What is left

| reason | matrices |
|---|---|
"""
_OTHERS = """
## Experts of another form

A recipe applies to experts that describe their layout, and to Llama 4's. It leaves others in high precision,
and `print(run)` names them.

| family | 10^9 parameters | nn.Linear, and experts | experts |
|---|---|---|---|
"""
_BY_DESIGN = {"head": "outside of the blocks", "router": "chooses experts: in high precision by design"}

_PARAMETER = "a parameter of a module that is no nn.Linear"


def page(rows: dict[str, Row]) -> str:
    """Return the page of all rows."""
    inside = [row for row in rows.values() if row.family not in OUTSIDE]
    others = [row for row in rows.values() if row.family in OUTSIDE]
    different = "".join(
        f"\n`{row.family}` has not with `{name}`: it {FP32.get(row.family, text)}."
        for row in rows.values()
        for name, text in row.bits.items()
        if text != EQUAL
    )
    lines = [_HEAD.format(version=inside[0].version, exceptions=different)]
    for row in inside:
        flags = ", ".join(each for each in row.layout if each[0].islower())
        lines.append(f"{_shares(row, flags)} {', '.join(_left(row))} |\n")
    reasons: dict[str, dict[str, list[str]]] = defaultdict(lambda: defaultdict(list))
    for row in inside:
        for kind, (_, reason) in row.left.items():
            alike = _BY_DESIGN.get(kind, _PARAMETER if reason.endswith("no nn.Linear") else reason)
            reasons[alike][kind].append(row.family)
    lines.append(_WHY)
    for reason, kinds in reasons.items():
        named = (
            f"{kind} ({', '.join(families)})" if len(families) < 5 else f"{kind} of {len(families)} families"
            for kind, families in kinds.items()
        )
        lines.append(f"| {reason} | {', '.join(named)} |\n")
    lines.append(_OTHERS)
    lines += (f"{_shares(row)} {OUTSIDE[row.family]} |\n" for row in others)
    return "".join(lines)


def _shares(row: Row, flags: str = "") -> str:
    size = f"{row.billions:,.0f}" if row.billions >= 10 else f"{row.billions:.1f}"
    family = f"{row.family} ({flags})" if flags else row.family
    return f"| {family} | {size} | {row.linears:.1%}, {row.linears + row.experts:.1%} |"


def _left(row: Row) -> Iterator[str]:
    for kind, (share, _) in row.left.items():
        if share >= 0.0005 or kind != "router":
            yield f"{kind} {share:.1%}" if share >= 0.0005 else kind


# --- rows -------------------------------------------------------------------------------------------


def load() -> dict[str, Row]:
    """Return the committed rows, by family."""
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else []
    return {row["family"]: Row(**row) for row in rows}


def save(rows: dict[str, Row]) -> None:
    """Write rows, in the order of families."""
    write(ROWS, [asdict(rows[family]) for family in sorted(rows)])


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="Families; all if none is named.")
    parser.add_argument("--again", action="store_true", help="Measure families that have a row, too.")
    options = parser.parse_args()
    rows = load()
    warnings.simplefilter("ignore")
    for family in options.families or [*decorated(), *OUTSIDE]:
        present = rows.get(family)
        if options.again or not present or present.version != version("transformers"):
            row = rows[family] = measured(family)
            save(rows)
            print(f"{family}: {row.linears:.1%}, {row.linears + row.experts:.1%}; {row.bits}; {row.nvfp4}")
    PAGE.write_text(page(rows))
