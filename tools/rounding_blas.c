/* A BLAS that rounds as another CPU's would: OpenBLAS's products, moved by some units in the last place.

   In which order a matrix product adds up is up to the shapes, the CPU and the threads. Here each
   number of a result is moved at random, by its place, the shapes and a seed: the same product gives
   the same numbers again, and one of other shapes gives others. A test that passes on one CPU by
   luck fails. Whole numbers stay: sums of them are exact in any order. Built and used by
   `make test-rounding`; PENSTOCK_BLAS names it.

   ROUNDING_SEED   draws other numbers (0)
   ROUNDING_UNITS  how far they are moved at most, in units in the last place of a float32 (2)
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

enum { ROW_MAJOR = 101 };

typedef void (*sgemm)(int, int, int, int, int, int, float, const float *, int, const float *, int, float,
                      float *, int);

static sgemm multiply;
static uint64_t seed;
static float most;

__attribute__((constructor)) static void open_library(void) {
    const char *given = getenv("ROUNDING_SEED"), *units = getenv("ROUNDING_UNITS");
    multiply = (sgemm)dlsym(RTLD_NEXT, "cblas_sgemm"); /* of the library that this one is linked to */
    if (!multiply) {
        fprintf(stderr, "rounding_blas: %s\n", dlerror());
        exit(2);
    }
    seed = given ? strtoull(given, NULL, 10) : 0;
    most = (float)(units ? atof(units) : 2.0) * 0x1p-24f;
}

/* The finalizer of MurmurHash3, by Austin Appleby, who gave it to the public domain. */
static uint64_t mixed(uint64_t x) {
    x = (x ^ (x >> 33)) * 0xff51afd7ed558ccdULL;
    x = (x ^ (x >> 33)) * 0xc4ceb9fe1a85ec53ULL;
    return x ^ (x >> 33);
}

void cblas_sgemm(int order, int turned_a, int turned_b, int m, int n, int k, float alpha, const float *a,
                 int lda, const float *b, int ldb, float beta, float *c, int ldc) {
    multiply(order, turned_a, turned_b, m, n, k, alpha, a, lda, b, ldb, beta, c, ldc);
    uint64_t shape = mixed(mixed(mixed(seed + 1) + (uint64_t)m) + (uint64_t)n) + (uint64_t)k;
    int lines = order == ROW_MAJOR ? m : n, length = order == ROW_MAJOR ? n : m;
    for (int i = 0; i < lines; i++) {
        float *line = c + (size_t)i * (size_t)ldc;
        uint64_t state = mixed(shape + (uint64_t)i);
        for (int j = 0; j < length; j++) {
            state = state * 6364136223846793005ULL + 1442695040888963407ULL; /* Knuth's */
            if (!isfinite(line[j]) || line[j] == rintf(line[j])) continue;
            line[j] *= 1.0f + most * (float)(int32_t)(state >> 32) * 0x1p-31f;
        }
    }
}
