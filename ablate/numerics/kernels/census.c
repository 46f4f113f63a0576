/* Quantised tensors looked at: back to fp32, and what telemetry says of one in a single pass, sums in double precision and the blocks. */

#include "nvfp4.h"

INLINE f32 upper(const uint16_t *bf16) { return (f32)(__builtin_convertvector(*(const u16_memory *)bf16, u32) << 16); }

/* Codes from codes times scales; what a scale of zero took away stays zero, with its sign. */
INLINE f32 codes_of(f32 values, f32 scale) {
    i32 lost = scale == 0.0f;
    return (f32)(((i32)values & lost) | ((i32)(values / scale) & ~lost));
}

/* `values` [rows, columns], columns a multiple of 16, back to fp32: code times ((block scale times amax) times factor). */
void decode(const uint16_t *values, int64_t rows, int64_t columns, const float *scales, int64_t tile_rows, int64_t tile_columns,
            float amax, float factor, float *out) {
    for (int64_t row = 0; row < rows; row++) {
        const float *here = scales + row / tile_rows * (columns / tile_columns);
        for (int64_t column = 0; column < columns; column += 16) {
            f32 scale = splat(here[column / tile_columns]);
            *(f32_memory *)(out + row * columns + column) = codes_of(upper(values + row * columns + column), scale) * ((scale * amax) * factor);
        }
    }
}

typedef struct {
    float amax, inverse, factor; /* of the tensor; 1 / S; 1 / (6 bound) */
    int32_t bf16, tile_rows, tile_columns;
    double power, error, inner, quantised_power, fourth; /* filled in here: sums over elements, and counts of them */
    int64_t zeros, saturated, clipped;
} sums;

INLINE double total(f64 v) {
    double sum = 0;
    for (int i = 0; i < 16; i++)
        sum += v[i];
    return sum;
}

INLINE int64_t lanes(i32 v) { return -__builtin_reduce_add(v); } /* comparisons give -1 */

typedef struct {
    f64 power, error, inner, quantised_power, fourth, sum;
    i32 zeros, saturated, clipped;
} running;

/* Sixteen elements x, their quantised values and block scales; returns their squares. */
INLINE f64 measure(running *r, f32 x, f32 values, f32 scale, const sums *s) {
    f32 q = codes_of(values, scale) * ((scale * s->amax) * s->factor), y = x * smaller(1.0f / (scale * s->inverse), FLT_MAX);
    f32 size = (f32)((u32)y & 0x7fffffffu);
    f64 wide = __builtin_convertvector(x, f64), wide_q = __builtin_convertvector(q, f64), square = wide * wide;
    r->power += square, r->fourth += square * square, r->sum += wide;
    r->error += (wide - wide_q) * (wide - wide_q), r->inner += wide * wide_q, r->quantised_power += wide_q * wide_q;
    r->zeros += (q == 0.0f) & (x != 0.0f), r->saturated += size > 6.0f, r->clipped += size > 7.0f;
    return square;
}

/* What telemetry says of x [rows, columns] and its `values`, both multiples of 16: sums; by block, the largest magnitude and the power;
   the sums of rows and of columns. What it adds to is zero before. */
void census(const void *x, const uint16_t *values, int64_t rows, int64_t columns, const float *scales, sums *s, float *block_amax,
            double *block_power, double *row_sums, double *column_sums) {
    for (int64_t row = 0; row < rows; row++) {
        running r = {0};
        for (int64_t column = 0; column < columns; column += 16) {
            int64_t block = row / s->tile_rows * (columns / s->tile_columns) + column / s->tile_columns, at = row * columns + column;
            f32 here = s->bf16 ? upper((const uint16_t *)x + at) : *(const f32_memory *)((const float *)x + at);
            f32 scale = s->tile_columns == 16 ? splat(scales[block]) : *(const f32_memory *)(scales + block);
            f64 square = measure(&r, here, upper(values + at), scale, s);
            f32 size = (f32)((u32)here & 0x7fffffffu);
            if (s->tile_columns == 16) {
                float most = as_float(__builtin_reduce_max((i32)size));
                block_amax[block] = most > block_amax[block] ? most : block_amax[block];
                block_power[block] += total(square);
            } else {
                f32_memory *most = (f32_memory *)(block_amax + block);
                *most = __builtin_elementwise_max(*most, size);
                *(f64_memory *)(block_power + block) += square;
            }
            *(f64_memory *)(column_sums + column) += __builtin_convertvector(here, f64);
        }
        s->power += total(r.power), s->fourth += total(r.fourth), s->error += total(r.error), s->inner += total(r.inner);
        s->quantised_power += total(r.quantised_power), row_sums[row] = total(r.sum);
        s->zeros += lanes(r.zeros), s->saturated += lanes(r.saturated), s->clipped += lanes(r.clipped);
    }
}
