"""Megatron-LM's lines (`megatron/training/training.py`: `training_log`, `evaluate_and_print_results`).

    iteration       20/     500 | consumed samples:          160 | ... | learning rate: 1.0E-04 | ...
        | lm loss: 9.874321E+00 | loss scale: 1.0 | grad norm: 2.431 | ... | number of nan iterations:   0 |
    validation loss at iteration 20 | lm loss value: 9.7E+00 | lm loss PPL: 1.6E+04 |

Megatron prints a loss only if it is at least 0, so a loss that is NaN is missing from its line. Where no
iteration of the interval was skipped, the missing loss is recorded as NaN: a run that diverged would
otherwise end with its last good value. Where iterations were skipped, a loss of exactly 0 is the mean of none
and left out. The last evaluation, `on validation set`, draws other batches than that of the same iteration,
and is `final_val/loss`; `on test set` is `test/loss`. Refused is a line that does not end in `|`.
"""

import difflib
import math
import re

from ablate.training.log_readers.lines import LogRecord, Unreadable, metric_name, number
from ablate.training.metric_names import Name

_TRAIN = re.compile(r"(?:^|\] ?| )iteration +(\d{1,15})/ *\d+ \|")
_EVALUATION = re.compile(r"validation(-\S+)? loss at iteration (\d{1,15})(?: on (validation|test) set)? \|")
_OURS = {
    "throughput per GPU (TFLOP/s/GPU)": "throughput/tflops_per_device",
    "elapsed time per iteration (ms)": "throughput/step_ms",
    "grad norm": "grad/norm",
    "learning rate": "train/lr",
    "params norm": "weights/norm",
    "loss scale": "train/loss_scale",
    "number of skipped iterations": "train/skipped_iterations",
    "number of nan iterations": "train/nan_iterations",
    "consumed samples": "train/samples",
}
_WORDS = (
    "consumed samples:",
    "elapsed time per iteration",
    "learning rate:",
    "lm loss",
    "grad norm:",
    "PPL:",
)
_LEFT_OUT = ("global batch size", "num zeros", "skipped samples")
_SETS = {None: "val", "validation": "final_val", "test": "test"}


def read(line: str) -> LogRecord | None:
    train, evaluation = _TRAIN.search(line), _EVALUATION.search(line)
    form = train or evaluation
    if form is None:
        if sum(word in line for word in _WORDS) > 1:
            raise Unreadable("a line with words of Megatron's metrics and no iteration is damaged")
        return None
    step = int(form[1] if train else form[2])
    body = line[form.end() :].rstrip()
    if not body.endswith("|") or (train and "number of nan iterations:" not in body):
        raise Unreadable(f"Megatron's line of iteration {step} is cut")
    metrics: dict[str, float] = {}
    for field in body.removesuffix("|").split("|"):
        name, colon, text = (part.strip() for part in field.partition(":"))
        if not colon or name in _LEFT_OUT:
            continue
        try:
            metrics[name] = number(text)
        except ValueError as error:
            raise Unreadable(f"Megatron's line of iteration {step}: {name}: {error}") from None
    return LogRecord(step, _training(metrics) if train else _evaluation(metrics, form[1], form[3]))


def _ours(name: str) -> str:
    """Return the name of a metric for Megatron's: our own, or its words in the family of training."""
    if name == "lm loss":
        return metric_name(name)
    return _OURS.get(name) or str(Name("train", None, None, _word(name)))


def _training(fields: dict[str, float]) -> dict[str, float]:
    metrics = {_ours(name): value for name, value in fields.items()}
    if "lm loss" not in fields and difflib.get_close_matches("lm loss", fields, n=1, cutoff=0.8):
        raise Unreadable("the name of the loss in Megatron's line is damaged")
    skipped = metrics.get("train/skipped_iterations", 0.0)
    if skipped and metrics.get("train/loss") == 0.0:
        del metrics["train/loss"]
    if "train/loss" not in metrics and (not skipped or metrics.get("train/nan_iterations")):
        metrics["train/loss"] = math.nan
    return metrics


def _word(name: str) -> str:
    return "".join(character if character.isalnum() or character in "_-." else "_" for character in name)


def _evaluation(fields: dict[str, float], suffix: str | None, which: str | None) -> dict[str, float]:
    family = f"{_SETS[which]}{f'/{_word(suffix[1:])}' if suffix else ''}"
    metrics = {}
    for name, value in fields.items():
        kind = _word(name.removesuffix(" value").removesuffix(" PPL").removeprefix("lm "))
        if name.endswith(" PPL"):
            kind = "perplexity" if kind == "loss" else f"{kind}_perplexity"
        metrics[f"{family}/{kind}"] = value
    return metrics
