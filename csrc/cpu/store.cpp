// rope_cpu, store_kv_cpu, rope_store_cpu and move_kv_cpu: positions turned into rotations, keys and values into the
// paged cache, and from one of its slots into another.
#include <algorithm>
#include <cfloat>
#include <cmath>
#include <cstring>

#include "../kernels.h"
#include "kv.h"
#include "pool.h"

namespace quire {
namespace {

constexpr int64_t TOKENS = 16;      // of a task

uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return bits;
}

constexpr uint32_t MAGNITUDE = 0x7fffffff, INFINITE = 0x7f800000;   // magnitudes are ordered as their bits are

// A head's key or value as cells. Returns their scale, NaN where one is not finite.
float to_cells(float* cells, const float* x, int64_t A) {
    uint32_t most = 0;
    for (int64_t a = 0; a < A; a++) {
        cells[a] = x[a];
        most = std::max(most, bits_of(x[a]) & MAGNITUDE);
    }
    return most < INFINITE ? 1 : NAN;
}

// Rounded to the nearest, ties to even.
float to_cells(uint16_t* cells, const float* x, int64_t A) {
    uint32_t most = 0;
    for (int64_t a = 0; a < A; a++) {
        const uint32_t bits = bits_of(x[a]), rounded = bits + 0x7fff + (bits >> 16 & 1);
        cells[a] = (bits & MAGNITUDE) > INFINITE ? 0x7fc0 : rounded >> 16;
        most = std::max(most, (bits & MAGNITUDE) + 0x7fff + (bits >> 16 & 1));
    }
    return most < INFINITE ? 1 : NAN;
}

float to_cells(int8_t* cells, const float* x, int64_t A) {
    uint32_t most = 0;
    for (int64_t a = 0; a < A; a++) most = std::max(most, bits_of(x[a]) & MAGNITUDE);
    float scale;
    std::memcpy(&scale, &most, 4);
    scale = std::isfinite(scale) ? scale / 127 : NAN;
    if (!(scale >= FLT_MIN)) {  // in so few bits it would be too far off
        std::memset(cells, 0, A);
        return scale != scale ? scale : 0;
    }
    constexpr float SHIFT = 12582912;   // 1.5 * 2^23: adding it rounds to an integer, ties to even
    for (int64_t a = 0; a < A; a++) cells[a] = int8_t(x[a] / scale + SHIFT - SHIFT);
    return scale;
}

// Pairs (i, i + half) of the first 2 * half numbers are turned, the rest passes. Each product is rounded, as in torch.
void rotate(float* __restrict out, const float* __restrict x, const float* cos, const float* sin, int64_t A,
            int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[i] + a * sin[i];
    }
    for (int64_t i = 2 * half; i < A; i++) out[i] = x[i];
}

// Where number `a` of a head's key, or of its value, stands.
template <class Cell>
int64_t key_cell(int64_t A, int64_t place, int64_t a) {
    constexpr int64_t N = PACK<Cell>;
    return place / TILE * TILE * round_up_16(A) + a / N * N * TILE + place % TILE * N + a % N;
}

template <class Cell>
int64_t value_cell(int64_t B, int64_t place, int64_t a) {
    constexpr int64_t N = PACK<Cell>;
    return a / TILE * TILE * B + place / N * N * TILE + a % TILE * N + place % N;
}

// One head's key and value at `place` of a page, where key_cell and value_cell say. NaN is the value where the key is
// not finite.
template <class Cell>
void store_head(Cell* keys, Cell* values, const float* k, const float* v, int64_t A, int64_t B, int64_t place) {
    constexpr int64_t N = PACK<Cell>;
    Cell cells[MAX_HEAD_WIDTH + N] = {};
    const float k_scale = to_cells(cells, k, A);
    Cell* to = keys + key_cell<Cell>(A, place, 0);
    for (int64_t a = 0; a + N <= A; a += N) std::memcpy(to + a * TILE, cells + a, sizeof(Cell) * N);
    for (int64_t a = A / N * N; a < A; a++) to[A / N * N * TILE + a % N] = cells[a];

    float seen[MAX_HEAD_WIDTH];
    for (int64_t a = 0; a < A; a++) seen[a] = k_scale == k_scale ? v[a] : NAN;
    const float v_scale = to_cells(cells, seen, A);
    to = values + value_cell<Cell>(B, place, 0);
    for (int64_t tile = 0; tile < A; tile += TILE, to += TILE * B)
        for (int64_t i = 0; i < TILE && tile + i < A; i++) to[i * N] = cells[tile + i];

    if constexpr (SCALED<Cell>) {
        ((float*)(keys + head_cells(A, B)))[place] = k_scale;
        ((float*)(values + head_cells(A, B)))[place] = v_scale;
    }
}

void store_head(void* k_cache, void* v_cache, const float* k, const float* v, int64_t slot, int64_t g, int64_t G,
                int64_t A, int64_t B, int32_t cache_format) {
    const int64_t offset = (slot / B * G + g) * head_bytes(A, B, cell_bytes(cache_format)), place = slot % B;
    char *const keys = (char*)k_cache + offset, *const values = (char*)v_cache + offset;
    switch (cache_format) {
        case F32: return store_head((float*)keys, (float*)values, k, v, A, B, place);
        case BF16: return store_head((uint16_t*)keys, (uint16_t*)values, k, v, A, B, place);
        default: return store_head((int8_t*)keys, (int8_t*)values, k, v, A, B, place);
    }
}

