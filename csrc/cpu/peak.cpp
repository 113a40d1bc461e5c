// How fast this machine computes on registers: the arithmetic's limit, for benchmarks.
#include "peak.h"

#include <chrono>
#include <vector>

#include "../kernels.h"
#include "isa.h"
#include "matmul.h"
#include "pool.h"

using namespace quire;

double peak_cpu(int32_t format, double seconds) {
    using Clock = std::chrono::steady_clock;
    constexpr int64_t ROUNDS = 10000;   // some 50 us between two looks at the clock
    const Layout form = layout(format);
    if (!form.bits) return 0;
    auto* loop = form.quantized() ? PICK(int8_operations) : PICK(float_operations);
#if defined(__x86_64__)
    if (isa() == AMX && form.quantized()) loop = amx::int8_operations;
#endif
    const auto start = Clock::now();
    const auto elapsed = [start] { return std::chrono::duration<double>(Clock::now() - start).count(); };
    std::vector<double> operations(num_threads());
    parallel(operations.size(), [&](int64_t i) {
        do operations[i] += loop(ROUNDS);
        while (elapsed() < seconds);
    });
    double sum = 0;
    for (double part : operations) sum += part;
    return sum / elapsed();
}
