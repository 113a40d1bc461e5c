// dense_cuda: y = x W^T on weights in bfloat16 as they lie in a file, for one to 16 rows; more are torch's business.
//
// Bound by memory: T operations a byte. Each weight is read once, by 16-byte loads of which a warp has eight in flight
// (4 KB) while it computes on the eight before; x is rounded to bfloat16 on its way. Products are those of
// mma.m16n8k16, weights as the 16 rows and rows of x as the 8 columns. Which input is which of a product's 16 is for us
// to say, if both operands say the same: so lane l takes inputs 8 (l % 4) to 8 (l % 4) + 7 of each 32, one run of
// bytes, for two products.
// The 8 warps of a block share out the inputs of 16 outputs in segments of 128, whose sums are added in ascending
// order: the bits do not depend on T.
#include "common.cuh"
#include "kernels.cuh"
#include "output.cuh"

namespace quire {
namespace {

constexpr int WARPS = 8, THREADS = WARPS * WARP;
constexpr int STEP = 32, SEGMENT_STEPS = 4;     // inputs of two products; those of a segment
constexpr int64_t ROWS_SERVED = 16;

// Eight numbers of bfloat16.
__device__ uint4 weights_at(const __nv_bfloat16* w_OI, int64_t output, int64_t input, int64_t O, int64_t I) {
    return output < O && input < I ? load_once(reinterpret_cast<const uint4*>(w_OI + output * I + input)) : uint4{};
}

__device__ uint4 x_at(const float* x_TI, int64_t row, int64_t input, int64_t T, int64_t I) {
    if (row >= T || input >= I) return {};
    const float4 a = *reinterpret_cast<const float4*>(x_TI + row * I + input);
    const float4 b = *reinterpret_cast<const float4*>(x_TI + row * I + input + 4);
    return {bfloat_pair(a.x, a.y), bfloat_pair(a.z, a.w), bfloat_pair(b.x, b.y), bfloat_pair(b.z, b.w)};
}

// What a lane reads of 16 rows of weights for a segment: outputs `output` and + 8.
struct Segment {
    uint4 low[SEGMENT_STEPS], high[SEGMENT_STEPS];

    __device__ void load(const __nv_bfloat16* w_OI, int64_t output, int64_t first, int64_t O, int64_t I) {
        for (int n = 0; n < SEGMENT_STEPS; n++) {
            low[n] = weights_at(w_OI, output, first + STEP * n, O, I);
            high[n] = weights_at(w_OI, output + 8, first + STEP * n, O, I);
        }
    }
};

static_assert(ROUND_SEGMENTS % WARPS == 0);

template <int TILES>
__global__ void __launch_bounds__(THREADS, 2) dense(Output out, const float* x_TI, const __nv_bfloat16* w_OI,
                                                    int64_t I) {
    auto& shared = dynamic_shared<Sums<TILES>>();
    Total<TILES> total;
    const int64_t num_segments = (I + STEP * SEGMENT_STEPS - 1) / (STEP * SEGMENT_STEPS);
    const int lane = lane_id(), row = lane / 4;
    const int64_t output = int64_t(blockIdx.x) * 16 + row;
    const auto first_of = [lane](int64_t segment) { return segment * STEP * SEGMENT_STEPS + 8 * (lane % 4); };
    Segment next;
    next.load(w_OI, output, first_of(warp_id()), out.O, I);
    for (int64_t first = 0; first < num_segments; first += ROUND_SEGMENTS) {
        const int64_t end = first + ROUND_SEGMENTS < num_segments ? first + ROUND_SEGMENTS : num_segments;
        for (int64_t segment = first + warp_id(); segment < end; segment += WARPS) {
            const Segment w = next;
            next.load(w_OI, output, first_of(segment + WARPS), out.O, I);
            float y[TILES][4] = {};
#pragma unroll
            for (int n = 0; n < SEGMENT_STEPS; n++)
                for (int tile = 0; tile < TILES; tile++) {
                    const uint4 x = x_at(x_TI, 8 * tile + row, first_of(segment) + STEP * n, out.T, I);
                    mma_bf16(y[tile], {w.low[n].x, w.high[n].x, w.low[n].y, w.high[n].y}, {x.x, x.y});
                    mma_bf16(y[tile], {w.low[n].z, w.high[n].z, w.low[n].w, w.high[n].w}, {x.z, x.w});
                }
            shared.put(int(segment - first), y);
        }
        total.add(shared, int(end - first));
    }
    total.put(out, blockIdx.x);
}

}  // namespace
}  // namespace quire

using namespace quire;

int dense_cuda(float* y_TO, const float* x_TI, const void* w_OI, const float* bias_O, int64_t T, int64_t O, int64_t I,
               int64_t column, int64_t stride, int accumulate, Stream stream) {
    if (T < 0 || T > ROWS_SERVED || O < 1 || I < 8 || I % 8 || column < 0 || column + O > stride) return BAD_SIZE;
    if (T == 0) return OK;
    const Output out = {y_TO, bias_O, T, O, column, stride, accumulate};
    const int64_t tiles = divide_up(T, 8);
    return launch(tiles == 1 ? dense<1> : dense<2>, dim3(divide_up(O, 16)), dim3(THREADS),
                  tiles == 1 ? sizeof(Sums<1>) : sizeof(Sums<2>), cudaStream_t(stream), out, x_TI,
                  (const __nv_bfloat16*)w_OI, I);
}
