"""The model of train.py."""

import torch
from torch import nn


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x):
        return x + self.dropout(self.down(torch.relu(self.up(x))))


class Net(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, width), nn.Linear(width, 1)
        self.trunk = nn.ModuleList(Block(width) for _ in range(2))

    def forward(self, x):
        x = self.stem(x)
        for block in self.trunk:
            x = block(x)
        return self.head(x)
