"""Packed NVFP4 checkpoints of a trained model, for serving: `export_model`.

The problem. A model that was trained in NVFP4 is saved in bf16, and packed again by another tool with rules
of its own: other scales, other roundings, another model than the one that was trained and evaluated.

The idea. Write codes, block scales and outer scale as the recipe's own forward pass has them.

    format               weight of layer L                   outer scale
    compressed-tensors   L.weight_packed, L.weight_scale     L.weight_global_scale = 6 bound / amax
    modelopt             L.weight (uint8), L.weight_scale    L.weight_scale_2 = amax / (6 bound)

Two codes share a byte, the even column in the low nibble; `weight_scale` is E4M3 [out, in / 16]. Square
blocks of 16x16 are written as rows that repeat their scale. Experts: packed_experts.py. Facts:
compressed-tensors 0.20.0, nvidia-modelopt 0.47.0.

Refused: weights that the layout cannot hold (other elements, scales and blocks than NVFP4's, rotated ones),
and sharded models. Not written: tokenizers, and anything of activations unless `calibrate` measures them.
"""

import json
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from torch import Tensor, nn

from ablate import provenance
from ablate.engines.emulated_layer import EmulatedLinear
from ablate.engines.expert_layers import EmulatedExpert
from ablate.files import Json, write
from ablate.numerics.stored import Packed, packed, unpack
from ablate.training.conversion import Conversion
from ablate.training.packed_experts import expert_tensors, named, require_whole

Format = Literal["compressed-tensors", "modelopt"]
FORMATS: tuple[Format, ...] = ("compressed-tensors", "modelopt")
FILES = ("model.safetensors", "config.json", "hf_quant_config.json", "README.md")
"""Files of an export, in any format."""
_BLOCK = 16
_ELEMENT_MAX = 6.0


@dataclass(frozen=True)
class ExportedModel:
    """Result of `export_model`."""

    files: tuple[Path, ...]
    packed: tuple[str, ...]
    """Names of the layers whose weights are packed."""
    high_precision: tuple[str, ...]
    """Names of the linear layers whose weights stay as they are."""
    calibrated: bool
    """True if scales of activations are written."""
    elements: int = 0
    """Number of packed weights."""
    rounded_otherwise: int = 0
    """Number of them whose value in fp32 is another when the stack's own loader dequantises them: see
    `as_served`."""


def export_model(
    run: Conversion,
    folder: str | Path,
    to: Format = "compressed-tensors",
    *,
    calibrate: Callable[[], object] | None = None,
    dtype: torch.dtype = torch.bfloat16,
) -> ExportedModel:
    """Write a model's weights as its recipe quantises them, packed, with a serving stack's configuration.

    Args:
        run: handle of the trained model, from `convert`. The recipe of its last step decides which layers are
            packed: those of whose products the forward weight is quantised then.
        folder: folder for `model.safetensors`, `config.json` and a `README.md` on what loads them; made if
            it does not exist. It must hold none of FILES.
        to: `compressed-tensors` (vLLM), or `modelopt` (TensorRT-LLM, vLLM).
        calibrate: calls the model on some batches, whose largest inputs become the static scales of the
            activations. Without it only weights are quantised when the model is served (W4A16).
        dtype: dtype of all other floating-point tensors.

    Returns:
        What was written.

    Raises:
        ValueError: the format is unknown, nothing is packed, a weight cannot be held, or the folder holds an
            earlier export.
    """
    if to not in FORMATS:
        raise ValueError(f"to={to!r}: formats are {' and '.join(FORMATS)}")
    require_no_export(folder)
    layers = run.engine.layers
    with run.evaluation():
        casts = {name: _packed(name, layer) for name, layer in layers.items() if layer.products.fprop.w}
        split = [name for name in casts if (x := layers[name].products.fprop.x) and x.transform]
        if calibrate and split:
            raise ValueError(
                f"{split[0]}: fprop.x.transform: a serving stack quantises inputs whole;"
                " leave calibrate out, and inputs stay as they are"
            )
        experts = require_whole(run.engine.experts, casts)
        if experts and calibrate:
            raise ValueError(
                f"{min(experts)}: inputs of packed experts are not measured; leave calibrate out, and inputs"
                " stay as they are"
            )
        amaxes = _calibrated(layers, casts, calibrate) if calibrate else {}
    if not casts:
        raise ValueError(
            "no layer's weight is quantised by the recipe of the last step; there is nothing to pack"
        )
    made = {name: packed_tensors(cast, to, amaxes.get(name)) for name, cast in casts.items()}
    tensors, rest = _named(run, made, experts, dtype)
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    weights = target / "model.safetensors"
    _write(tensors, weights)
    files = [weights]
    for name, content in _configurations(run.model, to, rest, bool(amaxes)).items():
        write(target / name, content)
        files.append(target / name)
    note = target / "README.md"
    note.write_text(_note(run.model, to, [path.name for path in files]))
    files.append(note)
    served = [(as_served(cast, to), cast.dequantize()) for cast in casts.values()]
    return ExportedModel(
        tuple(files),
        tuple(casts),
        tuple(rest),
        bool(amaxes),
        sum(own.numel() for _, own in served),
        sum(int((read != own).sum()) for read, own in served),
    )


