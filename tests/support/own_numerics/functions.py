"""A user's functions for quantisers: each computes what one of our own words does, by other means."""

import random

import numpy as np
import torch
from halves import HALF

E2M1 = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
NOT_RISING = (0, 2, 1)
COMPUTED = tuple(range(4))
GROWN = (0, 1, 2)
GROWN += (4,)
APPENDED = [0, 1, 2]
APPENDED.append(4)


def away(y, grid):
    lower, upper = grid.neighbours(y.abs())
    inside = y.abs().clamp(max=grid.max)
    return torch.where(inside - lower >= HALF * (upper - lower), upper, lower).copysign(y)


def stochastic(y, grid, bits, width):
    lower, upper = grid.neighbours(y.abs())
    f = ((y.abs().clamp(max=grid.max) - lower) / (upper - lower)).nan_to_num(0.0)
    return torch.where(torch.floor(f * 2.0**width) > bits, upper, lower).copysign(y)


def ceil(scale, grid):
    return grid.neighbours(scale)[1]


def ceil_or_floor(scale, grid, bits, width):
    lower, upper = grid.neighbours(scale)
    return torch.where(bits < 2.0 ** (width - 1), lower, upper).clamp(min=2.0**-9)


def best_of_two(scale, grid, tiles, element):
    """Return the neighbour of the exact scale with the smaller squared error in its block."""
    low, high = (neighbour.clamp(min=2.0**-9) for neighbour in grid.neighbours(scale))

    def error(chosen):
        scaled = tiles / chosen
        lower, upper = element.neighbours(scaled.abs())
        nearest = torch.where(scaled.abs() - lower > upper - scaled.abs(), upper, lower)
        return ((nearest - scaled.abs()) * chosen).square().sum(dim=(1, 3), keepdim=True)

    return torch.where(error(high) < error(low), high, low)


def half_amax(tiles):
    return tiles.abs().amax(dim=(1, 3), keepdim=True) / 2


def fixed(tensor, amaxes):
    return torch.full_like(amaxes.amax(), 2.5)


def largest(tensor):
    return tensor.abs().amax()


def as_bf16(x):
    return x.to(torch.bfloat16).to(torch.float32)


def as_bf16_drawn(x, bits, width):
    return ((x.view(torch.int32) + bits.to(torch.int32) * 2 ** (16 - width)) & -(2**16)).view(torch.float32)


# --- functions that break the contract --------------------------------------------------------------


def raises(y):
    raise KeyError("nothing here")


def too_short(y):
    return y[..., 1:]


def doubles(y):
    return y.double()


def none(y):
    return None


def not_a_number(y, grid):
    return torch.full_like(y, torch.nan)


def off_grid(y, grid):
    return torch.full_like(y, 0.3)


def in_place(y, grid):
    return y.clamp_(-grid.max, grid.max).round_()


def global_draws(y, grid):
    return torch.where(torch.rand_like(y) > HALF, grid.max, -grid.max)


def draws_by_numpy(y, grid):
    return torch.where(torch.from_numpy(np.random.rand(*y.shape)) > HALF, grid.max, -grid.max).float()


def draws_by_python(y, grid):
    return torch.full_like(y, random.choice((0.0, grid.max)))


def in_place_by_numpy(y):
    np.abs(y.numpy(), out=y.numpy())
    return torch.zeros_like(y)


def transposes_in_place(y):
    return torch.zeros_like(y.transpose_(0, -1).transpose(0, -1))


def reorders_by_numpy(tensor):
    elements = tensor.view(-1).numpy()
    elements[:] = elements[::-1].copy()
    return tensor.abs().amax()


GENERATOR = torch.Generator()


def own_generator(y, grid):
    return stochastic(y, grid, torch.rand(y.shape, generator=GENERATOR) * 256, 8)


LATE = []


def later(y, grid):
    """Return other numbers from the tenth call of the process on: the first two are alike."""
    LATE.append(1)
    return toward_zero(y, grid) if len(LATE) < 10 else away(y, grid)


def negative(tiles, amaxes):
    return -amaxes


def unknown_argument(y, temperature):
    return y


def of_no_field(x, grid):
    return x


ASSIGNED = away


def hidden_arguments(*everything):
    return everything[0]


# --- functions whose numbers are right to compute with, and odd ------------------------------------


def drawn_too_high(y, grid, bits, width):
    return stochastic(y, grid, bits / 2, width)


def powers_of_two(y, grid):
    return torch.where(y.abs() >= 1, 1.0, 0.0).copysign(y)


def always_up(y, grid):
    lower, upper = grid.neighbours(y.abs())
    return torch.where(y > 0, upper, -lower)


def toward_zero(y, grid):
    return grid.neighbours(y.abs())[0].copysign(y)


def step_of_zero(y, grid, bits, width):
    below = grid.neighbours(y.abs())[0]
    lower, upper = grid.neighbours(below)
    rounded = away(y, grid).abs()
    return torch.where(bits / 2**width < (upper - lower), upper, rounded).copysign(y)


def without_sign(y, grid):
    return grid.neighbours(y.abs())[1]


CALLS = []


def counts(y, grid):
    CALLS.append(1)
    return torch.full_like(y, len(CALLS) % 2)
