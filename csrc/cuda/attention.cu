// attention_cuda: attention of ragged queries over the paged cache. attention.cuh has the arithmetic.
//
// Two kernels, as requests have few new tokens (decoding, drafts, trees) or many (prompts):
//   few_new   A block has one token's heads of one key/value head, padded to the 16 rows of a product, and one chunk of
//             128 places; all query heads share the reading of keys and values. The chunk comes whole into shared
//             memory by cp.async, 64 KB in flight a block at a width of 128, and three blocks share a multiprocessor:
//             one computes while two wait. Its 4 warps share the chunk's tiles for scores and the columns for values.
//             Bound by memory: 2 * H / G operations a byte. Chunks' sums are merged by merge_chunks: 1 / 32 to 1 / 8 of
//             the bytes, from cache. Where requests are many, a block takes all chunks of its token instead, and merges
//             them itself. Several new tokens of a request each read its keys, all but the first from cache.
//   many_new  A block has 64 rows, a warp 16 of them, and walks through the tiles of 32 places, two in flight. Bound by
//             the tensor cores: 4 * 64 * 32 * A operations for 128 * A bytes, 64 a byte, of which neighbours in the
//             same text share in cache.
#include "attention.cuh"
#include "kernels.cuh"

namespace quire {
namespace {

// That are shared out, of all tokens: what the workspace has room for. 64 contexts of 32,768 tokens, or two million of
// one token; 270 MB for 32 heads of 128. The tokens of a request that does not fit are computed by a block each.
constexpr int64_t MOST_CHUNKS = 16384;

// Sharing out ---------------------------------------------------------------------------------------------------------

// What few_new has to do for a request's tokens: `items` blocks; chunks are shared out where there is room for the
// sums of all of them.
struct Work {
    int64_t request, num_new, first_chunk, num_chunks;
    int64_t first_item, first_slot;     // counted through all requests
    bool shared_out;
};

// Its own request's chunks, as far as one of its tokens sees them.
__device__ void find_chunks(Work& work, const Attention& call, int64_t s) {
    work.request = s, work.num_new = work.first_chunk = work.num_chunks = 0;
    if (s >= call.S || !call.is_alone(s)) return;
    work.num_new = call.num_new(s);
    if (work.num_new == 0) return;
    work.first_chunk = Sight(call, s, 0).first / CHUNK;
    const int64_t end_chunk = (call.lengths_S[s] + CHUNK - 1) / CHUNK;
    work.num_chunks = end_chunk > work.first_chunk ? end_chunk - work.first_chunk : 1;
}

__device__ int64_t sum_before(int64_t x) {      // in the lanes up to this one
    for (int by = 1; by < WARP; by *= 2) {
        const int64_t other = __shfl_up_sync(ALL_LANES, x, by);
        if (lane_id() >= by) x += other;
    }
    return x;
}

// The first request for which is_it(request, its last item) holds, found by a warp: 32 requests at a time.
template <class Predicate>
__device__ bool find_work(Work& work, const Attention& call, Predicate is_it) {
    int64_t items = 0, slots = 0;
    for (int64_t first = 0; first < call.S; first += WARP) {
        find_chunks(work, call, first + lane_id());
        const int64_t own_slots = work.num_chunks > 1 ? work.num_new * work.num_chunks : 0;
        const int64_t end_slot = slots + sum_before(own_slots);
        work.shared_out = own_slots && end_slot <= call.capacity;
        const int64_t own_items = work.num_new * (work.shared_out ? work.num_chunks : 1) * call.head_tiles();
        const int64_t end_item = items + sum_before(own_items);
        work.first_item = end_item - own_items, work.first_slot = end_slot - own_slots;
        const unsigned votes = __ballot_sync(ALL_LANES, first + lane_id() < call.S && is_it(work.request, end_item));
        if (votes) {
            const int from = __ffs(int(votes)) - 1;
            for (int64_t* number : {&work.request, &work.num_new, &work.first_chunk, &work.num_chunks, &work.first_item,
                                    &work.first_slot})
                *number = __shfl_sync(ALL_LANES, *number, from);
            work.shared_out = __shfl_sync(ALL_LANES, int(work.shared_out), from);
            return true;
        }
        items = __shfl_sync(ALL_LANES, end_item, WARP - 1), slots = __shfl_sync(ALL_LANES, end_slot, WARP - 1);
    }
    return false;
}

// A chunk's sums for one row in the workspace: A of acc, then the greatest score and the sum of p.
template <int A>
__device__ float* chunk_sums(const Attention& call, const Work& work, int64_t i, int64_t chunk, int64_t head_tile,
                             int row) {
    const int64_t slot = work.first_slot + i * work.num_chunks + chunk - work.first_chunk;
    return call.workspace + ((slot * call.head_tiles() + head_tile) * call.tile_heads() + row) * (A + 4);
}

// Few new tokens ------------------------------------------------------------------------------------------------------

template <int A>
struct alignas(128) FewNew {
    Tile<A, CHUNK> keys, values;
    __nv_bfloat16 p[M][CHUNK + 8];
    float tops[CHUNK / KEYS][M];        // of each tile
};

// The scores of a chunk, each warp those of a tile, turned into p in shared memory.
template <int A>
__device__ void weigh_chunk(FewNew<A>& shared, const uint32_t (&q)[A / 16][4], const Attention& call, const Sight& seen,
                            int64_t chunk) {
    const int tile = warp_id(), row = lane_id() / 4;
    const int64_t first[2] = {seen.first, seen.first}, end[2] = {seen.end, seen.end};
    float score[KEYS / 8][4], top[2];
    score_tile<A>(score, q, shared.keys + tile * KEYS);
    mask_tile(top, score, call, chunk * CHUNK + tile * KEYS, first, end);
    if (lane_id() % 4 == 0) shared.tops[tile][row] = top[0], shared.tops[tile][row + 8] = top[1];
    __syncthreads();
    for (int t = 0; t < tile; t++)
        for (int r = 0; r < 2; r++) top[r] = fmaxf(top[r], shared.tops[t][row + 8 * r]);
    for (int n = 0; n < KEYS / 8; n++)
        for (int r = 0; r < 2; r++) {
            const float* const two = score[n] + 2 * r;
            const uint32_t pair = bfloat_pair(weight_of(two[0], top[r]), weight_of(two[1], top[r]));
            memcpy(&shared.p[row + 8 * r][tile * KEYS + 8 * n + lane_id() % 4 * 2], &pair, sizeof pair);
        }
}

// A warp's columns of acc are 16 c to 16 c + 15 for c = warp, warp + 4, ...
template <int A>
constexpr int OWN_COLUMNS = (A / 16 + ATTENTION_WARPS - 1) / ATTENTION_WARPS;

template <int A>
__device__ void sum_chunk(float (&acc)[OWN_COLUMNS<A>][2][4], float (&sums)[4], float (&top)[2],
                          const FewNew<A>& shared) {
    const int matrix = lane_id() / 8, row = lane_id() % 8;
    for (int n = 0; n < OWN_COLUMNS<A>; n++)
        for (int i = 0; i < 8; i++) acc[n][i / 4][i % 4] = 0;
    for (int i = 0; i < 4; i++) sums[i] = 0;
    top[0] = top[1] = NOTHING;
#pragma unroll
    for (int tile = 0; tile < CHUNK / KEYS; tile++) {
        float factor[2];
        for (int r = 0; r < 2; r++) {
            const float now = fmaxf(top[r], shared.tops[tile][lane_id() / 4 + 8 * r]);
            factor[r] = rescale(top[r], now);
            top[r] = now;
        }
#pragma unroll
        for (int n = 0; n < OWN_COLUMNS<A>; n++)
            for (int i = 0; i < 8; i++) acc[n][i / 4][i % 4] *= factor[i % 4 / 2];
        for (int i = 0; i < 4; i++) sums[i] *= factor[i / 2];
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            const int place = tile * KEYS + 16 * k;
            uint32_t p[4];
            ldmatrix_x4(p, &shared.p[matrix % 2 * 8 + row][place + matrix / 2 * 8]);
            weigh_ones(sums, p);
#pragma unroll
            for (int n = 0; n < OWN_COLUMNS<A>; n++) {
                const int c = warp_id() + n * ATTENTION_WARPS;
                if (c < A / 16) weigh_values<A>(acc[n][0], acc[n][1], p, shared.values + place, c);
            }
        }
    }
}

// Calls put(row, column, acc) for all that this lane has of the first `num_rows` rows.
template <int A, class Put>
__device__ void each_number(const float (&acc)[OWN_COLUMNS<A>][2][4], int num_rows, Put put) {
#pragma unroll
    for (int n = 0; n < OWN_COLUMNS<A>; n++)
        for (int i = 0; i < 8; i++) {
            const int c = warp_id() + n * ATTENTION_WARPS, row = lane_id() / 4 + i % 4 / 2 * 8;
            const int column = 16 * c + i / 4 * 8 + lane_id() % 4 * 2 + i % 2;
            if (c < A / 16 && row < num_rows) put(row, column, acc[n][i / 4][i % 4], i % 4 / 2);
        }
}

// One item: a token's heads of a tile, and one of its chunks or all.
template <int A>
__device__ void attend_token(FewNew<A>& shared, const Attention& call, const Work& work, int64_t item) {
    const int64_t i = item % work.num_new, head_tile = item / work.num_new % call.head_tiles();
    const int64_t group = head_tile / (call.head_tiles() / call.G);
    const int64_t head = group * call.heads() + head_tile % (call.head_tiles() / call.G) * M;
    const int64_t end_head = (group + 1) * call.heads();
    const int num_rows = int(end_head - head < M ? end_head - head : M);
    const int64_t t = call.starts_S1[work.request] + i;
    const Sight seen(call, work.request, i);
    const int32_t* const pages = call.table + call.row_S[work.request] * call.table_stride;
    const int64_t first = work.first_chunk + (work.shared_out ? item / work.num_new / call.head_tiles() : 0);
    const int64_t end = work.shared_out ? first + 1 : work.first_chunk + work.num_chunks;

    const float* const queries = call.q_THA + (t * call.H + head) * call.A;
    const int row = lane_id() / 4;
    uint32_t q[A / 16][4];
    load_queries<A>(q, {row < num_rows ? queries + row * call.A : nullptr,
                        row + 8 < num_rows ? queries + (row + 8) * call.A : nullptr}, call.A);
    float acc[OWN_COLUMNS<A>][2][4], sums[4], top[2];
    float total[OWN_COLUMNS<A>][2][4] = {}, total_sums[2] = {}, total_top[2] = {NOTHING, NOTHING};
    for (int64_t chunk = first; chunk < end; chunk++) {
        __syncthreads();        // nobody reads the chunk before any more
        fetch<A, CHUNK>(shared.keys, shared.values, call, pages, group, chunk * CHUNK, seen);
        cp_async_wait<1>();
        __syncthreads();
        weigh_chunk<A>(shared, q, call, seen, chunk);
        cp_async_wait<0>();
        __syncthreads();
        sum_chunk<A>(acc, sums, top, shared);
        if (work.shared_out) break;
        const Merge merge[2] = {{total_top[0], top[0], sums[0]}, {total_top[1], top[1], sums[2]}};
        for (int r = 0; r < 2; r++) total_sums[r] = merge[r](total_sums[r], sums[2 * r]);
#pragma unroll
        for (int n = 0; n < OWN_COLUMNS<A>; n++)
            for (int i = 0; i < 8; i++)
                total[n][i / 4][i % 4] = merge[i % 4 / 2](total[n][i / 4][i % 4], acc[n][i / 4][i % 4]);
    }
    if (!work.shared_out) {
        each_number<A>(total, num_rows, [&](int row, int column, float x, int r) {
            if (column < call.A)
                call.out_THA[(t * call.H + head + row) * call.A + column] = seen.end ? result(x, total_sums[r]) : 0;
        });
        return;
    }
    each_number<A>(acc, num_rows, [&](int row, int column, float x, int) {
        chunk_sums<A>(call, work, i, first, head_tile, row)[column] = x;
    });
    for (int r = 0; r < 2; r++)
        if (warp_id() == 0 && lane_id() % 4 == 0 && row + 8 * r < num_rows) {
            float* const behind = chunk_sums<A>(call, work, i, first, head_tile, row + 8 * r) + A;
            behind[0] = top[r], behind[1] = sums[2 * r];
        }
}

// As many blocks as run at a time, each of which takes every so-manyth item: how many there are, only the device knows.
template <int A>
__global__ void __launch_bounds__(ATTENTION_THREADS) few_new(Attention call) {
    auto& shared = dynamic_shared<FewNew<A>>();
    Work work{};
    for (int64_t item = blockIdx.x;; item += gridDim.x) {
        if (!find_work(work, call, [&](int64_t, int64_t end_item) { return item < end_item; })) return;
        attend_token<A>(shared, call, work, item - work.first_item);
    }
}

// Grid: (tokens, heads); thread a has column a, of whole warps, as find_work wants them.
template <int A>
__global__ void merge_chunks(Attention call) {
    const int64_t t = blockIdx.x, head = blockIdx.y, a = threadIdx.x;
    Work work{};
    find_work(work, call, [&](int64_t s, int64_t) { return t < call.starts_S1[s + 1]; });
    if (!work.shared_out || a >= call.A) return;
    const int64_t i = t - call.starts_S1[work.request], in_group = head % call.heads();
    const int64_t head_tile = head / call.heads() * (call.head_tiles() / call.G) + in_group / M;
    const Sight seen(call, work.request, i);
    float total = 0, total_sum = 0, top = NOTHING;
#pragma unroll 8
    for (int64_t chunk = seen.first / CHUNK; chunk * CHUNK < seen.end; chunk++) {
        const float* const sums = chunk_sums<A>(call, work, i, chunk, head_tile, int(in_group % M));
        const Merge merge(top, sums[A], sums[A + 1]);
        total_sum = merge(total_sum, sums[A + 1]);
        total = merge(total, sums[a]);
    }
    call.out_THA[(t * call.H + head) * call.A + a] = result(total, total_sum);
}

// Many new tokens -----------------------------------------------------------------------------------------------------

constexpr int BLOCK_ROWS = ATTENTION_WARPS * M;

// Queries of wide heads, each lane's own. In registers they would have 756 bytes of others spill (sm_90, a width of
// 256), which is more to read back for each tile than they are.
template <int A, bool IS_WIDE = (A > 128)>
struct WideQueries {};
template <int A>
struct WideQueries<A, true> {
    uint4 q[ATTENTION_WARPS][A / 16][WARP];
};

template <int A>
struct alignas(128) ManyNew : WideQueries<A> {
    Tile<A, KEYS> keys[2], values[2];
    float total[ATTENTION_WARPS][A / 8][4][WARP];       // of the chunks before
};

template <int A>
struct LaneQueries {
    const uint4 (&memory)[A / 16][WARP];
    __device__ const uint4& operator[](int k) const { return memory[k][lane_id()]; }
};

// Which rows this lane has of a block's, by r: those of number l / 4 and l / 4 + 8 of its warp's 16.
struct Rows {
    int64_t first[2] = {}, end[2] = {}, out[2] = {};    // what they see; their numbers among all rows of heads
    bool exist[2];

