"""A recipe in a training loop with accelerate.

    accelerator = Accelerator(gradient_accumulation_steps=4)
    run = ablate.integrations.Accelerated(accelerator, model, "nvfp4", seed=0, steps=1000)
    model, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    for batch in loader:
        with run.accumulate(model):                   # instead of accelerator.accumulate(model)
            accelerator.backward(loss(model(batch)))
            optimizer.step()
            optimizer.zero_grad()

`accelerator.save_state` and `load_state` save and load the state of the recipe. Without gradient accumulation
`ablate.convert` and `with run.step():` are enough, since a `Conversion` can itself be registered for
checkpointing. What this file adds is the step over several iterations of the loop: accelerate decides in each
whether the optimizer steps.
"""

from collections.abc import Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Unpack

from accelerate import Accelerator
from accelerate.utils import DistributedType
from torch import nn

from ablate.experiment import python_api
from ablate.experiment.integrations.position import Position
from ablate.files import Json
from ablate.recipes.recipe import Recipe
from ablate.training.conversion import Conversion
from ablate.training.conversion_options import Keywords


class Accelerated:
    """A converted model whose steps are those of an `Accelerator`.

    Args:
        accelerator: it also saves and loads the recipe's state from now on.
        model: the model, before or after `accelerator.prepare`.
        recipe: as for `ablate.convert`.
        set, options: as for `ablate.convert`.

    Attributes:
        run: the `Conversion`: `metrics()`, `alarms()`, `layers`, `restore()`.

    Raises:
        ValueError: accelerate uses DeepSpeed or Megatron-LM, which step optimizers of their own.
    """

    def __init__(
        self,
        accelerator: Accelerator,
        model: nn.Module,
        recipe: str | Path | Mapping[str, Json] | Recipe = "nvfp4",
        *,
        set: Mapping[str, Json] | None = None,
        **options: Unpack[Keywords],
    ) -> None:
        if accelerator.distributed_type in (DistributedType.DEEPSPEED, DistributedType.MEGATRON_LM):
            raise ValueError(
                f"{accelerator.distributed_type.value} steps an optimizer of its own; use DDP or FSDP"
            )
        self.run: Conversion = python_api.convert(accelerator.unwrap_model(model), recipe, set=set, **options)
        self._accelerator, self._position = accelerator, Position(self.run)
        accelerator.register_for_checkpointing(self.run)

    @contextmanager
    def accumulate(self, *models: nn.Module) -> Iterator[None]:
        """Inside this context, compute one micro-batch: `accelerator.accumulate`, with the recipe in force.

        The step begins with its first micro-batch, and ends with the one in which accelerate lets the
        optimizer step. A step that ends in an exception does not count.

        Args:
            models: what `accelerator.prepare` returned.
        """
        if not self._position.in_step:
            self._position.begin_step()
        try:
            with self._accelerator.accumulate(*models):
                yield
                stepped = self._accelerator.sync_gradients
        except BaseException:
            self._position.abandon()
            raise
        if stepped:
            self._position.end_step()

    def evaluation(self, *, high_precision: bool = False) -> AbstractContextManager[Conversion]:
        """Inside this context, the model is evaluated: see `Conversion.evaluation`."""
        return self.run.evaluation(high_precision=high_precision)
