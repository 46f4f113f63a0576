"""The kernels compiled for ARM (NEON) give every bit that they give on x86-64, under an emulator of the instructions.

`arm_driver.c` is compiled together with the kernels, statically, and run by qemu-aarch64. It needs Debian's package qemu-user, and
`pip install ziglang`, which is a dependency of the build alone.
"""

import ctypes
import importlib.util
import os
import platform
import re
import shutil
import struct
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from support.cases import every

from ablate.numerics.kernels import builds
from ablate.numerics.kernels.builds import CastArguments, Sums, Turn
from ablate.numerics.kernels.cpu import TILES
from ablate.numerics.kernels.general import described
from ablate.recipes.presets import PRESETS

ROOT = Path(__file__).parents[2]
DRIVER = Path(__file__).with_name("arm_driver.c")
SOURCES = sorted(builds.FOLDER.glob("*.c"))
specification = importlib.util.spec_from_file_location("hatch_build", ROOT / "hatch_build.py")
hatch_build = importlib.util.module_from_spec(specification)
specification.loader.exec_module(hatch_build)

has_compiler = pytest.mark.skipif(
    not importlib.util.find_spec("ziglang"), reason="there is no ziglang here: pip install ziglang"
)
emulated = [
    pytest.mark.slow,
    has_compiler,
    pytest.mark.skipif(not shutil.which("qemu-aarch64"), reason="there is no qemu-aarch64 here"),
    pytest.mark.skipif(platform.machine() != "x86_64", reason="the builds that are compared are for x86-64"),
]

Argument = torch.Tensor | ctypes.Structure | int | float


@dataclass(frozen=True)
class Call:
    """Call of a kernel: its name, and its arguments in the order of its parameters."""

    function: str
    arguments: tuple[Argument, ...]

    def of(self, kind: type | tuple[type, ...]) -> list[Argument]:
        """Return the arguments of one type."""
        return [argument for argument in self.arguments if isinstance(argument, kind)]

    @property
    def buffers(self) -> list[bytearray]:
        """Bytes of the tensors and structures, as copies."""
        return [bytearray(_bytes(argument)) for argument in self.of((torch.Tensor, ctypes.Structure))]

    def packed(self) -> bytes:
        """Return the call as arm_driver.c reads it."""
        buffers, integers, floats = self.buffers, self.of(int), self.of(float)
        head = struct.pack("<16s3i", self.function.encode(), len(buffers), len(integers), len(floats))
        numbers = struct.pack(
            f"<{len(buffers)}q{len(integers)}q{len(floats)}f", *map(len, buffers), *integers, *floats
        )
        return head + numbers + b"".join(map(bytes, buffers))

    def here(self, library: ctypes.CDLL) -> tuple[float, list[bytes]]:
        """Return the result and the buffers after the call in a build that this machine runs."""
        buffers = self.buffers
        addresses = iter((ctypes.c_char * len(buffer)).from_buffer(buffer) for buffer in buffers)
        function = getattr(library, self.function)
        plain = [
            argument if isinstance(argument, int | float) else ctypes.cast(next(addresses), kind)
            for argument, kind in zip(self.arguments, function.argtypes, strict=True)
        ]
        return float(function(*plain) or 0), [bytes(buffer) for buffer in buffers]


def _bytes(argument: torch.Tensor | ctypes.Structure) -> bytes:
    return (
        bytes(argument)
        if isinstance(argument, ctypes.Structure)
        else argument.contiguous().view(torch.uint8).numpy().tobytes()
    )


