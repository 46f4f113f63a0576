"""Requests for trials of a tiny experiment, and the steps that their messages report."""

from ablate.execution.messages import Message, TrialRequest
from support.experiments import events_of, tiny

SUPERVISE = """
import sys
from ablate.execution.messages import TrialRequest
from ablate.execution.supervisor import Supervisor
supervisor = Supervisor()
for line in sys.argv[1:]:
    for message in supervisor.run(TrialRequest.parse(line)): print(message, flush=True)
    print(flush=True)
"""
"""Code that runs the requests of its arguments in a supervisor, and prints their messages, with an empty line after each request."""


def request(folder, root=None, attempt=1, seed=0, **shape) -> TrialRequest:
    """Return a request for one trial of a tiny experiment; `root` is the state folder."""
    experiment = tiny(folder, shape=shape)
    spec = experiment.spec(experiment.arms[1], seed, "cpu")
    return TrialRequest(spec.id, spec.wire, str(root or folder), attempt, {"every": 2, "log": 1})


def steps(messages: list[Message]) -> list[int]:
    """Return the steps of all events in these messages."""
    return [event["step"] for event in events_of(messages)]
