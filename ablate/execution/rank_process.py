"""Ranks of a trial that several processes compute, started in the trial's process by torch's launcher: forks
of it on CPUs, fresh interpreters on GPUs.

Rank 0 runs the trial: it alone writes to the trial store and sends the trial's events through the pipe. The
other ranks do their part of every step, once rank 0 has begun. All ranks print into the attempt's log, and
end with their parent.
"""

import logging
import os
import signal
import sys
import tempfile
import time
from pathlib import Path
from typing import BinaryIO, Literal

from ablate.execution.messages import GangPart, RankDied, TelemetrySettings, TrialRequest, message_of, send
from ablate.execution.process_guard import exit_with_parent
from ablate.execution.trial_runner import exit_status, run, start_cuda, within_memory
from ablate.experiment.trial_spec import TrialSpec
from ablate.store.trial_store import Store
from ablate.training.rank_layout import Layout
from ablate.training.trial_run import Telemetry

StartMethod = Literal["fork", "spawn"]
IMPORTS = ("torch.distributed.launcher.api", "ablate.training.distributed")
"""Slow imports of a trial with ranks, done once by the warm process."""
SHARDING = ("torch.distributed.fsdp", "torch._dynamo")
"""Further slow imports of a sharded trial: FSDP imports the second at its first use."""
_LOOPBACK = {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1"}
"""Environment of ranks on one machine: they exchange addresses by files and use the loopback interface. A
TCPStore of torch has no password and listens on all interfaces."""
if sys.platform == "linux":
    _LOOPBACK |= dict.fromkeys(("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME"), "lo")
_PEER_LOST = ("gloo/transport", "NCCL")
"""Parts of the error message of a rank whose peer is gone."""
PEER_SECONDS = 5.0
"""Time that a rank waits to be ended after it lost a peer. In a gang it ends well before the pool stops
waiting."""
_END_SECONDS = 5
"""Time for the other ranks to end after the first; then they are killed."""


def launch(request: TrialRequest, pipe: BinaryIO, method: StartMethod = "fork") -> RankDied | None:
    """Compute this node's part of a trial in processes of its own, the ranks. Rank 0 writes the trial's
    messages to the pipe. Return the rank whose death ended the others; None if all ranks are done. `method`:
    a fork is quick; on a GPU each rank needs a fresh interpreter."""
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    for name in ("torch.distributed.elastic", "torch.multiprocessing"):
        logging.getLogger(name).setLevel(logging.CRITICAL)  # each rank prints its own error
    settings: dict[str, object] = {
        "start_method": method,
        "max_restarts": 0,
        "run_id": request.id,
        "shutdown_timeout": _END_SECONDS,
    }
    with tempfile.TemporaryDirectory(prefix="ablate-ranks-") as folder:
        meeting = None if request.gang else f"{folder}/ranks"
        settings |= _gang(request.gang) if request.gang else _one_node(request.ranks, f"{folder}/launcher")
        settings["logs_specs"] = DefaultLogsSpecs(log_dir=folder)
        try:
            # A fresh interpreter opens the pipe by its path: it inherits no descriptor of it.
            path = f"/proc/{os.getpid()}/fd/{pipe.fileno()}"
            elastic_launch(LaunchConfig(**settings), _run_rank)(request, path, meeting)
        except ChildFailedError as error:
            ((rank, failure),) = error.failures.items()
            return RankDied(rank, failure.exitcode)
    return None


def _one_node(ranks: int, meeting: str) -> dict[str, object]:
    """Return the launcher's settings for ranks on this machine alone, which exchange addresses by a file."""
    os.environ.update(_LOOPBACK | os.environ)
    rendezvous = {"rdzv_backend": "c10d", "rdzv_endpoint": meeting, "rdzv_configs": {"store_type": "file"}}
    return rendezvous | {"min_nodes": 1, "max_nodes": 1, "nproc_per_node": ranks}


def _gang(gang: GangPart) -> dict[str, object]:
    """Return the launcher's settings for this node's part of a gang."""
    rendezvous = {
        "rdzv_endpoint": f"{gang.address}:{gang.port}",
        "rdzv_configs": {"rank": gang.node, "timeout": 900},
    }
    return rendezvous | {
        "rdzv_backend": "static",
        "min_nodes": gang.nodes,
        "max_nodes": gang.nodes,
        "nproc_per_node": gang.local,
    }


def _run_rank(request: TrialRequest, path: str, meeting: str | None) -> None:
    """Run the rank that the launcher's environment variables name. `path`: of the pipe for the trial's
    messages; `meeting`: file through which the ranks of one machine find each other, None for a gang."""
    # A fork has inherited the launcher's handlers.
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGQUIT):
        signal.signal(number, signal.SIG_DFL)
    exit_with_parent()
    with open(path, "wb") as pipe:
        status = exit_status(lambda: _compute(request, int(os.environ["RANK"]), pipe, meeting))
    if status:
        os._exit(status)


def _compute(request: TrialRequest, rank: int, pipe: BinaryIO, meeting: str | None) -> None:
    try:
        _train(request, rank, pipe, meeting)
    except RuntimeError as error:
        if any(part in str(error) for part in _PEER_LOST):
            time.sleep(PEER_SECONDS)  # the rank that ended first has the reason; the launcher ends this one
        raise


def _train(request: TrialRequest, rank: int, pipe: BinaryIO, meeting: str | None) -> None:
    from ablate.training.distributed import join

    spec = TrialSpec.parse(request.spec)
    if spec.device == "cuda":
        start_cuda(int(os.environ["LOCAL_RANK"]))
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


def _follow(spec: TrialSpec, telemetry: TelemetrySettings) -> None:
    """Do this rank's part of every step. Its records are dropped: rank 0 has the same."""
    settings = Telemetry.model_validate(telemetry)
    records = spec.records(settings)
    for _ in within_memory(({"step": record.step} for record in records), spec.device):
        pass
