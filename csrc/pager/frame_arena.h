// csrc/pager/frame_arena.h: the device memory of frames, and what must be done before it is reused.
//
// Apart from the device's own pool: a block from there belongs to a stream's order of work, so a
// load into it would hold that stream up until the bytes before it have left. A frame waits for
// what the streams that used its bytes had been given when these left, and no stream waits for a
// frame but to use it.
#pragma once

#include <cstddef>
#include <map>
#include <vector>

#include "device/device.h"
#include "device/device_memory.h"

namespace trainstream {

/// Owner: the pager's plan. Lock: the pager's mutex.
///
/// Invariant: no two of the parts that wait overlap, and none overlaps a frame in use.
class FrameArena {
public:
    FrameArena(void* begin, size_t size_bytes)
        : begin_(static_cast<char*>(begin)), size_bytes_(size_bytes) {}

    void* begin() const { return begin_; }
    size_t size_bytes() const { return size_bytes_; }
    Region range() const {
        const auto begin = reinterpret_cast<uintptr_t>(begin_);
        return {begin, begin + size_bytes_};
    }
    void* at(size_t offset) const { return begin_ + offset; }
    size_t offset_of(const void* address) const {
        return static_cast<size_t>(static_cast<const char*>(address) - begin_);
    }

    /// [offset, offset + size_bytes) is no frame any more, once `events` are done.
    void give(size_t offset, size_t size_bytes, std::vector<Event> events);
    /// It becomes one: what must be done before new bytes may come.
    std::vector<Event> take(size_t offset, size_t size_bytes);

private:
    struct Waiting {
        size_t end = 0;
        std::vector<Event> events;
    };

    char* const begin_;
    const size_t size_bytes_;
    std::map<size_t, Waiting> waiting_;  // By offset.
};

}  // namespace trainstream
