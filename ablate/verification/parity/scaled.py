"""Parity of torch's scaled products, or FlashInfer's, and the emulator on this machine.

The operands of an engine `scaled_mm` are the emulator's own, so two things are left to compare:

- bytes: codes and block scales as they are sent, made on this device, equal those made on a CPU from the same
  operand, and read back they are code times scale of the emulator;
- products: the native product of such operands, and the emulator's of the same ones. Both sum the same terms
  in fp32, in another order; linears.py explains the two limits.

A short training follows, as for Transformer Engine. On a CPU, where torch multiplies FP8 alone, the
comparison runs in small sizes.
"""

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from ablate.engines import SCALED, backend_of
from ablate.engines.hardware import Machine, scaled_refusal, this_machine
from ablate.engines.scaled_mm import Native, ScaledLinear
from ablate.numerics.encoded import Family, decode, encode
from ablate.numerics.philox import Clock
from ablate.numerics.product import product
from ablate.numerics.quantize import Operand
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Products
from ablate.recipes.scaled_mapping import FP4, NAMES, eight_bits, plan
from ablate.recipes.te_mapping import variants
from ablate.verification.check_result import Check, Row
from ablate.verification.conformance.properties.product import Layer
from ablate.verification.parity import ParityRun
from ablate.verification.parity.bench import Bench
from ablate.verification.parity.linears import STEP, Sums, apart, draw_sample

_SMALL = {
    "shapes": ((32, 64), (96, 160)),
    "products": ((32, 32, 32), (96, 160, 64), (40, 81, 48)),
    "steps": 20,
    "model": {
        **{"layers": 2, "width": 64, "heads": 2, "batch": 4, "context": 32},
        **{"eval_tokens": 128, "eval_batch": 2},
    },
}
"""Sizes of a comparison on a CPU."""


def left_out(engine: str, machine: Machine, device: str) -> dict[str, str]:
    backend = backend_of(engine)
    refusals = {family: scaled_refusal(machine, device, [family], backend) for family in NAMES}
    return {family: reason.why for family, reason in refusals.items() if reason}


def obstacle(engine: str, machine: Machine | None = None) -> str | None:
    """Return the reason why nothing of an engine can be compared on this machine; None if something can."""
    machine = machine or this_machine()
    if machine.capability is not None:
        try:
            torch.cuda.init()
        except (RuntimeError, AssertionError) as error:  # driver too old, or torch without CUDA
            return f"torch finds no usable GPU: {(str(error).strip() or 'no CUDA').splitlines()[0]}"
    backend = backend_of(engine)
    wanted = FP4 if engine != SCALED else tuple(NAMES)
    reasons = [scaled_refusal(machine, _device(machine), [family], backend) for family in wanted]
    return str(reasons[0]) if all(reasons) else None


def _device(machine: Machine) -> str:
    return "cuda" if machine.capability else "cpu"


def bench_of(engine: str, machine: Machine) -> Bench:
    device = _device(machine)
    families = tuple(family for family in NAMES if family not in left_out(engine, machine, device))
    fast = machine.capability is not None and machine.capability < (10, 0)
    small: dict[str, Any] = _SMALL if device == "cpu" else {}
    return Bench(families, torch.device(device), engine, fast, **small)


class ScaledRun(ParityRun):
    """One comparison of an engine `scaled_mm`. `machine`: for the record; `bench`: device, families and
    sizes; `fast`: leave out the training; `native`: the functions that multiply; None: those of the
    libraries."""

    names: Mapping[Any, str] = NAMES
    question = "Does scaled_mm train as the emulator does?"

    def __init__(
        self, machine: Machine, bench: Bench, fast: bool = False, native: Native | None = None
    ) -> None:
        super().__init__(machine, bench, fast)
        self.native = native or Native(backend_of(bench.engine))

    @property
    def label(self) -> str:
        library = f" with FlashInfer {self.machine.flashinfer}" if self.bench.engine != SCALED else ""
        return f"{self.bench.engine} of torch {torch.__version__}{library}"

    def suites(self) -> list[Callable[[Bench, Any], Iterator[Check]]]:
        return [
            partial(self._each, "Operands, byte for byte", _bytes),
            partial(self._each, "Products, forward and backward", _products),
        ]

    def _each(
        self, group: str, check: Callable[..., Iterator[Row]], bench: Bench, family: str
    ) -> Iterator[Check]:
        for name, products in recipes(bench, family):
            yield Check(group, partial(check, self.native, bench, name, products), title=name)

    def subject(self) -> Iterator[Row]:
        facts = self.environment()
        device = facts.get("gpu") or facts.get("cpu", "")
        yield Row("device", ", ".join(filter(None, [device, facts.get("capability")])))
        yield Row("torch", str(torch.__version__))
        if self.bench.engine != SCALED:
            yield Row("FlashInfer", str(self.machine.flashinfer))
        for family, why in left_out(self.bench.engine, self.machine, self.bench.device.type).items():
            yield Row(NAMES[family], f"left out: {why}")  # type: ignore[index]
        if self.fast:
            yield Row("a short training", "left out: --fast")

    def environment(self) -> dict[str, str]:
        """Return versions and hardware, without Transformer Engine's."""
        return {name: fact for name, fact in super().environment().items() if name != "transformer-engine"}