def compiled(output: Path, target: str, flags: tuple[str, ...], *sources: Path) -> Path:
    """Compile for another machine, with the build's own flags."""
    cache = str(output.parents[1] / "zig")  # shared: most of the time goes to a C library
    command = [sys.executable, "-m", "ziglang", "cc", "-Wall", "-Werror", *flags, "-target", target]
    done = subprocess.run(
        [*command, "-o", str(output), *map(str, sources)],
        env=os.environ | {"ZIG_GLOBAL_CACHE_DIR": cache, "ZIG_LOCAL_CACHE_DIR": cache},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return output


@pytest.fixture(scope="module")
def driver(tmp_path_factory) -> Path:
    """The driver with all kernels, for any ARM processor of 64 bits."""
    flags = tuple(flag for flag in hatch_build.FLAGS if flag not in ("-fPIC", "-shared"))
    folder = tmp_path_factory.mktemp("arm")
    return compiled(
        folder / "driver", "aarch64-linux-musl", (*flags, "-mcpu=baseline", "-static"), DRIVER, *SOURCES
    )


# --- calls ----------------------------------------------------------------------------------------

SHAPES = [(16, 16), (16, 48), (32, 176), (64, 512), (272, 96), (16, 1072)]
"""Rows and columns of memory, both multiples of 16; more than a strip of blocks, and odd numbers of blocks."""
REGIMES = {"ordinary": 1.0, "tiny": 1e-30, "huge": 1e30, "subnormal": 1e-40, "ties": 0.0, "not finite": 1.0}
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def drawn(shape: tuple[int, int], regime: str, dtype: torch.dtype) -> torch.Tensor:
    """Zeros of both signs, zero blocks and a wide range within one tensor."""
    g = torch.Generator().manual_seed(0)
    x = torch.randn(shape, generator=g)
    if regime == "ties":
        x = (1 + torch.randint(0, 128, shape, generator=g) / 128) * x.sign()
    else:
        x *= REGIMES[regime]
    x[torch.rand(shape, generator=g) < 0.2] *= 0.0
    x[::3] *= 1e-3
    x[:2, :16] = 0.0
    if regime == "not finite":
        x[-1, -1] = float("inf")
    return x.to(dtype)


def outputs(x: torch.Tensor, tile: tuple[int, int]) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and block scales to be written, full of a byte that no kernel writes everywhere."""
    values = torch.full(x.shape, -1, dtype=torch.int16)
    return values, torch.full((x.shape[0] // tile[0], x.shape[1] // tile[1]), -1, dtype=torch.int32)


def cast(layout: str, x: torch.Tensor, **fields: object) -> Call:
    """Call of a quantiser; `fields` are those of its structure."""
    spec = CastArguments(bound=448.0, headroom=1.0, amax=-1.0, bf16=x.dtype == torch.bfloat16)
    for name, value in fields.items():
        if name in ("key", "clock"):
            getattr(spec, name)[:] = value
        else:
            setattr(spec, name, value)
    return Call(layout, (x, *x.shape, spec, *outputs(x, TILES[layout])))


DRAWN = {"stochastic": 1, "key": (7, 2**32 - 5), "clock": (3, 1, 0xDEADBEEF)}
FORMS = {
    "nearest": {},
    "stochastic": DRAWN,
    "headroom": DRAWN | {"headroom": 17 / 16},
    "bound 256": {"bound": 256.0},
    "amax given": {"amax": 0.5},
}


def casts() -> Iterator[Call]:
    """Yield every layout, type, rounding and option on every shape and kind of data."""
    for shape in SHAPES:
        for regime in REGIMES:
            for dtype in DTYPES.values():
                x = drawn(shape, regime, dtype)
                for layout in TILES:
                    for fields in FORMS.values():
                        if layout == "tiles" and "stochastic" in fields:
                            continue
                        yield cast(layout, x, **fields)
                        if layout == "columns" and dtype == torch.bfloat16:
                            yield cast(layout, x, **fields, rotated=1, signs=0b1011_0010_0111_0001)


def general_casts() -> Iterator[Call]:
    """Yield every operand of every preset on some shapes, odd ones too, and every kind of data."""
    operands = {
        (quant, turn.size if (turn := getattr(recipe, slot.partition(".")[0]).hadamard) else 0)
        for recipe in (preset() for preset in PRESETS.values())
        for slot, quant in recipe.quantised()
    }
    for quant, rotated in sorted(operands, key=repr):
        for rows, columns in ((16, 128), (33, 256), (7, 300)):
            for regime in REGIMES:
                for dtype in DTYPES.values():
                    x = drawn((rows, columns), regime, dtype)
                    form = described(quant, rotated)
                    form.bf16, form.amax = dtype == torch.bfloat16, 2.0
                    form.key[:], form.clock[:] = DRAWN["key"], DRAWN["clock"]
                    tile = quant.tile
                    width = columns + -columns % max(16, tile[1], rotated)
                    blocks = (-(-rows // tile[0]), width // tile[1]) if quant.scale else (rows, 1)
                    values = torch.full((rows, width), -1, dtype=torch.int32 if quant.wide else torch.int16)
                    written = (values, torch.full(blocks, -1, dtype=torch.int32), torch.full((rows,), -1.0))
                    yield Call("quantize", (x, rows, columns, width, form, *written))


def others() -> Iterator[Call]:
    """Yield calls of what does not quantise: amax, rotation, decoding and the census."""
    for width in (8, 16, 24):
        key, clock = (torch.tensor(words, dtype=torch.int32) for words in ((7, -5), (3, 1, -9)))
        yield Call("random_bits", (key, clock, width, 37, torch.zeros(37 * 16)))
    for shape in SHAPES:
        for regime in REGIMES:
            for dtype in DTYPES.values():
                x = drawn(shape, regime, dtype)
                bf16 = int(dtype == torch.bfloat16)
                yield Call("amax", (x, x.numel(), bf16))
                yield Call("largest", (x, x.numel() - 5, bf16))
                yield Call("transpose_whole", (x, *shape, torch.zeros_like(x), bf16))
                for size in (4, 8, 16, 32, 64, 128) if regime != "not finite" else ():
                    signs = torch.tensor([1.0, -1.0, -1.0, 1.0]).repeat(max(4, size // 4))
                    width = shape[1] + -shape[1] % size
                    turn = Turn(size**-0.5, size, size == 32, bf16)
                    turned = torch.zeros(shape[0], width, dtype=dtype)
                    yield Call("rotate_rows", (x, *shape, width, turn, signs, turned))
                if dtype == torch.bfloat16 and regime != "not finite":
                    yield Call("turn", (x, *shape, 0b1011_0010_0111_0001, torch.zeros_like(x)))
                if regime != "not finite":
                    for layout in TILES:
                        yield from reading(x, layout)


def reading(x: torch.Tensor, layout: str) -> Iterator[Call]:
    """Yield calls that read a quantised operand, which this machine's build makes."""
    result, (_, spec, values, scales) = cast(layout, x).here(library())
    if not result:
        return
    values, scales = (torch.frombuffer(bytearray(one), dtype=torch.int16) for one in (values, scales))
    made, tile = CastArguments.from_buffer_copy(spec), TILES[layout]
    factor = float(torch.tensor(1.0) / torch.tensor(6.0 * 448.0))
    out = torch.zeros(x.shape, dtype=torch.float32)
    yield Call("decode", (values, *x.shape, scales, *tile, made.amax, factor, out))
    sums = Sums(amax=made.amax, inverse=made.inverse, factor=factor, bf16=x.dtype == torch.bfloat16)
    sums.tile_rows, sums.tile_columns = tile
    blocks = scales.numel() // 2  # int16 halves of fp32
    lengths = ((blocks, torch.float32), *((size, torch.float64) for size in (blocks, *x.shape)))
    made_here = (torch.zeros(size, dtype=dtype) for size, dtype in lengths)
    yield Call("census", (x, values, *x.shape, scales, sums, *made_here))


def library() -> ctypes.CDLL:
    """The build that this machine uses; `load` finds it once."""
    found = builds.installed_build()
    if found is None:
        pytest.skip("the package was installed without compiled quantisers")
    return found


# --- promises -------------------------------------------------------------------------------------


@pytest.fixture(params=[casts, general_casts, others], ids=["NVIDIA's forms", "other forms", "the others"])
def calls(request) -> list[Call]:
    """All calls of one kind."""
    return list(request.param())


class TestUnderAnEmulator:
    """Comparisons of the ARM build with the build of this machine."""

    pytestmark = emulated

    def test_every_bit_is_that_of_the_build_for_x86(self, driver, calls):
        """For a refused tensor only the refusal counts: it is not finite, and the reference takes it."""
        sent = b"".join(call.packed() for call in calls)
        done = subprocess.run(["qemu-aarch64", str(driver)], input=sent, capture_output=True, check=False)
        assert done.returncode == 0, done.stderr.decode()
        answer, place, different, seen = memoryview(done.stdout), 0, [], Counter()
        for number, call in enumerate(calls):
            (result,) = struct.unpack_from("<d", answer, place)
            place += 8
            theirs = []
            for buffer in call.buffers:
                theirs.append(bytes(answer[place : place + len(buffer)]))
                place += len(buffer)
            expected, mine = call.here(library())
            refused = call.function in (*TILES, "quantize") and not expected
            seen[refused] += 1
            if result != expected or (theirs != mine and not refused):
                different.append((number, call.function, result, expected))
        assert place == len(answer)
        assert different == []
        assert seen[False] > 4 * seen[True]

    def test_every_function_of_the_kernels_is_compared(self):
        """A new one needs a line in arm_driver.c and calls in this file."""
        exported = {
            name
            for source in SOURCES
            for name in re.findall(r"^(?:int|float|void) (\w+)\(", source.read_text(), re.MULTILINE)
        }
        assert {call.function for kind in (casts, general_casts, others) for call in kind()} == exported


@pytest.mark.slow
@has_compiler
@every(target=["aarch64-linux-gnu", hatch_build.MACOS])
def test_the_kernels_compile_without_a_warning(tmp_path, target):
    made = compiled(tmp_path / "kernels.so", target, (*hatch_build.FLAGS, "-mcpu=baseline"), *SOURCES)
    assert made.read_bytes()[:4] == (b"\x7fELF" if "linux" in target else b"\xcf\xfa\xed\xfe")


@every(
    machine__system=[
        ("x86_64", "Linux"),
        ("AMD64", "Windows"),
        ("aarch64", "Linux"),
        ("arm64", "Darwin"),
        ("riscv64", "Linux"),
    ]
)
def test_every_build_names_its_instructions(machine, system):
    """Without -mcpu zig compiles for the machine that builds, and the wheel ends by SIGILL on an older one."""
    levels = hatch_build.levels(machine, system)
    assert "portable" in levels
    assert all(any(flag.startswith("-mcpu=") for flag in flags) for flags in levels.values())
    assert {*levels} - {"portable"} <= {*builds.LEVELS.values()}
    assert (hatch_build.MACOS in levels["portable"]) == (system == "Darwin")
