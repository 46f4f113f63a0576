"""Callback for the Trainer of Lightning.

    trainer = Trainer(..., callbacks=[ablate.integrations.LightningCallback("nvfp4")])
    trainer.fit(module, loader)

The model is converted when `fit` begins. A step covers all batches of the gradient accumulation; validation,
test and prediction compute as in `evaluation()`. Metrics and alarms go to the loggers, and the recipe's state
into checkpoints, so `fit(ckpt_path=...)` continues bit for bit.

Lightning runs the forward and backward passes inside of the optimizer's step. Rules for weights act between
the backward pass and the update, so recipes that have such rules are refused.
"""

import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Unpack

from lightning.pytorch import Callback, LightningModule, Trainer

from ablate.experiment import python_api
from ablate.experiment.integrations.position import Position, logged
from ablate.files import Json
from ablate.recipes.recipe import Recipe, Weights
from ablate.training.conversion import Conversion, ConversionState
from ablate.training.conversion_options import ConversionOptions, Keywords

_log = logging.getLogger(__name__)


class LightningCallback(Callback):
    """A recipe in the Trainer of Lightning, with automatic optimization.

    Args:
        recipe: as for `ablate.convert`.
        set: as for `ablate.convert`.
        restore: make the layers plain again when `fit` ends.
        per_layer: log the errors of single layers too; they are many.
        options: as for `ablate.convert`; `steps`, for a schedule by fractions, is by default the Trainer's.

    Attributes:
        run: the `Conversion`; None before `fit` has begun, and after it with `restore`.

    Raises:
        ValueError: the recipe is wrong, or has rules for weights.
    """

    def __init__(
        self,
        recipe: str | Path | Mapping[str, Json] | Recipe = "nvfp4",
        *,
        set: Mapping[str, Json] | None = None,
        restore: bool = False,
        per_layer: bool = False,
        **options: Unpack[Keywords],
    ) -> None:
        super().__init__()
        resolved = python_api.recipe(recipe, set)
        if resolved.weights != Weights():
            raise ValueError(
                "the recipe has rules for weights, which act between backward pass and update; Lightning runs"
                " both inside of optimizer.step(). Use a loop of your own with ablate.convert"
            )
        self._planned = ConversionOptions(resolved, **options)
        self.restore, self.per_layer = restore, per_layer
        self.run: Conversion | None = None
        self._position: Position | None = None
        self._saved: ConversionState | None = None
        self._kept: ConversionState | dict[str, object] = {}
        """State at the beginning of a step of several batches, or at the end of a fit with `restore`."""
        self._first = 0
        self._alarmed: frozenset[str] = frozenset()

    # --- events of the Trainer ------------------------------------------------------------------------

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        """Forget the state of a checkpoint that was only evaluated; that of a fit is loaded after this."""
        self._saved = None

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Convert the model, and load the state of the recipe if the fit continues from a checkpoint."""
        if not pl_module.automatic_optimization:
            raise ValueError(
                "the module optimizes by itself (automatic_optimization=False), so its steps are unknown"
                " here; call ablate.convert in it, and put its steps inside `with run.step():`"
            )
        if self._position:
            self._position.abandon()
        if self.run:
            self.run.restore()
        options = self._planned.lasting(trainer.estimated_stepping_batches)
        self.run = python_api.convert(pl_module, **vars(options))
        if self._saved:
            self.run.load_state_dict(self._saved)
            self._saved = None
        self._position = Position(self.run)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin the recipe at the step of a training that continues without a state of it."""
        if self.run and trainer.global_step and not self.run.steps_done:
            warnings.warn(
                f"step {trainer.global_step} continues without a state of a recipe: it begins at that step",
                stacklevel=2,
            )
            self.run.steps_done = trainer.global_step

    def on_train_batch_start(
        self, trainer: Trainer, pl_module: LightningModule, batch: object, batch_idx: int
    ) -> None:
        """Begin a step before the first batch of an accumulation."""
        if self._position and not self._position.in_step:
            self._trainer, self._first = trainer, trainer.global_step
            self._kept = self.state_dict() if trainer.accumulate_grad_batches > 1 else {}
            self._position.begin_step()

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        """End the step if the optimizer has stepped, and log."""
        if not (self.run and self._position) or trainer.global_step == self._first:
            return
        self._position.end_step()
        if trainer.global_step % trainer.log_every_n_steps == 0:
            alarms = self.run.alarms()
            metrics = logged(self.run.metrics(), self.per_layer) | {"alarms": float(len(alarms))}
            pl_module.log_dict(metrics, on_step=True, on_epoch=False, batch_size=1)
            sentences = frozenset(map(str, alarms))
            for sentence in sorted(sentences - self._alarmed):
                _log.warning("step %d: %s", trainer.global_step, sentence)
            self._alarmed = sentences

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Make the layers plain again, if asked."""
        if self._position:
            self._position.abandon()
        if self.run and self.restore:
            self._kept = self.state_dict()
            self.run.restore()
            self.run = self._position = None

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        """Leave a step that did not end; it does not count."""
        if self._position:
            self._position.abandon()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Begin an evaluation."""
        if self._position:
            self._position.begin_evaluation()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """End the evaluation."""
        if self._position:
            self._position.end_evaluation()

    on_test_start = on_predict_start = on_validation_start
    on_test_end = on_predict_end = on_validation_end

    # --- checkpoints ----------------------------------------------------------------------------------

    def state_dict(self) -> ConversionState | dict[str, object]:
        """Return the state of the recipe; Lightning saves it with a checkpoint. Between two batches of a step
        it is that of the step's beginning: no checkpoint has their gradients."""
        if not (self.run and self._position):
            return self._kept
        if self._position.in_step and self._trainer.global_step != self._first:
            self._position.end_step()  # a callback that comes before this one saves
        elif self._position.in_step and self._kept:
            return self._kept
        evaluating = self._position.in_evaluation  # ModelCheckpoint may save when a validation ends
        self._position.end_evaluation()
        state = self.run.state_dict()
        if evaluating:
            self._position.begin_evaluation()
        return state

    def load_state_dict(self, state_dict: ConversionState) -> None:
        """Keep the state until the model is converted."""
        self._saved = state_dict
