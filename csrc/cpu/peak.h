// The loops of peak.inc for each instruction set, as peak.cpp calls them: how many operations they did.
#pragma once
#include <cstdint>

namespace quire {

#define LOOPS                                 \
    double float_operations(int64_t rounds); \
    double int8_operations(int64_t rounds);
namespace plain { LOOPS }
namespace avx2 { LOOPS }
namespace avx512 { LOOPS }
namespace amx { double int8_operations(int64_t rounds); }
#undef LOOPS

}  // namespace quire
