"""CUDA quantisers: in Triton's interpreter they equal the reference bit for bit, and for every GPU they compile to exact arithmetic."""

import itertools
import os
import re
import subprocess
import sys
import sysconfig
from collections import Counter
from pathlib import Path

import pytest
import torch
from support.cases import dealt
from support.triton_cases import run_cases

from ablate.numerics import gpu_sums
from ablate.numerics.census import reference
from ablate.numerics.formats import ELEMENTS
from ablate.numerics.hadamard import butterflies
from ablate.numerics.kernels import cuda
from ablate.numerics.kernels.launch_errors import reason
from ablate.numerics.quantize import Operand, pad, quantize
from ablate.numerics.spec import Quant

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))
from kernel_code import BUILDS, CAPABILITIES, compiled, machine_code

CASES = Path(__file__).with_name("cuda_kernel_cases.py")

needs_triton = pytest.mark.skipif(cuda.kernels() is None, reason="there is no Triton here")


@needs_triton
@pytest.mark.slow
def test_every_bit_is_the_references_in_the_interpreter():
    run_cases(CASES, TRITON_INTERPRET="1")


@needs_triton
@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here")
def test_every_bit_is_the_references_on_a_gpu():
    run_cases(CASES, TRITON_INTERPRET="0")


# --- ahead of time, for GPUs that are not here ----------------------------------------------------

MOST = "both, rotated, stochastic"
"""The kernel with most instructions and registers."""
TARGETS = [*CAPABILITIES]


def instructions(ptx: str) -> Counter:
    return Counter(re.findall(r"^\s+(?:@!?%\w+ )?([a-z]\w*(?:[.:]+\w+)*)\s", ptx, re.MULTILINE))


@pytest.mark.slow
@needs_triton
@pytest.mark.parametrize(
    ("name", "target"),
    dealt(
        [
            *((name, TARGETS[number % len(TARGETS)]) for number, name in enumerate(BUILDS)),
            *itertools.product(
                [MOST], ["sm_80", "sm_100a", "sm_120a"]
            ),  # 100: the first with f32x2 instructions
        ],
        0,
        3,
    ),
)
@pytest.mark.usefixtures("triton_cache")
def test_a_kernel_compiles_to_exact_arithmetic(name, target):
    """PTX contracts only a multiplication and an addition that name no rounding; ptxas then keeps each as it is
    written.

    In machine code a division is a sequence with one FCHK, an approximate reciprocal and five fused additions
    that correct it, and a subroutine for its rare operands, which all divisions share: 9 more of them.
    """
    kernel = compiled(BUILDS[name], CAPABILITIES[target])
    assert f".target {target}\n" in kernel.asm["ptx"]
    found = instructions(kernel.asm["ptx"])
    floats = {
        name
        for name in found
        if re.search(r"\.f32(x2)?$", name) and re.match(r"add|sub|mul|div|fma|mad|rcp|ex2|sqrt|rsqrt", name)
    }
    copies = [BUILDS[name].constants.get(copy) for copy in ("FIRST", "OTHER")]
    rooted = any(form and form.statistic != "amax" for form in copies)
    exact = r"(add|sub|mul)\.rn\.f32(x2)?|div\.rn\.f32" + r"|sqrt\.rn\.f32" * rooted
    assert not {name for name in floats if not re.fullmatch(exact, name)}
    assert not [name for name in found if "ftz" in name]
    divisions = found["div.rn.f32"]
    assert bool(divisions) == (BUILDS[name].kernel in ("cast", "cast_parts", "scaled", "decoded", "rescaled"))
    # Held in registers, sixteen rows need no exchange between threads: what goes through shared memory is a
    # scale or a maximum.
    slabs = [form.slab for form in copies if form]
    assert not slabs or not all(slabs) or found["bar.sync"] <= 6
    code = machine_code(kernel)
    assert code.stack == 0  # nothing is spilled
    made = Counter()  # Blackwell's uniform datapath has the same instructions, with a U before their names
    for one, count in code.instructions.items():
        made[re.sub("^U(?=F)", "", one)] += count
    assert made["FCHK"] == divisions
    if rooted:
        return  # a root is a sequence of its own, with fused operations
    fused = sum(count for one, count in made.items() if re.match(r"FFMA2?(\.|$)(?!R[PMZ])", one))
    of_divisions = 5 * divisions + 9 if divisions else 0
    assert fused <= of_divisions  # some divisions share a reciprocal
    of_integers = sum(count for one, count in made.items() if re.match(r"U?I2F\.(U32\.|U64\.)?RP", one))
    assert made["MUFU.RCP"] <= (divisions + 2 if divisions else 0) + of_integers
    assert not {one for one in made if re.match(r"MUFU\.(?!RCP$|RSQ$)|F(MUL|FMA)2?\.FTZ", one)}
    assert made["FADD.FTZ"] == made["MUFU.RSQ"] * 2 == 2 * bool(divisions)  # of the subroutine


