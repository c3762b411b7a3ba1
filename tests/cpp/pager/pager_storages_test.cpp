// The list of storages that reports are made of.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "base/bytes.h"
#include "support/pager_world.h"

namespace trainstream {
namespace {

using testing::FakeOwner;
using testing::PagerWorld;

constexpr size_t kBlock = 64 * kKiB;  // Four of them fill the default budget.

StorageInfo info_of(const PagerWorld& world, const FakeOwner* owner) {
    const std::vector<StorageInfo> list = world.pager.storages();
    const auto found = std::find_if(list.begin(), list.end(),
                                    [&](const StorageInfo& info) { return info.owner == owner; });
    EXPECT_NE(found, list.end());
    return found == list.end() ? StorageInfo() : *found;
}

// Goal: the list agrees with the totals. Method: six storages where four fit, one that no operator
// has named yet, one pinned for good.
TEST(PagerStoragesTest, ListAddsUpToTheTotals) {
    PagerWorld world;
    std::vector<FakeOwner*> owners;
    for (unsigned mark = 1; mark <= 6; ++mark) {
        owners.push_back(world.make(kBlock, mark));
    }
    world.pager.pin_for_good(owners[5], 0);
    owners.push_back(world.make_unknown(kBlock / 2, 7));

    uint64_t resident_bytes = 0;
    uint64_t cold_bytes = 0;
    size_t unknown = 0;
    for (const StorageInfo& info : world.pager.storages()) {
        const bool cold = info.residency == Residency::kCold;
        (cold ? cold_bytes : resident_bytes) += info.size_bytes;
        unknown += info.owner == nullptr ? 1 : 0;
        EXPECT_TRUE(!cold || (info.has_host_block && info.host_is_locked));
    }
    EXPECT_EQ(resident_bytes, world.pager.stats().resident_bytes);
    EXPECT_EQ(cold_bytes, world.pager.stats().cold_bytes);
    EXPECT_GT(cold_bytes, 0u);
    EXPECT_EQ(unknown, 1u);
    EXPECT_TRUE(info_of(world, owners[5]).pinned_for_good);
    for (FakeOwner* owner : owners) {
        world.port.drop(owner);
    }
    EXPECT_TRUE(world.pager.storages().empty());
}

TEST(PagerStoragesTest, RefusedPageLocksAreSeen) {
    PagerWorld world({.faults = {.page_lock_limit_bytes = 1}});
    FakeOwner* owner = world.make(kBlock, 1);
    world.pager.evict_all();
    const StorageInfo info = info_of(world, owner);
    EXPECT_EQ(info.residency, Residency::kCold);
    EXPECT_TRUE(info.has_host_block);
    EXPECT_FALSE(info.host_is_locked);
    world.port.drop(owner);
}

// Goal: what came in keeps its host copy until it is written, and the list shows it.
TEST(PagerStoragesTest, HostCopiesOfResidentStoragesAreSeen) {
    PagerWorld world;
    FakeOwner* owner = world.make(kBlock, 1);
    world.pager.evict_all();
    world.use(owner, UseKind::kBringIn);
    EXPECT_EQ(info_of(world, owner).residency, Residency::kResident);
    EXPECT_TRUE(info_of(world, owner).has_host_block);
    world.write(owner, 2);
    EXPECT_FALSE(info_of(world, owner).has_host_block);
    world.port.drop(owner);
}

}  // namespace
}  // namespace trainstream
