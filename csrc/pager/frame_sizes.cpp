#include "pager/frame_sizes.h"

#include <algorithm>

#include "base/bytes.h"

namespace trainstream {

namespace {

// Loads in flight that hide the way: at 50 GB/s it is 15 ms, a few operators' time. More would take
// frames from what is needed again soon (looking 64 loads ahead instead of 8 cost 17 %).
constexpr size_t kLeadBytes = 768 * kMiB;

// Memory beside the frames that is free at the recorded peak, as a part of the whole: torch's pool
// fits large blocks between large blocks, and some of it lies between them.
constexpr uint64_t kMarginPart = 32;

// The arena has a twelfth (a layer and what is on its way) of what there is or, where extra frames
// serve most of the step, a 32nd: then it only bridges the moments without them.
constexpr uint64_t kUsefulPart = 12;
constexpr uint64_t kLeastPart = 32;
constexpr double kServedMostly = 0.8;

// Extra frames of less than this part of the arena are not worth opening and closing.
constexpr size_t kWorthwhilePart = 8;

// Opening and closing one costs tens of microseconds, and so a step a few milliseconds at most.
constexpr size_t kMostSegments = 16;

// Operations that a segment must last for, or opening it costs more than it serves.
constexpr size_t kShortest = 8;

/// The operations with that much free room in a row, around the period's end as well. Those beside
/// others without it count as without: the room is needed from the middle of one on.
std::vector<bool> where_at_least(const std::vector<uint64_t>& free_bytes, uint64_t size_bytes) {
    const size_t length = free_bytes.size();
    const auto has = [&](size_t i) { return free_bytes[i % length] >= size_bytes; };
    std::vector<bool> allowed(length);
    for (size_t i = 0; i < length; ++i) {
        allowed[i] = has(i + length - 1) && has(i) && has(i + 1);
    }
    for (size_t i = 0; i < length; ++i) {
        size_t run = 0;
        while (run < length && allowed[(i + run) % length]) {
            ++run;
        }
        const bool begins = !allowed[(i + length - 1) % length];
        for (size_t k = 0; begins && run < kShortest && k < run; ++k) {
            allowed[(i + k) % length] = false;
        }
    }
    return allowed;
}

/// The part of all bytes used in a period that is used while there are so many segments.
double served_part(const Period& period, const std::vector<size_t>& segments, size_t least) {
    double all = 0;
    double served = 0;
    for (size_t operation = 0; operation < segments.size(); ++operation) {
        for (const uint32_t item : period.operations[operation]) {
            const auto bytes = static_cast<double>(period.item_bytes[item]);
            all += bytes;
            served += segments[operation] >= least ? bytes : 0;
        }
    }
    return all > 0 ? served / all : 0;
}

/// One holds the largest item, unless that takes more than half of all there is room for.
size_t segment_for(const Period& period, uint64_t most_bytes) {
    const size_t largest = align_up(
        *std::max_element(period.item_bytes.begin(), period.item_bytes.end()), kBlockAlignment);
    const size_t least = most_bytes / kMostSegments;
    return (largest <= most_bytes / 2 ? std::max(largest, least) : least) / kBlockAlignment *
           kBlockAlignment;
}

}  // namespace

size_t FrameSizes::least_bytes(uint64_t usable_bytes) { return usable_bytes / kLeastPart; }

size_t FrameSizes::lead_bytes(size_t frames_bytes) {
    return std::min(kLeadBytes, frames_bytes / 4);
}

FrameSizes FrameSizes::choose(const Period& period, uint64_t usable_bytes,
                              const std::vector<uint64_t>& beside_bytes,
                              uint64_t arena_limit_bytes) {
    uint64_t item_bytes = 0;
    for (const size_t bytes : period.item_bytes) {
        item_bytes += align_up(bytes, kBlockAlignment);
    }
    std::vector<uint64_t> free_bytes;
    for (const uint64_t beside : beside_bytes) {
        const uint64_t used = beside + usable_bytes / kMarginPart;
        free_bytes.push_back(usable_bytes - std::min(usable_bytes, used));
    }
    FrameSizes sizes;
    const uint64_t room_bytes = *std::min_element(free_bytes.begin(), free_bytes.end());
    const auto set = [&](uint64_t bytes) {
        sizes.arena_bytes =
            std::min({bytes, item_bytes, arena_limit_bytes}) / kBlockAlignment * kBlockAlignment;
        sizes.choose_extra(period, free_bytes, item_bytes);
    };
    // Of the period, the part that has as many frames as the larger arena would be.
    const auto served = [&] {
        const uint64_t missing = usable_bytes / kUsefulPart - sizes.arena_bytes;
        const size_t segment = std::max<size_t>(sizes.segment_bytes, 1);
        return served_part(period, sizes.segments, (missing + segment - 1) / segment);
    };
    if (room_bytes >= usable_bytes / kUsefulPart) {
        set(room_bytes);
        return sizes;
    }
    set(std::max<uint64_t>(room_bytes, least_bytes(usable_bytes)));
    if (served() < kServedMostly) {
        set(usable_bytes / kUsefulPart);
    }
    return sizes;
}

/// `free_bytes`: for each operation of the period.
void FrameSizes::choose_extra(const Period& period, const std::vector<uint64_t>& free_bytes,
                              uint64_t item_bytes) {
    const uint64_t most_free = *std::max_element(free_bytes.begin(), free_bytes.end());
    const uint64_t most = std::min(item_bytes, most_free) -
                          std::min<uint64_t>(arena_bytes, std::min(item_bytes, most_free));
    extra_bytes = 0;
    segment_bytes = segment_for(period, most);
    segments.assign(free_bytes.size(), 0);
    if (segment_bytes == 0 || most < arena_bytes / kWorthwhilePart) {
        segment_bytes = 0;
        return;
    }
    for (size_t count = 1; count <= most / segment_bytes; ++count) {
        const std::vector<bool> allowed =
            where_at_least(free_bytes, arena_bytes + count * segment_bytes);
        for (size_t i = 0; i < allowed.size(); ++i) {
            segments[i] = allowed[i] ? count : segments[i];
        }
    }
    extra_bytes = *std::max_element(segments.begin(), segments.end()) * segment_bytes;
}

uint64_t FrameSizes::extra_ends(uint64_t time, size_t segments_wanted) const {
    const size_t length = segments.size();
    uint64_t end = time;
    while (segments[end % length] >= segments_wanted) {
        if (++end == time + length) {
            return UINT64_MAX;
        }
    }
    return end;
}

void FrameSizes::note_less_room(uint64_t time, size_t segments_left) {
    const size_t length = segments.size();
    const size_t first = (time + length - 1) % length;
    const size_t wanted = segments[time % length];
    segments[first] = std::min(segments[first], segments_left);
    for (uint64_t i = time; i < time + length && segments[i % length] == wanted; ++i) {
        segments[i % length] = std::min(wanted, segments_left);
    }
}

bool FrameSizes::extra_is_worthwhile(uint64_t time, size_t segments_wanted) const {
    const uint64_t most = segment_bytes == 0 ? 0 : extra_bytes / segment_bytes;
    return segments_wanted <= most && extra_ends(time, segments_wanted) > time + kShortest;
}

}  // namespace trainstream
