"""Trials of edited code that its owner declares to compute the same: `ablate sweep X --same-code`.

A trial's id has the content of the user's code, so a corrected comment makes all trials new. Under the
declaration a finished trial is stored a second time, under the id of the edited code, with the id that it was
run under. So ids keep their meaning, other sweeps and a rebuilt ledger see an ordinary trial, and every
report says how many trials were taken over, and that nobody checked the claim.

A trial is taken over when the sweep requests it: with the file's arms, with a point that the search had
proposed, or later, with more seeds, a round of a search for a cause, or a winner's confirmation.

Refused: code with data or starting weights, whose content is in the same fingerprint and may have changed.
"""

import json
import time
from contextlib import suppress

from ablate.errors import InputError
from ablate.experiment.load import Experiment
from ablate.experiment.trial_spec import TrialSpec
from ablate.files import Damaged
from ablate.results.number_text import counted
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import FINISHED
from ablate.store.trial_store import Store


class SameCode:
    """Finished trials of a ledger, by everything that determines them except the user's code."""

    def __init__(self, experiment: Experiment, ledger: Ledger, store: Store) -> None:
        """Read the ledger's members. InputError if the workload is not the user's own code, or reads data or
        weights that the id contains."""
        config = experiment.base.config
        if not config.own_code:
            raise InputError("--same-code: the workload is no code of your own, whose edits could matter")
        if getattr(config, "data", ()) or getattr(config, "start", None):
            raise InputError("--same-code: data or weights are in the digest of the code, too; leave it out")
        self._ledger, self._store, self._taken = ledger, store, 0
        members = [member for member in ledger.members() if member.status in FINISHED]
        self._ids = {_without_code(member.spec): member.id for member in members}

    def take(self, spec: TrialSpec) -> None:
        """Store the finished trial that differs from a requested one in its code alone under the id of the
        requested one, unless there is none, or the requested one is finished, too."""
        old = self._ids.get(_without_code(spec.wire), spec.id)
        if old != spec.id and self._store.finished(old) and not self._store.finished(spec.id):
            with suppress(Damaged):  # then it runs again
                self._store.store_again(old, spec.id, spec.content)
                self._taken += 1

    def news(self) -> list[str]:
        """Record in the ledger how many trials were taken over since the last call; return a line about them,
        none if there are none."""
        taken, self._taken = self._taken, 0
        if not taken:
            return []
        self._ledger.facts.same_code = [*self._ledger.facts.same_code, (time.time(), taken)]
        return [f"{counted(taken, 'finished trial')} taken over: you declare that the edit changes no number"]


def _without_code(spec: str) -> str:
    return json.dumps({**json.loads(spec), "data": "", "id": ""}, sort_keys=True)
