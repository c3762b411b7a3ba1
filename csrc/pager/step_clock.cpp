#include "pager/step_clock.h"

#include <algorithm>
#include <exception>
#include <numeric>
#include <utility>

namespace trainstream {

namespace {

// A mark costs about a microsecond on each side: 250 of them in a step of 16,000 operators.
constexpr uint64_t kOperatorsBetweenMarks = 64;

// The device may be behind by a step or two. More marks than that: nobody ends a step.
constexpr size_t kMostMarks = size_t{1} << 17;

constexpr size_t kStepsKept = 9;

}  // namespace

uint64_t StepTimes::all_stall_ns() const {
    return std::accumulate(stall_ns.begin(), stall_ns.end(), uint64_t{0});
}

uint64_t StepTimes::compute_ns_at(uint64_t operation) const {
    const auto after = std::lower_bound(
        points.begin(), points.end(), operation,
        [](const Point& point, uint64_t value) { return point.operation < value; });
    if (after == points.end()) {
        return points.empty() ? 0 : points.back().compute_ns;
    }
    if (after == points.begin() || after->operation == operation) {
        return after->compute_ns;
    }
    const Point& before = *std::prev(after);
    const double part = static_cast<double>(operation - before.operation) /
                        static_cast<double>(after->operation - before.operation);
    const auto gap_ns = static_cast<double>(after->compute_ns - before.compute_ns);
    return before.compute_ns + static_cast<uint64_t>(part * gap_ns);
}

void StepClock::operator_began(StreamId stream) {
    const MutexLock lock(mutex_);
    ++operators_[stream];
    if (is_whole_ && stream == stream_ && ++operation_ % kOperatorsBetweenMarks == 0) {
        add({.kind = Kind::kOperator, .at = mark(stream), .operation = operation_ - 1});
    }
}

void StepClock::wait(StreamId stream, const Event& event, Stall cause) {
    bool measured = event != nullptr && !event->is_done();
    if (measured) {
        const MutexLock lock(mutex_);
        measured = is_whole_ && stream == stream_ && update_began_ == nullptr;
    }
    const Event from = measured ? mark(stream) : nullptr;
    device_.wait(stream, event);
    if (!measured) {
        return;
    }
    const Event until = mark(stream);
    const MutexLock lock(mutex_);
    add({.kind = Kind::kWait, .at = from, .until = until, .cause = cause});
}

void StepClock::update_began(StreamId stream) {
    const MutexLock lock(mutex_);
    if (is_whole_ && stream == stream_) {
        update_began_ = mark(stream);
    }
}

void StepClock::update_ended(StreamId stream) {
    const MutexLock lock(mutex_);
    const Event from = std::exchange(update_began_, nullptr);
    if (from != nullptr && is_whole_ && stream == stream_) {
        add({.kind = Kind::kUpdate, .at = from, .until = mark(stream)});
    }
}

void StepClock::step_ended(const StepBytes& total) {
    const MutexLock lock(mutex_);
    const auto most = std::max_element(operators_.begin(), operators_.end(),
                                       [](auto& a, auto& b) { return a.second < b.second; });
    const StreamId next = most == operators_.end() ? stream_ : most->first;
    const Event end = mark(next);
    if (!is_whole_ || next != stream_ || operation_ == 0) {
        forget();
        stream_ = next;
        begin_ = end;
    } else {
        const StepBytes begin = begin_bytes_.value_or(total);
        add({.kind = Kind::kEnd,
             .at = end,
             .operation = operation_,
             .bytes = {total.to_device - begin.to_device, total.to_host - begin.to_host,
                       total.in_place - begin.in_place},
             .number = ended_});
    }
    ++ended_;
    is_whole_ = end != nullptr;
    begin_bytes_ = total;
    operation_ = 0;
    operators_.clear();
    read_marks();
}

void StepClock::interrupt() {
    const MutexLock lock(mutex_);
    forget();
}

uint64_t StepClock::all_stall_ns() {
    const MutexLock lock(mutex_);
    read_marks();
    return all_stall_ns_;
}

uint64_t StepClock::steps() {
    const MutexLock lock(mutex_);
    return ended_;
}

std::optional<StepTimes> StepClock::usual_step(uint64_t first_step, size_t least) {
    const MutexLock lock(mutex_);
    read_marks();
    std::vector<const StepTimes*> order;
    for (const StepTimes& step : steps_) {
        if (step.number >= first_step) {
            order.push_back(&step);
        }
    }
    if (order.empty() || order.size() < least) {
        return std::nullopt;
    }
    const auto middle = order.begin() + static_cast<std::ptrdiff_t>(order.size() / 2);
    std::nth_element(order.begin(), middle, order.end(),
                     [](const auto* a, const auto* b) { return a->step_ns < b->step_ns; });
    return **middle;
}

/// Null: refused.
Event StepClock::mark(StreamId stream) noexcept {
    try {
        return device_.mark(stream);
    } catch (const std::exception&) {
        return nullptr;
    }
}

void StepClock::add(Mark mark) {
    const bool has_two = mark.kind == Kind::kWait || mark.kind == Kind::kUpdate;
    const bool refused = mark.at == nullptr || (has_two && mark.until == nullptr);
    if (refused || marks_.size() >= kMostMarks) {
        forget();
        return;
    }
    marks_.push_back(std::move(mark));
}

void StepClock::read_marks() noexcept {
    try {
        while (!marks_.empty() && read_next()) {
        }
    } catch (const std::exception&) {
        forget();  // The device is gone, or broken: then others say so.
    }
}

/// False: the device is not there yet.
bool StepClock::read_next() {
    const Mark& mark = marks_.front();
    const bool done = mark.at->is_done() && (mark.until == nullptr || mark.until->is_done());
    if (!done || !begin_->is_done()) {
        return false;
    }
    read(mark);
    marks_.pop_front();
    return true;
}

void StepClock::read(const Mark& mark) {
    if (mark.kind == Kind::kWait) {
        const uint64_t stall_ns = device_.ns_between(mark.at, mark.until);
        times_.stall_ns.at(static_cast<size_t>(mark.cause)) += stall_ns;
        all_stall_ns_ += stall_ns;
        return;
    }
    if (mark.kind == Kind::kUpdate) {
        times_.update_ns += device_.ns_between(mark.at, mark.until);
        return;
    }
    if (times_.points.empty()) {
        times_.points.push_back({0, 0});
    }
    times_.step_ns = device_.ns_between(begin_, mark.at);
    const StepTimes::Point& last = times_.points.back();
    // Points rise, whatever rounding does.
    times_.points.push_back({std::max(last.operation, mark.operation),
                             std::max(last.compute_ns, times_.compute_ns()), times_.stall_ns});
    if (mark.kind == Kind::kEnd) {
        times_.operations = mark.operation;
        times_.bytes = mark.bytes;
        times_.number = mark.number;
        steps_.push_back(std::exchange(times_, {}));
        if (steps_.size() > kStepsKept) {
            steps_.pop_front();
        }
        begin_ = mark.at;
    }
}

void StepClock::forget() {
    marks_.clear();
    times_ = {};
    is_whole_ = false;
    begin_bytes_.reset();
}

}  // namespace trainstream
