"""A recipe taken step by step on real tensors, for the notebook that teaches it: every figure is computed by
the numerics that train."""

import math
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor

from ablate.numerics.philox import Clock
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import Quant
from ablate.recipes import Recipe
from ablate.recipes.recipe import Wgrad
from ablate.results import figures
from ablate.results.page import Part, Section, Table, Text, section
from ablate.training.metrics import quantisation
from ablate.training.workloads import WORKLOADS
from ablate.training.workloads.tensors import capture, gemm_metric, layer_of, product_errors, products_of

_LAYER = {
    "layer": "blocks.0.mlp.down",
    "capture": {
        "layers": 2,
        "width": 96,
        "heads": 3,
        "steps": 40,
        "batch": 4,
        "eval_tokens": 128,
        "eval_batch": 1,
    },
}
_DRAWS = 64


class Walkthrough:
    """The steps of the notebook; pictures and tables are saved in `out` where that is given."""

    def __init__(self, out: str | Path | None = None) -> None:
        self.out = Path(out) if out else None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """x [tokens, inputs], w [outputs, inputs] and dy [tokens, outputs] of one layer at the end of a short
        bf16 run, in bf16."""
        config = WORKLOADS["tensors"].model_validate(
            {"x": "captured", "w": "captured", "g": "captured"} | _LAYER
        )
        seen = capture(config, 0, torch.device("cpu"))
        return seen["x"], seen["w"], seen["g"]

    def show(self, *parts: Part) -> Section:
        """Parts without a heading of their own: the notebook's text has it."""
        found = section("", *parts)
        if self.out:
            found.save(self.out)
        return found

    def table(self, name: str, **tensors: Tensor) -> Section:
        """What the tensors are like: what makes them hard to cast."""
        rows = []
        for word, tensor in tensors.items():
            x = tensor.float()
            rms = x.square().mean().sqrt().item()
            crest = x.abs().max().item() / rms
            rows.append(
                {
                    "tensor": f"{word} {list(tensor.shape)}",
                    "root mean square": (f"{rms:.3g}", rms),
                    "amax": (f"{x.abs().max():.3g}", x.abs().max().item()),
                    "amax / rms": (f"{crest:.1f}", crest),
                    "kurtosis (3: Gaussian)": (
                        f"{x.pow(4).mean() / rms**4:.1f}",
                        x.pow(4).mean().item() / rms**4,
                    ),
                }
            )
        return self.show(Table(_stem(name), rows))

    def block(self, x: Tensor) -> Section:
        """One block on its way: values, over the scale, on the grid, back."""
        operand = quantize(x, Quant(), keep=True)
        row = int(x.abs().amax(1).argmax())
        start = int(x[row].abs().argmax()) // 16 * 16
        span = slice(start, start + 16)
        steps = {
            "x": x[row, span].float(),
            "over the scale": operand.scaled[row, span],
            "rounded to E2M1": operand.codes[row, span],
            "back": operand.dequantize()[row, span],
        }
        rows = [
            {"": word, **{str(place): f"{value:.3g}" for place, value in enumerate(values)}}
            for word, values in steps.items()
        ]
        scale = operand.block_scale[row, 0, start // 16, 0].item()
        said = (
            f"Block {start // 16} of row {row}: block scale {scale:g} (E4M3), amax of the tensor"
            f" {operand.amax.item():g} (fp32)."
        )
        return self.show(Table("block", rows, said))

    def errors(self, what: str, quant: Quant, **tensors: Tensor) -> Section:
        """The errors of a cast, as telemetry records them."""
        return self.show(
            Table(
                _stem(what),
                [self._errors(word, quantize(x, quant, keep=True)) for word, x in tensors.items()],
                what,
            )
        )

    def _errors(self, word: str, operand: Operand) -> dict[str, object]:
        found = quantisation(operand)
        return {
            "cast": word,
            "SQNR dB": (f"{found['sqnr_db']:.2f}", found["sqnr_db"]),
            "became zero": (f"{found['zero_frac']:.1%}", found["zero_frac"]),
            "<x, q> / <x, x>": (f"{found['magnitude']:.4f}", found["magnitude"]),
            "median crest of a block": (f"{found['crest']:.2f}", found["crest"]),
        }

    def rotation(self, x: Tensor, product: Wgrad) -> Section:
        """An operand of wgrad before and after its rotation."""
        plain = product.g.model_copy(update={"rounding": "nearest"})
        casts = quantize(x, plain, keep=True), quantize(x, plain, rotation=product.hadamard, keep=True)
        rows = [self._errors(word, cast) for word, cast in zip(("as it is", "rotated"), casts, strict=True)]
        flat = [cast.scaled.flatten().numpy() for cast in casts]
        return self.show(
            Table("rotation", rows, "The same cast, to nearest."), figures.rotation_histogram(*flat)
        )

    def rounding(self, x: Tensor) -> Section:
        """One draw and the mean of many, by both roundings."""
        nearest, drawn = Quant(), Quant(rounding="stochastic")
        values, clock, total = x.float(), Clock(0), torch.zeros_like(x, dtype=torch.float64)
        rows = []
        for draw in range(_DRAWS):
            clock.step = draw
            one = quantize(x, drawn, clock=clock).dequantize()
            total += one
            if draw == 0:
                rows = [
                    _row("nearest, once", values, quantize(x, nearest).dequantize()),
                    _row("stochastic, once", values, one),
                ]
        rows.insert(1, _row(f"nearest, mean of {_DRAWS}", values, quantize(x, nearest).dequantize()))
        rows.append(_row(f"stochastic, mean of {_DRAWS}", values, (total / _DRAWS).float()))
        clock.step = 0
        kept = quantize(x, nearest, keep=True), quantize(x, drawn, clock=clock, keep=True)
        flat = [z.flatten().numpy() for z in (kept[0].scaled, kept[0].codes, kept[1].codes)]
        return self.show(Table("rounding", rows), figures.rounding_histogram(*flat))

    def tiles(self, w: Tensor) -> Section:
        """w by rows and by columns, in blocks and in tiles: how far the two casts of one weight are apart."""
        rows = []
        for block in ("1x16", "16x16"):
            quant = Quant(block=block)
            across, down = (
                quantize(w, quant).dequantize(),
                quantize(w.t().contiguous(), quant).dequantize().t(),
            )
            apart = ((across - down).square().sum() / w.float().square().sum()).item()
            rows.append(
                _row(f"blocks of {block}", w.float(), across)
                | {"the two casts apart, relative": (f"{apart:.2e}", apart)}
            )
        return self.show(Table("tiles", rows))

    def products(self, x: Tensor, w: Tensor, dy: Tensor, recipes: Mapping[str, Recipe]) -> Section:
        """Each product under each recipe, against fp64."""
        rows = []
        for name, recipe in recipes.items():
            found = product_errors(products_of(layer_of(recipe, w, Clock(0)), x, dy), x, w, dy)
            decibels = {
                product: found.get(gemm_metric(product, "sqnr_db"), math.nan)
                for product in ("fprop", "dgrad", "wgrad")
            }
            rows.append(
                {
                    "recipe": name,
                    **{f"{product}, SQNR dB": (f"{value:.2f}", value) for product, value in decibels.items()},
                }
            )
        said = "One draw; a recipe that is noisier once may be better on average: see the rounding above."
        return self.show(Table("products", rows), Text(said))


def _row(word: str, exact: Tensor, found: Tensor) -> dict[str, object]:
    error = ((exact - found).square().sum() / exact.square().sum()).item()
    bias = ((exact * found).sum() / exact.square().sum()).item() - 1
    return {
        "cast": word,
        "relative squared error": (f"{error:.2e}", error),
        "bias along x": (f"{bias:+.1e}", bias),
    }


def _stem(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")
