/* How NVFP4 scales: shared by its quantisers and by telemetry. */

#pragma once

#include "vectors.h"

typedef struct {
    float bound, headroom;             /* largest block scale; room above a block's maximum */
    int32_t bf16, stochastic, rotated; /* what x is; how codes round; whether columns turn first */
    uint32_t signs;                    /* of the rotation: a bit a row, set for - */
    uint32_t key[2], clock[3];         /* Philox: seed and stream; step, micro-batch, site */
    float amax;                        /* of the tensor, or what counts as that; below 0, it is found and filled in */
    float largest;                     /* filled in: the largest magnitude */
    float multiplier, inverse;         /* filled in: S / 6 times the headroom, and 1 / S */
} spec;

INLINE f32 block_scale(f32 amax, const spec *p) {
    f32 scale = smaller(smaller(amax * p->multiplier, FLT_MAX), 448.0f);
    return nearest(scale, 3, -6);
}

INLINE f32 element_scale(f32 scale, const spec *p) { return smaller(1.0f / (scale * p->inverse), FLT_MAX); }
