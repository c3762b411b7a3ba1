// Loads ahead of need: a training loop played on a small simulated device.
#include <gtest/gtest.h>

#include <algorithm>
#include <vector>

#include "support/pager_world.h"

namespace trainstream {
namespace {

using testing::FakeOwner;
using testing::PagerWorld;
using testing::WorldOptions;

constexpr size_t kLayer = 32 * kKiB;

/// A model of equal layers, used forth and back, written by an optimizer that also has states.
class Training {
public:
    explicit Training(const WorldOptions& options, int layers, bool with_states = false)
        : world(options), layers_(layers) {
        for (int i = 0; i < layers; ++i) {
            weights_.push_back(world.make(kLayer, mark(i)));
            if (with_states) {
                states_.push_back(world.make(kLayer, mark(i)));
            }
        }
    }
    ~Training() {
        for (FakeOwner* owner : weights_) {
            world.port.drop(owner);
        }
        for (FakeOwner* owner : states_) {
            world.port.drop(owner);
        }
        world.expect_nothing_left();
    }
    Training(const Training&) = delete;
    Training& operator=(const Training&) = delete;

    void forward_and_backward(int first = 0, int end = -1) {
        forward(first, end);
        backward(first, end);
    }
    void forward(int first = 0, int end = -1) {
        end = end < 0 ? layers_ : end;
        for (int i = first; i < end; ++i) {
            read(weights_[i], i, UseKind::kBringIn);
        }
    }
    void backward(int first = 0, int end = -1) {
        for (int i = end < 0 ? layers_ : end; i-- > first;) {
            read(weights_[i], i, UseKind::kBringIn);
        }
    }
    void optimizer_step() {
        ++steps_;
        for (int i = 0; i < layers_; ++i) {
            if (!states_.empty()) {
                write(states_[i], i);
            }
            write(weights_[i], i);
        }
        world.pager.step_done();
    }
    void step() {
        forward_and_backward();
        optimizer_step();
    }

    /// A layer whose bytes are in a frame or, if there is none, anywhere on the device.
    FakeOwner* any_resident() {
        for (FakeOwner* owner : weights_) {
            if (world.is_resident(owner)) {
                return owner;
            }
        }
        ADD_FAILURE() << "no layer is on the device";
        return weights_[0];
    }
    const std::vector<FakeOwner*>& weights() const { return weights_; }
    void drop(FakeOwner* owner) {
        world.port.drop(owner);
        weights_.erase(std::find(weights_.begin(), weights_.end(), owner));
    }

    PagerWorld world;

private:
    unsigned mark(int layer) const { return static_cast<unsigned>(1 + layer + 37 * steps_); }

    void read(FakeOwner* owner, int layer, UseKind kind) {
        Pins pins;
        world.pager.begin_use({{owner, /*writes=*/false, kind}}, 0, &pins);
        EXPECT_TRUE(PagerWorld::has(owner, mark(layer)))
            << "layer " << layer << ", step " << steps_;
        world.pager.end_use(&pins);
        world.pager.boundary();
    }
    void write(FakeOwner* owner, int layer) {
        Pins pins;
        world.pager.begin_use({{owner, /*writes=*/true, UseKind::kOnce}}, 0, &pins);
        PagerWorld::fill(owner, mark(layer));
        world.pager.end_use(&pins);
        world.pager.boundary();
    }

