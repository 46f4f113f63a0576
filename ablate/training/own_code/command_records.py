"""Records of a trial from the lines of JSON that a user's command writes."""

import json
import math
from collections.abc import Iterable, Iterator
from contextlib import redirect_stdout, suppress
from operator import itemgetter

from ablate.training.guard import STEP, Watch
from ablate.training.log_readers import LineReader, Unreadable
from ablate.training.loop import Record
from ablate.training.metric_names import ARITHMETIC, ENDINGS, FIRST_NONFINITE, GUARD_STOPPED
from ablate.training.own_code.command_process import Line
from ablate.training.own_code.process_environment import ACKNOWLEDGEMENT

REMEDY = (
    "read the recipe from the JSON file that ABLATE_RECIPE names and confirm it: ablate.convert(model,"
    ' ablate.recipe()) does both; other code prints one line {"ablate/recipe": "<hash>"} before its first'
    " metrics, where <hash> is the first 16 hex digits of the file's SHA-256"
)


class _LogLines:
    """Metrics in the lines that a training stack prints, each line printed again, which is the log.

    A stack that restarts within the command repeats steps, and several ranks print a step each: the first
    version of a step counts, as everywhere here. Two values of one metric at the latest step are refused,
    since no rank is right.
    """

    def __init__(self, reader: LineReader) -> None:
        self._reader = reader
        self._step = 0
        self._values: dict[str, float] = {}
        self._repeated = False

    def content(self, text: str) -> dict[str, object] | None:
        """Return step and metrics of a line; None for any other line. RuntimeError if the latest step has
        another value."""
        try:
            record = self._reader(text)
        except Unreadable as error:
            print(f"left out: {error}", flush=True)
            return None
        if record is None or record.step < 1:
            return None
        if record.step < self._step:
            if not self._repeated:
                print(f"step {record.step} after step {self._step}: its first version counts", flush=True)
                self._repeated = True
            return None
        if record.step > self._step:
            self._step, self._values = record.step, {}
        for name, value in record.metrics.items():
            before = self._values.setdefault(name, value)
            if before != value and not (math.isnan(before) and math.isnan(value)):
                raise RuntimeError(
                    f"the command logged {name} twice at step {record.step}, {before!r} and {value!r}; print"
                    " from one rank only"
                )
        print(text, flush=True)
        return {"step": record.step, **record.metrics}


