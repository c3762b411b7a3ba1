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
    FramePlan(Period period_of_items, size_t arena_bytes, std::vector<StoragePtr> storages)
        : period(std::move(period_of_items)),
          wanted_bytes(arena_bytes),
          items(std::move(storages)) {}

    /// Loads begin: `block` has `size_bytes` of device memory.
    void lay(void* block, size_t size_bytes, size_t lead_bytes);
    bool is_laid() const { return arena != nullptr; }
    /// Which items leave their frames once the first period has filled the arena.
    std::vector<bool> who_leaves(size_t lead_bytes) const;

    const Period period;
    const size_t wanted_bytes;                // For the arena.
    std::vector<StoragePtr> items;            // By number; null: freed.
    std::vector<StepTrace::Use> recorded;     // What the period was made of.
    std::unique_ptr<FrameArena> arena;        // Null: not laid out yet.
    std::unique_ptr<FrameSchedule> schedule;  // With the arena.
    uint64_t item_bytes = 0;                  // Of all items, and
    uint64_t freed_bytes = 0;                 // of those that are no more.
    StreamId home = 0;                        // Whose pool the arena is from.
    bool retiring = false;                    // Nothing comes any more, all that can leaves.
    int failures = 0;                         // Of loads, in a row.
};

}  // namespace trainstream
