"""NVFP4 in plain torch, as a subject: `ablate conform docs/examples/nvfp4_cast.py:quantise`."""

import torch

GRID = torch.tensor([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0])
MIDDLES = (GRID[1:] + GRID[:-1]) / 2
FLT_MAX = torch.finfo(torch.float32).max


def to_e2m1(y: torch.Tensor) -> torch.Tensor:
    """Round to the nearest magnitude, ties to the even code: those below codes 2, 4 and 6 go up."""
    up = torch.bucketize(y.abs(), MIDDLES, right=True)
    down = torch.bucketize(y.abs(), MIDDLES)
    return GRID[torch.where(up % 2 == 0, up, down)].copysign(y)


def quantise(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return x [rows, columns], cast to NVFP4 in blocks of 1 x 16: codes, scales, outer factor."""
    blocks = x.float().reshape(x.shape[0], -1, 16)
    amax = blocks.abs().amax()
    outer = (torch.tensor(2688.0) / amax).clamp(max=FLT_MAX)  # a tensor: `2688 / amax` rounds twice
    outer = torch.where((amax == 0) | (outer == 0), 1.0, outer)
    exact = blocks.abs().amax(2, keepdim=True) * (outer * torch.tensor(1 / 6))
    scale = exact.clamp(max=448).to(torch.float8_e4m3fn).float()
    codes = to_e2m1(blocks * (1 / (scale * (1 / outer))).clamp(max=FLT_MAX))
    return codes.reshape(x.shape), scale.squeeze(2), amax * torch.tensor(1 / 2688)
