"""Lightning's `metrics.csv`, which its CSVLogger writes; not its progress bar.

    epoch,step,train_loss,val_loss
    0,49,2.31,
    0,99,2.12,
    0,99,,2.25

Lightning numbers steps from 0, so a row of step 49 is of 50 steps done, and is recorded as step 50. A column
is empty in rows of another kind. The progress bar shows three significant digits of a metric and no optimizer
step, so it is refused: use CSVLogger, or the callback of this package.
"""

import csv

from ablate.training.log_readers.lines import LogRecord, Unreadable, metric_name, number

PROGRESS_BAR = (
    "Lightning's progress bar shows three digits and no step; read metrics.csv of its CSVLogger, or add the"
    " callback ablate.integrations.LightningCallback"
)


class MetricsRows:
    """Reader of the rows of one metrics.csv, its header first."""

    def __init__(self) -> None:
        self._names: list[str] | None = None
        self._broken = False

    def __call__(self, line: str) -> LogRecord | None:
        if self._broken:
            raise Unreadable("a row without a header")
        if not line.strip():
            return None
        try:
            (cells,) = csv.reader([line], strict=True)
        except (csv.Error, ValueError) as error:
            raise Unreadable(f"not a row of Lightning's metrics.csv: {error}") from None
        if self._names is None:
            if "step" not in cells or len({*cells}) < len(cells):
                self._broken = True
                raise Unreadable(f"not the header of Lightning's metrics.csv; {PROGRESS_BAR}")
            self._names = cells
            return None
        if len(cells) != len(self._names):
            raise Unreadable(f"a row of {len(cells)} cells under a header of {len(self._names)}")
        row = dict(zip(self._names, cells, strict=True))
        step = row.pop("step")
        if not (step.isascii() and step.isdigit()):
            raise Unreadable(f"the step {step[:60]!r} is not a whole number")
        row.pop("epoch", None)
        try:
            values = {metric_name(name): number(text) for name, text in row.items() if text}
        except ValueError as error:
            raise Unreadable(f"the row of step {step}: {error}") from None
        return LogRecord(int(step) + 1, values) if values else None
