// Weights from the blocks of files into the layout of matmul.h. The blocks' own layout: quant.py.
#include "matmul.h"
#include "pool.h"

namespace quire {
namespace {

// A block of a file, taken apart: up to 256 quants, and the scales in the packed form.
struct Block {
    uint8_t q[GROUP * SUPER];
    uint16_t d, m;                  // float16
    uint8_t scale[16], min[16];     // of sub-blocks: bytes of a record (K16_MIN: both in scale)
};

// Fields of `width` bits, moved up by `shift`. Of each run of n bytes the lowest fields come first, then the next.
template <int width>
void spread(uint8_t* q, const uint8_t* raw, int num_runs, int n, int shift = 0) {
    for (int run = 0; run < num_runs; run++, raw += n)
        for (int bit = 0; bit < 8; bit += width)
            for (int i = 0; i < n; i++) *q++ |= (raw[i] >> bit & ((1 << width) - 1)) << shift;
}

uint16_t half_at(const uint8_t* raw) { return uint16_t(raw[0] | raw[1] << 8); }

// Eight 6-bit scales and minima in 12 bytes, as in quant.py's scales_and_mins.
void scales_and_mins(Block& block, const uint8_t* raw) {
    for (int i = 0; i < 4; i++) {
        block.scale[i] = raw[i] & 63;
        block.min[i] = raw[i + 4] & 63;
        block.scale[i + 4] = (raw[i + 8] & 15) | (raw[i] >> 2 & 48);
        block.min[i + 4] = raw[i + 8] >> 4 | (raw[i + 4] >> 2 & 48);
    }
}

void read_32(Block& block, const uint8_t* raw, const Layout& form) {
    block.d = half_at(raw);
    raw += 2;
    if (form.scaling == Scaling::ONE_MIN) block.m = half_at(raw), raw += 2;
    if (form.bits == 8) return void(memcpy(block.q, raw, GROUP));
    if (form.bits == 5) spread<1>(block.q, raw, 4, 1, 4), raw += 4;
    spread<4>(block.q, raw, 1, 16);
}

void read_q2_k(Block& block, const uint8_t* raw) {
    memcpy(block.scale, raw, 16);
    spread<2>(block.q, raw + 16, 2, 32);
    block.d = half_at(raw + 80), block.m = half_at(raw + 82);
}

void read_q3_k(Block& block, const uint8_t* raw) {
    spread<1>(block.q, raw, 1, 32, 2);
    spread<2>(block.q, raw + 32, 2, 32);
    spread<4>(block.scale, raw + 96, 1, 8);
    spread<2>(block.scale, raw + 104, 1, 4, 4);
    for (uint8_t& scale : block.scale) scale -= 32;     // signed from here on
    block.d = half_at(raw + 108);
}

void read_q4_k(Block& block, const uint8_t* raw) {
    block.d = half_at(raw), block.m = half_at(raw + 2);
    scales_and_mins(block, raw + 4);
    spread<4>(block.q, raw + 16, 4, 32);
}

void read_q5_k(Block& block, const uint8_t* raw) {
    block.d = half_at(raw), block.m = half_at(raw + 2);
    scales_and_mins(block, raw + 4);
    spread<1>(block.q, raw + 16, 1, 32, 4);
    spread<4>(block.q, raw + 48, 4, 32);
}

void read_q6_k(Block& block, const uint8_t* raw) {
    spread<4>(block.q, raw, 2, 64);
    spread<2>(block.q, raw + 128, 2, 32, 4);
    memcpy(block.scale, raw + 192, 16);
    block.d = half_at(raw + 208);
}

int64_t file_bytes(const Layout& form) {
    const int quants = form.block() * form.bits / 8;
    switch (form.scaling) {
        case Scaling::PLAIN: return quants;
        case Scaling::ONE: return quants + 2;
        case Scaling::ONE_MIN: return quants + 4;
        case Scaling::K32: return quants + 4 + 12;
        case Scaling::K16: return quants + 2 + (form.bits == 3 ? 12 : 16);
        case Scaling::K16_MIN: return quants + 4 + 16;
    }
    return 0;
}

void read(Block& block, const uint8_t* raw, int32_t format, const Layout& form) {
    memset(block.q, 0, form.block());   // what is spread is put beside what is there
    memset(block.scale, 0, sizeof block.scale);
    switch (format) {
        case Q2_K: read_q2_k(block, raw); break;
        case Q3_K: read_q3_k(block, raw); break;
        case Q4_K: read_q4_k(block, raw); break;
        case Q5_K: read_q5_k(block, raw); break;
        case Q6_K: read_q6_k(block, raw); break;
        default: read_32(block, raw, form);
    }
}

// Stores output o's 32 quants, four at a time.
template <int bits>
void write_quants(uint8_t* lines, const uint8_t* q, int o) {
#pragma GCC unroll 8
    for (int k = 0; k < 8; k++) {
        uint32_t four, there;
        memcpy(&four, q + 4 * k, 4);
#pragma GCC unroll 3
        for (int i = 0; i < 3; i++) {
            const Field& field = FIELDS<bits>.of[k][i];
            if (!field.width) break;
            uint8_t* at = lines + 64 * field.line + 4 * o;
            memcpy(&there, at, 4);
            there |= (four >> field.to & 0x01010101u * ((1 << field.width) - 1)) << field.from;
            memcpy(at, &there, 4);
        }
    }
}

void write_quants(uint8_t* lines, const uint8_t* q, int o, int bits) {
    switch (bits) {
        case 2: return write_quants<2>(lines, q, o);
        case 3: return write_quants<3>(lines, q, o);
        case 4: return write_quants<4>(lines, q, o);
        case 5: return write_quants<5>(lines, q, o);
        case 6: return write_quants<6>(lines, q, o);
        default: return write_quants<8>(lines, q, o);
    }
}

void write_record(uint8_t* record, const Layout& form, const Block& block, int group, int o) {
    const uint16_t scale_and_min[2] = {block.d, block.m};
    switch (form.scaling) {
        case Scaling::ONE_MIN: memcpy(record + 32 + 2 * o, &scale_and_min[1], 2); [[fallthrough]];
        case Scaling::ONE: memcpy(record + 2 * o, &scale_and_min[0], 2); break;
        case Scaling::K32: record[o] = block.scale[group], record[16 + o] = block.min[group]; break;
        default: memcpy(record + 2 * o, block.scale + 2 * group, 2);
    }
    write_quants(record + form.scale_bytes(), block.q + GROUP * group, o, form.bits);
}

void pack_row(uint8_t* panel, const uint8_t* raw, int32_t format, int o, int64_t I) {
    const Layout form = layout(format);
    const int num_groups = form.block() / GROUP;
    Block block{};
    for (int64_t start = 0; start < I / GROUP; start += num_groups, raw += file_bytes(form)) {
        read(block, raw, format, form);
        if (form.heads()) memcpy(panel + form.head_offset(start) + 2 * o, &block.d, 2);
        if (form.head_bytes() == 64) memcpy(panel + form.head_offset(start) + 32 + 2 * o, &block.m, 2);
        for (int group = 0; group < num_groups; group++)
            write_record(panel + form.record_offset(start + group), form, block, group, o);
    }
}

template <int bytes>
void pack_plain_row(uint8_t* panel, const uint8_t* raw, int o, int64_t I) {
    for (int64_t i = 0; i < I; i++) memcpy(panel + (i * PANEL + o) * bytes, raw + i * bytes, bytes);
}

}  // namespace
}  // namespace quire

using namespace quire;

int64_t pack_bytes_cpu(int32_t format, int64_t O, int64_t I) {
    const Layout form = layout(format);
    return serves(form, O, I) ? num_panels(O) * form.panel_bytes(I) : 0;
}

int pack_cpu(void* packed, const void* raw, int32_t format, int64_t O, int64_t I) {
    const Layout form = layout(format);
    if (!form.bits) return BAD_FORMAT;
    if (!serves(form, O, I)) return BAD_SIZE;
    const int64_t panel_bytes = form.panel_bytes(I), row_bytes = I / form.block() * file_bytes(form);
    parallel(num_panels(O), [=](int64_t p) {
        uint8_t* panel = static_cast<uint8_t*>(packed) + p * panel_bytes;
        memset(panel, 0, panel_bytes);
        for (int64_t row = p * PANEL; row < O && row < (p + 1) * PANEL; row++) {
            const uint8_t* source = static_cast<const uint8_t*>(raw) + row * row_bytes;
            if (format == F32) pack_plain_row<4>(panel, source, row % PANEL, I);
            else if (format == BF16) pack_plain_row<2>(panel, source, row % PANEL, I);
            else pack_row(panel, source, format, row % PANEL, I);
        }
    });
    return OK;
}
