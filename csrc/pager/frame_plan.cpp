#include "pager/frame_plan.h"

#include <algorithm>

#include "base/assert.h"
#include "base/bytes.h"

namespace trainstream {

void FramePlan::lay(void* block, size_t size_bytes) {
    arena = std::make_unique<FrameArena>(block, size_bytes);
    const size_t frames_bytes = size_bytes + sizes.extra_bytes;
    schedule =
        std::make_unique<FrameSchedule>(period, size_bytes, FrameSizes::lead_bytes(frames_bytes),
                                        FrameSizes::ahead_bytes(frames_bytes));
}

FramePlan::FramePlan(Period period_of_items, std::vector<StoragePtr> storages)
    : period(std::move(period_of_items)), items(std::move(storages)) {
    for (const size_t bytes : period.item_bytes) {
        item_bytes += align_up(bytes, kBlockAlignment);
    }
}

PlannedStep FramePlan::as_recorded() const {
    PlannedStep step{period, written, places, beside_bytes, sizes};
    if (is_laid()) {
        step.sizes.arena_bytes = arena->size_bytes();
    }
    return step;
}

FrameArena& FramePlan::segment_at(size_t offset) const {
    const size_t begin = offset / FrameSchedule::kSegmentSpan * FrameSchedule::kSegmentSpan;
    if (begin == 0) {
        return *arena;
    }
    const auto found = std::find_if(extra.begin(), extra.end(),
                                    [&](const Extra& one) { return one.begin == begin; });
    TS_ASSERT(found != extra.end());
    return *found->frames;
}

std::vector<size_t> FramePlan::extra_by_end() const {
    std::vector<const Extra*> order;
    for (const Extra& one : extra) {
        order.push_back(&one);
    }
    std::sort(order.begin(), order.end(),
              [](const Extra* a, const Extra* b) { return a->until < b->until; });
    std::vector<size_t> begins;
    begins.reserve(order.size());
    for (const Extra* one : order) {
        begins.push_back(one->begin);
    }
    return begins;
}

void* FramePlan::frame_at(size_t offset) const {
    return segment_at(offset).at(offset % FrameSchedule::kSegmentSpan);
}

void FramePlan::give(size_t offset, size_t size_bytes, std::vector<Event> events) {
    segment_at(offset).give(offset % FrameSchedule::kSegmentSpan, size_bytes, std::move(events));
}

std::vector<Event> FramePlan::take(size_t offset, size_t size_bytes) {
    return segment_at(offset).take(offset % FrameSchedule::kSegmentSpan, size_bytes);
}

}  // namespace trainstream