    const int layers_;
    int steps_ = 0;
    std::vector<FakeOwner*> weights_;
    std::vector<FakeOwner*> states_;
};

WorldOptions room_for(int layers) {
    WorldOptions options;
    options.budget_bytes = layers * kLayer;
    options.device.seed = 5;
    return options;
}

TEST(PagerPlanTest, NothingIsAwaitedOnceAStepWasRecorded) {
    Training training(room_for(6), 16);
    for (int i = 0; i < 3; ++i) {
        training.step();
    }
    const PagerStats before = training.world.pager.stats();
    EXPECT_EQ(before.plans, 1u);
    EXPECT_GT(before.arena_bytes, 3 * kLayer);
    for (int i = 0; i < 3; ++i) {
        training.step();
    }
    const PagerStats after = training.world.pager.stats();
    EXPECT_EQ(after.demanded_bytes, before.demanded_bytes);
    EXPECT_EQ(after.in_place_bytes, before.in_place_bytes);
    EXPECT_GT(after.loaded_ahead_bytes, before.loaded_ahead_bytes);
    EXPECT_EQ(after.strays, 0u);
    EXPECT_EQ(after.failures, 0u);
    EXPECT_EQ(after.pinned_storages, 0u);
}

TEST(PagerPlanTest, WorkspacesMakeWayForTheArenaOnce) {
    Training training(room_for(6), 16);
    training.step();
    training.step();
    EXPECT_EQ(training.world.memory_door.workspaces_cleared, 0);
    training.forward();
    EXPECT_GT(training.world.pager.stats().arena_bytes, 0u);
    EXPECT_EQ(training.world.memory_door.workspaces_cleared, 1);
    training.backward();
    training.optimizer_step();
    training.step();
    EXPECT_EQ(training.world.memory_door.workspaces_cleared, 1);
}

TEST(PagerPlanTest, NoWorkspaceGoesThatSomebodyMayUse) {
    enum class Case : uint8_t { kInUse, kCaptured, kThreads };
    for (const Case which : {Case::kInUse, Case::kCaptured, Case::kThreads}) {
        Training training(room_for(6), 16);
        PagerWorld& world = training.world;
        FakeOwner* other = world.make(kKiB, 1);
        training.step();
        training.step();
        Pins pins;
        if (which == Case::kCaptured) {  // The graph has its address.
            world.pager.set_capturing(true);
            world.pager.set_capturing(false);
        } else if (which == Case::kThreads) {  // One may be between asking for it and a launch.
            world.port.threads = 3;
        } else {  // By an operator of another thread.
            world.pager.begin_use({{other, /*writes=*/false, UseKind::kBringIn}}, 0, &pins);
        }
        training.forward();
        EXPECT_GT(world.pager.stats().arena_bytes, 0u);
        EXPECT_EQ(world.memory_door.workspaces_cleared, 0);
        world.pager.end_use(&pins);
        world.port.drop(other);
    }
}

TEST(PagerPlanTest, StatesPassThroughFramesToo) {
    Training training(room_for(8), 16, /*with_states=*/true);
    for (int i = 0; i < 4; ++i) {
        training.step();
    }
    const PagerStats before = training.world.pager.stats();
    training.step();
    const PagerStats after = training.world.pager.stats();
    EXPECT_EQ(after.in_place_bytes, before.in_place_bytes);
    EXPECT_EQ(after.demanded_bytes, before.demanded_bytes);
}

TEST(PagerPlanTest, WhatIsNotWrittenLeavesWithoutACopy) {
    Training training(room_for(6), 16);
    for (int i = 0; i < 3; ++i) {
        training.step();
    }
    const PagerStats before = training.world.pager.stats();
    training.forward_and_backward();
    training.forward_and_backward();
    const PagerStats after = training.world.pager.stats();
    EXPECT_GT(after.dropped_bytes, before.dropped_bytes);
    // What the optimizer wrote last is copied once, and then no more.
    EXPECT_LE(after.evicted_bytes - before.evicted_bytes, 6 * kLayer);
}

TEST(PagerPlanTest, NothingGrowsOnceThePlanIsMade) {
    for (const int room : {6, 15}) {  // Layers of 16: few stay, or most.
        Training training(room_for(room), 16);
        training.step();
        training.step();
        const uint64_t locks = training.world.host.stats().locks;
        for (int i = 0; i < 5; ++i) {
            training.step();
        }
        EXPECT_EQ(training.world.host.stats().locks, locks) << "room for " << room;
        EXPECT_EQ(training.world.pager.stats().plans, 1u);
    }
}

TEST(PagerPlanTest, DelayedCopiesChangeNoByte) {
    for (uint64_t seed = 1; seed <= 5; ++seed) {
        WorldOptions options = room_for(6);
        options.device.seed = seed;
        options.device.copy_latency_ns_max = 300000;
        Training training(options, 12, /*with_states=*/true);
        for (int i = 0; i < 5; ++i) {
            training.step();  // read() checks.
        }
    }
}

TEST(PagerPlanTest, RefusedCopiesChangeNoByte) {
    for (uint64_t seed = 1; seed <= 5; ++seed) {
        WorldOptions options = room_for(6);
        options.device.seed = seed;
        options.faults.fail_copy_one_in = 7;
        Training training(options, 12, /*with_states=*/true);
        for (int i = 0; i < 6; ++i) {
            training.step();
        }
        EXPECT_GT(training.world.pager.stats().failures, 0u);
    }
}

TEST(PagerPlanTest, AnAllocationThatNeedsTheArenaGetsIt) {
    Training training(room_for(8), 16);
    for (int i = 0; i < 3; ++i) {
        training.step();
    }
    ASSERT_GT(training.world.pager.stats().arena_bytes, 0u);
    FakeOwner* large = training.world.make(5 * kLayer, 3);
    EXPECT_TRUE(training.world.is_resident(large));
    training.step();
    EXPECT_TRUE(PagerWorld::has(large, 3));
    training.world.port.drop(large);
    for (int i = 0; i < 3; ++i) {
        training.step();
    }
    EXPECT_EQ(training.world.pager.stats().plans, 2u);
}

TEST(PagerPlanTest, AStepWithoutHalfTheLayersIsFollowed) {
    Training training(room_for(6), 16);
    for (int i = 0; i < 3; ++i) {
        training.step();
    }
    training.forward_and_backward(8, 16);
    training.optimizer_step();
    training.step();
    const PagerStats before = training.world.pager.stats();
    training.step();
    EXPECT_EQ(training.world.pager.stats().demanded_bytes, before.demanded_bytes);
}

TEST(PagerPlanTest, ANewHabitGetsANewPlan) {
    Training training(room_for(6), 16);
    for (int i = 0; i < 3; ++i) {
        training.step();
    }
    for (int i = 0; i < 6; ++i) {
        training.forward_and_backward(4, 16);
        training.forward_and_backward(4, 16);
        training.optimizer_step();
        // The second of them is the plan for the others: none goes without one to be recorded.
        EXPECT_EQ(training.world.pager.stats().plans, i < 1 ? 1u : 2u) << "after step " << i;
    }
    const PagerStats before = training.world.pager.stats();
    training.forward_and_backward(4, 16);
    training.forward_and_backward(4, 16);
    training.optimizer_step();
    EXPECT_EQ(training.world.pager.stats().demanded_bytes, before.demanded_bytes);
}

// An error of an earlier kernel may come to light wherever memory is asked for. At a boundary no
// operator is there to report it, and the plan's turn must end all the same.
TEST(PagerPlanTest, MemoryThatBreaksDownAtABoundaryEndsThePlanOnly) {
    Training training(room_for(6), 16);
    training.step();
    training.step();
    ASSERT_EQ(training.world.pager.stats().plans, 1u);
    training.world.memory_door.throws = true;
    EXPECT_NO_THROW(training.world.pager.boundary());
    training.world.memory_door.throws = false;
    EXPECT_EQ(training.world.pager.stats().arena_bytes, 0u);
    for (int i = 0; i < 3; ++i) {
        training.step();
    }
    EXPECT_GT(training.world.pager.stats().arena_bytes, 0u);
}

// Two threads may end a step at once, and the faster one's plan may be at work already.
TEST(PagerPlanTest, StepsThatEndAtOnceMakeOnePlan) {
    Training training(room_for(6), 16);
    training.step();
    training.forward_and_backward();
    training.world.memory_door.before_regions = [&] {
        training.world.memory_door.before_regions = nullptr;
        training.world.pager.evict_all();
        training.forward_and_backward();
        training.world.pager.step_done();
        training.forward(0, 1);
        EXPECT_GT(training.world.pager.stats().arena_bytes, 0u);
    };
    training.optimizer_step();
    EXPECT_EQ(training.world.pager.stats().plans, 1u);
    EXPECT_GT(training.world.pager.stats().arena_bytes, 0u);
    training.step();
}

// Letting go of bytes may run code of the script's, which may run operators.
TEST(PagerPlanTest, AnOperatorInTheMiddleOfThePlansTurnGoesOn) {
    Training training(room_for(6), 16);
    for (int i = 0; i < 3; ++i) {
        training.step();
    }
    ASSERT_GT(training.world.pager.stats().arena_bytes, 0u);
    int operators = 0;
    training.world.port.after_release = [&] {
        if (operators++ == 0) {
            for (FakeOwner* owner : training.weights()) {
                training.world.use(owner, UseKind::kBringIn);
                training.world.pager.boundary();
            }
        }
    };
    training.step();
    training.world.port.after_release = nullptr;
    EXPECT_GT(operators, 0);
    training.step();
}

TEST(PagerPlanTest, WhatIsPinnedForGoodIsNoPartOfThePlan) {
    Training training(room_for(8), 16);
    for (int i = 0; i < 3; ++i) {
        training.step();
    }
    FakeOwner* fixed = training.any_resident();
    training.world.pager.pin_for_good(fixed, 0);
    void* const address = fixed->address;
    for (int i = 0; i < 2; ++i) {
        training.step();
    }
    // The arena can still be given back.
    FakeOwner* large = training.world.make(4 * kLayer, 3);
    EXPECT_TRUE(training.world.is_resident(large));
    training.world.port.drop(large);
    training.step();
    EXPECT_EQ(fixed->address, address);
}

// An operator keeps the address of what it has in a frame.
TEST(PagerPlanTest, AFrameThatIsPinnedForGoodStaysAndThePlanGoesOn) {
    Training training(room_for(8), 16);
    for (int i = 0; i < 3; ++i) {
        training.step();
    }
    FakeOwner* fixed = training.any_resident();
    Pins pins;
    training.world.pager.begin_use({{fixed, false, UseKind::kBringIn}}, 0, &pins);
    training.world.pager.pin_for_good(fixed, 0);
    training.world.pager.end_use(&pins);
    void* const address = fixed->address;
    training.step();
    const PagerStats before = training.world.pager.stats();
    training.step();
    const PagerStats after = training.world.pager.stats();
    EXPECT_EQ(after.demanded_bytes, before.demanded_bytes);
    EXPECT_GT(after.loaded_ahead_bytes, before.loaded_ahead_bytes);
    // A plan whose arena cannot go is not given up.
    training.world.port.drop(training.world.make(4 * kLayer, 3));
    training.step();
    EXPECT_GT(training.world.pager.stats().loaded_ahead_bytes, after.loaded_ahead_bytes);
    EXPECT_EQ(fixed->address, address);
}

TEST(PagerPlanTest, AFrameThatIsFreedDuringACaptureWaitsForItsEnd) {
    Training training(room_for(6), 16);
    for (int i = 0; i < 3; ++i) {
        training.step();
    }
    FakeOwner* owner = training.any_resident();
    Pins pins;
    training.world.pager.begin_use({{owner, false, UseKind::kBringIn}}, 0, &pins);
    training.world.device.set_capturing(true);
    training.world.pager.set_capturing(true);
    training.drop(owner);  // Nothing can be recorded now: the device asserts it.
    training.world.pager.set_capturing(false);
    training.world.device.set_capturing(false);
    training.world.pager.end_use(&pins);
}

TEST(PagerPlanTest, WhatTheHostIsAboutToChangeLeavesItsFrameWithoutACopy) {
    Training training(room_for(8), 16);
    for (int i = 0; i < 5; ++i) {
        training.step();
    }
    training.forward_and_backward();
    std::vector<void*> owners;
    std::vector<FakeOwner*> framed;
    for (FakeOwner* owner : training.weights()) {
        owners.push_back(owner);
        if (training.world.is_resident(owner)) {
            framed.push_back(owner);
        }
    }
    ASSERT_FALSE(framed.empty());
    const PagerStats before = training.world.pager.stats();
    Pins pins;  // One that an operator still uses stays.
    training.world.pager.begin_use({{framed.back(), /*writes=*/false, UseKind::kBringIn}}, 0,
                                   &pins);
    training.world.pager.let_go(owners);
    for (FakeOwner* owner : framed) {
        EXPECT_EQ(training.world.is_cold(owner), owner != framed.back());
    }
    training.world.pager.end_use(&pins);
    const PagerStats after = training.world.pager.stats();
    EXPECT_EQ(after.evicted_bytes, before.evicted_bytes);
    EXPECT_EQ(after.dropped_bytes, before.dropped_bytes + (framed.size() - 1) * kLayer);
    training.optimizer_step();
    training.step();
    // What was written in its frame would need a copy: it stays.
    FakeOwner* written = training.any_resident();
    Pins none;
    training.world.pager.begin_use({{written, /*writes=*/true, UseKind::kBringIn}}, 0, &none);
    training.world.pager.end_use(&none);
    training.world.pager.let_go({written});
    EXPECT_TRUE(training.world.is_resident(written));
}

TEST(PagerPlanTest, NoPlanWhereNothingMoves) {
    Training training(room_for(40), 16);
    for (int i = 0; i < 4; ++i) {
        training.step();
    }
    EXPECT_EQ(training.world.pager.stats().plans, 0u);
    EXPECT_EQ(training.world.pager.stats().arena_bytes, 0u);
}

/// A step in whose middle one large result needs most of the device, as logits do.
class TrainingWithAPeak : public Training {
public:
    using Training::Training;
    void peaked_step(size_t peak_bytes) {
        forward();
        FakeOwner* logits = world.make(peak_bytes, 200);
        EXPECT_TRUE(PagerWorld::has(logits, 200));
        world.port.drop(logits);
        backward();
        optimizer_step();
    }
};

TEST(PagerPlanTest, ExtraFramesMakeRoomForAPeakAndComeBack) {
    TrainingWithAPeak training(room_for(40), 80);
    for (int i = 0; i < 3; ++i) {
        training.peaked_step(36 * kLayer);
    }
    const PagerStats before = training.world.pager.stats();
    ASSERT_EQ(before.plans, 1u);
    EXPECT_GT(before.extra_bytes, before.arena_bytes);
    for (int i = 0; i < 3; ++i) {
        training.peaked_step(36 * kLayer);
    }
    const PagerStats after = training.world.pager.stats();
    EXPECT_GE(after.extra_opened, before.extra_opened + 3);
    EXPECT_EQ(after.plans, 1u);
    EXPECT_EQ(after.born_cold_bytes, before.born_cold_bytes);
    EXPECT_EQ(after.failures, 0u);
}

TEST(PagerPlanTest, APeakThatComesUnannouncedGetsTheExtraFrames) {
    TrainingWithAPeak training(room_for(40), 80);
    for (int i = 0; i < 4; ++i) {
        training.peaked_step(36 * kLayer);
    }
    training.forward();
    FakeOwner* early = training.world.make(20 * kLayer, 201);
    training.backward();
    FakeOwner* late = training.world.make(15 * kLayer, 202);
    EXPECT_TRUE(PagerWorld::has(late, 202));
    training.optimizer_step();
    training.world.port.drop(early);
    training.world.port.drop(late);
    training.peaked_step(36 * kLayer);
    training.peaked_step(36 * kLayer);
}

}  // namespace
}  // namespace trainstream
