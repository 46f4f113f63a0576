"""Facts about a sweep that its ledger keeps beside arms and records, so that reports need no experiment file.

A fact is a row, key and text. Keys, and what becomes of the texts, stand here alone:

    ledger.facts.question           # "" if it was never set
    ledger.facts.ended = "done"     # writes the row

A row is read when its field is: another process may have written it since, and what shows the question needs
no readable design. A new fact is a field whose reader takes None, since older ledgers lack the row.
"""

import json
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import TYPE_CHECKING, Any, Generic, TypeVar

if TYPE_CHECKING:
    from ablate.experiment.schema import Asked, Constraint, Design, Map, Metric, Published

T = TypeVar("T")


class Fact(Generic[T]):
    """Field of `SweepFacts`: a key, and functions from a text (None without a row) to a value and back."""

    def __init__(self, key: str, read: Callable[[str | None], T], write: Callable[[T], str | None]) -> None:
        self._key, self._read, self._write = key, read, write

    def __get__(self, facts: "SweepFacts", owner: type) -> T:
        return self._read(facts.text_of(self._key))

    def __set__(self, facts: "SweepFacts", value: T) -> None:
        facts.describe(**{self._key: self._write(value)})


def _text(key: str, missing: str = "") -> Fact[str]:
    return Fact(key, lambda text: text or missing, str)


def _or_none(key: str) -> Fact[str | None]:
    return Fact(key, lambda text: text, lambda text: text)


def _json(
    key: str,
    missing: str,
    read: Callable[[Any], Any] = lambda value: value,
    write: Callable[[Any], object] = lambda value: value,
    indent: int | None = None,
) -> Fact[Any]:
    return Fact(
        key,
        lambda text: read(json.loads(text or missing)),
        lambda value: json.dumps(write(value), indent=indent),
    )


def _names(key: str) -> Fact[set[str] | None]:
    return _json(key, "null", lambda names: None if names is None else set(names), sorted)


def _keys() -> ModuleType:
    from ablate.experiment import schema  # takes longer to import than `ablate stop` takes

    return schema


def _part(key: str, kind: str) -> Fact[Any]:
    return Fact(
        key,
        lambda text: getattr(_keys(), kind).model_validate_json(text, strict=False) if text else None,
        lambda part: part.model_dump_json() if part else "",
    )


def _parts(key: str, kind: str) -> Fact[Any]:
    return _json(
        key,
        "[]",
        lambda parts: [getattr(_keys(), kind).model_validate(part) for part in parts],
        lambda parts: [part.model_dump() for part in parts],
    )


class SweepFacts:
    """Facts in one ledger, which reads a text by its key and writes texts."""

    def __init__(self, text_of: Callable[[str], str | None], describe: Callable[..., None]) -> None:
        self.text_of, self.describe = text_of, describe

    name = _text("name")
    file = _text("file")
    """Path of the experiment's file, as it was given."""
    text = _or_none("experiment.yaml")
    """Text of that file."""
    question = _text("question")
    interval = _text("interval", "t")
    """Kind of the intervals, as `results.intervals` parses it."""
    search = _text("search")
    """Sampler; empty for a grid."""
    design: "Fact[Design | None]" = _part("design", "Design")
    """Design of the forks; None for full runs."""
    map: "Fact[Map | None]" = _part("map", "Map")
    """Cells that the file maps; None for another kind of experiment."""
    answer: "Fact[Asked | None]" = _part("answer", "Asked")
    """The comparison, or family, that the file says its question is about; None if it does not say."""
    metric: "Fact[Metric]" = Fact(
        "metric",
        lambda text: _keys().Metric.model_validate_json(text or "{}"),
        lambda metric: metric.model_dump_json(),
    )
    compared: "Fact[Sequence[Metric]]" = _parts("compared", "Metric")
    """All metrics by which arms are compared, or none in a ledger of one; read `all_metrics`."""
    metrics: Fact[Sequence[str]] = _json("metrics", "[]")
    """Names of these metrics."""
    blame: Fact[dict[str, Any]] = _json("blame", "{}")
    """Design of the search for a cause, and the names of its units and arms; empty without one."""
    constraints: "Fact[Sequence[Constraint]]" = _parts("constraints", "Constraint")
    """Limits that the arms of a search keep or break."""
    published: "Fact[Sequence[Published]]" = _parts("published", "Published")
    """Published figures that the file quotes."""
    covered: Fact[float | None] = Fact(
        "covered",
        lambda text: float(text) if text else None,
        lambda share: "" if share is None else f"{share:.4f}",
    )
    """Smallest share of the weights of a model's matrices, without embeddings, in layers that a recipe
    quantises; None if the model has no other matrices, or is not known."""
    registered: Fact[Sequence[dict[str, Any]]] = _json("registered", "[]")
    """Fields of the registrations, the first one first."""

    same_code: Fact[Sequence[tuple[float, int]]] = _json("same_code", "[]")
    """Unix time and number of trials of each time that edited code was declared to compute the same."""
    judged = _or_none("judged")
    """Origin of runs that were not started here (judged.py)."""

    id = _or_none("id")
    edition = _or_none("edition")
    """Hexadecimal digits that are drawn again when recorded values change."""
    provenance: Fact[dict[str, Any]] = _json("provenance.json", "{}", indent=1)
    """Commit, versions and hardware of the machine that last ran the sweep; empty before a run."""
    diff = _text("uncommitted.diff")
    """Changes to that commit."""
    ended = _or_none("ended")
    """Status with which the last run ended; empty during one."""
    left: Fact[tuple[float, float | None]] = _json("left", "[0, null]")
    """Unix time of the controller's last estimate, and the seconds left then; None if unknown."""
    shared = _names("shared")
    """Names of the states that trials may start from; None before any is queued."""
    trunks = _names("trunks")
    """Names of the states at which windows leave their trunks; None before any is queued."""
    warm: Fact[dict[str, Any]] = _json("warm", "{}")
    """The arms that a search starts with (`arms`), and the keys that they were read for (`of`)."""

    mlflow = _or_none("mlflow")
    """Digest of the address."""
    mlflow_parent = _or_none("mlflow_parent")
    """Id of the sweep's run."""
    mlflow_experiment = _or_none("mlflow_experiment")
    mlflow_discarded: Fact[list[tuple[str, int, str]]] = _json(
        "mlflow_discarded", "[]", lambda runs: [(trial, ms, *(key or [""])) for trial, ms, *key in runs]
    )
    """Runs to remove: a trial's id, the moment (ms) before which they began, a member's key or "" for all."""

    @property
    def all_metrics(self) -> "Sequence[Metric]":
        """All metrics by which arms are compared, the main one first."""
        return self.compared or [self.metric]

    @property
    def uncommitted(self) -> int:
        """Number of lines of the diff."""
        return len(self.diff.splitlines())

    def data(self, fingerprint: str) -> Any:
        """Return what is known about the data with a fingerprint; None if nothing is."""
        return json.loads(self.text_of(f"data:{fingerprint}") or "null")

    def add_data(self, fingerprint: str, known: object) -> None:
        """Write what is known about the data with a fingerprint."""
        self.describe(**{f"data:{fingerprint}": json.dumps(known)})
