"""Messages about a trial that cross a process boundary: the request for it, and the messages that come back.

Each is a frozen dataclass. In pipes they are JSON lines: a request from a supervisor to its warm process, and
back the messages of that process and of the trial's own.

    {"kind": "events", "events": [{"step": 1, "time": 1732300000.0, "metrics": {"train/loss": 5.5}}]}
    {"kind": "exited", "status": 0, "reason": ""}

Between the controller and Ray's actors the same objects are pickled: both ends run the same version of this
package, which is checked before a trial starts there. The spec of a trial stays text on its whole way and is
parsed by the process that computes it.

Refused (`MalformedMessage`): an unknown kind, a field that is missing, unknown or of another type. Text that
is no JSON is a `TornLine`: a process that is killed leaves half a line behind.
"""

import json
from dataclasses import dataclass
from typing import Annotated, Any, BinaryIO, Literal, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from ablate.experiment.recorded_spec import RecordedSpec
from ablate.files import Json
from ablate.store.trial_store import Result, as_event
from ablate.training.own_code.user_errors import UserError

PATIENCE_SECONDS = 60.0
_EXITED = b'{"kind": "exited"'

Event = Annotated[dict[str, Any], AfterValidator(as_event)]
"""Record of a trial at one step: {step, time, metrics}, and optionally {events, alarms, resumed, again}."""
TelemetrySettings = dict[str, bool | int | float]
"""Arguments of `Telemetry`: steps between measurements, `checkpoint` (seconds), `keep_weights`."""

_T = TypeVar("_T")


class MalformedMessage(ValueError):
    """A line that is no message of this version; the text says why in one sentence."""


class TornLine(MalformedMessage):
    """A line that is no JSON: a process was killed while it wrote."""


class _Closed:
    """Dataclass that pydantic parses strictly, and without unknown fields."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")


@dataclass(frozen=True)
class GangPart(_Closed):
    """Part of one node in a trial that several nodes compute."""

    nodes: int
    node: int
    """Number of this node; the first is 0."""
    address: str
    """IP address of the first node, to which all ranks connect."""
    port: int
    local: int


@dataclass(frozen=True)
class TrialRequest(_Closed):
    """Request of the controller for one attempt of one trial."""

    id: str
    spec: str
    """The whole spec as JSON text: `TrialSpec.wire`."""
    root: str
    attempt: int
    telemetry: TelemetrySettings
    fork: tuple[tuple[int, str], ...] = ()
    """Shared prefixes: step, and name of the shared checkpoint at that step."""
    patience: float = PATIENCE_SECONDS
    """Seconds of silence after which the trial may count as hung."""
    ranks: int = 1
    sharded: bool = False
    imports: tuple[str, ...] = ()
    """Modules that take seconds to import, which the warm process imports once for all trials."""
    gang: GangPart | None = None

    @property
    def device(self) -> str:
        """Class of device of the trial, `cpu` or `cuda`."""
        return RecordedSpec.parse(self.spec).device

    def line(self) -> bytes:
        """Return the request as a line of JSON."""
        return json.dumps(vars(self), default=vars).encode() + b"\n"

    @classmethod
    def parse(cls, line: bytes) -> "TrialRequest":
        """Return the request of a line; raise MalformedMessage for one that `line` did not write."""
        return _validated(_REQUEST, line, "request for a trial")


@dataclass(frozen=True)
class Started(_Closed):
    """The trial's process has begun."""

    pid: int
    kind: Literal["started"] = "started"


@dataclass(frozen=True)
class Events(_Closed):
    """Events of the trial, in the order of their steps."""

    events: tuple[Event, ...]
    kind: Literal["events"] = "events"


@dataclass(frozen=True)
class Waiting(_Closed):
    """Another process, `holder`, runs the same trial; this one waits for it."""

    holder: str
    kind: Literal["waiting"] = "waiting"


@dataclass(frozen=True)
class RankDied(_Closed):
    """The first of several ranks that failed. A negative status is the signal that ended it."""

    rank: int
    status: int
    kind: Literal["rank_died"] = "rank_died"


@dataclass(frozen=True)
class Raised(_Closed):
    """The user's code raised an exception, which ends the trial."""

    error: UserError
    kind: Literal["raised"] = "raised"


@dataclass(frozen=True)
class Exited(_Closed):
    """The trial's process has ended, or was never started. A negative status is the signal that ended it."""

    status: int
    reason: str = ""
    """Reason why it was never started; else empty."""
    kind: Literal["exited"] = "exited"


@dataclass(frozen=True)
class Heartbeat:
    """The supervisor is alive, and the trial is silent."""


@dataclass(frozen=True)
class Forked:
    """A trial resumes from the checkpoint of another; sent by a worker without the state folder."""

    trunk: dict[str, Json]
    """Content of the file that refers to the other trial's records."""


@dataclass(frozen=True)
class Ended:
    """The attempt is over, with its committed result or the reason why there is none."""

    status: Literal["done", "diverged", "oom", "failed"]
    reason: str | None = None
    result: Result | None = None
    log: str = ""
    """End of the attempt's log, if it has no result."""
    disk_full: bool = False
    """True if the disk was full: the trial runs again once there is space."""
    edited: bool = False
    """True if code or data were edited while it ran: its records do not count."""
    raised: UserError | None = None
    """Exception of the user's code that ended it."""


@dataclass(frozen=True)
class Notice:
    """A line for the user about the workers, of no single trial."""

    text: str


PipeMessage = Started | Events | Waiting | RankDied | Raised | Exited
"""Messages in the pipe from a trial's process and from the warm process that forked it."""
Message = Events | Waiting | Heartbeat | Forked | Ended | Notice
"""Messages that a controller receives. The last one of each trial is Ended."""

_REQUEST: TypeAdapter[TrialRequest] = TypeAdapter(TrialRequest)
_PIPE_MESSAGE: TypeAdapter[PipeMessage] = TypeAdapter(Annotated[PipeMessage, Field(discriminator="kind")])


def send(pipe: BinaryIO, message: PipeMessage) -> None:
    """Write a message into a pipe, after a line break: another writer may have been killed in the middle of a
    line."""
    content = {"kind": message.kind} | vars(message)
    pipe.write(b"\n" + json.dumps(content, default=vars).encode() + b"\n")
    pipe.flush()


def parse_line(line: bytes) -> PipeMessage:
    """Return the message of a line that `send` wrote; raise TornLine for part of one, MalformedMessage for
    any other."""
    return _validated(_PIPE_MESSAGE, line, "message of a trial's process")


def holds_exit(chunk: bytes) -> bool:
    """Return True if bytes from a pipe hold the beginning of an `Exited`, the last message of a trial."""
    return _EXITED in chunk


def _validated(adapter: TypeAdapter[_T], line: bytes, name: str) -> _T:
    try:
        return adapter.validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "line"
        sentence = (
            f"malformed {name}: {field}: {first['msg']}; it begins {line[:80].decode(errors='replace')!r}"
        )
        raise (TornLine if first["type"] == "json_invalid" else MalformedMessage)(sentence) from None
