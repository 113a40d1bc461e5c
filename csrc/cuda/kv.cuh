// How one layer's paged cache lies in device memory: for those who store into it and those who read it, nobody else.
//
// Pages of G heads of B tokens of `width` numbers in bfloat16. A token's key is one run of whole 16-byte pieces, and a
// head's tokens in a page follow each other: tiles of keys are copied as they lie.
#pragma once
#include <cstdint>

#include "common.cuh"

namespace quire {

// The widths that attention is compiled for. Narrower heads are filled up with zeros, which change no sum.
#define HEAD_WIDTHS(DO) DO(32) DO(64) DO(80) DO(96) DO(128) DO(256)

inline int64_t kv_width(int64_t A) {
    if (A < 1 || A % 2) return 0;
#define IF_FITS(width) if (A <= width) return width;
    HEAD_WIDTHS(IF_FITS)
#undef IF_FITS
    return 0;
}

// Where the key, or value, of `slot` begins; 64 bits, since a cache has more numbers than 2^31.
__device__ inline int64_t kv_offset(int64_t slot, int64_t group, int64_t G, int64_t B, int64_t width) {
    return ((slot / B * G + group) * B + slot % B) * width;
}

}  // namespace quire
