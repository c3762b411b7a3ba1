// The plan's order of work, on a device that computes asynchronously: a frame is given to others
// while kernels launched earlier have not even begun.
#include <gtest/gtest.h>

#include <chrono>
#include <memory>
#include <thread>
#include <utility>
#include <vector>

#include "support/async_world.h"

namespace trainstream {
namespace {

using testing::AsyncTensor;
using testing::AsyncWorld;
using testing::AsyncWorldOptions;
using testing::Content;
using testing::ManualEvent;
using testing::random_content;

constexpr size_t kLayer = 16 * kKiB;
constexpr int kLayers = 16;

AsyncWorldOptions room_for(size_t layers) {
    AsyncWorldOptions options;
    options.arena_bytes = layers * kLayer;
    return options;
}

/// Equal layers, used forth and back, then written: on stream 1, on whose pool all of them are.
class AsyncTraining {
public:
    explicit AsyncTraining(const AsyncWorldOptions& options) : world(options) {
        for (int i = 0; i < kLayers; ++i) {
            layers.push_back(world.make(kLayer, 1, ++state_));
        }
    }
    ~AsyncTraining() {
        for (AsyncTensor& layer : layers) {
            if (layer.owner != nullptr) {
                world.port.drop(layer.owner);
            }
        }
        world.expect_nothing_left();
    }
    AsyncTraining(const AsyncTraining&) = delete;
    AsyncTraining& operator=(const AsyncTraining&) = delete;

    void read(int layer) { world.operate(&layers[layer], 1, UseKind::kBringIn); }
    void write(int layer) { world.operate(&layers[layer], 1, UseKind::kOnce, fresh()); }
    Content fresh() { return random_content(kLayer, ++state_); }
    void forward_and_backward() {
        for (int i = 0; i < kLayers; ++i) {
            read(i);
        }
        for (int i = kLayers; i-- > 0;) {
            read(i);
        }
    }
    void step() {
        forward_and_backward();
        for (int i = 0; i < kLayers; ++i) {
            write(i);
        }
        world.pager.step_done();
    }
    void steps_until_planned() {
        for (int i = 0; i < 3; ++i) {
            step();
        }
        world.finish_all();
        ASSERT_GT(world.pager.stats().arena_bytes, 0u);
    }
    /// A layer that is, or is not, on the device now.
    int any(bool resident) const {
        for (int i = 0; i < kLayers; ++i) {
            if (world.is_resident(layers[i]) == resident) {
                return i;
            }
        }
        ADD_FAILURE() << "no such layer";
        return 0;
    }

