// Instructions that CUDA C++ has no name for. The emulator has its own of the same names (emu/cuda_emu.h).
//
// Registers of mma's operands, for lane l, g = l / 4 and q = l % 4 (PTX ISA, "Matrix Fragments"):
//   bfloat16, k = 16: a[0], a[1] rows g, g + 8, inputs 2q, 2q + 1; a[2], a[3] the same of inputs + 8;
//                     b[0] inputs 2q, 2q + 1 of column g; b[1] the same + 8
//   8 bits, k = 32:   a[0], a[1] rows g, g + 8, inputs 4q to 4q + 3; a[2], a[3] + 16; b likewise
//   results:          c[0], c[1] row g, columns 2q, 2q + 1; c[2], c[3] row g + 8
#pragma once
#ifdef __CUDACC__

// 16 bytes from global to shared memory without registers; of them the last 16 - bytes are zeros.
__device__ inline void cp_async_16(void* to, const void* from, int bytes = 16) {
    const uint32_t shared = uint32_t(__cvta_generic_to_shared(to));
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from), "r"(bytes) : "memory");
}
__device__ inline void cp_async_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

// Until at most so many of this thread's groups are in flight. Others see them after a barrier.
template <int most_in_flight>
__device__ inline void cp_async_wait() {
    asm volatile("cp.async.wait_group %0;" ::"n"(most_in_flight) : "memory");
}

// Global memory that nobody writes and this multiprocessor does not read again: its first cache keeps what others need.
__device__ inline uint4 load_once(const uint4* from) {
    uint4 x;
    asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
        : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(__cvta_generic_to_global(from)));
    return x;
}
__device__ inline uint2 load_once(const uint2* from) {
    uint2 x;
    asm("ld.global.nc.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
        : "=r"(x.x), "=r"(x.y) : "l"(__cvta_generic_to_global(from)));
    return x;
}
__device__ inline uint32_t load_once(const uint32_t* from) {
    uint32_t x;
    asm("ld.global.nc.L1::no_allocate.u32 %0, [%1];" : "=r"(x) : "l"(__cvta_generic_to_global(from)));
    return x;
}

// Four 8 x 8 matrices of 16-bit numbers; lane l gives the address of row l % 8 of matrix l / 8.
__device__ inline void ldmatrix_x4(uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(uint32_t(__cvta_generic_to_shared(row))) : "memory");
}
__device__ inline void ldmatrix_x4_trans(uint32_t (&to)[4], const void* row) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(to[0]), "=r"(to[1]), "=r"(to[2]), "=r"(to[3])
                 : "r"(uint32_t(__cvta_generic_to_shared(row))) : "memory");
}

__device__ inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void mma_s8(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2]) {
    asm("mma.sync.aligned.m16n8k32.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
        "{%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}
__device__ inline void mma_s8_k16(int (&c)[4], const uint32_t (&a)[2], const uint32_t (&b)[1]) {
    asm("mma.sync.aligned.m16n8k16.row.col.s32.s8.s8.s32 {%0, %1, %2, %3}, {%4, %5}, {%6}, {%0, %1, %2, %3};"
        : "+r"(c[0]), "+r"(c[1]), "+r"(c[2]), "+r"(c[3])
        : "r"(a[0]), "r"(a[1]), "r"(b[0]));
}

#endif
