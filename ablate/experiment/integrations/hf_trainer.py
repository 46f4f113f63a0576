"""Callback for the Trainer of transformers.

    trainer = Trainer(..., callbacks=[ablate.integrations.HFCallback("nvfp4")])

The model is converted when training begins. Steps begin and end with the Trainer's, over all micro-batches
of its gradient accumulation; between two steps the model computes as in an evaluation, so `evaluate`,
`predict` and generation work there. Metrics and alarms are logged with the Trainer's own.

The state of the recipe is saved in the `trainer_state.json` of each checkpoint, as base64 of what
`torch.save` writes, because a callback gets the state of a checkpoint and not its folder.
`resume_from_checkpoint` continues bit for bit. (The loss that the Trainer logs is a mean since the last log,
which it does not save; so the first one after a checkpoint between two logs differs.)

Refused by name: DataParallel (several GPUs in one process) and DeepSpeed, which hold copies of the layers or
an optimizer of their own.
"""

import base64
import dataclasses
import io
import json
import logging
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Unpack

import torch
from torch import nn

from ablate.experiment import python_api
from ablate.experiment.integrations.position import Position, logged
from ablate.files import Json
from ablate.recipes.recipe import Recipe
from ablate.training.conversion import Conversion
from ablate.training.conversion_options import ConversionOptions, Keywords
from ablate.training.models import hidden_if_broken, quietly
from ablate.training.own_code.trial import Trial

with hidden_if_broken("transformer_engine"), quietly():  # the Trainer imports peft, which imports it
    from transformers import Trainer, TrainerCallback, TrainerControl, TrainerState, TrainingArguments
    from transformers.trainer_callback import ExportableState

if TYPE_CHECKING:
    from torch.optim import Optimizer
    from torch.optim.lr_scheduler import LRScheduler

_log = logging.getLogger(__name__)
_TIMES = ("runtime", "samples_per_second", "steps_per_second", "model_preparation_time")
"""Endings of the Trainer's evaluation metrics that are times: no part of a trial's record."""
_UNSAVED = ("filter", "linears")
"""Options that a checkpoint cannot hold: functions and classes."""


