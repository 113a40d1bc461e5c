// argmax_cuda and draw_cuda: a block of threads draws from a row of logits. cpu/draw.cpp and kernels.py have the same
// arithmetic, operation by operation, in double, so that the ids are the same.
//
// A row is read from memory once, as doubles from cache some times more. Only an argmax is bound by memory; a draw from
// 150,000 ids does 20 to 100 operations in double for each, a few tens of microseconds, all rows at a time.
//
// In the order (logit descending, id ascending) each filter keeps a prefix. Candidates above a bound that suffices are
// gathered, in any order; the last of the prefix is then found digit by digit in (logit, id), by a table of what the
// candidates with each digit weigh. Weights are whole numbers, whose sums no order changes.
#include "../cpu/draw.h"
#include "common.cuh"
#include "kernels.cuh"

namespace quire {
namespace {

constexpr int THREADS = 512, WARPS = THREADS / WARP;
constexpr int DIGIT_BITS = 8, DIGITS = 1 << DIGIT_BITS, NUM_DIGITS = 64 / DIGIT_BITS + 3;     // ids have 22 bits
constexpr int64_t NUM_BYTES = sizeof(double) + sizeof(int32_t);     // of the workspace, for each id

struct Shared {
    union {
        double reals[WARPS];
        int64_t wholes[WARPS];
    };
    int64_t ids[WARPS];
    unsigned long long weights[DIGITS];
    int64_t needed;
    int digit, num;
};

__device__ Shared& shared() { return dynamic_shared<Shared>(); }

// The same in all threads.
__device__ int64_t block_sum(int64_t x) {
    for (int bits = WARP / 2; bits > 0; bits /= 2) x += __shfl_xor_sync(ALL_LANES, x, bits);
    __syncthreads();
    if (lane_id() == 0) shared().wholes[warp_id()] = x;
    __syncthreads();
    int64_t sum = 0;
    for (int w = 0; w < WARPS; w++) sum += shared().wholes[w];
    return sum;
}

// The best of some candidates: the greatest, of equals the one with the lowest id; id -1: none.
struct Best {
    double x;
    int64_t id;

