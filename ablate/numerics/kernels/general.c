/* Quantisation to every other form: any grid, block scales of any format, exponents of sub-blocks, outer scales of a tensor, some rows
   or 128 elements.

   One kernel for all of them, over a description of the form. It takes a matrix row by row, blocks along the row: a row, or the rows
   of square blocks, lies in a buffer as fp32 while its maxima, scales and codes are made one after the other. The arithmetic is the
   reference's (quantize.py, scaling.py, rounding.py, select.py), operation by operation. Only finite tensors are rounded. */

#include <stdlib.h>

#include "lanes.h"
#include "philox.h"

enum { NEAREST, AWAY, FLOOR, CEIL, STOCHASTIC };     /* roundings */
enum { GRID, POWER_OF_TWO, BF16, FP32 };             /* formats of block scales */
enum { NO_OUTER, TENSOR, ROW, BLOCK_128, ROWS };     /* what shares an outer scale */
enum { AMAX, RMS, STD };                             /* statistics of blocks */
enum { NO_SELECTION, MSE, MAE, ABSMAX };             /* Four Over Six's criteria */

typedef struct {
    int32_t mantissa, least; /* of the grid: stored bits, exponent of the smallest normal */
    float top;               /* its largest magnitude */
    int32_t rounding;
} grid;

typedef struct {
    grid element, scale;
    int32_t bits;                         /* random bits of an element */
    int32_t scale_format;                 /* which of the four; `scale` is its grid */
    int32_t tile_rows, tile_columns;      /* of a block; 0: there are no block scales */
    float zero;                           /* what a scale that rounds to zero becomes */
    float map, headroom, prescale;        /* 1 / what the block's statistic maps to; factors of its scale and of the elements */
    int32_t statistic;                    /* of a block */
    float spread;                         /* how many times that */
    int32_t outer, selection, group;      /* the outer scale; a criterion; elements whose scales MS-EDEN corrects together, or 0 */
    float outer_top, divisor;             /* largest element times bound; 1 / that */
    int32_t bf16, wide;                   /* what x is; whether the values are fp32 */
    uint32_t key[2], clock[3];            /* Philox: seed and stream; step, micro-batch, site */
    float amax;                           /* of the tensor, or what counts as that */
    float largest;                        /* filled in: the largest magnitude */
    int32_t outer_rows;                   /* that share an outer scale of rows, a multiple of those of a block */
    float halve;                          /* a block's scale where what it was rounded from is less than this part of it; 0: never */
    float pair[2];                        /* what the candidates' scales are of the one that maps to 6 */
    int32_t grids;                        /* whether the candidates are two grids of one scale instead */
    float smallest;                       /* scale of a format without zero and subnormals; else 0 */
    int32_t levels, lengths[5];           /* of sub-blocks with an exponent of their own: powers of two up to 16, falling */
    float unit;                           /* what a block's largest magnitude is divided by, inverted, in bf16 */
} form;

/* By which a caller sees that its description is this one. */
int32_t form_size(void) { return sizeof(form); }

/* --- maxima ------------------------------------------------------------------------------------------------------------------- */

#define FOLD(a, b, first, second) larger(__builtin_shufflevector(a, b, first), __builtin_shufflevector(a, b, second), 0)

/* The largest lane of each of sixteen vectors of magnitudes: two vectors become one, with half as many lanes of each, four times. */
INLINE f32 largest_lanes(const u32 t[16]) {
    u32 eights[8], fours[4], twos[2];
    UNROLL for (int v = 0; v < 8; v++)
        eights[v] = FOLD(t[v], t[v + 8], LIST(0, 1, 2, 3, 4, 5, 6, 7, 16, 17, 18, 19, 20, 21, 22, 23),
                         LIST(8, 9, 10, 11, 12, 13, 14, 15, 24, 25, 26, 27, 28, 29, 30, 31));
    UNROLL for (int v = 0; v < 4; v++)
        fours[v] = FOLD(eights[v], eights[v + 4], LIST(0, 1, 2, 3, 16, 17, 18, 19, 8, 9, 10, 11, 24, 25, 26, 27),
                        LIST(4, 5, 6, 7, 20, 21, 22, 23, 12, 13, 14, 15, 28, 29, 30, 31));
    UNROLL for (int v = 0; v < 2; v++)
        twos[v] = FOLD(fours[v], fours[v + 2], LIST(0, 1, 16, 17, 4, 5, 20, 21, 8, 9, 24, 25, 12, 13, 28, 29),
                       LIST(2, 3, 18, 19, 6, 7, 22, 23, 10, 11, 26, 27, 14, 15, 30, 31));
    return (f32)FOLD(twos[0], twos[1], LIST(0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30),
                     LIST(1, 17, 3, 19, 5, 21, 7, 23, 9, 25, 11, 27, 13, 29, 15, 31));
}

