"""Answer of a sweep in a terminal: tables of arms, effects and published figures, and the headline."""

from statistics import median

from rich.console import Console
from rich.text import Text

from ablate.cli.plan import expected_width
from ablate.cli.settings import Settings
from ablate.experiment.load import Experiment
from ablate.reports.comparison_tables import contrasts_table, published_table, summary_table
from ablate.reports.table_notes import emulated, reading
from ablate.results.comparisons import Comparisons
from ablate.results.contrasts import contrasts
from ablate.results.forked import estimand
from ablate.results.headline import Headline, headline_of
from ablate.results.published import replications
from ablate.results.summary import ArmSummary, summaries
from ablate.results.unmet_phases import never_began
from ablate.store.ledger import Ledger

MOST_CONTRASTS = 16
"""Maximum number of rows in a table."""
DISPENSABLE = ("memory", "tokens/s", "SQNR dB", "NaN")
"""Columns that are dropped in a narrow terminal, in this order."""
_FLOORS = {
    "data/unigram_entropy": "A model that ignores context reaches {:.2f}.",
    "data/blank_loss": "With the masks of the data, predicting the mean of the visible values gives {:.2f}.",
}
"""Sentences below a table of losses, with the loss of a trivial model, by name of a fact about the data."""


def print_answer(experiment: Experiment, settings: Settings, screen: Console) -> None:
    """Print the answer and what to do next, the table of arms, the effect of each knob, and how to read
    them.
    """
    # Not compared with its seals: this process wrote it, and compared all that was there before.
    ledger = Ledger(settings.state / "sweeps" / experiment.name / "ledger.db", readonly=True)
    compared = Comparisons(ledger)
    for metric in experiment.metrics:
        main = metric == compared.metric
        arms = [*compared.arms] if main else summaries(ledger, metric)
        if experiment.keys.search:
            sign = 1 if metric.direction == "minimize" else -1
            arms.sort(key=lambda arm: (arm.baseline is not None, not arm.values, sign * arm.mean))
        screen.print(summary_table(arms, metric).terminal(screen.width, DISPENSABLE), "")
        found = compared.contrasts if main else contrasts(arms, metric, MOST_CONTRASTS)
        if found and len(found) <= MOST_CONTRASTS:
            screen.print(contrasts_table(found).terminal(screen.width), "")
    if experiment.keys.published:
        screen.print(published_table(replications(ledger, experiment.keys.published)).terminal(), "")
    if came := _width_that_came(experiment, settings, arms):
        screen.print(Text(came))
    screen.print(how_to_read(experiment, arms), emulated(ledger))
    for line in never_began(ledger):
        screen.print(Text(line.replace("**", "")))
    screen.print("")
    print_headline(headline_of(compared), screen, settings.state_option)
    ledger.close()


def print_headline(answer: Headline, screen: Console, state_option: str = "") -> None:
    """Print question, answer, checks that did not pass, and the command that settles it.

    Args:
        answer: the sweep's answer.
        screen: the terminal.
        state_option: option that the command needs for this state folder.
    """
    style = "green" if answer.answered else "red" if not answer.valid else "yellow"
    screen.print(Text(answer.question, "bold"))
    screen.print(Text.assemble((answer.lead, f"bold {style}"), " " if answer.lead else "", answer.text))
    for remark in answer.checks:
        if remark.kind in ("warning", "failed"):
            screen.print(Text(f"{'Failed' if remark.kind == 'failed' else 'Mind'}: {remark.text}.", "yellow"))
    if answer.simplest:
        screen.print(Text(answer.simplest))
    if answer.command:
        screen.print(Text(f"{answer.cost[0].upper()}{answer.cost[1:]}:"))
        screen.print(f"  {answer.command}{state_option}", soft_wrap=True, markup=False)
    elif answer.settling:
        screen.print(Text(answer.settling.text))


def _width_that_came(experiment: Experiment, settings: Settings, arms: list[ArmSummary]) -> str:
    """Return the half-width that a calibration expected beside the one that came; empty without a
    calibration.
    """
    if not (expected := expected_width(experiment, settings.state)):
        return ""
    widths = [
        arm.gap.high - arm.gap.mean for arm in arms if arm.gap and arm.gap.has_interval and arm.role != "null"
    ]
    return (
        f"Half-width: {median(widths):.2g} came (median of the arms), expected was {expected}."
        if widths
        else ""
    )


def how_to_read(experiment: Experiment, arms: list[ArmSummary]) -> str:
    """Return a few sentences that explain the table."""

    facts = experiment.base.config.summary() if experiment.metric.name == "val/loss" else {}
    floors = [_FLOORS[name].format(value) for name, value in facts.items() if name in _FLOORS]
    meaning = [estimand(experiment.keys.design, arms)] if experiment.keys.design else []
    return " ".join((*meaning, reading(arms), *floors))
