// csrc/pager/budget.h: the device and host bytes that a run may use, and whether it can fit.
#pragma once

#include <cstdint>

namespace trainstream {

/// What a run whose blocks are paged needs at once, term by term. Bytes.
struct MemoryNeed {
    uint64_t fixed_bytes = 0;     // Device: outside the blocks, there all the time.
    uint64_t resident_bytes = 0;  // Device: blocks that stay.
    uint64_t inflight_bytes = 0;  // Device: frames of paged blocks on their way.
    uint64_t paged_bytes = 0;     // Host: blocks that are paged.

    uint64_t device_bytes() const { return fixed_bytes + resident_bytes + inflight_bytes; }
};

/// Owner: the caller. Lock: none, a value.
struct Budget {
    uint64_t device_bytes = 0;
    uint64_t host_bytes = 0;
    /// False: nothing is refused, and the run shows whether it fits.
    bool check_memory = true;

    /// What plans fill: nine tenths of the device. The rest is for what no estimate knows of:
    /// fragments, workspaces, a longer batch.
    uint64_t device_target_bytes() const { return device_bytes / 10 * 9; }

    bool holds(const MemoryNeed& need) const;
    /// Throws Error(kOutOfMemory) with the arithmetic where `need` does not fit.
    void check(const MemoryNeed& need) const;
};

}  // namespace trainstream
