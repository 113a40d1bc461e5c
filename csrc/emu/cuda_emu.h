// CUDA on the CPU, for tests: a .cu file compiled by g++ against this header runs without a device.
//
// Each thread of a block is a fiber; blocks run one after another. A warp runs to a barrier of its block before the
// next one begins; which begins is a matter of `order`: a kernel that lacks a barrier gives other numbers in one of the
// two orders. Where threads of a block wait in different places, or some wait and others have ended, `launch` says so
// with file and line and returns DEVICE_ERROR; a device would hang. Shared memory begins as NaN, ends where the launch
// says it ends (AddressSanitizer sees a step further), and what cp.async brings arrives when it is waited for, or at
// once. What a device refuses is refused, with the reason: a launch of more shared memory than a block may have
// (`block_bytes`, of sm_90 unless a test says otherwise), of too large or empty grids and blocks; a mask that names
// lanes which the warp does not have.
//
// Not modelled: masks that leave lanes out (all of a warp must come), how many registers a block may have,
// time, caches, the order of global memory, how a tensor core rounds inside a product (here: once).
// Start at `launch`, at the end.
#pragma once
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <vector>

#include <sys/mman.h>
#if defined(__x86_64__) && !defined(EMULATOR_UCONTEXT)
#define EMULATOR_ASSEMBLY   // switches stacks forty times as fast as ucontext, which asks the system
#endif
#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#endif
#ifndef EMULATOR_ASSEMBLY
#include <ucontext.h>
#endif

#include "../kernels.h"

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x = 1, unsigned y = 1, unsigned z = 1) : x(x), y(y), z(z) {}
};
struct alignas(8) uint2 { unsigned x, y; };
struct alignas(16) uint4 { unsigned x, y, z, w; };
struct alignas(8) int2 { int x, y; };
struct alignas(16) int4 { int x, y, z, w; };
struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
typedef void* cudaStream_t;

namespace emu {

constexpr int WARP = 32;
constexpr size_t STACK_BYTES = 256 << 10;

struct Copy {
    void* to;
    const void* from;
    int bytes;      // of 16; the rest is zeros

