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
    // Gone before the operation that needs the room begins,
    EXPECT_EQ(plan.sizes.extra_ends(0, 1), 49u);
    EXPECT_EQ(plan.sizes.extra_ends(50, 1), 50u);
    // and back once it has ended, past the period's end.
    EXPECT_EQ(plan.sizes.extra_ends(52, 1), 149u);
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

TEST(FramePlanTest, ExtraFramesGoAsTheRoomGoesAndComeBackWithIt) {
    FramePlan plan = plan_of(120);
    std::vector<uint64_t> beside;
    for (uint64_t i = 0; i < 120; ++i) {  // Gradients grow; then a peak; then all is free again.
        beside.push_back(i < 80 ? i / 2 * kMiB : i < 90 ? 60 * kMiB : 0);
    }
    plan.sizes = FrameSizes::choose(plan.period, 64 * kMiB, beside, UINT64_MAX);
    const FrameSizes& sizes = plan.sizes;
    EXPECT_EQ(sizes.extra_bytes, 16 * sizes.segment_bytes);
    for (size_t i = 0; i < 120; ++i) {
        const uint64_t used = beside[i] + 2 * kMiB + sizes.arena_bytes;
        const uint64_t room = 64 * kMiB - std::min<uint64_t>(used, 64 * kMiB);
        EXPECT_LE(sizes.segments[i] * sizes.segment_bytes, room) << i;
        EXPECT_GE(i < 78 ? sizes.segments[i + 1] : 0, i < 78 ? 5u : 0u) << i;
    }
    EXPECT_EQ(sizes.segments[85], 0u);
    // The more there are, the sooner the last of them ends.
    for (size_t count = 2; count <= sizes.segments[10]; ++count) {
        EXPECT_LE(sizes.extra_ends(10, count), sizes.extra_ends(10, count - 1));
    }
    EXPECT_GT(sizes.extra_ends(10, 2), sizes.extra_ends(10, sizes.segments[10]));
}

TEST(FramePlanTest, RoomThatWasNotThereIsNotCountedOnAgain) {
    FramePlan plan = plan_of(100);
    plan.sizes.segments.assign(100, 3);
    std::fill_n(plan.sizes.segments.begin() + 40, 20, 2);
    plan.sizes.segment_bytes = kItem;
    plan.sizes.extra_bytes = 3 * kItem;
    plan.sizes.note_less_room(/*time=*/250, 1);
    const std::vector<size_t>& segments = plan.sizes.segments;
    EXPECT_EQ(segments[48], 2u);
    EXPECT_EQ(std::count(segments.begin() + 49, segments.begin() + 60, 1u), 11);
    EXPECT_EQ(segments[60], 3u);
    plan.sizes.note_less_room(/*time=*/300, 2);  // Up to the period's end and no further than 40.
    EXPECT_EQ(segments[99], 2u);
    EXPECT_EQ(segments[98], 3u);
    EXPECT_EQ(std::count(segments.begin(), segments.begin() + 40, 2u), 40);
    EXPECT_EQ(plan.sizes.extra_ends(300, 3), 300u);
    plan.sizes.note_less_room(/*time=*/410, 5);  // More than was counted on.
    EXPECT_EQ(segments[10], 2u);
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
    EXPECT_TRUE(schedule.extra_is_empty(extra));
    schedule.close_extra(extra);
    EXPECT_LE(schedule.open_extra(kItem, 20), extra);  // The same offsets again.
}

TEST(FramePlanTest, SegmentsEndOneAfterAnother) {
    Period period;
    period.item_bytes.assign(30, kItem);
    for (uint32_t i = 0; i < 30; ++i) {
        period.operations.push_back({i});
    }
    FrameSchedule schedule(std::move(period), 2 * kItem, /*lead_bytes=*/6 * kItem);
    const size_t first = schedule.open_extra(8 * kItem, /*until=*/20);
    const size_t second = schedule.open_extra(8 * kItem, /*until=*/10);
    size_t in_first_late = 0;
    const auto load_all = [&] {
        while (const auto load = schedule.due()) {
            for (const uint32_t item : load->leave) {
                schedule.left(item);
            }
            schedule.entered(load->item, load->offset);
            EXPECT_TRUE(load->offset < second || load->item < 10u);
            EXPECT_TRUE(load->offset < first || load->item < 20u);
            in_first_late += load->offset >= first && load->item >= 10 ? 1 : 0;
        }
    };
    load_all();
    for (uint32_t i = 0; i < 10; ++i) {
        EXPECT_TRUE(schedule.has_frame(i)) << i;
        schedule.begun(i);
        schedule.ended();
        load_all();
    }
    for (uint32_t i = 0; i < 30; ++i) {
        if (schedule.has_frame(i) && schedule.offset(i) >= second) {
            schedule.left(i);
        }
    }
    EXPECT_TRUE(schedule.extra_is_empty(second));
    EXPECT_FALSE(schedule.extra_is_empty(first));
    schedule.close_extra(second);
    load_all();
    EXPECT_GT(in_first_late, 4u);  // The other one serves on.
}

}  // namespace
}  // namespace trainstream
