#include "isa.h"

#include <atomic>

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

#include "../kernels.h"

namespace quire {
namespace {

#if defined(__x86_64__) && !defined(EMULATED)

// Linux lets a process use AMX's tiles when it has asked (arch_prctl(2)); from then on all its threads may.
bool tiles_allowed() {
#if defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, TILE_DATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, TILE_DATA) == 0;
#else
    return false;
#endif
}

bool has_amx() {
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    const bool bfloat_tiles = edx >> 22 & 1, tiles = edx >> 24 & 1, int8_tiles = edx >> 25 & 1;
    if (!bfloat_tiles || !tiles || !int8_tiles || !__get_cpuid_count(7, 1, &eax, &ebx, &ecx, &edx)) return false;
    const bool avx512_bf16 = eax >> 5 & 1;
    return avx512_bf16 && tiles_allowed();
}

#endif

Isa best() {
#if defined(EMULATED)
    return AMX;
#elif defined(__x86_64__)
    __builtin_cpu_init();   // its answers include whether the system saves the registers
    if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("f16c"))
        return PLAIN;
    if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
        !__builtin_cpu_supports("avx512vl") || !__builtin_cpu_supports("avx512dq") ||
        !__builtin_cpu_supports("avx512vnni"))
        return AVX2;
    return has_amx() ? AMX : AVX512;
#else
    return PLAIN;
#endif
}

const Isa BEST = best();

std::atomic<Isa> chosen{BEST};

}  // namespace

Isa isa() { return chosen.load(std::memory_order_relaxed); }

}  // namespace quire

int set_isa_cpu(int64_t level) {
    if (level < quire::PLAIN || level > quire::BEST) return NO_ISA;
    quire::chosen = static_cast<quire::Isa>(level);
    return OK;
}
