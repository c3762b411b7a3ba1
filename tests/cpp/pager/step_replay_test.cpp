#include "pager/step_replay.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/bytes.h"

namespace trainstream {
namespace {

constexpr size_t kItem = kMiB;
constexpr uint64_t kOperatorNs = 1000;

/// Each of `count` items is used once, by every second operator of the step.
PlannedStep scan(uint32_t count, size_t frames) {
    PlannedStep step;
    step.period.item_bytes.assign(count, kItem);
    for (uint32_t i = 0; i < count; ++i) {
        step.period.operations.push_back({i});
        step.written.emplace_back();
        step.places.push_back(uint64_t{2} * i);
    }
    step.sizes.arena_bytes = frames * kItem;
    return step;
}

/// Every operator takes kOperatorNs.
StepTimes times_of(const PlannedStep& step) {
    StepTimes times;
    times.operations = 2 * step.places.size();
    times.step_ns = times.operations * kOperatorNs;
    times.points = {{0, 0}, {times.operations, times.step_ns}};
    return times;
}

/// Of a link on which a copy of one item takes so long.
LinkRates rates_of(double ns_each) {
    const double rate = static_cast<double>(kItem) / ns_each * 1e9;
    return {rate, rate, rate, rate};
}

TEST(StepReplayTest, AStepWhoseItemsAllHaveFramesTakesWhatComputeTakes) {
    const PlannedStep step = scan(10, 10);
    const StepTimes times = times_of(step);
    const auto result = StepReplay(step).play(times, rates_of(1e6));
    EXPECT_EQ(result.step_ns, times.step_ns);
    EXPECT_EQ(result.to_device_bytes, 0u);
    EXPECT_EQ(result.late_items, 0u);
}

TEST(StepReplayTest, AFastLinkHidesBehindCompute) {
    const PlannedStep step = scan(32, 8);
    const StepTimes times = times_of(step);
    const auto result = StepReplay(step).play(times, rates_of(0.5 * kOperatorNs));
    EXPECT_NEAR(static_cast<double>(result.step_ns), static_cast<double>(times.step_ns), 1.0);
    EXPECT_GT(result.to_device_bytes, 20 * kItem);
    EXPECT_EQ(result.to_host_bytes, 0u);
}

TEST(StepReplayTest, ASlowLinkIsWhatTheStepTakes) {
    const PlannedStep step = scan(32, 8);
    const StepTimes times = times_of(step);
    const double each_ns = 20 * kOperatorNs;
    const auto result = StepReplay(step).play(times, rates_of(each_ns));
    const double link_ns = each_ns * static_cast<double>(result.to_device_bytes / kItem);
    EXPECT_GE(static_cast<double>(result.step_ns), 0.9 * link_ns);
    EXPECT_LE(static_cast<double>(result.step_ns), 1.1 * link_ns);
    EXPECT_GT(result.late_items, 16u);
}

TEST(StepReplayTest, WhatIsWrittenLeavesByACopyAndItsFrameWaitsForIt) {
    PlannedStep step = scan(32, 8);
    for (uint32_t i = 0; i < 32; ++i) {
        step.written[i] = {i};
    }
    const StepTimes times = times_of(step);
    const double each_ns = 20 * kOperatorNs;
    const auto clean = StepReplay(scan(32, 8)).play(times, rates_of(each_ns));
    const auto written = StepReplay(step).play(times, rates_of(each_ns));
    EXPECT_EQ(written.to_host_bytes, written.to_device_bytes);
    EXPECT_GE(written.step_ns, clean.step_ns);
    // Both directions at once: hardly more than one of them alone, once frames suffice.
    EXPECT_LE(static_cast<double>(written.step_ns), 1.4 * static_cast<double>(clean.step_ns));
}

TEST(StepReplayTest, ASharedLinkIsSlower) {
    PlannedStep step = scan(32, 8);
    for (uint32_t i = 0; i < 32; ++i) {
        step.written[i] = {i};
    }
    const StepTimes times = times_of(step);
    LinkRates shared = rates_of(20 * kOperatorNs);
    shared.to_device_beside /= 2;
    shared.to_host_beside /= 2;
    EXPECT_GT(StepReplay(step).play(times, shared).step_ns,
              StepReplay(step).play(times, rates_of(20 * kOperatorNs)).step_ns);
}

TEST(StepReplayTest, ComputeGoesWhereTheMeasurementSays) {
    // All of it in the second half: loads of the first half have nothing to hide behind.
    const PlannedStep step = scan(32, 8);
    StepTimes late = times_of(step);
    late.points = {{0, 0}, {32, 0}, {64, late.step_ns}};
    const auto even = StepReplay(step).play(times_of(step), rates_of(1.5 * kOperatorNs));
    const auto uneven = StepReplay(step).play(late, rates_of(1.5 * kOperatorNs));
    EXPECT_GT(uneven.step_ns, even.step_ns);
    EXPECT_LT(uneven.step_ns, 2 * even.step_ns);
}

TEST(StepReplayTest, ExtraFramesSpareLoads) {
    PlannedStep step = scan(64, 8);
    for (uint32_t pass = 0; pass < 2; ++pass) {  // Three uses each: there is something to keep.
        for (uint32_t i = 0; i < 64; ++i) {
            step.period.operations.push_back({i});
            step.written.emplace_back();
            step.places.push_back(uint64_t{2} * (64 * (pass + 1) + i));
        }
    }
    const StepTimes times = times_of(step);
    const auto without = StepReplay(step).play(times, rates_of(3 * kOperatorNs));
    step.sizes.extra_bytes = 40 * kItem;
    step.sizes.segment_bytes = 20 * kItem;
    step.sizes.segments.assign(step.period.operations.size(), 2);
    std::fill_n(step.sizes.segments.begin() + 100, 4, 0);
    const auto with = StepReplay(step).play(times, rates_of(3 * kOperatorNs));
    EXPECT_LT(with.to_device_bytes, without.to_device_bytes);
    EXPECT_LT(with.step_ns, without.step_ns);
    EXPECT_GE(with.step_ns, times.step_ns);
}

TEST(StepReplayTest, UpdatesThatAreWaitedForTakeWhatTheyTook) {
    const PlannedStep step = scan(32, 8);
    StepTimes times = times_of(step);
    const auto without = StepReplay(step).play(times, rates_of(0.5 * kOperatorNs));
    times.update_ns = 7 * kOperatorNs;
    const auto with = StepReplay(step).play(times, rates_of(0.5 * kOperatorNs));
    EXPECT_NEAR(static_cast<double>(with.step_ns), static_cast<double>(without.step_ns), 1.0);
    // `times` is a whole step: with as much computing beside them it would be longer.
    times.step_ns += times.update_ns;
    const auto longer = StepReplay(step).play(times, rates_of(0.5 * kOperatorNs));
    EXPECT_NEAR(static_cast<double>(longer.step_ns - with.step_ns), 7 * kOperatorNs, 1.0);
}

TEST(StepReplayTest, AnItemLargerThanTheArenaIsNotLoaded) {
    PlannedStep step = scan(4, 2);
    step.period.item_bytes[1] = 3 * kItem;
    const auto result = StepReplay(step).play(times_of(step), rates_of(kOperatorNs));
    EXPECT_EQ(result.to_device_bytes % kItem, 0u);
    EXPECT_LE(result.to_device_bytes, 3 * kItem);
}

}  // namespace
}  // namespace trainstream
