"""Checkpoints: the state of a training run after a step, in one file.

A later attempt of the same trial continues from it, bit for bit. The file ends with a footer
(`checkpoint_footer.SealedWriter`): the SHA-256 of its bytes, which torch does not verify, and the number and
digest of the records up to its step. If the bytes or the records differ, the file is renamed to `*.damaged`
and the trial continues from an earlier state.
"""

import json
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NotRequired, Protocol, TypedDict

import torch
from torch import Tensor

from ablate.engines.emulated import EngineState
from ablate.errors import InputError
from ablate.files import Damaged, first_error, temporary_of
from ablate.numerics.product import why_not
from ablate.training.checkpoint_footer import CHECKPOINT_VERSION, Footer, SealedWriter, unsealed
from ablate.training.guard import GuardState
from ablate.training.optimizers import OptimizerState

WEIGHTS = "weights.safetensors"
"""File of a finished trial's weights, beside its checkpoint."""
SHARE = 0.05
"""Largest share of a trial's time for its own checkpoints: one that takes 30 s is written every 10 minutes.
The first one's cost is not known before it is written."""


class RunState(TypedDict):
    """Content of a checkpoint: everything that the steps after `step` depend on. Tensors are whole, and on
    the CPU if they were gathered from several ranks."""

    step: int
    model: dict[str, Tensor]
    optimizer: OptimizerState
    engine: EngineState
    """From `Engine.state`."""
    meter: dict[str, Any]
    """State of a `loop.Meter`: the steps of an interval so far."""
    guard: GuardState
    spent: float
    """Seconds spent in steps so far."""
    trial: NotRequired[str]
    """Id of the trial that wrote the file; present in a state that was read from one."""
    products: NotRequired[str | None]
    """Mode of the products of a CPU (`product.MODES`), likewise; None or absent: a GPU's, or not recorded."""
    readings: NotRequired["Readings"]
    """Losses at the end of a forked trial's earlier windows."""


Readings = dict[str, dict[str, list[float]]]
"""Losses at the end of windows: by window (`position/steps`), by reading (`loss`, `loss_bf16`), one a
validation batch."""


class Journal(Protocol):
    """Interface that checkpoints need of the object that records the trial."""

    def reach(self, step: int) -> dict[str, Any] | None: ...
    def recorded(self, trial: str, step: int) -> dict[str, Any] | None: ...


