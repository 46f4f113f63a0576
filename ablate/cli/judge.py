"""`ablate judge X --against A`: verdicts on runs that were not started here."""

import re
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Literal

import typer
from rich.text import Text

from ablate.cli.answer_view import MOST_LINES, print_lines
from ablate.cli.common import DONE, console, print_starting
from ablate.cli.options import Flags, JsonOption
from ablate.cli.report import make
from ablate.errors import InputError, brief, one_line
from ablate.judging.answer import judgement_of, metric_of_text, named_columns
from ablate.judging.chosen_runs import Question
from ablate.judging.judged_ledger import add_to_sweep, write_ledger
from ablate.judging.proposal import gate_runs
from ablate.judging.run import Found
from ablate.judging.sources import read
from ablate.store.checked_ledger import open_ledger
from ablate.training.log_readers import READERS

_STATUSES = {"keep": DONE, "discard": 3, "run again": 4}
"""Exit status of a gate by its decision."""
_NOTES = 8
"""Largest number of notes below the answer."""


@dataclass(frozen=True)
class ReadingFlags:
    """Options on how the runs are read.

    Args:
        column: Column of the arm, seed, step or run: arm=recipe.
        name: Pattern of a run's name with arm and seed: {arm}-s{seed}.
    """

    column: Annotated[list[str] | None, typer.Option(metavar="ROLE=NAME")] = None
    name: str | None = None
    logs: Annotated[
        str | None,
        typer.Option(help=f"Format of logs: {', '.join(READERS)}, hf:10 (logging_steps), regex:EXPRESSION."),
    ] = None

    def read(self, places: list[str], asked: "QuestionFlags") -> Found:
        """Return the runs of all places; InputError for a column without a role."""
        roles = {"name": self.name} if self.name else {}
        for text in self.column or ():
            role, equals, named = text.partition("=")
            if not equals:
                raise InputError(f"--column {one_line(text)}: give a role and a column, such as arm={text}")
            roles[role] = named
        return read(places, named_columns(roles, asked.metric, asked.without or ()), logs=self.logs)


@dataclass(frozen=True)
class QuestionFlags:
    """Options on what is compared.

    Args:
        against: Arm that the others are compared with.
        metric: Metric, or METRIC=COLUMN; its last value counts. Default: val/loss, if there.
        min_effect: Smallest difference that matters: 0.005, or 0.1% of the baseline.
        maximize: Better direction; default: by its name.
        ignore: Field that may differ between runs of an arm.
        without: Run that ended early, to be left out; the report says so. Repeatable.
        at: Step to compare; default: the last one that most runs have.
    """

    against: str | None = None
    metric: str | None = None
    min_effect: str | None = None
    maximize: Annotated[bool | None, typer.Option("--maximize/--minimize")] = None
    ignore: Annotated[list[str] | None, typer.Option(metavar="FIELD")] = None

    without: Annotated[list[str] | None, typer.Option(metavar="RUN")] = None
    at: Annotated[int | None, typer.Option(metavar="STEP")] = None

    def question(self, floor: str | None = None) -> Question:
        """Return the question to runs; `floor`: arm with reruns of one configuration."""
        against, metric = self.against or "", metric_of_text(self.metric)
        direction: Literal["minimize", "maximize"] | None = "maximize" if self.maximize else "minimize"
        direction = None if self.maximize is None else direction
        ignored, without = self.ignore or (), self.without or ()
        return Question(against, metric, self.min_effect, direction, ignored, without, floor, self.at)


@dataclass(frozen=True)
class GateFlags:
    """Options of a gate for a loop of proposals.

    Args:
        gate: Keep, discard (exit status 3) or run again (4) the one arm beside --against and --floor.
        history: File with all proposals that the gate has judged; begun if missing.
        floor: Arm with reruns of one configuration, whose spread is stated; a gate needs 16 at first.
        proposals: Number of proposals to come, declared at the start; default: 50.
        token: Token that an earlier decision printed; finds a replaced history.
    """

    gate: bool = False
    history: Path | None = None
    floor: str | None = None
    proposals: int | None = None
    token: str = ""


