"""Compile the Triton kernels for GPUs that are not here, and count what ptxas made of them.

    python benchmarks/kernel_code.py [--json benchmarks/kernel_code.json] [capability ...]

Prints a line per kernel and compute capability: registers, spilled bytes and machine instructions (SASS) per
element, an upper bound since the slow paths of divisions count as if they were taken. The committed table has
the targets of gpu_estimates.py: `kernel_code.py --json benchmarks/kernel_code.json sm_90a sm_100a sm_120a`.

tests/numerics/test_cuda_kernels.py uses the same builds, and checks the instructions.
"""

import argparse
import json
import re
import subprocess
import tempfile
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from ablate.numerics import on_gpu
from ablate.numerics.kernels import cuda, general_cuda
from ablate.numerics.spec import Quant
from ablate.numerics.transform import CHANNEL_FORMATS
from ablate.recipes import PRESETS

CAPABILITIES = {"sm_80": 80, "sm_86": 86, "sm_89": 89, "sm_90a": 90, "sm_100a": 100, "sm_120a": 120}
"""Targets, and Triton's numbers of them."""
WARPS = 4


class Build(NamedTuple):
    """A kernel with the constants and types of one kind of launch."""

    module: str
    kernel: str
    dtype: str = "bf16"
    constants: Mapping[str, Any] = MappingProxyType({})
    out: str = "bf16"
    elements: int = 4096
    """Elements of a program."""
    warps: int = WARPS


Copy = tuple[Quant, int]
"""Form of a copy, and the size of its rotation."""


def copies(first: Copy | None, other: Copy | None = None, dtype: str = "bf16", kernel: str = "cast") -> Build:
    """Return a build of the quantiser for a copy along the rows of memory, one along its columns, or both."""
    forms = [copy and general_cuda.described(*copy, down) for copy, down in ((first, False), (other, True))]
    constants: dict[str, Any] = {"FIRST": forms[0], "OTHER": forms[1]}
    constants |= {"place": None} if kernel == "cast" else {}
    for prefix, form in zip(("", "other_"), forms, strict=True) if kernel == "cast" else ():
        used = form and general_cuda.pointers(form)
        constants |= {prefix + name: None for name in POINTERS if not (used and used.get(name, True))}
    wide = any(copy and copy[0].wide for copy in (first, other))
    return Build(
        "general_triton",
        kernel,
        dtype,
        constants,
        "fp32" if wide else "bf16",
        warps=general_cuda.warps(forms),
    )


def operand(preset: str, slot: str, both: str | None = None) -> Build:
    """Return a build of the quantiser for an operand of a preset, or for both copies of a tensor."""
    products = PRESETS[preset]().products

    def copy(slot: str) -> Copy:
        quant, turn = products.slot(slot), getattr(products, slot.partition(".")[0]).hadamard
        return quant.cast, turn.size if turn else 0

    if both is not None:
        return copies(copy(slot), copy(both))
    down = slot in ("dgrad.w", "wgrad.g", "wgrad.x")
    return copies(None, copy(slot)) if down else copies(copy(slot))


def apart(slot: str) -> Build:
    """Return the build that quantises some channels of tetrajet2's x apart from the others."""
    build = operand("tetrajet2", slot)
    copy = build.constants["OTHER"] or build.constants["FIRST"]
    quants = PRESETS["tetrajet2"]().products.slot(slot).cast, CHANNEL_FORMATS["mxfp8"]
    forms = [
        general_cuda.described(quant, copy.turn, copy.down, few)
        for quant, few in zip(quants, on_gpu.FEW, strict=True)
    ]
    constants = dict.fromkeys(("outer", "other_outer", "other_scales"))
    constants |= {"FIRST": forms[0], "OTHER": forms[1]}
    return build._replace(dtype="fp32" if copy.down else "bf16", constants=constants)


def parts(kernel: str, build: Build) -> Build:
    """Return the build of a kernel of parts_triton.py whose constants are those of a whole matrix's."""
    constants = {name: value for name, value in build.constants.items() if name != "place"}
    return build._replace(module="parts_triton", kernel=kernel, constants=constants)


