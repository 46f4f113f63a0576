"""Runs of a tiny gpt: its workload, its training loop, and what its records say."""

import torch

from ablate.engines.emulated import convert
from ablate.engines.products import DTYPES
from ablate.numerics.philox import Clock
from ablate.recipes import PRESETS, Recipe
from ablate.training.loop import Record, Telemetry
from ablate.training.models.transformer import Transformer, initialise
from ablate.training.trial_run import TrialRun
from ablate.training.workloads.gpt import Gpt

NVFP4 = PRESETS["nvfp4"]()
PLACES = ("throughput/", "memory/")
"""Prefixes of metrics that differ from machine to machine."""
UNMEASURED = Telemetry(every=0, shadow=0, log=1)


def gpt(shards, **fields) -> Gpt:
    """Return a gpt of two layers and five steps; `fields` change it."""
    tiny = {
        "layers": 2,
        "width": 32,
        "heads": 2,
        "context": 16,
        "batch": 2,
        "steps": 5,
        "eval_tokens": 64,
        "eval_every": 2,
        "lr": 1e-2,
    }
    return Gpt(data=shards, **(tiny | fields))


def train(
    workload: Gpt, recipe: Recipe = NVFP4, seed: int = 0, telemetry: Telemetry = UNMEASURED
) -> list[Record]:
    """Train the workload on the CPU with the emulated engine; return its records."""
    return list(workload.records(TrialRun(recipe, seed, "emulated", "cpu", telemetry)))


def converted(workload: Gpt, recipe: Recipe, clock: Clock):
    """Return a model as the workload builds it, and its engine."""
    with torch.device("meta"):
        model = Transformer(workload, 64, DTYPES[recipe.dtype])
    return model, convert(initialise(model, clock.seed, torch.device("cpu")), recipe, clock)


def facts(records: list[Record]) -> str:
    """Return all metrics but speed and memory as text, so that nan equals nan."""
    return repr(
        [
            (step, {k: v for k, v in sorted(m.items()) if not k.startswith(PLACES)}, events)
            for step, m, events, *_ in records
        ]
    )


def column(records: list[Record], name: str) -> dict[int, float]:
    """Return one metric by step."""
    return {record.step: record.metrics[name] for record in records if name in record.metrics}


def losses(records: list[Record]) -> dict[int, float]:
    """Return the training loss by step."""
    return column(records, "train/loss")
