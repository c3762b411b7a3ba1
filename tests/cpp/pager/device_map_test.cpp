#include "pager/device_map.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <map>
#include <memory>
#include <random>
#include <set>
#include <string>
#include <vector>

#include "base/bytes.h"

namespace trainstream {
namespace {

constexpr StreamId kHome = 0;
// Of the last uses below, 1 to 8, half are newborn then.
constexpr uint64_t kNow = kNewbornTicks + 4;

char g_owner;

void* as_pointer(uintptr_t address) { return reinterpret_cast<void*>(address); }

StoragePtr storage_at(uintptr_t address, size_t size_bytes, uint64_t last_use, bool movable) {
    auto storage = std::make_shared<Storage>(size_bytes, kHome, as_pointer(address));
    storage->touch(last_use);
    storage->owner = movable ? &g_owner : nullptr;
    return storage;
}

uintptr_t address_of(const StoragePtr& storage) {
    return reinterpret_cast<uintptr_t>(storage->device_address());
}

constexpr size_t kUnit = kBlockAlignment;

/// An allocator that knows nothing but units of kUnit bytes and who has each, and a search of all
/// windows over them. Best fit from the low end; a rest of up to `slack` units is not split off.
class PlainMemory {
public:
    PlainMemory(std::mt19937_64& random, size_t slack) : slack_(slack) {
        uintptr_t at = 1000 * kUnit;
        for (uint64_t r = 0; r < 1 + random() % 3; ++r) {
            const size_t units = 1 + random() % 40;
            regions_.push_back({at, at + units * kUnit});
            owners_.emplace_back(units, nullptr);
            at =
                regions_.back().end + random() % 3 * kUnit;  // They may touch; no window spans two.
        }
    }

    const std::vector<Region>& regions() const { return regions_; }
    const std::vector<StoragePtr>& blocks() const { return blocks_; }

    /// Null: no room.
    StoragePtr allocate(size_t size_bytes, uint64_t last_use, bool movable) {
        const size_t units = align_up(size_bytes, kUnit) / kUnit;
        Run best{0, 0, SIZE_MAX};
        for (const Run& run : runs([](const Storage* owner) { return owner == nullptr; })) {
            best = run.units >= units && run.units < best.units ? run : best;
        }
        if (best.units == SIZE_MAX) {
            return nullptr;
        }
        const size_t taken = best.units - units <= slack_ ? best.units : units;
        const StoragePtr storage = storage_at(regions_[best.region].begin + best.begin * kUnit,
                                              size_bytes, last_use, movable);
        std::fill_n(owners_[best.region].begin() + static_cast<int64_t>(best.begin), taken,
                    storage.get());
        blocks_.push_back(storage);
        std::sort(blocks_.begin(), blocks_.end(), [](const StoragePtr& x, const StoragePtr& y) {
            return address_of(x) < address_of(y);
        });
        return storage;
    }

    StoragePtr free_one(std::mt19937_64& random) {
        const auto block = blocks_.begin() + static_cast<int64_t>(random() % blocks_.size());
        StoragePtr storage = *block;
        blocks_.erase(block);
        for (auto& owners : owners_) {
            std::replace(owners.begin(), owners.end(), storage.get(),
                         static_cast<Storage*>(nullptr));
        }
        return storage;
    }

    bool has_gap(size_t need) const {
        const auto gaps = runs([](const Storage* owner) { return owner == nullptr; });
        return std::any_of(gaps.begin(), gaps.end(),
                           [&](const Run& run) { return run.units * kUnit >= need; });
    }

    struct Window {
        uint64_t heat = UINT64_MAX;
        uint64_t bytes = UINT64_MAX;
    };

    /// What is to be known of the blocks [first, last].
    Window window(size_t first, size_t last) const {
        Window window{0, 0};
        for (size_t i = first; i <= last; ++i) {
            window.heat = std::max(window.heat, blocks_[i]->heat(kNow));
            window.bytes += blocks_[i]->size_bytes();
        }
        return window;
    }

    Window best_window(size_t need) const {
        Window best;
        for (size_t first = 0; first < blocks_.size(); ++first) {
            for (size_t last = first; last < blocks_.size(); ++last) {
                const Window other = window(first, last);
                if (gives(first, last, need) &&
                    std::pair(other.heat, other.bytes) < std::pair(best.heat, best.bytes)) {
                    best = other;
                }
            }
        }
        return best;
    }