def require_no_export(folder: str | Path) -> None:
    """Raise ValueError if a folder holds a file of an earlier export: a loader would mix them."""
    if found := [name for name in FILES if (Path(folder) / name).exists()]:
        raise ValueError(
            f"{folder} holds {' and '.join(found)} already, and would mix them with the files of this export;"
            " name another folder, or delete them first"
        )


def _write(tensors: dict[str, Tensor], path: Path) -> None:
    """Write a safetensors file, completely or not at all, with the mode of any new file."""
    from safetensors.torch import save_file

    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    temporary.touch()
    mode = temporary.stat().st_mode & 0o777  # safetensors writes files that only their owner reads
    save_file(tensors, temporary, metadata={"format": "pt", "producer": f"ablate {_version()}"})
    temporary.chmod(mode)
    temporary.replace(path)


def as_served(cast: Packed, to: Format) -> Tensor:
    """Return a packed weight as the stack's own loader dequantises it, to the bit.

    Codes and block scales are the training's. The loaders multiply them by the outer scale in another order
    than the emulator, so the last bits of a value differ: code * (s * w2) in modelopt, code * (s / g) in
    compressed-tensors, code * ((s * amax) * (1 / D)) here (docs/use/export.md). No fp32 number w2 or g
    removes the difference for every amax, since it must agree with the eight odd significands of E4M3 scales,
    1 to 15: of all 8,388,608 significands of amax, 5.5 % have a w2 by which all eight agree (4.4 % with that
    of the file), and 4.8 % a g within 4 ulp (4.4 %).

    Args:
        cast: the weight.
        to: format of the checkpoint.

    Returns:
        fp32 [rows, columns].
    """
    scales = cast.row_scales().to(torch.float32)
    stored = packed_tensors(cast, to)
    modelopt = to == "modelopt"
    decode = scales * stored["weight_scale_2"] if modelopt else scales / stored["weight_global_scale"]
    return unpack(cast.codes) * decode.repeat_interleave(_BLOCK, 1)


def _packed(name: str, layer: EmulatedLinear) -> Packed:
    """Return a layer's present weight as its forward product takes it."""
    product = layer.products.fprop
    quant = product.w
    assert quant is not None
    if layer.sharded:
        raise ValueError(f"{name}: the model is sharded over ranks; gather it on one rank first")
    if product.hadamard is not None:
        raise ValueError(f"{name}: fprop.hadamard: the rotation of the inputs would be missing when served")
    if quant.tile[1] != _BLOCK:
        raise ValueError(f"{name}: fprop.w.block {quant.block}: NVFP4 has one scale for {_BLOCK} elements")
    if layer.in_features % _BLOCK:
        raise ValueError(f"{name}: {layer.in_features} input features are no multiple of {_BLOCK}")
    try:
        return packed(layer.weight_cast(), layer.in_features)
    except ValueError as error:
        raise ValueError(f"{name}: fprop.w: {error}") from None


