/* NVFP4 quantisation of E2M1 blocks of 16 with E4M3 scales: one pass for the amax, one that rounds.

   Scales come first, for a strip of blocks, then codes, so that neither waits for the other. The arithmetic is the reference's
   (scaling.py, rounding.py, philox.py), operation by operation, and so are the bits: compiled without contraction, reassociation or
   reciprocals. Signs travel apart. Only finite tensors are rounded.

   Three layouts: `rows`, blocks along a row; `columns`, blocks along a column of the same memory (the transposed operand, without
   transposing it); `tiles`, 16x16. Each takes bf16 or fp32 and writes bf16 values, code times block scale, and the fp32 scales. */

#include "nvfp4.h"
#include "philox.h"

/* --- rounding ----------------------------------------------------------------------------------------------------------------- */

/* Up where floor(256 f) exceeds the random byte, f the position between the two neighbours: so a carry decides, once 255 less the
   byte, `chance`, is added to the position in 1/256. Returns twice the result, whose scale the caller halves. */
INLINE f32 stochastic(f32 y, u32 chance) {
    i32 power = exponent(y, 0);                     /* twice the distance of the neighbours */
    f32 inverse = (f32)(((254 + 9) << 23) - power); /* 512 / power */
    i32 position = __builtin_convertvector(y * inverse, i32);
    return __builtin_convertvector((i32)(((u32)position + chance) >> 8), f32) * (f32)power;
}

/* Magnitudes to codes times block scales. */
INLINE pair round_pair(pair x, pair factor, pair scale, int32_t drawn, u32 even, u32 odd) {
    f32 e = smaller(x.even * factor.even, 6.0f), o = smaller(x.odd * factor.odd, 6.0f);
    if (drawn)
        return (pair){stochastic(e, even) * (scale.even * 0.5f), stochastic(o, odd) * (scale.odd * 0.5f)};
    return (pair){nearest(e, 1, 0) * scale.even, nearest(o, 1, 0) * scale.odd};
}

/* --- the amax ----------------------------------------------------------------------------------------------------------------- */

/* The larger of two bf16 in a lane, as fp32. */
INLINE f32 both(u32 most, int32_t bf16) { return (f32)(bf16 ? __builtin_elementwise_max(most << 16, most & 0xffff0000u) : most); }

INLINE float largest_of(u32 most, int32_t bf16) { return as_float(__builtin_reduce_max((i32)both(most, bf16))); }

INLINE float amax_of(const void *x, int64_t count, int32_t bf16) {
    raw most = {0};
    for (int64_t at = 0; at < count; at += 32) {
        raw v = without_signs(load(x, at, bf16, count - at > 16 ? 32 : 16), bf16);
        most = (raw){larger(most.first, v.first, bf16), larger(most.second, v.second, bf16)};
    }
    return largest_of(larger(most.first, most.second, bf16), bf16);
}

/* The largest magnitude of `count` elements, a multiple of 16; not finite where one of them is not. */
float amax(const void *x, int64_t count, int32_t bf16) { return bf16 ? amax_of(x, count, 1) : amax_of(x, count, 0); }

INLINE int finite(float magnitude) { return magnitude < __builtin_inff(); }

/* What all blocks share, from the amax. Return 0, which leaves the tensor to the reference, if that or 1 / S is not finite: a bound
   below 0.2 and an amax near the largest float make S subnormal, and the reference gives NaN for blocks whose scale is 0. */
static int prepare(spec *p) {
    if (!finite(p->amax))
        return 0;
    float scale = 6.0f * p->bound / p->amax;
    scale = scale < FLT_MAX ? scale : FLT_MAX;
    scale = p->amax == 0 || scale == 0 ? 1.0f : scale;
    p->multiplier = scale * (float)(1.0 / 6.0);
    if (p->headroom != 1.0f)
        p->multiplier *= p->headroom;
    p->inverse = 1.0f / scale;
    return finite(p->inverse);
}