/* --- random bits -------------------------------------------------------------------------------------------------------------- */

typedef struct {
    uint8_t chances[16 * 64]; /* of sixteen groups of elements: 8, 16 or 32 bits each, in order */
    int64_t chunk;            /* which groups, in sixteens; below 0: none yet */
    uint32_t key[2], clock[3];
    int32_t width;
} drawn;

static drawn drawn_by(const uint32_t key[2], const uint32_t clock[3], int32_t width, uint32_t purpose) {
    drawn d = {.chunk = -1, .key = {key[0], key[1] | purpose << 4}, .width = width};
    memcpy(d.clock, clock, sizeof d.clock);
    return d;
}

/* Draws sixteen groups: `calls` of the generator for each, four words a call. */
INLINE void draw_chunk(drawn *d, int64_t chunk, int32_t calls) {
    u64 lanes = {0, 1, 2, 3, 4, 5, 6, 7}, w[4][2];
    u64 counters[2] = {lanes + (uint32_t)(16 * chunk), lanes + (uint32_t)(16 * chunk + 8)};
    for (int32_t call = 0; call < calls; call++) {
        uint32_t key[2] = {d->key[0], d->key[1] | (uint32_t)call};
        philox(counters, key, d->clock, w);
        UNROLL for (int h = 0; h < 2; h++) {
            u32 four[2];
            words_of_groups(w, h, four);
            UNROLL for (int half = 0; half < 2; half++)
                if (calls == 1)
                    *(memory *)(d->chances + 128 * h + 64 * half) = four[half];
                else
                    UNROLL for (int g = 0; g < 4; g++)
                        memcpy(d->chances + 16 * (calls * (8 * h + 4 * half + g) + call), (char *)&four[half] + 16 * g, 16);
        }
    }
    d->chunk = chunk;
}

/* 2^width - 1 less the random bits of each of the sixteen elements of a group. */
INLINE u32 draw(drawn *d, int64_t group, int32_t width) {
    if (d->chunk != (int64_t)((uint64_t)group / 16))
        width == 8 ? draw_chunk(d, group / 16, 1) : width == 16 ? draw_chunk(d, group / 16, 2) : draw_chunk(d, group / 16, 4);
    const uint8_t *chances = d->chances + (uint64_t)group % 16 * (width == 8 ? 16 : width == 16 ? 32 : 64);
    if (width == 8)
        return __builtin_convertvector(*(const u8_memory *)chances, u32);
    if (width == 16)
        return __builtin_convertvector(*(const u16_memory *)chances, u32);
    return *(const memory *)chances & 0xffffffu;
}

/* The random bits of `groups` groups of sixteen elements, as fp32. */
void random_bits(const uint32_t *key, const uint32_t *clock, int32_t width, int64_t groups, float *out) {
    drawn d = drawn_by(key, clock, width, 0);
    for (int64_t group = 0; group < groups; group++) {
        u32 bits = ((1u << width) - 1) - draw(&d, group, width);
        *(f32_memory *)(out + 16 * group) = __builtin_convertvector((i32)bits, f32);
    }
}

/* --- grids -------------------------------------------------------------------------------------------------------------------- */

/* Up where floor(2^width f) exceeds the random bits, f the part of the position after the point: so a carry decides. */
INLINE f32 up_by_chance(f32 position, u32 chances, int32_t width) {
    f32 whole = (f32)((i32){0} + ((width + 127) << 23)); /* 2^width */
    u32 fixed = (u32)__builtin_convertvector(position * whole, i32);
    return __builtin_convertvector((i32)((fixed + chances) >> width), f32);
}