class HFCallback(TrainerCallback, ExportableState):
    """A recipe in the Trainer of transformers, alone or as a trial of a sweep.

    Args:
        recipe: as for `ablate.convert`.
        set: as for `ablate.convert`.
        restore: make the layers plain again at the end of the training.
        per_layer: log the errors of single layers too; they are many.
        trial: trial of a sweep, instead of all arguments above but `blocks`, `filter` and `linears`: it has
            the recipe, and gets the logs. Train with `resume_from_checkpoint=callback.resume_from`. Give the
            arguments of the Trainer `seed=trial.seed`, `max_steps=trial.max_steps` and `logging_steps=1`.
            The trial writes checkpoints itself, and a loss that is not finite ends it.
        options: as for `ablate.convert`; `steps`, for a schedule by fractions, is by default the Trainer's.

    Attributes:
        run: the `Conversion`; None before training has begun, after it with `restore`, and with a trial.
        resume_from: folder of the checkpoint from which an interrupted trial continues; else None.

    Example:
        >>> callback = HFCallback("nvfp4", set={"sr": False})
        >>> trainer = Trainer(model, arguments, train_dataset=data, callbacks=[callback])
    """

    def __init__(
        self,
        recipe: str | Path | Mapping[str, Json] | Recipe = "nvfp4",
        *,
        set: Mapping[str, Json] | None = None,
        restore: bool = False,
        per_layer: bool = False,
        trial: Trial | None = None,
        **options: Unpack[Keywords],
    ) -> None:
        resolved = trial.recipe if trial else python_api.recipe(recipe, set)
        self._planned = ConversionOptions(resolved, **options)
        self.restore, self.per_layer = restore, per_layer
        self.trial = trial
        self.run: Conversion | None = None
        self.resume_from: str | None = None
        self._position: Position | None = None
        self._alarmed: frozenset[str] = frozenset()
        self._part = _TrainerPart(trial.folder / "resume") if trial else None
        if trial and self._part:
            trial.checkpoint(trainer=self._part)
            self.resume_from = self._part.written

    def attach(self, trainer: Trainer) -> None:
        """Put this callback before those of a Trainer, instead of passing it as one of `callbacks`.

        Then the Trainer's reporters (W&B, TensorBoard, MLflow) get the metrics too: they are called before
        the callbacks that a user passes, so otherwise only the console and `trainer.state.log_history` do.
        """
        trainer.callback_handler.callbacks.insert(0, self)
        self.on_init_end(trainer.args, trainer.state, trainer.control)

    # --- events of the Trainer ------------------------------------------------------------------------

    def on_init_end(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Refuse arguments of the Trainer that this callback cannot work with."""
        if getattr(args, "restore_callback_states_from_checkpoint", False) and (
            self._planned.filter or self._planned.linears or self.trial
        ):
            raise ValueError(
                "restore_callback_states_from_checkpoint makes callbacks anew; a filter, linears or a trial"
                " cannot be saved; set it to False: HFCallback restores its state in every"
                " resume_from_checkpoint"
            )
        if args.n_gpu > 1:
            raise ValueError(
                f"the Trainer copies the model to {args.n_gpu} GPUs of one process (DataParallel), and the"
                " copies would draw the same random bits; start it by torchrun, or set CUDA_VISIBLE_DEVICES"
                " to one GPU"
            )
        if args.deepspeed:
            raise ValueError("DeepSpeed steps an optimizer of its own; use DDP or FSDP")

    def on_train_begin(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        model: nn.Module,
        **kwargs: object,
    ) -> None:
        """Convert the model, and load the state of the recipe if training continues from a checkpoint."""
        if self._position:  # of an earlier call of `train`, or of an attempt that ended in an error
            self._position.abandon()
        if self.trial:
            self._begin_trial(self.trial, args, state, model)
            return
        if self.run:
            self.run.restore()
        self.run = python_api.convert(model, **vars(self._planned.lasting(state.max_steps)))
        if state.global_step:
            self._resume(self.run, state)
        self._position = Position(self.run)
        self._position.begin_evaluation()

    def on_step_begin(
        self, args: TrainingArguments, state: TrainerState, control: TrainerControl, **kwargs: object
    ) -> None:
        """Begin a step, before the first micro-batch."""
        if self._part:
            self._part.follow(state, **kwargs)
        self._now.begin_step()

    def on_step_end(self, *event: object, **kwargs: object) -> None:
        """End the step, and be ready for an evaluation."""
        self._now.end_step()
        self._now.begin_evaluation()

    def on_evaluate(self, *event: object, **kwargs: object) -> None:
        """Forget the casts of an evaluation or prediction: weights may be loaded before the next one."""
        if self._position and self._position.in_evaluation:
            self._position.begin_evaluation()

    on_predict = on_evaluate

    def on_log(
        self,
        args: TrainingArguments,
        state: TrainerState,
        control: TrainerControl,
        logs: dict[str, float],
        **kwargs: object,
    ) -> None:
        """Add metrics and alarms to what is logged of a step, or record it in the trial."""
        if self.trial:
            self.trial.log(_recorded(logs))
        elif self.run and self._position and "loss" in logs:
            alarms = self.run.alarms()
            metrics = logged(self.run.metrics(), self.per_layer) | {"alarms": float(len(alarms))}
            logs |= metrics
            if state.log_history:
                state.log_history[-1] |= metrics
            sentences = frozenset(map(str, alarms))
            for sentence in sorted(sentences - self._alarmed):
                _log.warning("step %d: %s", state.global_step, sentence)
            self._alarmed = sentences

    def on_train_end(self, *event: object, **kwargs: object) -> None:
        """Be ready for evaluations after the training, or make the layers plain again."""
        self._now.abandon()
        if self.run and self.restore:
            self.run.restore()
            self.run = self._position = None
        else:
            self._now.begin_evaluation()

    # --- checkpoints ----------------------------------------------------------------------------------

    def state(self) -> dict[str, dict[str, object]]:
        """Return what a checkpoint of the Trainer saves: the arguments, and the state of the recipe."""
        planned = {name: value for name, value in vars(self._planned).items() if name not in _UNSAVED}
        arguments = planned | {
            "recipe": self._planned.recipe.model_dump(mode="json"),
            "restore": self.restore,
            "per_layer": self.per_layer,
        }
        return {"args": arguments, "attributes": {"saved": self._saved()}}

    def _saved(self) -> str | None:
        if self.run is None or self._position is None:
            return None
        evaluating = self._position.in_evaluation
        self._position.end_evaluation()  # within it, counts include its own
        file = io.BytesIO()
        torch.save(self.run.state_dict(), file)
        if evaluating:
            self._position.begin_evaluation()
        return base64.b64encode(file.getvalue()).decode()

    def _resume(self, run: Conversion, state: TrainerState) -> None:
        """Load the recipe's state from the Trainer's, which was read from a checkpoint."""
        mine = state.stateful_callbacks.get(type(self).__name__)
        if isinstance(mine, list):
            raise ValueError("the checkpoint has the states of several HFCallbacks; use one")
        saved = mine["attributes"]["saved"] if mine else None
        if saved is None:
            warnings.warn(
                f"the checkpoint of step {state.global_step} has no state of a recipe:"
                " the recipe begins at that step",
                stacklevel=2,
            )
            run.steps_done = state.global_step
            return
        run.load_state_dict(torch.load(io.BytesIO(base64.b64decode(saved)), weights_only=True))

    # --- a trial of a sweep ---------------------------------------------------------------------------

    def _begin_trial(
        self, trial: Trial, args: TrainingArguments, state: TrainerState, model: nn.Module
    ) -> None:
        if self._position:
            raise RuntimeError("a trial trains once: call train() once, with an HFCallback of its own")
        wrong = [
            f"{name}={found} (here {wanted})"
            for name, found, wanted in (
                ("seed", args.seed, trial.seed),
                ("max_steps", state.max_steps, trial.max_steps),
            )
            if found != wanted
        ]
        if wrong:
            raise ValueError(
                f"the Trainer's arguments contradict the trial: {', '.join(wrong)};"
                " give TrainingArguments seed=trial.seed and max_steps=trial.max_steps"
            )
        if self.resume_from and not state.global_step:
            raise RuntimeError(
                "the trial was interrupted and continues: call"
                " trainer.train(resume_from_checkpoint=callback.resume_from)"
            )
        args.logging_nan_inf_filter = False  # it replaces such a loss by a mean: no trial would diverge
        planned = self._planned
        trial.convert(model, blocks=planned.blocks, filter=planned.filter, linears=planned.linears)
        self._position = Position(trial)

    @property
    def _now(self) -> Position:
        if self._position is None:
            raise RuntimeError("HFCallback was added after training began; add it before train()")
        return self._position


class _TrainerPart:
    """The part of a trial's checkpoint that belongs to the Trainer: model, optimizer, scheduler, progress.

    A trial writes its checkpoints at times of its own, into one file. To continue, the Trainer needs a folder
    of the kind that it writes itself.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.written: str | None = None
        """The folder, if the trial continues from a checkpoint."""
        self._followed: tuple[TrainerState, nn.Module, Optimizer, LRScheduler] | None = None

    def follow(
        self,
        state: TrainerState,
        model: nn.Module,
        optimizer: "Optimizer",
        lr_scheduler: "LRScheduler",
        **kwargs: object,
    ) -> None:
        """Keep references to the objects of the step that begins."""
        self._followed = state, model, optimizer, lr_scheduler

    def state_dict(self) -> dict[str, object]:
        """Return the states of the objects at the beginning of a step."""
        if self._followed is None:
            raise RuntimeError("HFCallback: no step of the Trainer has begun")
        state, *parts = self._followed
        states = zip(("model", "optimizer", "scheduler"), parts, strict=True)
        trainer = json.dumps(dataclasses.asdict(state))
        return {**{name: part.state_dict() for name, part in states}, "trainer": trainer}

    def load_state_dict(self, state: Mapping[str, object]) -> None:
        """Write the folder."""
        self._folder.mkdir(parents=True, exist_ok=True)
        torch.save(state["model"], self._folder / "pytorch_model.bin")
        torch.save(state["optimizer"], self._folder / "optimizer.pt")
        torch.save(state["scheduler"], self._folder / "scheduler.pt")
        (self._folder / "trainer_state.json").write_text(str(state["trainer"]))
        self.written = str(self._folder)


def _recorded(logs: Mapping[str, object]) -> dict[str, float]:
    """Return what the Trainer logs under the names of a trial's record: train/loss, val/loss and others."""
    names = {"loss": "train/loss", "grad_norm": "grad/norm", "learning_rate": "train/lr"}
    metrics: dict[str, float] = {}
    for name, value in logs.items():
        if not isinstance(value, int | float):
            continue
        if name.startswith("eval_") and not name.endswith(_TIMES):
            metrics[f"val/{name.removeprefix('eval_')}"] = float(value)
        elif name in names:
            metrics[names[name]] = float(value)
    return metrics
