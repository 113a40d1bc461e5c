// Where the results of a matrix product go: some columns of y, with a bias, or added to what is there.
#pragma once
#include "common.cuh"

namespace quire {

struct Output {
    float* y_TO;
    const float* bias_O;        // may be null
    int64_t T, O, column, stride;
    int accumulate;

    __device__ void put(int64_t row, int64_t output, float y) const {
        if (row >= T || output >= O) return;
        float& to = y_TO[row * stride + column + output];
        if (bias_O) y += bias_O[output];
        to = accumulate ? to + y : y;
    }
};

// The end of a block whose warps have shared out the inputs: sums[segment][tile][register][lane] of products of 16
// outputs x 8 rows a tile, added in the order of the segments. For blocks of at least `tiles` * 128 threads.
__device__ inline void put_segments(const Output& out, const float* sums, int64_t num_segments, int tiles,
                                    int64_t panel) {
    const int thread = int(threadIdx.x), lane = thread % WARP;
    if (thread >= tiles * 4 * WARP) return;
    const int tile = thread / (4 * WARP), i = thread / WARP % 4;
    float y = 0;
    for (int64_t segment = 0; segment < num_segments; segment++) y += sums[segment * tiles * 4 * WARP + thread];
    out.put(tile * 8 + lane % 4 * 2 + i % 2, panel * 16 + lane / 4 + i / 2 * 8, y);
}

}  // namespace quire
