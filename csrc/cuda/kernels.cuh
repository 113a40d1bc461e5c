// The CUDA kernels: what gpu.py calls, on a device or through the emulator. ../kernels.h has the letters and what each
// operation means; here stands what differs.
//
// Arguments come in the order of csrc/cpu: outputs, inputs, sizes, scalars; then the stream. All pointers are the
// device's. A Status says whether the launch was accepted: what lies in device memory (ids, slots, page tables) is not
// checked, so that no step waits for the device. A token that counts for nothing (a padded one) has slot -1, which is
// written nowhere, and belongs to a request of length 0, which sees nothing and whose rows come out as 0.
//
// Every row of a result has the same bits alone or among others, as on the CPU.
#pragma once
#include <cstdint>

#include "../kernels.h"

typedef void* Stream;   // a cudaStream_t

extern "C" {

// Matrices ------------------------------------------------------------------------------------------------------------

// Bytes of a packed matrix of O rows and I inputs in a block format; 0 for formats and shapes that are not served.
// blocks.cuh has the layout.
int64_t pack_bytes_cuda(int32_t format, int64_t O, int64_t I);

// From the blocks of a file, which lie in device memory.
int pack_cuda(void* packed, const void* raw, int32_t format, int64_t O, int64_t I, Stream stream);

// x rounded to 8 bits in groups of 32: what matmul_cuda reads. `quantized` has quantized_bytes_cuda(T, I).
int64_t quantized_bytes_cuda(int64_t T, int64_t I);
int quantize_cuda(void* quantized, const float* x_TI, int64_t T, int64_t I, Stream stream);

// y_TO's columns from `column` on, of rows of `stride` numbers: x W^T + bias, added to what is there if `accumulate`.
// The bits do not depend on T. bias_O may be null.
int matmul_cuda(float* y_TO, const void* quantized, const void* packed, const float* bias_O, int32_t format, int64_t T,
                int64_t O, int64_t I, int64_t column, int64_t stride, int accumulate, Stream stream);

// The same on weights in bfloat16, rows of O times I, for T <= 16; x is rounded to it. I is a multiple of 8.
int dense_cuda(float* y_TO, const float* x_TI, const void* w_OI, const float* bias_O, int64_t T, int64_t O, int64_t I,
               int64_t column, int64_t stride, int accumulate, Stream stream);

int embed_cuda(float* x_TD, const void* packed, const int64_t* token_T, int32_t format, int64_t T, int64_t O, int64_t D,
               Stream stream);

// Rows of numbers -----------------------------------------------------------------------------------------------------

int rms_norm_cuda(float* out_TD, const float* x_TD, const float* weight_D, int64_t T, int64_t D, float eps,
                  Stream stream);
int silu_mul_cuda(float* act_TF, const float* x_T2F, int64_t T, int64_t F, Stream stream);

// Places of tokens sorted by their expert, in the order of the tokens within one: token order_T[starts_E1[e]] is the
// first of expert e's. An expert < 0 or >= E is nobody's: those tokens are left out.
int group_by_expert_cuda(int64_t* order_T, int64_t* starts_E1, const int64_t* expert_T, int64_t T, int64_t E,
                         Stream stream);

// Attention -----------------------------------------------------------------------------------------------------------

// A layer's k_cache and v_cache hold pages of G heads, each B tokens of kv_width_cuda(A) numbers in bfloat16: a token's
// key is one run of bytes, and what A lacks to that width is zeros. 0 for widths that are not served.
int64_t kv_width_cuda(int64_t A);

int rope_angles_cuda(float* cos, float* sin, const int64_t* position_T, const double* inv_freq, int64_t T, int64_t half,
                     double scale, Stream stream);
int rope_store_cuda(float* q_THA, void* k_cache, void* v_cache, const float* qkv_TX, const float* cos, const float* sin,
                    const int64_t* slot_T, int64_t T, int64_t H, int64_t G, int64_t A, int64_t half, int64_t B,
                    Stream stream);
int move_kv_cuda(void* k_cache, void* v_cache, const int64_t* from_T, const int64_t* to_T, int64_t T, int64_t G,
                 int64_t A, int64_t B, Stream stream);

// As attention_cpu, on keys and values in bfloat16, to which queries and probabilities are rounded. A head that sees
// a number that is not finite is NaN, other heads of the row are as without it. `workspace` has
// attention_bytes_cuda(T, S, H, G, A, table_stride * B) bytes; what it holds is anything.
int64_t attention_bytes_cuda(int64_t T, int64_t S, int64_t H, int64_t G, int64_t A, int64_t most_tokens);
int attention_cuda(float* out_THA, const float* q_THA, const void* k_cache, const void* v_cache, const int32_t* table,
                   const int64_t* row_S, const int64_t* starts_S1, const int64_t* lengths_S, const int64_t* ancestors_T,
                   void* workspace, int64_t T, int64_t S, int64_t H, int64_t G, int64_t A, int64_t B,
                   int64_t table_stride, float scale, int64_t window, Stream stream);

// The draw ------------------------------------------------------------------------------------------------------------

int argmax_cuda(int64_t* id_L, const float* x_LV, int64_t L, int64_t V, Stream stream);

// As draw_cpu, to the same ids. rules_L and what it points to lie in device memory; min_p holds its logarithm, which
// libraries round differently, or -infinity. `workspace` has draw_bytes_cuda.
int64_t draw_bytes_cuda(int64_t L, int64_t V);
int draw_cuda(int64_t* id_L, const float* x_LV, const DrawRules* rules_L, void* workspace, int64_t L, int64_t V,
              Stream stream);

}  // extern "C"
