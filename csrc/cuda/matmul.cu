// y = x W^T on packed blocks (blocks.cuh), by whole sums on the tensor cores: mma.m16n8k32 on 8-bit numbers, weights as
// the 16 rows and rows of x as the 8 columns.
//
// The arithmetic of cpu/matmul.inc, group by group: the products of 32 inputs are summed exactly, as integers, then
// scaled and added by fma, in ascending order. Here y starts at 0 in every segment of 256 inputs, and the segments'
// sums are added in ascending order: so warps may share a row's inputs, and the result has the same bits for 1 row and
// for 1000. (Dequantizing to bfloat16 tiles would not: how a tensor core rounds inside a product is not told, and
// differs from any loop.)
//
// Up to 16 rows, `few_rows`: bound by memory, 2 T operations a weight, so at 4.5 bits a weight 3.6 T a byte. Each
// weight is read once: a warp has a segment in flight, scales and all (2.3 KB), while it computes on the one before. x
// is read again for each 16 outputs, 11 bytes an input for 8 rows beside 9 of weights, from the first cache as far as
// it has room: weights do not take any. No shared memory but for the sums of a round of segments.
// More rows, `many_rows`: tiles of 128 outputs x 64 rows; of a step 128 x 64 weights and 64 x 64 numbers of x come into
// shared memory by cp.async, three steps in flight: 2 * 128 * 64 * 64 operations for 10 KB read, 100 a byte. The two
// fmas that scale a sum of 32 products bound it beside the tensor cores.
#include "blocks.cuh"
#include "kernels.cuh"
#include "output.cuh"

namespace quire {
namespace {

constexpr int SEGMENT_STEPS = 4;
constexpr int WARPS = 8, THREADS = WARPS * WARP;

// x rounded -----------------------------------------------------------------------------------------------------------

// The four lanes of a row agree on the greatest.
__device__ int quad_max(int x) {
    for (int bits = 1; bits < 4; bits *= 2) {
        const int other = __shfl_xor_sync(ALL_LANES, x, bits);
        x = other > x ? other : x;
    }
    return x;
}
__device__ int quad_sum(int x) {
    for (int bits = 1; bits < 4; bits *= 2) x += __shfl_xor_sync(ALL_LANES, x, bits);
    return x;
}

// Grid: (tiles of 8 rows, steps by 8). A warp a step of a tile: lane l has row l / 4. Rows and inputs that do
// not exist are zeros.
__global__ void quantize(uint8_t* quantized, const float* x_TI, int64_t T, int64_t I, int64_t num_steps) {
    const int64_t step = int64_t(blockIdx.y) * WARPS + warp_id(), row = int64_t(blockIdx.x) * ROWS + lane_id() / 4;
    if (step >= num_steps) return;
    uint8_t* const own = quantized + (blockIdx.x * num_steps + step) * X_BYTES;
    for (int j = 0; j < 2; j++) {
        const int64_t group = step * STEP + GROUP * j;
        float x[2][4] = {};
        for (int half = 0; half < 2 && row < T && group < I; half++)
            for (int i = 0; i < 4; i++) x[half][i] = x_TI[row * I + group + 16 * half + lane_id() % 4 * 4 + i];
        int bits = 0;       // magnitudes compare as their bits do; what is not finite is larger than what is
        for (int n = 0; n < 8; n++) {
            const int magnitude = __float_as_int(x[n / 4][n % 4]) & 0x7fffffff;
            bits = magnitude > bits ? magnitude : bits;
        }
        const float largest = __int_as_float(quad_max(bits));
        const bool counts = largest >= 0x1p-120f && is_finite(largest);
        const float inverse = counts ? 127 / largest : 0;
        const float scale = counts ? largest / 127 : largest < 1 ? 0 : nan_number();
        int sums[2] = {};
        for (int half = 0; half < 2; half++) {
            uint32_t four = 0;
            for (int i = 0; i < 4; i++) {
                constexpr float TO_INTEGER = 0x1.8p23f;     // there float holds integers only
                const int q = counts ? int((x[half][i] * inverse + TO_INTEGER) - TO_INTEGER) : 0;
                four |= uint32_t(q & 0xff) << 8 * i;
                sums[half] += q;
            }
            reinterpret_cast<uint32_t*>(own)[lane_id() * 4 + 2 * j + half] = four;
            sums[half] = quad_sum(sums[half]);
        }
        if (lane_id() % 4) continue;
        const int at = ROWS * j + lane_id() / 4;
        reinterpret_cast<float*>(own + X_SCALES)[at] = scale;
        reinterpret_cast<float*>(own + X_SUMS)[at] = scale * (sums[0] + sums[1]);
        reinterpret_cast<int16_t*>(own + X_HALF_SUMS)[2 * at] = int16_t(sums[0]);
        reinterpret_cast<int16_t*>(own + X_HALF_SUMS)[2 * at + 1] = int16_t(sums[1]);
    }
}

// One product ---------------------------------------------------------------------------------------------------------

// What belongs to a lane's two columns, rows 2 (l % 4) and the next of a tile of x, in group j.
struct Columns {
    float scale[2], sum[2];
    int half_sums[2][2];

