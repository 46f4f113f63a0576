"""Packed checkpoints: their codes, scales and names, by a slow reader of our own and by the packages that serve them."""

import json
import os
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.cases import every
from torch import nn

import ablate
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import quantize
from ablate.numerics.spec import Quant
from ablate.numerics.stored import packed
from ablate.training.models import hidden_if_broken
from ablate.training.packed_model import as_served, packed_tensors

TO = ("compressed-tensors", "modelopt")
HELD = {
    *("nvfp4", "nvfp4_paper", "four_over_six", "quartet2", "healing"),
    *("nvfp4_dequantised", "nvfp4_1d_weight", "nvfp4_row_scaled_fwd_mxfp8_bwd"),
    *("nvfp4_row_scaled_fwd_high_precision_bwd", "nvfp4_per_token_weight_2d", "averis"),
}


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(64, 48, bias=True), nn.Linear(48, 64, bias=False)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Tiny(nn.Module):
    def __init__(self, blocks: int = 3) -> None:
        super().__init__()
        self.embedding = nn.Embedding(32, 64)
        self.layers = nn.ModuleList(Block() for _ in range(blocks))
        self.norm, self.head = nn.LayerNorm(64), nn.Linear(64, 32)

    def forward(self, tokens):
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x)
        return self.head(self.norm(x))


def trained(recipe, **turned):
    """A tiny model after two steps."""
    torch.manual_seed(0)
    model = Tiny()
    run = ablate.convert(model, recipe, set=turned or None, seed=0, steps=2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    tokens = torch.arange(64).view(2, 32) % 32
    for _ in range(2):
        with run.step():
            nn.functional.cross_entropy(model(tokens).flatten(0, 1), tokens.flatten()).backward()
            optimizer.step()
            optimizer.zero_grad()
    return run, lambda: model(tokens)


def e4m3(byte: int) -> float:
    """The value of an E4M3 byte, from its definition."""
    sign, exponent, mantissa = -1.0 if byte >> 7 else 1.0, byte >> 3 & 15, byte & 7
    return sign * (mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7))


