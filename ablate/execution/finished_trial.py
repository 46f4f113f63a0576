"""Model of a finished trial, with weights that it kept or is trained to again, as packed files."""

import hashlib
import math
import re
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from ablate.errors import InputError
from ablate.experiment.trial_spec import TrialSpec
from ablate.files import Damaged
from ablate.numerics.spec import statistic_of
from ablate.store.named_arms import members_of
from ablate.store.trial_store import Result, Store

if TYPE_CHECKING:
    from ablate.training.conversion import Conversion
    from ablate.training.evaluation import PreparedRun
    from ablate.training.final_weights import FinalWeights
    from ablate.training.packed_model import ExportedModel

Form = Literal["compressed-tensors", "modelopt"]
_ID = re.compile(r"[0-9a-f]{16}")
_KEEP = "set `telemetry: {keep_weights: true}` before a sweep, or give --train to train it again now"


@dataclass(frozen=True)
class FinishedTrial:
    """A finished trial that a user named."""

    run: str
    """Words that name it: SWEEP:ARM, or the trial's id."""
    spec: TrialSpec
    result: Result
    store: Store

    @classmethod
    def of(cls, run: str, seed: int | None, store: Store) -> "FinishedTrial":
        """Return the trial that the words name; InputError if there is none, or if it is not finished."""
        trial = run if _ID.fullmatch(run) else _member(run, seed, store)
        path = store.folder(trial) / "spec.json"
        try:
            spec = TrialSpec.parse(path.read_text(), id=trial)
            result = store.result(trial)
        except FileNotFoundError:
            raise InputError(f"{run}: there is no trial {trial} in {store.root}") from None
        except (Damaged, ValueError) as error:
            raise InputError(f"{run}: {error}") from None
        if result is None:
            raise InputError(f"{run}: trial {trial} is not finished; `ablate sweep` continues it")
        return cls(run, spec, result, store)

    def refusals(self) -> list[str]:
        """Return why a trial's weights cannot be packed as it trained; empty if they can be tried."""
        spec, recipe = self.spec, self.spec.recipe
        reasons = []
        if self.result["status"] != "done":
            reasons.append(f"it {self.result['status']}: {self.result['reason']}")
        if spec.config.training is None:
            reasons.append(f"workload {spec.workload}: its trials have no model of ours to pack")
        if spec.forks:
            reasons.append("it is forked, and ends in many models; export an arm that trains once")
        if recipe.weights.q_ema:
            reasons.append("weights.q_ema rounds by moving averages, which are not kept")
        rules = (
            recipe,
            *(rule.use for rule in recipe.layers.rules),
            *(phase.use for phase in recipe.schedule),
        )
        for products in rules:
            outer = products and products.fprop.w and products.fprop.w.outer
            if outer and statistic_of(outer.statistic).earlier:
                reasons.append(
                    f"fprop.w.outer.statistic {outer.statistic}: amaxes of earlier steps are not kept"
                )
        return reasons

    def export(self, target: Path, form: Form, calibrate: int, train: bool) -> "ExportedModel":
        """Write the trial's weights as its recipe's forward pass quantises them, packed for serving.

        Args:
            target: folder for the files, which must not hold an export.
            form: layout of the files.
            calibrate: number of validation batches whose largest inputs become static scales.
            train: train the trial again if it keeps no weights.

        Raises:
            InputError: it keeps no weights, its recipe cannot be packed, or the folder is in use.
        """
        from ablate.training.packed_model import export_model, require_no_export

        try:
            require_no_export(target)  # before a trial is trained again
        except ValueError as error:
            raise InputError(f"--out {error}") from None
        weights = self._weights(train)
        if weights.fallbacks:
            raise InputError(
                f"{self.run}: the guard changed the precision of layers during the run, which is not kept"
            )
        prepared, conversion = self._loaded(weights)
        batches = prepared.validation[:calibrate]

        def measure() -> None:
            for batch in batches:
                (prepared.loss or prepared.model)(*batch)

        try:
            return export_model(conversion, target, form, calibrate=measure if batches else None)
        except ValueError as error:
            raise InputError(f"{self.run}: {error}") from None

    def _weights(self, train: bool) -> "FinalWeights":
        """Return the final weights of a trial, kept or trained again."""
        from ablate.training import final_weights

        trial, sealed = self.spec.id, self.result.get("weights")
        if sealed:
            path = self.store.weights(trial)
            try:
                with path.open("rb") as file:
                    digest = hashlib.file_digest(file, "sha256").hexdigest()
                if digest != sealed["sha256"]:
                    raise Damaged(path, "damaged: its checksum is not the one in result.json")
                return final_weights.read(path)
            except FileNotFoundError:
                why = f"{path}: it has been deleted"
            except Damaged as error:
                why = str(error)
        else:
            why = f"trial {trial} keeps no weights"
        if not train:
            raise InputError(f"{why}; {_KEEP}")
        return self._trained_again()

    def _trained_again(self) -> "FinalWeights":
        """Train a trial again in a temporary folder; InputError if it ends in other numbers than it has."""
        from ablate.training import final_weights
        from ablate.training.checkpoints import Checkpoints
        from ablate.training.loop import Telemetry

        spec = self.spec
        seldom = Telemetry(every=10**9, shadow=10**9, log=10**9, checkpoint=1e9, keep_weights=True)
        with tempfile.TemporaryDirectory() as folder:
            metrics: dict[str, Any] = {}
            for record in spec.records(
                seldom, Checkpoints(Path(folder) / "checkpoint.pt", spec.id, math.inf)
            ):
                metrics = record.metrics
            last: dict[str, Any] = {}
            for event in self.store.events(spec.id, strict=False):
                last = event["metrics"] if event["step"] == self.result["steps"] else last
            common = sorted(name for name in metrics if name.startswith("val/") and name in last)
            differ = [name for name in common if metrics[name] != last[name]]
            if differ or not common:
                name = differ[0] if differ else "val/loss"
                raise InputError(
                    f"trial {spec.id}, trained again, has {name} {metrics.get(name)} where it had"
                    f" {last.get(name)}: another machine or version computes other bits"
                )
            return final_weights.read(Path(folder) / final_weights.NAME)

    def _loaded(self, weights: "FinalWeights") -> tuple["PreparedRun", "Conversion"]:
        """Return the model with its final weights, and the handle that `export_model` takes."""
        from ablate.training.conversion import Conversion

        spec = self.spec
        config = spec.config.model_copy(update={"compile": False, "recompute": False})
        prepared: PreparedRun = config.prepare(spec.recipe, spec.seed, "cpu")
        prepared.model.load_state_dict(weights.model)
        prepared.engine.tripped = {each for each in spec.recipe.triggers if repr(each) in weights.tripped}
        conversion = Conversion(prepared.model, prepared.engine, config.length, 0, ())
        conversion.steps_done = weights.step
        return prepared, conversion


def _member(run: str, seed: int | None, store: Store) -> str:
    """Return the id of the trial of an arm at a seed."""
    of_arm = {member.seed: member.id for member in members_of(run, store.root)}
    if seed is None and len(of_arm) > 1:
        raise InputError(f"{run}: it has the seeds {', '.join(map(str, sorted(of_arm)))}; give one by --seed")
    chosen = next(iter(of_arm)) if seed is None else seed
    if chosen not in of_arm:
        raise InputError(f"--seed {seed}: {run} has the seeds {', '.join(map(str, sorted(of_arm)))}")
    return of_arm[chosen]
