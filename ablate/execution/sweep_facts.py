"""Facts of a sweep that its ledger keeps beside arms and records, so that reports need no experiment file."""

import json
from pathlib import Path

from ablate import provenance
from ablate.experiment.load import Experiment
from ablate.results.ledger import Ledger


def describe(ledger: Ledger, experiment: Experiment) -> None:
    """Store the experiment's facts, its text, and the code and machine that run it from now on."""
    commit, diff = provenance.commit(Path.cwd())
    ledger.describe(
        **{
            "name": experiment.name,
            "question": experiment.question,
            "interval": experiment.growth.interval if experiment.growth else "t",
            "ended": "",
            "search": experiment.search.sampler if experiment.search else "",
            "metric": experiment.metric.model_dump_json(),
            "metrics": json.dumps([metric.name for metric in experiment.metrics]),
            "compared": json.dumps([metric.model_dump() for metric in experiment.metrics]),
            "published": json.dumps([figure.model_dump() for figure in experiment.published]),
            "experiment.yaml": experiment.text,
            "provenance.json": json.dumps({"commit": commit, **provenance.environment()}, indent=1),
            "uncommitted.diff": diff,
        }
    )
