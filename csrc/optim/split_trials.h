// csrc/optim/split_trials.h: whether a kernel beside the cores pays in a hybrid step on an idle
// device, found by trying.
//
// Cores and kernel share host memory. Where the cores alone get nearly all that it gives, a kernel
// beside them takes more than it does. Which of the two a machine is, no rate measured elsewhere
// says: H200 hosts of one kind were seen with the cores 7 % faster alone, and 6 % slower. Beside a
// model's own work nothing is tried: there the link and the host's memory have others to serve, and
// the cores alone were 30 % slower over a step (7.62 B, 18 GiB) though not in a single run.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace trainstream::optim {

enum class Split : uint8_t { kBoth, kCores };

/// Owner: whoever runs the steps, one for each kind of parameter. Lock: none.
///
/// Invariant: while no trial is on, `left_` is 0 for both.
class SplitTrials {
public:
    /// Elements of a run that is timed, as many as training hands over at once: 16 ms or more, of
    /// which at its end one side waits for the other for a millisecond.
    static constexpr size_t kElements = size_t{128} << 20;
    /// Steps without a trial, of those seen: in them memory is touched and locked, and the pager
    /// moves on demand.
    static constexpr int64_t kStepsBefore = 3;
    /// Runs of each split in a trial, of which the fastest counts: hosts are shared.
    static constexpr int kRuns = 3;
    /// Runs until the second trial, and by what the wait grows after each.
    static constexpr uint64_t kRunsBetween = 64;
    static constexpr uint64_t kGrowth = 4;
    /// By how much the other must be faster to be taken: less is noise.
    static constexpr double kMargin = 0.03;

    struct Turn {
        Split split = Split::kBoth;
        bool timed = false;  // The run is to have kElements or a little more, and to be noted.
    };
    /// What comes next, where `elements` wait and the device has nothing else to do.
    Turn next(size_t elements);
    void note(Split split, size_t elements, uint64_t ns);

private:
    static constexpr size_t kSplits = 2;

    bool is_on() const { return left_[0] > 0 || left_[1] > 0; }
    void decide();

    std::array<double, kSplits> found_{};  // Nanoseconds of an element; 0: none in this trial yet.
    std::array<int, kSplits> left_{};      // Runs to time in the trial, of each.
    Split best_ = Split::kBoth;
    Split turn_ = Split::kBoth;          // Whose it is in the trial.
    uint64_t wait_ = 0;                  // Runs until the next trial,
    uint64_t next_wait_ = kRunsBetween;  // and from that one to the one after it.
};

}  // namespace trainstream::optim
