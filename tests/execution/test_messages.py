"""Tests of messages between processes: they arrive as they were sent, or are refused with a sentence."""

import dataclasses
import io
import json
import math
import statistics
import subprocess
import sys
import time
import typing

import pytest
from support.experiments import idle

from ablate.execution import trial_runner
from ablate.execution.messages import (
    Ended,
    Events,
    Exited,
    GangPart,
    MalformedMessage,
    PipeMessage,
    Raised,
    RankDied,
    Started,
    TornLine,
    TrialRequest,
    Waiting,
    holds_exit,
    parse_line,
    send,
)
from ablate.execution.supervisor import SilenceTimer, Supervisor
from ablate.files import Holder
from ablate.store.trial_store import Store
from ablate.training.own_code.user_errors import UserError

EVENT = {
    "step": 3,
    "time": 1732300000.25,
    "metrics": {"train/loss": 5.5, "grad": math.inf},
    "events": ["skipped \u2014 one", "exited"],
}
SAMPLES = [
    Started(71),
    Events((EVENT, EVENT | {"step": 4, "resumed": 2})),
    Waiting("pid 7 on node, attempt 1"),
    RankDied(1, -9),
    Raised(UserError("ValueError", "no \u2014 such", "/home/me/train.py", 3, ('  File "x"',), True)),
    Exited(-15),
    Exited(1, "malformed"),
]
GANG = GangPart(nodes=2, node=1, address="10.0.0.1", port=4000, local=4)
REQUEST = TrialRequest(
    "0" * 16,
    '{"seed": 0}',
    "/runs",
    2,
    {"every": 2, "checkpoint": 0.5},
    ((8, "a-1"),),
    2.5,
    8,
    True,
    ("json",),
    GANG,
)


def sent(*messages: PipeMessage) -> bytes:
    """The bytes that a pipe holds after these messages."""
    pipe = io.BytesIO()
    for message in messages:
        send(pipe, message)
    return pipe.getvalue()


def lines(content: bytes) -> list[bytes]:
    return [line for line in content.split(b"\n") if line]


def test_every_kind_of_message_arrives_as_it_was_sent():
    assert {type(sample) for sample in SAMPLES} == set(typing.get_args(PipeMessage))
    assert [parse_line(line) for line in lines(sent(*SAMPLES))] == SAMPLES
    assert [holds_exit(sent(sample)) for sample in SAMPLES] == [
        isinstance(sample, Exited) for sample in SAMPLES
    ]


def test_a_number_that_is_none_arrives_as_such():
    (line,) = lines(sent(Events((EVENT | {"metrics": {"loss": math.nan, "low": -math.inf}},))))
    (event,) = parse_line(line).events
    assert math.isnan(event["metrics"]["loss"])
    assert event["metrics"]["low"] == -math.inf


@pytest.mark.parametrize(
    "request_", [REQUEST, TrialRequest("a", "{}", "/runs", 1, {})], ids=["all of it", "defaults"]
)
def test_a_request_arrives_as_it_was_sent(request_):
    assert request_.line().endswith(b"\n")
    assert len(lines(request_.line())) == 1
    assert TrialRequest.parse(request_.line()) == request_


def test_what_a_trial_yields_is_a_message(tmp_path):
    experiment, store = idle(tmp_path), Store(tmp_path)
    spec = experiment.spec(experiment.arms[0], 0, "cpu")
    asked = TrialRequest(spec.id, spec.wire, str(tmp_path), 1, {})
    events = [*trial_runner.run(spec, store, 1, {})]
    assert events
    assert [*trial_runner.messages(asked, spec)] == [Events((event,)) for event in events]
    with store.claim(spec.id, 1):
        assert next(trial_runner.messages(asked, spec)) == Waiting(f"{Holder.this_process()}, attempt 1")


def test_a_line_cut_anywhere_is_torn_and_harms_no_other():
    whole = lines(sent(Events((EVENT,))))[0]
    for end in range(1, len(whole)):
        with pytest.raises(TornLine):
            parse_line(whole[:end])
        *_, torn, last = lines(
            whole[:end] + sent(RankDied(0, -9))
        )  # who dies leaves it, and another process writes on
        assert (torn, parse_line(last)) == (whole[:end], RankDied(0, -9))


def changed(line: bytes, **fields: object) -> bytes:
    """The same JSON object with some fields changed, or without those that are set to `...`."""
    content = json.loads(line) | fields
    return json.dumps({name: value for name, value in content.items() if value is not ...}).encode()


