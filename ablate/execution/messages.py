"""Everything that crosses a process about a trial: the request for it, and the messages that come back.

Each is a frozen dataclass. Through a pipe they travel as JSON lines: a request from a supervisor to its warm process, and back what that
process and the trial's own print.

    {"kind": "events", "events": [{"step": 1, "time": 1732300000.0, "metrics": {"train/loss": 5.5}}]}
    {"kind": "exited", "status": 0, "reason": ""}

Between the controller and Ray's actors the same objects travel pickled: both ends run the same version of this package, which is
checked before a trial starts there. The spec of a trial is text on the whole way, and parsed in the process that computes it.

Refused with a sentence (`MalformedMessage`): an unknown kind, a field that is missing, unknown or of another type. Text that is no
JSON is a `TornLine`: a process that is killed leaves half a line behind.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Literal

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from ablate.results.trial_store import as_event

PATIENCE_SECONDS = 60.0
_CLOSED = ConfigDict(strict=True, extra="forbid")
_EXITED = b'{"kind": "exited"'

Event = Annotated[dict[str, Any], AfterValidator(as_event)]
"""What a trial recorded at one step: {step, time, metrics}, and where there is any {events, alarms, resumed, again}."""


class MalformedMessage(ValueError):
    """A line that is no message that this version knows; the text is a sentence."""


class TornLine(MalformedMessage):
    """A line that is no JSON, as a process leaves it that is killed while it writes."""


@dataclass(frozen=True)
class GangPart:
    """Part of one node in a trial that several nodes compute."""

    __pydantic_config__ = _CLOSED
    nodes: int
    node: int
    """Number of this node; the first is 0."""
    address: str
    """Where the ranks meet: an address of the first node, and a port there."""
    port: int
    local: int
    """Ranks on this node."""


@dataclass(frozen=True)
class TrialRequest:
    """One attempt of one trial, as the controller asks for it."""

    __pydantic_config__ = _CLOSED
    id: str
    spec: str
    """The whole spec as JSON text: `TrialSpec.wire`."""
    root: str
    """The state folder."""
    attempt: int
    telemetry: dict[str, Any]
    """Arguments of `Telemetry`, and `checkpoint`: seconds between checkpoints."""
    fork: tuple[tuple[int, str], ...] = ()
    """States that other trials pass through too: the step, and the name of the shared checkpoint."""
    patience: float = PATIENCE_SECONDS
    """Seconds of silence after which the trial may be taken for hung."""
    ranks: int = 1
    sharded: bool = False
    imports: tuple[str, ...] = ()
    """Modules that take seconds to import, which the warm process imports once for all trials."""
    gang: GangPart | None = None

    def line(self) -> bytes:
        """Return the request as a line of JSON."""
        return json.dumps(vars(self), default=vars).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "TrialRequest":
        """Return the request of a line. MalformedMessage for a line that `line` did not write."""
        return _validated(_REQUEST, line, "request for a trial")


@dataclass(frozen=True)
class Started:
    """The trial's process has begun."""

    __pydantic_config__ = _CLOSED
    pid: int
    kind: Literal["started"] = "started"


@dataclass(frozen=True)
class Events:
    """Events of the trial, in the order of their steps."""

    __pydantic_config__ = _CLOSED
    events: tuple[Event, ...]
    kind: Literal["events"] = "events"


@dataclass(frozen=True)
class Waiting:
    """Another process, `holder`, runs the same trial; this one waits for it."""

    __pydantic_config__ = _CLOSED
    holder: str
    kind: Literal["waiting"] = "waiting"


@dataclass(frozen=True)
class RankDied:
    """The first of several ranks that ended without having done its part; negative status: the signal that ended it."""

    __pydantic_config__ = _CLOSED
    rank: int
    status: int
    kind: Literal["rank_died"] = "rank_died"


@dataclass(frozen=True)
class Exited:
    """The trial's process is over, or was never started; negative status: the signal that ended it."""

    __pydantic_config__ = _CLOSED
    status: int
    reason: str = ""
    """Why it was never started."""
    kind: Literal["exited"] = "exited"


@dataclass(frozen=True)
class Heartbeat:
    """The supervisor is there, and the trial is silent."""


@dataclass(frozen=True)
class Forked:
    """The trial goes on from another one's state; sent by a worker that does not share the state folder."""

    trunk: dict[str, Any]


@dataclass(frozen=True)
class Ended:
    """The attempt is over, with its committed result or the reason why there is none."""

    status: Literal["done", "diverged", "oom", "failed"]
    reason: str | None = None
    result: dict[str, Any] | None = None
    log: str = ""
    """End of the attempt's log, where it has no result."""
    disk_full: bool = False
    """No more could be written: the trial is run again once there is room."""


@dataclass(frozen=True)
class Notice:
    """A line about the workers themselves, of no single trial."""

    text: str


PipeMessage = Started | Events | Waiting | RankDied | Exited
"""Lines of a trial's process, and of the warm process that forked it."""
Message = Events | Waiting | Heartbeat | Forked | Ended | Notice
"""What a controller receives. Of one trial: any number of messages, the last of which is Ended."""

_REQUEST: TypeAdapter[TrialRequest] = TypeAdapter(TrialRequest)
_PIPE_MESSAGE: TypeAdapter[PipeMessage] = TypeAdapter(Annotated[PipeMessage, Field(discriminator="kind")])


def message_of(recorded: dict[str, Any] | Waiting) -> Events | Waiting:
    """Return what `trial.run` yielded as a message."""
    return recorded if isinstance(recorded, Waiting) else Events((recorded,))


def send(pipe: BinaryIO, message: PipeMessage) -> None:
    """Write a message into a pipe as a line of its own: who wrote before may have been killed in the middle of one."""
    pipe.write(b"\n" + json.dumps({"kind": message.kind} | vars(message)).encode() + b"\n")
    pipe.flush()


def parse_line(line: bytes) -> PipeMessage:
    """Return the message of a line that `send` wrote. TornLine for part of one, MalformedMessage for anything else."""
    return _validated(_PIPE_MESSAGE, line, "message of a trial's process")


def holds_exit(chunk: bytes) -> bool:
    """Return True if bytes from a pipe hold the beginning of an `Exited`, the last message of a trial."""
    return _EXITED in chunk


def _validated(adapter: TypeAdapter[Any], line: bytes, name: str) -> Any:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "line"
        sentence = (
            f"malformed {name}: {field}: {first['msg']}; it begins {line[:80].decode(errors='replace')!r}"
        )
        raise (TornLine if first["type"] == "json_invalid" else MalformedMessage)(sentence) from None
