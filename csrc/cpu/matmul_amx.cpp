// matmul.inc for x86-64 CPUs with AMX.
#if defined(__x86_64__)
#include <immintrin.h>

#include "matmul.h"

#include "amx.inc"
#define LANES 16
#define TILES

namespace quire::amx {
#include "vec.inc"
#include "panels.inc"
#include "matmul.inc"

void round_rows(uint16_t* x_tiles, const float* x_TI, int64_t T, int64_t I, int64_t tile) {
    const int64_t num_steps = divide_up(I, GROUP);
    for (int64_t step = 0; step < num_steps; step++)
        for (int64_t row = 0; row < 16; row++) {
            const int64_t t = 16 * tile + row, i = GROUP * step, left = t < T ? (I - i < GROUP ? I - i : GROUP) : 0;
            float x[GROUP] = {};
            for (int64_t j = 0; j < left; j++) x[j] = x_TI[t * I + i + j];
            _mm512_storeu_si512(x_tiles + (tile * num_steps + step) * BFLOAT_TILE + row * GROUP,
                                round_both(load(x), load(x + 16)));
        }
}
}

#include "end_target.inc"
#endif
