"""Verdicts on runs that were not started here, for Python and as JSON: `ablate.judge`."""

import tempfile
from collections.abc import Iterator, Mapping, Sequence, Sized
from contextlib import closing
from dataclasses import dataclass
from numbers import Real
from pathlib import Path
from typing import TYPE_CHECKING, Literal, Union, get_args

from ablate.errors import InputError, brief, nearest
from ablate.files import Json, finite
from ablate.judging import cells
from ablate.judging.chosen_runs import Question
from ablate.judging.columns import USUAL, Columns, metric_name
from ablate.judging.judged_ledger import write_ledger
from ablate.judging.run import ForeignRun, Found
from ablate.judging.sources import each_once, read
from ablate.judging.table_files import plain_cells, require_distinct
from ablate.judging.tables import Table, runs_of
from ablate.results.comparisons import Comparisons
from ablate.results.headline import headline_of
from ablate.results.verdict_text import verdict_document
from ablate.store.ledger import Ledger

if TYPE_CHECKING:
    import pandas as pd

Direction = Literal["minimize", "maximize"]
Runs = Union[  # pandas takes half a second to import
    str, Path, Sequence[str | Path], "pd.DataFrame", Mapping[str, Mapping[int, float] | Sequence[float]]
]


@dataclass(frozen=True)
class ArmVerdict:
    """One arm beside the baseline."""

    arm: str
    mean: float
    """Mean of the last values of its runs; NaN without one."""
    runs: int
    """Runs with a finite last value."""
    difference: float
    """Its mean minus that of the baseline; over common seeds if it is paired. NaN if there is none."""
    low: float
    high: float
    """Bounds of its 95 % interval; NaN if there is none."""
    paired: bool
    verdict: Mapping[str, Json]
    """Kind, reason, p-values and text, as in `--json` of `ablate status`."""


@dataclass(frozen=True)
class Judgement:
    """Answer on runs that were not started here."""

    answer: str
    """The answer in a sentence."""
    answered: bool
    """True if every comparison is decided and no check failed."""
    arms: Sequence[ArmVerdict]
    """Every arm but the baseline."""
    checks: Sequence[tuple[str, str]]
    """Kind (`passed`, `warning`, `failed`, `note`) and text of each check."""
    said: Sequence[str]
    """Sentences on what was guessed or left out."""

    def document(self) -> dict[str, Json]:
        """Return it as JSON data; a number that is not finite is null."""
        checks = [{"kind": kind, "text": text} for kind, text in self.checks]
        return finite(vars(self) | {"arms": list(map(vars, self.arms)), "checks": checks})


def judgement_of(ledger: Ledger, said: Sequence[str]) -> Judgement:
    """Return the answer that a ledger of judged runs supports, with what was said of reading them."""
    sweep = Comparisons(ledger)
    headline = headline_of(sweep)
    arms = [
        ArmVerdict(
            *(arm.name, arm.mean, len(arm.values), gap.mean, gap.low, gap.high, gap.sides is None),
            verdict_document(arm.verdict),
        )
        for arm in sweep.arms
        if (gap := arm.gap) is not None
    ]
    checks = [(check.kind, check.text) for check in headline.checks]
    return Judgement(headline.sentence, headline.answered, arms, checks, list(said))


def judge(
    runs: Runs,
    against: str,
    metric: str | None = None,
    min_effect: float | str | None = None,
    direction: Direction | None = None,
    columns: Mapping[str, str] | None = None,
    ignore: Sequence[str] = (),
    without: Sequence[str] = (),
    at: int | None = None,
) -> Judgement:
    """Return verdicts on runs that were not started here, by the statistics of a sweep.

    Args:
        runs: Files or folders as for `ablate judge`; a table of them with a row a step or a run; or final
            values by arm, by seed or as a list of runs without seeds.
        against: Arm that the others are compared with.
        metric: Metric to compare by its last value; default: the usual one, such as val/loss.
        min_effect: Smallest difference that matters, in the metric's unit or as a share, `0.1%`.
        direction: `minimize` if less is better; default: by the metric's name, `maximize` for `val_acc`.
        columns: Column of `arm`, `seed`, `step` or `run`, where names are not the usual ones.
        ignore: Fields that may differ between the runs of an arm.
        without: Names of runs that ended early, to be left out; a warning names them.
        at: Step whose values are compared; default: the last one that most runs have.

    Returns:
        The answer, with a verdict on each arm. Nothing is kept.

    Raises:
        InputError: The runs cannot be read, or not be compared.

    Example:
        >>> ablate.judge({"bf16": [3.10, 3.12, 3.09], "nvfp4": [3.11, 3.14, 3.12]}, "bf16").answer
    """
    if direction not in (None, *get_args(Direction)):
        raise InputError(f"direction {direction!r}: is minimize or maximize")
    found = _given(runs, metric, named_columns(columns or {}, metric, without))
    named = metric if isinstance(runs, Mapping) else metric_of_text(metric)
    question = Question(str(against), named, min_effect, direction, tuple(ignore), tuple(without), at=at)
    with tempfile.TemporaryDirectory(prefix="ablate-judge-") as folder:
        more = write_ledger(Path(folder), "runs", found, question, files=False)
        with closing(Ledger(Path(folder) / "sweeps" / "runs" / "ledger.db", readonly=True)) as ledger:
            return judgement_of(ledger, [*found.said, *more])


