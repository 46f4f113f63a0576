"""torchtitan's console lines (`torchtitan/components/metrics.py`), with and without colours.

    step: 10  loss:  7.84212  grad_norm:  1.8123  memory:  2.11GiB(2.67%)  tps: 9,871  tflops: 1.02  mfu: N/A
    validate step: 10  loss:  7.9012  memory:  2.11GiB(2.67%)  tps: 10,201

`tps` is tokens a second of one device. A line counts only if it is there up to its end: of `loss: 7.84`, cut
in the number, nothing shows that it was cut. Pipeline stages before the last print -1 for the loss that they
do not have: such lines are left out. Refused is a line that begins as these do and ends elsewhere.
"""

import math
import re

from ablate.training.log_readers.lines import LogRecord, Unreadable, number
from ablate.training.metric_names import Name, parse

_BEGIN = re.compile(r"(?:^| )(validate )?step: {1,8}(\d{1,15})  ")
_FIELD = re.compile(r"(\w+): {0,8}(\S+)")
_NAMES = {
    "loss": "loss",
    "grad_norm": "grad/norm",
    "tps": "throughput/tokens_per_s_per_device",
    "tflops": "throughput/tflops_per_device",
    "mfu": "throughput/mfu_percent",
}
_WORDS = ("step: ", "loss: ", "grad_norm: ", "memory: ", "tps: ", "tflops: ", "mfu: ")
_GROUPED = ("tps", "tflops")
"""Fields with commas between thousands."""
_DECIMALS = 4
"""Fewest decimals of a loss, in any version of torchtitan."""
_NOT_HERE = -1.0
"""Loss on a pipeline stage that does not compute it."""


def read(line: str) -> LogRecord | None:
    begin = _BEGIN.search(line)
    if begin is None:
        if sum(word in line for word in _WORDS) > 1:
            raise Unreadable("a line with words of torchtitan's metrics and no step is damaged")
        return None
    fields = dict(_FIELD.findall(line[begin.end() :]))
    last = "tps" if begin[1] else "mfu"
    if not {"loss", last} <= fields.keys() or not line.rstrip().endswith(fields[last]):
        raise Unreadable(f"torchtitan's line of step {begin[2]} is cut or damaged")
    metrics = {}
    for name, ours in _NAMES.items():
        text = fields.get(name, "N/A")
        if text == "N/A":  # mfu of a quantised model
            continue
        if name == "mfu" and not text.endswith("%"):
            raise Unreadable(f"torchtitan's line of step {begin[2]} is cut: its mfu has no percent sign")
        try:
            value = number(text.removesuffix("%").replace(",", "" if name in _GROUPED else ","))
            if name == "loss" and math.isfinite(value) and len(text.partition(".")[2]) < _DECIMALS:
                raise ValueError(f"{text[:60]!r} has fewer than {_DECIMALS} decimals")
        except ValueError as error:
            raise Unreadable(f"torchtitan's line of step {begin[2]}: {name}: {error}") from None
        if name == "loss" and value == _NOT_HERE:
            return None
        if begin[1]:
            ours = "val/loss" if name == "loss" else ours
            if parse(ours).family == "throughput":  # the speed of validation, not of training
                ours = str(Name("val", None, None, ours))
        metrics["train/loss" if ours == "loss" else ours] = value
    return LogRecord(int(begin[2]), metrics)
