/* NVFP4 quantisation of E2M1 blocks of 16 with E4M3 scales, in one pass after the amax.

   Sixteen elements are one block and one vector. The arithmetic is that of the reference (scaling.py, rounding.py, philox.py), operation
   by operation, so the bits are the same: compiled without contraction, reassociation or reciprocals. Only finite tensors come here.

   Three layouts: `rows`, blocks along a row; `columns`, blocks along a column of the same memory (the transposed operand, without
   transposing it); `tiles`, 16x16. Each takes bf16 or fp32 and writes bf16 values, code times block scale, and the fp32 scales. */

#include <stdint.h>
#include <string.h>

typedef float f32 __attribute__((vector_size(64)));
typedef int32_t i32 __attribute__((vector_size(64)));
typedef uint32_t u32 __attribute__((vector_size(64)));
typedef uint64_t u64 __attribute__((vector_size(128)));
typedef uint16_t u16 __attribute__((vector_size(32)));
typedef uint8_t u8 __attribute__((vector_size(16)));

#define FLT_MAX 3.40282346638528859811704183484516925e+38f
#define ROUND 12582912.0f /* 1.5 * 2^23: adding and subtracting it rounds a small float to the nearest even integer */

typedef struct {
    float amax, bound, headroom; /* of the tensor; largest block scale; room above a block's maximum */
    int32_t bf16, stochastic, rotated;
    uint32_t signs;
    uint32_t key[2], clock[3]; /* Philox: seed and stream; step, micro-batch, site */
    float scale, multiplier;   /* filled in here: S, and S / 6 times the headroom */
} spec;

static void prepare(spec *p) {
    float scale = 6.0f * p->bound / p->amax;
    scale = scale < FLT_MAX ? scale : FLT_MAX;
    p->scale = p->amax == 0 || scale == 0 ? 1.0f : scale;
    p->multiplier = p->scale * (float)(1.0 / 6.0);
    if (p->headroom != 1.0f)
        p->multiplier *= p->headroom;
}

static inline f32 splat(float x) { return x - (f32){0}; }
static inline f32 magnitude(f32 x) { return (f32)((i32)x & 0x7fffffff); }
static inline f32 smaller(f32 a, float b) { return __builtin_elementwise_min(a, splat(b)); }
static inline f32 larger(f32 a, f32 b) { return __builtin_elementwise_max(a, b); }

