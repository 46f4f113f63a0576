"""Replay of 40 dumps that the emulator wrote, 20 of them with one planted fault: hits, false alarms.

    python benchmarks/conformance_replay.py       # about 5 minutes on one core; rows that exist are kept

Presets, numbers of layers, shapes, data, layout of the files, and the fault with its layer and product are
drawn from the number of the dump. Faults are planted in the bytes of packed operands where there are some.
Rows are appended to benchmarks/conformance_replay.json.
"""

import json
import random
import sys
import tempfile
from collections import Counter
from dataclasses import replace
from pathlib import Path

import torch
from torch import Tensor, nn

sys.path.insert(0, str(Path(__file__).parents[1] / "tests"))
from support.dumped import write as write_dumps

from ablate.engines.emulated_layer import EmulatedLinear
from ablate.files import write
from ablate.numerics.encoded import decode, encode
from ablate.numerics.philox import Clock
from ablate.numerics.quantize import Operand
from ablate.numerics.stored import swizzle, unswizzle
from ablate.recipes import PRESETS
from ablate.recipes.recipe import Products
from ablate.verification.conformance.dumps import DumpedLayer
from ablate.verification.conformance.replay import RESULTS, replay

ROWS = Path(__file__).with_suffix(".json")
CLEAN = [name for name, make in PRESETS.items() if not make().products.plain]
FAULTY = (
    "nvfp4",
    "nvfp4_1d_weight",
    "fp4_all_the_way",
    "mxfp4",
    "nvfp4_per_token",
    "four_over_six",
    "averis",
)
PACKED = {"nvfp4": "nvfp4", "mxfp4": "mxfp4"}
KINDS = {
    "outer": "outer scale lost",
    "stale": "another outer scale",
    "nibbles": "nibbles swapped",
    "shifted": "block scales shifted",
    "tiles": "block scales in another layout",
    "experts": "block scales tiled over packed tokens",
    "unrotated": "rotation missing on one operand",
    "signs": "other signs on one operand",
    "nearest": "rounded to nearest",
    "codes": "W and W^T from different codes",
    "transposed": "operand transposed",
    "swapped": "operand of another layer",
    "zeros": "block of zeros",
    "nan": "not finite",
}


def packable(part: Operand) -> str | None:
    """Return the family of an operand's bytes, if it has any."""
    quant = part.quant
    if (
        quant is None
        or quant.element != "e2m1"
        or quant.scale is None
        or quant.scale.format not in ("e4m3", "e8m0")
    ):
        return None
    return "nvfp4" if quant.scale.format == "e4m3" else "mxfp4"


