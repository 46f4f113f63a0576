"""CUDA quantisers: in Triton's interpreter they equal the reference bit for bit, and for every GPU they compile to exact arithmetic."""

import itertools
import os
import re
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
import torch

from ablate.numerics.kernels import cuda
from ablate.numerics.spec import Quant

CASES = Path(__file__).with_name("cuda_kernel_cases.py")

needs_triton = pytest.mark.skipif(cuda.kernels() is None, reason="there is no Triton here")


def run_cases(**environment: str) -> None:
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:xdist", "-p", "no:cacheprovider", str(CASES)]
    result = subprocess.run(
        command, env=os.environ | environment, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stdout + result.stderr


@needs_triton
@pytest.mark.slow
def test_every_bit_is_the_references_in_the_interpreter():
    run_cases(TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_every_bit_is_the_references_on_a_gpu():
    run_cases(TRITON_INTERPRET="0")


# --- ahead of time, for GPUs that are not here ----------------------------------------------------

BUILDS = {
    "amaxes": ("amaxes", "bf16", {}),
    "rows": ("by_rows", "bf16", {"STOCHASTIC": True}),
    "columns": ("by_columns", "bf16", {"STOCHASTIC": True}),
    "both": ("by_both", "bf16", {"FIRST_STOCHASTIC": True, "SECOND_STOCHASTIC": True}),
    "tiles": ("by_tiles", "bf16", {}),
}
"""Every kernel with all that it can do: rotated, stochastic."""
SIMPLER = {
    "amaxes, not rotated": ("amaxes", "fp32", {"signs": None}),
    "rows, nearest": ("by_rows", "fp32", {"STOCHASTIC": False}),
    "columns, nearest, rotated": ("by_columns", "bf16", {"STOCHASTIC": False}),
    "columns, stochastic, not rotated": (
        "by_columns",
        "fp32",
        {"STOCHASTIC": True, "signs": None},
    ),
    "both, nearest, not rotated": (
        "by_both",
        "fp32",
        {"FIRST_STOCHASTIC": False, "SECOND_STOCHASTIC": False, "signs": None},
    ),
    "tiles, fp32": ("by_tiles", "fp32", {}),
}
CAPABILITIES = {"sm_80": 80, "sm_90a": 90, "sm_100a": 100, "sm_120a": 120}


def type_of(name: str, dtype: str) -> str:
    """A kernel argument's type, as a launch would find it."""
    kind = name.rpartition("_")[2]
    pointers = {"x": dtype, "values": "bf16", "scales": "fp32", "amax": "fp32", "out": "i32"}
    return f"*{pointers[kind]}" if kind in pointers else "fp32" if kind in ("top", "headroom") else "i32"


def compiled(kernel: str, dtype: str, constants: dict, capability: int):
    """One kernel compiled as cuda.py launches it, for columns that are a multiple of 16."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    function, constants = getattr(cuda.kernels(), kernel), {"COLUMNS": cuda.COLUMNS} | constants
    signature = {
        name: "constexpr" if name in constants else type_of(name, dtype) for name in function.arg_names
    }
    aligned = [
        n
        for n, (name, kind) in enumerate(signature.items())
        if (kind[0] == "*" and "amax" not in name) or name in ("rows", "columns")
    ]
    source = ASTSource(function, signature, constants, {(n,): [["tt.divisibility", 16]] for n in aligned})
    return compile(source, target=GPUTarget("cuda", capability, 32), options=cuda.EXACT)


def instructions(ptx: str) -> Counter:
    return Counter(re.findall(r"^\s+(?:@!?%\w+ )?([a-z]\w*(?:[.:]+\w+)*)\s", ptx, re.MULTILINE))


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("build", "target"),
    [
        *itertools.product(BUILDS, ["sm_80", "sm_100a"]),  # the oldest, and the first with f32x2 instructions
        *itertools.product(SIMPLER, ["sm_90a"]),
        ("both", "sm_120a"),
    ],
)
def test_a_kernel_compiles_to_exact_arithmetic(build, target, tmp_path, monkeypatch):
    """PTX contracts only a multiplication and an addition that name no rounding; ptxas then keeps each as it is written."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernel = compiled(*(BUILDS | SIMPLER)[build], CAPABILITIES[target])
    assert kernel.asm["cubin"][:4] == b"\x7fELF"
    assert f".target {target}\n" in kernel.asm["ptx"]
    found = instructions(kernel.asm["ptx"])
    floats = {
        name
        for name in found
        if re.search(r"\.f32(x2)?$", name) and re.match(r"add|sub|mul|div|fma|mad|rcp|ex2|sqrt|rsqrt", name)
    }
    assert not {
        name for name in floats if not re.fullmatch(r"(add|sub|mul)\.rn\.f32(x2)?|div\.rn\.f32", name)
    }
    assert ("div.rn.f32" in found) == ("amaxes" not in build)
    assert not [name for name in found if "ftz" in name]
    # Held in registers, sixteen rows need no exchange between threads: what goes through shared memory is a scale or a maximum.
    assert found["bar.sync"] <= 6


@needs_triton
def test_contraction_would_be_seen(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda, "EXACT", {"enable_fp_fusion": True})
    found = instructions(compiled(*SIMPLER["rows, nearest"], 90).asm["ptx"])
    assert found["fma.rn.f32"]
    assert not found["add.rn.f32"]


@needs_triton
def test_a_triton_that_cannot_be_exact_is_as_good_as_none(monkeypatch):
    monkeypatch.setattr(cuda, "EXACT", cuda.EXACT | {"an option of a later Triton": True})
    assert cuda.kernels.__wrapped__() is None


@needs_triton
@pytest.mark.parametrize("name", ["by_rows", "by_columns", "by_both"])
def test_one_build_serves_every_step_and_every_layer(name):
    """Triton compiles anew for an integer that is 1 or a multiple of 16, or has another type, unless it is told not to."""
    parameters = {parameter.name: parameter for parameter in getattr(cuda.kernels(), name).params}
    changing = [p for p in parameters if p.rpartition("_")[2] in ("key0", "key1", "step", "batch", "where")]
    assert len(changing) >= 5
    assert all(parameters[p].do_not_specialize for p in changing)
    assert [cuda.signed_word(n) for n in (0, 1, 2**31 - 1, 2**31, 2**32 - 1, 2**32)] == [
        0,
        1,
        2**31 - 1,
        -(2**31),
        -1,
        0,
    ]


# --- without Triton, without a GPU ----------------------------------------------------------------


@pytest.mark.slow
def test_the_package_needs_no_triton():
    """And where there is one, it is not imported before a GPU needs it: so it may be hidden after the import."""
    code = (
        "import sys; import ablate.numerics.quantize, ablate.numerics.kernels.cuda as cuda\n"
        "print('triton' in sys.modules)\n"
        "sys.modules['triton'] = None\n"
        "print(cuda.kernels())"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert result.stdout.splitlines() == ["False", "None"], result.stderr


def test_a_cpu_tensor_is_not_theirs():
    assert not cuda.can_quantize(torch.ones(16, 32), Quant())
    assert not cuda.can_order(torch.ones(16, 32))
    assert not cuda.can_quantize_both(torch.ones(16, 32), Quant(), Quant(), None)
