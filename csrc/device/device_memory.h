// csrc/device/device_memory.h: where device blocks come from, within a budget.
//
// Apart from Device: on CUDA the blocks are torch's caching allocator's (csrc/allocator), while
// copies and events need no torch. On the simulation both are SimDevice's.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "device/device.h"

namespace trainstream {

/// Addresses [begin, end) in which free neighbours join into one free block.
struct Region {
    uintptr_t begin = 0;
    uintptr_t end = 0;
    bool contains(uintptr_t address) const { return address >= begin && address < end; }
    bool operator==(const Region& other) const { return begin == other.begin && end == other.end; }
};

/// Owner: the allocator. Lock: its own; callers hold no pager lock.
class DeviceMemory {
public:
    virtual ~DeviceMemory() = default;

    /// A block of at least `size_bytes`, aligned to kBlockAlignment, that may be used by `stream`
    /// at once. Null: no room within the budget now. Never throws for lack of memory.
    virtual void* allocate(size_t size_bytes, StreamId stream) = 0;
    /// Likewise, at the high end of `gap`, which is free as far as the caller knows; elsewhere
    /// where that is not so.
    virtual void* allocate_high(size_t size_bytes, StreamId stream, const Region& /*gap*/) {
        return allocate(size_bytes, stream);
    }
    /// The block may be reused by its own stream's later work at once; callers order other streams.
    virtual void free(void* address) noexcept = 0;

    /// Work that `stream` has now uses the block: it is not reused before that is done.
    virtual void defer_reuse(void* /*address*/, StreamId /*stream*/) {}

    /// Where allocate() for `stream` looks for joined free blocks. Empty before pressure.
    virtual std::vector<Region> regions(StreamId stream) const = 0;
    /// Whether `stream` has no region yet and rebuild() could lay one out.
    virtual bool wants_rebuild(StreamId /*stream*/) const { return false; }
    /// Everything that can move has left: give unused memory back and lay one large region out.
    /// False when nothing changed.
    virtual bool rebuild(StreamId stream) = 0;

    /// Bytes taken from the device that lie outside the regions: a region was laid around what was
    /// in use, and blocks that left since had them.
    virtual uint64_t scattered_bytes() const { return 0; }
    /// What libraries keep in the regions for good, and make anew where they miss it, goes.
    /// Requires: no operator runs, and no graph was captured.
    virtual void clear_workspaces() {}
    /// Likewise rebuild(), but regions that nothing is in any more become parts of larger ones.
    /// Requires the same.
    virtual bool lay_anew() { return false; }
    /// Room for one more small block than there have been: how memory outside the regions is cut
    /// goes on changing for a step or two, and none is to be asked of the driver then.
    virtual void reserve_small_spare() {}

    /// What a block may take beyond the bytes asked for.
    virtual size_t slack_bytes() const { return 0; }
    /// Like allocate(), past the budget up to what the device has: for bytes that must be on it.
    virtual void* allocate_beyond_budget(size_t /*size_bytes*/, StreamId /*stream*/) {
        return nullptr;
    }

    /// Allocations that found no room, although they were asked for. Each may be dear.
    virtual uint64_t refusals() const { return 0; }
    virtual uint64_t budget_bytes() const = 0;
    /// Highest number of bytes taken from the device so far.
    virtual uint64_t peak_bytes() const = 0;
};

}  // namespace trainstream
