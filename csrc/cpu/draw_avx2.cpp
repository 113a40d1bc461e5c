// draw.inc for x86-64 CPUs with AVX2.
#if defined(__x86_64__)
#include "draw.h"

#include "avx2.inc"
#define LANES 4

namespace quire::avx2 {
#include "draw.inc"
}

#include "end_target.inc"
#endif
