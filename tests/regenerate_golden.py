"""Golden traces, five losses of a tiny gpt as hexadecimal floats, and golden ids, those of one trial for each preset.

`python tests/regenerate_golden.py` writes both anew: only together with a raised VERSION of the numerics or of the workload, since a
changed trace is a changed number in every trial. `python tests/regenerate_golden.py ids` adds the ids of presets that have none yet.
"""

import json
import os
import platform
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
from conftest import write_shards

from ablate.experiment.trial_spec import TrialSpec
from ablate.recipes import PRESETS, Recipe
from ablate.training.data import Shards
from ablate.training.loop import Telemetry
from ablate.training.workloads.gpt import Gpt

FOLDER = Path(__file__).parent / "golden"
TRACED = ("bf16", "nvfp4")
STEPS = 5


def tiny(shards: Shards) -> Gpt:
    """Return the workload that traces and ids are of."""
    return Gpt(
        data=shards,
        layers=2,
        width=64,
        heads=4,
        kv_heads=2,
        context=32,
        batch=4,
        steps=STEPS,
        lr=1e-2,
        warmup=0.0,
        eval_every=1000,
        eval_tokens=64,
    )


def losses(preset: str) -> list[float]:
    """The training losses of five steps on the synthetic corpus, one thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        workload = tiny(write_shards(Path(folder)))
        records = list(
            workload.records(PRESETS[preset](), 1234, "emulated", "cpu", Telemetry(every=1000, log=1))
        )
    return [record.metrics["train/loss"] for record in records]


def comparable() -> bool:
    """Whether this CPU can add as the one that wrote the traces: bf16 products in AVX-512, which AVX2 adds in another order."""
    cpuinfo = Path("/proc/cpuinfo")
    return cpuinfo.exists() and "avx512_bf16" in cpuinfo.read_text()


def comparable_losses(preset: str) -> list[float]:
    """The losses with bf16 products in AVX-512 though the CPU may have AMX: in a process of its own, since oneDNN asks once."""
    code = f"import regenerate_golden as golden; print(*(loss.hex() for loss in golden.losses({preset!r})))"
    environment = os.environ | {"ONEDNN_MAX_CPU_ISA": "AVX512_CORE_BF16"}
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env=environment,
        capture_output=True,
        text=True,
        check=True,
    )
    return [float.fromhex(word) for word in done.stdout.split()]


def ids(recipe: Recipe, shards: Shards) -> dict[str, str]:
    """Return the ids of one trial of a recipe, by device class, and the name of its checkpoint after the last step."""
    cpu, cuda = (
        TrialSpec(
            workload="gpt", config=tiny(shards), recipe=recipe, seed=1234, engine="emulated", device=device
        )
        for device in ("cpu", "cuda")
    )
    return {"cpu": cpu.id, "cuda": cuda.id, "checkpoint": cpu.history(STEPS)}


def stored_ids() -> dict[str, dict[str, str]]:
    """Return the ids on disk, by preset."""
    path = FOLDER / "ids.json"
    return json.loads(path.read_text()) if path.exists() else {}


def write_ids(kept: dict[str, dict[str, str]]) -> None:
    """Write the ids of every preset, those in `kept` as they are."""
    with tempfile.TemporaryDirectory() as folder:
        shards = write_shards(Path(folder))
        every = {preset: kept.get(preset) or ids(make(), shards) for preset, make in PRESETS.items()}
    (FOLDER / "ids.json").write_text(json.dumps(every, indent=2) + "\n")


def stored(preset: str) -> list[float]:
    """The losses on disk."""
    return [float.fromhex(loss) for loss in json.loads((FOLDER / f"{preset}.json").read_text())["losses"]]


def main() -> None:
    """Write every trace; refuses a CPU whose numbers no other machine could compare with."""
    if not comparable():
        sys.exit("write traces on a CPU with avx512_bf16: only there are they compared exactly")
    FOLDER.mkdir(exist_ok=True)
    write_ids({})
    for preset in TRACED:
        trace = {
            "written_with": {"torch": torch.__version__, "machine": platform.machine()},
            "losses": [x.hex() for x in comparable_losses(preset)],
        }
        (FOLDER / f"{preset}.json").write_text(json.dumps(trace, indent=2) + "\n")
        print(preset, *trace["losses"])


if __name__ == "__main__":
    write_ids(stored_ids()) if sys.argv[1:] == ["ids"] else main()
