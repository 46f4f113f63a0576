"""Writer of dumps of layers, in the layouts that `ablate conform` reads."""

from collections.abc import Iterable
from pathlib import Path

import torch
from safetensors.torch import save_file

from ablate.verification.conformance.dumps import TE_TENSORS, DumpedLayer


def write(folder: Path, layers: Iterable[DumpedLayer], te: bool = False) -> None:
    """Write layers as `read` reads them: a safetensors file each, or the files of DumpTensors.

    Args:
        folder: folder, which is made.
        layers: the layers.
        te: True for the layout of Transformer Engine.
    """
    names = {own: theirs for theirs, own in TE_TENSORS.items()}
    for layer in layers:
        target = folder / "tensor_dumps" / f"rank_{layer.rank}" if te else folder
        target.mkdir(parents=True, exist_ok=True)
        if te:
            for key, tensor in layer.tensors.items():
                path = target / f"{layer.name.replace('.', '_')}_{names[key]}_iter_{layer.step:06d}.pt"
                torch.save({"high_precision": tensor}, path)
            continue
        tensors = {key: tensor.contiguous() for key, tensor in layer.tensors.items()}
        about = {"layer": layer.name, "step": str(layer.step), "rank": str(layer.rank)}
        save_file(tensors, target / f"{layer.name}.{layer.step}.{layer.rank}.safetensors", metadata=about)
