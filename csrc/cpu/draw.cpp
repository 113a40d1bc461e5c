// draw_cpu and distribution_cpu: rows are shared out over the threads; a row draws from all its ids or from a short
// list of candidates.
//
// In the order (logit descending, id ascending) each filter keeps a prefix. It is found without sorting the vocabulary:
// a lower bound of what it keeps gathers candidates, most blocks being passed over by their greatest; a histogram over
// the candidates' logits tells in which narrow bin the prefix ends, and a partial quicksort where in that bin.
// Noise costs two logarithms. Most ids are spared them: the leading bits of a random number bound its noise.
#include "draw.h"

#include <algorithm>
#include <atomic>
#include <cmath>
#include <cstring>
#include <functional>
#include <numeric>

#include "../kernels.h"
#include "isa.h"
#include "pool.h"

namespace quire {
namespace {

constexpr int64_t MOST_IDS = int64_t(1) << (62 - SHARE_BITS);  // their shares' sum is less than 2^63
constexpr int NUM_BINS = 2048, BINS_PER_LOGIT = 64;

// A row of logits (float) or of what penalties and biases made of them (double). "Scaled" is what the softmax is of:
// (x - top) / temperature.
template <class Real>
struct Row {
    const Real* x;
    int64_t num;
    double* tops;           // of each block
    double top, temperature;

    double scaled(int64_t i) const { return (x[i] - top) / temperature; }
    int64_t num_blocks() const { return (num + BLOCK - 1) / BLOCK; }
    int64_t first_top() const {
        const int64_t block = std::max_element(tops, tops + num_blocks()) - tops;
        return std::find(x + block * BLOCK, x + num, Real(top)) - x;
    }
};

// By ascending id.
struct Candidates {
    double* scaled;
    int64_t* weight;
    int32_t* id;
    int32_t* order;         // room for numbers of candidates
    int64_t num;
};

constexpr int64_t BYTES_PER_ID = 3 * sizeof(double) + sizeof(int64_t) + 2 * sizeof(int32_t);    // of a row's memory

// Noise ---------------------------------------------------------------------------------------------------------------

uint64_t mix(uint64_t z) {
    z = (z ^ (z >> 30)) * MIX_A;
    z = (z ^ (z >> 27)) * MIX_B;
    return z ^ (z >> 31);
}

// ln x as kernels.log computes it: a library's may differ in the last bit.
double log_alike(double x) {
    constexpr int64_t root_half_bits = 0x3FE6A09E667F3BCD;
    int64_t bits;
    std::memcpy(&bits, &x, sizeof x);
    const int64_t n = (bits - root_half_bits) >> 52;
    bits -= n * (int64_t(1) << 52);
    std::memcpy(&x, &bits, sizeof x);
    const double f = x - 1, s = f / (f + 2), square = s * s;
    double series = 0;
    for (int k = 9; k >= 0; k--) series = series * square + 2. / (2 * k + 1);
    return n * LN2_HIGH + (n * LN2_LOW + s * series);
}

double gumbel(uint64_t bits) { return -log_alike(-log_alike(((bits >> 12) + 0.5) * 0x1p-52)); }

// The noise of a number u in (0, 1) whose bits begin with n ones is at most -ln(1 - u), and 1 - u at least 2^-(n + 1).
// More than ln(2), so that rounding does not matter.
double noise_bound(uint64_t bits) { return 0.6932 * (__builtin_clzll(~bits | 0xFFF) + 1); }

// Who of those that enter has the greatest logit plus noise; the lowest id on ties.
struct Race {
    uint64_t key;
    double best = -INFINITY;
    int64_t id = -1;