/* --- blocks along rows -------------------------------------------------------------------------------------------------------- */

/* The lanes of a block are eight; here two vectors become one with four lanes each, then two, then one: blocks stay in order. */
INLINE u32 fold8(u32 a, u32 b, int32_t bf16) {
    return larger(__builtin_shufflevector(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 16, 17, 18, 19, 24, 25, 26, 27),
                  __builtin_shufflevector(a, b, 4, 5, 6, 7, 12, 13, 14, 15, 20, 21, 22, 23, 28, 29, 30, 31), bf16);
}

INLINE u32 fold4(u32 a, u32 b, int32_t bf16) {
    return larger(__builtin_shufflevector(a, b, 0, 1, 4, 5, 8, 9, 12, 13, 16, 17, 20, 21, 24, 25, 28, 29),
                  __builtin_shufflevector(a, b, 2, 3, 6, 7, 10, 11, 14, 15, 18, 19, 22, 23, 26, 27, 30, 31), bf16);
}

INLINE u32 fold2(u32 a, u32 b, int32_t bf16) {
    return larger(__builtin_shufflevector(a, b, 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30),
                  __builtin_shufflevector(a, b, 1, 3, 5, 7, 9, 11, 13, 15, 17, 19, 21, 23, 25, 27, 29, 31), bf16);
}

/* 255 less each random byte of sixteen blocks, from number `group`. */
INLINE void row_chances(uint32_t group, const spec *p, uint8_t chances[256]) {
    u64 w[4][2], counters[2] = {(u64){0, 1, 2, 3, 4, 5, 6, 7} + group, (u64){8, 9, 10, 11, 12, 13, 14, 15} + group};
    philox(counters, p->key, p->clock, w);
    UNROLL for (int h = 0; h < 2; h++) {
        u32 four[2];
        words_of_groups(w, h, four);
        *(memory *)(chances + 128 * h) = four[0], *(memory *)(chances + 128 * h + 64) = four[1];
    }
}

/* Two blocks, eight lanes each: the larger magnitudes of neighbours, bf16 by twos still. */
INLINE u32 pair_amax(raw v, int32_t bf16) {
    if (bf16)
        return without_signs(v, 1).first;
    pair wide = magnitudes(v, 0);
    return larger((u32)wide.even, (u32)wide.odd, 0);
}

/* The scales and factors of `here`, at most sixteen, blocks as one vector each. */
INLINE void row_scales(const void *x, int64_t at, int64_t here, const spec *p, float *scales, float *factors, u32 *most, int32_t bf16) {
    u32 m[8] = {0};
    UNROLL for (int v = 0; v < 8; v++)
        if (2 * v < here)
            m[v] = pair_amax(load(x, at + 32 * v, bf16, here - 2 * v > 1 ? 32 : 16), bf16);
    u32 quarter = fold4(fold8(m[0], m[1], bf16), fold8(m[2], m[3], bf16), bf16);
    u32 other = fold4(fold8(m[4], m[5], bf16), fold8(m[6], m[7], bf16), bf16);
    f32 largest = both(fold2(quarter, other, bf16), bf16);
    f32 scale = block_scale(largest, p);
    *most = larger(*most, (u32)largest, 0);
    *(memory *)scales = (u32)scale;
    *(memory *)factors = (u32)element_scale(scale, p);
}

/* The codes of two blocks, or one, times their scales. */
INLINE void row_codes(const void *x, int64_t at, int64_t count, const float *scales, const float *factors, const uint8_t *chances,
                      uint16_t *values, int32_t bf16, int32_t drawn) {
    u32 chance = drawn ? __builtin_convertvector(*(const u16_memory *)chances, u32) : (u32){0};
    f32 factor = halves(factors[0], factors[1]), scale = halves(scales[0], scales[1]);
    raw from = load(x, at, bf16, count);
    pair y = round_pair(magnitudes(from, bf16), (pair){factor, factor}, (pair){scale, scale}, drawn, chance & 255, chance >> 8);
    store(values, at, y, from, bf16, count);
}

