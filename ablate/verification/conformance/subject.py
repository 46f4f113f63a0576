"""Implementation under examination: the functions of another library, or of a user's own kernel.

The kit imports nothing of the subject's framework: it calls functions on torch tensors and looks at what they
return. A function of a user's module is enough, and what it is follows from the names of its parameters:

    def quantise(x): ...                        # a cast to nearest: values, or codes and scales
    def quantise(x, amax): ...                  # a cast with a given second level
    def quantise(x, seed): ...                  # a stochastic cast
    def product(x, w, dy): ...                  # y, dx, dw of one linear layer
    def grouped(x, w, dy, offsets): ...         # the same for the experts of a layer

`Subject` gathers several functions of one implementation, and says what is legitimately different in it.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

from torch import Tensor

FUNCTIONS = {
    "cast": "x",
    "cast_given": "x, amax",
    "cast_stochastic": "x, seed",
    "cast_square": "w",
    "rotate": "x",
    "product": "x, w, dy",
    "grouped": "x, w, dy, offsets",
}
"""Parameters of each function of a `Subject`, by its field."""


@dataclass(frozen=True)
class Quantised:
    """Result of a cast of x [rows, columns], whose blocks run along the columns.

    Either `values`, or `codes` and `scales`, or all three: each is examined for itself, and against the
    others. A value is code x block scale x `outer`.
    """

    values: Tensor | None = None
    """Dequantised matrix, [rows, columns], fp32 or bf16."""
    codes: Tensor | None = None
    """Element codes, uint8: [rows, columns / 2] with two FP4 codes a byte, the even column in the low nibble;
    or [rows, columns], a code a byte; or of an fp8 dtype."""
    scales: Tensor | None = None
    """Block scales, [rows, columns / block], or [rows / 16, columns / 16] of square blocks: of an fp8 or
    fp32 dtype, or their bytes, uint8. If `Subject.swizzled`, in the 128 x 4 layout of tensor cores."""
    outer: Tensor | None = None
    """Factor of the second level, fp32, by which code x scale is multiplied: a scalar or [rows, 1]."""
    amax: Tensor | None = None
    """Largest magnitude that the second level was computed from, fp32 scalar, if the subject returns it."""


Cast = Callable[[Tensor], "Quantised | Tensor"]
StochasticCast = Callable[[Tensor, int], "Quantised | Tensor"]
"""Takes x and a seed."""
Product = Callable[[Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Takes x [tokens, in], w [out, in], dy [tokens, out]; returns y = x w^T, dx = dy w, dw = dy^T x."""
GroupedProduct = Callable[[Tensor, Tensor, Tensor, Tensor], tuple[Tensor, Tensor, Tensor]]
"""Takes x [tokens, in] sorted by expert, w [experts, out, in], dy [tokens, out] and offsets, int32 [experts]:
the number of tokens of the experts up to each, this one included. Returns y, dx, and dw like w."""


@dataclass(frozen=True)
class Subject:
    """Functions of one implementation. What it does not have is None, and is not examined."""

    name: str
    version: str = ""
    cast: Cast | None = None
    """Rounds to nearest, with blocks of 1 x 16 (NVFP4) or 1 x 32 (MX) along the columns."""
    cast_given: Callable[[Tensor, Tensor], "Quantised | Tensor"] | None = None
    """`cast` with the largest magnitude given, as static or delayed scaling does: takes x and amax, an fp32
    scalar, which may be smaller than that of x."""
    cast_stochastic: StochasticCast | None = None
    cast_square: Cast | None = None
    """Rounds to nearest, with square blocks, 16 x 16: the cast of weights."""
    rotate: Cast | None = None
    """Hadamard rotation of every 16 consecutive columns, without a cast; same signs at every call."""
    product: Product | None = None
    grouped: GroupedProduct | None = None
    dtypes: tuple[str, ...] = ("bfloat16", "float32")
    """Dtypes of x that it takes, torch's names."""
    rows: int = 1
    columns: int | None = None
    """Numbers that the rows and columns of x have to be a multiple of; other shapes are not tried. None:
    whole blocks. A number that cuts a block, such as 1, declares that a last block may be cut short."""
    swizzled: bool = False
    """Scales are in the 128 x 4 layout of tensor cores."""
    device: str = "cpu"
    """Device on which tensors are handed to it."""
    variants: Mapping[str, str] = field(default_factory=dict)
    """Declared differences that are legitimate. {"*": "elements S/s, zero block 1"}: words of
    `declared.VARIANTS`, for all casts. {"nan_visible": "zero"}: the form of one property, by
    `declared.FORMS`. What they concern has to hold in the declared form; it is not excused."""
    seeded: bool = True
    """The seed of `cast_stochastic` determines the draw."""
