"""Private names of Ray: the only file that may use them.

Ray's public interface has no way to keep a local Ray on the loopback interface, or to choose its temporary
folder. A new version of Ray may rename any of these; each has a test in tests/test_private_names.py.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from ablate.files import short_for_sockets

LOOPBACK_ARGUMENT = {"_node_ip_address": "127.0.0.1"}
"""Argument of `ray.init` for the address of a local Ray."""


def temporary_folder_argument() -> dict[str, str]:
    """Return the argument of `ray.init` for a temporary folder short enough for sockets; empty if Ray's
    default is short enough.
    """
    short = short_for_sockets(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "")
    return {"_temp_dir": str(short / "ray")} if short else {}


@contextmanager
def loopback_kept(ray: ModuleType) -> Iterator[None]:
    """Make Ray keep the address 127.0.0.1 while it starts here.

    On Linux Ray replaces a loopback address by that of a network interface, and all its servers then listen
    on all interfaces. With ENABLE_RAY_CLUSTER false, its setting on macOS, it does not. The setting is
    restored since connections to other machines need it.
    """
    constants = ray._private.ray_constants
    enabled = constants.ENABLE_RAY_CLUSTER
    constants.ENABLE_RAY_CLUSTER = False
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER = enabled
