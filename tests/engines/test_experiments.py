"""In every shipped experiment, compiled quantisers give each operand the reference's codes, scales and amaxes, bit for bit."""

from functools import cache
from pathlib import Path

import pytest
import torch
from support.linears import Each

from ablate.experiment.load import load
from ablate.numerics.kernels import builds
from ablate.numerics.quantize import Operand
from ablate.recipes import Recipe
from ablate.recipes.recipe import Run
from ablate.training.workloads.gpt import Gpt, MixtureOfExperts

EXPERIMENTS = sorted((Path(__file__).parents[2] / "experiments").rglob("*.yaml"))
SHAPE = Gpt(layers=3, width=64, heads=2, context=32, batch=2, steps=10, eval_tokens=64, eval_batch=2)
MIXTURE = SHAPE.model_copy(update={"experts": MixtureOfExperts(count=4, hidden=64)})


def operands(recipe: Recipe, shape: Gpt) -> list[tuple[str, Operand]]:
    """Every quantised operand of the first step, in order."""
    run = shape.prepare(recipe, 0, "cpu")
    with torch.no_grad():
        run.model.head.weight.normal_(
            generator=torch.Generator().manual_seed(1)
        )  # zero at first, and with it every gradient
    run.engine.at(0, Run(shape.steps, shape.tokens_per_step))
    seen = []
    run.engine.listen(Each(lambda layer, slot, operand: seen.append((f"{layer} {slot}", operand))))
    run.model(*run.batch(0, 0)).backward()
    return seen


def bits(x: torch.Tensor) -> torch.Tensor:
    return x.contiguous().view(torch.int16 if x.dtype == torch.bfloat16 else torch.int32)


@cache
def differences(recipe: Recipe, mixture: bool) -> list[tuple[str, str]]:
    """Return layer, slot and part of each operand that is not the reference's; many experiments share a recipe."""
    shape = MIXTURE if mixture else SHAPE
    mine = operands(recipe, shape)
    with builds.using(None):
        theirs = operands(recipe, shape)
    assert [where for where, _ in mine] == [where for where, _ in theirs]
    found = []
    for (where, a), (_, b) in zip(mine, theirs, strict=True):
        for part in ("values", "block_scale", "amax", "largest"):
            one, other = getattr(a, part), getattr(b, part)
            same = one is other is None or (
                one is not None and other is not None and torch.equal(bits(one), bits(other))
            )
            found += [] if same else [(where, part)]
    return found


@pytest.mark.skipif(builds.build() is None, reason="the package was installed without compiled quantisers")
@pytest.mark.parametrize("path", EXPERIMENTS, ids=lambda path: path.stem)
def test_every_operand_of_an_experiment_is_the_references(path):
    arms = load(path).arms
    recipes = {arm.recipe.model_dump_json(): arm.recipe for arm in arms}
    mixture = any(getattr(arm.config, "experts", None) for arm in arms)
    assert {name: found for name, recipe in recipes.items() if (found := differences(recipe, mixture))} == {}
