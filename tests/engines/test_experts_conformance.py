"""Grouped products pass the conformance kit, and a published fault of their scales is measured in them."""

from collections.abc import Callable, Sequence
from itertools import pairwise
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from ablate.engines.emulated import convert
from ablate.engines.expert_layers import EmulatedExpert, GroupedCall
from ablate.engines.products import Probe
from ablate.numerics.kernels.cuda import PLAIN, Finish
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import Operand
from ablate.recipes.presets import nvfp4
from ablate.recipes.recipe import Run
from ablate.verification.conformance.demo import packed_scales
from ablate.verification.conformance.reference_product import gain_and_error
from ablate.verification.conformance.result import Outcome
from ablate.verification.conformance.run import conform
from ablate.verification.conformance.subject import Subject

SEED = 17
"""Seed of the draws, which no property fixes."""


class OneProduct(nn.Module):
    """Experts of which the product with `down_proj` [experts, out, in] alone is called."""

    has_gate = has_bias = is_transposed = has_post_expert_norm = False
    is_concatenated = True

    def __init__(self, w: Tensor) -> None:
        super().__init__()
        self.num_experts = len(w)
        self.up_proj, self.down_proj = nn.Parameter(w.transpose(1, 2).contiguous()), nn.Parameter(w)
        self.act_fn = nn.ReLU()

    def forward(self, hidden_states: Tensor, top_k_index: Tensor, top_k_weights: Tensor) -> Tensor:
        up, down = (packed[top_k_index[:, 0]] for packed in (self.up_proj, self.down_proj))
        hidden = self.act_fn(up @ hidden_states[:, :, None])
        return (down @ hidden)[:, :, 0] * top_k_weights


class Silent(Probe):
    """A probe that keeps nothing. Layers that something observes are multiplied one after the other."""


class Watched:
    """A layer that keeps the operands of wgrad, and multiplies others in their place if they are given."""

    context = SimpleNamespace(probe=Silent(), divided=None)

    def __init__(self, layer: EmulatedExpert, given: tuple[Operand, Operand] | None = None) -> None:
        self.layer, self.given = layer, given
        self.multiplied: list[tuple[Operand, Operand]] = []

    def __getattr__(self, name: str) -> object:
        return getattr(self.layer, name)

    def multiply(
        self, a: list[Operand], b: list[Operand], out: torch.dtype, finish: Finish = PLAIN
    ) -> Tensor:
        self.multiplied.append((a[0], b[0]))
        if self.given and len(self.multiplied) == 3:  # y, dx, dw
            a, b = ([operand] for operand in self.given)
        return self.layer.multiply(a, b, out, finish)


Made = Callable[[list[EmulatedExpert]], Sequence[EmulatedExpert | Watched]]


def called(x: Tensor, w: Tensor, dy: Tensor, offsets: Tensor, made: Made = list) -> tuple[Tensor, ...]:
    """Return y, dx and dw of the engine's grouped product.

    Args:
        x, w, dy, offsets: as for `Subject.grouped`.
        made: returns the layers to multiply by, given the engine's.
    """
    owner, rows = OneProduct(w.clone()), x.clone().requires_grad_()
    model = nn.ModuleDict({"blocks": nn.ModuleList([nn.ModuleDict({"experts": owner})])})
    convert(model, nvfp4(), Clock(seed=SEED)).at(0, Run(10))
    layers = made(owner.forward.down.layers)
    batches, products = [layer.begin_call() for layer in layers], [layer.products for layer in layers]
    counts = [end - begin for begin, end in pairwise([0, *offsets.tolist()])]
    y = GroupedCall.apply(rows, owner.down_proj, layers, products, batches, counts)
    return y.detach(), *torch.autograd.grad(y, (rows, owner.down_proj), dy)


def one_by_one(*given: Tensor) -> tuple[Tensor, ...]:
    """Return what `called` does, by a loop over the experts."""
    return called(*given, made=lambda layers: [*map(Watched, layers)])


def faulty(*given: Tensor) -> tuple[Tensor, ...]:
    """Return what `called` does, with the block scales of both operands of wgrad laid out over the tokens of
    all experts, and each expert's share read as if it were its own."""
    watched: list[Watched] = []

    def watch(layers: list[EmulatedExpert]) -> list[Watched]:
        watched.extend(map(Watched, layers))
        return watched

    called(*given, made=watch)
    sides = zip(*(layer.multiplied[2] for layer in watched if layer.multiplied), strict=True)
    wrong = zip(*(packed_scales(list(side)) for side in sides), strict=True)
    given_to = [
        next(wrong) if layer.multiplied else None for layer in watched
    ]  # an expert may have no tokens
    return called(*given, made=lambda layers: [*map(Watched, layers, given_to)])


@pytest.mark.parametrize("grouped", [called, one_by_one])
def test_the_grouped_product_conforms(grouped):
    found = conform(Subject("engine", grouped=grouped), nvfp4(), only=("grouped_weight_gradient",))
    assert [(row.outcome, row.differing) for row in found.rows] == [(Outcome.PASS, 0)]
    assert found.rows[0].cases > 0


def test_scales_over_packed_tokens_are_found():
    """See pytorch/ao b3c77e59a."""
    [row] = conform(Subject("engine", grouped=faulty), nvfp4(), only=("grouped_weight_gradient",)).rows
    assert (row.outcome, row.stage.startswith("product: dw, ")) == (Outcome.FAIL, True)


def figures(
    grouped: Callable[..., tuple[Tensor, ...]], experts: int, unevenness: float
) -> tuple[float, float]:
    """Return gain and relative L2 distance of dw from fp64: 256 tokens an expert, 256 features.

    Args:
        grouped: the grouped product.
        experts: their number.
        unevenness: standard deviation of the logarithm of the magnitude of 16 tokens of one feature.
    """
    generator = torch.Generator().manual_seed(0)

    def tokens() -> Tensor:
        levels = unevenness * torch.randn(16 * experts, 256, generator=generator)
        z = torch.randn(256 * experts, 256, generator=generator)
        return (z * levels.exp().repeat_interleave(16, 0)).bfloat16()

    x, dy = tokens(), tokens()
    w = torch.randn(experts, 256, 256, generator=generator).bfloat16()
    dw = grouped(x, w, dy, torch.arange(1, experts + 1, dtype=torch.int32) * 256)[2]
    by_expert = (z.double().unflatten(0, (experts, 256)) for z in (dy, x))
    return gain_and_error(dw, torch.einsum("eto,eti->eoi", *by_expert))


def test_scales_over_packed_tokens_mix_up_blocks_of_normal_tensors():
    gain, error = figures(called, 4, 0.0)
    assert (gain, error) == (pytest.approx(0.992, abs=0.003), pytest.approx(0.1667, abs=0.003))
    assert figures(faulty, 4, 0.0)[1] == pytest.approx(0.46, abs=0.03)


def test_scales_over_packed_tokens_shrink_gradients_of_uneven_blocks():
    """A scale that belongs to another block covaries less with the block than its own."""
    assert figures(called, 4, 0.3)[0] > 0.985
    assert figures(faulty, 4, 0.3)[0] < 0.93


def test_one_expert_has_no_other_to_mix_up_its_scales_with():
    assert figures(faulty, 1, 0.3) == figures(called, 1, 0.3)
