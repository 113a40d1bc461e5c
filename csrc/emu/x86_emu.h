// AVX-512 and AMX on any CPU with AVX2, for tests: the instructions that avx512.inc, amx.inc, panels.inc, matmul.inc and
// tiles.inc use, under their own names, as Intel's manual (volume 2) defines them. Compiled with -DEMULATED, the kernels
// are those that a CPU with AMX runs, but for who spreads and multiplies.
//
// What a CPU refuses ends the program with a line that names it: shapes that do not fit, tiles without a shape, registers
// used twice. Loads and stores touch the bytes that the shape says and no others, so that AddressSanitizer watches them.
//
// Included at the top of a file, after all headers, like avx2.inc.
#if !defined(EMULATED)
#error "for tests: compile with -DEMULATED"
#endif
#include <immintrin.h>

#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>

#include "../cpu/avx2.inc"
#undef FMA

namespace emulated {

#define EMULATE static inline __attribute__((always_inline))

template <class To, class From>
EMULATE To bits(From from) {
    static_assert(sizeof(To) == sizeof from);
    To to;
    memcpy(&to, &from, sizeof to);
    return to;
}

struct Halves {
    __m256i low, high;
};
EMULATE __m256 low(__m512 v) { return bits<__m256>(bits<Halves>(v).low); }
EMULATE __m256 high(__m512 v) { return bits<__m256>(bits<Halves>(v).high); }
EMULATE __m512 join(__m256 low, __m256 high) {
    return bits<__m512>(Halves{bits<__m256i>(low), bits<__m256i>(high)});
}

// AVX-512 -------------------------------------------------------------------------------------------------------------

EMULATE __m512 fmadd(__m512 a, __m512 b, __m512 c) {
    return join(_mm256_fmadd_ps(low(a), low(b), low(c)), _mm256_fmadd_ps(high(a), high(b), high(c)));
}
EMULATE __m512 cvtph_ps(__m256i halves) {
    return join(_mm256_cvtph_ps(_mm256_castsi256_si128(halves)), _mm256_cvtph_ps(_mm256_extracti128_si256(halves, 1)));
}

// What `one` makes of each of the numbers.
template <class To, class From, class One>
EMULATE To each(From from, One one) {
    typedef decltype(one(typename From::Number{})) Result;
    constexpr int num = sizeof(From) / sizeof(typename From::Number);
    static_assert(sizeof(To) == num * sizeof(Result));
    Result results[num];
    for (int i = 0; i < num; i++) results[i] = one(from.numbers[i]);
    To to;
    memcpy(&to, results, sizeof to);
    return to;
}
template <class T, int num>
struct Numbers {
    typedef T Number;
    T numbers[num];
};
typedef Numbers<int32_t, 16> Ints;
typedef Numbers<float, 16> Floats;
typedef Numbers<int16_t, 32> Pairs;
typedef Numbers<int8_t, 64> Fours;

EMULATE __m512i cvtepu16_epi32(__m256i v) {
    return each<__m512i>(bits<Numbers<uint16_t, 16>>(v), [](uint16_t x) { return int32_t(x); });
}
EMULATE __m512i cvtepu8_epi32(__m128i v) {
    return each<__m512i>(bits<Numbers<uint8_t, 16>>(v), [](uint8_t x) { return int32_t(x); });
}
EMULATE __m512 cvtepi32_ps(__m512i v) {
    return each<__m512>(bits<Ints>(v), [](int32_t x) { return float(x); });
}
EMULATE __m128i cvtsepi32_epi8(__m512i v) {
    return each<__m128i>(bits<Ints>(v), [](int32_t x) { return int8_t(x < -128 ? -128 : x > 127 ? 127 : x); });
}
EMULATE __m512i slli_epi32(__m512i v, unsigned by) {
    return each<__m512i>(bits<Ints>(v), [by](int32_t x) { return int32_t(uint32_t(x) << by); });
}
EMULATE int32_t reduce_add_epi32(__m512i v) {
    uint32_t sum = 0;
    for (int32_t x : bits<Ints>(v).numbers) sum += uint32_t(x);
    return int32_t(sum);
}
EMULATE int32_t reduce_max_epi32(__m512i v) {
    int32_t top = INT32_MIN;
    for (int32_t x : bits<Ints>(v).numbers) top = x > top ? x : top;
    return top;
}
EMULATE __m512i madd_epi16(__m512i a, __m512i b) {
    const Pairs x = bits<Pairs>(a), y = bits<Pairs>(b);
    Ints sums;
    for (int i = 0; i < 16; i++)
        sums.numbers[i] = int32_t(uint32_t(x.numbers[2 * i] * y.numbers[2 * i]) +
                                  uint32_t(x.numbers[2 * i + 1] * y.numbers[2 * i + 1]));
    return bits<__m512i>(sums);
}
EMULATE __m512i permutexvar_epi16(__m512i order, __m512i v) {
    const Pairs from = bits<Pairs>(v);
    return each<__m512i>(bits<Pairs>(order), [&](int16_t i) { return from.numbers[i & 31]; });
}
EMULATE __m512i castsi256_si512(__m256i v) { return bits<__m512i>(Halves{v, v}); }
EMULATE __m512i inserti64x4(__m512i into, __m256i v, int half) {
    Halves halves = bits<Halves>(into);
    (half ? halves.high : halves.low) = v;
    return bits<__m512i>(halves);
}
EMULATE __m512i load_si512(const void* from) {
    __m512i v;
    memcpy(&v, from, sizeof v);
    return v;
}
EMULATE void storeu_si512(void* to, __m512i v) { memcpy(to, &v, sizeof v); }

// To bfloat16, rounded to even; subnormal numbers count as 0.
EMULATE __m256i cvtneps_pbh(__m512 v) {
    return each<__m256i>(bits<Numbers<uint32_t, 16>>(v), [](uint32_t x) {
        if ((x & 0x7fffffff) > 0x7f800000) return uint16_t(x >> 16 | 0x40);
        if ((x & 0x7f800000) == 0) return uint16_t(x >> 16 & 0x8000);
        return uint16_t((x + 0x7fff + (x >> 16 & 1)) >> 16);
    });
}

// vpdpbusd, unsigned w with signed x, and vpdpwssd.
EMULATE __m512i dpbusd_epi32(__m512i sums, __m512i w, __m512i x) {
    const Fours a = bits<Fours>(w), b = bits<Fours>(x);
    Ints out = bits<Ints>(sums);
    for (int i = 0; i < 16; i++)
        for (int j = 0; j < 4; j++)
            out.numbers[i] += uint8_t(a.numbers[4 * i + j]) * b.numbers[4 * i + j];
    return bits<__m512i>(out);
}
EMULATE __m512i dpwssd_epi32(__m512i sums, __m512i a, __m512i b) {
    const Ints more = bits<Ints>(madd_epi16(a, b));
    Ints out = bits<Ints>(sums);
    for (int i = 0; i < 16; i++) out.numbers[i] = int32_t(uint32_t(out.numbers[i]) + uint32_t(more.numbers[i]));
    return bits<__m512i>(out);
}
EMULATE __m512i set1_epi32(const void* from) {
    int32_t x;
    memcpy(&x, from, sizeof x);
    return each<__m512i>(Ints{}, [x](int32_t) { return x; });
}

// AMX -----------------------------------------------------------------------------------------------------------------

struct TileRegisters {
    bool configured;
    uint8_t num_rows[8];
    uint16_t row_bytes[8];
    uint8_t rows[8][16][64];
};
inline thread_local TileRegisters tiles;

[[noreturn]] inline void refuse(const char* what, int tile) {
    fprintf(stderr, "the AMX emulator: %s (tile %d)\n", what, tile);
    abort();
}

inline void check_tile(int tile) {
    if (!tiles.configured) refuse("used without a configuration", tile);
    if (!tiles.num_rows[tile] || !tiles.row_bytes[tile]) refuse("used without a shape", tile);
}

inline void ldtilecfg(const void* from) {
    uint8_t shapes[64];
    memcpy(shapes, from, sizeof shapes);
    memset(&tiles, 0, sizeof tiles);
    if (shapes[0] != 1) refuse("a palette other than 1", 0);
    for (int i = 1; i < 16; i++)
        if (shapes[i]) refuse("a start row, or reserved bytes that are not 0", 0);
    for (int i = 0; i < 16; i++) {
        uint16_t bytes;
        memcpy(&bytes, shapes + 16 + 2 * i, sizeof bytes);
        const uint8_t rows = shapes[48 + i];
        if (i >= 8 ? rows || bytes : rows > 16 || bytes > 64 || !rows != !bytes) refuse("an impossible shape", i);
        if (i < 8) tiles.num_rows[i] = rows, tiles.row_bytes[i] = bytes;
    }
    tiles.configured = true;
}

inline void tilerelease() { memset(&tiles, 0, sizeof tiles); }

inline void tilezero(int tile) {
    check_tile(tile);
    memset(tiles.rows[tile], 0, sizeof tiles.rows[tile]);
}

inline void tileloadd(int tile, const void* from, int64_t stride) {
    tilezero(tile);
    for (int row = 0; row < tiles.num_rows[tile]; row++)
        memcpy(tiles.rows[tile][row], static_cast<const char*>(from) + row * stride, tiles.row_bytes[tile]);
}

inline void tilestored(int tile, void* to, int64_t stride) {
    check_tile(tile);
    for (int row = 0; row < tiles.num_rows[tile]; row++)
        memcpy(static_cast<char*>(to) + row * stride, tiles.rows[tile][row], tiles.row_bytes[tile]);
}

inline void check_product(int c, int a, int b) {
    check_tile(c), check_tile(a), check_tile(b);
    if (c == a || c == b || a == b) refuse("a product of a register with itself", c);
    if (tiles.num_rows[c] != tiles.num_rows[a] || tiles.row_bytes[c] != tiles.row_bytes[b] ||
        tiles.row_bytes[a] != 4 * tiles.num_rows[b] || tiles.row_bytes[a] % 4 || tiles.row_bytes[b] % 4)
        refuse("a product of shapes that do not fit", c);
}

// A signed, B unsigned.
inline void tdpbsud(int c, int a, int b) {
    check_product(c, a, b);
    for (int m = 0; m < tiles.num_rows[c]; m++) {
        int32_t sums[16];
        memcpy(sums, tiles.rows[c][m], sizeof sums);
        for (int k = 0; k < tiles.num_rows[b]; k++)
            for (int n = 0; n < 16; n++)
                for (int i = 0; i < 4; i++)
                    sums[n] += int8_t(tiles.rows[a][m][4 * k + i]) * tiles.rows[b][k][4 * n + i];
        memcpy(tiles.rows[c][m], sums, tiles.row_bytes[c]);
    }
}

inline float flushed(float x) { return __builtin_fabsf(x) < __FLT_MIN__ ? __builtin_copysignf(0, x) : x; }

// The products of even and of odd numbers are summed apart, then added to each other and to C. Subnormal numbers are 0.
inline void tdpbf16ps(int c, int a, int b) {
    check_product(c, a, b);
    const auto number = [](const uint8_t* from) {
        uint16_t half;
        memcpy(&half, from, sizeof half);
        return flushed(bits<float>(uint32_t(half) << 16));
    };
    for (int m = 0; m < tiles.num_rows[c]; m++) {
        float sums[16], parts[2][16] = {};
        memcpy(sums, tiles.rows[c][m], sizeof sums);
        for (int k = 0; k < tiles.num_rows[b]; k++)
            for (int i = 0; i < 2; i++) {
                const float x = number(tiles.rows[a][m] + 4 * k + 2 * i);
                for (int n = 0; n < 16; n++)
                    parts[i][n] = flushed(__builtin_fmaf(x, number(tiles.rows[b][k] + 4 * n + 2 * i), parts[i][n]));
            }
        for (int n = 0; n < 16; n++) sums[n] = flushed(flushed(sums[n]) + flushed(parts[0][n] + parts[1][n]));
        memcpy(tiles.rows[c][m], sums, tiles.row_bytes[c]);
    }
}

#undef EMULATE

}  // namespace emulated