    uint64_t bits(int64_t id) const { return mix(id * GOLDEN + key); }
    bool may_win(int64_t id, double scaled) const { return scaled + noise_bound(bits(id)) > best; }
    void enter(int64_t entrant, double scaled) {
        const double score = scaled + gumbel(bits(entrant));
        if (score > best || (score == best && entrant < id)) best = score, id = entrant;
    }
};

template <class Real>
int64_t draw_from_all(const Row<Real>& row, uint64_t key) {
    Race race{key};
    race.enter(row.first_top(), 0);
    const double factor = 1 / row.temperature;
    for (int64_t i = 0; i < row.num; i += BLOCK) {
        i = PICK(next_chance(row.x, row.tops, i, row.num, row.top, factor, key, race.best));
        for (int64_t id = i; id < std::min(i + BLOCK, row.num); id++)
            if (race.may_win(id, row.scaled(id))) race.enter(id, row.scaled(id));
    }
    return race.id;
}

int64_t draw_from(const Candidates& c, uint64_t key) {
    Race race{key};
    for (int64_t i = 0; i < c.num; i++)
        if (race.may_win(c.id[i], c.scaled[i])) race.enter(c.id[i], c.scaled[i]);
    return race.id;
}

// Filters -------------------------------------------------------------------------------------------------------------

// All whose scaled logit is at least `least`.
template <class Real>
void gather(Candidates& c, const Row<Real>& row, double least) {
    // Not more than the least x among them, whatever rounding does; so that only they are divided.
    const double offset = least * row.temperature, least_x = row.top + offset - 1e-6 * (std::abs(row.top) - offset);
    int64_t num = 0;
    for (int64_t block = 0; block < row.num_blocks(); block++) {
        if (row.tops[block] < least_x) continue;
        for (int64_t i = block * BLOCK; i < std::min((block + 1) * BLOCK, row.num); i++) {
            c.id[num] = int32_t(i);
            num += row.x[i] >= least_x;
        }
    }
    c.num = 0;
    for (int64_t i = 0; i < num; i++) {
        c.scaled[c.num] = row.scaled(c.id[i]);
        c.id[c.num] = c.id[i];
        c.num += c.scaled[c.num] >= least;
    }
}

// A scaled logit that at least `num` candidates reach: as many blocks hold one.
template <class Real>
double reached_by(const Row<Real>& row, int64_t num, double* memory) {
    if (num > row.num_blocks()) return -INFINITY;
    double* const end = std::copy(row.tops, row.tops + row.num_blocks(), memory);
    std::nth_element(memory, memory + num - 1, end, std::greater<double>());
    return (memory[num - 1] - row.top) / row.temperature;
}

int bin_of(double scaled, double bins_per_unit) { return int(std::min(-scaled * bins_per_unit, NUM_BINS - 1.0)); }

// The last of the shortest prefix that weighs `needed`, among the candidates whose numbers are order[0 .. num].
int32_t last_of_prefix(const Candidates& c, int64_t num, int64_t needed) {
    const auto before = [&](int32_t a, int32_t b) {
        return c.scaled[a] > c.scaled[b] || (c.scaled[a] == c.scaled[b] && a < b);
    };
    int32_t *first = c.order, *end = first + num;
    while (end - first > 32) {
        int32_t* const middle = first + (end - first) / 2;
        std::nth_element(first, middle, end, before);
        int64_t weight = 0;
        for (const int32_t* i = first; i < middle; i++) weight += c.weight[*i];
        if (weight >= needed) {
            end = middle;
        } else {
            needed -= weight;
            first = middle;
        }
    }
    std::sort(first, end, before);
    while ((needed -= c.weight[*first]) > 0) first++;
    return *first;
}

// Keeps the shortest prefix that weighs `needed`, which is at most what all weigh.
void keep_prefix(Candidates& c, int64_t needed, double temperature) {
    // By logits, not by what temperature makes of them: their spread is much the same in all models.
    const double bins_per_unit = BINS_PER_LOGIT * std::min(temperature, 1e300);     // 0 * infinity would be NaN
    int64_t bins[NUM_BINS] = {};
    for (int64_t i = 0; i < c.num; i++) bins[bin_of(c.scaled[i], bins_per_unit)] += c.weight[i];
    int bin = 0;
    while (bins[bin] < needed) needed -= bins[bin++];
    int64_t num = 0;
    for (int64_t i = 0; i < c.num; i++) {
        c.order[num] = int32_t(i);
        num += bin_of(c.scaled[i], bins_per_unit) == bin;
    }
    const int32_t last = last_of_prefix(c, num, needed);
    const double least = c.scaled[last];
    num = 0;
    for (int64_t i = 0; i < c.num; i++) {
        const double scaled = c.scaled[num] = c.scaled[i];
        c.id[num] = c.id[i];
        num += (scaled > least) | ((scaled == least) & (i <= last));
    }
    c.num = num;
}

// The sum that the nucleus must reach.
int64_t share_needed(int64_t total, double top_p) {
    return std::max<int64_t>(1, std::min(total, int64_t(top_p * double(total))));
}

// Makes the weights shares, and says their sum.
int64_t weigh(Candidates& c) {
    PICK(shares(c.weight, c.scaled, c.num));
    return std::accumulate(c.weight, c.weight + c.num, int64_t(0));
}

bool has_top_k(const DrawRules& rules) { return rules.top_k > 0 && rules.top_k < rules.vocab; }
bool has_filters(const DrawRules& rules) { return has_top_k(rules) || rules.top_p < 1 || rules.min_p > 0; }

// What min-p and top-k, of which there is at least one, leave.
template <class Real>
void keep_few(Candidates& c, const Row<Real>& row, const DrawRules& rules) {
    const double least = rules.min_p > 0 ? std::log(rules.min_p) : -INFINITY;
    if (!has_top_k(rules)) return gather(c, row, least);
    gather(c, row, std::max(least, reached_by(row, rules.top_k, c.scaled)));
    if (rules.top_k >= c.num) return;
    std::fill(c.weight, c.weight + c.num, 1);
    keep_prefix(c, rules.top_k, row.temperature);
}

template <class Real>
void keep_nucleus(Candidates& c, const Row<Real>& row, double top_p) {
    const int64_t needed = share_needed(PICK(total_share(row.x, row.tops, row.num, row.top, row.temperature)), top_p);
    // Usually one of the first holds enough; the last holds all.
    for (const double least : {-6., -9., -12., -16., NO_SHARE}) {
        gather(c, row, least);
        if (weigh(c) >= needed) break;
    }
    keep_prefix(c, needed, row.temperature);
}

// What the filters, of which there is at least one, leave.
template <class Real>
Candidates filter(const Row<Real>& row, const DrawRules& rules, double* memory) {
    Candidates c;
    c.scaled = memory;
    c.weight = (int64_t*)(c.scaled + row.num);
    c.id = (int32_t*)(c.weight + row.num);
    c.order = c.id + row.num;
    if (has_top_k(rules) || rules.min_p > 0) {
        keep_few(c, row, rules);
        if (rules.top_p < 1) keep_prefix(c, share_needed(weigh(c), rules.top_p), row.temperature);
    } else {
        keep_nucleus(c, row, rules.top_p);
    }
    return c;
}

// Rows ----------------------------------------------------------------------------------------------------------------

bool leave_logits_alone(const DrawRules& rules) { return !rules.seen_V && !rules.count_V && !rules.num_biases; }

// The logits after penalties and biases. Says whether they are numbers less than infinity.
bool adjust(double* x, const float* logits, const DrawRules& rules) {
    const int64_t V = rules.vocab;
    bool good = true;
    std::copy(logits, logits + V, x);
    if (rules.seen_V)
        for (int64_t i = 0; i < V; i++) {
            if (!rules.seen_V[i]) continue;
            x[i] = x[i] > 0 ? x[i] / rules.repetition_penalty : x[i] * rules.repetition_penalty;
            good &= x[i] < INFINITY;
        }
    if (rules.count_V)
        for (int64_t i = 0; i < V; i++) {
            if (rules.count_V[i] == 0) continue;
            x[i] = x[i] - rules.frequency_penalty * rules.count_V[i] - rules.presence_penalty;
            good &= x[i] < INFINITY;
        }
    for (int64_t b = 0; b < rules.num_biases; b++) x[rules.bias_ids[b]] += rules.biases[b];
    for (int64_t b = 0; b < rules.num_biases; b++) good &= x[rules.bias_ids[b]] < INFINITY;
    return good;
}

// Calls use(row, the memory that it leaves), unless nothing finite is left to draw from.
template <class Real, class Use>
void use_row(const Real* x, const DrawRules& rules, double* memory, Use use) {
    Row<Real> row{x, rules.vocab, memory, 0, rules.temperature};
    PICK(block_tops(row.tops, row.x, row.num));
    row.top = *std::max_element(row.tops, row.tops + row.num_blocks());
    if (row.top > -INFINITY) use(row, memory + row.num_blocks());
}

template <class Use>
void use_adjusted(const float* logits, const DrawRules& rules, double* memory, Use use) {
    if (leave_logits_alone(rules)) return use_row(logits, rules, memory, use);
    if (adjust(memory, logits, rules)) use_row(memory, rules, memory + rules.vocab, use);
}

template <class Real>
int64_t draw_row(const Row<Real>& row, const DrawRules& rules, double* memory) {
    if (rules.temperature == 0) return row.first_top();
    return has_filters(rules) ? draw_from(filter(row, rules, memory), rules.key) : draw_from_all(row, rules.key);
}

// Probabilities into p_V, which holds zeros.
template <class Real>
void weigh_row(double* p_V, const Row<Real>& row, const DrawRules& rules, double* memory) {
    if (rules.temperature == 0) {
        p_V[row.first_top()] = 1;
    } else if (has_filters(rules)) {
        const Candidates c = filter(row, rules, memory);
        const double total = PICK(masses(c.scaled, c.scaled, c.num, 0, 1));
        for (int64_t i = 0; i < c.num; i++) p_V[c.id[i]] = c.scaled[i] / total;
    } else {
        const double total = PICK(masses(p_V, row.x, row.num, row.top, row.temperature));
        for (int64_t i = 0; i < row.num; i++) p_V[i] /= total;
    }
}

int check(const DrawRules* rules_L, int64_t L, int64_t V) {
    for (int64_t l = 0; l < L; l++) {
        const DrawRules& rules = rules_L[l];
        if (rules.vocab < 1 || rules.vocab > V || rules.vocab > MOST_IDS) return BAD_SIZE;
        for (int64_t b = 0; b < rules.num_biases; b++)
            if (rules.bias_ids[b] < 0 || rules.bias_ids[b] >= rules.vocab) return BAD_INDEX;
    }
    return OK;
}

}  // namespace
}  // namespace quire

