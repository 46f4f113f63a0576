"""Checks of `ablate doctor`: small functions that yield rows, in the order of CHECKS.

They print nothing and repair nothing.

Expected values are independent of the code under test: published figures, known answers, a second
implementation of the definition, NumPy or double precision; of errors, what follows from bias and variance of
a rounding. All random data are drawn from a seed, so a row that fails keeps failing.
"""

import math
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor, nn

from ablate.engines import emulated
from ablate.engines.hardware import installed
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.hadamard import rotate
from ablate.numerics.kernels import builds
from ablate.numerics.philox import Clock, philox, random_bits, site
from ablate.numerics.product import alpha, product
from ablate.numerics.quantize import quantize
from ablate.numerics.rounding import nearest, stochastic
from ablate.numerics.scaling import block_scales, element_scales, encode_scale, round_scale
from ablate.numerics.spec import BlockScale, Hadamard, Outer, Quant, Range, Select
from ablate.numerics.stored import MAGNITUDES, pack, store_one, unpack
from ablate.recipes import KNOBS, PRESETS, Recipe, Turn
from ablate.recipes.recipe import Phase, Run
from ablate.training.workloads.gpt import Gpt
from ablate.verification import check_result, machine, peers
from ablate.verification.check_result import Check, Row, below, equal, near, normal, present, same
from ablate.verification.workload_checks import STEPS, Runs, first_difference

ROOM = Range(headroom=17 / 16)


def hardware() -> Iterator[Row]:
    """Describe this machine; no row is right or wrong."""
    yield from (Row(*fact) for fact in machine.facts())


def presets() -> Iterator[Row]:
    """Run every preset through two small blocks, forward and backward, on the emulated engine."""
    bad = [name for name, preset in PRESETS.items() if not _runs(preset())]
    summary = f"{len(PRESETS) - len(bad)} of {len(PRESETS)} presets"
    summary += f", not {', '.join(bad)}" * bool(bad)
    yield Row("engine emulated runs", summary, f"all {len(PRESETS)}", not bad)


class Attention(nn.Sequential):
    """Layers that recipes can name by their class."""


def _runs(recipe: Recipe) -> bool:
    blocks = nn.ModuleList(nn.Sequential(Attention(nn.Linear(32, 48)), nn.Linear(48, 32)) for _ in range(2))
    state = blocks.state_dict()
    blocks.load_state_dict(
        {name: normal(*state[name].shape) if state[name].dim() > 1 else state[name] * 0 for name in state}
    )
    emulated.convert(nn.ModuleDict({"blocks": blocks}), recipe, Clock(0)).at(0, Run(10))
    x = normal(64, 32, 1).requires_grad_()
    y = blocks[1](blocks[0](x))
    y.square().sum().backward()
    return all(bool(z.isfinite().all()) for z in (y, x.grad, *(part.grad for part in blocks.parameters())))


def ties() -> Iterator[Row]:
    """Check that halfway points are rounded to the even code, for both signs."""
    y, e2m1 = torch.tensor([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5.0]), ELEMENTS["e2m1"]
    for sign, what in ((1, "ties .25 .75 1.25 1.75 2.5 3.5 5"), (-1, "their negatives, negated")):
        yield equal(
            what, " ".join(f"{sign * v + 0.0:g}" for v in nearest(y * sign, e2m1).tolist()), "0 1 1 2 2 4 4"
        )
    beyond = torch.tensor([6.01, 7.0, 1e30, math.inf, -7.0])
    yield equal("beyond 6", " ".join(f"{v:g}" for v in nearest(beyond, e2m1).tolist()), "6 6 6 6 -6")
    least = (torch.full((64,), 2.0**-140) * 1.0).amin().item()
    yield equal("fp32 subnormals are kept", f"{least:.3g}", f"{2.0**-140:.3g}")


