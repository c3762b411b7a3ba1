// Storages that somebody says belong out.
#include <gtest/gtest.h>

#include <vector>

#include "support/pager_world.h"

namespace trainstream {
namespace {

using testing::FakeOwner;
using testing::PagerWorld;
using testing::WorldOptions;

constexpr size_t kLayer = 16 * kKiB;
constexpr uint64_t kRoomy = 512 * kKiB;

/// Eight layers, of which the even ones are paged. Each operator ends with a boundary.
class Paged {
public:
    explicit Paged(uint64_t budget_bytes = kRoomy, uint64_t room_bytes = kLayer)
        : world({.budget_bytes = budget_bytes}) {
        world.pager.set_paged_room(room_bytes);
        for (unsigned i = 0; i < 8; ++i) {
            layers.push_back(world.make(kLayer, i));
        }
        world.pager.page({layers[0], layers[2], layers[4], layers[6]});
    }
    ~Paged() {
        for (FakeOwner* owner : layers) {
            world.port.drop(owner);
        }
        world.expect_nothing_left();
    }
    Paged(const Paged&) = delete;
    Paged& operator=(const Paged&) = delete;

    void read(unsigned i, UseKind kind = UseKind::kBringIn) {
        EXPECT_TRUE(world.reads(layers[i], i, kind));
        world.pager.boundary();
    }
    void forward_and_backward() {
        for (unsigned i = 0; i < 8; ++i) {
            read(i);
        }
        for (unsigned i = 8; i-- > 0;) {
            read(i);
        }
    }
    void step() {
        forward_and_backward();
        for (unsigned i = 0; i < 8; ++i) {
            world.write(layers[i], i, UseKind::kOnce);
            world.pager.boundary();
        }
        world.pager.step_done();
    }
    unsigned paged_in() const {
        unsigned count = 0;
        for (unsigned i = 0; i < 8; i += 2) {
            count += world.is_resident(layers[i]) ? 1 : 0;
        }
        return count;
    }

    PagerWorld world;
    std::vector<FakeOwner*> layers;
};

// Goal: what is paged leaves at once and after each use, as far as the room does not keep it,
// though the budget would hold everything; the others stay. Method: eight layers in 512 KiB, forth
// and back.
TEST(PagerPagingTest, PagedStoragesLeaveAfterTheirUseAndOthersStay) {
    for (const uint64_t room_layers : {0, 1, 3}) {
        Paged run(kRoomy, room_layers * kLayer);
        EXPECT_EQ(run.paged_in(), 0u);
        for (unsigned i = 0; i < 8; ++i) {
            run.read(i);
            EXPECT_LE(run.paged_in(), room_layers) << "after layer " << i;
            EXPECT_TRUE(run.world.is_resident(run.layers[1]));
        }
        EXPECT_EQ(run.paged_in(), room_layers);  // The newest stay.
        EXPECT_EQ(run.world.is_resident(run.layers[6]), room_layers > 0);
    }
}

// Goal: a plan moves what is paged, within the room, and leaves the rest where it is. Method: steps
// until there is a plan; then nothing is demanded, and no other storage has ever moved.
TEST(PagerPagingTest, PlanMovesWhatIsPagedWithinTheRoomAndNothingElse) {
    Paged run(kRoomy, 2 * kLayer);
    for (int i = 0; i < 4; ++i) {
        run.step();
    }
    const PagerStats before = run.world.pager.stats();
    ASSERT_EQ(before.plans, 1u);
    EXPECT_EQ(before.planned_bytes, 4 * kLayer);
    EXPECT_LE(before.arena_bytes + before.extra_bytes, 2 * kLayer);
    for (int i = 0; i < 3; ++i) {
        run.step();
    }
    const PagerStats after = run.world.pager.stats();
    EXPECT_EQ(after.plans, 1u);
    EXPECT_GT(after.loaded_ahead_bytes, before.loaded_ahead_bytes);
    for (unsigned i = 1; i < 8; i += 2) {
        EXPECT_TRUE(run.world.is_resident(run.layers[i]));
    }
}

// Goal: storages may be paged and unpaged at any moment. Method: another set before each step, and
// in the middle of one, with a plan and without; the bytes are compared at each use.
TEST(PagerPagingTest, SetsChangeBetweenAndWithinStepsAndBytesStay) {
    Paged run(kRoomy, 2 * kLayer);
    for (unsigned round = 0; round < 24; ++round) {
        FakeOwner* moving = run.layers[(round * 5) % 8];
        FakeOwner* other = run.layers[(round * 3 + 1) % 8];
        run.world.pager.page({moving});
        run.forward_and_backward();
        run.world.pager.unpage({moving, other}, 0);
        EXPECT_TRUE(run.world.is_resident(moving));
        EXPECT_TRUE(run.world.is_resident(other));
        run.step();
    }
}

// Goal: what is unpaged has no copy on the host; nothing counts as pressure. Method: everything is
// unpaged, and steps go by: nothing moves, no plan comes, and in the end nobody watches.
TEST(PagerPagingTest, UnpagedStoragesHaveNoCopyAndTheRunGoesQuiet) {
    Paged run;
    run.step();
    run.world.pager.unpage({run.layers[0], run.layers[2], run.layers[4], run.layers[6]}, 0);
    EXPECT_EQ(run.world.host.stats().in_use_bytes, 0u);
    const PagerStats before = run.world.pager.stats();
    for (int i = 0; i < 4; ++i) {
        run.step();
    }
    const PagerStats after = run.world.pager.stats();
    EXPECT_EQ(after.restores + after.evictions, before.restores + before.evictions);
    EXPECT_EQ(after.plans, 0u);
    // Off, it waits until uses are announced again.
    run.world.pager.page({run.layers[0], run.layers[6]});
    EXPECT_EQ(run.paged_in(), 4u);
    for (int i = 0; i < 20; ++i) {
        run.step();
    }
    EXPECT_LT(run.paged_in(), 4u);  // One of the two may be in the room.
}

// Goal: take_peak() says what a step needed, and whether that was too much. Method: storages come
// and go within the budget, then past it.
TEST(PagerPagingTest, PeakIsOfTheTimeSinceItWasTakenAndPressureIsCounted) {
    PagerWorld world({.budget_bytes = 128 * kKiB});
    world.pager.take_peak();
    FakeOwner* first = world.make(32 * kKiB, 1);
    world.port.drop(world.make(64 * kKiB, 2));
    EXPECT_EQ(world.pager.take_peak().device_bytes, 96 * kKiB);
    EXPECT_EQ(world.pager.take_peak().device_bytes, 32 * kKiB);
    FakeOwner* large = world.make(112 * kKiB, 3);
    EXPECT_EQ(world.pager.take_peak().pressed_bytes, 32 * kKiB);
    EXPECT_EQ(world.pager.take_peak().pressed_bytes, 0u);
    world.port.drop(first);
    world.port.drop(large);
    world.expect_nothing_left();
}

}  // namespace
}  // namespace trainstream
