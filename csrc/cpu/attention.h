// What attention.cpp, which plans, and attention.inc, which computes, share.
#pragma once
#include <cstdint>

#include "kv.h"

namespace quire {

constexpr int64_t CHUNK = 256;                  // tokens of one softmax; chunks are merged in order
constexpr int64_t BLOCK_ROWS = 48;              // most rows that share a reading of the cache
constexpr int64_t BLOCK_FLOATS = 48 * 256;      // and most numbers that they have: rows times A16

// A row's softmax over some tokens: the greatest score, the sum of exponentials and, from ACC on, their sum of values.
constexpr int64_t TOP = 0, SUM = 1, ACC = 16;

inline int64_t softmax_floats(int64_t A) { return ACC + round_up_16(A); }

// The arguments of attention_cpu.
struct Attention {
    float* out_THA;
    const float* q_THA;
    const void *k_cache, *v_cache;
    const int32_t* table;
    const int64_t *row_S, *starts_S1, *lengths_S;
    int64_t H, G, A, B, table_stride, window;
    float scale;
    bool* damaged;      // set where a result is not finite
};

// A request's rows of one key/value head: row r is its new token r / R and query head r % R of the head's R = H / G.
struct Block {
    int64_t request, group, row, end_row;
    int64_t chunk, end_chunk;       // those that its rows see
    float* softmaxes;               // of each chunk and row, if the chunks are shared out; else null
    int64_t num_pending;            // chunks that nobody has finished
};

// One task: some of a block's chunks.
struct Item {
    Block* block;
    int64_t chunk, end_chunk;
};

struct Sight {
    int64_t first, end;     // places in the request
};

inline Sight sight(const Attention& call, int64_t request, int64_t row) {
    const int64_t num_new = call.starts_S1[request + 1] - call.starts_S1[request];
    const int64_t end = call.lengths_S[request] - num_new + row / (call.H / call.G) + 1;
    return {call.window && call.window < end ? end - call.window : 0, end};
}

namespace plain { void attend(const Attention& call, const Item& item, int32_t cache_format); }
namespace avx2 { void attend(const Attention& call, const Item& item, int32_t cache_format); }
namespace avx512 { void attend(const Attention& call, const Item& item, int32_t cache_format); }

}  // namespace quire
