#include "pager/device_map.h"

#include <algorithm>
#include <deque>
#include <iterator>

#include "base/assert.h"
#include "base/bytes.h"

namespace trainstream {

namespace {

uintptr_t as_address(const void* pointer) { return reinterpret_cast<uintptr_t>(pointer); }

/// One region as a row of blocks: where each starts and where the next could.
struct Row {
    struct Item {
        uintptr_t begin;
        uintptr_t end;
        const StoragePtr* storage;  // Null: a wall.

        bool movable() const { return storage != nullptr && (*storage)->movable(); }
    };
    std::vector<Item> items;
    uintptr_t begin;
    uintptr_t end;

    /// Where the free bytes before item `i` begin.
    uintptr_t free_from(size_t i) const { return i == 0 ? begin : items[i - 1].end; }
    /// Where the free bytes after item `i - 1` end.
    uintptr_t free_to(size_t i) const { return i == items.size() ? end : items[i].begin; }
};

/// The best window of one row: items [first, last) leave, their hottest has `heat`.
struct Window {
    size_t first = 0;
    size_t last = 0;
    uint64_t heat = UINT64_MAX;
    uint64_t bytes = UINT64_MAX;
    bool better_than(const Window& other) const {
        return heat != other.heat ? heat < other.heat : bytes < other.bytes;
    }
};

/// Two ends moving over the row; a deque keeps the falling heats, so that its front is the hottest.
Window best_window(const Row& row, size_t need, uint64_t now) {
    Window best;
    std::deque<size_t> hottest;
    const auto heat_of = [&](size_t i) { return (*row.items[i].storage)->heat(now); };
    size_t first = 0;
    uint64_t bytes = 0;
    for (size_t last = 0; last < row.items.size(); ++last) {
        if (!row.items[last].movable()) {
            first = last + 1;
            bytes = 0;
            hottest.clear();
            continue;
        }
        const Storage& storage = **row.items[last].storage;
        bytes += storage.size_bytes();
        while (!hottest.empty() && heat_of(hottest.back()) <= storage.heat(now)) {
            hottest.pop_back();
        }
        hottest.push_back(last);
        // As short as it can be while it still gives the bytes.
        while (first < last && row.free_to(last + 1) - row.free_from(first + 1) >= need) {
            bytes -= (*row.items[first].storage)->size_bytes();
            if (hottest.front() == first) {
                hottest.pop_front();
            }
            ++first;
        }
        if (row.free_to(last + 1) - row.free_from(first) >= need) {
            const Window window{first, last + 1, heat_of(hottest.front()), bytes};
            best = window.better_than(best) ? window : best;
        }
    }
    return best;
}

}  // namespace

void DeviceMap::insert(const StoragePtr& storage) {
    const uintptr_t begin = as_address(storage->device_address());
    const uintptr_t end = align_up(begin + storage->size_bytes(), kBlockAlignment);
    const auto [block, inserted] = blocks_.emplace(begin, Block{storage, end});
    TS_ASSERT(inserted);
    static_cast<void>(inserted);
    bytes_ += storage->size_bytes();
    const auto next = std::next(block);
    if (next != blocks_.end() && next->first <= end + slack_bytes_) {
        block->second.end = next->first;
    }
    if (block != blocks_.begin()) {
        // Holes are filled from their low end: this one began here, so the block before ends here.
        uintptr_t& end_before = std::prev(block)->second.end;
        if (begin <= end_before + slack_bytes_) {
            end_before = begin;
        }
    }
    update_gaps(begin);
}

void DeviceMap::erase(const void* device_address) {
    const auto found = blocks_.find(as_address(device_address));
    TS_ASSERT(found != blocks_.end());
    bytes_ -= found->second.storage->size_bytes();
    blocks_.erase(found);
    update_gaps(as_address(device_address));
}

void DeviceMap::add_wall(const Region& wall) {
    walls_.emplace(wall.begin, wall.end);
    update_gaps(wall.begin);
}

void DeviceMap::remove_wall(uintptr_t begin) {
    walls_.erase(begin);
    update_gaps(begin);
}

void DeviceMap::for_each_in(const Region& region, const Visitor& visit) const {
    auto block = blocks_.lower_bound(region.begin);
    auto wall = walls_.lower_bound(region.begin);
    for (;;) {
        const bool has_block = block != blocks_.end() && block->first < region.end;
        const bool has_wall = wall != walls_.end() && wall->first < region.end;
        if (!has_block && !has_wall) {
            return;
        }
        if (has_wall && (!has_block || wall->first < block->first)) {
            visit({wall->first, std::min(wall->second, region.end)}, nullptr);
            ++wall;
            continue;
        }
        visit({block->first, std::min(block->second.end, region.end)}, &block->second.storage);
        ++block;
    }
}

void DeviceMap::add_gaps(const Region& region) const {
    uintptr_t free_from = region.begin;
    for_each_in(region, [&](const Region& taken, const StoragePtr* /*storage*/) {
        if (taken.begin > free_from) {
            gaps_.emplace(free_from, taken.begin);
        }
        free_from = taken.end;
    });
    if (region.end > free_from) {
        gaps_.emplace(free_from, region.end);
    }
}

/// What is at `address` came or went: nothing has changed beyond its neighbours.
void DeviceMap::update_gaps(uintptr_t address) {
    const auto region = std::find_if(gap_regions_.begin(), gap_regions_.end(),
                                     [&](const Region& one) { return one.contains(address); });
    if (region == gap_regions_.end()) {
        return;
    }
    Region part = *region;
    const auto narrow = [&](const auto& taken) {
        const auto at = taken.lower_bound(address);
        if (at != taken.begin()) {
            part.begin = std::max(part.begin, std::prev(at)->first);
        }
        const auto next = taken.upper_bound(address);
        if (next != taken.end()) {
            part.end = std::min(part.end, next->first);
        }
    };
    narrow(blocks_);
    narrow(walls_);
    gaps_.erase(gaps_.lower_bound(part.begin), gaps_.lower_bound(part.end));
    add_gaps(part);
}

bool DeviceMap::has_gap(const std::vector<Region>& regions, size_t need) const {
    return highest_gap(regions, need).has_value();
}

std::optional<Region> DeviceMap::highest_gap(const std::vector<Region>& regions,
                                             size_t need) const {
    if (regions != gap_regions_) {
        gap_regions_ = regions;
        gaps_.clear();
        for (const Region& region : regions) {
            add_gaps(region);
        }
    }
    for (auto gap = gaps_.rbegin(); gap != gaps_.rend(); ++gap) {
        if (gap->second - gap->first >= need) {
            return Region{gap->first, gap->second};
        }
    }
    return std::nullopt;
}

std::vector<StoragePtr> DeviceMap::coldest_window(const std::vector<Region>& regions, size_t need,
                                                  uint64_t now) const {
    Window best;
    Row best_row{};
    for (const Region& region : regions) {
        Row row{{}, region.begin, region.end};
        for_each_in(region, [&](const Region& taken, const StoragePtr* storage) {
            row.items.push_back({taken.begin, taken.end, storage});
        });
        const Window window = best_window(row, need, now);
        if (window.better_than(best)) {
            best = window;
            best_row = std::move(row);
        }
    }
    std::vector<StoragePtr> victims;
    for (size_t i = best.first; i < best.last; ++i) {
        victims.push_back(*best_row.items[i].storage);
    }
    return victims;
}

std::vector<StoragePtr> DeviceMap::movable() const {
    std::vector<StoragePtr> storages;
    for (const auto& [address, block] : blocks_) {
        if (block.storage->movable()) {
            storages.push_back(block.storage);
        }
    }
    return storages;
}

}  // namespace trainstream
