"""Train with Lightning. `# ablate` marks all that a recipe adds to it."""

from pathlib import Path

import torch
import torch.nn.functional as F
from lightning.pytorch import LightningModule, Trainer
from torch import nn

import ablate  # ablate


class Block(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(F.gelu(self.up(self.norm(x))))


class NextByte(LightningModule):
    def __init__(self, width: int = 64, depth: int = 2, context: int = 16) -> None:
        super().__init__()
        self.bytes, self.join = nn.Embedding(256, width), nn.Linear(context * width, width)
        self.trunk = nn.ModuleList(Block(width) for _ in range(depth))
        self.head = nn.Linear(width, 256)
        self.losses: list[float] = []

    def training_step(self, rows, index):
        x = self.join(self.bytes(rows[:, :-1]).flatten(1))
        for block in self.trunk:
            x = block(x)
        loss = F.cross_entropy(self.head(x), rows[:, -1])
        self.losses.append(loss.item())
        return loss

    def validation_step(self, rows, index):
        self.log("val_loss", self.training_step(rows, index))
        self.losses.pop()

    def configure_optimizers(self):
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


def fit(module, rows, batch, recipe="nvfp4", seed=0, checkpoint=None, validation=None, **arguments):
    callback = ablate.integrations.LightningCallback(recipe, seed=seed)  # ablate
    defaults = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False}
    trainer = Trainer(callbacks=[callback], **(defaults | arguments))  # ablate
    loaders = [data and torch.utils.data.DataLoader(data, batch) for data in (rows, validation)]
    trainer.fit(module, *loaders, ckpt_path=checkpoint)
    return trainer


if __name__ == "__main__":
    text = torch.tensor(list(Path(__file__).read_bytes())).unfold(0, 17, 1)
    module = NextByte()
    fit(module, list(text), batch=8, max_steps=50, enable_checkpointing=False)
    print(*module.losses, sep="\n")
