// csrc/pager/frame_plan.h: a schedule, the storages that it is about, and the memory that it uses.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "pager/frame_arena.h"
#include "pager/frame_schedule.h"
#include "pager/frame_sizes.h"
#include "pager/step_replay.h"
#include "pager/step_trace.h"
#include "pager/storage.h"

namespace trainstream {

/// Owner: the pager. Lock: the pager's mutex.
///
/// Invariant: a storage that is in_frame() is an item of a plan, whose schedule has its frame.
struct FramePlan {
    FramePlan(Period period_of_items, std::vector<StoragePtr> storages);

    /// Loads begin: `block` has `size_bytes` of device memory.
    void lay(void* block, size_t size_bytes);
    bool is_laid() const { return arena != nullptr; }

    // Frames by their offset: the arena's, and those of the extra segments.
    void* frame_at(size_t offset) const;
    void give(size_t offset, size_t size_bytes, std::vector<Event> events);
    std::vector<Event> take(size_t offset, size_t size_bytes);

    FrameArena& segment_at(size_t offset) const;

    /// A segment of its own.
    struct Extra {
        std::unique_ptr<FrameArena> frames;
        size_t begin = 0;    // Of its offsets.
        uint64_t until = 0;  // When it must be gone, in the schedule's time.
    };
    /// Those to be gone first come first.
    std::vector<size_t> extra_by_end() const;

    /// For a replay. The arena is as large as it came to be.
    PlannedStep as_recorded() const;

    const Period period;
    // What is written by which operation, and the operation's place among all of its step.
    std::vector<ItemList> written;
    std::vector<uint64_t> places;
    std::vector<uint64_t> beside_bytes;  // Most that is not planned, from each to the next.
    FrameSizes sizes;
    std::vector<StoragePtr> items;            // By number; null: freed.
    std::vector<StepTrace::Use> recorded;     // What the period was made of.
    std::unique_ptr<FrameArena> arena;        // Null: not laid out yet.
    std::unique_ptr<FrameSchedule> schedule;  // With the arena.
    std::vector<Extra> extra;
    int extra_tries = 0;       // Boundaries since one was tried for.
    uint64_t item_bytes = 0;   // Of all items, and
    uint64_t freed_bytes = 0;  // of those that are no more.
    StreamId home = 0;         // Whose pool the arena is from.
    bool has_begun = false;    // Something of it was used since it was made.
    bool retiring = false;     // Nothing comes any more, all that can leaves.
    bool replaced = false;     // It retires for another, of the step that ended then.
    int failures = 0;          // Of loads, in a row.
    uint64_t first_step = 0;   // That it saw from end to end, in the clock's numbers.
};

}  // namespace trainstream
