"""Dumps of linear layers: operands and results of one step of somebody's training, read from a folder.

Three layouts are read, alone or side by side:

    tensor_dumps/rank_0/<layer>_<tensor>_iter_000100.pt    Transformer Engine's DumpTensors (2.20), with
    iter_000100/<layer>_<tensor>.pt                        high_precision_tensor; tensor: activation, weight,
                                                           gradient, output, dgrad, wgrad
    <name>.safetensors                                     x, w, dy, y, dx, dw of one layer, or <layer>/x ...
    <name>.pt                                              a dict of the same tensors, as torch.save writes it

x [tokens, in], w [out, in], dy [tokens, out], y [tokens, out], dx [tokens, in], dw [out, in]; tokens may have
several dimensions. A safetensors file names its layer in its metadata (`layer`), else its file name does.
Transformer Engine writes the dots of a layer's name as underscores.

Files are read without unpickling code. Refused, in a sentence: what is no such file, quantised tensor objects
of Transformer Engine (set quantized_tensor: False), shapes that do not fit together.
"""

import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from pickle import UnpicklingError

import torch
from torch import Tensor

from ablate.errors import InputError
from ablate.training.operand_capture import Capture
from ablate.training.operand_errors import Batch, Operands

TENSORS = {
    **{"x": ("tokens", "in"), "w": ("out", "in"), "dy": ("tokens", "out")},
    **{"y": ("tokens", "out"), "dx": ("tokens", "in"), "dw": ("out", "in")},
}
"""Names of the tensors, each with its dimensions."""
TE_TENSORS = {"activation": "x", "weight": "w", "gradient": "dy", "output": "y", "dgrad": "dx", "wgrad": "dw"}
"""Names of Transformer Engine's DumpTensors."""
_TE_FILE = re.compile(rf"(.+)_({'|'.join(TE_TENSORS)})(?:_iter_(\d+))?\.pt")
_PLACES = {"rank": re.compile(r"rank_(\d+)"), "step": re.compile(r"iter_(\d+)")}
_NUMBER = re.compile(r"(\d+)")


@dataclass(frozen=True)
class DumpedLayer:
    """Operands and results of one layer in one step on one rank, those that the dump has."""

    name: str
    tensors: Mapping[str, Tensor]
    """By names of `TENSORS`, matrices."""
    step: int = 0
    rank: int = 0
    files: tuple[Path, ...] = field(default=(), compare=False)


def read(folder: Path) -> list[DumpedLayer]:
    """Return the layers of a folder of dumps, by rank, step and name, numbers in names by their size.
    InputError if there is no dump, or a file cannot be read or does not fit."""
    if not folder.is_dir():
        raise InputError(f"{folder} is no folder: give the one that the dumps were written to")
    gathered: dict[tuple[int, int, str], tuple[dict[str, Tensor], list[Path]]] = {}
    for path in sorted(path for kind in ("*.pt", "*.safetensors") for path in folder.rglob(kind)):
        for layer, step, rank, tensors in _of_file(path):
            own, files = gathered.setdefault((rank, step, layer), ({}, []))
            if twice := own.keys() & tensors.keys():
                raise InputError(f"{path}: {layer} has another {min(twice)}, in {files[0]}")
            own |= tensors
            files.append(path)
    if not gathered:
        raise InputError(f"{folder} has no dumps: no .pt file of DumpTensors and no .safetensors file")
    layers = [
        DumpedLayer(name, {key: _matrix(tensor) for key, tensor in own.items()}, step, rank, tuple(files))
        for (rank, step, name), (own, files) in sorted(gathered.items(), key=lambda item: _order(*item[0]))
    ]
    if problems := [problem for layer in layers for problem in _misfits(layer)]:
        raise InputError(*problems)
    return layers


def captured(folder: Path) -> Capture:
    """Return the operands of a folder of dumps: a batch is one step of one rank."""
    batches: dict[tuple[int, int], Batch] = {}
    for layer in read(folder):
        if missing := [name for name in ("x", "w", "dy") if name not in layer.tensors]:
            raise InputError(
                f"{folder}: {layer.name} has no {' and no '.join(missing)}; rank casts all three"
            )
        tensors = (layer.tensors[name].bfloat16() for name in ("x", "w", "dy"))
        batches.setdefault((layer.rank, layer.step), []).append(Operands(layer.name, *tensors))
    return Capture([*batches.values()])