    __device__ void enter(double other, int64_t other_id) {
        if (other_id < 0) return;
        if (id < 0 || other > x || (other == x && other_id < id)) x = other, id = other_id;
    }
};

__device__ Best block_best(Best best) {
    for (int bits = WARP / 2; bits > 0; bits /= 2) {
        const double x = __shfl_xor_sync(ALL_LANES, best.x, bits);
        best.enter(x, __shfl_xor_sync(ALL_LANES, best.id, bits));
    }
    __syncthreads();
    if (lane_id() == 0) shared().reals[warp_id()] = best.x, shared().ids[warp_id()] = best.id;
    __syncthreads();
    Best all = {0, -1};
    for (int w = 0; w < WARPS; w++) all.enter(shared().reals[w], shared().ids[w]);
    return all;
}

// The greatest logit; none if one is not finite.
__device__ Best best_logit(const float* x_V, int64_t V) {
    Best best = {0, -1};
    int64_t num_lost = 0;
    for (int64_t i = threadIdx.x; i < V; i += THREADS) {
        num_lost += !is_finite(x_V[i]);
        best.enter(x_V[i], i);
    }
    if (block_sum(num_lost)) return {0, -1};
    return block_best(best);
}

__global__ void __launch_bounds__(THREADS) argmax(int64_t* id_L, const float* x_LV, int64_t V) {
    const Best best = best_logit(x_LV + blockIdx.x * V, V);
    if (threadIdx.x == 0) id_L[blockIdx.x] = best.id;
}

// Numbers of the draw -------------------------------------------------------------------------------------------------

__device__ uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * MIX_A;
    z = (z ^ (z >> 27)) * MIX_B;
    return z ^ (z >> 31);
}

__device__ double log_alike(double x) {     // kernels.log
    constexpr int64_t ROOT_HALF_BITS = 0x3FE6A09E667F3BCD;
    const int64_t bits = __double_as_longlong(x), n = (bits - ROOT_HALF_BITS) >> 52;
    const double f = __longlong_as_double(bits - n * (int64_t(1) << 52)) - 1, s = f / (f + 2), square = s * s;
    double series = 0;
    for (int k = 9; k >= 0; k--) series = series * square + 2. / (2 * k + 1);
    return n * LN2_HIGH + (n * LN2_LOW + s * series);
}

__device__ double gumbel(uint64_t bits) { return -log_alike(-log_alike(((bits >> 12) + 0.5) * 0x1p-52)); }

// At least gumbel(bits): cpu/draw.cpp.
__device__ double noise_bound(uint64_t bits) { return 0.6932 * (__clzll((long long)(~bits | 0xFFF)) + 1); }

__device__ int64_t share(double x) {        // kernels.shares
    constexpr double SHIFT = 0x1.8p52;
    x = x > -40 ? x : -40;
    const double shifted = x * (1 / 0.693147180559945309417) + SHIFT, n = shifted - SHIFT;
    const double r = x - n * LN2_HIGH - n * LN2_LOW, r2 = r * r, r4 = r2 * r2;
    const double a = (1 + r) + (1 / 2. + 1 / 6. * r) * r2;
    const double b = (1 / 24. + 1 / 120. * r) + (1 / 720. + 1 / 5040. * r) * r2;
    const double c = (1 / 40320. + 1 / 362880. * r) + (1 / 3628800. + 1 / 39916800. * r) * r2;
    const double series = a + (b + c * r4) * r4;
    const uint64_t power = ((uint64_t)__double_as_longlong(shifted) << 52) + ((uint64_t)(1023 + SHARE_BITS) << 52);
    const double units = series * __longlong_as_double((long long)power);
    return __double_as_longlong(units + SHIFT) - __double_as_longlong(SHIFT);
}

// Filters -------------------------------------------------------------------------------------------------------------

// Candidates of a row: ids, if they were gathered, else all ids below `num`.
struct Candidates {
    const double* scaled_V;
    const int32_t* id_C;
    int64_t num;

