// What every kernel here needs: the device's types (or the emulator's), how a kernel is launched, sums over a warp.
//
// A .cu file compiles unchanged by nvcc and, against emu/cuda_emu.h, by a C++ compiler. It knows nothing of torch.
// Compiled with -fmad=false: products and sums fuse where fmaf says so, and nowhere else.
#pragma once
#include <cstdint>

#ifdef __CUDACC__
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#else
#include "../emu/cuda_emu.h"
#endif

#include "../cpu/matmul.h"    // the table of formats
#include "ptx.cuh"

#ifdef __CUDACC__

template <class T>
__device__ T& dynamic_shared() {
    extern __shared__ __align__(128) unsigned char shared_bytes[];
    return *reinterpret_cast<T*>(shared_bytes);
}

// DEVICE_ERROR if the device refuses the launch; what happens inside the kernel shows later, when it is waited for.
template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t stream,
           Arguments... args) {
    constexpr size_t UNASKED = 48 << 10;
    if (shared_bytes > UNASKED)     // if this is refused, so is the launch, and its error takes this one's place
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, int(shared_bytes));
    kernel<<<grid, block, shared_bytes, stream>>>(Parameters(args)...);
    return cudaGetLastError() == cudaSuccess ? OK : DEVICE_ERROR;
}

inline int multiprocessors() {
    int device = 0, number = 1;
    cudaGetDevice(&device);
    cudaDeviceGetAttribute(&number, cudaDevAttrMultiProcessorCount, device);
    return number;
}

#endif

namespace quire {

constexpr int WARP = 32;
constexpr unsigned ALL_LANES = 0xffffffff;

__device__ inline int lane_id() { return int(threadIdx.x) % WARP; }
__device__ inline int warp_id() { return int(threadIdx.x) / WARP; }

// The same number in all lanes; the order of the sum is that of a butterfly, whatever the data.
__device__ inline float warp_sum(float x) {
    for (int bits = WARP / 2; bits > 0; bits /= 2) x += __shfl_xor_sync(ALL_LANES, x, bits);
    return x;
}

__device__ inline uint32_t bfloat_pair(float low, float high) {
    const __nv_bfloat162 pair = __floats2bfloat162_rn(low, high);
    uint32_t bits;
    memcpy(&bits, &pair, sizeof bits);
    return bits;
}

__device__ inline float half_at(const void* p) {
    return __half2float(__ushort_as_half(*static_cast<const uint16_t*>(p)));
}

__device__ inline float nan_number() { return __int_as_float(0x7fffffff); }
__device__ inline bool is_finite(float x) { return (__float_as_int(x) & 0x7f800000) != 0x7f800000; }

}  // namespace quire
