"""Gaussian noise on the weights of norms, in force while gradients are computed (QeRL, arXiv 2510.11696)."""

import math
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace

import torch
from torch import Tensor, nn

from ablate.numerics.philox import GROUP, Clock, random_bits, site
from ablate.recipes.layers import block_name
from ablate.recipes.weight_noise import Noise

_PURPOSE = 2
"""Number of these draws in the generator's key, beside those of elements and block scales."""


def gaussian(clock: Clock, where: int, count: int) -> Tensor:
    """Draw standard normal numbers at draw site `where`, fp32 [count] on the CPU: Box-Muller in float64, then
    rounded. The magnitude is at most 5.9, since a uniform number has 24 bits."""
    columns = count + -count % GROUP
    bits = random_bits(clock, where, 2, columns, 24, torch.device("cpu"), purpose=_PURPOSE).double()
    radius = (-2 * ((bits[0] + 0.5) * 2.0**-24).log()).sqrt()
    return (radius * (2 * math.pi * 2.0**-24 * bits[1]).cos())[:count].float()


class NormNoise:
    """Noise of a run on its model's norms: modules whose class name ends in `Norm`.

    A norm has noise if it lies in a block with one of the converted linear `layers`, by name, and is as long
    as that layer's input; norms of queries and keys usually are not. Each norm draws at its own site, by the
    clock of the run. `noise` has standard deviations over the run. ValueError if the model has no such norm.
    """

    def __init__(self, noise: Noise, model: nn.Module, layers: Mapping[str, nn.Module], clock: Clock) -> None:
        self.noise, self.clock = noise, clock
        inputs = {(block_name(name), layer.in_features) for name, layer in layers.items()}
        self.weights: dict[str, nn.Parameter] = {}
        for name, module in model.named_modules():
            weight = getattr(module, "weight", None)
            if (
                type(module).__name__.endswith("Norm")
                and isinstance(weight, nn.Parameter)
                and weight.ndim == 1
            ):
                block = block_name(name)
                if block is not None and (block, weight.numel()) in inputs:
                    self.weights[name] = weight
        if not self.weights:
            raise ValueError(
                f"weights.noise: no block of {type(model).__name__} has a norm whose weight is as long as the"
                " input of a linear layer there; leave it out"
            )

    @contextmanager
    def added(self, steps: int) -> Iterator[None]:
        """Inside this context, the norms have the noise of the clock's step and micro-batch, in a run of so
        many steps. At its end they have the very bits that they had before."""
        sigma = self.noise.sigma(self.clock.step, steps)
        if sigma == 0:
            yield
            return
        clock = replace(self.clock, redraw=False)
        kept = {name: weight.detach().clone() for name, weight in self.weights.items()}
        try:
            with torch.no_grad():
                for name, weight in self.weights.items():
                    drawn = gaussian(clock, site(name, "noise"), weight.numel())
                    weight.add_((sigma * drawn).to(weight))
            yield
        finally:
            with torch.no_grad():
                for name, weight in self.weights.items():
                    weight.copy_(kept[name])
