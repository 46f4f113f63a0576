"""Requests for trials of a tiny experiment, and the steps that their messages report."""

from ablate.execution.messages import Message, TrialRequest
from support.experiments import events_of, tiny

SUPERVISE = """
import sys
from ablate.execution.messages import TrialRequest
from ablate.execution.supervisor import Supervisor
for message in Supervisor().run(TrialRequest.parse(sys.argv[1])): print(message, flush=True)
"""
"""Code that runs the request of its first argument in a supervisor, and prints its messages."""


def request(folder, root=None, attempt=1, seed=0, **shape) -> TrialRequest:
    """Return a request for one trial of a tiny experiment; `root` is the state folder."""
    experiment = tiny(folder, shape=shape)
    spec = experiment.spec(experiment.arms[1], seed, "cpu")
    return TrialRequest(spec.id, spec.wire, str(root or folder), attempt, {"every": 2, "log": 1})


def steps(messages: list[Message]) -> list[int]:
    """Return the steps of all events in these messages."""
    return [event["step"] for event in events_of(messages)]
