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

// Goal: a storage larger than any copy takes the place of several that lie side by side, and the
// pool does not grow. Method: after two steps of small ones a larger one leaves; besides the spare
// block only the copies of the small ones, which stay, could make room.
TEST(PagerGrowthTest, CopiesSideBySideMakeRoomForALargerStorage) {
    PagerWorld world({.budget_bytes = 16 * kBlock});
    std::vector<FakeOwner*> owners;
    for (unsigned mark = 1; mark <= 6; ++mark) {
        owners.push_back(world.make(kBlock, mark));
    }
    for (int round = 0; round < 2; ++round) {
        EXPECT_EQ(world.pager.evict_all(), 6 * kBlock);
        for (unsigned i = 0; i < 6; ++i) {
            EXPECT_TRUE(world.reads(owners[i], i + 1, UseKind::kBringIn));
        }
        world.pager.step_done();
    }
    const HostPoolStats before = world.pager.host().stats();
    FakeOwner* large = world.make(5 * kBlock / 2, 7);
    Pins stay;
    for (FakeOwner* owner : owners) {
        world.pager.begin_use({{owner, false, UseKind::kInPlace}}, 0, &stay);
    }

    EXPECT_EQ(world.pager.evict_all(), 5 * kBlock / 2);

    world.pager.end_use(&stay);
    const HostPoolStats after = world.pager.host().stats();
    EXPECT_EQ(after.locked_bytes, before.locked_bytes);
    EXPECT_EQ(after.growths, before.growths);
    EXPECT_EQ(after.joins, before.joins + 1);
    EXPECT_GE(after.in_use_bytes, 5 * kBlock / 2 + 3 * kBlock);  // At most three were given up.
    EXPECT_EQ(world.pager.evict_all(), 6 * kBlock);
    EXPECT_TRUE(world.reads(large, 7));
    world.port.drop(large);
    for (unsigned i = 0; i < 6; ++i) {
        EXPECT_TRUE(world.reads(owners[i], i + 1));
        world.port.drop(owners[i]);
    }
    world.expect_nothing_left();
}

// Goal: what lengths of other steps have left free, side by side, becomes room for a longer one.
// Method: after two steps short ones leave together and are freed; then one as long as two leaves.
TEST(PagerGrowthTest, FreeNeighboursOfOtherStepsAreJoinedBeforeMemoryIsAdded) {
    PagerWorld world;
    std::vector<FakeOwner*> owners;
    for (unsigned mark = 1; mark <= 4; ++mark) {
        owners.push_back(world.make(kBlock, mark));
    }
    EXPECT_EQ(world.pager.evict_all(), 4 * kBlock);
    world.pager.step_done();
    world.pager.step_done();
    for (FakeOwner* owner : owners) {
        world.port.drop(owner);
    }
    const HostPoolStats before = world.pager.host().stats();
    FakeOwner* large = world.make(3 * kBlock, 5);

    EXPECT_EQ(world.pager.evict_all(), 3 * kBlock);

    const HostPoolStats after = world.pager.host().stats();
    EXPECT_EQ(after.locked_bytes, before.locked_bytes);
    EXPECT_EQ(after.growths, before.growths);
    EXPECT_TRUE(world.reads(large, 5));
    world.port.drop(large);
    world.expect_nothing_left();
}

// Goal: memory that is locked late is one range for many sizes, not a chunk for each. Method: after
// two steps storages of ever other sizes are born cold, fewer bytes than the pool has touched.
TEST(PagerGrowthTest, WhatIsTouchedIsLockedAsOneOnceSizesVary) {
    PagerWorld world;
    FakeOwner* first = world.make(kBlock, 1);
    EXPECT_EQ(world.pager.evict_all(), kBlock);
    world.pager.step_done();
    world.pager.step_done();
    const HostPoolStats before = world.pager.host().stats();
    ASSERT_GT(before.ahead_bytes, kMiB);

    std::vector<FakeOwner*> owners;
    for (unsigned mark = 2; mark <= 8; ++mark) {
        owners.push_back(world.make(kBlock + mark * 4 * kKiB, mark));
    }
    EXPECT_GT(world.pager.evict_all(), 0u);

    const HostPoolStats after = world.pager.host().stats();
    EXPECT_EQ(after.locks, before.locks + 1);
    EXPECT_EQ(after.growths, before.growths);
    EXPECT_EQ(after.ahead_bytes, 0u);
    EXPECT_TRUE(world.reads(first, 1));
    world.port.drop(first);
    for (unsigned mark = 2; mark <= 8; ++mark) {
        EXPECT_TRUE(world.reads(owners[mark - 2], mark));
        world.port.drop(owners[mark - 2]);
    }
    world.expect_nothing_left();
}

}  // namespace
}  // namespace trainstream
