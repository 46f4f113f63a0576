"""Workloads, one per file: anything that yields records, given a recipe and a seed.

Importing them does not import torch. The contract of a workload is a frozen `Spec` with:

    VERSION                  raise it by hand if the same spec would give other bits
    METRICS                  metrics that an experiment can compare
    UNITS                    units of metrics, for those that have one
    imports                  modules that a trial needs and that take seconds to import
    steps, tokens_per_step   length of a run, and tokens of one step
    blocks, linear_layers    what a layer policy counts and selects from; 0 and () without a model
    problems()               contradictory fields and unreadable files, found before anything runs
    fingerprint()            digest that identifies the data's content
    identity()               fields that determine the numbers, without paths
    recorded(metric)         steps before the last at which every trial has the metric, to prune by
    summary()                facts about the data that put the numbers in proportion
    cost(quantised)          rough CPU seconds
    records(recipe, seed, engine, device, telemetry, checkpoints)
                             iterator of records; it continues from a checkpoint if there is one
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
    """Return the unit of a metric, given the trial's spec as JSON; "" if it has none."""
    workload = next(iter(json.loads(spec).get("workload", {})), None)
    return WORKLOADS[workload].UNITS.get(metric, "") if workload in WORKLOADS else ""


CONTEXT_FREE = ("data/unigram_entropy", "data/blank_loss")
"""Facts of a workload's data (`summary()`): the val/loss of a model that ignores its input."""


def context_free(result: Mapping[str, Any] | None) -> float | None:
    """Return the val/loss of a model that ignores its input, from a trial's result.

    None if the result has no such fact.
    """
    facts = (result or {}).get("facts", {})
    return next((facts[name] for name in CONTEXT_FREE if name in facts), None)
