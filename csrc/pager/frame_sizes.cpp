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

// Sizes of extra frames that are compared; more change the choice by little.
constexpr size_t kSizesTried = 64;

// Extra frames of less than this part of the arena are not worth opening and closing.
constexpr size_t kWorthwhilePart = 8;

constexpr size_t kSegments = 6;

// Operations that extra frames must last for, or opening them costs more than they serve.
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

/// The part of all bytes used in a period that is used by the operations of `allowed`.
double served_part(const Period& period, const std::vector<bool>& allowed) {
    double all = 0;
    double served = 0;
    for (size_t operation = 0; operation < allowed.size(); ++operation) {
        for (const uint32_t item : period.operations[operation]) {
            const auto bytes = static_cast<double>(period.item_bytes[item]);
            all += bytes;
            served += allowed[operation] ? bytes : 0;
        }
    }
    return all > 0 ? served / all : 0;
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
        return sizes.choose_extra(period, free_bytes, item_bytes);
    };
    if (room_bytes >= usable_bytes / kUsefulPart) {
        set(room_bytes);
    } else if (set(std::max<uint64_t>(room_bytes, least_bytes(usable_bytes))) < kServedMostly) {
        set(usable_bytes / kUsefulPart);
    }
    return sizes;
}

/// Of the sizes that `free_bytes` (for each operation of the period) allow beside the arena, the
/// one that serves most. Returns the part of all used bytes that is used while there are such
/// frames.
double FrameSizes::choose_extra(const Period& period, const std::vector<uint64_t>& free_bytes,
                                uint64_t item_bytes) {
    const uint64_t most = item_bytes - std::min<uint64_t>(item_bytes, arena_bytes);
    std::vector<uint64_t> sizes;
    sizes.reserve(free_bytes.size());
    for (const uint64_t bytes : free_bytes) {
        sizes.push_back(std::min(bytes - std::min<uint64_t>(bytes, arena_bytes), most));
    }
    std::sort(sizes.begin(), sizes.end());
    extra_bytes = 0;
    double best = 0;
    double served_then = 0;
    const size_t stride = std::max<size_t>(1, sizes.size() / kSizesTried);
    for (size_t i = 0; i < sizes.size(); i += stride) {
        const std::vector<bool> allowed = where_at_least(free_bytes, arena_bytes + sizes[i]);
        const double served = served_part(period, allowed);
        if (served * static_cast<double>(sizes[i]) > best) {
            best = served * static_cast<double>(sizes[i]);
            served_then = served;
            extra_bytes = sizes[i] / kBlockAlignment * kBlockAlignment;
            extra_allowed = allowed;
        }
    }
    if (extra_bytes < arena_bytes / kWorthwhilePart) {
        extra_bytes = 0;
        served_then = 0;
    }
    choose_segments(period);
    return served_then;
}

void FrameSizes::choose_segments(const Period& period) {
    // Room is in several places where other blocks lie between: several segments find it. One has
    // the largest item in it, unless that takes more than half.
    const size_t largest = align_up(
        *std::max_element(period.item_bytes.begin(), period.item_bytes.end()), kBlockAlignment);
    segment_bytes = extra_bytes / kSegments / kBlockAlignment * kBlockAlignment;
    if (largest > segment_bytes && largest <= extra_bytes / 2) {
        segment_bytes = largest;
    }
}

uint64_t FrameSizes::extra_ends(uint64_t time) const {
    if (extra_bytes == 0) {
        return time;
    }
    const size_t length = extra_allowed.size();
    uint64_t end = time;
    while (end < time + length && extra_allowed[end % length]) {
        ++end;
    }
    return end;
}

bool FrameSizes::extra_is_worthwhile(uint64_t time) const {
    return segment_bytes != 0 && extra_ends(time) > time + kShortest;
}

}  // namespace trainstream