def grids() -> Iterator[Row]:
    """Compare casts with a search through all codes, and with torch's casts."""
    y = torch.arange(-8192, 8193) / 1024
    codes = torch.tensor(MAGNITUDES)
    odd = torch.arange(8) % 2
    distance = (y.abs().unsqueeze(1) - codes).abs() * 4096 + odd  # multiples of 4, and 1 for an odd code
    found = codes[distance.argmin(1)] * y.sign()
    yield same("E2M1 to nearest, against a search", (nearest(y, ELEMENTS["e2m1"]), found))
    scales = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16).float()
    theirs = scales.clamp(max=448).to(torch.float8_e4m3fn).float()
    yield same("E4M3 block scales, against torch", (round_scale(scales, BlockScale()), theirs))


def draws() -> Iterator[Row]:
    """Check stochastic rounding with all 256 values of 8 bits: the fraction rounded up must equal the
    position between the two neighbours, truncated to 1/256."""
    position = torch.arange(1024).unsqueeze(1) / 1024
    bits = torch.arange(256.0).expand(1024, 256)
    for low, high in ((0.0, 0.5), (2.0, 3.0), (-4.0, -6.0)):
        y = (low + position * (high - low)).expand(1024, 256)
        rounded = stochastic(y.contiguous(), ELEMENTS["e2m1"], bits, 8)
        up = torch.where((rounded == low) | (rounded == high), rounded == high, math.nan).sum(1)
        yield same(f"share rounded from {low:g} to {high:g}", (up, torch.floor(256 * position[:, 0])))


def scaling() -> Iterator[Row]:
    """Compare the scales with Transformer Engine's order of operations in NumPy, one fp32 rounding each."""
    g = torch.Generator().manual_seed(2)
    amax = (torch.randn(1 << 17, generator=g).abs() * 8).bfloat16().float().clamp(min=0.1)
    block = (amax * torch.rand(1 << 17, generator=g)).bfloat16().float()
    one, six, a, b = np.float32(1), np.float32(6), amax.numpy(), block.numpy()
    outer = np.float32(2688) / a
    scale = torch.from_numpy(b * (outer * (one / six))).clamp(max=448).to(torch.float8_e4m3fn).float()
    ours = block_scales(block, encode_scale(amax, Quant()), Quant())
    yield same("block scales, in the right order", (ours, scale))
    with np.errstate(divide="ignore"):
        factor = np.minimum(one / (scale.numpy() * (one / outer)), np.finfo(np.float32).max)
    mine = element_scales(ours, encode_scale(amax, Quant()))
    yield same("1 / (s (1 / S)) by true division", (mine, torch.from_numpy(factor)))


def awkward() -> Iterator[Row]:
    """Check zero tensors, blocks too small for their scale, and scales below E4M3's normal range."""
    zero = quantize(torch.zeros(4, 32), Quant())
    yield same("a tensor of zeros stays zero", (zero.dequantize(), torch.zeros(4, 32)))
    x = torch.cat((torch.full((1, 16), 1e-6), torch.ones(1, 16)), dim=1)
    small = quantize(x, Quant(), keep=True)
    decoded = small.dequantize()[0]
    description = f"code {present(small.codes)[0, 0]:g}, decoded {decoded[0]:g}, neighbour {decoded[16]:g}"
    yield equal("a block whose scale rounds to zero", description, "code 6, decoded 0, neighbour 1")
    steps = torch.arange(1, 8.0)
    top = torch.cat((torch.tensor([2688.0]), steps * 6 / 512)).repeat_interleave(16).view(1, -1)
    scales = present(quantize(top, Quant()).block_scale).flatten()[1:] * 512
    steps_text = " ".join(f"{v:g}" for v in scales.tolist())
    yield equal("subnormal block scales, times 2^9", steps_text, "1 2 3 4 5 6 7")
    largest = present(quantize(normal(64, 64), Quant()).block_scale).amax().item()
    yield equal("the largest block scale", f"{largest:g}", "448")
    order = torch.arange(1.0, 1001).view(10, 100).flip(1)
    percentiles = (Quant(outer=Outer(statistic=f"percentile:{p}")) for p in (0.07, 0.9985, 1.0))
    amaxes = " ".join(f"{present(quantize(order, quant).amax).item():g}" for quant in percentiles)
    yield equal("percentiles .07, .9985, 1 of 1 ... 1000", amaxes, "70 999 1000")


