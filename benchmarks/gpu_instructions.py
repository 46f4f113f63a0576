"""SASS instructions per element of the GPU quantisers, by kernel and capability.

    python benchmarks/gpu_instructions.py > benchmarks/gpu_instructions.csv

Compiles every kernel ahead of time, without a GPU, in each configuration that autotuning tries, and counts
the instructions of its program: all but NOPs, times the threads, over the elements of a slab. The least of
the configurations is printed. The kernels have no loop, so that the program's length is what each thread
issues, except for branches that it jumps over (slow paths of divisions): the figure is an upper bound.
"""

import csv
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

os.environ["TRITON_CACHE_DIR"] = tempfile.mkdtemp()  # read when triton is imported

import triton
from triton import compile
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from ablate.numerics.kernels import cuda, nvfp4

CAPABILITIES = (90, 100, 120)
CUOBJDUMP = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
PLAIN, DRAWN = {"STOCHASTIC": False}, {"STOCHASTIC": True}
FORMS = {
    "amaxes": ("amaxes", {"signs": None}),
    "amaxes rotated": ("amaxes", {}),
    "by_rows": ("by_rows", PLAIN),
    "by_rows stochastic": ("by_rows", DRAWN),
    "by_columns": ("by_columns", PLAIN | {"signs": None}),
    "by_columns rotated": ("by_columns", PLAIN),
    "by_columns rotated stochastic": ("by_columns", DRAWN),
    "by_both": ("by_both", {"signs": None, "FIRST_STOCHASTIC": True, "SECOND_STOCHASTIC": True}),
    "by_both rotated": ("by_both", {"FIRST_STOCHASTIC": True, "SECOND_STOCHASTIC": True}),
    "by_tiles": ("by_tiles", {}),
}
"""Kernel and constant arguments, by the name of the form. `by_both` draws bits for both copies."""
POINTERS = {"values": "bf16", "scales": "fp32", "amax": "fp32", "signs": "fp32", "out": "i32"}
"""Types of the kernels' pointers but x, by the last word of the argument's name."""


def type_of(argument: str, dtype: str) -> str:
    """Return the Triton type of an argument."""
    kind = argument.rpartition("_")[2]
    if kind == "x":
        return f"*{dtype}"
    return f"*{POINTERS[kind]}" if kind in POINTERS else "fp32" if kind in ("top", "headroom") else "i32"


def instructions(form: str, dtype: str, capability: int) -> float:
    """Return the instructions per element of x of a form, in the configuration that has the least."""
    name, constants = FORMS[form]
    function = getattr(nvfp4, name).fn
    least = []
    for config in nvfp4.CONFIGS:
        columns, given = config.kwargs["COLUMNS"], constants | config.kwargs
        signature = {
            argument: "constexpr" if argument in given else type_of(argument, dtype)
            for argument in function.arg_names
        }
        aligned = [
            number
            for number, (argument, kind) in enumerate(signature.items())
            if (kind.startswith("*") and "amax" not in argument) or argument in ("rows", "columns")
        ]
        source = ASTSource(function, signature, given, {(n,): [["tt.divisibility", 16]] for n in aligned})
        options = cuda.EXACT | {"num_warps": config.num_warps}
        kernel = compile(source, target=GPUTarget("cuda", capability, 32), options=options)
        with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
            file.write(kernel.asm["cubin"])
            file.flush()
            text = subprocess.run([CUOBJDUMP, "-sass", file.name], capture_output=True, text=True, check=True)
        found = re.findall(r"/\*[0-9a-f]{4,}\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)", text.stdout)
        count = sum(name != "NOP" for name in found)
        least.append(count * config.num_warps * 32 / (16 * columns))
    return min(least)


def main() -> None:
    """Print the table."""
    out = csv.writer(sys.stdout, lineterminator="\n")
    out.writerow(["kernel", *(f"sm_{capability}" for capability in CAPABILITIES)])
    for form in FORMS:
        for dtype, suffix in (("bf16", ""), ("fp32", " fp32")):
            if "rotated" in form and suffix:
                continue  # only bf16 is rotated
            row = [f"{instructions(form, dtype, capability):.1f}" for capability in CAPABILITIES]
            out.writerow([form + suffix, *row])


if __name__ == "__main__":
    main()