/* Scales y >= 0 to a grid, any rounding; the step may be as large as 2^127, so that its inverse is no normal number. */
INLINE f32 on_grid(f32 y, const grid *to, u32 chances) {
    y = smaller(y, to->top);
    f32 step = (f32)(exponent(y, to->least) - (to->mantissa << 23)), position = y / step, lower = truncated(position);
    f32 part = position - lower, rounded = lower;
    switch (to->rounding) {
    case NEAREST: {
        f32 half = splat(12582912.0f); /* 1.5 * 2^23: adding it rounds to an integer */
        rounded = (position + half) - half;
        if (to->mantissa == 0) { /* of two powers of two, the even code has the even exponent field */
            i32 even = ((((i32)step >> 23) - 126 - to->least) & 1) == 0;
            rounded = where((position == 1.5f) & even, lower, rounded);
        }
        break;
    }
    case AWAY:
        rounded = lower + one_if(part >= 0.5f);
        break;
    case STOCHASTIC:
        rounded = up_by_chance(position, chances, 24);
        break;
    case CEIL:
        rounded = lower + one_if(part > 0.0f);
    }
    return rounded * step;
}

/* The block scales of sixteen blocks in their format; `chances` of 24 bits. */
INLINE f32 round_scale(f32 scale, const form *f, const grid *to, u32 chances) {
    f32 rounded;
    if (f->smallest != 0)
        scale = __builtin_elementwise_max(scale, splat(f->smallest));
    if (f->scale_format == POWER_OF_TWO) { /* lifted, since the smallest are subnormal */
        f32 lift = where(scale < 0x1p-60f, splat(0x1p40f), splat(1.0f));
        rounded = on_grid(__builtin_elementwise_max(scale, splat(0x1p-127f)) * lift, to, chances) / lift;
        return smaller(__builtin_elementwise_max(rounded, splat(0x1p-127f)), to->top);
    }
    if (f->scale_format == BF16)
        rounded = (f32)(__builtin_convertvector(to_bf16(smaller(scale, to->top)), u32) << 16);
    else if (f->scale_format == FP32)
        rounded = smaller(scale, to->top);
    else
        rounded = on_grid(scale, to, chances);
    return f->zero == 0 ? rounded : where(rounded == 0.0f, splat(f->zero), rounded);
}

/* Magnitudes of elements, scaled, to their grid; `width` of the random bits, 0: to nearest, or away from zero. */
INLINE f32 round_elements(f32 y, const form *f, int32_t rounding, u32 chances, int32_t width) {
    y = smaller(y, f->element.top);
    i32 power = exponent(y, f->element.least), step = power - (f->element.mantissa << 23);
    if (rounding == NEAREST) { /* adding a power of two whose neighbours lie a step apart rounds to the step */
        f32 far = (f32)(step + (23 << 23));
        return (y + far) - far;
    }
    f32 position = y * (f32)((254 << 23) - step);
    if (rounding == STOCHASTIC)
        return up_by_chance(position, chances, width) * (f32)step;
    f32 lower = truncated(position);
    return (lower + one_if(position - lower >= 0.5f)) * (f32)step;
}

/* --- one band of rows --------------------------------------------------------------------------------------------------------- */

typedef struct {
    float *z;                            /* the rows as fp32, `width` each */
    float *groups;                       /* largest magnitude of each sixteen columns, then of each block */
    float *amax, *scale, *factor;        /* of each block: what stands for S, the block scale, the elements' factor */
    drawn elements, scales;
    int64_t width, blocks;
    float shared;                        /* the outer statistic, where the blocks of the band have one */
    int32_t lost;                        /* whether a factor is not finite, which the reference must treat */
} band;

INLINE int64_t across(const band *b) { return (b->blocks + 15) / 16; } /* groups of random bits for the scales of a band */

