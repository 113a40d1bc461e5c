// The threads that all kernels share, and memory for what a kernel computes on its way.
#pragma once
#include <cstdint>
#include <type_traits>

namespace quire {

// Runs task(context, i) for i = 0 .. num_tasks - 1 (fewer than 2^32) on the caller and the workers; returns when all
// are done. Tasks are handed out one by one, in order: a core that others disturb takes fewer. Nested calls run inline.
void parallel(int64_t num_tasks, void (*task)(void* context, int64_t index), void* context);

// The same with a lambda: parallel(n, [&](int64_t i) { ... }).
template <class Body>
void parallel(int64_t num_tasks, Body&& body) {
    using Plain = std::remove_reference_t<Body>;
    parallel(num_tasks, [](void* context, int64_t index) { (*static_cast<Plain*>(context))(index); }, (void*)&body);
}

int num_threads();

// Memory that begins at a multiple of 64, for use inside one call: the calling thread's next request for the slot may
// move it. It is kept and grows. Null if there is no more.
enum Slot { ACTIVATIONS, ATTENTION, NUM_SLOTS };
void* workspace(int slot, int64_t bytes);

}  // namespace quire
