"""Descriptions of transformers' causal models: fields that a configuration class declares or the model's code reads."""

import pytest
import torch

from ablate.numerics.philox import Clock
from ablate.recipes.layers import blocks_in
from ablate.training.models import causal

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