/* Loads 256 columns of a row, zeros after `count`, and returns the largest magnitudes of its sixteens. */
INLINE f32 load_part(const void *x, int64_t at, float *z, int64_t count, int64_t width, int32_t bf16) {
    u32 t[16];
    UNROLL for (int v = 0; v < 16; v++) {
        f32 loaded = {0};
        if (count > 16 * v)
            loaded = load_some(x, at + 16 * v, bf16, count - 16 * v);
        if (width > 16 * v)
            *(f32_memory *)(z + 16 * v) = loaded;
        t[v] = (u32)magnitude(loaded);
    }
    return largest_lanes(t);
}

/* Loads rows and finds the largest magnitude of every sixteen columns. */
INLINE void load_band(const void *x, int64_t row, int64_t rows, int64_t columns, band *b, int32_t bf16) {
    for (int64_t r = 0; r < rows; r++)
        for (int64_t first = 0; first < b->width; first += 256) {
            float *z = b->z + r * b->width + first;
            int64_t at = (row + r) * columns + first, count = columns - first;
            f32 most = count >= 256 ? load_part(x, at, z, 256, 256, bf16) : load_part(x, at, z, count, b->width - first, bf16);
            f32_memory *groups = (f32_memory *)(b->groups + first / 16);
            *groups = r ? (f32)larger((u32)*groups, (u32)most, 0) : most;
        }
}

INLINE float larger_of(float a, float b) { return a > b ? a : b; }

/* From the maxima of sixteens to those of blocks, in place; returns the largest, NaN where one is. */
INLINE u32 block_maxima(band *b, int32_t columns) {
    u32 most = {0};
    for (int64_t group = 0; group < b->width / 16; group += 16) {
        int64_t here = b->width / 16 - group;
        most = larger(most, (u32)load_some(b->groups, group, 0, here), 0);
    }
    int64_t each = columns / 16;
    for (int64_t block = 0; each > 1 && block < b->blocks; block++) {
        float largest = b->groups[block * each];
        for (int64_t g = 1; g < each; g++)
            largest = larger_of(largest, b->groups[block * each + g]);
        b->groups[block] = largest;
    }
    return most;
}

/* Sum of vectors, a power of two of them: the second half onto the first, and so on. */
INLINE f32 fold_vectors(f32 *t, int64_t count) {
    for (int64_t half = count / 2; half; half /= 2)
        for (int64_t v = 0; v < half; v++)
            t[v] += t[v + half];
    return t[0];
}

/* The same, then of the lanes. */
INLINE float tree(f32 *t, int64_t count) {
    f32 v = fold_vectors(t, count);
    v = v + __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    v = v + __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    v = v + __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    return v[0] + v[1];
}

/* The root mean square of sixteen blocks of a row, or their standard deviation: a lane each. `lift` keeps squares in fp32's range. */
INLINE f32 spread_of(const band *b, int64_t first, int64_t length, int32_t centred) {
    f32 t[128], u[128], mean = {0}, largest = *(const f32_memory *)(b->groups + first);
    f32 lift = where(largest < 0x1p-50f, splat(0x1p96f), where(largest > 0x1p50f, splat(0x1p-96f), splat(1.0f)));
    for (int64_t chunk = 0; chunk < length; chunk += 16) {
        for (int64_t v = 0; v < 16; v++)
            t[chunk + v] = first + v < b->blocks ? *(const f32_memory *)(b->z + (first + v) * length + chunk) * lift[v] : (f32){0};
        transpose(t + chunk);
    }
    if (centred) {
        memcpy(u, t, length * sizeof *t);
        mean = fold_vectors(u, length) / (float)length;
    }
    for (int64_t e = 0; e < length; e++)
        t[e] = (t[e] - mean) * (t[e] - mean);
    return __builtin_elementwise_sqrt(fold_vectors(t, length) / (float)length) / lift;
}

/* S of an outer statistic. */
INLINE f32 encode_scale(f32 amax, const form *f) {
    f32 scale = smaller(f->outer_top / amax, FLT_MAX);
    return where((amax == 0.0f) | (scale == 0.0f), splat(1.0f), scale);
}