    __device__ void load(const uint8_t* x_step, int j, int q) {
        const float2 scales = *reinterpret_cast<const float2*>(x_step + X_SCALES + 32 * j + 8 * q);
        const float2 sums = *reinterpret_cast<const float2*>(x_step + X_SUMS + 32 * j + 8 * q);
        const uint2 halves = *reinterpret_cast<const uint2*>(x_step + X_HALF_SUMS + 32 * j + 8 * q);
        scale[0] = scales.x, scale[1] = scales.y, sum[0] = sums.x, sum[1] = sums.y;
        half_sums[0][0] = int16_t(halves.x), half_sums[0][1] = int16_t(halves.x >> 16);
        half_sums[1][0] = int16_t(halves.y), half_sums[1][1] = int16_t(halves.y >> 16);
    }
};

// y += the products of a group, for 16 outputs x 8 rows.
template <int F>
__device__ void add_group(float (&y)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], const Scales<F>& w,
                          const Columns& x) {
    constexpr int ZERO = Blocks<F>::FORM.zero;
    if constexpr (Blocks<F>::HALVED) {
        int first[4], last[4];
        for (int i = 0; i < 4; i++) {
            first[i] = -ZERO * x.half_sums[i % 2][0];
            last[i] = -ZERO * x.half_sums[i % 2][1];
        }
        mma_s8_k16(first, {a[0], a[1]}, {b[0]});
        mma_s8_k16(last, {a[2], a[3]}, {b[1]});
        for (int i = 0; i < 4; i++) {
            const int* const s = w.s[i / 2];
            y[i] = fmaf(float(s[0] * first[i] + s[1] * last[i]) * w.d[i / 2], x.scale[i % 2], y[i]);
            if constexpr (Blocks<F>::SCALING == Scaling::K16_MIN) {
                const int *const s_min = w.s_min[i / 2], *const sums = x.half_sums[i % 2];
                y[i] = fmaf(float(s_min[0] * sums[0] + s_min[1] * sums[1]) * -w.m[i / 2], x.scale[i % 2], y[i]);
            }
        }
    } else {
        // A sum that starts at the bits of 1.5 * 2^23 is a float without conversion: that number more than the sum.
        constexpr float MAGIC = 0x1.8p23f;
        int dot[4];
        for (int i = 0; i < 4; i++)
            dot[i] = 0x4b400000 - ZERO * (x.half_sums[i % 2][0] + x.half_sums[i % 2][1]);
        mma_s8(dot, a, b);
        for (int i = 0; i < 4; i++) {
            y[i] = fmaf(fmaf(__int_as_float(dot[i]), w.d[i / 2], -MAGIC * w.d[i / 2]), x.scale[i % 2], y[i]);
            if constexpr (Blocks<F>::HAS_MIN) y[i] = fmaf(x.sum[i % 2], w.m[i / 2], y[i]);
        }
    }
}

// Up to 16 rows -------------------------------------------------------------------------------------------------------

// What a lane reads of a panel's weights for a segment.
template <int F>
struct Segment {
    Raw<F> raw[SEGMENT_STEPS];
    RawScales<F> scales[SEGMENT_STEPS];
    RawHead<F> head;

