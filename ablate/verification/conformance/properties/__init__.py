"""Properties that an implementation of a recipe has, one file a family, and their registry.

A property hands tensors to the subject, compares what comes back with what the recipe's specification gives
(docs/reference/numerics.md; the reference path of `ablate.numerics`), and gives a row. Tolerances are
derived: what the specification fixes is compared exactly, what it leaves open (order of additions,
dequantisation) by a bound on its roundings, and what is random by an interval of the distribution that the
specification gives. None was fitted to an implementation.
"""

from ablate.verification.conformance.examination import Property
from ablate.verification.conformance.properties import (
    calls,
    casts,
    grouped,
    product,
    rotation,
    stochastic,
)

PROPERTIES: dict[str, Property] = {
    one.name: one
    for family in (casts, calls, stochastic, rotation, product, grouped)
    for one in family.PROPERTIES
}
"""All properties by name, in the order of the table."""

PROMISES = {
    "random_bf16": "Random bf16 data gets the recipe's codes and scales.",
    "random_fp32": "Random fp32 data gets the recipe's codes and scales.",
    "element_ties": "Elements halfway between two codes go to the even one.",
    "order_of_scale": "The block scale is e4m3(a (S (1/6))), in this order: docs/reference/numerics.md,"
    " section 3.",
    "order_of_factor": "The element factor is 1/(s (1/S)), in this "
    "order: docs/reference/numerics.md, section 3.",
    "near_ties_of_choice": "Of two candidates, the one with the smaller error in "
    "the recipe's order of additions wins.",
    "stale_scales": "Each call computes its own scales.",
    "strides": "Views that are not contiguous give what their copies give.",
    "scale_midpoints": "Block scales are rounded to nearest, ties to even.",
    "every_scale": "Scales all over the format's range are used and read back.",
    "subnormal_scales": "Subnormal scales are kept; those below half the smallest are zero.",
    "power_of_two_thresholds": "E8M0's exponent goes up where the recipe says.",
    "power_of_two_extremes": "The smallest and largest exponents are right.",
    "amax_ladder": "Tensors of every magnitude from 1e-30 to 1e30 are cast alike.",
    "small_tensor": "Gradients of 1e-5 and below are kept: no floor of scales or of amax.",
    "zero_block": "A zero block has the recipe's scale, and the value zero.",
    "smallest_numbers": "Values of 1e-20 do not underflow in the dequantisation.",
    "code_bytes": "Bytes are the codes of the format; the even column is the low nibble.",
    "scale_layout": "Each scale is where it belongs, also with 33, 130 and 257 rows.",
    "shape_lattice": "Shapes around multiples of 16 to 128 are cast alike; every element is written.",
    "square_blocks": "Weights in square blocks get the recipe's codes and scales.",
    "square_transpose": "The cast of W^T is the transposed cast of W.",
    "round_trip": "Code x block scale x second-level factor is the value.",
    "repeats": "The same input gives the same bits, 20 times.",
    "true_amax": "The second level is that of the largest magnitude.",
    "input_kept": "The input is not changed.",
    "padding_bytes": "Scale bytes that pad the layout are written.",
    "saturated_scales": "Scales above the maximum become the maximum, never NaN.",
    "zero_tensor": "A zero tensor stays zero, and nothing in it is NaN.",
    "nan_visible": "A NaN shows in the result.",
    "infinity_visible": "An infinity shows in the result.",
    "infinite_neighbours": "Scales beside an infinity saturate; none is NaN.",
    "adjacent_draws": "Each draw is one of the two neighbours of its element.",
    "exact_values_kept": "Values on the grid are kept by every draw.",
    "mean_of_draws": "The share of draws that round up is the position in the step.",
    "variance_of_draws": "The variance of draws is f (1 - f) step^2.",
    "bias_of_draws": "The mean error in steps, and the gain of normal data.",
    "seeds": "Equal seeds give equal draws, other seeds others.",
    "independent_draws": "Draws of elements, rows, blocks and seeds do not correlate.",
    "calls_differ": "Two equal halves of a tensor get other draws.",
    "orthogonal": "R R^T = I.",
    "rotation_values": "Rotated values are summed in fp32 and rounded once to the dtype of x.",
    "rotation_axis": "Groups of columns are rotated, within their row.",
    "rotation_cancels": "(a R)(b R)^T = a b^T.",
    "rotation_large": "A large tensor is rotated as its parts are.",
    "forward_product": "y is the product of the recipe's operands, rounded once.",
    "input_gradient": "dx is the product of the recipe's operands, rounded once.",
    "weight_gradient": "dw is the product of the recipe's operands, rotated alike, rounded once.",
    "random_gradients": "Gain and error of dx and dw against fp64 are those of the recipe.",
    "same_weight_codes": "y and dx use one quantised W.",
    "product_strides": "Views that are not contiguous give what their copies give.",
    "small_products": "Products of tensors of 1e-20 and of 1e10 are as exact as others.",
    "product_repeats": "The same tensors give the same bits, 20 times.",
    "long_sums": "Long sums are accumulated in fp32.",
    "contraction_sizes": "Sums of 16 to 2,320 terms are whole, also behind the last tile.",
    "grouped_forward": "Each expert's y is that of its own layer.",
    "grouped_input_gradient": "Each expert's dx is that of its own layer.",
    "grouped_weight_gradient": "Each expert's dw is that of its own layer.",
    "grouped_unaligned": "Experts whose tokens are no multiple of 64 are computed alike.",
    "grouped_ragged": "Experts of 0, 1, 15, 16, 17 and 33 tokens are computed alike.",
    "grouped_all_to_one": "Experts without tokens have a dw of zero.",
    "grouped_widths": "Experts of 96 and of 144 outputs are computed alike: their rows "
    "of scales are padded to 128.",
    "grouped_fp32": "Experts' numbers in fp32 give what they give in bf16.",
    "grouped_layout": "Tensors that no rounding changes give the exact product.",
    "grouped_random": "Gain and error of each expert's dx and dw against fp64 are the recipe's.",
}
"""Sentence by property: what an implementation of the recipe does."""
