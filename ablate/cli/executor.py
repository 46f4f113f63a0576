"""Executor of a sweep, which starts while the command still imports its other parts."""

from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress

from ablate.cli.common import console
from ablate.cli.settings import Settings
from ablate.execution.progress import Executor
from ablate.execution.workers import ClusterError, Inline, Pool
from ablate.experiment.schema import Resources
from ablate.verification.checkup import Checkup


class StartingExecutor:
    """Executor that starts at `begin`, with the check of the numerics; a call waits for both and returns it.

    Ray takes seconds to start, most of them idle. Meanwhile this process imports Optuna and reads the ledger.
    The thread that starts it lives until `close`: Linux kills Ray's processes once that thread has ended.
    """

    def __init__(self, settings: Settings, resources: Resources, checkup: Checkup) -> None:
        self._settings, self._resources, self._checkup = settings, resources, checkup
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="ray")
        self._pool: Future[Pool] | None = None
        self._begun = False

    def begin(self) -> None:
        """Start the check and, on Ray, the workers, unless that was done."""
        if self._begun:
            return
        self._begun = True
        self._checkup.start()
        if self._settings.executor != "inline":
            self._pool = self._thread.submit(self._start_pool)

    def __call__(self) -> Executor:
        """Return the executor once the check has passed.

        Raises:
            Unfit: the check has not passed; the executor is closed.
            ClusterError: Ray cannot be started or reached.
        """
        self.begin()
        executor: Executor = self._inline() if self._pool is None else self._pool.result()
        try:
            self._checkup.passed()
        except BaseException:
            executor.close()
            raise
        finally:
            self._pool = None  # closed here or by its new owner
        return executor

    def close(self) -> None:
        """Close an executor that nobody has asked for."""
        if self._pool is not None:
            with suppress(ClusterError):
                self._pool.result().close()
            self._pool = None
        self._thread.shutdown()

    def _start_pool(self) -> Pool:
        settings, resources = self._settings, self._resources
        gpus, ranks = resources.gpus_of(settings.device), resources.layout(settings.device).ranks
        return Pool(settings.ray, settings.workers, gpus, settings.priority, ranks, console().print)

    def _inline(self) -> Inline:
        if self._resources.layout(self._settings.device).ranks > 1:
            console().print(
                "Executor inline computes each trial on one rank instead of"
                f" {self._resources.layout(self._settings.device).ranks}: results differ only by the order of"
                " additions."
            )
        return Inline(self._settings.device)
