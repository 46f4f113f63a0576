"""Annotations of a finished sweep's study: a note, a figure of the gaps, a note on every arm, and knob
importances.

The study is read and written as Optuna's dashboard does it, so that a running sweep is not disturbed. Notes
written by users in the dashboard stay.
"""

import hashlib
import json
import math
from collections.abc import Iterable, Mapping
from contextlib import suppress
from html import escape
from pathlib import Path
from textwrap import wrap
from typing import Any

import optuna
from optuna.storages import JournalStorage
from optuna.trial import TrialState, create_trial

from ablate.execution.search.journal import REPEATS, opened, own_trials
from ablate.execution.search.optuna_private import note_of, save_figure, save_note, trial_id
from ablate.experiment.schema import Metric
from ablate.results.number_text import interval
from ablate.results.summary import ArmSummary
from ablate.results.verdict_text import verdict_text

_FEWEST = 8
"""Number of finished arms below which an importance is noise."""
_FIGURE = "gap-to-baseline"
_WRITTEN = "ablate:notes"
"""Study attribute with the digest of each note that this package wrote."""
_LINE, _MOST_LINES = 36, 28
"""Characters of a line of an arm's name in the figure, and lines for which its 450 pixels have room."""


def decorate(journal: Path, sweep: str, note: str, arms: Iterable[ArmSummary], metric: Metric) -> None:
    """Write a sweep's results into its study; do nothing without such a study, or if its journal is damaged.
    It takes about a second and works from any process, after the sweep or while it runs. `note` is the
    study's, in Markdown; `metric` the main one."""
    loaded = opened(journal, sweep)
    if loaded is not None:
        with suppress(Exception):  # the replay of a torn last line fails once an operation follows it
            _annotate(*loaded, note, list(arms), metric)


def _annotate(
    study: optuna.Study, storage: JournalStorage, note: str, arms: list[ArmSummary], metric: Metric
) -> None:
    notes = _Notes(study, storage)
    notes.save(None, note)
    summaries = {arm.name: arm for arm in arms}
    for trial in own_trials(study):
        arm = summaries.get(trial.user_attrs.get("arm"))
        if arm is not None:
            notes.save(trial_id(trial), _note(arm, trial.user_attrs))
    notes.close()
    if any(arm.gap and arm.gap.pairs for arm in arms):
        number = storage.get_study_id_from_name(study.study_name)
        save_figure(storage, number, _FIGURE, json.dumps(_forest(arms, metric)))


class _Notes:
    """Notes of a study and its trials. Notes that somebody else wrote are kept."""

    def __init__(self, study: optuna.Study, storage: JournalStorage) -> None:
        self._storage = storage
        self._id = storage.get_study_id_from_name(study.study_name)
        self._written = dict(storage.get_study_system_attrs(self._id).get(_WRITTEN, {}))
        self._before = dict(self._written)

    def save(self, trial: int | None, text: str) -> None:
        now, key = note_of(self._storage, self._id, trial), str(trial)
        if now != text and (not now or _digest(now) == self._written.get(key)):
            save_note(self._storage, self._id, trial, text)
            self._written[key] = _digest(text)

    def close(self) -> None:
        if self._written != self._before:
            self._storage.set_study_system_attr(self._id, _WRITTEN, self._written)


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def _note(arm: ArmSummary, facts: Mapping[str, Any]) -> str:
    """Return the note on an arm. `facts`: user attributes of its trial, with seeds, and ids and addresses of
    its runs in MLflow in the same order."""
    note = f"**{arm.name}**: "
    if arm.gap is not None and arm.gap.pairs:
        note += f"{interval(arm.gap)} against {arm.baseline} over {arm.gap.pairs} seeds: "
    note += verdict_text(arm.verdict)
    pages = zip(facts.get("seeds", []), facts.get("mlflow", []), strict=False)
    links = [f"[seed {seed}]({page})" for seed, page in pages]
    runs = links or [f"`{run}`" for run in facts.get("mlflow_runs", []) if run]
    return f"{note}\n\nMLflow: {', '.join(runs)}" if runs else note


