// The rows of ops.inc for each instruction set, as ops.cpp calls them.
#pragma once
#include <cstdint>

namespace quire {

#define ROW_OPERATIONS                                                                              \
    void rms_norm_row(float* out, const float* x, const float* weight, int64_t D, float eps);       \
    void silu_mul_row(float* act, const float* gate, const float* up, int64_t F);                   \
    float greatest(const float* x, int64_t num);

namespace plain { ROW_OPERATIONS }
namespace avx2 { ROW_OPERATIONS }
namespace avx512 { ROW_OPERATIONS }

#undef ROW_OPERATIONS

}  // namespace quire
