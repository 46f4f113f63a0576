"""A sweep of trials in one worker process, for figures.py.

The worker is a child of this process, so its processor time can be read, and it can be killed.

Arguments: folder, MLflow's address or `none`, seconds between checkpoints, `kill` or `leave`, and the file
that takes the figures.
"""

import json
import os
import resource
import subprocess
import sys
import threading
import time
from importlib import import_module
from pathlib import Path
from typing import Any

from sweeps import TINY, experiment, ledger

from ablate.execution.messages import Message, TrialRequest

STEPS = 400
TRAP = """\
import os
open(os.environ['ABLATE_TRAP'], 'a').write(f'{os.getpid()}\\n')
raise ImportError('MLflow in a trial process')
"""


class Worker:
    """Executor of one slot without Ray: the supervisor, and the warm process that forks each trial."""

    slots = 1

    def __init__(self) -> None:
        from ablate.execution.supervisor import Supervisor

        self.supervisor, self.trial, self.messages = Supervisor(), "", None

    def submit(self, request: TrialRequest) -> None:
        """Start a trial."""
        self.trial, self.messages = request.id, self.supervisor.run(request)

    def wait(self, seconds: float) -> list[tuple[str, Message]]:
        """Return the trial's next message."""
        return [(self.trial, next(self.messages))]

    def stop(self, trial: str) -> None:
        """Do nothing: these sweeps stop no trial."""

    def resize(self, slots: int) -> None:
        """Do nothing: there is one slot."""

    def close(self) -> None:
        """End the process."""
        self.supervisor.close()

    def kill(self) -> None:
        """Send SIGKILL to the trial's process and its warm parent, as the out-of-memory killer does."""
        parent = self.supervisor._child.pid
        for child in Path(f"/proc/{parent}/task/{parent}/children").read_text().split():
            os.kill(int(child), 9)
        os.kill(parent, 9)


def main(folder: Path, mlflow: str | None, every: float, kill: bool) -> dict[str, Any]:
    """Run the sweep and return its figures.

    They are the processor seconds of the trials' processes, the imports of MLflow in them, and for each trial
    that was killed the steps that it did twice.
    """
    import_module("mlflow")  # before the trap is set, which only processes started from here on find

    from ablate.execution.controller import Controller
    from ablate.execution.progress import Outcome
    from ablate.experiment.load import load

    trap, log = folder / "trap" / "mlflow", folder / "trapped.txt"
    trap.mkdir(parents=True)
    (trap / "__init__.py").write_text(TRAP)
    path = os.pathsep.join(filter(None, (str(trap.parent), os.environ.get("PYTHONPATH"))))
    os.environ |= {"PYTHONPATH": path, "ABLATE_TRAP": str(log)}
    subprocess.run([sys.executable, "-c", "import mlflow"], capture_output=True, check=False)
    trapped = len(log.read_text().splitlines())  # one: the trap works
    assert trapped == 1
    keys = {
        "telemetry": {"log": 1, "every": 1000, "shadow": 1000, "checkpoint": every},
        "ablate": {"rht": [True, False]},
        "retry": 9,
    }
    worker = Worker()
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    file = experiment(folder, "one", workload={"gpt": TINY | {"steps": STEPS}}, **keys)
    killed: list[dict[str, float]] = []
    controller = Controller(load(file), folder, "cpu", lambda: worker, mlflow)
    started = time.perf_counter()
    for step in controller.run():
        if isinstance(step, Outcome):
            assert step.status == "done"
            continue
        for running in step.running:
            if (
                kill
                and running.attempt == 1
                and running.step >= STEPS // 2
                and all(k["trial"] != running.trial for k in killed)
            ):
                killed.append({"trial": running.trial, "step": running.step})
                threading.Thread(target=worker.kill).start()
    seconds, after = time.perf_counter() - started, resource.getrusage(resource.RUSAGE_CHILDREN)
    return {
        "cpu_s": after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime,
        "seconds": seconds,
        "imports": len(log.read_text().splitlines()) - trapped,
        "repeated": [_repeated(folder, trial) for (trial,) in ledger(folder, "one", "SELECT id FROM trials")]
        if kill
        else [],
        "killed": len(killed),
    }


def _repeated(folder: Path, trial: str) -> dict[str, float]:
    """Return the steps that the first attempt of a trial did and the second did again, and their seconds."""
    attempts = sorted((folder / "trials" / trial).glob("events-*.jsonl"))
    events = [[json.loads(line) for line in path.read_text().splitlines()] for path in attempts]
    if len(events) < 2:
        return {"killed": 0}
    first, second = events[0], events[1]
    resumed = second[0].get("resumed", 0)
    span = first[-1]["time"] - next(event["time"] for event in first if event["step"] > resumed)
    return {
        "killed": 1,
        "reached": first[-1]["step"],
        "resumed": resumed,
        "repeated": first[-1]["step"] - resumed,
        "seconds": span,
    }


if __name__ == "__main__":
    folder, address, interval, ending, answer = sys.argv[1:]
    figures = main(Path(folder), None if address == "none" else address, float(interval), ending == "kill")
    Path(answer).write_text(json.dumps(figures))