def numbers(codes: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Code times block scale by element, in float64: one nibble after another."""
    grid, rows = [0, 0.5, 1, 1.5, 2, 3, 4, 6], []
    for line, row in zip(codes, scales, strict=True):
        nibbles = [nibble for byte in line for nibble in (byte & 15, byte >> 4)]
        rows.append(
            [grid[n & 7] * (-1 if n >> 3 else 1) * e4m3(int(row[c // 16])) for c, n in enumerate(nibbles)]
        )
    return np.array(rows)


def parts(tensors: dict[str, torch.Tensor], name: str, to: str) -> tuple[np.ndarray, np.ndarray, float]:
    """Codes, bytes of the scales and the factor of a layer's weight."""
    key = "weight_packed" if to == "compressed-tensors" else "weight"
    codes, scales = tensors[f"{name}.{key}"], tensors[f"{name}.weight_scale"]
    assert (codes.dtype, scales.dtype) == (torch.uint8, torch.float8_e4m3fn)
    if to == "compressed-tensors":
        factor = 1 / tensors[f"{name}.weight_global_scale"].double().item()
    else:
        factor = tensors[f"{name}.weight_scale_2"].double().item()
    return codes.numpy(), scales.view(torch.uint8).numpy(), factor


def plain(name: str) -> bool:
    """Return True if a recipe needs no measured trigger, and no class of layers that this file's model has not."""
    return not ablate.recipe(name).triggers and not ablate.recipe(name).layers.rules


@every(preset=sorted(filter(plain, ablate.presets())), to=TO)
def test_a_preset_is_packed_as_its_forward_pass_quantises_or_refused(preset, to, tmp_path_factory):
    folder = tmp_path_factory.mktemp("packed")
    run, _ = trained(preset)
    if preset not in HELD:
        with pytest.raises(ValueError, match=r"nothing to pack|fprop"):
            ablate.export_model(run, folder, to)
        assert not list(folder.iterdir())
        return
    with run.evaluation():
        expected = {
            name: layer.quantised_weight().double().numpy()
            for name, layer in run.engine.layers.items()
            if layer.products.fprop.w
        }
    made = ablate.export_model(run, folder, to)
    tensors = load_file(folder / "model.safetensors")
    assert set(made.packed) == set(expected)
    assert "head" in made.high_precision
    for name, values in expected.items():
        codes, scales, factor = parts(tensors, name, to)
        found = numbers(codes, scales) * factor
        assert np.abs(found - values).max() <= 2**-22 * np.abs(values).max()  # the factor's rounding, in fp32
        assert (np.sign(found) == np.sign(values)).all()
    kept = {name for name in run.model.state_dict() if name.removesuffix(".weight") not in expected}
    assert kept <= set(tensors)
    assert all(torch.equal(tensors[name], run.model.state_dict()[name].bfloat16()) for name in kept)


@pytest.mark.parametrize("to", TO)
def test_the_configuration_names_what_stays_and_how_activations_are_read(to, tmp_path):
    run, call = trained("nvfp4", skip_last=1)
    for number, calibrate in enumerate((None, call)):
        folder = tmp_path / str(number)
        made = ablate.export_model(run, folder, to, calibrate=calibrate)
        assert made.packed == tuple(f"layers.{block}.{part}" for block in range(2) for part in ("up", "down"))
        rest = ["layers.2.up", "layers.2.down", "head"]
        tensors = load_file(folder / "model.safetensors")
        if to == "modelopt":
            said = json.loads((folder / "hf_quant_config.json").read_text())["quantization"]
            assert said["exclude_modules"] == rest
            assert said["quant_algo"] == ("NVFP4" if calibrate else "W4A16_NVFP4")
            name, scale = "input_scale", lambda amax: amax / 2688
        else:
            said = json.loads((folder / "config.json").read_text())["quantization_config"]
            assert (said["format"], said["ignore"]) == ("nvfp4-pack-quantized", rest)
            assert (said["config_groups"]["group_0"]["input_activations"] is None) == (calibrate is None)
            name, scale = "input_global_scale", lambda amax: 2688 / amax
        assert (f"layers.0.up.{name}" in tensors) == bool(calibrate)
        if calibrate:
            with run.evaluation():
                largest = run.model.embedding(torch.arange(32)).abs().max().item()
            assert tensors[f"layers.0.up.{name}"].item() == pytest.approx(scale(largest), rel=1e-6)


@pytest.mark.parametrize(
    ("preset", "turned", "why"),
    [
        ("mxfp4", {}, "fprop.w"),
        ("ue5m3", {}, "scale ue5m3"),
        ("nvfp4", {"recipe.fprop.hadamard": {"size": 16}}, "fprop.hadamard"),
        ("nvfp4", {"weights_2d": False, "block": "1x32"}, "block 1x32"),
        ("bf16", {}, "nothing to pack"),
        ("nvfp4", {"cooldown": 0.5}, "nothing to pack"),
    ],
)
def test_what_the_layout_cannot_hold_is_refused_by_its_field(preset, turned, why, tmp_path):
    run, _ = trained(preset, **turned)
    with pytest.raises(ValueError, match=why):
        ablate.export_model(run, tmp_path)


def test_other_mistakes_are_said_in_a_sentence(tmp_path):
    run, _ = trained("nvfp4")
    with pytest.raises(ValueError, match="compressed-tensors and modelopt"):
        ablate.export_model(run, tmp_path, "gguf")
    with pytest.raises(ValueError, match="did not call this layer"):
        ablate.export_model(run, tmp_path, calibrate=lambda: None)


@every(first=TO, second=TO)
def test_a_folder_never_holds_a_mixture_of_two_exports(first, second, tmp_path_factory):
    folder, (run, _) = tmp_path_factory.mktemp("packed"), trained("nvfp4")
    (folder / "tokenizer.json").write_text("{}")
    before = os.umask(0o027)
    try:
        made = ablate.export_model(run, folder, first)
    finally:
        os.umask(before)
    assert {path.stat().st_mode & 0o777 for path in made.files} == {0o640}
    assert {path.name for path in folder.iterdir()} == {path.name for path in made.files} | {"tokenizer.json"}
    content = {path: path.read_bytes() for path in folder.iterdir()}
    with pytest.raises(ValueError, match="delete"):
        ablate.export_model(run, folder, second)
    assert {path: path.read_bytes() for path in folder.iterdir()} == content
    for path in made.files[1:]:
        path.unlink()
    with pytest.raises(ValueError, match="delete"):
        ablate.export_model(run, folder, second)


@every(to=TO, kind=[None, "llama"])
def test_the_files_say_what_the_model_is_and_what_loads_it(to, kind, tmp_path_factory):
    """A model without a type of transformers is named by its class, and no server is said to load it."""
    folder, (run, _) = tmp_path_factory.mktemp("packed"), trained("nvfp4")
    if kind:
        transformers = pytest.importorskip("transformers")
        run.model.config = transformers.AutoConfig.for_model(kind)
    ablate.export_model(run, folder, to)
    note, config = (folder / "README.md").read_text(), json.loads((folder / "config.json").read_text())
    own = f"{type(run.model).__module__}.{type(run.model).__qualname__}"
    assert (f"`{kind}`" in note, own in note) == (kind is not None, kind is None)
    assert ("Neither" in note) == (kind is None)
    assert config.get("model_type") == kind
    assert (config.get("architectures") == [own]) == (kind is None)


def test_the_file_is_safetensors_by_its_definition(tmp_path):
    run, _ = trained("nvfp4")
    ablate.export_model(run, tmp_path)
    data = (tmp_path / "model.safetensors").read_bytes()
    (length,) = struct.unpack("<Q", data[:8])
    header = json.loads(data[8 : 8 + length])
    assert header["layers.0.up.weight_packed"]["dtype"] == "U8"
    assert header["layers.0.up.weight_scale"]["dtype"] == "F8_E4M3"
    assert header["layers.0.up.weight_global_scale"] | {"data_offsets": 0} == {
        "dtype": "F32",
        "shape": [1],
        "data_offsets": 0,
    }


def test_an_operand_packs_to_what_a_tensor_packs_to():
    run, _ = trained("nvfp4")
    with run.evaluation():
        layer = run.engine.layers["layers.0.up"]
        cast = layer.weight_cast()
        found = packed(cast, layer.in_features)
        assert torch.equal(found.dequantize(), layer.quantised_weight())


# The packages that read them


def test_compressed_tensors_own_decompressor_reads_the_emulators_weights(tmp_path):
    compressors = pytest.importorskip(
        "compressed_tensors.compressors", reason="there is no compressed-tensors here"
    )
    from compressed_tensors.compressors.nvfp4.helpers import unpack_fp4_from_uint8
    from compressed_tensors.quantization import QuantizationConfig
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    run, _ = trained("nvfp4")
    ablate.export_model(run, tmp_path)
    said = json.loads((tmp_path / "config.json").read_text())["quantization_config"]
    scheme = QuantizationConfig.model_validate(said).config_groups["group_0"]
    tensors, compared = load_file(tmp_path / "model.safetensors"), 0
    for name, weight in quantised(run).items():
        local = {
            key.rpartition(".")[2]: value for key, value in tensors.items() if key.startswith(f"{name}.")
        }
        read = compressors.NVFP4PackedCompressor.decompress(local, scheme)["weight"]
        assert (read.float() - weight).abs().max() <= 2**-7 * weight.abs().max()  # it rounds scales to bf16
        codes = unpack_fp4_from_uint8(local["weight_packed"], *weight.shape, dtype=torch.float32)
        exact = dequantize(
            x_q=codes,
            scale=local["weight_scale"].float(),
            args=scheme.weights,
            global_scale=local["weight_global_scale"],
            dtype=torch.float32,
        )
        compared += same(exact, weight)
    assert compared == 6 * 64 * 48


def modelopts_tensors():
    """modelopt's module of NVFP4 tensors; beside Megatron it imports Transformer Engine, whose native part is missing here."""
    with hidden_if_broken("transformer_engine"):
        return pytest.importorskip(
            "modelopt.torch.quantization.qtensor.nvfp4_tensor", reason="there is no modelopt here"
        )


def test_modelopts_own_tensor_reads_the_emulators_weights(tmp_path):
    nvfp4 = modelopts_tensors()
    run, _ = trained("nvfp4")
    ablate.export_model(run, tmp_path, "modelopt")
    tensors, compared = load_file(tmp_path / "model.safetensors"), 0
    for name, weight in quantised(run).items():
        codes = tensors[f"{name}.weight"]
        tensor = nvfp4.NVFP4QTensor(weight.shape, torch.float32, codes)
        scales = {"scale": tensors[f"{name}.weight_scale"], "double_scale": tensors[f"{name}.weight_scale_2"]}
        compared += same(tensor.dequantize(torch.float32, **scales, block_sizes={-1: 16}), weight)
    assert compared == 6 * 64 * 48


def casts_of(run) -> dict:
    with run.evaluation():
        return {
            name: packed(layer.weight_cast(), layer.in_features) for name, layer in run.engine.layers.items()
        }


def large(seed: int, block: str):
    """A packed weight whose block scales use all significands."""
    generator = torch.Generator().manual_seed(seed)
    spread = torch.exp(2 * torch.randn(96, 160, generator=generator).repeat_interleave(2, 1))
    weight = torch.randn(96, 320, generator=generator) * spread * 10.0 ** (seed - 2)
    return packed(quantize(weight, Quant(block=block), clock=Clock(0), keep=True), 320)


@every(seed=range(5), block=("1x16", "16x16"))
def test_modelopt_dequantises_to_the_bits_that_are_foretold(seed, block):
    nvfp4 = modelopts_tensors()
    cast = large(seed, block)
    tensors = packed_tensors(cast, "modelopt")
    tensor = nvfp4.NVFP4QTensor(torch.Size((96, 320)), torch.float32, tensors["weight"])
    scales = {"scale": tensors["weight_scale"], "double_scale": tensors["weight_scale_2"]}
    read = tensor.dequantize(torch.float32, **scales, block_sizes={-1: 16})
    assert torch.equal(read, as_served(cast, "modelopt"))


@every(seed=range(5), block=("1x16", "16x16"))
def test_compressed_tensors_dequantises_to_the_bits_that_are_foretold(seed, block):
    pytest.importorskip("compressed_tensors.compressors", reason="there is no compressed-tensors here")
    from compressed_tensors.quantization import QuantizationArgs
    from compressed_tensors.quantization.lifecycle.forward import dequantize

    cast = large(seed, block)
    tensors = packed_tensors(cast, "compressed-tensors")
    args = QuantizationArgs(num_bits=4, type="float", strategy="tensor_group", group_size=16, symmetric=True)
    read = dequantize(
        x_q=numbers_of(tensors["weight_packed"]),
        scale=tensors["weight_scale"].float(),
        args=args,
        global_scale=tensors["weight_global_scale"],
        dtype=torch.float32,
    )
    assert torch.equal(read, as_served(cast, "compressed-tensors"))


def numbers_of(codes: torch.Tensor) -> torch.Tensor:
    """Values of the codes, one nibble after another."""
    grid = torch.tensor([0, 0.5, 1, 1.5, 2, 3, 4, 6])
    nibbles = torch.stack((codes & 15, codes >> 4), -1).flatten(1).long()
    return grid[nibbles & 7] * torch.where(nibbles > 7, -1.0, 1.0)


@every(seed=range(3), to=TO)
def test_what_is_served_has_the_codes_and_scales_of_the_training(seed, to):
    """Only the product with the outer scale is rounded otherwise: by less than 2 ulp of fp32."""
    cast = large(seed, "1x16")
    own, read = cast.dequantize(), as_served(cast, to)
    assert (torch.sign(own) == torch.sign(read)).all()
    assert (own - read).abs().max() <= (2 * 2**-23 * own.abs()).max()
    assert ((own - read).abs() <= 3 * 2**-23 * own.abs()).all()


def test_no_outer_scale_in_fp32_makes_every_value_bit_equal():
    """Count the significands of an amax, of 8,192, that have a w2 by which all eight odd significands of E4M3 agree: few.

    A block scale that is a power of two leaves one w2: the emulator's own factor. The others then differ.
    """
    significands = torch.arange(8192) * 1021 % 2**23
    amax = (significands | (127 << 23)).to(torch.int32).view(torch.float32)
    factor = torch.tensor(1.0) / torch.tensor(2688.0)
    wanted = {m: (m * amax) * factor for m in range(1, 16, 2)}
    agree = torch.stack([m * wanted[1] == value for m, value in wanted.items()]).all(0)
    assert 0.04 < agree.double().mean() < 0.07
    inverse = torch.tensor(2688.0) / amax
    near = [(inverse.view(torch.int32) + steps).view(torch.float32) for steps in range(-4, 5)]
    divided = torch.stack([torch.stack([m / g == v for m, v in wanted.items()]).all(0) for g in near]).any(0)
    assert 0.03 < divided.double().mean() < 0.07


def test_the_export_counts_the_weights_that_are_rounded_otherwise(tmp_path):
    run, _ = trained("nvfp4")
    for to in TO:
        made = ablate.export_model(run, tmp_path / to, to)
        casts = casts_of(run)
        differing = sum(int((as_served(cast, to) != cast.dequantize()).sum()) for cast in casts.values())
        assert (made.elements, made.rounded_otherwise) == (6 * 64 * 48, differing)
        assert 0 < differing < made.elements


def quantised(run) -> dict[str, torch.Tensor]:
    with run.evaluation():
        return {name: layer.quantised_weight() for name, layer in run.engine.layers.items()}


def same(read: torch.Tensor, weight: torch.Tensor) -> int:
    """The number of elements, which are equal in bf16; in fp32 another order of the factors costs an ulp or two."""
    assert (read.float() - weight).abs().max() <= 2**-22 * weight.abs().max()
    differing = (read.bfloat16() != weight.bfloat16()).sum().item()
    assert differing <= 1e-3 * weight.numel()
    return weight.numel()


@pytest.mark.parametrize("to", TO)
def test_inputs_that_a_recipe_splits_get_no_static_scale(to, tmp_path):
    run, call = trained("averis")
    with pytest.raises(ValueError, match=r"fprop\.x\.transform"):
        ablate.export_model(run, tmp_path, to, calibrate=call)
    assert not list(tmp_path.iterdir())
    assert not ablate.export_model(run, tmp_path, to).calibrated
