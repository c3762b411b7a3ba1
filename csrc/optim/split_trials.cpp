#include "optim/split_trials.h"

#include <algorithm>

#include "base/assert.h"

namespace trainstream::optim {

namespace {

Split other_than(Split split) { return split == Split::kBoth ? Split::kCores : Split::kBoth; }

}  // namespace

SplitTrials::Turn SplitTrials::next(size_t elements) {
    if (elements < kElements) {
        return {best_, false};
    }
    if (!is_on()) {
        if (wait_ > 0) {
            --wait_;
            return {best_, false};
        }
        left_.fill(kRuns);
        found_ = {};
    }
    return {turn_, true};
}

void SplitTrials::note(Split split, size_t elements, uint64_t ns) {
    const auto index = static_cast<size_t>(split);
    TS_ASSERT_GT(left_.at(index), 0);
    const double each = static_cast<double>(ns) / static_cast<double>(elements);
    double& found = found_.at(index);
    found = found == 0 ? each : std::min(found, each);
    --left_.at(index);
    // In turns, so that what a host gives at one moment is not one split's alone.
    turn_ = other_than(split);
    if (!is_on()) {
        decide();
    }
}

void SplitTrials::decide() {
    wait_ = next_wait_;
    next_wait_ *= kGrowth;
    const Split other = other_than(best_);
    const double best_ns = found_.at(static_cast<size_t>(best_));
    if (found_.at(static_cast<size_t>(other)) < (1 - kMargin) * best_ns) {
        best_ = other;
    }
}

}  // namespace trainstream::optim
