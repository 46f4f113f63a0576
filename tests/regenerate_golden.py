"""Golden traces: five losses of a tiny gpt, as hexadecimal floats. `python tests/regenerate_golden.py` writes them anew.

Do that only together with a raised VERSION of the numerics or of the workload: a changed trace is a changed number in every trial.
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

from ablate.recipes import PRESETS
from ablate.train import Telemetry
from ablate.workloads.gpt import Gpt

FOLDER = Path(__file__).parent / "golden"
TRACED = ("bf16", "nvfp4")


def losses(preset: str) -> list[float]:
    """The training losses of five steps on the synthetic corpus, one thread."""
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        workload = Gpt(
            data=write_shards(Path(folder)),
            layers=2,
            width=64,
            heads=4,
            kv_heads=2,
            context=32,
            batch=4,
            steps=5,
            lr=1e-2,
            warmup=0.0,
            eval_every=1000,
            eval_tokens=64,
        )
        records = list(workload.records(PRESETS[preset](), 1234, "emulated", "cpu", Telemetry(every=1000, log=1)))
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
        [sys.executable, "-c", code], cwd=Path(__file__).parent, env=environment, capture_output=True, text=True, check=True
    )
    return [float.fromhex(word) for word in done.stdout.split()]


def stored(preset: str) -> list[float]:
    """The losses on disk."""
    return [float.fromhex(loss) for loss in json.loads((FOLDER / f"{preset}.json").read_text())["losses"]]


def main() -> None:
    """Write every trace; refuses a CPU whose numbers no other machine could compare with."""
    if not comparable():
        sys.exit("write traces on a CPU with avx512_bf16: only there are they compared exactly")
    FOLDER.mkdir(exist_ok=True)
    for preset in TRACED:
        trace = {
            "written_with": {"torch": torch.__version__, "machine": platform.machine()},
            "losses": [x.hex() for x in comparable_losses(preset)],
        }
        (FOLDER / f"{preset}.json").write_text(json.dumps(trace, indent=2) + "\n")
        print(preset, *trace["losses"])


if __name__ == "__main__":
    main()
