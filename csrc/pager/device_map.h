// csrc/pager/device_map.h: managed storages in device memory by address, and which to evict.
//
// A request needs contiguous bytes, so evicting the coldest storages one by one may free plenty and
// serve nothing. The map looks for the window of neighbours whose hottest member is the coldest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <vector>

#include "device/device_memory.h"
#include "pager/storage.h"

namespace trainstream {

/// Owner: the pager. Lock: the pager's mutex. Invariant: blocks do not overlap.
class DeviceMap {
public:
    /// A storage and where the next one can begin.
    struct Block {
        StoragePtr storage;
        uintptr_t end;
    };

    /// The allocator does not split off a rest of up to `slack_bytes`: a block that leaves no more
    /// of its hole takes all of it, and keeps it when its neighbour leaves. Larger requests than
    /// that are what gaps and windows are exact for.
    explicit DeviceMap(size_t slack_bytes) : slack_bytes_(slack_bytes) {}

    void insert(const StoragePtr& storage);
    void erase(const void* device_address);
    const std::map<uintptr_t, Block>& blocks() const { return blocks_; }
    uint64_t bytes() const { return bytes_; }

    /// Whether some region has `need` free bytes in a row.
    bool has_gap(const std::vector<Region>& regions, size_t need) const;

    /// The movable storages to evict, by their heat at `now`, so that `need` bytes in a row become
    /// free; empty when no such window exists.
    std::vector<StoragePtr> coldest_window(const std::vector<Region>& regions, size_t need,
                                           uint64_t now) const;
    /// Every movable storage.
    std::vector<StoragePtr> movable() const;

private:
    const size_t slack_bytes_;
    std::map<uintptr_t, Block> blocks_;
    uint64_t bytes_ = 0;
};

}  // namespace trainstream
