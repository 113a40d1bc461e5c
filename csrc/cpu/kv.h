// How one layer's paged cache lies in memory: for those who store into it and those who read it, nobody else.
//
// k_cache and v_cache hold pages of G heads. A head's keys lie in tiles of 16 tokens, each [A][16 tokens], and its
// values in tiles of 16 numbers, each [B][16 numbers]: keys times a query and probabilities times values are then the
// same small product. The rows of a tile lie in packs of 4 bytes, in bfloat16 [rows / 2][16][2] and in int8
// [rows / 4][16][4]: one load brings two or four rows, in the order that instructions on pairs of bfloat16 or on fours
// of int8 want. Behind a head's tiles of int8 lie its tokens' scales, in float32: a number is scale times cell. (In
// float16 they would save 3 % of a head of 64, and a key of 10^7 would be infinite.)
#pragma once
#include <cstdint>

#include "../kernels.h"

namespace quire {

constexpr int64_t TILE = 16;    // columns
constexpr int64_t MIN_PAGE = 8, MAX_PAGE = 256, MAX_HEAD_WIDTH = 512;

// Of a cell (float, uint16_t for bfloat16, int8_t): rows of a tile that lie side by side, and whether it has a scale.
template <class Cell> constexpr int64_t PACK = 4 / sizeof(Cell);
template <class Cell> constexpr bool SCALED = sizeof(Cell) == 1;

inline int64_t round_up_16(int64_t n) { return (n + 15) / 16 * 16; }

// Cells that a head's keys, or its values, take in a page; its scales not counted.
inline int64_t head_cells(int64_t A, int64_t B) { return round_up_16(A) * round_up_16(B); }

// The same in bytes, with its scales.
inline int64_t head_bytes(int64_t A, int64_t B, int64_t cell_bytes) {
    return head_cells(A, B) * cell_bytes + (cell_bytes == 1 ? round_up_16(B) * 4 : 0);
}

inline bool is_cache_shape(int64_t G, int64_t A, int64_t B) {
    return G > 0 && A > 0 && A % 2 == 0 && A <= MAX_HEAD_WIDTH && B >= MIN_PAGE && B <= MAX_PAGE && (B & (B - 1)) == 0;
}

// Bytes of a cell in a cache of this Format; 0 for others.
inline int64_t cell_bytes(int32_t cache_format) {
    return cache_format == F32 ? 4 : cache_format == BF16 ? 2 : cache_format == I8 ? 1 : 0;
}

}  // namespace quire
