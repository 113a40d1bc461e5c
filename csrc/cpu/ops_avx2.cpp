// ops.inc for x86-64 CPUs with AVX2.
#if defined(__x86_64__)
#include <immintrin.h>

#include "ops.h"

#include "avx2.inc"
#define LANES 8

namespace quire::avx2 {
#include "vec.inc"
#include "ops.inc"
}

#include "end_target.inc"
#endif