using namespace quire;

int draw_cpu(int64_t* id_L, const float* x_LV, const DrawRules* rules_L, int64_t L, int64_t V) {
    if (const int status = check(rules_L, L, V)) return status;
    if (const int status = argmax_cpu(id_L, x_LV, L, V)) return status;
    std::atomic<bool> no_memory{false};
    parallel(L, [&](int64_t l) {
        const DrawRules& rules = rules_L[l];
        const bool is_plain_argmax = rules.temperature == 0 && leave_logits_alone(rules) && id_L[l] < rules.vocab;
        if (id_L[l] < 0 || is_plain_argmax) return;
        double* const memory = (double*)workspace(ATTENTION, rules.vocab * BYTES_PER_ID);
        id_L[l] = -1;
        if (!memory) no_memory = true;
        else use_adjusted(x_LV + l * V, rules, memory, [&](const auto& row, double* rest) {
            id_L[l] = draw_row(row, rules, rest);
        });
    });
    return no_memory ? NO_MEMORY : OK;
}

int distribution_cpu(double* p_LV, const float* x_LV, const DrawRules* rules_L, int64_t L, int64_t V) {
    if (const int status = check(rules_L, L, V)) return status;
    if (L < 0 || V < 1) return BAD_SIZE;
    std::atomic<bool> no_memory{false};
    parallel(L, [&](int64_t l) {
        const DrawRules& rules = rules_L[l];
        double* const p_V = p_LV + l * V;
        std::fill(p_V, p_V + V, 0);
        int64_t best = -1;      // -1, too, where a number is not finite
        const int status = argmax_cpu(&best, x_LV + l * V, 1, V);
        double* const memory = (double*)workspace(ATTENTION, rules.vocab * BYTES_PER_ID);
        if (status || !memory) no_memory = true;
        else if (best >= 0) use_adjusted(x_LV + l * V, rules, memory, [&](const auto& row, double* rest) {
            weigh_row(p_V, row, rules, rest);
        });
    });
    return no_memory ? NO_MEMORY : OK;
}