    /// Whether the blocks [first, last] may leave, and leave `need` bytes in a row.
    bool gives(size_t first, size_t last, size_t need) const {
        std::set<const Storage*> leaving = {nullptr};
        for (size_t i = first; i <= last; ++i) {
            if (!blocks_[i]->movable()) {
                return false;
            }
            leaving.insert(blocks_[i].get());
        }
        for (const Run& run :
             runs([&](const Storage* owner) { return leaving.count(owner) != 0; })) {
            const uintptr_t begin = regions_[run.region].begin + run.begin * kUnit;
            const Region bytes{begin, begin + run.units * kUnit};
            if (bytes.contains(address_of(blocks_[first])) &&
                bytes.contains(address_of(blocks_[last]))) {
                return run.units * kUnit >= need;
            }
        }
        return false;  // They are in two regions.
    }

private:
    struct Run {
        size_t region;
        size_t begin;
        size_t units;
    };

    /// The runs of units whose owners `counts` counts.
    template <typename Counts>
    std::vector<Run> runs(const Counts& counts) const {
        std::vector<Run> found;
        for (size_t region = 0; region < owners_.size(); ++region) {
            const auto& owners = owners_[region];
            for (size_t begin = 0; begin < owners.size();) {
                size_t end = begin;
                while (end < owners.size() && counts(owners[end])) {
                    ++end;
                }
                if (end > begin) {
                    found.push_back({region, begin, end - begin});
                }
                begin = end + 1;
            }
        }
        return found;
    }

