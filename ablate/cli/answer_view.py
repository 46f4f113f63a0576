"""Answer of a sweep in a terminal: first the headline in a few lines, on demand all tables."""

from contextlib import closing
from dataclasses import replace
from statistics import median

from rich.table import Table as RichTable
from rich.text import Text

from ablate.cli.common import Screen
from ablate.cli.plan import expected_width
from ablate.cli.settings import Settings
from ablate.errors import one_line
from ablate.experiment.load import Experiment
from ablate.experiment.schema import Metric
from ablate.reports.comparison_tables import (
    NEEDED,
    WORD,
    arm_columns,
    contrasts_table,
    published_table,
    summary_table,
)
from ablate.reports.effect_table import Line, lines
from ablate.reports.maps import grid_table
from ablate.reports.plain_text import wrapped
from ablate.reports.table import Column, Table
from ablate.reports.table_notes import emulated, reading
from ablate.results.comparisons import Comparisons
from ablate.results.contrasts import contrasts
from ablate.results.forked import estimand
from ablate.results.headline import Headline, headline_of
from ablate.results.number_text import interval
from ablate.results.published import replications
from ablate.results.sensitivity import sensitivity
from ablate.results.summary import ArmSummary, summaries
from ablate.results.unmet_phases import never_began
from ablate.store.checked_ledger import open_ledger
from ablate.store.ledger import Ledger

MOST_LINES = 12
"""Largest number of lines that a sweep prints after its end."""
MOST_CONTRASTS = 16
"""Maximum number of rows in a table."""
DISPENSABLE = ("memory", "tokens/s", "SQNR dB", "NaN")
"""Columns that are dropped in a narrow terminal, in this order."""
_MOST_ANSWER, _MOST_CHECKS, _MOST_REMEDY = 6, 3, 2
"""Largest number of lines of the answer, its checks, and what would settle it."""
_LEAST_FOR_REMEDY = 5
"""Lines below which what would settle it is left out: the command prints what went wrong there."""
_ASKED: list[Column[Line]] = [
    Column("comparison", lambda line: f"{line.group}, {line.label}".removeprefix("the question, ")),
    Column("effect", lambda line: (interval(line.difference), line.difference.mean)),
    WORD,
]
"""Columns of the comparisons that the question names."""


def print_answer(
    experiment: Experiment, settings: Settings, screen: Screen, below: int = 0, everything: bool = False
) -> None:
    """Print the answer, its checks, the comparisons that the question names and what would settle it.

    `below`: number of lines that the command prints after these, of `MOST_LINES`; `everything`: print all
    tables below instead of a few rows.
    """
    with closing(open_ledger(settings.state, experiment.name)) as ledger:
        compared = Comparisons(ledger)
        answer = print_lines(compared, screen, MOST_LINES - below, not everything)
        if everything:
            screen.print("")
            _print_tables(experiment, settings, screen, compared, answer.valid)


def print_lines(compared: Comparisons, screen: Screen, most: int, rows: bool = True) -> Headline:
    """Print the answer in at most `most` lines, and return it. `rows`: print rows of the table, too, if there
    is space."""
    answer = headline_of(compared)
    checks: list[Text] = []
    kinds = {"failed": ("Failed", "red"), "warning": ("Mind", "yellow"), "passed": ("Checked", "dim")}
    for kind, (word, style) in kinds.items():  # those that did not pass first
        if texts := [one_line(check.text) for check in answer.checks if check.kind == kind]:
            line = Text(f"{word}: {'; '.join(texts)}.", style)
            checks += wrapped(line, screen, _MOST_CHECKS - len(checks))
    remedy = _remedy(answer, screen) if most > _LEAST_FOR_REMEDY else []
    left = most - len(checks) - len(remedy)
    style = "green" if answer.answered else "red" if not answer.valid else "yellow"
    rest = one_line(" ".join(filter(None, (answer.text, answer.simplest))))
    text = Text.assemble((answer.lead, f"bold {style}"), " " if answer.lead else "", rest)
    stated = wrapped(text, screen, max(1, min(_MOST_ANSWER, left)))
    screen.print(*stated, *checks, sep="\n")
    left -= len(stated)
    if rows and left > 1 and compared.arms:
        screen.print(_few_rows(compared, answer.valid, left - 1, screen.width))
    screen.lines(*remedy)  # a command in two lines cannot be copied
    return answer


