// rope_angles_cuda, rope_store_cuda and move_kv_cuda: positions turned into rotations, keys and values into the paged
// cache, and from one of its slots into another. About one operation a byte: memory alone bounds them.
#include "common.cuh"
#include "kernels.cuh"
#include "kv.cuh"

namespace quire {
namespace {

constexpr int THREADS = 128;

// Grid: tokens. The product is computed in double: in float the angle at position 100,000 would be off by 0.004.
__global__ void rope_angles(float* cos_TA, float* sin_TA, const int64_t* position_T, const double* inv_freq,
                            int64_t half, double scale) {
    for (int64_t i = threadIdx.x; i < half; i += THREADS) {
        const double angle = double(position_T[blockIdx.x]) * inv_freq[i];
        cos_TA[blockIdx.x * half + i] = float(cos(angle) * scale);
        sin_TA[blockIdx.x * half + i] = float(sin(angle) * scale);
    }
}

// Number `a` of a head, turned: pairs (i, i + half) of the first 2 * half, the rest passes. Each product is rounded.
__device__ float rotated(const float* x, const float* cos, const float* sin, int64_t half, int64_t a) {
    if (a < half) return x[a] * cos[a] - x[a + half] * sin[a];
    if (a < 2 * half) return x[a] * cos[a - half] + x[a - half] * sin[a - half];
    return x[a];
}

// Grid: (tokens, H + G heads): a warp's block turns a query, or stores a key and its value.
__global__ void rope_store(float* q_THA, __nv_bfloat16* k_cache, __nv_bfloat16* v_cache, const float* qkv_TX,
                           const float* cos_TA, const float* sin_TA, const int64_t* slot_T, int64_t H, int64_t G,
                           int64_t A, int64_t half, int64_t B, int64_t width) {
    const int64_t t = blockIdx.x, head = blockIdx.y;
    const float *const cos = cos_TA + t * half, *const sin = sin_TA + t * half;
    const float* const x = qkv_TX + (t * (H + 2 * G) + head) * A;
    if (head < H) {
        for (int64_t a = threadIdx.x; a < A; a += WARP) q_THA[(t * H + head) * A + a] = rotated(x, cos, sin, half, a);
        return;
    }
    if (slot_T[t] < 0) return;      // of a padded token
    const int64_t at = kv_offset(slot_T[t], head - H, G, B, width);
    const float* const value = x + G * A;
    bool finite = true;
    for (int64_t a = threadIdx.x; a < width; a += WARP) {
        const __nv_bfloat16 key = __float2bfloat16_rn(a < A ? rotated(x, cos, sin, half, a) : 0);
        finite &= is_finite(__bfloat162float(key));
        k_cache[at + a] = key;
    }
    finite = !__any_sync(ALL_LANES, !finite);   // softmax may lose a NaN in a key, but no sum loses one in a value
    for (int64_t a = threadIdx.x; a < width; a += WARP)
        v_cache[at + a] = __float2bfloat16_rn(!finite ? nan_number() : a < A ? value[a] : 0);
}

// Grid: G heads. One token after the other: a slot may be written once it has been read.
__global__ void move_kv(__nv_bfloat16* k_cache, __nv_bfloat16* v_cache, const int64_t* from_T, const int64_t* to_T,
                        int64_t T, int64_t G, int64_t B, int64_t width) {
    for (int64_t t = 0; t < T; t++) {
        const int64_t from = kv_offset(from_T[t], blockIdx.x, G, B, width);
        const int64_t to = kv_offset(to_T[t], blockIdx.x, G, B, width);
        for (int64_t a = threadIdx.x; a < width; a += THREADS) {    // each thread moves its own columns
            k_cache[to + a] = k_cache[from + a];
            v_cache[to + a] = v_cache[from + a];
        }
    }
}

}  // namespace
}  // namespace quire

using namespace quire;

int64_t kv_width_cuda(int64_t A) { return kv_width(A); }

int rope_angles_cuda(float* cos, float* sin, const int64_t* position_T, const double* inv_freq, int64_t T, int64_t half,
                     double scale, Stream stream) {
    if (T < 0 || half < 0) return BAD_SIZE;
    if (T == 0) return OK;
    return launch(rope_angles, dim3(T), dim3(THREADS), 0, cudaStream_t(stream), cos, sin, position_T, inv_freq, half,
                  scale);
}

int rope_store_cuda(float* q_THA, void* k_cache, void* v_cache, const float* qkv_TX, const float* cos, const float* sin,
                    const int64_t* slot_T, int64_t T, int64_t H, int64_t G, int64_t A, int64_t half, int64_t B,
                    Stream stream) {
    if (T < 0 || H < 1 || G < 1 || half < 0 || 2 * half > A || B < 1 || !kv_width(A)) return BAD_SIZE;
    if (T == 0) return OK;
    return launch(rope_store, dim3(T, H + G), dim3(WARP), 0, cudaStream_t(stream), q_THA, (__nv_bfloat16*)k_cache,
                  (__nv_bfloat16*)v_cache, qkv_TX, cos, sin, slot_T, H, G, A, half, B, kv_width(A));
}

int move_kv_cuda(void* k_cache, void* v_cache, const int64_t* from_T, const int64_t* to_T, int64_t T, int64_t G,
                 int64_t A, int64_t B, Stream stream) {
    if (T < 0 || G < 1 || B < 1 || !kv_width(A)) return BAD_SIZE;
    return launch(move_kv, dim3(G), dim3(THREADS), 0, cudaStream_t(stream), (__nv_bfloat16*)k_cache,
                  (__nv_bfloat16*)v_cache, from_T, to_T, T, G, B, kv_width(A));
}
