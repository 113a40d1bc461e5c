// Every kernel of kernels.h called from C++ alone, on random and extreme arguments: what `make sanitize` runs under
// AddressSanitizer, UndefinedBehaviorSanitizer and ThreadSanitizer.
//
// Buffers end where the contract says that they end, begin where only their type asks for, and what a kernel must not
// look at is NaN or out of range, so that a step too far is seen. Results are compared with plain loops where those are
// short, with the same rows alone, and with other numbers of threads; how exact they are is for tests/ to say. All is
// drawn from fixed seeds. Start at main, at the end.
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <numeric>
#include <thread>
#include <vector>

#include "kernels.h"

#define CHECK(condition) ((condition) ? void() : fail(#condition, __LINE__))

namespace {

thread_local const char* subject = "";
thread_local int64_t seed = 0;
int64_t instructions = 0;
const char* only = nullptr;     // the subject that the command line names

[[noreturn]] void fail(const char* condition, int line) {
    std::fprintf(stderr, "sanitize.cpp:%d: %s, seed %ld, instructions %ld: does not hold: %s\n", line, subject,
                 long(seed), long(instructions), condition);
    std::abort();
}

// Numbers -------------------------------------------------------------------------------------------------------------

struct Random {     // SplitMix64
    uint64_t state;

    uint64_t bits() {
        uint64_t z = state += 0x9e3779b97f4a7c15;
        z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9;
        z = (z ^ z >> 27) * 0x94d049bb133111eb;
        return z ^ z >> 31;
    }
    int64_t from(int64_t low, int64_t high) { return low + int64_t(bits() % uint64_t(high - low + 1)); }    // both too
    bool once_in(int64_t n) { return from(1, n) == 1; }
    float number() { return float(from(-(1 << 20), 1 << 20)) * 0x1p-18f; }      // -4 to 4
    template <class T, size_t N>
    T one_of(const T (&choices)[N]) { return choices[from(0, N - 1)]; }
};

// `size` numbers and not a byte more. They begin past a multiple of 64, by default by the size of one of them.
template <class T>
class Buffer {
public:
    explicit Buffer(int64_t size = 0, int64_t skew = sizeof(T)) : size_(size) {
        void* memory;
        if (posix_memalign(&memory, 64, skew + size * sizeof(T))) std::abort();
        memory_.reset(static_cast<char*>(memory));
        start_ = reinterpret_cast<T*>(memory_.get() + skew);
    }
    int64_t size() const { return size_; }
    operator T*() const { return start_; }
    T* begin() const { return start_; }
    T* end() const { return start_ + size_; }

private:
    struct Free {
        void operator()(char* memory) const { std::free(memory); }
    };
    std::unique_ptr<char, Free> memory_;
    T* start_;
    int64_t size_;
};

using Floats = Buffer<float>;
using Ints = Buffer<int64_t>;

Floats filled(int64_t size, float x) {
    Floats all(size);
    for (float& number : all) number = x;
    return all;
}

Floats poison(int64_t size) { return filled(size, NAN); }

Floats numbers(Random& random, int64_t size) {
    Floats all(size);
    for (float& number : all) number = random.number();
    return all;
}

template <class T>
Buffer<T> copy(const Buffer<T>& from, int64_t skew = sizeof(T)) {
    Buffer<T> all(from.size(), skew);
    if (from.size()) std::memcpy(all, from, from.size() * sizeof(T));
    return all;
}

Ints ints(std::initializer_list<int64_t> list) {
    Ints all(list.size());
    std::copy(list.begin(), list.end(), all.begin());
    return all;
}

// Equal bits; all NaN are one.
bool same(const float* a, const float* b, int64_t size) {
    for (int64_t i = 0; i < size; i++)
        if (std::memcmp(a + i, b + i, sizeof *a) && !(std::isnan(a[i]) && std::isnan(b[i]))) return false;
    return true;
}

bool same(const Floats& a, const Floats& b) { return a.size() == b.size() && same(a, b, a.size()); }

bool untouched(const Floats& poisoned) { return same(poisoned, poison(poisoned.size())); }

bool all_finite(const float* x, int64_t size) {
    bool finite = true;
    for (int64_t i = 0; i < size; i++) finite &= std::isfinite(x[i]);
    return finite;
}

bool none_finite(const float* x, int64_t size) {
    bool finite = false;
    for (int64_t i = 0; i < size; i++) finite |= std::isfinite(x[i]);
    return !finite;
}

const float NOT_FINITE[] = {NAN, INFINITY, -INFINITY};

// Runs ----------------------------------------------------------------------------------------------------------------

// Calls body(level) with each instruction set of this CPU. The best one stays.
template <class Body>
void each_isa(Body body) {
    for (instructions = 0; set_isa_cpu(instructions) == OK; instructions++) body(instructions);
}

// Calls body(random) `count` times, each with its own seed.
template <class Body>
void cases(const char* name, int64_t count, Body body) {
    if (only && std::strcmp(only, name)) return;
    subject = name;
    for (seed = 0; seed < count; seed++) {
        Random random{uint64_t(seed) << 32};
        body(random);
    }
    std::printf("%s: %ld cases\n", name, long(count));
    std::fflush(stdout);
}

void any_threads(Random& random) { CHECK(set_threads_cpu(random.from(1, 4)) == OK); }

// Matrices ------------------------------------------------------------------------------------------------------------

struct Stored {
    int32_t format;
    int64_t block, bytes;           // weights a block, and what they take in a file
    std::vector<int64_t> halves;    // where in a block float16 numbers lie
};

const Stored STORED[] = {
    {F32, 1, 4, {}}, {BF16, 1, 2, {}}, {Q4_0, 32, 18, {0}}, {Q4_1, 32, 20, {0, 2}}, {Q5_0, 32, 22, {0}},
    {Q5_1, 32, 24, {0, 2}}, {Q8_0, 32, 34, {0}}, {Q2_K, 256, 84, {80, 82}}, {Q3_K, 256, 110, {108}},
    {Q4_K, 256, 144, {0, 2}}, {Q5_K, 256, 176, {0, 2}}, {Q6_K, 256, 210, {208}},
};

struct Weights {
    const Stored* stored;
    int64_t O, I;
    Buffer<uint8_t> raw, packed;

    Part part() const { return {stored->format, O, packed}; }
};

// Makes the scales that random bytes hold small numbers, the same power of two for all.
void tame(Random& random, const Weights& weights) {
    const Stored& stored = *weights.stored;
    for (uint8_t* block = weights.raw; block < weights.raw.end(); block += stored.bytes) {
        for (const int64_t offset : stored.halves) {
            const uint16_t half = uint16_t(random.from(0, 1) << 15 | 7 << 10 | random.from(0, 1023));
            std::memcpy(block + offset, &half, 2);
        }
        if (stored.block == 1) {
            const float number = random.number();
            std::memcpy(block, reinterpret_cast<const char*>(&number) + 4 - stored.bytes, stored.bytes);
        }
    }
}

Weights weights_of(Random& random, const Stored& stored, int64_t O, int64_t I, bool wild = false) {
    const int64_t bytes = pack_bytes_cpu(stored.format, O, I);
    CHECK(bytes > 0);
    Weights weights{&stored, O, I, Buffer<uint8_t>(O * I / stored.block * stored.bytes), Buffer<uint8_t>(bytes, 0)};
    for (uint8_t& byte : weights.raw) byte = uint8_t(random.bits());
    if (!wild) tame(random, weights);
    CHECK(pack_cpu(weights.packed, weights.raw, stored.format, O, I) == OK);
    return weights;
}

Floats unpacked(const Weights& weights) {
    Ints rows(weights.O);
    for (int64_t o = 0; o < weights.O; o++) rows[o] = o;
    Floats table = poison(weights.O * weights.I);
    const Part part = weights.part();
    CHECK(embed_cpu(table, &part, rows, weights.O, weights.I) == OK);
    return table;
}

// A call of matmul_cpu.
struct Product {
    std::vector<Weights> weights;
    std::vector<Part> parts;
    int64_t T, I, O = 0;
    bool accumulate, biased, quantized = true;
    Floats x_TI, bias_O, before_TO;