static inline float as_float(int32_t bits) {
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline f32 load(const void *x, int64_t at, int32_t bf16) {
    if (bf16) {
        u16 half;
        memcpy(&half, (const uint16_t *)x + at, sizeof half);
        return (f32)(__builtin_convertvector(half, u32) << 16);
    }
    f32 full;
    memcpy(&full, (const float *)x + at, sizeof full);
    return full;
}

/* Values with at most 8 significant bits are the upper halves of their fp32. */
static inline void store(uint16_t *out, int64_t at, f32 value) {
    u16 half = __builtin_convertvector((u32)value >> 16, u16);
    memcpy(out + at, &half, sizeof half);
}

/* The distance between neighbours: 2^(exponent, at least emin, minus mantissa bits). */
static inline f32 step_of(f32 y, int32_t mantissa, int32_t emin) {
    i32 exponent = (i32)y & 0x7f800000;
    exponent = __builtin_elementwise_max(exponent, (i32){0} + ((emin + 127) << 23));
    return (f32)(exponent - (mantissa << 23));
}

static inline f32 inverse(f32 power) { return (f32)((254 << 23) - (i32)power); }

static inline f32 nearest(f32 y, f32 step) { return ((y * inverse(step) + ROUND) - ROUND) * step; }

static inline f32 e4m3(f32 scale) {
    scale = smaller(scale, 448.0f);
    return nearest(scale, step_of(scale, 3, -6));
}

static inline f32 block_scale(f32 amax, const spec *p) { return e4m3(smaller(amax * p->multiplier, FLT_MAX)); }

static inline f32 element_scale(f32 scale, const spec *p) { return smaller(1.0f / (scale * (1.0f / p->scale)), FLT_MAX); }

/* Away from zero where floor(256 f) exceeds the random byte, f the position between the two neighbours. */
static inline f32 stochastic(f32 y, f32 step, f32 bits) {
    f32 position = y * inverse(step);
    f32 lower = __builtin_elementwise_floor(position);
    f32 up = (position - lower) * 256.0f - bits;
    return (lower + (f32)((up >= 1.0f) & (i32)splat(1.0f))) * step;
}

static inline f32 e2m1(f32 y, int32_t stochastically, f32 bits) {
    f32 size = smaller(magnitude(y), 6.0f);
    f32 step = step_of(size, 1, 0);
    f32 rounded = stochastically ? stochastic(size, step, bits) : nearest(size, step);
    return (f32)((i32)rounded | ((i32)y & INT32_MIN));
}

/* Philox4x32-10 on sixteen counters at once; word w of counter i is out[w][i]. */
static inline void philox(u32 group, const spec *p, u32 out[4]) {
    u32 c0 = group, c1 = (u32){0} + p->clock[0], c2 = (u32){0} + p->clock[1], c3 = (u32){0} + p->clock[2];
    uint32_t k0 = p->key[0], k1 = p->key[1];
    for (int round = 0; round < 10; round++) {
        u64 a = __builtin_convertvector(c0, u64) * 0xD2511F53u, b = __builtin_convertvector(c2, u64) * 0xCD9E8D57u;
        c0 = __builtin_convertvector(b >> 32, u32) ^ c1 ^ k0;
        c1 = __builtin_convertvector(b, u32);
        c2 = __builtin_convertvector(a >> 32, u32) ^ c3 ^ k1;
        c3 = __builtin_convertvector(a, u32);
        k0 += 0x9E3779B9u;
        k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
}

static const u32 LANES = {0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15};

/* The largest magnitude of `count` elements; not finite where one of them is not. */
float amax(const void *x, int64_t count, int32_t bf16) {
    i32 most = {0};
    int64_t at = 0;
    for (; at + 16 <= count; at += 16) {
        i32 bits = (i32)magnitude(load(x, at, bf16));
        most = __builtin_elementwise_max(bits, most);
    }
    int32_t best = __builtin_reduce_max(most);
    for (; at < count; at++) {
        int32_t bits = bf16 ? (int32_t)((uint32_t)((const uint16_t *)x)[at] << 16) : ((const int32_t *)x)[at];
        bits &= 0x7fffffff;
        best = bits > best ? bits : best;
    }
    return as_float(best);
}

/* Blocks along rows of x [rows, columns], columns a multiple of 16: values alike, scales [rows, columns / 16]. */
void rows(const void *x, int64_t count, int64_t columns, spec *p, uint16_t *values, float *scales) {
    prepare(p);
    int64_t blocks = columns / 16;
    for (int64_t row = 0; row < count; row++)
        for (int64_t first = 0; first < blocks; first += 16) { /* up to sixteen blocks, their scales as one vector */
            int64_t here = blocks - first < 16 ? blocks - first : 16, at = row * columns + first * 16;
            f32 largest = {0};
            for (int64_t b = 0; b < here; b++)
                ((int32_t *)&largest)[b] = __builtin_reduce_max((i32)magnitude(load(x, at + 16 * b, p->bf16)));
            f32 scale = block_scale(largest, p), factor = element_scale(scale, p);
            memcpy(scales + row * blocks + first, &scale, here * sizeof(float));
            u32 words[4];
            if (p->stochastic)
                philox(LANES + (uint32_t)(row * blocks + first), p, words);
            for (int64_t b = 0; b < here; b++) {
                f32 bits = {0};
                if (p->stochastic) {
                    uint32_t four[4] = {words[0][b], words[1][b], words[2][b], words[3][b]};
                    u8 bytes;
                    memcpy(&bytes, four, sizeof bytes);
                    bits = __builtin_convertvector(bytes, f32);
                }
                f32 y = load(x, at + 16 * b, p->bf16) * factor[b];
                store(values, at + 16 * b, e2m1(y, p->stochastic, bits) * scale[b]);
            }
        }
}

/* Sixteen rows of a Hadamard rotation: signs (a bit a row, set for -), butterflies in order of distance, a quarter, one rounding to
   bf16. The order is hadamard.py's, so that every machine adds alike. */
static inline void rotate(f32 t[16], uint32_t signs) {
    for (int r = 0; r < 16; r++)
        t[r] = (f32)((u32)t[r] ^ ((u32){0} + ((signs >> r & 1) << 31)));
    for (int distance = 1; distance < 16; distance *= 2)
        for (int r = 0; r < 16; r++)
            if (!(r & distance)) {
                f32 a = t[r], b = t[r + distance];
                t[r] = a + b, t[r + distance] = a - b;
            }
    for (int r = 0; r < 16; r++) {
        u32 bits = (u32)(t[r] * 0.25f);
        t[r] = (f32)((bits + 0x7fff + (bits >> 16 & 1)) & 0xffff0000u);
    }
}

static inline void column_tile(const void *x, int64_t at, int64_t width, int32_t bf16, int32_t rotated, uint32_t signs, f32 tile[16]) {
    for (int64_t r = 0; r < 16; r++)
        tile[r] = load(x, at + r * width, bf16);
    if (rotated)
        rotate(tile, signs);
}

/* The largest magnitude of x [rows, columns], both multiples of 16, once its columns are rotated. */
float rotated_amax(const void *x, int64_t count, int64_t width, int32_t bf16, uint32_t signs) {
    i32 most = {0};
    for (int64_t row = 0; row < count; row += 16)
        for (int64_t column = 0; column < width; column += 16) {
            f32 tile[16];
            column_tile(x, row * width + column, width, bf16, 1, signs, tile);
            for (int r = 0; r < 16; r++)
                most = __builtin_elementwise_max((i32)magnitude(tile[r]), most);
        }
    return as_float(__builtin_reduce_max(most));
}

/* Blocks along columns of x [rows, columns], both multiples of 16, rotated first where asked: values alike, scales [rows / 16, columns]. */
void columns(const void *x, int64_t count, int64_t width, spec *p, uint16_t *values, float *scales) {
    prepare(p);
    int64_t blocks = count / 16;
    for (int64_t block = 0; block < blocks; block++)
        for (int64_t column = 0; column < width; column += 16) { /* sixteen columns side by side */
            int64_t at = block * 16 * width + column;
            f32 tile[16], largest = {0};
            column_tile(x, at, width, p->bf16, p->rotated, p->signs, tile);
            for (int64_t r = 0; r < 16; r++)
                largest = larger(magnitude(tile[r]), largest);
            f32 scale = block_scale(largest, p), factor = element_scale(scale, p);
            memcpy(scales + block * width + column, &scale, sizeof scale);
            u32 words[4];
            if (p->stochastic)
                philox((LANES + (uint32_t)column) * (uint32_t)blocks + (uint32_t)block, p, words);
            for (int64_t r = 0; r < 16; r++) {
                f32 bits = {0};
                if (p->stochastic)
                    bits = __builtin_convertvector((i32)(words[r / 4] >> 8 * (r % 4) & 255), f32);
                store(values, at + r * width, e2m1(tile[r] * factor, p->stochastic, bits) * scale);
            }
        }
}

/* 16x16 tiles of x [rows, columns], both multiples of 16, to nearest: values alike, scales [rows / 16, columns / 16]. */
void tiles(const void *x, int64_t count, int64_t width, spec *p, uint16_t *values, float *scales) {
    prepare(p);
    for (int64_t block = 0; block < count / 16; block++)
        for (int64_t column = 0; column < width; column += 16) {
            int64_t at = block * 16 * width + column;
            f32 tile[16], largest = {0};
            column_tile(x, at, width, p->bf16, 0, 0, tile);
            for (int64_t r = 0; r < 16; r++)
                largest = larger(magnitude(tile[r]), largest);
            i32 most = (i32){0} + __builtin_reduce_max((i32)largest);
            f32 scale = block_scale((f32)most, p), factor = element_scale(scale, p);
            scales[block * (width / 16) + column / 16] = scale[0];
            for (int64_t r = 0; r < 16; r++)
                store(values, at + r * width, e2m1(tile[r] * factor, 0, (f32){0}) * scale);
        }
}
