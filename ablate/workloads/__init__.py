"""A workload is anything that, given a recipe and a seed, yields records. One file each; importing them is torch-free.

The contract: a frozen `Spec` with `VERSION` (raise it by hand when the same spec would give other bits), `problems()`
(fields that contradict each other or files that cannot be read, found before anything runs), `fingerprint()` of its data,
`identity()` (its fields but for places), `METRICS` that an experiment can compare, `recorded(metric)` (the steps before the last after
which every trial has it, where a search may prune), `steps`, `tokens_per_step`, `blocks` and
`linears` (what a layer policy counts and names; 0 and none where there are none), `summary()` of facts that put its numbers in
proportion, `cost(quantised)` in rough CPU seconds, and `records(recipe, seed, engine, device, telemetry, checkpoints)`, which goes on from
the checkpoint that it finds there.
"""

from ablate.workloads.gpt import Gpt
from ablate.workloads.idle import Idle
from ablate.workloads.tensors import Tensors

WORKLOADS = {"gpt": Gpt, "tensors": Tensors, "idle": Idle}
