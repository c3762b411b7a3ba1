// csrc/pager/step_replay.h: a planned step played without a device: what moves, and how long it
// takes.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <vector>

#include "pager/frame_schedule.h"
#include "pager/frame_sizes.h"
#include "pager/step_clock.h"

namespace trainstream {

/// Copies between host and device, bytes a second; each direction alone, and beside the other.
struct LinkRates {
    double to_device = 0;
    double to_host = 0;
    double to_device_beside = 0;
    double to_host_beside = 0;
};

/// What a planned step does, as it was recorded.
struct PlannedStep {
    Period period;
    std::vector<ItemList> written;       // By operation.
    std::vector<uint64_t> places;        // Of each operation, among all of the step.
    std::vector<uint64_t> beside_bytes;  // Most that is not planned, from each to the next.
    FrameSizes sizes;
};

/// Plays periods by the schedule that the pager follows. Three clocks: compute, and one a direction
/// of copies. Compute waits for what it needs, a load for the last use of what lies in its frames
/// and for the copy that takes it away, and each direction for its copy before. The host is never
/// what is waited for.
///
/// Owner: whoever asks. Lock: none.
class StepReplay {
public:
    explicit StepReplay(PlannedStep step);

    /// Of the last period of several, so that it begins as it ends.
    struct Result {
        uint64_t step_ns = 0;
        uint64_t to_device_bytes = 0;
        uint64_t to_host_bytes = 0;
        uint64_t late_items = 0;  // Loads that compute waited for.
    };
    /// `times`: the step as it was measured, for what computing takes.
    Result play(const StepTimes& times, const LinkRates& rates);
    /// Which items leave the arena, were there no extra frames.
    std::vector<bool> who_leaves();

private:
    void play_period();
    void operate(size_t operation);
    void load_due();
    void carry_out(const FrameSchedule::Load& load);
    double leave(uint32_t item);
    void open_or_close_extra();
    void leave_early();
    void close_extra(size_t begin);
    double compute_ns(uint64_t place) const;
    double copy_ns(size_t size_bytes, double alone, double beside, double begin_ns,
                   double other_ends_ns) const;

    const PlannedStep step_;
    FrameSchedule schedule_;
    const StepTimes* times_ = nullptr;
    LinkRates rates_;

    double compute_at_ = 0;  // Nanoseconds since the beginning.
    double to_device_at_ = 0;
    double to_host_at_ = 0;
    std::vector<double> ready_at_;  // Of each item: its load has ended.
    std::vector<bool> dirty_;       // Of each item: written since it came.
    std::vector<bool> left_;
    struct Extra {
        size_t begin = 0;  // Of its offsets.
        uint64_t until = 0;
    };
    std::vector<Extra> extra_;  // The last one ends first.
    Result result_;
};

}  // namespace trainstream