def _forest(arms: list[ArmSummary], metric: Metric) -> dict[str, Any]:
    """Draw every arm's gap to its baseline with its interval, the best on top; the grey band is the margin of
    no effect. The result is plotly's JSON, written out here: importing plotly takes a third of a second."""
    sign = 1 if metric.direction == "minimize" else -1
    gaps = [(arm, arm.gap) for arm in arms if arm.gap and arm.gap.pairs]
    gaps.sort(key=lambda pair: -sign * pair[1].mean)
    shown = [arm for arm, _ in gaps]
    longest = max(len(arm.name) for arm in shown)
    width = _LINE if len(shown) * math.ceil(longest / _LINE) <= _MOST_LINES else longest
    points = {
        "type": "scatter",
        "mode": "markers",
        "x": [gap.mean for _, gap in gaps],
        "y": ["<br>".join(wrap(escape(arm.name, quote=False), width)) for arm in shown],
        "error_x": {"type": "data", "array": [gap.half if math.isfinite(gap.half) else 0 for _, gap in gaps]},
        "marker": {"size": 9, "color": "#0173b2"},
        "hovertext": [verdict_text(arm.verdict) for arm in shown],
    }
    height = {"yref": "paper", "y0": 0, "y1": 1}
    shapes = [{"type": "line", "x0": 0, "x1": 0, "line": {"color": "#595959"}, **height}]
    margins = {arm.margin for arm in shown}
    if len(margins) == 1 and (margin := margins.pop()):
        band = {"fillcolor": "#cccccc", "opacity": 0.4, "line": {"width": 0}, "layer": "below"}
        shapes.append({"type": "rect", "x0": -margin, "x1": margin, **band, **height})
    grid = {"gridcolor": "#ebebeb", "zerolinecolor": "#ebebeb"}
    layout = {
        "title": {"text": "How far is each arm from its baseline?", "x": 0.02},
        "xaxis": {
            "title": {"text": f"{metric.name}: arm minus baseline, paired, {shown[0].interval}"},
            **grid,
        },
        "yaxis": {"type": "category", "automargin": True, "dtick": 1, "tickfont": {"size": 11}, **grid},
        "margin": {"t": 70, "b": 60, "r": 20},
        "shapes": shapes,
        "plot_bgcolor": "white",
        "paper_bgcolor": "white",
    }
    return {"data": [points], "layout": layout}


# Which knob mattered


def importances(journal: Path, name: str, objective: int = 0) -> dict[str, float]:
    """Return each knob's share of an objective's variance over a sweep's arms, largest first (fANOVA, seeded;
    shares of 1).

    Only knobs that every arm has are included. The result is empty if fewer than 8 arms have a finite value,
    if nothing varies, or if there is no such study. An importance is not an effect size, and is valid only
    for arms like those tried.
    """
    loaded = opened(journal, name)
    if loaded is None or objective >= len(loaded[0].directions):
        return {}
    study, _ = loaded
    arms = (trial for trial in own_trials(study) if REPEATS not in trial.user_attrs)
    complete = [trial for trial in arms if trial.state == TrialState.COMPLETE]
    done = [trial for trial in complete if math.isfinite(trial.values[objective])]
    if len(done) < _FEWEST or len({trial.values[objective] for trial in done}) == 1:
        return {}
    common = set.intersection(*(set(trial.params) for trial in done))
    # Those with several values and one range in all trials, which fANOVA needs.
    ranges = {knob: [trial.distributions[knob] for trial in done] for knob in common}
    same = [knob for knob, each in ranges.items() if all(one == each[0] for one in each)]
    if not (varied := sorted(knob for knob in same if len({trial.params[knob] for trial in done}) > 1)):
        return {}
    from optuna.importance import FanovaImportanceEvaluator, get_param_importances

    # Of this objective, without what failed, was given up or came from an earlier sweep.
    alone = optuna.create_study()
    for trial in done:
        facts = {"params": trial.params, "distributions": trial.distributions}
        alone.add_trial(create_trial(value=trial.values[objective], **facts))
    return get_param_importances(alone, evaluator=FanovaImportanceEvaluator(seed=0), params=varied)
