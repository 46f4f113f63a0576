"""Workloads, one per file: anything that yields records, given a recipe and a seed (`base.Workload`)."""

import json
from collections.abc import Mapping

from ablate.errors import InputError
from ablate.training.workloads.base import Workload
from ablate.training.workloads.command import Command
from ablate.training.workloads.finetune import Finetune
from ablate.training.workloads.gpt import Gpt
from ablate.training.workloads.idle import Idle
from ablate.training.workloads.python import Python
from ablate.training.workloads.tensors import Tensors

WORKLOADS: dict[str, type[Workload]] = {
    "gpt": Gpt,
    "finetune": Finetune,
    "python": Python,
    "command": Command,
    "tensors": Tensors,
    "idle": Idle,
}
"""Classes of workloads by the key that an experiment file names them by."""


def abilities(workload: str) -> type[Workload]:
    """Return the class of a recorded workload; one without abilities if this version has none of the name."""
    return WORKLOADS.get(workload, Workload)


GONE = {"mae": "is an example of own code now: `ablate init NAME --images` writes it"}
"""Workloads of earlier versions, and what stands in for them."""


def recorded(workload: str, config: Mapping[str, object]) -> Workload:
    """Return a recorded workload; InputError if this version has none of the name."""
    if workload not in WORKLOADS:
        why = GONE.get(workload, "is not a workload of this version")
        raise InputError(f"a trial of workload {workload} cannot be followed: {workload} {why}")
    return WORKLOADS[workload].model_validate_json(json.dumps(config))


def unit(workload: str, metric: str) -> str:
    """Return the unit of a metric of a workload; "" if it has none."""
    return abilities(workload).UNITS.get(metric.partition("@")[0], "")


CONTEXT_FREE = ("data/unigram_entropy", "data/context_free_loss")
"""Names of the val/loss of a model that ignores its input: a fact of a workload's data (`summary()`), and a
metric of own code."""


def context_free(result: Mapping[str, object] | None) -> float | None:
    """Return the val/loss of a model that ignores its input, from a trial's result.json, if there is one;
    None if it has no such fact."""
    facts = (result or {}).get("facts")
    known = facts if isinstance(facts, dict) else {}
    return next((known[name] for name in CONTEXT_FREE if name in known), None)
