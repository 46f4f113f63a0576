"""The ranks of a trial that several processes compute: torch's launcher in the trial's own process, each rank a fork of it.

Rank 0 runs the trial: it alone has the store, and writes the trial's events to where the process was asked to. The others do their part of
every step, and hear from rank 0 when there is one. All print into the attempt's log, and end with their parent.
"""

import logging
import os
import signal
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, BinaryIO

from ablate.execution.messages import GangPart, RankDied, TrialRequest, message_of, send
from ablate.execution.trial_runner import exit_status, run, within_memory
from ablate.experiment.trial_spec import TrialSpec
from ablate.results.trial_store import Store
from ablate.training.rank_layout import Layout

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


def launch(request: TrialRequest, pipe: BinaryIO) -> RankDied | None:
    """Compute this node's part of a trial. Returns which rank's death ended the others, None where all are done."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # a rank says itself why it ends
    own: dict[str, Any] = {
        "start_method": "fork",
        "max_restarts": 0,
        "run_id": request.id,
        "shutdown_timeout": _END_SECONDS,
    }
    with tempfile.TemporaryDirectory(prefix="ablate-ranks-") as folder:
        meeting = None if request.gang else f"{folder}/ranks"
        place = _across(request.gang) if request.gang else _here(request.ranks, f"{folder}/launcher")
        try:
            elastic_launch(LaunchConfig(**own, **place, logs_specs=DefaultLogsSpecs(log_dir=folder)), _be)(
                request, pipe, meeting
            )
        except ChildFailedError as error:
            ((rank, failure),) = error.failures.items()
            return RankDied(rank, failure.exitcode)
    return None


def _here(ranks: int, meeting: str) -> dict[str, Any]:
    """All on this machine, which meet by a file."""
    os.environ.update(_LOOPBACK | os.environ)
    found = {"rdzv_backend": "c10d", "rdzv_endpoint": meeting, "rdzv_configs": {"store_type": "file"}}
    return found | {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": ranks}


def _across(gang: GangPart) -> dict[str, Any]:
    """Settings of the launcher for this node's part of a gang."""
    meeting = {
        "rdzv_endpoint": f"{gang.address}:{gang.port}",
        "rdzv_configs": {"rank": gang.node, "timeout": 900},
    }
    return meeting | {
        "rdzv_backend": "static",
        "min_nodes": gang.nodes,
        "max_nodes": gang.nodes,
        "nproc_per_node": gang.local,
    }


def _be(request: TrialRequest, pipe: BinaryIO, meeting: str | None) -> None:
    """Be the rank that the launcher's environment variables name."""
    for number in (
        signal.SIGTERM,
        signal.SIGINT,
        signal.SIGHUP,
        signal.SIGQUIT,
    ):  # the launcher's own handlers are the forks', too
        signal.signal(number, signal.SIG_DFL)
    threading.Thread(target=_end_with, args=(os.getppid(),), daemon=True).start()
    status = exit_status(lambda: _compute(request, int(os.environ["RANK"]), pipe, meeting))
    if status:
        os._exit(status)


def _compute(request: TrialRequest, rank: int, pipe: BinaryIO, meeting: str | None) -> None:
    try:
        _part(request, rank, pipe, meeting)
    except RuntimeError as error:
        if any(word in str(error) for word in _PEER_LOST):
            time.sleep(
                _PEER_SECONDS
            )  # another rank ended, whose reason is the one to be told: the launcher ends this one meanwhile
        raise


def _part(request: TrialRequest, rank: int, pipe: BinaryIO, meeting: str | None) -> None:
    from ablate.training.distributed import join

    spec = TrialSpec.parse(request.spec)
    if spec.device == "cuda":
        import torch

        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    layout = Layout(request.ranks, request.sharded)
    world = join(layout, rank, spec.device, meeting)
    if rank == 0:
        for recorded in run(
            spec, Store(Path(request.root)), request.attempt, request.telemetry, request.fork, layout.ranks
        ):
            send(pipe, message_of(recorded))
    elif world.begins():
        _follow(spec, request.telemetry)
    world.leave()


def _follow(spec: TrialSpec, telemetry: dict[str, Any]) -> None:
    """Do this rank's part of every step. What it records, rank 0 records too."""
    from ablate.training.loop import Telemetry

    records = spec.config.records(spec.recipe, spec.seed, spec.engine, spec.device, Telemetry(**telemetry))
    for _ in within_memory(({"step": record.step} for record in records), spec.device):
        pass


def _end_with(parent: int) -> None:
    """End when the launcher does, which may have been killed."""
    while os.getppid() == parent:
        time.sleep(_POLL_SECONDS)
    os._exit(1)
