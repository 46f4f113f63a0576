"""Weights of a finished run, in one safetensors file: `write` and `read`.

The problem: a finished trial keeps numbers, not weights, since a sweep of a hundred trials would fill the
disk. But the model that won is to be served.

The idea: on request a trial writes the state dict of its model after the last step. What decides how those
weights are quantised then, beside the recipe, stands in the file's metadata: the measured phases that had
begun, and how often the guard fell back. Moving averages and histories of amaxes are not kept.
"""

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from ablate.files import Damaged

NAME = "weights.safetensors"


@dataclass(frozen=True)
class FinalWeights:
    """Content of a file of final weights."""

    trial: str
    step: int
    """Number of optimizer steps after which they were written."""
    model: dict[str, Tensor]
    """State dict of the model."""
    tripped: tuple[str, ...]
    """Measured conditions of the schedule that had been met, as `Engine.state` spells them."""
    fallbacks: int
    """Number of times that the guard changed the layers' precision."""


def write(
    path: Path, trial: str, step: int, model: Mapping[str, Tensor], tripped: Sequence[str], fallbacks: int
) -> None:
    """Write a file of final weights, completely or not at all.

    Args:
        path: the file.
        trial: id of the trial.
        step: number of optimizer steps done.
        model: state dict, with whole tensors.
        tripped: measured conditions that have been met.
        fallbacks: number of the guard's fallbacks.
    """
    from safetensors.torch import save_file

    tensors = {name: tensor.detach().cpu().clone().contiguous() for name, tensor in model.items()}
    about = {"trial": trial, "step": step, "tripped": list(tripped), "fallbacks": fallbacks}
    temporary = path.with_name(f"{path.name}.{os.getpid()}")
    save_file(tensors, temporary, metadata={"ablate": json.dumps(about)})
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    # safetensors writes files that only their owner reads; a state folder may be shared by a team.
    temporary.chmod(path.parent.stat().st_mode & 0o666)
    temporary.replace(path)


def read(path: Path) -> FinalWeights:
    """Return the content of a file of final weights, on the CPU.

    Raises:
        Damaged: the file is no such file.
    """
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(path, "pt") as file:
            about = json.loads((file.metadata() or {})["ablate"])
            model: dict[str, torch.Tensor] = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118
        return FinalWeights(about["trial"], about["step"], model, tuple(about["tripped"]), about["fallbacks"])
    except (SafetensorError, ValueError, KeyError) as error:
        raise Damaged(path, f"no file of final weights ({type(error).__name__}: {error})") from None
