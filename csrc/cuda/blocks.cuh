// How packed weights and quantized activations lie in device memory: what pack.cu and matmul.cu write and read.
// ../cpu/matmul.h says what a format's scales mean.
//
// Weights: outputs are cut into panels of 16, inputs into steps of 64 (two groups of 32); what lacks is zeros. A step's
// quants lie as the lanes of a warp need them for mma.m16n8k32 (ptx.cuh): lane l's register r of group j holds the
// quants of inputs 32 j + 16 (r / 2) + 4 (l % 4) and the next three, of output l / 4 + 8 (r % 2). A quant is cut into
// planes of 4, 2 or 1 bits (8 stay whole). Of the widest plane a lane has one run of bytes, read by one 16-byte load:
//   8 bits  [group][lane][4 registers]
//   4 bits  [lane][4 registers], group 0 in the low half of a byte, group 1 in the high half
//   2 bits  [lane][2 words], 1 bit [lane][1 word]: register r of group j in field 4 j + r of the words' bytes
// Behind them lie the scales, for each group and l / 4 (outputs o and o + 8 side by side):
//   ONE      d, d of o + 8             as float16
//   ONE_MIN  d, d, m, m
//   K32      s, s, m, m                as bytes
//   K16, K16_MIN  s of the first 16 inputs (o, o + 8), of the last 16
// In the K formats each 4 steps stand behind a head: for each l / 4 the float16 d, d and, if there are minima, m, m.
//
// x: rows are cut into tiles of 8, filled up with zeros; a tile's steps follow each other. A step of 704 bytes is
//   [lane][group][2 registers]         rounded to 8 bits: the other operand of the same product
//   [group][row] float scale, [group][row] float scale * sum of q, [group][row] int16 sums of the first and last 16 q
#pragma once
#include "common.cuh"

namespace quire {

constexpr int STEP = 64;                            // inputs
constexpr int STEPS_A_HEAD = SUPER * GROUP / STEP;
constexpr int ROWS = 8;                             // of a tile of x
constexpr int X_SCALES = 512, X_SUMS = X_SCALES + 64, X_HALF_SUMS = X_SUMS + 64, X_BYTES = X_HALF_SUMS + 64;
constexpr int FEW_ROWS = 16;                        // up to here a block has all rows, beyond it a tile of them
constexpr int TILE_ROWS = 64;

// Formats of blocks that are served, for tables and switches.
#define BLOCK_FORMATS(DO) \
    DO(Q4_0) DO(Q4_1) DO(Q5_0) DO(Q5_1) DO(Q8_0) DO(Q2_K) DO(Q3_K) DO(Q4_K) DO(Q5_K) DO(Q6_K)

// The layout above, of one format.
template <int F>
struct Blocks {
    static constexpr Layout FORM = layout(F);
    static constexpr Scaling SCALING = FORM.scaling;
    static constexpr int LOW = FORM.bits == 8 ? 8 : FORM.bits >= 4 ? 4 : 2, HIGH = FORM.bits - LOW;     // planes
    static constexpr bool HALVED = SCALING == Scaling::K16 || SCALING == Scaling::K16_MIN;
    static constexpr bool HAS_MIN = SCALING == Scaling::ONE_MIN || SCALING == Scaling::K32;     // for 32 inputs
    static constexpr int HIGH_PLANE = 128 * LOW, SCALES = HIGH_PLANE + 128 * HIGH;
    static constexpr int GROUP_SCALES = SCALING == Scaling::ONE_MIN ? 64 : 32;
    static constexpr int STEP_BYTES = SCALES + 2 * GROUP_SCALES;
    static constexpr int HEAD_BYTES = FORM.head_bytes();

    __host__ __device__ static int64_t steps(int64_t I) { return divide_up(I, STEP); }
    __host__ __device__ static int64_t panel_bytes(int64_t I) {
        return steps(I) * STEP_BYTES + (HEAD_BYTES ? steps(I) / STEPS_A_HEAD * HEAD_BYTES : 0);
    }
    // Where a step begins in its panel; its head, if any, stands before the first of STEPS_A_HEAD.
    __host__ __device__ static int64_t step_offset(int64_t step) {
        return step * STEP_BYTES + (HEAD_BYTES ? (step / STEPS_A_HEAD + 1) * HEAD_BYTES : 0);
    }
    __host__ __device__ static int64_t head_offset(int64_t step) {
        return step / STEPS_A_HEAD * (HEAD_BYTES + STEPS_A_HEAD * STEP_BYTES);
    }
};

// How a lane reads: weights that are needed once, what is read again or lies in shared memory.
struct Once {
    template <class T>
    __device__ T operator()(const T* from) const { return load_once(from); }
};
struct Again {
    template <class T>
    __device__ T operator()(const T* from) const { return *from; }
};

// A lane's quants of a step as they lie in memory.
template <int F>
struct Raw {
    uint32_t low[Blocks<F>::LOW], high[Blocks<F>::HIGH ? Blocks<F>::HIGH : 1];