// One head's key and value from a slot into another. As bytes: of a NaN, too, all bits count.
template <class Cell>
void move_head(char* k_cache, char* v_cache, int64_t from, int64_t to, int64_t g, int64_t G, int64_t A, int64_t B) {
    const auto move = [&](char* cache, auto cell_of, int64_t a) {
        const auto at = [&](int64_t slot) {
            return cache + (slot / B * G + g) * head_bytes(A, B, sizeof(Cell)) + cell_of(slot % B, a) * sizeof(Cell);
        };
        std::memcpy(at(to), at(from), sizeof(Cell));
    };
    for (int64_t a = 0; a < A; a++) {
        move(k_cache, [&](int64_t place, int64_t a) { return key_cell<Cell>(A, place, a); }, a);
        move(v_cache, [&](int64_t place, int64_t a) { return value_cell<Cell>(B, place, a); }, a);
    }
    const auto scale = [&](int64_t place, int64_t byte) { return head_cells(A, B) + place * 4 + byte; };
    for (int64_t byte = 0; SCALED<Cell> && byte < 4; byte++) move(k_cache, scale, byte), move(v_cache, scale, byte);
}

void move_head(void* k_cache, void* v_cache, int64_t from, int64_t to, int64_t g, int64_t G, int64_t A, int64_t B,
               int32_t cache_format) {
    char *const keys = (char*)k_cache, *const values = (char*)v_cache;
    switch (cache_format) {
        case F32: return move_head<float>(keys, values, from, to, g, G, A, B);
        case BF16: return move_head<uint16_t>(keys, values, from, to, g, G, A, B);
        default: return move_head<int8_t>(keys, values, from, to, g, G, A, B);
    }
}

int check(const int64_t* slot_T, int64_t T, int64_t G, int64_t A, int64_t B, int64_t num_pages, int32_t format) {
    if (!cell_bytes(format)) return BAD_FORMAT;
    if (T < 0 || !is_cache_shape(G, A, B)) return BAD_SIZE;
    for (int64_t t = 0; t < T; t++)
        if (slot_T[t] < 0 || slot_T[t] >= num_pages * B) return BAD_INDEX;
    return OK;
}

template <class Body>
void each_token(int64_t T, Body body) {
    parallel((T + TOKENS - 1) / TOKENS, [&](int64_t task) {
        for (int64_t t = task * TOKENS; t < T && t < (task + 1) * TOKENS; t++) body(t);
    });
}

}  // namespace
}  // namespace quire

using namespace quire;

int64_t kv_head_bytes_cpu(int64_t A, int64_t B, int32_t cache_format) {
    const int64_t bytes = cell_bytes(cache_format);
    return bytes && is_cache_shape(1, A, B) ? head_bytes(A, B, bytes) : 0;
}

int rope_cpu(float* out_THA, const float* x_THA, const float* cos, const float* sin, int64_t T, int64_t H, int64_t A,
             int64_t half) {
    if (T < 0 || H < 1 || half < 0 || 2 * half > A) return BAD_SIZE;
    each_token(T, [&](int64_t t) {
        for (int64_t h = t * H; h < (t + 1) * H; h++)
            rotate(out_THA + h * A, x_THA + h * A, cos + t * half, sin + t * half, A, half);
    });
    return OK;
}

int store_kv_cpu(void* k_cache, void* v_cache, const float* k_TGA, const float* v_TGA, const int64_t* slot_T, int64_t T,
                 int64_t G, int64_t A, int64_t B, int64_t num_pages, int32_t cache_format) {
    if (const int status = check(slot_T, T, G, A, B, num_pages, cache_format)) return status;
    each_token(T, [&](int64_t t) {
        for (int64_t g = 0; g < G; g++)
            store_head(k_cache, v_cache, k_TGA + (t * G + g) * A, v_TGA + (t * G + g) * A, slot_T[t], g, G, A, B,
                       cache_format);
    });
    return OK;
}

int rope_store_cpu(float* q_THA, void* k_cache, void* v_cache, const float* qkv_TX, const float* cos, const float* sin,
                   const int64_t* slot_T, int64_t T, int64_t H, int64_t G, int64_t A, int64_t half, int64_t B,
                   int64_t num_pages, int32_t cache_format) {
    if (const int status = check(slot_T, T, G, A, B, num_pages, cache_format)) return status;
    if (H < 1 || half < 0 || 2 * half > A) return BAD_SIZE;
    each_token(T, [&](int64_t t) {
        const float *cos_t = cos + t * half, *sin_t = sin + t * half, *q = qkv_TX + t * (H + 2 * G) * A;
        const float *k = q + H * A, *v = k + G * A;
        for (int64_t h = 0; h < H; h++) rotate(q_THA + (t * H + h) * A, q + h * A, cos_t, sin_t, A, half);
        for (int64_t g = 0; g < G; g++) {
            float rotated[MAX_HEAD_WIDTH];
            rotate(rotated, k + g * A, cos_t, sin_t, A, half);
            store_head(k_cache, v_cache, rotated, v + g * A, slot_T[t], g, G, A, B, cache_format);
        }
    });
    return OK;
}

int move_kv_cpu(void* k_cache, void* v_cache, const int64_t* from_T, const int64_t* to_T, int64_t T, int64_t G,
                int64_t A, int64_t B, int64_t num_pages, int32_t cache_format) {
    if (const int status = check(from_T, T, G, A, B, num_pages, cache_format)) return status;
    if (const int status = check(to_T, T, G, A, B, num_pages, cache_format)) return status;
    parallel(G, [&](int64_t g) {
        for (int64_t t = 0; t < T; t++)     // in order: a slot may be written once it has been read
            move_head(k_cache, v_cache, from_T[t], to_T[t], g, G, A, B, cache_format);
    });
    return OK;
}
