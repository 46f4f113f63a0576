"""Watch over the files of a user's code and data while a sweep runs.

A trial's id has the content of these files. Once one is edited, no trial that is left can end under the id
that was planned: each would run for hours and then be discarded. So sizes and times of the files are compared
with those at the start, every two seconds or so; only if one differs are contents read. A file that was saved
without a change does not matter.

    code = PlannedCode(experiment.arms)
    code.edited()             # () while nothing has changed, else the paths of the files that have
"""

import time
from collections.abc import Collection, Iterable
from contextlib import suppress
from pathlib import Path

from ablate.errors import InputError, some_of
from ablate.experiment.arms import Arm
from ablate.numerics.own import Own
from ablate.numerics.spec import own_words
from ablate.training.workloads.base import Workload

_SECONDS = 2.0
"""Time between two looks at the files."""
_SHARE = 50
"""A look takes at most one part in so many of the time: a folder of data may have a million files."""

_Signature = tuple[int, int, int]


class PlannedCode:
    """Files of a sweep's own code, as they were when it began."""

    def __init__(self, arms: Collection[Arm]) -> None:
        """Read the files of all arms: of workloads that are the user's own code, and of the functions that
        the recipes' quantisers call."""
        own: list[Workload | Own] = [arm.config for arm in arms if arm.config.own_code]
        own += [word for arm in arms for _, word in own_words(arm.recipe)]
        self._configs = {_fingerprint(config): config for config in own}
        self._signatures = self._look()
        self._due = 0.0

    def edited(self, now: bool = False) -> tuple[Path, ...]:
        """Return the files whose edit changes a fingerprint; nothing until it is time for another look,
        unless `now`."""
        began = time.monotonic()
        if not self._configs or (began < self._due and not now):
            return ()
        signatures = self._look()
        self._due = time.monotonic() + max(_SECONDS, _SHARE * (time.monotonic() - began))
        before = self._signatures
        if signatures == before:
            return ()
        if all(_fingerprint(config) == planned for planned, config in self._configs.items()):
            self._signatures = signatures
            return ()
        paths = before.keys() | signatures.keys()
        return tuple(sorted(path for path in paths if before.get(path) != _signature(path)))

    def _look(self) -> dict[Path, _Signature]:
        signatures = dict[Path, _Signature]()
        for config in self._configs.values():
            with suppress(
                OSError, SyntaxError, ValueError
            ):  # deleted, or half written: its fingerprint differs
                for path in config.files():
                    if signature := _signature(path):
                        signatures[path] = signature
        return signatures


def _signature(path: Path) -> _Signature | None:
    with suppress(OSError):
        status = path.stat()
        return status.st_size, status.st_mtime_ns, status.st_ctime_ns
    return None


def _fingerprint(config: Workload | Own) -> str | None:
    with suppress(OSError, SyntaxError, ValueError):
        return config.fingerprint()
    return None


def edited_error(name: str, files: Iterable[Path], discarded: int) -> InputError:
    """Return the error of a sweep whose code or data were edited. `files` is empty if only a trial noticed.
    `discarded` counts the trials that ran, and may have read the edited files."""
    listed = [*map(str, files)]
    shown = some_of(listed, 3) or "code or data"
    verb = "were" if len(listed) != 1 else "was"
    trials = f"the {discarded} trials" if discarded > 1 else "the trial"
    lost = f" Finished trials are kept; {trials} in flight will run again." if discarded else ""
    return InputError(
        f"{name}: {shown} {verb} edited while the sweep ran, so no trial that is left"
        " would be the one that was planned. The same command runs all trials with the edited code; undo"
        f" the edit first to continue with those that are done.{lost}"
    )
