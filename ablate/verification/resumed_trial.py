"""Check that a trial which is stopped and resumed has the bits of one that ran through, on one device.

A sweep resumes what was killed, and its arms are compared on that promise. What keeps it on a CPU is tested
with every release; a GPU adds its own libraries, drivers and orders of addition. So a small `gpt` is trained
once without a stop, and twice with one, after different steps.
"""

from pathlib import Path

import numpy as np

from ablate.recipes import PRESETS
from ablate.training.workloads.gpt import Gpt
from ablate.verification.workload_checks import STEPS, Runs, first_difference

STOPS = (2, 4)
"""Steps after which the resumed runs were stopped."""
PRESET = "nvfp4"
_VOCABULARY = 64


def difference(device: str, folder: Path, deterministic: bool = True) -> str:
    """Return where the first resumed run on `cpu` or `cuda` differs from the one without a stop; "" if none
    does. `folder`: an empty one for data and checkpoints; `deterministic`: the workload's field."""
    tokens = np.random.default_rng(1).integers(0, _VOCABULARY, 6000).astype(np.uint16)
    (folder / "data").mkdir()
    tokens[:5000].tofile(folder / "data" / "train.bin")
    tokens[5000:].tofile(folder / "data" / "val.bin")
    data = {name: str(folder / "data" / f"{name}.bin") for name in ("train", "val")}
    workload = Gpt.model_validate(
        {
            "data": data | {"vocab": _VOCABULARY},
            **{"layers": 2, "width": 128, "heads": 2, "context": 64, "batch": 4, "steps": STEPS},
            **{"eval_every": STEPS // 2, "eval_tokens": 256, "eval_batch": 4, "lr": 1e-2},
            "deterministic": deterministic,
        }
    )
    runs = Runs(workload, device, PRESETS[PRESET]())
    for stop in STOPS:
        (folder / str(stop)).mkdir()
        records, resumed = runs.interrupted(stop, folder / str(stop))
        if resumed != stop:
            return f"continued from step {resumed} instead of {stop}"
        if found := first_difference(runs.records(), records):
            return f"stopped after step {stop}: {found}"
    return ""
