// attention_cpu: checks the arguments, cuts the work into items and shares them out. attention.inc has the arithmetic.
#include "attention.h"

#include <algorithm>

#include "../kernels.h"
#include "isa.h"
#include "pool.h"

namespace quire {
namespace {

int64_t new_tokens(const Attention& call, int64_t request) {
    return call.starts_S1[request + 1] - call.starts_S1[request];
}

// Whether the new tokens of a request form a tree: each sees itself, and of the others what its parent sees, the last
// of them. Then a path is a text. Without a tree all bits are set.
bool is_tree(const Attention& call, int64_t request) {
    const int64_t num_new = new_tokens(call, request);
    for (int64_t i = 0; i < num_new; i++) {
        if (num_new > MOST_TREE) {
            if (call.ancestors_T[call.starts_S1[request] + i] != -1) return false;
            continue;
        }
        const uint64_t seen = path(call, request, i), self = uint64_t(1) << i, others = seen & ~self;
        if (!(seen & self)) return false;
        if (others && others != path(call, request, 63 - __builtin_clzll(others))) return false;
    }
    return true;
}

int check(const Attention& call, int64_t T, int64_t S, int64_t num_pages) {
    if (T < 0 || S < 0 || call.H < 1 || call.window < 0) return BAD_SIZE;
    if (!is_cache_shape(call.G, call.A, call.B) || call.H % call.G) return BAD_SIZE;
    if (call.starts_S1[0] != 0 || call.starts_S1[S] != T) return BAD_INDEX;
    for (int64_t s = 0; s < S; s++) {
        if (call.starts_S1[s + 1] < call.starts_S1[s] || call.starts_S1[s + 1] > T) return BAD_INDEX;
        const int64_t num_new = new_tokens(call, s), length = call.lengths_S[s];
        if (num_new == 0) continue;
        if (num_new > length || length > call.table_stride * call.B) return BAD_INDEX;
        if (call.row_S[s] < 0) return BAD_INDEX;
        if (call.ancestors_T && !is_tree(call, s)) return BAD_INDEX;
        const int32_t* pages = call.table + call.row_S[s] * call.table_stride;
        for (int64_t page = sight(call, s, 0).first / call.B; page * call.B < length; page++)
            if (pages[page] < 0 || pages[page] >= num_pages) return BAD_INDEX;
    }
    return OK;
}

// The chunks that some of these rows see.
Sight chunks_in_sight(const Attention& call, int64_t request, int64_t row, int64_t end_row) {
    const int64_t R = call.H / call.G, first = row / R, last = (end_row - 1) / R;
    Sight seen = {sight(call, request, first).first, sight(call, request, last).end};
    for (int64_t i = first; call.ancestors_T && i <= last; i++) {   // in a tree any may be the one that sees most
        const Sight of_token = sight(call, request, i);
        seen = {std::min(seen.first, of_token.first), std::max(seen.end, of_token.end)};
    }
    return {seen.first / CHUNK, (seen.end + CHUNK - 1) / CHUNK};
}

// Calls body(block) for every block. Later rows come first: they see more, and long items should not end the call.
template <class Body>
void each_block(const Attention& call, int64_t S, int64_t most_rows, Body body) {
    const int64_t R = call.H / call.G;
    for (int64_t s = 0; s < S; s++)
        for (int64_t end = new_tokens(call, s) * R; end > 0; end -= most_rows)
            for (int64_t group = 0; group < call.G; group++) {
                const int64_t row = end > most_rows ? end - most_rows : 0;
                const auto [chunk, end_chunk] = chunks_in_sight(call, s, row, end);
                body(Block{s, group, row, end, chunk, end_chunk, nullptr, end_chunk - chunk});
            }
}

// One pass over all rows in blocks of at most `most_rows`. A block that is a large part of the work is shared out chunk
// by chunk; that costs memory for the chunks' results and does not change a bit.
int attend(const Attention& call, int64_t S, int64_t most_rows, int32_t cache_format) {
    const auto work = [](const Block& block) { return (block.end_chunk - block.chunk) * (block.end_row - block.row); };
    int64_t total = 0, num_blocks = 0, num_items = 0, num_floats = 0;
    const int64_t num_sharing = num_threads();      // asked once: another thread may change it meanwhile
    each_block(call, S, most_rows, [&](const Block& block) { total += work(block); });
    const auto is_shared = [&](const Block& block) {
        return block.num_pending > 1 && work(block) * 8 * num_sharing > total;
    };
    each_block(call, S, most_rows, [&](const Block& block) {
        num_blocks++;
        num_items += is_shared(block) ? block.num_pending : 1;
        num_floats += is_shared(block) ? work(block) * softmax_floats(call.A) : 0;
    });

    const int64_t bytes = num_blocks * sizeof(Block) + num_items * sizeof(Item) + num_floats * sizeof(float);
    float* const memory = (float*)workspace(ATTENTION, bytes);
    if (!memory && bytes) return NO_MEMORY;
    float* softmaxes = memory;
    Block* const blocks = (Block*)(memory + num_floats);
    Item* const items = (Item*)(blocks + num_blocks);
    Block* next_block = blocks;
    Item* next_item = items;
    each_block(call, S, most_rows, [&](Block block) {
        const bool shared = is_shared(block);
        if (shared) block.softmaxes = softmaxes, softmaxes += work(block) * softmax_floats(call.A);
        const int64_t step = shared ? 1 : block.num_pending;
        for (int64_t chunk = block.chunk; chunk < block.end_chunk; chunk += step)
            *next_item++ = {next_block, chunk, chunk + step};
        *next_block++ = block;
    });

    auto* run = PICK(attend);
#if defined(__x86_64__)
    if (isa() == AMX && cache_format == BF16) run = amx::attend;
#endif
    parallel(num_items, [&](int64_t i) {    // threads that are equally fast take turns
        run(call, items[i], i + num_sharing < num_items ? items + i + num_sharing : nullptr, cache_format);
    });
    return OK;
}

void spread_damage(const Attention& call, int64_t T) {
    const int64_t width = call.H * call.A;
    for (float* row = call.out_THA; row < call.out_THA + T * width; row += width) {
        bool bad = false;
        for (int64_t i = 0; i < width; i++) bad |= !__builtin_isfinite(row[i]);
        for (int64_t i = 0; bad && i < width; i++) row[i] = __builtin_nanf("");
    }
}

}  // namespace
}  // namespace quire

int attention_cpu(float* out_THA, const float* q_THA, const void* k_cache, const void* v_cache, const int32_t* table,
                  const int64_t* row_S, const int64_t* starts_S1, const int64_t* lengths_S, const int64_t* ancestors_T,
                  int64_t T, int64_t S, int64_t H, int64_t G, int64_t A, int64_t B, int64_t num_pages,
                  int64_t table_stride, float scale, int64_t window, int32_t cache_format) {
    using namespace quire;
    bool damaged = false;
    const Attention call = {out_THA, q_THA, k_cache, v_cache, table, row_S, starts_S1, lengths_S, ancestors_T,
                            H, G, A, B, table_stride, window, scale, &damaged};
    if (!cell_bytes(cache_format)) return BAD_FORMAT;
    if (const int status = check(call, T, S, num_pages)) return status;
    const int64_t most_rows = round_up_16(A) * BLOCK_ROWS <= BLOCK_FLOATS ? BLOCK_ROWS : BLOCK_FLOATS / round_up_16(A);
    int status = attend(call, S, most_rows, cache_format);
    if (status == OK && damaged) {
        status = attend(call, S, 1, cache_format);
        spread_damage(call, T);
    }
    return status;
}
