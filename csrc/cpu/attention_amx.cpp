// attention.inc for x86-64 CPUs with AMX.
#if defined(__x86_64__)
#include <immintrin.h>

#include <cstring>

#include "attention.h"

#include "amx.inc"
#define LANES 16
#define TILES

namespace quire::amx {
#include "vec.inc"
#include "attention.inc"
}

#include "end_target.inc"
#endif
