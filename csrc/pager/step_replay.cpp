#include "pager/step_replay.h"

#include <algorithm>
#include <utility>

namespace trainstream {

namespace {

// The first fills the frames, the second is the first that begins with them full.
constexpr int kPeriods = 3;

}  // namespace

StepReplay::StepReplay(PlannedStep step)
    : step_(std::move(step)),
      schedule_(step_.period, step_.sizes.arena_bytes,
                FrameSizes::lead_bytes(step_.sizes.arena_bytes + step_.sizes.extra_bytes),
                FrameSizes::ahead_bytes(step_.sizes.arena_bytes + step_.sizes.extra_bytes)),
      ready_at_(step_.period.item_bytes.size()),
      dirty_(ready_at_.size()),
      left_(ready_at_.size()) {}

StepReplay::Result StepReplay::play(const StepTimes& times, const LinkRates& rates) {
    times_ = &times;
    rates_ = rates;
    double began_at = 0;
    for (int i = 0; i < kPeriods; ++i) {
        began_at = compute_at_;
        result_ = {};
        play_period();
    }
    result_.step_ns = static_cast<uint64_t>(compute_at_ - began_at);
    return result_;
}

std::vector<bool> StepReplay::who_leaves() {
    for (int i = 0; i < kPeriods; ++i) {
        for (const ItemList& used : step_.period.operations) {
            for (const uint32_t item : used) {
                schedule_.begun(item);
            }
            schedule_.ended();
            load_due();
        }
        schedule_.period_ended();
    }
    for (uint32_t item = 0; item < left_.size(); ++item) {
        // What finds no frame at all stays in host memory.
        left_[item] = left_[item] || !schedule_.has_frame(item);
    }
    return left_;
}

void StepReplay::play_period() {
    const size_t length = step_.period.operations.size();
    const double begin = compute_at_;
    double waited = 0;  // Beyond what computing takes.
    for (size_t i = 0; i < length; ++i) {
        compute_at_ = begin + waited + compute_ns(step_.places[i]);
        const double unhindered = compute_at_;
        operate(i);
        waited += compute_at_ - unhindered;
        compute_at_ = begin + waited + compute_ns(step_.places[i] + 1);
        schedule_.ended();
        open_or_close_extra();
        leave_early();
        load_due();
    }
    // Updates in host memory are waited for last, and no plan changes how long they take.
    compute_at_ = begin + waited + static_cast<double>(times_->compute_ns() + times_->update_ns);
    schedule_.period_ended();
}

void StepReplay::operate(size_t operation) {
    const ItemList& used = step_.period.operations[operation];
    for (const uint32_t item : used) {
        schedule_.begun(item);
    }
    for (const uint32_t item : used) {
        if (schedule_.has_frame(item)) {
            continue;
        }
        const auto is_pinned = [&](uint32_t other) {
            return std::find(used.begin(), used.end(), other) != used.end();
        };
        if (const auto load = schedule_.demand(item, is_pinned)) {
            carry_out(*load);
        }
    }
    double begins = compute_at_;
    for (const uint32_t item : used) {
        begins = std::max(begins, ready_at_[item]);
        result_.late_items += ready_at_[item] > compute_at_ ? 1 : 0;
    }
    compute_at_ = begins;
    for (const uint32_t item : step_.written[operation]) {
        dirty_[item] = true;
    }
}

void StepReplay::load_due() {
    while (const auto load = schedule_.due()) {
        carry_out(*load);
    }
}

void StepReplay::carry_out(const FrameSchedule::Load& load) {
    double free_at = compute_at_;
    for (const uint32_t item : load.leave) {
        free_at = std::max(free_at, leave(item));
    }
    const size_t bytes = schedule_.item_bytes(load.item);
    const double begin = std::max(to_device_at_, free_at);
    to_device_at_ =
        begin + copy_ns(bytes, rates_.to_device, rates_.to_device_beside, begin, to_host_at_);
    ready_at_[load.item] = to_device_at_;
    result_.to_device_bytes += bytes;
    schedule_.entered(load.item, load.offset);
}

/// When its frame is free.
double StepReplay::leave(uint32_t item) {
    schedule_.left(item);
    left_[item] = true;
    const bool dirty = dirty_[item];
    dirty_[item] = false;
    if (!dirty) {
        return std::max(compute_at_, ready_at_[item]);
    }
    const size_t bytes = schedule_.item_bytes(item);
    const double begin = std::max(to_host_at_, compute_at_);
    to_host_at_ =
        begin + copy_ns(bytes, rates_.to_host, rates_.to_host_beside, begin, to_device_at_);
    result_.to_host_bytes += bytes;
    return to_host_at_;
}

/// As Pager::manage_extra does, with room wherever the recorded step had it.
void StepReplay::open_or_close_extra() {
    const uint64_t now = schedule_.done();
    while (!extra_.empty() && now >= extra_.back().until) {
        close_extra(extra_.back().begin);
        extra_.pop_back();
    }
    for (size_t count = extra_.size() + 1; step_.sizes.extra_is_worthwhile(now, count); ++count) {
        const uint64_t until = step_.sizes.extra_ends(now, count);
        extra_.push_back({schedule_.open_extra(step_.sizes.segment_bytes, until), until});
    }
}

void StepReplay::leave_early() {
    for (const uint32_t item : schedule_.outlived()) {
        if (schedule_.has_frame(item)) {
            leave(item);
        }
    }
}

void StepReplay::close_extra(size_t begin) {
    for (uint32_t item = 0; item < ready_at_.size(); ++item) {
        if (schedule_.is_in_segment(item, begin)) {
            leave(item);
        }
    }
    schedule_.close_extra(begin);
}

double StepReplay::compute_ns(uint64_t place) const {
    return static_cast<double>(times_->compute_ns_at(place));
}

/// While the other direction is busy the link gives less; it is taken as busy or not for a whole
/// copy.
double StepReplay::copy_ns(size_t size_bytes, double alone, double beside, double begin_ns,
                           double other_ends_ns) const {
    const double rate = other_ends_ns > begin_ns ? beside : alone;
    return rate > 0 ? static_cast<double>(size_bytes) / rate * 1e9 : 0;
}

}  // namespace trainstream
