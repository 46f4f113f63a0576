"""Exceptions of a user's code, described by the lines of that code alone.

The stack of a failed trial has one line that matters, in the user's file, among dozens of this package, torch
and the standard library. A `UserError` holds that line with the exception's type and message:

    ValueError: shape '[-1, 7]' is invalid for input of size 1024 (/home/me/train.py:6)

Type and line also tell whether two failures are the same one, so that a bug is not run again as if it were a
dead worker. Errors that may be gone at the next attempt (memory, network, devices) are marked as `transient`.

For a function, the lines come from the exception's traceback. For a command, whose process has ended, and for
a DataLoader's worker, they come from the traceback that Python printed. The user's code is every `.py` file
outside this package, the standard library and installed packages; a training function of an installed package
is the user's code with its package.
"""

import builtins
import re
import traceback
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from traceback import FrameSummary
from types import FrameType, TracebackType

from pydantic import ConfigDict

from ablate.errors import InputError, OutsideStepError, OwnFunctionError

_OURS = f"{Path(__file__).parents[2]}/"
_CALLER = f"{_OURS}training/workloads/python.py"
"""File that calls a user's training function."""
_CALLERS = (_CALLER, f"{_OURS}numerics/own_calls.py")
"""Files that call a user's function."""
_MODULE_CALL = "/torch/nn/modules/module.py"
"""End of the path of the file by which torch calls a module."""
_PACKAGES = ("/site-packages/", "/dist-packages/")
_LIBRARIES = (*_PACKAGES, "/lib/python3.", "/lib64/python3.")
"""Parts of the paths of installed packages and of the standard library."""
_TRANSIENT = (
    *("Memory", "Connect", "Timeout", "HTTP", "URL", "Network", "Transport", "Request"),
    *("Accelerator", "DistBackend"),
)
"""Parts of the names of exception types that another attempt may not meet."""
_TRANSIENT_MESSAGES = (
    *("out of memory", "CUDA error", "NCCL", "gloo/"),
    *("killed by signal", "exited unexpectedly"),
)
_LONGEST_MESSAGE = 300

_HEADER = "Traceback (most recent call last):"
_RANK = re.compile(r"^\[rank\d+\]: ?")
"""Prefix that torch gives to each line of a rank's traceback."""
_FRAME = re.compile(r'\s+File "(.+)", line (\d+)(?:, in .+)?$')
_LAST = re.compile(r"([A-Za-z_][\w.]*)(?:: (.*))?$")


@dataclass(frozen=True)
class UserError:
    """Exception that a user's code raised, and the innermost line of that code."""

    __pydantic_config__ = ConfigDict(strict=True, extra="forbid")
    type: str
    """Name of its class; empty if the message is a sentence of this package for the user."""
    message: str
    """First line of its message."""
    file: str
    line: int
    frames: tuple[str, ...] = ()
    """Lines of the traceback that show the user's code, as Python prints them."""
    transient: bool = False
    """True if another attempt may succeed: memory, network, devices."""

    def __str__(self) -> str:
        head = ": ".join(filter(None, (self.type, self.message)))
        return f"{head} ({self.file}:{self.line})"

    @property
    def identity(self) -> tuple[str, str, int]:
        """Type, file and line: equal if the same statement failed in the same way."""
        return self.type, self.file, self.line

    @property
    def certain(self) -> bool:
        """True for a broken contract, which no other attempt mends: a sentence without a stack."""
        return not self.type and not self.frames

    @property
    def report(self) -> str:
        return "\n".join((*self.frames, str(self)))


class CommandError(RuntimeError):
    """A user's command ended with an error: `raised`, if it is a Python program that printed one."""

    def __init__(self, text: str, raised: UserError | None = None) -> None:
        super().__init__(text)
        self.raised = raised


