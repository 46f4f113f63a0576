"""The words of a description that are not number formats, with what each implies: the one list of every such set. Torch-free.

A field of the specification accepts the words of one of these registries, and every other module asks a registry for what follows from
a word (does this rounding draw random bits? does this statistic depend on earlier steps?) instead of listing words itself. What a word
computes is the function of its name: in rounding.py, scaling.py, hadamard.py or select.py, in the tuple at the foot of the file. Sets of
words from which nothing follows elsewhere stand in spec.py, at their field.
"""

from dataclasses import dataclass

BLOCKS = ("1x8", "1x16", "1x32", "1x64", "1x128", "16x16", "32x32")
"""Rows and columns that share a block scale."""
DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
"""Types of what is not quantised, and torch's names for them."""


@dataclass(frozen=True)
class Rounding:
    """A rounding to one of the two neighbours on a grid."""

    draws: bool = False
    """Takes random bits."""
    of_elements: bool = True
    of_scales: bool = True


ROUNDINGS = {
    "nearest": Rounding(),
    "away": Rounding(),
    "floor": Rounding(of_elements=False),
    "ceil": Rounding(of_elements=False),
    "stochastic": Rounding(draws=True),
    "ms_eden": Rounding(
        draws=True, of_scales=False
    ),  # nearest, then block scales corrected: quantize.ms_eden
}


@dataclass(frozen=True)
class Statistic:
    """A number that stands for a tensor or a block: `amax`, or a word with a number from `least` to `most` behind a colon."""

    form: str
    """How errors show it."""
    number: type[int] | type[float] | None = None
    least: float = 0.0
    most: float = 0.0
    per_tensor: bool = False
    """There is one for a tensor, none for its rows or its blocks of 128."""
    earlier: bool = False
    """Depends on earlier steps."""


_TINY, _HUGE, _MOST_STEPS = 1e-30, 1e30, 10**6
STATISTICS = {
    "amax": Statistic("'amax'"),
    "percentile": Statistic("'percentile:p' with p in (0, 1]", float, _TINY, 1),
    "delayed": Statistic("'delayed:n' (n steps)", int, 1, _MOST_STEPS, per_tensor=True, earlier=True),
    "hold": Statistic("'hold:n' (n steps)", int, 1, _MOST_STEPS, per_tensor=True, earlier=True),
    "static": Statistic("'static:v' (a magnitude above 0)", float, _TINY, _HUGE, per_tensor=True),
}
"""Of the outer scale."""
BLOCK_STATISTICS = {
    "amax": Statistic("'amax'"),
    "rms": Statistic("'rms:c' (c times the block's root mean square)", float, _TINY, 1e3),
    "std": Statistic("'std:c' (c times its standard deviation)", float, _TINY, 1e3),
}


@dataclass(frozen=True)
class Signs:
    """The signs of a rotation."""

    drawn: bool = True
    """They are drawn at random."""
    lasting: bool = False
    """A later call of the same product has the same ones."""


SIGNS = {
    "none": Signs(drawn=False, lasting=True),
    "fixed": Signs(drawn=False, lasting=True),
    "per_layer": Signs(lasting=True),
    "per_step": Signs(),
    "per_call": Signs(),
}

CANDIDATES = {"scales": "4 or 6", "grids": "e2m1 or int4", "search": "best scale"}
"""What a block's quantisation is selected among, and how tables show it."""
CRITERIA = ("mse", "mae", "absmax")
"""Errors by which it is selected."""
GEMM_OUTPUTS = {"bf16_out": ("bf16", "rounded once to bf16"), "fp32_out": ("fp32", "left in fp32")}
"""What leaves a product: its type, and how tables show it."""
CHANNELS = {
    "mxfp8": {
        "element": "e4m3",
        "block": "1x32",
        "scale": {"format": "e8m0", "rounding": "ceil"},
        "outer": None,
    },
    "bf16": None,
}
"""How channels that are taken out of an operand are quantised, as the fields of a Quant; None: not at all.

MXFP8 is E4M3 in blocks of 32 with power-of-two scales, rounded up so that nothing saturates (Transformer Engine's rule).
"""
