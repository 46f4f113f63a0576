"""Packed experts have the names of their model's checkpoints, and the numbers of the training."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

import ablate
from ablate.numerics.stored import Packed, packed, unpack
from ablate.training.conversion import Conversion
from ablate.training.models.mixture import Experts
from ablate.training.packed_model import FORMATS, as_served

SHAPE = {
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "head_dim": 16,
    "vocab_size": 64,
    "num_experts_per_tok": 2,
}
MODELS = {
    "mixtral": {"num_local_experts": 3},
    "qwen3_moe": {"num_experts": 3, "moe_intermediate_size": 48},
    "gpt_oss": {"num_local_experts": 3},
}
PLACES = {
    "mixtral": ("model.layers.0.block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3_moe": ("model.layers.0.mlp", ("gate_proj", "up_proj", "down_proj")),
}
"""Module of the experts in a checkpoint, and names of gate, up and down in it."""


def trained(kind: str, recipe: str = "nvfp4", **turned: object) -> Conversion:
    """A tiny model after a step."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **SHAPE, **MODELS[kind]))
    run = ablate.convert(model, recipe, set=turned or None, seed=0, steps=1)
    tokens = torch.arange(64).view(2, 32)
    with run.step():
        model(input_ids=tokens, labels=tokens).loss.backward()
    return run


def cast_of(run: Conversion, name: str) -> Packed:
    """Return a layer's weight as the training has it."""
    layer = run.engine.layers[name]
    return packed(layer.weight_cast(), layer.in_features)


def dequantised(tensors: dict[str, torch.Tensor], name: str, to: str) -> torch.Tensor:
    """Return a packed weight by the definition of its format, fp32 [out, in]."""
    codes = unpack(tensors[f"{name}.weight" if to == "modelopt" else f"{name}.weight_packed"])
    scales = tensors[f"{name}.weight_scale"].float()
    if to == "modelopt":
        return codes * (scales * tensors[f"{name}.weight_scale_2"]).repeat_interleave(16, 1)
    return codes * (scales / tensors[f"{name}.weight_global_scale"]).repeat_interleave(16, 1)


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("kind", PLACES)
@pytest.mark.parametrize("gate_up", ["fused", "split"])
def test_transformers_loads_the_dequantised_checkpoint_as_the_training_has_it(kind, to, gate_up, tmp_path):
    run = trained(kind, **{"recipe.experts.gate_up": gate_up})
    made = ablate.export_model(run, tmp_path / "packed", to)
    tensors = load_file(tmp_path / "packed" / "model.safetensors")
    module, parts = PLACES[kind]
    key = "weight" if to == "modelopt" else "weight_packed"
    assert {f"{module}.experts.{expert}.{part}.{key}" for expert in range(3) for part in parts} <= {*tensors}
    assert not any("gate_up" in name for name in tensors)
    scale = "weight_scale_2" if to == "modelopt" else "weight_global_scale"
    gate, up = (tensors[f"{module}.experts.0.{part}.{scale}"] for part in parts[:2])
    assert torch.equal(gate, up) is (gate_up == "fused")
    with run.evaluation():
        casts = {name: cast_of(run, name) for name in made.packed}
    packed_names = [name.removesuffix(".weight_scale") for name in tensors if name.endswith(".weight_scale")]
    own = tuple(f"{name}.weight" for name in packed_names)
    plain = {name: value for name, value in tensors.items() if not name.startswith(own)}
    plain |= {f"{name}.weight": dequantised(tensors, name, to) for name in packed_names}
    folder = tmp_path / "plain"
    folder.mkdir()
    save_file(plain, folder / "model.safetensors", metadata={"format": "pt"})
    run.model.config.save_pretrained(folder)
    loaded, report = AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, output_loading_info=True
    )
    assert not any(report[problem] for problem in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    for name, cast in casts.items():
        layer, weight = run.engine.layers[name], as_served(cast, to)
        if ".experts." in name:
            stack = loaded.get_submodule(name.rsplit(".", 2)[0])
            assert torch.equal(layer.part(getattr(stack, layer.parameter)), weight)
        else:
            assert torch.equal(loaded.get_submodule(name).weight, weight)
    assert len(casts) == 4 + 3 * (2 if gate_up == "fused" else 3)


@pytest.mark.parametrize("to", FORMATS)
def test_the_router_and_the_head_are_named_as_not_packed(to, tmp_path):
    ablate.export_model(trained("mixtral"), tmp_path, to)
    if to == "modelopt":
        names = json.loads((tmp_path / "hf_quant_config.json").read_text())["quantization"]["exclude_modules"]
    else:
        names = json.loads((tmp_path / "config.json").read_text())["quantization_config"]["ignore"]
    assert sorted(names) == ["lm_head", "model.layers.0.block_sparse_moe.gate"]


def test_what_has_no_names_is_refused(tmp_path: Path):
    with pytest.raises(ValueError, match="transposed or interleaved, and no format has names"):
        ablate.export_model(trained("gpt_oss"), tmp_path)
    rules = [{"match": {"name": "*.experts.1.*"}, "use": None}]
    run = trained("mixtral", **{"recipe.layers.rules": rules})
    with pytest.raises(
        ValueError, match=r"experts\.1\.gate_up: it stays in high precision and other experts"
    ):
        ablate.export_model(run, tmp_path)
    with pytest.raises(ValueError, match="inputs of packed experts are not measured; leave calibrate out"):
        ablate.export_model(trained("mixtral"), tmp_path, calibrate=lambda: None)
    assert not [*tmp_path.iterdir()]


def test_experts_in_high_precision_are_written_as_the_checkpoints_have_them(tmp_path):
    rules = [{"match": {"name": "*.experts.*"}, "use": None}]
    run = trained("mixtral", **{"recipe.layers.rules": rules})
    ablate.export_model(run, tmp_path)
    assert not [
        name for name in load_file(tmp_path / "model.safetensors") if "experts" in name and "scale" in name
    ]


class Own(nn.Module):
    """A model of no other library, with experts in one block."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([nn.ModuleDict({"experts": Experts(32, 48, 3, 1, gated=True)})])
        for weight in self.parameters():
            nn.init.normal_(weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        index = torch.arange(len(x))[:, None] % 3
        return self.blocks[0]["experts"](x, index, torch.ones(index.shape))


def test_experts_of_another_library_keep_the_names_of_their_layers(tmp_path):
    run = ablate.convert(Own(), "nvfp4", seed=0, steps=1)
    with run.step():
        run.model(torch.randn(48, 32)).sum().backward()
    made = ablate.export_model(run, tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    names = [f"blocks.0.experts.{expert}.{part}" for expert in range(3) for part in ("gate_up", "down")]
    keys = ("weight_packed", "weight_scale", "weight_global_scale")
    assert {*tensors} == {f"{name}.{key}" for name in names for key in keys}
    assert sorted(made.packed) == sorted(names)
    with run.evaluation():
        for name in names:
            read = dequantised(tensors, name, "compressed-tensors")
            assert torch.equal(read, as_served(cast_of(run, name), "compressed-tensors"))
