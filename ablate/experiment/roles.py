"""Roles of an arm in its sweep, and the prefixes of names that show some of them to readers."""

from typing import Literal

Role = Literal[
    "baseline", "listed", "searched", "refused", "confirmed", "null", "bad", "foreign", "half", "alone"
]
"""Added as a baseline, listed in the file, proposed by a sampler, proposed but impossible, rerun of a
search's winner, the baseline's twin, an arm that is known to be bad, or runs that were not started here. In a
search for a cause: a random half of the units, or those that are proved, alone or left out."""

NULL = "null: "
"""Name prefix of the baseline's twin. It is for readers; code reads the role."""
BAD = "known bad: "
"""Name prefix of a known-bad arm that was added."""
ELSEWHERE = "elsewhere: "
"""Name prefix of an arm whose runs were not started here, beside those of a sweep."""
CONFIRM = "confirm: "
"""Name prefix of the arm that reruns a search's winner on fresh seeds. Code reads the role; readers get
`WINNER` in its place."""
WINNER = "winner on fresh seeds, "
GROUPS: tuple[Role, ...] = ("half", "alone")
"""Roles of the arms that a search for a cause adds: groups of units."""
