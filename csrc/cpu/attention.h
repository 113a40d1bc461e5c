// What attention.cpp, which plans, and attention.inc, which computes, share.
#pragma once
#include <cstdint>

#include "kv.h"

namespace quire {

constexpr int64_t CHUNK = 256;                  // tokens of one softmax; chunks are merged in order
constexpr int64_t BLOCK_ROWS = 48;              // most rows that share a reading of the cache
constexpr int64_t BLOCK_FLOATS = 48 * 256;      // and most numbers that they have: rows times A16
constexpr int64_t MOST_TREE = 64;               // new tokens of a request whose drafts form a tree

// A row's softmax over some tokens: the greatest score, the sum of exponentials and, from ACC on, their sum of values.
constexpr int64_t TOP = 0, SUM = 1, ACC = 16;

inline int64_t softmax_floats(int64_t A) { return ACC + round_up_16(A); }

// The arguments of attention_cpu.
struct Attention {
    float* out_THA;
    const float* q_THA;
    const void *k_cache, *v_cache;
    const int32_t* table;
    const int64_t *row_S, *starts_S1, *lengths_S, *ancestors_T;
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
    int64_t first, end;     // places
};

// Where a request's new tokens begin.
inline int64_t past(const Attention& call, int64_t request) {
    return call.lengths_S[request] - (call.starts_S1[request + 1] - call.starts_S1[request]);
}

// Bits 0 to i, where i < 64.
inline uint64_t bits_through(int64_t i) { return ~uint64_t(0) >> (63 - i); }

// The new tokens that a request's i-th sees, where i < MOST_TREE: bit j is the j-th.
inline uint64_t path(const Attention& call, int64_t request, int64_t i) {
    const uint64_t before = bits_through(i);
    return call.ancestors_T ? before & uint64_t(call.ancestors_T[call.starts_S1[request] + i]) : before;
}

// What a request's i-th new token sees of the text that ends with it. In a tree this has the places that it would have
// without the drafts that the token does not see, whatever lies between.
inline Sight sight(const Attention& call, int64_t request, int64_t i) {
    const bool may_branch = call.ancestors_T && i < MOST_TREE;
    const int64_t num_seen = may_branch ? __builtin_popcountll(path(call, request, i)) : i + 1;
    const int64_t end = past(call, request) + num_seen;
    return {call.window && call.window < end ? end - call.window : 0, end};
}

// Computes an item. `next_item` is one that this thread may well take next, or null.
#define ATTEND void attend(const Attention& call, const Item& item, const Item* next_item, int32_t cache_format);
namespace plain { ATTEND }
namespace avx2 { ATTEND }
namespace avx512 { ATTEND }
namespace amx { ATTEND }        // in bfloat16
#undef ATTEND

}  // namespace quire
