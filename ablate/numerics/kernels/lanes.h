/* Sixteen neighbours a vector, in order: what the general quantiser, the rotations and the transposition share. */

#pragma once

#include "vectors.h"

INLINE f32 magnitude(f32 x) { return (f32)((u32)x & 0x7fffffffu); }
INLINE f32 truncated(f32 y) { return __builtin_convertvector(__builtin_convertvector(y, i32), f32); } /* of what fits in an int */
INLINE f32 with_sign(f32 size, f32 of) { return (f32)((u32)size | ((u32)of & 0x80000000u)); }
INLINE int32_t all_finite(f32 size) { return __builtin_reduce_and((i32)(size < __builtin_inff())); }
INLINE f32 one_if(i32 condition) { return (f32)(condition & (i32)splat(1.0f)); }

/* `count` elements, at most sixteen, zeros after them. */
INLINE f32 load_some(const void *x, int64_t at, int32_t bf16, int64_t count) {
    if (bf16) {
        u16 bits = {0};
        if (count >= 16)
            bits = *(const u16_memory *)((const uint16_t *)x + at);
        else
            memcpy(&bits, (const uint16_t *)x + at, count * 2);
        return (f32)(__builtin_convertvector(bits, u32) << 16);
    }
    f32 values = {0};
    if (count >= 16)
        return *(const f32_memory *)((const float *)x + at);
    memcpy(&values, (const float *)x + at, count * 4);
    return values;
}

/* To bf16, to nearest, ties to even; a NaN stays one. */
INLINE u16 to_bf16(f32 v) {
    u32 bits = (u32)v, rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    i32 nan = v != v;
    return __builtin_convertvector((rounded & ~(u32)nan) | (0x7fc0u & (u32)nan), u16);
}

INLINE void store_some(void *out, int64_t at, f32 v, int32_t bf16, int64_t count) {
    if (bf16) {
        u16 bits = to_bf16(v);
        if (count >= 16)
            *(u16_memory *)((uint16_t *)out + at) = bits;
        else
            memcpy((uint16_t *)out + at, &bits, count * 2);
    } else if (count >= 16)
        *(f32_memory *)((float *)out + at) = v;
    else
        memcpy((float *)out + at, &v, count * 4);
}

#define EXCHANGE(a, b, first, second) \
    { \
        f32 low = __builtin_shufflevector(a, b, first), high = __builtin_shufflevector(a, b, second); \
        a = low, b = high; \
    }
#define LIST(...) __VA_ARGS__

/* Lanes become vectors and vectors lanes. */
INLINE void transpose(f32 t[16]) {
    UNROLL for (int r = 0; r < 8; r++)
        EXCHANGE(t[r], t[r + 8], LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                 LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    UNROLL for (int r = 0; r < 16; r++)
        if (!(r & 4))
            EXCHANGE(t[r], t[r + 4], LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                     LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
    UNROLL for (int r = 0; r < 16; r++)
        if (!(r & 2))
            EXCHANGE(t[r], t[r + 2], LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                     LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    UNROLL for (int r = 0; r < 16; r += 2)
        EXCHANGE(t[r], t[r + 1], LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
                 LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
}
