// How packed weights and quantized activations lie in memory: what pack_cpu writes and matmul and embed read.
//
// The outputs are cut into panels of 16; the last is filled up with zeros. Plain numbers: for each input, the 16
// weights. Quantized: a record for each group of 32 inputs, its scales and then its quants. The quants of a record are
// 8 blocks of 4 consecutive inputs; a block of bytes is 64 of them, 16 outputs x 4 inputs, so that one instruction
// which adds up four products serves all 16 outputs. Quants of so many bits fill as many 64-byte lines, each with as
// many blocks as fit into it whole, the first in the lowest bits; the last blocks are cut into what the lines have left
// on top. In the K formats each 8 records stand behind a head that holds the 16 outputs' float16 scale and, if there
// are minima, float16 minimum.
#pragma once
#include <cstdint>
#include <cstring>

#include "../kernels.h"

namespace quire {

constexpr int PANEL = 16, GROUP = 32, SUPER = 8;    // outputs a panel, inputs a group, groups behind a head

// Scales of a record, for 16 outputs:
// ONE     float16 d                    weight = d * (q - zero)
// ONE_MIN float16 d, float16 m         weight = d * q + m
// K32     uint8 s, uint8 m             weight = head.d * s * q - head.m * m
// K16     int8 s of both 16 inputs     weight = head.d * s * (q - zero)
// K16_MIN s | m << 4 of both 16 inputs weight = head.d * s * q - head.m * m
enum class Scaling { PLAIN, ONE, ONE_MIN, K32, K16, K16_MIN };

struct Layout {
    Scaling scaling;
    int bits;           // a quant's; 8: signed
    int zero;

    constexpr bool quantized() const { return scaling != Scaling::PLAIN; }
    constexpr bool heads() const { return scaling >= Scaling::K32; }
    constexpr int head_bytes() const { return !heads() ? 0 : scaling == Scaling::K16 ? 32 : 64; }
    constexpr int scale_bytes() const { return scaling == Scaling::ONE_MIN ? 64 : 32; }
    constexpr int record_bytes() const { return scale_bytes() + PANEL * GROUP * bits / 8; }
    constexpr int block() const { return heads() ? GROUP * SUPER : quantized() ? GROUP : 1; }

    constexpr int64_t head_offset(int64_t group) const {
        return group / SUPER * (head_bytes() + SUPER * record_bytes());
    }
    constexpr int64_t record_offset(int64_t group) const {
        return group * record_bytes() + (group / SUPER + 1) * head_bytes();
    }
    constexpr int64_t panel_bytes(int64_t I) const {
        if (!quantized()) return I * PANEL * bits / 8;
        return I / GROUP * record_bytes() + (heads() ? I / (GROUP * SUPER) * head_bytes() : 0);
    }
};

// What `format` looks like; bits = 0 if it is none of ours.
constexpr Layout layout(int32_t format) {
    switch (format) {
        case F32: return {Scaling::PLAIN, 32, 0};
        case BF16: return {Scaling::PLAIN, 16, 0};
        case Q4_0: return {Scaling::ONE, 4, 8};
        case Q4_1: return {Scaling::ONE_MIN, 4, 0};
        case Q5_0: return {Scaling::ONE, 5, 16};
        case Q5_1: return {Scaling::ONE_MIN, 5, 0};
        case Q8_0: return {Scaling::ONE, 8, 0};
        case Q2_K: return {Scaling::K16_MIN, 2, 0};
        case Q3_K: return {Scaling::K16, 3, 4};
        case Q4_K: return {Scaling::K32, 4, 0};
        case Q5_K: return {Scaling::K32, 5, 0};
        case Q6_K: return {Scaling::K16, 6, 32};
        default: return {Scaling::PLAIN, 0, 0};
    }
}

// `width` bits of a line, from bit `from` on, which are a quant's from bit `to` on.
struct Field {
    int line, width, from, to;
};

// Where a record's quants of `bits` bits lie: of each block up to three fields, the others 0 bits wide.
struct Fields {
    Field of[8][3];

