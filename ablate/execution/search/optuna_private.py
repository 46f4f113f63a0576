"""Private names of Optuna and the format of its journal: the only file that may use them.

Optuna's public interface has no way to write a note on a finished trial, or a note without importing all of
its dashboard, to add a trial to a generation of NSGA-II, or to read a journal's operations. A new version of
Optuna may rename any of these; each has a test in tests/store/test_private_names.py.
"""

import optuna
from optuna.storages import BaseStorage
from optuna.storages.journal._storage import JournalOperation
from optuna.trial import FrozenTrial

__all__ = ["JournalOperation", "generation_attribute", "note_of", "save_figure", "save_note", "trial_id"]
_PIECE = 2045
"""Characters of an attribute that every storage of Optuna holds."""


def trial_id(trial: FrozenTrial) -> int:
    """Return the storage's id of a trial, which differs from the trial's number in its study."""
    return trial._trial_id


def note_of(storage: BaseStorage, study: int, trial: int | None) -> str:
    """Return the note of a study or of one of its trials in the format of optuna-dashboard; empty if there is
    none. The dashboard's own functions would be imported with all of the dashboard and scikit-learn: a
    second. `study` and `trial` are the storage's ids; `trial` None: the note of the study."""
    attributes, prefix = storage.get_study_system_attrs(study), _dashboard(trial) + "note_str:"
    pieces = [key for key in attributes if key.startswith(prefix)]
    return "".join(attributes[f"{prefix}{number}"] for number in range(len(pieces)))


def save_note(storage: BaseStorage, study: int, trial: int | None, text: str) -> None:
    """Write the note of a study or of a trial, as `note_of` reads it."""
    version = _dashboard(trial) + "note_ver"
    before = storage.get_study_system_attrs(study).get(version, 0)
    storage.set_study_system_attr(study, version, before + 1)
    _save_pieces(storage, study, _dashboard(trial) + "note_str:", text)


def save_figure(storage: BaseStorage, study: int, name: str, figure: str) -> None:
    """Write a figure of a study (by the storage's id), the result of plotly's `to_json`, in the format of
    optuna-dashboard. It replaces a figure with the id `name`."""
    _save_pieces(storage, study, f"{_dashboard(None)}plot_data:{name}:", figure)


def _dashboard(trial: int | None) -> str:
    return "dashboard:" if trial is None else f"dashboard:{trial}:"


def _save_pieces(storage: BaseStorage, study: int, prefix: str, text: str) -> None:
    """Write a text in pieces that a storage holds; those left of a longer one become empty."""
    pieces = [text[start : start + _PIECE] for start in range(0, len(text), _PIECE)]
    before = [key for key in storage.get_study_system_attrs(study) if key.startswith(prefix)]
    pieces += [""] * (len(before) - len(pieces))
    for number, piece in enumerate(pieces):
        storage.set_study_system_attr(study, f"{prefix}{number}", piece)


def generation_attribute(sampler: optuna.samplers.NSGAIISampler) -> str:
    """Return the system attribute in which the sampler stores the generation of a trial."""
    return sampler._get_generation_key()
