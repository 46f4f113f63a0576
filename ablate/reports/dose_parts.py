"""Parts of a report on ordered knobs: a table and a sentence for each."""

from collections.abc import Mapping

from ablate.reports.page import Text
from ablate.reports.table import Cell, Table
from ablate.results.doses import Dose, sentence
from ablate.results.number_text import interval


def dose_parts(found: Mapping[str, list[Dose]]) -> list[Table | Text]:
    """Return a table and a sentence for each ordered knob.

    Args:
        found: doses by knob.
    """
    shown: list[Table | Text] = []
    for knob, values in found.items():
        rows: list[dict[str, Cell]] = [
            {
                knob: (f"{dose.value:g}", dose.value),
                "gap to baseline": (interval(dose.gap), dose.gap.mean),
                f"change from {values[0].value:g}": (interval(dose.change), dose.change.mean)
                if dose.change
                else "",
                "of the gap closed": (str(dose.closed), dose.closed.value) if dose.closed is not None else "",
            }
            for dose in values
        ]
        caption = (
            "Intervals are not corrected. Share: of the mean gap of the first value, with Fieller's 95 %"
            " interval in brackets."
        )
        shown += [Text(sentence(knob, values)), Table.of(f"doses-{knob.replace('.', '-')}", rows, caption)]
    return shown
