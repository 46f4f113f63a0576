"""Exit statuses and the console of all commands, and the handling of a user's mistakes and of signals."""

import _thread
import errno
import json
import math
import os
import shutil
import signal
import sqlite3
import sys
import threading
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from types import FrameType
from typing import IO, Any, NoReturn

from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.table import Table
from rich.text import Text

from ablate.cli.option_groups import App
from ablate.errors import InputError, brief, printable
from ablate.files import ensure_home, finite, full

DONE, FAILED, BAD_INPUT, BUDGET, INTERRUPTED, CLOSED_PIPE, TERMINATED = 0, 1, 2, 3, 130, 141, 143
_IMPORT_SECONDS = 20.0
"""Longest wait for the end of an import at a signal."""
_POLL_SECONDS = 0.05


def run(command: Callable[[], None]) -> None:
    """Run a command. On an InputError, print one sentence for each mistake, without a traceback, and exit
    with status 2."""
    # In place of a stream that the caller has closed (`2>&-`). Else a file, a database or a pipe would get
    # its number, and then hold what libraries and child processes print.
    while (number := os.open(os.devnull, os.O_RDWR)) <= 2:
        os.set_inheritable(number, True)
    os.close(number)
    sys.stdout, sys.stderr = sys.stdout or os.fdopen(1, "w"), sys.stderr or os.fdopen(2, "w")
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, TextIOWrapper):  # a sign that the locale lacks, such as a minus
            stream.reconfigure(errors="backslashreplace")
    if note := ensure_home():
        print(note, file=sys.stderr)
    try:
        with _closed_pipe_exits(), _raising(signal.SIGINT, KeyboardInterrupt):
            return command()
    except (InputError, OSError, sqlite3.OperationalError) as error:
        if (why := str(error) if isinstance(error, InputError) else _unusable(error)) is None:
            raise
    finally:
        # CPython notes a Ctrl-C that passes through exec() of a string, such as the making of a dataclass,
        # and kills `python -m` by SIGINT at its end even if it was caught. The next string clears the note.
        eval("0")
    with suppress(OSError):  # its disk is full as well; the status remains
        print(printable(why), file=sys.stderr)
    sys.exit(BAD_INPUT)


@contextmanager
def _closed_pipe_exits() -> Iterator[None]:
    """Exit with the status of SIGPIPE, without a word, if the reader of the output (`| head`) has ended.

    rich and click exit with 1 then, which is that of a failed check, and the interpreter complains at its end
    of what it cannot flush. The signal itself would also end a sweep whose worker has closed a pipe.
    """
    try:
        try:
            yield
        finally:
            sys.stdout.flush()
    except (BrokenPipeError, SystemExit) as error:
        if not any(isinstance(each, BrokenPipeError) for each in (error, error.__context__)):
            raise
        nowhere = os.open(os.devnull, os.O_WRONLY)
        for stream in filter(None, (sys.stdout, sys.stderr)):
            os.dup2(nowhere, stream.fileno())
        sys.exit(CLOSED_PIPE)


def _unusable(error: OSError | sqlite3.OperationalError) -> str | None:
    """Return a sentence on a file that cannot be used: a folder, a link that leads nowhere, or a file that
    cannot be written is in its place, its name is too long, or its disk is full. None for any other error."""
    path: str | None
    if isinstance(error, OSError) and error.errno == errno.ENAMETOOLONG:
        return f"{brief(str(error.filename))}: {error.strerror}: each part of a path has at most 255 bytes"
    kind = "file that can be read and written"
    if isinstance(error, sqlite3.OperationalError):
        code = getattr(error, "sqlite_errorname", "")
        named = code.startswith(("SQLITE_CANTOPEN", "SQLITE_IOERR", "SQLITE_READONLY"))
        path, why = ", ".join(getattr(error, "__notes__", ())), str(error)
    else:
        path, why = error.filename2 or error.filename, str(error.strerror)
        named = isinstance(error, IsADirectoryError | NotADirectoryError | PermissionError)
        if isinstance(error, NotADirectoryError) and path:  # a file is in the place of one of its folders
            kind, path = "folder", str(next((part for part in Path(path).parents if part.is_file()), path))
        named |= error.errno == errno.EROFS or bool(path and Path(path).is_symlink())
    if full(error, Path(path).parent if path else None):
        return f"{path or 'the output'}: {why}: free space there, then give the command again"
    advice = f"it has to be a {kind}; move away what is there, or copy the folder"
    return f"{path}: {why}: {advice}" if named and path else None


class Terminated(KeyboardInterrupt):
    """SIGTERM, with which SLURM, Docker and systemd end a command. Handled like Ctrl-C, with its own exit
    status."""

    received = False
    """True after a SIGTERM. Calls of Ray that it interrupts raise KeyboardInterrupt in place of this."""


@contextmanager
def raise_on_sigterm() -> Iterator[None]:
    """Raise Terminated at the first SIGTERM within the block. Ignore later ones: they would interrupt the
    clean-up."""

    def terminated() -> Terminated:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        Terminated.received = True
        return Terminated()

    Terminated.received = False
    with _raising(signal.SIGTERM, terminated):
        yield


