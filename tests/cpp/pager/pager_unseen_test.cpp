// Kernels that nobody announces write to what was clean a moment before.
#include <gtest/gtest.h>

#include "support/pager_world.h"

namespace trainstream {
namespace {

using testing::FakeOwner;
using testing::PagerWorld;

/// A storage on the device whose host copy is right.
FakeOwner* make_clean(PagerWorld* world, unsigned mark) {
    FakeOwner* owner = world->make(32 * kKiB, mark);
    world->pager.evict_all();
    EXPECT_TRUE(world->reads(owner, mark, UseKind::kBringIn));
    EXPECT_TRUE(world->is_resident(owner));
    return owner;
}

std::vector<StoragePtr> begin_unseen(PagerWorld* world, FakeOwner* owner) {
    Pins passing;
    world->pager.begin_use({{owner, /*writes=*/true, UseKind::kMetadata, /*unseen=*/true}}, 0,
                           &passing);
    std::vector<StoragePtr> storages = world->pager.begin_unseen(passing, 0);
    world->pager.end_use(&passing);
    return storages;
}

/// Out and back by other operators' doing.
void make_clean_again(PagerWorld* world, FakeOwner* owner, unsigned mark) {
    world->pager.evict_all();
    EXPECT_TRUE(world->reads(owner, mark, UseKind::kBringIn));
}

TEST(PagerUnseenTest, WhatAnUnannouncedStepWritesIsKept) {
    PagerWorld world;
    FakeOwner* owner = make_clean(&world, 1);
    world.pager.begin_unseen_step(0);
    PagerWorld::fill(owner, 2);
    make_clean_again(&world, owner, 2);
    PagerWorld::fill(owner, 3);  // Once more, after it came back.
    world.pager.evict_all();
    world.pager.end_unseen_step();
    EXPECT_TRUE(world.reads(owner, 3, UseKind::kBringIn));
    world.port.drop(owner);
    world.expect_nothing_left();
}

TEST(PagerUnseenTest, WhatSuchAStepMakesIsKeptToo) {
    PagerWorld world;
    world.pager.begin_unseen_step(0);
    FakeOwner* owner = make_clean(&world, 1);
    PagerWorld::fill(owner, 2);
    world.pager.evict_all();
    world.pager.end_unseen_step();
    EXPECT_TRUE(world.reads(owner, 2, UseKind::kBringIn));
    world.port.drop(owner);
    world.expect_nothing_left();
}

TEST(PagerUnseenTest, WhatAFunctionWritesToItsArgumentsIsKept) {
    for (const bool leaves_within : {true, false}) {
        PagerWorld world;
        FakeOwner* owner = make_clean(&world, 1);
        const std::vector<StoragePtr> storages = begin_unseen(&world, owner);
        make_clean_again(&world, owner, 1);
        PagerWorld::fill(owner, 2);
        if (leaves_within) {
            world.pager.evict_all();
        }
        world.pager.end_unseen(storages);
        world.pager.evict_all();
        EXPECT_TRUE(world.reads(owner, 2, UseKind::kBringIn));
        world.port.drop(owner);
        world.expect_nothing_left();
    }
}

TEST(PagerUnseenTest, WhatAFunctionMakesIsKept) {
    for (const bool leaves_within : {true, false}) {
        PagerWorld world;
        FakeOwner* before = make_clean(&world, 7);
        const std::vector<StoragePtr> outer = world.pager.begin_unseen({}, 0);
        FakeOwner* owner = make_clean(&world, 1);  // By its owner's operators.
        const std::vector<StoragePtr> inner = world.pager.begin_unseen({}, 0);
        world.pager.end_unseen(inner);
        PagerWorld::fill(owner, 2);
        if (leaves_within) {
            world.pager.evict_all();
        }
        world.pager.end_unseen(outer);
        world.pager.evict_all();
        EXPECT_TRUE(world.reads(owner, 2, UseKind::kBringIn));
        world.port.drop(owner);
        world.port.drop(before);
        world.expect_nothing_left();
    }
}

TEST(PagerUnseenTest, WhatComesInDuringSuchAStepIsNotClean) {
    PagerWorld world;
    FakeOwner* owner = world.make(32 * kKiB, 1);
    world.pager.evict_all();
    world.pager.begin_unseen_step(0);
    EXPECT_TRUE(world.reads(owner, 1, UseKind::kBringIn));
    PagerWorld::fill(owner, 2);
    world.pager.end_unseen_step();
    world.pager.evict_all();
    EXPECT_TRUE(world.reads(owner, 2, UseKind::kBringIn));
    world.port.drop(owner);
    world.expect_nothing_left();
}

TEST(PagerUnseenTest, AnArgumentMayGoBeforeItsFunctionEnds) {
    PagerWorld world;
    FakeOwner* owner = make_clean(&world, 1);
    const std::vector<StoragePtr> storages = begin_unseen(&world, owner);
    make_clean_again(&world, owner, 1);
    world.port.drop(owner);
    world.pager.end_unseen(storages);
    world.expect_nothing_left();
}

TEST(PagerUnseenTest, OnceAllHaveEndedCleanStoragesLeaveWithoutACopy) {
    PagerWorld world;
    FakeOwner* owner = make_clean(&world, 1);
    world.pager.begin_unseen_step(0);
    const std::vector<StoragePtr> storages = begin_unseen(&world, owner);
    world.pager.end_unseen(storages);
    world.pager.end_unseen_step();
    make_clean_again(&world, owner, 1);
    const uint64_t copied = world.pager.stats().evicted_bytes;
    world.pager.evict_all();
    EXPECT_EQ(world.pager.stats().evicted_bytes, copied);
    world.port.drop(owner);
    world.expect_nothing_left();
}

}  // namespace
}  // namespace trainstream
