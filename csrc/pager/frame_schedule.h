// csrc/pager/frame_schedule.h: which storage is loaded into which frame, and when.
//
// Training repeats, so one recorded step (a period) tells when every storage is needed next. Knows
// items by number, no storage, no copy and no clock: tested on its own and replayed in benchmarks.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <vector>

namespace trainstream {

/// What one operator of the period needs: numbers of items, each once.
using ItemList = std::vector<uint32_t>;

/// A recorded step.
struct Period {
    std::vector<size_t> item_bytes;
    std::vector<ItemList> operations;  // Those that use no item are left out.
};

/// Decides loads in the order of use. Each takes the window of neighbouring frames whose soonest
/// next use is furthest (Belady's rule, for a contiguous window), and is due as soon as the
/// window's last use before it has ended: as early as it can be without costing another load.
///
/// What was used within the last `lead_bytes` of uses is spared if anything else serves: its frame
/// would come free too late to hide the load. That is what keeps a scan (an optimizer's states,
/// needed once a step) from having one frame and waiting for it each time.
///
/// Time is counted in operations since the schedule was made; `time % length` is the operation in
/// the period. Proposals change nothing: whoever carries them out says left() and entered().
///
/// Owner: the pager. Lock: the pager's mutex.
///
/// Invariants, checked in debug builds:
///   1. Frames do not overlap and lie within one segment; `frames_` and `offset_` agree.
///   2. now_ <= done_ <= planned_ <= done_ + length, once due() has returned.
class FrameSchedule {
public:
    /// Sizes are rounded down to whole kBlockAlignment. Loads are proposed for the next
    /// `ahead_bytes` of uses: what an operator then asks for has to wait for those on their way.
    FrameSchedule(Period period, size_t arena_bytes, size_t lead_bytes,
                  uint64_t ahead_bytes = UINT64_MAX);

    /// One load: the items of `leave` go, then `item` comes to `offset`.
    struct Load {
        uint32_t item = 0;
        size_t offset = 0;
        ItemList leave;
    };

    /// An operator that uses `item` has begun. Where it is in the period follows from that.
    void begun(uint32_t item);
    /// The operator that began last has ended.
    void ended();
    /// A period has ended, wherever the schedule believed to be.
    void period_ended();

    /// The next load, if it can start now. Nothing: the frames it would take are still needed, or
    /// all is planned for one period ahead. What `is_busy` neither leaves nor comes: it takes other
    /// frames where it can, and else waits.
    std::optional<Load> due(const std::function<bool(uint32_t)>& is_busy = {});
    /// due()'s load cannot be done: go on to what follows.
    void skip();
    /// A load for an operator that waits for it, sparing what `is_pinned` says. Nothing: no room.
    std::optional<Load> demand(uint32_t item, const std::function<bool(uint32_t)>& is_pinned);

    /// More frames, in a segment of their own, for uses before the time `until`. Returns where
    /// their offsets begin.
    size_t open_extra(size_t size_bytes, uint64_t until);
    /// The segment whose offsets begin at `begin` is no more. Requires: it is empty.
    void close_extra(size_t begin);
    /// What the operators that have ended since the last call used, and will not use again before
    /// the segment that it is in goes. It had better leave now: what is written takes as long to
    /// leave as to come, and whoever needs the segment's memory would wait for it.
    ItemList outlived();
    bool extra_is_empty(size_t begin) const {
        const auto first = frames_.lower_bound(begin);
        return first == frames_.end() || first->first >= begin + kSegmentSpan;
    }
    /// Whether the item's frame is in the segment whose offsets begin at `begin`.
    bool is_in_segment(uint32_t item, size_t begin) const {
        return has_frame(item) && offset_[item] >= begin && offset_[item] < begin + kSegmentSpan;
    }
    /// Offsets of one segment; the first is the arena.
    static constexpr size_t kSegmentSpan = size_t{1} << 44;
    /// All operations before this time have ended.
    uint64_t done() const { return done_; }

    void left(uint32_t item);
    void entered(uint32_t item, size_t offset);
    /// The item is no more: it leaves its frame, and is loaded no more.
    void remove(uint32_t item);
    /// The item stays where it is: in its frame, or in none.
    void fix(uint32_t item);

    bool has_frame(uint32_t item) const { return offset_[item] != kNoFrame; }
    bool is_empty() const { return frames_.empty(); }
    size_t offset(uint32_t item) const { return offset_[item]; }
    size_t item_bytes(uint32_t item) const { return period_.item_bytes[item]; }
    size_t item_count() const { return period_.item_bytes.size(); }
    size_t length() const { return period_.operations.size(); }
    /// Uses that came where the period has none like it.
    uint64_t strays() const { return strays_; }

private:
    static constexpr size_t kNoFrame = SIZE_MAX;
    static constexpr uint64_t kNever = UINT64_MAX;

    struct Plan {
        Load load;
        uint64_t ready_at = 0;  // The last use of what leaves.
    };
    struct Segment {
        size_t size_bytes = 0;  // 0: there is none with these offsets now.
        uint64_t until = 0;     // It is for uses before this time.
    };
    struct Candidate;

    const ItemList& operation_at(uint64_t time) const {
        return period_.operations[time % length()];
    }
    uint64_t next_use(uint32_t item, uint64_t from) const;
    uint64_t planned_next_use(uint32_t item);
    uint64_t used_bytes_before(uint64_t time) const;
    uint64_t spared_from(uint64_t time) const;
    std::optional<Plan> plan(uint32_t item, uint64_t time,
                             const std::function<bool(uint32_t)>& is_kept);
    bool loses_frame_before(uint32_t item, uint64_t time) const {
        return has_frame(item) && time >= segments_[offset_[item] / kSegmentSpan].until;
    }
    std::optional<Load> ready_load(const std::function<bool(uint32_t)>& is_busy);
    bool crowds_arena(size_t need) const;
    void plan_anew();
    std::optional<Plan> plan_use(uint32_t item, uint64_t time,
                                 const std::function<bool(uint32_t)>& is_busy = {});
    void look_for_window(size_t begin, size_t end, size_t need, uint64_t spared,
                         const std::function<bool(uint32_t)>& is_kept,
                         std::optional<Candidate>* best);
    void check_invariants() const;

    Period period_;
    const size_t lead_bytes_;
    const uint64_t ahead_bytes_;
    std::vector<std::vector<uint32_t>> uses_;  // Of each item: its operations, rising.
    std::vector<uint64_t> bytes_before_;       // Of uses before each operation; one more: in all.
    std::vector<size_t> offset_;               // Of each item's frame.
    std::vector<uint64_t> last_use_;           // Of each item, up to planned_: a time plus one.
    std::vector<uint64_t> next_use_;           // Of each item, from planned_ on, once asked for.
    std::vector<bool> removed_;
    std::vector<bool> fixed_;
    std::map<size_t, uint32_t> frames_;  // By offset.
    size_t all_item_bytes_ = 0;
    std::vector<Segment> segments_;  // The arena's first.
    uint64_t now_ = 0;               // The operator that began last.
    uint64_t done_ = 0;              // All before this time have ended.
    uint64_t planned_ = 0;           // All uses before this time, and
    size_t planned_uses_ = 0;        // so many of this one's, are provided for.
    uint64_t looked_at_ = 0;         // outlived() has seen all operations before this time.
    std::optional<Plan> pending_;
    uint64_t strays_ = 0;
    int strays_in_a_row_ = 0;
};

}  // namespace trainstream