    // Row `row` is new token row / R and query head row % R of the group's R.
    __device__ Rows(const Attention& call, int64_t s, int64_t group, int64_t row, int64_t end_row) {
        for (int r = 0; r < 2; r++) {
            const int64_t own = row + warp_id() * M + lane_id() / 4 + 8 * r, R = call.heads();
            exist[r] = own < end_row;
            if (!exist[r]) continue;
            const Sight seen(call, s, own / R);
            first[r] = seen.first, end[r] = seen.end;
            out[r] = (call.starts_S1[s] + own / R) * call.H + group * R + own % R;
        }
    }
};

// What a warp has summed of a chunk.
template <int A>
struct ChunkSums {
    float acc[A / 8][4] = {}, sums[4] = {}, top[2] = {NOTHING, NOTHING};

    __device__ void add_tile(const float (&score)[KEYS / 8][4], const float (&tile_top)[2],
                             const __nv_bfloat16 (*values)[A + 8]) {
        float factor[2];
        for (int r = 0; r < 2; r++) {
            const float greatest = fmaxf(top[r], tile_top[r]);
            factor[r] = rescale(top[r], greatest);
            top[r] = greatest;
        }
#pragma unroll
        for (int n = 0; n < A / 8; n++)
            for (int i = 0; i < 4; i++) acc[n][i] *= factor[i / 2];
        for (int i = 0; i < 4; i++) sums[i] *= factor[i / 2];
#pragma unroll
        for (int k = 0; k < KEYS / 16; k++) {
            uint32_t p[4];
            for (int i = 0; i < 4; i++) {
                const float* const two = score[2 * k + i / 2] + i % 2 * 2;
                p[i] = bfloat_pair(weight_of(two[0], top[i % 2]), weight_of(two[1], top[i % 2]));
            }
            weigh_ones(sums, p);
#pragma unroll
            for (int c = 0; c < A / 16; c++) weigh_values<A>(acc[2 * c], acc[2 * c + 1], p, values + 16 * k, c);
        }
    }
};

// What it has summed of the chunks before: in shared memory, which it needs every fourth tile only.
template <int A>
struct TotalSums {
    float (&acc)[A / 8][4][WARP];
    float sums[2] = {}, top[2] = {NOTHING, NOTHING};

