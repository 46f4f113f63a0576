"""The smallest thing that can be reproduced: one workload, one recipe, one seed, one engine. No Ray, no Optuna, no MLflow."""

import hashlib
import json
import time
from collections.abc import Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

from ablate import provenance
from ablate.numerics import spec as numerics
from ablate.numerics.spec import Spec
from ablate.recipes import Recipe
from ablate.store import Store, write
from ablate.workloads import WORKLOADS


class TrialSpec(Spec):
    """Everything that determines a trial's numbers, resolved: defaults included, the data by its fingerprint, versions by hand.

    Commit, library versions and hardware are recorded with the result but are not identity; nor is telemetry.
    """

    workload: str
    config: Spec
    recipe: Recipe
    seed: int
    engine: str
    device: str

    @cached_property
    def id(self) -> str:
        """16 hex digits of the hash of what determines the trial: `content` without the places where its data lies."""
        content = self._content(self.config.identity())
        return hashlib.sha256(json.dumps(content, sort_keys=True, separators=(",", ":")).encode()).hexdigest()[:16]

    @cached_property
    def wire(self) -> str:
        """The whole spec as JSON, with its id: what crosses to a worker, and what the trial's folder keeps."""
        return json.dumps({"id": self.id} | self._content(self.config.model_dump(mode="json")), sort_keys=True)

    def _content(self, config: dict[str, Any]) -> dict[str, Any]:
        return {
            "workload": {self.workload: config},
            "workload_version": self.config.VERSION,
            "data": self.config.fingerprint(),
            "recipe": self.recipe.model_dump(mode="json"),
            "numerics_version": numerics.VERSION,
            "seed": self.seed,
            "engine": self.engine,
            "device": self.device,
        }

    @classmethod
    def parse(cls, wire: str) -> "TrialSpec":
        """The spec that `wire` describes. ValueError where it was written by other versions, or for other data."""
        content = json.loads(wire)
        ((name, config),) = content["workload"].items()
        spec = cls(
            workload=name,
            config=WORKLOADS[name].model_validate_json(json.dumps(config)),
            recipe=Recipe.model_validate_json(json.dumps(content["recipe"])),
            **{key: content[key] for key in ("seed", "engine", "device")},
        )
        if spec.id != content["id"]:
            raise ValueError("this process resolves the trial differently: other versions of the code, or other data, than the planner's")
        return spec


def run(spec: TrialSpec, store: Store, attempt: int, telemetry: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Run the trial from its checkpoint if there is one, or replay it where it is finished; yields events {step, time, metrics}.

    Those with alarms have `alarms`; the first after a checkpoint has `resumed`, the checkpoint's step.

    Ends when the result is committed. Waits while another process runs the same trial. A non-finite loss is a result (`diverged`);
    an exception is not.
    """
    with store.claim(spec.id):
        if store.result(spec.id) is not None:
            yield from store.events(spec.id)
            return
        folder = store.folder(spec.id)
        write(folder / "spec.json", json.loads(spec.wire))
        started, event = time.time(), None
        with (folder / f"events-{attempt}.jsonl").open("w") as events:
            for event in _events(spec, telemetry, folder / "checkpoint.pt"):
                print(json.dumps(event), file=events, flush=True)
                yield event
        store.commit(spec.id, _result(spec, attempt, started, event))
        (folder / "checkpoint.pt").unlink(missing_ok=True)


def _events(spec: TrialSpec, telemetry: dict[str, Any], checkpoint: Path) -> Iterator[dict[str, Any]]:
    from ablate.checkpoints import Checkpoints  # torch: only where a trial runs
    from ablate.metrics import alarms
    from ablate.train import Telemetry

    how = Telemetry(**telemetry)
    checkpoints, told = Checkpoints(checkpoint, spec.id, how.checkpoint), False
    for record in spec.config.records(spec.recipe, spec.seed, spec.engine, spec.device, how, checkpoints):
        event = {"step": record.step, "time": time.time(), "metrics": record.metrics}
        if found := alarms(record.metrics):
            event["alarms"] = found
        if checkpoints.resumed and not told:
            event["resumed"], told = checkpoints.resumed, True
        yield event


def _result(spec: TrialSpec, attempt: int, started: float, last: dict[str, Any]) -> dict[str, Any]:
    diverged = last["metrics"].get("nan/first_step")
    return {
        "id": spec.id,
        "status": "done" if diverged is None else "diverged",
        "reason": None if diverged is None else f"non-finite loss or gradient at step {int(diverged)}",
        "attempt": attempt,
        "steps": last["step"],
        "seconds": time.time() - started,
        "started": started,
        "facts": spec.config.summary(),
        "environment": provenance.environment(),
    }
