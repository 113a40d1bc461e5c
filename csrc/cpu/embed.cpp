// Rows of a packed table, as the numbers that quant.py gives: exact products first, then one rounded step.
#include "matmul.h"
#include "pool.h"

namespace quire {
namespace {

float number(uint32_t bits) {
    float x;
    memcpy(&x, &bits, 4);
    return x;
}

// The float16 at p.
float half_at(const uint8_t* p) {
    const uint32_t bits = p[0] | p[1] << 8, sign = (bits & 0x8000) << 16, rest = (bits & 0x7fff) << 13;
    if (rest >= 0x7c00 << 13) return number(sign | 0x7f800000 | rest);
    return number(sign | rest) * 0x1p112f;      // moves the exponent's bias; makes subnormals normal
}

// Output o's quant at input i of a group.
int quant(const uint8_t* lines, const Layout& form, const Fields& fields, int o, int i) {
    int q = 0;
    for (const Field& field : fields.of[i / 4]) {
        if (!field.width) break;
        q |= (lines[64 * field.line + 4 * o + i % 4] >> field.from & ((1 << field.width) - 1)) << field.to;
    }
    return form.bits == 8 ? int8_t(q) : q - form.zero;
}

void read_group(float* x, const uint8_t* head, const uint8_t* record, const Layout& form, const Fields& fields, int o) {
    const bool in_head = form.heads();
    const uint8_t* halves = in_head ? head : record;
    const float d = half_at(halves + 2 * o), m = form.scaling == Scaling::ONE_MIN || form.head_bytes() == 64
        ? half_at(halves + 32 + 2 * o) : 0;
    for (int i = 0; i < GROUP; i++) {
        const float q = quant(record + form.scale_bytes(), form, fields, o, i);
        const uint8_t small = in_head ? record[2 * o + i / 16] : 0;
        switch (form.scaling) {
            case Scaling::ONE: x[i] = q * d; break;
            case Scaling::ONE_MIN: x[i] = q * d + m; break;
            case Scaling::K32: x[i] = q * (d * record[o]) - m * record[16 + o]; break;
            case Scaling::K16: x[i] = q * (d * int8_t(small)); break;
            default: x[i] = q * (d * (small & 15)) - m * (small >> 4);
        }
    }
}

void read_row(float* x_D, const uint8_t* panel, int32_t format, int o, int64_t D) {
    const Layout form = layout(format);
    if (format == F32) {
        for (int64_t i = 0; i < D; i++) memcpy(x_D + i, panel + 4 * (i * PANEL + o), 4);
    } else if (format == BF16) {
        const auto* weights = reinterpret_cast<const uint16_t*>(panel);
        for (int64_t i = 0; i < D; i++) x_D[i] = number(uint32_t(weights[i * PANEL + o]) << 16);
    } else {
        const Fields fields(form.bits);
        for (int64_t g = 0; g < D / GROUP; g++)
            read_group(x_D + GROUP * g, panel + form.head_offset(g), panel + form.record_offset(g), form, fields, o);
    }
}

}  // namespace
}  // namespace quire

using namespace quire;

int embed_cpu(float* x_TD, const Part* table, const int64_t* token_T, int64_t T, int64_t D) {
    const Layout form = layout(table->format);
    if (!form.bits) return BAD_FORMAT;
    if (!serves(form, table->O, D) || T < 0) return BAD_SIZE;
    for (int64_t t = 0; t < T; t++)
        if (token_T[t] < 0 || token_T[t] >= table->O) return BAD_INDEX;
    parallel(T, [=](int64_t t) {
        const auto* panel = static_cast<const uint8_t*>(table->packed) + token_T[t] / PANEL * form.panel_bytes(D);
        read_row(x_TD + t * D, panel, table->format, token_T[t] % PANEL, D);
    });
    return OK;
}
