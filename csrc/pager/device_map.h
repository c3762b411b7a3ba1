// csrc/pager/device_map.h: managed storages in device memory by address, and which to evict.
//
// A request needs contiguous bytes, so evicting the coldest storages one by one may free plenty and
// serve nothing. The map looks for the window of neighbours whose hottest member is the coldest.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

#include "device/device_memory.h"
#include "pager/storage.h"

namespace trainstream {

/// Owner: the pager. Lock: the pager's mutex.
///
/// Invariants:
///   1. Blocks and walls do not overlap.
///   2. `gaps_` are the bytes of `gap_regions_` that neither has.
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

    /// Memory that the pager took for frames: no storage has it, and it is not free.
    void add_wall(const Region& wall);
    void remove_wall(uintptr_t begin);

    /// Whether some region has `need` free bytes in a row.
    bool has_gap(const std::vector<Region>& regions, size_t need) const;
    /// The highest free bytes in a row that are so many. Nothing: there are none.
    std::optional<Region> highest_gap(const std::vector<Region>& regions, size_t need) const;

    /// The movable storages to evict, by their heat at `now`, so that `need` bytes in a row become
    /// free; empty when no such window exists.
    std::vector<StoragePtr> coldest_window(const std::vector<Region>& regions, size_t need,
                                           uint64_t now) const;
    /// Every movable storage.
    std::vector<StoragePtr> movable() const;

private:
    /// What takes a part of a region; `storage` is null for a wall.
    using Visitor = std::function<void(const Region&, const StoragePtr* storage)>;

    void for_each_in(const Region& region, const Visitor& visit) const;
    void add_gaps(const Region& region) const;
    void update_gaps(uintptr_t address);

    const size_t slack_bytes_;
    std::map<uintptr_t, Block> blocks_;
    std::map<uintptr_t, uintptr_t> walls_;  // Where each ends.
    uint64_t bytes_ = 0;
    // Kept from one question to the next, since every allocation asks and there are hundreds of
    // blocks: the gaps of these regions, and where each ends.
    mutable std::vector<Region> gap_regions_;
    mutable std::map<uintptr_t, uintptr_t> gaps_;
};

}  // namespace trainstream
