// rope_angles_cpu: positions turned into rotations.
#include <cmath>

#include "../kernels.h"
#include "pool.h"

int rope_angles_cpu(float* cos, float* sin, const int64_t* position_T, const double* inv_freq, int64_t T, int64_t half,
                    double scale) {
    constexpr int64_t TOKENS = 16;      // of a task: some 20 us
    if (T < 0 || half < 0) return BAD_SIZE;
    quire::parallel((T + TOKENS - 1) / TOKENS, [&](int64_t task) {
        for (int64_t t = task * TOKENS; t < T && t < (task + 1) * TOKENS; t++)
            for (int64_t i = 0; i < half; i++) {
                const double angle = double(position_T[t]) * inv_freq[i];
                cos[t * half + i] = float(std::cos(angle) * scale);
                sin[t * half + i] = float(std::sin(angle) * scale);
            }
    });
    return OK;
}
