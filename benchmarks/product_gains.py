"""Gains of products: the alarm's false alarms, what it costs, and a published fault in a grouped product.

    python benchmarks/product_gains.py            # about 10 minutes on one core; rows that exist are kept

Rows, appended to benchmarks/product_gains.json:

- `grouped`: 4 experts of 256 tokens, 256 x 256, NVFP4 with rotation and stochastic rounding. Relative L2 and
  gain of the weight gradients, right and with the block scales of both operands tiled over the packed tokens
  instead of by expert (pytorch/ao b3c77e59a: .16719 and .46228 on a GB200).
- `clean`: comparisons of right, randomly rounded products with their intervals, in trainings of gpt that are
  measured at every step: alarms, and the largest distance of a gain and an error in half-widths.
- `cost`: CPU time of a measured step, with and without products, over that of a plain one.
"""

import json
import statistics
import time
from pathlib import Path
from typing import ClassVar

import torch

from ablate.files import write
from ablate.numerics.philox import Clock
from ablate.numerics.product_error import Sums, compare
from ablate.numerics.quantize import Operand, quantize
from ablate.numerics.stored import swizzle, unswizzle
from ablate.recipes import PRESETS
from ablate.training import loop
from ablate.training.loop import Telemetry, train
from ablate.training.metrics import SlotErrors
from ablate.training.workloads.gpt import Gpt

ROWS = Path(__file__).with_suffix(".json")
EXPERTS, TOKENS, WIDTH = 4, 256, 256
CLEAN = ("nvfp4", "fp4_all_the_way", "quartet2", "tetrajet2", "mxfp4_v4", "luq")


def misread(parts: list[Operand]) -> list[torch.Tensor]:
    """Return the operands [width, tokens] of the experts, with scales tiled over all tokens."""
    scales = [part.block_scale[:, 0, :, 0] for part in parts]
    flat, read, begin = swizzle(torch.cat(scales, 1).to(torch.float8_e4m3fn)), [], 0
    for part, own in zip(parts, scales, strict=True):
        other = unswizzle(flat[begin : begin + own.numel()], *own.shape).float()
        begin += own.numel()
        codes = part.values.float().view(*own.shape, 16) / own.masked_fill(own == 0, 1)[:, :, None]
        read.append((codes * other[:, :, None]).view(own.shape[0], -1) * (part.amax / part.divisor))
    return read


def joined(sums: list[Sums]) -> dict[str, float]:
    """Return gain and relative L2 of the products of all experts together."""
    total = sum(sums[1:], start=sums[0])
    return {"gain": total.gain, "rel_l2": total.rel_l2}


def grouped(seed: int) -> dict:
    """Return gain and relative L2 of the weight gradients of all experts, right and misread."""
    wgrad, generator = PRESETS["nvfp4"]().products.wgrad, torch.Generator().manual_seed(seed)
    tensors = {name: torch.randn(EXPERTS, TOKENS, WIDTH, generator=generator).bfloat16() for name in "xg"}
    operands = {
        name: [
            quantize(
                part.t().contiguous(),
                getattr(wgrad, name),
                rotation=wgrad.hadamard,
                clock=Clock(seed, micro_batch=expert),
                where=ord(name),
            )
            for expert, part in enumerate(tensors[name])
        ]
        for name in "xg"
    }
    ways = {
        "right": {name: [part.dequantize() for part in parts] for name, parts in operands.items()},
        "wrong": {name: misread(parts) for name, parts in operands.items()},
    }
    return {
        way: joined(
            [
                compare(g @ x.t(), dy.t().float() @ source.float())
                for g, x, dy, source in zip(made["g"], made["x"], tensors["g"], tensors["x"], strict=True)
            ]
        )
        for way, made in ways.items()
    }


class Levels(SlotErrors):
    """Collector that counts comparisons, alarms, and how far the comparisons are from them."""

    counts: ClassVar[dict[str, float]] = {}

    def _add(self, layer, errors) -> None:
        errors = [error for error in errors if error.measured.power]
        for error in errors:
            if error.spread:
                for value, distance in error.expected().beyond(error.measured).items():
                    self.counts["comparisons"] += 1
                    self.counts["alarms"] += distance > 1
                    self.counts[value] = max(self.counts[value], distance)
        super()._add(layer, errors)


def workload(steps: int) -> Gpt:
    return Gpt(layers=4, width=128, steps=steps, lr=1e-3, eval_every=steps)


def clean(preset: str) -> dict:
    """Return counts over a training of 100 measured steps."""
    Levels.counts = {"comparisons": 0, "alarms": 0, "gain": 0.0, "rel_l2": 0.0}
    config = workload(100)
    run = config.prepare(PRESETS[preset](), 0, "cpu")
    loop.SlotErrors = Levels
    for _ in train(run, config, Telemetry(every=1, log=1, shadow=10**9)):
        pass
    loop.SlotErrors = SlotErrors
    return Levels.counts


def cost(seed: int) -> dict:
    """Return the CPU time of measured steps, without and with products, over that of plain ones."""
    found = {}
    for name, kind in (("operands", lambda: SlotErrors(products=False)), ("with products", SlotErrors)):
        loop.SlotErrors, times = kind, {True: [], False: []}
        config = workload(61)
        run, before = config.prepare(PRESETS["nvfp4"](), seed, "cpu"), time.process_time()
        for record in train(run, config, Telemetry(every=5, log=1, shadow=10**9)):
            now = time.process_time()
            if 1 < record.step < config.steps:
                times[record.step % 5 == 1].append(now - before)
            before = now
        found[name] = statistics.median(times[True]) / statistics.median(times[False])
    loop.SlotErrors = SlotErrors
    return found


def main() -> None:
    """Compute the rows that are missing, and print a summary."""
    torch.set_num_threads(1)
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    cases = {
        **{f"grouped/{seed}": (grouped, seed) for seed in range(24)},
        **{f"clean/{preset}": (clean, preset) for preset in CLEAN},
        **{f"cost/{seed}": (cost, seed) for seed in range(5)},
    }
    for key, (function, argument) in cases.items():
        if key not in rows:
            rows[key] = function(argument)
            write(ROWS, rows)
    of = {
        kind: [row for key, row in rows.items() if key.startswith(kind)]
        for kind in ("grouped", "clean", "cost")
    }
    for way in ("right", "wrong"):
        for value in ("rel_l2", "gain"):
            own = [row[way][value] for row in of["grouped"]]
            print(f"grouped, {way}: {value} {statistics.mean(own):.4f}, sd {statistics.stdev(own):.4f}")
    for name, over in (("comparisons", sum), ("alarms", sum), ("gain", max), ("rel_l2", max)):
        print(f"clean: {name} {over(row[name] for row in of['clean'])}")
    for name in of["cost"][0]:
        print(
            f"a step that measures {name}: {statistics.mean(row[name] for row in of['cost']):.2f} plain ones"
        )


if __name__ == "__main__":
    main()
