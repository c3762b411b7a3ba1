#include "base/free_extents.h"

#include <iterator>

#include "base/assert.h"

namespace trainstream {

void FreeExtents::insert(uintptr_t begin, size_t size_bytes) {
    TS_ASSERT_GT(size_bytes, size_t{0});
    auto next = by_address_.upper_bound(begin);
    if (next != by_address_.begin()) {
        const auto previous = std::prev(next);
        const uintptr_t previous_end = previous->first + previous->second;
        TS_ASSERT_LE(previous_end, begin);  // Else: given back twice.
        if (previous_end == begin && !is_border(begin)) {
            begin = previous->first;
            size_bytes += previous->second;
            erase(previous);
        }
    }
    if (next != by_address_.end()) {
        TS_ASSERT_LE(begin + size_bytes, next->first);  // Else: given back twice.
        if (begin + size_bytes == next->first && !is_border(next->first)) {
            size_bytes += next->second;
            erase(next);
        }
    }
    by_address_.emplace(begin, size_bytes);
    by_size_.emplace(size_bytes, begin);
    free_bytes_ += size_bytes;
}

std::optional<uintptr_t> FreeExtents::take(size_t size_bytes) {
    TS_ASSERT_GT(size_bytes, size_t{0});
    const auto fit = by_size_.lower_bound({size_bytes, 0});
    if (fit == by_size_.end()) {
        return std::nullopt;
    }
    const auto [extent_bytes, begin] = *fit;
    erase(by_address_.find(begin));
    if (extent_bytes > size_bytes) {
        // Not insert(): the rest of a joined extent has no free neighbour to look for.
        by_address_.emplace(begin + size_bytes, extent_bytes - size_bytes);
        by_size_.emplace(extent_bytes - size_bytes, begin + size_bytes);
        free_bytes_ += extent_bytes - size_bytes;
    }
    return begin;
}

std::optional<uintptr_t> FreeExtents::take_high(size_t size_bytes) {
    TS_ASSERT_GT(size_bytes, size_t{0});
    for (auto extent = by_address_.end(); extent != by_address_.begin();) {
        --extent;
        const auto [begin, extent_bytes] = *extent;
        if (extent_bytes < size_bytes) {
            continue;
        }
        erase(extent);
        const size_t rest_bytes = extent_bytes - size_bytes;
        if (rest_bytes > 0) {
            insert(begin, rest_bytes);
        }
        return begin + rest_bytes;
    }
    return std::nullopt;
}

void FreeExtents::remove(uintptr_t begin, size_t size_bytes) {
    const auto extent = by_address_.find(begin);
    TS_ASSERT(extent != by_address_.end());
    TS_ASSERT_EQ(extent->second, size_bytes);
    erase(extent);
}

size_t FreeExtents::bytes_ending_at(uintptr_t end) const {
    const auto next = by_address_.lower_bound(end);
    if (next == by_address_.begin()) {
        return 0;
    }
    const auto last = std::prev(next);
    return last->first + last->second == end ? last->second : 0;
}

void FreeExtents::erase(ByAddress::iterator extent) {
    free_bytes_ -= extent->second;
    by_size_.erase({extent->second, extent->first});
    by_address_.erase(extent);
}

}  // namespace trainstream
