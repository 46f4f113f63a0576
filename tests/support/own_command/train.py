"""A training script as a user would write it: it stays a process, and gets its recipe from the environment."""

import argparse
import os

import torch
from torch import nn

import ablate


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(32, 64), nn.Linear(64, 32)

    def forward(self, x):
        return x + self.down(torch.relu(self.up(x)))


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.stem, self.head = nn.Linear(8, 32), nn.Linear(32, 1)
        self.blocks = nn.ModuleList([Block(), Block()])

    def forward(self, x):
        x = self.stem(x)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


parser = argparse.ArgumentParser()
parser.add_argument("--lr", type=float)
parser.add_argument("--seed", type=int)
parser.add_argument("--steps", type=int)
given = parser.parse_args()

torch.manual_seed(given.seed)
torch.set_num_threads(1)
model = Net()
run = ablate.convert(model, ablate.recipe(), seed=given.seed, steps=given.steps)
optimizer = torch.optim.SGD(model.parameters(), lr=given.lr)
print("a line for the log", os.environ["ABLATE_DEVICE"])
for step in range(1, given.steps + 1):
    x = torch.randn(16, 8)
    with run.step():
        loss = (model(x) - x.sum(-1, keepdim=True)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    ablate.log({"train/loss": loss.item()}, step=step)
ablate.log({"val/loss": loss.item()}, step=given.steps)
