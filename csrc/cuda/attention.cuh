// What the kernels of attention.cu share: the arithmetic of a tile, who sees what, and where it lies in the cache.
//
// The arithmetic, of a row (a query head of a token) and the places of its text, the same in all kernels:
//   Chunks of 128 places begin at multiples of 128; a chunk is cut into tiles of 32. Scores are products by mma over
//   the head's width in order, times scale * log2(e); out of sight they are -infinity. Tile by tile, m = the greatest
//   score so far; what was summed before is multiplied by 2^(old m - m); p = 2^(score - m), rounded to bfloat16; sums
//   += p and acc += p V, again by mma, over 16 places at a time in order. Chunks start from nothing and are merged in
//   order.
// So a row's bits do not depend on which kernel computed it, on who shares its tiles, or on how chunks were shared out.
#pragma once
#include "common.cuh"
#include "kv.cuh"

namespace quire {

constexpr int CHUNK = 128, KEYS = 32;           // places of a chunk, of a tile
constexpr int M = 16;                           // rows of a product
constexpr int ATTENTION_WARPS = 4, ATTENTION_THREADS = ATTENTION_WARPS * WARP;
constexpr int64_t MOST_TREE = 64;               // new tokens of a request whose drafts form a tree
constexpr int64_t FEW_NEW = 16;                 // new tokens of a request up to which each is computed by itself

// The arguments of attention_cuda.
struct Attention {
    float* out_THA;
    const float* q_THA;
    const __nv_bfloat16 *k_cache, *v_cache;
    const int32_t* table;
    const int64_t *row_S, *starts_S1, *lengths_S, *ancestors_T;
    float* workspace;
    int64_t T, S, H, G, A, B, table_stride, window, capacity;
    float scale;        // times log2(e)

    __device__ int64_t num_new(int64_t s) const { return starts_S1[s + 1] - starts_S1[s]; }
    __device__ int64_t past(int64_t s) const { return lengths_S[s] - num_new(s); }
    // Query heads of a key/value head; of these, those of a product.
    __device__ int64_t heads() const { return H / G; }
    __host__ __device__ int64_t tile_heads() const { return H / G < M ? H / G : M; }
    __host__ __device__ int64_t head_tiles() const { return G * ((H / G + M - 1) / M); }
    // Whether each token of the request is computed by itself.
    __device__ bool is_alone(int64_t s) const {
        return num_new(s) <= FEW_NEW || lengths_S[s] == 0 || (ancestors_T && num_new(s) <= MOST_TREE);
    }
};

// What a request's i-th new token sees of the text that ends with it, and where that lies in the cache: in a tree, new
// tokens that it does not see may lie between.
struct Sight {
    int64_t first, end, past;
    uint64_t path;          // of the new tokens, if they may form a tree; else 0: all before it