enum { STRIP = 64 }; /* blocks */

INLINE void row_strip(const void *x, int64_t at, int64_t here, const spec *p, uint16_t *values, float *scales, u32 *most, int32_t bf16,
                      int32_t drawn) {
    float s[STRIP + 1], f[STRIP + 1];
    uint8_t chances[16 * STRIP];
    int64_t block = 0;
    for (; block + 16 <= here; block += 16)
        row_scales(x, at + 16 * block, 16, p, s + block, f + block, most, bf16);
    if (block < here)
        row_scales(x, at + 16 * block, here - block, p, s + block, f + block, most, bf16);
    memcpy(scales + at / 16, s, here * sizeof(float));
    for (block = 0; drawn && block < here; block += 16)
        row_chances((uint32_t)(at / 16 + block), p, chances + 16 * block);
    for (block = 0; block + 2 <= here; block += 2)
        row_codes(x, at + 16 * block, 32, s + block, f + block, chances + 16 * block, values, bf16, drawn);
    if (block < here)
        row_codes(x, at + 16 * block, 16, s + block, f + block, chances + 16 * block, values, bf16, drawn);
}

INLINE float rows_of(const void *x, int64_t count, int64_t columns, spec p, uint16_t *values, float *scales, int32_t bf16, int32_t drawn) {
    int64_t blocks = columns / 16;
    u32 most = {0};
    for (int64_t row = 0; row < count; row++)
        for (int64_t first = 0; first < blocks; first += STRIP) {
            int64_t here = blocks - first < STRIP ? blocks - first : STRIP;
            row_strip(x, row * columns + 16 * first, here, &p, values, scales, &most, bf16, drawn);
        }
    return largest_of(most, 0);
}

/* Blocks along rows of x [rows, columns], columns a multiple of 16: values alike, scales [rows, columns / 16]. 0: x is not finite. */
int rows(const void *x, int64_t count, int64_t columns, spec *p, uint16_t *values, float *scales) {
    if (p->amax < 0)
        p->amax = amax(x, count * columns, p->bf16);
    if (!prepare(p))
        return 0;
    if (p->bf16 && p->stochastic)
        p->largest = rows_of(x, count, columns, *p, values, scales, 1, 1);
    else if (p->bf16)
        p->largest = rows_of(x, count, columns, *p, values, scales, 1, 0);
    else if (p->stochastic)
        p->largest = rows_of(x, count, columns, *p, values, scales, 0, 1);
    else
        p->largest = rows_of(x, count, columns, *p, values, scales, 0, 0);
    return finite(p->largest);
}

/* --- blocks along columns, and tiles ------------------------------------------------------------------------------------------ */

/* Sixteen rows of a Hadamard rotation: signs, butterflies in order of distance, a quarter, one rounding to bf16 (upper halves). The
   order is hadamard.py's, so that every machine adds alike. */
INLINE void rotate(f32 t[16], uint32_t signs) {
    UNROLL for (int r = 0; r < 16; r++)
        t[r] = (f32)((u32)t[r] ^ ((signs >> r & 1) << 31));
    UNROLL for (int distance = 1; distance < 16; distance *= 2)
        UNROLL for (int r = 0; r < 16; r++)
            if (!(r & distance)) {
                f32 a = t[r], b = t[r + distance];
                t[r] = a + b, t[r + distance] = a - b;
            }
    UNROLL for (int r = 0; r < 16; r++) {
        u32 bits = (u32)(t[r] * 0.25f);
        t[r] = (f32)(bits + 0x7fff + (bits >> 16 & 1));
    }
}

