// csrc/allocator/pager_registry.h: which pager looks after which device's storages.
//
// A DataPtr's deleter and the operator guard are plain functions, so what they need is found here.
#pragma once

#include <array>
#include <atomic>
#include <optional>

#include <c10/core/Allocator.h>
#include <c10/core/Device.h>

#include "pager/pager.h"

namespace trainstream {

/// Owner: the process; never destroyed, since tensors may outlive every static object.
/// Lock:  none: each slot is written once.
class PagerRegistry {
public:
    static PagerRegistry& instance();

    void add(c10::Device device, Pager* pager);
    /// Null when nothing of that device is managed. The simulation's device is the CPU.
    Pager* find(c10::Device device) const;

    std::optional<c10::Device> device_of(const Pager& pager) const;

    template <typename Function>
    void for_each(const Function& function) const {
        const size_t count = slots_used_.load(std::memory_order_acquire);
        for (size_t slot = 0; slot < count; ++slot) {
            if (Pager* pager = slots_[slot].load(std::memory_order_acquire)) {
                function(*pager);
            }
        }
    }

    /// Pools of torch's that are open (graph captures, MemPool): only then can a stream be
    /// capturing.
    void pool_opened() { open_pools_.fetch_add(1); }
    void pool_closed() { open_pools_.fetch_sub(1); }
    bool pools_open() const { return open_pools_.load(std::memory_order_relaxed) > 0; }

    /// True in a forked child: its threads and its device are the parent's, so nothing is moved and
    /// nothing of the parent's is freed.
    bool forked() const { return forked_.load(std::memory_order_relaxed); }

private:
    PagerRegistry();

    // Slot 0 is the simulation, slot 1 + i is CUDA device i.
    std::array<std::atomic<Pager*>, 1 + 64> slots_{};
    std::atomic<size_t> slots_used_{0};  // Those from here on are empty.
    std::atomic<int> open_pools_{0};
    std::atomic<bool> forked_{false};
};

/// The deleter of every managed DataPtr, in whichever place it points to.
void managed_deleter(void* address);

}  // namespace trainstream