/* Outer statistics of the blocks of a band; `row_amax`: where that of a row is written. */
INLINE void outer_of_blocks(band *b, const form *f, float *row_amax) {
    int64_t maxima = f->tile_columns ? b->blocks : b->width / 16; /* without blocks, of sixteens */
    int64_t each = f->outer == ROW ? maxima : f->outer == BLOCK_128 ? 128 / f->tile_columns : 0;
    for (int64_t first = 0; first < maxima; first += each ? each : maxima) {
        int64_t end = each && first + each < maxima ? first + each : maxima;
        float largest = b->shared;
        for (int64_t block = first; each && block < end; block++)
            largest = larger_of(largest, b->groups[block]);
        for (int64_t block = first; block < end; block++)
            b->amax[block] = largest;
        if (f->outer == ROW)
            *row_amax = largest;
    }
}

/* INT4 with its 7 at E2M1's 6. */
static const grid INT4 = {2, 2, 7.0f, NEAREST};

/* The error of a candidate in each of sixteen transposed blocks; leaves its codes. `even`: on the grid of INT4. */
INLINE f32 error_of(const f32 t[16], f32 scale, f32 factor, f32 amax, const form *f, f32 codes[16], int32_t even) {
    f32 total = {0};
    form other = *f;
    other.element = INT4;
    UNROLL for (int e = 0; e < 16; e++) {
        f32 y = t[e] * factor;
        codes[e] = even ? round_elements(y * (float)(7.0 / 6.0), &other, NEAREST, (u32){0}, 0) * (float)(6.0 / 7.0)
                        : round_elements(y, f, NEAREST, (u32){0}, 0);
        f32 value = codes[e] * scale;
        if (f->outer)
            value = value * amax / f->outer_top;
        f32 difference = value - t[e];
        if (f->selection == ABSMAX)
            total = __builtin_elementwise_max(total, magnitude(difference));
        else {
            f32 size = f->selection == MSE ? difference * difference : magnitude(difference);
            total = e ? total + size : size;
        }
    }
    return total;
}

INLINE f32 inverse_of(f32 amax, const form *f) { return f->outer ? 1.0f / encode_scale(amax, f) : splat(1.0f); }

INLINE f32 factor_of(f32 scale, f32 inverse) { return smaller(1.0f / (scale * inverse), FLT_MAX); }

/* Four Over Six, or two grids of one scale, for sixteen blocks of a row, from number `first`: the better candidate's scales, and its
   values in place of the rows' magnitudes, code times scale. */
INLINE void select_blocks(band *b, int64_t first, const form *f) {
    f32 t[16], four[16], six[16], amax = *(const f32_memory *)(b->amax + first), inverse = inverse_of(amax, f);
    f32 base = *(const f32_memory *)(b->groups + first) / 6.0f * (f->outer ? encode_scale(amax, f) : splat(1.0f));
    for (int v = 0; v < 16; v++)
        t[v] = first + v < b->blocks ? magnitude(*(const f32_memory *)(b->z + (first + v) * 16)) : (f32){0};
    transpose(t);
    f32 scale = round_scale(f->grids ? base : base * f->pair[0], f, &f->scale, (u32){0});
    f32 other = f->grids ? scale : round_scale(base * f->pair[1], f, &f->scale, (u32){0});
    f32 error = error_of(t, scale, factor_of(scale, inverse), amax, f, six, 0);
    i32 better = f->grids ? error_of(t, other, factor_of(other, inverse), amax, f, four, 1) < error
                          : error_of(t, other, factor_of(other, inverse), amax, f, four, 0) < error;
    scale = where(better, other, scale);
    UNROLL for (int e = 0; e < 16; e++)
        six[e] = where(better, four[e], six[e]) * scale;
    transpose(six);
    *(f32_memory *)(b->scale + first) = scale;
    b->lost |= !all_finite(inverse);
    for (int v = 0; v < 16 && first + v < b->blocks; v++) {
        f32_memory *z = (f32_memory *)(b->z + (first + v) * 16);
        *z = with_sign(six[v], *z);
    }
}

