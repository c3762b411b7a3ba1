// Where blocks lie: what is large at one end, what is small at the other, frames below both.
#include <gtest/gtest.h>

#include <vector>

#include "support/pager_world.h"

namespace trainstream {
namespace {

using testing::FakeOwner;
using testing::PagerWorld;

/// A storage that an operator goes on working with.
class Held {
public:
    Held(PagerWorld& world, size_t size_bytes, unsigned mark)
        : owner(world.make(size_bytes, mark)), world_(world) {
        world.pager.begin_use({{owner, /*writes=*/false, UseKind::kBringIn}}, 0, &pins_);
    }
    void let_go() { world_.pager.end_use(&pins_); }
    void drop() {
        let_go();
        world_.port.drop(owner);
    }

    FakeOwner* const owner;

private:
    PagerWorld& world_;
    Pins pins_;
};

// The loss of a language model: logits, their float copy, its log-softmax; then backward's two of
// the same size. With 64 at a time and 224 in all there is room, if nothing lies in the middle.
TEST(PagerPlacementTest, ThreeLargeBlocksFitBesideWhatIsSmall) {
    PagerWorld world({.budget_bytes = 224 * kKiB});
    constexpr size_t kLarge = 64 * kKiB;
    FakeOwner* small = world.make(16 * kKiB, 1);
    FakeOwner* logits = world.make(24 * kKiB, 2);
    Held copy(world, kLarge, 3);
    Held softmax(world, kLarge, 4);
    copy.drop();
    Held gradient(world, kLarge, 5);
    Held third(world, kLarge, 6);
    EXPECT_TRUE(world.is_resident(third.owner));
    EXPECT_EQ(world.pager.stats().born_cold_bytes, 0u);
    EXPECT_TRUE(PagerWorld::has(softmax.owner, 4) && PagerWorld::has(gradient.owner, 5));
    softmax.drop();
    gradient.drop();
    third.drop();
    EXPECT_TRUE(world.reads(small, 1) && world.reads(logits, 2));
    world.port.drop(small);
    world.port.drop(logits);
    world.expect_nothing_left();
}

// The same where logits of half the size live until backward begins: at the high end they would
// leave a hole that serves none of the others.
TEST(PagerPlacementTest, WhatIsHalfAsLargeLiesElsewhere) {
    PagerWorld world({.budget_bytes = 224 * kKiB});
    constexpr size_t kLarge = 64 * kKiB;
    FakeOwner* small = world.make(16 * kKiB, 1);
    for (unsigned step = 0; step < 2; ++step) {
        const uint64_t before = world.pager.stats().evictions;
        Held logits(world, kLarge / 2, 2);
        Held copy(world, kLarge, 3);
        Held softmax(world, kLarge, 4);
        copy.drop();
        logits.drop();
        Held gradient(world, kLarge, 5);
        Held third(world, kLarge, 6);
        if (step > 0) {  // In the first nobody knows how large the others will be.
            EXPECT_TRUE(world.is_resident(third.owner));
            EXPECT_EQ(world.pager.stats().evictions, before);
        }
        softmax.drop();
        gradient.drop();
        third.drop();
    }
    EXPECT_TRUE(world.reads(small, 1));
    world.port.drop(small);
    world.expect_nothing_left();
}

TEST(PagerPlacementTest, ScatteredMemoryIsLaidAnewOnceBetweenSteps) {
    PagerWorld world({.budget_bytes = 256 * kKiB});
    std::vector<FakeOwner*> owners;
    for (unsigned i = 0; i < 6; ++i) {
        owners.push_back(world.make(32 * kKiB, i));
    }
    world.memory_door.scattered = 256 * kKiB / 64 - 1;
    world.pager.step_done();
    EXPECT_EQ(world.memory_door.laid_anew, 0);  // Too little to move everything for, in step 1.
    PagerWorld other({.budget_bytes = 256 * kKiB});
    FakeOwner* owner = other.make(32 * kKiB, 7);
    other.memory_door.scattered = 64 * kKiB;
    other.pager.step_done();
    EXPECT_EQ(other.memory_door.laid_anew, 1);
    EXPECT_TRUE(other.is_cold(owner));  // All that can has left.
    EXPECT_EQ(other.pager.stats().rebuilds, 1u);
    EXPECT_TRUE(other.reads(owner, 7, UseKind::kBringIn));
    other.pager.step_done();
    EXPECT_EQ(other.memory_door.laid_anew, 1);
    EXPECT_TRUE(other.is_resident(owner));
    other.port.drop(owner);
    other.expect_nothing_left();
    for (FakeOwner* each : owners) {
        world.port.drop(each);
    }
    world.expect_nothing_left();
}

TEST(PagerPlacementTest, NothingIsLaidAnewUnderWhatIsInUse) {
    enum class Case : uint8_t { kInUse, kCaptured, kThreads };
    for (const Case which : {Case::kInUse, Case::kCaptured, Case::kThreads}) {
        PagerWorld world({.budget_bytes = 256 * kKiB});
        world.memory_door.scattered = 64 * kKiB;
        FakeOwner* owner = world.make(32 * kKiB, 1);
        Pins pins;
        if (which == Case::kCaptured) {  // The graph may use what no storage tells of.
            world.pager.set_capturing(true);
            world.pager.set_capturing(false);
        } else if (which == Case::kThreads) {  // One may be between two operators.
            world.port.threads = 3;
        } else {  // By an operator of another thread.
            world.pager.begin_use({{owner, /*writes=*/false, UseKind::kBringIn}}, 0, &pins);
        }
        world.pager.step_done();
        EXPECT_EQ(world.memory_door.laid_anew, 0);
        EXPECT_TRUE(world.is_resident(owner));
        world.pager.end_use(&pins);
        world.port.drop(owner);
        world.expect_nothing_left();
    }
}

TEST(PagerPlacementTest, WhatTheMapHasRoomForIsNotRefused) {
    PagerWorld world({.budget_bytes = 256 * kKiB});
    std::vector<FakeOwner*> owners;
    for (unsigned i = 0; i < 40; ++i) {
        const size_t size_bytes = (4 + i * 13 % 61) * kKiB;
        owners.push_back(world.make(size_bytes, i));
        if (i % 3 == 2) {
            world.port.drop(owners[i / 2]);
            owners[i / 2] = world.make(8 * kKiB, i / 2);
        }
    }
    EXPECT_GT(world.pager.stats().evictions, 0u);
    EXPECT_EQ(world.pager.stats().refusals, 0u);
    for (FakeOwner* owner : owners) {
        world.port.drop(owner);
    }
    world.expect_nothing_left();
}

/// Layers that do not fit, used in turn and written, until their plan has frames.
class Planned {
public:
    Planned() {
        for (unsigned i = 0; i < 12; ++i) {
            layers_.push_back(world.make(32 * kKiB, i));
        }
        train();
    }
    ~Planned() {
        for (unsigned i = 0; i < layers_.size(); ++i) {
            EXPECT_TRUE(world.reads(layers_[i], i));
            world.port.drop(layers_[i]);
        }
        world.expect_nothing_left();
    }
    Planned(const Planned&) = delete;
    Planned& operator=(const Planned&) = delete;

