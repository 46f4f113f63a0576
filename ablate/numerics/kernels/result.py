"""Scale and round the fp32 sums of a product: device code in Triton, launched by cuda.py."""

import triton
import triton.language as tl

from ablate.numerics.kernels.nvfp4 import bits_of, nearest_bf16

SIZE = 4096
"""Elements of a program."""


@triton.jit(do_not_specialize=["first", "second"])
def scaled(y, out, first, second, divisor, count, SIZE: tl.constexpr):
    """Write y times the product's factor, rounded once to bf16, or not if `out` is fp32. The factor is first
    * second / divisor in fp32, in this order, as in `product.alpha`.

    y is fp32, stored without gaps; `out` lies alike, and may be y itself. `first` and `second` are the
    operands' amaxes, fp32 scalars in memory, `second` None for 1; `divisor` is the product of their divisors.
    """
    numerator = tl.load(first)
    if second is not None:
        numerator = numerator * tl.load(second)
    at = tl.program_id(0).to(tl.int64) * SIZE + tl.arange(0, SIZE)
    product = tl.load(y + at, mask=at < count, other=0.0) * tl.div_rn(numerator, divisor)
    if out.dtype.element_ty == tl.bfloat16:
        # By the bits: the interpreter converts neither subnormals nor every NaN. 2^22 makes a NaN quiet.
        bits = bits_of(nearest_bf16(product)) | tl.where(product != product, 0x400000, 0)
        product = (bits >> 16).to(tl.int16).to(tl.bfloat16, bitcast=True)
    tl.store(out + at, product, mask=at < count)
