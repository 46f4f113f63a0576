"""Private names of Optuna and the format of its journal: the only file that may use them.

Optuna's public interface has no way to write a note on a finished trial, to add a trial to a generation of
NSGA-II, or to read a journal's operations. A new version of Optuna may rename any of these; each has a test
in tests/test_private_names.py.
"""

from types import SimpleNamespace

import optuna
from optuna.storages import BaseStorage
from optuna.storages.journal._storage import JournalOperation
from optuna.trial import FrozenTrial

__all__ = ["JournalOperation", "generation_attribute", "note_target", "trial_id"]


def trial_id(trial: FrozenTrial) -> int:
    """Return the storage's id of a trial, which differs from the trial's number in its study."""
    return trial._trial_id


def note_target(study: optuna.Study, storage: BaseStorage, trial: int) -> SimpleNamespace:
    """Return what the dashboard's `get_note` and `save_note` read of an `optuna.Trial`.

    A trial itself is not made: its constructor asks the sampler.

    Args:
        study: the study.
        storage: its storage.
        trial: the storage's id of the trial.
    """
    return SimpleNamespace(storage=storage, study=study, _trial_id=trial)


def generation_attribute(sampler: optuna.samplers.NSGAIISampler) -> str:
    """Return the system attribute in which the sampler stores the generation of a trial."""
    return sampler._get_generation_key()
