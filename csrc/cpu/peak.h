// The loops of peak.inc for each instruction set, as peak.cpp calls them: how many operations they did.
#pragma once
#include <cstdint>

namespace quire {

namespace plain {
double float_operations(int64_t rounds);
double int8_operations(int64_t rounds);
}  // namespace plain
namespace avx2 {
double float_operations(int64_t rounds);
double int8_operations(int64_t rounds);
}  // namespace avx2

}  // namespace quire