MALFORMED = {
    "unknown kind": (changed(sent(Started(1)), kind="finished"), "kind"),
    "no kind": (changed(sent(Started(1)), kind=...), "kind"),
    "no object": (b"12", "object"),
    "missing": (changed(sent(Started(1)), pid=...), "pid"),
    "another type": (changed(sent(Started(1)), pid="1"), "pid"),
    "a truth value": (changed(sent(Exited(0)), status=True), "status"),
    "unknown field": (changed(sent(Exited(0)), signal=9), "signal"),
    "no event": (changed(sent(Events((EVENT,))), events=[EVENT, {"step": 1}]), "events.1"),
    "a step in words": (changed(sent(Events((EVENT,))), events=[EVENT | {"step": "1"}]), "events.0"),
    "a message of Ray's only": (json.dumps({"kind": "ended"} | vars(Ended("done"))).encode(), "ended"),
}


@pytest.mark.parametrize(("line", "named"), MALFORMED.values(), ids=MALFORMED)
def test_what_is_no_message_is_refused_by_what_is_wrong(line, named):
    with pytest.raises(MalformedMessage) as refused:
        parse_line(line)
    assert type(refused.value) is MalformedMessage
    assert named in str(refused.value)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("field", dataclasses.fields(TrialRequest), ids=lambda field: field.name)
def test_a_request_is_refused_by_the_field_that_is_wrong(field):
    required = field.default is dataclasses.MISSING
    for wrong in ([[{}]], ...) if required else ([[{}]],):
        with pytest.raises(MalformedMessage, match=rf"request for a trial: {field.name}\b"):
            TrialRequest.parse(changed(REQUEST.line(), **{field.name: wrong}))
    if not required:
        assert (
            getattr(TrialRequest.parse(changed(REQUEST.line(), **{field.name: ...})), field.name)
            == field.default
        )


def test_a_request_of_another_version_is_refused():
    with pytest.raises(MalformedMessage, match="priority"):
        TrialRequest.parse(changed(REQUEST.line(), priority=1))
    with pytest.raises(MalformedMessage, match=r"gang\.port"):
        TrialRequest.parse(changed(REQUEST.line(), gang=vars(GANG) | {"port": "http"}))


STRANGE = """
import os, sys
request = sys.stdin.buffer.raw.readline()
print('{"kind": "started", "pid": %d}\\n{"kind": "progress", "step": 1}' % os.getpid(), flush=True)
sys.stdin.buffer.raw.read()
"""


def test_a_process_whose_messages_are_unknown_ends_its_trial_with_a_sentence(tmp_path):
    supervisor = Supervisor((sys.executable, "-c", STRANGE))
    for _ in range(2):  # the second in another process
        (end,) = supervisor.run(TrialRequest("a", '{"device": "cpu"}', str(tmp_path), 1, {}))
        assert (end.status, end.result) == ("failed", None)
        assert "progress" in end.reason
    supervisor.close()


@pytest.mark.parametrize("module", ["messages", "supervisor", "workers.actor", "trial_process"])
def test_a_worker_begins_without_what_takes_seconds_to_import(module):
    code = (
        f"import sys, ablate.execution.{module}; slow = ('torch', 'ray', 'pandas', 'mlflow', 'optuna');"
        " print(*[name for name in slow if name in sys.modules])"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, check=True
        ).stdout.split()
        == []
    )


def test_the_median_of_all_paces_is_not_computed_while_a_trial_is_not_silent(monkeypatch):
    """A day of steps has half a million paces, and five looks a second."""
    monkeypatch.setattr(statistics, "median", None)
    timer = SilenceTimer(patience=60.0)
    for step in range(1, 9):
        timer.note(Events(({"step": step, "time": time.time(), "metrics": {}},)))
    assert not timer.hung


def test_a_trial_may_be_silent_for_20_median_steps_or_3_times_its_longest_silence(monkeypatch):
    """By steps at a known pace; below both limits its patience counts, and before the first step 10 times that."""
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    timer, limits = SilenceTimer(patience=0.5), []
    for step, seconds in ((3, 9.0), (5, 0.2), (7, 0.04), (8, 0.06), (9, 2.0)):
        now += seconds
        limits.append(timer.limit)
        timer.note(Events(({"step": step, "time": time.time(), "metrics": {}},)))
    assert [*limits, timer.limit] == pytest.approx([5.0, 0.5, 2.0, 1.2, 1.2, 6.0])
    timer.note(Events(({"step": 19, "time": 0.0, "metrics": {}},)))  # replayed, from before this attempt
    timer.note(Events(({"step": 9, "time": time.time(), "metrics": {}},)))  # of the same step as before
    assert timer.limit == pytest.approx(6.0)
    timer.note(Waiting("another process"))
    now += 100.0
    assert timer.silence == 0
    timer.note(Events(()))
    now += 7.0
    assert timer.silence == pytest.approx(7.0)
