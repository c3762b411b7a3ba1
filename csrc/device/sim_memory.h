// csrc/device/sim_memory.h: the simulated device's memory: a budgeted arena of real pages.
//
// Apart from SimDevice: copies and events need no arena, and the arena is tested with no thread.
#pragma once

#include <unordered_map>

#include "base/bytes.h"
#include "base/free_extents.h"
#include "base/mutex.h"
#include "device/device_memory.h"

namespace trainstream {

struct SimMemoryOptions {
    uint64_t budget_bytes = 0;
};

/// Best fit with coalescing in one arena as large as the budget, so that fragmentation is as real
/// as on a GPU. What is free cannot be read: a stale pointer faults at once.
///
/// Owner: whoever opened the device; it outlives every block.
/// Lock:  its own, of rank kMemory.
///
/// Invariants:
///   1. Blocks are whole pages; used_bytes() is their sum and never exceeds the budget.
///   2. A page is readable exactly while a block holds it, and a new block reads as zero.
class SimMemory final : public DeviceMemory {
public:
    explicit SimMemory(const SimMemoryOptions& options);
    ~SimMemory() override;
    SimMemory(const SimMemory&) = delete;
    SimMemory& operator=(const SimMemory&) = delete;

    void* allocate(size_t size_bytes, StreamId stream) override;
    void* allocate_high(size_t size_bytes, StreamId stream, const Region& gap) override;
    /// Requires: `address` came from allocate() and was not freed since.
    void free(void* address) noexcept override;

    std::vector<Region> regions(StreamId stream) const override;
    bool rebuild(StreamId stream) override;
    /// Blocks are whole pages.
    size_t slack_bytes() const override { return 4 * kKiB - 1; }

    uint64_t budget_bytes() const override { return budget_bytes_; }
    uint64_t peak_bytes() const override;
    uint64_t used_bytes() const;
    uint64_t refusals() const override;

private:
    enum class End : uint8_t { kLow, kHigh };

    void* take(size_t size_bytes, End end);
    const uint64_t budget_bytes_;
    const size_t page_bytes_;
    const size_t arena_bytes_;
    const uintptr_t arena_;

    mutable Mutex mutex_{LockRank::kMemory};
    FreeExtents free_ TS_GUARDED_BY(mutex_);
    std::unordered_map<uintptr_t, size_t> blocks_ TS_GUARDED_BY(mutex_);
    uint64_t used_bytes_ TS_GUARDED_BY(mutex_) = 0;
    uint64_t peak_bytes_ TS_GUARDED_BY(mutex_) = 0;
    uint64_t refusals_ TS_GUARDED_BY(mutex_) = 0;
};

}  // namespace trainstream
