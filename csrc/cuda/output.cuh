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

// How a block ends whose warps have shared out the inputs in segments, of products of 16 outputs x 8 rows a tile: the
// segments' sums meet in shared memory and are added in ascending order. A round of segments at a time, so that a block
// asks for 16 KB a tile, which every device has, however many inputs there are.
constexpr int ROUND_SEGMENTS = 32;

template <int TILES>
struct Sums {
    float segment[ROUND_SEGMENTS][TILES][4][WARP];      // tile, register, lane

    __device__ void put(int n, const float (&y)[TILES][4]) {
        for (int tile = 0; tile < TILES; tile++)
            for (int i = 0; i < 4; i++) segment[n][tile][i][lane_id()] = y[tile][i];
    }
};

// A thread's: the n-th has register n of all tiles and lanes. For blocks of at least TILES * 128 threads.
template <int TILES>
struct Total {
    float y = 0;
    int tile = int(threadIdx.x) / (4 * WARP), i = int(threadIdx.x) / WARP % 4;

    // The round's first `num` segments; all threads of the block come here.
    __device__ void add(const Sums<TILES>& sums, int num) {
        __syncthreads();
        if (tile < TILES)
            for (int n = 0; n < num; n++) y += sums.segment[n][tile][i][lane_id()];
        __syncthreads();        // the next round may write
    }
    __device__ void put(const Output& out, int64_t panel) const {
        const int lane = lane_id();
        if (tile < TILES)
            out.put(tile * 8 + lane % 4 * 2 + i % 2, panel * 16 + lane / 4 + i / 2 * 8, y);
    }
};

}  // namespace quire
