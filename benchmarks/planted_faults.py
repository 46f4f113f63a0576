"""Plant faults that only a GPU would show, and count how many the imaginary GPU finds.

    python benchmarks/planted_faults.py --seed 34 --jobs 2

Each fault is a line inserted in a temporary copy of the package; the seed draws the kind for each place.
It is found if the counts of a preset rise above tests/golden/imaginary_gpu.json, or if a step or a run fails
or computes with a scalar on the CPU: what tests/training/test_imaginary_gpu.py checks. The presets and runs
are the few of `PRESETS` and `CASES`, not all that the test has.
"""

import argparse
import json
import os
import random
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

ROOT = Path(__file__).parents[1]
PRESETS, CASES = ("nvfp4", "mxfp4", "quartet"), ("convert", "resumed")
KINDS = {
    "scalar on the CPU": "{x} * __import__('torch').tensor(1.0)",
    ".item()": "{x}.sum().item()",
    "default device": "{x}.reshape(-1)[:1] + __import__('torch').zeros(1)",
    "copy to the host": "{x}.detach().cpu()",
    "copy from the host": "__import__('torch').tensor([1.0, 2.0]).to({x}.device)",
    "pinned copy": "__import__('torch').zeros(2).pin_memory().to({x}.device, non_blocking=True)",
    "another kernel": "{x}.clone()",
}
"""Expressions of a tensor `x`."""
PLACES = [
    ("numerics/quantize.py", "def pad(x: Tensor", "x"),
    ("numerics/quantize.py", "def _tiles(x: Tensor", "x"),
    ("numerics/scaling.py", "def block_amax(tiles", "tiles"),
    ("numerics/scaling.py", "def block_scales(largest", "largest"),
    ("numerics/scaling.py", "def round_scale(scale", "scale"),
    ("numerics/scaling.py", "def element_scales(block", "block_scale"),
    ("numerics/hadamard.py", "def butterflies(z", "z"),
    ("numerics/product.py", "def linear(x", "x"),
    ("numerics/product.py", "def _fp32(a", "a"),
    ("numerics/kernels/cuda.py", "def quantize(x", "x"),
    ("numerics/kernels/cuda.py", "def amax_both(x", "x"),
    ("numerics/kernels/cuda.py", "def scaled(", "y"),
    ("numerics/kernels/cuda.py", "def _by_rows(x", "x"),
    ("engines/nonfinite.py", "def add(self, largest", "largest"),
    ("training/distributed.py", "def clip(parameters", "parameters[0].grad"),
    ("training/loop.py", "def gradient(self", "self.parameters[0]"),
    ("training/loop.py", "def _update(self", "self.parameters[0].grad"),
    ("training/loop.py", "def _read(loss", "loss"),
    ("training/models/transformer.py", "def forward(self, x: Tensor) -> Tensor", "x"),
    ("training/cuda_arithmetic.py", "def attention(q", "q"),
]
"""File, beginning of a function, and a tensor in it."""


def planted(text: str, function: str, line: str) -> str:
    """Return a source with a line at the beginning of a function's body, after its docstring."""
    import ast

    number = next(n for n, own in enumerate(text.splitlines(), 1) if own.strip().startswith(function))
    body = next(
        node.body for node in ast.walk(ast.parse(text)) if getattr(node, "lineno", 0) == number
        and isinstance(node, ast.FunctionDef)
    )  # fmt: skip
    documented = isinstance(body[0], ast.Expr) and isinstance(body[0].value, ast.Constant)
    first = body[1 if documented else 0]
    lines = text.splitlines(keepends=True)
    lines.insert(first.lineno - 1, f"{' ' * first.col_offset}_planted = {line}\n")
    return "".join(lines)


def child(folder: Path, module: str, *names: str) -> dict:
    """Return what a module of cases prints, with the package in a folder; {} if it ends with an error."""
    code = "import json, sys; from support.imaginary_gpu import environment; print(json.dumps(environment()))"
    paths = os.pathsep.join([str(folder), str(folder / "tests")])
    base = os.environ | {"PYTHONPATH": paths}
    own = json.loads(subprocess.check_output([sys.executable, "-c", code], env=base, cwd=folder / "tests"))
    command = [sys.executable, "-W", "ignore", "-m", f"support.imaginary_gpu.{module}", *names]
    done = subprocess.run(command, env=own, cwd=folder / "tests", capture_output=True, text=True)
    return json.loads(done.stdout) if done.returncode == 0 else {}


def evidence(place: tuple[str, str, str] | None, kind: str) -> str:
    """Return how a fault is found; empty if it is not. None plants nothing."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        shutil.copytree(ROOT / "ablate", folder / "ablate")
        shutil.copytree(ROOT / "tests", folder / "tests")
        if place:
            path = folder / "ablate" / place[0]
            path.write_text(planted(path.read_text(), place[1], KINDS[kind].format(x=place[2])))
        allowed = json.loads((ROOT / "tests/golden/imaginary_gpu.json").read_text())
        steps = child(folder, "preset_cases", *PRESETS)
        for preset in PRESETS:
            if preset not in steps or "error" in steps[preset]:
                return f"{preset} fails"
            if steps[preset]["places"]["strays"]:
                return f"{preset} has a scalar on the CPU"
            for part in ("block", "rest"):
                for quantity, number in allowed[preset][part].items():
                    if steps[preset][part][quantity] > number:
                        return f"{preset} has more {quantity}"
        runs = child(folder, "workload_cases", *CASES)
        failed = [name for name in CASES if name not in runs or runs[name]["error"] or runs[name]["strays"]]
        return f"{failed[0]} fails or has a scalar on the CPU" if failed else ""


def main() -> None:
    """Plant a fault at each place, its kind drawn by the seed, and print what is found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--seed", type=int, default=34, help="random seed of the kinds")
    parser.add_argument("--jobs", type=int, default=2, help="faults at the same time")
    asked = parser.parse_args()
    draws = random.Random(asked.seed)
    kinds = [draws.choice(list(KINDS)) for _ in PLACES]
    print(f"seed {asked.seed}; without a fault: {evidence(None, '') or 'nothing is found'}", flush=True)
    found = 0
    with ThreadPoolExecutor(asked.jobs) as pool:
        for place, kind, how in zip(PLACES, kinds, pool.map(evidence, PLACES, kinds), strict=True):
            found += bool(how)
            print(f"{place[0]}, {place[1]}...: {kind}: {how or 'NOT FOUND'}", flush=True)
    print(f"{found} of {len(PLACES)} found")


if __name__ == "__main__":
    main()