def nonfinite() -> Iterator[Row]:
    """Check that NaN and infinity are always detected, also when the statistic is a percentile."""
    for quant, name in ((Quant(), "amax"), (Quant(outer=Outer(statistic="percentile:0.5")), "median")):
        seen = 0
        for bad in (math.nan, math.inf, -math.inf):
            x = normal(32, 64)
            x[3, 5] = bad
            seen += not present(quantize(x, quant).largest).isfinite()
        clean = bool(present(quantize(normal(32, 64), quant).largest).isfinite())
        measured = f"{seen} of 3 seen, {'no' if clean else 'a'} false alarm"
        yield equal(f"NaN, Inf, -Inf under {name}", measured, "3 of 3 seen, no false alarm")


def kernels() -> Iterator[Row]:
    """Compare the compiled quantisers and rotations with the reference, on every operand of every preset."""
    operands = {
        (quant, getattr(recipe, slot.partition(".")[0]).hadamard)
        for recipe in (preset() for preset in PRESETS.values())
        for slot, quant in recipe.quantised()
    }
    pairs = []
    for exponent in (0, -100, 100, -130):
        x = (normal(48, 80, seed=exponent + 200) * 2.0**exponent).bfloat16()
        for quant, rotation in sorted(operands, key=repr):
            for z in (x, x.t()):
                mine = quantize(z, quant, rotation=rotation, clock=Clock(1))
                with builds.using(None):
                    theirs = quantize(z, quant, rotation=rotation, clock=Clock(1))
                pairs += [(mine.values, theirs.values), (present(mine.largest), present(theirs.largest))]
    compiled = f"compiled quantisers of {len(operands)} operands, against the reference"
    yield same(compiled if builds.build() else "no compiled quantisers: the reference, again", *pairs)


def rotations() -> Iterator[Row]:
    """Check R R^T = I, and H against its definition."""
    r, c = np.indices((16, 16))
    parity = np.vectorize(lambda n: n.bit_count() & 1)(r & c)
    plain = rotate(torch.eye(16), Hadamard(signs="none"))
    yield same("H16[r, c] = (-1)^popcount(r & c)", (4 * plain, torch.from_numpy(1 - 2 * parity)))
    exact = (Hadamard(size=4), Hadamard(size=16), Hadamard(size=64))
    inexact = (Hadamard(size=8), Hadamard(size=32), Hadamard(size=128))
    for rotations, limit in ((exact, 0.0), (inexact, 1e-6)):
        worst = 0.0
        for rotation in rotations:
            with builds.using(None):
                turn = rotate(torch.eye(rotation.size), rotation).double()
            worst = max(worst, (turn @ turn.t() - torch.eye(rotation.size)).abs().max().item())
        sizes = ", ".join(str(rotation.size) for rotation in rotations)
        yield below(f"R Rᵀ - I for {sizes} points", worst, limit, "fp32")


def copies() -> Iterator[Row]:
    """Check Q(W)^T = Q(W^T): true with 16x16 blocks, false with 1x16 blocks."""
    w = normal(512, 512).bfloat16()
    there, back = (quantize(z, Quant(block="16x16")).dequantize() for z in (w, w.t()))
    yield same("Q(W)ᵀ = Q(Wᵀ) with 16x16 blocks", (there.t(), back))
    there, back = (quantize(z, Quant()).dequantize() for z in (w, w.t()))
    error = relative_error(there.t(), back)
    yield near("Q(W)ᵀ and Q(Wᵀ) differ with 1x16, x 1e3", error, 17.0, 0.02, "the sample")


def products() -> Iterator[Row]:
    """Compare operands, alpha and the product, rounded once, with double precision."""
    x, w = (normal(192, 1024, seed).bfloat16() for seed in (3, 4))
    a, b = quantize(3 * x, Quant(), keep=True), quantize(w / 30, Quant(block="16x16"), keep=True)
    exact = [
        present(o.codes).view(o.values.shape[0], -1, 16).double() * peers.row_scales(o).unsqueeze(2).double()
        for o in (a, b)
    ]
    yield same(
        "code x scale is exact in bf16",
        *((o.values, e.flatten(1)) for o, e in zip((a, b), exact, strict=True)),
    )
    factor = present(a.amax).double().item() * present(b.amax).double().item() / (36 * 448**2)
    yield below(
        "alpha = amax amax / (36 448²), error",
        abs(present(alpha(a, b)).double().item() / factor - 1),
        2.0**-23,
        "two roundings",
    )
    y = exact[0].flatten(1) @ exact[1].flatten(1).t() * factor
    error = (product(a, b, torch.float32).double() - y).norm() / y.norm()
    yield below("product in fp32, relative error", error.item(), 1e-6, "1024 fp32 additions")
    differ = (product(a, b, torch.bfloat16) != y.to(torch.bfloat16)).double().mean().item()
    yield below("product in bf16, outputs an ulp off", differ, 1e-3, "order of additions")


