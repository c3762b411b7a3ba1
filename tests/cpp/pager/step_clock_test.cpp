#include "pager/step_clock.h"

#include <gtest/gtest.h>

#include <thread>

#include "device/sim_device.h"
#include "support/async_device.h"
#include "support/flaky_device.h"
#include "support/manual_event.h"

namespace trainstream {
namespace {

using testing::AsyncDevice;
using testing::FlakyDevice;
using testing::ManualEvent;

constexpr std::chrono::milliseconds kWhile{20};
constexpr uint64_t kWhileNs = 20'000'000;

uint64_t stalled(const StepTimes& times, Stall cause) {
    return times.stall_ns.at(static_cast<size_t>(cause));
}

/// Compute that runs on its own, and what the pager tells the clock.
class StepClockTest : public ::testing::Test {
protected:
    void compute(StreamId stream, int operators, std::chrono::milliseconds each) {
        for (int i = 0; i < operators; ++i) {
            clock.operator_began(stream);
            device.launch(stream, [each] { std::this_thread::sleep_for(each); });
        }
    }
    /// The stream has nothing else to do, and waits kWhile for an event.
    void stall(StreamId stream, Stall cause) {
        device.record(stream)->wait();
        auto event = std::make_shared<ManualEvent>();
        clock.wait(stream, event, cause);
        device.launch(2, [event] {
            std::this_thread::sleep_for(kWhile);
            event->finish();
        });
        event->wait();
    }
    void finish() { device.record(1)->wait(); }

