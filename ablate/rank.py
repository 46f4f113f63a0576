"""The ranks of a trial that several processes compute: torch's launcher in the trial's own process, each rank a fork of it.

Rank 0 runs the trial: it alone has the store, and writes the trial's events to where the process was asked to. The others do their part of
every step, and hear from rank 0 when there is one. All print into the attempt's log, and end with their parent.
"""

import json
import logging
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import IO, Any

from ablate.layout import Layout
from ablate.store import Store
from ablate.trial import TrialSpec, exit_status, run, within_memory

IMPORTS = ("torch.distributed.launcher.api", "ablate.parallel")
"""What takes long to import, once for all trials."""
SHARDING = ("torch.distributed.fsdp", "torch._dynamo")
"""What FSDP imports besides, the second at its first use."""
_LOOPBACK = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Where all ranks are on one machine, they meet by files: a store of torch's own asks for no password, and listens everywhere."""
if sys.platform == "linux":
    _LOOPBACK |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
_POLL_SECONDS = 0.5
_PEER_LOST = ("gloo/transport", "NCCL")
"""What stands in the errors of a rank whose peer is gone."""
_PEER_SECONDS = 5.0
"""A rank that lost its peer waits so long to be ended; of a gang, it has ended well before the pool stops waiting for it."""
_END_SECONDS = 5
"""Within which the other ranks end once one has; then they are killed."""


def launch(request: dict[str, Any], events: IO[str]) -> tuple[int, int] | None:
    """Compute this node's part of a trial. Which rank's end was the others', and its status (negative: its signal); None: it is done."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # a rank says itself why it ends
    own = {"start_method": "fork", "max_restarts": 0, "run_id": request["id"], "shutdown_timeout": _END_SECONDS}
    with tempfile.TemporaryDirectory(prefix="ablate-ranks-") as folder:
        meeting = None if "gang" in request else f"{folder}/ranks"
        place = _across(**request["gang"]) if "gang" in request else _here(request["ranks"], f"{folder}/launcher")
        try:
            elastic_launch(LaunchConfig(**own, **place, logs_specs=DefaultLogsSpecs(log_dir=folder)), _be)(request, events, meeting)
        except ChildFailedError as error:
            ((rank, failure),) = error.failures.items()
            return rank, failure.exitcode
    return None


def _here(ranks: int, meeting: str) -> dict[str, Any]:
    """All on this machine, which meet by a file."""
    os.environ.update(_LOOPBACK | os.environ)
    found = {"rdzv_backend": "c10d", "rdzv_endpoint": meeting, "rdzv_configs": {"store_type": "file"}}
    return found | {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": ranks}


def _across(nodes: int, node: int, address: str, port: int, local: int) -> dict[str, Any]:
    """This node's part of a gang."""
    found = {"rdzv_backend": "static", "rdzv_endpoint": f"{address}:{port}", "rdzv_configs": {"rank": node, "timeout": 900}}
    return found | {"min_nodes": nodes, "max_nodes": nodes, "nproc_per_node": local}


def _be(request: dict[str, Any], events: IO[str], meeting: str | None) -> None:
    """Be the rank that the launcher's environment variables name."""
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):  # the launcher's own handlers are the forks', too
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    status = exit_status(lambda: _compute(request, int(os.environ["RANK"]), events, meeting))
    if status:
        os._exit(status)


def _compute(request: dict[str, Any], rank: int, events: IO[str], meeting: str | None) -> None:
    try:
        _part(request, rank, events, meeting)
    except RuntimeError as error:
        if any(word in str(error) for word in _PEER_LOST):
            time.sleep(_PEER_SECONDS)  # another rank ended, whose reason is the one to be told: the launcher ends this one meanwhile
        raise


def _part(request: dict[str, Any], rank: int, events: IO[str], meeting: str | None) -> None:
    from ablate.parallel import join

    spec = TrialSpec.parse(request["spec"])
    if spec.device == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    layout = Layout(request["ranks"], request["sharded"])
    world = join(layout, rank, spec.device, meeting)
    if rank == 0:
        store = Store(Path(request["root"]))
        for event in run(spec, store, request["attempt"], request["telemetry"], request.get("fork", ()), layout.ranks):
            print(json.dumps(event), file=events)
    elif world.begins():
        _follow(spec, request["telemetry"])
    world.leave()


def _follow(spec: TrialSpec, telemetry: dict[str, Any]) -> None:
    """Do this rank's part of every step. What it records, rank 0 records too."""
    from ablate.train import Telemetry

    records = spec.config.records(spec.recipe, spec.seed, spec.engine, spec.device, Telemetry(**telemetry))
    for _ in within_memory(({"step": record.step} for record in records), spec.device):
        pass


def _end_with(parent: int) -> None:
    """End when the launcher does, which may have been killed."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)
