// The passes of draw.inc over a whole row, for each instruction set, as draw.cpp calls them.
#pragma once
#include <cstdint>

namespace quire {

constexpr double LN2_HIGH = 0x1.62E42FEFA3800p-1, LN2_LOW = 0x1.EF35793C76730p-45;
constexpr int SHARE_BITS = 40;
constexpr double NO_SHARE = -29;    // e^-29 rounds to 0
constexpr uint64_t GOLDEN = 0x9E3779B97F4A7C15, MIX_A = 0xBF58476D1CE4E5B9, MIX_B = 0x94D049BB133111EB;
constexpr double MOST_NOISE = 36.8;
constexpr int64_t BLOCK = 32;
constexpr int MASS_BITS = 128;      // so that e^-746, which no double tells from 0, is none of the subnormal numbers

// `top` is the greatest of x, `tops` those of its blocks.
//   block_tops    finds them
//   total_share   sum of the shares of (x - top) / temperature
//   shares        e^x for x <= 0, in units of 2^-SHARE_BITS
//   masses        e^((x - top) / temperature) in units of 2^-MASS_BITS, which need not be whole; and their sum
//   next_chance   where, from `from` on, the first block begins in which (x - top) * factor plus noise may be greater
//                 than `best`; where there is none, num or the place of a short block at the end
#define DRAW_PASSES(Real)                                                                               \
    void block_tops(double* tops, const Real* x, int64_t num);                                          \
    int64_t total_share(const Real* x, const double* tops, int64_t num, double top, double temperature);\
    int64_t next_chance(const Real* x, const double* tops, int64_t from, int64_t num, double top,       \
                        double factor, uint64_t key, double best);                                      \
    double masses(double* mass, const Real* x, int64_t num, double top, double temperature);            \
    void shares(int64_t* share_C, const double* x_C, int64_t num);

namespace plain { DRAW_PASSES(float) DRAW_PASSES(double) }
namespace avx2 { DRAW_PASSES(float) DRAW_PASSES(double) }
namespace avx512 { DRAW_PASSES(float) DRAW_PASSES(double) }

#undef DRAW_PASSES

}  // namespace quire
