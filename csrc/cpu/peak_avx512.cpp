// peak.inc for x86-64 CPUs with AVX-512.
#if defined(__x86_64__)
#include <immintrin.h>

#include "peak.h"

#include "avx512.inc"
#define LANES 16

namespace quire::avx512 {
#include "vec.inc"
#include "peak.inc"
}

#include "end_target.inc"
#endif