    __device__ void load(const uint8_t* panel, int64_t segment, int64_t num_steps) {
        const int64_t first = segment * SEGMENT_STEPS;
        if (first < num_steps) head.load(panel + Blocks<F>::head_offset(first), lane_id() / 4, Once());
        for (int n = 0; n < SEGMENT_STEPS && first + n < num_steps; n++) {
            raw[n].load(panel + Blocks<F>::step_offset(first + n), lane_id(), Once());
            scales[n].load(panel + Blocks<F>::step_offset(first + n), lane_id() / 4, Once());
        }
    }
};
static_assert(STEPS_A_HEAD == SEGMENT_STEPS && ROUND_SEGMENTS % WARPS == 0);

// y += the products of a segment's step n; x_step is that of the first tile.
template <int F, int TILES>
__device__ void add_step(float (&y)[TILES][4], const Segment<F>& w, int n, const uint8_t* x_step, int64_t x_stride,
                         int64_t T) {
    const int lane = lane_id();
#pragma unroll
    for (int j = 0; j < 2; j++) {
        const Scales<F> scales(w.head, w.scales[n], j);
        uint32_t a[4];
        for (int r = 0; r < 4; r++) a[r] = w.raw[n].quants(j, r);
#pragma unroll
        for (int tile = 0; tile < TILES; tile++) {
            const uint8_t* const own = x_step + tile * x_stride;
            const int64_t num_rows = T - tile * ROWS;
            uint2 two = {};
            Columns columns = {};       // of rows that do not exist nothing is read
            if (lane / 4 < num_rows) two = *reinterpret_cast<const uint2*>(own + 16 * lane + 8 * j);
            if (lane % 4 * 2 < num_rows) columns.load(own, j, lane % 4);
            add_group<F>(y[tile], a, {two.x, two.y}, scales, columns);
        }
    }
}

// A block has one panel of outputs; its warps take the segments by turns.
template <int F, int TILES>
__global__ void __launch_bounds__(THREADS, 2) few_rows(Output out, const uint8_t* x, const uint8_t* packed, int64_t I) {
    const int64_t num_steps = Blocks<F>::steps(I), num_segments = divide_up(num_steps, SEGMENT_STEPS);
    const uint8_t* const panel = packed + blockIdx.x * Blocks<F>::panel_bytes(I);
    auto& shared = dynamic_shared<Sums<TILES>>();
    Total<TILES> total;

    Segment<F> next;
    next.load(panel, warp_id(), num_steps);
    for (int64_t first = 0; first < num_segments; first += ROUND_SEGMENTS) {
        const int64_t end = first + ROUND_SEGMENTS < num_segments ? first + ROUND_SEGMENTS : num_segments;
        for (int64_t segment = first + warp_id(); segment < end; segment += WARPS) {
            const Segment<F> w = next;
            next.load(panel, segment + WARPS, num_steps);
            float y[TILES][4] = {};
            const int64_t num_left = num_steps - segment * SEGMENT_STEPS;
            const uint8_t* const x_step = x + segment * SEGMENT_STEPS * X_BYTES;
#pragma unroll
            for (int n = 0; n < SEGMENT_STEPS; n++)
                if (n < num_left) add_step<F, TILES>(y, w, n, x_step + n * X_BYTES, num_steps * X_BYTES, out.T);
            shared.put(int(segment - first), y);
        }
        total.add(shared, int(end - first));
    }
    total.put(out, blockIdx.x);
}

// More rows -----------------------------------------------------------------------------------------------------------

constexpr int TILE_PANELS = 8, TILE_X = TILE_ROWS / ROWS, STAGES = 3;
constexpr int WARP_PANELS = 2, WARP_X = 4;      // of a warp; warps stand 4 x 2

template <int F>
struct alignas(128) Stage {
    uint8_t x[TILE_X][X_BYTES], w[TILE_PANELS][Blocks<F>::STEP_BYTES];
};

// A step of a tile into shared memory. Panels beyond the last are the last again; nobody stores what comes of them.
template <int F>
__device__ void fetch(Stage<F>& stage, const uint8_t* x, const uint8_t* packed, int64_t panel, int64_t last_panel,
                      int64_t step, int64_t num_steps, int64_t I) {
    constexpr int X_PIECES = X_BYTES / 16, W_PIECES = Blocks<F>::STEP_BYTES / 16;
    for (int n = threadIdx.x; n < TILE_X * X_PIECES; n += THREADS)
        cp_async_16(stage.x[n / X_PIECES] + n % X_PIECES * 16,
                    x + (n / X_PIECES * num_steps + step) * X_BYTES + n % X_PIECES * 16);
    for (int n = threadIdx.x; n < TILE_PANELS * W_PIECES; n += THREADS) {
        const int64_t from = panel + n / W_PIECES;
        cp_async_16(stage.w[n / W_PIECES] + n % W_PIECES * 16,
                    packed + (from < last_panel ? from : last_panel) * Blocks<F>::panel_bytes(I) +
                        Blocks<F>::step_offset(step) + n % W_PIECES * 16);
    }
}

template <int F>
__device__ void multiply(float (&y)[WARP_PANELS * WARP_X][4], const Stage<F>& stage,
                         const RawHead<F> (&heads)[WARP_PANELS], int first_panel, int first_x) {
    const int lane = lane_id();
    Raw<F> raw[WARP_PANELS];
    RawScales<F> scales[WARP_PANELS];
    for (int p = 0; p < WARP_PANELS; p++) {
        raw[p].load(stage.w[first_panel + p], lane, Again());
        scales[p].load(stage.w[first_panel + p], lane / 4, Again());
    }
#pragma unroll
    for (int j = 0; j < 2; j++) {
        uint32_t a[WARP_PANELS][4];
        for (int p = 0; p < WARP_PANELS; p++)
            for (int r = 0; r < 4; r++) a[p][r] = raw[p].quants(j, r);
        static_assert(WARP_PANELS == 2);
        const Scales<F> w[WARP_PANELS] = {{heads[0], scales[0], j}, {heads[1], scales[1], j}};
#pragma unroll
        for (int n = 0; n < WARP_X; n++) {
            const uint8_t* const x_step = stage.x[first_x + n];
            const uint2 two = *reinterpret_cast<const uint2*>(x_step + 16 * lane + 8 * j);
            Columns columns;
            columns.load(x_step, j, lane % 4);
            for (int p = 0; p < WARP_PANELS; p++) add_group<F>(y[p * WARP_X + n], a[p], {two.x, two.y}, w[p], columns);
        }
    }
}

// Grid: (tiles of rows, tiles of outputs): blocks that run side by side share their weights in cache.
template <int F>
__global__ void __launch_bounds__(THREADS) many_rows(Output out, const uint8_t* x_all, const uint8_t* packed,
                                                     int64_t I) {
    auto& stages = dynamic_shared<Stage<F>[STAGES]>();
    const int64_t num_steps = Blocks<F>::steps(I), panel = int64_t(blockIdx.y) * TILE_PANELS;
    const int64_t last_panel = num_panels(out.O) - 1;
    const uint8_t* const x = x_all + blockIdx.x * TILE_X * num_steps * X_BYTES;
    const int first_panel = warp_id() % 4 * WARP_PANELS, first_x = warp_id() / 4 * WARP_X;

    for (int n = 0; n < STAGES - 1; n++) {
        if (n < num_steps) fetch(stages[n], x, packed, panel, last_panel, n, num_steps, I);
        cp_async_commit();
    }
    float y[WARP_PANELS * WARP_X][4] = {}, total[WARP_PANELS * WARP_X][4] = {};
    RawHead<F> heads[WARP_PANELS];
    for (int64_t step = 0; step < num_steps; step++) {
        cp_async_wait<STAGES - 2>();
        __syncthreads();        // all see this step, and nobody needs the one before any more
        if (step + STAGES - 1 < num_steps)
            fetch(stages[(step + STAGES - 1) % STAGES], x, packed, panel, last_panel, step + STAGES - 1, num_steps, I);
        cp_async_commit();
        for (int p = 0; p < WARP_PANELS; p++) {
            const int64_t own = panel + first_panel + p;
            heads[p].load(packed + (own < last_panel ? own : last_panel) * Blocks<F>::panel_bytes(I) +
                              Blocks<F>::head_offset(step), lane_id() / 4, Again());
        }
        multiply(y, stages[step % STAGES], heads, first_panel, first_x);
        if ((step + 1) % SEGMENT_STEPS && step + 1 < num_steps) continue;
#pragma unroll
        for (int n = 0; n < WARP_PANELS * WARP_X; n++)
            for (int i = 0; i < 4; i++) total[n][i] += y[n][i], y[n][i] = 0;
    }

    const int lane = lane_id();
#pragma unroll
    for (int n = 0; n < WARP_PANELS * WARP_X; n++)
        for (int i = 0; i < 4; i++)
            out.put(int64_t(blockIdx.x) * TILE_ROWS + (first_x + n % WARP_X) * ROWS + lane % 4 * 2 + i % 2,
                    (panel + first_panel + n / WARP_X) * PANEL + lane / 4 + i / 2 * 8, total[n][i]);
}

template <int F>
int multiply(const Output& out, const uint8_t* x, const uint8_t* packed, int64_t I, cudaStream_t stream) {
    if (out.T > FEW_ROWS) {
        const dim3 grid(divide_up(out.T, TILE_ROWS), divide_up(num_panels(out.O), TILE_PANELS));
        return launch(many_rows<F>, grid, dim3(THREADS), sizeof(Stage<F>[STAGES]), stream, out, x, packed, I);
    }
    const int64_t tiles = divide_up(out.T, ROWS);
    return launch(tiles == 1 ? few_rows<F, 1> : few_rows<F, 2>, dim3(num_panels(out.O)), dim3(THREADS),
                  tiles == 1 ? sizeof(Sums<1>) : sizeof(Sums<2>), stream, out, x, packed, I);
}

}  // namespace
}  // namespace quire

