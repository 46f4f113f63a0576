"""Arms of sweeps in a state folder, as users name them: SWEEP:ARM."""

from contextlib import closing
from pathlib import Path

from ablate.errors import InputError, nearest
from ablate.store.checked_ledger import open_ledger
from ablate.store.ledger_rows import Member


def members_of(words: str, state: Path) -> list[Member]:
    """Return the members of an arm, named as SWEEP:ARM, with the sweep by its name or its file. InputError if
    there is no such sweep or arm."""
    name, colon, arm = words.partition(":")
    with closing(open_ledger(state, name)) as ledger:
        members = [*ledger.members()]
    arms = list(dict.fromkeys(member.name for member in members))
    if not colon or arm not in arms:
        raise InputError(f"{words}: name an arm as {name}:ARM; {nearest(arm, arms)}")
    return [member for member in members if member.name == arm]
