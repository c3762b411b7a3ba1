#include "pager/frame_arena.h"

#include <iterator>
#include <utility>

#include "base/assert.h"

namespace trainstream {

void FrameArena::give(size_t offset, size_t size_bytes, std::vector<Event> events) {
    TS_ASSERT_LE(offset + size_bytes, size_bytes_);
    const bool fresh =
        waiting_.emplace(offset, Waiting{offset + size_bytes, std::move(events)}).second;
    TS_ASSERT(fresh);
    static_cast<void>(fresh);
}

std::vector<Event> FrameArena::take(size_t offset, size_t size_bytes) {
    const size_t end = offset + size_bytes;
    auto part = waiting_.upper_bound(offset);
    if (part != waiting_.begin() && std::prev(part)->second.end > offset) {
        --part;
    }
    std::vector<Event> events;
    while (part != waiting_.end() && part->first < end) {
        events.insert(events.end(), part->second.events.begin(), part->second.events.end());
        const size_t begin = part->first;
        Waiting rest = std::move(part->second);
        part = waiting_.erase(part);
        if (begin < offset) {
            waiting_.emplace(begin, Waiting{offset, rest.events});
        }
        if (rest.end > end) {
            waiting_.emplace(end, std::move(rest));
            break;
        }
    }
    return events;
}

}  // namespace trainstream
