#include "pager/frame_plan.h"

#include <gtest/gtest.h>

#include <algorithm>

#include "base/bytes.h"

namespace trainstream {
namespace {

constexpr size_t kItem = kMiB;

/// `count` items, used once each, one after another.
FramePlan plan_of(size_t count) {
    Period period;
    period.item_bytes.assign(count, kItem);
    for (uint32_t i = 0; i < count; ++i) {
        period.operations.push_back({i});
    }
    return {std::move(period), std::vector<StoragePtr>(count)};
}

TEST(FramePlanTest, TheArenaIsWhatIsFreeAtThePeak) {
    FramePlan plan = plan_of(100);
    std::vector<uint64_t> beside(100, 10 * kMiB);
    beside[50] = 30 * kMiB;
    plan.sizes = FrameSizes::choose(plan.period, 64 * kMiB, beside, UINT64_MAX);
    EXPECT_EQ(plan.sizes.arena_bytes, 64 * kMiB - 30 * kMiB - 2 * kMiB);  // A 32nd is left alone.
    EXPECT_EQ(plan.sizes.arena_bytes % kBlockAlignment, 0u);
}

TEST(FramePlanTest, NoMoreThanThereIsToLoad) {
    FramePlan plan = plan_of(10);
    plan.sizes =
        FrameSizes::choose(plan.period, 64 * kMiB, std::vector<uint64_t>(10, 0), UINT64_MAX);
    EXPECT_EQ(plan.sizes.arena_bytes, 10 * kItem);
    EXPECT_EQ(plan.sizes.extra_bytes, 0u);
}

TEST(FramePlanTest, AShortPeakLeavesExtraFramesForTheRest) {
    FramePlan plan = plan_of(100);
    std::vector<uint64_t> beside(100, 10 * kMiB);
    beside[50] = 60 * kMiB;
    plan.sizes = FrameSizes::choose(plan.period, 64 * kMiB, beside, UINT64_MAX);
    EXPECT_EQ(plan.sizes.arena_bytes, FrameSizes::least_bytes(64 * kMiB));
    EXPECT_EQ(plan.sizes.arena_bytes + plan.sizes.extra_bytes, 64 * kMiB - 10 * kMiB - 2 * kMiB);
    EXPECT_EQ(plan.sizes.extra_ends(0),
              49u);  // Gone before the operation that needs the room begins,
    EXPECT_EQ(plan.sizes.extra_ends(50), 50u);
    EXPECT_EQ(plan.sizes.extra_ends(52),
              149u);  // and back once it has ended, past the period's end.
    EXPECT_GE(plan.sizes.segment_bytes, kItem);
    EXPECT_LE(plan.sizes.segment_bytes, plan.sizes.extra_bytes);
}

TEST(FramePlanTest, WhereEveryOperationNeedsTheRoomTheArenaHasAPartAllTheSame) {
    FramePlan plan = plan_of(100);
    plan.sizes = FrameSizes::choose(plan.period, 64 * kMiB, std::vector<uint64_t>(100, 70 * kMiB),
                                    UINT64_MAX);
    EXPECT_GT(plan.sizes.arena_bytes, FrameSizes::least_bytes(64 * kMiB));
    EXPECT_EQ(plan.sizes.extra_bytes, 0u);
}

TEST(FramePlanTest, ASegmentHoldsTheLargestItem) {
    Period period;
    period.item_bytes.assign(50, kItem);
    period.item_bytes[7] = 9 * kItem;
    for (uint32_t i = 0; i < 50; ++i) {
        period.operations.push_back({i});
    }
    FramePlan plan(std::move(period), std::vector<StoragePtr>(50));
    std::vector<uint64_t> beside(50, 10 * kMiB);
    beside[25] = 64 * kMiB;
    plan.sizes = FrameSizes::choose(plan.period, 64 * kMiB, beside, UINT64_MAX);
    EXPECT_GE(plan.sizes.segment_bytes, 9 * kItem);
}

TEST(FramePlanTest, WhoLeavesIsWhatDoesNotFit) {
    FramePlan fits = plan_of(10);
    fits.sizes =
        FrameSizes::choose(fits.period, 64 * kMiB, std::vector<uint64_t>(10, 0), UINT64_MAX);
    const std::vector<bool> none = StepReplay(fits.as_recorded()).who_leaves();
    EXPECT_EQ(std::count(none.begin(), none.end(), true), 0);
    FramePlan streams = plan_of(100);
    streams.sizes = FrameSizes::choose(streams.period, 64 * kMiB,
                                       std::vector<uint64_t>(100, 40 * kMiB), UINT64_MAX);
    const std::vector<bool> most = StepReplay(streams.as_recorded()).who_leaves();
    EXPECT_GE(std::count(most.begin(), most.end(), true), 75);
}

TEST(FramePlanTest, ExtraFramesServeUsesBeforeTheirEndOnly) {
    Period period;
    period.item_bytes.assign(20, kItem);
    for (uint32_t i = 0; i < 20; ++i) {
        period.operations.push_back({i});
    }
    FrameSchedule schedule(std::move(period), 2 * kItem, 0);
    const size_t extra = schedule.open_extra(4 * kItem, /*until=*/5);
    EXPECT_GE(extra, FrameSchedule::kSegmentSpan);
    std::vector<uint32_t> in_extra;
    while (const auto load = schedule.due()) {
        for (const uint32_t item : load->leave) {
            schedule.left(item);
        }
        schedule.entered(load->item, load->offset);
        if (load->offset >= extra) {
            in_extra.push_back(load->item);
        }
    }
    EXPECT_FALSE(in_extra.empty());
    for (const uint32_t item : in_extra) {
        EXPECT_LT(item, 5u);
        schedule.left(item);
    }
    EXPECT_TRUE(schedule.extra_is_empty());
    schedule.close_extra();
    EXPECT_LE(schedule.open_extra(kItem, 20), extra);  // The same offsets again.
}

}  // namespace
}  // namespace trainstream