@contextmanager
def _raising(number: int, error: Callable[[], BaseException]) -> Iterator[None]:
    """Raise `error()` at this signal within the block, once no import is in progress, or after 20 seconds:
    an exception within an import leaves half a module, and in C++ of torch's it aborts the process."""
    deadline = math.inf

    def handle(number: int, frame: FrameType | None) -> None:
        nonlocal deadline
        deadline = min(deadline, time.monotonic() + _IMPORT_SECONDS)
        if time.monotonic() < deadline and _importing(frame):
            _thread.start_new_thread(_again, (number,))  # threading's own locks may be held here
            return
        deadline = math.inf
        raise error()

    if threading.current_thread() is not threading.main_thread():  # only the main thread may set a handler
        yield
        return
    before = signal.signal(number, handle)
    try:
        yield
    finally:
        signal.signal(number, before)


def _again(number: int) -> None:
    time.sleep(_POLL_SECONDS)
    signal.pthread_kill(threading.main_thread().ident or 0, number)


def _importing(frame: FrameType | None) -> bool:
    """Return True if this frame, or one that called it, runs an import."""
    while frame and frame.f_code.co_filename != "<frozen importlib._bootstrap>":
        frame = frame.f_back
    return frame is not None


def interruption(error: KeyboardInterrupt) -> tuple[int, str]:
    """Return the exit status and the text that describes how a signal ended the command."""
    ended = isinstance(error, Terminated) or Terminated.received
    return (TERMINATED, "Ended by SIGTERM") if ended else (INTERRUPTED, "Interrupted")


def run_program(command: Callable[..., None]) -> None:
    """Run one command as a program, such as `python -m ablate.sweep`. A crash prints no local variables,
    since they may hold a password."""
    app = App(add_completion=False, pretty_exceptions_enable=False)
    app.command()(command)
    run(app)


def nothing_runs() -> NoReturn:
    """Stand for the executor of a controller that only writes the ledger."""
    raise AssertionError("this command runs no trial")


def print_starting(task: str, quiet: bool = False) -> None:
    """Print `Starting: TASK ...` to standard error, before slow imports: the first result can take a minute;
    nothing if `quiet`, for output that a program reads."""
    if not quiet:
        print(f"Starting: {task} ...", file=sys.stderr, flush=True)


class Due:
    """Clock of lines on progress: a call returns True, and begins anew, if that many seconds have passed."""

    def __init__(self, seconds: float, clock: Callable[[], float] = time.monotonic) -> None:
        self.seconds, self.clock, self.last = seconds, clock, clock()

    def __call__(self) -> bool:
        due = self.clock() - self.last >= self.seconds
        self.last = self.clock() if due else self.last
        return due


class Screen(Console):
    """Console that prints text literally: no markup, no emoji codes, no control characters. Otherwise
    brackets in the name of an arm or in a question would be read as markup. Styles come from rich's Text.

    A command prints its document and its text. A quiet screen, that of `--json`, shows the document alone,
    any other the text alone.
    """

    def __init__(self, file: IO[str] | None = None, **given: Any) -> None:
        super().__init__(file=file, highlight=False, markup=False, emoji=False, **given)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterator[Segment]:
        """Yield the segments to print, with control characters within text as escapes. Control codes of rich
        itself are separate segments and stay as they are."""
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)

    def lines(self, *texts: str | Text, style: str = "") -> None:
        """Print each text in one line that is not wrapped, so that paths and commands can be copied."""
        for text in texts:
            self.print(text, style=style, soft_wrap=True)

    def document(self, content: object) -> None:
        """Print a document as JSON if the screen is quiet; numbers that are not finite are null."""
        if self.quiet:
            print(json.dumps(finite(content), indent=1, allow_nan=False))


def console(as_json: bool = False) -> Screen:
    """Return a console on standard output, 160 columns wide if that is not a terminal: tables fit in a
    log. `as_json`: it shows documents alone."""
    screen = Screen(quiet=as_json)
    return screen if screen.is_terminal else Screen(width=160, quiet=as_json)


def filled(template: str, **values: object) -> str:
    """Return a file of `templates/` with these values."""
    from jinja2 import Environment, FileSystemLoader, StrictUndefined

    folder = FileSystemLoader(Path(__file__).parent / "templates")
    jinja = Environment(
        loader=folder, undefined=StrictUndefined, trim_blocks=True, keep_trailing_newline=True
    )
    return jinja.get_template(f"{template}.j2").render(values)


def plain_table(
    *names: str,
    rows: Iterable[Iterable[Any]] = (),
    right: Collection[str] = (),
    style: str = "bold",
) -> Table:
    """Return a table without rules and with these heads, in a style; without any, it has no line of heads.
    `right`: columns that are aligned right."""
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style=style, show_header=bool(names))
    for name in names:
        table.add_column(name, justify="right" if name in right else "left")
    for row in rows:
        table.add_row(*row)
    return table


def program(name: str) -> str:
    """Return the command for a program of this environment: its name if it is on PATH, else its path from the
    current folder."""
    return name if shutil.which(name) else os.path.relpath(Path(sys.executable).parent / name)