def described(error: BaseException) -> UserError | None:
    """Return what an exception says about the user's code; None if no line of that code is in its stack."""
    if isinstance(error, CommandError):
        return error.raised
    if isinstance(error, OwnFunctionError):
        return UserError("", str(error), error.file, error.line)
    if inner := printed(str(error).splitlines()):  # of a DataLoader's worker
        return inner
    cause: BaseException | None = error
    frames: list[FrameSummary] = []
    while cause is not None and not frames:
        frames = _users_frames(cause.__traceback__, isinstance(cause, OutsideStepError))
        cause = cause.__cause__
    if not frames:
        return None
    file, line = frames[-1].filename, frames[-1].lineno or 0
    if isinstance(error, SyntaxError) and error.filename and error.lineno:
        file, line = error.filename, error.lineno  # of the module, not of the line that imports it
    names = [kind.__name__ for kind in type(error).__mro__]
    message = _first_line(str(error) if not isinstance(error, SyntaxError) else error.msg)
    shown = "".join(traceback.format_list(frames)).rstrip().splitlines()
    module = "" if type(error).__module__ in ("builtins", "__main__") else f"{type(error).__module__}."
    ours = isinstance(error, InputError | OutsideStepError)
    kind = "" if ours else f"{module}{type(error).__qualname__}"
    return UserError(kind, message, file, line, tuple(shown), _transient(names, message))


def printed(lines: Iterable[str]) -> UserError | None:
    """Return the exception of the last traceback in a program's output, lines with their indentation, that
    has a line of the user's code; None if there is no such traceback."""
    found = None
    frames: list[tuple[str, int, list[str]]] | None = None
    for text in (_RANK.sub("", line).rstrip() for line in lines):
        if text.endswith(_HEADER):  # a DataLoader puts `Original` before it
            frames = []
        elif frames is None:
            continue
        elif match := _FRAME.match(text):
            frames.append((match[1], int(match[2]), [text]))
        elif text.startswith(" ") and frames:
            frames[-1][2].append(text)
        elif text:
            own = [frame for frame in frames if is_users(frame[0])]
            if own and (last := _LAST.match(text)):
                names = [kind.__name__ for kind in getattr(getattr(builtins, last[1], None), "__mro__", ())]
                message = _first_line(last[2] or "")
                shown = tuple(line for *_, texts in own for line in texts)
                transient = _transient(names or [last[1].rpartition(".")[2]], message)
                found = UserError(last[1], message, *own[-1][:2], shown, transient)
            frames = None
    return found


def _users_frames(stack: TracebackType | None, at_call: bool) -> list[FrameSummary]:
    """Return the frames of the user's code, the innermost last, below the last call of its function; without
    those inside the call of the model if `at_call`."""
    frames = list(traceback.extract_tb(stack))
    if at_call:
        inner = (n for n, frame in enumerate(frames) if frame.filename.endswith(_MODULE_CALL))
        frames = frames[: next(inner, len(frames))]
    calls = [number for number, frame in enumerate(frames) if frame.filename in _CALLERS]
    inside = frames[calls[-1] + 1 :] if calls else []
    if not inside:
        return []
    first = next((frame.filename for frame in inside if not frame.filename.startswith(_OURS)), "")
    package = next((_package(first, part) for part in _PACKAGES if part in first), None)
    return [
        frame
        for frame in inside
        if is_users(frame.filename) or (package and frame.filename.startswith(package))
    ]


def _package(file: str, packages: str) -> str:
    """Return the folder of the installed package that a file is in, with a slash, or the file of a module."""
    folder, _, rest = file.rpartition(packages)
    name, slash, _ = rest.partition("/")
    return f"{folder}{packages}{name}{slash}"


def is_users(file: str) -> bool:
    return (
        file.endswith(".py") and not file.startswith(_OURS) and not any(part in file for part in _LIBRARIES)
    )


def is_called_by_user(frame: FrameType | None) -> bool:
    """Return True if the user's function, or an import of its file, is among a frame and those above it."""
    while frame is not None and frame.f_code.co_filename != _CALLER:
        if is_users(frame.f_code.co_filename):
            return True
        frame = frame.f_back
    return False


def _transient(names: Iterable[str], message: str) -> bool:
    """Return True for an error that another attempt may not meet. `names` are those of its class and of the
    classes that it derives from, in that order; `message` is its first line. An OSError without a class of
    its own is one: an input or output that failed for any reason."""
    own, *bases = names
    return (
        own == "OSError"
        or any(part in name for part in _TRANSIENT for name in (own, *bases))
        or any(part in message for part in _TRANSIENT_MESSAGES)
    )


def _first_line(message: str) -> str:
    first = next((line.strip() for line in message.splitlines() if line.strip()), "")
    return first if len(first) <= _LONGEST_MESSAGE else f"{first[:_LONGEST_MESSAGE]} ..."