class Planted(EmulatedLinear):
    """A layer one of whose operands has a fault."""

    plant: "tuple[str, str, random.Random, Tensor | None, list[Tensor]] | None" = None

    def operand(self, x, slot, quant, rotation, keep=False, rounded=False):
        x = x.to(torch.bfloat16) if rounded else x
        if self.plant is None or slot not in self.plant[1].split("+"):
            return super().operand(x, slot, quant, rotation, keep)
        kind, _, rng, other, experts = self.plant
        if kind == "unrotated":
            rotation = None
        if kind == "nearest":
            quant = quant.model_copy(update={"rounding": "nearest"})
        if kind == "codes":
            quant = quant.model_copy(update={"block": "1x16"})
        if kind == "transposed":
            x = x.t()
        if kind == "swapped":
            x = other
        if kind == "signs":
            flips = torch.tensor([rng.choice((-1.0, 1.0)) for _ in range(rotation.size)])
            flips[rng.randrange(rotation.size)] = -1.0
            x = (x * flips.repeat(x.shape[1] // rotation.size)).to(x.dtype)
        first, *parts = super().operand(x, slot, quant, rotation, keep)
        if kind == "outer":
            first = replace(first, amax=None)
        if kind == "stale":
            first = replace(first, amax=first.amax * rng.choice((0.4, 0.7, 1.4, 2.5)))
        if kind in ("nibbles", "shifted", "tiles", "experts"):
            first = self.in_bytes(first, kind, slot, experts)
        return [first, *parts]

    def in_bytes(self, part: Operand, kind: str, slot: str, experts: list[Tensor]) -> Operand:
        """Return an operand after a fault in its packed bytes."""
        rows, columns = part.values.shape
        packed = encode(part, packable(part))
        wide = packed.columns // (16 if packed.family == "nvfp4" else 32)
        if kind == "nibbles":
            codes = packed.data.view(torch.uint8)
            packed = replace(packed, data=(codes >> 4 | (codes & 15) << 4).view(packed.data.dtype))
        elif kind == "experts":
            spec, own = getattr(self.products, slot.partition(".")[0]), packed.scales.numel()
            others = [
                super(Planted, self).operand(z, slot, self.products.slot(slot), spec.hadamard)[0]
                for z in experts
            ]
            tall = packed.data.shape[0]
            plain = [
                unswizzle(each.scales, tall, wide) for each in (encode(z, packed.family) for z in others)
            ]
            index = next(
                n for n, each in enumerate(plain) if torch.equal(each, unswizzle(packed.scales, tall, wide))
            )
            whole = swizzle(torch.cat([each.view(torch.uint8) for each in plain], 1))
            packed = replace(packed, scales=whole[index * own : (index + 1) * own].view(packed.scales.dtype))
        else:
            plain = unswizzle(packed.scales, packed.data.shape[0], wide).view(torch.uint8)
            if kind == "shifted":
                read = swizzle(plain.roll(1, 1))
            else:  # rows are taken for tiles
                read = swizzle(plain).clone()
                flat = torch.nn.functional.pad(plain, (0, -wide % 4, 0, -len(plain) % 128)).reshape(-1)
                read[: len(flat)] = flat
            packed = replace(packed, scales=read.view(packed.scales.dtype))
        return replace(part, values=decode(packed)[:rows, :columns])


def possible(
    kind: str, products: Products, product: str, shape: tuple[int, int, int], experts: bool
) -> list[str]:
    """Return the operands, several joined by +, in which a fault changes something."""
    tokens, inside, out = shape
    spec, found = getattr(products, product), []
    both = tuple(f"{product}.{operand}" for operand in spec.operands)
    sizes = {"fprop": ((tokens, inside), (out, inside)), "dgrad": ((tokens, out), (inside, out))}
    sizes["wgrad"] = ((out, tokens), (inside, tokens))
    for slot, (rows, columns) in zip(both, sizes[product], strict=True):
        quant = products.slot(slot)
        if quant is None:
            continue
        fits = {
            "outer": quant.outer is not None,
            "stale": quant.outer is not None,
            "nibbles": quant.four_bits,
            "shifted": quant.scale is not None and columns >= 64,
            "tiles": quant.scale is not None and rows >= 128 and columns >= 128,
            "unrotated": spec.hadamard is not None,
            "signs": spec.hadamard is not None and columns % 16 == 0,
            "nearest": quant.draws,
            "codes": slot == "dgrad.w" and quant.block == "16x16",
            "transposed": rows == columns,
            "swapped": True,
        }
        if fits.get(kind, False):
            found.append(slot)
    if kind in ("zeros", "nan"):
        found = ["result"]
    tall = max(inside, out) > 128  # one row of tiles is the same for one matrix and for its parts
    if kind == "experts" and product == "wgrad" and experts and tall and all(map(products.slot, both)):
        found = ["+".join(both)]
    return found


def tensors(rng: random.Random, shape: tuple[int, int, int]) -> dict[str, Tensor]:
    """Return x, w and dy; some with hot tokens or channels."""
    tokens, inside, out = shape
    g = torch.Generator().manual_seed(rng.getrandbits(40))
    made = {
        name: torch.randn(size, generator=g) * scale
        for name, size, scale in (
            ("x", (tokens, inside), 1),
            ("w", (out, inside), inside**-0.5),
            ("dy", (tokens, out), 1e-3),
        )
    }
    if rng.random() < 0.5:
        made["x"][:: rng.choice((16, 64))] *= rng.choice((5, 20))
    if rng.random() < 0.5:
        made["dy"] *= torch.randn(tokens, 1, generator=g).exp()
    if rng.random() < 0.3:
        made["x"][:, :: rng.choice((32, 96))] *= 10
    return {name: tensor.bfloat16() for name, tensor in made.items()}


def computed(name: str, products: Products, own: dict[str, Tensor], seed: int, plant) -> dict[str, Tensor]:
    """Return y, dx and dw of one layer at step 7."""
    out, inside = own["w"].shape
    linear = nn.Linear(inside, out, bias=False, device="meta")
    linear.weight = nn.Parameter(own["w"].float())
    layer = Planted(linear, name, Clock(seed, step=7), torch.bfloat16)
    layer.products, layer.plant = products, plant
    x = own["x"].clone().requires_grad_()
    y = layer(x)
    y.backward(own["dy"])
    return {"y": y.detach(), "dx": x.grad, "dw": layer.weight.grad.to(torch.bfloat16)}


def dump(number: int, folder: Path) -> tuple[str, dict]:
    """Write one dump; return its preset, and what was planted.

    The kinds take turns; everything else is drawn again until the kind is possible.
    """
    rng, kind = random.Random(f"dump {number}"), [*KINDS][number // 2 % len(KINDS)] if number % 2 else ""
    while (made := drawn(number, kind, rng, folder)) is None:
        pass
    return made


def drawn(number: int, kind: str, rng: random.Random, folder: Path) -> tuple[str, dict] | None:
    """Write a dump with a fault of a kind, or without; None if the drawn layers cannot have it."""
    faulty = bool(kind)
    preset = rng.choice(FAULTY if faulty else CLEAN)
    products = PRESETS[preset]().products
    experts = rng.random() < 0.4
    sizes = (
        [rng.choice((64, 128, 192, 256)) for _ in range(2)]
        if not experts
        else [rng.choice((128, 256)) for _ in range(2)]
    )
    shape = (rng.choice((128, 256)), *sizes) if rng.random() < 0.6 else (256, 256, 256)
    names = (
        [f"blocks.0.experts.{n}" for n in range(4)]
        if experts
        else [
            f"blocks.{n}.{rng.choice(('mlp.up', 'mlp.down', 'attention.qkv'))}"
            for n in range(rng.randint(2, 4))
        ]
    )
    own, planted = {}, {}
    plant, target = None, ""
    if faulty:
        choices = [
            (product, slot)
            for product in RESULTS
            for slot in possible(kind, products, product, shape, experts)
        ]
        if not choices:
            return None
        product, slot = rng.choice(choices)
        target = rng.choice(names)
        own = {name: tensors(rng, shape) for name in names}
        planted = {"layer": target, "product": product, "kind": KINDS[kind], "slot": slot}
        other = None
        if kind == "swapped":
            key = {"x": "x", "w": "w", "g": "dy"}[slot[-1]]
            tensor = own[rng.choice([name for name in names if name != target])][key]
            other = tensor.t() if slot == "dgrad.w" or product == "wgrad" else tensor
        groups = {}
        plant = (kind, slot, rng, other, groups)
    own = own or {name: tensors(rng, shape) for name in names}
    layers = []
    for name in names:
        mine = plant
        if plant and plant[0] == "experts":
            mine = None
        results = computed(name, products, own[name], number, mine if name == target else None)
        if plant and name == target and plant[0] == "experts":
            results["dw"] = grouped(name, products, own, number)
        if plant and name == target and plant[1] == "result":
            result = results[RESULTS[planted["product"]]]
            rows, columns = result.shape
            row, column = (16 * rng.randrange(size // 16) for size in (rows, columns))
            result[row : row + 16, column : column + 16] = 0.0
            if plant[0] == "nan":
                result = results[RESULTS[planted["product"]]] = computed(
                    name, products, own[name], number, None
                )[RESULTS[planted["product"]]]
                result[row, column] = torch.nan
        layers.append(DumpedLayer(name, own[name] | results, 7, 0))
    te = rng.random() < 0.5 and not any(
        getattr(products, product).hadamard and getattr(products, product).hadamard.signs.startswith("per")
        for product in RESULTS
    )
    write_dumps(folder, layers, te)
    return preset, planted


def grouped(name: str, products: Products, own: dict[str, dict[str, Tensor]], seed: int) -> Tensor:
    """Return the weight gradient of one expert, whose scales were tiled with those of the others."""
    out, inside = own[name]["w"].shape
    layer = Planted(
        nn.Linear(inside, out, bias=False, device="meta"), name, Clock(seed, step=7), torch.bfloat16
    )
    layer.products = products
    made = []
    for key, slot in (("dy", "wgrad.g"), ("x", "wgrad.x")):
        layer.plant = (
            "experts",
            slot,
            random.Random(0),
            None,
            [tensors["dy" if key == "dy" else "x"].t() for tensors in own.values()],
        )
        made.append(layer.operand(own[name][key].t(), slot, products.slot(slot), products.wgrad.hadamard))
    return layer.multiply(*made, torch.bfloat16)


def row(number: int) -> dict:
    """Return what was planted in a dump and what was found."""
    with tempfile.TemporaryDirectory() as folder:
        preset, planted = dump(number, Path(folder))
        found = replay(Path(folder), PRESETS[preset](), seed=number)
    wrong = [one for one in found if one.right is False]
    if planted:
        planted["layer"] = next(
            one.layer for one in found if one.layer.replace("_", ".") == planted["layer"].replace("_", ".")
        )
    hits = [
        one for one in wrong if (one.layer, one.product) == (planted.get("layer"), planted.get("product"))
    ]
    return {
        "preset": preset,
        "planted": planted,
        "products": len(found),
        "not compared": sum(one.right is None for one in found),
        "hit": bool(hits),
        "false": [f"{one.layer} {one.product}: {one.detail}" for one in wrong if one not in hits],
    }


def main() -> None:
    """Compute the rows that are missing, and print a summary."""
    torch.set_num_threads(1)
    rows = json.loads(ROWS.read_text()) if ROWS.exists() else {}
    for number in range(40):
        if str(number) not in rows:
            rows[str(number)] = row(number)
            write(ROWS, rows)
    planted = [each for each in rows.values() if each["planted"]]
    print(
        f"{len(planted)} planted: {sum(each['hit'] for each in planted)} hits;"
        f" {sum(len(each['false']) for each in rows.values())} false alarms in"
        f" {sum(each['products'] - each['not compared'] for each in rows.values())} products"
    )
    print(Counter(each["planted"]["kind"] for each in planted))
    for number, each in rows.items():
        if each["false"] or (each["planted"] and not each["hit"]):
            print(number, each["preset"], each["planted"], each["false"][:2])


if __name__ == "__main__":
    main()
