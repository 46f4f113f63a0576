"""Logs of Hugging Face's Trainer: the dicts that it prints, and its `trainer_state.json`.

    {'loss': '2.145', 'grad_norm': '1.032', 'learning_rate': '4.5e-05', 'epoch': '0.5'}
    {'eval_loss': '2.201', 'eval_runtime': '0.41', 'eval_samples_per_second': '97.2', 'epoch': '0.5'}

A printed dict has no step. If the user says `logging_steps`, the n-th dict with a loss is that of step
n * logging_steps, and an evaluation is that of the step at its epoch. The printed epochs must agree, which a
run that was resumed, `logging_first_step`, or the lines of several ranks would not; such a log is refused.
Transformers 5 prints four significant digits. `trainer_state.json`, which each checkpoint has, holds step and
all digits, and is read without such doubts.
"""

import json
import math
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from ablate.training.log_readers.lines import LogRecord, Unreadable, metric_name, number
from ablate.training.metric_names import Name

NO_STEP = (
    "the dicts that Hugging Face's Trainer prints have no step: give logging_steps, as the Trainer has it, or"
    " read trainer_state.json of its last checkpoint"
)
_DICT = re.compile(r"\{'\w[^']*': .*\}")
_PAIR = re.compile(r"'([^']+)': (?:'([^']*)'|([^,{}\s]+))(?:, |$)")
_OF_MACHINE = ("_runtime", "_per_second", "_flos", "_time")
_LEFT_OUT = ("epoch", "step", "total_flos", "train_loss", "num_input_tokens_seen")
"""Keys that are not metrics of a step; `train_loss` is the mean over the whole run, printed at its end."""


class PrintedDicts:
    """Reader of the dicts of one run, in their order, with `logging_steps` between two that have a loss."""

    def __init__(self, logging_steps: int) -> None:
        self._every = logging_steps
        self._step = 0
        self._broken = False
        self._epoch = _Epoch(0.0, 0.0)

    def __call__(self, line: str) -> LogRecord | None:
        text = line.strip()
        if not text.startswith("{'") and "'epoch'" not in text:
            return None
        if self._broken or not _DICT.fullmatch(text):
            self._broken = True
            raise Unreadable(
                "a dict of Hugging Face's Trainer is cut or damaged; those behind cannot be counted"
            )
        pairs = {name: quoted or bare for name, quoted, bare in _PAIR.findall(text[1:-1])}
        try:
            metrics = _metrics(pairs)
            if not metrics or "epoch" not in pairs:
                return None
            epoch = _Epoch.of(pairs["epoch"], f"'epoch': '{pairs['epoch']}'" in text)
            return LogRecord(self._train(epoch) if "loss" in pairs else self._evaluation(epoch), metrics)
        except ValueError as error:
            self._broken = True
            raise Unreadable(f"the dict of Hugging Face's Trainer: {error}") from None

    def _train(self, epoch: "_Epoch") -> int:
        step = self._step + self._every
        if self._step and epoch.value == self._epoch.value:
            return self._step
        if self._step:
            expected = epoch.value * self._step / self._epoch.value
            doubt = step * (epoch.doubt + self._epoch.doubt)
            if doubt >= self._every / 2:
                raise Unreadable(f"at step {step}, the printed epochs no longer tell steps apart; {NO_STEP}")
            if abs(expected - step) >= self._every / 4 + doubt:
                raise Unreadable(
                    f"epoch {epoch.value:g} is about step {expected:.0f}, and not {step} as one dict each"
                    f" {self._every} steps gives; {NO_STEP}"
                )
        elif not epoch.value > 0:
            raise Unreadable(f"epoch {epoch.value:g} of the first dict is not above 0")
        self._step, self._epoch = step, epoch
        return step

    def _evaluation(self, epoch: "_Epoch") -> int:
        if epoch.value == self._epoch.value:
            return self._step
        if not self._step:
            raise Unreadable(f"an evaluation at epoch {epoch.value:g}, before any loss, is of no known step")
        position = epoch.value * self._step / self._epoch.value
        doubt = position * (epoch.doubt + self._epoch.doubt)
        if not doubt < 0.5 or doubt + abs(position - round(position)) >= 0.5:  # nor is infinity rounded
            raise Unreadable(f"the evaluation at epoch {epoch.value:g} may be of several steps; {NO_STEP}")
        return round(position)


@dataclass(frozen=True)
class _Epoch:
    """A printed epoch, and the largest relative error of its rounding.

    Transformers 5 prints text of four significant digits; 4 a number, in some versions of two decimals.
    """

    value: float
    doubt: float

    @classmethod
    def of(cls, text: str, quoted: bool) -> "_Epoch":
        value = number(text)
        if not 0 <= value < math.inf:
            raise ValueError(f"the epoch {text!r} is not a number from 0")
        decimals = len(text.partition(".")[2])
        half = 0.5 * (10.0 ** (math.floor(math.log10(value)) - 3) if quoted and value else 10.0**-decimals)
        return cls(value, (half if quoted or decimals > 2 else 0.005) / value if value else 0.0)


def state_records(text: str) -> Iterator[LogRecord]:
    """Yield the records of a `trainer_state.json`. Unreadable if it is not one."""
    try:
        history = json.loads(text)["log_history"]
        for entry in history:
            fields = {name: value for name, value in entry.items() if not isinstance(value, bool)}
            if metrics := _metrics({name: repr(value) for name, value in fields.items()}):
                if type(fields["step"]) is not int or fields["step"] < 0:
                    raise ValueError(f"the step {fields['step']!r} is not a whole number")
                yield LogRecord(fields["step"], metrics)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise Unreadable(f"this is not a trainer_state.json: {type(error).__name__}: {error}") from None


def _metrics(fields: Mapping[str, str]) -> dict[str, float]:
    """Return the metrics of a dict, by their names here. Values that are not numbers are left out."""
    metrics = {}
    if "train_runtime" in fields:  # the summary at the end, of no step
        return {}
    for name, text in fields.items():
        if name in _LEFT_OUT or name.endswith(_OF_MACHINE):
            continue
        try:
            if text.startswith("."):  # Python prints a digit before the point, so one was lost
                raise ValueError(f"{text[:60]!r} has lost its first digit")
            value = number(text)
        except ValueError:
            if metric_name(name) != name:
                raise
            continue
        ours = metric_name(name)
        if ours == name and "/" not in name:
            family = "val" if name.startswith("eval_") else "train"
            ours = str(Name(family, None, None, name.removeprefix("eval_")))
        metrics[ours] = value
    return metrics
