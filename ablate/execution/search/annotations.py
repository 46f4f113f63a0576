"""Annotations of a finished sweep's study: a note, a figure of the gaps, a note on every arm, and knob
importances.

The study is read and written as Optuna's dashboard does it, so that a running sweep is not disturbed. Notes
written by users in the dashboard stay.
"""

import hashlib
import math
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.storages.journal import JournalFileBackend
from optuna.trial import FrozenTrial, TrialState, create_trial

from ablate.execution.search.journal import REPEATS, WARM
from ablate.experiment.schema import Metric
from ablate.results.number_text import interval
from ablate.results.summary import ArmSummary
from ablate.results.verdict_text import verdict_text

_FEWEST = 8
"""Number of finished arms below which an importance is noise."""
_FIGURE = "gap-to-baseline"
_WRITTEN = "ablate:notes"
"""Study attribute with the digest of each note that this package wrote."""
_SHORT = 45


def decorate(journal: Path, sweep: str, note: str, arms: Iterable[ArmSummary], metric: Metric) -> None:
    """Write a sweep's results into its study; do nothing if there is no such study.

    It takes about a second and works from any process, after the sweep or while it runs.

    Args:
        journal: the study's journal file.
        sweep: name of the sweep and of its study.
        note: note of the study, in Markdown.
        arms: summaries of the arms, for their notes and the figure of gaps.
        metric: the main metric.
    """
    study = _load(journal, sweep)
    if study is None:
        return
    from optuna_dashboard import save_plotly_graph_object

    arms = list(arms)
    notes = _Notes(study)
    notes.save(None, note)
    known = {arm.name: arm for arm in arms}
    for trial in _own(study):
        arm = known.get(trial.user_attrs.get("arm"))
        if arm is not None:
            notes.save(trial._trial_id, _of(arm, trial.user_attrs))
    notes.close()
    if any(arm.gap and arm.gap.pairs for arm in arms):
        save_plotly_graph_object(study, _forest(arms, metric), graph_object_id=_FIGURE)


def _load(journal: Path, sweep: str) -> optuna.Study | None:
    """Open the study for reading and notes, without repairing or creating anything; None if there is none."""
    if not journal.exists():
        return None
    try:
        return optuna.load_study(study_name=sweep, storage=JournalStorage(JournalFileBackend(str(journal))))
    except (KeyError, ValueError):  # no study of this name, or no journal
        return None


def _own(study: optuna.Study) -> list[FrozenTrial]:
    return [trial for trial in study.get_trials(deepcopy=False) if WARM not in trial.user_attrs]


class _Notes:
    """Notes of a study and its trials. Notes that somebody else wrote are kept."""

    def __init__(self, study: optuna.Study) -> None:
        self._study, self._storage = study, study._storage
        self._written = dict(self._storage.get_study_system_attrs(study._study_id).get(_WRITTEN, {}))
        self._before = dict(self._written)

    def save(self, trial: int | None, text: str) -> None:
        from optuna_dashboard import get_note, save_note

        # To make an optuna.Trial is to ask the sampler; a note needs no more than these three.
        where: Any = self._study
        if trial is not None:
            where = SimpleNamespace(storage=self._storage, study=self._study, _trial_id=trial)
        now, key = get_note(where), str(trial)
        if now != text and (not now or _digest(now) == self._written.get(key)):
            save_note(where, text)
            self._written[key] = _digest(text)

    def close(self) -> None:
        if self._written != self._before:
            self._storage.set_study_system_attr(self._study._study_id, _WRITTEN, self._written)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _of(arm: ArmSummary, facts: dict[str, Any]) -> str:
    """Return an arm's note: its verdict, and links to its runs."""
    said = f"**{arm.name}**: {verdict_text(arm.verdict)}"
    if arm.gap is not None and arm.gap.pairs:
        gap = f"{interval(arm.gap)} against {arm.baseline} over {arm.gap.pairs} seeds"
        said = f"**{arm.name}**: {gap}: {verdict_text(arm.verdict)}"
    pages = facts.get("mlflow", [])
    seeds = facts.get("seeds", [])
    links = [f"[seed {seed}]({page})" for seed, page in zip(seeds, pages, strict=False)]
    runs = links or [f"`{run}`" for run in facts.get("mlflow_runs", []) if run]
    return f"{said}\n\nMLflow: {', '.join(runs)}" if runs else said


def _forest(arms: list[ArmSummary], metric: Metric) -> Any:
    """Draw every arm's gap to its baseline with its interval, the best on top; the grey band is the margin of
    no effect.
    """
    from plotly.graph_objects import Figure, Scatter

    sign = 1 if metric.direction == "minimize" else -1
    shown = sorted((arm for arm in arms if arm.gap and arm.gap.pairs), key=lambda arm: -sign * arm.gap.mean)
    half = [arm.gap.high - arm.gap.mean if arm.gap.has_interval else 0 for arm in shown]
    figure = Figure(
        Scatter(
            x=[arm.gap.mean for arm in shown],
            y=[arm.name if len(arm.name) <= _SHORT else f"{arm.name[:_SHORT]}..." for arm in shown],
            error_x={"type": "data", "array": [width if math.isfinite(width) else 0 for width in half]},
            mode="markers",
            marker={"size": 9, "color": "#0173b2"},
            hovertext=[verdict_text(arm.verdict) for arm in shown],
        )
    )
    figure.add_vline(0, line_color="#595959")
    margins = {arm.margin for arm in shown}
    if len(margins) == 1 and (margin := margins.pop()):
        figure.add_vrect(-margin, margin, fillcolor="#cccccc", opacity=0.4, line_width=0, layer="below")
    figure.update_layout(
        title="How far is each arm from its baseline?",
        xaxis_title=f"{metric.name}: arm minus baseline, paired, {shown[0].interval}",
        yaxis={"type": "category", "automargin": True},
        template="plotly_white",
    )
    return figure


# Which knob mattered


def importances(journal: Path, name: str, objective: int = 0) -> dict[str, float]:
    """Return each knob's share of an objective's variance over a sweep's arms, largest first (fANOVA, seeded;
    shares of 1).

    Only knobs that every arm has are included. The result is empty if fewer than 8 arms have a finite value,
    if nothing varies, or if there is no such study. An importance is not an effect size, and is valid only
    for arms like those tried.
    """
    study = _load(journal, name)
    if study is None or objective >= len(study.directions):
        return {}
    arms = (trial for trial in _own(study) if REPEATS not in trial.user_attrs)
    done = [
        trial
        for trial in arms
        if trial.state == TrialState.COMPLETE and math.isfinite(trial.values[objective])
    ]
    varied = (
        {knob for knob in set.intersection(*(set(trial.params) for trial in done)) if _varies(done, knob)}
        if done
        else set()
    )
    if len(done) < _FEWEST or not varied or len({trial.values[objective] for trial in done}) == 1:
        return {}
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    alone = (
        optuna.create_study()
    )  # of this objective, without what failed, was given up or came from an earlier sweep
    for trial in done:
        facts = {"params": trial.params, "distributions": trial.distributions}
        alone.add_trial(create_trial(value=trial.values[objective], **facts))
    return get_param_importances(alone, evaluator=FanovaImportanceEvaluator(seed=0), params=sorted(varied))


def _varies(trials: list[FrozenTrial], knob: str) -> bool:
    """Return True if a knob has several values and one range in all trials, which fANOVA needs."""
    return len({trial.params[knob] for trial in trials}) > 1 and all(
        trial.distributions[knob] == trials[0].distributions[knob] for trial in trials
    )
