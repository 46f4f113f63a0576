"""Trials of edited code that its owner declares to compute the same: `ablate sweep X --same-code`.

A trial's id has the content of the user's code, so a corrected comment makes all trials new. Under the
declaration a finished trial is stored a second time, under the id of the edited code, with the id that it was
run under. So ids keep their meaning, other sweeps and a rebuilt ledger see an ordinary trial, and every
report says how many trials were taken over, and that nobody checked the claim.

Refused: code with data or starting weights, whose content is in the same fingerprint and may have changed.
"""

import json
import time
from collections.abc import Mapping
from contextlib import suppress

from ablate.errors import InputError
from ablate.experiment.load import Experiment
from ablate.files import Damaged
from ablate.results.number_text import counted
from ablate.store.ledger import Ledger
from ablate.store.ledger_rows import FINISHED, Member
from ablate.store.trial_store import Store


def take_over(
    ledger: Ledger,
    experiment: Experiment,
    store: Store,
    device: str,
    before: Mapping[tuple[str, int], Member],
) -> list[str]:
    """Store finished trials again under the ids of edited code, and record that in the ledger. `before`: its
    members by arm and seed. Return a line of news; none if no trial differs in its code alone. InputError if
    the workload is not the user's own code, or reads data or weights that the id contains."""
    config = experiment.base.config
    if not config.own_code:
        raise InputError("--same-code: the workload is no code of your own, whose edits could matter")
    if getattr(config, "data", ()) or getattr(config, "start", None):
        raise InputError("--same-code: data or weights are in the digest of the code, too; leave it out")
    taken = 0
    for arm in experiment.arms:
        for seed in experiment.seeds:
            spec, old = experiment.spec(arm, seed, device), before.get((arm.name, seed))
            if old is None or old.status not in FINISHED or old.id == spec.id or store.finished(spec.id):
                continue
            was, now = ({**json.loads(text), "data": "", "id": ""} for text in (old.spec, spec.wire))
            if was == now and store.finished(old.id):
                with suppress(Damaged):  # then it runs again
                    store.store_again(old.id, spec.id, spec.content)
                    taken += 1
    if not taken:
        return []
    ledger.facts.same_code = [*ledger.facts.same_code, (time.time(), taken)]
    return [f"{counted(taken, 'finished trial')} taken over: you declare that the edit changes no number"]