class CommandRecords:
    """Parser of a command's lines. Metrics of one step are one record, which ends when the next step begins.

    The command has to confirm the recipe of hash `expected`, if any, unless it got it in the form of its own
    stack (`exported`). With `printed`, lines of standard output may be metrics. `processor` is the number of
    the kind of processor on which the command runs.
    """

    def __init__(
        self,
        expected: str | None,
        exported: bool,
        printed: bool,
        steps: int,
        tokens_per_step: int,
        processor: float,
        watch: Watch | None = None,
    ) -> None:
        self._expected, self._printed, self._processor = expected, printed, processor
        self._steps, self._tokens = steps, tokens_per_step
        self._watch, self._verdict = watch, STEP
        self._needs_none = expected is None or exported
        self._step = 0
        self._metrics: dict[str, float] = {}
        self._confirmed_before = self.confirmed = False
        """True once the recipe is confirmed: by an earlier run, by this one."""
        self.begin(None)

    def begin(self, reader: LineReader | None) -> None:
        """Begin with a run, which may repeat steps of earlier ones: their first version counts. The reader
        reads metrics in other lines of standard output; without it only JSON counts."""
        self._log = _LogLines(reader) if reader else None
        self._latest: dict[bool, int] = {}
        """Latest step of each source: file or standard output."""
        self._before = self._step
        """Latest step of the runs before."""
        self._confirmed_before |= self.confirmed
        self.confirmed = self._needs_none

    def again(self, batches: Iterable[Iterable[Line]], reader: LineReader | None) -> Iterator[Record]:
        """Yield the records of an earlier run, up to what was refused then. Its log has its other lines."""
        self.begin(reader)
        records: list[Record] = []
        with suppress(RuntimeError), redirect_stdout(None):
            for batch in batches:
                records.extend(self.add(batch))
                if self.diverged:
                    break
        yield from records

    def add(self, batch: Iterable[Line]) -> Iterator[Record]:
        """Yield the records that a batch of lines completes. Other lines are printed, which is the log.
        RuntimeError if metrics come before the recipe was confirmed, another recipe is confirmed, or a step
        is not possible."""
        lines = [(line, self._parsed(line)) for line in batch]
        for line, content in lines:
            if content is None:
                print(line.text, flush=True)
            elif ACKNOWLEDGEMENT in content:
                confirmed, expected = content[ACKNOWLEDGEMENT], self._expected
                if expected is not None and confirmed != expected:
                    raise RuntimeError(
                        f"the command confirms recipe {confirmed!r}, and the arm's is {expected!r}; {REMEDY}"
                    )
                self.confirmed = True
        logged = [
            self._ordered(content, line)
            for line, content in lines
            if content and ACKNOWLEDGEMENT not in content
        ]
        if logged and not self.confirmed:
            raise RuntimeError(f"the command logged metrics without confirming the recipe; {REMEDY}")
        for step, metrics in sorted(logged, key=itemgetter(0)):  # of the file and of standard output
            yield from self._note(step, metrics)
            if self.diverged:
                return

    def finish(self) -> Iterator[Record]:
        """Yield the last record, after the command has ended. RuntimeError if there is none, or no recipe was
        confirmed."""
        if not (self.confirmed or self._confirmed_before):
            raise RuntimeError(f"the command ended without confirming the recipe; {REMEDY}")
        if not self._step:
            if self._log:
                raise RuntimeError("the command ended without a line of metrics of the format in `metrics`")
            where = "print it, or call ablate.log" if self._printed else "append it to ABLATE_METRICS"
            raise RuntimeError(
                'the command ended without metrics: a line is JSON such as {"step": 10, "val/loss": 2.5};'
                f" {where}"
            )
        yield self._record()

    def _parsed(self, line: Line) -> dict[str, object] | None:
        """Return the content of a line of metrics or of a confirmation; None for any other line."""
        text = line.text.strip()
        if self._log and not line.of_file and ACKNOWLEDGEMENT not in text:
            return self._log.content(line.text)
        if not text.startswith("{"):
            return None
        try:
            content = json.loads(text)
        except (ValueError, RecursionError):
            return None
        if ACKNOWLEDGEMENT in content:
            return content
        step = content.get("step")
        if not (self._printed or line.of_file) or type(step) is not int or step < 1:
            return None
        return content

    def _ordered(self, content: dict[str, object], line: Line) -> tuple[int, dict[str, object]]:
        """Return step and metrics of a line; RuntimeError if the step is not possible."""
        step = content["step"]
        assert isinstance(step, int)
        before = self._latest.get(line.of_file, 0)
        if step < before or step > self._steps:
            why = f"comes after step {before}" if step < before else f"is beyond step {self._steps}"
            remedy = (
                "" if step < before else "; give it the number of steps: {steps} in `run`, or ABLATE_STEPS"
            )
            raise RuntimeError(f"the command logged step {step}, which {why}{remedy}: {line.text[:200]}")
        self._latest[line.of_file] = step
        return step, content

    def _note(self, step: int, content: dict[str, object]) -> Iterator[Record]:
        if step < self._before:
            return
        if step < self._step:
            raise RuntimeError(
                f"the command logged step {step} after step {self._step}, one of them in the file and one on"
                " standard output; use one of the two"
            )
        if step > self._step and self._step:
            yield self._record()
        self._step = step
        for name, value in content.items():
            if name == "step" or not name.strip() or (step == self._before and name in self._metrics):
                continue
            try:
                if isinstance(value, bool) or not isinstance(value, (int, float)):
                    raise TypeError
                self._metrics[name] = float(value)
            except (TypeError, OverflowError):
                left_out = f"{name[:100]!a} is left out, not a number that fits a float"
                print(f"step {step}: {left_out}: {ascii(value)[:200]}", flush=True)
        if not math.isfinite(self._metrics.get("train/loss", 0.0)):
            self._metrics[FIRST_NONFINITE] = float(step)
        elif self._watch and "train/loss" in content and "train/loss" in self._metrics:
            self._verdict = self._watch.judge(self._metrics["train/loss"], 0.0)
            self._metrics |= {GUARD_STOPPED: float(step)} if self._verdict.cause else {}

    def _record(self) -> Record:
        metrics, self._metrics = self._metrics, {}
        metrics.setdefault("tokens", float(self._step * self._tokens))
        metrics[ARITHMETIC] = self._processor
        return Record(self._step, metrics, self._verdict if self._verdict.cause else None)

    @property
    def diverged(self) -> bool:
        """True if the latest step's train/loss is not finite, or too large: the trial is over."""
        return not ENDINGS.isdisjoint(self._metrics)
