// How fast AMX multiplies on tiles alone, for peak.cpp.
#if defined(__x86_64__)
#include <cstdint>

#include "peak.h"

#include "amx.inc"

#define INLINE static inline __attribute__((always_inline))

namespace quire::amx {
namespace {
#include "tiles.inc"
}

double int8_operations(int64_t rounds) {
    const Tiles shapes(64);
    alignas(64) const int8_t ones[16 * 64] = {1};
    load_tile<4>(ones, 64), load_tile<6>(ones, 64);
    for (int64_t round = 0; round < rounds; round++)
        multiply_int8<0, 4, 6>(), multiply_int8<1, 4, 6>(), multiply_int8<2, 4, 6>(), multiply_int8<3, 4, 6>();
    return 2.0 * 16 * 16 * 64 * 4 * rounds;
}

}  // namespace quire::amx
#include "end_target.inc"
#endif
