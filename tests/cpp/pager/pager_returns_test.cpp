// What left in the step that made it comes back before it is asked for: what, when and how often.
#include <gtest/gtest.h>

#include <vector>

#include "support/pager_world.h"

namespace trainstream {
namespace {

using testing::FakeOwner;
using testing::PagerWorld;
using testing::WorldOptions;

constexpr size_t kActivation = 16 * kKiB;
constexpr size_t kMade = 4;

WorldOptions room_for_four() {
    WorldOptions options;
    options.budget_bytes = kMade * kActivation;
    return options;
}

/// One takes 16 ms to come, so it is still coming when a test goes on.
WorldOptions slow_to_come() {
    WorldOptions options = room_for_four();
    options.device.to_device_bytes_per_second = kMiB;
    return options;
}

/// Owner: the test. Four activations fill the device; a block as large as three of them presses the
/// first three out and goes again.
struct ReturnsWorld : PagerWorld {
    explicit ReturnsWorld(const WorldOptions& options = room_for_four()) : PagerWorld(options) {}

    void make_all() {
        for (size_t i = 0; i < kMade; ++i) {
            made.push_back(make(kActivation, static_cast<unsigned>(i)));
        }
    }
    void press_out() {
        port.drop(make((kMade - 1) * kActivation, 9));
        for (size_t i = 0; i + 1 < kMade; ++i) {
            ASSERT_TRUE(is_cold(made[i])) << i;
        }
    }
    void boundaries(int count) {
        for (int i = 0; i < count; ++i) {
            pager.boundary();
        }
    }
    /// The third one is used again, at a boundary: the second comes.
    void bring_back_second() {
        EXPECT_TRUE(reads_once(2));
        boundaries(1);
        ASSERT_TRUE(is_resident(made[1]));
    }
    bool reads_once(size_t i) { return reads(made[i], static_cast<unsigned>(i), UseKind::kOnce); }
    uint64_t returned() { return pager.stats().returned_bytes; }
    void drop_all() {
        for (FakeOwner* owner : made) {
            port.drop(owner);
        }
        expect_nothing_left();
    }