/* The scales and factors of sixteen blocks from number `first` of a band. */
INLINE void scale_blocks(band *b, int64_t first, int64_t number, const form *f) {
    f32 amax = *(const f32_memory *)(b->amax + first), statistic = *(const f32_memory *)(b->groups + first);
    f32 outer = f->outer ? encode_scale(amax, f) : splat(1.0f), inverse = inverse_of(amax, f), multiplier = outer * f->map;
    if (f->statistic != AMAX)
        statistic = spread_of(b, first, f->tile_columns, f->statistic == STD) * f->spread; /* not finite where a sum overflowed */
    if (f->headroom != 1)
        multiplier = multiplier * f->headroom;
    u32 chances = f->scale.rounding == STOCHASTIC ? draw(&b->scales, number * across(b) + first / 16, 24) : (u32){0};
    f32 exact = smaller(statistic * multiplier, FLT_MAX), scale = round_scale(exact, f, &f->scale, chances);
    if (f->halve != 0)
        scale = where(exact / scale < f->halve, __builtin_elementwise_max(scale * 0.5f, splat(0x1p-127f)), scale);
    *(f32_memory *)(b->scale + first) = scale;
    *(f32_memory *)(b->factor + first) = factor_of(scale, inverse);
    b->lost |= !all_finite(inverse) || !all_finite(statistic) || !all_finite(multiplier);
}

INLINE f32 in_bf16(f32 v) { return (f32)(__builtin_convertvector(to_bf16(v), u32) << 16); }

/* The scales of sixteen blocks with exponents of sub-blocks, from number `first` of a band, and their inverses, both rounded to bf16
   on the way. */
INLINE void scale_units(band *b, int64_t first, int64_t number, const form *f) {
    u32 chances = f->scale.rounding == STOCHASTIC ? draw(&b->scales, number * across(b) + first / 16, 24) : (u32){0};
    f32 scale = round_scale(in_bf16(*(const f32_memory *)(b->groups + first) * f->unit), f, &f->scale, chances);
    *(f32_memory *)(b->scale + first) = scale;
    *(f32_memory *)(b->factor + first) = in_bf16(1.0f / scale);
}

/* Each lane the largest of its group of `length`, a power of two up to 16. */
INLINE f32 largest_of_group(f32 v, int32_t length) {
    if (length >= 2)
        v = __builtin_elementwise_max(v, __builtin_shufflevector(v, v, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14));
    if (length >= 4)
        v = __builtin_elementwise_max(v, __builtin_shufflevector(v, v, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13));
    if (length >= 8)
        v = __builtin_elementwise_max(v, __builtin_shufflevector(v, v, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11));
    if (length >= 16)
        v = __builtin_elementwise_max(v, __builtin_shufflevector(v, v, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7));
    return v;
}

/* The power of two of each of sixteen elements whose magnitudes times the block's inverse scale are y. */
INLINE f32 micro_powers(f32 y, const form *f) {
    f32 power = splat(1.0f);
    for (int32_t level = 0; level < f->levels; level++) {
        f32 limit = splat((float)(1 << (f->levels - level)));
        power = where(largest_of_group(y / power, f->lengths[level]) >= limit, power * 2.0f, power);
    }
    return power;
}

/* Sixteen values, code times scale, which are no NaN. */
INLINE void store_values(f32 value, void *values, int64_t at, int32_t wide) {
    u32 bits = (u32)value;
    if (wide)
        *(f32_memory *)((float *)values + at) = value;
    else
        *(u16_memory *)((uint16_t *)values + at) = __builtin_convertvector((bits + 0x7fff + (bits >> 16 & 1)) >> 16, u16);
}

/* The factor of a block's values, which hold an outer scale of 128 elements. */
INLINE float after(const band *b, const form *f, int64_t block) { return f->outer == BLOCK_128 ? b->amax[block] * f->divisor : 1; }

/* Rounds the elements of row `row` of the matrix, the band's only one, whose sub-blocks have exponents. */
INLINE void round_micro(band *b, int64_t row, const form *f, void *values, int32_t rounding, int32_t width) {
    int64_t each = b->width / 16 / b->blocks;
    for (int64_t v = 0; v < b->width / 16; v++) {
        f32 x = *(const f32_memory *)(b->z + 16 * v), factor = splat(b->factor[v / each]), power = micro_powers(magnitude(x) * factor, f);
        u32 chances = width ? draw(&b->elements, row * (b->width / 16) + v, width) : (u32){0};
        f32 code = round_elements(magnitude(x) * (factor / power), f, rounding, chances, width);
        store_values(with_sign(code * power * splat(b->scale[v / each]), x), values, row * b->width + 16 * v, f->wide);
    }
}