    // Some of the rows of x, after what y held before; the last `num_rounded` of them in bfloat16.
    Floats rows(int64_t first, int64_t end, int64_t num_rounded = 0) const {
        Floats y = poison((end - first) * O), x((end - first) * I);
        std::copy(x_TI + first * I, x_TI + end * I, x.begin());
        if (accumulate) std::copy(before_TO + first * O, before_TO + end * O, y.begin());
        const float* const bias = biased ? bias_O.begin() : nullptr;
        CHECK(matmul_cpu(y, x, parts.data(), bias, end - first, end - first - num_rounded, I,
                         parts.size(), accumulate) == OK);
        return y;
    }
};

Product product_of(Random& random, bool wild) {
    Product product;
    const int64_t num_parts = random.from(1, 3);
    int64_t block = 1;
    std::vector<const Stored*> stored;
    for (int64_t i = 0; i < num_parts; i++) {
        stored.push_back(&STORED[random.from(0, std::size(STORED) - 1)]);
        block = std::max(block, stored[i]->block);
    }
    product.I = block * random.from(1, block == 256 ? 3 : block == 32 ? 20 : 600);
    for (const Stored* one : stored) {
        product.weights.push_back(weights_of(random, *one, random.from(1, 50), product.I, wild));
        product.parts.push_back(product.weights.back().part());
        product.O += product.weights.back().O;
        product.quantized &= one->block > 1;
    }
    product.T = random.once_in(10) ? random.from(71, 300) : random.from(1, 70);
    product.accumulate = random.once_in(2), product.biased = random.once_in(2);
    product.x_TI = numbers(random, product.T * product.I);
    product.bias_O = numbers(random, product.O);
    product.before_TO = numbers(random, product.T * product.O);
    return product;
}

// One row by a plain loop: x rounded to 8 bits errs by half a step in each group, float32 sums by their length, the
// product of two numbers in bfloat16 by 2^-8.
void expect_row(const Product& product, const float* y_O, int64_t t, bool rounded = false) {
    const float* x = product.x_TI + t * product.I;
    int64_t column = 0;
    for (const Weights& weights : product.weights) {
        const Floats table = unpacked(weights);
        for (int64_t o = 0; o < weights.O; o++, column++) {
            double sum = product.biased ? product.bias_O[column] : 0, step = 0, most = 0, terms = 0;
            if (product.accumulate) sum += product.before_TO[t * product.O + column];
            for (int64_t i = 0; i < product.I; i++) {
                const double w = table[o * product.I + i];
                sum += w * x[i];
                terms += std::abs(w * x[i]);
                step += std::abs(w) * 4 / 127 / 2;
                most = std::max(most, std::abs(w));
            }
            const double of_x = rounded ? terms / 256 : weights.stored->block > 1 ? step : 0;
            const double tolerance = of_x + 1e-5 * most * product.I + 1e-5;
            CHECK(std::abs(y_O[column] - sum) <= tolerance);
        }
    }
}

// A number that is not finite in a row spoils it and no other.
void spoil_row(Random& random, const Product& product, const Floats& expected) {
    const int64_t bad = random.from(0, product.T - 1), O = product.O;
    float& number = product.x_TI[bad * product.I + random.from(0, product.I - 1)];
    const float before = number;
    number = random.one_of(NOT_FINITE);
    const Floats y = product.rows(0, product.T);
    number = before;
    CHECK(none_finite(y + bad * O, O));
    CHECK(same(y, expected, bad * O));
    CHECK(same(y + (bad + 1) * O, expected + (bad + 1) * O, (product.T - bad - 1) * O));
}

void matmul_case(Random& random, bool wild) {
    const Product product = product_of(random, wild);
    Floats plain;
    each_isa([&](int64_t level) {
        any_threads(random);
        Floats y = product.rows(0, product.T);
        any_threads(random);
        for (int i = 0; i < 4; i++) {
            const int64_t first = random.from(0, product.T - 1);
            const int64_t end = std::min(product.T, first + (i ? random.from(1, 12) : 1));
            const Floats some = product.rows(first, end);
            CHECK(same(some, y + first * product.O, some.size()));
        }
        if (!wild) {
            CHECK(all_finite(y, y.size()));
            expect_row(product, y + (product.T - 1) * product.O, product.T - 1);
            spoil_row(random, product, y);
            const int64_t num_rounded = random.from(1, product.T), num_exact = product.T - num_rounded;
            const Floats mixed = product.rows(0, product.T, num_rounded);
            CHECK(same(mixed, y, num_exact * product.O));
            for (const int64_t row : {num_exact, product.T - 1})
                expect_row(product, mixed + row * product.O, row, true);
        }
        for (float& number : y)     // what becomes of weights that are not finite depends on the instructions
            if (!std::isfinite(number)) number = NAN;
        if (level == 0) plain = std::move(y);
        else if (product.quantized) CHECK(same(plain, y));
    });
}

void embed_case(Random& random) {
    const Stored& stored = random.one_of(STORED);
    any_threads(random);
    const Weights weights = weights_of(random, stored, random.from(1, 60), stored.block * random.from(1, 3));
    const Floats table = unpacked(weights);
    const Part part = weights.part();
    const int64_t T = random.from(1, 70), D = weights.I;
    Ints token_T(T);
    for (int64_t& token : token_T) token = random.from(0, weights.O - 1);
    Floats x_TD = poison(T * D);
    CHECK(embed_cpu(x_TD, &part, token_T, T, D) == OK);
    for (int64_t t = 0; t < T; t++) CHECK(same(x_TD + t * D, table + token_T[t] * D, D));
    if (stored.format == F32) CHECK(!std::memcmp(table, weights.raw, weights.raw.size()));

    x_TD = poison(T * D);
    for (const int64_t bad : {int64_t(-1), weights.O, INT64_MIN, INT64_MAX}) {
        token_T[T - 1] = bad;
        CHECK(embed_cpu(x_TD, &part, token_T, T, D) == BAD_INDEX && untouched(x_TD));
    }
}

// Rows of numbers -----------------------------------------------------------------------------------------------------

// What a row of `width` numbers becomes by `kernel(out, x, rows)`: the same alone, and only where it is bad not finite.
template <class Kernel>
Floats each_row_alone(Random& random, const Floats& x, int64_t T, int64_t width, int64_t out_width, Kernel kernel) {
    any_threads(random);
    Floats out = poison(T * out_width), alone = poison(out_width);
    kernel(out, x, T);
    CHECK(all_finite(out, out.size()));
    const int64_t row = random.from(0, T - 1), bad = random.from(0, T - 1);
    Floats one(width);
    std::copy(x + row * width, x + (row + 1) * width, one.begin());
    kernel(alone, one, 1);
    CHECK(same(alone, out + row * out_width, out_width));

    const Floats spoilt = copy(x), damaged = poison(T * out_width);
    spoilt[bad * width + random.from(0, width - 1)] = random.one_of(NOT_FINITE);
    kernel(damaged, spoilt, T);
    CHECK(!all_finite(damaged + bad * out_width, out_width));
    CHECK(same(damaged, out, bad * out_width));
    CHECK(same(damaged + (bad + 1) * out_width, out + (bad + 1) * out_width, (T - bad - 1) * out_width));
    return out;
}

bool near(double got, double expected) { return std::abs(got - expected) <= 1e-5 * std::abs(expected) + 1e-6; }

int64_t any_width(Random& random) { return random.once_in(8) ? random.from(4000, 13000) : random.from(1, 700); }

void rms_norm_case(Random& random) {
    const int64_t D = any_width(random), T = random.from(1, D > 1000 ? 9 : 70);
    const Floats x_TD = numbers(random, T * D), weight_D = numbers(random, D);
    each_isa([&](int64_t) {
        const Floats out_TD = each_row_alone(random, x_TD, T, D, D, [&](float* out, const float* x, int64_t rows) {
            CHECK(rms_norm_cpu(out, x, weight_D, rows, D, 1e-5f) == OK);
        });
        double squares = 0;
        for (int64_t d = 0; d < D; d++) squares += double(x_TD[d]) * x_TD[d];
        for (int64_t d = 0; d < D; d++)
            CHECK(near(out_TD[d], x_TD[d] / std::sqrt(squares / D + 1e-5) * weight_D[d]));
    });
}

void silu_mul_case(Random& random) {
    const int64_t F = any_width(random), T = random.from(1, F > 1000 ? 9 : 70);
    const Floats x_T2F = numbers(random, T * 2 * F);
    each_isa([&](int64_t) {
        const Floats act_TF = each_row_alone(random, x_T2F, T, 2 * F, F, [&](float* act, const float* x, int64_t rows) {
            CHECK(silu_mul_cpu(act, x, rows, F) == OK);
        });
        for (int64_t f = 0; f < F; f++)
            CHECK(near(act_TF[f], x_T2F[f] / (1 + std::exp(-double(x_T2F[f]))) * x_T2F[F + f]));
    });
}

void argmax_case(Random& random) {
    const int64_t V = any_width(random), L = random.from(1, V > 1000 ? 9 : 70), bad = random.from(0, L - 1);
    const Floats x_LV = numbers(random, L * V);
    for (float& x : x_LV) x = std::round(x * 8);    // many are equal
    each_isa([&](int64_t) {
        any_threads(random);
        Ints id_L(L);
        CHECK(argmax_cpu(id_L, x_LV, L, V) == OK);
        for (int64_t l = 0; l < L; l++) {
            const float* const x = x_LV + l * V;
            CHECK(id_L[l] == std::max_element(x, x + V) - x);
        }
        float& number = x_LV[bad * V + random.from(0, V - 1)];
        const float before = number;
        number = random.one_of(NOT_FINITE);
        CHECK(argmax_cpu(id_L, x_LV, L, V) == OK && id_L[bad] == -1);
        number = before;
    });
}

// Rules of any kind, and what they point to.
struct Rules {
    DrawRules rules;
    Buffer<bool> seen_V;
    Buffer<double> count_V, biases;
    Ints bias_ids;
};

Rules rules_of(Random& random, int64_t V) {
    const double shares[] = {0, 1e-3, 0.5, 0.95, 1}, temperatures[] = {0, 1e-300, 0.1, 0.7, 1, 30, 1e300};
    const int64_t vocab = random.from(std::max<int64_t>(1, V - 9), V);
    const int64_t num_biases = random.once_in(2) ? 0 : random.from(1, 9);
    Rules all = {{}, Buffer<bool>(vocab), Buffer<double>(vocab), Buffer<double>(num_biases), Ints(num_biases)};
    for (int64_t i = 0; i < vocab; i++) {
        all.seen_V[i] = random.once_in(3);
        all.count_V[i] = double(random.from(0, 3));
    }
    for (int64_t b = 0; b < num_biases; b++) {
        all.biases[b] = random.once_in(4) ? -INFINITY : random.number();
        all.bias_ids[b] = random.from(0, vocab - 1);
    }
    all.rules = {vocab, random.one_of(temperatures), random.once_in(2) ? 0 : random.from(1, V + 2),
                 random.once_in(2) ? 1 : random.one_of(shares), random.once_in(2) ? 0 : random.one_of(shares),
                 1.1, random.number(), random.number(), random.once_in(2) ? all.seen_V.begin() : nullptr,
                 random.once_in(2) ? all.count_V.begin() : nullptr, all.bias_ids, all.biases, num_biases,
                 random.bits()};
    return all;
}

// A row's probabilities: they sum to 1, the id that was drawn has one, and the row has the same alone.
void expect_distribution(const double* p_V, const float* x_V, const DrawRules& rules, int64_t V, int64_t id) {
    const double sum = std::accumulate(p_V, p_V + V, 0.);
    CHECK(id < 0 ? std::count(p_V, p_V + V, 0.) == V : p_V[id] > 0 && std::abs(sum - 1) < 1e-12);
    CHECK(*std::min_element(p_V, p_V + V) >= 0 && std::count(p_V + rules.vocab, p_V + V, 0.) == V - rules.vocab);
    Buffer<double> alone_V(V);
    CHECK(distribution_cpu(alone_V, x_V, &rules, 1, V) == OK && std::equal(p_V, p_V + V, alone_V.begin()));
}

// Whatever the rules: an id that they allow, the same alone, with any threads and all instructions.
void draw_case(Random& random) {
    const int64_t V = any_width(random), L = random.from(1, V > 1000 ? 6 : 30), bad = random.from(0, L - 1);
    const Floats x_LV = numbers(random, L * V);
    if (random.once_in(3))
        for (float& x : x_LV) x = std::round(x);    // many are equal
    std::vector<Rules> kept;
    std::vector<DrawRules> rules_L;
    for (int64_t l = 0; l < L; l++) {
        kept.push_back(rules_of(random, V));
        rules_L.push_back(kept.back().rules);
    }
    Ints plain_L;
    Buffer<double> plain_LV;
    each_isa([&](int64_t level) {
        any_threads(random);
        Ints id_L(L);
        CHECK(draw_cpu(id_L, x_LV, rules_L.data(), L, V) == OK);
        for (int64_t l = 0; l < L; l++) {
            CHECK(id_L[l] >= (rules_L[l].num_biases ? -1 : 0) && id_L[l] < rules_L[l].vocab);
            for (int64_t b = 0; b < rules_L[l].num_biases; b++)
                CHECK(rules_L[l].biases[b] > -INFINITY || id_L[l] != rules_L[l].bias_ids[b]);
            int64_t id;
            CHECK(draw_cpu(&id, x_LV + l * V, &rules_L[l], 1, V) == OK && id == id_L[l]);
        }
        Buffer<double> p_LV(L * V);
        CHECK(distribution_cpu(p_LV, x_LV, rules_L.data(), L, V) == OK);
        for (int64_t l = 0; l < L; l++) expect_distribution(p_LV + l * V, x_LV + l * V, rules_L[l], V, id_L[l]);
        if (level == 0) plain_L = copy(id_L), plain_LV = copy(p_LV);
        CHECK(std::equal(id_L.begin(), id_L.end(), plain_L.begin()));
        CHECK(std::equal(p_LV.begin(), p_LV.end(), plain_LV.begin()));
        float& number = x_LV[bad * V + random.from(0, V - 1)];
        const float before = number;
        number = random.one_of(NOT_FINITE);
        CHECK(draw_cpu(id_L, x_LV, rules_L.data(), L, V) == OK && id_L[bad] == -1);
        CHECK(distribution_cpu(p_LV, x_LV, rules_L.data(), L, V) == OK);
        CHECK(std::count(p_LV + bad * V, p_LV + (bad + 1) * V, 0.) == V);
        number = before;
    });
    const int64_t bias_ids[] = {-1, kept[bad].rules.vocab, INT64_MIN, INT64_MAX};
    const double bias = 0;
    for (const int64_t& bias_id : bias_ids) {
        rules_L[bad].bias_ids = &bias_id, rules_L[bad].biases = &bias, rules_L[bad].num_biases = 1;
        CHECK(draw_cpu(plain_L, x_LV, rules_L.data(), L, V) == BAD_INDEX);
        CHECK(distribution_cpu(plain_LV, x_LV, rules_L.data(), L, V) == BAD_INDEX);
    }
}

// Attention -----------------------------------------------------------------------------------------------------------

const int64_t PAGE_SIZES[] = {8, 16, 32, 64, 128, 256}, HEAD_WIDTHS[] = {2, 6, 16, 20, 32, 48, 64, 128};
const int32_t CACHE_FORMATS[] = {F32, BF16, I8};

int64_t any_head_width(Random& random) {
    return random.once_in(10) ? 2 * random.from(65, 256) : random.one_of(HEAD_WIDTHS);
}

void rope_case(Random& random) {
    const int64_t T = random.from(1, 70), H = random.from(1, 5), A = random.from(1, 70), half = random.from(0, A / 2);
    any_threads(random);
    Ints position_T(T);
    for (int64_t& position : position_T) position = random.from(0, int64_t(1) << random.from(1, 40));
    Buffer<double> inv_freq(half);
    for (double& freq : inv_freq) freq = std::abs(random.number());
    const Floats cos = poison(T * half), sin = poison(T * half), x_THA = numbers(random, T * H * A);
    CHECK(rope_angles_cpu(cos, sin, position_T, inv_freq, T, half, 1.5) == OK);
    const Floats out_THA = poison(T * H * A);
    CHECK(rope_cpu(out_THA, x_THA, cos, sin, T, H, A, half) == OK);
    for (int64_t row = 0; row < T * H; row++)
        for (int64_t a = 0; a < A; a++) {
            const float *x = x_THA + row * A, out = out_THA[row * A + a];
            const int64_t t = row / H, i = a % std::max<int64_t>(half, 1);
            if (a >= 2 * half) {
                CHECK(out == x[a]);
            } else {
                const double angle = position_T[t] * inv_freq[i], c = std::cos(angle) * 1.5, s = std::sin(angle) * 1.5;
                CHECK(std::abs(out - (a < half ? x[i] * c - x[half + i] * s : x[half + i] * c + x[i] * s)) < 1e-4);
            }
        }
}

// Requests whose tokens lie in a paged cache; all that nobody sees is poison.
struct Requests {
    int64_t S, T = 0, H, G, A, B, num_pages, stride, window;
    int32_t format;
    Ints row_S, starts_S1, lengths_S, first_S;      // first_S: where a request's tokens begin in k and v
    Ints ancestors_T;       // none: no trees
    Buffer<int32_t> table;
    Floats q_THA, k, v;
    Buffer<char> k_cache, v_cache;

