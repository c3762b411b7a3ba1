// csrc/pager/arena_limit.h: how large the next plan's arena may be, learned from steps.
#pragma once

#include <cstdint>
#include <optional>

namespace trainstream {

/// An arena presses on what is beside it: activations leave and come back on demand. Whether a
/// smaller one is faster, only a step with it tells: less presses, and less is loaded ahead. So a
/// smaller one is tried, twice at most, and the size whose step was shortest is kept.
///
/// Owner: the pager. Lock: the pager's mutex.
class ArenaLimit {
public:
    /// A plan with an arena, and a step of it.
    struct Trial {
        uint64_t arena_bytes = 0;
        uint64_t pressed_bytes = 0;  // Left for want of room beside the arena.
        uint64_t step_ns = 0;
    };

    /// `budget_bytes`: of device memory, which says whether it presses much; no arena becomes
    /// smaller than `least_bytes`. True: the next plan is to have another size.
    bool judge(const Trial& trial, uint64_t budget_bytes, uint64_t least_bytes);
    /// There is no room beside an arena of that size. False: it may not be smaller.
    bool shrink(uint64_t arena_bytes, uint64_t less_bytes, uint64_t least_bytes);
    /// The arena cannot go any more.
    void settle() { shrinks_left_ = 0; }
    /// The run has a new habit.
    void forget() { *this = {}; }

    /// UINT64_MAX: none.
    uint64_t bytes() const { return bytes_; }

private:
    // Each costs a step without a plan, and one in which it begins anew.
    static constexpr int kShrinks = 2;

    uint64_t bytes_ = UINT64_MAX;
    int shrinks_left_ = kShrinks;
    std::optional<Trial> best_;
    bool settled_ = false;
};

}  // namespace trainstream
