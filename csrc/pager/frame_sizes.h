// csrc/pager/frame_sizes.h: how much device memory frames have, and when in the step.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "pager/frame_schedule.h"

namespace trainstream {

/// The arena is there all the time. Extra frames, in segments of the device's pool, are there where
/// the recorded step had the room for them: at each moment as many as fit.
///
/// Owner: a plan. Lock: none of its own.
struct FrameSizes {
    /// `beside_bytes` of `usable_bytes` are needed for what is not planned, from each operation of
    /// the period to the next. The arena is what is free at the step's peak. Where that is little,
    /// extra frames serve the rest of the step; where they cannot either, the arena is taken from
    /// what is beside it.
    static FrameSizes choose(const Period& period, uint64_t usable_bytes,
                             const std::vector<uint64_t>& beside_bytes, uint64_t arena_limit_bytes);
    /// The smallest arena: less hides nothing.
    static size_t least_bytes(uint64_t usable_bytes);
    /// Frames that are too few to hide a load are of no use: a quarter for what is on its way.
    static size_t lead_bytes(size_t frames_bytes);
    /// Of uses to come, what loads are proposed for: twice as much keeps the link busy.
    static uint64_t ahead_bytes(size_t frames_bytes) { return 2 * lead_bytes(frames_bytes); }

    /// The first operation from `time` on, in the schedule's time, that has no room for so many;
    /// the largest value: all have.
    uint64_t extra_ends(uint64_t time, size_t segments_wanted) const;
    /// At `time` there was room for no more than so many after all: nor will there be in the steps
    /// to come, from the operation before on to the next that has room for another number.
    void note_less_room(uint64_t time, size_t segments_left);
    /// Whether opening the last of so many at `time` serves enough operations to be worth it.
    bool extra_is_worthwhile(uint64_t time, size_t segments_wanted) const;

    size_t arena_bytes = 0;
    size_t extra_bytes = 0;        // Most of extra frames,
    size_t segment_bytes = 0;      // in segments of so many each.
    std::vector<size_t> segments;  // By operation of the period: how many there is room for.

private:
    void choose_extra(const Period& period, const std::vector<uint64_t>& free_bytes,
                      uint64_t item_bytes);
};

}  // namespace trainstream