    void train() {
        for (int step = 0; step < 4; ++step) {
            for (FakeOwner* layer : layers_) {
                world.use(layer, UseKind::kBringIn);
                world.pager.boundary();
            }
            for (FakeOwner* layer : layers_) {
                world.use(layer, UseKind::kOnce, /*writes=*/true);
                world.pager.boundary();
            }
            world.pager.step_done();
        }
    }

    PagerWorld world{{.budget_bytes = 256 * kKiB}};

private:
    std::vector<FakeOwner*> layers_;
};

TEST(PagerPlacementTest, TheArenaLeavesTheRestWhole) {
    Planned planned;
    const uint64_t arena_bytes = planned.world.pager.stats().arena_bytes;
    ASSERT_GT(arena_bytes, 0u);
    FakeOwner* rest = planned.world.make(256 * kKiB - arena_bytes, 99);
    EXPECT_TRUE(planned.world.is_resident(rest));
    EXPECT_EQ(planned.world.pager.stats().arena_bytes, arena_bytes);
    planned.world.port.drop(rest);
}

// Host memory is full, so nothing can be born there, and the arena was made smaller as often as it
// may be: then it is given up before an allocation fails.
TEST(PagerPlacementTest, ThePlanIsGivenUpBeforeAnAllocationFails) {
    Planned planned;
    PagerWorld& world = planned.world;
    constexpr size_t kMost = 256 * kKiB - 4 * kKiB;
    for (int i = 0; i < 2; ++i) {
        world.port.drop(world.make(kMost, 98));
        planned.train();
    }
    ASSERT_GT(world.pager.stats().arena_bytes, 4 * kKiB);
    std::vector<HostBlock> taken;  // By others.
    for (size_t bytes = 32 * kMiB; bytes >= 4 * kKiB; bytes /= 2) {
        while (const auto block = world.host.allocate(bytes)) {
            taken.push_back(*block);
        }
    }
    FakeOwner* most = world.make(kMost, 99);
    EXPECT_TRUE(world.is_resident(most));
    EXPECT_EQ(world.pager.stats().arena_bytes, 0u);
    world.port.drop(most);
    for (const HostBlock& block : taken) {
        world.host.free(block, {});
    }
}

// Frames are neither free nor anybody's to evict: asking for their bytes finds that out at once,
// without asking the memory, which may answer slowly.
TEST(PagerPlacementTest, FramesDoNotLookLikeFreeMemory) {
    Planned planned;
    const uint64_t arena_bytes = planned.world.pager.stats().arena_bytes;
    ASSERT_GT(arena_bytes, 16 * kKiB);
    Held rest(planned.world, 256 * kKiB - arena_bytes, 99);  // All that is no frame.
    const uint64_t before = planned.world.pager.stats().refusals;
    FakeOwner* more = planned.world.make(8 * kKiB, 98);
    EXPECT_EQ(planned.world.pager.stats().refusals, before);
    EXPECT_TRUE(PagerWorld::has(more, 98));
    planned.world.port.drop(more);
    rest.drop();
}

}  // namespace
}  // namespace trainstream
