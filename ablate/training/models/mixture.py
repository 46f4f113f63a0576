"""A mixture of experts in place of an MLP: a router that is never quantised, and experts in packed tensors.

Every token is sent to `top_k` of `count` small MLPs, and their outputs are added with the router's weights. A
block then has many times the weights of an MLP, at the cost of a few experts per token. Training may send all
tokens to one expert, so a second loss, small if the load is even, is trained beside the cross-entropy.

The matrices of all experts of a layer are one parameter [count, out, in] each, with the attributes that
`use_experts_implementation` of `transformers` sets. An engine finds the module by them, and replaces its
`forward` by one that quantises each expert's operands apart (engines/experts.py).

Not modelled: a limit on the tokens of an expert (capacity), which would drop some, and experts that are
divided among devices.
"""

from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ablate.engines.expert_layers import loads
from ablate.numerics.product import linear


class Routed(NamedTuple):
    """Experts of each token."""

    index: Tensor
    """Numbers of its experts, int64 [tokens, top_k]."""
    weights: Tensor
    """Weights of their outputs, fp32 [tokens, top_k]."""
    imbalance: Tensor
    """Load-balancing loss, fp32 scalar: 1 if all experts have equal loads, up to `count` if one has all."""


class Router(nn.Module):
    """Choice of `top_k` experts per token, by a softmax over all, computed in fp32 under every recipe.

    Its weight is a parameter and not an nn.Linear, so no recipe quantises it. The weights of the chosen
    experts are divided by their sum, as in Mixtral (arXiv 2401.04088). A single expert keeps its probability,
    as in Switch Transformer (arXiv 2101.03961), or the router would get no gradient from the cross-entropy.
    """

    def __init__(self, width: int, count: int, top_k: int) -> None:
        super().__init__()
        self.top_k = top_k
        self.weight = nn.Parameter(torch.empty(count, width))

    def forward(self, x: Tensor) -> Routed:
        probabilities = F.linear(x.float(), self.weight).softmax(-1)
        weights, index = probabilities.topk(self.top_k, dim=-1)
        if self.top_k > 1:
            weights = weights / weights.sum(-1, keepdim=True)
        return Routed(index, weights, imbalance(probabilities, index))


def imbalance(probabilities: Tensor, index: Tensor) -> Tensor:
    """Return the load-balancing loss: count * sum over experts of load * mean probability, fp32 scalar.
    `probabilities` are the router's, fp32 [tokens, count]; `index` has the experts of each token, int64
    [tokens, top_k].

    An expert's load is its share of all pairs of a token and one of its experts, and has no gradient. With
    one expert per token it is the loss of Switch Transformer (arXiv 2101.03961, equations 4 to 6), without
    its factor. `transformers` adds up pairs instead, so its loss for Mixtral is top_k times this one.
    """
    count = probabilities.shape[1]
    load = loads(index, count) / index.numel()
    return count * (load * probabilities.mean(0)).sum()


class Experts(nn.Module):
    """`count` MLPs of one shape without biases, each with its own weights, packed into one parameter per
    matrix, with the names and attributes of the experts of `transformers`. A gated one is down(silu(gate) *
    up), whose gate and up are the halves of one matrix; another down(relu(up)^2). `width` is the features of
    a token, `hidden` those within one expert."""

    has_bias = is_transposed = has_post_expert_norm = False
    is_concatenated = True

    def __init__(self, width: int, hidden: int, count: int, top_k: int, gated: bool) -> None:
        super().__init__()
        self.num_experts, self.top_k, self.has_gate = count, top_k, gated
        self.first = "gate_up_proj" if gated else "up_proj"
        self.register_parameter(self.first, nn.Parameter(torch.empty(count, (1 + gated) * hidden, width)))
        self.down_proj = nn.Parameter(torch.empty(count, width, hidden))

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        """Return the weighted sums of the outputs of each token's experts, [tokens, width], for
        `hidden_states` [tokens, width], and `top_k_index`, int64, and `top_k_weights`, fp32, [tokens, top_k].
        This is the unquantised model's; an engine replaces it."""
        chosen = top_k_index.flatten()
        order = chosen.argsort(stable=True)
        counts = loads(chosen, self.num_experts).tolist()
        hidden = self._grouped(
            hidden_states[order // top_k_index.shape[1]], getattr(self, self.first), counts
        )
        hidden = self._apply_gate(hidden) if self.has_gate else self.act_fn(hidden)
        weighted = self._grouped(hidden, self.down_proj, counts) * top_k_weights.flatten()[order, None]
        pairs = weighted[order.argsort()].view(*top_k_index.shape, -1)
        return pairs.sum(1).to(hidden_states.dtype)

    def _grouped(self, rows: Tensor, packed: Tensor, counts: list[int]) -> Tensor:
        """Return the products of rows, sorted by expert, with the weights of their experts. On a CPU they
        equal those of torch's grouped_mm bit for bit, which takes widths that are multiples of 16 bytes
        alone."""
        pairs = zip(rows.split(counts), packed.to(rows.dtype), strict=True)
        return torch.cat([linear(own, weight) for own, weight in pairs])

    def _apply_gate(self, gate_up: Tensor) -> Tensor:
        """Return silu(gate) * up of [tokens, 2 hidden]."""
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate) * up

    def act_fn(self, up: Tensor) -> Tensor:
        """Return relu(up)^2, the activation of experts without a gate."""
        return F.relu(up).square()


class Mixture(nn.Module):
    """Router, experts, and an MLP that every token passes through, whose output is added, if there are shared
    experts (DeepSeekMoE, arXiv 2401.06066)."""

    def __init__(self, router: Router, experts: Experts, shared: nn.Module | None) -> None:
        super().__init__()
        self.router, self.experts, self.shared = router, experts, shared

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output [batch, tokens, width] for as many activations, and the load-balancing loss."""
        tokens = x.flatten(0, 1)
        routed = self.router(tokens)
        y = self.experts(tokens, routed.index, routed.weights).view(x.shape)
        return y if self.shared is None else y + self.shared(x), routed.imbalance
