"""Steps of a recipe on real tensors, for the notebook that explains them, computed by the code that
trains."""

import math
from collections.abc import Mapping
from operator import itemgetter
from pathlib import Path

import torch
from torch import Tensor

from ablate.numerics.philox import Clock
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.spec import Quant
from ablate.recipes import Recipe
from ablate.recipes.recipe import Wgrad
from ablate.reports import figures
from ablate.reports.page import Part, Section, Text, section
from ablate.reports.table import Cell, Source, Table, cell
from ablate.training.metrics import quantisation
from ablate.training.workloads.tensors import (
    Tensors,
    capture,
    gemm_metric,
    layer_of,
    product_errors,
    products_of,
)

_LAYER = {
    "layer": "blocks.0.mlp.down",
    "capture": {"layers": 2, "width": 96, "heads": 3, "steps": 40, "batch": 4}
    | {"eval_tokens": 128, "eval_batch": 1},
}
_DRAWS = 64
"""Number of stochastic roundings whose mean is shown."""


class Walkthrough:
    """Steps of the notebook. Each returns a section of the page. `out`: folder for pictures and tables; None:
    nothing is saved."""

    def __init__(self, out: str | Path | None = None) -> None:
        self.out = Path(out) if out else None

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the tensors of one layer at the end of a short bf16 run, in bf16: x [tokens, inputs], w
        [outputs, inputs] and dy [tokens, outputs]."""
        config = Tensors.model_validate({"x": "captured", "w": "captured", "g": "captured"} | _LAYER)
        captured = capture(config, 0, torch.device("cpu"))
        return captured["x"], captured["w"], captured["g"]

    def show(self, *parts: Part | None) -> Section:
        """Return a section without a heading, which the notebook's text has, and save its files."""
        shown = section("", *parts)
        if self.out:
            shown.save(self.out)
        return shown

    def table(self, name: str, **tensors: Tensor) -> Section:
        """Return a table of the statistics that make tensors, of any shape, hard to cast: amax, root mean
        square, kurtosis. `name`: its title, which names its CSV file."""
        rows: list[dict[str, Cell]] = []
        for label, tensor in tensors.items():
            x = tensor.float()
            rms, amax = x.square().mean().sqrt().item(), x.abs().max().item()
            kurtosis = x.pow(4).mean().item() / rms**4
            row: dict[str, Cell] = {"tensor": f"{label} {list(tensor.shape)}"}
            row |= {"root mean square": cell(rms, ".3g"), "amax": cell(amax, ".3g")}
            row |= {"amax / rms": cell(amax / rms, ".1f"), "kurtosis (3: Gaussian)": cell(kurtosis, ".1f")}
            rows.append(row)
        return self.show(Table.of(_stem(name), rows))

    def block(self, x: Tensor) -> Section:
        """Return a table of the block of 16 values of x [rows, columns] that has its largest value, at each
        step of a cast: values, scaled, rounded, scaled back."""
        operand = quantize(x, Quant(), keep=True)
        row = int(x.abs().amax(1).argmax())
        start = int(x[row].abs().argmax()) // 16 * 16
        span = slice(start, start + 16)
        steps = {
            "x": x[row, span].float(),
            "over the scale": _kept(operand.scaled)[row, span],
            "rounded to E2M1": _kept(operand.codes)[row, span],
            "back": operand.dequantize()[row, span],
        }
        rows = [
            {"": step, **{str(column): f"{value:.3g}" for column, value in enumerate(values)}}
            for step, values in steps.items()
        ]
        scale = _kept(operand.block_scale)[row, 0, start // 16, 0].item()
        amax = _kept(operand.amax).item()
        caption = f"Block {start // 16} of row {row}: block scale {scale:g} (E4M3),"
        caption += f" amax of the tensor {amax:g} (fp32)."
        return self.show(Table.of("block", rows, caption))

    def errors(self, title: str, quant: Quant, **tensors: Tensor) -> Section:
        """Return a table of the errors of casts of tensors, as telemetry records them. `title`: its caption,
        which names its CSV file."""
        casts = {label: quantize(x, quant, keep=True) for label, x in tensors.items()}
        return self.show(_errors(_stem(title), casts, title))

    def rotation(self, x: Tensor, product: Wgrad) -> Section:
        """Return errors and histograms of an operand of wgrad [tokens, features] with and without its
        rotation; ValueError if the recipe does not quantise dy in wgrad."""
        if product.g is None:
            raise ValueError("wgrad does not quantise dy: there is no cast to show")
        plain = product.g.model_copy(update={"rounding": "nearest"})
        rotated = quantize(x, plain, rotation=product.hadamard, keep=True)
        casts = {"as it is": quantize(x, plain, keep=True), "rotated": rotated}
        flat = [_kept(cast.scaled).flatten().numpy() for cast in casts.values()]
        table = _errors("rotation", casts, "The same cast, to nearest.")
        return self.show(table, figures.rotation_histogram(*flat))

    def rounding(self, x: Tensor) -> Section:
        """Return errors of one cast and of the mean of many, by rounding to nearest and stochastically."""
        nearest, drawn, clock = Quant(), Quant(rounding="stochastic"), Clock(0)
        fixed, draws = quantize(x, nearest).dequantize(), []
        for clock.step in range(_DRAWS):
            draws.append(quantize(x, drawn, clock=clock).dequantize())
        mean = (sum(draws, torch.zeros_like(x, dtype=torch.float64)) / _DRAWS).float()
        results = {"nearest, once": fixed, f"nearest, mean of {_DRAWS}": fixed}
        results |= {"stochastic, once": draws[0], f"stochastic, mean of {_DRAWS}": mean}
        rows = [_row(label, x.float(), cast) for label, cast in results.items()]
        clock.step = 0
        kept = quantize(x, nearest, keep=True), quantize(x, drawn, clock=clock, keep=True)
        flat = [_kept(z).flatten().numpy() for z in (kept[0].scaled, kept[0].codes, kept[1].codes)]
        return self.show(Table.of("rounding", rows), figures.rounding_histogram(*flat))

    def tiles(self, w: Tensor) -> Section:
        """Return errors of casts of a weight [outputs, inputs] by rows, and their distance from casts by
        columns, for two block shapes."""
        rows = []
        for block in ("1x16", "16x16"):
            quant = Quant(block=block)
            across = quantize(w, quant).dequantize()
            down = quantize(w.t().contiguous(), quant).dequantize().t()
            distance = ((across - down).square().sum() / w.float().square().sum()).item()
            row = _row(f"blocks of {block}", w.float(), across)
            rows.append(row | {"the two casts apart, relative": cell(distance, ".2e")})
        return self.show(Table.of("tiles", rows))

    def products(self, x: Tensor, w: Tensor, dy: Tensor, recipes: Mapping[str, Recipe]) -> Section:
        """Return the errors of each product under each recipe, against fp64: x [tokens, inputs], w [outputs,
        inputs], dy [tokens, outputs]."""
        rows: list[dict[str, Cell]] = []
        for name, recipe in recipes.items():
            errors = product_errors(products_of(layer_of(recipe, w, Clock(0)), x, dy), x, w, dy)
            row: dict[str, Cell] = {"recipe": name}
            for product in ("fprop", "dgrad", "wgrad"):
                value = errors.get(gemm_metric(product, "sqnr_db"), math.nan)
                row[f"{product}, SQNR dB"] = (f"{value:.2f}", value)
            rows.append(row)
        note = "One draw; a recipe that is noisier once may be better on average: see the rounding above."
        return self.show(Table.of("products", rows), Text(note))


_ERRORS: dict[str, tuple[str, str]] = {
    "SQNR dB": ("sqnr_db", ".2f"),
    "became zero": ("zero_frac", ".1%"),
    "<x, q> / <x, x>": ("magnitude", ".4f"),
    "median crest of a block": ("crest", ".2f"),
}
"""Columns of a table of errors: name among the errors that telemetry records, and format."""


def _errors(name: str, casts: Mapping[str, Operand], caption: str) -> Table | None:
    """Return the table of the errors of casts by their names."""
    columns: dict[str, Source] = {head: (itemgetter(key), form) for head, (key, form) in _ERRORS.items()}
    rows = [quantisation(cast) | {"cast": label} for label, cast in casts.items()]
    return Table.by_columns(name, rows, {"cast": itemgetter("cast")} | columns, caption)


def _kept(tensor: Tensor | None) -> Tensor:
    """Return a tensor that `quantize` stores on request (`keep=True`)."""
    if tensor is None:
        raise ValueError("the operand was quantised without keep=True")
    return tensor


def _row(label: str, exact: Tensor, cast: Tensor) -> dict[str, Cell]:
    """Return squared error and bias of a cast, relative to the exact values."""
    error = ((exact - cast).square().sum() / exact.square().sum()).item()
    bias = ((exact * cast).sum() / exact.square().sum()).item() - 1
    return {"cast": label, "relative squared error": cell(error, ".2e"), "bias along x": cell(bias, "+.1e")}


def _stem(name: str) -> str:
    return "".join(letter if letter.isalnum() else "-" for letter in name.lower()).strip("-")