KNOWN_ANSWERS = {
    "zeros": ((0,) * 4, (0,) * 2, "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    "ones": ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    "digits of pi": (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        "d16cfe09 94fdcceb 5001e420 24126ea1",
    ),
}
"""Random123's vectors of Philox4x32-10: counter, key, result."""


def known_answers() -> Iterator[Row]:
    """Compare the generator with the published vectors."""
    for name, (counter, key, expected) in KNOWN_ANSWERS.items():
        numbers = philox(torch.tensor(counter, dtype=torch.int64).view(4, 1), key).flatten().tolist()
        yield equal(f"Philox4x32-10, {name}", " ".join(f"{word:08x}" for word in numbers), expected)


def counters() -> Iterator[Row]:
    """Check that random bits depend on seed, stream, step, micro-batch and site only."""
    here, cpu = Clock(1, step=5), torch.device("cpu")
    bits = partial(random_bits, rows=64, columns=256, width=8, device=cpu)
    first = bits(here, site("blocks.0.mlp.up", "wgrad.g"))
    yield same("the same draw again", (bits(replace(here), site("blocks.0.mlp.up", "wgrad.g")), first))
    elsewhere = {
        "seed": bits(replace(here, seed=2), site("blocks.0.mlp.up", "wgrad.g")),
        "stream": bits(replace(here, stream="evaluation"), site("blocks.0.mlp.up", "wgrad.g")),
        "step": bits(replace(here, step=6), site("blocks.0.mlp.up", "wgrad.g")),
        "micro-batch": bits(replace(here, micro_batch=1), site("blocks.0.mlp.up", "wgrad.g")),
        "layer": bits(here, site("blocks.1.mlp.up", "wgrad.g")),
        "slot": bits(here, site("blocks.0.mlp.up", "dgrad.g")),
    }
    shared = max((other == first).double().mean().item() for other in elsewhere.values())
    yield near("bytes shared with another site or time", shared, 1 / 256, 0.5, "chance")
    counts = torch.bincount(first.flatten().int(), minlength=256).double()
    spread = (((counts - 64) ** 2).sum() / 64).item()
    yield near("chi² of the 256 values of a byte", spread, 255, 0.35, "4 standard deviations")


def threads() -> Iterator[Row]:
    """Check that one thread and two threads draw the same bits and round alike."""
    thread_count, x = torch.get_num_threads(), normal(512, 1024)
    quant = Quant(rounding="stochastic", range=ROOM)
    try:
        results = []
        for number in (1, 2):
            torch.set_num_threads(number)
            drawn = quantize(x, quant, rotation=Hadamard(signs="per_step"), clock=Clock(7))
            results.append(drawn.dequantize())
    finally:
        torch.set_num_threads(thread_count)
    yield same("stochastic, on 1 thread and on 2", tuple(results))


STOPS = (2, 4)
"""Steps after which the resumed runs are stopped."""