#undef _mm512_cvtph_ps
#undef _mm512_slli_epi32
#undef _mm512_inserti64x4
#define _mm512_fmadd_ps emulated::fmadd
#define _mm512_cvtph_ps emulated::cvtph_ps
#define _mm512_cvtepu16_epi32 emulated::cvtepu16_epi32
#define _mm512_cvtepu8_epi32 emulated::cvtepu8_epi32
#define _mm512_cvtepi32_ps emulated::cvtepi32_ps
#define _mm512_cvtsepi32_epi8 emulated::cvtsepi32_epi8
#define _mm512_slli_epi32 emulated::slli_epi32
#define _mm512_reduce_add_epi32 emulated::reduce_add_epi32
#define _mm512_reduce_max_epi32 emulated::reduce_max_epi32
#define _mm512_madd_epi16 emulated::madd_epi16
#define _mm512_permutexvar_epi16 emulated::permutexvar_epi16
#define _mm512_castsi256_si512 emulated::castsi256_si512
#define _mm512_inserti64x4 emulated::inserti64x4
#define _mm512_load_si512 emulated::load_si512
#define _mm512_storeu_si512 emulated::storeu_si512
#define _mm512_cvtneps_pbh emulated::cvtneps_pbh
#define _mm512_dpbusd_epi32 emulated::dpbusd_epi32