def _remedy(answer: Headline, screen: Screen) -> list[Text]:
    """Return the command that settles the question with its cost, or why there is none."""
    if answer.command:
        cost = wrapped(Text(f"{answer.cost[0].upper()}{answer.cost[1:]}:"), screen, _MOST_REMEDY - 1)
        return [*cost, Text(f"  {answer.command}")]
    return wrapped(Text(answer.settling.text), screen, _MOST_REMEDY) if answer.settling else []


def _few_rows(compared: Comparisons, valid: bool, most: int, width: int) -> RichTable:
    """Return the comparisons that the question names, else the first arms of the table, a line each. `valid`:
    False if a check failed, so that nothing may be coloured; `most`: rows; `width`: columns of the
    terminal."""
    if compared.asked_effects:
        asked = [line for line in lines(compared) if line.asked]
        colours = [line.verdict.kind for line in asked] if valid else []
        return Table("asked", asked, _ASKED, "", colours).first(most).terminal(width, cut=True)
    if found := sensitivity(compared):
        recipe = next(arm.name for arm in reversed(compared.arms) if arm.role == "listed")
        return grid_table(found, recipe).first(most).terminal(width, cut=True)
    arms, widest = _in_order(compared.arms, compared.metric, compared.ledger), width // 5
    columns = [
        replace(one, name=one.name if len(one.name) < widest else f"…{one.name[1 - widest :]}")
        for one in arm_columns(arms, compared.metric)
        if one.name not in (*DISPENSABLE, NEEDED.name)
    ]
    kinds = [arm.colour for arm in arms] if valid else []
    return Table("arms", arms, columns, "", kinds).first(most).terminal(width, cut=True)


def _in_order(arms: list[ArmSummary], metric: Metric, ledger: Ledger) -> list[ArmSummary]:
    """Return arms in the order of the file, each baseline before its arms; those of a search best first."""
    sign = 1 if metric.direction == "minimize" else -1

    def rank(arm: ArmSummary) -> tuple[bool, bool, float]:
        return arm.baseline is not None, not arm.values, sign * arm.mean

    if ledger.facts.search:
        return sorted(arms, key=rank)
    alone = {arm.name: place for place, arm in enumerate(arms) if arm.baseline is None}
    return sorted(arms, key=lambda arm: (alone.get(arm.baseline or arm.name, len(arms)), bool(arm.baseline)))


def _print_tables(
    experiment: Experiment, settings: Settings, screen: Screen, compared: Comparisons, valid: bool
) -> None:
    """Print the table of arms, the effect of each knob, and, of a valid answer, how to read them."""
    for metric in experiment.metrics:
        main = metric == compared.metric
        arms = compared.arms if main else summaries(compared.ledger, metric)
        arms = _in_order(arms, metric, compared.ledger)
        screen.print(summary_table(arms, metric).terminal(screen.width, DISPENSABLE), "")
        found = compared.contrasts if main else contrasts(arms, metric, MOST_CONTRASTS)
        if found and len(found) <= MOST_CONTRASTS:
            screen.print(contrasts_table(found).terminal(screen.width), "")
    if experiment.keys.published:
        table = published_table(replications(compared.ledger, experiment.keys.published))
        screen.print(table.terminal(), "")
    if expected := expected_width(experiment, settings.state):  # of a calibration, beside the one that came
        gaps = [arm.gap for arm in compared.arms if arm.gap and arm.gap.has_interval and arm.role != "null"]
        if gaps:
            came = median(gap.half for gap in gaps)
            screen.print(Text(f"Half-width: {came:.2g} came (median of the arms), expected was {expected}."))
    if text := how_to_read(experiment, compared.arms, valid):
        screen.print(text)
    if valid:
        screen.print(emulated(compared.ledger))
    for line in never_began(compared.ledger):
        screen.print(Text(line.replace("**", "")))
    screen.print("")


def how_to_read(experiment: Experiment, arms: list[ArmSummary], valid: bool) -> str:
    """Return a few sentences that explain the table; without a valid answer, trivial losses alone."""
    facts = experiment.base.config.summary() if experiment.metric.name == "val/loss" else {}
    entropy = facts.get("data/unigram_entropy")
    floors = [] if entropy is None else [f"A model that ignores context reaches {entropy:.2f}."]
    meaning = [estimand(experiment.keys.design, arms)] if experiment.keys.design else []
    return " ".join((*meaning, reading(arms), *floors) if valid else floors)