/* Rounds the elements of row `r` of a band, which is row `row` of the matrix. `plain`: no factors but the scales. */
INLINE void round_row(band *b, int64_t r, int64_t row, const form *f, void *values, int32_t rounding, int32_t width, int32_t wide,
                      int32_t plain) {
    int64_t each = b->width / 16 / b->blocks, left = each, block = 0;
    for (int64_t v = 0; v < b->width / 16; v++, left--) {
        if (!left)
            block++, left = each;
        f32 x = *(const f32_memory *)(b->z + r * b->width + 16 * v), y = magnitude(x) * splat(b->factor[block]);
        if (!plain)
            y = y * f->prescale;
        u32 chances = width ? draw(&b->elements, row * (b->width / 16) + v, width) : (u32){0};
        f32 value = round_elements(y, f, rounding, chances, width) * splat(b->scale[block]);
        if (!plain)
            value = value * after(b, f, block);
        store_values(with_sign(value, x), values, row * b->width + 16 * v, wide);
    }
}

/* MS-EDEN: to nearest, then the scales of each group of blocks times <y, y> / <y, q>, rounded stochastically. */
INLINE void correct_row(band *b, int64_t row, const form *f, void *values) {
    int64_t vectors = f->group / 16, each = f->tile_columns / 16;
    for (int64_t first = 0; first < b->width / 16; first += vectors) {
        f32 powers[8], inner[8];
        for (int64_t v = 0; v < vectors; v++) {
            int64_t block = (first + v) / each;
            f32_memory *z = (f32_memory *)(b->z + 16 * (first + v));
            f32 y = *z * splat(b->factor[block]);
            if (f->prescale != 1)
                y = y * f->prescale;
            f32 code = with_sign(round_elements(magnitude(y), f, NEAREST, (u32){0}, 0), y);
            y = b->scale[block] == 0 ? (f32){0} : y;
            powers[v] = y * y, inner[v] = y * code, *z = code;
        }
        float below = tree(inner, vectors), correction = below == 0 ? 1.0f : tree(powers, vectors) / below;
        b->lost |= !(correction < __builtin_inff() && correction > -__builtin_inff());
        for (int64_t block = first / each; block < (first + vectors) / each; block++)
            b->scale[block] *= correction;
    }
    grid corrected = f->scale;
    corrected.rounding = STOCHASTIC;
    for (int64_t first = 0; first < b->blocks; first += 16) {
        f32_memory *scale = (f32_memory *)(b->scale + first);
        *scale = round_scale(*scale, f, &corrected, draw(&b->scales, row * across(b) + first / 16, 24));
    }
    for (int64_t v = 0; v < b->width / 16; v++)
        store_values(*(const f32_memory *)(b->z + 16 * v) * splat(b->scale[v / each]) * after(b, f, v / each), values, row * b->width + 16 * v,
                     f->wide);
}

/* The values of row `r` of a band. */
INLINE void write_row(band *b, int64_t r, int64_t row, const form *f, void *values) {
    int32_t plain = f->prescale == 1 && f->outer != BLOCK_128;
    if (f->selection) /* they stand in place of the row */
        for (int64_t v = 0; v < b->blocks; v++)
            store_values(*(const f32_memory *)(b->z + 16 * v) * after(b, f, v), values, row * b->width + 16 * v, f->wide);
    else if (f->group)
        correct_row(b, row, f, values);
    else if (f->levels)
        switch (f->element.rounding == STOCHASTIC ? f->bits : f->element.rounding) {
        case NEAREST:
            round_micro(b, row, f, values, NEAREST, 0);
            break;
        case AWAY:
            round_micro(b, row, f, values, AWAY, 0);
            break;
        case 8:
            round_micro(b, row, f, values, STOCHASTIC, 8);
            break;
        case 16:
            round_micro(b, row, f, values, STOCHASTIC, 16);
            break;
        case 24:
            round_micro(b, row, f, values, STOCHASTIC, 24);
        }
    else
        switch (f->element.rounding == STOCHASTIC ? f->bits : f->element.rounding) {
#define ROUND(rounding, width, wide, plain) round_row(b, r, row, f, values, rounding, width, wide, plain)
#define ROUND_TO(rounding, width) \
    f->wide ? plain ? ROUND(rounding, width, 1, 1) : ROUND(rounding, width, 1, 0) \
            : plain ? ROUND(rounding, width, 0, 1) : ROUND(rounding, width, 0, 0)
        case NEAREST:
            ROUND_TO(NEAREST, 0);
            break;
        case AWAY:
            ROUND_TO(AWAY, 0);
            break;
        case 8:
            ROUND_TO(STOCHASTIC, 8);
            break;
        case 16:
            ROUND_TO(STOCHASTIC, 16);
            break;
        case 24:
            ROUND_TO(STOCHASTIC, 24);
        }
}

