"""Several processes of one group, as torchrun would start them: forked, so that what they run need not be imported again.

From a process in which torch uses one thread, as tests do: its pool of threads does not survive a fork.
"""

import importlib
import multiprocessing
import os
import tempfile
import traceback
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from ablate.execution.rank_process import SHARDING

for module in SHARDING:  # by every rank otherwise
    importlib.import_module(module)
_SECONDS = 120


def in_ranks(count: int, work: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Return the result of `work(*arguments)` in each of `count` processes of a gloo group, by rank."""
    context = multiprocessing.get_context("fork")
    with tempfile.TemporaryDirectory() as folder:
        pipes, processes = [], []
        for rank in range(count):
            ours, theirs = context.Pipe(duplex=False)
            process = context.Process(target=_rank, args=(rank, count, Path(folder), theirs, work, arguments))
            process.start()
            theirs.close()
            pipes.append(ours)
            processes.append(process)
        try:
            return [
                _result(rank, pipe, process)
                for rank, (pipe, process) in enumerate(zip(pipes, processes, strict=True))
            ]
        finally:
            for process in processes:
                process.kill()
                process.join()


def _rank(rank: int, count: int, folder: Path, pipe: Any, work: Callable[..., Any], arguments: tuple) -> None:
    try:
        options = {"rank": rank, "world_size": count, "timeout": timedelta(seconds=_SECONDS / 2)}
        dist.init_process_group("gloo", init_method=f"file://{folder}/store", **options)
        pipe.send((True, work(*arguments)))
        dist.barrier()  # or the first to end takes its connections from the others
    except Exception:  # of whatever class: `work` is a test's, and its failure becomes the caller's
        pipe.send((False, traceback.format_exc()))
    finally:
        os._exit(0)


def _result(rank: int, pipe: Any, process: Any) -> Any:
    if not pipe.poll(_SECONDS):
        raise TimeoutError(f"rank {rank} did not answer")
    try:
        fine, result = pipe.recv()
    except EOFError:
        process.join()
        raise RuntimeError(f"rank {rank} died without a word, with exit code {process.exitcode}") from None
    assert fine, f"rank {rank}: {result}"
    return result
