/* What telemetry says of a quantised tensor, in one pass over it: sums in double precision, and the blocks. */

#include "nvfp4.h"

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
    i32 lost = scale == 0.0f;
    f32 codes = (f32)(((i32)values & lost) | ((i32)(values / scale) & ~lost));
    f32 q = codes * ((scale * s->amax) * s->factor), y = x * smaller(1.0f / (scale * s->inverse), FLT_MAX);
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
            f32 v = (f32)(__builtin_convertvector(*(const u16_memory *)(values + at), u32) << 16), scale, here;
            if (s->bf16)
                here = (f32)(__builtin_convertvector(*(const u16_memory *)((const uint16_t *)x + at), u32) << 16);
            else
                here = *(const f32_memory *)((const float *)x + at);
            scale = s->tile_columns == 16 ? splat(scales[block]) : *(const f32_memory *)(scales + block);
            f64 square = measure(&r, here, v, scale, s);
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
