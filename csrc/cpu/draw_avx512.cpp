// draw.inc for x86-64 CPUs with AVX-512.
#if defined(__x86_64__)
#include "draw.h"

#include "avx512.inc"
#define LANES 8

namespace quire::avx512 {
#include "draw.inc"
}

#include "end_target.inc"
#endif