def _calibrated(
    layers: Mapping[str, EmulatedLinear], casts: Mapping[str, Packed], calibrate: Callable[[], object]
) -> dict[str, float]:
    """Return the largest magnitude of each packed layer's inputs while `calibrate` calls the model."""
    with ExitStack() as stack:
        amaxes = {name: stack.enter_context(_watched(layers[name])) for name in casts}
        with torch.no_grad():
            calibrate()
    missing = [name for name, seen in amaxes.items() if not seen]
    if missing:
        raise ValueError(f"{missing[0]}: calibrate did not call this layer; call the whole model")
    found = {name: max(seen) for name, seen in amaxes.items()}
    for name, amax in found.items():
        if not 0 < amax < float("inf"):
            raise ValueError(f"{name}: the largest input under calibrate is {amax:g}, which gives no scale")
    return found


@contextmanager
def _watched(layer: nn.Module) -> Iterator[list[float]]:
    """Inside this context, collect the largest magnitude of each input of a layer."""
    seen: list[float] = []

    def watch(module: nn.Module, arguments: tuple[Tensor, ...]) -> None:
        seen.append(float(arguments[0].detach().abs().amax()))

    hook = layer.register_forward_pre_hook(watch)
    try:
        yield seen
    finally:
        hook.remove()


def _named(
    run: Conversion, made: Mapping[str, Mapping[str, Tensor]], experts: set[str], dtype: torch.dtype
) -> tuple[dict[str, Tensor], list[str]]:
    """Return all tensors of an export by name, and the names of the layers that are not packed.

    Args:
        run: handle of the model.
        made: tensors of each packed layer.
        experts: parameters of experts that are packed.
        dtype: dtype of all other floating-point tensors.
    """
    model = run.model
    others = dict(_others(model, {f"{name}.weight" for name in made} | experts, dtype))
    rename = named(model) if experts else None
    if rename is None:  # names of the state dict; those of experts are their layers'
        whole = {f"{name}.{key}": value for name, keys in made.items() for key, value in keys.items()}
        modules = ((name, module) for name, module in model.named_modules() if isinstance(module, nn.Linear))
        return others | whole, [name for name, _ in modules if name not in made]
    tensors = rename(others)
    for name, keys in made.items():
        if not isinstance(run.engine.layers[name], EmulatedExpert):
            for key, value in keys.items():
                [place] = rename({f"{name}.weight": value})
                tensors[f"{place.removesuffix('weight')}{key}"] = value
    tables = {name for name, module in model.named_modules() if isinstance(module, nn.Embedding)}
    high = [name.removesuffix(".weight") for name, value in tensors.items() if _is_matrix(name, value)]
    tensors |= dict(expert_tensors(run.engine.experts, made, rename))
    return tensors, [name for name in high if name not in tables]


def _is_matrix(name: str, value: Tensor) -> bool:
    """Return True for the weight of a layer in high precision."""
    return name.endswith(".weight") and value.ndim == 2 and value.is_floating_point()


def _others(model: nn.Module, skipped: set[str], dtype: torch.dtype) -> Iterator[tuple[str, Tensor]]:
    """Yield all entries of a state dict but the packed weights, each in memory of its own."""
    for name, value in model.state_dict().items():
        if name not in skipped:
            plain = value.detach().to(dtype if value.is_floating_point() else value.dtype)
            yield name, plain.clone().contiguous()


def packed_tensors(cast: Packed, to: Format, input_amax: float | None = None) -> dict[str, Tensor]:
    """Return the tensors of one layer as a format names them.

    Args:
        cast: the weight.
        to: the format.
        input_amax: largest magnitude of the layer's inputs; None: no scale of activations.
    """
    return _LAYOUTS[to](cast, input_amax)


def _compressed_tensors(cast: Packed, amax: float | None) -> dict[str, Tensor]:
    inverse = {"weight_global_scale": (_bound(cast) / cast.amax).reshape(1)}
    if amax is not None:
        inverse["input_global_scale"] = torch.tensor([_ELEMENT_MAX * 448 / amax], dtype=torch.float32)
    return {
        "weight_packed": cast.codes.contiguous(),
        "weight_scale": cast.row_scales().contiguous(),
    } | inverse


