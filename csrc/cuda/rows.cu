// rms_norm_cuda, silu_mul_cuda and group_by_expert_cuda: small operations on rows. Each reads its input once and does a
// few operations a number, 0.5 to 5 a byte: memory alone bounds them.
#include "common.cuh"
#include "kernels.cuh"

namespace quire {
namespace {

constexpr int THREADS = 256;

// The sum over a block, the same in all threads, in an order that the block's size alone fixes.
__device__ float block_sum(float x, float* of_warps) {
    const float sum = warp_sum(x);
    if (lane_id() == 0) of_warps[warp_id()] = sum;
    __syncthreads();
    float all = 0;
    for (int w = 0; w < THREADS / WARP; w++) all += of_warps[w];
    return all;
}

// One block a row. A row of up to 4 KB a thread's 16 bytes is read from cache the second time.
__global__ void __launch_bounds__(THREADS) rms_norm(float* out_TD, const float* x_TD, const float* weight_D, int64_t D,
                                                    float eps) {
    auto& of_warps = dynamic_shared<float[THREADS / WARP]>();
    const float* const x = x_TD + blockIdx.x * D;
    float* const out = out_TD + blockIdx.x * D;
    float sum = 0;
    const int64_t whole = D % 4 ? 0 : D;    // else the next row does not begin at a multiple of 16 bytes
    for (int64_t d = 4 * threadIdx.x; d < whole; d += 4 * THREADS) {
        const float4 part = *reinterpret_cast<const float4*>(x + d);
        sum = fmaf(part.x, part.x, fmaf(part.y, part.y, fmaf(part.z, part.z, fmaf(part.w, part.w, sum))));
    }
    for (int64_t d = whole + threadIdx.x; d < D; d += THREADS) sum = fmaf(x[d], x[d], sum);
    const float scale = 1 / sqrtf(block_sum(sum, of_warps) / D + eps);
    for (int64_t d = 4 * threadIdx.x; d < whole; d += 4 * THREADS) {
        const float4 part = *reinterpret_cast<const float4*>(x + d);
        const float4 weight = *reinterpret_cast<const float4*>(weight_D + d);
        *reinterpret_cast<float4*>(out + d) = {part.x * scale * weight.x, part.y * scale * weight.y,
                                               part.z * scale * weight.z, part.w * scale * weight.w};
    }
    for (int64_t d = whole + threadIdx.x; d < D; d += THREADS) out[d] = x[d] * scale * weight_D[d];
}

__device__ float silu(float x) { return x / (1 + expf(-x)); }

// Grid: (rows, pieces of a row): of the dimensions only the first passes 65,535.
__global__ void __launch_bounds__(THREADS) silu_mul(float* act_TF, const float* x_T2F, int64_t F) {
    const float *const gate = x_T2F + int64_t(blockIdx.x) * 2 * F, *const up = gate + F;
    float* const act = act_TF + int64_t(blockIdx.x) * F;
    const int64_t thread = blockIdx.y * THREADS + threadIdx.x;
    if (F % 4) {
        for (int64_t f = 4 * thread; f < 4 * thread + 4 && f < F; f++) act[f] = silu(gate[f]) * up[f];
    } else if (4 * thread < F) {
        const float4 g = *reinterpret_cast<const float4*>(gate + 4 * thread);
        const float4 u = *reinterpret_cast<const float4*>(up + 4 * thread);
        *reinterpret_cast<float4*>(act + 4 * thread) = {silu(g.x) * u.x, silu(g.y) * u.y, silu(g.z) * u.z,
                                                        silu(g.w) * u.w};
    }
}

// One block an expert, which counts those before it and places its own: E readings of expert_T, from cache, and no
// order of atomics.
__global__ void __launch_bounds__(THREADS) group_by_expert(int64_t* order_T, int64_t* starts_E1,
                                                           const int64_t* expert_T, int64_t T, int64_t E) {
    auto& of_warps = dynamic_shared<int[THREADS / WARP]>();
    const int64_t expert = blockIdx.x;
    int before = 0;
    for (int64_t t = threadIdx.x; t < T; t += THREADS) before += expert_T[t] >= 0 && expert_T[t] < expert;
    for (int bits = WARP / 2; bits > 0; bits /= 2) before += __shfl_xor_sync(ALL_LANES, before, bits);
    if (lane_id() == 0) of_warps[warp_id()] = before;
    __syncthreads();
    int64_t start = 0;
    for (int w = 0; w < THREADS / WARP; w++) start += of_warps[w];
    __syncthreads();
    if (threadIdx.x == 0) starts_E1[expert] = start;
    if (expert == E) return;    // only the end of the last one

    for (int64_t first = 0; first < T; first += THREADS) {
        const int64_t t = first + threadIdx.x;
        const bool is_ours = t < T && expert_T[t] == expert;
        const unsigned votes = __ballot_sync(ALL_LANES, is_ours);
        if (lane_id() == 0) of_warps[warp_id()] = __popc(votes);
        __syncthreads();
        int64_t place = start + __popc(votes & ((1u << lane_id()) - 1));
        for (int w = 0; w < THREADS / WARP; w++) {
            if (w < warp_id()) place += of_warps[w];
            start += of_warps[w];
        }
        if (is_ours) order_T[place] = t;
        __syncthreads();
    }
}

}  // namespace
}  // namespace quire

using namespace quire;

int rms_norm_cuda(float* out_TD, const float* x_TD, const float* weight_D, int64_t T, int64_t D, float eps,
                  Stream stream) {
    if (T < 0 || D < 1) return BAD_SIZE;
    if (T == 0) return OK;
    return launch(rms_norm, dim3(T), dim3(THREADS), sizeof(float[THREADS / WARP]), cudaStream_t(stream), out_TD, x_TD,
                  weight_D, D, eps);
}

int silu_mul_cuda(float* act_TF, const float* x_T2F, int64_t T, int64_t F, Stream stream) {
    if (T < 0 || F < 1) return BAD_SIZE;
    if (T == 0) return OK;
    return launch(silu_mul, dim3(T, divide_up(F, 4 * THREADS)), dim3(THREADS), 0, cudaStream_t(stream), act_TF, x_T2F,
                  F);
}

int group_by_expert_cuda(int64_t* order_T, int64_t* starts_E1, const int64_t* expert_T, int64_t T, int64_t E,
                         Stream stream) {
    if (T < 0 || E < 1) return BAD_SIZE;
    return launch(group_by_expert, dim3(E + 1), dim3(THREADS), sizeof(int[THREADS / WARP]), cudaStream_t(stream),
                  order_T, starts_E1, expert_T, T, E);
}
