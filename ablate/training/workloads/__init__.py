"""A workload is anything that, given a recipe and a seed, yields records. One file each; importing them is torch-free.

The contract: a frozen `Spec` with `VERSION` (raise it by hand when the same spec would give other bits),
`problems()` (fields that contradict each other or files that cannot be read, found before anything runs),
`fingerprint()` of its data, `identity()` (its fields but for places), `METRICS` that an experiment can
compare, `recorded(metric)` (the steps before the last after which every trial has it, where a search may
prune), `steps`, `tokens_per_step`, `blocks` and `linear_layers` (what a layer policy counts and selects from;
0 and none for a workload without a model), `summary()` of facts that put its numbers in proportion,
`cost(quantised)` in rough CPU seconds, and `records(recipe, seed, engine, device, telemetry, checkpoints)`,
which goes on from the checkpoint that it finds there. `UNITS` names what metrics are counted in, where that
has a name; `imports` the modules that take seconds to import.
"""

import json
from collections.abc import Mapping
from typing import Any

from ablate.training.workloads.finetune import Finetune
from ablate.training.workloads.gpt import Gpt
from ablate.training.workloads.idle import Idle
from ablate.training.workloads.mae import Mae
from ablate.training.workloads.tensors import Tensors

WORKLOADS: dict[str, type[Any]] = {
    "gpt": Gpt,
    "mae": Mae,
    "finetune": Finetune,
    "tensors": Tensors,
    "idle": Idle,
}


def unit(spec: str, metric: str) -> str:
    """What a metric of a trial is counted in, by the trial's spec as JSON; nothing where that has no name."""
    workload = next(iter(json.loads(spec).get("workload", {})), None)
    return WORKLOADS[workload].UNITS.get(metric, "") if workload in WORKLOADS else ""


CONTEXT_FREE = ("data/unigram_entropy", "data/blank_loss")
"""Facts of a workload's data (`summary()`): the val/loss of a model that ignores its input."""


def context_free(result: Mapping[str, Any] | None) -> float | None:
    """The val/loss of a model that ignores its input, by a trial's result; None where its workload knows none."""
    facts = (result or {}).get("facts", {})
    return next((facts[name] for name in CONTEXT_FREE if name in facts), None)
