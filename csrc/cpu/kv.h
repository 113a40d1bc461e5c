// How one layer's paged cache lies in memory: for those who store into it and those who read it, nobody else.
//
// k_cache and v_cache hold pages of G heads of `head_values` numbers each. A head's keys lie in tiles of 16 tokens,
// each [A][16 tokens], and its values in tiles of 16 numbers, each [B][16 numbers]: keys times a query and
// probabilities times values are then the same small product. In bfloat16 the rows of a tile lie in pairs,
// [rows / 2][16][2]: one load brings two rows, in the order that instructions on pairs of bfloat16 want.
#pragma once
#include <cstdint>

namespace quire {

constexpr int64_t TILE = 16;    // columns
constexpr int64_t MIN_PAGE = 8, MAX_PAGE = 256, MAX_HEAD_WIDTH = 512;

inline int64_t round_up_16(int64_t n) { return (n + 15) / 16 * 16; }

// Numbers that a head's keys, or its values, take in a page.
inline int64_t head_values(int64_t A, int64_t B) { return round_up_16(A) * (B < TILE ? TILE : B); }

inline bool is_cache_shape(int64_t G, int64_t A, int64_t B) {
    return G > 0 && A > 0 && A % 2 == 0 && A <= MAX_HEAD_WIDTH && B >= MIN_PAGE && B <= MAX_PAGE && (B & (B - 1)) == 0;
}

}  // namespace quire
