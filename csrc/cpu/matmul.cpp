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

int64_t divide_up(int64_t a, int64_t b) { return (a + b - 1) / b; }

struct Kernels {
    decltype(&plain::quantize) quantize;
    decltype(&plain::multiply) multiply;
};

Kernels kernels() {
#if defined(__x86_64__)
    if (isa() == AVX2) return {avx2::quantize, avx2::multiply};
#endif
    return {plain::quantize, plain::multiply};
}

// Panels `start` to `end`, counted through all parts.
void multiply_parts(const Kernels& kernels, const Matmul& call, const Part* parts, int64_t start, int64_t end,
                    int64_t start_row, int64_t num_rows) {
    int64_t column = 0;
    for (; end > 0; parts++) {
        const int64_t count = num_panels(parts->O);
        if (start < count)
            kernels.multiply(call, *parts, {column, start, std::min(end, count), start_row, num_rows});
        start = std::max<int64_t>(start - count, 0);
        end -= count;
        column += parts->O;
    }
}

Status quantize_rows(const Kernels& kernels, Matmul& call, int64_t T) {
    const int64_t num_groups = call.I / GROUP, rows_a_task = divide_up(64, num_groups);
    auto* x_TJ = static_cast<Activations*>(workspace(ACTIVATIONS, (T + 1) * num_groups * sizeof(Activations)));
    if (!x_TJ) return NO_MEMORY;
    std::fill_n(x_TJ + T * num_groups, num_groups, Activations{});     // a row that may be computed with the last three
    const float* x_TI = call.x_TI;
    parallel(divide_up(T, rows_a_task), [=](int64_t task) {
        const int64_t row = task * rows_a_task, count = std::min(rows_a_task, T - row);
        kernels.quantize(x_TJ + row * num_groups, x_TI + row * num_groups * GROUP, count * num_groups);
    });
    call.x_TJ = x_TJ;
    return OK;
}

}  // namespace
}  // namespace quire

using namespace quire;

int matmul_cpu(float* y_TO, const float* x_TI, const Part* parts, const float* bias_O, int64_t T, int64_t I,
               int64_t num_parts, int accumulate) {
    if (T < 0 || num_parts < 1) return BAD_SIZE;
    Matmul call{y_TO, x_TI, nullptr, bias_O, 0, I, accumulate != 0};
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
    if (T == 0) return OK;
    const Kernels kernels = quire::kernels();
    if (any_quantized)
        if (const Status status = quantize_rows(kernels, call, T)) return status;
    const int64_t row_tasks = divide_up(T, MOST_ROWS);
    const int64_t tasks_a_thread = T <= FEW_ROWS ? TASKS_FEW_ROWS : TASKS_MANY_ROWS;
    const int64_t panels_a_task = divide_up(all_panels * row_tasks, tasks_a_thread * num_threads());
    const int64_t panel_tasks = divide_up(all_panels, panels_a_task);
    parallel(row_tasks * panel_tasks, [&](int64_t task) {
        const int64_t start = task % panel_tasks * panels_a_task, row = task / panel_tasks * MOST_ROWS;
        multiply_parts(kernels, call, parts, start, std::min(start + panels_a_task, all_panels), row,
                       std::min(T - row, MOST_ROWS));
    });
    return OK;
}