    // `read` is Once where the step lies in global memory, else Again.
    template <class Read>
    __device__ void load(const uint8_t* step, int lane, Read read) {
        constexpr int LOW = Blocks<F>::LOW, HIGH = Blocks<F>::HIGH;
        if constexpr (LOW >= 4)
            for (int i = 0; i < LOW / 4; i++) {
                const uint4 four = read(reinterpret_cast<const uint4*>(step + 512 * i + 16 * lane));
                low[4 * i] = four.x, low[4 * i + 1] = four.y, low[4 * i + 2] = four.z, low[4 * i + 3] = four.w;
            }
        else load_two(low, step + 8 * lane, read);
        const uint8_t* const high_plane = step + Blocks<F>::HIGH_PLANE;
        if constexpr (HIGH == 2) load_two(high, high_plane + 8 * lane, read);
        if constexpr (HIGH == 1) high[0] = read(reinterpret_cast<const uint32_t*>(high_plane + 4 * lane));
    }

    // Register r of group j: four quants.
    __device__ uint32_t quants(int j, int r) const {
        constexpr int LOW = Blocks<F>::LOW, HIGH = Blocks<F>::HIGH;
        if constexpr (LOW == 8) return low[4 * j + r];
        uint32_t four = LOW == 4 ? low[r] >> 4 * j & 0x0f0f0f0f : field(low, 2, 4 * j + r);
        if constexpr (HIGH > 0) four |= field(high, HIGH, 4 * j + r) << LOW;
        return four;
    }

  private:
    template <class Read>
    __device__ static void load_two(uint32_t* to, const uint8_t* from, Read read) {
        const uint2 two = read(reinterpret_cast<const uint2*>(from));
        to[0] = two.x, to[1] = two.y;
    }
    __device__ static uint32_t field(const uint32_t* words, int width, int i) {
        const int a_word = 8 / width;
        return words[i / a_word] >> i % a_word * width & 0x01010101u * ((1 << width) - 1);
    }
};

// Scales as they lie in memory, for outputs o = l / 4 and o + 8: those of a step's two groups, and its head's.
template <int F>
struct RawScales {
    static constexpr int WORDS = Blocks<F>::GROUP_SCALES / 32, HEAD_WORDS = Blocks<F>::HEAD_BYTES / 32;
    uint32_t own[2][WORDS];

    template <class Read>
    __device__ void load(const uint8_t* step, int o, Read read) {
        for (int j = 0; j < 2; j++)
            for (int i = 0; i < WORDS; i++)
                own[j][i] = read(reinterpret_cast<const uint32_t*>(step + Blocks<F>::SCALES) + (8 * j + o) * WORDS + i);
    }
};

template <int F>
struct RawHead {
    uint32_t words[RawScales<F>::HEAD_WORDS + 1];       // none in some formats

    template <class Read>
    __device__ void load(const uint8_t* head, int o, Read read) {
        for (int i = 0; i < RawScales<F>::HEAD_WORDS; i++)
            words[i] = read(reinterpret_cast<const uint32_t*>(head) + o * RawScales<F>::HEAD_WORDS + i);
    }
};

// What turns a group's whole sums into numbers, of a lane's outputs o = l / 4 and o + 8.
template <int F>
struct Scales {
    float d[2], m[2];       // of a weight d * q + m; HALVED: d * s * q - m * s_min
    int s[2][2];            // HALVED: of output and half of the group
    int s_min[2][2];        // K16_MIN

    __device__ Scales(const RawHead<F>& head, const RawScales<F>& raw, int j) {
        const uint32_t* const own = raw.own[j];
        for (int i = 0; i < 2; i++) {
            if constexpr (Blocks<F>::SCALING <= Scaling::ONE_MIN) d[i] = half_of(own[0], i);
            if constexpr (Blocks<F>::SCALING == Scaling::ONE_MIN) m[i] = half_of(own[1], i);
            if constexpr (Blocks<F>::SCALING == Scaling::K32) {     // both products are exact
                d[i] = half_of(head.words[0], i) * byte_of(own[0], i);
                m[i] = -(half_of(head.words[1], i) * byte_of(own[0], 2 + i));
            }
            if constexpr (Blocks<F>::HALVED) {
                d[i] = half_of(head.words[0], i);
                for (int half = 0; half < 2; half++) {
                    const uint8_t byte = byte_of(own[0], 2 * half + i);
                    if constexpr (Blocks<F>::SCALING == Scaling::K16) s[i][half] = int8_t(byte);
                    else s[i][half] = byte & 15, s_min[i][half] = byte >> 4;
                }
                if constexpr (Blocks<F>::SCALING == Scaling::K16_MIN) m[i] = half_of(head.words[1], i);
            }
        }
    }

  private:
    __device__ static uint8_t byte_of(uint32_t word, int i) { return uint8_t(word >> 8 * i); }
    __device__ static float half_of(uint32_t word, int i) {
        return __half2float(__ushort_as_half(uint16_t(word >> 16 * i)));
    }
};

__host__ __device__ inline int64_t x_tiles(int64_t T) {
    return T <= FEW_ROWS ? divide_up(T, ROWS) : divide_up(T, TILE_ROWS) * (TILE_ROWS / ROWS);
}

}  // namespace quire