def judge(
    places: Annotated[list[str], typer.Argument(metavar="X...")],
    flags: Flags,
    reading: ReadingFlags,
    asked: QuestionFlags,
    gated: GateFlags,
    kept: Annotated[str | None, typer.Option("--as")] = None,
    into: Annotated[str | None, typer.Option(metavar="SWEEP")] = None,
    report: bool = True,
    as_json: JsonOption = False,
) -> None:
    """Judge runs that were not started here: the answer, table and report of a sweep.

    Verdicts need three runs an arm; they are paired if arms share seeds.

    Args:
        places: Files, folders or addresses with runs: CSV, parquet, JSON lines, W&B, MLflow, TensorBoard,
          logs. A path may be a pattern: logs/{arm}/seed{seed}.log.
        kept: Name in the state folder, or of the proposal; default: of the first file, of its arm.
        into: Add the runs to this sweep's report, as arms not started here.
        report: Write the report.
    """
    given = [option for option in ("history", "proposals", "token") if getattr(gated, option)]
    if given and not gated.gate:
        raise InputError(f"--{given[0]} belongs to a gate: add --gate")
    if gated.gate and not gated.history:
        raise InputError("--gate needs --history FILE, the file with all proposals of the loop")
    if asked.against is None and into is None:
        raise InputError("--against is needed: the arm that the others are compared with, such as bf16")
    settings = flags.settings()
    title = (into if into is not None else kept) or ""
    if into is None and kept is None and not gated.gate:
        title = _title(places[0])
    print_starting(f"reading {', '.join(places[:3])}", as_json)
    if gated.gate and asked.without:
        raise InputError("--without: a gate counts every run; run the short one again")
    found = reading.read(places, asked)
    if gated.gate:
        raise typer.Exit(_gate(found, asked, gated, kept or "", as_json))
    write = write_ledger if into is None else add_to_sweep
    said = [*found.said, *write(settings.state, title, found, asked.question(gated.floor))]
    screen = console(as_json)
    if as_json:
        with closing(open_ledger(settings.state, title)) as ledger:
            screen.document(judgement_of(ledger, said).document())
        return
    from ablate.reports.answer import Answer  # pandas

    screen.lines(*map(one_line, said), style="dim")
    with closing(open_ledger(settings.state, title)) as ledger:
        answer = Answer(ledger)
        answer.answer = print_lines(answer, screen, MOST_LINES)
        for note in [check for check in answer.answer.checks if check.kind == "note"][:_NOTES]:
            screen.print(f"Note: {one_line(note.text)}.", style="dim")
        if report:
            screen.lines(f"Report: {make(settings.state, title, answer=answer).index}")


def _gate(found: Found, asked: QuestionFlags, gated: GateFlags, proposal: str, as_json: bool) -> int:
    assert gated.history
    judged, said = gate_runs(
        found.runs, asked.question(), gated.history, gated.floor, gated.proposals, gated.token, proposal
    )
    screen = console(as_json)
    screen.document(judged.document() | {"said": [*found.said, *said]})
    screen.lines(*map(one_line, (*found.said, *said)), style="dim")
    colour = {"keep": "green", "discard": "red"}.get(judged.word, "yellow")
    word, _, rest = one_line(judged.sentence).partition(" ")
    screen.print(Text.assemble((word, f"bold {colour}"), " ", rest))
    place = f"Proposal {judged.number} of {judged.proposals}, {judged.proposal}"
    screen.lines(f"{place}; history {gated.history}, token {judged.token}", style="dim")
    return _STATUSES[judged.word]


def _title(place: str) -> str:
    """Return a name for runs of a place: letters, digits and `_ . -` of its last part."""
    for part in (Path(place.rstrip("/*")).stem, Path(place).parent.name):
        if title := re.sub(r"[^\w.-]+", "_", re.sub(r"\{\w+\}", "", part)).strip("_.-"):
            return title
    raise InputError(f"--as NAME is needed: {brief(place)} has no name of its own")
