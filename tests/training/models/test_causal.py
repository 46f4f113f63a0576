"""Descriptions of transformers' causal models: fields that a configuration class declares or the model's code reads."""

import pytest
import torch
from transformers import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from ablate.numerics.philox import Clock
from ablate.recipes.layers import blocks_in
from ablate.training.models import causal
from ablate.training.models.described import refuse_giants
from ablate.training.models.source import fingerprint

pytestmark = pytest.mark.filterwarnings(
    "ignore::FutureWarning", "ignore::DeprecationWarning", "ignore::UserWarning"
)
SHAPE = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 32,
}
EXPERTS = SHAPE | {"num_experts": 4, "num_experts_per_tok": 2, "head_dim": 32}
MIXTURES = {
    "qwen3_moe": EXPERTS | {"moe_intermediate_size": 32},
    "qwen2_moe": EXPERTS | {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 32},
    "olmoe": EXPERTS
    | {"head_dim": 16, "eos_token_id": 1},  # its norms take no other head_dim than hidden_size / heads
}


@pytest.mark.parametrize("kind", MIXTURES)
def test_head_dim_that_a_configuration_does_not_declare_is_obeyed(kind):
    source = {"model_type": kind, **MIXTURES[kind]}
    found = causal.outlined(source, 64)
    assert blocks_in(found.layers) == 2
    assert SHAPE["num_attention_heads"] * source["head_dim"] in found.features.values()
    model = causal.build(source, 64, 0, torch.device("cpu"))
    tokens = torch.arange(16).view(2, 8)
    assert causal.loss(Clock(0), torch.float32, model, tokens, tokens).isfinite()


def test_a_field_that_no_code_of_the_model_reads_is_refused_with_the_nearest():
    for kind in MIXTURES:
        with pytest.raises(ValueError, match=r"no field hed_dim"):
            causal.outlined({"model_type": kind, **SHAPE, "hed_dim": 32}, 64)
    with pytest.raises(ValueError, match=r"no field hiden_size; the nearest: hidden_size"):
        causal.outlined({"model_type": "olmoe", "hiden_size": 32}, 64)


def test_no_configuration_of_a_causal_model_is_refused_as_too_large():
    kinds = [kind for kind in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES if kind in CONFIG_MAPPING]
    checked = 0
    for kind in kinds:
        try:
            fields = CONFIG_MAPPING[kind]().to_dict()
        except Exception:  # its own default is refused by transformers
            continue
        refuse_giants(fields)
        checked += 1
    assert checked > 0.9 * len(kinds) > 90
    refuse_giants({"block_size": 2048, "moe_shared_expert_intermediate_size": 1 << 16})


@pytest.mark.parametrize(
    "field",
    [
        *("num_hidden_layers", "n_layer", "n_layers", "num_layers", "decoder_layers", "num_blocks"),
        *("num_layers_per_stack", "num_nextn_predict_layers", "num_mem_blocks"),
        *("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts", "n_shared_experts"),
    ],
)
def test_a_number_of_modules_that_would_take_gigabytes_is_refused(field):
    refuse_giants({field: 1024})
    for fields in ({field: 1 << 15}, {"text_config": {field: 1 << 15}}):
        with pytest.raises(ValueError, match=f"{field} 32768 of the model is too large"):
            refuse_giants(fields)
    with pytest.raises(ValueError, match="hidden_size"):
        refuse_giants({"hidden_size": 1 << 41})


def test_weights_under_each_other_s_name_are_another_model(tmp_path):
    """Only `model.safetensors` is loaded; by name, the other file stands once behind it and once before."""
    for folder, first, second in (("a", "model", "model_2"), ("b", "model-1", "model")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "config.json").write_text("{}")
        (tmp_path / folder / f"{first}.safetensors").write_bytes(b"one")
        (tmp_path / folder / f"{second}.safetensors").write_bytes(b"two")
    assert fingerprint(str(tmp_path / "a")) != fingerprint(str(tmp_path / "b"))
