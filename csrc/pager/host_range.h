// csrc/pager/host_range.h: one range of host addresses, committed and page-locked from its low end.
//
// Apart from the pool: this is how memory comes from the system, with no lock and no block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "device/device.h"

namespace trainstream {

/// Memory that one growth brought.
struct HostChunk {
    uintptr_t begin = 0;
    size_t size_bytes = 0;
    bool locked = false;
};

/// Huge pages on the device's NUMA node, touched by many threads, then locked: eight times as fast
/// as the runtime's own page-locked allocation (ARCHITECTURE.md, "Measured ground").
///
/// Owner: HostPool, which lets one thread at a time in. Lock: none.
///
/// Invariants:
///   1. Chunks lie end to end from the low end of the range.
///   2. Once a lock was refused, every later chunk is pageable: locked memory is one part, below.
class HostRange {
public:
    /// Reserves addresses, no memory. Throws Error(kOutOfMemory) when even those are refused.
    HostRange(Device& device, size_t size_bytes, int touch_threads);
    ~HostRange();  // No copy may still use the range.
    HostRange(const HostRange&) = delete;
    HostRange& operator=(const HostRange&) = delete;

    /// Commits the next `size_bytes`, whole pages. Nothing: the system has no memory.
    std::optional<HostChunk> commit(size_t size_bytes) noexcept;

    uintptr_t begin() const { return begin_; }

private:
    void touch(uintptr_t begin, size_t size_bytes) const noexcept;
    bool lock(uintptr_t begin, size_t size_bytes) noexcept;

    Device& device_;
    const size_t touch_threads_;
    void* mapping_ = nullptr;
    size_t mapping_bytes_ = 0;
    uintptr_t begin_ = 0;
    size_t committed_bytes_ = 0;
    size_t locked_bytes_ = 0;
    bool lock_refused_ = false;
    std::vector<uintptr_t> locked_chunks_;
};

}  // namespace trainstream
