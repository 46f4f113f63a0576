"""Facts of a sweep that its ledger keeps beside arms and records, so that reports need no experiment file."""

import dataclasses
import time
from pathlib import Path

from ablate import provenance
from ablate.cache import key_of
from ablate.errors import InputError, nearest
from ablate.experiment.load import Experiment
from ablate.experiment.plan_notes import on_slow_reference
from ablate.files import Json
from ablate.store.judged import Judged
from ablate.store.judged_files import kept_alone
from ablate.store.ledger import Ledger
from ablate.store.registration import register
from ablate.store.trial_store import Store
from ablate.training.metric_names import is_added


def describe(ledger: Ledger, experiment: Experiment, device: str = "cpu") -> None:
    """Store the experiment's facts, its text, and the code and machine that run it from now on. InputError
    for a ledger of runs from elsewhere, which has the same name."""
    if (judged := Judged.alone(ledger)) or kept_alone(ledger.path.absolute().parent):
        origin = judged.text if judged else "that were judged"
        raise InputError(f"{ledger.name}: holds runs {origin}; give the experiment another name")
    commit, diff = provenance.commit(Path.cwd())
    environment = {"commit": commit, **provenance.environment()}
    if slow := on_slow_reference(experiment, device):
        environment["quantisers"] = slow
    quantised = [arm.config for arm in experiment.arms if not arm.recipe.plain]
    covered = min((outline.covered for config in quantised if (outline := config.outline)), default=None)
    keys, facts = experiment.keys, ledger.facts
    with ledger.atomic():
        facts.name, facts.file, facts.text = experiment.name, experiment.file, experiment.text
        facts.question, facts.answer, facts.design = keys.question, keys.answer, keys.design
        facts.blame, facts.map = blame_facts(experiment), keys.map
        facts.interval = keys.growth.interval if keys.growth else "t"
        facts.search = keys.search.sampler if keys.search else ""
        facts.metric, facts.compared = experiment.metric, experiment.metrics
        facts.metrics = [metric.name for metric in experiment.metrics]
        facts.published, facts.covered, facts.constraints = keys.published, covered, keys.constraints
        facts.provenance, facts.diff, facts.ended = environment, diff, ""


def blame_facts(experiment: Experiment) -> dict[str, Json]:
    """Return the search for a cause as the ledger keeps it; empty without one."""
    if experiment.blamed is None:
        return {}
    design, _, names = experiment.blamed
    return {"design": dataclasses.asdict(design), "names": dataclasses.asdict(names)}


def register_design(ledger: Ledger, experiment: Experiment, store: Store, device: str) -> None:
    """Record the hash of question, design and metrics before anything runs, unless it is the last recorded.
    The design is what is run: every arm's baseline and trials, whose ids have workload, data, recipe and
    seed; and the search's settings and space."""
    members = [(arm, seed) for arm in experiment.arms for seed in experiment.seeds]
    trials = {(arm.name, seed): experiment.spec(arm, seed, device).id for arm, seed in members}
    asked = experiment.keys.answer
    # Without a family the hash is that of releases that had none.
    answer = asked and asked.model_dump(exclude=None if asked.family else {"family"})
    metrics = [metric.model_dump() for metric in experiment.metrics]
    digest = key_of(
        experiment.keys.question,
        metrics,
        [[arm.name, arm.baseline] for arm in experiment.arms],
        sorted([*key, trial] for key, trial in trials.items()),
        experiment.keys.growth.model_dump() if experiment.keys.growth else None,
        experiment.keys.search.model_dump() if experiment.keys.search else None,
        [[knob, dataclasses.asdict(part)] for knob, part in experiment.space.items()],
        *([answer] if answer else []),
        *([keys] if (keys := blame_facts(experiment)) else []),
    )
    ids = set(trials.values())
    parts = {"question": key_of(experiment.keys.question, answer), "metrics": key_of(metrics)}
    register(ledger, digest, time.time(), len(ids), lambda: sum(map(store.finished, ids)), parts)


def require_metrics(experiment: Experiment, ledger: Ledger, trial: int, title: str) -> None:
    """Raise InputError if a finished trial of a user's own code has not logged what is compared. Only the
    code knows its metrics, so that a misspelt one is not seen before."""
    if not experiment.base.config.own_code:
        return
    logged = ledger.last_values(trial)
    for metric in experiment.metrics:
        if metric.name not in logged:
            own = [name for name in logged if not is_added(name)]
            raise InputError(
                f"{experiment.name}: metric: {metric.name!r}: {title} is done and logged"
                f" {', '.join(own) or 'no metric'}; {nearest(metric.name, own)}. Its results are"
                " kept: correct the name, or log it, and the same command goes on"
            )