class Recorded(ScaledLinear):
    """A layer that computes each native product a second time as the emulator does, and keeps both."""

    def __init__(self, *place: Any, native: Native) -> None:
        super().__init__(*place, native=native)
        self.seen: list[tuple[Operand, Operand, Family, torch.dtype, Tensor, Tensor]] = []

    def native_product(self, a: Operand, b: Operand, family: Family, out: torch.dtype) -> Tensor:
        result = super().native_product(a, b, family, out)
        self.seen.append((a, b, family, out, result.detach(), product(a, b, out).detach()))
        return result


def recipes(bench: Bench, family: str) -> Iterator[tuple[str, Products]]:
    """Yield names and products of every preset whose native products are in these families, each once. A
    preset stands under the first family that it needs."""
    backend = backend_of(bench.engine)
    seen: set[Products] = set()
    for name, make in PRESETS.items():
        for number, products in enumerate(variants(make())):
            given = {one.family for one in plan(products, backend).values() if one.family}
            first = next((one for one in NAMES if one in given), None)
            if first == family and given <= {*bench.families} and products not in seen:
                seen.add(products)
                yield name if number == 0 else f"{name}, later", products


def _layer(native: Native, sample: Layer, products: Products) -> Recorded:
    linear = nn.Linear(sample.w.shape[1], sample.w.shape[0], bias=False, device="meta")
    linear.weight = nn.Parameter(sample.w.float())
    layer = Recorded(linear, "blocks.0.a", Clock(0), torch.bfloat16, native=native)
    layer.products = products
    return layer


def _ran(native: Native, bench: Bench, products: Products) -> Iterator[tuple[str, Recorded]]:
    """Yield the shape and the layer, after a forward and a backward pass."""
    for number, shape in enumerate(bench.products):
        sample = draw_sample(shape, number, bench.device)
        layer = _layer(native, sample, products)
        x = sample.x.clone().requires_grad_()
        layer(x).backward(sample.dy)
        yield " x ".join(map(str, shape)), layer


def _bytes(native: Native, bench: Bench, name: str, products: Products) -> Iterator[Row]:
    wrong, total, where = 0, 0, ""
    for shape, layer in _ran(native, bench, products):
        for a, b, family, *_ in layer.seen:
            for operand in (a, b):
                assert operand.quant is not None
                eight = eight_bits(operand.quant.element) or "e4m3"
                here = encode(operand, family, eight)
                scale = None if operand.block_scale is None else operand.block_scale.cpu()
                there = encode(Operand(operand.values.cpu(), operand.quant, None, scale), family, eight)
                rows, columns = operand.values.shape
                back = decode(here)[:rows, :columns]
                differ = int((back != operand.values.float()).sum()) + _differing(here.data, there.data)
                if here.scales is not None and there.scales is not None:
                    differ += _differing(here.scales, there.scales)
                wrong, total = wrong + differ, total + operand.values.numel()
                where = where or shape * bool(differ)
    first = f", first at {where}" if where else ""
    yield Row(f"{name}: operands", f"{wrong:,} of {total:,} differ{first}", "0 differ", wrong == 0)


def _differing(here: Tensor, there: Tensor) -> int:
    return int((here.view(torch.uint8).cpu() != there.view(torch.uint8)).sum())


def _products(native: Native, bench: Bench, name: str, products: Products) -> Iterator[Row]:
    worst, crossed, differing, total, where = 0.0, "", 0, 0, ""
    for shape, layer in _ran(native, bench, products):
        for a, b, family, out, theirs, ours in layer.seen:
            length = max(a.values.shape[1], b.values.shape[1])
            left, right = (part.dequantize().detach().abs().double() for part in (a, b))
            width = min(left.shape[1], right.shape[1])  # beyond it one of them is zero
            magnitudes = left[:, :width] @ right[:, :width].t()
            sums = Sums(magnitudes, length, bench.fast_sums and family == "fp8")
            step = STEP if out == torch.bfloat16 else 0.0
            found = apart(ours, theirs, sums, step)
            if found.excess > worst:
                worst, where = found.excess, shape
            differing, total = differing + found.differing, total + ours.numel()
            crossed = crossed or shape * (bool(step) and found.share > found.likely)
    at = crossed or where * (worst > 1)
    summary = f"{worst:.2g} of the tolerance, {differing:,} of {total:,} differ" + f", at {at}" * bool(at)
    expected = "at most 1, and as many as the order of additions explains"
    yield Row(f"{name}: products", summary, expected, worst <= 1 and not crossed)
