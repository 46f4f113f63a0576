"""Every case of the casts: kernels beside the reference beside integer arithmetic, bit for bit.

The NVFP4 cast of an element depends on five numbers: its value, the amax of its block, the outer statistic of
its tensor, the rounding and a random byte. The amax counts only through the block's scale, an E4M3 number. So
four enumerations cover it (exhaustive_nvfp4.py):

1. *Block scales*: every pair of an outer statistic (32,639 positive finite bf16) and a block's amax (32,640
   finite bf16 magnitudes): 1.07e9 cases.
2. *Codes of E2M1*: every finite fp32 number, 4,278,190,080, to nearest, at block scale 1 and S = 1.
3. *To nearest*: every finite bf16 number (65,280) at every E4M3 scale (zero and 126), for each outer
   statistic of NEAREST: every bf16 mantissa, and the ends of the range.
4. *Stochastic*: the same with every random byte (256), for each outer statistic of STOCHASTIC: 2.1e9 cases
   each.

Every case runs through `kernels.cpu.quantize`, by rows, by columns and, to nearest, in 16x16 tiles (1: not
in tiles), and through the reference's `quantize` (1: its functions of scales).

5. *Other forms* (exhaustive_forms.py): every finite bf16 number at every scale of E4M3, UE5M3 and E8M0
   (2^-100 to 2^100), S = 1, for seven elements, to nearest and with ties away from zero; and with every
   random byte at scale 1; through `kernels.general.quantize` and the reference's.

If a block with a large element cannot have a small scale, the element, which saturates, is left out, and the
number of cases says so. Not enumerated: NaN and infinities, which kernels leave to the reference; other outer
statistics; fp32 numbers at other scales, or stochastic; 16 and 24 random bits (the default is 8); E3M0, other
scale formats, selections, MS-EDEN, exponents of sub-blocks; rotations; GPUs; Philox itself, of which only
these bytes are compared.

Tallies are kept by chunk in the cache, by a hash of code, libraries, processor and environment: a killed run
loses one chunk, and a finished one is not repeated.
"""

from collections.abc import Callable, Iterator

import torch

from ablate.cache import key_of, root
from ablate.numerics.kernels import builds
from ablate.verification import exhaustive_forms, exhaustive_nvfp4, passed_checks
from ablate.verification.check_result import Row
from ablate.verification.enumeration import Record, rows_of


def record() -> Record:
    """Return the record of this code, with these libraries, on this processor."""
    checked = passed_checks.subject()
    subject = {name: checked[name] for name in ("files", "libraries", "python", "processor", "environment")}
    return Record(root() / "exhaustive" / f"{key_of(subject)}.json")


def by_group(show: Callable[[str], object] | None = None) -> Iterator[tuple[str, list[Row]]]:
    """Yield each heading with its rows once they are complete; `show` receives the progress."""
    torch.set_num_threads(1)
    kept = record()
    level = builds.level() if builds.build() else "none: the reference alone"
    yield "What runs", [Row("compiled quantisers", level), Row("results are kept in", str(kept.path))]
    yield from rows_of([*exhaustive_nvfp4.parts(), *exhaustive_forms.parts()], kept, show)
