"""Compile the Triton kernels for GPUs that are not here, and count what ptxas made of them.

    python benchmarks/kernel_code.py [--json benchmarks/kernel_code.json] [capability ...]

Prints a line per kernel and compute capability: registers, spilled bytes and machine instructions (SASS) per
element, an upper bound since the slow paths of divisions count as if they were taken. The committed table is
that of the capabilities in CAPABILITIES.

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

from ablate.numerics.kernels import cuda, general_cuda
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
    elements: int = 16 * cuda.COLUMNS
    """Elements of a program."""
    warps: int = WARPS


def general(preset: str, slot: str, kernel: str = "cast") -> Build:
    """Return a build of the general kernel, or of one for its statistic, for the operand of a preset."""
    products = PRESETS[preset]().products
    quant, turn = products.slot(slot), getattr(products, slot.partition(".")[0]).hadamard
    form = general_cuda.described(quant.cast, turn.size if turn else 0)
    constants = {"FORM": form, "DOWN": slot in ("dgrad.w", "wgrad.g", "wgrad.x")}
    if kernel == "cast":
        constants |= {name: None for name, used in general_cuda.pointers(form).items() if not used}
    out = "fp32" if quant.wide else "bf16"
    return Build(
        "general_triton", kernel, constants=constants, out=out, elements=32 * 128, warps=general_cuda.WARPS
    )


BOTH = {"FIRST_STOCHASTIC": True, "SECOND_STOCHASTIC": True}
ORDER, LOWEST = {"SHIFT": 23, "WIDTH": 8}, {"SHIFT": 0, "WIDTH": 8}
ONE = {"FIRST_BY_ROW": False, "SECOND_BY_ROW": False}
DECODED = {"TILE_ROWS": 1, "TILE_COLUMNS": 16, "BY_ROW": False, "DOWN": False, "SIZE": 4096}
BUILDS = {
    "amax": Build("nvfp4", "amaxes", constants={"signs": None}),
    "amax, rotated too": Build("nvfp4", "amaxes"),
    "rows, nearest": Build("nvfp4", "by_rows", constants={"STOCHASTIC": False}),
    "rows, stochastic": Build("nvfp4", "by_rows", constants={"STOCHASTIC": True}),
    "rows, nearest, fp32": Build("nvfp4", "by_rows", "fp32", {"STOCHASTIC": False}),
    "columns, nearest": Build("nvfp4", "by_columns", constants={"STOCHASTIC": False, "signs": None}),
    "columns, stochastic, fp32": Build("nvfp4", "by_columns", "fp32", {"STOCHASTIC": True, "signs": None}),
    "columns, rotated, nearest": Build("nvfp4", "by_columns", constants={"STOCHASTIC": False}),
    "columns, rotated, stochastic": Build("nvfp4", "by_columns", constants={"STOCHASTIC": True}),
    "both, rotated, stochastic": Build("nvfp4", "by_both", constants=BOTH),
    "both, nearest": Build("nvfp4", "by_both", constants=dict.fromkeys(BOTH, False) | {"signs": None}),
    "tiles": Build("nvfp4", "by_tiles"),
    "tiles, fp32": Build("nvfp4", "by_tiles", "fp32"),
    "count": Build("order_statistic", "counted", constants=ORDER | {"signs": None}),
    "count, rotated": Build("order_statistic", "counted", constants=ORDER),
    "count, lower bits": Build("order_statistic", "counted", "fp32", LOWEST | {"signs": None}),
    "select": Build("order_statistic", "selected", constants=ORDER, elements=256),
    "scale and round": Build("result", "scaled", "fp32", ONE | {"SIZE": 4096}, elements=4096),
    **{
        f"general, {preset} {slot}": general(preset, slot)
        for preset, slot in (
            *(("fp8_current", "fprop.x"), ("mxfp8", "dgrad.w"), ("mxfp4_v4", "fprop.w")),
            *(("mxfp4_backward", "wgrad.g"), ("quartet", "fprop.x"), ("quartet2", "fprop.x")),
            *(("quartet2", "wgrad.x"), ("tetrajet2", "dgrad.g"), ("if4", "fprop.x"), ("hif4", "fprop.w")),
        )
    },
    "general, amax of rotated": general("quartet2", "wgrad.x", "turned_amaxes"),
    "general, amaxes of rows": general("row_scaled", "fprop.x", "row_amaxes"),
    "scale": Build("result", "scaled", "fp32", ONE | {"SIZE": 4096}, "fp32", 4096),
    "decode": Build("result", "decoded", "bf16", DECODED, "fp32", 4096),
}
"""Every kernel with all that it can do, and the simpler launches of usual recipes."""


def module_of(name: str) -> Any:
    """Return the file of device code."""
    from ablate.numerics.kernels import general_triton, nvfp4, order_statistic, result

    modules = (general_triton, nvfp4, order_statistic, result)
    return {module.__name__.rpartition(".")[2]: module for module in modules}[name]


def type_of(name: str, build: Build) -> str:
    """Return a kernel argument's type, as a launch finds it."""
    kind = name.rpartition("_")[2]
    if build.module == "result" and kind in ("y", "out", "first", "second"):
        return "*" + (build.out if kind == "out" else "fp32")
    pointers = {"x": build.dtype, "scales": "fp32", "amax": "fp32", "out": "i32"}
    pointers |= {"outer": "fp32", "values": build.dtype if build.module == "result" else build.out}
    pointers |= dict.fromkeys(("counts", "found", "largest"), "i32")
    return (
        f"*{pointers[kind]}"
        if kind in pointers
        else "fp32"
        if kind in ("top", "headroom", "divisor", "factor")
        else "i32"
    )


def compiled(build: Build, capability: int, options: Mapping[str, Any] = cuda.EXACT) -> Any:
    """Return a kernel compiled as cuda.py launches it, for sizes that are multiples of 16."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function = getattr(module_of(build.module), build.kernel)
    constants = dict(build.constants)
    if "COLUMNS" in function.arg_names:
        constants["COLUMNS"] = cuda.COLUMNS
    signature = {
        name: "constexpr" if name in constants else type_of(name, build) for name in function.arg_names
    }
    aligned = [
        number
        for number, (parameter, kind) in enumerate(zip(function.params, signature.values(), strict=True))
        if not parameter.do_not_specialize
        and (kind[0] == "*" or parameter.name in ("rows", "columns", "count", *("lines", "length", "width")))
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
