// csrc/optim/split_trials.h: whether a hybrid step pays, found by trying.
//
// Cores and kernel share host memory. Where the cores alone get nearly all that it gives, a kernel
// beside them takes more than it does, and where they are few it does better alone. Which of these
// a machine is, no rate measured elsewhere says: H200 hosts of one kind were seen with the cores
// 7 % faster alone, and 6 % slower.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>

namespace trainstream::optim {

enum class Split : uint8_t { kBoth, kCores, kKernel };

/// Owner: whoever runs the steps, one for each kind of parameter. Lock: none.
///
/// Invariant: while no trial is on, `best_` is the split with the least `ns_`.
class SplitTrials {
public:
    /// Elements of a run that is timed, as many as training hands over at once: 16 ms or more, of
    /// which at its ends one side waits for the other for a millisecond.
    static constexpr size_t kElements = size_t{128} << 20;
    /// Runs of each split in a trial, of which the fastest counts: a first one loads a kernel or
    /// touches memory, and hosts are shared.
    static constexpr int kRuns = 2;
    /// Runs of the best split until it is tried again, against those that come near it: of 128 Mi
    /// elements as in training, 1 in 64 that may be a quarter slower.
    static constexpr int kRunsBetween = 64;
    static constexpr double kNear = 1.25;

    struct Turn {
        Split split = Split::kBoth;
        bool timed = false;  // The run is to have kElements or a little more, and to be noted.
    };
    /// What comes next, where `elements` wait.
    Turn next(size_t elements);
    void note(Split split, size_t elements, uint64_t ns);

private:
    static constexpr size_t kSplits = 3;

    void begin_trial();
    void end_trial();

    std::array<double, kSplits> ns_{};                       // Of an element; 0: not known.
    std::array<double, kSplits> found_{};                    // In the trial that is on.
    std::array<int, kSplits> left_ = {kRuns, kRuns, kRuns};  // Runs to time, of each.
    Split best_ = Split::kBoth;
    size_t turn_ = 0;  // Whose it is in the trial.
    int runs_ = 0;     // Since the last trial.
};

}  // namespace trainstream::optim
