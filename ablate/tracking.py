"""The ledger, drawn in MLflow by one background thread. The only file that knows MLflow; no trial ever waits for it.

One experiment a sweep, one parent run a sweep, one child run a member. Records keep their own timestamps, so that shipping one
twice stores it once. A server that is slow, dead or back again changes nothing but how far behind the picture is.
"""

import json
import os
import queue
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

from ablate.ledger import Ledger
from ablate.store import Store, lock

_TERMINAL = {"done": "FINISHED", "diverged": "FINISHED", "failed": "FAILED"}
_METRICS_A_BATCH, _PARAMS_A_BATCH = 1000, 100  # MLflow's limits
_INTERVAL = 1.0
_RETRY_SECONDS = 5.0
_TOP_LEVEL = ("/sqnr_db", "/zero_frac")
"""What MLflow gets of each slot's errors; the rest stays in the ledger, so that a run has about 30 keys and its page stays usable."""


@dataclass(frozen=True)
class Shipped:
    """News for the ledger: a member's run, up to which step it is complete, and whether it is closed."""

    arm: int
    seed: int
    run: str
    step: int
    closed: bool


class Projector:
    """Draws one sweep's ledger in MLflow. `news` is for the controller, which alone writes the ledger."""

    def __init__(self, uri: str, state: Path, ledger: Path, sweep: str, facts: Mapping[str, str]) -> None:
        self.news: queue.SimpleQueue[Shipped] = queue.SimpleQueue()
        self.parent: str | None = None
        self.trouble: str | None = None
        """Why the picture is behind, while it is."""
        self._uri, self._state, self._ledger_path, self._sweep, self._facts = uri, state, ledger, sweep, dict(facts)
        self._metrics = json.loads(facts.get("metrics") or "[]")
        self._shipped: dict[tuple[int, int], Shipped] = {}
        self._finish: tuple[str, str] | None = None
        self._stop = threading.Event()
        self._wake = threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlflow", daemon=True)
        self._thread.start()

    def finish(self, status: str, note: str, seconds: float) -> bool:
        """Ship what is left and close the parent run, waiting at most `seconds`; whether everything was shipped."""
        self._finish = (status, note)
        self._wake.set()
        self._thread.join(seconds)
        self._stop.set()
        return not self._thread.is_alive()

    def _run(self) -> None:
        ledger = Ledger(self._ledger_path, readonly=True)
        client = None
        while not self._stop.is_set():
            try:
                client = client or self._connect()
                last = self._finish
                self._ship(client, ledger)
                self.trouble = None
                if last:
                    self._close(client, *last)
                    break
            except Exception as error:  # a picture must not end the sweep: said in the status line, tried again
                self.trouble = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"
                self._stop.wait(_RETRY_SECONDS)
            self._wake.wait(_INTERVAL)
            self._wake.clear()
        ledger.close()

    def _connect(self) -> Any:
        os.environ.setdefault("MLFLOW_DISABLE_TELEMETRY", "true")
        os.environ.setdefault("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "1")
        os.environ.setdefault("MLFLOW_LOGGING_LEVEL", "WARNING")
        from mlflow import MlflowClient

        client = MlflowClient(self._uri)
        with lock(self._state / "mlflow.lock"):  # two processes that open a fresh database crash each other in its migration
            self._experiment = self._experiment_id(client)
        self.parent = self._facts.get("mlflow_parent") or self._find_parent(client) or self._new_parent(client)
        client.update_run(self.parent, status="RUNNING")
        return client

    def _experiment_id(self, client: Any) -> str:
        known = client.get_experiment_by_name(self._sweep)
        if known is not None:
            return known.experiment_id
        local = self._uri.startswith("sqlite:")
        location = (self._state / "artifacts" / self._sweep).resolve().as_uri() if local else None
        kind = {"mlflow.experimentKind": "custom_model_development"}  # or its page opens on traces of language models
        return client.create_experiment(self._sweep, artifact_location=location, tags=kind)

    def _find_parent(self, client: Any) -> str | None:
        """This sweep's run, where an earlier controller made it and died before it could say so."""
        runs = client.search_runs([self._experiment], f"tags.`ablate.sweep_id` = '{self._facts['sweep_id']}'", max_results=1)
        return runs[0].info.run_id if runs else None

    def _new_parent(self, client: Any) -> str:
        tags = {
            "ablate.kind": "sweep",
            "ablate.sweep_id": self._facts["sweep_id"],
            "ablate.sweep": self._sweep,
            "mlflow.note.content": self._facts.get("question", ""),
        }
        run = client.create_run(self._experiment, tags=tags, run_name=self._sweep)
        for name in ("experiment.yaml", "provenance.json", "uncommitted.diff"):
            if self._facts.get(name):
                client.log_text(run.info.run_id, self._facts[name], name)
        return run.info.run_id

    def _ship(self, client: Any, ledger: Ledger) -> None:
        """Bring every member's run up to date with the ledger."""
        for member in ledger.members():
            key = (member["arm"], member["seed"])
            known = self._shipped.get(key) or Shipped(*key, member["mlflow"] or "", member["shipped"], bool(member["closed"]))
            if known.closed or (member["status"] == "pending" and not known.run):
                continue
            run = self._open(client, member, known.run)
            step = self._records(client, ledger, member["trial"], run, known.step)
            closed = member["status"] in _TERMINAL
            if closed:
                self._artifacts(client, run, member)
                client.set_tag(run, "ablate.status", member["status"])
                client.set_terminated(run, _TERMINAL[member["status"]])
            self._note(Shipped(*key, run, step, closed), known)

    def _note(self, now: Shipped, known: Shipped) -> None:
        if now != known:
            self._shipped[now.arm, now.seed] = now
            self.news.put(now)

    def _open(self, client: Any, member: Mapping[str, Any], run: str) -> str:
        """This member's run: the known one, one that an earlier controller made and died before it could say so, or a new one."""
        if (member["arm"], member["seed"]) in self._shipped:
            return run
        run = run or self._find(client, member)
        if not run:
            return self._create(client, member)
        client.update_run(run, status="RUNNING")
        return run

    def _find(self, client: Any, member: Mapping[str, Any]) -> str | None:
        wanted = f"tags.`ablate.trial` = '{member['id']}' and tags.`ablate.member` = '{member['arm']}/{member['seed']}'"
        runs = client.search_runs([self._experiment], f"{wanted} and tags.`mlflow.parentRunId` = '{self.parent}'", max_results=1)
        return runs[0].info.run_id if runs else None

    def _create(self, client: Any, member: Mapping[str, Any]) -> str:
        from mlflow.entities import Param

        spec = json.loads(member["spec"])
        tags = {
            "mlflow.parentRunId": self.parent,
            "ablate.kind": "trial",
            "ablate.sweep": self._sweep,
            "ablate.arm": member["name"],
            "ablate.seed": str(member["seed"]),
            "ablate.member": f"{member['arm']}/{member['seed']}",
            "ablate.baseline": str(member["baseline"] is None).lower(),
            "ablate.trial": member["id"],
            "ablate.engine": spec["engine"],
            "ablate.device": spec["device"],
            "ablate.reused": str(bool(member["reused"])).lower(),
        }
        if member["optuna"] is not None:
            tags["ablate.optuna_trial"] = str(member["optuna"])
        run = client.create_run(self._experiment, tags=tags, run_name=f"{member['name']} seed={member['seed']}").info.run_id
        params = [Param(key, value) for key, value in _params(spec, json.loads(member["knobs"]), member["name"])]
        for start in range(0, len(params), _PARAMS_A_BATCH):
            client.log_batch(run, params=params[start : start + _PARAMS_A_BATCH])
        return run

    def _records(self, client: Any, ledger: Ledger, trial: int, run: str, after: int) -> int:
        """Ship a trial's records after a step, whole steps at a time; returns the last step shipped."""
        from mlflow.entities import Metric

        batch: list[Any] = []
        step = after
        for step, records in groupby(ledger.records(trial, after), key=lambda record: record[0]):
            metrics = [Metric(name, value, int(moment * 1000), step) for _, name, value, moment in records if self._shows(name)]
            if len(batch) + len(metrics) > _METRICS_A_BATCH:
                client.log_batch(run, metrics=batch)
                batch = []
            batch += metrics
        if batch:
            client.log_batch(run, metrics=batch)
        return step

    def _shows(self, name: str) -> bool:
        """Whether a metric goes to MLflow: what arms are compared by, and everything but per-layer series and most slots' errors."""
        return not name.startswith("quant/") or name in self._metrics or (name.count("/") == 2 and name.endswith(_TOP_LEVEL))

    def _artifacts(self, client: Any, run: str, member: Mapping[str, Any]) -> None:
        """The resolved spec and the result with its environment."""
        folder = Store(self._state).folder(member["id"])
        for name in ("spec.json", "result.json"):
            if (folder / name).exists():
                client.log_artifact(run, str(folder / name))

    def _close(self, client: Any, status: str, note: str) -> None:
        for member in self._shipped.values():
            if not member.closed:
                client.set_terminated(member.run, "KILLED")
        client.set_tag(self.parent, "mlflow.note.content", note)
        client.set_terminated(self.parent, status)


def _params(spec: Mapping[str, Any], knobs: Mapping[str, Any], arm: str) -> Iterator[tuple[str, str]]:
    """The knobs that were turned, then every resolved value by its path."""
    yield "arm", arm
    for knob, value in knobs.items():
        if not knob.startswith(("recipe.", "workload.")) and knob != "recipe":
            yield knob, json.dumps(value)
    yield "seed", str(spec["seed"])
    ((workload, config),) = spec["workload"].items()
    yield "workload", workload
    yield "data", spec["data"]
    yield from _flat("workload", config)
    yield from _flat("recipe", spec["recipe"])


def _flat(path: str, value: Any) -> Iterator[tuple[str, str]]:
    if isinstance(value, dict) and value:
        for key, inner in value.items():
            yield from _flat(f"{path}.{key}", inner)
    else:
        yield path, value if isinstance(value, str) else json.dumps(value)
