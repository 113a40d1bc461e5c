// pack_cuda: weights from the blocks of files into the layout of blocks.cuh, once when a model is loaded; a file's
// blocks are described in quant.py. embed_cuda: rows of a packed table, with exactly the values of quant.py.
#include "blocks.cuh"
#include "kernels.cuh"

namespace quire {
namespace {

constexpr int THREADS = 128;

// Field i of `width` bits, where of each run of n bytes the lowest fields come first, then the next.
__device__ int field(const uint8_t* raw, int width, int n, int i) {
    const int a_run = n * 8 / width;
    return raw[i / a_run * n + i % n] >> i % a_run / n * width & ((1 << width) - 1);
}

// Quant i of a block; without the zero point, but of Q8_0 signed.
template <int F>
__device__ int quant_of(const uint8_t* raw, int i) {
    switch (F) {
        case Q4_0: return field(raw + 2, 4, 16, i);
        case Q4_1: return field(raw + 4, 4, 16, i);
        case Q5_0: return field(raw + 6, 4, 16, i) | field(raw + 2, 1, 1, i) << 4;
        case Q5_1: return field(raw + 8, 4, 16, i) | field(raw + 4, 1, 1, i) << 4;
        case Q8_0: return raw[2 + i];
        case Q2_K: return field(raw + 16, 2, 32, i);
        case Q3_K: return field(raw + 32, 2, 32, i) | field(raw, 1, 32, i) << 2;
        case Q4_K: return field(raw + 16, 4, 32, i);
        case Q5_K: return field(raw + 48, 4, 32, i) | field(raw + 16, 1, 32, i) << 4;
        default: return field(raw, 4, 64, i) | field(raw + 128, 2, 32, i) << 4;     // Q6_K
    }
}

// Bytes of a block before and after what its scales are.
constexpr int block_bytes(int format) {
    switch (format) {
        case Q4_0: return 18;
        case Q4_1: return 20;
        case Q5_0: return 22;
        case Q5_1: return 24;
        case Q8_0: return 34;
        case Q2_K: return 84;
        case Q3_K: return 110;
        case Q4_K: return 144;
        case Q5_K: return 176;
        default: return 210;
    }
}

// Where a block has its float16 scale; the minimum, if it has one, is the next.
constexpr int scale_offset(int format) {
    return format == Q2_K ? 80 : format == Q3_K ? 108 : format == Q6_K ? 208 : 0;
}

// Small scale and minimum of group j of a block, of its first or last 16 inputs.
template <int F>
__device__ void small_scale(uint8_t& s, uint8_t& m, const uint8_t* raw, int j, int half) {
    if constexpr (F == Q2_K) s = raw[2 * j + half];
    if constexpr (F == Q3_K)
        s = uint8_t((field(raw + 96, 4, 8, 2 * j + half) | field(raw + 104, 2, 4, 2 * j + half) << 4) - 32);
    if constexpr (F == Q6_K) s = raw[192 + 2 * j + half];
    if constexpr (F == Q4_K || F == Q5_K) {     // eight of 6 bits and eight minima in 12 bytes
        const uint8_t* const twelve = raw + 4;
        s = j < 4 ? twelve[j] & 63 : (twelve[j + 4] & 15) | (twelve[j - 4] >> 2 & 48);
        m = j < 4 ? twelve[j + 4] & 63 : twelve[j + 4] >> 4 | (twelve[j] >> 2 & 48);
    }
}

// The block of output o that holds input i; null beyond the matrix.
template <int F>
__device__ const uint8_t* block_at(const uint8_t* raw, int64_t o, int64_t i, int64_t O, int64_t I) {
    constexpr int BLOCK = Blocks<F>::FORM.block();
    return o < O && i < I ? raw + (o * (I / BLOCK) + i / BLOCK) * block_bytes(F) : nullptr;
}

template <int F>
__device__ void write_quants(uint8_t* step, const uint8_t* raw, int64_t o, int64_t i, int64_t O, int64_t I, int lane) {
    constexpr int LOW = Blocks<F>::LOW, HIGH = Blocks<F>::HIGH;
    uint32_t low[LOW] = {}, high[HIGH ? HIGH : 1] = {};
    for (int n = 0; n < 32; n++) {
        const int j = n / 16, r = n / 4 % 4, byte = n % 4, at = 4 * j + r;
        const int64_t output = o + 8 * (r % 2), input = i + 32 * j + 16 * (r / 2) + 4 * (lane % 4) + byte;
        const uint8_t* const block = block_at<F>(raw, output, input, O, I);
        const uint32_t q = block ? quant_of<F>(block, input % Blocks<F>::FORM.block()) & 0xff : 0;
        const uint32_t low_q = q & ((1u << LOW) - 1);
        if (LOW == 8) low[at] |= low_q << 8 * byte;
        if (LOW == 4) low[r] |= low_q << (8 * byte + 4 * j);
        if (LOW == 2) low[at / 4] |= low_q << (8 * byte + at % 4 * 2);
        if (HIGH > 0) high[at * HIGH / 8] |= (q >> LOW) << (8 * byte + at * HIGH % 8);
    }
    for (int w = 0; w < LOW; w++) {
        const int run = LOW < 4 ? LOW : 4;
        memcpy(step + w / run * 4 * run * WARP + (lane * run + w % run) * 4, &low[w], 4);
    }
    for (int w = 0; w < HIGH; w++) memcpy(step + Blocks<F>::HIGH_PLANE + (lane * HIGH + w) * 4, &high[w], 4);
}

template <int F>
__device__ void write_scales(uint8_t* head, uint8_t* step, const uint8_t* raw, int64_t o, int64_t i, int64_t O,
                             int64_t I, bool begins_head) {
    constexpr Scaling SCALING = Blocks<F>::SCALING;
    constexpr int BYTES = Blocks<F>::GROUP_SCALES;
    for (int j = 0; j < 2; j++)
        for (int k = 0; k < 2; k++) {       // outputs o and o + 8
            const uint8_t* const block = block_at<F>(raw, o + 8 * k, i + 32 * j, O, I);
            uint8_t* const own = step + Blocks<F>::SCALES + BYTES * j + BYTES / 8 * (o % 8);
            const auto copy_half = [&](uint8_t* to, int offset) {
                for (int b = 0; b < 2; b++) to[b] = block ? block[scale_offset(F) + offset + b] : 0;
            };
            if (SCALING == Scaling::ONE || SCALING == Scaling::ONE_MIN) copy_half(own + 2 * k, 0);
            if (SCALING == Scaling::ONE_MIN) copy_half(own + 4 + 2 * k, 2);
            if (!Blocks<F>::HEAD_BYTES) continue;
            const int group = i / GROUP % SUPER + j;
            for (int half = 0; half < 2; half++) {
                uint8_t s = 0, m = 0;
                if (block) small_scale<F>(s, m, block, group, half);
                if (Blocks<F>::HALVED) own[2 * half + k] = s;
                else own[k] = s, own[2 + k] = m;
            }
            uint8_t* const own_head = head + Blocks<F>::HEAD_BYTES / 8 * (o % 8);
            if (begins_head && j == 0) {
                copy_half(own_head + 2 * k, 0);
                if (Blocks<F>::HEAD_BYTES == 64) copy_half(own_head + 4 + 2 * k, 2);
            }
        }
}

// A thread for each lane of each step of each panel.
template <int F>
__global__ void pack(uint8_t* packed, const uint8_t* raw, int64_t O, int64_t I) {
    const int64_t thread = int64_t(blockIdx.x) * THREADS + threadIdx.x;
    const int64_t step = thread / WARP % Blocks<F>::steps(I), panel = thread / WARP / Blocks<F>::steps(I);
    if (panel >= num_panels(O)) return;
    const int lane = thread % WARP;
    uint8_t* const start = packed + panel * Blocks<F>::panel_bytes(I);
    uint8_t* const own = start + Blocks<F>::step_offset(step);
    const int64_t o = panel * PANEL + lane / 4, i = step * STEP;
    write_quants<F>(own, raw, o, i, O, I, lane);
    if (lane % 4 == 0)
        write_scales<F>(start + Blocks<F>::head_offset(step), own, raw, o, i, O, I, step % STEPS_A_HEAD == 0);
}

template <int F>
__device__ float weight_at(const uint8_t* panel, int o, int64_t i) {
    constexpr Scaling SCALING = Blocks<F>::SCALING;
    const int64_t step = i / STEP;
    const int j = i % STEP / GROUP, half = i % GROUP / 16, lane = o % 8 * 4 + i % 16 / 4, k = o / 8;
    const uint8_t* const own = panel + Blocks<F>::step_offset(step);
    Raw<F> raw;
    raw.load(own, lane, Again());
    RawHead<F> head;
    head.load(panel + Blocks<F>::head_offset(step), o % 8, Again());
    RawScales<F> raw_scales;
    raw_scales.load(own, o % 8, Again());
    const Scales<F> scales(head, raw_scales, j);
    const uint32_t byte = raw.quants(j, 2 * half + k) >> i % 4 * 8 & 0xff;
    const float q = Blocks<F>::LOW == 8 ? int8_t(byte) : int(byte) - Blocks<F>::FORM.zero, d = scales.d[k];
    if (SCALING == Scaling::ONE) return q * d;
    if (SCALING == Scaling::ONE_MIN || SCALING == Scaling::K32) return q * d + scales.m[k];
    const float small = q * (d * scales.s[k][half]);
    return SCALING == Scaling::K16 ? small : small - scales.m[k] * scales.s_min[k][half];
}

// Grid: (tokens, pieces of a row).
template <int F>
__global__ void embed(float* x_TD, const uint8_t* packed, const int64_t* token_T, int64_t D) {
    const int64_t d = int64_t(blockIdx.y) * THREADS + threadIdx.x, token = token_T[blockIdx.x];
    const uint8_t* const panel = packed + token / PANEL * Blocks<F>::panel_bytes(D);
    if (d < D) x_TD[blockIdx.x * D + d] = weight_at<F>(panel, token % PANEL, d);
}

}  // namespace
}  // namespace quire