NEAREST, STOCHASTIC, TILES = Quant(), Quant(rounding="stochastic"), Quant(block="16x16")
POINTERS = ("values", "scales", "outer", "largest")
ORDER, LOWEST = {"SHIFT": 23, "WIDTH": 8}, {"SHIFT": 0, "WIDTH": 8}
BY_ROW = dict.fromkeys(
    [f"{base}{name}_BY_ROW" for base in ("", "BASE_") for name in ("FIRST", "SECOND")], False
)
SUM = BY_ROW | dict.fromkeys(("ALONG", "side", "slope", "spots")) | {"ROUNDS": True, "SIZE": 4096}
ONE = SUM | dict.fromkeys(("base", "base_first", "base_second"))
PARTED = {"BY_ROW": False, "SIZE": 4096}
TURN = {"FORM": general_cuda.described(NEAREST, 32, False)}
DECODED = {"TILE_ROWS": 1, "TILE_COLUMNS": 16, "BY_ROW": False, "DOWN": False, "SIZE": 4096}
BUILDS = {
    "amax": copies(None, kernel="amaxes"),
    "amax, rotated too": copies(None, (NEAREST, 16), kernel="amaxes"),
    "rows, nearest": copies((NEAREST, 0)),
    "rows, stochastic": copies((STOCHASTIC, 0)),
    "rows, nearest, fp32": copies((NEAREST, 0), dtype="fp32"),
    "columns, nearest": copies(None, (NEAREST, 0)),
    "columns, stochastic, fp32": copies(None, (STOCHASTIC, 0), "fp32"),
    "columns, rotated, nearest": copies(None, (NEAREST, 16)),
    "columns, rotated, stochastic": copies(None, (STOCHASTIC, 16)),
    "both, rotated, stochastic": copies((STOCHASTIC, 0), (STOCHASTIC, 16)),
    "both, nearest": copies((NEAREST, 0), (NEAREST, 0)),
    "tiles": copies((TILES, 0)),
    "tiles, fp32": copies((TILES, 0), dtype="fp32"),
    "tiles, rounded to bf16": copies((TILES, 0), dtype="i32"),
    "both, rotated, rounded to bf16": copies((NEAREST, 16), (NEAREST, 16), "i32"),
    "amax, rounded to bf16": copies(None, dtype="i32", kernel="amaxes"),
    "count": Build("order_statistic", "counted", constants=ORDER | {"signs": None}),
    "count, rotated": Build("order_statistic", "counted", constants=ORDER),
    "count, lower bits": Build("order_statistic", "counted", "fp32", LOWEST | {"signs": None}),
    "scale and round": Build("result", "scaled", "fp32", ONE),
    "scale, add and round": Build("result", "scaled", "fp32", SUM),
    "scale, round and multiply by slopes": Build(
        "result", "scaled", "fp32", {name: one for name, one in ONE.items() if name != "slope"}
    ),
    **{
        f"general, {preset} {slot}": operand(preset, slot)
        for preset, slot in (
            *(("fp8_current", "fprop.x"), ("mxfp8", "dgrad.w"), ("mxfp4_v4", "fprop.w")),
            *(("mxfp4_backward", "wgrad.g"), ("quartet", "fprop.x"), ("quartet2", "fprop.x")),
            *(("quartet2", "wgrad.x"), ("tetrajet2", "dgrad.g"), ("if4", "fprop.x"), ("hif4", "fprop.w")),
            ("four_over_six", "dgrad.w"),
        )
    },
    "general, quartet2 g": operand("quartet2", "dgrad.g", "wgrad.g"),
    "channels apart, rows": apart("fprop.x"),
    "channels apart, columns, rotated": apart("wgrad.x"),
    "general, amaxes of rows": Build(
        "general_triton",
        "row_amaxes",
        warps=4,
        constants={"FORM": operand("row_scaled", "fprop.x").constants["FIRST"]},
    ),
    "general, rotation": Build(
        "general_triton",
        "turn",
        warps=8,
        constants=TURN | {"BACK": False, "factor": None},
    ),
    "general, rotation there and back": Build(
        "general_triton", "turn", warps=8, constants=TURN | {"BACK": True}
    ),
    "general, amax of rotated": copies(None, (PRESETS["quartet2"]().products.wgrad.x, 128), kernel="amaxes"),
    "scale": Build("result", "scaled", "fp32", ONE | {"ROUNDS": False}, "fp32"),
    "scale and add": Build("result", "scaled", "fp32", SUM | {"ROUNDS": False}, "fp32"),
    "part, beyond a limit": Build("result", "parted", constants=PARTED | {"means": None}),
    "part, means": Build("result", "parted", constants=PARTED | {"limit": None}),
    "parts, amaxes": parts("amaxes_of_parts", copies(None, (NEAREST, 16), kernel="amaxes")),
    "parts, both": parts("cast_parts", copies((STOCHASTIC, 0), (STOCHASTIC, 16))),
    "parts, amaxes of rows": parts(
        "row_amaxes_of_parts",
        Build("", "", constants={"COPY": 0, "FORM": operand("row_scaled", "fprop.x").constants["FIRST"]}),
    ),
    "squares": Build("result", "squared", constants={"SIZE": 4096}, out="fp32"),
    "places": Build("result", "placed", constants={"SIZE": 128}, elements=128),
    "remember": Build("result", "remembered", "fp32", {"STEPS": 1024, "SIZE": 1024}, "fp32", 1024),
    "slope": Build(
        "slopes",
        "rescaled",
        "fp32",
        {"FORM": operand("quartet", "fprop.w").constants["FIRST"], "ESTIMATOR": "clip_mask", "outer": None},
        "fp32",
    ),
    "decode": Build("result", "decoded", "bf16", DECODED, "fp32"),
}
"""Every kernel with all that it can do, and the simpler launches of usual recipes."""


