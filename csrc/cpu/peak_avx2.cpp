// peak.inc for x86-64 CPUs with AVX2 and FMA.
#if defined(__x86_64__)
#include <immintrin.h>

#include "peak.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2,fma,f16c"))), apply_to = function)
#else
#pragma GCC target("avx2,fma,f16c")
#endif
#define LANES 8
#define FMA(a, b, c) _mm256_fmadd_ps(a, b, c)

namespace quire::avx2 {
#include "vec.inc"
#include "peak.inc"
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
