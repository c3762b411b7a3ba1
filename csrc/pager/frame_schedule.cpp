#include "pager/frame_schedule.h"

#include <algorithm>
#include <utility>

#include "base/assert.h"
#include "base/bytes.h"

namespace trainstream {

namespace {

// An operator this far ahead of where the run was is where it is now: some were skipped. Further
// away it may be an operator that the period does not have, and only a row of them is believed.
constexpr uint64_t kNear = 64;
constexpr int kStraysBelieved = 8;

}  // namespace

/// A window of neighbouring frames, and how good it is to take.
struct FrameSchedule::Candidate {
    bool spares_all = true;         // It takes nothing that was used within the lead.
    uint64_t soonest_use = kNever;  // Of what it takes; the later the better.
    uint64_t bytes = 0;             // That it takes; a gap takes none.
    size_t room_bytes = 0;          // From its begin to the next frame that stays.
    size_t begin = 0;
    std::map<size_t, uint32_t>::const_iterator first;  // The frames that it takes.
    std::map<size_t, uint32_t>::const_iterator last;

    bool better_than(const Candidate& other) const {
        if (spares_all != other.spares_all) {
            return spares_all;
        }
        if (soonest_use != other.soonest_use) {
            return soonest_use > other.soonest_use;
        }
        return bytes != other.bytes ? bytes < other.bytes : room_bytes < other.room_bytes;
    }
};

FrameSchedule::FrameSchedule(Period period, size_t arena_bytes, size_t lead_bytes,
                             uint64_t ahead_bytes)
    : period_(std::move(period)),
      lead_bytes_(lead_bytes),
      ahead_bytes_(ahead_bytes),
      segments_{{arena_bytes / kBlockAlignment * kBlockAlignment, kNever}} {
    const size_t items = item_count();
    uses_.resize(items);
    offset_.assign(items, kNoFrame);
    last_use_.assign(items, 0);
    next_use_.assign(items, 0);
    removed_.assign(items, false);
    fixed_.assign(items, false);
    for (const size_t bytes : period_.item_bytes) {
        all_item_bytes_ += align_up(bytes, kBlockAlignment);
    }
    bytes_before_.push_back(0);
    for (uint32_t i = 0; i < length(); ++i) {
        uint64_t bytes = bytes_before_.back();
        for (const uint32_t item : period_.operations[i]) {
            uses_[item].push_back(i);
            bytes += item_bytes(item);
        }
        bytes_before_.push_back(bytes);
    }
}

uint64_t FrameSchedule::next_use(uint32_t item, uint64_t from) const {
    const std::vector<uint32_t>& uses = uses_[item];
    if (uses.empty() || removed_[item]) {
        return kNever;
    }
    const uint64_t period = from / length() * length();
    const auto use = std::lower_bound(uses.begin(), uses.end(), from - period);
    return use != uses.end() ? period + *use : period + length() + uses.front();
}

/// The same from what is planned on. That only moves on, so each use is looked up once.
uint64_t FrameSchedule::planned_next_use(uint32_t item) {
    if (next_use_[item] < planned_ || removed_[item]) {
        next_use_[item] = next_use(item, planned_);
    }
    return next_use_[item];
}

uint64_t FrameSchedule::used_bytes_before(uint64_t time) const {
    return time / length() * bytes_before_.back() + bytes_before_[time % length()];
}

/// What was used last at this time or later was used within the lead before `time`.
uint64_t FrameSchedule::spared_from(uint64_t time) const {
    const uint64_t before = used_bytes_before(time);
    uint64_t low = time - std::min<uint64_t>(time, length());
    uint64_t high = time + 1;
    while (low < high) {
        const uint64_t middle = low + (high - low) / 2;
        if (before - used_bytes_before(middle) < lead_bytes_) {
            high = middle;
        } else {
            low = middle + 1;
        }
    }
    return low;
}

void FrameSchedule::begun(uint32_t item) {
    const uint64_t use = next_use(item, done_);
    if (use == kNever) {
        return;
    }
    if (use > done_ + kNear) {
        ++strays_;
        if (++strays_in_a_row_ < kStraysBelieved) {
            return;
        }
    }
    strays_in_a_row_ = 0;
    now_ = use;
    done_ = std::max(done_, now_);
}

void FrameSchedule::ended() { done_ = std::max(done_, now_ + 1); }

void FrameSchedule::period_ended() {
    if (length() == 0) {
        return;
    }
    done_ = (done_ + length() - 1) / length() * length();
    now_ = done_;
    strays_in_a_row_ = 0;
}

std::optional<FrameSchedule::Load> FrameSchedule::due(
    const std::function<bool(uint32_t)>& is_busy) {
    if (length() == 0) {
        return std::nullopt;
    }
    if (planned_ < done_) {
        planned_ = done_;  // Uses that went by unplanned.
        planned_uses_ = 0;
        pending_.reset();
    }
    const auto is_near = [&] {
        return planned_ < done_ + length() &&
               used_bytes_before(planned_) - used_bytes_before(done_) < ahead_bytes_;
    };
    for (; is_near(); ++planned_, planned_uses_ = 0) {
        const ItemList& items = operation_at(planned_);
        for (; planned_uses_ < items.size(); ++planned_uses_) {
            const uint32_t item = items[planned_uses_];
            if (loses_frame_before(item, planned_)) {
                continue;  // Planned once it has.
            }
            if (has_frame(item)) {
                last_use_[item] = std::max(last_use_[item], planned_ + 1);
                continue;
            }
            if (!pending_.has_value()) {
                pending_ = plan_use(item, planned_);
            }
            if (!pending_.has_value()) {
                continue;  // No room even with all else gone: used where it is.
            }
            return ready_load(is_busy);
        }
    }
    check_invariants();
    return std::nullopt;
}

/// The pending one, or another for the same use if something of that one is busy.
std::optional<FrameSchedule::Load> FrameSchedule::ready_load(
    const std::function<bool(uint32_t)>& is_busy) {
    const ItemList& leave = pending_->load.leave;
    if (pending_->ready_at > done_ || (is_busy && is_busy(pending_->load.item))) {
        return std::nullopt;
    }
    if (!is_busy || std::none_of(leave.begin(), leave.end(), is_busy)) {
        return pending_->load;
    }
    const std::optional<Plan> other = plan_use(pending_->load.item, planned_, is_busy);
    return other.has_value() && other->ready_at <= done_ ? std::optional<Load>(other->load)
                                                         : std::nullopt;
}

void FrameSchedule::skip() {
    pending_.reset();
    ++planned_uses_;
}

/// What the same operator uses stays, loaded for it already or about to be.
std::optional<FrameSchedule::Plan> FrameSchedule::plan_use(
    uint32_t item, uint64_t time, const std::function<bool(uint32_t)>& is_busy) {
    const ItemList& together = operation_at(time);
    if (removed_[item] || fixed_[item]) {
        return std::nullopt;
    }
    return plan(item, time, [&](uint32_t other) {
        return std::find(together.begin(), together.end(), other) != together.end() ||
               (is_busy && is_busy(other));
    });
}

std::optional<FrameSchedule::Load> FrameSchedule::demand(
    uint32_t item, const std::function<bool(uint32_t)>& is_pinned) {
    plan_anew();  // What leaves for it may have been provided for.
    last_use_[item] = std::max(last_use_[item], now_ + 1);
    const std::optional<Plan> found = plan(item, now_, is_pinned);
    return found.has_value() ? std::optional<Load>(found->load) : std::nullopt;
}

std::optional<FrameSchedule::Plan> FrameSchedule::plan(
    uint32_t item, uint64_t time, const std::function<bool(uint32_t)>& is_kept) {
    const size_t need = align_up(item_bytes(item), kBlockAlignment);
    const uint64_t spared = spared_from(time);
    std::optional<Candidate> best;
    for (size_t i = crowds_arena(need) ? 1 : 0; i < segments_.size(); ++i) {
        const size_t begin = i * kSegmentSpan;
        if (time < segments_[i].until) {
            look_for_window(begin, begin + segments_[i].size_bytes, need, spared, is_kept, &best);
        }
    }
    if (!best.has_value()) {
        return std::nullopt;
    }
    Plan plan{{item, best->begin, {}}, 0};
    for (auto frame = best->first; frame != best->last; ++frame) {
        plan.load.leave.push_back(frame->second);
        plan.ready_at = std::max(plan.ready_at, last_use_[frame->second]);
    }
    return plan;
}

/// It would have nearly all of the arena to itself, and everything else would wait for it.
bool FrameSchedule::crowds_arena(size_t need) const {
    const size_t arena_bytes = segments_.front().size_bytes;
    return need > arena_bytes / 2 && all_item_bytes_ > arena_bytes;
}

/// At `begin`, and at the end of each frame up to `end`: the shortest window that has the room.
void FrameSchedule::look_for_window(size_t begin, size_t end, size_t need, uint64_t spared,
                                    const std::function<bool(uint32_t)>& is_kept,
                                    std::optional<Candidate>* best) {
    const auto stop = frames_.lower_bound(end);
    for (auto first = frames_.lower_bound(begin);; ++first) {
        Candidate window;
        window.begin = begin;
        window.first = first;
        window.last = first;
        const auto room_end = [&] { return window.last == stop ? end : window.last->first; };
        while (room_end() < begin + need && window.last != stop && !fixed_[window.last->second] &&
               !is_kept(window.last->second)) {
            const uint32_t leaving = window.last->second;
            window.spares_all =
                window.spares_all && (last_use_[leaving] == 0 || last_use_[leaving] < spared);
            window.soonest_use = std::min(window.soonest_use, planned_next_use(leaving));
            window.bytes += item_bytes(leaving);
            ++window.last;
        }
        window.room_bytes = room_end() - begin;
        if (room_end() >= begin + need && (!best->has_value() || window.better_than(**best))) {
            *best = window;
        }
        if (first == stop) {
            return;
        }
        begin = align_up(first->first + item_bytes(first->second), kBlockAlignment);
    }
}

size_t FrameSchedule::open_extra(size_t size_bytes, uint64_t until) {
    const auto free = std::find_if(segments_.begin() + 1, segments_.end(),
                                   [](const Segment& segment) { return segment.size_bytes == 0; });
    const auto index = static_cast<size_t>(free - segments_.begin());
    if (free == segments_.end()) {
        segments_.emplace_back();
    }
    segments_[index] = {size_bytes / kBlockAlignment * kBlockAlignment, until};
    pending_.reset();
    return index * kSegmentSpan;
}

void FrameSchedule::close_extra(size_t begin) {
    TS_ASSERT(begin >= kSegmentSpan && extra_is_empty(begin));
    segments_[begin / kSegmentSpan] = {};
    plan_anew();
}

ItemList FrameSchedule::outlived() {
    ItemList items;
    looked_at_ = std::max(looked_at_, done_ - std::min<uint64_t>(done_, length()));
    for (; looked_at_ < done_; ++looked_at_) {
        for (const uint32_t item : operation_at(looked_at_)) {
            const bool in_extra = has_frame(item) && offset_[item] >= kSegmentSpan;
            if (in_extra && !fixed_[item] && loses_frame_before(item, next_use(item, done_))) {
                items.push_back(item);
            }
        }
    }
    return items;
}

/// What was provided for is so no more: from what has been done on, everything is planned again.
void FrameSchedule::plan_anew() {
    planned_ = done_;
    planned_uses_ = 0;
    pending_.reset();
    std::fill(next_use_.begin(), next_use_.end(), 0);
    for (uint64_t& last : last_use_) {
        last = std::min(last, done_);
    }
}

void FrameSchedule::left(uint32_t item) {
    TS_ASSERT(has_frame(item));
    frames_.erase(offset_[item]);
    offset_[item] = kNoFrame;
    pending_.reset();
}

void FrameSchedule::entered(uint32_t item, size_t offset) {
    TS_ASSERT(!has_frame(item));
    TS_ASSERT_EQ(offset % kBlockAlignment, 0u);
    frames_.emplace(offset, item);
    offset_[item] = offset;
    pending_.reset();
    check_invariants();
}

void FrameSchedule::remove(uint32_t item) {
    if (has_frame(item)) {
        left(item);
    }
    removed_[item] = true;
    pending_.reset();
}

void FrameSchedule::fix(uint32_t item) {
    fixed_[item] = true;
    pending_.reset();
}

void FrameSchedule::check_invariants() const {
#ifdef TS_DEBUG_CHECKS
    size_t end = 0;
    for (const auto& [offset, item] : frames_) {
        TS_ASSERT_LE(end, offset);
        TS_ASSERT_EQ(offset_[item], offset);
        end = offset + item_bytes(item);
        TS_ASSERT_LT(offset / kSegmentSpan, segments_.size());
        const size_t segment = offset / kSegmentSpan;
        TS_ASSERT_LE(end, segment * kSegmentSpan + segments_[segment].size_bytes);
    }
#endif
}

}  // namespace trainstream
