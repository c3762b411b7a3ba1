// csrc/pager/host_range.h: one range of host addresses, committed and page-locked from its low end.
//
// Apart from the pool: this is how memory comes from the system, with no lock and no block.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>

#include "device/device.h"

namespace trainstream {

/// Huge pages on the device's NUMA node, touched by many threads, then locked: eight times as fast
/// as the runtime's own page-locked allocation (ARCHITECTURE.md, "Measured ground").
///
/// Owner: HostPool. Lock: none, and no state beside the addresses: a fork may cut a commit off, and
///        the child then does it again.
class HostRange {
public:
    /// Reserves addresses, no memory. Throws Error(kOutOfMemory) when even those are refused.
    HostRange(Device& device, size_t size_bytes, int touch_threads);
    ~HostRange();  // Nothing in it is page-locked any more, and no copy uses it.
    HostRange(const HostRange&) = delete;
    HostRange& operator=(const HostRange&) = delete;

    uintptr_t begin() const { return begin_; }

    /// Makes memory of [begin, begin + size_bytes), whole pages. False: the system has none.
    bool commit(uintptr_t begin, size_t size_bytes) const noexcept;
    bool lock(uintptr_t begin, size_t size_bytes, std::string* reason) const noexcept;
    void unlock(uintptr_t begin) const noexcept;

private:
    void touch(uintptr_t begin, size_t size_bytes) const noexcept;

    Device& device_;
    const size_t touch_threads_;
    const size_t mapping_bytes_;
    void* mapping_ = nullptr;
    uintptr_t begin_ = 0;
};

}  // namespace trainstream