def difference_when_resumed(device: str, folder: Path, deterministic: bool = True) -> str:
    """Train a small gpt once without a stop, and twice with one. A sweep resumes what was killed, and its
    arms are compared on the promise that this changes no bit; a GPU adds its own libraries and orders of
    addition.

    Return where the first resumed run on `cpu` or `cuda` differs from the one without a stop; "" if none
    does. `folder`: an empty one for data and checkpoints; `deterministic`: the workload's field.
    """
    tokens = np.random.default_rng(1).integers(0, 64, 6000).astype(np.uint16)
    (folder / "data").mkdir()
    tokens[:5000].tofile(folder / "data" / "train.bin")
    tokens[5000:].tofile(folder / "data" / "val.bin")
    data = {name: str(folder / "data" / f"{name}.bin") for name in ("train", "val")}
    workload = Gpt.model_validate(
        {
            "data": data | {"vocab": 64},
            **{"layers": 2, "width": 128, "heads": 2, "context": 64, "batch": 4, "steps": STEPS},
            **{"eval_every": STEPS // 2, "eval_tokens": 256, "eval_batch": 4, "lr": 1e-2},
            "deterministic": deterministic,
        }
    )
    runs = Runs(workload, device, PRESETS["nvfp4"]())
    for stop in STOPS:
        (folder / str(stop)).mkdir()
        records, resumed = runs.interrupted(stop, folder / str(stop))
        if resumed != stop:
            return f"continued from step {resumed} instead of {stop}"
        if found := first_difference(runs.records(), records):
            return f"stopped after step {stop}: {found}"
    return ""


def resumed(device: str) -> Iterator[Row]:
    """Check that a trial which is stopped and resumed has the bits of one that ran through."""
    if device == "cuda" and not torch.cuda.is_available():
        return
    with tempfile.TemporaryDirectory() as folder:
        found = difference_when_resumed(device, Path(folder))
    stops = " and ".join(map(str, STOPS))
    what = f"a trial on {device}, stopped after steps {stops} and resumed"
    yield Row(what, found or "equal to the bit", "equal to the bit", not found)


def gpu_bits() -> Iterator[Row]:
    """Check that a GPU computes the same bits as the processor."""
    if not torch.cuda.is_available():
        return
    x = normal(512, 1024).bfloat16()
    cases = {
        "NVFP4 1x16": (Quant(), None),
        "NVFP4 16x16": (Quant(block="16x16"), None),
        "rotated, stochastic, with headroom": (Quant(rounding="stochastic", range=ROOM), Hadamard()),
        "Four Over Six": (four_over_six("mse"), None),
    }
    for name, (quant, turn) in cases.items():
        here, there = (quantize(z, quant, rotation=turn, clock=Clock(7)) for z in (x, x.cuda()))
        scales = here.block_scale, present(there.block_scale).cpu()
        yield same(f"{name}: processor and GPU", (here.values, there.values.cpu()), scales)


def schedules() -> Iterator[Row]:
    """Check that a phase starts exactly at its step, by the products that are quantised in each step."""
    run = Run(steps=100, tokens_per_step=512, decay=80)
    turned = KNOBS["cooldown"].paths(0.1, Turn(PRESETS["nvfp4"]()))
    cooldown = Recipe.model_validate(PRESETS["nvfp4"]().model_dump() | dict(turned)).schedule[0].start
    starts = {"step:30": 30, "tokens:4096": 8, "fraction:0.07": 7, "fraction:0.29": 29, "decay": 80}
    starts[cooldown] = 90
    for start, step in starts.items():
        recipe = PRESETS["nvfp4"]().model_copy(update={"schedule": (Phase(start=start),)})
        plain = [n for n in range(run.steps) if recipe.at(n, run).plain]
        phase = f"{min(plain, default='never')} to {max(plain, default='never')}, {len(plain)} steps"
        yield equal(f"bf16 from {start} of 100 steps", phase, f"{step} to 99, {100 - step} steps")


def stored() -> Iterator[Row]:
    """Check packing to four bits per code, and unpacking."""
    every = torch.tensor([sign * m for sign in (1.0, -1.0) for m in MAGNITUDES]).view(1, 16)
    yield equal("the 16 codes, packed", bytes(pack(every)[0].tolist()).hex(" "), "10 32 54 76 98 ba dc fe")
    yield same("unpacked again", (unpack(pack(every)), every))
    x = normal(128, 256).bfloat16()
    quant, rotation, clock = Quant(rounding="stochastic"), Hadamard(), Clock(3)
    row, column = store_one(x, Quant()), store_one(x.t(), quant, rotation=rotation, clock=clock, where=2)
    turned = quantize(x.t(), quant, rotation=rotation, clock=clock, where=2)
    pairs = [(row, quantize(x, Quant())), (column, turned)]
    both = ((packed.operand().dequantize(), made.dequantize()) for packed, made in pairs)
    yield same("both copies, packed and unpacked", *both)
    yield equal("bits an element of one copy", f"{8 * row.nbytes / x.numel():.3f}", "4.501")


def four_over_six(criterion: str) -> Quant:
    """Return the Four Over Six quantiser; its bound of 256 leaves headroom for the smaller scale."""
    return Quant(select=Select(among="scales", criterion=criterion), outer=Outer(bound=256.0))


FIGURES = {
    "NVFP4 1x16, to nearest": (Quant(), 9.05, 0.01),
    "NVFP4 16x16, to nearest": (Quant(block="16x16"), 12.39, 0.01),
    "NVFP4, stochastic, headroom 17/16": (Quant(rounding="stochastic", range=ROOM), 23.5, 0.01),
    "NVFP4, stochastic, no headroom": (Quant(rounding="stochastic"), 18.8, 0.01),
    "MXFP4 1x32, floor": (peers.mx("e2m1", "floor"), 13.2, 0.01),
    "MXFP4 1x32, ceil": (peers.mx("e2m1", "ceil"), 13.3, 0.01),
    "NVINT4 1x16": (Quant(element="int4"), 7.45, 0.01),
    "Four Over Six MSE, bound 256": (four_over_six("mse"), 7.57, 0.01),
    "Four Over Six MAE, bound 256": (four_over_six("mae"), 7.80, 0.01),
    "MS-EDEN, rotated by 128": (Quant(rounding="ms_eden", outer=Outer(bound=256.0)), 9.72, 0.02),
    "the best block scale, by search": (Quant(select=Select(among="search")), 6.60, 0.03),
}
"""Quantiser, its relative mean squared error in thousandths, and the tolerance at 4 million elements."""


def relative_error(x: Tensor, estimate: Tensor) -> float:
    """Return the sum of squared errors over the sum of squares, in thousandths."""
    return 1000 * ((estimate - x).double().square().sum() / x.double().square().sum()).item()


def figures(side: int, slack: float) -> Iterator[Row]:
    """Measure the error of each quantiser on `side` x `side` normal numbers; `slack` widens the tolerance."""
    x = normal(side, side)
    for name, (quant, figure, tolerance) in FIGURES.items():
        turn = Hadamard(size=128, signs="per_step") if quant.rounding == "ms_eden" else None
        operand = quantize(x, quant, rotation=turn, clock=Clock(0), keep=turn is not None)
        error = relative_error(x if turn is None else present(operand.source), operand.dequantize())
        yield near(name, error, figure, tolerance + slack)
    operand = quantize(x, Quant(), keep=True)
    above = (present(operand.scaled).abs().view(-1, 16).amax(1) > 6).double().mean().item()
    yield near("blocks above 6 x scale, percent", 100 * above, 50.9, 0.01 + slack)


MEANS = {1: 23.4, 4: 5.87, 16: 1.47, 64: 0.367, 256: 0.092}
"""Error, in thousandths, of the mean of N independent stochastic roundings with headroom; it falls as 1/N."""


def errors_of_means(quant: Quant, x: Tensor, most: int) -> dict[int, float]:
    """Return the error of the mean of N draws, for the N of MEANS up to `most`."""
    total, errors = torch.zeros_like(x), {}
    for n in range(1, most + 1):
        total += quantize(x, quant, clock=Clock(1, step=n)).dequantize()
        if n in MEANS:
            errors[n] = relative_error(x, total / n)
    return errors


def unbiased(rows: int, most: int, tolerance: float) -> Iterator[Row]:
    """Check that stochastic rounding with headroom is unbiased: errors of means of N draws fall as 1/N."""
    x = normal(rows, 1024)
    errors = errors_of_means(Quant(rounding="stochastic", bits=24, range=ROOM), x, most)
    for n, error in errors.items():
        yield near(f"mean of {n} draws, 24 bits", error, MEANS[n], tolerance)
    slope = np.polyfit(np.log(list(errors)), np.log(list(errors.values())), 1)[0]
    yield near("slope of log error over log N", slope, -1, 0.01)


def biased() -> Iterator[Row]:
    """Measure two causes that keep a mean from converging: 8 random bits truncate, and no headroom clips."""
    x = normal(256, 1024)
    truncated = errors_of_means(Quant(rounding="stochastic", range=ROOM), x, 256)[256]
    yield near("mean of 256 draws, 8 bits", truncated, 0.092, 0.04, "truncation")
    stalled = errors_of_means(Quant(rounding="stochastic", bits=24), x, 256)[256]
    yield near("mean of 256 draws, no headroom, stalls", stalled, 0.173, 0.04, "the sample")


ORACLE = {"transformer_engine": "2.20.2"}
"""Package, and its version, that the numerics follow bit for bit. The fast run compares with no other."""
MOVED = (ImportError, AttributeError, KeyError, TypeError)
"""Errors that mean that a package's interface has changed since this comparison was written."""


def against(peer: str) -> Iterator[Row]:
    """Compare with a public implementation, in what it computes alike, if it is installed."""
    if installed(peer) is None:
        exact = f"=={ORACLE[peer]}" if peer in ORACLE else ""
        yield Row(peer, "not installed", f"pip install {peer}{exact}")
        return
    try:
        yield from list(peers.PEERS[peer]())
    except MOVED as error:
        yield Row("compared", "nothing", f"its interface has moved: {type(error).__name__}: {error}")


def against_oracle(peer: str) -> Iterator[Row]:
    """Compare as `against` does, if the installed version is the one that the numerics follow."""
    if installed(peer) == ORACLE[peer]:
        yield from against(peer)


def heading(peer: str) -> str:
    """Return the heading of a comparison: the name of the package and its version."""
    version = installed(peer)
    return f"Against {peer} {version}" if version else "Public implementations that are not installed"


MACHINE, ROUNDING, SCALING = "This machine", "Formats and rounding", "Two-level scaling"
ROTATION, RANDOM, TIME = "Rotation and products", "Randomness", "Schedules and stored tensors"
ERRORS = "Relative squared error on 4 million standard normal numbers, x 1e3"
FEW = "Relative squared error on 262,144 standard normal numbers, x 1e3 (so few move it by 1.5 %)"
MEAN = "Stochastic rounding: squared error of the mean of N draws, x 1e3"

CHECKS = (
    Check(MACHINE, hardware),
    Check(MACHINE, presets),
    Check(ROUNDING, ties),
    Check(ROUNDING, grids),
    Check(ROUNDING, draws),
    Check(SCALING, scaling),
    Check(SCALING, awkward),
    Check(SCALING, nonfinite),
    Check(SCALING, kernels),
    Check(ROTATION, rotations),
    Check(ROTATION, copies),
    Check(ROTATION, products),
    Check(RANDOM, known_answers),
    Check(RANDOM, counters),
    Check(RANDOM, threads),
    Check(RANDOM, gpu_bits, only="full"),
    Check(TIME, schedules),
    Check(TIME, stored),
    Check(TIME, partial(resumed, "cpu"), only="full", title="resumed trial on cpu"),
    Check(TIME, partial(resumed, "cuda"), title="resumed trial on cuda"),
    Check(ERRORS, partial(figures, 2048, 0.0), only="full"),
    Check(FEW, partial(figures, 512, 0.015), only="fast"),
    Check(MEAN, partial(unbiased, 256, 256, 0.03), only="full"),
    Check(MEAN, partial(unbiased, 64, 16, 0.03), only="fast"),
    Check(MEAN, biased, only="full"),
    *(Check(heading(peer), partial(against, peer), only="full") for peer in peers.PEERS),
    *(Check(heading(peer), partial(against_oracle, peer), only="fast") for peer in ORACLE),
)


def by_group(fast: bool, show: Callable[[str], object] | None = None) -> Iterator[tuple[str, list[Row]]]:
    # One thread, as in a trial. A second one gains little, and on a busy machine it waits for its core.
    torch.set_num_threads(1)
    checks = [check for check in CHECKS if check.only != ("full" if fast else "fast")]
    for group, pairs in check_result.by_group(checks, show):
        yield group, [row for _, row in pairs]