def module_of(name: str) -> Any:
    """Return the file of device code."""
    from ablate.numerics.kernels import general_triton, order_statistic, parts_triton, result, slopes

    modules = (general_triton, order_statistic, parts_triton, result, slopes)
    return {module.__name__.rpartition(".")[2]: module for module in modules}[name]


def type_of(name: str, build: Build) -> str:
    """Return a kernel argument's type, as a launch finds it."""
    kind = name.removeprefix("other_").rpartition("_")[2]
    if kind == "out" and build.module == "result":
        return "*" + build.out
    numbers = ["y", "base", "first", "second", "current", "past", "entry", "before"]
    numbers += ["side", "slope", "rest", "means"]
    numbers += ["limit"] * (build.kernel == "parted")
    numbers += {"turn": ["factor"], "rescaled": ["out"]}.get(build.kernel, [])
    if kind in numbers:
        return "*fp32"
    pointers = {"x": build.dtype, "part": build.out, "scales": "fp32", "amax": "fp32", "out": "i32"}
    pointers |= {"outer": "fp32", "values": build.dtype if build.module == "result" else build.out}
    pointers |= dict.fromkeys(("counts", "ended", "found", "largest", "table", "place", "spots"), "i32")
    pointers |= dict.fromkeys(("chosen", "kept"), "i64")
    return (
        f"*{pointers[kind]}"
        if kind in pointers
        else "fp32"
        if kind in ("top", "headroom", "divisor", "factor", "limit")
        else "i32"
    )


def compiled(build: Build, capability: int, options: Mapping[str, Any] = cuda.EXACT) -> Any:
    """Return a kernel compiled as cuda.py launches it, for sizes that are multiples of 16."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(module_of(build.module), build.kernel)
    constants = dict(build.constants)
    signature = {
        name: "constexpr" if name in constants else type_of(name, build) for name in function.arg_names
    }
    sizes = ("rows", "columns", "count", "length", "width")
    aligned = [
        number
        for number, parameter in enumerate(function.params)
        if not parameter.do_not_specialize
        and (signature[parameter.name][0] == "*" or parameter.name.removeprefix("other_") in sizes)
    ]
    source = ASTSource(function, signature, constants, {(n,): [["tt.divisibility", 16]] for n in aligned})
    return compile(
        source, target=GPUTarget("cuda", capability, 32), options=dict(options) | {"num_warps": build.warps}
    )


class Code(NamedTuple):
    """Machine code of a kernel, by ptxas."""

    instructions: Counter[str]
    registers: int
    stack: int
    """Bytes of local memory a thread: those of spilled registers."""


def machine_code(kernel: Any) -> Code:
    """Return the machine instructions of a kernel, by cuobjdump, which comes with Triton."""
    import triton

    tool = Path(triton.__file__).parent / "backends/nvidia/bin/cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(kernel.asm["cubin"])
        file.flush()
        sass, usage = (
            subprocess.run([tool, option, file.name], capture_output=True, text=True, check=True)
            for option in ("-sass", "-res-usage")
        )
    pattern = r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)"
    found = Counter(re.findall(pattern, sass.stdout))
    del found["NOP"]
    registers, stack = (
        int(re.search(rf"{word}:(\d+)", usage.stdout + usage.stderr)[1]) for word in ("REG", "STACK")
    )
    return Code(found, registers, stack)


def row(name: str, target: str) -> dict[str, Any]:
    """Return a line of the table."""
    build = BUILDS[name]
    code = machine_code(compiled(build, CAPABILITIES[target]))
    per_element = code.instructions.total() * build.warps * 32 / build.elements
    return {
        "kernel": name,
        "target": target,
        "instructions per element": round(per_element, 1),
        "registers": code.registers,
        "spilled bytes": code.stack,
    }


def main() -> None:
    """Print the table, and write it if asked to."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("targets", nargs="*", default=list(CAPABILITIES), help="such as sm_90a")
    parser.add_argument("--json", type=Path, help="file to write the table to")
    options = parser.parse_args()
    rows = []
    for target in options.targets:
        for name in BUILDS:
            rows.append(row(name, target))
            print(*rows[-1].values(), sep="\t", flush=True)
    if options.json:
        options.json.write_text("[\n" + ",\n".join(f"  {json.dumps(one)}" for one in rows) + "\n]\n")


if __name__ == "__main__":
    main()
