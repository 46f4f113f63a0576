"""Counts of one training step of a tiny gpt by each preset, or its error, as JSON."""

import json
import sys
import tempfile
from pathlib import Path

import torch

from ablate.recipes import PRESETS
from ablate.training.loop import Loop, Telemetry
from support.corpus import write_shards
from support.gpt_runs import gpt
from support.imaginary_gpu.counting import Counts

PLAIN = Telemetry(every=1000, shadow=1000, log=1000)


def counted(preset: str, folder: Path) -> dict:
    """Return the counts of a plain step, the second of a run."""
    workload = gpt(write_shards(folder), layers=1, width=64, context=32, eval_every=1000)
    with Counts() as counts:
        run = workload.prepare(PRESETS[preset](), 0, "cuda")
        loop = Loop(run, workload, PLAIN)
        loop.step(1)
        counts.reset()
        loop.step(2)
        places = {name: dict(counter.most_common(8)) for name, counter in counts.by_place().items()}
        return {"totals": counts.totals(), "places": places, "strays": places["strays"]}


if __name__ == "__main__":
    torch.set_num_threads(1)
    torch.get_autocast_gpu_dtype = lambda: torch.bfloat16
    torch.version.cuda = "13.0"  # a build for CUDA, as the choice of kernels asks
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        for preset in sys.argv[1:] or PRESETS:
            try:
                results[preset] = counted(preset, Path(folder))
            except Exception as error:  # of whatever class: the test says which preset fails
                results[preset] = {"error": f"{type(error).__name__}: {error}"[:300]}
    print(json.dumps(results))