using namespace quire;

int64_t quantized_bytes_cuda(int64_t T, int64_t I) { return x_tiles(T) * divide_up(I, STEP) * X_BYTES; }

int quantize_cuda(void* quantized, const float* x_TI, int64_t T, int64_t I, Stream stream) {
    if (T < 0 || I < 1 || I % GROUP) return BAD_SIZE;
    if (T == 0) return OK;
    const int64_t num_steps = divide_up(I, STEP);
    return launch(quantize, dim3(x_tiles(T), divide_up(num_steps, WARPS)), dim3(THREADS), 0, cudaStream_t(stream),
                  (uint8_t*)quantized, x_TI, T, I, num_steps);
}

int matmul_cuda(float* y_TO, const void* quantized, const void* packed, const float* bias_O, int32_t format, int64_t T,
                int64_t O, int64_t I, int64_t column, int64_t stride, int accumulate, Stream stream) {
    if (!pack_bytes_cuda(format, O, I)) return layout(format).quantized() ? BAD_SIZE : BAD_FORMAT;
    if (T < 0 || column < 0 || column + O > stride) return BAD_SIZE;
    if (T == 0) return OK;
    const Output out = {y_TO, bias_O, T, O, column, stride, accumulate};
    const auto *const x = (const uint8_t*)quantized, *const weights = (const uint8_t*)packed;
#define MULTIPLY(F) if (format == F) return multiply<F>(out, x, weights, I, cudaStream_t(stream));
    BLOCK_FORMATS(MULTIPLY)
    return BAD_FORMAT;
}
