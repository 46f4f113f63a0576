"""Run of the kit: all properties of a subject, and the findings."""

from ablate.verification.conformance.examination import (
    Examination,
    NotApplicableError,
    RefusedError,
)
from ablate.verification.conformance.properties.property import Property
from ablate.verification.conformance.result import Outcome, Row


def examined(bench: Examination, one: Property) -> Row:
    """Return the row of one property. A subject that raises has a row that failed, with its error."""
    try:
        return one.examine(bench)
    except NotApplicableError as reason:
        return Row(one.name, Outcome.NOT_APPLICABLE, detail=str(reason))
    except RefusedError as error:
        return Row(one.name, Outcome.FAIL, 1, 1, detail=str(error))