INLINE u32 rotate_tile(const void *x, int64_t at, int64_t width, int64_t count, uint32_t signs, uint16_t *out) {
    f32 even[16], odd[16];
    u32 most = {0};
    UNROLL for (int r = 0; r < 16; r++) {
        even[r] = widen(load(x, at + r * width, 1, count), 1).even;
        __builtin_prefetch((const uint16_t *)x + at + (r + 16) * width); /* sixteen rows at once are more than hardware follows */
    }
    rotate(even, signs);
    UNROLL for (int r = 0; r < 16; r++)
        odd[r] = widen(load(x, at + r * width, 1, count), 1).odd;
    rotate(odd, signs);
    UNROLL for (int r = 0; r < 16; r++) {
        raw turned = {narrow((pair){even[r], odd[r]})};
        store_raw(out, at + r * width, turned.first, count);
        most = larger(most, without_signs(turned, 1).first, 1);
    }
    return most;
}

/* The columns of bf16 x [rows, columns], both multiples of 16, rotated into `out`; returns the largest magnitude there. */
float turn(const void *x, int64_t count, int64_t width, uint32_t signs, uint16_t *out) {
    u32 most = {0};
    for (int64_t row = 0; row < count; row += 16) {
        int64_t column = 0;
        for (; column + 32 <= width; column += 32)
            most = larger(most, rotate_tile(x, row * width + column, width, 32, signs, out), 1);
        if (column < width)
            most = larger(most, rotate_tile(x, row * width + column, width, 16, signs, out), 1);
    }
    return largest_of(most, 1);
}

/* The eight lanes of a tile, even and odd, share the largest. */
INLINE u32 tile_amax(pair v) {
    u32 m = larger((u32)v.even, (u32)v.odd, 0);
    m = larger(m, __builtin_shufflevector(m, m, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11), 0);
    m = larger(m, __builtin_shufflevector(m, m, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13), 0);
    return larger(m, __builtin_shufflevector(m, m, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14), 0);
}

/* Scales and factors of sixteen rows of `count` columns, or of the tiles there. */
INLINE void column_scales(const void *x, int64_t at, int64_t width, int64_t count, const spec *p, float *scales, pair *s, pair *f,
                          u32 *seen, int32_t bf16, int32_t tiled) {
    raw most = {0};
    UNROLL for (int r = 0; r < 16; r++) {
        raw v = without_signs(load(x, at + r * width, bf16, count), bf16);
        most = (raw){larger(most.first, v.first, bf16), larger(most.second, v.second, bf16)};
    }
    pair largest = widen(most, bf16);
    *seen = larger(*seen, larger((u32)largest.even, (u32)largest.odd, 0), 0);
    if (tiled) {
        f32 scale = block_scale((f32)tile_amax(largest), p), factor = element_scale(scale, p);
        *s = (pair){scale, scale}, *f = (pair){factor, factor};
        scales[0] = scale[0];
        if (count == 32)
            scales[1] = scale[8];
    } else {
        *s = (pair){block_scale(largest.even, p), block_scale(largest.odd, p)};
        *f = (pair){element_scale(s->even, p), element_scale(s->odd, p)};
        store_scales(scales, *s, count);
    }
}

/* 255 less each random byte of sixteen columns, every other one from `column`: four rows a word. */
INLINE void column_chances(int64_t column, int64_t block, int64_t blocks, const spec *p, u32 chances[4]) {
    u64 w[4][2], places[2] = {(u64){0, 2, 4, 6, 8, 10, 12, 14} + column, (u64){16, 18, 20, 22, 24, 26, 28, 30} + column};
    u64 counters[2] = {places[0] * blocks + block, places[1] * blocks + block};
    philox(counters, p->key, p->clock, w);
    UNROLL for (int i = 0; i < 4; i++)
        chances[i] = ~__builtin_shufflevector((u32)w[i][0], (u32)w[i][1], 0, 2, 4, 6, 8, 10, 12, 14, 16, 18, 20, 22, 24, 26, 28, 30);
}

INLINE void column_codes(const void *x, int64_t at, int64_t width, int64_t count, pair s, pair f, const u32 even[4], const u32 odd[4],
                         uint16_t *values, int32_t bf16, int32_t drawn) {
    UNROLL for (int r = 0; r < 16; r++) {
        raw from = load(x, at + r * width, bf16, count);
        u32 e = even[r / 4] >> 8 * (r % 4) & 255, o = odd[r / 4] >> 8 * (r % 4) & 255;
        store(values, at + r * width, round_pair(magnitudes(from, bf16), f, s, drawn, e, o), from, bf16, count);
    }
}