    void arrive() const {
        memset(to, 0, 16);
        if (bytes) memcpy(to, from, bytes);
    }
};

enum State { READY, AT_WARP, AT_BLOCK, REFUSED, DONE };

struct Fiber {
    char* stack = nullptr;
#ifdef EMULATOR_ASSEMBLY
    void* top = nullptr;            // of the stack, where it was left
#else
    ucontext_t context;
#endif
    dim3 thread;
    int number = 0;                 // in its block
    State state = DONE;
    const char* file = "";          // where it waits
    int line = 0;
    unsigned num_exchanged = 0;
    std::vector<std::vector<Copy>> groups;      // committed; the last is still open
};

// What the lanes of a warp show each other: two tables by turns, so that one barrier an exchange is enough.
struct Warp {
    alignas(16) char shown[2][WARP][32];
};

struct Machine {
    std::vector<Fiber> fibers;
    std::vector<Warp> warps;
    Fiber* now = nullptr;
    dim3 block, grid_size, block_size;
    char* shared = nullptr;
    std::function<void()> body;
    int order = 0;                  // 0: lowest thread first, 1: highest first
    size_t block_bytes = 227 << 10; // of shared memory, at most
    char error[512] = "";
#ifdef EMULATOR_ASSEMBLY
    void* top = nullptr;            // of the scheduler's own stack
#else
    ucontext_t context;
#endif
};
inline Machine machine;

// Fibers --------------------------------------------------------------------------------------------------------------

#ifdef EMULATOR_ASSEMBLY
// Leaves the stack whose top is then *from, and goes on where `to` was left.
__attribute__((naked, noinline)) inline void switch_stack(void** /*from*/, void* /*to*/) {
    asm("push %rbp; push %rbx; push %r12; push %r13; push %r14; push %r15\n"
        "mov %rsp, (%rdi); mov %rsi, %rsp\n"
        "pop %r15; pop %r14; pop %r13; pop %r12; pop %rbx; pop %rbp; ret");
}
#endif

#ifdef __SANITIZE_ADDRESS__
inline void entering(const void* stack, size_t bytes, void** fake) {
    __sanitizer_start_switch_fiber(fake, stack, bytes);
}
inline void entered(void* fake) { __sanitizer_finish_switch_fiber(fake, nullptr, nullptr); }
#else
inline void entering(const void*, size_t, void**) {}
inline void entered(void*) {}
#endif

struct SchedulerStack {     // as AddressSanitizer wants to know it
    const void* bottom = nullptr;
    size_t bytes = 0;
};
inline SchedulerStack scheduler_stack;

// Back to the scheduler, until it resumes this fiber.
inline void yield(State state, const char* file, int line) {
    Fiber& self = *machine.now;
    self.state = state, self.file = file, self.line = line;
    void* fake = nullptr;
    entering(scheduler_stack.bottom, scheduler_stack.bytes, state == DONE ? nullptr : &fake);
#ifdef EMULATOR_ASSEMBLY
    switch_stack(&self.top, machine.top);
#else
    swapcontext(&self.context, &machine.context);
#endif
    entered(fake);
}

inline void start() {
#ifdef __SANITIZE_ADDRESS__
    __sanitizer_finish_switch_fiber(nullptr, &scheduler_stack.bottom, &scheduler_stack.bytes);
#endif
    machine.body();
    yield(DONE, "", 0);
}

inline void prepare(Fiber& fiber) {
    if (!fiber.stack)
        fiber.stack = (char*)mmap(nullptr, STACK_BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
#ifdef __SANITIZE_ADDRESS__
    __asan_unpoison_memory_region(fiber.stack, STACK_BYTES);    // a fiber may have been left in the middle
#endif
#ifdef EMULATOR_ASSEMBLY
    void** top = (void**)(fiber.stack + STACK_BYTES - 64);      // a function finds its stack 8 off a multiple of 16
    *--top = nullptr;
    *--top = (void*)start;
    fiber.top = top - 6;
#else
    getcontext(&fiber.context);
    fiber.context.uc_stack.ss_sp = fiber.stack;
    fiber.context.uc_stack.ss_size = STACK_BYTES;
    makecontext(&fiber.context, start, 0);
#endif
    fiber.state = READY;
    fiber.num_exchanged = 0;
    fiber.groups.assign(1, {});
}

inline void resume(Fiber& fiber) {
    machine.now = &fiber;
    void* fake = nullptr;
    entering(fiber.stack, STACK_BYTES, &fake);
#ifdef EMULATOR_ASSEMBLY
    switch_stack(&machine.top, fiber.top);
#else
    swapcontext(&machine.context, &fiber.context);
#endif
    entered(fake);
}

// Barriers ------------------------------------------------------------------------------------------------------------

inline int lane() { return machine.now->number % WARP; }

// Whether fibers `first` to `end` all wait in `state` at one place; then they may go on.
inline bool release(State state, size_t first, size_t end) {
    const Fiber& leader = machine.fibers[first];
    for (size_t i = first; i < end; i++) {
        const Fiber& fiber = machine.fibers[i];
        if (fiber.state != state || fiber.line != leader.line || strcmp(fiber.file, leader.file)) return false;
    }
    for (size_t i = first; i < end; i++) machine.fibers[i].state = READY;
    return true;
}

inline void describe(const Fiber& fiber, char* text, size_t bytes) {
    if (fiber.state == DONE) snprintf(text, bytes, "thread %d has ended", fiber.number);
    else snprintf(text, bytes, "thread %d waits at %s:%d%s", fiber.number, fiber.file, fiber.line,
                  fiber.state == AT_WARP ? " for its warp" : "");
}

// Nobody can go on: says which two threads do not meet, unless one was refused and has said why.
inline int diverged(size_t num_threads) {
    const std::vector<Fiber>& fibers = machine.fibers;
    for (size_t t = 0; t < num_threads; t++)
        if (fibers[t].state == REFUSED) return DEVICE_ERROR;
    size_t a = 0;
    while (fibers[a].state == DONE) a++;
    const size_t first = fibers[a].state == AT_WARP ? a / WARP * WARP : 0;
    const size_t end = fibers[a].state == AT_WARP && first + WARP < num_threads ? first + WARP : num_threads;
    size_t b = first;
    while (b + 1 < end && fibers[b].state == fibers[a].state && fibers[b].line == fibers[a].line &&
           !strcmp(fibers[b].file, fibers[a].file)) b++;
    char one[200], other[200];
    describe(fibers[a], one, sizeof one);
    describe(fibers[b], other, sizeof other);
    snprintf(machine.error, sizeof machine.error, "divergent barrier in block (%u, %u, %u): %s, %s", machine.block.x,
             machine.block.y, machine.block.z, one, other);
    return DEVICE_ERROR;
}

// Each warp runs as far as it can, that is to a barrier of the block, before the next begins.
inline int run_block(size_t num_threads) {
    const size_t num_warps = (num_threads + WARP - 1) / WARP;
    const auto nth = [](size_t n, size_t num) { return machine.order ? num - 1 - n : n; };
    for (;;) {
        for (size_t w = 0; w < num_warps; w++) {
            const size_t first = nth(w, num_warps) * WARP;
            const size_t end = first + WARP < num_threads ? first + WARP : num_threads;
            do {
                for (size_t n = 0; n < end - first; n++) {
                    Fiber& fiber = machine.fibers[first + nth(n, end - first)];
                    if (fiber.state == READY) resume(fiber);
                }
            } while (release(AT_WARP, first, end));
        }
        size_t num_done = 0;
        for (size_t t = 0; t < num_threads; t++) num_done += machine.fibers[t].state == DONE;
        if (num_done == num_threads) return OK;
        if (!release(AT_BLOCK, 0, num_threads)) return diverged(num_threads);
    }
}

// A mask may name only lanes that the warp has: a block's last may have fewer than 32. Who names others stays here.
inline void expect_lanes(unsigned mask, const char* file, int line) {
    const size_t num_threads = size_t(machine.block_size.x) * machine.block_size.y * machine.block_size.z;
    const size_t first = size_t(machine.now->number / WARP) * WARP, num_lanes = num_threads - first;
    if (num_lanes >= WARP || mask >> num_lanes == 0) return;
    snprintf(machine.error, sizeof machine.error, "the mask %08x at %s:%d names lanes that a warp of %zu does not have",
             mask, file, line, num_lanes);
    for (;;) yield(REFUSED, file, line);
}

// Shows `mine` to the warp: the table of what all lanes showed.
template <class T>
const char (&exchange(const T& mine, unsigned mask, const char* file, int line))[WARP][32] {
    expect_lanes(mask, file, line);
    static_assert(sizeof(T) <= 32);
    Fiber& self = *machine.now;
    auto& table = machine.warps[self.number / WARP].shown[self.num_exchanged++ % 2];
    memcpy(table[lane()], &mine, sizeof(T));
    yield(AT_WARP, file, line);
    return table;
}

template <class T>
T read(const char* from) {
    T value;
    memcpy(&value, from, sizeof value);
    return value;
}

// Where a device would stop.
inline void expect_aligned(const void* p) {
    if (uintptr_t(p) % 16 == 0) return;
    fprintf(stderr, "thread %d of block %u: an address of cp.async or ldmatrix is no multiple of 16\n",
            machine.now->number, machine.block.x);
    abort();
}

template <class T>
T shuffle(const T& mine, int from_lane, unsigned mask, const char* file, int line) {
    return read<T>(exchange(mine, mask, file, line)[from_lane & (WARP - 1)]);
}

// What every device since 2012 has as limits of a launch.
inline bool refuses(dim3 grid, dim3 block, size_t shared_bytes) {
    const size_t num_threads = size_t(block.x) * block.y * block.z;
    const bool is_grid = grid.x && grid.y && grid.z && grid.x <= 0x7fffffff && grid.y <= 65535 && grid.z <= 65535;
    const bool is_block = num_threads >= 1 && num_threads <= 1024 && block.z <= 64;
    return !is_grid || !is_block || shared_bytes > machine.block_bytes;
}

// One block after another.
inline int launch(dim3 grid, dim3 block, size_t shared_bytes, std::function<void()> body) {
    if (refuses(grid, block, shared_bytes)) {
        snprintf(machine.error, sizeof machine.error,
                 "a grid of %u x %u x %u blocks of %u x %u x %u threads with %zu bytes of shared memory each, but "
                 "there are at most 2147483647 x 65535 x 65535 of 1024 threads with %zu bytes",
                 grid.x, grid.y, grid.z, block.x, block.y, block.z, shared_bytes, machine.block_bytes);
        return DEVICE_ERROR;
    }
    const size_t num_threads = size_t(block.x) * block.y * block.z;
    machine.body = std::move(body);
    machine.grid_size = grid, machine.block_size = block;
    if (machine.fibers.size() < num_threads) machine.fibers.resize(num_threads);
    machine.warps.resize((num_threads + WARP - 1) / WARP);
    for (unsigned i = 0; i < grid.x * grid.y * grid.z; i++) {
        machine.block = dim3(i % grid.x, i / grid.x % grid.y, i / grid.x / grid.y);
        void* shared = nullptr;
        if (posix_memalign(&shared, 128, shared_bytes ? shared_bytes : 1)) return NO_MEMORY;
        memset(shared, 0xff, shared_bytes);     // NaN, whatever is read
        machine.shared = (char*)shared;
        for (size_t t = 0; t < num_threads; t++) {
            Fiber& fiber = machine.fibers[t];
            prepare(fiber);
            fiber.number = int(t);
            fiber.thread = dim3(t % block.x, t / block.x % block.y, t / block.x / block.y);
        }
        const int status = run_block(num_threads);
        for (size_t t = 0; t < num_threads && status == OK; t++)
            for (const auto& group : machine.fibers[t].groups)
                if (!group.empty()) {
                    snprintf(machine.error, sizeof machine.error, "thread %zu ended before its cp.async arrived", t);
                    free(shared);
                    return DEVICE_ERROR;
                }
        free(shared);
        if (status != OK) return status;
    }
    return OK;
}

}  // namespace emu

// What a kernel sees --------------------------------------------------------------------------------------------------

#define threadIdx (emu::machine.now->thread)
#define blockIdx (emu::machine.block)
#define blockDim (emu::machine.block_size)
#define gridDim (emu::machine.grid_size)

#define EMU_HERE const char *file = __builtin_FILE(), int line = __builtin_LINE()

inline void __syncthreads(EMU_HERE) { emu::yield(emu::AT_BLOCK, file, line); }
inline void __syncwarp(unsigned mask = ~0u, EMU_HERE) {
    emu::expect_lanes(mask, file, line);
    emu::yield(emu::AT_WARP, file, line);
}

template <class T>
T __shfl_sync(unsigned mask, T x, int lane, EMU_HERE) { return emu::shuffle(x, lane, mask, file, line); }
template <class T>
T __shfl_xor_sync(unsigned mask, T x, int bits, EMU_HERE) {
    return emu::shuffle(x, emu::lane() ^ bits, mask, file, line);
}
template <class T>
T __shfl_up_sync(unsigned mask, T x, int by, EMU_HERE) {
    return emu::shuffle(x, emu::lane() < by ? emu::lane() : emu::lane() - by, mask, file, line);
}

inline unsigned __ballot_sync(unsigned mask, bool vote, EMU_HERE) {
    const auto& table = emu::exchange(vote, mask, file, line);
    unsigned votes = 0;
    for (int i = 0; i < emu::WARP; i++) votes |= unsigned(emu::read<bool>(table[i])) << i;
    return votes;
}
inline bool __any_sync(unsigned mask, bool vote, EMU_HERE) { return __ballot_sync(mask, vote, file, line) != 0; }

inline int __syncthreads_or(int vote, EMU_HERE) {
    static int any;
    emu::yield(emu::AT_BLOCK, file, line);
    any = 0;
    emu::yield(emu::AT_BLOCK, file, line);
    any |= vote;
    emu::yield(emu::AT_BLOCK, file, line);
    return any;
}

template <class T>
T atomicAdd(T* to, T x) {
    const T before = *to;
    *to += x;
    return before;
}
template <class T>
T atomicMin(T* to, T x) {
    const T before = *to;
    if (x < before) *to = x;
    return before;
}
template <class T>
T atomicMax(T* to, T x) {
    const T before = *to;
    if (x > before) *to = x;
    return before;
}

inline int __float_as_int(float x) { return emu::read<int>((const char*)&x); }
inline float __int_as_float(int x) { return emu::read<float>((const char*)&x); }
inline long long __double_as_longlong(double x) { return emu::read<long long>((const char*)&x); }
inline double __longlong_as_double(long long x) { return emu::read<double>((const char*)&x); }
inline int __popcll(unsigned long long x) { return __builtin_popcountll(x); }
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __clzll(long long x) { return x ? __builtin_clzll(x) : 64; }
inline int __ffs(int x) { return __builtin_ffs(x); }
inline int __ffsll(long long x) { return __builtin_ffsll(x); }

struct __nv_bfloat16 { uint16_t bits; };
struct __nv_bfloat162 { __nv_bfloat16 x, y; };
struct __half { uint16_t bits; };

inline float __bfloat162float(__nv_bfloat16 x) { return __int_as_float(int(uint32_t(x.bits) << 16)); }
inline __nv_bfloat16 __float2bfloat16_rn(float x) {
    const uint32_t bits = uint32_t(__float_as_int(x));
    return {uint16_t(x == x ? (bits + 0x7fff + (bits >> 16 & 1)) >> 16 : 0x7fff)};
}
inline __nv_bfloat162 __floats2bfloat162_rn(float x, float y) {
    return {__float2bfloat16_rn(x), __float2bfloat16_rn(y)};
}
inline __half __ushort_as_half(uint16_t bits) { return {bits}; }
inline float __half2float(__half x) {
    const uint32_t sign = uint32_t(x.bits & 0x8000) << 16, rest = uint32_t(x.bits & 0x7fff) << 13;
    if (rest >= 0x7c00u << 13) return __int_as_float(int(sign | 0x7f800000 | rest));
    return __int_as_float(int(sign | rest)) * 0x1p112f;     // moves the exponent's bias; makes subnormals normal
}

// ptx.cuh's instructions ----------------------------------------------------------------------------------------------

template <class T>
T load_once(const T* from) { return *from; }

// Copies arrive when they are waited for, or in the other order at once: who relies on neither is right.
inline void cp_async_16(void* to, const void* from, int bytes = 16) {
    emu::expect_aligned(to), emu::expect_aligned(from);
    const emu::Copy copy = {to, from, bytes};
    if (emu::machine.order) copy.arrive();
    emu::machine.now->groups.back().push_back(copy);
}
inline void cp_async_commit() { emu::machine.now->groups.push_back({}); }

template <int most_in_flight>
void cp_async_wait() {
    auto& groups = emu::machine.now->groups;
    while (int(groups.size()) - 1 > most_in_flight) {
        for (const emu::Copy& copy : groups.front())
            if (!emu::machine.order) copy.arrive();
        groups.erase(groups.begin());
    }
}

template <bool transposed>
void emu_ldmatrix(uint32_t (&to)[4], const void* row, const char* file, int line) {
    emu::expect_aligned(row);
    const auto& rows = emu::exchange(row, ~0u, file, line);
    const int lane = emu::lane();
    for (int i = 0; i < 4; i++) {
        uint16_t pair[2];
        for (int j = 0; j < 2; j++) {
            const int r = transposed ? lane % 4 * 2 + j : lane / 4, c = transposed ? lane / 4 : lane % 4 * 2 + j;
            pair[j] = emu::read<const uint16_t*>(rows[8 * i + r])[c];
        }
        memcpy(&to[i], pair, 4);
    }
    emu::yield(emu::AT_WARP, file, line);       // nobody overwrites what another still reads
}
inline void ldmatrix_x4(uint32_t (&to)[4], const void* row, EMU_HERE) { emu_ldmatrix<false>(to, row, file, line); }
inline void ldmatrix_x4_trans(uint32_t (&to)[4], const void* row, EMU_HERE) { emu_ldmatrix<true>(to, row, file, line); }

// Registers of a product (m = 16, n = 8): c[0], c[1] are row lane / 4, columns lane % 4 * 2 and the next; c[2], c[3]
// the same of row lane / 4 + 8. `multiply(a_of_row, b_of_column, upper half)` gives the sum of products of one element.
template <int NUM_A, int NUM_B, class Number, class Multiply>
void emu_mma(Number (&c)[4], const uint32_t (&a)[NUM_A], const uint32_t (&b)[NUM_B], Multiply multiply,
             const char* file, int line) {
    struct { uint32_t a[NUM_A], b[NUM_B]; } mine;
    memcpy(mine.a, a, sizeof mine.a);
    memcpy(mine.b, b, sizeof mine.b);
    const auto& shown = emu::exchange(mine, ~0u, file, line);
    const int lane = emu::lane();
    for (int i = 0; i < 4; i++) {
        const int row = lane / 4, column = lane % 4 * 2 + i % 2;
        const uint32_t *a_of[4], *b_of[4];      // of the four lanes that hold this row, or column
        for (int q = 0; q < 4; q++) {
            a_of[q] = (const uint32_t*)shown[row * 4 + q];
            b_of[q] = (const uint32_t*)shown[column * 4 + q] + NUM_A;
        }
        c[i] = multiply(a_of, b_of, i / 2, c[i]);
    }
}

inline void mma_bf16(float (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMU_HERE) {
    emu_mma(c, a, b, [](const uint32_t* const* a_of, const uint32_t* const* b_of, int upper, float c) {
        double sum = c;
        for (int half = 0; half < 2; half++)
            for (int q = 0; q < 4; q++)
                for (int j = 0; j < 2; j++) {
                    const auto number = [j](uint32_t two) { return __bfloat162float({uint16_t(two >> 16 * j)}); };
                    sum += double(number(a_of[q][2 * half + upper])) * double(number(b_of[q][half]));
                }
        return float(sum);
    }, file, line);
}

inline int emu_dot_bytes(uint32_t x, uint32_t y) {
    int sum = 0;
    for (int i = 0; i < 4; i++) sum += int(int8_t(x >> 8 * i)) * int(int8_t(y >> 8 * i));
    return sum;
}
inline void mma_s8(int (&c)[4], const uint32_t (&a)[4], const uint32_t (&b)[2], EMU_HERE) {     // k = 32
    emu_mma(c, a, b, [](const uint32_t* const* a_of, const uint32_t* const* b_of, int upper, int c) {
        for (int half = 0; half < 2; half++)
            for (int q = 0; q < 4; q++) c += emu_dot_bytes(a_of[q][2 * half + upper], b_of[q][half]);
        return c;
    }, file, line);
}
inline void mma_s8_k16(int (&c)[4], const uint32_t (&a)[2], const uint32_t (&b)[1], EMU_HERE) {
    emu_mma(c, a, b, [](const uint32_t* const* a_of, const uint32_t* const* b_of, int upper, int c) {
        for (int q = 0; q < 4; q++) c += emu_dot_bytes(a_of[q][upper], b_of[q][0]);
        return c;
    }, file, line);
}

#undef EMU_HERE

// Launching -----------------------------------------------------------------------------------------------------------

template <class T>
T& dynamic_shared() { return *reinterpret_cast<T*>(emu::machine.shared); }

template <class... Parameters, class... Arguments>
int launch(void (*kernel)(Parameters...), dim3 grid, dim3 block, size_t shared_bytes, cudaStream_t, Arguments... args) {
    return emu::launch(grid, block, shared_bytes, [=] { kernel(Parameters(args)...); });
}

inline int multiprocessors() { return 2; }

// For the tests.
extern "C" __attribute__((weak)) void emu_set_order(int order) { emu::machine.order = order; }
extern "C" __attribute__((weak)) void emu_set_block_bytes(int bytes) { emu::machine.block_bytes = size_t(bytes); }
extern "C" __attribute__((weak)) const char* emu_error() { return emu::machine.error; }