@needs_triton
@pytest.mark.usefixtures("triton_cache")
def test_contraction_would_be_seen():
    kernel = compiled(BUILDS["rows, nearest"], 90, {"enable_fp_fusion": True})
    found = instructions(kernel.asm["ptx"])
    assert found["fma.rn.f32"]
    assert not found["add.rn.f32"]
    code = machine_code(kernel).instructions
    assert code["FFMA"] > 5 * found["div.rn.f32"] + 9


@needs_triton
def test_a_triton_that_cannot_be_exact_is_as_good_as_none(monkeypatch):
    monkeypatch.setattr(cuda, "EXACT", cuda.EXACT | {"an option of a later Triton": True})
    assert cuda.kernels.__wrapped__() is None


@needs_triton
@pytest.mark.parametrize("name", ["amaxes", "row_amaxes", "cast"])
def test_one_build_serves_every_step_and_every_layer(name):
    """Triton compiles anew for an integer that is 1 or a multiple of 16, or has another type, unless it is told not to."""
    kernel = getattr(cuda.kernels(), name)
    changing = ("word", "where", "key", "step", "micro_batch", "lines", "outer", "largest", "out", "row_amax")
    parameters = [p for p in kernel.params if p.name.removeprefix("other_").startswith(changing)]
    assert len(parameters) >= 5
    assert all(parameter.do_not_specialize for parameter in parameters)
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
    assert not cuda.can_take(torch.ones(16, 32))
    assert not cuda.can_order(torch.ones(16, 32))


NO_COMPILER = """
import tempfile
from pathlib import Path
from ablate.numerics.kernels.launch_errors import reason
from triton.runtime import build
try:
    build._build("launcher", "launcher.c", tempfile.mkdtemp(), [], [], [], [])
except Exception as error:
    print(reason(error, Path({headers!r})))
"""


@needs_triton
@pytest.mark.parametrize(
    ("missing", "way_out"),
    [("compiler", "install gcc"), ("Python.h", "install python3-dev"), ("source", "set CC")],
)
def test_what_triton_lacks_is_named_with_the_way_out(missing, way_out, tmp_path):
    """Triton's own build of a launcher fails: without PATH, or with a compiler that finds no file."""
    headers = tmp_path if missing == "Python.h" else Path(sysconfig.get_paths()["include"])
    environment = {name: value for name, value in os.environ.items() if name != "CC"}
    path = {"PATH": ""} if missing == "compiler" else {"CC": "false"}
    code = NO_COMPILER.format(headers=str(headers))
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env=environment | path, capture_output=True, text=True, check=False)
    assert way_out in done.stdout, done.stderr


def test_other_errors_of_a_launch_keep_their_words():
    assert "TRITON_PTXAS_PATH" in reason(RuntimeError("Cannot find ptxas"))
    assert "ValueError: an unknown one" in reason(ValueError("an unknown one\nand its details"))


def test_the_digests_of_a_trial_launch_are_those_of_the_reference():
    x = cuda.trial_matrix()
    magnitudes = x.float().abs().flatten().sort().values
    ordered = magnitudes[cuda.TRIAL_RANK - 1], magnitudes[-1]
    flips, turned = torch.tensor(cuda.TRIAL_SIGNS), pad(x.t().float(), 1, 64).view(-1, 64)
    factor = ordered[0] * ordered[1] / torch.tensor(cuda.TRIAL_DIVISOR)
    scales, amax = cuda.trial_scales(x)
    size = Operand(x, Quant(), amax, scales, source=x).rescaled().abs()
    inside = size.clamp(max=6)
    position = inside / ELEMENTS["e2m1"].step(inside)
    distance = (2 * (position - position.floor()) - 1).abs()
    distance[size > 6 * (1 + 2.0**-20)] = torch.inf
    scaled = (x.float() * factor).bfloat16()
    within, means = x.float().clamp(-ordered[0], ordered[0]), x[0].float()
    parts = within, (x.float() - within).bfloat16(), x.float() - means, x[0]
    made = vars(reference(quantize(x, Quant(), keep=True)))
    sums = [made[name] for name in gpu_sums.NAMES[:8]]
    assert {
        "counted": cuda.digest(*(each.view(1) for each in ordered)),
        "parted": cuda.digest(*parts),
        "scaled": cuda.digest(scaled, (scaled.float() * (x.float().abs() / 5).clamp(max=3)).bfloat16()),
        "remembered": cuda.digest(torch.stack([ordered[number] for number in (0, 1, 0, 0, 0)])),
        "rescaled": cuda.digest(distance),
        "squared": cuda.digest(x.float().square()),
        "turned": cuda.digest(butterflies(turned * flips).bfloat16().view(272, 64)),
        "summed": cuda.digest(torch.tensor(sums, dtype=torch.float32)),
    } == cuda.TRIAL
