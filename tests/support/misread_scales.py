"""Block scales that a grouped product reads at the places where one product over all tokens would have them.

torchao's columnwise scales of a grouped product were tiled once over the packed tokens, while the product reads a
buffer of its own for each group (pytorch/ao b3c77e59a). Written on the bytes, independently of the package's layouts.
"""

from dataclasses import replace

import torch
from torch import Tensor

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.numerics.quantize import Operand


def tiled(scales: Tensor) -> list[float]:
    """Flat buffer of scales [rows, columns] in tiles of 128 x 4, row by row; multiples of 128 and 4 alone."""
    rows, columns = scales.shape
    flat = [0.0] * (rows * columns)
    for r, row in enumerate(scales.tolist()):
        for c, scale in enumerate(row):
            tile = (r // 128) * (columns // 4) + c // 4
            flat[512 * tile + (r % 32) * 16 + (r % 128) // 32 * 4 + c % 4] = scale
    return flat


def read(flat: list[float], rows: int, columns: int) -> Tensor:
    """Scales [rows, columns] of a tiled buffer of their own."""
    places = tiled(torch.arange(rows * columns).view(rows, columns))
    found = torch.empty(rows * columns)
    for place, index in enumerate(places):
        found[int(index)] = flat[place]
    return found.view(rows, columns)


def misread(operand: Operand, groups: int) -> Operand:
    """The operand [rows, tokens] as a product of `groups` groups of tokens reads it."""
    scales = operand.block_scale[:, 0, :, 0]
    rows, columns = scales.shape
    flat, own = tiled(scales), columns // groups
    parts = [read(flat[rows * own * g : rows * own * (g + 1)], rows, own) for g in range(groups)]
    codes = operand.values.float().view(rows, columns, 16) / scales.masked_fill(scales == 0, 1)[:, :, None]
    values = codes * torch.cat(parts, 1)[:, :, None]
    return replace(operand, values=values.view(rows, -1).to(operand.values.dtype))


class Misreading(EmulatedLinear):
    """A layer of another engine, whose wgrad reads the scales of both operands as of four groups of tokens."""

    emulates = False
    groups = 4

    def operand(self, x, slot, *how):
        parts = super().operand(x, slot, *how)
        return [misread(part, self.groups) for part in parts] if slot.startswith("wgrad") else parts
