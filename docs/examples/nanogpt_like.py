"""A training script of one's own: its model, its data, its loop. `# ablate` marks all that a recipe adds."""

from pathlib import Path

import torch
import torch.nn.functional as F
from torch import nn

import ablate  # ablate


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads, self.norms = heads, nn.ModuleList(nn.LayerNorm(width) for _ in range(2))
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        split = self.qkv(self.norms[0](x)).unflatten(-1, (3 * self.heads, -1)).transpose(1, 2)
        attended = F.scaled_dot_product_attention(*split.chunk(3, dim=1), is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(2))
        return x + self.down(F.gelu(self.up(self.norms[1](x))))


class Transformer(nn.Module):
    def __init__(
        self, vocabulary: int, context: int, width: int = 64, heads: int = 2, depth: int = 2
    ) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(vocabulary, width), nn.Embedding(context, width)
        self.trunk = nn.Sequential(*(Block(width, heads) for _ in range(depth)))
        self.head = nn.Linear(width, vocabulary, bias=False)

    def forward(self, tokens, targets):
        x = self.tokens(tokens) + self.positions.weight[: tokens.shape[1]]
        return F.cross_entropy(self.head(self.trunk(x)).flatten(0, 1), targets.flatten())


def main(recipe: str = "nvfp4", steps: int = 100, seed: int = 0, context: int = 64) -> list[float]:
    torch.manual_seed(seed)
    text = torch.tensor(list(Path(__file__).read_bytes()))
    model = Transformer(vocabulary=256, context=context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    run = ablate.convert(model, recipe, seed=seed, steps=steps)  # ablate
    losses = []
    for step in range(steps):
        rows = text.unfold(0, context + 1, 1)[torch.randint(len(text) - context, (8,))]
        with run.step():  # ablate
            loss = model(rows[:, :-1], rows[:, 1:])
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
        print(f"step {step + 1}: {losses[-1]:.4f}")
    return losses


if __name__ == "__main__":
    main()