using namespace quire;

int64_t pack_bytes_cuda(int32_t format, int64_t O, int64_t I) {
    if (!serves(layout(format), O, I)) return 0;
#define BYTES(F) if (format == F) return num_panels(O) * Blocks<F>::panel_bytes(I);
    BLOCK_FORMATS(BYTES)
    return 0;
}

int pack_cuda(void* packed, const void* raw, int32_t format, int64_t O, int64_t I, Stream stream) {
    if (!pack_bytes_cuda(format, O, I)) return layout(format).quantized() ? BAD_SIZE : BAD_FORMAT;
    const int64_t blocks = divide_up(num_panels(O) * divide_up(I, STEP) * WARP, THREADS);
#define PACK_ONE(F)                                                                                                   \
    if (format == F)                                                                                                  \
        return launch(pack<F>, dim3(blocks), dim3(THREADS), 0, cudaStream_t(stream), (uint8_t*)packed,                \
                      (const uint8_t*)raw, O, I);
    BLOCK_FORMATS(PACK_ONE)
    return BAD_FORMAT;
}

int embed_cuda(float* x_TD, const void* packed, const int64_t* token_T, int32_t format, int64_t T, int64_t O, int64_t D,
               Stream stream) {
    if (!pack_bytes_cuda(format, O, D)) return layout(format).quantized() ? BAD_SIZE : BAD_FORMAT;
    if (T < 0) return BAD_SIZE;
    if (T == 0) return OK;
#define EMBED(F)                                                                                                      \
    if (format == F)                                                                                                  \
        return launch(embed<F>, dim3(T, divide_up(D, THREADS)), dim3(THREADS), 0, cudaStream_t(stream), x_TD,         \
                      (const uint8_t*)packed, token_T, D);
    BLOCK_FORMATS(EMBED)
    return BAD_FORMAT;
}
