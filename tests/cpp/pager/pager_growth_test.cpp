#include <gtest/gtest.h>

#include <vector>

#include "base/bytes.h"
#include "pager/pager.h"
#include "support/pager_world.h"

namespace trainstream {
namespace {

using testing::FakeOwner;
using testing::PagerWorld;

constexpr size_t kBlock = 64 * kKiB;  // Four of them fill the default budget.

// Goal: after two steps a storage that leaves takes the place of a copy that only spared another
// one, and no memory is locked. Method: six storages go out and in, so that host memory holds
// copies of resident ones; written ones then need blocks of their own.
TEST(PagerGrowthTest, AfterTwoStepsCopiesAreGivenUpBeforeMemoryIsLocked) {
    PagerWorld world;
    std::vector<FakeOwner*> owners;
    for (unsigned mark = 1; mark <= 6; ++mark) {
        owners.push_back(world.make(kBlock, mark));
    }
    for (int round = 0; round < 2; ++round) {
        for (unsigned i = 0; i < 6; ++i) {
            EXPECT_TRUE(world.reads(owners[i], i + 1, UseKind::kBringIn));
        }
        world.pager.step_done();
    }
    const HostPoolStats before = world.pager.host().stats();
    ASSERT_GT(before.locks, 0u);

    FakeOwner* fresh = world.make(kBlock, 7);  // Someone leaves for it.
    for (unsigned i = 0; i < 6; ++i) {
        EXPECT_TRUE(world.reads(owners[i], i + 1, UseKind::kBringIn));
    }

    const HostPoolStats after = world.pager.host().stats();
    EXPECT_EQ(after.locks, before.locks);
    EXPECT_EQ(after.growths, before.growths);
    EXPECT_TRUE(world.reads(fresh, 7));
    for (FakeOwner* owner : owners) {
        world.port.drop(owner);
    }
    world.port.drop(fresh);
    world.expect_nothing_left();
}

// Goal: the largest storage may leave late for the first time, and no memory is locked for it.
// Method: small ones leave in two steps while it stays; then it leaves too.
TEST(PagerGrowthTest, LargestStorageFindsRoomWhenItLeavesLate) {
    PagerWorld world;
    FakeOwner* small = world.make(kBlock / 2, 1);
    FakeOwner* large = world.make(2 * kBlock, 2);
    for (int round = 0; round < 2; ++round) {
        Pins stays;
        world.pager.begin_use({{large, false, UseKind::kInPlace}}, 0, &stays);
        EXPECT_EQ(world.pager.evict_all(), kBlock / 2);
        world.pager.end_use(&stays);
        EXPECT_TRUE(world.reads(small, 1, UseKind::kBringIn));
        world.pager.step_done();
    }
    const HostPoolStats before = world.pager.host().stats();

    EXPECT_EQ(world.pager.evict_all(), kBlock / 2 + 2 * kBlock);

    EXPECT_EQ(world.pager.host().stats().locks, before.locks);
    EXPECT_TRUE(world.reads(large, 2));
    world.port.drop(small);
    world.port.drop(large);
    world.expect_nothing_left();
}

// Goal: when no copy can be given up, memory is locked after all: right before frugal. Method:
// storages that left once and never came back, two steps, then more of them.
TEST(PagerGrowthTest, MemoryIsLockedWhenThereIsNoCopyToGiveUp) {
    PagerWorld world;
    std::vector<FakeOwner*> owners;
    const auto make = [&](unsigned first, unsigned last) {
        for (unsigned mark = first; mark <= last; ++mark) {
            owners.push_back(world.make(kBlock, mark));
        }
    };
    make(1, 5);
    world.pager.step_done();
    world.pager.step_done();
    const HostPoolStats before = world.pager.host().stats();

    make(6, 8);

    EXPECT_GT(world.pager.host().stats().in_use_bytes, before.in_use_bytes);
    EXPECT_EQ(world.pager.stats().born_cold_bytes, 0u);
    for (unsigned i = 0; i < 8; ++i) {
        EXPECT_TRUE(world.reads(owners[i], i + 1));
    }
    for (FakeOwner* owner : owners) {
        world.port.drop(owner);
    }
    world.expect_nothing_left();
}

}  // namespace
}  // namespace trainstream
