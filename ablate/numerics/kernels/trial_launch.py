"""Launch each GPU kernel once on a small matrix, before anything trusts it.

Triton compiles on the user's machine, with a C compiler, Python's headers, ptxas and a driver that this
project does not choose. `problem` returns what is missing, or which kernel's bits differ from those of the
reference on the CPU, and the way out. It takes a second in each process, after Triton's cache has the
kernels; the caller (`cuda.runs_on`) remembers it for each device.
"""

import subprocess
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import Tensor

from ablate.numerics.kernels import builds, cuda
from ablate.numerics.philox import Clock

_SHAPE = (17, 272)
"""More than one slab of rows and one of columns, both ragged."""


def problem(device: torch.device, cast: Callable[..., cuda.Quantized] = cuda.quantize) -> str:
    """Return why the kernels cannot be used on a device, with the way out; empty if they can.

    Args:
        device: GPU, or a CPU in Triton's interpreter.
        cast: `cuda.quantize`, or another function to compare.
    """
    try:
        different = sorted({name for name, equal in _comparisons(device, cast) if not equal})
    except Exception as error:  # whatever Triton, the compiler or the driver raises
        return reason(error)
    if not different:
        return ""
    kernels = ", ".join(different)
    return f"the results of {kernels} differ from the reference's; report this with `ablate doctor`'s output"


def reason(error: Exception, headers: Path | None = None) -> str:
    """Return a sentence for an error of Triton's, with the way out.

    Args:
        error: from a launch.
        headers: folder of Python.h; None: that of this Python.
    """
    text = str(error)
    headers = headers or Path(sysconfig.get_paths()["include"])
    if "C compiler" in text:
        return "Triton found no C compiler, which builds the launchers of kernels; install gcc, or set CC"
    if isinstance(error, subprocess.CalledProcessError) and not (headers / "Python.h").exists():
        return f"there is no Python.h in {headers}, which Triton compiles against; install python3-dev"
    if isinstance(error, subprocess.CalledProcessError):
        return f"the C compiler that Triton calls failed ({text}); set CC to one that works"
    if "ptxas" in text:
        return "Triton found no ptxas that works; install triton again, or set TRITON_PTXAS_PATH to CUDA's"
    first = (text.splitlines() or [""])[0]
    return f"Triton raised {type(error).__name__}: {first}; see Triton's issues"


def _comparisons(device: torch.device, cast: Callable[..., cuda.Quantized]) -> Iterator[tuple[str, bool]]:
    """Yield names of kernels, and whether a result of theirs is the reference's."""
    from ablate.numerics import quantize as reference
    from ablate.numerics.hadamard import signs
    from ablate.numerics.product import alpha
    from ablate.numerics.spec import Hadamard, Outer, Quant

    generator, clock = torch.Generator().manual_seed(0), Clock(5, step=7)
    x = torch.randn(_SHAPE, generator=generator) * torch.randn(_SHAPE, generator=generator).exp()
    x = x.to(torch.bfloat16)
    there, rotation = x.to(device), Hadamard()
    word = cuda.sign_word(signs(rotation, torch.device("cpu")))
    drawn, square = Quant(rounding="stochastic"), Quant(block="16x16")
    low = Quant(outer=Outer(statistic="percentile:0.9"))
    cases = (
        ("by_rows", x, there, drawn, None),
        ("by_columns", x.t(), there.t(), drawn, rotation),
        ("by_tiles", x, there, square, None),
        ("counted", x, there, low, None),
    )
    made: dict[str, cuda.Quantized] = {}
    expected: dict[str, reference.Operand] = {}
    with builds.using(None):
        for name, own, copy, quant, turn in cases:
            expected[name] = reference.quantize(own, quant, rotation=turn, clock=clock, where=3)
            made[name] = cast(copy, cuda.Form(quant, word if turn else None, 3), clock)
        first, second = cuda.quantize_both(there, cuda.Form(drawn, None, 3), cuda.Form(drawn, word, 3), clock)
        for name, mine in made.items():
            yield name, _equal(mine, expected[name])
        yield "by_both", _equal(first, expected["by_rows"]) and _equal(second, expected["by_columns"])
        a, b = expected["by_rows"], expected["by_tiles"]
        sums, factor = x.float(), alpha(a, b)
        assert factor is not None
        amaxes = made["by_rows"].amax, made["by_tiles"].amax
        scaled = cuda.scaled(sums.to(device, copy=True), *amaxes, a.divisor * b.divisor, torch.bfloat16)
        yield "scaled", torch.equal(scaled.cpu(), (sums * factor).to(torch.bfloat16))


def _equal(mine: cuda.Quantized, theirs: object) -> bool:
    names = ("values", "amax", "block_scale", "largest")
    pairs: list[tuple[Tensor, Tensor]] = [(getattr(mine, name), getattr(theirs, name)) for name in names]
    return all(torch.equal(one.cpu(), other) for one, other in pairs)
