"""Layout of one trial's work over its ranks, and the reasons that rule a layout out.

A step has `accumulate` micro-batches of `batch` sequences on any number of ranks. The ranks share out the
micro-batches and, if there are fewer micro-batches than ranks, the sequences of each. A trial therefore has
the same numbers on any number of ranks, except for the order of additions, and the number of ranks is no part
of its identity. This file does not import torch, since plans use it.
"""

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from ablate.engines import makes_operands
from ablate.numerics.spec import Quant, grain, tag
from ablate.recipes.recipe import SLOTS, TOKEN_AXES, Recipe
from ablate.training.hyperparameters import Training


@dataclass(frozen=True)
class Layout:
    """Number of ranks, and the way in which they keep the model; `sharded`: each keeps a part of the
    parameters, their gradients and the optimizer's state (FSDP)."""

    ranks: int = 1
    sharded: bool = False

    def groups(self, accumulate: int) -> int:
        """Return the number of groups of ranks that take micro-batches, of `accumulate` in a step, of their
        own."""
        return math.gcd(accumulate, self.ranks)

    def splits(self, accumulate: int) -> int:
        """Return the number of ranks that share one micro-batch's sequences and its operands' amaxes."""
        return self.ranks // self.groups(accumulate)

    def misfits(self, config: Training, recipe: Recipe, engine: str) -> Iterator[str]:
        """Yield each reason, as a sentence, for which so many ranks cannot train this."""
        splits = self.splits(config.accumulate)
        if recipe.experts.replays:
            yield f"recipe.experts.routing replay is for one rank; use 1 instead of {self.ranks}, or free"
        if config.compile:
            yield f"workload.compile compiles for one rank; leave it out, or use 1 instead of {self.ranks}"
        if self.groups(config.accumulate) > 1 and (
            slot := _slot(recipe, lambda quant, _: quant.outer and tag(quant.outer.statistic) == "hold")
        ):
            yield (
                f"{slot}.outer.statistic hold takes the amax of the step's first micro-batch, "
                "which one rank sees; use accumulate 1"
            )
        if splits > 1:
            yield from self._split_misfits(config, recipe, engine, splits)
        if self.sharded:
            yield from _sharding_misfits(config, recipe, engine)

    def _split_misfits(self, config: Training, recipe: Recipe, engine: str, splits: int) -> Iterator[str]:
        shared = f"{config.accumulate} micro-batch{'es' * (config.accumulate > 1)} of a step"
        many = f"{self.ranks} ranks share the {shared}, {splits} one each"
        multiple = f"a workload.accumulate that is a multiple of {self.ranks}"
        way_out = f"{multiple} gives each rank micro-batches of its own"
        if config.batch % splits:
            yield f"{many}, and {splits} does not divide workload.batch {config.batch}; {way_out}"
            return
        if not makes_operands(engine):
            reduced = f"so their amaxes would have to be reduced, which engine {engine} does not do"
            yield f"{many}, {reduced}; {way_out}"
        if not config.divisible:
            yield f"{many}, and the loss of this workload is of whole batches; {way_out}"
        tokens = config.tokens_per_step // config.accumulate // splits
        if slot := _slot(recipe, lambda quant, slot: quant.transform is not None and slot in TOKEN_AXES):
            yield f"{many}, and {slot}.transform looks at the whole of one; {way_out}"
        if slot := _slot(recipe, lambda quant, slot: quant.owned and slot in TOKEN_AXES):
            yield f"{many}, and a function of your own in {slot} gets whole ones; {way_out}"
        if slot := _slot(recipe, lambda quant, slot: quant.error.permuted and slot in TOKEN_AXES):
            yield f"{many}, and {slot}.error.permuted moves errors between all elements of one; {way_out}"
        cut = _slot(
            recipe, lambda quant, slot: slot in TOKEN_AXES and tokens % grain(quant, None, TOKEN_AXES[slot])
        )
        turns = (products.wgrad.hadamard for products in (recipe, *recipe.others))  # over tokens
        if not cut and any(turn and tokens % turn.size for turn in turns):
            cut = "recipe.wgrad.hadamard"
        if cut:
            yield f"{many}, {tokens} tokens, which cuts a block of {cut}; {way_out}"


def _sharding_misfits(config: Training, recipe: Recipe, engine: str) -> Iterator[str]:
    if not makes_operands(engine):
        yield f"sharded: engine {engine} keeps whole weights; leave sharded out"
    if not config.shardable:
        yield (
            "sharded: this workload leaves a model or pictures, made by one rank of whole weights, "
            "or its experts' weights are packed; leave sharded out"
        )
    if config.optimizer == "muon":
        yield "sharded: optimizer muon orthogonalises whole matrices; use adamw, or leave sharded out"
    for name in ("osci_reset", "q_ema", "q_ramping"):
        if getattr(recipe.weights, name):
            yield f"sharded: recipe.weights.{name} looks at whole weights; leave sharded out"
    if recipe.weights.noise:
        yield "sharded: recipe.weights.noise changes whole norms; leave sharded out"


def _slot(recipe: Recipe, meant: Callable[[Quant, str], object]) -> str | None:
    """Return the first operand, as `recipe.fprop.x`, for whose quantiser `meant(quant, slot)` is true."""
    pairs = ((slot, products.slot(slot)) for products in (recipe, *recipe.others) for slot in SLOTS)
    return next((f"recipe.{slot}" for slot, quant in pairs if quant is not None and meant(quant, slot)), None)
