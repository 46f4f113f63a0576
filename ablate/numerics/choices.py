"""Registries of the words that a quantiser's description may use, other than number formats. Torch-free.

Each registry maps a word to its properties (does this rounding draw random bits? does this statistic depend
on earlier steps?), so that no other module lists words. The function that a word selects has the same name
and stands in rounding.py, scaling.py, hadamard.py or select.py. Words without such properties are listed in
spec.py at their field.
"""

from dataclasses import dataclass

BLOCKS = ("1x8", "1x16", "1x32", "1x64", "1x128", "16x16", "32x32")
"""Rows and columns that share a block scale."""
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""Types of unquantised tensors, with torch's names for them."""


@dataclass(frozen=True)
class Rounding:
    """Rounding to one of the two neighbours on a grid."""

    draws: bool = False
    """True if it takes random bits."""
    of_elements: bool = True
    of_scales: bool = True


ROUNDINGS = {
    "nearest": Rounding(),
    "away": Rounding(),
    "floor": Rounding(of_elements=False),
    "ceil": Rounding(of_elements=False),
    "stochastic": Rounding(draws=True),
    # To nearest, then block scales are corrected: quantize.ms_eden.
    "ms_eden": Rounding(draws=True, of_scales=False),
}


@dataclass(frozen=True)
class Tagged:
    """Word of a field: the word alone, or the word, a colon and a number from `least` to `most`."""

    form: str
    """Spelling shown in errors."""
    number: type[int] | type[float] | None = None
    least: float = 0.0
    most: float = 0.0


@dataclass(frozen=True)
class Statistic(Tagged):
    """Statistic of a tensor or a block."""

    per_tensor: bool = False
    """True if it is defined for a tensor only, not for rows or groups of 128."""
    earlier: bool = False
    """True if it depends on earlier steps."""


_TINY, _HUGE, _MOST_STEPS, _MOST_ROWS = 1e-30, 1e30, 10**6, 10**6
STATISTICS = {
    "amax": Statistic("'amax'"),
    "percentile": Statistic("'percentile:p' with p in (0, 1]", float, _TINY, 1),
    "delayed": Statistic("'delayed:n' (n steps)", int, 1, _MOST_STEPS, per_tensor=True, earlier=True),
    "hold": Statistic("'hold:n' (n steps)", int, 1, _MOST_STEPS, per_tensor=True, earlier=True),
    "static": Statistic("'static:v' (a magnitude above 0)", float, _TINY, _HUGE, per_tensor=True),
}
"""Statistics of the outer scale."""
GRANULARITIES = {
    "tensor": Tagged("'tensor'"),
    "row": Tagged("'row'"),
    "block": Tagged("'block:128'", int, 128, 128),
    "rows": Tagged("'rows:n' (n rows, 2 or more; one row is 'row')", int, 2, _MOST_ROWS),
}
"""Sets of elements that share an outer scale."""
BLOCK_STATISTICS = {
    "amax": Statistic("'amax'"),
    "rms": Statistic("'rms:c' (c times the block's root mean square)", float, _TINY, 1e3),
    "std": Statistic("'std:c' (c times its standard deviation)", float, _TINY, 1e3),
}


@dataclass(frozen=True)
class Signs:
    """Rule for the signs of a rotation."""

    drawn: bool = True
    """True if they are drawn at random."""
    lasting: bool = False
    """True if later calls of the same product use the same signs."""


SIGNS = {
    "none": Signs(drawn=False, lasting=True),
    "fixed": Signs(drawn=False, lasting=True),
    "per_layer": Signs(lasting=True),
    "per_step": Signs(),
    "per_call": Signs(),
}

CANDIDATES = {"scales": "{:g} or {:g}", "grids": "e2m1 or int4", "search": "best scale"}
"""Candidates for the quantisation of a block, with the text that tables show; `scales` with its pair."""
CRITERIA = ("mse", "mae", "absmax")
"""Errors by which a candidate is selected."""
IN_KERNELS = {
    "rounding": ("nearest", "away", "floor", "ceil", "stochastic", "ms_eden"),
    "statistic": ("amax", "rms", "std"),
    "granularity": ("tensor", "row", "block", "rows"),
    "among": ("scales", "grids"),
    "criterion": ("mse", "mae", "absmax"),
}
"""Words that the compiled kernels know, in the order in which general.c numbers them. A word that is added
above stays with the reference until it stands here, too."""
GEMM_OUTPUTS = {"bf16_out": ("bf16", "rounded once to bf16"), "fp32_out": ("fp32", "left in fp32")}
"""Outputs of a product: dtype, and the text that tables show."""
CHANNELS = {
    "mxfp8": {
        "element": "e4m3",
        "block": "1x32",
        "scale": {"format": "e8m0", "rounding": "ceil"},
        "outer": None,
    },
    "bf16": None,
}
"""Quantisers of channels that are taken out of an operand, as fields of a Quant; None: unquantised.

MXFP8 is E4M3 in blocks of 32 with power-of-two scales, rounded up so that nothing saturates (Transformer
Engine's rule).
"""