/* The scales of a band, the number of which among bands is `number`; returns its largest magnitudes. */
INLINE u32 scale_band(band *b, int64_t number, const form *f, float *row_amax) {
    u32 seen = block_maxima(b, f->tile_columns ? f->tile_columns : 16);
    outer_of_blocks(b, f, row_amax);
    if (!f->tile_columns)
        b->factor[0] = encode_scale(splat(b->amax[0]), f)[0], b->scale[0] = 1;
    for (int64_t first = 0; f->tile_columns && first < b->blocks; first += 16)
        if (f->selection)
            select_blocks(b, first, f);
        else if (f->levels)
            scale_units(b, first, number, f);
        else
            scale_blocks(b, first, number, f);
    return seen;
}

/* --- the whole ---------------------------------------------------------------------------------------------------------------- */

/* The largest magnitude of `count` elements; not finite where one of them is not. */
float largest(const void *x, int64_t count, int32_t bf16) {
    u32 most = {0};
    for (int64_t at = 0; at < count; at += 16)
        most = larger(most, (u32)magnitude(load_some(x, at, bf16, count - at)), 0);
    return as_float(__builtin_reduce_max((i32)most));
}

/* Quantises x [rows, columns] along its rows: values [rows, width], scales [row tiles, width / tile columns], the amaxes of rows where
   each has its own. 0: the reference must do it, since x is not finite or an inverse of S is not, or memory ran out. */
int quantize(const void *x, int64_t rows, int64_t columns, int64_t width, form *given, void *values, float *scales, float *row_amax) {
    const form local = *given, *f = &local; /* nothing that is written can lie there, so it stays in registers */
    int64_t high = f->tile_rows ? f->tile_rows : 1, blocks = f->tile_columns ? width / f->tile_columns : 1;
    int64_t most = width / 16 + 16; /* whole vectors reach beyond the last block */
    float *memory = calloc(high * width + 4 * most, sizeof(float));
    if (!memory)
        return 0;
    band b = {.z = memory, .width = width, .blocks = blocks, .shared = f->amax, .elements = drawn_by(f->key, f->clock, f->bits, 0), .scales = drawn_by(f->key, f->clock, 24, 1)};
    b.groups = memory + high * width, b.amax = b.groups + most, b.scale = b.amax + most, b.factor = b.scale + most;
    u32 seen = {0};
    for (int64_t row = 0, number = 0; row < rows; row += high, number++) {
        int64_t here = rows - row < high ? rows - row : high;
        if (f->outer == ROWS && row % f->outer_rows == 0) {
            int64_t together = rows - row < f->outer_rows ? rows - row : f->outer_rows;
            b.shared = largest((const char *)x + row * columns * (f->bf16 ? 2 : 4), together * columns, f->bf16);
        }
        for (int64_t r = 0; f->outer == ROWS && r < here; r++)
            row_amax[row + r] = b.shared;
        if (f->bf16)
            load_band(x, row, here, columns, &b, 1);
        else
            load_band(x, row, here, columns, &b, 0);
        seen = larger(seen, scale_band(&b, number, f, row_amax + row), 0);
        for (int64_t r = 0; r < here; r++)
            write_row(&b, r, row + r, f, values);
        memcpy(scales + number * blocks, b.scale, blocks * sizeof(float));
    }
    free(memory);
    given->largest = as_float(__builtin_reduce_max((i32)seen));
    return given->largest < __builtin_inff() && !b.lost;
}
