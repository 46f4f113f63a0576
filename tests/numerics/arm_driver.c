/* Calls kernels by name with arguments from standard input, for builds that run under an emulator.

   A call is: the name, 16 bytes; how many buffers, integers and floats, int32 each; the size of each buffer, int64; the integers,
   int64; the floats; the bytes of each buffer. The structures of arguments (`spec`, `sums`) are buffers like the tensors. The answer,
   on standard output, is the result as a double, then the bytes of each buffer after the call. Both ends are little-endian.

   A new kernel needs its declaration, a function that hands the arguments on, and a line in FUNCTIONS. */

#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { MOST = 16 };

typedef struct {
    void *p[MOST];
    int64_t n[MOST];
    float f[MOST];
} arguments; /* those of one type in the order of the kernel's parameters */

float amax(const void *x, int64_t count, int32_t bf16);
float turn(const void *x, int64_t count, int64_t width, uint32_t signs, uint16_t *out);
int rows(const void *x, int64_t count, int64_t columns, void *spec, uint16_t *values, float *scales);
int columns(const void *x, int64_t count, int64_t width, void *spec, uint16_t *values, float *scales);
int tiles(const void *x, int64_t count, int64_t width, void *spec, uint16_t *values, float *scales);
float largest(const void *x, int64_t count, int32_t bf16);
int quantize(const void *x, int64_t rows, int64_t columns, int64_t width, void *form, void *values, float *scales, float *row_amax);
void rotate_rows(const void *x, int64_t rows, int64_t columns, int64_t width, const void *turn, const float *signs, void *out);
void transpose_whole(const void *x, int64_t rows, int64_t columns, void *out, int32_t bf16);
void random_bits(const uint32_t *key, const uint32_t *clock, int32_t width, int64_t groups, float *out);
void decode(const uint16_t *values, int64_t rows, int64_t columns, const float *scales, int64_t tile_rows, int64_t tile_columns,
            float amax, float factor, float *out);
void census(const void *x, const uint16_t *values, int64_t rows, int64_t columns, const float *scales, void *sums, float *block_amax,
            double *block_power, double *row_sums, double *column_sums);

static double call_amax(arguments *a) { return amax(a->p[0], a->n[0], (int32_t)a->n[1]); }
static double call_turn(arguments *a) { return turn(a->p[0], a->n[0], a->n[1], (uint32_t)a->n[2], a->p[1]); }
static double call_rows(arguments *a) { return rows(a->p[0], a->n[0], a->n[1], a->p[1], a->p[2], a->p[3]); }
static double call_columns(arguments *a) { return columns(a->p[0], a->n[0], a->n[1], a->p[1], a->p[2], a->p[3]); }
static double call_tiles(arguments *a) { return tiles(a->p[0], a->n[0], a->n[1], a->p[1], a->p[2], a->p[3]); }
static double call_largest(arguments *a) { return largest(a->p[0], a->n[0], (int32_t)a->n[1]); }
static double call_quantize(arguments *a) {
    return quantize(a->p[0], a->n[0], a->n[1], a->n[2], a->p[1], a->p[2], a->p[3], a->p[4]);
}
static double call_rotate_rows(arguments *a) {
    rotate_rows(a->p[0], a->n[0], a->n[1], a->n[2], a->p[1], a->p[2], a->p[3]);
    return 0;
}
static double call_transpose_whole(arguments *a) {
    transpose_whole(a->p[0], a->n[0], a->n[1], a->p[1], (int32_t)a->n[2]);
    return 0;
}
static double call_random_bits(arguments *a) {
    random_bits(a->p[0], a->p[1], (int32_t)a->n[0], a->n[1], a->p[2]);
    return 0;
}
static double call_decode(arguments *a) {
    decode(a->p[0], a->n[0], a->n[1], a->p[1], a->n[2], a->n[3], a->f[0], a->f[1], a->p[2]);
    return 0;
}
static double call_census(arguments *a) {
    census(a->p[0], a->p[1], a->n[0], a->n[1], a->p[2], a->p[3], a->p[4], a->p[5], a->p[6], a->p[7]);
    return 0;
}

static const struct {
    const char *name;
    double (*call)(arguments *);
} FUNCTIONS[] = {
    {"amax", call_amax},   {"turn", call_turn},     {"rows", call_rows},     {"columns", call_columns},
    {"tiles", call_tiles}, {"decode", call_decode}, {"census", call_census},
    {"largest", call_largest}, {"quantize", call_quantize}, {"rotate_rows", call_rotate_rows},
    {"transpose_whole", call_transpose_whole}, {"random_bits", call_random_bits},
};

static void take(void *to, size_t size) {
    if (size && fread(to, size, 1, stdin) != 1) {
        fprintf(stderr, "the input ends within a call\n");
        exit(2);
    }
}

int main(void) {
    char name[16];
    while (fread(name, sizeof name, 1, stdin) == 1) {
        arguments a = {0};
        int32_t counts[3];
        int64_t sizes[MOST];
        take(counts, sizeof counts);
        for (int i = 0; i < 3; i++)
            if (counts[i] < 0 || counts[i] > MOST) {
                fprintf(stderr, "%.16s: %d arguments of one type; at most %d\n", name, counts[i], MOST);
                return 2;
            }
        take(sizes, counts[0] * sizeof *sizes);
        take(a.n, counts[1] * sizeof *a.n);
        take(a.f, counts[2] * sizeof *a.f);
        for (int i = 0; i < counts[0]; i++)
            take(a.p[i] = malloc(sizes[i]), sizes[i]);
        size_t place = 0, all = sizeof FUNCTIONS / sizeof *FUNCTIONS;
        while (place < all && strncmp(FUNCTIONS[place].name, name, sizeof name))
            place++;
        if (place == all) {
            fprintf(stderr, "%.16s: no such function; add it to FUNCTIONS\n", name);
            return 2;
        }
        double result = FUNCTIONS[place].call(&a);
        fwrite(&result, sizeof result, 1, stdout);
        for (int i = 0; i < counts[0]; i++) {
            fwrite(a.p[i], 1, sizes[i], stdout);
            free(a.p[i]);
        }
    }
    return 0;
}
