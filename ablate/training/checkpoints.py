"""Checkpoints: the state of a training run after a step, in one file.

A later attempt of the same trial continues from it, bit for bit. The file ends with a footer
(`checkpoint_footer.seal`): the SHA-256 of its bytes, which torch does not verify, and the number and digest
of the records up to its step. If the bytes or the records differ, the file is renamed to `*.damaged` and the
trial continues from an earlier state.
"""

import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import torch
from torch import nn

from ablate.engines.emulated import Engine
from ablate.files import Damaged
from ablate.training.checkpoint_footer import CHECKPOINT_VERSION, seal, unsealed
from ablate.training.distributed import gathered, placed, placed_optimizer, world


class Journal(Protocol):
    """Interface that checkpoints need of the object that records the trial."""

    def reach(self, step: int) -> dict[str, Any]: ...
    def recorded(self, trial: str, step: int) -> dict[str, Any] | None: ...


class Checkpoints:
    """Checkpoint file of one trial, and the shared states that other trials pass through too.

    A file is written under a temporary name and then renamed, so it is either complete or absent.
    """

    def __init__(
        self,
        path: Path,
        trial: str,
        seconds: float,
        shared: Mapping[int, Path] | None = None,
        journal: Journal | None = None,
    ) -> None:
        self.path, self.trial, self.seconds, self.shared = path, trial, seconds, shared or {}
        self._journal = journal
        self.resumed: int | None = None
        """Step from which this attempt continued; None if it started at step 0."""
        self._last = time.monotonic()
        self._state = self._read(path)
        further = (
            step
            for step in sorted(self.shared, reverse=True)
            if self._state is None or step > self._state["step"]
        )
        taken = next((state for step in further if (state := self._read(self.shared[step]))), None)
        if taken:
            os.utime(self.shared[taken["step"]])  # used now, so removed last
        self.trunk = {"trial": taken["trial"], "step": taken["step"]} if taken else None
        """Trial that wrote the shared state from which this one continues, and its step; None without one."""
        self._state = taken or self._state
        self.start = self._state["step"] if self._state else 0
        """Step from which this attempt continues."""

    @property
    def artifacts(self) -> Path:
        """Return the folder for a trial's files for people, beside its checkpoint.

        The code that writes the first file creates the folder.
        """
        return self.path.parent / "artifacts"

    def take(self) -> dict[str, Any] | None:
        """Return the furthest checkpoint; None if there is none, and at every later call."""
        state, self._state = self._state, None
        self.resumed = state and state["step"]
        return state

    def wanted(self, step: int) -> tuple[bool, bool]:
        """Return two flags: shared state wanted after `step` steps, and own checkpoint wanted.

        A shared state is wanted if other trials pass through it and its file does not exist. The trial's own
        checkpoint is wanted if `seconds` have passed since the last one.
        """
        return step in self.shared and not self.shared[
            step
        ].exists(), time.monotonic() - self._last >= self.seconds

    def leave(self, step: int, state: dict[str, Any], wanted: tuple[bool, bool]) -> None:
        """Write the state after `step` steps to each file that `wanted` asks for."""
        others, own = wanted
        about = {
            "version": CHECKPOINT_VERSION,
            "trial": self.trial,
            "step": step,
            "records": self._journal and self._journal.reach(step),
        }
        if others:
            self.shared[step].parent.mkdir(parents=True, exist_ok=True)
            self._write(self.shared[step], state, about | {"state": self.shared[step].name})
        if own:
            self._write(self.path, state, about)
            self._last = time.monotonic()

    def _write(self, path: Path, state: dict[str, Any], about: dict[str, Any]) -> None:
        temporary = path.with_name(f"{path.name}.{os.getpid()}")
        with temporary.open("w+b") as file:
            torch.save({"trial": self.trial, **state}, file)
            seal(file, about)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def _read(self, path: Path) -> dict[str, Any] | None:
        """Return a checkpoint; None if there is none or if it cannot be used.

        A file that cannot be used is renamed, and a line on standard output, which is the trial's log, gives
        the reason.
        """
        try:
            about = unsealed(path)
            self._refuse(path, about)
            return torch.load(path, map_location="cpu", weights_only=True)
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a damaged file makes torch raise
            why = (
                str(error)
                if isinstance(error, Damaged)
                else f"{path}: cannot be read ({type(error).__name__}: {error})"
            )
            print(f"{why}; the trial goes on without it. It is kept as {self._put_aside(path)}", flush=True)
            return None

    def _refuse(self, path: Path, about: Mapping[str, Any]) -> None:
        """Raise Damaged if the file is intact but belongs to another version, trial, state or history."""
        if about["version"] != CHECKPOINT_VERSION or (path == self.path and about["trial"] != self.trial):
            raise Damaged(path, "of another version or trial")
        if path != self.path and about.get("state") != path.name:
            raise Damaged(
                path, f"the state of trial {about['trial']} after step {about['step']} under another's name"
            )
        if self._journal and self._journal.recorded(about["trial"], about["step"]) != about["records"]:
            raise Damaged(
                path,
                f"the records of trial {about['trial']} up to step {about['step']} "
                "are not those that it was left after",
            )

    def _put_aside(self, path: Path) -> Path:
        aside = path.with_name(f"{path.name}.damaged")
        path.replace(aside)
        return aside


class Standing(NamedTuple):
    """Content of a checkpoint: the steps done, and everything that the next step depends on.

    Tensors are whole, even if each rank keeps only a part of them. All ranks call both methods.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    engine: Engine

    def state(self, step: int) -> dict[str, Any]:
        """Return the state after `step` steps; tensors are None on ranks other than 0 if they are sharded."""
        parts = {
            "model": self.model.state_dict(),
            "optimizer": self.optimizer.state_dict(),
            "engine": self.engine.state(),
        }
        return {"step": step, **gathered(parts, kept=world().rank == 0)}

    def restore(self, state: dict[str, Any]) -> int:
        """Restore the state of a checkpoint and return its step."""
        self.model.load_state_dict(placed(state["model"], self.model.state_dict()))
        self.optimizer.load_state_dict(placed_optimizer(state["optimizer"], self.optimizer))
        self.engine.restore(state["engine"], state["step"])
        return state["step"]