    int64_t num_new(int64_t s) const { return starts_S1[s + 1] - starts_S1[s]; }
    int64_t cache_bytes() const { return num_pages * G * kv_head_bytes_cpu(A, B, format); }
    // Where the i-th new token of a request lies, and the first place that any of them sees.
    int64_t own(int64_t s, int64_t i) const { return lengths_S[s] - num_new(s) + i; }
    int64_t first_seen(int64_t s) const { return window ? std::max<int64_t>(0, own(s, 0) + 1 - window) : 0; }
    bool is_ancestor(int64_t s, int64_t j, int64_t i) const {
        return j <= i && (!ancestors_T.size() || j >= 64 || ancestors_T[starts_S1[s] + i] >> j & 1);
    }
    bool is_chain(int64_t s) const {
        for (int64_t t = starts_S1[s]; t < starts_S1[s + 1]; t++)
            if (ancestors_T.size() && ancestors_T[t] != -1) return false;
        return true;
    }
    // The places of the text that ends with a request's i-th new token, and of that what the token sees.
    std::vector<int64_t> text(int64_t s, int64_t i) const {
        std::vector<int64_t> places(own(s, 0));
        std::iota(places.begin(), places.end(), 0);
        for (int64_t j = 0; j <= i; j++)
            if (is_ancestor(s, j, i)) places.push_back(own(s, j));
        return places;
    }
    std::vector<int64_t> seen(int64_t s, int64_t i) const {
        const std::vector<int64_t> places = text(s, i);
        return {window && window < int64_t(places.size()) ? places.end() - window : places.begin(), places.end()};
    }
    int64_t slot(int64_t s, int64_t place) const { return table[row_S[s] * stride + place / B] * B + place % B; }

