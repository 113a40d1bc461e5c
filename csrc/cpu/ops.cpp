// rms_norm_cpu, silu_mul_cpu and argmax_cpu: checks, and rows shared out over the threads. ops.inc has the arithmetic.
#include "ops.h"

#include "../kernels.h"
#include "isa.h"
#include "pool.h"

namespace quire {
namespace {

constexpr int64_t TASK_FLOATS = 4096;    // of a task: it takes some microseconds, handing it out less than one

// Calls body(row, first, end) for pieces of the rows, in parallel.
template <class Body>
void each_piece(int64_t num_rows, int64_t width, Body body) {
    const int64_t pieces = (width + TASK_FLOATS - 1) / TASK_FLOATS, rows = pieces == 1 ? TASK_FLOATS / width : 1;
    parallel((num_rows + rows - 1) / rows * pieces, [&](int64_t task) {
        const int64_t first = task % pieces * TASK_FLOATS, row = task / pieces * rows;
        for (int64_t r = row; r < row + rows && r < num_rows; r++)
            body(r, first, first + TASK_FLOATS < width ? first + TASK_FLOATS : width);
    });
}

// The first place of the greatest number, or -1.
int64_t argmax(const float* x, const float* tops, int64_t V) {
    int64_t best = 0;
    for (int64_t piece = 0; piece * TASK_FLOATS < V; piece++) {
        if (tops[piece] != tops[piece]) return -1;
        if (tops[piece] > tops[best]) best = piece;
    }
    int64_t id = best * TASK_FLOATS;
    while (x[id] != tops[best]) id++;
    return id;
}

}  // namespace
}  // namespace quire

using namespace quire;

int rms_norm_cpu(float* out_TD, const float* x_TD, const float* weight_D, int64_t T, int64_t D, float eps) {
    if (T < 0 || D < 1) return BAD_SIZE;
    const auto row = PICK(rms_norm_row);
    const int64_t rows = D < TASK_FLOATS ? TASK_FLOATS / D : 1;
    parallel((T + rows - 1) / rows, [&](int64_t task) {
        for (int64_t t = task * rows; t < T && t < (task + 1) * rows; t++)
            row(out_TD + t * D, x_TD + t * D, weight_D, D, eps);
    });
    return OK;
}

int silu_mul_cpu(float* act_TF, const float* x_T2F, int64_t T, int64_t F) {
    if (T < 0 || F < 1) return BAD_SIZE;
    const auto row = PICK(silu_mul_row);
    each_piece(T, F, [&](int64_t t, int64_t first, int64_t end) {
        const float* gate = x_T2F + t * 2 * F + first;
        row(act_TF + t * F + first, gate, gate + F, end - first);
    });
    return OK;
}

int argmax_cpu(int64_t* id_L, const float* x_LV, int64_t L, int64_t V) {
    if (L < 0 || V < 1) return BAD_SIZE;
    const auto top = PICK(greatest);
    const int64_t pieces = (V + TASK_FLOATS - 1) / TASK_FLOATS;
    float* const tops = (float*)workspace(ATTENTION, L * pieces * sizeof(float));
    if (!tops && L) return NO_MEMORY;
    each_piece(L, V, [&](int64_t l, int64_t first, int64_t end) {
        tops[l * pieces + first / TASK_FLOATS] = top(x_LV + l * V + first, end - first);
    });
    for (int64_t l = 0; l < L; l++) id_L[l] = argmax(x_LV + l * V, tops + l * pieces, V);
    return OK;
}