    __device__ int64_t id(int64_t c) const { return id_C ? id_C[c] : c; }
    __device__ double scaled(int64_t c) const { return scaled_V[id(c)]; }
};

// The end of a prefix: candidates with a greater number, and those with the same up to this id.
struct Last {
    double scaled;
    int64_t id;
    __device__ bool keeps(double x, int64_t other) const { return x > scaled || (x == scaled && other <= id); }
};

// Whole numbers in the order of the prefix: the greatest double first.
__device__ uint64_t rank(double x) {
    const int64_t bits = __double_as_longlong(x + 0.0);     // -0 is 0
    return bits < 0 ? uint64_t(bits) : ~uint64_t(bits) ^ (uint64_t(1) << 63);
}
__device__ double of_rank(uint64_t rank) {
    return __longlong_as_double((long long)(rank >> 63 ? rank : ~(rank ^ (uint64_t(1) << 63))));
}
__device__ int digit_of(uint64_t rank, int64_t id, int digit) {
    const int shift = 64 - DIGIT_BITS * (digit + 1);
    return int((shift >= 0 ? rank >> shift : uint64_t(id) >> (shift + 24)) % DIGITS);
}

// The last of the shortest prefix that weighs `needed`, which is at most what all candidates weigh.
template <class Weight>
__device__ Last last_of_prefix(const Candidates& c, int64_t needed, Weight weight) {
    uint64_t rank_so_far = 0;
    int64_t id_so_far = 0;
    for (int digit = 0; digit < NUM_DIGITS; digit++) {
        for (int i = threadIdx.x; i < DIGITS; i += THREADS) shared().weights[i] = 0;
        if (threadIdx.x == 0) shared().needed = needed;
        __syncthreads();
        for (int64_t n = threadIdx.x; n < c.num; n += THREADS) {
            const int64_t id = c.id(n);
            const uint64_t own = rank(c.scaled(n));
            bool agrees = true;
            for (int d = 0; d < digit; d++)
                agrees &= digit_of(own, id, d) == digit_of(rank_so_far, id_so_far, d);
            if (agrees) atomicAdd(&shared().weights[digit_of(own, id, digit)], (unsigned long long)weight(c.scaled(n)));
        }
        __syncthreads();
        if (threadIdx.x == 0) {
            int64_t left = shared().needed;
            int at = 0;
            while (int64_t(shared().weights[at]) < left) left -= int64_t(shared().weights[at++]);
            shared().digit = at, shared().needed = left;
        }
        __syncthreads();
        needed = shared().needed;
        const int shift = 64 - DIGIT_BITS * (digit + 1);
        if (shift >= 0) rank_so_far |= uint64_t(shared().digit) << shift;
        else id_so_far |= int64_t(shared().digit) << (shift + 24);
    }
    return {of_rank(rank_so_far), id_so_far};
}

// Those of `from` that `keeps` keeps, as ids in id_C, in any order. (id_C may be what from.id_C is: each thread reads
// what it moves before anybody writes.)
template <class Keeps>
__device__ Candidates gather(int32_t* id_C, const Candidates& from, Keeps keeps) {
    __syncthreads();        // nobody reads the last number any more
    if (threadIdx.x == 0) shared().num = 0;
    for (int64_t first = 0; first < from.num; first += THREADS) {
        const int64_t n = first + threadIdx.x;
        const int64_t id = n < from.num ? from.id(n) : -1;
        const bool kept = n < from.num && keeps(from.scaled(n), id);
        __syncthreads();
        if (kept) id_C[atomicAdd(&shared().num, 1)] = int32_t(id);
        __syncthreads();
    }
    return {from.scaled_V, id_C, shared().num};
}

// Candidates that surely hold the prefix that weighs `needed`: few of them, if few are enough.
template <class Weight>
__device__ Candidates above_bound(int32_t* id_C, const Candidates& c, int64_t needed, Weight weight) {
    for (const double bound : {-3., -6., -9., -12., -16., NO_SHARE}) {
        int64_t sum = 0;
        for (int64_t n = threadIdx.x; n < c.num; n += THREADS)
            if (c.scaled(n) >= bound) sum += weight(c.scaled(n));
        if (block_sum(sum) >= needed) return gather(id_C, c, [&](double x, int64_t) { return x >= bound; });
    }
    return gather(id_C, c, [](double, int64_t) { return true; });
}

template <class Weight>
__device__ Candidates keep_prefix(int32_t* id_C, const Candidates& c, int64_t needed, Weight weight) {
    const Candidates few = c.id_C ? c : above_bound(id_C, c, needed, weight);
    const Last last = last_of_prefix(few, needed, weight);
    return gather(id_C, few, [&](double x, int64_t id) { return last.keeps(x, id); });
}

__device__ Candidates filter(int32_t* id_C, Candidates c, const DrawRules& rules) {
    if (rules.min_p > -INFINITY) c = gather(id_C, c, [&](double x, int64_t) { return x >= rules.min_p; });
    if (rules.top_k > 0 && rules.top_k < c.num)
        c = keep_prefix(id_C, c, rules.top_k, [](double) { return int64_t(1); });
    if (rules.top_p < 1) {
        int64_t total = 0;
        for (int64_t n = threadIdx.x; n < c.num; n += THREADS) total += share(c.scaled(n));
        total = block_sum(total);
        const int64_t most = int64_t(rules.top_p * double(total));
        const int64_t needed = most < 1 ? 1 : most < total ? most : total;
        c = keep_prefix(id_C, c, needed, [](double x) { return share(x); });
    }
    return c;
}

// The row -------------------------------------------------------------------------------------------------------------

// Logits after penalties and biases. Says whether those that were changed are less than infinity.
__device__ bool adjust(double* x_V, const float* logits_V, const DrawRules& rules) {
    int64_t num_bad = 0;
    for (int64_t i = threadIdx.x; i < rules.vocab; i += THREADS) {
        double x = logits_V[i];
        if (rules.seen_V && rules.seen_V[i])
            x = x > 0 ? x / rules.repetition_penalty : x * rules.repetition_penalty;
        if (rules.count_V && rules.count_V[i] != 0)
            x = x - rules.frequency_penalty * rules.count_V[i] - rules.presence_penalty;
        x_V[i] = x;
    }
    __syncthreads();
    if (threadIdx.x == 0)       // in order: an id may have several
        for (int64_t b = 0; b < rules.num_biases; b++) x_V[rules.bias_ids[b]] += rules.biases[b];
    __syncthreads();
    for (int64_t i = threadIdx.x; i < rules.vocab; i += THREADS) num_bad += !(x_V[i] < INFINITY);
    return block_sum(num_bad) == 0;
}

__device__ int64_t draw_row(const float* logits_V, const DrawRules& rules, double* x_V, int32_t* id_C, int64_t V) {
    const Best best = best_logit(logits_V, V);
    const bool untouched = !rules.seen_V && !rules.count_V && !rules.num_biases;
    if (best.id < 0 || (rules.temperature == 0 && untouched && best.id < rules.vocab)) return best.id;
    if (!adjust(x_V, logits_V, rules)) return -1;

    Best top = {0, -1};
    for (int64_t i = threadIdx.x; i < rules.vocab; i += THREADS) top.enter(x_V[i], i);
    top = block_best(top);
    if (!(top.x > -INFINITY)) return -1;
    if (rules.temperature == 0) return top.id;
    for (int64_t i = threadIdx.x; i < rules.vocab; i += THREADS) x_V[i] = (x_V[i] - top.x) / rules.temperature;

    const Candidates c = filter(id_C, {x_V, nullptr, rules.vocab}, rules);
    Best winner = {0, -1};
    for (int64_t n = threadIdx.x; n < c.num; n += THREADS) {
        const uint64_t bits = mix(uint64_t(c.id(n)) * GOLDEN + rules.key);
        if (winner.id >= 0 && c.scaled(n) + noise_bound(bits) < winner.x) continue;
        winner.enter(c.scaled(n) + gumbel(bits), c.id(n));
    }
    return block_best(winner).id;
}

__global__ void __launch_bounds__(THREADS) draw(int64_t* id_L, const float* x_LV, const DrawRules* rules_L,
                                                char* workspace, int64_t V) {
    const int64_t l = blockIdx.x;
    double* const x_V = reinterpret_cast<double*>(workspace) + l * V;
    int32_t* const id_C = reinterpret_cast<int32_t*>(reinterpret_cast<double*>(workspace) + gridDim.x * V) + l * V;
    const int64_t id = draw_row(x_LV + l * V, rules_L[l], x_V, id_C, V);
    if (threadIdx.x == 0) id_L[l] = id;
}

}  // namespace
}  // namespace quire

using namespace quire;

int argmax_cuda(int64_t* id_L, const float* x_LV, int64_t L, int64_t V, Stream stream) {
    if (L < 0 || V < 1) return BAD_SIZE;
    if (L == 0) return OK;
    return launch(argmax, dim3(L), dim3(THREADS), sizeof(Shared), cudaStream_t(stream), id_L, x_LV, V);
}

int64_t draw_bytes_cuda(int64_t L, int64_t V) { return L * V * NUM_BYTES; }

int draw_cuda(int64_t* id_L, const float* x_LV, const DrawRules* rules_L, void* workspace, int64_t L, int64_t V,
              Stream stream) {
    if (L < 0 || V < 1 || V >= 1 << 22) return BAD_SIZE;
    if (L == 0) return OK;
    return launch(draw, dim3(L), dim3(THREADS), sizeof(Shared), cudaStream_t(stream), id_L, x_LV, rules_L,
                  (char*)workspace, V);
}
