// matmul_cpu: checks what it is given, quantizes x once, and shares the panels out among the threads.
#include <algorithm>

#include "isa.h"
#include "matmul.h"
#include "pool.h"

namespace quire {
namespace {

// Tasks a thread. For few rows a task takes microseconds, and starting on other weights some tenths of one: decoding
// with 4 is 3 % slower than with 2, with 8 another 8 %. For many rows more tasks even out what disturbs a core.
constexpr int64_t FEW_ROWS = 8, TASKS_FEW_ROWS = 2, TASKS_MANY_ROWS = 8;
constexpr int64_t QUANTIZED_A_TASK = 128;   // groups of x

struct Kernels {
    decltype(&plain::most_height) most_height;
    decltype(&plain::quantize) quantize;
    decltype(&plain::multiply) multiply, multiply_bfloat;
    decltype(&amx::round_rows) round_rows;  // null if x is read as it is
};

Kernels kernels() {
#define KERNELS(isa) isa::most_height, isa::quantize, isa::multiply, isa::multiply_bfloat
#if defined(__x86_64__)
    if (isa() == AMX) return {KERNELS(amx), amx::round_rows};
    if (isa() == AVX512) return {KERNELS(avx512), nullptr};
    if (isa() == AVX2) return {KERNELS(avx2), nullptr};
#endif
    return {KERNELS(plain), nullptr};
}

// Panels `start` to `end`, counted through all parts.
void multiply_parts(decltype(&plain::multiply) multiply, const Matmul& call, const Part* parts, int64_t start,
                    int64_t end, int64_t start_row, int64_t num_rows) {
    int64_t column = 0;
    for (; end > 0; parts++) {
        const int64_t count = num_panels(parts->O);
        if (start < count)
            multiply(call, *parts, {column, start, std::min(end, count), start_row, num_rows});
        start = std::max<int64_t>(start - count, 0);
        end -= count;
        column += parts->O;
    }
}

// A task is some groups of one tile: threads that write to the same lines of memory take three times as long.
Status quantize_rows(const Kernels& kernels, Matmul& call, int64_t T) {
    const int64_t num_groups = call.I / GROUP;
    int64_t height = 1;
    while (height < T && height < kernels.most_height()) height *= 2;
    const int64_t num_tiles = divide_up(T, height), tile_bytes = num_groups * height * Group::ROW_BYTES;
    const int64_t groups_a_task = divide_up(QUANTIZED_A_TASK, height);
    const int64_t tasks_a_tile = divide_up(num_groups, groups_a_task);
    auto* const memory = static_cast<uint8_t*>(workspace(ACTIVATIONS, num_tiles * tile_bytes));
    if (!memory) return NO_MEMORY;
    if (T % height) std::fill_n(memory + (num_tiles - 1) * tile_bytes, tile_bytes, uint8_t{0});
    const Group x = call.x = {memory, height};
    const float* const x_TI = call.x_TI;
    parallel(num_tiles * tasks_a_tile, [=](int64_t task) {
        const int64_t tile = task / tasks_a_tile, row = tile * height, group = task % tasks_a_tile * groups_a_task;
        kernels.quantize(x + tile * num_groups + group, x_TI + (row * num_groups + group) * GROUP,
                         std::min(T - row, height), num_groups * GROUP, std::min(num_groups - group, groups_a_task));
    });
    return OK;
}

Status round_rows(const Kernels& kernels, Matmul& call, int64_t T) {
    const int64_t num_tiles = bfloat_tiles(T, call.I), steps = divide_up(call.I, GROUP);
    auto* const tiles = static_cast<uint16_t*>(workspace(ACTIVATIONS, num_tiles * BFLOAT_TILE * sizeof(uint16_t)));
    if (!tiles) return NO_MEMORY;
    call.x_tiles = tiles;
    parallel(num_tiles / steps, [&](int64_t tile) { kernels.round_rows(tiles, call.x_TI, T, call.I, tile); });
    return OK;
}

// All rows, cut into shares of `most_rows` and of as many panels as give each thread its tasks.
void multiply_rows(decltype(&plain::multiply) multiply, const Matmul& call, const Part* parts, int64_t all_panels,
                   int64_t T, int64_t most_rows) {
    const int64_t row_tasks = divide_up(T, most_rows);
    const int64_t tasks_a_thread = T <= FEW_ROWS ? TASKS_FEW_ROWS : TASKS_MANY_ROWS;
    const int64_t panels_a_task = divide_up(all_panels * row_tasks, tasks_a_thread * num_threads());
    const int64_t panel_tasks = divide_up(all_panels, panels_a_task);
    parallel(row_tasks * panel_tasks, [&](int64_t task) {
        const int64_t start = task % panel_tasks * panels_a_task, row = task / panel_tasks * most_rows;
        multiply_parts(multiply, call, parts, start, std::min(start + panels_a_task, all_panels), row,
                       std::min(T - row, most_rows));
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

int matmul_cpu(float* y_TO, const float* x_TI, const Part* parts, const float* bias_O, int64_t T, int64_t num_exact,
               int64_t I, int64_t num_parts, int accumulate) {
    if (T < 0 || num_exact < 0 || num_exact > T || num_parts < 1) return BAD_SIZE;
    Matmul call{y_TO, x_TI, {}, nullptr, bias_O, 0, I, accumulate != 0};
    int64_t all_panels = 0;
    bool any_quantized = false;
    for (int64_t i = 0; i < num_parts; i++) {
        const Layout form = layout(parts[i].format);
        if (!form.bits) return BAD_FORMAT;
        if (!serves(form, parts[i].O, I)) return BAD_SIZE;
        call.O += parts[i].O;
        all_panels += num_panels(parts[i].O);
        any_quantized |= form.quantized();
    }
    const Kernels kernels = quire::kernels();
    if (num_exact > 0) {
        if (any_quantized)
            if (const Status status = quantize_rows(kernels, call, num_exact)) return status;
        multiply_rows(kernels.multiply, call, parts, all_panels, num_exact, MOST_ROWS);
    }
    if (num_exact < T) {
        call.y_TO += num_exact * call.O, call.x_TI += num_exact * I;
        if (kernels.round_rows)
            if (const Status status = round_rows(kernels, call, T - num_exact)) return status;
        multiply_rows(kernels.multiply_bfloat, call, parts, all_panels, T - num_exact, MOST_BFLOAT_ROWS);
    }
    return OK;
}
