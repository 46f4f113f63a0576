/* Vectors of sixteen: what all kernels share.

   clang's vector extensions, which it compiles for any instruction set. The forms of NVFP4 take thirty-two elements at a time, as a
   `pair` of vectors, those at even places and those at odd places: so bf16 widens for one operation each. */

#pragma once

#include <stdint.h>
#include <string.h>

typedef float f32 __attribute__((vector_size(64)));
typedef int32_t i32 __attribute__((vector_size(64)));
typedef uint32_t u32 __attribute__((vector_size(64)));
typedef uint64_t u64 __attribute__((vector_size(64)));
typedef double f64 __attribute__((vector_size(128)));
typedef uint16_t u16 __attribute__((vector_size(32)));
typedef uint16_t twos __attribute__((vector_size(64)));
typedef u32 memory __attribute__((aligned(1), may_alias)); /* a vector in memory: at any address, of any type */
typedef uint32_t half_memory __attribute__((vector_size(32), aligned(1), may_alias));
typedef f32 f32_memory __attribute__((aligned(1), may_alias));
typedef f64 f64_memory __attribute__((aligned(1), may_alias));
typedef u16 u16_memory __attribute__((aligned(1), may_alias));
typedef uint8_t u8_memory __attribute__((vector_size(16), aligned(1), may_alias));

#define INLINE static inline __attribute__((always_inline))
#define UNROLL _Pragma("clang loop unroll(full)")
#define FLT_MAX 3.40282346638528859811704183484516925e+38f
#define INFINITE 0x7f800000 /* the bits of infinity, which are those of the exponent */

typedef struct {
    f32 even, odd;
} pair; /* thirty-two elements, as fp32 */

typedef struct {
    u32 first, second;
} raw; /* the same as they lie in memory: bf16, by twos, fills `first` alone */

/* --- vectors ------------------------------------------------------------------------------------------------------------------ */

INLINE f32 splat(float x) { return x - (f32){0}; }
INLINE f32 where(i32 condition, f32 yes, f32 no) { return (f32)(((i32)yes & condition) | ((i32)no & ~condition)); }
INLINE f32 smaller(f32 a, float b) { return where(a < splat(b), a, splat(b)); } /* one instruction; of a NaN, b */

/* The larger of magnitudes, bf16 by twos or fp32: they compare as their bits do, and those of what is not finite are the largest. */
INLINE u32 larger(u32 a, u32 b, int32_t bf16) {
    return bf16 ? (u32)__builtin_elementwise_max((twos)a, (twos)b) : __builtin_elementwise_max(a, b);
}

/* `count`, 32 or 16, elements, zeros after them. */
INLINE raw load(const void *x, int64_t at, int32_t bf16, int64_t count) {
    const char *here = (const char *)x + at * (bf16 ? 2 : 4);
    if (count == 32)
        return (raw){*(const memory *)here, bf16 ? (u32){0} : *(const memory *)(here + 64)};
    if (!bf16)
        return (raw){*(const memory *)here};
    half_memory lower = *(const half_memory *)here;
    return (raw){__builtin_shufflevector(lower, (half_memory){0}, 0, 1, 2, 3, 4, 5, 6, 7, 8, 8, 8, 8, 8, 8, 8, 8)};
}

INLINE raw without_signs(raw v, int32_t bf16) {
    uint32_t keep = bf16 ? 0x7fff7fffu : 0x7fffffffu;
    return (raw){v.first & keep, v.second & keep};
}

INLINE pair widen(raw v, int32_t bf16) {
    if (bf16)
        return (pair){(f32)(v.first << 16), (f32)(v.first & 0xffff0000u)};
    return (pair){(f32)__builtin_shufflevector(v.first, v.second, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                  (f32)__builtin_shufflevector(v.first, v.second, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31)};
}

INLINE pair magnitudes(raw v, int32_t bf16) {
    if (bf16)
        return widen(without_signs(v, 1), 1);
    pair wide = widen(v, 0); /* signs taken off after the shuffle, which the signs of the result share */
    return (pair){(f32)((u32)wide.even & 0x7fffffffu), (f32)((u32)wide.odd & 0x7fffffffu)};
}

/* As bf16, of values that have at most 8 significant bits: the upper halves of their fp32. */
INLINE u32 narrow(pair v) { return (u32)v.even >> 16 | ((u32)v.odd & 0xffff0000u); }

INLINE void store_raw(uint16_t *out, int64_t at, u32 packed, int64_t count) {
    if (count == 32)
        *(memory *)(out + at) = packed;
    else
        *(half_memory *)(out + at) = __builtin_shufflevector(packed, packed, 0, 1, 2, 3, 4, 5, 6, 7);
}

/* Those values with the signs of what they came from. */
INLINE void store(uint16_t *out, int64_t at, pair v, raw from, int32_t bf16, int64_t count) {
    store_raw(out, at, narrow(v) | ((bf16 ? from.first : narrow(widen(from, 0))) & 0x80008000u), count);
}

/* Scales by place again. */
INLINE void store_scales(float *out, pair v, int64_t count) {
    f32 first = __builtin_shufflevector(v.even, v.odd, 0, 16, 1, 17, 2, 18, 3, 19, 4, 20, 5, 21, 6, 22, 7, 23);
    f32 second = __builtin_shufflevector(v.even, v.odd, 8, 24, 9, 25, 10, 26, 11, 27, 12, 28, 13, 29, 14, 30, 15, 31);
    *(memory *)out = (u32)first;
    if (count == 32)
        *(memory *)(out + 16) = (u32)second;
}

/* Lanes 0 to 7 are a block, or tile, and lanes 8 to 15 the next. */
INLINE f32 halves(float first, float second) {
    return __builtin_shufflevector(splat(first), splat(second), 0, 1, 2, 3, 4, 5, 6, 7, 24, 25, 26, 27, 28, 29, 30, 31);
}

INLINE float as_float(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* --- rounding ----------------------------------------------------------------------------------------------------------------- */

/* The exponent of y, at least `least`, as a power of two. */
INLINE i32 exponent(f32 y, int32_t least) {
    return __builtin_elementwise_max((i32)y & INFINITE, (i32){0} + ((least + 127) << 23));
}

/* y >= 0 to the nearest with so many mantissa bits, ties to even: adding a power of two whose neighbours lie that far apart rounds. */
INLINE f32 nearest(f32 y, int32_t mantissa, int32_t least) {
    f32 power = (f32)(exponent(y, least) + ((23 - mantissa) << 23));
    return (y + power) - power;
}
