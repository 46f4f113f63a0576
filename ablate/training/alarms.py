"""Alarms: limits on recorded metrics beyond which something is wrong, and the alerts of one record.

Alarms are entries of registries: `operand_metrics.OPERAND_METRICS` has those of each operand of each layer,
`operand_metrics.ALARMS` has all. A trial stores the sentences of its alerts with the record; the controller
prints the first one.
"""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from ablate.training.metric_names import Name, parse


@dataclass(frozen=True)
class Alarm:
    """Limit on the metrics whose whole name matches the glob `pattern`: `quant/*/*/zero_frac` matches the
    metric of single layers."""

    pattern: str
    side: Literal["above", "below"]
    """Side of the limit on which a value is wrong. The limit itself and NaN are right."""
    limit: float
    message: str
    """Cause, as a sentence without layer and slot; `{}`, with any format, is the value."""

    def trips(self, value: float) -> bool:
        return value > self.limit if self.side == "above" else value < self.limit


@dataclass(frozen=True, repr=False)
class Alert:
    """Value beyond an alarm's limit. `str`, and `repr`, which a printed list shows, are the sentence, with
    layer and slot if the metric has them."""

    alarm: Alarm
    name: Name
    value: float

    def __str__(self) -> str:
        operand = " ".join(filter(None, (self.name.layer, self.name.slot)))
        return self.alarm.message.format(self.value) + (f" in {operand}" if operand else "")

    __repr__ = __str__


def alerts(metrics: Mapping[str, float], alarms: Iterable[Alarm]) -> list[Alert]:
    """Return the alerts of one record, in the order of the alarms; one for each alarm and slot at most, that
    of the slot's worst layer."""
    raised: list[Alert] = []
    for alarm in alarms:
        worst: dict[str | None, Alert] = {}
        for text, value in metrics.items():
            if alarm.trips(value) and _matches(alarm.pattern, text):
                name = parse(text)
                other = worst.get(name.slot)
                if other is None or (value > other.value if alarm.side == "above" else value < other.value):
                    worst[name.slot] = Alert(alarm, name, value)
        raised += worst.values()
    return raised


@lru_cache(1 << 17)
def _matches(pattern: str, text: str) -> bool:
    return parse(text).like([pattern])
