#include "isa.h"

#include <atomic>

#include "../kernels.h"

namespace quire {
namespace {

Isa best() {
#if defined(__x86_64__)
    __builtin_cpu_init();
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c")) return AVX2;
#endif
    return PLAIN;
}

std::atomic<Isa> chosen{best()};

}  // namespace

Isa isa() { return chosen.load(std::memory_order_relaxed); }

}  // namespace quire

int set_isa_cpu(int64_t level) {
    if (level < quire::PLAIN || level > quire::best()) return NO_ISA;
    quire::chosen = static_cast<quire::Isa>(level);
    return OK;
}