    constexpr explicit Fields(int bits) : of{} {
        const int blocks_a_line = 8 / bits, on_top = blocks_a_line * bits, num_whole = bits * blocks_a_line;
        int line = 0, from = on_top;
        for (int k = 0; k < 8; k++) {
            if (k < num_whole) {
                of[k][0] = {k / blocks_a_line, bits, k % blocks_a_line * bits, 0};
                continue;
            }
            for (int i = 0, to = 0; to < bits; i++) {
                const int width = bits - to < 8 - from ? bits - to : 8 - from;
                of[k][i] = {line, width, from, to};
                to += width, from += width;
                if (from == 8) line++, from = on_top;
            }
        }
    }
};

template <int bits>
constexpr Fields FIELDS{bits};

constexpr int64_t num_panels(int64_t O) { return (O + PANEL - 1) / PANEL; }

constexpr bool serves(const Layout& form, int64_t O, int64_t I) {
    return form.bits && O > 0 && I > 0 && I % form.block() == 0;
}

// One group of a tile of x rounded to 8 bits, x = scale * q. A tile has `height` rows, the power of two that holds all
// rows, but no more than the instructions work on at a time; the last tile is filled up with rows of zeros. A group
// holds all rows' q, then all their scales, and so on: AMX reads the q of 16 rows at once. The groups of a tile follow
// each other, then comes the next tile.
struct Group {
    uint8_t* start;
    int64_t height;

    static constexpr int64_t ROW_BYTES = GROUP + 16;

    int8_t* q(int64_t row) const { return reinterpret_cast<int8_t*>(start) + GROUP * row; }
    float* scale() const { return reinterpret_cast<float*>(start + GROUP * height); }
    float* sum() const { return scale() + height; }                                            // scale * whole_sum
    int32_t* whole_sum() const { return reinterpret_cast<int32_t*>(sum() + height); }          // of all q
    int16_t* half_sums() const { return reinterpret_cast<int16_t*>(whole_sum() + height); }    // first, last 16 q
    Group operator+(int64_t groups) const { return {start + groups * ROW_BYTES * height, height}; }
};

struct Matmul {
    float* y_TO;
    const float* x_TI;
    Group x;                    // x rounded: the first group of its first tile; unset if all weights are plain
    const uint16_t* x_tiles;    // x in bfloat16, if AMX reads it so
    const float* bias_O;        // may be null
    int64_t O, I;               // O: of all parts
    bool accumulate;
};

constexpr int64_t MOST_ROWS = 128;      // of a share: L1 holds their sums for one panel. A multiple of 16

// What of a part to compute: some of its panels, for some rows.
struct Share {
    int64_t column;             // of y_TO, where the part begins
    int64_t start, end;         // panels
    int64_t start_row, num_rows;
};

constexpr int64_t MOST_BFLOAT_ROWS = 512;   // of a share in bfloat16: for so many rows weights are dequantized once

// With AMX x is rounded to bfloat16 in tiles of 16 rows x 32 inputs (1 KB), filled up with zeros, all of a tile of rows
// before the next; of these there is an even number.
constexpr int64_t BFLOAT_TILE = 16 * GROUP;
constexpr int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }
constexpr int64_t bfloat_tiles(int64_t T, int64_t I) { return divide_up(T, 32) * 2 * divide_up(I, GROUP); }

// One variant for each kind of instructions. `quantize` rounds some groups of a tile's rows, at most `most_height`,
// `multiply` computes a share.
#define MATMUL                                                                                            \
    int64_t most_height();                                                                                \
    void quantize(Group to, const float* x, int64_t num_rows, int64_t row_stride, int64_t num_groups);    \
    void multiply(const Matmul& call, const Part& part, const Share& share);                              \
    void multiply_bfloat(const Matmul& call, const Part& part, const Share& share);
namespace plain { MATMUL }
namespace avx2 { MATMUL }
namespace avx512 { MATMUL }
namespace amx { MATMUL
    void round_rows(uint16_t* x_tiles, const float* x_TI, int64_t T, int64_t I, int64_t tile);  // one tile of rows
}
#undef MATMUL

}  // namespace quire
