"""A workload is anything that, given a recipe and a seed, yields records. One file each; importing them is torch-free.

The contract: a frozen `Spec` with `VERSION` (raise it by hand when the same spec would give other bits), `problems()`
(fields that contradict each other or files that cannot be read, found before anything runs), `fingerprint()` of its data,
`identity()` (its fields but for places), `METRICS` that an experiment can compare,
`tokens_per_step`, `cost(quantised)` in rough CPU seconds, and `records(recipe, seed, engine, device, telemetry)`.
"""

from ablate.workloads.gpt import Gpt

WORKLOADS = {"gpt": Gpt}
