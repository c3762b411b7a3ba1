// csrc/pager/frame_plan.h: a schedule, the storages that it is about, and the memory that it uses.
#pragma once

#include <memory>
#include <utility>
#include <vector>

#include "pager/frame_arena.h"
#include "pager/frame_schedule.h"
#include "pager/step_trace.h"
#include "pager/storage.h"

namespace trainstream {

/// Owner: the pager. Lock: the pager's mutex.
///
/// Invariant: a storage that is in_frame() is an item of a plan, whose schedule has its frame.
struct FramePlan {
    FramePlan(Period period_of_items, std::vector<StoragePtr> storages);

    /// How large the arena is, and the extra frames: `beside_bytes` of `usable_bytes` are needed
    /// for what is not planned, from each operation of the period to the next.
    void choose_sizes(uint64_t usable_bytes, const std::vector<uint64_t>& beside_bytes,
                      uint64_t arena_limit_bytes);
    /// The smallest arena: less hides nothing.
    static size_t least_bytes(uint64_t usable_bytes);

    /// Loads begin: `block` has `size_bytes` of device memory.
    void lay(void* block, size_t size_bytes, size_t lead_bytes);
    bool is_laid() const { return arena != nullptr; }
    /// Extra frames where the step has the room for them: of the sizes that `free_bytes` (for each
    /// operation of the period) allow beside the arena, the one that serves most. Returns the part
    /// of all used bytes that is used while there are such frames.
    double choose_extra(const std::vector<uint64_t>& free_bytes);
    /// The first operation from `time` on, in the schedule's time, that extra frames may not see.
    uint64_t extra_ends(uint64_t time) const;

    // Frames by their offset: the arena's, and those of the extra segments.
    void* frame_at(size_t offset) const;
    void give(size_t offset, size_t size_bytes, std::vector<Event> events);
    std::vector<Event> take(size_t offset, size_t size_bytes);

    FrameArena& segment_at(size_t offset) const;

    /// Which items leave their frames once the first period has filled the arena.
    std::vector<bool> who_leaves(size_t lead_bytes) const;

    const Period period;
    size_t wanted_bytes = 0;                  // For the arena.
    std::vector<StoragePtr> items;            // By number; null: freed.
    std::vector<StepTrace::Use> recorded;     // What the period was made of.
    std::unique_ptr<FrameArena> arena;        // Null: not laid out yet.
    std::unique_ptr<FrameSchedule> schedule;  // With the arena.
    size_t extra_bytes = 0;                   // Of extra frames, where the step has the room.
    size_t segment_bytes = 0;                 // In segments of so many each.
    std::vector<bool> extra_allowed;          // By operation of the period.
    std::vector<std::unique_ptr<FrameArena>> extra;  // Segments that there are now.
    uint64_t extra_until = 0;  // When they must be gone, in the schedule's time.
    uint64_t extra_again = 0;  // Not before this time, once they had to give way.
    int extra_tries = 0;       // Boundaries since they were tried for.
    uint64_t item_bytes = 0;   // Of all items, and
    uint64_t freed_bytes = 0;  // of those that are no more.
    StreamId home = 0;         // Whose pool the arena is from.
    bool has_begun = false;    // Something of it was used since it was made.
    bool retiring = false;     // Nothing comes any more, all that can leaves.
    int failures = 0;          // Of loads, in a row.
};

}  // namespace trainstream
