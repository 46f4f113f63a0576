"""Inputs of the parity checks: sizes, data, and recipes of Transformer Engine, all rounded to nearest."""

from collections.abc import Iterator
from dataclasses import dataclass, field

import torch
from torch import Tensor

from ablate.numerics.spec import Outer, Quant, Select
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Fprop, Products
from ablate.recipes.te_mapping import Family, recipe_refusals, variants
from ablate.recipes.te_mapping import families as families_of
from ablate.verification.conformance.reference_product import rounded_to_nearest

NAMES: dict[Family, str] = {"nvfp4": "NVFP4", "mxfp8": "MXFP8", "fp8": "FP8"}
"""The families of formats that are compared, in this order."""


_MODEL = {"layers": 4, "width": 256, "heads": 4, "batch": 8, "context": 256, "eval_tokens": 2048}


@dataclass(frozen=True)
class Bench:
    """Device and sizes of a comparison."""

    families: tuple[str, ...]
    device: torch.device
    engine: str = "transformer_engine"
    """Name of the engine that is compared with the emulator."""
    fast_sums: bool = False
    """True if FP8 products may accumulate with 14 bits, as Hopper's tensor cores do in TE's fprop."""
    shapes: tuple[tuple[int, int], ...] = ((32, 64), (96, 160), (128, 128), (256, 1024), (2048, 512))
    """Shapes of cast tensors: multiples of 32; multiples of 128 reach TE's fused RHT kernel."""
    products: tuple[tuple[int, int, int], ...] = (
        *((32, 32, 32), (96, 160, 64), (128, 256, 384), (2048, 512, 256)),
    )
    """Shapes of layers: tokens, input features, output features."""
    draws: int = 64
    """Number of stochastic roundings of one tensor."""
    steps: int = 200
    """Number of steps of each training run."""
    model: dict[str, int] = field(default_factory=_MODEL.copy)


def data(rows: int, columns: int, device: torch.device) -> Iterator[tuple[str, Tensor]]:
    """Yield names and bf16 tensors [rows, columns] with edge cases of casts, the same in every run."""
    g = torch.Generator().manual_seed(rows * 4099 + columns)
    x = torch.randn(rows, columns, generator=g)
    spread = torch.randn(rows, columns // 16, generator=g).mul(5).exp().repeat_interleave(16, dim=1)
    kinds = {
        "normal": x,
        "heavy tails": x / torch.rand(rows, columns, generator=g).clamp(min=1e-4),
        "blocks far apart": x * spread,  # scales that are subnormal, or zero
        "ties": torch.randint(-48, 49, (rows, columns), generator=g) / 8,
        "zeros": torch.zeros(rows, columns),
        "tiny": x * 2.0**-100,
        "huge": x * 2.0**100,
    }
    yield from ((name, kind.bfloat16().to(device)) for name, kind in kinds.items())


def recipes(wanted: tuple[str, ...]) -> Iterator[tuple[Family, str, Products]]:
    """Yield (family, name, products) of every preset that TE computes, and of variants, all rounded to
    nearest.

    Equal products come once. The family is the first of those that a recipe needs; a recipe that needs a
    family outside `wanted` is left out.
    """
    seen: set[Products] = set()
    for name, products in (*_presets(), *_parts()):
        products = rounded_to_nearest(products)
        used = {"fp8" if family == "fp8_delayed" else family for family in families_of([products])}
        needed = [family for family in NAMES if family in used]
        if needed and set(needed) <= set(wanted) and products not in seen:
            seen.add(products)
            yield needed[0], name, products


def _presets() -> Iterator[tuple[str, Products]]:
    for name, make in PRESETS.items():
        recipe = make()
        if not list(recipe_refusals(recipe)):
            quantised = [products for products in variants(recipe) if not products.plain]
            for number, products in enumerate(quantised, 1):
                yield name if len(quantised) == 1 else f"{name}, phase {number}", products


def _parts() -> Iterator[tuple[str, Products]]:
    nvfp4, mxfp8, fp8 = (PRESETS[name]().products for name in ("nvfp4", "mxfp8", "fp8_current"))
    yield "nvfp4 without rotation", nvfp4.changed({"wgrad.hadamard": None})
    yield "nvfp4 with 1x16 weights", nvfp4.changed({"fprop.w.block": "1x16", "dgrad.w.block": "1x16"})
    for name, products in (("nvfp4", nvfp4), ("mxfp8", mxfp8), ("fp8_current", fp8)):
        yield f"{name} forward alone", products.high_precision("backward")
        yield f"{name} backward alone", products.high_precision("forward")
    yield "mxfp8 forward, nvfp4 backward", nvfp4.replaced("forward", mxfp8)
    for criterion in ("mae", "mse"):
        chosen = Quant(select=Select(among="scales", criterion=criterion), outer=Outer(bound=256.0))
        yield f"Four Over Six forward, {criterion}", Products(fprop=Fprop(x=chosen, w=chosen))
    by_rows = Quant(outer=Outer(granularity="row"))
    yield "activations scaled by rows", Products(fprop=Fprop(x=by_rows, w=Quant()))