class Checkpoints:
    """Checkpoint file of one trial, and the shared states that other trials pass through too.

    A file is written under a temporary name and then renamed, so it is either complete or absent. The trial's
    own, at `path`, need not exist yet; its folder exists. `shared` has the files of shared states by step;
    any may not exist yet. Own checkpoints are at least `seconds` apart (0: one after every step), and further
    if one takes long: `SHARE` of the time at most. Without a `journal`, they are not compared with records.

    `products` is the mode of the products of this CPU, None on a GPU. A trial that continues keeps the mode
    that it began with; InputError if this CPU cannot.
    """

    def __init__(
        self,
        path: Path,
        trial: str,
        seconds: float,
        shared: Mapping[int, Path] | None = None,
        journal: Journal | None = None,
        products: str | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.path, self.trial, self.seconds, self.shared = path, trial, seconds, shared or {}
        self.products = products
        self._journal = journal
        self.resumed: int | None = None
        """Step from which this attempt continued; None if it started at step 0."""
        self._clock = clock
        self._last = self._begun = clock()
        self._cost = 0.0
        """Seconds that the last checkpoint took, from `wanted` to the end of `leave`."""
        self._state = self._read(path)
        further = (
            step
            for step in sorted(self.shared, reverse=True)
            if self._state is None or step > self._state["step"]
        )
        taken = next((state for step in further if (state := self._read(self.shared[step]))), None)
        if taken:
            os.utime(self.shared[taken["step"]])  # used now, so removed last
        self.trunk: Mapping[str, str | int] | None = (
            {"trial": taken["trial"], "step": taken["step"]} if taken else None
        )
        """Trial that wrote the shared state from which this one continues, and its step; None without one."""
        self._state = taken or self._state
        if self._state:
            self._keep_mode(self._state)
        self.start = self._state["step"] if self._state else 0
        """Step from which this attempt continues."""

    @property
    def artifacts(self) -> Path:
        """Folder for a trial's files for people, beside its checkpoint; created by the code that writes the
        first file."""
        return self.path.parent / "artifacts"

    def take(self) -> RunState | None:
        """Return the furthest checkpoint; None if there is none, and at every later call. The state is large:
        this object keeps no reference to it."""
        state, self._state = self._state, None
        self.resumed = state["step"] if state else None
        return state

    def read(self, step: int) -> RunState | None:
        """Return the shared state after a step; None if there is none, or if it cannot be used."""
        state = self._read(self.shared[step])
        if state:
            self._keep_mode(state)
        return state

    def _keep_mode(self, state: RunState) -> None:
        recorded = state.get("products")
        if not recorded or not self.products:
            return
        if why := why_not(recorded):
            begun = (
                f"trial {self.trial} goes on from step {state['step']} of a run that multiplied in {recorded}"
            )
            raise InputError(f"{begun}, and sums add in another order: {why}")
        self.products = recorded

    def wanted(self, step: int) -> tuple[bool, bool]:
        """Return two flags, after `step` optimizer steps: shared state wanted, and own checkpoint wanted.

        A shared state is wanted if other trials pass through it and its file does not exist. The trial's own
        checkpoint is wanted if `seconds` have passed since the last one, and so many times what that one took
        that checkpoints take `SHARE` of the time at most.
        """
        shared = step in self.shared and not self.shared[step].exists()
        self._begun = self._clock()
        apart = max(self.seconds, self._cost * (1 - SHARE) / SHARE) if self.seconds else 0.0
        return shared, self._begun - self._last >= apart

    def leave(self, step: int, state: RunState, wanted: tuple[bool, bool]) -> None:
        """Write the state reached after `step` optimizer steps, with whole tensors, to each file that is
        wanted. OSError if one cannot be written; the files before it are complete."""
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
            self._last = self._clock()
            self._cost = self._last - self._begun

    def keep_weights(self, state: RunState) -> None:
        """Write the weights of a finished run, whole tensors, as `weights.safetensors`, completely or not at
        all."""
        from safetensors.torch import save_file

        path = self.path.parent / WEIGHTS
        tensors = {name: value.detach().cpu().clone().contiguous() for name, value in state["model"].items()}
        temporary = temporary_of(path)
        about = {"trial": self.trial, "step": state["step"]}
        save_file(tensors, temporary, metadata={"ablate": json.dumps(about)})
        with temporary.open("rb") as file:
            os.fsync(file.fileno())
        # safetensors writes files that only their owner reads; a state folder may be shared by a team.
        temporary.chmod(path.parent.stat().st_mode & 0o666)
        temporary.replace(path)

    def _write(self, path: Path, state: RunState, about: Mapping[str, object]) -> None:
        temporary = temporary_of(path)
        with temporary.open("wb") as file:
            writer = SealedWriter(file)
            with first_error():
                torch.save({"trial": self.trial, "products": self.products, **state}, writer)
            writer.seal(about)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)

    def _read(self, path: Path) -> RunState | None:
        """Return a checkpoint; None if there is none or if it cannot be used. Such a file is renamed, and a
        line on standard output, which is the trial's log, gives the reason."""
        try:
            about = unsealed(path)
            self._refuse(path, about)
            state: RunState = torch.load(path, map_location="cpu", weights_only=True)
            return state
        except FileNotFoundError:
            return None
        except Exception as error:  # whatever a damaged file makes torch raise
            unread = f"{path}: cannot be read ({type(error).__name__}: {error})"
            why = str(error) if isinstance(error, Damaged) else unread
            aside = path.with_name(f"{path.name}.damaged")
            path.replace(aside)
            print(f"{why}; the trial goes on without it. It is kept as {aside}", flush=True)
            return None

    def _refuse(self, path: Path, about: Footer) -> None:
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
