/* Rotations along rows, and transposition. */

#include "lanes.h"

/* --- rotation along rows ------------------------------------------------------------------------------------------------------ */

/* Within a vector: the partner's value plus or minus the own one, which is a + b and a - b. */
#define WITHIN(distance, ...) \
    { \
        f32 partner = __builtin_shufflevector(v, v, __VA_ARGS__); \
        v = partner + (f32)((u32)v ^ minus[distance]); \
    }

INLINE f32 butterflies(f32 v, int32_t size) {
    static const u32 minus[4] = {
        {0, 1u << 31, 0, 1u << 31, 0, 1u << 31, 0, 1u << 31, 0, 1u << 31, 0, 1u << 31, 0, 1u << 31, 0, 1u << 31},
        {0, 0, 1u << 31, 1u << 31, 0, 0, 1u << 31, 1u << 31, 0, 0, 1u << 31, 1u << 31, 0, 0, 1u << 31, 1u << 31},
        {0, 0, 0, 0, 1u << 31, 1u << 31, 1u << 31, 1u << 31, 0, 0, 0, 0, 1u << 31, 1u << 31, 1u << 31, 1u << 31},
        {0, 0, 0, 0, 0, 0, 0, 0, 1u << 31, 1u << 31, 1u << 31, 1u << 31, 1u << 31, 1u << 31, 1u << 31, 1u << 31}};
    WITHIN(0, 1, 0, 3, 2, 5, 4, 7, 6, 9, 8, 11, 10, 13, 12, 15, 14);
    WITHIN(1, 2, 3, 0, 1, 6, 7, 4, 5, 10, 11, 8, 9, 14, 15, 12, 13);
    if (size >= 8)
        WITHIN(2, 4, 5, 6, 7, 0, 1, 2, 3, 12, 13, 14, 15, 8, 9, 10, 11);
    if (size >= 16)
        WITHIN(3, 8, 9, 10, 11, 12, 13, 14, 15, 0, 1, 2, 3, 4, 5, 6, 7);
    return v;
}

typedef struct {
    float factor;
    int32_t size, back, bf16; /* `back` puts the signs last; bf16: what x and the result are */
} turn_by;

/* One group, or one vector of groups, of the columns from `count` before the row's end; those after it are zeros. */
INLINE void rotate_group(const void *x, int64_t count, void *out, int64_t room, const turn_by *p, const float *signs, int64_t vectors,
                         int32_t bf16) {
    f32 t[8];
    UNROLL for (int64_t v = 0; v < vectors; v++) {
        f32 loaded = count > 16 * v ? load_some(x, 16 * v, bf16, count - 16 * v) : (f32){0};
        f32 flips = *(const f32_memory *)(signs + 16 * v);
        t[v] = butterflies(p->back ? loaded : loaded * flips, p->size);
    }
    UNROLL for (int64_t distance = 1; distance < vectors; distance *= 2)
        UNROLL for (int64_t v = 0; v < vectors; v++)
            if (!(v & distance)) {
                f32 a = t[v], b = t[v + distance];
                t[v] = a + b, t[v + distance] = a - b;
            }
    UNROLL for (int64_t v = 0; v < vectors; v++) {
        f32 flips = *(const f32_memory *)(signs + 16 * v), turned = t[v] * p->factor;
        store_some(out, 16 * v, p->back ? turned * flips : turned, bf16, room - 16 * v);
    }
}

INLINE void rotate_all(const void *x, int64_t rows, int64_t columns, int64_t width, const turn_by *p, const float *signs, void *out,
                       int64_t vectors, int32_t bf16) {
    int64_t bytes = bf16 ? 2 : 4;
    for (int64_t row = 0; row < rows; row++)
        for (int64_t first = 0; first < width; first += 16 * vectors) {
            const void *from = (const char *)x + (row * columns + first) * bytes;
            void *to = (char *)out + (row * width + first) * bytes;
            if (columns - first >= 16 * vectors)
                rotate_group(from, 16 * vectors, to, 16 * vectors, p, signs, vectors, bf16);
            else
                rotate_group(from, columns - first, to, width - first, p, signs, vectors, bf16);
        }
}

/* Groups along the rows of x [rows, columns], zeros up to `width`: signs (sixteen or the size of them, +1 and -1), butterflies by
   distance, the factor, one rounding. */
void rotate_rows(const void *x, int64_t rows, int64_t columns, int64_t width, const turn_by *given, const float *signs, void *out) {
    const turn_by p = *given;
#define ROTATE(vectors) \
    p.bf16 ? rotate_all(x, rows, columns, width, &p, signs, out, vectors, 1) : rotate_all(x, rows, columns, width, &p, signs, out, vectors, 0)
    p.size <= 16 ? ROTATE(1) : p.size == 32 ? ROTATE(2) : p.size == 64 ? ROTATE(4) : ROTATE(8);
}

/* --- transposition ------------------------------------------------------------------------------------------------------------ */

/* Sixteen rows and columns of fp32, or rows and twice as many columns of bf16, of which pairs move together and part in the end. */
INLINE void transpose_tile(const char *x, int64_t columns, char *out, int64_t rows, int32_t bf16) {
    f32 t[16];
    UNROLL for (int r = 0; r < 16; r++)
        t[r] = *(const f32_memory *)(x + r * columns * (bf16 ? 2 : 4));
    transpose(t);
    UNROLL for (int c = 0; c < 16; c++)
        if (bf16) {
            *(u16_memory *)(out + 4 * c * rows) = __builtin_convertvector((u32)t[c], u16);
            *(u16_memory *)(out + (4 * c + 2) * rows) = __builtin_convertvector((u32)t[c] >> 16, u16);
        } else
            *(f32_memory *)(out + 4 * c * rows) = t[c];
}

INLINE void transpose_all(const char *x, int64_t rows, int64_t columns, char *out, int32_t bf16) {
    int64_t bytes = bf16 ? 2 : 4, wide = bf16 ? 32 : 16;
    for (int64_t band = 0; band < columns; band += wide) /* down each band, so that what is written lies together */
        for (int64_t row = 0; row < rows; row += 16)
            if (row + 16 <= rows && band + wide <= columns)
                transpose_tile(x + (row * columns + band) * bytes, columns, out + (band * rows + row) * bytes, rows, bf16);
            else
                for (int64_t r = row; r < rows && r < row + 16; r++)
                    for (int64_t c = band; c < columns && c < band + wide; c++)
                        memcpy(out + (c * rows + r) * bytes, x + (r * columns + c) * bytes, bytes);
}

/* x [rows, columns] transposed, bf16 or fp32. */
void transpose_whole(const void *x, int64_t rows, int64_t columns, void *out, int32_t bf16) {
    if (bf16)
        transpose_all(x, rows, columns, out, 1);
    else
        transpose_all(x, rows, columns, out, 0);
}
