"""The example of own code that trains on images, experiments/mae.py: its names, and a small configuration."""

import importlib.util
import sys
from pathlib import Path
from typing import Any

from ablate.recipes import PRESETS
from ablate.training.checkpoints import Checkpoints
from ablate.training.loop import Record, Telemetry
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.python import Python

FILE = Path(__file__).parents[2] / "experiments" / "mae.py"
_SPEC = importlib.util.spec_from_file_location("mae_example_file", FILE)
assert _SPEC
assert _SPEC.loader
example = sys.modules[_SPEC.name] = importlib.util.module_from_spec(_SPEC)
_SPEC.loader.exec_module(example)
SMALL: dict[str, Any] = {
    "images": "digits",
    "patch": 2,
    "encoder": {"layers": 1, "width": 32, "heads": 2},
    "decoder": {"layers": 1, "width": 16, "heads": 2},
    "batch": 2,
    "eval_every": 2,
    "eval_images": 4,
    "eval_batch": 2,
    "augment": {"flip": 0.0},
}
"""Keys of `config`."""


def __getattr__(name: str) -> Any:
    return getattr(example, name)


def small(**keys: Any) -> Any:
    """Return the small configuration with other keys."""
    return example.Config.model_validate(SMALL | keys)


def workload(steps: int = 4, data: tuple[str, ...] = (), **keys: Any) -> Python:
    """Return the workload of the small configuration."""
    return Python(file=str(FILE), steps=steps, data=data, config=SMALL | keys)


def run(
    config: Python, recipe: str = "nvfp4", seed: int = 0, checkpoints: Checkpoints | None = None
) -> list[Record]:
    """Return the records of a trial."""
    telemetry = Telemetry(every=0, shadow=0, log=1)
    return list(config.records(TrialRun(PRESETS[recipe](), seed, "emulated", "cpu", telemetry, checkpoints)))
