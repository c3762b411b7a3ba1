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
    void insert(const StoragePtr& storage);
    void erase(const void* device_address);
    const std::map<uintptr_t, StoragePtr>& blocks() const { return blocks_; }
    uint64_t bytes() const { return bytes_; }

    /// Whether some region has `need` free bytes in a row. `slack` is what a block may take beyond
    /// its size (an allocator that does not split off small rests): it is reckoned after each
    /// block.
    bool has_gap(const std::vector<Region>& regions, size_t need, size_t slack) const;

    /// The movable storages to evict so that `need` bytes in a row become free; empty when no such
    /// window exists.
    std::vector<StoragePtr> coldest_window(const std::vector<Region>& regions, size_t need,
                                           size_t slack) const;
    /// Every movable storage.
    std::vector<StoragePtr> movable() const;

private:
    std::map<uintptr_t, StoragePtr> blocks_;
    uint64_t bytes_ = 0;
};

}  // namespace trainstream