def _order(rank: int, step: int, name: str) -> tuple[int, int, list[tuple[str, int]]]:
    parts = _NUMBER.split(name)
    numbers = map(int, [*parts[1::2], "0"])
    return rank, step, [*zip(parts[::2], numbers, strict=True)]


def _of_file(path: Path) -> Iterator[tuple[str, int, int, dict[str, Tensor]]]:
    places = {
        name: next((int(match[1]) for part in reversed(path.parts) if (match := pattern.search(part))), 0)
        for name, pattern in _PLACES.items()
    }
    if path.suffix == ".safetensors":
        content, about = _safetensors(path)
        places |= {name: int(about[name]) for name in places if about.get(name, "").isdecimal()}
        layer = about.get("layer", path.stem)
    else:
        content = _pickled(path)
        layer = path.stem
        if match := _TE_FILE.fullmatch(path.name):
            if "high_precision" not in content:
                raise InputError(f"{path} has no high_precision tensor: set high_precision_tensor: True")
            layer = match[1]
            content = {TE_TENSORS[match[2]]: content["high_precision"]}
    by_layer: dict[str, dict[str, Tensor]] = {}
    for key, tensor in content.items():
        if not isinstance(key, str):
            continue
        inside, _, name = key.rpartition("/")
        if name in TENSORS and isinstance(tensor, Tensor):
            if tensor.layout != torch.strided:
                raise InputError(f"{path}: {key} is {tensor.layout}, and dense tensors are read")
            by_layer.setdefault(inside or layer, {})[name] = tensor
    if not by_layer:
        raise InputError(f"{path} has none of the tensors {', '.join(TENSORS)}")
    for name, tensors in by_layer.items():
        yield name, places["step"], places["rank"], tensors


def _safetensors(path: Path) -> tuple[dict[str, Tensor], dict[str, str]]:
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            return {key: file.get_tensor(key) for key in file.keys()}, dict(file.metadata() or {})  # noqa: SIM118
    except (SafetensorError, OSError) as error:
        raise InputError(f"{path} is no safetensors file ({error})") from None


def _pickled(path: Path) -> dict[str, object]:
    try:
        content = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as error:  # a file that is no pickle, or a part of one, may end in any of them
        why = str(error).partition("\n")[0].partition(". ")[0]
        if not isinstance(error, UnpicklingError | RuntimeError | OSError):  # such as KeyError: 101
            why = f"{type(error).__name__} {why}".strip()
        raise InputError(
            f"{path} cannot be read without running its code ({why}); dump high-precision tensors alone"
            " (quantized_tensor: False)"
        ) from None
    if not isinstance(content, dict):
        raise InputError(f"{path} holds {type(content).__name__}, and a dict of tensors is read")
    return content


def _matrix(tensor: Tensor) -> Tensor:
    columns = tensor.shape[-1] if tensor.ndim else 1  # of which there may be none
    return tensor.detach().reshape(math.prod(tensor.shape[:-1]), columns)


def _misfits(layer: DumpedLayer) -> Iterator[str]:
    sizes: dict[str, tuple[int, str]] = {}
    for name, tensor in layer.tensors.items():
        if not tensor.is_floating_point():
            yield f"{layer.name}: {name} holds {tensor.dtype}, and floating-point numbers are read"
            continue
        if tensor.element_size() < torch.bfloat16.itemsize:
            yield f"{layer.name}: {name} holds {tensor.dtype}, which is quantised: dump it in bf16 or wider"
            continue
        for role, size in zip(TENSORS[name], tensor.shape, strict=True):
            known, other = sizes.setdefault(role, (size, name))
            if known != size:
                yield (
                    f"{layer.name}: {name} [{', '.join(map(str, tensor.shape))}] has {size} for {role}, and"
                    f" {other} has {known}"
                )
