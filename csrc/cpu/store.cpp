// rope_cpu, store_kv_cpu and rope_store_cpu: positions turned into rotations, keys and values into the paged cache.
#include <cmath>
#include <cstring>

#include "../kernels.h"
#include "kv.h"
#include "pool.h"

namespace quire {
namespace {

constexpr int64_t TOKENS = 16;      // of a task

float to_cell(float x, float) { return x; }

// Rounded to the nearest, ties to even.
uint16_t to_cell(float x, uint16_t) {
    uint32_t bits;
    std::memcpy(&bits, &x, 4);
    return x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fc0;
}

bool is_finite(float x) { return std::isfinite(x); }
bool is_finite(uint16_t x) { return (x & 0x7f80) != 0x7f80; }

// Pairs (i, i + half) of the first 2 * half numbers are turned, the rest passes. Each product is rounded, as in torch.
void rotate(float* out, const float* x, const float* cos, const float* sin, int64_t A, int64_t half) {
    for (int64_t i = 0; i < half; i++) {
        const float a = x[i], b = x[half + i];
        out[i] = a * cos[i] - b * sin[i];
        out[half + i] = b * cos[i] + a * sin[i];
    }
    for (int64_t i = 2 * half; i < A; i++) out[i] = x[i];
}

// One head's key and value at `place` of a page. NaN is the value where the key is not finite.
template <class Cell>
void store_head(Cell* keys, Cell* values, const float* k, const float* v, int64_t A, int64_t B, int64_t place) {
    constexpr int64_t PAIR = sizeof(Cell) == 2 ? 2 : 1;     // rows of a tile that lie side by side
    Cell cells[MAX_HEAD_WIDTH];
    bool finite = true;
    for (int64_t a = 0; a < A; a++) {
        cells[a] = to_cell(k[a], Cell());
        finite &= is_finite(cells[a]);
    }
    Cell* const key = keys + place / TILE * TILE * A + place % TILE * PAIR;
    for (int64_t a = 0; a < A; a += PAIR)
        for (int64_t i = 0; i < PAIR; i++) key[a * TILE + i] = cells[a + i];

    for (int64_t a = 0; a < A; a++) cells[a] = to_cell(finite ? v[a] : NAN, Cell());
    Cell* const value = values + place / PAIR * PAIR * TILE + place % PAIR;
    for (int64_t tile = 0; tile < A; tile += TILE)
        for (int64_t i = 0; i < TILE && tile + i < A; i++) value[tile * B + i * PAIR] = cells[tile + i];
}

void store_head(void* k_cache, void* v_cache, const float* k, const float* v, int64_t slot, int64_t g, int64_t G,
                int64_t A, int64_t B, bool bfloat16) {
    const int64_t offset = (slot / B * G + g) * head_values(A, B);
    if (bfloat16)
        store_head((uint16_t*)k_cache + offset, (uint16_t*)v_cache + offset, k, v, A, B, slot % B);
    else
        store_head((float*)k_cache + offset, (float*)v_cache + offset, k, v, A, B, slot % B);
}

int check(const int64_t* slot_T, int64_t T, int64_t G, int64_t A, int64_t B, int64_t num_pages, int32_t format) {
    if (format != F32 && format != BF16) return BAD_FORMAT;
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

int64_t kv_head_values_cpu(int64_t A, int64_t B) { return is_cache_shape(1, A, B) ? head_values(A, B) : 0; }

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
                       cache_format == BF16);
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
            store_head(k_cache, v_cache, rotated, v + g * A, slot_T[t], g, G, A, B, cache_format == BF16);
        }
    });
    return OK;
}
