#include "pager/frame_plan.h"

#include "base/bytes.h"

namespace trainstream {

void FramePlan::lay(void* block, size_t size_bytes) {
    arena = std::make_unique<FrameArena>(block, size_bytes);
    schedule = std::make_unique<FrameSchedule>(
        period, size_bytes, FrameSizes::lead_bytes(size_bytes + sizes.extra_bytes));
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
    const size_t index = offset / FrameSchedule::kSegmentSpan;
    return index == 0 ? *arena : *extra[index - 1];
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
