"""Activation checkpointing of a converted model: random programs of passes give the gradients of the same program without it."""

import random
from collections.abc import Sequence

import pytest
import torch
from support.ddp_program import Block
from torch import nn
from torch.utils.checkpoint import checkpoint

import ablate

BLOCKS = 3
PASSES = ("one", "one", "twice", "no graph", "evaluated", "evaluated with a graph", "two at once", "compared")
Forms = Sequence[bool | None]
"""For each block: checkpointed with `use_reentrant` True or False, or not (None)."""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(8, 32), nn.Linear(32, 4)
        self.trunk = nn.ModuleList(Block(32) for _ in range(BLOCKS))

    def forward(self, x, forms: Forms):
        x = self.stem(x)
        for block, form in zip(self.trunk, forms, strict=True):
            x = block(x) if form is None else checkpoint(block, x, use_reentrant=form)
        return self.head(x).square().mean()


def computed(passes: Sequence[str], forms: Forms, again: bool, seed: int) -> list[torch.Tensor]:
    """The gradients after a step of these passes; `again`: a graph may be used twice."""
    torch.manual_seed(seed)
    model = Net()
    run = ablate.convert(model, "nvfp4", set={"recipe.fprop.x.rounding": "stochastic"}, seed=seed)
    draws = torch.Generator().manual_seed(seed)

    def loss(forms: Forms = forms, x: torch.Tensor | None = None) -> torch.Tensor:
        return model(torch.randn(16, 8, generator=draws) if x is None else x, forms)

    with run.step():
        for each in passes:
            if each == "no graph":
                with torch.no_grad():
                    loss([None] * BLOCKS)
            elif each.startswith("evaluated"):
                with run.evaluation(), torch.set_grad_enabled(each.endswith("graph")):
                    value = loss()
                    if value.requires_grad:
                        value.backward()
            elif each == "two at once":
                (loss() + loss()).backward()
            elif each == "compared":
                x = torch.randn(16, 8, generator=draws)
                run.compare_gradient(lambda x=x: loss(x=x).backward())
            else:
                value = loss()
                if each == "twice" and again:
                    value.backward(retain_graph=True)
                value.backward()
        loss().backward()
    return [p.grad for p in model.parameters()]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore:.*requires_grad=True")
def test_random_programs_of_passes_have_the_gradients_of_the_same_without_checkpoints():
    """Or are refused, where several passes of a layer wait at once; or a pass without a graph looks like one that waits."""
    equal = refused = 0
    for seed in range(60):
        rng = random.Random(seed)
        passes = [rng.choice(PASSES) for _ in range(rng.randint(1, 5))]
        forms = [rng.choice([None, False, True]) for _ in range(BLOCKS)]
        again = True not in forms  # a reentrant checkpoint frees its graph
        expected = computed(passes, [None] * BLOCKS, again, seed)
        ambiguous = any(form is not None for form in forms) and (
            "two at once" in passes or ("no graph" in passes and True in forms)
        )
        try:
            found = computed(passes, forms, again, seed)
        except RuntimeError as error:
            if not (ambiguous and "wait for their backward passes" in str(error)):
                raise
            refused += 1
            continue
        assert all(map(torch.equal, found, expected)), (seed, passes, forms)
        equal += 1
    assert equal > 25
    assert refused > 5
