"""Evaluation of a model: in the precision in force, in high precision, and as other recipes read its weights.

A model is trained under one recipe and served under another. So an evaluation can read the same weights by
further recipes (`Training.evaluate`), and compare each with bf16 token by token:

    val/loss            in the precision in force
    val/loss_bf16       all layers in high precision
    val/loss@nvfp4      the forward pass of another recipe, on the same weights
    val/kl@nvfp4        divergence of its distribution of the next token from bf16's, nats a token
    val/extreme@nvfp4   share of the data's tokens whose probability differs from bf16's by over a factor of 2

The divergence is exact: a sum over the vocabulary at every token of the data, where training by reinforcement
estimates it from the one token that was drawn (Schulman's k3, r - 1 - log r with r the ratio of
probabilities). Summed with the weights of bf16, the same terms are the divergence itself, each of them
positive, so that no difference of large numbers is taken.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ablate.engines.emulated import Engine
from ablate.recipes.recipe import Recipe
from ablate.training.data.batches import Batch
from ablate.training.distributed import RankPart
from ablate.training.metric_names import QUANTITIES, by_recipe

Evaluation = dict[str, list[float]]
"""Values of the validation batches by reading: `loss`, `loss_bf16`, `loss@nvfp4`, `kl@nvfp4`, ..."""

_EXTREME = math.log(2)
"""Difference of log-probabilities above which a token counts as extreme."""


class PreparedRun(NamedTuple):
    """Inputs of the training loop: a model with a recipe applied, and its data."""

    model: nn.Module
    """The converted model, in training mode, on the device that it is trained on."""
    engine: Engine
    batch: Callable[[int, int], Batch]
    """Function of step and micro-batch, both from 0, that returns a batch on the model's device."""
    validation: Sequence[Batch]
    """On the model's device."""
    loss: Callable[..., Tensor] | None = None
    """Function that returns the mean loss of a batch; None: the model returns it."""
    logits: Callable[..., Tensor] | None = None
    """Function that returns a batch's logits [tokens, vocabulary]; None: the model has none."""
    readings: Mapping[str, Recipe] = MappingProxyType({})
    """Recipes by which every evaluation also reads the weights (`recipes.readings`), by name."""


@torch.no_grad()
def evaluate(run: PreparedRun, recipe: Recipe, part: RankPart) -> Evaluation:
    """Return the values of all validation batches, by every reading; without quantisation in `recipe`, which
    is now in force, `loss` and `loss_bf16` are the same. Ranks share out whole batches, so the values are the
    same on any number of ranks. Collective."""
    run.engine.clock.stream = "evaluation"
    run.model.eval()
    own = high = _losses(run, part)
    if not recipe.plain:
        with run.engine.high_precision():
            high = _losses(run, part)
    others = by_other_recipes(run, part) if run.readings else {}
    run.model.train()
    return {"loss": own, "loss_bf16": high, **others}


def _losses(run: PreparedRun, part: RankPart) -> list[float]:
    losses = []
    with run.engine.still_weights():
        for number in part.shares(len(run.validation)):
            run.engine.clock.begin(number)
            losses.append((run.loss or run.model)(*run.validation[number]).item())
    return part.in_order(losses, len(run.validation))


def by_other_recipes(run: PreparedRun, part: RankPart) -> Evaluation:
    """Return the values of all batches by the other recipes. Batch by batch, since the logits of one alone
    can take a gigabyte."""
    values: Evaluation = {}
    assert run.logits, "readings are of models with logits"
    for number in part.shares(len(run.validation)):
        run.engine.clock.begin(number)
        batch = run.validation[number]
        with run.engine.high_precision():
            reference = run.logits(*batch).float().log_softmax(-1)
        for name, recipe in run.readings.items():
            run.engine.clock.begin(number)
            with run.engine.reading(recipe):
                read = _against(run.logits(*batch), batch[-1].flatten(), reference)
            for quantity, value in zip(QUANTITIES, read, strict=True):
                values.setdefault(by_recipe(quantity, name), []).append(value)
    return {name: part.in_order(own, len(run.validation)) for name, own in values.items()}


def _against(logits: Tensor, targets: Tensor, reference: Tensor) -> tuple[float, float, float]:
    """Return the `QUANTITIES` of logits [tokens, vocabulary], given the tokens that they predict and bf16's
    log-probabilities, fp32 [tokens, vocabulary]."""
    log_q = logits.float().log_softmax(-1)
    loss = F.nll_loss(log_q, targets).item()
    difference = log_q.sub_(reference)
    chosen = difference.gather(-1, targets[:, None])
    extreme = (chosen.abs() > _EXTREME).float().mean().item()
    divergence = (reference.exp() * (difference.expm1() - difference)).sum(-1).mean().item()
    return loss, divergence, extreme