    AsyncWorld world;
    std::vector<AsyncTensor> layers;

private:
    uint64_t state_ = 0;
};

TEST(PagerPlanStreamsTest, EveryKernelOfATrainingLoopFindsItsBytes) {
    for (uint64_t seed = 1; seed <= 3; ++seed) {
        AsyncWorldOptions options = room_for(6);
        options.seed = seed;
        options.delay_ns_max = 50'000;
        AsyncTraining training(options);
        for (int i = 0; i < 8; ++i) {
            training.step();
        }
        EXPECT_GT(training.world.pager.stats().loaded_ahead_bytes, 0u);
    }
}

/// Copies that do not wait for the kernels behind the gate have the time to run before them.
void open_late(const std::shared_ptr<ManualEvent>& gate) {
    std::this_thread::sleep_for(std::chrono::milliseconds(3));
    gate->finish();
}

/// What happens while a kernel has not begun: a load that nobody planned, whose frame was last used
/// long ago by what was announced, then a step that takes all frames.
void step_while_held_back(AsyncTraining* training, const std::shared_ptr<ManualEvent>& gate,
                          int demanded) {
    training->read(demanded);
    training->step();
    open_late(gate);
    training->step();
    training->world.finish_all();
    EXPECT_EQ(training->world.wrong.load(), 0u);
}

// An extension that torch does not dispatch: nobody announces its kernels. Its bytes are on the
// device when it is called, and its stream is the one that the storage has always been used on.
TEST(PagerPlanStreamsTest, AFrameIsKeptForAKernelThatNobodyAnnounced) {
    AsyncTraining training(room_for(6));
    training.steps_until_planned();
    const auto gate = training.world.hold_back(1);
    for (AsyncTensor& layer : training.layers) {
        training.world.launch_on(&layer, 1);
    }
    step_while_held_back(&training, gate, training.any(/*resident=*/false));
}

// What such a kernel writes to host memory is what a load must find.
TEST(PagerPlanStreamsTest, ALoadWaitsForAKernelInHostMemoryThatNobodyAnnounced) {
    AsyncTraining training(room_for(6));
    training.steps_until_planned();
    const int cold = training.any(/*resident=*/false);
    const auto gate = training.world.hold_back(1);
    training.world.launch_on(&training.layers[cold], 1, training.fresh());
    step_while_held_back(&training, gate, cold);
}

// The marks around a step of apex's optimizers: between them kernels that nobody announces write,
// and operators end.
TEST(PagerPlanStreamsTest, WhatAnUnseenOptimizerWroteLeavesAfterIt) {
    AsyncTraining training(room_for(6));
    training.steps_until_planned();
    const auto mark = [&](AsyncTensor& layer) {
        Pins pins;
        training.world.pager.begin_use(
            {{layer.owner, /*writes=*/true, UseKind::kMetadata, /*unseen=*/true}}, 1, &pins);
        training.world.pager.end_use(&pins);
    };
    for (AsyncTensor& layer : training.layers) {
        mark(layer);
    }
    const auto gate = training.world.hold_back(1);
    for (AsyncTensor& layer : training.layers) {
        training.world.launch_on(&layer, 1, training.fresh());
    }
    training.read(training.any(/*resident=*/false));
    for (AsyncTensor& layer : training.layers) {
        mark(layer);
    }
    step_while_held_back(&training, gate, 0);
}

// A Python function announces its inputs once; extensions read them in it, and in its backward
// pass.
TEST(PagerPlanStreamsTest, AKernelThatNobodyAnnouncedFindsItsBytes) {
    AsyncWorldOptions options = room_for(6);
    options.delay_ns_max = 200'000;
    AsyncTraining training(options);
    training.steps_until_planned();
    for (int step = 0; step < 4; ++step) {
        for (int i = 0; i < kLayers; i += 4) {
            Pins pins;
            training.world.pager.begin_use(
                {{training.layers[i].owner, true, UseKind::kMetadata, /*unseen=*/true}}, 1, &pins);
            training.world.pager.end_use(&pins);
            training.world.launch_on(&training.layers[i], 1);
        }
        for (int i = 0; i < kLayers; ++i) {
            training.read(i);
            training.world.launch_on(&training.layers[i / 4 * 4], 1);
        }
        training.step();
    }
    training.world.finish_all();
    EXPECT_EQ(training.world.wrong.load(), 0u);
}

// An operator may call others on another stream; its pins end together.
TEST(PagerPlanStreamsTest, AnOperatorMayUseSeveralStreams) {
    AsyncTraining training(room_for(6));
    training.steps_until_planned();
    const int layer = training.any(/*resident=*/true);
    const int other = training.any(/*resident=*/false);
    const auto gate = training.world.hold_back(2);
    Pins pins;
    Pager& pager = training.world.pager;
    pager.begin_use({{training.layers[layer].owner, false, UseKind::kBringIn}}, 2, &pins);
    training.world.launch_on(&training.layers[layer], 2);
    pager.begin_use({{training.layers[other].owner, false, UseKind::kInPlace}}, 1, &pins);
    pager.end_use(&pins);
    training.read(other);
    training.forward_and_backward();
    open_late(gate);
    training.world.finish_all();
    EXPECT_EQ(training.world.wrong.load(), 0u);
}

// A collective runs on a stream of its own, which the script names (record_stream).
TEST(PagerPlanStreamsTest, AStreamThatTheScriptNamesIsWaitedFor) {
    AsyncTraining training(room_for(6));
    training.steps_until_planned();
    AsyncTensor& layer = training.layers[training.any(/*resident=*/true)];
    const auto gate = training.world.hold_back(2);
    Pins pins;
    training.world.pager.begin_use({{layer.owner, false, UseKind::kInPlace}}, 1, &pins);
    EXPECT_TRUE(training.world.pager.record_stream(layer.owner->address, 2));
    training.world.launch_on(&layer, 2);
    training.world.pager.end_use(&pins);
    training.world.pager.boundary();
    training.forward_and_backward();
    open_late(gate);
    training.world.finish_all();
    EXPECT_EQ(training.world.wrong.load(), 0u);
}

// Its operator began when the storage was not planned, on another thread; its kernel comes after
// the arena was laid out.
TEST(PagerPlanStreamsTest, AnOperatorThatBeganBeforeThePlanIsWaitedFor) {
    AsyncTraining training(room_for(6));
    training.step();
    training.forward_and_backward();
    AsyncTensor& layer = training.layers[training.any(/*resident=*/false)];
    Pins pins;
    training.world.pager.begin_use({{layer.owner, true, UseKind::kInPlace}}, 2, &pins);
    training.world.pager.step_done();
    AsyncTensor& other = training.layers[training.any(/*resident=*/true)];
    training.world.operate(&other, 1, UseKind::kBringIn);
    training.world.pager.boundary();
    ASSERT_GT(training.world.pager.stats().arena_bytes, 0u);
    ASSERT_FALSE(training.world.is_resident(layer));
    training.world.finish_all();
    const auto gate = training.world.hold_back(2);
    training.world.launch_on(&layer, 2, training.fresh());
    training.world.pager.end_use(&pins);
    training.world.device.wait(1, training.world.device.record(2));
    training.world.operate(&layer, 1, UseKind::kBringIn);
    EXPECT_GT(training.world.pager.stats().demanded_bytes, 0u);
    step_while_held_back(&training, gate, 0);
}

// The frame of a freed storage goes to others; a stream that the script named may not be done.
TEST(PagerPlanStreamsTest, AFrameThatIsFreedWaitsForItsStreams) {
    AsyncTraining training(room_for(6));
    training.steps_until_planned();
    const int cold = training.any(/*resident=*/false);
    AsyncTensor& layer = training.layers[training.any(/*resident=*/true)];
    const auto gate = training.world.hold_back(2);
    EXPECT_TRUE(training.world.pager.record_stream(layer.owner->address, 2));
    Pins pins;
    training.world.pager.begin_use({{layer.owner, false, UseKind::kBringIn}}, 2, &pins);
    training.world.launch_on(&layer, 2);
    training.world.pager.end_use(&pins);
    training.world.port.drop(std::exchange(layer.owner, nullptr));
    training.read(cold);  // Nothing else has to leave for it.
    open_late(gate);
    training.world.finish_all();
    EXPECT_EQ(training.world.wrong.load(), 0u);
}

}  // namespace
}  // namespace trainstream
