"""A decoder-only transformer in plain nn.Linear; engines convert it like any other model.

RMSNorm before each branch, rotary positions, QK-norm, grouped-query attention, SwiGLU or squared ReLU, or a
mixture of experts of either (mixture.py), untied head, no biases.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablate.numerics.product import linear
from ablate.training import cuda_arithmetic
from ablate.training.models.mixture import Experts, Mixture, Router
from ablate.training.models.shape import TransformerShape


class Norm(nn.Module):
    """RMSNorm, computed in fp32 and returned in the input's dtype."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(width))

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x.float(), self.weight.shape, self.weight).to(x.dtype)


class Attention(nn.Module):
    """Causal self-attention; queries and keys are normalised, then rotated by position. One linear computes
    queries, keys and values. `deterministic` has an effect on CUDA alone."""

    def __init__(self, width: int, heads: int, kv_heads: int, deterministic: bool) -> None:
        super().__init__()
        self.deterministic = deterministic
        self.heads, self.kv_heads, self.head = heads, kv_heads, width // heads
        self.qkv = nn.Linear(width, (heads + 2 * kv_heads) * self.head, bias=False)
        self.out = nn.Linear(width, width, bias=False)
        self.q_norm, self.k_norm = Norm(self.head), Norm(self.head)

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        # fp32 on a CPU, whose bf16 attention kernel is three times slower; no recipe quantises attention.
        qkv = self.qkv(x).to(torch.float32 if x.device.type == "cpu" else x.dtype)
        qkv = qkv.unflatten(-1, (-1, self.head)).transpose(1, 2)  # [batch, heads, tokens, head]
        q, k, v = qkv.split((self.heads, self.kv_heads, self.kv_heads), dim=1)
        q, k = rotary(self.q_norm(q), rotation), rotary(self.k_norm(k), rotation)
        grouped = self.kv_heads != self.heads
        if self.deterministic and x.device.type == "cuda" and not torch.compiler.is_compiling():
            y = cuda_arithmetic.attention(q, k, v, causal=True, grouped=grouped)
        else:
            y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=grouped)
        return self.out(y.transpose(1, 2).flatten(2).to(x.dtype))


