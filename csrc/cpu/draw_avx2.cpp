// draw.inc for x86-64 CPUs with AVX2.
#if defined(__x86_64__)
#include "draw.h"

#if defined(__clang__)
#pragma clang attribute push(__attribute__((target("avx2"))), apply_to = function)
#else
#pragma GCC target("avx2")
#endif
#define LANES 4

namespace quire::avx2 {
#include "draw.inc"
}

#if defined(__clang__)
#pragma clang attribute pop
#endif
#endif
