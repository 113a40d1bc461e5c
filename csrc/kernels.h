// The native kernels: what binding.cpp calls and the tests check. This header is the manual.
//
// Dimension key (model.py): T tokens of this step, D model width, F feed-forward width, V vocabulary, H query heads,
// G key/value heads, A head width, S requests in this step, L rows of logits, B tokens per page, O and I a matmul's
// outputs and inputs. A name's suffix is its shape: y_TO holds T rows of O numbers, without gaps.
//
// Arguments come in the order outputs, inputs, sizes, scalars. Every kernel returns a Status; if that is not OK,
// nothing was written. No pointer is kept after the call. Calls from several threads wait for each other.
//
// Every row of a result depends on its own data alone and is computed in an order that its own sizes fix: its bits are
// the same alone or among others, with any number of threads. A number that is not finite makes the rows that see it
// not finite, and no others.
#pragma once
#include <cstdint>

extern "C" {

enum Status : int { OK = 0, BAD_FORMAT = 1, BAD_SIZE = 2, BAD_INDEX = 3, NO_MEMORY = 4, NO_ISA = 5, DEVICE_ERROR = 6 };

// How numbers are stored: the ids of GGUF files (quant.py: Format.ggml_id).
enum Format : int32_t {
    F32 = 0, BF16 = 30, I8 = 24, Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8,
    Q2_K = 10, Q3_K = 11, Q4_K = 12, Q5_K = 13, Q6_K = 14
};

// The machine ---------------------------------------------------------------------------------------------------------

// Threads that kernels use, the caller among them; 0: as many as CPUs are open to the process (the default).
int set_threads_cpu(int64_t num_threads);

// Which instructions kernels use, for tests: 0 plain C++, 1 AVX2 with FMA, 2 AVX-512 with VNNI, 3 AMX. By default the
// best there is; NO_ISA if this CPU lacks it.
int set_isa_cpu(int64_t level);

// The machine's limit: operations a second (a product with its sum is two) that all threads do on registers alone, with
// the arithmetic that matmul_cpu has for weights of this format. Measured for `seconds`; 0 for a format it lacks.
double peak_cpu(int32_t format, double seconds);

// Matrices ------------------------------------------------------------------------------------------------------------

// A weight matrix of O rows in packed form. Several that read the same input stand side by side: q, k, v or gate, up.
struct Part {
    int32_t format;
    int64_t O;
    const void* packed;
};

// Packing reorders a matrix (O, I), as files hold it, for matmul, and loses nothing: matmul.h has the layout.
// I is a multiple of the format's block (32, or 256 for the K formats; 1 for plain numbers).
// Returns the bytes it takes, or 0 where pack_cpu would not return OK. `packed` should begin at a multiple of 64.
int64_t pack_bytes_cpu(int32_t format, int64_t O, int64_t I);
int pack_cpu(void* packed, const void* raw, int32_t format, int64_t O, int64_t I);

// y = x W^T + bias, for each part in its columns of y_TO, where O sums over the parts; bias_O may be null.
// `accumulate`: the result is added to what y_TO holds. Quantized weights meet an x rounded to 8 bits in groups of 32;
// matmul.inc states the arithmetic, which is the same on all CPUs. For plain weights it depends on the instructions.
// Rows from num_exact on meet weights dequantized to bfloat16, and are rounded to it, where the CPU has AMX; elsewhere
// both are float32. After NO_MEMORY rows before num_exact may be written.
int matmul_cpu(float* y_TO, const float* x_TI, const Part* parts, const float* bias_O, int64_t T, int64_t num_exact,
               int64_t I, int64_t num_parts, int accumulate);

// Rows token_T of the table, with exactly the values of quant.py. BAD_INDEX: a token < 0 or >= table->O.
int embed_cpu(float* x_TD, const Part* table, const int64_t* token_T, int64_t T, int64_t D);

// Rows of numbers -----------------------------------------------------------------------------------------------------

// x / sqrt(mean(x^2) + eps) * weight.
int rms_norm_cpu(float* out_TD, const float* x_TD, const float* weight_D, int64_t T, int64_t D, float eps);

// silu(gate) * up, where a row of x_T2F holds gate, then up.
int silu_mul_cpu(float* act_TF, const float* x_T2F, int64_t T, int64_t F);

// The lowest id of the greatest number in each row; -1 for a row with a number that is not finite.
int argmax_cpu(int64_t* id_L, const float* x_LV, int64_t L, int64_t V);

// How a token is drawn from a row of logits, as kernels.DrawRules. Ids from `vocab` on are never drawn. seen_V and
// count_V have `vocab` entries or are null.
struct DrawRules {
    int64_t vocab;
    double temperature;     // 0: the greatest logit, the lowest id on ties
    int64_t top_k;          // 0: no limit
    double top_p, min_p;
    double repetition_penalty, presence_penalty, frequency_penalty;
    const bool* seen_V;
    const double* count_V;
    const int64_t* bias_ids;
    const double* biases;
    int64_t num_biases;
    uint64_t key;           // of the noise
};

// A token for each row, bit for bit the one that kernels.draw draws; -1 for a row with a number that is not finite, or
// of which nothing finite is left. BAD_INDEX: a bias id < 0 or >= vocab. BAD_SIZE: vocab > V or > 2^22. After NO_MEMORY
// id_L may hold anything.
int draw_cpu(int64_t* id_L, const float* x_LV, const DrawRules* rules_L, int64_t L, int64_t V);

// The probabilities of what draw_cpu draws from, whatever the key: 0 elsewhere, and in all the row where it gives -1.
// After NO_MEMORY p_LV may hold anything.
int distribution_cpu(double* p_LV, const float* x_LV, const DrawRules* rules_L, int64_t L, int64_t V);

// Attention -----------------------------------------------------------------------------------------------------------

// A layer's k_cache and v_cache hold num_pages pages of G heads, each with room for this many bytes; cpu/kv.h has the
// layout. cache_format is F32, BF16, or I8: a head's key or value is then rounded to 8 bits, with a float32 scale of
// its own, the greatest magnitude / 127. A <= 512 is even, B a power of two from 8 to 256; for others it returns 0.
// If A is a multiple of 16 and B > 8, it is the bytes of B times A numbers, and of B scales.
int64_t kv_head_bytes_cpu(int64_t A, int64_t B, int32_t cache_format);

// The cosine and sine, (T, half) each, of position * frequency, times `scale`; the angle is computed in double.
int rope_angles_cpu(float* cos, float* sin, const int64_t* position_T, const double* inv_freq, int64_t T, int64_t half,
                    double scale);

// Rotates the pairs (i, i + half) of each head's first 2 * half numbers; the rest passes. cos and sin are (T, half).
int rope_cpu(float* out_THA, const float* x_THA, const float* cos, const float* sin, int64_t T, int64_t H, int64_t A,
             int64_t half);

// Writes each token's keys and values into slot_T: page * B + place in the page. Where a head's key is not finite, NaN
// is written as its value (in int8, as the scale of both). BAD_INDEX: a slot < 0 or >= num_pages * B.
int store_kv_cpu(void* k_cache, void* v_cache, const float* k_TGA, const float* v_TGA, const int64_t* slot_T, int64_t T,
                 int64_t G, int64_t A, int64_t B, int64_t num_pages, int32_t cache_format);

// Both at once: a row of qkv_TX holds H queries, G keys, G values. Queries are rotated into q_THA, keys into the cache.
int rope_store_cpu(float* q_THA, void* k_cache, void* v_cache, const float* qkv_TX, const float* cos, const float* sin,
                   const int64_t* slot_T, int64_t T, int64_t H, int64_t G, int64_t A, int64_t half, int64_t B,
                   int64_t num_pages, int32_t cache_format);

// Copies the keys and values of slots from_T, all their bits, into slots to_T, one after the other: none may be written
// before it is read. BAD_INDEX: a slot < 0 or >= num_pages * B.
int move_kv_cpu(void* k_cache, void* v_cache, const int64_t* from_T, const int64_t* to_T, int64_t T, int64_t G,
                int64_t A, int64_t B, int64_t num_pages, int32_t cache_format);

// Causal attention of each request's new tokens over its pages. Request s owns rows starts_S1[s] to starts_S1[s + 1],
// the last of its lengths_S[s] tokens; its page ids begin at table + row_S[s] * table_stride. window > 0: a token sees
// itself and the window - 1 tokens before it. What no token sees may be anything. A row whose query, or any key or
// value that it sees, is not finite is NaN in all its heads. BAD_INDEX: starts_S1 and lengths_S contradict each other
// or T, or the table names a page < 0 or >= num_pages that a token sees.
// A request's new tokens may form a tree: bit j of ancestors_T says whether a row sees its request's j-th new token (of
// those before it and itself; later bits say nothing). A row then has the bits that it would have if the drafts it does
// not see were no part of the text, where the ancestors stand side by side; windows count this text. A request that has
// no tree has all bits set; null: none has one. BAD_INDEX, too: a row does not see itself, or of those before it not
// just what the last it sees does; or a request of more than 64 new tokens has not all bits set.
int attention_cpu(float* out_THA, const float* q_THA, const void* k_cache, const void* v_cache, const int32_t* table,
                  const int64_t* row_S, const int64_t* starts_S1, const int64_t* lengths_S, const int64_t* ancestors_T,
                  int64_t T, int64_t S, int64_t H, int64_t G, int64_t A, int64_t B, int64_t num_pages,
                  int64_t table_stride, float scale, int64_t window, int32_t cache_format);

}  // extern "C"
