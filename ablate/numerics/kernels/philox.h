/* Random bits by counters. */

#pragma once

#include "vectors.h"

/* Philox4x32-10 on sixteen counters, eight in each half: out[w] are their words w. The upper halves of the 64-bit lanes hold what
   products leave there, and are never read. */
INLINE void philox(const u64 counters[2], const uint32_t key[2], const uint32_t clock[3], u64 out[4][2]) {
    for (int h = 0; h < 2; h++) {
        out[0][h] = counters[h];
        for (int word = 1; word < 4; word++)
            out[word][h] = (u64){0} + clock[word - 1];
    }
    uint32_t k0 = key[0], k1 = key[1];
    UNROLL for (int round = 0; round < 10; round++) {
        UNROLL for (int h = 0; h < 2; h++) {
            u64 a = (out[0][h] & 0xffffffffu) * 0xD2511F53u, b = (out[2][h] & 0xffffffffu) * 0xCD9E8D57u;
            out[0][h] = b >> 32 ^ out[1][h] ^ k0, out[1][h] = b;
            out[2][h] = a >> 32 ^ out[3][h] ^ k1, out[3][h] = a;
        }
        k0 += 0x9E3779B9u, k1 += 0xBB67AE85u;
    }
}

/* The complements of the four words of counters 8 h to 8 h + 7, one beside the other: four counters a vector. */
INLINE void words_of_groups(u64 w[4][2], int h, u32 four[2]) {
    u32 first = ~__builtin_shufflevector((u32)w[0][h], (u32)w[1][h], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    u32 last = ~__builtin_shufflevector((u32)w[2][h], (u32)w[3][h], 0, 16, 2, 18, 4, 20, 6, 22, 8, 24, 10, 26, 12, 28, 14, 30);
    four[0] = __builtin_shufflevector(first, last, 0, 1, 16, 17, 2, 3, 18, 19, 4, 5, 20, 21, 6, 7, 22, 23);
    four[1] = __builtin_shufflevector(first, last, 8, 9, 24, 25, 10, 11, 26, 27, 12, 13, 28, 29, 14, 15, 30, 31);
}
