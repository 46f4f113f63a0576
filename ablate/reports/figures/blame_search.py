"""Picture of a search for a cause: units down, rounds across, tinted by the evidence; then the proof."""

from dataclasses import dataclass

from ablate.experiment.blame_design import BlameNames
from ablate.reports.page import Part
from ablate.reports.plain_text import html_text
from ablate.reports.table import Cell, Table, TablePicture, tinted_map
from ablate.results.blame import Search, amount, names_of, replayed
from ablate.results.comparisons import Comparisons

_STRONG = 6.0
"""Standard errors of the strongest tint."""


@dataclass(frozen=True)
class SearchPicture(TablePicture):
    """Evidence on each unit, round by round, on a page; a table elsewhere."""

    search: Search
    names: BlameNames
    unit: str

    def html(self) -> str:
        """Return the picture, and how to read it."""
        rounds = self.search.rounds
        proof = '<th scope="col">alone, on fresh seeds</th>' if self.search.proofs else ""
        rows = {
            name: [
                *(_tinted(each.estimates[place], place in each.candidates) for each in rounds),
                f"<td>{self._proof(place)}</td>" if proof else "",
            ]
            for place, name in enumerate(self.names.units)
        }
        drawn = tinted_map([f"round {n}" for n in range(1, len(rounds) + 1)], rows, last=proof)
        return (
            '<div class="maps"><p><b>How the search went: evidence on each unit, in standard errors</b></p>'
            f'{drawn}<p class="about">After each round of pairs of random halves:'
            " the damage of a unit, given the candidates, over its standard error. Bold: candidates, then run"
            ' alone. <a href="figures/search.csv">CSV</a></p></div>'
        )

    def _proof(self, place: int) -> str:
        effect = (self.search.proofs or {}).get(place)
        if effect is None:
            return ""
        text = html_text(amount(self.search, effect, self.unit))
        return f"<b>{text}</b>" if place in self.search.culprits else text

    @property
    def table(self) -> Table:
        """Numbers of the drawing."""
        proofs = self.search.proofs or {}
        rows: list[dict[str, Cell]] = [
            {
                "unit": name,
                **{
                    f"round {number}": (f"{each.estimates[place]:+.1f}", each.estimates[place])
                    for number, each in enumerate(self.search.rounds, 1)
                },
                "alone": amount(self.search, proofs[place], self.unit) if place in proofs else "",
                "culprit": "yes" if place in self.search.culprits else "",
            }
            for place, name in enumerate(self.names.units)
        ]
        return Table.of("search", rows)


def _tinted(value: float, candidate: bool) -> str:
    share = 100 * min(1.0, max(0.0, value) / _STRONG)
    text = f"{value:+.1f}".replace("-", "\N{MINUS SIGN}")
    return (
        f'<td class="number less" style="--share:{share:.0f}%">{f"<b>{text}</b>" if candidate else text}</td>'
    )


def search_parts(sweep: Comparisons) -> list[Part]:
    """Return the picture of a search that has ended a round; empty before, and for another experiment."""
    search = replayed(sweep.ledger) if sweep.ledger.facts.blame else None
    return [SearchPicture(search, names_of(sweep.ledger), sweep.unit)] if search and search.rounds else []