    int store(int64_t s, int64_t first, int64_t end) const { return store_at(s, first, end, first); }
    // Tokens first to end at places from `at` on.
    int store_at(int64_t s, int64_t first, int64_t end, int64_t at) const {
        Ints slot_T(end - first);
        for (int64_t place = first; place < end; place++) slot_T[place - first] = slot(s, place - first + at);
        const int64_t from = (first_S[s] + first) * G * A, num = (end - first) * G * A;
        Floats keys(num), values(num);
        std::copy(k + from, k + from + num, keys.begin());
        std::copy(v + from, v + from + num, values.begin());
        return store_kv_cpu(k_cache, v_cache, keys, values, slot_T, end - first, G, A, B, num_pages, format);
    }

    Floats attend() const {
        Floats out = poison(T * H * A);
        CHECK(attend(out, q_THA, row_S, starts_S1, lengths_S, ancestors_T) == OK);
        return out;
    }
    int attend(float* out, const float* q, const Ints& rows, const Ints& starts, const Ints& lengths,
               const Ints& ancestors) const {
        return attention_cpu(out, q, k_cache, v_cache, table, rows, starts, lengths,
                             ancestors.size() ? ancestors.begin() : nullptr, starts[starts.size() - 1], rows.size(), H,
                             G, A, B, num_pages, stride, std::pow(A, -0.5f), window, format);
    }
};

Buffer<char> poisoned_cache(Random& random, int64_t bytes) {
    Buffer<char> cache(bytes, sizeof(float));
    const bool wild = random.once_in(2);
    for (char& byte : cache) byte = char(wild ? random.bits() : 0xff);
    return cache;
}

// Heads of A numbers that a cache of this format holds exactly.
Floats cell_numbers(Random& random, int64_t num_heads, int64_t A, int32_t format) {
    Floats all = numbers(random, num_heads * A);
    for (int64_t i = 0; i < all.size(); i++) {
        uint32_t bits;
        std::memcpy(&bits, &all[i], 4);
        bits &= 0xffff0000;
        if (format == BF16) std::memcpy(&all[i], &bits, 4);
        if (format == I8) all[i] = i % A ? std::round(all[i] * 31) / 32 : 127 / 32.f;   // a scale of 1 / 32
    }
    return all;
}

// Deals out pages, in an order of chance, to what each request's new tokens see.
void deal_pages(Random& random, Requests& requests) {
    Ints order(requests.num_pages), rows(requests.S);
    for (Ints* list : {&order, &rows})
        for (int64_t i = 0; i < list->size(); i++) {
            const int64_t other = random.from(0, i);
            (*list)[i] = (*list)[other];
            (*list)[other] = i;
        }
    requests.row_S = std::move(rows);
    requests.table = Buffer<int32_t>(requests.S * requests.stride);
    for (int32_t& page : requests.table) page = random.once_in(2) ? -1 : INT32_MAX;
    int64_t next = 0;
    for (int64_t s = 0; s < requests.S; s++)
        for (int64_t page = requests.first_seen(s) / requests.B; page * requests.B < requests.lengths_S[s]; page++)
            requests.table[requests.row_S[s] * requests.stride + page] = int32_t(order[next++]);
}

// Lets the new tokens of some requests form trees.
void grow_trees(Random& random, Requests& requests) {
    requests.ancestors_T = Ints(requests.T);
    for (int64_t s = 0; s < requests.S; s++) {
        int64_t* const ancestors = requests.ancestors_T + requests.starts_S1[s];
        const bool is_tree = requests.num_new(s) <= 64 && !random.once_in(3);
        const int64_t near = random.from(1, 8);
        for (int64_t i = 0; i < requests.num_new(s); i++) {
            const int64_t parent = random.from(std::max<int64_t>(0, i - near), std::max<int64_t>(0, i - 1));
            ancestors[i] = is_tree ? (i ? ancestors[parent] : 0) | int64_t(uint64_t(1) << i) : -1;
        }
    }
}

Requests requests_of(Random& random) {
    Requests requests;
    requests.S = random.from(1, 5);
    requests.G = random.from(1, 2), requests.H = requests.G * random.from(1, 4);
    requests.A = any_head_width(random), requests.B = random.one_of(PAGE_SIZES);
    requests.window = random.once_in(2) ? 0 : random.from(1, 300);
    requests.format = random.one_of(CACHE_FORMATS);
    requests.starts_S1 = Ints(requests.S + 1);
    requests.lengths_S = Ints(requests.S), requests.first_S = Ints(requests.S);
    int64_t num_tokens = 0, num_pages = 0;
    requests.starts_S1[0] = 0, requests.stride = 0;
    for (int64_t s = 0; s < requests.S; s++) {
        const int64_t length = random.once_in(6) ? random.from(257, 700) : random.from(1, 200);
        const int64_t most_new = random.once_in(6) ? 70 : random.once_in(2) ? 12 : 1;
        const int64_t num_new = random.from(0, std::min(length, most_new));
        const int64_t pages = (length + requests.B - 1) / requests.B;
        requests.lengths_S[s] = length, requests.starts_S1[s + 1] = requests.T += num_new;
        requests.first_S[s] = num_tokens;
        num_tokens += length, num_pages += pages;
        requests.stride = std::max(requests.stride, pages);
    }
    if (random.once_in(2)) grow_trees(random, requests);
    requests.num_pages = num_pages + random.from(0, 2);
    deal_pages(random, requests);
    requests.q_THA = numbers(random, requests.T * requests.H * requests.A);
    requests.k = cell_numbers(random, num_tokens * requests.G, requests.A, requests.format);
    requests.v = cell_numbers(random, num_tokens * requests.G, requests.A, requests.format);
    requests.k_cache = poisoned_cache(random, requests.cache_bytes());
    requests.v_cache = poisoned_cache(random, requests.cache_bytes());
    for (int64_t s = 0; s < requests.S; s++)
        CHECK(requests.store(s, requests.first_seen(s), requests.lengths_S[s]) == OK);
    return requests;
}

// One new token's first head by a plain loop.
void expect_token(const Requests& requests, const float* out_A, int64_t s, int64_t i) {
    const int64_t A = requests.A, width = requests.G * A;
    const float* q = requests.q_THA + (requests.starts_S1[s] + i) * requests.H * A;
    std::vector<double> sums(A);
    double total = 0;
    for (const int64_t place : requests.seen(s, i)) {
        const int64_t at = (requests.first_S[s] + place) * width;
        double score = 0;
        for (int64_t a = 0; a < A; a++) score += double(q[a]) * requests.k[at + a];
        const double p = std::exp(score / std::sqrt(A));
        for (int64_t a = 0; a < A; a++) sums[a] += p * requests.v[at + a];
        total += p;
    }
    for (int64_t a = 0; a < A; a++) CHECK(std::abs(out_A[a] - sums[a] / total) < 1e-3);
}

// New tokens of a request alone, which has `length` tokens then: the bits that they have among the others.
void attend_some(const Requests& requests, const Floats& expected, int64_t s, int64_t first, int64_t end,
                 int64_t length, bool is_chain) {
    const int64_t width = requests.H * requests.A, row = requests.starts_S1[s] + first;
    Floats out = poison((end - first) * width), q(out.size());
    std::copy(requests.q_THA + row * width, requests.q_THA + (row + end - first) * width, q.begin());
    Ints ancestors(is_chain ? 0 : end - first);
    for (int64_t i = 0; i < ancestors.size(); i++) ancestors[i] = requests.ancestors_T[row + i];
    CHECK(requests.attend(out, q, ints({requests.row_S[s]}), ints({0, end - first}), ints({length}), ancestors) == OK);
    CHECK(same(out, expected + row * width, out.size()));
}

// A request in two pieces; of a tree the first, and a token after its ancestors at the places that they have in a text.
void attend_alone(Random& random, const Requests& requests, const Floats& expected, int64_t s) {
    const int64_t num_new = requests.num_new(s), cut = random.from(0, num_new), past = requests.own(s, 0);
    const bool is_chain = requests.is_chain(s);
    attend_some(requests, expected, s, 0, cut, requests.own(s, cut), is_chain);
    if (is_chain) return attend_some(requests, expected, s, cut, num_new, requests.lengths_S[s], true);
    const int64_t i = random.from(0, num_new - 1);
    const std::vector<int64_t> text = requests.text(s, i);
    for (int64_t place = past; place < int64_t(text.size()); place++)
        CHECK(requests.store_at(s, text[place], text[place] + 1, place) == OK);
    attend_some(requests, expected, s, i, i + 1, text.size(), true);
    CHECK(requests.store(s, past, requests.lengths_S[s]) == OK);
}

// A number that is not finite: the tokens that see it are NaN in full, the others as before.
void spoil_token(Random& random, const Requests& requests, const Floats& expected) {
    const int64_t s = random.from(0, requests.S - 1), width = requests.H * requests.A;
    if (!requests.num_new(s)) return;
    const int64_t place = random.from(requests.first_seen(s), requests.lengths_S[s] - 1);
    const int64_t asking = random.from(0, requests.num_new(s) - 1);
    const Floats* const parts[] = {&requests.q_THA, &requests.k, &requests.v};
    const Floats& part = *random.one_of(parts);
    const bool is_query = &part == &requests.q_THA;
    const int64_t at = is_query ? (requests.starts_S1[s] + asking) * width + random.from(0, width - 1)
        : (requests.first_S[s] + place) * requests.G * requests.A + random.from(0, requests.G * requests.A - 1);
    const float before = part[at];
    part[at] = random.one_of(NOT_FINITE);
    CHECK(requests.store(s, place, place + 1) == OK);
    const Floats out = requests.attend();
    part[at] = before;
    CHECK(requests.store(s, place, place + 1) == OK);
    for (int64_t r = 0; r < requests.S; r++)
        for (int64_t i = 0; i < requests.num_new(r); i++) {
            const std::vector<int64_t> seen = requests.seen(r, i);
            const bool sees = is_query ? i == asking : std::count(seen.begin(), seen.end(), place) > 0;
            const int64_t row = (requests.starts_S1[r] + i) * width;
            if (r == s && sees) CHECK(none_finite(out + row, width));
            else CHECK(same(out + row, expected + row, width));
        }
}

void refuse_requests(const Requests& requests) {
    const int64_t s = requests.S - 1;
    if (!requests.num_new(s)) return;
    Floats out = poison(requests.T * requests.H * requests.A);
    const auto refuses = [&](const Ints& rows, const Ints& starts, const Ints& lengths) {
        CHECK(requests.attend(out, requests.q_THA, rows, starts, lengths, requests.ancestors_T) == BAD_INDEX);
        CHECK(untouched(out));
    };
    Ints rows = copy(requests.row_S), starts = copy(requests.starts_S1), lengths = copy(requests.lengths_S);
    for (const int64_t bad : {int64_t(-1), INT64_MIN}) {
        rows[s] = bad;
        refuses(rows, starts, lengths);
    }
    const int64_t room = requests.stride * requests.B;
    for (const int64_t bad : {int64_t(-1), requests.num_new(s) - 1, room + 1, INT64_MIN, INT64_MAX}) {
        lengths[s] = bad;
        refuses(requests.row_S, starts, lengths);
    }
    for (const int64_t bad : {int64_t(-1), requests.T + 1, INT64_MIN, INT64_MAX}) {
        starts[s] = bad;
        refuses(requests.row_S, starts, requests.lengths_S);
    }
    for (int64_t i = 0; requests.ancestors_T.size() && i < requests.num_new(s); i++) {
        int64_t& ancestors = requests.ancestors_T[requests.starts_S1[s] + i];
        const int64_t before = ancestors;
        ancestors &= ~int64_t(uint64_t(1) << i % 64);   // does not see itself, or is no chain though there are many
        refuses(requests.row_S, requests.starts_S1, requests.lengths_S);
        ancestors = before;
    }
    int32_t& page = requests.table[requests.row_S[s] * requests.stride + (requests.lengths_S[s] - 1) / requests.B];
    const int32_t before = page;
    for (const int32_t bad : {-1, int32_t(requests.num_pages), INT32_MIN, INT32_MAX}) {
        page = bad;
        refuses(requests.row_S, requests.starts_S1, requests.lengths_S);
    }
    page = before;
}

void attention_case(Random& random) {
    any_threads(random);
    const Requests requests = requests_of(random);
    each_isa([&](int64_t) {
        any_threads(random);
        const Floats out = requests.attend();
        CHECK(all_finite(out, out.size()));
        any_threads(random);
        for (int64_t s = 0; s < requests.S; s++) {
            attend_alone(random, requests, out, s);
            const int64_t last = requests.num_new(s) - 1;
            const float* const row = out + (requests.starts_S1[s] + last) * requests.H * requests.A;
            if (last >= 0) expect_token(requests, row, s, last);
        }
        for (int i = 0; i < 2; i++) spoil_token(random, requests, out);
    });
    refuse_requests(requests);
}

// Each token's slot copied to the one before it: as if the token had been stored there.
void expect_moved(const Ints& slot_T, const Floats& k, const Floats& v, const Buffer<char>& k_cache,
                  const Buffer<char>& v_cache, int64_t G, int64_t A, int64_t B, int64_t num_pages, int32_t format) {
    const int64_t T = slot_T.size(), num_slots = num_pages * B;
    if (T == num_slots) return;     // the first slot would be written over before it is read
    Ints to_T(T);
    for (int64_t t = 0; t < T; t++) to_T[t] = (slot_T[t] + num_slots - 1) % num_slots;
    const Buffer<char> k_moved = copy(k_cache, 4), v_moved = copy(v_cache, 4);
    const auto move = [&](const Ints& from_T, const Ints& to_T) {
        return move_kv_cpu(k_moved, v_moved, from_T, to_T, T, G, A, B, num_pages, format);
    };
    for (const int64_t bad : {int64_t(-1), num_slots, INT64_MIN, INT64_MAX}) {
        Ints bad_T = copy(to_T);
        bad_T[T - 1] = bad;
        CHECK(move(slot_T, bad_T) == BAD_INDEX && move(bad_T, to_T) == BAD_INDEX);
    }
    CHECK(move(slot_T, to_T) == OK);
    CHECK(store_kv_cpu(k_cache, v_cache, k, v, to_T, T, G, A, B, num_pages, format) == OK);
    CHECK(!std::memcmp(k_cache, k_moved, k_cache.size()) && !std::memcmp(v_cache, v_moved, v_cache.size()));
}

// rope_store_cpu does what rope_cpu and store_kv_cpu do.
void rope_store_case(Random& random) {
    const int64_t T = random.from(1, 70), G = random.from(1, 3), H = G * random.from(1, 4);
    const int64_t A = any_head_width(random), half = random.from(0, A / 2);
    const int64_t B = random.one_of(PAGE_SIZES), num_pages = (T + B - 1) / B + random.from(0, 3);
    const int32_t format = random.one_of(CACHE_FORMATS);
    any_threads(random);
    const Floats qkv_TX = numbers(random, T * (H + 2 * G) * A);
    const Floats cos = numbers(random, T * half), sin = numbers(random, T * half);
    if (random.once_in(2)) qkv_TX[random.from(0, qkv_TX.size() - 1)] = random.one_of(NOT_FINITE);
    Floats q(T * H * A), k(T * G * A), v(T * G * A);
    for (int64_t t = 0; t < T; t++) {
        const float* row = qkv_TX + t * (H + 2 * G) * A;
        std::copy(row, row + H * A, q + t * H * A);
        std::copy(row + H * A, row + (H + G) * A, k + t * G * A);
        std::copy(row + (H + G) * A, row + (H + 2 * G) * A, v + t * G * A);
    }
    Ints slot_T(T);
    const int64_t turn = random.from(0, num_pages * B - 1);
    for (int64_t t = 0; t < T; t++) slot_T[t] = (t + turn) % (num_pages * B);
    const Buffer<char> k_cache = poisoned_cache(random, num_pages * G * kv_head_bytes_cpu(A, B, format));
    const Buffer<char> v_cache = copy(k_cache, 4), k_both = copy(k_cache, 4), v_both = copy(k_cache, 4);
    const Floats turned_q = poison(q.size()), turned_k = poison(k.size()), q_both = poison(q.size());
    CHECK(rope_cpu(turned_q, q, cos, sin, T, H, A, half) == OK && rope_cpu(turned_k, k, cos, sin, T, G, A, half) == OK);
    CHECK(store_kv_cpu(k_cache, v_cache, turned_k, v, slot_T, T, G, A, B, num_pages, format) == OK);
    const auto both = [&] {
        return rope_store_cpu(q_both, k_both, v_both, qkv_TX, cos, sin, slot_T, T, H, G, A, half, B, num_pages, format);
    };
    for (const int64_t bad : {int64_t(-1), num_pages * B, INT64_MIN, INT64_MAX}) {
        const int64_t before = slot_T[T - 1];
        slot_T[T - 1] = bad;
        CHECK(both() == BAD_INDEX && untouched(q_both));
        CHECK(store_kv_cpu(k_both, v_both, k, v, slot_T, T, G, A, B, num_pages, format) == BAD_INDEX);
        slot_T[T - 1] = before;
    }
    CHECK(both() == OK && same(q_both, turned_q));
    CHECK(!std::memcmp(k_cache, k_both, k_both.size()) && !std::memcmp(v_cache, v_both, v_both.size()));
    expect_moved(slot_T, turned_k, v, k_cache, v_cache, G, A, B, num_pages, format);
}

// Arguments that are refused, and no rows at all ----------------------------------------------------------------------

constexpr auto null = nullptr;

void refuse_matrices(Random&) {
    CHECK(set_threads_cpu(-1) == BAD_SIZE && set_threads_cpu(1 << 20) == BAD_SIZE);
    CHECK(set_isa_cpu(-1) == NO_ISA && set_isa_cpu(99) == NO_ISA);
    CHECK(peak_cpu(99, 0) == 0);
    const int64_t bad_sizes[][2] = {{0, 256}, {-1, 256}, {16, 0}, {16, -256}, {16, 255}};
    for (const Stored& stored : STORED)
        for (const auto& [O, I] : bad_sizes) {
            if (I == 255 && stored.block == 1) continue;
            const Part part = {stored.format, O, null};
            CHECK(pack_bytes_cpu(stored.format, O, I) == 0);
            CHECK(pack_cpu(null, null, stored.format, O, I) == BAD_SIZE);
            CHECK(matmul_cpu(null, null, &part, null, 1, 1, I, 1, 0) == BAD_SIZE);
            CHECK(embed_cpu(null, &part, null, 1, I) == BAD_SIZE);
        }
    for (const int32_t format : {-1, 1, 99, INT32_MAX}) {
        const Part part = {format, 16, null};
        CHECK(pack_bytes_cpu(format, 16, 256) == 0 && pack_cpu(null, null, format, 16, 256) == BAD_FORMAT);
        CHECK(matmul_cpu(null, null, &part, null, 1, 1, 256, 1, 0) == BAD_FORMAT);
        CHECK(embed_cpu(null, &part, null, 1, 256) == BAD_FORMAT);
    }
    const Part part = {F32, 16, null};
    CHECK(matmul_cpu(null, null, &part, null, -1, 0, 8, 1, 0) == BAD_SIZE);
    CHECK(matmul_cpu(null, null, &part, null, 1, 2, 8, 1, 0) == BAD_SIZE);
    CHECK(matmul_cpu(null, null, &part, null, 1, -1, 8, 1, 0) == BAD_SIZE);
    CHECK(matmul_cpu(null, null, &part, null, 1, 1, 8, 0, 0) == BAD_SIZE);
    CHECK(matmul_cpu(null, null, &part, null, 0, 0, 8, 1, 0) == OK);
    CHECK(embed_cpu(null, &part, null, -1, 8) == BAD_SIZE && embed_cpu(null, &part, null, 0, 8) == OK);
}

void refuse_rows(Random&) {
    for (const int64_t T : {0, -1}) {
        const int status = T ? BAD_SIZE : OK;
        CHECK(rms_norm_cpu(null, null, null, T, 9, 0) == status);
        CHECK(silu_mul_cpu(null, null, T, 9) == status);
        CHECK(argmax_cpu(null, null, T, 9) == status && draw_cpu(null, null, null, T, 9) == status);
        CHECK(distribution_cpu(null, null, null, T, 9) == status);
        CHECK(move_kv_cpu(null, null, null, null, T, 2, 8, 16, 3, BF16) == status);
        CHECK(rope_angles_cpu(null, null, null, null, T, 4, 1) == status);
        CHECK(rope_cpu(null, null, null, null, T, 2, 8, 4) == status);
        CHECK(store_kv_cpu(null, null, null, null, null, T, 2, 8, 16, 3, BF16) == status);
        CHECK(rope_store_cpu(null, null, null, null, null, null, null, T, 2, 2, 8, 4, 16, 3, F32) == status);
    }
    for (const int64_t width : {0, -1}) {
        CHECK(rms_norm_cpu(null, null, null, 1, width, 0) == BAD_SIZE);
        CHECK(silu_mul_cpu(null, null, 1, width) == BAD_SIZE);
        CHECK(argmax_cpu(null, null, 1, width) == BAD_SIZE);
        CHECK(rope_cpu(null, null, null, null, 1, width, 8, 4) == BAD_SIZE);
    }
    CHECK(rope_angles_cpu(null, null, null, null, 1, -1, 1) == BAD_SIZE);
    for (const int64_t vocab : {int64_t(-1), int64_t(0), int64_t(10), (int64_t(1) << 22) + 1}) {
        DrawRules rules = {};
        rules.vocab = vocab;
        CHECK(draw_cpu(null, null, &rules, 1, vocab == 10 ? 9 : int64_t(1) << 40) == BAD_SIZE);
        CHECK(distribution_cpu(null, null, &rules, 1, vocab == 10 ? 9 : int64_t(1) << 40) == BAD_SIZE);
    }
    CHECK(rope_cpu(null, null, null, null, 1, 1, 8, 5) == BAD_SIZE);
    CHECK(rope_cpu(null, null, null, null, 1, 1, 8, -1) == BAD_SIZE);
}

void refuse_caches(Random&) {
    const Ints zero = ints({0}), starts = ints({0, 1}), length = ints({1});
    const auto attend = [&](int64_t T, int64_t H, int64_t G, int64_t A, int64_t B, int64_t window, int32_t format) {
        return attention_cpu(null, null, null, null, null, zero, T ? starts : zero, length, null, T, T ? 1 : 0,
                             H, G, A, B, 1, 1, 1, window, format);
    };
    const auto store = [&](int64_t G, int64_t A, int64_t B, int32_t format) {
        return store_kv_cpu(null, null, null, null, zero, 1, G, A, B, 1, format);
    };
    const auto both = [&](int64_t H, int64_t G, int64_t A, int64_t half, int64_t B, int32_t format) {
        return rope_store_cpu(null, null, null, null, null, null, zero, 1, H, G, A, half, B, 1, format);
    };
    const int64_t bad_shapes[][3] = {{0, 8, 16}, {-2, 8, 16}, {2, 7, 16}, {2, 0, 16}, {2, -8, 16}, {2, 514, 16},
                                     {2, 8, 4}, {2, 8, 24}, {2, 8, 512}, {2, 8, 0}, {2, 8, -16}, {2, 8, INT64_MIN}};
    for (const auto& [G, A, B] : bad_shapes) {
        CHECK(attend(1, 2, G, A, B, 0, F32) == BAD_SIZE && store(G, A, B, F32) == BAD_SIZE);
        CHECK(move_kv_cpu(null, null, zero, zero, 1, G, A, B, 1, F32) == BAD_SIZE);
        CHECK(both(2, G, A, 0, B, BF16) == BAD_SIZE);
        if (G == 2) CHECK(kv_head_bytes_cpu(A, B, F32) == 0);
    }
    for (const int32_t format : {-1, 1, int(Q8_0)})
        CHECK(attend(1, 2, 2, 8, 16, 0, format) == BAD_FORMAT && store(2, 8, 16, format) == BAD_FORMAT &&
              both(2, 2, 8, 0, 16, format) == BAD_FORMAT);
    CHECK(attend(1, 3, 2, 8, 16, 0, F32) == BAD_SIZE && attend(1, 0, 2, 8, 16, 0, F32) == BAD_SIZE);
    CHECK(attend(1, 2, 2, 8, 16, -1, F32) == BAD_SIZE && attend(0, 2, 2, 8, 16, 0, F32) == OK);
    CHECK(both(0, 2, 8, 0, 16, F32) == BAD_SIZE && both(2, 2, 8, 5, 16, F32) == BAD_SIZE);
    CHECK(both(2, 2, 8, -1, 16, F32) == BAD_SIZE);
}

// Several threads call, and processes fork ----------------------------------------------------------------------------

// Two threads call kernels, each on its own data, while a third changes how many threads there are.
void callers_case(Random& random) {
    constexpr int NUM_CALLERS = 2, NUM_CALLS = 40;
    CHECK(set_threads_cpu(3) == OK);
    std::atomic<int> num_busy{NUM_CALLERS};
    std::vector<std::thread> callers;
    for (int i = 0; i < NUM_CALLERS; i++)
        callers.emplace_back([&num_busy, own = random.bits(), round = seed] {
            subject = "a caller", seed = round;
            Random random{own};
            const Product product = product_of(random, false);
            const Requests requests = requests_of(random);
            const Floats y = product.rows(0, product.T), out = requests.attend();
            for (int call = 0; call < NUM_CALLS; call++)
                CHECK(same(product.rows(0, product.T), y) && same(requests.attend(), out));
            num_busy--;
        });
    while (num_busy) {
        CHECK(set_threads_cpu(random.from(1, 4)) == OK);
        std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
    for (std::thread& caller : callers) caller.join();
}

// A child, born while another thread is inside a kernel, has threads of its own.
void fork_case(Random& random) {
    CHECK(set_threads_cpu(3) == OK);
    const Product product = product_of(random, false);
    const Floats y = product.rows(0, product.T), x = numbers(random, 1 << 16);
    std::atomic<bool> done{false};
    std::thread busy([&] {
        const Floats out = poison(x.size());
        while (!done) CHECK(silu_mul_cpu(out, x, 1, x.size() / 2) == OK);
    });
    const pid_t child = fork();
    if (child == 0) {
#if defined(__SANITIZE_THREAD__)    // it cannot follow threads that a child starts: their ids are those of its parent's
        CHECK(set_threads_cpu(1) == OK);
#endif
        for (int call = 0; call < 3; call++) CHECK(same(product.rows(0, product.T), y));
        _exit(0);
    }
    int status;
    CHECK(child > 0 && waitpid(child, &status, 0) == child && status == 0);
    done = true;
    busy.join();
}

void peak_case(Random& random) {
    each_isa([&](int64_t) {
        any_threads(random);
        for (const Stored& stored : STORED) CHECK(peak_cpu(stored.format, 1e-4) > 0);
    });
}

// Offsets beyond 32 bits ----------------------------------------------------------------------------------------------

// Zeros that take no memory until they are written.
class Sparse {
public:
    explicit Sparse(int64_t bytes) : bytes_(bytes) {
        start_ = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
        CHECK(start_ != MAP_FAILED);
    }
    Sparse(const Sparse&) = delete;
    ~Sparse() { munmap(start_, bytes_); }
    char* at(int64_t offset) const { return static_cast<char*>(start_) + offset; }

private:
    void* start_;
    int64_t bytes_;
};

// A request on pages beyond 2^31 bytes, and on one beyond 2^32 of them or of numbers, has the bits that it has on the
// first pages.
void far_pages_case(Random&) {
    for (const int32_t format : CACHE_FORMATS) {
        constexpr int64_t H = 8, G = 8, A = 128, B = 256, NUM_PAGES = 17000, length = 3 * B - 5, num_new = 3;
        const int64_t page_bytes = G * kv_head_bytes_cpu(A, B, format);
        const Sparse k_cache(NUM_PAGES * page_bytes), v_cache(NUM_PAGES * page_bytes);
        Random random{7};
        const Floats k = numbers(random, length * G * A), v = numbers(random, length * G * A);
        const Floats q = numbers(random, num_new * H * A);
        Floats results[2];
        const int32_t tables[2][3] = {{0, 1, 2}, {5000, NUM_PAGES - 1, 7}};
        for (int i = 0; i < 2; i++) {
            Ints slot_T(length);
            for (int64_t place = 0; place < length; place++) slot_T[place] = tables[i][place / B] * B + place % B;
            CHECK(store_kv_cpu(k_cache.at(0), v_cache.at(0), k, v, slot_T, length, G, A, B, NUM_PAGES, format) == OK);
            results[i] = poison(num_new * H * A);
            CHECK(attention_cpu(results[i], q, k_cache.at(0), v_cache.at(0), tables[i], ints({0}), ints({0, num_new}),
                                ints({length}), nullptr, num_new, 1, H, G, A, B, NUM_PAGES, 3, 0.1f, 0,
                                format) == OK);
        }
        CHECK(same(results[0], results[1]) && all_finite(results[0], results[0].size()));
    }
}

// Panels of 16 outputs lie one after the other (cpu/matmul.h): one of them alone, zeros around it.
void far_panels_case(Random& random) {
    constexpr int64_t I = 4096, PANEL = 16;
    const Weights weights = weights_of(random, STORED[0], PANEL, I);
    const int64_t panel_bytes = weights.packed.size(), beyond = (int64_t(1) << 31) / panel_bytes;
    const Floats x_TI = numbers(random, I), table = unpacked(weights);
    const Sparse memory((4 * beyond + 2) * panel_bytes);
    for (const int64_t panel : {beyond, 4 * beyond + 1}) {
        std::memcpy(memory.at(panel * panel_bytes), weights.packed, panel_bytes);
        const Part part = {F32, (panel + 1) * PANEL, memory.at(0)};
        const Floats row = poison(I);
        CHECK(embed_cpu(row, &part, ints({panel * PANEL + 3}), 1, I) == OK && same(row, table + 3 * I, I));
    }
#if !defined(__SANITIZE_THREAD__)   // ThreadSanitizer writes down every byte that is read: 8 GB here
    const Part near = weights.part(), far = {F32, (beyond + 1) * PANEL, memory.at(0)};
    const Floats y = poison(PANEL), far_y = poison(far.O);
    CHECK(matmul_cpu(y, x_TI, &near, nullptr, 1, 1, I, 1, 0) == OK);
    CHECK(matmul_cpu(far_y, x_TI, &far, nullptr, 1, 1, I, 1, 0) == OK);
    CHECK(same(y, far_y + beyond * PANEL, PANEL) && same(far_y, filled(beyond * PANEL, 0), beyond * PANEL));
#endif
}

}  // namespace

int main(int argc, char** argv) {
    only = argc > 1 ? argv[1] : nullptr;
    cases("refused matrices", 1, refuse_matrices);
    cases("refused rows", 1, refuse_rows);
    cases("refused caches", 1, refuse_caches);
    cases("matmul", 100, [](Random& random) { matmul_case(random, false); });
    cases("matmul on any bytes", 60, [](Random& random) { matmul_case(random, true); });
    cases("embed", 60, embed_case);
    cases("rms_norm", 40, rms_norm_case);
    cases("silu_mul", 40, silu_mul_case);
    cases("argmax", 40, argmax_case);
    cases("draw", 60, draw_case);
    cases("rope", 40, rope_case);
    cases("rope_store", 60, rope_store_case);
    cases("attention", 60, attention_case);
    cases("callers", 4, callers_case);
    cases("fork", 4, fork_case);
    cases("peak", 1, peak_case);
    cases("far pages", 1, far_pages_case);
    cases("far panels", 1, far_panels_case);
}
