#include "pager/arena_limit.h"

#include <algorithm>

namespace trainstream {

namespace {

// What must have left for want of room in a step, as a part of the budget, before a smaller arena
// is tried.
constexpr uint64_t kPressedPart = 16;

// A smaller arena is kept if its step is shorter by this part; else it is noise.
constexpr uint64_t kNoisePart = 50;

}  // namespace

bool ArenaLimit::judge(const Trial& trial, uint64_t budget_bytes, uint64_t least_bytes) {
    if (settled_) {
        return false;
    }
    const bool shorter =
        !best_.has_value() || trial.step_ns < best_->step_ns - best_->step_ns / kNoisePart;
    if (!shorter) {
        settled_ = true;
        bytes_ = best_->arena_bytes;
        return best_->arena_bytes != trial.arena_bytes;
    }
    best_ = trial;
    const bool presses = trial.pressed_bytes > budget_bytes / kPressedPart;
    if (presses && shrink(trial.arena_bytes, trial.pressed_bytes, least_bytes)) {
        best_ = trial;
        return true;
    }
    settled_ = true;
    return false;
}

bool ArenaLimit::shrink(uint64_t arena_bytes, uint64_t less_bytes, uint64_t least_bytes) {
    if (shrinks_left_ == 0 || arena_bytes <= least_bytes) {
        return false;
    }
    --shrinks_left_;
    best_.reset();  // Of a size that has no room, unless judge() says otherwise.
    bytes_ = std::max(arena_bytes - std::min(less_bytes, arena_bytes / 2), least_bytes);
    return true;
}

}  // namespace trainstream
