"""The kernel that packs operands for FP4 tensor cores: its bytes are the reference's in Triton's interpreter, and it compiles for Blackwell."""

import re
from pathlib import Path

import pytest
import torch
from support.triton_cases import run_cases

from ablate.numerics.kernels import cuda

CASES = Path(__file__).with_name("packing_kernel_cases.py")
needs_triton = pytest.mark.skipif(cuda.kernels() is None, reason="there is no Triton here")
pytestmark = [needs_triton, pytest.mark.slow]


def test_every_byte_is_the_references_in_the_interpreter():
    run_cases(CASES, TRITON_INTERPRET="1")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_every_byte_is_the_references_on_a_gpu():
    run_cases(CASES, TRITON_INTERPRET="0")


@pytest.mark.parametrize("capability", [90, 100, 120])
@pytest.mark.parametrize("e8m0", [False, True])
@pytest.mark.usefixtures("triton_cache")
def test_the_kernel_compiles_to_exact_divisions(capability, e8m0):
    """No approximate division, and none that flushes subnormals."""
    from triton import compile
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from ablate.numerics.kernels import packing

    constants = {"HAS_SCALES": True, "TALL": 16, "RATIO": 1, "LENGTH": 32 if e8m0 else 16, "E8M0": e8m0}
    constants |= {"HEIGHT": packing.ROWS, "WIDTH": packing.BLOCKS}
    pointers = {"values": "*bf16", "scales": "*fp32", "codes": "*u8", "scale_bytes": "*u8"}
    names = packing.packed.arg_names
    signature = {name: "constexpr" if name in constants else pointers.get(name, "i32") for name in names}
    source = ASTSource(packing.packed, signature, constants)
    ptx = compile(source, target=GPUTarget("cuda", capability, 32), options=cuda.EXACT).asm["ptx"]
    divisions = {*re.findall(r"\bdiv\.[\w.]+", ptx)}
    assert divisions == {"div.rn.f32"}
