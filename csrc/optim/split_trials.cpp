#include "optim/split_trials.h"

#include <algorithm>

#include "base/assert.h"

namespace trainstream::optim {

SplitTrials::Turn SplitTrials::next(size_t elements) {
    if (elements < kElements) {
        return {best_, false};
    }
    const auto is_on = [this] {
        return std::any_of(left_.begin(), left_.end(), [](int left) { return left > 0; });
    };
    if (!is_on() && ++runs_ > kRunsBetween) {
        begin_trial();
    }
    if (!is_on()) {
        return {best_, false};
    }
    // In turns, so that what a host gives at one moment is not one split's alone.
    while (left_.at(turn_) == 0) {
        turn_ = (turn_ + 1) % kSplits;
    }
    return {static_cast<Split>(turn_), true};
}

void SplitTrials::note(Split split, size_t elements, uint64_t ns) {
    const auto index = static_cast<size_t>(split);
    TS_ASSERT_GT(left_.at(index), 0);
    const double each = static_cast<double>(ns) / static_cast<double>(elements);
    double& found = found_.at(index);
    found = found == 0 ? each : std::min(found, each);
    --left_.at(index);
    turn_ = (index + 1) % kSplits;
    if (std::all_of(left_.begin(), left_.end(), [](int left) { return left == 0; })) {
        end_trial();
    }
}

void SplitTrials::begin_trial() {
    const double least = ns_.at(static_cast<size_t>(best_));
    int tried = 0;
    for (size_t i = 0; i < kSplits; ++i) {
        left_.at(i) = ns_.at(i) <= kNear * least ? kRuns : 0;
        tried += left_.at(i) > 0 ? 1 : 0;
    }
    if (tried == 1) {
        left_ = {};  // Nothing comes near it.
    }
    found_ = {};
    runs_ = 0;
}

void SplitTrials::end_trial() {
    for (size_t i = 0; i < kSplits; ++i) {
        ns_.at(i) = found_.at(i) > 0 ? found_.at(i) : ns_.at(i);
    }
    const auto least = std::min_element(ns_.begin(), ns_.end());
    best_ = static_cast<Split>(least - ns_.begin());
    runs_ = 0;
}

}  // namespace trainstream::optim