    const size_t slack_;
    std::vector<Region> regions_;
    std::vector<std::vector<Storage*>> owners_;  // Of each unit of each region.
    std::vector<StoragePtr> blocks_;             // By address.
};

/// The map's answer is a window that serves, and none is better.
void expect_best_window(const PlainMemory& memory, const DeviceMap& map, size_t need) {
    const PlainMemory::Window best = memory.best_window(need);
    const std::vector<StoragePtr> victims = map.coldest_window(memory.regions(), need, kNow);
    ASSERT_EQ(victims.empty(), best.heat == UINT64_MAX);
    if (victims.empty()) {
        return;
    }
    const auto begin = std::find(memory.blocks().begin(), memory.blocks().end(), victims.front());
    ASSERT_TRUE(std::equal(victims.begin(), victims.end(), begin));
    const auto first = static_cast<size_t>(begin - memory.blocks().begin());
    const size_t last = first + victims.size() - 1;
    ASSERT_TRUE(memory.gives(first, last, need));
    ASSERT_EQ(memory.window(first, last).heat, best.heat);
    ASSERT_EQ(memory.window(first, last).bytes, best.bytes);
}

// Goal: the map knows which bytes are free, rests that were not split off included; a gap is seen
// exactly when it is there, and the window is the coldest, of equals the smallest. Method: blocks
// come and go in small random regions; a search over single units is the model.
TEST(DeviceMapTest, GapsAndWindowsAgreeWithASearchOfAllUnits) {
    const uint64_t seed = std::random_device{}();
    SCOPED_TRACE("seed " + std::to_string(seed));
    std::mt19937_64 random(seed);
    int gaps = 0;
    int windows = 0;
    for (int round = 0; round < 400; ++round) {
        const size_t slack = random() % 4;
        PlainMemory memory(random, slack);
        DeviceMap map(slack * kUnit);
        for (int step = 0; step < 25; ++step) {
            if (memory.blocks().empty() || random() % 3 != 0) {
                const size_t size_bytes = 1 + random() % (8 * kUnit);
                const StoragePtr storage =
                    memory.allocate(size_bytes, 1 + random() % 8, random() % 6 != 0);
                if (storage != nullptr) {
                    map.insert(storage);
                }
            } else {
                map.erase(memory.free_one(random)->device_address());
            }
            const size_t need = slack * kUnit + 1 + random() % (12 * kUnit);
            ASSERT_EQ(map.has_gap(memory.regions(), need), memory.has_gap(need));
            expect_best_window(memory, map, need);
            if (HasFatalFailure()) {
                return;
            }
            gaps += memory.has_gap(need) ? 1 : 0;
            windows += map.coldest_window(memory.regions(), need, kNow).empty() ? 0 : 1;
        }
    }
    EXPECT_GT(gaps, 2000);
    EXPECT_LT(gaps, 8000);
    EXPECT_GT(windows, 4000);
}

// Goal: a hole of just the right size is one. Method: of three equal neighbours the middle one
// goes.
TEST(DeviceMapTest, HoleOfTheSameSizeIsAGap) {
    constexpr size_t kSize = 32 * kMiB;
    DeviceMap map(kMiB);
    const std::vector<Region> regions = {{kSize, 4 * kSize}};
    for (const uintptr_t i : {1u, 2u, 3u}) {
        map.insert(storage_at(i * kSize, kSize, i, true));
    }
    EXPECT_FALSE(map.has_gap(regions, kSize));

    map.erase(as_pointer(2 * kSize));

    EXPECT_TRUE(map.has_gap(regions, kSize));
    EXPECT_FALSE(map.has_gap(regions, kSize + 1));
}

// Goal: a rest that went with its block is not free, even when the neighbour leaves.
TEST(DeviceMapTest, RestThatWasNotSplitOffLeavesWithItsBlock) {
    DeviceMap map(kMiB);
    const std::vector<Region> regions = {{0x1000000, 0x1000000 + 10 * kMiB}};
    map.insert(storage_at(0x1000000 + 5 * kMiB, 5 * kMiB, 1, true));
    map.insert(storage_at(0x1000000, 4 * kMiB, 2, true));  // Takes the hole of 5 MiB.

    map.erase(as_pointer(0x1000000 + 5 * kMiB));

    EXPECT_TRUE(map.has_gap(regions, 5 * kMiB));
    EXPECT_FALSE(map.has_gap(regions, 5 * kMiB + 1));
    EXPECT_EQ(map.coldest_window(regions, 10 * kMiB, kNow).size(), 1u);
}

TEST(DeviceMapTest, BytesAndMovablesFollowInsertAndErase) {
    DeviceMap map(0);
    const StoragePtr movable = storage_at(0x1000, 100, 1, true);
    const StoragePtr barrier = storage_at(0x2000, 50, 1, false);
    map.insert(movable);
    map.insert(barrier);
    EXPECT_EQ(map.bytes(), 150u);
    EXPECT_EQ(map.movable(), std::vector<StoragePtr>{movable});

    map.erase(as_pointer(0x1000));

    EXPECT_EQ(map.bytes(), 50u);
    EXPECT_TRUE(map.movable().empty());
    EXPECT_EQ(map.blocks().size(), 1u);
}

// Goal: without a region there is neither a gap nor a window. Method: blocks outside of all.
TEST(DeviceMapTest, HighestGapIsTheHighestThatFits) {
    DeviceMap map(0);
    const std::vector<Region> regions = {{100 * kUnit, 110 * kUnit}, {200 * kUnit, 220 * kUnit}};
    map.insert(storage_at(205 * kUnit, 5 * kUnit, 1, true));
    const auto gap_of = [&](size_t units) {
        const std::optional<Region> gap = map.highest_gap(regions, units * kUnit);
        return gap.has_value() ? std::pair(gap->begin / kUnit, gap->end / kUnit)
                               : std::pair(0ul, 0ul);
    };
    EXPECT_EQ(gap_of(3), std::pair(210ul, 220ul));
    map.insert(storage_at(212 * kUnit, 8 * kUnit, 1, true));
    EXPECT_EQ(gap_of(2), std::pair(210ul, 212ul));
    EXPECT_EQ(gap_of(3), std::pair(200ul, 205ul));
    EXPECT_EQ(gap_of(6), std::pair(100ul, 110ul));
    EXPECT_EQ(gap_of(11), std::pair(0ul, 0ul));
}

TEST(DeviceMapTest, AWallIsNeitherFreeNorMovable) {
    DeviceMap map(0);
    const std::vector<Region> regions = {{100 * kUnit, 120 * kUnit}};
    map.insert(storage_at(100 * kUnit, 5 * kUnit, 1, true));
    map.insert(storage_at(115 * kUnit, 5 * kUnit, 2, true));
    map.add_wall({106 * kUnit, 112 * kUnit});
    EXPECT_TRUE(map.has_gap(regions, 3 * kUnit));
    EXPECT_FALSE(map.has_gap(regions, 4 * kUnit));
    EXPECT_EQ(map.coldest_window(regions, 6 * kUnit, kNow).size(), 1u);  // One side of it.
    EXPECT_EQ(map.coldest_window(regions, 8 * kUnit, kNow).size(), 1u);  // The other.
    EXPECT_TRUE(map.coldest_window(regions, 9 * kUnit, kNow).empty());
    map.remove_wall(106 * kUnit);
    EXPECT_TRUE(map.has_gap(regions, 10 * kUnit));
    EXPECT_FALSE(map.coldest_window(regions, 20 * kUnit, kNow).empty());
}

TEST(DeviceMapTest, BlocksOutsideOfTheRegionsDoNotCount) {
    DeviceMap map(0);
    map.insert(storage_at(0x1000, 100, 1, true));
    EXPECT_FALSE(map.has_gap({}, 1));
    EXPECT_TRUE(map.coldest_window({}, 1, kNow).empty());
    EXPECT_TRUE(map.coldest_window({{0x2000, 0x3000}}, 1, kNow).empty());
    EXPECT_TRUE(map.has_gap({{0x2000, 0x3000}}, 0x1000));
    EXPECT_FALSE(map.has_gap({{0x2000, 0x3000}}, 0x1001));
}

#ifdef TS_DEBUG_CHECKS
TEST(DeviceMapDeathTest, TwoBlocksAtOneAddressStopTheProgram) {
    DeviceMap map(0);
    map.insert(storage_at(0x1000, 100, 1, true));
    EXPECT_DEATH(map.insert(storage_at(0x1000, 50, 1, true)), "inserted");
    EXPECT_DEATH(map.erase(as_pointer(0x2000)), "check failed");
}
#endif

/// A map that answered questions all along, against one that is asked for the first time.
TEST(DeviceMapTest, GapsAreThoseOfAMapThatIsAskedForTheFirstTime) {
    std::mt19937_64 random(3);
    const std::vector<std::vector<Region>> layouts = {
        {{100 * kUnit, 200 * kUnit}},
        {{100 * kUnit, 140 * kUnit}, {140 * kUnit, 150 * kUnit}, {160 * kUnit, 220 * kUnit}},
    };
    for (int walk = 0; walk < 50; ++walk) {
        DeviceMap asked(0);
        std::map<uintptr_t, StoragePtr> blocks;  // By unit.
        std::map<uintptr_t, uintptr_t> walls;
        const auto is_free = [&](uintptr_t begin, uintptr_t end) {
            bool free = true;
            for (const auto& [at, block] : blocks) {
                free = free && (at + block->size_bytes() / kUnit <= begin || at >= end);
            }
            for (const auto& [from, to] : walls) {
                free = free && (to <= begin || from >= end);
            }
            return free;
        };
        for (int i = 0; i < 200; ++i) {
            const uintptr_t begin = 90 + random() % 140;  // Some lie outside.
            const uintptr_t end = begin + 1 + random() % 12;
            if (blocks.count(begin) != 0) {
                asked.erase(blocks.at(begin)->device_address());
                blocks.erase(begin);
            } else if (walls.count(begin) != 0) {
                asked.remove_wall(begin * kUnit);
                walls.erase(begin);
            } else if (is_free(begin, end) && random() % 4 == 0) {
                asked.add_wall({begin * kUnit, end * kUnit});
                walls.emplace(begin, end);
            } else if (is_free(begin, end)) {
                blocks[begin] = storage_at(begin * kUnit, (end - begin) * kUnit, 1, true);
                asked.insert(blocks[begin]);
            }
            DeviceMap fresh(0);
            for (const auto& [at, block] : blocks) {
                fresh.insert(block);
            }
            for (const auto& [from, to] : walls) {
                fresh.add_wall({from * kUnit, to * kUnit});
            }
            const std::vector<Region>& regions = layouts[random() % 8 == 0 ? 1 : 0];
            for (const size_t need : {kUnit, 3 * kUnit, 8 * kUnit, 20 * kUnit}) {
                ASSERT_EQ(asked.highest_gap(regions, need), fresh.highest_gap(regions, need))
                    << "walk " << walk << ", step " << i;
            }
        }
    }
}

}  // namespace
}  // namespace trainstream
