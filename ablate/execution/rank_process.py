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
from typing import Any, BinaryIO, Literal

from ablate.execution.messages import RankDied, TrialRequest, send
from ablate.execution.process_guard import exit_with_parent
from ablate.execution.trial_runner import exit_status, messages, start_cuda, within_memory
from ablate.experiment.trial_spec import TrialSpec
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
    with tempfile.TemporaryDirectory(prefix="ablate-ranks-") as folder:
        meeting: str | None = f"{folder}/ranks"
        nodes, local, rendezvous = 1, request.ranks, dict[str, Any]()
        if gang := request.gang:
            meeting, nodes, local = None, gang.nodes, gang.local
            rendezvous = {"rdzv_backend": "static", "rdzv_endpoint": f"{gang.address}:{gang.port}"}
            rendezvous["rdzv_configs"] = {"rank": gang.node, "timeout": 900}
        else:  # ranks on this machine alone exchange addresses by a file
            os.environ.update(_LOOPBACK | os.environ)
            rendezvous = {"rdzv_backend": "c10d", "rdzv_endpoint": f"{folder}/launcher"}
            rendezvous["rdzv_configs"] = {"store_type": "file"}
        config = LaunchConfig(
            min_nodes=nodes,
            max_nodes=nodes,
            nproc_per_node=local,
            run_id=request.id,
            start_method=method,
            max_restarts=0,
            shutdown_timeout=_END_SECONDS,
            logs_specs=DefaultLogsSpecs(log_dir=folder),
            **rendezvous,
        )
        try:
            # A fresh interpreter opens the pipe by its path: it inherits no descriptor of it.
            path = f"/proc/{os.getpid()}/fd/{pipe.fileno()}"
            elastic_launch(config, _run_rank)(request, path, meeting)
        except ChildFailedError as error:
            ((rank, failure),) = error.failures.items()
            return RankDied(rank, failure.exitcode)
    return None


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
    from ablate.training.distributed import join

    spec = TrialSpec.parse(request.spec)
    if spec.device == "cuda":
        start_cuda(int(os.environ["LOCAL_RANK"]))
    try:
        world = join(Layout(request.ranks, request.sharded), rank, spec.device, meeting)
        if rank == 0:
            for message in messages(request, spec):
                send(pipe, message)
        elif world.begins():  # this rank's part of every step; its records are dropped: rank 0 has the same
            records = spec.records(Telemetry.model_validate(request.telemetry))
            for _ in within_memory(({"step": record.step} for record in records), spec.device):
                pass
        world.leave()
    except RuntimeError as error:
        if any(part in str(error) for part in _PEER_LOST):
            time.sleep(PEER_SECONDS)  # the rank that ended first has the reason; the launcher ends this one
        raise