enum { WIDE = 4 }; /* times thirty-two columns */

INLINE void column_strip(const void *x, int64_t block, int64_t first, int64_t end, int64_t blocks, int64_t width, const spec *p,
                         uint16_t *values, float *scales, u32 *seen, int32_t bf16, int32_t drawn, int32_t tiled) {
    pair s[WIDE], f[WIDE];
    u32 even[4] = {0}, odd[4] = {0};
    int64_t at = block * 16 * width, each = tiled ? 16 : 1, column = first;
    float *here = scales + block * (width / each);
    for (int64_t tile = 0; column < end; column += 32, tile++)
        if (column + 32 <= end)
            column_scales(x, at + column, width, 32, p, here + column / each, s + tile, f + tile, seen, bf16, tiled);
        else
            column_scales(x, at + column, width, 16, p, here + column / each, s + tile, f + tile, seen, bf16, tiled);
    column = first;
    for (int64_t tile = 0; column < end; column += 32, tile++) {
        if (drawn) {
            column_chances(column, block, blocks, p, even);
            column_chances(column + 1, block, blocks, p, odd);
        }
        if (column + 32 <= end)
            column_codes(x, at + column, width, 32, s[tile], f[tile], even, odd, values, bf16, drawn);
        else
            column_codes(x, at + column, width, 16, s[tile], f[tile], even, odd, values, bf16, drawn);
    }
}

INLINE float columns_of(const void *x, int64_t count, int64_t width, spec p, uint16_t *values, float *scales, int32_t bf16,
                        int32_t drawn, int32_t tiled) {
    int64_t blocks = count / 16;
    u32 seen = {0};
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t first = 0; first < width; first += 32 * WIDE) {
            int64_t end = first + 32 * WIDE < width ? first + 32 * WIDE : width;
            column_strip(x, block, first, end, blocks, width, &p, values, scales, &seen, bf16, drawn, tiled);
        }
    return largest_of(seen, 0);
}

/* Blocks along columns of x [rows, columns], both multiples of 16, rotated first where asked (bf16): values alike, scales [rows / 16,
   columns]. 0: x is not finite. */
int columns(const void *x, int64_t count, int64_t width, spec *p, uint16_t *values, float *scales) {
    float turned = p->rotated ? turn(x, count, width, p->signs, values) : 0;
    if (p->amax < 0) /* a given amax stands, of rotated columns too */
        p->amax = p->rotated ? turned : amax(x, count * width, p->bf16);
    if (!prepare(p))
        return 0;
    x = p->rotated ? values : x;
    if (p->bf16 && p->stochastic)
        p->largest = columns_of(x, count, width, *p, values, scales, 1, 1, 0);
    else if (p->bf16)
        p->largest = columns_of(x, count, width, *p, values, scales, 1, 0, 0);
    else if (p->stochastic)
        p->largest = columns_of(x, count, width, *p, values, scales, 0, 1, 0);
    else
        p->largest = columns_of(x, count, width, *p, values, scales, 0, 0, 0);
    return finite(p->largest);
}

/* 16x16 tiles of x [rows, columns], both multiples of 16, to nearest: values alike, scales [rows / 16, columns / 16]. 0: not finite. */
int tiles(const void *x, int64_t count, int64_t width, spec *p, uint16_t *values, float *scales) {
    if (p->amax < 0)
        p->amax = amax(x, count * width, p->bf16);
    if (!prepare(p))
        return 0;
    if (p->bf16)
        p->largest = columns_of(x, count, width, *p, values, scales, 1, 0, 1);
    else
        p->largest = columns_of(x, count, width, *p, values, scales, 0, 0, 1);
    return finite(p->largest);
}
