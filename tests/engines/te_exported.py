"""Comparison of te.Linear under the recipes that are written for Transformer Engine with the emulator. As a program it prints JSON."""

import json
import sys

import torch
from te_contract import RECIPES, TE, computed, layers, shapes

from ablate.recipes.recipe import Products, Recipe
from ablate.recipes.targets import TARGETS, Model


class Exported(torch.nn.Module):
    """A te.Linear that the file makes of an nn.Linear, in the context that it makes."""

    def __init__(self, names: dict, weight: torch.Tensor) -> None:
        super().__init__()
        self.names = names
        self.out_features, self.in_features = weight.shape
        self.weight = torch.nn.Parameter(weight.clone())
        shape = {"in_features": self.in_features, "out_features": self.out_features}
        linear = torch.nn.Linear(**shape, bias=False, dtype=torch.bfloat16, device="meta")
        model = torch.nn.ModuleDict({"layers": torch.nn.ModuleList([torch.nn.ModuleDict({"up": linear})])})
        names["swap"](model)
        self.layers = [model.get_submodule("layers.0.up")]  # no submodule
        assert type(self.layers[0]) is TE.Linear

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with self.names["autocast"](0, 1):
            return torch.func.functional_call(self.layers[0], {"weight": self.weight.bfloat16()}, (x,))


def exported(products: Products) -> dict:
    """The names of the file that is written for these products."""
    recipe = Recipe(fprop=products.fprop, dgrad=products.dgrad, wgrad=products.wgrad)
    names: dict = {}
    text = TARGETS["te"].write(recipe, Model("it", 1)).replace('device="cuda"', 'device="cpu"')
    exec(compile(text, "exported.py", "exec"), names)
    return names


def differ(products: Products, shape: tuple[int, int, int], seed: int) -> tuple[int, int]:
    """The elements of y, dx and dw that differ, and all of them."""
    tokens, inputs, outputs = shape
    ours = next(layers(products, (inputs, outputs), seed))
    theirs = Exported(exported(products), ours.weight.data)
    pairs = list(zip(computed(ours, tokens, seed), computed(theirs, tokens, seed), strict=True))
    return sum(int((a != b).sum()) for a, b in pairs), sum(a.numel() for a, _ in pairs)


if __name__ == "__main__":
    found = {
        name: [differ(products, shape, seed) for seed, shape in enumerate(shapes(int(sys.argv[1])))]
        for name, products in RECIPES.items()
    }
    print(json.dumps(found))