    std::vector<FakeOwner*> made;
};

TEST(PagerReturnsTest, UseOfOneBringsInTheOneMadeBefore) {
    ReturnsWorld t;
    t.make_all();
    t.press_out();
    EXPECT_TRUE(t.reads_once(3));
    t.boundaries(16);
    EXPECT_EQ(t.returned(), 0u) << "it never left, and says nothing";
    EXPECT_TRUE(t.reads_once(2));
    EXPECT_TRUE(t.is_cold(t.made[2])) << "the first one is read where it is";
    t.boundaries(1);
    EXPECT_TRUE(t.is_resident(t.made[1]));
    EXPECT_TRUE(t.is_cold(t.made[0])) << "no more than one ahead";
    EXPECT_TRUE(t.reads_once(1));
    t.boundaries(1);
    EXPECT_TRUE(t.is_resident(t.made[0]));
    EXPECT_TRUE(t.reads_once(0));
    EXPECT_EQ(t.returned(), 2 * kActivation);
    t.drop_all();
}

TEST(PagerReturnsTest, ComesOnceThereIsRoom) {
    ReturnsWorld t;
    t.make_all();
    t.press_out();
    FakeOwner* other = t.make((kMade - 1) * kActivation, 9);
    EXPECT_TRUE(t.reads_once(2));
    t.boundaries(1);
    EXPECT_TRUE(t.is_cold(t.made[1]));
    EXPECT_TRUE(t.is_resident(other)) << "nothing leaves for it";
    t.port.drop(other);
    t.boundaries(8);
    EXPECT_TRUE(t.is_resident(t.made[1]));
    EXPECT_TRUE(t.reads_once(1));
    t.drop_all();
}

TEST(PagerReturnsTest, ComesBackOnlyOnce) {
    ReturnsWorld t;
    t.make_all();
    t.press_out();
    t.bring_back_second();
    t.press_out();
    EXPECT_TRUE(t.reads_once(2));
    t.boundaries(64);
    EXPECT_EQ(t.returned(), 2 * kActivation) << "made[1] and then the one before it";
    EXPECT_TRUE(t.is_cold(t.made[1]));
    EXPECT_TRUE(t.is_resident(t.made[0]));
    t.drop_all();
}

TEST(PagerReturnsTest, WhatWasMadeInAnEarlierStepStaysWhereItIs) {
    ReturnsWorld t;
    t.make_all();
    t.pager.step_done();
    t.press_out();
    EXPECT_TRUE(t.reads_once(2));
    t.boundaries(64);
    EXPECT_EQ(t.returned(), 0u);
    t.drop_all();
}

TEST(PagerReturnsTest, NothingComesInTheNextStep) {
    ReturnsWorld t;
    t.make_all();
    t.press_out();
    t.pager.step_done();
    EXPECT_TRUE(t.reads_once(2));
    t.boundaries(64);
    EXPECT_EQ(t.returned(), 0u);
    t.drop_all();
}

// Its kernels wait for no load.
TEST(PagerReturnsTest, NothingComesWhileKernelsRunThatNobodyAnnounces) {
    for (const bool known : {false, true}) {
        ReturnsWorld t;
        t.port.kernels_known = known;
        t.make_all();
        t.press_out();
        if (known) {
            t.pager.note_unseen(0);
        }
        EXPECT_TRUE(t.reads_once(2));
        t.boundaries(64);
        EXPECT_TRUE(t.is_cold(t.made[1]));
        EXPECT_TRUE(t.reads_once(1));
        t.drop_all();
    }
}

TEST(PagerReturnsTest, NothingComesWhileAFunctionRuns) {
    ReturnsWorld t;
    t.make_all();
    t.press_out();
    const std::vector<StoragePtr> storages = t.pager.begin_unseen({}, 0);
    EXPECT_TRUE(t.reads_once(2));
    t.boundaries(8);
    EXPECT_TRUE(t.is_cold(t.made[1]));
    t.pager.end_unseen(storages);
    t.boundaries(8);
    EXPECT_TRUE(t.is_resident(t.made[1]));
    EXPECT_TRUE(t.reads_once(1));
    t.drop_all();
}

TEST(PagerReturnsTest, SuchAKernelWaitsForWhatIsStillComing) {
    for (const int way : {0, 1, 2}) {
        ReturnsWorld t(slow_to_come());
        t.make_all();
        t.press_out();
        t.bring_back_second();
        if (way == 0) {
            t.pager.begin_unseen_step(0);
        } else if (way == 1) {
            t.pager.end_unseen(t.pager.begin_unseen({}, 0));
        } else {
            t.pager.note_unseen(0);
        }
        EXPECT_TRUE(t.has(t.made[1], 1)) << "the simulated stream is the host: it has waited";
        if (way == 0) {
            t.pager.end_unseen_step();
        }
        t.drop_all();
    }
}

// Such as an operator that others make up.
TEST(PagerReturnsTest, UseThatTouchesNoByteWaitsToo) {
    ReturnsWorld t(slow_to_come());
    t.make_all();
    t.press_out();
    t.bring_back_second();
    Pins pins;
    t.pager.begin_use({{t.made[1], /*writes=*/false, UseKind::kMetadata}}, 0, &pins);
    EXPECT_TRUE(t.has(t.made[1], 1));
    t.pager.end_use(&pins);
    t.drop_all();
}

TEST(PagerReturnsTest, WriteToOneThatIsStillComingIsKept) {
    ReturnsWorld t;
    t.make_all();
    t.press_out();
    EXPECT_TRUE(t.reads_once(2));
    t.boundaries(1);
    t.write(t.made[1], 7);
    t.press_out();
    EXPECT_TRUE(t.reads(t.made[1], 7));
    t.drop_all();
}

TEST(PagerReturnsTest, CopyThatFailsLosesNothing) {
    ReturnsWorld t;
    t.make_all();
    t.press_out();
    EXPECT_TRUE(t.reads_once(2));
    t.door.refuse_copy_one_in = 1;
    t.boundaries(1);
    t.door.refuse_copy_one_in = 0;
    EXPECT_TRUE(t.is_cold(t.made[1]));
    EXPECT_EQ(t.pager.stats().failures, 1u);
    EXPECT_TRUE(t.reads_once(1));
    t.drop_all();
}

}  // namespace
}  // namespace trainstream
