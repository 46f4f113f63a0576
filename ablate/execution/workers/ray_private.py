"""Private names of Ray: the only file that may use them.

Ray's public interface has no way to keep a local Ray on the loopback interface, to choose its temporary
folder, to start it without services that no sweep uses, or to read what is unused on each node. A new
version of Ray may rename any of these; each has a test in tests/store/test_private_names.py.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from types import ModuleType

from ablate.files import short_for_sockets

LOOPBACK_ARGUMENT = {"_node_ip_address": "127.0.0.1"}
"""Argument of `ray.init` for the address of a local Ray."""
REGISTER_SECONDS = 90.0
"""Time that Ray's process on this machine has to register: with other work 30 s are too short."""


def unused_units(kind: str) -> dict[str, float]:
    """Return the units of a resource, `CPU` or `GPU`, that are unused, by node id; up to a second late."""
    from ray._private.state import available_resources_per_node

    return {node: units.get(kind, 0.0) for node, units in available_resources_per_node().items()}


def temporary_folder_argument() -> dict[str, str]:
    """Return the argument of `ray.init` for a temporary folder short enough for sockets; empty if Ray's
    default is short enough."""
    short = short_for_sockets(os.environ.get("RAY_TMPDIR") or os.environ.get("TMPDIR") or "")
    return {"_temp_dir": str(short / "ray")} if short else {}


@contextmanager
def as_one_machine(ray: ModuleType) -> Iterator[None]:
    """Make Ray start here for one machine: on the address 127.0.0.1, and without services of clusters.

    On Linux Ray replaces a loopback address by that of a network interface, and all its servers then listen
    on all interfaces. With ENABLE_RAY_CLUSTER false, its setting on macOS, it does not. The settings are
    restored since connections to other machines need them.
    """
    constants, node = ray._private.ray_constants, ray._private.node
    enabled, complete = constants.ENABLE_RAY_CLUSTER, node.Node
    constants.ENABLE_RAY_CLUSTER, node.Node = False, _reduced(complete)
    try:
        yield
    finally:
        constants.ENABLE_RAY_CLUSTER, node.Node = enabled, complete


def _reduced(node: type) -> type:
    """Return a class of nodes without dashboard, autoscaler and collection of logs. `ray.init` starts them
    even if told to include no dashboard: three processes, 250 MB and a second."""

    class Reduced(node):  # type: ignore[misc,valid-type]
        def __init__(self, *arguments: object, **named: object) -> None:
            """Start Ray's processes; end them if one does not start, which Ray does at this process's end."""
            try:
                super().__init__(*arguments, **named)
            except BaseException:
                self.kill_all_processes(check_alive=False, wait=True)
                raise

        def start_ray_processes(self) -> None:
            """Start Ray's process on this machine, and wait until it has registered; Ray waits 30 s."""
            super().start_ray_processes()
            from ray._private.services import get_node_with_retry

            get_node_with_retry(self.gcs_address, self._node_id, REGISTER_SECONDS, 0.1)

        def start_monitor(self) -> None:
            """Start no autoscaler."""

        def start_log_monitor(self) -> None:
            """Start no collection of logs: `ray.init` is called with `log_to_driver=False`."""

        def start_api_server(self, *, include_dashboard: bool | None, raise_on_failure: bool) -> None:
            """Start no dashboard, and report no address of one."""
            self._webui_url = ""

    return Reduced
