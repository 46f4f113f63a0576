"""Where a training run stands after a step, in one file that a later attempt of the same trial goes on from, bit for bit."""

import os
import time
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import nn

from ablate.engines.emulated import Engine

VERSION = 1
"""Of the file's content; another version is not read."""


class Checkpoints:
    """One trial's checkpoint file: the latest replaces the one before, and is there whole or not at all."""

    def __init__(self, path: Path, identity: str, seconds: float) -> None:
        self.path, self.identity, self.seconds = path, identity, seconds
        self.resumed: int | None = None
        """The step that this attempt went on from."""
        self._last = time.monotonic()

    @property
    def due(self) -> bool:
        """Whether the last one is `seconds` old."""
        return time.monotonic() - self._last >= self.seconds

    def save(self, state: dict[str, Any]) -> None:
        """Replace the checkpoint, on the disk when this returns."""
        temporary = self.path.with_name(f"{self.path.name}.{os.getpid()}")
        with temporary.open("wb") as file:
            torch.save({"version": VERSION, "trial": self.identity, **state}, file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(self.path)
        self._last = time.monotonic()

    def load(self) -> dict[str, Any] | None:
        """The checkpoint; None, and a line on standard output, which is the trial's log, where it cannot be used."""
        try:
            state = torch.load(self.path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a damaged file makes torch raise: the trial starts from its beginning
            print(f"{self.path}: cannot be read ({type(error).__name__}: {error}); the trial starts from its beginning")
            return None
        if (state.get("version"), state.get("trial")) != (VERSION, self.identity):
            print(f"{self.path}: of another version or trial; the trial starts from its beginning")
            return None
        self.resumed = state["step"]
        return state


class Standing(NamedTuple):
    """What a checkpoint holds: the steps done, and everything that the next one depends on."""

    model: nn.Module
    optimizer: torch.optim.Optimizer
    engine: Engine

    def state(self, step: int) -> dict[str, Any]:
        """After `step` steps."""
        return {
            "step": step,
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "engine": self.engine.state(),
        }

    def restore(self, state: dict[str, Any]) -> int:
        """Stand where the checkpoint stood; returns its step."""
        self.model.load_state_dict(state["model"])
        self.optimizer.load_state_dict(state["optimizer"])
        self.engine.restore(state["engine"], state["step"])
        return state["step"]
