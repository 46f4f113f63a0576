"""Studies of Optuna as any other reader sees them: trials in a sweep's journal."""

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend


def trials(state, name: str = "tiny") -> list[optuna.trial.FrozenTrial]:
    """Return the trials that an Optuna reader, for example the dashboard, reads from the journal."""
    backend = JournalFileBackend(str(state / "sweeps" / name / "optuna.log"))
    return optuna.load_study(study_name=name, storage=JournalStorage(backend)).get_trials()


def outcomes(state, name: str = "tiny") -> list[tuple]:
    """Return number, state, value, intermediate values and arm of each trial."""
    return [
        (t.number, t.state.name, t.value, t.intermediate_values, t.user_attrs["arm"])
        for t in trials(state, name)
    ]