    __device__ Sight(const Attention& call, int64_t s, int64_t i) {
        past = call.past(s), path = 0, end = past + i + 1;
        if (call.ancestors_T && call.num_new(s) <= MOST_TREE) {
            path = uint64_t(call.ancestors_T[call.starts_S1[s] + i]) & (~uint64_t(0) >> (63 - i));
            end = past + __popcll(path);
        }
        if (call.lengths_S[s] == 0) past = end = 0;     // of a padded request
        first = call.window && call.window < end ? end - call.window : 0;
    }
    __device__ bool sees(int64_t place) const { return place >= first && place < end; }
    // Where place `place` of its text lies among the request's tokens.
    __device__ int64_t lies_at(int64_t place) const {
        if (!path || place < past) return place;
        uint64_t left = path;
        for (int64_t n = past; n < place; n++) left &= left - 1;
        return past + __ffsll(left) - 1;
    }
};

// Tiles of keys and values in shared memory; 16 bytes more a row, so that eight rows lie in different banks.
template <int A, int N>
using Tile = __nv_bfloat16[N][A + 8];

// Places `place` and the next N - 1 of a request's text into tiles; those out of `seen` are zeros, whatever lies there.
template <int A, int N>
__device__ void fetch(Tile<A, N>& keys, Tile<A, N>& values, const Attention& call, const int32_t* pages, int64_t group,
                      int64_t place, const Sight& seen) {
    constexpr int PIECES = A / 8;
    const int B = int(call.B);
    for (int which = 0; which < 2; which++) {
        for (int n = threadIdx.x; n < N * PIECES; n += ATTENTION_THREADS) {
            const int key = n / PIECES, piece = n % PIECES * 8;
            const bool is_seen = seen.sees(place + key);
            int64_t from = 0;
            if (is_seen) {
                const int64_t at = seen.lies_at(place + key);
                from = ((pages[at / B] * call.G + group) * B + at % B) * A + piece;
            }
            if (which == 0) cp_async_16(&keys[key][piece], call.k_cache + from, is_seen ? 16 : 0);
            else cp_async_16(&values[key][piece], call.v_cache + from, is_seen ? 16 : 0);
        }
        cp_async_commit();
    }
}

// 16 queries as the first operand. Lane l gives the queries of rows l / 4 and l / 4 + 8, null where there is none.
template <int A>
__device__ void load_queries(uint32_t (&q)[A / 16][4], const float* const (&rows)[2], int64_t width) {
#pragma unroll
    for (int k = 0; k < A / 16; k++)
        for (int r = 0; r < 4; r++) {
            const int64_t a = 16 * k + r / 2 * 8 + lane_id() % 4 * 2;       // width is even
            const bool exists = rows[r % 2] && a < width;
            q[k][r] = exists ? bfloat_pair(rows[r % 2][a], rows[r % 2][a + 1]) : 0;
        }
}

// Scores of 16 rows and 32 keys: score[n] are those of keys 8 n to 8 n + 7. q[k] are a lane's queries for 16 columns.
template <int A, class Queries>
__device__ void score_tile(float (&score)[KEYS / 8][4], const Queries& q, const __nv_bfloat16 (*keys)[A + 8]) {
    const int matrix = lane_id() / 8, row = lane_id() % 8;
    for (int n = 0; n < KEYS / 8; n++)
        for (int i = 0; i < 4; i++) score[n][i] = 0;
#pragma unroll
    for (int k = 0; k < A / 16; k++) {
        uint32_t a[4];
        memcpy(a, &q[k], sizeof a);
#pragma unroll
        for (int n = 0; n < KEYS / 16; n++) {
            uint32_t b[4];
            ldmatrix_x4(b, &keys[16 * n + matrix / 2 * 8 + row][16 * k + matrix % 2 * 8]);
            mma_bf16(score[2 * n], a, {b[0], b[1]});
            mma_bf16(score[2 * n + 1], a, {b[2], b[3]});
        }
    }
}

constexpr float NOTHING = -INFINITY;    // the greatest score of nothing

// Scales the scores of places `place` and so on, hides what rows do not see, and gives the greatest of both rows.
__device__ inline void mask_tile(float (&top)[2], float (&score)[KEYS / 8][4], const Attention& call, int64_t place,
                                 const int64_t (&first)[2], const int64_t (&end)[2]) {
    top[0] = top[1] = NOTHING;
#pragma unroll
    for (int n = 0; n < KEYS / 8; n++)
        for (int i = 0; i < 4; i++) {
            const int64_t at = place + 8 * n + lane_id() % 4 * 2 + i % 2;
            const bool seen = at >= first[i / 2] && at < end[i / 2];
            score[n][i] = seen ? score[n][i] * call.scale : NOTHING;
            top[i / 2] = fmaxf(top[i / 2], score[n][i]);
        }
    for (int r = 0; r < 2; r++)
        for (int bits = 1; bits < 4; bits *= 2) top[r] = fmaxf(top[r], __shfl_xor_sync(ALL_LANES, top[r], bits));
}

// What sums under the old greatest score are worth under the new one.
__device__ inline float rescale(float old_top, float top) { return old_top == top ? 1 : exp2f(old_top - top); }

// p of a score; a NaN stays one.
__device__ inline float weight_of(float score, float top) { return score == NOTHING ? 0 : exp2f(score - top); }

// Columns 16 c to 16 c + 15 += p V over 16 places.
template <int A>
__device__ void weigh_values(float (&low)[4], float (&high)[4], const uint32_t (&p)[4],
                             const __nv_bfloat16 (*values)[A + 8], int c) {
    const int matrix = lane_id() / 8, row = lane_id() % 8;
    uint32_t b[4];
    ldmatrix_x4_trans(b, &values[matrix % 2 * 8 + row][16 * c + matrix / 2 * 8]);
    mma_bf16(low, p, {b[0], b[1]});
    mma_bf16(high, p, {b[2], b[3]});
}

// Sums += p over 16 places: a product with ones.
__device__ inline void weigh_ones(float (&sums)[4], const uint32_t (&p)[4]) {
    mma_bf16(sums, p, {0x3f803f80, 0x3f803f80});
}

// How a chunk's sums join those of the chunks before it. One of which a row sees nothing (its sum of p is 0) is left
// out.
struct Merge {
    float before, here;
    bool sees_nothing;

    __device__ Merge(float& top, float chunk_top, float chunk_sum) {
        const float greatest = fmaxf(top, chunk_top);
        before = rescale(top, greatest), here = rescale(chunk_top, greatest);
        sees_nothing = chunk_sum == 0;
        top = greatest;
    }
    __device__ float operator()(float sum, float chunk_sum) const {
        return sees_nothing ? sum : fmaf(sum, before, chunk_sum * here);
    }
};

// What is not finite is NaN.
__device__ inline float result(float sum, float sum_of_p) {
    const float x = sum / sum_of_p;
    return is_finite(x) ? x : nan_number();
}

}  // namespace quire
