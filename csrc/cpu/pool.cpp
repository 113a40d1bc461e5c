#include "pool.h"

#include <pthread.h>
#include <sched.h>
#include <signal.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <cstdlib>
#include <mutex>
#include <system_error>
#include <thread>
#include <vector>

#include "../kernels.h"

namespace quire {
namespace {

using Task = void (*)(void* context, int64_t index);
using Clock = std::chrono::steady_clock;

// Waking a sleeping worker takes about 50 us, a kernel of one token 5 to 500, and what lies between two kernels a few:
// a worker that watches for this long sleeps between tokens, not between kernels.
constexpr auto PATIENCE = std::chrono::microseconds(100);

thread_local bool inside = false;   // this thread runs a task now

void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    asm volatile("yield");
#endif
}

// Watches until done() or for PATIENCE. Says whether it is done.
template <class Done>
bool watch(Done done) {
    const auto end = Clock::now() + PATIENCE;
    do {
        for (int i = 0; i < 16; i++) {
            if (done()) return true;
            relax();
        }
    } while (Clock::now() < end);
    return false;
}

int num_cpus() {
#if defined(__linux__)
    cpu_set_t open;     // on machines of more than 1024 CPUs the call fails
    if (sched_getaffinity(0, sizeof open, &open) == 0) return CPU_COUNT(&open);
#endif
    const int count = std::thread::hardware_concurrency();
    return count ? count : 1;
}

class Pool {
public:
    explicit Pool(int num_threads) : num_threads_(num_threads) {}

    int num_threads() const { return num_threads_.load(std::memory_order_relaxed); }
    void run(int64_t num_tasks, Task task, void* context);
    void resize(int num_threads);

private:
    void start();
    void work();
    void take_tasks();
    bool nothing_to_do() const { return !uint32_t(ticket_.load()) && !stopping_.load(); }

    std::mutex callers_;
    std::atomic<int> num_threads_;
    std::vector<std::thread> workers_;
    std::mutex sleep_;
    std::condition_variable wake_;
    std::atomic<int> num_asleep_{0};
    std::atomic<bool> stopping_{false};

    // The call in progress. These three change only while no task is left to take.
    std::atomic<Task> task_{nullptr};
    std::atomic<void*> context_{nullptr};
    std::atomic<int64_t> num_tasks_{0};

    alignas(64) std::atomic<uint64_t> ticket_{0};       // the call's number << 32 | how many tasks nobody has taken
    alignas(64) std::atomic<int64_t> num_unfinished_{0};
};

void Pool::run(int64_t num_tasks, Task task, void* context) {
    std::lock_guard<std::mutex> one_call(callers_);
    if (workers_.empty()) start();
    task_.store(task, std::memory_order_relaxed);
    context_.store(context, std::memory_order_relaxed);
    num_tasks_.store(num_tasks, std::memory_order_relaxed);
    num_unfinished_.store(num_tasks, std::memory_order_relaxed);
    ticket_.store(((ticket_.load() >> 32) + 1) << 32 | num_tasks);
    // Both are sequentially consistent, as in work(): either we see that it sleeps or it sees the tasks.
    if (num_asleep_.load()) {
        std::lock_guard<std::mutex> lock(sleep_);
        wake_.notify_all();
    }
    inside = true;
    take_tasks();
    inside = false;
    // A worker that took a task may have lost its core, perhaps to us.
    const auto all_done = [this] { return num_unfinished_.load(std::memory_order_acquire) == 0; };
    while (!watch(all_done)) std::this_thread::yield();
}

void Pool::take_tasks() {
    uint64_t ticket = ticket_.load(std::memory_order_acquire);
    while (const uint32_t num_left = uint32_t(ticket)) {
        const Task task = task_.load(std::memory_order_relaxed);
        void* const context = context_.load(std::memory_order_relaxed);
        const int64_t index = num_tasks_.load(std::memory_order_relaxed) - num_left;
        // The exchange fails if `ticket` is of an earlier call, from which we may have read anything.
        if (!ticket_.compare_exchange_weak(ticket, ticket - 1, std::memory_order_acq_rel)) continue;
        task(context, index);
        num_unfinished_.fetch_sub(1, std::memory_order_release);
        ticket = ticket_.load(std::memory_order_acquire);
    }
}

void Pool::work() {
    inside = true;
    while (!stopping_.load()) {
        take_tasks();
        if (watch([this] { return !nothing_to_do(); })) continue;
        std::unique_lock<std::mutex> lock(sleep_);
        num_asleep_++;
        wake_.wait(lock, [this] { return !nothing_to_do(); });
        num_asleep_--;
    }
}

// Starts the workers. With fewer threads than wanted, if there are no more: the caller can do all tasks alone.
void Pool::start() {
    sigset_t all, before;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);    // signals are for the program's own threads
    try {
        while (int(workers_.size()) < num_threads() - 1) workers_.emplace_back([this] { work(); });
    } catch (const std::system_error&) {
    }
    pthread_sigmask(SIG_SETMASK, &before, nullptr);
}

void Pool::resize(int num_threads) {
    std::lock_guard<std::mutex> no_call(callers_);
    if (num_threads == num_threads_) return;
    stopping_ = true;
    {
        std::lock_guard<std::mutex> lock(sleep_);
        wake_.notify_all();
    }
    for (auto& worker : workers_) worker.join();
    workers_.clear();
    stopping_ = false;
    num_threads_ = num_threads;
}

// Never destroyed: at exit the workers, asleep or watching, end with the process. A child of fork() has no workers and
// perhaps locks that nobody will open: it begins with a pool of its own.
Pool* pool = [] {
    pthread_atfork(nullptr, nullptr, [] { pool = new Pool(pool->num_threads()); });
    return new Pool(num_cpus());
}();

}  // namespace

int num_threads() { return pool->num_threads(); }

void parallel(int64_t num_tasks, Task task, void* context) {
    if (num_tasks > 1 && !inside && num_threads() > 1) return pool->run(num_tasks, task, context);
    for (int64_t index = 0; index < num_tasks; index++) task(context, index);
}

void* workspace(int slot, int64_t bytes) {
    struct Memory {
        void* start = nullptr;
        int64_t bytes = 0;
        ~Memory() { std::free(start); }
    };
    thread_local Memory memories[NUM_SLOTS];
    Memory& memory = memories[slot];
    if (bytes > memory.bytes) {
        std::free(memory.start);
        memory.bytes = (bytes + 63) / 64 * 64;
        memory.start = std::aligned_alloc(64, memory.bytes);
        if (!memory.start) memory.bytes = 0;
    }
    return memory.start;
}

}  // namespace quire

int set_threads_cpu(int64_t num_threads) {
    if (num_threads < 0 || num_threads > 4096) return BAD_SIZE;
    quire::pool->resize(num_threads ? int(num_threads) : quire::num_cpus());
    return OK;
}