    __device__ TotalSums(float (&memory)[A / 8][4][WARP]) : acc(memory) {
        for (int n = 0; n < A / 8; n++)
            for (int i = 0; i < 4; i++) acc[n][i][lane_id()] = 0;
    }
    __device__ void add(const ChunkSums<A>& chunk) {
        const Merge merge[2] = {{top[0], chunk.top[0], chunk.sums[0]}, {top[1], chunk.top[1], chunk.sums[2]}};
        for (int r = 0; r < 2; r++) sums[r] = merge[r](sums[r], chunk.sums[2 * r]);
#pragma unroll
        for (int n = 0; n < A / 8; n++)
            for (int i = 0; i < 4; i++) {
                float& total = acc[n][i][lane_id()];
                total = merge[i / 2](total, chunk.acc[n][i]);
            }
    }
    // Says whether one of the results is not finite.
    __device__ bool put(const Attention& call, const Rows& rows) const {
        bool damaged = false;
        for (int n = 0; n < A / 8; n++)
            for (int i = 0; i < 4; i++) {
                const int64_t column = 8 * n + lane_id() % 4 * 2 + i % 2;
                if (!rows.exist[i / 2] || column >= call.A) continue;
                const float x = result(acc[n][i][lane_id()], sums[i / 2]);
                call.out_THA[rows.out[i / 2] * call.A + column] = x;
                damaged |= !is_finite(x);
            }
        return damaged;
    }
};

// Rows `row` to `end_row` of a request, in tiles of the places that one of them sees. Says whether a result of this
// thread is not finite.
template <int A>
__device__ bool attend_rows(ManyNew<A>& shared, const Attention& call, int64_t s, int64_t group, int64_t row,
                            int64_t end_row) {
    Sight seen(call, s, (end_row - 1) / call.heads());
    seen.first = Sight(call, s, row / call.heads()).first;
    const int32_t* const pages = call.table + call.row_S[s] * call.table_stride;
    const Rows rows(call, s, group, row, end_row);
    uint32_t q[A / 16][4];
    load_queries<A>(q, {rows.exist[0] ? call.q_THA + rows.out[0] * call.A : nullptr,
                        rows.exist[1] ? call.q_THA + rows.out[1] * call.A : nullptr}, call.A);
    if constexpr (A > 128)
        for (int k = 0; k < A / 16; k++) shared.q[warp_id()][k][lane_id()] = {q[k][0], q[k][1], q[k][2], q[k][3]};

    ChunkSums<A> chunk;
    TotalSums<A> total(shared.total[warp_id()]);
    const int64_t begin = seen.first / CHUNK * CHUNK;
    fetch<A, KEYS>(shared.keys[0], shared.values[0], call, pages, group, begin, seen);
    for (int64_t place = begin; place < seen.end; place += KEYS) {
        const int now = (place - begin) / KEYS % 2;
        cp_async_wait<0>();
        __syncthreads();        // all see this tile, and nobody needs the one before any more
        fetch<A, KEYS>(shared.keys[1 - now], shared.values[1 - now], call, pages, group, place + KEYS, seen);
        float score[KEYS / 8][4], top[2];
        if constexpr (A > 128) score_tile<A>(score, LaneQueries<A>{shared.q[warp_id()]}, shared.keys[now]);
        else score_tile<A>(score, q, shared.keys[now]);
        mask_tile(top, score, call, place, rows.first, rows.end);
        chunk.add_tile(score, top, shared.values[now]);
        if ((place + KEYS) % CHUNK && place + KEYS < seen.end) continue;
        total.add(chunk);
        chunk = ChunkSums<A>();
    }
    cp_async_wait<0>();
    __syncthreads();
    return total.put(call, rows);
}

// Which request's which tile of rows this block has; later ones come first, since they see more.
__device__ bool find_rows(int64_t& s, int64_t& row, const Attention& call) {
    int64_t tiles = 0;
    for (int64_t first = 0; first < call.S; first += WARP) {
        const int64_t own = first + lane_id();
        int64_t own_tiles = 0;
        if (own < call.S && !call.is_alone(own) && call.lengths_S[own])
            own_tiles = (call.num_new(own) * call.heads() + BLOCK_ROWS - 1) / BLOCK_ROWS;
        const int64_t end = tiles + sum_before(own_tiles);
        const unsigned votes = __ballot_sync(ALL_LANES, blockIdx.x < end);
        if (votes) {
            const int from = __ffs(int(votes)) - 1;
            s = first + from;
            row = (__shfl_sync(ALL_LANES, end, from) - 1 - blockIdx.x) * BLOCK_ROWS;
            return true;
        }
        tiles = __shfl_sync(ALL_LANES, end, WARP - 1);
    }
    return false;
}

// Grid: (tiles of rows, G). Where numbers are not finite, p = 0 times a value that a row does not see may have spoilt
// it: then each token is computed by itself, which reads just what it sees.
template <int A>
__global__ void __launch_bounds__(ATTENTION_THREADS) many_new(Attention call) {
    auto& shared = dynamic_shared<ManyNew<A>>();
    int64_t s, row;
    if (!find_rows(s, row, call)) return;
    const int64_t R = call.heads(), all_rows = call.num_new(s) * R;
    const int64_t end_row = row + BLOCK_ROWS < all_rows ? row + BLOCK_ROWS : all_rows;
    if (!__syncthreads_or(attend_rows<A>(shared, call, s, blockIdx.y, row, end_row))) return;
    for (int64_t next; row < end_row; row = next) {
        next = (row / R + 1) * R < end_row ? (row / R + 1) * R : end_row;
        attend_rows<A>(shared, call, s, blockIdx.y, row, next);
    }
}

// ---------------------------------------------------------------------------------------------------------------------

template <int A>
int attend(const Attention& call, cudaStream_t stream) {
    static_assert(sizeof(FewNew<A>) <= 163 << 10 && sizeof(ManyNew<A>) <= 163 << 10, "what a block of sm_80 may have");
    const dim3 threads(ATTENTION_THREADS);
    const int64_t most_items = call.T * call.head_tiles() * divide_up(call.table_stride * call.B, CHUNK);
    const int64_t at_a_time = 3 * multiprocessors();
    int status = launch(few_new<A>, dim3(most_items < at_a_time ? most_items : at_a_time), threads, sizeof(FewNew<A>),
                        stream, call);
    if (status == OK && call.table_stride * call.B > CHUNK)
        status = launch(merge_chunks<A>, dim3(call.T, call.H), dim3(divide_up(A, WARP) * WARP), 0, stream, call);
    // Beside requests of no new tokens one may have all of T. A request's last tile need not be full.
    const int64_t most_requests = call.T / (FEW_NEW + 1);
    if (status == OK && most_requests > 0)
        status = launch(many_new<A>, dim3(call.T * (call.H / call.G) / BLOCK_ROWS + most_requests, call.G), threads,
                        sizeof(ManyNew<A>), stream, call);
    return status;
}

int64_t capacity(int64_t T, int64_t most_tokens) {
    const int64_t most = T * divide_up(most_tokens, CHUNK);
    return most < MOST_CHUNKS ? most : MOST_CHUNKS;
}

}  // namespace
}  // namespace quire