class SwiGLU(nn.Module):
    """The MLP down(silu(gate) * up), with gate and up from one linear."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, 2 * hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.up(x).chunk(2, dim=-1)
        return self.down(F.silu(gate) * up)


class SquaredReLU(nn.Module):
    """The MLP down(relu(up)^2), as in Primer and Nemotron."""

    def __init__(self, width: int, hidden: int) -> None:
        super().__init__()
        self.up = nn.Linear(width, hidden, bias=False)
        self.down = nn.Linear(hidden, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.down(F.relu(self.up(x)).square())


MLPS: dict[str, Callable[[int, int], nn.Module]] = {"swiglu": SwiGLU, "relu2": SquaredReLU}
"""Classes of MLPs, made from their width and hidden width, by the value of `mlp`."""


class Block(nn.Module):
    """Attention and MLP, each with a norm before it and added to the residual stream, [batch, tokens, width]
    in and out. The attention also takes the table of `rotary_table`."""

    def __init__(self, width: int, attention: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.attention_norm, self.attention = Norm(width), attention
        self.mlp_norm, self.mlp = Norm(width), mlp

    def forward(self, x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.attention(self.attention_norm(x), rotation)
        return x + self.mlp(self.mlp_norm(x))


class MixtureBlock(Block):
    """Block whose MLP is a `Mixture`; returns the load-balancing loss beside the activations."""

    def forward(  # type: ignore[override]
        self, x: Tensor, rotation: tuple[Tensor, Tensor]
    ) -> tuple[Tensor, Tensor]:
        x = x + self.attention(self.attention_norm(x), rotation)
        y, imbalance = self.mlp(self.mlp_norm(x))
        return x + y, imbalance


def block_of(shape: TransformerShape) -> Block:
    attention = Attention(shape.width, shape.heads, shape.kv_heads or shape.heads, shape.deterministic)
    if shape.experts is None:
        return Block(shape.width, attention, MLPS[shape.mlp](shape.width, shape.hidden_width))
    count, top_k, shared = shape.experts.count, shape.experts.top_k, shape.experts.shared
    mixture = Mixture(
        Router(shape.width, count, top_k),
        Experts(shape.width, shape.expert_width, count, top_k, gated=shape.mlp == "swiglu"),
        MLPS[shape.mlp](shape.width, shared * shape.expert_width) if shared else None,
    )
    return MixtureBlock(shape.width, attention, mixture)


class Transformer(nn.Module):
    """The model: tokens and targets, int64 [batch, context], to the mean cross-entropy in nats. `dtype` is
    that of activations; parameters stay fp32. With experts, the gradient of what it returns is that of the
    cross-entropy plus `auxiliary` times the sum of the blocks' load-balancing losses; its value is the
    cross-entropy alone."""

    def __init__(
        self,
        shape: TransformerShape,
        vocab: int,
        dtype: torch.dtype,
        block: Callable[[TransformerShape], Block] = block_of,
    ) -> None:
        super().__init__()
        self.dtype = dtype
        self.embedding = nn.Embedding.from_pretrained(torch.empty(vocab, shape.width), freeze=False)
        self.blocks = nn.ModuleList(block(shape) for _ in range(shape.layers))
        self.norm = Norm(shape.width)
        self.head = nn.Linear(shape.width, vocab, bias=False)
        self.angles = (shape.width // shape.heads, shape.rope_theta)
        self.auxiliary = shape.experts.auxiliary if shape.experts else 0.0
        self.imbalance: Tensor | None = None
        """Mean of the blocks' load-balancing losses in the last computed loss, without a graph; None without
        an auxiliary loss."""

    def forward(self, tokens: Tensor, targets: Tensor | None = None) -> Tensor:
        """Return the mean loss in nats; without targets, the logits [batch * tokens, vocabulary]."""
        rotation = rotary_table(tokens.shape[1], *self.angles, tokens.device)
        x = self.embedding(tokens).to(self.dtype)
        imbalances = []
        for block in self.blocks:
            x = block(x, rotation)
            if isinstance(x, tuple):
                x, imbalance = x
                imbalances.append(imbalance)
        logits = linear(self.norm(x), self.head.weight.to(self.dtype)).flatten(0, 1)
        if targets is None:
            return logits
        loss = F.cross_entropy(logits.float(), targets.flatten())
        if not self.auxiliary:
            return loss
        total = torch.stack(imbalances).sum()
        self.imbalance = total.detach() / len(imbalances)
        return loss + self.auxiliary * (total - total.detach())


def logits(model: Transformer, tokens: Tensor, targets: Tensor) -> Tensor:
    """Return the logits of a batch [batch * tokens, vocabulary], whatever its targets, in the dtype of
    activations."""
    return model(tokens)


def rotary_table(context: int, head: int, theta: float, device: torch.device) -> tuple[Tensor, Tensor]:
    """Return cosines and sines of the rotary angles (RoFormer, arXiv 2104.09864), fp32 [context, head / 2]
    each, for positions from 0, a head of even width and frequencies of base `theta`."""
    frequency = theta ** (-torch.arange(0, head, 2, device=device, dtype=torch.float32) / head)
    angle = torch.outer(torch.arange(context, device=device, dtype=torch.float32), frequency)
    return angle.cos(), angle.sin()


def rotary(x: Tensor, rotation: tuple[Tensor, Tensor]) -> Tensor:
    """Return queries or keys [..., tokens, head], of any dtype, with the two halves of each head rotated by
    position. `rotary_table` was made for at least as many positions."""
    cos, sin = (r[: x.shape[-2]].to(x.dtype) for r in rotation)
    a, b = x.chunk(2, dim=-1)
    return torch.cat((a * cos - b * sin, a * sin + b * cos), dim=-1)


def initialise(model: Transformer, seed: int, device: torch.device) -> Transformer:
    """Draw the weights of a model built on the meta device, in place, from the seed alone, and return it.

    Linears have standard deviation 1/2 fan_in^-1/2, divided by (2 depth)^1/2 if they write to the residual
    stream: an attention's `out`, and every `down` of an MLP or an expert. Norms are one. The head is zero, so
    that the first loss is log(vocab). Weights are drawn on the CPU in order of name.
    """
    generator = torch.Generator().manual_seed(seed)
    depth = len(model.blocks)
    values = {}
    for name, parameter in sorted(model.named_parameters()):
        if parameter.ndim == 1:
            value = torch.ones(parameter.shape)
        else:
            value = torch.randn(parameter.shape, generator=generator) * _deviation(name, parameter, depth)
        values[name] = value.to(device)
    model.load_state_dict(values, assign=True)
    return model


def _deviation(name: str, parameter: Tensor, depth: int) -> float:
    if name == "head.weight":
        return 0.0
    if name == "embedding.weight":
        return 0.5
    residual = name.endswith(("attention.out.weight", ".down.weight", ".down_proj"))
    return 0.5 * parameter.shape[-1] ** -0.5 * ((2 * depth) ** -0.5 if residual else 1.0)
