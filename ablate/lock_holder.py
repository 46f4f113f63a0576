"""Who holds a lock: what a lock file says, for whoever finds it held. One writer and one parser."""

import json
import os
from dataclasses import asdict, dataclass


@dataclass(frozen=True)
class Holder:
    """Process that holds a lock; of a trial's lock, the attempt that it computes."""

    pid: int
    host: str
    attempt: int | None = None

    @classmethod
    def this_process(cls, attempt: int | None = None) -> "Holder":
        """Return the process that calls."""
        return cls(os.getpid(), os.uname().nodename, attempt)

    @property
    def content(self) -> str:
        """Text of the lock file."""
        return json.dumps(asdict(self))

    @classmethod
    def parse(cls, content: str) -> "Holder | None":
        """Read a lock file; those of earlier versions say `pid 12 on host, attempt 3`. None if it is neither, or not yet written."""
        match content.replace(",", " ").split():
            case ["pid", pid, "on", host] if pid.isdecimal():
                return cls(int(pid), host)
            case ["pid", pid, "on", host, "attempt", attempt] if pid.isdecimal() and attempt.isdecimal():
                return cls(int(pid), host, int(attempt))
        try:
            holder = cls(**json.loads(content))
        except (ValueError, TypeError):
            return None
        return holder if isinstance(holder.pid, int) and isinstance(holder.host, str) else None

    @property
    def process(self) -> str:
        """The process in words."""
        return f"pid {self.pid} on {self.host}"

    def __str__(self) -> str:
        return self.process if self.attempt is None else f"{self.process}, attempt {self.attempt}"