def _given(runs: Runs, metric: str | None, columns: Columns) -> Found:
    if isinstance(runs, Mapping):
        if len({*map(str, runs)}) < len(runs):
            raise InputError(f"two arms have one name: {', '.join(map(repr, runs))}")
        name = metric or "value"
        made = [run for arm, values in runs.items() for run in _final_values(arm, values, name)]
        return Found(made, [], ["values given in Python"])
    if isinstance(runs, str | Path):
        runs = [runs]
    if isinstance(runs, Sequence):
        return read([str(place) for place in runs], columns)
    said: list[str] = []
    levels = [name for name in runs.index.names if name is not None]  # `to_csv` writes them as columns
    runs = runs.reset_index(levels, allow_duplicates=True)
    paths = [name if isinstance(name, tuple) else (name,) for name in runs.columns]
    names = ["/".join(filter(None, map(str, path))) for path in paths]
    require_distinct(names, "the table")
    named = runs.astype(object).where(runs.notna(), None).to_numpy().T  # as pandas writes it to a file
    table = Table(
        "the table", dict(zip(names, map(plain_cells, named), strict=True)), range(1, len(runs) + 1)
    )
    found = each_once(runs_of(table, columns, said), said)
    return Found(found, said, ["a table given in Python"])


def named_columns(columns: Mapping[str, str], metric: str | None, without: Sequence[str] = ()) -> Columns:
    """Return the columns that a user named, by role, and the pattern of names, by `name`.

    The metric is METRIC=COLUMN, or a column whose name says it. InputError for a role that does not exist.
    """
    roles = [*USUAL, "name"]
    for role in columns:
        if role not in roles:
            raise InputError(f"column {brief(role)!r}: no such role; {nearest(role, roles)}")
    name, equals, column = (metric or "").partition("=")
    metrics, asked = ({name: column}, None) if equals else (None, metric)
    return Columns(**columns, metrics=metrics, asked=asked, without=without, of_path={})


def metric_of_text(text: str | None) -> str | None:
    """Return the name that a metric has here, of METRIC or METRIC=COLUMN: `val/loss` for `eval_loss`."""
    if text is None:
        return None
    name, equals, _ = text.partition("=")
    return name if equals else metric_name(text)


def _final_values(
    arm: str, values: Mapping[int, float] | Sequence[float], metric: str
) -> Iterator[ForeignRun]:
    """Yield runs of which only the final values are known."""
    seeded = isinstance(values, Mapping)
    if isinstance(values, str) or not isinstance(values, Sized) or not len(values):  # also numpy's
        raise InputError(f"{arm}: give values by seed, or a list of values of runs")
    for number, value in values.items() if isinstance(values, Mapping) else enumerate(values):
        whole = isinstance(number, Real) and number % 1 == 0  # neither NaN nor infinite
        if not whole or not isinstance(value, Real):
            raise InputError(f"{arm}: {number}: {value!r}: a seed is a whole number, and a value a number")
        try:
            final = cells.number(+value if isinstance(value, int) else float(value))  # +: a number of True
        except (ValueError, OverflowError) as error:
            raise InputError(f"{arm}: {number}: {error}") from None
        yield ForeignRun(f"{arm} {number}", f"{arm}", int(number) if seeded else None, {metric: {0: final}})