using namespace quire;

int64_t attention_bytes_cuda(int64_t T, int64_t, int64_t H, int64_t G, int64_t A, int64_t most_tokens) {
    Attention call{};
    call.H = H, call.G = G;
    return capacity(T, most_tokens) * call.head_tiles() * call.tile_heads() * (kv_width(A) + 4) * sizeof(float);
}

int attention_cuda(float* out_THA, const float* q_THA, const void* k_cache, const void* v_cache, const int32_t* table,
                   const int64_t* row_S, const int64_t* starts_S1, const int64_t* lengths_S, const int64_t* ancestors_T,
                   void* workspace, int64_t T, int64_t S, int64_t H, int64_t G, int64_t A, int64_t B,
                   int64_t table_stride, float scale, int64_t window, Stream stream) {
    if (T < 0 || S < 0 || G < 1 || H < 1 || H % G || B < 1 || window < 0 || !kv_width(A)) return BAD_SIZE;
    if (T == 0) return OK;
    constexpr float LOG2_E = 1.44269504f;
    const Attention call = {out_THA, q_THA, (const __nv_bfloat16*)k_cache, (const __nv_bfloat16*)v_cache, table, row_S,
                            starts_S1, lengths_S, ancestors_T, (float*)workspace, T, S, H, G, A, B, table_stride,
                            window, capacity(T, table_stride * B), scale * LOG2_E};
#define ATTEND(width) if (kv_width(A) == width) return attend<width>(call, cudaStream_t(stream));
    HEAD_WIDTHS(ATTEND)
    return BAD_SIZE;
}
