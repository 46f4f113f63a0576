"""A module of packed experts in each layout that transformers has, tokens for it, and what a pass returns."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HIDDEN = 32, 48
SIZES = (0, 1, 15, 16, 17, 40)
"""Tokens of each expert: none, one, and around one block."""


class PackedExperts(nn.Module):
    """Experts in the layouts that transformers has, with a plain loop as forward pass."""

    def __init__(
        self,
        experts: int = len(SIZES),
        gate: bool = True,
        transposed: bool = False,
        interleaved: bool = False,
        bias: bool = False,
        width: int = WIDTH,
        hidden: int = HIDDEN,
    ) -> None:
        super().__init__()
        self.num_experts, self.has_gate, self.is_transposed = experts, gate, transposed
        self.is_concatenated, self.has_bias, self.has_post_expert_norm = not interleaved, bias, False
        shapes = {("gate_up_proj" if gate else "up_proj"): (hidden * (1 + gate), width)}
        shapes |= {"down_proj": (width, hidden)}
        generator = torch.Generator().manual_seed(3)
        for name, shape in shapes.items():
            weight = torch.randn(experts, *shape, generator=generator) / shape[1] ** 0.5
            stored = weight.transpose(-2, -1).contiguous() if transposed else weight
            self.register_parameter(name, nn.Parameter(stored))
            if bias:
                biases = torch.randn(experts, shape[0], generator=generator)
                self.register_parameter(f"{name}_bias", nn.Parameter(biases))

    def _apply_gate(self, y: Tensor) -> Tensor:
        gate, up = y.chunk(2, -1) if self.is_concatenated else (y[..., 0::2], y[..., 1::2])
        return F.silu(gate) * up

    def act_fn(self, y: Tensor) -> Tensor:
        return F.relu(y).square()

    def matrices(self, number: int) -> tuple[Tensor, Tensor]:
        """Return the two matrices [out, in] of an expert."""
        first = self.gate_up_proj if self.has_gate else self.up_proj
        return tuple(w[number].t() if self.is_transposed else w[number] for w in (first, self.down_proj))

    def biases(self, number: int) -> tuple[Tensor | float, Tensor | float]:
        """Return the two biases of an expert, zeros without."""
        if not self.has_bias:
            return 0.0, 0.0
        first = self.gate_up_proj_bias if self.has_gate else self.up_proj_bias
        return first[number], self.down_proj_bias[number]

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        total = torch.zeros_like(hidden_states)
        for number in range(self.num_experts):
            (up, down), (b, c) = self.matrices(number), self.biases(number)
            token, choice = (top_k_index == number).nonzero(as_tuple=True)
            y = F.linear(hidden_states[token], up) + b
            y = self._apply_gate(y) if self.has_gate else self.act_fn(y)
            y = F.linear(y, down) + c
            total = total.index_add(0, token, y * top_k_weights[token, choice, None])
        return total


class Model(nn.Module):
    """One block of experts."""

    def __init__(self, **layout: bool | int) -> None:
        super().__init__()
        block = nn.Module()
        block.experts = PackedExperts(**layout)
        self.blocks = nn.ModuleList([block])

    @property
    def experts(self) -> PackedExperts:
        return self.blocks[0].experts

    def forward(self, *arguments: Tensor) -> Tensor:
        return self.experts(*arguments)


def routed(sizes: tuple[int, ...] = SIZES) -> tuple[Tensor, Tensor, Tensor]:
    """Return tokens, the one expert of each, in mixed order, and its weight."""
    generator = torch.Generator().manual_seed(5)
    index = torch.arange(len(sizes)).repeat_interleave(torch.tensor(sizes))
    index = index[torch.randperm(len(index), generator=generator)]
    x = torch.randn(len(index), WIDTH, generator=generator)
    return x, index[:, None], torch.rand(len(index), 1, generator=generator) + 0.5


def results(model: nn.Module, batch: tuple[Tensor, Tensor, Tensor]) -> dict[str, Tensor]:
    """Return output and gradients of a model for one batch."""
    x = batch[0].clone().requires_grad_()
    model.zero_grad()
    y = model(x, *batch[1:])
    generator = torch.Generator().manual_seed(7)
    y.backward(torch.randn(y.shape, generator=generator).to(y.dtype))
    gradients = {name: p.grad.clone() for name, p in model.named_parameters()}
    return {"y": y.detach(), "dx": x.grad.clone(), **gradients}