    AsyncDevice device{3, 1, 0};
    FlakyDevice door{device};
    StepClock clock{door};
};

TEST_F(StepClockTest, KnowsNoStepBeforeOneWasWhole) {
    compute(1, 3, {});
    EXPECT_FALSE(clock.usual_step().has_value());
    clock.step_ended({});  // Nobody saw its beginning.
    finish();
    EXPECT_FALSE(clock.usual_step().has_value());
    compute(1, 3, {});
    clock.step_ended({});
    finish();
    EXPECT_TRUE(clock.usual_step().has_value());
}

TEST_F(StepClockTest, WaitsAreNoComputeAndGoByTheirCause) {
    clock.operator_began(1);
    clock.step_ended({100, 10, 1});
    compute(1, 1, kWhile);
    stall(1, Stall::kLate);
    compute(1, 1, kWhile);
    stall(1, Stall::kRoom);
    stall(1, Stall::kRoom);
    clock.step_ended({150, 30, 5});
    finish();
    const StepTimes times = clock.usual_step().value();
    EXPECT_GE(times.step_ns, 5 * kWhileNs * 9 / 10);
    EXPECT_GE(stalled(times, Stall::kLate), kWhileNs * 9 / 10);
    EXPECT_GE(stalled(times, Stall::kRoom), 2 * kWhileNs * 9 / 10);
    EXPECT_EQ(stalled(times, Stall::kDemand), 0u);
    EXPECT_GE(times.compute_ns(), 2 * kWhileNs);
    EXPECT_EQ(times.compute_ns() + times.all_stall_ns(), times.step_ns);
    EXPECT_EQ(times.bytes.to_device, 50u);
    EXPECT_EQ(times.bytes.to_host, 20u);
    EXPECT_EQ(times.bytes.in_place, 4u);
    EXPECT_EQ(times.operations, 2u);
}

// The device is idle while the host works: only marks before and after tell of it.
TEST_F(StepClockTest, WaitingForUpdatesIsNoCompute) {
    clock.operator_began(1);
    clock.step_ended({});
    compute(1, 1, kWhile);
    clock.update_began(1);
    finish();
    stall(1, Stall::kRoom);  // A part of it.
    std::this_thread::sleep_for(kWhile);
    clock.update_ended(1);
    compute(1, 1, kWhile);
    clock.update_began(2);  // Another stream's.
    clock.update_ended(2);
    clock.update_ended(1);  // Nothing had begun.
    clock.step_ended({});
    finish();
    const StepTimes times = clock.usual_step().value();
    EXPECT_GE(times.update_ns, 2 * kWhileNs * 9 / 10);
    EXPECT_EQ(times.all_stall_ns(), 0u);
    EXPECT_GE(times.compute_ns(), 2 * kWhileNs * 9 / 10);
    EXPECT_EQ(times.compute_ns() + times.update_ns, times.step_ns);
}

TEST_F(StepClockTest, WhatIsDoneAlreadyOrWaitsElsewhereIsNoStall) {
    clock.operator_began(1);
    clock.step_ended({});
    compute(1, 2, kWhile);
    auto done = std::make_shared<ManualEvent>();
    done->finish();
    clock.wait(1, done, Stall::kLate);
    clock.wait(1, nullptr, Stall::kLate);
    stall(3, Stall::kDemand);  // Another stream's; its step is not what is measured.
    clock.step_ended({});
    finish();
    EXPECT_EQ(clock.usual_step().value().all_stall_ns(), 0u);
}

TEST_F(StepClockTest, TheStreamWithMostOperatorsIsTheOne) {
    compute(3, 1, {});
    compute(1, 5, {});
    clock.step_ended({});  // It begins to be measured: on stream 1.
    compute(1, 2, kWhile);
    compute(3, 1, {});
    clock.step_ended({});
    finish();
    EXPECT_GE(clock.usual_step().value().step_ns, 2 * kWhileNs);
    compute(3, 5, {});
    clock.step_ended({});  // Most ran elsewhere: this one is not measured.
    compute(3, 1, {});
    clock.step_ended({});
    device.record(3)->wait();
    EXPECT_LT(clock.usual_step().value().step_ns, uint64_t{3600} * 1'000'000'000);
}

TEST_F(StepClockTest, PointsRiseFromNothingToAllOfCompute) {
    clock.operator_began(1);
    clock.step_ended({});
    compute(1, 100, {});
    stall(1, Stall::kLate);
    compute(1, 100, std::chrono::milliseconds{1});
    clock.step_ended({});
    finish();
    const StepTimes times = clock.usual_step().value();
    ASSERT_GE(times.points.size(), 4u);  // Begin, end, and one at each 64 operators.
    EXPECT_EQ(times.points.front().operation, 0u);
    EXPECT_EQ(times.points.front().compute_ns, 0u);
    EXPECT_EQ(times.points.back().operation, 200u);
    EXPECT_EQ(times.points.back().compute_ns, times.compute_ns());
    for (size_t i = 1; i < times.points.size(); ++i) {
        EXPECT_GE(times.points[i].operation, times.points[i - 1].operation);
        EXPECT_GE(times.points[i].compute_ns, times.points[i - 1].compute_ns);
    }
    // The second half takes all but the whole time, unless the machine is very busy.
    EXPECT_LT(times.compute_ns_at(100), times.compute_ns() / 4 * 3);
    EXPECT_EQ(times.compute_ns_at(0), 0u);
    EXPECT_EQ(times.compute_ns_at(1000), times.compute_ns());
}

TEST_F(StepClockTest, ComputeBetweenPointsIsInProportion) {
    StepTimes times;
    times.points = {{0, 0}, {10, 1000}, {10, 1500}, {20, 1500}};
    EXPECT_EQ(times.compute_ns_at(5), 500u);
    EXPECT_EQ(times.compute_ns_at(10), 1000u);
    EXPECT_EQ(times.compute_ns_at(15), 1500u);
    EXPECT_EQ(StepTimes{}.compute_ns_at(3), 0u);
}

TEST_F(StepClockTest, TheUsualStepIsTheMedian) {
    clock.operator_began(1);
    clock.step_ended({});
    for (const int milliseconds : {1, 60, 1, 60, 60}) {
        compute(1, 1, std::chrono::milliseconds{milliseconds});
        clock.step_ended({});
    }
    finish();
    EXPECT_GE(clock.usual_step().value().step_ns, 3 * kWhileNs);
}

TEST_F(StepClockTest, AMarkThatIsRefusedCostsTheMeasurementOnly) {
    clock.operator_began(1);
    clock.step_ended({});
    compute(1, 70, {});
    door.refuse_record = true;
    stall(1, Stall::kLate);
    clock.step_ended({});
    finish();
    EXPECT_FALSE(clock.usual_step().has_value());
    door.refuse_record = false;
    for (int i = 0; i < 2; ++i) {
        compute(1, 1, {});
        clock.step_ended({});
    }
    finish();
    EXPECT_TRUE(clock.usual_step().has_value());
}

TEST_F(StepClockTest, AnInterruptedStepIsNotMeasured) {
    clock.operator_began(1);
    clock.step_ended({});
    compute(1, 1, {});
    clock.interrupt();
    compute(1, 1, {});
    clock.step_ended({});
    finish();
    EXPECT_FALSE(clock.usual_step().has_value());
}

TEST(StepClockSimTest, ComputeIsTheCallingThread) {
    SimDevice device;
    StepClock clock(device);
    clock.operator_began(0);
    clock.step_ended({});
    clock.operator_began(0);
    auto event = std::make_shared<ManualEvent>();
    std::thread finisher([&] {
        event->until_awaited();
        std::this_thread::sleep_for(kWhile);
        event->finish();
    });
    clock.wait(0, event, Stall::kDemand);
    finisher.join();
    clock.step_ended({});
    const StepTimes times = clock.usual_step().value();
    EXPECT_GE(stalled(times, Stall::kDemand), kWhileNs);
    EXPECT_LE(stalled(times, Stall::kDemand), times.step_ns);
}

}  // namespace
}  // namespace trainstream