def _modelopt(cast: Packed, amax: float | None) -> dict[str, Tensor]:
    scales = {"weight_scale_2": cast.amax / _bound(cast)}
    if amax is not None:
        scales["input_scale"] = torch.tensor(amax / (_ELEMENT_MAX * 448), dtype=torch.float32)
    return {"weight": cast.codes.contiguous(), "weight_scale": cast.row_scales().contiguous()} | scales


def _bound(cast: Packed) -> Tensor:
    """Return the divisor of the outer scale, fp32: 6 times the bound of the block scales."""
    outer = cast.quant.outer
    assert outer is not None
    return torch.tensor(_ELEMENT_MAX * outer.bound * cast.quant.range.prescale, dtype=torch.float32)


def _version() -> str:
    return provenance.environment().get("ablate-fp4", "unknown")


def _note(model: nn.Module, to: Format, files: list[str]) -> str:
    """Return the README of an export: the model's type, what loads the files, and what does not."""
    kind = getattr(getattr(model, "config", None), "model_type", None)
    named = _architecture(model)
    if kind:
        loads = (
            f"The model has transformers' model type `{kind}`, and `config.json` describes it. A serving"
            f" stack that has this type and the layout {to} is meant to load the folder, once the model's"
            " tokenizer lies beside these files: it is not part of the export."
        )
    else:
        loads = (
            f"The model is a `{named}`, which has no model type of transformers. Neither transformers'"
            " `from_pretrained` nor vLLM nor TensorRT-LLM loads this folder: they have no code for such a"
            " model. Read the tensors with `safetensors.torch.load_file`; they are named as in the model's"
            f" `state_dict()`, with the packed weights in the layout {to}."
        )
    listed = ", ".join(f"`{name}`" for name in files)
    return (
        f"# Packed NVFP4 weights ({to})\n\nWritten by ablate {_version()}: {listed}.\n\n{loads}\n\n"
        "Codes and block scales are those of the training's forward pass.\n"
    )


def _architecture(model: nn.Module) -> str:
    """Return the full name of a model's class."""
    return f"{type(model).__module__}.{type(model).__qualname__}"


def _configurations(
    model: nn.Module, to: Format, high_precision: list[str], calibrated: bool
) -> dict[str, dict[str, Json]]:
    """Return the configuration files by name."""
    own: Any = getattr(model, "config", None)
    config: dict[str, Json] = (
        json.loads(json.dumps(own.to_dict(), default=str)) if hasattr(own, "to_dict") else {}
    )
    own_class: dict[str, Json] = {"architectures": [_architecture(model)]}
    if to == "modelopt":
        quantization: dict[str, Json] = {
            "quant_algo": "NVFP4" if calibrated else "W4A16_NVFP4",
            "kv_cache_quant_algo": None,
            "group_size": _BLOCK,
            "exclude_modules": list(high_precision),
        }
        whole: dict[str, Json] = {
            "producer": {"name": "ablate", "version": _version()},
            "quantization": quantization,
        }
        return {"hf_quant_config.json": whole, "config.json": config or own_class}
    group: dict[str, Json] = {
        "num_bits": 4,
        "type": "float",
        "strategy": "tensor_group",
        "group_size": _BLOCK,
        "symmetric": True,
    }
    scheme: dict[str, Json] = {
        "targets": ["Linear"],
        "weights": group | {"dynamic": False},
        "input_activations": group | {"dynamic": "local"} if calibrated else None,
    }
    config = config or own_class
    config["quantization_config"] = {
        "quant_method": "compressed-tensors",
        "format": "nvfp4-pack-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": scheme},
        "ignore": list(high_precision),
    }
    return {"config.json": config}


_LAYOUTS: Mapping[str, Callable[[Packed, float | None], dict[str, Tensor]]] = {
    "compressed-tensors": _compressed_tensors,
    "modelopt": _modelopt,
}
