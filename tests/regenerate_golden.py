"""Golden traces: five losses of a tiny gpt, as hexadecimal floats. `python tests/regenerate_golden.py` writes them anew.

Do that only together with a raised VERSION of the numerics or of the workload: a changed trace is a changed number in every trial.
"""

import json
import platform
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


def adds_in_the_same_order() -> bool:
    """Whether this CPU is of the kind that wrote the traces: bf16 products in AVX-512, which AMX or AVX2 add in another order."""
    cpuinfo = Path("/proc/cpuinfo")
    flags = cpuinfo.read_text() if cpuinfo.exists() else ""
    return "avx512_bf16" in flags and "amx_bf16" not in flags


def stored(preset: str) -> list[float]:
    """The losses on disk."""
    return [float.fromhex(loss) for loss in json.loads((FOLDER / f"{preset}.json").read_text())["losses"]]


def main() -> None:
    """Write every trace; refuses a CPU whose numbers no other machine could compare with."""
    if not adds_in_the_same_order():
        sys.exit("write traces on a CPU with avx512_bf16 and without amx_bf16: only there are they compared exactly")
    FOLDER.mkdir(exist_ok=True)
    for preset in TRACED:
        trace = {
            "written_with": {"torch": torch.__version__, "machine": platform.machine()},
            "losses": [x.hex() for x in losses(preset)],
        }
        (FOLDER / f"{preset}.json").write_text(json.dumps(trace, indent=2) + "\n")
        print(preset, *trace["losses"])


if __name__ == "__main__":
    main()
