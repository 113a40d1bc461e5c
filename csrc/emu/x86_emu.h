// AVX-512 and AMX on any CPU with AVX2, for tests: the instructions that the kernels use, under their own names, as
// Intel's manual (volume 2) defines them. Compiled with -DEMULATED, the kernels are those that a CPU with AMX runs.
//
// What a CPU refuses ends the program with a line that names it: shapes that do not fit, tiles without a shape,
// registers used twice. Loads and stores touch the bytes that the shape says and no others: AddressSanitizer sees them.
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

// Not inlined: the kernels unroll, and compilers would take minutes.
#define EMULATE_APART inline __attribute__((noinline))

typedef float vec __attribute__((vector_size(64)));
typedef int32_t ivec __attribute__((vector_size(64)));
typedef uint32_t uvec __attribute__((vector_size(64)));

template <class T, int num>
struct Numbers {
    T numbers[num];
};

template <class T>
EMULATE __m512i widened(Numbers<T, 16> narrow) {
    ivec wide;
    for (int i = 0; i < 16; i++) wide[i] = narrow.numbers[i];
    return (__m512i)wide;
}
EMULATE_APART __m512i cvtepu16_epi32(__m256i v) { return widened(bits<Numbers<uint16_t, 16>>(v)); }
EMULATE_APART __m512i cvtepu8_epi32(__m128i v) { return widened(bits<Numbers<uint8_t, 16>>(v)); }
EMULATE __m512 cvtepi32_ps(__m512i v) { return (__m512)__builtin_convertvector((ivec)v, vec); }
EMULATE_APART __m128i cvtsepi32_epi8(__m512i v) {
    Numbers<int8_t, 16> narrow;
    for (int i = 0; i < 16; i++) {
        const int32_t x = ((ivec)v)[i];
        narrow.numbers[i] = x < -128 ? -128 : x > 127 ? 127 : x;
    }
    return bits<__m128i>(narrow);
}
EMULATE __m512i slli_epi32(__m512i v, unsigned by) { return (__m512i)((uvec)v << by); }
EMULATE_APART int32_t reduce_add_epi32(__m512i v) {
    uint32_t sum = 0;
    for (int i = 0; i < 16; i++) sum += ((uvec)v)[i];
    return int32_t(sum);
}
EMULATE_APART int32_t reduce_max_epi32(__m512i v) {
    int32_t top = INT32_MIN;
    for (int i = 0; i < 16; i++) top = ((ivec)v)[i] > top ? ((ivec)v)[i] : top;
    return top;
}
EMULATE __m512i madd_epi16(__m512i a, __m512i b) {
    const ivec low = ((ivec)a << 16 >> 16) * ((ivec)b << 16 >> 16), high = ((ivec)a >> 16) * ((ivec)b >> 16);
    return (__m512i)((uvec)low + (uvec)high);
}
EMULATE_APART __m512i permutexvar_epi16(__m512i order, __m512i v) {
    const auto from = bits<Numbers<uint16_t, 32>>(v), places = bits<Numbers<uint16_t, 32>>(order);
    Numbers<uint16_t, 32> to;
    for (int i = 0; i < 32; i++) to.numbers[i] = from.numbers[places.numbers[i] & 31];
    return bits<__m512i>(to);
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
EMULATE_APART __m256i cvtneps_pbh(__m512 v) {
    Numbers<uint16_t, 16> halves;
    for (int i = 0; i < 16; i++) {
        const uint32_t x = ((uvec)v)[i];
        const bool nan = (x & 0x7fffffff) > 0x7f800000, tiny = (x & 0x7f800000) == 0;
        halves.numbers[i] = nan ? x >> 16 | 0x40 : tiny ? x >> 16 & 0x8000 : (x + 0x7fff + (x >> 16 & 1)) >> 16;
    }
    return bits<__m256i>(halves);
}

// vpdpbusd, unsigned w with signed x, and vpdpwssd.
EMULATE_APART __m512i dpbusd_epi32(__m512i sums, __m512i w, __m512i x) {
    ivec out = (ivec)sums;
    for (int i = 0; i < 32; i += 8) out += ((ivec)w >> i & 255) * ((ivec)x << (24 - i) >> 24);
    return (__m512i)out;
}
EMULATE_APART __m512i dpwssd_epi32(__m512i sums, __m512i a, __m512i b) {
    return (__m512i)((uvec)sums + (uvec)madd_epi16(a, b));
}
EMULATE __m512i set1_epi32(const void* from) {
    int32_t x;
    memcpy(&x, from, sizeof x);
    return (__m512i)(ivec{} + x);
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
    const int num_rows = tiles.num_rows[tile], row_bytes = tiles.row_bytes[tile];
    for (int row = 0; row < num_rows; row++)
        memcpy(tiles.rows[tile][row], static_cast<const char*>(from) + row * stride, row_bytes);
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
        ivec sums, fours;
        memcpy(&sums, tiles.rows[c][m], sizeof sums);
        for (int k = 0; k < tiles.num_rows[b]; k++) {
            memcpy(&fours, tiles.rows[b][k], sizeof fours);
            for (int i = 0; i < 4; i++) sums += (fours >> 8 * i & 255) * int8_t(tiles.rows[a][m][4 * k + i]);
        }
        memcpy(tiles.rows[c][m], &sums, tiles.row_bytes[c]);
    }
}

// What one row of C gets.
EMULATE_APART void add_bfloat16(float* c, const uint8_t* a, const uint8_t (*b)[64], int num_pairs) {
    const __m256i upper = _mm256_set1_epi32(~0xffff);
    __m256 sums[2][2] = {};     // of even and of odd numbers, for the first and the last 8 columns
    for (int k = 0; k < num_pairs; k++) {
        int32_t pair;
        memcpy(&pair, a + 4 * k, sizeof pair);
        const __m256i both = _mm256_set1_epi32(pair);
        const __m256 even = (__m256)_mm256_slli_epi32(both, 16), odd = (__m256)_mm256_and_si256(both, upper);
        for (int half = 0; half < 2; half++) {
            const __m256i pairs = _mm256_loadu_si256((const __m256i*)(b[k] + 32 * half));
            sums[0][half] = _mm256_fmadd_ps(even, (__m256)_mm256_slli_epi32(pairs, 16), sums[0][half]);
            sums[1][half] = _mm256_fmadd_ps(odd, (__m256)_mm256_and_si256(pairs, upper), sums[1][half]);
        }
    }
    for (int half = 0; half < 2; half++)
        _mm256_storeu_ps(c + 8 * half, _mm256_loadu_ps(c + 8 * half) + (sums[0][half] + sums[1][half]));
}

// The products of even and of odd numbers are summed apart, then added to each other and to C. Subnormal numbers are 0.
inline void tdpbf16ps(int c, int a, int b) {
    check_product(c, a, b);
    const unsigned before = _mm_getcsr();
    _mm_setcsr(0x9fc0);     // nothing traps; to even; subnormal operands and results are zeros
    for (int m = 0; m < tiles.num_rows[c]; m++) {
        float sums[16];
        memcpy(sums, tiles.rows[c][m], sizeof sums);
        add_bfloat16(sums, tiles.rows[a][m], tiles.rows[b], tiles.num_rows[b]);
        memcpy(tiles.rows[c][m], sums, tiles.row_bytes[c]);
    }
    _mm_setcsr(before);
}

#undef EMULATE
#undef EMULATE_APART

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
