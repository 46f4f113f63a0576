"""Steps of a model with packed experts of one's own in NVFP4; lines marked `# ablate` are what it adds.

Experts have forward(tokens [n, width], index [n, k], weights [n, k]), num_experts, gate_up_proj or up_proj,
and down_proj, each [experts, out, in] (is_transposed: [experts, in, out]). The router stays outside. Others:
no has_gate: act_fn; no is_concatenated: rows of gate and up in turn; has_bias: down_proj_bias [experts, out].
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ablate  # ablate


class Experts(nn.Module):
    has_gate = is_concatenated = True
    has_bias = is_transposed = has_post_expert_norm = False

    def __init__(self, count: int, width: int, hidden: int) -> None:
        super().__init__()
        self.num_experts, self.top_k = count, 2
        self.gate_up_proj = nn.Parameter(torch.randn(count, 2 * hidden, width) / width**0.5)
        self.down_proj = nn.Parameter(torch.randn(count, width, hidden) / hidden**0.5)

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for expert in range(self.num_experts):
            token, choice = (top_k_index == expert).nonzero(as_tuple=True)
            y = self._apply_gate(F.linear(hidden_states[token], self.gate_up_proj[expert]))
            y = F.linear(y, self.down_proj[expert]) * top_k_weights[token, choice, None]
            total = total.index_add(0, token, y)
        return total


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.router, self.experts = nn.Parameter(torch.randn(4, 32) / 32**0.5), Experts(4, 32, 64)

    def forward(self, x: Tensor) -> Tensor:
        weights, index = F.linear(x, self.router).softmax(-1).topk(2, dim=-1)
        return x + self.experts(x, index, weights)


def train(model: nn.Module, x: Tensor, target: Tensor, steps: int) -> list[float]:
    run = ablate.convert(model, "nvfp4", seed=0, steps=steps)  # ablate
    print(run)  # ablate
    optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
    for _ in range(steps):
        with run.step():  # ablate
            loss = (nn.Sequential(*model["blocks"])(x) - target).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
        losses.append(loss.item())
    return losses
